"""Frames: written as a server reads them, read as a server writes them, at every split."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from typing import Any

import pytest
from bus_peers import server_frame
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from provider_llamacpp.bus import frames
from provider_llamacpp.bus.frames import FrameError, FrameReader, KeyPool, OversizedFrame


def as_server(data: bytes) -> list[Frame]:
    """What an independent implementation reads."""
    reader = StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    found = []
    while not _drained(reader):
        parsing = Frame.parse(reader.read_exact, mask=True)
        try:
            while True:
                next(parsing)
        except StopIteration as end:
            found.append(end.value)
    return found


def _drained(reader: StreamReader) -> bool:
    at_end = reader.at_eof()
    try:
        next(at_end)
    except StopIteration as end:
        return bool(end.value)
    return False


def fixed(count: int) -> bytes:
    return bytes(range(1, count + 1))


SIZES = [0, 1, 2, 3, 4, 5, 125, 126, 127, 65535, 65536, 65537, 3 * frames.PIECE + 1]


@pytest.mark.parametrize("size", SIZES)
def test_a_text_frame_reads_back(size: int) -> None:
    payload = os.urandom(size).hex().encode()[:size]
    (frame,) = as_server(frames.text_frames([payload], os.urandom))
    assert frame == Frame(Opcode.TEXT, payload)


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_a_batch_is_its_frames_in_order(payloads: list[bytes]) -> None:
    pool = KeyPool()
    data = frames.text_frames(payloads, pool.take)
    assert [bytes(each.data) for each in as_server(data)] == payloads
    assert all(each.opcode is Opcode.TEXT and each.fin for each in as_server(data))


def test_long_frames_stand_among_short_ones_in_their_order() -> None:
    payloads = [b"a", os.urandom(frames.PIECE + 3), b"b" * 200, os.urandom(2 * frames.PIECE), b""]
    data = frames.text_frames(payloads, KeyPool().take)
    assert [bytes(each.data) for each in as_server(data)] == payloads


@pytest.mark.parametrize("written", [frames.text_frames, frames.message_frames])
def test_a_long_frame_costs_little_beside_its_own_bytes(written: Any) -> None:
    """The last frame of a long answer has megabytes, and many answers may end at once."""
    payload = b"x" * (8 << 20)
    given = payload if written is frames.message_frames else [payload]
    tracemalloc.start()
    try:
        data = written(given, fixed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data[0] if isinstance(data, list) else data) > len(payload)
    assert peak < 1.5 * len(payload)


def test_every_frame_has_a_key_of_its_own() -> None:
    data = frames.text_frames([b"\0\0\0\0"] * 100, KeyPool().take)
    keys = {data[at + 2 : at + 6] for at in range(0, len(data), 10)}
    assert len(keys) == 100


def test_a_payload_over_the_limit_is_named_by_its_place() -> None:
    with pytest.raises(OversizedFrame, match="16777217 bytes") as caught:
        frames.text_frames([b"a", b"b" * (frames.MAX_FRAME + 1)], fixed)
    assert caught.value.index == 1
    with pytest.raises(OversizedFrame) as caught:
        frames.text_frames([b"a" * frames.MAX_FRAME, b"b", b"c" * (frames.MAX_FRAME + 1)], fixed)
    assert caught.value.index == 2


@given(st.binary(max_size=2000), st.binary(min_size=4, max_size=4))
def test_masking_twice_changes_nothing(payload: bytes, key: bytes) -> None:
    masked = frames.mask(payload, key)
    assert masked == bytes(byte ^ key[at % 4] for at, byte in enumerate(payload))
    assert frames.mask(masked, key) == payload


def test_control_frames() -> None:
    data = frames.ping_frame(fixed(4)) + frames.pong_frame(fixed(4), b"abc")
    data += frames.close_frame(fixed(4)) + frames.close_frame(fixed(4), frames.NO_CODE)
    assert as_server(data) == [
        Frame(Opcode.PING, b""),
        Frame(Opcode.PONG, b"abc"),
        Frame(Opcode.CLOSE, b"\x03\xe8"),
        Frame(Opcode.CLOSE, b""),
    ]


def test_close_codes() -> None:
    assert frames.close_code(b"\x03\xe9bye") == 1001
    assert frames.close_code(b"") == frames.NO_CODE
    assert frames.close_code(b"\x03") == frames.NO_CODE


def test_a_message_of_up_to_16_mib_is_one_frame() -> None:
    text = b"x" * frames.MAX_FRAME
    (data,) = frames.message_frames(text, fixed)
    (frame,) = as_server(data)
    assert frame.fin and frame.data == text


def test_a_longer_message_is_cut_between_characters() -> None:
    text = ("a" + "€" * (frames.MAX_FRAME // 3)).encode() + b"bc"
    parts = [as_server(each)[0] for each in frames.message_frames(text, os.urandom)]
    assert b"".join(bytes(each.data) for each in parts) == text
    assert [each.opcode for each in parts[:2]] == [Opcode.TEXT, Opcode.CONT]
    assert [each.fin for each in parts] == [False] * (len(parts) - 1) + [True]
    for each in parts:
        assert len(each.data) <= frames.FRAGMENT
        bytes(each.data).decode()
    assert len(parts) == 17


# -- reading ------------------------------------------------------------------------------


def read(reader: FrameReader, *blocks: bytes) -> list[tuple[int, bytes]]:
    return [event for block in blocks for event in reader.feed(block)]


STREAM = b"".join(
    [
        server_frame(1, b"first"),
        server_frame(9, b"?"),
        server_frame(1, b"a" * 200, final=False),
        server_frame(10, b"in between"),
        server_frame(0, b"b" * 70000, final=False),
        server_frame(0, b""),
        server_frame(2, b"x" * 126),
        server_frame(1, b"o" * 80000, final=False),
        server_frame(9, b"!"),
        server_frame(0, b"o"),
        server_frame(1, b""),
        server_frame(8, b"\x03\xe8"),
    ]
)
EVENTS = [
    (frames.TEXT, b"first"),
    (frames.PING, b"?"),
    (frames.PONG, b"in between"),
    (frames.TEXT, b"a" * 200 + b"b" * 70000),
    (frames.BINARY, b"x" * 126),
    (frames.PING, b"!"),
    (frames.OVERSIZE, b""),
    (frames.TEXT, b""),
    (frames.CLOSE, b"\x03\xe8"),
]
LIMIT = 75000


def test_whole() -> None:
    assert read(FrameReader(LIMIT), STREAM) == EVENTS


def test_small_blocks() -> None:
    assert (
        read(FrameReader(LIMIT), *(STREAM[i : i + 7] for i in range(0, len(STREAM), 7))) == EVENTS
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_every_split_gives_the_same(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    blocks = [STREAM[a:b] for a, b in itertools.pairwise(edges)]
    assert read(FrameReader(LIMIT), *blocks) == EVENTS


def test_short_stream_byte_by_byte() -> None:
    data = server_frame(1, b"one") + server_frame(9) + server_frame(2, b"y" * 130)
    expected = [(frames.TEXT, b"one"), (frames.PING, b""), (frames.BINARY, b"y" * 130)]
    assert read(FrameReader(LIMIT), *(data[i : i + 1] for i in range(len(data)))) == expected


def test_an_oversized_message_costs_no_memory() -> None:
    reader = FrameReader(1000)
    head = server_frame(1, b"z" * 500, final=False) + b"\x80\x7f" + (1 << 24).to_bytes(8, "big")
    assert read(reader, head) == []
    for last in [False] * 15 + [True]:
        assert read(reader, bytes(1 << 20)) == ([(frames.OVERSIZE, b"")] if last else [])
        assert len(reader._buffer) == 0 and not any(reader._parts)
    assert read(reader, server_frame(1, b"next")) == [(frames.TEXT, b"next")]


BROKEN = {
    "a reserved bit": b"\xc1\x00",
    "a masked frame": b"\x81\x80\0\0\0\0",
    "an unknown data opcode": server_frame(3, b"x"),
    "an unknown control opcode": server_frame(11),
    "a ping in pieces": server_frame(9, b"x", final=False),
    "a long ping": b"\x89\x7e\x00\x7e" + bytes(126),
    "a fragment of nothing": server_frame(0, b"x"),
    "a message inside a message": server_frame(1, b"a", final=False) + server_frame(1, b"b"),
    "an absurd length": b"\x81\x7f" + (1 << 62).to_bytes(8, "big"),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_broken_framing_is_refused_after_what_came_before(broken: bytes) -> None:
    feeding = FrameReader(LIMIT).feed(server_frame(1, b"before") + broken)
    assert next(feeding) == (frames.TEXT, b"before")
    with pytest.raises(FrameError) as caught:
        list(feeding)
    assert caught.value.code in (frames.PROTOCOL_ERROR, frames.TOO_BIG)


# -- keys ---------------------------------------------------------------------------------


def test_the_pool_asks_for_a_block_at_a_time() -> None:
    asked: list[int] = []

    def source(count: int) -> bytes:
        asked.append(count)
        return bytes(i % 251 for i in range(count))

    pool = KeyPool(source)
    keys = b"".join(pool.take(4) for _ in range(128))
    assert asked == [512] and keys == source(512)
    assert pool.take(4) == source(4) and len(asked) == 4  # 512 again for the key after the block
