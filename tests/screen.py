"""A terminal of a fixed size, as far as our commands use one: what was written to it is looked at
as a person would see it.

Knows text, line ends, colours and the movements of the cursor that ``rich`` and our own bars make;
what else begins with an escape fails, so that nothing is overlooked.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field, replace

_CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.|.", re.S)
_SET = {"1": "bold", "2": "dim", "3": "italic", "4": "underline", "7": "reverse"}


@dataclass(frozen=True)
class Style:
    """How a character looks; ``colour`` is 0 to 255, ``#rrggbb``, or None for the usual one."""

    colour: int | str | None = None
    marks: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Cell:
    """One column of one line; the second column of a wide character is empty."""

    text: str = " "
    style: Style = Style()


Line = list[Cell]


@dataclass
class Screen:
    """A screen of so many columns and lines; what scrolls out at the top is kept in ``gone``.

    :param raw: a line feed only goes down, as behind the line discipline of a real terminal
    """

    columns: int
    lines: int = 24
    raw: bool = False
    x: int = 0
    y: int = 0
    style: Style = field(default_factory=Style)
    cursor: bool = True
    gone: list[Line] = field(default_factory=list)
    rows: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [self._blank() for _ in range(self.lines)]

    def write(self, text: str) -> Screen:
        """Show ``text``, which ends with no half of an escape sequence."""
        for found in _CONTROL.finditer(text):
            whole, values, kind = found.group(0), found.group(1), found.group(2)
            if kind is not None:
                self._control(values, kind)
            elif whole.startswith("\x1b"):
                assert whole.startswith("\x1b]"), repr(whole)
            else:
                self._put(whole)
        return self

    def text(self) -> list[str]:
        """All lines, those that are gone first, without blanks at their ends; none at the end."""
        texts = [_text(line) for line in [*self.gone, *self.rows]]
        while texts and not texts[-1]:
            texts.pop()
        return texts

    def shown(self) -> list[str]:
        """The lines on the screen, without blanks at their ends."""
        return [_text(line) for line in self.rows]

    def styles(self, text: str) -> set[Style]:
        """How ``text`` looks, which is somewhere on one line; blanks count for nothing."""
        for line in [*self.gone, *self.rows]:
            at = "".join(cell.text or "\0" for cell in line).find(text)
            if at >= 0:
                return {each.style for each in line[at : at + len(text)] if each.text != " "}
        raise AssertionError(f"{text!r} is not on the screen: {self.text()}")

    # -- characters ---------------------------------------------------------------------------

    def _put(self, character: str) -> None:
        if character == "\n":
            self._down()
            self.x = self.x if self.raw else 0
        elif character == "\r":
            self.x = 0
        elif character == "\b":
            self.x = max(0, self.x - 1)
        elif character == "\t":
            self.x = min(self.columns - 1, (self.x // 8 + 1) * 8)
        elif character == "\a":
            pass
        else:
            assert character >= " ", repr(character)
            self._place(character)

    def _place(self, character: str) -> None:
        wide = unicodedata.east_asian_width(character) in "WF"
        # The line is full: the cursor waits behind its end for the next character.
        if self.x + wide >= self.columns:
            self._down()
            self.x = 0
        self.rows[self.y][self.x] = Cell(character, self.style)
        self.x += 1
        if wide:
            self.rows[self.y][self.x] = Cell("", self.style)
            self.x += 1

    def _down(self) -> None:
        if self.y + 1 < self.lines:
            self.y += 1
            return
        self.gone.append(self.rows.pop(0))
        self.rows.append(self._blank())

    def _blank(self) -> Line:
        return [Cell()] * self.columns

    # -- control sequences --------------------------------------------------------------------

    def _control(self, values: str, kind: str) -> None:
        count = int(values) if values.isdecimal() else 0
        self.x = min(self.x, self.columns - 1) if kind in "ABCDK" else self.x
        if kind == "m":
            self._look(values.split(";") if values else ["0"])
        elif kind == "A":
            self.y = max(0, self.y - (count or 1))
        elif kind == "B":
            self.y = min(self.lines - 1, self.y + (count or 1))
        elif kind == "K":
            first, last = {0: (self.x, None), 1: (0, self.x + 1), 2: (0, None)}[count]
            line = self.rows[self.y]
            line[first:last] = [Cell()] * len(line[first:last])
        elif (values, kind) in (("?25", "l"), ("?25", "h")):
            self.cursor = kind == "h"
        else:
            raise AssertionError(f"unknown control sequence {values}{kind}")

    def _look(self, values: list[str]) -> None:
        while values:
            value, *values = values
            number = int(value)
            if number == 0:
                self.style = Style()
            elif number == 38 and values[0] == "5":
                self.style = replace(self.style, colour=int(values[1]))
                values = values[2:]
            elif number == 38 and values[0] == "2":
                rgb = "".join(f"{int(each):02x}" for each in values[1:4])
                self.style = replace(self.style, colour=f"#{rgb}")
                values = values[4:]
            elif value in _SET:
                self.style = replace(self.style, marks=self.style.marks | {_SET[value]})
            elif number == 39:
                self.style = replace(self.style, colour=None)
            elif number in range(30, 38) or number in range(90, 98):
                colour = number - 30 if number < 90 else number - 82
                self.style = replace(self.style, colour=colour)
            else:
                raise AssertionError(f"unknown style {value}")


def _text(line: Line) -> str:
    return "".join(cell.text for cell in line).rstrip()
