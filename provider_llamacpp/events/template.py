"""Learns the constant bytes around the text of a delta, so that later deltas need no JSON reader.

The chunks of one answer differ in one string only, apart from the second in ``created``. A chunk
that was read the normal way, and carries nothing but one string, is cut into what stands before and
behind that string. A later chunk with the same bytes around a plain string then means the same with
another text. :func:`learn` proves that by reading the chunk again with the string exchanged.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from .. import jsontext
from .toolcalls import argument_holder

_TEXT_KEYS = ("content", "reasoning_content", "reasoning")
_CARRIERS = (*_TEXT_KEYS, "tool_calls", "function_call")
_TRIES = 3
_MAX_PAYLOAD = 1 << 14  # a chunk of one token has some 250 bytes

# NaN reads as null and a control character as itself: some servers write them where it is harmless.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None, strict=False)

SPECIAL = bytes([*range(0x20), *b'"\\'])
"""Bytes that do not stand for themselves inside a JSON string; text without them is plain."""

plain = re.compile(rb'[^"\\\x00-\x1f]*(?:\\["\\nrtbf][^"\\\x00-\x1f]*)*').fullmatch
"""Fits the inside of a JSON string in the one form our own writer gives it: ``\\u`` and ``\\/`` do
not fit. Says nothing about UTF-8."""


def read(payload: bytes) -> Any:
    """The JSON value of one event.

    :raises ValueError: for anything else, and for nesting too deep
    """
    return jsontext.read(payload, _DECODER)


def is_utf8(body: bytes) -> bool:
    """Whether ``body`` is valid UTF-8."""
    if body.isascii():
        return True
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where the one string of a chunk is: under ``key`` in ``holder``, a part of the chunk."""

    holder: dict[str, Any]
    key: str
    text: str


def leaf_of(chunk: dict[str, Any]) -> Leaf | None:
    """The string of a chunk that carries nothing else; None if it carries more, or none.

    A chunk like it changes the message by that string alone: no error, usage, finish reason, new
    call, second choice.
    """
    if chunk.get("error") or chunk.get("usage") or chunk.get("prompt_progress"):
        return None
    choices = chunk.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    choice = choices[0]
    delta = choice.get("delta")
    if choice.get("index", 0) != 0 or choice.get("finish_reason") or not isinstance(delta, dict):
        return None
    carried = [key for key in _CARRIERS if delta.get(key)]
    if len(carried) != 1:
        return None
    key = carried[0]
    if key in _TEXT_KEYS:
        return _string(delta, key)
    fragments = delta[key]
    if key != "tool_calls" or not isinstance(fragments, list) or len(fragments) != 1:
        return None
    holder = argument_holder(fragments[0])
    return _string(holder, "arguments") if holder is not None else None


def _string(holder: dict[str, Any], key: str) -> Leaf | None:
    text = holder.get(key)
    return Leaf(holder, key, text) if isinstance(text, str) and text else None


def learn(payload: bytes, chunk: dict[str, Any], leaf: Leaf) -> tuple[bytes, bytes] | None:
    """The bytes before and behind the string ``leaf`` of ``payload``; None if they are not sure.

    :param payload: the bytes ``chunk`` was read from; ``chunk`` is changed
    """
    if len(payload) > _MAX_PAYLOAD or b"\n" in payload:
        return None  # several lines of data are not the form that is cut without a parser
    probe = "0" if leaf.text != "0" else "1"
    leaf.holder[leaf.key] = probe
    places = re.finditer(rb'"%b"\s*:\s*"((?:[^"\\]|\\.)*)"' % leaf.key.encode(), payload)
    for _, place in zip(range(_TRIES), places, strict=False):
        before, behind = payload[: place.start(1)], payload[place.end(1) :]
        try:
            if read(before + probe.encode() + behind) == chunk:
                return before, behind
        except (ValueError, RecursionError):
            continue
    return None
