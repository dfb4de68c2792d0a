"""Medians, spreads and ratios of figures that were taken in rounds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from provider_llamacpp.commands.figures import Spread

T = TypeVar("T")


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of a sorted sequence lie; 0 of nothing."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def spread(values: Iterable[float]) -> Spread | None:
    """Median, lowest and highest; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(statistics.median(ordered), ordered[0], ordered[-1])


def ratios(top: Mapping[int, float], bottom: Mapping[int, float]) -> list[float]:
    """Round by round, what one figure is of another.

    Both sides of a ratio were taken within the same minute, so the machine's mood cancels out; a
    ratio of two medians would not have that. Rounds that one of them lacks are left out.
    """
    return [
        top[number] / bottom[number]
        for number in sorted(top.keys() & bottom.keys())
        if bottom[number]
    ]


def shuffled(items: Sequence[T], chance: random.Random) -> list[T]:
    """A new order each time: a fixed one can drift into step with the machine's speed."""
    return chance.sample(items, len(items))
