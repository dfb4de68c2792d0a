"""Streams that are to stop although nobody reads them any more (llama-server API 11).

A request that named an id goes on when its connection is closed. A DELETE stops it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from urllib.parse import quote

from ..errors import ProviderError
from .address import Target
from .upstream import Upstream

STREAM = "/v1/stream"
DISCARD_SECONDS = 1.5
"""How long the end of a call may wait for the server to hear of it. A stop waits two."""
DISCARD_PATIENCE = 60.0
"""How long it is tried behind the call's back, where the server could not be reached."""
TIMES_UNSURE = 5
"""How often it is said where the request itself may arrive later than that."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
"""Seconds between two tries."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Discard:
    target: Target
    conversation: str
    times: int
    until: float


class Discards:
    """Tells servers that nobody reads a stream any more: then they stop generating.

    A server that cannot be reached is tried again on a thread that lives as long as there is
    something to try. Safe to share between threads.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._waiting: list[_Discard] = []
        self._running = False
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def discard(self, target: Target, conversation: str, *, times: int = 1) -> None:
        """Have ``target`` stop and forget ``conversation``. Takes :data:`DISCARD_SECONDS` at most;
        raises nothing.

        :param times: tell it so often, all but the first behind the call's back
        """
        each = _Discard(target, conversation, times, time.monotonic() + DISCARD_PATIENCE)
        if self._is_over(each) or self._closed.is_set():
            return
        with self._lock:
            self._waiting.append(each)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._keep_trying, name="llamacpp-discards", daemon=True).start()

    def close(self) -> None:
        """Try no more."""
        self._closed.set()

    def _is_over(self, each: _Discard) -> bool:
        """Tell the server; whether it heard of it as often as it was to, or has no wish to."""
        path = stream_path(each.conversation)
        try:
            reply = self._upstream.request(each.target, "DELETE", path, timeout=DISCARD_SECONDS)
        except ProviderError as error:
            log.debug("%s was not told to stop a stream: %s", each.target.root, error)
            return False
        if not passing(reply.status):
            each.times -= 1
        return each.times <= 0

    def _keep_trying(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            self._closed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            with self._lock:
                todo = list(self._waiting)
            done = [
                each
                for each in todo
                if self._closed.is_set() or time.monotonic() > each.until or self._is_over(each)
            ]
            with self._lock:
                self._waiting = [each for each in self._waiting if each not in done]
                if not self._waiting:
                    self._running = False
                    return


def stream_path(conversation: str) -> str:
    """Path and query of one stream; the id may hold the name of a model, and that slashes."""
    return f"{STREAM}?conv_id={quote(conversation, safe='')}"


def passing(status: int | None) -> bool:
    """Whether the same request may fare better soon."""
    return status is None or status in (408, 429) or status >= 500
