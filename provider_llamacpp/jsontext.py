"""JSON text as the bus takes it: compact, strict, always valid UTF-8.

Python's ``json`` reads and writes ``NaN`` and keeps half surrogate pairs, which then fail to
encode; the peers (serde_json among them) refuse both. All text that crosses a wire goes through
here (engine protocol 1.4).
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

DEPTH_LIMIT = 100
"""Containers inside each other. serde_json, which the router reads with, stops at 128 and then
skips the whole frame in silence; the frame around a value takes some of them."""

READ_LIMIT = 500
"""Containers inside each other that are read at all. Python 3.13 follows them ten thousand deep,
whatever the stack: on that of a thread it would be the end of the process."""

_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def whole(text: str) -> str:
    """Join surrogate halves that stand side by side; a lone half becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def dumps(value: object) -> str:
    """``value`` as compact JSON text that always encodes to UTF-8.

    :raises ValueError: for NaN, infinities, values JSON has no form for, and nesting too deep
    """
    try:
        text = _ENCODER.encode(value)
        fit = whole(text)
        if fit is not text:
            # Keys that differed in lone halves only are one key now: the last of them stays.
            fit = _ENCODER.encode(_DECODER.decode(fit))
        return fit
    except (TypeError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from error


def dumpb(value: object) -> bytes:
    """:func:`dumps`, encoded."""
    return dumps(value).encode()


def loads(text: str | bytes) -> Any:
    """Read one JSON value; ``bytes`` are UTF-8 with bad bytes read as U+FFFD.

    :raises ValueError: for anything that is not JSON, for ``NaN`` and for nesting too deep
    """
    return read(text, _DECODER)


def read(text: str | bytes, decoder: json.JSONDecoder) -> Any:
    """:func:`loads` with another ``decoder``."""
    if not isinstance(text, str):
        text = text.decode("utf-8", "replace")
    check_depth(text)
    try:
        return decoder.decode(text)
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error


def check_depth(text: str) -> None:
    """Before JSON ``text`` is read; nearly always decided by counting.

    :raises ValueError: if more than :data:`READ_LIMIT` containers lie inside each other
    """
    if text.count("[") + text.count("{") <= READ_LIMIT:
        return
    # Without its escapes every second part between quotes is a string.
    plain = text.encode("utf-8", "surrogatepass").replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(plain.split(b'"')[::2]).translate(None, _OTHERS)
    depth = 0
    for bracket in outside:
        depth += 1 if bracket in b"[{" else -1
        if depth > READ_LIMIT:
            raise ValueError("JSON nested too deep")


def shallow(value: object, limit: int = DEPTH_LIMIT) -> bool:
    """Whether no more than ``limit`` containers of ``value`` lie inside each other."""
    level = [value]
    for _ in range(limit):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return True
        level = below
    return not any(isinstance(item, (dict, list)) for item in level)
