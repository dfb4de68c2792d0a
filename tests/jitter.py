"""Random pauses where threads take turns: ``make jitter``.

A plugin for pytest. A new thread, a waiter that was woken and the embedded engine's frames come
late now and then, as they do on a busy machine. What fails then, and not for a bound of time, holds
an order that nobody promised. ``JITTER`` in the environment is the seed; with several processes it
makes a run alike, not the same.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import pytest

THREAD, WAITER, FRAME = 0.03, 0.03, 0.1
"""How often each is late."""
LONGEST = 0.4
"""Seconds."""


def pytest_configure(config: pytest.Config) -> None:
    """Slow the standard library's threads and conditions, and the engine's hub."""
    from provider_llamacpp.local.hub import Hub

    dice = random.Random(f"{os.environ.get('JITTER', '')} {os.getpid()}")

    def late(chance: float) -> float:
        return dice.random() * LONGEST if dice.random() < chance else 0.0

    run, wait = threading.Thread.run, threading.Condition.wait

    def slow_run(self: threading.Thread) -> None:
        time.sleep(late(THREAD))
        run(self)

    def slow_wait(self: Any, timeout: float | None = None) -> bool:
        woken = wait(self, timeout)
        if pause := late(WAITER):
            # Without the lock, or nobody could get ahead of it.
            state = self._release_save()
            try:
                time.sleep(pause)
            finally:
                self._acquire_restore(state)
        return woken

    def slowed(method: Any) -> Any:
        def slow(*args: Any, **more: Any) -> Any:
            time.sleep(late(FRAME))
            return method(*args, **more)

        return slow

    threading.Thread.run = slow_run  # type: ignore[method-assign]
    threading.Condition.wait = slow_wait  # type: ignore[method-assign]
    for name in ("join", "handle", "leave"):
        setattr(Hub, name, slowed(getattr(Hub, name)))
