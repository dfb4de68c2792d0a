"""One bus connection after its handshake: what goes out, what comes in, and when it is dead.

One thread (:meth:`Session.run`) waits for the socket in both directions and blocks on neither.
Other threads send straight to the socket while nothing waits to go out, which is nearly always;
else they queue, and that thread sends on. So an engine that stops reading holds up nobody who must
not wait:

* the running thread itself always queues: an abort is read, carried out and answered;
* other threads wait for room once :data:`QUEUE_LIMIT` bytes are queued: memory is bounded;
* an engine that takes nothing for ``send_timeout`` seconds, or makes the running thread queue more
  than :data:`OWN_LIMIT`, loses the connection, and serving begins anew on the next one.

It knows frames and no message of the bus.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..errors import ProviderLlamacppError
from . import frames
from .link import Link, LinkError
from .waiting import Waker

MAX_MESSAGE = 64 * 1024**2
"""Bytes of one message in either direction (engine protocol 1.4)."""
ENVELOPE = 64 * 1024
"""What the engine may add to a message of that size on its way to us."""
QUEUE_LIMIT = 16 * 1024**2
"""Queued bytes from which on other threads wait; a longer message goes when nothing is queued."""
OWN_LIMIT = 4 * 1024**2
"""Bytes the running thread may queue behind what does not move."""
CLOSE_WAIT = 1.0
"""Seconds for the engine to answer our Close."""
_READS = 16
"""Reads in one go before the clock is looked at again."""

log = logging.getLogger(__name__)


class SessionOver(ProviderLlamacppError):
    """The connection is gone, or is being closed."""


class Session:
    """The connection ``link`` from its first message to its end.

    :param first: messages that go out before any other, already framed
    :param clock: seconds, monotonic
    """

    def __init__(
        self,
        link: Link,
        waker: Waker,
        first: Sequence[bytes] = (),
        *,
        ping_interval: float = 20.0,
        silence_limit: float = 60.0,
        send_timeout: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._waker = waker
        self._ping_interval = ping_interval
        self._silence_limit = silence_limit
        self._send_timeout = send_timeout
        self._clock = clock
        self._reader = frames.FrameReader(MAX_MESSAGE + ENVELOPE)
        self._runner: int | None = None
        now = clock()
        self._heard = self._looked = now
        """When something came, and when it was last looked whether something had come."""
        self._asked: float | None = None
        """When the first ping went out behind which nothing was heard yet."""
        self._next_ping = now + ping_interval
        self._changed = threading.Condition()
        """Guards all below, and tells those who wait for room. Held for moments only."""
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._own = 0
        """Bytes the running thread added since the queue was last empty."""
        self._moved = now
        """When the queue last moved, or began."""
        self._end: str | None = None
        """Why it is over, once it is."""
        self._close_by: float | None = None
        self._enqueue(first)

    # -- from any thread ------------------------------------------------------------------

    def post(
        self, parts: Sequence[bytes], *, wait: float, given_up: Callable[[], bool] = bool
    ) -> None:
        """Send the frames of one message, or queue them; nothing comes between them.

        :param wait: seconds to wait for room; the running thread never waits
        :param given_up: asked after each :meth:`nudge`; True ends the wait
        :raises SessionOver: if the connection is gone or being closed
        :raises TimeoutError: if there was no room in time, or ``given_up``
        """
        size = sum(len(each) for each in parts)
        own = threading.get_ident() == self._runner
        with self._changed:
            if own:
                self._own += size
                if self._queue and self._own > OWN_LIMIT:
                    self._set_end("the engine sends but reads nothing")
            else:
                self._changed.wait_for(lambda: self._may_post(size) or given_up(), wait)
            if self._end is not None or self._close_by is not None:
                raise SessionOver(self._end or "closing")
            if not own and not self._may_post(size):
                raise TimeoutError
            self._enqueue(parts)
            self._flush()
            left = self._queue or self._end is not None
        if left and not own:
            self._waker.wake()

    def nudge(self) -> None:
        """Have those who wait for room ask ``given_up`` again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Send what is queued, then a Close, and end when that is answered; does not wait."""
        with self._changed:
            if self._close_by is None and self._end is None:
                self._close_by = self._clock() + CLOSE_WAIT
                self._enqueue([frames.close_frame(os.urandom(4))])
        self._waker.wake()

    def end(self, reason: str) -> None:
        """End it at once; the first reason stays."""
        with self._changed:
            self._set_end(reason)
        self._waker.wake()

    # -- under the lock -------------------------------------------------------------------

    def _may_post(self, size: int) -> bool:
        over = self._end is not None or self._close_by is not None
        return over or not self._queue or self._queued + size <= QUEUE_LIMIT

    def _set_end(self, reason: str) -> None:
        self._end = self._end or reason
        self._changed.notify_all()

    def _enqueue(self, parts: Sequence[bytes]) -> None:
        if not self._queue:
            self._moved = self._clock()
        for part in parts:
            self._queue.append(memoryview(part))
            self._queued += len(part)

    def _flush(self) -> None:
        """Send as much of the queue as needs no wait."""
        queue = self._queue
        try:
            while queue and self._end is None and (sent := self._link.send_some(queue[0])):
                self._queued -= sent
                self._moved = self._clock()
                if sent == len(queue[0]):
                    queue.popleft()
                else:
                    queue[0] = queue[0][sent:]
        except LinkError as error:
            self._set_end(f"the connection broke: {error}")
        if not queue:
            self._own = 0
        self._changed.notify_all()

    # -- the running thread ---------------------------------------------------------------

    def run(
        self,
        on_message: Callable[[bytes], None],
        timers: Callable[[float], float | None],
    ) -> str:
        """Serve the connection until it ends; the reason.

        :param on_message: gets each message; must not block, and raises nothing
        :param timers: gets the time, does what is due and says when to be asked again
        """
        self._runner = threading.get_ident()
        watched = selectors.EVENT_READ
        more = False
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker.receiver, selectors.EVENT_READ)
            selector.register(self._link, watched)
            while True:
                wake_at = self._keep_alive(timers)
                with self._changed:
                    self._flush()
                    if self._end is not None:
                        self._queue.clear()
                        return self._end
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._queue else 0)
                if wanted != watched:
                    selector.modify(self._link, wanted)
                    watched = wanted
                selector.select(0 if more else max(0.0, wake_at - self._clock()))
                self._waker.drain()
                self._looked = self._clock()
                more = self._receive(on_message)

    def _keep_alive(self, timers: Callable[[float], float | None]) -> float:
        """Ping, notice silence and stalls; when to look again."""
        now = self._clock()
        times = [due] if (due := timers(now)) is not None else []
        with self._changed:
            if self._queue:
                self._flush()  # it may take now what it could not be offered for a while
            silent = self._silent_at(now)
            if self._looked >= silent:
                self._set_end(f"nothing was heard for {self._silence_limit:g} s")
            if self._queue:
                stalled = self._moved + self._send_timeout
                times.append(stalled)
                if now >= stalled:
                    self._set_end(f"the engine read nothing for {self._send_timeout:g} s")
            if self._close_by is not None:
                times.append(self._close_by)
                if now >= self._close_by:
                    self._set_end("closed by us")
            if now >= self._next_ping:
                self._next_ping = now + self._ping_interval
                # Behind a queue it would prove nothing, and pile up.
                if not self._queue and self._close_by is None:
                    self._asked = now if self._asked is None else self._asked
                    self._enqueue([frames.ping_frame(os.urandom(4))])
        return min(*times, silent, self._next_ping)

    def _silent_at(self, now: float) -> float:
        """When the engine counts as dead if nothing is heard until then.

        It must have had the time to answer: where this process stood still, or had no turn, its
        own silence is not the engine's.
        """
        asked = self._moved if self._asked is None and self._queue else self._asked
        answered = (now if asked is None else asked) + self._silence_limit - self._ping_interval
        return max(self._heard + self._silence_limit, answered)

    def _receive(self, on_message: Callable[[bytes], None]) -> bool:
        """Take what has arrived; whether there may be more of it already."""
        try:
            for _ in range(_READS):
                data = self._link.receive(65536)
                if data is None:
                    return False
                if not data:
                    self.end("the engine ended the connection without a Close")
                    return False
                self._heard = self._clock()
                self._asked = None
                for opcode, payload in self._reader.feed(data):
                    self._take(opcode, payload, on_message)
                    if self._end is not None:
                        return False
        except LinkError as error:
            self.end(f"the connection broke: {error}")
        except frames.FrameError as error:
            self._say_close(error.code)
            self.end(f"the engine broke the framing: {error}")
        return True

    def _take(self, opcode: int, payload: bytes, on_message: Callable[[bytes], None]) -> None:
        if opcode in (frames.TEXT, frames.BINARY):
            on_message(payload)
        elif opcode == frames.PING:
            try:
                self.post([frames.pong_frame(os.urandom(4), payload)], wait=0)
            except SessionOver:
                pass  # the reason is noted
        elif opcode == frames.CLOSE:
            code = frames.close_code(payload)
            ours = self._close_by is not None
            self._say_close(code)
            self.end("closed by us" if ours else f"the engine closed it (code {code})")
        elif opcode == frames.OVERSIZE:
            log.error("a message of more than %d bytes was skipped", MAX_MESSAGE)

    def _say_close(self, code: int) -> None:
        with self._changed:
            if self._close_by is None:
                self._enqueue([frames.close_frame(os.urandom(4), code)])
                self._flush()
