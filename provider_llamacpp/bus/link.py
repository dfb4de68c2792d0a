"""The socket under one WebSocket to the engine: dial, send, receive, cut, close.

Knows bytes and addresses, no message and no frame but the opening handshake, which is
websocket-client's. After it the socket is used without blocking, for these reasons:

* websocket-client has one timeout for both directions, so that waiting to receive would also
  bound, or unbound, every send;
* a send that fits into the kernel's buffer, which nearly every one does, costs one system call
  and no ``poll``;
* a thread can be kept from blocking where it must not (a ping, a pong, a reader's answer).

Proxies and netrc of the environment are never looked at: we connect ourselves.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import NoReturn
from urllib.parse import SplitResult, urlsplit

import websocket

from ..errors import ProviderLlamacppError
from ..numeric import ipv4
from .upgrade import upgrade
from .waiting import wait_ready

SLICE = 1.0
"""Seconds a wait to send lasts at most in one go: where a shutdown does not wake it (Windows), it
still sees a cut."""


class LinkError(ProviderLlamacppError):
    """The connection cannot be made, or is gone. The message holds no secrets.

    :param status: HTTP status, if that is how the other end refused
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def origin(url: str) -> str:
    """Scheme, host and port of ``url``: what a log may show of it."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")


def tls_context(ca_file: str | None, client_cert: str | None) -> ssl.SSLContext:
    """Verification on, with the system's authorities or the ones in ``ca_file``.

    :param client_cert: PEM file with our certificate and its key
    :raises OSError: if a file cannot be read or used (``ssl.SSLError`` is one)
    """
    context = ssl.create_default_context(cafile=ca_file)
    if client_cert is not None:
        context.load_cert_chain(client_cert)
    return context


def _nothing() -> None:
    """To be done meanwhile."""


class Link:
    """One connection, from before it is made until after it is closed.

    Who calls what: one thread connects; then senders are serialised by the owner's lock, one
    thread at a time receives, and anyone may :meth:`cut`. :meth:`close` belongs to the owner,
    once nobody else sends or receives.

    :param token: bearer for the handshake (engine protocol 1.2)
    :param context: gives the TLS context; asked for ``wss`` only
    """

    def __init__(
        self, url: SplitResult, *, token: str | None = None, context: Callable[[], ssl.SSLContext]
    ) -> None:
        self._url = url
        self._token = token
        self._context = context
        self._sock: socket.socket | None = None
        self._send_now: Callable[[bytes | memoryview], int] = self._unconnected
        self._receive_now: Callable[[int], bytes] = self._unconnected
        self.secure = url.scheme == "wss"
        """It goes over TLS: what has come may wait where no selector tells of it."""
        self._rest = b""
        """Accepted by :meth:`offer` and not sent yet; guarded by the owner's send lock."""
        self._cut = False
        self._patient = True
        self._waiting = False
        self._life = threading.Lock()
        """Guards the descriptor: a shutdown must not meet a number that was closed and reused."""
        self._tls = threading.Lock()
        """One TLS session must not be read and written at the same moment."""

    # -- connecting -----------------------------------------------------------------------

    def connect(self, timeout: float, meanwhile: Callable[[], None] = _nothing) -> None:
        """Resolve, connect, secure and upgrade, all within ``timeout`` seconds.

        The name's resolution alone cannot be interrupted by :meth:`cut`.

        :param meanwhile: called while the other end thinks about the upgrade; must not raise. Its
            time is not counted.
        :raises LinkError: for every failure; nothing stays open then
        """
        deadline = time.monotonic() + timeout
        try:
            self._connect(deadline, meanwhile)
        except BaseException as error:
            self.close()
            if isinstance(error, LinkError):
                raise
            if self._cut:
                raise LinkError("the connection attempt was given up") from error
            where = origin(self._url.geturl())
            raise LinkError(f"{where}: {_reason(error)}", status=_status(error)) from error

    def _connect(self, deadline: float, meanwhile: Callable[[], None]) -> None:
        host = self._url.hostname or ""
        sock = self._dial(host, self._url.port or (443 if self.secure else 80), deadline)
        if self.secure:
            sock.settimeout(_left(deadline))
            secured = self._context().wrap_socket(
                sock, server_hostname=host, do_handshake_on_connect=False
            )
            self._take(secured)
            secured.settimeout(_left(deadline))
            secured.do_handshake()
            sock = secured
        sock.settimeout(_left(deadline))
        upgrade(sock, self._url, self._token, meanwhile)
        sock.setblocking(False)
        if self.secure:
            self._send_now, self._receive_now = self._send_tls, self._receive_tls
        else:
            self._send_now, self._receive_now = sock.send, sock.recv

    def websocket(self) -> websocket.WebSocket:
        """websocket-client's own view of the connection, for who wants to use that instead."""
        made = websocket.WebSocket(enable_multithread=False)
        made.sock = self._sock
        made.connected = True
        return made

    def _dial(self, host: str, port: int, deadline: float) -> socket.socket:
        found = ipv4(host, port) or socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        failure: OSError | None = None
        for number, (family, kind, protocol, _, address) in enumerate(found):
            sock = socket.socket(family, kind, protocol)
            self._take(sock)
            # A dead first address leaves time for the others.
            sock.settimeout(_left(deadline) / (len(found) - number))
            try:
                sock.connect(address)
            except OSError as error:
                failure = error
                if self._cut:
                    break
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return sock
        raise failure or OSError("the name has no address")

    def _take(self, sock: socket.socket) -> None:
        """Make ``sock`` the one that :meth:`cut` and :meth:`close` act on."""
        with self._life:
            if self._sock is not None:
                self._sock.close()  # of the attempt before, or emptied by wrap_socket
            self._sock = sock
            if self._cut:
                raise LinkError("the connection attempt was given up")

    @staticmethod
    def _unconnected(_: object) -> NoReturn:
        raise LinkError("not connected")

    # -- by the sender, under its owner's lock --------------------------------------------

    def send(self, data: bytes, timeout: float) -> None:
        """Send all of ``data``, waiting up to ``timeout`` seconds for room.

        :raises LinkError: if the connection is gone, or the time is over and half a frame may
            be out: use it no more then
        """
        if not self.begin(data):
            rest, self._rest = self._rest, b""
            self._send_slowly(memoryview(rest), timeout)

    def _send_slowly(self, data: memoryview, timeout: float) -> None:
        sock = self._sock
        assert sock is not None
        deadline = time.monotonic() + timeout
        # Set before the check: interrupt() sets its flag first and looks at this one then, so one
        # of the two sees the other.
        self._waiting = True
        try:
            while data:
                if self._cut or not self._patient:
                    raise LinkError("the wait to send was given up")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkError(f"the other end read nothing for {timeout:g} s")
                wait_ready(sock, write=True, timeout=min(left, SLICE))
                try:
                    data = data[self._send_now(data) :]
                except BlockingIOError:
                    pass
        except (OSError, ValueError) as error:  # ValueError: closed in the meantime
            raise LinkError(_reason(error)) from error
        finally:
            self._waiting = False

    def begin(self, data: bytes) -> bool:
        """Send of ``data`` what needs no wait, and keep the rest for the next :meth:`send`.

        :returns: whether nothing is left
        :raises LinkError: if the connection is gone
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        try:
            sent = self._send_now(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise LinkError(_reason(error)) from error
        if sent == len(data):
            return True
        self._rest = data[sent:]
        return False

    def send_some(self, data: bytes | memoryview) -> int:
        """How many bytes of ``data`` could be sent without a wait; 0 if none.

        Over TLS an unsent rest must be the beginning of what is sent next.

        :raises LinkError: if the connection is gone
        """
        try:
            return self._send_now(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkError(_reason(error)) from error

    def offer(self, data: bytes) -> bool:
        """Send ``data`` only if that needs no wait; what was begun goes out before all else.

        :returns: False if nothing of it will ever be sent
        :raises LinkError: if the connection is gone
        """
        try:
            if self._rest:
                self._rest = self._rest[self._send_now(self._rest) :]
                if self._rest:
                    return False
            sent = self._send_now(data)
        except BlockingIOError:
            # Over TLS the record may be begun, and then nothing may follow but its rest.
            if self._rest or not self.secure:
                return False
            sent = 0
        except OSError as error:
            raise LinkError(_reason(error)) from error
        self._rest = data[sent:]
        return True

    # -- by the receiver ------------------------------------------------------------------

    def receive(self, size: int) -> bytes | None:
        """What has arrived, at most ``size`` bytes; None if nothing has, ``b""`` at the end.

        :raises LinkError: if the connection broke
        """
        try:
            return self._receive_now(size)
        except BlockingIOError:
            return None
        except OSError as error:
            raise LinkError(_reason(error)) from error

    def fileno(self) -> int:
        """For selectors."""
        assert self._sock is not None
        return self._sock.fileno()

    # -- by anyone ------------------------------------------------------------------------

    def cut(self) -> None:
        """End the connection, or the attempt to make it, now: all who wait on it wake."""
        with self._life:
            self._cut = True
            if self._sock is not None:
                try:
                    # Not the method of SSLSocket, which would first turn TLS off under its users.
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
                except OSError:
                    pass  # not connected yet, or no more

    def interrupt(self) -> None:
        """Let nobody wait to send any more; sends that need no wait still pass."""
        self._patient = False
        if self._waiting:
            self.cut()

    def close(self) -> None:
        """Release the descriptor; idempotent."""
        with self._life:
            if self._sock is not None:
                self._sock.close()

    # -- TLS ------------------------------------------------------------------------------

    def _send_tls(self, data: bytes | memoryview) -> int:
        assert self._sock is not None
        with self._tls:
            try:
                return self._sock.send(data)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError) as error:
                raise BlockingIOError from error

    def _receive_tls(self, size: int) -> bytes:
        assert self._sock is not None
        with self._tls:
            try:
                return self._sock.recv(size)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError from error


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def _reason(error: BaseException) -> str:
    """Why, in words of ours where the library's could quote what the other end sent."""
    if (status := _status(error)) is not None:
        return f"refused with HTTP status {status}"
    if isinstance(error, TimeoutError | websocket.WebSocketTimeoutException):
        return "no answer in time"
    if isinstance(error, websocket.WebSocketConnectionClosedException):
        return "closed during the handshake"
    if isinstance(error, websocket.WebSocketException):
        return f"no WebSocket upgrade but another answer ({type(error).__name__})"
    return str(error) or type(error).__name__
