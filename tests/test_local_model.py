"""The models on a real server: they say what they are written to say."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import requests
from conftest import LlamaFactory

from provider_llamacpp.local import model
from provider_llamacpp.local.llama import LlamaServer
from provider_llamacpp.local.model import VARIANTS, Variant, write_demo_model, write_model

OFF: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
ON: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}


def tool(name: str = model.TOOL_NAME, **properties: Any) -> dict[str, Any]:
    properties = properties or {"city": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def post(server: LlamaServer, path: str, body: dict[str, Any]) -> Any:
    reply = requests.post(f"{server.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(server: LlamaServer, text: str = "Hi", **body: Any) -> dict[str, Any]:
    """The one choice of an answer, after a check of the counted prompt."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 300, **body}
    reply = post(server, "/v1/chat/completions", body)
    counted = post(server, "/v1/chat/completions/input_tokens", body)
    assert counted["input_tokens"] == reply["usage"]["prompt_tokens"]
    choice: dict[str, Any] = reply["choices"][0]
    return choice


def calls(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    assert choice["finish_reason"] == "tool_calls"
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def deltas(server: LlamaServer, text: str, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": text}], "stream": True, **body}
    reply = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    data = [line[6:] for line in reply.content.decode().split("\n\n") if line]
    assert data.pop() == "[DONE]"
    return [json.loads(event)["choices"][0]["delta"] for event in data]


class TestDemo:
    def test_recites_the_sentence(self, llama: LlamaServer) -> None:
        choice = chat(llama, **OFF)
        assert choice["message"] == {"role": "assistant", "content": model.SENTENCE}
        assert choice["finish_reason"] == "stop"

    def test_streams_the_sentence_word_by_word(self, llama: LlamaServer) -> None:
        pieces = [delta.get("content") for delta in deltas(llama, "Hi", **OFF)]
        assert [piece for piece in pieces if piece][:4] == ["Hello", "! I", " am", " a very"]
        assert "".join(filter(None, pieces)) == model.SENTENCE

    @pytest.mark.parametrize("temperature", [0, 0.8, 2])
    def test_says_the_same_at_any_temperature(self, llama: LlamaServer, temperature: float) -> None:
        choice = chat(llama, temperature=temperature, seed=-1, **OFF)
        assert choice["message"]["content"] == model.SENTENCE

    @pytest.mark.parametrize("how", [{}, ON, {"reasoning_effort": "high"}])
    def test_thinks_first(self, llama: LlamaServer, how: dict[str, Any]) -> None:
        message = chat(llama, **how)["message"]
        assert message["reasoning_content"] == model.THOUGHT
        assert message["content"] == model.SENTENCE

    def test_reads_the_reasoning_effort(self, llama: LlamaServer) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "high"}
        assert "Reasoning effort: high" in post(llama, "/apply-template", body)["prompt"]

    @pytest.mark.parametrize("thinking", [OFF, ON])
    def test_calls_a_tool(self, llama: LlamaServer, thinking: dict[str, Any]) -> None:
        choice = chat(llama, "How is the weather?", tools=[tool()], **thinking)
        assert calls(choice) == [(model.TOOL_NAME, {"city": model.CITY})]
        assert choice["message"]["content"] == ""

    def test_streams_the_arguments_in_parts(self, llama: LlamaServer) -> None:
        found = deltas(llama, "Weather", tools=[tool()], **OFF)
        functions = [d["tool_calls"][0]["function"] for d in found if "tool_calls" in d]
        assert functions[0]["name"] == model.TOOL_NAME
        parts = [function["arguments"] for function in functions]
        assert parts == ['{"city": "', "Pa", "ris", '"}']

    def test_calls_twice(self, llama: LlamaServer) -> None:
        choice = chat(llama, "The weather in both cities", tools=[tool()], **OFF)
        expected = [(model.TOOL_NAME, {"city": city}) for city in ("Paris", "Rome")]
        assert calls(choice) == expected

    def test_calls_tools_of_other_names(self, llama: LlamaServer) -> None:
        other = tool("demo__look-out_9")
        assert calls(chat(llama, "weather", tools=[other], **OFF)) == [
            ("demo__look-out_9", {"city": "Paris"})
        ]
        assert calls(chat(llama, "weather, both", tools=[other], **OFF)) == [
            ("demo__look-out_9", {"city": "Paris"}),
            ("demo__look-out_9", {"city": "Rome"}),
        ]

    def test_calls_tools_with_other_arguments(self, llama: LlamaServer) -> None:
        other = tool(place={"type": "string"}, days={"type": "integer"})
        choice = chat(llama, "weather", tools=[other], **OFF)
        assert calls(choice) == [(model.TOOL_NAME, {"place": "", "days": 1})]

    def test_does_not_call_unasked(self, llama: LlamaServer) -> None:
        assert chat(llama, tools=[tool()], **OFF)["message"]["content"] == model.SENTENCE
        assert chat(llama, "weather", **OFF)["message"]["content"] == model.SENTENCE

    @pytest.mark.parametrize("thinking", [OFF, ON])
    def test_calls_when_it_must(self, llama: LlamaServer, thinking: dict[str, Any]) -> None:
        choice = chat(llama, tools=[tool()], tool_choice="required", **thinking)
        assert calls(choice) == [(model.TOOL_NAME, {"city": model.CITY})]
        assert choice["message"]["content"] == model.SENTENCE

    def test_answers_after_a_tool_result(self, llama: LlamaServer) -> None:
        function = {"name": model.TOOL_NAME, "arguments": '{"city": "Paris"}'}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "weather"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Let me look.",
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "21 degrees"},
        ]
        choice = chat(llama, messages=messages, tools=[tool()], **OFF)
        assert choice["message"]["content"] == model.AFTER_TOOL
        prompt = post(llama, "/apply-template", {"messages": messages})["prompt"]
        assert "<think>Let me look.</think>" in prompt
        assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in prompt
        assert "<tool_response>\n21 degrees\n</tool_response>" in prompt
        # Only the last message counts: with the next question all is as before.
        messages += [{"role": "assistant", "content": "21"}, {"role": "user", "content": "Hi"}]
        choice = chat(llama, messages=messages, tools=[tool()], **OFF)
        assert choice["message"]["content"] == model.SENTENCE

    def test_two_results_are_one_turn(self, llama: LlamaServer) -> None:
        results = [{"role": "tool", "tool_call_id": c, "content": c} for c in "ab"]
        messages = [{"role": "user", "content": "weather"}, *results]
        prompt = post(llama, "/apply-template", {"messages": messages})["prompt"]
        assert prompt.count("<|im_start|>user") == 2
        assert chat(llama, messages=messages, **OFF)["message"]["content"] == model.AFTER_TOOL

    def test_reads_system_words_and_parts(self, llama: LlamaServer) -> None:
        parts = [{"type": "text", "text": "The wea"}, {"type": "text", "text": "ther"}]
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
        prompt = post(llama, "/apply-template", {"messages": messages})["prompt"]
        assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
        assert calls(chat(llama, messages=messages, tools=[tool()], **OFF))

    def test_goes_on_without_end(self, llama: LlamaServer) -> None:
        choice = chat(llama, "Count forever", max_tokens=17, **OFF)
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == model.LOOP * 2 + "one "

    def test_ponders_without_end(self, llama: LlamaServer) -> None:
        choice = chat(llama, "Ponder", max_tokens=17)
        assert choice["finish_reason"] == "length"
        # One token is the opening tag.
        assert choice["message"]["reasoning_content"] == model.PONDER * 2
        choice = chat(llama, "Ponder", thinking_budget_tokens=8)
        assert choice["message"]["reasoning_content"] == model.PONDER
        assert choice["message"]["content"] == model.SENTENCE

    @pytest.mark.parametrize("thinking", [OFF, ON])
    @pytest.mark.parametrize("start", ["Once upon a time", "It costs 3 ", 'She said "no"', "Né {"])
    def test_continues_an_answer(
        self, llama: LlamaServer, start: str, thinking: dict[str, Any]
    ) -> None:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": start}]
        choice = chat(llama, messages=messages, **thinking)
        assert choice["message"]["content"] == start + model.CONTINUATION
        assert choice["finish_reason"] == "stop"

    def test_continues_a_raw_prompt(self, llama: LlamaServer) -> None:
        reply = post(llama, "/completion", {"prompt": "Once", "n_predict": 20})
        assert reply["content"] == model.CONTINUATION

    def test_knows_all_that_a_template_can(self, llama: LlamaServer) -> None:
        caps = requests.get(f"{llama.url}/props", timeout=10).json()["chat_template_caps"]
        assert caps and set(caps.values()) == {True}

    def test_embeds(self, llama: LlamaServer) -> None:
        texts = ["a small llama", "small a llama", "0123456789"]
        # One at a time: with several slots, llama-server pools texts of one batch wrongly.
        same, shuffled, other = (
            post(llama, "/v1/embeddings", {"input": text})["data"][0]["embedding"] for text in texts
        )

        def likeness(one: list[float], two: list[float]) -> float:
            return sum(a * b for a, b in zip(one, two, strict=True))

        assert likeness(same, same) == pytest.approx(1)
        assert likeness(same, shuffled) > 0.99
        assert likeness(same, other) < 0.1


SCHEMAS: list[tuple[dict[str, Any], Any]] = [
    (
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        {"name": "", "age": 1},
    ),
    (
        {
            "type": "object",
            "properties": {
                "word": {"type": "string", "minLength": 5},
                "numbers": {"type": "array", "items": {"type": "number"}, "minItems": 2},
                "list": {"type": "array", "items": {"type": "string"}},
                "one": {"enum": ["x", "y"]},
                "yes": {"type": "boolean"},
                "day": {"type": "string", "format": "date"},
                "nothing": {"type": "null"},
                "deep": {"type": "object", "properties": {"a": {"type": "string"}}},
            },
            "required": ["word", "numbers", "list", "one", "yes", "day", "nothing", "deep"],
        },
        {
            "word": "aaaaa",
            "numbers": [1, 1],
            "list": [],
            "one": "x",
            "yes": True,
            "day": "1111-11-11",
            "nothing": None,
            "deep": {},
        },
    ),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 3}, [1, 1, 1]),
]


@pytest.mark.parametrize(("schema", "expected"), SCHEMAS)
@pytest.mark.parametrize("thinking", [OFF, ON])
def test_json_by_schema(
    llama: LlamaServer, schema: dict[str, Any], expected: Any, thinking: dict[str, Any]
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    value = json.loads(chat(llama, response_format=wanted, **thinking)["message"]["content"])
    jsonschema.validate(value, schema)
    assert value == expected


def test_any_json(llama: LlamaServer) -> None:
    choice = chat(llama, response_format={"type": "json_object"}, **OFF)
    assert choice["message"]["content"] == "{}"


class TestVariants:
    def test_loop(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory("loop", ctx_size=512, parallel=1)
        choice = chat(server, max_tokens=-1)
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].startswith(model.LOOP * 40)

    def test_think(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory("think", parallel=1)
        choice = chat(server, max_tokens=33)
        assert choice["message"]["reasoning_content"] == model.PONDER * 4
        choice = chat(server, thinking_budget_tokens=8)
        assert choice["message"]["content"] == model.SENTENCE
        assert chat(server, **OFF)["message"]["content"] == model.SENTENCE

    def test_tool(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory("tool", parallel=1)
        assert calls(chat(server, tools=[tool()], **OFF)) == [("get_weather", {"city": "Paris"})]
        assert chat(server, **OFF)["message"]["content"] == model.SENTENCE

    def test_tools(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory("tools", parallel=1)
        assert len(calls(chat(server, tools=[tool()], **ON))) == 2

    def test_plain(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory("plain", parallel=1)
        choice = chat(server, "weather", tools=[tool()], **ON)
        assert choice["message"] == {"role": "assistant", "content": model.SENTENCE}
        caps = requests.get(f"{server.url}/props", timeout=10).json()["chat_template_caps"]
        assert not caps["supports_tools"] and not caps["supports_reasoning_effort"]

    def test_embed(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory("embed", embeddings=True)
        rows = post(server, "/v1/embeddings", {"input": ["one", "two", "one"]})["data"]
        one, two, again = (row["embedding"] for row in rows)
        assert one == pytest.approx(again)
        assert one != pytest.approx(two)
        assert min(map(abs, one)) != max(map(abs, one))

    def test_slow_says_the_same(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory("slow", ctx_size=1024, parallel=1)
        assert chat(server, **OFF)["message"]["content"] == model.SENTENCE


class TestFile:
    def test_is_small_and_private(self, tmp_path: Path) -> None:
        path = write_demo_model(tmp_path / "demo.gguf")
        assert path == tmp_path / "demo.gguf"
        assert path.stat().st_size < 700_000
        if os.name == "posix":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert os.listdir(tmp_path) == ["demo.gguf"]

    def test_is_written_once(self, tmp_path: Path) -> None:
        path = write_demo_model(tmp_path / "demo.gguf")
        before = path.stat()
        write_demo_model(path)
        assert path.stat().st_mtime_ns == before.st_mtime_ns
        assert path.stat().st_ino == before.st_ino

    @pytest.mark.parametrize("old", [b"", b"GGUF", b"general.version" + b"\xff" * 30])
    def test_replaces_what_is_not_it(self, tmp_path: Path, old: bytes) -> None:
        path = tmp_path / "demo.gguf"
        path.write_bytes(old)
        write_demo_model(path)
        assert path.stat().st_size > 100_000

    def test_replaces_another_variant(self, tmp_path: Path) -> None:
        path = write_model(tmp_path / "x.gguf", "loop")
        loop = path.read_bytes()
        assert write_model(path, "plain").read_bytes() != loop

    def test_is_the_same_each_time(self, tmp_path: Path) -> None:
        first, second = (write_model(tmp_path / name, "embed").read_bytes() for name in "ab")
        assert first == second

    @pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "heavy"])
    def test_each_variant_is_written(
        self, model_path: Callable[[Variant], Path], variant: Variant
    ) -> None:
        assert model_path(variant).read_bytes()[:4] == b"GGUF"

    def test_leaves_nothing_behind_a_failure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "demo.gguf").mkdir()
        monkeypatch.setattr(model, "_label_of", lambda path: None)
        with pytest.raises(OSError):
            write_demo_model(tmp_path / "demo.gguf")
        assert os.listdir(tmp_path) == ["demo.gguf"]

    def test_needs_a_directory(self, tmp_path: Path) -> None:
        with pytest.raises(OSError):
            write_demo_model(tmp_path / "none" / "demo.gguf")


def test_sentences_are_readable() -> None:
    assert "🦙" in model.SENTENCE and "é" in model.SENTENCE
    assert model.SENTENCE.endswith(".") and model.THOUGHT.endswith(".")
