"""Small pictures as SVG: layered graphs and lists of pairs, without a program that draws them.

A picture is about as wide as a telephone's screen, so that it can be read there, and grows with the
page up to a limit that the style sheet sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

WIDTH = 372
"""Of a picture, in its own units: those of a narrow screen."""
_BOX = 24
_ROW = 56
_LETTER = 6.4
"""Width of a letter of the font, a little too large rather than too small."""
_GAP = 12
_EDGE = 8
_SWEEPS = 24
_INNER = WIDTH - 2 * _EDGE


@dataclass
class _Place:
    """A box, or where an arrow passes through a row."""

    name: str
    row: int
    width: float
    x: float = 0.0
    above: list[_Place] = field(default_factory=list)
    below: list[_Place] = field(default_factory=list)


def layered(
    graph: Mapping[str, set[str]], title: str, dashed: Mapping[str, set[str]] | None = None
) -> str:
    """A graph without circles: who points at nobody is at the top, and all arrows go up.

    :param title: what the picture shows, for those who cannot see it
    :param dashed: those of the arrows that are drawn so
    """
    rows, arrows = _placed(graph)
    _ordered(rows)
    _spread(rows)
    height = len(rows) * _ROW - (_ROW - _BOX) + 2 * _EDGE
    dashed = dashed or {}
    parts = [
        _path(arrow, "arrow rare" if arrow[-1].name in dashed.get(arrow[0].name, ()) else "arrow")
        for arrow in arrows
    ]
    parts += [
        _box(place.x - place.width / 2, _top(row), place.width, [place.name])
        for row, places in enumerate(rows)
        for place in places
        if place.name
    ]
    return _svg(title, height, parts)


def pairs(rows: Sequence[tuple[Sequence[str], Sequence[str]]], title: str) -> str:
    """Boxes of one to three lines on the left, each with an arrow to one on the right."""
    parts = []
    half = (WIDTH - 2 * _EDGE - 28) / 2
    y = float(_EDGE)
    for left, right in rows:
        height = _BOX - 12 + 13 * max(len(left), len(right))
        middle = y + height / 2
        start, end = _EDGE + half, WIDTH - _EDGE - half
        parts.append(_box(_EDGE, y, half, left, height))
        parts.append(_box(end, y, half, right, height, kind="thread"))
        parts.append(f'<path class="arrow" d="M{start:.1f},{middle:.1f} H{end - 6:.1f}"/>')
        y += height + _GAP
    return _svg(title, y - _GAP + _EDGE, parts)


def _width_of(name: str) -> float:
    return len(name) * _LETTER + 14


def _placed(graph: Mapping[str, set[str]]) -> tuple[list[list[_Place]], list[list[_Place]]]:
    """The boxes in rows, none wider than the picture, and the arrows from row to row."""
    room: dict[int, float] = {}
    while True:
        at = _rows_of(graph, room)
        rows, arrows = _connected(graph, at)
        full = [len(rows) - 1 - row for row, places in enumerate(rows) if _needed(places) > _INNER]
        if not full:
            return rows, arrows
        # Arrows that pass through take room too, and where they pass is known only afterwards.
        for row in full:
            room[row] = room.get(row, _INNER) - 20
        if min(room.values()) < 0:
            raise ValueError("the graph does not fit into the width of the picture")


def _rows_of(graph: Mapping[str, set[str]], room: Mapping[int, float]) -> dict[str, int]:
    """Each name's row, counted from below: just above those who point at it, if there is room."""
    users = {name: {user for user in graph if name in graph[user]} for name in graph}
    at: dict[str, int] = {}
    used: dict[int, float] = {}
    while len(at) < len(graph):
        ready = [name for name in graph if name not in at and users[name] <= at.keys()]
        # Those first that lie deep: others wait for them.
        name = min(ready, key=lambda each: (-_depth(graph, each), each))
        row = max((at[user] + 1 for user in users[name]), default=0)
        width = _width_of(name) + _GAP
        while used.get(row, 0.0) and used[row] + width > room.get(row, _INNER) + _GAP:
            row += 1
        used[row] = used.get(row, 0.0) + width
        at[name] = row
    return at


def _depth(graph: Mapping[str, set[str]], name: str) -> int:
    """How many arrows lead on from ``name``, one behind the other."""
    return max((1 + _depth(graph, other) for other in graph[name]), default=0)


def _connected(
    graph: Mapping[str, set[str]], at: Mapping[str, int]
) -> tuple[list[list[_Place]], list[list[_Place]]]:
    """The rows from above, with a place in each row that an arrow passes through."""
    last = max(at.values(), default=0)
    boxes = {name: _Place(name, last - row, _width_of(name)) for name, row in at.items()}
    rows: list[list[_Place]] = [[] for _ in range(last + 1)]
    for box in boxes.values():
        rows[box.row].append(box)
    arrows = []
    for name, others in graph.items():
        for other in sorted(others):
            arrow = [boxes[name]]
            for row in range(boxes[name].row - 1, boxes[other].row, -1):
                rows[row].append(_Place("", row, 0.0))
                arrow.append(rows[row][-1])
            arrow.append(boxes[other])
            for lower, upper in pairwise(arrow):
                lower.above.append(upper)
                upper.below.append(lower)
            arrows.append(arrow)
    return rows, arrows


def _gap(left: _Place, right: _Place) -> float:
    """Between neighbours: lines may lie closer than boxes."""
    return _GAP if left.name and right.name else 7.0


def _needed(row: Sequence[_Place]) -> float:
    """The least width of a row, in whatever order."""
    lines = sum(not place.name for place in row)
    boxes = len(row) - lines
    return sum(place.width for place in row) + max(boxes - 1, 0) * _GAP + lines * 7.0


def _ordered(rows: list[list[_Place]]) -> None:
    """Put each place near the middle of its neighbours; keep the order of the fewest crossings."""
    best: tuple[int, list[list[_Place]]] | None = None
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            at = {id(each): index for places in rows for index, each in enumerate(places)}

            def middle(place: _Place, at: dict[int, int] = at, down: bool = down) -> float:
                near = place.above if down else place.below
                return sum(at[id(each)] for each in near) / len(near) if near else at[id(place)]

            row.sort(key=middle)
        crossings = _crossings(rows)
        if best is None or crossings < best[0]:
            best = crossings, [list(row) for row in rows]
    if best is not None:
        rows[:] = best[1]


def _crossings(rows: list[list[_Place]]) -> int:
    found = 0
    for upper, lower in pairwise(rows):
        at = {id(each): index for index, each in enumerate(upper)}
        lines = [(index, at[id(far)]) for index, place in enumerate(lower) for far in place.above]
        found += sum((a < c and b > d) for a, b in lines for c, d in lines)
    return found


def _spread(rows: list[list[_Place]]) -> None:
    """Give each place its x: in its row's order, without overlap, near its neighbours."""
    for row in rows:
        for place in row:
            place.x = WIDTH / 2
        _apart(row)
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 else reversed(rows):
            for place in row:
                near = place.above + place.below
                if near:
                    place.x = (place.x + sum(each.x for each in near) / len(near)) / 2
            _apart(row)


def _apart(row: list[_Place]) -> None:
    """Push overlapping places apart, inside the picture."""
    for index, place in enumerate(row):
        before = row[index - 1] if index else None
        least = float(_EDGE) if before is None else _right(before) + _gap(before, place)
        place.x = max(place.x, least + place.width / 2)
    for index in range(len(row) - 1, -1, -1):
        place = row[index]
        behind = row[index + 1] if index + 1 < len(row) else None
        most = float(WIDTH - _EDGE)
        if behind is not None:
            most = behind.x - behind.width / 2 - _gap(place, behind)
        place.x = min(place.x, most - place.width / 2)


def _right(place: _Place) -> float:
    return place.x + place.width / 2


def _top(row: int) -> float:
    return _EDGE + row * _ROW


def _path(arrow: list[_Place], kind: str) -> str:
    first = arrow[0]
    x, y = first.x, _top(first.row)
    drawn = [f"M{x:.1f},{y:.1f}"]
    for place in arrow[1:]:
        last = place is arrow[-1]
        end = _top(place.row) + _BOX + (6 if last else 0)
        bend = (y - end) / 2
        drawn.append(
            f"C{x:.1f},{y - bend:.1f} {place.x:.1f},{end + bend:.1f} {place.x:.1f},{end:.1f}"
        )
        x, y = place.x, end
        if not last:
            y = _top(place.row)
            drawn.append(f"V{y:.1f}")
    return f'<path class="{kind}" d="{" ".join(drawn)}"/>'


def _box(
    x: float, y: float, width: float, lines: Sequence[str], height: float = _BOX, kind: str = "code"
) -> str:
    parts = [
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="4"/>'
    ]
    first = y + height / 2 - 13 * (len(lines) - 1) / 2 + 4
    for number, line in enumerate(lines):
        weight = "name" if number == 0 else "more"
        parts.append(
            f'<text class="{weight}" x="{x + width / 2:.1f}" y="{first + 13 * number:.1f}">'
            f"{escape(line)}</text>"
        )
    return "".join(parts)


_STYLE = """
rect{stroke:#5b6b7b;fill:#eef3f8}rect.thread{fill:#fdf3df;stroke:#8a6d2f}
text{font:11px ui-sans-serif,system-ui,sans-serif;text-anchor:middle;fill:#14202b}
text.more{font-size:10px;fill:#45535f}
path.arrow{fill:none;stroke:#6d7d8c;stroke-width:1.2;marker-end:url(#head)}
path.rare{stroke-dasharray:4 3}
""".replace("\n", "")
_HEAD = (
    '<defs><marker id="head" viewBox="0 0 6 6" refX="1" refY="3" markerWidth="6" markerHeight="6"'
    ' orient="auto"><path d="M0,0 L6,3 L0,6 z" fill="#6d7d8c"/></marker></defs>'
)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title><style>{_STYLE}</style>{_HEAD}'
        f'<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>{"".join(parts)}</svg>'
    )
