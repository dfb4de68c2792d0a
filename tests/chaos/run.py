"""The run: engine, router, caller and proxies here, the worker in a process of its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from proxy import Cut, Link

from provider_llamacpp.errors import BusError
from provider_llamacpp.local.client import BusClient
from provider_llamacpp.local.router import LoopbackRouter

from .lines import NarrowProxy, ProxiedEngine
from .process import SILENCE_LIMIT, Worker
from .record import Record
from .schedule import Fault, StreamPlan, faults, real_prompt, real_words, stream_plan
from .server import MODEL, ChaosServer, RealServer
from .streams import BUS_LOST, PATIENCE, Caller, Seen, Trouble, judge

WORKER = "provider-llamacpp"
RSS_LIMIT = 160 << 20
"""Bytes the worker's memory may grow from its first quiet moment on. Answers of 8 MiB, many of them
side by side, are part of the run, and the allocator keeps pages for each thread; what a thousand
streams would leak at 200 KB each stands out all the same."""


class Run:
    """One run. :meth:`go` returns when all streams are over.

    :param width: streams at once
    :param every: streams for each fault that happens to all
    :param real: a real llama-server in place of the scripted one
    :param patient: leave the worker the times it has by default
    :param cuts: cut connections to the server on their way
    :param resume: the real server keeps streams: a connection that is cut in its body, and the one
        that takes the stream up again, costs the caller nothing
    """

    def __init__(
        self,
        seed: int,
        streams: int,
        *,
        width: int = 24,
        every: int = 40,
        real: bool = False,
        patient: bool = False,
        cuts: bool = True,
        resume: bool = False,
        log: Path,
    ) -> None:
        self.seed = seed
        self.streams = streams
        self.width = width
        self.real = real = real or resume
        self._resume = resume
        self._patient = patient
        self._cuts = cuts
        self.faults = faults(seed, streams, every, real=real)
        self.troubles: list[Trouble] = []
        self.counts: Counter[str] = Counter()
        """Faults of streams, callers' ways and faults of all, by kind."""
        self.outcomes: Counter[str] = Counter()
        self.done = 0
        self.quiet: list[dict[str, Any]] = []
        """What the worker held at each quiet moment."""
        self.abort_seconds: list[float] = []
        self.recoveries: dict[str, list[float]] = {}
        self._log = log
        self.record = Record(log, f"seed {seed}, {streams} streams at most, {width} at once")
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._results: Counter[str] = Counter()
        self._ports: set[int] = set()
        self._stack = contextlib.ExitStack()

    @property
    def violations(self) -> list[str]:
        """What broke a law, one sentence each; :attr:`record` has the whole of it."""
        return self.record.violations

    # -- life -----------------------------------------------------------------------------

    def __enter__(self) -> Run:
        with self._stack:
            self._set_up(self._stack)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        if error is not None:
            self.record.note("the run broke off", *traceback.format_exception(error))
        self.record.write(self.report())
        self._stack.close()

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        self.server: ChaosServer | RealServer = RealServer() if self.real else ChaosServer()
        self.server.start()
        stack.callback(self.server.stop)
        if self._resume and not (isinstance(self.server, RealServer) and self.server.keeps_streams):
            raise LookupError("this llama-server keeps no streams")
        self.line = stack.enter_context(NarrowProxy(self.server.url, self._cut_plan))
        self.engine = stack.enter_context(ProxiedEngine(self._on_frame, self._on_end))
        self.bus = stack.enter_context(NarrowProxy(self.engine.url))
        self.router = LoopbackRouter(self.engine.url, environ={})
        self.router.set_config("llamacpp", api_url=self.line.url)
        stack.enter_context(self.router)
        self.client = BusClient(self.engine.url, "chaos-caller")
        self.client.start()
        stack.callback(self.client.stop)
        self.caller = Caller(self.client, "llamacpp", self._payload)
        self.worker = Worker(self.bus.url, self._log, patient=self._patient, resume=self._resume)
        self.worker.start()
        stack.callback(self._end_worker)
        self.wait_served()

    def _end_worker(self) -> None:
        process = self.worker.process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()

    def _payload(self, plan: StreamPlan) -> dict[str, Any]:
        words = real_prompt(plan) if self.real else plan.text()
        text = {"type": "text", "text": words}
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": [text], "timestamp": 1}],
            "max_output_tokens": 5000,
        }

    # -- what others do -------------------------------------------------------------------

    def _on_frame(self, peer: Any, frame: dict[str, Any]) -> None:
        if frame.get("id") == "provider::llamacpp::stream" and peer.name == WORKER:
            with self._lock:
                for each in self.troubles:
                    if each.kind == "bus_silent" and each.until is None:
                        each.until = time.monotonic()
        if frame.get("type") == "invocationresult" and peer.name == WORKER:
            invocation = frame["invocation_id"]
            with self._lock:
                self._results[invocation] += 1
                twice = self._results[invocation] == 2
            if twice:
                self.record.violation(f"two results for one call: {frame}")

    def _on_end(self, peer: Any, port: int) -> None:
        """A worker's connection has ended, and its calls are about to fail for that."""
        if peer.name != WORKER or self._stop.is_set():
            return
        with self._lock:
            known = any(each.until is None and each.kind in BUS_LOST for each in self.troubles)
        seconds, since = self.bus.by_port[port].silence()
        if known or self._patient or seconds < SILENCE_LIMIT:
            return
        # On a busy machine engine and proxy, which are ours, may have no turn for that long. Then
        # the worker is right to give the line up: what came of it is no broken law.
        with self._lock:
            self.counts["engine without a turn"] += 1
            self.troubles.append(Trouble("bus_silent", since))
        self.record.note(f"nothing went to the worker for {seconds:.3f} s, and it left")

    def _cut_plan(self, link: Link) -> Cut | None:
        """The connections to the server that break on their way: one in 25, or most of them."""
        if self._resume:
            return self._resumed_cut(link)
        rng = random.Random(f"{self.seed} link {link.number} {link.request}")
        likely = 0.15 if self.real else 0.04
        if not self._cuts or not link.request.startswith("POST") or rng.random() > likely:
            return None
        assert link._server is not None
        self._ports.add(link._server.getsockname()[1])
        self.counts["server connection cut"] += 1
        return Cut(rng.choice((0, 50, 400, 2000, 8000)), how=rng.choice(("close", "reset")))

    def _resumed_cut(self, link: Link) -> Cut | None:
        """Of a chat, or of what takes it up again; always behind the head of the answer."""
        rng = random.Random(f"{self.seed} link {link.number}")
        chat = link.request.startswith("POST /v1/chat/")
        if not (chat or link.request.startswith("GET /v1/stream?")) or rng.random() > 0.6:
            return None
        self.counts["chat cut" if chat else "replay cut"] += 1
        return Cut(rng.choice((0, 50, 400, 2000, 8000)), how=rng.choice(("close", "reset")))

    # -- the streams ----------------------------------------------------------------------

    def go(self, seconds: float | None = None) -> None:
        """Make the streams, the faults between them, and look at the quiet moments."""
        deadline = None if seconds is None else time.monotonic() + seconds
        pending = {fault.number: fault for fault in self.faults}
        room = threading.Semaphore(self.width)
        self._probe("warm-up", min(self.width, 24))
        with ThreadPoolExecutor(self.width) as pool, ThreadPoolExecutor(1) as gremlin:
            running: set[Future[None]] = set()
            works: list[Future[None]] = []
            for number in range(self.streams):
                if deadline is not None and time.monotonic() > deadline:
                    break
                if (fault := pending.pop(number, None)) is not None:
                    works.append(gremlin.submit(self._befall, fault))
                room.acquire()
                future = pool.submit(self._stream, stream_plan(self.seed, number, real=self.real))
                running.add(future)
                future.add_done_callback(lambda _: room.release())
                running = {each for each in running if not each.done()}
                if number % 250 == 249:
                    self._gather(running, works)
                    self._look()
            self._gather(running, works)
        self._look(last=True)

    def _gather(self, running: set[Future[None]], works: list[Future[None]]) -> None:
        for future in [*running, *works]:
            future.result()
        works.clear()

    def _stream(self, plan: StreamPlan) -> None:
        seen = self.caller.run(plan, self._stop)
        self._record(seen)

    def _record(self, seen: Seen) -> None:
        plan = seen.plan
        # What a real server does not tell: whose connection was cut.
        cut = self.real or self.server.ports.get(plan.number) in self._ports
        if self._resume:
            # Before its first byte there is nothing to take up; a stream that has begun is whole.
            cut = seen.kinds == ["error"]
        with self._lock:
            troubles = list(self.troubles)
        said = real_words(plan) if self.real else None
        found = judge(seen, troubles, maybe_cut=cut, said=said)
        kinds = seen.kinds
        outcome = kinds[-1] if kinds else "no frame"
        if outcome not in ("done", "error", "no frame"):
            outcome = "ended by abort or leaving"
        with self._lock:
            self.done += 1
            self.counts[f"server {plan.server}"] += 1
            self.counts[f"caller {plan.caller}"] += 1
            self.outcomes[outcome] += 1
            self.abort_seconds += seen.abort_seconds
        for each in found:
            self.record.violation(
                f"stream {plan.number} ({plan.server}, {plan.caller}): {each}",
                *self.record.of_stream(seen, troubles),
            )

    # -- faults of all --------------------------------------------------------------------

    def _befall(self, fault: Fault) -> None:
        self.counts[fault.kind] += 1
        trouble = Trouble(fault.kind, time.monotonic())
        with self._lock:
            self.troubles.append(trouble)
        self.record.note(f"{fault.kind}, {fault}")
        try:
            getattr(self, f"_{fault.kind}")(fault)
            began = time.monotonic()
            self.wait_served()
            self.recoveries.setdefault(fault.kind, []).append(time.monotonic() - began)
        except Exception as error:
            self.record.violation(
                f"{fault.kind}: {type(error).__name__}: {error}",
                *traceback.format_exception(error),
            )
        # Calls may still be on their way that were begun under it.
        trouble.until = time.monotonic() + 0.2
        self.record.note(f"{fault.kind} is over")

    def wait_served(self) -> None:
        """Until a stream comes through whole.

        :raises AssertionError: after a minute
        """
        deadline = time.monotonic() + 2 * PATIENCE
        plan = StreamPlan(-1, "none", "reads", "text", 1, 0, 0.0, 0, 0.0)
        while True:
            seen = self.caller.run(plan, self._stop)
            if seen.frames and seen.kinds[-1] == "done":
                return
            said = seen.frames[-1] if seen.frames else seen.failure
            assert time.monotonic() < deadline, f"nothing is served: {said}"
            self._stop.wait(0.05)

    def _pause(self, fault: Fault) -> None:
        self._stop.wait(fault.seconds)

    def _engine_killed(self, fault: Fault) -> None:
        self.engine.stop(None)
        self._pause(fault)
        self.engine.start()

    def _engine_closed(self, fault: Fault) -> None:
        self.engine.stop(1001)
        self._pause(fault)
        self.engine.start()

    def _control(self) -> list[Link]:
        return [link for link in list(self.bus.links) if link.request.startswith("GET / ")]

    def _bus_cut(self, fault: Fault) -> None:
        _cut(self._control(), "close")

    def _bus_reset(self, fault: Fault) -> None:
        _cut(self._control(), "reset")

    def _half_open(self, fault: Fault) -> None:
        self.bus.hold()
        # Half of them longer than the worker's silence limit.
        self._stop.wait(fault.seconds + (2.5 if fault.draw > 0.5 else 0.0))
        if fault.draw * 4 % 1 > 0.5:
            # Carried out before anything else goes through.
            _cut(self.bus.links, "reset")
        self.bus.release()

    def _engine_stops_reading(self, fault: Fault) -> None:
        self.engine.pause_reading(WORKER)
        self._pause(fault)
        self.engine.resume_reading(WORKER)

    def _channels_cut(self, fault: Fault) -> None:
        rng = random.Random(fault.draw)
        channels = [
            link for link in list(self.bus.links) if link.request.startswith("GET /ws/channels/")
        ]
        for how in ("reset", "close"):
            _cut([link for link in channels if rng.random() < 0.5], how)

    def _router_restarts(self, fault: Fault) -> None:
        self.router.restart()

    def _router_forgets(self, fault: Fault) -> None:
        self.router.restart(keep_tokens=False)

    def _state_missing(self, fault: Fault) -> None:
        self.engine.state_enabled = False
        self.engine.drop_worker(WORKER)
        self._pause(fault)
        self.engine.state_enabled = True

    def _server_refuses(self, fault: Fault) -> None:
        self.line.refuse()
        self._pause(fault)
        self.line.accept()

    def _server_dies(self, fault: Fault) -> None:
        self.line.refuse()
        _cut(self.line.links, "reset")
        self._pause(fault)
        self.line.accept()

    def _server_silent(self, fault: Fault) -> None:
        self.line.hold()
        self._pause(fault)
        self.line.release()

    def _server_restarts(self, fault: Fault) -> None:
        if isinstance(self.server, RealServer):
            self.server.restart()
            return
        self.server.die()
        self._pause(fault)
        self.server.start()

    def _server_loading(self, fault: Fault) -> None:
        assert isinstance(self.server, ChaosServer)
        self.server.loading = True
        self._pause(fault)
        self.server.loading = False

    def _abort_storm(self, fault: Fault) -> None:
        keys = list(self.caller.running.values())
        futures = [
            self.client.begin("provider::llamacpp::abort", {"request_id": key})
            for key in keys
            for _ in range(3)
        ]
        for future in futures:
            with contextlib.suppress(BusError):
                future.result(10)

    def _clock_jumps(self, fault: Fault) -> None:
        os.kill(self.worker.pid, signal.SIGUSR1)

    def _worker_terminated(self, fault: Fault) -> None:
        if problem := self.worker.terminate():
            self.record.violation(problem)
        self.worker.start()
        # What the new process holds is compared with nothing of the old one.
        self.quiet.clear()
        self._probe("warm-up after a restart", 24)

    # -- quiet moments --------------------------------------------------------------------

    def _probe(self, what: str, count: int) -> None:
        """So many plain streams at once, which makes all threads there will be."""
        with ThreadPoolExecutor(count) as pool:
            plans = [
                StreamPlan(-1, "none", "reads", "text", 30, 0, 0.0, 0, 0.0) for _ in range(count)
            ]
            for seen in pool.map(lambda plan: self.caller.run(plan, self._stop), plans):
                if not seen.frames:
                    said = self.record.of_stream(seen, ())
                    self.record.violation(f"{what}: {seen.failure}", *said)

    def _look(self, *, last: bool = False) -> None:
        """After the last stream nothing is left: no call, stream, descriptor, connection."""
        held: dict[str, Any] = {}
        for _ in self._tries(15.0):
            held = self._held()
            if not held["problems"]:
                break
        for each in held["problems"]:
            self.record.violation(f"left after {self.done} streams: {each}")
        self.quiet.append(held)
        self.record.note(f"quiet after {self.done} streams")
        self.line.forget()
        self.bus.forget()
        self.server.ports.clear()
        if len(self.quiet) > 1:
            first = self.quiet[0]
            if held["threads"] > max(first["threads"], 24 + 16 + 64):
                self.record.violation(f"threads: {first['threads']}, then {held['threads']}")
            grown = held["rss"] - first["rss"]
            if grown > RSS_LIMIT:
                self.record.violation(f"memory grew by {grown >> 20} MiB")

    def _held(self) -> dict[str, Any]:
        problems = []
        facts = self.client.invoke("provider::llamacpp::status", {})
        for name in ("active_streams", "calls"):
            if facts[name]:
                problems.append(f"{facts[name]} {name}")
        self.line.forget()
        self.bus.forget()
        if active := self.server.active:
            problems.append(f"the server generates for {active}")
        if self.server.connections:
            problems.append(f"{self.server.connections} connections at the server")
        if len(self.bus.links) != 1:
            problems.append(f"{len(self.bus.links)} sockets to the engine")
        descriptors = self.worker.descriptors()
        if self.quiet and descriptors != self.quiet[0]["descriptors"]:
            problems.append(f"descriptors {descriptors}, first {self.quiet[0]['descriptors']}")
        return {
            "problems": problems,
            "threads": self.worker.threads(),
            "descriptors": descriptors,
            "rss": self.worker.rss(),
            "resumes": facts["resumes"],
            "streams": self.done,
            "own": len(os.listdir("/proc/self/fd")),
        }

    def _tries(self, seconds: float) -> Iterator[None]:
        deadline = time.monotonic() + seconds
        while True:
            yield
            if time.monotonic() > deadline:
                return
            self._stop.wait(0.1)

    # -- the report -----------------------------------------------------------------------

    def report(self) -> str:
        """What happened, for people."""
        lines = [f"seed {self.seed}: {self.done} streams, {len(self.violations)} violations"]
        lines += [f"  outcomes: {dict(self.outcomes.most_common())}"]
        lines += [f"  {kind}: {count}" for kind, count in sorted(self.counts.items())]
        for moment in self.quiet:
            held = sum(moment["descriptors"].values())
            lines.append(
                f"  after {moment['streams']}: {moment['threads']} threads, {held} descriptors, "
                f"{moment['rss'] >> 20} MiB; here {moment['own']} descriptors"
            )
        if self._resume:
            taken = max((moment["resumes"] for moment in self.quiet), default=0)
            lines.append(f"  taken up again by one worker process: {taken} streams")
        if self.abort_seconds:
            slowest = max(self.abort_seconds)
            lines.append(f"  aborts answered: {len(self.abort_seconds)}, slowest {slowest:.3f} s")
        for kind, times in sorted(self.recoveries.items()):
            lines.append(f"  {kind}: served again after {max(times):.2f} s at worst")
        lines += [f"  VIOLATION {each}" for each in self.violations[:40]]
        lines += [f"  all of it is in {self.record.path}"]
        return "\n".join(lines)


def _cut(links: Iterable[Link], how: Literal["close", "reset"]) -> None:
    """End them, and wait for that: what begins later is not to be met by it."""
    ending = list(links)
    for link in ending:
        link.cut(how)
    for link in ending:
        assert link.ended.wait(PATIENCE), "a connection was cut and goes on"
