"""One thread that notices which channels' other ends have closed.

It waits on all their sockets at once: a thread for each stream would only wait for an EOF.
"""

from __future__ import annotations

import logging
import selectors
import ssl
import threading
from collections import deque
from collections.abc import Callable

from .link import Link, tls_context
from .waiting import Waker

log = logging.getLogger(__name__)


class ChannelWatch:
    """One thread that notices which channels' other ends have closed.

    :param name: of its thread
    """

    def __init__(self, name: str = "llamacpp-channels") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._orders: deque[tuple[Link, Callable[[], bool] | None, threading.Event | None]] = (
            deque()
        )
        self._thread: threading.Thread | None = None
        self._waker: Waker | None = None
        self._context: dict[tuple[str | None, str | None], ssl.SSLContext] = {}

    @property
    def running(self) -> bool:
        """Whether ends are noticed."""
        return self._waker is not None

    def start(self) -> None:
        """Start the thread; may follow a :meth:`stop`.

        :raises RuntimeError: if it runs
        """
        with self._lock:
            if self._waker is not None:
                raise RuntimeError("the watch runs already")
            self._waker = waker = Waker()
        self._thread = threading.Thread(
            target=self._run, args=(waker, selectors.DefaultSelector()), name=self._name
        )
        self._thread.daemon = True
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread; channels go on without being watched. Idempotent."""
        with self._lock:
            waker, self._waker = self._waker, None
        if waker is not None and self._thread is not None:
            waker.wake()
            self._thread.join(timeout)

    def add(self, link: Link, on_readable: Callable[[], bool]) -> None:
        """Have ``on_readable`` called on the watch's thread when ``link`` has something to read,
        and once at the beginning, until it returns False. It must not block."""
        self._tell(link, on_readable, None)

    def remove(self, link: Link) -> None:
        """Forget ``link``; the watch's thread does not touch it any more when this returns."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        done = threading.Event()
        if self._tell(link, None, done):
            while not done.wait(1.0) and thread.is_alive():
                pass  # pragma: no cover (a machine so busy)
        else:
            thread.join()

    def tls_context(self, ca_file: str | None, client_cert: str | None) -> ssl.SSLContext:
        """As :func:`.link.tls_context`, kept: loading certificates for each stream takes too long.

        :raises OSError: if a file cannot be read or used
        """
        with self._lock:
            key = (ca_file, client_cert)
            if key not in self._context:
                self._context[key] = tls_context(ca_file, client_cert)
            return self._context[key]

    def _tell(
        self, link: Link, on_readable: Callable[[], bool] | None, done: threading.Event | None
    ) -> bool:
        with self._lock:
            if self._waker is None:
                return False
            self._orders.append((link, on_readable, done))
            self._waker.wake()
            return True

    # -- its thread -----------------------------------------------------------------------

    def _run(self, waker: Waker, selector: selectors.BaseSelector) -> None:
        with selector:
            selector.register(waker.receiver, selectors.EVENT_READ)
            while self._waker is waker:
                for key, _ in selector.select():
                    if key.data is None:
                        waker.drain()
                    elif not _still_open(key.data):
                        selector.unregister(key.fileobj)
                self._obey(selector)
            self._obey(selector)
        waker.close()

    def _obey(self, selector: selectors.BaseSelector) -> None:
        while self._orders:
            link, on_readable, done = self._orders.popleft()
            try:
                if on_readable is None:
                    selector.unregister(link)
                elif _still_open(on_readable):
                    # Asked first: over TLS something may be here that no selector tells of.
                    selector.register(link, selectors.EVENT_READ, on_readable)
            except (KeyError, ValueError):
                pass  # it had ended, or was closed, before
            if done is not None:
                done.set()


def _still_open(on_readable: Callable[[], bool]) -> bool:
    try:
        return on_readable()
    except Exception:
        # A safety net: one channel's fault must not blind the others.
        log.exception("a channel could not be read")
        return False
