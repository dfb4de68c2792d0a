"""The opening handshake of a WebSocket to the engine.

websocket-client judges every answer but the usual one, which takes the offer and says nothing odd:
that is read here, as reading it byte by byte would be a tenth of the time until a stream's first
frame. Over TLS, where nothing can be peeked at, all of it is websocket-client's.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult

import websocket

from ..heads import Head, head_size, host_header, read_head, request_head

_BLOCK = 4096
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3


def upgrade(
    sock: socket.socket, url: SplitResult, token: str | None, meanwhile: Callable[[], None]
) -> None:
    """Make ``sock``, which is connected to where ``url`` says, a WebSocket.

    Nothing behind the head of the answer is read.

    :param token: bearer for the handshake (engine protocol 1.2)
    :param meanwhile: called while the other end thinks about it; must not raise
    :raises websocket.WebSocketException: if the other end refuses, or speaks something else
    :raises OSError: if the connection breaks, or its timeout is over
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if isinstance(sock, ssl.SSLSocket):
        meanwhile()
        _by_library(sock, url, headers)
        return
    key = base64.b64encode(os.urandom(16)).decode("ascii")
    fields = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": key,
        "Sec-WebSocket-Version": "13",
        **headers,
    }
    host = host_header(url.hostname or "", url.port, usual=80)
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    sock.sendall(request_head("GET", path, host, fields))
    meanwhile()
    answer = _head(sock)
    if not accepted(read_head(answer), key):
        _by_library(_Answered(sock, answer), url, {**headers, "Sec-WebSocket-Key": key})


def accepted(head: Head | None, key: str) -> bool:
    """Whether ``head`` is the usual answer to an offer with ``key``."""
    if head is None or head.status != 101:
        return False
    fields = head.headers
    proof = base64.b64encode(hashlib.sha1(key.encode("ascii") + _GUID).digest()).decode("ascii")
    return (
        fields.get("upgrade", "").lower() == "websocket"
        and fields.get("connection", "").lower() == "upgrade"
        and fields.get("sec-websocket-accept") == proof
        and not fields.keys() & {"sec-websocket-protocol", "sec-websocket-extensions"}
    )


def _head(sock: socket.socket) -> bytes:
    """The head and no byte more; what there is, if the other end closes before or answers in
    another form."""
    head = b""
    while head_size(head) is None and (peeked := sock.recv(_BLOCK, socket.MSG_PEEK)):
        size = head_size(head + peeked)
        head += sock.recv(len(peeked) if size is None else size - len(head))
    return head


def _by_library(sock: Any, url: SplitResult, headers: dict[str, str]) -> None:
    # A redirect would take the bearer elsewhere. Only browsers owe an Origin.
    websocket.create_connection(
        url.geturl(),
        socket=sock,
        header=headers,
        redirect_limit=0,
        suppress_origin=True,
        enable_multithread=False,
    )


class _Answered:
    """A socket whose answer has come already, whatever is sent."""

    def __init__(self, sock: socket.socket, answer: bytes) -> None:
        self._sock = sock
        self._answer = answer

    def send(self, data: bytes) -> int:
        return len(data)

    def recv(self, size: int) -> bytes:
        taken, self._answer = self._answer[:size], self._answer[size:]
        return taken or self._sock.recv(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
