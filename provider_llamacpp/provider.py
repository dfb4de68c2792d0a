"""One provider: where its server is, what it serves, and the thread that keeps both true.

:class:`Provider` answers the calls' questions (which address, which abilities); its keeper thread
declares the provider to the router and keeps the catalog fresh. All declarations and timed
refreshes run on that one thread, so they never overlap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .calls import Call
from .errors import BusError, ProviderError
from .recent import RecentErrors
from .router import DEFAULT_MAX_TOKENS, REJECTED, RouterClient
from .server.catalog import row_status
from .server.embeddings import Embedder
from .server.follower import Follower
from .server.health import Health
from .server.management import ModelManager
from .server.modelevents import Progress
from .server.queries import TokenCounter
from .server.resume import Resumer
from .server.upstream import Target, Upstream, normalise_api_url
from .settings import Settings
from .transcript.convert import Abilities

if TYPE_CHECKING:
    from .server.catalog import Catalog
    from .server.discovery import Discovery

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds between tries to declare (provider protocol 2.3) or to find the server."""
UNKNOWN_MODEL_PAUSE = 30.0
"""A model that stays unknown triggers a refresh once in so many seconds, not at each answer."""

EVENT_PAUSE = 0.2
"""Seconds from what the server tells of its models to the look at them: a load tells several things
at once, and the catalog is to be right within a second."""

log = logging.getLogger(__name__)


class Provider:
    """The provider ``settings.id``.

    :param connected: whether the bus is up; the keeper waits for it
    :param errors: told what the keeper could not do
    """

    def __init__(
        self,
        settings: Settings,
        router: RouterClient,
        upstream: Upstream,
        discovery: Discovery,
        connected: Callable[[], bool],
        errors: RecentErrors | None = None,
    ) -> None:
        self.id = settings.id
        self.upstream = upstream
        self.resumer = Resumer(upstream, settings.resume, settings.resume_budget)
        self.counter = TokenCounter(upstream)
        self.embedder = Embedder(upstream)
        self.discovery = discovery
        self.follower = Follower(
            upstream, name=f"{settings.id}-events", changed=lambda: self.refresh_soon(EVENT_PAUSE)
        )
        self.models = ModelManager(upstream, self.follower)
        self.router = router
        router.on_refused = self._declare_again
        self._settings = settings
        self._connected = connected
        self._wake = threading.Condition()
        """Guards what the keeper is to do (stopping, declare, nudged, refresh at); the keeper alone
        may write it without."""
        self._normalised: tuple[str, str] | None = None
        self._stopping = False
        self._declare = True
        self._nudged = False
        self._content = False
        """The last round went well, and the next is not due."""
        self._refresh_at = 0.0
        self._force = True
        """The keeper's: the next refresh tells the router all, for it was declared anew."""
        self._unknown_until = 0.0
        self._refreshing = threading.Lock()
        """Held by the one refresh that runs: it alone writes catalog, health, declared and
        reconciled, each replaced whole."""
        self._catalog: Catalog | None = None
        self._health = Health()
        self._errors = errors or RecentErrors()
        self._declared: list[str] = []
        self._reconciled: list[dict[str, Any]] | None = None
        self._thread: threading.Thread | None = None
        self.ready = threading.Event()
        """Set once the router took our declaration and a catalog."""
        self.last_error: str | None = None

    # -- questions of calls ---------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """What it was told."""
        return self._settings

    @property
    def catalog(self) -> Catalog | None:
        """What the server served when last asked; None before the first answer."""
        return self._catalog

    def target(self, call: Call | None = None) -> tuple[Target, int]:
        """Address, key and the default for ``max_tokens``.

        :raises ProviderError: naming ``api_url`` where it cannot be used, or as resolve failed
        """
        resolved = self.router.resolve(call)
        api_url = resolved.api_url or self._settings.api_url
        root = self._root(api_url) if api_url else self.discovery.locate(resolved.key, call)
        return Target(root, resolved.key), resolved.max_tokens or DEFAULT_MAX_TOKENS

    def _root(self, api_url: str) -> str:
        """:func:`normalise_api_url`, with the last one kept: it hardly ever changes."""
        known = self._normalised
        if known is None or known[0] != api_url:
            self._normalised = known = api_url, normalise_api_url(api_url)
        return known[1]

    def abilities(self, model: str) -> Abilities:
        """What is known of ``model``; all unknown before the first discovery."""
        return self._catalog.abilities(model) if self._catalog else Abilities()

    def load_failure(self, model: str, target: Target, call: Call | None = None) -> str | None:
        """Why ``model`` could not be loaded, in words; None if the server does not say that it is
        to blame. Asks it: what is known of it may be older than the failure.

        :raises Interrupted: if ``call`` is aborted
        """
        try:
            row = self.models.failed_to_load(target, model, call)
        except BusError as error:
            log.debug("why %s did not load is not known: %s", model, error)
            return None
        if row is None:
            return None
        code = row_status(row).get("exit_code")
        return "it failed" if code is None else f"its process exited with code {code}"

    def progress(self, model: str) -> Progress | None:
        """How far ``model`` has come that is being loaded or downloaded; None if it is not."""
        found = self._catalog.find(model) if self._catalog else None
        progress = self.follower.progress(found.id if found else model)
        if progress is None and found is not None and not self.follower.follows:
            # No event tells: as the row was when it was last looked at.
            return Progress("loading") if found.state == "loading" else None
        return progress

    def server_facts(self, now: float) -> dict[str, Any]:
        """:meth:`.server.health.Health.facts`, with what loads and downloads since then."""
        facts = self._health.facts(now)
        for each in facts["models"]:
            progress = self.follower.progress(each["id"])
            each["progress"] = None if progress is None else progress.facts()
            if progress is not None:
                each["state"] = progress.activity
        return facts

    def answered(self, model: str | None) -> None:
        """The server named ``model`` in an answer: unknown to the catalog means it is stale."""
        catalog = self._catalog
        if model is None or (catalog is not None and catalog.knows(model)):
            return
        if time.monotonic() >= self._unknown_until:
            self._unknown_until = time.monotonic() + UNKNOWN_MODEL_PAUSE
            self.refresh_soon()

    def failed(self, error: ProviderError) -> None:
        """A call failed: drop a refused key; look soon whether the server is back."""
        if error.kind == "auth_expired":
            self.router.forget(token=False)
        elif error.status is None and error.kind == "transient":
            self.refresh_soon()

    # -- the catalog ----------------------------------------------------------------------

    def refresh(self, *, force: bool = True, call: Call | None = None) -> int:
        """Ask the server what it serves and tell the router; the number of models told.

        :param force: tell the router even what it was told before
        :raises ProviderError: if the server could not be asked; the router keeps what it has
        :raises BusError: if the router refused
        """
        with self._refreshing:
            # Asked first, as it is no fault of the server; the answer is kept for the next line.
            self.router.resolve(call)
            try:
                target, _ = self.target(call)
                catalog = self.discovery.discover(target, call)
            except ProviderError as error:
                self._health = self._health.failed(error, time.monotonic())
                raise
            self._health = self._health.answered(target.root, catalog, time.monotonic())
            self._catalog = catalog
            self.follower.offer(target if catalog.router_mode else None, catalog.build)
            ranked = catalog.ranked_ids()
            if ranked and ranked != self._declared:
                self.router.register(ranked)
                self._declared = ranked
            records = catalog.records()
            if force or records != self._reconciled:
                self.router.reconcile(records)
                self._reconciled = records
                log.info("catalog: %d models told to the router", len(records))
            return len(records)

    # -- the keeper -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the keeper."""
        self._stopping = False
        self._thread = threading.Thread(target=self._keep, name=f"{self.id}-keeper", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Stop the keeper and wait for it."""
        self.resumer.close()
        self.follower.stop(timeout)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """Whether the keeper runs."""
        return self._thread is not None and self._thread.is_alive()

    def router_ready(self) -> None:
        """The router (re)started, or the bus did: declare again, then refresh. Returns at once."""
        self.router.expect_registration()
        with self._wake:
            self._declare = self._nudged = True
            self._wake.notify()

    def _declare_again(self) -> None:
        """The router does not know us. That wakes the keeper where it thinks that all is well; else
        it is at it, and has its pauses, however many calls find out."""
        with self._wake:
            self._declare = True
            if self._content:
                self._content = False
                self._nudged = True
                self._wake.notify()

    def refresh_soon(self, after: float = 0.0) -> None:
        """Refresh the catalog on the keeper's thread, in ``after`` seconds. Returns at once."""
        with self._wake:
            self._refresh_at = min(self._refresh_at, time.monotonic() + after if after else 0.0)
            self._nudged = True
            self._wake.notify()

    def _keep(self) -> None:
        pause = FIRST_PAUSE
        while not self._stopping:
            # A nudge during the round must not wait out the pause after it.
            self._nudged = self._content = False
            try:
                ready = self._connected() and self._step()
            except Exception:
                # A safety net: whatever happens in one round, the keeper goes on.
                log.exception("the keeper of %s failed; it goes on", self.id)
                ready = False
            with self._wake:
                # A call may have found out meanwhile that there is more to do.
                self._content = ready and not self._declare
                if self._content:
                    pause = FIRST_PAUSE
                    wait = max(0.0, self._refresh_at - time.monotonic())
                else:
                    wait, pause = pause, min(pause * 2, LONGEST_PAUSE)
                self._wake.wait_for(lambda: self._nudged or self._stopping, wait)

    def _step(self) -> bool:
        """Declare and refresh as far as due; False if something failed and is to be retried."""
        if self._declare:
            with self._wake:
                self._declare = False
            if not self._declare_once():
                with self._wake:
                    self._declare = True
                return False
            self._force = True
            self._refresh_at = 0.0
        if time.monotonic() < self._refresh_at:
            return True
        self._refresh_at = time.monotonic() + self._settings.catalog_interval
        try:
            self.refresh(force=self._force)
        except (ProviderError, BusError) as error:
            return self._refresh_failed(error)
        self._force = False
        self.ready.set()
        self.last_error = None
        return True

    def _declare_once(self) -> bool:
        try:
            self.router.register(self._declared)
        except BusError as error:
            if error.code == REJECTED:
                log.error(
                    "the router refuses to register %r (%s). Its record of this id holds another "
                    "token: clear it there (router state, key 'registry') and restart the router. "
                    "Trying again.",
                    self.id,
                    error.message,
                )
                self.router.forget()
            self._report("declare", error)
            return False
        log.info("declared to the router as %s", self.id)
        return True

    def _refresh_failed(self, error: ProviderError | BusError) -> bool:
        self._refresh_at = 0.0
        self._report("catalog", error)
        return False

    def _report(self, what: str, error: ProviderError | BusError) -> None:
        """Tell of a problem when it is new, not once per try."""
        problem = f"{what}: {error}"
        if problem != self.last_error:
            log.warning("%s; trying again", problem)
            kind = error.code if isinstance(error, BusError) else error.kind
            self._errors.add(what, kind, str(error))
        self.last_error = problem
