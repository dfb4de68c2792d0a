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
"""Bytes of a chunk: what claims to be longer is no chunk."""
_SIZES_KEPT = 256
"""Chunk headers that are remembered: there are few, but a server could send ever new ones."""
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
        self._behind = False
        """The line end behind the data of a chunk is due."""
        self._trailers = -1
        """Trailer lines seen; -1 before the last chunk."""
        self._rest = b""
        """The beginning of a line whose end has not come."""
        self._sizes: dict[bytes, int] = {}
        """Chunk headers read before: the events of a stream have few different lengths."""
        self._between = True
        """What comes next is the header of a chunk, from its first byte on."""

    def feed(self, raw: bytes) -> bytes:
        """:raises FramingError: if the bytes are not in chunked coding"""
        if self._between:
            # One whole chunk, of a length seen before: nearly every read of a stream.
            stop = raw.find(b"\r\n")
            size = self._sizes.get(raw[:stop])
            if size and stop + size + 4 == len(raw) and raw.endswith(b"\r\n"):
                return raw[stop + 2 : -2]
        data = self._feed(raw)
        self._between = not (
            self._left or self._behind or self._rest or self.complete or self._trailers >= 0
        )
        return data

    def _feed(self, raw: bytes) -> bytes:
        if self._rest:
            raw = self._rest + raw
            self._rest = b""
        found: list[bytes] = []
        at = 0
        end = len(raw)
        while at < end and not self.complete:
            if self._left:
                stop = min(at + self._left, end)
                found.append(raw[at:stop])
                self._left -= stop - at
                self._behind = not self._left
                at = stop
                continue
            if self._behind:
                if raw[at:] == b"\r":
                    self._rest = b"\r"
                    break
                at = _past_line_end(raw, at)
                self._behind = False
                continue
            stop = raw.find(b"\r\n", at)
            if stop < 0:
                self._rest = _bounded(raw[at:])
                break
            line = raw[at:stop]
            at = stop + 2
            if self._trailers >= 0:
                self._trailer(line)
                continue
            size = self._size(line)
            stop = at + size
            # The usual case: all of a chunk is here.
            if size and stop + 2 <= end:
                found.append(raw[at:stop])
                at = _past_line_end(raw, stop)
            else:
                self._left = size
        return found[0] if len(found) == 1 else b"".join(found)

    def _size(self, line: bytes) -> int:
        size = self._sizes.get(line)
        if size is None:
            size = _chunk_size(line)
            if not size:
                self._trailers = 0
            elif len(self._sizes) < _SIZES_KEPT:
                self._sizes[line] = size
        return size

    def _trailer(self, line: bytes) -> None:
        self._trailers += 1
        self.complete = not _bounded(line)
        if self._trailers > _TRAILER_LIMIT:
            raise FramingError("the trailer of the body has no end")


def _past_line_end(raw: bytes, at: int) -> int:
    if not raw.startswith(b"\r\n", at):
        raise FramingError("a chunk of the body is longer than it says")
    return at + 2


def _bounded(line: bytes) -> bytes:
    if len(line) > _LINE_LIMIT:
        raise FramingError("a line of the body's framing has no end")
    return line


def _chunk_size(line: bytes) -> int:
    digits = _bounded(line).split(b";", 1)[0].strip(b" \t")
    # int() alone would take "+5", "-5" and "1_0" too.
    if not digits or not _HEX.issuperset(digits):
        raise FramingError(f"not a chunk size: {line[:32]!r}")
    size = int(digits, 16)
    if size > _CHUNK_LIMIT:
        raise FramingError("a chunk of the body claims an absurd size")
    return size
