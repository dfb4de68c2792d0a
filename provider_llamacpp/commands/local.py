"""``local``: engine, router, llama-server and worker on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import ProviderLlamacppError
from ..settings import DEFAULT_URL, Settings
from .terminal import Terminal, hold_logs, size

if TYPE_CHECKING:
    from ..local.stack import LocalStack
    from ..worker import ProviderWorker
    from .terminal import Progress

DESCRIPTION = """\
Keep a loopback engine, a small router, a llama-server and a worker up on this machine,
and print what to paste next. For trying things: production runs on the iii engine.
Takes a llama-server that listens already, else starts one. Ctrl-C ends all of it.
"""
EXAMPLE = """\
examples:
  provider-llamacpp local
  provider-llamacpp local --model ./qwen3-0.6b-q4.gguf
  provider-llamacpp local --model ./models/
  provider-llamacpp local --model ggml-org/Qwen3-0.6B-GGUF:Q4_0
"""
HOST = "127.0.0.1"
DOWNLOADING = "*.downloadInProgress"
"""What llama-server calls a file that it downloads. It shows its own progress to a terminal only,
so what there is of the file has to tell."""
FRESH = 30.0
"""Seconds without growth after which such a file is one that somebody gave up."""
_HUGGING_FACE = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a GGUF file, a directory of them, or a Hugging Face name for -hf (default: the "
        "llama-server that runs, else a tiny demo model)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        metavar="N",
        help=f"of the engine (default {_usual_port()}, or a free one if that is taken)",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or not int(text) < 65536:
        raise argparse.ArgumentTypeError("must be a number from 0 to 65535")
    return int(text)


def _usual_port() -> int:
    port = urlsplit(DEFAULT_URL).port
    assert port is not None
    return port


def run(settings: Settings, options: argparse.Namespace) -> int:
    """The command."""
    from ..local.stack import LocalStack

    _check_model(options.model)
    hold_logs(settings)
    terminal, notes = Terminal.of(sys.stdout), Terminal.of(sys.stderr)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as parts:
            with notes.progress("llama-server") as progress:
                waiting = Waiting(progress, options.model, os.environ)
                port = choose_port(options.port)
                stack = LocalStack(
                    settings,
                    model=options.model,
                    # A download takes as long as it takes; who waits sees how far it is.
                    ready_timeout=float("inf"),
                    progress=waiting.update,
                    engine_port=port,
                )
                parts.enter_context(stack)
            taken = None if port or options.port is not None else _usual_port()
            return _keep(stack, settings, terminal, notes, taken)
    except KeyboardInterrupt:
        return 0


def _keep(
    stack: LocalStack, settings: Settings, terminal: Terminal, notes: Terminal, taken: int | None
) -> int:
    """:param taken: the port that the engine would have had"""
    from ..logs import set_up

    for line in hints(stack.settings, facts(stack), taken=taken):
        terminal.line(line)
    set_up(settings.log_level, settings.log_json)
    try:
        while not stack.worker.wait(0.5):
            if stack.llama.returncode is not None:
                notes.line(("llama-server has ended:", "bad"))
                for line in stack.llama.log_tail(8):
                    notes.line(f"  {line}")
                return 1
    except KeyboardInterrupt:
        if stack.worker.stats()["active_streams"]:
            notes.line("waiting for the streams that run; Ctrl-C again cuts them")
        _stop(stack.worker)
    return 0


def _stop(worker: ProviderWorker) -> None:
    """Stop the worker before what it is connected to, or it would complain of the loss. On a thread
    of its own, so that a second Ctrl-C ends the waiting and not the stop."""
    stopping = threading.Thread(target=worker.stop, name="stop")
    try:
        stopping.start()
        stopping.join()
    except KeyboardInterrupt:
        worker.stop(drain=0)
        stopping.join()


def _check_model(model: str | None) -> None:
    """:raises ProviderLlamacppError: for what looks like a path to nothing, which llama-server
    would take for a name to download"""
    if model is None or Path(model).expanduser().exists() or _HUGGING_FACE.fullmatch(model):
        return
    raise ProviderLlamacppError(
        f"--model {model}: there is no such file or directory, and a Hugging Face name has the "
        "form OWNER/NAME or OWNER/NAME:QUANT"
    )


def choose_port(wanted: int | None) -> int:
    """The engine's port; 0 leaves the choice to the system.

    :raises ProviderLlamacppError: if the one that is wanted is taken
    """
    port = _usual_port() if wanted is None else wanted
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        if wanted is None:
            return 0
        # The socket module adds the address to the words of the system.
        why = os.strerror(error.errno) if error.errno else error
        raise ProviderLlamacppError(f"--port {port} cannot be used: {why}") from error
    return port


# -- waiting ----------------------------------------------------------------------------------


class Waiting:
    """What is shown until the server is ready.

    :param model: what it was asked for
    """

    def __init__(self, progress: Progress, model: str | None, environ: Mapping[str, str]) -> None:
        self._progress = progress
        self._folders: list[Path] = []
        path = Path(model).expanduser() if model else None
        self._size = f" ({size(path.stat().st_size)})" if path and path.is_file() else ""
        if model and path and not path.exists():
            self._folders = cache_folders(model, environ)
        self._seen: tuple[float, int] | None = None

    def update(self, state: str, seconds: float) -> None:
        """As :meth:`..local.llama.LlamaServer.wait_ready` calls it."""
        note = "starting"
        if state == "loading":
            note = f"loading the model{self._size}"
        elif (done := downloaded(self._folders)) is not None:
            # The rate since the first look: a download that goes on began before it.
            if self._seen is None:
                self._seen = seconds, done
            spent, grown = seconds - self._seen[0], done - self._seen[1]
            rate = f", {size(round(grown / spent))}/s" if spent >= 1.0 else ""
            note = f"downloading, {size(done)} so far{rate}"
        self._progress.update(seconds, note=note)


def cache_folders(name: str, environ: Mapping[str, str]) -> list[Path]:
    """Where llama-server puts what it downloads, by its age: it shares the cache of Hugging Face
    since 2026, and had one of its own before."""
    home = Path.home()
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    hubs = [
        environ.get("LLAMA_CACHE"),
        environ.get("HF_HUB_CACHE"),
        environ.get("HF_HOME") and Path(environ["HF_HOME"]) / "hub",
        cache / "huggingface" / "hub",
    ]
    owns = [
        environ.get("LLAMA_CACHE"),
        cache / "llama.cpp",
        home / "Library" / "Caches" / "llama.cpp",
        environ.get("LOCALAPPDATA") and Path(environ["LOCALAPPDATA"]) / "llama.cpp",
    ]
    repository = "models--" + name.partition(":")[0].replace("/", "--")
    found = [Path(each) / repository / "blobs" for each in hubs if each]
    return [*found, *(Path(each) for each in owns if each)]


def downloaded(folders: list[Path], clock: float | None = None) -> int | None:
    """Bytes of the files that are being downloaded; None if none is."""
    now = time.time() if clock is None else clock
    sizes = []
    for path in (path for folder in folders for path in folder.glob(DOWNLOADING)):
        try:
            found = path.stat()
        except OSError:
            continue  # it has just got its real name
        if now - found.st_mtime < FRESH:
            sizes.append(found.st_size)
    return sum(sizes) if sizes else None


# -- what to paste ----------------------------------------------------------------------------


def facts(stack: LocalStack) -> dict[str, Any]:
    """What :func:`hints` tells of the server."""
    llama = stack.llama
    origins = {
        "api_url": "as named",
        "running": "was running already",
        "program": f"started from {llama.program}",
        "xllamacpp": "started from the xllamacpp package",
    }
    server = stack.worker.stats()["server"]
    refused = server.get("state") == "refused"
    return {
        "url": llama.url,
        "origin": origins[llama.source],
        "models": server["models"],
        "refused": refused,
        "needs_key": refused or stack.settings.api_key is not None,
    }


def hints(
    settings: Settings,
    server: Mapping[str, Any],
    *,
    taken: int | None = None,
    windows: bool = os.name == "nt",
) -> Iterator[str]:
    """What runs where, and lines to paste.

    :param settings: of the worker that runs
    :param taken: the port that the engine would have had
    """
    other = "" if taken is None else f" (port {taken} is taken)"
    yield f"engine        {settings.url}{other}"
    yield f"llama-server  {server['url']} ({server['origin']})"
    models = server["models"]
    for each in models[:5]:
        context = f"{each['context_window']} tokens of context"
        more = context if each["state"] == "loaded" else each["state"]
        yield f"model         {each['id']} ({more})"
    if len(models) > 5:
        yield f"              and {len(models) - 5} more: provider-llamacpp models"
    if server["refused"]:
        yield f"model         none: llama-server refuses the key (set {settings.key_variable})"
    elif not models:
        yield "model         none yet (provider-llamacpp doctor says why)"
    yield ""
    yield "Paste into another terminal:"
    yield ""
    which = "" if settings.id == Settings().id else f" --id {settings.id}"
    yield f"  {'set' if windows else 'export'} III_URL={settings.url}"
    yield f'  provider-llamacpp chat{which} "Hello"'
    yield f"  provider-llamacpp status{which}"
    yield ""
    yield "Or ask llama-server itself:"
    yield ""
    yield from _curl(server, settings.key_variable, windows)
    yield ""
    yield "Ctrl-C ends all of it."


def _curl(server: Mapping[str, Any], key_variable: str, windows: bool) -> Iterator[str]:
    model = server["models"][0]["id"] if server["models"] else "default"
    content = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    body = json.dumps(content, separators=(",", ":"))
    quoted = '"' + body.replace('"', '\\"') + '"' if windows else shlex.quote(body)
    more = "^" if windows else "\\"
    key = f"%{key_variable}%" if windows else f"${key_variable}"
    yield f"  curl {server['url']}/v1/chat/completions {more}"
    yield f'    -H "Content-Type: application/json" {more}'
    if server["needs_key"]:
        yield f'    -H "Authorization: Bearer {key}" {more}'
    yield f"    -d {quoted}"
