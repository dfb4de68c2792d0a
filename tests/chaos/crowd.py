"""A thousand streams offered at once to a worker of 64: ``python -m tests.chaos.crowd``.

How long the others wait for their ``rate_limited`` frame and for the result of their call, from the
invocation on; and who spent the time. The worker is a process of its own, started by its command
line. ``bare`` has an engine that does nothing but accept channels and note times, with the caller
in it, so that what is measured is the worker; ``embedded`` has the embedded engine and router in a
second process and the caller in a third, as whoever tries it out has them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' own helpers are no package

from laws import check_frames
from peers import ScriptedServer, answer_json, wait_for
from world import FINISH, WORD

from bench import sink as bare
from bench.pipes import watch
from provider_llamacpp.local.client import BusClient
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.router import LoopbackRouter

LIMIT = 64
PATIENCE = 120.0
TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float:
    """What a process has used, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def hanging_server(go: threading.Event) -> Iterator[ScriptedServer]:
    """Sends one word of each stream, and the rest when ``go`` is set."""
    head = {"headers": {"headers": {"content-type": "text/event-stream"}}}
    hold = lambda exchange: exchange.watch(PATIENCE, go)  # noqa: E731
    answer = {"script": [head, {"send": WORD}, hold, {"send": FINISH}]}
    listing = answer_json({"object": "list", "data": [{"id": "stub", "object": "model"}]})
    with ScriptedServer(routes={"/v1/models": listing, "/v1/chat/completions": answer}) as server:
        yield server


@contextmanager
def worker(engine: str, server: str) -> Iterator[int]:
    """The worker's process; its id."""
    flags = ["--url", engine, "--api-url", server, "--max-streams", str(LIMIT), "--drain", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "provider_llamacpp", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


class BareEngine(bare.Sink):
    """Engine, router and all callers on one thread, which does as little as it can."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, int] = {}
        """By invocation: the number of its stream."""
        self.answered: dict[int, int] = {}
        """By stream: when its result came, in ns."""
        self.ready = threading.Event()
        self.over = threading.Event()
        watch(self.selector, self.listener, self._accept)

    def run(self) -> None:
        while not self.over.is_set():
            for key, _ in self.selector.select(0.1):
                key.data()

    def message(self, peer: bare.Peer, message: dict[str, Any]) -> None:
        if message["type"] == "invocationresult":
            self.answered[self.asked[message["invocation_id"]]] = time.monotonic_ns()
        super().message(peer, message)
        if message.get("function_id") == "router::models::reconcile":
            self.ready.set()

    def offer(self, count: int) -> None:
        """Invoke so many streams, as fast as the socket takes them."""
        assert self.worker is not None
        self.worker.sock.setblocking(True)
        for number in range(count):
            stream = bare.Stream(number, "engine")
            self.streams.append(stream)
            invocation = self._invocation(number, 9)
            self.asked[invocation["invocation_id"]] = number
            stream.opened_ns = time.monotonic_ns()
            self.worker.say(invocation)


class Times:
    """Of those who were refused, in seconds."""

    def __init__(self) -> None:
        self.frames: list[float] = []
        self.results: list[float] = []
        self.whole = 0.0
        self.shares: dict[str, float] = {}

    def show(self, way: str, refused: int) -> None:
        print(f"{way}: {refused} refused in {self.whole:.2f} s")
        for what, found in (("frame", self.frames), ("result", self.results)):
            if found:
                print(
                    f"  invocation to {what}: median {statistics.median(found):.3f} s, "
                    f"worst {max(found):.3f} s"
                )
        for who, seconds in self.shares.items():
            print(f"  processor of {who}: {seconds:.2f} s, {seconds / refused * 1e3:.2f} ms each")


def run_bare(offered: int) -> Times:
    bare.tell = lambda *_, **__: None
    refused, times, go = offered - LIMIT, Times(), threading.Event()
    engine = BareEngine()
    looping = threading.Thread(target=engine.run)
    with ExitStack() as stack:
        server = stack.enter_context(hanging_server(go))
        stack.callback(looping.join)
        stack.callback(engine.over.set)
        looping.start()
        pid = stack.enter_context(worker(f"ws://127.0.0.1:{engine.port}", server.url))
        stack.callback(go.set)
        assert engine.ready.wait(PATIENCE)
        before = processor_seconds(pid), time.process_time()
        began = time.monotonic()
        engine.offer(offered)
        wait_for(lambda: len(engine.answered) == refused, "all refusals", timeout=PATIENCE)
        times.whole = time.monotonic() - began
        times.shares = {
            "the worker": processor_seconds(pid) - before[0],
            "engine and callers": time.process_time() - before[1],
        }
        for number, at in engine.answered.items():
            stream = engine.streams[number]
            frames = list(_texts(bytes(stream.blocks.data)))
            check_frames(frames)
            assert json.loads(frames[0])["error"]["error_kind"] == "rate_limited"
            times.frames.append((stream.blocks.times[0] - stream.opened_ns) / 1e9)
            times.results.append((at - stream.opened_ns) / 1e9)
    return times


def _texts(data: bytes) -> Iterator[bytes]:
    position = 0
    while frame := bare.wire.next_frame(data, position):
        if frame.opcode == bare.wire.TEXT_OPCODE:
            yield frame.payload(data)
        position = frame.end


def _embedded(pipe: Connection, server: str) -> None:
    with LoopbackEngine() as engine:
        router = LoopbackRouter(engine.url, environ={})
        router.set_config("llamacpp", api_url=server)
        with router:
            pipe.send(engine.url)
            assert router.wait_for_models("llamacpp")
            pipe.send("ready")
            pipe.recv()


def run_embedded(offered: int) -> Times:
    refused, times, go = offered - LIMIT, Times(), threading.Event()
    here, there = multiprocessing.Pipe()
    with ExitStack() as stack:
        server = stack.enter_context(hanging_server(go))
        engine = multiprocessing.get_context("spawn").Process(
            target=_embedded, args=[there, server.url]
        )
        engine.start()
        stack.callback(engine.join)
        stack.callback(here.send, "over")
        url = here.recv()
        pid = stack.enter_context(worker(url, server.url))
        stack.callback(go.set)
        assert here.recv() == "ready"
        caller = BusClient(url, "crowd")
        caller.start()
        stack.callback(caller.stop)
        wait_for(lambda: caller.connected, "the caller")
        made = [caller.invoke("engine::channels::create", {}) for _ in range(offered)]
        assert engine.pid is not None
        before = processor_seconds(pid), processor_seconds(engine.pid), time.process_time()
        message = {"role": "user", "content": [{"type": "text", "text": "x"}], "timestamp": 1}
        futures = []
        began = time.monotonic()
        for each in made:
            payload = {"writer_ref": each["writer"], "model": "stub", "messages": [message]}
            at = time.monotonic()
            future = caller.begin("provider::llamacpp::stream", payload)
            future.add_done_callback(
                lambda _, at=at: times.results.append(time.monotonic() - at)  # type: ignore[misc]
            )
            futures.append(future)
        wait_for(lambda: len(times.results) == refused, "all refusals", timeout=PATIENCE)
        times.whole = time.monotonic() - began
        times.shares = {
            "the worker": processor_seconds(pid) - before[0],
            "the embedded engine and router": processor_seconds(engine.pid) - before[1],
            "the callers": time.process_time() - before[2],
        }
    return times


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.chaos.crowd", description=__doc__)
    top.add_argument("--streams", type=int, default=1000)
    top.add_argument("--way", choices=["bare", "embedded", "both"], default="both")
    options = top.parse_args()
    for way, run in (("bare", run_bare), ("embedded", run_embedded)):
        if options.way in (way, "both"):
            run(options.streams).show(way, options.streams - LIMIT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
