"""The whole life of the worker, with the official ``iii-sdk`` as router and caller.

Against the loopback engine as engines of 0.21, 0.23 and 0.25 behave, and a real llama-server.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time

import pytest
import requests
from iii import InvocationError
from laws import check_frames
from peers import ScriptedServer, answer_json
from sdk import Client, Router, Store, Stream

from provider_llamacpp import ProviderWorker, Settings
from provider_llamacpp.errors import FatalError
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.model import CITY, LOOP, SENTENCE, THOUGHT, TOOL_NAME

pytestmark = pytest.mark.timeout(120)

PROFILES = ["0.21", "0.23", "0.25"]
FUNCTIONS = ["abort", "count_tokens", "embed", "on_router_ready", "refresh_models", "stream"]
STATE = {"scope": "provider-llamacpp", "key": "registration_token"}
WEATHER = {
    "name": "weather__eu::get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def says(text):
    return {"role": "user", "content": [{"type": "text", "text": text}], "timestamp": 1}


def ask(text="hi", **more):
    """A stream's payload as the router sends it."""
    return {"model": "demo", "messages": [says(text)], "max_output_tokens": 200, **more}


class World:
    """Engine and SDK roles of one test; everything ends with it."""

    def __init__(self, profile, stack):
        self._stack = stack
        self.frames = []
        self.engine = stack.enter_context(
            LoopbackEngine(
                profile=profile, on_frame=lambda peer, frame: self.frames.append((peer, frame))
            )
        )
        self.caller = stack.enter_context(Client(self.engine.url, "caller"))
        self.store = Store()

    def router(self, **options):
        return self._stack.enter_context(Router(self.engine.url, self.store, **options))

    def worker(self, **settings):
        worker = ProviderWorker(Settings(url=self.engine.url, drain=0.0, **settings))
        worker.start()
        self._stack.callback(worker.stop, 0.0)
        return worker

    def call(self, function, payload=None, provider="llamacpp"):
        return self.caller.call(f"provider::{provider}::{function}", payload or {})

    def stream(self, *args, **more):
        return Stream(self.caller, ask(*args, **more))

    def token(self):
        return self.caller.call("state::get", STATE)

    def declared(self):
        """Until the worker can be called."""
        for name in FUNCTIONS:
            assert self.engine.wait_for_function(f"provider::llamacpp::{name}")


@pytest.fixture(params=PROFILES)
def world(request, tmp_path, monkeypatch):
    # The SDK leaves a note of each client in the home directory.
    monkeypatch.setenv("HOME", str(tmp_path))

    with contextlib.ExitStack() as stack:
        world = World(request.param, stack)
        yield world
        # What the real engine would have dropped in silence is a fault, whatever the test was.
        assert list(world.engine.dropped) == []


@pytest.fixture
def running(world, llama):
    """Router and worker are up, and the catalog is told."""
    world.store.config["api_url"] = f"{llama.url}/v1/chat/completions"
    world.live_router = world.router()
    world.live_worker = world.worker()
    assert world.live_router.wait_for_calls("models::reconcile")
    world.declared()
    return world


def settled(stream):
    """The stream's message, after its end and its frames were found lawful."""
    assert stream.finish() == {"ok": True}
    check_frames([text.encode() for text in stream.texts])
    return stream.terminal


def wait_idle(llama, seconds):
    """Seconds until no slot of the server computes; fails after ``seconds``."""
    began = time.monotonic()
    while True:
        slots = requests.get(f"{llama.url}/slots", timeout=10).json()
        took = time.monotonic() - began
        if not any(slot["is_processing"] for slot in slots):
            return took
        assert took < seconds, slots
        threading.Event().wait(0.02)


# --- declaring -------------------------------------------------------------------------------


def test_declares_and_reconciles(running, llama):
    router = running.live_router
    declaration = router.declarations["llamacpp"]
    assert declaration["display_name"] == "llama.cpp"
    assert declaration["credential_env_var"] == "LLAMACPP_API_KEY"
    assert declaration["credential_optional"] is True
    assert declaration["defaults"] == {"max_tokens": 8192}
    assert declaration["supports_model_listing"] is True
    assert declaration["worker_id"] == "provider-llamacpp"
    assert declaration["default_models"] == ["demo"]
    assert "token" not in router.calls["provider::register"][0]
    (record,) = router.store.models["llamacpp"]
    assert record["id"] == "demo"
    assert record["provider"] == "llamacpp"
    assert record["context_window"] == 8192
    assert record["max_output_tokens"] == 4096
    assert record["supports_tools"] is True
    # The models' list was re-declared before the catalog was told, under the token.
    assert router.calls["models::reconcile"][-1]["token"] == running.token()


def test_the_token_is_kept_in_the_state(running):
    token = running.token()
    assert isinstance(token, str) and token
    for data in running.live_router.calls["provider::resolve"]:
        assert data == {
            "id": "llamacpp",
            "token": token,
            "_caller_worker_id": data.get("_caller_worker_id"),
        }


def test_a_router_that_starts_later_finds_the_worker(world, llama):
    world.worker(api_url=llama.url)
    world.declared()
    router = world.router(announce=False)
    # Nothing but the trigger: engines before 0.21.8 refused it at first, it is asked for again.
    assert router.wait(lambda: router.bindings() == {"provider::llamacpp::on_router_ready": 1}, 30)
    assert router.wait_for_calls("models::reconcile")
    declared = len(router.calls["provider::register"])
    assert router.fire() == 1
    assert router.wait_for_calls("provider::register", declared + 1)


def test_every_function_is_published_with_its_schemas(running):
    listed = running.caller.call(
        "engine::functions::list", {"prefix": "provider::llamacpp::", "include_internal": True}
    )["functions"]
    assert [row["function_id"] for row in listed] == [
        f"provider::llamacpp::{name}" for name in FUNCTIONS
    ]
    public = running.caller.call("engine::functions::list", {"prefix": "provider::"})
    assert [row["function_id"] for row in public["functions"]] == [
        "provider::llamacpp::refresh_models",
        "provider::llamacpp::stream",
    ]
    for name in FUNCTIONS:
        info = running.caller.call(
            "engine::functions::info", {"function_id": f"provider::llamacpp::{name}"}
        )
        assert info["request_format"]["$schema"] == "http://json-schema.org/draft-07/schema#"
        assert info["response_format"]["type"] == "object"


# --- calls -----------------------------------------------------------------------------------


def test_streams_text(running):
    stream = running.stream()
    message = settled(stream)
    assert message["content"] == [{"type": "text", "text": SENTENCE}]
    assert message["stop_reason"] == "end"
    assert message["model"] == "demo"
    assert message["provider"] == "llamacpp"
    assert message["usage"]["output"] > 0
    deltas = [frame["delta"] for frame in stream.frames if frame["type"] == "text_delta"]
    assert "".join(deltas) == SENTENCE
    assert len(deltas) > 5
    kinds = [kind for kind in stream.kinds if kind not in ("text_delta", "usage", "ping")]
    assert kinds == ["start", "text_start", "text_end", "stop", "done"]


def test_streams_a_thought(running):
    message = settled(running.stream(thinking_level="medium"))
    assert message["content"] == [
        {"type": "thinking", "text": THOUGHT},
        {"type": "text", "text": SENTENCE},
    ]


def test_streams_a_call(running):
    stream = running.stream("How is the weather?", tools=[WEATHER | {"name": TOOL_NAME}])
    message = settled(stream)
    (call,) = message["content"]
    assert call.pop("id")
    assert call == {"type": "function_call", "function_id": TOOL_NAME, "arguments": {"city": CITY}}
    assert message["stop_reason"] == "function_call"
    assert message["native_stop_reason"] == "tool_calls"


def test_abort_in_mid_stream(running, llama):
    stream = running.stream("forever", resolution_key="turn-1", max_output_tokens=8000)
    assert stream.wait_for("text_delta", 3)
    assert stream.abort() == {"aborted": True}
    wait_idle(llama, 5)
    assert stream.finish() == {"ok": True}
    assert not {"done", "error"} & set(stream.kinds)
    said = "".join(frame.get("delta", "") for frame in stream.frames)
    assert LOOP.strip() in said
    assert len(said) < 8000  # a token has more characters than one: it was cut short
    assert stream.abort() == {"aborted": False}
    # The worker goes on.
    assert settled(running.stream())["stop_reason"] == "end"


def test_abort_of_nobody(running):
    assert running.call("abort", {"request_id": "unknown"}) == {"aborted": False}


def test_a_caller_that_leaves_frees_the_server(world):
    chunk = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
    endless = {
        "script": [
            {"headers": {"headers": {"content-type": "text/event-stream"}}},
            {
                "repeat": 10_000,
                "steps": [{"send": f"data: {json.dumps(chunk)}\n\n"}, {"sleep_ms": 10}],
            },
        ]
    }
    listing = answer_json({"object": "list", "data": [{"id": "demo", "object": "model"}]})
    routes = {"/v1/models": listing, "/v1/chat/completions": endless}
    with ScriptedServer(routes=routes) as server:
        world.store.config["api_url"] = server.url
        router = world.router()
        world.worker()
        assert router.wait_for_calls("models::reconcile")
        stream = world.stream()
        assert stream.wait_for("text_delta", 3)
        stream.leave()
        assert server.client_closed.wait(10), "the server streams on for nobody"
        assert stream.result.result(15) == {"ok": True}


def test_embeds(running):
    answer = running.call("embed", {"model": None, "input": ["a", "bb", "a"]})
    first, second, third = answer["embeddings"]
    assert len(first) == len(second) > 1
    assert first == pytest.approx(third)
    assert first != pytest.approx(second)
    assert answer["model"]


def test_counts_what_a_stream_is_charged(running):
    question = ask("How is the weather?", system_prompt="Be brief.", tools=[WEATHER])
    message = settled(Stream(running.caller, question))
    counted = running.call(
        "count_tokens", {k: question[k] for k in ("model", "messages", "system_prompt", "tools")}
    )
    assert counted == {
        "model": "demo",
        "tokens": message["usage"]["input"],
        "estimator": "metered",
    }


def test_refresh_models(running):
    told = len(running.live_router.calls["models::reconcile"])
    assert running.call("refresh_models") == {"ok": True, "count": 1}
    assert len(running.live_router.calls["models::reconcile"]) > told


def test_on_router_ready_answers_at_once_and_declares_again(running):
    router = running.live_router
    declared = len(router.calls["provider::register"])
    assert running.call("on_router_ready") == {"ok": True}
    assert router.wait_for_calls("provider::register", declared + 1)
    last = router.calls["provider::register"][-1]
    assert last["token"] == running.token()
    # A declaration without the list would erase it.
    assert last["default_models"] == ["demo"]


def test_a_payload_that_cannot_be_read(running):
    with pytest.raises(InvocationError) as caught:
        running.call("stream", {"model": "demo"})
    assert caught.value.code == "provider/invalid_request"
    assert "writer_ref" in caught.value.message
    with pytest.raises(InvocationError) as caught:
        running.call("embed", {"input": []})
    assert caught.value.code == "provider/invalid_request"
    assert "input" in caught.value.message


def test_a_server_that_fails(world):
    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    with ScriptedServer(answer_json(loading, 503)) as server:
        world.store.config["api_url"] = server.url
        router = world.router()
        world.worker()
        world.declared()
        assert router.wait_for_calls("provider::register")
        stream = world.stream()
        message = settled(stream)
        assert stream.kinds == ["error"]
        assert message["error_kind"] == "transient"
        assert "Loading model" in message["error_message"]
        with pytest.raises(InvocationError) as caught:
            world.call("refresh_models")
        assert caught.value.code == "provider/upstream_unavailable"
        assert "models::reconcile" not in router.calls


# --- restarts --------------------------------------------------------------------------------


def test_a_router_that_restarts_with_its_record(running, caplog):
    old, token = running.live_router, running.token()
    old.close()
    router = running.router()
    assert router.wait_for_calls("models::reconcile")
    assert router.calls["provider::register"][-1]["token"] == token
    assert router.rejections == 0
    assert running.token() == token
    if running.engine.profile.parking:
        # Older engines forget the binding with the router, which then finds us in the listing.
        ready = {"provider::llamacpp::on_router_ready": 1}
        assert router.wait(lambda: router.bindings() == ready, 30)
    assert settled(running.stream())["stop_reason"] == "end"


def test_a_router_that_forgot_adopts_the_token(running):
    token = running.token()
    running.live_router.close()
    config, running.store = running.store.config, Store()
    running.store.config = config
    router = running.router()
    assert router.wait_for_calls("models::reconcile")
    assert router.calls["provider::register"][0]["token"] == token
    assert running.token() == token
    assert settled(running.stream())["stop_reason"] == "end"


def test_a_lost_token_is_refused_loudly_until_the_router_forgets(running, caplog):
    caplog.set_level(logging.ERROR, "provider_llamacpp")
    router = running.live_router
    running.live_worker.stop(0.0)
    running.caller.call("state::delete", STATE)
    running.worker()
    assert router.wait(lambda: router.rejections >= 2)
    words = [
        record.message
        for record in caplog.records
        if record.levelno >= logging.ERROR and record.name.startswith("provider_llamacpp")
    ]
    assert len(words) >= 1
    assert "llamacpp" in words[0]
    assert "clear" in words[0] and "router" in words[0]
    assert running.token() is None
    del router.store.hashes["llamacpp"]
    told = len(router.calls["models::reconcile"])
    assert router.wait_for_calls("models::reconcile", told + 1, 30)
    assert isinstance(running.token(), str)
    assert settled(running.stream())["stop_reason"] == "end"


def test_a_worker_that_restarts_finds_its_token(running):
    router, token = running.live_router, running.token()
    declared = len(router.calls["provider::register"])
    running.live_worker.stop(0.0)
    running.worker()
    assert router.wait_for_calls("provider::register", declared + 1)
    assert router.calls["provider::register"][declared]["token"] == token
    assert router.rejections == 0


@pytest.mark.parametrize("code", [1001, None], ids=["close", "crash"])
def test_an_engine_that_restarts(running, code):
    router, token = running.live_router, running.token()
    told = len(router.calls["models::reconcile"])
    running.engine.stop(code)
    running.engine.start()
    running.declared()
    assert router.wait_for_calls("models::reconcile", told + 1, 30)
    assert running.token() == token
    assert running.live_worker.stats()["reconnects"] >= 1
    assert settled(running.stream())["content"] == [{"type": "text", "text": SENTENCE}]
    assert router.wait(lambda: router.bindings() == {"provider::llamacpp::on_router_ready": 1}, 30)


def test_a_stream_outlives_the_control_socket(running, llama):
    stream = running.stream("forever", resolution_key="turn-9", max_output_tokens=8000)
    assert stream.wait_for("text_delta", 2)
    assert running.engine.drop_worker("provider-llamacpp") == 1
    seen = len(stream.frames)
    assert stream.wait(lambda: len(stream.frames) > seen + 20)
    with pytest.raises(InvocationError) as caught:
        stream.result.result(15)
    assert caught.value.code == "invocation_stopped"
    running.declared()
    assert stream.abort() == {"aborted": True}
    wait_idle(llama, 5)
    assert stream.wait(lambda: stream.ended)
    assert not {"done", "error"} & set(stream.kinds)
    assert stream.abort() == {"aborted": False}


# --- conflicts -------------------------------------------------------------------------------


def test_a_second_worker_of_the_same_name(running):
    second = running.worker()
    if running.engine.profile.namespaces:
        with pytest.raises(FatalError, match="provider-llamacpp"):
            second.wait(15)
        assert second.wait(15)
    else:
        # Before 0.23 nobody minds, and the last one to register serves.
        assert running.live_router.wait_for_calls("provider::register", 3)
        assert second.wait(0) is False
    assert settled(running.stream())["stop_reason"] == "end"


def test_one_function_that_is_taken(world, llama, caplog):
    caplog.set_level(logging.ERROR, "provider_llamacpp")
    with Client(world.engine.url, "squatter") as squatter:
        squatter.register_function("provider::llamacpp::embed", lambda data: {"squatter": True})
        assert world.engine.wait_for_function("provider::llamacpp::embed")
        world.store.config["api_url"] = llama.url
        router = world.router()
        world.worker()
        assert router.wait_for_calls("models::reconcile")
        world.declared()
        assert settled(world.stream())["stop_reason"] == "end"
        if world.engine.profile.namespaces:
            assert world.call("embed", {"input": ["a"]}) == {"squatter": True}
            assert any("provider::llamacpp::embed" in r.message for r in caplog.records)
        else:
            assert world.call("embed", {"input": ["a"]})["embeddings"]


def test_two_providers_side_by_side(running, llama):
    router = running.live_router
    running.worker(id="second", api_url=llama.url)
    assert router.wait(lambda: "second" in router.store.models)
    assert router.declarations["second"]["credential_env_var"] == "SECOND_API_KEY"
    for provider in ("llamacpp", "second"):
        message = settled(Stream(running.caller, ask(), provider=provider))
        assert message["provider"] == provider


# --- manners ---------------------------------------------------------------------------------


def test_speaks_nothing_newer_than_the_engine(running):
    settled(running.stream())
    ours = {frame["type"] for peer, frame in running.frames if peer.name == "provider-llamacpp"}
    assert ours <= {
        "reattach",
        "registerfunction",
        "registertrigger",
        "invokefunction",
        "invocationresult",
        "ping",
    }
    for peer, frame in running.frames:
        if peer.name == "provider-llamacpp" and frame["type"] == "invokefunction":
            # With everything in ``default`` the field is valid on no version but needed on none.
            assert "namespace" not in frame


def test_reattaches_with_what_the_engine_handed_out(running):
    first = next(p for p in running.engine.connections if p.name == "provider-llamacpp")
    running.engine.drop_worker("provider-llamacpp")
    assert running.engine.wait_until(
        lambda: any(
            p.name == "provider-llamacpp" and p is not first for p in running.engine.connections
        ),
        15,
    )
    again = [frame for peer, frame in running.frames if frame["type"] == "reattach"]
    again = [frame for frame in again if frame["previous_worker_id"] == first.worker_id]
    if running.engine.profile.reattach:
        assert len(again) == 1
        assert again[0]["reattach_token"]
    running.declared()
    assert settled(running.stream())["stop_reason"] == "end"
