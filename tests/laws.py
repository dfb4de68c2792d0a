"""The laws of a channel's frames (provider protocol 6), whatever the server sent.

:func:`violations` says what is broken; :func:`check_frames` fails a test over it. Frames may be
given as the bytes or text that crossed the channel, which also holds them to strict JSON, or as
values. A stream that was aborted, or whose caller left, ends without a terminal frame: pass
``terminal=False``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from provider_llamacpp.jsontext import whole
from provider_llamacpp.transcript.arguments import parse_arguments

Frame = dict[str, Any]

KINDS = ("text", "thinking", "functioncall")
STOP_REASONS = {"end", "length", "function_call", "aborted", "error"}
ERROR_KINDS = {"auth_expired", "rate_limited", "context_overflow", "transient", "permanent"}
USAGE = {"input", "output", "cache_read", "cache_write", "reasoning", "cost_usd"}
REQUIRED = {"role", "content", "stop_reason", "model", "provider", "timestamp"}
OPTIONAL = {"native_stop_reason", "error_message", "error_kind", "warnings", "usage"}
BLOCKS = {
    "text": {"text": str},
    "thinking": {"text": str},
    "function_call": {"id": str, "function_id": str, "arguments": dict},
}
ORDER = ("thinking", "text", "function_call")


def check_frames(frames: Sequence[bytes | str | Frame], *, terminal: bool = True) -> list[str]:
    """:func:`violations`, of which there must be none.

    :raises AssertionError: naming each
    """
    found = violations(frames, terminal=terminal)
    if found:
        raise AssertionError("; ".join(found))
    return found


def violations(frames: Sequence[bytes | str | Frame], *, terminal: bool = True) -> list[str]:
    """What is broken, one sentence each."""
    values: list[Frame] = []
    for number, frame in enumerate(frames):
        try:
            value = strict(frame) if isinstance(frame, bytes | str) else frame
        except ValueError as error:
            return [f"frame {number} is not strict JSON: {error}"]
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            return [f"frame {number} has no type: {value!r}"]
        values.append(value)
    return [
        *_sequence([value for value in values if value["type"] != "ping"], terminal),
        *(word for value in values for word in _shape(value)),
        *_blocks(values),
    ]


def strict(text: bytes | str) -> Any:
    """One JSON value as the strictest reader takes it.

    :raises ValueError: for NaN, keys that come twice, half surrogates, bad UTF-8
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    text.encode("utf-8")

    def constant(name: str) -> None:
        raise ValueError(name)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) < len(items):
            raise ValueError(f"a key comes twice in {items}")
        return dict(items)

    value = json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _sequence(frames: list[Frame], terminal: bool) -> Iterator[str]:
    kinds = [frame["type"] for frame in frames]
    ends = [number for number, kind in enumerate(kinds) if kind in ("done", "error")]
    if kinds and kinds[0] != "start" and kinds != ["error"]:
        yield f"{kinds[0]} comes before start"
    if kinds.count("start") > 1:
        yield "start comes twice"
    if kinds[:1] == ["start"] and len(kinds) == 1:
        yield "start comes alone"
    if len(ends) > 1:
        yield "two terminals"
    if ends and ends[0] != len(kinds) - 1:
        yield f"{kinds[ends[0] + 1]} comes after the terminal"
    if bool(ends) != terminal:
        yield "no terminal" if terminal else "a terminal"
    if "done" in kinds and kinds[-2:] != ["stop", "done"]:
        yield f"stop does not stand before done: {kinds[-2:]}"
    if kinds.count("stop") > 1 or ("stop" in kinds and "error" in kinds):
        yield "a stop too many"
    if kinds[-2:] == ["stop", "done"] and (
        frames[-2].get("stop_reason") != frames[-1].get("message", {}).get("stop_reason")
    ):
        yield "stop and done differ"
    yield from _usages(frames)


def _usages(frames: list[Frame]) -> Iterator[str]:
    known: Frame = {}
    for frame in frames:
        if frame["type"] == "usage":
            if not known.keys() <= frame.get("usage", {}).keys():
                yield "usage lost a count"
            if known == frame.get("usage"):
                yield "usage comes twice"
            known = frame.get("usage", {})
    if frames and frames[-1]["type"] == "done" and known != frames[-1]["message"].get("usage", {}):
        yield "done has another usage than the last usage frame"


def _shape(frame: Frame) -> Iterator[str]:
    kind = frame["type"]
    keys = set(frame) - {"type"}
    if kind == "ping":
        wanted = [set[str]()]
    elif kind == "usage":
        wanted = [{"usage"}]
        yield from _usage_shape(frame.get("usage"))
    elif kind == "stop":
        wanted = [{"stop_reason"}]
    elif kind == "done":
        wanted = [{"message"}]
        yield from _message(frame.get("message"), "done")
    elif kind == "error":
        wanted = [{"error"}]
        yield from _message(frame.get("error"), "error")
    elif kind.endswith("_delta") and kind[:-6] in KINDS:
        wanted = [{"delta"}, {"delta", "partial"}]
        if kind == "functioncall_delta":
            wanted += [each | {"id"} for each in wanted]
        if not frame.get("delta") or not isinstance(frame["delta"], str):
            yield f"{kind} without text"
        if frame.get("id", "-") == "":
            yield "an empty id"
    elif kind == "start" or kind.rpartition("_")[0] in KINDS:
        wanted = [{"partial"}]
    else:
        yield f"unknown type {kind}"
        return
    if keys not in wanted:
        yield f"{kind} has the keys {sorted(keys)}"
    if "partial" in frame:
        yield from _message(frame["partial"], "partial")


def _message(message: Any, role: str) -> Iterator[str]:
    if not isinstance(message, dict) or not message.keys() >= REQUIRED:
        yield f"{role}: a message lacks something: {message!r}"
        return
    if message.keys() - REQUIRED - OPTIONAL:
        yield f"{role}: unknown keys in {sorted(message)}"
    if None in message.values():
        yield f"{role}: a null in {message}"
    if message["role"] != "assistant" or type(message["timestamp"]) is not int:
        yield f"{role}: role or timestamp of {message}"
    if message["stop_reason"] not in STOP_REASONS:
        yield f"{role}: stop reason {message['stop_reason']!r}"
    failed = role == "error"
    if failed != (message["stop_reason"] == "error"):
        yield f"{role}: stop reason {message['stop_reason']!r}"
    if failed and (message.get("error_kind") not in ERROR_KINDS or not message["error_message"]):
        yield f"{role}: kind or words of {message}"
    if failed and not message["content"]:
        yield "an error shows nothing"
    if not failed and {"error_kind", "error_message"} & message.keys():
        yield f"{role}: an error in {message}"
    yield from _usage_shape(message.get("usage", {}))
    yield from _content(message["content"], role)


def _content(content: list[Frame], role: str) -> Iterator[str]:
    places = [ORDER.index(block["type"]) for block in content]
    if places != sorted(places) or places.count(0) > 1 or places.count(1) > 1:
        yield f"{role}: order of blocks {[block['type'] for block in content]}"
    for block in content:
        fields = BLOCKS[block["type"]]
        if block.keys() - {"type"} != fields.keys() or not all(
            isinstance(block[name], kind) for name, kind in fields.items()
        ):
            yield f"{role}: the block {block}"
        elif "" in block.values():
            yield f"{role}: something empty in {block}"
    ids = [block["id"] for block in content if block["type"] == "function_call"]
    if len(ids) > 129:
        yield f"{role}: {len(ids)} calls"


def _usage_shape(usage: Any) -> Iterator[str]:
    if (
        not isinstance(usage, dict)
        or usage.keys() - USAGE
        or not all(type(count) is int and count >= 0 for count in usage.values())
    ):
        yield f"usage {usage!r}"


def _blocks(frames: list[Frame]) -> Iterator[str]:
    """Blocks are balanced, and what their deltas add up to is what the snapshots show."""
    texts = {"text": "", "thinking": ""}
    arguments: dict[str, str] = {}
    anonymous = False
    opened = None
    for frame in frames:
        kind, _, edge = frame["type"].rpartition("_")
        if kind not in KINDS:
            if opened and frame["type"] in ("start", "stop", "done", "error"):
                yield f"{frame['type']} inside {opened}"
            message = frame.get("message") or frame.get("error")
        elif edge == "start":
            if opened:
                yield f"{kind} opens inside {opened}"
            opened, message = kind, frame.get("partial")
        else:
            if opened != kind:
                yield f"{frame['type']} outside its block"
            if edge == "delta" and kind == "functioncall":
                anonymous = anonymous or "id" not in frame
                name = frame.get("id", "")
                arguments[name] = arguments.get(name, "") + str(frame.get("delta"))
            elif edge == "delta":
                texts[kind] += str(frame.get("delta"))
            else:
                opened = None
            message = frame.get("partial")
        if message:
            yield from _adds_up(frame, message, texts, None if anonymous else arguments)
    if opened:
        yield f"{opened} stays open"


def _adds_up(
    frame: Frame, message: Frame, texts: dict[str, str], arguments: dict[str, str] | None
) -> Iterator[str]:
    shown = {"text": "", "thinking": ""}
    for block in message.get("content", ()):
        if block["type"] in shown:
            shown[block["type"]] += block["text"]
        elif arguments is not None:
            sent = parse_arguments(arguments.get(block["id"], ""))
            if sent == {} and block["arguments"] == {"_partial": True}:
                continue  # broke off before its arguments
            if json.loads(whole(json.dumps(sent, ensure_ascii=False))) != block["arguments"]:
                yield f"{frame['type']} shows the arguments {block['arguments']}, sent were {sent}"
    said = message.get("error_message")
    if shown != texts and not (shown == {"text": said, "thinking": ""} and not any(texts.values())):
        yield f"{frame['type']} shows {shown}, sent was {texts}"
