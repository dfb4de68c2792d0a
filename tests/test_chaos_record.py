"""What a chaos run finds is on disk at once, and is judged by what was really at fault."""

from __future__ import annotations

import json
import socket
import time
from queue import Queue

import pytest
from chaos.lines import NarrowProxy
from chaos.record import Record
from chaos.schedule import StreamPlan
from chaos.streams import Seen, Trouble, judge
from listening import PATIENCE, Listener

from provider_llamacpp.errors import BusError

PLAN = StreamPlan(7, "none", "reads", "text", 1, 0, 0.0, 0, 0.0)


def test_a_violation_is_on_disk_with_what_is_needed_to_judge_it(tmp_path):
    record = Record(tmp_path / "worker.log", "seed 3")
    frame = json.dumps({"type": "start"})
    seen = Seen(PLAN, started=1.0, ended=2.0, frames=[frame, frame], tries=2)
    troubles = [Trouble("bus_cut", 0.0, 1.5), Trouble("half_open", 0.0, 0.5), Trouble("x", 1.0)]
    record.violation("stream 7: it broke", *record.of_stream(seen, troubles))
    text = (tmp_path / "worker.report.txt").read_text()
    assert record.violations == ["stream 7: it broke"]
    assert text.startswith("seed 3, the worker's log is ")
    for words in ("VIOLATION stream 7: it broke", "start*2", "try 2", "meanwhile bus_cut"):
        assert words in text
    assert "meanwhile x" in text and "half_open" not in text
    record.violation("another one")
    assert "another one" in (tmp_path / "worker.report.txt").read_text()


def test_a_line_knows_how_long_nothing_went_through():
    """What the worker takes for silence was silence, if it has left for a good reason."""
    taken: Queue[tuple[socket.socket, int]] = Queue()
    listener = Listener(lambda *taking: taken.put(taking))
    listener.open()
    try:
        with NarrowProxy(f"http://127.0.0.1:{listener.port}") as proxy:
            client = socket.create_connection(("127.0.0.1", proxy.port))
            server, port = taken.get(timeout=PATIENCE)
            with client, server:
                server.sendall(b"a")
                assert client.recv(1) == b"a"
                proxy.hold()
                began = time.monotonic()
                server.sendall(b"b")
                client.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                seconds = time.monotonic() - began
                proxy.release()
                client.settimeout(PATIENCE)
                assert client.recv(1) == b"b"
                server.sendall(b"c")
                assert client.recv(1) == b"c"
                silent, since = proxy.by_port[port].silence()
                assert silent >= seconds and since <= began
    finally:
        listener.close()


@pytest.mark.parametrize("when, broken", [(0.5, False), (3.0, True)])
def test_a_call_that_fails_with_its_bus_is_no_broken_law(when, broken):
    seen = Seen(PLAN, started=1.0, ended=2.0, closed=True)
    seen.failure = BusError("invocation_stopped", "the worker disconnected")
    found = judge(seen, [Trouble("bus_silent", when)], maybe_cut=False)
    assert bool(found) == broken
