"""The cases: each measures one driver once and gives its figures.

Times are in the unit that a figure's name ends with. ``cpu_per_10k``: processor seconds per 10,000
tokens. ``share``: of one core. ``p50_ms``, ``p99_ms``: added latency after the first second;
``p99_all_ms`` with it. ``kept_up``: tokens that came, of those that were due. ``stub_share``,
``sink_share``: what the two others took; ``stub_late_ms``: how late the stub sent, p99.
``foreign_share``: what unrelated processes took; a driver that needs a whole core and does not get
it has a backlog, and works it off in large reads, which are cheaper.
"""

from __future__ import annotations

import os
import selectors
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .drivers import raw
from .pipes import Json
from .processes import (
    ROOT,
    BenchError,
    Child,
    Driver,
    NoAnswer,
    Rig,
    bare_python,
    clean_environment,
    machine_seconds,
)

Figures = dict[str, float]
RATE = 50.0
KB, MB = 1 << 10, 1 << 20
"""As top and ps count."""
DRAIN_SECONDS = 3.0
"""How long a driver with a backlog may take to work it off before it is given up."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long to measure, in seconds and repetitions."""

    settle: float = 1.0
    window: float = 5.0
    starts: int = 9
    firsts: int = 30
    idle: float = 5.0


SHORT = Lengths(window=2.0, starts=5, firsts=15, idle=2.0)
Measure = Callable[[Driver, Lengths, Path], Figures]


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured of whom."""

    name: str
    title: str
    drivers: tuple[str, ...]
    measure: Measure
    short: bool = False
    """Part of the short form."""


def steady(streams: int, rate: float, *, lockstep: bool) -> Measure:
    """Streams at a given rate, each. Counted after the first second, while all run."""

    def measure(driver: Driver, lengths: Lengths, directory: Path) -> Figures:
        with Rig(driver, directory) as rig:
            rig.wait_ready()
            rig.plan(tokens=None, rate=rate, lockstep=lockstep, streams=streams)
            rig.open(streams)
            rig.expect("begun", of=rig.stub)
            time.sleep(lengths.settle)
            before, since = _cpu(rig), time.monotonic_ns()
            time.sleep(lengths.window)
            after, until = _cpu(rig), time.monotonic_ns()
            rss, threads = rig.child.rss(), rig.child.threads()
            rig.stub.ask("stop")
            try:
                rig.expect("ended", DRAIN_SECONDS)
            except NoAnswer:
                pass  # The report shows it as not complete.
            report = rig.report(since, until)
            rig.stub.ask("stats")
            late = rig.stub.expect("stats")["late_p99_ms"]
            seconds = (until - since) / 1e9
            used, stub, sink, machine = (b - a for a, b in zip(before, after, strict=True))
            figures = {
                "share": used / seconds,
                "kept_up": report["in_window"] / (streams * rate * seconds),
                "complete": float(report["complete"]),
                "rss_mb": rss / MB,
                "threads": float(threads),
                "stub_share": stub / seconds,
                "stub_late_ms": late,
                "sink_share": sink / seconds,
                "foreign_share": (machine - used - stub - sink) / seconds,
            }
            if report["in_window"]:
                figures["cpu_per_10k"] = used / report["in_window"] * 10_000
                if driver.by == "received":
                    figures |= {key: report[key] for key in ("p50_ms", "p99_ms", "p99_all_ms")}
            return figures

    return measure


def _cpu(rig: Rig) -> tuple[float, ...]:
    ours = (child.cpu_seconds() for child in (rig.child, rig.stub, rig.sink))
    return (*ours, machine_seconds())


def _flat(rig: Rig, tokens: int) -> tuple[Json, Figures]:
    rig.plan(tokens=tokens, rate=None)
    before = rig.child.cpu_seconds()
    rig.open(1, tokens=tokens)
    rig.expect("ended", 60.0)
    used = rig.child.cpu_seconds() - before
    report = rig.report()
    return report, {
        "frames_per_s": tokens / report["seconds"] if report["seconds"] else 0.0,
        "cpu_per_10k": used / tokens * 10_000,
        "complete": float(report["complete"]),
    }


def flat(driver: Driver, lengths: Lengths, directory: Path) -> Figures:
    """One stream, as fast as it goes."""
    with Rig(driver, directory) as rig:
        rig.wait_ready()
        return _flat(rig, driver.flat_tokens)[1]


def growth(driver: Driver, lengths: Lengths, directory: Path) -> Figures:
    """1600 tokens a second out of 1 stream and out of 32: what more streams cost per token."""
    one = steady(1, 32 * RATE, lockstep=False)(driver, lengths, directory)
    many = steady(32, RATE, lockstep=False)(driver, lengths, directory)
    return {
        "cpu_per_10k_1": one["cpu_per_10k"],
        "cpu_per_10k_32": many["cpu_per_10k"],
        "growth": many["cpu_per_10k"] / one["cpu_per_10k"],
        "complete": min(one["complete"], many["complete"]),
    }


def first(driver: Driver, lengths: Lengths, directory: Path) -> Figures:
    """From the invocation to the first token, one stream after another."""
    with Rig(driver, directory) as rig:
        rig.wait_ready()
        rig.plan(tokens=1, rate=None)
        time.sleep(0.3)
        before = rig.child.cpu_seconds()
        for _ in range(lengths.firsts):
            rig.open(1)
            rig.expect("ended")
        used = rig.child.cpu_seconds() - before
        report = rig.report()
        return {
            "first_ms": report["first_ms"],
            "cpu_ms_per_call": used / lengths.firsts * 1e3,
            "complete": float(report["complete"]),
        }


def memory(driver: Driver, lengths: Lengths, directory: Path) -> Figures:
    """Idle after registration, then one stream, then 64."""
    with Rig(driver, directory) as rig:
        rig.wait_ready()
        time.sleep(lengths.settle)
        idle, threads, before = rig.child.rss(), rig.child.threads(), rig.child.cpu_seconds()
        time.sleep(lengths.idle)
        used = rig.child.cpu_seconds() - before
        rig.plan(tokens=None, rate=20, lockstep=False)
        rig.open(1)
        rig.expect("begun", of=rig.stub)
        time.sleep(lengths.settle)
        one = rig.child.rss()
        rig.plan(tokens=None, rate=20, lockstep=False, streams=63)
        rig.open(63)
        rig.expect("begun", of=rig.stub)
        time.sleep(lengths.settle)
        return {
            "idle_mb": idle / MB,
            "idle_threads": float(threads),
            "idle_share": used / lengths.idle,
            "kb_per_stream": (rig.child.rss() - one) / 63 / KB,
            "threads_64": float(rig.child.threads()),
        }


def start(driver: Driver, lengths: Lengths, directory: Path) -> Figures:
    """``--version``, and from the start to being registered, in starts of a bare Python."""
    bare, version, registered = [], [], []
    for _ in range(lengths.starts):
        bare.append(_run([bare_python(directory), "-c", "pass"]))
        version.append(_run([bare_python(directory), "-m", "provider_llamacpp", "--version"]))
        with Rig(driver, directory) as rig:
            at = int(rig.expect("registered")["at"])
            used = rig.child.cpu_seconds()
            registered.append(((at - rig.child.started_ns) / 1e9, used))

    def middle(starts: list[tuple[float, float]], kind: int) -> float:
        return statistics.median(start[kind] for start in starts)

    return {
        "bare_ms": middle(bare, 0) * 1e3,
        "version_starts": middle(version, 0) / middle(bare, 0),
        "registered_starts": middle(registered, 0) / middle(bare, 0),
        "version_starts_cpu": middle(version, 1) / middle(bare, 1),
        "registered_starts_cpu": middle(registered, 1) / middle(bare, 1),
    }


def _run(command: Sequence[str]) -> tuple[float, float]:
    """Wall and processor seconds of a process from start to exit."""
    before = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=clean_environment(), stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchError(f"{' '.join(command)} failed")
    return time.monotonic() - before, usage.ru_utime + usage.ru_stime


def long(driver: Driver, lengths: Lengths, directory: Path) -> Figures:
    """A turn of 25,000 tokens and one of 100,000: 4 is linear."""
    seconds, grown, cpu = [], [], []
    for tokens in (25_000, 100_000):
        with Rig(driver, directory) as rig:
            rig.wait_ready()
            time.sleep(lengths.settle)
            idle = rig.child.rss()
            report, figures = _flat(rig, tokens)
            seconds.append(report["seconds"])
            cpu.append(figures["cpu_per_10k"] * tokens)
            grown.append(rig.child.peak_rss() - idle)
    return {
        "time_ratio": seconds[1] / seconds[0],
        "cpu_ratio": cpu[1] / cpu[0],
        "memory_ratio": grown[1] / grown[0],
        "grown_mb_100k": grown[1] / MB,
        "snapshots": float(report["snapshots"]),
        "complete": float(report["complete"]),
    }


def real(streams: int) -> Measure:
    """The real llama-server with the demo model, which never stops talking."""

    def measure(driver: Driver, lengths: Lengths, directory: Path) -> Figures:
        # Only this case needs the extra "local".
        from provider_llamacpp.local.llama import LlamaOptions, LlamaServer
        from provider_llamacpp.local.model import write_model

        try:
            model = write_model(directory / "loop.gguf", "loop")
        except ImportError as error:
            raise BenchError(f"{error}: pip install '.[local]'") from error
        options = LlamaOptions(model=model, alias="stub", ctx_size=4 * 8192, parallel=4, threads=1)
        with LlamaServer(options) as server:
            server.wait_ready(60.0)
            port = int(server.url.rstrip("/").rsplit(":", 1)[1])
            with Rig(driver, directory, upstream=port) as rig:
                rig.wait_ready()
                before = rig.child.cpu_seconds()
                rig.open(streams, tokens=4000)
                rig.expect("ended", 120.0)
                used = rig.child.cpu_seconds() - before
                report = rig.report()
        return {
            "frames_per_s": report["frames"] / report["seconds"],
            "cpu_per_10k": used / report["frames"] * 10_000,
            "unfinished": float(report["unfinished"]),
        }

    return measure


EVERYONE = ("ours", "sdk_httpx", "openai_ws", "litellm", "raw", "parse")
QUICK = ("ours", "sdk_httpx", "openai_ws", "raw", "parse")


def _steady_cases() -> list[Case]:
    cases = []
    for streams in (64, 32, 8, 1):
        for lockstep in (True, False) if streams > 1 else (False,):
            name = f"{'lock' if lockstep else 'free'}{streams}"
            step = "lockstep" if lockstep else "out of step"
            plural = "s" if streams > 1 else ""
            title = f"{streams} stream{plural} at 50 tokens/s, {step}"
            drivers = EVERYONE if streams == 64 else QUICK
            measure = steady(streams, RATE, lockstep=lockstep)
            cases.append(Case(name, title, drivers, measure, short=name == "lock64"))
    return cases


CASES = {
    case.name: case
    for case in (
        *_steady_cases(),
        Case("flat", "one stream, flat out", EVERYONE, flat, short=True),
        Case(
            "growth",
            "1600 tokens/s from 1 and from 32 streams",
            ("ours", "sdk_httpx", "raw"),
            growth,
            short=True,
        ),
        Case(
            "first",
            "time to first token",
            ("ours", "sdk_httpx", "openai_ws", "raw"),
            first,
            short=True,
        ),
        Case("memory", "memory, threads, idle", ("ours", "sdk_httpx"), memory, short=True),
        Case("start", "start, in starts of a bare Python", ("ours",), start, short=True),
        Case("long", "100,000 tokens against 25,000", ("ours",), long, short=True),
        Case("real1", "real llama-server, one stream", ("ours", "sdk_httpx", "raw"), real(1)),
        Case("real4", "real llama-server, 4 streams", ("ours", "sdk_httpx", "raw"), real(4)),
    )
}


def ceiling(directory: Path) -> str:
    """What the stub manages alone, in words: it must be far above what any driver needs."""
    tokens, streams, rate, seconds = 200_000, 64, 2000.0, 1.0
    stub = Child([bare_python(directory), "-m", "bench.stub"], directory / "stub.log", talks=True)
    with stub, ExitStack() as stack:
        port = stub.expect("port")["port"]
        stub.ask("plan", tokens=tokens, rate=None, lockstep=False, streams=1)
        stub.expect("planned")
        upstream = stack.enter_context(raw.ask(port))
        before = time.monotonic()
        while upstream.recv(1 << 17):
            pass
        flat_rate = tokens / (time.monotonic() - before)
        stub.ask("plan", tokens=None, rate=rate, lockstep=True, streams=streams)
        stub.expect("planned")
        with selectors.DefaultSelector() as selector:
            for _ in range(streams):
                selector.register(stack.enter_context(raw.ask(port)), selectors.EVENT_READ)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                for key, _ in selector.select(0.1):
                    key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
        stub.ask("stats")
        stats = stub.expect("stats")
    return (
        f"{flat_rate:,.0f} tokens/s flat out, {stats['sent'] / seconds:,.0f} tokens/s in "
        f"{streams} streams"
    )
