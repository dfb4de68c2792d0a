"""How the server was when it was last asked. Pure: asking is the keeper's business.

What is told here was noticed on the way, while the catalog was refreshed: nobody asks the server
anything because somebody looks at it, so that looking never wakes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ProviderError

if TYPE_CHECKING:
    from .catalog import Catalog

ServerState = Literal[
    "unknown", "ready", "loading", "sleeping", "no model", "refused", "failing", "away"
]
"""``unknown``: not asked yet. ``refused``: it wants another key. ``failing``: it answers, but not
as a llama-server should. ``away``: nothing answers. ``no model``: it serves none."""

MOST_MODELS = 32
"""Models that are told; a directory may hold hundreds."""


@dataclass(frozen=True, slots=True)
class Health:
    """What is known of the server. Times are those of ``time.monotonic()``."""

    state: ServerState = "unknown"
    since: float | None = None
    """When it was first seen in this state."""
    asked: float | None = None
    """When it was last asked."""
    root: str | None = None
    """Its address; the last one known while it is away."""
    problem: str | None = None
    """Why it could not be asked."""
    catalog: Catalog | None = None
    """What it served when it last said so."""

    def answered(self, root: str, catalog: Catalog, now: float) -> Health:
        """It said what it serves."""
        return Health(*self._state(_state_of(catalog), now), now, root, None, catalog)

    def failed(self, error: ProviderError, now: float) -> Health:
        """It could not be asked."""
        state: ServerState = "away" if error.status is None else "failing"
        if error.status == 503 and "loading" in error.message.lower():
            state = "loading"
        name, since = self._state(state, now)
        return replace(self, state=name, since=since, asked=now, problem=error.message)

    def _state(self, state: ServerState, now: float) -> tuple[ServerState, float]:
        same = state == self.state and self.since is not None
        return state, (self.since or now) if same else now

    def facts(self, now: float) -> dict[str, Any]:
        """Plain values; seconds since instead of times."""
        catalog = self.catalog
        models = catalog.models if catalog is not None else ()
        single = models[0] if len(models) == 1 else None
        return {
            "state": self.state,
            "seconds": _ago(self.since, now),
            "asked": _ago(self.asked, now),
            "url": self.root,
            "problem": self.problem,
            "build": catalog.build if catalog is not None else None,
            "router_mode": catalog.router_mode if catalog is not None else None,
            "slots": single.slots if single is not None else None,
            "models": [
                {
                    "id": each.id,
                    "state": each.state,
                    "context_window": each.context_window,
                    "slots": each.slots,
                }
                for each in models[:MOST_MODELS]
            ],
            "more_models": max(0, len(models) - MOST_MODELS),
        }


def _state_of(catalog: Catalog) -> ServerState:
    if catalog.refused:
        return "refused"
    if not catalog.models:
        return "no model"
    if catalog.router_mode or len(catalog.models) > 1:
        return "ready"  # it loads what is asked for; each model has a state of its own
    state = catalog.models[0].state
    if state in ("loading", "downloading"):
        return "loading"
    return "sleeping" if state == "sleeping" else "ready"


def _ago(then: float | None, now: float) -> float | None:
    return None if then is None else round(max(0.0, now - then), 1)
