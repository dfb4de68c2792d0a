"""A server that sleeps when it is idle: nothing that the worker does by itself wakes it, or keeps
it awake.

The worker looks at the server ten times a second here, and others look at the worker.
"""

from __future__ import annotations

import threading
import time

import pytest
import requests
from peers import PATIENCE, wait_for
from router_mode import front_of, post, states, user
from scripted_llama import ScriptedLlama, answers_after, row

from provider_llamacpp.commands import doctor
from provider_llamacpp.local.llama import LlamaOptions, LlamaServer
from provider_llamacpp.local.model import SENTENCE, write_model

pytestmark = pytest.mark.timeout(120)

IDLE = 1
"""Seconds after which the servers of these tests sleep."""


def sleeps(server):
    return requests.get(f"{server.url}/props", timeout=10).json()["is_sleeping"]


class Looker:
    """Asks the worker and the server, again and again, what may be asked of a sleeping one."""

    def __init__(self, front, server, model):
        self._front = front
        self._server = server
        self._model = model
        self._stop = threading.Event()
        self.rounds = 0
        self.failures = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(PATIENCE)
        assert self.failures == []

    def _run(self):
        while not self._stop.wait(0.05):
            try:
                self._front.status()
                self._front.call("models_list")
                self._front.call("metrics", {"model": self._model})
                self._front.call("refresh_models")
                requests.get(f"{self._server.url}/health", timeout=10)
                self.rounds += 1
            except Exception as error:
                self.failures.append(error)
                return


@pytest.fixture
def sleepy(llama_factory):
    """A server of one model, slots and metrics on."""
    return llama_factory(parallel=1, ctx_size=4096, metrics=True, sleep_idle_seconds=IDLE)


@pytest.fixture(scope="module")
def sleepy_router(llama_program, tmp_path_factory):
    """The program in router mode."""
    folder = tmp_path_factory.mktemp("models")
    for variant in ("demo", "plain"):
        write_model(folder / f"{variant}.gguf", variant)
    options = LlamaOptions(
        models_dir=folder,
        ctx_size=4096,
        parallel=1,
        threads=1,
        metrics=True,
        sleep_idle_seconds=IDLE,
    )
    with LlamaServer(options, source="program") as server:
        server.wait_ready(PATIENCE)
        yield server


def says_hello(front, model):
    done = front.ask(model)
    assert done["type"] == "done", done
    (block,) = done["message"]["content"]
    assert block["text"] == SENTENCE


def test_it_falls_asleep_and_stays_so_until_somebody_asks(sleepy):
    with front_of(sleepy.url, catalog_interval=0.1) as front:
        with Looker(front, sleepy, None) as looker:
            wait_for(lambda: sleeps(sleepy))
            wait_for(lambda: front.status()["server"]["state"] == "sleeping")
            began, rounds = time.monotonic(), looker.rounds
            while time.monotonic() - began < 2.5 * IDLE:
                assert sleeps(sleepy)
                threading.Event().wait(0.05)
            assert looker.rounds > rounds
            # What it can do was asked before it fell asleep, and is still known.
            assert front.records()["demo"]["supports_thinking"] is True
        says_hello(front, "demo")
        wait_for(lambda: front.status()["server"]["state"] == "ready")
        wait_for(lambda: sleeps(sleepy))
        counted = front.call("count_tokens", {"model": "demo", "messages": [user("hi")]})
        assert counted["tokens"] > 0
        assert not sleeps(sleepy)


def test_a_worker_that_starts_beside_a_sleeping_server_lets_it_sleep(sleepy):
    wait_for(lambda: sleeps(sleepy))
    with front_of(sleepy.url, catalog_interval=0.1) as front:
        with Looker(front, sleepy, None) as looker:
            wait_for(lambda: looker.rounds >= 5)
            assert sleeps(sleepy)
        assert front.status()["server"]["state"] == "sleeping"
        # What no field shows is asked when it is awake.
        assert "supports_thinking_off" not in front.records()["demo"]
        says_hello(front, "demo")
        wait_for(lambda: front.records()["demo"].get("supports_thinking_off") is True)
        # Asked once, it does not keep it awake.
        wait_for(lambda: sleeps(sleepy))


def test_the_doctor_says_asleep_and_leaves_it_so(sleepy):
    wait_for(lambda: sleeps(sleepy))
    with front_of(sleepy.url) as front:
        findings = list(doctor.examine(front.stack.settings, environ={}))
        assert any("asleep" in each.text or "sleep" in each.text for each in findings)
    assert sleeps(sleepy)


def test_a_child_of_a_server_in_router_mode(sleepy_router):
    with front_of(sleepy_router.url, catalog_interval=0.1) as front:
        says_hello(front, "demo")
        with Looker(front, sleepy_router, "demo") as looker:
            wait_for(lambda: states(sleepy_router)["demo"] == "sleeping")
            wait_for(lambda: front.states() == {"demo": "sleeping", "plain": "unloaded"})
            began, rounds = time.monotonic(), looker.rounds
            while time.monotonic() - began < 2.5 * IDLE:
                assert states(sleepy_router) == {"demo": "sleeping", "plain": "unloaded"}
                threading.Event().wait(0.05)
            assert looker.rounds > rounds
        frames = list(front.stream("demo"))
        assert frames[-1]["type"] == "done"
        wait_for(lambda: front.states()["demo"] == "loaded")
        post(sleepy_router, "/models/unload", "demo")


def test_a_stream_is_pinged_while_the_server_wakes():
    """The server takes its time here, as one with a large model does."""
    go = threading.Event()

    with ScriptedLlama(models=[row("m", n_ctx=4096)]).sleeps() as server:
        server.more_routes = {"/v1/chat/completions": answers_after(go)}
        with front_of(server.url, ping_interval=0.1, catalog_interval=0.1) as front:
            frames = front.stream("m", pings=True)
            kinds = [next(frames)["type"] for _ in range(3)]
            assert kinds == ["ping"] * 3
            assert front.status()["streams"][0]["phase"] == "queued"
            go.set()
            assert list(frames)[-1]["type"] == "done"
            # The chat was sent once, and nothing else went out that wakes.
            assert server.woken() == ["POST /v1/chat/completions"]


def test_embeddings_wake_it_too(llama_factory):
    server = llama_factory(
        "embed", parallel=1, ctx_size=512, embeddings=True, pooling="mean", sleep_idle_seconds=IDLE
    )
    with front_of(server.url, catalog_interval=0.1) as front:
        wait_for(lambda: sleeps(server))
        vectors = front.call("embed", {"model": "embed", "input": ["hello"]})
        assert len(vectors["embeddings"]) == 1
        assert not sleeps(server)
