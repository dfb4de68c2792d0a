"""Answers of a real llama-server, as recorded (build b11434), for tests without one."""

from __future__ import annotations

import json
import pathlib
from typing import Any

RECORDINGS = pathlib.Path(__file__).parent / "data" / "recordings"


def recorded(name: str) -> dict[str, Any]:
    """A recording as an answer for :class:`peers.ScriptedServer`."""
    head, _, body = (RECORDINGS / f"{name}.txt").read_bytes().partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    # Framing is what the scripted server makes of it.
    skipped = ("content-length", "transfer-encoding", "connection", "keep-alive")
    headers = dict(line.split(": ", 1) for line in lines if not line.lower().startswith(skipped))
    status = int(first.split(" ")[1])
    return {"status": status, "headers": headers, "body": body.decode(), "framing": "length"}


def recorded_json(name: str) -> Any:
    """The body of a recording."""
    return json.loads(recorded(name)["body"])
