"""What is uploaded and what the engine's registry reads."""

from __future__ import annotations

import configparser
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from provider_llamacpp._version import VERSION

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.timeout(180), pytest.mark.thorough]


def backend(folder: Path, call: str) -> str:
    """What the build backend says last, asked in ``folder`` as a build tool would."""
    text = f"import setuptools.build_meta as backend; print(backend.{call})"
    command = [sys.executable, "-W", "ignore", "-c", text]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-2000:]
    return told.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """The names in the source distribution, and in the wheel that was built from it."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    place = tmp_path_factory.mktemp("dist")
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, place / "checkout", ignore=left_out)
    name = backend(place / "checkout", f"build_sdist({str(place)!r})")
    with tarfile.open(place / name) as archive:
        members = {each.partition("/")[2] for each in archive.getnames()}
        archive.extractall(place)
    source = place / name.removesuffix(".tar.gz")
    name = backend(source, f"build_wheel({str(place)!r})")
    assert name == f"provider_llamacpp-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(place / name) as wheel:
        return members, set(wheel.namelist())


def test_the_wheel_has_the_package_and_nothing_else(uploaded: tuple[set[str], set[str]]) -> None:
    _, wheel = uploaded
    package = ROOT / "provider_llamacpp"
    kept = (
        path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    expected = {path.relative_to(ROOT).as_posix() for path in kept}
    found = {name for name in wheel if ".dist-info/" not in name}
    # A module may have come while the wheel was built, and Python writes its caches all the time.
    assert {name for name in found ^ expected if not name.endswith(".py")} == set()
    assert found & expected
    assert all(name.startswith("provider_llamacpp/") for name in found)
    assert {"provider_llamacpp/py.typed", "provider_llamacpp/schemas.json"} <= wheel
    metadata = {name.rpartition("/")[2] for name in wheel - found}
    assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "LICENSE"} <= metadata


def test_the_sources_are_whole(uploaded: tuple[set[str], set[str]]) -> None:
    members, _ = uploaded
    for name in (
        "CHANGES.rst",
        "Makefile",
        "docs/architecture.rst",
        "packaging/provider-llamacpp.service",
        "requirements/runtime.txt",
        "tests/conftest.py",
        "tests/test_packaging.py",
    ):
        assert name in members
    assert not [name for name in members if name.endswith(".pyc")]


def fields(text: str) -> dict[str, str]:
    """``section.name`` to value, of the plain YAML that the file keeps to: two levels."""
    found, section = {}, ""
    for line in text.splitlines():
        if match := re.fullmatch(r"(  )?([a-z-]+):(?: (.+))?", line.partition(" #")[0]):
            indent, name, value = match.groups()
            section = name if not indent else section
            if value is not None:
                found[f"{section}.{name}" if indent else name] = value
    return found


def test_the_registrys_file_keeps_its_rules() -> None:
    """Provider protocol 12."""
    seen = fields((ROOT / "iii.worker.yaml").read_text(encoding="utf-8"))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert seen["iii"] == "v1"
    assert seen["name"] == setup["metadata"]["name"]
    assert seen["license"] == setup["metadata"]["license"]
    assert seen["deploy"] == "bundle"
    assert (ROOT / seen["manifest"]).is_file()
    assert not {"scripts.setup", "scripts.install", "runtime.base_image", "bin"} & set(seen)
    assert 0 < float(seen["resources.cpus"]) <= 4
    assert 0 < int(seen["resources.memory"]) <= 4096
    # A bundle starts with nothing installed: the file that has everything in it.
    script = (ROOT / "packaging" / "pyz.py").read_text(encoding="utf-8")
    (output,) = re.findall(r'^OUTPUT = ROOT / "(\w+)" / "([\w.-]+)"$', script, re.MULTILINE)
    assert seen["scripts.start"] == f"python3 {'/'.join(output)}"
