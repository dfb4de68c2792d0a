import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provider_llamacpp import jsontext

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=20,
)


@given(JSON)
def test_what_is_written_reads_back_and_encodes(value):
    text = jsontext.dumps(value)
    assert json.loads(text.encode()) == jsontext.loads(text)


def test_text_is_compact_and_raw():
    assert jsontext.dumps({"a": [1, "é"]}) == '{"a":[1,"é"]}'
    assert jsontext.dumpb("é") == '"é"'.encode()


def test_keys_that_differ_in_half_surrogates_only_become_one():
    """Half of the readers take no key twice; the last stays, as where a key was written twice."""
    value = {chr(0xD800): 1, chr(0xDFFF): 2, "a": 3}
    assert jsontext.dumps(value) == '{"\ufffd":2,"a":3}'


def test_half_surrogates_are_joined_or_replaced():
    assert jsontext.whole("ok \ud83d" + "\ude00") == "ok 😀"
    assert jsontext.dumps("a\ud83db") == '"a\ufffdb"'
    assert jsontext.whole("plain") == "plain"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, object(), {1: {2}}])
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(ValueError):
        jsontext.dumps(value)


@pytest.mark.parametrize("text", ["{", "", "[1,]"])
def test_what_is_not_json_is_refused(text):
    with pytest.raises(ValueError):
        jsontext.loads(text)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a":-Infinity}'])
def test_constants_of_python_are_named(text):
    with pytest.raises(ValueError, match=r"(NaN|Infinity) is not JSON$"):
        jsontext.loads(text)


def test_deep_nesting_is_an_error_and_no_crash():
    with pytest.raises(ValueError, match=r"^JSON nested too deep$"):
        jsontext.loads("[" * 200_000)
    deep: list = []
    for _ in range(200_000):
        deep = [deep]
    with pytest.raises(ValueError):
        jsontext.dumps(deep)
    while deep:  # taken apart by hand: the collector would recurse
        deep = deep[0]


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("[" * 500 + "]" * 500, True),
        ("[" * 501 + "]" * 501, False),
        ('{"a":' * 501 + "1" + "}" * 501, False),
        ('[{"a":' * 250 + "1" + "}]" * 250, True),
        ("[" + "[]," * 5000 + "{}]", True),
        (r'["\\",' + '"' + "[" * 600 + '"]', True),
        (r'["\"' + "[" * 600 + '"]', True),
        (r'["\\\"' + "{" * 600 + '"]', True),
        (r'["\\"' + "," + "[" * 600 + "]" * 600 + "]", False),
        ('["\ud800",' + "[" * 600 + "]" * 600 + "]", False),
    ],
)
def test_the_depth_that_is_read(text, fits):
    """Counted without the strings: what a model writes there may hold brackets without end."""
    if fits:
        assert jsontext.loads(text) is not None
        jsontext.check_depth(text)
    else:
        for read in (jsontext.loads, jsontext.check_depth):
            with pytest.raises(ValueError, match=r"^JSON nested too deep$"):
                read(text)


def test_bad_bytes_read_as_replacement():
    assert jsontext.loads(b'"a\xffb"') == "a\ufffdb"
