"""What a router makes of a provider's stream frames (provider protocol 6).

It passes them on as they are, skips in silence what it cannot read, and keeps as much of the
message as it needs to close a stream that broke off.
"""

from __future__ import annotations

import time
from typing import Any

from .. import jsontext

Json = dict[str, Any]

TERMINALS = frozenset({"done", "error"})
RETRYABLE = frozenset({"rate_limited", "transient"})
CODES = {
    "auth_expired": "router/provider_auth_expired",
    "rate_limited": "router/provider_rate_limited",
    "context_overflow": "router/context_overflow",
    "transient": "router/provider_transient",
    "permanent": "router/provider_rejected",
}

_SNAPSHOT = {
    "role": str,
    "content": list,
    "stop_reason": str,
    "model": str,
    "provider": str,
    "timestamp": int,
}
_SNAPSHOT_KEY = {
    **{
        f"{block}_{edge}": "partial"
        for block in ("text", "thinking", "functioncall")
        for edge in ("start", "end")
    },
    "start": "partial",
    "done": "message",
    "error": "error",
}
_DELTAS = frozenset({"text_delta", "thinking_delta", "functioncall_delta"})
_STOP_REASONS = frozenset({"end", "length", "function_call", "aborted", "error"})


def read_frame(text: str | bytes, *, fat_only: bool = False) -> Json | None:
    """One frame, or None for what a router skips without a word.

    :param fat_only: be a router of before the slim deltas, which requires ``partial`` in each
    """
    try:
        frame = jsontext.loads(text)
    except ValueError:
        return None
    if not isinstance(frame, dict) or not isinstance(text, str):
        return None
    kind = str(frame.get("type"))
    if kind == "ping":
        return frame
    if kind == "usage":
        return frame if isinstance(frame.get("usage"), dict) else None
    if kind == "stop":
        return frame if frame.get("stop_reason") in _STOP_REASONS else None
    if kind in _DELTAS:
        if not isinstance(frame.get("delta"), str):
            return None
        partial = frame.get("partial")
        return frame if _is_snapshot(partial) or (partial is None and not fat_only) else None
    key = _SNAPSHOT_KEY.get(kind)
    return frame if key is not None and _is_snapshot(frame.get(key)) else None


def _is_snapshot(value: object) -> bool:
    return (
        isinstance(value, dict)
        and all(
            isinstance(value.get(key), each) and not isinstance(value.get(key), bool)
            for key, each in _SNAPSHOT.items()
        )
        and value["role"] == "assistant"
        and value["stop_reason"] in _STOP_REASONS
    )


class Accumulator:
    """The message of a stream so far: snapshots replace it, slim deltas extend it."""

    def __init__(self, provider: str, model: str) -> None:
        self.message: Json = _blank(provider, model)
        self.usage: Json | None = None
        self.content = False
        """Something other than a ping was seen."""

    def add(self, frame: Json) -> None:
        """Take in the next frame."""
        kind = frame["type"]
        if kind == "ping":
            return
        self.content = True
        key = _SNAPSHOT_KEY.get(kind, "partial")
        if frame.get(key) is not None:
            self.message = frame[key]
        elif kind in ("text_delta", "thinking_delta"):
            self._extend(kind.removesuffix("_delta"), frame["delta"])
        elif kind == "usage":
            self.usage = frame["usage"]

    def _extend(self, kind: str, delta: str) -> None:
        content = [dict(block) for block in self.message["content"]]
        if not content or content[-1].get("type") != kind:
            content.append({"type": kind, "text": ""})
        content[-1]["text"] += delta
        self.message = {**self.message, "content": content}

    def aborted(self) -> Json:
        """The ``done`` that ends an aborted stream."""
        return {"type": "done", "message": {**self.message, "stop_reason": "aborted"}}

    def failed(self, message: str) -> Json:
        """The ``error`` that ends a stream which broke off."""
        return {
            "type": "error",
            "error": {
                **self.message,
                "stop_reason": "error",
                "error_message": message,
                "error_kind": "transient",
            },
        }


def _blank(provider: str, model: str) -> Json:
    return {
        "role": "assistant",
        "content": [],
        "stop_reason": "end",
        "model": model,
        "provider": provider,
        "timestamp": int(time.time() * 1000),
    }
