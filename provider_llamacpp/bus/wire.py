"""Bus messages as values, and as the bytes of a text frame (engine protocol 2). Pure.

Fields the protocol marks optional are left out when we have nothing to say: that is valid on every
engine version.
"""

from __future__ import annotations

import uuid
from typing import Any

from .. import jsontext
from ..errors import BusError

OWN_WORLD = ("engine::", "state::", "configuration::")
"""Ids with these prefixes live in the engine's ``default`` namespace (engine protocol 3.4)."""

Message = dict[str, Any]


def reattach(worker_id: str, token: str) -> Message:
    """Take over from our previous connection; must come first (engine protocol 2.2)."""
    return {"type": "reattach", "previous_worker_id": worker_id, "reattach_token": token}


def register_trigger(
    trigger_type: str, function_id: str, config: object, namespace: str | None
) -> Message:
    """With a new id, which stays the same on every connection (2.5).

    :param namespace: of the target function; absent means ``default``, not ours
    """
    message: Message = {
        "type": "registertrigger",
        "id": new_id(),
        "trigger_type": trigger_type,
        "function_id": function_id,
        "config": config,
    }
    if namespace is not None:
        message["namespace"] = namespace
    return message


def invoke(
    function_id: str,
    data: object,
    *,
    invocation_id: str | None,
    namespace: str | None = None,
    traceparent: str | None = None,
    baggage: str | None = None,
) -> Message:
    """:param invocation_id: None sends it void: nothing answers, not even a failure (2.6)"""
    message: Message = {"type": "invokefunction"}
    if invocation_id is not None:
        message["invocation_id"] = invocation_id
    message["function_id"] = function_id
    message["data"] = data
    if invocation_id is None:
        message["action"] = {"type": "void"}
    if namespace is not None and not function_id.startswith(OWN_WORLD):
        message["namespace"] = namespace
    return message | _trace(traceparent, baggage)


def register_worker(
    *,
    name: str,
    version: str,
    description: str,
    os_name: str,
    pid: int,
    isolation: str | None,
    namespace: str | None,
) -> Message:
    """Who we are. Until it arrives, the engine holds our registrations back (3.2, 3.3).

    Without ``features`` the engine keeps to the messages that all versions know.
    """
    data: Message = {
        "runtime": "python",
        "version": version,
        "name": name,
        "description": description,
        "os": os_name,
        "pid": pid,
        "isolation": isolation,
        "telemetry": {"language": None, "project_name": None, "framework": "provider-llamacpp"},
    }
    if namespace is not None:
        data["namespace"] = namespace
    return invoke("engine::workers::register", data, invocation_id=None)


def result(
    invocation_id: str,
    function_id: str,
    body: Message,
    *,
    limit: int,
    traceparent: str | None = None,
    baggage: str | None = None,
) -> bytes:
    """The answer to a call, in any case one that can be sent.

    :param body: ``{"result": …}`` or ``{"error": {"code": …, "message": …}}``
    :param limit: bytes; what is longer is answered with ``payload_too_large`` in its place
    """
    head = {
        "type": "invocationresult",
        "invocation_id": invocation_id,
        "function_id": function_id,
    }
    trace = _trace(traceparent, baggage)
    try:
        text = jsontext.dumpb(head | body | trace)
    except ValueError as error:
        return jsontext.dumpb(head | failure("serialization_error", f"the result {error}") | trace)
    if len(text) > limit:
        error_body = failure("payload_too_large", f"a result of {len(text)} bytes; {limit} fit")
        return jsontext.dumpb(head | error_body | trace)
    return text


def failure(code: str, message: str) -> Message:
    """The ``body`` of :func:`result` for a failed call."""
    return {"error": {"code": code, "message": message}}


def remote_error(error: object) -> BusError:
    """What the ``error`` of a result says, however it is shaped."""
    if isinstance(error, dict):
        code, message = error.get("code"), error.get("message")
        if isinstance(code, str) and isinstance(message, str):
            return BusError(code, message)
    return BusError("UNKNOWN", "the call failed and the error has no code and message")


def text_of(message: Message, name: str) -> str | None:
    """A field that counts only if it is text: null, absence and another type are the same."""
    value = message.get(name)
    return value if isinstance(value, str) else None


def new_id() -> str:
    """An id the engine takes for an invocation or a trigger: it must parse as a UUID (2.6)."""
    return str(uuid.uuid4())


def _trace(traceparent: str | None, baggage: str | None) -> Message:
    trace = {}
    if traceparent is not None:
        trace["traceparent"] = traceparent
    if baggage is not None:
        trace["baggage"] = baggage
    return trace
