"""A llama-server made of prebuilt bytes, in a process of its own: never the bottleneck.

It speaks what the real one speaks (role chunk, one HTTP chunk per event, finish, usage with
timings, ``[DONE]``), and decides nothing by the request: the *plan*, set by the conductor, says how
fast tokens come. Each token's text holds the time of its sending and its place.

Commands: ``plan`` (``tokens``: number or null for "until stop", ``rate``: tokens a second and
stream or null for flat out, ``lockstep``, ``streams``: how many must have been asked for before the
first token comes), ``stop`` (end all streams), ``stats``.

The streams of a plan begin together because a driver that falls behind while they open works its
backlog off in large reads, which are cheaper: a second of that would be counted in its favour.
"""

from __future__ import annotations

import heapq
import json
import random
import secrets
import selectors
import socket
import time
from collections import deque
from typing import Any

from . import wire
from .pipes import Commands, Json, listen, tell, watch
from .stats import percentile

MODEL = "stub"
SPIN_NS = 2_000_000
"""Waits shorter than this sleep: the selector rounds up to whole milliseconds."""

HEADERS = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
    b"X-Accel-Buffering: no\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Keep-Alive: timeout=5, max=100\r\n\r\n"
)
MODELS = {
    "object": "list",
    "data": [
        {
            "id": MODEL,
            "aliases": [MODEL],
            "tags": [],
            "object": "model",
            "owned_by": "llamacpp",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "meta": {"vocab_type": 2, "n_vocab": 276, "n_ctx": 1048576, "n_ctx_train": 1048576},
        }
    ],
}
PROPS = {
    "default_generation_settings": {"n_ctx": 1048576, "params": {}},
    "total_slots": 64,
    "model_alias": MODEL,
    "model_path": f"/srv/models/{MODEL}.gguf",
    "modalities": {"vision": False, "audio": False, "video": False},
    "chat_template": "{{ messages }}",
    "chat_template_caps": {"supports_tools": True, "supports_system_role": True},
    "build_info": "b11434-stub",
    "is_sleeping": False,
}
ANSWERS: dict[str, tuple[int, Json]] = {
    "/health": (200, {"status": "ok"}),
    "/v1/models": (200, MODELS),
    "/props": (200, PROPS),
    "/v1/embeddings": (501, {"error": {"code": 501, "type": "not_supported_error"}}),
    "/apply-template": (200, {"prompt": "x"}),
}
NOT_FOUND = (
    404,
    {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}},
)


def http_chunk(body: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(body), body)


class Chunks:
    """The events of one stream, as llama-server writes them."""

    def __init__(self) -> None:
        self._id = f"chatcmpl-{secrets.token_urlsafe(24)}"
        head, tail = self._event({"content": "@"}).split(b"@")
        size = len(head) + len(tail) + len(wire.token(0, 0))
        self.before = b"%x\r\n%s" % (size, head)
        self.after = tail + b"\r\n"

    def _event(self, delta: Json, reason: str | None = None, **more: Any) -> bytes:
        choice = {"finish_reason": reason, "index": 0, "delta": delta}
        chunk = {
            "choices": [] if more else [choice],
            "created": 1796035508,
            "id": self._id,
            "model": MODEL,
            "system_fingerprint": "b11434-stub",
            "object": "chat.completion.chunk",
            **more,
        }
        return b"data: %s\n\n" % json.dumps(chunk, separators=(",", ":")).encode()

    def opening(self) -> bytes:
        """Status line, headers and the role."""
        return HEADERS + http_chunk(self._event({"role": "assistant", "content": None}))

    def token(self, sent_ns: int, place: int) -> bytes:
        """One token."""
        return self.before + wire.token(sent_ns, place) + self.after

    def closing(self, tokens: int) -> bytes:
        """Finish, usage, ``[DONE]`` and the end of the body."""
        usage = {
            "completion_tokens": tokens,
            "prompt_tokens": 21,
            "total_tokens": tokens + 21,
            "prompt_tokens_details": {"cached_tokens": 20},
        }
        timings = {"cache_n": 20, "prompt_n": 1, "prompt_ms": 0.775, "predicted_n": tokens}
        return (
            http_chunk(self._event({}, "stop"))
            + http_chunk(self._event({}, usage=usage, timings=timings))
            + http_chunk(b"data: [DONE]\n\n")
            + b"0\r\n\r\n"
        )


class Connection:
    """One client: its requests one after another, and what it has not yet taken."""

    def __init__(self, stub: Stub, sock: socket.socket) -> None:
        self.stub = stub
        self.sock = sock
        self.inbox = b""
        self.outbox: deque[memoryview] = deque()
        self.chunks: Chunks | None = None
        self.sent = 0
        self.closing = False

    def ready(self) -> None:
        """Readable, or writable while something waits to be written."""
        if self.outbox:
            self._flush()
        try:
            block = self.sock.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            block = b""
        if not block:
            self.stub.drop(self)
            return
        self.inbox += block
        while (end := self.inbox.find(b"\r\n\r\n")) >= 0:
            head = self.inbox[:end].decode("latin-1")
            lines = head.lower().split("\r\n")
            lengths = [int(line[15:]) for line in lines if line.startswith("content-length:")]
            size = end + 4 + (lengths[0] if lengths else 0)
            if len(self.inbox) < size:
                return
            self.closing = "connection: close" in lines
            self.inbox = self.inbox[size:]
            self._answer(head.split(" ", 2)[1].split("?")[0])

    def _answer(self, path: str) -> None:
        if path == "/v1/chat/completions":
            self.stub.begin(self)
            return
        status, payload = ANSWERS.get(path, NOT_FOUND)
        body = json.dumps(payload).encode()
        self.write(
            b"HTTP/1.1 %d X\r\nServer: llama.cpp\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (status, len(body), body)
        )

    def write(self, data: bytes) -> None:
        """Send what the socket takes now, and the rest when it takes more."""
        if self.outbox:
            self.outbox.append(memoryview(data))
            return
        try:
            sent = self.sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.stub.drop(self)
            return
        if sent < len(data):
            self.outbox.append(memoryview(data)[sent:])
            self.stub.want_write(self, True)

    def _flush(self) -> None:
        while self.outbox:
            data = self.outbox[0]
            try:
                sent = self.sock.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self.stub.drop(self)
                return
            if sent < len(data):
                self.outbox[0] = data[sent:]
                return
            self.outbox.popleft()
        self.stub.want_write(self, False)
        self._end_if_asked()

    def finish(self) -> None:
        """The regular end of the stream."""
        assert self.chunks is not None
        self.write(self.chunks.closing(self.sent))
        self.chunks = None
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        if self.closing and self.chunks is None and not self.outbox:
            self.stub.drop(self)


class Stub:
    """The server: one thread, one selector, one heap of due tokens."""

    def __init__(self) -> None:
        self.listener = listen()
        self.port = self.listener.getsockname()[1]
        self.selector = selectors.DefaultSelector()
        self.commands = Commands()
        self.tokens: int | None = 1
        self.period_ns: int | None = None
        self.lockstep = False
        self.flat: tuple[Chunks, bytes] | None = None
        self.due: list[tuple[int, int, Connection]] = []
        self.streams = 1
        self.held: list[Connection] = []
        self.count = 0
        self.late: list[int] = []

    def serve(self) -> None:
        """Until the conductor goes."""
        watch(self.selector, 0, self._command)
        watch(self.selector, self.listener, self._accept)
        tell("port", port=self.port)
        while True:
            wait = self.due[0][0] - time.monotonic_ns() if self.due else None
            if wait is None or wait > SPIN_NS:
                timeout = None if wait is None else (wait - SPIN_NS // 2) / 1e9
                events = self.selector.select(timeout)
            else:
                if wait > 0:
                    time.sleep(wait / 1e9)
                self._send_due()
                events = self.selector.select(0)
            for key, _ in events:
                key.data()

    def _send_due(self) -> None:
        due, now, late = self.due, time.monotonic_ns(), self.late
        while due and due[0][0] <= now:
            at, number, connection = due[0]
            chunks = connection.chunks
            if chunks is None:
                heapq.heappop(due)
                continue
            sent = time.monotonic_ns()
            connection.write(chunks.token(sent, connection.sent))
            connection.sent += 1
            late.append(sent - at)
            if connection.sent == self.tokens:
                heapq.heappop(due)
                connection.finish()
            else:
                heapq.heapreplace(due, (at + (self.period_ns or 0), number, connection))

    def begin(self, connection: Connection) -> None:
        """A chat request is whole: answer by the plan."""
        if self.period_ns is None:
            chunks, body = self._flat_body()
            connection.sent, connection.chunks = self.tokens or 0, chunks
            connection.write(body)
            connection.finish()
            return
        connection.chunks, connection.sent = Chunks(), 0
        connection.write(connection.chunks.opening())
        self.held.append(connection)
        if len(self.held) < self.streams:
            return
        now = time.monotonic_ns()
        for each in self.held:
            self.count += 1
            wait = self.period_ns if self.lockstep else random.randrange(1, self.period_ns)
            heapq.heappush(self.due, (now + wait, self.count, each))
        self.held = []
        tell("begun")

    def _flat_body(self) -> tuple[Chunks, bytes]:
        if self.flat is None or self.tokens == 1:
            # One token is for measuring when it comes: its stamp must be true.
            chunks, now = Chunks(), time.monotonic_ns()
            tokens = (chunks.token(now, place) for place in range(self.tokens or 0))
            self.flat = chunks, chunks.opening() + b"".join(tokens)
        return self.flat

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(self, sock)
        watch(self.selector, sock, connection.ready)

    def want_write(self, connection: Connection, wanted: bool) -> None:
        """Watch for room in the socket's buffer, or no longer."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        self.selector.modify(connection.sock, events, connection.ready)

    def drop(self, connection: Connection) -> None:
        """Forget a client; idempotent."""
        connection.chunks = None
        connection.outbox.clear()
        if connection.sock.fileno() >= 0:
            self.selector.unregister(connection.sock)
            connection.sock.close()

    def _command(self) -> None:
        for command in self.commands.read():
            if command["do"] == "plan":
                rate = command["rate"]
                self.tokens, self.lockstep = command["tokens"], command["lockstep"]
                self.streams, self.held = command["streams"], []
                self.period_ns = None if rate is None else int(1e9 / rate)
                self.flat, self.late = None, []
                if rate is None:
                    self._flat_body()
                tell("planned")
            elif command["do"] == "stop":
                for _, _, connection in self.due:
                    if connection.chunks is not None:
                        connection.finish()
                self.due = []
            elif command["do"] == "stats":
                late = sorted(self.late)
                tell(
                    "stats",
                    sent=len(self.late),
                    late_p99_ms=percentile(late, 99) / 1e6,
                )


if __name__ == "__main__":
    Stub().serve()
