"""What an application sees of its worker's calls: summaries, spans, Prometheus' text."""

# ruff: noqa: F811 (fixtures are imported and then named as arguments)

from __future__ import annotations

import builtins
import logging
import queue
import subprocess
import sys
import threading
from typing import Any

import pytest
from iii import InvocationError
from peers import PATIENCE
from world import new_world, scripted, settled, world  # noqa: F401

from provider_llamacpp import CallSummary, ProviderWorker, Settings, SettingsError, prometheus_text
from provider_llamacpp.settings import from_environment, unknown_variables
from provider_llamacpp.summaries import MOST, Reporter
from provider_llamacpp.surfaces.metrics import parse

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def summary(**more: Any) -> CallSummary:
    facts: dict[str, Any] = {
        "provider": "llamacpp",
        "number": 7,
        "function": "stream",
        "outcome": "end",
        "started_at": 1_760_000_000.0,
        "seconds": 3.0,
    }
    return CallSummary(**{**facts, **more})


# -- the thread that tells --------------------------------------------------------------------


def test_each_is_told_once_and_in_order_also_at_the_stop() -> None:
    seen: list[int] = []
    reporter = Reporter([lambda each: seen.append(each.number)], "observers")
    reporter.start()
    for number in range(50):
        reporter.tell(summary(number=number))
    reporter.stop(PATIENCE)
    assert seen == list(range(50))


def test_an_observer_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[CallSummary] = []

    def fails(each: CallSummary) -> None:
        raise RuntimeError("of the application")

    reporter = Reporter([fails, seen.append], "observers")
    reporter.start()
    reporter.tell(summary())
    reporter.tell(summary())
    reporter.stop(PATIENCE)
    assert len(seen) == 2
    assert [each.message for each in caplog.records] == ["an observer of calls failed"] * 2


def test_one_that_is_too_slow_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    go, busy = threading.Event(), threading.Event()
    seen: list[CallSummary] = []

    def slow(each: CallSummary) -> None:
        busy.set()
        assert go.wait(PATIENCE)
        seen.append(each)

    reporter = Reporter([slow], "observers")
    reporter.start()
    reporter.tell(summary())
    assert busy.wait(PATIENCE)
    for _ in range(MOST + 5):
        reporter.tell(summary())
    reporter.stop(0.0)
    go.set()
    reporter.stop(PATIENCE)
    assert len(seen) == MOST + 1
    words = [each.message for each in caplog.records]
    assert [each.partition(":")[0] for each in words] == [
        "observers of calls are too slow",
        "an observer of calls did not return within 0 s",
    ]


def test_an_observer_may_stop_the_worker() -> None:
    done = threading.Event()

    def stops(each: CallSummary) -> None:
        reporter.stop(PATIENCE)
        done.set()

    reporter = Reporter([stops], "observers")
    reporter.start()
    reporter.tell(summary())
    assert done.wait(PATIENCE)
    reporter.stop(PATIENCE)


def test_trace_ids() -> None:
    assert summary(traceparent=TRACEPARENT).trace_id == TRACE
    for other in (None, "", "nonsense", TRACEPARENT.upper()):
        assert summary(traceparent=other).trace_id is None


# -- of a worker ------------------------------------------------------------------------------


def test_nothing_is_there_where_nobody_observes() -> None:
    worker = ProviderWorker(Settings())
    assert worker._reporter is None
    code = (
        "import sys; from provider_llamacpp import *\n"
        "ProviderWorker(Settings(on_call=print)); assert 'opentelemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_a_stream_and_a_short_call_are_told(scripted: Any) -> None:
    told: queue.Queue[CallSummary] = queue.Queue()
    scripted.worker(on_call=told.put, max_streams=1)
    assert scripted.live_router.wait_for_calls("models::reconcile")
    scripted.server.go.set()
    assert settled(scripted.stream(resolution_key="r-1"))["stop_reason"] == "end"
    each = told.get(timeout=PATIENCE)
    while each.function == "refresh_models":  # the router asks for that on its own
        each = told.get(timeout=PATIENCE)
    assert (each.provider, each.function, each.outcome) == ("llamacpp", "stream", "end")
    assert (each.request_id, each.model, each.tokens) == ("r-1", "demo", 1)
    assert (each.error_kind, each.error, each.tokens_per_second) == (None, None, None)
    assert each.waiting is not None and each.prompt is not None and each.generating is not None
    assert each.waiting + each.prompt + each.generating == pytest.approx(each.seconds)
    with pytest.raises(InvocationError):
        scripted.call("count_tokens", {"model": 1})
    each = told.get(timeout=PATIENCE)
    assert (each.function, each.outcome) == ("count_tokens", "invalid request")
    assert each.error_kind == "provider/invalid_request"
    with pytest.raises(InvocationError):
        scripted.call("embed", {"model": "demo", "input": ["a"]})
    each = told.get(timeout=PATIENCE)
    assert (each.function, each.outcome) == ("embed", "failed")
    assert each.error_kind == "invocation_failed" and "404" in (each.error or "")


def test_a_stream_beyond_the_limit_and_one_that_is_aborted_are_told(scripted: Any) -> None:
    told: queue.Queue[CallSummary] = queue.Queue()
    scripted.worker(on_call=told.put, max_streams=1)
    assert scripted.live_router.wait_for_calls("models::reconcile")
    first = scripted.stream(resolution_key="r-1")
    assert first.wait_for("text_delta")
    assert settled(scripted.stream())["error_kind"] == "rate_limited"
    outcomes = {}
    while "refused" not in outcomes:
        each = told.get(timeout=PATIENCE)
        outcomes[each.outcome] = each
    refused = outcomes["refused"]
    assert (refused.function, refused.number, refused.error_kind) == (
        *("stream", 0, "rate_limited"),
    )
    assert scripted.call("abort", {"request_id": "r-1"}) == {"aborted": True}
    while "abort" not in outcomes:
        each = told.get(timeout=PATIENCE)
        outcomes[each.outcome] = each
    assert (outcomes["abort"].request_id, outcomes["abort"].error_kind) == ("r-1", None)


# -- spans ------------------------------------------------------------------------------------


def spans_of(*summaries: CallSummary) -> list[Any]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from provider_llamacpp.tracing import span_maker

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    make = span_maker(provider)
    for each in summaries:
        make(each)
    return list(exporter.get_finished_spans())


def test_a_span_has_the_times_of_its_call_and_the_callers_trace() -> None:
    (span,) = spans_of(
        summary(
            model="demo",
            waiting=1.0,
            prompt=0.5,
            generating=1.5,
            prompt_tokens=10,
            tokens=5,
            traceparent=TRACEPARENT,
        )
    )
    start = 1_760_000_000 * 10**9
    assert (span.name, span.start_time, span.end_time) == ("chat demo", start, start + 3 * 10**9)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert [(each.name, each.timestamp - start) for each in span.events] == [
        ("server began", 10**9),
        ("first token", 1_500_000_000),
    ]
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert span.attributes["gen_ai.response.finish_reasons"] == ("end",)
    assert "error.type" not in span.attributes
    assert span.status.is_unset


def test_a_span_of_a_failure_without_a_trace() -> None:
    (span,) = spans_of(
        summary(function="embed", outcome="failed", error_kind="invocation_failed", error="why")
    )
    assert span.name == "embeddings" and span.parent is None and not span.events
    assert (span.status.is_ok, span.status.description) == (False, "why")
    assert span.attributes["error.type"] == "invocation_failed"


def test_tracing_without_the_package_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(SettingsError, match="opentelemetry-api is not installed"):
        ProviderWorker(Settings(tracing=True))


def test_settings_of_hooks() -> None:
    assert from_environment({"PROVIDER_LLAMACPP_TRACING": "yes"}).tracing is True
    assert from_environment({"PROVIDER_LLAMACPP_ON_CALL": "os.abort"}).on_call is None
    assert unknown_variables({"PROVIDER_LLAMACPP_ON_CALL": "os.abort"}) != []
    first, second = from_environment({"PROVIDER_LLAMACPP_ID": "a,b"}).providers()
    assert first.on_call is None and second.tracing is False


# -- Prometheus -------------------------------------------------------------------------------


def test_the_text_is_what_prometheus_reads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with ProviderWorker(Settings(url="ws://127.0.0.1:9")) as worker:
        stats = worker.stats()
    stats |= {
        "outcomes": {"end": 3, 'a "b"\\\n}': 1},
        "usage": {"input": 12, "output": 5},
        "bytes": 10**12,
        "uptime": 1.5,
    }
    text = prometheus_text(stats, {**stats, "id": "pi5", "frames": 7})
    assert text.endswith("\n") and "\n\n" not in text
    found = parse(text)
    assert len(found) == sum(not line.startswith("#") for line in text.splitlines())

    def value(series: str) -> Any:
        return found[f"provider_llamacpp_{series}"]["value"]

    assert value('streams_total{provider="llamacpp",outcome="end"}') == 3
    assert value(r'streams_total{provider="llamacpp",outcome="a \"b\"\\\n}"}') == 1
    assert value('tokens_total{provider="pi5",kind="output"}') == 5
    assert value('received_bytes_total{provider="pi5"}') == 10**12
    assert (value('frames_total{provider="pi5"}'), value('frames_total{provider="llamacpp"}')) == (
        *(7, 0),
    )
    assert value('uptime_seconds{provider="llamacpp"}') == 1.5
    assert value('server_state{provider="llamacpp",state="unknown"}') == 1
    assert value('server_state{provider="llamacpp",state="ready"}') == 0
    for name, each in found.items():
        counter = "_total" in name
        assert each["kind"] == ("counter" if counter else "gauge") and each["help"]
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))


def test_no_stats_no_samples() -> None:
    assert parse(prometheus_text()) == {}
