"""Payloads of our bus functions: checked and unpacked.

More is accepted than the registered schemas say: an explicit null for anything optional, blocks
and levels that newer routers send, fields that are never read and therefore not looked at. What
remains is refused with the name of the field; values are never quoted, they may be secret.

Messages and tools stay plain objects: once checked here, the conversion takes them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import fields
from .fields import Path

MAX_INPUTS = 512
"""Texts in one embedding request (provider protocol 9)."""
THINKING_LEVELS = ("off", "none", "minimal", "low", "medium", "high", "xhigh")
"""``off`` and ``none`` ask for no thinking, like a request without a level."""

# The fields of each block that are read, all of them text. Any other field is left alone.
_BLOCK_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "image": ("mime", "data"),
    "audio": ("mime", "data"),
    "file": (),
    "thinking": ("text",),
    "redacted_thinking": (),
    "function_call": ("id", "function_id"),
    "function_result": ("function_call_id",),
}


@dataclass(frozen=True, slots=True)
class WriterRef:
    """The channel that a stream's events go to."""

    channel_id: str
    access_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What is asked for, and not where the answer goes (provider protocol 5)."""

    model: str
    messages: list[dict[str, Any]] = field(repr=False)
    max_output_tokens: int | None = None
    system_prompt: str | None = field(default=None, repr=False)
    tools: list[dict[str, Any]] = field(default_factory=list, repr=False)
    response_format: dict[str, Any] | None = field(default=None, repr=False)
    thinking_level: str | None = None
    provider_options: dict[str, Any] = field(default_factory=dict, repr=False)
    model_meta: dict[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest(ChatRequest):
    """Input of ``stream`` (provider protocol 5)."""

    writer: WriterRef


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Input of ``embed`` (provider protocol 9)."""

    model: str | None
    input: list[str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class CountRequest:
    """Input of ``count_tokens`` (provider protocol 9)."""

    model: str
    messages: list[dict[str, Any]] = field(repr=False)
    system_prompt: str | None = field(default=None, repr=False)
    tools: list[dict[str, Any]] = field(default_factory=list, repr=False)


def decode_stream(data: object) -> StreamRequest:
    """Unpack the payload of ``stream``.

    :raises InvalidRequest: naming the field that does not fit
    """
    payload = fields.payload(data)
    return StreamRequest(writer=decode_writer(payload.get("writer_ref")), **_chat(payload))


def decode_chat(data: object) -> ChatRequest:
    """Unpack the payload of ``stream`` of a caller who has no channel.

    :raises InvalidRequest: naming the field that does not fit
    """
    return ChatRequest(**_chat(fields.payload(data)))


def _chat(payload: dict[str, Any]) -> dict[str, Any]:
    """The fields of a :class:`ChatRequest`."""
    level = fields.optional_text(payload, "thinking_level")
    if level is not None and level not in THINKING_LEVELS:
        fields.fail(("thinking_level",), "must be one of " + ", ".join(THINKING_LEVELS))
    # Read where the call is admitted; but one that no abort could name is refused.
    fields.optional_text(payload, "resolution_key")
    response_format = fields.optional_object(payload, "response_format")
    if response_format is not None:
        fields.text(response_format, "type", ("response_format",))
    return {
        "model": fields.text(payload, "model"),
        "messages": _messages(payload),
        "max_output_tokens": fields.optional_count(payload, "max_output_tokens"),
        "system_prompt": fields.optional_text(payload, "system_prompt"),
        "tools": _tools(payload),
        "response_format": response_format,
        "thinking_level": level,
        "provider_options": fields.optional_object(payload, "provider_options") or {},
        "model_meta": fields.optional_object(payload, "model_meta"),
    }


def decode_embed(data: object) -> EmbedRequest:
    """Unpack the payload of ``embed``.

    :raises InvalidRequest: naming the field that does not fit
    """
    payload = fields.payload(data)
    texts = fields.texts(payload, "input", MAX_INPUTS)
    return EmbedRequest(model=fields.optional_text(payload, "model"), input=texts)


def decode_count(data: object) -> CountRequest:
    """Unpack the payload of ``count_tokens``.

    :raises InvalidRequest: naming the field that does not fit
    """
    payload = fields.payload(data)
    request = CountRequest(
        model=fields.text(payload, "model"),
        messages=_messages(payload),
        system_prompt=fields.optional_text(payload, "system_prompt"),
        tools=_tools(payload),
    )
    if not request.messages:
        fields.fail(("messages",), "must not be empty")
    return request


def decode_abort(data: object) -> str:
    """Unpack the payload of ``abort``: the ``resolution_key`` of the stream to end.

    :raises InvalidRequest: naming the field that does not fit
    """
    return fields.text(fields.payload(data), "request_id")


def decode_writer(value: object) -> WriterRef:
    """Unpack a ``writer_ref``.

    :raises InvalidRequest: naming the field that does not fit
    """
    path = ("writer_ref",)
    if not isinstance(value, dict):
        fields.fail(path, "must be an object")
    # A reading end would only fail later, and in words that do not name the mistake.
    if value.get("direction") not in (None, "write"):
        fields.fail((*path, "direction"), 'must be "write"')
    return WriterRef(fields.text(value, "channel_id", path), fields.text(value, "access_key", path))


def _messages(payload: dict[str, Any]) -> list[dict[str, Any]]:
    messages = fields.items(payload, "messages")
    for index, message in enumerate(messages):
        path: Path = ("messages", index)
        if not isinstance(message, dict):
            fields.fail(path, "must be an object")
        role = message.get("role")
        if role == "custom":
            continue  # for the eyes of the application; never sent on
        if role not in ("user", "assistant", "function_result"):
            fields.fail((*path, "role"), "must be user, assistant, function_result or custom")
        if role == "function_result":
            fields.text(message, "function_call_id", path)
        _blocks(fields.items(message, "content", path), (*path, "content"))
    return messages


def _blocks(blocks: list[Any], path: Path) -> None:
    # Results hold blocks again, as deep as a caller likes: hence no recursion.
    waiting = [(blocks, path)]
    while waiting:
        blocks, path = waiting.pop()
        for index, block in enumerate(blocks):
            if not isinstance(block, dict):
                fields.fail((*path, index), "must be an object")
            kind = block.get("type")
            names = _BLOCK_FIELDS.get(kind) if isinstance(kind, str) else None
            if names is None:
                fields.fail((*path, index, "type"), "must be one of " + ", ".join(_BLOCK_FIELDS))
            for name in names:
                if not isinstance(block.get(name), str):
                    fields.fail((*path, index, name), "must be a string")
            if kind == "function_result":
                inner: Path = (*path, index)
                waiting.append((fields.items(block, "content", inner), (*inner, "content")))


def _tools(payload: dict[str, Any]) -> list[dict[str, Any]]:
    if payload.get("tools") is None:
        return []
    tools = fields.items(payload, "tools")
    for index, tool in enumerate(tools):
        path: Path = ("tools", index)
        if not isinstance(tool, dict):
            fields.fail(path, "must be an object")
        fields.text(tool, "name", path)
        fields.optional_text(tool, "description", path)
        fields.check_depth(tool, path)
    return tools
