"""A server that serves many models: what the router is told of them, and when.

The tests with ``router_server`` run against the llama-server program in router mode, with two tiny
chat models, an embedding model and a damaged file in its directory.
"""

from __future__ import annotations

import os
import threading

import pytest
import requests
from peers import PATIENCE, ScriptedServer, answer_json, wait_for
from recorded import recorded
from router_mode import (
    Events,
    a_router_server,
    children,
    front,
    front_of,
    loading,
    names,
    post,
    router_server,
    rows,
    sse,
    states,
    user,
)
from scripted_llama import answers_after, row

from provider_llamacpp.server.follower import Follower
from provider_llamacpp.server.modelevents import ModelEvent, Progress, read_event
from provider_llamacpp.server.upstream import Target, Upstream

__all__ = ["front", "router_server"]
"""Fixtures."""


# -- events -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "event", "changes"),
    [
        (
            sse("m", "model_status", {"status": "loading"}),
            ModelEvent("m", "status", "loading", Progress("loading")),
            True,
        ),
        (
            sse("m", "status_change", loading(0.5)),
            ModelEvent("m", "status", "loading", Progress("loading", 0.5, "text_model")),
            False,
        ),
        (
            sse("m", "status_change", loading(0.5, ("text_model", "mmproj"), "mmproj")),
            ModelEvent("m", "status", "loading", Progress("loading", 0.75, "mmproj")),
            False,
        ),
        (
            sse("m", "status_change", loading(1.0, ("a",), "of no list")),
            ModelEvent("m", "status", "loading", Progress("loading", 1.0, "of no list")),
            False,
        ),
        (
            sse("m", "status_change", loading(7)),
            ModelEvent("m", "status", "loading", Progress("loading", None, "text_model")),
            True,
        ),
        (
            sse("m", "status_change", loading(True)),
            ModelEvent("m", "status", "loading", Progress("loading", None, "text_model")),
            True,
        ),
        (
            sse("m", "status_change", {"status": "loaded", "info": {"id": "m"}}),
            ModelEvent("m", "status", "loaded"),
            True,
        ),
        (
            sse("m", "status_change", {"status": "unloaded", "exit_code": 1}),
            ModelEvent("m", "status", "unloaded", exit_code=1),
            True,
        ),
        (
            sse("m", "status_change", {"status": ["odd"], "exit_code": True}),
            ModelEvent("m", "status"),
            True,
        ),
        (
            sse("m", "model_status", {"status": "downloading"}),
            ModelEvent("m", "status", "downloading", Progress("downloading")),
            True,
        ),
        (
            sse("m", "download_progress", {"progress": {"u": {"done": 25, "total": 100}}}),
            ModelEvent(
                "m", "download", "downloading", Progress("downloading", 0.25, None, 25, 100)
            ),
            False,
        ),
        (
            sse(
                "m",
                "download_progress",
                {"progress": {"a": {"done": 20, "total": 30}, "b": {"done": 5, "total": 20}}},
            ),
            ModelEvent("m", "download", "downloading", Progress("downloading", 0.5, None, 25, 50)),
            False,
        ),
        (
            sse("m", "download_progress", {"progress": {"a": {"done": -1, "total": "x"}, "b": 1}}),
            ModelEvent("m", "download", "downloading", Progress("downloading", None, None, 0)),
            False,
        ),
        (sse("m", "download_finished"), ModelEvent("m", "finished"), True),
        (sse("m", "download_failed"), ModelEvent("m", "failed"), True),
        (sse("m", "model_remove"), ModelEvent("m", "removed"), True),
        (sse("*", "models_reload"), ModelEvent("*", "reloaded"), True),
    ],
)
def test_events_are_read(data, event, changes):
    assert read_event(data) == event
    assert event.changes is changes


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"no json", b"[]", b'"text"', b"null", b"{}"),
        *(sse("m", "a new one"), sse(7, "model_remove"), sse("m", ["model_remove"])),
    ],
)
def test_what_is_no_event_of_ours_is_left_alone(data):
    assert read_event(data) is None


# -- the follower -----------------------------------------------------------------------------


class Told:
    """Counts, and can be awaited."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def follower(told):
    found = Follower(Upstream(), name="test-events", changed=told)
    yield found
    found.stop(PATIENCE)
    assert [each for each in threading.enumerate() if each.name == "test-events"] == []


def test_the_follower_tells_of_changes_and_knows_the_progress(follower, told):
    heard = []
    with a_router_server() as server:
        assert follower.follows is False
        follower.offer(Target(server.url), "b1")
        assert follower.follows is True
        wait_for(lambda: server.events.open == 1)
        # One look once the connection stands: what happened before it is not repeated.
        wait_for(lambda: told.count == 1)
        follower.hear(heard.append)
        server.events.send(sse("m", "model_status", {"status": "loading"}))
        wait_for(lambda: told.count == 2)
        server.events.send(sse("m", "status_change", loading(0.5)))
        wait_for(lambda: follower.progress("m") == Progress("loading", 0.5, "text_model"))
        assert told.count == 2
        server.events.send(b"nonsense", sse("m", "status_change", {"status": "loaded"}))
        wait_for(lambda: told.count == 3)
        assert follower.progress("m") is None
        assert [event.status for event in heard] == ["loading", "loading", "loaded"]
        follower.leave(heard.append)
        follower.offer(Target(server.url), "b1")
        follower.offer(Target(server.url), "b2")
        assert server.events.open == 1


def test_a_lost_connection_is_taken_up_again(follower, told, monkeypatch):
    monkeypatch.setattr("provider_llamacpp.server.follower.FIRST_PAUSE", 0.01)
    with a_router_server() as server:
        follower.offer(Target(server.url))
        server.events.send(sse("m", "status_change", loading(0.5)))
        wait_for(lambda: follower.progress("m") is not None)
        before = told.count
        server.events.drop()
        wait_for(lambda: server.events.open == 2)
        # The loss is a reason to look, and so is the new connection.
        wait_for(lambda: told.count == before + 2)
        assert follower.progress("m") is None


def test_a_server_that_is_away_is_tried_with_longer_and_longer_pauses(follower, told, monkeypatch):
    monkeypatch.setattr("provider_llamacpp.server.follower.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("provider_llamacpp.server.follower.LONGEST_PAUSE", 0.02)
    with a_router_server() as server:
        port = server.port
    follower.offer(Target(f"http://127.0.0.1:{port}"))
    events = Events()
    with ScriptedServer(routes={"/models/sse": events.answer}, port=port):
        wait_for(lambda: events.open == 1)
        wait_for(lambda: told.count == 1)


@pytest.mark.parametrize("status", [401, 404, 501])
def test_a_server_without_events_is_asked_once(follower, told, status):
    refusal = answer_json({"error": {"code": status, "message": "File Not Found"}}, status)
    with ScriptedServer(refusal) as server:
        follower.offer(Target(server.url), "b1")
        wait_for(lambda: not follower.follows)
        follower.offer(Target(server.url), "b1")
        assert follower.follows is False
        assert len(server.requests) == 1
        # A newer build may have them, and another key may be let in.
        follower.offer(Target(server.url), "b2")
        wait_for(lambda: len(server.requests) == 2 and not follower.follows)
        follower.offer(Target(server.url, "k"), "b2")
        wait_for(lambda: len(server.requests) == 3 and not follower.follows)
        follower.offer(None)
        assert follower.follows is False


def test_another_server_is_followed_at_once(follower):
    with a_router_server() as first, a_router_server() as second:
        follower.offer(Target(first.url))
        wait_for(lambda: first.events.open == 1)
        follower.offer(Target(second.url))
        wait_for(lambda: second.events.open == 1)
        wait_for(first.client_closed.is_set)


def test_a_fault_of_a_hearer_does_not_end_the_following(follower, told, monkeypatch, caplog):
    monkeypatch.setattr("provider_llamacpp.server.follower.FIRST_PAUSE", 0.01)

    def fails(event):
        follower.leave(fails)
        raise RuntimeError("a fault of the test")

    with a_router_server() as server:
        follower.hear(fails)
        follower.offer(Target(server.url))
        server.events.send(sse("m", "model_remove"))
        wait_for(lambda: server.events.open == 2)
        assert "a fault of the test" in caplog.text
        server.events.send(sse("m", "status_change", loading(0.5)))
        wait_for(lambda: follower.progress("m") is not None)


def test_a_stopped_follower_follows_nothing(told):
    follower = Follower(Upstream(), name="test-events", changed=told)
    follower.stop(PATIENCE)
    follower.offer(Target("http://127.0.0.1:9"))
    assert told.count == 0
    assert [each for each in threading.enumerate() if each.name == "test-events"] == []


# -- streams and loads, scripted ---------------------------------------------------------------


def test_what_waits_for_a_load_is_sent_once():
    """The server holds the request for as long as it loads."""
    go = threading.Event()

    def holds(request):
        return answer_json({}, 500) if go.wait(0) else answers_after(go)(request)

    rows = [row("m", state="unloaded")]
    with (
        a_router_server(*rows, **{"/v1/chat/completions": holds}) as server,
        front_of(server.url, ping_interval=0.1) as front,
    ):
        wait_for(lambda: server.events.open == 1)
        frames = front.stream("m", pings=True)
        assert next(frames)["type"] == "ping"
        server.events.send(
            sse("m", "model_status", {"status": "loading"}),
            sse("m", "status_change", loading(0.5)),
        )
        wait_for(lambda: front.status()["streams"][0]["phase"] == "loading model")
        assert front.status()["streams"][0]["loading"]["share"] == 0.5
        assert front.status()["server"]["models"][0]["state"] == "loading"
        go.set()
        assert list(frames)[-1]["type"] == "done"
        assert server.paths().count("POST /v1/chat/completions") == 1


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ({"failed": True, "exit_code": 9}, "permanent", "its process exited with code 9"),
        ({"failed": True}, "permanent", "it failed"),
        # Ended by somebody, or already on its way again: it may be tried again.
        ({}, "transient", "failed to load"),
    ],
)
def test_what_the_row_says_of_a_load_decides(said, kind, words):
    rows = [row("broken", state="unloaded")]
    failed = recorded("router-chat-broken-stream")
    with (
        a_router_server(*rows, **{"/v1/chat/completions": failed}) as server,
        front_of(server.url) as front,
    ):
        # The failure is news to the catalog.
        server.models[0]["status"].update(said)
        (error,) = front.stream("broken")
        assert error["error"]["error_kind"] == kind
        assert words in error["error"]["error_message"]
        # And where the row cannot be had, nobody is to blame.
        server.more_routes["/v1/models"] = answer_json({}, 500)
        (error,) = front.stream("broken")
        assert error["error"]["error_kind"] == "transient"
        assert server.paths().count("POST /v1/chat/completions") == 2


def test_a_server_without_events_still_tells_of_a_load():
    go = threading.Event()
    rows = [row("m", state="loading")]
    missing = answer_json({"error": {"code": 404, "message": "File Not Found"}}, 404)
    holds = {"script": [lambda exchange: exchange.watch(PATIENCE, go), {"close": True}]}
    routes = {"/models/sse": missing, "/v1/chat/completions": holds}
    with a_router_server(*rows, **routes) as server, front_of(server.url) as front:
        wait_for(lambda: not front.stack.worker._served[0].provider.follower.follows)
        frames = front.stream("m")
        wait_for(lambda: [each["phase"] for each in front.status()["streams"]] == ["loading model"])
        assert front.status()["streams"][0]["loading"]["share"] is None
        go.set()
        assert list(frames)[-1]["type"] == "error"


# -- the real server --------------------------------------------------------------------------


def test_every_model_is_listed_and_none_is_loaded(router_server, front):
    assert front.states().keys() == rows(router_server).keys()
    assert set(front.states()) == {"demo", "heavy", "loop", "embed", "broken", "chatty"}
    records = front.records()
    # Its launch arguments show that it only embeds.
    assert set(records) == {"demo", "heavy", "loop", "broken", "chatty"}
    assert records["demo"]["context_window"] == 4096
    assert records["chatty"]["context_window"] == 2048
    for _ in range(3):
        assert front.call("refresh_models") == {"ok": True, "count": 5}
    assert set(states(router_server).values()) == {"unloaded"}


def test_the_catalog_follows_loads_and_unloads_without_a_look_at_the_clock(router_server, front):
    assert "supports_thinking" not in front.records()["demo"]
    post(router_server, "/models/load", "demo")
    # Its abilities are known once it runs.
    wait_for(lambda: front.records()["demo"].get("supports_thinking") is True)
    assert front.states()["demo"] == "loaded"
    wait_for(lambda: front.ranking()[0] == "demo")
    post(router_server, "/models/unload", "demo")
    wait_for(lambda: front.states()["demo"] == "unloaded")
    # What it can do does not change because it does not run now.
    assert front.records()["demo"]["supports_thinking"] is True


def test_the_catalog_equals_what_the_server_says_of_a_running_model(router_server, front):
    post(router_server, "/models/load", "chatty")
    wait_for(lambda: front.states()["chatty"] == "loaded")
    wait_for(lambda: front.records()["chatty"].get("supports_thinking") is True)
    props = requests.get(
        f"{router_server.url}/props", {"model": "chatty", "autoload": "false"}, timeout=10
    ).json()
    row = rows(router_server)["chatty"]
    record = front.records()["chatty"]
    assert record["context_window"] == row["meta"]["n_ctx"] == 2048
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert record["supports_tools"] is props["chat_template_caps"]["supports_tools"] is True
    assert record["supports_vision"] is props["modalities"]["vision"] is False
    counted = front.call("count_tokens", {"model": "chatty", "messages": [user("hi")]})
    done = front.ask("talker")
    assert done["message"]["usage"]["input"] == counted["tokens"]


def test_a_stream_to_an_unloaded_model_waits_for_its_load(router_server, front):
    frames = front.stream("heavy", max_output_tokens=4)
    seen = []

    def waits():
        seen.extend(front.status()["streams"])
        return seen and seen[-1]["phase"] == "loading model"

    wait_for(waits)
    assert seen[-1]["loading"]["activity"] == "loading"
    assert front.states()["heavy"] == "loading"
    assert list(frames)[-1]["type"] == "done"
    wait_for(lambda: front.states()["heavy"] == "loaded")
    assert front.status()["errors"] == []


def test_a_model_that_cannot_be_loaded_is_a_permanent_error_with_the_reason(router_server, front):
    (error,) = front.stream("broken")
    assert error["type"] == "error"
    assert error["error"]["error_kind"] == "permanent"
    assert error["error"]["error_message"] == (
        "model name=broken failed to load (its process exited with code 1: see llama-server's log)"
    )
    wait_for(lambda: front.states()["broken"] == "failed")


def test_a_load_that_somebody_ends_may_be_tried_again(router_server, front):
    provider = front.stack.worker._served[0].provider
    frames = front.stream("heavy")
    wait_for(lambda: states(router_server)["heavy"] == "loading")
    provider.models.unload(Target(router_server.url), "heavy")
    (error,) = frames
    assert error["error"]["error_kind"] == "transient"
    assert front.ask("heavy", max_output_tokens=4)["type"] == "done"


def test_the_model_that_was_idle_longest_makes_room(router_server, front):
    for model in ("demo", "chatty"):
        assert front.ask(model, max_output_tokens=4)["type"] == "done"
        wait_for(lambda model=model: front.records()[model].get("supports_thinking"))
    # The worker's own questions are no use of a model.
    for _ in range(3):
        front.call("refresh_models")
    assert front.ask("loop", max_output_tokens=4)["type"] == "done"
    wait_for(lambda: front.states()["demo"] == "unloaded")
    assert states(router_server)["chatty"] == "loaded"
    wait_for(lambda: front.states()["loop"] == "loaded")


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds the child by /proc")
def test_a_child_that_dies_in_the_middle_of_a_stream(router_server, front):
    frames = front.stream("loop", max_output_tokens=4000)
    heard = [next(frames) for _ in range(8)]
    assert heard[0]["type"] == "start"
    (child,) = children(router_server.pid)
    os.kill(child, 9)
    last = list(frames)[-1]
    assert last["type"] == "error"
    assert last["error"]["error_kind"] == "transient"
    assert last["error"]["content"][0]["text"].startswith("one two three ")
    wait_for(lambda: front.states()["loop"] == "failed")
    # Who asks for it again gets it.
    assert front.ask("loop", max_output_tokens=4)["type"] == "done"
    wait_for(lambda: front.states()["loop"] == "loaded")


def test_the_events_are_followed_for_as_long_as_the_worker_runs(router_server):
    with front_of(router_server.url) as front:
        wait_for(lambda: "llamacpp-events" in names())
        assert front.status()["server"]["router_mode"] is True
    assert "llamacpp-events" not in names()


def test_a_server_of_one_model_is_not_followed(llama):
    with front_of(llama.url):
        assert "llamacpp-events" not in names()
