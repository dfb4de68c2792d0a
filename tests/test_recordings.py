"""The recordings in ``docs/terminal/``: each is a whole session at 80 columns and 24 lines, and its
picture is that of its last screen."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from screen import Screen, Style

pytest.importorskip("pty", reason="needs pseudo-terminals")

ROOT = Path(__file__).parent.parent
SESSIONS = {
    "chat": ("(thinking) ", "Hello! ", "stop: end", "tokens/s]"),
    "models": ("capabilities", "demo", "loaded", "tools", "rank"),
    "doctor": ("python", "engine", "router", "generation", "embeddings", "->", "1 warning."),
    "status": ("engine connected", ": ready", "2 of 64 streams", "generating", "per s"),
}


@pytest.fixture(scope="module")
def record():
    spec = importlib.util.spec_from_file_location("record", ROOT / "packaging" / "record.py")
    module = importlib.util.module_from_spec(spec)
    before = sys.path[:]
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def replayed(name):
    lines = (ROOT / "docs" / "terminal" / f"{name}.cast").read_text(encoding="utf-8").splitlines()
    head, *events = map(json.loads, lines)
    assert (head["version"], head["width"], head["height"]) == (2, 80, 24)
    times = [at for at, kind, _ in events if kind == "o"]
    assert times == sorted(times) and len(times) == len(events)
    screen = Screen(80, 24, raw=True)
    return head["title"], screen.write("".join(text for _, _, text in events))


@pytest.mark.parametrize("name", SESSIONS)
def test_a_recording_shows_what_its_command_shows(name, record):
    title, screen = replayed(name)
    lines = screen.text()
    assert title.startswith(f"provider-llamacpp {name}")
    assert lines[0] == f"$ {title}"
    assert lines[-1] == "$", "the command has ended"
    text = "\n".join(lines)
    for word in SESSIONS[name]:
        assert word in text
    assert str(Path.home()) not in text and "Traceback" not in text
    picture = ROOT / "docs" / "terminal" / f"{name}.svg"
    assert picture.read_text(encoding="utf-8") == record.picture(screen, title)


def test_thoughts_are_dimmed_in_the_recording():
    _, screen = replayed("chat")
    assert screen.styles("(thinking)") == {Style(marks=frozenset({"dim"}))}
    assert screen.styles("Hello!") == {Style()}


def test_a_command_is_recorded_in_a_terminal_of_that_size(record):
    recording = record.Recording()
    recording.type("program")
    program = "import os; print(*os.get_terminal_size()); input()"
    with pytest.raises(OSError):
        os.fstat(record_descriptor(recording, record, program))
    text = "".join(text for _, text in recording.events)
    assert "80 24" in text
    assert "KeyboardInterrupt" in text


def record_descriptor(recording, record, program):
    """Run ``program`` until Ctrl-C; the lowest descriptor that was free before, which is so
    again."""
    free = os.dup(0)
    os.close(free)
    recording.run([sys.executable, "-c", program], dict(os.environ), ctrl_c_after=0.2)
    return free
