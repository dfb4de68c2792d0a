"""``models load``, ``unload``, ``download`` and ``rm``: what changes the models of a server.

Where there is an engine, the worker does it: it knows which server is meant. Nothing is done to a
server that was found by chance instead.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import BusError
from ..settings import Settings
from .terminal import Progress, Terminal, size

if TYPE_CHECKING:
    from ..server.address import Target
    from ..server.management import ModelManager
    from .caller import Caller

ACTIONS = ("load", "unload", "download", "rm")
_NAMES = {"rm": "delete"}
_UNDERWAY = ("loading", "downloading")
_RUNS = ("loaded", "sleeping", "loading")
SECONDS = 30.0
"""For one question to the worker, which gives llama-server 20."""
LONGEST = 24 * 3600.0
"""Seconds a download may be watched."""
UNLOAD_SECONDS = 15.0
"""A busy model gets ten to end what it does."""

Frame = Mapping[str, Any]
Tell = Callable[[Frame], None]


class Way(Protocol):
    """How the server is reached."""

    def do(self, name: str, model: str) -> Frame:
        """Ask for it; the answer says what is so now."""

    def watch(self, model: str, tell: Tell) -> Frame:
        """Wait until a load or a download has ended; the last frame."""

    def state(self, model: str) -> str | None:
        """The state of a model; None if it is not there."""


def manage(settings: Settings, action: str, model: str, *, direct: bool) -> int:
    """Do ``action`` and wait for what comes of it; the exit code.

    :raises BusError: as the worker or the server refused
    :raises ProviderError: if no server was found
    """
    notes = Terminal.of(sys.stderr)
    with _way(settings, notes, direct) as way:
        answer = way.do(_NAMES.get(action, action), model)
        name = str(answer["model"])
        last: Frame = {"type": "done", **answer}
        try:
            if answer.get("state") in _UNDERWAY:
                with notes.progress(f"{action}ing {name}") as bar:
                    last = way.watch(name, lambda frame: _draw(bar, frame))
            elif action == "unload":
                _wait_unloaded(way, name)
        except KeyboardInterrupt:
            notes.line(f"it goes on: provider-llamacpp models unload {name} ends it")
            raise
    if last["type"] != "done":
        notes.line((f"{last['type']}: {last['message']}", "bad"))
        return 1
    state = "deleted" if action == "rm" else last["state"]
    if action == "download" and state == "unloaded":
        state = "downloaded"
    Terminal.of(sys.stdout).line(f"{name} is {state}")
    return 0


def _draw(bar: Progress, frame: Frame) -> None:
    if frame["type"] != "progress" or frame.get("share") is None:
        return
    note = frame.get("stage") or ""
    if frame.get("total"):
        note = f"{size(frame['done'])} of {size(frame['total'])}"
    bar.update(frame["share"], total=1.0, note=note)


def _wait_unloaded(way: Way, model: str) -> None:
    deadline = time.monotonic() + UNLOAD_SECONDS
    pause = threading.Event()
    while way.state(model) in _RUNS and time.monotonic() < deadline:
        pause.wait(0.2)


@contextmanager
def _way(settings: Settings, notes: Terminal, direct: bool) -> Iterator[Way]:
    from ..bus.link import origin
    from .caller import Caller, Unreachable

    why = ""
    if not direct:
        try:
            caller = Caller(settings)
        except Unreachable as error:
            why = f"{error.problem}; "
        else:
            with caller:
                notes.line((f"through the engine at {origin(settings.url)}", "dim"))
                yield _ByBus(caller, settings)
            return
    with _directly(settings, why) as way:
        notes.line((f"{why}directly at {way.root}", "dim"))
        yield way


class _ByBus:
    def __init__(self, caller: Caller, settings: Settings) -> None:
        self._caller = caller
        self._start = f"provider::{settings.id}::models_"

    def do(self, name: str, model: str) -> Frame:
        try:
            answer: Frame = self._call(name, {"model": model}, SECONDS)
            return answer
        except BusError as error:
            if error.code != "function_not_found":
                raise
            raise BusError(
                error.code,
                f"no worker serves {self._start}{name}: start it with --allow-model-management, or "
                "ask llama-server itself with --direct and --api-url",
            ) from error

    def watch(self, model: str, tell: Tell) -> Frame:
        writer, frames = self._caller.open_channel()
        failures: list[BusError] = []

        def ask() -> None:
            try:
                self._call("watch", {"model": model, "writer_ref": writer}, LONGEST)
            except BusError as error:
                failures.append(error)

        asking = threading.Thread(target=ask, name="models-watch", daemon=True)
        asking.start()
        for frame in frames:
            if frame["type"] in ("done", "failed", "cancelled"):
                return frame
            tell(frame)
        asking.join(SECONDS)
        raise failures[0] if failures else BusError("channel", "it ended without a last word")

    def state(self, model: str) -> str | None:
        for each in self._call("list", {}, SECONDS)["models"]:
            if each["id"] == model:
                return str(each["state"])
        return None

    def _call(self, name: str, payload: object, seconds: float) -> Any:
        return self._caller.call(self._start + name, payload, timeout=seconds)


class _Direct:
    def __init__(self, manager: ModelManager, target: Target) -> None:
        self._manager = manager
        self._target = target
        self.root = target.root

    def do(self, name: str, model: str) -> Frame:
        answer: Frame = getattr(self._manager, name)(self._target, model)
        return answer

    def watch(self, model: str, tell: Tell) -> Frame:
        from ..calls import Call

        call = Call(0, "watch", key=None, model=model)
        return self._manager.watch(self._target, model, tell, call)

    def state(self, model: str) -> str | None:
        from ..server.catalog import state_of

        row = self._manager.row(self._target, model)
        return None if row is None else state_of(row, {})


@contextmanager
def _directly(settings: Settings, why: str) -> Iterator[_Direct]:
    from ..server.follower import Follower
    from ..server.management import ModelManager
    from .direct import Server

    server = Server(settings)
    target = server.locate(settings.api_url, settings.api_key, why=why)
    follower = Follower(server.upstream, name="models-events", changed=lambda: None)
    follower.offer(target)
    try:
        yield _Direct(ModelManager(server.upstream, follower), target)
    finally:
        follower.stop(1.0)
