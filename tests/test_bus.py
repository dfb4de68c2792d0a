"""The engine client against an engine that says, and leaves unsaid, what each test needs."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bus_peers import (
    TIMEOUT,
    Peer,
    Run,
    Server,
    certificate,
    descriptors,
    eventually,
    server_context,
)

from provider_llamacpp.bus import conversation, session
from provider_llamacpp.bus import engine as bus
from provider_llamacpp.bus.delays import Delays
from provider_llamacpp.bus.engine import Engine, Function, Invocation
from provider_llamacpp.bus.frames import FRAGMENT, MAX_FRAME
from provider_llamacpp.calls import Call
from provider_llamacpp.errors import BusError, FatalError, Interrupted
from provider_llamacpp.local.engine import LoopbackEngine

GREETING = {"type": "workerregistered", "worker_id": "w-1", "reattach_token": "secret-1"}
MODERN = {**GREETING, "features": ["observe.v1", 5]}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


class Client:
    """An :class:`Engine` with quick retries, stopped at the end of the test."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.calls: list[Invocation] = []
        self.called = threading.Semaphore(0)

    def make(self, url: str, **options: Any) -> Engine:
        engine = Engine(
            url,
            name=options.pop("name", "provider-test"),
            version="1.2.3",
            description="a test",
            retry_first=options.pop("retry_first", 0.001),
            retry_limit=options.pop("retry_limit", 0.002),
            **options,
        )
        self.engines.append(engine)
        return engine

    def take(self, invocation: Invocation) -> None:
        self.calls.append(invocation)
        self.called.release()

    def next_call(self) -> Invocation:
        assert self.called.acquire(timeout=TIMEOUT)
        return self.calls.pop(0)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(session, "CLOSE_WAIT", 0.05)
    threads = set(threading.enumerate())
    client = Client()
    yield client
    for engine in client.engines:
        engine.stop()
    assert eventually(lambda: not set(threading.enumerate()) - threads)


def greet(server: Server, greeting: dict[str, Any] | None = None) -> Peer:
    """Accept a connection, greet it and read its replay."""
    peer = server.accept()
    peer.say(GREETING if greeting is None else greeting)
    while peer.message()["type"] != "invokefunction":
        pass
    return peer


def connected(server: Server, client: Client, **options: Any) -> tuple[Engine, Peer]:
    greeting = options.pop("greeting", GREETING)
    engine = client.make(server.url, **options)
    engine.register(Function("t::take", client.take))
    engine.start()
    peer = greet(server, greeting)
    assert engine.wait_connected(TIMEOUT)
    return engine, peer


def call(peer: Peer, function_id: str = "t::take", number: int = 1, **more: Any) -> str:
    invocation_id = f"00000000-0000-4000-8000-{number:012}"
    message = {"type": "invokefunction", "invocation_id": invocation_id, "data": {}}
    peer.say({**message, "function_id": function_id, **more})
    return invocation_id


def still_served(peer: Peer, client: Client) -> None:
    """The connection is alive: a call gets through and is answered."""
    call(peer, number=999)
    client.next_call().reply("yes")
    assert peer.message("invocationresult")["result"] == "yes"


# -- what a connection begins with ----------------------------------------------------------


def test_the_first_connection(server: Server, client: Client) -> None:
    engine = client.make(f"{server.url}/?token=in-the-query", token="bearer-token")
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}
    engine.register(Function("t::a", client.take, "does a", schema, None, {"internal": True}))
    engine.register(Function("t::b", client.take))
    trigger_id = engine.register_trigger("router::ready", "t::b", {})
    assert not engine.connected and engine.worker_id is None and engine.features is None
    engine.start()
    peer = server.accept()
    assert peer.path == "/?token=in-the-query"
    assert peer.header("Authorization") == "Bearer bearer-token"
    assert peer.header("Origin") is None
    assert peer.message() == {
        "type": "registerfunction",
        "id": "t::a",
        "description": "does a",
        "request_format": schema,
        "metadata": {"internal": True},
    }
    assert peer.message() == {"type": "registerfunction", "id": "t::b"}
    assert peer.message() == {
        "type": "registertrigger",
        "id": trigger_id,
        "trigger_type": "router::ready",
        "function_id": "t::b",
        "config": {},
    }
    card = peer.message()
    assert card["function_id"] == "engine::workers::register"
    assert card["action"] == {"type": "void"} and "invocation_id" not in card
    data = card["data"]
    assert (data["name"], data["version"], data["runtime"]) == ("provider-test", "1.2.3", "python")
    assert isinstance(data["pid"], int) and data["os"] and data["description"] == "a test"
    assert "namespace" not in data and "namespace" not in card and "features" not in data
    assert not engine.wait_connected(0)
    peer.say(MODERN)
    assert engine.wait_connected(TIMEOUT) and engine.connected
    assert engine.worker_id == "w-1" and engine.features == ["observe.v1"]
    assert engine.connections == 1 and engine.last_error is None


def test_namespaces_are_named_where_they_matter(server: Server, client: Client) -> None:
    engine = client.make(server.url, namespace="lab", isolation="box")
    engine.register_trigger("router::ready", "t::a", None)
    engine.start()
    peer = server.accept()
    trigger = peer.message()
    assert trigger["namespace"] == "lab" and trigger["config"] is None
    assert "trigger_namespace" not in trigger
    card = peer.message()
    assert card["data"]["namespace"] == "lab" and card["data"]["isolation"] == "box"
    assert "namespace" not in card
    for function_id, sent in [
        ("router::models::list", True),
        ("state::get", False),
        ("engine::channels::create", False),
        ("configuration::get", False),
    ]:
        engine.invoke_void(function_id, {}, namespace="lab")
        assert peer.message().get("namespace") == ("lab" if sent else None)


def test_registrations_while_connected(server: Server, client: Client) -> None:
    engine, peer = connected(server, client)
    engine.register(Function("t::late", client.take))
    assert peer.message() == {"type": "registerfunction", "id": "t::late"}
    trigger_id = engine.register_trigger("cron", "t::late", {"x": 1})
    assert peer.message()["id"] == trigger_id
    engine.unregister("t::late")
    engine.unregister("t::never")
    assert peer.message() == {"type": "unregisterfunction", "id": "t::late"}
    call(peer, "t::late")
    assert peer.message()["error"]["code"] == "function_not_found"


def test_what_is_not_json_cannot_be_registered(server: Server, client: Client) -> None:
    engine = client.make(server.url)
    with pytest.raises(ValueError):
        engine.register(Function("t::a", client.take, metadata={"x": float("nan")}))
    with pytest.raises(ValueError):
        engine.register_trigger("cron", "t::a", object())
    engine.unregister("t::a")


def test_a_silent_engine_counts_as_connected(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "GREETING_GRACE", 0.01)
    engine = client.make(server.url)
    engine.register_trigger("cron", "t::a", {})
    engine.start()
    peer = server.accept()
    assert engine.wait_connected(TIMEOUT)
    assert engine.worker_id is None
    peer.close()


def test_any_message_counts_as_a_greeting(server: Server, client: Client) -> None:
    engine = client.make(server.url)
    engine.start()
    server.accept().say({"type": "ping"})
    assert engine.wait_connected(TIMEOUT)


# -- connections end and begin again --------------------------------------------------------


@pytest.mark.parametrize("how", ["close 1000", "close 1001", "close without code", "eof", "reset"])
def test_a_lost_connection_is_made_again(server: Server, client: Client, how: str) -> None:
    reconnects: list[bool] = []
    engine = client.make(server.url)
    engine.on_connect.append(reconnects.append)
    for name in ("t::take", "t::other"):
        engine.register(Function(name, client.take))
    trigger_id = engine.register_trigger("router::ready", "t::take", {})
    engine.start()
    first = greet(server)
    assert engine.wait_connected(TIMEOUT)
    call(first)
    late = client.next_call()
    if how == "eof":
        first.close()
    elif how == "reset":
        first.reset()
    else:
        codes = {"close 1000": b"\x03\xe8", "close 1001": b"\x03\xe9", "close without code": b""}
        first.send(8, codes[how])
        assert first.frame() == (True, 8, codes[how])
    second = server.accept()
    assert second.message() == {
        "type": "reattach",
        "previous_worker_id": "w-1",
        "reattach_token": "secret-1",
    }
    assert [second.message()["id"] for _ in range(3)] == ["t::take", "t::other", trigger_id]
    assert second.message()["function_id"] == "engine::workers::register"
    second.say({"type": "workerregistered", "worker_id": "w-2", "reattach_token": "secret-2"})
    late.reply("too late")
    call(second, number=2)
    client.next_call().reply("in time")
    assert second.message()["result"] == "in time"
    assert engine.connections == 2 and engine.worker_id == "w-2"
    assert engine.last_error is not None
    assert reconnects == [False, True]
    second.close()
    third = server.accept()
    assert third.message()["reattach_token"] == "secret-2"


def test_no_token_no_reattach(server: Server, client: Client) -> None:
    """Engines before 0.21.8 hand out none."""
    _, peer = connected(
        server, client, greeting={"type": "workerregistered", "worker_id": "w", "features": None}
    )
    peer.close()
    assert server.accept().message()["type"] == "registerfunction"


def test_a_pair_is_kept_until_there_is_a_new_one(server: Server, client: Client) -> None:
    _, peer = connected(server, client)
    peer.close()
    server.accept().close()
    assert server.accept().message()["reattach_token"] == "secret-1"


def test_failed_attempts_are_repeated(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    engine = client.make(server.url + "/?token=t0ken")
    engine.start()
    server.accept(503)
    server.accept(404)
    server.accept(302, extra="Location: ws://127.0.0.1:1/\r\n")
    server.accept_raw().close()
    greet(server)
    assert engine.wait_connected(TIMEOUT)
    assert engine.last_error is not None and engine.connections == 1
    assert "HTTP status 503" in caplog.text and "t0ken" not in caplog.text


def test_nobody_listens(client: Client) -> None:
    with Server() as server:
        url = server.url
    engine = client.make(url)
    engine.start()
    assert eventually(lambda: engine.last_error is not None)
    assert "refused" in (engine.last_error or "")
    assert not engine.wait_connected(0.01)
    with pytest.raises(BusError, match="disconnected"):
        engine.invoke("t::x", {})
    with pytest.raises(BusError, match="disconnected"):
        engine.invoke_void("t::x", {})


def test_an_unforeseen_fault_does_not_end_the_client(
    server: Server,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = client.make(server.url)
    monkeypatch.setattr(engine, "_replay", lambda: 1 / 0)
    engine.start()
    server.accept()
    assert eventually(lambda: engine.last_error == "internal fault: ZeroDivisionError")
    monkeypatch.undo()
    assert eventually(lambda: engine.connected or not server.accept().say(GREETING))
    assert "unforeseen" in caplog.text


def test_a_failing_callback_does_no_harm(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    engine = client.make(server.url)
    engine.on_connect.append(lambda reconnected: 1 // 0)
    engine.register(Function("t::take", client.take))
    engine.start()
    peer = greet(server)
    still_served(peer, client)
    assert "callback" in caplog.text


def test_broken_framing_ends_the_connection_politely(server: Server, client: Client) -> None:
    _, peer = connected(server, client)
    peer.sock.sendall(b"\xc1\x00")
    assert peer.frame() == (True, 8, b"\x03\xea")
    assert server.accept().message()["type"] == "reattach"


def test_an_engine_that_falls_silent_is_left(server: Server, client: Client) -> None:
    engine, peer = connected(server, client, ping_interval=0.02, silence_limit=0.15)
    assert peer.frame() == (True, 9, b"")
    second = server.accept()
    assert "nothing was heard" in (engine.last_error or "")
    second.say(GREETING)
    second.message("reattach")


def test_pongs_are_signs_of_life(server: Server, client: Client) -> None:
    engine, peer = connected(server, client, ping_interval=0.02, silence_limit=1.0)
    for _ in range(60):
        assert peer.frame() == (True, 9, b"")
        peer.send(10)
    assert engine.connected and engine.connections == 1


def test_the_clock_is_injected(server: Server, client: Client) -> None:
    now = [1000.0]
    engine, peer = connected(server, client, clock=lambda: now[0])
    assert engine._talk is not None
    waker = engine._talk.session._waker
    now[0] += 21.0
    waker.wake()
    assert peer.frame() == (True, 9, b"")
    now[0] += 61.0
    waker.wake()
    again = server.accept()
    assert again.message()["type"] == "reattach"
    assert "nothing was heard for 60 s" in (engine.last_error or "")
    again.close()


def test_a_pause_of_our_own_is_not_the_engines_silence(server: Server, client: Client) -> None:
    """A process that was stopped, or had no turn, has asked nothing and looked at nothing."""
    now = [1000.0]
    engine, peer = connected(server, client, clock=lambda: now[0])
    assert engine._talk is not None
    waker = engine._talk.session._waker
    now[0] += 5000.0
    waker.wake()
    assert peer.frame() == (True, 9, b"")
    now[0] += 39.0
    waker.wake()
    assert peer.frame() == (True, 9, b"")
    still_served(peer, client)
    assert engine.connections == 1
    # From here on it is asked, looked at in time, and says nothing.
    now[0] += 21.0
    waker.wake()
    assert peer.frame() == (True, 9, b"")
    now[0] += 40.0
    waker.wake()
    again = server.accept()
    assert "nothing was heard for 60 s" in (engine.last_error or "")
    again.close()


def test_silence_is_what_a_look_at_the_socket_finds() -> None:
    """Not what the clock says: an answer may lie there since long."""
    now = [0.0]
    link: Any = SimpleNamespace(send_some=len, receive=lambda size: None)
    waker: Any = SimpleNamespace()
    talk = session.Session(link, waker, clock=lambda: now[0])
    now[0] = 20.0
    talk._keep_alive(lambda _: None)
    assert talk._asked == 20.0
    now[0] = 90.0
    talk._keep_alive(lambda _: None)
    assert talk._end is None
    talk._looked = 90.0
    talk._keep_alive(lambda _: None)
    assert talk._end == "nothing was heard for 60 s"


def test_delays_grow_to_their_limit() -> None:
    delays = Delays(1.0, 30.0)
    for expected in (1, 2, 4, 8, 16, 30, 30):
        assert expected * 0.7 <= delays.next() <= expected * 1.3
    delays.reset()
    assert delays.next() <= 1.3
    delays.exhaust()
    assert delays.next() >= 21
    delays.reset()
    assert delays.next() <= 1.3


def test_backoff_is_imported_by_who_has_to_wait() -> None:
    code = (
        "import sys, provider_llamacpp.bus.engine as bus\n"
        "assert 'backoff' not in sys.modules and 'asyncio' not in sys.modules\n"
        "from provider_llamacpp.bus.delays import Delays\n"
        "Delays(1, 2).next()\n"
        "assert 'backoff' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


# -- refusals -------------------------------------------------------------------------------


def test_a_taken_name_is_fatal(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    engine, peer = connected(server, client)
    peer.say(
        {
            "type": "registrationrejected",
            "code": "WORKER_NAMESPACE_CONFLICT",
            "namespace": "default",
            "worker_name": "provider-test",
            "owner_worker_id": "w-9",
        }
    )
    assert engine.wait_ended(TIMEOUT)
    assert isinstance(engine.fatal, FatalError)
    assert "'provider-test' is taken" in str(engine.fatal) and "w-9" in str(engine.fatal)
    assert not engine.connected and not engine.wait_connected(TIMEOUT)
    assert engine.last_error == str(engine.fatal)
    server._listener.settimeout(0)
    with pytest.raises(BlockingIOError):
        server.accept_raw()
    assert [r.levelname for r in caplog.records if "is taken" in r.message] == ["ERROR"]


def test_an_unknown_rejection_is_fatal(server: Server, client: Client) -> None:
    engine, peer = connected(server, client)
    peer.say({"type": "registrationrejected", "code": "NEW\nCODE", "owner_worker_id": ""})
    assert engine.wait_ended(TIMEOUT)
    assert r"NEW\nCODE" in str(engine.fatal)


def test_a_taken_function_leaves_the_others(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    engine, peer = connected(server, client)
    engine.register(Function("t::other", client.take))
    peer.message("registerfunction")
    peer.say(
        {
            "type": "registrationrejected",
            "code": "FUNCTION_NAMESPACE_CONFLICT",
            "namespace": "default",
            "function_id": "t::other",
            "owner_worker_id": "w-9",
        }
    )
    still_served(peer, client)
    assert engine.fatal is None and "'t::other' is taken" in caplog.text
    peer.close()
    again = server.accept()
    again.message("reattach")
    assert [again.message()["id"] for _ in range(2)] == ["t::take", "t::other"]


def test_a_refused_login_is_tried_again_slowly(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    engine = client.make(server.url, retry_first=0.0001, retry_limit=0.2)
    engine.start()
    peer = server.accept()
    peer.say({"type": "error", "error": {"code": "AUTH_ERROR", "message": "no such token"}})
    peer.send(8)
    greet(server)
    assert engine.wait_connected(TIMEOUT)
    assert engine.connections == 1
    assert "no such token" in (engine.last_error or "")
    assert re.search(r"next try in 0\.[123] s", caplog.text)


def test_an_error_before_the_greeting_is_a_refusal_and_later_a_remark(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    engine = client.make(server.url)
    engine.register(Function("t::take", client.take))
    engine.start()
    server.accept().say({"type": "error"})
    peer = greet(server)
    assert "UNKNOWN" in (engine.last_error or "")
    peer.say({"type": "error", "error": {"code": "ODD", "message": "m"}})
    still_served(peer, client)
    assert "the engine reports 'ODD: m'" in caplog.text


def test_a_trigger_without_provider_is_tried_again(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines up to 0.21.7 refuse it and forget it."""
    engine, peer = connected(server, client)
    trigger_id = engine.register_trigger("router::ready", "t::take", {})
    other_id = engine.register_trigger("cron", "t::take", {})
    first = peer.message("registertrigger")
    assert peer.message("registertrigger")["id"] == other_id
    refusal = {
        "type": "triggerregistrationresult",
        "id": trigger_id,
        "trigger_type": "router::ready",
        "function_id": "t::take",
        "error": {"code": "trigger_type_not_found", "message": "not yet"},
    }
    for _ in range(3):
        peer.say(refusal)
        assert peer.message() == first
    peer.say({**refusal, "error": None})
    peer.say({**refusal, "id": "unknown"})
    peer.say({**refusal, "id": 5})
    peer.say({**refusal, "error": {"code": "FORBIDDEN", "message": "never"}})
    still_served(peer, client)
    assert "FORBIDDEN: never" in caplog.text


def test_a_trigger_waits_beside_the_greeting(server: Server, client: Client) -> None:
    engine = client.make(server.url, retry_first=0.05, retry_limit=0.05)
    trigger_id = engine.register_trigger("cron", "t::a", {})
    engine.start()
    peer = server.accept()
    first = peer.message()
    error = {"code": "trigger_type_not_found", "message": ""}
    peer.say({"type": "triggerregistrationresult", "id": trigger_id, "error": error})
    peer.message("invokefunction")
    assert peer.message() == first


# -- being called ---------------------------------------------------------------------------


def test_a_call_and_its_answer(server: Server, client: Client) -> None:
    _, peer = connected(server, client)
    more = {"metadata": {"m": 1}, "traceparent": "00-a-b-01", "baggage": "k=v"}
    data = {"x": [1, "ü"], "_caller_worker_id": "w-5"}
    invocation_id = call(peer, data=data, activation={"new": "field"}, **more)
    invocation = client.next_call()
    assert invocation.id == invocation_id and invocation.function_id == "t::take"
    assert invocation.data == {"x": [1, "ü"]} and invocation.metadata == {"m": 1}
    assert (invocation.traceparent, invocation.baggage) == ("00-a-b-01", "k=v")
    invocation.reply({"ok": True, "text": "half \ud83d"})
    invocation.reply("twice")
    invocation.fail("x", "thrice")
    assert peer.message() == {
        "type": "invocationresult",
        "invocation_id": invocation_id,
        "function_id": "t::take",
        "result": {"ok": True, "text": "half \ufffd"},
        "traceparent": "00-a-b-01",
        "baggage": "k=v",
    }
    still_served(peer, client)


def test_a_failure_and_other_shapes(server: Server, client: Client) -> None:
    _, peer = connected(server, client)
    invocation_id = call(peer, data=None, traceparent=None, baggage=5, metadata=None)
    invocation = client.next_call()
    assert invocation.data is None and invocation.baggage is None
    invocation.fail("provider/invalid_request", "missing field")
    assert peer.message() == {
        "type": "invocationresult",
        "invocation_id": invocation_id,
        "function_id": "t::take",
        "error": {"code": "provider/invalid_request", "message": "missing field"},
    }
    call(peer, number=2)
    client.next_call().reply(None)
    assert peer.message()["result"] is None
    peer.say({"type": "invokefunction", "function_id": "t::take"})
    invocation = client.next_call()
    assert invocation.id is None and invocation.data is None
    invocation.reply("to nobody")
    still_served(peer, client)


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}, b"bytes"])
def test_a_result_that_is_not_json(server: Server, client: Client, value: object) -> None:
    _, peer = connected(server, client)
    call(peer)
    client.next_call().reply({"value": value})
    assert peer.message()["error"]["code"] == "serialization_error"


def test_functions_that_fail_or_are_not_there(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    engine, peer = connected(server, client)

    def refuse(invocation: Invocation) -> None:
        raise BusError("provider/no", "not today")

    def crash(invocation: Invocation) -> None:
        raise KeyError("x")

    def answer_and_crash(invocation: Invocation) -> None:
        invocation.reply(1)
        raise KeyError("y")

    for handler in (refuse, crash, answer_and_crash):
        engine.register(Function(f"t::{handler.__name__}", handler))
        peer.message("registerfunction")
    expected: dict[str, Any] = {
        "t::nowhere": "function_not_found",
        "t::refuse": "provider/no",
        "t::crash": "invocation_failed",
    }
    for function_id, code in expected.items():
        call(peer, function_id)
        answer = peer.message()
        assert answer["error"]["code"] == code and answer["function_id"] == function_id
    call(peer, "t::answer_and_crash")
    assert peer.message()["result"] == 1
    still_served(peer, client)
    assert "handler of t::crash failed" in caplog.text


def test_bad_messages_are_dropped_one_by_one(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    _, peer = connected(server, client)
    deep = b"[" * 200_000
    for bad in (
        *(b"nonsense", b"  \n", b"[1]", b"5", b"null", b"{}", b'{"type":5}', b"\xff\xfe", deep),
        *(b'{"type":"new.thing"}', b'{"type":"invokefunction"}', b'{"type":"invocationresult"}'),
        *(b'{"type":"ping","x":NaN}', b'{"type":"triggerregistrationresult","error":5}'),
        b'{"type":"invocationresult","invocation_id":"00000000-0000-4000-8000-000000000000"}',
    ):
        peer.send(1, bad)
        peer.send(2, bad)
    still_served(peer, client)
    assert "that is not JSON was dropped" in caplog.text


def test_binary_and_fragments_and_pings(server: Server, client: Client) -> None:
    _, peer = connected(server, client)
    peer.send(2, b'{"type":"ping"}')
    assert peer.message() == {"type": "pong"}
    peer.send(1, b'{"type":', final=False)
    peer.send(9, b"in between")
    assert peer.frame() == (True, 10, b"in between")
    peer.send(0, b'"ping"}')
    assert peer.message() == {"type": "pong"}
    peer.say({"type": "pong"})
    peer.send(10)
    still_served(peer, client)


def test_an_oversized_message_is_skipped(
    server: Server,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(session, "ENVELOPE", 1000 - session.MAX_MESSAGE)
    _, peer = connected(server, client)
    peer.send(1, b"[" + b" " * 1000 + b"]")
    still_served(peer, client)
    assert "was skipped" in caplog.text


# -- calling --------------------------------------------------------------------------------


def answer(peer: Peer, **outcome: Any) -> dict[str, Any]:
    message = peer.message("invokefunction")
    reply = {"type": "invocationresult", "function_id": message["function_id"], **outcome}
    peer.say({**reply, "invocation_id": message["invocation_id"]})
    return message


def test_invoke(server: Server, client: Client) -> None:
    engine, peer = connected(server, client)
    calling = Run(
        lambda: engine.invoke(
            "router::x", {"a": "\udc00"}, namespace="lab", traceparent="00-t", baggage="b=1"
        )
    )
    message = answer(peer, result={"r": 1}, error=None)
    assert calling.result() == {"r": 1}
    assert len(message.pop("invocation_id")) == 36
    assert message == {
        "type": "invokefunction",
        "function_id": "router::x",
        "data": {"a": "\ufffd"},
        "namespace": "lab",
        "traceparent": "00-t",
        "baggage": "b=1",
    }
    calling = Run(lambda: engine.invoke("state::get", None, namespace="lab"))
    message = answer(peer)
    assert calling.result() is None
    assert message["data"] is None and "namespace" not in message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"code": "router/no", "message": "m", "stacktrace": "s"}, "router/no"),
        ({"code": 5, "message": "m"}, "UNKNOWN"),
        ("text", "UNKNOWN"),
        ({}, "UNKNOWN"),
    ],
)
def test_remote_errors(server: Server, client: Client, error: object, code: str) -> None:
    engine, peer = connected(server, client)
    calling = Run(lambda: engine.invoke("t::x", {}))
    answer(peer, error=error, result="ignored")
    with pytest.raises(BusError) as caught:
        calling.result()
    assert caught.value.code == code


def test_results_in_any_order(server: Server, client: Client) -> None:
    engine, peer = connected(server, client)
    calls = [Run(lambda number=number: engine.invoke("t::x", number)) for number in range(20)]
    messages = [peer.message("invokefunction") for _ in calls]
    for message in reversed(messages):
        reply = {"type": "invocationresult", "function_id": "t::x", "result": message["data"] * 2}
        peer.say({**reply, "invocation_id": message["invocation_id"]})
    assert [each.result() for each in calls] == [number * 2 for number in range(20)]


def test_a_call_without_answer(server: Server, client: Client) -> None:
    engine, peer = connected(server, client)
    with pytest.raises(BusError, match=r"TIMEOUT: t::x did not answer within 0\.01 s"):
        engine.invoke("t::x", {}, timeout=0.01)
    answer(peer, result="late")
    still_served(peer, client)


def test_a_call_ends_with_its_connection(server: Server, client: Client) -> None:
    engine, peer = connected(server, client)
    calls = [Run(lambda: engine.invoke("t::x", {}, timeout=600)) for _ in range(3)]
    for _ in calls:
        peer.message("invokefunction")
    peer.reset()
    for each in calls:
        with pytest.raises(BusError, match="disconnected"):
            each.result()


def test_a_call_ends_with_an_abort(server: Server, client: Client) -> None:
    engine, peer = connected(server, client)
    one = Call(1, "stream", key="k", model="m")
    calling = Run(lambda: engine.invoke("t::x", {}, timeout=600, call=one))
    peer.message("invokefunction")
    one.abort("abort")
    with pytest.raises(Interrupted):
        calling.result()
    with pytest.raises(Interrupted):
        engine.invoke("t::x", {}, call=one)
    other = Call(2, "stream", key="k", model="m")
    calling = Run(lambda: engine.invoke("t::x", {}, call=other))
    answer(peer, result=1)
    assert calling.result() == 1
    with pytest.raises(BusError, match="TIMEOUT"):
        engine.invoke("t::x", {}, call=other, timeout=0.01)


def test_no_call_waits_on_the_engines_thread(server: Server, client: Client) -> None:
    engine, peer = connected(server, client)
    engine.register(Function("t::loop", lambda call: call.reply(engine.invoke("t::x", {}))))
    peer.message("registerfunction")
    call(peer, "t::loop")
    assert "would block" in peer.message()["error"]["message"]


def test_void_calls(server: Server, client: Client) -> None:
    engine, peer = connected(server, client)
    engine.invoke_void("t::x", [1])
    assert peer.message() == {
        "type": "invokefunction",
        "function_id": "t::x",
        "data": [1],
        "action": {"type": "void"},
    }


def test_payloads_that_are_not_json(server: Server, client: Client) -> None:
    engine, _ = connected(server, client)
    for invoke in (engine.invoke, engine.invoke_void):
        with pytest.raises(BusError) as caught:
            invoke("t::x", {"x": float("inf")})
        assert caught.value.code == "serialization_error"


# -- large messages -------------------------------------------------------------------------


def test_16_mib_are_the_limit_of_an_older_engine(server: Server, client: Client) -> None:
    engine, peer = connected(server, client)
    for invoke in (engine.invoke, engine.invoke_void):
        with pytest.raises(BusError) as caught:
            invoke("t::x", "x" * MAX_FRAME)
        assert caught.value.code == "payload_too_large"
    call(peer)
    Run(lambda: client.next_call().reply("x" * MAX_FRAME))
    assert peer.message()["error"]["code"] == "payload_too_large"
    call(peer)
    Run(lambda: client.next_call().reply("x" * (MAX_FRAME - 200)))
    assert len(peer.message()["result"]) == MAX_FRAME - 200


def test_a_newer_engine_gets_fragments(server: Server, client: Client) -> None:
    engine, peer = connected(server, client, greeting=MODERN)
    call(peer)
    text = "a" + "ü" * (MAX_FRAME // 2 + 1000)
    invocation = client.next_call()
    replying = Run(lambda: invocation.reply(text))
    parts = [peer.frame()]
    calling = Run(lambda: engine.invoke_void("t::x", {}))  # must not come in between
    while not parts[-1][0]:
        parts.append(peer.frame())
    assert [opcode for _, opcode, _ in parts] == [1] + [0] * (len(parts) - 1)
    assert all(len(payload) <= FRAGMENT and payload.decode() for _, _, payload in parts)
    assert json.loads(b"".join(payload for _, _, payload in parts))["result"] == text
    replying.result()
    calling.result()
    assert peer.message()["function_id"] == "t::x"


def test_64_mib_are_the_limit_of_all(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "MAX_MESSAGE", 1000)
    engine, peer = connected(server, client, greeting=MODERN)
    with pytest.raises(BusError, match="payload_too_large"):
        engine.invoke("t::x", "x" * 1000)
    call(peer)
    client.next_call().reply("x" * 1000)
    assert peer.message()["error"]["code"] == "payload_too_large"


# -- an engine that stops reading -----------------------------------------------------------


BIG = "x" * 400_000


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that takes in little, and a queue that holds little."""
    monkeypatch.setattr(session, "QUEUE_LIMIT", 100_000)
    with Server(narrow=True) as server:
        yield server


def clog(engine: Engine, client: Client, peer: Peer) -> Run:
    """Fill all buffers and the queue; the run is a sender that has to wait."""
    talk, link = engine._talk, engine._link
    assert talk is not None and link is not None and link._sock is not None
    link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    call(peer, number=7)
    client.next_call().reply(BIG)
    assert talk.session._queued > 100_000
    call(peer, number=8)
    waiting = client.next_call()
    return Run(lambda: waiting.reply(BIG))


def test_an_abort_is_carried_out_while_the_engine_reads_nothing(
    narrow: Server, client: Client
) -> None:
    now = [0.0]
    engine, peer = connected(narrow, client, clock=lambda: now[0])
    aborted: list[Any] = []

    def abort(invocation: Invocation) -> None:
        aborted.append(invocation.data["request_id"])
        invocation.reply({"aborted": True})
        client.called.release()

    engine.register(Function("t::abort", abort))
    peer.message("registerfunction")
    waiting = clog(engine, client, peer)
    for number in range(50):
        call(peer, "t::abort", data={"request_id": number})
        peer.send(9, b"alive?")
        assert client.called.acquire(timeout=TIMEOUT)
    assert aborted == list(range(50))
    assert waiting.running
    # When nothing was read for the send timeout, the connection is given up, and all go on.
    talk = engine._talk
    assert talk is not None
    now[0] += 59.0
    peer.say({"type": "ping"})  # it is alive, and still reads nothing
    assert eventually(lambda: talk.session._heard == 59.0)
    now[0] += 1.5
    peer.say({"type": "ping"})
    second = greet(narrow)
    waiting.result()
    assert engine.last_error == "the engine read nothing for 60 s"
    still_served(second, client)
    second.close()


def test_waiting_for_room_ends(
    narrow: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, peer = connected(narrow, client)
    waiting = clog(engine, client, peer)
    with pytest.raises(BusError, match="TIMEOUT"):
        engine.invoke("t::x", BIG, timeout=0.05)
    one = Call(1, "stream", key="k", model="m")
    calling = Run(lambda: engine.invoke("t::x", BIG, timeout=600, call=one))
    assert eventually(lambda: len(one._wakers) == 1)
    one.abort("abort")
    with pytest.raises(Interrupted):
        calling.result()
    monkeypatch.setattr(bus, "POST_WAIT", 0.01)
    with pytest.raises(BusError, match="does not read"):
        engine.invoke_void("t::x", BIG)
    assert waiting.running
    # What waited is sent, in order, once the engine reads again.
    assert [len(peer.message("invocationresult")["result"]) for _ in range(2)] == [400_000] * 2
    waiting.result()
    still_served(peer, client)


def test_an_answer_without_room_ends_the_connection(
    narrow: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, peer = connected(narrow, client)
    monkeypatch.setattr(conversation, "POST_WAIT", 0.01)
    clog(engine, client, peer).result()
    greet(narrow)
    assert "made no room" in (engine.last_error or "")


def test_registrations_without_room_wait_for_the_next_connection(
    narrow: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, peer = connected(narrow, client)
    waiting = clog(engine, client, peer)
    monkeypatch.setattr(conversation, "POST_WAIT", 0.01)
    engine.register(Function("t::late", client.take, BIG))
    peer.close()
    again = narrow.accept()
    again.message("reattach")
    assert [again.message()["id"] for _ in range(2)] == ["t::take", "t::late"]
    waiting.result()


def test_an_engine_that_asks_without_end_and_reads_nothing(
    narrow: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "OWN_LIMIT", 2000)
    engine, peer = connected(narrow, client)
    waiting = clog(engine, client, peer)

    def flood() -> None:
        while True:
            peer.send(9, b"x" * 100)

    flooding = Run(flood)
    greet(narrow)
    assert engine.last_error == "the engine sends but reads nothing"
    with pytest.raises(OSError):
        flooding.result()
    waiting.result()


def test_no_ping_behind_a_queue(narrow: Server, client: Client) -> None:
    now = [0.0]
    engine, peer = connected(narrow, client, clock=lambda: now[0])
    waiting = clog(engine, client, peer)
    now[0] += 21.0
    peer.say({"type": "ping"})
    sizes = []
    while len(sizes) < 2:
        _, opcode, payload = peer.frame()
        assert opcode == 1
        if json.loads(payload)["type"] == "invocationresult":
            sizes.append(len(payload))
    waiting.result()
    peer.close()


# -- start and stop -------------------------------------------------------------------------


def test_stop_sends_what_is_queued_and_a_close(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CLOSE_WAIT", TIMEOUT)
    before = descriptors()
    engine, peer = connected(server, client)
    call(peer, number=1)
    call(peer, number=2)
    replies = client.next_call(), client.next_call()
    replies[0].reply("x" * 10_000_000)
    stopping = Run(engine.stop)
    assert len(peer.message()["result"]) == 10_000_000
    assert peer.frame() == (True, 8, b"\x03\xe8")
    replies[1].reply("dropped")
    with pytest.raises(BusError, match="disconnected"):
        engine.invoke("t::x", {})
    peer.send(8, b"\x03\xe8")
    stopping.result()
    assert engine.wait_ended(0) and not engine.connected and engine.fatal is None
    engine.stop()
    with pytest.raises(RuntimeError):
        engine.start()
    server.drop()
    assert descriptors() == before


def test_stop_does_not_wait_for_an_engine_that_does_not_answer(
    narrow: Server, client: Client
) -> None:
    engine, peer = connected(narrow, client)
    waiting = clog(engine, client, peer)
    Run(engine.stop).result()
    waiting.result()
    assert engine.wait_ended(0)


def test_stop_before_start(client: Client, server: Server) -> None:
    engine = client.make(server.url)
    engine.stop()
    with pytest.raises(RuntimeError):
        engine.start()
    assert not engine.wait_ended(0)


def test_start_twice(client: Client, server: Server) -> None:
    engine = client.make(server.url)
    engine.start()
    with pytest.raises(RuntimeError):
        engine.start()


def test_stop_while_connecting(client: Client, server: Server) -> None:
    engine = client.make(server.url, connect_timeout=600)
    engine.start()
    server.accept_raw()
    Run(engine.stop).result()
    assert engine.wait_ended(0)


def test_stop_between_two_attempts(client: Client) -> None:
    with Server() as server:
        url = server.url
    engine = client.make(url, retry_first=600, retry_limit=600)
    engine.start()
    assert eventually(lambda: engine.last_error is not None)
    Run(engine.stop).result()
    assert engine.wait_ended(0)


def test_stop_before_the_thread_dials(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = client.make(server.url)
    monkeypatch.setattr(bus, "Link", lambda *args, **more: engine._stop.set() or _Nothing())
    engine.start()
    assert engine.wait_ended(TIMEOUT)


class _Nothing:
    def close(self) -> None:
        pass


def test_stop_just_before_the_session_is_seen(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = client.make(server.url)
    replay = engine._replay

    def stop_first() -> list[dict[str, Any]]:
        engine._stop.set()
        return replay()

    monkeypatch.setattr(engine, "_replay", stop_first)
    engine.start()
    peer = server.accept()
    assert peer.message("invokefunction") and peer.ended() is True
    assert engine.wait_ended(TIMEOUT)


def test_stop_on_the_engines_own_thread(client: Client, server: Server) -> None:
    engine, peer = connected(server, client)
    engine.register(Function("t::stop", lambda invocation: engine.stop()))
    peer.message("registerfunction")
    call(peer, "t::stop")
    assert peer.frame()[1] == 8
    assert engine.wait_ended(TIMEOUT)


def test_a_stop_that_takes_too_long_says_so(
    client: Client, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    engine, peer = connected(server, client)
    held, let_go = threading.Event(), threading.Event()

    def hold(invocation: Invocation) -> None:
        held.set()
        let_go.wait(TIMEOUT)

    engine.register(Function("t::hold", hold))
    peer.message("registerfunction")
    call(peer, "t::hold")
    assert held.wait(TIMEOUT)
    engine.stop(0.01)
    assert "did not close within 0.01 s" in caplog.text
    let_go.set()
    assert engine.wait_ended(TIMEOUT)


def test_nothing_secret_is_logged(
    client: Client, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = client.make(server.url + "/?token=qu3ry", token="be4rer")
    engine.register(Function("t::take", client.take))
    engine.start()
    server.accept(401)
    peer = greet(server)
    assert engine.wait_connected(TIMEOUT)
    peer.send(1, b'{"type":"workerregistered","reattach_token":"secret-1"')
    still_served(peer, client)
    peer.close()
    greet(server)
    engine.stop()
    for secret in ("qu3ry", "be4rer", "secret-1"):
        assert secret not in caplog.text and secret not in (engine.last_error or "")


# -- TLS, and the other engine --------------------------------------------------------------


def test_over_tls(client: Client, tmp_path: Path) -> None:
    cert, both = certificate(tmp_path)
    with Server(context=server_context(both, client_ca=cert)) as server:
        engine, peer = connected(
            server, client, greeting=MODERN, ca_file=str(cert), client_cert=str(both)
        )
        call(peer)
        client.next_call().reply("x" * 3_000_000)
        assert len(peer.message()["result"]) == 3_000_000
        calling = Run(lambda: engine.invoke("t::x", "y" * 3_000_000))
        answer(peer, result="z" * 3_000_000)
        assert calling.result() == "z" * 3_000_000
        peer.close()
        assert server.accept().message()["type"] == "reattach"
        engine.stop()


@pytest.mark.parametrize("profile", ["0.21", "0.22", "0.23", "0.25"])
def test_on_the_loopback_engine(client: Client, profile: Any) -> None:
    with LoopbackEngine(profile=profile) as loopback:
        worker = client.make(loopback.url, name="worker")
        caller = client.make(loopback.url, name="caller")
        worker.register(Function("t::echo", lambda call: call.reply(call.data)))
        worker.register_trigger("nobody::provides", "t::echo", {})
        ready = threading.Event()
        worker.on_connect.append(lambda reconnected: ready.set() if reconnected else None)
        worker.start()
        caller.start()
        assert worker.wait_connected(TIMEOUT) and caller.wait_connected(TIMEOUT)

        def echoes() -> bool:
            try:
                return bool(caller.invoke("t::echo", {"x": "ü"}) == {"x": "ü"})
            except BusError as error:
                assert error.code in ("function_not_found", "disconnected", "invocation_stopped")
                return False

        assert eventually(echoes)
        stored = caller.invoke("state::set", {"scope": "s", "key": "k", "value": [1]})
        assert stored["new_value"] == [1]
        assert caller.invoke("state::get", {"scope": "s", "key": "none"}) is None
        assert (caller.features is not None) == (profile == "0.25")
        loopback.stop()
        assert eventually(lambda: not worker.connected and not caller.connected)
        loopback.start()
        assert ready.wait(TIMEOUT)
        assert eventually(echoes)
        worker.stop()
        caller.stop()
        assert not loopback.dropped


def test_a_taken_name_on_the_loopback_engine(client: Client) -> None:
    with LoopbackEngine(profile="0.23") as loopback:
        first = client.make(loopback.url, name="same")
        first.start()
        assert loopback.wait_until(lambda: [p.name for p in loopback.connections] == ["same"])
        assert first.wait_connected(TIMEOUT)
        second = client.make(loopback.url, name="same")
        second.start()
        assert second.wait_ended(TIMEOUT)
        assert second.fatal is not None and first.connected
