"""The functions the engine itself serves: ``engine::*`` (engine protocol 3.2, 5 and 7.1).

Where the protocol leaves the exact shape of an introspection answer open, ours follows the
listing's; a worker should not lean on more than that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import BusError
from .profiles import DEFAULT_NAMESPACE
from .workers import Frame, Peer

if TYPE_CHECKING:
    from .hub import Hub

MOST_INFOS = 32
"""Functions that one call may ask about."""


def functions_list(hub: Hub, peer: Peer | None, data: Frame) -> Frame:
    """``engine::functions::list``: internal and engine functions only on request."""
    everything = data.get("include_internal") is True
    workers = set(data.get("workers") or [])
    if data.get("worker"):
        workers.add(data["worker"])
    rows = []
    for function in hub.functions.values():
        if function.internal and not everything:
            continue
        rows.append(function.entry())
    if everything:
        rows += [
            {"function_id": each, "namespace": DEFAULT_NAMESPACE, "worker_name": "engine"}
            for each in hub.own_functions
        ]
    prefix, search = data.get("prefix") or "", data.get("search") or ""
    rows = [
        row
        for row in rows
        if row["function_id"].startswith(prefix)
        and search in row["function_id"]
        and (not workers or row["worker_name"] in workers)
    ]
    if not hub.profile.namespaces:
        for row in rows:
            del row["namespace"]
    return {"functions": sorted(rows, key=lambda row: str(row["function_id"]))}


def functions_info(hub: Hub, peer: Peer | None, data: Frame) -> Frame:
    """``engine::functions::info``: one function, or up to 32, with their schemas."""
    one, many = data.get("function_id"), data.get("function_ids")
    ids = [one] if isinstance(one, str) else many
    if not isinstance(ids, list) or not 0 < len(ids) <= MOST_INFOS:
        raise BusError("INVALID_ARGUMENTS", "function_id, or function_ids (at most 32)")
    namespace = data.get("namespace") or DEFAULT_NAMESPACE
    rows = []
    for each in ids:
        function = hub.functions.get((namespace, each))
        if function is None:
            raise BusError("NOT_FOUND", f"no function {each!r}")
        rows.append(function.entry(schemas=True))
    return rows[0] if isinstance(one, str) else {"functions": rows}


def workers_list(hub: Hub, peer: Peer | None, data: Frame) -> Frame:
    """``engine::workers::list``: live workers that told their pid."""
    shown = ("runtime", "version", "os", "pid", "description", "isolation")
    return {
        "workers": [
            {
                "id": each.worker_id,
                "name": each.name,
                "namespace": each.namespace,
                **{key: each.details[key] for key in shown if each.details.get(key) is not None},
            }
            for each in hub.peers.values()
            if isinstance(each.details.get("pid"), int)
        ]
    }


def workers_register(hub: Hub, peer: Peer | None, data: Frame) -> Frame:
    """``engine::workers::register``: who the connection is, and its namespace."""
    if peer is None:
        raise BusError("INVALID_ARGUMENTS", "only a connected worker can register")
    return {"success": hub.declare(peer, data)}


def channels_create(hub: Hub, peer: Peer | None, data: Frame) -> Frame:
    """``engine::channels::create``: the two references carry the same id and key."""
    size = data.get("buffer_size")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
        raise BusError("deserialization_error", "buffer_size: expected a whole number")
    channel = hub.channels.create(size)
    return {
        end: {"channel_id": channel.id, "access_key": channel.key, "direction": direction}
        for end, direction in (("writer", "write"), ("reader", "read"))
    }


def register_trigger(hub: Hub, peer: Peer | None, data: Frame) -> Frame:
    """``engine::register_trigger``: a durable trigger that no connection owns."""
    if not all(isinstance(data.get(key), str) for key in ("trigger_type", "function_id")):
        raise BusError("deserialization_error", "trigger_type and function_id: expected strings")
    return {"id": hub.triggers.register_durable(data)}


def unregister_trigger(hub: Hub, peer: Peer | None, data: Frame) -> Frame:
    """``engine::unregister_trigger``."""
    return {"removed": hub.triggers.unregister(str(data.get("id")))}


def log(hub: Hub, peer: Peer | None, data: Frame) -> None:
    """``engine::log::*``: taken and discarded."""


def served(own: Callable[[Peer | None, Frame], Any], peer: Peer | None, data: Any) -> Any:
    """The answer of one of the engine's own functions, whatever it was given.

    :raises BusError: its own, or ``deserialization_error`` where the data does not fit
    """
    try:
        return own(peer, data if isinstance(data, dict) else {})
    except (TypeError, ValueError, AttributeError) as error:
        raise BusError("deserialization_error", str(error)) from error


FUNCTIONS: dict[str, Any] = {
    "engine::functions::list": functions_list,
    "engine::functions::info": functions_info,
    "engine::workers::list": workers_list,
    "engine::workers::register": workers_register,
    "engine::channels::create": channels_create,
    "engine::register_trigger": register_trigger,
    "engine::unregister_trigger": unregister_trigger,
    **{f"engine::log::{level}": log for level in ("debug", "info", "warn", "error", "trace")},
}
