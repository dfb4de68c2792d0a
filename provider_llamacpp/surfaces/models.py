"""``models_list``, ``models_load``, ``models_unload``, ``models_download``, ``models_delete`` and
``models_watch``: the models of a server in router mode (llama-server API 10).

To load a model is no more than any stream to it does. What takes something away from others, or
fills the disk, exists only with the setting ``allow_model_management``.

``models_watch`` writes frames to its caller's channel::

    {"type": "status", "model", "state"}       a new state (``exit_code`` where a process ended)
    {"type": "progress", "model", "activity", "share", "stage", "done", "total"}
    {"type": "removed", "model"}, {"type": "reloaded", "model": "*"}
    {"type": "ping"}                           after silence
    {"type": "done", "model", "state"}         last; or ``failed``, ``cancelled`` with a ``message``
"""

from __future__ import annotations

from typing import Any

from .. import fields
from ..calls import Call
from ..errors import BusError, Interrupted, ProviderError
from ..payloads import decode_writer
from ..server.asking import failed
from ..server.catalog import row_status
from ..server.management import Frame
from .context import Context
from .outlet import Result


def models_list(context: Context, data: object, call: Call) -> Result:
    """All models of the server, those included that are not offered for chat.

    :raises BusError: the payload is not sound, or the server failed
    """
    payload = fields.payload(data)
    reload = fields.flag(payload, "reload", False)
    if reload and not context.provider.settings.allow_model_management:
        fields.fail(
            ("reload",),
            "may unload running models: start the worker with --allow-model-management for it",
        )
    models = context.provider.models
    target, _ = context.provider.target(call)
    rows = models.rows(target, call, reload=reload)
    listed = [models.facts(row) for row in rows]
    catalog = context.provider.catalog
    for each in listed:
        # Of what it is for, a row does not tell all that is known.
        if catalog is not None and (known := catalog.find(each["id"])) is not None:
            each["for_chat"] = known.for_chat
    return {"router_mode": any(map(row_status, rows)), "models": listed}


def models_load(context: Context, data: object, call: Call) -> Result:
    """Begin to load a model: answers at once, ``models_watch`` tells how it goes.

    :raises BusError: the payload is not sound, there is no such model, or the server refused
    """
    target, _ = context.provider.target(call)
    return context.provider.models.load(target, _named(data), call)


def models_unload(context: Context, data: object, call: Call) -> Result:
    """Unload a model, or end its load or its download. Raises as :func:`models_load`."""
    target, _ = context.provider.target(call)
    return context.provider.models.unload(target, _named(data), call)


def models_download(context: Context, data: object, call: Call) -> Result:
    """Begin to download a model: answers at once, ``models_watch`` tells how it goes. Raises as
    :func:`models_load`."""
    target, _ = context.provider.target(call)
    return context.provider.models.download(target, _named(data), call)


def models_delete(context: Context, data: object, call: Call) -> Result:
    """Delete a downloaded model. Raises as :func:`models_load`."""
    target, _ = context.provider.target(call)
    return context.provider.models.delete(target, _named(data), call)


def models_watch(context: Context, data: object, call: Call) -> Result:
    """Tell a channel what becomes of a model, or of all; the result is the last frame.

    :raises BusError: the payload is not sound, or the server failed
    :raises Interrupted: if ``call`` is aborted or the caller has left
    """
    payload = fields.payload(data)
    writer = decode_writer(payload.get("writer_ref"))
    model = fields.optional_text(payload, "model")
    provider = context.provider
    with context.outlets.opened(context.open_channel, writer, call) as outlet:
        try:
            if provider.catalog is None:
                provider.refresh(call=call)
            target, _ = provider.target(call)
            last = provider.models.watch(target, model, outlet.tell, call)
        except Interrupted as error:
            if error.reason == "consumer gone":
                raise
            words = "the worker was stopped" if error.reason == "stop" else "it was called off"
            outlet.last = _end("cancelled", model, words)
            raise
        except (BusError, ProviderError) as error:
            fault = failed(error) if isinstance(error, ProviderError) else error
            outlet.last = _end("failed", model, fault.message)
            raise fault from error
        outlet.last = last
        return last


def _named(data: object) -> str:
    return fields.text(fields.payload(data), "model")


def _end(kind: str, model: str | None, message: str) -> Frame:
    frame: dict[str, Any] = {"type": kind, "message": message}
    return frame if model is None else {**frame, "model": model}
