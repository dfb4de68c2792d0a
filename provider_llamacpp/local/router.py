"""A minimal llm-router for one machine, as a worker on the bus.

For trying the worker, for embedding it and for tests; production runs on the iii engine with its
own router. It does what a provider can see (provider protocol, sections 2, 3, 4 and 11):
registration with tokens, resolve, catalog, chat with retries, abort, embeddings, counts and the
``router::ready`` trigger type. It prices nothing and keeps no history.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from websockets.sync.client import ClientConnection

from ..cutting import cut_off
from ..errors import BusError
from .client import CLOSE_PAUSE, BusClient, TriggerType
from .registry import Json, Registry, invalid
from .relay import Chat, RelaySettings, Slots

log = logging.getLogger(__name__)

READY = "router::ready"
PROVIDER_CHANGED = "router::provider::changed"
MODELS_CHANGED = "router::models::changed"
STATE = {"scope": "llm-router", "key": "registry"}
STOP_GRACE = 1.0
"""Seconds for aborted chats to tell their callers."""
CALL_TIMEOUT = 30.0
"""Seconds for ``embed`` and ``count_tokens`` (provider protocol 9)."""


class LoopbackRouter:
    """One router. ``start`` and ``stop`` may alternate.

    :param engine_url: where the bus is
    :param token: bearer for the engine
    :param settings: timeouts, retries and capacity
    :param refresh_delay: seconds between a configuration change and ``refresh_models``
    :param rediscovery_delay: seconds between ``engine::functions-available`` and the nudges
    :param environ: where credential variables are read; None is the process's environment
    """

    def __init__(
        self,
        engine_url: str,
        *,
        token: str | None = None,
        settings: RelaySettings | None = None,
        refresh_delay: float = 2.0,
        rediscovery_delay: float = 3.0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = settings or RelaySettings()
        self.registry = Registry(os.environ if environ is None else environ)
        self.skipped: deque[str] = deque(maxlen=1000)
        """Stream frames the router could not read and skipped, as a real one does in silence."""
        self._refresh_delay = refresh_delay
        self._rediscovery_delay = rediscovery_delay
        self._slots = Slots(self.settings.capacity)
        self._lock = threading.Condition()
        self._chats: dict[str, Chat] = {}
        self._writers: set[ClientConnection] = set()
        self._timers: dict[str, threading.Timer] = {}
        self._booted = threading.Event()
        self._wipe = False
        self._client = BusClient(engine_url, "llm-router", token=token, on_connect=self._connected)
        self._set_up()

    def _set_up(self) -> None:
        client, registry = self._client, self.registry
        for suffix, handler, description in (
            ("provider::register", self._register, "Declare a provider"),
            ("provider::resolve", registry.resolve, "A provider's effective configuration"),
            ("provider::update_credential", self._update_credential, "Store a credential"),
            ("models::reconcile", self._reconcile, "Replace a provider's slice of the catalog"),
            ("models::list", self._list, "The catalog"),
            ("models::get", self._get, "One model of the catalog"),
            ("chat", self._chat, "Stream an answer into the caller's channel"),
            ("complete", self._complete, "A whole answer at once"),
            ("abort", self._abort, "End a running request"),
            ("embed", self._embed, "Embed texts"),
            ("count_tokens", self._count, "Count the tokens of a prompt"),
        ):
            client.serve(f"router::{suffix}", handler, description)
        client.serve(
            "router::on_functions_available",
            self._functions_available,
            "Internal: look for providers",
            internal=True,
        )
        client.listen("engine::functions-available", "router::on_functions_available")
        for type_id, description in (
            (READY, "Fired when the router is up"),
            (PROVIDER_CHANGED, "Fired when a provider registers, comes or goes"),
            (MODELS_CHANGED, "Fired when a provider's catalog was replaced"),
        ):
            client.provide(TriggerType(type_id, description, _accept_nothing))

    # --- life ----------------------------------------------------------------------------------

    def start(self, timeout: float = 10.0) -> LoopbackRouter:
        """Join the bus and announce ``router::ready``; waits for both, up to ``timeout``."""
        self._booted.clear()
        self._client.start()
        self._booted.wait(timeout)
        return self

    def stop(self) -> None:
        """Abort what runs and leave the bus."""
        with self._lock:
            chats, timers = list(self._chats.values()), list(self._timers.values())
            self._timers.clear()
        for timer in timers:
            timer.cancel()
        for chat in chats:
            chat.abort()
        with self._lock:
            self._lock.wait_for(lambda: not self._chats, STOP_GRACE)
            writers = list(self._writers)
        for writer in writers:
            cut_off(writer.socket)  # its caller does not read
        self._client.stop()

    def restart(self, *, keep_tokens: bool = True) -> None:
        """Stop and start. Every provider is unavailable and the catalog empty until they show
        up; without ``keep_tokens`` the router does not know them either."""
        self.stop()
        self._wipe = not keep_tokens
        self.start()

    def __enter__(self) -> LoopbackRouter:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # --- knobs and views -------------------------------------------------------------------------

    def forget(self, provider: str) -> None:
        """Drop all that is known of a provider, as an operator does after a lost token."""
        self.registry.forget(provider)
        self._persist()

    def set_config(self, provider: str, **changes: Any) -> None:
        """Change the operator's slice (``api_url``, ``api_key``, ``max_tokens``); None removes.

        A changed credential nudges ``on_router_ready``, any change ``refresh_models``.
        """
        with self.registry.changed:
            slice_ = self.registry.config.setdefault(provider, {})
            before = dict(slice_)
            slice_.update(changes)
            for key in [key for key, value in slice_.items() if value is None]:
                del slice_[key]
            record = self.registry.records.get(provider)
            keys = ("api_key", "credential")
            credential = any(before.get(key) != slice_.get(key) for key in keys)
            changed = before != slice_
        if record is None or not changed:
            return
        if credential:
            self._nudge(f"provider::{provider}::on_router_ready")
        if record.declaration.get("supports_model_listing") is True:
            refresh = partial(self._nudge, f"provider::{provider}::refresh_models")
            self._later(f"refresh {provider}", self._refresh_delay, refresh)

    def wait_for_provider(self, provider: str, timeout: float = 10.0) -> bool:
        """Wait for a provider to be registered and available."""

        def there() -> bool:
            record = self.registry.records.get(provider)
            return record is not None and record.available

        return self.registry.wait(there, timeout)

    def wait_for_models(self, provider: str, timeout: float = 10.0) -> list[Json]:
        """Wait for a provider's catalog to hold something; the catalog."""
        self.registry.wait(lambda: self.registry.catalog.get(provider), timeout)
        return self.registry.models(provider)

    @property
    def running(self) -> list[str]:
        """Ids of the requests that run now."""
        with self._lock:
            return list(self._chats)

    @property
    def provider_calls(self) -> int:
        """Stream calls that providers have not returned from."""
        return self._slots.taken

    # --- boot and discovery ---------------------------------------------------------------------

    def _connected(self) -> None:
        if self._booted.is_set():
            return  # a reconnect: the router itself was not restarted
        try:
            if self._wipe:
                self.registry.restore({})
                self._client.invoke("state::set", {**STATE, "value": {}})
            else:
                self.registry.restore(self._client.invoke("state::get", dict(STATE)))
        except BusError as error:
            # No state on this bus: memory has to do.
            log.debug("the registry is kept in memory only: %s", error)
            self.registry.restore(self.registry.dump())
        self._wipe = False
        try:
            self._client.fire(READY, {})
            self._discover(everyone=True)
        except BusError as error:
            log.warning("could not announce the router: %s", error)
        self._booted.set()

    def _discover(self, *, everyone: bool) -> None:
        """Nudge the live providers; unless ``everyone``, those not available to us."""
        query = {"prefix": "provider::", "include_internal": True}
        for row in self._client.invoke("engine::functions::list", query)["functions"]:
            function_id = str(row["function_id"])
            if not function_id.endswith("::on_router_ready"):
                continue
            record = self.registry.records.get(function_id.split("::")[1])
            if everyone or record is None or not record.available:
                self._nudge(function_id)

    def _functions_available(self, data: Json) -> None:
        def discover() -> None:
            try:
                self._discover(everyone=False)
            except BusError as error:
                log.debug("could not look for providers: %s", error)

        self._later("discover", self._rediscovery_delay, discover)

    def _nudge(self, function_id: str) -> None:
        self._client.begin(function_id, {})

    def _later(self, name: str, delay: float, action: Callable[[], None]) -> None:
        """Run ``action`` after ``delay`` seconds without another call under this name."""
        timer = threading.Timer(delay, action)
        timer.name, timer.daemon = "llm-router-timer", True
        with self._lock:
            previous = self._timers.get(name)
            self._timers[name] = timer
        if previous is not None:
            previous.cancel()
        timer.start()

    def _persist(self) -> None:
        # Without waiting, and without caring: there may be no state on this bus.
        self._client.begin("state::set", {**STATE, "value": self.registry.dump()})

    def _announce(self, type_id: str, data: Json) -> None:
        try:
            self._client.fire(type_id, data)
        except BusError:
            pass  # the engine went away; nobody is left to tell

    # --- providers -----------------------------------------------------------------------------

    def _register(self, data: Json) -> Json:
        answer = self.registry.register(data)
        self._persist()
        self._announce(PROVIDER_CHANGED, {"provider": answer["id"], "op": "register"})
        return answer

    def _set_available(self, provider: str, available: bool) -> None:
        if self.registry.set_available(provider, available):
            op = "available" if available else "unavailable"
            self._announce(PROVIDER_CHANGED, {"provider": provider, "op": op})

    def _update_credential(self, data: Json) -> Json:
        return self.registry.update_credential(data)

    def _reconcile(self, data: Json) -> Json:
        answer = self.registry.reconcile(data)
        self._announce(MODELS_CHANGED, answer)
        return answer

    def _list(self, data: Json) -> Json:
        return {"models": self.registry.models(data.get("provider"))}

    def _get(self, data: Json) -> Json | None:
        wanted = data.get("id") or data.get("model")
        for model in self.registry.models(data.get("provider")):
            if model["id"] == wanted:
                return model
        return None

    # --- requests ------------------------------------------------------------------------------

    def _chat(self, data: Json) -> Json:
        ref = data.get("writer_ref")
        if not isinstance(ref, dict):
            raise invalid("writer_ref is missing")
        chat, request_id = self._prepare(data, lambda text: writer.send(text))
        try:
            with self._client.open_channel(ref, "write") as opened:
                writer: ClientConnection = opened
                with self._lock:
                    self._writers.add(writer)
                try:
                    answer = chat.run()
                    time.sleep(CLOSE_PAUSE)
                finally:
                    with self._lock:
                        self._writers.discard(writer)
        finally:
            self._done(request_id)
        answer.pop("message", None)
        return answer

    def _complete(self, data: Json) -> Json:
        chat, request_id = self._prepare(data, lambda text: None)
        try:
            return chat.run()
        finally:
            self._done(request_id)

    def _prepare(self, data: Json, sink: Callable[[str], None]) -> tuple[Chat, str]:
        request_id = str(data.get("request_id") or uuid.uuid4())
        provider, payload = self.registry.prepare(data, request_id)
        chat = Chat(
            self._client,
            provider,
            payload,
            settings=self.settings,
            slots=self._slots,
            sink=sink,
            on_skipped=self.skipped.append,
            on_available=self._set_available,
        )
        with self._lock:
            if request_id in self._chats:
                raise BusError("router/request_in_progress", f"{request_id!r} is running")
            self._chats[request_id] = chat
        return chat, request_id

    def _done(self, request_id: str) -> None:
        with self._lock:
            self._chats.pop(request_id, None)
            self._lock.notify_all()

    def _abort(self, data: Json) -> Json:
        with self._lock:
            chat = self._chats.get(str(data.get("request_id")))
        if chat is not None:
            chat.abort()
        return {"ok": True, "aborted": chat is not None}

    def _embed(self, data: Json) -> Any:
        if not isinstance(data.get("input"), list):
            raise invalid("input must be a list of strings")
        named = data.get("provider")
        everyone = sorted(self.registry.records, key=lambda each: (each != "openai", each))
        payload = {"model": data.get("model"), "input": data["input"]}
        failure = BusError("router/provider_unavailable", "no provider embeds")
        for provider in [named] if named else everyone:
            try:
                return self._client.invoke(
                    f"provider::{provider}::embed", payload, timeout=CALL_TIMEOUT
                )
            except BusError as error:
                failure = error
                if "function_not_found" not in str(error):
                    break
        raise failure

    def _count(self, data: Json) -> Any:
        record, _, model = self.registry.route(data.get("provider"), data.get("model"))
        payload = {
            "model": model,
            "messages": data.get("messages"),
            "system_prompt": data.get("system_prompt"),
            "tools": data.get("tools"),
        }
        try:
            return self._client.invoke(
                f"provider::{record.id}::count_tokens", payload, timeout=CALL_TIMEOUT
            )
        except BusError as error:
            if error.code == "function_not_found":
                raise BusError("router/no_token_counter", error.message) from error
            raise


def _accept_nothing(config: Any) -> None:
    if config:
        raise ValueError(f"unknown configuration {config!r}")
