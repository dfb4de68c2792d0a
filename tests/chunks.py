"""Streams of llama-server for tests: written by hand, recorded, and run through an assembler."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from laws import check_frames

from provider_llamacpp.events.assembler import Assembler, Outcome

DATA = Path(__file__).parent / "data"
DONE = b"data: [DONE]\n\n"

RECORDED = (
    "chat-stream-usage",
    "chat-stream-timings-per-token",
    "chat-stream-progress",
    "chat-stream-multibyte",
    "chat-stream-cut-inside-emoji",
    "chat-prefill-assistant-stream",
    "chat-prefill-assistant",
    "chat-n-two-stream",
    "tool-parallel-stream",
    "tool-parallel-nonstream",
    "tool-truncated-stream",
    "kv-shared-exceeded-stream-1",
    "output-not-parsable-stream",
    "output-invalid-utf8-stream",
    "router-child-killed-mid-stream",
    "killed-mid-stream",
    "context-full-stream",
    "chat-length-inside-reasoning",
)


def recording(name: str) -> bytes:
    """The body of a recorded answer, without its chunk framing."""
    raw = (DATA / "recordings" / f"{name}.txt").read_bytes()
    return raw.partition(b"\r\n\r\n")[2]


def stream_cases() -> list[dict[str, Any]]:
    """The cases about answers, with ``body`` as bytes."""
    rows = []
    for line in (DATA / "stream_cases.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        upstream = row["upstream"]
        row["body"] = (
            base64.b64decode(upstream["body_b64"])
            if "body_b64" in upstream
            else upstream["body"].encode()
        )
        rows.append(row)
    return rows


def bodies() -> dict[str, bytes]:
    """Every recorded body and every case at status 200, by name."""
    found = {name: recording(name) for name in RECORDED}
    found |= {row["id"]: row["body"] for row in stream_cases() if row["upstream"]["status"] == 200}
    return found


def event(value: Any) -> bytes:
    """One event, written as llama-server writes it."""
    return (
        b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def chunk(delta: Any = None, finish: str | None = None, **more: Any) -> bytes:
    """One chunk with one choice."""
    choice = {"finish_reason": finish, "index": 0, "delta": {} if delta is None else delta}
    return event({"choices": [choice], "created": 1796035508, "model": "/srv/m.gguf", **more})


def text(value: str) -> bytes:
    """A chunk of answer text."""
    return chunk({"content": value})


def thought(value: str) -> bytes:
    """A chunk of thinking."""
    return chunk({"reasoning_content": value})


def call(**fragment: Any) -> bytes:
    """A chunk with one piece of a tool call; ``name`` and ``arguments`` go into ``function``."""
    function = {key: fragment.pop(key) for key in ("name", "arguments") if key in fragment}
    return chunk({"tool_calls": [{**fragment, "function": function}]})


def finish(reason: str = "stop", **more: Any) -> bytes:
    """The chunk with the finish reason, and the end marker."""
    return chunk(None, reason, **more) + DONE


def usage(**counts: Any) -> bytes:
    """The chunk that holds nothing but usage."""
    return event({"choices": [], "usage": counts})


def assembler(**options: Any) -> Assembler:
    """An assembler with a clock that counts and ids that are predictable."""
    clock, ids = itertools.count(1000), itertools.count(1)
    defaults: dict[str, Any] = {
        "model": "m",
        "provider": "llamacpp",
        "decode_name": lambda name: name.replace("__", "::"),
        "now_ms": lambda: next(clock),
        "call_id": lambda: f"made-{next(ids)}",
    }
    return Assembler(**{**defaults, **options})


def frames_of(
    blocks: bytes | Iterable[bytes], outcome: Outcome | None = None, **options: Any
) -> list[bytes]:
    """All frames of a stream, as bytes; ``blocks`` are the reads it came in."""
    machine = assembler(**options)
    frames: list[bytes] = []
    for block in [blocks] if isinstance(blocks, bytes) else blocks:
        frames += machine.feed(block)
    return frames + machine.finish(outcome or Outcome())


def run(blocks: bytes | Iterable[bytes], **options: Any) -> list[dict[str, Any]]:
    """All frames of a stream, as values, after they were found lawful."""
    frames = frames_of(blocks, **options)
    check_frames(frames)
    return [json.loads(frame) for frame in frames]


def terminal(blocks: bytes | Iterable[bytes], **options: Any) -> dict[str, Any]:
    """The message of the terminal frame."""
    last = run(blocks, **options)[-1]
    message: dict[str, Any] = last["message"] if last["type"] == "done" else last["error"]
    return message


def kinds(frames: Sequence[dict[str, Any]]) -> list[str]:
    """The types of the frames."""
    return [frame["type"] for frame in frames]


def pieces(body: bytes, cuts: Iterable[int]) -> list[bytes]:
    """``body`` cut at the offsets ``cuts``."""
    marks = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[start:stop] for start, stop in itertools.pairwise(marks)]
