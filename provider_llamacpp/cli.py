# PYTHON_ARGCOMPLETE_OK
"""The command line: flags, logging, signals, exit codes.

``--help`` and ``--version`` import nothing of the worker: a small board answers them at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ._version import VERSION

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from .notify import Notifier
    from .settings import Settings
    from .worker import ProviderWorker

PROGRAM = "provider-llamacpp"
WIDTH = 79
"""Columns of the help."""
USUAL_URL = "ws://127.0.0.1:49134"
"""That of the settings, written once more: to import them takes longer than all else that
``--help`` needs. A test compares the two."""
DESCRIPTION = (
    "Joins llama-server to the iii engine: serves provider::llamacpp::stream, abort, embed, "
    "count_tokens, refresh_models, on_router_ready and status on the bus. Without a command it "
    "runs the worker."
)
RUN_EXAMPLE = """\
examples:
  provider-llamacpp
  provider-llamacpp --url ws://10.0.0.2:49134 --api-url http://127.0.0.1:8080
  PROVIDER_LLAMACPP_MAX_STREAMS=8 provider-llamacpp --log-json
"""
COMMANDS = {
    "chat": "stream one answer to the terminal",
    "doctor": "check the whole path and say what to mend",
    "status": "watch a running worker",
    "models": "list what the server serves",
    "embed": "vectors, or a table of similarities",
    "count-tokens": "count the tokens of a prompt",
    "bench": "measure this set-up, through the worker and beside it",
    "local": "keep engine, router, llama-server and worker up on this machine",
    "service": "print a systemd unit",
}
"""Each is a module of :mod:`.commands`, imported only when the command line names it."""

TARGETS = (
    "x86_64-apple-darwin",
    "aarch64-apple-darwin",
    "i686-pc-windows-msvc",
    "x86_64-pc-windows-msvc",
    "aarch64-pc-windows-msvc",
    "x86_64-unknown-linux-gnu",
    "aarch64-unknown-linux-gnu",
    "x86_64-unknown-linux-musl",
    "armv7-unknown-linux-gnueabihf",
)


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The command line, with the arguments of those commands that ``arguments`` name."""
    import argparse
    import textwrap

    formatter = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog=PROGRAM,
        description=textwrap.fill(DESCRIPTION, WIDTH),
        epilog=RUN_EXAMPLE,
        formatter_class=formatter,
    )
    top.add_argument("--version", action="version", version=f"{PROGRAM} {VERSION}")
    top.add_argument(
        "--manifest", action="store_true", help="print the registry manifest as JSON and exit"
    )
    _add_settings(top)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=formatter)
        if name in arguments:
            module = command_module(name)
            command.description = textwrap.fill(module.DESCRIPTION, WIDTH)
            command.epilog = module.EXAMPLE
            module.add_arguments(command)
            _add_settings(command, again=True)
    return top


def command_module(name: str) -> Any:
    """The module of a command."""
    import importlib

    return importlib.import_module(f".commands.{name.replace('-', '_')}", __package__)


def _add_settings(to: argparse.ArgumentParser, *, again: bool = False) -> None:
    """The settings' flags; ``again`` repeats them behind a command without hiding the first."""
    import argparse

    def add(name: str, help: str, **more: Any) -> None:
        more.setdefault("default", argparse.SUPPRESS if again else None)
        to.add_argument(name, help=argparse.SUPPRESS if again else help, **more)

    add("--url", f"the engine's address (env III_URL, III_WS_URL; default {USUAL_URL})")
    add("--config", "accepted and ignored: the router holds the configuration", metavar="PATH")
    add(
        "--id",
        "provider id (default llamacpp); again for more servers: --id pi5=http://pi5:8080",
        action="append",
        metavar="ID[=URL]",
    )
    add("--api-url", "llama-server's address where the router resolves none", metavar="URL")
    add("--ca-file", "CA certificates (PEM) for https and wss", metavar="PEM")
    add("--client-cert", "client certificate and key in one file", metavar="PEM")
    add("--max-streams", "streams at once (default 64)", type=int, metavar="N")
    add(
        "--ping-interval", "silence before a ping frame (default 25)", type=float, metavar="SECONDS"
    )
    add("--fat-deltas", "whole message in each delta, for old routers", action="store_true")
    add(
        "--resume",
        "take broken streams up again (default auto: of servers on other machines)",
        choices=("auto", "on", "off"),
    )
    add(
        "--allow-server-tools",
        "let callers run llama-server's own tools: those that do not write, or NAMES "
        "(read,write_file); they have the rights of the server's process",
        nargs="?",
        const=("read",),
        type=_tools,
        metavar="NAMES",
    )
    add(
        "--allow-model-management",
        "let callers unload, download and delete llama-server's models",
        action="store_true",
    )
    add("--drain", "how long a stop waits for streams (default 10)", type=float, metavar="SECONDS")
    add("--log-level", "default info", choices=("debug", "info", "warning", "error"))
    add("--log-json", "one JSON object per log line", action="store_true")


def _tools(text: str) -> tuple[str, ...]:
    import argparse

    # The value may be left out, so a command behind the flag would be taken for it.
    if text in COMMANDS:
        raise argparse.ArgumentTypeError(f"{text} is a command: put the flag behind it")
    from .settings import tool_names

    return tool_names(text)


LOCAL_PACKAGES = ("websockets", "gguf", "numpy", "xllamacpp")
"""What the extra ``local`` brings: without it the commands that embed an engine cannot run."""

SETTING_FLAGS = (
    "url",
    "id",
    "api_url",
    "ca_file",
    "client_cert",
    "max_streams",
    "ping_interval",
    "fat_deltas",
    "resume",
    "allow_server_tools",
    "allow_model_management",
    "drain",
    "log_level",
    "log_json",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        # Asked for by scripts, and answered before anything is imported.
        print(f"{PROGRAM} {VERSION}")
        return 0
    import os

    if "_ARGCOMPLETE" in os.environ:
        return complete()
    options = parser(arguments).parse_args(arguments)
    if options.manifest:
        print(manifest())
        return 0
    from .errors import ProviderLlamacppError, SettingsError

    try:
        settings = _settings(options)
    except SettingsError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    try:
        if options.command:
            code: int = command_module(options.command).run(settings, options)
            return code
        return run_worker(settings)
    except ProviderLlamacppError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in LOCAL_PACKAGES:
            raise
        from .commands.installing import pip_install

        print(
            f"{PROGRAM}: the embedded engine needs the package {package}: {pip_install('local')}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130


def _settings(options: argparse.Namespace) -> Settings:
    """What flags and environment say; what of them means nothing is told.

    :raises SettingsError: naming the setting that does not fit
    """
    import os

    from .settings import check_files, from_environment, unknown_variables

    flags = {name: getattr(options, name, None) for name in SETTING_FLAGS}
    settings = from_environment(os.environ, **flags)
    if options.command != "service":  # its unit may be for another machine
        check_files(settings)
    for variable in unknown_variables(os.environ):
        print(f"{PROGRAM}: {variable} is no setting, and ignored", file=sys.stderr)
    if options.config:
        print(
            f"{PROGRAM}: --config {options.config} is ignored: configuration comes from the "
            "router, flags and environment",
            file=sys.stderr,
        )
    return settings


def complete() -> int:
    """Tell the shell how its line may go on; ``argcomplete`` answers and ends the process.

    Without the package nothing is told, and above all nothing is run.
    """
    try:
        import argcomplete
    except ImportError:
        return 1
    argcomplete.autocomplete(parser(tuple(COMMANDS)))
    return 1


def manifest() -> str:
    """The registry's manifest (provider protocol 12)."""
    import json

    return json.dumps(
        {
            "name": PROGRAM,
            "version": VERSION,
            "description": DESCRIPTION,
            "default_config": {},
            "supported_targets": TARGETS,
        },
        indent=2,
    )


def run_worker(settings: Settings) -> int:
    """Run the worker until a signal or a fatal error ends it."""
    import os
    import signal
    import threading
    from queue import SimpleQueue

    from .logs import set_up
    from .notify import Notifier
    from .worker import ProviderWorker

    set_up(settings.log_level, settings.log_json)
    # A small board has 64 streams at most a thread each: 8 MiB of address space apiece is more
    # than a 32-bit system has. 512 KiB holds the deepest call by far.
    threading.stack_size(512 * 1024)
    worker = ProviderWorker(settings)
    # Handlers only note the signal: put() of this queue is made for it, locks are not.
    signals: SimpleQueue[int] = SimpleQueue()
    for name in ("SIGINT", "SIGTERM"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: signals.put(number))
    worker.start()
    return _wait(worker, signals, Notifier(os.environ))


def _wait(worker: ProviderWorker, signals: Any, notifier: Notifier) -> int:
    """First signal: drain. Second: cut. Exit code 0 for both, 1 if the worker cannot go on."""
    import threading
    from queue import Empty

    from .errors import FatalError

    stopping: threading.Thread | None = None
    while True:
        try:
            signals.get(timeout=0.5)
        except Empty:
            connected = worker.wait_connected(0)
            status = "serving" if connected else "the engine is not reached"
            notifier.tick(ready=connected, alive=worker.alive, status=status)
            try:
                if worker.wait(0.01):
                    return 0
            except FatalError as error:
                print(f"{PROGRAM}: {error} (--id names this one)", file=sys.stderr)
                return 1
            continue
        if stopping is None:
            notifier.stopping()
            stopping = threading.Thread(target=worker.stop, name="stop")
            stopping.start()
        else:
            worker.stop(drain=0)
