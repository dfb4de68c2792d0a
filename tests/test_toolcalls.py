"""What the frames cannot show well; the rules of accumulation are in ``test_turn.py``."""

import itertools
import json

import pytest

from provider_llamacpp import jsontext
from provider_llamacpp.events.toolcalls import (
    ToolCalls,
    argument_holder,
    arguments_of,
    id_of,
    name_of,
)


def calls():
    return ToolCalls(str.upper, lambda: "made")


def shown(found, cut=False):
    return [json.loads(block) for block in found.encoded(cut=cut)]


def test_arguments_nested_too_deep_for_our_writer_are_shown_raw():
    value = {}
    for _ in range(100_000):
        value = {"a": value}
    text = arguments_of({"function": {"arguments": value}})
    found = calls()
    call = found.place({"index": 0})
    call.absorb({"id": "a", "function": {"name": "x"}})
    call.arguments.add(text)
    assert shown(found)[0]["arguments"] == {"_raw": "arguments nested too deep"}
    while value:  # taking it apart at once would go as deep
        value = value.pop("a")


def test_arguments_too_deep_for_the_readers_of_a_frame_are_shown_raw():
    found = calls()
    call = found.place({"index": 0})
    call.absorb({"id": "a", "function": {"name": "x"}})
    call.arguments.add('{"a":' * 120 + "1" + "}" * 120)
    assert list(shown(found)[0]["arguments"]) == ["_raw"]


def test_arguments_are_parsed_again_only_when_they_grew(monkeypatch):
    found = calls()
    call = found.place({"index": 0})
    call.absorb({"function": {"name": "x"}})
    call.arguments.add("{}")
    assert shown(found) == shown(found)
    monkeypatch.setattr(
        "provider_llamacpp.events.toolcalls.parse_arguments", lambda text: {"new": text}
    )
    assert shown(found)[0]["arguments"] == {}
    call.arguments.add(" ")
    assert shown(found)[0]["arguments"] == {"new": "{} "}


def test_a_call_without_arguments_in_an_answer_that_was_cut():
    found = calls()
    found.place({"index": 0}).absorb({"function": {"name": "x"}})
    assert shown(found)[0] == {
        "type": "function_call",
        "id": "made",
        "function_id": "X",
        "arguments": {},
    }
    assert shown(found, cut=True)[0]["arguments"] == {"_partial": True}


@pytest.mark.parametrize(("first", "second"), [("a", "a"), ("\ud83d", "\ude00")])
def test_calls_that_a_server_gave_one_id_are_told_apart(first, second):
    """Deltas and results find their call by it."""
    numbers = itertools.count()
    found = ToolCalls(str, lambda: f"made-{next(numbers)}")
    for index, given in enumerate((first, second)):
        found.place({"index": index, "id": given}).absorb({"id": given, "function": {"name": "x"}})
    assert [call["id"] for call in shown(found)] == [jsontext.whole(first), "made-0"]
    # To the server it is the id it gave.
    assert found.place({"index": 1, "id": second}) is found.place({"index": 1})


def test_what_absorb_tells():
    call = calls().place({"index": 0})
    assert call.absorb({"id": "a"})
    assert call.absorb({"function": {"name": "x"}})
    assert not call.absorb({"id": "a", "function": {"name": "y", "arguments": "{}"}})
    assert (call.id, call.name) == ("a", "x")


@pytest.mark.parametrize("odd", [{}, {"function": 5}, {"id": 5, "function": {"id": 5, "name": 5}}])
def test_odd_fragments_carry_nothing(odd):
    assert id_of(odd) == name_of(odd) == arguments_of(odd) == ""


def test_the_place_of_arguments():
    function = {"arguments": "x"}
    assert argument_holder({"index": 0, "function": function}) is function
    assert argument_holder({"index": 128, "function": function}) is function
    assert argument_holder({"index": 0}) == {}
    for odd in (None, {}, {"index": 129}, {"index": 0, "id": "a"}, {"index": "0"}):
        assert argument_holder(odd) is None
