"""The functions beside chat as callers meet them on the bus: who finds them, and how they end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from peers import ScriptedServer, answer_json, wait_for
from recorded import recorded
from surfacing import SCHEMAS

from provider_llamacpp import BusError, Settings
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.local.stack import LocalStack
from provider_llamacpp.schemas import function_schemas
from provider_llamacpp.surfaces import table
from provider_llamacpp.surfaces.table import SURFACES, Surface, allowed, surface_schemas

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parent.parent
NAMES = {surface.name for surface in SURFACES}
MODELS = {
    "/health": answer_json({"status": "ok"}),
    "/v1/models": answer_json({"data": [{"id": "demo", "object": "model"}]}),
}
SHELL = "exec_shell_command"


class Place:
    """A worker on a scripted server whose tools say one line and then wait for ``go``."""

    def __init__(self, server: ScriptedServer, stack: LocalStack, caller: Caller) -> None:
        self.server = server
        self.stack = stack
        self.caller = caller
        self.go = threading.Event()
        self.answer: Any = None
        self.failure: BusError | None = None

    def call(self, name: str, **data: Any) -> Any:
        return self.caller.call(f"provider::llamacpp::{name}", data, timeout=60.0)

    def begin(self, **data: Any) -> tuple[threading.Thread, Iterator[dict[str, Any]]]:
        """Run the shell with a channel, in the background."""
        writer, frames = self.caller.open_channel()

        def run() -> None:
            try:
                self.answer = self.call("tools_call", tool=SHELL, writer_ref=writer, **data)
            except BusError as error:
                self.failure = error

        thread = threading.Thread(target=run)
        thread.start()
        return thread, frames


def first(frames: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """What came first but for pings, which come whenever the machine is slow."""
    return next(frame for frame in frames if frame["type"] != "ping")


@pytest.fixture
def place() -> Iterator[Place]:
    places: list[Place] = []

    def tools(request: Any) -> Any:
        if request.method == "GET":
            return recorded("tools-api-list")
        wait = lambda exchange: exchange.watch(60, places[0].go)  # noqa: E731
        return {
            "script": [
                {"headers": {"headers": {"content-type": "text/event-stream"}}},
                {"send": 'data: {"chunk":"one\\n"}\n\n'},
                wait,
                {"send": 'data: {"done":true}\n\n'},
            ]
        }

    routes = {
        **MODELS,
        "/tools": tools,
        "/tokenize": recorded("tokenize"),
        "/metrics": recorded("metrics"),
    }
    with ScriptedServer(routes=routes) as server:
        settings = Settings(
            api_url=server.url, allow_server_tools=("read", SHELL), ping_interval=0.2, drain=0.0
        )
        with LocalStack(settings) as stack, Caller(stack.settings) as caller:
            places.append(Place(server, stack, caller))
            yield places[0]


def listed(caller: Caller) -> dict[str, Any]:
    answer = caller.call("engine::functions::list", {"include_internal": True})
    start = "provider::llamacpp::"
    return {
        each["function_id"].removeprefix(start): each
        for each in answer["functions"]
        if each["function_id"].startswith(start)
    }


def test_they_are_registered_as_internal(place: Place) -> None:
    found = listed(place.caller)
    names = {surface.name for surface in allowed(place.stack.settings)}
    assert names >= {"rerank", "tools_call"}
    for name in names:
        assert found[name]["metadata"]["internal"] is True, name


def test_what_is_not_allowed_is_not_registered() -> None:
    with ScriptedServer(routes=MODELS) as server:
        settings = Settings(api_url=server.url)
        with LocalStack(settings) as stack, Caller(stack.settings) as caller:
            names = {surface.name for surface in allowed(settings)}
            assert set(listed(caller)) & NAMES == names
            assert not names & {"tools_list", "tools_call"}
            with pytest.raises(BusError, match="function_not_found"):
                caller.call("provider::llamacpp::tools_call", {"tool": "get_info"})


def test_agents_are_kept_from_all_of_them() -> None:
    rules = (ROOT / "iii-permissions.yaml").read_text(encoding="utf-8").split()
    for name in NAMES | set(function_schemas("llamacpp")):
        assert f"'!provider::llamacpp::{name}'" in rules, (
            f"iii-permissions.yaml lacks - '!provider::llamacpp::{name}'"
        )


def test_schemas_fit_the_table_and_are_sound() -> None:
    assert set(SCHEMAS) == NAMES, "surfaces/schemas.json and SURFACES differ"
    titles = set()
    for entry in SCHEMAS.values():
        assert set(entry) == {"description", "metadata", "request_format", "response_format"}
        assert entry["metadata"] == {"internal": True}
        for side in ("request_format", "response_format"):
            schema = entry[side]
            jsonschema.Draft7Validator.check_schema(schema)
            assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
            assert set(schema.get("required", ())) <= set(schema.get("properties", ()))
            titles.add(schema["title"])
    assert len(titles) == 2 * len(SCHEMAS)


def test_a_function_that_is_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SURFACES", (*SURFACES, Surface("preview", "preview")))
    lacks = r"surfaces/schemas\.json does not describe 'preview': add an entry of that name"
    with pytest.raises(LookupError, match=lacks):
        surface_schemas("llamacpp")


def test_answers_and_refuses(place: Place) -> None:
    assert place.call("tokenize", content="hi")["tokens"][:2] == [104, 105]
    with pytest.raises(BusError) as caught:
        place.call("tokenize")
    assert (caught.value.code, caught.value.message) == (
        "provider/invalid_request",
        "content: must be a string",
    )
    figures = place.call("metrics")
    jsonschema.validate(figures, SCHEMAS["metrics"]["response_format"])
    assert figures["worker"]["max_streams"] == 64


def test_a_silent_tool_is_kept_alive_by_pings(place: Place) -> None:
    thread, frames = place.begin()
    assert first(frames) == {"type": "chunk", "text": "one\n"}
    assert next(frames) == {"type": "ping"}
    place.go.set()
    rest = [frame for frame in frames if frame != {"type": "ping"}]
    thread.join(30)
    assert rest == [{"type": "done", "result": place.answer}]
    assert place.answer["ok"] is True


def test_an_abort_ends_it(place: Place) -> None:
    thread, frames = place.begin(resolution_key="turn-9")
    assert first(frames)["type"] == "chunk"
    assert place.call("abort", request_id="turn-9") == {"aborted": True}
    assert {frame["type"] for frame in frames} <= {"ping"}
    thread.join(30)
    assert place.failure is not None
    assert place.failure.message == "provider/upstream: the call was aborted"
    assert place.server.client_closed.wait(30)


def test_a_caller_who_leaves_ends_it(place: Place) -> None:
    thread, frames = place.begin()
    assert first(frames)["type"] == "chunk"
    frames.close()  # type: ignore[attr-defined]
    thread.join(30)
    assert place.failure is not None
    assert place.failure.message == "provider/upstream: the caller's channel was closed"
    assert place.server.client_closed.wait(30)


def test_a_stop_says_so(place: Place) -> None:
    thread, frames = place.begin()
    assert first(frames)["type"] == "chunk"
    place.stack.worker.stop()
    last = [frame for frame in frames if frame["type"] != "ping"]
    thread.join(30)
    assert [frame["type"] for frame in last] == ["error"]
    assert last[0]["error"]["message"] == "provider/upstream: the worker was stopped"
    assert place.failure is not None


def test_more_than_the_worker_takes_are_refused() -> None:
    go = threading.Event()
    wait = {"script": [lambda exchange: exchange.watch(60, go), {"close": True}]}
    with ScriptedServer(routes={**MODELS, "/tokenize": wait}) as server:
        settings = Settings(api_url=server.url, max_requests=1, drain=0.0)
        with LocalStack(settings) as stack, Caller(stack.settings) as caller:
            call = "provider::llamacpp::tokenize"
            failures: list[BusError] = []

            def first() -> None:
                try:
                    caller.call(call, {"content": "a"}, timeout=60.0)
                except BusError as error:
                    failures.append(error)

            thread = threading.Thread(target=first)
            thread.start()
            wait_for(lambda: any(each.path == "/tokenize" for each in server.requests))
            with pytest.raises(BusError, match="provider/rate_limited"):
                caller.call(call, {"content": "b"})
            go.set()
            thread.join(30)
            assert failures[0].message.startswith("provider/upstream: ")
