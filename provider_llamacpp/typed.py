"""The events of a stream as values with types, and the message they add up to.

What travels over the bus is JSON (provider protocol 6); :func:`decode_event` makes one of the
fifteen kinds of it. Pure. What is not known here is left out, so a newer peer does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

from . import jsontext
from .errors import ErrorKind

StopReason: TypeAlias = Literal["end", "length", "function_call", "aborted", "error"]

# -- the message ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextBlock:
    """What the model says."""

    text: str
    type: Literal["text"] = field(default="text", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    """What the model thinks."""

    text: str
    type: Literal["thinking"] = field(default="thinking", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a tool that the model asks for."""

    id: str
    """Names the call in its ``function_result``; made up here if the server gave none."""
    function_id: str
    """The tool's name, as the request had it."""
    arguments: dict[str, Any]
    """Always an object, whatever the model wrote (provider protocol 8.2)."""
    type: Literal["function_call"] = field(default="function_call", init=False, repr=False)


Block: TypeAlias = TextBlock | ThinkingBlock | FunctionCall


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens; None where the server did not say (provider protocol 6.1)."""

    input: int | None = None
    """Of the prompt, those from the cache included."""
    output: int | None = None
    """Of the answer, its thoughts included."""
    cache_read: int | None = None
    """Of ``input``, those that need not be computed."""
    cache_write: int | None = None
    reasoning: int | None = None
    """Of ``output``, those of thoughts."""
    cost_usd: float | None = None
    """Filled in by the router, in US dollars."""


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """The answer, or what there is of it so far (provider protocol 5.1 and 6)."""

    content: tuple[Block, ...]
    """Thinking, text, calls, in this order (6.1, rule 3)."""
    stop_reason: StopReason
    """``end`` as long as the answer goes on."""
    model: str
    """As it was asked for."""
    provider: str
    timestamp: int
    """Milliseconds since 1970."""
    native_stop_reason: str | None = None
    """The server's own word."""
    usage: Usage | None = None
    warnings: tuple[str, ...] = ()
    """What was not done as asked, in words."""
    error_message: str | None = None
    error_kind: ErrorKind | None = None
    """Only ``rate_limited`` and ``transient`` are worth another try (6.4)."""

    @property
    def text(self) -> str:
        """All that the model said."""
        return "".join(each.text for each in self.content if isinstance(each, TextBlock))

    @property
    def thinking(self) -> str:
        """All that the model thought."""
        return "".join(each.text for each in self.content if isinstance(each, ThinkingBlock))

    @property
    def calls(self) -> tuple[FunctionCall, ...]:
        """The calls it asks for."""
        return tuple(each for each in self.content if isinstance(each, FunctionCall))

    def to_dict(self) -> dict[str, Any]:
        """The message as it travels: for the ``messages`` of the next request."""
        optional: dict[str, Any] = {
            "native_stop_reason": self.native_stop_reason,
            "usage": None if self.usage is None else _known(self.usage),
            "warnings": list(self.warnings) or None,
            "error_message": self.error_message,
            "error_kind": self.error_kind,
        }
        return {
            "role": "assistant",
            "content": [_known(each) for each in self.content],
            "stop_reason": self.stop_reason,
            "model": self.model,
            "provider": self.provider,
            "timestamp": self.timestamp,
            **{name: value for name, value in optional.items() if value is not None},
        }


def _known(value: Any) -> dict[str, Any]:
    """The fields of a flat dataclass that are not None."""
    given = {name: getattr(value, name) for name in value.__dataclass_fields__}
    return {name: each for name, each in given.items() if each is not None}


# -- the events -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The answer begins. Once, before all else but :class:`Ping` and a lone :class:`Failure`."""

    partial: AssistantMessage
    type: Literal["start"] = field(default="start", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class TextStart:
    """Text begins."""

    partial: AssistantMessage
    type: Literal["text_start"] = field(default="text_start", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text."""

    delta: str
    type: Literal["text_delta"] = field(default="text_delta", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class TextEnd:
    """The text pauses, or is over; ``partial`` is what counts."""

    partial: AssistantMessage
    type: Literal["text_end"] = field(default="text_end", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class ThinkingStart:
    """A thought begins."""

    partial: AssistantMessage
    type: Literal["thinking_start"] = field(default="thinking_start", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """More of a thought."""

    delta: str
    type: Literal["thinking_delta"] = field(default="thinking_delta", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class ThinkingEnd:
    """The thought pauses, or is over."""

    partial: AssistantMessage
    type: Literal["thinking_end"] = field(default="thinking_end", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class FunctionCallStart:
    """A call begins. It is not in ``partial`` yet (6.1, rule 7)."""

    partial: AssistantMessage
    type: Literal["functioncall_start"] = field(
        default="functioncall_start", init=False, repr=False
    )


@dataclass(frozen=True, slots=True)
class FunctionCallDelta:
    """More of a call's arguments, as JSON text."""

    delta: str
    id: str | None = None
    """Of the call, where it is known already."""
    type: Literal["functioncall_delta"] = field(
        default="functioncall_delta", init=False, repr=False
    )


@dataclass(frozen=True, slots=True)
class FunctionCallEnd:
    """The call is whole."""

    partial: AssistantMessage
    type: Literal["functioncall_end"] = field(default="functioncall_end", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class UsageUpdate:
    """Counts so far; each has those of the one before."""

    usage: Usage
    type: Literal["usage"] = field(default="usage", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Ping:
    """Nothing happened for a while (6.5). On the bus only: a direct stream has none."""

    type: Literal["ping"] = field(default="ping", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Stop:
    """The model stopped; :class:`Done` follows."""

    stop_reason: StopReason
    type: Literal["stop"] = field(default="stop", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a whole answer."""

    message: AssistantMessage
    type: Literal["done"] = field(default="done", init=False, repr=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """The last event of an answer that failed; ``error`` has what came before, and says why."""

    error: AssistantMessage
    type: Literal["error"] = field(default="error", init=False, repr=False)


Event: TypeAlias = (
    Start
    | TextStart
    | TextDelta
    | TextEnd
    | ThinkingStart
    | ThinkingDelta
    | ThinkingEnd
    | FunctionCallStart
    | FunctionCallDelta
    | FunctionCallEnd
    | UsageUpdate
    | Ping
    | Stop
    | Done
    | Failure
)

# -- from JSON --------------------------------------------------------------------------------

Json: TypeAlias = Mapping[str, Any]


def decode_event(frame: bytes | str | Json) -> Event:
    """A frame of a caller's channel as a value (provider protocol 6).

    :param frame: its JSON text, or what that was read to
    :raises ValueError: if it is no JSON object, of no known kind, or lacks what its kind has
    """
    value = jsontext.loads(frame) if isinstance(frame, bytes | str) else frame
    if not isinstance(value, Mapping):
        raise ValueError("the frame is no object")
    decode = _KINDS.get(value.get("type", ""))
    if decode is None:
        raise ValueError("the frame is of no known kind")
    try:
        return decode(value)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"a {value['type']} frame that is none: {error!r}") from error


def decode_message(value: Json) -> AssistantMessage:
    """An assistant message (provider protocol 5.1). Blocks of other kinds are left out.

    :raises ValueError: if it lacks what every message has
    """
    try:
        return _message(value)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"an assistant message that is none: {error!r}") from error


def _message(value: Json) -> AssistantMessage:
    usage = value.get("usage")
    return AssistantMessage(
        content=tuple(block for each in value["content"] if (block := _block(each)) is not None),
        stop_reason=cast(StopReason, value["stop_reason"]),
        model=value["model"],
        provider=value["provider"],
        timestamp=value["timestamp"],
        native_stop_reason=value.get("native_stop_reason"),
        usage=None if usage is None else _usage(usage),
        warnings=tuple(value.get("warnings") or ()),
        error_message=value.get("error_message"),
        error_kind=value.get("error_kind"),
    )


def _block(value: Json) -> Block | None:
    kind = value["type"]
    if kind == "text":
        return TextBlock(_text(value, "text"))
    if kind == "thinking":
        return ThinkingBlock(_text(value, "text"))
    if kind == "function_call":
        return FunctionCall(value["id"], value["function_id"], value["arguments"])
    return None


def _text(value: Json, name: str) -> str:
    text = value[name]
    if not isinstance(text, str):
        raise TypeError(f"{name} is no text")
    return text


def _usage(value: Json) -> Usage:
    return Usage(**{name: value.get(name) for name in Usage.__dataclass_fields__})


_KINDS: Mapping[str, Callable[[Json], Event]] = {
    "start": lambda frame: Start(_message(frame["partial"])),
    "text_start": lambda frame: TextStart(_message(frame["partial"])),
    "text_delta": lambda frame: TextDelta(_text(frame, "delta")),
    "text_end": lambda frame: TextEnd(_message(frame["partial"])),
    "thinking_start": lambda frame: ThinkingStart(_message(frame["partial"])),
    "thinking_delta": lambda frame: ThinkingDelta(_text(frame, "delta")),
    "thinking_end": lambda frame: ThinkingEnd(_message(frame["partial"])),
    "functioncall_start": lambda frame: FunctionCallStart(_message(frame["partial"])),
    "functioncall_delta": lambda frame: FunctionCallDelta(_text(frame, "delta"), frame.get("id")),
    "functioncall_end": lambda frame: FunctionCallEnd(_message(frame["partial"])),
    "usage": lambda frame: UsageUpdate(_usage(frame["usage"])),
    "ping": lambda frame: Ping(),
    "stop": lambda frame: Stop(frame["stop_reason"]),
    "done": lambda frame: Done(_message(frame["message"])),
    "error": lambda frame: Failure(_message(frame["error"])),
}
