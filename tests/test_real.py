"""The whole path against a real llama-server: engine, router, worker and the server's own words."""

import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
import requests
from laws import check_frames
from world import WEATHER as EU_WEATHER
from world import says as user

from provider_llamacpp import BusError, Settings
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.local import model as demo
from provider_llamacpp.local.stack import LocalStack

PATIENCE = 30.0
WEATHER = {**EU_WEATHER, "name": "get_weather"}


class Turn:
    """One call of ``router::chat``, and the frames it brings."""

    def __init__(self, caller, messages, **more):
        self.id = str(uuid.uuid4())
        self.caller = caller
        self.writer, self.arriving = caller.open_channel()
        self.frames = []
        self.request = {
            "request_id": self.id,
            "provider": "llamacpp",
            "model": "demo",
            "messages": [user(messages)] if isinstance(messages, str) else messages,
            "writer_ref": self.writer,
            **more,
        }
        self.asking = threading.Thread(target=self._ask)
        self.asking.start()

    def _ask(self):
        try:
            self.answer = self.caller.call("router::chat", self.request, timeout=60.0)
        except BusError as error:
            self.answer = error

    def until(self, kind):
        for frame in self.arriving:
            self.frames.append(frame)
            if frame["type"] == kind:
                return frame
        raise AssertionError(f"no {kind} in {[each['type'] for each in self.frames]}")

    def end(self):
        """All frames to the end; the last one's message."""
        self.frames += self.arriving
        self.asking.join(PATIENCE)
        assert not self.asking.is_alive()
        last = self.frames[-1]
        return last.get("message") or last.get("error")

    def abort(self):
        return self.caller.call("router::abort", {"request_id": self.id})


def ask(caller, messages, **more):
    turn = Turn(caller, messages, **more)
    message = turn.end()
    assert check_frames(turn.frames) == []
    return message


def texts(message):
    return {block["type"]: block.get("text") for block in message["content"]}


def slots_busy(url):
    return sum(slot["is_processing"] for slot in requests.get(f"{url}/slots", timeout=10).json())


def wait_until(condition, seconds=PATIENCE):
    """Polls: the server tells nobody when it becomes idle."""
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        pause.wait(0.02)


@pytest.fixture(scope="module")
def stack(llama):
    with LocalStack(Settings(api_url=llama.url)) as stack:
        yield stack


@pytest.fixture(scope="module")
def caller(stack):
    with Caller(stack.settings) as caller:
        yield caller


def test_text(caller):
    message = ask(caller, "hi")
    assert message["content"] == [{"type": "text", "text": demo.SENTENCE}]
    assert (message["stop_reason"], message["native_stop_reason"]) == ("end", "stop")
    assert message["usage"]["output"] > 0
    assert "warnings" not in message


@pytest.mark.parametrize("level", ["minimal", "low", "medium", "high", "xhigh"])
def test_thinking(caller, level):
    message = ask(caller, "hi", thinking_level=level)
    assert texts(message) == {"thinking": demo.THOUGHT, "text": demo.SENTENCE}
    assert "warnings" not in message


def test_thinking_off(caller):
    assert texts(ask(caller, "hi", thinking_level="off")) == {"text": demo.SENTENCE}


def test_tool_call_and_the_turn_after_it(caller):
    question = user("the weather?")
    message = ask(caller, [question], tools=[WEATHER])
    (call,) = message["content"]
    assert message["stop_reason"] == "function_call"
    assert (call["function_id"], call["arguments"]) == ("get_weather", {"city": demo.CITY})
    result = {
        "role": "function_result",
        "function_call_id": call["id"],
        "function_id": "get_weather",
        "content": [{"type": "text", "text": "sunny"}],
        "details": {},
        "is_error": False,
        "timestamp": 3,
    }
    message = ask(caller, [question, message, result], tools=[WEATHER])
    assert texts(message) == {"text": demo.AFTER_TOOL}


def test_parallel_calls_with_ids_that_hold_colons(caller):
    tool = {**WEATHER, "name": "sky::get__weather"}
    message = ask(caller, "the weather in both?", tools=[tool])
    assert [(call["function_id"], call["arguments"]["city"]) for call in message["content"]] == [
        ("sky::get__weather", demo.CITY),
        ("sky::get__weather", demo.SECOND_CITY),
    ]
    assert len({call["id"] for call in message["content"]}) == 2


def test_json_that_validates(caller):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    message = ask(caller, "hi", response_format={"type": "json", "schema": schema})
    jsonschema.validate(json.loads(texts(message)["text"]), schema)


def test_a_transcript_that_ends_with_the_assistant_is_continued(caller, llama):
    def assistant(text):
        return {
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
            "stop_reason": "length",
            "model": "demo",
            "provider": "llamacpp",
            "timestamp": 2,
        }

    message = ask(caller, [user("count"), assistant("one two"), assistant(" three")])
    assert "three" not in texts(message)["text"]
    assert texts(message)["text"] == demo.CONTINUATION


def test_the_answer_is_cut_at_the_limit_with_a_reason(caller):
    message = ask(caller, "forever", max_output_tokens=5)
    assert (message["stop_reason"], message["native_stop_reason"]) == ("length", "length")
    assert message["usage"]["output"] == 5


def test_thinking_that_ate_the_budget_is_warned_of(caller):
    message = ask(caller, "ponder", thinking_level="low", max_output_tokens=16)
    assert set(texts(message)) == {"thinking"}
    assert any("thinking" in warning for warning in message["warnings"])


def test_a_prompt_over_the_context(caller):
    turn = Turn(caller, "word " * 9000)
    message = turn.end()
    assert message["error_kind"] == "context_overflow"
    assert "8192" in message["error_message"]
    assert [frame["type"] for frame in turn.frames] == ["error"]


def test_a_context_that_fills_up_is_warned_of(llama_factory):
    small = llama_factory("loop", ctx_size=512, parallel=1)
    with LocalStack(Settings(api_url=small.url)) as stack, Caller(stack.settings) as caller:
        # The router asks for half the context at most, so the prompt must take the other half.
        message = ask(caller, "x" * 350, model="loop")
        assert message["stop_reason"] == "length"
        assert message["usage"]["input"] + message["usage"]["output"] == 512
        assert any("context" in warning for warning in message["warnings"])


def test_options_reach_the_server(caller):
    message = ask(
        caller, "hi", provider_options={"llamacpp": {"grammar": 'root ::= "exactly this"'}}
    )
    assert texts(message)["text"] == "exactly this"


def test_an_image_for_a_model_that_cannot_see(caller):
    image = {"type": "image", "mime": "image/png", "data": "aGk="}
    turn = Turn(caller, [{"role": "user", "content": [image], "timestamp": 1}])
    message = turn.end()
    assert message["error_kind"] == "permanent"
    assert "image" in message["error_message"]


def test_a_wrong_key(llama_factory):
    server = llama_factory(api_key="right")
    settings = Settings(api_url=server.url, api_key="right")
    with LocalStack(settings) as stack, Caller(stack.settings) as caller:
        assert texts(ask(caller, "hi"))["text"] == demo.SENTENCE
        stack.router.set_config("llamacpp", api_key="wrong", api_url=server.url)
        wait_until(lambda: not caller.call("router::models::list", {})["models"])
        payload = {"model": "demo", "messages": [user("hi")]}
        writer, frames = caller.open_channel()
        result = caller.call("provider::llamacpp::stream", {**payload, "writer_ref": writer})
        (frame,) = frames
        assert result == {"ok": True}
        assert frame["error"]["error_kind"] == "auth_expired"
        assert "wrong" not in json.dumps(frame).replace("wrong or", "")


def test_embeddings(caller):
    answer = caller.call("router::embed", {"input": ["one", "two", "one"]})
    first, second, third = answer["embeddings"]
    assert first == third != second
    assert len(first) == len(second) > 0


def test_no_embeddings(llama_factory):
    server = llama_factory()
    with LocalStack(Settings(api_url=server.url)) as stack, Caller(stack.settings) as caller:
        with pytest.raises(BusError) as caught:
            caller.call("provider::llamacpp::embed", {"input": ["one"]})
        assert caught.value.code == "invocation_failed"
        assert "--embeddings" in caught.value.message


@pytest.mark.parametrize("tools", [None, [WEATHER]])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_counts_are_the_servers_own(caller, tools, system):
    question = {"model": "demo", "messages": [user("hello there")]}
    more = {"tools": tools} if tools else {}
    if system:
        more["system_prompt"] = system
    message = ask(caller, question["messages"], **more)
    counted = caller.call(
        "provider::llamacpp::count_tokens", {**question, "tools": tools, "system_prompt": system}
    )
    assert counted == {
        "model": "demo",
        "tokens": message["usage"]["input"],
        "estimator": "metered",
    }


def test_the_catalog_is_what_the_server_reports(caller, llama):
    (row,) = caller.call("router::models::list", {})["models"]
    props = requests.get(f"{llama.url}/props", timeout=10).json()
    assert row["id"] == "demo"
    assert row["context_window"] == props["default_generation_settings"]["n_ctx"] == 8192
    assert row["supports_tools"] is props["chat_template_caps"]["supports_tools"] is True
    assert row["supports_thinking"] is True
    assert row["supports_vision"] is False


def test_an_abort_in_mid_stream_frees_the_slot(caller, llama):
    turn = Turn(caller, "forever")
    turn.until("text_delta")
    assert slots_busy(llama.url) == 1
    turn.abort()
    wait_until(lambda: slots_busy(llama.url) == 0)
    turn.end()


def test_a_caller_that_leaves_frees_the_slot(caller, stack, llama):
    writer, frames = caller.open_channel()
    payload = {"model": "demo", "messages": [user("forever")], "writer_ref": writer}
    asking = ThreadPoolExecutor(1)
    result = asking.submit(caller.call, "provider::llamacpp::stream", payload)
    next(frames)
    frames.close()
    wait_until(lambda: slots_busy(llama.url) == 0)
    assert result.result(PATIENCE) == {"ok": True}
    asking.shutdown()


def test_an_abort_before_the_first_byte(llama_factory):
    server = llama_factory("loop", parallel=1, ctx_size=65536)
    with LocalStack(Settings(api_url=server.url)) as stack, Caller(stack.settings) as caller:
        running = Turn(caller, "hi", model="loop")
        running.until("text_delta")
        waiting = Turn(caller, "hi", model="loop")
        wait_until(lambda: stack.worker.stats()["active_streams"] == 2)
        wait_until(
            lambda: [each["phase"] for each in stack.worker.stats()["streams"]][-1] == "queued"
        )
        assert waiting.abort()["aborted"]
        waiting.end()
        wait_until(lambda: stack.worker.stats()["active_streams"] == 1)
        assert all(frame["type"] != "text_delta" for frame in waiting.frames)
        running.abort()
        running.end()
        wait_until(lambda: slots_busy(server.url) == 0)


def test_64_streams_at_once(caller, stack):
    with ThreadPoolExecutor(64) as pool:
        messages = list(pool.map(lambda _: ask(caller, "hi", thinking_level="low"), range(64)))
    assert [texts(message) for message in messages] == [
        {"thinking": demo.THOUGHT, "text": demo.SENTENCE}
    ] * 64
    wait_until(lambda: stack.worker.stats()["active_streams"] == 0)
    assert stack.worker.stats()["calls"] == 0
