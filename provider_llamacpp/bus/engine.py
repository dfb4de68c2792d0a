"""The engine client: connect, replay, receive, reconnect; call and be called (engine protocol).

One :class:`Engine` keeps one worker on the bus for as long as it runs. Its thread connects, sends
all registrations, serves the connection (:mod:`.session`) until it ends, and starts over.
Connecting and receiving share that thread, so the old re-attach pair always goes out before a new
one can be read. What arrives is dispatched on that thread: handlers hand off.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from .. import jsontext
from ..calls import Call
from ..errors import BusError, FatalError
from . import wire
from .conversation import POST_WAIT, Conversation, framed
from .delays import Delays
from .invocations import Invocation, Pending, PendingCalls
from .link import Link, LinkError, origin, tls_context
from .registrations import Function, Registrations
from .session import Session, SessionOver
from .waiting import Waker

__all__ = ["Engine", "Function", "Invocation"]

log = logging.getLogger(__name__)


class Engine:
    """Our place on the bus.

    :param url: ``ws://`` or ``wss://`` address of the engine; a query in it is kept
    :param name: our name on the bus, unique in its namespace
    :param token: bearer for the handshake
    :param namespace: where our registrations go; None is the engine's ``default``
    :param connect_timeout: seconds for one attempt, as all times here
    :param silence_limit: without a sign of life for so long, the connection counts as dead
    :param retry_first: delay before the second attempt; it doubles with each, up to
        ``retry_limit``
    :param clock: monotonic
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        version: str,
        description: str,
        token: str | None = None,
        namespace: str | None = None,
        isolation: str | None = None,
        ca_file: str | None = None,
        client_cert: str | None = None,
        connect_timeout: float = 10.0,
        ping_interval: float = 20.0,
        silence_limit: float = 60.0,
        send_timeout: float = 60.0,
        retry_first: float = 1.0,
        retry_limit: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        thread_name: str = "engine",
    ) -> None:
        self._thread_name = thread_name
        self.on_connect: list[Callable[[bool], None]] = []
        """Called after each connect with whether it was a reconnect; on the engine's thread, so
        they must not block, and cannot :meth:`invoke`."""
        self.connections = 0
        self.last_error: str | None = None
        """Why the connection was lost or refused last; holds no secrets."""
        self.fatal: FatalError | None = None
        """Set when there is no point in connecting again."""
        self._url = url
        self._name = name
        self._namespace = namespace
        self._card = partial(
            wire.register_worker,
            name=name,
            version=version,
            description=description,
            isolation=isolation,
            namespace=namespace,
        )
        """What we say of ourselves, but for the process it is said in."""
        self._token = token
        self._tls_context = partial(tls_context, ca_file, client_cert)
        self._connect_timeout = connect_timeout
        self._limits = {
            "ping_interval": ping_interval,
            "silence_limit": silence_limit,
            "send_timeout": send_timeout,
        }
        self._clock = clock
        self._delays = Delays(retry_first, retry_limit)
        self._registrations = Registrations(lambda: Delays(retry_first, retry_limit), clock)
        self._pending = PendingCalls()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._reattach: tuple[str, str] | None = None
        """From the last connection that had one; the engine's thread only."""
        self._state = threading.Condition()
        """Guards all below; held for moments, never while something is sent."""
        self._link: Link | None = None
        self._talk: Conversation | None = None
        self._last: Conversation | None = None
        """The current conversation, or the one before."""
        self._connected = False
        self._ended = False

    # -- registrations, from any thread ---------------------------------------------------

    def register(self, function: Function) -> None:
        """Serve ``function`` from now on, on this connection and every later one.

        :raises ValueError: if its schemas or metadata are not JSON
        """
        text = function.text()
        # Under the lock that publishes a session: either its replay holds the change, or the
        # session is seen here and told.
        with self._state:
            self._registrations.add(function, text)
            talk = self._talk
        if talk is not None:
            talk.say(text)

    def unregister(self, function_id: str) -> None:
        """Serve a function no more; unknown ones are ignored."""
        with self._state:
            talk = self._talk if self._registrations.remove(function_id) else None
        if talk is not None:
            talk.say(jsontext.dumpb({"type": "unregisterfunction", "id": function_id}))

    def register_trigger(self, trigger_type: str, function_id: str, config: object) -> str:
        """Have a function of ours called when a trigger fires; the trigger's id.

        :raises ValueError: if ``config`` is not JSON
        """
        message = wire.register_trigger(trigger_type, function_id, config, self._namespace)
        text = jsontext.dumpb(message)
        with self._state:
            self._registrations.add_trigger(message)
            talk = self._talk
        if talk is not None:
            talk.say(text)
        return str(message["id"])

    # -- calls of ours, from any thread but the engine's ----------------------------------

    def invoke(
        self,
        function_id: str,
        data: object,
        *,
        timeout: float = 15.0,
        call: Call | None = None,
        namespace: str | None = None,
        traceparent: str | None = None,
        baggage: str | None = None,
    ) -> Any:
        """Call a function and wait for its result, None if it has none.

        :param call: an abort of it ends the wait
        :param namespace: of the function; never sent for those that live in ``default``
        :raises BusError: as the other side failed; ``TIMEOUT``, ``disconnected``,
            ``payload_too_large`` and ``serialization_error`` from here
        :raises Interrupted: if ``call`` was aborted
        :raises RuntimeError: on the engine's thread, which would wait for itself
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("invoke would block the engine's thread")
        invocation_id = wire.new_id()
        message = wire.invoke(
            function_id,
            data,
            invocation_id=invocation_id,
            namespace=namespace,
            traceparent=traceparent,
            baggage=baggage,
        )
        session, parts = self._outbound(message)
        pending = self._pending.open(invocation_id)
        try:
            _ask(session, parts, pending, timeout, call)
        finally:
            unanswered = self._pending.close(invocation_id)
        if unanswered:
            if call is not None:
                call.check()
            raise BusError("TIMEOUT", f"{function_id} did not answer within {timeout:g} s")
        if pending.error is not None:
            raise pending.error
        return pending.result

    def invoke_void(self, function_id: str, data: object, *, namespace: str | None = None) -> None:
        """Call a function and want no answer.

        :raises BusError: ``disconnected``, ``payload_too_large`` or ``serialization_error``
        """
        message = wire.invoke(function_id, data, invocation_id=None, namespace=namespace)
        session, parts = self._outbound(message)
        try:
            session.post(parts, wait=POST_WAIT)
        except (SessionOver, TimeoutError) as error:
            raise BusError("disconnected", str(error) or "the engine does not read") from error

    def _outbound(self, message: wire.Message) -> tuple[Session, list[bytes]]:
        try:
            text = jsontext.dumpb(message)
        except ValueError as error:
            raise BusError("serialization_error", f"the payload {error}") from error
        talk = self._talk
        if talk is None:
            raise BusError("disconnected", "there is no connection to the engine")
        if len(text) > talk.limit:
            raise BusError("payload_too_large", f"{len(text)} bytes; {talk.limit} fit")
        return talk.session, framed(text)

    # -- life, from any thread ------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the engine has taken us in."""
        return self._connected

    @property
    def worker_id(self) -> str | None:
        """What the engine calls us on this connection, or called us on the last one."""
        return self._last.worker_id if self._last is not None else None

    @property
    def features(self) -> list[str] | None:
        """What an engine of 0.25 or later says it can do; None from an older one."""
        return self._last.features if self._last is not None else None

    def start(self) -> None:
        """Connect in the background, and again whenever that is needed, until :meth:`stop`.

        :raises RuntimeError: the second time; make a new one instead
        """
        with self._state:
            if self._thread is not None or self._stop.is_set():
                raise RuntimeError("this engine client was started or stopped before")
            self._thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Send what is queued, close and end the thread; idempotent.

        On the engine's own thread it only asks for that.
        """
        self._stop.set()
        with self._state:
            thread, talk, link = self._thread, self._talk, self._link
        if talk is not None:
            talk.session.close()
        elif link is not None:
            link.cut()
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            log.warning("the connection to the engine did not close within %g s", timeout)

    def wait_connected(self, timeout: float) -> bool:
        """Wait until the engine has taken us in; False if it has not in ``timeout`` seconds, or
        never will."""
        with self._state:
            self._state.wait_for(lambda: self._connected or self._ended, timeout)
            return self._connected

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the thread has ended, after :meth:`stop` or a :attr:`fatal` error."""
        with self._state:
            return self._state.wait_for(lambda: self._ended, timeout)

    # -- the engine's thread --------------------------------------------------------------

    def _run(self) -> None:
        waker = Waker()
        try:
            while True:
                reason = self._connect_and_serve(waker)
                if self._stop.is_set():
                    return
                self.last_error = reason
                if self.fatal is not None:
                    log.error("%s", self.fatal)
                    return
                delay = self._delays.next()
                log.warning("%s: %s; next try in %.1f s", origin(self._url), reason, delay)
                if self._stop.wait(delay):
                    return
        finally:
            waker.close()
            with self._state:
                self._ended = True
                self._state.notify_all()

    def _connect_and_serve(self, waker: Waker) -> str:
        """One connection from its dialling to its end; why it ended."""
        link = Link(urlsplit(self._url), token=self._token, context=self._tls_context)
        with self._state:
            self._link = link
        reason = "stopped"
        try:
            if not self._stop.is_set():  # stop() may have come before it could see the link
                link.connect(self._connect_timeout)
                reason = self._serve(link, waker)
        except LinkError as error:
            reason = f"cannot connect: {error}"
        except Exception as error:
            # A safety net: whatever it was, the worker stays on the bus.
            log.exception("the connection to the engine failed in an unforeseen way")
            reason = f"internal fault: {type(error).__name__}"
        finally:
            self._hang_up(reason)
            link.close()
        return reason

    def _serve(self, link: Link, waker: Waker) -> str:
        with self._state:
            first = [part for each in self._replay() for part in framed(each)]
            session = Session(link, waker, first, clock=self._clock, **self._limits)
            self._last = self._talk = talk = Conversation(
                session,
                self._registrations,
                self._pending,
                worker_name=self._name,
                now=self._clock(),
                on_taken_in=self._taken_in,
            )
        if self._stop.is_set():
            session.close()  # stop() may have come before it could see the session
        return session.run(talk.on_message, talk.timers)

    def _replay(self) -> list[bytes]:
        """What a connection begins with (3.1), as JSON."""
        again = [] if self._reattach is None else [jsontext.dumpb(wire.reattach(*self._reattach))]
        system = f"{platform.system()} {platform.release()} ({platform.machine()})"
        card = self._card(os_name=system, pid=os.getpid())
        return [*again, *self._registrations.replay(), jsontext.dumpb(card)]

    def _taken_in(self) -> None:
        self._delays.reset()
        with self._state:
            self._connected = True
            self.connections += 1
            self._state.notify_all()
        log.info("connected to %s", origin(self._url))
        for callback in self.on_connect:
            try:
                callback(self.connections > 1)
            except Exception:
                log.exception("a callback of on_connect failed")

    def _hang_up(self, reason: str) -> None:
        with self._state:
            talk, self._talk, self._link = self._talk, None, None
            self._connected = False
        if talk is not None:
            talk.session.end(reason)
            self._reattach = talk.reattach or self._reattach
            self.fatal = talk.fatal
            if talk.refused:
                self._delays.exhaust()
        self._pending.fail_all()


def _ask(
    session: Session, parts: list[bytes], pending: Pending, timeout: float, call: Call | None
) -> None:
    """Send a message and wait until it is answered, its call aborted, or the time over.

    :raises BusError: ``disconnected``
    :raises Interrupted: if ``call`` was aborted before
    """
    deadline = time.monotonic() + timeout

    def wake() -> None:
        pending.done.set()
        session.nudge()

    try:
        with call.interruptible(wake) if call is not None else nullcontext():
            session.post(parts, wait=timeout, given_up=pending.done.is_set)
            pending.done.wait(max(0.0, deadline - time.monotonic()))
    except SessionOver as error:
        raise BusError("disconnected", str(error)) from error
    except TimeoutError:
        pass  # the same as no answer
