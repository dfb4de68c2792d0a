"""What the bus may send us, and what is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transcripts import (
    ABORT_PAYLOADS,
    COUNT_PAYLOADS,
    EMBED_PAYLOADS,
    JSON,
    RELAXED,
    TEXT,
    stream_payloads,
)

from provider_llamacpp.errors import InvalidRequest
from provider_llamacpp.payloads import (
    MAX_INPUTS,
    THINKING_LEVELS,
    ChatRequest,
    WriterRef,
    decode_abort,
    decode_chat,
    decode_count,
    decode_embed,
    decode_stream,
)
from provider_llamacpp.schemas import function_schemas

USER = {"role": "user", "content": [{"type": "text", "text": "hi"}], "timestamp": 1}
WRITER = {"channel_id": "ch", "access_key": "hush", "direction": "write"}
PAYLOAD: dict[str, Any] = {"writer_ref": WRITER, "model": "m", "messages": [USER]}
DECODERS = {
    "stream": decode_stream,
    "embed": decode_embed,
    "count_tokens": decode_count,
    "abort": decode_abort,
}
VALIDATORS = {
    name: jsonschema.Draft7Validator(entry["request_format"])
    for name, entry in function_schemas("llamacpp").items()
}


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def refusal(decode: Any, data: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode(data)
    assert caught.value.code == "provider/invalid_request"
    return caught.value.message


def test_the_least_a_stream_needs() -> None:
    request = decode_stream(PAYLOAD)
    assert request.writer == WriterRef("ch", "hush")
    assert (request.model, request.messages) == ("m", [USER])
    assert (request.tools, request.provider_options) == ([], {})
    for name in ("max_output_tokens", "system_prompt"):
        assert getattr(request, name) is None
    assert (request.response_format, request.thinking_level, request.model_meta) == (None,) * 3


def test_all_fields_of_a_stream() -> None:
    more: dict[str, Any] = {
        "max_output_tokens": 100,
        "system_prompt": "Be brief.",
        "tools": [{"name": "fs::read", "description": "d", "parameters": {"type": "object"}}],
        "response_format": {"type": "json", "schema": {"type": "object"}},
        "thinking_level": "high",
        "provider_options": {"temperature": 0},
        "model_meta": {"id": "m", "provider": "p", "context_window": 1, "max_output_tokens": 1},
    }
    request = decode_stream({**PAYLOAD, **more})
    assert {name: getattr(request, name) for name in more} == more


def test_a_caller_without_a_channel_names_no_writer() -> None:
    payload = {name: value for name, value in PAYLOAD.items() if name != "writer_ref"}
    request = decode_chat(payload)
    assert type(request) is ChatRequest
    assert (request.model, request.messages) == ("m", [USER])
    assert refusal(decode_chat, {**payload, "model": 5}) == "model: must be a string"
    assert refusal(decode_chat, [payload]) == "payload: must be an object"


def test_explicit_nulls_and_unknown_keys_are_fine() -> None:
    optional = (
        *("max_output_tokens", "resolution_key", "session_id", "system_prompt", "tools"),
        *("response_format", "thinking_level", "provider_options", "model_meta"),
        *("system_sections", "cache_intent"),
    )
    data = {**PAYLOAD, **dict.fromkeys(optional), "_caller_worker_id": "w", "new": {"a": 1}}
    assert decode_stream(data) == decode_stream(PAYLOAD)
    writer = {"channel_id": "ch", "access_key": "hush", "direction": None}
    assert decode_stream({**PAYLOAD, "writer_ref": writer}) == decode_stream(PAYLOAD)
    assert decode_embed({"input": ["a"], "model": None, "_caller_worker_id": "w"}).model is None
    counted = {"model": "m", "messages": [USER], "system_prompt": None, "tools": None}
    assert decode_count(counted).tools == []


@pytest.mark.parametrize("level", THINKING_LEVELS)
def test_every_level_passes(level: str) -> None:
    assert decode_stream({**PAYLOAD, "thinking_level": level}).thinking_level == level


@pytest.mark.parametrize(
    "content",
    [
        [],
        [{"type": "file", "attachment_id": "a", "mime": "text/plain", "name": "n", "size": 3}],
        [{"type": "audio", "mime": "audio/wav", "data": "UklG"}],
        [{"type": "image", "mime": "image/png", "data": "iVBO", "attachment_id": None}],
        [{"type": "thinking", "text": "hm", "signature": None}],
        [{"type": "redacted_thinking", "data": "x"}],
        [{"type": "function_call", "id": "c", "function_id": "f"}],
        [{"type": "function_result", "function_call_id": "c", "content": [], "is_error": None}],
    ],
)
def test_blocks_that_pass(content: list[Any]) -> None:
    message = {"role": "user", "content": content}
    assert decode_stream({**PAYLOAD, "messages": [message]}).messages == [message]


def test_what_is_never_read_is_never_refused() -> None:
    messages = [
        {"role": "custom", "content": "anything", "custom_type": 7},
        {"role": "assistant", "content": [], "stop_reason": 7, "usage": "x", "timestamp": None},
        {"role": "function_result", "function_call_id": "c", "content": [], "is_error": "x"},
    ]
    assert decode_stream({**PAYLOAD, "messages": messages}).messages == messages


def test_whole_numbers_in_any_spelling() -> None:
    assert decode_stream({**PAYLOAD, "max_output_tokens": 100.0}).max_output_tokens == 100
    assert decode_stream({**PAYLOAD, "max_output_tokens": 0}).max_output_tokens == 0


BAD_STREAMS: list[tuple[str, Any, str]] = [
    ("writer_ref", None, "writer_ref: must be an object"),
    ("writer_ref", {**WRITER, "channel_id": 1}, "writer_ref.channel_id: must be a string"),
    ("writer_ref", {"channel_id": "c"}, "writer_ref.access_key: must be a string"),
    ("writer_ref", {**WRITER, "direction": "read"}, 'writer_ref.direction: must be "write"'),
    ("model", None, "model: must be a string"),
    ("model", 5, "model: must be a string"),
    ("messages", None, "messages: must be a list"),
    ("messages", "hi", "messages: must be a list"),
    ("messages", [USER, "hi"], "messages[1]: must be an object"),
    (
        "messages",
        [{"role": "system", "content": []}],
        "messages[0].role: must be user, assistant, function_result or custom",
    ),
    (
        "messages",
        [{"role": ["user"], "content": []}],
        "messages[0].role: must be user, assistant, function_result or custom",
    ),
    ("messages", [{"role": "user", "content": "hi"}], "messages[0].content: must be a list"),
    ("messages", [{"role": "assistant"}], "messages[0].content: must be a list"),
    (
        "messages",
        [{"role": "function_result", "content": []}],
        "messages[0].function_call_id: must be a string",
    ),
    ("max_output_tokens", -1, "max_output_tokens: must be an integer of at least 0"),
    ("max_output_tokens", 1.5, "max_output_tokens: must be an integer of at least 0"),
    ("max_output_tokens", True, "max_output_tokens: must be an integer of at least 0"),
    ("max_output_tokens", "9", "max_output_tokens: must be an integer of at least 0"),
    ("resolution_key", 1, "resolution_key: must be a string"),
    ("system_prompt", {}, "system_prompt: must be a string"),
    ("tools", {}, "tools: must be a list"),
    ("tools", ["fs::read"], "tools[0]: must be an object"),
    ("tools", [{"name": "a"}, {}], "tools[1].name: must be a string"),
    ("tools", [{"name": "a", "description": 1}], "tools[0].description: must be a string"),
    ("tools", [{"name": "a", "parameters": deep(100)}], "tools[0]: is nested too deep"),
    ("response_format", "json", "response_format: must be an object"),
    ("response_format", {"schema": {}}, "response_format.type: must be a string"),
    (
        "response_format",
        {"type": "json", "schema": deep(100)},
        "response_format: is nested too deep",
    ),
    ("thinking_level", 3, "thinking_level: must be a string"),
    (
        "thinking_level",
        "banana",
        "thinking_level: must be one of off, none, minimal, low, medium, high, xhigh",
    ),
    ("provider_options", [], "provider_options: must be an object"),
    ("provider_options", "n=2", "provider_options: must be an object"),
    ("provider_options", {"a": deep(100)}, "provider_options: is nested too deep"),
    ("model_meta", "m", "model_meta: must be an object"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_STREAMS)
def test_a_bad_field_is_named(name: str, value: Any, message: str) -> None:
    assert refusal(decode_stream, {**PAYLOAD, name: value}) == message


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("hi", ": must be an object"),
        ({"text": "hi"}, ".type: must be one of text, image, audio, file, thinking, "),
        ({"type": "banana"}, ".type: must be one of text, "),
        ({"type": ["text"]}, ".type: must be one of text, "),
        ({"type": "text", "text": 7}, ".text: must be a string"),
        ({"type": "image", "data": "x"}, ".mime: must be a string"),
        ({"type": "image", "mime": "x", "data": None}, ".data: must be a string"),
        ({"type": "thinking"}, ".text: must be a string"),
        ({"type": "function_call", "function_id": "f"}, ".id: must be a string"),
        ({"type": "function_call", "id": "c"}, ".function_id: must be a string"),
        ({"type": "function_result", "content": []}, ".function_call_id: must be a string"),
        ({"type": "function_result", "function_call_id": "c"}, ".content: must be a list"),
        (
            {"type": "function_result", "function_call_id": "c", "content": [{"type": "text"}]},
            ".content[0].text: must be a string",
        ),
    ],
)
def test_a_bad_block_is_named(block: Any, message: str) -> None:
    messages = [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, block]}]
    for decode in (decode_stream, decode_count):
        found = refusal(decode, {**PAYLOAD, "messages": messages})
        assert found.startswith("messages[1].content[1]" + message)


@pytest.mark.parametrize("decode", DECODERS.values())
@pytest.mark.parametrize("data", [None, [], "x", 7])
def test_a_payload_is_an_object(decode: Any, data: object) -> None:
    assert refusal(decode, data) == "payload: must be an object"


def test_embed_and_abort() -> None:
    assert decode_embed({"model": "e", "input": ["a", ""]}).input == ["a", ""]
    assert len(decode_embed({"input": ["a"] * MAX_INPUTS}).input) == MAX_INPUTS
    limit = f"input: must hold 1 to {MAX_INPUTS} strings"
    assert refusal(decode_embed, {"input": []}) == limit
    assert refusal(decode_embed, {"input": ["a"] * (MAX_INPUTS + 1)}) == limit
    assert refusal(decode_embed, {"input": "a"}) == "input: must be a list"
    assert refusal(decode_embed, {"input": ["a", None]}) == "input[1]: must be a string"
    assert refusal(decode_embed, {"input": ["a"], "model": 1}) == "model: must be a string"
    assert decode_abort({"request_id": "r1", "_caller_worker_id": "w"}) == "r1"
    assert refusal(decode_abort, {}) == "request_id: must be a string"


def test_a_count_needs_messages() -> None:
    assert refusal(decode_count, {"model": "m", "messages": []}) == "messages: must not be empty"


def test_secrets_show_neither_in_reprs_nor_in_refusals() -> None:
    options = {"api_key": "hush", "n": 2}
    request = decode_stream({**PAYLOAD, "provider_options": options, "system_prompt": "hush"})
    assert "hush" not in repr(request)
    assert "hush" not in repr(request.writer)
    assert "hush" not in refusal(decode_stream, {**PAYLOAD, "thinking_level": "hush"})


def test_nesting_that_would_overflow_a_recursion_is_no_trouble() -> None:
    content: list[Any] = []
    for _ in range(5000):
        content = [{"type": "function_result", "function_call_id": "c", "content": content}]
    message = {"role": "user", "content": content}
    assert decode_stream({**PAYLOAD, "messages": [message]}).messages == [message]
    content[0]["content"][0]["content"][0]["content"].append({"type": "text"})
    inner = ".content[0]" * 3
    assert refusal(decode_stream, {**PAYLOAD, "messages": [message]}) == (
        f"messages[0]{inner}.content[1].text: must be a string"
    )


PAYLOADS = {
    "stream": stream_payloads(data=TEXT),
    "embed": EMBED_PAYLOADS,
    "count_tokens": COUNT_PAYLOADS,
    "abort": ABORT_PAYLOADS,
}


@pytest.mark.parametrize("name", PAYLOADS)
@RELAXED
@given(data=st.data())
def test_what_the_schema_accepts_is_accepted(name: str, data: st.DataObject) -> None:
    payload = data.draw(PAYLOADS[name])
    before = copy.deepcopy(payload)
    DECODERS[name](payload)
    assert payload == before
    if name == "stream" and payload.get("provider_options", 0) is None:
        payload.pop("provider_options")  # the schema says "anything" and means it
    VALIDATORS[name].validate(payload)


@pytest.mark.parametrize("name", PAYLOADS)
@RELAXED
@given(data=st.data())
def test_anything_else_is_refused_or_accepted_but_never_a_fault(
    name: str, data: st.DataObject
) -> None:
    payload = data.draw(PAYLOADS[name])
    spots: list[tuple[Any, Any]] = []
    waiting: list[Any] = [payload]
    while waiting:
        holder = waiting.pop()
        members = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in members:
            spots.append((holder, key))
            if isinstance(value, (dict, list)):
                waiting.append(value)
    for holder, key in data.draw(st.lists(st.sampled_from(spots), max_size=3)):
        holder[key] = data.draw(JSON)
    try:
        DECODERS[name](payload)
    except InvalidRequest as error:
        assert ": " in error.message
