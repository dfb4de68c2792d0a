"""The house rules that a machine can hold: imports go one way, nothing happens at import."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "provider_llamacpp"

LAYERS = [
    {"_version", "errors"},
    {"settings", "jsontext", "logs", "notify"},
    {"arguments", "names", "frames", "body", "delays", "prefill", "slices", "schemas"},
    {"address", "payloads", "classify", "sse", "records"},
    {"rows", "toolcalls"},
    {"convert", "snapshot", "template"},
    {"catalog", "turn"},
    {"assembler", "calls"},
    {"dialing", "link", "wire"},
    {"session", "channelwatch", "invocations", "registrations"},
    {"conversation"},
    {"upstream", "channel", "bus"},
    {"router", "queries", "discovery"},
    {"provider"},
    {"streaming"},
    {"handlers", "watchdog"},
    {"worker"},
    {"cli"},
    {"__main__"},
]
"""A module imports from earlier lines, or from its own."""

EDGES = {"upstream", "channel", "bus"}


def layer_of(module):
    for number, layer in enumerate(LAYERS):
        if module in layer:
            return number
    raise AssertionError(f"{module} has no place in LAYERS")


def imported(path, *, lazily):
    """Own modules that ``path`` imports at its top, or with ``lazily`` anywhere."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if lazily else tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            if node.module is None:
                yield from (alias.name for alias in node.names)
            else:
                yield node.module.split(".")[0]


def modules():
    return sorted(path for path in PACKAGE.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.stem)
def test_imports_go_one_way(path):
    for name in imported(path, lazily=False):
        assert name not in ("commands", "local"), f"{path.stem} imports {name}"
        assert layer_of(name) <= layer_of(path.stem), f"{path.stem} imports {name}"


@pytest.mark.parametrize("name", sorted(EDGES))
def test_edges_do_not_know_each_other(name):
    assert not EDGES.intersection(imported(PACKAGE / f"{name}.py", lazily=True))


def test_the_worker_knows_neither_commands_nor_local():
    for path in modules():
        if path.stem not in ("cli", "__main__"):
            assert not {"commands", "local"}.intersection(imported(path, lazily=True)), path.stem


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


HEAVY = ("requests", "rich", "dataclasses_json", "backoff", "websocket", "asyncio", "marshmallow")


@pytest.mark.parametrize("flag", ["--help", "--version", "--manifest"])
def test_quick_answers_import_nothing_heavy(flag):
    loaded = run(
        "import sys, contextlib, io\n"
        "from provider_llamacpp.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    try: main([{flag!r}])\n"
        "    except SystemExit: pass\n"
        "print(*sys.modules)"
    )
    assert not set(HEAVY).intersection(loaded)
    assert "provider_llamacpp.worker" not in loaded


def test_what_is_rare_is_not_on_the_start_path():
    loaded = run(
        "import sys\n"
        "from provider_llamacpp import ProviderWorker, Settings\n"
        "ProviderWorker(Settings())\n"
        "print(*sys.modules)"
    )
    assert not {"dataclasses_json", "backoff", "asyncio", "rich"}.intersection(loaded)


def test_importing_starts_nothing():
    threads = run(
        "import threading, signal, logging, pkgutil, provider_llamacpp as package\n"
        "before = signal.getsignal(signal.SIGINT), len(logging.getLogger().handlers)\n"
        "for module in pkgutil.iter_modules(package.__path__):\n"
        "    if module.name not in ('__main__', 'local'):\n"
        "        __import__(f'provider_llamacpp.{module.name}')\n"
        "assert before == (signal.getsignal(signal.SIGINT), len(logging.getLogger().handlers))\n"
        "print(*(thread.name for thread in threading.enumerate()))"
    )
    assert threads == ["MainThread"]


def test_public_names():
    import provider_llamacpp

    for name in provider_llamacpp.__all__:
        assert getattr(provider_llamacpp, name) is not None
    with pytest.raises(AttributeError):
        _ = provider_llamacpp.nothing
