"""What ``make arm`` reads and prints; the trial itself is in ``test_packaging``."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    return importlib.import_module("arm")


def test_a_tables_columns_stand_under_their_heads(arm: Any) -> None:
    lines = [
        ["armhf", "wheel", "ok", "9.5", "4 (160 tokens)", "2 of 2", "30.1 + 20.0", ""],
        ["arm64", "pyz", "ok", "10.5", "4 (160 tokens)", "2 of 2", "40.1 + 20.0", "2.9"],
    ]
    rule, head, again, *rows, end = arm.table(lines).splitlines()
    assert rule == again == end
    starts = [place for place, sign in enumerate(rule) if rule[max(place - 1, 0)] + sign == " ="]
    for text in (head, *rows):
        assert len(text) <= len(rule)
        assert all(text[place - 2 : place] in ("  ", "") for place in starts)
    assert rows[1].split("  ")[-1] == "2.9"


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="not Linux")
def test_memory_is_told_apart(arm: Any) -> None:
    size = 8 * 1024 * 1024
    # Memory that may be written and run is where an emulator keeps translated code.
    grown = (
        "import mmap, sys\n"
        f"both = mmap.mmap(-1, {size}, prot=7)\n"
        f"both.write(bytes({size}))\n"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", grown], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        seen = arm.memory(process.pid)
        process.communicate()
    assert size <= seen.emulator < seen.whole
    assert str(seen).count("+") == 1


def test_what_is_missing_is_said(arm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm.os, "geteuid", lambda: 1000, raising=False)
    with pytest.raises(arm.Unfit, match="root"):
        arm.check_machine()
    monkeypatch.setattr(arm.os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(arm.Unfit, match="debootstrap is missing"):
        arm.check_machine()


def test_a_tree_with_a_compiler_is_refused(
    arm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(arm, "TREES", tmp_path)
    programs = tmp_path / "armhf" / "usr" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "armhf" / ".complete").touch()
    assert arm.tree("armhf", "any") == tmp_path / "armhf"
    # As Debian names it.
    (programs / "arm-linux-gnueabihf-gcc-12").touch()
    with pytest.raises(arm.Unfit, match="compiler"):
        arm.tree("armhf", "any")
