"""llama.cpp behind the iii engine: a small, threaded provider worker.

``from provider_llamacpp import ProviderWorker, Settings``; everything is imported on first use, so
that ``import provider_llamacpp`` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import VERSION as __version__

if TYPE_CHECKING:
    from .errors import BusError, FatalError, ProviderError, SettingsError
    from .settings import ProviderSettings, Settings
    from .worker import ProviderWorker

__all__ = [
    "BusError",
    "FatalError",
    "ProviderError",
    "ProviderSettings",
    "ProviderWorker",
    "Settings",
    "SettingsError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "ProviderWorker":
        return import_module(".worker", __name__).ProviderWorker
    if name in ("Settings", "ProviderSettings"):
        return getattr(import_module(".settings", __name__), name)
    if name in __all__:
        return getattr(import_module(".errors", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
