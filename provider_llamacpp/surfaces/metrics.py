"""``metrics``: the server's Prometheus figures as JSON, and the worker's own beside them.

Neither wakes a sleeping model nor keeps one awake (llama-server API 13 and 14).
"""

from __future__ import annotations

import math
import re
from typing import Any

from .. import fields
from ..calls import Call
from ..errors import BusError, ProviderError
from ..server.asking import failed
from .context import Context

OURS = (
    *("uptime", "active_streams", "max_streams", "calls", "reconnects"),
    *("frames", "bytes", "outcomes", "usage"),
)
"""Figures of the worker; ``status`` tells more."""
_SAMPLE = re.compile(
    r'(?P<series>(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?)'
    r"\s+(?P<value>\S+)(?:\s+-?[0-9]+)?\s*"
)


def metrics(context: Context, data: object, call: Call) -> dict[str, Any]:
    """The figures; those of the server are null, with the reason, where it has none.

    :raises BusError: the payload is not sound
    :raises Interrupted: if ``call`` is aborted
    """
    payload = fields.payload(data)
    path = "/metrics" + context.query(payload)
    stats = context.stats()
    server: dict[str, Any] | None = None
    problem = None
    try:
        reply = context.ask(call, "GET", path, flag="--metrics")
        server = parse(reply.body.decode("utf-8", "replace"))
    except (BusError, ProviderError) as error:
        problem = (failed(error) if isinstance(error, ProviderError) else error).message
    return {"server": server, "problem": problem, "worker": {name: stats[name] for name in OURS}}


def parse(text: str) -> dict[str, dict[str, Any]]:
    """Prometheus' text form: series -> ``value``, ``kind`` and ``help``.

    Lines that do not fit are left out. A value that JSON cannot hold is null.
    """
    about: dict[str, dict[str, str]] = {"HELP": {}, "TYPE": {}}
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            words = line.split(None, 3)
            if len(words) == 4 and words[1] in about:
                about[words[1]][words[2]] = words[3].strip()
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        name = sample["name"]
        found[sample["series"]] = {
            "value": _number(value),
            "kind": about["TYPE"].get(name, "untyped"),
            "help": about["HELP"].get(name, ""),
        }
    return found


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value
