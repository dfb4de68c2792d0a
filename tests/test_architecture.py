"""The house rules that a machine can hold: imports go one way, nothing happens at import."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "provider_llamacpp"

LAYERS = [
    {"_version", "errors"},
    {"jsontext", "logs", "notify", "recent", "summaries"},
    {"settings", "tracing", "typed"},
    {"calls", "schemas"},
    {"transcript.arguments", "transcript.names"},
    {"fields"},
    {"payloads"},
    {"transcript.rows"},
    {"transcript.convert"},
    {"events.classify", "events.sse", "events.prefill", "events.slices"},
    {"events.toolcalls"},
    {"events.snapshot", "events.template"},
    {"events.turn"},
    {"events.assembler"},
    {"server.address", "server.body", "server.modelevents", "server.records"},
    {"server.catalog", "server.dialing", "server.health"},
    {"server.upstream"},
    {"server.asking", "server.discovery", "server.discards", "server.follower"},
    {"server.queries", "server.management"},
    {"server.embeddings", "server.resumable"},
    {"server.resume"},
    {"answers"},
    {"bus.frames", "bus.delays", "bus.link", "bus.wire"},
    {"bus.session", "bus.channelwatch", "bus.invocations", "bus.registrations"},
    {"bus.conversation", "bus.channel"},
    {"bus.engine"},
    {"router"},
    {"provider"},
    {"streaming"},
    {"surfaces.outlet"},
    {"surfaces.context"},
    {
        *("surfaces.infill", "surfaces.metrics", "surfaces.rerank", "surfaces.slots"),
        *("surfaces.texts", "surfaces.thinking", "surfaces.tools", "surfaces.models"),
    },
    {"surfaces.table"},
    {"handlers", "watchdog"},
    {"served"},
    {"chatstream", "prometheus"},
    {"client"},
    {"direct"},
    {"worker"},
    {"cli"},
    {"__main__"},
]
"""A module imports from earlier lines, or from its own."""

PURE = ("transcript", "events")


def modules():
    """Every module but those of the commands and the embedded stack, by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in ("commands", "local") and parts[-1] != "__init__":
            found[".".join(parts)] = path
    return found


MODULES = modules()


def layer_of(module):
    for number, layer in enumerate(LAYERS):
        if module in layer:
            return number
    raise AssertionError(f"{module} has no place in LAYERS")


def imported(module, *, lazily=False):
    """Own modules that ``module`` imports at its top, or with ``lazily`` anywhere."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    package = module.split(".")[:-1]
    for node in ast.walk(tree) if lazily else tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                name = ".".join([*base, alias.name])
                yield name if name in MODULES else ".".join(base)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    for name in imported(module):
        assert not name.startswith(("commands", "local")), f"{module} imports {name}"
        assert layer_of(name) <= layer_of(module), f"{module} imports {name}"


def test_every_layer_exists():
    assert {name for layer in LAYERS for name in layer} == set(MODULES)


@pytest.mark.parametrize("module", [name for name in MODULES if "." in name])
def test_the_two_edges_do_not_know_each_other(module):
    other = {"bus": "server.", "server": "bus."}.get(module.split(".")[0])
    assert other is None or not [
        name for name in imported(module, lazily=True) if name.startswith(other)
    ]


def test_the_worker_knows_neither_commands_nor_local():
    for module in MODULES:
        if module not in ("cli", "__main__"):
            for name in imported(module, lazily=True):
                assert not name.startswith(("commands", "local")), f"{module} imports {name}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith(PURE)])
def test_conversion_does_no_io(module):
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    names = {
        alias.name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not names & {"socket", "threading", "requests", "time", "os", "select", "subprocess"}


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
        "for module in pkgutil.walk_packages(package.__path__, 'provider_llamacpp.'):\n"
        "    if not module.name.endswith(('.__main__', '.xserver')):\n"
        "        __import__(module.name)\n"
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
