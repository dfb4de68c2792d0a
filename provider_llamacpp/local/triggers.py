"""Triggers: who wants which function called when something of a type happens (2.5).

The provider of a type is a worker, or the engine itself for its own two. The table decides who has
to be told what; a fire is the provider's ordinary call of the function.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from .profiles import DEFAULT_NAMESPACE, Profile
from .workers import Frame, Peer

FUNCTIONS_AVAILABLE = "engine::functions-available"
WORKERS_AVAILABLE = "engine::workers-available"
OWN_TYPES = frozenset({FUNCTIONS_AVAILABLE, WORKERS_AVAILABLE})
"""Types the loopback engine fires itself; the real one has more (``http``, ``cron``, …)."""

_Key = tuple[str, str]


@dataclass(eq=False)
class Trigger:
    """One binding. ``owner`` is None for a durable one made by ``engine::register_trigger``."""

    id: str
    trigger_type: str
    function_id: str
    owner: Peer | None
    config: Any = None
    metadata: Any = None
    namespace: str | None = None
    trigger_namespace: str | None = None
    bound_to: _Key | None = field(default=None)
    """The type it is active at; None while it is parked."""


class TriggerTable:
    """All triggers and trigger types. Not thread-safe: the hub calls it under its lock."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._types: dict[_Key, Peer] = {}
        self._triggers: dict[str, Trigger] = {}

    # --- types ---------------------------------------------------------------------------------

    def register_type(self, peer: Peer, frame: Frame) -> None:
        """A worker provides a type: everything that waited for it becomes active."""
        key = (frame.get("namespace") or peer.namespace, frame["id"])
        self._types[key] = peer
        for trigger in self._triggers.values():
            if self._find(trigger) == key:
                self._bind(trigger, key)

    def unregister_type(self, peer: Peer, frame: Frame) -> None:
        """A type is provided no more; another worker's is left alone."""
        key = (frame.get("namespace") or peer.namespace, frame["id"])
        if self._types.get(key) is peer:
            self._withdraw(key)

    def _withdraw(self, key: _Key) -> None:
        del self._types[key]
        for trigger in list(self._triggers.values()):
            if trigger.bound_to == key:
                trigger.bound_to = None
                if not self._profile.parking:
                    # These engines forget the bindings of an owner that left (2.5).
                    del self._triggers[trigger.id]

    # --- triggers ------------------------------------------------------------------------------

    def register(self, peer: Peer, frame: Frame) -> Frame | None:
        """Bind a trigger; the error object to report, if it cannot be."""
        for key in ("namespace", "trigger_namespace"):
            value = frame.get(key)
            if value is not None and not value.strip():
                return {"code": "INVALID_NAMESPACE", "message": f"{key} is blank"}
        trigger = Trigger(
            frame["id"],
            frame["trigger_type"],
            frame["function_id"],
            peer,
            frame["config"],
            frame.get("metadata"),
            frame.get("namespace"),
            frame.get("trigger_namespace"),
        )
        return self._add(trigger)

    def register_durable(self, data: Frame) -> str:
        """A trigger without an owner, for ``engine::register_trigger``; its id."""
        trigger = Trigger(
            str(uuid.uuid4()),
            data["trigger_type"],
            data["function_id"],
            None,
            data.get("config"),
            data.get("metadata"),
        )
        self._add(trigger)
        return trigger.id

    def _add(self, trigger: Trigger) -> Frame | None:
        found = self._find(trigger)
        if found is None and trigger.trigger_type not in OWN_TYPES and not self._profile.parking:
            return {
                "code": "trigger_type_not_found",
                "message": f"no trigger type {trigger.trigger_type!r}",
            }
        self._triggers[trigger.id] = trigger
        if found is not None:
            self._bind(trigger, found)
        return None

    def unregister(self, trigger_id: str) -> bool:
        """Remove a trigger and tell the provider of its type."""
        trigger = self._triggers.pop(trigger_id, None)
        if trigger is None:
            return False
        provider = self._types.get(trigger.bound_to) if trigger.bound_to else None
        if provider is not None:
            provider.send({"type": "unregistertrigger", **_described(trigger)})
        return True

    def settled(self, frame: Frame) -> None:
        """A provider's ``triggerregistrationresult``: a refusal goes on to the owner."""
        error = frame.get("error")
        trigger = self._triggers.get(frame["id"])
        if error is None or trigger is None:
            return
        del self._triggers[trigger.id]
        if trigger.owner is not None:
            trigger.owner.send(refusal(_described(trigger), error))

    def forget(self, peer: Peer) -> None:
        """A connection is gone: its triggers vanish, the types it provided have no owner."""
        for trigger in [t for t in self._triggers.values() if t.owner is peer]:
            self.unregister(trigger.id)
        for key in [key for key, owner in self._types.items() if owner is peer]:
            self._withdraw(key)

    def fired_by_engine(self, trigger_type: str) -> list[Trigger]:
        """The triggers of one of the engine's own types."""
        return [t for t in self._triggers.values() if t.trigger_type == trigger_type]

    def ids(self) -> dict[str, bool]:
        """Every trigger's id, and whether it is active rather than parked."""
        return {
            t.id: t.bound_to is not None or t.trigger_type in OWN_TYPES
            for t in self._triggers.values()
        }

    # --- helpers -------------------------------------------------------------------------------

    def _find(self, trigger: Trigger) -> _Key | None:
        if trigger.trigger_namespace is not None:
            places = [trigger.trigger_namespace]
        else:
            own = trigger.owner.namespace if trigger.owner else DEFAULT_NAMESPACE
            places = [own, DEFAULT_NAMESPACE]
        for place in places:
            if (place, trigger.trigger_type) in self._types:
                return (place, trigger.trigger_type)
        return None

    def _bind(self, trigger: Trigger, key: _Key) -> None:
        trigger.bound_to = key
        self._types[key].send({"type": "registertrigger", **_described(trigger)})


def _described(trigger: Trigger) -> Frame:
    row: Frame = {
        "id": trigger.id,
        "trigger_type": trigger.trigger_type,
        "function_id": trigger.function_id,
        "config": trigger.config,
    }
    if trigger.metadata is not None:
        row["metadata"] = trigger.metadata
    if trigger.namespace is not None:
        row["namespace"] = trigger.namespace
    return row


def refusal(trigger: Frame, error: Frame) -> Frame:
    """The ``triggerregistrationresult`` that reports a trigger as refused."""
    row = {key: trigger[key] for key in ("id", "trigger_type", "function_id")}
    return {"type": "triggerregistrationresult", **row, "error": error}
