"""Lets one thread carry the tokens of many streams, while all they do is flow.

A server that decodes in batches gives every stream its token at the same instant. Threads that wait
for one each would all wake then, and stand in line for the interpreter's lock: that costs more than
what they do with the token. So once two streams flow, one of their threads, the carrier, waits for
all and does each step; the others sleep. A stream whose next step is more than that (its end, a
fault, an abort, a caller with no room for more) gets its own thread back, and the carrier's own
such step passes the work to another.

No thread is started, and nothing is held while less than two streams flow. Where there is no
``epoll`` (other than Linux), each stream goes on by itself.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

LOOK: Final = 1.0
"""Seconds between looks for streams that are silent for too long."""


class Carried(Protocol):
    """One stream's next steps. The methods are called on whichever thread carries."""

    @property
    def patience(self) -> float | None:
        """Seconds of silence after which :meth:`expire` is called; None is no end."""

    def fileno(self) -> int:
        """What becomes readable for the next step; the same until the stream has its thread."""

    def step(self) -> bool:
        """Do what can be done without waiting. False gives the stream its own thread back.

        Must not raise.
        """

    def expire(self) -> None:
        """It was silent for too long, and gets its own thread back."""


class _Member:
    __slots__ = ("carries", "last", "patience", "step", "stream", "turn")

    def __init__(self, stream: Carried) -> None:
        self.stream = stream
        self.step = stream.step
        self.patience = stream.patience
        self.last = time.monotonic()
        self.carries = False
        """Set, before ``turn`` is released, if it is to carry on with the others."""
        self.turn = threading.Lock()
        """Held until the thread of this stream has something to do."""
        self.turn.acquire()


class Carrier:
    """Who carries, and whom. One for a worker; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[int, _Member] = {}
        self._poll: select.epoll | None = None
        """There while somebody carries."""
        self._flowing = 0
        self.crowded = False
        """Whether two streams or more flow: then :meth:`carry` is worth it. Read without a lock."""

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Around the time in which tokens of a stream come."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._flowing += more
            self.crowded = self._flowing > 1 and hasattr(select, "epoll")

    def carry(self, stream: Carried) -> None:
        """Have the steps of ``stream`` done, here or elsewhere, until one is for its own thread:
        because it could not be done, or because no other stream flows any more."""
        member = _Member(stream)
        fd = stream.fileno()
        with self._lock:
            carries = self._poll is None
            if self._poll is None:
                self._poll = select.epoll()
            self._members[fd] = member
            # May be done while another thread polls; what has arrived already is found.
            self._poll.register(fd, select.EPOLLIN)
        if not carries:
            member.turn.acquire()
            if not member.carries:
                return
        self._carry(fd, member)

    # -- by the thread that carries -------------------------------------------------------

    def _carry(self, own: int, mine: _Member) -> None:
        members, poll = self._members, self._poll
        assert poll is not None
        next_look = time.monotonic() + LOOK
        while True:
            events = poll.poll(LOOK)
            now = time.monotonic()
            for fd, _ in events:
                member = members[fd]
                member.last = now
                if not member.step():
                    self._let_go(fd, member, mine)
            if now >= next_look:
                next_look = now + LOOK
                self._look_for_silence(now, mine)
            if (own not in members or len(members) == 1) and self._leave(own):
                return

    def _let_go(self, fd: int, member: _Member, mine: _Member) -> None:
        with self._lock:
            del self._members[fd]
            assert self._poll is not None
            self._poll.unregister(fd)
        if member is not mine:
            member.turn.release()

    def _look_for_silence(self, now: float, mine: _Member) -> None:
        for fd, member in list(self._members.items()):
            if member.patience is not None and now - member.last > member.patience:
                member.stream.expire()
                self._let_go(fd, member, mine)

    def _leave(self, own: int) -> bool:
        """Whether the thread of ``own`` is to go back to its stream; passes the work on."""
        with self._lock:
            assert self._poll is not None
            if own in self._members:
                if len(self._members) > 1 or self._flowing > 1:
                    return False
                del self._members[own]
            if self._members:
                heir = next(iter(self._members.values()))
                heir.carries = True
                heir.turn.release()
            else:
                self._poll.close()
                self._poll = None
            return True
