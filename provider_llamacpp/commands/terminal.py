"""What the commands write to: lines, tables and progress bars.

With ``rich`` on a terminal they are set in colour; without it, and wherever the output is no
terminal, the same facts come as plain text. ``rich`` is imported when first something is drawn with
it. Whatever is written here may come from a model or a peer, so control characters are shown, not
obeyed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..settings import Settings

Style = Literal["", "good", "warn", "bad", "dim", "strong"]
Part = str | tuple[str, Style]
"""Text, alone or with its style."""

WIDTH = 80
"""Columns where the output does not say how many it has."""
GAP = 2
"""Columns between those of a plain table."""
NARROWEST = 8
"""Columns that are left to a cell, however narrow the terminal is."""

_RICH_STYLES: Mapping[str, str] = {
    "": "",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "dim": "dim",
    "strong": "bold",
}


def printable(text: str) -> str:
    """``text`` with line ends and tabs kept and every other control character escaped."""
    from ..logs import escape_control

    parts = text.replace("\r\n", "\n").split("\n")
    return "\n".join("\t".join(map(escape_control, part.split("\t"))) for part in parts)


def columns_of(text: str) -> int:
    """Columns that ``text``, one line of it, takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF")
        for each in text
    )


def hold_logs(settings: Settings) -> None:
    """Keep the log's lines out of what a command shows; ``--log-level debug`` lets all through."""
    if settings.log_level == "debug":
        from ..logs import set_up

        set_up(settings.log_level, settings.log_json)
    elif not (logger := logging.getLogger("provider_llamacpp")).handlers:
        # Without any handler Python prints what is a warning.
        logger.addHandler(logging.NullHandler())


def size(count: int) -> str:
    """Bytes as people write them: ``4.7 GB``."""
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    :param right: numbers stand to the right
    :param wrap: may be narrowed where the table is too wide
    """

    title: str
    right: bool = False
    wrap: bool = False


class Progress(Protocol):
    """Something that takes a while; a context manager. Used from one thread."""

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        """Show how far it is: ``done`` of ``total``, in any unit, and a ``note`` behind the bar."""

    def __enter__(self) -> Progress: ...

    def __exit__(self, *exc_info: object) -> None: ...


class Terminal:
    """Writes to ``out``.

    :param width: columns
    :param live: whether what was written can be written over (a terminal, and no dumb one)
    :param colour: whether colours are wanted
    :param rich: draw with ``rich``; None takes it if it is installed and the output is live
    """

    def __init__(
        self,
        out: TextIO,
        *,
        width: int = WIDTH,
        live: bool = False,
        colour: bool = False,
        rich: bool | None = None,
    ) -> None:
        self.out = out
        self.width = max(width, NARROWEST)
        self.live = live
        self.colour = colour
        if rich is None:
            rich = live and importlib.util.find_spec("rich") is not None
        self.rich = rich
        self._console: Console | None = None

    @classmethod
    def of(cls, out: TextIO, environ: Mapping[str, str] | None = None) -> Terminal:
        """What ``out`` is, by itself and by the environment (``NO_COLOR``, ``TERM``,
        ``COLUMNS``)."""
        environ = os.environ if environ is None else environ
        live = out.isatty() and environ.get("TERM") != "dumb"
        return cls(
            out,
            width=_width(out, environ),
            live=live,
            colour=live and not environ.get("NO_COLOR"),
        )

    # -- lines ----------------------------------------------------------------------------

    def line(self, *parts: Part) -> None:
        """One line. It is not wrapped: see :meth:`wrap`."""
        if self.rich:
            self.console.print(self.rich_text(*parts), soft_wrap=True)
        else:
            self._write("".join(self.clean(_text(part)) for part in parts) + "\n")

    def wrap(self, text: str, indent: int) -> list[str]:
        """``text`` in lines that fit beside an indent of so many columns."""
        width = max(self.width - indent, 2 * NARROWEST)
        return _wrap(self.clean(text), width)

    def clean(self, text: str) -> str:
        """``text`` as it can be shown here."""
        text = printable(text)
        encoding = getattr(self.out, "encoding", None) or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)

    # -- tables ---------------------------------------------------------------------------

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[Part]]) -> None:
        """A table with a head. Where the output is no terminal each row is one line, however long:
        it is for programs to read."""
        if self.rich:
            self.console.print(self.rich_table(columns, rows))
            return
        texts = [[self.clean(_text(cell)).replace("\n", " ") for cell in row] for row in rows]
        texts.insert(0, [column.title for column in columns])
        widths = [max(map(columns_of, cells)) for cells in zip(*texts, strict=True)]
        if self.live:
            _narrow(widths, columns, self.width)
        for row in texts:
            self._write("".join(line + "\n" for line in _row(row, widths, columns)))

    def rich_table(self, columns: Sequence[Column], rows: Iterable[Sequence[Part]]) -> Table:
        """The same for ``rich`` to show, for example inside of its live display."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, width=None)
        for column in columns:
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=not column.wrap,
                overflow="fold",
            )
        for row in rows:
            table.add_row(*map(self.rich_text, row))
        return table

    # -- what takes a while ---------------------------------------------------------------

    def progress(self, label: str, *, total: float | None = None) -> Progress:
        """A bar for something that takes a while, gone when it is over.

        :param total: None until it is known: then the time is shown
        """
        if self.rich:
            return _RichProgress(self.console, self.clean(label), total)
        return _PlainProgress(self, label, total)

    # -- rich -----------------------------------------------------------------------------

    @property
    def console(self) -> Console:
        """The console of ``rich``; only where :attr:`rich` is true."""
        if self._console is None:
            from rich.console import Console

            self._console = Console(
                file=self.out,
                width=self.width,
                force_terminal=self.live,
                no_color=not self.colour,
                highlight=False,
                markup=False,
                emoji=False,
            )
        return self._console

    def rich_text(self, *parts: Part) -> Text:
        """The same as :meth:`line`, for ``rich`` to show."""
        from rich.text import Text

        whole = Text()
        for part in parts:
            style = "" if isinstance(part, str) else _RICH_STYLES[part[1]]
            whole.append(self.clean(_text(part)), style)
        return whole

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


class _PlainProgress:
    """One line, written over on a terminal; elsewhere one line at first and one for each tenth."""

    def __init__(
        self,
        terminal: Terminal,
        label: str,
        total: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal = terminal
        self._label = label
        self._total = total
        self._clock = clock
        self._began = clock()
        self._tenth = -1
        self._shown = 0

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        self._total = total or self._total
        terminal = self._terminal
        share = min(1.0, done / self._total) if self._total else None
        if terminal.live:
            self._draw(share, note)
            return
        tenth = int(share * 10) if share is not None else 0
        if tenth > self._tenth:
            self._tenth = tenth
            percent = f": {tenth * 10} %" if share is not None else ""
            terminal.line(f"{self._label}{percent}{' ' + note if note else ''}")

    def _draw(self, share: float | None, note: str) -> None:
        spent = f"{self._clock() - self._began:.0f} s"
        bar = spent if share is None else f"[{'#' * int(share * 20):.<20}] {share:4.0%} {spent}"
        text = self._terminal.clean(f"{self._label} {bar} {note}").replace("\n", " ").rstrip()
        text = text[: self._terminal.width - 1]
        self._terminal._write("\r" + text.ljust(self._shown))
        self._shown = len(text)

    def __enter__(self) -> _PlainProgress:
        self.update(0.0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._shown:
            self._terminal._write("\r" + " " * self._shown + "\r")


class _RichProgress:
    def __init__(self, console: Console, label: str, total: float | None) -> None:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bars.add_task(label, total=total, note="")

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        more: dict[str, Any] = {} if total is None else {"total": total}
        self._bars.update(self._task, completed=done, note=printable(note), **more)

    def __enter__(self) -> _RichProgress:
        self._bars.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bars.stop()


def _width(out: TextIO, environ: Mapping[str, str]) -> int:
    if environ.get("COLUMNS", "").isdecimal():
        return int(environ["COLUMNS"]) or WIDTH
    try:
        return os.get_terminal_size(out.fileno()).columns or WIDTH
    except (OSError, ValueError, AttributeError):
        return WIDTH


def _text(part: Part) -> str:
    return part if isinstance(part, str) else part[0]


def _wrap(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for paragraph in text.split("\n"):
        # textwrap counts characters; some of them are two columns wide.
        wide = columns_of(paragraph) > len(paragraph)
        lines += textwrap.wrap(
            paragraph, max(1, width // 2) if wide else width, break_on_hyphens=False
        ) or [""]
    return lines


def _narrow(widths: list[int], columns: Sequence[Column], width: int) -> None:
    """Take from the widest column that may be narrowed, until the table fits or none is left."""
    room = width - GAP * (len(widths) - 1)
    while sum(widths) > room:
        wide = [at for at, each in enumerate(columns) if each.wrap and widths[at] > NARROWEST]
        if not wide:
            return
        widths[max(wide, key=widths.__getitem__)] -= 1


def _row(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> list[str]:
    """The lines of one row."""
    parts = [
        _wrap(cell, width) if columns_of(cell) > width else [cell]
        for cell, width in zip(cells, widths, strict=True)
    ]
    lines = []
    for at in range(max(map(len, parts))):
        line = []
        for part, width, column in zip(parts, widths, columns, strict=True):
            text = part[at] if at < len(part) else ""
            blank = " " * (width - columns_of(text))
            line.append(blank + text if column.right else text + blank)
        lines.append((" " * GAP).join(line).rstrip())
    return lines
