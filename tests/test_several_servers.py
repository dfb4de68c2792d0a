"""Several providers in one worker: each with its own server, key, token, catalog, calls, limits."""

from __future__ import annotations

import contextlib
import threading

import pytest
from peers import PATIENCE, wait_for
from scripted_llama import ScriptedLlama, row

from provider_llamacpp import ProviderSettings, ProviderWorker, Settings, SettingsError
from provider_llamacpp.cli import SETTING_FLAGS, parser
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.errors import BusError
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.router import LoopbackRouter
from provider_llamacpp.settings import from_environment, unknown_variables

pytestmark = pytest.mark.timeout(120)

WORD = 'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
FINISH = 'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def user(text):
    return {"role": "user", "content": [{"type": "text", "text": text}], "timestamp": 1}


# -- settings ---------------------------------------------------------------------------------


def test_one_provider_is_what_it_was():
    settings = Settings(id="a", api_url="http://h:1")
    (only,) = settings.providers()
    assert (only.id, only.api_url, only.name, only.also) == ("a", "http://h:1", "provider-a", ())


def test_each_provider_has_settings_of_its_own():
    settings = Settings(
        id="a",
        api_url="http://h:1",
        api_key="key-a",
        max_streams=3,
        also=(ProviderSettings("b", "http://h:2", "key-b"), ProviderSettings("c")),
    )
    found = settings.providers()
    assert [each.id for each in found] == ["a", "b", "c"]
    assert [each.api_url for each in found] == ["http://h:1", "http://h:2", None]
    assert [each.api_key for each in found] == ["key-a", "key-b", None]
    assert [each.key_variable for each in found] == ["A_API_KEY", "B_API_KEY", "C_API_KEY"]
    # The rest they have in common, the worker's name above all.
    assert {each.name for each in found} == {"provider-a"}
    assert {each.max_streams for each in found} == {3}
    assert "key-b" not in repr(settings)


@pytest.mark.parametrize(
    ("also", "words"),
    [
        ((ProviderSettings("llamacpp"),), "id 'llamacpp' is there twice"),
        ((ProviderSettings("b"), ProviderSettings("b")), "id 'b' is there twice"),
    ],
)
def test_no_two_may_be_the_same(also, words):
    with pytest.raises(SettingsError, match=words):
        Settings(also=also)


@pytest.mark.parametrize(("id", "api_url"), [("Bad Id", None), ("", None), ("b", "pi5:8080")])
def test_each_is_checked(id, api_url):
    with pytest.raises(SettingsError, match=r"--id"):
        ProviderSettings(id, api_url)


@pytest.mark.parametrize(
    ("variable", "flags", "found"),
    [
        (None, None, [("llamacpp", None)]),
        ("pi5", None, [("pi5", None)]),
        ("pi5=http://pi5:8080", None, [("pi5", "http://pi5:8080")]),
        ("a, b=http://b:1,c", None, [("a", None), ("b", "http://b:1"), ("c", None)]),
        ("a b=http://b:1?x=y", None, [("a", None), ("b", "http://b:1?x=y")]),
        ("a,b", ["c", "d=http://d:1"], [("c", None), ("d", "http://d:1")]),
        ("a", "b", [("b", None)]),
    ],
)
def test_ids_are_read(variable, flags, found):
    environ = {} if variable is None else {"PROVIDER_LLAMACPP_ID": variable}
    settings = from_environment(environ, id=flags)
    assert [(each.id, each.api_url) for each in settings.providers()] == found


def test_the_address_behind_the_id_counts_for_the_first_too():
    environ = {"PROVIDER_LLAMACPP_API_URL": "http://env:1"}
    assert from_environment(environ, id=["a", "b"]).api_url == "http://env:1"
    assert from_environment(environ, id=["a=http://a:1", "b"]).api_url == "http://a:1"
    assert from_environment(environ, id=["a", "b"]).also == (ProviderSettings("b"),)


def test_each_has_a_key_variable():
    environ = {"LLAMACPP_API_KEY": "k0", "PI_5_API_KEY": " k5 ", "PI6_API_KEY": ""}
    settings = from_environment(environ, id=["llamacpp", "pi-5", "pi6"])
    assert [each.api_key for each in settings.providers()] == ["k0", "k5", None]
    assert from_environment(environ, api_key="mine", id=["pi-5"]).api_key == "mine"


@pytest.mark.parametrize("id", ["", ["a", ""], ["=http://h:1"], ["a", "a"]])
def test_ids_that_name_nobody(id):
    with pytest.raises(SettingsError, match="id"):
        from_environment({}, id=id)


def test_there_is_no_variable_beside_that_of_the_id():
    environ = {"PROVIDER_LLAMACPP_ALSO": "b"}
    assert from_environment(environ).also == ()
    assert unknown_variables(environ) == ["PROVIDER_LLAMACPP_ALSO"]


def test_the_flag_may_be_given_more_than_once():
    arguments = ["--id", "a", "--id", "pi5=http://pi5:8080"]
    options = parser(arguments).parse_args(arguments)
    flags = {name: getattr(options, name, None) for name in SETTING_FLAGS}
    settings = from_environment({}, **flags)
    assert (settings.id, settings.also) == ("a", (ProviderSettings("pi5", "http://pi5:8080"),))
    arguments = ["--id", "a", "status", "--id", "b"]
    assert parser(arguments).parse_args(arguments).id == ["b"]


# -- on the bus -------------------------------------------------------------------------------


class Board(ScriptedLlama):
    """A server with one model. Its streams say one word, and end when ``go`` is set."""

    def __init__(self, model, **said):
        super().__init__(models=[row(model, n_ctx=4096)], **said)
        self.go = threading.Event()
        self.more_routes = {"/v1/chat/completions": self._stream}

    def _stream(self, request):
        rest = lambda exchange: exchange.watch(PATIENCE, self.go)  # noqa: E731
        head = {"headers": {"headers": {"content-type": "text/event-stream"}}}
        return {"script": [head, {"send": WORD}, rest, {"send": FINISH}]}

    def chats(self):
        return [each for each in self.requests if each.path == "/v1/chat/completions"]


class House:
    """Engine, router, and one worker on the boards ``a`` and ``b``."""

    def __init__(self, stack, *, resolve=False, **settings):
        self.a = stack.enter_context(Board("model-a"))
        self.b = stack.enter_context(Board("model-b", key="key-b"))
        self.engine = stack.enter_context(LoopbackEngine())
        self.router = stack.enter_context(LoopbackRouter(self.engine.url, environ={}))
        address = None if resolve else self.b.url
        if resolve:
            self.router.set_config("b", api_url=self.b.url, api_key="key-b")
        self.settings = Settings(
            url=self.engine.url,
            id="a",
            api_url=self.a.url,
            also=(ProviderSettings("b", address, None if resolve else "key-b"),),
            drain=0.0,
            **settings,
        )
        self.worker = stack.enter_context(ProviderWorker(self.settings))
        self.caller = stack.enter_context(Caller(self.settings))

    def call(self, provider, name, **payload):
        return self.caller.call(f"provider::{provider}::{name}", payload, timeout=PATIENCE)

    def stream(self, provider, key=None):
        """Begin a stream; its frames, as they come."""
        writer, frames = self.caller.open_channel()
        payload = {"model": f"model-{provider}", "messages": [user("hi")], "writer_ref": writer}
        if key is not None:
            payload["resolution_key"] = key

        def run():
            with contextlib.suppress(BusError):
                self.call(provider, "stream", **payload)

        threading.Thread(target=run, daemon=True).start()
        return (each for each in frames if each["type"] != "ping")


@pytest.fixture
def new_house():
    with contextlib.ExitStack() as stack:
        houses = []

        def make(**settings):
            houses.append(House(stack, **settings))
            return houses[-1]

        yield make
        for house in houses:
            house.a.go.set()
            house.b.go.set()


@pytest.fixture
def house(new_house):
    found = new_house()
    assert found.worker.wait_ready(PATIENCE)
    return found


def test_each_is_a_provider_of_its_own(house):
    workers = house.caller.call("engine::workers::list", {})["workers"]
    ours = [each["name"] for each in workers if each["name"].startswith("provider-")]
    assert [name for name in ours if "-cli-" not in name] == ["provider-a"]
    tokens = {
        each: house.caller.call(
            "state::get", {"scope": f"provider-{each}", "key": "registration_token"}
        )
        for each in "ab"
    }
    assert None not in tokens.values()
    assert tokens["a"] != tokens["b"]
    models = house.caller.call("router::models::list", {})["models"]
    assert {(each["provider"], each["id"]) for each in models} == {
        ("a", "model-a"),
        ("b", "model-b"),
    }
    for each in "ab":
        declared = house.router.registry.records[each].declaration
        assert declared["worker_id"] == "provider-a"
        assert declared["credential_env_var"] == f"{each.upper()}_API_KEY"
        assert declared["default_models"] == [f"model-{each}"]


def test_each_asks_its_own_server_with_its_own_key(house):
    house.a.go.set()
    house.b.go.set()
    for each in "ab":
        *_, last = house.stream(each)
        assert (last["type"], last["message"]["provider"]) == ("done", each)
    assert len(house.a.chats()) == len(house.b.chats()) == 1
    assert house.b.chats()[0].headers["authorization"] == "Bearer key-b"
    assert all("authorization" not in each.headers for each in house.a.requests)
    for each in "ab":
        counted = house.call(each, "count_tokens", model="m", messages=[user("x")])
        assert counted["tokens"] == 7
    assert "POST /v1/chat/completions/input_tokens" in house.b.paths()


def test_an_abort_ends_the_request_of_one_and_not_that_of_the_other(house):
    frames = {each: house.stream(each, key="the same") for each in "ab"}
    for each in "ab":
        assert next(frames[each])["type"] == "start"
    assert house.call("a", "abort", request_id="the same") == {"aborted": True}
    assert all(frame["type"] != "done" for frame in frames["a"])
    assert house.call("a", "abort", request_id="the same") == {"aborted": False}
    assert house.a.client_closed.wait(PATIENCE)
    (stream,) = house.call("b", "status")["streams"]
    assert stream["request"] == "the same"
    house.b.go.set()
    assert list(frames["b"])[-1]["type"] == "done"
    assert not house.b.client_closed.is_set()


def test_each_has_limits_of_its_own(new_house):
    house = new_house(max_streams=1, max_requests=1)
    assert house.worker.wait_ready(PATIENCE)
    frames = {each: house.stream(each) for each in "ab"}
    for each in "ab":
        assert next(frames[each])["type"] == "start"
    (refused,) = house.stream("a")
    assert refused["error"]["error_kind"] == "rate_limited"
    errors = {each: house.call(each, "status")["errors"] for each in "ab"}
    assert [each["where"] for each in errors["a"]] == ["stream refused"]
    assert errors["b"] == []


def test_each_tells_of_itself_and_lists_the_others(house):
    frames = house.stream("b")
    assert next(frames)["type"] == "start"
    of_a, of_b = house.call("a", "status"), house.call("b", "status")
    assert (of_a["id"], of_a["active_streams"], of_a["streams"], of_a["calls"]) == ("a", 0, [], 0)
    assert (of_b["id"], of_b["active_streams"], of_b["calls"]) == ("b", 1, 1)
    assert (of_a["server"]["url"], of_b["server"]["url"]) == (house.a.url, house.b.url)
    listed = [
        {"id": "a", "url": house.a.url, "state": "ready", "active_streams": 0},
        {"id": "b", "url": house.b.url, "state": "ready", "active_streams": 1},
    ]
    assert of_a["providers"] == of_b["providers"] == listed
    assert house.worker.stats()["providers"] == listed
    assert house.worker.stats()["id"] == "a"
    house.b.go.set()
    assert list(frames)[-1]["type"] == "done"
    wait_for(lambda: house.call("b", "status")["outcomes"] == {"end": 1})
    assert house.call("a", "status")["outcomes"] == {}


def test_a_server_that_is_away_is_the_trouble_of_one_alone(new_house):
    house = new_house()
    assert house.worker.wait_ready(PATIENCE)
    house.a.go.set()
    house.b.stop()
    (error,) = house.stream("b")
    assert error["error"]["error_kind"] == "transient"
    assert list(house.stream("a"))[-1]["type"] == "done"
    wait_for(lambda: house.call("b", "status")["server"]["state"] == "away")
    assert house.call("a", "status")["server"]["state"] == "ready"
    assert house.call("a", "status")["errors"] == []
    models = house.caller.call("router::models::list", {})["models"]
    assert {each["id"] for each in models} == {"model-a", "model-b"}


def test_the_router_may_say_where_each_one_is(new_house):
    house = new_house(resolve=True)
    assert house.worker.wait_ready(PATIENCE)
    house.b.go.set()
    assert list(house.stream("b"))[-1]["type"] == "done"
    assert house.b.chats()[0].headers["authorization"] == "Bearer key-b"


def test_only_the_first_one_looks_around_on_its_machine(monkeypatch):
    with (
        Board("model-x") as board,
        LoopbackEngine() as engine,
        LoopbackRouter(engine.url, environ={}),
    ):
        monkeypatch.setattr("provider_llamacpp.served.PORTS", (board.port,))
        settings = Settings(url=engine.url, id="a", also=(ProviderSettings("b"),), drain=0.0)
        with ProviderWorker(settings) as worker, Caller(settings) as caller:
            wait_for(lambda: worker.stats()["server"]["url"] == board.url)
            with pytest.raises(BusError, match=r"nobody says where the llama-server of b is.*--id"):
                caller.call("provider::b::refresh_models", {}, timeout=PATIENCE)
            assert worker.wait_ready(0.1) is False
            models = caller.call("router::models::list", {})["models"]
            assert [each["provider"] for each in models] == ["a"]


def test_all_of_them_declare_again_when_the_router_comes_back(house):
    house.router.restart()
    for each in "ab":
        assert house.router.wait_for_provider(each, PATIENCE)
        assert house.router.wait_for_models(each, PATIENCE)


def test_a_stop_ends_the_streams_of_all(house):
    frames = {each: house.stream(each) for each in "ab"}
    for each in "ab":
        assert next(frames[each])["type"] == "start"
    assert house.worker.alive
    house.worker.stop()
    for each in "ab":
        *_, last = frames[each]
        assert (last["type"], last["error"]["error_kind"]) == ("error", "transient")
    assert not house.worker.alive
    left = [each.name for each in threading.enumerate()]
    assert [name for name in left if name.startswith(("a-", "b-"))] == []


def _answer(house, each):
    try:
        return house.call(each, "status")
    except BusError:
        return None


def test_a_lost_engine_is_told_of_each(house):
    house.engine.drop_worker("provider-a")
    wait_for(lambda: house.worker.stats()["reconnects"] == 1 and house.worker.stats()["connected"])
    for each in "ab":
        # Connected is greeted: nobody says when the engine has read what was registered again.
        wait_for(lambda each=each: _answer(house, each) is not None)
        errors = house.call(each, "status")["errors"]
        assert ("engine", "disconnected") in [(one["where"], one["kind"]) for one in errors]


def test_two_real_servers(llama_factory):
    first = llama_factory("demo", parallel=1, ctx_size=2048)
    second = llama_factory("loop", parallel=1, ctx_size=4096)
    with LoopbackEngine() as engine, LoopbackRouter(engine.url, environ={}):
        settings = Settings(
            url=engine.url,
            id="desk",
            api_url=first.url,
            also=(ProviderSettings("pi5", second.url),),
            drain=0.0,
        )
        with ProviderWorker(settings) as worker, Caller(settings) as caller:
            assert worker.wait_ready(PATIENCE)
            models = caller.call("router::models::list", {})["models"]
            found = {each["provider"]: (each["id"], each["context_window"]) for each in models}
            assert found == {"desk": ("demo", 2048), "pi5": ("loop", 4096)}
            for provider, model, text in (("desk", "demo", "Hello! I"), ("pi5", "loop", "one two")):
                answer = caller.call(
                    "router::complete",
                    {
                        "provider": provider,
                        "model": model,
                        "messages": [user("hi")],
                        "max_output_tokens": 20,
                    },
                    timeout=PATIENCE,
                )
                said = "".join(
                    block.get("text", "")
                    for block in answer["message"]["content"]
                    if block["type"] == "text"
                )
                assert text in said
