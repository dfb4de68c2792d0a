"""The registered schemas are those of the contract; only their words are ours."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from provider_llamacpp.schemas import function_schemas

PACKAGE = Path(__file__).parent.parent / "provider_llamacpp"
REFERENCE: dict[str, Any] = {
    entry["name"].removeprefix("provider::llamacpp::"): entry
    for entry in json.loads(
        (Path(__file__).parent / "data" / "api-reference.json").read_text(encoding="utf-8")
    )["functions"]
}
SCHEMAS = function_schemas("llamacpp")
NAMES = {*REFERENCE, "count_tokens", "status"}

# Transcript and answer as the contract's examples have them.
USER = {
    "role": "user",
    "content": [
        {"type": "text", "text": "Look"},
        {"type": "image", "mime": "image/png", "data": "iVBO", "attachment_id": "a1"},
    ],
    "timestamp": 1760000000000,
}
ASSISTANT = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "text": "Need both files."},
        {"type": "redacted_thinking", "data": "…"},
        {"type": "text", "text": "Reading them."},
        {"type": "function_call", "id": "c1", "function_id": "fs::read", "arguments": {"p": 1}},
    ],
    "stop_reason": "function_call",
    "native_stop_reason": "tool_calls",
    "usage": {"input": 812, "output": 41, "cache_read": 640},
    "warnings": ["w"],
    "model": "qwen3-8b",
    "provider": "llamacpp",
    "timestamp": 1760000000060,
}
RESULT = {
    "role": "function_result",
    "function_call_id": "c1",
    "function_id": "fs::read",
    "content": [{"type": "text", "text": "no"}],
    "details": {"status": "denied"},
    "is_error": True,
    "timestamp": 1760000000070,
}
CUSTOM = {"role": "custom", "custom_type": "note", "content": [], "timestamp": 1}
TOOL = {
    "name": "fs::read",
    "description": "Read a file",
    "parameters": {"type": "object"},
    "label": "Read",
    "execution_mode": None,
}
STREAM = {
    "writer_ref": {"channel_id": "c", "access_key": "k", "direction": "write"},
    "model": "qwen3-8b",
    "messages": [USER, ASSISTANT, RESULT, CUSTOM],
    "max_output_tokens": 8192,
    "resolution_key": "r",
    "session_id": "s",
    "system_prompt": "Be brief.",
    "system_sections": [{"text": "Be brief.", "cache_boundary": True}],
    "cache_intent": {"surface_digest": "d"},
    "tools": [TOOL],
    "response_format": {"type": "json", "schema": {"type": "object"}},
    "thinking_level": "high",
    "provider_options": {"temperature": 0.2},
    "model_meta": {
        "id": "qwen3-8b",
        "provider": "llamacpp",
        "context_window": 4096,
        "max_output_tokens": 2048,
        "supports_tools": True,
        "thinking_budgets": {"high": 1024},
        "reasoning_efforts": [{"effort": "high", "description": None}],
    },
    "_caller_worker_id": "w",
}
EXAMPLES: list[tuple[str, str, Any]] = [
    ("stream", "request_format", STREAM),
    ("stream", "response_format", {"ok": True}),
    ("abort", "request_format", {"request_id": "r"}),
    ("abort", "response_format", {"aborted": False}),
    ("embed", "request_format", {"model": None, "input": ["a", "b"]}),
    ("embed", "response_format", {"model": "e", "embeddings": [[0.5, 1], [0, 0.25]]}),
    ("refresh_models", "request_format", {"_caller_worker_id": "w"}),
    ("refresh_models", "response_format", {"ok": True, "count": 1}),
    ("on_router_ready", "request_format", {}),
    ("on_router_ready", "response_format", {"ok": True}),
    ("status", "request_format", {"_caller_worker_id": "w"}),
    (
        "count_tokens",
        "request_format",
        {"model": "m", "messages": [USER, ASSISTANT], "system_prompt": None, "tools": None},
    ),
    ("count_tokens", "request_format", {"model": "m", "messages": [USER], "tools": [TOOL]}),
    (
        "count_tokens",
        "response_format",
        {"model": "m", "tokens": 579, "estimator": "metered"},
    ),
]
MISFITS: list[tuple[str, str, Any]] = [
    ("stream", "request_format", {**STREAM, "model": None}),
    ("stream", "request_format", {**STREAM, "messages": [{"role": "user"}]}),
    ("embed", "request_format", {"input": []}),
    ("embed", "request_format", {"input": ["a"] * 513}),
    ("count_tokens", "request_format", {"model": "m", "messages": []}),
    ("count_tokens", "request_format", {"messages": [USER]}),
    ("count_tokens", "response_format", {"model": "m", "tokens": -1, "estimator": "metered"}),
]


def wordless(value: Any) -> Any:
    """``value`` with every description blank (a property of that name is no description)."""
    if isinstance(value, dict):
        return {
            key: "" if key == "description" and isinstance(member, str) else wordless(member)
            for key, member in value.items()
        }
    return [wordless(member) for member in value] if isinstance(value, list) else value


def texts(value: Any) -> list[str]:
    """All strings in ``value``."""
    if isinstance(value, str):
        return [value]
    members = value.values() if isinstance(value, dict) else value
    return (
        [text for member in members for text in texts(member)]
        if isinstance(value, (dict, list))
        else []
    )


def test_the_contract_is_served_and_our_status() -> None:
    assert set(SCHEMAS) == NAMES
    for entry in SCHEMAS.values():
        assert set(entry) == {"description", "request_format", "response_format", "metadata"}


@pytest.mark.parametrize("name", sorted(REFERENCE))
@pytest.mark.parametrize("side", ["request", "response"])
def test_schemas_equal_the_contract_but_for_the_words(name: str, side: str) -> None:
    ours = wordless(SCHEMAS[name][f"{side}_format"])
    theirs = wordless(REFERENCE[name][f"{side}_schema"])
    assert json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True)


def test_internal_functions_are_marked() -> None:
    internal = {"on_router_ready", "abort", "embed", "count_tokens", "status"}
    for name, entry in SCHEMAS.items():
        assert entry["metadata"] == ({"internal": True} if name in internal else {})


def test_every_description_says_something() -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("description"), str):
                assert value["description"].endswith(".")
            for member in value.values():
                check(member)
        elif isinstance(value, list):
            for member in value:
                check(member)

    check(SCHEMAS)


@pytest.mark.parametrize("id", ["llamacpp", "pi-5_b"])
def test_texts_speak_of_the_id_at_hand(id: str) -> None:
    found = [text for text in texts(function_schemas(id)) if "provider::" in text]
    assert found
    assert all(f"provider::{id}::" in text and "<id>" not in text for text in found)


@pytest.mark.parametrize("path", ["schemas.json", "surfaces/schemas.json"])
def test_functions_stand_in_the_order_of_their_names(path: str) -> None:
    names = list(json.loads((PACKAGE / path).read_text(encoding="utf-8")))
    for name, after in itertools.pairwise(names):
        assert name < after, f"{path}: move {after!r} up, functions stand in the order of names"


def test_each_call_has_its_own_copy() -> None:
    function_schemas("a")["stream"]["metadata"]["mine"] = True
    assert function_schemas("a")["stream"]["metadata"] == {}


@pytest.mark.parametrize("name", sorted(NAMES))
@pytest.mark.parametrize("side", ["request_format", "response_format"])
def test_schemas_are_valid_draft_07(name: str, side: str) -> None:
    schema = SCHEMAS[name][side]
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(schema)


@pytest.mark.parametrize(("name", "side", "value"), EXAMPLES)
def test_payloads_of_the_contract_fit(name: str, side: str, value: Any) -> None:
    jsonschema.validate(value, SCHEMAS[name][side], cls=jsonschema.Draft7Validator)


@pytest.mark.parametrize(("name", "side", "value"), MISFITS)
def test_other_payloads_do_not(name: str, side: str, value: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, SCHEMAS[name][side], cls=jsonschema.Draft7Validator)


def test_a_count_shares_its_definitions_with_the_stream() -> None:
    stream = SCHEMAS["stream"]["request_format"]["definitions"]
    count = SCHEMAS["count_tokens"]["request_format"]["definitions"]
    assert {name: stream[name] for name in count} == count
    assert SCHEMAS["count_tokens"]["request_format"]["title"] == "CountTokensRequest"
