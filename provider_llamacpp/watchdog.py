"""Keeps quiet streams alive: a ``ping`` frame once a channel was silent for long enough.

The streams only count their frames; this thread compares the counts once a second, so that the
token path needs no clock and no lock for it (provider protocol 6.5).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .bus.channel import Channel
    from .calls import Call

TICK = 1.0
"""Seconds between two looks at the streams, fewer where pings are wanted that soon."""

log = logging.getLogger(__name__)


class Watched(Protocol):
    """What writes to a caller's channel, or will once that is open."""

    @property
    def call(self) -> Call: ...

    @property
    def channel(self) -> Channel | None: ...


class Watchdog:
    """One thread for all streams.

    :param streams: the running streams, and whatever else writes to a channel
    :param ping_interval: seconds of silence before a ping
    """

    def __init__(self, streams: Callable[[], Iterable[Watched]], ping_interval: float) -> None:
        self._streams = streams
        self._ping_interval = ping_interval
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: dict[int, tuple[int, float]] = {}

    def start(self, name: str) -> None:
        """Start the thread."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def silence(self, number: int, now: float) -> float | None:
        """For how many seconds nothing has gone to the caller of the stream ``number``, a tick more
        or less; None if no tick has seen it yet. From any thread."""
        seen = self._seen.get(number)
        return None if seen is None else max(0.0, now - seen[1])

    def _run(self) -> None:
        tick = min(TICK, self._ping_interval / 4)
        while not self._stop.wait(tick):
            try:
                self.tick(time.monotonic())
            except Exception:
                # A safety net: a watchdog that died would be noticed by nobody.
                log.exception("a watchdog tick failed")

    def tick(self, now: float) -> None:
        """Ping each stream whose frame count has not moved for the interval.

        Silence counts from the acceptance of the call; a ping that cannot be sent at once (the
        caller reads nothing) is tried again at the next tick.
        """
        seen: dict[int, tuple[int, float]] = {}
        for run in self._streams():
            channel = run.channel
            sent = channel.sent if channel is not None else 0
            last, since = self._seen.get(run.call.number, (0, run.call.started))
            if sent != last:
                since = now
            elif channel is not None and now - since >= self._ping_interval and channel.try_ping():
                sent, since = channel.sent, now
            seen[run.call.number] = (sent, since)
        self._seen = seen
