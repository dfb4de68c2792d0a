"""What ``bench`` found: figures by level, what the worker adds, and what may be said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._version import VERSION
from .figures import FEWEST, Difference, Spread, difference, spread
from .terminal import Column, Part, Terminal

if TYPE_CHECKING:
    from .measuring import Batch, Direct, Path, PathName, Task, Through

APART = 0.1
"""Share by which our time of the answers may differ from the server's own."""
BUSY = 0.8
"""Share of a core from which on this program may be what is measured."""

FIGURES = ("first_ms", "each", "all", "prompt", "per_token_ms")
COLUMNS = (
    Column("at once", right=True),
    Column("path"),
    Column("first token ms", right=True),
    Column("tok/s each", right=True),
    Column("tok/s all", right=True),
    Column("prompt tok/s", right=True),
)
ADDED = (
    Column("at once", right=True),
    Column("to"),
    Column("median", right=True),
    Column("lowest", right=True),
    Column("highest", right=True),
    Column("verdict"),
)
_ADDED = (
    ("first_ms", "the first token", " ms", 1),
    ("per_token_ms", "each other token", " ms", 1),
    ("all_percent", "tok/s all", " %", -1),
)
"""Figure, words, unit, and the sign of what is slower."""


@dataclass(frozen=True, slots=True)
class Rig:
    """What is measured, and how."""

    direct: Direct
    worker: Through
    task: Task
    levels: Sequence[int]
    rounds: int
    slots: int | None
    url: str
    build: str | None
    local: bool = False

    def paths(self) -> Mapping[PathName, Path]:
        """Both ways by name."""
        return {"direct": self.direct, "worker": self.worker}


@dataclass(slots=True)
class Level:
    """All that was measured with so many streams at once."""

    at_once: int
    batches: dict[PathName, dict[int, Batch]]
    """By path, then by round."""

    def values(self, path: PathName, name: str) -> dict[int, float]:
        """One figure by round."""
        found = {number: batch.figures() for number, batch in self.batches[path].items()}
        return {number: each[name] for number, each in found.items() if name in each}

    def spread(self, path: PathName, name: str) -> Spread | None:
        """One figure."""
        values = list(self.values(path, name).values())
        return spread(values) if values else None

    def added(self) -> dict[str, Difference | None]:
        """What the worker adds: milliseconds to the first token and to each other one, and to the
        tokens per second of all together, in percent."""
        found = {
            name: difference(self.values("worker", name), self.values("direct", name))
            for name in ("first_ms", "per_token_ms")
        }
        direct, worker = self.values("direct", "all"), self.values("worker", "all")
        shares = {n: 100 * worker[n] / direct[n] for n in direct.keys() & worker.keys()}
        return {**found, "all_percent": difference(shares, dict.fromkeys(shares, 100.0))}

    def failures(self, path: PathName) -> list[str]:
        """Of all rounds."""
        return [each for batch in self.batches[path].values() for each in batch.failures]


@dataclass(frozen=True, slots=True)
class Check:
    """Our figures of the direct way against the server's own, in its last chunks."""

    apart: float | None
    """Median share by which our time of an answer differs; None if the server tells none."""
    counts_agree: bool
    """Every count of tokens is the same in ``usage``, in ``timings`` and as asked for."""
    generation: float | None
    """Tokens per second of one stream, by the server."""
    prompt: float | None
    """Prompt tokens per second, by the server."""


@dataclass(slots=True)
class Report:
    """What came of a run."""

    rig: Rig
    levels: list[Level] = field(default_factory=list)
    busy: float = 0.0
    """Share of a core that this program took."""
    interrupted: bool = False

    def check(self) -> Check:
        """Hold the figures against the server's own."""
        samples = [
            sample
            for level in self.levels
            for batch in level.batches["direct"].values()
            for sample in batch.samples
        ]
        first = self.levels[0].batches["direct"].values()
        alone = [sample.timings for batch in first for sample in batch.samples]
        return check(samples, alone, self.rig.task.tokens)

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        task, found = self.rig.task, self.check()
        prompts = [
            sample.prompt_tokens
            for level in self.levels
            for batches in level.batches.values()
            for batch in batches.values()
            for sample in batch.samples
        ]
        return {
            "version": VERSION,
            "model": task.model,
            "server": {"url": self.rig.url, "build": self.rig.build, "slots": self.rig.slots},
            "local": self.rig.local,
            "rounds": self.rig.rounds,
            "tokens": task.tokens,
            "prompt_tokens": spread(prompts).as_json() if prompts else None,
            "interrupted": self.interrupted,
            "own_load": round(self.busy, 3),
            "levels": [_level_json(level) for level in self.levels],
            "check": {
                "apart": found.apart,
                "counts_agree": found.counts_agree,
                "server_tokens_per_second": found.generation,
                "server_prompt_tokens_per_second": found.prompt,
            },
        }


def _level_json(level: Level) -> dict[str, Any]:
    found: dict[str, Any] = {"at_once": level.at_once}
    for path in level.batches:
        spreads = {name: level.spread(path, name) for name in FIGURES}
        found[path] = {
            **{name: each.as_json() for name, each in spreads.items() if each is not None},
            "rounds": len(level.batches[path]),
            "failures": level.failures(path),
        }
    added = level.added()
    found["added"] = {name: each.as_json() for name, each in added.items() if each is not None}
    return found


def check(samples: Sequence[Any], alone: Sequence[Mapping[str, Any]], tokens: int) -> Check:
    """:class:`Check` of these samples; ``alone`` are the timings at the lowest concurrency."""
    shares, agree = [], True
    for each in samples:
        timings = each.timings
        prompt = timings.get("cache_n", 0) + timings.get("prompt_n", 0)
        counts = {each.tokens, tokens, timings.get("predicted_n", tokens)}
        agree = agree and len(counts) == 1 and prompt in (0, each.prompt_tokens)
        if timings.get("predicted_ms") and each.tokens > 1:
            shares.append(1000 * (each.last - each.first) / timings["predicted_ms"] - 1)

    def own(name: str) -> float | None:
        values = [timings[name] for timings in alone if timings.get(name)]
        return spread(values).median if values else None

    apart = spread([abs(each) for each in shares]).median if shares else None
    return Check(apart, agree, own("predicted_per_second"), own("prompt_per_second"))


# -- showing ----------------------------------------------------------------------------------


def show(terminal: Terminal, report: Report) -> None:
    """Tables, and what they say."""
    rig, task = report.rig, report.rig.task
    slots = "" if rig.slots is None else f", {rig.slots} slot{'s' if rig.slots != 1 else ''}"
    terminal.line((task.model, "strong"), f" at {rig.url}{slots}, {rig.build or 'unknown build'}")
    rounds = max(len(batches) for level in report.levels for batches in level.batches.values())
    terminal.line(
        f"answers of {task.tokens} tokens; medians of {rounds} rounds, ± the round farthest off"
    )
    terminal.line()
    rows = []
    for level in report.levels:
        for path in level.batches:
            names = ("first_ms", "each", "all", "prompt")
            cells = [_cell(level.spread(path, name)) for name in names]
            rows.append([str(level.at_once), path, *cells])
    terminal.table(COLUMNS, rows)
    terminal.line()
    terminal.line(("what the worker adds", "strong"))
    terminal.table(ADDED, [row for level in report.levels for row in _added(level)])
    terminal.line()
    for text in remarks(report):
        for line in terminal.wrap(text, 0):
            terminal.line(line)


def _cell(found: Spread | None) -> str:
    if found is None:
        return "-"
    share = found.around / found.median
    return f"{_number(found.median)} ±" + (f"{share:.0%}" if share < 10 else "…")


def _number(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _added(level: Level) -> Iterator[list[Part]]:
    head = str(level.at_once)
    for name, words, unit, slower in _ADDED:
        found = level.added()[name]
        if found is None:
            continue
        three = found.spread.median, found.spread.low, found.spread.high
        yield [head, words, *(_signed(each) + unit for each in three), _verdict(found, slower)]
        head = ""


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + _number(value)


def _verdict(found: Difference, slower: int) -> Part:
    if found.rounds < FEWEST:
        return "too few rounds", "dim"
    if not found.sure:
        return "within noise", "dim"
    return ("slower", "warn") if found.spread.median * slower > 0 else ("faster", "good")


def remarks(report: Report) -> list[str]:
    """What the tables mean, and what they do not."""
    found: list[str] = []
    added = [each for level in report.levels for each in level.added().values() if each is not None]
    if any(each.rounds < FEWEST for each in added):
        found.append(
            f"Fewer than {FEWEST} rounds cannot tell a difference from chance, so none is claimed: "
            "see --rounds."
        )
    elif not all(each.sure for each in added):
        found.append(
            "Within noise: the rounds did not agree that there is a difference, so none is "
            "claimed. More --rounds or --tokens on a quiet machine show smaller ones."
        )
    found.append(_checked(report.check()))
    if report.rig.slots is not None and report.levels[-1].at_once > report.rig.slots:
        found.append(
            f"Beyond {report.rig.slots} at once streams wait for a slot: their time to the first "
            "token holds that wait."
        )
    if report.rig.local:
        found.append(
            "With --local engine, worker and this program share one Python process: a worker of "
            "its own adds less."
        )
    elif report.busy > BUSY:
        found.append(
            f"This program itself took {report.busy:.0%} of a core: what it shows for many streams "
            "at once may be its own limit."
        )
    for level in report.levels:
        for path in level.batches:
            if failures := level.failures(path):
                found.append(
                    f"{len(failures)} streams failed ({level.at_once} at once, {path}), the first "
                    f"with: {failures[0]}"
                )
    if report.interrupted:
        found.append("Interrupted: these are the rounds until then.")
    return found


def _checked(found: Check) -> str:
    if found.apart is None:
        return "This llama-server tells no timings of its own to check the direct figures against."
    counts = "the counts of tokens are equal" if found.counts_agree else "the counts differ"
    own = "" if found.generation is None else f" ({_number(found.generation)} tokens/s each)"
    if found.apart <= APART:
        return (
            f"Checked against llama-server's own timings{own}: the time of the direct answers is "
            f"{found.apart:.1%} apart, {counts}."
        )
    return (
        f"The direct figures are {found.apart:.0%} apart from llama-server's own timings{own}, "
        f"{counts}: the answers are too short, the machine is too busy, or something between "
        "changes the pace. Trust differences only."
    )
