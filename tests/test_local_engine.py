"""The loopback engine against the official client, and byte by byte against a raw one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
import threading
import time
import uuid
import warnings

import pytest
import websocket
from iii import InitOptions, InvocationError, TriggerAction, register_worker
from iii.errors import RegistrationRejectedError
from iii.helpers import create_channel
from iii.triggers import TriggerHandler
from iii_helpers.observability import ReconnectionConfig
from sdk import end

from provider_llamacpp.errors import BusError
from provider_llamacpp.local import serving
from provider_llamacpp.local.channels import ChannelTable
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.profiles import PROFILES
from provider_llamacpp.local.sockets import OUTBOX, Outbox

NEWER = ("0.23", "0.25")
OLDER = ("0.21", "0.22")
ALL = (*OLDER, *NEWER)
MIB = 1024**2


@pytest.fixture
def made():
    """Close what a test made, the last first."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def start(made):
    """Start an engine; at the end it must have understood every frame unless told otherwise."""

    def begin(*, may_drop=False, **options):
        engine = made.enter_context(LoopbackEngine(**options))
        if not may_drop:
            made.callback(lambda: no_drops(engine))
        return engine

    def no_drops(engine):
        assert list(engine.dropped) == []

    return begin


@pytest.fixture(params=ALL)
def profile(request):
    return request.param


# --- the official client -----------------------------------------------------------------------


@pytest.fixture
def sdk(made):
    """Make workers with the official client, unchanged."""

    def make(engine, name, **options):
        quick = ReconnectionConfig(initial_delay_ms=20, max_delay_ms=100)
        client = register_worker(
            engine.url,
            InitOptions(
                worker_name=name, otel={"enabled": False}, reconnection_config=quick, **options
            ),
        )
        made.callback(end, client)
        return client

    return make


def call(client, function_id, payload, **more):
    return client.trigger({"function_id": function_id, "payload": payload, **more})


def test_sdk_calls_and_answers(start, sdk, profile):
    engine = start(profile=profile)
    worker, caller = sdk(engine, "worker"), sdk(engine, "caller")
    seen = []

    def echo(data, metadata=None):
        seen.append(metadata)
        return {"got": data}

    worker.register_function("test::echo", echo, description="Echo", metadata={"internal": True})
    worker.register_function("test::nothing", lambda data: None)
    assert engine.wait_for_function("test::echo")
    assert engine.wait_for_function("test::nothing")

    answer = call(caller, "test::echo", {"x": "ä\u2028😀"}, metadata={"m": 1})
    assert answer["got"]["x"] == "ä\u2028😀"
    assert answer["got"]["_caller_worker_id"] == caller.worker_id
    assert seen == [{"m": 1}]
    assert call(caller, "test::echo", [1, 2]) == {"got": [1, 2]}
    assert call(caller, "test::nothing", {}) is None


def test_sdk_sees_failures(start, sdk, profile):
    engine = start(profile=profile)
    worker, caller = sdk(engine, "worker"), sdk(engine, "caller")

    def fail(data):
        raise ValueError("the reason")

    worker.register_function("test::fail", fail)
    assert engine.wait_for_function("test::fail")
    with pytest.raises(InvocationError) as failed:
        call(caller, "test::fail", {})
    assert failed.value.code == "invocation_failed"
    assert "the reason" in failed.value.message
    with pytest.raises(InvocationError) as missing:
        call(caller, "test::none", {})
    assert missing.value.code == "function_not_found"
    with pytest.raises(InvocationError) as queued:
        call(caller, "test::fail", {}, action=TriggerAction.Enqueue(queue="jobs"))
    assert queued.value.code == "enqueue_error"


def test_sdk_void_calls(start, sdk, profile):
    engine = start(profile=profile)
    worker, caller = sdk(engine, "worker"), sdk(engine, "caller")
    got = threading.Event()
    worker.register_function("test::note", lambda data: got.set())
    assert engine.wait_for_function("test::note")
    assert call(caller, "test::note", {}, action=TriggerAction.Void()) is None
    assert call(caller, "test::none", {}, action=TriggerAction.Void()) is None
    assert got.wait(10)


def test_sdk_channel_both_ways(start, sdk, profile):
    engine = start(profile=profile)
    caller = sdk(engine, "caller")
    channel = create_channel(caller, 4)
    texts = []
    channel.reader.on_message(texts.append)

    async def write():
        for number in range(50):
            await channel.writer.send_message_async(str(number))
        await channel.writer.write(b"x" * 200_000)
        await channel.writer.close_async()

    async def both():
        data, _ = await asyncio.gather(channel.reader.read_all(), write())
        return data

    assert asyncio.run(both()) == b"x" * 200_000
    assert texts == [str(number) for number in range(50)]


def test_sdk_handler_gets_a_writer(start, sdk, profile):
    engine = start(profile=profile)
    worker, caller = sdk(engine, "worker"), sdk(engine, "caller")

    async def stream(data):
        await data["writer"].send_message_async("one")
        await data["writer"].close_async()
        return {"ok": True}

    worker.register_function("test::stream", stream)
    assert engine.wait_for_function("test::stream")
    channel = create_channel(caller)
    texts = []
    channel.reader.on_message(texts.append)

    async def both():
        request = {
            "function_id": "test::stream",
            "payload": {"writer": channel.writer_ref.model_dump()},
        }
        return await asyncio.gather(caller.trigger_async(request), channel.reader.read_all())

    assert asyncio.run(both()) == [{"ok": True}, b""]
    assert texts == ["one"]


def test_sdk_comes_back_after_a_cut(start, sdk, profile):
    engine = start(profile=profile)
    worker, caller = sdk(engine, "worker"), sdk(engine, "caller")
    worker.register_function("test::echo", lambda data: "here")
    assert engine.wait_for_function("test::echo")
    # The client's own "worker_id" may still be that of no connection.
    (first,) = (peer for peer in engine.connections if peer.name == "worker")
    assert engine.drop_worker("worker") == 1
    # The functions of the old connection go with it: only those of the new one may count.
    assert engine.wait_until(
        lambda: [p is not first for p in engine.connections if p.name == "worker"] == [True]
    )
    assert engine.wait_for_function("test::echo")
    assert call(caller, "test::echo", {}) == "here"


@pytest.mark.parametrize("code", [1000, 1001, None])
def test_sdk_comes_back_after_a_restart(start, sdk, profile, code):
    engine = start(profile=profile)
    worker = sdk(engine, "worker")
    worker.register_function("test::echo", lambda data: "here")
    assert engine.wait_for_function("test::echo")
    port = engine.port
    engine.stop(code)
    assert engine.connections == []
    assert engine.functions() == {}
    engine.start()
    assert engine.port == port
    assert engine.wait_for_function("test::echo")
    assert engine.call("test::echo", {}) == "here"


def test_sdk_state(start, sdk, profile):
    engine = start(profile=profile)
    client = sdk(engine, "client")
    item = {"scope": "s", "key": "k"}
    assert call(client, "state::get", item) is None
    # The old value is null, so it travels inside the object.
    assert call(client, "state::set", {**item, "value": 1}) == {"old_value": None, "new_value": 1}
    assert call(client, "state::set", {**item, "data": [2]}) == {"old_value": 1, "new_value": [2]}
    assert call(client, "state::get", item) == [2]
    assert engine.state_enabled
    engine.state_enabled = False
    with pytest.raises(InvocationError) as off:
        call(client, "state::get", item)
    assert off.value.code == "function_not_found"


class Bindings(TriggerHandler):
    def __init__(self):
        self.bound, self.gone = [], []
        self.changed = threading.Condition()

    async def register_trigger(self, config):
        if config.config:
            raise ValueError("no configuration, please")
        with self.changed:
            self.bound.append(config)
            self.changed.notify_all()

    async def unregister_trigger(self, config):
        with self.changed:
            self.gone.append(config.id)
            self.changed.notify_all()

    def wait(self, condition):
        with self.changed:
            return self.changed.wait_for(condition, 10)


def provide_type(client, type_id):
    bindings = Bindings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        client.register_trigger_type({"id": type_id, "description": "a test"}, bindings)
    return bindings


def bind(client, type_id, function_id, config=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return client.register_trigger(
            {"type": type_id, "function_id": function_id, "config": config or {}}
        )


def test_sdk_trigger_types(start, sdk, profile, caplog):
    engine = start(profile=profile)
    provider, user = sdk(engine, "provider"), sdk(engine, "user")
    bindings = provide_type(provider, "test::ready")
    fired = threading.Event()
    user.register_function("test::on_ready", lambda data: fired.set())
    assert engine.wait_for_function("test::on_ready")
    call(provider, "engine::functions::list", {})  # the type is registered by now
    trigger = bind(user, "test::ready", "test::on_ready")
    assert bindings.wait(lambda: bindings.bound)
    assert bindings.bound[0].function_id == "test::on_ready"
    call(provider, bindings.bound[0].function_id, {}, action=TriggerAction.Void())
    assert fired.wait(10)

    with caplog.at_level(logging.ERROR):
        bind(user, "test::ready", "test::on_ready", {"x": 1})
        assert engine.wait_until(lambda: len(engine.triggers()) == 1)
    trigger.unregister()
    assert bindings.wait(lambda: bindings.gone)


@pytest.mark.parametrize("profile", ["0.22", *NEWER])
def test_sdk_trigger_waits_for_its_type(start, sdk, profile):
    engine = start(profile=profile)
    user = sdk(engine, "user")
    bind(user, "test::ready", "test::on_ready")
    assert engine.wait_until(lambda: list(engine.triggers().values()) == [False])
    first = sdk(engine, "provider")
    assert provide_type(first, "test::ready").wait(lambda: True)
    assert engine.wait_until(lambda: list(engine.triggers().values()) == [True])
    end(first)
    assert engine.wait_until(lambda: list(engine.triggers().values()) == [False])
    bindings = provide_type(sdk(engine, "second provider"), "test::ready")
    assert bindings.wait(lambda: bindings.bound)


def test_sdk_trigger_of_an_unknown_type_is_refused_before_parking(start, sdk, caplog):
    engine = start(profile="0.21")
    user = sdk(engine, "user")
    with caplog.at_level(logging.ERROR, "iii.iii"):
        bind(user, "test::ready", "test::on_ready")
        call(user, "engine::functions::list", {})
    assert "trigger_type_not_found" in caplog.text or "no trigger type" in caplog.text
    assert engine.triggers() == {}


@pytest.mark.parametrize("profile", NEWER)
def test_sdk_name_taken(start, sdk, profile):
    engine = start(profile=profile)
    sdk(engine, "worker")
    assert engine.wait_until(lambda: [p.name for p in engine.connections] == ["worker"])
    second = sdk(engine, "worker")

    def refused():
        try:
            call(second, "engine::workers::list", {}, timeout_ms=500)
        except RegistrationRejectedError as error:
            return error.code
        except InvocationError:
            pass
        return None

    deadline = time.monotonic() + 10
    while (code := refused()) is None and time.monotonic() < deadline:
        pass
    assert code == "WORKER_NAMESPACE_CONFLICT"
    assert engine.wait_until(lambda: len(engine.connections) == 1)


@pytest.mark.parametrize("profile", OLDER)
def test_sdk_names_may_repeat_in_old_engines(start, sdk, profile):
    engine = start(profile=profile)
    sdk(engine, "worker"), sdk(engine, "worker")
    assert engine.wait_until(lambda: [p.name for p in engine.connections] == ["worker"] * 2)


@pytest.mark.parametrize("profile", NEWER)
def test_sdk_namespaces(start, sdk, profile):
    engine = start(profile=profile)
    worker = sdk(engine, "worker", namespace="team")
    caller = sdk(engine, "caller")
    worker.register_function("test::echo", lambda data: "here")
    assert engine.wait_for_function("test::echo", namespace="team")
    assert call(caller, "test::echo", {}, namespace="team") == "here"
    with pytest.raises(InvocationError) as elsewhere:
        call(caller, "test::echo", {})
    assert elsewhere.value.code == "function_not_found"
    assert "team" in elsewhere.value.message


def test_sdk_local_dispatch_is_confirmed(start, sdk):
    frames = []
    engine = start(profile="0.25", on_frame=lambda peer, frame: frames.append(frame))
    worker = sdk(engine, "worker")
    worker.register_function("test::echo", lambda data: "here")
    assert engine.wait_for_function("test::echo")
    call(worker, "engine::functions::list", {})
    assert call(worker, "test::echo", {}) == "here"
    assert "test::echo" not in [frame.get("function_id") for frame in frames]


# --- a raw client ------------------------------------------------------------------------------


class Raw:
    """The protocol without any help."""

    def __init__(self, engine, *, path="/", greeted=True, **options):
        self.ws = websocket.create_connection(engine.url + path, timeout=10, **options)
        if greeted:
            self.greeting = self.receive()
            self.id = self.greeting["worker_id"]

    def send(self, **frame):
        self.ws.send(json.dumps(frame))

    def receive(self):
        opcode, data = self.ws.recv_data()
        assert opcode == websocket.ABNF.OPCODE_TEXT, (opcode, data)
        return json.loads(data)

    def until_pong(self):
        """Everything that came before the answer to a ping: what was sent is handled by now."""
        self.send(type="ping")
        got = []
        while (frame := self.receive()) != {"type": "pong"}:
            got.append(frame)
        return got

    def declare(self, name, **more):
        self.send(
            type="invokefunction",
            function_id="engine::workers::register",
            data={"name": name, "pid": 1, **more},
            action={"type": "void"},
        )
        return self

    def call(self, function_id, data, **more):
        """Call and wait; the answer without what only echoes the question."""
        invocation_id = str(uuid.uuid4())
        self.send(
            type="invokefunction",
            invocation_id=invocation_id,
            function_id=function_id,
            data=data,
            **more,
        )
        while True:
            frame = self.receive()
            if frame.get("invocation_id") == invocation_id:
                assert (frame["type"], frame["function_id"]) == ("invocationresult", function_id)
                return {k: v for k, v in frame.items() if k in ("result", "error")}

    def closed(self):
        """Wait for the Close; its code, 1005 for none, or None if the connection was cut."""
        try:
            while True:
                opcode, data = self.ws.recv_data()
                if opcode == websocket.ABNF.OPCODE_CLOSE:
                    return struct.unpack("!H", data[:2])[0] if data else 1005
        except (OSError, websocket.WebSocketConnectionClosedException):
            return None

    def cut(self):
        self.ws.sock.shutdown(socket.SHUT_RDWR)
        self.ws.sock.close()


@pytest.fixture
def raw(made):
    def make(engine, name=None, **options):
        client = Raw(engine, **options)
        made.callback(client.ws.shutdown)
        if name is not None:
            client.declare(name).until_pong()
        return client

    return make


def test_greeting(start, raw, profile):
    greeting = raw(start(profile=profile)).greeting
    assert greeting.pop("type") == "workerregistered"
    uuid.UUID(greeting.pop("worker_id"))
    assert (greeting.pop("reattach_token", None) is not None) == PROFILES[profile].reattach
    features = ["observe.v1", "local-dispatch.v1"]
    assert greeting == ({"features": features} if profile == "0.25" else {})


INVOKE = {"type": "invokefunction", "function_id": "engine::workers::list", "data": {}}


@pytest.mark.parametrize(
    "frame",
    [
        "no json",
        '{"type":"ping"',
        "[]",
        '"ping"',
        "{}",
        '{"type":7}',
        '{"type":"nonsense"}',
        '{"type":"registerfunction"}',
        '{"type":"registerfunction","id":7}',
        '{"type":"registertrigger","id":"a","trigger_type":"b","function_id":"c"}',
        '{"type":"invokefunction","function_id":"a"}',
        '{"type":"invokefunction","data":{}}',
        json.dumps({**INVOKE, "invocation_id": "no uuid"}),
        json.dumps({**INVOKE, "invocation_id": 7}),
        json.dumps({**INVOKE, "action": "void"}),
        json.dumps({**INVOKE, "action": {"type": "enqueue"}}),
        json.dumps({**INVOKE, "namespace": 7}),
        json.dumps({**INVOKE, "data": float("nan")}),
        json.dumps({**INVOKE, "data": "\ud800"}),
        '{"type":"invokefunction","function_id":"a","data":' + "[" * 100_000 + "]" * 100_000 + "}",
        json.dumps(
            {"type": "invocationresult", "invocation_id": "0e1f2a3b-4c5d-4e6f-8a9b-0c1d2e3f4a5b"}
        ),
        json.dumps(
            {
                "type": "invocationresult",
                "invocation_id": "0e1f2a3b-4c5d-4e6f-8a9b-0c1d2e3f4a5b",
                "function_id": "a",
                "error": {"code": "x"},
            }
        ),
    ],
)
def test_bad_frames_are_dropped_in_silence(start, raw, frame):
    engine = start(may_drop=True)
    client = raw(engine)
    client.ws.send(frame)
    assert client.until_pong() == []
    assert len(engine.dropped) == 1


@pytest.mark.parametrize(
    "message",
    [("  \n", 1), (b"OTLP\x00\x01", 2), (b"MTRC", 2), (b"LOGS{", 2), (b'{"type":"pong"}', 2)],
)
def test_other_messages_are_taken(start, raw, message):
    data, opcode = message
    client = raw(start())
    client.ws.send(data, opcode=opcode)
    assert client.until_pong() == []


def test_binary_that_is_no_text_is_dropped(start, raw):
    engine = start(may_drop=True)
    client = raw(engine)
    client.ws.send(b"\xff\xfe", opcode=2)
    assert client.until_pong() == []
    assert len(engine.dropped) == 1


@pytest.mark.parametrize("kind", ["observe", "unregistertriggertype"])
def test_frames_of_0_25(start, raw, profile, kind):
    engine = start(profile=profile, may_drop=True)
    client = raw(engine)
    client.send(type=kind, id="a", source={}, target={})
    answers = client.until_pong()
    assert len(engine.dropped) == (0 if profile == "0.25" else 1)
    if kind == "observe" and profile == "0.25":
        assert [a["error"]["code"] for a in answers] == ["UNSUPPORTED"]
    else:
        assert answers == []


def test_pings_are_answered(start, raw):
    client = raw(start())
    client.ws.ping("x")
    opcode, data = client.ws.recv_data(control_frame=True)
    assert (opcode, data) == (websocket.ABNF.OPCODE_PONG, b"x")
    assert client.until_pong() == []


def test_invocation_on_the_wire(start, raw, profile):
    engine = start(profile=profile)
    worker, caller = raw(engine, "worker"), raw(engine, "caller")
    worker.send(type="registerfunction", id="f")
    assert worker.until_pong() == []
    invocation_id = str(uuid.uuid4())
    caller.send(
        type="invokefunction",
        invocation_id=invocation_id,
        function_id="f",
        data={"a": 1, "_caller_worker_id": "forged"},
        traceparent="00-1",
        baggage="b=1",
        metadata={"m": 1},
        namespace="default",
        action=None,
        caller={"function_id": "mine", "worker_id": "forged"},
    )
    arrived = worker.receive()
    stamp = arrived.pop("caller", None)
    if profile == "0.25":
        assert stamp == {"function_id": "mine", "worker_id": caller.id, "worker_name": "caller"}
    else:
        assert stamp is None
    assert arrived == {
        "type": "invokefunction",
        "invocation_id": invocation_id,
        "function_id": "f",
        "data": {"a": 1, "_caller_worker_id": caller.id},
        "traceparent": "00-1",
        "baggage": "b=1",
        "metadata": {"m": 1},
    }
    answer = {
        "type": "invocationresult",
        "invocation_id": invocation_id,
        "function_id": "f",
        "traceparent": "00-2",
    }
    worker.send(**answer, result={"ok": True})
    worker.send(**answer, result={"twice": True})
    assert caller.receive() == {**answer, "result": {"ok": True}}
    worker.until_pong()
    assert caller.until_pong() == []


def test_void_calls_have_an_id_and_no_answer(start, raw, profile):
    engine = start(profile=profile)
    worker, caller = raw(engine, "worker"), raw(engine, "caller")
    worker.send(type="registerfunction", id="f")
    worker.until_pong()
    caller.send(
        type="invokefunction",
        invocation_id=str(uuid.uuid4()),
        function_id="f",
        data=None,
        action={"type": "void"},
    )
    caller.send(type="invokefunction", function_id="none", data=1, action={"type": "void"})
    caller.send(
        type="invokefunction",
        function_id="f",
        data=1,
        action={"type": "enqueue", "queue": "q"},
    )
    arrived = worker.receive()
    uuid.UUID(arrived["invocation_id"])
    assert arrived["data"] is None
    worker.send(
        type="invocationresult", invocation_id=arrived["invocation_id"], function_id="f", result=1
    )
    worker.until_pong()
    assert caller.until_pong() == []


def test_null_results_and_foreign_results(start, raw):
    engine = start()
    worker, caller, stranger = (raw(engine, n) for n in ("worker", "caller", "stranger"))
    worker.send(type="registerfunction", id="f")
    worker.until_pong()
    invocation_id = str(uuid.uuid4())
    caller.send(type="invokefunction", invocation_id=invocation_id, function_id="f", data={})
    worker.receive()
    answer = {"type": "invocationresult", "invocation_id": invocation_id, "function_id": "f"}
    stranger.send(**answer, result="forged")
    stranger.until_pong()
    worker.send(**answer, result=None)
    assert caller.receive() == answer


def test_executor_leaves(start, raw, profile):
    engine = start(profile=profile)
    worker, caller = raw(engine, "worker"), raw(engine, "caller")
    worker.send(type="registerfunction", id="f")
    worker.until_pong()
    invocation_id = str(uuid.uuid4())
    caller.send(type="invokefunction", invocation_id=invocation_id, function_id="f", data={})
    caller.send(type="invokefunction", function_id="f", data={}, action={"type": "void"})
    worker.receive(), worker.receive()
    worker.cut()
    assert caller.receive()["error"]["code"] == "invocation_stopped"
    assert caller.call("f", {})["error"]["code"] == "function_not_found"


def test_caller_leaves(start, raw):
    engine = start()
    worker, caller = raw(engine, "worker"), raw(engine, "caller")
    worker.send(type="registerfunction", id="f")
    worker.until_pong()
    caller.send(type="invokefunction", invocation_id=str(uuid.uuid4()), function_id="f", data={})
    arrived = worker.receive()
    caller.cut()
    assert engine.wait_until(lambda: len(engine.connections) == 1)
    worker.send(
        type="invocationresult", invocation_id=arrived["invocation_id"], function_id="f", result=1
    )
    assert worker.until_pong() == []


def test_unregister(start, raw):
    engine = start()
    worker, other = raw(engine, "worker"), raw(engine, "other")
    worker.send(type="registerfunction", id="f")
    worker.until_pong()
    other.send(type="unregisterfunction", id="f")
    other.until_pong()
    assert "f" in engine.functions()
    worker.send(type="unregisterfunction", id="f")
    worker.until_pong()
    assert engine.functions() == {}


def test_calls_from_the_engine(start, raw):
    engine = start()
    worker = raw(engine, "worker")
    worker.send(type="registerfunction", id="f")
    worker.until_pong()
    with pytest.raises(BusError) as late:
        engine.call("f", {}, timeout=0.05)
    assert late.value.code == "TIMEOUT"
    assert worker.receive()["data"] == {}
    with pytest.raises(BusError) as missing:
        engine.call("none", {})
    assert missing.value.code == "function_not_found"
    with pytest.raises(BusError) as elsewhere:
        engine.call("f", {}, namespace="team")
    assert elsewhere.value.code == "function_not_found"
    with pytest.raises(BusError) as nobody:
        engine.call("engine::workers::register", {})
    assert nobody.value.code == "INVALID_ARGUMENTS"
    assert not engine.wait_for_function("none", timeout=0.01)


# --- namespaces and conflicts ------------------------------------------------------------------


@pytest.mark.parametrize("profile", NEWER)
def test_registrations_wait_for_the_namespace(start, raw, profile):
    engine = start(profile=profile)
    worker = raw(engine)
    worker.send(type="registerfunction", id="f")
    worker.send(type="registerfunction", id="g")
    worker.send(type="unregisterfunction", id="g")
    worker.until_pong()
    assert engine.functions() == {}
    worker.declare("worker", namespace="team").until_pong()
    assert set(engine.functions("team")) == {"f"}
    assert engine.functions() == {}


@pytest.mark.parametrize("profile", NEWER)
def test_the_grace_ends(start, raw, profile, caplog):
    engine = start(profile=profile, namespace_grace=0.05)
    worker = raw(engine)
    worker.send(type="registerfunction", id="f")
    assert engine.wait_for_function("f")
    with caplog.at_level(logging.WARNING):
        worker.declare("late", namespace="team").until_pong()
    assert "comes too late" in caplog.text
    assert engine.connections[0].namespace == "default"


@pytest.mark.parametrize("profile", OLDER)
def test_old_engines_know_no_namespaces(start, raw, profile):
    engine = start(profile=profile)
    worker = raw(engine)
    worker.send(type="registerfunction", id="f")
    worker.until_pong()
    assert set(engine.functions()) == {"f"}
    worker.declare("worker", namespace="team").until_pong()
    assert engine.connections[0].namespace == "default"
    rows = worker.call("engine::functions::list", {}, namespace="elsewhere")["result"]
    assert rows == {"functions": [{"function_id": "f", "worker_name": "worker"}]}


@pytest.mark.parametrize("namespace", ["", "  "])
@pytest.mark.parametrize("profile", NEWER)
def test_blank_namespaces(start, raw, profile, namespace):
    worker = raw(start(profile=profile))
    answer = worker.call("engine::workers::list", {}, namespace=namespace)
    assert answer["error"]["code"] == "INVALID_NAMESPACE"
    answer = worker.call("engine::workers::register", {"namespace": namespace})
    assert answer["error"]["code"] == "INVALID_NAMESPACE"
    worker.declare("worker").until_pong()
    for key in ("namespace", "trigger_namespace"):
        worker.send(
            type="registertrigger",
            id="t",
            trigger_type="x",
            function_id="f",
            config=None,
            **{key: namespace},
        )
        (refused,) = worker.until_pong()
        assert refused.pop("error")["code"] == "INVALID_NAMESPACE"
        assert refused == {
            "type": "triggerregistrationresult",
            "id": "t",
            "trigger_type": "x",
            "function_id": "f",
        }


@pytest.mark.parametrize("profile", NEWER)
def test_a_function_can_be_taken(start, raw, profile):
    engine = start(profile=profile)
    first, second = raw(engine, "first"), raw(engine, "second")
    first.send(type="registerfunction", id="f", description="one")
    first.send(type="registerfunction", id="f", description="two")
    assert first.until_pong() == []
    second.send(type="registerfunction", id="f")
    second.send(type="registerfunction", id="engine::f")
    second.send(type="registerfunction", id="state::get")
    second.send(type="registerfunction", id="g")
    rejected = {
        "type": "registrationrejected",
        "code": "FUNCTION_NAMESPACE_CONFLICT",
        "namespace": "default",
    }
    assert second.until_pong() == [
        {**rejected, "function_id": "f", "owner_worker_id": first.id},
        {**rejected, "function_id": "engine::f", "owner_worker_id": ""},
        {**rejected, "function_id": "state::get", "owner_worker_id": ""},
    ]
    assert engine.functions()["f"]["description"] == "two"
    assert set(engine.functions()) == {"f", "g"}


@pytest.mark.parametrize("profile", OLDER)
def test_the_last_registration_wins_in_old_engines(start, raw, profile):
    engine = start(profile=profile)
    first, second = raw(engine, "first"), raw(engine, "second")
    for client in (first, second):
        client.send(type="registerfunction", id="f", description=client.id)
        assert client.until_pong() == []
    assert engine.functions()["f"]["description"] == second.id
    first.cut()
    assert engine.wait_until(lambda: len(engine.connections) == 1)
    assert set(engine.functions()) == {"f"}


@pytest.mark.parametrize("profile", NEWER)
def test_a_name_can_be_taken(start, raw, profile):
    engine = start(profile=profile, namespace_grace=0.2)
    first, second = raw(engine, "name"), raw(engine)
    second.send(type="registerfunction", id="f")
    answer = second.call("engine::workers::register", {"name": "na\u202eme\n", "pid": 7})
    assert answer == {"result": {"success": False}} or "type" not in answer
    assert second.closed() == 1000
    assert engine.functions() == {}
    other = raw(engine)
    other.declare("name", namespace="team")
    assert other.until_pong() == []
    third = raw(engine).declare("name")
    assert third.receive() == {
        "type": "registrationrejected",
        "code": "WORKER_NAMESPACE_CONFLICT",
        "namespace": "default",
        "worker_name": "name",
        "owner_worker_id": first.id,
    }
    assert third.closed() == 1000


@pytest.mark.parametrize("profile", NEWER)
def test_a_rejected_worker_is_not_heard(start, raw, profile):
    engine = start(profile=profile, namespace_grace=0.01)
    raw(engine, "name")
    second = raw(engine).declare("name")
    second.send(type="registerfunction", id="f")
    assert second.receive()["type"] == "registrationrejected"
    assert second.closed() == 1000
    assert engine.functions() == {}


@pytest.mark.parametrize("profile", ["0.22", *NEWER])
def test_reattach(start, raw, profile):
    engine = start(profile=profile)
    old = raw(engine, "worker")
    old.send(type="registerfunction", id="f")
    old.until_pong()
    new = raw(engine)
    token = old.greeting["reattach_token"]
    new.send(type="reattach", previous_worker_id="unknown", reattach_token=token)
    new.send(type="reattach", previous_worker_id=old.id, reattach_token="wrong")
    new.send(type="reattach", previous_worker_id=old.id)
    new.send(type="reattach", previous_worker_id=new.id, reattach_token="own")
    new.until_pong()
    assert len(engine.connections) == 2
    new.send(type="reattach", previous_worker_id=old.id, reattach_token=token)
    new.send(type="registerfunction", id="f")
    new.declare("worker")
    assert new.until_pong() == []
    assert old.closed() is None
    assert [peer.worker_id for peer in engine.connections] == [new.id]
    assert set(engine.functions()) == {"f"}


def test_reattach_is_ignored_in_0_21(start, raw):
    engine = start(profile="0.21")
    old, new = raw(engine, "worker"), raw(engine)
    token = engine.connections[0].reattach_token
    new.send(type="reattach", previous_worker_id=old.id, reattach_token=token)
    assert new.until_pong() == []
    assert len(engine.connections) == 2


# --- triggers ----------------------------------------------------------------------------------


def trigger(trigger_id="t", **more):
    return {
        "type": "registertrigger",
        "id": trigger_id,
        "trigger_type": "x",
        "function_id": "f",
        "config": {},
        **more,
    }


def test_trigger_reaches_the_provider(start, raw, profile):
    engine = start(profile=profile)
    provider, user = raw(engine, "provider"), raw(engine, "user")
    provider.send(type="registertriggertype", id="x", description="d")
    provider.until_pong()
    user.send(**trigger(metadata={"m": 1}, namespace="default"))
    assert user.until_pong() == []
    expected = trigger(metadata={"m": 1})
    if profile in NEWER:
        expected["namespace"] = "default"
    assert provider.receive() == expected

    answer = {k: expected[k] for k in ("id", "trigger_type", "function_id")}
    answer["type"] = "triggerregistrationresult"
    provider.send(**answer)
    provider.until_pong()
    assert user.until_pong() == []
    assert engine.triggers() == {"t": True}
    error = {"code": "trigger_registration_failed", "message": "no"}
    provider.send(**answer, error=error)
    provider.until_pong()
    assert user.until_pong() == [{**answer, "error": error}]
    assert engine.triggers() == {}


def test_trigger_is_withdrawn(start, raw):
    engine = start()
    provider, user = raw(engine, "provider"), raw(engine, "user")
    provider.send(type="registertriggertype", id="x", description="d")
    provider.until_pong()
    user.send(**trigger("one"))
    user.send(**trigger("two"))
    user.until_pong()
    user.send(type="unregistertrigger", id="one", trigger_type="x")
    user.send(type="unregistertrigger", id="unknown")
    user.until_pong()
    user.cut()
    assert engine.wait_until(lambda: not engine.triggers())
    frames = provider.until_pong()
    assert [(f["type"], f["id"]) for f in frames] == [
        ("registertrigger", "one"),
        ("registertrigger", "two"),
        ("unregistertrigger", "one"),
        ("unregistertrigger", "two"),
    ]


def test_trigger_without_provider(start, raw, profile):
    engine = start(profile=profile)
    user = raw(engine, "user")
    user.send(**trigger())
    if profile == "0.21":
        (refused,) = user.until_pong()
        assert refused["error"]["code"] == "trigger_type_not_found"
        return
    assert user.until_pong() == []
    assert engine.triggers() == {"t": False}
    provider = raw(engine, "provider")
    provider.send(type="registertriggertype", id="x", description="d")
    assert provider.until_pong() == [trigger()]


def test_provider_of_a_type_leaves(start, raw, profile):
    engine = start(profile=profile)
    user = raw(engine, "user")
    for round_ in range(2):
        provider = raw(engine, f"provider {round_}")
        provider.send(type="registertriggertype", id="x", description="d")
        got = provider.until_pong()
        if round_ == 0 or profile == "0.21":
            user.send(**trigger())
        user.until_pong()
        assert engine.triggers() == {"t": True}
        assert got + provider.until_pong() == [trigger()]
        provider.cut()
        left = {} if profile == "0.21" else {"t": False}
        assert engine.wait_until(lambda left=left: engine.triggers() == left)


def test_a_type_is_withdrawn(start, raw):
    engine = start(profile="0.25")
    provider, user = raw(engine, "provider"), raw(engine, "user")
    provider.send(type="registertriggertype", id="x", description="d")
    provider.until_pong()
    user.send(**trigger())
    user.send(type="unregistertriggertype", id="x")
    user.until_pong()
    assert engine.triggers() == {"t": True}
    provider.send(type="unregistertriggertype", id="x")
    provider.until_pong()
    assert engine.triggers() == {"t": False}


@pytest.mark.parametrize("profile", NEWER)
def test_where_a_type_is_looked_for(start, raw, profile):
    engine = start(profile=profile)
    provider, user = raw(engine), raw(engine)
    provider.declare("provider", namespace="team")
    user.declare("user", namespace="team").until_pong()
    provider.send(type="registertriggertype", id="x", description="d")
    provider.send(type="registertriggertype", id="y", description="d", namespace="default")
    provider.until_pong()
    user.send(**trigger("own"))
    user.send(**trigger("strict", trigger_namespace="default"))
    user.send(**trigger("default", trigger_type="y"))
    user.send(**trigger("waiting", trigger_type="z"))
    user.until_pong()
    provider.send(type="registertriggertype", id="other", description="d")
    provider.until_pong()
    assert engine.triggers() == {
        "own": True,
        "strict": False,
        "default": True,
        "waiting": False,
    }


def test_durable_triggers(start, raw):
    engine = start()
    provider, user = raw(engine, "provider"), raw(engine, "user")
    provider.send(type="registertriggertype", id="x", description="d")
    assert provider.until_pong() == []
    made = user.call("engine::register_trigger", {"trigger_type": "x", "function_id": "f"})
    trigger_id = made["result"]["id"]
    user.cut()
    assert engine.wait_until(lambda: len(engine.connections) == 1)
    assert engine.triggers() == {trigger_id: True}
    assert provider.until_pong() == [trigger(trigger_id, config=None)]
    error = {"code": "trigger_registration_failed", "message": "no"}
    assert provider.call("engine::register_trigger", {})["error"]["code"] == (
        "deserialization_error"
    )
    removed = provider.call("engine::unregister_trigger", {"id": trigger_id})
    assert removed == {"result": {"removed": True}}
    removed = provider.call("engine::unregister_trigger", {"id": trigger_id})
    assert removed == {"result": {"removed": False}}
    made = provider.call("engine::register_trigger", {"trigger_type": "x", "function_id": "f"})
    provider.send(
        type="triggerregistrationresult",
        id=made["result"]["id"],
        trigger_type="x",
        function_id="f",
        error=error,
    )
    provider.until_pong()
    assert engine.triggers() == {}


def test_the_engines_own_triggers(start, raw, profile):
    engine = start(profile=profile, poll_interval=0.02)
    watcher = raw(engine, "watcher")
    watcher.send(type="registerfunction", id="on_functions")
    watcher.send(type="registerfunction", id="on_workers")
    watcher.send(
        **trigger(
            "a",
            trigger_type="engine::functions-available",
            function_id="on_functions",
            metadata={"m": 1},
            namespace="default",
        )
    )
    watcher.send(**trigger("b", trigger_type="engine::workers-available", function_id="on_workers"))
    watcher.until_pong()
    other = raw(engine, "other")
    other.send(type="registerfunction", id="new")
    other.until_pong()
    connected = disconnected = changed = None
    while not (connected and changed):
        frame = watcher.receive()
        if frame["function_id"] == "on_functions":
            ids = [row["function_id"] for row in frame["data"]["functions"]]
            changed = "new" in ids and frame
        else:
            connected = frame
    assert changed["data"]["event"] == "functions_changed"
    assert changed["metadata"] == {"m": 1}
    assert connected["data"] == {"event": "worker_connected", "worker_id": other.id}
    other.cut()
    while not disconnected:
        frame = watcher.receive()
        disconnected = frame["function_id"] == "on_workers" and frame
    assert disconnected["data"] == {"event": "worker_disconnected", "worker_id": other.id}


def test_nothing_changed_fires_nothing(start, raw):
    engine = start(poll_interval=0.01)
    watcher = raw(engine, "watcher")
    watcher.send(**trigger(trigger_type="engine::functions-available"))
    watcher.send(type="registerfunction", id="f")
    assert watcher.receive()["data"]["event"] == "functions_changed"
    watcher.ws.settimeout(0.2)
    with pytest.raises(websocket.WebSocketTimeoutException):
        watcher.receive()


# --- introspection and state -------------------------------------------------------------------


def test_functions_are_listed(start, raw):
    engine = start()
    worker = raw(engine, "worker")
    worker.send(type="registerfunction", id="a::one", description="One", request_format={"x": 1})
    worker.send(type="registerfunction", id="a::two", metadata={"internal": True})
    worker.send(type="registerfunction", id="b::one", metadata={"internal": "no"})
    raw(engine, "other").send(type="registerfunction", id="c::one")
    assert engine.wait_for_function("c::one")

    def ids(**query):
        rows = worker.call("engine::functions::list", query)["result"]["functions"]
        return [row["function_id"] for row in rows]

    assert ids() == ["a::one", "b::one", "c::one"]
    assert ids(prefix="a::", include_internal=True) == ["a::one", "a::two"]
    assert ids(search="one", worker="worker") == ["a::one", "b::one"]
    assert ids(workers=["other"]) == ["c::one"]
    assert "engine::channels::create" in ids(include_internal=True)
    assert "state::get" in ids(include_internal=True)
    engine.state_enabled = False
    assert "state::get" not in ids(include_internal=True)

    def info(**query):
        return worker.call("engine::functions::info", query)

    row = {
        "function_id": "a::one",
        "namespace": "default",
        "worker_name": "worker",
        "description": "One",
        "request_format": {"x": 1},
    }
    assert info(function_id="a::one") == {"result": row}
    assert info(function_ids=["a::one"]) == {"result": {"functions": [row]}}
    assert info(function_id="none")["error"]["code"] == "NOT_FOUND"
    assert info()["error"]["code"] == "INVALID_ARGUMENTS"
    assert info(function_ids=["a::one"] * 33)["error"]["code"] == "INVALID_ARGUMENTS"


def test_a_worker_without_a_name(start, raw):
    engine = start()
    client = raw(engine)
    assert client.call("engine::workers::register", {}) == {"result": {"success": True}}
    client.send(type="registerfunction", id="f")
    client.until_pong()
    assert engine.connections[0].name is None
    assert set(engine.functions()) == {"f"}


def test_workers_are_listed(start, raw):
    engine = start()
    worker = raw(engine, "worker")
    raw(engine)
    raw(engine).declare("hidden", pid=None).until_pong()
    assert worker.call("engine::workers::list", {})["result"]["workers"] == [
        {"id": worker.id, "name": "worker", "namespace": "default", "pid": 1}
    ]
    assert worker.call("engine::log::info", {"message": "x"}) == {}


def test_state_on_the_wire(start, raw):
    client = raw(start())
    item = {"scope": "s", "key": "k"}

    def value(function_id, **more):
        answer = client.call(function_id, {**item, **more})
        return answer.get("result", answer.get("error", {}).get("code"))

    def update(*ops):
        answer = value("state::update", ops=[*ops])
        return answer["new_value"] if isinstance(answer, dict) else answer

    assert client.call("state::get", item) == {}
    assert value("state::set") == "deserialization_error"
    assert value("state::set", value=None) == {"old_value": None, "new_value": None}
    assert value("state::get", key=7) == "deserialization_error"
    assert client.call("state::get", "text")["error"]["code"] == "deserialization_error"
    assert value("state::update", ops="no") == "deserialization_error"
    assert value("state::update", ops=[7]) == "deserialization_error"
    assert update({"type": "set", "path": "a", "value": 1}) == {"a": 1}
    assert update({"type": "increment", "path": "a", "by": 4}) == {"a": 5}
    assert update({"type": "decrement", "path": "a", "by": 2}) == {"a": 3}
    assert update({"type": "append", "path": "l", "value": 1}) == {"a": 3, "l": [1]}
    assert update({"type": "append", "path": "l", "value": 2}) == {"a": 3, "l": [1, 2]}
    assert update({"type": "merge", "path": "m", "value": {"x": 1}})["m"] == {"x": 1}
    assert update({"type": "merge", "path": "m", "value": {"y": 2}})["m"] == {"x": 1, "y": 2}
    assert set(update({"type": "remove", "path": "m"}, {"type": "remove", "path": "l"})) == {"a"}
    assert update({"type": "set", "value": 7}) == 7
    assert update({"type": "increment"}) == 8
    assert update({"type": "remove"}) is None
    assert update({"type": "fly"}) == "deserialization_error"
    assert update({"type": "set", "path": ["a", "b"]}) == "deserialization_error"
    value("state::set", value="v")
    assert value("state::list") == ["v"]
    assert value("state::list", scope="none") == []
    assert value("state::list_groups") == {"groups": ["s"]}
    assert value("state::delete") == "v"
    assert client.call("state::delete", item) == {}
    assert value("state::list_groups") == {"groups": []}


@pytest.mark.parametrize(
    "function_id, data",
    [
        ("engine::workers::register", {"namespace": 7}),
        ("engine::workers::register", {"features": 7}),
        ("engine::workers::register", {"features": [[]]}),
        ("engine::functions::list", {"workers": 7}),
        ("engine::functions::info", {"function_ids": [[]]}),
    ],
)
def test_odd_arguments(start, raw, function_id, data):
    client = raw(start())
    assert client.call(function_id, data)["error"]["code"] == "deserialization_error"
    assert client.until_pong() == []


def test_state_survives_a_restart(start, raw):
    engine = start()
    client = raw(engine)
    client.call("state::set", {"scope": "s", "key": "k", "value": [1]})
    engine.stop()
    engine.stop()
    engine.start().start()
    assert raw(engine).call("state::get", {"scope": "s", "key": "k"}) == {"result": [1]}


# --- channels ----------------------------------------------------------------------------------


def end_of(engine, ref, direction, made, **options):
    path = f"/ws/channels/{ref['channel_id']}?key={ref['access_key']}&dir={direction}"
    client = Raw(engine, path=path, greeted=False, **options)
    made.callback(client.ws.shutdown)
    return client


@pytest.fixture
def channel(start, made):
    """An engine, and the two ends of one of its channels, made when asked for."""

    class Ends:
        def __init__(self, size=None, **options):
            self.engine = start(**options)
            self.refs = self.engine.create_channel(size)

        def writer(self, **options):
            return end_of(self.engine, self.refs[0], "write", made, **options)

        def reader(self, **options):
            return end_of(self.engine, self.refs[1], "read", made, **options)

    return Ends


def test_channel_references(channel):
    writer, reader = channel().refs
    assert (writer.pop("direction"), reader.pop("direction")) == ("write", "read")
    assert writer == reader
    assert set(writer) == {"channel_id", "access_key"}


@pytest.mark.parametrize("size", [-1, "four", True, 1.5])
def test_channel_size_must_be_a_number(start, size):
    with pytest.raises(BusError) as bad:
        start().create_channel(size)
    assert bad.value.code == "deserialization_error"


@pytest.mark.parametrize("first", ["reader", "writer"])
def test_channel_relays_one_for_one(channel, first):
    ends = channel()
    opened = {first: getattr(ends, first)()}
    other = "writer" if first == "reader" else "reader"
    opened[other] = getattr(ends, other)()
    writer, reader = opened["writer"], opened["reader"]
    writer.ws.send("ä")
    writer.ws.send(b"\x00\xff", opcode=2)
    writer.ws.send("")
    for part, (opcode, fin) in zip(("a", "b", "c"), ((1, 0), (0, 0), (0, 1)), strict=True):
        writer.ws.send_frame(websocket.ABNF(fin=fin, opcode=opcode, mask_value=1, data=part))
    writer.ws.close(timeout=1)
    assert [reader.ws.recv_data() for _ in range(4)] == [
        (1, "ä".encode()),
        (2, b"\x00\xff"),
        (1, b""),
        (1, b"abc"),
    ]
    assert reader.closed() == 1005


def test_writer_drops(channel):
    ends = channel()
    writer = ends.writer()
    for number in range(10):
        writer.ws.send(str(number))
    writer.cut()
    reader = ends.reader()
    assert [reader.ws.recv() for _ in range(10)] == [str(number) for number in range(10)]
    assert reader.closed() == 1005


@pytest.fixture(params=["noticed", "not noticed"])
def lost_handshakes(monkeypatch, request):
    """A direction: channel ends of it are cut when they are taken, before the answer goes out, and
    the engine notices that before or then. An abort of a call that is just dialling its channel
    does that."""
    noticed = request.param == "noticed"
    lost = []
    admit = serving.Serving.admit

    def cut(serving, connection, request):
        answer = admit(serving, connection, request)
        if any(f"dir={direction}" in request.path for direction in lost):
            connection.cut()
            if noticed:
                # With websockets 16 it cannot be noticed before the answer is decided.
                connection.recv_events_thread.join(2)
        return answer

    monkeypatch.setattr(serving.Serving, "admit", cut)
    return lost


def test_a_writer_that_goes_in_its_handshake_was_there(lost_handshakes, channel):
    lost_handshakes.append("write")
    ends = channel()
    reader = ends.reader()
    with pytest.raises((OSError, websocket.WebSocketException)):
        ends.writer()
    assert reader.closed() == 1005


def test_a_reader_that_goes_in_its_handshake_was_there(lost_handshakes, channel):
    lost_handshakes.append("read")
    ends = channel()
    writer = ends.writer()
    with pytest.raises((OSError, websocket.WebSocketException)):
        ends.reader()
    with pytest.raises((OSError, websocket.WebSocketException)):
        while True:
            writer.ws.send("nobody reads it")


@pytest.mark.parametrize("end", ["writer", "reader"])
def test_an_end_is_taken_once(channel, end):
    ends = channel()
    first = getattr(ends, end)()
    assert getattr(ends, end)().closed() == 1005
    first.cut()
    assert getattr(ends, end)().closed() == 1005


@pytest.mark.parametrize(
    "change, status",
    [
        (lambda url: url.replace("key=", "key=x"), 404),
        (lambda url: url.replace("channels/", "channels/x"), 404),
        (lambda url: url.replace("&dir=read", ""), 400),
        (lambda url: url.replace("dir=read", "dir=both"), 400),
        (lambda url: url.replace("key=", "lock="), 400),
    ],
)
def test_channel_refusals(channel, change, status):
    ends = channel()
    ref = ends.refs[1]
    url = f"{ends.engine.url}/ws/channels/{ref['channel_id']}?key={ref['access_key']}&dir=read"
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        websocket.create_connection(change(url), timeout=10)
    assert refused.value.status_code == status


def test_channel_url_keeps_the_query(channel, made):
    ends = channel()
    ref = ends.refs[0]
    path = f"/ws/channels/{ref['channel_id']}?token=t&key={ref['access_key']}&dir=write&more=1"
    client = Raw(ends.engine, path=path, greeted=False)
    made.callback(client.ws.shutdown)
    client.ws.send("x")
    assert ends.reader().ws.recv() == "x"


def test_a_full_channel_pushes_back(channel):
    ends = channel(size=2)
    writer = ends.writer()
    writer.ws.settimeout(0.5)
    frame = "x" * 65536
    with pytest.raises(websocket.WebSocketTimeoutException):
        for _ in range(1000):
            writer.ws.send(frame)


def test_pings_of_a_full_channel_wait(channel):
    ends = channel(size=1)
    writer = ends.writer()
    for _ in range(3):
        writer.ws.send("x")
    ref = ends.refs[0]
    waiting = ends.engine._hub.channels.find(ref["channel_id"], ref["access_key"])
    while len(waiting) < 1:
        threading.Event().wait(0.01)
    # A ping that arrives in one read with the frames before it would still be answered.
    threading.Event().wait(0.1)
    writer.ws.ping("p")
    writer.ws.settimeout(0.3)
    with pytest.raises(websocket.WebSocketTimeoutException):
        writer.ws.recv_data(control_frame=True)
    reader = ends.reader()
    assert [reader.ws.recv() for _ in range(3)] == ["x"] * 3
    writer.ws.settimeout(10)
    assert writer.ws.recv_data(control_frame=True) == (websocket.ABNF.OPCODE_PONG, b"p")


def test_the_read_end_is_never_read(channel):
    ends = channel()
    reader, writer = ends.reader(), ends.writer()
    reader.ws.ping("p")
    reader.ws.send("ignored")
    reader.ws.send_close()
    writer.ws.send("x")
    # No pong and no echo of the Close: the next frame comes as if nothing had been said.
    assert reader.ws.recv_data(control_frame=True) == (1, b"x")


def test_a_vanished_reader_shows_when_sending(channel):
    ends = channel()
    reader, writer = ends.reader(), ends.writer()
    writer.ws.send("x")
    assert reader.ws.recv() == "x"
    reader.cut()
    writer.ws.ping("still there")
    opcode, _ = writer.ws.recv_data(control_frame=True)
    assert opcode == websocket.ABNF.OPCODE_PONG  # an idle writer learns nothing
    pause = threading.Event()

    def write():
        for _ in range(1000):
            writer.ws.send("y")
            pause.wait(0.005)

    with pytest.raises((OSError, websocket.WebSocketConnectionClosedException)):
        write()
    assert writer.closed() is None


def test_bad_text_ends_the_writer(channel):
    ends = channel()
    writer = ends.writer()
    writer.ws.send_frame(websocket.ABNF(fin=1, opcode=1, mask_value=1, data=b"\xff"))
    assert writer.closed() is None
    assert ends.reader().closed() == 1005


def test_a_large_frame_ends_the_writer(channel):
    ends = channel()
    writer = ends.writer()
    with contextlib.suppress(OSError):
        writer.ws.send(b"x" * (16 * MIB + 1), opcode=2)
    assert writer.closed() is None
    assert ends.reader().closed() == 1005


def test_channel_ends_can_be_cut(channel):
    ends = channel()
    writer, reader = ends.writer(), ends.reader()
    writer.ws.send("x")
    assert reader.ws.recv() == "x"
    ends.engine.drop_channels()
    assert writer.closed() is None
    assert reader.closed() is None


def test_stop_frees_everyone(channel):
    ends = channel(size=1)
    writer, reader = ends.writer(), channel(size=1).reader()
    for _ in range(3):
        writer.ws.send("x")
    ends.engine.stop()
    assert writer.closed() is None
    del reader


def test_sweep():
    now = [0.0]
    table = ChannelTable(clock=lambda: now[0])
    used, half, unused = (table.create() for _ in range(3))
    for each in ("read", "write"):
        assert used.claim(each)
    assert half.claim("write")
    assert half.put(b"x", True)
    now[0] = 299.0
    assert table.sweep() == 0
    now[0] = 301.0
    assert table.sweep() == 2
    assert len(table) == 1
    assert table.find(used.id, used.key) is used
    assert table.find(unused.id, unused.key) is None
    assert not half.put(b"x", True)
    assert len(half) == 0


@pytest.mark.parametrize("asked, given", [(None, 64), (0, 1), (5, 5), (5000, 1024)])
def test_channel_capacity(asked, given):
    assert ChannelTable().create(asked).capacity == given


# --- limits and admission ----------------------------------------------------------------------


def big_invoke(size):
    frame = json.dumps({"type": "registerservice", "id": "s", "x": ""}).encode()
    return frame[:-2] + b"x" * (size - len(frame)) + frame[-2:]


def test_largest_frame(start, raw):
    client = raw(start())
    client.ws.send(big_invoke(16 * MIB).decode())
    assert client.until_pong() == []


def test_too_large_a_frame(start, raw):
    engine = start()
    client = raw(engine, "worker")
    client.send(type="registerfunction", id="f")
    client.until_pong()
    with contextlib.suppress(OSError):
        client.ws.send(big_invoke(16 * MIB + 1).decode())
    assert client.closed() is None  # no polite Close
    assert engine.wait_until(lambda: not engine.connections)
    assert engine.functions() == {}


@pytest.mark.parametrize("size, survives", [(64 * MIB, True), (64 * MIB + 1, False)])
def test_largest_message(start, raw, size, survives):
    engine = start()
    client = raw(engine)
    data = big_invoke(size)
    step = 8 * MIB
    try:
        for offset in range(0, size, step):
            client.ws.send_frame(
                websocket.ABNF(
                    fin=int(offset + step >= size),
                    opcode=0 if offset else 1,
                    mask_value=1,
                    data=data[offset : offset + step],
                )
            )
    except OSError:
        assert not survives
    if survives:
        assert client.until_pong() == []
    else:
        assert client.closed() is None


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "example.org", ""])
def test_only_loopback_hosts(host):
    with pytest.raises(ValueError, match="not a loopback address"):
        LoopbackEngine(host)


def test_unknown_profile():
    with pytest.raises(ValueError, match=r"0\.23"):
        LoopbackEngine(profile="1.0")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2"])
def test_loopback_hosts(start, raw, host):
    engine = start(host=host)
    assert raw(engine).until_pong() == []


def test_ipv6(start, raw):
    try:
        engine = start(host="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    assert engine.url == f"ws://[::1]:{engine.port}"
    assert raw(engine).until_pong() == []


def status_of(url, **options):
    try:
        websocket.create_connection(url, timeout=10, **options).close()
    except websocket.WebSocketBadStatusException as error:
        return error.status_code
    return 101


def test_pages_stay_out(start):
    engine = start()
    assert status_of(engine.url) == 101
    assert status_of(engine.url, suppress_origin=True) == 101
    assert status_of(engine.url, origin=f"http://localhost:{engine.port}") == 101
    assert status_of(engine.url, origin="http://evil.example") == 403
    assert status_of(engine.url, origin="null") == 403
    assert status_of(engine.url, origin="http://127.0.0.1:1") == 403
    assert status_of(engine.url, host=f"localhost:{engine.port}") == 101
    assert status_of(engine.url, host=f"evil.example:{engine.port}", suppress_origin=True) == 403
    assert status_of(engine.url, header=["Host: x"], suppress_origin=True) in (400, 403)


@pytest.mark.parametrize("profile, status", [("0.22", 404), ("0.23", 101)])
def test_other_paths(start, made, profile, status):
    engine = start(profile=profile)
    assert status_of(engine.url + "/nothing") == 404
    assert status_of(engine.url + "/otel") == status
    if status == 101:
        client = Raw(engine, path="/otel", greeted=False)
        made.callback(client.ws.shutdown)
        client.ws.send(b"OTLP", opcode=2)
        client.ws.send("ignored")
        client.ws.ping("p")
        assert client.ws.recv_data(control_frame=True)[0] == websocket.ABNF.OPCODE_PONG


@pytest.mark.parametrize(
    "path, header", [("/", ["Authorization: Bearer right"]), ("/?token=right", [])]
)
def test_token(start, made, path, header):
    engine = start(token="right")
    client = Raw(engine, path=path, header=header)
    made.callback(client.ws.shutdown)
    assert client.until_pong() == []


@pytest.mark.parametrize("path, header", [("/", []), ("/?token=w", ["Authorization: Bearer w"])])
def test_wrong_token(start, made, path, header):
    engine = start(token="right")
    client = Raw(engine, path=path, header=header, greeted=False)
    made.callback(client.ws.shutdown)
    refused = client.receive()
    assert (refused["type"], refused["error"]["code"]) == ("error", "AUTH_ERROR")
    client.send(type="ping")
    assert client.closed() == 1008
    assert engine.connections == []


# --- knobs -------------------------------------------------------------------------------------


def test_close_all(start, raw):
    engine = start()
    client = raw(engine)
    engine.close_all(1012)
    engine.close_all(1000)
    assert client.closed() == 1012


def test_drop_worker(start, raw):
    engine = start()
    one, two = raw(engine, "one"), raw(engine, "two")
    assert engine.drop_worker("one") == 1
    assert engine.drop_worker("none") == 0
    assert one.closed() is None
    assert two.until_pong() == []


def test_pause_reading(start, raw):
    engine = start()
    client = raw(engine, "worker")
    engine.pause_reading("worker")
    # The reader is held when it has handled one more event.
    client.send(type="pong")
    client.ws.ping("p")
    client.ws.settimeout(0.3)
    with pytest.raises(websocket.WebSocketTimeoutException):
        while True:
            client.ws.recv_data(control_frame=True)
    engine.resume_reading("worker")
    client.ws.settimeout(10)
    assert client.until_pong() == []


def test_a_paused_worker_does_not_hold_up_a_stop(start, raw):
    engine = start()
    raw(engine, "worker").send(type="pong")
    engine.pause_reading("worker")
    engine.stop()
    assert engine.connections == []


def test_frames_are_shown(start, raw):
    seen = []
    engine = start(on_frame=lambda peer, frame: seen.append((peer.name, frame["type"])))
    raw(engine, "worker")
    assert seen == [(None, "invokefunction"), ("worker", "ping")]


def test_secrets_are_not_shown(start, raw):
    engine = start()
    client = raw(engine, "worker")
    assert client.greeting["reattach_token"] not in repr(engine.connections)


def test_no_thread_is_left(raw, monkeypatch):
    asked = threading.Event()

    class Late(Outbox):
        """Ends late, unless somebody waits for it."""

        def _run(self):
            super()._run()
            asked.wait(10)

        def join(self, timeout=None):
            if timeout is None:
                asked.set()
            super().join(timeout)

    monkeypatch.setattr(serving, "Outbox", Late)
    before = set(threading.enumerate())
    with LoopbackEngine() as engine:
        raw(engine, "worker")
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("loopback-")] == []
    for thread in left:
        thread.join(10)
    assert not [thread for thread in left if thread.is_alive()]


class Slow:
    """Stands for a connection whose peer does not read."""

    def __init__(self):
        self.sent, self.closed = [], []
        self.may_send = threading.Event()

    def send(self, text):
        self.may_send.wait(10)
        self.sent.append(text)

    def close(self, code):
        self.closed.append(code)


def test_a_connection_that_comes_too_late(start, raw):
    engine = start()
    engine._serving.close()
    late = raw(engine, greeted=False)
    assert late.closed() is None
    assert engine.connections == []


def test_outbox_holds_up_the_reader():
    slow = Slow()
    outbox = Outbox(slow, "test")
    outbox.start()
    for number in range(OUTBOX + 1):
        outbox.post(str(number))
    while len(outbox) > OUTBOX:
        threading.Event().wait(0.01)  # the sender takes the first at once
    passed = threading.Event()
    waiting = threading.Thread(target=lambda: (outbox.wait_for_room(), passed.set()))
    waiting.start()
    assert not passed.wait(0.1)
    slow.may_send.set()
    assert passed.wait(10)
    waiting.join(10)
    outbox.close(1000)
    outbox.post("too late")
    outbox.join(10)
    assert slow.sent == [str(number) for number in range(OUTBOX + 1)]
    assert slow.closed == [1000]


def test_outbox_ends_with_its_connection():
    slow = Slow()
    slow.may_send.set()
    outbox = Outbox(slow, "test")
    outbox.start()
    outbox.end()
    outbox.join(10)
    outbox.post("too late")
    outbox.wait_for_room()
    assert slow.sent == []
