"""The life of the worker on the bus, with the official ``iii-sdk`` as router and caller.

Against the loopback engine as engines of 0.21, 0.23 and 0.25 behave, and a real llama-server.
"""

# ruff: noqa: F811 (fixtures are imported and then named as arguments)

from __future__ import annotations

import logging

import pytest
from iii import InvocationError
from peers import free_port
from sdk import Client, Router, Store, Stream
from world import FUNCTIONS, STATE, ask, new_world, running, settled, wait_idle, world  # noqa: F401

from provider_llamacpp.errors import FatalError
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.model import SENTENCE

pytestmark = pytest.mark.timeout(120)


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
    def listed(**more):
        wanted = {"prefix": "provider::llamacpp::", **more}
        rows = running.caller.call("engine::functions::list", wanted)["functions"]
        return {row["function_id"].rpartition("::")[2] for row in rows}

    assert listed(include_internal=True) >= set(FUNCTIONS)
    # What is plumbing of the router is not offered to agents (provider protocol 1).
    assert listed() & set(FUNCTIONS) == {"refresh_models", "stream"}
    for name in FUNCTIONS:
        info = running.caller.call(
            "engine::functions::info", {"function_id": f"provider::llamacpp::{name}"}
        )
        assert info["request_format"]["$schema"] == "http://json-schema.org/draft-07/schema#"
        assert info["response_format"]["type"] == "object"


def test_a_namespace_of_its_own(new_world, llama):
    world = new_world(namespace="lab")
    world.store.config["api_url"] = llama.url
    router = world.router()
    world.worker()
    assert router.wait_for_calls("models::reconcile")
    if world.engine.profile.namespaces:
        world.declared()
        assert world.engine.functions().keys() & {"provider::llamacpp::stream"} == set()
        assert router.wait(lambda: router.bindings() != {})
    assert settled(world.stream())["content"] == [{"type": "text", "text": SENTENCE}]
    # The state lives in ``default``, whoever asks.
    assert world.engine.call("state::get", STATE) is not None


def test_an_engine_that_asks_for_a_token(new_world, llama, monkeypatch, caplog):
    monkeypatch.setenv("III_TOKEN", "let-me-in")
    world = new_world(token="let-me-in")
    world.store.config["api_url"] = llama.url
    router = world.router()
    world.worker(token="let-me-in")
    assert router.wait_for_calls("models::reconcile")
    assert settled(world.stream())["content"] == [{"type": "text", "text": SENTENCE}]
    assert not any(
        "let-me-in" in record.getMessage()
        for record in caplog.records
        if record.name.startswith("provider_llamacpp")
    )


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


@pytest.mark.parametrize("what", ["stream", "refresh"])
def test_a_router_that_loses_its_record_meanwhile_is_told_again(running, what):
    router, token = running.live_router, running.token()
    declared = len(router.calls["provider::register"])
    router.known.clear()
    if what == "stream":
        (served,) = running.live_worker._served
        served.provider.router.forget(token=False)  # as after half a minute
        assert settled(running.stream())["error_kind"] == "transient"
    else:
        with pytest.raises(InvocationError, match="no provider"):
            running.call("refresh_models")
    assert router.wait_for_calls("provider::register", declared + 1)
    assert router.calls["provider::register"][declared]["token"] == token
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


def test_an_engine_that_starts_after_the_worker(world, llama):
    world.store.config["api_url"] = llama.url
    port = free_port()
    with LoopbackEngine(port=port, profile=world.engine.profile.name) as first:
        url = first.url
    worker = world.worker(url=url)
    assert not worker.wait_connected(0.3)
    with LoopbackEngine(port=port, profile=world.engine.profile.name) as engine:
        with Router(url, world.store) as router:
            assert router.wait_for_calls("models::reconcile", 1, 30)
            assert engine.wait_for_function("provider::llamacpp::stream")
        worker.stop(0.0)
        assert list(engine.dropped) == []


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
