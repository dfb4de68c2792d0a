"""Channels: one-way pipes between two sockets (engine protocol 7).

A channel buffers frames; each end can be taken once in its life. The table hands out and finds
channels. The sockets of the two ends are served by :mod:`.engine`.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Literal

DEFAULT_BUFFER = 64
"""Messages that a channel holds for a reader who is not there yet, or reads slowly."""
LARGEST_BUFFER = 1024
"""The most that may be asked for."""
UNUSED_LIMIT = 300.0
"""Seconds after which a sweep removes a channel with an end that was never taken (7.6)."""

Direction = Literal["read", "write"]


class Channel:
    """One pipe. ``put`` belongs to the writer's thread, ``take`` to the reader's."""

    def __init__(self, capacity: int, created: float) -> None:
        self.id = str(uuid.uuid4())
        self.key = secrets.token_urlsafe(24)
        self.capacity = capacity
        self.created = created
        self.taken: set[Direction] = set()
        self._frames: deque[tuple[bytes, bool]] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._lost = False

    def claim(self, direction: Direction) -> bool:
        """Take an end; False when it was taken before, be it by a socket long dead."""
        with self._changed:
            if direction in self.taken:
                return False
            self.taken.add(direction)
            return True

    def put(self, data: bytes, text: bool) -> bool:
        """Buffer one frame, waiting for room; False when no reader will ever get it."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or len(self._frames) < self.capacity)
            if self._lost:
                return False
            self._frames.append((data, text))
            self._changed.notify_all()
            return True

    def take(self) -> tuple[bytes, bool] | None:
        """The next frame, waiting for it; None after the last one of a writer that ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or self._finished or self._frames)
            if self._lost or not self._frames:
                return None
            frame = self._frames.popleft()
            self._changed.notify_all()
            return frame

    def finish(self) -> None:
        """The writer ended, in whichever way: what is buffered still reaches the reader."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def lose(self) -> None:
        """Nobody will read any more: the writer's next frame fails (7.5)."""
        with self._changed:
            self._lost = True
            self._frames.clear()
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._frames)


class ChannelTable:
    """All channels of one engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._channels: dict[str, Channel] = {}

    def create(self, buffer_size: int | None = None) -> Channel:
        """A new channel; the size is in frames, 0 becomes 1 and 1024 is the most."""
        size = DEFAULT_BUFFER if buffer_size is None else buffer_size
        channel = Channel(min(max(size, 1), LARGEST_BUFFER), self._clock())
        with self._lock:
            self._channels[channel.id] = channel
        return channel

    def find(self, channel_id: str, key: str) -> Channel | None:
        """The channel, if the key is its own; an unknown id and a wrong key look the same."""
        with self._lock:
            channel = self._channels.get(channel_id)
        if channel is None or not hmac.compare_digest(channel.key.encode(), key.encode()):
            return None
        return channel

    def sweep(self) -> int:
        """Remove old channels with an end nobody took; how many that were."""
        limit = self._clock() - UNUSED_LIMIT
        with self._lock:
            old = [c for c in self._channels.values() if c.created < limit and len(c.taken) < 2]
            for channel in old:
                del self._channels[channel.id]
        for channel in old:
            channel.lose()
        return len(old)

    def clear(self) -> None:
        """Forget every channel, freeing whoever waits on one."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.lose()

    def __len__(self) -> int:
        with self._lock:
            return len(self._channels)
