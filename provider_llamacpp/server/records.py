"""The records we hand to the router, written with dataclasses-json.

Importing that library takes as long as everything else at the start together, so this module is
imported when the first catalog is told, after the bus is up. Nothing else may import it earlier.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dataclasses_json import DataClassJsonMixin, config


def _absent(value: object) -> bool:
    return value is None


_UNLESS_KNOWN = config(exclude=_absent)
"""For fields that are left out where nothing is known: null is not what the router expects."""


@dataclass(frozen=True)
class ReasoningEffort(DataClassJsonMixin):
    """One level that ``reasoning_effort`` may take."""

    effort: str
    description: str | None = field(default=None, metadata=_UNLESS_KNOWN)


@dataclass(frozen=True)
class ModelRecord(DataClassJsonMixin):
    """One model in the router's catalog (provider protocol 4.2).

    ``context_window`` and ``max_output_tokens`` are tokens.
    """

    id: str
    provider: str
    context_window: int
    max_output_tokens: int
    supports_tools: bool
    supports_structured_output: bool
    supports_vision: bool | None = field(default=None, metadata=_UNLESS_KNOWN)
    supports_thinking: bool | None = field(default=None, metadata=_UNLESS_KNOWN)
    supports_thinking_off: bool | None = field(default=None, metadata=_UNLESS_KNOWN)
    supports_xhigh: bool | None = field(default=None, metadata=_UNLESS_KNOWN)
    reasoning_efforts: list[ReasoningEffort] | None = field(default=None, metadata=_UNLESS_KNOWN)
