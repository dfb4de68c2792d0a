"""Hostile input, and its bounds: in memory, in frames, in time.

A server that is not ours may send anything, and an agent may ask for anything. What is measured
here is what one stream holds of it, with the server of the test in the same process.
"""

# ruff: noqa: F811 (fixtures are imported and then named as arguments)

from __future__ import annotations

import gzip
import itertools
import json
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from bus_peers import Server
from chunks import assembler
from iii import InvocationError
from laws import check_frames
from peers import ScriptedServer, answer_json, answer_sse, wait_for
from world import FINISH, WORD, new_world, running, settled, world  # noqa: F401

from provider_llamacpp import ProviderWorker, Settings, jsontext
from provider_llamacpp.bus.channel import channel_url
from provider_llamacpp.bus.engine import Engine, Function
from provider_llamacpp.calls import Call
from provider_llamacpp.errors import Interrupted, ProviderError
from provider_llamacpp.events.assembler import Assembler, Outcome
from provider_llamacpp.local.client import BusClient
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.router import LoopbackRouter
from provider_llamacpp.payloads import WriterRef
from provider_llamacpp.server.upstream import Target, Upstream

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
EVENT_STREAM = {"headers": {"headers": {"content-type": "text/event-stream"}}}
only_new = pytest.mark.parametrize("new_world", ["0.25"], indirect=True)


def chunk(delta, reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return "data: " + json.dumps({"choices": [choice]}) + "\n\n"


class Drunk:
    """What one stream made of an answer."""

    def __init__(self, answer, *, keep=True, measured=True):
        self.frames = []
        self.count = 0
        call = Call(1, "stream", key=None, model=None)
        numbers = itertools.count()
        assembler = Assembler(
            model="demo",
            provider="llamacpp",
            decode_name=str,
            now_ms=lambda: 1,
            call_id=lambda: f"made-{next(numbers)}",
        )
        error = None
        with ScriptedServer(answer) as server:
            if measured:
                tracemalloc.start()
            try:
                target = Target(server.url)
                with Upstream().open_stream(target, "/v1/chat/completions", b"{}", call) as stream:
                    while not assembler.ended and (block := stream.read()):
                        self._take(assembler.feed(block), keep)
                    self.consumed = stream.consumed
            except ProviderError as failure:
                error = failure
            self._take(assembler.finish(Outcome(error=error)), True)
            if measured:
                self.peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            # Whoever stopped reading has let go of the server.
            wait_for(lambda: not server.open(), "the end of the connection")
            server.errors.clear()
        self.message = json.loads(self.frames[-1])
        self.message = self.message.get("error") or self.message.get("message")

    def _take(self, frames, keep):
        self.count += len(frames)
        if keep:
            self.frames += frames


# --- without end -------------------------------------------------------------------------------


def test_a_line_of_a_gigabyte():
    sent = []

    def line(exchange):
        exchange.send('data: {"choices":[{"index":0,"delta":{"content":"')
        for _ in range(1024):
            exchange.send(b"x" * MIB)
            sent.append(MIB)

    drunk = Drunk({"script": [EVENT_STREAM, line]})
    assert drunk.message["error_kind"] == "transient"
    assert "more than 1 MiB" in drunk.message["error_message"]
    assert sum(sent) < 64 * MIB, "the server was read on"
    assert drunk.peak < 12 * MIB


@pytest.mark.parametrize(
    "event",
    [": well\n\n", "data: {}\n\n", "data: \n\n", "\n\n\n\n", 'data: {"choices":[]}\n\n', "\r\r"],
    ids=["comments", "empty objects", "empty data", "blank lines", "no choices", "returns"],
)
def test_events_that_say_nothing_leave_nothing(event):
    """More of them than fit into the bound: what ten million leave is no more."""
    block = (event * (65536 // len(event))).encode()
    drunk = Drunk({"script": [EVENT_STREAM, {"repeat": 20, "send": block}, {"send": FINISH}]})
    assert drunk.message["error_kind" if "error_kind" in drunk.message else "stop_reason"]
    assert drunk.count <= 3
    assert drunk.peak < MIB


def test_a_hundred_thousand_tokens_of_one_letter():
    deltas = 100_000
    block = chunk({"content": "x"}) * 1000
    script = [EVENT_STREAM, {"repeat": deltas // 1000, "send": block}, {"send": FINISH}]
    drunk = Drunk({"script": script}, keep=False)
    assert drunk.message["content"][0]["text"] == "x" * deltas
    assert drunk.count == deltas + 5  # start, text_start, text_end, stop, done
    assert drunk.peak < 8 * MIB


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "y" * 8000},
        {"reasoning_content": "y" * 8000},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "[" * 8000}}]},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '"\\\\' * 2000}}]},
    ],
    ids=["text", "thought", "argument", "argument of escapes"],
)
def test_an_answer_that_never_ends(delta):
    event = chunk(delta)
    drunk = Drunk({"script": [EVENT_STREAM, {"repeat": 10_000, "send": event}]}, keep=False)
    assert drunk.message["error_kind"] == "permanent"
    assert "8 MiB" in drunk.message["error_message"]
    assert drunk.consumed < 16 * MIB
    assert drunk.peak < 6 * 8 * MIB


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["new ids", "new indices", "no index"])
def test_a_hundred_thousand_calls(way):
    def call(number):
        made = {"id": f"c{number}", "function": {"name": "f", "arguments": "{}"}}
        if way != "no index":
            made["index"] = number if way == "new indices" else 0
        return chunk({"tool_calls": [made]})

    def calls(exchange):
        for start in range(0, 100_000, 1000):
            exchange.send("".join(call(start + place) for place in range(1000)))
        exchange.send(chunk({}, "tool_calls") + "data: [DONE]\n\n")

    # Not measured, which takes four times as long: of what is held nothing grows with the calls.
    drunk = Drunk({"script": [EVENT_STREAM, calls]}, keep=False, measured=False)
    assert 1 <= len(drunk.message["content"]) <= 129
    assert drunk.count < 129 * 3 + 10


# --- JSON that hurts -----------------------------------------------------------------------------


@pytest.mark.parametrize("open_, close", [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("depth", [500, 900, 5_000, 200_000])
def test_deep_json_in_every_place(open_, close, depth):
    """On a thread with the stack of a call's thread: an overflow there would end the process."""
    deep = open_ * depth + "1" + close * depth
    events = [
        'data: {"choices":[{"index":0,"delta":{"content":' + deep + "}}]}\n\n",
        'data: {"error":' + deep + "}\n\n",
        'data: {"usage":' + deep + "}\n\n",
        "data: " + deep + "\n\n",
        "error: " + deep + "\n\n",
        deep + "\n\n",
        chunk({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": deep}}]}),
    ]
    failures = []

    def take(event):
        taking = assembler(secret="s3cret")
        try:
            frames = taking.feed(event.encode())
            frames += taking.feed(FINISH.encode())
            frames += taking.finish(Outcome())
            check_frames(frames)
        except BaseException as error:
            failures.append((event[:60], error))

    before = threading.stack_size(512 * 1024)
    try:
        for event in events:
            thread = threading.Thread(target=take, args=[event])
            thread.start()
            thread.join()
    finally:
        threading.stack_size(before)
    assert failures == []


@pytest.mark.parametrize(
    "text",
    [
        '{"usage":{"prompt_tokens":NaN,"completion_tokens":Infinity}}',
        '{"choices":[{"index":0,"delta":{"content":NaN}}]}',
        '{"choices":[{"index":NaN,"delta":{"content":"x"}}]}',
        '{"usage":{"prompt_tokens":1e999,"completion_tokens":-5,"total_tokens":10'
        + "0" * 400
        + "}}",
        '{"choices":[{"index":0,"delta":{"content":"\\ud800","role":"\\udfff"}}]}',
        '{"choices":{"0":1},"error":[],"model":[],"id":{}}',
    ],
)
def test_numbers_and_characters_that_json_does_not_know(text):
    drunk = Drunk(answer_sse(text, body=f"data: {text}\n\n{WORD}{FINISH}"))
    check_frames(drunk.frames)


# --- HTTP that hurts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nX-Big: " + b"x" * (8 * MIB) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X-Many: 1\r\n" * 100_000 + b"\r\n",
        b"HTTP/1.1 200 " + b"OK" * MIB + b"\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"\x00" * MIB,
    ],
    ids=["one", "many", "reason", "continue", "chunk size", "length", "zeros"],
)
def test_headers_that_are_too_much(head):
    drunk = Drunk({"script": [lambda exchange: exchange.raw(head), {"close": True}]})
    assert drunk.message["error_kind"] == "transient"
    assert len(drunk.message["error_message"]) < 400
    assert drunk.peak < 24 * MIB


def test_headers_that_drip_are_waited_for_until_somebody_gives_up():
    def drip(exchange):
        exchange.raw(b"HTTP/1.1 200 OK\r\n")
        for number in itertools.count():
            exchange.raw(b"X-%d: 1\r\n" % number if number < 50 else b"x")
            exchange.watch(0.01)

    call = Call(1, "stream", key=None, model=None)
    with ScriptedServer({"script": [drip]}) as server:
        target = Target(server.url)
        # A short request has an end of its own, whatever drips in.
        with pytest.raises(ProviderError, match="in time"):
            Upstream().request(target, "GET", "/props", timeout=0.3)
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(Upstream().open_stream, target, "/x", b"{}", call)
            server.wait_requests(2)
            assert call.abort("abort")
            # What came is taken for all headers there are; whoever reads on is told.
            with pytest.raises(Interrupted), stream.result(10) as answer:
                answer.read()
        wait_for(lambda: not server.open(), "the end of the connections")


def test_a_bomb_of_zeros_is_not_unpacked():
    bomb = gzip.compress(b"data: 0\n\n" * (4 * MIB))
    headers = {"content-type": "text/event-stream", "content-encoding": "gzip"}
    drunk = Drunk({"headers": headers, "body": bomb})
    assert drunk.message["error_kind"] == "permanent"
    assert "compresses" in drunk.message["error_message"]
    assert drunk.peak < 4 * MIB


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", b"<html><body>portal</body></html>"),
        ("image/png", b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 2000),
        ("application/json", b"[" * 300_000),
        ("text/plain", b"\xff\xfe" * 200_000),
        ("application/json", b'"just words"'),
    ],
)
def test_what_is_no_stream_becomes_an_error(kind, body):
    drunk = Drunk({"headers": {"content-type": kind}, "body": body})
    check_frames(drunk.frames)
    assert drunk.message["error_kind"] in ("permanent", "transient")
    assert len(drunk.message["error_message"]) <= 2000
    assert not any(ord(each) < 32 for each in drunk.message["error_message"])


def test_a_key_goes_nowhere_but_to_its_server():
    with ScriptedServer({"body": "caught"}) as trap:
        away = {"status": 307, "headers": {"location": f"{trap.url}/v1/chat/completions"}}
        for answer in (away, {**away, "status": 301}, {**away, "status": 308}):
            with (
                ScriptedServer(answer) as server,
                pytest.raises(ProviderError, match="not followed"),
            ):
                Upstream().open_stream(
                    Target(server.url, "sk-secret"),
                    "/v1/chat/completions",
                    b"{}",
                    Call(1, "stream", key=None, model=None),
                )
        assert trap.connections == 0


@pytest.mark.parametrize(
    "ref",
    [
        WriterRef("../../otel", "k"),
        WriterRef("a?dir=read&x=", "k"),
        WriterRef("a\r\nX-Evil: 1", "k\r\nX-Evil: 1"),
        WriterRef("a b", "k&dir=read#"),
        WriterRef("a", "k HTTP/1.1\r\nHost: evil"),
        WriterRef("a\ud800", "\udfffk"),
    ],
)
def test_channel_ids_and_keys_stay_in_their_place(ref):
    url = channel_url("ws://127.0.0.1:1/base?token=t", ref, "write").geturl()
    path, _, query = url.partition("?")
    assert path.startswith("ws://127.0.0.1:1/base/ws/channels/")
    assert path.count("/") == 6
    assert query.count("&") == 2 and query.endswith("&dir=write")
    assert not set(" \r\n#") & set(url)


# --- hostile words on the bus ----------------------------------------------------------------


HOSTILE_MESSAGES = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b"\xff\xfe\x00",
    b"NaN",
    b'{"type":null}',
    b'{"type":["invokefunction"]}',
    b'{"type":"invokefunction"}',
    b'{"type":"invokefunction","invocation_id":"nameless","data":{}}',
    b'{"type":"invokefunction","function_id":[],"invocation_id":{},"data":1}',
    b'{"type":"invokefunction","function_id":"t::echo","invocation_id":7,"data":null}',
    b'{"type":"invokefunction","function_id":"nobody::here","invocation_id":"x","data":{}}',
    b'{"type":"invocationresult"}',
    b'{"type":"invocationresult","invocation_id":null,"error":"words"}',
    b'{"type":"invocationresult","invocation_id":"x","error":{"code":1,"message":[]}}',
    b'{"type":"triggerregistrationresult","error":{}}',
    b'{"type":"triggerregistrationresult","id":[],"error":{"code":"trigger_type_not_found"}}',
    b'{"type":"workerregistered","worker_id":{},"reattach_token":[],"features":{"a":1}}',
    b'{"type":"registrationrejected","code":"FUNCTION_NAMESPACE_CONFLICT","function_id":{}}',
    b'{"type":"error","error":null}',
    b'{"type":"registertrigger","config":' + b"[" * 100_000 + b"}",
    b"[" * 1_000_000,
    b'{"type":"invokefunction","function_id":"' + b"x" * 3_000_000 + b'","data":{}}',
    b'{"type":"ping","more":' + b"9" * 5000 + b"}",
]


def owed(words):
    """The ids of the results that a message is to be answered with."""
    try:
        message = jsontext.loads(words)
    except ValueError:
        return []
    if not isinstance(message, dict) or message.get("type") != "invokefunction":
        return []
    name = message.get("invocation_id")
    return [name] if isinstance(name, str) else []


def test_hostile_messages_of_an_engine_are_survived():
    """After each of them the next call is served, on the same connection."""
    heard = []
    engine = None
    with Server() as server:
        engine = Engine(server.url, name="t", version="1", description="d")
        engine.register(Function("t::echo", lambda call: (heard.append(call), call.reply(1))))
        engine.start()
        try:
            peer = server.accept()
            peer.say({"type": "workerregistered", "worker_id": "w"})
            for number, words in enumerate(HOSTILE_MESSAGES):
                peer.send(1 if number % 2 else 2, words)
                peer.say(
                    {
                        "type": "invokefunction",
                        "invocation_id": f"i{number}",
                        "function_id": "t::echo",
                        "data": {"n": number},
                    }
                )
                answered = []
                while (name := peer.message("invocationresult")["invocation_id"]) != f"i{number}":
                    answered.append(name)
                assert answered == owed(words), words[:80]
            assert engine.connections == 1
            assert [call.data for call in heard if call.id == "i3"] == [{"n": 3}]
        finally:
            engine.stop()
            peer.close()


# --- more than there is room for ---------------------------------------------------------------


@pytest.mark.thorough
def test_a_thousand_streams_at_once():
    """The configured number runs; each of the others is told at once, while these still run."""
    offered, limit = 1000, 64
    go = threading.Event()

    def hold(exchange):
        exchange.watch(120, go)

    answer = {"script": [EVENT_STREAM, {"send": WORD}, hold, {"send": FINISH}]}
    listing = answer_json({"object": "list", "data": [{"id": "demo", "object": "model"}]})
    routes = {"/v1/models": listing, "/v1/chat/completions": answer}
    with ScriptedServer(routes=routes) as server, LoopbackEngine() as engine:
        router = LoopbackRouter(engine.url, environ={})
        router.set_config("llamacpp", api_url=server.url)
        caller = BusClient(engine.url, "crowd")
        with router, ProviderWorker(Settings(url=engine.url, max_streams=limit, drain=0.0)):
            caller.start()
            try:
                assert router.wait_for_models("llamacpp")
                wait_for(lambda: caller.connected, "the caller")
                made = [engine.create_channel() for _ in range(offered)]
                message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
                began = time.monotonic()
                futures = [
                    caller.begin(
                        "provider::llamacpp::stream",
                        {
                            "writer_ref": writer,
                            "model": "demo",
                            "messages": [{**message, "timestamp": 1}],
                        },
                    )
                    for writer, _ in made
                ]
                refused = offered - limit
                wait_for(
                    lambda: sum(future.done() for future in futures) == refused,
                    "the answer to all who were refused",
                    timeout=60,
                )
                seconds = time.monotonic() - began
                running = engine.call("provider::llamacpp::status", {})
                assert running["active_streams"] == limit
                assert len([r for r in server.requests if r.method == "POST"]) == limit
                told = 0
                for future, (_, reader) in zip(futures, made, strict=True):
                    if not future.done():
                        continue
                    assert future.result() == {"ok": True}
                    with caller.open_channel(reader, "read") as channel:
                        frames = list(channel)
                    check_frames(frames)
                    (only,) = frames
                    assert json.loads(only)["error"]["error_kind"] == "rate_limited"
                    told += 1
                assert told == refused
                print(f"{refused} refused in {seconds:.1f} s")
                go.set()
                for future in futures:
                    assert future.result(60) == {"ok": True}
            finally:
                go.set()
                caller.stop()


# --- what an agent may ask for -----------------------------------------------------------------


@only_new
def test_options_reach_no_other_host_and_no_file(running, tmp_path):
    """On a real llama-server, which could fetch what an image or a schema names."""
    with ScriptedServer({"body": "caught"}) as trap:
        here = trap.url
        secret = tmp_path / "secret"
        secret.write_text("s3cret")
        options = [
            dict.fromkeys(("api_url", "base_url", "url", "host", "endpoint", "proxy"), here),
            {"headers": {"Host": "evil"}, "api_key": "x", "authorization": "y", "token": "z"},
            {"messages": [{"role": "user", "content": here}], "prompt": here, "model": here},
            {"lora": [{"id": 0, "path": str(secret)}], "model_path": str(secret)},
            {"json_schema": {"$ref": f"{here}/schema.json"}},
            {"chat_template_kwargs": {"messages": here, "include": str(secret)}},
            {"slot_save_path": str(secret), "cache_prompt": True, "id_slot": 0},
        ]
        for each in options:
            stream = running.stream(provider_options=each)
            try:
                stream.finish()
            except InvocationError as error:
                assert error.code == "provider/invalid_request", error
            check_frames([text.encode() for text in stream.texts]) if stream.texts else None
            assert "s3cret" not in "".join(stream.texts)
        for where in (f"{here}/cat.png", f"file://{secret}", str(secret)):
            image = {"type": "image", "mime": "image/png", "data": where}
            stream = running.stream(messages=[{"role": "user", "content": [image], "timestamp": 1}])
            stream.finish()
            assert "s3cret" not in "".join(stream.texts)
        schema = {"type": "json", "schema": {"$ref": f"{here}/schema.json"}}
        running.stream(response_format=schema).finish()
        assert settled(running.stream())["stop_reason"] == "end"
        assert trap.connections == 0


def test_json_is_never_written_deeper_than_it_is_read():
    deep = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="JSON"):
        jsontext.dumps(deep)
    # Taken apart by hand: to drop it in one go is recursion too, in the interpreter.
    while isinstance(deep, list):
        deep = deep.pop()
