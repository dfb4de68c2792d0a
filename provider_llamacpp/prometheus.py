"""A worker's figures in Prometheus' text form, for an application that has a page of them.

Pure: what :meth:`ProviderWorker.stats` gives, as text. Counters end in ``_total`` and begin anew
with the worker; units are in the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from .server.health import ServerState

Labels: TypeAlias = Mapping[str, str]
Samples: TypeAlias = Iterator[tuple[Labels, float]]


class _Metric(NamedTuple):
    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[Mapping[str, Any]], Samples]


def prometheus_text(*stats: Mapping[str, Any]) -> str:
    """The figures as text, each with the label ``provider``: exposition format 0.0.4, served as
    ``text/plain; version=0.0.4; charset=utf-8``.

    :param stats: of :meth:`ProviderWorker.stats`; several where a worker has several providers, or
        the process several workers
    """
    lines = []
    for metric in _METRICS:
        name = f"provider_llamacpp_{metric.name}"
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
        for each in stats:
            for labels, value in metric.read(each):
                lines.append(f"{name}{_labels({'provider': each['id'], **labels})} {value:.15g}")
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _one(name: str) -> Callable[[Mapping[str, Any]], Samples]:
    """The figure ``name``."""

    def read(stats: Mapping[str, Any]) -> Samples:
        yield {}, float(stats[name])

    return read


def _each(name: str, label: str) -> Callable[[Mapping[str, Any]], Samples]:
    """The figures of the object ``name``, their names under ``label``."""

    def read(stats: Mapping[str, Any]) -> Samples:
        for key, value in sorted(stats[name].items()):
            yield {label: key}, float(value)

    return read


def _version(stats: Mapping[str, Any]) -> Samples:
    yield {"version": stats["version"]}, 1.0


def _state(stats: Mapping[str, Any]) -> Samples:
    for state in get_args(ServerState):
        yield {"state": state}, float(stats["server"]["state"] == state)


_METRICS = (
    _Metric("info", "gauge", "Version of the worker.", _version),
    _Metric("uptime_seconds", "gauge", "Time since the worker was started.", _one("uptime")),
    _Metric("connected", "gauge", "Whether the worker is on the bus.", _one("connected")),
    _Metric(
        *("reconnects_total", "counter", "Connections to the engine after the first."),
        _one("reconnects"),
    ),
    _Metric("server_state", "gauge", "1 for the state llama-server was last seen in.", _state),
    _Metric("active_streams", "gauge", "Streams that run now.", _one("active_streams")),
    _Metric("max_streams", "gauge", "Streams that may run at once.", _one("max_streams")),
    _Metric("active_calls", "gauge", "Calls of every kind that run now.", _one("calls")),
    _Metric(
        *("streams_total", "counter", "Streams that have ended, by outcome."),
        _each("outcomes", "outcome"),
    ),
    _Metric("frames_total", "counter", "Frames sent to callers.", _one("frames")),
    _Metric(
        *("received_bytes_total", "counter", "Body bytes of streams read from llama-server."),
        _one("bytes"),
    ),
    _Metric(
        *("tokens_total", "counter", "Tokens of streams that have ended, by kind."),
        _each("usage", "kind"),
    ),
)
