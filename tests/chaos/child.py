"""The worker in a process of its own, as its command line runs it, with two things in our hands.

The wall clock jumps by hours at each SIGUSR1; and with ``CHAOS_SILENCE_LIMIT`` in its environment
the bus counts as dead after so many seconds of silence instead of a minute. Usage:
``child.py FLAGS…``, the flags of ``provider-llamacpp``.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import time

import provider_llamacpp.worker
from provider_llamacpp import cli


def main() -> int:
    real = time.time
    jumps = itertools.cycle((3600.0, -86400.0, 86400.0 * 365, -7200.0))
    offset = [0.0]

    def jump(*_: object) -> None:
        offset[0] += next(jumps)

    time.time = lambda: real() + offset[0]
    signal.signal(signal.SIGUSR1, jump)
    if silence_limit := os.environ.get("CHAOS_SILENCE_LIMIT"):
        provider_llamacpp.worker.Engine = functools.partial(  # type: ignore[assignment,misc]
            provider_llamacpp.worker.Engine,
            ping_interval=0.5,
            silence_limit=float(silence_limit),
            send_timeout=4.0,
            retry_first=0.05,
            retry_limit=1.0,
        )
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
