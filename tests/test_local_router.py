"""The loopback router, with the official client as provider and as caller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
import warnings
from concurrent.futures import Future

import pytest
from iii import InitOptions, InvocationError, register_worker
from iii.helpers import create_channel
from iii_helpers.observability import ReconnectionConfig
from sdk import end
from websockets.exceptions import ConnectionClosedError

from provider_llamacpp.cutting import cut_off
from provider_llamacpp.errors import BusError
from provider_llamacpp.local.client import BusClient
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.events import Accumulator, read_frame
from provider_llamacpp.local.registry import Registry, digest
from provider_llamacpp.local.relay import Chat, RelaySettings, Slots
from provider_llamacpp.local.router import LoopbackRouter

QUICK = RelaySettings(retry_delay=0.01)
EVENTUALLY = 10.0


@pytest.fixture
def made():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def engine(made):
    made_engine = made.enter_context(LoopbackEngine(poll_interval=0.05))
    yield made_engine
    assert list(made_engine.dropped) == []


@pytest.fixture
def start(made, engine):
    """Start a router that waits for nothing."""

    def begin(settings=QUICK, **options):
        quick = {"refresh_delay": 0.02, "rediscovery_delay": 0.02, "environ": {}, **options}
        return made.enter_context(LoopbackRouter(engine.url, settings=settings, **quick))

    return begin


@pytest.fixture
def sdk(made, engine):
    def make(name):
        quick = ReconnectionConfig(initial_delay_ms=20, max_delay_ms=100)
        options = InitOptions(worker_name=name, otel={"enabled": False}, reconnection_config=quick)
        client = register_worker(engine.url, options)
        made.callback(end, client)
        return client

    return make


def snapshot(*texts, **more):
    return {
        "role": "assistant",
        "content": [{"type": "text", "text": text} for text in texts],
        "stop_reason": "end",
        "model": "m",
        "provider": "fake",
        "timestamp": 1,
        **more,
    }


START = {"type": "start", "partial": snapshot()}
TEXT = {"type": "text_start", "partial": snapshot("")}
HEL, LO = {"type": "text_delta", "delta": "hel"}, {"type": "text_delta", "delta": "lo"}
DONE = {"type": "done", "message": snapshot("hello", usage={"input": 1})}
PING = {"type": "ping"}


def failure(kind):
    return {
        "type": "error",
        "error": snapshot("no", stop_reason="error", error_message="no", error_kind=kind),
    }


class Provider:
    """A provider made with the SDK; each stream plays the next script, the last one for ever.

    A script is a list of frames (or raw text), numbers to sleep, events to wait for, and
    exceptions to raise.
    """

    def __init__(self, client, *scripts, provider_id="fake"):
        self.client = client
        self.id = provider_id
        self.scripts = list(scripts)
        self.streams, self.aborts, self.nudges, self.refreshes = [], [], [], []
        self.token = None
        self.running = 0
        self.over = False
        self.changed = threading.Condition()
        for suffix, handler in {
            "stream": self.stream,
            "abort": self._noting(self.aborts, {"aborted": True}),
            "on_router_ready": self._noting(self.nudges, {"ok": True}),
            "refresh_models": self._noting(self.refreshes, {"ok": True, "count": 0}),
        }.items():
            client.register_function(f"provider::{provider_id}::{suffix}", handler)

    def _noting(self, calls, answer):
        def handler(data):
            with self.changed:
                calls.append(data)
                self.changed.notify_all()
            return answer

        return handler

    def wait(self, condition):
        with self.changed:
            return self.changed.wait_for(condition, EVENTUALLY)

    def register(self, **more):
        more = {k: v for k, v in {"token": self.token, **more}.items() if v is not None}
        answer = call(self.client, "router::provider::register", {"id": self.id, **more})
        self.token = answer["registration_token"]
        return answer

    def reconcile(self, *models, **more):
        rows = [
            {"id": m, "provider": self.id, "context_window": 4096, "max_output_tokens": 2048}
            for m in models
        ]
        payload = {"provider": self.id, "models": rows, "token": self.token, **more}
        return call(self.client, "router::models::reconcile", payload)

    def finish(self):
        """End what still plays: the SDK does not clean up after a stream that is cut."""
        self.over = True
        assert self.wait(lambda: not self.running)

    async def stream(self, data):
        with self.changed:
            self.running += 1
        try:
            return await self.play(data)
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()

    async def play(self, data):
        with self.changed:
            self.streams.append(data)
            script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
            self.changed.notify_all()
        writer = data["writer_ref"]
        try:
            for step in script:
                if self.over:
                    break
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, threading.Event):
                    while not (step.is_set() or self.over):
                        await asyncio.sleep(0.01)
                elif isinstance(step, bytes):
                    await writer.write(step)
                else:
                    text = step if isinstance(step, str) else json.dumps(step)
                    await writer.send_message_async(text)
        finally:
            await writer.close_async()
        return {"ok": True}


@pytest.fixture
def provide(sdk, made):
    """Make a provider; unless told otherwise it is registered and serves the model ``m``."""

    def make(*scripts, provider_id="fake", register=True):
        provider = Provider(sdk(f"provider-{provider_id}"), *scripts, provider_id=provider_id)
        made.callback(provider.finish)
        if register:
            provider.register()
            provider.reconcile("m")
        return provider

    return make


def call(client, function_id, payload, **more):
    return client.trigger({"function_id": function_id, "payload": payload, **more})


def code_of(client, function_id, payload):
    with pytest.raises(InvocationError) as failed:
        call(client, function_id, payload)
    return failed.value.code


def message_of(client, function_id, payload):
    with pytest.raises(InvocationError) as failed:
        call(client, function_id, payload)
    return failed.value.message


def chat(client, payload=None, on_frame=None):
    """``router::chat`` through a channel: the answer, and the frames as they came."""
    channel = create_channel(client)
    frames = []

    def take(text):
        frames.append(json.loads(text))
        if on_frame is not None:
            on_frame(frames[-1])

    channel.reader.on_message(take)

    async def both():
        request = {
            "function_id": "router::chat",
            "payload": {
                "model": "m",
                "messages": [],
                "writer_ref": channel.writer_ref.model_dump(),
                **(payload or {}),
            },
        }
        answer, _ = await asyncio.gather(client.trigger_async(request), channel.reader.read_all())
        return answer

    return asyncio.run(both()), frames


# --- registration ------------------------------------------------------------------------------


def test_a_token_is_minted_and_asked_for(start, sdk):
    router, client = start(), sdk("provider-a")
    register = "router::provider::register"
    answer = call(client, register, {"id": "a"})
    token = answer.pop("registration_token")
    assert answer == {"ok": True, "id": "a"}
    assert call(client, register, {"id": "a", "token": token})["registration_token"] == token
    assert code_of(client, register, {"id": "a"}) == "router/registration_rejected"
    assert "another worker" in message_of(client, register, {"id": "a"})
    assert "token does not match" in message_of(client, register, {"id": "a", "token": "x"})
    assert "token does not match" in message_of(client, register, {"id": "a", "token": 7})
    router.registry.race_once = True
    assert "changed" in message_of(client, register, {"id": "a", "token": token})
    assert call(client, register, {"id": "a", "token": token})["ok"] is True


def test_a_token_is_adopted(start, sdk, engine):
    start()
    client = sdk("provider-a")
    answer = call(client, "router::provider::register", {"id": "a", "token": "mine"})
    assert answer["registration_token"] == "mine"
    stored = engine.call("state::get", {"scope": "llm-router", "key": "registry"})
    assert stored["a"]["token_sha256"] == digest("mine")
    assert '"mine"' not in json.dumps(stored)


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"id": 7},
        {"id": ""},
        {"id": "A"},
        {"id": "a" * 65},
        {"id": "a", "models": ["m"]},
        {"id": "a", "models": [{"id": "m", "provider": "b"}]},
        {"id": "a", "config_schema": {"properties": {"api_key": {"type": "string"}}}},
    ],
)
def test_bad_declarations(payload):
    with pytest.raises(BusError) as bad:
        Registry({}).register(payload)
    assert bad.value.code == "router/invalid_request"


def test_a_good_declaration():
    registry = Registry({})
    schema = {"properties": {"api_key": {"writeOnly": True}, "api_url": {}}}
    registry.register({"id": "a", "config_schema": schema, "token": "t"})
    assert "token" not in registry.records["a"].declaration
    registry.register({"id": "b", "config_schema": "odd"})


@pytest.mark.parametrize("state", [True, False])
def test_tokens_survive_a_restart(start, provide, engine, state):
    engine.state_enabled = state
    router, provider = start(), provide([DONE])
    router.restart()
    assert provider.wait(lambda: provider.nudges)
    assert not router.wait_for_provider("fake", timeout=0.01)
    assert router.registry.models() == []
    assert provider.register()["registration_token"] == provider.token
    assert router.wait_for_provider("fake")


def test_tokens_can_be_lost(start, provide, sdk):
    router, provider = start(), provide([DONE])
    router.restart(keep_tokens=False)
    assert router.registry.records == {}
    resolve = {"id": "fake", "token": provider.token}
    assert code_of(provider.client, "router::provider::resolve", resolve) == (
        "router/unknown_provider"
    )
    assert provider.register()["registration_token"] == provider.token
    router.forget("fake")
    provider.token = None
    assert provider.register()["ok"] is True


def test_another_router_takes_over(start, provide, made, engine):
    first, provider = start(), provide([DONE])
    first.stop()
    second = start()
    assert code_of(provider.client, "router::provider::register", {"id": "fake"}) == (
        "router/registration_rejected"
    )
    provider.register()
    assert second.wait_for_provider("fake")


# --- resolve -----------------------------------------------------------------------------------


def resolved(declaration=None, config=None, environ=None):
    registry = Registry(environ or {})
    registry.register({"id": "a", "token": "t", **(declaration or {})})
    registry.config["a"] = config or {}
    return registry.resolve({"id": "a", "token": "t"})


NONE = {"configured": False, "source": "none", "credential_source": "none"}
KEY = {"type": "api_key", "key": "k"}


def found(source, **more):
    return {
        "configured": True,
        "source": source,
        "credential": KEY,
        "credential_source": source,
        **more,
    }


@pytest.mark.parametrize(
    "declaration, config, environ, expected",
    [
        ({}, {}, {}, NONE),
        ({"defaults": {"max_tokens": 8}}, {}, {}, {**NONE, "max_tokens": 8}),
        (
            {"defaults": {"max_tokens": 8, "api_url": "u"}},
            {"max_tokens": 9},
            {},
            {**NONE, "max_tokens": 9, "api_url": "u"},
        ),
        ({"credential_optional": True}, {}, {}, {**NONE, "configured": True}),
        ({}, {"api_key": "k"}, {}, found("config")),
        ({}, {"api_key": " "}, {}, NONE),
        ({"credential_env_var": "V"}, {}, {"V": " k "}, found("env")),
        ({"credential_env_var": "V"}, {"api_key": "k"}, {"V": "other"}, found("config")),
        ({}, {"credential": KEY, "api_key": "other"}, {}, found("config")),
        (
            {},
            {"api_key": "env://W"},
            {"W": "k"},
            found("config", credential_source="env", credential_ref="env://W"),
        ),
        (
            {"credential_env_var": "V", "credential_optional": True},
            {"api_key": "secret://S"},
            {"V": "k", "S": "k"},
            {
                "configured": False,
                "source": "config",
                "credential_source": "secret",
                "credential_ref": "secret://S",
                "credential_error": "the reference cannot be resolved",
            },
        ),
    ],
)
def test_resolve(declaration, config, environ, expected):
    assert resolved(declaration, config, environ) == expected


def test_resolve_asks_for_the_token(start, provide):
    start()
    provider = provide([DONE])
    resolve = "router::provider::resolve"
    assert call(provider.client, resolve, {"id": "fake", "token": provider.token})["source"] == (
        "none"
    )
    assert code_of(provider.client, resolve, {"id": "fake"}) == "router/registration_rejected"
    assert code_of(provider.client, resolve, {"id": "none"}) == "router/unknown_provider"
    assert code_of(provider.client, resolve, {}) == "router/unknown_provider"


def test_update_credential(start, provide):
    router, provider = start(), provide([DONE])
    update = "router::provider::update_credential"
    payload = {"id": "fake", "token": provider.token}
    assert code_of(provider.client, update, payload) == "router/invalid_request"
    assert call(provider.client, update, {**payload, "credential": KEY}) == {"ok": True}
    assert router.registry.resolve(payload)["credential"] == KEY


# --- catalog -----------------------------------------------------------------------------------


def test_catalog(start, provide, sdk):
    router, provider = start(), provide([DONE], register=False)
    provider.register()
    caller = sdk("caller")
    assert provider.reconcile("m", "n") == {"provider": "fake", "count": 2}
    assert [row["id"] for row in router.wait_for_models("fake")] == ["m", "n"]
    rows = call(caller, "router::models::list", {})["models"]
    assert rows == call(caller, "router::models::list", {"provider": "fake"})["models"]
    assert call(caller, "router::models::list", {"provider": "none"}) == {"models": []}
    assert call(caller, "router::models::get", {"id": "n"}) == rows[1]
    assert call(caller, "router::models::get", {"provider": "fake", "model": "m"}) == rows[0]
    assert call(caller, "router::models::get", {"id": "x"}) is None
    assert provider.reconcile() == {"provider": "fake", "count": 0}
    assert router.registry.models() == []


@pytest.mark.parametrize(
    "models",
    [
        "m",
        ["m"],
        [{}],
        [{"id": "", "provider": "a"}],
        [{"id": "m"}],
        [{"id": "m", "provider": "b", "context_window": 1, "max_output_tokens": 1}],
        [{"id": "m", "provider": "a", "max_output_tokens": 1}],
        [{"id": "m", "provider": "a", "context_window": 1, "max_output_tokens": True}],
    ],
)
def test_bad_catalogs(models):
    registry = Registry({})
    registry.register({"id": "a", "token": "t"})
    with pytest.raises(BusError) as bad:
        registry.reconcile({"provider": "a", "token": "t", "models": models})
    assert bad.value.code == "router/invalid_request"


# --- being ready -------------------------------------------------------------------------------


def bind(client, function_id, config=None, trigger_type="router::ready"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return client.register_trigger(
            {"type": trigger_type, "function_id": function_id, "config": config or {}}
        )


def test_ready_fires_at_each_start(start, sdk, engine):
    client = sdk("listener")
    heard = threading.Semaphore(0)
    client.register_function("test::heard", lambda data: heard.release())
    bind(client, "test::heard")
    assert engine.wait_until(lambda: engine.triggers())
    router = start()
    assert heard.acquire(timeout=EVENTUALLY)
    router.restart()
    assert heard.acquire(timeout=EVENTUALLY)


def test_ready_takes_no_configuration(start, sdk, engine, caplog):
    start()
    client = sdk("listener")
    with caplog.at_level(logging.ERROR, "iii.iii"):
        bind(client, "test::heard", {"x": 1})
        bind(client, "test::heard", trigger_type="test::unknown")
        assert engine.wait_until(lambda: "Trigger registration failed" in caplog.text)
    assert "unknown configuration" in caplog.text


def test_live_providers_are_found_at_boot(start, provide):
    provider = provide([DONE], register=False)
    start()
    assert provider.wait(lambda: len(provider.nudges) == 1)


def test_providers_that_appear_are_found(start, provide, engine):
    router = start()
    known = provide([DONE])
    before = len(known.nudges)
    late = provide([DONE], provider_id="late", register=False)
    assert late.wait(lambda: late.nudges)
    late.register()
    assert router.wait_for_provider("late")
    assert len(known.nudges) <= max(before, 1)


def test_changes_are_announced(start, sdk, provide, engine):
    start()
    client = sdk("listener")
    got = []
    changed = threading.Condition()

    def note(data):
        with changed:
            data.pop("_caller_worker_id", None)
            got.append(data)
            changed.notify_all()

    client.register_function("test::note", note)
    bind(client, "test::note", trigger_type="router::provider::changed")
    bind(client, "test::note", trigger_type="router::models::changed")
    assert engine.wait_until(lambda: sum(engine.triggers().values()) == 3)
    call(client, "router::models::list", {})  # the router knows of the bindings by now
    provide([DONE])
    with changed:
        assert changed.wait_for(lambda: len(got) == 2, EVENTUALLY)
    assert {"provider": "fake", "op": "register"} in got
    assert {"provider": "fake", "count": 1} in got


def test_configuration_changes_nudge(start, provide):
    router = start()
    provider = provide([DONE], register=False)
    router.set_config("fake", api_url="http://early")
    provider.register(supports_model_listing=True)
    assert provider.wait(lambda: True)
    nudges = len(provider.nudges)
    router.set_config("fake", api_url="http://a")
    router.set_config("fake", api_url="http://a")
    assert provider.wait(lambda: len(provider.refreshes) == 1)
    assert len(provider.nudges) == nudges
    router.set_config("fake", api_key="k")
    assert provider.wait(lambda: len(provider.nudges) > nudges)
    assert provider.wait(lambda: len(provider.refreshes) == 2)
    answer = router.registry.resolve({"id": "fake", "token": provider.token})
    assert (answer["api_url"], answer["credential"]) == ("http://a", KEY)
    router.set_config("fake", api_key=None)
    answer = router.registry.resolve({"id": "fake", "token": provider.token})
    assert answer["source"] == "none"


def test_configuration_without_listing(start, provide):
    router, provider = start(), provide([DONE])
    router.set_config("fake", api_key="k")
    assert provider.wait(lambda: provider.nudges)
    assert provider.refreshes == []


# --- chat --------------------------------------------------------------------------------------


def test_chat_relays_word_for_word(start, provide, sdk):
    router = start()
    frames = [START, TEXT, PING, HEL, LO, {"type": "usage", "usage": {"input": 1}}]
    frames += [{"type": "stop", "stop_reason": "end"}, DONE]
    provide(frames)
    answer, got = chat(sdk("caller"))
    assert got == frames
    assert answer == {
        "ok": True,
        "provider": "fake",
        "model": "m",
        "stop_reason": "end",
        "usage": {"input": 1},
    }
    assert router.running == []


def test_what_the_provider_gets(start, provide, sdk):
    router, provider = start(), provide([DONE])
    sent = {
        "messages": [{"role": "user", "content": []}],
        "session_id": "s",
        "system_prompt": "p",
        "tools": [],
        "response_format": {"type": "json"},
        "thinking_level": "low",
    }
    chat(
        sdk("caller"),
        {
            **sent,
            "model": "fake::m",
            "request_id": "r",
            "cache_intent": None,
            "max_output_tokens": 9,
            "provider_options": {"fake": {"top_k": 1}, "other": {"top_k": 2}},
        },
    )
    (got,) = provider.streams
    writer = got.pop("writer_ref")
    assert writer is not None
    got.pop("_caller_worker_id")
    assert got == {
        **sent,
        "model": "m",
        "resolution_key": "r",
        "max_output_tokens": 9,
        "provider_options": {"top_k": 1},
        "model_meta": router.registry.models()[0],
    }


def test_garbage_is_skipped_in_silence(start, provide, sdk):
    router = start()
    provide([START, "no json", "[]", {"type": "new"}, {"type": "start"}, b"bytes", DONE])
    _, got = chat(sdk("caller"))
    assert got == [START, DONE]
    assert len(router.skipped) == 5


@pytest.mark.parametrize("kind", ["transient", "rate_limited"])
def test_early_failures_are_retried(start, provide, sdk, kind):
    start()
    provider = provide([failure(kind)], [PING, failure(kind)], [START, DONE])
    answer, got = chat(sdk("caller"))
    assert answer["ok"] is True
    assert got == [PING, START, DONE]
    keys = {each["resolution_key"] for each in provider.streams}
    assert (len(provider.streams), len(keys)) == (3, 1)


def test_retries_end(start, provide, sdk):
    start()
    provider = provide([failure("transient")])
    answer, got = chat(sdk("caller"))
    assert got == [failure("transient")]
    assert len(provider.streams) == 3
    assert answer["ok"] is False
    assert answer["error"] == {
        "code": "router/provider_transient",
        "message": "no",
        "kind": "transient",
        "retryable": True,
    }


@pytest.mark.parametrize(
    "kind, code",
    [
        ("permanent", "router/provider_rejected"),
        ("auth_expired", "router/provider_auth_expired"),
        ("context_overflow", "router/context_overflow"),
        ("surprising", "router/provider_rejected"),
    ],
)
def test_other_failures_are_not_retried(start, provide, sdk, kind, code):
    start()
    provider = provide([failure(kind)])
    answer, got = chat(sdk("caller"))
    assert answer["error"]["code"] == code
    assert got == [failure(kind)]
    assert len(provider.streams) == 1


def test_after_content_nothing_is_retried(start, provide, sdk):
    start()
    provider = provide([START, failure("transient")])
    answer, got = chat(sdk("caller"))
    assert got == [START, failure("transient")]
    assert answer["error"]["kind"] == "transient"
    assert len(provider.streams) == 1


def test_a_silent_end_is_retried(start, provide, sdk):
    start()
    provide([PING], [ValueError("broken")], [DONE])
    answer, got = chat(sdk("caller"))
    assert got == [PING, DONE]
    assert answer["ok"] is True


def test_a_stream_that_breaks_off(start, provide, sdk):
    start()
    provide([START, TEXT, HEL, LO])
    answer, got = chat(sdk("caller"))
    assert answer["error"]["code"] == "router/stream_incomplete"
    last = got[-1]["error"]
    assert last["content"] == [{"type": "text", "text": "hello"}]
    assert (last["stop_reason"], last["error_kind"]) == ("error", "transient")


def test_a_provider_that_dies(start, provide, sdk, engine):
    start(RelaySettings(retry_max=0))
    provide([START, threading.Event()])

    def die(frame):
        assert frame["type"] in ("start", "error")
        if frame["type"] == "start":
            # As the end of its process would: the bus socket and that of the channel.
            engine.drop_worker("provider-fake")
            writers = [end for end in engine._serving.connections() if end.relay is not None]
            (streaming,) = [end for end in writers if end.channel.id == provider_end(engine)]
            streaming.cut()

    answer, got = chat(sdk("caller"), on_frame=die)
    assert answer["error"]["code"] == "router/stream_incomplete"
    assert "invocation_stopped" in answer["error"]["message"]
    assert [frame["type"] for frame in got] == ["start", "error"]


def provider_end(engine):
    """The id of the channel that the router reads: the youngest."""
    return list(engine._hub.channels._channels)[-1]


def test_a_provider_that_does_not_return(start, bare, sdk, made):
    start(RelaySettings(retry_max=0))
    hold = threading.Event()

    def stream(data):
        with worker.open_channel(data["writer_ref"], "write"):
            pass
        hold.wait(EVENTUALLY)
        return {"ok": True}

    worker = bare("provider-fake", stream=stream)
    made.callback(hold.set)
    worker.invoke("router::provider::register", {"id": "fake"})
    answer, _ = chat(sdk("caller"), {"provider": "fake"})
    assert "no reason given" in answer["error"]["message"]


class Stub:
    """Stands for the client and for the reader of one attempt."""

    def __init__(self):
        self.chat = None
        self.calls = []

    def invoke(self, function_id, data):
        return {"reader": {}, "writer": {}}

    def open_channel(self, ref, direction):
        return self

    def begin(self, function_id, data):
        self.calls.append(function_id)
        future = Future()
        future.set_result(None)
        return future

    def __enter__(self):
        self.chat.abort()
        return self

    def __exit__(self, *exc):
        pass


def test_abort_while_the_channel_opens():
    stub, sent = Stub(), []
    stub.chat = Chat(
        stub,
        "fake",
        {"model": "m", "resolution_key": "r"},
        settings=QUICK,
        slots=Slots(1),
        sink=sent.append,
        on_skipped=sent.append,
        on_available=lambda provider, available: None,
    )
    assert stub.chat.run()["stop_reason"] == "aborted"
    assert [json.loads(text)["type"] for text in sent] == ["done"]
    assert stub.calls == ["provider::fake::abort"]


def test_a_provider_that_is_not_there(start, sdk):
    router, client = start(), sdk("provider-fake")
    call(client, "router::provider::register", {"id": "fake"})
    assert router.wait_for_provider("fake")
    answer, got = chat(sdk("caller"), {"provider": "fake"})
    assert answer["error"]["code"] == "router/provider_unavailable"
    assert [frame["type"] for frame in got] == ["error"]
    assert not router.registry.records["fake"].available


@pytest.fixture
def bare(made, engine):
    """Make a worker that can fail with codes of its own."""

    def make(name, **functions):
        worker = BusClient(engine.url, name)
        for suffix, handler in functions.items():
            worker.serve(f"provider::fake::{suffix}", handler, "test")
        worker.start()
        made.callback(worker.stop)
        for suffix in functions:
            assert engine.wait_for_function(f"provider::fake::{suffix}")
        return worker

    return make


def refusing(code):
    def handler(data):
        raise BusError(code, "the reason")

    return handler


@pytest.mark.parametrize("code", ["provider/invalid_request", "router/unknown_provider"])
def test_refusals_end_the_chat(start, bare, sdk, code):
    start()
    worker = bare("provider-fake", stream=refusing(code))
    worker.invoke("router::provider::register", {"id": "fake"})
    answer, got = chat(sdk("caller"), {"provider": "fake"})
    assert answer["error"] == {"code": "router/provider_rejected", "message": "the reason"}
    assert len(got) == 1


def test_idle_before_content_is_reset_by_pings(start, provide, sdk):
    start(RelaySettings(idle_timeout=0.4))
    provide([0.25, PING, 0.25, PING, 0.25, DONE])
    answer, _ = chat(sdk("caller"))
    assert answer["ok"] is True


def test_idle_after_content_is_not(start, provide, sdk):
    start(RelaySettings(idle_timeout=0.4))
    provide([START, *[0.2, PING] * 10, DONE])
    answer, got = chat(sdk("caller"))
    assert answer["error"]["code"] == "router/stream_idle_timeout"
    assert got[-1]["type"] == "error"


def test_a_stream_may_not_take_for_ever(start, provide, sdk):
    start(RelaySettings(stream_timeout=0.4))
    provide([START, TEXT, *[0.1, HEL] * 10, DONE])
    answer, _ = chat(sdk("caller"))
    assert answer["error"] == {
        "code": "router/stream_incomplete",
        "message": "the stream took too long",
    }


def test_abort(start, provide, sdk):
    start()
    hold = threading.Event()
    provider = provide([START, TEXT, HEL, hold])
    caller = sdk("caller")
    other = sdk("other")
    assert call(other, "router::abort", {"request_id": "r"}) == {"ok": True, "aborted": False}

    aborting = threading.Thread(target=call, args=(other, "router::abort", {"request_id": "r"}))

    def abort(frame):
        if frame["type"] == "text_delta":
            aborting.start()

    answer, got = chat(caller, {"request_id": "r"}, abort)
    aborting.join()
    hold.set()
    assert (answer["ok"], answer["stop_reason"]) == (True, "aborted")
    assert got[-1]["type"] == "done"
    assert got[-1]["message"]["content"] == [{"type": "text", "text": "hel"}]
    assert provider.wait(lambda: [a["request_id"] for a in provider.aborts] == ["r"])


def test_abort_between_attempts(start, provide, sdk):
    start(RelaySettings(retry_delay=60.0))
    provider = provide([failure("transient")])
    other = sdk("other")

    def abort():
        assert provider.wait(lambda: provider.streams and not provider.running)
        call(other, "router::abort", {"request_id": "r"})

    thread = threading.Thread(target=abort)
    thread.start()
    answer, got = chat(sdk("caller"), {"request_id": "r"})
    thread.join(EVENTUALLY)
    assert answer["stop_reason"] == "aborted"
    assert [frame["type"] for frame in got] == ["done"]


def test_one_request_at_a_time(start, provide, sdk):
    start()
    hold = threading.Event()
    provide([START, hold, DONE])
    other, seen = sdk("other"), []

    def again(frame):
        if frame["type"] == "start":
            payload = {"model": "m", "messages": [], "request_id": "r"}

            def run():
                seen.append(code_of(other, "router::complete", payload))
                hold.set()

            threading.Thread(target=run).start()

    answer, _ = chat(sdk("caller"), {"request_id": "r"}, again)
    assert answer["ok"] is True
    assert seen == ["router/request_in_progress"]


def test_capacity(start, provide, sdk):
    router = start(RelaySettings(capacity=1))
    hold = threading.Event()
    provide([START, hold, DONE])
    other, seen = sdk("other"), []

    def more(frame):
        if frame["type"] == "start":

            def run():
                seen.append(router.provider_calls)
                seen.append(code_of(other, "router::complete", {"model": "m", "messages": []}))
                hold.set()

            threading.Thread(target=run).start()

    answer, _ = chat(sdk("caller"), on_frame=more)
    assert answer["ok"] is True
    assert seen == [1, "router/capacity_exceeded"]


def test_a_caller_that_left(start, provide, engine, made):
    router = start()
    provide([START, TEXT, *[0.01, HEL] * 500, DONE])
    caller = BusClient(engine.url, "caller")
    caller.start()
    made.callback(caller.stop)
    assert engine.wait_until(lambda: any(p.name == "caller" for p in engine.connections))
    refs = caller.invoke("engine::channels::create", {})
    answer = caller.begin(
        "router::chat", {"model": "m", "messages": [], "writer_ref": refs["writer"]}
    )
    with caller.open_channel(refs["reader"], "read") as reader:
        assert json.loads(reader.recv(EVENTUALLY)) == START
        cut_off(reader.socket)
    assert answer.result(EVENTUALLY)["error"]["message"] == "the caller left the channel"
    assert router.running == []


@pytest.mark.parametrize("ref", [None, {"channel_id": "none", "access_key": "none"}])
def test_chat_needs_a_channel(start, provide, sdk, ref):
    router = start()
    provide([DONE])
    payload = {"model": "m", "messages": [], "writer_ref": ref}
    # The SDK would turn a whole reference into a writer; this one lacks its direction.
    code = code_of(sdk("caller"), "router::chat", payload)
    assert code == ("router/invalid_request" if ref is None else "channel_unavailable")
    assert router.running == []


def test_complete(start, provide, sdk):
    start()
    provide([START, TEXT, HEL, LO, DONE])
    answer = call(sdk("caller"), "router::complete", {"model": "m", "messages": []})
    assert answer["message"] == DONE["message"]
    assert answer["ok"] is True


def test_complete_needs_messages(start, provide, sdk):
    start()
    provide([DONE])
    assert code_of(sdk("caller"), "router::complete", {"model": "m"}) == "router/invalid_request"


def test_an_old_router_needs_fat_deltas(start, provide, sdk):
    start(RelaySettings(fat_only=True))
    fat = {**LO, "partial": snapshot("hello")}
    provide([START, HEL, fat, DONE])
    _, got = chat(sdk("caller"))
    assert got == [START, fat, DONE]


def test_a_setup_that_fails(start, provide, sdk, monkeypatch):
    router = start()
    provide([DONE])
    caller = sdk("caller")

    def fail(*args):
        raise BusError("channel_unavailable", "no")

    monkeypatch.setattr(router._client, "open_channel", fail)
    answer = call(caller, "router::complete", {"model": "m", "messages": []})
    assert answer["error"]["code"] == "router/stream_setup_failed"
    assert router.provider_calls == 0


# --- routing -----------------------------------------------------------------------------------


@pytest.fixture
def registry():
    registry = Registry({})
    for provider, wishes in (("a", ["m2"]), ("b", [])):
        registry.register({"id": provider, "token": "t", "default_models": wishes})
    return registry


def offer(registry, provider, *models):
    rows = [
        {"id": m, "provider": provider, "context_window": 4096, "max_output_tokens": 2048}
        for m in models
    ]
    registry.reconcile({"provider": provider, "token": "t", "models": rows})


@pytest.mark.parametrize(
    "provider, model, expected",
    [
        (None, "m1", ("a", "m1")),
        (None, "b::m3", ("b", "m3")),
        (None, "c::m4", ("b", "c::m4")),
        ("b", "unlisted", ("b", "unlisted")),
        ("b", None, ("b", "m3")),
        (None, None, ("a", "m2")),
        ("c", "m1", "router/unknown_provider"),
        (None, "both", "router/ambiguous_model"),
        ("b", "both", ("b", "both")),
        (None, "unlisted", "router/no_provider_for_model"),
    ],
)
def test_routing(registry, provider, model, expected):
    offer(registry, "a", "m1", "m2", "both")
    offer(registry, "b", "m3", "c::m4", "both")
    if isinstance(expected, str):
        with pytest.raises(BusError) as lost:
            registry.route(provider, model)
        assert lost.value.code == expected
    else:
        record, _, name = registry.route(provider, model)
        assert (record.id, name) == expected


def test_routing_with_an_empty_catalog(registry):
    with pytest.raises(BusError):
        registry.route("a", None)


@pytest.mark.parametrize(
    "wanted, configured, ceiling, defaults, expected",
    [
        (100, 200, 2048, None, 100),
        (None, 200, 2048, None, 200),
        (9000, None, 2048, None, 2048),
        (9000, None, None, None, 9000),
        (True, None, None, {"max_tokens": 7}, 7),
        (None, None, None, None, 8192),
        (None, None, 2048, None, 2048),
        (None, None, 99_000, None, 32_000),
    ],
)
def test_output_budget(registry, wanted, configured, ceiling, defaults, expected):
    record = registry.records["a"]
    record.declaration["defaults"] = defaults
    registry.config["a"] = {} if configured is None else {"max_tokens": configured}
    row = None if ceiling is None else {"max_output_tokens": ceiling}
    assert registry.output_budget(record, row, wanted) == expected


def test_availability_of_strangers(registry):
    assert not registry.set_available("none", True)
    assert not registry.set_available("a", True)
    assert registry.set_available("a", False)


def test_availability_is_announced(start, provide, sdk):
    router = start()
    provide([DONE])
    router.registry.set_available("fake", False)
    chat(sdk("caller"))
    assert router.wait_for_provider("fake", timeout=0.01)


# --- embeddings and counts ---------------------------------------------------------------------


def test_embed(start, bare, sdk):
    start()
    caller = sdk("caller")
    assert code_of(caller, "router::embed", {"input": ["a"]}) == "router/provider_unavailable"
    got = []

    def embed(data):
        got.append(data)
        return {"model": "m", "embeddings": [[1.0]]}

    worker = bare("provider-fake", embed=embed)
    for provider in ("fake", "another"):
        worker.invoke("router::provider::register", {"id": provider})
    answer = call(caller, "router::embed", {"input": ["a"]})
    assert answer == {"model": "m", "embeddings": [[1.0]]}
    del got[0]["_caller_worker_id"]
    assert got == [{"model": None, "input": ["a"]}]
    assert code_of(caller, "router::embed", {"input": ["a"], "provider": "another"}) == (
        "function_not_found"
    )
    assert code_of(caller, "router::embed", {}) == "router/invalid_request"


def test_embed_failures_are_passed_on(start, bare, sdk):
    start()
    worker = bare("provider-fake", embed=refusing("invocation_failed"))
    for provider in ("fake", "zero"):
        worker.invoke("router::provider::register", {"id": provider})
    assert code_of(sdk("caller"), "router::embed", {"input": ["a"]}) == "invocation_failed"


def test_count_tokens(start, bare, sdk, engine):
    start()
    caller = sdk("caller")
    got = []

    def count(data):
        got.append(data)
        return {"model": "m", "tokens": 3, "estimator": "metered"}

    worker = bare("provider-fake", count_tokens=count)
    worker.invoke("router::provider::register", {"id": "fake"})
    payload = {"provider": "fake", "model": "m", "messages": [{}]}
    assert call(caller, "router::count_tokens", payload)["tokens"] == 3
    del got[0]["_caller_worker_id"]
    assert got == [{"model": "m", "messages": [{}], "system_prompt": None, "tools": None}]


@pytest.mark.parametrize(
    "code, seen",
    [("function_not_found", "router/no_token_counter"), ("invocation_failed", "invocation_failed")],
)
def test_count_tokens_failures(start, bare, sdk, code, seen):
    start()
    worker = bare("provider-fake", count_tokens=refusing(code))
    worker.invoke("router::provider::register", {"id": "fake"})
    payload = {"provider": "fake", "model": "m", "messages": [{}]}
    assert code_of(sdk("caller"), "router::count_tokens", payload) == seen


# --- life --------------------------------------------------------------------------------------


def test_the_router_comes_back_to_its_engine(start, engine, provide, sdk):
    router = start()
    provide([DONE])
    engine.stop()
    engine.start()
    assert engine.wait_for_function("router::chat")
    assert engine.wait_for_function("provider::fake::stream")
    assert engine.call("router::complete", {"model": "m", "messages": []})["ok"] is True
    assert router.registry.records["fake"].available


def test_a_router_without_an_engine(made):
    engine = LoopbackEngine().start()
    engine.stop()
    router = LoopbackRouter(engine.url)
    router.start(timeout=0.2)
    made.callback(router.stop)
    made.callback(engine.stop)
    assert not router._client.connected
    router.forget("nobody")
    engine.start()
    assert engine.wait_for_function("router::chat")


def test_stop_ends_what_runs(engine, provide, sdk):
    router = LoopbackRouter(engine.url, environ={}, refresh_delay=60.0).start()
    hold = threading.Event()
    provider = provide([START, hold])
    provider.register(supports_model_listing=True)
    router.set_config("fake", api_url="http://a")
    caller = sdk("caller")

    def stop(frame):
        if frame["type"] == "start":
            threading.Thread(target=lambda: (router.stop(), hold.set())).start()

    with contextlib.suppress(InvocationError):
        chat(caller, on_frame=stop)
    assert hold.wait(EVENTUALLY)
    assert router.running == []


def test_stop_cuts_a_caller_that_does_not_read(engine, provide, made):
    router = LoopbackRouter(engine.url, environ={}).start()
    made.callback(router.stop)
    big = {"type": "text_delta", "delta": "x" * 60_000}
    provide([START, TEXT, *[big] * 2000, DONE])
    caller = BusClient(engine.url, "caller")
    caller.start()
    made.callback(caller.stop)
    assert engine.wait_until(lambda: any(p.name == "caller" for p in engine.connections))
    refs = caller.invoke("engine::channels::create", {"buffer_size": 1})
    caller.begin("router::chat", {"model": "m", "messages": [], "writer_ref": refs["writer"]})
    deadline, stuck = time.monotonic() + EVENTUALLY, 0
    while stuck < 20 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
        (writer,) = router._writers or [None]
        # A send that does not come back holds the connection's lock.
        stuck = stuck + 1 if writer is not None and writer.protocol_mutex.locked() else 0
    assert stuck == 20
    router.stop()
    assert router.running == []


def test_rediscovery_without_an_engine(caplog):
    router = LoopbackRouter("ws://127.0.0.1:1", environ={}, rediscovery_delay=0.0)
    with caplog.at_level(logging.DEBUG, "provider_llamacpp"):
        router._functions_available({})
        router._timers["discover"].join(EVENTUALLY)
        router._connected()
    assert "could not look for providers" in caplog.text
    assert "could not announce the router" in caplog.text


def test_news_without_an_engine():
    router = LoopbackRouter("ws://127.0.0.1:1", environ={})
    router._client._types["router::provider::changed"].bindings["t"] = {"function_id": "f"}
    assert router._register({"id": "a", "token": "t"})["ok"] is True


# --- frames ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        START,
        TEXT,
        HEL,
        PING,
        DONE,
        failure("permanent"),
        {"type": "functioncall_delta", "delta": "{", "id": "c"},
        {**HEL, "partial": snapshot("hel")},
        {"type": "usage", "usage": {}},
        {"type": "stop", "stop_reason": "length"},
        {"type": "functioncall_end", "partial": snapshot()},
    ],
)
def test_frames_that_are_read(frame):
    assert read_frame(json.dumps(frame)) == frame


@pytest.mark.parametrize(
    "frame",
    [
        b"{}",
        "{",
        "[]",
        "{}",
        '{"type":["start"]}',
        json.dumps({"type": "usage"}),
        json.dumps({"type": "stop", "stop_reason": "tired"}),
        json.dumps({"type": "text_delta"}),
        json.dumps({**HEL, "partial": {}}),
        json.dumps({"type": "done", "message": {**snapshot(), "timestamp": True}}),
        json.dumps({"type": "done", "message": {**snapshot(), "role": "user"}}),
        json.dumps({"type": "done", "message": {**snapshot(), "stop_reason": "tired"}}),
        json.dumps({"type": "done", "partial": snapshot()}),
        *(
            json.dumps(
                {"type": "done", "message": {k: v for k, v in snapshot().items() if k != key}}
            )
            for key in snapshot()
        ),
    ],
)
def test_frames_that_are_not(frame):
    assert read_frame(frame) is None


def test_accumulator():
    seen = Accumulator("fake", "m")
    seen.add(PING)
    assert not seen.content
    for frame in (
        {"type": "thinking_delta", "delta": "hm"},
        HEL,
        LO,
        {"type": "functioncall_delta", "delta": "{"},
        {"type": "usage", "usage": {"input": 1}},
        {"type": "stop", "stop_reason": "end"},
    ):
        seen.add(frame)
    assert seen.content
    assert seen.message["content"] == [
        {"type": "thinking", "text": "hm"},
        {"type": "text", "text": "hello"},
    ]
    assert seen.usage == {"input": 1}
    seen.add(DONE)
    assert seen.message == DONE["message"]


# --- the router's own client -------------------------------------------------------------------


def test_client_without_a_connection(engine):
    client = BusClient(engine.url, "client")
    with pytest.raises(BusError) as lost:
        client.invoke("f", {})
    assert lost.value.code == "disconnected"
    with pytest.raises(BusError):
        client.void("f", {})
    client.stop()


class Dead:
    """A connection that ended unnoticed."""

    def send(self, text):
        raise ConnectionClosedError(None, None)


def test_client_whose_connection_ended_unnoticed(engine):
    client = BusClient(engine.url, "client")
    client._connection = Dead()
    with pytest.raises(BusError) as lost:
        client.void("f", {})
    assert lost.value.code == "disconnected"
    client._send = lambda frame: (client._fail_pending(), client._send_text(""))
    assert client.begin("f", {}).exception(0).code == "disconnected"


def test_client_calls(engine, bare, caplog):
    def broken(data):
        raise ValueError("broken")

    worker = bare("worker", echo=lambda data: data, broken=broken, odd=lambda data: {1j})
    assert worker.invoke("provider::fake::echo", "text") == {}
    assert worker.invoke("provider::fake::echo", {"a": 1})["a"] == 1
    with caplog.at_level(logging.CRITICAL), pytest.raises(BusError) as failed:
        worker.invoke("provider::fake::broken", {})
    assert (failed.value.code, failed.value.message) == (
        "invocation_failed",
        "handler error: broken",
    )
    with caplog.at_level(logging.CRITICAL), pytest.raises(BusError) as odd:
        worker.invoke("provider::fake::odd", {})
    assert odd.value.code == "invocation_failed"
    worker._functions.clear()
    with pytest.raises(BusError) as gone:
        worker.invoke("provider::fake::echo", {})
    assert gone.value.code == "function_not_found"


def test_client_timeouts_and_late_answers(engine, bare):
    hold = threading.Event()

    def slow(data):
        hold.wait(EVENTUALLY)
        return 1

    worker = bare("worker", slow=slow)
    with pytest.raises(BusError) as late:
        worker.invoke("provider::fake::slow", {}, timeout=0.05)
    assert late.value.code == "TIMEOUT"
    hold.set()
    assert worker.invoke("provider::fake::slow", {}) == 1


def is_back(engine, name, before):
    """Whether the worker is connected anew, with its functions."""
    return any(
        function.owner.name == name and function.owner.worker_id != before
        for function in engine._hub.functions.values()
    )


def test_calls_fail_when_the_connection_ends(engine, bare):
    hold = threading.Event()
    worker = bare("worker", slow=lambda data: hold.wait(EVENTUALLY))
    waiting = worker.begin("provider::fake::slow", {})
    (first,) = [peer.worker_id for peer in engine.connections]
    engine.drop_worker("worker")
    with pytest.raises(BusError) as lost:
        waiting.result(EVENTUALLY)
    assert lost.value.code == "disconnected"
    hold.set()
    assert engine.wait_until(lambda: is_back(engine, "worker", first))
    assert worker.invoke("provider::fake::slow", {}) is True
    hold.clear()
    waiting = worker.begin("provider::fake::slow", {})
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    with pytest.raises(BusError) as shut:
        waiting.result(EVENTUALLY)
    assert shut.value.code == "SHUTDOWN"
    hold.set()
    stopping.join(EVENTUALLY)


def test_client_with_a_wrong_token(made, caplog):
    engine = made.enter_context(LoopbackEngine(token="right"))
    client = BusClient(engine.url, "client", token="wrong")
    with caplog.at_level(logging.ERROR):
        client.start()
        deadline = time.monotonic() + EVENTUALLY
        while "AUTH_ERROR" not in caplog.text and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        client.stop()
    assert "AUTH_ERROR" in caplog.text
    assert "wrong" not in caplog.text.replace("missing or wrong", "")


def test_router_with_a_token_and_a_query(made):
    engine = made.enter_context(LoopbackEngine(token="right"))
    made.enter_context(LoopbackRouter(engine.url, token="right"))
    assert engine.wait_for_function("router::chat")
    client = BusClient(f"{engine.url}/?token=right", "client")
    client.start()
    made.callback(client.stop)
    assert engine.wait_until(lambda: any(p.name == "client" for p in engine.connections))
    refs = client.invoke("engine::channels::create", {})
    with client.open_channel(refs["writer"], "write") as writer:
        writer.send("x")
    with client.open_channel(refs["reader"], "read") as reader:
        assert reader.recv(EVENTUALLY) == "x"


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "registrationrejected", "code": "x"},
        {"type": "unregistertrigger", "id": "t", "trigger_type": "none"},
        {"type": "invocationresult", "invocation_id": "late"},
        {"type": "news"},
    ],
)
def test_client_survives_any_frame(engine, frame):
    BusClient(engine.url, "client")._handle(frame)


def test_unbinding(start, sdk, engine):
    router, client = start(), sdk("listener")
    client.register_function("test::heard", lambda data: None)
    trigger = bind(client, "test::heard")
    ready = router._client._types["router::ready"]
    assert engine.wait_until(lambda: "test::heard" in engine.functions())
    call(client, "router::models::list", {})
    assert engine.wait_until(lambda: len(ready.bindings) == 1)
    trigger.unregister()
    assert engine.wait_until(lambda: len(engine.triggers()) == 1)
    call(client, "router::models::list", {})
    assert ready.bindings == {}
