"""The functions that manage a server's models: lists, loads, downloads, and who may.

Downloads run against the program too, from a hub of our own on this machine. What a hub on the
network says beside it (a token that is refused, a gated model) was not tried.
"""

from __future__ import annotations

import contextlib
import json
import threading
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from looking import nowhere
from peers import PATIENCE, ScriptedServer, answer_json, wait_for
from recorded import recorded
from router_mode import (
    Hub,
    a_router_server,
    front,
    front_of,
    loading,
    post,
    router_server,
    rows,
    sse,
    states,
    unload_all,
)
from scripted_llama import row
from surfacing import SCHEMAS, WRITER, Channel

from provider_llamacpp import Settings
from provider_llamacpp.calls import Call
from provider_llamacpp.cli import main
from provider_llamacpp.commands import managing
from provider_llamacpp.errors import BusError, Interrupted, InvalidRequest
from provider_llamacpp.local.llama import LlamaOptions, LlamaServer
from provider_llamacpp.server.catalog import Catalog
from provider_llamacpp.server.follower import Follower
from provider_llamacpp.server.management import ModelManager
from provider_llamacpp.server.upstream import Target, Upstream
from provider_llamacpp.surfaces.context import Context
from provider_llamacpp.surfaces.outlet import Outlets
from provider_llamacpp.surfaces.table import SURFACES

__all__ = ["front", "router_server"]

pytestmark = pytest.mark.timeout(120)

WORK = {surface.name: surface.work for surface in SURFACES}
DONE = answer_json({"success": True})


class Place:
    """The functions of a provider without a bus, in front of ``server``."""

    def __init__(self, server: Any, *, allowed: bool = True) -> None:
        upstream = Upstream()
        self.follower = Follower(upstream, name="test-events", changed=lambda: None)
        self.channel = Channel()
        self.provider = SimpleNamespace(
            models=ModelManager(upstream, self.follower),
            settings=SimpleNamespace(allow_model_management=allowed),
            target=lambda call: (Target(server.url), 8192),
            catalog=Catalog("llamacpp"),
        )
        self.context = Context(
            self.provider, None, Outlets(), lambda writer, call: self.channel, dict
        )
        self.last = Call(1, "watch", key=None, model=None)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.follower.stop(PATIENCE)

    def call(self, name: str, **data: Any) -> Any:
        """The result; request and result fit the schemas."""
        jsonschema.validate(data, SCHEMAS[name]["request_format"])
        result = WORK[name](self.context, data, self.last)
        jsonschema.validate(result, SCHEMAS[name]["response_format"])
        return result

    def watch(self, model: str | None = None) -> threading.Thread:
        """Begin to watch, on a thread; what came of it is in ``outcome``."""
        self.outcome: Any = None
        self.channel = Channel(self.channel.patience)

        def run() -> None:
            try:
                self.outcome = self.call("models_watch", model=model, writer_ref=WRITER)
            except (BusError, Interrupted) as error:
                self.outcome = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    @property
    def kinds(self) -> list[str]:
        return [frame["type"] for frame in self.channel.frames]


def failure_of(place: Place, name: str, **data: Any) -> str:
    with pytest.raises(BusError) as caught:
        WORK[name](place.context, data, place.last)
    return caught.value.message


# -- looking ----------------------------------------------------------------------------------


def test_the_list_has_every_model_with_its_state():
    rows = recorded("router-models-failed")
    with ScriptedServer(routes={"/v1/models": rows}) as server, Place(server) as place:
        found = place.call("models_list")
        assert found["router_mode"] is True
        models = {each["id"]: each for each in found["models"]}
        assert models["broken"] == {
            "id": "broken",
            "aliases": [],
            "tags": [],
            "state": "failed",
            "exit_code": 1,
            "progress": None,
            "context_window": 4096,
            "for_chat": True,
            "source": "models_dir",
            "can_remove": False,
        }
        assert len(models) == len(found["models"]) > 4
        assert server.paths() == ["GET /v1/models"]


def test_the_list_of_a_server_of_one_model():
    server = ScriptedServer(routes={"/v1/models": recorded("models-single")})
    with server, Place(server) as place:
        found = place.call("models_list")
        assert found["router_mode"] is False
        (model,) = found["models"]
        assert (model["state"], model["source"], model["can_remove"]) == ("loaded", None, None)
        words = failure_of(place, "models_load", model=model["id"])
        assert "manages none" in words and "--models-dir" in words
        assert server.paths() == ["GET /v1/models"] * 2


def test_reading_the_sources_again_needs_the_setting():
    rows = answer_json({"data": [row("a", state="unloaded"), {"id": 7}, "odd"]})
    with ScriptedServer(routes={"/models": rows}) as server:
        with Place(server) as place:
            assert [each["id"] for each in place.call("models_list", reload=True)["models"]] == [
                "a"
            ]
            assert server.paths() == ["GET /models?reload=1"]
        with (
            Place(server, allowed=False) as place,
            pytest.raises(InvalidRequest, match=r"^.*reload: may unload running models"),
        ):
            WORK["models_list"](place.context, {"reload": True}, place.last)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (recorded("loading-models"), "provider/upstream_status: HTTP 503"),
        (answer_json({"data": "none"}), "provider/bad_response"),
        ({"script": [{"close": True}]}, "provider/upstream: "),
    ],
)
def test_a_list_that_cannot_be_had(answer, words):
    with ScriptedServer(answer) as server, Place(server) as place:
        assert failure_of(place, "models_list").startswith(words)


def test_progress_is_in_the_list():
    with a_router_server(row("m", state="loading")) as server, Place(server) as place:
        place.follower.offer(Target(server.url))
        server.events.send(sse("m", "status_change", loading(0.25)))
        wait_for(lambda: place.follower.progress("m") is not None)
        (model,) = place.call("models_list")["models"]
        assert model["state"] == "loading"
        assert model["progress"] == {
            "activity": "loading",
            "share": 0.25,
            "stage": "text_model",
            "done": None,
            "total": None,
        }


# -- doing ------------------------------------------------------------------------------------


def sent(server):
    """What the server was asked to do, in short."""
    return [
        (request.method, request.target, request.json() if request.body else None)
        for request in server.requests
        if request.method != "GET"
    ]


def test_loading_and_unloading():
    rows = [row("a", state="unloaded") | {"aliases": ["first"]}, row("b", state="loaded")]
    routes = {"/models/load": DONE, "/models/unload": DONE}
    with a_router_server(*rows, **routes) as server, Place(server) as place:
        assert place.call("models_load", model="first") == {"model": "a", "state": "loading"}
        assert place.call("models_unload", model="b") == {"model": "b", "state": "unloaded"}
        assert sent(server) == [
            ("POST", "/models/load", {"model": "a"}),
            ("POST", "/models/unload", {"model": "b"}),
        ]


def test_what_is_so_already_stays_as_it_is():
    rows = [row("a", state="unloaded"), row("b", state="sleeping"), row("c", state="loading")]
    with a_router_server(*rows) as server, Place(server) as place:
        assert place.call("models_load", model="b")["state"] == "sleeping"
        assert place.call("models_load", model="c")["state"] == "loading"
        assert place.call("models_unload", model="a")["state"] == "unloaded"
        assert place.call("models_download", model="a") == {"model": "a", "state": "unloaded"}
        assert sent(server) == []


def test_it_may_become_so_meanwhile():
    rows = [row("a", state="unloaded"), row("b", state="loaded")]
    routes = {
        "/models/load": recorded("router-load-again"),
        "/models/unload": recorded("router-unload-again"),
    }
    with a_router_server(*rows, **routes) as server, Place(server) as place:
        assert place.call("models_load", model="a")["state"] == "loading"
        assert place.call("models_unload", model="b")["state"] == "unloaded"


@pytest.mark.parametrize("name", ["models_load", "models_unload", "models_delete"])
def test_a_model_that_is_not_there(name):
    rows = [row(f"m{number}", state="unloaded") for number in range(14)]
    with a_router_server(*rows) as server, Place(server) as place:
        words = failure_of(place, name, model="nothing")
        assert words.startswith("invalid_input: llama-server has no model 'nothing'; it has m0, m1")
        assert words.endswith(", m11 and 2 more")
        server.models = []
        assert failure_of(place, name, model="nothing").endswith("it has none")
        assert sent(server) == []
        with pytest.raises(InvalidRequest, match="model: must be a string"):
            WORK[name](place.context, {}, place.last)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (recorded("router-load-limit-busy"), "HTTP 500: model limit reached, try again later"),
        (recorded("router-load-unknown"), "provider/config: this llama-server cannot manage"),
    ],
)
def test_a_refused_load(answer, words):
    with (
        a_router_server(row("a", state="unloaded"), **{"/models/load": answer}) as server,
        Place(server) as place,
    ):
        assert words in failure_of(place, "models_load", model="a")


def test_a_refused_unload_and_a_refused_download():
    refused = recorded("router-load-limit-busy")
    routes = {"/models/unload": refused, "/models": refused}
    with a_router_server(row("a", state="loaded"), **routes) as server, Place(server) as place:
        for name, model in (("models_unload", "a"), ("models_download", "me/new")):
            assert "model limit reached" in failure_of(place, name, model=model)


def test_downloading_and_deleting():
    rows = [row("me/old:Q4_K_M", state="unloaded") | {"source": "cache", "can_remove": True}]
    with a_router_server(*rows, **{"/models": DONE}) as server, Place(server) as place:
        assert place.call("models_download", model="me/new") == {
            "model": "me/new",
            "state": "downloading",
        }
        assert place.call("models_delete", model="me/old:Q4_K_M") == {"model": "me/old:Q4_K_M"}
        assert sent(server) == [
            ("POST", "/models", {"model": "me/new"}),
            ("DELETE", "/models?model=me%2Fold%3AQ4_K_M", None),
        ]


def test_what_did_not_come_from_a_hub_cannot_be_deleted():
    routes = {"/models": recorded("router-delete-model")}
    with (
        a_router_server(row("tiny-chat", state="unloaded"), **routes) as server,
        Place(server) as place,
    ):
        words = failure_of(place, "models_delete", model="tiny-chat")
        assert "HTTP 500: model name=tiny-chat is not removable (not from cache)" in words


# -- watching ---------------------------------------------------------------------------------


def set_state(server, model, state, **more):
    (found,) = [each for each in server.models if each["id"] == model]
    found["status"] = {**found["status"], "value": state, **more}


@pytest.mark.parametrize("state", ["loaded", "sleeping", "unloaded"])
def test_where_nothing_is_under_way_it_ends_at_once(state):
    with (
        a_router_server(row("m", state=state) | {"aliases": ["alias"]}) as server,
        Place(server) as place,
    ):
        last = place.call("models_watch", model="alias", writer_ref=WRITER)
        assert last == {"type": "done", "model": "m", "state": state}
        assert place.channel.frames == [{"type": "status", "model": "m", "state": state}, last]


def test_a_load_is_watched_to_its_end():
    rows = [row("m", state="loading"), row("other", state="loading")]
    with a_router_server(*rows) as server, Place(server) as place:
        place.follower.offer(Target(server.url))
        thread = place.watch("m")
        wait_for(lambda: place.kinds == ["status"])
        server.events.send(
            sse("m", "model_status", {"status": "loading"}),
            sse("other", "status_change", loading(0.9)),
            sse("m", "status_change", loading(0.5)),
        )
        wait_for(lambda: place.kinds == ["status", "progress"])
        set_state(server, "m", "loaded")
        server.events.send(sse("m", "status_change", {"status": "loaded"}))
        thread.join(PATIENCE)
        assert place.outcome == {"type": "done", "model": "m", "state": "loaded"}
        assert [frame.get("share") for frame in place.channel.frames] == [None, 0.5, None, None]
        assert place.kinds == ["status", "progress", "status", "done"]
        assert place.channel.finished


def test_without_events_the_rows_are_looked_at(monkeypatch):
    monkeypatch.setattr("provider_llamacpp.server.management.LOOK_SECONDS", 0.02)
    with a_router_server(row("m", state="loading")) as server, Place(server) as place:
        thread = place.watch("m")
        wait_for(lambda: server.paths().count("GET /v1/models") > 3)
        set_state(server, "m", "loaded")
        thread.join(PATIENCE)
        assert place.kinds == ["status", "status", "done"]
        assert {line.split()[0] for line in server.paths()} == {"GET"}


def test_a_load_that_fails(monkeypatch):
    monkeypatch.setattr("provider_llamacpp.server.management.LOOK_SECONDS", 0.02)
    with a_router_server(row("m", state="loading")) as server, Place(server) as place:
        thread = place.watch("m")
        wait_for(lambda: place.kinds == ["status"])
        set_state(server, "m", "unloaded", failed=True, exit_code=1)
        thread.join(PATIENCE)
        assert place.outcome == {
            "type": "failed",
            "model": "m",
            "exit_code": 1,
            "message": "m failed to load (its process exited with code 1): see llama-server's log",
        }


def test_a_load_that_is_ended(monkeypatch):
    monkeypatch.setattr("provider_llamacpp.server.management.LOOK_SECONDS", 0.02)
    with (
        a_router_server(row("m", state="loading"), **{"/models/unload": DONE}) as server,
        Place(server) as place,
    ):
        thread = place.watch("m")
        wait_for(lambda: place.kinds == ["status"])
        place.call("models_unload", model="m")
        # That is how the server tells of it.
        set_state(server, "m", "unloaded", failed=True, exit_code=1)
        thread.join(PATIENCE)
        assert (place.outcome["type"], place.outcome["model"]) == ("cancelled", "m")
        # Somebody else may end one, too.
        set_state(server, "m", "loading", failed=False)
        thread = place.watch("m")
        wait_for(lambda: place.kinds == ["status"])
        set_state(server, "m", "unloaded")
        thread.join(PATIENCE)
        assert place.outcome["message"] == "it was unloaded while it was loading"


@pytest.mark.parametrize("ended", [True, False])
def test_a_download_that_ends_without_a_model(ended, monkeypatch):
    """The shapes are those that the program sent; what they mean it does not say: a model that no
    hub has ends in ``download_finished``."""
    monkeypatch.setattr("provider_llamacpp.server.management.LOOK_SECONDS", 3600.0)
    rows = [row("me/new", state="downloading")]
    with a_router_server(*rows, **{"/models/unload": DONE}) as server, Place(server) as place:
        place.follower.offer(Target(server.url))
        thread = place.watch("me/new")
        wait_for(lambda: place.kinds == ["status"])
        files = {"progress": {"http://hub/file": {"done": 30, "total": 120}}}
        server.events.send(sse("me/new", "download_progress", files))
        wait_for(lambda: place.kinds == ["status", "progress"])
        assert place.channel.frames[-1]["share"] == 0.25
        if ended:
            place.call("models_unload", model="me/new")
        server.models = []
        server.events.send(
            sse("me/new", "download_failed" if ended else "download_finished"),
            sse("*", "models_reload"),
        )
        thread.join(PATIENCE)
        assert place.outcome["type"] == ("cancelled" if ended else "failed")
        words = "was cancelled" if ended else "does its hub have such a model"
        assert words in place.outcome["message"]


def test_a_model_that_is_nowhere_cannot_be_watched():
    with a_router_server(row("m", state="loaded")) as server, Place(server) as place:
        last = place.call("models_watch", model="nothing", writer_ref=WRITER)
        assert last["type"] == "failed"
        assert last["message"] == "llama-server has no model 'nothing'"


def test_all_models_are_watched_until_the_caller_has_enough():
    with a_router_server(row("m", state="loaded")) as server, Place(server) as place:
        place.follower.offer(Target(server.url))
        thread = place.watch()
        wait_for(lambda: place.follower._hearers != [])
        events = [
            sse("m", "status_change", {"status": "unloaded", "exit_code": 1}),
            sse("n", "download_progress", {"progress": {"u": {"done": 1, "total": 2}}}),
            sse("n", "download_finished"),
            sse("n", "download_failed"),
            sse("m", "model_remove"),
            sse("*", "models_reload"),
            sse("m", "status_change", {}),
        ]

        server.events.send(*events)
        wait_for(lambda: len(place.channel.frames) == len(events))
        place.last.abort("abort")
        thread.join(PATIENCE)
        assert isinstance(place.outcome, Interrupted)
        frames = place.channel.frames
        assert frames[-1] == {"type": "cancelled", "message": "it was called off"}
        progress = {"activity": "downloading", "share": 0.5, "stage": None, "done": 1, "total": 2}
        assert frames[:-1] == [
            {"type": "status", "model": "m", "state": "unloaded", "exit_code": 1},
            {"type": "progress", "model": "n", **progress},
            {"type": "status", "model": "n", "state": "downloaded"},
            {"type": "status", "model": "n", "state": "download failed"},
            {"type": "removed", "model": "m"},
            {"type": "reloaded", "model": "*"},
            {"type": "status", "model": "m", "state": "unknown"},
        ]


def test_a_server_without_events_cannot_be_watched_as_a_whole():
    with a_router_server(row("m", state="loaded")) as server, Place(server) as place:
        thread = place.watch()
        thread.join(PATIENCE)
        assert "tells nothing of its models" in place.outcome.message
        assert place.channel.frames[-1]["type"] == "failed"


def test_a_caller_who_leaves_is_told_nothing():
    with a_router_server(row("m", state="loading")) as server, Place(server) as place:
        place.channel = Channel(patience=0)
        thread = place.watch("m")
        thread.join(PATIENCE)
        assert isinstance(place.outcome, Interrupted)
        assert place.channel.frames == []
        assert place.channel.finished
        # One who leaves while nothing happens is noticed by the watch of the channels.
        place.channel, place.last = Channel(9), Call(2, "watch", key=None, model=None)
        thread = place.watch("m")
        wait_for(lambda: place.kinds == ["status"])
        place.last.abort("consumer gone")
        thread.join(PATIENCE)
        assert place.kinds == ["status"]


def test_the_server_is_found_first_where_it_is_not_known_yet():
    refreshed = []
    with a_router_server(row("m", state="loaded")) as server, Place(server) as place:
        place.provider.catalog = None
        place.provider.refresh = lambda call: refreshed.append(call)
        place.call("models_watch", model="m", writer_ref=WRITER)
        assert refreshed == [place.last]


# -- on the bus, and the real server ----------------------------------------------------------

ALWAYS = {"models_list", "models_load", "models_watch"}
MANAGING = {"models_unload", "models_download", "models_delete"}


@pytest.mark.parametrize("allowed", [True, False])
def test_what_takes_away_needs_the_flag(allowed):
    with (
        a_router_server(row("m", state="unloaded")) as server,
        front_of(server.url, allow_model_management=allowed) as front,
    ):
        answer = front.caller.call("engine::functions::list", {"include_internal": True})
        start = "provider::llamacpp::"
        found = {each["function_id"].removeprefix(start) for each in answer["functions"]}
        assert found >= ALWAYS
        assert found & MANAGING == (MANAGING if allowed else set())


def test_a_load_from_its_request_to_its_end(router_server, front):
    assert front.call("models_load", {"model": "heavy"}) == {"model": "heavy", "state": "loading"}
    frames = list(front.watch(model="heavy"))
    assert frames[-1] == {"type": "done", "model": "heavy", "state": "loaded"}
    front.watched["thread"].join(PATIENCE)
    assert front.watched["result"] == frames[-1]
    listed = {each["id"]: each for each in front.call("models_list")["models"]}
    assert {name: each["state"] for name, each in listed.items()} == states(router_server)
    assert listed["chatty"]["tags"] == ["local", "test"]
    assert listed["chatty"]["aliases"] == ["talker"]
    assert listed["embed"]["for_chat"] is False
    assert front.call("models_unload", {"model": "heavy"})["state"] == "unloaded"
    wait_for(lambda: states(router_server)["heavy"] == "unloaded")


def test_a_damaged_model(router_server, front):
    front.call("models_load", {"model": "broken"})
    *_, last = front.watch(model="broken")
    assert (last["type"], last["exit_code"]) == ("failed", 1)


def test_a_load_that_is_called_off(router_server, front):
    front.call("models_load", {"model": "heavy"})
    frames = front.watch(model="heavy")
    assert next(frames) == {"type": "status", "model": "heavy", "state": "loading"}
    front.call("models_unload", {"model": "heavy"})
    *_, last = frames
    assert last["type"] == "cancelled"


def test_all_of_it_is_watched_until_an_abort(router_server, front):
    wait_for(lambda: front.status()["server"]["router_mode"])
    frames = front.watch(resolution_key="my-watch")
    wait_for(lambda: front.stack.worker._served[0].provider.follower._hearers != [])
    post(router_server, "/models/load", "demo")
    seen = []
    for frame in frames:
        seen.append(frame)
        if frame.get("state") == "loaded":
            break
    assert {"type": "status", "model": "demo", "state": "loading"} in seen
    assert front.call("abort", {"request_id": "my-watch"}) == {"aborted": True}
    assert list(frames) == [{"type": "cancelled", "message": "it was called off"}]
    front.watched["thread"].join(PATIENCE)
    assert "the call was aborted" in front.watched["error"].message


def test_a_stop_does_not_wait_for_those_who_watch(router_server):
    with front_of(router_server.url, drain=PATIENCE) as front:
        frames = front.watch()
        wait_for(lambda: front.stack.worker._outlets.snapshot() != [])
        stopping = threading.Thread(target=front.stack.worker.stop, daemon=True)
        stopping.start()
        assert list(frames) == [{"type": "cancelled", "message": "the worker was stopped"}]
        stopping.join(PATIENCE / 2)
        assert not stopping.is_alive()


def test_watchers_are_kept_alive_by_pings_and_do_not_take_the_place_of_others(router_server):
    with front_of(router_server.url, ping_interval=0.1, max_requests=1) as front:
        frames = front.watch(pings=True)
        assert next(frames) == {"type": "ping"}
        assert front.call("models_list")["router_mode"] is True
        front.stack.worker.stop()
        assert list(frames)[-1]["type"] == "cancelled"


@pytest.fixture
def hub(llama_program, model_path, tmp_path):
    """A server whose models all come from a hub of ours."""
    empty = tmp_path / "models"
    empty.mkdir()
    with Hub(model_path("heavy")) as hub:
        environ = hub.environ(tmp_path / "cache")
        options = LlamaOptions(models_dir=empty, threads=1, parallel=1)
        with LlamaServer(options, source="program", environ=environ) as hub.llama:
            hub.llama.wait_ready(PATIENCE)
            yield hub
            hub.go.set()


def test_a_model_comes_and_goes(hub):
    """Against the program and a hub on this machine; the router's catalog follows by events."""
    with front_of(hub.llama.url) as front:
        assert front.records() == {}
        assert front.call("models_download", {"model": "me/tiny:F32"})["state"] == "downloading"
        frames = front.watch(model="me/tiny:F32")
        seen = []
        for frame in frames:
            seen.append(frame)
            if (frame.get("share") or 0) > 0.3:
                break
        assert seen[0] == {"type": "status", "model": "me/tiny:F32", "state": "downloading"}
        assert seen[-1]["total"] == len(hub.data)
        assert front.states() == {"me/tiny:F32": "downloading"}
        hub.go.set()
        *_, last = frames
        assert (last["type"], last["state"]) == ("done", "unloaded")
        wait_for(lambda: set(front.records()) == {"me/tiny:F32"})
        (model,) = front.call("models_list")["models"]
        assert (model["source"], model["can_remove"]) == ("cache", True)
        assert front.ask("me/tiny:F32", max_output_tokens=4)["type"] == "done"
        front.call("models_unload", {"model": "me/tiny:F32"})
        wait_for(lambda: states(hub.llama) == {"me/tiny:F32": "unloaded"})
        assert front.call("models_delete", {"model": "me/tiny:F32"}) == {"model": "me/tiny:F32"}
        wait_for(lambda: front.records() == {})
        assert rows(hub.llama) == {}


def test_a_download_that_is_called_off(hub):
    with front_of(hub.llama.url) as front:
        front.call("models_download", {"model": "me/tiny:F32"})
        frames = front.watch(model="me/tiny:F32")
        next(frame for frame in frames if frame["type"] == "progress")
        front.call("models_unload", {"model": "me/tiny:F32"})
        hub.go.set()
        *_, last = frames
        assert last["type"] == "cancelled", json.dumps(last)
        wait_for(lambda: rows(hub.llama) == {})


def test_a_model_that_the_hub_does_not_have(hub):
    with front_of(hub.llama.url) as front:
        front.call("models_download", {"model": "me/nothing"})
        *_, last = front.watch(model="me/nothing")
        assert last["type"] == "failed"
        with pytest.raises(BusError, match="expected <user>/<model>"):
            front.call("models_download", {"model": "nonsense"})


def test_the_fixture_leaves_nothing_loaded(router_server):
    unload_all(router_server)


# -- the command ------------------------------------------------------------------------------


def ran(capsys, *arguments):
    """Exit code, standard output and error of ``models`` with these arguments."""
    code = main(["models", *arguments])
    out, err = capsys.readouterr()
    return code, out, " ".join(err.split())


@pytest.mark.parametrize("through", ["engine", "nothing"])
def test_the_command_loads_and_unloads(through, router_server, front, capsys):
    way = ["--url", front.stack.engine.url]
    if through == "nothing":
        way = ["--url", nowhere(), "--api-url", router_server.url]
    code, out, err = ran(capsys, "load", "heavy", *way)
    assert (code, out) == (0, "heavy is loaded\n"), err
    assert "through the engine" in err if through == "engine" else "directly at http" in err
    assert "loading heavy" in err
    code, out, err = ran(capsys, "load", "talker", *way)
    assert (code, out) == (0, "chatty is loaded\n"), err
    code, out, err = ran(capsys, "load", "broken", *way)
    assert (code, out) == (1, "")
    assert "failed: broken failed to load (its process exited with code 1)" in err
    code, out, err = ran(capsys, "unload", "heavy", *way)
    assert (code, out) == (0, "heavy is unloaded\n"), err
    assert states(router_server)["heavy"] == "unloaded"
    code, out, err = ran(capsys, "rm", "heavy", *way)
    assert (code, out) == (1, "")
    assert "not removable" in err
    code, out, err = ran(capsys, "list", *way, *(["--direct"] if through == "nothing" else []))
    assert code == 0
    assert "chatty" in out
    if through == "nothing":
        assert err.startswith("from llama-server at")


@pytest.mark.parametrize("through", ["engine", "nothing"])
def test_the_command_downloads_and_deletes(through, hub, capsys):
    """Against the program and a hub on this machine."""
    hub.go.set()
    with front_of(hub.llama.url) as front:
        way = ["--url", front.stack.engine.url]
        if through == "nothing":
            way = ["--direct", "--api-url", hub.llama.url]
        code, out, err = ran(capsys, "download", "me/tiny:F32", *way)
        assert (code, out) == (0, "me/tiny:F32 is downloaded\n"), err
        assert "downloading me/tiny:F32" in err
        code, out, err = ran(capsys, "download", "me/nothing", *way)
        assert (code, out) == (1, "")
        assert "failed: me/nothing could not be downloaded" in err
        code, out, err = ran(capsys, "rm", "me/tiny:F32", *way)
        assert (code, out) == (0, "me/tiny:F32 is deleted\n"), err
        assert rows(hub.llama) == {}


def test_the_command_needs_a_name(capsys):
    code, out, err = ran(capsys, "load")
    assert (code, out) == (2, "")
    assert "needs the NAME of a model" in err


def test_the_command_does_nothing_behind_the_back_of_a_worker(router_server, capsys):
    with front_of(router_server.url, allow_model_management=False) as front:
        url = front.stack.engine.url
        code, out, err = ran(capsys, "unload", "demo", "--url", url, "--api-url", router_server.url)
        assert (code, out) == (1, "")
        assert "start it with --allow-model-management" in err
        # What the worker says of itself is not reworded.
        code, out, err = ran(capsys, "load", "nothing", "--url", url)
        assert (code, out) == (1, "")
        assert "llama-server has no model 'nothing'" in err


class Way:
    """A worker that goes away, or a person who does."""

    def __init__(self, watch):
        self._watch = watch
        self.states = ["loaded", "loaded", "unloaded"]
        self.call = lambda function_id, payload, timeout: self._watch()

    def open_channel(self):
        return {"channel_id": "c"}, iter([{"type": "ping"}])

    def do(self, name, model):
        return {"model": model, "state": {"load": "loading", "unload": "unloaded"}[name]}

    def watch(self, model, tell):
        tell({"type": "status", "state": "loading"})
        tell({"type": "progress", "share": None})
        tell({"type": "progress", "share": 0.5, "stage": "text_model"})
        tell({"type": "progress", "share": 0.5, "done": 1_000_000, "total": 2_000_000})
        return self._watch()

    def state(self, model):
        return self.states.pop(0) if self.states else None


def test_a_watch_that_ends_without_a_last_word():
    def fails():
        raise BusError("disconnected", "the worker is gone")

    for watch, words in ((fails, "the worker is gone"), (dict, "without a last word")):
        way = managing._ByBus(Way(watch), Settings())
        with pytest.raises(BusError, match=words):
            way.watch("m", lambda frame: None)


def test_ctrl_c_leaves_the_load_alone(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(managing, "_way", lambda *_: contextlib.nullcontext(Way(interrupted)))
    code, out, err = ran(capsys, "load", "m")
    assert (code, out) == (130, "")
    assert "it goes on: provider-llamacpp models unload m ends it" in err
    assert "loading m: 50 % text_model" in err


def test_an_unload_waits_for_its_end(monkeypatch, capsys):
    way = Way(None)
    monkeypatch.setattr(managing, "_way", lambda *_: contextlib.nullcontext(way))
    assert ran(capsys, "unload", "m")[:2] == (0, "m is unloaded\n")
    assert way.states == []
    monkeypatch.setattr(managing, "UNLOAD_SECONDS", 0.0)
    way.states = ["loaded"] * 9
    assert ran(capsys, "unload", "m")[0] == 0


def test_the_state_of_a_model_that_is_gone(router_server, front):
    way = managing._ByBus(front.caller, Settings())
    assert (way.state("demo"), way.state("nothing")) == ("unloaded", None)
    with managing._directly(Settings(api_url=router_server.url), "") as way:
        assert (way.state("demo"), way.state("nothing")) == ("unloaded", None)
