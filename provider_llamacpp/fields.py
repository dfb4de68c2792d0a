"""Reads the fields of a payload; what does not fit is refused with the name of the field.

An explicit null counts as absent for whatever is optional. Values are never quoted: they may be
secret. ``path`` is where the holder stands in the payload.
"""

from __future__ import annotations

from typing import Any, NoReturn

from .errors import InvalidRequest
from .jsontext import shallow

Path = tuple[str | int, ...]


def fail(path: Path, what: str) -> NoReturn:
    """:raises InvalidRequest: always, saying ``what`` of the field at ``path``"""
    dotted = ""
    for step in path:
        dotted += f"[{step}]" if isinstance(step, int) else f".{step}"
    raise InvalidRequest(f"{dotted.lstrip('.') or 'payload'}: {what}")


def payload(data: object) -> dict[str, Any]:
    """:raises InvalidRequest: if ``data`` is no object"""
    if not isinstance(data, dict):
        fail((), "must be an object")
    return data


def text(holder: dict[str, Any], name: str, path: Path = ()) -> str:
    """:raises InvalidRequest: if the field is no string"""
    value = holder.get(name)
    if not isinstance(value, str):
        fail((*path, name), "must be a string")
    return value


def optional_text(holder: dict[str, Any], name: str, path: Path = ()) -> str | None:
    """:raises InvalidRequest: if the field is there and no string"""
    return None if holder.get(name) is None else text(holder, name, path)


def items(holder: dict[str, Any], name: str, path: Path = ()) -> list[Any]:
    """:raises InvalidRequest: if the field is no list"""
    value = holder.get(name)
    if not isinstance(value, list):
        fail((*path, name), "must be a list")
    return value


def texts(holder: dict[str, Any], name: str, most: int) -> list[str]:
    """:raises InvalidRequest: if the field is no list of 1 to ``most`` strings"""
    found = items(holder, name)
    for index, each in enumerate(found):
        if not isinstance(each, str):
            fail((name, index), "must be a string")
    if not 1 <= len(found) <= most:
        fail((name,), f"must hold 1 to {most} strings")
    return found


def optional_object(holder: dict[str, Any], name: str) -> dict[str, Any] | None:
    """:raises InvalidRequest: if the field is there and no object, or one nested too deep"""
    value = holder.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        fail((name,), "must be an object")
    check_depth(value, (name,))
    return value


def whole(value: object, path: Path, least: int = 0) -> int:
    """``value`` as an integer; JSON has one kind of number: 100.0 is the integer 100.

    :raises InvalidRequest: if it is none, or below ``least``
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        fail(path, f"must be an integer of at least {least}")
    return value


def optional_count(holder: dict[str, Any], name: str, least: int = 0) -> int | None:
    """:raises InvalidRequest: if the field is there and no integer of at least ``least``"""
    value = holder.get(name)
    return None if value is None else whole(value, (name,), least)


def flag(holder: dict[str, Any], name: str, default: bool) -> bool:
    """:raises InvalidRequest: if the field is there and neither true nor false"""
    value = holder.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        fail((name,), "must be true or false")
    return value


def check_depth(value: object, path: Path) -> None:
    """:raises InvalidRequest: if ``value``, which goes to a server that walks it recursively, is
    nested too deep"""
    if not shallow(value):
        fail(path, "is nested too deep")
