"""What a run found, in a file as soon as it is found: beside the worker's log.

A violation may take hours to come again. So neither an output that nobody kept nor a run that was
ended from outside may cost its text, and each stands there with what is needed to judge it: what
the caller saw, what happened to all at that time, how busy the machine was.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import groupby
from pathlib import Path

from .streams import Seen, Trouble

LAST_FRAMES = 3
LONGEST = 400
"""Characters of a frame that are shown."""


class Record:
    """The file of one run. Each method writes it through, and may be called from any thread.

    :ivar violations: one sentence each
    :ivar path: beside the worker's log: ``worker.log`` has ``worker.report.txt``
    """

    def __init__(self, log: Path, first_line: str) -> None:
        self.violations: list[str] = []
        self.path = log.with_name(f"{log.stem}.report.txt")
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.path.write_text(f"{first_line}, the worker's log is {log}\n", encoding="utf-8")
        self.note("begun")

    def violation(self, text: str, *context: str) -> None:
        """A law is broken."""
        with self._lock:
            self.violations.append(text)
        self.note(f"VIOLATION {text}", *context)

    def note(self, text: str, *context: str) -> None:
        """Something happened; ``context`` are lines below it."""
        busy = " ".join(f"{each:.1f}" for each in os.getloadavg()[:2])
        now = datetime.now().strftime("%H:%M:%S.%f")[:-3]
        line = f"{now} {self.since(time.monotonic())} (load {busy}) {text}"
        self.write("\n    ".join([line, *context]))

    def write(self, text: str) -> None:
        """``text`` as it is."""
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def since(self, moment: float) -> str:
        """A monotonic time, as seconds of the run."""
        return f"{moment - self._began:.3f} s"

    def of_stream(self, seen: Seen, troubles: Sequence[Trouble]) -> list[str]:
        """What a caller saw, and what happened to all in that time."""
        kinds = " ".join(f"{kind}*{len(list(same))}" for kind, same in groupby(seen.kinds))
        lines = [
            f"plan {asdict(seen.plan)}",
            f"try {seen.tries}, from {self.since(seen.started)} to {self.since(seen.ended)}",
            f"frames: {kinds or 'none'}",
            *(f"frame {frame[:LONGEST]}" for frame in seen.frames[-LAST_FRAMES:]),
            f"result {seen.result!r}, failure {seen.failure!r}, closed {seen.closed}, "
            f"left {seen.left}, hung {seen.hung}, unclosed {seen.unclosed}",
            f"aborts {seen.aborts} in {[round(each, 3) for each in seen.abort_seconds]} s, "
            f"notes {seen.notes}",
        ]
        for each in troubles:
            if each.since <= seen.ended and (each.until is None or each.until >= seen.started):
                until = "now" if each.until is None else self.since(each.until)
                lines.append(f"meanwhile {each.kind} from {self.since(each.since)} to {until}")
        return lines
