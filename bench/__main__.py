"""``python -m bench``: measure, print the tables, write JSON and plot."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from . import report
from .cases import CASES, SHORT, Case, Lengths, ceiling
from .processes import DRIVERS, OURS_MORE, ROOT, BenchError, wait_for_quiet
from .stats import shuffled


def parser() -> argparse.ArgumentParser:
    """The command line."""
    names = ", ".join(CASES)
    top = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    top.add_argument("--short", action="store_true", help="the cases with a bar, short windows")
    top.add_argument("--rounds", type=int, default=3, help="default 3")
    top.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"of {names}")
    top.add_argument("--drivers", nargs="+", choices=DRIVERS, help="default all")
    top.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    top.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG")
    top.add_argument(
        "--quiet", action="store_true", help="before each measurement wait for an idle machine"
    )
    top.add_argument("--seed", type=int, help="of the random order")
    top.add_argument(
        "--ours", nargs=argparse.REMAINDER, default=[], help="further flags for our worker; last"
    )
    return top


def run(
    cases: Sequence[Case],
    drivers: Sequence[str],
    rounds: int,
    lengths: Lengths,
    *,
    seed: int,
    quiet: bool,
) -> report.Results:
    """All rounds. Cases, and the drivers within a case, come in a new order each time.

    :param quiet: wait for an idle machine before each measurement
    """
    chance, results = random.Random(seed), report.Results(facts=report.facts())
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        results.facts["stub"] = ceiling(directory)
        results.facts["seed"] = seed
        print(f"the stub alone: {results.facts['stub']}", flush=True)
        for number in range(rounds):
            for case in shuffled(cases, chance):
                for driver in shuffled([d for d in case.drivers if d in drivers], chance):
                    if quiet:
                        wait_for_quiet()
                    _measure(results, number, case, driver, lengths, directory)
    return results


def _measure(
    results: report.Results,
    number: int,
    case: Case,
    driver: str,
    lengths: Lengths,
    directory: Path,
) -> None:
    before = time.monotonic()
    try:
        figures = case.measure(DRIVERS[driver], lengths, directory)
    except BenchError as error:
        results.failures.append(f"round {number + 1}, {case.name}, {driver}: {error}")
        words = "failed"
    else:
        results.add(number, case.name, driver, figures)
        words = " ".join(
            f"{name}={report.number(value)}"
            for name, value in figures.items()
            if name in report.LABELS
        )
    seconds = time.monotonic() - before
    print(f"{number + 1} {case.name:8} {driver:10} {seconds:5.1f} s  {words}", flush=True)


def standard_flags() -> list[str]:
    """Flags that turn on what is off by default: the bars hold with everything on."""
    command = [sys.executable, "-m", "provider_llamacpp", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return ["--resume", "on"] if "--resume" in shown else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; 1 if a measurement failed. Bars are reported: a busy machine misses them."""
    options = parser().parse_args(arguments)
    cases = [CASES[name] for name in options.cases or CASES]
    if options.short and not options.cases:
        cases = [case for case in cases if case.short]
    OURS_MORE[:] = [*standard_flags(), *options.ours]
    seed = options.seed if options.seed is not None else random.randrange(1 << 32)
    lengths = SHORT if options.short else Lengths()
    drivers = options.drivers or list(DRIVERS)
    results = run(cases, drivers, options.rounds, lengths, seed=seed, quiet=options.quiet)
    print("\n" + report.text(results))
    if options.json:
        report.write_json(results, options.json)
    if options.plot:
        report.write_plot(results, options.plot)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
