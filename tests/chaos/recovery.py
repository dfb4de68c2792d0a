"""How long it takes until things are well again: ``python -m tests.chaos.recovery``.

The worker is a process of its own with the settings it has by default, engine, server and caller
are in this one, all on one machine. Prints the table of ``docs/reliability.rst``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' own helpers are no package

from .run import Run
from .schedule import StreamPlan
from .server import ChaosServer
from .streams import PATIENCE

DOWN = 0.5
"""Seconds for which the engine and the server are away."""


class Clock:
    """Measures one thing some times."""

    def __init__(self, run: Run, times: int) -> None:
        self.run = run
        self.times = times
        self.rows: list[tuple[str, list[float]]] = []
        self._number = 0

    def measure(self, what: str, once: Callable[[], float]) -> None:
        taken = [once() for _ in range(self.times)]
        self.rows.append((what, taken))
        print(f"  {what}: {statistics.median(taken):.3f} s, {max(taken):.3f} s", flush=True)

    def begin(self, server: str, caller: str = "reads", delay: float = 0.0) -> threading.Thread:
        """A stream in the background that has reached the server."""
        self._number += 1
        plan = StreamPlan(self._number, server, caller, "text", 200, 100, 0.0, 10_000, delay)
        thread = threading.Thread(
            target=self.run.caller.run, args=[plan, threading.Event()], daemon=True
        )
        thread.start()
        assert self.server.wait_for_stream(self._number, PATIENCE), "it does not come"
        return thread

    @property
    def server(self) -> ChaosServer:
        assert isinstance(self.run.server, ChaosServer)
        return self.run.server

    def idle(self) -> None:
        """Until the server generates for nobody."""
        assert self.server.wait_until_idle(PATIENCE), "the server goes on"

    def served(self) -> float:
        began = time.monotonic()
        self.run.wait_served()
        return time.monotonic() - began

    # -- what is measured -----------------------------------------------------------------

    def engine_back(self) -> float:
        self.run.engine.stop(None)
        time.sleep(DOWN)
        self.run.engine.start()
        return self.served()

    def server_back(self) -> float:
        self.server.die()
        time.sleep(DOWN)
        self.server.start()
        return self.served()

    def abort(self) -> float:
        thread = self.begin("hang")
        key = self.run.caller.running[self._number]
        began = time.monotonic()
        self.run.client.invoke("provider::llamacpp::abort", {"request_id": key})
        self.idle()
        took = time.monotonic() - began
        thread.join()
        return took

    def abort_queued(self) -> float:
        thread = self.begin("hang_before")
        key = self.run.caller.running[self._number]
        began = time.monotonic()
        self.run.client.invoke("provider::llamacpp::abort", {"request_id": key})
        self.idle()
        took = time.monotonic() - began
        thread.join()
        return took

    def caller_gone(self) -> float:
        left = threading.Event()
        self.run.caller.on_leave = left.set
        thread = self.begin("trickle", "leaves", delay=0.3)
        left.wait()
        began = time.monotonic()
        self.idle()
        took = time.monotonic() - began
        thread.join()
        return took

    def stop_idle(self) -> float:
        return self._stop()

    def stop_busy(self) -> float:
        threads = [self.begin("hang") for _ in range(8)]
        took = self._stop()
        for thread in threads:
            thread.join()
        return took

    def _stop(self) -> float:
        worker = self.run.worker
        problem = worker.terminate()
        assert problem is None, problem
        worker.start()
        self.run.wait_served()
        return worker.exits[-1]


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.chaos.recovery", description=__doc__)
    top.add_argument("--times", type=int, default=15)
    options = top.parse_args()
    log = Path(tempfile.mkdtemp(prefix="recovery-")) / "worker.log"
    with Run(1, 0, patient=True, cuts=False, log=log) as run:
        clock = Clock(run, options.times)
        clock.measure("engine back to a served stream", clock.engine_back)
        clock.measure("server back to a served stream", clock.server_back)
        clock.measure("abort to idle server, in mid-stream", clock.abort)
        clock.measure("abort to idle server, before headers", clock.abort_queued)
        clock.measure("caller gone to idle server, tokens flowing", clock.caller_gone)
        clock.measure("SIGTERM to exit, idle", clock.stop_idle)
        clock.measure("SIGTERM to exit, 8 streams, drain 0.3 s", clock.stop_busy)
    print("\n==========================================  ========  ========")
    print(f"{'':42}  {'median':8}  worst")
    print("==========================================  ========  ========")
    for what, taken in clock.rows:
        print(f"{what:42}  {statistics.median(taken):6.3f} s  {max(taken):6.3f} s")
    print("==========================================  ========  ========")
    return 0


if __name__ == "__main__":
    sys.exit(main())
