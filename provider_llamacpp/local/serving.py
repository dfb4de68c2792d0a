"""What the engine does on the thread of each connection: let it in, and serve it to its end.

A connection is a worker's, one end of a channel, or the telemetry's that nobody reads. Who is here
now is known here alone.
"""

from __future__ import annotations

import http
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import cast

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection

from .admission import bears, comes_from_here
from .channels import Channel
from .hub import Hub
from .profiles import BadFrame, decode
from .sockets import EngineConnection, Outbox, channel_end
from .workers import Frame, Peer

log = logging.getLogger(__name__)

OnFrame = Callable[[Peer, Frame], None]


class Serving:
    """The connections of one engine.

    :param token: bearer that workers must present; None lets all in
    :param grace: seconds until registrations without ``engine::workers::register`` land in
        ``default`` (engine protocol 3.3)
    :param on_frame: called on the reading thread with each valid inbound frame and its sender
    """

    def __init__(self, hub: Hub, token: str | None, grace: float, on_frame: OnFrame | None) -> None:
        self.hosts: frozenset[str] = frozenset()
        """The names by which a request may call the engine (see :mod:`.admission`)."""
        self.dropped: deque[str] = deque(maxlen=1000)
        """Why frames were dropped in silence."""
        self._on_frame = on_frame
        self._hub = hub
        self._token = token
        self._grace = grace
        self._closed = False
        self._lock = threading.Condition()
        self._active: set[EngineConnection] = set()
        """Every connection that was let in and is not gone."""
        self._controls: dict[Peer, tuple[EngineConnection, Outbox]] = {}

    # --- from any thread -----------------------------------------------------------------------

    def open(self) -> None:
        """Connections are served from now on."""
        with self._lock:
            self._closed = False

    def close(self) -> None:
        """Connections that come from now on are cut; those that are here stay."""
        with self._lock:
            self._closed = True

    def workers(self) -> list[tuple[Peer, EngineConnection, Outbox]]:
        """Those that are connected now."""
        with self._lock:
            return [(peer, *each) for peer, each in self._controls.items()]

    def connections(self) -> list[EngineConnection]:
        """All of them: workers, ends of channels, others."""
        with self._lock:
            return list(self._active)

    def wait_empty(self, timeout: float) -> bool:
        """Wait until nobody is here; False if somebody still is after ``timeout`` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._active, timeout)

    # --- the handshake, on the thread of a connection ------------------------------------------

    def admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer None to go on with the handshake, or the refusal."""
        ours = cast(EngineConnection, connection)
        refusal = self._refusal(ours, request)
        if refusal is None:
            return None
        ours.gate.set()
        return connection.respond(*refusal)

    def _refusal(
        self, connection: EngineConnection, request: Request
    ) -> tuple[http.HTTPStatus, str] | None:
        if not comes_from_here(request.headers, self.hosts):
            return http.HTTPStatus.FORBIDDEN, "Not from here\n"
        path = request.path.partition("?")[0]
        end = channel_end(request.path)
        if end is None:
            known = path == "/" or (path == "/otel" and self._hub.profile.namespaces)
            return None if known else (http.HTTPStatus.NOT_FOUND, "Not found\n")
        if end.key is None or end.direction is None:
            return http.HTTPStatus.BAD_REQUEST, "key and dir are needed\n"
        channel = self._hub.channels.find(end.channel_id, end.key)
        if channel is None:
            return http.HTTPStatus.NOT_FOUND, "Channel not found"
        if channel.claim(end.direction):
            connection.channel = channel
            if end.direction == "write":
                # Before the answer goes out: a frame may follow it at once.
                connection.relay = channel.put
        return None

    def serve(self, connection: ServerConnection) -> None:
        ours, request = cast(EngineConnection, connection), connection.request
        assert request is not None
        with self._lock:
            if self._closed:
                ours.cut()
                return
            self._active.add(ours)
        try:
            path = request.path.partition("?")[0]
            if path == "/otel":
                _discard(ours)
            elif path == "/":
                self._serve_worker(ours, bears(request, self._token))
            elif ours.channel is None:
                ours.close_without_code()
            else:
                self._serve_end(ours, ours.channel)
        finally:
            with self._lock:
                self._active.discard(ours)
                self._lock.notify_all()

    # --- channels, on the thread of an end -----------------------------------------------------

    def _serve_end(self, connection: EngineConnection, channel: Channel) -> None:
        if connection.relay is None:
            self._serve_reader(connection, channel)
        else:
            _discard(connection)
            channel.finish()

    def _serve_reader(self, connection: EngineConnection, channel: Channel) -> None:
        try:
            while (frame := channel.take()) is not None:
                data, text = frame
                connection.send(data, text=text)
        except ConnectionClosed:
            connection.cut()
        else:
            connection.close_without_code()
        finally:
            channel.lose()

    # --- workers, on the thread of a connection -------------------------------------------------

    def _serve_worker(self, connection: EngineConnection, may_enter: bool) -> None:
        outbox = Outbox(connection, "loopback-send")
        peer = Peer(outbox.post, outbox.close, connection.cut, connection.over)
        outbox.start()
        if not may_enter:
            error = {"code": "AUTH_ERROR", "message": "the token is missing or wrong"}
            peer.send({"type": "error", "error": error})
            peer.close(1008)
            _discard(connection)
            outbox.end()
            outbox.join()
            return
        grace = threading.Timer(self._grace, self._hub.drain, (peer,))
        grace.name, grace.daemon = "loopback-grace", True
        with self._lock:
            self._controls[peer] = (connection, outbox)
        self._hub.join(peer)
        grace.start()
        try:
            self._read(connection, peer, outbox)
        except ConnectionClosed:
            pass
        finally:
            grace.cancel()
            self._hub.leave(peer)
            outbox.end()
            with self._lock:
                del self._controls[peer]
            # Who stops the engine waits for this thread: it must be the last of the connection's.
            outbox.join()
            grace.join()

    def _read(self, connection: EngineConnection, peer: Peer, outbox: Outbox) -> None:
        while True:
            data = connection.recv()
            try:
                frame = decode(data, self._hub.profile)
            except BadFrame as error:
                log.warning("frame of %s dropped: %s", peer.name or peer.worker_id, error)
                self.dropped.append(str(error))
                continue
            if frame is None:
                continue
            if self._on_frame is not None:
                self._on_frame(peer, frame)
            if self._hub.handle(peer, frame):
                outbox.wait_for_room()


def _discard(connection: EngineConnection) -> None:
    """Read until the peer is gone, and keep nothing."""
    try:
        while True:
            connection.recv()
    except ConnectionClosed:
        pass
