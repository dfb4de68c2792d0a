"""What ``GET /models/sse`` of a server in router mode tells: one event as a value. Pure.

Events are ``{"model", "event", "data"}`` (llama-server API 10). They have no order number and are
not repeated for who comes late, so whoever needs the truth asks for the rows of ``/v1/models``; an
event says when to ask, and how far a load or a download has come, which no row tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .. import jsontext
from ..lenient import integer, mapping, text

Kind = Literal["status", "download", "finished", "failed", "removed", "reloaded"]
"""``status``: of a load, or a change of state. ``download``: how far one has come; ``finished`` and
``failed`` end it. ``removed``: from the disk. ``reloaded``: the sources were read again."""

_KINDS: Mapping[object, Kind] = {
    "model_status": "status",
    "status_change": "status",
    "download_progress": "download",
    "download_finished": "finished",
    "download_failed": "failed",
    "model_remove": "removed",
    "models_reload": "reloaded",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load or a download has come. None is not known."""

    activity: Literal["loading", "downloading"]
    share: float | None = None
    """0 to 1, of all stages or of all bytes."""
    stage: str | None = None
    """Of a load: what is being loaded."""
    done: int | None = None
    """Bytes of a download."""
    total: int | None = None

    def facts(self) -> dict[str, Any]:
        """Plain values, for frames and figures."""
        return {
            "activity": self.activity,
            "share": self.share,
            "stage": self.stage,
            "done": self.done,
            "total": self.total,
        }


@dataclass(frozen=True, slots=True)
class ModelEvent:
    """One event."""

    model: str
    """Canonical id; ``*`` for all of them."""
    kind: Kind
    status: str | None = None
    """The new state, where one is told."""
    progress: Progress | None = None
    exit_code: int | None = None
    """Of the process that ended, where the state is ``unloaded``."""

    @property
    def changes(self) -> bool:
        """Whether the list of models is another one now, not only a bar longer."""
        if self.kind == "download":
            return False
        return self.progress is None or self.progress.share is None


def read_event(data: bytes) -> ModelEvent | None:
    """The data of one event; None for what is none of ours."""
    try:
        value = jsontext.loads(data)
    except ValueError:
        return None
    event = mapping(value)
    kind, model = _KINDS.get(text(event.get("event"))), text(event.get("model"))
    if kind is None or model is None:
        return None
    details = mapping(event.get("data"))
    if kind == "download":
        return ModelEvent(model, kind, "downloading", _download(mapping(details.get("progress"))))
    if kind != "status":
        return ModelEvent(model, kind)
    status = text(details.get("status"))
    progress = None
    if status == "loading":
        progress = _load(mapping(details.get("progress")))
    elif status == "downloading":
        progress = Progress("downloading")
    return ModelEvent(model, kind, status, progress, integer(details.get("exit_code")))


def _load(progress: Mapping[str, Any]) -> Progress:
    """``{"stages": [...], "current", "value"}``: the share of the current stage."""
    stages, current, value = (progress.get(name) for name in ("stages", "current", "value"))
    stage = text(current)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        return Progress("loading", stage=stage)
    if isinstance(stages, list) and current in stages:
        value = (stages.index(current) + value) / len(stages)
    return Progress("loading", share=float(value), stage=stage)


def _download(files: Mapping[str, Any]) -> Progress:
    """``{url: {"done", "total"}}``: a model may come in several files."""
    done = total = 0
    for each in files.values():
        some, all_ = _count(mapping(each).get("done")), _count(mapping(each).get("total"))
        done, total = done + some, total + max(some, all_)
    return Progress(
        "downloading", share=done / total if total else None, done=done, total=total or None
    )


def _count(value: object) -> int:
    return max(0, integer(value) or 0)
