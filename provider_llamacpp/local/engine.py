"""An iii engine for one machine: the wire protocol on a loopback socket, all in memory.

For trying the worker, for embedding it and for tests; production runs on the iii engine. It speaks
the protocol as engines from 0.21 to 0.25 do (``profile``): functions, invocations, triggers,
namespaces, channels and state. It has no RBAC, queues, HTTP, cron, configuration or observers, and
it binds loopback addresses only: whoever can run a program on the machine can use it, a web page
or another machine cannot.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Literal

from websockets.sync.server import Server, serve

from ..errors import BusError
from .admission import is_loopback
from .hub import Hub
from .profiles import PROFILES, Profile
from .serving import OnFrame, Serving
from .sockets import MAX_FRAME, MAX_MESSAGE, EngineConnection
from .workers import Frame, Peer

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

    _SERVING = Serving

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
        on_frame: OnFrame | None = None,
    ) -> None:
        self.host = "127.0.0.1" if host == "localhost" else host
        if not is_loopback(self.host):
            raise ValueError(f"host {host!r} is not a loopback address")
        if profile not in PROFILES:
            raise ValueError(f"profile {profile!r} is none of {', '.join(PROFILES)}")
        self.port = port
        self.profile: Profile = PROFILES[profile]
        self._poll_interval = poll_interval
        self._hub = Hub(self.profile, state=state)
        self._serving = self._SERVING(self._hub, token, namespace_grace, on_frame)
        self._server: Server | None = None
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()

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
        self._serving.open()
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        server = serve(
            self._serving.serve,
            sock=socket.create_server((self.host, self.port), family=family),
            process_request=self._serving.admit,
            compression=None,
            server_header=None,
            open_timeout=HEADER_DEADLINE if self.profile.reattach else None,
            ping_interval=None,
            close_timeout=CLOSE_WAIT,
            max_size=(MAX_MESSAGE, MAX_FRAME),
            create_connection=EngineConnection,
        )
        self.port = server.socket.getsockname()[1]
        self._serving.hosts = frozenset({self._authority, f"localhost:{self.port}"})
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
        self._serving.close()
        if code is None:
            self.drop_all()
        else:
            self.close_all(code)
        self._hub.channels.clear()
        self.drop_channels()
        deadline = time.monotonic() + CLOSE_WAIT
        for _, _, outbox in self._serving.workers():
            outbox.join(max(0.0, deadline - time.monotonic()))
        for connection in self._serving.connections():
            connection.cut()
        server.shutdown()
        for thread in self._threads:
            thread.join()
        self._serving.wait_empty(HEADER_DEADLINE)

    def __enter__(self) -> LoopbackEngine:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # --- looking in ----------------------------------------------------------------------------

    @property
    def dropped(self) -> Sequence[str]:
        """Why frames were dropped in silence: empty when every peer speaks the protocol."""
        return self._serving.dropped

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
        for _, connection, _ in self._serving.workers():
            connection.cut()

    def drop_channels(self) -> None:
        """Cut the sockets of every channel end."""
        # Readers first: they would see an orderly end of a writer that is cut.
        ends = [each for each in self._serving.connections() if each.channel is not None]
        for end in sorted(ends, key=lambda each: each.relay is not None):
            end.cut()

    def close_all(self, code: int = 1000) -> None:
        """Close every worker's connection politely, as a proxy or a restart does."""
        for _, connection, outbox in self._serving.workers():
            connection.gate.set()
            outbox.close(code)

    def pause_reading(self, name: str) -> None:
        """Read nothing more from the workers with this name: their pings go unanswered."""
        self._set_gate(name, False)

    def resume_reading(self, name: str) -> None:
        """Undo :meth:`pause_reading`."""
        self._set_gate(name, True)

    def _set_gate(self, name: str, is_open: bool) -> None:
        for peer, connection, _ in self._serving.workers():
            if peer.name == name:
                (connection.gate.set if is_open else connection.gate.clear)()

    def _poll(self) -> None:
        while not self._stopping.wait(self._poll_interval):
            self._hub.poll_functions()
            self._hub.channels.sweep()
