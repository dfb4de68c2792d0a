"""The official ``iii-sdk`` in the roles around the worker: the router, and a caller.

Independent of our own code: what the SDK cannot read, these tests do not see. The router is the
part of llm-router that a provider meets (provider protocol 2 to 4), the caller opens channels and
reads them with the SDK's own reader.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
import uuid
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from iii import InitOptions, InvocationError, TriggerAction
from iii.helpers import create_channel
from iii.iii import III
from iii.iii_types import InvocationResultMessage
from iii.triggers import TriggerConfig, TriggerHandler
from iii_helpers.observability import ReconnectionConfig

Json = dict[str, Any]
READY = "router::ready"


def end(client: III) -> None:
    """Have the client leave the bus, and end its thread and loop; idempotent.

    What still waits on the loop is ended in order: it would complain later, in the middle of
    another test.
    """
    loop = client._loop
    if loop.is_closed():
        return
    client.shutdown()
    assert not client._thread.is_alive()
    loop.call_soon(loop.stop)  # with a stop of the client's that may still be due
    loop.run_forever()
    waiting = asyncio.all_tasks(loop)
    for task in waiting:
        task.cancel()
    if waiting:
        loop.run_until_complete(asyncio.wait(waiting))
    loop.close()


class Client(III):
    """An SDK client whose handlers can fail with a code of their own.

    The Python SDK answers ``invocation_failed`` for whatever a handler raises; the router is
    written with another one, which passes ``router/...`` on. So does this one, for an
    :class:`InvocationError`.
    """

    def __init__(self, url: str, name: str, *, namespace: str | None = None) -> None:
        quick = ReconnectionConfig(initial_delay_ms=50, max_delay_ms=200)
        super().__init__(
            url,
            InitOptions(
                worker_name=name,
                namespace=namespace,
                otel={"enabled": False},
                reconnection_config=quick,
            ),
        )
        self._wait_until_connected()

    async def _send(self, msg: Any) -> None:
        if isinstance(msg, InvocationResultMessage) and isinstance(msg.error, dict):
            code, colon, message = str(msg.error.get("message")).partition(": ")
            if colon and "/" in code and " " not in code:
                msg = msg.model_copy(update={"error": {"code": code, "message": message}})
        await super()._send(msg)

    def call(self, function_id: str, payload: Any, *, timeout: float = 15.0) -> Any:
        """Call a function through the engine and wait. :raises InvocationError: as it failed"""
        return self.begin(function_id, payload, timeout=timeout).result(timeout + 5.0)

    def begin(self, function_id: str, payload: Any, *, timeout: float = 60.0) -> Future[Any]:
        """Call a function through the engine."""
        request = {
            "function_id": function_id,
            "payload": payload,
            "timeout_ms": int(timeout * 1000),
            "dispatch": "remote",
        }
        return asyncio.run_coroutine_threadsafe(self.trigger_async(request), self._loop)

    def run(self, coroutine: Any) -> Future[Any]:
        """Run a coroutine on the client's own loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """As :func:`end`."""
        end(self)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass
class Store:
    """What a router keeps over its own restarts."""

    hashes: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each provider's token."""
    config: Json = field(default_factory=dict)
    """Answer to ``resolve``, beside ``configured`` and ``source``."""
    models: dict[str, list[Json]] = field(default_factory=dict)


class _Bindings(TriggerHandler[Any]):
    def __init__(self, router: Router) -> None:
        self._router = router

    async def register_trigger(self, config: TriggerConfig[Any]) -> None:
        if config.config:
            raise ValueError(f"unknown fields {sorted(config.config)}")
        self._router.bound(config)

    async def unregister_trigger(self, config: TriggerConfig[Any]) -> None:
        self._router.unbound(config.id)


class Router:
    """The provider-facing half of llm-router, as a worker made with the SDK."""

    def __init__(
        self,
        url: str,
        store: Store | None = None,
        *,
        announce: bool = True,
        namespace: str | None = None,
    ) -> None:
        self.store = store or Store()
        self.calls: dict[str, list[Json]] = defaultdict(list)
        """Payloads, by the last part of the function's id."""
        self.declarations: dict[str, Json] = {}
        self.known: set[str] = set(self.store.models)
        """Providers the router has a record of; others get ``router/unknown_provider``."""
        self.rejections = 0
        self._changed = threading.Condition()
        self._bindings: dict[str, TriggerConfig[Any]] = {}
        self.client = Client(url, "llm-router", namespace=namespace)
        for suffix, handler in {
            "provider::register": self._register,
            "provider::resolve": self._resolve,
            "models::reconcile": self._reconcile,
            "models::get": self._get,
        }.items():
            self.client.register_function(f"router::{suffix}", self._recorded(suffix, handler))
        self.client.run(self._provide_type()).result(10)
        if announce:
            self.announce()

    async def _provide_type(self) -> None:
        # On the SDK's own loop: it sends the type before it notes the handler, and bindings that
        # wait for the type would find none there.
        with warnings.catch_warnings():
            # The SDK calls trigger types old; the router still provides one (protocol 8).
            warnings.simplefilter("ignore", DeprecationWarning)
            described = {"id": READY, "description": "the router is ready"}
            self.client.register_trigger_type(described, _Bindings(self))

    # -- what tests do and see ----------------------------------------------------------------

    def announce(self) -> None:
        """Say that the router is ready, both ways a router does (provider protocol 2.3)."""
        with self._changed:
            targets = {each.function_id for each in self._bindings.values()}
        rows = self.client.call(
            "engine::functions::list", {"prefix": "provider::", "include_internal": True}
        )
        targets |= {
            row["function_id"]
            for row in rows["functions"]
            if row["function_id"].endswith("::on_router_ready")
        }
        for target in targets:
            self.nudge(target)

    def fire(self) -> int:
        """Fire the trigger alone; how many bindings there were."""
        with self._changed:
            bindings = list(self._bindings.values())
        for binding in bindings:
            self.nudge(binding.function_id)
        return len(bindings)

    def nudge(self, function_id: str) -> None:
        request = {"function_id": function_id, "payload": {}, "action": TriggerAction.Void()}
        self.client.run(self.client.trigger_async(request)).result(10)

    def wait(self, condition: Callable[[], object], timeout: float = 15.0) -> bool:
        """Wait for something that a call to the router makes true."""
        with self._changed:
            return bool(self._changed.wait_for(condition, timeout))

    def wait_for_calls(self, suffix: str, count: int = 1, timeout: float = 15.0) -> bool:
        return self.wait(lambda: len(self.calls[suffix]) >= count, timeout)

    def bindings(self) -> Counter[str]:
        """Functions bound to the ready trigger, and how often."""
        with self._changed:
            return Counter(each.function_id for each in self._bindings.values())

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- the trigger type ---------------------------------------------------------------------

    def bound(self, config: TriggerConfig[Any]) -> None:
        with self._changed:
            self._bindings[config.id] = config
            self._changed.notify_all()

    def unbound(self, trigger_id: str) -> None:
        with self._changed:
            self._bindings.pop(trigger_id, None)
            self._changed.notify_all()

    # -- functions ----------------------------------------------------------------------------

    def _recorded(self, suffix: str, handler: Callable[[Json], Json]) -> Callable[[Json], Json]:
        def recorded(data: Json) -> Json:
            with self._changed:
                try:
                    return handler(data)
                finally:
                    self.calls[suffix].append(data)
                    self._changed.notify_all()

        return recorded

    def _check_token(self, data: Json, provider: str) -> str | None:
        token, known = data.get("token"), self.store.hashes.get(provider)
        if known is None:
            return token
        if token is None or _digest(token) != known:
            self.rejections += 1
            raise InvocationError("router/registration_rejected", "token mismatch")
        return str(token)

    def _register(self, data: Json) -> Json:
        provider = data["id"]
        token = self._check_token(data, provider) or str(uuid.uuid4())
        self.store.hashes[provider] = _digest(token)
        self.declarations[provider] = {k: v for k, v in data.items() if k != "token"}
        self.known.add(provider)
        return {"ok": True, "id": provider, "registration_token": token}

    def _known(self, data: Json, key: str) -> str:
        provider = str(data[key])
        if provider not in self.known:
            raise InvocationError("router/unknown_provider", f"no provider {provider!r}")
        self._check_token(data, provider)
        return provider

    def _resolve(self, data: Json) -> Json:
        provider = self._known(data, "id")
        config = self.store.config
        answer = {
            "configured": "credential" in config,
            "source": "config" if "credential" in config else "none",
            **self.declarations.get(provider, {}).get("defaults", {}),
            **config,
        }
        return answer

    def _reconcile(self, data: Json) -> Json:
        provider = self._known(data, "provider")
        strangers = [row["id"] for row in data["models"] if row["provider"] != provider]
        if strangers:
            raise InvocationError("router/invalid_request", f"not {provider}'s: {strangers}")
        self.store.models[provider] = data["models"]
        return {"provider": provider, "count": len(data["models"])}

    def _get(self, data: Json) -> Json:
        for rows in self.store.models.values():
            for row in rows:
                if row["id"] == data.get("id"):
                    return row
        raise InvocationError("router/not_found", "no such model")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class FrameLog:
    """The frames of one stream, as they come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.frames: list[Json] = []
        self.texts: list[str] = []
        self.arrivals: list[float] = []
        """When each frame came: ``time.monotonic()``."""
        self.ended = False
        """The channel was closed."""

    def take(self, text: str) -> None:
        """A frame came."""
        now = time.monotonic()
        with self._changed:
            self.frames.append(json.loads(text))
            self.texts.append(text)
            self.arrivals.append(now)
            self._changed.notify_all()

    def end(self) -> None:
        """No more frames will come."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def wait(self, condition: Callable[[], object], timeout: float = 15.0) -> bool:
        """Wait for something that a frame, or the end of the channel, makes true."""
        with self._changed:
            return bool(self._changed.wait_for(condition, timeout))

    def wait_for(self, kind: str, count: int = 1, timeout: float = 15.0) -> bool:
        """Wait for so many frames of a kind; False as well if the end comes before them."""

        def come() -> bool:
            return sum(1 for frame in self.frames if frame["type"] == kind) >= count

        return self.wait(lambda: come() or self.ended, timeout) and come()

    @property
    def kinds(self) -> list[str]:
        """The types of the frames, in order."""
        return [frame["type"] for frame in self.frames]

    @property
    def terminal(self) -> Json:
        """The message of the one terminal frame."""
        found = [frame for frame in self.frames if frame["type"] in ("done", "error")]
        assert len(found) == 1, self.kinds
        message = found[0].get("message") or found[0].get("error")
        assert isinstance(message, dict)
        return message


class Stream(FrameLog):
    """One stream call through the SDK: its channel, its frames, its result."""

    def __init__(self, client: Client, payload: Json, *, provider: str = "llamacpp") -> None:
        super().__init__()
        self._client = client
        self._provider = provider
        channel = create_channel(client)
        self._reader = channel.reader
        self._reader.on_message(self.take)
        self._reading = client.run(self._read())
        self.key = payload.get("resolution_key")
        self.result = client.begin(
            f"provider::{provider}::stream",
            {"writer_ref": channel.writer_ref.model_dump(), **payload},
        )

    async def _read(self) -> None:
        try:
            async for block in self._reader:
                raise AssertionError(f"a binary frame: {block[:80]!r}")
        finally:
            self.end()

    def finish(self, timeout: float = 30.0) -> Json:
        """Wait for the end of the channel and of the call; the call's result.

        :raises InvocationError: as the call failed
        """
        result = self.result.result(timeout)
        assert self.wait(lambda: self.ended, timeout), "the channel was not closed"
        self._reading.result(5)
        self._client.run(self._reader.close_async()).result(5)
        assert isinstance(result, dict)
        return result

    def leave(self) -> None:
        """Close the reading end at once, as a caller that goes away does."""
        socket = self._reader._ws
        assert socket is not None
        self._client._loop.call_soon_threadsafe(socket.transport.abort)
        self._reading.exception(5)

    def abort(self) -> Json:
        """Ask the provider to abort this stream."""
        function = f"provider::{self._provider}::abort"
        answer = self._client.call(function, {"request_id": self.key})
        assert isinstance(answer, dict)
        return answer
