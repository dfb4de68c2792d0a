"""Loopback peers for the tests of the bus and the channels: a server that does as it is told.

Nothing in it reads or answers unless the test says so, which is what the tests are about.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

TIMEOUT = 10.0
"""How long anything that must happen may take before a test fails."""


class Peer:
    """The server's end of one WebSocket, after its handshake."""

    def __init__(self, sock: socket.socket, request: str) -> None:
        self.sock = sock
        self.request = request
        self._data = bytearray()

    @property
    def path(self) -> str:
        return self.request.split(" ", 2)[1]

    def header(self, name: str) -> str | None:
        for line in self.request.split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name.lower():
                return value.strip()
        return None

    def _take(self, count: int) -> bytes:
        while len(self._data) < count:
            block = self.sock.recv(65536)
            if not block:
                raise EOFError
            self._data += block
        taken = bytes(self._data[:count])
        del self._data[:count]
        return taken

    def frame(self) -> tuple[bool, int, bytes]:
        """The next frame: final, opcode, payload. EOFError at the end of the connection."""
        first, second = self._take(2)
        assert second & 0x80, "a client's frame must be masked"
        size = second & 0x7F
        if size == 126:
            size = int.from_bytes(self._take(2), "big")
        elif size == 127:
            size = int.from_bytes(self._take(8), "big")
        key = self._take(4)
        data = self._take(size)
        stream = (key * (size // 4 + 1))[:size]
        number = int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")
        return bool(first & 0x80), first & 0x0F, number.to_bytes(size, "big")

    def text(self) -> str:
        """The next text message."""
        final, opcode, payload = self.frame()
        assert final and opcode == 1, (final, opcode, payload)
        return payload.decode()

    def message(self, kind: str | None = None) -> dict[str, Any]:
        """The next bus message; with ``kind``, the next one of that type."""
        while True:
            message: dict[str, Any] = json.loads(self.text())
            if kind is None or message["type"] == kind:
                return message

    def send(self, opcode: int, payload: bytes = b"", *, final: bool = True) -> None:
        """Send one frame."""
        self.sock.sendall(server_frame(opcode, payload, final=final))

    def say(self, message: dict[str, Any]) -> None:
        """Send a bus message."""
        self.send(1, json.dumps(message).encode())

    def ended(self) -> bool:
        """Read to the end; whether the client closed with a Close frame."""
        closed = False
        try:
            while True:
                closed = self.frame()[1] == 8 or closed
        except (EOFError, OSError):
            return closed

    def reset(self) -> None:
        """End with a TCP reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()

    def close(self) -> None:
        self.sock.close()


def server_frame(opcode: int, payload: bytes = b"", *, final: bool = True) -> bytes:
    first = opcode | (0x80 if final else 0)
    size = len(payload)
    if size < 126:
        head = bytes((first, size))
    elif size < 65536:
        head = bytes((first, 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((first, 127)) + size.to_bytes(8, "big")
    return head + payload


class Server:
    """Listens on a loopback port; the test takes each connection itself.

    :param context: makes it speak TLS
    :param narrow: takes in little, so that a client soon has to wait
    """

    def __init__(self, *, context: ssl.SSLContext | None = None, narrow: bool = False) -> None:
        self._context = context
        self.narrow = narrow
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if narrow:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self._listener.settimeout(TIMEOUT)
        self._peers: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        self.url = f"{'wss' if context else 'ws'}://127.0.0.1:{self.port}"

    def accept_raw(self) -> socket.socket:
        """The next TCP connection, with nothing read from it."""
        sock, _ = self._listener.accept()
        sock.settimeout(TIMEOUT)
        if self._context is not None:
            sock = self._context.wrap_socket(sock, server_side=True)
        self._peers.append(sock)
        return sock

    def accept(self, status: int = 101, *, extra: str = "", after: bytes = b"") -> Peer:
        """The next connection, its request read and answered.

        :param after: sent in one piece with the answer
        """
        sock = self.accept_raw()
        request = b""
        while not request.endswith(b"\r\n\r\n"):
            block = sock.recv(4096)
            assert block, "the client went away in its handshake"
            request += block
        peer = Peer(sock, request.decode())
        if status == 101:
            key = (peer.header("Sec-WebSocket-Key") or "").encode()
            digest = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
            answer = (
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}\r\n{extra}\r\n"
            )
        else:
            answer = f"HTTP/1.1 {status} No\r\nContent-Length: 4\r\n{extra}\r\nnope"
        sock.sendall(answer.encode() + after)
        return peer

    def drop(self) -> None:
        """Close the server's ends."""
        while self._peers:
            self._peers.pop().close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.close()
        self.drop()


class Run:
    """A function on a thread of its own, and what became of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """Wait for the end; returns or raises as the function did."""
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), "it did not return"
        if self._error is not None:
            raise self._error
        return self._value

    @property
    def running(self) -> bool:
        return self._thread.is_alive()


def eventually(check: Callable[[], bool]) -> bool:
    """Whether ``check`` becomes true; for what no event tells of, such as counts of the system."""
    deadline = time.monotonic() + TIMEOUT
    while not check():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.005)
    return True


def descriptors() -> int:
    """Open file descriptors of this process."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not list descriptors in /proc")
    gc.collect()  # so that what other tests left is not counted now and closed later
    return len(os.listdir("/proc/self/fd"))


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and one file with it and its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("the openssl program, which makes a certificate, is not there")
    key, cert, both = (directory / name for name in ("key.pem", "cert.pem", "both.pem"))
    options = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=loopback"
    subprocess.run(
        [
            *[program, "req", "-x509", *options.split()],
            *["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        ],
        check=True,
        capture_output=True,
    )
    both.write_text(cert.read_text() + key.read_text())
    return cert, both


def server_context(both: Path, *, client_ca: Path | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    return context
