"""The newest errors of a worker, for whoever asks what went wrong. Logs keep the rest."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MINUTES = 10.0
"""How long an error counts as recent."""
MOST = 50
"""Errors kept; older ones make way."""
_LONGEST = 500
"""Characters of a message that are kept."""


@dataclass(slots=True)
class _Entry:
    at: float
    where: str
    kind: str
    message: str
    count: int = 1


class RecentErrors:
    """Keeps the newest errors; from any thread.

    :param clock: seconds since 1970
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._entries: deque[_Entry] = deque(maxlen=MOST)
        self._lock = threading.Lock()

    def add(self, where: str, kind: str, message: str) -> None:
        """Remember an error. Like the newest one it only raises that one's count: a server that is
        away fails every call in the same words.

        :param where: what failed, for example ``stream 12``
        :param kind: one of the router's kinds, or a code of the bus
        :param message: holds no secrets
        """
        message, now = message[:_LONGEST], self._clock()
        with self._lock:
            last = self._entries[-1] if self._entries else None
            if last is not None and (last.kind, last.message) == (kind, message):
                last.at, last.where, last.count = now, where, last.count + 1
            else:
                self._entries.append(_Entry(now, where, kind, message))

    def facts(self) -> list[dict[str, Any]]:
        """Those of the last :data:`MINUTES`, oldest first: ``at`` (milliseconds since 1970, of the
        last time), ``where``, ``kind``, ``message``, ``count``."""
        since = self._clock() - MINUTES * 60
        with self._lock:
            return [
                {
                    "at": int(each.at * 1000),
                    "where": each.where,
                    "kind": each.kind,
                    "message": each.message,
                    "count": each.count,
                }
                for each in self._entries
                if each.at >= since
            ]
