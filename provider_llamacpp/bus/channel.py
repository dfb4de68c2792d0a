"""The write end of a stream's channel.

A channel is dialled once and never again (engine protocol 7.2). Whatever shows that its reader has
left (a failed or timed-out send, a Close, EOF or reset noticed by the watch) is the same event:
the consumer is gone, the upstream work is to stop.

Who runs what: the call's thread opens, sends and finishes; the watchdog's thread tries pings; the
watch's thread reads; anyone may cut. The send lock serialises writers; whoever must not block only
tries it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal
from urllib.parse import SplitResult, quote, urlsplit

from ..calls import Call
from ..errors import ConsumerGone, ProviderError
from . import frames
from .channelwatch import ChannelWatch
from .link import Link, LinkError, tls_context

if TYPE_CHECKING:
    from websocket import WebSocket

    from ..payloads import WriterRef

__all__ = ["Channel", "ChannelWatch", "channel_url", "connect"]

LINGER = 0.010
"""Seconds between the last frame and the Close: the engine reads on for so long (7.4)."""
CLOSE_WAIT = 1.0
"""Seconds for the engine to answer the Close (7.4)."""
_PING = b'{"type":"ping"}'
_MAX_INBOUND = 1024**2
"""Nothing but control frames is expected; what else arrives is read and forgotten."""

log = logging.getLogger(__name__)


def channel_url(
    engine_url: str, ref: WriterRef, direction: Literal["read", "write"]
) -> SplitResult:
    """Where one end of a channel is: the engine's address with its query kept (7.2)."""
    base = urlsplit(engine_url)
    query = f"{base.query}&" if base.query else ""
    return SplitResult(
        base.scheme,
        base.netloc,
        f"{base.path.rstrip('/')}/ws/channels/{_quoted(ref.channel_id)}",
        f"{query}key={_quoted(ref.access_key)}&dir={direction}",
        "",
    )


def _quoted(text: str) -> str:
    if text.isascii() and text.isalnum():
        return text
    # JSON can hold half a surrogate pair, an address cannot.
    return quote(text, safe="", errors="replace")


def connect(
    engine_url: str,
    ref: WriterRef,
    *,
    direction: Literal["read", "write"],
    token: str | None = None,
    connect_timeout: float = 10.0,
    ca_file: str | None = None,
    client_cert: str | None = None,
) -> WebSocket:
    """One end of a channel as websocket-client's own object, its socket without a timeout.

    :raises ConsumerGone: if the engine does not know the channel or its key
    :raises ProviderError: if the engine cannot be reached or refuses otherwise
    """
    link = Link(
        channel_url(engine_url, ref, direction),
        token=token,
        context=lambda: tls_context(ca_file, client_cert),
    )
    try:
        link.connect(connect_timeout)
    except LinkError as error:
        raise _refusal(error) from error
    socket = link.websocket()
    socket.settimeout(None)
    return socket


def _refusal(error: LinkError) -> ConsumerGone | ProviderError:
    if error.status == 404:
        return ConsumerGone("the engine knows no such channel, or its key is another (HTTP 404)")
    kind: Literal["permanent", "transient"] = "transient"
    if error.status is not None and 400 <= error.status < 500:
        kind = "permanent"
    return ProviderError(kind, f"the channel cannot be opened: {error}", status=error.status)


class Channel:
    """The write end of one channel; made by :meth:`open`.

    :param link: connected
    :param on_gone: called at most once, from any thread, when the reader is found to have left
        before :meth:`finish`; must not block
    """

    def __init__(
        self,
        link: Link,
        watch: ChannelWatch,
        on_gone: Callable[[], None],
        *,
        send_timeout: float = 60.0,
        call: Call | None = None,
    ) -> None:
        self.sent = 0
        """Frames handed to the socket so far, pings included."""
        self._link = link
        self._watch = watch
        self._on_gone = [on_gone]  # popped by who calls it: atomic, so it is called once
        self._send_timeout = send_timeout
        self._call = call
        self._keys = frames.KeyPool()
        self._reader = frames.FrameReader(_MAX_INBOUND)
        self._pongs: deque[bytes] = deque(maxlen=4)
        self._lock = threading.Lock()
        """The send lock; guards the link's sending side, the keys and the two flags."""
        self._finished = False
        self._gone = False
        self._ended = threading.Event()
        """Set once the other end has closed."""

    @classmethod
    def open(
        cls,
        engine_url: str,
        writer: WriterRef,
        *,
        token: str | None = None,
        connect_timeout: float = 10.0,
        send_timeout: float = 60.0,
        ca_file: str | None = None,
        client_cert: str | None = None,
        watch: ChannelWatch,
        on_gone: Callable[[], None],
        call: Call | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Channel:
        """Dial once.

        :param call: an abort of it ends the attempt, and later a send that waits for a reader
            who does not read (not so when the worker stops: the last frame is still to go out)
        :param meanwhile: called, if it comes so far, while the engine looks the channel up; must
            not raise
        :raises ConsumerGone: if the engine does not know the channel or its key
        :raises ProviderError: if the engine cannot be reached or refuses otherwise
        :raises Interrupted: if ``call`` was aborted
        """
        link = Link(
            channel_url(engine_url, writer, "write"),
            token=token,
            context=lambda: watch.tls_context(ca_file, client_cert),
        )
        if call is not None:
            call.add_waker(link.cut)
        try:
            link.connect(connect_timeout, meanwhile)
        except LinkError as error:
            if call is not None:
                call.check()
            raise _refusal(error) from error
        finally:
            if call is not None:
                call.remove_waker(link.cut)
        channel = cls(link, watch, on_gone, send_timeout=send_timeout, call=call)
        try:
            if call is not None:
                call.add_waker(channel._aborted)
        except BaseException:
            link.close()
            raise
        watch.add(link, channel._readable)
        return channel

    # -- the call's thread ----------------------------------------------------------------

    def send(self, events: Sequence[bytes], *, wait: bool = True) -> bool:
        """Send each event as a text frame, all in one system call if there is room.

        :param wait: False keeps what there is no room for; then :meth:`flush` is to be called
        :returns: whether nothing was kept
        :raises ConsumerGone: if the reader has left, or read nothing for the send timeout
        :raises ProviderError: ``permanent`` if an event is longer than a frame may be (16 MiB);
            the events before it went out, and the channel can still be finished
        """
        if not events:
            return True
        with self._lock:
            if self._finished or self._gone:
                raise ConsumerGone("the channel is closed")
            try:
                data = frames.text_frames(events, self._keys.take)
            except frames.OversizedFrame as error:
                if before := events[: error.index]:
                    self._send(frames.text_frames(before, self._keys.take), error.index, wait=wait)
                raise ProviderError("permanent", f"an event cannot be sent: {error}") from error
            done = self._send(data, len(events), wait=wait)
        while self._pongs:
            # Here and not by an offer, which has no place to wait for room.
            with self._lock:
                if pongs := b"".join(self._taken_pongs()):
                    done = self._send(pongs, 0, wait=wait)
        return done

    def flush(self) -> None:
        """Send what was kept, and wait for room.

        :raises ConsumerGone: as :meth:`send`
        """
        with self._lock:
            self._send(b"", 0, wait=True)

    def finish(self, events: Sequence[bytes] = (), *, told: float | None = None) -> None:
        """Send the last events, close and release everything; idempotent, raises nothing.

        Events that cannot be delivered any more, or are longer than a frame may be, are dropped.

        :param told: ``time.monotonic()`` when the last event went out, if that was before
        """
        with self._lock:
            if self._finished:
                return
            self._finished = True
            if not self._gone:
                self._say_last(events)
        linger = LINGER if told is None else max(0.0, told + LINGER - time.monotonic())
        if not self._gone and not self._ended.wait(linger):
            with self._lock:
                self._try(frames.close_frame(self._keys.take(4)), CLOSE_WAIT)
            if self._watch.running:
                self._ended.wait(CLOSE_WAIT)
        if self._call is not None:
            self._call.remove_waker(self._aborted)
        self._watch.remove(self._link)
        self._link.close()

    def _say_last(self, events: Sequence[bytes]) -> None:
        fitting = [each for each in events if len(each) <= frames.MAX_FRAME]
        if len(fitting) < len(events):
            log.error("an event of more than %d bytes was dropped", frames.MAX_FRAME)
        if fitting:
            data = frames.text_frames(fitting, self._keys.take)
            if self._try(data, self._send_timeout):
                self.sent += len(fitting)

    def _send(self, data: bytes, count: int, *, wait: bool) -> bool:
        """Needs the lock. Whether nothing was kept."""
        try:
            if wait:
                self._link.send(data, self._send_timeout)
            done = wait or self._link.begin(data)
        except LinkError as error:
            self._broke(error)
            raise ConsumerGone("the channel's reader has left or does not read") from None
        self.sent += count
        return done

    def _try(self, data: bytes, timeout: float) -> bool:
        """Needs the lock. Whether all is out."""
        try:
            self._link.send(data, timeout)
        except LinkError as error:
            self._broke(error)
            return False
        return True

    def _broke(self, error: LinkError) -> None:
        """Half a frame may be out: nothing may follow."""
        log.debug("a channel's reader is gone: %s", error)
        self._gone = True
        self._link.cut()

    # -- the watchdog's thread ------------------------------------------------------------

    def try_ping(self) -> bool:
        """Send the ``ping`` event, unless someone is sending, the reader is slow or it is over.

        Never blocks.

        :returns: whether it was sent
        """
        sent = self._offer(lambda: frames.text_frames([_PING], os.urandom), 1)
        self._answer_pings()
        return sent

    def _offer(self, make: Callable[[], bytes], events: int) -> bool:
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._finished or self._gone:
                return False
            if not (data := make()) or not self._link.offer(data):
                return False
            self.sent += events
            return True
        except LinkError as error:
            log.debug("a channel's reader is gone: %s", error)
        finally:
            self._lock.release()
        self._lost()
        return False

    # -- the watch's thread ---------------------------------------------------------------

    def _readable(self) -> bool:
        """Take what has arrived; False once nothing more will."""
        try:
            still_open = self._drain()
        except (LinkError, frames.FrameError) as error:
            log.debug("a channel ended: %s", error)
            still_open = False
        if still_open:
            self._answer_pings()
        else:
            self._lost()
        return still_open

    def _drain(self) -> bool:
        while (data := self._link.receive(4096)) is not None:
            if not data:
                return False
            for opcode, payload in self._reader.feed(data):
                if opcode == frames.CLOSE:
                    return False
                if opcode == frames.PING:
                    self._pongs.append(payload)
        return True

    # -- any thread -----------------------------------------------------------------------

    def cut(self) -> None:
        """End the connection now; a blocked send wakes and raises ``ConsumerGone``."""
        self._gone = True
        self._link.cut()

    def _aborted(self) -> None:
        if self._call is not None and self._call.reason != "stop":
            self._link.interrupt()

    def _lost(self) -> None:
        self._gone = True
        self._ended.set()
        if not self._finished and self._on_gone:
            try:
                on_gone = self._on_gone.pop()
            except IndexError:  # pragma: no cover (another thread was faster)
                return
            on_gone()

    def _answer_pings(self) -> None:
        """Answer pings of the WebSocket layer, unless a sender is at it, who does so then."""
        if self._pongs:
            self._offer(lambda: b"".join(self._taken_pongs()), 0)

    def _taken_pongs(self) -> Iterator[bytes]:
        """Needs the lock."""
        while self._pongs:
            yield frames.pong_frame(os.urandom(4), self._pongs.popleft())
