"""Requests become bodies that llama-server takes (provider protocol 8)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from transcripts import COUNT_PAYLOADS, RELAXED, TEXT, stream_payloads

from provider_llamacpp import jsontext
from provider_llamacpp.errors import InvalidRequest, ProviderError
from provider_llamacpp.payloads import decode_count, decode_stream
from provider_llamacpp.transcript.convert import (
    Abilities,
    Prepared,
    anthropic_count_body,
    chat_body,
    count_body,
)

USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
SAID = {"role": "assistant", "content": [{"type": "text", "text": "I say"}]}
THOUGHT = {"role": "assistant", "content": [{"type": "thinking", "text": "hm"}, *SAID["content"]]}
IMAGE = {"type": "image", "mime": "image/png", "data": "iVBO"}
SOUND = {"type": "audio", "mime": "audio/wav", "data": "UklG"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"name": "fs::read", "description": "Read a file", "parameters": PARAMETERS, "label": "R"}
UNKNOWN = Abilities()

CASES = [
    case
    for line in (Path(__file__).parent / "cases" / "cases.jsonl").read_text("utf-8").splitlines()
    if (case := json.loads(line))["kind"] == "convert"
]


def prepare(*, abilities: Abilities = UNKNOWN, max_tokens: int = 8192, **fields: Any) -> Prepared:
    writer = {"channel_id": "c", "access_key": "k", "direction": "write"}
    data = {"writer_ref": writer, "model": "m", "messages": [USER], **fields}
    return chat_body(decode_stream(data), max_tokens=max_tokens, abilities=abilities)


def body(**fields: Any) -> dict[str, Any]:
    return prepare(**fields).body


def with_options(options: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return body(provider_options=options, **fields)


def refusal(**fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        prepare(**fields)
    return caught.value.message


def pointer(document: Any, path: str) -> Any:
    for step in path.split("/")[1:]:
        document = document[int(step)] if isinstance(document, list) else document[step]
    return document


# -- the whole --------------------------------------------------------------------------------


def test_the_plainest_request() -> None:
    prepared = prepare()
    assert prepared.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8192,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert (prepared.warnings, prepared.prefill) == ([], "")


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_cases(case: dict[str, Any]) -> None:
    prepared = prepare(**case["call"]["input"])
    expect = case["expect"]
    for path, value in expect.get("request_json", {}).items():
        assert pointer(prepared.body, path) == value
    for path in expect.get("request_json_absent", []):
        assert path.removeprefix("/") not in prepared.body
    for row in prepared.body["messages"]:
        for call in row.get("tool_calls", []):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
    for block in expect.get("content_contains", []):
        id = block["function_id"]
        assert prepared.names.decode(id.replace("::", "__")) == id


def test_rows_and_prefill() -> None:
    prepared = prepare(messages=[USER, SAID], system_prompt="Be brief.")
    assert [row["content"] for row in prepared.body["messages"]] == ["Be brief.", "hi", "I say"]
    assert prepared.prefill == "I say"


# -- tools ------------------------------------------------------------------------------------


def test_tools() -> None:
    prepared = prepare(tools=[TOOL])
    assert prepared.body["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "fs__read",
                "description": "Read a file",
                "parameters": PARAMETERS,
            },
        }
    ]
    assert prepared.names.decode("fs__read") == "fs::read"


@pytest.mark.parametrize("tools", [[], None])
def test_no_tools_leave_no_trace(tools: Any) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": True}
    found = with_options(options, tools=tools)
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & found.keys()
    assert with_options(options, tools=[TOOL])["tool_choice"] == "required"


@pytest.mark.parametrize("parameters", [None, {}, True, False, "x", []])
def test_parameters_that_are_no_schema(parameters: Any) -> None:
    tool = {"name": "a", "description": None, "parameters": parameters}
    function = body(tools=[tool])["tools"][0]["function"]
    assert function["parameters"] == {"type": "object", "properties": {}}
    assert function["description"] == ""


def test_tools_and_calls_of_the_history_share_one_table() -> None:
    calls = [
        {"type": "function_call", "id": id, "function_id": id, "arguments": {}}
        for id in ("a::b", "a__b")
    ]
    history = {"role": "assistant", "content": calls}
    prepared = prepare(messages=[history, USER], tools=[{"name": "a__b"}])
    assert prepared.body["tools"][0]["function"]["name"] == "a__b"
    sent = [one["function"]["name"] for one in prepared.body["messages"][0]["tool_calls"]]
    assert sent[1] == "a__b" != sent[0]
    assert [prepared.names.decode(name) for name in sent] == ["a::b", "a__b"]


def test_tools_that_the_template_drops_are_warned_of() -> None:
    prepared = prepare(tools=[TOOL, {"name": "b"}], abilities=Abilities(tools=False))
    assert len(prepared.warnings) == 1
    assert "no place for tools" in prepared.warnings[0]
    assert "the 2 that" in prepared.warnings[0]
    assert "tools" in prepared.body
    for abilities in (UNKNOWN, Abilities(tools=True)):
        assert prepare(tools=[TOOL], abilities=abilities).warnings == []
    assert prepare(abilities=Abilities(tools=False)).warnings == []


# -- response format --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    ],
)
def test_a_schema_stands_where_servers_look_for_it(given: Any) -> None:
    assert body(response_format=given)["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "response", "schema": SCHEMA},
        "schema": SCHEMA,
    }


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json"},
        {"type": "json", "schema": None},
        {"type": "json", "schema": {}},
        {"type": "json", "schema": True},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": "x"},
    ],
)
def test_json_without_a_schema(given: Any) -> None:
    assert body(response_format=given)["response_format"] == {"type": "json_object"}


def test_text_is_no_format() -> None:
    for text in (None, {"type": "text"}):
        assert "response_format" not in body(response_format=text)


def test_formats_that_nobody_knows() -> None:
    assert refusal(response_format={"type": "xml"}) == 'response_format.type: must be "json"'
    for schema in (False, "x", [], 1):
        message = refusal(response_format={"type": "json", "schema": schema})
        assert message == "response_format.schema: must be a JSON Schema object"


def test_the_requests_own_format_wins() -> None:
    other = {"response_format": {"type": "json_object"}}
    assert with_options(other)["response_format"] == {"type": "json_object"}
    prepared = prepare(provider_options=other, response_format={"type": "json", "schema": SCHEMA})
    assert prepared.body["response_format"]["schema"] == SCHEMA
    assert prepared.warnings[0].endswith(": response_format")


# -- thinking ---------------------------------------------------------------------------------

LEVELS = ["minimal", "low", "medium", "high", "xhigh"]
READS_EFFORT = Abilities(reasoning_effort=True, thinking_switch=True)


@pytest.mark.parametrize("level", LEVELS)
def test_any_level_turns_thinking_on(level: str) -> None:
    for abilities in (UNKNOWN, Abilities(reasoning_effort=False, thinking_switch=True)):
        prepared = prepare(thinking_level=level, abilities=abilities)
        assert prepared.body["chat_template_kwargs"] == {"enable_thinking": True}
        assert "reasoning_effort" not in prepared.body
        assert prepared.warnings == []


@pytest.mark.parametrize("level", [None, "off", "none"])
def test_no_level_turns_it_off(level: str | None) -> None:
    abilities = Abilities(thinking_switch=False)
    prepared = prepare(thinking_level=level, abilities=abilities)
    assert prepared.body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "reasoning_effort" not in prepared.body
    assert prepared.warnings == []


@pytest.mark.parametrize("level", LEVELS)
def test_the_effort_goes_where_the_template_reads_it(level: str) -> None:
    found = body(thinking_level=level, abilities=READS_EFFORT)
    assert found["reasoning_effort"] == level
    assert found["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": level}


def test_no_effort_where_thinking_is_off() -> None:
    found = body(thinking_level="off", abilities=READS_EFFORT)
    assert found["reasoning_effort"] == "none"
    assert found["chat_template_kwargs"] == {"enable_thinking": False}
    assert "reasoning_effort" not in body(abilities=READS_EFFORT)


@pytest.mark.parametrize(
    ("level", "listed", "sent"),
    [
        ("xhigh", ["low", "medium", "high"], "high"),
        ("minimal", ["low", "medium", "high"], "low"),
        ("medium", ["low", "medium", "high"], "medium"),
        ("medium", ["high", "xhigh"], "high"),
        ("high", ["none", "max"], "high"),
        ("high", [], "high"),
    ],
)
def test_the_catalogs_nearest_effort_is_sent(level: str, listed: list[str], sent: str) -> None:
    meta = {"reasoning_efforts": [{"effort": effort} for effort in listed]}
    found = body(thinking_level=level, abilities=READS_EFFORT, model_meta=meta)
    assert found["reasoning_effort"] == sent


@pytest.mark.parametrize("listed", [None, "high", ["high"], [{"effort": ["high"]}], [{}]])
def test_a_broken_list_of_efforts_is_no_list(listed: Any) -> None:
    meta = {"reasoning_efforts": listed}
    found = body(thinking_level="xhigh", abilities=READS_EFFORT, model_meta=meta)
    assert found["reasoning_effort"] == "xhigh"


def test_only_a_template_without_a_switch_is_warned_of() -> None:
    without = Abilities(thinking_switch=False)
    warnings = prepare(thinking_level="low", abilities=without).warnings
    assert warnings == [
        "thinking_level low is best effort: the chat template of m has no switch for thinking"
    ]
    reads = Abilities(thinking_switch=False, reasoning_effort=True)
    assert prepare(thinking_level="low", abilities=reads).warnings == []


@pytest.mark.parametrize(
    ("budgets", "sent"),
    [
        ({"high": 512, "low": 64}, 512),
        ({"high": 0}, 0),
        ({"low": 64}, None),
        ({"high": None}, None),
        ({"high": True}, None),
        ({"high": -1}, None),
        ({"high": 2**31}, None),
        ({"high": "9"}, None),
        ("x", None),
        (None, None),
    ],
)
def test_budgets_of_the_catalog(budgets: Any, sent: int | None) -> None:
    found = body(thinking_level="high", model_meta={"thinking_budgets": budgets})
    assert found.get("reasoning_budget_tokens") == sent
    assert found.get("thinking_budget_tokens") == sent
    assert "reasoning_budget_tokens" not in body(model_meta={"thinking_budgets": budgets})


@pytest.mark.parametrize("name", ["reasoning_budget_tokens", "thinking_budget_tokens"])
def test_an_own_budget_wins(name: str) -> None:
    meta = {"thinking_budgets": {"high": 512}}
    found = with_options({name: 7}, thinking_level="high", model_meta=meta)
    assert found[name] == 7
    assert len({"reasoning_budget_tokens", "thinking_budget_tokens"} & found.keys()) == 1


def test_own_template_arguments_join_and_win() -> None:
    options = {"chat_template_kwargs": {"enable_thinking": True, "date": "today", "x": None}}
    found = with_options(options)
    assert found["chat_template_kwargs"] == {"enable_thinking": True, "date": "today"}
    found = with_options({"chat_template_kwargs": None}, thinking_level="low")
    assert found["chat_template_kwargs"] == {"enable_thinking": True}


@pytest.mark.parametrize("level", [None, "off", "high"])
@pytest.mark.parametrize(("effort", "thinks"), [("low", True), ("none", False)])
def test_an_own_effort_wins(level: str | None, effort: str, thinks: bool) -> None:
    found = with_options({"reasoning_effort": effort}, thinking_level=level, abilities=READS_EFFORT)
    assert found["reasoning_effort"] == effort
    assert found["chat_template_kwargs"] == {"enable_thinking": thinks}
    nested = {"chat_template_kwargs": {"reasoning_effort": effort}}
    found = with_options(nested, thinking_level=level, abilities=READS_EFFORT)
    assert "reasoning_effort" not in found
    assert found["chat_template_kwargs"] == {
        "enable_thinking": thinks,
        "reasoning_effort": effort,
    }


def test_a_continued_answer_is_past_its_thoughts() -> None:
    meta = {"thinking_budgets": {"high": 512}}
    prepared = prepare(messages=[USER, SAID], thinking_level="high", model_meta=meta)
    assert prepared.body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "reasoning_budget_tokens" not in prepared.body
    assert prepared.warnings == ["thinking is off while an answer is continued"]
    assert prepare(messages=[USER, SAID]).warnings == []


def test_thoughts_are_replayed_only_for_templates_known_to_show_them() -> None:
    messages = [THOUGHT, USER]
    shown = body(messages=messages, abilities=Abilities(preserve_reasoning=True))
    assert shown["messages"][0]["reasoning_content"] == "hm"
    for abilities in (UNKNOWN, Abilities(preserve_reasoning=False)):
        found = body(messages=messages, abilities=abilities)
        assert "reasoning_content" not in found["messages"][0]


# -- provider options -------------------------------------------------------------------------


def test_options_join_the_body() -> None:
    options = {
        "temperature": 0.2,
        "top_k": 40,
        "seed": 7,
        "grammar": 'root ::= "a"',
        "cache_prompt": False,
        "id_slot": 1,
        "reasoning_format": "none",
        "lora": [{"id": 0, "scale": 0.5}],
        "stop": ["x"],
    }
    found = with_options(options)
    assert {name: found[name] for name in options} == options
    assert found.keys() - options.keys() == body().keys()


def test_null_options_are_absent() -> None:
    options = dict.fromkeys(
        ("temperature", "n", "model", "max_tokens", "reasoning_effort", "response_format")
    )
    assert prepare(provider_options=options).warnings == []
    assert with_options(options) == body()


def test_what_makes_the_request_cannot_be_replaced() -> None:
    options = {
        "model": "other",
        "messages": [{"role": "user", "content": "file:///etc/passwd"}],
        "prompt": "x",
        "tools": [],
        "stream": False,
        "stream_options": {},
        "api_url": "http://10.0.0.1",
        "base_url": "http://10.0.0.1",
        "headers": {"Authorization": "hush"},
        "api_key": "hush",
        "top_p": 0.5,
        "chat_template_kwargs": {"messages": [], "tools": [], "date": "today"},
    }
    prepared = prepare(provider_options=options, tools=[TOOL])
    plain = body(tools=[TOOL])
    plain["chat_template_kwargs"]["date"] = "today"
    assert prepared.body == {**plain, "top_p": 0.5}
    assert len(prepared.warnings) == 1
    for name in ("model", "stream_options", "api_url", "chat_template_kwargs.messages"):
        assert name in prepared.warnings[0]
    assert "hush" not in prepared.warnings[0]


@pytest.mark.parametrize("name", ["n", "n_cmpl"])
def test_one_answer_only(name: str) -> None:
    for one in (1, 1.0):
        assert with_options({name: one}) == body()
    for count in (2, 0, -1, True, "1", 1.5, [1]):
        message = refusal(provider_options={name: count})
        assert message == f"provider_options.{name}: must be 1, a stream has one answer"


def test_template_arguments_are_an_object() -> None:
    for kwargs in ([], "x", False):
        message = refusal(provider_options={"chat_template_kwargs": kwargs})
        assert message == "provider_options.chat_template_kwargs: must be an object"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_the_requests_token_limit_wins(name: str) -> None:
    limited = with_options({name: 5}, max_output_tokens=100, max_tokens=100)
    assert limited == body(max_output_tokens=100, max_tokens=100)
    assert with_options({name: 5}) == body(max_tokens=5)
    assert with_options({name: -1}) == body(max_tokens=-1)
    for bad in (True, "5", 1.5, -2, []):
        message = refusal(provider_options={name: bad})
        assert message == f"provider_options.{name}: must be an integer of at least -1"


def test_a_limit_fits_into_32_bits() -> None:
    assert body(max_tokens=2**64)["max_tokens"] == 2**31 - 1
    assert with_options({"max_tokens": 2**40})["max_tokens"] == 2**31 - 1
    assert with_options({"n_predict": 5, "max_tokens": 6})["max_tokens"] == 6


# -- media ------------------------------------------------------------------------------------


def test_media_meets_the_models_abilities() -> None:
    message = {"role": "user", "content": [IMAGE, SOUND]}
    parts = body(messages=[message])["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "input_audio"]
    able = Abilities(vision=True, audio=True)
    assert body(messages=[message], abilities=able)["messages"][0]["content"] == parts
    for abilities, word in (
        (Abilities(vision=False, audio=True), "images"),
        (Abilities(vision=True, audio=False), "audio"),
    ):
        with pytest.raises(ProviderError, match=f"cannot read {word}") as caught:
            prepare(messages=[message], abilities=abilities)
        assert caught.value.kind == "permanent"
        request = decode_count({"model": "m", "messages": [message]})
        with pytest.raises(ProviderError, match=f"cannot read {word}"):
            count_body(request, abilities=abilities)


# -- counts -----------------------------------------------------------------------------------


def count(**fields: Any) -> dict[str, Any]:
    request = decode_count({"model": "m", "messages": [USER], **fields})
    return count_body(request, abilities=Abilities(preserve_reasoning=True))


def test_a_count_sees_what_a_stream_without_a_level_sends() -> None:
    fields: dict[str, Any] = {
        "messages": [THOUGHT, {"role": "user", "content": [IMAGE]}, SAID],
        "system_prompt": "Be brief.",
        "tools": [TOOL],
    }
    streamed = body(**fields, abilities=Abilities(preserve_reasoning=True))
    counted = count(**fields)
    assert counted == {name: streamed[name] for name in counted}
    assert counted.keys() == {"model", "messages", "tools", "chat_template_kwargs"}
    assert "tools" not in count(tools=None)
    assert "tools" not in count(tools=[])


def test_a_count_in_the_anthropic_shape() -> None:
    call = {"type": "function_call", "id": "c1", "function_id": "fs::read", "arguments": {}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]},
        {"role": "assistant", "content": [call]},
        {"role": "function_result", "function_call_id": "c1", "content": []},
    ]
    plain = count(messages=messages, system_prompt="Be brief.", tools=[TOOL])
    before = copy.deepcopy(plain)
    assert anthropic_count_body(plain) == {
        "model": "m",
        "system": "Be brief.",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see"},
                    {
                        "type": "image",
                        "source": {
                            "type": "base64",
                            "media_type": "image/png",
                            "data": "iVBO",
                        },
                    },
                ],
            },
            *plain["messages"][2:],
        ],
        "tools": [{"name": "fs__read", "description": "Read a file", "input_schema": PARAMETERS}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert plain == before
    least = anthropic_count_body(count(messages=[USER]))
    assert least.keys() == {"model", "messages", "chat_template_kwargs"}
    empty = {"role": "custom", "content": []}
    assert anthropic_count_body(count(messages=[empty]))["messages"] == []


# -- laws -------------------------------------------------------------------------------------


@RELAXED
@given(stream_payloads())
def test_whatever_fits_the_schema_becomes_a_body_or_a_refusal(payload: dict[str, Any]) -> None:
    request = decode_stream(payload)
    before = copy.deepcopy(payload)
    abilities = Abilities(reasoning_effort=True, preserve_reasoning=True)
    try:
        prepared = chat_body(request, max_tokens=10, abilities=abilities)
    except InvalidRequest as error:
        assert error.message.startswith(("response_format.", "provider_options."))
        return
    finally:
        assert payload == before
    sent = prepared.body
    jsontext.dumpb(sent)
    assert (sent["model"], sent["stream"]) == (request.model, True)
    assert sent["stream_options"] == {"include_usage": True}
    assert [prepared.names.decode(tool["function"]["name"]) for tool in sent.get("tools", [])] == [
        tool["name"] for tool in request.tools
    ]


@RELAXED
@given(stream_payloads(data=TEXT), COUNT_PAYLOADS)
def test_nothing_else_is_ever_raised(streamed: dict[str, Any], counted: dict[str, Any]) -> None:
    for abilities in (UNKNOWN, Abilities(vision=False, audio=False)):
        try:
            chat_body(decode_stream(streamed), max_tokens=10, abilities=abilities)
        except (InvalidRequest, ProviderError):
            pass
        try:
            sent = count_body(decode_count(counted), abilities=abilities)
            jsontext.dumpb(anthropic_count_body(sent))
        except (InvalidRequest, ProviderError):
            pass
