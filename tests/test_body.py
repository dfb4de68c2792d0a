"""Body framing: any split of the bytes gives the same body, bad framing is an error."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider_llamacpp.server.body import Counted, Dechunker, FramingError, UntilClose


def chunked(parts: list[bytes], *, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)
    return chunks + b"0" + extension + b"\r\n" + trailers + b"\r\n"


def pieces(raw: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    return [raw[start:stop] for start, stop in itertools.pairwise(edges)]


@given(
    parts=st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    cuts=st.lists(st.integers(min_value=0), max_size=12),
    extension=st.sampled_from([b"", b";a=b", b" ", b';q="1"']),
    trailers=st.sampled_from([b"", b"X-Sum: 1\r\n", b"A: 1\r\nB: 2\r\n"]),
)
def test_every_split_of_a_chunked_body_gives_the_same_bytes(
    parts: list[bytes], cuts: list[int], extension: bytes, trailers: bytes
) -> None:
    raw = chunked(parts, extension=extension, trailers=trailers)
    body = Dechunker()
    assert b"".join(body.feed(piece) for piece in pieces(raw, cuts)) == b"".join(parts)
    assert body.complete


def test_no_data_byte_is_held_back() -> None:
    body = Dechunker()
    assert body.feed(b"5\r\nhe") == b"he"
    assert body.feed(b"l") == b"l"
    assert body.feed(b"lo\r") == b"lo"
    assert body.feed(b"\n3\r\nabc") == b"abc"
    assert not body.complete


def test_a_body_cut_anywhere_is_not_complete() -> None:
    raw = chunked([b"hello", b"world"], trailers=b"A: b\r\n")
    for stop in range(len(raw)):
        body = Dechunker()
        body.feed(raw[:stop])
        assert not body.complete, raw[:stop]


def test_many_chunks_in_one_read_come_out_as_one_block() -> None:
    body = Dechunker()
    assert body.feed(b"2\r\nab\r\n2\r\ncd\r\n2\r\nef") == b"abcdef"


def test_one_chunk_is_handed_on() -> None:
    assert Dechunker().feed(b"3\r\nabc\r\n") == b"abc"


def test_a_body_of_ever_new_chunk_sizes_takes_bounded_memory() -> None:
    body = Dechunker()
    for size in range(1, 600):
        assert body.feed(b"%x\r\n%s\r\n" % (size, b"x" * size)) == b"x" * size
    assert len(body._sizes) < 300


def test_bytes_behind_the_end_are_dropped() -> None:
    body = Dechunker()
    assert body.feed(b"1\r\na\r\n0\r\n\r\nHTTP/1.1 200 OK") == b"a"
    assert body.complete
    assert body.feed(b"more") == b""


@pytest.mark.parametrize(
    "raw",
    [
        b"xyz\r\n",
        b"\r\nabc",
        b"-1\r\n",
        b"+5\r\nhello",
        b"1_0\r\n",
        b"0x5\r\nhello",
        b";ext\r\n",
        b"data: not chunked\n\n\r\n",
        b"fffffffffffffffff\r\n",
        b"3\r\nabcd\r\n",
        b"3\r\nabc\n\n",
        b"0" * 5000 + b"\r\n",
        b"5" * 5000,
        b"0\r\n" + b"A: b\r\n" * 65,
        b"0\r\nA: " + b"b" * 5000 + b"\r\n",
    ],
)
def test_bad_framing_is_an_error(raw: bytes) -> None:
    with pytest.raises(FramingError):
        Dechunker().feed(raw)


@given(raw=st.binary(max_size=200), cuts=st.lists(st.integers(min_value=0), max_size=6))
def test_any_bytes_end_in_data_or_a_framing_error(raw: bytes, cuts: list[int]) -> None:
    body = Dechunker()
    try:
        got = b"".join(body.feed(piece) for piece in pieces(raw, cuts))
    except FramingError:
        return
    assert len(got) <= len(raw)


def test_a_counted_body_ends_at_its_length() -> None:
    body = Counted(5)
    assert body.feed(b"hel") == b"hel"
    assert not body.complete
    assert body.feed(b"lo, world") == b"lo"
    assert body.complete
    assert body.feed(b"x") == b""
    assert Counted(0).complete


def test_a_body_until_close_is_all_there_is() -> None:
    body = UntilClose()
    assert body.feed(b"abc") == b"abc"
    assert body.complete


def test_a_chunk_for_each_read_comes_out_whole_each_time() -> None:
    body = Dechunker()
    chunks = [b"5\r\nhello\r\n", b"5\r\nworld\r\n", b"5\r\n5\r\n5\r\r\n", b"0\r\n\r\n"]
    assert [body.feed(each) for each in chunks] == [b"hello", b"world", b"5\r\n5\r", b""]
    assert body.complete
    assert body.feed(b"5\r\nhello\r\n") == b""


@pytest.mark.parametrize("end", [b"XY", b"\rY", b"\n\r"])
def test_a_chunk_of_a_known_length_must_end_where_it_says(end: bytes) -> None:
    body = Dechunker()
    body.feed(b"5\r\nhello\r\n")
    with pytest.raises(FramingError):
        body.feed(b"5\r\nworld" + end)


@given(
    sizes=st.lists(st.integers(min_value=1, max_value=3), max_size=12),
    cuts=st.lists(st.integers(min_value=0, max_value=90), max_size=4),
)
def test_chunks_of_known_lengths_survive_any_split(sizes: list[int], cuts: list[int]) -> None:
    """A read that is a chunk by chance, in the middle of another, is none."""
    parts = [(b"\r\n1\r\na\r\n" * size)[: 7 * size] for size in sizes]
    raw = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    body, found, start = Dechunker(), b"", 0
    for end in sorted({cut for cut in cuts if cut < len(raw)} | {len(raw)}):
        found += body.feed(raw[start:end])
        start = end
    assert found == b"".join(parts)
    assert body.complete


def test_what_looks_like_a_chunk_is_read_for_what_it_is() -> None:
    """Behind the last chunk it is trailers, and where a line end is due it is a fault."""
    chunk = b"5\r\nhello\r\n"
    body = Dechunker()
    assert body.feed(chunk) == b"hello" and body.feed(b"0\r\n") == b""
    assert body.feed(chunk) == b"" and not body.complete
    assert body.feed(b"\r\n") == b"" and body.complete

    body = Dechunker()
    assert body.feed(chunk) == b"hello" and body.feed(chunk[:-2]) == b"hello"
    with pytest.raises(FramingError):
        body.feed(chunk)
