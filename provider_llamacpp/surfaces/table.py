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
from .models import (
    models_delete,
    models_download,
    models_list,
    models_load,
    models_unload,
    models_watch,
)
from .rerank import rerank
from .slots import slots
from .texts import detokenize, tokenize
from .thinking import end_thinking
from .tools import tools_call, tools_list


def _always(settings: Settings) -> bool:
    return True


def _with_tools(settings: Settings) -> bool:
    return bool(settings.allow_server_tools)


def _with_management(settings: Settings) -> bool:
    return settings.allow_model_management


@dataclass(frozen=True, slots=True)
class Surface:
    """One function: the last part of its id, what it does, and when there is such a function."""

    name: str
    work: Callable[[Context, object, Call], object]
    allowed: Callable[[Settings], bool] = _always
    kind: str = "request"
    """Of its calls, for their limit: see :class:`~provider_llamacpp.calls.CallRegistry`."""


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
    Surface("models_list", models_list),
    Surface("models_load", models_load),
    Surface("models_unload", models_unload, _with_management),
    Surface("models_download", models_download, _with_management),
    Surface("models_delete", models_delete, _with_management),
    Surface("models_watch", models_watch, kind="watch"),
)


def allowed(settings: Settings) -> Iterator[Surface]:
    """The functions to register: those that no setting keeps away."""
    return (each for each in SURFACES if each.allowed(settings))


def surface_schemas(id: str) -> dict[str, dict[str, Any]]:
    """What is registered with each function of provider ``id``, as
    :func:`~provider_llamacpp.schemas.function_schemas` has it."""
    return load(__package__, id)
