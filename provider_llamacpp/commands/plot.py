"""Draws what ``bench`` measured: throughput and latency against concurrency.

``matplotlib`` (extra ``bench``) is imported here only, without its global state.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ProviderLlamacppError
from .figures import Spread
from .installing import pip_install

if TYPE_CHECKING:
    from .measuring import PathName
    from .report import Report

FORMATS = (".png", ".svg")
# Told apart by colour, by marker and by line: some people, and some printers, see no colours.
LOOKS: dict[PathName, tuple[str, dict[str, Any]]] = {
    "direct": (
        "directly from llama-server",
        {"color": "#d97706", "marker": "s", "linestyle": "--", "markerfacecolor": "white"},
    ),
    "worker": ("through the worker", {"color": "#1d4ed8", "marker": "o", "linestyle": "-"}),
}
PANELS = (
    ("all", "throughput", "tokens per second, all streams"),
    ("first_ms", "to the first token", "milliseconds"),
    ("per_token_ms", "from token to token", "milliseconds"),
)


def check(path: Path) -> None:
    """Before the measuring, which takes minutes: whether the picture can be drawn.

    :raises ProviderLlamacppError: if not, saying why
    """
    if path.suffix.lower() not in FORMATS:
        raise ProviderLlamacppError(f"--plot {path}: must end in {' or '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ProviderLlamacppError(f"--plot needs matplotlib: {pip_install('bench')}")
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ProviderLlamacppError(f"--plot {path}: cannot be written")


def draw(report: Report, path: Path) -> None:
    """Write the picture; its form is that of the file name's end."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text as text, no random ids and no date: equal figures give equal files.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9}):
        figure = Figure(figsize=(10.5, 3.9), layout="constrained")
        for axes, (name, title, unit) in zip(figure.subplots(1, 3), PANELS, strict=True):
            _panel(axes, report, name)
            axes.set_title(title, loc="left", fontweight="bold")
            axes.set_ylabel(unit)
            axes.set_xlabel("streams at once")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(_title(report), x=0.01, ha="left", fontsize=9, color="#444444")
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=metadata)


def _title(report: Report) -> str:
    task, rig = report.rig.task, report.rig
    rounds = max(len(each) for level in report.levels for each in level.batches.values())
    return (
        f"{task.model}, {rig.build or 'unknown build'}: answers of {task.tokens} tokens, "
        f"median of {rounds} rounds, bars from the lowest to the highest"
    )


def _panel(axes: Any, report: Report, name: str) -> None:
    for path, (label, look) in LOOKS.items():
        points = [
            (level.at_once, found)
            for level in report.levels
            if (found := level.spread(path, name)) is not None
        ]
        # Side by side, or the bars of the two would hide each other.
        shift = 0.97 if path == "direct" else 1.03
        axes.errorbar(
            [at * shift for at, _ in points],
            [found.median for _, found in points],
            yerr=_bars([found for _, found in points]),
            label=label,
            capsize=2.5,
            linewidth=1.6,
            elinewidth=0.9,
            markersize=5,
            **look,
        )
    levels = [level.at_once for level in report.levels]
    ticks = {each: str(each) for each in levels}
    slots = report.rig.slots
    if slots is not None and levels[0] <= slots <= levels[-1]:
        ticks[slots] = f"{slots}\n(all slots)"
        axes.axvline(slots, color="#888888", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_xlim(levels[0] * 0.8, levels[-1] * 1.25)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(found: list[Spread]) -> list[list[float]]:
    return [
        [each.median - each.low for each in found],
        [each.high - each.median for each in found],
    ]
