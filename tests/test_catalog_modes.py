"""Counts, capabilities and contexts of the catalog are what the server itself reports: with one
model and with many, awake and asleep, loaded and not, for chat and for embeddings only, from the
llama-server program and from ``xllamacpp``.
"""

from __future__ import annotations

import pytest
import requests
from peers import wait_for
from router_mode import front, front_of, post, router_server, rows, user

__all__ = ["front", "router_server"]
"""Fixtures."""

pytestmark = pytest.mark.timeout(120)

TOOL = {
    "name": "weather::get",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WIRE_TOOL = {"type": "function", "function": {**TOOL, "name": "weather__get"}}
EFFORTS = ("minimal", "low", "medium", "high", "xhigh")


@pytest.fixture(params=["program", "xllamacpp"])
def source(request):
    if request.param == "program":
        request.getfixturevalue("llama_program")
    else:
        pytest.importorskip("xllamacpp")
    return request.param


class Server:
    """What the server says of one of its models, asked behind the worker's back."""

    def __init__(self, url, model, *, many=False):
        self.url = url
        self.model = model
        self._many = {"model": model, "autoload": "false"} if many else {}

    def row(self):
        answer = requests.get(f"{self.url}/v1/models", timeout=10).json()
        (found,) = (each for each in answer["data"] if each["id"] == self.model)
        return found

    def props(self):
        return requests.get(f"{self.url}/props", self._many, timeout=10).json()

    def post(self, path, body):
        answer = requests.post(f"{self.url}{path}", json={"model": self.model, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def prompt(self, **more):
        question = {"messages": [{"role": "user", "content": "hello there"}], **more}
        return self.post("/apply-template", question)["prompt"]

    def thinking_switch(self):
        on, off = (
            self.prompt(chat_template_kwargs={"enable_thinking": each}) for each in (True, False)
        )
        return on != off


def check_context(record, server):
    """The context of a slot, as row and properties have it."""
    meta, props = server.row()["meta"], server.props()
    assert record["context_window"] == meta["n_ctx"]
    assert record["context_window"] == props["default_generation_settings"]["n_ctx"]
    assert record["max_output_tokens"] <= record["context_window"] <= meta["n_ctx_train"]


def check_fields(record, server):
    """What the server says of a model in its fields; asking wakes nobody."""
    props = server.props()
    caps, modalities = props["chat_template_caps"], props["modalities"]
    assert record["supports_tools"] is caps["supports_tools"]
    assert record["supports_vision"] is modalities["vision"]
    assert ("image" in server.row()["architecture"]["input_modalities"]) is modalities["vision"]
    efforts = [each["effort"] for each in record.get("reasoning_efforts", ())]
    assert bool(efforts) is caps["supports_reasoning_effort"]
    assert set(efforts) <= set(EFFORTS)


def check_thinking(record, server):
    """What no field says; asking wakes the server."""
    switch = server.thinking_switch()
    efforts = server.props()["chat_template_caps"]["supports_reasoning_effort"]
    assert record["supports_thinking"] is (switch or efforts)
    # A model that never thinks has nothing to be switched off.
    assert record.get("supports_thinking_off", False) is switch


def check_counts(front, server, *, tools):
    """Prompts and texts, counted by the worker, by the server, and by a turn."""
    question = {"model": server.model, "messages": [user("hello there")]}
    wire = {"messages": [{"role": "user", "content": "hello there"}]}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    cases = [({}, {})]
    if tools:
        cases.append(({"tools": [TOOL]}, {"tools": [WIRE_TOOL]}))
    for ours, theirs in cases:
        counted = front.call("count_tokens", {**question, **ours})["tokens"]
        own = server.post("/v1/chat/completions/input_tokens", {**wire, **theirs, **off})
        assert counted == own["input_tokens"]
        prompt = server.prompt(**theirs, **off)
        whole = server.post("/tokenize", {"content": prompt, "add_special": True})
        assert counted == len(whole["tokens"])
        done = front.ask(server.model, "hello there", max_output_tokens=1, **ours)
        assert done["message"]["usage"]["input"] == counted
    text = "Größe 12 🦙 <|im_end|>"
    ours = front.call("tokenize", {"model": server.model, "content": text})["tokens"]
    assert ours == server.post("/tokenize", {"content": text})["tokens"]
    back = front.call("detokenize", {"model": server.model, "tokens": ours})["content"]
    assert back == server.post("/detokenize", {"tokens": ours})["content"]


def told(front, model):
    """The router's record, once all is known of it that is asked while a model runs."""

    def known():
        record = front.records().get(model, {})
        return "supports_thinking_off" in record or record.get("supports_thinking") is False

    wait_for(known)
    return front.records()[model]


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("demo", {"parallel": 1, "ctx_size": 4096}),
        ("demo", {"parallel": 3, "ctx_size": 3 * 1024}),
        # Slots share one pool, and the context is no more than the model was trained on.
        ("demo", {}),
        ("demo", {"parallel": 2, "ctx_size": 2048, "embeddings": True, "pooling": "mean"}),
        ("plain", {"parallel": 2, "ctx_size": 1024}),
    ],
)
def test_one_model(llama_factory, source, variant, options):
    server = Server(llama_factory(variant, source=source, **options).url, variant)
    with front_of(server.url) as front:
        record = told(front, variant)
        check_context(record, server)
        check_fields(record, server)
        check_thinking(record, server)
        check_counts(front, server, tools=record["supports_tools"])
        slots = front.status()["server"]["models"][0]["slots"]
        assert slots == server.props()["total_slots"] == options.get("parallel", slots)


def test_one_model_that_sleeps(llama_factory, source):
    running = llama_factory(source=source, parallel=2, ctx_size=2048, sleep_idle_seconds=1)
    server = Server(running.url, "demo")

    def sleeps():
        return server.props()["is_sleeping"] is True

    wait_for(sleeps)
    with front_of(server.url, catalog_interval=0.1) as front:
        wait_for(lambda: "demo" in front.records())
        record = front.records()["demo"]
        check_context(record, server)
        check_fields(record, server)
        # Nobody has asked for the switch, or the server would be awake.
        assert "supports_thinking_off" not in record
        assert sleeps()
        # A count wakes it; then all is told.
        check_counts(front, server, tools=True)
        check_thinking(told(front, "demo"), server)
        wait_for(sleeps)
        before = front.records()["demo"]
        check_context(before, server)
        check_fields(before, server)
        assert before["supports_thinking_off"] is True


@pytest.mark.parametrize(("variant", "chats"), [("plain", False), ("embed", True)])
def test_one_model_that_embeds(llama_factory, source, variant, chats):
    """With a template that can do nothing it is for embeddings only: the router is told of none.
    With one for tools and thoughts it may be asked to chat as well, and does."""
    running = llama_factory(
        variant, source=source, parallel=2, ctx_size=512, embeddings=True, pooling="mean"
    )
    server = Server(running.url, variant)
    with front_of(server.url) as front:
        (found,) = front.call("models_list")["models"]
        props = server.props()
        assert found["id"] == props["model_alias"] == variant
        assert found["context_window"] == server.row()["meta"]["n_ctx"]
        assert found["context_window"] == props["default_generation_settings"]["n_ctx"]
        assert front.call("refresh_models")["count"] == len(front.records()) == chats
        (found,) = front.call("models_list")["models"]
        assert found["for_chat"] is chats
        if chats:
            record = told(front, variant)
            check_context(record, server)
            check_fields(record, server)
            check_thinking(record, server)
        texts = ["one", "one two three"]
        ours = front.call("embed", {"model": variant, "input": texts})["embeddings"]
        theirs = server.post("/v1/embeddings", {"input": texts[1]})["data"][0]["embedding"]
        assert ours[1] == pytest.approx(theirs, abs=1e-5)
        assert {len(each) for each in ours} == {server.row()["meta"]["n_embd"]}
        counted = front.call("tokenize", {"model": variant, "content": texts[1]})["tokens"]
        assert counted == server.post("/tokenize", {"content": texts[1]})["tokens"]


def test_many_models(router_server, front):
    """Of those that do not run the launch options tell; of those that do, the server itself."""
    for name, record in front.records().items():
        args = rows(router_server)[name]["status"]["args"]
        assert record["context_window"] == int(args[args.index("--ctx-size") + 1])
    for name in ("demo", "chatty"):
        post(router_server, "/models/load", name)
        server = Server(router_server.url, name, many=True)
        record = told(front, name)
        check_context(record, server)
        check_fields(record, server)
        check_thinking(record, server)
        check_counts(front, server, tools=True)
    # One that was unloaded is as it was when it ran.
    post(router_server, "/models/unload", "chatty")
    wait_for(lambda: front.states()["chatty"] == "unloaded")
    assert front.records()["chatty"] == record
    listed = {each["id"]: each for each in front.call("models_list")["models"]}
    assert {name for name, each in listed.items() if not each["for_chat"]} == {"embed"}
    post(router_server, "/models/load", "embed")
    wait_for(lambda: front.states()["embed"] == "loaded")
    found = {each["id"]: each for each in front.call("models_list")["models"]}["embed"]
    assert found["context_window"] == rows(router_server)["embed"]["meta"]["n_ctx"]
