"""``state::*``: a key/value store with two-level keys, in memory (engine protocol 6)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

from ..errors import BusError

MISSING = object()


class StateStore:
    """The store behind the functions; each takes the call's ``data``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes: dict[str, dict[str, Any]] = {}

    def functions(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """Function ids and what serves them."""
        return {
            "state::set": self.set,
            "state::get": self.get,
            "state::delete": self.delete,
            "state::update": self.update,
            "state::list": self.list,
            "state::list_groups": self.list_groups,
        }

    def set(self, data: dict[str, Any]) -> dict[str, Any]:
        """Write ``value`` (or ``data``); the old one and the new one."""
        scope, key = _texts(data, "scope", "key")
        value = data.get("value", data.get("data", MISSING))
        if value is MISSING:
            raise BusError("deserialization_error", "missing field `value`")
        with self._lock:
            return self._replace(scope, key, value)

    def get(self, data: dict[str, Any]) -> Any:
        """The value, None if there is none."""
        scope, key = _texts(data, "scope", "key")
        with self._lock:
            return copy.deepcopy(self._scopes.get(scope, {}).get(key))

    def delete(self, data: dict[str, Any]) -> Any:
        """Take the value out; what it was."""
        scope, key = _texts(data, "scope", "key")
        with self._lock:
            return self._scopes.get(scope, {}).pop(key, None)

    def update(self, data: dict[str, Any]) -> dict[str, Any]:
        """Change the value by ``ops``, all or none of them; the old one and the new one."""
        scope, key = _texts(data, "scope", "key")
        ops = data.get("ops")
        if not isinstance(ops, list) or not all(isinstance(op, dict) for op in ops):
            raise BusError("deserialization_error", "ops: expected a list of objects")
        with self._lock:
            value = copy.deepcopy(self._scopes.get(scope, {}).get(key))
            for op in ops:
                value = _applied(value, op)
            return self._replace(scope, key, value)

    def list(self, data: dict[str, Any]) -> list[Any]:
        """The values of a scope, without their keys."""
        (scope,) = _texts(data, "scope")
        with self._lock:
            return copy.deepcopy([*self._scopes.get(scope, {}).values()])

    def list_groups(self, data: dict[str, Any]) -> dict[str, Any]:
        """The scopes that hold something."""
        with self._lock:
            return {"groups": sorted(scope for scope, keys in self._scopes.items() if keys)}

    def _replace(self, scope: str, key: str, value: Any) -> dict[str, Any]:
        """Needs the lock."""
        keys = self._scopes.setdefault(scope, {})
        old = keys.get(key)
        keys[key] = copy.deepcopy(value)
        return {"old_value": old, "new_value": value}


def _texts(data: dict[str, Any], *names: str) -> list[str]:
    for name in names:
        if not isinstance(data.get(name), str):
            raise BusError("deserialization_error", f"{name}: expected a string")
    return [data[name] for name in names]


def _applied(value: Any, op: dict[str, Any]) -> Any:
    """``value`` after one operation on a first-level field; an empty path means the root."""
    path = op.get("path") or ""
    if not isinstance(path, str):
        raise BusError("deserialization_error", "path: this engine takes first-level fields only")
    root = {"": value} if path == "" else value if isinstance(value, dict) else {}
    old = root.get(path)
    kind = op.get("type")
    if kind == "set":
        root[path] = op.get("value")
    elif kind == "merge":
        root[path] = {**(old if isinstance(old, dict) else {}), **(op.get("value") or {})}
    elif kind in ("increment", "decrement"):
        step = op.get("by", 1)
        root[path] = (old or 0) + (step if kind == "increment" else -step)
    elif kind == "append":
        root[path] = [*(old if isinstance(old, list) else []), op.get("value")]
    elif kind == "remove":
        root.pop(path, None)
    else:
        raise BusError("deserialization_error", f"unknown operation {kind!r}")
    return root.get("") if path == "" else root
