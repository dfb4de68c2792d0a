"""The one-file program: its bytes, its bytecode, and that it runs with nothing installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from provider_llamacpp._version import VERSION

ROOT = Path(__file__).parent.parent
MAGIC = importlib.util.MAGIC_NUMBER.hex()
ALONE = ("-I", "-S")
"""Nothing of the environment, nothing installed: only the standard library."""

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("packaging"),
    pytest.mark.thorough,
]


def script(name: str) -> ModuleType:
    """A script of ``packaging/``, which is no package."""
    spec = importlib.util.spec_from_file_location(
        f"packaging_{name}", ROOT / f"packaging/{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def copied(source: Path, target: Path) -> Path:
    """What the archive is made of, in another folder and at another time."""
    for name in ("packaging", "requirements", "provider_llamacpp"):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / name, target / name, ignore=left_out)
    for name in ("setup.cfg", "LICENSE"):
        shutil.copy(source / name, target)
    for path in target.rglob("*"):
        os.utime(path, (2_000_000_000, 2_000_000_000))
    return target


def build(folder: Path, **environ: str) -> Path:
    """The archive made there, with bytecode for the Python that runs the tests."""
    made = folder / "build" / "provider-llamacpp.pyz"
    command = [sys.executable, "packaging/pyz.py", "--python", sys.executable]
    command += ["--wheels", str(ROOT / "build" / "wheels")]
    environ = {**os.environ, **environ}
    told = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if told.returncode == 1 and "cannot be had" in told.stderr:
        pytest.skip(told.stderr)
    assert told.returncode == 0, told
    assert str(made) in told.stdout
    return made


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive; what it was made of is in the folder above the one it is in."""
    return build(copied(ROOT, tmp_path_factory.mktemp("pyz")))


def run(python: str, path: Path, *arguments: str) -> str:
    command = [python, *ALONE, str(path), *arguments]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert told.stderr == ""
    assert told.returncode in (0, 1, 2), told
    return told.stdout


def asked(path: Path, question: str) -> Any:
    """What the program's Python answers after the archive has run, as JSON."""
    text = f"import json, runpy, sys; sys.argv = ['x', '--manifest']\n{RUN}\n{question}"
    command = [sys.executable, *ALONE, "-c", text, str(path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(told.stdout.splitlines()[-1])


RUN = """
path = sys.orig_argv[-1]
try:
    runpy.run_path(path, run_name="__main__")
except SystemExit as end:
    assert end.code == 0
sys.path[:0] = [path + "/bytecode/" + __import__("importlib.util").util.MAGIC_NUMBER.hex(), path]
"""


def other_python(version: str) -> str:
    """A Python of that version, or the test is skipped."""
    if sys.version.startswith(f"{version}."):
        return sys.executable
    installed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")
    for program in (shutil.which(f"python{version}"), *sorted(map(str, installed))):
        # A version manager's stand-in is there for each version, and fails for most.
        if program and subprocess.run([program, "-c", ""], capture_output=True).returncode == 0:
            return program
    pytest.skip(f"no Python {version} here")


def test_the_same_bytes_from_another_folder(made: Path, tmp_path: Path) -> None:
    folder = copied(made.parent.parent, tmp_path)
    again = build(folder, PYTHONHASHSEED="7", TZ="Asia/Tokyo", PYTHONOPTIMIZE="2")
    assert again.read_bytes() == made.read_bytes()


def test_what_is_inside(made: Path) -> None:
    with zipfile.ZipFile(made) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert len(names) == len(archive.infolist())
        compiled = archive.read(f"bytecode/{MAGIC}/provider_llamacpp/cli.pyc")
    # Flags 1: by hash, and never compared with the source (PEP 552).
    assert compiled[4:8] == b"\1\0\0\0"
    assert made.read_bytes().startswith(b"#!/usr/bin/env python3\n")
    assert os.access(made, os.X_OK)
    assert not [each for each in names if each.endswith((".so", ".pyd", ".dll"))]
    assert not [each for each in names if "/tests/" in each or "__pycache__" in each]
    root = made.parent.parent
    modules = {each for each in names if each.endswith(".py")}
    own = {path.relative_to(root).as_posix() for path in (root / "provider_llamacpp").rglob("*.py")}
    assert own | {"typing_extensions.py"} < modules
    left_out = {"__main__.py", "certifi/__init__.py", "certifi/__main__.py", "certifi/core.py"}
    assert {f"bytecode/{MAGIC}/{each}c" for each in modules - left_out} == {
        each for each in names if each.endswith(".pyc")
    }
    licences = {each.split("-")[0] for each in names if ".dist-info/" in each and "LICEN" in each}
    assert {"requests", "certifi", "urllib3", "idna"} <= licences


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_it_runs_where_nothing_is_installed(made: Path, version: str) -> None:
    python = other_python(version)
    assert run(python, made, "--version") == f"provider-llamacpp {VERSION}\n"
    assert json.loads(run(python, made, "--manifest"))["version"] == VERSION


def test_compiled_modules_come_first_and_sources_do_without(made: Path, tmp_path: Path) -> None:
    question = (
        "import provider_llamacpp.cli as ours, idna as theirs\n"
        "print(json.dumps([ours.__file__, theirs.__file__]))"
    )
    tree = f"{made}/bytecode/{MAGIC}"
    files = [f"{tree}/provider_llamacpp/cli.pyc", f"{tree}/idna/__init__.pyc"]
    assert asked(made, question) == files
    bare = tmp_path / "bare.pyz"
    with zipfile.ZipFile(made) as source, zipfile.ZipFile(bare, "w") as target:
        for name in source.namelist():
            if not name.startswith("bytecode/"):
                target.writestr(name, source.read(name))
    files = [f"{bare}/provider_llamacpp/cli.py", f"{bare}/idna/__init__.py"]
    assert asked(bare, question) == files


def test_certificates_are_read_from_inside(made: Path, tmp_path: Path) -> None:
    found = asked(
        made,
        "import os, tempfile; tempfile.tempdir = " + repr(str(tmp_path)) + "\n"
        "from provider_llamacpp.server.upstream import _context\n"
        "known = len(_context(None, None).get_ca_certs())\n"
        "print(json.dumps([known, os.listdir(tempfile.tempdir)]))",
    )
    assert found[0] > 50
    # What was unpacked would be gone when a machine cleans its temporary files.
    assert found[1] == []


def test_the_commands_know_the_archive(made: Path) -> None:
    told = run(sys.executable, made, "doctor", "--json", "--url", "ws://127.0.0.1:9")
    findings = json.loads(told)["findings"]
    packages = next(each for each in findings if each["step"] == "packages")
    assert packages["level"] == "ok", packages
    command = [sys.executable, *ALONE, str(made), "service", "--print"]
    unit = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"ExecStart={sys.executable} {made}\n" in unit


def test_an_old_python_is_told(made: Path) -> None:
    with zipfile.ZipFile(made) as archive:
        text = archive.read("__main__.py").decode()
    old = text.replace("sys.version_info < (3, 10)", "sys.version_info < (9,)")
    assert old != text
    told = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True)
    assert told.returncode == 1
    assert "needs Python 3.10 or later" in told.stderr


def test_it_serves_as_a_worker(made: Path) -> None:
    trial = script("trial")
    seen = trial.Trial().run([sys.executable, *ALONE, str(made)], streams=3)
    assert (seen.streams, seen.tokens, seen.aborts) == (3, 3 * trial.WORDS, 2)


def test_pins_are_read_with_their_digests() -> None:
    pyz = script("pyz")
    text = (ROOT / "requirements" / "runtime.txt").read_text()
    found = pyz.pins(text)
    assert len(found) == text.count("==")
    assert all(found.values())
    assert pyz.pins("a==1 \\\n    --hash=sha256:" + "0" * 64) == {"a==1": {"0" * 64}}


def test_a_wheel_with_another_digest_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyz = script("pyz")
    (tmp_path / "backoff-2.2.1-py3-none-any.whl").write_bytes(b"something else")
    monkeypatch.setattr(pyz, "_download", lambda place: "ERROR: no network\n")
    with pytest.raises(pyz.NotToBeHad, match="no network"):
        pyz.wheels(tmp_path)
