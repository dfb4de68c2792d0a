"""The one TCP or TLS connection of one request, in a form that an abort can cut at any moment.

``requests`` and ``urllib3`` hand out a socket only with the response, which llama-server sends when
a slot is free: minutes late for an abort. And closing a response from another thread does not wake
its reader. So a :class:`Line` dials the socket itself and keeps it; :meth:`Line.cut` shuts it down,
whether it is connecting, in its TLS handshake, waiting for headers or reading. The classes below
make ``requests`` use such a line: one adapter without any pool, a connection of its own for each
request, so that a late abort cannot hit somebody else's.
"""

from __future__ import annotations

import errno
import functools
import http.client
import io
import os
import queue
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError
from urllib3.response import BaseHTTPResponse
from urllib3.util import wait_for_write

from ..calls import Call

_SLICE = 0.25
"""Seconds between looks at the abort while a connect is under way. Linux needs none: there the
shutdown of a connecting socket ends the wait at once."""
_HEAD = 2048
"""Bytes of one read of an answer's head: that and the first event."""
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
        self._sock: socket.socket | None = None
        self._cut = False
        self._lock = threading.Lock()

    def open(self) -> None:
        """From now on an abort of the call cuts the line.

        :raises Interrupted: if the call was aborted before
        """
        if self._call is not None:
            self._call.add_waker(self.cut)

    def cut(self) -> None:
        """End whatever the line waits for, now and later; from any thread, never blocks."""
        with self._lock:
            self._cut = True
            if self._sock is not None:
                _shut(self._sock)

    def hold(self, sock: socket.socket) -> None:
        """``sock`` is what :meth:`cut` shuts from now on."""
        with self._lock:
            self._sock = sock
            if self._cut:
                _shut(sock)

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

    def dial(self, host: str, port: int) -> socket.socket:
        """Connect to the first address of ``host`` that accepts.

        :raises OSError: as the system said it; :class:`TimeoutError` after the connect timeout
        :raises Interrupted: if the call is aborted
        """
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


def _shut(sock: socket.socket) -> None:
    try:
        # The plain method: the one of a TLS socket drops the TLS state under its reader's feet.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        pass  # Not connected yet, or closed already.


class Source(io.RawIOBase):
    """What ``http.client`` reads an answer's head from: the socket, with the deadline of its line.

    Who reads the body goes on with :meth:`receive`. Until this is closed the socket lives, whoever
    else closes that: so the objects of an answer need not stay for as long as its body comes.
    """

    def __init__(self, file: io.RawIOBase, sock: socket.socket, line: Line) -> None:
        self._rest = b""
        """What was received and is not taken yet."""
        self._file = file
        """Kept open: the socket counts its files, and lives until the last is closed."""
        self._sock = sock
        self._line = line

    def receive(self, size: int) -> bytes:
        """What arrives next, at most ``size`` bytes; ``b""`` at the end."""
        if self._rest:
            return self._cut(size)
        # A timeout for each read alone would let a peer that drips bytes go on for ever.
        if self._line.deadline is not None:
            self._sock.settimeout(self._line.left())
        return self._sock.recv(size)

    def readline(self, size: int | None = -1) -> bytes:
        """Up to the next line end, or ``size`` bytes if there is none among them."""
        limit = sys.maxsize if size is None or size < 0 else size
        kept = b""
        while not (end := kept.find(b"\n", 0, limit) + 1) and len(kept) < limit:
            block = self.receive(_HEAD)
            if not block:
                break
            kept += block
        self._rest = kept + self._rest
        return self._cut(end or min(len(kept), limit))

    def _cut(self, size: int) -> bytes:
        cut, self._rest = self._rest[:size], self._rest[size:]
        return cut

    def close(self) -> None:
        self._file.close()
        super().close()


def _response(
    line: Line, sock: socket.socket, *args: Any, **kwargs: Any
) -> http.client.HTTPResponse:
    response = http.client.HTTPResponse(sock, *args, **kwargs)
    response.fp = Source(response.fp.detach(), sock, line)  # type: ignore[assignment]
    return response


class _Connection(HTTPConnection):
    def __init__(self, *args: Any, line: Line, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._line = line
        self.response_class = functools.partial(_response, line)  # type: ignore[assignment]

    def _new_conn(self) -> socket.socket:
        return _dial(self._line, self)

    def connect(self) -> None:
        super().connect()
        _connected(self._line, self)


class _TlsConnection(HTTPSConnection):
    def __init__(self, *args: Any, line: Line, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._line = line
        self._twins = ExitStack()
        self.response_class = functools.partial(_response, line)  # type: ignore[assignment]

    def _new_conn(self) -> socket.socket:
        sock = _dial(self._line, self)
        # The handshake takes the descriptor away from ``sock``, and its own socket object is
        # known only afterwards: until then a twin stands for both.
        self._line.hold(self._twins.enter_context(sock.dup()))
        return sock

    def connect(self) -> None:
        with self._twins:
            super().connect()
            self._line.hold(self.sock)
        _connected(self._line, self)


def _dial(line: Line, connection: HTTPConnection) -> socket.socket:
    """Dial with the errors that urllib3 expects."""
    host, port = connection.host, connection.port
    try:
        return line.dial(host, port)
    except TimeoutError as error:
        raise ConnectTimeoutError(connection, f"no connection in time: {error}") from error
    except OSError as error:
        raise NewConnectionError(connection, f"no connection: {error}") from error


def _connected(line: Line, connection: HTTPConnection) -> None:
    """urllib3 would send the body under the connect timeout: too short for large images."""
    line.made(connection.sock)
    connection.timeout = line.left()
    connection.sock.settimeout(connection.timeout)


class _Once:
    """What :class:`requests.adapters.HTTPAdapter` takes for a pool: one connection, used once.

    A pool of urllib3 made for a single request takes as long as the request itself.
    """

    def __init__(self, connection: _Connection | _TlsConnection) -> None:
        self._connection = connection

    def urlopen(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], **_: Any
    ) -> BaseHTTPResponse:
        """As of :class:`urllib3.HTTPConnectionPool`; neither retries nor redirects."""
        connection = self._connection
        try:
            connection.connect()
            try:
                connection.request(
                    method,
                    url,
                    body=body,
                    headers=headers,
                    preload_content=False,
                    decode_content=False,
                )
            except (BrokenPipeError, ConnectionResetError):
                pass  # It may have answered before it had all of the body, and closed.
            return connection.getresponse()
        except BaseException:
            connection.close()
            raise


class LineRequest(requests.PreparedRequest):
    """A prepared request and the line it goes over.

    Prepared by hand, since all its parts are known to be sound: ``prepare()`` takes longer than
    everything else before the first byte together.

    :param url: ASCII, as :func:`provider_llamacpp.server.upstream.normalise_api_url` makes it
    """

    def __init__(
        self, line: Line, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> None:
        super().__init__()
        self.line = line
        self.method = method
        self.url = url
        self.headers = requests.structures.CaseInsensitiveDict(headers)
        self.body = body


class Adapter(HTTPAdapter):
    """Sends each :class:`LineRequest` over its own line; keeps no connection.

    :param tls: the context for ``https``, asked for when first needed
    """

    def __init__(self, tls: Callable[[], ssl.SSLContext]) -> None:
        super().__init__(pool_connections=1, pool_maxsize=1)
        self._tls = tls

    def get_connection_with_tls_context(
        self, request: requests.PreparedRequest, verify: Any, proxies: Any = None, cert: Any = None
    ) -> Any:
        """One connection, which ends with its answer."""
        assert isinstance(request, LineRequest)
        parts = urlsplit(request.url)
        host = parts.hostname
        assert isinstance(host, str)
        if parts.scheme == "https":
            context = self._tls()
            return _Once(
                _TlsConnection(host, parts.port or 443, line=request.line, ssl_context=context)
            )
        return _Once(_Connection(host, parts.port or 80, line=request.line))

    def cert_verify(self, conn: Any, url: Any, verify: Any, cert: Any) -> None:
        """Nothing: the context has all of it."""


class Session(requests.Session):
    """A session that takes nothing from the environment and keeps nothing between requests."""

    def __init__(self, tls: Callable[[], ssl.SSLContext]) -> None:
        super().__init__()
        self.trust_env = False
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        adapter = Adapter(tls)
        self.adapters.clear()
        self.mount("http://", adapter)
        self.mount("https://", adapter)

    def get_redirect_target(self, resp: requests.Response) -> None:
        """None: even with redirects off, requests would read the whole body of one."""
        return None
