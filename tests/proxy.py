"""A TCP proxy that does to connections what networks do: cut, reset, refuse, stall.

::

    with Proxy(server.url, plan=lambda link: Cut(after=700)) as proxy:
        ... proxy.url ...
    assert proxy.links[0].down == 700

It forwards bytes and knows of HTTP only where the head of a request and that of an answer end, so
that a plan can tell requests apart and a cut can count the bytes of a body.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from listening import PATIENCE, Listener

_BLOCK = 65536


@dataclass(frozen=True)
class Cut:
    """The end of one connection.

    :ivar after: bytes that still reach the client
    :ivar of_body: count those behind the head of the first answer (chunk framing is body)
    :ivar how: ``close`` lets the client read what was sent; ``reset`` may take it away unread
    """

    after: int
    of_body: bool = True
    how: Literal["close", "reset"] = "close"


Plan = Callable[["Link"], "Cut | None"]


class Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, number: int, client: socket.socket) -> None:
        self.number = number
        self.request = ""
        """The first line of the first request, such as ``GET /health HTTP/1.1``."""
        self.headers: dict[str, str] = {}
        """Those of the first request, with names in lower case."""
        self.down = 0
        """Bytes passed on to the client."""
        self.body = 0
        """Of ``down``, those behind the head of the first answer."""
        self.was_cut = False
        self.ended = threading.Event()
        self._proxy = proxy
        self._client = client
        self._server: socket.socket | None = None
        self._waker, self._woken = socket.socketpair()
        self._cut: Cut | None = None
        self._at_once = False
        self._asked = b""
        self._head = b""
        self._in_body = False
        self._new_head = 0
        """Bytes of the head among those that are to be written next."""

    def cut(self, how: Literal["close", "reset"] = "reset") -> None:
        """End it now; from any thread."""
        self._cut, self._at_once = Cut(0, how=how), True
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def run(self) -> None:
        """Forward until either side or the plan ends it."""
        try:
            self._server = socket.create_connection(self._proxy.target, timeout=PATIENCE)
            for sock in (self._client, self._server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setblocking(False)
            self._forward(self._server)
        except OSError:
            pass  # One side is gone: so is the other.
        finally:
            self._close()

    def _forward(self, server: socket.socket) -> None:
        client = self._client
        other = {client: server, server: client}
        waiting: dict[socket.socket, bytes] = {client: b"", server: b""}
        """What is still to be written, by where it goes."""
        read_to_end: set[socket.socket] = set()
        while len(read_to_end) < 2 or any(waiting.values()):
            reads: list[socket.socket] = [self._woken]
            writes: list[socket.socket] = []
            if not self._proxy.held:
                reads += [
                    sock
                    for sock, to in other.items()
                    if not waiting[to] and sock not in read_to_end
                ]
                writes = [sock for sock, data in waiting.items() if data]
            readable, writable, _ = select.select(reads, writes, [])
            if self._woken in readable:
                self._woken.recv(_BLOCK)
                if self._at_once:
                    self.was_cut = True
                    return
                continue
            for sock in writable:
                sent = sock.send(waiting[sock])
                waiting[sock] = waiting[sock][sent:]
                if sock is client and self._count(sent):
                    return
            for sock in readable:
                block = sock.recv(_BLOCK)
                if not block:
                    read_to_end.add(sock)
                    other[sock].shutdown(socket.SHUT_WR)
                    continue
                if sock is client:
                    self._note(block)
                    waiting[server] = block
                else:
                    waiting[client] = self._allowed(block)
                    if not waiting[client] and self._is_due():
                        return

    def _note(self, block: bytes) -> None:
        """The client's words: the plan decides when the first head is known."""
        if self.request:
            return
        self._asked += block
        if b"\r\n\r\n" not in self._asked:
            return
        head = self._asked.split(b"\r\n\r\n", 1)[0].decode("latin-1")
        self.request, *lines = head.split("\r\n")
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        if self._proxy.plan is not None and self._cut is None:
            self._cut = self._proxy.plan(self)

    def _allowed(self, block: bytes) -> bytes:
        """What of ``block`` comes before the cut."""
        head = 0
        if not self._in_body:
            known = len(self._head)
            self._head += block
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                head = len(block)
            else:
                head = end + 4 - known
                self._in_body = True
        self._new_head = head
        if self._cut is None:
            return block
        if self._cut.of_body:
            return block[: head + max(0, self._cut.after - self.body)]
        return block[: max(0, self._cut.after - self.down)]

    def _count(self, sent: int) -> bool:
        """``sent`` bytes went down; whether the cut is due."""
        head = min(self._new_head, sent)
        self._new_head -= head
        self.down += sent
        self.body += sent - head
        return self._is_due()

    def _is_due(self) -> bool:
        cut = self._cut
        if cut is None:
            return False
        self.was_cut = (
            self._in_body and not self._new_head and self.body >= cut.after
            if cut.of_body
            else self.down >= cut.after
        )
        return self.was_cut

    def _close(self) -> None:
        if self.was_cut and self._cut is not None and self._cut.how == "reset":
            with contextlib.suppress(OSError):
                self._client.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
        for sock in (self._client, self._server, self._waker, self._woken):
            if sock is not None:
                sock.close()
        self.ended.set()


class Proxy:
    """Listens on a loopback port and forwards to ``target``, as long as the ``with`` block lasts.

    :param target: address of the server, ``http://host:port`` or ``ws://host:port``
    :param plan: asked for each connection, once its first request line is known (``link.request``),
        when it is to be cut; None never
    """

    buffer: int | None = None
    """See :class:`~listening.Listener`."""

    def __init__(self, target: str, plan: Plan | None = None) -> None:
        parts = urlsplit(target)
        assert parts.hostname is not None and parts.port is not None
        self.target = parts.hostname, parts.port
        self.plan = plan
        """May be replaced at any time; counts for connections that come later."""
        self.held = False
        self.links: list[Link] = []
        """In the order in which they came."""
        self._scheme = parts.scheme
        self._threads: list[threading.Thread] = []
        self._changing = threading.Lock()
        self._listener = Listener(self._take, buffer=self.buffer)

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def accept(self) -> None:
        """Take connections (again), at the same port."""
        self._listener.open()

    def refuse(self) -> None:
        """Refuse connections that come from now on; those that are there stay."""
        self._listener.close()

    def cut(self, how: Literal["close", "reset"] = "reset") -> None:
        """End every connection that is there."""
        for link in list(self.links):
            link.cut(how)

    def hold(self) -> None:
        """Let nothing through any more, neither bytes nor an end: a line that is half open."""
        self.held = True
        self._wake_all()

    def release(self) -> None:
        """Undo :meth:`hold`; what waited goes through."""
        self.held = False
        self._wake_all()

    def requests(self) -> list[str]:
        """Method and target of each connection's first request, in the order of the connections."""
        return [" ".join(link.request.split(" ")[:2]) for link in self.links]

    def __enter__(self) -> Proxy:
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a thread of the proxy hangs"

    def _wake_all(self) -> None:
        for link in list(self.links):
            link.wake()

    def _take(self, client: socket.socket, _: int) -> None:
        link = Link(self, len(self.links), client)
        thread = threading.Thread(target=link.run, name="proxy-link", daemon=True)
        self._threads.append(thread)
        with self._changing:
            self.links.append(link)
        thread.start()
