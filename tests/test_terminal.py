"""Lines, tables and bars: the same facts with rich and without, and nothing that steers a
terminal."""

import importlib.util
import io
import logging
import re
import subprocess
import sys

import pytest

from provider_llamacpp import Settings
from provider_llamacpp.commands.terminal import (
    Column,
    Terminal,
    columns_of,
    hold_logs,
    printable,
    size,
)

COLUMNS = (Column("id", wrap=True), Column("context", right=True), Column("notes", wrap=True))
LONG = "/srv/models/" + "x" * 40 + ".gguf"
ROWS = [
    [LONG, "8192", ("tools, vision, thinking, structured output, embeddings", "good")],
    ["small", "512", "-"],
]


class Screen(io.StringIO):
    def isatty(self):
        return True


class Latin(io.StringIO):
    encoding = "latin-1"


def terminal(**options):
    out = io.StringIO()
    return Terminal(out, **options), out


def with_rich(**options):
    pytest.importorskip("rich")
    return terminal(rich=True, live=True, **options)


# -- text -------------------------------------------------------------------------------------


def test_control_characters_are_shown_and_not_obeyed():
    assert printable("a\x1b[31mb\r\nc\td\x07") == "a\\x1b[31mb\nc\td\\x07"
    target, out = terminal()
    target.line("one\x1b]0;title\x07", (" two\x9b", "bad"))
    assert out.getvalue() == "one\\x1b]0;title\\x07 two\\x9b\n"
    target, out = with_rich()
    target.line("one\x1b]0;title\x07", (" [red]two[/red] :smile:", "dim"))
    assert "\x1b]" not in out.getvalue()
    assert "[red]two[/red] :smile:" in out.getvalue()


def test_what_the_output_cannot_encode_is_replaced():
    out = Latin()
    Terminal(out).line("café, \u65e5\u672c")
    assert out.getvalue() == "café, ??\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (770_688, "771 kB"), (4_683_000_000, "4.7 GB")],
)
def test_sizes(count, text):
    assert size(count) == text


def test_columns_of_wide_and_of_combining_characters():
    assert [columns_of(text) for text in ("abc", "\u65e5\u672c", "e\u0301")] == [3, 4, 1]


# -- what the output is -----------------------------------------------------------------------


def test_a_pipe_gets_plain_text():
    out = io.StringIO()
    target = Terminal.of(out, {})
    assert (target.live, target.colour, target.rich, target.width) == (False, False, False, 80)


@pytest.mark.parametrize(
    ("environ", "live", "colour"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_a_terminal(environ, live, colour):
    target = Terminal.of(Screen(), environ)
    assert (target.live, target.colour) == (live, colour)


@pytest.mark.parametrize(("columns", "width"), [("40", 40), ("0", 80), ("many", 80), ("3", 8)])
def test_the_environment_may_name_the_width(columns, width):
    assert Terminal.of(Screen(), {"COLUMNS": columns}).width == width


def test_without_rich_a_terminal_gets_plain_text(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    out = Screen()
    target = Terminal.of(out, {})
    target.line(("bad news", "bad"))
    target.table(COLUMNS, ROWS)
    assert not target.rich and "\x1b" not in out.getvalue()


def test_no_colour_with_rich():
    target, out = with_rich(colour=False)
    target.line(("bad news", "bad"))
    target.table(COLUMNS, ROWS)
    assert "\x1b[3" not in out.getvalue()


def test_colour_with_rich(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    target, out = with_rich(colour=True)
    target.line(("bad news", "bad"))
    assert out.getvalue() == "\x1b[1;31mbad news\x1b[0m\n"


def test_rich_is_imported_on_use_only():
    code = (
        "import io, sys\n"
        "from provider_llamacpp.commands.terminal import Terminal\n"
        "Terminal(io.StringIO()).line('x')\n"
        "with Terminal(io.StringIO()).progress('x'): pass\n"
        "assert 'rich' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


# -- tables -----------------------------------------------------------------------------------


def test_a_table_for_programs_has_a_line_for_each_row():
    target, out = terminal()
    target.table(COLUMNS, [*ROWS, ["two\nlines", "1", ""]])
    head, first, second, third = out.getvalue().splitlines()
    assert head.split() == ["id", "context", "notes"]
    assert first.startswith(LONG) and first.endswith("embeddings")
    assert second.split() == ["small", "512", "-"]
    assert third.startswith("two lines")
    assert first.index("8192") + 4 == second.index("512") + 3


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("rich", [False, True])
def test_a_table_fits_the_terminal(width, rich):
    if rich:
        pytest.importorskip("rich")
    target, out = terminal(width=width, live=True, rich=rich)
    rows = [*ROWS, ["\u65e5\u672c\u8a9e" * 12, "1", "wide"]]
    target.table(COLUMNS, rows)
    lines = re.sub("\x1b[^m]*m", "", out.getvalue()).splitlines()
    assert max(map(columns_of, lines)) <= width
    for part in ("8192", "512", "wide", "small"):
        assert part in out.getvalue()
    assert sum(line.count("\u65e5") for line in lines) == 12
    assert sum(line.count("x") for line in lines) == 40 + 1  # and one in "context"


def test_a_table_that_cannot_be_narrowed_stays_wide():
    target, out = terminal(width=10, live=True, rich=False)
    target.table([Column("number", right=True), Column("name")], [["1", "a long name"]])
    assert out.getvalue() == "number  name\n     1  a long name\n"


def test_wrapped_text():
    target, _ = terminal(width=30)
    assert target.wrap("one two three four", 10) == ["one two three four"]
    assert target.wrap("one two three four five", 10) == ["one two three four", "five"]
    assert target.wrap("a\n\nb", 0) == ["a", "", "b"]


# -- progress ---------------------------------------------------------------------------------


def test_progress_of_a_pipe_is_a_line_for_each_tenth():
    target, out = terminal()
    with target.progress("loading", total=40) as bar:
        for done in range(41):
            bar.update(done, note="demo" if done == 40 else "")
    lines = out.getvalue().splitlines()
    assert lines[0] == "loading: 0 %" and lines[-1] == "loading: 100 % demo"
    assert len(lines) == 11


def test_progress_of_a_pipe_without_an_end_in_sight():
    target, out = terminal()
    with target.progress("waiting") as bar:
        bar.update(1)
        bar.update(2)
    assert out.getvalue() == "waiting\n"


def test_progress_on_a_plain_terminal_is_written_over_and_gone():
    target, out = terminal(width=40, live=True, rich=False)
    with target.progress("waiting") as bar:
        bar.update(1, note="a note that is much longer than the line")
        bar.update(5, total=10)
    drawn = out.getvalue().split("\r")
    assert drawn[0] == "" and drawn[-1] == "" and "\n" not in out.getvalue()
    assert max(map(len, drawn)) < 40
    assert drawn[1] == "waiting 0 s"
    assert drawn[3].startswith("waiting [##########..........]")
    assert not drawn[-2].strip()


def test_progress_with_rich():
    target, out = with_rich(width=80)
    with target.progress("waking [demo]") as bar:
        bar.update(1, note="\x1b[31mred")
        bar.update(5, total=10, note="half")
    text = out.getvalue()
    assert "waking [demo]" in text and "50%" in text and "half" in text
    assert text.endswith("\x1b[2K"), "the bar is gone"


# -- logs -------------------------------------------------------------------------------------


def run(level):
    code = (
        "import logging\n"
        "from provider_llamacpp import Settings\n"
        "from provider_llamacpp.commands.terminal import hold_logs\n"
        f"hold_logs(Settings(log_level={level!r}))\n"
        "logging.getLogger('provider_llamacpp.bus').warning('lost')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_logs_do_not_get_into_the_output():
    assert run("info") == ""
    assert run("debug").endswith("lost\n")


def test_holding_the_logs_twice_holds_them_once():
    hold_logs(Settings())
    hold_logs(Settings())
    assert len(logging.getLogger("provider_llamacpp").handlers) == 1
