"""Loopback peers for tests: a scripted HTTP server on a raw socket, and a proxy that counts.

Raw sockets, because the tests are about what no HTTP library lets through: chunks cut anywhere,
bodies that break off, silence before the status line, a client that closes in the middle.

An *answer* is a dict, the form in which the shared cases of this project describe one:

``status``, ``headers``
    status code (200) and headers (names in any case)
``body`` or ``body_b64``
    UTF-8 text (or bytes), or exact bytes
``split``
    byte offsets of the body at which separate writes (and chunks) begin
``framing``
    ``chunked`` (default), ``close`` or ``length``
``cut``
    true: the connection drops without the last zero chunk, or short of the Content-Length
``script``
    instead of a body, a list of steps: ``{"headers": {"status", "headers"}}``, ``{"send": text}``,
    ``{"send_b64": text}``, ``{"sleep_ms": n}``, ``{"hang_ms": n}`` (sends nothing for so long and
    then drops the connection), ``{"repeat": n, "steps": [...]}`` (or ``"send"``), ``{"close":
    true}`` (drop the connection now), or a callable that gets the :class:`Exchange`
``routes``
    an answer for each path, without the query; other paths get the 404 of llama-server
``server_closes_idle_after_ms``
    keep-alive, then closed by the server

An answer may also be a function of the :class:`Request` that returns one.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Answer = Mapping[str, Any]
Answers = Answer | Callable[["Request"], Answer]

NOT_FOUND: Answer = {
    "status": 404,
    "headers": {"content-type": "application/json; charset=utf-8"},
    "body": '{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}',
    "framing": "length",
}
PATIENCE = 30.0
"""Seconds after which a wait that should have ended long ago fails its test."""


def answer_json(value: object, status: int = 200, **more: Any) -> dict[str, Any]:
    """An answer whose body is ``value`` as JSON."""
    headers = {"content-type": "application/json; charset=utf-8"}
    body = json.dumps(value)
    return {"status": status, "headers": headers, "body": body, "framing": "length", **more}


def answer_sse(*events: object, **more: Any) -> dict[str, Any]:
    """An answer that streams ``events``: text as it is, anything else as JSON."""
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    body = "".join(f"data: {line}\n\n" for line in lines)
    return {"status": 200, "headers": {"content-type": "text/event-stream"}, "body": body, **more}


@dataclass
class Request:
    """A request as it arrived. Header names are in lower case; of repeated ones the last counts."""

    line: str
    headers: dict[str, str]
    raw_headers: list[str]
    body: bytes = b""
    at: float = field(default_factory=time.monotonic)

    @property
    def method(self) -> str:
        return self.line.split(" ")[0]

    @property
    def target(self) -> str:
        """Path with query."""
        return self.line.split(" ")[1]

    @property
    def path(self) -> str:
        return self.target.split("?", 1)[0]

    def json(self) -> Any:
        return json.loads(self.body)


class ClientGone(Exception):
    """The client closed while an answer was due."""


class Exchange:
    """One connection at the moment of one answer."""

    def __init__(self, server: ScriptedServer, sock: socket.socket) -> None:
        self.server = server
        self.sock = sock
        self.request: Request | None = None
        self.client_closed = threading.Event()
        self.closed_at: float | None = None
        """``time.monotonic()`` of the moment at which the client was seen to close."""
        self.framing = "close"
        self._got = bytearray()

    # -- reading ---------------------------------------------------------------------------

    def _fill(self) -> None:
        try:
            block = self.sock.recv(65536)
        except OSError:
            block = b""
        if not block:
            self.gone()
        self._got += block

    def gone(self) -> None:
        """Note that the client has closed.

        :raises ClientGone: always
        """
        if self.closed_at is None:
            self.closed_at = time.monotonic()
            self.client_closed.set()
        raise ClientGone

    def read_request(self) -> Request | None:
        """The next request; None if the client closes instead."""
        request = None
        try:
            while b"\r\n\r\n" not in self._got:
                self._fill()
            head, self._got = self._got.split(b"\r\n\r\n", 1)
            line, *raw_headers = bytes(head).decode("latin-1").split("\r\n")
            headers = {}
            for raw in raw_headers:
                name, _, value = raw.partition(":")
                headers[name.strip().lower()] = value.strip()
            request = self.request = Request(line, headers, raw_headers)
            self.server.arrived(request)
            length = int(headers.get("content-length", "0"))
            while len(self._got) < length:
                self._fill()
        except ClientGone:
            if request is not None:
                self.server.client_closed.set()
            return None
        request.body, self._got = bytes(self._got[:length]), self._got[length:]
        return request

    def watch(self, seconds: float, until: threading.Event | None = None) -> None:
        """Send nothing for ``seconds``, or until ``until`` is set, looking out for the client.

        :raises ClientGone: as soon as it closes
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if (until is not None and until.is_set()) or self.server.stopping:
                return
            step = min(left, 0.02 if until is not None else 0.2)
            if select.select([self.sock], [], [], step)[0]:
                self._fill()

    # -- writing ---------------------------------------------------------------------------

    def head(self, status: int, headers: Mapping[str, str], framing: str, length: int = 0) -> None:
        """Send the status line and the headers, with those that ``framing`` asks for."""
        self.framing = framing
        lines = [f"HTTP/1.1 {status} Scripted"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        given = {name.lower() for name in headers}
        if framing == "chunked":
            lines.append("Transfer-Encoding: chunked")
        elif framing == "length" and "content-length" not in given:
            lines.append(f"Content-Length: {length}")
        elif framing == "close" and "connection" not in given:
            lines.append("Connection: close")
        self.raw("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def send(self, data: bytes | str) -> None:
        """Send a part of the body, as one chunk where the body is chunked."""
        data = data.encode() if isinstance(data, str) else data
        if self.framing == "chunked":
            data = b"%x\r\n%s\r\n" % (len(data), data) if data else b""
        self.raw(data)

    def end(self) -> None:
        """End a chunked body."""
        if self.framing == "chunked":
            self.raw(b"0\r\n\r\n")

    def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        try:
            self.sock.sendall(data)
        except OSError:
            self.gone()


class ScriptedServer:
    """An HTTP/1.1 server that answers as told and remembers what it was asked.

    ::

        with ScriptedServer({"status": 200, "body": "data: [DONE]\\n\\n"}) as server:
            ... server.url ...
        assert server.requests[0].path == "/v1/chat/completions"

    :param answer: for every path that ``routes`` does not name
    :param routes: answers by path
    :param tls: makes it an ``https`` server
    :param before_body: called with each request when its headers have been read and its body not
    """

    def __init__(
        self,
        answer: Answers | None = None,
        *,
        routes: Mapping[str, Answers] | None = None,
        tls: ssl.SSLContext | None = None,
        before_body: Callable[[Request], None] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.requests: list[Request] = []
        """In the order of arrival; the body of the last one may still be on its way."""
        self.connections = 0
        self.client_closed = threading.Event()
        """Set when a client closes in the middle of its request or of the answer."""
        self.exchanges: list[Exchange] = []
        self.errors: list[BaseException] = []
        """What went wrong in the server itself: an empty list in a sound test."""
        self.stopping = False
        self._answer = answer
        self._routes = routes or {}
        self._tls = tls
        self._before_body = before_body
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._socks: list[socket.socket] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((host, port))
        self._listener.settimeout(0.5)
        address = self._listener.getsockname()
        self.host: str = address[0]
        self.port: int = address[1]

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}"

    def start(self) -> ScriptedServer:
        self._listener.listen(128)
        self._spawn(self._accept)
        return self

    def stop(self) -> None:
        """Stop listening, drop every connection and wait for all threads."""
        self.stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._threads:
            self._threads[0].join(PATIENCE)
        self._listener.close()
        for sock in [*self._socks, *(exchange.sock for exchange in self.exchanges)]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a thread of the scripted server hangs"

    def __enter__(self) -> ScriptedServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        assert not self.errors, self.errors

    def arrived(self, request: Request) -> None:
        """A request line with its headers is in."""
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        if self._before_body is not None:
            self._before_body(request)

    def wait_requests(self, count: int, timeout: float = PATIENCE) -> list[Request]:
        """The requests so far, once there are ``count``."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.requests) >= count, timeout):
                raise AssertionError(f"{len(self.requests)} requests came, not {count}")
            return list(self.requests)

    def paths(self) -> list[str]:
        """Method and path with query of each request, in the order of arrival."""
        return [f"{request.method} {request.target}" for request in self.requests]

    def open(self) -> list[socket.socket]:
        """The connections that are still open."""
        return [
            each
            for each in [*self._socks, *(exchange.sock for exchange in self.exchanges)]
            if each.fileno() >= 0
        ]

    # -- the server's own threads ----------------------------------------------------------

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="scripted-server", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self.stopping:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            sock.settimeout(None)
            self._socks.append(sock)
            with self._changed:
                self.connections += 1
                self._changed.notify_all()
            self._spawn(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if self._tls is not None:
                try:
                    sock = self._tls.wrap_socket(sock, server_side=True)
                except OSError:
                    # A handshake that fails is what some tests are about.
                    return
            exchange = Exchange(self, sock)
            self.exchanges.append(exchange)
            while exchange.read_request() is not None and self._reply(exchange):
                pass
        except Exception as error:
            self.errors.append(error)
        finally:
            with contextlib.suppress(OSError):
                sock.close()

    def _reply(self, exchange: Exchange) -> bool:
        """Answer one request; whether the connection stays open."""
        request = exchange.request
        assert request is not None
        answer = self._routes.get(request.path, self._answer)
        if callable(answer):
            answer = answer(request)
        if answer is not None and "routes" in answer:
            answer = answer["routes"].get(request.path, NOT_FOUND)
        try:
            keep = self._play(exchange, NOT_FOUND if answer is None else answer)
        except ClientGone:
            self.client_closed.set()
            return False
        return keep

    def _play(self, exchange: Exchange, answer: Answer) -> bool:
        framing = answer.get("framing", "chunked")
        status = answer.get("status", 200)
        headers = answer.get("headers", {})
        if "script" in answer:
            if not self._steps(exchange, answer["script"], framing):
                return False
            exchange.end()
        else:
            body = answer.get("body", "")
            if "body_b64" in answer:
                body = base64.b64decode(answer["body_b64"])
            body = body.encode() if isinstance(body, str) else body
            cut = answer.get("cut", False)
            exchange.head(status, headers, framing, len(body) + (7 if cut else 0))
            edges = [0, *answer.get("split", ()), len(body)]
            for start, stop in itertools.pairwise(edges):
                exchange.send(body[start:stop])
            if cut:
                return False
            exchange.end()
        if framing == "close" or exchange.framing == "close":
            return False
        idle = answer.get("server_closes_idle_after_ms")
        if idle is not None:
            return bool(select.select([exchange.sock], [], [], idle / 1000)[0])
        return bool(status < 400)

    def _steps(self, exchange: Exchange, steps: list[Any], framing: str) -> bool:
        """Play a script; False if the connection is to be dropped without an end."""
        for step in steps:
            if callable(step):
                step(exchange)
            elif "headers" in step:
                head = step["headers"]
                exchange.head(head.get("status", 200), head.get("headers", {}), framing)
            elif "repeat" in step:
                inner = step.get("steps", [{"send": step.get("send", "")}])
                for _ in range(step["repeat"]):
                    if not self._steps(exchange, inner, framing):
                        return False
            elif "send" in step:
                exchange.send(step["send"])
            elif "send_b64" in step:
                exchange.send(base64.b64decode(step["send_b64"]))
            elif "sleep_ms" in step:
                exchange.watch(step["sleep_ms"] / 1000)
            elif "hang_ms" in step:
                exchange.watch(step["hang_ms"] / 1000)
                return False
            elif "close" in step:
                return framing == "close"
            else:
                raise ValueError(f"no such step: {step}")
        return True


class ProxyCounter:
    """Stands where a proxy would be, counts what asks it (CONNECT or plain) and refuses it."""

    def __init__(self) -> None:
        refusal = {"status": 502, "body": "no proxy", "framing": "length"}
        self._server = ScriptedServer(refusal)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def requests(self) -> int:
        """Requests so far; a connection without one counts too."""
        return max(len(self._server.requests), self._server.connections)

    def __enter__(self) -> ProxyCounter:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A loopback port at which a connect neither succeeds nor fails: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        yield address[1]


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait_for(condition: Callable[[], bool], what: str = "it", timeout: float = PATIENCE) -> None:
    """Wait for something that has no event to wait for."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout} s"
        pause.wait(0.005)
