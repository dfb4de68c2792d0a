"""What one call did, seen from outside the worker: frames, results, requests, times."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Frame = dict[str, Any]

TERMINALS = ("done", "error")


@dataclass
class Request:
    """One request as the scripted server read it."""

    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    connection: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Seen:
    """What one call did, seen from outside the worker. Times are seconds of one monotonic clock."""

    frames: list[Frame] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The frames as they came."""
    arrivals: list[float] = field(default_factory=list)
    """When each of them came."""
    result: Any = None
    failure: tuple[str, str] | None = None
    """Code and message, if the call failed on the bus."""
    ended: bool = False
    """The channel was closed after the last frame."""
    requests: list[Request] = field(default_factory=list)
    """What the server was asked for this call (discovery is not in it)."""
    all_requests: list[Request] = field(default_factory=list)
    proxy_requests: int = 0
    sent_at: list[float] = field(default_factory=list)
    """When the server wrote each step that holds a delta."""
    aborted_at: float | None = None
    abort_results: list[bool] = field(default_factory=list)
    abort_seconds: list[float] = field(default_factory=list)
    frames_at_abort: int = 0
    upstream_closed_at: float | None = None
    reconciled: list[dict[str, Any]] | None = None
    """The models the router was told during the call."""
    active_after: int = 0
    """Calls the worker still counts after the end."""
    rss_growth: int = 0
    """Bytes the process grew by during the call."""
    later: list[Seen] = field(default_factory=list)
    """Further calls, made after this one on the same worker."""

    def of(self, *kinds: str) -> list[Frame]:
        return [frame for frame in self.frames if frame.get("type") in kinds]

    @property
    def terminal(self) -> Frame | None:
        found = self.of(*TERMINALS)
        return found[-1] if found else None

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message of the terminal; empty if there was none."""
        frame = self.terminal or {}
        message = frame.get("message") or frame.get("error") or {}
        assert isinstance(message, dict)
        return message

    @property
    def content(self) -> list[dict[str, Any]]:
        content = self.message.get("content", [])
        assert isinstance(content, list)
        return content

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [block for block in self.content if block["type"] == "function_call"]

    @property
    def error_message(self) -> str:
        if self.failure is not None:
            return self.failure[1]
        return str(self.message.get("error_message", ""))
