"""The worker's process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

SEND_TIMEOUT = 2.0
SILENCE_LIMIT = 2.0
"""Seconds without a word from the engine after which the worker leaves it."""
STOP_LIMIT = 8.0
"""Seconds from SIGTERM to exit, with a drain of 0.3 s."""


class Worker:
    """The worker's process, and what the system says of it."""

    def __init__(
        self, engine_url: str, log: Path, *, patient: bool = False, resume: bool = False
    ) -> None:
        self._url = engine_url
        self._resume = resume
        self._patient = patient
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.exits: list[float] = []

    def start(self) -> None:
        child = Path(__file__).with_name("child.py")
        flags = ["--url", self._url, "--drain", "0.3", "--log-level", "info"]
        flags += ["--resume", "on"] if self._resume else []
        impatient = {
            "PROVIDER_LLAMACPP_SEND_TIMEOUT": f"{SEND_TIMEOUT:g}",
            "PROVIDER_LLAMACPP_CONNECT_TIMEOUT": "5",
            # A caller that left a silent stream is noticed by a ping that fails.
            "PROVIDER_LLAMACPP_PING_INTERVAL": "2",
            "CHAOS_SILENCE_LIMIT": f"{SILENCE_LIMIT:g}",
        }
        environment = {**os.environ, **({} if self._patient else impatient)}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(child), *flags], stdout=log, stderr=log, env=environment
            )

    def terminate(self) -> str | None:
        """SIGTERM; what was wrong with how it went."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"the worker did not end within {STOP_LIMIT:g} s of SIGTERM"
        self.exits.append(time.monotonic() - began)
        return None if code == 0 else f"the worker ended with {code}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def descriptors(self) -> Counter[str]:
        """Open descriptors by what they are."""
        found: Counter[str] = Counter()
        for each in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{self.pid}/fd/{each}")
                found[target.partition(":")[0]] += 1
        return found

    def rss(self) -> int:
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
