"""``models``: what the server serves, and what the router was told of it.

What changes it (``load``, ``unload``, ``download``, ``rm``) is in :mod:`.managing`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import BusError, ProviderError
from ..settings import Settings
from .routes import add_direct
from .terminal import Column, Part, Style, Terminal, hold_logs, size

if TYPE_CHECKING:
    from ..server.catalog import ModelInfo
    from .caller import Caller
    from .direct import View

DESCRIPTION = """\
List the models: from the router's catalog if an engine is there, from
llama-server if not. A rank of 1 is the model that answers where none is named.
Wakes and loads nothing.

With a server in router mode, also load, unload, download and delete one.
Through an engine, all but load need a worker with --allow-model-management.
"""
EXAMPLE = """\
examples:
  provider-llamacpp models
  provider-llamacpp models --api-url http://127.0.0.1:8080
  provider-llamacpp models --json | jq -r '.models[].id'
  provider-llamacpp models load qwen3-4b
  provider-llamacpp models download user/name:Q4_K_M
  provider-llamacpp models rm user/name --direct --api-url http://pi5:8080
"""
_STATES: Mapping[str, Style] = {
    "loaded": "good",
    "sleeping": "dim",
    "unloaded": "dim",
    "loading": "warn",
    "downloading": "warn",
    "failed": "bad",
}
COLUMNS = (
    Column("id", wrap=True),
    Column("state"),
    Column("context", right=True),
    Column("size", right=True),
    Column("rank", right=True),
    Column("capabilities", wrap=True),
)


@dataclass(frozen=True, slots=True)
class Model:
    """One row. None is not known, or for ``rank``: not offered."""

    id: str
    state: str | None = None
    context_window: int | None = None
    """Tokens of one slot."""
    size: int | None = None
    """Bytes."""
    rank: int | None = None
    capabilities: tuple[str, ...] = ()
    in_catalog: bool | None = None
    """The router lists it; None if the router was not asked."""

    def cells(self) -> list[Part]:
        """What the table shows."""
        state = self.state or "-"
        return [
            self.id,
            (state, _STATES.get(state, "")),
            str(self.context_window or "-"),
            size(self.size) if self.size is not None else "-",
            str(self.rank or "-"),
            ", ".join(self.capabilities) or "-",
        ]


@dataclass(frozen=True, slots=True)
class Listing:
    """What was found, and where."""

    models: tuple[Model, ...]
    source: str
    """``router`` or ``server``."""
    notes: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    from .managing import ACTIONS

    parser.add_argument(
        "action", nargs="?", choices=("list", *ACTIONS), help="what to do (default list)"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the model it is done to")
    add_direct(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(settings: Settings, options: argparse.Namespace) -> int:
    """The command."""
    import json

    hold_logs(settings)
    if options.action not in (None, "list"):
        from .managing import manage

        if not options.name:
            words = f"provider-llamacpp: models {options.action} needs the NAME of a model"
            print(words, file=sys.stderr)
            return 2
        return manage(settings, options.action, options.name, direct=options.direct)
    found = listing(settings, direct=options.direct)
    if options.json:
        rows = [asdict(each) for each in found.models]
        print(json.dumps({"source": found.source, "models": rows, "notes": found.notes}, indent=2))
    else:
        show(Terminal.of(sys.stdout), Terminal.of(sys.stderr), found)
    return 0 if found.models else 1


def show(terminal: Terminal, notes: Terminal, found: Listing) -> None:
    """The table, and beside it what is to be said of it."""
    if found.models:
        terminal.table(COLUMNS, [each.cells() for each in found.models])
    else:
        notes.line("no models; provider-llamacpp doctor says why")
    for note in found.notes:
        for line in notes.wrap(note, 0):
            notes.line((line, "dim"))


def listing(settings: Settings, *, direct: bool = False) -> Listing:
    """Ask the router, and llama-server for what the router is not told.

    :raises ProviderError: if there is neither an engine nor a server
    :raises BusError: if the router is there and does not answer
    """
    from .caller import Caller, Unreachable

    if direct:
        return _from_server(settings, "")
    try:
        caller = Caller(settings)
    except Unreachable as error:
        return _from_server(settings, error.problem)
    with caller:
        return _from_router(settings, caller)


# -- from the router --------------------------------------------------------------------------


def _from_router(settings: Settings, caller: Caller) -> Listing:
    from ..bus.link import origin
    from .direct import Server, through_bus

    where = origin(settings.url)
    try:
        answer = caller.call("router::models::list", {"provider": settings.id})
    except BusError as error:
        if error.code != "function_not_found":
            raise
        return _from_server(settings, f"no llm-router on {where}")
    rows = answer.get("models") if isinstance(answer, dict) else None
    records = [
        row
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict) and row.get("provider") == settings.id and row.get("id")
    ]
    source = f"from the router's catalog at {where}"
    try:
        server = Server(settings)
        target = server.locate(*through_bus(caller, settings))
        view = server.view(target)
    except ProviderError as error:
        note = f"{source}; state, size and rank are not known: {error.message}"
        models = tuple(replace(_recorded(row), in_catalog=True) for row in records)
        return Listing(models, "router", (note,))
    notes = [f"{source}; state, size and rank from llama-server at {target.root}"]
    if view.catalog.refused:
        notes.append("llama-server refuses the key: see provider-llamacpp doctor")
    return Listing(_merged(records, view), "router", tuple(notes))


def _merged(records: Sequence[Mapping[str, Any]], view: View) -> tuple[Model, ...]:
    """The router's rows with what the server says of them, then what only the server has."""
    of_server = {each.id: each for each in _served(view)}
    models = []
    for record in records:
        row, own = _recorded(record), of_server.pop(str(record["id"]), None)
        if own is not None:
            more = tuple(each for each in own.capabilities if each not in row.capabilities)
            capabilities = row.capabilities + more
            row = replace(row, state=own.state, size=own.size, rank=own.rank)
            row = replace(row, capabilities=capabilities)
        models.append(replace(row, in_catalog=True))
    return (*models, *(replace(each, in_catalog=False) for each in of_server.values()))


def _recorded(record: Mapping[str, Any]) -> Model:
    """A row of the router's catalog (provider protocol 4.2)."""
    window = record.get("context_window")
    return Model(
        id=str(record["id"]),
        context_window=window if isinstance(window, int) else None,
        capabilities=_capabilities(record),
    )


def _capabilities(record: Mapping[str, Any]) -> tuple[str, ...]:
    names = {
        "supports_tools": "tools",
        "supports_structured_output": "json",
        "supports_vision": "vision",
        "supports_thinking": "thinking",
        "supports_thinking_off": "thinking off",
        "supports_xhigh": "xhigh",
    }
    return tuple(words for name, words in names.items() if record.get(name) is True)


# -- from the server --------------------------------------------------------------------------


def _from_server(settings: Settings, why: str) -> Listing:
    from .direct import Server

    server = Server(settings)
    why = f"{why}; " if why else ""
    target = server.locate(settings.api_url, settings.api_key, why=why)
    view = server.view(target)
    notes = [f"{why}from llama-server at {target.root}"]
    if view.catalog.refused:
        notes.append(f"llama-server wants another key: set {settings.key_variable}")
    return Listing(_served(view), "server", tuple(notes))


def _served(view: View) -> tuple[Model, ...]:
    catalog = view.catalog
    ranks = {each: at for at, each in enumerate(catalog.ranked_ids(), 1)}
    return tuple(_of(each, view, catalog.provider, ranks.get(each.id)) for each in catalog.models)


def _of(info: ModelInfo, view: View, provider: str, rank: int | None) -> Model:
    capabilities = _capabilities(info.record(provider).to_dict()) if info.for_chat else ()
    if info.abilities.audio:
        capabilities += ("audio",)
    if info.embeddings:
        capabilities += ("embeddings",)
    return Model(
        id=info.id,
        state=info.state,
        context_window=info.abilities.context_window,
        size=view.fact(info.id, "size"),
        rank=rank,
        capabilities=capabilities,
    )
