"""Body bytes of a stream -> the data of its server-sent events. No JSON, no frames, no socket.

The one form llama-server writes, a line ``data: ...`` and a blank line, is cut here. Every other
event is parsed by sseclient-py, given whole and in clean UTF-8: fed with reads as they come, 1.9
raises on an invalid byte, and takes CR LF for one line end or two by where a read happened to end.

What such a parser drops without a word is told apart here, because llama-server reports failures
in it (llama-server API 6 and 15): the field ``error:`` of builds before October 2025, and lines
that are no event at all (``proxy error: ...``, plain JSON). Comments (``:``) are signs of life and
nothing else; whoever reads the socket has seen them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sseclient

MAX_EVENT = 1 << 20
"""Bytes of one event, and so of one line; more is a fault, and no more of it is kept."""

_BORDER = b"\n\n"
_COMMON = b"data: "
_FIELDS = frozenset(("data", "event", "id", "retry"))


@dataclass(frozen=True, slots=True)
class Stray:
    """What a body holds beside events.

    ``error``: the value of an ``error:`` field. ``text``: lines that are no event. ``oversized``:
    an event over :data:`MAX_EVENT`; nothing follows it.
    """

    kind: Literal["error", "text", "oversized"]
    text: bytes = b""


Item = bytes | Stray


class EventCutter:
    """Blocks of bytes in, as they arrive; the data of whole events out.

    The items are the same however the bytes are cut into blocks. An item of ``bytes`` is the data
    of one event, never empty, and may hold invalid UTF-8.

    :meth:`feed` is :meth:`take` and :meth:`split`; they are apart for a caller that can read whole
    events faster than by having them split.
    """

    __slots__ = ("_after_cr", "_failed", "_first", "_limit", "_reported", "_tail")

    def __init__(self, *, limit: int = MAX_EVENT) -> None:
        self._limit = limit
        self._tail = bytearray()
        self._after_cr = False
        self._first = True
        self._failed = False
        self._reported = False

    @property
    def failed(self) -> bool:
        """An event was oversized; :meth:`split` has said so, or will."""
        return self._failed

    @property
    def clean(self) -> bool:
        """Nothing is held back: the next block stands by itself."""
        return not (self._tail or self._after_cr or self._failed)

    def feed(self, block: bytes) -> list[Item]:
        """The items that ``block`` completes."""
        return self.split(self.take(block))

    def close(self) -> list[Item]:
        """The body has ended: what an event without its blank line holds, possibly truncated."""
        rest = bytes(self._tail)
        self._tail.clear()
        return self.split(rest)

    def take(self, block: bytes) -> bytes:
        """Add ``block``; all whole events there are now, each with its border, lines end in LF."""
        if self._failed or not block:
            return b""
        if self._after_cr or b"\r" in block:
            block = self._unify(block)
        tail = self._tail
        if tail:
            tail += block
            if b"\n" not in block:
                self._check(tail)
                return b""
            block = bytes(tail)
            tail.clear()
        end = block.rfind(_BORDER) + len(_BORDER)
        if end < len(_BORDER):
            end = 0
        if end < len(block):
            tail += block[end:]
            self._check(tail)
        return block[:end]

    def split(self, whole: bytes) -> list[Item]:
        """The items of what :meth:`take` gave."""
        items: list[Item] = []
        oversized = len(whole) > self._limit
        for part in whole.split(_BORDER):
            if part.startswith(b"\n"):
                part = part.lstrip(b"\n")  # of a border with a blank line too many
            if oversized and len(part.strip(b"\n")) > self._limit:
                self._fail()
                break
            if part.startswith(_COMMON) and b"\n" not in part:
                self._first = False
                if len(part) > len(_COMMON):
                    items.append(part[len(_COMMON) :])
            elif part:
                items += self._parse(part)
        if self._failed and not self._reported:
            self._reported = True
            items.append(Stray("oversized"))
        return items

    def _unify(self, block: bytes) -> bytes:
        """End lines in LF. A CR ends its line at once; an LF behind it, in any block, is its."""
        if self._after_cr and block.startswith(b"\n"):
            block = block[1:]
        self._after_cr = block.endswith(b"\r")
        return block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _check(self, tail: bytearray) -> None:
        # Blank lines around it are no part of an event, wherever the block was cut.
        if len(tail) > self._limit and len(tail.strip(b"\n")) > self._limit:
            self._fail()

    def _fail(self) -> None:
        self._failed = True
        self._tail = bytearray()

    def _parse(self, part: bytes) -> list[Item]:
        """One event in any other form than the common one."""
        text = part.decode("utf-8", "replace")
        if self._first:
            self._first = False
            text = text.removeprefix("\ufeff")
        items: list[Item] = []
        stray = []
        has_data = False
        for line in text.split("\n"):
            if not line.strip() or line.startswith(":"):
                continue
            field, _, value = line.partition(":")
            if field in _FIELDS:
                has_data = has_data or field == "data"
            elif field == "error":
                items.append(Stray("error", value.strip().encode()))
            else:
                stray.append(line)
        if stray:
            items.append(Stray("text", "\n".join(stray).encode()))
        if has_data:
            source = iter((text.encode() + _BORDER,))
            items += [e.data.encode() for e in sseclient.SSEClient(source).events() if e.data]
        return items
