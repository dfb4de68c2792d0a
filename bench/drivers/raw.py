"""Limit: a thread per stream copies bytes from socket to socket and understands nothing."""

from __future__ import annotations

import json
import socket

from .plain import REQUEST, bytes_to, run


def ask(stub: int) -> socket.socket:
    """A connection on which the answer comes."""
    body = json.dumps(REQUEST).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    sock = socket.create_connection(("127.0.0.1", stub))
    sock.sendall(head.encode() + body)
    return sock


def relay(stub: int, sink: int, number: int) -> None:
    """Copy one answer."""
    with bytes_to(sink, number) as out, ask(stub) as upstream:
        while block := upstream.recv(65536):
            out.sendall(block)


if __name__ == "__main__":
    run(relay)
