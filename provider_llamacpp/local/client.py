"""The smallest worker the router needs: functions, trigger types and calls on one bus connection.

Not the worker's own bus client (:mod:`provider_llamacpp.bus`), on purpose: the two ends of the
embedded stack must not share a misreading of the protocol. Every call gets a thread, so a handler
may block for as long as it likes.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any
from urllib.parse import quote

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from .. import jsontext
from .._version import VERSION
from ..errors import BusError
from .sockets import MAX_MESSAGE

log = logging.getLogger(__name__)

Frame = dict[str, Any]
Handler = Callable[[Frame], Any]

CONNECT_TIMEOUT = 10.0
"""Seconds for one try."""
LONGEST_PAUSE = 2.0
"""Seconds between two tries, at the most."""
STOP_WAIT = 5.0
"""Seconds that ``stop`` waits for handlers which still run."""
CLOSE_PAUSE = 0.01
"""Seconds between a writer's last frame and its Close (engine protocol 7.4)."""
READER_CLOSE_WAIT = 0.05
"""An engine never reads from a channel's read end, so it never echoes a Close (7.5)."""


def dial(url: str, token: str | None, *, close_timeout: float = 1.0) -> ClientConnection:
    """Connect to the engine: no proxy, no compression, the bearer if there is one.

    :raises OSError: if it cannot be reached, or goes in the middle of the handshake
    :raises InvalidHandshake: if it refuses
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        return connect(
            url,
            additional_headers=headers,
            compression=None,
            proxy=None,
            open_timeout=CONNECT_TIMEOUT,
            ping_interval=None,
            close_timeout=close_timeout,
            max_size=MAX_MESSAGE,
        )
    except ConnectionClosed as error:
        raise ConnectionResetError("the engine went in the middle of the handshake") from error


class TriggerType:
    """A trigger type we provide, and who is bound to it now."""

    def __init__(self, type_id: str, description: str, accept: Callable[[Any], None]) -> None:
        self.id = type_id
        self.description = description
        self.accept = accept
        """Takes the config of a new binding; a ValueError refuses it."""
        self.bindings: dict[str, Frame] = {}


class BusClient:
    """One worker on the bus, connected again and again until it is stopped.

    :param on_connect: called on a thread of its own after each (re)connect
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        token: str | None = None,
        on_connect: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = url
        self.name = name
        self._token = token
        self._on_connect = on_connect
        self._functions: dict[str, tuple[Handler, Frame]] = {}
        self._types: dict[str, TriggerType] = {}
        self._triggers: dict[str, Frame] = {}
        self._lock = threading.Lock()
        self._pending: dict[str, Future[Any]] = {}
        self._connection: ClientConnection | None = None
        self._identity: tuple[str, str | None] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._busy: set[threading.Thread] = set()

    # --- set-up, before start -------------------------------------------------------------------

    def serve(self, function_id: str, handler: Handler, description: str, **metadata: Any) -> None:
        """Offer a function; the handler gets ``data`` and its BusErrors travel as they are."""
        frame: Frame = {"type": "registerfunction", "id": function_id, "description": description}
        if metadata:
            frame["metadata"] = metadata
        self._functions[function_id] = (handler, frame)

    def provide(self, trigger_type: TriggerType) -> None:
        """Offer a trigger type."""
        self._types[trigger_type.id] = trigger_type

    def listen(self, trigger_type: str, function_id: str) -> None:
        """Have one of our functions called when something of a type happens."""
        trigger_id = str(uuid.uuid4())
        self._triggers[trigger_id] = {
            "type": "registertrigger",
            "id": trigger_id,
            "trigger_type": trigger_type,
            "function_id": function_id,
            "config": {},
        }

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect in the background."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name=f"{self.name}-bus", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the bus; calls that wait fail with ``SHUTDOWN``. Not from a handler."""
        self._stopping.set()
        connection = self._connection
        if connection is not None:
            connection.close()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        deadline = time.monotonic() + STOP_WAIT
        with self._lock:
            busy = list(self._busy)
        for thread in busy:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                target(*args)
            finally:
                with self._lock:
                    self._busy.discard(thread)

        thread = threading.Thread(target=run, name=f"{self.name}-call", daemon=True)
        with self._lock:
            self._busy.add(thread)
        thread.start()

    def _run(self) -> None:
        pause = 0.05
        while not self._stopping.is_set():
            try:
                connection = dial(self.url, self._token)
            except (OSError, InvalidHandshake, EOFError) as error:
                log.debug("%s: no connection to the engine: %s", self.name, error)
            else:
                pause = 0.05
                self._converse(connection)
            self._stopping.wait(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    def _converse(self, connection: ClientConnection) -> None:
        self._connection = connection
        try:
            with connection:
                self._introduce()
                self._spawn(self._on_connect)
                while not self._stopping.is_set():
                    self._handle(jsontext.loads(connection.recv()))
        except (ConnectionClosed, BusError):
            pass
        finally:
            self._connection = None
            for each in self._types.values():
                each.bindings.clear()
            self._fail_pending()

    def _introduce(self) -> None:
        if self._identity is not None:
            worker_id, reattach_token = self._identity
            self._send(
                {
                    "type": "reattach",
                    "previous_worker_id": worker_id,
                    "reattach_token": reattach_token,
                }
            )
        for each in self._types.values():
            self._send(
                {"type": "registertriggertype", "id": each.id, "description": each.description}
            )
        for _, frame in self._functions.values():
            self._send(frame)
        for frame in self._triggers.values():
            self._send(frame)
        about = {
            "runtime": "python",
            "version": VERSION,
            "name": self.name,
            "os": platform.system(),
            "pid": os.getpid(),
        }
        self.void("engine::workers::register", about)

    def _fail_pending(self) -> None:
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        code = "SHUTDOWN" if self._stopping.is_set() else "disconnected"
        for future in pending:
            future.set_exception(BusError(code, "the connection to the engine ended"))

    # --- receiving -----------------------------------------------------------------------------

    def _handle(self, frame: Frame) -> None:
        kind = frame.get("type")
        if kind == "invokefunction":
            self._spawn(self._answer, frame)
        elif kind == "invocationresult":
            self._settle(frame)
        elif kind == "workerregistered":
            self._identity = (frame["worker_id"], frame.get("reattach_token"))
        elif kind == "registertrigger":
            self._bind(frame)
        elif kind == "unregistertrigger":
            bound = self._types.get(frame["trigger_type"])
            if bound is not None:
                bound.bindings.pop(frame["id"], None)
        elif kind in ("registrationrejected", "error"):
            log.error("%s: the engine refuses: %s", self.name, frame)

    def _answer(self, frame: Frame) -> None:
        answer: Frame = {
            "type": "invocationresult",
            "invocation_id": frame["invocation_id"],
            "function_id": frame["function_id"],
        }
        try:
            known = self._functions.get(frame["function_id"])
            if known is None:
                raise BusError("function_not_found", f"no function {frame['function_id']!r}")
            data = frame.get("data")
            result = known[0](data if isinstance(data, dict) else {})
            text = jsontext.dumps({**answer, "result": result})
        except BusError as error:
            failure = {"code": error.code, "message": error.message}
            text = jsontext.dumps({**answer, "error": failure})
        except Exception as error:
            log.exception("%s failed", frame["function_id"])
            failure = {"code": "invocation_failed", "message": f"handler error: {error}"}
            text = jsontext.dumps({**answer, "error": failure})
        try:
            self._send_text(text)
        except BusError:
            pass  # the caller's engine is gone, and the call with it

    def _settle(self, frame: Frame) -> None:
        with self._lock:
            future = self._pending.pop(frame["invocation_id"], None)
        if future is None:
            return
        error = frame.get("error")
        if error is None:
            future.set_result(frame.get("result"))
        else:
            future.set_exception(BusError(error["code"], error["message"]))

    def _bind(self, frame: Frame) -> None:
        answer = {key: frame[key] for key in ("id", "trigger_type", "function_id")}
        answer["type"] = "triggerregistrationresult"
        try:
            bound = self._types[frame["trigger_type"]]
            bound.accept(frame.get("config"))
            bound.bindings[frame["id"]] = frame
        except (KeyError, ValueError) as error:
            answer["error"] = {"code": "trigger_registration_failed", "message": str(error)}
        self._send(answer)

    # --- sending -------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the control socket is open now."""
        return self._connection is not None

    def begin(self, function_id: str, data: Any) -> Future[Any]:
        """Call a function; the future fails with a BusError."""
        future: Future[Any] = Future()
        invocation_id = str(uuid.uuid4())
        with self._lock:
            self._pending[invocation_id] = future
        try:
            self._send(
                {
                    "type": "invokefunction",
                    "invocation_id": invocation_id,
                    "function_id": function_id,
                    "data": data,
                }
            )
        except BusError as error:
            with self._lock:
                mine = self._pending.pop(invocation_id, None)
            if mine is not None:
                mine.set_exception(error)
        return future

    def invoke(self, function_id: str, data: Any, *, timeout: float = 15.0) -> Any:
        """Call a function and wait.

        :raises BusError: the failure as it came, ``TIMEOUT`` or ``disconnected``
        """
        future = self.begin(function_id, data)
        try:
            return future.result(timeout)
        except FutureTimeout:
            raise BusError("TIMEOUT", f"{function_id}: no answer in {timeout:g} s") from None

    def void(self, function_id: str, data: Any, **fields: Any) -> None:
        """Call a function and forget about it."""
        self._send(
            {
                "type": "invokefunction",
                "function_id": function_id,
                "data": data,
                "action": {"type": "void"},
                **fields,
            }
        )

    def fire(self, type_id: str, data: Any) -> int:
        """Call every function bound to one of our trigger types; how many."""
        bindings = list(self._types[type_id].bindings.values())
        for each in bindings:
            extra = {k: each[k] for k in ("metadata", "namespace") if each.get(k) is not None}
            self.void(each["function_id"], data, **extra)
        return len(bindings)

    def _send(self, frame: Frame) -> None:
        self._send_text(jsontext.dumps(frame))

    def _send_text(self, text: str) -> None:
        connection = self._connection
        try:
            if connection is None:
                raise BusError("disconnected", "not connected to the engine")
            connection.send(text)
        except ConnectionClosed as error:
            raise BusError("disconnected", "the connection to the engine ended") from error

    # --- channels ------------------------------------------------------------------------------

    def open_channel(self, ref: Frame, direction: str) -> ClientConnection:
        """Take one end of a channel, to be used as a context; there is one try (7.2).

        :raises BusError: ``channel_unavailable``
        """
        base, _, query = self.url.partition("?")
        own = f"key={quote(str(ref.get('access_key')), safe='')}&dir={direction}"
        path = f"/ws/channels/{quote(str(ref.get('channel_id')), safe='')}"
        url = f"{base.rstrip('/')}{path}?{query + '&' if query else ''}{own}"
        wait = READER_CLOSE_WAIT if direction == "read" else 1.0
        try:
            return dial(url, self._token, close_timeout=wait)
        except (OSError, InvalidHandshake, EOFError) as error:
            raise BusError("channel_unavailable", f"cannot open the channel: {error}") from error
