"""Makes ``build/provider-llamacpp.pyz``: the worker and all it needs, in one file.

``python provider-llamacpp.pyz`` runs on Python 3.10 or later with nothing installed. Inside are:

- at the root, the sources of the package and of its dependencies (the versions, and files with the
  digests, of ``requirements/runtime.txt``; only wheels without compiled code), with their data,
  metadata and licences: what any Python can run, and what tells a reader what runs;
- in ``bytecode/<magic number>``, the same modules compiled, one folder for each Python that was at
  hand. ``zipimport`` reads ``module.pyc`` beside where ``module.py`` would be and knows no
  ``__pycache__``, so one folder serves one Python; ``__main__`` puts the right one first. A Python
  without a folder compiles the sources at each start.

The same sources, pins and Pythons give the same bytes: entries are sorted and carry no times, and
the bytecode names no place and is never compared with its source ("unchecked hash").
"""

from __future__ import annotations

import argparse
import configparser
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements" / "runtime.txt"
PACKAGE = "provider_llamacpp"
OUTPUT = ROOT / "build" / "provider-llamacpp.pyz"
WHEELS = ROOT / "build" / "wheels"

PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13", "python3.14")
"""Compiled for where found: those that the boards' systems have had since 2022."""

LEFT_OUT = ("*.pyi", "*/py.typed", "*/tests/*", "*/RECORD", "*/WHEEL", "*/INSTALLER", "bin/*")
"""Of the dependencies: what does nothing at run time."""

SHEBANG = b"#!/usr/bin/env python3\n"

MAIN = b'''\
"""Starts the worker from this archive."""

import sys

if sys.version_info < (3, 10):
    sys.exit("provider-llamacpp needs Python 3.10 or later; this is %d.%d" % sys.version_info[:2])

from importlib.util import MAGIC_NUMBER

# The archive itself is the first entry already; compiled modules come before their sources.
sys.path.insert(0, sys.path[0] + "/bytecode/" + MAGIC_NUMBER.hex())

from provider_llamacpp.cli import main

sys.exit(main())
'''

CERTS = b'''\
"""Where the CA certificates are: in this archive.

Changed for provider-llamacpp.pyz, as requests invites those who package it to do. The original asks
certifi, which would write them to a temporary file at each start; requests takes a path within an
archive too, and unpacks it when it is used.
"""

import certifi


def where() -> str:
    return certifi.__file__.rpartition("__init__")[0] + "cacert.pem"


if __name__ == "__main__":
    print(where())
'''

REPLACED = {"requests/certs.py": CERTS}

COMPILE = """\
import importlib.util, py_compile, sys
from pathlib import Path
source, target = map(Path, sys.argv[1:])
for name in sys.stdin.read().splitlines():
    compiled = target / (name + "c")
    compiled.parent.mkdir(parents=True, exist_ok=True)
    py_compile.compile(
        str(source / name), str(compiled), "provider-llamacpp.pyz/" + name, doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
print(importlib.util.MAGIC_NUMBER.hex())
"""
"""Run by each Python: compiles the files named on its input, and tells its magic number."""


class NotToBeHad(Exception):
    """A wheel is neither here nor to be fetched."""


def pins(text: str) -> dict[str, set[str]]:
    """``name==version`` and the SHA-256 digests of its files."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = (re.match(r"([A-Za-z0-9._-]+==\S+)(.*)", line) for line in lines)
    return {each[1]: set(re.findall(r"sha256:([0-9a-f]{64})", each[2])) for each in found if each}


def wheels(folder: Path = WHEELS) -> list[Path]:
    """The wheel of each pin, from ``folder`` or fetched into it; their digests are checked.

    :raises NotToBeHad: if one is missing and cannot be fetched
    """
    wanted = pins(PINS.read_text(encoding="utf-8"))
    if (found := _chosen(folder, wanted)) is None:
        folder.mkdir(parents=True, exist_ok=True)
        # Fetched elsewhere and moved here whole: another build may be looking.
        with tempfile.TemporaryDirectory(dir=folder) as place:
            told = _download(Path(place))
            for path in Path(place).glob("*.whl"):
                path.replace(folder / path.name)
        if (found := _chosen(folder, wanted)) is None:
            last = told.strip().splitlines()[-1:] or ["pip said nothing"]
            raise NotToBeHad(f"the wheels of {PINS.name} cannot be had: {last[0]}")
    return found


def _download(place: Path) -> str:
    # A platform called "any" leaves only wheels without compiled code.
    limits = "--no-deps --only-binary :all: --platform any --implementation py --abi none"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes"]
    command += [*limits.split(), "--python-version", "3.10", "--dest", str(place)]
    command += ["--requirement", str(PINS)]
    return subprocess.run(command, capture_output=True, text=True).stderr


def _chosen(folder: Path, wanted: dict[str, set[str]]) -> list[Path] | None:
    files = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in folder.glob("*.whl")}
    chosen = [files[digest] for pin in wanted.values() for digest in pin if digest in files]
    pure = sorted(path for path in chosen if path.name.endswith("-none-any.whl"))
    return pure if len(pure) == len(wanted) else None


def dependencies(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """Name and content of what is taken from the wheels."""
    for path in paths:
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/") and not any(fnmatch(name, each) for each in LEFT_OUT):
                    yield name, REPLACED.get(name) or wheel.read(name)


def own_files(root: Path = ROOT) -> Iterator[tuple[str, bytes]]:
    """The package as it would be installed, and its licence."""
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg", encoding="utf-8")
    data = {
        Path(*package.split("."), name.strip())
        for package, names in setup["options.package_data"].items()
        for name in names.split(",")
    }
    modules = {path.relative_to(root) for path in (root / PACKAGE).rglob("*.py")}
    for path in sorted(data | modules):
        yield path.as_posix(), (root / path).read_bytes()
    yield "LICENSE", (root / "LICENSE").read_bytes()


def usable_pythons(programs: Iterable[str] = PYTHONS) -> list[str]:
    """Those of ``programs`` that run, and the one that runs this; one of each magic number."""
    found: dict[str, str] = {}
    for program in (sys.executable, *programs):
        question = "import importlib.util as u; print(u.MAGIC_NUMBER.hex())"
        if shutil.which(program):
            told = subprocess.run([program, "-c", question], capture_output=True, text=True)
            if told.returncode == 0:
                found.setdefault(told.stdout.strip(), program)
    return list(found.values())


def bytecode(python: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """The modules among ``files`` as ``python`` compiles them, and the data beside our own."""
    with tempfile.TemporaryDirectory(prefix="pyz-") as place:
        source, target = Path(place, "source"), Path(place, "target")
        names = sorted(name for name in files if name.endswith(".py") and name != "__main__.py")
        for name in names:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(files[name])
        # What a set of constants looks like depends on the hash seed, which -I would leave open.
        told = subprocess.run(
            [python, "-S", "-s", "-B", "-W", "ignore", "-c", COMPILE, str(source), str(target)],
            input="\n".join(names),
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": "0"},
        )
        tree = f"bytecode/{told.stdout.strip()}/"
        found = {f"{tree}{name}c": (target / f"{name}c").read_bytes() for name in names}
    # A package looks for its data where it was loaded from. certifi's are large: it is found at the
    # root, compiled or not.
    own = {name for name in files if name.startswith(f"{PACKAGE}/")}
    found.update({f"{tree}{name}": files[name] for name in own.difference(names)})
    return {name: data for name, data in found.items() if not name.startswith(f"{tree}certifi/")}


def archive(files: dict[str, bytes]) -> bytes:
    """The zipapp of ``files``."""
    buffer = io.BytesIO()
    buffer.write(SHEBANG)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(entry, data)
    return buffer.getvalue()


def build(output: Path, folder: Path = WHEELS, pythons: Sequence[str] = PYTHONS) -> list[str]:
    """Write the archive; the Pythons it holds bytecode for.

    :param folder: of the wheels
    :param pythons: programs to compile with, beside the one that runs this
    :raises NotToBeHad: if a wheel cannot be had
    """
    files = dict(dependencies(wheels(folder)))
    files.update(own_files())
    files["__main__.py"] = MAIN
    compiled: dict[str, bytes] = {}
    programs = usable_pythons(pythons)
    for python in programs:
        compiled.update(bytecode(python, files))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(archive({**files, **compiled}))
    output.chmod(0o755)
    return programs


def main() -> int:
    parser = argparse.ArgumentParser(description="Make provider-llamacpp.pyz.")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="default: %(default)s")
    parser.add_argument(
        "--python",
        action="append",
        metavar="PROGRAM",
        help="compile for this one too, and not for all that are found; may be repeated",
    )
    options = parser.parse_args()
    try:
        pythons = build(options.output, options.wheels, options.python or PYTHONS)
    except NotToBeHad as error:
        print(f"pyz: {error}", file=sys.stderr)
        return 1
    data = options.output.read_bytes()
    print(f"{options.output}: {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}")
    print("compiled for " + ", ".join(pythons))
    return 0


if __name__ == "__main__":
    sys.exit(main())
