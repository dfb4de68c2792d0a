"""``provider::<id>::status`` and the command that shows it."""

from __future__ import annotations

import argparse
import io
import json
import queue
import re
import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import jsonschema
import pytest
import requests
from screen import Screen

from provider_llamacpp import ProviderWorker, Settings, cli
from provider_llamacpp.calls import Call
from provider_llamacpp.commands import status, status_page
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.commands.terminal import Terminal
from provider_llamacpp.errors import BusError, ProviderError
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.stack import LocalStack
from provider_llamacpp.payloads import decode_stream
from provider_llamacpp.recent import RecentErrors
from provider_llamacpp.refusals import Refusals
from provider_llamacpp.runs import Runs
from provider_llamacpp.schemas import function_schemas
from provider_llamacpp.server.address import Target
from provider_llamacpp.server.modelevents import Progress
from provider_llamacpp.streaming import StreamRun
from provider_llamacpp.transcript.convert import Abilities

PATIENCE = 30.0
SCHEMA = function_schemas("llamacpp")["status"]["response_format"]


def user(text):
    return {"role": "user", "content": [{"type": "text", "text": text}], "timestamp": 1}


def wait_until(condition, seconds=PATIENCE):
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        pause.wait(0.02)
    return found


# --- one stream ------------------------------------------------------------------------------


def event(**chunk):
    return f"data: {json.dumps(chunk)}\n\n".encode()


def says(text):
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


def reads(processed, total=40):
    progress = {"total": total, "cache": 8, "processed": processed, "time_ms": 1}
    delta = {"role": "assistant", "content": None}
    return event(choices=[{"index": 0, "delta": delta}], prompt_progress=progress)


FINISH = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]) + event(
    choices=[], usage={"prompt_tokens": 40, "completion_tokens": 9, "total_tokens": 49}
)


class Gate:
    """A step that waits for the test. ``reached`` says that the stream waits in it."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self):
        self.reached.set()
        assert self.open.wait(PATIENCE)


class Peers:
    """A server and a caller whose every step is a gate or comes from a queue."""

    def __init__(self):
        self.resolve, self.slot, self.write = Gate(), Gate(), Gate()
        self.blocks = queue.SimpleQueue()
        self.body = None
        self.waiting = threading.Semaphore(0)
        self.id = "llamacpp"
        self.resumer = self.upstream = self
        self.catalog = self.notice = self.loads = None
        self.consumed = self.sent = 0
        self.slow = False
        self.failures = []

    # The provider.
    def target(self, call):
        self.resolve()
        return Target("http://h:1"), 100

    def abilities(self, model):
        return Abilities()

    def load_failure(self, model, target, call):
        return None

    def progress(self, model):
        return self.loads

    def answered(self, model):
        pass

    def failed(self, error):
        self.failures.append(error)

    # The server.
    @contextmanager
    def open_stream(self, target, path, body, call, *, encode, **more):
        self.body = json.loads(encode(body))
        self.slot()
        yield self

    def read(self):
        self.waiting.release()
        block = self.blocks.get(timeout=PATIENCE)
        self.consumed += len(block)
        return block

    def feed(self, *blocks):
        """Give these, and wait until the stream asks for the one after them."""
        for block in blocks:
            self.blocks.put(block)
            assert self.waiting.acquire(timeout=PATIENCE)

    def dial_ahead(self, target, call):
        return self

    def close(self):
        pass

    # The caller's channel.
    def open_channel(self, writer, call, meanwhile):
        meanwhile()
        return self

    def send(self, frames):
        if self.slow:
            self.write()
        self.sent += len(frames)

    def finish(self, frames):
        self.sent += len(frames)


@pytest.fixture
def peers():
    return Peers()


@contextmanager
def started(peers, **more):
    payload = {
        "writer_ref": {"channel_id": "c", "access_key": "k", "direction": "write"},
        "model": "m",
        "messages": [user("hi")],
        **more,
    }
    call = Call(7, "stream", key="r", model="m")
    runs = Runs(errors := RecentErrors())
    run = StreamRun(
        peers,
        decode_stream(payload),
        call,
        peers.open_channel,
        fat=False,
        runs=runs,
    )
    run.runs, run.errors = runs, errors
    runs.add(run)
    thread = threading.Thread(target=run.run)
    thread.start()
    try:
        yield run
    finally:
        for gate in (peers.resolve, peers.slot, peers.write):
            gate.open.set()
        peers.blocks.put(b"")
        thread.join(PATIENCE)
        assert not thread.is_alive()


def to_prompt(peers):
    peers.resolve.open.set()
    peers.slot.open.set()
    assert peers.waiting.acquire(timeout=PATIENCE)


def test_the_phases_of_a_stream(peers):
    with started(peers) as run:
        assert peers.resolve.reached.wait(PATIENCE)
        assert run.summary()["phase"] == "resolving"
        peers.resolve.open.set()
        assert peers.slot.reached.wait(PATIENCE)
        facts = run.summary()
        assert (facts["phase"], facts["to_headers"], facts["prompt"]) == ("queued", None, None)
        peers.loads = Progress("loading", share=0.25, stage="text_model")
        facts = run.summary()
        assert (facts["phase"], facts["loading"]["share"]) == ("loading model", 0.25)
        peers.slot.open.set()
        assert peers.waiting.acquire(timeout=PATIENCE)
        facts = run.summary()
        assert (facts["phase"], facts["to_first_token"]) == ("prompt", None)
        assert facts["loading"] is None
        assert facts["to_headers"] >= 0
        peers.feed(reads(8), reads(24))
        facts = run.summary(silence=3.0)
        assert (facts["phase"], facts["tokens"], facts["tokens_per_second"]) == ("prompt", 0, None)
        assert facts["prompt"] == {"total": 40, "processed": 24, "cached": 8}
        peers.feed(says("a"))
        facts = run.summary()
        assert (facts["phase"], facts["tokens"], facts["tokens_per_second"]) == (
            "generating",
            1,
            None,
        )
        assert facts["to_first_token"] >= facts["to_headers"]
        peers.feed(*[says("b")] * 4)
        facts = run.summary(silence=9.0)
        assert (facts["phase"], facts["tokens"]) == ("generating", 5)
        assert facts["tokens_per_second"] > 0
        peers.feed(FINISH)
    facts = run.summary()
    assert (facts["phase"], facts["tokens"], run.outcome) == ("done", 9, "end")
    assert facts["seconds"] == run.summary()["seconds"]  # the time stands still


def test_a_slow_caller_is_told_from_a_slow_server(peers):
    with started(peers) as run:
        to_prompt(peers)
        peers.feed(says("a"))
        peers.slow = True
        peers.blocks.put(says("b"))
        assert peers.write.reached.wait(PATIENCE)
        assert run.summary(silence=5.0)["phase"] == "blocked"
        # It may have begun to write just now, or nobody knows for how long it has.
        assert run.summary(silence=0.2)["phase"] == "generating"
        assert run.summary()["phase"] == "generating"


def test_a_caller_that_is_slow_from_the_start(peers):
    with started(peers) as run:
        to_prompt(peers)
        peers.slow = True
        peers.blocks.put(says("a"))
        assert peers.write.reached.wait(PATIENCE)
        assert run.summary(silence=5.0)["phase"] == "blocked"


def test_an_error_in_the_first_event_ends_the_reading(peers):
    with started(peers) as run:
        to_prompt(peers)
        peers.blocks.put(event(error={"code": 500, "message": "out of luck", "type": "server"}))
    assert run.error is not None and "out of luck" in run.error.message
    assert run.summary()["phase"] == "prompt"
    run.runs.remove(run)
    (error,) = run.errors.facts()
    assert (error["where"], error["kind"]) == ("stream 7", run.error.kind)
    assert "out of luck" in error["message"]


def test_an_invalid_request_is_an_error_too(peers):
    with started(peers, provider_options={"n": 2}) as run:
        peers.resolve.open.set()
    run.runs.remove(run)
    (error,) = run.errors.facts()
    assert error["kind"] == "invalid request"
    assert run.runs.totals()["outcomes"] == {"invalid request": 1}


def test_totals_hold_the_tokens_of_streams_that_have_ended(peers):
    with started(peers) as run:
        to_prompt(peers)
        peers.feed(says("a"), FINISH)
    run.runs.remove(run)
    assert run.runs.totals()["usage"] == {"input": 40, "output": 9}


@pytest.mark.parametrize(
    ("options", "asked"),
    [({}, True), ({"return_progress": False}, False), ({"return_progress": None}, True)],
)
def test_the_server_is_asked_for_its_progress(peers, options, asked):
    with started(peers, provider_options=options):
        peers.resolve.open.set()
        assert peers.slot.reached.wait(PATIENCE)
    assert peers.body["return_progress"] is asked


@pytest.mark.parametrize("progress", [{"total": 4}, {"total": "4", "processed": 1, "cache": 0}, {}])
def test_odd_progress_is_not_told(peers, progress):
    with started(peers) as run:
        to_prompt(peers)
        peers.feed(event(choices=[], prompt_progress=progress))
        assert run.summary()["prompt"] is None


# --- over the bus ----------------------------------------------------------------------------


@contextmanager
def stack_on(url, **settings):
    with (
        LocalStack(Settings(api_url=url, catalog_interval=0.2, drain=0.0, **settings)) as stack,
        Caller(stack.settings) as caller,
    ):
        yield stack, lambda: caller.call("provider::llamacpp::status", {}), caller


def stream(caller, text, **more):
    """Begin a stream; its frames."""
    writer, frames = caller.open_channel()
    payload = {"model": "m", "messages": [user(text)], "writer_ref": writer, **more}
    asking = threading.Thread(
        target=caller.call,
        args=("provider::llamacpp::stream", payload),
        kwargs={"timeout": PATIENCE},
        daemon=True,
    )
    asking.start()
    return frames


def test_running_streams_over_the_bus(llama_factory):
    server = llama_factory("loop", parallel=1, ctx_size=65536)
    with stack_on(server.url) as (_, ask, caller):
        frames = stream(caller, "hi", resolution_key="first")
        assert next(frames)["type"] == "start"
        second = stream(caller, "hi", resolution_key="second")

        def phases():
            return [each["phase"] for each in ask()["streams"]]

        wait_until(lambda: phases() == ["generating", "queued"])
        facts = wait_until(lambda: (s := ask())["streams"][0]["tokens"] > 20 and s)
        jsonschema.validate(facts, SCHEMA)
        running, waiting = facts["streams"]
        assert (running["request"], waiting["request"]) == ("first", "second")
        assert running["tokens_per_second"] > 0
        assert running["prompt"]["processed"] == running["prompt"]["total"] > 0
        assert waiting["tokens"] == 0
        assert waiting["prompt"] is None
        assert facts["active_streams"] == facts["calls"] == 2
        server_facts = facts["server"]
        assert (server_facts["state"], server_facts["url"], server_facts["slots"]) == (
            "ready",
            server.url,
            1,
        )
        assert server_facts["models"] == [
            a_model("loop", state="loaded", context_window=65536, slots=1)
        ]
        for key in ("second", "first"):  # or it would get the slot
            caller.call("provider::llamacpp::abort", {"request_id": key})
        assert list(second) == []
        facts = wait_until(lambda: not (s := ask())["streams"] and s)
        assert facts["outcomes"] == {"abort": 2}
        assert facts["errors"] == []


def test_looking_does_not_wake_a_sleeping_server(llama_factory):
    server = llama_factory(parallel=1, ctx_size=4096, sleep_idle_seconds=1)

    def sleeps():
        return requests.get(f"{server.url}/props", timeout=10).json()["is_sleeping"]

    with stack_on(server.url) as (_, ask, _):
        wait_until(sleeps)
        wait_until(lambda: ask()["server"]["state"] == "sleeping")
        seen = [ask()["server"] for _ in range(20)]
        # Through several looks of the keeper, which goes on asking.
        asked = wait_until(lambda: (s := ask()["server"])["asked"] < 0.1 and s)
        assert {each["state"] for each in [*seen, asked]} == {"sleeping"}
        assert sleeps()


def test_a_server_that_goes_away_and_errors_of_the_last_minutes(llama_factory):
    server = llama_factory(parallel=1, ctx_size=4096)
    with stack_on(server.url) as (_, ask, caller):
        server.stop()
        frames = list(stream(caller, "hi"))
        assert frames[-1]["type"] == "error"
        facts = wait_until(lambda: (s := ask())["server"]["state"] == "away" and s)
        jsonschema.validate(facts, SCHEMA)
        assert "not reachable" in facts["server"]["problem"]
        assert facts["server"]["url"] == server.url
        # The stream's error, then the keeper's, whichever came first.
        wheres = {each["where"].split()[0] for each in facts["errors"]}
        assert "stream" in wheres or "catalog" in wheres
        assert {each["kind"] for each in facts["errors"]} == {"transient"}
        with pytest.raises(BusError):
            caller.call("provider::llamacpp::count_tokens", {"model": "m", "messages": [user("x")]})
        where = [each["where"] for each in ask()["errors"]]
        assert any(each.startswith("count_tokens") for each in where)


def test_a_full_worker_still_answers_and_tells_of_refusals(llama_factory):
    server = llama_factory("loop", parallel=1, ctx_size=65536)
    with stack_on(server.url, max_streams=1, max_requests=1) as (_, ask, caller):
        frames = stream(caller, "hi", resolution_key="r")
        assert next(frames)["type"] == "start"
        (refused,) = stream(caller, "hi")
        assert refused["error"]["error_kind"] == "rate_limited"
        facts = wait_until(lambda: (s := ask())["errors"] and s)
        assert facts["active_streams"] == facts["max_streams"] == 1
        (error,) = facts["errors"]
        assert (error["where"], error["kind"]) == ("stream refused", "rate_limited")
        caller.call("provider::llamacpp::abort", {"request_id": "r"})
        list(frames)


def test_a_lost_engine_is_told(llama):
    with stack_on(llama.url) as (stack, _, _):
        stack.engine.drop_worker("provider-llamacpp")
        wait_until(lambda: stack.worker.stats()["reconnects"] == 1)
        errors = wait_until(lambda: stack.worker.stats()["errors"])
        assert ("engine", "disconnected") in [(each["where"], each["kind"]) for each in errors]


def test_stats_before_the_start_and_without_an_engine():
    facts = ProviderWorker(Settings(api_url="http://127.0.0.1:9")).stats()
    jsonschema.validate(facts, SCHEMA)
    assert (facts["connected"], facts["uptime"]) == (False, 0.0)
    assert facts["server"]["state"] == "unknown"


# --- the command -----------------------------------------------------------------------------


def a_stream(number, phase, **more):
    return {
        "stream": number,
        "request": None,
        "model": "qwen3-0.6b",
        "phase": phase,
        "seconds": 12.3,
        "to_headers": 0.1,
        "to_first_token": None,
        "silent": 0.5,
        "tokens": 0,
        "tokens_per_second": None,
        "prompt": None,
        "loading": None,
        "frames": 0,
        "bytes": 0,
        "usage": {},
        **more,
    }


def a_model(id, **facts):
    return {"id": id, "progress": None, **facts}


def some_stats(*streams, **more):
    facts = {
        "version": "0.1.0",
        "id": "llamacpp",
        "uptime": 7400.0,
        "connected": True,
        "reconnects": 2,
        "resumes": 0,
        "server": {
            "state": "ready",
            "seconds": 100.0,
            "asked": 4.0,
            "url": "http://127.0.0.1:8080",
            "problem": None,
            "build": "b11434-abc",
            "router_mode": False,
            "slots": 2,
            "models": [a_model("qwen3-0.6b", state="loaded", context_window=8192, slots=2)],
            "more_models": 0,
        },
        "active_streams": len(streams),
        "max_streams": 64,
        "streams": list(streams),
        "calls": len(streams),
        "outcomes": {"end": 20, "abort": 1},
        "frames": 1,
        "bytes": 1,
        "usage": {"input": 2_345_678, "output": 8_123},
        "errors": [],
        "last_error": None,
        "providers": [],
    }
    facts.update(more)
    jsonschema.validate(facts, SCHEMA)
    return facts


HALF = {"activity": "loading", "share": 0.5, "stage": "text_model", "done": None, "total": None}
EVERY_PHASE = [
    a_stream(1, "accepted"),
    a_stream(2, "connecting"),
    a_stream(3, "resolving"),
    a_stream(4, "queued"),
    a_stream(5, "prompt", prompt={"total": 4096, "processed": 1024, "cached": 0}),
    a_stream(6, "generating", tokens=345, tokens_per_second=23.14),
    a_stream(7, "generating", tokens=345, tokens_per_second=23.14, silent=7.0),
    a_stream(8, "blocked", tokens=99, tokens_per_second=1.0, silent=65.0),
    a_stream(9, "ending"),
    a_stream(10, "a new one"),
    a_stream(12, "loading model", loading=HALF),
    a_stream(11, "queued", model="a-very-long-name-of-a-model-" * 4),
]
TERRIBLE = {
    "at": 1_760_000_000_000,
    "where": "stream 12",
    "kind": "transient",
    "message": "llama-server is not reachable at 127.0.0.1:8080 (refused) \x1b[31m " + "word " * 30,
    "count": 3,
}


def drawn(look, *, rich, height=None):
    """The page's lines on a terminal of 80 columns."""
    out = io.StringIO()
    terminal = Terminal(out, width=80, live=True, rich=rich)
    content = status_page.page(terminal, look, height=height)
    if rich:
        terminal.console.print(status_page.renderable(terminal, content))
    else:
        status_page.show(terminal, content)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()


@pytest.mark.parametrize("rich", [True, False])
def test_the_page_at_80_columns(rich):
    facts = some_stats(*EVERY_PHASE, errors=[TERRIBLE, TERRIBLE])
    lines = drawn(status_page.Look(facts, 1_760_000_000.0), rich=rich)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    for word in (
        "up 2 h 3 min",
        "engine connected",
        "http://127.0.0.1:8080: ready",
        "b11434-abc, 2 slots, asked 4.0 s ago",
        "qwen3-0.6b: loaded, 8192 tokens a slot",
        "12 of 64 streams",
        "loading its model 50%",
        "queued in the server",
        "prompt 1024 of 4096 (25%)",
        "generating, silent 7.0 s",
        "slow caller for 1 min 5 s",
        "23.1",
        "a new one",
        "21 streams ended (20 done, 1 abort), 2.3M tokens in, 8.1k out, 2 reconnects",
        "transient (stream 12, 3 times)",
        "\\x1b[31m",
    ):
        assert word in text, word
    assert "\x1b" not in text.replace("\\x1b", "")


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"state": "away", "seconds": 200.0, "problem": "refused " * 20}, "away for 3 min 20 s"),
        ({"state": "loading"}, "loading its model for 1 min 40 s"),
        ({"state": "sleeping"}, "sleeping, wakes when asked"),
        ({"state": "refused"}, "mend api_key"),
        ({"state": "no model", "models": []}, "serves no model"),
        ({"state": "failing"}, "not as it should"),
        ({"state": "odd"}, "odd"),
        (
            {
                "state": "unknown",
                "url": None,
                "seconds": None,
                "asked": None,
                "build": None,
                "slots": None,
                "models": [],
            },
            "at an unknown address: not asked yet",
        ),
        ({"router_mode": True, "slots": None}, "router mode"),
        ({"slots": 1}, "1 slot,"),
        (
            {
                "models": [
                    a_model(f"m{n}", state="unloaded", context_window=1, slots=None)
                    for n in range(8)
                ],
                "more_models": 4,
            },
            "and 7 models more",
        ),
    ],
)
def test_the_server_on_the_page(server, words):
    facts = some_stats(connected=False, outcomes={}, usage={}, reconnects=0)
    facts["server"].update(server)
    lines = drawn(status_page.Look(facts, 1.0), rich=False)
    text = "\n".join(lines)
    assert words in text
    assert "engine away" in text
    assert "0 streams ended\n" in text + "\n"
    assert max(map(len, lines)) <= 80


def test_the_other_providers_are_on_the_page():
    others = [
        {"id": "llamacpp", "url": "http://127.0.0.1:8080", "state": "ready", "active_streams": 0},
        {"id": "pi5", "url": "http://pi5:8080", "state": "away", "active_streams": 1},
        {"id": "pi6", "url": None, "state": "unknown", "active_streams": 2},
    ]
    text = "\n".join(drawn(status_page.Look(some_stats(providers=others), 1.0), rich=False))
    assert "beside it pi5 at http://pi5:8080: away, 1 stream\n" in text
    assert "beside it pi6 at an unknown address: not asked yet, 2 streams" in text
    assert "beside it llamacpp" not in text


def test_the_terminals_own_word_for_ctrl_c_has_a_line_of_its_own():
    pytest.importorskip("rich")
    facts = some_stats()
    lines = drawn(status_page.Look(facts, 1.0), rich=True)
    assert lines[-2:] == [status_page._totals(facts), ""]


def test_ctrl_c_waits_until_the_picture_is_whole():
    drawn_to_its_end = False
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), status.whole():
        signal.raise_signal(signal.SIGINT)
        drawn_to_its_end = True
    assert drawn_to_its_end
    assert signal.getsignal(signal.SIGINT) is before
    thread = threading.Thread(target=lambda: status.whole().__enter__())
    thread.start()
    thread.join(PATIENCE)


def test_streams_that_were_taken_up_again_are_counted_on_the_page():
    assert "taken up" not in status_page._totals(some_stats())
    assert ", 3 taken up again, 2 reconnects" in status_page._totals(some_stats(resumes=3))


def test_a_small_terminal_shows_what_fits():
    errors = [{**TERRIBLE, "message": f"number {n}"} for n in range(9)]
    facts = some_stats(*[a_stream(n, "queued") for n in range(64)], errors=errors)
    lines = drawn(status_page.Look(facts, 1.0), rich=True, height=24)
    assert len(lines) <= 24 + 2 * status_page.FEW
    text = "\n".join(lines)
    assert "and 54 more" in text
    assert "errors of the last minutes (9)" in text
    assert "number 8" in text
    assert "number 5" not in text


def test_an_answer_that_is_old_says_so():
    lines = drawn(status_page.Look(some_stats(), 1.0, "the worker has left the bus"), rich=False)
    assert lines[1].startswith("the worker has left the bus; what follows it said at ")
    assert "engine connected" not in lines[0]


def test_watching_goes_on_when_the_worker_is_away():
    answers = [
        {"n": 1},
        BusError("function_not_found", "no"),
        BusError("disconnected", "there is no connection"),
        {"n": 2},
    ]
    pauses = []

    def ask():
        answer = answers.pop(0)
        if isinstance(answer, BusError):
            raise answer
        return answer

    looks = status.watch(ask, pause=pauses.append, interval=3.0, clock=lambda: 5.0)
    first, gone, silent, back = (next(looks) for _ in range(4))
    assert (first.stats, first.problem) == ({"n": 1}, None)
    assert (gone.stats, gone.problem) == ({"n": 1}, "the worker has left the bus")
    assert "no connection" in silent.problem
    assert (back.stats, back.problem) == ({"n": 2}, None)
    assert pauses == [3.0] * 3


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.9, "59 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations(seconds, words):
    assert status_page.duration(seconds) == words


def test_short_numbers():
    assert [status_page.short(n) for n in (0, 999, 1000, 81_234, 999_949, 999_950)] == [
        "0",
        "999",
        "1.0k",
        "81.2k",
        "999.9k",
        "1.0M",
    ]


@pytest.fixture(scope="module")
def running(llama):
    with LocalStack(Settings(api_url=llama.url)) as stack:
        yield stack


def test_once_as_text_and_as_json(running, capsys):
    url = running.settings.url
    assert cli.main(["status", "--url", url, "--once"]) == 0
    text = capsys.readouterr().out
    assert "engine connected" in text
    assert "demo: loaded, 8192 tokens a slot" in text
    assert cli.main(["status", "--url", url, "--once", "--json"]) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), SCHEMA)


@pytest.fixture
def interrupted(monkeypatch):
    """The third look is interrupted as by Ctrl-C."""
    real = status.watch

    def watch(ask, *, pause, interval):
        looks = real(ask, pause=lambda seconds: None, interval=interval)
        yield from (next(looks), next(looks))
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "watch", watch)


def test_watching_in_plain_text_writes_a_block_for_each_look(running, capsys, interrupted):
    assert cli.main(["status", "--url", running.settings.url]) == 0
    blocks = [line for line in capsys.readouterr().out.splitlines() if "engine connected" in line]
    assert len(blocks) == 2


def test_watching_as_json_writes_a_line_for_each_look(running, capsys, interrupted):
    assert cli.main(["status", "--url", running.settings.url, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["llamacpp"] * 2


def test_json_leaves_out_looks_that_failed(capsys):
    looks = [status_page.Look({}, 1.0, "away"), status_page.Look({"n": 2}, 1.0)]
    options = argparse.Namespace(json=True, once=False)
    terminal = Terminal(io.StringIO())
    status._display(terminal, status_page.Look({"n": 1}, 1.0), iter(looks), options)
    assert capsys.readouterr().out == '{"n": 1}\n{"n": 2}\n'


def test_watching_on_a_terminal_draws_in_place(running, interrupted, monkeypatch):
    class Tty(io.StringIO):
        def isatty(self):
            return True

    out = Tty()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["status", "--url", running.settings.url]) == 0
    text = out.getvalue()
    assert text.count("engine connected") >= 2
    assert "\x1b[1A" in text  # the cursor went up again


@pytest.mark.parametrize("columns", [80, 40, len("0 streams ended")])
def test_ctrl_c_leaves_one_picture_on_the_screen(columns, running, monkeypatch):
    """The terminal writes "^C" where the cursor is, which may be behind a line that is full."""
    pytest.importorskip("rich")

    class Tty(io.StringIO):
        def isatty(self):
            return True

    out = Tty()
    real = status.watch

    def watch(ask, *, pause, interval):
        looks = real(ask, pause=lambda seconds: None, interval=interval)
        yield from (next(looks), next(looks))
        out.write("^C")
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "watch", watch)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "40")
    assert cli.main(["status", "--url", running.settings.url]) == 0
    screen = Screen(columns, 40).write(out.getvalue())
    text = "".join(screen.text())
    for word in ("provider-l", "of 64 streams", "streams ended"):
        assert text.count(word) == 1, screen.text()
    assert screen.cursor


def test_without_a_worker_it_says_what_to_do(capsys):
    with LoopbackEngine() as engine:
        assert cli.main(["status", "--url", engine.url, "--once"]) == 1
        told = capsys.readouterr().err
        assert "provider::llamacpp::status" in told
        assert engine.url in told
        assert "--id" in told


def test_without_an_engine_it_says_what_to_do(capsys):
    assert cli.main(["status", "--url", "ws://127.0.0.1:9", "--once"]) == 1
    assert "--url" in capsys.readouterr().err


def test_a_worker_that_does_not_answer():
    settings = SimpleNamespace(url="ws://h:1")
    words = status._missing(BusError("TIMEOUT", "nothing"), "f", settings)
    assert "does not answer" in words and "nothing" in words


def test_a_reader_that_has_seen_enough(running, monkeypatch, tmp_path):
    closed = (tmp_path / "out").open("w")

    def broken(*args):
        raise BrokenPipeError

    monkeypatch.setattr(status, "_display", broken)
    monkeypatch.setattr("sys.stdout", closed)
    assert cli.main(["status", "--url", running.settings.url, "--once"]) == 0
    closed.close()


@pytest.mark.parametrize("text", ["0", "-1", "nan", "x"])
def test_an_interval_that_cannot_be_used(capsys, text):
    with pytest.raises(SystemExit):
        cli.main(["status", "--interval", text])
    assert "--interval" in capsys.readouterr().err


def test_an_interval_of_its_own():
    options = cli.parser(["status"]).parse_args(["status", "--interval", "2.5"])
    assert options.interval == 2.5


def test_refused_short_calls_are_told(peers):
    errors = RecentErrors()
    from provider_llamacpp.calls import CallRegistry
    from provider_llamacpp.handlers import Handlers, Means

    means = Means(
        registry=CallRegistry({"stream": 0, "request": 0}),
        runs=Runs(),
        pool=None,
        refusals=Refusals("test"),
        open_channel=None,
        fat_deltas=False,
        errors=errors,
        stats=dict,
        outlets=None,
    )
    answers = []
    invocation = SimpleNamespace(data={}, fail=lambda *words: answers.append(words))
    Handlers(peers, means).embed(invocation)
    assert answers
    (error,) = errors.facts()
    assert (error["where"], error["kind"]) == ("embed", "rate_limited")

    means.refusals.shutdown()
    Handlers(peers, means).stream(invocation)
    assert answers[1][0] == "invocation_failed"
    assert answers[1][1].startswith("provider/rate_limited: 0 stream calls are running")


def test_a_refusal_wakes_the_keeper_only_where_it_thinks_that_all_is_well():
    from provider_llamacpp.provider import Provider

    router = SimpleNamespace()
    provider = Provider(Settings(), router, None, None, bool)
    provider._declare = False  # as in the middle of a round
    router.on_refused()
    assert (provider._declare, provider._nudged) == (True, False)
    provider._declare, provider._content = False, True
    router.on_refused()
    assert (provider._declare, provider._nudged) == (True, True)
    provider._nudged = False
    router.on_refused()
    assert not provider._nudged


def test_a_problem_of_the_keeper_is_told_once(peers):
    from provider_llamacpp.provider import Provider

    errors = RecentErrors()
    provider = Provider(Settings(), SimpleNamespace(), None, None, bool, errors)
    for _ in range(3):
        provider._report("catalog", ProviderError("transient", "away"))
    provider._report("declare", BusError("router/x", "no"))
    assert [(e["where"], e["kind"], e["count"]) for e in errors.facts()] == [
        ("catalog", "transient", 1),
        ("declare", "router/x", 1),
    ]
