import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provider_llamacpp.events.prefill import Echo


def through(prefill, *texts):
    """What comes out for each text, and at the end."""
    echo = Echo(prefill)
    return [echo.strip(text) for text in texts] + [echo.release()]


@pytest.mark.parametrize(
    ("prefill", "texts", "out"),
    [
        ("", ["a", "b"], ["a", "b", ""]),
        ("ab", ["abc", "ab"], ["c", "ab", ""]),
        ("ab", ["a", "b", "c"], ["", "", "c", ""]),
        ("ab", ["ac", "b"], ["ac", "b", ""]),
        ("ab", ["a", "c"], ["", "ac", ""]),
        ("ab", ["a"], ["", "a"]),
        ("ab", [], [""]),
        ("  ab", ["abc"], ["c", ""]),
        ("  ab", [" ", " ", "abc"], ["", "", "c", ""]),
        ("ab \n", ["abc"], ["c", ""]),
        ("ab \n", ["ab", " c"], ["", "c", ""]),
        (" ab ", ["ab", "c"], ["", "c", ""]),
        ("  ", ["a"], ["a", ""]),
        ("  ", ["  a"], ["a", ""]),
    ],
)
def test_what_is_new(prefill, texts, out):
    assert through(prefill, *texts) == out


@settings(deadline=None)
@given(st.text(min_size=1, max_size=8), st.text(max_size=8), st.lists(st.integers(0, 16)))
def test_a_server_that_repeats(prefill, answer, cuts):
    body = prefill + answer
    marks = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    texts = [body[a:b] for a, b in itertools.pairwise(marks)]
    assert "".join(through(prefill, *texts)) == answer


@settings(deadline=None)
@given(st.text(max_size=8), st.lists(st.text(max_size=4), max_size=5))
def test_nothing_is_lost_but_a_repetition(prefill, texts):
    found, whole = "".join(through(prefill, *texts)), "".join(texts)
    gone = whole[: len(whole) - len(found)]
    assert whole.endswith(found)
    assert gone == "" or gone.strip() == prefill.strip()


def test_blanks_that_a_template_trimmed_are_taken_off_one_by_one():
    """The server repeats what is left of them: here two of three."""
    assert Echo("a \n\t").strip("a \nX") == "X"


def test_what_follows_the_end_is_new():
    echo = Echo("ab")
    assert echo.strip("a") == "" and echo.release() == "a"
    assert echo.strip("X") == "X"
