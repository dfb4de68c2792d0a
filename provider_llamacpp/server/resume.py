"""Which streams outlive their connection, and how they are opened (llama-server API 11).

llama-server keeps what it sends under an id that the request names, and goes on generating when
the connection breaks. What is done about a break is the business of :mod:`.resumable`.

The price is that closing the connection no longer stops the generation. So whoever leaves before
the end has to say so: :mod:`.discards`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..calls import Call
from ..errors import ProviderError
from ..settings import ResumeMode
from .address import Target, names_this_machine
from .dialing import Line
from .discards import TIMES_UNSURE, Discards
from .resumable import ASK_SECONDS, LOOKUP, ResumableStream
from .stream import UpstreamStream
from .upstream import Upstream

HEADER = "X-Conversation-Id"
PING_SECONDS = 10
"""Of silence, before the server is to send a comment."""
SILENCE_SECONDS = 30.0
"""Without a byte, before a connection counts as broken; at least three comments are missing then.
It may be the server that is silent: replays come without comments. To take the stream up once more
does no harm."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is remembered of a server."""

    build: str | None
    able: bool
    local: bool


class Resumer:
    """Opens streams, resumable ones where that is wanted and possible. One for a provider.

    :param mode: ``auto`` is on for servers that are not on this machine: a loopback connection
        hardly breaks, and a worker that dies would leave a generation running to its limit
    :param budget: seconds in which a stream must be taken up after it broke; each byte that comes
        renews them
    """

    def __init__(self, upstream: Upstream, mode: ResumeMode, budget: float) -> None:
        self._upstream = upstream
        self._mode = mode
        self._budget = budget
        self._known: dict[str, _Known] = {}
        self._discards = Discards(upstream)

    def close(self) -> None:
        """Try no more to reach servers behind the back of calls that have ended."""
        self._discards.close()

    def open_stream(
        self,
        target: Target,
        path: str,
        body: Mapping[str, Any],
        call: Call,
        *,
        encode: Callable[[Mapping[str, Any]], bytes],
        headers: Mapping[str, str],
        classify: Callable[[int, bytes], ProviderError],
        line: Line | None = None,
        build: str | None = None,
        model: str | None = None,
    ) -> UpstreamStream | ResumableStream:
        """Like :meth:`~provider_llamacpp.server.upstream.Upstream.open_stream`.

        :param encode: makes ``body`` JSON
        :param build: the server's, if known; another one is asked anew what it can do
        :param model: its name, where the server is in router mode
        """
        upstream = self._upstream
        if not self._wanted(target, build, call):
            return upstream.open_stream(
                target, path, encode(body), call, headers=headers, classify=classify, line=line
            )
        body = {"sse_ping_interval": PING_SECONDS, **body}
        idle = _patience(body["sse_ping_interval"])
        conversation = new_conversation(model)
        line = line or upstream.line(call)
        try:
            stream = upstream.open_stream(
                target,
                path,
                encode(body),
                call,
                headers={**headers, HEADER: conversation},
                classify=classify,
                line=line,
                idle=idle,
            )
        except BaseException as error:
            # A request that waits for a slot may be run, read or not; one that was just sent may
            # even arrive after the word that it is void. One that was refused is over, unless it
            # was a gateway that lost its patience.
            if line.connected and getattr(error, "status", None) in (None, 502, 504):
                self._discards.discard(target, conversation, times=TIMES_UNSURE)
            raise
        return ResumableStream(
            stream, upstream, target, conversation, call, self._discards, self._budget, idle
        )

    def _wanted(self, target: Target, build: str | None, call: Call) -> bool:
        if self._mode == "off" or (self._mode == "auto" and names_this_machine(target.root)):
            return False
        known = self._known.get(target.root)
        if known is None or known.build != build:
            known = self._ask(target, build, call)
        return known is not None and known.able and (self._mode == "on" or not known.local)

    def _ask(self, target: Target, build: str | None, call: Call) -> _Known | None:
        """Whether ``target`` keeps streams; None if that cannot be told now."""
        line = self._upstream.line(call, ASK_SECONDS)
        try:
            reply = self._upstream.request(
                target,
                "POST",
                LOOKUP,
                {"conversation_ids": []},
                timeout=ASK_SECONDS,
                call=call,
                line=line,
            )
        except ProviderError as error:
            log.debug("%s does not say whether it keeps streams: %s", target.root, error)
            return None
        if reply.status in (401, 403, 408, 429) or (reply.status >= 500 and reply.status != 501):
            return None
        known = _Known(build, reply.status == 200, line.local)
        self._known[target.root] = known
        return known


def new_conversation(model: str | None) -> str:
    """An id that nobody can guess; with the suffix that shows a server in router mode the way.

    A model whose name no header can carry goes without: the server also knows the way of each
    request that it passed on.
    """
    conversation = secrets.token_urlsafe(24)
    if model and model.isascii() and model.isprintable() and model == model.strip():
        return f"{conversation}::{model}"
    return conversation


def _patience(ping: object) -> float | None:
    """Seconds of silence that are none of a server that is to send a comment each ``ping``."""
    if isinstance(ping, bool) or not isinstance(ping, int | float) or ping <= 0:
        return None
    return max(SILENCE_SECONDS, 3.0 * ping)
