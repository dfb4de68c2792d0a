"""``requests`` over a :class:`~provider_llamacpp.server.dialing.Line`: a session without any pool.

Each request has a connection of its own, so that a late abort cannot hit somebody else's. What of
``requests`` and ``urllib3`` would make one by other means is replaced here, and nothing else.
"""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError
from urllib3.response import BaseHTTPResponse

from .dialing import Line

_HEAD = 2048
"""Bytes of one read of an answer's head: that and the first event."""


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
        self.patience: float | None = None
        """Seconds a wait for a read lasts at most, as :meth:`share` found it."""

    def receive(self, size: int) -> bytes:
        """What arrives next, at most ``size`` bytes; ``b""`` at the end."""
        if self._rest:
            return self._cut(size)
        # A timeout for each read alone would let a peer that drips bytes go on for ever.
        if self._line.deadline is not None:
            self._sock.settimeout(self._line.left())
        return self._sock.recv(size)

    def arrived(self, size: int) -> bytes:
        """What has arrived, without a wait, while :meth:`share` is on; ``b""`` at the end.

        :raises BlockingIOError: if nothing has
        """
        return self._sock.recv(size)

    def share(self) -> int | None:
        """From now on there is no wait for what arrives; returns the descriptor that tells of it.

        None, and all as before, if no descriptor tells everything: over TLS, or while something is
        here already.
        """
        if self._rest or isinstance(self._sock, ssl.SSLSocket) or self._line.deadline is not None:
            return None
        self.patience = self._sock.gettimeout()
        self._sock.setblocking(False)
        return self._sock.fileno()

    def unshare(self) -> None:
        """Wait again as before :meth:`share`."""
        self._sock.settimeout(self.patience)

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

    :param url: ASCII, as :func:`provider_llamacpp.server.address.normalise_api_url` makes it
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
