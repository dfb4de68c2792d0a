"""llama-server over HTTP: one request, or one stream, each on a connection of its own.

Knows HTTP and when to give up; knows neither SSE nor what an answer means. Failures leave as
:class:`~provider_llamacpp.errors.ProviderError`, an abort as
:class:`~provider_llamacpp.errors.Interrupted`, whatever the call waited for.

The environment has no say: no proxies, no netrc, no redirects, no compression. Connections are not
kept: llama-server closes idle ones after five seconds, and making one takes less than finding out.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from .. import jsontext
from .._version import VERSION
from ..calls import Call
from ..errors import ProviderError, SettingsError
from ..events.classify import classify, network_error
from .address import Target, normalise_api_url
from .dialing import Line
from .stream import FAULTS, UpstreamStream
from .transport import PORTS, Adapter, LineRequest

__all__ = ["Reply", "Target", "Upstream", "normalise_api_url"]

REPLY_LIMIT = 64 * 1024 * 1024
"""Bytes of an answer that is read as a whole."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer read as a whole."""

    status: int
    body: bytes = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether the status is a success."""
        return 200 <= self.status < 300

    def json(self) -> Any:
        """:raises ValueError: if the body is not JSON"""
        return jsontext.loads(self.body)


class Upstream:
    """Makes requests; holds no connections. One for a worker; safe to share between threads.

    :param connect_timeout: seconds for names, TCP and TLS together
    :param ca_file: CA certificates (PEM) for ``https``; None uses those of ``requests``
    :param client_cert: client certificate and key in one PEM file
    :raises SettingsError: if one of the files cannot be used
    """

    def __init__(
        self,
        *,
        connect_timeout: float = 10.0,
        ca_file: str | None = None,
        client_cert: str | None = None,
    ) -> None:
        self._connect_timeout = connect_timeout
        self._files = ca_file, client_cert
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._adapter = Adapter(self._tls)
        if ca_file or client_cert:
            self._tls()

    def line(self, call: Call | None = None, timeout: float | None = None) -> Line:
        """The connection of a request to come, for who wants to know what became of it.

        :param call: whose abort cuts it
        :param timeout: seconds from now on; None is without end
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        return Line(call, connect_timeout=self._connect_timeout, deadline=deadline)

    def dial_ahead(self, target: Target, call: Call) -> Line:
        """The connection of a request to come, made already; what that met is told when the request
        goes out. To be closed by the caller if none does.

        :raises Interrupted: if the call is aborted
        """
        parts, line = urlsplit(target.root), self.line(call)
        try:
            line.dial_ahead(parts.hostname or "", parts.port or PORTS[parts.scheme])
        except BaseException:
            line.close()
            raise
        return line

    def open_stream(
        self,
        target: Target,
        path: str,
        body: bytes | None,
        call: Call,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        classify: Callable[[int, bytes], ProviderError] = classify,
        line: Line | None = None,
        idle: float | None = None,
    ) -> UpstreamStream:
        """Send ``body`` (JSON) and wait, as long as it takes, for the headers of a success.

        :param path: below the root, with its leading slash
        :param headers: more of them
        :param classify: turns status and body of a failure into the error to raise
        :param line: of :meth:`line`; its deadline is that of the headers, not of the body
        :param idle: seconds without a byte after which the body counts as broken off
        :raises ProviderError: for any other status, and if the server cannot be reached
        :raises Interrupted: if the call is aborted
        """
        line = line or self.line(call)
        stream = self._open(target, method, path, body, call, headers, line)
        try:
            if 200 <= stream.status < 300:
                line.lift(idle)
                return stream
            raise classify(stream.status, stream.read_error())
        except BaseException:
            stream.close()
            raise

    def request(
        self,
        target: Target,
        method: str,
        path: str,
        payload: object | None = None,
        *,
        timeout: float,
        call: Call | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = REPLY_LIMIT,
        line: Line | None = None,
    ) -> Reply:
        """One short request; the answer whatever its status, but a redirect.

        :param payload: sent as JSON; None sends no body
        :param timeout: seconds for all of it
        :param limit: bytes the answer may have
        :param line: of :meth:`line`; takes the place of ``timeout``
        :raises ProviderError: ``transient`` if no whole answer came, ``permanent`` for a redirect,
            an answer too long and a payload that JSON has no form for
        :raises Interrupted: if the call is aborted
        """
        try:
            body = None if payload is None else jsontext.dumpb(payload)
        except ValueError as error:
            raise ProviderError("permanent", f"the request {error}") from error
        line = line or self.line(call, timeout)
        with self._open(target, method, path, body, call, headers, line) as stream:
            if stream.status >= 400:
                return Reply(stream.status, stream.read_error())
            return Reply(stream.status, stream.read_all(limit))

    def _open(
        self,
        target: Target,
        method: str,
        path: str,
        body: bytes | None,
        call: Call | None,
        headers: Mapping[str, str] | None,
        line: Line,
    ) -> UpstreamStream:
        fields = _headers(target, body, headers)
        request = LineRequest(line, method, target.root, path, fields, body)
        try:
            line.open()
            # The line has the timeouts.
            response = self._adapter.send(request, stream=True)
            stream = UpstreamStream(response, line, call, target.root, target.key)
        except FAULTS as error:
            line.close()
            line.check()
            raise network_error(error, target.root) from error
        except BaseException:
            line.close()
            raise
        try:
            _refuse_detours(stream, target.root)
        except ProviderError:
            stream.close()
            raise
        return stream

    def _tls(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                self._context = _context(*self._files)
            return self._context


def _context(ca_file: str | None, client_cert: str | None) -> ssl.SSLContext:
    # certifi comes with requests. Its content is asked for and not its file: in a zipapp there is
    # none, and a temporary copy may have been cleaned away by the time of the first connection.
    import certifi

    try:
        context = ssl.create_default_context(
            cafile=ca_file, cadata=None if ca_file else certifi.contents()
        )
        context.set_alpn_protocols(["http/1.1"])
    except OSError as error:
        raise SettingsError(f"ca_file: no CA certificates can be read there ({error})") from error
    if client_cert:
        try:
            context.load_cert_chain(client_cert)
        except OSError as error:
            raise SettingsError(
                f"client_cert: no certificate and key can be read there ({error})"
            ) from error
    return context


def _headers(target: Target, body: bytes | None, more: Mapping[str, str] | None) -> dict[str, str]:
    """:raises ProviderError: ``permanent``, naming the header whose value cannot be sent"""
    fields = {
        "User-Agent": f"provider-llamacpp/{VERSION}",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
    }
    if body is not None:
        fields["Content-Type"] = "application/json"
        fields["Content-Length"] = str(len(body))
    if target.key:
        if not _sendable(target.key):
            raise ProviderError(
                "permanent", "the API key holds characters that cannot be sent in a header"
            )
        fields["Authorization"] = f"Bearer {target.key}"
    for name, value in (more or {}).items():
        if not _sendable(value):
            raise ProviderError("permanent", f"the value of header {name} cannot be sent")
        fields[name] = value
    return fields


def _sendable(value: str) -> bool:
    """Visible ASCII and inner blanks: nothing that could begin another header."""
    return value.isascii() and value.isprintable() and value == value.strip()


def _refuse_detours(stream: UpstreamStream, root: str) -> None:
    """What would lead elsewhere, or comes in a form that was not asked for."""
    if 300 <= stream.status < 400:
        raise classify(stream.status, b"", location=stream.headers.get("Location"))
    encoding = stream.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ProviderError(
            "permanent",
            f"{root} compresses its answers, which it was asked not to do (check api_url)",
        )
