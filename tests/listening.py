"""A port of this machine that is opened, closed, and opened again."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

PATIENCE = 30.0
"""Seconds after which a wait that should have ended long ago fails its test."""


class Listener:
    """Listens on loopback. The port is the same each time it is opened.

    :param take: called with each connection and its other end's port, on the listener's thread
    :param buffer: bytes the system keeps for a connection that nobody reads; None leaves it to it
    """

    def __init__(
        self, take: Callable[[socket.socket, int], None], *, buffer: int | None = None
    ) -> None:
        self.port = 0
        self._take = take
        self._buffer = buffer
        self._open: tuple[socket.socket, threading.Thread] | None = None

    def open(self) -> None:
        """Take connections from now on."""
        assert self._open is None, "it is open"
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(256)
        self.port = listener.getsockname()[1]
        thread = threading.Thread(target=self._accept, args=[listener], daemon=True)
        self._open = listener, thread
        thread.start()

    def close(self) -> None:
        """Refuse connections from now on; those that were taken stay. Idempotent."""
        was, self._open = self._open, None
        if was is not None:
            listener, thread = was
            # Closing alone does not wake the thread.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, address = listener.accept()
            except OSError:
                return
            self._take(sock, address[1])
