"""What every function of this package is given, and how it asks the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from .. import fields, jsontext
from ..calls import Call
from ..errors import BusError, ProviderError
from ..events.classify import classify
from ..events.sse import EventCutter, Stray
from ..payloads import WriterRef, decode_writer
from ..server.asking import ask, failed, failure, refused, unsound
from ..server.stream import UpstreamStream
from ..server.upstream import Reply
from .outlet import Outlets, Result, Say

if TYPE_CHECKING:
    from ..provider import Provider
    from ..runs import Runs
    from ..streaming import OpenChannel

SECONDS = 20.0
"""For a question that is answered at once, unless the model has to be woken or loaded."""
MOST_TEXT = 8 * 1024 * 1024
"""Characters of a text that is collected from a stream."""


class Lacking(BusError):
    """The server cannot do what was asked; ``status`` tells how it said so."""

    def __init__(self, status: int, message: str) -> None:
        lacks = failure("provider/config", message)
        super().__init__(lacks.code, lacks.message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Context:
    """What the functions of one provider work with."""

    provider: Provider
    runs: Runs
    outlets: Outlets
    open_channel: OpenChannel
    stats: Callable[[], dict[str, Any]]
    """What the worker does now; must not block."""

    @property
    def router_mode(self) -> bool:
        """Whether the server picks the model by its name; False where that is not known."""
        catalog = self.provider.catalog
        return catalog is not None and catalog.router_mode

    def model(self, payload: dict[str, Any]) -> dict[str, str]:
        """The field ``model`` as requests carry it, empty where none is named.

        :raises InvalidRequest: if it is no string, or needed and not there
        """
        model = fields.optional_text(payload, "model")
        if model is None and self.router_mode:
            fields.fail(("model",), "must name a model, the server has more than one")
        return {} if model is None else {"model": model}

    def query(self, payload: dict[str, Any]) -> str:
        """The same as a query for what is only looked at, which must not load a model.

        :raises InvalidRequest: as :meth:`model`
        """
        model = self.model(payload)
        return "?" + urlencode({**model, "autoload": "false"}) if self.router_mode else ""

    def ask(
        self,
        call: Call,
        method: str,
        path: str,
        payload: Mapping[str, Any] | None = None,
        *,
        flag: str = "",
        blame: str = "",
        timeout: float = SECONDS,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """The server's answer, a success.

        :param flag: with which llama-server has to be started for this
        :param blame: the field that is at fault if the server calls the request a bad one
        :raises InvalidRequest: naming that field, or the model
        :raises BusError: ``invocation_failed``, in words, for any other failure
        :raises ProviderError: if the router could not say where the server is
        :raises Interrupted: if ``call`` is aborted
        """
        target, _ = self.provider.target(call)
        upstream = self.provider.upstream
        reply = ask(
            upstream, target, method, path, payload, timeout=timeout, call=call, headers=headers
        )
        if not reply.ok:
            for lacking in _lacking(reply.status, reply.body, path, flag):
                raise lacking
            if reply.status == 400:
                words = classify(reply.status, reply.body).message
                if words.startswith("model "):
                    fields.fail(("model",), words.removeprefix("model "))
                if blame:
                    fields.fail((blame,), words)
            raise refused(reply)
        return reply

    @contextmanager
    def open_stream(
        self,
        call: Call,
        path: str,
        payload: Mapping[str, Any],
        *,
        flag: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[UpstreamStream]:
        """Like :meth:`ask`, for an answer that comes bit by bit and may take for ever.

        :raises InvalidRequest: if ``payload`` cannot be written as JSON
        """
        lacking: list[Lacking] = []

        def judge(status: int, answer: bytes) -> ProviderError:
            lacking.extend(_lacking(status, answer, path, flag))
            return classify(status, answer)

        try:
            body = jsontext.dumpb(payload)
        except ValueError as error:
            fields.fail((), str(error))
        target, _ = self.provider.target(call)
        try:
            stream = self.provider.upstream.open_stream(
                target, path, body, call, headers=headers, classify=judge
            )
        except ProviderError as error:
            raise (lacking[0] if lacking else failed(error)) from error
        with stream:
            yield stream

    def told(
        self, call: Call, writer: WriterRef | None, work: Callable[[Say | None], Result]
    ) -> Result:
        """The result of ``work``, which is told where to pass on text, if to a channel.

        :raises BusError: as ``work`` failed
        :raises Interrupted: if the call was aborted or the caller has left
        """
        if writer is not None:
            return self.outlets.run(self.open_channel, writer, call, work)
        try:
            return work(None)
        except ProviderError as error:
            raise failed(error) from error


def optional_writer(payload: dict[str, Any]) -> WriterRef | None:
    """The channel a caller wants the text in, if any.

    :raises InvalidRequest: naming the field that does not fit
    """
    value = payload.get("writer_ref")
    return None if value is None else decode_writer(value)


def _lacking(status: int, body: bytes, path: str, flag: str) -> Iterator[Lacking]:
    """The error for a server that has no such route, or was started without it; else nothing."""
    route = path.partition("?")[0]
    if status == 404:
        yield Lacking(status, f"the server has no {route} (a newer build of llama-server has it)")
    elif status in (403, 501):
        words = classify(status, body).message
        if flag and flag not in words:
            words = f"{words} (start llama-server with {flag})"
        yield Lacking(status, f"{route}: {words}")


def events(stream: UpstreamStream, path: str) -> Iterator[dict[str, Any]]:
    """The JSON objects that the server sends as events, errors among them.

    :raises BusError: ``invocation_failed``, if something else comes
    :raises ProviderError: if the connection breaks off
    :raises Interrupted: if the call is aborted
    """
    cutter = EventCutter()
    while block := stream.read():
        for item in cutter.feed(block):
            yield _event(item, path)
    for item in cutter.close():
        yield _event(item, path)


def _event(item: bytes | Stray, path: str) -> dict[str, Any]:
    if isinstance(item, Stray):
        if item.kind == "oversized":
            raise unsound(path, "an event is too long")
        raise failed(classify(None, item.text))
    try:
        event = jsontext.loads(item)
    except ValueError as error:
        raise unsound(path, "an event cannot be read") from error
    if not isinstance(event, dict):
        raise unsound(path, "an event is no object")
    return event
