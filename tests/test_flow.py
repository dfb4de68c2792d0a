"""Streams whose tokens are moved together: each is what it would have been alone."""

# ruff: noqa: F811 (fixtures are imported and then named as arguments)

from __future__ import annotations

import select
import socket
import threading

import pytest
from peers import PATIENCE, ScriptedServer, answer_json, answer_sse, wait_for
from websocket import ABNF
from world import FINISH, WORD, new_world, settled  # noqa: F401

from provider_llamacpp.bus.channel import connect
from provider_llamacpp.calls import Call
from provider_llamacpp.errors import Interrupted, ProviderError
from provider_llamacpp.payloads import WriterRef
from provider_llamacpp.server.upstream import Target, Upstream

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not hasattr(select, "epoll"), reason="nothing is carried here"),
]

EVENT_STREAM = {"headers": {"headers": {"content-type": "text/event-stream"}}}
LISTING = answer_json({"object": "list", "data": [{"id": "demo", "object": "model"}]})


# --- reading without a wait ------------------------------------------------------------------


def opened(server, call=None):
    call = call or Call(1, "stream", key="k", model="m")
    return Upstream().open_stream(Target(server.url), "/v1/chat/completions", b"{}", call)


def taken(stream):
    """All that arrives, read as the carrier does, until that wants a :meth:`read`."""
    found = []
    descriptor = stream.share()
    while descriptor is not None and not stream.over:
        select.select([descriptor], [], [], PATIENCE)
        block = stream.arrived()
        if block is None:
            break
        found.append(block)
    if descriptor is not None:
        stream.unshare()
    return b"".join(found)


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
def test_a_body_arrives_whole_in_every_framing(framing):
    body = "data: {}\n\n" * 5000 + "data: [DONE]\n\n"
    answer = {**answer_sse(), "body": body, "split": [1, 7, 100], "framing": framing}
    with ScriptedServer(answer) as server, opened(server) as stream:
        first = stream.read()
        assert first + taken(stream) + stream.read() == body.encode()
        assert stream.consumed == len(body)
        assert stream.read() == b""
        assert stream.share() is None


def reset(exchange):
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    exchange.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    exchange.sock.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"close": True}, "broke the connection off"),
        (reset, "broke the connection off"),
        (lambda exchange: exchange.raw(b"data: not a chunk\r\n"), "not a chunk size"),
    ],
    ids=["closed", "reset", "garbage"],
)
def test_faults_are_told_by_the_next_read(fault, words):
    go = threading.Event()
    steps = [EVENT_STREAM, {"send": WORD}, lambda _: go.wait(PATIENCE), {"send": WORD}, fault]
    with ScriptedServer({"script": steps}) as server, opened(server) as stream:
        assert stream.read() == WORD.encode()
        go.set()
        seen = taken(stream)
        assert seen in (b"", WORD.encode())  # a reset may overtake what was sent before it
        with pytest.raises(ProviderError, match=words) as caught:
            while stream.read():
                pass
        assert caught.value.kind == "transient"


def test_what_arrives_after_an_abort_is_nobodys():
    call = Call(1, "stream", key="k", model="m")
    steps = [EVENT_STREAM, {"send": WORD}, {"hang_ms": 60_000}]
    with ScriptedServer({"script": steps}) as server, opened(server, call) as stream:
        assert stream.read()
        assert stream.share() is not None
        call.abort("abort")
        assert stream.arrived() is None
        stream.unshare()
        with pytest.raises(Interrupted):
            stream.read()


def test_nothing_yet_is_no_end():
    steps = [EVENT_STREAM, {"send": WORD}, {"hang_ms": 60_000}]
    with ScriptedServer({"script": steps}) as server, opened(server) as stream:
        assert stream.read()
        assert stream.share() is not None
        assert stream.arrived() == b""
        stream.expire()
        stream.unshare()
        with pytest.raises(ProviderError, match="llama-server") as caught:
            stream.read()
        assert caught.value.kind == "transient"


# --- through the worker ----------------------------------------------------------------------


class Crowd:
    """A worker on a scripted server, which has an answer for each text that is asked.

    An answer begins with tokens, until all are carried, and goes on with what is given: a stream
    that reads by itself sees only with its next token that it is not alone any more.
    """

    def __init__(self, new_world, **answers):
        self.joined = threading.Event()
        self._answers = {name: [self._join, *more] for name, more in answers.items()}
        self._new_world = new_world
        self._server = ScriptedServer(
            routes={"/v1/models": LISTING, "/v1/chat/completions": self._answer}
        )

    def _join(self, exchange):
        exchange.send(WORD)
        while not self.joined.wait(0.02):
            exchange.send(WORD)

    def _answer(self, request):
        (text,) = [name for name in self._answers if f"ask {name}".encode() in request.body]
        return {"script": [EVENT_STREAM, *self._answers[text]]}

    def begin(self, **settings):
        world = self.world = self._new_world()
        world.store.config["api_url"] = self._server.start().url
        router = world.router()
        self.worker = world.worker(**settings)
        assert router.wait_for_calls("models::reconcile")
        world.declared()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.stop()

    def flow(self, *names):
        """Start streams, which are carried by the first of them then."""
        streams = []
        for name in names:
            streams.append(self.world.stream(f"ask {name}", resolution_key=name))
            assert streams[-1].wait_for("text_delta")
        self.carried(len(names))
        self.joined.set()
        return streams

    def carried(self, count):
        """Wait until so many are."""
        (served,) = self.worker._served
        members = served.runs.carrier._members
        wait_for(lambda: len(members) == count, f"that {count} streams are carried")


def say(text):
    return WORD.replace('"x"', f'"{text}"')


def opens(gate):
    return lambda _: gate.wait(PATIENCE)


one_profile = pytest.mark.parametrize("new_world", ["0.25"], indirect=True)


@one_profile
def test_every_stream_says_what_it_would_alone(new_world):
    gate = threading.Event()
    words = [f"{number} " for number in range(200)]
    answers = {
        name: [
            opens(gate),
            *({"send": say(name + word)} for word in words),
            {"send": FINISH},
        ]
        for name in "ABCDEFGH"
    }
    with Crowd(new_world, **answers) as crowd:
        crowd.begin()
        streams = crowd.flow(*answers)
        gate.set()
        for name, stream in zip(answers, streams, strict=True):
            message = settled(stream)
            assert message["content"][0]["text"].lstrip("x") == "".join(
                name + word for word in words
            )
            assert message["stop_reason"] == "end"
        crowd.carried(0)


@one_profile
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"close": True}, "broke the connection off"),
        (reset, "broke the connection off"),
        (lambda exchange: exchange.raw(b"no chunk\r\n"), "broken answer"),
        (lambda exchange: (exchange.raw(b"0\r\n\r\n"), exchange.watch(60)), "finish reason"),
        ({"send": 'data: {"error":{"code":500,"message":"Odd."}}\n\n'}, "Odd."),
        ({"send": "data: " + "y" * 1_100_000}, "more than 1 MiB"),
    ],
    ids=["closed", "reset", "garbage", "complete and kept open", "error", "too much"],
)
@pytest.mark.parametrize("place", [0, 1], ids=["the carrier", "a carried one"])
def test_a_fault_is_that_of_one(new_world, fault, words, place):
    broken, sound = threading.Event(), threading.Event()
    end = [opens(sound), {"send": say("y")}, {"send": FINISH}]
    with Crowd(new_world, fails=[opens(broken), fault], one=end, two=end) as crowd:
        crowd.begin()
        names = ["one", "two"]
        names.insert(place, "fails")
        streams = dict(zip(names, crowd.flow(*names), strict=True))
        broken.set()
        error = settled(streams.pop("fails"))
        assert words in error["error_message"]
        assert error["content"][0]["text"].startswith("x")
        crowd.carried(2)
        sound.set()
        for stream in streams.values():
            assert settled(stream)["content"][0]["text"].strip("x") == "y"


@one_profile
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_abort_reaches_whoever_waits(new_world, place):
    gate = threading.Event()
    end = [opens(gate), {"send": FINISH}]
    with Crowd(new_world, one=end, two=end, three=end) as crowd:
        crowd.begin()
        streams = crowd.flow("one", "two", "three")
        aborted = streams.pop(place)
        assert aborted.abort() == {"aborted": True}
        aborted.finish()
        assert {"done", "error"}.isdisjoint(aborted.kinds)
        crowd.carried(2)
        gate.set()
        for stream in streams:
            assert settled(stream)["stop_reason"] == "end"


@one_profile
@pytest.mark.parametrize("reads", [False, True])
def test_a_caller_that_does_not_read_holds_up_nobody(new_world, reads):
    """What its channel has no room for waits with its own thread, and is given up in time."""
    much, rest = threading.Event(), threading.Event()
    flood = {"repeat": 70, "send": say("z" * 100_000)}
    end = [opens(rest), {"send": say("y")}, {"send": FINISH}]
    with Crowd(new_world, stuck=[opens(much), flood, {"send": FINISH}], one=end, two=end) as crowd:
        crowd.begin(send_timeout=60.0 if reads else 0.5)
        others = crowd.flow("one", "two")
        writer, reader = crowd.world.engine.create_channel()
        message = {"role": "user", "content": [{"type": "text", "text": "ask stuck"}]}
        result = crowd.world.caller.begin(
            "provider::llamacpp::stream",
            {"writer_ref": writer, "model": "demo", "messages": [{**message, "timestamp": 1}]},
        )
        crowd.carried(3)
        much.set()
        crowd.carried(2)
        rest.set()
        for stream in others:
            assert settled(stream)["content"][0]["text"].strip("x") == "y"
        if reads:
            seen = drain(crowd.world.engine.url, reader)
            assert (
                seen.count("z") == 3 * 70 * 100_000
            )  # in the deltas, at the end of the block, in all
        assert result.result(PATIENCE) == {"ok": True}


def drain(url, reader):
    """All text of a channel, to its end."""
    ref = WriterRef(reader["channel_id"], reader["access_key"])
    end = connect(url, ref, direction="read")
    texts = []
    # Frames: websocket-client checks UTF-8 in Python, byte by byte, if asked for messages.
    while (frame := end.recv_frame()).opcode == ABNF.OPCODE_TEXT:
        texts.append(frame.data.decode())
    end.sock.close()
    return "".join(texts)
