"""Dialling, and the corners of sending that need a socket in a certain state."""

from __future__ import annotations

import socket
import threading
from typing import Any
from urllib.parse import urlsplit

import pytest
from bus_peers import TIMEOUT, Run, Server, descriptors, eventually

from provider_llamacpp.bus import link as link_module
from provider_llamacpp.bus.link import Link, LinkError, origin, tls_context
from provider_llamacpp.bus.waiting import Waker, wait_ready


def make(url: str, **options: Any) -> Link:
    return Link(urlsplit(url), context=lambda: tls_context(None, None), **options)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ws://h:1/path?token=secret", "ws://h:1"),
        ("wss://user:secret@h/?token=secret#secret", "wss://h"),
        ("ws://[::1]:5/", "ws://[::1]:5"),
        ("ws:///nothing", "ws://"),
    ],
)
def test_what_a_log_may_show_of_an_address(url: str, shown: str) -> None:
    assert origin(url) == shown


def test_a_dead_address_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server() as dead:
        gone = ("127.0.0.1", dead.port)
    with Server() as server:
        stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        found = [(*stream, gone), (*stream, ("127.0.0.1", server.port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: found)
        link = make("ws://some.name")
        connecting = Run(lambda: link.connect(TIMEOUT))
        assert server.accept().header("Host") == "some.name"
        connecting.result()
        link.close()
        link.close()


def test_a_name_without_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: [])
    with pytest.raises(LinkError, match="name:1: the name has no address"):
        make("ws://some.name:1").connect(TIMEOUT)


def test_a_name_that_is_none() -> None:
    with pytest.raises(LinkError):
        make("ws://" + "x" * 300).connect(TIMEOUT)


def test_no_time_left() -> None:
    with Server() as server, pytest.raises(LinkError, match="no answer in time"):
        make(server.url).connect(0)


def test_a_cut_before_the_attempt_ends_it() -> None:
    link = make("ws://127.0.0.1:1")
    link.cut()
    before = descriptors()
    with pytest.raises(LinkError, match="given up"):
        link.connect(TIMEOUT)
    assert descriptors() == before


def test_a_cut_ends_an_attempt_that_gets_no_answer_at_all() -> None:
    """A listener whose queue is full lets the next handshake of TCP hang."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        link = make(f"ws://127.0.0.1:{address[1]}")
        connecting = Run(lambda: link.connect(600))
        assert eventually(lambda: link._sock is not None)
        link.cut()
        with pytest.raises(LinkError, match="given up"):
            connecting.result()
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "HTTP status 200"),
        (b"HTTP/1.1 101 Go\r\n\r\n", "no WebSocket upgrade"),
        (b"HTTP/1.1 307 Go\r\nLocation: ws://else\r\n\r\n", "no WebSocket upgrade"),
        (b"SECRET of another protocol\r\n\r\n", "no WebSocket upgrade"),
        (b"", "closed during the handshake"),
    ],
)
def test_other_answers_than_an_upgrade(answer: bytes, reason: str) -> None:
    with Server() as server:
        connecting = Run(lambda: make(server.url).connect(TIMEOUT))
        sock = server.accept_raw()
        sock.recv(65536)
        sock.sendall(answer)
        server.drop()
        with pytest.raises(LinkError, match=reason) as caught:
            connecting.result()
        assert "SECRET" not in str(caught.value)


def test_nothing_passes_before_the_connection() -> None:
    link = make("ws://127.0.0.1:1")
    for use in (
        lambda: link.send(b"x", 1),
        lambda: link.send_some(b"x"),
        lambda: link.offer(b"x"),
        lambda: link.receive(1),
    ):
        with pytest.raises(LinkError, match="not connected"):
            use()
    link.interrupt()
    link.cut()
    link.close()


def test_a_closed_link_is_gone_in_every_use() -> None:
    with Server() as server:
        link = make(server.url)
        connecting = Run(lambda: link.connect(TIMEOUT))
        server.accept()
        connecting.result()
        assert link.receive(10) is None
        link.close()
        for use in (
            lambda: link.send(b"x", 1),
            lambda: link.send_some(b"x"),
            lambda: link.offer(b"x"),
            lambda: link.receive(1),
        ):
            with pytest.raises(LinkError):
                use()
        link.cut()


def test_a_close_during_a_wait_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "SLICE", 0.01)
    with Server(narrow=True) as server:
        link = make(server.url)
        connecting = Run(lambda: link.connect(TIMEOUT))
        server.accept()
        connecting.result()
        sending = Run(lambda: link.send(b"x" * 10_000_000, 600))
        assert eventually(lambda: link._waiting)
        link.close()
        with pytest.raises(LinkError):
            sending.result()


def test_waiting_for_something_to_read() -> None:
    one, other = socket.socketpair()
    with one, other:
        waiting = Run(lambda: wait_ready(one, write=False, timeout=TIMEOUT))
        other.send(b"x")
        waiting.result()
        wait_ready(one, write=True, timeout=-1)


def test_wake_ups_do_not_pile_up() -> None:
    before = descriptors()
    waker = Waker()
    for _ in range(10_000):
        waker.wake()
    waker.drain()
    with pytest.raises(BlockingIOError):
        waker.receiver.recv(1)
    waker.wake()
    assert waker.receiver.recv(1)
    waker.close()
    waker.wake()
    assert descriptors() == before


def test_a_cut_at_any_moment_of_an_attempt() -> None:
    """The handshake is answered while the cut comes: whichever is first, nothing hangs or leaks."""
    before = descriptors()
    with Server() as server:
        for number in range(50):
            link = make(server.url)
            connecting = Run(lambda link=link: link.connect(TIMEOUT))  # type: ignore[misc]
            cutting = threading.Timer(number / 20_000, link.cut)
            cutting.start()
            try:
                server.accept()
            except (AssertionError, OSError):
                pass  # it was cut before
            try:
                connecting.result()
            except LinkError:
                pass
            cutting.join()
            link.close()
            server.drop()
        server.drop()
    assert descriptors() <= before
