"""Streams and calls for half an hour: ``python -m tests.chaos.soak --minutes 30``.

The worker is a process of its own, started by its command line, and so is the server, the stub of
the bench. This process is the engine, the router and all callers, on one thread: it keeps a number
of streams running, each replaced when it ends, and makes calls beside them, evenly spaced. Every
stream is held to the laws in full, in another process so that no call waits for that, and then
forgotten. What breaks a law, is answered wrongly or comes after its deadline is printed at once and
counted: then it exits with 1. It looks into ``/proc``; ``--plot`` needs the ``bench`` extra.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' own helpers are no package

from bench import sink as bare
from bench import stub
from bench.processes import Child, bare_python
from bench.stats import percentile

from .callers import LOOK_SECONDS, STREAM_GRACE, Engine

Json = dict[str, Any]

SAMPLE_SECONDS = 5.0
START_SECONDS = 20.0
SETTLE_SECONDS = 10.0
STOP_SECONDS = 15.0
SPARE_DESCRIPTORS = 2
"""A question to the server that runs when they are counted at the end, and none did before."""
POINTS = 240
"""Of a plot, at most."""
_VECTOR = {"object": "embedding", "index": 0, "embedding": [0.5] * 64}
ANSWERS: dict[str, tuple[int, Json]] = {
    "/v1/chat/completions/input_tokens": (200, {"input_tokens": 7}),
    "/v1/embeddings": (200, {"object": "list", "model": stub.MODEL, "data": [_VECTOR]}),
    "/tokenize": (200, {"tokens": [1, 2]}),
}


class Watcher:
    """Takes samples of the worker."""

    def __init__(self, worker: Child, engine: Engine) -> None:
        self.engine = engine
        self.worker = worker
        self.samples: list[Json] = []
        self.began = self._at = time.monotonic()
        self._used = worker.cpu_seconds()

    def sample(self) -> Json:
        """What the worker has now, and what was since the last sample."""
        engine, now, used = self.engine, time.monotonic(), self.worker.cpu_seconds()
        proc = Path(f"/proc/{self.worker.process.pid}")
        pages = int((proc / "statm").read_text().split()[1])
        took = sorted(each * 1e3 for each in engine.latencies)
        sample = {
            "at": round(now - self.began, 1),
            "rss_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 2),
            "threads": len(os.listdir(proc / "task")),
            "descriptors": len(os.listdir(proc / "fd")),
            "share": round((used - self._used) / max(now - self._at, 1e-3), 3),
            "running": len(engine.live),
            "calls": len(took),
            "p50_ms": round(percentile(took, 50), 2),
            "p99_ms": round(percentile(took, 99), 2),
            "max_ms": round(took[-1], 2) if took else 0.0,
            "lag_ms": round(engine.lag * 1e3, 2),
        }
        engine.latencies, engine.lag, self._used, self._at = [], 0.0, used, now
        return sample

    def run(self, server: Child) -> None:
        """Streams and calls until the time is over, then until all have ended."""
        engine, options = self.engine, self.engine.options
        due = self.began
        end = due + options.minutes * 60
        every = min(SAMPLE_SECONDS, options.minutes * 60 / 5)
        look = due + every
        while (now := time.monotonic()) < end:
            opened = len(engine.streams)
            # Not all at once, or they would all end at once for ever after.
            if opened < options.streams * min(1.0, (now - self.began) / engine.stream_seconds):
                engine.begin(opened)
            if now >= due:
                engine.lag = max(engine.lag, now - due)
                engine.call()
                # Who is late by much makes no crowd of it.
                due = max(due, now - 0.1) + 1 / options.calls
            if now >= look:
                look += every
                self.samples.append(self.sample())
                # The same plan again: the stub forgets how late each token was.
                server.ask("plan", **plan(options))
                server.expect("planned")
            engine.turn(min(due, end) - time.monotonic())
        engine.going = False
        end += engine.stream_seconds + STREAM_GRACE + 1.0
        while (engine.live or engine.calls) and time.monotonic() < end:
            engine.turn(LOOK_SECONDS)


def plan(options: argparse.Namespace) -> Json:
    """What the stub is told."""
    return {"tokens": options.tokens, "rate": options.rate, "lockstep": False, "streams": 1}


def run(options: argparse.Namespace, directory: Path) -> Json:
    """The whole soak; what came of it."""
    bare.tell = lambda *_, **__: None  # type: ignore[attr-defined]
    python = bare_python(directory)
    with ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        engine = Engine(options, stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn)))
        module = [python, "-m", "tests.chaos.soak", "--serve"]
        server = stack.enter_context(Child(module, directory / "stub.log", talks=True))
        url = f"http://127.0.0.1:{server.expect('port')['port']}"
        server.ask("plan", **plan(options))
        flags = ["--url", f"ws://127.0.0.1:{engine.port}", "--api-url", url, "--resume", "on"]
        flags += ["--log-level", "info", "--max-streams", str(options.streams)]
        command = [python, "-m", "provider_llamacpp", *flags]
        worker = stack.enter_context(Child(command, directory / "worker.log"))
        deadline = time.monotonic() + START_SECONDS
        while not engine.ready and time.monotonic() < deadline:
            engine.turn(LOOK_SECONDS)
        assert engine.ready, worker.words()
        watcher = Watcher(worker, engine)
        before = after = watcher.sample()
        try:
            watcher.run(server)
            settled = time.monotonic() + min(SETTLE_SECONDS, options.minutes * 60)
            while engine.checks or time.monotonic() < settled:
                engine.turn(LOOK_SECONDS)
            after = watcher.sample()
            if after["descriptors"] > before["descriptors"] + SPARE_DESCRIPTORS:
                engine.violate(f"{after['descriptors']} descriptors are left")
            stop(worker, engine)
        except OSError as error:
            engine.violate(f"{error}; the last it said: {worker.words()}")
        facts = {"streams": options.streams, "rate": options.rate, "minutes": options.minutes}
        worst = {name: round(took * 1e3, 2) for name, took in engine.worst.items()}
        return {
            "facts": facts,
            "violations": engine.violations,
            "counts": dict(engine.counts),
            "worst_ms": worst,
            "before": before,
            "after": after,
            "samples": watcher.samples,
        }


def stop(worker: Child, engine: Engine) -> None:
    """SIGTERM; the bus is served until the worker has gone."""
    engine.worker = None
    worker.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while (code := worker.process.poll()) is None and time.monotonic() < deadline:
        engine.turn(0.1)
    if code != 0:
        engine.violate(f"the worker ended with {code} within {STOP_SECONDS:g} s of SIGTERM")


# -- what came of it ------------------------------------------------------------------------------


def full(samples: list[Json]) -> list[Json]:
    """Those taken while all streams ran."""
    most = max((each["running"] for each in samples), default=0)
    first = next((n for n, each in enumerate(samples) if each["running"] == most), 0)
    return samples[first:]


def slope(samples: list[Json], name: str) -> float:
    """Growth an hour in the second half, by least squares."""
    half = samples[len(samples) // 2 :]
    if len(half) < 2:
        return math.nan
    line = statistics.linear_regression([s["at"] for s in half], [s[name] for s in half])
    return float(line.slope) * 3600


def summary(results: Json) -> str:
    """For a terminal."""
    counts: Counter[str] = Counter(results["counts"])
    facts = results["facts"]
    samples = full(results["samples"])
    lines = [
        f"{facts['minutes']:g} minutes, {facts['streams']} streams of {facts['rate']:g} tokens/s: "
        f"{counts['streams']} ended ({counts['streams aborted']} by abort), "
        f"{counts['tokens']} tokens, {results['violations']} violations"
    ]
    for name, worst in results["worst_ms"].items():
        lines.append(f"  {counts[name]:8} calls of {name:18} worst {worst:8.1f} ms")
    for name in ("rss_mb", "threads", "descriptors", "share", "p50_ms", "p99_ms", "lag_ms"):
        values = [each[name] for each in samples] or [math.nan]
        lines.append(
            f"  {name:12} first {values[0]:g}, median {statistics.median(values):g}, last "
            f"{values[-1]:g}, {min(values):g} to {max(values):g}; before the streams "
            f"{results['before'][name]:g}, after them {results['after'][name]:g}"
        )
    lines.append(f"  rss_mb grows by {slope(samples, 'rss_mb'):.2f} an hour in the second half")
    return "\n".join(lines)


def thinned(samples: list[Json], name: str) -> list[float]:
    """The highest of each few, so that a plot has some hundred points."""
    step = math.ceil(len(samples) / POINTS)
    return [max(s[name] for s in samples[at : at + step]) for at in range(0, len(samples), step)]


def plot(samples: list[Json], path: Path) -> None:
    """Memory, threads and descriptors, latency of the calls; an SVG of tens of kilobytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "soak", "lines.linewidth": 1.2})
    minutes = [at / 60 for at in thinned(samples, "at")]
    figure, axes = plt.subplots(3, 1, figsize=(7.2, 6.6), sharex=True, layout="constrained")
    panels = (
        ("resident memory, MiB", {"rss_mb": ("", "#c0392b")}),
        ("", {"threads": ("threads", "#c0392b"), "descriptors": ("descriptors", "#2e86c1")}),
        (
            "latency of calls, ms",
            {"max_ms": ("worst", "#bdc3c7"), "p99_ms": ("p99", "#2e86c1"), "p50_ms": ("p50", "k")},
        ),
    )
    for axis, (title, lines) in zip(axes, panels, strict=True):
        for name, (label, colour) in lines.items():
            axis.plot(minutes, thinned(samples, name), color=colour, label=label)
        axis.set_ylabel(title or "open at once")
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)
    for axis in axes[:2]:
        axis.set_ylim(0, axis.dataLim.ymax * 1.15)
    axes[2].set_yscale("log")
    axes[2].yaxis.set_major_formatter("{x:g}")
    axes[2].set_xlabel("minutes")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    top.add_argument("--minutes", type=float, default=30.0)
    top.add_argument("--streams", type=int, default=64, help="at once (default 64)")
    top.add_argument("--tokens", type=int, default=500, help="of a stream (default 500)")
    top.add_argument("--rate", type=float, default=50.0, help="tokens a second (default 50)")
    top.add_argument("--calls", type=float, default=500.0, help="a second (default 500)")
    top.add_argument("--json", type=Path, help="write all samples")
    top.add_argument("--plot", type=Path, help="draw them, as SVG")
    top.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = top.parse_args()
    if options.serve:
        stub.ANSWERS.update(ANSWERS)
        stub.Stub().serve()
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"soak: the worker's log is {directory / 'worker.log'}", flush=True)
    results = run(options, directory)
    print(summary(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.plot and results["samples"]:
        plot(results["samples"], options.plot)
    return 1 if results["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
