"""The caller's channel of a function that writes while it works, beside the result it returns.

Frames are those of a small protocol of our own::

    {"type": "chunk", "text": …}      as it comes
    {"type": "ping"}                  after silence, from the watchdog
    {"type": "done", "result": …}     or {"type": "error", "error": {"code", "message"}}, last

After an abort, and for a caller who left, there is no last frame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import jsontext
from ..calls import Call
from ..errors import BusError, ConsumerGone, Interrupted, InvalidRequest, ProviderError
from ..payloads import WriterRef
from ..server.asking import failed

if TYPE_CHECKING:
    from ..bus.channel import Channel
    from ..streaming import OpenChannel

Result = dict[str, Any]
Say = Callable[[str], None]
"""Passes a piece of text on to the caller."""


class Outlet:
    """One open channel, and the call that writes to it."""

    def __init__(self, call: Call, channel: Channel) -> None:
        self.call = call
        self.channel = channel
        self.last: dict[str, Any] | None = None
        """The frame that goes out when it is over."""

    def tell(self, frame: dict[str, Any]) -> None:
        """:raises ConsumerGone: if the caller has left"""
        self.channel.send([jsontext.dumpb(frame)])

    def say(self, text: str) -> None:
        """:raises ConsumerGone: if the caller has left"""
        self.tell({"type": "chunk", "text": text})


class Outlets:
    """The channels that functions write to now: the watchdog pings them, a stop cuts them."""

    def __init__(self) -> None:
        self._outlets: dict[int, Outlet] = {}
        self._lock = threading.Lock()

    def snapshot(self) -> list[Outlet]:
        """Those that are open now."""
        with self._lock:
            return list(self._outlets.values())

    def run(
        self,
        open_channel: OpenChannel,
        writer: WriterRef,
        call: Call,
        work: Callable[[Say], Result],
    ) -> Result:
        """The result of ``work``, which is given the means to write to the caller's channel.

        How it ended is said in the last frame too.

        :raises BusError: as ``work`` failed
        :raises Interrupted: if the call was aborted or the caller has left
        """
        with self.opened(open_channel, writer, call) as outlet:
            try:
                result = work(outlet.say)
            except Interrupted as error:
                if error.reason == "stop":
                    outlet.last = _error("provider/upstream: the worker was stopped")
                raise
            except (BusError, ProviderError) as error:
                fault = failed(error) if isinstance(error, ProviderError) else error
                outlet.last = _error(fault.message, fault.code)
                raise fault from error
            outlet.last = {"type": "done", "result": result}
            return result

    @contextmanager
    def opened(self, open_channel: OpenChannel, writer: WriterRef, call: Call) -> Iterator[Outlet]:
        """The caller's channel; the last frame of the outlet goes out at the end of the block.

        :raises InvalidRequest: if there is no such channel
        :raises Interrupted: if the caller has left
        """
        try:
            outlet = Outlet(call, open_channel(writer, call))
        except ConsumerGone as error:
            raise InvalidRequest(f"writer_ref: {error}") from error
        with self._lock:
            self._outlets[call.number] = outlet
        try:
            yield outlet
        except ConsumerGone as error:
            outlet.last = None
            call.abort("consumer gone")
            raise Interrupted("consumer gone") from error
        finally:
            with self._lock:
                del self._outlets[call.number]
            outlet.channel.finish([] if outlet.last is None else [jsontext.dumpb(outlet.last)])


def _error(message: str, code: str = "invocation_failed") -> dict[str, Any]:
    return {"type": "error", "error": {"code": code, "message": message}}
