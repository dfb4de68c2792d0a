"""The assistant message that grows, and its JSON (provider protocol 6). No order of frames.

Whoever needs the message gets it as bytes, joined from the pieces of its blocks: it is built at
block boundaries only, and never as a tree of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import jsontext
from ..errors import ProviderError
from .slices import Slices, inside
from .toolcalls import ToolCalls

_USAGE: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("input", (("prompt_tokens",), ("input_tokens",))),
    ("output", (("completion_tokens",), ("output_tokens",))),
    (
        "cache_read",
        (("prompt_tokens_details", "cached_tokens"), ("input_tokens_details", "cached_tokens")),
    ),
    ("reasoning", (("completion_tokens_details", "reasoning_tokens"),)),
)
_MAX_TOKENS = 2**53  # what every reader of JSON holds exactly


def usage_of(given: dict[str, Any]) -> dict[str, int]:
    """A server's ``usage`` under the router's names (provider protocol 6.1), without odd values."""
    found: dict[str, int] = {}
    for name, paths in _USAGE:
        for path in paths:
            value: Any = given
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            if (count := token_count(value)) is not None:
                found[name] = count
                break
    return found


def token_count(value: object) -> int | None:
    """``value`` as a number of tokens; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # Also refuses the infinities; NaN never leaves the JSON reader.
    return int(value) if 0 <= value <= _MAX_TOKENS else None


class Message:
    """The message so far; at first a snapshot shows no content and the stop reason ``end``."""

    def __init__(
        self,
        *,
        model: str,
        provider: str,
        warnings: Sequence[str],
        calls: ToolCalls,
        context_window: int | None,
        now_ms: Callable[[], int],
    ) -> None:
        self.thinking = Slices()
        self.text = Slices()
        self.calls = calls
        self.context_window = context_window
        self.warnings = list(warnings)
        self.usage: dict[str, int] = {}
        self.stop_reason: str | None = None
        self.native_stop_reason: str | None = None
        self._now_ms = now_ms
        self._origin = b',"model":%b,"provider":%b,"timestamp":' % (
            jsontext.dumpb(model),
            jsontext.dumpb(provider),
        )

    def _content(self, *, cut: bool) -> list[bytes]:
        """The blocks: thinking, text, calls, whatever their order of arrival (6.1, rule 3); in
        pieces that are to be joined."""
        pieces = []
        for head, slices in (
            (b',{"type":"thinking","text":"', self.thinking),
            (b',{"type":"text","text":"', self.text),
        ):
            if slices:
                pieces += [head, slices.joined(), b'"}']
        for call in self.calls.encoded(cut=cut):
            pieces += [b",", call]
        if pieces:
            pieces[0] = pieces[0][1:]
        return pieces

    def snapshot(self, error: ProviderError | None = None, *, head: bytes = b"") -> bytes:
        """The message as JSON text; with ``error`` the one of an ``error`` frame (6.3).

        :param head: the frame up to the message, which is its last value: then the whole frame is
            given. A text may have megabytes, so it is copied only once.
        """
        content = self._content(cut=error is not None or self.native_stop_reason == "length")
        stop_reason = self.stop_reason or "end"
        extra = b""
        if error is not None:
            stop_reason = "error"
            said = inside(error.message)
            content = content or [b'{"type":"text","text":"%b"}' % said]
            extra = b',"error_message":"%b","error_kind":"%b"' % (said, error.kind.encode())
        elif self.native_stop_reason is not None:
            extra = b',"native_stop_reason":' + jsontext.dumpb(self.native_stop_reason)
        if self.warnings:
            extra += b',"warnings":' + jsontext.dumpb(self.warnings)
        if self.usage:
            extra += b',"usage":' + jsontext.dumpb(self.usage)
        foot = b'],"stop_reason":"%b"%b%b%d}%b' % (
            stop_reason.encode(),
            extra,
            self._origin,
            self._now_ms(),
            b"}" if head else b"",
        )
        return b"".join((head, b'{"role":"assistant","content":[', *content, foot))
