"""Frames as values: every kind, and nothing lost on the way back."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from chunks import assembler
from hypothesis import given
from hypothesis import strategies as st

from provider_llamacpp import (
    AssistantMessage,
    Done,
    Event,
    Failure,
    FunctionCallDelta,
    Ping,
    TextBlock,
    decode_event,
    decode_message,
)
from provider_llamacpp.errors import ProviderError
from provider_llamacpp.events.assembler import Outcome

KINDS = {
    *("start", "usage", "ping", "stop", "done", "error"),
    *(
        f"{kind}_{edge}"
        for kind in ("text", "thinking", "functioncall")
        for edge in ("start", "end")
    ),
    *(f"{kind}_delta" for kind in ("text", "thinking", "functioncall")),
}
SNAPSHOT = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "text": "Need it."},
        {"type": "text", "text": "Reading."},
        {"type": "function_call", "id": "c1", "function_id": "fs::read", "arguments": {"p": [1]}},
    ],
    "stop_reason": "error",
    "native_stop_reason": "stop",
    "usage": {"input": 812, "output": 41, "cost_usd": 0.5},
    "warnings": ["w"],
    "error_message": "m",
    "error_kind": "transient",
    "model": "demo",
    "provider": "llamacpp",
    "timestamp": 1760000000060,
}


def frame_of(kind: str) -> dict[str, Any]:
    given: dict[str, Any] = {"type": kind}
    if kind == "usage":
        given["usage"] = {"input": 1}
    elif kind == "stop":
        given["stop_reason"] = "end"
    elif kind.endswith("_delta"):
        given["delta"] = "x"
    elif kind != "ping":
        given[{"done": "message", "error": "error"}.get(kind, "partial")] = SNAPSHOT
    return given


def test_there_are_fifteen_kinds() -> None:
    assert len(KINDS) == len(get_args(Event)) == 15


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind(kind: str) -> None:
    event = decode_event(frame_of(kind))
    assert event.type == kind
    assert decode_event(json.dumps(frame_of(kind))) == event
    assert decode_event(json.dumps(frame_of(kind)).encode()) == event
    hash(Ping())
    with pytest.raises(AttributeError):
        event.type = "other"  # type: ignore[assignment, misc]


def test_a_message_comes_back_as_it_was() -> None:
    message = decode_message(SNAPSHOT)
    assert message.to_dict() == SNAPSHOT
    assert (message.text, message.thinking) == ("Reading.", "Need it.")
    (call,) = message.calls
    assert (call.function_id, call.arguments) == ("fs::read", {"p": [1]})


def test_what_is_not_known_is_left_out() -> None:
    more = {**SNAPSHOT, "content": [{"type": "hologram"}, {"type": "text", "text": "a"}], "new": 1}
    assert decode_message(more).content == (TextBlock("a"),)
    assert decode_event({**frame_of("functioncall_delta"), "new": 1}) == FunctionCallDelta("x")


@pytest.mark.parametrize(
    "frame",
    [
        *("", "[]", "1", {}, {"type": "hologram"}, {"type": 1}, {"type": "text_delta"}),
        *({"type": "text_delta", "delta": 1}, {"type": "done", "message": {}}, {"type": "start"}),
        *({"type": "done", "message": None}, {"type": "usage", "usage": 1}),
    ],
)
def test_what_is_no_frame_is_a_value_error(frame: Any) -> None:
    with pytest.raises(ValueError):
        decode_event(frame)


@given(st.lists(st.text(), max_size=4), st.booleans())
def test_whatever_a_model_says_is_read_back(texts: list[str], fails: bool) -> None:
    source = assembler()
    frames = []
    for text in texts:
        delta = {"choices": [{"index": 0, "delta": {"content": text}}]}
        frames += source.feed(b"data: %b\n\n" % json.dumps(delta).encode())
    outcome = Outcome(error=ProviderError("transient", "broke")) if fails else Outcome()
    frames += source.finish(outcome)
    for frame in frames:
        event = decode_event(frame)
        assert event.type == json.loads(frame)["type"]
        if isinstance(event, Done | Failure):
            message: AssistantMessage = event.message if isinstance(event, Done) else event.error
            snapshot = json.loads(frame)["message" if isinstance(event, Done) else "error"]
            assert message.to_dict() == snapshot
