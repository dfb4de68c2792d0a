"""Tells callers that there is no room for them, however many come at once.

A channel is closed some milliseconds after its last frame (engine protocol 7.4). If a thread slept
through them with each caller, the last of a thousand would wait for seconds. So it goes on to the
next one first, and ends the channel when its time has come; only a few wait for that at any time,
so that a crowd does not use up the descriptors.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from .answers import assembler_for, last_frames
from .errors import ConsumerGone, Interrupted, ProviderError
from .transcript.convert import Abilities

if TYPE_CHECKING:
    from .bus.channel import Channel
    from .calls import Call
    from .payloads import StreamRequest
    from .streaming import OpenChannel

THREADS = 4
"""That dial the callers to be told: a caller who is slow to answer holds up only one of them."""
MOST_TOLD = 48
"""Channels at once that have had their last frame and wait for their end."""

log = logging.getLogger(__name__)


def refuse(
    open_channel: OpenChannel,
    request: StreamRequest,
    call: Call,
    error: ProviderError,
    provider: str,
) -> Channel | None:
    """Tell a caller that was not admitted, with one ``error`` frame.

    :returns: the channel, which is still to be finished; None if there is none
    """
    assembler = assembler_for(request, provider, Abilities())
    try:
        channel = open_channel(request.writer, call)
    except (ConsumerGone, Interrupted, ProviderError) as failure:
        log.debug("a refused caller could not be told: %s", failure)
        return None
    try:
        channel.send(last_frames(assembler, call, error, None)[0])
    except (ConsumerGone, ProviderError) as failure:
        log.debug("a refused caller could not be told: %s", failure)
    return channel


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
