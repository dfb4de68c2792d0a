"""Calls on the bus, seen from this end: the ones we answer, and the ones we wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import BusError
from . import wire


class Invocation:
    """One call to one of our functions, to be answered once.

    Of :meth:`reply` and :meth:`fail` the first takes effect, from any thread. An answer whose
    connection is gone is dropped: the next one does not know the call (engine protocol 3.1).

    :param answer: sends a body of :func:`.wire.result`
    """

    __slots__ = ("_answer", "baggage", "data", "function_id", "id", "metadata", "traceparent")

    def __init__(
        self,
        message: wire.Message,
        function_id: str,
        answer: Callable[[Invocation, wire.Message], None],
    ) -> None:
        data = message.get("data")
        if isinstance(data, dict):
            data.pop("_caller_worker_id", None)
        self.id = wire.text_of(message, "invocation_id")
        """None where nobody waits for an answer."""
        self.function_id = function_id
        self.data: Any = data
        self.metadata: Any = message.get("metadata")
        self.traceparent = wire.text_of(message, "traceparent")
        """Echoed in the answer; to be handed on to calls made for this one."""
        self.baggage = wire.text_of(message, "baggage")
        # Taking the one item off a list is atomic, so exactly one answer gets it.
        self._answer = [answer]

    def reply(self, result: object) -> None:
        """Answer with ``result``; what cannot be JSON becomes a ``serialization_error``.

        Waits up to a minute for an engine that reads slowly, but never on the engine client's own
        thread. Raises nothing.
        """
        self._respond({"result": result})

    def fail(self, code: str, message: str) -> None:
        """Answer with an error; otherwise as :meth:`reply`."""
        self._respond(wire.failure(code, message))

    def _respond(self, body: wire.Message) -> None:
        try:
            answer = self._answer.pop()
        except IndexError:
            return
        answer(self, body)


class Pending:
    """One call of ours; ``done`` is set when it was answered, or when the waiting is to end."""

    __slots__ = ("done", "error", "result")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: Any = None
        self.error: BusError | None = None


class PendingCalls:
    """The calls of ours that wait for their results, by invocation id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, Pending] = {}

    def open(self, invocation_id: str) -> Pending:
        """Expect a result."""
        pending = Pending()
        with self._lock:
            self._calls[invocation_id] = pending
        return pending

    def close(self, invocation_id: str) -> bool:
        """Expect it no more; False if it had come, or the connection went."""
        with self._lock:
            return self._calls.pop(invocation_id, None) is not None

    def settle(self, message: wire.Message) -> bool:
        """Hand out an ``invocationresult``; False if nobody waits for it (any more).

        Neither ``result`` nor ``error`` is a success without a value (engine protocol 2.7).
        """
        with self._lock:
            pending = self._calls.pop(wire.text_of(message, "invocation_id") or "", None)
        if pending is None:
            return False
        if message.get("error") is not None:
            pending.error = wire.remote_error(message["error"])
        pending.result = message.get("result")
        pending.done.set()
        return True

    def fail_all(self) -> None:
        """The connection is lost: the engine has forgotten all of them (3.1)."""
        with self._lock:
            calls, self._calls = self._calls, {}
        for pending in calls.values():
            pending.error = BusError("disconnected", "the connection to the engine was lost")
            pending.done.set()
