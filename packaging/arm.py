"""Proves the worker on ARM: Debian trees for armhf and arm64, run by an emulator.

For each: a tree of Debian (``build/arm/<architecture>``, kept for the next time), no compiler in
it; the wheel in a virtual environment, offline, and the one-file program beside it; each of the two
started against the engine, router and stub of :mod:`trial` on this machine, streams served, calls
aborted, memory read. Prints one table.

Needs root, Debian's packages ``debootstrap`` and ``qemu-user-static``, some 700 MB of disk, and
``.[local]``. The first run takes a quarter of an hour. Emulated times say nothing of a board's.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyz
from trial import Seen, Trial

ROOT = Path(__file__).resolve().parent.parent
TREES = ROOT / "build" / "arm"
BINFMT = Path("/proc/sys/fs/binfmt_misc")
PACKAGES = "python3,python3-venv,ca-certificates"
NICE = ("nice", "-n", "10")
PATIENCE = 600.0
COMPILERS = ("cc", "c99", "*gcc*", "*g++*", "clang*", "tcc", "as", "ld")

EMULATORS = {"armhf": "arm", "arm64": "aarch64"}
"""Debian's architecture, and the emulator's name for it."""

VENV = "/opt/provider-llamacpp"
WHEELS = "/opt/wheels"
PYZ = "/opt/provider-llamacpp.pyz"


class Unfit(Exception):
    """This machine, or a tree, is not as it has to be."""


@dataclass(frozen=True)
class Memory:
    """Resident memory of an emulated process, in bytes."""

    whole: int
    emulator: int
    """Of it: translated code, the emulator's program and its heap."""

    def __str__(self) -> str:
        return f"{megabytes(self.whole - self.emulator)} + {megabytes(self.emulator)}"


def megabytes(size: int) -> str:
    """With one decimal."""
    return f"{size / 1e6:.1f}"


# -- the machine ----------------------------------------------------------------------------------


def check_machine() -> None:
    """:raises Unfit: if something is missing"""
    if os.geteuid() != 0:
        raise Unfit("root is needed: to make device files and to run in another tree")
    for program in ("debootstrap", *(f"qemu-{name}-static" for name in EMULATORS.values())):
        if shutil.which(program) is None:
            raise Unfit(f"{program} is missing: apt-get install debootstrap qemu-user-static")


def teach_kernel(emulator: str) -> None:
    """Have the kernel run the other architecture's programs with the emulator.

    :raises Unfit: if it will not: Debian's packages run programs of their own while they are set up
    """
    if not (BINFMT / "register").exists():
        subprocess.run(["modprobe", "-q", "binfmt_misc"])
        mount = ["mount", "-t", "binfmt_misc", "binfmt_misc", str(BINFMT)]
        if subprocess.run(mount).returncode != 0:
            raise Unfit(f"binfmt_misc cannot be mounted at {BINFMT}")
    if not (BINFMT / f"qemu-{emulator}").exists():
        rule = Path(f"/usr/lib/binfmt.d/qemu-{emulator}.conf").read_text()
        lines = [line for line in rule.splitlines() if line.startswith(":")]
        # The kernel takes a rule in one write. Flag F opens the emulator now, so that it is found
        # from within any tree.
        (BINFMT / "register").write_text(lines[0])


# -- the trees ------------------------------------------------------------------------------------


def tree(architecture: str, suite: str) -> Path:
    """Debian of that architecture, made if it is not there."""
    place = TREES / architecture
    done = place / ".complete"
    if not done.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        run("debootstrap", "--foreign", f"--arch={architecture}", "--variant=minbase",
            f"--include={PACKAGES}", suite, str(place))  # fmt: skip
        # It mounts /proc in the tree: only in its own view, or a later "rm -rf" would walk into it.
        run(
            "unshare", "--mount", "chroot", str(place), "/debootstrap/debootstrap", "--second-stage"
        )
        done.touch()
    found = [path.name for name in COMPILERS for path in place.glob(f"usr/bin/{name}")]
    if found:
        raise Unfit(f"{place} has a compiler: {', '.join(found)}")
    return place


def run(*command: str, quiet: bool = True) -> str:
    """What ``command`` prints.

    :raises Unfit: if it fails
    """
    print("+", " ".join(command), file=sys.stderr, flush=True)
    told = subprocess.run([*NICE, *command], capture_output=True, text=True)
    if told.returncode != 0:
        raise Unfit(f"{' '.join(command)} failed:\n{told.stdout[-2000:]}{told.stderr[-2000:]}")
    return told.stdout


def inside(place: Path, *command: str) -> list[str]:
    """``command`` as it is run in the tree, with no environment but its own."""
    return ["chroot", str(place), "/usr/bin/env", "-i", "PATH=/usr/bin:/bin", *command]


def install(place: Path, wheel: Path) -> str:
    """The wheel and its dependencies into a new environment, without network or compiler; in the
    words of the interpreter, what it runs on."""
    for path in (VENV, WHEELS):
        shutil.rmtree(place / path[1:], ignore_errors=True)
    shutil.copytree(pyz.WHEELS, place / WHEELS[1:], ignore=shutil.ignore_patterns("tmp*"))
    shutil.copy(pyz.PINS, place / WHEELS[1:])
    shutil.copy(wheel, place / WHEELS[1:])
    shutil.copy(pyz.OUTPUT, place / PYZ[1:])
    python = f"{VENV}/bin/python"
    run(*inside(place, "python3", "-m", "venv", VENV))
    pip = [python, "-m", "pip", "install", "--no-index", "--only-binary", ":all:", "--no-cache-dir"]
    pinned = ["--require-hashes", "--find-links", WHEELS, "-r", f"{WHEELS}/{pyz.PINS.name}"]
    run(*inside(place, *pip, *pinned))
    run(*inside(place, *pip, "--no-deps", f"{WHEELS}/{wheel.name}"))
    run(*inside(place, python, "-m", "pip", "check"))
    question = (
        "import platform as p, struct; "
        "print(p.python_version(), p.machine(), struct.calcsize('P') * 8, 'bit')"
    )
    return run(*inside(place, python, "-I", "-c", question)).strip()


# -- the trial ------------------------------------------------------------------------------------


def memory(pid: int) -> Memory:
    """Of an emulated process, from the kernel's account of its mappings.

    Translated code lies in memory that may be written and run. The emulator's other allocations
    cannot be told from the program's memory, and count as the program's.
    """
    whole = emulator = 0
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if head := re.match(r"[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ \S+ *(.*)", line):
            name = head[2]
            translated = {"w", "x"} <= set(head[1])
            ours = translated or "qemu" in name or name == "[heap]"
        elif line.startswith("Rss:"):
            size = int(line.split()[1]) * 1024
            whole += size
            emulator += size if ours else 0
    return Memory(whole, emulator)


def bare(place: Path) -> Memory:
    """A Python that does nothing."""
    idle = "import sys; print(flush=True); sys.stdin.read()"
    command = inside(place, "python3", "-I", "-c", idle)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = memory(process.pid)
        process.communicate()
    return seen


def rows(architecture: str, suite: str, wheel: Path, streams: int) -> list[Sequence[str]]:
    """The table's lines of one architecture."""
    teach_kernel(EMULATORS[architecture])
    place = tree(architecture, suite)
    words = install(place, wheel)
    print(f"{architecture}: Python {words}", file=sys.stderr)
    found: list[Sequence[str]] = []
    programs = {"wheel": [f"{VENV}/bin/provider-llamacpp"], "pyz": ["python3", "-I", PYZ]}
    for what, command in programs.items():
        run(*inside(place, *command, "--version"))
        seen = Trial(PATIENCE).run(inside(place, *command), streams=streams, look=memory)
        size = megabytes((place / PYZ[1:]).stat().st_size) if what == "pyz" else ""
        found.append([architecture, what, "ok", *cells(seen), size])
    found.append([architecture, "bare Python", "", "", "", "", str(bare(place)), ""])
    return found


def cells(seen: Seen) -> list[str]:
    """Start, streams, aborts, memory."""
    assert isinstance(seen.memory, Memory)
    served = f"{seen.streams} ({seen.tokens} tokens)"
    return [f"{seen.start:.1f}", served, f"{seen.aborts} of 2", str(seen.memory)]


HEAD = ("tree", "what", "install", "start, s", "streams", "aborts", "RSS, MB", "pyz, MB")


def table(lines: Sequence[Sequence[str]]) -> str:
    """Columns under their heads, as reStructuredText takes them."""
    widths = [max(len(line[place]) for line in (HEAD, *lines)) for place in range(len(HEAD))]
    rule = "  ".join("=" * width for width in widths)

    def row(line: Sequence[str]) -> str:
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([rule, row(HEAD), rule, *map(row, lines), rule])


def build_wheel() -> Path:
    """Ours, as pip builds it."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", place]
        run(*command, str(ROOT))
        (made,) = Path(place).glob("*.whl")
        return Path(shutil.copy(made, TREES / made.name))


def main() -> int:
    parser = argparse.ArgumentParser(description="Try the worker in emulated ARM systems.")
    parser.add_argument("--suite", default="bookworm", help="of Debian (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="at once (default: %(default)s)")
    parser.add_argument(
        "--architecture", choices=EMULATORS, action="append", help="only this one; repeatable"
    )
    options = parser.parse_args()
    lines: list[Sequence[str]] = []
    try:
        check_machine()
        TREES.mkdir(parents=True, exist_ok=True)
        pyz.build(pyz.OUTPUT)
        wheel = build_wheel()
        for architecture in options.architecture or EMULATORS:
            lines += rows(architecture, options.suite, wheel, options.streams)
    except (Unfit, pyz.NotToBeHad) as error:
        print(f"arm: {error}", file=sys.stderr)
        return 1
    today = datetime.datetime.now(datetime.timezone.utc).date()
    print(f"Debian {options.suite}, emulated, {today}. RSS: the program's + the emulator's.\n")
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
