"""What ``status`` shows: a look at a worker as a page of lines and tables."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .terminal import Column, Part, Style, Terminal

if TYPE_CHECKING:
    from rich.console import Group

SILENT = 3.0
"""Seconds without a token that are worth a word."""
FEW = 3
"""Errors shown on a terminal, where streams need the room."""
FRAME = 14
"""Lines of a page that are neither streams nor errors, and a margin."""

Stats = Mapping[str, Any]

STREAMS = (
    Column("#", right=True),
    Column("model", wrap=True),
    Column("phase"),
    Column("tokens", right=True),
    Column("per s", right=True),
    Column("time", right=True),
)
_SERVER: Mapping[str, tuple[str, Style]] = {
    "ready": ("ready", "good"),
    "loading": ("loading its model", "warn"),
    "sleeping": ("sleeping, wakes when asked", "dim"),
    "no model": ("serves no model", "warn"),
    "refused": ("refuses the API key", "bad"),
    "failing": ("answers, but not as it should", "bad"),
    "away": ("away", "bad"),
    "unknown": ("not asked yet", "dim"),
}
_PHASES: Mapping[str, tuple[str, Style]] = {
    "accepted": ("accepted", ""),
    "connecting": ("connecting to its caller", ""),
    "resolving": ("asking where the server is", ""),
    "queued": ("queued in the server", "warn"),
    "loading model": ("loading its model", "warn"),
    "prompt": ("prompt", "strong"),
    "generating": ("generating", "good"),
    "blocked": ("slow caller", "bad"),
    "ending": ("ending", "dim"),
}


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen."""

    stats: Stats
    at: float
    """Seconds since 1970."""
    problem: str | None = None
    """Why ``stats`` are those of an earlier look."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of a page."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Part]]


Line = tuple[Part, ...]
Page = list[Line | Grid]


def show(terminal: Terminal, content: Page) -> None:
    """Write a page once."""
    for each in content:
        if isinstance(each, Grid):
            terminal.table(each.columns, each.rows)
        else:
            terminal.line(*each)


def renderable(terminal: Terminal, content: Page) -> Group:
    """A page for the live display of ``rich``."""
    from rich.console import Group

    # The cursor rests on an empty line: the terminal's own "^C" behind a full one would start
    # another, and leave one line more than the display takes back.
    return Group(
        *(
            terminal.rich_table(each.columns, each.rows)
            if isinstance(each, Grid)
            else terminal.rich_text(*each)
            for each in [*content, ()]
        )
    )


def page(terminal: Terminal, look: Look, *, height: int | None = None) -> Page:
    """All there is to say, or as much of it as ``height`` lines hold."""
    stats = look.stats
    clock = time.strftime("%H:%M:%S", time.localtime(look.at))
    connected: Part = ("engine connected", "good") if stats["connected"] else ("engine away", "bad")
    head = f"provider-llamacpp {stats['version']} as {stats['id']}, up {duration(stats['uptime'])}"
    content: Page = [((head, "strong"), ", ", connected, (f"  {clock}", "dim"))]
    if look.problem is not None:
        words = f"{look.problem}; what follows it said at {clock}"
        content = [((head, "strong"),)]
        content += [((line, "bad"),) for line in terminal.wrap(words, 0)]
    content += _server(terminal, stats["server"])
    content += _others(stats)
    content.append(())
    streams = stats["streams"]
    content.append((f"{len(streams)} of {stats['max_streams']} streams",))
    if streams:
        room = len(streams) if height is None else max(1, height - FRAME)
        content.append(Grid(STREAMS, [_row(each) for each in streams[:room]]))
        if len(streams) > room:
            content.append(((f"and {len(streams) - room} more", "dim"),))
    content += [(), (_totals(stats),)]
    errors = stats["errors"] if height is None else stats["errors"][-FEW:]
    if errors:
        content += [(), (f"errors of the last minutes ({len(stats['errors'])})",)]
        for each in errors:
            content += _error(terminal, each)
    return content


def _server(terminal: Terminal, server: Mapping[str, Any]) -> Iterator[Line]:
    words, style = _SERVER.get(server["state"], (server["state"], ""))
    if server["seconds"] is not None and server["state"] != "ready":
        words += f" for {duration(server['seconds'])}"
    details = [server["build"] and str(server["build"]), _slots(server["slots"])]
    if server["router_mode"]:
        details.append("router mode")
    if server["asked"] is not None:
        details.append(f"asked {duration(server['asked'])} ago")
    yield f"llama-server {server['url'] or 'at an unknown address'}: ", (words, style)
    if more := ", ".join(each for each in details if each):
        yield ((f"  {more}", "dim"),)
    if server["problem"]:
        for line in terminal.wrap(server["problem"], 2):
            yield "  ", (line, style)
    if server["state"] == "refused":
        yield (("  mend api_key in the router's settings, or the worker's key variable", "bad"),)
    for model in server["models"][:5]:
        yield (
            f"  {model['id']}: ",
            (model["state"], "good" if model["state"] == "loaded" else "dim"),
            _share(model.get("progress")),
            f", {model['context_window']} tokens a slot",
        )
    more_models = server["more_models"] + max(0, len(server["models"]) - 5)
    if more_models:
        yield ((f"  and {more_models} models more", "dim"),)


def _others(stats: Stats) -> Iterator[Line]:
    """The other providers of the worker; each is looked at by its own id."""
    for each in stats.get("providers", ()):
        if each["id"] != stats["id"]:
            words, style = _SERVER.get(each["state"], (each["state"], ""))
            count = each["active_streams"]
            yield (
                (f"beside it {each['id']} at {each['url'] or 'an unknown address'}: ", "dim"),
                (words, style),
                (f", {count} stream{'' if count == 1 else 's'}", "dim"),
            )


def _share(progress: Mapping[str, Any] | None) -> str:
    share = None if progress is None else progress["share"]
    return "" if share is None else f" {share:.0%}"


def _slots(count: int | None) -> str:
    return "" if count is None else f"{count} slot" + ("s" if count != 1 else "")


def _row(stream: Mapping[str, Any]) -> list[Part]:
    words, style = _PHASES.get(stream["phase"], (stream["phase"], ""))
    prompt = stream["prompt"]
    if stream["phase"] == "prompt" and prompt:
        share = prompt["processed"] / max(1, prompt["total"])
        words += f" {prompt['processed']} of {prompt['total']} ({share:.0%})"
    words += _share(stream.get("loading"))
    silent = stream["silent"] or 0.0
    if stream["phase"] == "blocked":
        words += f" for {duration(silent)}"
    elif stream["phase"] == "generating" and silent >= SILENT:
        words += f", silent {duration(silent)}"
    rate = stream["tokens_per_second"]
    return [
        str(stream["stream"]),
        stream["model"],
        (words, style),
        str(stream["tokens"] or "-"),
        "-" if rate is None else f"{rate:.1f}",
        duration(stream["seconds"]),
    ]


def _totals(stats: Stats) -> str:
    outcomes = stats["outcomes"]
    parts = [f"{count} {'done' if name == 'end' else name}" for name, count in outcomes.items()]
    ended = sum(outcomes.values())
    text = f"{ended} stream{'' if ended == 1 else 's'} ended"
    if parts:
        text += f" ({', '.join(parts)})"
    usage = stats["usage"]
    if usage:
        text += f", {short(usage.get('input', 0))} tokens in, {short(usage.get('output', 0))} out"
    if stats.get("resumes"):
        text += f", {stats['resumes']} taken up again"
    if stats["reconnects"]:
        text += f", {stats['reconnects']} reconnects"
    return text


def _error(terminal: Terminal, error: Mapping[str, Any]) -> Iterator[Line]:
    clock = time.strftime("%H:%M:%S", time.localtime(error["at"] / 1000))
    times = f", {error['count']} times" if error["count"] > 1 else ""
    yield (clock, "dim"), "  ", (error["kind"], "bad"), f" ({error['where']}{times})"
    for line in terminal.wrap(error["message"], 10):
        yield " " * 10, line


def duration(seconds: float) -> str:
    """``0.3 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, smaller, size, part in (
        ("d", "h", 86400, 3600),
        ("h", "min", 3600, 60),
        ("min", "s", 60, 1),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def short(count: int) -> str:
    """``812``, ``8.1k``, ``2.3M``."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 999_950 else f"{count / 1_000_000:.1f}M"
