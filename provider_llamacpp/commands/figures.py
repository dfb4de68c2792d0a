"""Medians, spreads and what may be concluded from them. Pure.

A difference is claimed only where the rounds agree that there is one. The median of paired
differences lies between the k-th smallest and the k-th largest of them with a probability that
needs no assumption about their distribution (the sign test); where that interval holds zero, or
there are too few rounds for one, the difference is within noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SURE = 0.95
"""How often an interval of paired differences must hold the true median."""
FEWEST = 6
"""Rounds without which no interval is that sure."""


@dataclass(frozen=True, slots=True)
class Spread:
    """What the rounds gave."""

    median: float
    low: float
    high: float

    @property
    def around(self) -> float:
        """How far the round that is farthest from the median lies."""
        return max(self.median - self.low, self.high - self.median)

    def as_json(self) -> dict[str, float]:
        """Plain values."""
        return {name: round(getattr(self, name), 4) for name in ("median", "low", "high")}


@dataclass(frozen=True, slots=True)
class Difference:
    """What one way took more than the other, round by round."""

    spread: Spread
    rounds: int
    sure: bool
    """The rounds agree on its sign; otherwise it is within noise."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        verdict = "real" if self.sure else "within noise"
        if self.rounds < FEWEST:
            verdict = "too few rounds"
        return {**self.spread.as_json(), "rounds": self.rounds, "verdict": verdict}


def spread(values: Sequence[float]) -> Spread:
    """Of one round or more."""
    return Spread(statistics.median(values), min(values), max(values))


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """``ours - theirs`` of the rounds, by number, that both have; None if they share none.

    Both of a pair were taken within the same minute, so that the machine's mood cancels out.
    """
    pairs = sorted(ours[number] - theirs[number] for number in ours.keys() & theirs.keys())
    if not pairs:
        return None
    cut = outliers(len(pairs))
    sure = cut is not None and (pairs[cut] > 0 or pairs[-1 - cut] < 0)
    return Difference(spread(pairs), len(pairs), sure)


def outliers(rounds: int) -> int | None:
    """How many of the smallest and of the largest differences may be left out and the rest still
    hold the true median with the probability :data:`SURE`; None if even all of them do not."""
    cut, tail = 0, 2.0**-rounds
    while 1 - 2 * tail >= SURE:
        cut += 1
        tail += math.comb(rounds, cut) / 2**rounds
    return cut - 1 if cut else None
