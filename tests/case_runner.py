"""Replays one case through a running worker.

Around a real :class:`ProviderWorker`: a loopback engine, the official SDK as router and caller,
and a scripted server that answers what the case says. Only time is bent: a script that waits for
longer than :data:`PATIENT` in all is played faster, and with it the worker's ping interval, by
the same factor (:func:`time_factor`).
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from case_checks import LATER_KEYS, problems
from case_seen import Request, Seen
from iii import InvocationError
from iii.channels import build_channel_url
from peers import NOT_FOUND, Exchange, ProxyCounter, ScriptedServer, answer_json
from sdk import Client, FrameLog, Router, Store
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import connect

from provider_llamacpp import ProviderWorker, Settings
from provider_llamacpp.local.engine import LoopbackEngine

Case = dict[str, Any]
Json = dict[str, Any]

CASES = Path(__file__).parent / "cases" / "cases.jsonl"
COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
WAIT = 20.0
"""Seconds for what should come at once: a generous "did it happen at all"."""
PATIENT = 5.0
SHORT = 1.5
"""A script that sleeps for more than ``PATIENT`` seconds is squeezed into this many."""
PING_INTERVAL = Settings().ping_interval
HI = {"role": "user", "content": [{"type": "text", "text": "hi"}], "timestamp": 1}
SAYS_OK = (
    'data: {"choices":[{"index":0,"delta":{"content":"ok"},"finish_reason":null}]}\n\n'
    'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
LISTING = {
    "/v1/models": answer_json({"object": "list", "data": [{"id": "m", "object": "model"}]}),
}
"""What a server answers to discovery where the case says nothing of it: one model, no details."""


def load_cases() -> list[Case]:
    """All cases."""
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


# --- what the case says ----------------------------------------------------------------------


def _tool_names(value: object) -> Iterator[str]:
    """Every ``function_id`` in an ``expect``."""
    if isinstance(value, dict):
        if isinstance(value.get("function_id"), str):
            yield value["function_id"]
        for each in value.values():
            yield from _tool_names(each)
    elif isinstance(value, list):
        for each in value:
            yield from _tool_names(each)


def stream_payload(case: Case) -> Json:
    """The input of the case's stream call, without the channel."""
    call = case["call"] or {}
    tools = [
        {"name": name, "description": "a tool", "parameters": {"type": "object"}}
        for name in dict.fromkeys(_tool_names(case["expect"]))
    ]
    default: Json = {"model": "m", "messages": [HI], **({"tools": tools} if tools else {})}
    payload = {"max_output_tokens": 1024, **call.get("input", default)}
    return {"resolution_key": f"case-{case['id']}", **payload}


def time_factor(upstream: Mapping[str, Any]) -> float:
    """By how much the case's clock is squeezed; 1.0 leaves it alone."""
    waits = sum(step.get("sleep_ms", 0) for step in upstream.get("script", ())) / 1000
    return SHORT / waits if waits > PATIENT else 1.0


class Upstream:
    """The scripted server of a case, and what it saw."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.sent_at: list[float] = []
        self.choose: Callable[[Any], Mapping[str, Any] | None] | None = None
        """Asked first; None leaves the answer to the case."""
        self._answer = self._prepared(answer)
        self.server = ScriptedServer(self._choose)

    def _prepared(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        if "script" not in answer:
            return answer
        factor = time_factor(answer)
        steps: list[Any] = []
        for step in copy.deepcopy(answer["script"]):
            if "sleep_ms" in step:
                step["sleep_ms"] *= factor
            if '"content":"' in step.get("send", "") or '"content": "' in step.get("send", ""):
                steps.append(lambda _exchange: self.sent_at.append(time.monotonic()))
            steps.append(step)
        return {**answer, "script": steps}

    def _choose(self, request: Any) -> Mapping[str, Any]:
        if self.choose is not None and (answer := self.choose(request)) is not None:
            return answer
        if "routes" in self._answer:
            return self._answer
        if request.method == "POST" and request.path in (COMPLETIONS, EMBEDDINGS):
            return self._answer
        return LISTING.get(request.path, NOT_FOUND)

    def exchanges(self) -> list[Exchange]:
        """The connections on which a generation or an embedding was asked for."""
        return [
            each
            for each in self.server.exchanges
            if each.request is not None and each.request.path in (COMPLETIONS, EMBEDDINGS)
        ]

    def wait_for_call(self) -> Exchange:
        """The connection of the call, once its request is in."""
        deadline = time.monotonic() + WAIT
        while not (found := self.exchanges()):
            assert time.monotonic() < deadline, "the server was never asked"
            self.server.wait_requests(len(self.server.requests) + 1, WAIT)
        return found[-1]

    def requests(self) -> list[Request]:
        """Everything the server was asked, as a case looks at it."""
        where = {
            id(each.request): number for number, each in enumerate(list(self.server.exchanges))
        }
        return [
            Request(r.method, r.target, r.headers, r.body, where.get(id(r), -1))
            for r in list(self.server.requests)
        ]


# --- the stage -------------------------------------------------------------------------------


class WireStream(FrameLog):
    """A stream call whose channel is read from the bare socket.

    Not with the SDK's reader: that one obeys proxies of the environment, which some cases set.
    """

    def __init__(self, stage: Stage, payload: Json) -> None:
        super().__init__()
        refs = stage.caller.call("engine::channels::create", {})
        reader = refs["reader"]
        url = build_channel_url(
            stage.engine.url, reader["channel_id"], reader["access_key"], "read"
        )
        self._socket = socket.create_connection((stage.engine.host, stage.engine.port), WAIT)
        self._thread = threading.Thread(target=self._read, args=(url,), name="case-reader")
        self._thread.start()
        self.result = stage.caller.begin(
            "provider::llamacpp::stream", {"writer_ref": refs["writer"], **payload}
        )

    def _read(self, url: str) -> None:
        try:
            # The engine reads nothing from a reader's socket, so it answers no Close.
            with connect(url, sock=self._socket, close_timeout=0.1, max_size=None) as channel:
                for frame in channel:
                    self.take(frame if isinstance(frame, str) else f"a binary frame {frame!r}")
        except (ConnectionClosed, InvalidHandshake):
            pass
        finally:
            self.end()

    def leave(self) -> None:
        """Go away without a word."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT)

    def settle(self) -> tuple[Any, tuple[str, str] | None]:
        """Wait for the end of the call and of its channel; result, or code and message."""
        result, failure = _outcome(self.result)
        if failure is not None:
            self.leave()
        assert self.wait(lambda: self.ended, WAIT), "the channel was not closed"
        self._thread.join(WAIT)
        return result, failure


def _outcome(future: Any) -> tuple[Any, tuple[str, str] | None]:
    try:
        return future.result(WAIT), None
    except InvocationError as error:
        return None, (error.code, error.message)


class Stage:
    """Engine, router, caller, server and worker, for one case."""

    def __init__(
        self, case: Case, home: Path, stack: contextlib.ExitStack, **settings: Any
    ) -> None:
        self.case = case
        call = case["call"] or {}
        answer = case["upstream"] or {
            "headers": {"content-type": "text/event-stream"},
            "body": SAYS_OK,
        }
        # The SDK leaves a note of each client in the home directory; the netrc lies there too.
        stack.enter_context(mock.patch.dict(os.environ, {"HOME": str(home)}))
        if "netrc" in call:
            netrc = home / ".netrc"
            netrc.write_text(call["netrc"], encoding="utf-8")
            netrc.chmod(0o600)
        self.registered: list[tuple[str, str]] = []
        self.upstream = Upstream(answer)
        stack.enter_context(self.upstream.server)
        self.proxy = stack.enter_context(ProxyCounter())
        self.engine = stack.enter_context(LoopbackEngine(on_frame=self._note))
        config: Json = {"api_url": self.upstream.server.url}
        if call.get("credential"):
            config["credential"] = {"type": "api_key", "key": call["credential"]}
        self.router = stack.enter_context(Router(self.engine.url, Store(config=config)))
        self.caller = stack.enter_context(Client(self.engine.url, "case-caller"))
        # Only now the environment: it is the worker's that is on trial, not the SDK's.
        environment = {
            name: value.format(proxy_port=self.proxy.port)
            for name, value in call.get("env", {}).items()
        }
        stack.enter_context(mock.patch.dict(os.environ, environment))
        self.worker = ProviderWorker(
            Settings(
                url=self.engine.url,
                drain=0.0,
                ping_interval=PING_INTERVAL * time_factor(answer),
                **settings,
            )
        )
        self.worker.start()
        stack.callback(self.worker.stop, 0.0)
        self._await_discovery()

    def _note(self, peer: Any, frame: Json) -> None:
        if frame["type"] == "registerfunction":
            self.registered.append((peer.worker_id, frame["id"]))

    def _await_discovery(self) -> None:
        """Until the worker has asked the server what it serves: no case is about that race."""
        assert self.router.wait_for_calls("provider::register", 1, WAIT), "never declared"
        routes = self.upstream.server.wait_requests(1, WAIT)
        answer = self.case["upstream"] or {}
        listing = answer.get("routes", {}).get("/v1/models", {"status": 200})
        if listing["status"] == 200:
            assert self.router.wait_for_calls("models::reconcile", 1, WAIT), routes


# --- the calls -------------------------------------------------------------------------------


def stream_once(stage: Stage) -> Seen:
    """Make the case's stream call, with what it wants done meanwhile."""
    seen, call = Seen(), stage.case["call"] or {}
    stream = WireStream(stage, stream_payload(stage.case))
    if "abort_after_event" in call or "abort_sequence" in call:
        _abort(stage, stream, seen)
    elif "close_channel_after_event" in call:
        assert stream.wait_for(call["close_channel_after_event"], timeout=WAIT)
        seen.aborted_at = time.monotonic()
        stream.leave()
    seen.result, seen.failure = stream.settle()
    seen.active_after = stage.worker.stats()["calls"]
    if "finished" in call.get("abort_sequence", ()):
        seen.abort_results.append(_ask_abort(stage, stream_payload(stage.case), seen))
    if seen.aborted_at is not None:
        exchange = stage.upstream.wait_for_call()
        exchange.client_closed.wait(WAIT)
        seen.upstream_closed_at = exchange.closed_at
    seen.frames, seen.texts, seen.arrivals = stream.frames, stream.texts, stream.arrivals
    seen.ended = stream.ended
    return seen


def _abort(stage: Stage, stream: WireStream, seen: Seen) -> None:
    call, payload = stage.case["call"], stream_payload(stage.case)
    if "abort_after_event" in call:
        assert stream.wait_for(call["abort_after_event"], timeout=WAIT), stream.kinds
        # The case wants the server silent for so long before the abort.
        threading.Event().wait(call.get("abort_delay_ms", 0) / 1000)
        sequence = ["same"]
    else:
        stage.upstream.wait_for_call()
        sequence = [each for each in call["abort_sequence"] if each != "finished"]
    seen.aborted_at = time.monotonic()
    for each in sequence:
        key = payload if each == "same" else {"resolution_key": "nobody knows this one"}
        seen.abort_results.append(_ask_abort(stage, key, seen))
        if len(seen.abort_results) == 1:
            seen.frames_at_abort = len(stream.frames)


def _ask_abort(stage: Stage, payload: Json, seen: Seen) -> bool:
    started = time.monotonic()
    request = {"request_id": payload["resolution_key"]}
    answer = stage.caller.call("provider::llamacpp::abort", request, timeout=WAIT)
    seen.abort_seconds.append(time.monotonic() - started)
    assert set(answer) == {"aborted"}, answer
    return bool(answer["aborted"])


def _plain(stage: Stage, function: str) -> Seen:
    seen = Seen()
    before = len(stage.router.calls["models::reconcile"])
    data = (stage.case["call"] or {}).get("input", {})
    future = stage.caller.begin(f"provider::llamacpp::{function}", data, timeout=WAIT)
    seen.result, seen.failure = _outcome(future)
    told = stage.router.calls["models::reconcile"][before:]
    if told:
        seen.reconciled = told[-1]["models"]
    return seen


def _perform(stage: Stage) -> Seen:
    """The case's call, and whatever else it wants done on the same worker."""
    call, expect = stage.case["call"] or {}, stage.case["expect"]
    function = call.get("fn", "stream")
    before, asked = memory(), len(stage.upstream.server.requests)

    def once() -> Seen:
        return stream_once(stage) if function == "stream" else _plain(stage, function)

    seen = once()
    for _ in range(call.get("repeat", 1) - 1):
        threading.Event().wait(call.get("gap_ms", 0) / 1000)
        seen.later.append(once())
    requests = stage.upstream.requests()
    seen.all_requests = requests
    seen.requests = [r for r in requests[asked:] if r.path in (COMPLETIONS, EMBEDDINGS)]
    seen.rss_growth = memory() - before
    seen.sent_at = stage.upstream.sent_at
    seen.proxy_requests = stage.proxy.requests
    if any(key in expect for key in LATER_KEYS):
        seen.later.append(once())
    return seen


def memory() -> int:
    """The most this process ever held, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- one case --------------------------------------------------------------------------------


def run_case(case: Case, home: Path) -> list[str]:
    """What does not hold in a case, one sentence each; empty if all does.

    :param home: an empty directory that is the home directory for the time of the case
    """
    with contextlib.ExitStack() as stack:
        stage = Stage(case, home, stack)
        found = _judge(case, _perform(stage))
        found += dropped(stage)
    return found


def dropped(stage: Stage) -> list[str]:
    """Whatever a case is about: nobody may have spoken nonsense on the bus."""
    return [f"the engine dropped a frame: {why}" for why in stage.engine.dropped]


def _judge(case: Case, seen: Seen) -> list[str]:
    found = problems(seen, case["expect"], case["id"])
    if seen.failure is not None and not case["expect"].get("call_fails"):
        found.insert(0, f"the call failed: {seen.failure}")
    about_frames = {
        key: value
        for key, value in case["expect"].items()
        if key in ("terminal", "content", "stop_reason", "error_kind", "invariants", "usage")
    }
    for number, later in enumerate(seen.later[: (case["call"] or {}).get("repeat", 1) - 1], 2):
        found += [f"call {number}: {each}" for each in problems(later, about_frames)]
    return found
