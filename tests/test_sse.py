import sys
import tracemalloc

import pytest
import sseclient
from chunks import bodies, pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from provider_llamacpp.events.sse import MAX_EVENT, EventCutter, Stray

BODIES = bodies()


def cut(blocks, **options):
    """All items; texts of events as they read, with U+FFFD for bad bytes."""
    cutter = EventCutter(**options)
    items = []
    for block in [blocks] if isinstance(blocks, bytes) else blocks:
        items += cutter.feed(block)
    items += cutter.close()
    return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in items]


@pytest.mark.parametrize(
    ("body", "items"),
    [
        (b"data: a\n\ndata: b\n\n", ["a", "b"]),
        (b"data:a\n\n", ["a"]),
        (b"data:  a \n\n", [" a "]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data: a\r\rdata: b\r\r", ["a", "b"]),
        (b"data: a\n\r\ndata: b\r\n\n", ["a", "b"]),
        (b"\n\n\n\ndata: a\n\n\n\n\ndata: b\n\n", ["a", "b"]),
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b"event: message\nid: 7\nretry: 9\ndata: a\n\n", ["a"]),
        (b"data: a\nid: 7\n\n", ["a"]),
        (b"\xef\xbb\xbfdata: a\n\ndata: b\n\n", ["a", "b"]),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", ["a", Stray("text", "\ufeffdata: b".encode())]),
        (b":\n\n: ping\n\n:\ndata: a\n\n", ["a"]),
        (b"data:\n\ndata: \n\ndata\n\n", []),
        (b"id: 7\n\n", []),
        (b"  \n\n", []),
        (b"data: a\xff\xe2\x82\n\n", ["a\ufffd\ufffd"]),
        (b"data: \xff\ndata: b\n\n", ["\ufffd\nb"]),
        ("data: a\u2028b\x85c\x0bd\n\n".encode(), ["a\u2028b\x85c\x0bd"]),
        ("data: a\u2028b\ndata: c\n\n".encode(), ["a\u2028b\nc"]),
        (b"error: {}\n\ndata: [DONE]\n\n", [Stray("error", b"{}"), "[DONE]"]),
        (b"data: a\nerror:x\n\n", [Stray("error", b"x"), "a"]),
        (b"proxy error: gone", [Stray("text", b"proxy error: gone")]),
        (b"data: a\n\nproxy error: gone\n", ["a", Stray("text", b"proxy error: gone")]),
        (b'{\n "a": 1\n}\n', [Stray("text", b'{\n "a": 1\n}')]),
        (b"line\ndata: a\n\n", [Stray("text", b"line"), "a"]),
        (b"data: a", ["a"]),
        (b"data: a\n", ["a"]),
        (b"data: a\ndata: b", ["a\nb"]),
        (b"", []),
    ],
)
def test_what_is_in_a_body(body, items):
    assert cut(body) == items
    assert cut([body[i : i + 1] for i in range(len(body))]) == items


@pytest.mark.parametrize("name", sorted(BODIES))
def test_items_do_not_depend_on_the_reads(name):
    body = BODIES[name]
    whole = cut(body)
    assert whole
    assert cut([body[i : i + 1] for i in range(len(body))]) == whole
    for size in (2, 3, 7, 251, 4096):
        assert cut([body[i : i + size] for i in range(0, len(body), size)]) == whole


@settings(deadline=None)
@given(st.sampled_from(sorted(BODIES)), st.lists(st.integers(0, 1 << 20), max_size=12))
def test_items_do_not_depend_on_random_reads(name, cuts):
    body = BODIES[name]
    assert cut(pieces(body, cuts)) == cut(body)


LINES = st.sampled_from(
    [
        *(b"data: a", b"data:b", b"data", b"data: ", b"data: \xff", b"id: 1", b":"),
        *(b"error: e", b"error", b"stray", b"\xff", b"\xef\xbb\xbf", b" ", b"", b""),
    ]
)
ENDS = st.sampled_from([b"\n", b"\n", b"\n\n", b"\r\n", b"\r", b"\r\r"])


@settings(deadline=None)
@given(st.lists(st.tuples(LINES, ENDS)), st.lists(st.integers(0, 400), max_size=8))
def test_items_of_any_lines_do_not_depend_on_the_reads(lines, cuts):
    body = b"".join(line + end for line, end in lines)
    assert cut(pieces(body, cuts)) == cut(body)


@settings(deadline=None)
@given(st.lists(st.tuples(LINES, ENDS)))
def test_events_are_those_of_the_parser(lines):
    """What we cut ourselves is what sseclient-py makes of the same text in one clean piece."""
    body = b"".join(line + end for line, end in lines)
    text = body.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    clean = text.removeprefix("\ufeff").encode()
    expected = [each.data for each in sseclient.SSEClient(iter([clean])).events() if each.data]
    assert [item for item in cut(body) if isinstance(item, str)] == expected


def test_why_the_parser_is_not_fed_with_reads():
    """Facts about sseclient-py 1.9 that the cutter stands in front of."""
    whole = b"data: a\r\r\ndata: b\n\n"

    def parsed(*reads):
        return [each.data for each in sseclient.SSEClient(iter(reads)).events()]

    assert parsed(whole) != parsed(whole[:9], whole[9:])
    with pytest.raises(UnicodeDecodeError):
        parsed(b"data: \xff\n\n")
    assert parsed(b"error: {}\n\n") == []
    assert cut(whole) == cut([whole[:9], whole[9:]]) == ["a", "b"]


@pytest.mark.parametrize("size", [1, 3, 50, 10_000])
@pytest.mark.parametrize(
    ("body", "items"),
    [
        (b"data: a\n\n" + b"x" * 21 + b"\n\ndata: b\n\n", ["a", Stray("oversized")]),
        (b"data: " + b"x" * 15, [Stray("oversized")]),
        (b"data: " + b"x" * 14 + b"\n\ndata: b\n\n", ["x" * 14, "b"]),
        (b"\n" * 99 + b"data: " + b"x" * 14 + b"\n", ["x" * 14]),
        (b"data: 4567\ndata: 123\n\n", ["4567\n123"]),
        (b"data: 4567\ndata: 1234\n\n", [Stray("oversized")]),
    ],
)
def test_the_limit_of_an_event(body, items, size):
    assert cut([body[i : i + size] for i in range(0, len(body), size)], limit=20) == items


def test_a_line_without_end_takes_bounded_memory():
    cutter = EventCutter()
    block = b"x" * 65536
    items = []
    tracemalloc.start()
    try:
        for _ in range(16_384):  # a gigabyte
            items += cutter.feed(block)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert items == [Stray("oversized")]
    assert cutter.failed
    assert not cutter.clean
    assert cutter.close() == []
    assert peak < 8 * MAX_EVENT


def test_pieces_of_a_long_line_are_not_searched_again_and_again():
    """Each byte of a line is copied a bounded number of times, however small the reads are."""
    cutter = EventCutter()
    calls = 0

    def count(frame, what, argument):
        nonlocal calls
        calls += what == "c_call" and argument.__name__ == "rfind"

    sys.setprofile(count)
    try:
        for _ in range(5000):
            assert cutter.feed(b"0123456789") == []
    finally:
        sys.setprofile(None)
    assert calls <= 1
    assert cutter.feed(b"\n\n") == [Stray("text", b"0123456789" * 5000)]


def test_clean_means_that_nothing_is_held_back():
    cutter = EventCutter()
    assert cutter.clean
    cutter.feed(b"data: a\n\n")
    assert cutter.clean
    cutter.feed(b"d")
    assert not cutter.clean
    cutter.feed(b"ata: a\r\n\r")
    assert not cutter.clean
    cutter.feed(b"\n")
    assert cutter.clean
    assert cutter.feed(b"") == []
    assert cutter.clean


def test_an_empty_read_does_not_part_cr_from_lf():
    assert cut([b"data: a\r", b"", b"\ndata: b\r\n", b"", b"\r\n"]) == ["a\nb"]


def test_a_blank_line_too_many_does_not_change_what_follows():
    """Cut behind it or not, the bytes of the event are the same, valid or not."""
    body = b"data: a\n\n\ndata: \xed\xb2\x92\n\n"
    expected = [b"a", b"\xed\xb2\x92"]
    for at in range(len(body)):
        cutter = EventCutter()
        assert cutter.feed(body[:at]) + cutter.feed(body[at:]) == expected


def test_only_the_blank_line_too_many_goes():
    """What stands behind it is a line as it was: this one is of an unknown field."""
    assert EventCutter().feed(b"data: a\n\n\n data: x\n\n") == [b"a", Stray("text", b" data: x")]


def test_a_mark_of_the_byte_order_counts_at_the_very_start_only():
    mark = "\ufeff".encode()
    assert EventCutter().feed(mark + b"data: a\n\n") == [b"a"]
    assert EventCutter().feed(b": well\n\n" + mark + b"data: a\n\n") == [
        Stray("text", mark + b"data: a")
    ]
