"""Follows what a server in router mode tells of its models: one quiet thread, no polling.

``GET /models/sse`` stays open for as long as the server does. It says nothing while nothing
happens, not even its headers, and repeats nothing: so whoever follows is told to look at the models
once the connection stands, and again when it was lost (llama-server API 10).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..calls import Call
from ..errors import Interrupted, ProviderError
from ..events.sse import EventCutter
from .modelevents import ModelEvent, Progress, read_event
from .upstream import Target, Upstream

PATH = "/models/sse"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between tries to take it up again."""
SOUND = 5.0
"""A connection that lasted for so many seconds was a good one: the pauses begin anew."""
_LACKING = frozenset({400, 401, 403, 404, 405, 501})
"""The server has no such events, or not for us."""

log = logging.getLogger(__name__)


class Follower:
    """One for a provider. Safe to share between threads; starts its thread when there is something
    to follow.

    :param name: of the thread
    :param changed: called when the models are to be looked at; must not block
    """

    def __init__(self, upstream: Upstream, *, name: str, changed: Callable[[], None]) -> None:
        self._upstream = upstream
        self._name = name
        self._changed = changed
        self._state = threading.Condition()
        self._offered: tuple[Target, str | None] | None = None
        self._lacking: tuple[Target, str | None] | None = None
        """What was offered and found to have no events: not tried again until it changes."""
        self._call: Call | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._progress: dict[str, Progress] = {}
        self._hearers: list[Callable[[ModelEvent], None]] = []

    # -- questions -----------------------------------------------------------------------------

    def progress(self, model: str) -> Progress | None:
        """How far a load or download of ``model`` (its canonical id) has come; None if there is
        none, or nothing tells."""
        with self._state:
            return self._progress.get(model)

    @property
    def follows(self) -> bool:
        """Whether there is a server that tells its events, as far as is known."""
        with self._state:
            return self._wanted() is not None

    def hear(self, hearer: Callable[[ModelEvent], None]) -> None:
        """Have ``hearer`` called with every event, on the follower's thread; it must not block."""
        with self._state:
            self._hearers.append(hearer)

    def leave(self, hearer: Callable[[ModelEvent], None]) -> None:
        """Call ``hearer`` no more."""
        with self._state:
            self._hearers.remove(hearer)

    # -- life ----------------------------------------------------------------------------------

    def offer(self, target: Target | None, build: str | None = None) -> None:
        """The server to follow from now on; None for none. Returns at once.

        :param build: a newer one may have events where an older one had none
        """
        with self._state:
            offered = None if target is None else (target, build)
            if self._stopping or offered == self._offered:
                return
            moved = self._offered is not None and self._offered[0] != target
            self._offered = offered
            call = self._call if moved else None
            if self._thread is None and offered is not None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._state.notify_all()
        if call is not None:
            call.abort("stop")

    def stop(self, timeout: float) -> None:
        """Stop following and wait for the thread."""
        with self._state:
            self._stopping = True
            call, thread = self._call, self._thread
            self._state.notify_all()
        if call is not None:
            call.abort("stop")
        if thread is not None:
            thread.join(timeout)

    # -- the thread ----------------------------------------------------------------------------

    def _wanted(self) -> tuple[Target, str | None] | None:
        """What is to be followed; needs the lock."""
        return None if self._offered == self._lacking else self._offered

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            with self._state:
                self._state.wait_for(lambda: self._stopping or self._wanted() is not None)
                wanted = self._wanted()
                if self._stopping or wanted is None:
                    return
                self._call = call = Call(0, "follow", key=None, model=None)
            began = time.monotonic()
            try:
                self._follow(wanted, call)
            except Exception:
                # A safety net: the catalog would go stale in silence.
                log.exception("following the models of %s failed; it goes on", wanted[0].root)
            with self._state:
                self._call = None
                self._progress = {}
                if time.monotonic() - began >= SOUND:
                    pause = FIRST_PAUSE
                if self._moved_within(pause, wanted):
                    pause = FIRST_PAUSE
                else:
                    pause = min(2 * pause, LONGEST_PAUSE)

    def _moved_within(self, seconds: float, followed: tuple[Target, str | None]) -> bool:
        """Whether there is something else to do than to follow ``followed``; needs the lock."""
        return self._state.wait_for(lambda: self._stopping or self._wanted() != followed, seconds)

    def _follow(self, wanted: tuple[Target, str | None], call: Call) -> None:
        """Until the connection is lost, or another server is to be followed."""
        target = wanted[0]
        line = self._upstream.line(call)
        line.on_made = self._changed
        try:
            with self._upstream.open_stream(
                target, PATH, None, call, method="GET", line=line
            ) as stream:
                log.debug("following the models of %s", target.root)
                cutter = EventCutter()
                while block := stream.read():
                    for item in cutter.feed(block):
                        if isinstance(item, bytes) and (event := read_event(item)) is not None:
                            self._take(event)
        except Interrupted:
            return
        except ProviderError as error:
            if error.status in _LACKING:
                log.info("%s tells nothing of its models: %s", target.root, error.message)
                with self._state:
                    self._lacking = wanted
                return
            log.debug("the models of %s are not followed: %s", target.root, error)
        if line.connected:
            self._changed()

    def _take(self, event: ModelEvent) -> None:
        with self._state:
            if event.progress is not None:
                self._progress[event.model] = event.progress
            else:
                self._progress.pop(event.model, None)
            hearers = list(self._hearers)
        for hear in hearers:
            hear(event)
        if event.changes:
            self._changed()
