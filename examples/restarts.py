"""A worker started and stopped again and again: threads, descriptors and memory before and after.

``python examples/restarts.py --times 1000``
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

from stage import StageApart, arguments

from provider_llamacpp import ProviderWorker, Settings


def main() -> None:
    parser = arguments("A worker started and stopped again and again.")
    parser.add_argument("--times", type=int, default=20, metavar="N")
    parser.add_argument("--warm-up", type=int, default=5, metavar="N", help="not counted")
    options = parser.parse_args()
    with StageApart(options.api_url) as here:
        for _ in range(options.warm_up):
            once(here)
        before = figures()
        print("before:", told(before), flush=True)
        for number in range(1, options.times + 1):
            once(here)
            if number % 100 == 0:
                print(f"{number:>6}:", told(figures()), flush=True)
        after = figures()
        print(" after:", told(after))
    if after[:2] != before[:2]:
        print("something is left:", *sorted(each.name for each in threading.enumerate()))
        sys.exit(1)


def once(here: StageApart) -> None:
    """A life of a worker, with one answer."""
    with ProviderWorker(Settings(url=here.url, api_url=here.api_url)) as worker:
        if not worker.wait_ready(30.0):
            raise SystemExit(f"not ready: {worker.stats()['last_error']}")
        here.ask("Hello")


def figures() -> tuple[int, int, float]:
    """Threads, descriptors, and resident memory in MiB. Of Linux; elsewhere only threads."""
    gc.collect()
    threads = threading.active_count()
    if not Path("/proc/self/fd").is_dir():
        return threads, 0, 0.0
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return threads, len(os.listdir("/proc/self/fd")), resident / 2**20


def told(seen: tuple[int, int, float]) -> str:
    return f"{seen[0]} threads, {seen[1]} descriptors, {seen[2]:.1f} MiB resident"


if __name__ == "__main__":
    main()
