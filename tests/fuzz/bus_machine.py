"""An engine that says what it likes, in frames of any cut: each invocation gets exactly one result.

The client is the real one, on a real socket; the machine is the engine at its other end, and reads
all that comes back.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from typing import Any

from bus_peers import TIMEOUT, Peer, Run, Server, eventually, server_frame
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from provider_llamacpp.bus.engine import Engine, Function, Invocation
from provider_llamacpp.errors import BusError

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
IDS = st.sampled_from(["i1", "i2", "i3", ""])
SERVED = ("f::now", "f::raises", "f::twice", "f::fails", "f::void", "f::nonsense")
NONSENSE = st.fixed_dictionaries(
    {},
    optional={
        "type": JSON
        | st.sampled_from(
            [
                *("invocationresult", "ping", "pong", "workerregistered", "unregisterfunction"),
                *("triggerregistrationresult", "registerfunction", "reattach", "invokefunction"),
            ]
        ),
        "id": JSON,
        "invocation_id": JSON.filter(lambda value: not isinstance(value, str)),
        "function_id": JSON | st.sampled_from(SERVED),
        "data": JSON,
        "result": JSON,
        "error": JSON | st.fixed_dictionaries({"code": JSON, "message": JSON}),
        "worker_id": JSON,
        "reattach_token": JSON,
        "features": JSON,
        "traceparent": JSON,
        "baggage": JSON,
    },
)
RAW = st.binary(max_size=12) | st.sampled_from(
    [b"", b"null", b"[]", b'"x"', b"{", b"\xff\xfe", b"[" * 5000, b'{"type":' + b"9" * 5000]
)
RESULTS = ("result", "error", "odd error", "nothing", "both")


class BusMachine(RuleBasedStateMachine):
    """One client, over as many connections as it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.engine = Engine(
            self.server.url,
            name="t",
            version="1",
            description="d",
            retry_first=0.001,
            retry_limit=0.002,
        )
        # What is dropped is told with a traceback; here that is every other message.
        self.logger = logging.getLogger("provider_llamacpp.bus")
        self.level = self.logger.level
        self.logger.setLevel(logging.CRITICAL + 1)
        self.threads = set(threading.enumerate())
        self.held: list[tuple[int, Invocation]] = []
        """Calls to be answered later, with the connection they came on."""
        self.connection = 0
        self.numbers = 0
        self.chunk = 0
        self.expected: Counter[str] = Counter()
        self.due: Counter[str] = Counter()
        """Results that are owed at once, of those expected."""
        self.got: Counter[str] = Counter()
        self.ours: dict[str, Run] = {}
        """Calls of the client that wait, by invocation id."""
        self.asked: list[str] = []
        """Those of them that are not answered yet."""
        self.starting: dict[int, Run] = {}
        """Calls of the client that the engine has not seen yet, by their number."""

    @initialize()
    def begin(self) -> None:
        handlers = {
            "f::now": lambda call: call.reply({"echo": call.data}),
            "f::later": lambda call: self.held.append((self.connection, call)),
            "f::raises": self._raise,
            "f::twice": lambda call: (call.reply(1), call.reply(2), call.fail("no", "no")),
            "f::fails": self._fail,
            "f::void": lambda call: call.reply(None),
            "f::nonsense": lambda call: call.reply({"x": {1, 2}, "nan": float("nan")}),
        }
        for name, handler in handlers.items():
            self.engine.register(Function(name, handler))
        self.engine.start()
        self.accept()

    @staticmethod
    def _raise(call: Invocation) -> None:
        raise RuntimeError("a handler broke")

    @staticmethod
    def _fail(call: Invocation) -> None:
        raise BusError("my/code", "words")

    def accept(self) -> None:
        self.peer: Peer = self.server.accept()
        self.connection += 1
        self.expected.clear()
        self.due.clear()
        self.got.clear()
        self.asked.clear()
        self.say({"type": "workerregistered", "worker_id": "w", "reattach_token": "t"})
        self.sync()
        assert self.engine.wait_connected(TIMEOUT)

    # -- writing and reading --------------------------------------------------------------

    def raw(self, data: bytes) -> None:
        """All of it, in pieces of ``chunk`` bytes if that is not 0."""
        size = self.chunk or len(data)
        for at in range(0, len(data), size):
            self.peer.sock.sendall(data[at : at + size])

    def say(self, message: dict[str, Any]) -> None:
        self.raw(server_frame(1, json.dumps(message).encode()))

    def sync(self) -> None:
        """Until all that was said has been taken; nothing that was owed is missing then."""
        self.numbers += 1
        name = f"sync-{self.numbers}"
        self.invoke(name, "f::now", {})
        while not self.got[name]:
            self.read()
        assert {key: self.got[key] for key in self.due} == dict(self.due)

    def read(self) -> None:
        final, opcode, payload = self.peer.frame()
        assert final and opcode in (1, 10), (final, opcode, payload)
        if opcode == 10:
            return
        message = json.loads(payload)
        if message["type"] == "invocationresult":
            assert ("result" in message) != ("error" in message), message
            self.got[message["invocation_id"]] += 1
        elif message["type"] == "invokefunction" and message["function_id"] == "x::y":
            self.asked.append(message["invocation_id"])
            self.ours[message["invocation_id"]] = self.starting.pop(message["data"]["n"])

    def invoke(self, invocation_id: str | None, function_id: str, data: Any) -> None:
        message = {"type": "invokefunction", "function_id": function_id, "data": data}
        if invocation_id is not None:
            message["invocation_id"] = invocation_id
            self.expected[invocation_id] += 1
            if function_id != "f::later":
                self.due[invocation_id] += 1
        self.say(message)

    # -- what the engine does -------------------------------------------------------------

    @rule(size=st.sampled_from([0, 0, 1, 3, 100]))
    def cuts_what_it_sends(self, size: int) -> None:
        self.chunk = size

    @rule(
        name=IDS | st.none(), function=st.sampled_from([*SERVED, "f::later", "no::such"]), data=JSON
    )
    def calls(self, name: str | None, function: str, data: Any) -> None:
        self.invoke(name, function, data)

    @rule(which=st.integers(0, 99), how=st.sampled_from(["reply", "fail", "twice", "thread"]))
    def is_answered_later(self, which: int, how: str) -> None:
        self.sync()
        if not self.held:
            return
        connection, call = self.held.pop(which % len(self.held))
        if call.id is not None and connection == self.connection:
            self.due[call.id] += 1
        if how == "fail":
            call.fail("my/code", "words")
        elif how == "thread":
            Run(lambda: call.reply("late")).result()
        else:
            call.reply("late")
        if how == "twice":
            call.reply("again")
        self.sync()

    @rule(message=NONSENSE)
    def says_nonsense(self, message: dict[str, Any]) -> None:
        self.say(message)

    @rule(data=RAW, binary=st.booleans())
    def sends_what_is_no_message(self, data: bytes, binary: bool) -> None:
        self.raw(server_frame(2 if binary else 1, data))

    @rule(opcode=st.sampled_from([9, 10]), payload=st.binary(max_size=125))
    def pings(self, opcode: int, payload: bytes) -> None:
        self.raw(server_frame(opcode, payload))

    @rule(name=IDS, cuts=st.lists(st.integers(0, 200), max_size=3))
    def calls_in_fragments(self, name: str, cuts: list[int]) -> None:
        text = {"type": "invokefunction", "function_id": "f::now", "invocation_id": name, "data": 1}
        data = json.dumps(text).encode()
        marks = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
        start, opcode = 0, 1
        for mark in marks:
            self.raw(server_frame(opcode, data[start:mark], final=mark == len(data)))
            if mark < len(data):
                self.raw(server_frame(9, b"between"))
            start, opcode = mark, 0
        self.expected[name] += 1
        self.due[name] += 1

    @rule()
    def is_called(self) -> None:
        """The client calls a function of another worker."""
        self.numbers += 1
        number = self.numbers
        run = Run(lambda: self.engine.invoke("x::y", {"n": number}, timeout=TIMEOUT))
        self.starting[number] = run
        while number in self.starting:
            self.read()

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 99), how=st.sampled_from(RESULTS), again=st.booleans(), value=JSON)
    def answers(self, which: int, how: str, again: bool, value: Any) -> None:
        name = self.asked.pop(which % len(self.asked))
        message: dict[str, Any] = {"type": "invocationresult", "invocation_id": name}
        if how in ("result", "both"):
            message["result"] = value
        if how in ("error", "both"):
            message["error"] = {"code": "a/b", "message": "m"}
        if how == "odd error":
            message["error"] = {"code": value, "message": 5}
        for _ in range(2 if again else 1):
            self.say(message)
        run = self.ours.pop(name)
        if how in ("result", "nothing"):
            # A second answer counts for nothing.
            assert run.result() == message.get("result")
        else:
            try:
                run.result()
            except BusError as error:
                assert error.code == ("UNKNOWN" if how == "odd error" else "a/b")
            else:
                raise AssertionError("an error became a result")

    @rule(how=st.sampled_from(["close", "reset", "frame", "masked", "reserved", "fragment"]))
    def ends_the_connection(self, how: str) -> None:
        """Whatever waits for this engine fails; the next connection begins anew."""
        self.sync()
        if how == "reset":
            self.peer.reset()
        elif how == "close":
            self.peer.close()
        else:
            broken = {
                "frame": server_frame(8, b"\x03\xe9"),
                "masked": b"\x81\x81abcdx",
                "reserved": b"\xf1\x00",
                "fragment": server_frame(0, b"x"),
            }
            self.peer.sock.sendall(broken[how])
        for name in list(self.ours):
            try:
                self.ours.pop(name).result()
            except BusError as error:
                assert error.code == "disconnected"
            else:
                raise AssertionError("a call outlived its connection")
        self.accept()

    def stop(self) -> None:
        """The client says goodbye and waits a second for ours."""
        stopping = Run(self.engine.stop)
        try:
            while self.connection and self.peer.frame()[1] != 8:
                pass
        except (EOFError, OSError):
            pass
        if self.connection:
            self.peer.close()
        stopping.result()

    # -- the law --------------------------------------------------------------------------

    @invariant()
    def never_more_results_than_calls(self) -> None:
        assert all(self.expected[key] >= count for key, count in self.got.items())

    def teardown(self) -> None:
        try:
            if self.connection:
                self.sync()
                for connection, call in self.held:
                    if call.id is not None and connection == self.connection:
                        self.due[call.id] += 1
                    call.reply("at last")
                self.sync()
                assert self.got == self.expected
        finally:
            self.stop()
            for run in self.ours.values():
                try:
                    run.result()
                except BusError:
                    pass
            with self.server:
                pass
            self.logger.setLevel(self.level)
        # Those that answered a call are about to end.
        assert eventually(lambda: not set(threading.enumerate()) - self.threads)
