"""What engines of different ages send, ignore and reject (engine protocol 8), and which frames
they accept at all (engine protocol 2). Pure data and checks; nothing here touches a socket.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import jsontext

DEFAULT_NAMESPACE = "default"
TELEMETRY = (b"OTLP", b"MTRC", b"LOGS")
"""Binary frames with these prefixes are telemetry (engine protocol 1.1), which we discard."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The differences between engine versions that a worker can see."""

    name: str
    reattach: bool
    """``reattach_token`` is handed out and ``reattach`` honoured (0.21.8)."""
    parking: bool
    """A trigger of a type nobody provides waits for its provider (0.21.8)."""
    namespaces: bool
    """Namespaces, registration buffering and conflict rejections (0.23)."""
    features: tuple[str, ...] = ()
    """What ``workerregistered`` lists; empty leaves the field out (0.25)."""

    @property
    def observe(self) -> bool:
        """The observe family of frames and ``unregistertriggertype`` are known (0.25)."""
        return bool(self.features)


PROFILES: Mapping[str, Profile] = {
    "0.21": Profile("0.21", reattach=False, parking=False, namespaces=False),
    "0.22": Profile("0.22", reattach=True, parking=True, namespaces=False),
    "0.23": Profile("0.23", reattach=True, parking=True, namespaces=True),
    "0.25": Profile("0.25", True, True, True, features=("observe.v1", "local-dispatch.v1")),
}
"""``0.21`` stands for 0.21.3 to 0.21.7, ``0.22`` for 0.21.8 and 0.22."""


class BadFrame(ValueError):
    """A frame the engine logs and drops without an answer (engine protocol 1.4)."""


_ANY = object()
_UUID = object()
_ACTION = object()
_ERROR = object()

_REQUIRED: dict[str, dict[str, object]] = {
    "reattach": {"previous_worker_id": str},
    "registerfunction": {"id": str},
    "unregisterfunction": {"id": str},
    "registertrigger": {"id": str, "trigger_type": str, "function_id": str, "config": _ANY},
    "unregistertrigger": {"id": str},
    "registertriggertype": {"id": str, "description": str},
    "triggerregistrationresult": {"id": str, "trigger_type": str, "function_id": str},
    "invokefunction": {"function_id": str, "data": _ANY},
    "invocationresult": {"invocation_id": _UUID, "function_id": str},
    "registerservice": {"id": str},
    "ping": {},
    "pong": {},
}
_OBSERVE: dict[str, dict[str, object]] = {
    "unregistertriggertype": {"id": str},
    "observe": {"id": str, "source": dict, "target": dict},
    "unobserve": {"id": str},
    "observerack": {"function_id": str, "id": str, "revision": int},
    "invocationsobserved": {"items": list},
    "localinvocationstats": {},
}
_OPTIONAL: dict[str, object] = {
    "action": _ACTION,
    "baggage": str,
    "description": str,
    "error": _ERROR,
    "invocation_id": _UUID,
    "namespace": str,
    "reattach_token": str,
    "traceparent": str,
    "trigger_namespace": str,
    "trigger_type": str,
}


def is_uuid(value: object) -> bool:
    """Whether the engine would take ``value`` for an invocation id."""
    if not isinstance(value, str):
        return False
    try:
        uuid.UUID(value)
    except ValueError:
        return False
    return True


def _fits(value: object, rule: object) -> bool:
    if rule is _ANY:
        return True
    if rule is _UUID:
        return is_uuid(value)
    if rule is _ACTION:
        return isinstance(value, dict) and (
            value.get("type") == "void"
            or (value.get("type") == "enqueue" and isinstance(value.get("queue"), str))
        )
    if rule is _ERROR:
        return isinstance(value, dict) and all(
            isinstance(value.get(key), str) for key in ("code", "message")
        )
    assert isinstance(rule, type)
    return isinstance(value, rule)


def decode(data: str | bytes, profile: Profile) -> dict[str, Any] | None:
    """One inbound frame as an object; None for what is ignored without a word (blank text,
    telemetry).

    :raises BadFrame: for what the engine logs and drops
    """
    if isinstance(data, bytes) and data.startswith(TELEMETRY):
        return None
    if not data.strip():
        return None
    try:
        text = data if isinstance(data, str) else data.decode()
        frame = jsontext.loads(text)
        if "\\u" in text:
            # The engine's JSON reader refuses half a surrogate pair; Python's keeps it, and it
            # then fails to encode.
            json.dumps(frame, ensure_ascii=False).encode()
    except ValueError as error:
        raise BadFrame(f"not JSON: {error}") from error
    if not isinstance(frame, dict):
        raise BadFrame("not an object")
    _check(frame, profile)
    return frame


def _check(frame: dict[str, Any], profile: Profile) -> None:
    kind = frame.get("type")
    required = _REQUIRED.get(kind) if isinstance(kind, str) else None
    if required is None and profile.observe and isinstance(kind, str):
        required = _OBSERVE.get(kind)
    if required is None:
        raise BadFrame(f"unknown type {kind!r}")
    for key, rule in required.items():
        if key not in frame or not _fits(frame[key], rule):
            raise BadFrame(f"{kind}: {key} is missing or of another type")
    for key, rule in _OPTIONAL.items():
        if frame.get(key) is not None and not _fits(frame[key], rule):
            raise BadFrame(f"{kind}: {key} has another type")
