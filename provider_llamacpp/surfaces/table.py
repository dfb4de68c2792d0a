"""All functions of this package. To add one: a line here, and its schemas in ``schemas.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..calls import Call
from ..schemas import load
from ..settings import Settings
from .context import Context
from .infill import infill
from .metrics import metrics
from .rerank import rerank
from .slots import slots
from .texts import detokenize, tokenize
from .thinking import end_thinking
from .tools import tools_call, tools_list


def _always(settings: Settings) -> bool:
    return True


def _with_tools(settings: Settings) -> bool:
    return bool(settings.allow_server_tools)


@dataclass(frozen=True, slots=True)
class Surface:
    """One function: the last part of its id, what it does, and when there is such a function."""

    name: str
    work: Callable[[Context, object, Call], object]
    allowed: Callable[[Settings], bool] = _always


SURFACES = (
    Surface("rerank", rerank),
    Surface("tokenize", tokenize),
    Surface("detokenize", detokenize),
    Surface("infill", infill),
    Surface("slots", slots),
    Surface("metrics", metrics),
    Surface("end_thinking", end_thinking),
    Surface("tools_list", tools_list, _with_tools),
    Surface("tools_call", tools_call, _with_tools),
)


def allowed(settings: Settings) -> Iterator[Surface]:
    """The functions to register: those that no setting keeps away."""
    return (each for each in SURFACES if each.allowed(settings))


def surface_schemas(id: str) -> dict[str, dict[str, Any]]:
    """What is registered with each function of provider ``id``, as
    :func:`~provider_llamacpp.schemas.function_schemas` has it."""
    return load(__package__, id)
