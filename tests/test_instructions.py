"""How many processor instructions a token costs: a regression is seen without a stopwatch.

Counted by callgrind, so it depends neither on the load of the machine nor on its speed, only on
Python's version (and a little on how it was compiled).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("relay_count.py")
PINNED = {
    (3, 11): {1: 23_000, 16: 24_700},
}
"""Instructions for one token, by Python version and by tokens in each read. When a change moves
them on purpose, put the new ones here (the failure shows them) and into docs/performance.rst."""
TOLERANCE = 0.10
FEW, TOKENS = 64, 1024

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]


def instructions(tokens: int, batch: int) -> int:
    """Of a whole process that relays ``tokens``."""
    paths = [str(SCRIPT.parent.parent), *(sysconfig.get_path(n) for n in ("purelib", "platlib"))]
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    # Without "site": what .pth files import would be counted, and differs between environments.
    command += [sys.executable, "-S", str(SCRIPT), str(tokens), str(batch)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found, done.stderr
    return int(found[1])


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
@pytest.mark.skipif(
    platform.python_implementation() != "CPython" or platform.machine() != "x86_64",
    reason="counted on CPython on x86-64",
)
@pytest.mark.skipif(
    sys.version_info[:2] not in PINNED, reason="no count is pinned for this version of Python"
)
def test_a_token_costs_what_it_did() -> None:
    started = instructions(FEW, 1)
    found = {
        batch: round((instructions(FEW + TOKENS, batch) - started) / TOKENS) for batch in (1, 16)
    }
    expected = PINNED[sys.version_info[:2]]
    outside = {
        batch: count
        for batch, count in found.items()
        if abs(count / expected[batch] - 1) > TOLERANCE
    }
    assert not outside, f"instructions for a token: {found}, pinned {expected}"
