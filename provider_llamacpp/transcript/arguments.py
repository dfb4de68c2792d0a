"""Tool-call arguments: whatever text a model wrote, read as a JSON object, and back again.

Both directions always end in an object. A call that was cut, or that is no JSON at all, is marked
(``_partial``, ``_raw``) instead of being run with defaults or sent back broken: llama-server
refuses every later request over a history that holds half a call.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from ..jsontext import DEPTH_LIMIT, dumps, whole

SCAN_LIMIT = 4096
"""Bytes at the start that are searched for complete members (provider protocol 8.2)."""
RAW_LIMIT = 2048
"""Bytes kept of a text that could not be read (provider protocol 8.2)."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("number out of range")  # Python reads 1e999; other readers do not
    return value


def _integer(text: str) -> int:
    if len(text) > 300:
        raise ValueError("number out of range")  # as above: it would not fit a double
    return int(text)


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer
)
# A whole string (or the start of one that the text breaks off in), or one sign outside strings.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\],]', re.DOTALL)


def parse_arguments(text: str) -> dict[str, Any]:
    """Read arguments as a model wrote them (provider protocol 8.2).

    :param text: JSON text, perhaps cut, perhaps no JSON
    :return: the object; or its complete first members and ``"_partial": True``; or
        ``{"_raw": start of the text}``. Blank text is ``{}``.
    """
    if not text or text.isspace():
        return {}
    value = _read_object(text)
    if value is not None:
        return value
    encoded = whole(text).encode()
    head = encoded[:SCAN_LIMIT].decode("utf-8", "ignore")
    for end in reversed(_member_ends(head)):
        members = _read_object(head[:end] + "}")
        if members:
            members["_partial"] = True
            return members
    return {"_raw": encoded[:RAW_LIMIT].decode("utf-8", "ignore")}


def arguments_text(value: object) -> str:
    """Arguments from the history as the JSON text of an object, for llama-server.

    :param value: an object as it should be; text is read with :func:`parse_arguments`, None is
        ``{}``, and anything else is kept under ``_raw``
    """
    if value is None:
        return "{}"
    if isinstance(value, str):
        return dumps(parse_arguments(value))
    try:
        text = dumps(value)
    except ValueError:
        return '{"_raw":"unreadable arguments"}'
    if isinstance(value, dict) and _shallow_text(text):
        return text
    return dumps(parse_arguments(text))


def _shallow_text(text: str) -> bool:
    """:func:`~.jsontext.shallow` for JSON text, nearly always decided by counting."""
    if text.count("{") + text.count("[") <= DEPTH_LIMIT:
        return True
    depth = 0
    for match in _TOKEN.finditer(text):
        sign = match.group()
        if sign in ("{", "["):
            depth += 1
            # At once: a model stuck on one bracket fills megabytes with it.
            if depth > DEPTH_LIMIT:
                return False
        elif sign in ("}", "]"):
            depth -= 1
    return True


def _read_object(text: str) -> dict[str, Any] | None:
    if not _shallow_text(text):
        return None
    try:
        value = _DECODER.decode(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _member_ends(text: str) -> list[int]:
    """Offsets of the commas that end a member of the outermost object."""
    ends: list[int] = []
    depth = 0
    for match in _TOKEN.finditer(text):
        sign = match.group()
        if sign in ("{", "["):
            depth += 1
        elif sign in ("}", "]"):
            depth -= 1
        elif sign == "," and depth == 1:
            ends.append(match.start())
    return ends
