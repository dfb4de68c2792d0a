"""Engine, router and all callers of the soak, on one thread: see :mod:`.soak`."""

from __future__ import annotations

import argparse
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import count
from typing import Any

from laws import violations

from bench import sink as bare
from bench import stub, wire
from bench.pipes import watch

Json = dict[str, Any]

LOOK_SECONDS = 0.25
STREAM_GRACE = 5.0
"""Seconds a stream may take longer than its tokens do, and to end after an abort."""
MIX = {
    "abort": (0.887, 1.0),
    "count_tokens": (0.05, 5.0),
    "embed": (0.03, 5.0),
    "tokenize": (0.02, 5.0),
    "status": (0.01, 1.0),
    "refresh_models": (0.002, 5.0),
    "abort of a stream": (0.001, 1.0),
}
"""Share of the calls, and deadline in seconds: those with the longer one ask the server."""
_CUT = ("stays open", "start comes alone")
"""What the laws find missing in a stream that was aborted."""
HELLO = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "timestamp": 0}]
PAYLOADS: dict[str, Json] = {
    "count_tokens": {"model": stub.MODEL, "messages": HELLO},
    "embed": {"model": stub.MODEL, "input": ["hi"]},
    "tokenize": {"model": stub.MODEL, "content": "hi"},
}


def mixed() -> Iterator[str]:
    """The calls of :data:`MIX`, each kind spread evenly among the others."""
    credit = dict.fromkeys(MIX, 0.0)
    while True:
        for name, (share, _) in MIX.items():
            credit[name] += share
        chosen = max(credit, key=credit.__getitem__)
        credit[chosen] -= 1.0
        yield chosen


def check(data: bytes, tokens: int | None) -> tuple[int, list[str]]:
    """How many tokens the bytes of a channel hold, and what is wrong with them.

    :param tokens: how many there must be; None for a stream that was aborted
    """
    blocks = wire.Blocks()
    blocks.add(0, data)
    answer = wire.read_frames(blocks)
    found = violations([each for _, each in wire.payloads(data)], terminal=tokens is not None)
    if tokens is None:
        found = [each for each in found if not each.endswith(_CUT)]
    got = len(answer.places)
    if answer.places != list(range(got)):
        found.append("a token is lost or comes twice")
    if tokens is not None and (got != tokens or not answer.complete()):
        found.append(f"{got} of {tokens} tokens, ended by {answer.ended!r}")
    return got, found


class Stream(bare.Stream):
    """A running stream; ``number`` is its place among those that run at once."""

    def __init__(self, number: int, name: str, seconds: float) -> None:
        super().__init__(number, "engine")
        self.name = name
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self.parts_left = 2
        """Its result and the end of its channel."""
        self.aborted = False

    def add(self, block: bytes, at_ns: int) -> None:
        """When it came is of no interest here."""
        self.blocks.data += block


@dataclass(slots=True)
class Call:
    """An invocation that has no result yet."""

    name: str
    began: float
    deadline: float
    result: Json | None = None
    """What it must be answered with; None: anything but an error."""
    stream: Stream | None = None


class Engine(bare.Sink):
    """Engine, router and all callers."""

    def __init__(self, options: argparse.Namespace, checker: Executor) -> None:
        super().__init__()
        self.options = options
        self.checker = checker
        self.stream_seconds = options.tokens / options.rate
        self.ready = False
        self.going = True
        """Streams are replaced."""
        self.live: dict[int, Stream] = {}
        """By place."""
        self.calls: dict[str, Call] = {}
        self.checks: deque[tuple[str, Future[tuple[int, list[str]]]]] = deque()
        self.names = count(1)
        self.mix = mixed()
        self.counts: Counter[str] = Counter()
        self.worst: dict[str, float] = {}
        self.latencies: list[float] = []
        self.lag = 0.0
        self.violations = 0
        self.looked = 0.0
        watch(self.selector, self.listener, self._accept)

    def turn(self, seconds: float) -> None:
        """Handle what comes until something has or the time is over."""
        for key, _ in self.selector.select(max(0.0, seconds)):
            key.data()
        now = time.monotonic()
        if now >= self.looked + LOOK_SECONDS:
            self.looked = now
            self._look(now)

    def _look(self, now: float) -> None:
        """What is overdue, and what the checks have found."""
        if self.worker is not None and self.worker.sock.fileno() < 0:
            raise ConnectionError("the worker has left the bus")
        waiting: list[Call | Stream] = [*self.calls.values(), *self.live.values()]
        for each in waiting:
            if now > each.deadline:
                self.violate(f"{each.name} has not ended after {now - each.began:.1f} s")
                each.deadline = math.inf
        while self.checks and self.checks[0][1].done():
            name, future = self.checks.popleft()
            tokens, found = future.result()
            self.counts["tokens"] += tokens
            for words in found:
                self.violate(f"{name}: {words}")

    def violate(self, words: str) -> None:
        """Something is wrong."""
        self.violations += 1
        print(f"{time.strftime('%H:%M:%S')} VIOLATION {words}", flush=True)

    # -- what the worker is asked -------------------------------------------------------------

    def begin(self, place: int) -> None:
        """A stream, in place of the one that was there."""
        stream = Stream(place, f"stream {next(self.names)}", self.stream_seconds + STREAM_GRACE)
        self.streams[place : place + 1] = [stream]
        self.running.add(stream)
        self.live[place] = stream
        invocation = self._invocation(place, self.options.tokens)
        call = Call(stream.name, stream.began, math.inf, {"ok": True}, stream)
        self._invoke(call, "stream", invocation["data"])

    def call(self) -> None:
        """The next one of the mix."""
        name, now = next(self.mix), time.monotonic()
        call = Call(name, now, now + MIX[name][1])
        data = PAYLOADS.get(name, {})
        if name == "abort of a stream":
            young = [
                each
                for each in self.live.values()
                if not each.aborted and 0.1 < (now - each.began) / self.stream_seconds < 0.5
            ]
            if young:
                young[0].aborted = True
                young[0].deadline = now + STREAM_GRACE
                call.result, data = {"aborted": True}, {"request_id": f"r{young[0].number}"}
            else:
                name = call.name = "abort"
        if name == "abort":
            call.result, data = {"aborted": False}, {"request_id": f"nobody {next(self.names)}"}
        self._invoke(call, name.split(" ")[0], data)

    def _invoke(self, call: Call, function: str, data: Json) -> None:
        assert self.worker is not None
        number = str(uuid.UUID(int=next(self.names)))
        self.calls[number] = call
        name = self.function.removesuffix("stream") + function
        message = {"type": "invokefunction", "invocation_id": number, "function_id": name}
        self.worker.say({**message, "data": data})

    # -- what it answers ----------------------------------------------------------------------

    def message(self, peer: bare.Peer, message: Json) -> None:
        """Results are for the callers, the rest is for the engine."""
        if message["type"] != "invocationresult":
            super().message(peer, message)
            self.ready |= message.get("function_id") == "router::models::reconcile"
            return
        call = self.calls.pop(message["invocation_id"], None)
        if call is None:
            self.violate(f"a result that nobody waits for: {message}")
            return
        result = message.get("result")
        if message.get("error") or call.result not in (None, result):
            self.violate(f"{call.name} was answered with {message.get('error') or result}")
        if call.stream is not None:
            self._part_ended(call.stream)
            return
        now = time.monotonic()
        took = now - call.began
        self.latencies.append(took)
        self.counts[call.name] += 1
        self.worst[call.name] = max(took, self.worst.get(call.name, 0.0))
        if now > call.deadline:
            self.violate(f"{call.name} took {took:.3f} s")

    def stream_ended(self, stream: bare.Stream) -> None:
        """The channel is closed; called more than once."""
        if stream in self.running:
            self.running.remove(stream)
            assert isinstance(stream, Stream)
            self._part_ended(stream)

    def _part_ended(self, stream: Stream) -> None:
        stream.parts_left -= 1
        if stream.parts_left:
            return
        del self.live[stream.number]
        self.counts["streams"] += 1
        self.counts["streams aborted"] += stream.aborted
        data, tokens = bytes(stream.blocks.data), None if stream.aborted else self.options.tokens
        self.checks.append((stream.name, self.checker.submit(check, data, tokens)))
        if self.going:
            self.begin(stream.number)
