"""The examples do what they say. Each is run as its reader would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from provider_llamacpp.local.llama import LlamaServer
from provider_llamacpp.local.model import SENTENCE

EXAMPLES = Path(__file__).parent.parent / "examples"

EXPECTED = {
    "threads": [f"thread 2: {SENTENCE}", "streams that ended: {'end': 3}", "stopped"],
    "flask_app": [SENTENCE, "{'connected': True, 'server': 'ready'}", "_uptime_seconds{"],
    "main_loop": [SENTENCE, "the loop went on all the while: True"],
    "two_workers": [f"llamacpp: {SENTENCE}", f"pi5: {SENTENCE}", '_max_streams{provider="pi5"} 2'],
    "after_fork": [
        "child: this worker runs in process",
        "child: alive is False",
        "child: ready is True as provider-child",
        "(the child ended with 0)",
    ],
    "direct": ["demo: loaded, 8192 tokens, tools True", "[end, Usage(", "second turn: Hello!"],
    "observing": ["stream 1 of demo: end, ", "span: chat demo 27", 'outcome="end"} 1'],
    "restarts": ["before: ", " after: "],
}
ARGUMENTS = {"restarts": ["--times", "5", "--warm-up", "3"]}
PACKAGES = {"flask_app": "flask", "observing": "opentelemetry.sdk"}

pytestmark = pytest.mark.timeout(120)


def test_each_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "stage"}


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str, llama: LlamaServer) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    if name == "after_fork" and not hasattr(os, "fork"):
        pytest.skip("there is no fork here")
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(
        [*command, "--api-url", llama.url, *ARGUMENTS.get(name, ())],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in EXPECTED[name]:
        assert words in done.stdout, done.stdout + done.stderr
