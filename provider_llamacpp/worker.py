"""The worker: builds the parts, starts and stops them. The public face of the package.

It installs no signal handlers and no logging, and keeps nothing in module state: two workers run
in one process.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ._version import VERSION
from .bus.channel import Channel, ChannelWatch
from .bus.engine import Engine
from .calls import Call
from .errors import FatalError
from .payloads import WriterRef
from .refusals import Refusals
from .served import ServedProvider
from .settings import Settings
from .summaries import Reporter
from .surfaces.outlet import Outlets
from .watchdog import Watchdog, Watched

DESCRIPTION = "llama.cpp (llama-server) as a provider behind llm-router"
CUT_GRACE = 2.0
"""Seconds for streams to say their last frame after a stop cut them, then for their channels."""

log = logging.getLogger(__name__)


class ProviderWorker:
    """One worker on one engine.

    ::

        with ProviderWorker(Settings(url="ws://127.0.0.1:49134")) as worker:
            worker.wait()

    A worker lives in the process that started it: its threads do not come along with a fork. One
    made before a fork may be started after it, on either side.

    :param settings: see :class:`~provider_llamacpp.settings.Settings`
    :raises SettingsError: ``tracing`` is on and ``opentelemetry-api`` is not installed
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings = settings or Settings()
        self._stop_event = threading.Event()
        self._hurry = threading.Event()
        self._ended = threading.Event()
        self._state_lock = threading.Lock()
        self._started = self._stopping = False
        self._outlets = Outlets()
        self._started_at: float | None = None
        self._process: int | None = None
        """Where it was started."""
        self._reporter = _reporter(settings)
        self._watch = ChannelWatch(f"{settings.id}-channels")
        self._engine = Engine(
            settings.url,
            name=settings.name,
            version=VERSION,
            description=DESCRIPTION,
            token=settings.token,
            namespace=settings.namespace,
            ca_file=settings.ca_file,
            client_cert=settings.client_cert,
            connect_timeout=settings.connect_timeout,
            thread_name=f"{settings.id}-engine",
        )
        # One source of numbers, so that logs and the watchdog tell all calls apart.
        numbers = itertools.count(1)
        self._served = [
            ServedProvider(each, self._engine, self._stop_event, numbers, probes=not at)
            for at, each in enumerate(settings.providers())
        ]
        self._watchdog = Watchdog(self._writers, settings.ping_interval)
        self._pool: ThreadPoolExecutor | None = None
        self._refusals: Refusals | None = None

    # -- life -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads and return; connecting goes on in the background.

        :raises RuntimeError: if it was started before; make a new worker to start again
        """
        self._check_process()
        with self._state_lock:
            if self._started:
                raise RuntimeError("this worker was started before; make a new one")
            self._started = True
        self._process = os.getpid()
        self._started_at = time.monotonic()
        settings = self.settings
        self._pool = ThreadPoolExecutor(
            sum(each.threads for each in self._served), thread_name_prefix=f"{settings.id}-call"
        )
        self._refusals = Refusals(f"{settings.id}-refusal")
        for each in self._served:
            for function in each.functions(
                pool=self._pool,
                refusals=self._refusals,
                open_channel=self._open_channel,
                outlets=self._outlets,
                stats=partial(self._stats_of, each),
                tell=None if self._reporter is None else self._reporter.tell,
            ):
                self._engine.register(function)
            self._engine.register_trigger(
                "router::ready", f"provider::{each.id}::on_router_ready", {}
            )
        self._engine.on_connect.append(self._connected)
        if self._reporter is not None:
            self._reporter.start()
        self._watch.start()
        self._watchdog.start(f"{settings.id}-watchdog")
        self._engine.start()
        for each in self._served:
            each.provider.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the worker has stopped; False if it still runs after ``timeout`` seconds.

        :raises FatalError: if it cannot go on, for example because its name is taken on the bus
        :raises RuntimeError: after a fork
        """
        self._check_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.is_set():
            if self._engine.fatal is not None:
                self.stop(drain=0)
                raise FatalError(str(self._engine.fatal)) from self._engine.fatal
            left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            if left <= 0:
                return False
            self._ended.wait(left)
        return True

    def stop(self, drain: float | None = None) -> None:
        """Refuse new calls, let running streams end for ``drain`` seconds, then cut them.

        Streams that are cut end with an ``error`` frame of kind ``transient``. Called again, from
        another thread, it ends a drain that still runs, and waits for the end. After a fork it does
        nothing: the worker goes on in the process that started it.

        :param drain: seconds; None takes the setting
        """
        if not self._at_home:
            return
        with self._state_lock:
            first = self._started and not self._stopping
            self._stopping = self._stopping or self._started
        if not first:
            self._hurry.set()
            if self._started:
                self._ended.wait(2 * CUT_GRACE + 10.0)
            return
        for each in self._served:
            each.registry.refuse()
            # They have no end of their own to wait for.
            each.registry.abort_all("stop", kind="watch")
        self._drain(self.settings.drain if drain is None else drain)
        self._stop_event.set()
        for each in self._served:
            each.registry.abort_all("stop")
        if not self._wait_idle(CUT_GRACE):
            for writer in self._writers():
                if writer.channel is not None:
                    writer.channel.cut()
            if not self._wait_idle(CUT_GRACE):
                left = sum(len(each.registry.snapshot()) for each in self._served)
                log.error("%d calls did not end", left)
        self._shut_down()

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self._hurry.is_set():
            # Short waits: a second stop ends the drain, and the registries know no hurry.
            if self._wait_idle(min(left, 0.1)):
                return

    def _wait_idle(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        return all(
            each.registry.wait_idle(max(0.0, deadline - time.monotonic())) for each in self._served
        )

    def _shut_down(self) -> None:
        assert self._pool is not None and self._refusals is not None
        for pool in (self._refusals, self._pool):
            # The calls are over, their answers may still be on the way to the bus. A call that
            # did not end must not hold up the stop, so nobody waits for the pool itself.
            ending = threading.Thread(
                target=pool.shutdown,
                kwargs={"cancel_futures": True},
                name=f"{self.settings.id}-ending",
                daemon=True,
            )
            ending.start()
            ending.join(CUT_GRACE)
        self._engine.stop()
        for each in self._served:
            each.provider.stop(CUT_GRACE)
        self._watchdog.stop(CUT_GRACE)
        self._watch.stop()
        if self._reporter is not None:
            self._reporter.stop(CUT_GRACE)
        self._ended.set()

    def __enter__(self) -> ProviderWorker:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # -- facts ----------------------------------------------------------------------------

    def wait_connected(self, timeout: float) -> bool:
        """Wait for the engine; False if it was not reached within ``timeout`` seconds.

        :raises RuntimeError: after a fork
        """
        self._check_process()
        return self._engine.wait_connected(timeout)

    @property
    def alive(self) -> bool:
        """Whether the threads that must always run do; False after a fork."""
        if not self._at_home:
            return False
        keepers = all(each.provider.alive for each in self._served)
        return keepers and self._watchdog.alive and not self._engine.wait_ended(0)

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the router took declaration and catalog of every provider; False after
        ``timeout`` s.

        :raises FatalError: as :meth:`wait`, as soon as it is known
        :raises RuntimeError: after a fork
        """
        self._check_process()
        deadline = time.monotonic() + timeout
        for each in self._served:
            ready = each.provider.ready
            while not ready.wait(max(0.0, min(0.1, deadline - time.monotonic()))):
                if self._engine.fatal is not None:
                    raise FatalError(str(self._engine.fatal)) from self._engine.fatal
                if time.monotonic() >= deadline:
                    return False
        return True

    def stats(self, provider: str | None = None) -> dict[str, Any]:
        """What the worker does now: plain values, no secrets. Asks nobody and wakes nothing.

        Its shape is the response schema of ``provider::<id>::status``.

        :param provider: whose streams, totals and errors; None is the first one. ``providers``
            lists all of them
        :raises KeyError: it has no such provider
        :raises RuntimeError: after a fork
        """
        self._check_process()
        by_id = {each.id: each for each in self._served}
        return self._stats_of(self._served[0] if provider is None else by_id[provider])

    def _stats_of(self, served: ServedProvider) -> dict[str, Any]:
        facts = served.facts(self._watchdog.silence)
        now = time.monotonic()
        return {
            "version": VERSION,
            "uptime": round(now - (self._started_at or now), 1),
            "connected": self._engine.connected,
            "reconnects": max(0, self._engine.connections - 1),
            **facts,
            "last_error": facts["last_error"]
            or self._engine.last_error
            or served.provider.last_error,
            "providers": [each.brief() for each in self._served],
        }

    @property
    def _at_home(self) -> bool:
        """Whether this is the process that started it, if one has."""
        return self._process in (None, os.getpid())

    def _check_process(self) -> None:
        # Before any lock is taken: one that another thread held at the fork stays locked for ever.
        if not self._at_home:
            raise RuntimeError(
                f"this worker runs in process {self._process}, and its threads did not come along "
                f"with the fork to {os.getpid()}: make a new worker here"
            )

    # -- parts ----------------------------------------------------------------------------

    def _connected(self, reconnected: bool) -> None:
        for each in self._served:
            if reconnected:
                reason = self._engine.last_error or "the connection was lost"
                each.errors.add("engine", "disconnected", reason)
            # The first time too: the keeper waits for the engine with longer and longer pauses.
            each.provider.router_ready()

    def _writers(self) -> list[Watched]:
        runs = [run for each in self._served for run in each.runs.snapshot()]
        return [*runs, *self._outlets.snapshot()]

    def _open_channel(
        self, writer: WriterRef, call: Call, meanwhile: Callable[[], None] = lambda: None
    ) -> Channel:
        settings = self.settings

        def gone() -> None:
            call.abort("consumer gone")

        return Channel.open(
            settings.url,
            writer,
            token=settings.token,
            connect_timeout=settings.connect_timeout,
            send_timeout=settings.send_timeout,
            ca_file=settings.ca_file,
            client_cert=settings.client_cert,
            watch=self._watch,
            on_gone=gone,
            call=call,
            meanwhile=meanwhile,
        )


def _reporter(settings: Settings) -> Reporter | None:
    """What tells observers of calls; None if there are none.

    :raises SettingsError: as :func:`~provider_llamacpp.tracing.span_maker`
    """
    observers = [] if settings.on_call is None else [settings.on_call]
    if settings.tracing:
        from .tracing import span_maker

        observers.append(span_maker())
    return Reporter(observers, f"{settings.id}-observers") if observers else None
