"""What we register on each connection, and which triggers are to be tried again.

Thread-safe; what changes is also the engine client's to send, where a connection is up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import jsontext
from . import wire
from .delays import Delays

if TYPE_CHECKING:
    from .engine import Invocation


@dataclass(frozen=True, slots=True)
class Function:
    """One function of ours.

    :param handler: runs on the engine's thread: it must not block, and answers the invocation
        there or hands it to another thread. What it raises is answered as ``invocation_failed``.
    """

    id: str
    handler: Callable[[Invocation], None]
    description: str | None = None
    request_format: Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None

    def text(self) -> bytes:
        """The ``registerfunction`` that announces it (engine protocol 2.3), as JSON.

        :raises ValueError: if its schemas or metadata are not JSON
        """
        names = ("description", "request_format", "response_format", "metadata")
        given = {name: getattr(self, name) for name in names}
        said = {name: value for name, value in given.items() if value is not None}
        return jsontext.dumpb({"type": "registerfunction", "id": self.id} | said)


@dataclass(slots=True)
class _Trigger:
    message: wire.Message
    delays: Delays
    due: float | None = None
    """When to register it again, if it was refused."""


class Registrations:
    """Functions and triggers, in the order they came.

    :param delays: for triggers whose type nobody provides yet
    :param clock: seconds, monotonic
    """

    def __init__(self, delays: Callable[[], Delays], clock: Callable[[], float]) -> None:
        self._delays = delays
        self._clock = clock
        self._lock = threading.Lock()
        self._functions: dict[str, tuple[Callable[[Invocation], None], bytes]] = {}
        """Handler and announcement by id. As JSON text, schemas take a tenth of the memory."""
        self._triggers: dict[str, _Trigger] = {}

    def add(self, function: Function, text: bytes) -> None:
        """One more function, or another in place of the one with its id.

        :param text: its :meth:`Function.text`
        """
        with self._lock:
            self._functions[function.id] = function.handler, text

    def remove(self, function_id: str) -> bool:
        """Forget a function; False if it was not there."""
        with self._lock:
            return self._functions.pop(function_id, None) is not None

    def handler(self, function_id: str) -> Callable[[Invocation], None] | None:
        """What serves a function; None if we have none of this id."""
        with self._lock:
            handler, _ = self._functions.get(function_id, (None, b""))
            return handler

    def add_trigger(self, message: wire.Message) -> None:
        """One more trigger, as :func:`.wire.register_trigger` makes it."""
        with self._lock:
            self._triggers[message["id"]] = _Trigger(message, self._delays())

    def replay(self) -> list[bytes]:
        """Everything, as JSON, for a new connection: functions before triggers (3.1)."""
        with self._lock:
            for trigger in self._triggers.values():
                trigger.due = None
                trigger.delays.reset()
            functions = [text for _, text in self._functions.values()]
            triggers = [jsontext.dumpb(trigger.message) for trigger in self._triggers.values()]
            return functions + triggers

    def refused(self, trigger_id: str | None) -> bool:
        """A trigger's type has no provider yet (engines up to 0.21.7 say so and forget it): it
        will be due again. False if we know no such trigger."""
        with self._lock:
            trigger = self._triggers.get(trigger_id) if trigger_id is not None else None
            if trigger is None:
                return False
            trigger.due = self._clock() + trigger.delays.next()
            return True

    def due(self, now: float) -> tuple[list[wire.Message], float | None]:
        """Triggers to register again now, and when to ask next."""
        with self._lock:
            ready = []
            for trigger in self._triggers.values():
                if trigger.due is not None and trigger.due <= now:
                    trigger.due = None
                    ready.append(trigger.message)
            waiting = [each.due for each in self._triggers.values() if each.due is not None]
            return ready, min(waiting, default=None)
