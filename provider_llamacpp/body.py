"""HTTP/1.1 body framing: what arrived on a socket in, bytes of the body out.

Pure: knows neither sockets nor SSE. It stands in for the readers of ``http.client`` and
``urllib3``, which hand out one chunk a call, or hold a short read back until it is full.

All three framings have the same members: ``feed`` takes what one read gave and returns the body
bytes in it; ``complete`` says that nothing of the body is missing if the peer closes now;
``until_close`` says that only the close of the connection ends the body. Bytes behind the end of a
body are dropped: a connection carries one answer.
"""

from __future__ import annotations

from typing import Protocol

_LINE_LIMIT = 4096
"""Bytes of a chunk-size or trailer line: far above any real one."""
_TRAILER_LIMIT = 64
"""Trailer lines behind the last chunk."""
_CHUNK_LIMIT = 1 << 40
_HEX = frozenset(b"0123456789abcdefABCDEF")


class FramingError(ValueError):
    """The bytes are no chunked body."""


class Framing(Protocol):
    """See the module's text."""

    until_close: bool

    @property
    def complete(self) -> bool: ...

    def feed(self, raw: bytes) -> bytes: ...


class UntilClose:
    """The body ends where the peer closes: it says nothing of an early end."""

    until_close = True
    complete = True

    def feed(self, raw: bytes) -> bytes:
        return raw


class Counted:
    """A body of ``Content-Length`` bytes."""

    until_close = False

    def __init__(self, length: int) -> None:
        self._left = length

    @property
    def complete(self) -> bool:
        return self._left == 0

    def feed(self, raw: bytes) -> bytes:
        if len(raw) > self._left:
            raw = raw[: self._left]
        self._left -= len(raw)
        return raw


class Dechunker:
    """A body in chunked transfer coding. Holds back no byte of data, whatever the split."""

    until_close = False

    def __init__(self) -> None:
        self.complete = False
        self._left = 0
        """Bytes of the current chunk's data still to come."""
        self._rest = b""
        """An unfinished line: a chunk size, the line end behind a chunk, or a trailer."""
        self._first = True
        self._trailers = -1
        """Trailer lines seen; -1 before the last chunk."""

    def feed(self, raw: bytes) -> bytes:
        """:raises FramingError: if the bytes are not in chunked coding"""
        if self.complete:
            return b""
        if self._rest:
            raw = self._rest + raw
            self._rest = b""
        found: list[bytes] = []
        at = 0
        end = len(raw)
        while at < end:
            if self._left:
                stop = min(at + self._left, end)
                found.append(raw[at:stop])
                self._left -= stop - at
                at = stop
                continue
            at = self._line(raw, at)
            if at < 0:
                break
        return found[0] if len(found) == 1 else b"".join(found)

    def _line(self, raw: bytes, at: int) -> int:
        """Take one size or trailer line at ``at``; where it ends, or -1 for no more now."""
        start = at
        if not self._first and self._trailers < 0:
            # The data of a chunk is followed by a line end of its own.
            mark = raw[at : at + 2]
            if not b"\r\n".startswith(mark):
                raise FramingError("a chunk of the body is longer than it says")
            start = at + 2
        stop = raw.find(b"\r\n", start)
        if stop < 0:
            if len(raw) - start > _LINE_LIMIT:
                raise FramingError("a chunk header of the body has no end")
            self._rest = raw[at:]
            return -1
        line = raw[start:stop]
        if self._trailers >= 0:
            self._trailer(line)
            return -1 if self.complete else stop + 2
        self._left = _chunk_size(line)
        self._first = False
        if not self._left:
            self._trailers = 0
        return stop + 2

    def _trailer(self, line: bytes) -> None:
        self._trailers += 1
        self.complete = not line
        if len(line) > _LINE_LIMIT or self._trailers > _TRAILER_LIMIT:
            raise FramingError("the trailer of the body has no end")


def _chunk_size(line: bytes) -> int:
    digits = line.split(b";", 1)[0].strip(b" \t")
    # int() alone would take "+5", "-5" and "1_0" too.
    if not digits or not _HEX.issuperset(digits) or len(line) > _LINE_LIMIT:
        raise FramingError(f"not a chunk size: {line[:32]!r}")
    size = int(digits, 16)
    if size > _CHUNK_LIMIT:
        raise FramingError("a chunk of the body claims an absurd size")
    return size
