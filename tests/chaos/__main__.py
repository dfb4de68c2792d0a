"""``python -m tests.chaos``: see :mod:`.run`."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' own helpers are no package

from .run import Run


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    top.add_argument("--seed", type=int, help="of the schedule (default: a new one, printed)")
    top.add_argument("--streams", type=int, default=10_000, help="at most (default 10000)")
    top.add_argument("--seconds", type=float, help="at most")
    top.add_argument("--width", type=int, default=24, help="streams at once (default 24)")
    top.add_argument("--every", type=int, default=40, help="streams for a fault of all")
    top.add_argument("--real", action="store_true", help="against a real llama-server")
    top.add_argument(
        "--resume", action="store_true", help="against a real one that keeps streams, all cut"
    )
    top.add_argument("--log", type=Path, help="the worker's log (default: a temporary file)")
    options = top.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    log = options.log or Path(tempfile.mkdtemp(prefix="chaos-")) / "worker.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"chaos: seed {seed}, the worker's log is {log}", flush=True)
    # Connections that break are what this is about.
    logging.getLogger("websockets").setLevel(logging.CRITICAL)
    began = time.monotonic()
    run = Run(
        seed,
        options.streams,
        width=options.width,
        every=options.every,
        real=options.real,
        resume=options.resume,
        log=log,
    )
    try:
        with run:
            run.go(options.seconds)
        print(run.report())
    except LookupError as error:
        print(f"SKIPPED: {error}")
        return 0
    print(f"  in {time.monotonic() - began:.0f} s")
    return 1 if run.violations else 0


if __name__ == "__main__":
    sys.exit(main())
