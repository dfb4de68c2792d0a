"""One thread that notices which channels' other ends have closed.

It waits on all their sockets at once: a thread for each stream would only wait for an EOF.
"""

from __future__ import annotations

import logging
import selectors
import ssl
import threading
from collections.abc import Callable
from typing import Any

from .link import Link, tls_context
from .waiting import Waker

log = logging.getLogger(__name__)


class ChannelWatch:
    """One thread that notices which channels' other ends have closed.

    :param name: of its thread
    """

    def __init__(self, name: str = "llamacpp-channels") -> None:
        self._name = name
        self._lock = threading.RLock()
        """Guards what is watched, and is held while one link is read: whoever has it knows that
        the thread touches none."""
        self._selector: selectors.BaseSelector | None = None
        """What the thread waits with, while it runs. Others change what it waits for: the kernel
        takes that up at once, and where a list is waited on instead, the thread is woken."""
        self._thread: threading.Thread | None = None
        self._waker: Waker | None = None
        self._context: dict[tuple[str | None, str | None], ssl.SSLContext] = {}

    @property
    def running(self) -> bool:
        """Whether ends are noticed."""
        return self._selector is not None

    def start(self) -> None:
        """Start the thread; may follow a :meth:`stop`.

        :raises RuntimeError: if it runs
        """
        with self._lock:
            if self._selector is not None:
                raise RuntimeError("the watch runs already")
            self._waker, self._selector = Waker(), selectors.DefaultSelector()
            self._selector.register(self._waker.receiver, selectors.EVENT_READ)
            self._thread = threading.Thread(
                target=self._run, args=(self._waker, self._selector), name=self._name, daemon=True
            )
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread; channels go on without being watched. Idempotent."""
        with self._lock:
            running, self._selector = self._selector is not None, None
        if running and self._waker is not None and self._thread is not None:
            self._waker.wake()
            self._thread.join(timeout)

    def add(self, link: Link, on_readable: Callable[[], bool]) -> None:
        """Have ``on_readable`` called on the watch's thread when ``link`` has something to read,
        until it returns False. It must not block."""
        with self._lock:
            if self._selector is None:
                return
            # What TLS keeps already no selector tells of.
            if link.secure and not _still_open(on_readable):
                return
            try:
                self._selector.register(link, selectors.EVENT_READ, on_readable)
            except ValueError:
                return  # it was closed before
            self._changed()

    def remove(self, link: Link) -> None:
        """Forget ``link``; the watch's thread does not touch it any more when this returns."""
        with self._lock:
            if self._selector is not None and _watched(self._selector, link):
                self._selector.unregister(link)
                self._changed()

    def tls_context(self, ca_file: str | None, client_cert: str | None) -> ssl.SSLContext:
        """As :func:`.link.tls_context`, kept: loading certificates for each stream takes too long.

        :raises OSError: if a file cannot be read or used
        """
        with self._lock:
            key = (ca_file, client_cert)
            if key not in self._context:
                self._context[key] = tls_context(ca_file, client_cert)
            return self._context[key]

    def _changed(self) -> None:
        if self._waker is not None and not hasattr(self._selector, "fileno"):
            self._waker.wake()  # pragma: no cover (neither Linux nor a BSD)

    # -- its thread -----------------------------------------------------------------------

    def _run(self, waker: Waker, selector: selectors.BaseSelector) -> None:
        while self._selector is selector:
            for key, _ in selector.select():
                if key.data is None:
                    waker.drain()
                    continue
                with self._lock:
                    # It may have been removed since, and its descriptor be another's by now.
                    if self._selector is not selector or not _watched(selector, key.fileobj):
                        continue
                    if not _still_open(key.data) and _watched(selector, key.fileobj):
                        selector.unregister(key.fileobj)
        with self._lock:
            selector.close()
            waker.close()


def _watched(selector: selectors.BaseSelector, what: Any) -> bool:
    """Whether ``selector`` waits for ``what``, and not for another that has its descriptor now."""
    try:
        return selector.get_key(what).fileobj is what
    except (KeyError, ValueError):
        return False


def _still_open(on_readable: Callable[[], bool]) -> bool:
    try:
        return on_readable()
    except Exception:
        # A safety net: one channel's fault must not blind the others.
        log.exception("a channel could not be read")
        return False
