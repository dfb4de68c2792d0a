"""The models of a server in router mode: load, unload, download, delete, and watch them come.

Each is one short request; llama-server answers at once and does the work afterwards. What became of
it is told by the rows of ``/v1/models``, which a :class:`Watch` looks at; how far it has come is
told by events alone (:mod:`.follower`). Nothing here wakes or loads a model but what says so.
llama-server API 10.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from ..calls import Call
from ..errors import BusError, Interrupted
from ..lenient import boolean, text, texts
from .asking import ask, failure, read_object, refused, unsound
from .catalog import model_info, row_status, state_of
from .follower import Follower
from .modelevents import ModelEvent
from .upstream import Reply, Target, Upstream

SECONDS = 20.0
"""For one request. To check the name of a download the server asks its hub."""
LOOK_SECONDS = 1.0
"""Between two looks at a model that is watched, beside those that an event gives reason for."""
ENDED_SECONDS = 60.0
"""A failure so soon after a load or download was ended on demand is that very end."""
UNDERWAY = ("loading", "downloading")
"""States that end by themselves: what a watch waits for."""
RUNS = ("loaded", "sleeping", "loading")
"""States with a process, or soon with one: there is nothing to load."""
_LISTED = 12
"""Models that are named to who asks for one that is not there."""
_ROWS = "/v1/models"

Row = Mapping[str, Any]
Frame = dict[str, Any]


class ModelManager:
    """The models of one provider's server. Safe to share between threads."""

    def __init__(self, upstream: Upstream, follower: Follower) -> None:
        self._upstream = upstream
        self._follower = follower
        self._ended = _Lately()
        """Loads and downloads that were ended on demand: their rows tell a failure."""
        self._asked_for = _Lately()
        """Downloads begun here: one that fails at once leaves no row to see it by."""

    # -- looking -------------------------------------------------------------------------------

    def rows(self, target: Target, call: Call | None = None, *, reload: bool = False) -> list[Row]:
        """The rows of the server's models.

        :param reload: have it read its sources again first, which unloads running models whose
            options were changed
        :raises BusError: ``invocation_failed``
        :raises Interrupted: if ``call`` is aborted
        """
        path = "/models?reload=1" if reload else _ROWS
        reply = ask(self._upstream, target, "GET", path, timeout=SECONDS, call=call)
        if not reply.ok:
            raise refused(reply)
        rows = read_object(reply, path).get("data")
        if not isinstance(rows, list):
            raise unsound(path, "the answer holds no models")
        return [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]

    def row(self, target: Target, model: str, call: Call | None = None) -> Row | None:
        """The row of ``model`` (an id or an alias); None if there is none.

        :raises BusError: as :meth:`rows`
        """
        return find(self.rows(target, call), model)

    def failed_to_load(self, target: Target, model: str, call: Call | None = None) -> Row | None:
        """The row of ``model`` if it says now that it failed, and nobody ended it on demand.

        :raises BusError: as :meth:`rows`
        """
        row = self.row(target, model, call)
        if row is None or state_of(row, {}) != "failed" or self.was_ended(str(row["id"])):
            return None
        return row

    def facts(self, row: Row) -> dict[str, Any]:
        """A row in plain values, as ``models_list`` gives it."""
        info = model_info(row, {})
        assert info is not None, "rows have ids"
        progress = self._follower.progress(info.id)
        return {
            "id": info.id,
            "aliases": list(info.aliases),
            "tags": texts(row.get("tags")),
            "state": info.state,
            "exit_code": info.exit_code,
            "progress": None if progress is None else progress.facts(),
            "context_window": info.abilities.context_window,
            "for_chat": info.for_chat,
            "source": text(row.get("source")),
            "can_remove": boolean(row.get("can_remove")),
        }

    def was_ended(self, model: str) -> bool:
        """Whether a load or download of ``model`` was just now ended on demand of this worker."""
        return model in self._ended

    def was_asked_for(self, model: str) -> bool:
        """Whether a download of ``model`` was begun just now by this worker."""
        return model in self._asked_for

    # -- doing ---------------------------------------------------------------------------------

    def load(self, target: Target, model: str, call: Call | None = None) -> dict[str, Any]:
        """Begin to load ``model``; one that runs stays as it is.

        :returns: ``model`` (its id) and its ``state`` now
        :raises BusError: there is no such model, or the server refused
        """
        row = self._known(target, model, call)
        name, state = str(row["id"]), state_of(row, {})
        if state in RUNS:
            return {"model": name, "state": state}
        self._ended.discard(name)
        reply = self._post(target, "/models/load", name, call)
        if not reply.ok and not _says(reply, "already running"):
            raise _refused(reply)
        return {"model": name, "state": "loading"}

    def unload(self, target: Target, model: str, call: Call | None = None) -> dict[str, Any]:
        """Unload ``model``, or end its load or download; one that does not run stays as it is.

        A running stream of it breaks off. Returns and raises as :meth:`load`.
        """
        row = self._known(target, model, call)
        name, state = str(row["id"]), state_of(row, {})
        if state not in RUNS and state not in UNDERWAY:
            return {"model": name, "state": state}
        if state in UNDERWAY:
            self._ended.add(name)
        reply = self._post(target, "/models/unload", name, call)
        if not reply.ok and not _says(reply, "not running"):
            raise _refused(reply)
        return {"model": name, "state": "unloaded"}

    def download(self, target: Target, model: str, call: Call | None = None) -> dict[str, Any]:
        """Begin to download ``model`` (``user/name`` or ``user/name:quant``) into the server's
        cache; one that is there already stays as it is. Returns and raises as :meth:`load`."""
        rows = self.rows(target, call)
        row = find(rows, model)
        if row is not None:
            return {"model": str(row["id"]), "state": state_of(row, {})}
        _check_manages(rows)
        self._ended.discard(model)
        reply = self._post(target, "/models", model, call)
        if not reply.ok:
            raise _refused(reply)
        self._asked_for.add(model)
        return {"model": model, "state": "downloading"}

    def delete(self, target: Target, model: str, call: Call | None = None) -> dict[str, Any]:
        """Delete a downloaded ``model`` from the server's disk. Raises as :meth:`load`."""
        row = self._known(target, model, call)
        name = str(row["id"])
        path = f"/models?model={quote(name, safe='', errors='replace')}"
        reply = ask(self._upstream, target, "DELETE", path, timeout=SECONDS, call=call)
        if not reply.ok:
            raise _refused(reply)
        return {"model": name}

    def _known(self, target: Target, model: str, call: Call | None) -> Row:
        rows = self.rows(target, call)
        _check_manages(rows)
        row = find(rows, model)
        if row is None:
            names = [str(each["id"]) for each in rows]
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            listed = ", ".join(names[:_LISTED]) + more if names else "none"
            raise failure("invalid_input", f"llama-server has no model {model!r}; it has {listed}")
        return row

    def _post(self, target: Target, path: str, model: str, call: Call | None) -> Reply:
        payload = {"model": model}
        return ask(self._upstream, target, "POST", path, payload, timeout=SECONDS, call=call)

    # -- watching ------------------------------------------------------------------------------

    def watch(
        self,
        target: Target,
        model: str | None,
        tell: Callable[[Frame], None],
        call: Call,
    ) -> Frame:
        """Tell what becomes of ``model`` until its load or download has ended, however it did.

        Ends at once if nothing is under way. Without a model, tells what becomes of all of them,
        until ``call`` is aborted.

        :param tell: gets ``status``, ``progress``, ``removed`` and ``reloaded`` frames
        :returns: the last frame: ``done``, ``failed`` or ``cancelled``
        :raises BusError: the server cannot be asked, or tells no events of all its models
        :raises Interrupted: if ``call`` is aborted
        """
        with self._events(call) as events:
            if model is not None:
                return _Watch(self, target, model, tell, call).run(events)
            if not self._follower.follows:
                raise failure(
                    "provider/config",
                    "this llama-server tells nothing of its models: it needs a newer build, in "
                    "router mode (started without a model)",
                )
            while (event := events.get()) is not None:
                tell(event_frame(event))
            raise Interrupted(call.reason or "stop")

    @contextmanager
    def _events(self, call: Call) -> Iterator[queue.SimpleQueue[ModelEvent | None]]:
        """The server's events from now on; None among them is no event, but an abort."""
        events: queue.SimpleQueue[ModelEvent | None] = queue.SimpleQueue()
        self._follower.hear(events.put)
        try:
            with call.interruptible(lambda: events.put(None)):
                yield events
        finally:
            self._follower.leave(events.put)


class _Lately:
    """Models of which something was done in the last :data:`ENDED_SECONDS`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at: dict[str, float] = {}

    def add(self, model: str) -> None:
        """It is done now."""
        now = time.monotonic()
        with self._lock:
            recent = {name: at for name, at in self._at.items() if now - at < ENDED_SECONDS}
            self._at = {**recent, model: now}

    def discard(self, model: str) -> None:
        """It does not count any more."""
        with self._lock:
            self._at.pop(model, None)

    def __contains__(self, model: str) -> bool:
        with self._lock:
            at = self._at.get(model)
        return at is not None and time.monotonic() - at < ENDED_SECONDS


class _Watch:
    """One model, from its row and its events."""

    def __init__(
        self,
        manager: ModelManager,
        target: Target,
        model: str,
        tell: Callable[[Frame], None],
        call: Call,
    ) -> None:
        self._manager = manager
        self._target = target
        self._model = model
        self._tell = tell
        self._call = call
        self._state: str | None = None
        self._activity: str | None = None
        """``loading`` or ``downloading``, once it was seen."""

    def run(self, events: queue.SimpleQueue[ModelEvent | None]) -> Frame:
        last = self._look()
        due = time.monotonic() + LOOK_SECONDS
        while last is None:
            try:
                event = events.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                event = None
            self._call.check()
            if event is not None:
                if event.model != self._model and event.kind != "reloaded":
                    continue
                if event.progress is not None:
                    self._see(event.progress.activity)
                    if not event.changes:
                        self._tell(event_frame(event))
                if not event.changes:
                    continue
            last = self._look()
            due = time.monotonic() + LOOK_SECONDS
        return last

    def _see(self, state: str) -> None:
        if state in UNDERWAY:
            self._activity = state
        if state != self._state:
            self._state = state
            self._tell({"type": "status", "model": self._model, "state": state})

    def _look(self) -> Frame | None:
        """The last frame, if the row says that it is over."""
        row = self._manager.row(self._target, self._model, self._call)
        if row is None:
            return self._gone()
        self._model = str(row["id"])
        state = state_of(row, {})
        if state in UNDERWAY:
            self._see(state)
            return None
        if state == "failed":
            return self._failed(row)
        if state == "unloaded" and self._activity == "loading":
            return self._cancelled("it was unloaded while it was loading")
        self._see(state)
        return {"type": "done", "model": self._model, "state": state}

    def _failed(self, row: Row) -> Frame:
        if self._manager.was_ended(self._model):
            return self._cancelled("it was unloaded while it was loading")
        code = row_status(row).get("exit_code")
        ended = f" (its process exited with code {code})" if isinstance(code, int) else ""
        return self._end(
            "failed", f"{self._model} failed to load{ended}: see llama-server's log", exit_code=code
        )

    def _gone(self) -> Frame:
        """There is no row: such is the end of a download that failed, too."""
        if self._manager.was_ended(self._model):
            return self._cancelled("the download was cancelled")
        if self._activity is None and not self._manager.was_asked_for(self._model):
            return self._end("failed", f"llama-server has no model {self._model!r}")
        return self._end(
            "failed",
            f"{self._model} could not be downloaded: see llama-server's log (does its hub have "
            "such a model, and can it be reached?)",
        )

    def _cancelled(self, message: str) -> Frame:
        return self._end("cancelled", message)

    def _end(self, kind: str, message: str, **more: Any) -> Frame:
        return {"type": kind, "model": self._model, "message": message, **more}


def event_frame(event: ModelEvent) -> Frame:
    """What a watcher is told of an event."""
    if event.progress is not None and not event.changes:
        return {"type": "progress", "model": event.model, **event.progress.facts()}
    if event.kind in ("removed", "reloaded"):
        return {"type": event.kind, "model": event.model}
    states = {"finished": "downloaded", "failed": "download failed"}
    state = event.status or states.get(event.kind, "unknown")
    frame = {"type": "status", "model": event.model, "state": state}
    return frame if event.exit_code is None else {**frame, "exit_code": event.exit_code}


def find(rows: Sequence[Row], model: str) -> Row | None:
    """The row under the id or an alias ``model``."""
    for row in rows:
        if row["id"] == model or model in texts(row.get("aliases")):
            return row
    return None


def _check_manages(rows: Sequence[Row]) -> None:
    """:raises BusError: if the rows are those of a server with one model of its own"""
    if rows and not any(map(row_status, rows)):
        raise failure(
            "provider/config",
            "this llama-server serves one model and manages none: start it without a model, with "
            "--models-dir or --models-preset (router mode)",
        )


def _refused(reply: Reply) -> BusError:
    if reply.status in (404, 405):
        return failure(
            "provider/config",
            "this llama-server cannot manage models: it needs a newer build, in router mode "
            "(started without a model)",
        )
    return refused(reply)


def _says(reply: Reply, words: str) -> bool:
    return reply.status == 400 and words.encode() in reply.body
