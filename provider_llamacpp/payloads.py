"""Payloads of our bus functions: checked and unpacked.

More is accepted than the registered schemas say: an explicit null for anything optional, blocks
and levels that newer routers send, fields that are never read and therefore not looked at. What
remains is refused with the name of the field; values are never quoted, they may be secret.

Messages and tools stay plain objects: once checked here, the conversion takes them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .errors import InvalidRequest
from .transcript.arguments import shallow

MAX_INPUTS = 512
"""Texts in one embedding request (provider protocol 9)."""
THINKING_LEVELS = ("off", "none", "minimal", "low", "medium", "high", "xhigh")
"""``off`` and ``none`` ask for no thinking, like a request without a level."""

_Path = tuple[str | int, ...]

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
class StreamRequest:
    """Input of ``stream`` (provider protocol 5)."""

    writer: WriterRef
    model: str
    messages: list[dict[str, Any]] = field(repr=False)
    max_output_tokens: int | None = None
    resolution_key: str | None = None
    session_id: str | None = None
    system_prompt: str | None = field(default=None, repr=False)
    tools: list[dict[str, Any]] = field(default_factory=list, repr=False)
    response_format: dict[str, Any] | None = field(default=None, repr=False)
    thinking_level: str | None = None
    provider_options: dict[str, Any] = field(default_factory=dict, repr=False)
    model_meta: dict[str, Any] | None = field(default=None, repr=False)


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
    payload = _payload(data)
    level = _optional_text(payload, "thinking_level")
    if level is not None and level not in THINKING_LEVELS:
        _fail(("thinking_level",), "must be one of " + ", ".join(THINKING_LEVELS))
    response_format = _optional_object(payload, "response_format")
    if response_format is not None:
        _text(response_format, "type", ("response_format",))
    return StreamRequest(
        writer=decode_writer(payload.get("writer_ref")),
        model=_text(payload, "model"),
        messages=_messages(payload),
        max_output_tokens=_optional_count(payload, "max_output_tokens"),
        resolution_key=_optional_text(payload, "resolution_key"),
        session_id=_optional_text(payload, "session_id"),
        system_prompt=_optional_text(payload, "system_prompt"),
        tools=_tools(payload),
        response_format=response_format,
        thinking_level=level,
        provider_options=_optional_object(payload, "provider_options") or {},
        model_meta=_optional_object(payload, "model_meta"),
    )


def decode_embed(data: object) -> EmbedRequest:
    """Unpack the payload of ``embed``.

    :raises InvalidRequest: naming the field that does not fit
    """
    payload = _payload(data)
    texts = _list(payload, "input")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            _fail(("input", index), "must be a string")
    if not 1 <= len(texts) <= MAX_INPUTS:
        _fail(("input",), f"must hold 1 to {MAX_INPUTS} strings")
    return EmbedRequest(model=_optional_text(payload, "model"), input=texts)


def decode_count(data: object) -> CountRequest:
    """Unpack the payload of ``count_tokens``.

    :raises InvalidRequest: naming the field that does not fit
    """
    payload = _payload(data)
    request = CountRequest(
        model=_text(payload, "model"),
        messages=_messages(payload),
        system_prompt=_optional_text(payload, "system_prompt"),
        tools=_tools(payload),
    )
    if not request.messages:
        _fail(("messages",), "must not be empty")
    return request


def decode_abort(data: object) -> str:
    """Unpack the payload of ``abort``: the ``resolution_key`` of the stream to end.

    :raises InvalidRequest: naming the field that does not fit
    """
    return _text(_payload(data), "request_id")


def _payload(data: object) -> dict[str, Any]:
    if not isinstance(data, dict):
        _fail((), "must be an object")
    return data


def decode_writer(value: object) -> WriterRef:
    """Unpack a ``writer_ref``.

    :raises InvalidRequest: naming the field that does not fit
    """
    path = ("writer_ref",)
    if not isinstance(value, dict):
        _fail(path, "must be an object")
    # A reading end would only fail later, and in words that do not name the mistake.
    if value.get("direction") not in (None, "write"):
        _fail((*path, "direction"), 'must be "write"')
    return WriterRef(_text(value, "channel_id", path), _text(value, "access_key", path))


def _messages(payload: dict[str, Any]) -> list[dict[str, Any]]:
    messages = _list(payload, "messages")
    for index, message in enumerate(messages):
        path: _Path = ("messages", index)
        if not isinstance(message, dict):
            _fail(path, "must be an object")
        role = message.get("role")
        if role == "custom":
            continue  # for the eyes of the application; never sent on
        if role not in ("user", "assistant", "function_result"):
            _fail((*path, "role"), "must be user, assistant, function_result or custom")
        if role == "function_result":
            _text(message, "function_call_id", path)
        _blocks(_list(message, "content", path), (*path, "content"))
    return messages


def _blocks(blocks: list[Any], path: _Path) -> None:
    # Results hold blocks again, as deep as a caller likes: hence no recursion.
    waiting = [(blocks, path)]
    while waiting:
        blocks, path = waiting.pop()
        for index, block in enumerate(blocks):
            if not isinstance(block, dict):
                _fail((*path, index), "must be an object")
            kind = block.get("type")
            names = _BLOCK_FIELDS.get(kind) if isinstance(kind, str) else None
            if names is None:
                _fail((*path, index, "type"), "must be one of " + ", ".join(_BLOCK_FIELDS))
            for name in names:
                if not isinstance(block.get(name), str):
                    _fail((*path, index, name), "must be a string")
            if kind == "function_result":
                inner: _Path = (*path, index)
                waiting.append((_list(block, "content", inner), (*inner, "content")))


def _tools(payload: dict[str, Any]) -> list[dict[str, Any]]:
    if payload.get("tools") is None:
        return []
    tools = _list(payload, "tools")
    for index, tool in enumerate(tools):
        path: _Path = ("tools", index)
        if not isinstance(tool, dict):
            _fail(path, "must be an object")
        _text(tool, "name", path)
        _optional_text(tool, "description", path)
        _check_depth(tool, path)
    return tools


def _text(holder: dict[str, Any], name: str, path: _Path = ()) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        _fail((*path, name), "must be a string")
    return value


def _optional_text(holder: dict[str, Any], name: str, path: _Path = ()) -> str | None:
    return None if holder.get(name) is None else _text(holder, name, path)


def _list(holder: dict[str, Any], name: str, path: _Path = ()) -> list[Any]:
    value = holder.get(name)
    if not isinstance(value, list):
        _fail((*path, name), "must be a list")
    return value


def _optional_object(holder: dict[str, Any], name: str) -> dict[str, Any] | None:
    value = holder.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        _fail((name,), "must be an object")
    _check_depth(value, (name,))
    return value


def _optional_count(holder: dict[str, Any], name: str) -> int | None:
    value = holder.get(name)
    if value is None:
        return None
    # JSON has one kind of number: 100.0 is the integer 100.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        _fail((name,), "must be an integer of at least 0")
    return value


def _check_depth(value: object, path: _Path) -> None:
    # Free-form JSON goes on to a server that walks it recursively.
    if not shallow(value):
        _fail(path, "is nested too deep")


def _fail(path: _Path, what: str) -> NoReturn:
    dotted = ""
    for step in path:
        dotted += f"[{step}]" if isinstance(step, int) else f".{step}"
    raise InvalidRequest(f"{dotted.lstrip('.') or 'payload'}: {what}")
