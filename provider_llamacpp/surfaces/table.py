"""All functions of this package. To add one: a line here, and its schemas in ``schemas.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..calls import Call
from ..schemas import load
from ..settings import Settings

if TYPE_CHECKING:
    from .context import Context


def _always(settings: Settings) -> bool:
    return True


def _with_tools(settings: Settings) -> bool:
    return bool(settings.allow_server_tools)


def _with_management(settings: Settings) -> bool:
    return settings.allow_model_management


@dataclass(frozen=True, slots=True)
class Surface:
    """One function: the last part of its id, which names the function in ``module`` that does it,
    and when there is such a function."""

    name: str
    module: str
    allowed: Callable[[Settings], bool] = _always
    kind: str = "request"
    """Of its calls, for their limit: see :class:`~provider_llamacpp.calls.CallRegistry`."""

    def work(self, context: Context, data: object, call: Call) -> object:
        """Serve ``call``. Its module is imported now: most workers are never asked for it."""
        module = import_module(f".{self.module}", __package__)
        return getattr(module, self.name)(context, data, call)


SURFACES = (
    Surface("rerank", "rerank"),
    Surface("tokenize", "texts"),
    Surface("detokenize", "texts"),
    Surface("infill", "infill"),
    Surface("slots", "slots"),
    Surface("metrics", "metrics"),
    Surface("end_thinking", "thinking"),
    Surface("tools_list", "tools", _with_tools),
    Surface("tools_call", "tools", _with_tools),
    Surface("models_list", "models"),
    Surface("models_load", "models"),
    Surface("models_unload", "models", _with_management),
    Surface("models_download", "models", _with_management),
    Surface("models_delete", "models", _with_management),
    Surface("models_watch", "models", kind="watch"),
)


def allowed(settings: Settings) -> Iterator[Surface]:
    """The functions to register: those that no setting keeps away."""
    return (each for each in SURFACES if each.allowed(settings))


def surface_schemas(id: str) -> dict[str, dict[str, Any]]:
    """What is registered with each function of provider ``id``, as
    :func:`~provider_llamacpp.schemas.function_schemas` has it.

    :raises LookupError: if a function of the table is not described in ``schemas.json``
    """
    schemas = load(__package__, id)
    for surface in SURFACES:
        if surface.name not in schemas:
            raise LookupError(
                f"provider_llamacpp/surfaces/schemas.json does not describe {surface.name!r}: add "
                "an entry of that name with description, metadata and both formats"
            )
    return schemas
