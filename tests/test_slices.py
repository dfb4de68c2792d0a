import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provider_llamacpp.events.slices import Slices, inside
from provider_llamacpp.jsontext import whole

HALVES = st.text(alphabet='a"\\\n\x00\u00e9\ud83d\ude00\U0001f600')


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("a", b"a"),
        ('"\\\n\x00\x7f/', b'\\"\\\\\\n\\u0000\x7f/'),
        ("\u00e9\u2028", "\u00e9\u2028".encode()),
        ("\ud83d", "\ufffd".encode()),
        ("\ud83d\ude00", "\U0001f600".encode()),
        ("", b""),
    ],
)
def test_inside(value, written):
    assert inside(value) == written


@settings(deadline=None)
@given(st.lists(HALVES))
def test_what_is_added_is_what_is_held(texts):
    slices = Slices()
    sent = b"".join(slices.add(text) for text in texts) + slices.flush()
    assert not slices.waiting
    assert sent == slices.joined()
    assert slices.text() == whole("".join(texts)) == json.loads(b'"' + sent + b'"')
    assert bool(slices) == bool(sent)


def test_a_half_waits_for_its_other_half():
    slices = Slices()
    assert slices.add("a\ud83d") == b"a"
    assert slices.waiting
    assert slices.add("\ude00b") == "\U0001f600b".encode()
    assert not slices.waiting
    assert slices.add("\ud83d") == b""
    assert slices.flush() == "\ufffd".encode()
    assert slices.flush() == b""


@settings(deadline=None)
@given(st.lists(st.sampled_from(["add", "compact", "join"])))
def test_compacting_changes_nothing(steps):
    slices, count = Slices(), 0
    for step in steps:
        if step == "add":
            slices.add("x")
            count += 1
        elif step == "compact":
            slices.compact()
        else:
            assert slices.joined() == b"x" * count
        assert slices.count == count
    assert slices.joined() == b"x" * count
    assert bool(slices) == bool(count)


def test_pieces_stay_the_same_list():
    slices = Slices()
    pieces = slices.pieces
    slices.add("a")
    slices.compact()
    pieces.append(b"b")
    assert slices.joined() == b"ab"
    assert slices.pieces is pieces
