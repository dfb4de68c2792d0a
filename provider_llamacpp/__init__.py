"""llama.cpp behind the iii engine: a small, threaded provider worker.

``from provider_llamacpp import ProviderWorker, Settings`` serves a llama-server on a bus;
``from provider_llamacpp import stream_chat`` asks one without any. Everything is imported on first
use, so that ``import provider_llamacpp`` costs next to nothing.

The names below are the public ones: docs/embedding.rst says what is promised of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import VERSION as __version__

if TYPE_CHECKING:
    from .chatstream import ChatStream as ChatStream
    from .chatstream import Messages as Messages
    from .client import Client as Client
    from .client import Embeddings as Embeddings
    from .client import ServedModel as ServedModel
    from .direct import count_tokens as count_tokens
    from .direct import embed as embed
    from .direct import list_models as list_models
    from .direct import stream_chat as stream_chat
    from .errors import BusError as BusError
    from .errors import FatalError as FatalError
    from .errors import Interrupted as Interrupted
    from .errors import InvalidRequest as InvalidRequest
    from .errors import ProviderError as ProviderError
    from .errors import ProviderLlamacppError as ProviderLlamacppError
    from .errors import SettingsError as SettingsError
    from .prometheus import prometheus_text as prometheus_text
    from .settings import ProviderSettings as ProviderSettings
    from .settings import Settings as Settings
    from .summaries import CallSummary as CallSummary
    from .typed import AssistantMessage as AssistantMessage
    from .typed import Block as Block
    from .typed import Done as Done
    from .typed import Event as Event
    from .typed import Failure as Failure
    from .typed import FunctionCall as FunctionCall
    from .typed import FunctionCallDelta as FunctionCallDelta
    from .typed import FunctionCallEnd as FunctionCallEnd
    from .typed import FunctionCallStart as FunctionCallStart
    from .typed import Ping as Ping
    from .typed import Start as Start
    from .typed import Stop as Stop
    from .typed import TextBlock as TextBlock
    from .typed import TextDelta as TextDelta
    from .typed import TextEnd as TextEnd
    from .typed import TextStart as TextStart
    from .typed import ThinkingBlock as ThinkingBlock
    from .typed import ThinkingDelta as ThinkingDelta
    from .typed import ThinkingEnd as ThinkingEnd
    from .typed import ThinkingStart as ThinkingStart
    from .typed import Usage as Usage
    from .typed import UsageUpdate as UsageUpdate
    from .typed import decode_event as decode_event
    from .typed import decode_message as decode_message
    from .worker import ProviderWorker as ProviderWorker

_HOMES = {
    "chatstream": ("ChatStream", "Messages"),
    "client": ("Client", "Embeddings", "ServedModel"),
    "direct": ("count_tokens", "embed", "list_models", "stream_chat"),
    "errors": (
        *("BusError", "FatalError", "Interrupted", "InvalidRequest"),
        *("ProviderError", "ProviderLlamacppError", "SettingsError"),
    ),
    "prometheus": ("prometheus_text",),
    "settings": ("ProviderSettings", "Settings"),
    "summaries": ("CallSummary",),
    "typed": (
        *("AssistantMessage", "Block", "Event", "FunctionCall"),
        *("TextBlock", "ThinkingBlock", "Usage"),
        *("decode_event", "decode_message"),
        *("Done", "Failure", "Ping", "Start", "Stop", "UsageUpdate"),
        *("FunctionCallDelta", "FunctionCallEnd", "FunctionCallStart"),
        *("TextDelta", "TextEnd", "TextStart"),
        *("ThinkingDelta", "ThinkingEnd", "ThinkingStart"),
    ),
    "worker": ("ProviderWorker",),
}
"""Where the public names live."""

__all__ = ["__version__", *(name for names in _HOMES.values() for name in names)]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
