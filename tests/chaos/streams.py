"""One stream as its caller sees it, and what the laws say to that."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from laws import violations
from websockets.exceptions import ConnectionClosed

from provider_llamacpp.errors import BusError
from provider_llamacpp.local.client import BusClient

from .schedule import ENDLESS, StreamPlan, expected

PATIENCE = 30.0
"""Seconds after which a stream that has not ended breaks the law."""
OVER = 2.0
"""Seconds without a frame after the call's result, until it is asked whether a writer came."""
_NOT_SERVED = ("function_not_found", "disconnected", "channel_unavailable")

_CUT = ("stays open", "start comes alone")
"""What the laws say of frames that end in the middle, as they do after an abort."""
_SURE = ("none", "stall_before", "stall_headers", "stall_event", "drip", "flood")
"""What a server may do and still be heard out."""
_KINDS = {
    "http_503": "transient",
    "http_500": "transient",
    "http_429": "rate_limited",
    "http_401": "auth_expired",
    "page": "permanent",
    "refuse_after_request": "transient",
    "close_before": "transient",
    "reset_headers": "transient",
}


@dataclass
class Trouble:
    """What happened to all, and when; ``until`` is None while it lasts."""

    kind: str
    since: float
    until: float | None = None


CHANNEL_LOST = {"engine_killed", "engine_closed", "half_open", "channels_cut", "worker_terminated"}
BUS_LOST = CHANNEL_LOST - {"channels_cut"} | {"bus_cut", "bus_reset", "engine_stops_reading"}
BUS_LOST |= {"state_missing", "bus_silent"}
ABORTED = {"abort_storm"}


@dataclass
class Seen:
    """One stream."""

    plan: StreamPlan
    started: float = 0.0
    ended: float = 0.0
    frames: list[str] = field(default_factory=list)
    closed: bool = False
    left: bool = False
    result: Any = None
    failure: BusError | None = None
    hung: bool = False
    unclosed: bool = False
    """The call was answered, and its channel had no end."""
    aborts: list[bool] = field(default_factory=list)
    abort_seconds: list[float] = field(default_factory=list)
    tries: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return [json.loads(frame)["type"] for frame in self.frames]


@dataclass(frozen=True)
class Reading:
    """What the caller of a stream holds of it.

    :ivar key: its request id
    :ivar future: the call's result
    :ivar stop: the run is to end
    """

    channel: Any
    writer: Any
    key: str
    future: Future[Any]
    stop: threading.Event


class Caller:
    """Makes streams over one bus connection. :meth:`run` is called from many threads.

    :param provider: its id
    """

    def __init__(self, client: BusClient, provider: str, payload: Callable[[StreamPlan], Any]):
        self._client = client
        self._provider = provider
        self._payload = payload
        self.on_leave: Callable[[], None] = lambda: None
        """Called when a caller leaves, just before."""
        self.running: dict[int, str] = {}
        """The request ids of streams that run, by number."""

    def run(self, plan: StreamPlan, stop: threading.Event) -> Seen:
        """Make the stream; again, as long as nobody serves it."""
        seen = Seen(plan)
        give_up = time.monotonic() + PATIENCE
        while not stop.is_set():
            seen.started = time.monotonic()
            seen.tries += 1
            try:
                if self._once(seen, stop):
                    break
            except BusError as error:
                seen.failure = error
            if time.monotonic() > give_up:
                seen.notes.append(f"not served for {PATIENCE:g} s: {seen.failure}")
                break
            stop.wait(0.05)
        seen.ended = time.monotonic()
        return seen

    def _once(self, seen: Seen, stop: threading.Event) -> bool:
        plan, client = seen.plan, self._client
        seen.frames, seen.failure, seen.aborts = [], None, []
        seen.closed = seen.unclosed = False
        made = client.invoke("engine::channels::create", {}, timeout=5.0)
        writer = dict(made["writer"])
        if plan.caller == "wrong_key":
            writer["access_key"] = "wrong"
        key = f"r{plan.number}"
        payload = {"writer_ref": writer, "resolution_key": key, **self._payload(plan)}
        if plan.caller == "invalid":
            payload["messages"] = "none"
        with client.open_channel(made["reader"], "read") as channel:
            self.running[plan.number] = key
            try:
                future = client.begin(f"provider::{self._provider}::stream", payload)
                if plan.caller not in ("wrong_key", "invalid"):
                    reading = Reading(channel, made["writer"], key, future, stop)
                    self._read(seen, reading)
                self._await(seen, future)
            finally:
                self.running.pop(plan.number, None)
                if not seen.frames:
                    self._take_writer(made["writer"])
        failed = seen.failure
        return failed is None or bool(seen.frames) or failed.code not in _NOT_SERVED

    def _take_writer(self, writer: Any) -> None:
        """End a channel whose writer never came: an engine keeps it for minutes (engine protocol
        7.6)."""
        try:
            with self._client.open_channel(writer, "write"):
                pass
        except BusError:
            pass  # it came

    def _read(self, seen: Seen, reading: Reading) -> None:
        plan, channel, future = seen.plan, reading.channel, reading.future
        deadline = seen.started + PATIENCE
        act_at: float | None = seen.started + plan.delay
        if plan.caller in ("reads", "slow"):
            act_at = None
        over_at: float | None = None
        asked = False
        if plan.caller == "leaves_at_once":
            self._act(seen, reading)
            return
        while True:
            now = time.monotonic()
            if act_at is not None and (len(seen.frames) >= plan.after or now >= act_at):
                act_at = None
                self._act(seen, reading)
                if seen.left:
                    return
            if now > deadline:
                seen.hung, seen.unclosed = True, future.done()
                return
            wait = 0.25 if act_at is None else max(0.001, min(0.25, act_at - now))
            try:
                frame = channel.recv(timeout=wait)
            except TimeoutError:
                # Whoever was not served, or aborted before the channel was dialled, gets no end,
                # unless we make one. If a writer came there is an end, however late.
                if over_at is None and future.done():
                    over_at = now + _patience(future.exception())
                if not (seen.frames or asked) and over_at is not None and now > over_at:
                    asked = True
                    self._take_writer(reading.writer)
                continue
            except ConnectionClosed:
                seen.closed = True
                return
            seen.frames.append(frame if isinstance(frame, str) else repr(frame))
            if plan.caller == "slow" and len(seen.frames) % 10 == 0:
                reading.stop.wait(0.01)

    def _act(self, seen: Seen, reading: Reading) -> None:
        caller, channel, key = seen.plan.caller, reading.channel, reading.key
        if caller in ("aborts", "aborts_twice"):
            for _ in range(1 if caller == "aborts" else 2):
                # An abort that did not arrive is made again: where the bus is lost the stream goes
                # on, and one without an end would go on for ever.
                give_up = time.monotonic() + PATIENCE / 2
                while not self._abort(seen, key) and time.monotonic() < give_up:
                    if reading.stop.wait(0.05):
                        break
        elif caller in ("leaves", "leaves_at_once"):
            seen.left = True
            self.on_leave()
            if seen.plan.number % 2:
                channel.socket.close()
            else:
                channel.close()
        elif caller == "stalls":
            # Until it is given up. It must be: nobody else ends this.
            with contextlib.suppress(FutureTimeout):
                reading.future.exception(PATIENCE)

    def _abort(self, seen: Seen, key: str) -> bool:
        """Whether it was answered."""
        began = time.monotonic()
        try:
            answer = self._client.invoke(
                f"provider::{self._provider}::abort", {"request_id": key}, timeout=5.0
            )
        except BusError as error:
            seen.notes.append(f"abort: {error.code}")
            return False
        seen.aborts.append(answer["aborted"])
        seen.abort_seconds.append(time.monotonic() - began)
        return True

    def _await(self, seen: Seen, future: Any) -> None:
        try:
            seen.result = future.result(PATIENCE)
        except BusError as error:
            seen.failure = error
        except FutureTimeout:
            seen.hung = True


def _patience(failure: BaseException | None) -> float:
    """How long frames may still come after a call that was answered so."""
    if failure is None:
        return OVER
    # Where its bus went, the stream goes on.
    stopped = isinstance(failure, BusError) and failure.code == "invocation_stopped"
    return PATIENCE / 3 if stopped else 0.0


def judge(
    seen: Seen, troubles: Sequence[Trouble], *, maybe_cut: bool, said: dict[str, Any] | None = None
) -> list[str]:
    """What of the laws the stream broke, one sentence each.

    :param maybe_cut: the connection to the server may have been cut
    :param said: what the server says if nothing goes wrong; None takes the scripted answer
    """
    plan = seen.plan
    met = {
        each.kind
        for each in troubles
        if each.since <= seen.ended and (each.until is None or each.until >= seen.started)
    }
    found: list[str] = [note for note in seen.notes if note.startswith("not served")]
    if found:
        return found
    if seen.unclosed:
        return [f"the call was answered, its channel not closed in {PATIENCE:g} s"]
    if seen.hung:
        return [f"the stream or its result did not end in {PATIENCE:g} s"]
    found += _result(seen, met)
    if plan.caller in ("wrong_key", "invalid"):
        if seen.frames:
            found.append(f"frames, though nobody may get any: {seen.kinds}")
        return found
    kinds = seen.kinds
    terminal = bool({"done", "error"} & set(kinds))
    may_lack = seen.left or True in seen.aborts or bool(met & (CHANNEL_LOST | ABORTED))
    may_lack = may_lack or plan.caller == "stalls" or seen.failure is not None
    if seen.frames or not may_lack:
        broken = violations(seen.frames, terminal=terminal)
        found += broken if terminal else [each for each in broken if not each.endswith(_CUT)]
    if not terminal and not may_lack:
        found.append(f"no terminal frame: {kinds[-3:]}")
    if terminal and True in seen.aborts and plan.server in ENDLESS and not met:
        found.append("a terminal frame after an abort")
    if seen.aborts.count(True) and plan.server in ENDLESS and seen.aborts[0] is not True:
        found.append(f"the first abort found nothing: {seen.aborts}")
    found += _content(seen, said or expected(plan))
    sure = not met and not maybe_cut and plan.server in _SURE
    if terminal and sure and plan.caller in ("reads", "slow") and kinds[-1] != "done":
        found.append(f"failed for no reason: {seen.frames[-1][:300]}")
    wanted = _KINDS.get(plan.server)
    if terminal and wanted and not met and not maybe_cut and kinds[-1] == "error":
        kind = json.loads(seen.frames[-1])["error"]["error_kind"]
        if kind != wanted:
            found.append(f"{plan.server} became {kind}, not {wanted}")
    return found


def _result(seen: Seen, met: set[str]) -> list[str]:
    failure = seen.failure
    if seen.plan.caller == "invalid":
        if failure is None or (failure.code != "provider/invalid_request" and not met & BUS_LOST):
            return [f"an invalid payload was answered with {failure or seen.result}"]
        return []
    if failure is not None:
        return [] if met & BUS_LOST else [f"the call failed: {failure}"]
    return [] if seen.result == {"ok": True} else [f"the call's result is {seen.result!r}"]


def _content(seen: Seen, said: dict[str, Any]) -> list[str]:
    """No token twice, none lost: what came is a beginning of what was said, all of it if done."""
    texts = {"text": "", "thinking": ""}
    calls: dict[str, str] = {}
    done = False
    for text in seen.frames:
        frame = json.loads(text)
        kind = frame["type"]
        if kind in ("text_delta", "thinking_delta"):
            texts[kind[:-6]] += frame["delta"]
        elif kind == "functioncall_delta":
            calls[frame["id"]] = calls.get(frame["id"], "") + frame["delta"]
        # One without end is cut at the limit of tokens, if nobody is faster.
        done = done or (kind == "done" and seen.plan.server not in ENDLESS)
    found = []
    for name, got in texts.items():
        whole = "".join(said[name])
        if not whole.startswith(got) or (done and got != whole):
            found.append(f"{name}: {len(got)} characters came of {len(whole)}, or others")
    for number, pieces in enumerate(said["calls"]):
        whole, got = "".join(pieces), calls.pop(f"c{number}", "")
        if not whole.startswith(got) or (done and got != whole):
            found.append(f"call {number}: {got!r} of {whole!r}")
    if calls:
        found.append(f"calls that nobody made: {sorted(calls)}")
    return found
