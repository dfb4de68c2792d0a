"""One chat through the loopback router: attempts, relay, retries, abort (provider protocol 11)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from .. import jsontext
from ..cutting import cut_off
from ..errors import BusError
from .client import BusClient
from .events import CODES, RETRYABLE, TERMINALS, Accumulator, read_frame

Json = dict[str, Any]
Sink = Callable[[str], None]
"""Takes a frame for the caller; raises ConnectionClosed when the caller is gone."""

FAILURE_GRACE = 0.25
"""Seconds between the failure of a stream call and giving up on its channel, and the reverse."""


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """The router's settings (provider protocol 11); times in seconds."""

    stream_timeout: float = 300.0
    idle_timeout: float = 120.0
    retry_max: int = 2
    retry_delay: float = 0.5
    """Doubled with each retry, up to 8 s; the upper half is random on top."""
    capacity: int = 64
    """Provider calls at once; one that has not returned counts, whatever its channel did."""
    fat_only: bool = False
    """Skip deltas without ``partial``, as routers of before the slim ones do."""


@dataclass
class Slots:
    """Provider calls in flight. Thread-safe."""

    capacity: int
    taken: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> None:
        """:raises BusError: ``router/capacity_exceeded``"""
        with self.lock:
            if self.taken >= self.capacity:
                raise BusError("router/capacity_exceeded", f"{self.capacity} calls are running")
            self.taken += 1

    def release(self, _: object = None) -> None:
        """Give one back; fits ``Future.add_done_callback``."""
        with self.lock:
            self.taken -= 1


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How an attempt ended. Without a frame the caller still has to be told."""

    frame: Json | None
    code: str | None = None
    message: str = ""
    retry: bool = False
    relayed: bool = False
    """The terminal frame already went to the caller."""


class Chat:
    """One ``router::chat`` or ``router::complete``. ``run`` belongs to one thread."""

    def __init__(
        self,
        client: BusClient,
        provider: str,
        payload: Json,
        *,
        settings: RelaySettings,
        slots: Slots,
        sink: Sink,
        on_skipped: Callable[[str], None],
        on_available: Callable[[str, bool], None],
    ) -> None:
        self._client = client
        self._provider = provider
        self._payload = payload
        self._settings = settings
        self._slots = slots
        self._sink = sink
        self._on_skipped = on_skipped
        self._on_available = on_available
        self._lock = threading.Lock()
        self._reader: ClientConnection | None = None
        self._aborted = threading.Event()
        self._seen = Accumulator(provider, payload["model"])

    def abort(self) -> None:
        """End the chat; the caller gets a ``done`` that says so. From any thread."""
        self._aborted.set()
        with self._lock:
            reader = self._reader
        if reader is not None:
            cut_off(reader.socket)
        # Detached: nobody waits for the provider's answer.
        request = {"request_id": self._payload["resolution_key"]}
        self._client.begin(f"provider::{self._provider}::abort", request)

    def run(self) -> Json:
        """The whole chat; the ChatResponse, with ``message`` if there is one."""
        deadline = time.monotonic() + self._settings.stream_timeout
        delay = self._settings.retry_delay
        attempt = 0
        try:
            while True:
                outcome = self._attempt(deadline)
                if not outcome.retry or attempt >= self._settings.retry_max:
                    break
                attempt += 1
                self._aborted.wait(min(delay, 8.0) * (1 + random.random()))
                delay *= 2
            return self._conclude(outcome)
        except ConnectionClosed:
            return self._response(
                _Outcome(None, "router/stream_incomplete", "the caller left the channel")
            )

    # --- one attempt ---------------------------------------------------------------------------

    def _attempt(self, deadline: float) -> _Outcome:
        self._seen = Accumulator(self._provider, self._payload["model"])
        if self._aborted.is_set():
            return self._cut_short()
        self._slots.take()
        try:
            made = self._client.invoke("engine::channels::create", {"buffer_size": 64})
            reader = self._client.open_channel(made["reader"], "read")
        except BusError as error:
            self._slots.release()
            return _Outcome(None, "router/stream_setup_failed", str(error))
        with reader:  # closed at the first terminal, without waiting for the provider's return
            with self._lock:
                self._reader = reader
            if self._aborted.is_set():
                self._slots.release()
                return self._cut_short()
            call = self._client.begin(
                f"provider::{self._provider}::stream",
                {**self._payload, "writer_ref": made["writer"]},
            )
            call.add_done_callback(self._slots.release)
            call.add_done_callback(lambda done: _give_up_later(done, reader))
            try:
                return self._relay(reader, call, deadline)
            finally:
                with self._lock:
                    self._reader = None

    def _relay(self, reader: ClientConnection, call: Future[Any], deadline: float) -> _Outcome:
        seen = self._seen
        quiet = time.monotonic() + self._settings.idle_timeout
        while True:
            try:
                text = reader.recv(max(0.0, min(quiet, deadline) - time.monotonic()))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    message = "the stream took too long"
                    return _Outcome(None, "router/stream_incomplete", message)
                return _Outcome(None, "router/stream_idle_timeout", "the provider fell silent")
            except ConnectionClosed:
                return self._cut_short() if self._aborted.is_set() else self._ended(call)
            frame = read_frame(text, fat_only=self._settings.fat_only)
            if frame is None:
                self._on_skipped(str(text))
                continue
            if not seen.content or frame["type"] != "ping":
                quiet = time.monotonic() + self._settings.idle_timeout
            fresh = not seen.content
            seen.add(frame)
            if frame["type"] == "error" and fresh:
                retry = frame["error"].get("error_kind") in RETRYABLE
                return _Outcome(frame, retry=retry)
            self._sink(str(text))
            if frame["type"] in TERMINALS:
                return _Outcome(frame, relayed=True)

    def _cut_short(self) -> _Outcome:
        return _Outcome(self._seen.aborted())

    def _ended(self, call: Future[Any]) -> _Outcome:
        """The channel ended without a terminal: what the stream call says about it."""
        try:
            error = call.exception(FAILURE_GRACE)
        except FutureTimeout:
            error = None
        if isinstance(error, BusError):
            if error.code == "provider/invalid_request" or error.code.startswith("router/"):
                return _Outcome(None, "router/provider_rejected", error.message)
            if error.code == "function_not_found":
                self._on_available(self._provider, False)
                return _Outcome(None, "router/provider_unavailable", error.message)
        message = f"the provider ended without a terminal ({error or 'no reason given'})"
        return _Outcome(None, "router/stream_incomplete", message, retry=not self._seen.content)

    # --- the end -------------------------------------------------------------------------------

    def _conclude(self, outcome: _Outcome) -> Json:
        if outcome.frame is None:
            self._sink(jsontext.dumps(self._seen.failed(outcome.message)))
        elif not outcome.relayed:
            self._sink(jsontext.dumps(outcome.frame))
        return self._response(outcome)

    def _response(self, outcome: _Outcome) -> Json:
        frame = outcome.frame or {}
        message = frame.get("message") or frame.get("error")
        answer: Json = {
            "ok": frame.get("type") == "done",
            "provider": self._provider,
            "model": self._payload["model"],
        }
        usage = (message or {}).get("usage") or self._seen.usage
        if usage is not None:
            answer["usage"] = usage
        if message is not None:
            answer["message"] = message
            answer["stop_reason"] = message["stop_reason"]
        if frame.get("type") == "error":
            kind = frame["error"].get("error_kind", "permanent")
            text = frame["error"].get("error_message", "")
            answer["error"] = {"code": CODES.get(kind, CODES["permanent"]), "message": text}
            answer["error"] |= {"kind": kind, "retryable": kind in RETRYABLE}
        elif outcome.code is not None:
            answer["error"] = {"code": outcome.code, "message": outcome.message}
        if answer["ok"]:
            self._on_available(self._provider, True)
        return answer


def _give_up_later(call: Future[Any], reader: ClientConnection) -> None:
    """A failed call need not have opened its channel, whose end would then never come."""
    if call.exception() is not None:
        timer = threading.Timer(FAILURE_GRACE, cut_off, (reader.socket,))
        timer.daemon = True
        timer.start()
