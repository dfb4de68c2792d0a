"""What we say to the llm-router: declare, resolve, reconcile, and the token that proves it is us.

One :class:`RouterClient` stands for one provider id. It owns the registration token and the
cached answer of ``resolve``; when to call it is the keeper's business (:mod:`.provider`).
Provider protocol, sections 2 to 4.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .calls import Call
from .errors import BusError, ProviderError, redacted
from .lenient import integer

TIMEOUT = 15.0
"""Seconds for every call to the router or the state (provider protocol 1)."""
RESOLVE_TTL = 30.0
"""Seconds a resolve answer is kept (provider protocol 3)."""
DEFAULT_MAX_TOKENS = 8192
"""Of an answer, where neither the request nor the router says (provider protocol 13)."""
STORE_TRIES = 5
"""Of writing the token to the state, with growing pauses."""
STATE_GRACE = 5
"""Tries before a missing state worker is taken for absent rather than late at boot."""

RESOLVE = "router::provider::resolve"
REJECTED = "router/registration_rejected"
"""The router's record of us holds another token (provider protocol 2.2)."""
UNKNOWN = "router/unknown_provider"
"""The router has no record of us (provider protocol 2.2)."""

OVERFLOW_HINT = (
    "The prompt does not fit the context of one slot: start llama-server with a larger --ctx-size, "
    "or with fewer slots (--parallel), which share it."
)

log = logging.getLogger(__name__)


class Invoke(Protocol):
    """:meth:`provider_llamacpp.bus.engine.Engine.invoke`."""

    def __call__(
        self,
        function_id: str,
        data: object,
        *,
        timeout: float,
        call: Call | None = None,
        namespace: str | None = None,
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the operator configured for us (provider protocol 3); None where nothing was said."""

    key: str | None = field(default=None, repr=False)
    api_url: str | None = None
    max_tokens: int | None = None
    source: str = "none"


def read_resolved(answer: object, own_key: str | None) -> Resolved:
    """The router's answer as :class:`Resolved`.

    :param own_key: used where the router has no credential and names no reference to one: a
        reference that cannot be resolved must not fall through to another key (provider
        protocol 14)
    :raises BusError: ``provider/bad_resolve_response``
    """
    if not isinstance(answer, dict):
        raise BusError("provider/bad_resolve_response", "resolve did not answer with an object")
    credential = answer.get("credential")
    key = None
    if isinstance(credential, dict):
        key = credential.get("key") or credential.get("access_token")
    elif credential is not None:
        raise BusError("provider/bad_resolve_response", "credential is not an object")
    source = answer.get("source")
    referenced = answer.get("credential_error") or answer.get("credential_ref")
    if credential is None and not referenced and own_key:
        key, source = own_key, "env"
    api_url, max_tokens = answer.get("api_url"), integer(answer.get("max_tokens"))
    if not isinstance(key, str | None) or not isinstance(api_url, str | None):
        raise BusError("provider/bad_resolve_response", "key and api_url must be strings")
    return Resolved(
        key=(key or "").strip() or None,
        api_url=(api_url or "").strip() or None,
        max_tokens=max_tokens if max_tokens and max_tokens > 0 else None,
        source=source if isinstance(source, str) else "none",
    )


class RouterClient:
    """The router, seen from one provider id.

    Thread-safe; every method but :meth:`forget` blocks up to :data:`TIMEOUT` a call.

    :param invoke: calls a function on the bus
    :param worker_name: our name on the bus, which the router shows
    :param key_variable: the environment variable in which the router looks for the key
    :param own_key: the worker's own key: see :func:`read_resolved`
    :param namespace: of the router's functions; None is ``default``
    :param stop: ends the pauses between tries
    """

    def __init__(
        self,
        invoke: Invoke,
        *,
        provider_id: str,
        worker_name: str,
        key_variable: str,
        own_key: str | None,
        namespace: str | None,
        stop: threading.Event,
    ) -> None:
        self._invoke = invoke
        self._id = provider_id
        self._worker_name = worker_name
        self._key_variable = key_variable
        self._own_key = own_key
        self._namespace = namespace
        self._stop = stop
        self._scope = {"scope": f"provider-{provider_id}", "key": "registration_token"}
        self.on_refused: Callable[[], None] | None = None
        """Called when the router does not know us (any more): we are to declare ourselves again
        (provider protocol 2.2). On the thread that met it; must not block."""
        self._lock = threading.Condition()
        self._owed = True
        """A registration is to come, or under way: what the router refuses until then may be served
        after it."""
        self._token: str | None = None
        self._token_known = False
        self._state_misses = 0
        self._resolved: Resolved | None = None
        self._resolved_until = 0.0

    @property
    def secrets(self) -> tuple[str | None, ...]:
        """What no message may hold: the registration token and the keys for llama-server."""
        with self._lock:
            resolved = self._resolved
            return self._token, self._own_key, resolved.key if resolved else None

    def expect_registration(self) -> None:
        """:meth:`forget`, as :meth:`register` is about to be called."""
        with self._lock:
            self.forget()
            self._owed = True

    def forget(self, *, token: bool = True) -> None:
        """Drop the cached resolve answer and, unless told otherwise, the token."""
        with self._lock:
            self._resolved = None
            if token:
                self._token, self._token_known = None, False

    def register(self, default_models: Sequence[str]) -> None:
        """Declare ourselves once, and keep the token that the router answers with.

        :raises BusError: as the router refused, or as the state could not be asked
        """
        payload: dict[str, Any] = {
            "id": self._id,
            "display_name": "llama.cpp",
            "credential_env_var": self._key_variable,
            "credential_optional": True,
            "defaults": {"max_tokens": DEFAULT_MAX_TOKENS},
            "supports_model_listing": True,
            "context_overflow_hint": OVERFLOW_HINT,
            "worker_id": self._worker_name,
        }
        if default_models:
            payload["default_models"] = list(default_models)
        try:
            held = self._held_token()
            answer = self._call("router::provider::register", payload, token=held)
            token = answer.get("registration_token") if isinstance(answer, dict) else None
            if not isinstance(token, str) or not token:
                return
            with self._lock:
                self._token, self._token_known, self._resolved = token, True, None
        finally:
            with self._lock:
                self._owed = False
                self._lock.notify_all()
        if token != held:
            self._store(token)

    def resolve(self, call: Call | None = None) -> Resolved:
        """Where llama-server is and with which key, at most 30 s old.

        :raises ProviderError: ``permanent`` if the router refuses us, else ``transient``
        :raises Interrupted: if ``call`` is aborted meanwhile
        """
        with self._lock:
            if self._resolved is not None and time.monotonic() < self._resolved_until:
                return self._resolved
        try:
            resolved = read_resolved(self._ask(call), self._own_key)
        except BusError as error:
            self._failed(error)
            raise ProviderError(
                "permanent" if error.code == REJECTED else "transient",
                f"the router does not say where llama-server is: {error}",
            ) from error
        with self._lock:
            self._resolved, self._resolved_until = resolved, time.monotonic() + RESOLVE_TTL
        return resolved

    def _ask(self, call: Call | None) -> Any:
        token = self._held_token()
        try:
            return self._call(RESOLVE, {"id": self._id}, token=token, call=call)
        except BusError as error:
            # The router may have bound us to a token that has not reached us yet.
            renewed = self._renewed(token, call) if error.code == REJECTED else None
            if renewed is None:
                raise
        return self._call(RESOLVE, {"id": self._id}, token=renewed, call=call)

    def _renewed(self, refused: str | None, call: Call | None) -> str | None:
        """Another token than the ``refused`` one, if a registration has brought one or does so now.

        Without a call nobody waits for that: it may be the very thread that is to register.
        """
        with self._lock:
            if call is not None and self._owed:
                with call.interruptible(self._wake):
                    self._lock.wait_for(lambda: not self._owed or call.reason is not None, TIMEOUT)
                call.check()
            return self._token if self._token != refused else None

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def reconcile(self, models: Sequence[dict[str, Any]]) -> None:
        """Replace our slice of the router's catalog.

        :raises BusError: as the router answered
        """
        payload = {"provider": self._id, "models": list(models)}
        try:
            self._call("router::models::reconcile", payload, token=self._held_token())
        except BusError as error:
            self._failed(error)
            raise

    def _failed(self, error: BusError) -> None:
        if error.code in (REJECTED, UNKNOWN) and self.on_refused is not None:
            self.on_refused()

    def _call(
        self,
        function_id: str,
        payload: dict[str, Any],
        *,
        token: str | None,
        call: Call | None = None,
    ) -> Any:
        if token is not None:
            payload["token"] = token
        try:
            return self._invoke(
                function_id, payload, timeout=TIMEOUT, call=call, namespace=self._namespace
            )
        except BusError as error:
            raise BusError(error.code, redacted(error.message, token)) from None

    def _held_token(self) -> str | None:
        """The token from memory, else from the state.

        A state that cannot be read is not an empty one: registering without the token would be
        refused, or would mint a second one. Only a state worker that stays absent counts as empty.
        """
        with self._lock:
            if self._token_known:
                return self._token
        try:
            value = self._invoke("state::get", dict(self._scope), timeout=TIMEOUT)
        except BusError as error:
            self._state_misses += 1
            if error.code != "function_not_found" or self._state_misses < STATE_GRACE:
                raise
            log.warning(
                "no state worker on the bus: the registration token is kept in memory only, and "
                "a restarted worker will be refused until one runs"
            )
            value = None
        token = value if isinstance(value, str) and value else None
        with self._lock:
            if not self._token_known:
                self._token, self._token_known = token, True
            return self._token

    def _store(self, token: str) -> None:
        pause = 0.2
        for _ in range(STORE_TRIES):
            try:
                self._invoke("state::set", {**self._scope, "value": token}, timeout=TIMEOUT)
                return
            except BusError as error:
                failure = error
            if self._stop.wait(pause):
                break
            pause = min(pause * 2, 2.0)
        log.error(
            "the registration token could not be stored (%s): after a restart the router will "
            "refuse this worker until its record of %r is cleared",
            failure.code,
            self._id,
        )
