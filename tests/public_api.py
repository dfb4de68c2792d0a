"""The public names of the package with their signatures, as text that can be compared.

``python tests/public_api.py`` writes ``tests/data/public_api.json`` anew, once a change has its
line in ``CHANGES.rst``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any, get_args

import provider_llamacpp

ROOT = Path(__file__).parent.parent
PINNED = ROOT / "tests" / "data" / "public_api.json"
VERSION: str = provider_llamacpp.__version__

Description = str | dict[str, str]


def described() -> dict[str, Description]:
    """What each public name is."""
    return {
        name: _described(getattr(provider_llamacpp, name))
        for name in sorted(provider_llamacpp.__all__)
    }


def _described(value: Any) -> Description:
    if inspect.isclass(value):
        return _class(value)
    if inspect.isfunction(value):
        return str(inspect.signature(value))
    if parts := get_args(value):
        names = (each.__name__ if type(each) is type else str(each) for each in parts)
        return "one of " + ", ".join(sorted(names))
    return type(value).__name__


def _class(value: type) -> Description:
    ours = [each for each in value.__mro__ if each.__module__.startswith("provider_llamacpp")]
    found = {"bases": ", ".join(each.__name__ for each in value.__bases__)}
    if any("__init__" in vars(each) for each in ours):
        found["()"] = str(inspect.signature(value))
    if dataclasses.is_dataclass(value):
        found |= {each.name: f"field: {each.type}" for each in dataclasses.fields(value)}
    for base in reversed(ours):
        for name, member in vars(base).items():
            if name.startswith("_") and name not in ("__iter__", "__next__", "__enter__"):
                continue
            if isinstance(member, property) and member.fget is not None:
                found[name] = f"property: {inspect.get_annotations(member.fget)['return']}"
            elif inspect.isfunction(member):
                found[name] = str(inspect.signature(member))
    return dict(sorted(found.items()))


def pinned() -> dict[str, dict[str, Any]]:
    """As it was when it was last written: ``is`` and the version that made it so, ``since``."""
    found: dict[str, dict[str, Any]] = json.loads(PINNED.read_text(encoding="utf-8"))
    return found


def changes_of(version: str) -> str:
    """The section of ``CHANGES.rst`` on ``version``; empty if there is none."""
    text = (ROOT / "CHANGES.rst").read_text(encoding="utf-8")
    sections = re.split(r"(?m)^(\S+) \(.*\)\n-+\n", text)
    return dict(zip(sections[1::2], sections[2::2], strict=True)).get(version, "")


def without_entry(names: dict[str, str]) -> list[str]:
    """Those of ``names``, each with a version, of which ``CHANGES.rst`` does not speak there."""
    return [
        name
        for name, version in names.items()
        if not re.search(rf"``(\w+\.)*{re.escape(name)}\b[^`]*``", changes_of(version))
    ]


def write() -> None:
    """Write the file anew."""
    before = pinned() if PINNED.exists() else {}
    now = described()
    gone = {name: VERSION for name in before if name not in now}
    found = {
        name: before[name]
        if name in before and before[name]["is"] == value
        else {"since": VERSION, "is": value}
        for name, value in now.items()
    }
    missing = without_entry(gone | {name: each["since"] for name, each in found.items()})
    if missing:
        sys.exit(f"CHANGES.rst does not say what became of: {', '.join(missing)}")
    PINNED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
