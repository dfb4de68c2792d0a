"""The doctor on llama-server and its model: it names each cause and its remedy."""

import io

import pytest
import requests
from looking import BUS, SECRET, bus_before, direct, look, nowhere
from peers import ScriptedServer, answer_json, free_port, wait_for
from scripted_llama import CAPS, ScriptedLlama, failure, row

from provider_llamacpp import Settings
from provider_llamacpp.commands.checks import exit_code
from provider_llamacpp.server.discovery import Discovery


@pytest.fixture
def llama_like():
    with ScriptedLlama() as server:
        yield server


@pytest.fixture
def bus(llama_like):
    with bus_before(llama_like) as bus:
        yield bus


# -- the address and the key -----------------------------------------------------------------------


def test_address_and_key_of_the_router(bus, llama_like):
    bus.router.registry.config["llamacpp"] = {"api_url": llama_like.url + "/v1", "api_key": SECRET}
    llama_like.key = SECRET
    found = look(Settings(url=bus.engine.url))
    assert found["address"].level == "ok"
    assert llama_like.url in found["address"].text
    assert "router's configuration" in found["address"].text
    assert found["address"].facts["key"] is True
    assert found["key"].level == "ok" and "accepted" in found["key"].text


def test_key_of_the_environment(bus, llama_like):
    llama_like.key = SECRET
    found = look(Settings(url=bus.engine.url, api_url=llama_like.url, api_key=SECRET))
    assert "LLAMACPP_API_KEY" in found["address"].text
    assert found["key"].level == "ok"
    found = look(direct(llama_like, api_key=SECRET))
    assert "LLAMACPP_API_KEY" in found["address"].text


def test_a_reference_to_a_key_that_leads_nowhere(bus):
    bus.router.registry.config["llamacpp"] = {"api_key": "env://NOT_SET"}
    found = look(bus.settings)
    assert found["address"].level == "fault"
    assert "env://NOT_SET" in found["address"].text
    assert "api_key" in found["address"].remedy


def test_the_address_that_the_worker_uses(bus, llama_like):
    found = look(Settings(url=bus.engine.url))
    assert found["address"].level == "ok"
    assert llama_like.url in found["address"].text and "worker" in found["address"].text


def test_no_server_at_the_usual_ports(monkeypatch):
    ports = (free_port(), free_port())
    monkeypatch.setattr("provider_llamacpp.commands.direct.Discovery", usual(ports))
    found = look()
    assert found["address"].level == "fault"
    assert "api_url" in found["address"].remedy and "--api-url" in found["address"].remedy
    for step in ("server", "key", "model", "generation", "context", "vision"):
        assert found[step].level == "skipped"


def usual(ports):
    return lambda upstream, *, provider: Discovery(upstream, provider=provider, ports=ports)


def test_something_else_at_a_usual_port(monkeypatch):
    with ScriptedServer({"status": 404, "body": "no", "framing": "length"}) as other:
        ports = (other.port, free_port())
        monkeypatch.setattr("provider_llamacpp.commands.direct.Discovery", usual(ports))
        found = look()
    assert "something else" in found["address"].text


def test_found_at_a_usual_port(monkeypatch, llama_like):
    monkeypatch.setattr("provider_llamacpp.commands.direct.Discovery", usual((llama_like.port,)))
    found = look()
    assert found["address"].level == "ok" and "usual port" in found["address"].text


def test_an_address_that_is_none():
    found = look(Settings(url=nowhere(), api_url="http://127.0.0.1:8080/?a=1"))
    assert found["address"].level == "fault"
    assert "api_url" in found["address"].text
    assert "correct api_url" in found["address"].remedy


def test_server_down():
    found = look(Settings(url=nowhere(), api_url=f"http://127.0.0.1:{free_port()}"))
    assert found["server"].level == "fault"
    assert "refused" in found["server"].text
    assert "start llama-server" in found["server"].remedy
    assert "--api-url" in found["server"].remedy
    for step in ("key", "model", "generation", "embeddings"):
        assert found[step].level == "skipped"


def test_server_down_where_a_proxy_is_set():
    environ = {"HTTPS_PROXY": f"http://user:{SECRET}@proxy:3128", "http_proxy": " ", "PATH": "/"}
    settings = Settings(url=nowhere(), api_url=f"http://127.0.0.1:{free_port()}")
    found = look(settings, environ=environ)
    assert "HTTPS_PROXY" in found["proxies"].text and "http_proxy" not in found["proxies"].text
    assert "HTTPS_PROXY" in found["server"].remedy


def test_something_else_in_place_of_the_server():
    page = {"status": 200, "body": "<html>hello</html>", "framing": "length"}
    with ScriptedServer(page) as other:
        found = look(direct(other))
    assert found["server"].level == "fault"
    assert "api_url" in found["server"].remedy


def test_loading(llama_like):
    llama_like.health = failure(503, "Loading model", "unavailable_error")
    found = look(direct(llama_like))
    assert found["server"].level == "warning"
    assert "loading" in found["server"].text and "503" in found["server"].text
    assert "wait" in found["server"].remedy
    assert found["generation"].level == "skipped" and "loading" in found["generation"].text
    assert exit_code([each for each in found.values() if each.step != "engine"]) == 1


def test_loading_that_health_does_not_tell(llama_like):
    llama_like.models = None
    llama_like.health = answer_json({"status": "ok"})
    loading = failure(503, "Loading model", "unavailable_error")
    llama_like._routes = {"/v1/models": loading}
    found = look(direct(llama_like))
    assert found["server"].level == "warning" and "503" in found["server"].text


@pytest.mark.parametrize("key", [None, SECRET])
def test_wrong_key(llama_like, key):
    llama_like.key = "another"
    found = look(direct(llama_like, api_key=key))
    assert found["server"].level == "ok"
    assert found["key"].level == "fault"
    assert ("none came" if key is None else "refused") in found["key"].text
    assert "--api-key" in found["key"].remedy and "LLAMACPP_API_KEY" in found["key"].remedy
    assert found["generation"].level == "skipped"


# -- the model -------------------------------------------------------------------------------------


def test_sleeping_and_left_asleep(llama_like):
    llama_like.sleeps()
    found = look(direct(llama_like))
    assert found["model"].level == "ok"
    assert "sleeping" in found["model"].text
    assert "--sleep-idle-seconds" in found["model"].remedy
    assert found["generation"].level == "skipped"
    assert "--wake" in found["generation"].remedy
    assert "--wake" in found["embeddings"].text
    assert "8192" in found["context"].text
    assert "does not tell of thinking switch" in found["template"].text
    assert llama_like.woken() == []


def test_sleeping_and_woken(llama_like):
    labels = []

    def working(label):
        labels.append(label)
        return io.StringIO()

    llama_like.sleeps()
    found = look(direct(llama_like), wake=True, working=working)
    assert found["generation"].level == "ok"
    assert "wake up" in found["generation"].text
    assert "waking demo" in labels
    assert found["embeddings"].level == "ok"
    assert found["template"].facts["jinja"] is True


def test_woken_and_gone(llama_like):
    def cuts(exchange):
        llama_like._routes = {"/v1/models": {"script": [{"close": True}]}}
        exchange.gone()

    llama_like.sleeps()
    llama_like.chat = {"script": [cuts]}
    found = look(direct(llama_like), wake=True)
    assert found["generation"].level == "fault"
    assert "--parallel" in found["generation"].remedy
    assert found["embeddings"].level == "skipped"


def test_a_server_without_models(llama_like):
    llama_like.models = []
    found = look(direct(llama_like))
    assert found["model"].level == "fault"
    assert "-m FILE" in found["model"].remedy
    assert found["vision"].level == "skipped"


def test_no_token(llama_like):
    llama_like.chat = failure(500, "the GPU is on fire")
    found = look(direct(llama_like))
    assert found["generation"].level == "fault"
    assert "500" in found["generation"].text and "on fire" in found["generation"].text


def test_a_token_without_timings(llama_like):
    llama_like.chat = answer_json({"choices": []})
    assert look(direct(llama_like))["generation"].text.startswith("one token after ")


@pytest.mark.parametrize(
    ("context", "trained", "slots", "level", "words"),
    [
        (512, 32768, 1, "fault", ["--ctx-size"]),
        (2048, 32768, 4, "warning", ["--ctx-size", "--parallel", "4 slots"]),
        (2048, 2048, 1, "warning", ["trained on a longer context"]),
        (2048, None, None, "warning", ["--ctx-size"]),
        (32768, 32768, 4, "ok", ["--parallel"]),
        (8192, 32768, 4, "ok", []),
    ],
)
def test_context(llama_like, context, trained, slots, level, words):
    llama_like.models = [row("demo", n_ctx=context, n_ctx_train=trained)]
    llama_like.props["total_slots"] = slots
    found = look(direct(llama_like))["context"]
    assert found.level == level
    assert str(context) in found.text
    for each in words:
        assert each in found.remedy
    assert found.facts == {"slots": slots, "tokens": context, "trained": trained}


def test_context_that_the_server_does_not_tell(llama_like):
    llama_like.models = [row("demo")]
    llama_like.props.pop("default_generation_settings")
    assert look(direct(llama_like))["context"].level == "skipped"


def test_jinja_off(llama_like):
    llama_like.template_answer = failure(500, "tools param requires --jinja flag")
    found = look(direct(llama_like))["template"]
    assert found.level == "fault"
    assert "--jinja" in found.remedy


@pytest.mark.parametrize("caps", [{**CAPS, "supports_tools": False}, None])
def test_template_without_tools(llama_like, caps):
    """An older build tells nothing: then the prompt shows it."""
    llama_like.props["chat_template_caps"] = caps
    llama_like.tools_in_prompt = False
    found = look(direct(llama_like))["template"]
    assert found.level == "warning"
    assert "tools" in found.text
    assert "--chat-template-file" in found.remedy


@pytest.mark.parametrize(
    "answer", [failure(404, "File Not Found"), {"script": [{"close": True}], "framing": "length"}]
)
def test_template_that_cannot_be_asked(llama_like, answer):
    llama_like.template_answer = answer
    found = look(direct(llama_like))["template"]
    assert found.level == "ok"
    assert found.facts["jinja"] is None and found.facts["tools"] is True
    assert found.facts["parallel tools"] is False and found.facts["thinking switch"] is None


def test_embeddings_off(llama_like):
    llama_like.embeddings = None
    found = look(direct(llama_like))["embeddings"]
    assert found.level == "warning"
    assert "--embeddings" in found.remedy and "--pooling" in found.remedy


def test_embeddings_without_pooling(llama_like):
    words = "Pooling type 'none' is not OAI compatible. Please use a different pooling type"
    llama_like.embeddings = failure(400, words, "invalid_request_error")
    found = look(direct(llama_like))["embeddings"]
    assert found.level == "warning" and "--pooling" in found.remedy


def test_embeddings_that_fail(llama_like):
    llama_like.embeddings = failure(500, "no")
    found = look(direct(llama_like))["embeddings"]
    assert found.level == "warning" and "log" in found.remedy


def test_embeddings_of_which_the_server_does_not_tell(llama_like):
    llama_like._routes = {"/v1/embeddings": failure(404, "File Not Found")}
    assert look(direct(llama_like))["embeddings"].level == "skipped"


def test_a_model_that_only_embeds(llama_like):
    llama_like.props["chat_template_caps"] = {"supports_tools": False}
    llama_like.template_answer = answer_json({"prompt": "always the same"})
    found = look(direct(llama_like))
    assert found["generation"].level == found["template"].level == "skipped"
    assert found["embeddings"].level == "ok"


@pytest.mark.parametrize(
    ("modalities", "level", "words"),
    [
        ({"vision": True, "audio": True}, "ok", "images, audio"),
        ({"vision": False, "audio": False}, "ok", "--mmproj"),
        (None, "skipped", "does not tell"),
    ],
)
def test_vision(llama_like, modalities, level, words):
    llama_like.props["modalities"] = modalities
    if modalities is None:
        del llama_like.models[0]["architecture"]
    found = look(direct(llama_like))["vision"]
    assert found.level == level and words in found.text


# -- router mode -----------------------------------------------------------------------------------


def in_router_mode(server, **states):
    server.models = [
        row(name, state=state, **({"n_ctx": 4096} if state in ("loaded", "sleeping") else {}))
        for name, state in states.items()
    ]
    own = dict(server.props)
    server.model_props = {
        name: {**own, "is_sleeping": state == "sleeping"}
        for name, state in states.items()
        if state in ("loaded", "sleeping")
    }
    server.props = {"role": "router", "build_info": "b11434", "is_sleeping": False}


def test_several_models(llama_like):
    in_router_mode(llama_like, one="unloaded", two="loaded")
    found = look(direct(llama_like))
    assert "router mode" in found["server"].text
    assert "2 models (1 unloaded, 1 loaded)" in found["model"].text
    assert "two" in found["model"].text
    assert found["generation"].level == "ok"
    assert "4096" in found["context"].text


def test_models_of_which_none_is_loaded(llama_like):
    in_router_mode(llama_like, one="unloaded", two="unloaded")
    found = look(direct(llama_like))
    assert found["generation"].level == "skipped"
    for step in ("context", "embeddings"):
        assert found[step].level == "skipped" and "--wake" in found[step].text
    assert llama_like.woken() == []


def test_a_model_loaded_by_the_doctor(llama_like):
    in_router_mode(llama_like, one="unloaded", two="unloaded")
    found = look(direct(llama_like), wake=True)
    assert found["generation"].level == "ok"
    assert "one" in found["generation"].text
    asked = [request for request in llama_like.requests if request.path == "/v1/chat/completions"]
    assert [request.json()["model"] for request in asked] == ["one"]


def test_a_sleeping_model_of_which_the_launch_options_tell(llama_like):
    in_router_mode(llama_like, one="unloaded", two="sleeping")
    llama_like.models[1]["status"]["args"] = ["llama-server", "--embeddings"]
    found = look(direct(llama_like))
    assert "two: sleeping" in found["model"].text and found["model"].remedy
    assert found["embeddings"].level == "ok" and found["embeddings"].facts == {"on": True}
    assert llama_like.woken() == []


@pytest.mark.parametrize("code", [1, None])
def test_a_model_that_failed_to_load(llama_like, code):
    in_router_mode(llama_like, one="unloaded", two="loaded")
    status = llama_like.models[0]["status"]
    status["failed"] = True
    if code is not None:
        status["exit_code"] = code
    found = look(direct(llama_like))["model"]
    assert found.level == "warning"
    assert "one" in found.text and ("exit code 1" in found.text) is (code == 1)
    assert "log" in found.remedy


# -- a real server ---------------------------------------------------------------------------------


def test_real_server(llama):
    found = look(direct(llama))
    assert {each.level for step, each in found.items() if step not in BUS} == {"ok"}
    assert found["context"].facts["tokens"] == 8192 and found["context"].facts["slots"] == 4
    assert found["template"].facts["thinking switch"] is True
    assert found["generation"].facts["timings"]["predicted_n"] == 1


def test_real_server_loading(llama_factory):
    server = llama_factory("heavy", wait=False)
    states = []

    def seen():
        states.append(look(direct(server))["server"])
        return states[-1].level == "warning"

    wait_for(seen, "a look while the model loads")
    assert "503" in states[-1].text and "wait" in states[-1].remedy


def test_real_server_sleeping(llama_factory):
    server = llama_factory(sleep_idle_seconds=1)

    def sleeping():
        return requests.get(f"{server.url}/props", timeout=10).json()["is_sleeping"] is True

    wait_for(sleeping, "the sleep")
    found = look(direct(server))
    assert "sleeping" in found["model"].text and found["generation"].level == "skipped"
    assert sleeping(), "the doctor woke it"
    found = look(direct(server), wake=True)
    assert found["generation"].level == "ok" and "wake up" in found["generation"].text
    assert found["template"].facts["jinja"] is True


def test_real_server_with_a_wrong_key(llama_factory):
    server = llama_factory(api_key="right")
    found = look(direct(server, api_key=SECRET))
    assert found["key"].level == "fault" and "--api-key" in found["key"].remedy
    assert look(direct(server, api_key="right"))["key"].level == "ok"


def test_real_server_small_without_embeddings_and_jinja(llama_factory):
    server = llama_factory(ctx_size=512, parallel=1, jinja=False)
    found = look(direct(server))
    assert found["context"].level == "fault" and "--ctx-size" in found["context"].remedy
    assert "131072" in found["context"].text
    assert found["embeddings"].level == "warning" and "--embeddings" in found["embeddings"].remedy
    assert found["template"].level == "fault" and "--jinja" in found["template"].remedy


def test_real_server_without_tools_and_pooling(llama_factory):
    server = llama_factory("plain", embeddings=True, pooling="none")
    found = look(direct(server))
    assert found["template"].level == "skipped" and "embeds" in found["template"].text
    assert found["embeddings"].level == "warning" and "--pooling" in found["embeddings"].remedy
