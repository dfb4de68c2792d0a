"""What an application can see of its worker: a summary of each call, spans, and figures.

The spans stay in memory here; an application sets its own ``TracerProvider``. A worker started by
its command line gets one by ``opentelemetry-instrument`` and ``PROVIDER_LLAMACPP_TRACING=true``.
"""

from __future__ import annotations

import threading

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from stage import arguments, stage

from provider_llamacpp import CallSummary, ProviderWorker, Settings, prometheus_text


def main() -> None:
    options = arguments("A summary of each call, spans, and figures.").parse_args()
    spans = InMemorySpanExporter()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(tracing)
    told = threading.Event()

    def on_call(summary: CallSummary) -> None:
        # On a thread that does nothing else: to be slow here holds up no call.
        if summary.function == "stream":
            phases = (summary.waiting, summary.prompt, summary.generating)
            print(
                f"stream {summary.number} of {summary.model}: {summary.outcome},",
                f"{summary.tokens} tokens in {summary.seconds:.3f} s",
                f"(phases: {', '.join(f'{each or 0:.3f}' for each in phases)})",
            )
            told.set()

    with stage(options.api_url) as here:
        settings = Settings(url=here.url, api_url=here.api_url, on_call=on_call, tracing=True)
        with ProviderWorker(settings) as worker:
            worker.wait_ready(30.0)
            here.ask("Hello")
            told.wait(30.0)
            figures = prometheus_text(worker.stats())
    for span in spans.get_finished_spans():
        print("span:", span.name, dict(span.attributes or {}).get("gen_ai.usage.output_tokens"))
    print(next(line for line in figures.splitlines() if "streams_total{" in line))


if __name__ == "__main__":
    main()
