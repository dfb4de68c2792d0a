"""The functions one provider serves on the bus, from the invocation to its result.

Every handler starts on the bus reader's thread and must not block there: it admits the call and
hands it to the pool. ``abort`` runs whole on the reader's thread, because the pool may be full of
the very streams it is to abort.

Admission limits add up to the pool's threads, so an admitted call never waits in the pool's queue,
where no abort would find it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from . import memory, payloads
from .bus.engine import Function, Invocation
from .calls import Call, CallRegistry
from .errors import BusError, Interrupted, InvalidRequest, ProviderError, redacted
from .provider import Provider
from .recent import RecentErrors
from .refusals import Refusals, refuse
from .runs import Runs
from .schemas import function_schemas
from .streaming import OpenChannel, StreamRun
from .summaries import CallSummary, wall_clock
from .surfaces.context import Context
from .surfaces.outlet import Outlets
from .surfaces.table import allowed, surface_schemas
from .transcript.convert import anthropic_count_body, count_body

log = logging.getLogger(__name__)
call_log = logging.getLogger("provider_llamacpp.calls")


@dataclass(frozen=True, slots=True)
class Means:
    """What the handlers of all providers of one worker share."""

    registry: CallRegistry
    runs: Runs
    pool: Executor
    """Runs admitted calls."""
    refusals: Refusals
    """Tells callers that were not admitted; apart, so that they wait for no stream."""
    open_channel: OpenChannel
    fat_deltas: bool
    errors: RecentErrors
    stats: Callable[[], dict[str, Any]]
    """What the worker does now, for ``status``; must not block."""
    outlets: Outlets
    tell: Callable[[CallSummary], None] | None = None
    """Takes what observers are told of a call; returns at once. None: there are none."""


class Handlers:
    """The bus functions of ``provider``."""

    def __init__(self, provider: Provider, means: Means) -> None:
        self._provider = provider
        self._means = means
        self._context = Context(
            provider, means.runs, means.outlets, means.open_channel, means.stats
        )

    def functions(self) -> list[Function]:
        """What to register, with schemas (provider protocol 1)."""
        handlers: dict[str, Callable[[Invocation], None]] = {
            "stream": self.stream,
            "abort": self.abort,
            "embed": self.embed,
            "count_tokens": self.count_tokens,
            "refresh_models": self.refresh_models,
            "on_router_ready": self.on_router_ready,
            "status": self.status,
        }
        schemas = function_schemas(self._provider.id) | surface_schemas(self._provider.id)
        for surface in allowed(self._provider.settings):
            work = partial(surface.work, self._context)
            handlers[surface.name] = partial(
                self._submit, name=surface.name, work=work, kind=surface.kind
            )
        return [
            Function(id=f"provider::{self._provider.id}::{name}", handler=handler, **schemas[name])
            for name, handler in handlers.items()
        ]

    # -- on the reader's thread -----------------------------------------------------------

    def stream(self, invocation: Invocation) -> None:
        """Admit a stream and hand it to the pool (provider protocol 5)."""
        key = _text(invocation.data, "resolution_key")
        model = _text(invocation.data, "model")
        try:
            call = self._means.registry.open("stream", key=key, model=model)
        except ProviderError as error:
            try:
                self._means.refusals.submit(self._refuse, invocation, error)
            except RuntimeError:
                # The last moments of a stop: nobody is left to open the channel.
                self._fail(invocation, error)
            return
        self._means.pool.submit(self._stream, invocation, call)

    def abort(self, invocation: Invocation) -> None:
        """Abort every attempt that runs under the request id (provider protocol 7)."""
        try:
            key = payloads.decode_abort(invocation.data)
        except InvalidRequest as error:
            invocation.fail(error.code, error.message)
            return
        invocation.reply({"aborted": self._means.registry.abort(key)})

    def on_router_ready(self, invocation: Invocation) -> None:
        """Declare again in the background; the router waits for the answer only."""
        self._provider.router_ready()
        invocation.reply({"ok": True})

    def status(self, invocation: Invocation) -> None:
        """What the worker does now. Here, as the pool may be full of what is asked about."""
        invocation.reply(self._means.stats())

    def embed(self, invocation: Invocation) -> None:
        """Vectors for texts (provider protocol 9)."""
        self._submit(invocation, "embed", self._embed)

    def count_tokens(self, invocation: Invocation) -> None:
        """The server's own count of a prompt (provider protocol 9)."""
        self._submit(invocation, "count_tokens", self._count_tokens)

    def refresh_models(self, invocation: Invocation) -> None:
        """Ask the server for its models and tell the router (provider protocol 4.1)."""
        self._submit(invocation, "refresh_models", self._refresh_models)

    def _submit(
        self,
        invocation: Invocation,
        name: str,
        work: Callable[[Any, Call], object],
        kind: str = "request",
    ) -> None:
        key = _text(invocation.data, "resolution_key")
        model = _text(invocation.data, "model")
        try:
            call = self._means.registry.open(kind, key=key, model=model)
        except ProviderError as error:
            self._means.errors.add(name, error.kind, error.message)
            self._fail(invocation, error)
            call = Call(0, kind, key=key, model=model)
            self._tell_refused(invocation, name, call, error)
            return
        self._means.pool.submit(self._run_short, invocation, call, name, work)

    @staticmethod
    def _fail(invocation: Invocation, error: ProviderError) -> None:
        invocation.fail("invocation_failed", f"provider/{error.kind}: {error.message}")

    # -- on a pool thread -----------------------------------------------------------------

    def _stream(self, invocation: Invocation, call: Call) -> None:
        if self._run_stream(invocation, call) >= memory.LARGE:
            memory.give_back()

    def _run_stream(self, invocation: Invocation, call: Call) -> int:
        """Returns how many bytes were read for it; nothing of it is held any more then."""
        means = self._means
        read = 0
        failure: BusError | None = None
        summary: CallSummary | None = None
        try:
            request = payloads.decode_stream(invocation.data)
            run = StreamRun(
                self._provider,
                request,
                call,
                means.open_channel,
                fat=means.fat_deltas,
                runs=means.runs,
                traceparent=invocation.traceparent,
            )
            means.runs.add(run)
            try:
                run.run()
            finally:
                means.runs.remove(run)
            failure, read = run.invalid, run.consumed
            _log_stream(run, invocation.traceparent)
            if means.tell is not None:
                summary = run.call_summary()
        except InvalidRequest as error:
            failure = _anew(error)
        except Exception as error:
            # A safety net: whatever went wrong, the router gets its slot back.
            log.exception("stream %d failed in an unforeseen way", call.number)
            failure = BusError("invocation_failed", f"internal fault: {type(error).__name__}")
        finally:
            means.registry.close(call)
            if failure is not None:
                invocation.fail(failure.code, failure.message)
            else:
                invocation.reply({"ok": True})
            if means.tell is not None:
                means.tell(summary or self._summary(invocation, call, "stream", failure))
        return read

    def _refuse(self, invocation: Invocation, error: ProviderError) -> None:
        try:
            request = payloads.decode_stream(invocation.data)
            call = Call(0, "stream", key=None, model=request.model)
            channel = refuse(self._means.open_channel, request, call, error, self._provider.id)
            self._means.errors.add("stream refused", error.kind, error.message)
            call_log.info("stream refused: %s", error.message)
            answer = partial(invocation.reply, {"ok": True})
            if channel is None:
                answer()
            else:
                self._means.refusals.end(channel, answer)
            self._tell_refused(invocation, "stream", call, error)
        except InvalidRequest as invalid:
            invocation.fail(invalid.code, invalid.message)
        except Exception as fault:
            log.exception("a refusal failed in an unforeseen way")
            invocation.fail("invocation_failed", f"internal fault: {type(fault).__name__}")

    def _run_short(
        self, invocation: Invocation, call: Call, name: str, work: Callable[[Any, Call], object]
    ) -> None:
        failure: BusError | None = None
        result: object = None
        try:
            result = work(invocation.data, call)
        except BusError as error:
            failure = _anew(error, *self._provider.router.secrets)
        except ProviderError as error:
            words = redacted(error.message, *self._provider.router.secrets)
            failure = BusError("invocation_failed", f"{_prefix(error)}: {words}")
        except Interrupted as error:
            words = _ENDED.get(error.reason, error.reason)
            failure = BusError("invocation_failed", f"provider/upstream: {words}")
        except Exception as error:
            log.exception("%s failed in an unforeseen way", name)
            failure = BusError("invocation_failed", f"internal fault: {type(error).__name__}")
        finally:
            self._means.registry.close(call)
        seconds = time.monotonic() - call.started
        if failure is None:
            invocation.reply(result)
            call_log.info("%s model=%s seconds=%.3f", name, call.model, seconds)
        else:
            invocation.fail(failure.code, failure.message)
            self._means.errors.add(f"{name} {call.number}", failure.code, failure.message)
            call_log.info("%s model=%s seconds=%.3f failed: %s", name, call.model, seconds, failure)
        if self._means.tell is not None:
            self._means.tell(self._summary(invocation, call, name, failure))

    def _tell_refused(
        self, invocation: Invocation, name: str, call: Call, error: ProviderError
    ) -> None:
        if self._means.tell is not None:
            failure = BusError(error.kind, error.message)
            summary = self._summary(invocation, call, name, failure)
            self._means.tell(replace(summary, outcome="refused"))

    def _summary(
        self, invocation: Invocation, call: Call, name: str, failure: BusError | None
    ) -> CallSummary:
        outcome: str = call.reason or ("done" if failure is None else "failed")
        if failure is not None and failure.code == "provider/invalid_request":
            outcome = "invalid request"
        return CallSummary(
            provider=self._provider.id,
            number=call.number,
            function=name,
            outcome=outcome,
            started_at=wall_clock(call.started),
            seconds=time.monotonic() - call.started,
            request_id=call.key,
            model=call.model,
            error_kind=None if failure is None else failure.code,
            error=None if failure is None else failure.message,
            traceparent=invocation.traceparent,
        )

    def _embed(self, data: object, call: Call) -> object:
        request = payloads.decode_embed(data)
        target, _ = self._provider.target(call)
        return self._provider.embedder.embed(target, request.model, request.input, call)

    def _count_tokens(self, data: object, call: Call) -> object:
        request = payloads.decode_count(data)
        target, _ = self._provider.target(call)
        body = count_body(request, abilities=self._provider.abilities(request.model))
        tokens = self._provider.counter.count(target, body, anthropic_count_body(body), call)
        return {"model": request.model, "tokens": tokens, "estimator": "metered"}

    def _refresh_models(self, data: object, call: Call) -> object:
        try:
            count = self._provider.refresh(call=call)
        except ProviderError as error:
            raise BusError("provider/upstream_unavailable", error.message) from error
        return {"ok": True, "count": count}


_ENDED = {
    "stop": "the worker was stopped",
    "abort": "the call was aborted",
    "consumer gone": "the caller's channel was closed",
}


def _text(data: object, name: str) -> str | None:
    """A field looked at before the payload is decoded."""
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, str) else None


def _anew(error: BusError, *secrets: str | None) -> BusError:
    """The same without ``secrets``, and without a traceback: that would hold the frame that keeps
    it, and the payload."""
    return BusError(error.code, redacted(error.message, *secrets))


def _prefix(error: ProviderError) -> str:
    """The prefix of a failure's message (provider protocol 9)."""
    if error.status is not None:
        return "provider/upstream_status"
    return "provider/config" if error.kind == "permanent" else "provider/upstream"


def _log_stream(run: StreamRun, traceparent: str | None) -> None:
    """One line per call: enough to see what was slow and why it ended."""
    if not call_log.isEnabledFor(logging.INFO):
        return
    facts = run.summary()
    error = f" error={run.error.message!r}" if run.error is not None else ""
    trace = f" traceparent={traceparent}" if traceparent else ""
    rate = facts["tokens_per_second"]
    call_log.info(
        "stream %d request=%s model=%s phase=%s seconds=%.3f tokens=%d tokens_per_second=%s "
        "input=%s output=%s cached=%s outcome=%s%s%s",
        facts["stream"],
        facts["request"],
        facts["model"],
        facts["phase"],
        facts["seconds"],
        facts["tokens"],
        "-" if rate is None else f"{rate:.1f}",
        *(facts["usage"].get(name, "-") for name in ("input", "output", "cache_read")),
        run.outcome,
        error,
        trace,
    )
