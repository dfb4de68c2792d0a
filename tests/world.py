"""Engine, router, caller and worker around one test, with the official ``iii-sdk``.

The fixtures are imported by the test modules that use them; each runs once per engine profile.
"""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import requests
from laws import check_frames
from peers import ScriptedServer, answer_json
from sdk import Client, Router, Store, Stream

from provider_llamacpp import ProviderWorker, Settings
from provider_llamacpp.local.engine import LoopbackEngine

PROFILES = ["0.21", "0.23", "0.25"]
FUNCTIONS = [
    "abort",
    "count_tokens",
    "embed",
    "on_router_ready",
    "refresh_models",
    "status",
    "stream",
]
STATE = {"scope": "provider-llamacpp", "key": "registration_token"}
WEATHER = {
    "name": "weather__eu::get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def says(text):
    return {"role": "user", "content": [{"type": "text", "text": text}], "timestamp": 1}


def ask(text="hi", **more):
    """A stream's payload as the router sends it."""
    return {"model": "demo", "messages": [says(text)], "max_output_tokens": 200, **more}


class World:
    """Engine and SDK roles of one test; everything ends with it."""

    def __init__(self, profile, stack, *, namespace=None, **options):
        self._stack = stack
        self.frames = []
        self.namespace = namespace
        self.engine = stack.enter_context(
            LoopbackEngine(
                profile=profile,
                on_frame=lambda peer, frame: self.frames.append((peer, frame)),
                **options,
            )
        )
        self.caller = stack.enter_context(Client(self.engine.url, "caller", namespace=namespace))
        self.store = Store()

    def router(self, **options):
        router = Router(self.engine.url, self.store, namespace=self.namespace, **options)
        return self._stack.enter_context(router)

    def worker(self, **settings):
        settings = {"url": self.engine.url, "namespace": self.namespace, **settings}
        worker = ProviderWorker(Settings(drain=0.0, **settings))
        worker.start()
        self._stack.callback(worker.stop, 0.0)
        return worker

    def call(self, function, payload=None, provider="llamacpp"):
        return self.caller.call(f"provider::{provider}::{function}", payload or {})

    def stream(self, *args, **more):
        return Stream(self.caller, ask(*args, **more))

    def token(self):
        return self.caller.call("state::get", STATE)

    def declared(self):
        """Until the worker can be called."""
        for name in FUNCTIONS:
            assert self.engine.wait_for_function(
                f"provider::llamacpp::{name}", namespace=self.namespace or "default"
            )


@pytest.fixture(params=PROFILES)
def new_world(request, tmp_path, monkeypatch):
    """Makes the test's world, with what an engine can be told besides its age."""
    # The SDK leaves a note of each client in the home directory.
    monkeypatch.setenv("HOME", str(tmp_path))
    worlds = []

    with contextlib.ExitStack() as stack:

        def make(**options):
            worlds.append(World(request.param, stack, **options))
            return worlds[-1]

        yield make
        # What the real engine would have dropped in silence is a fault, whatever the test was.
        assert [why for world in worlds for why in world.engine.dropped] == []


@pytest.fixture
def world(new_world):
    return new_world()


@pytest.fixture
def running(world, llama):
    """Router and worker are up, and the catalog is told."""
    world.store.config["api_url"] = f"{llama.url}/v1/chat/completions"
    world.live_router = world.router()
    world.live_worker = world.worker()
    assert world.live_router.wait_for_calls("models::reconcile")
    world.declared()
    return world


def settled(stream):
    """The stream's message, after its end and its frames were found lawful."""
    assert stream.finish() == {"ok": True}
    check_frames([text.encode() for text in stream.texts])
    return stream.terminal


def wait_idle(llama, seconds):
    """Seconds until no slot of the server computes; fails after ``seconds``."""
    began = time.monotonic()
    while True:
        slots = requests.get(f"{llama.url}/slots", timeout=10).json()
        took = time.monotonic() - began
        if not any(slot["is_processing"] for slot in slots):
            return took
        assert took < seconds, slots
        threading.Event().wait(0.02)


@pytest.fixture
def scripted(world):
    """A worker on a server that sends one word and then nothing, until ``server.go`` is set."""
    go = threading.Event()

    def answer(request):
        steps = [{"headers": {"headers": {"content-type": "text/event-stream"}}}]
        if b"silent" in request.body:
            steps = [{"hang_ms": 60_000}]
        rest = lambda exchange: exchange.watch(60, go)  # noqa: E731
        return {"script": [*steps, {"send": WORD}, rest, {"send": FINISH}]}

    listing = answer_json({"object": "list", "data": [{"id": "demo", "object": "model"}]})
    routes = {"/v1/models": listing, "/v1/chat/completions": answer}
    with ScriptedServer(routes=routes) as server:
        server.go = go
        world.server = server
        world.store.config["api_url"] = server.url
        world.live_router = world.router()
        yield world


WORD = 'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
FINISH = 'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
