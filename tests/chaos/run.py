"""The run: engine, router, caller and proxies here, the worker in a process of its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from proxy import Cut, Link, Proxy

from provider_llamacpp.errors import BusError
from provider_llamacpp.local.client import BusClient
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.router import LoopbackRouter

from .schedule import Fault, StreamPlan, faults, real_prompt, real_words, stream_plan
from .server import MODEL, ChaosServer, RealServer
from .streams import PATIENCE, Caller, Seen, Trouble, judge

SEND_TIMEOUT = 2.0
WORKER = "provider-llamacpp"
STOP_LIMIT = 8.0
"""Seconds from SIGTERM to exit, with a drain of 0.3 s."""
RSS_LIMIT = 160 << 20
"""Bytes the worker's memory may grow from its first quiet moment on. Answers of 8 MiB, many of them
side by side, are part of the run, and the allocator keeps pages for each thread; what a thousand
streams would leak at 200 KB each stands out all the same."""


class NarrowProxy(Proxy):
    """Takes little into its buffers, so that a caller that does not read is felt soon."""

    buffer = 65536

    def forget(self) -> None:
        """Drop the connections that have ended."""
        with self._changing:
            self.links[:] = [link for link in self.links if not link.ended.is_set()]
        self._threads[:] = [thread for thread in self._threads if thread.is_alive()]


class ProxiedEngine(LoopbackEngine):
    """Takes the proxy's address for its own."""

    def _refusal(self, connection: Any, request: Any) -> Any:
        del request.headers["Host"]
        request.headers["Host"] = self._authority
        return super()._refusal(connection, request)


class Worker:
    """The worker's process, and what the system says of it."""

    def __init__(
        self, engine_url: str, log: Path, *, patient: bool = False, resume: bool = False
    ) -> None:
        self._url = engine_url
        self._resume = resume
        self._patient = patient
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.exits: list[float] = []

    def start(self) -> None:
        child = Path(__file__).with_name("child.py")
        flags = ["--url", self._url, "--drain", "0.3", "--log-level", "info"]
        flags += ["--resume", "on"] if self._resume else []
        impatient = {
            "PROVIDER_LLAMACPP_SEND_TIMEOUT": f"{SEND_TIMEOUT:g}",
            "PROVIDER_LLAMACPP_CONNECT_TIMEOUT": "5",
            # A caller that left a silent stream is noticed by a ping that fails.
            "PROVIDER_LLAMACPP_PING_INTERVAL": "2",
            "CHAOS_IMPATIENT": "1",
        }
        environment = {**os.environ, **({} if self._patient else impatient)}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(child), *flags], stdout=log, stderr=log, env=environment
            )

    def terminate(self) -> str | None:
        """SIGTERM; what was wrong with how it went."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"the worker did not end within {STOP_LIMIT:g} s of SIGTERM"
        self.exits.append(time.monotonic() - began)
        return None if code == 0 else f"the worker ended with {code}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def descriptors(self) -> Counter[str]:
        """Open descriptors by what they are."""
        found: Counter[str] = Counter()
        for each in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{self.pid}/fd/{each}")
                found[target.partition(":")[0]] += 1
        return found

    def rss(self) -> int:
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


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
        self.violations: list[str] = []
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
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._results: Counter[str] = Counter()
        self._ports: set[int] = set()
        self._stack = contextlib.ExitStack()

    # -- life -----------------------------------------------------------------------------

    def __enter__(self) -> Run:
        with self._stack:
            self._set_up(self._stack)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._stack.close()

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        self.server: ChaosServer | RealServer = RealServer() if self.real else ChaosServer()
        self.server.start()
        stack.callback(self.server.stop)
        if self._resume and not (isinstance(self.server, RealServer) and self.server.keeps_streams):
            raise LookupError("this llama-server keeps no streams")
        self.line = stack.enter_context(NarrowProxy(self.server.url, self._cut_plan))
        self.engine = stack.enter_context(ProxiedEngine(on_frame=self._on_frame))
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
        if frame.get("type") == "invocationresult" and peer.name == WORKER:
            invocation = frame["invocation_id"]
            with self._lock:
                self._results[invocation] += 1
                if self._results[invocation] == 2:
                    self.violations.append(f"two results for one call: {frame}")

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
                self.violations.append(
                    f"stream {plan.number} ({plan.server}, {plan.caller}): {each}"
                )

    # -- faults of all --------------------------------------------------------------------

    def _befall(self, fault: Fault) -> None:
        self.counts[fault.kind] += 1
        trouble = Trouble(fault.kind, time.monotonic())
        with self._lock:
            self.troubles.append(trouble)
        try:
            getattr(self, f"_{fault.kind}")(fault)
            began = time.monotonic()
            self.wait_served()
            self.recoveries.setdefault(fault.kind, []).append(time.monotonic() - began)
        except Exception as error:
            self.violations.append(f"{fault.kind}: {type(error).__name__}: {error}")
        # Calls may still be on their way that were begun under it.
        trouble.until = time.monotonic() + 0.2

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
        for link in self._control():
            link.cut("close")

    def _bus_reset(self, fault: Fault) -> None:
        for link in self._control():
            link.cut("reset")

    def _half_open(self, fault: Fault) -> None:
        self.bus.hold()
        # Half of them longer than the worker's silence limit.
        self._stop.wait(fault.seconds + (2.5 if fault.draw > 0.5 else 0.0))
        if fault.draw * 4 % 1 > 0.5:
            self.bus.cut("reset")
        self.bus.release()

    def _engine_stops_reading(self, fault: Fault) -> None:
        self.engine.pause_reading(WORKER)
        self._pause(fault)
        self.engine.resume_reading(WORKER)

    def _channels_cut(self, fault: Fault) -> None:
        rng = random.Random(fault.draw)
        for link in list(self.bus.links):
            if link.request.startswith("GET /ws/channels/") and rng.random() < 0.5:
                link.cut("reset" if rng.random() < 0.5 else "close")

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
        self.line.cut()
        self._pause(fault)
        self.line.accept()

    def _server_silent(self, fault: Fault) -> None:
        self.line.hold()
        self._pause(fault)
        self.line.release()

    def _server_restarts(self, fault: Fault) -> None:
        self.server.restart()

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
            self.violations.append(problem)
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
                    self.violations.append(f"{what}: {seen.failure}")

    def _look(self, *, last: bool = False) -> None:
        """After the last stream nothing is left: no call, stream, descriptor, connection."""
        held: dict[str, Any] = {}
        for _ in self._tries(15.0):
            held = self._held()
            if not held["problems"]:
                break
        self.violations += [f"left after {self.done} streams: {each}" for each in held["problems"]]
        self.quiet.append(held)
        self.line.forget()
        self.bus.forget()
        self.server.ports.clear()
        if len(self.quiet) > 1:
            first = self.quiet[0]
            if held["threads"] > max(first["threads"], 24 + 16 + 64):
                self.violations.append(f"threads: {first['threads']}, then {held['threads']}")
            grown = held["rss"] - first["rss"]
            if grown > RSS_LIMIT:
                self.violations.append(f"memory grew by {grown >> 20} MiB")

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
            taken = max(moment["resumes"] for moment in self.quiet)
            lines.append(f"  taken up again by one worker process: {taken} streams")
        if self.abort_seconds:
            slowest = max(self.abort_seconds)
            lines.append(f"  aborts answered: {len(self.abort_seconds)}, slowest {slowest:.3f} s")
        for kind, times in sorted(self.recoveries.items()):
            lines.append(f"  {kind}: served again after {max(times):.2f} s at worst")
        lines += [f"  VIOLATION {each}" for each in self.violations[:40]]
        return "\n".join(lines)
