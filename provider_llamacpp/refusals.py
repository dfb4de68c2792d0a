"""Tells callers that there is no room for them, however many come at once.

A channel is closed some milliseconds after its last frame (engine protocol 7.4). If a thread slept
through them with each caller, the last of a thousand would wait for seconds. So it goes on to the
next one first, and ends the channel when its time has come; only a few wait for that at any time,
so that a crowd does not use up the descriptors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

THREADS = 4
MOST_TOLD = 48
"""Channels at once that have had their last frame and wait for their end."""


class Told(Protocol):
    """The channel of a caller who has been told."""

    def finish(self, *, told: float) -> None: ...


class Refusals:
    """A few threads of their own: a refusal waits for no stream.

    :param name: of the threads
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
        self._told: deque[tuple[float, Told, Callable[[], None]]] = deque()

    def submit(self, work: Callable[..., None], *args: Any) -> None:
        """Run ``work``, which is to :meth:`end` its channel.

        :raises RuntimeError: after :meth:`shutdown`
        """
        self._pool.submit(work, *args)

    def end(self, channel: Told, then: Callable[[], None]) -> None:
        """From ``work``: the last frame is out; finish ``channel`` soon, and call ``then``."""
        self._told.append((time.monotonic(), channel, then))
        if len(self._told) <= MOST_TOLD:
            try:
                # Behind all who have still to be told.
                self._pool.submit(self._end_oldest)
                return
            except RuntimeError:
                pass  # no more is taken in: at once, then
        self._end_oldest()

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Let those end who have been told, and tell nobody else with ``cancel_futures``."""
        self._pool.shutdown(cancel_futures=cancel_futures)
        while self._told:
            self._end_oldest()

    def _end_oldest(self) -> None:
        # One is taken for each that was added: who finds none, was cancelled and caught up with.
        if self._told:
            at, channel, then = self._told.popleft()
            channel.finish(told=at)
            then()
