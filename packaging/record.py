"""Record the commands at a terminal of 80 columns and 24 lines, on the real demo stack.

``python packaging/record.py`` starts engine, router, worker and a real llama-server, runs each
command in a pseudo-terminal, and writes to ``docs/terminal/`` for each a recording
(``NAME.cast``, asciicast v2: ``asciinema play`` shows it) and the picture of its last screen
(``NAME.svg``). Needs the extra ``local``; takes llama-server from ``LLAMA_SERVER_BIN`` or ``PATH``,
else ``xllamacpp``.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import html
import json
import os
import pty
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from screen import Cell, Line, Screen, Style  # noqa: E402

from provider_llamacpp import Settings  # noqa: E402
from provider_llamacpp.commands.caller import Caller  # noqa: E402
from provider_llamacpp.errors import ProviderLlamacppError  # noqa: E402
from provider_llamacpp.local.model import write_model  # noqa: E402
from provider_llamacpp.local.stack import LocalStack  # noqa: E402

FOLDER = ROOT / "docs" / "terminal"
COLUMNS, LINES = 80, 24
KEY = 0.03
"""Seconds between two keys of the command that is typed."""
PATIENCE = 60.0
PROMPT = "\x1b[32m$\x1b[0m "

# Makes its input the terminal that Ctrl-C is pressed at. A script that runs this in its background
# has it ignore SIGINT, which is inherited.
AT_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""

Event = tuple[float, str]

# The colours of a dark terminal, 0 to 15, and its background and text.
COLOURS = (
    *("#2e3440", "#ff6b6b", "#7ec97e", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#d8dee9"),
    *("#6b7385", "#ff8787", "#9be09b", "#f0d399", "#84c5ff", "#d99be8", "#7fd0da", "#ffffff"),
)
BACKGROUND, TEXT = "#1d2128", "#d8dee9"
WIDTH, HEIGHT, EDGE = 8.4, 18, 12
"""Pixels of a character, of a line, and around the screen."""


class Recording:
    """What a terminal was sent, and when."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._clock = 0.0

    def type(self, command: str) -> None:
        """The prompt, and a command behind it, key by key."""
        self._add(0.5, PROMPT)
        for key in command:
            self._add(KEY, key)
        self._add(0.3, "\r\n")

    def run(self, command: list[str], environ: dict[str, str], ctrl_c_after: float | None) -> None:
        """Run a command to its end; press Ctrl-C so many seconds after its first words."""
        terminal, inner = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, *command],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environ,
            start_new_session=True,
        )
        os.close(inner)
        began = last = time.monotonic()
        first: float | None = None
        decoder = codecs.getincrementaldecoder("utf-8")()
        pressed = ctrl_c_after is None
        try:
            while time.monotonic() - began < PATIENCE:
                ready = select.select([terminal], [], [], 0.05)[0]
                now = time.monotonic()
                if not pressed and first is not None and now - first > (ctrl_c_after or 0.0):
                    os.write(terminal, b"\x03")
                    pressed = True
                if not ready:
                    continue
                try:
                    data = os.read(terminal, 65536)
                except OSError:  # the other end was closed
                    return
                if text := decoder.decode(data):
                    first = first or now
                    self._add(now - last, text)
                    last = now
            raise TimeoutError(f"{command} did not end")
        finally:
            process.kill()
            process.wait()
            os.close(terminal)

    def end(self) -> None:
        """The prompt comes back, and stands for a while."""
        self._add(0.2, PROMPT)
        self._add(2.0, "")

    def _add(self, pause: float, text: str) -> None:
        self._clock += pause
        self.events.append((round(self._clock, 3), text))


def write_cast(path: Path, title: str, events: list[Event]) -> None:
    """As asciicast v2: a head, then one line for each event."""
    head = {"version": 2, "width": COLUMNS, "height": LINES, "title": title}
    lines = [json.dumps(head), *(json.dumps([at, "o", text]) for at, text in events)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# -- the picture ------------------------------------------------------------------------------


def picture(screen: Screen, title: str) -> str:
    """The lines of the screen that hold something, as SVG. Each run of one style has its place and
    length, so that a font that is wider or narrower than it should be moves nothing."""
    lines = 1 + max(at for at, line in enumerate(screen.shown()) if line)
    width, height = COLUMNS * WIDTH + 2 * EDGE, lines * HEIGHT + 2 * EDGE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="6" fill="{BACKGROUND}"/>',
        '<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14" '
        f'fill="{TEXT}">',
    ]
    for number, line in enumerate(screen.rows[:lines]):
        y = EDGE + number * HEIGHT + 14
        parts += [_run(at, y, text, style) for at, text, style in _runs(line)]
    if screen.cursor:
        x, y = EDGE + screen.x * WIDTH, EDGE + screen.y * HEIGHT
        parts.append(
            f'<rect x="{x:g}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="{TEXT}" '
            'opacity="0.6"/>'
        )
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _runs(line: Line) -> Iterator[tuple[int, list[Cell], Style]]:
    """Neighbours of one style, without blanks at the ends."""
    begin = 0
    for at in range(1, len(line) + 1):
        if at < len(line) and line[at].style == line[begin].style:
            continue
        cells = line[begin:at]
        first = next((n for n, cell in enumerate(cells) if cell.text != " "), None)
        if first is not None:
            while cells[-1].text == " ":
                cells = cells[:-1]
            yield begin + first, cells[first:], line[begin].style
        begin = at


def _run(at: int, y: int, cells: list[Cell], style: Style) -> str:
    colour = style.colour
    if isinstance(colour, int):
        # Of the 256 the commands use the first 16; of the others a picture needs no more than one.
        colour = COLOURS[colour] if colour < len(COLOURS) else COLOURS[6]
    looks = f' fill="{colour}"' if colour else ""
    looks += ' font-weight="bold"' if "bold" in style.marks else ""
    looks += ' opacity="0.6"' if "dim" in style.marks else ""
    # Several blanks are one in SVG, unless they are no-break spaces.
    text = html.escape("".join(cell.text for cell in cells).replace(" ", "\N{NO-BREAK SPACE}"))
    return (
        f'<text x="{EDGE + at * WIDTH:g}" y="{y}" textLength="{len(cells) * WIDTH:g}" '
        f'lengthAdjust="spacingAndGlyphs"{looks}>{text}</text>'
    )


# -- what is recorded -------------------------------------------------------------------------


@contextmanager
def busy(settings: Settings, count: int) -> Iterator[None]:
    """So many streams run; they are cut at the end."""
    with Caller(settings) as caller:
        for _ in range(count):
            writer, frames = caller.open_channel()
            message = {"role": "user", "content": [{"type": "text", "text": "hi"}], "timestamp": 1}
            payload = {"model": "loop", "messages": [message], "writer_ref": writer}
            for work, given in (
                (caller.call, (f"provider::{settings.id}::stream", payload)),
                (list, (frames,)),
            ):
                threading.Thread(target=_quietly, args=(work, *given), daemon=True).start()
        yield


def _quietly(work: Callable[..., object], *given: object) -> None:
    with suppress(ProviderLlamacppError):
        work(*given)


def record(
    name: str,
    command: str,
    settings: Settings,
    folder: Path,
    *,
    streams: int = 0,
    ctrl_c_after: float | None = None,
) -> None:
    """Record one command."""
    environ = {
        **{key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ},
        "III_URL": settings.url,
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
    }
    words = [sys.executable, "-m", "provider_llamacpp", *shlex.split(command)[1:]]
    recording = Recording()
    recording.type(command)
    with busy(settings, streams):
        recording.run(words, environ, ctrl_c_after)
    recording.end()
    screen = Screen(COLUMNS, LINES, raw=True)
    screen.write("".join(text for _, text in recording.events))
    write_cast(folder / f"{name}.cast", command, recording.events)
    (folder / f"{name}.svg").write_text(picture(screen, command), encoding="utf-8")
    print(f"{name}: {recording.events[-1][0]:.0f} s", *screen.shown(), sep="\n| ")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--into", type=Path, default=FOLDER, metavar="FOLDER")
    folder = parser.parse_args().into
    folder.mkdir(parents=True, exist_ok=True)
    with LocalStack(Settings()) as stack:
        ask = 'provider-llamacpp chat --thinking low "Who are you?"'
        record("chat", ask, stack.settings, folder)
        record("models", "provider-llamacpp models", stack.settings, folder)
        record("doctor", "provider-llamacpp doctor", stack.settings, folder)
    # The demo model has said its sentence before anybody has looked; this one never ends.
    with tempfile.TemporaryDirectory() as place:
        model = write_model(Path(place) / "loop.gguf", "loop")
        with LocalStack(Settings(drain=0.0), model=str(model)) as stack:
            record(
                "status",
                "provider-llamacpp status",
                stack.settings,
                folder,
                streams=2,
                ctrl_c_after=5.0,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
