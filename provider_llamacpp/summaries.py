"""What is told of each call once it is over, to whoever wants to know.

Observers are called on one thread of their own, so that a slow one holds up neither a call nor the
place it takes. Without observers there is no such thread, and nothing is put together.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

MOST = 1000
"""Summaries that wait for an observer; what comes beyond is dropped."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallSummary:
    """How one call of a worker went. Holds no text of it and no secrets.

    Calls are the streams and the short functions that ask a server; ``abort``, ``status`` and
    ``on_router_ready`` ask nobody and are not among them. Durations are seconds. None is what was
    not reached, or what nobody said.
    """

    provider: str
    """Our provider id."""
    number: int
    """Of the call, as in the log and in ``stats()``; 0 of one that was not admitted."""
    function: str
    """The last part of the function's id: ``stream``, ``embed``, ``count_tokens``, ..."""
    outcome: str
    """Of a stream as in ``stats()["outcomes"]``: the stop reason (``end``, ``length``,
    ``function_call``), ``abort``, ``consumer gone``, ``stop``, ``invalid request``, ``refused``, or
    the kind of the error. Of others ``done``, ``failed``, or one of these reasons."""
    started_at: float
    """Seconds since 1970."""
    seconds: float
    """From its acceptance to its end."""
    request_id: str | None = None
    """``resolution_key`` of a stream: the same for all tries of one request."""
    model: str | None = None
    """As it was asked for."""
    waiting: float | None = None
    """Until the server began: resolving, connecting, and its queue for a slot or a model."""
    prompt: float | None = None
    """From there to the first token."""
    generating: float | None = None
    """From there to the end."""
    prompt_tokens: int | None = None
    """Those from the server's cache included (``usage.input``, provider protocol 6.1)."""
    cached_tokens: int | None = None
    """Of these, from the cache (``usage.cache_read``)."""
    tokens: int | None = None
    """Of the answer; as the server counted them once it said so, till then one for each delta."""
    tokens_per_second: float | None = None
    """From the first token on; None for an answer of fewer than two."""
    error_kind: str | None = None
    """Of a stream the router's kind (provider protocol 6.4), of others the bus's code (10)."""
    error: str | None = field(default=None, repr=False)
    """In words."""
    traceparent: str | None = None
    """The caller's place in its trace, as W3C Trace Context writes it."""

    @property
    def trace_id(self) -> str | None:
        """Of ``traceparent``: 32 hexadecimal digits."""
        found = _TRACEPARENT.fullmatch(self.traceparent or "")
        return found[1] if found else None


Observer: TypeAlias = Callable[[CallSummary], None]


def wall_clock(monotonic: float) -> float:
    """Seconds since 1970 for a moment of ``time.monotonic()``."""
    return time.time() - (time.monotonic() - monotonic)


class Reporter:
    """Tells observers, one summary after the other, on a thread of its own.

    :param name: of the thread
    """

    def __init__(self, observers: Sequence[Observer], name: str) -> None:
        self._observers = observers
        self._name = name
        self._waiting: deque[CallSummary] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def tell(self, summary: CallSummary) -> None:
        """Have ``summary`` told. Returns at once, from any thread."""
        with self._changed:
            if len(self._waiting) < MOST:
                self._waiting.append(summary)
                self._changed.notify()
                return
            self._dropped += 1
            first = self._dropped == 1
        if first:
            log.warning("observers of calls are too slow: more than %d calls wait for them", MOST)

    def stop(self, timeout: float) -> None:
        """Tell what waits, for ``timeout`` seconds at most, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            log.warning("an observer of calls did not return within %g s", timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                summary = self._waiting.popleft()
            for observer in self._observers:
                try:
                    observer(summary)
                except Exception:
                    log.exception("an observer of calls failed")
