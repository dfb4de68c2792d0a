"""The doctor on the whole path and on the bus: it names each cause and its remedy."""

import io
import json
import re
from contextlib import contextmanager

import pytest
from looking import MACHINE, SECRET, bus_before, direct, look, nowhere
from peers import free_port
from scripted_llama import ScriptedLlama

from provider_llamacpp import BusError, ProviderWorker, Settings
from provider_llamacpp.cli import main
from provider_llamacpp.commands import checks_machine
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.commands.checks import Finding, exit_code, fault, ok, skipped, warning
from provider_llamacpp.commands.doctor import Display, examine
from provider_llamacpp.commands.terminal import Terminal
from provider_llamacpp.local.client import BusClient
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.router import LoopbackRouter

WORKER = "provider-llamacpp"
TOKEN = {"scope": "provider-llamacpp", "key": "registration_token"}


@pytest.fixture
def llama_like():
    with ScriptedLlama() as server:
        yield server


@pytest.fixture
def bus(llama_like):
    with bus_before(llama_like) as bus:
        yield bus


# -- all well --------------------------------------------------------------------------------------


def test_all_well(bus, llama_like):
    found = look(bus.settings)
    assert {each.level for each in found.values()} == {"ok"}
    assert exit_code(found.values()) == 0
    assert WORKER in found["worker"].text and "pid" in found["worker"].text
    assert "b11434-0123abc" in found["server"].text
    assert "2 slots of 8192 tokens" in found["context"].text
    assert "32768" in found["context"].text
    assert "20 tokens, 500 tokens/s" in found["generation"].text
    assert found["embeddings"].facts["dimensions"] == 2
    assert found["catalog"].facts["models"] == ["demo"]


@pytest.mark.parametrize(
    ("profile", "words"),
    [("0.21", "before 0.23"), ("0.22", "before 0.23"), ("0.23", "0.23 or 0.24"), ("0.25", "0.25")],
)
def test_versions_of_the_engine(profile, words, llama_like):
    with LoopbackEngine(profile=profile) as engine:
        found = look(Settings(url=engine.url, api_url=llama_like.url))
    assert found["engine"].level == "ok"
    assert words in found["engine"].text
    assert (found["engine"].facts["features"] is None) is (profile != "0.25")


# -- the bus ---------------------------------------------------------------------------------------


def test_engine_down_does_not_stop_the_checks_of_the_server(llama_like):
    found = look(direct(llama_like))
    assert found["engine"].level == "fault"
    assert "refused" in found["engine"].text
    assert "--url" in found["engine"].remedy
    for step in ("router", "worker", "state", "registration", "catalog"):
        assert found[step].level == "skipped"
    for step in ("address", "server", "key", "model", "generation", "context", "template"):
        assert found[step].level == "ok", found[step]
    assert "router was not asked" in found["address"].text
    assert exit_code(found.values()) == 2


def test_engine_wants_a_token(llama_like):
    with LoopbackEngine(token="right") as engine:
        found = look(Settings(url=engine.url, api_url=llama_like.url))
    assert found["engine"].level == "fault"
    assert "III_TOKEN" in found["engine"].remedy
    assert found["generation"].level == "ok"


def test_something_else_in_place_of_the_engine(llama_like):
    found = look(Settings(url=llama_like.url.replace("http", "ws"), api_url=llama_like.url))
    assert found["engine"].level == "fault"
    assert "--url" in found["engine"].remedy


def test_router_missing(llama_like):
    with LoopbackEngine() as engine:
        settings = Settings(url=engine.url, api_url=llama_like.url)
        with ProviderWorker(settings):
            assert engine.wait_for_function("provider::llamacpp::status")
            found = look(settings)
    assert found["engine"].level == "ok"
    assert found["router"].level == "fault"
    assert "llm-router" in found["router"].text and "llm-router" in found["router"].remedy
    assert found["worker"].level == "ok"
    assert found["registration"].level == found["catalog"].level == "skipped"
    assert found["generation"].level == "ok"


def test_router_in_another_namespace(llama_like):
    with LoopbackEngine() as engine, LoopbackRouter(engine.url):
        found = look(Settings(url=engine.url, api_url=llama_like.url, namespace="home"))
    assert found["router"].level == "fault"
    assert "default" in found["router"].text
    assert "III_NAMESPACE" in found["router"].remedy


def test_worker_missing(llama_like):
    with LoopbackEngine() as engine, LoopbackRouter(engine.url):
        found = look(Settings(url=engine.url, api_url=llama_like.url))
    assert found["worker"].level == "fault"
    assert "provider-llamacpp" in found["worker"].remedy
    assert found["registration"].level == "skipped"
    assert found["catalog"].level == "skipped"


def test_worker_with_another_id(bus):
    found = look(Settings(url=bus.engine.url, api_url=bus.settings.api_url, id="second"))
    assert found["worker"].level == "fault"
    assert "llamacpp" in found["worker"].text
    assert "--id" in found["worker"].remedy


def test_name_conflict(bus):
    """The name of this worker belongs to another one, which serves another id."""
    found = look(
        Settings(url=bus.engine.url, api_url=bus.settings.api_url, id="second", worker_name=WORKER)
    )
    assert found["worker"].level == "fault"
    assert "name conflict" in found["worker"].text and WORKER in found["worker"].text
    assert "III_WORKER_NAME" in found["worker"].remedy


def test_id_served_by_another_worker(bus):
    found = look(
        Settings(url=bus.engine.url, api_url=bus.settings.api_url, worker_name="provider-mine")
    )
    assert found["worker"].level == "warning"
    assert WORKER in found["worker"].text
    assert WORKER in found["worker"].remedy and "--id" in found["worker"].remedy


def test_an_id_of_which_another_worker_serves_a_part(bus):
    with foreign(bus.engine, "intruder", "provider::llamacpp::extra"):
        found = look(bus.settings)
    assert found["worker"].level == "fault"
    assert "name conflict" in found["worker"].text and "intruder" in found["worker"].text


def test_a_worker_that_lacks_functions(llama_like):
    with LoopbackEngine() as engine, foreign(engine, WORKER, "provider::llamacpp::stream"):
        found = look(Settings(url=engine.url, api_url=llama_like.url))
    assert found["worker"].level == "fault"
    assert "count_tokens" in found["worker"].text and "restart" in found["worker"].remedy


@contextmanager
def foreign(engine, name, function_id):
    """Another worker, without a pid: the engine lists its functions and not itself."""
    client = BusClient(engine.url, name)
    client.serve(function_id, lambda data: {}, "another one")
    client.start()
    try:
        assert engine.wait_for_function(function_id)
        yield
    finally:
        client.stop()


def test_state_missing(llama_like):
    with LoopbackEngine(state=False) as engine, LoopbackRouter(engine.url) as router:
        settings = Settings(url=engine.url, api_url=llama_like.url)
        router.registry.register({"id": "llamacpp", "worker_id": WORKER})
        found = look(settings)
    assert found["state"].level == "warning"
    assert "state worker" in found["state"].text and "state worker" in found["state"].remedy
    assert found["registration"].level == "skipped"
    assert "token" in found["registration"].text


def test_token_lost(bus):
    with Caller(bus.settings) as caller:
        caller.call("state::delete", TOKEN)
    found = look(bus.settings)
    assert found["state"].level == "ok" and "no registration token" in found["state"].text
    assert found["registration"].level == "fault"
    assert "token is lost" in found["registration"].text
    assert "registry" in found["registration"].remedy
    assert "restart the router" in found["registration"].remedy


def test_token_of_another_registration(bus):
    with Caller(bus.settings) as caller:
        caller.call("state::set", {**TOKEN, "value": SECRET})
    found = look(bus.settings)
    assert found["registration"].level == "fault"
    assert "another token" in found["registration"].text


def test_router_forgot_the_provider(bus):
    bus.router.registry.forget("llamacpp")
    found = look(bus.settings)
    assert found["registration"].level == "fault"
    assert "does not know" in found["registration"].text
    assert found["catalog"].level == "skipped"


def test_router_that_answers_nonsense(bus):
    bus.router.registry.config["llamacpp"] = {"api_url": 5}
    found = look(bus.settings)
    assert found["registration"].level == "fault"
    assert "bad_resolve_response" in found["registration"].text


@pytest.mark.parametrize(
    ("function", "step", "level"),
    [
        ("engine::workers::list", "engine", "fault"),
        ("state::get", "state", "warning"),
        ("router::models::list", "catalog", "warning"),
        ("router::provider::resolve", "registration", "fault"),
        ("provider::llamacpp::status", "address", "ok"),
    ],
)
def test_what_does_not_answer(bus, monkeypatch, function, step, level):
    call = Caller.call

    def silent(caller, function_id, data, **options):
        if function_id == function:
            raise BusError("TIMEOUT", f"{function} did not answer")
        return call(caller, function_id, data, **options)

    monkeypatch.setattr(Caller, "call", silent)
    found = look(bus.settings)
    assert found[step].level == level
    assert level == "ok" or "did not answer" in found[step].text
    assert found["generation"].level == "ok"


def test_an_engine_that_hides_the_worker(bus, monkeypatch):
    call = Caller.call

    def hidden(caller, function_id, data, **options):
        if function_id == "engine::workers::list":
            return {"workers": None}
        return call(caller, function_id, data, **options)

    monkeypatch.setattr(Caller, "call", hidden)
    assert look(bus.settings)["worker"].text == "provider-llamacpp serves 'llamacpp'"


def test_catalog_empty(bus):
    bus.router.registry.catalog.clear()
    found = look(bus.settings)
    assert found["catalog"].level == "warning"
    assert "below" in found["catalog"].remedy


# -- what is shown ---------------------------------------------------------------------------------

SHOWN = [
    ok("python", "3.11.2 on Linux aarch64"),
    fault("engine", "no iii engine answers at ws://127.0.0.1:49134", "start it \x1b[31mnow"),
    skipped("router", "not looked at without the engine"),
    skipped("worker", "not looked at without the engine"),
    skipped("state", "another reason", "and what to do"),
    warning("context", "1 slot of 2048 tokens. " * 4, "restart llama-server with more"),
    skipped("vision", "the server does not tell"),
]
AS_SHOWN = """\
ok       python       3.11.2 on Linux aarch64
fault    engine       no iii engine answers at ws://127.0.0.1:49134
                      -> start it \\x1b[31mnow
skipped  router       not looked at without the engine (nor worker)
skipped  state        another reason
                      -> and what to do
warning  context      1 slot of 2048 tokens. 1 slot of 2048 tokens. 1 slot of
                      2048 tokens. 1 slot of 2048 tokens.
                      -> restart llama-server with more
skipped  vision       the server does not tell
1 fault, 1 warning.
"""


@pytest.mark.parametrize("rich", [False, True])
def test_80_columns(rich):
    if rich:
        pytest.importorskip("rich")
    out = io.StringIO()
    display = Display(Terminal(out, width=80, live=True, rich=rich))
    for each in SHOWN:
        display.show(each)
    display.end(SHOWN)
    text = re.sub("\x1b[^m]*m", "", out.getvalue())
    assert text == AS_SHOWN
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) <= 24


def test_the_whole_walk_fits_a_terminal(bus):
    out = io.StringIO()
    display = Display(Terminal(out, width=80))
    findings = []
    for each in examine(bus.settings, machine=MACHINE, environ={}):
        display.show(each)
        findings.append(each)
    display.end(findings)
    lines = out.getvalue().splitlines()
    assert lines[-1] == "All is well."
    assert len(lines) <= 23 and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("levels", "code", "words"),
    [
        (["ok", "skipped"], 0, "All is well."),
        (["ok", "warning", "warning"], 1, "2 warnings."),
        (["fault", "warning", "fault"], 2, "2 faults, 1 warning."),
    ],
)
def test_what_it_comes_to(levels, code, words):
    findings = [Finding("step", level, "text") for level in levels]
    assert exit_code(findings) == code
    out = io.StringIO()
    Display(Terminal(out)).end(findings)
    assert out.getvalue() == words + "\n"


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch):
    for name in checks_machine.PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("LLAMACPP_API_KEY", raising=False)
    monkeypatch.setattr(checks_machine.platform, "machine", lambda: MACHINE)


def test_command(bus, quiet, capsys):
    assert main(["doctor", "--url", bus.engine.url]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("All is well.\n") and err == ""


def test_command_with_json(bus, llama_like, quiet, capsys):
    llama_like.embeddings = None
    assert main(["doctor", "--url", bus.engine.url, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 1
    by_step = {each["step"]: each for each in report["findings"]}
    assert by_step["embeddings"]["level"] == "warning"
    assert "--embeddings" in by_step["embeddings"]["remedy"]
    assert by_step["context"]["facts"] == {"slots": 2, "tokens": 8192, "trained": 32768}


def test_command_on_a_broken_set_up(quiet, capsys):
    arguments = ["doctor", "--url", nowhere(), "--api-url", f"http://127.0.0.1:{free_port()}"]
    assert main(arguments) == 2
    assert capsys.readouterr().out.endswith("2 faults.\n")


def test_command_wakes(llama_like, quiet, capsys):
    llama_like.sleeps()
    arguments = ["doctor", "--url", nowhere(), "--api-url", llama_like.url]
    assert main(arguments) == 2
    assert "is sleeping, and stays so" in capsys.readouterr().out
    assert main([*arguments, "--wake"]) == 2
    assert "had to wake up" in capsys.readouterr().out.replace("\n" + " " * 22, " ")
