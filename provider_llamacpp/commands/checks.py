"""What a check finds, in words a person can act on, and how bad it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "fault", "skipped"]
"""``warning``: it works, but slowly or in part. ``skipped``: it could not or was not to be looked
at; the text says why."""

Working = Callable[[str], AbstractContextManager[object]]
"""Shows, while the ``with`` block lasts, what is waited for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one step found.

    :param step: its name, one word
    :param remedy: what to do or which setting to change; empty if nothing need be done
    :param facts: the same for programs; plain values, no secrets
    """

    step: str
    level: Level
    text: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "step": self.step,
            "level": self.level,
            "text": self.text,
            "remedy": self.remedy,
            **({"facts": dict(self.facts)} if self.facts else {}),
        }


Findings = Iterator[Finding]


def ok(step: str, text: str, remedy: str = "", /, **facts: Any) -> Finding:
    """All is well; ``remedy`` says what could be had besides."""
    return Finding(step, "ok", text, remedy, facts)


def warning(step: str, text: str, remedy: str, /, **facts: Any) -> Finding:
    """It works, but slowly or in part."""
    return Finding(step, "warning", text, remedy, facts)


def fault(step: str, text: str, remedy: str, /, **facts: Any) -> Finding:
    """It does not work."""
    return Finding(step, "fault", text, remedy, facts)


def skipped(step: str, why: str, remedy: str = "") -> Finding:
    """It was not looked at."""
    return Finding(step, "skipped", why, remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """0: all well, 1: warnings, 2: faults."""
    levels = {each.level for each in findings}
    return 2 if "fault" in levels else 1 if "warning" in levels else 0
