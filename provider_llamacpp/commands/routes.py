"""Which way a question goes: through the engine to the worker, else directly to llama-server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import BusError
from ..settings import Settings
from .terminal import Terminal, hold_logs

if TYPE_CHECKING:
    from ..server.address import Target
    from .caller import Caller
    from .direct import Server

SECONDS = 30.0
"""For one question through the worker, which gives llama-server 20 (provider protocol 9)."""

T = TypeVar("T")


def add_direct(parser: argparse.ArgumentParser) -> None:
    """The flag that leaves the engine out."""
    parser.add_argument(
        "--direct", action="store_true", help="ask llama-server itself, not through the engine"
    )


def by_either(
    settings: Settings,
    name: str,
    by_bus: Callable[[Callable[[Mapping[str, Any]], Any], Caller], T],
    directly: Callable[[Server, Target], T],
    *,
    direct: bool,
) -> tuple[T, str]:
    """Ask the worker's function ``name``, or do without: where there is no engine, and where no
    worker serves it. Standard error says which way it went.

    :param by_bus: gets a function that calls the worker's with a payload, and the bus itself
    :param direct: leave the engine out
    :returns: the answer, and ``engine`` or ``server``
    :raises BusError: as the worker, or the server asked directly, failed
    :raises ProviderError: if no server was found
    """
    from ..bus.link import origin
    from .caller import Caller, Unreachable
    from .direct import Server

    hold_logs(settings)
    notes = Terminal.of(sys.stderr)
    function_id = f"provider::{settings.id}::{name}"
    why = ""
    if not direct:
        try:
            with Caller(settings) as caller:
                answer = by_bus(
                    lambda payload: caller.call(function_id, payload, timeout=SECONDS), caller
                )
            notes.line((f"through the engine at {origin(settings.url)}", "dim"))
            return answer, "engine"
        except Unreachable as error:
            why = f"{error.problem}; "
        except BusError as error:
            if error.code != "function_not_found":
                raise
            why = f"no worker serves {function_id} on {origin(settings.url)}; "
    server = Server(settings)
    target = server.locate(settings.api_url, settings.api_key, why=why)
    answer = directly(server, target)
    notes.line((f"{why}directly from llama-server at {target.root}", "dim"))
    return answer, "server"
