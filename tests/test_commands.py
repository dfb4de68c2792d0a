"""``models``, ``embed`` and ``count-tokens``: through the engine, and directly without one."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
from looking import bus_before, nowhere
from peers import answer_json, free_port
from scripted_llama import ScriptedLlama, row

from provider_llamacpp import BusError, ProviderError, Settings
from provider_llamacpp.cli import COMMANDS, main
from provider_llamacpp.commands import embed, models
from provider_llamacpp.commands.caller import Caller, Unreachable
from provider_llamacpp.commands.terminal import Terminal
from provider_llamacpp.errors import ProviderLlamacppError
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.router import LoopbackRouter
from provider_llamacpp.local.stack import LocalStack

OURS = ("doctor", "models", "embed", "count-tokens")
HEAVY = ("requests", "rich", "dataclasses_json", "backoff", "websocket", "asyncio")


@pytest.fixture
def llama_like():
    with ScriptedLlama() as server:
        yield server


@pytest.fixture
def bus(llama_like):
    with bus_before(llama_like) as bus:
        yield bus


@pytest.fixture
def no_engine():
    return nowhere()


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("LLAMACPP_API_KEY", raising=False)


def words(text):
    """The output's words, however it was wrapped."""
    return " ".join(text.split())


# -- help -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", OURS)
def test_help_has_an_example_and_imports_nothing_heavy(command):
    assert command in COMMANDS
    code = (
        "import sys\n"
        "from provider_llamacpp.cli import main\n"
        f"try: main([{command!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert f"provider-llamacpp {command}" in done.stdout.split("examples:")[1]
    assert max(map(len, done.stdout.splitlines())) <= 80
    loaded = done.stderr.split()
    assert not set(HEAVY).intersection(loaded)
    assert "provider_llamacpp.worker" not in loaded


# -- the caller -------------------------------------------------------------------------------


def test_an_engine_that_refuses_is_not_waited_for(no_engine):
    with pytest.raises(Unreachable) as caught:
        Caller(Settings(url=no_engine + "/?secret=1"), timeout=3600.0)
    assert "refused" in caught.value.problem and "secret" not in str(caught.value)
    assert "--url" in str(caught.value)


def test_an_engine_that_says_nothing(llama_like):
    silent = {"script": [{"hang_ms": 30_000}]}
    llama_like._routes = {"/": silent}
    with pytest.raises(Unreachable, match="no answer within"):
        Caller(Settings(url=llama_like.url.replace("http", "ws")), timeout=0.2)


# -- models -----------------------------------------------------------------------------------


def in_router_mode(server):
    server.models = [
        row("qwen3-8b", state="unloaded"),
        row("gemma-2b", state="loaded", n_ctx=8192, size=1_500_000_000),
        row("broken-1b", state="unloaded"),
        row("nomic-embed", state="unloaded"),
    ]
    server.models[2]["status"]["failed"] = True
    server.models[3]["status"]["args"] = ["llama-server", "--embeddings"]
    server.model_props = {
        "gemma-2b": {**server.props, "modalities": {"vision": True, "audio": True}}
    }
    server.props = {"role": "router", "is_sleeping": False}
    server.template_answer = answer_json({"prompt": "the same, thinking or not"})


AS_TABLE = """\
id           state     context    size  rank  capabilities
qwen3-8b     unloaded        -       -     2  tools, json
gemma-2b     loaded       8192  1.5 GB     1  tools, json, vision, audio, embeddings
broken-1b    failed          -       -     3  tools, json
nomic-embed  unloaded        -       -     -  embeddings
"""


def test_models_of_a_server(llama_like, no_engine, capsys):
    in_router_mode(llama_like)
    assert main(["models", "--url", no_engine, "--api-url", llama_like.url]) == 0
    out, err = capsys.readouterr()
    assert out == AS_TABLE
    assert "no iii engine answers" in words(err)
    assert f"from llama-server at {llama_like.url}" in words(err)
    posts = [line for line in llama_like.woken() if "autoload=false" not in line]
    assert posts == []


def test_models_of_the_router(llama_like, capsys):
    in_router_mode(llama_like)
    with bus_before(llama_like) as bus:
        assert main(["models", "--url", bus.engine.url]) == 0
    out, err = capsys.readouterr()
    # The router is told of a usual context where none is known.
    told = out.replace("    4096       -     2", "       -       -     2")
    assert told.replace("failed       4096", "failed          -") == AS_TABLE
    assert f"the router's catalog at {bus.engine.url}" in words(err)
    assert f"llama-server at {llama_like.url}" in words(err)


def test_models_as_json(bus, capsys):
    assert main(["models", "--url", bus.engine.url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["source"] == "router"
    assert report["models"] == [
        {
            "id": "demo",
            "state": "loaded",
            "context_window": 8192,
            "size": 2_000_000_000,
            "rank": 1,
            "capabilities": ["tools", "json", "thinking", "thinking off", "embeddings"],
            "in_catalog": True,
        }
    ]


def test_models_the_router_was_not_told(llama_like, capsys):
    in_router_mode(llama_like)
    with bus_before(llama_like) as bus:
        found = models.listing(bus.settings)
    assert [(each.id, each.in_catalog) for each in found.models] == [
        ("qwen3-8b", True),
        ("gemma-2b", True),
        ("broken-1b", True),
        ("nomic-embed", False),
    ]


def test_models_of_the_router_while_the_server_is_away(bus, llama_like, capsys):
    llama_like.stop()
    assert main(["models", "--url", bus.engine.url]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:6] == ["demo", "-", "8192", "-", "-", "tools,"]
    assert "state, size and rank are not known: " in words(err)
    assert "refused" in words(err)


def test_models_of_the_router_while_the_server_refuses_the_key(bus, llama_like, capsys):
    llama_like.key = "right"
    assert main(["models", "--url", bus.engine.url]) == 0
    assert "refuses the key" in words(capsys.readouterr().err)


def test_models_without_a_router(llama_like, capsys):
    with LoopbackEngine() as engine:
        assert main(["models", "--url", engine.url, "--api-url", llama_like.url]) == 0
    out, err = capsys.readouterr()
    assert "demo" in out
    assert "no llm-router" in words(err)


def test_models_with_a_wrong_key(llama_like, no_engine, capsys):
    llama_like.key = "right"
    assert main(["models", "--url", no_engine, "--api-url", llama_like.url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "doctor" in err and "LLAMACPP_API_KEY" in words(err)


def test_models_of_nobody(no_engine, capsys):
    arguments = ["models", "--url", no_engine, "--api-url", f"http://127.0.0.1:{free_port()}"]
    assert main(arguments) == 1
    assert "not reachable" in capsys.readouterr().err


def test_a_router_that_fails(bus, monkeypatch):
    def fails(caller, function_id, data, **options):
        raise BusError("TIMEOUT", "no answer")

    monkeypatch.setattr(Caller, "call", fails)
    with pytest.raises(BusError):
        models.listing(bus.settings)


def test_a_router_that_answers_nonsense(bus, monkeypatch):
    call = Caller.call

    def nonsense(caller, function_id, data, **options):
        if function_id == "router::models::list":
            return {"models": [5, {"id": "x"}, {"provider": "llamacpp"}, NAMELESS]}
        return call(caller, function_id, data, **options)

    monkeypatch.setattr(Caller, "call", nonsense)
    found = models.listing(bus.settings)
    windows = {each.id: each.context_window for each in found.models}
    assert windows == {"y": None, "demo": 8192}


NAMELESS = {"id": "y", "provider": "llamacpp", "context_window": "big"}


@pytest.mark.parametrize("rich", [False, True])
def test_models_at_80_columns(rich):
    if rich:
        pytest.importorskip("rich")
    capable = ("tools", "json", "vision", "thinking", "thinking off", "xhigh", "embeddings")
    found = models.Listing(
        (
            models.Model(
                "/srv/models/a-long-name-of-a-model-q4_k_m.gguf", "loaded", 131072, 10**10, 1
            ),
            models.Model("evil\x1b[31m", "failed", None, None, 2, capable),
        ),
        "server",
        ("from llama-server at http://127.0.0.1:8080 " * 3,),
    )
    out = io.StringIO()
    terminal = Terminal(out, width=80, live=True, rich=rich)
    models.show(terminal, terminal, found)
    text = re.sub("\x1b[^m]*m", "", out.getvalue())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 24
    assert "evil\\x1b[31m" in text
    joined = "".join(text.split())
    for part in ("131072", "10.0GB", "thinkingoff", "embeddings", "failed"):
        assert part in joined


# -- embed ------------------------------------------------------------------------------------


def test_embed_through_the_engine(bus, capsys):
    assert main(["embed", "one", "two", "--url", bus.engine.url, "--model", "demo"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "model": "demo",
        "embeddings": [[0.6, 0.8], [1.2, 1.6]],
        "route": "engine",
    }
    assert err == f"through the engine at {bus.engine.url}\n"


def test_embed_without_an_engine(llama_like, no_engine, capsys):
    assert main(["embed", "one", "--url", no_engine, "--api-url", llama_like.url]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["route"] == "server"
    assert "no iii engine answers" in err
    assert err.endswith(f"directly from llama-server at {llama_like.url}\n")


def test_embed_without_a_worker(llama_like, capsys):
    with LoopbackEngine() as engine:
        assert main(["embed", "one", "--url", engine.url, "--api-url", llama_like.url]) == 0
    assert "no worker serves provider::llamacpp::embed" in capsys.readouterr().err


def test_embed_past_the_engine(bus, llama_like, capsys):
    arguments = ["embed", "one", "--direct", "--url", bus.engine.url, "--api-url", llama_like.url]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["route"] == "server"
    assert err == f"directly from llama-server at {llama_like.url}\n"


def test_embed_the_lines_of_the_input(bus, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\n  two \nthree"))
    assert main(["embed", "--url", bus.engine.url]) == 0
    assert len(json.loads(capsys.readouterr().out)["embeddings"]) == 3


def test_embed_nothing(bus, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    assert main(["embed", "--url", bus.engine.url]) == 1
    err = capsys.readouterr().err
    assert "Ctrl-D" in err and "no texts" in err


def test_embed_more_than_one_request_holds(llama_like, no_engine):
    settings = Settings(url=no_engine, api_url=llama_like.url)
    answer, _ = embed.fetch(settings, None, ["x"] * 600, direct=True)
    assert len(answer["embeddings"]) == 600
    sizes = [len(request.json()["input"]) for request in llama_like.requests]
    assert sizes == [512, 88]


def test_embed_where_embeddings_are_off(bus, llama_like, capsys):
    llama_like.embeddings = None
    assert main(["embed", "one", "--url", bus.engine.url]) == 1
    assert "--embeddings" in capsys.readouterr().err
    assert main(["embed", "one", "--direct", "--api-url", llama_like.url]) == 1
    assert "--embeddings" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [None, {"embeddings": [[1.0], [2.0]]}, {"embeddings": "no"}])
def test_embed_with_an_answer_that_is_none(bus, monkeypatch, answer):
    monkeypatch.setattr(Caller, "call", lambda *args, **more: answer)
    with pytest.raises(BusError, match="another number of vectors"):
        embed.fetch(bus.settings, None, ["one"], direct=False)


def test_similarities():
    assert embed.cosine([1, 0], [2, 0]) == 1.0
    assert embed.cosine([1, 0], [0, 3]) == 0.0
    assert embed.cosine([1, 0], [-1, 0]) == -1.0
    assert embed.cosine([0, 0], [1, 0]) == 0.0


def test_a_table_of_similarities(bus, capsys):
    arguments = ["embed", "one", "a text that is too long\nfor the table", "--table"]
    assert main([*arguments, "--url", bus.engine.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "text                       1     2",
        "1  one                  1.00  1.00",
        "2  a text that is t...  1.00  1.00",
    ]


@pytest.mark.parametrize("rich", [False, True])
def test_similarities_of_many_texts_at_80_columns(rich):
    if rich:
        pytest.importorskip("rich")
    out = io.StringIO()
    texts = [f"text number {at} with a tail" for at in range(9)]
    vectors = [[float(at == other) for other in range(9)] for at in range(9)]
    embed.similarity_table(Terminal(out, width=80, live=True, rich=rich), texts, vectors)
    text = re.sub("\x1b[^m]*m", "", out.getvalue())
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("1.00") == 9 and text.count("0.00") == 72
    assert text.count("9  text number 8") == 2, "two blocks"


# -- count-tokens -----------------------------------------------------------------------------


def test_count_through_the_engine(bus, capsys):
    assert main(["count-tokens", "hello", "--url", bus.engine.url]) == 0
    assert capsys.readouterr() == ("7\n", f"through the engine at {bus.engine.url}\n")


def test_count_without_an_engine(llama_like, no_engine, capsys):
    arguments = ["count-tokens", "hello", "--url", no_engine, "--api-url", llama_like.url]
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    expected = {"model": "demo", "tokens": 7, "estimator": "metered", "route": "server"}
    assert json.loads(out) == expected
    assert err.endswith(f"directly from llama-server at {llama_like.url}\n")


def counted(server):
    """The request that was counted last."""
    return [
        request.json()
        for request in server.requests
        if request.path == "/v1/chat/completions/input_tokens"
    ][-1]


def test_count_a_file_with_a_system_prompt(llama_like, tmp_path, capsys):
    path = tmp_path / "prompt.txt"
    path.write_text("from a file", encoding="utf-8")
    arguments = ["count-tokens", "--direct", "--api-url", llama_like.url, "--model", "mine"]
    assert main([*arguments, "--file", str(path), "--system", "Be brief."]) == 0
    body = counted(llama_like)
    assert body["model"] == "mine"
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "from a file" in str(body["messages"][1])


def test_count_the_input(llama_like, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from the input"))
    arguments = ["count-tokens", "--direct", "--api-url", llama_like.url, "--file", "-"]
    assert main(arguments) == 0
    assert "from the input" in str(counted(llama_like)["messages"])


TOOL = {"name": "get_weather", "description": "", "parameters": {"type": "object"}}
TRANSCRIPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "user", "content": [{"type": "text", "text": "in blocks"}], "timestamp": 5},
]


@pytest.mark.parametrize(
    ("value", "system", "tools"),
    [
        (TRANSCRIPT, "Be brief.", 0),
        ({"messages": TRANSCRIPT[1:], "system_prompt": "You.", "tools": [TOOL]}, "You.", 1),
        ({"messages": TRANSCRIPT, "system_prompt": "Mine."}, "Mine.", 0),
    ],
)
def test_count_a_transcript(bus, llama_like, tmp_path, value, system, tools):
    path = tmp_path / "transcript.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    for route in (["--url", bus.engine.url], ["--direct", "--api-url", llama_like.url]):
        assert main(["count-tokens", "--messages", str(path), *route]) == 0
        body = counted(llama_like)
        assert body["messages"][0] == {"role": "system", "content": system}
        assert "hello" in str(body["messages"]) and "in blocks" in str(body["messages"])
        assert len(body.get("tools", ())) == tools


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"{", "not JSON"),
        (b"{}", "no list of messages"),
        (b"5", "no list of messages"),
        (b"[]", "messages: must not be empty"),
        (b"[5]", "messages[0]"),
        (b'[{"role": "user"}]', "messages[0].content"),
    ],
)
def test_count_a_transcript_that_is_none(tmp_path, capsys, text, problem):
    path = tmp_path / "transcript.json"
    if text is not None:
        path.write_bytes(text)
    assert main(["count-tokens", "--direct", "--messages", str(path)]) == 1
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["text", "--file", "x"]])
def test_count_one_thing(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["count-tokens", *arguments])
    assert caught.value.code == 2


def test_count_without_models(llama_like, capsys):
    llama_like.models = []
    assert main(["count-tokens", "hi", "--direct", "--api-url", llama_like.url]) == 1
    assert "--model" in capsys.readouterr().err


def test_count_with_an_answer_that_is_none(bus, monkeypatch):
    from provider_llamacpp.commands import count_tokens

    monkeypatch.setattr(Caller, "call", lambda *args, **more: {"tokens": None})
    payload = {"model": "demo", "messages": [{"role": "user", "content": [], "timestamp": 0}]}
    with pytest.raises(BusError, match="no count"):
        count_tokens.fetch(bus.settings, payload, direct=False)


def test_a_server_that_is_not_there(no_engine):
    settings = Settings(url=no_engine, api_url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ProviderLlamacppError, match="not reachable"):
        embed.fetch(settings, None, ["one"], direct=False)
    with pytest.raises(ProviderError, match="not reachable"):
        models.listing(settings)


# -- a real server ----------------------------------------------------------------------------


def test_real_server_by_either_way(llama, capsys):
    with LocalStack(Settings(api_url=llama.url)) as stack:
        ways = (["--url", stack.settings.url], ["--direct", "--api-url", llama.url])
        answers = []
        for way in ways:
            assert main(["embed", "a cat", "a kitten", *way]) == 0
            vectors = json.loads(capsys.readouterr().out)["embeddings"]
            assert main(["count-tokens", "What is a slot?", *way]) == 0
            answers.append((vectors, capsys.readouterr().out))
        assert answers[0] == answers[1]
        assert main(["models", *ways[0]]) == 0
        line = capsys.readouterr().out.splitlines()[1]
        for part in ("demo", "loaded", "8192", "kB", "tools", "thinking", "embeddings"):
            assert part in line


def test_an_embedding_server_lists_its_model(llama_factory):
    server = llama_factory("embed", embeddings=True, pooling="mean")
    found = models.listing(Settings(url=nowhere(), api_url=server.url))
    assert "embeddings" in found.models[0].capabilities


def test_a_real_router_is_not_needed(llama, capsys):
    with LoopbackEngine() as engine, LoopbackRouter(engine.url):
        assert main(["models", "--url", engine.url, "--api-url", llama.url]) == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["embed", "a"], ["count-tokens", "a"], ["models"]])
def test_without_engine_and_server_both_are_named(command, capsys):
    flags = ["--url", "ws://127.0.0.1:9", "--api-url", "http://h/?a=1"]
    assert main([*command, *flags]) == 1
    told = capsys.readouterr().err
    assert "no iii engine answers at ws://127.0.0.1:9" in told
    assert "api_url must not hold" in told


@pytest.mark.parametrize(
    ("words", "flags", "hint"),
    [
        ("HTTP 400: model name is missing from the request", [], True),
        ("HTTP 400: model name is missing from the request", ["--model", "m"], False),
        ("HTTP 501: no", [], False),
    ],
)
def test_embed_says_which_flag_a_server_with_many_models_wants(
    words, flags, hint, monkeypatch, capsys
):
    def fetch(*given, **more):
        raise BusError("invocation_failed", words)

    monkeypatch.setattr(embed, "fetch", fetch)
    assert main(["embed", *flags, "a"]) == 1
    told = capsys.readouterr().err
    assert words in told
    assert ("with --model" in told) == hint
