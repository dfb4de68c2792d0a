"""What is to go wrong, drawn from a seed. Pure: the same seed gives the same schedule.

Faults are of two sorts: of one stream (its server, its caller), and of all (the engine, the
network, the router, the worker's process). The latter stand between streams: they begin when the
stream of their number does.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import Any

from provider_llamacpp.local.model import LOOP, SENTENCE

SERVER_FAULTS = {
    "none": 40,
    "refuse_after_request": 2,
    "close_before": 2,
    "stall_before": 3,
    "stall_headers": 2,
    "reset_headers": 2,
    "stall_event": 3,
    "reset_event": 3,
    "close_event": 3,
    "early_end": 2,
    "drip": 2,
    "error_event": 2,
    "http_503": 2,
    "http_500": 1,
    "http_429": 1,
    "http_401": 1,
    "page": 1,
    "garbage": 1,
    "hang": 5,
    "hang_before": 4,
}
"""What the server does to one stream, with weights."""

CALLERS = {
    "reads": 60,
    "aborts": 10,
    "aborts_twice": 2,
    "leaves": 8,
    "leaves_at_once": 2,
    "slow": 3,
    "stalls": 1,
    "wrong_key": 1,
    "invalid": 1,
}
"""What the caller of one stream does."""

GLOBAL_FAULTS = {
    "engine_killed": 3,
    "engine_closed": 2,
    "bus_cut": 4,
    "bus_reset": 4,
    "half_open": 2,
    "engine_stops_reading": 2,
    "channels_cut": 4,
    "router_restarts": 2,
    "router_forgets": 1,
    "state_missing": 2,
    "server_refuses": 3,
    "server_dies": 3,
    "server_loading": 3,
    "server_silent": 2,
    "server_restarts": 2,
    "abort_storm": 4,
    "clock_jumps": 4,
    "worker_terminated": 2,
}
"""What happens to all, with weights."""

ENDLESS = ("hang", "hang_before")


@dataclass(frozen=True)
class StreamPlan:
    """One stream.

    :ivar at: events after which the server's fault comes
    :ivar pause: seconds of a stall
    :ivar after: frames after which the caller acts
    :ivar delay: seconds after which it acts if these frames do not come
    """

    number: int
    server: str
    caller: str
    form: str
    tokens: int
    at: int
    pause: float
    after: int
    delay: float

    def text(self) -> str:
        """For the prompt: the scripted server does what it says."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Fault:
    """What happens to all when the stream ``number`` begins, for ``seconds``."""

    number: int
    kind: str
    seconds: float
    draw: float
    """From 0 to 1, for whatever is still to be chosen."""


def stream_plan(seed: int, number: int, *, real: bool = False) -> StreamPlan:
    """The stream ``number``; a real server has no faults but those of its connection."""
    rng = random.Random(f"{seed} stream {number}")
    server, caller = _draw(rng, SERVER_FAULTS), _draw(rng, CALLERS)
    if real:
        server = rng.choice(("none", "none", "none", "hang"))
        caller = "slow" if caller == "stalls" else caller
    form = "text" if real else rng.choice(("text", "text", "thinking", "call", "calls"))
    tokens = rng.choice((1, 3, 10, 40, 120))
    if caller == "stalls":
        server, form = "flood", "text"
    if server == "drip":
        tokens = 2
    if server in ENDLESS and caller not in ("leaves", "leaves_at_once", "wrong_key", "invalid"):
        # Somebody has to end it.
        caller = rng.choice(("aborts", "aborts_twice", "leaves"))
    return StreamPlan(
        number=number,
        server=server,
        caller=caller,
        form=form,
        tokens=tokens,
        at=rng.randrange(0, tokens + 1),
        pause=rng.uniform(0.01, 0.4),
        after=rng.randrange(0, tokens + 3),
        delay=rng.uniform(0.02, 0.5),
    )


def faults(seed: int, streams: int, every: int, *, real: bool = False) -> list[Fault]:
    """What happens to all in the course of so many streams: one fault for ``every`` of them."""
    rng = random.Random(f"{seed} faults")
    found = []
    number = every
    while number < streams:
        kind = _draw(rng, GLOBAL_FAULTS)
        if real and kind == "server_loading":
            kind = "server_restarts"
        found.append(Fault(number, kind, rng.uniform(0.05, 1.2), rng.random()))
        number += rng.randrange(every // 2, every + every // 2 + 1)
    return found


def _draw(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def expected(plan: StreamPlan | dict[str, Any]) -> dict[str, Any]:
    """What the scripted server says in the stream: its thought, its text, its calls."""
    given = plan if isinstance(plan, dict) else asdict(plan)
    number, tokens = given["number"], given["tokens"]
    words = [
        f" w{number}.{place}" + ('ä€😀\n"' if place % 7 == 3 else "") for place in range(tokens)
    ]
    form = given["form"]
    if given["server"] == "flood":
        return {
            "thinking": [],
            "text": [f"{place:06d}" + "x" * 8000 for place in range(1000)],
            "calls": [],
        }
    if form == "thinking":
        half = tokens // 2
        return {"thinking": words[:half], "text": words[half:], "calls": []}
    if form in ("call", "calls"):
        calls = []
        for place in range(1 if form == "call" else 3):
            arguments = json.dumps({"city": f"Zürich {number}.{place}", "n": list(range(tokens))})
            calls.append([arguments[at : at + 9] for at in range(0, len(arguments), 9)])
        return {"thinking": [], "text": [], "calls": calls}
    return {"thinking": [], "text": words, "calls": []}


def real_prompt(plan: StreamPlan) -> str:
    """What the demo model is asked: for its sentence, or for one without end."""
    return "forever" if plan.server in ENDLESS else "hi"


def real_words(plan: StreamPlan) -> dict[str, Any]:
    """What the demo model answers to that."""
    text = [LOOP] * 20_000 if plan.server in ENDLESS else [SENTENCE]
    return {"thinking": [], "text": text, "calls": []}
