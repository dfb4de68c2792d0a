"""The results: as tables, as JSON, and as a plot."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from provider_llamacpp.commands.figures import Spread

from .bars import BARS, Table, Verdict, has_backlog, judge
from .cases import CASES, Figures
from .processes import DRIVERS
from .stats import ratios, spread

LABELS = {
    "cpu_per_10k": "cpu s/10k",
    "share": "share of core",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "p99_all_ms": "p99 ms, all",
    "kept_up": "kept up",
    "rss_mb": "MB",
    "threads": "threads",
    "frames_per_s": "frames/s",
    "cpu_per_10k_1": "cpu s/10k, 1",
    "cpu_per_10k_32": "cpu s/10k, 32",
    "growth": "32 to 1",
    "first_ms": "ms",
    "cpu_ms_per_call": "cpu ms/call",
    "idle_mb": "idle MB",
    "idle_threads": "threads",
    "idle_share": "idle share",
    "kb_per_stream": "KB/stream",
    "threads_64": "threads, 64",
    "bare_ms": "bare ms",
    "version_starts": "--version",
    "registered_starts": "registered",
    "version_starts_cpu": "--version, cpu",
    "registered_starts_cpu": "registered, cpu",
    "time_ratio": "time",
    "cpu_ratio": "cpu",
    "memory_ratio": "memory",
    "grown_mb_100k": "MB grown",
    "snapshots": "messages",
}
"""Column heads; other figures stay in the JSON."""
ALONE = ("kept_up", "threads", "idle_threads", "threads_64", "idle_share", "snapshots", "bare_ms")
"""No ratio is taken of these."""
RIG = {
    "stub_share": "the stub took up to {:.0%} of a core",
    "stub_late_ms": "was up to {:.1f} ms late (p99)",
    "sink_share": "the sink took up to {:.0%}",
    "foreign_share": "unrelated processes up to {:.0%}",
}
"""Whether the rig itself stood in the way, at worst."""


@dataclass(slots=True)
class Results:
    """Everything that was measured in one run."""

    measurements: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, number: int, case: str, driver: str, figures: Figures) -> None:
        """One measurement of round ``number``."""
        self.measurements.append(
            {"round": number, "case": case, "driver": driver, "figures": figures}
        )

    def table(self) -> Table:
        """By case, driver and figure."""
        table: dict[tuple[str, str, str], dict[int, float]] = {}
        for one in self.measurements:
            for figure, value in one["figures"].items():
                table.setdefault((one["case"], one["driver"], figure), {})[one["round"]] = value
        return table


def facts() -> dict[str, Any]:
    """Where it ran and with what."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("iii-sdk", "httpx", "openai", "litellm", "requests", "websocket-client"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "versions": versions,
    }


# -- text -----------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three figures that count."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def cell(value: Spread | None) -> str:
    """A median, with its spread where there was more than one round."""
    if value is None:
        return "-"
    if value.low == value.high:
        return number(value.median)
    return f"{number(value.median)} ({number(value.low)}..{number(value.high)})"


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Columns under each other; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def remarks(case: str, driver: str, table: Table) -> str:
    """What makes the figures of a row doubtful."""
    words = []
    if not all(table.get((case, driver, "complete"), {0: 1.0}).values()):
        words.append("incomplete")
    if has_backlog(table, case, driver):
        words.append("backlog")
    return f" ({', '.join(words)})" if words else ""


def case_text(name: str, table: Table) -> str:
    """One case: a row per driver, and ours against each."""
    drivers = [driver for driver in DRIVERS if any(key[:2] == (name, driver) for key in table)]
    figures = [
        figure for figure in LABELS if any((name, driver, figure) in table for driver in drivers)
    ]
    rows = [["", *(LABELS[figure] for figure in figures)]]
    for driver in drivers:
        values = [table.get((name, driver, figure), {}) for figure in figures]
        rows.append(
            [
                DRIVERS[driver].label + remarks(name, driver, table),
                *(cell(spread(each.values())) for each in values),
            ]
        )
    if "ours" in drivers:
        rows += [_against(name, driver, figures, table) for driver in drivers if driver != "ours"]
    return f"{CASES[name].title}\n\n{grid(rows)}{_rig_text(name, table)}"


def _against(case: str, driver: str, figures: Sequence[str], table: Table) -> list[str]:
    """Ours in parts of another's."""
    row = [f"ours / {driver}"]
    for figure in figures:
        ours, other = (table.get((case, name, figure), {}) for name in ("ours", driver))
        row.append("" if figure in ALONE else cell(spread(ratios(ours, other))))
    return row


def _rig_text(case: str, table: Table) -> str:
    words = []
    for figure, form in RIG.items():
        found = [table[key] for key in table if key[0] == case and key[2] == figure]
        if found:
            words.append(form.format(max(max(rounds.values()) for rounds in found)))
    return f"\n({', '.join(words)})" if words else ""


def bars_text(verdicts: Iterable[Verdict]) -> str:
    """Every bar, met or not."""
    rows = [["bar", "against", "value", "must be", ""]]
    for verdict in verdicts:
        bar = verdict.bar
        words = {True: "met", False: "NOT MET", None: "not measured"}[verdict.met]
        if verdict.backlog:
            words += ", but the other had a backlog"
        limit = f"{bar.sense} {number(bar.limit)}"
        rows.append([bar.words, bar.against, cell(verdict.value), limit, words])
    return grid(rows)


def text(results: Results) -> str:
    """The whole report."""
    table = results.table()
    facts = ", ".join(
        f"{name} {value}" for name, value in results.facts.items() if not isinstance(value, dict)
    )
    parts = [facts, *(case_text(name, table) for name in CASES if any(k[0] == name for k in table))]
    parts.append(bars_text(judge(table)))
    if results.failures:
        parts.append("failed:\n" + "\n".join(results.failures))
    return "\n\n".join(parts) + "\n"


# -- files ----------------------------------------------------------------------------------------


def write_json(results: Results, path: Path) -> None:
    """All single measurements and the verdicts."""
    verdicts = [
        {
            **asdict(verdict.bar),
            "value": asdict(verdict.value) if verdict.value else None,
            "met": verdict.met,
        }
        for verdict in judge(results.table(), BARS)
    ]
    whole = {**asdict(results), "bars": verdicts}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def write_plot(results: Results, path: Path) -> None:
    """Four panels: cost, latency, speed, growth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = results.table()
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    bars = (
        (axes[0][0], "lock64", ("cpu_per_10k",), "processor seconds per 10,000 tokens"),
        (axes[0][1], "lock64", ("p50_ms", "p99_ms"), "added latency, ms: p50 and p99"),
        (axes[1][0], "flat", ("frames_per_s",), "frames per second"),
    )
    for axis, case, names, title in bars:
        _bars(axis, table, case, names)
        axis.set_title(f"{CASES[case].title}\n{title}", fontsize=10)
    _growth(axes[1][1], table)
    figure.suptitle("Shorter is better, but for frames per second. Only ratios mean something.")
    figure.savefig(path, dpi=110)
    plt.close(figure)


COLOURS = {"ours": "#c0392b", "peer": "#7f8c8d", "limit": "#2e86c1"}


def _bars(axis: Any, table: Table, case: str, figures: tuple[str, ...]) -> None:
    drivers = [name for name in reversed(DRIVERS) if (case, name, figures[0]) in table]
    height = 0.8 / len(figures)
    for place, figure in enumerate(figures):
        for row, driver in enumerate(drivers):
            value = spread(table[case, driver, figure].values())
            if value is None:
                continue
            at = row + (len(figures) - 1 - 2 * place) * height / 2
            error = [[value.median - value.low], [value.high - value.median]]
            colour = COLOURS[DRIVERS[driver].role]
            alpha = 1.0 if place == 0 else 0.5
            axis.barh(at, value.median, height, xerr=error, color=colour, alpha=alpha)
            axis.text(value.high * 1.08, at, number(value.median), va="center", fontsize=8)
    axis.set_yticks(range(len(drivers)), [DRIVERS[driver].label for driver in drivers])
    axis.set_xscale("log")
    axis.set_xlabel("(each step is ten times as much)", fontsize=8)
    # Room for the numbers, and a whole step before the shortest bar.
    low, high = axis.get_xlim()
    axis.set_xlim(10 ** math.floor(math.log10(low)), high * 8)


def _growth(axis: Any, table: Table) -> None:
    axis.set_title("1600 tokens/s from 1 and from 32 streams\ncpu s per 10,000 tokens", fontsize=10)
    for driver in DRIVERS:
        points = [
            spread(table.get(("growth", driver, f"cpu_per_10k_{streams}"), {}).values())
            for streams in (1, 32)
        ]
        if None in points:
            continue
        medians = [point.median for point in points if point]
        axis.plot(
            (1, 32),
            medians,
            marker="o",
            color=COLOURS[DRIVERS[driver].role],
            label=DRIVERS[driver].label,
        )
        axis.text(32, medians[1], f" {number(medians[1])}", va="center", fontsize=8)
        axis.text(1, medians[0], f"{number(medians[0])} ", va="center", ha="right", fontsize=8)
    axis.set_xticks((1, 32))
    axis.set_xlabel("streams", fontsize=8)
    axis.margins(x=0.2)
    axis.set_ylim(bottom=0)
    if axis.lines:
        axis.legend(fontsize=8)
