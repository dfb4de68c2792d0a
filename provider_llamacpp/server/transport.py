"""``requests`` over a :class:`~provider_llamacpp.server.dialing.Line`: without session and pool.

Each request has a connection of its own, so that a late abort cannot hit somebody else's. Nothing
is kept from one to the next, and nothing taken from the environment: so there is an adapter and no
session, which would know cookies, proxies, netrc and redirects. urllib3 would make connections by
other means, and takes longer for a request than the server does until its first token: its place
below the adapter is taken here, with ``http.client`` for the unusual answer.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter

from ..heads import Head, head_size, host_header, read_head, request_head
from .dialing import Line

PORTS = {"http": 80, "https": 443}
"""Where a server is whose address names no port."""
_HEAD = 2048
"""Bytes of one read of an answer's head: that and the first event."""
_SMALL_BODY = 65536
"""Bytes of a request that leave in one go with its head: so the server wakes once."""


class Source:
    """The socket of an answer, with the deadline of its line."""

    def __init__(self, sock: socket.socket, line: Line) -> None:
        self._rest = b""
        """What was received and is not taken yet."""
        self._sock = sock
        self._line = line
        self.arrived: Callable[[int], bytes] = sock.recv
        """What has arrived, without a wait, while :meth:`share` is on; ``b""`` at the end. Raises
        :class:`BlockingIOError` if nothing has."""
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

    def head(self) -> bytes:
        """The head of the answer, with its blank line; what there is, if the peer ends before or
        answers in another form."""
        kept = b""
        while (size := head_size(kept)) is None and (block := self.receive(_HEAD)):
            kept += block
        self._rest = kept
        return self._cut(len(kept) if size is None else size)

    def give_back(self, data: bytes) -> None:
        """``data`` is to be taken again."""
        self._rest = data + self._rest

    def _cut(self, size: int) -> bytes:
        cut, self._rest = self._rest[:size], self._rest[size:]
        return cut

    # -- for ``http.client`` --------------------------------------------------------------

    def makefile(self, mode: str) -> Source:
        """Itself."""
        return self

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

    def flush(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing: the socket is its line's."""


class Raw:
    """What ``requests`` makes its response of, and where the body is read."""

    def __init__(self, head: Head, source: Source) -> None:
        self.status = head.status
        self.reason = head.reason
        self.headers = head.headers
        self.chunked = head.chunked
        self.length = head.length
        self.source = source


def _answer(source: Source, method: str) -> Raw:
    """Wait for the head of the answer.

    :raises OSError: if the connection breaks
    :raises http.client.HTTPException: if what comes is no HTTP
    """
    data = source.head()
    head = read_head(data) if method != "HEAD" else None
    if head is None:
        source.give_back(data)
        reply = http.client.HTTPResponse(source, method=method)  # type: ignore[arg-type]
        reply.begin()
        headers = {name.lower(): reply.getheader(name, "") for name in reply.headers}
        head = Head(reply.status, reply.reason, headers, bool(reply.chunked), reply.length)
    return Raw(head, source)


class _Once:
    """What :class:`requests.adapters.HTTPAdapter` takes for a pool: one connection, used once.

    :param tls: None for plain HTTP
    """

    def __init__(self, line: Line, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._line = line
        self._host = host
        self._port = port
        self._tls = tls

    def urlopen(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], **_: Any
    ) -> Raw:
        """As of :class:`urllib3.HTTPConnectionPool`; neither retries nor redirects."""
        line = self._line
        usual = PORTS["https" if self._tls else "http"]
        host = host_header(self._host, self._port, usual=usual)
        head = request_head(method, url, host, headers)
        sock = self._connect()
        line.made(sock)
        # Not the time to connect: that is too short for large images.
        sock.settimeout(line.left())
        body = body or b""
        try:
            if len(body) > _SMALL_BODY:
                sock.sendall(head)
                sock.sendall(body)
            else:
                sock.sendall(head + body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # It may have answered before it had all of the body, and closed.
        return _answer(Source(sock, line), method)

    def _connect(self) -> socket.socket:
        try:
            sock = self._line.dial(self._host, self._port)
            if self._tls is not None:
                sock = self._tls.wrap_socket(
                    sock, server_hostname=self._host, do_handshake_on_connect=False
                )
                self._line.hold(sock)
                sock.do_handshake()
        except TimeoutError as error:
            raise requests.ConnectTimeout(f"no connection in time: {error}") from error
        return sock


class LineRequest(requests.PreparedRequest):
    """A prepared request and the line it goes over.

    Prepared by hand, since all its parts are known to be sound: ``prepare()`` takes longer than
    everything else before the first byte together.

    :param root: ASCII, as :func:`provider_llamacpp.server.address.normalise_api_url` makes it
    :param path: below the root
    """

    def __init__(
        self,
        line: Line,
        method: str,
        root: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> None:
        super().__init__()
        self.line = line
        self.method = method
        self.parts = urlsplit(root)
        self.path = self.parts.path + path
        self.url = root + path
        self.headers = requests.structures.CaseInsensitiveDict(headers)
        self.body = body


class LineResponse(requests.Response):
    """What there is before the body is read, which is read from ``raw``.

    Made by hand like its request: what ``requests`` fills in beside it, a jar of cookies and a
    guess of the encoding, takes as long as reading the head.
    """

    def __init__(self, request: LineRequest, raw: Raw) -> None:
        self.history = []
        self.request = request
        self.url = request.url or ""
        self.raw = raw
        self.status_code = raw.status
        self.reason = raw.reason
        self.headers = requests.structures.CaseInsensitiveDict(raw.headers)
        self.encoding = None


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
        parts = request.parts
        tls = self._tls() if parts.scheme == "https" else None
        return _Once(request.line, parts.hostname or "", parts.port or PORTS[parts.scheme], tls)

    def init_poolmanager(self, *_: Any, **__: Any) -> None:
        """None: there is no pool."""

    def cert_verify(self, conn: Any, url: Any, verify: Any, cert: Any) -> None:
        """Nothing: the context has all of it."""

    def request_url(self, request: requests.PreparedRequest, proxies: Any) -> str:
        """The path: there is no proxy."""
        assert isinstance(request, LineRequest)
        return request.path

    def build_response(self, request: requests.PreparedRequest, raw: Any) -> requests.Response:
        """What the head tells; of an answer that came by other means, what ``requests`` makes."""
        if isinstance(request, LineRequest) and isinstance(raw, Raw):
            return LineResponse(request, raw)
        return super().build_response(request, raw)
