"""Arguments are always an object, whatever a model wrote (provider protocol 8.2)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transcripts import RELAXED

from provider_llamacpp import jsontext
from provider_llamacpp.jsontext import DEPTH_LIMIT, shallow
from provider_llamacpp.transcript.arguments import (
    RAW_LIMIT,
    SCAN_LIMIT,
    arguments_text,
    parse_arguments,
)

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8)
JSON = st.recursive(
    SCALARS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=15,
)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (" \n\t", {}),
        ("{}", {}),
        ('{"path":"x"}', {"path": "x"}),
        ('  {"path":"x"}\n', {"path": "x"}),
        ('{"a":{"b":[1,2]},"c":null}', {"a": {"b": [1, 2]}, "c": None}),
        # cut
        ('{"path":"r.md","content":"half', {"path": "r.md", "_partial": True}),
        ('{"a":1,"b":2,"c":', {"a": 1, "b": 2, "_partial": True}),
        ('{"a":1,"b":2,', {"a": 1, "b": 2, "_partial": True}),
        ('{"a":[1,2],"b":{"c":3,"d":', {"a": [1, 2], "_partial": True}),
        # a comma in a string, behind an escaped quote, and in a container ends no member
        ('{"a":"x,y\\",z","b":"', {"a": 'x,y\\",z'.replace("\\", ""), "_partial": True}),
        ('{"a":"x,y', {"_raw": '{"a":"x,y'}),
        ('{"a":[1,2', {"_raw": '{"a":[1,2'}),
        ('{"a":"x\\', {"_raw": '{"a":"x\\'}),
        ('{"pa', {"_raw": '{"pa'}),
        # the last comma gives nothing that parses, an earlier one does
        ('{"a":1,"b":2,x,y', {"a": 1, "b": 2, "_partial": True}),
        # an empty object is not a find
        ("{,", {"_raw": "{,"}),
        # valid JSON, but no object
        ("null", {"_raw": "null"}),
        ("[1,2]", {"_raw": "[1,2]"}),
        ('"{\\"a\\":1}"', {"_raw": '"{\\"a\\":1}"'}),
        # two objects in a row
        ('{"a":1,"b":2}{"c":3}', {"a": 1, "_partial": True}),
        ('{"a":1}{"c":3}', {"_raw": '{"a":1}{"c":3}'}),
        # numbers that other readers refuse
        ('{"a":NaN}', {"_raw": '{"a":NaN}'}),
        ('{"a":1,"b":-Infinity}', {"a": 1, "_partial": True}),
        ('{"a":1e999}', {"_raw": '{"a":1e999}'}),
        ('{"a":-1e999}', {"_raw": '{"a":-1e999}'}),
        ('{"a":1.5e3}', {"a": 1500.0}),
        ('{"a":1,"b":' + "9" * 400 + "}", {"a": 1, "_partial": True}),
        ('{"a":' + "9" * 300 + "}", {"a": int("9" * 300)}),
    ],
)
def test_parse(text: str, expected: dict[str, Any]) -> None:
    assert parse_arguments(text) == expected


def test_deep_nesting_is_kept_as_text() -> None:
    deep = nested(DEPTH_LIMIT + 1)
    assert parse_arguments(deep) == {"_raw": deep[:RAW_LIMIT]}
    assert parse_arguments(nested(DEPTH_LIMIT)) == json.loads(nested(DEPTH_LIMIT))
    assert parse_arguments('{"x":1,"y":' + nested(100_000) + "}") == {"x": 1, "_partial": True}


def test_many_shallow_containers_are_no_deep_ones() -> None:
    text = json.dumps({"rows": [{"a": []}] * 200, "s": "[[[" * 100})
    assert parse_arguments(text) == json.loads(text)


def test_only_the_start_is_searched_for_members() -> None:
    last_comma = '{"a":"' + "x" * (SCAN_LIMIT - 8) + '",'
    assert len(last_comma) == SCAN_LIMIT
    assert parse_arguments(last_comma + '"b"') == {"a": "x" * (SCAN_LIMIT - 8), "_partial": True}
    beyond = '{"a":"' + "x" * (SCAN_LIMIT - 7) + '",'
    assert parse_arguments(beyond + '"b"') == {"_raw": beyond[:RAW_LIMIT]}


@pytest.mark.parametrize("character", ["é", "漢", "🌍"])
def test_cuts_fall_between_characters(character: str) -> None:
    for shift in range(4):
        text = "x" * shift + character * 2000
        raw = parse_arguments(text)["_raw"]
        assert text.startswith(raw)
        assert RAW_LIMIT - 4 < len(raw.encode()) <= RAW_LIMIT
        members = '{"a":1,"' + "x" * shift + character * 2000
        assert parse_arguments(members) == {"a": 1, "_partial": True}


def test_half_surrogates_do_no_harm() -> None:
    assert parse_arguments('{"a":1,"b":"\ud83d') == {"a": 1, "_partial": True}
    assert parse_arguments("\ud83d\ude00") == {"_raw": "😀"}
    assert arguments_text({"a": "\ud83d"}) == '{"a":"�"}'


@RELAXED
@given(st.text())
def test_any_text_becomes_an_object_that_json_can_carry(text: str) -> None:
    value = parse_arguments(text)
    assert isinstance(value, dict)
    jsontext.dumpb(value)


@RELAXED
@given(st.dictionaries(st.text(max_size=5), JSON, min_size=1), st.data())
def test_every_cut_keeps_only_what_was_there(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    assert parse_arguments(text) == value
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    found = parse_arguments(cut)
    if found.pop("_partial", False) is True:
        assert found
        assert all(value[name] == member for name, member in found.items())
    else:
        assert found == {"_raw": cut[:RAW_LIMIT]} or len(cut) > 500


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"path": "x"}, {"path": "x"}),
        ({"_raw": '{"pa'}, {"_raw": '{"pa'}),
        ({"path": "r", "_partial": True}, {"path": "r", "_partial": True}),
        ('{"path":"x"}', {"path": "x"}),
        ('{"pa', {"_raw": '{"pa'}),
        ("", {}),
        ([1, 2], {"_raw": "[1,2]"}),
        (7, {"_raw": "7"}),
        (False, {"_raw": "false"}),
        ({"a": float("nan")}, {"_raw": "unreadable arguments"}),
        (object(), {"_raw": "unreadable arguments"}),
    ],
)
def test_history_arguments_are_text_of_an_object(value: object, expected: dict[str, Any]) -> None:
    text = arguments_text(value)
    assert jsontext.loads(text) == expected


def test_deep_history_arguments_are_cut_down() -> None:
    text = arguments_text({"a": 1, "b": json.loads(nested(DEPTH_LIMIT))})
    assert json.loads(text) == {"a": 1, "_partial": True}
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    assert json.loads(arguments_text(deep)) == {"_raw": "unreadable arguments"}
    while deep:  # taken apart level by level: its destructor would recurse
        deep = deep["a"]


@RELAXED
@given(JSON)
def test_any_history_arguments_parse_to_an_object(value: object) -> None:
    text = arguments_text(value)
    assert isinstance(jsontext.loads(text), dict)
    if isinstance(value, dict):
        assert jsontext.loads(text) == value


@pytest.mark.parametrize(
    ("value", "limit", "expected"),
    [
        (1, 0, True),
        ([], 0, False),
        ([], 1, True),
        ([1, "a"], 1, True),
        ([[]], 1, False),
        ({"a": [{}]}, 2, False),
        ({"a": [{}]}, 3, True),
        ({"a": [1], "b": {"c": 2}}, 2, True),
    ],
)
def test_shallow(value: object, limit: int, expected: bool) -> None:
    assert shallow(value, limit) is expected


@pytest.mark.parametrize(("depth", "whole"), [(100, True), (101, False)])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"x":', "}")])
def test_the_depth_that_is_read_is_exactly_that_of_the_limit(
    depth: int, whole: bool, left: str, right: str
) -> None:
    """With more brackets than the limit, so that they have to be followed."""
    inner = left * (depth - 1) + "1" + right * (depth - 1)
    value = parse_arguments('{"a":' + inner + ',"b":[[],[]]}')
    assert ("_raw" in value) is not whole
    assert whole is False or value["b"] == [[], []]
