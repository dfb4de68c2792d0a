"""Reads values of a peer's answer: what is of another type than it should be counts as missing.

For what servers say of themselves, where older ones say less and others say it differently. What a
caller sent is read by :mod:`.fields`, which refuses it instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def mapping(value: object) -> Mapping[str, Any]:
    """A JSON object; an empty one if it is none."""
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> Sequence[Any]:
    """A JSON list; an empty one if it is none."""
    return value if isinstance(value, list) else ()


def objects(value: object) -> list[Mapping[str, Any]]:
    """The objects of a JSON list, whatever else is in it."""
    return [each for each in sequence(value) if isinstance(each, dict)]


def texts(value: object) -> list[str]:
    """The strings of a JSON list, whatever else is in it."""
    return [each for each in sequence(value) if isinstance(each, str)]


def text(value: object) -> str | None:
    """A string; None if it is none."""
    return value if isinstance(value, str) else None


def boolean(value: object) -> bool | None:
    """True or false; None if it is neither."""
    return value if isinstance(value, bool) else None


def integer(value: object) -> int | None:
    """A whole number; None if it is none. True and false are none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
