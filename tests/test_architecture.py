"""The house rules that a machine can hold: imports go one way, nothing happens at import."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import codemap
import pytest

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "architecture.rst"

PURE = ("transcript", "events")


MODULES = codemap.modules()


def the_map():
    """The modules in the order of the table "The map" of the page."""
    section = PAGE.read_text(encoding="utf-8").partition("\nThe map\n")[2]
    package = ""
    for line in section.partition("\nWho imports")[0].splitlines():
        head = line[:26]
        if found := re.match(r"\*\*(\w+)/\*\*|\*\*at the top", head):
            package = f"{found[1]}." if found[1] else ""
        for name in re.findall(r"``([\w./]+)``", head):
            if not name.endswith("/"):
                yield package + name.lstrip(".")


ORDER = ["_version", *the_map(), "__main__"]


def imported(module, *, lazily=False):
    return codemap.imported(module, MODULES, lazily=lazily)


def test_every_module_has_a_place_on_the_map():
    assert sorted(ORDER) == sorted(MODULES), "docs/architecture.rst, The map: a row for each module"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_up_the_map(module):
    assert module in ORDER, f"{module} has no row on the map (docs/architecture.rst)"
    above = ORDER[: ORDER.index(module)]
    for name in imported(module):
        assert name in above, f"{name} must stand above {module} on the map, or not be imported"


def test_the_walk_sees_imports_of_every_form():
    assert {"settings", "schemas"} <= set(imported("surfaces.table"))  # from ..x import y
    assert "payloads" in imported("handlers")  # from . import x
    assert "bus.engine" in imported("handlers")  # from .x.y import z
    assert "worker" not in imported("cli")
    assert "worker" in imported("cli", lazily=True)


def test_no_package_needs_one_that_needs_it():
    always, later = (
        codemap.imports_between_packages(),
        codemap.imports_between_packages(on_use=True),
    )
    codemap.reduced({name: others | later[name] for name, others in always.items()})
    with pytest.raises(ValueError, match="a -> b -> a"):
        codemap.reduced({"a": {"b"}, "b": {"a"}})


def test_the_embedded_stack_does_not_know_the_commands():
    every = codemap.modules(apart=True)
    for module in every:
        if module.startswith("local."):
            for name in codemap.imported(module, every, lazily=True):
                assert not name.startswith("commands"), f"{module} imports {name}"


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
    # What measures coverage imports and starts things of its own.
    environment = {name: kept for name, kept in os.environ.items() if "COVERAGE" not in name}
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
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
    # Nor what would take longer than the answer itself.
    own = {"provider_llamacpp.worker", "provider_llamacpp.settings", "dataclasses", "logging"}
    assert not own.intersection(loaded)


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
        "import sys, threading, signal, logging, pkgutil, provider_llamacpp as package\n"
        "def hook(event, given):\n"
        "    writes = event == 'open' and set('wax+') & set(str(given[1]))\n"
        "    cached = event == 'open' and '__pycache__' in str(given[0])\n"
        "    if event.startswith(('socket.', 'subprocess.', 'os.putenv', 'os.fork')) or (\n"
        "        writes and not cached\n"
        "    ):\n"
        "        raise AssertionError(f'{event} at import: {given}')\n"
        "sys.addaudithook(hook)\n"
        "before = signal.getsignal(signal.SIGINT), len(logging.getLogger().handlers)\n"
        "for module in pkgutil.walk_packages(package.__path__, 'provider_llamacpp.'):\n"
        "    if not module.name.endswith(('.__main__', '.xserver')):\n"
        "        __import__(module.name)\n"
        "assert before == (signal.getsignal(signal.SIGINT), len(logging.getLogger().handlers))\n"
        "print(*(thread.name for thread in threading.enumerate()))"
    )
    assert threads == ["MainThread"]


def threads_on_the_page():
    """The names in the table of threads, ``(1)`` and the like left out."""
    section = PAGE.read_text(encoding="utf-8").partition("\nThreads\n")[2]
    return set(re.findall(r"^``([^`]+)``", section.partition("\nThe life of")[0], re.MULTILINE))


def test_every_thread_has_a_name_and_a_line_on_the_page():
    threads = codemap.Source(MODULES).threads()
    assert {thread.name for thread in threads} == threads_on_the_page()
    assert {"<id>-engine", "<id>-call-N", "llamacpp-discards"} <= threads_on_the_page()


def test_every_source_of_a_rule_is_on_the_page():
    section = PAGE.read_text(encoding="utf-8").partition("\nWhere a rule comes from\n")[2]
    table = re.split(r"^\*\*(.+)\*\*", section.partition("\nWhere ")[0], flags=re.MULTILINE)
    told = {
        (name, number)
        for name, words in zip(table[1::2], table[2::2], strict=True)
        for number in re.findall(r"\b\d+\b", words)
    }
    cited = set()
    for path in codemap.modules(apart=True).values():
        text = path.read_text(encoding="utf-8")
        cited |= set(
            re.findall(r"(engine protocol|provider protocol|llama-server API) (\d+)", text)
        )
    assert cited and cited <= told, f"not in the table of sources: {cited - told}"


def test_public_names():
    import provider_llamacpp

    for name in provider_llamacpp.__all__:
        assert getattr(provider_llamacpp, name) is not None
    with pytest.raises(AttributeError):
        _ = provider_llamacpp.nothing
