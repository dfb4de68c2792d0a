"""What the drivers that are no workers share: being told what to begin, and the request."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable

REQUEST = {
    "model": "stub",
    "messages": [{"role": "user", "content": "Go on"}],
    "stream": True,
    "stream_options": {"include_usage": True},
}


def run(relay: Callable[[int, int, int], None]) -> None:
    """Call ``relay(stub_port, sink_port, number)`` on a thread per stream, until the sink goes."""
    stub, sink = int(sys.argv[1]), int(sys.argv[2])
    with socket.create_connection(("127.0.0.1", sink)) as control:
        control.sendall(b"PLAIN\n")
        for line in control.makefile("rb"):
            threading.Thread(target=relay, args=(stub, sink, int(line)), daemon=True).start()


def bytes_to(sink: int, number: int) -> socket.socket:
    """A connection on which the sink takes bytes of a stream."""
    sock = socket.create_connection(("127.0.0.1", sink))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(b"BYTES %d\n" % number)
    return sock
