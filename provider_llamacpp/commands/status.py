"""``status``: what a running worker does now, asked over the bus and drawn again and again.

Looking wakes nothing: the worker tells what it knows, and asks llama-server nothing for it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import BusError
from ..settings import Settings
from .status_page import Look, Stats, page, renderable, show
from .terminal import Terminal, hold_logs

if TYPE_CHECKING:
    from rich.console import Group

DESCRIPTION = (
    "Watch a running worker: its streams and what each waits for, the state of llama-server, the "
    "errors of the last minutes. Wakes and loads nothing. Ctrl-C ends it."
)
EXAMPLE = """\
examples:
  provider-llamacpp status
  provider-llamacpp status --once
  provider-llamacpp status --once --json | jq .active_streams
  provider-llamacpp status --json --interval 10 >> status.jsonl
"""
SECONDS = 5.0
"""For one answer of the worker, which has it at hand."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--once", action="store_true", help="show it once and exit")
    parser.add_argument(
        "--json", action="store_true", help="as JSON: one object, or one a line while watching"
    )
    parser.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="SECONDS",
        help="between two looks (default 1)",
    )


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        # Of this argparse would tell the name of the function.
        seconds = -1.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("must be a number of seconds from 0.1 to 3600")
    return seconds


def run(settings: Settings, options: argparse.Namespace) -> int:
    """The command."""
    from .caller import Caller

    hold_logs(settings)
    terminal = Terminal.of(sys.stdout)
    with Caller(settings) as caller:
        function_id = f"provider::{settings.id}::status"
        looks = watch(
            lambda: caller.call(function_id, {}, timeout=SECONDS),
            pause=threading.Event().wait,
            interval=options.interval,
        )
        try:
            first = next(looks)
        except BusError as error:
            print(f"provider-llamacpp: {_missing(error, function_id, settings)}", file=sys.stderr)
            return 1
        try:
            _display(terminal, first, iter(()) if options.once else looks, options)
        except KeyboardInterrupt:
            pass
        except BrokenPipeError:
            # Whoever read it has seen enough; Python must not find out again while it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _display(
    terminal: Terminal, first: Look, looks: Iterator[Look], options: argparse.Namespace
) -> None:
    if options.json:
        indent = 2 if options.once else None
        print(json.dumps(first.stats, indent=indent), flush=True)
        for look in looks:
            if look.problem is None:
                print(json.dumps(look.stats), flush=True)
        return
    if options.once or not (terminal.rich and terminal.live):
        show(terminal, page(terminal, first))
        for look in looks:
            terminal.line()
            show(terminal, page(terminal, look))
        return
    from rich.live import Live

    def drawn(look: Look) -> Group:
        return renderable(terminal, page(terminal, look, height=terminal.console.height))

    with Live(drawn(first), console=terminal.console, auto_refresh=False) as live:
        for look in looks:
            with whole():
                live.update(drawn(look), refresh=True)


@contextmanager
def whole() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: half a picture cannot be drawn over."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _missing(error: BusError, function_id: str, settings: Settings) -> str:
    from ..bus.link import origin

    if error.code == "function_not_found":
        return (
            f"no worker serves {function_id} on {origin(settings.url)}: start provider-llamacpp "
            "there, or name the id of the one that runs with --id"
        )
    return f"the worker does not answer: {error}"


# -- looking ----------------------------------------------------------------------------------


def watch(
    ask: Callable[[], Stats],
    *,
    pause: Callable[[float], object],
    interval: float,
    clock: Callable[[], float] = time.time,
) -> Iterator[Look]:
    """Look again and again; what fails after the first look is told beside the last answer.

    :raises BusError: if the first look fails
    """
    look = Look(ask(), clock())
    while True:
        yield look
        pause(interval)
        try:
            look = Look(ask(), clock())
        except BusError as error:
            gone = error.code == "function_not_found"
            problem = "the worker has left the bus" if gone else f"the worker is silent ({error})"
            look = Look(look.stats, look.at, problem)
