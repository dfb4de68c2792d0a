"""A soak of some seconds, by its command line; ``make soak`` runs the long one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos.callers import MIX, check, mixed
from chunks import finish, frames_of, text, usage

from bench import wire

ROOT = Path(__file__).parent.parent


def channel(places, *, frames=None):
    """The bytes of a channel that carried these tokens; the mask is zero."""
    words = b"".join(text(wire.token(0, place).decode()) for place in places)
    sent = frames_of(words + usage(completion_tokens=len(places)) + finish("stop"))
    found = b""
    for each in sent[:frames]:
        payload = each if isinstance(each, bytes) else each.encode()
        found += b"\x81\xfe" + len(payload).to_bytes(2, "big") + bytes(4) + payload
    return found


def test_a_whole_stream_has_all_its_tokens_once():
    assert check(channel([0, 1, 2]), 3) == (3, [])
    assert check(channel([0, 1]), 3)[1] == ["2 of 3 tokens, ended by 'done'"]
    assert "a token is lost or comes twice" in check(channel([0, 2, 1]), 3)[1]
    assert "a token is lost or comes twice" in check(channel([0, 1, 1]), 3)[1]
    assert "no terminal" in check(channel([0, 1, 2], frames=5), 3)[1]


def test_an_aborted_stream_has_the_first_of_them_and_no_end():
    assert check(channel([0, 1, 2], frames=4), None) == (2, [])
    assert "a terminal" in check(channel([0, 1, 2]), None)[1]


def test_each_call_comes_as_often_as_its_share():
    calls = mixed()
    made = [next(calls) for _ in range(1000)]
    assert {name: made.count(name) / 1000 for name in MIX} == pytest.approx(
        {name: share for name, (share, _) in MIX.items()}, abs=0.001
    )


@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_streams_and_calls_for_some_seconds(tmp_path):
    pytest.importorskip("matplotlib")
    found, drawn = tmp_path / "soak.json", tmp_path / "soak.svg"
    size = ["--minutes", "0.05", "--streams", "4", "--tokens", "30", "--rate", "20"]
    files = ["--calls", "50", "--json", str(found), "--plot", str(drawn)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.soak", *size, *files],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(found.read_text(encoding="utf-8"))
    assert results["violations"] == 0
    assert results["counts"]["streams"] >= 4
    assert results["counts"]["tokens"] >= 4 * 30
    assert results["counts"]["abort"] > 0
    assert drawn.stat().st_size < 100_000
