"""Ends a TCP connection that another thread reads or writes."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

_RESET: Final = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)


def cut_off(sock: socket.socket) -> None:
    """End it, from any thread: who waits on it wakes. Its owner still has to close the socket.

    The close is then a reset. A peer that waits for room would not notice a mere one before its
    next window probe, up to a minute away, if all that came was read: what is shut opens its window
    no more.
    """
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        # The plain method: the one of a TLS socket drops the TLS state under its reader's feet.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        pass  # Not connected yet, or closed already.
