"""What the engine says on one connection, and what we answer at once (engine protocol 2).

All of it runs on the engine client's thread, except where it says otherwise. Nothing here blocks:
handlers hand off, and what is sent from this thread is queued at worst.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from .. import jsontext
from ..errors import BusError, FatalError
from . import frames, wire
from .invocations import Invocation, PendingCalls
from .registrations import Registrations
from .session import MAX_MESSAGE, Session, SessionOver

GREETING_GRACE = 2.0
"""Seconds after which a silent engine counts as one that took us in: it owes us no frame."""
POST_WAIT = 60.0
"""Seconds a message may wait for an engine that reads slowly (engine protocol 1.4)."""

log = logging.getLogger(__name__)


def framed(text: bytes) -> list[bytes]:
    """A message as the frames to send."""
    return frames.message_frames(text, os.urandom)


class Conversation:
    """The messages of one connection.

    :param worker_name: for the message about a name that is taken
    :param now: seconds, monotonic
    :param on_taken_in: called once, when it is clear that the engine serves us
    """

    def __init__(
        self,
        session: Session,
        registrations: Registrations,
        pending: PendingCalls,
        *,
        worker_name: str,
        now: float,
        on_taken_in: Callable[[], None],
    ) -> None:
        self.session = session
        self.taken_in = False
        """Whether the engine serves us: no refusal came in place of its greeting."""
        self.worker_id: str | None = None
        self.reattach: tuple[str, str] | None = None
        """What the next connection takes over from this one with (2.2)."""
        self.features: list[str] | None = None
        """What an engine of 0.25 or later says it can do; None from an older one."""
        self.refused = False
        """Set when trying again soon would be pointless (1.2)."""
        self.fatal: FatalError | None = None
        """Set when trying again at all would be (2.4)."""
        self._registrations = registrations
        self._pending = pending
        self._worker_name = worker_name
        self._greeting_due = now + GREETING_GRACE
        self._on_taken_in = on_taken_in

    @property
    def limit(self) -> int:
        """Bytes of one message of ours: fragments are for engines that list features (1.4)."""
        return frames.MAX_FRAME if self.features is None else MAX_MESSAGE

    def say(self, text: bytes) -> None:
        """From any thread: send what the next connection would begin with anyway."""
        try:
            self.session.post(framed(text), wait=POST_WAIT)
        except (SessionOver, TimeoutError) as error:
            log.debug("a message was not sent: %s", error)

    def timers(self, now: float) -> float | None:
        """Do what is due; when to be asked again."""
        if not self.taken_in and now >= self._greeting_due:
            self._take_in()
        messages, due = self._registrations.due(now)
        for message in messages:
            self.say(jsontext.dumpb(message))
        if not self.taken_in:
            return self._greeting_due if due is None else min(due, self._greeting_due)
        return due

    def on_message(self, data: bytes) -> None:
        """Take one message; whatever is wrong with it, the next one is taken too (8, rule 7)."""
        if not data.strip():
            return
        try:
            message = jsontext.loads(data)
        except ValueError:
            log.warning("a message of %d bytes that is not JSON was dropped", len(data))
            return
        try:
            kind = message["type"]
            self._dispatch(kind, message)
            if not self.taken_in and kind not in ("error", "registrationrejected"):
                self._take_in()
        except Exception:
            log.exception("a message could not be handled and was dropped")

    def _take_in(self) -> None:
        self.taken_in = True
        self._on_taken_in()

    def _dispatch(self, kind: object, message: wire.Message) -> None:
        match kind:
            case "invokefunction":
                self._on_call(message)
            case "invocationresult":
                if not self._pending.settle(message):
                    log.debug("a result that nobody waits for was dropped")
            case "ping":
                self.say(b'{"type":"pong"}')
            case "workerregistered":
                self._on_registered(message)
            case "triggerregistrationresult":
                self._on_trigger_result(message)
            case "registrationrejected":
                self._on_rejected(message)
            case "error":
                self._on_error(message)
            case _:
                log.debug("a message of type %.60r was ignored", kind)

    def _on_registered(self, message: wire.Message) -> None:
        self.worker_id = wire.text_of(message, "worker_id")
        token = wire.text_of(message, "reattach_token")
        if self.worker_id is not None and token is not None:
            self.reattach = (self.worker_id, token)
        features = message.get("features")
        if isinstance(features, list):
            self.features = [each for each in features if isinstance(each, str)]

    # -- calls to us ----------------------------------------------------------------------

    def _on_call(self, message: wire.Message) -> None:
        invocation = Invocation(message, str(message.get("function_id")), self._answer)
        handler = self._registrations.handler(invocation.function_id)
        if handler is None:
            invocation.fail("function_not_found", f"{invocation.function_id} is not served here")
            return
        try:
            handler(invocation)
        except BusError as error:
            invocation.fail(error.code, error.message)
        except Exception as error:
            log.exception("the handler of %s failed", invocation.function_id)
            invocation.fail("invocation_failed", f"handler error: {error}")

    def _answer(self, invocation: Invocation, body: wire.Message) -> None:
        """From any thread."""
        if invocation.id is None:
            return
        text = wire.result(
            invocation.id,
            invocation.function_id,
            body,
            limit=self.limit,
            traceparent=invocation.traceparent,
            baggage=invocation.baggage,
        )
        try:
            self.session.post(framed(text), wait=POST_WAIT)
        except SessionOver:
            log.debug("an answer was dropped: its connection is gone")
        except TimeoutError:
            self.session.end(f"the engine made no room for an answer in {POST_WAIT:g} s")

    # -- refusals -------------------------------------------------------------------------

    def _on_trigger_result(self, message: wire.Message) -> None:
        if message.get("error") is None:
            return
        error = wire.remote_error(message["error"])
        kind = str(message.get("trigger_type"))[:100]
        if error.code == "trigger_type_not_found":
            if self._registrations.refused(wire.text_of(message, "id")):
                log.info("trigger type %r has no provider yet; it is tried again", kind)
        else:
            log.error("the trigger of type %r was refused: %.300r", kind, str(error))

    def _on_rejected(self, message: wire.Message) -> None:
        code = wire.text_of(message, "code") or "no code"
        owner = str(message.get("owner_worker_id"))[:60]
        if code == "FUNCTION_NAMESPACE_CONFLICT":
            log.error(
                "function %.200r is taken by worker %r: the others are served, and it is asked "
                "for again on the next connection",
                message.get("function_id"),
                owner,
            )
            return
        if code == "WORKER_NAMESPACE_CONFLICT":
            reason = (
                f"the worker name {self._worker_name!r} is taken on the bus by worker {owner!r}: "
                "stop that one, or give this one another name"
            )
        else:
            reason = f"the engine refused the registration: {code[:100]!r}"
        self.fatal = FatalError(reason)
        self.session.end(reason)

    def _on_error(self, message: wire.Message) -> None:
        error = wire.remote_error(message.get("error"))
        if error.code == "AUTH_ERROR" or not self.taken_in:
            self.refused = True
            self.session.end(f"the engine refused us: {str(error)[:300]!r}")
        else:
            log.warning("the engine reports %.300r", str(error))
