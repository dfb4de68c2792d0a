"""The life of one stream call, from the accepted request to the bus result.

A :class:`StreamRun` runs on one pool thread. It opens the caller's channel, and meanwhile resolves
the server and makes the request ready; posts that, and moves bytes: upstream -> assembler ->
channel. Whatever ends it, exactly one
place (:meth:`StreamRun._end`) decides which terminal frame goes out, if any.

What travels against the data is the abort alone: :class:`~provider_llamacpp.calls.Call` wakes
whatever this thread blocks on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from .answers import assembler_for, last_frames, open_answer
from .calls import Call
from .errors import ConsumerGone, Interrupted, InvalidRequest, ProviderError, redacted
from .events.assembler import Assembler
from .events.classify import NOT_LOADED, classify
from .flow import Flow
from .payloads import StreamRequest, WriterRef
from .summaries import CallSummary, wall_clock
from .transcript.convert import Prepared, chat_body

if TYPE_CHECKING:
    from .answers import Answer
    from .bus.channel import Channel
    from .carrier import Carrier
    from .provider import Provider
    from .server.dialing import Line
    from .server.modelevents import Progress
    from .server.upstream import Target

BLOCKED = 1.0
"""Seconds a write to the caller lasts before it counts as held up: a tick of the watchdog."""

log = logging.getLogger(__name__)


class OpenChannel(Protocol):
    """Dials the write end of a caller's channel (one try, engine protocol 7.2).

    Calls ``meanwhile``, which must not raise, while the engine looks the channel up.
    """

    def __call__(
        self, writer: WriterRef, call: Call, meanwhile: Callable[[], None] = ...
    ) -> Channel: ...


class Neighbours(Protocol):
    """What a stream asks about those that run beside it (:class:`~.runs.Runs` answers)."""

    carrier: Carrier
    """Moves the tokens of those that flow."""

    def alone(self, number: int) -> bool:
        """Whether the stream ``number`` has its server for itself."""

    def others(self, run: StreamRun) -> int:
        """How many other streams run on the server of ``run``."""


class StreamRun:
    """One stream.

    :param runs: all streams of its provider: whether another one runs on the same server decides
        if a full context pool is the prompt's fault or the neighbours'
    """

    def __init__(
        self,
        provider: Provider,
        request: StreamRequest,
        call: Call,
        open_channel: OpenChannel,
        *,
        fat: bool,
        runs: Neighbours,
        traceparent: str | None = None,
    ) -> None:
        self.provider = provider
        self.request = request
        self.call = call
        self.channel: Channel | None = None
        self.root: str | None = None
        self.target: Target | None = None
        """The server it runs on, once resolved; ``root`` is its address."""
        self._open_channel = open_channel
        self._fat = fat
        self._runs = runs
        self._traceparent = traceparent
        self._assembler: Assembler | None = None
        self.error: ProviderError | None = None
        self.invalid: InvalidRequest | None = None
        """Set if the payload was at fault: then the bus result says so, and no frame does."""
        self.ended_in: str | None = None
        """The phase in which it ended; ``done`` if nothing cut it short."""
        self._writing = False
        self._headers_at: float | None = None
        self._first_at: float | None = None
        self._ended_at: float | None = None
        self._source: Answer | None = None
        self._ready: Prepared | Exception | None = None
        """The request, or why there is none, until it is sent or told."""
        self._line: Line | None = None

    def run(self) -> None:
        """Stream until the answer, a fault or an abort ends it. Raises nothing."""
        call = self.call
        try:
            call.phase = "connecting"
            self.channel = self._open_channel(self.request.writer, call, self._get_ready)
            self._stream()
        except Interrupted:
            pass
        except ConsumerGone:
            call.abort("consumer gone")
        except InvalidRequest as error:
            self.invalid = InvalidRequest(error.message)
        except ProviderError as error:
            # A new one: that one's traceback holds this run, and with it the whole answer, until
            # the garbage collector comes by.
            words = redacted(error.message, *self.provider.router.secrets)
            self.error = ProviderError(error.kind, words, status=error.status)
        except Exception as error:
            # A safety net: the caller still gets its one terminal frame.
            log.exception("stream %d failed in an unforeseen way", call.number)
            self.error = ProviderError("permanent", f"internal fault: {type(error).__name__}")
        finally:
            self._end()

    def _get_ready(self) -> None:
        """All that comes before the request is sent. The server hears of it only once there is a
        channel for the answer, and so does the caller of what fails here."""
        call, provider, request = self.call, self.provider, self.request
        call.phase = "resolving"
        try:
            self.target, default_tokens = provider.target(call)
            self.root = self.target.root
            self._ready = chat_body(
                request,
                max_tokens=request.max_output_tokens or default_tokens,
                abilities=provider.abilities(request.model),
            )
            self._line = provider.upstream.dial_ahead(self.target, call)
        except Exception as error:
            self._ready = error
        call.phase = "connecting"

    def _stream(self) -> None:
        call, provider, target = self.call, self.provider, self.target
        prepared, self._ready = self._ready, None
        if isinstance(prepared, Exception):
            try:
                raise prepared
            finally:
                del prepared  # it holds this frame, which must not hold it
        assert prepared is not None and target is not None
        self._assembler = self._new_assembler(prepared)
        call.phase = "waiting"
        with open_answer(
            provider.resumer,
            target,
            prepared,
            call,
            catalog=provider.catalog,
            headers={"traceparent": self._traceparent} if self._traceparent else {},
            classify=self._classify,
            line=self._line,
        ) as stream:
            self._headers_at = time.monotonic()
            call.phase, self._source = "reading", stream
            self._relay(stream)

    def _classify(self, status: int, body: bytes) -> ProviderError:
        failure = None
        if NOT_LOADED in body and self.target is not None:
            failure = self.provider.load_failure(self.request.model, self.target, self.call)
        return classify(status, body, alone=self._runs.others(self) == 0, load_failure=failure)

    def _relay(self, stream: Answer) -> None:
        """The token path: what has arrived is read in one go and leaves in one go."""
        assembler, channel, carrier = self.assembler, self.channel, self._runs.carrier
        assert channel is not None
        read, feed, send = stream.read, assembler.feed, channel.send
        # The first token is apart, so that its time can be taken without a clock for the others.
        while not assembler.started:
            block = read()
            if block and (frames := feed(block)):
                self._first_at = time.monotonic()
                self._writing = True
                send(frames)
                self._writing = False
            if not block or assembler.ended:
                return
        with carrier.flowing():
            while not assembler.ended:
                if carrier.crowded and not self._carried(stream, channel):
                    continue
                if not (block := read()):
                    return
                if frames := feed(block):
                    self._writing = True
                    send(frames)
                    self._writing = False

    def _carried(self, stream: Answer, channel: Channel) -> bool:
        """Have the tokens moved together with those of others, until there is more to do: whether
        that is a read of our own."""
        descriptor = stream.share()
        if descriptor is None:
            return True
        flow = Flow(descriptor, stream, self.assembler, channel)
        try:
            self._runs.carrier.carry(flow)
        finally:
            stream.unshare()
        if flow.error is not None:
            raise flow.met()
        if flow.kept:
            self._writing = True
            channel.flush()
            self._writing = False
        return not (flow.kept or self.assembler.ended)

    def _end(self) -> None:
        call = self.call
        self._ended_at = time.monotonic()
        self.ended_in = self.phase(None)
        call.phase = "ending"
        frames: list[bytes] = []
        assembler = self._assembler = self.assembler
        if self.invalid is None:
            frames, self.error = last_frames(assembler, call, self.error, self._source)
        self._ready = None
        if self._line is not None:
            self._line.close()
        if self.channel is not None:
            self.channel.finish(frames)
        if self.error is None and self.invalid is None and call.reason is None:
            self.ended_in = "done"
        if self.error is not None:
            self.provider.failed(self.error)
        elif self.invalid is None and call.reason is None:
            self.provider.answered(assembler.server_model)

    def _new_assembler(self, prepared: Prepared | None) -> Assembler:
        provider, request = self.provider, self.request
        return assembler_for(
            request,
            provider.id,
            provider.abilities(request.model),
            prepared,
            fat=self._fat,
            alone=partial(self._runs.alone, self.call.number),
            secret=self.target.key if self.target is not None else None,
        )

    @property
    def assembler(self) -> Assembler:
        """What the answer is put together by; an empty one before the request is ready."""
        return self._assembler or self._new_assembler(None)

    @property
    def frames(self) -> int:
        """Frames sent so far."""
        return self.channel.sent if self.channel is not None else 0

    @property
    def consumed(self) -> int:
        """Body bytes read from the server so far."""
        return self._source.consumed if self._source is not None else 0

    @property
    def resumes(self) -> int:
        """How often it was taken up again after a break."""
        return getattr(self._source, "resumed", 0)

    @property
    def outcome(self) -> str:
        """One word for the log: how it ended."""
        if self.invalid is not None:
            return "invalid request"
        if self.call.reason is not None:
            return self.call.reason
        return self.error.kind if self.error else (self.assembler.stop_reason or "done")

    def phase(self, silence: float | None) -> str:
        """What it waits for, in words for people (llama-server API 6).

        The server sends headers once a slot is taken: until then the request is ``queued`` there,
        behind other requests or a model that wakes, or it waits for ``loading model``. Then the
        ``prompt`` is read, and from the first token on it is ``generating``. ``blocked`` is a
        caller that reads too slowly.

        :param silence: seconds in which nothing went to the caller, if known
        """
        phase = self.call.phase
        if phase == "waiting":
            return "queued" if self.loading is None else "loading model"
        if phase != "reading":
            return phase
        if self._writing and silence is not None and silence >= BLOCKED:
            return "blocked"
        return "generating" if self.assembler.started else "prompt"

    @property
    def loading(self) -> Progress | None:
        """How far the model has come that the server loads for this stream; None if it does not."""
        waits = self.call.phase == "waiting"
        return self.provider.progress(self.request.model) if waits else None

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far; counted by the server once it has said its count."""
        return self.assembler.usage.get("output") or self.assembler.tokens

    def rate(self, now: float) -> float | None:
        """Tokens per second from the first token on; None before there are two."""
        first, tokens = self._first_at, self.tokens
        seconds = 0.0 if first is None else (self._ended_at or now) - first
        return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None

    def call_summary(self) -> CallSummary:
        """How it went, for who observes calls. It has ended."""
        started, headers, first = self.call.started, self._headers_at, self._first_at
        ended = self._ended_at or time.monotonic()
        usage = self.assembler.usage
        return CallSummary(
            provider=self.provider.id,
            number=self.call.number,
            function="stream",
            outcome=self.outcome,
            started_at=wall_clock(started),
            seconds=ended - started,
            request_id=self.call.key,
            model=self.request.model,
            waiting=(headers or ended) - started,
            prompt=None if headers is None else (first or ended) - headers,
            generating=None if first is None else ended - first,
            prompt_tokens=usage.get("input"),
            cached_tokens=usage.get("cache_read"),
            tokens=self.tokens,
            tokens_per_second=self.rate(ended),
            error_kind=self.error.kind if self.error is not None else None,
            error=self.error.message if self.error is not None else None,
            traceparent=self._traceparent,
        )

    def summary(self, silence: float | None = None) -> dict[str, Any]:
        """Facts of this stream for logs and ``stats()``; holds no text and no secrets.

        :param silence: seconds in which nothing went to the caller, if known
        """
        now = time.monotonic()
        loading = self.loading
        started, headers, first = self.call.started, self._headers_at, self._first_at
        rate = self.rate(now)
        return {
            "stream": self.call.number,
            "request": self.call.key,
            "model": self.request.model,
            "phase": self.ended_in or self.phase(silence),
            "seconds": _seconds(started, self._ended_at or now),
            "to_headers": _seconds(started, headers),
            "to_first_token": _seconds(started, first),
            "silent": None if silence is None else round(silence, 1),
            "tokens": self.tokens,
            "tokens_per_second": None if rate is None else round(rate, 2),
            "prompt": _prompt(self.assembler.progress),
            "loading": None if loading is None else loading.facts(),
            "frames": self.frames,
            "bytes": self.consumed,
            "usage": dict(self.assembler.usage),
        }


def _seconds(since: float, until: float | None) -> float | None:
    return None if until is None else round(until - since, 3)


def _prompt(progress: dict[str, Any] | None) -> dict[str, int] | None:
    """The server's ``prompt_progress``: tokens in all, read so far, and of these from its cache."""
    names = {"total": "total", "processed": "processed", "cache": "cached"}
    given = progress or {}
    found = {new: given[old] for old, new in names.items() if type(given.get(old)) is int}
    return found if len(found) == len(names) else None
