"""The streams of one provider: which of them run, and the totals of those that have ended."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from .carrier import Carrier
from .recent import RecentErrors
from .streaming import StreamRun


class Runs:
    """The streams that run now, and what the ended ones came to.

    :param errors: told how streams failed
    """

    def __init__(self, errors: RecentErrors | None = None) -> None:
        self.carrier = Carrier()
        """Moves the tokens of those that flow."""
        self._errors = errors or RecentErrors()
        self._runs: dict[int, StreamRun] = {}
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._usage: Counter[str] = Counter()
        self._frames = self._consumed = self._resumes = 0
        self._last_error: str | None = None

    def add(self, run: StreamRun) -> None:
        """``run`` begins."""
        with self._lock:
            self._runs[run.call.number] = run

    def remove(self, run: StreamRun) -> None:
        """``run`` has ended; its figures go into the totals."""
        with self._lock:
            del self._runs[run.call.number]
            self._outcomes[run.outcome] += 1
            self._frames += run.frames
            self._consumed += run.consumed
            self._resumes += run.resumes
            self._usage.update(run.assembler.usage)
            if run.error is not None:
                self._last_error = f"stream {run.call.number}: {run.error.message}"
        where = f"stream {run.call.number}"
        if run.error is not None:
            self._errors.add(where, run.error.kind, run.error.message)
        elif run.invalid is not None:
            self._errors.add(where, "invalid request", run.invalid.message)

    def snapshot(self) -> list[StreamRun]:
        """The running streams, oldest first."""
        with self._lock:
            return list(self._runs.values())

    def totals(self) -> dict[str, Any]:
        """Since the start: streams by outcome, frames sent, bytes read, breaks after which a stream
        was taken up again, tokens of the streams that have ended, the last error."""
        with self._lock:
            running = list(self._runs.values())
            return {
                "outcomes": dict(self._outcomes),
                "frames": self._frames + sum(run.frames for run in running),
                "bytes": self._consumed + sum(run.consumed for run in running),
                "resumes": self._resumes + sum(run.resumes for run in running),
                "usage": dict(self._usage),
                "last_error": self._last_error,
            }

    def alone(self, number: int) -> bool:
        """Whether the stream ``number`` has its server for itself."""
        with self._lock:
            run = self._runs.get(number)
        return run is None or self.others(run) == 0

    def others(self, run: StreamRun) -> int:
        """How many other streams run on the server of ``run``."""
        return sum(1 for each in self.snapshot() if each is not run and each.root == run.root)
