import json
import tracemalloc

import pytest

from provider_llamacpp.errors import ProviderError
from provider_llamacpp.events.snapshot import Message, token_count, usage_of
from provider_llamacpp.events.toolcalls import ToolCalls


def message(**options):
    defaults = {
        "model": "m",
        "provider": "p",
        "warnings": (),
        "calls": ToolCalls(str, lambda: "made"),
        "context_window": None,
        "now_ms": lambda: 5,
    }
    return Message(**{**defaults, **options})


def test_an_empty_message():
    assert json.loads(message().snapshot()) == {
        "role": "assistant",
        "content": [],
        "stop_reason": "end",
        "model": "m",
        "provider": "p",
        "timestamp": 5,
    }


def test_everything_at_once():
    full = message(warnings=["w"])
    full.thinking.add("t")
    full.text.add('"')
    full.calls.place({"index": 0}).absorb({"function": {"name": "x"}})
    full.usage = {"input": 1}
    full.stop_reason, full.native_stop_reason = "length", "length"
    assert json.loads(full.snapshot()) == {
        "role": "assistant",
        "content": [
            {"type": "thinking", "text": "t"},
            {"type": "text", "text": '"'},
            {
                "type": "function_call",
                "id": "made",
                "function_id": "x",
                "arguments": {"_partial": True},
            },
        ],
        "stop_reason": "length",
        "native_stop_reason": "length",
        "warnings": ["w"],
        "usage": {"input": 1},
        "model": "m",
        "provider": "p",
        "timestamp": 5,
    }


def test_a_frame_is_the_message_and_what_stands_before_it():
    full = message()
    full.thinking.add("t")
    frame = full.snapshot(head=b'{"type":"done","message":')
    assert frame == b'{"type":"done","message":' + full.snapshot() + b"}"


def test_a_frame_costs_no_more_than_its_own_bytes():
    """Each more copy of a long answer would be megabytes."""
    full = message()
    full.text.add("x" * (4 << 20))
    tracemalloc.start()
    try:
        frame = full.snapshot(head=b'{"type":"done","message":')
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * len(frame)


def test_an_error_hides_the_finish():
    failed = message()
    failed.stop_reason, failed.native_stop_reason = "end", "stop"
    shown = json.loads(failed.snapshot(ProviderError("permanent", 'no "way"')))
    assert shown["content"] == [{"type": "text", "text": 'no "way"'}]
    assert shown["stop_reason"] == "error"
    assert shown["error_message"] == 'no "way"'
    assert shown["error_kind"] == "permanent"
    assert "native_stop_reason" not in shown


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {}),
        ({"prompt_tokens": 1, "input_tokens": 2}, {"input": 1}),
        ({"prompt_tokens": None, "input_tokens": 2}, {"input": 2}),
        ({"prompt_tokens_details": None, "completion_tokens_details": 5}, {}),
        ({"input_tokens_details": {"cached_tokens": 3}}, {"cache_read": 3}),
        ({"completion_tokens_details": {"reasoning_tokens": 3}}, {"reasoning": 3}),
    ],
)
def test_usage(given, found):
    assert usage_of(given) == found


@pytest.mark.parametrize(
    ("value", "count"),
    [
        *[(0, 0), (7, 7), (7.0, 7), (2**53, 2**53)],
        *[(True, None), ("7", None), (None, None), (-1, None), (2**53 + 1, None)],
        *[(float("inf"), None), (float("nan"), None)],
    ],
)
def test_counts(value, count):
    assert token_count(value) == count
