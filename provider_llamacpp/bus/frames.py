"""WebSocket frames as bytes, client side (RFC 6455, section 5). Pure: no socket, no clock.

Writing is done here and not by websocket-client because of its price: one frame of ours costs a
third of its ``send()``, and the frames of one read leave in one system call. Reading is done here
because the channels' sockets are read without blocking, and because an inbound message needs a
limit, which websocket-client does not have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from io import SEEK_END, BytesIO
from struct import pack

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
OVERSIZE = 0x100
"""Not an opcode of the wire: stands for a message that was longer than the limit and skipped."""

MAX_FRAME = 16 * 1024**2
"""Bytes of payload the engine takes in one frame (engine protocol 1.4)."""
FRAGMENT = 1024**2
"""Bytes of payload in each fragment of a message longer than that (engine protocol 1.4)."""
MAX_CONTROL = 125
"""Bytes of payload in a control frame (RFC 6455, section 5.5)."""
PIECE = 64 * 1024
"""Bytes masked in one go: masking needs four copies of them for a moment, and the last frame of a
long answer has megabytes. A multiple of four, so that the key goes on where it stopped."""

NORMAL, PROTOCOL_ERROR, NO_CODE, TOO_BIG = 1000, 1002, 1005, 1009
"""Close codes; :data:`NO_CODE` is what a Close without one reads as."""

_LONGEST_SKIP = 1 << 40
_SHORT_HEADS = tuple(bytes((0x80 | TEXT, 0x80 | length)) for length in range(126))

Keys = Callable[[int], bytes]
"""Gives so many random bytes, as ``os.urandom`` does."""


class FrameError(ValueError):
    """The peer broke the framing; ``code`` is what our Close should carry."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class OversizedFrame(ValueError):
    """A payload is longer than one frame may be; ``index`` is its place in the batch."""

    def __init__(self, index: int, size: int) -> None:
        super().__init__(f"a frame of {size} bytes is over the engine's limit of {MAX_FRAME}")
        self.index = index


class KeyPool:
    """Mask keys from blocks of random bytes: a system call for each key would cost thrice that.

    Not thread-safe; its owner's lock guards it.
    """

    __slots__ = ("_at", "_block", "_source")

    _SIZE = 512

    def __init__(self, source: Keys = os.urandom) -> None:
        self._source = source
        self._block = b""
        self._at = 0

    def take(self, count: int) -> bytes:
        """``count`` fresh random bytes (at most one block)."""
        at = self._at
        key = self._block[at : at + count]
        if len(key) < count:
            self._block = self._source(self._SIZE)
            self._at = count
            return self._block[:count]
        self._at = at + count
        return key


def mask(payload: bytes | memoryview, key: bytes) -> bytes:
    """``payload`` masked with the 4 bytes of ``key``, or unmasked: it is its own inverse."""
    size = len(payload)
    if size > PIECE:
        out = BytesIO()
        _write_masked(out, payload, key)
        return out.getvalue()
    words = (size + 3) >> 2
    stream = int.from_bytes(key * words, "little")
    return (int.from_bytes(payload, "little") ^ stream).to_bytes(words << 2, "little")[:size]


def text_frames(payloads: Sequence[bytes], keys: Keys) -> bytes:
    """One masked text frame for each payload, all in one piece.

    :param payloads: UTF-8 texts
    :raises OversizedFrame: naming the first payload of more than :data:`MAX_FRAME` bytes
    """
    frames: list[bytes] = []
    number = int.from_bytes
    for payload in payloads:
        size = len(payload)
        if size < 126:
            head = _SHORT_HEADS[size]
        elif size <= PIECE:
            head = _head(TEXT, size, True)
        else:
            return _long_text_frames(payloads, keys)
        key = keys(4)
        words = (size + 3) >> 2
        # The lines of mask(), without the call: this runs for every token.
        masked = number(payload, "little") ^ number(key * words, "little")
        frames.append(head + key + masked.to_bytes(words << 2, "little")[:size])
    return frames[0] if len(frames) == 1 else b"".join(frames)


def _long_text_frames(payloads: Sequence[bytes], keys: Keys) -> bytes:
    """:func:`text_frames` where one is long: no copy but the result, which is not joined either."""
    out = BytesIO()
    for index, payload in enumerate(payloads):
        size = len(payload)
        if size > MAX_FRAME:
            raise OversizedFrame(index, size)
        key = keys(4)
        out.write(_head(TEXT, size, True) + key)
        _write_masked(out, payload, key)
    return out.getvalue()


def _write_masked(out: BytesIO, payload: bytes | memoryview, key: bytes) -> None:
    view = memoryview(payload)
    for at in range(0, len(view), PIECE):
        out.write(mask(view[at : at + PIECE], key))


def message_frames(text: bytes, keys: Keys) -> list[bytes]:
    """One text message: a single frame, or fragments cut between characters if it is too long.

    :param text: valid UTF-8
    """
    if len(text) <= MAX_FRAME:
        return [client_frame(TEXT, text, keys(4))]
    frames = []
    start, opcode = 0, TEXT
    while start < len(text):
        end = min(start + FRAGMENT, len(text))
        while end < len(text) and text[end] & 0xC0 == 0x80:
            end -= 1
        frames.append(client_frame(opcode, text[start:end], keys(4), fin=end == len(text)))
        start, opcode = end, CONT
    return frames


def client_frame(opcode: int, payload: bytes, key: bytes, *, fin: bool = True) -> bytes:
    """One masked frame."""
    head = _head(opcode, len(payload), fin) + key
    if len(payload) <= PIECE:
        return head + mask(payload, key)
    out = BytesIO(head)
    out.seek(0, SEEK_END)
    _write_masked(out, payload, key)
    return out.getvalue()


def close_frame(key: bytes, code: int = NORMAL) -> bytes:
    """A Close; :data:`NO_CODE` sends one without a code."""
    return client_frame(CLOSE, b"" if code == NO_CODE else pack("!H", code), key)


def ping_frame(key: bytes) -> bytes:
    """A ping of the WebSocket layer, which the other end's library answers."""
    return client_frame(PING, b"", key)


def pong_frame(key: bytes, payload: bytes) -> bytes:
    """The answer to a ping."""
    return client_frame(PONG, payload, key)


def close_code(payload: bytes) -> int:
    """The code in a Close's payload."""
    return int.from_bytes(payload[:2], "big") if len(payload) >= 2 else NO_CODE


def _head(opcode: int, size: int, fin: bool) -> bytes:
    first = opcode | 0x80 if fin else opcode
    if size < 126:
        return bytes((first, 0x80 | size))
    if size < 65536:
        return pack("!BBH", first, 0xFE, size)
    return pack("!BBQ", first, 0xFF, size)


class FrameReader:
    """Cuts what a server sends into messages and control frames.

    :param max_message: bytes of one message, over all its fragments; a longer one is skipped as
        it arrives and shows as one :data:`OVERSIZE`, so that it costs neither the memory nor the
        connection
    """

    def __init__(self, max_message: int) -> None:
        self._max = max_message
        self._buffer = bytearray()
        self._first = -1
        """First byte of the frame under way; -1 between frames."""
        self._left = 0
        """Bytes of its payload that are still to be taken from the buffer."""
        self._message = CONT
        """Opcode of the message under way; :data:`CONT` between messages."""
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """What ``data`` completes, in order: ``(opcode, payload)`` of whole messages and of
        control frames. Every split of the same bytes gives the same.

        :raises FrameError: where the framing is broken, after what came before it
        """
        self._buffer += data
        while self._first >= 0 or self._open_frame():
            control = self._first & 0x0F >= CLOSE
            if not control and self._size > self._max:
                gone = min(self._left, len(self._buffer))
                del self._buffer[:gone]
                self._left -= gone
                if self._left:
                    return
                payload = b""
            elif len(self._buffer) < self._left:
                return
            else:
                payload = bytes(self._buffer[: self._left])
                del self._buffer[: self._left]
            first, self._first = self._first, -1
            if control:
                yield first & 0x0F, payload
                continue
            self._parts.append(payload)
            if first & 0x80:
                yield self._end_message()

    def _open_frame(self) -> bool:
        """Take the next frame's head off the buffer; False if it is not all there yet."""
        buffer = self._buffer
        if len(buffer) < 2:
            return False
        first, size, start = buffer[0], buffer[1] & 0x7F, 2
        if first & 0x70 or buffer[1] & 0x80:
            raise FrameError(PROTOCOL_ERROR, "reserved bits, or a masked frame from a server")
        if size > MAX_CONTROL:
            start = 4 if size == 126 else 10
            if len(buffer) < start:
                return False
            size = int.from_bytes(buffer[2:start], "big")
        self._check(first, size)
        del buffer[:start]
        self._first, self._left = first, size
        if first & 0x0F < CLOSE:
            self._size += size
            if self._size > self._max:
                self._parts.clear()
        return True

    def _check(self, first: int, size: int) -> None:
        opcode = first & 0x0F
        if opcode >= CLOSE:
            if opcode > PONG or not first & 0x80 or size > MAX_CONTROL:
                raise FrameError(PROTOCOL_ERROR, "a bad control frame")
        elif opcode > BINARY or (opcode == CONT) != (self._message != CONT):
            raise FrameError(PROTOCOL_ERROR, "an unknown opcode, or a fragment out of place")
        elif size > _LONGEST_SKIP:
            raise FrameError(TOO_BIG, f"a frame of {size} bytes")
        elif opcode != CONT:
            self._message = opcode

    def _end_message(self) -> tuple[int, bytes]:
        over = self._size > self._max
        payload = b"" if over else b"".join(self._parts)
        opcode, self._message = self._message, CONT
        self._parts.clear()
        self._size = 0
        return (OVERSIZE if over else opcode), payload
