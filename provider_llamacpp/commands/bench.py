"""``bench``: what this set-up does, through the worker and beside it, in one interleaved run."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path as FilePath
from typing import Any

from ..errors import BusError, ProviderError, ProviderLlamacppError
from ..settings import Settings
from .figures import FEWEST
from .report import Level, Report, Rig, show
from .terminal import Terminal, hold_logs

DESCRIPTION = """\
Measure this set-up: each figure through the worker, and beside it directly from
llama-server, in the same run and in random order. Prompts are random words, read
without the cache; answers have a fixed length. Ctrl-C ends early with what there is.
"""
EXAMPLE = """\
examples:
  provider-llamacpp bench
  provider-llamacpp bench --rounds 15 --tokens 128 --plot bench.png
  provider-llamacpp bench --concurrency 1,4,16 --json > bench.json
  provider-llamacpp bench --local --model ./qwen3-0.6b-q4.gguf
"""
ROUNDS, TOKENS, PROMPT_TOKENS = 7, 64, 256
WARM_TOKENS = 8
"""Of the stream before the measured ones: what is done for the first time takes longer."""
USUAL_SLOTS = 4
"""Where the server does not say how many it has."""
MOST_AT_ONCE = 256
"""Streams at once that may be asked for."""
WORDS_A_TOKEN = 0.75
"""Where the server cannot count."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""

    def number(name: str, default: int, least: int, help: str) -> None:
        parser.add_argument(
            name,
            type=_at_least(least),
            default=default,
            metavar="N",
            help=f"{help} (default {default})",
        )

    number("--rounds", ROUNDS, 1, f"how often each figure is taken; {FEWEST} or more tell noise")
    number("--tokens", TOKENS, 2, "length of each answer")
    number("--prompt-tokens", PROMPT_TOKENS, 1, "length of each prompt, nearly")
    parser.add_argument(
        "--concurrency",
        type=_levels,
        metavar="N,N,…",
        help="streams at once (default 1, 2, 4, … up to the server's slots, and twice as many)",
    )
    parser.add_argument("--model", metavar="ID", help="model id; with --local a GGUF file")
    parser.add_argument(
        "--server",
        metavar="URL",
        help="llama-server as reached from here (default: as the worker reaches it)",
    )
    parser.add_argument(
        "--local", action="store_true", help="measure an embedded engine, router and worker"
    )
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    parser.add_argument(
        "--plot", type=FilePath, metavar="FILE", help="draw them to a .png or .svg file"
    )


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a number, at least {least}")
        return int(text)

    return number


def _levels(text: str) -> list[int]:
    found = text.split(",")
    if not all(each.isdecimal() and 1 <= int(each) <= MOST_AT_ONCE for each in found):
        raise argparse.ArgumentTypeError(f"must be numbers from 1 to {MOST_AT_ONCE}, with commas")
    return sorted(set(map(int, found)))


def run(settings: Settings, options: argparse.Namespace) -> int:
    """The command."""
    if options.plot is not None:
        from . import plot

        plot.check(options.plot)
    hold_logs(settings)
    notes = Terminal.of(sys.stderr)
    with ExitStack() as stack:
        rig = prepare(settings, options, stack)
        report = measure(rig, notes)
    if not report.levels:
        print("provider-llamacpp: interrupted before the first figure", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(Terminal.of(sys.stdout), report)
    if options.plot is not None:
        plot.draw(report, options.plot)
        notes.line(f"drawn to {options.plot}")
    return 0


# -- setting up -------------------------------------------------------------------------------


def prepare(settings: Settings, options: argparse.Namespace, stack: ExitStack) -> Rig:
    """Find the parts, warm them up, and fit the prompt.

    :raises ProviderLlamacppError: if something is missing, saying what
    """
    from .caller import Caller
    from .direct import Server
    from .measuring import Direct, Task, Through, run_batch

    model = options.model
    if options.local:
        from ..local.stack import LocalStack

        settings = stack.enter_context(LocalStack(settings, model=model)).settings
        model = None
    caller = stack.enter_context(Caller(settings))
    server = Server(settings)
    target = server.locate(*_where(caller, settings, options.server))
    view = server.view(target)
    found = view.catalog.find(model) if model else view.catalog.default()
    if found is None:
        raise ProviderLlamacppError(
            f"llama-server at {target.root} serves no model {model or 'at all'}"
        )
    direct, worker = Direct(server.upstream, target), Through(caller, settings)
    # Also loads or wakes it: only then it can say what it has.
    warm = Task(model or found.id, 8, WARM_TOKENS)
    for path in (direct, worker):
        for failure in run_batch(path, warm, 1, random.Random()).failures:
            raise ProviderLlamacppError(f"{_WAYS[path.name]} does not work: {failure}")
    view = server.view(target)
    found = view.catalog.find(warm.model) or found
    words = fit(lambda text: _count(server, target, warm.model, text), options.prompt_tokens)
    needed = options.prompt_tokens + options.tokens
    if needed > found.context_window:
        raise ProviderLlamacppError(
            f"--prompt-tokens and --tokens make {needed} tokens, and a slot of {warm.model} has "
            f"{found.context_window}: use fewer, or start llama-server with a larger --ctx-size"
        )
    return Rig(
        direct,
        worker,
        Task(warm.model, words, options.tokens),
        options.concurrency or levels_of(found.slots or USUAL_SLOTS),
        options.rounds,
        found.slots,
        target.root,
        view.catalog.build,
        options.local,
    )


_WAYS = {"direct": "llama-server itself", "worker": "the way through the worker"}


def _where(caller: Any, settings: Settings, server: str | None) -> tuple[str | None, str | None]:
    """Address and key for the direct way: where the worker goes, unless told otherwise."""
    from ..bus.link import origin
    from .direct import through_bus, worker_url

    function_id = f"provider::{settings.id}::status"
    try:
        caller.call(function_id, {}, timeout=5.0)
    except BusError as error:
        if error.code == "function_not_found":
            raise ProviderLlamacppError(
                f"no worker serves {function_id} on {origin(settings.url)}: start "
                "provider-llamacpp there, name its id with --id, or try --local"
            ) from error
        raise
    url, key = through_bus(caller, settings)
    return server or worker_url(caller, settings) or url, key


def levels_of(slots: int) -> list[int]:
    """1, 2, 4, … below ``slots``, then ``slots`` and twice as many."""
    found = {2**each for each in range(slots.bit_length()) if 2**each < slots}
    return sorted(found | {slots, min(2 * slots, MOST_AT_ONCE)})


def fit(count: Callable[[str], int], tokens: int) -> int:
    """How many words make a prompt of nearly so many tokens, with the template around them."""
    from .measuring import WORDS

    try:
        one, many = count(WORDS[0]), count(" ".join(WORDS))
    except (BusError, ProviderError):
        return max(1, round(tokens * WORDS_A_TOKEN))
    each = max(0.1, (many - one) / (len(WORDS) - 1))
    return max(1, 1 + round((tokens - one) / each))


def _count(server: Any, target: Any, model: str, text: str) -> int:
    from ..payloads import CountRequest
    from ..server.queries import TokenCounter
    from ..transcript.convert import Abilities, anthropic_count_body, count_body

    message = {"role": "user", "content": [{"type": "text", "text": text}], "timestamp": 1}
    body = count_body(CountRequest(model, [message]), abilities=Abilities())
    return TokenCounter(server.upstream).count(target, body, anthropic_count_body(body))


# -- measuring --------------------------------------------------------------------------------


def measure(rig: Rig, terminal: Terminal, chance: random.Random | None = None) -> Report:
    """All rounds; an interrupt ends them early."""
    from .measuring import PATHS, run_batch

    chance = chance or random.Random()
    report, paths = Report(rig), rig.paths()
    levels = {count: Level(count, {path: {} for path in PATHS}) for count in rig.levels}
    # Twice as many streams take about twice as long, at the latest beyond the slots.
    total = rig.rounds * len(PATHS) * sum(rig.levels)
    done, began, spent = 0, time.monotonic(), time.process_time()
    with terminal.progress("measuring", total=total) as progress:
        try:
            for number in range(rig.rounds):
                cells = [(count, path) for count in rig.levels for path in PATHS]
                for count, path in chance.sample(cells, len(cells)):
                    left = _left(time.monotonic() - began, done, total)
                    progress.update(done, note=f"{count} at once, {path}{left}")
                    batch = run_batch(paths[path], rig.task, count, chance)
                    levels[count].batches[path][number] = batch
                    done += count
        except KeyboardInterrupt:
            report.interrupted = True
    report.busy = (time.process_time() - spent) / max(0.001, time.monotonic() - began)
    report.levels = [each for each in levels.values() if all(each.batches.values())]
    return report


def _left(seconds: float, done: int, total: int) -> str:
    if not done:
        return ""
    left = seconds / done * (total - done)
    return f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left"
