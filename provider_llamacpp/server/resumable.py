"""One stream over as many connections as it takes (llama-server API 11).

Reads like an :class:`~provider_llamacpp.server.stream.UpstreamStream`. Knows bytes and HTTP, no
SSE but its end marker.

What is a break, and what the end:

- a connection that fails, or closes before the body is complete, is a break;
- a body that ends as HTTP wants it, without the end marker of the stream, was stopped (by somebody
  else's DELETE), or failed in the server, or some proxy made a clean end of a break. The server is
  asked: a stream that still runs there, or has more bytes than came, broke; any other has ended;
- before the first byte there is nothing to take up: the caller's own retry is as good.

A killed server lets go of its connections: a break, and the new process either is not reached in
time or knows the stream no more. One that is told to stop (SIGTERM) falls silent and keeps its
connections, for ever if it keeps a stream. So does a line that is gone without a word. Therefore
silence is a break too: such servers send a comment when there is nothing else to send, as often as
the request says.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Mapping
from typing import Any

from ..calls import Call
from ..errors import ProviderError
from .address import Target
from .discards import Discards, passing, stream_path
from .stream import UpstreamStream
from .upstream import Upstream

LOOKUP = "/v1/streams/lookup"

ASK_SECONDS = 3.0
"""For a question about streams, which the server answers without looking at a model."""
TRY_SECONDS = 10.0
"""For one try to take a stream up."""
LASTING_SECONDS = 5.0
"""A connection that stood so long was none of the vain tries, whatever it brought."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0
"""Seconds between two tries; the first try comes at once."""

_END = b"data: [DONE]\n\n"

log = logging.getLogger(__name__)


class ResumableStream:
    """The body of one answer, over as many connections as it takes. Belongs to one thread.

    See :class:`~provider_llamacpp.server.stream.UpstreamStream`, whose members these are.

    :param stream: the answer to the request that named ``conversation``
    """

    def __init__(
        self,
        stream: UpstreamStream,
        upstream: Upstream,
        target: Target,
        conversation: str,
        call: Call,
        discards: Discards,
        budget: float,
        idle: float | None,
    ) -> None:
        self.status = stream.status
        self.headers = stream.headers
        self.resumed = 0
        """How often it was taken up."""
        self._stream = stream
        self._upstream = upstream
        self._target = target
        self._conversation = conversation
        self._call = call
        self._discards = discards
        self._budget = budget
        self._idle = idle
        self._ended = self._closed = False
        self._broke_at = self._tries = 0
        self._since = time.monotonic()
        self._until = 0.0

    @property
    def notice(self) -> str | None:
        """What the reader is to be told of how it went."""
        if not self.resumed:
            return None
        return (
            "the connection to llama-server broke in the middle of the answer, which was taken up "
            "again where it broke"
        )

    @property
    def consumed(self) -> int:
        """Body bytes handed out so far: where a broken stream goes on (``from=``)."""
        return self._stream.consumed

    def read(self) -> bytes:
        """Wait for the next bytes of the body; all that have arrived. ``b""`` is a clean end.

        :raises ProviderError: ``transient`` if the connection breaks and the stream cannot be
            taken up
        :raises Interrupted: if the call is aborted
        """
        while not self._ended:
            try:
                block = self._stream.read()
            except ProviderError as error:
                if not self.consumed:
                    raise
                self._take_up(error.message)
                continue
            if block:
                return block
            if self._goes_on():
                self._take_up("the body ended, the stream did not")
            else:
                self._ended = True
        return b""

    # -- without a wait: breaks are for read() ---------------------------------------------

    @property
    def connection(self) -> UpstreamStream:
        """What to look after, until :meth:`unshare`."""
        return self._stream

    def share(self) -> int | None:
        """See :class:`~provider_llamacpp.server.stream.UpstreamStream`."""
        return None if self._ended else self._stream.share()

    def unshare(self) -> None:
        """See :class:`~provider_llamacpp.server.stream.UpstreamStream`."""
        self._stream.unshare()

    def close(self) -> None:
        """Drop the connection; have the server stop, unless it said it is done. Twice does no harm.

        Takes :data:`~.discards.DISCARD_SECONDS` at most.
        """
        self._stream.close()
        if not (self._closed or self._stream.last.endswith(_END)):
            self._discards.discard(self._target, self._conversation)
        self._closed = True

    def __enter__(self) -> ResumableStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- taking it up ---------------------------------------------------------------------

    def _take_up(self, why: str) -> None:
        """Replace the broken connection; the next byte is that at ``consumed``."""
        self._stream.close()
        now = time.monotonic()
        if self.consumed > self._broke_at or now - self._since > LASTING_SECONDS:
            self._broke_at, self._tries = self.consumed, 0
            self._until = now + self._budget
        log.info("stream %d broke at byte %d: %s", self._call.number, self.consumed, why)
        while True:
            left = self._until - time.monotonic()
            if self._tries:
                self._pause(left)
                left = self._until - time.monotonic()
            if left <= 0:
                raise self._lost(f"could not be taken up in {self._budget:g} s; at last: {why}")
            self._tries += 1
            try:
                stream = self._replay(min(left, TRY_SECONDS))
            except ProviderError as error:
                if not passing(error.status):
                    raise self._verdict(error) from error
                why = error.message
                continue
            stream.last, stream.consumed = self._stream.last, self.consumed
            self._stream = stream
            self.resumed += 1
            self._since = time.monotonic()
            log.info("stream %d goes on at byte %d", self._call.number, self.consumed)
            return

    def _pause(self, left: float) -> None:
        seconds = min(_FIRST_PAUSE * 2 ** min(self._tries - 1, 10), _LONGEST_PAUSE)
        aborted = threading.Event()
        with self._call.interruptible(aborted.set):
            aborted.wait(min(seconds * random.uniform(0.7, 1.3), max(left, 0.0)))
        self._call.check()

    def _replay(self, seconds: float) -> UpstreamStream:
        """What comes from byte ``consumed`` on.

        :raises ProviderError: with the status of a refusal
        """
        path = f"{stream_path(self._conversation)}&from={self.consumed}"
        line = self._upstream.line(self._call, seconds)
        stream = self._upstream.open_stream(
            self._target, path, None, self._call, method="GET", line=line, idle=self._idle
        )
        kind = stream.headers.get("Content-Type", "")
        if not kind.strip().lower().startswith("text/event-stream"):
            # A page of some proxy or portal: its bytes must not get into the answer.
            stream.close()
            raise ProviderError(
                "transient", f"{self._target.root} answered with {kind or 'no type'}"
            )
        return stream

    def _verdict(self, error: ProviderError) -> ProviderError:
        """The end of a stream that the server does not give out."""
        if error.status == 404:
            return self._lost("the server has it no more: it was stopped, or the server restarted")
        if error.status == 400:
            return self._lost("the server's buffer no longer holds what was missed")
        return error

    def _lost(self, why: str) -> ProviderError:
        return ProviderError(
            "transient",
            f"the connection to llama-server at {self._target.root} broke in the middle of the "
            f"answer, and the stream is lost: {why}",
        )

    # -- a clean end ----------------------------------------------------------------------

    def _goes_on(self) -> bool:
        """Whether a body that ended cleanly was not the end of the stream."""
        if (
            not self.consumed
            or self._stream.last.endswith(_END)
            or not _of_the_stream(self._stream.last)
        ):
            return False
        try:
            reply = self._upstream.request(
                self._target,
                "POST",
                LOOKUP,
                {"conversation_ids": [self._conversation]},
                timeout=ASK_SECONDS,
                call=self._call,
            )
        except ProviderError:
            return True  # Whoever ended it, nobody answers now: that is a break.
        if not reply.ok:
            return passing(reply.status)
        try:
            row = _row(reply.json(), self._conversation)
        except ValueError:
            return False
        # Fewer bytes than came: some of ours were never the stream's, so no offset can be trusted.
        total = row.get("total_bytes")
        if not isinstance(total, int) or total < self.consumed:
            return False
        return row.get("is_done") is False or total > self.consumed


def _of_the_stream(block: bytes) -> bool:
    """Whether the last line of ``block`` can be the server's own.

    llama-server in router mode adds bare words to the body when its child dies: they are in no
    buffer, so behind them no offset is right.
    """
    line = block.rpartition(b"\n")[2]
    return b"data:".startswith(line[:5]) or line.startswith(b":")


def _row(rows: Any, conversation: str) -> Mapping[str, Any]:
    """What a lookup says of ``conversation``; empty where it knows none."""
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("conversation_id") == conversation:
            return row
    return {}
