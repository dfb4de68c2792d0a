"""``python -m tests.fuzz``: the state machines for minutes, each under its own new seeds."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' own helpers are no package

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from fuzz.bus_machine import BusMachine
from fuzz.stream_machine import StreamMachine
from fuzz.targets import TARGETS

MACHINES = {"stream-machine": StreamMachine, "bus-machine": BusMachine}
BATCH = 100


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    top.add_argument("names", nargs="*", help=f"of {', '.join([*MACHINES, *TARGETS])}")
    top.add_argument("--seconds", type=float, default=60.0, help="for each (default 60)")
    top.add_argument("--steps", type=int, default=50, help="rules in one example (default 50)")
    options = top.parse_args()
    logging.disable(logging.CRITICAL)
    batch = settings(
        max_examples=BATCH,
        stateful_step_count=options.steps,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    for name in options.names or [*MACHINES, *TARGETS]:
        began, examples = time.monotonic(), 0
        while time.monotonic() < began + options.seconds:
            if name in MACHINES:
                run_state_machine_as_test(MACHINES[name], settings=batch)  # type: ignore[no-untyped-call]
            else:
                batch(given(st.binary(max_size=2000))(TARGETS[name]))()
            examples += BATCH
        print(f"{name}: {examples} examples in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
