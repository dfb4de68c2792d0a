"""Which calls are in flight, and how one of them is aborted. Read this page to know aborts.

A :class:`Call` is opened before its first blocking step and closed at its end. Whatever it blocks
on, it first says how to wake it (:meth:`Call.interruptible`); an abort records the first reason
and then wakes everything, whatever phase the call is in. Nothing here knows HTTP or WebSocket.

Locks are held for a few lines and never while a wake-up runs.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from .errors import Interrupted, ProviderError

AbortReason = Literal["abort", "consumer gone", "stop"]
"""``abort``: the router asked; ``consumer gone``: the caller left; ``stop``: the worker stops."""

Phase = Literal["accepted", "resolving", "connecting", "waiting", "reading", "ending"]

_SETTINGS = {"stream": "setting max_streams", "request": "setting max_requests"}


class Call:
    """One stream, embedding or count from acceptance to answer.

    :param number: of the call in logs and figures
    :param kind: what it counts as for the limits, see :class:`CallRegistry`
    :param model: as it was asked for
    """

    def __init__(self, number: int, kind: str, *, key: str | None, model: str | None) -> None:
        self.number = number
        self.kind = kind
        self.key = key
        """The request id an abort names: ``resolution_key`` of a stream (provider protocol 7)."""
        self.model = model
        self.phase: Phase = "accepted"
        self.started = time.monotonic()
        self.reason: AbortReason | None = None
        self._wakers: list[Callable[[], None]] = []
        self._settled = False
        self._lock = threading.Lock()

    def abort(self, reason: AbortReason) -> bool:
        """Record ``reason`` if it is the first and wake the call; False if it was aborted before,
        or its end is decided. The last frame of such a call is still waited for if the worker
        stops, and no longer otherwise.

        Never blocks on the call itself: safe from any thread.
        """
        with self._lock:
            settled = self._settled
            if self.reason is not None or (settled and reason == "stop"):
                return False
            if not settled:
                self.reason = reason
            wakers = list(self._wakers)
        for wake in wakers:
            wake()
        return not settled

    def settle(self) -> AbortReason | None:
        """Its end is decided now, by the reason it was aborted for if there is one. Whoever aborts
        it from here on is told that there was nothing to abort."""
        with self._lock:
            self._settled = True
            return self.reason

    def check(self) -> None:
        """:raises Interrupted: if the call was aborted"""
        if self.reason is not None:
            raise Interrupted(self.reason)

    @contextmanager
    def interruptible(self, wake: Callable[[], None]) -> Iterator[None]:
        """While the block runs, an abort calls ``wake`` (from the aborting thread; must not block).

        :raises Interrupted: at entry, if the call was aborted before
        """
        self.add_waker(wake)
        try:
            yield
        finally:
            self.remove_waker(wake)

    def add_waker(self, wake: Callable[[], None]) -> None:
        """Like :meth:`interruptible`, where entry and exit lie in different places."""
        with self._lock:
            if self.reason is None:
                self._wakers.append(wake)
                return
            reason = self.reason
        wake()
        raise Interrupted(reason)

    def remove_waker(self, wake: Callable[[], None]) -> None:
        """Forget ``wake``; unknown ones are ignored."""
        with self._lock:
            if wake in self._wakers:
                self._wakers.remove(wake)


class CallRegistry:
    """All calls in flight of one provider, with a limit for each kind of them.

    :param limits: calls at once, by kind
    :param numbers: numbers for the calls, where several registries must not give the same one;
        taking the next must be atomic, as it is for :func:`itertools.count`
    """

    def __init__(self, limits: dict[str, int], numbers: Iterator[int] | None = None) -> None:
        self._limits = limits
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._closed = False

    def open(self, kind: str, *, key: str | None = None, model: str | None = None) -> Call:
        """Admit a call.

        :raises ProviderError: ``rate_limited`` beyond the limit, ``transient`` while stopping
        """
        with self._lock:
            if self._closed:
                raise ProviderError("transient", "the worker is stopping: try again later")
            running = sum(1 for call in self._calls.values() if call.kind == kind)
            if running >= self._limits[kind]:
                raise ProviderError(
                    "rate_limited",
                    f"{running} {kind} calls are running, the most this worker takes "
                    f"({_SETTINGS.get(kind, 'there is no setting for it')})",
                )
            call = Call(next(self._numbers), kind, key=key, model=model)
            self._calls[call.number] = call
            return call

    def close(self, call: Call) -> None:
        """The call has ended; twice does no harm."""
        with self._lock:
            self._calls.pop(call.number, None)
            if not self._calls:
                self._idle.notify_all()

    def abort(self, key: str, reason: AbortReason = "abort") -> bool:
        """Abort every attempt that runs under ``key``; False if none was there to abort."""
        with self._lock:
            found = [call for call in self._calls.values() if call.key == key]
        # Counted, not any(): any() would stop at the first and leave the other attempts running.
        return sum(call.abort(reason) for call in found) > 0

    def abort_all(self, reason: AbortReason, *, kind: str | None = None) -> None:
        """Abort every call, or every one of ``kind``."""
        for call in self.snapshot():
            if kind in (None, call.kind):
                call.abort(reason)

    def snapshot(self) -> list[Call]:
        """The calls in flight now, oldest first."""
        with self._lock:
            return list(self._calls.values())

    def refuse(self) -> None:
        """Admit no more calls."""
        with self._lock:
            self._closed = True

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no call is left; False if some still run after ``timeout`` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._calls, timeout)
