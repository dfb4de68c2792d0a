"""What goes over the wires of a measurement: tokens that carry their send time, frames, answers.

Pure functions. The sink keeps what it receives as it came; all of this runs after the measurement.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

WRAP = 10**10
"""Microseconds after which the stamps of tokens start anew: under three hours."""
TOKEN = re.compile(rb" (\d{10})(\d{6})")
"""Send time in microseconds of the monotonic clock, and place in the stream."""
COMPLETION = re.compile(rb'"completion_tokens": ?(\d+)')

CLOSE = b"\x88\x02\x03\xe8"
TEXT_OPCODE, CLOSE_OPCODE, PING_OPCODE = 1, 8, 9


def token(sent_ns: int, place: int) -> bytes:
    """The text of one token, always of the same length."""
    return b" %010d%06d" % (sent_ns // 1000 % WRAP, place)


def age_us(received_ns: int, stamp: int) -> int:
    """Microseconds between the stamp of a token and its arrival."""
    return (received_ns // 1000 - stamp) % WRAP


# -- WebSocket ------------------------------------------------------------------------------------


def accept_key(key: str) -> str:
    """``Sec-WebSocket-Accept`` for a client's key (RFC 6455, 4.2.2)."""
    digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
    return base64.b64encode(digest).decode()


def server_frame(payload: bytes, opcode: int = TEXT_OPCODE) -> bytes:
    """One whole frame as a server sends it: not masked."""
    size = len(payload)
    if size < 126:
        return bytes((0x80 | opcode, size)) + payload
    if size < 1 << 16:
        return bytes((0x80 | opcode, 126)) + size.to_bytes(2, "big") + payload
    return bytes((0x80 | opcode, 127)) + size.to_bytes(8, "big") + payload


@dataclass(slots=True)
class Frame:
    """Where a client's frame lies in the bytes; the payload is still masked."""

    opcode: int
    mask: int
    """Offset of the masking key."""
    end: int

    def payload(self, data: bytes | bytearray) -> bytes:
        """The payload in clear."""
        start = self.mask + 4
        size = self.end - start
        key = bytes(data[self.mask : start]) * (size // 4 + 1)
        masked = int.from_bytes(data[start : self.end], "big")
        return (masked ^ int.from_bytes(key[:size], "big")).to_bytes(size, "big")


def next_frame(data: bytes | bytearray, start: int) -> Frame | None:
    """The masked frame that begins at ``start``; None while its header is incomplete.

    Its end may lie beyond the data.
    """
    have = len(data) - start
    if have < 6:
        return None
    size, mask = data[start + 1] & 0x7F, start + 2
    if size == 126:
        if have < 8:
            return None
        size, mask = int.from_bytes(data[start + 2 : start + 4], "big"), start + 4
    elif size == 127:
        if have < 14:
            return None
        size, mask = int.from_bytes(data[start + 2 : start + 10], "big"), start + 10
    return Frame(data[start] & 0x0F, mask, mask + 4 + size)


class Walker:
    """Follows frame headers through the blocks of a socket, to see the Close and little else."""

    def __init__(self) -> None:
        self._rest = b""
        self._skip = 0

    def feed(self, block: bytes) -> bool:
        """Whether a Close frame begins in what has come so far."""
        data, position = self._rest + block, self._skip
        while position < len(data):
            frame = next_frame(data, position)
            if frame is None:
                self._rest, self._skip = data[position:], 0
                return False
            if frame.opcode == CLOSE_OPCODE:
                return True
            position = frame.end
        self._rest, self._skip = b"", position - len(data)
        return False


def payloads(data: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    """Offset of the end, and payload, of each whole text frame."""
    position = 0
    while frame := next_frame(data, position):
        if frame.end > len(data):
            return
        if frame.opcode == TEXT_OPCODE:
            yield frame.end, frame.payload(data)
        position = frame.end


# -- what a stream came to ------------------------------------------------------------------------


@dataclass(slots=True)
class Blocks:
    """Bytes as they came: when, and up to which offset."""

    data: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)

    def add(self, now_ns: int, block: bytes) -> None:
        """What one ``recv`` gave."""
        self.data += block
        self.ends.append(len(self.data))
        self.times.append(now_ns)

    def time_of(self, offset: int) -> int:
        """When the byte before ``offset`` had arrived."""
        return self.times[bisect_left(self.ends, offset)]


@dataclass(slots=True)
class Answer:
    """The tokens of one stream and how it ended."""

    received_ns: list[int] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    frames: int = 0
    """Delta frames, or chunks with content: tokens of a server that puts no stamps in."""
    snapshots: int = 0
    """Frames that hold a whole message."""
    claimed: int | None = None
    """How many tokens the usage at the end speaks of."""
    whole: bool = True
    """The final message holds the text of all deltas (frames only)."""
    ended: str = ""
    """Type of the last frame, or ``[DONE]``."""

    def take(self, text: bytes, received_ns: int) -> None:
        """Collect the tokens in ``text``."""
        for found in TOKEN.finditer(text):
            self.received_ns.append(received_ns)
            self.stamps.append(int(found[1]))
            self.places.append(int(found[2]))

    def complete(self) -> bool:
        """Every token once, in order, and the answer ended as it should."""
        return (
            self.whole
            and self.ended in ("done", "[DONE]")
            and self.places == list(range(len(self.places)))
            and self.claimed == len(self.places)
        )


def read_frames(blocks: Blocks) -> Answer:
    """The answer in the frames of a channel (provider protocol 6)."""
    answer, deltas = Answer(), []
    for end, payload in payloads(blocks.data):
        head = payload[:40]
        if b"_delta" in head:
            answer.frames += 1
            answer.take(payload, blocks.time_of(end))
            deltas.append(payload)
        elif b'"ping"' not in head:
            event = json.loads(payload)
            answer.ended = event["type"]
            message = event.get("message") or event.get("error")
            answer.snapshots += bool(message) or "partial" in event
            if message:
                answer.claimed = message.get("usage", {}).get("output")
                text = "".join(block.get("text", "") for block in message["content"])
                answer.whole = text == "".join(json.loads(each)["delta"] for each in deltas)
    return answer


def read_chunks(blocks: Blocks) -> Answer:
    """The answer in a copy of llama-server's event stream, or in a proxy's."""
    answer, data = Answer(), bytes(blocks.data)
    for found in TOKEN.finditer(data):
        answer.take(found[0], blocks.time_of(found.end()))
    answer.frames = len(re.findall(rb'"content": ?"[^"]', data))
    counts = COMPLETION.findall(data)
    answer.claimed = int(counts[-1]) if counts else None
    answer.ended = "[DONE]" if b"data: [DONE]" in data else ""
    return answer


def arrivals(answers: Sequence[Answer], since_ns: int, until_ns: int) -> list[int]:
    """Latencies in microseconds of the tokens that came between two times."""
    return [
        age_us(at, stamp)
        for answer in answers
        for at, stamp in zip(answer.received_ns, answer.stamps, strict=True)
        if since_ns <= at < until_ns
    ]
