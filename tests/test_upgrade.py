"""The opening handshake: what is accepted here, websocket-client accepts as well."""

from __future__ import annotations

import base64
import hashlib
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
import websocket
from bus_peers import Run
from hypothesis import given
from hypothesis import strategies as st

from provider_llamacpp.bus.upgrade import accepted, upgrade
from provider_llamacpp.heads import read_head

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
PROOF = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # RFC 6455, 1.3


class Answering:
    """A socket that has its answer, whatever is sent."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def send(self, data: bytes) -> int:
        return len(data)

    def recv(self, size: int) -> bytes:
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def gettimeout(self) -> float:
        return 1.0

    def close(self) -> None:
        pass


_fields = st.lists(
    st.tuples(
        st.sampled_from(
            ["Upgrade", "Connection", "Sec-WebSocket-Accept", "Sec-WebSocket-Protocol", "Date"]
        ),
        st.sampled_from(["websocket", "WebSocket", "Upgrade", "upgrade, x", PROOF, "x", ""]),
    ),
    max_size=3,
)


@given(st.sampled_from([101, 101, 101, 200, 302, 404]), st.booleans(), _fields)
def test_what_is_accepted_the_library_accepts(
    status: int, whole: bool, more: list[tuple[str, str]]
) -> None:
    usual = [("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", PROOF)]
    lines = [f"{name}: {value}\r\n" for name, value in (usual if whole else []) + more]
    data = f"HTTP/1.1 {status} Switching\r\n{''.join(lines)}\r\n".encode()
    if accepted(read_head(data), KEY):
        websocket.create_connection(
            "ws://h:1/", socket=Answering(data), header={"Sec-WebSocket-Key": KEY}
        )


def test_the_usual_answer_is_accepted() -> None:
    head = (
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {PROOF}\r\n\r\n"
    )
    assert accepted(read_head(head.encode()), KEY)
    assert not accepted(read_head(head.encode()), KEY.replace("d", "e"))
    assert not accepted(read_head(head.replace("101", "200").encode()), KEY)
    assert not accepted(None, KEY)


def _read_request(sock: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(4096)
    return data


@pytest.mark.parametrize("more", ["", "X: \u00e4\r\n", "Date: 1\r\nDate: 2\r\n"])
def test_no_byte_behind_the_head_is_taken(more: str) -> None:
    """Neither by the short way nor by the library's."""
    events: list[Any] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        url = urlsplit("ws://h:1/ws/channels/c?key=k")
        opening = Run(lambda: upgrade(ours, url, "t", lambda: events.append("meanwhile")))
        request = _read_request(theirs).decode()
        assert request.startswith("GET /ws/channels/c?key=k HTTP/1.1\r\nHost: h:1\r\n")
        assert "\r\nAuthorization: Bearer t\r\n" in request
        key = request.partition("Sec-WebSocket-Key: ")[2].partition("\r\n")[0]
        proof = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        head = (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {base64.b64encode(proof).decode()}\r\n{more}\r\n"
        ).encode()
        theirs.sendall(head[:50])
        theirs.sendall(head[50:-3])
        theirs.sendall(head[-3:] + b"\x81\x01x")
        opening.result()
        assert events == ["meanwhile"]
        assert ours.recv(10) == b"\x81\x01x"
