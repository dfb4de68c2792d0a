"""An iii engine for one machine: the wire protocol on a loopback socket, all in memory.

For trying the worker, for embedding it and for tests; production runs on the iii engine. It speaks
the protocol as engines from 0.21 to 0.25 do (``profile``): functions, invocations, triggers,
namespaces, channels and state. It has no RBAC, queues, HTTP, cron, configuration or observers, and
it binds loopback addresses only: whoever can run a program on the machine can use it, a web page
or another machine cannot.
"""

from __future__ import annotations

import http
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Literal, cast

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from ..errors import BusError
from .admission import bears, comes_from_here, is_loopback
from .channels import Channel
from .hub import Hub
from .profiles import PROFILES, BadFrame, Profile, decode
from .sockets import MAX_FRAME, MAX_MESSAGE, EngineConnection, Outbox, channel_end
from .workers import Frame, Peer

log = logging.getLogger(__name__)

ProfileName = Literal["0.21", "0.22", "0.23", "0.25"]
HEADER_DEADLINE = 10.0
"""Seconds for a request's headers, from engine 0.21.8 on (engine protocol 1.1)."""
CLOSE_WAIT = 1.0
"""Seconds for a peer to echo a Close, and for ``stop`` before it cuts what is left."""


class LoopbackEngine:
    """One engine. ``start`` and ``stop`` may alternate; the port stays.

    :param host: a loopback address; anything else is a ValueError
    :param port: 0 picks a free one at the first start
    :param profile: which engine generation to be (engine protocol 8)
    :param token: bearer that workers must present; None lets all in
    :param state: whether ``state::*`` exists
    :param namespace_grace: seconds until registrations without ``engine::workers::register`` land
        in ``default`` (engine protocol 3.3)
    :param poll_interval: seconds between looks for changed functions and stale channels
    :param on_frame: called on the reading thread with each valid inbound frame and its sender
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        profile: ProfileName = "0.25",
        token: str | None = None,
        *,
        state: bool = True,
        namespace_grace: float = 5.0,
        poll_interval: float = 5.0,
        on_frame: Callable[[Peer, Frame], None] | None = None,
    ) -> None:
        self.host = "127.0.0.1" if host == "localhost" else host
        if not is_loopback(self.host):
            raise ValueError(f"host {host!r} is not a loopback address")
        if profile not in PROFILES:
            raise ValueError(f"profile {profile!r} is none of {', '.join(PROFILES)}")
        self.port = port
        self.profile: Profile = PROFILES[profile]
        self.on_frame = on_frame
        self.dropped: deque[str] = deque(maxlen=1000)
        """Why frames were dropped in silence: empty when every peer speaks the protocol."""
        self._token = token
        self._grace = namespace_grace
        self._poll_interval = poll_interval
        self._hub = Hub(self.profile, state=state)
        self._server: Server | None = None
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._lock = threading.Condition()
        self._active: set[EngineConnection] = set()
        """Every connection that was let in and is not gone."""
        self._controls: dict[Peer, tuple[EngineConnection, Outbox]] = {}

    # --- life ----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where workers connect: ``ws://127.0.0.1:PORT``."""
        return f"ws://{self._authority}"

    @property
    def _authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def start(self) -> LoopbackEngine:
        """Listen. A second start before a stop does nothing."""
        if self._server is not None:
            return self
        self._stopping.clear()
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        server = serve(
            self._serve,
            sock=socket.create_server((self.host, self.port), family=family),
            process_request=self._admit,
            compression=None,
            server_header=None,
            open_timeout=HEADER_DEADLINE if self.profile.reattach else None,
            ping_interval=None,
            close_timeout=CLOSE_WAIT,
            max_size=(MAX_MESSAGE, MAX_FRAME),
            create_connection=EngineConnection,
        )
        self.port = server.socket.getsockname()[1]
        self._server = server
        self._threads = [
            threading.Thread(target=server.serve_forever, name="loopback-accept", daemon=True),
            threading.Thread(target=self._poll, name="loopback-poll", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def stop(self, code: int | None = 1001) -> None:
        """Close every socket and end every thread; state and channels' names survive, channels do
        not.

        :param code: of the Close that workers get; None cuts them off like a crash
        """
        server, self._server = self._server, None
        if server is None:
            return
        self._stopping.set()
        if code is None:
            self.drop_all()
        else:
            self.close_all(code)
        self._hub.channels.clear()
        self.drop_channels()
        deadline = time.monotonic() + CLOSE_WAIT
        for _, outbox in self._snapshot(self._controls.values()):
            outbox.join(max(0.0, deadline - time.monotonic()))
        for connection in self._snapshot(self._active):
            connection.cut()
        server.shutdown()
        for thread in self._threads:
            thread.join()
        with self._lock:
            self._lock.wait_for(lambda: not self._active, HEADER_DEADLINE)

    def __enter__(self) -> LoopbackEngine:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # --- looking in ----------------------------------------------------------------------------

    @property
    def connections(self) -> list[Peer]:
        """The workers that are connected now."""
        with self._hub.changed:
            return list(self._hub.peers.values())

    def functions(self, namespace: str = "default") -> dict[str, Frame]:
        """The registered functions of a namespace: id and registration frame."""
        with self._hub.changed:
            return {
                each: f.frame for (ns, each), f in self._hub.functions.items() if ns == namespace
            }

    def triggers(self) -> dict[str, bool]:
        """The registered triggers: id, and whether it is active rather than parked."""
        with self._hub.changed:
            return self._hub.triggers.ids()

    def wait_until(self, condition: Callable[[], object], timeout: float = 10.0) -> bool:
        """Wait for something that the arrival of a frame or a connection makes true."""
        with self._hub.changed:
            return bool(self._hub.changed.wait_for(condition, timeout))

    def wait_for_function(
        self, function_id: str, timeout: float = 10.0, namespace: str = "default"
    ) -> bool:
        """Wait for a function to be registered; False when it was not in time."""
        return self.wait_until(lambda: (namespace, function_id) in self._hub.functions, timeout)

    def call(
        self, function_id: str, data: Any, *, timeout: float = 15.0, namespace: str | None = None
    ) -> Any:
        """Invoke a function as the engine itself.

        :raises BusError: the function's failure, or ``TIMEOUT``
        """
        future = self._hub.call(function_id, data, namespace=namespace)
        try:
            return future.result(timeout)
        except FutureTimeout:
            raise BusError("TIMEOUT", f"no answer within {timeout:g} s") from None

    def create_channel(self, buffer_size: int | None = None) -> tuple[Frame, Frame]:
        """A channel's writer and reader references."""
        made = self.call("engine::channels::create", {"buffer_size": buffer_size})
        return made["writer"], made["reader"]

    @property
    def state_enabled(self) -> bool:
        """Whether ``state::*`` exists; may be switched while the engine runs."""
        return self._hub.state_enabled

    @state_enabled.setter
    def state_enabled(self, on: bool) -> None:
        self._hub.state_enabled = on

    # --- making trouble ------------------------------------------------------------------------

    def drop_worker(self, name: str) -> int:
        """Cut the connections of the workers with this name, without a Close; how many."""
        found = [each for each in self.connections if each.name == name]
        for peer in found:
            peer.cut()
        return len(found)

    def drop_all(self) -> None:
        """Cut every worker's connection, without a Close."""
        for connection, _ in self._snapshot(self._controls.values()):
            connection.cut()

    def drop_channels(self) -> None:
        """Cut the sockets of every channel end."""
        # Readers first: they would see an orderly end of a writer that is cut.
        ends = [each for each in self._snapshot(self._active) if each.channel is not None]
        for end in sorted(ends, key=lambda each: each.relay is not None):
            end.cut()

    def close_all(self, code: int = 1000) -> None:
        """Close every worker's connection politely, as a proxy or a restart does."""
        for connection, outbox in self._snapshot(self._controls.values()):
            connection.gate.set()
            outbox.close(code)

    def pause_reading(self, name: str) -> None:
        """Read nothing more from the workers with this name: their pings go unanswered."""
        self._set_gate(name, False)

    def resume_reading(self, name: str) -> None:
        """Undo :meth:`pause_reading`."""
        self._set_gate(name, True)

    def _set_gate(self, name: str, is_open: bool) -> None:
        with self._lock:
            found = [c for peer, (c, _) in self._controls.items() if peer.name == name]
        for connection in found:
            (connection.gate.set if is_open else connection.gate.clear)()

    def _snapshot(self, of: Iterable[Any]) -> list[Any]:
        with self._lock:
            return list(of)

    # --- the handshake, on the thread of a connection ------------------------------------------

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
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
        if not comes_from_here(request.headers, {self._authority, f"localhost:{self.port}"}):
            return http.HTTPStatus.FORBIDDEN, "Not from here\n"
        path = request.path.partition("?")[0]
        end = channel_end(request.path)
        if end is None:
            known = path == "/" or (path == "/otel" and self.profile.namespaces)
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

    def _serve(self, connection: ServerConnection) -> None:
        ours, request = cast(EngineConnection, connection), connection.request
        assert request is not None
        with self._lock:
            if self._stopping.is_set():
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
                frame = decode(data, self.profile)
            except BadFrame as error:
                log.warning("frame of %s dropped: %s", peer.name or peer.worker_id, error)
                self.dropped.append(str(error))
                continue
            if frame is None:
                continue
            if self.on_frame is not None:
                self.on_frame(peer, frame)
            if self._hub.handle(peer, frame):
                outbox.wait_for_room()

    def _poll(self) -> None:
        while not self._stopping.wait(self._poll_interval):
            self._hub.poll_functions()
            self._hub.channels.sweep()


def _discard(connection: EngineConnection) -> None:
    """Read until the peer is gone, and keep nothing."""
    try:
        while True:
            connection.recv()
    except ConnectionClosed:
        pass
