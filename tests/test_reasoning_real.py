"""Thinking on a real llama-server: levels, budgets, earlier thoughts, the end of a running one."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from conftest import LlamaFactory
from laws import check_frames
from peers import wait_for

from provider_llamacpp import Settings
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.local import model as demo
from provider_llamacpp.local.llama import LlamaServer
from provider_llamacpp.local.stack import LocalStack
from provider_llamacpp.payloads import decode_stream
from provider_llamacpp.transcript.convert import chat_body

pytestmark = pytest.mark.timeout(120)

ROUND = len(demo.PONDER.split())
"""Tokens of one round of the endless thought."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}], "timestamp": 1}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": list(blocks),
        "stop_reason": "end",
        "model": "demo",
        "provider": "llamacpp",
        "timestamp": 2,
    }


class Place:
    """A worker on a server, called as the router calls it."""

    def __init__(self, stack: LocalStack, caller: Caller, model: str) -> None:
        self.stack = stack
        self.caller = caller
        self.model = model

    def begin(
        self, *messages: str | dict[str, Any], **more: Any
    ) -> tuple[threading.Thread, Iterator[dict[str, Any]]]:
        writer, frames = self.caller.open_channel()
        payload = {
            "writer_ref": writer,
            "model": self.model,
            "messages": [user(each) if isinstance(each, str) else each for each in messages],
            "max_output_tokens": 400,
            **more,
        }
        call = self.caller.call
        stream = "provider::llamacpp::stream"
        thread = threading.Thread(target=call, args=(stream, payload), kwargs={"timeout": 60.0})
        thread.start()
        return thread, frames

    def ask(self, *messages: str | dict[str, Any], **more: Any) -> dict[str, Any]:
        """The message of a whole answer."""
        thread, frames = self.begin(*messages, **more)
        seen = list(frames)
        thread.join(30)
        assert check_frames(seen) == []
        message: dict[str, Any] = seen[-1]["message"]
        return message

    def texts(self, *messages: str | dict[str, Any], **more: Any) -> dict[str, str]:
        content = self.ask(*messages, **more)["content"]
        return {block["type"]: block["text"] for block in content}

    def record(self) -> dict[str, Any]:
        """The model as the router knows it."""
        (record,) = self.caller.call("router::models::list", {})["models"]
        found: dict[str, Any] = record
        return found

    def prompt(self, url: str, **more: Any) -> str:
        """What the server makes of the request the worker sends, up to where the model goes on."""
        data = {"writer_ref": {"channel_id": "c", "access_key": "k"}, "model": self.model, **more}
        request = decode_stream({"messages": [user("hi")], **data})
        abilities = self.stack.worker._served[0].provider.abilities(self.model)
        prepared = chat_body(request, max_tokens=10, abilities=abilities)
        body = {key: value for key, value in prepared.body.items() if key != "stream"}
        reply = requests.post(f"{url}/apply-template", json=body, timeout=20)
        assert reply.ok, reply.text
        prompt: str = reply.json()["prompt"]
        return prompt


@pytest.fixture(scope="module")
def place(llama: LlamaServer) -> Iterator[Place]:
    with LocalStack(Settings(api_url=llama.url)) as stack, Caller(stack.settings) as caller:
        yield Place(stack, caller, "demo")


@pytest.fixture
def plain(llama_factory: LlamaFactory) -> Iterator[Place]:
    server = llama_factory("plain", ctx_size=8192, parallel=1)
    with LocalStack(Settings(api_url=server.url)) as stack, Caller(stack.settings) as caller:
        yield Place(stack, caller, "plain")


@pytest.fixture
def slow(llama_factory: LlamaFactory) -> Iterator[Place]:
    """Thinks for long enough to be told to stop, however busy the machine is."""
    server = llama_factory("slow", ctx_size=16384, parallel=1)
    with LocalStack(Settings(api_url=server.url)) as stack, Caller(stack.settings) as caller:
        yield Place(stack, caller, "slow")


# -- levels -----------------------------------------------------------------------------------

CLOSED = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("level", ["minimal", "low", "medium", "high", "xhigh"])
def test_a_level_reaches_the_template(place: Place, llama: LlamaServer, level: str) -> None:
    prompt = place.prompt(llama.url, thinking_level=level)
    assert f"Reasoning effort: {level}" in prompt
    assert not prompt.endswith(CLOSED)


@pytest.mark.parametrize("level", [None, "off", "none"])
def test_thinking_that_is_off_is_off(place: Place, llama: LlamaServer, level: str | None) -> None:
    prompt = place.prompt(llama.url, thinking_level=level)
    assert prompt.endswith(CLOSED)
    assert place.texts("ponder", thinking_level=level) == {"text": demo.SENTENCE}


def test_an_effort_of_the_catalog_is_preferred(place: Place, llama: LlamaServer) -> None:
    efforts = [{"effort": "low"}, {"effort": "high"}]
    meta = {"id": "demo", "reasoning_efforts": efforts}
    prompt = place.prompt(llama.url, thinking_level="xhigh", model_meta=meta)
    assert "Reasoning effort: high" in prompt


def test_options_win_over_the_level(place: Place, llama: LlamaServer) -> None:
    options = {"reasoning_effort": "none"}
    off = place.prompt(llama.url, thinking_level="high", provider_options=options)
    assert off.endswith(CLOSED)
    options = {"reasoning_effort": "max"}
    more = place.prompt(llama.url, thinking_level="low", provider_options=options)
    assert "Reasoning effort: max" in more


def test_a_template_without_a_switch(plain: Place) -> None:
    message = plain.ask("hi", thinking_level="high")
    assert message["content"] == [{"type": "text", "text": demo.SENTENCE}]
    assert any("best effort" in warning for warning in message["warnings"])
    assert "warnings" not in plain.ask("hi", thinking_level="off")


# -- budgets ----------------------------------------------------------------------------------


def test_a_budget_of_the_catalog_ends_the_thought(place: Place) -> None:
    meta = {"id": "demo", "thinking_budgets": {"low": ROUND, "high": 3 * ROUND}}
    for level, rounds in (("low", 1), ("high", 3)):
        found = place.texts("ponder", thinking_level=level, model_meta=meta)
        assert found["thinking"].split() == demo.PONDER.split() * rounds
        assert found["text"] == demo.SENTENCE


@pytest.mark.parametrize("name", ["reasoning_budget_tokens", "thinking_budget_tokens"])
def test_a_budget_among_the_options_wins(place: Place, name: str) -> None:
    meta = {"id": "demo", "thinking_budgets": {"low": 4 * ROUND}}
    options = {name: ROUND, "reasoning_budget_message": "Enough."}
    found = place.texts("ponder", thinking_level="low", model_meta=meta, provider_options=options)
    assert found["thinking"].startswith(demo.PONDER.strip())
    assert found["thinking"].endswith("Enough.")
    assert len(found["thinking"].split()) == ROUND + 1
    assert found["text"] == demo.SENTENCE


def test_a_budget_of_nothing_is_no_thought(place: Place) -> None:
    options = {"reasoning_budget_tokens": 0}
    found = place.texts("ponder", thinking_level="low", provider_options=options)
    assert found == {"text": demo.SENTENCE}


# -- what is advertised -----------------------------------------------------------------------


def test_the_catalog_says_what_the_template_can(place: Place, llama: LlamaServer) -> None:
    caps = requests.get(f"{llama.url}/props", timeout=20).json()["chat_template_caps"]
    record = place.record()
    assert caps["supports_reasoning_effort"] is True
    assert (record["supports_thinking"], record["supports_thinking_off"]) == (True, True)
    assert [each["effort"] for each in record["reasoning_efforts"]] == ["low", "medium", "high"]


def test_the_catalog_says_what_a_plain_template_cannot(plain: Place) -> None:
    record = plain.record()
    assert record["supports_thinking"] is False
    assert record.get("supports_thinking_off") is None
    assert record.get("reasoning_efforts") is None


# -- earlier thoughts -------------------------------------------------------------------------


def test_earlier_thoughts_are_replayed_where_the_template_keeps_them(
    place: Place, llama: LlamaServer
) -> None:
    caps = requests.get(f"{llama.url}/props", timeout=20).json()["chat_template_caps"]
    assert caps["supports_preserve_reasoning"] is True
    thought = {"type": "thinking", "text": "a thought of before"}
    said = {"type": "text", "text": "Yes."}
    turns = [user("one"), assistant(thought, said), user("two")]
    prompt = place.prompt(llama.url, messages=turns)
    assert "<think>a thought of before</think>\n\nYes." in prompt
    without = [user("one"), assistant(said), user("two")]
    more = place.ask(*turns)["usage"]["input"] - place.ask(*without)["usage"]["input"]
    assert more >= len("a thought of before")  # spelled letter by letter, with its tags


def test_earlier_thoughts_stay_here_where_the_template_drops_them(plain: Place) -> None:
    said = {"type": "text", "text": "Yes."}
    thought = {"type": "thinking", "text": "a thought of before"}
    counts = [
        plain.ask(user("one"), assistant(*blocks), user("two"))["usage"]["input"]
        for blocks in ([thought, said], [said])
    ]
    assert counts[0] == counts[1]


# -- the end of a thought ---------------------------------------------------------------------


def thoughts(frames: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Frames up to the ``count``-th piece of the thought."""
    seen = []
    pieces = 0
    for frame in frames:
        seen.append(frame)
        pieces += frame["type"] == "thinking_delta"
        if pieces == count:
            return seen
    raise AssertionError(f"only {pieces} pieces of a thought came")


def end_of(slow: Place, **more: Any) -> None:
    key = str(uuid.uuid4())
    thread, frames = slow.begin(
        "ponder", thinking_level="high", resolution_key=key, max_output_tokens=8000, **more
    )
    seen = thoughts(frames, 5)
    end = slow.caller.call("provider::llamacpp::end_thinking", {"request_id": key})
    assert end == {"ended": True, "reason": None}
    seen += frames
    thread.join(30)
    assert check_frames(seen) == []
    message = seen[-1]["message"]
    found = {block["type"]: block["text"] for block in message["content"]}
    endless = itertools.cycle(demo.PONDER.split())
    assert all(word == next(endless) for word in found["thinking"].split())
    assert found["text"] == demo.SENTENCE
    assert (message["stop_reason"], message["native_stop_reason"]) == ("end", "stop")
    assert "warnings" not in message
    late = slow.caller.call("provider::llamacpp::end_thinking", {"request_id": key})
    assert late == {"ended": False, "reason": "no stream of this request is running"}


def test_a_running_thought_can_be_ended(slow: Place) -> None:
    end_of(slow)


def test_a_thought_under_a_budget_can_be_ended_before(slow: Place) -> None:
    end_of(slow, provider_options={"reasoning_budget_tokens": 7000})


def test_a_thought_that_has_not_begun_cannot_be_ended(slow: Place) -> None:
    # The server itself says yes while it reads the prompt, and lets the thought run on.
    key = str(uuid.uuid4())
    text = "word " * 1200 + "ponder"
    thread, frames = slow.begin(text, thinking_level="low", resolution_key=key)
    worker = slow.stack.worker
    wait_for(lambda: any(each["prompt"] for each in worker.stats()["streams"]))
    end = slow.caller.call("provider::llamacpp::end_thinking", {"request_id": key})
    assert end == {"ended": False, "reason": "the model has not begun to think"}
    slow.caller.call("provider::llamacpp::abort", {"request_id": key})
    list(frames)
    thread.join(30)


def test_an_answer_that_has_begun_goes_on(slow: Place) -> None:
    key = str(uuid.uuid4())
    thread, frames = slow.begin("forever", resolution_key=key, max_output_tokens=8000)
    assert any(frame["type"] == "text_delta" for frame in frames)
    end = slow.caller.call("provider::llamacpp::end_thinking", {"request_id": key})
    assert end == {"ended": False, "reason": "the model is past its thinking"}
    slow.caller.call("provider::llamacpp::abort", {"request_id": key})
    list(frames)
    thread.join(30)


def test_the_caller_may_decline_the_control(slow: Place) -> None:
    key = str(uuid.uuid4())
    options = {"reasoning_control": False}
    thread, frames = slow.begin(
        "ponder",
        thinking_level="low",
        resolution_key=key,
        provider_options=options,
        max_output_tokens=8000,
    )
    thoughts(frames, 3)
    end = slow.caller.call("provider::llamacpp::end_thinking", {"request_id": key})
    assert end["ended"] is False
    assert "not enabled" in end["reason"]
    slow.caller.call("provider::llamacpp::abort", {"request_id": key})
    list(frames)
    thread.join(30)


def test_by_the_router_too(slow: Place) -> None:
    """The request id of ``router::chat`` is the key of the stream it makes."""
    key = str(uuid.uuid4())
    writer, frames = slow.caller.open_channel()
    payload = {
        "request_id": key,
        "provider": "llamacpp",
        "model": "slow",
        "messages": [user("ponder")],
        "thinking_level": "low",
        "writer_ref": writer,
    }
    call = slow.caller.call
    thread = threading.Thread(target=call, args=("router::chat", payload), kwargs={"timeout": 60.0})
    thread.start()
    thoughts(frames, 3)
    assert call("provider::llamacpp::end_thinking", {"request_id": key})["ended"]
    last = list(frames)[-1]
    thread.join(30)
    assert last["message"]["content"][-1] == {"type": "text", "text": demo.SENTENCE}
