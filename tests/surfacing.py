"""The functions of ``provider_llamacpp.surfaces`` without a bus: a server at one end, a list of
frames at the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import pytest
from peers import Answers, Request, ScriptedServer

from provider_llamacpp.calls import Call
from provider_llamacpp.errors import BusError, ConsumerGone, InvalidRequest
from provider_llamacpp.runs import Runs
from provider_llamacpp.server.upstream import Target, Upstream
from provider_llamacpp.streaming import OpenChannel
from provider_llamacpp.surfaces.context import Context
from provider_llamacpp.surfaces.outlet import Outlets
from provider_llamacpp.surfaces.table import SURFACES, surface_schemas

SCHEMAS = surface_schemas("llamacpp")
WORK = {surface.name: surface.work for surface in SURFACES}
WRITER = {"channel_id": "c", "access_key": "k", "direction": "write"}


class Channel:
    """Keeps what is sent; a reader who leaves after ``patience`` frames."""

    def __init__(self, patience: int = 1000) -> None:
        self.frames: list[Any] = []
        self.patience = patience
        self.finished = False

    def send(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            if len(self.frames) == self.patience:
                raise ConsumerGone("left")
            self.frames.append(json.loads(frame))

    def finish(self, frames: Sequence[bytes] = ()) -> None:
        assert not self.finished
        self.finished = True
        self.frames += [json.loads(frame) for frame in frames]

    @property
    def text(self) -> str:
        return "".join(frame["text"] for frame in self.frames if frame["type"] == "chunk")


def call_of(key: str | None = None) -> Call:
    return Call(1, "request", key=key, model=None)


def context(
    url: str,
    *,
    router_mode: bool = False,
    tools: tuple[str, ...] = (),
    channel: Channel | None = None,
    runs: Runs | None = None,
    stats: dict[str, Any] | None = None,
) -> Context:
    provider = SimpleNamespace(
        upstream=Upstream(),
        target=lambda call: (Target(url, "sk-1"), 8192),
        catalog=SimpleNamespace(router_mode=router_mode),
        settings=SimpleNamespace(allow_server_tools=tools),
    )
    return Context(
        cast(Any, provider),
        runs or Runs(),
        Outlets(),
        cast(OpenChannel, lambda writer, call: channel),
        lambda: stats or {},
    )


def result_of(name: str, where: Context, data: dict[str, Any], call: Call | None = None) -> Any:
    """What the function returns; request and result fit its schemas."""
    jsonschema.validate(data, SCHEMAS[name]["request_format"])
    result = WORK[name](where, data, call or call_of())
    jsonschema.validate(result, SCHEMAS[name]["response_format"])
    json.dumps(result, allow_nan=False)
    return result


def asked(
    name: str, answer: Answers, data: dict[str, Any], **options: Any
) -> tuple[Any, list[Request]]:
    """The result, and what the server was asked for it."""
    with ScriptedServer(answer) as server:
        result = result_of(name, context(server.url, **options), data)
    return result, server.requests


def failure_of(name: str, answer: Answers, data: dict[str, Any], **options: Any) -> str:
    """The words of the ``invocation_failed`` it ends with."""
    with ScriptedServer(answer) as server, pytest.raises(BusError) as caught:
        WORK[name](context(server.url, **options), data, call_of())
    assert caught.value.code == "invocation_failed"
    return caught.value.message


def refusal_of(name: str, data: object, answer: Answers | None = None, **options: Any) -> str:
    """The words of the ``provider/invalid_request`` it ends with; without an answer the server
    must not be asked at all."""
    with ScriptedServer(answer) as server, pytest.raises(InvalidRequest) as caught:
        WORK[name](context(server.url, **options), data, call_of())
    assert answer is not None or server.requests == []
    return caught.value.message
