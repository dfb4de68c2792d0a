"""The line protocol between the conductor and its processes: one JSON object a line, both ways."""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

Json = dict[str, Any]
CONDUCTOR_FD = 0


class Commands:
    """The conductor's commands on standard input; its end ends the process."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self) -> Iterator[Json]:
        """The commands that have arrived.

        :raises SystemExit: when the conductor has gone
        """
        block = os.read(CONDUCTOR_FD, 65536)
        if not block:
            raise SystemExit(0)
        *lines, self._rest = (self._rest + block).split(b"\n")
        yield from map(json.loads, lines)


def tell(event: str, **facts: Any) -> None:
    """Tell the conductor."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def listen(backlog: int = 1024) -> socket.socket:
    """A listener on a free loopback port."""
    return socket.create_server(("127.0.0.1", 0), backlog=backlog)


Ready = Callable[[], None]


def watch(selector: selectors.BaseSelector, what: Any, ready: Ready) -> None:
    """Call ``ready`` whenever ``what`` can be read."""
    selector.register(what, selectors.EVENT_READ, ready)
