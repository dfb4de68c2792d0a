"""Discovery: what is asked, in which states, and what comes of the answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from conftest import LlamaFactory
from peers import PATIENCE, Answer, Request, ScriptedServer, answer_json, free_port, wait_for
from recorded import recorded, recorded_json

from provider_llamacpp.calls import Call
from provider_llamacpp.errors import Interrupted, ProviderError
from provider_llamacpp.local.llama import LlamaServer
from provider_llamacpp.server import discovery
from provider_llamacpp.server.discovery import Discovery
from provider_llamacpp.server.upstream import Target, Upstream

NOT_LOADED = recorded("router-props-no-autoload")


class FakeLlama:
    """A server that answers like llama-server of one model; what it says can be changed."""

    def __init__(self, **props: Any) -> None:
        self.models: Answer = recorded("models-single")
        self.props: dict[str, Any] = {**recorded_json("props-template-with-tools"), **props}
        self.prompts: Callable[[Request], Answer] = self.render
        self.embeddings: Answer = recorded("embeddings-not-enabled-probe")

    def render(self, request: Request) -> Answer:
        thinking = request.json()["chat_template_kwargs"]["enable_thinking"]
        return recorded(f"reasoning-enable-thinking-{json.dumps(thinking)}-prompt")

    def __call__(self, request: Request) -> Answer:
        if request.path == "/v1/models":
            return self.models
        if request.path == "/props":
            return answer_json(self.props)
        if request.path == "/apply-template":
            return self.prompts(request)
        if request.path == "/v1/embeddings":
            return self.embeddings
        return recorded("unknown-path")


class FakeRouter(FakeLlama):
    """A server in router mode, with the recorded children."""

    def __init__(self, models: str = "router-models-loaded") -> None:
        super().__init__()
        self.models = recorded(models)
        self.children = {"tiny-chat": recorded_json("router-props-model")}

    def __call__(self, request: Request) -> Answer:
        if request.target == "/props":
            return recorded("router-props")
        if request.path == "/props":
            model = request.target.split("model=")[1].split("&")[0]
            child = self.children.get(model)
            return NOT_LOADED if child is None else answer_json(child)
        return super().__call__(request)


QUESTIONS_ONCE = ["POST /apply-template", "POST /apply-template", "POST /v1/embeddings"]


def new(**options: Any) -> Discovery:
    return Discovery(Upstream(), **options)


# -- one model --------------------------------------------------------------------------------


def test_a_server_of_one_model() -> None:
    with ScriptedServer(FakeLlama()) as server:
        found = new().discover(Target(server.url, "sk-1"))
        assert server.paths() == ["GET /v1/models", "GET /props", *QUESTIONS_ONCE]
        assert {request.headers["authorization"] for request in server.requests} == {"Bearer sk-1"}
    (model,) = found.models
    assert model.id == "/srv/models/tiny-chat.gguf"
    assert model.context_window == 2048
    assert model.abilities.tools is True
    assert model.abilities.thinking_switch is True
    assert model.embeddings is False
    assert not found.router_mode
    assert found.build == "b0-unknown"
    assert found.records() == [
        {
            "id": "/srv/models/tiny-chat.gguf",
            "provider": "llamacpp",
            "context_window": 2048,
            "max_output_tokens": 1024,
            "supports_tools": True,
            "supports_structured_output": True,
            "supports_vision": False,
            "supports_thinking": True,
            "supports_thinking_off": True,
        }
    ]


def test_the_models_are_told_under_the_id_of_the_provider() -> None:
    with ScriptedServer(FakeLlama()) as server:
        found = new(provider="pi5").discover(Target(server.url))
    assert found.records()[0]["provider"] == "pi5"


def test_what_no_field_shows_is_asked_once() -> None:
    with ScriptedServer(FakeLlama()) as server:
        finder = new()
        first = finder.discover(Target(server.url))
        for _ in range(3):
            assert finder.discover(Target(server.url)) == first
        assert server.paths().count("POST /v1/embeddings") == 1
        assert server.paths().count("POST /apply-template") == 2


@pytest.mark.parametrize(
    "change", [{"media_marker": "new process"}, {"build_info": "b2"}, {"chat_template": "x"}]
)
def test_another_process_build_or_template_is_asked_again(change: dict[str, Any]) -> None:
    fake = FakeLlama()
    with ScriptedServer(fake) as server:
        finder = new()
        finder.discover(Target(server.url))
        fake.props.update(change)
        fake.embeddings = recorded("embeddings-no-input")
        found = finder.discover(Target(server.url))
        assert server.paths().count("POST /v1/embeddings") == 2
    assert found.models[0].embeddings is True


@pytest.mark.parametrize("props", [{"is_sleeping": True}, {"is_sleeping": None}])
def test_a_server_that_does_not_say_awake_is_not_woken(props: dict[str, Any]) -> None:
    fake = FakeLlama(**props)
    with ScriptedServer(fake) as server:
        finder = new()
        found = finder.discover(Target(server.url))
        assert server.paths() == ["GET /v1/models", "GET /props"]
        assert found.models[0].abilities.thinking_switch is None
        assert found.models[0].abilities.tools is True
        fake.props["is_sleeping"] = False
        found = finder.discover(Target(server.url))
        assert server.paths()[4:] == QUESTIONS_ONCE
        assert found.models[0].abilities.thinking_switch is True
        fake.props["is_sleeping"] = True
        found = finder.discover(Target(server.url))
        assert found.models[0].state == "sleeping"
        assert found.models[0].abilities.thinking_switch is True
        assert server.paths()[7:] == ["GET /v1/models", "GET /props"]


@pytest.mark.parametrize(
    ("prompts", "switch"),
    [
        (recorded("reasoning-enable-thinking-ignored-prompt"), False),
        (recorded("unknown-path"), None),
        (answer_json({"prompt": 7}), None),
        ({"body": "<html>", "framing": "length"}, None),
    ],
)
def test_a_switch_is_found_only_where_it_changes_the_prompt(
    prompts: Answer, switch: bool | None
) -> None:
    fake = FakeLlama()
    fake.prompts = lambda _: prompts
    with ScriptedServer(fake) as server:
        found = new().discover(Target(server.url))
    assert found.models[0].abilities.thinking_switch is switch
    assert found.models[0].embeddings is False


@pytest.mark.parametrize(
    ("name", "embeddings"),
    [("embeddings-no-input", True), ("unknown-path", None), ("auth-missing", None)],
)
def test_embeddings_are_found_by_the_refusal(name: str, embeddings: bool | None) -> None:
    fake = FakeLlama()
    fake.embeddings = recorded(name)
    with ScriptedServer(fake) as server:
        found = new().discover(Target(server.url))
    assert found.models[0].embeddings is embeddings


def test_an_embedding_server_is_not_offered_for_chat() -> None:
    fake = FakeLlama()
    fake.models = recorded("embeddings-server-models")
    fake.props = recorded_json("embeddings-server-props")
    fake.prompts = lambda _: recorded("reasoning-enable-thinking-ignored-prompt")
    fake.embeddings = recorded("embeddings-no-input")
    with ScriptedServer(fake) as server:
        found = new().discover(Target(server.url))
    assert found.records() == []
    assert found.knows("/srv/models/tiny-embed.gguf")


def test_a_question_that_fails_is_not_asked_again() -> None:
    fake = FakeLlama()
    fake.prompts = lambda _: {"script": [{"close": True}]}
    with ScriptedServer(fake) as server:
        finder = new()
        found = finder.discover(Target(server.url))
        assert found.models[0].abilities.thinking_switch is None
        assert found.models[0].abilities.tools is True
        finder.discover(Target(server.url))
        assert server.paths().count("POST /apply-template") == 1


@pytest.mark.parametrize(
    "props",
    [
        {"body": "<!doctype html><html></html>", "headers": {"content-type": "text/html"}},
        recorded("unknown-path"),
        answer_json(["not", "an", "object"]),
        {"script": [{"close": True}]},
        {"status": 302, "headers": {"location": "/login"}},
    ],
)
def test_what_is_no_props_is_ignored(props: Answer) -> None:
    rows = {"object": "list", "data": [{"id": "u/g-26B-GGUF", "context_length": 128000}]}
    routes = {"/v1/models": answer_json(rows), "/props": props}
    with ScriptedServer(routes=routes) as server:
        found = new().discover(Target(server.url))
        assert server.paths() == ["GET /v1/models", "GET /props"]
    assert found.models[0].context_window == 128000
    assert found.build is None


def test_the_props_of_a_gateway_belong_to_none_of_its_models() -> None:
    fake = FakeLlama()
    fake.models = answer_json({"data": [{"id": "a"}, {"id": "b"}, {"id": "a"}, {"id": ""}, 7]})
    with ScriptedServer(fake) as server:
        found = new().discover(Target(server.url))
        assert server.paths() == ["GET /v1/models", "GET /props"]
    assert [model.id for model in found.models] == ["a", "b"]
    assert found.models[0].abilities.tools is None


# -- router mode ------------------------------------------------------------------------------


def test_router_mode_asks_only_what_loads_nothing() -> None:
    with ScriptedServer(FakeRouter()) as server:
        finder = new()
        found = finder.discover(Target(server.url))
        props = "GET /props?model=tiny-chat&autoload=false"
        once = [f"{line}?autoload=false" for line in QUESTIONS_ONCE]
        assert server.paths() == ["GET /v1/models", "GET /props", props, *once]
        assert {request.json()["model"] for request in server.requests[3:]} == {"tiny-chat"}
        # Each question about a model is a use of it: the next one gets a process of its own.
        again = finder.discover(Target(server.url))
        assert server.paths()[6:] == ["GET /v1/models", "GET /props"]
        assert again == found
    assert found.router_mode
    chat = found.find("tiny-chat")
    assert chat is not None
    assert (chat.state, chat.slots, chat.abilities.thinking_switch) == ("loaded", 1, True)
    other = found.find("tiny-heavy")
    assert other is not None
    assert (other.state, other.slots, other.context_window) == ("unloaded", None, 4096)
    assert len(found.records()) == len(found.models) > 4


def test_a_sleeping_child_is_not_woken() -> None:
    fake = FakeRouter("router-models-sleeping")
    fake.children["tiny-chat"] = recorded_json("router-props-sleeping-model")
    with ScriptedServer(fake) as server:
        finder = new()
        finder.discover(Target(server.url))
        found = finder.discover(Target(server.url))
        props = "GET /props?model=tiny-chat&autoload=false"
        assert server.paths()[2:] == [props, "GET /v1/models", "GET /props"]
        # It is asked the rest when it is awake, and first whether it still is.
        awoken = json.dumps(recorded_json("router-models-sleeping")).replace("sleeping", "loaded")
        fake.models = answer_json(json.loads(awoken))
        finder.discover(Target(server.url))
        assert server.paths()[7:] == [props]
        fake.children["tiny-chat"] = recorded_json("router-props-model")
        awake = finder.discover(Target(server.url)).find("tiny-chat")
        assert server.paths()[10:] == [
            props,
            *(f"{line}?autoload=false" for line in QUESTIONS_ONCE),
        ]
        assert awake is not None
        assert (awake.state, awake.abilities.thinking_switch) == ("loaded", True)
    chat = found.find("tiny-chat")
    assert chat is not None
    assert (chat.state, chat.abilities.tools) == ("sleeping", True)


def test_a_row_that_says_sleeping_is_believed_over_props() -> None:
    fake = FakeRouter("router-models-sleeping")
    with ScriptedServer(fake) as server:
        new().discover(Target(server.url))
        assert not any(line.startswith("POST") for line in server.paths())


def test_what_a_model_could_do_holds_while_it_is_unloaded() -> None:
    fake = FakeRouter()
    with ScriptedServer(fake) as server:
        finder = new()
        finder.discover(Target(server.url))
        fake.models = recorded("router-models-initial")
        found = finder.discover(Target(server.url)).find("tiny-chat")
        assert found is not None
        assert (found.state, found.abilities.thinking_switch) == ("unloaded", True)
        fake.models = recorded("router-models-loaded")
        finder.discover(Target(server.url))
        assert sum(line.startswith("POST") for line in server.paths()) == 3


def test_a_model_with_other_launch_options_is_another() -> None:
    fake = FakeRouter()
    with ScriptedServer(fake) as server:
        finder = new()
        finder.discover(Target(server.url))
        fake.models = recorded("router-presets-models")
        found = finder.discover(Target(server.url)).find("tiny-chat")
    assert found is not None
    assert found.abilities.tools is None


def test_a_child_that_goes_away_meanwhile() -> None:
    fake = FakeRouter()
    fake.children = {}
    with ScriptedServer(fake) as server:
        found = new().discover(Target(server.url)).find("tiny-chat")
    assert found is not None
    assert found.abilities.tools is None


def test_a_strange_name_goes_into_the_query_whole() -> None:
    fake = FakeRouter()
    row = {"id": "org/a b&autoload=true#?:Q4", "status": {"value": "loaded"}}
    fake.models = answer_json({"data": [row]})
    with ScriptedServer(fake) as server:
        new().discover(Target(server.url))
        query = "model=org%2Fa%20b%26autoload%3Dtrue%23%3F%3AQ4&autoload=false"
        assert server.paths()[2] == f"GET /props?{query}"


# -- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_an_empty_catalog(status: int) -> None:
    with ScriptedServer({**recorded("auth-missing"), "status": status}) as server:
        found = new().discover(Target(server.url))
        assert server.paths() == ["GET /v1/models"]
    assert found.refused
    assert (found.records(), found.ranked_ids()) == ([], [])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (recorded("loading-models"), "Loading model"),
        (recorded("unknown-path"), "File Not Found"),
        ({"status": 502, "body": "<html>Bad Gateway</html>", "framing": "length"}, "502"),
        (answer_json({"error": "no"}), "something else than models"),
        (answer_json([1]), "something else than models"),
        ({"body": "<html>", "framing": "length"}, "something else than models"),
        ({"body": "{", "cut": True}, "broke the connection off"),
        ({"status": 301, "headers": {"location": "/x"}}, "not followed"),
    ],
)
def test_a_server_that_cannot_be_asked_is_an_error(answer: Answer, words: str) -> None:
    with ScriptedServer(answer) as server, pytest.raises(ProviderError, match=words):
        new().discover(Target(server.url))


def test_an_unreachable_server_is_an_error() -> None:
    with pytest.raises(ProviderError, match="refused"):
        new().discover(Target(f"http://127.0.0.1:{free_port()}"))


def test_an_empty_list_is_an_empty_catalog() -> None:
    with ScriptedServer(answer_json({"data": []})) as server:
        found = new().discover(Target(server.url))
    assert found.models == ()
    assert not found.refused


def test_all_questions_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "DISCOVERY_SECONDS", 0.0)
    with ScriptedServer(FakeLlama()) as server:
        found = new().discover(Target(server.url))
        assert server.paths() == ["GET /v1/models"]
    assert found.models[0].context_window == 2048


def test_an_abort_ends_a_discovery() -> None:
    call = Call(1, "refresh", key=None, model=None)
    errors: list[BaseException] = []

    def ask(server: ScriptedServer) -> None:
        try:
            new().discover(Target(server.url), call)
        except BaseException as error:
            errors.append(error)

    fake = FakeLlama()
    fake.prompts = lambda _: {"script": [{"hang_ms": 60000}]}
    with ScriptedServer(fake) as server:
        thread = threading.Thread(target=ask, args=(server,))
        thread.start()
        server.wait_requests(3)
        call.abort("stop")
        thread.join(PATIENCE)
    assert isinstance(errors[0], Interrupted)


# -- where it is ------------------------------------------------------------------------------


def test_the_first_port_that_answers_is_followed() -> None:
    with ScriptedServer(FakeLlama()) as server:
        finder = new(ports=(free_port(), server.port))
        for _ in range(3):
            assert finder.locate("sk-1") == server.url
        assert server.paths() == ["GET /v1/models"]
        assert server.requests[0].headers["authorization"] == "Bearer sk-1"


@pytest.mark.parametrize("name", ["loading-models", "auth-missing"])
def test_a_server_that_is_loading_or_wants_a_key_is_the_right_one(name: str) -> None:
    with ScriptedServer(recorded(name)) as first, ScriptedServer(FakeLlama()) as second:
        assert new(ports=(first.port, second.port)).locate(None) == first.url


@pytest.mark.parametrize("answer", [recorded("unknown-path"), {"body": "<html>"}])
def test_something_else_at_the_port_is_passed_over(answer: Answer) -> None:
    with ScriptedServer(answer) as other, ScriptedServer(FakeLlama()) as server:
        assert new(ports=(other.port, server.port)).locate(None) == server.url
        with pytest.raises(ProviderError, match="something else") as caught:
            new(ports=(other.port,)).locate(None)
    assert caught.value.kind == "transient"
    assert "set api_url" in caught.value.message


def test_a_server_that_went_away_is_looked_for_again() -> None:
    with ScriptedServer(FakeLlama()) as first, ScriptedServer(FakeLlama()) as second:
        finder = new(ports=(first.port, second.port))
        root = finder.locate(None)
        assert root == first.url
        first.stop()
        with pytest.raises(ProviderError):
            finder.discover(Target(root))
        assert finder.locate(None) == second.url


def test_another_server_that_fails_changes_nothing() -> None:
    with ScriptedServer(FakeLlama()) as server:
        finder = new(ports=(server.port,))
        finder.locate(None)
        with pytest.raises(ProviderError):
            finder.discover(Target(f"http://127.0.0.1:{free_port()}"))
        assert finder.locate(None) == server.url
        assert len(server.requests) == 1


def test_the_usual_ports() -> None:
    assert discovery.PORTS == (8080, 9931)


# -- the real server --------------------------------------------------------------------------


def told(server: LlamaServer, path: str) -> Any:
    return Upstream().request(Target(server.url), "GET", path, timeout=PATIENCE).json()


def test_a_real_server_is_read_as_it_says(llama: LlamaServer) -> None:
    found = new().discover(Target(llama.url))
    (row,) = told(llama, "/v1/models")["data"]
    props = told(llama, "/props")
    (model,) = found.models
    assert model.id == row["id"] == "demo"
    assert model.context_window == row["meta"]["n_ctx"]
    assert model.context_window == props["default_generation_settings"]["n_ctx"]
    assert model.slots == props["total_slots"] == 4
    caps = props["chat_template_caps"]
    assert model.abilities.tools is caps["supports_tools"] is True
    assert model.abilities.reasoning_effort is caps["supports_reasoning_effort"]
    assert model.abilities.parallel_tool_calls is caps["supports_parallel_tool_calls"]
    assert model.abilities.vision is props["modalities"]["vision"] is False
    assert model.abilities.thinking_switch is True
    assert model.embeddings is True
    assert model.state == "loaded"
    (record,) = found.records()
    assert record["context_window"] == row["meta"]["n_ctx"]
    assert record["supports_thinking"] is record["supports_thinking_off"] is True


def test_a_real_server_with_a_plain_template(llama_factory: LlamaFactory) -> None:
    server = llama_factory("plain", ctx_size=1024, parallel=2)
    (model,) = new().discover(Target(server.url)).models
    assert model.context_window == 512
    assert model.abilities.tools is False
    assert model.abilities.thinking_switch is False
    assert model.embeddings is False
    record = model.record("llamacpp")
    assert (record.supports_tools, record.supports_thinking) == (False, False)


def test_a_real_server_that_sleeps_sleeps_on(llama_factory: LlamaFactory) -> None:
    server = llama_factory("demo", sleep_idle_seconds=1)

    def sleeping() -> bool:
        return told(server, "/props")["is_sleeping"] is True

    finder = new()
    wait_for(sleeping, "the sleep")
    for _ in range(3):
        (model,) = finder.discover(Target(server.url)).models
        assert model.state == "sleeping"
        assert model.abilities.thinking_switch is None
    assert sleeping()


def test_a_real_server_with_a_key(llama_factory: LlamaFactory) -> None:
    server = llama_factory("demo", api_key="sk-right")
    assert new().discover(Target(server.url, "sk-wrong")).refused
    assert new().discover(Target(server.url, "sk-right")).knows("demo")
