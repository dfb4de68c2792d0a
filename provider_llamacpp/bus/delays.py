"""Growing pauses between tries."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator


class Delays:
    """``min(first * 2**n, limit)`` seconds, each 30 % more or less (engine protocol 3.1)."""

    def __init__(self, first: float, limit: float) -> None:
        self._first = first
        self._limit = limit
        self._expo: Iterator[float] | None = None

    def reset(self) -> None:
        """Begin again with the first."""
        self._expo = None

    def next(self) -> float:
        """Seconds to wait before the next try."""
        if self._expo is None:
            import backoff  # pulls in asyncio: only who has to wait pays for that

            self._expo = backoff.expo(factor=self._first, max_value=self._limit)
            next(self._expo)  # it yields None once, for its decorators
        return next(self._expo) * random.uniform(0.7, 1.3)

    def exhaust(self) -> None:
        """Go straight to the longest: there is reason to think that trying soon is pointless."""
        self._expo = itertools.repeat(self._limit)
