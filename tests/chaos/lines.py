"""The lines between the worker, its engine and its server, and the engine behind one of them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from proxy import Link, Proxy

from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.serving import Serving


class TimedLink(Link):
    """Knows for how long nothing can have reached its client."""

    def __init__(self, proxy: NarrowProxy, number: int, client: socket.socket) -> None:
        super().__init__(proxy, number, client)
        self._by_port = proxy.by_port
        self._last = self._next = time.monotonic()
        self._longest = (0.0, self._last)

    def silence(self) -> tuple[float, float]:
        """The longest such time: its seconds, and when it began.

        From before one send until after the next: the client has seen no shorter one.
        """
        return max(self._longest, (time.monotonic() - self._last, self._last))

    def _forward(self, server: socket.socket) -> None:
        self._by_port[server.getsockname()[1]] = self
        super()._forward(server)

    def _allowed(self, block: bytes) -> bytes:
        self._next = time.monotonic()
        return super()._allowed(block)

    def _count(self, sent: int) -> bool:
        self._longest = self.silence()
        self._last = self._next
        return super()._count(sent)


class NarrowProxy(Proxy):
    """Takes little into its buffers, so that a caller that does not read is felt soon.

    :ivar by_port: the connections, by the port that the server knows them by
    """

    buffer = 65536

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.by_port: dict[int, TimedLink] = {}

    def __enter__(self) -> NarrowProxy:
        super().__enter__()
        return self

    def forget(self) -> None:
        """Drop the connections that have ended."""
        with self._changing:
            self.links[:] = [link for link in self.links if not link.ended.is_set()]
        self._threads[:] = [thread for thread in self._threads if thread.is_alive()]

    def _take(self, client: socket.socket, _: int) -> None:
        link = TimedLink(self, len(self.links), client)
        thread = threading.Thread(target=link.run, name="proxy-link", daemon=True)
        self._threads.append(thread)
        with self._changing:
            self.links.append(link)
        thread.start()


class _ProxiedServing(Serving):
    on_end: Callable[[Any, int], None]

    def _refusal(self, connection: Any, request: Any) -> Any:
        del request.headers["Host"]
        request.headers["Host"] = min(self.hosts)
        return super()._refusal(connection, request)

    def _read(self, connection: Any, peer: Any, outbox: Any) -> None:
        port: int = connection.remote_address[1]
        try:
            super()._read(connection, peer, outbox)
        finally:
            self.on_end(peer, port)


class ProxiedEngine(LoopbackEngine):
    """Takes the proxy's address for its own.

    :param on_end: called with a worker and the port of its connection when that has ended, before
        its calls fail
    """

    _SERVING = _ProxiedServing

    def __init__(
        self, on_frame: Callable[[Any, dict[str, Any]], None], on_end: Callable[[Any, int], None]
    ) -> None:
        super().__init__(on_frame=on_frame)
        assert isinstance(self._serving, _ProxiedServing)
        self._serving.on_end = on_end
