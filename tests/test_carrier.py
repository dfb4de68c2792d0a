"""One thread carries the tokens of many streams, and every stream gets its thread back in time."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from provider_llamacpp import carrier as module
from provider_llamacpp.carrier import Carrier

PATIENCE = 30.0

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="nothing is carried here")


class Stream:
    """Reads letters from a socket: its own thread is to have "."."""

    def __init__(self, patience: float | None = None) -> None:
        self.patience = patience
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.seen = b""
        self.carriers: list[str] = []
        self.expired = False
        self.arrived = threading.Condition()

    def fileno(self) -> int:
        return self.near.fileno()

    def step(self) -> bool:
        with self.arrived:
            self.seen += self.near.recv(1)
            self.carriers.append(threading.current_thread().name)
            self.arrived.notify_all()
        return not self.seen.endswith(b".")

    def expire(self) -> None:
        self.expired = True

    def wait(self, text: bytes) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.seen == text, PATIENCE), self.seen


class Crew:
    """Threads that have their streams carried."""

    def __init__(self) -> None:
        self.carrier = Carrier()
        self.threads: dict[str, threading.Thread] = {}
        self.streams: dict[str, Stream] = {}

    def add(self, name: str, patience: float | None = None) -> Stream:
        stream = self.streams[name] = Stream(patience)
        thread = threading.Thread(target=self._flow, args=(stream,), name=name)
        self.threads[name] = thread
        thread.start()
        return stream

    def _flow(self, stream: Stream) -> None:
        with self.carrier.flowing():
            self.carrier.carry(stream)

    def joined(self, count: int) -> None:
        """Wait until so many are carried."""
        for _ in range(3000):
            if len(self.carrier._members) == count:
                return
            threading.Event().wait(0.01)
        raise AssertionError(f"{len(self.carrier._members)} are carried")

    def returns(self, name: str) -> None:
        self.threads[name].join(PATIENCE)
        assert not self.threads[name].is_alive(), name


@contextmanager
def crew_of(*names: str, patience: float | None = None) -> Iterator[tuple[Crew, list[Stream]]]:
    crew = Crew()
    with ExitStack() as stack:
        stack.enter_context(crew.carrier.flowing())
        streams = []
        for number, name in enumerate(names):
            streams.append(crew.add(name, patience))
            crew.joined(number + 1)
        try:
            yield crew, streams
        finally:
            for name, stream in crew.streams.items():
                if crew.threads[name].is_alive():
                    stream.far.send(b".")
            for name, stream in crew.streams.items():
                crew.returns(name)
                stream.near.close()
                stream.far.close()
            assert crew.carrier._members == {}
            assert crew.carrier._poll is None


def test_the_first_carries_for_all() -> None:
    with crew_of("a", "b", "c") as (_, streams):
        for stream in streams:
            stream.far.send(b"xyz")
        for stream in streams:
            stream.wait(b"xyz")
            assert stream.carriers == ["a"] * 3


def test_one_that_is_done_gets_its_thread_back_and_the_others_go_on() -> None:
    with crew_of("a", "b", "c") as (crew, (a, b, c)):
        b.far.send(b"x.")
        crew.returns("b")
        a.far.send(b"1")
        c.far.send(b"2")
        c.wait(b"2")
        assert c.carriers == ["a"]


def test_the_carrier_that_is_done_passes_the_work_on() -> None:
    with crew_of("a", "b", "c") as (crew, (a, b, c)):
        a.far.send(b".")
        crew.returns("a")
        for stream in (b, c):
            stream.far.send(b"x")
            stream.wait(b"x")
        assert b.carriers == c.carriers
        assert b.carriers[0] in ("b", "c")


def test_all_end_at_once() -> None:
    with crew_of("a", "b", "c", "d") as (crew, streams):
        for stream in streams:
            stream.far.send(b".")
        for name in ("a", "b", "c", "d"):
            crew.returns(name)


def test_newcomers_are_found_by_a_carrier_that_waits() -> None:
    with crew_of("a") as (crew, _):
        late = crew.add("late")
        crew.joined(2)
        late.far.send(b"x")
        late.wait(b"x")
        assert late.carriers == ["a"]


def test_what_came_before_is_found() -> None:
    with crew_of("a") as (crew, _):
        early = Stream()
        early.far.send(b"x.")
        with crew.carrier.flowing():
            crew.carrier.carry(early)
        assert early.seen == b"x."
        early.near.close()
        early.far.close()


def test_the_last_one_goes_by_itself() -> None:
    crew = Crew()
    with crew.carrier.flowing():
        stream = crew.add("only")
        crew.joined(1)
        assert crew.carrier.crowded
    assert not crew.carrier.crowded
    # The other one flows no more: after its next step the stream is on its own.
    stream.far.send(b"x")
    crew.returns("only")
    assert stream.seen == b"x"
    assert crew.carrier._poll is None
    stream.near.close()
    stream.far.close()


@pytest.mark.parametrize("silent", ["a", "b"])
def test_silence_ends_for_whom_it_lasts_too_long(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK", 0.02)
    crew = Crew()
    with crew.carrier.flowing():
        streams = {}
        for name in ("a", "b"):
            streams[name] = crew.add(name, 0.05 if name == silent else None)
        crew.returns(silent)
        other = "b" if silent == "a" else "a"
        assert streams[silent].expired
        assert not streams[other].expired
        streams[other].far.send(b".")
        crew.returns(other)
    for stream in streams.values():
        stream.near.close()
        stream.far.close()


def test_crowded_counts_those_that_flow() -> None:
    carrier = Carrier()
    with carrier.flowing():
        assert not carrier.crowded
        with carrier.flowing():
            assert carrier.crowded
        assert not carrier.crowded


def test_nothing_is_carried_where_there_is_no_epoll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module.select, "epoll")
    carrier = Carrier()
    with carrier.flowing(), carrier.flowing():
        assert not carrier.crowded


def test_many_come_and_go() -> None:
    """Whatever the order, each sees all of its own, in order, and comes back."""
    carrier = Carrier()
    letters = b"abcdefgh" * 4 + b"."
    seen: list[bytes] = []

    def flow(number: int) -> None:
        for _ in range(5):
            stream = Stream()
            feeder = threading.Thread(target=drip, args=(stream,))
            with carrier.flowing():
                feeder.start()
                while not stream.seen.endswith(b"."):
                    # As a stream does: what is not carried it reads itself.
                    if carrier.crowded:
                        carrier.carry(stream)
                    else:
                        select.select([stream.near], [], [], PATIENCE)
                        stream.step()
            feeder.join()
            seen.append(stream.seen)
            stream.near.close()
            stream.far.close()

    def drip(stream: Stream) -> None:
        for letter in letters:
            stream.far.send(bytes([letter]))

    together(flow, 12)
    assert seen == [letters] * 60
    assert carrier._members == {} and carrier._poll is None and not carrier.crowded


def together(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
