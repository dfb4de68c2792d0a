"""Waiting for sockets, and being woken from that."""

from __future__ import annotations

import select
import socket
import threading


def wait_ready(sock: socket.socket, *, write: bool, timeout: float) -> None:
    """Wait until ``sock`` can be written (or else read), is broken, or ``timeout`` seconds are
    over."""
    if hasattr(select, "poll"):
        poller = select.poll()  # no limit on descriptor numbers, as select has
        poller.register(sock, select.POLLOUT if write else select.POLLIN)
        poller.poll(max(0.0, timeout) * 1000)
    else:  # pragma: no cover (Windows)
        readers, writers = ([], [sock]) if write else ([sock], [])
        select.select(readers, writers, writers, max(0.0, timeout))


class Waker:
    """Wakes a thread that waits in a selector: a pair of sockets, as that works everywhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)
        self._closed = False

    def wake(self) -> None:
        """From any thread; never blocks."""
        with self._lock:
            if not self._closed:
                try:
                    self._sender.send(b"\0")
                except OSError:
                    pass  # full: the thread has enough to wake up for

    def drain(self) -> None:
        """By the woken thread: take the wake-ups as seen."""
        try:
            while self.receiver.recv(4096):  # pragma: no branch (empty raises)
                pass
        except OSError:
            pass  # empty

    def close(self) -> None:
        """By the woken thread, at its end."""
        with self._lock:
            self._closed = True
            self.receiver.close()
            self._sender.close()
