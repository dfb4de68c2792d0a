"""A tiny, fast llama-server that answers each stream as its prompt asks, faults included."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import requests
from listening import Listener
from scripted_llama import PROPS, row

from provider_llamacpp.local.llama import LlamaOptions, LlamaServer
from provider_llamacpp.local.model import write_model

from .schedule import expected

MODEL = "demo"
HANG = 60.0
"""Seconds after which a stream that nobody ended is a fault of the run."""
_LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
_ERRORS = {
    "http_503": (503, "Loading model", "unavailable_error"),
    "http_500": (500, "something broke", "server_error"),
    "http_429": (429, "slow down", "rate_limit_error"),
    "http_401": (401, "Invalid API Key", "authentication_error"),
}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class _Left(Exception):
    """The connection is over."""


class ChaosServer:
    """Listens as long as it is told to; counts what it holds open."""

    def __init__(self) -> None:
        self.loading = False
        self.served = 0
        """Streams that got as far as a request."""
        self.ports: dict[int, int] = {}
        """By the stream's number: the port its request came from."""
        self.errors: list[str] = []
        self._socks: set[socket.socket] = set()
        self._active: dict[socket.socket, int] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """Told when a connection or a stream begins or ends."""
        self._listener = Listener(self._take)
        self._threads: set[threading.Thread] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.port}"

    @property
    def active(self) -> list[int]:
        """The streams it generates for."""
        with self._lock:
            return list(self._active.values())

    @property
    def connections(self) -> int:
        """Sockets that are open."""
        with self._lock:
            return len(self._socks)

    def start(self) -> None:
        """Listen (again), at the same port."""
        self._listener.open()

    def refuse(self) -> None:
        """Refuse new connections."""
        self._listener.close()

    def die(self) -> None:
        """Refuse new connections and reset the others."""
        self.refuse()
        with self._lock:
            socks = list(self._socks)
        for sock in socks:
            _reset(sock)

    def wait_for_stream(self, number: int, timeout: float) -> bool:
        """Wait until it generates for the stream of that number; whether it did in time."""
        with self._lock:
            return self._changed.wait_for(lambda: number in self._active.values(), timeout)

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until it generates for nobody; whether it did in time."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._active, timeout)

    def stop(self) -> None:
        """End everything."""
        self.die()
        for thread in list(self._threads):
            thread.join(10)

    # -- its threads ----------------------------------------------------------------------

    def _take(self, sock: socket.socket, port: int) -> None:
        thread = threading.Thread(target=self._serve, args=[sock, port], daemon=True)
        self._threads.add(thread)
        thread.start()

    def _serve(self, sock: socket.socket, port: int) -> None:
        with self._lock:
            self._socks.add(sock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._answer(sock, port)
        except (_Left, OSError):
            pass
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._socks.discard(sock)
                self._active.pop(sock, None)
                self._changed.notify_all()
            sock.close()
            self._threads.discard(threading.current_thread())

    def _answer(self, sock: socket.socket, port: int) -> None:
        line, body = _request(sock)
        method, path, _ = line.split(" ", 2)
        path = path.split("?")[0]
        if self.loading and path != "/health":
            _json(sock, _LOADING, 503)
        elif path == "/v1/models":
            _json(sock, {"object": "list", "data": [row(MODEL, n_ctx=8192)]})
        elif path == "/props":
            _json(sock, {**PROPS, "total_slots": 64})
        elif path == "/health":
            _json(
                sock, _LOADING if self.loading else {"status": "ok"}, 503 if self.loading else 200
            )
        elif path == "/v1/chat/completions" and method == "POST":
            payload = json.loads(body)
            plan = _plan(payload)
            if plan is None:
                _json(sock, {"choices": [], "model": MODEL})
                return
            with self._lock:
                self.served += 1
                self._active[sock] = plan["number"]
                self.ports[plan["number"]] = port
                self._changed.notify_all()
            _Generation(sock, plan).run()
        else:
            _json(sock, {"error": {"code": 404, "message": "File Not Found"}}, 404)


def _request(sock: socket.socket) -> tuple[str, bytes]:
    got = b""
    while b"\r\n\r\n" not in got:
        block = sock.recv(65536)
        if not block:
            raise _Left
        got += block
    head, _, body = got.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    while len(body) < length:
        block = sock.recv(65536)
        if not block:
            raise _Left
        body += block
    return head.split(b"\r\n")[0].decode("latin-1"), body


def _plan(payload: dict[str, Any]) -> dict[str, Any] | None:
    content = payload["messages"][-1]["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    try:
        plan = json.loads(text)
    except ValueError:
        return None
    return plan if isinstance(plan, dict) and "server" in plan else None


def _json(sock: socket.socket, value: object, status: int = 200) -> None:
    body = json.dumps(value).encode()
    head = (
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    sock.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RDWR)


class _Generation:
    """One answer."""

    def __init__(self, sock: socket.socket, plan: dict[str, Any]) -> None:
        self.sock = sock
        self.plan = plan
        self.fault: str = plan["server"]

    def run(self) -> None:
        sock, fault, pause = self.sock, self.fault, self.plan["pause"]
        if fault in _ERRORS:
            code, message, kind = _ERRORS[fault]
            _json(sock, {"error": {"code": code, "message": message, "type": kind}}, code)
            return
        if fault == "refuse_after_request":
            _reset(sock)
            return
        if fault == "close_before":
            return
        if fault == "hang_before":
            self.watch(HANG)
            raise AssertionError("nobody ended a stream that hung")
        if fault == "stall_before":
            self.watch(pause)
        if fault == "page":
            body = b"<html><body>portal</body></html>"
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n"
            sock.sendall(head % len(body) + body)
            return
        if fault in ("stall_headers", "reset_headers"):
            sock.sendall(_HEAD[:30])
            self.watch(pause)
            if fault == "reset_headers":
                _reset(sock)
                return
            sock.sendall(_HEAD[30:])
        elif fault == "drip":
            self.drip(_HEAD)
        else:
            sock.sendall(_HEAD)
        self.events()

    def events(self) -> None:
        plan, fault = self.plan, self.fault
        chunks = list(_chunks(plan))
        at = min(plan["at"], len(chunks) - 1)
        for place, event in enumerate(chunks):
            data = b"%x\r\n%s\r\n" % (len(event), event)
            if place == at and not self.go_wrong(data):
                return
            if fault == "drip":
                self.drip(data)
            else:
                self.sock.sendall(data)
                if fault == "trickle":
                    self.watch(0.02)
                elif fault == "none" and place % 8 == 0:
                    self.watch(0.001)
        self.sock.sendall(b"0\r\n\r\n")

    def go_wrong(self, data: bytes) -> bool:
        """The fault, where it stands before the event ``data``; whether to go on."""
        sock, fault, half = self.sock, self.fault, len(data) // 2
        if fault == "stall_event":
            sock.sendall(data[:half])
            self.watch(self.plan["pause"])
            sock.sendall(data[half:])
            # The rest comes after it as if nothing had been.
            sock.sendall(b"7\r\n: well\n\r\n")
            return self._rest()
        if fault in ("reset_event", "close_event"):
            sock.sendall(data[:half])
            self.watch(self.plan["pause"] / 4)
            if fault == "reset_event":
                _reset(sock)
            return False
        if fault == "early_end":
            sock.sendall(b"0\r\n\r\n")
            return False
        if fault == "error_event":
            text = b'data: {"error":{"code":500,"message":"it broke","type":"server_error"}}\n\n'
            sock.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text))
            return False
        if fault == "garbage":
            text = b'data: {"choices":[{"delta":{"content":\n\n'
            sock.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text))
            return False
        if fault == "hang":
            self.watch(HANG)
            raise AssertionError("nobody ended a stream that hung")
        return True

    def _rest(self) -> bool:
        """Send what comes behind the event that stalled."""
        chunks = list(_chunks(self.plan))
        at = min(self.plan["at"], len(chunks) - 1)
        for event in chunks[at + 1 :]:
            self.sock.sendall(b"%x\r\n%s\r\n" % (len(event), event))
        self.sock.sendall(b"0\r\n\r\n")
        return False

    def drip(self, data: bytes) -> None:
        for place in range(len(data)):
            self.sock.sendall(data[place : place + 1])

    def watch(self, seconds: float) -> None:
        """Wait, unless the client leaves.

        :raises _Left: if it does
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            poller = select.poll()
            poller.register(self.sock, select.POLLIN)
            if poller.poll(left * 1000) and not self.sock.recv(65536):
                raise _Left


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
    choice = {"finish_reason": reason, "index": 0, "delta": delta}
    head = {"choices": [choice], "created": 1, "id": "chatcmpl-x", "model": MODEL}
    return _event({**head, "object": "chat.completion.chunk", **more})


def _chunks(plan: dict[str, Any]) -> Any:
    said = expected(plan)
    yield _chunk({"role": "assistant", "content": None})
    for word in said["thinking"]:
        yield _chunk({"reasoning_content": word})
    for word in said["text"]:
        yield _chunk({"content": word})
    for index, pieces in enumerate(said["calls"]):
        function = {"name": "weather__get", "arguments": ""}
        call = {"index": index, "id": f"c{index}", "type": "function", "function": function}
        yield _chunk({"tool_calls": [call]})
        for piece in pieces:
            yield _chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield _chunk({}, "tool_calls" if said["calls"] else "stop")
    usage = {"completion_tokens": plan["tokens"], "prompt_tokens": 5, "total_tokens": 9}
    yield _event({"choices": [], "model": MODEL, "usage": usage})
    yield b"data: [DONE]\n\n"


class RealServer:
    """A llama-server with the demo model, seen as the scripted one is."""

    def __init__(self) -> None:
        self.ports: dict[int, int] = {}
        self.connections = 0
        self._directory = tempfile.TemporaryDirectory()
        self._server: LlamaServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    @property
    def keeps_streams(self) -> bool:
        """Whether it can take a stream up again."""
        lookup = f"{self.url}/v1/streams/lookup"
        return requests.post(lookup, json={"conversation_ids": []}, timeout=5).ok

    @property
    def active(self) -> list[int]:
        """The slots that compute."""
        try:
            slots = requests.get(f"{self.url}/slots", timeout=5).json()
        except (requests.RequestException, ValueError):
            return [-1]
        return [slot["id"] for slot in slots if slot["is_processing"]]

    def start(self) -> None:
        model = write_model(Path(self._directory.name) / "demo.gguf", "demo")
        options = LlamaOptions(
            model=model, alias=MODEL, ctx_size=8 * 8192, parallel=8, threads=1, port=self._port
        )
        self._server = LlamaServer(options)
        self._server.start()
        self._port = int(self._server.url.rpartition(":")[2])
        self._server.wait_ready(60.0)

    def restart(self) -> None:
        """Kill it and start it at the same port."""
        assert self._server is not None
        self._server.stop()
        self.start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.stop()
        self._directory.cleanup()
