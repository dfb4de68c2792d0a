"""The engine's mind: who is connected, who serves what, which calls are open.

Everything here happens under one lock, and nothing here does I/O: peers are told things through
their outboxes, which never block (see :mod:`.sockets`).
"""

from __future__ import annotations

import hmac
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..errors import BusError
from . import builtins
from .channels import ChannelTable
from .profiles import DEFAULT_NAMESPACE, Profile
from .state import StateStore
from .triggers import FUNCTIONS_AVAILABLE, WORKERS_AVAILABLE, TriggerTable, refusal
from .workers import Frame, Function, Peer, Pending, answer

log = logging.getLogger(__name__)

_REGISTRATIONS = frozenset(
    {
        "registerfunction",
        "unregisterfunction",
        "registertrigger",
        "unregistertrigger",
        "registertriggertype",
        "unregistertriggertype",
    }
)
_TEXT_LIMIT = 280
"""Characters of a worker's name and description (engine protocol 3.2)."""


class Hub:
    """One engine's state. Every public method takes the lock itself."""

    def __init__(self, profile: Profile, *, state: bool = True) -> None:
        self.profile = profile
        self.channels = ChannelTable()
        self.triggers = TriggerTable(profile)
        self.store = StateStore()
        self.state_enabled = state
        self.peers: dict[str, Peer] = {}
        self.functions: dict[tuple[str, str], Function] = {}
        self.pending: dict[str, Pending] = {}
        self.changed = threading.Condition(threading.RLock())
        self._functions_dirty = False
        self._handlers: Mapping[str, Callable[[Peer, Frame], bool | None]] = {
            "reattach": self._reattach,
            "registerfunction": self._register_function,
            "unregisterfunction": self._unregister_function,
            "registertrigger": self._register_trigger,
            "unregistertrigger": self._unregister_trigger,
            "registertriggertype": self.triggers.register_type,
            "unregistertriggertype": self.triggers.unregister_type,
            "triggerregistrationresult": self._trigger_settled,
            "invokefunction": self._invoke,
            "invocationresult": self._result,
            "ping": self._ping,
            "observe": self._observe,
        }

    # --- connections ---------------------------------------------------------------------------

    def join(self, peer: Peer) -> None:
        """A connection was accepted: greet it."""
        greeting: Frame = {"type": "workerregistered", "worker_id": peer.worker_id}
        if self.profile.reattach:
            greeting["reattach_token"] = peer.reattach_token
        if self.profile.features:
            greeting["features"] = list(self.profile.features)
        with self.changed:
            peer.declared = not self.profile.namespaces
            self.peers[peer.worker_id] = peer
            peer.send(greeting)
            self.changed.notify_all()

    def leave(self, peer: Peer) -> None:
        """A connection is gone: drop all that was registered on it. Idempotent."""
        with self.changed:
            if peer.gone:
                return
            peer.gone = True
            self.peers.pop(peer.worker_id, None)
            for served in [key for key, each in self.functions.items() if each.owner is peer]:
                del self.functions[served]
                self._functions_dirty = True
            self.triggers.forget(peer)
            stopped = [(k, p) for k, p in self.pending.items() if p.executor is peer]
            for key, pending in stopped:
                del self.pending[key]
                pending.fail("invocation_stopped", "the worker disconnected")
            if peer.name is not None:
                self._fire_workers("worker_disconnected", peer)
            self.changed.notify_all()

    def handle(self, peer: Peer, frame: Frame) -> bool:
        """Act on one checked frame; whether the reader must wait for room in the outbox, as
        after an answer the engine gives in line."""
        if not self.profile.namespaces:
            frame = {k: v for k, v in frame.items() if not k.endswith("namespace")}
        with self.changed:
            if peer.gone or peer.refused:
                return False
            if not peer.declared and frame["type"] in _REGISTRATIONS:
                peer.buffered.append(frame)
                return False
            handler = self._handlers.get(frame["type"])
            waits = handler(peer, frame) if handler is not None else False
            if peer.refused:
                # Last, so that the answer to the registration still goes out.
                peer.close(1000)
            self.changed.notify_all()
            return bool(waits)

    def declare(self, peer: Peer, data: Frame) -> bool:
        """``engine::workers::register``; False when the name is taken, and a Close follows."""
        namespace = data.get("namespace") if self.profile.namespaces else None
        if not isinstance(namespace, str | None):
            raise BusError("deserialization_error", "namespace: expected a string")
        if isinstance(namespace, str) and not namespace.strip():
            raise BusError("INVALID_NAMESPACE", "namespace is blank")
        name = data.get("name")
        peer.details = data
        peer.features = frozenset(data.get("features") or ()) & {*self.profile.features}
        if peer.declared and self.profile.namespaces and namespace not in (None, peer.namespace):
            log.warning("namespace %r comes too late: %r is in use", namespace, peer.namespace)
        elif not peer.declared:
            peer.namespace = namespace or DEFAULT_NAMESPACE
        if isinstance(name, str):
            name = "".join(c for c in name if c.isprintable())[:_TEXT_LIMIT]
            holder = self._holder(peer, name)
            if holder is not None:
                self._reject_worker(peer, name, holder)
                return False
            peer.name = name
        self.drain(peer)
        self._fire_workers("worker_connected", peer)
        return True

    def drain(self, peer: Peer) -> None:
        """Let the registrations take effect that waited for a namespace (3.3)."""
        with self.changed:
            if peer.declared or peer.gone or peer.refused:
                return
            peer.declared = True
            waiting, peer.buffered = peer.buffered, []
            for frame in waiting:
                self._handlers[frame["type"]](peer, frame)
            self.changed.notify_all()

    def _holder(self, peer: Peer, name: str) -> Peer | None:
        if self.profile.namespaces:
            for each in list(self.peers.values()):
                if each is not peer and (each.name, each.namespace) == (name, peer.namespace):
                    if not each.closed():
                        return each
                    self.leave(each)  # as its own thread is about to
        return None

    def _reject_worker(self, peer: Peer, name: str, holder: Peer) -> None:
        peer.refused = True
        peer.send(
            {
                "type": "registrationrejected",
                "code": "WORKER_NAMESPACE_CONFLICT",
                "namespace": peer.namespace,
                "worker_name": name,
                "owner_worker_id": holder.worker_id,
            }
        )

    def _reattach(self, peer: Peer, frame: Frame) -> None:
        if not self.profile.reattach:
            return
        old = self.peers.get(frame["previous_worker_id"])
        token = frame.get("reattach_token") or ""
        if old is None or old is peer:
            return
        if hmac.compare_digest(old.reattach_token.encode(), token.encode()):
            self.leave(old)
            old.cut()

    def _ping(self, peer: Peer, frame: Frame) -> bool:
        peer.send({"type": "pong"})
        return True

    # --- registrations -------------------------------------------------------------------------

    @property
    def own_functions(self) -> list[str]:
        """Ids that the engine serves itself, all in ``default``."""
        return [*builtins.FUNCTIONS, *(self.store.functions() if self.state_enabled else ())]

    def _register_function(self, peer: Peer, frame: Frame) -> bool:
        key = (peer.namespace, frame["id"])
        if self.profile.namespaces:
            owner = self.functions.get(key)
            taken = owner is not None and owner.owner is not peer
            reserved = key[1].startswith("engine::") or (
                key[0] == DEFAULT_NAMESPACE and key[1] in self.own_functions
            )
            if taken or reserved:
                peer.send(
                    {
                        "type": "registrationrejected",
                        "code": "FUNCTION_NAMESPACE_CONFLICT",
                        "namespace": peer.namespace,
                        "function_id": frame["id"],
                        "owner_worker_id": owner.owner.worker_id if owner else "",
                    }
                )
                return True
        self.functions[key] = Function(frame["id"], peer.namespace, peer, frame)
        self._functions_dirty = True
        if "observe.v1" in peer.features:
            self._confirm(peer, frame["id"])
        return False

    def _confirm(self, peer: Peer, function_id: str) -> None:
        peer.send(
            {
                "type": "functionregistered",
                "id": function_id,
                "namespace": peer.namespace,
                "revision": 0,
                "local_dispatch": "local-dispatch.v1" in peer.features,
                "observers": [],
            }
        )

    def _unregister_function(self, peer: Peer, frame: Frame) -> None:
        key = (peer.namespace, frame["id"])
        if key in self.functions and self.functions[key].owner is peer:
            del self.functions[key]
            self._functions_dirty = True

    def _register_trigger(self, peer: Peer, frame: Frame) -> bool:
        error = self.triggers.register(peer, frame)
        if error is not None:
            peer.send(refusal(frame, error))
        return error is not None

    def _unregister_trigger(self, peer: Peer, frame: Frame) -> None:
        self.triggers.unregister(frame["id"])

    def _trigger_settled(self, peer: Peer, frame: Frame) -> None:
        self.triggers.settled(frame)

    def _observe(self, peer: Peer, frame: Frame) -> bool:
        error = {"code": "UNSUPPORTED", "message": "the loopback engine has no observers"}
        peer.send({"type": "observeresult", "id": frame["id"], "state": "error", "error": error})
        return True

    # --- invocations ---------------------------------------------------------------------------

    def call(self, function_id: str, data: Any, *, namespace: str | None = None) -> Future[Any]:
        """Invoke from within the engine: no ``_caller_worker_id`` is added."""
        future: Future[Any] = Future()

        def deliver(outcome: Frame) -> None:
            error = outcome.get("error")
            if error is None:
                future.set_result(outcome.get("result"))
            else:
                future.set_exception(BusError(error["code"], error["message"]))

        frame: Frame = {
            "function_id": function_id,
            "data": data,
            "invocation_id": str(uuid.uuid4()),
        }
        if namespace is not None:
            frame["namespace"] = namespace
        with self.changed:
            self._route(None, frame, deliver)
        return future

    def _invoke(self, peer: Peer, frame: Frame) -> None:
        action = (frame.get("action") or {}).get("type")
        invocation_id = frame.get("invocation_id")
        deliver = None
        if action != "void" and invocation_id is not None:
            deliver = partial(answer, peer, invocation_id, frame["function_id"])
        if action == "enqueue":
            if deliver is not None:
                message = "no queue worker is connected"
                deliver({"error": {"code": "enqueue_error", "message": message}})
            return
        self._route(peer, frame, deliver)

    def _route(
        self, caller: Peer | None, frame: Frame, deliver: Callable[[Frame], None] | None
    ) -> None:
        """Find who serves the call and hand it over, or answer it at once."""
        function_id = frame["function_id"]
        data = frame["data"]
        if caller is not None and isinstance(data, dict):
            data = {**data, "_caller_worker_id": caller.worker_id}
        try:
            namespace = frame.get("namespace") or DEFAULT_NAMESPACE
            if not namespace.strip() or frame.get("namespace") == "":
                raise BusError("INVALID_NAMESPACE", "namespace is blank")
            own = self._own(namespace, function_id)
            if own is not None:
                result = builtins.served(own, caller, data)
                if deliver is not None:
                    deliver({"result": result})
                return
            function = self.functions.get((namespace, function_id))
            if function is None:
                raise BusError("function_not_found", self._not_found(namespace, function_id))
        except BusError as error:
            if deliver is not None:
                deliver({"error": {"code": error.code, "message": error.message}})
            return
        self._hand_over(caller, function, {**frame, "data": data}, deliver)

    def _own(self, namespace: str, function_id: str) -> Callable[[Peer | None, Frame], Any] | None:
        if namespace != DEFAULT_NAMESPACE:
            return None
        if function_id in builtins.FUNCTIONS:
            return partial(builtins.FUNCTIONS[function_id], self)
        stored = self.store.functions().get(function_id) if self.state_enabled else None
        return None if stored is None else lambda caller, data: stored(data)

    def _not_found(self, namespace: str, function_id: str) -> str:
        if not self.profile.namespaces:
            return f"function {function_id!r} not found"
        elsewhere = sorted(ns for ns, each in self.functions if each == function_id)
        hint = f"; it exists in: {', '.join(elsewhere)}" if elsewhere else ""
        return f"function {function_id!r} not found in namespace {namespace!r}{hint}"

    def _hand_over(
        self,
        caller: Peer | None,
        function: Function,
        frame: Frame,
        deliver: Callable[[Frame], None] | None,
    ) -> None:
        # Always set towards the executor, also for void calls (engine protocol 2.6).
        invocation_id = frame.get("invocation_id") or str(uuid.uuid4())
        self.pending[invocation_id] = Pending(function.id, function.owner, deliver)
        out: Frame = {
            "type": "invokefunction",
            "invocation_id": invocation_id,
            "function_id": function.id,
            "data": frame["data"],
        }
        for key in ("traceparent", "baggage", "metadata"):
            if frame.get(key) is not None:
                out[key] = frame[key]
        if self.profile.observe and caller is not None:
            asserted = frame.get("caller")
            out["caller"] = {
                **(asserted if isinstance(asserted, dict) else {}),
                "worker_id": caller.worker_id,
                "worker_name": caller.name,
            }
        function.owner.send(out)

    def _result(self, peer: Peer, frame: Frame) -> None:
        pending = self.pending.get(frame["invocation_id"])
        if pending is None or pending.executor is not peer:
            return
        del self.pending[frame["invocation_id"]]
        if pending.deliver is not None:
            keys = ("result", "error", "traceparent", "baggage")
            pending.deliver({k: frame[k] for k in keys if frame.get(k) is not None})

    # --- what the engine fires itself -----------------------------------------------------------

    def poll_functions(self) -> None:
        """Fire ``engine::functions-available`` if the set changed; called every few seconds."""
        with self.changed:
            if not self._functions_dirty:
                return
            self._functions_dirty = False
            rows = builtins.functions_list(self, None, {})["functions"]
            self._fire(FUNCTIONS_AVAILABLE, {"event": "functions_changed", "functions": rows})

    def _fire_workers(self, event: str, peer: Peer) -> None:
        self._fire(WORKERS_AVAILABLE, {"event": event, "worker_id": peer.worker_id})

    def _fire(self, trigger_type: str, data: Frame) -> None:
        for trigger in self.triggers.fired_by_engine(trigger_type):
            frame: Frame = {"function_id": trigger.function_id, "data": data}
            if trigger.metadata is not None:
                frame["metadata"] = trigger.metadata
            if trigger.namespace is not None:
                frame["namespace"] = trigger.namespace
            self._route(None, frame, None)
