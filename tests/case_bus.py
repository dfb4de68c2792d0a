"""The cases about the engine itself: it closes, or it stops reading. Scenes, not single calls.

The steps of a case (``accept``, ``close``, ``stop_reading``, ``invoke``) are played in order; then
each key of ``expect`` is checked, and a key without a check fails the run.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

from case_checks import problems
from case_runner import (
    COMPLETIONS,
    EMBEDDINGS,
    WAIT,
    Case,
    Stage,
    WireStream,
    dropped,
    memory,
    stream_once,
    stream_payload,
)
from case_seen import Seen
from peers import answer_json, wait_for

NAME = "provider-llamacpp"
FUNCTIONS = {
    f"provider::llamacpp::{name}"
    for name in ("stream", "abort", "embed", "count_tokens", "refresh_models", "on_router_ready")
}
ROWS, WIDTH = 32, 2048
"""Of the embeddings; an answer has about 1.2 MB, more than a socket buffers."""
FILL, FLOOD = 48, 20
"""Calls that (at most) fill the worker while the engine does not read, and calls on top of that."""
STEADY = 12 * 2**20
"""Bytes by which those on top may still grow the process: half of what they would hold."""
SETTINGS = {"bus-blocked-peer": {"max_streams": 4, "max_requests": 4}}
QUEUE_LIMIT = 2**20
"""Small limits, so that few calls fill the worker and its bus connection."""


class _Scene:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.reconnected_after: float | None = None
        self.next: Seen | None = None
        self.cut_after: list[float] = []
        """Seconds from each abort to the end of its request, while the engine reads nothing."""
        self.growth: int | None = None
        self._closed_at = 0.0

    # -- steps --------------------------------------------------------------------------------

    def accept(self, _: object) -> None:
        """The worker connects (again)."""
        expected = 1 + (self._closed_at > 0)
        whole = self.stage.engine.wait_until(lambda: len(self.whole()) >= expected, WAIT)
        assert whole, f"connection {expected} was never complete: {self.per_connection()}"
        # So far they have come; now they can be called.
        assert all(self.stage.engine.wait_for_function(each, WAIT) for each in FUNCTIONS)
        if self._closed_at:
            self.reconnected_after = time.monotonic() - self._closed_at

    def close(self, code: int) -> None:
        self._closed_at = time.monotonic()
        self.stage.engine.close_all(code)

    def invoke(self, function: str) -> None:
        assert function == "stream"
        self.next = stream_once(self.stage)

    def stop_reading(self, _: object) -> None:
        """With two streams running, block the worker's socket; flood it; abort; reconnect."""
        stage = self.stage
        stage.upstream.choose = _endless_or_huge
        streams = []
        for number in range(2):
            payload = stream_payload(stage.case) | {"resolution_key": f"blocked-{number}"}
            streams.append(WireStream(stage, payload))
        for stream in streams:
            assert stream.wait_for("text_delta", timeout=WAIT), stream.kinds
        stage.engine.pause_reading(NAME)
        calls = self._flood(FILL, until_full=True)
        before = memory()
        calls += self._flood(FLOOD, until_full=False)
        self.growth = memory() - before
        calls += self._abort_all(len(streams))
        self.reconnect()
        for call in calls:
            call.exception(WAIT)
        for stream in streams:
            stream.settle()

    def _flood(self, most: int, *, until_full: bool) -> list[Future[Any]]:
        """Ask for embeddings, each once the one before is under way, or obviously will not be."""
        stage, calls, idle = self.stage, [], 0
        data = {"model": "m", "input": ["text"] * ROWS}
        while len(calls) < most and not (until_full and idle == 3):
            asked = len(stage.upstream.server.requests)
            calls.append(stage.caller.begin("provider::llamacpp::embed", data))
            try:
                stage.upstream.server.wait_requests(asked + 1, 0.4 if until_full else 0.05)
                idle = 0
            except AssertionError:
                idle += 1
        assert idle, "the worker was never full"
        return calls

    def _abort_all(self, count: int) -> list[Future[Any]]:
        calls = []
        for number in range(count):
            asked = time.monotonic()
            request = {"request_id": f"blocked-{number}"}
            calls.append(self.stage.caller.begin("provider::llamacpp::abort", request))
            # Which connection is whose does not show: one more must have ended.
            wait_for(lambda done=number + 1: len(self._cut_at()) >= done, "the cut", WAIT)
            self.cut_after.append(self._cut_at()[number] - asked)
        return calls

    def _cut_at(self) -> list[float]:
        """When the worker ended its streams' requests, in order."""
        return sorted(
            each.closed_at
            for each in self.stage.upstream.exchanges()
            if each.closed_at is not None
            and each.request is not None
            and each.request.path == COMPLETIONS
        )

    def reconnect(self) -> None:
        """Cut the connection and let the worker come back."""
        self.stage.upstream.choose = None
        self._closed_at = time.monotonic()
        assert self.stage.engine.drop_worker(NAME) == 1
        self.accept(True)
        self.next = stream_once(self.stage)

    # -- facts --------------------------------------------------------------------------------

    def per_connection(self) -> dict[str, Counter[str]]:
        """What the worker registered, by connection."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for connection, function in list(self.stage.registered):
            if function in FUNCTIONS:
                found[connection][function] += 1
        return found

    def whole(self) -> list[str]:
        """Connections on which every function was registered."""
        return [each for each, seen in self.per_connection().items() if set(seen) == FUNCTIONS]


def _endless_or_huge(request: Any) -> Any:
    """A stream that stays silent after its first word, and embeddings of some megabytes."""
    if request.path == COMPLETIONS:
        chunk = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
        return {
            "script": [
                {"headers": {"headers": {"content-type": "text/event-stream"}}},
                {"send": f"data: {json.dumps(chunk)}\n\n"},
                {"hang_ms": 120_000},
            ]
        }
    if request.path == EMBEDDINGS:
        return _huge()
    return None


def _huge() -> Any:
    vector = [0.123456789012345 + number for number in range(WIDTH)]
    data = [{"index": number, "embedding": vector} for number in range(ROWS)]
    return answer_json({"object": "list", "data": data})


# --- checks ----------------------------------------------------------------------------------


def _reconnects_within_ms(scene: _Scene, wanted: float) -> Iterator[str]:
    took = scene.reconnected_after
    if took is None or took * 1000 > wanted:
        yield f"took {took} s"


def _registrations_per_connection(scene: _Scene, wanted: str) -> Iterator[str]:
    assert wanted == "each function exactly once"
    for seen in scene.per_connection().values():
        if set(seen) != FUNCTIONS or set(seen.values()) != {1}:
            yield f"{dict(seen)}"


def _next_call(scene: _Scene, wanted: dict[str, Any]) -> Iterator[str]:
    if scene.next is None:
        yield "it was not made"
    else:
        yield from problems(scene.next, wanted)


def _abort_closes(scene: _Scene, wanted: float) -> Iterator[str]:
    if len(scene.cut_after) != 2:
        yield f"{len(scene.cut_after)} requests were cut"
    yield from (f"after {s * 1000:.0f} ms" for s in scene.cut_after if s * 1000 > wanted)


def _memory_bounded(scene: _Scene, wanted: bool) -> Iterator[str]:
    if wanted and (scene.growth is None or scene.growth > STEADY):
        yield f"a second wave of calls grew the process by {scene.growth} bytes"


def _recovers(scene: _Scene, wanted: bool) -> Iterator[str]:
    yield from _next_call(scene, {"terminal": "done", "content": [{"type": "text", "text": "ok"}]})


_CHECKS: dict[str, Callable[[_Scene, Any], Iterator[str]]] = {
    "reconnects_within_ms": _reconnects_within_ms,
    "registrations_per_connection": _registrations_per_connection,
    "next_call": _next_call,
    "abort_upstream_closed_within_ms": _abort_closes,
    "memory_bounded": _memory_bounded,
    "worker_recovers_after_reconnect": _recovers,
}


def run_bus_case(case: Case, home: Path) -> list[str]:
    """What does not hold in a bus case, one sentence each; empty if all does."""
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("provider_llamacpp.bus.session.QUEUE_LIMIT", QUEUE_LIMIT))
        stage = Stage(case, home, stack, **SETTINGS.get(case["id"], {}))
        scene = _Scene(stage)
        for step in case["call"]["bus"]:
            ((name, argument),) = step.items()
            getattr(scene, name)(argument)
        for key, wanted in case["expect"].items():
            found += [f"{key}: {word}" for word in _CHECKS[key](scene, wanted)]
        found += dropped(stage)
    return found
