"""The body of one answer of llama-server, as it arrives.

Knows HTTP's framings and when the peer broke off; knows neither SSE nor what an answer means.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping

import requests
from urllib3.exceptions import HTTPError

from ..calls import Call
from ..errors import ProviderError, redacted
from ..events.classify import network_error
from .body import Counted, Dechunker, Framing, FramingError, UntilClose
from .dialing import Line
from .transport import Raw, Source

SMALL, BLOCK = 2048, 65536
"""Bytes of one read: room for a few tokens, and where they fill that, for all that has arrived.
A stream waits in its read nearly all of its life, and 64 large buffers cost megabytes. Beyond
128 KiB the buffers cost time."""
ERROR_LIMIT = 65536
"""Bytes read of the body of an error."""
ERROR_SECONDS = 5.0
"""How long the body of an error may take."""

FAULTS = (requests.RequestException, HTTPError, http.client.HTTPException, OSError)
"""What the libraries raise; not all of it is wrapped by the outermost one."""


class UpstreamStream:
    """The body of one answer, as it arrives. Belongs to one thread; a context manager.

    ``status`` and ``headers`` (names in any case) are those of the answer.
    """

    notice: str | None = None
    """What the reader is to be told of how it went; nothing, for a stream of one connection."""

    def __init__(
        self,
        response: requests.Response,
        line: Line,
        call: Call | None,
        root: str,
        secret: str | None = None,
    ):
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        self.consumed = 0
        """Body bytes handed out so far."""
        self.last = b""
        """The block that was handed out last."""
        self._line = line
        self._call = call
        self._root = root
        self._secret = secret
        self._source, self._framing = _body(response)
        self._take = self._source.receive
        self._feed = self._framing.feed
        self._room = SMALL
        self._fault: Exception | None = None
        """What :meth:`arrived` met, for :meth:`read` to raise."""
        self.over = self._framing.complete and not self._framing.until_close
        """Nothing more will come."""

    def read(self) -> bytes:
        """Wait for the next bytes of the body; all that have arrived. ``b""`` is a clean end.

        :raises ProviderError: ``transient`` if the connection breaks off
        :raises Interrupted: if the call is aborted
        """
        call = self._call
        while not self.over:
            room = self._room
            try:
                if self._fault is not None:
                    raise self._met()
                raw = self._take(room)
                # What arrives after an abort is nobody's: the caller was told that it is over.
                if call is not None and call.reason is not None:
                    call.check()
                if not raw:
                    self.over = True
                    if not self._framing.complete:
                        raise self._broke_off()
                    break
                if data := self._unframed(raw, room):
                    return data
            except FAULTS as error:
                self._line.check()
                raise network_error(error, self._root) from error
            except FramingError as error:
                raise ProviderError(
                    "transient", f"llama-server at {self._root} sent a broken answer: {error}"
                ) from error
        return b""

    def _met(self) -> Exception:
        """Taken out, as a fault that is kept would keep all that it passed through."""
        fault, self._fault = self._fault, None
        assert fault is not None
        return fault

    def _unframed(self, raw: bytes, room: int) -> bytes:
        """:raises FramingError: if ``raw`` is none of the body's"""
        if len(raw) == room or room == BLOCK:
            self._room = BLOCK if len(raw) >= SMALL else SMALL
        data = self._feed(raw)
        if self._framing.complete and not self._framing.until_close:
            self.over = True
        if data:
            self.consumed += len(data)
            self.last = data
        return data

    # -- without a wait: for who looks after many answers at once ---------------------------

    @property
    def connection(self) -> UpstreamStream:
        """Itself: what to look after."""
        return self

    @property
    def patience(self) -> float | None:
        """Seconds without a byte after which the body counts as broken off."""
        return self._source.patience

    def share(self) -> int | None:
        """From now until :meth:`unshare`, :meth:`arrived` is to be used instead of :meth:`read`.

        :returns: the descriptor that tells when something has arrived; None, and all as before, if
            this answer cannot be read like that
        """
        return None if self.over else self._source.share()

    def arrived(self) -> bytes | None:
        """What has arrived of the body, maybe nothing; None if all further is for :meth:`read`: the
        end, a fault, an abort."""
        call, room = self._call, self._room
        if self.over or (call is not None and call.reason is not None):
            return None
        try:
            raw = self._source.arrived(room)
            # An end stays one: it is there for the next read.
            return self._unframed(raw, room) if raw else None
        except BlockingIOError:
            return b""
        except (*FAULTS, FramingError) as error:
            self._fault = error
            return None

    def expire(self) -> None:
        """The body counts as broken off: nothing has come for the time of its patience."""
        self._fault = TimeoutError("timed out")

    def unshare(self) -> None:
        """:meth:`read` is to be used again."""
        self._source.unshare()

    def read_all(self, limit: int) -> bytes:
        """The rest of the body.

        :raises ProviderError: ``permanent`` if it is longer than ``limit`` bytes, else as
            :meth:`read`
        :raises Interrupted: if the call is aborted
        """
        blocks = []
        size = 0
        while block := self.read():
            size += len(block)
            if size > limit:
                raise ProviderError(
                    "permanent", f"llama-server at {self._root} answered more than {limit} bytes"
                )
            blocks.append(block)
        return b"".join(blocks)

    def read_error(self) -> bytes:
        """The body of an error, as far as it comes soon and is not too long, without our key.

        :raises Interrupted: if the call is aborted
        """
        self._line.deadline = min(
            time.monotonic() + ERROR_SECONDS, self._line.deadline or float("inf")
        )
        found = b""
        try:
            while len(found) < ERROR_LIMIT and (block := self.read()):
                found += block
        except ProviderError:
            pass  # The status stands, whatever became of the words to it.
        # Latin-1 keeps every byte as it is, and all keys are ASCII.
        words = redacted(found[:ERROR_LIMIT].decode("latin-1"), self._secret)
        return words.encode("latin-1")

    def close(self) -> None:
        """Drop the connection; llama-server stops generating. Twice does no harm."""
        self._source.close()
        self._line.close()

    def __enter__(self) -> UpstreamStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _broke_off(self) -> ProviderError:
        return ProviderError(
            "transient",
            f"llama-server at {self._root} broke the connection off in the middle of its answer",
        )


class _Foreign:
    """The body of a response that came over no line of ours: urllib3 undoes its framing."""

    def __init__(self, response: requests.Response) -> None:
        self._blocks = response.raw.stream(BLOCK, decode_content=False)
        self.close = response.close

    patience = None

    def share(self) -> None:
        """It cannot be read without a wait."""

    def arrived(self, size: int) -> bytes:  # pragma: no cover (never shared)
        raise BlockingIOError

    def unshare(self) -> None:  # pragma: no cover (never shared)
        pass

    def receive(self, size: int) -> bytes:
        return next(self._blocks, b"")


def _body(response: requests.Response) -> tuple[Source | _Foreign, Framing]:
    """What to read from, and the framing to undo. Of ``response`` nothing else is needed then."""
    raw = response.raw
    if not isinstance(raw, Raw):
        return _Foreign(response), UntilClose()
    if raw.chunked:
        return raw.source, Dechunker()
    return raw.source, UntilClose() if raw.length is None else Counted(raw.length)
