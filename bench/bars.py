"""The bars: what the worker has to reach, as ratios within one run wherever that can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from provider_llamacpp.commands.figures import Spread

from .stats import ratios, spread

Table = Mapping[tuple[str, str, str], Mapping[int, float]]
"""(case, driver, figure) to its value in each round."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure of ours, against another driver's or by itself, and where it must lie."""

    words: str
    case: str
    figure: str
    sense: Literal["<=", ">="]
    limit: float
    against: str = ""
    """A driver: the bar is on the ratio. Blank: on the figure itself."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a bar. ``value`` is None where nothing was measured."""

    bar: Bar
    value: Spread | None
    backlog: bool = False
    """The other driver had one: its latency is worse, its cost per token lower than it would be."""

    @property
    def met(self) -> bool | None:
        """Whether the median keeps it."""
        if self.value is None:
            return None
        if self.bar.sense == "<=":
            return self.value.median <= self.bar.limit
        return self.value.median >= self.bar.limit


BARS = (
    Bar("cpu per token, 64 in lockstep", "lock64", "cpu_per_10k", "<=", 0.36, "sdk_httpx"),
    Bar("cpu per token, 64 in lockstep", "lock64", "cpu_per_10k", "<=", 2.6, "raw"),
    Bar("cpu per token, 64 in lockstep", "lock64", "cpu_per_10k", "<=", 0.08, "litellm"),
    Bar("added latency p50, 64 in lockstep", "lock64", "p50_ms", "<=", 0.27, "sdk_httpx"),
    Bar("added latency p99, 64 in lockstep", "lock64", "p99_ms", "<=", 0.38, "sdk_httpx"),
    Bar("share of one core, 64 in lockstep", "lock64", "share", "<=", 0.40),
    Bar("tokens that came of those due, the same", "lock64", "kept_up", ">=", 0.98),
    Bar("time to first token", "first", "first_ms", "<=", 0.45, "sdk_httpx"),
    Bar("one stream flat out, frames/s", "flat", "frames_per_s", ">=", 6.0, "sdk_httpx"),
    Bar("one stream flat out, frames/s", "flat", "frames_per_s", ">=", 50.0, "litellm"),
    Bar("cpu per token, 32 streams to 1", "growth", "growth", "<=", 2.0),
    Bar("resident memory idle, MB", "memory", "idle_mb", "<=", 34.0),
    Bar("each further stream, KB", "memory", "kb_per_stream", "<=", 90.0),
    Bar("--version, in bare starts", "start", "version_starts", "<=", 4.0),
    Bar("registered, in bare starts", "start", "registered_starts", "<=", 25.0),
    # 4 is linear; a quarter more is left for noise, quadratic would be 16.
    Bar("cpu, 100k tokens to 25k", "long", "cpu_ratio", "<=", 5.0),
    Bar("memory, 100k tokens to 25k", "long", "memory_ratio", "<=", 5.0),
    Bar("whole messages in a 100k turn", "long", "snapshots", "<=", 4.0),
)


def judge(table: Table, bars: tuple[Bar, ...] = BARS) -> list[Verdict]:
    """Every bar with what was measured; a ratio is taken in each round, then its median."""
    verdicts = []
    for bar in bars:
        ours = table.get((bar.case, "ours", bar.figure), {})
        if bar.against:
            values = ratios(ours, table.get((bar.case, bar.against, bar.figure), {}))
        else:
            values = list(ours.values())
        verdicts.append(Verdict(bar, spread(values), has_backlog(table, bar.case, bar.against)))
    return verdicts


def has_backlog(table: Table, case: str, driver: str) -> bool:
    """Whether not just those tokens came that were due; more means one is being worked off."""
    kept_up = table.get((case, driver, "kept_up"), {})
    return any(abs(value - 1) > 0.03 for value in kept_up.values())
