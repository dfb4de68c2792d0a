"""Tells systemd that we are ready, alive, or stopping (``Type=notify``, ``WatchdogSec=``).

A datagram to the socket named in ``NOTIFY_SOCKET``; nothing at all where the variable is not set.
Used by the command line only.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping


class Notifier:
    """Messages to the service manager that started us.

    :param environ: read once, for ``NOTIFY_SOCKET`` and ``WATCHDOG_USEC``
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        period = environ.get("WATCHDOG_USEC", "")
        # Twice in the time that systemd waits for.
        self._period = int(period) / 2e6 if period.isdecimal() and int(period) else None
        self._next = 0.0
        self._ready = False

    def tick(self, *, ready: bool, alive: bool, status: str) -> None:
        """Say what is new: once that we are ready, and within the watchdog's time that we live."""
        if ready and not self._ready:
            self._ready = True
            self._send(f"READY=1\nSTATUS={status}")
        now = time.monotonic()
        if self._period is not None and alive and now >= self._next:
            self._next = now + self._period
            self._send(f"WATCHDOG=1\nSTATUS={status}")

    def stopping(self) -> None:
        """We drain and end."""
        self._send("STOPPING=1\nSTATUS=waiting for running streams")

    def _send(self, text: str) -> None:
        if not self._address or not hasattr(socket, "AF_UNIX"):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            try:
                sock.sendto(text.encode(), self._address)
            except OSError:
                # The manager is gone or never was: nobody to tell.
                pass
