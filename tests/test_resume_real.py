"""Streams that outlive their connection, through the whole path, on real llama-servers.

Each test runs against the llama-server program and against ``xllamacpp``, as far as they are here
and keep streams; router mode needs the program.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import random
import signal
import threading
import time

import pytest
import requests
from proxy import Cut, Proxy
from test_real import WEATHER, Turn, ask, slots_busy, texts, user, wait_until

from provider_llamacpp import Settings, jsontext
from provider_llamacpp.calls import Call
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.events.classify import classify
from provider_llamacpp.local import model as demo
from provider_llamacpp.local.stack import LocalStack
from provider_llamacpp.server import resume
from provider_llamacpp.server.address import Target
from provider_llamacpp.server.resume import Resumer, _Known
from provider_llamacpp.server.upstream import Upstream

PATIENCE = 30.0
CHAT = "POST /v1/chat/completions"
REPLAY = "GET /v1/stream?"
SEED = 11434

OFTEN = {"llamacpp": {"sse_ping_interval": 1}}
ASKS = (
    {"messages": "hi"},
    {"messages": "hi", "thinking_level": "low"},
    {"messages": "the weather in both?", "tools": [WEATHER]},
)


@pytest.fixture(params=["program", "xllamacpp"])
def source(request):
    if request.param == "program":
        request.getfixturevalue("llama_program")
    else:
        pytest.importorskip("xllamacpp")
    return request.param


@pytest.fixture
def keeping(llama_factory, source):
    """Starts a server that keeps streams."""

    def start(variant="demo", **options):
        server = llama_factory(variant, source=source, **{"parallel": 2, **options})
        asked = requests.post(
            f"{server.url}/v1/streams/lookup", json={"conversation_ids": []}, timeout=10
        )
        if asked.status_code != 200:
            pytest.skip(f"this {source} keeps no streams")
        return server

    return start


class Path:
    """Router, worker, proxy and caller in front of one server."""

    def __init__(self, proxy, stack, caller):
        self.proxy, self.stack, self.caller = proxy, stack, caller

    def replays(self):
        return [each for each in self.proxy.requests() if each.startswith(REPLAY)]

    def streams(self):
        return self.stack.worker.stats()["streams"]


@pytest.fixture
def path():
    """Makes the path to a server; the worker reaches it through a proxy, and resumes."""
    paths = []

    def make(server, **settings):
        proxy = Proxy(server.url)
        proxy.__enter__()
        paths.append(proxy)
        options = {"api_url": proxy.url, "resume": "on", "drain": 0.0, **settings}
        stack = LocalStack(Settings(**options))
        stack.__enter__()
        paths.append(stack)
        caller = Caller(stack.settings)
        paths.append(caller)
        return Path(proxy, stack, caller)

    yield make
    for each in reversed(paths):
        each.__exit__(None, None, None)


def told(message):
    """What the caller got, without what differs from run to run."""
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return blocks, message["stop_reason"], message["usage"]["output"]


def warned(message):
    return [each for each in message.get("warnings", ()) if "taken up again" in each]


def conversation(link):
    return link.headers["x-conversation-id"]


def kept(server, link):
    """What the server says of the stream that was asked for over ``link``."""
    payload = {"conversation_ids": [conversation(link)]}
    (row,) = requests.post(f"{server.url}/v1/streams/lookup", json=payload, timeout=10).json()
    return row


def body_sent(proxy):
    """Body bytes of the newest chat answer, with their framing."""
    link = [link for link in proxy.links if link.request.startswith(CHAT)][-1]
    assert link.ended.wait(PATIENCE)
    return link.body


@pytest.mark.parametrize("cuts", [30, pytest.param(200, marks=pytest.mark.thorough)])
def test_cuts_anywhere(keeping, path, cuts):
    """The connection breaks at random bytes of the body; the caller sees what it saw uncut."""
    way = path(keeping(ctx_size=8192))
    uncut = []
    for each in ASKS:
        message = ask(way.caller, **each)
        uncut.append((told(message), body_sent(way.proxy)))
        assert "warnings" not in message
    assert way.replays() == []
    dice = random.Random(SEED)
    breaks = 0
    for number in range(cuts):
        wanted, size = uncut[number % len(ASKS)]
        # The first bytes are the length of the first chunk: with them alone nothing has come.
        cut = Cut(dice.randrange(8, size + 1), how=dice.choice(["close", "reset"]))
        way.proxy.plan = lambda link, cut=cut: cut if link.request.startswith(CHAT) else None
        seen = len(way.replays())
        message = ask(way.caller, **ASKS[number % len(ASKS)])
        assert told(message) == wanted, (number, cut)
        again = len(way.replays()) - seen
        breaks += again
        assert len(warned(message)) == again, (number, cut)
    # A cut behind the end marker breaks nothing; nearly all others do.
    assert breaks > cuts * 0.9
    assert way.stack.worker.stats()["resumes"] == breaks
    print(f"{breaks} of {cuts} streams were taken up again")


def test_every_connection_breaks(keeping, path):
    """A line that carries a few hundred bytes at a time."""
    way = path(keeping(ctx_size=8192))
    wanted = told(ask(way.caller, "hi", thinking_level="low"))
    dice = random.Random(SEED)

    def plan(link):
        mine = link.request.startswith((CHAT, REPLAY))
        return Cut(dice.randrange(8, 700), how=dice.choice(["close", "reset"])) if mine else None

    way.proxy.plan = plan
    message = ask(way.caller, "hi", thinking_level="low")
    assert told(message) == wanted
    assert len(warned(message)) == 1
    assert len(way.replays()) > 5


def test_what_is_read_is_what_the_server_keeps(keeping):
    """Byte for byte, with the comments that the server sends while it reads a long prompt."""
    server = keeping("slow", parallel=1, ctx_size=8192)
    prompt = [{"role": "user", "content": "word " * 800}]
    body = {"messages": prompt, "stream": True, "max_tokens": 40, "sse_ping_interval": 1}
    dice = random.Random(SEED)
    call = Call(1, "stream", key=None, model=None)
    with Proxy(server.url, lambda link: Cut(dice.randrange(3, 900))) as proxy:
        by = Resumer(Upstream(), "on", PATIENCE)
        # Asked before, as the answer to that is cut as well.
        by._known[proxy.url] = _Known(None, able=True, local=True)
        with by.open_stream(
            Target(proxy.url),
            "/v1/chat/completions",
            body,
            call,
            encode=jsontext.dumpb,
            headers={},
            classify=classify,
        ) as stream:
            got = b"".join(iter(stream.read, b""))
    query = {"conv_id": stream._conversation, "from": "0"}
    whole = requests.get(f"{server.url}/v1/stream", params=query, timeout=10).content
    assert got == whole
    assert got.endswith(b"data: [DONE]\n\n")
    assert b":\n\n" in got
    assert stream.resumed > 5


def test_a_line_that_is_down_for_a_while(keeping, path):
    """One uninterrupted turn: what was generated meanwhile comes in one go."""
    way = path(keeping("slow", parallel=1))
    turn = Turn(way.caller, "forever", model="slow", max_output_tokens=400)
    turn.until("text_delta")
    way.proxy.refuse()
    way.proxy.cut()
    # Until the worker has noticed and was refused at least once.
    wait_until(lambda: not [link for link in way.proxy.links if not link.ended.is_set()])
    assert not threading.Event().wait(1.0)
    way.proxy.accept()
    message = turn.end()
    assert texts(message)["text"].split() == loop_words(400)
    assert [frame["type"] for frame in turn.frames].count("start") == 1
    assert (message["stop_reason"], len(warned(message))) == ("length", 1)


def loop_words(count):
    return list(itertools.islice(itertools.cycle(demo.LOOP.split()), count))


def busy_after(server, ended):
    """Seconds from ``ended`` until the server generates nothing any more."""
    wait_until(lambda: slots_busy(server.url) == 0)
    return time.monotonic() - ended


def test_an_abort_stops_the_generation(keeping, path):
    server = keeping("slow")
    way = path(server)
    turn = Turn(way.caller, "forever", model="slow")
    turn.until("text_delta")
    assert slots_busy(server.url) == 1
    turn.abort()
    assert busy_after(server, time.monotonic()) < 1.0
    turn.end()


def test_without_the_word_it_would_go_on(keeping):
    """What the DELETE is for: with the header, closing the connection stops nothing."""
    server = keeping()
    body = {"messages": [{"role": "user", "content": "forever"}], "stream": True}
    header = {"X-Conversation-Id": "left-alone"}
    url = f"{server.url}/v1/chat/completions"
    with requests.post(url, json=body, headers=header, stream=True, timeout=10) as answer:
        next(answer.iter_content(100))
    assert not threading.Event().wait(1.0)
    assert slots_busy(server.url) == 1
    requests.delete(f"{server.url}/v1/stream?conv_id=left-alone", timeout=10)
    wait_until(lambda: slots_busy(server.url) == 0)


def test_a_caller_that_leaves_stops_the_generation(keeping, path):
    server = keeping("slow")
    way = path(server)
    writer, frames = way.caller.open_channel()
    payload = {"model": "slow", "messages": [user("forever")], "writer_ref": writer}
    asking = threading.Thread(target=way.caller.call, args=["provider::llamacpp::stream", payload])
    asking.start()
    next(frames)
    left = time.monotonic()
    frames.close()
    assert busy_after(server, left) < 3.0
    asking.join(PATIENCE)


def test_a_stop_of_the_worker_stops_the_generation(keeping, path):
    server = keeping("slow")
    way = path(server)
    turn = Turn(way.caller, "forever", model="slow")
    turn.until("text_delta")
    way.stack.worker.stop(drain=0)
    assert busy_after(server, time.monotonic()) < 1.0
    assert turn.end()["error_kind"] == "transient"


def test_an_abort_while_the_line_is_down(keeping, path):
    """Nobody can be told then: the server hears of it as soon as it is reached."""
    server = keeping("slow")
    way = path(server)
    turn = Turn(way.caller, "forever", model="slow")
    turn.until("text_delta")
    way.proxy.refuse()
    way.proxy.cut()
    turn.abort()
    turn.end()
    assert slots_busy(server.url) == 1
    way.proxy.accept()
    wait_until(lambda: slots_busy(server.url) == 0)


def test_an_abort_while_the_line_is_dead(keeping, path):
    """The server cannot be told and does not refuse either: that holds up nobody for long."""
    server = keeping("slow")
    way = path(server)
    turn = Turn(way.caller, "forever", model="slow")
    turn.until("text_delta")
    way.proxy.hold()
    aborted = time.monotonic()
    assert turn.abort()["aborted"]
    turn.end()
    wait_until(lambda: not way.streams())
    assert time.monotonic() - aborted < 5.0
    assert slots_busy(server.url) == 1
    way.proxy.release()
    wait_until(lambda: slots_busy(server.url) == 0)


def test_an_abort_while_it_waits_for_a_slot(keeping, path):
    server = keeping("slow", parallel=1)
    way = path(server)
    running = Turn(way.caller, "forever", model="slow")
    running.until("text_delta")
    waiting = Turn(way.caller, "forever", model="slow")
    wait_until(lambda: [each["phase"] for each in way.streams()][-1:] == ["queued"])
    assert waiting.abort()["aborted"]
    waiting.end()
    running.abort()
    running.end()
    # Some builds look for cancelled requests once a second only.
    assert busy_after(server, time.monotonic()) < 5.0


def test_a_buffer_that_dropped_what_was_missed(keeping, path):
    """The server keeps the last 4 MiB of a stream."""
    server = keeping("loop", parallel=1, ctx_size=32768)
    way = path(server)
    # Makes events of some kilobytes.
    options = {"llamacpp": {"logprobs": True, "top_logprobs": 20}}
    turn = Turn(way.caller, "hi", model="loop", max_output_tokens=8192, provider_options=options)
    turn.until("text_delta")
    (link,) = [each for each in way.proxy.links if each.request.startswith(CHAT)]
    way.proxy.refuse()
    way.proxy.cut()
    assert link.ended.wait(PATIENCE)

    wait_until(lambda: kept(server, link)["total_bytes"] > 5 << 20, 60.0)
    way.proxy.accept()
    message = turn.end()
    assert message["error_kind"] == "transient"
    assert "no longer holds what was missed" in message["error_message"]
    # However little had come before the cut.
    assert texts(message)["text"].startswith(demo.LOOP.split()[0])
    assert busy_after(server, time.monotonic()) < 2.0


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_server_that_ends(keeping, path, how, monkeypatch):
    """Told to stop, the program keeps the connection and says nothing more, for ever."""
    monkeypatch.setattr(resume, "SILENCE_SECONDS", 4.0)
    server = keeping("slow")
    way = path(server, resume_budget=1.0)
    turn = Turn(way.caller, "forever", model="slow", provider_options=OFTEN)
    turn.until("text_delta")
    getattr(server, how)()
    message = turn.end()
    assert message["error_kind"] == "transient"
    assert "could not be taken up in 1 s" in message["error_message"]
    assert texts(message)["text"].startswith(demo.LOOP.split()[0])


def test_a_stream_that_somebody_else_stops(keeping, path):
    """A clean end without a finish reason: it was no break, and is not tried again."""
    server = keeping()
    way = path(server)
    turn = Turn(way.caller, "forever")
    turn.until("text_delta")
    (link,) = [each for each in way.proxy.links if each.request.startswith(CHAT)]
    query = {"conv_id": conversation(link)}
    requests.delete(f"{server.url}/v1/stream", params=query, timeout=10)
    message = turn.end()
    assert message["error_kind"] == "transient"
    assert "no finish reason" in message["error_message"]
    assert way.replays() == []


def test_asking_wakes_nobody(keeping):
    server = keeping(sleep_idle_seconds=1)

    def asleep():
        return requests.get(f"{server.url}/props", timeout=10).json()["is_sleeping"]

    wait_until(asleep)
    for ids in ([], ["unknown"]):
        payload = {"conversation_ids": ids}
        asked = requests.post(f"{server.url}/v1/streams/lookup", json=payload, timeout=10)
        assert (asked.status_code, asked.json()) == (200, [])
    requests.delete(f"{server.url}/v1/stream?conv_id=unknown", timeout=10)
    assert asleep()


# Router mode


@pytest.fixture
def many(llama_program, llama_factory, tmp_path, model_path):
    """A server in router mode, with two models."""
    for name in ("demo", "slow"):
        (tmp_path / f"{name}.gguf").symlink_to(model_path(name))
    return llama_factory(models_dir=tmp_path, source="program", parallel=1)


def children(pid):
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return [int(each) for task in tasks for each in (task / "children").read_text().split()]


def test_a_break_in_router_mode(many, path):
    way = path(many)
    wanted = told(ask(way.caller, "hi"))
    way.proxy.plan = lambda link: Cut(1500) if link.request.startswith(CHAT) else None
    message = ask(way.caller, "hi")
    assert told(message) == wanted
    assert len(warned(message)) == 1
    (replay,) = way.replays()
    assert "%3A%3Ademo&from=" in replay


def test_an_abort_in_router_mode(many, path):
    way = path(many)
    turn = Turn(way.caller, "forever", model="slow")
    turn.until("text_delta")
    busy = f"{many.url}/slots?model=slow"
    turn.abort()
    turn.end()
    ended = time.monotonic()
    wait_until(lambda: not requests.get(busy, timeout=10).json()[0]["is_processing"])
    assert time.monotonic() - ended < 1.0


def test_an_abort_while_the_model_loads(llama_program, llama_factory, tmp_path, model_path, path):
    (tmp_path / "heavy.gguf").symlink_to(model_path("heavy"))
    server = llama_factory(models_dir=tmp_path, source="program", parallel=1)
    way = path(server)
    turn = Turn(way.caller, "forever", model="heavy")
    wait_until(lambda: [each["phase"] for each in way.streams()] == ["queued"])
    # Before the request is out there is nothing to stop.
    wait_until(lambda: any(each.startswith(CHAT) for each in way.proxy.requests()))
    assert turn.abort()["aborted"]
    turn.end()
    wait_until(lambda: not way.streams())
    assert [each for each in way.proxy.requests() if each.startswith("DELETE /v1/stream?")]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds the child in /proc")
def test_a_child_that_is_killed(many, path):
    way = path(many)
    turn = Turn(way.caller, "forever", model="slow")
    turn.until("text_delta")
    (child,) = children(many.pid)
    os.kill(child, signal.SIGKILL)
    killed = time.monotonic()
    message = turn.end()
    # No budget is waited out: the server in front of it knows.
    assert time.monotonic() - killed < 10.0
    assert message["error_kind"] == "transient"
    assert "proxy error" in message["error_message"]
    assert texts(message)["text"].startswith(demo.LOOP.split()[0])
    assert way.replays() == []
