"""The engine's side of a WebSocket: a connection whose reading can be held, and an outbox.

Knows bytes and threads, no message of the bus.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.sync.server import ServerConnection

from ..cutting import cut_off
from .channels import Channel, Direction

MAX_FRAME = 16 * 1024**2
"""Bytes of one inbound frame (engine protocol 1.4)."""
MAX_MESSAGE = 64 * 1024**2
"""Bytes of one inbound message, over all its fragments."""
OUTBOX = 64
"""Messages that wait for a worker before the engine's own tasks block on it."""
CHANNELS = "/ws/channels/"

_DATA = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)

Relay = Callable[[bytes, bool], bool]
"""Takes one message and whether it is text; False cuts the connection. May block."""


def _reads(path: str) -> bool:
    end = channel_end(path)
    return end is not None and end.direction == "read"


class EngineConnection(ServerConnection):
    """A server connection with a gate in front of its reader.

    While the gate is closed nothing is read, so pings go unanswered and TCP pushes back: what the
    engine does to the read end of a channel always, to the write end of a full one, and to a
    worker in a test that wants it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before the base class: it starts the reading thread at once.
        self.gate = threading.Event()
        self.gate.set()
        self.relay: Relay | None = None
        self.channel: Channel | None = None
        self._parts: list[bytes] = []
        self._text = False
        self._dropped = False
        super().__init__(*args, **kwargs)

    def handshake(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().handshake(*args, **kwargs)
        finally:
            if self.over():
                self._give_up_channel()

    def _give_up_channel(self) -> None:
        """Its end was taken, as each can be only once, and will not be served: the other end must
        not wait for it (engine protocol 7.4 and 7.5)."""
        if self.channel is not None:
            (self.channel.lose if self.relay is None else self.channel.finish)()

    # --- on the reading thread -----------------------------------------------------------------

    def process_event(self, event: Any) -> None:
        if isinstance(event, Request) and _reads(event.path):
            # Closed before the handshake can be answered: not one byte of what follows is read.
            self.gate.clear()
        if self.relay is not None and isinstance(event, Frame) and event.opcode in _DATA:
            self._pass_on(self.relay, event)
        else:
            super().process_event(event)
        self.gate.wait()

    def _pass_on(self, relay: Relay, frame: Frame) -> None:
        if frame.opcode is not Opcode.CONT:
            self._text = frame.opcode is Opcode.TEXT
        self._parts.append(bytes(frame.data))
        if not frame.fin:
            return
        data, self._parts = b"".join(self._parts), []
        try:
            if self._text:
                data.decode()
        except UnicodeDecodeError:
            self.cut()
        else:
            if not relay(data, self._text):
                self.cut()

    def send_data(self) -> None:
        closing = self.protocol.close_sent
        if closing is None or closing.code != CloseCode.MESSAGE_TOO_BIG:
            super().send_data()
            return
        # The engine drops such a connection without the courtesy of a Close (1.4).
        self.protocol.data_to_send()
        if not self._dropped:
            self._dropped = True
            raise ConnectionAbortedError("the message is too large")

    # --- from any thread -----------------------------------------------------------------------

    def close_socket(self) -> None:
        # Whoever closes the socket then waits for the reading thread.
        self.gate.set()
        super().close_socket()

    def over(self) -> bool:
        """Whether a Close was seen or sent, or the connection is gone."""
        return self.state is not State.OPEN

    def cut(self) -> None:
        """End the TCP connection without a Close frame; frees whoever reads, sends or waits."""
        cut_off(self.socket)
        self.gate.set()

    def close_without_code(self) -> None:
        """Send a Close that carries no code: the peer sees 1005 (engine protocol 7.4)."""
        self.gate.set()
        try:
            with self.send_context():
                self.protocol.send_close()
        except ConnectionClosed:
            pass  # gone already


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """What a request for ``/ws/channels/…`` asks for; None for what it leaves out or garbles."""

    channel_id: str
    key: str | None = field(repr=False)
    direction: Direction | None


def channel_end(path: str) -> ChannelEnd | None:
    """The end of a channel that a request target names; None for any other target."""
    target, _, query = path.partition("?")
    if not target.startswith(CHANNELS):
        return None
    given = parse_qs(query)
    key, direction = (given.get(name, [""])[-1] for name in ("key", "dir"))
    known: dict[str, Direction] = {"read": "read", "write": "write"}
    return ChannelEnd(target[len(CHANNELS) :], key or None, known.get(direction))


class Outbox:
    """What waits to be sent to one worker, and the thread that sends it."""

    def __init__(self, connection: EngineConnection, name: str) -> None:
        self._connection = connection
        self._waiting: deque[str] = deque()
        self._changed = threading.Condition()
        self._closing: int | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def __len__(self) -> int:
        return len(self._waiting)

    def post(self, text: str) -> None:
        """Queue ``text``; never blocks, as the engine gives each message a task of its own."""
        with self._changed:
            if self._closing is None and not self._ended:
                self._waiting.append(text)
                self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Block while the queue is full: the engine answers in line and then stops reading."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._waiting) < OUTBOX)

    def close(self, code: int) -> None:
        """Send what waits, then a Close with ``code``."""
        with self._changed:
            if self._closing is None:
                self._closing = code
            self._changed.notify_all()

    def end(self) -> None:
        """The connection is gone: drop what waits and let the thread go."""
        with self._changed:
            self._ended = True
            self._waiting.clear()
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _next(self) -> str | int | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or self._waiting or self._closing is not None
            )
            if self._ended:
                return None
            if not self._waiting:
                return self._closing
            text = self._waiting.popleft()
            self._changed.notify_all()
            return text

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                if isinstance(item, int):
                    self._connection.close(item)
                    return
                self._connection.send(item)
        except ConnectionClosed:
            pass
        finally:
            self.end()
