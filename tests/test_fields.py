"""Fields of a payload one by one: what is given back, and the very words of a refusal."""

from __future__ import annotations

from typing import Any

import pytest

from provider_llamacpp import fields
from provider_llamacpp.errors import InvalidRequest
from provider_llamacpp.jsontext import DEPTH_LIMIT

HELD: dict[str, Any] = {
    "text": "a",
    "empty": "",
    "null": None,
    "list": ["a", "b"],
    "mixed": ["a", 5],
    "object": {"k": 1},
    "number": 7,
    "whole": 7.0,
    "part": 7.5,
    "yes": True,
    "no": False,
}


def nested(depth: int) -> dict[str, Any]:
    """``depth`` containers inside each other."""
    value: Any = 1
    for _ in range(depth - 1):
        value = [value]
    return {"k": value}


def refused(read: Any, *given: Any, **named: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read(*given, **named)
    return caught.value.message


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ((), "payload"),
        (("a",), "a"),
        (("a", "b"), "a.b"),
        (("a", 0, "b", 12), "a[0].b[12]"),
        ((3, "a"), "[3].a"),
        (("XA", "X"), "XA.X"),
    ],
)
def test_a_path_is_shown_as_it_is_written(path: fields.Path, shown: str) -> None:
    assert refused(fields.fail, path, "is odd") == f"{shown}: is odd"


def test_a_payload_is_the_object_itself() -> None:
    assert fields.payload(HELD) is HELD
    assert refused(fields.payload, ["a"]) == "payload: must be an object"


def test_texts_are_given_back_and_other_values_named() -> None:
    for read in (fields.text, fields.optional_text):
        assert read(HELD, "text") == "a"
        assert read(HELD, "empty") == ""
        assert refused(read, HELD, "number") == "number: must be a string"
        assert refused(read, HELD, "list", ("x", 1)) == "x[1].list: must be a string"
    for name in ("null", "absent"):
        assert fields.optional_text(HELD, name) is None
        assert refused(fields.text, HELD, name) == f"{name}: must be a string"


def test_lists() -> None:
    assert fields.items(HELD, "mixed") is HELD["mixed"]
    assert refused(fields.items, HELD, "text") == "text: must be a list"
    assert refused(fields.items, HELD, "null", ("x",)) == "x.null: must be a list"
    assert fields.texts(HELD, "list", 2) == ["a", "b"]
    assert fields.texts({"one": ["a"]}, "one", 1) == ["a"]
    assert refused(fields.texts, HELD, "list", 1) == "list: must hold 1 to 1 strings"
    assert refused(fields.texts, {"none": []}, "none", 9) == "none: must hold 1 to 9 strings"
    assert refused(fields.texts, HELD, "mixed", 9) == "mixed[1]: must be a string"
    assert refused(fields.texts, HELD, "text", 9) == "text: must be a list"


def test_objects() -> None:
    assert fields.optional_object(HELD, "object") is HELD["object"]
    assert fields.optional_object(HELD, "null") is None
    assert fields.optional_object(HELD, "absent") is None
    assert refused(fields.optional_object, HELD, "list") == "list: must be an object"


def test_the_depth_that_is_taken() -> None:
    at_the_limit = nested(DEPTH_LIMIT)
    assert fields.optional_object({"deep": at_the_limit}, "deep") is at_the_limit
    fields.check_depth(at_the_limit, ("deep",))
    over = nested(DEPTH_LIMIT + 1)
    assert refused(fields.optional_object, {"deep": over}, "deep") == "deep: is nested too deep"
    assert refused(fields.check_depth, over, ("x", 2)) == "x[2]: is nested too deep"


def test_whole_numbers() -> None:
    assert fields.whole(0, ()) == 0
    found = fields.whole(HELD["whole"], ())
    assert found == 7 and type(found) is int
    assert fields.whole(5, ("n",), 5) == 5
    assert refused(fields.whole, 4, ("n",), 5) == "n: must be an integer of at least 5"
    for bad in (-1, 7.5, float("nan"), float("inf"), True, False, "7", None, [7]):
        assert refused(fields.whole, bad, ("x", 1)) == "x[1]: must be an integer of at least 0"


def test_counts() -> None:
    assert fields.optional_count(HELD, "number") == 7
    assert fields.optional_count(HELD, "number", 7) == 7
    assert fields.optional_count({"n": 0}, "n") == 0
    assert fields.optional_count(HELD, "null", 3) is None
    assert fields.optional_count(HELD, "absent") is None
    assert refused(fields.optional_count, HELD, "part") == "part: must be an integer of at least 0"
    words = "number: must be an integer of at least 8"
    assert refused(fields.optional_count, HELD, "number", 8) == words


@pytest.mark.parametrize("default", [True, False])
def test_flags(default: bool) -> None:
    assert fields.flag(HELD, "yes", default) is True
    assert fields.flag(HELD, "no", default) is False
    assert fields.flag(HELD, "null", default) is default
    assert fields.flag(HELD, "absent", default) is default
    for name in ("number", "text", "list"):
        assert refused(fields.flag, HELD, name, default) == f"{name}: must be true or false"
