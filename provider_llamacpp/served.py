"""One provider of a worker with all that is its own: limits, calls, totals, errors, functions.

A worker may serve several. They share its connection to the engine, its threads and its watch over
channels, and nothing else: an abort, a full queue or a dead server of one is none of another's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

from .bus.engine import Engine, Function
from .calls import CallRegistry
from .handlers import Handlers, Means
from .provider import Provider
from .recent import RecentErrors
from .refusals import Refusals
from .router import RouterClient
from .runs import Runs
from .server.discovery import PORTS, Discovery
from .server.upstream import Upstream
from .settings import Settings
from .streaming import OpenChannel
from .summaries import CallSummary
from .surfaces.outlet import Outlets

MAX_WATCHES = 8
"""Callers at once who are told what becomes of models; apart, as they may stay for hours."""

Silence = Callable[[int, float], float | None]
"""For how many seconds the caller of a stream has got nothing: see :meth:`.watchdog.Watchdog`."""


class ServedProvider:
    """The provider of ``settings.id``.

    :param numbers: of the calls; those of all providers of a worker come from one source
    :param probes: look at the usual ports of this machine where nobody says where the server is
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        stop: threading.Event,
        numbers: Iterator[int],
        *,
        probes: bool,
    ) -> None:
        self.settings = settings
        self.id = settings.id
        self.registry = CallRegistry(
            {
                "stream": settings.max_streams,
                "request": settings.max_requests,
                "watch": MAX_WATCHES,
            },
            numbers,
        )
        self.errors = RecentErrors()
        self.runs = Runs(self.errors)
        upstream = Upstream(
            connect_timeout=settings.connect_timeout,
            ca_file=settings.ca_file,
            client_cert=settings.client_cert,
        )
        router = RouterClient(
            engine.invoke,
            provider_id=settings.id,
            worker_name=settings.name,
            key_variable=settings.key_variable,
            own_key=settings.api_key,
            namespace=settings.namespace,
            stop=stop,
        )
        self.provider = Provider(
            settings,
            router,
            upstream,
            Discovery(upstream, provider=settings.id, ports=PORTS if probes else ()),
            lambda: engine.connected,
            self.errors,
        )

    @property
    def threads(self) -> int:
        """Of the pool that its calls take at most."""
        return self.settings.max_streams + self.settings.max_requests + MAX_WATCHES

    def functions(
        self,
        *,
        pool: Executor,
        refusals: Refusals,
        open_channel: OpenChannel,
        outlets: Outlets,
        stats: Callable[[], dict[str, Any]],
        tell: Callable[[CallSummary], None] | None,
    ) -> list[Function]:
        """What to register on the bus: see :class:`~provider_llamacpp.handlers.Means`."""
        means = Means(
            registry=self.registry,
            runs=self.runs,
            pool=pool,
            refusals=refusals,
            open_channel=open_channel,
            fat_deltas=self.settings.fat_deltas,
            errors=self.errors,
            stats=stats,
            outlets=outlets,
            tell=tell,
        )
        return Handlers(self.provider, means).functions()

    def facts(self, silence: Silence) -> dict[str, Any]:
        """What it does now: plain values, no secrets. Asks nobody and wakes nothing."""
        now = time.monotonic()
        runs, totals = self.runs.snapshot(), self.runs.totals()
        last_error = totals.pop("last_error")
        return {
            "id": self.id,
            "server": self.provider.server_facts(now),
            "active_streams": len(runs),
            "max_streams": self.settings.max_streams,
            "streams": [run.summary(silence(run.call.number, now)) for run in runs],
            "calls": len(self.registry.snapshot()),
            **totals,
            "errors": self.errors.facts(),
            "last_error": last_error,
        }

    def brief(self) -> dict[str, Any]:
        """The same in short, for a list of all providers."""
        server = self.provider.server_facts(time.monotonic())
        return {
            "id": self.id,
            "url": server["url"],
            "state": server["state"],
            "active_streams": len(self.runs.snapshot()),
        }
