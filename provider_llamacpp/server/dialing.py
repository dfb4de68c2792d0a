"""The one TCP or TLS connection of one request, in a form that an abort can cut at any moment.

``requests`` and ``urllib3`` hand out a socket only with the response, which llama-server sends when
a slot is free: minutes late for an abort. And closing a response from another thread does not wake
its reader. So a :class:`Line` dials the socket itself and keeps it; :meth:`Line.cut` shuts it down,
whether it is connecting, in its TLS handshake, waiting for headers or reading. How ``requests`` is
made to use it: :mod:`.transport`.
"""

from __future__ import annotations

import errno
import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from urllib3.util import wait_for_write

from ..calls import Call
from ..cutting import cut_off
from ..numeric import ipv4

_SLICE = 0.25
"""Seconds between looks at the abort while a connect is under way. Linux needs none: there the
shutdown of a connecting socket ends the wait at once."""
_UNDERWAY = frozenset({errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN})


def _socket_options() -> list[tuple[int, int, int]]:
    """No Nagle; and a peer that lost its power is noticed within two minutes, not two hours."""
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    ]
    # What exists depends on the platform.
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        option = getattr(socket, name, None)
        options += [] if option is None else [(socket.IPPROTO_TCP, option, value)]
    return options


_OPTIONS = _socket_options()


class Line:
    """One connection: dialled by the call's thread, cut by any other.

    :param call: whose abort cuts the line; None for a request that nobody aborts
    :param connect_timeout: seconds for names, TCP and TLS together
    :param deadline: ``time.monotonic()`` at which every wait on this line ends; None is never.
        May be set later.
    """

    def __init__(
        self, call: Call | None, *, connect_timeout: float, deadline: float | None = None
    ) -> None:
        self.deadline = deadline
        self.connect_timeout = connect_timeout
        self.connected = False
        """The connection was made: whatever became of it, the peer may have got the request."""
        self.local = False
        """Its other end is on this machine, as the connection itself showed."""
        self.on_made: Callable[[], None] | None = None
        """Called when the connection stands; must not block."""
        self._call = call
        self._open = False
        self._ahead: socket.socket | OSError | None = None
        self._sock: socket.socket | None = None
        self._cut = False
        self._lock = threading.Lock()

    def open(self) -> None:
        """From now on an abort of the call cuts the line; twice does no harm.

        :raises Interrupted: if the call was aborted before
        """
        if self._call is not None and not self._open:
            self._call.add_waker(self.cut)
            self._open = True

    def cut(self) -> None:
        """End whatever the line waits for, now and later; from any thread, never blocks."""
        with self._lock:
            self._cut = True
            if self._sock is not None:
                cut_off(self._sock)

    def hold(self, sock: socket.socket) -> None:
        """``sock`` is what :meth:`cut` shuts from now on."""
        with self._lock:
            self._sock = sock
            if self._cut:
                cut_off(sock)

    def made(self, sock: socket.socket) -> None:
        """The connection stands, over ``sock``."""
        self.connected = True
        try:
            own, peer = sock.getsockname()[0], sock.getpeername()[0]
        except OSError:
            return  # Cut already.
        self.local = own == peer or peer.startswith("127.")
        if self.on_made is not None:
            self.on_made()

    def lift(self, idle: float | None = None) -> None:
        """From now on no wait on this line has an end but that after ``idle`` seconds."""
        self.deadline = None
        with self._lock:
            if self._sock is not None:
                self._sock.settimeout(idle)

    def close(self) -> None:
        """The call's thread has no more use for the line; twice does no harm."""
        if self._call is not None:
            self._call.remove_waker(self.cut)
        with self._lock:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def check(self) -> None:
        """:raises Interrupted: if the call was aborted"""
        if self._call is not None:
            self._call.check()

    def left(self) -> float | None:
        """Seconds until the deadline, at least a moment; None without a deadline."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.001)

    def dial_ahead(self, host: str, port: int) -> None:
        """Open and :meth:`dial`, now: the next :meth:`dial` has the outcome.

        :raises Interrupted: if the call is aborted
        """
        self.open()
        try:
            self._ahead = self._dial(host, port)
        except OSError as error:
            self._ahead = error

    def dial(self, host: str, port: int) -> socket.socket:
        """Connect to the first address of ``host`` that accepts.

        :raises OSError: as the system said it; :class:`TimeoutError` after the connect timeout
        :raises Interrupted: if the call is aborted
        """
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, OSError):
            raise ahead
        return ahead or self._dial(host, port)

    def _dial(self, host: str, port: int) -> socket.socket:
        limit = time.monotonic() + self.connect_timeout
        if self.deadline is not None:
            limit = min(limit, self.deadline)
        failure = OSError(f"no address for {host}")
        for family, kind, protocol, _, address in self._addresses(host, port, limit):
            try:
                return self._connect(socket.socket(family, kind, protocol), address, limit)
            except OSError as error:
                failure = error
        raise failure

    def _addresses(self, host: str, port: int, limit: float) -> list[Any]:
        """The addresses of ``host``. A resolver may take long and cannot be interrupted, so a
        name is looked up on a thread of its own, which nobody has to wait for."""
        if found := ipv4(host, port):
            return found
        find = functools.partial(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)
        if host == "localhost":
            return find()
        try:
            return find(flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            pass
        answers: queue.SimpleQueue[list[Any] | OSError | None] = queue.SimpleQueue()

        def look_up() -> None:
            try:
                answers.put(find())
            except OSError as error:
                answers.put(error)
            except UnicodeError as error:
                answers.put(OSError(f"not a host name: {error}"))

        threading.Thread(target=look_up, name="llamacpp-resolve", daemon=True).start()
        call = self._call
        with call.interruptible(lambda: answers.put(None)) if call else nullcontext():
            try:
                answer = answers.get(timeout=max(limit - time.monotonic(), 0.001))
            except queue.Empty:
                raise TimeoutError("the name of the host was not resolved in time") from None
        self.check()
        if isinstance(answer, OSError):
            raise answer
        return answer or []

    def _connect(self, sock: socket.socket, address: Any, limit: float) -> socket.socket:
        try:
            for option in _OPTIONS:
                sock.setsockopt(*option)
            sock.setblocking(False)
            self.hold(sock)
            code = sock.connect_ex(address)
            if code in _UNDERWAY:
                while not wait_for_write(sock, _SLICE):
                    self.check()
                    if time.monotonic() > limit:
                        raise TimeoutError("timed out")
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self.check()
            if code:
                raise OSError(code, os.strerror(code))
            # What is left is for the TLS handshake.
            sock.settimeout(max(limit - time.monotonic(), _SLICE))
        except BaseException:
            sock.close()
            raise
        return sock
