"""Servers in router mode for the tests: scripted, and the program; and a hub to download from."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import threading
from contextlib import contextmanager

import pytest
import requests
from peers import NOT_FOUND, PATIENCE, ScriptedServer, answer_json, wait_for
from scripted_llama import ScriptedLlama

from provider_llamacpp import Settings
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.errors import BusError
from provider_llamacpp.local.llama import LlamaOptions, LlamaServer
from provider_llamacpp.local.model import write_model
from provider_llamacpp.local.stack import LocalStack

# -- scripted ---------------------------------------------------------------------------------


def sse(model, event, data=None):
    value = {"model": model, "event": event}
    return json.dumps(value if data is None else {**value, "data": data}).encode()


def loading(value, stages=("text_model",), current="text_model"):
    progress = {"stages": list(stages), "current": current, "value": value}
    return {"status": "loading", "progress": progress}


class Events:
    """``/models/sse`` as the test plays it: silent until the first event, headers and all."""

    def __init__(self):
        self.open = 0
        self._steps = []
        self._more = threading.Condition()

    def send(self, *events):
        with self._more:
            self._steps += [b"data: " + event + b"\n\n" for event in events]
            self._more.notify_all()

    def drop(self):
        with self._more:
            self._steps.append(None)
            self._more.notify_all()

    def answer(self, request):
        return {"script": [self._play], "framing": "chunked"}

    def _play(self, exchange):
        self.open += 1
        begun = False
        while True:
            # Looks out for a client that leaves, as the real server does.
            while not self._steps and not exchange.server.stopping:
                exchange.watch(0.02)
            if exchange.server.stopping:
                return
            step = self._steps.pop(0)
            if not begun:
                exchange.head(200, {"content-type": "text/event-stream"}, "chunked")
                begun = True
            if step is None:
                return
            exchange.send(step)


@contextmanager
def a_router_server(*rows, **routes):
    """A scripted server in router mode; its rows and events may be changed at any time."""
    events = Events()
    with ScriptedLlama(
        models=list(rows), props={"role": "router", "build_info": "b11434", "models_autoload": True}
    ) as server:
        server.events = events
        server.more_routes = {"/models/sse": events.answer, **routes}
        yield server


class Hub(ScriptedServer):
    """A place to download models from, as llama-server asks for them: one model, ``me/tiny``.

    The program is sent here by its environment (:meth:`environ`). Half of the file is sent at once,
    the rest when ``go`` is set.
    """

    COMMIT, HASH = "a" * 40, "b" * 64

    def __init__(self, path):
        super().__init__(self._answer_to)
        self.data = path.read_bytes()
        self.go = threading.Event()

    def environ(self, cache):
        return {
            **os.environ,
            "MODEL_ENDPOINT": f"{self.url}/",
            "LLAMA_CACHE": str(cache),
            "HF_HOME": str(cache),
        }

    def _answer_to(self, request):
        place = request.path.removeprefix("/api/models/me/tiny/")
        if place == "refs":
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": self.COMMIT}
            return answer_json({"branches": [main], "tags": [], "converts": []})
        if place == f"tree/{self.COMMIT}":
            size = len(self.data)
            file = {"type": "file", "path": "tiny-F32.gguf", "size": size, "oid": "c" * 40}
            return answer_json([{**file, "lfs": {"oid": self.HASH, "size": size}}])
        if request.path == f"/me/tiny/resolve/{self.COMMIT}/tiny-F32.gguf":
            return {"script": [lambda exchange: self._send(exchange, request.method)]}
        return dict(NOT_FOUND)

    def _send(self, exchange, method):
        headers = {"etag": f'"{self.HASH}"', "accept-ranges": "bytes", "connection": "close"}
        exchange.head(200, headers, "length", len(self.data))
        exchange.framing = "close"
        if method == "GET":
            half = len(self.data) // 2
            exchange.send(self.data[:half])
            exchange.watch(PATIENCE, self.go)
            exchange.send(self.data[half:])


# -- the program ------------------------------------------------------------------------------

PRESET = """\
[*]
ctx-size = 4096

[embed]
embeddings = true
pooling = mean

[chatty]
model = {folder}/demo.gguf
alias = talker
tags = local,test
ctx-size = 2048
"""


def user(text):
    return {"role": "user", "content": [{"type": "text", "text": text}], "timestamp": 1}


@pytest.fixture(scope="module")
def router_server(llama_program, tmp_path_factory):
    """The program in router mode: at most two of its models run at once."""
    folder = tmp_path_factory.mktemp("models")
    for variant in ("demo", "heavy", "loop", "embed", "broken"):
        write_model(folder / f"{variant}.gguf", variant)
    preset = tmp_path_factory.mktemp("preset") / "presets.ini"
    preset.write_text(PRESET.format(folder=folder), encoding="utf-8")
    options = LlamaOptions(
        models_dir=folder,
        parallel=1,
        threads=1,
        extra=("--models-preset", str(preset), "--models-max", "2"),
    )
    with LlamaServer(options, source="program") as server:
        server.wait_ready(PATIENCE)
        yield server


def rows(server):
    answer = requests.get(f"{server.url}/v1/models", timeout=10).json()
    return {each["id"]: each for each in answer["data"]}


def states(server):
    return {name: each["status"]["value"] for name, each in rows(server).items()}


def post(server, path, model):
    return requests.post(f"{server.url}{path}", json={"model": model}, timeout=10)


def unload_all(server):
    for name, state in states(server).items():
        if state != "unloaded":
            post(server, "/models/unload", name)
    wait_for(lambda: set(states(server).values()) == {"unloaded"})


class Front:
    """Engine, router and worker in front of a server. The worker looks at the catalog by itself
    once in an hour: what it knows earlier, events have told it."""

    def __init__(self, stack, caller):
        self.stack = stack
        self.caller = caller

    def call(self, name, payload=None):
        return self.caller.call(f"provider::llamacpp::{name}", payload or {}, timeout=PATIENCE)

    def status(self):
        return self.call("status")

    def states(self):
        return {each["id"]: each["state"] for each in self.status()["server"]["models"]}

    def records(self):
        answer = self.caller.call("router::models::list", {"provider": "llamacpp"})
        return {each["id"]: each for each in answer["models"]}

    def ranking(self):
        return self.stack.router.registry.records["llamacpp"].declaration["default_models"]

    def stream(self, model, text="hi", *, pings=False, **more):
        """Begin a stream; its frames as they come, pings left out."""
        writer, frames = self.caller.open_channel()
        payload = {"model": model, "messages": [user(text)], "writer_ref": writer, **more}

        def run():
            # Its result says nothing that the frames do not; the bus may be gone before it.
            with contextlib.suppress(BusError):
                self.call("stream", payload)

        threading.Thread(target=run, daemon=True).start()
        return (each for each in frames if pings or each["type"] != "ping")

    def watch(self, *, pings=False, **payload):
        """Begin to watch; the frames as they come, pings left out. Its result is in ``watched``."""
        writer, frames = self.caller.open_channel()
        watched = self.watched = {}

        def run():
            try:
                watched["result"] = self.call("models_watch", {"writer_ref": writer, **payload})
            except BusError as error:
                watched["error"] = error

        watched["thread"] = threading.Thread(target=run, daemon=True)
        watched["thread"].start()
        return (each for each in frames if pings or each["type"] != "ping")

    def ask(self, model, text="hi", **more):
        """The terminal frame of a whole stream."""
        return list(self.stream(model, text, **more))[-1]


@contextmanager
def front_of(url, **settings):
    settings = {
        "catalog_interval": 3600.0,
        "drain": 0.0,
        "allow_model_management": True,
        **settings,
    }
    with (
        LocalStack(Settings(api_url=url, **settings)) as stack,
        Caller(stack.settings) as caller,
    ):
        yield Front(stack, caller)


@pytest.fixture
def front(router_server):
    unload_all(router_server)
    with front_of(router_server.url) as found:
        yield found


def children(pid):
    # A child belongs to the thread that started it.
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for task in tasks for each in task.read_text().split()]


def names():
    return [each.name for each in threading.enumerate()]
