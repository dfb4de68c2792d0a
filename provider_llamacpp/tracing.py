"""Calls as OpenTelemetry spans. Imported only where they are asked for.

A span is made when its call is over, with the times it had: nothing of it is on the way of a token.
Its parent is what the caller's ``traceparent`` names; names and attributes are of the semantic
conventions for generative AI, and where these know none, our own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import VERSION
from .errors import SettingsError
from .summaries import CallSummary, Observer

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_OPERATIONS = {"stream": "chat", "embed": "embeddings"}
_FINISHES = frozenset({"end", "length", "function_call"})
"""Outcomes that are finish reasons."""


def span_maker(provider: TracerProvider | None = None) -> Observer:
    """Makes a span of each call it is told of.

    :param provider: None takes the application's, as it is set when a span is made
    :raises SettingsError: ``opentelemetry-api`` is not installed
    """
    try:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as error:
        raise SettingsError(
            "tracing: opentelemetry-api is not installed (pip install provider-llamacpp[tracing])"
        ) from error
    tracer = trace.get_tracer("provider_llamacpp", VERSION, tracer_provider=provider)
    propagator = TraceContextTextMapPropagator()

    def make(summary: CallSummary) -> None:
        # From an empty context: what this thread has in its own is nothing of the caller's.
        carrier = {"traceparent": summary.traceparent} if summary.traceparent else {}
        start = _nanoseconds(summary.started_at)
        operation = _OPERATIONS.get(summary.function, summary.function)
        span = tracer.start_span(
            f"{operation} {summary.model}" if summary.model else operation,
            context=propagator.extract(carrier, Context()),
            kind=trace.SpanKind.SERVER,
            start_time=start,
            attributes=_attributes(summary, operation),
        )
        at = summary.started_at
        for phase, name in ((summary.waiting, "server began"), (summary.prompt, "first token")):
            if phase is None:
                break
            at += phase
            span.add_event(name, timestamp=_nanoseconds(at))
        if summary.error_kind is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, summary.error))
        span.end(end_time=_nanoseconds(summary.started_at + summary.seconds))

    return make


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _attributes(summary: CallSummary, operation: str) -> dict[str, Any]:
    given = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "llama.cpp",
        "gen_ai.request.model": summary.model,
        "gen_ai.usage.input_tokens": summary.prompt_tokens,
        "gen_ai.usage.output_tokens": summary.tokens,
        "gen_ai.response.finish_reasons": (
            (summary.outcome,) if summary.outcome in _FINISHES else None
        ),
        "error.type": summary.error_kind,
        "provider_llamacpp.provider": summary.provider,
        "provider_llamacpp.call": summary.number,
        "provider_llamacpp.request_id": summary.request_id,
        "provider_llamacpp.outcome": summary.outcome,
        "provider_llamacpp.cached_tokens": summary.cached_tokens,
        "provider_llamacpp.tokens_per_second": summary.tokens_per_second,
    }
    return {name: value for name, value in given.items() if value is not None}
