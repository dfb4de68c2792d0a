"""Stands for the engine and for the reader of every channel, in a process of its own.

It accepts the control socket of a worker and answers what a worker asks while it starts; it
invokes ``provider::<id>::stream`` and takes the channel's frames. It keeps what it receives as it
came, with the time, and looks into it only when the conductor asks for the report: so it costs
little while something is measured. The time is the kernel's, where that tells it: with 64 streams
the sink's own turn to read comes a millisecond later, which is no latency of who sent.

Drivers that are no workers connect with the line ``PLAIN`` and are told the number of each stream
to begin; they write frames to a channel, or bytes to a connection that begins with
``BYTES <number>``. Of a proxy the sink is the client.

Commands: ``open`` (``streams``, ``how``: ``engine``, ``channel``, ``bytes`` or ``http``, ``port``,
``key``, ``tokens``), ``report`` (``since``, ``until``, ``by``).
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import statistics
import struct
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from . import wire
from .pipes import Commands, Json, listen, tell, watch
from .stats import percentile

RECV = 65536
TIMESPEC = struct.Struct("@ll")
SPACE = socket.CMSG_SPACE(TIMESPEC.size)
STAMPED = 35 if sys.platform == "linux" else None
"""``SO_TIMESTAMPNS``, which Python has no name for: each read tells when its last bytes came."""
KEY = re.compile(r"(?i)\r\nsec-websocket-key: *(\S+)")


def receive(sock: socket.socket) -> tuple[bytes, int]:
    """What has arrived, and when, in nanoseconds of the monotonic clock."""
    block, more, _, _ = sock.recvmsg(RECV, SPACE)
    now = time.monotonic_ns()
    for _, kind, data in more:
        if kind == STAMPED:
            seconds, nanoseconds = TIMESPEC.unpack(data)
            now -= time.time_ns() - (seconds * 10**9 + nanoseconds)
    return block, now


class Stream:
    """One stream: where its bytes are kept."""

    def __init__(self, number: int, how: str) -> None:
        self.number = number
        self.framed = how in ("engine", "channel")
        self.opened_ns = time.monotonic_ns()
        self.blocks = wire.Blocks()

    def answer(self) -> wire.Answer:
        """What it came to."""
        return (wire.read_frames if self.framed else wire.read_chunks)(self.blocks)

    def add(self, block: bytes, at_ns: int) -> None:
        """The hot path."""
        self.blocks.add(at_ns, block)


class Peer:
    """A connection that came in: what it is shows in its first bytes."""

    def __init__(self, sink: Sink, sock: socket.socket) -> None:
        self.sink = sink
        self.sock = sock
        self.inbox = b""
        self.handle: Callable[[bytes], None] = self._first
        self.at_ns = 0
        """When what is handled now had come."""
        self.stream: Stream | None = None
        self.walker = wire.Walker()

    def ready(self) -> None:
        """Something can be read."""
        try:
            block, self.at_ns = receive(self.sock)
        except OSError:
            block = b""
        if block:
            self.handle(block)
        else:
            self.close()

    def close(self) -> None:
        """Forget the connection; idempotent."""
        if self.sock.fileno() >= 0:
            self.sink.selector.unregister(self.sock)
            self.sock.close()
        if self.stream is not None:
            self.sink.stream_ended(self.stream)

    def _first(self, block: bytes) -> None:
        self.inbox += block
        if self.inbox.startswith(b"GET "):
            if b"\r\n\r\n" in self.inbox:
                head, _, self.inbox = self.inbox.partition(b"\r\n\r\n")
                self._upgrade(head.decode("latin-1"))
        elif b"\n" in self.inbox:
            line, _, rest = self.inbox.partition(b"\n")
            word, _, number = line.partition(b" ")
            if word == b"BYTES":
                self._take(int(number), self._bytes, rest)
            else:
                self.handle = lambda block: None
                self.sink.plain = self
                tell("plain")

    def _take(self, number: int, handle: Callable[[bytes], None], rest: bytes) -> None:
        self.stream, self.handle = self.sink.streams[number], handle
        if rest:
            handle(rest)

    # -- bytes ----------------------------------------------------------------------------

    def _bytes(self, block: bytes) -> None:
        assert self.stream is not None
        self.stream.add(block, self.at_ns)

    def http(self, block: bytes) -> None:
        """An answer of a proxy we asked."""
        assert self.stream is not None
        self.stream.add(block, self.at_ns)
        if b"[DONE]" in self.stream.blocks.data[-64:]:
            self.close()

    # -- WebSocket ------------------------------------------------------------------------

    def _upgrade(self, head: str) -> None:
        path = head.split(" ", 2)[1]
        key = KEY.search(head)
        assert key is not None
        self.sock.sendall(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %s\r\n\r\n" % wire.accept_key(key[1]).encode()
        )
        rest, self.inbox = self.inbox, b""
        if path.startswith("/ws/channels/"):
            number = int(path.split("/")[3].split("?")[0])
            self._take(number, self._channel, rest)
            return
        self.handle = self._control
        hello = {"type": "workerregistered", "worker_id": str(uuid.uuid4())}
        self.say({**hello, "reattach_token": str(uuid.uuid4())})
        if rest:
            self._control(rest)

    def _channel(self, block: bytes) -> None:
        assert self.stream is not None
        self.stream.add(block, self.at_ns)
        if self.walker.feed(block):
            try:
                self.sock.sendall(wire.CLOSE)
            except OSError:
                pass
            self.close()

    def _control(self, block: bytes) -> None:
        self.inbox += block
        position = 0
        while frame := wire.next_frame(self.inbox, position):
            if frame.end > len(self.inbox):
                break
            payload, position = frame.payload(self.inbox), frame.end
            if frame.opcode == wire.TEXT_OPCODE:
                self.sink.message(self, json.loads(payload))
            elif frame.opcode == wire.PING_OPCODE:
                self.sock.sendall(wire.server_frame(payload, 10))
            elif frame.opcode == wire.CLOSE_OPCODE:
                self.sock.sendall(wire.CLOSE)
                self.close()
                return
        self.inbox = self.inbox[position:]

    def say(self, message: Json) -> None:
        """One message to the worker."""
        self.sock.sendall(wire.server_frame(json.dumps(message).encode()))


class Sink:
    """The process: one thread, one selector."""

    def __init__(self) -> None:
        self.listener = listen()
        self.port = self.listener.getsockname()[1]
        self.selector = selectors.DefaultSelector()
        self.commands = Commands()
        self.worker: Peer | None = None
        self.function = ""
        self.plain: Peer | None = None
        self.streams: list[Stream] = []
        self.running: set[Stream] = set()

    def serve(self) -> None:
        """Until the conductor goes."""
        watch(self.selector, 0, self._command)
        watch(self.selector, self.listener, self._accept)
        tell("port", port=self.port)
        while True:
            for key, _ in self.selector.select():
                key.data()

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        self._add(Peer(self, sock))

    def _add(self, peer: Peer) -> Peer:
        peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if STAMPED is not None:
            peer.sock.setsockopt(socket.SOL_SOCKET, STAMPED, 1)
        watch(self.selector, peer.sock, peer.ready)
        return peer

    # -- the engine (engine protocol 2) and the router behind it (provider protocol 2 to 4) ------

    def message(self, peer: Peer, message: Json) -> None:
        """A message of a worker."""
        kind = message["type"]
        if kind == "registerfunction" and message["id"].endswith("::stream"):
            self.worker, self.function = peer, message["id"]
            tell("function", at=time.monotonic_ns())
        elif kind == "ping":
            peer.say({"type": "pong"})
        elif kind == "invokefunction":
            name, data = message["function_id"], message["data"]
            number = message.get("invocation_id")
            if number is not None:
                answer = {"type": "invocationresult", "invocation_id": number, "function_id": name}
                peer.say({**answer, **self._called(name, data)})
            if name == "router::provider::register":
                tell("registered", at=time.monotonic_ns())
            elif name == "router::models::reconcile":
                tell("reconciled", at=time.monotonic_ns())

    def _called(self, name: str, data: Any) -> Json:
        if name == "state::get":
            return {}
        if name == "state::set":
            return {"result": {"old_value": None, "new_value": data["value"]}}
        if name == "router::provider::register":
            return {"result": {"ok": True, "id": data["id"], "registration_token": "t"}}
        if name == "router::provider::resolve":
            return {"result": {"configured": False, "source": "none"}}
        if name == "router::models::reconcile":
            count = len(data["models"])
            return {"result": {"provider": data["provider"], "count": count}}
        if name == "engine::workers::register":
            return {"result": {"success": True}}
        return {"error": {"code": "function_not_found", "message": name}}

    # -- streams ------------------------------------------------------------------------------

    def stream_ended(self, stream: Stream) -> None:
        """One more is over; idempotent."""
        if stream in self.running:
            self.running.remove(stream)
            if not self.running:
                tell("ended")

    def _open(self, streams: int, how: str, port: int, key: str, tokens: int) -> None:
        first = len(self.streams)
        opened = [Stream(number, how) for number in range(first, first + streams)]
        self.streams += opened
        self.running.update(opened)
        for stream in opened:
            stream.opened_ns = time.monotonic_ns()
            if how == "http":
                self._ask(port, key, stream)
            elif how == "engine":
                assert self.worker is not None
                self.worker.say(self._invocation(stream.number, tokens))
            else:
                assert self.plain is not None
                self.plain.sock.sendall(b"%d\n" % stream.number)

    def _invocation(self, number: int, tokens: int) -> Json:
        user = {"role": "user", "content": [{"type": "text", "text": "Go on"}], "timestamp": 0}
        return {
            "type": "invokefunction",
            "invocation_id": str(uuid.uuid4()),
            "function_id": self.function,
            "data": {
                "writer_ref": {
                    "channel_id": str(number),
                    "access_key": "k",
                    "direction": "write",
                },
                "model": "stub",
                "messages": [user],
                "max_output_tokens": tokens,
                "resolution_key": f"r{number}",
                "_caller_worker_id": "sink",
            },
        }

    def _ask(self, port: int, key: str, stream: Stream) -> None:
        peer = self._add(Peer(self, socket.create_connection(("127.0.0.1", port))))
        peer.stream, peer.handle = stream, peer.http
        messages = [{"role": "user", "content": "Go on"}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"model": "stub", "messages": messages, **options}).encode()
        peer.sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (key.encode(), len(body), body)
        )

    # -- the report -----------------------------------------------------------------------------

    def report(self, since: int, until: int, by: str) -> Json:
        """What all streams so far came to.

        :param by: ``sent`` counts tokens by their stamps, for drivers that hand them over late
        """
        answers = [stream.answer() for stream in self.streams]
        seconds = self._seconds(answers)
        firsts = [
            answer.received_ns[0] - stream.opened_ns
            for stream, answer in zip(self.streams, answers, strict=True)
            if answer.received_ns
        ]
        if by == "sent":
            for answer in answers:
                answer.received_ns = [
                    at - wire.age_us(at, stamp) * 1000
                    for at, stamp in zip(answer.received_ns, answer.stamps, strict=True)
                ]
        late = sorted(wire.arrivals(answers, since, until))
        every = sorted(wire.arrivals(answers, 0, until))
        return {
            "tokens": sum(len(answer.places) for answer in answers),
            "frames": sum(answer.frames for answer in answers),
            "in_window": len(late),
            "complete": all(answer.complete() for answer in answers),
            "unfinished": sum(not answer.ended for answer in answers),
            "snapshots": max((answer.snapshots for answer in answers), default=0),
            "seconds": seconds,
            "p50_ms": percentile(late, 50) / 1e3,
            "p99_ms": percentile(late, 99) / 1e3,
            "p99_all_ms": percentile(every, 99) / 1e3,
            "first_ms": statistics.median(firsts) / 1e6 if firsts else None,
        }

    def _seconds(self, answers: list[wire.Answer]) -> float:
        """From the first token to the last one; from the first bytes on without stamps."""
        stamped = [answer.received_ns for answer in answers if answer.received_ns]
        times = stamped or [stream.blocks.times for stream in self.streams if stream.blocks.times]
        return (max(t[-1] for t in times) - min(t[0] for t in times)) / 1e9 if times else 0.0

    def _command(self) -> None:
        for command in self.commands.read():
            do = command.pop("do")
            if do == "open":
                self._open(**command)
            elif do == "report":
                tell("report", **self.report(**command))


if __name__ == "__main__":
    if hasattr(os, "SCHED_BATCH"):
        # It does not take the processor from who is measured; when something came, the kernel says.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    Sink().serve()
