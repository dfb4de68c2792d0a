"""Tokens, reranking, filling in, slots and figures: sound answers, and words for the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from peers import ScriptedServer, answer_json, answer_sse, free_port
from recorded import recorded, recorded_json
from surfacing import WRITER, Channel, asked, call_of, context, failure_of, refusal_of, result_of

from provider_llamacpp.errors import BusError, Interrupted, InvalidRequest
from provider_llamacpp.surfaces import infill as infill_module
from provider_llamacpp.surfaces import metrics as metrics_module

NOT_LOADED = {"status": 400, "body": '{"error":{"code":400,"message":"model is not loaded"}}'}


# -- tokens -----------------------------------------------------------------------------------


def test_tokenizes() -> None:
    result, (request,) = asked("tokenize", recorded("tokenize"), {"content": "hi 🌍"})
    assert result == {"tokens": [104, 105, 32, 240, 159, 140, 141]}
    assert (request.method, request.target) == ("POST", "/tokenize")
    assert request.headers["authorization"] == "Bearer sk-1"
    assert request.json() == {
        "content": "hi 🌍",
        "add_special": False,
        "parse_special": True,
        "with_pieces": False,
    }


def test_tokenizes_with_pieces() -> None:
    data = {"content": "hi 🌍", "with_pieces": True, "add_special": True, "model": "m"}
    result, (request,) = asked("tokenize", recorded("tokenize-with-pieces"), data)
    assert result["tokens"] == recorded_json("tokenize")["tokens"]
    assert result["pieces"] == ["h", "i", " ", [240], [159], [140], [141]]
    assert request.json()["model"] == "m"
    assert request.json()["add_special"] is True


@pytest.mark.parametrize(
    ("answer", "pieces"),
    [
        ({}, False),
        ({"tokens": ["a"]}, False),
        ({"tokens": [True]}, False),
        ({"tokens": [7]}, True),
        ({"tokens": [{"id": 7}]}, True),
        ({"tokens": [{"id": 7, "piece": ["a"]}]}, True),
        ([], False),
    ],
)
def test_tokens_that_are_none(answer: Any, pieces: bool) -> None:
    words = failure_of("tokenize", answer_json(answer), {"content": "a", "with_pieces": pieces})
    assert words.startswith("provider/bad_response: /tokenize: ")


def test_detokenizes() -> None:
    result, (request,) = asked("detokenize", recorded("detokenize"), {"tokens": [104, 105.0]})
    assert result == {"content": "hi"}
    assert request.json() == {"tokens": [104, 105]}


def test_detokenizes_what_is_no_token() -> None:
    words = refusal_of("detokenize", {"tokens": [999999]}, recorded("detokenize-unknown"))
    assert words == "tokens: holds a number that is no token of this model"
    assert "HTTP 500" in failure_of("detokenize", {"status": 500, "body": "oh"}, {"tokens": [1]})
    assert "no text" in failure_of("detokenize", answer_json({}), {"tokens": [1]})


# -- payloads ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("tokenize", None, "payload: must be an object"),
        ("tokenize", {}, "content: must be a string"),
        ("tokenize", {"content": "a", "model": 1}, "model: must be a string"),
        ("tokenize", {"content": "a", "with_pieces": 1}, "with_pieces: must be true or false"),
        ("detokenize", {}, "tokens: must be a list"),
        ("detokenize", {"tokens": [1, "a"]}, "tokens[1]: must be an integer of at least 0"),
        ("detokenize", {"tokens": [2**40]}, "tokens[0]: is no token of any model"),
        ("rerank", {"documents": ["a"]}, "query: must be a string"),
        ("rerank", {"query": "q", "documents": []}, "documents: must hold 1 to 512 strings"),
        ("rerank", {"query": "q", "documents": ["a", 1]}, "documents[1]: must be a string"),
        (
            "rerank",
            {"query": "q", "documents": ["a"], "top_n": 0},
            "top_n: must be an integer of at least 1",
        ),
        ("infill", {"input_suffix": ""}, "input_prefix: must be a string"),
        ("infill", {"input_prefix": ""}, "input_suffix: must be a string"),
        ("infill", {"input_prefix": "", "input_suffix": "", "writer_ref": 1}, "writer_ref: must"),
        (
            "infill",
            {"input_prefix": "", "input_suffix": "", "options": {"n_predict": 1}},
            "options.n_predict: cannot be set this way",
        ),
        (
            "infill",
            {"input_prefix": "", "input_suffix": "", "options": {"seed": float("nan")}},
            "payload: ",
        ),
        (
            "infill",
            {"input_prefix": "", "input_suffix": "", "input_extra": [1]},
            "input_extra[0]: must be an object",
        ),
        (
            "infill",
            {"input_prefix": "", "input_suffix": "", "input_extra": [{"filename": "f"}]},
            "input_extra[0].text: must be a string",
        ),
        ("slots", {"action": "drop"}, "action: must be one of list, save, restore, erase"),
        ("slots", {"action": "erase"}, "slot: must be an integer of at least 0"),
        ("slots", {"action": "save", "slot": 0}, "filename: must be a string"),
        ("slots", {"action": "save", "slot": 0, "filename": "../a"}, "filename: must be a plain"),
        ("slots", {"action": "save", "slot": 0, "filename": ".a"}, "filename: must be a plain"),
        ("slots", {"action": "save", "slot": 0, "filename": ""}, "filename: must be a plain"),
        ("end_thinking", {}, "request_id: must be a string"),
        ("tools_list", [], "payload: must be an object"),
        ("tools_call", {}, "tool: must be a string"),
        ("tools_call", {"tool": "a", "params": []}, "params: must be an object"),
        ("tools_call", {"tool": "a", "cwd": "/a\n"}, "cwd: must be a path of visible ASCII"),
        ("tools_call", {"tool": "a", "cwd": ""}, "cwd: must be a path of visible ASCII"),
    ],
)
def test_a_payload_that_does_not_fit(name: str, data: Any, words: str) -> None:
    assert refusal_of(name, data).startswith(words)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenize", {"content": "a"}),
        ("detokenize", {"tokens": [1]}),
        ("rerank", {"query": "q", "documents": ["a"]}),
        ("infill", {"input_prefix": "", "input_suffix": ""}),
        ("slots", {}),
        ("metrics", {}),
    ],
)
def test_several_models_need_a_name(name: str, data: dict[str, Any]) -> None:
    words = refusal_of(name, data, router_mode=True)
    assert words == "model: must name a model, the server has more than one"


# -- what a server lacks ----------------------------------------------------------------------

RERANK = {"query": "q", "documents": ["a"]}
INFILL = {"input_prefix": "a", "input_suffix": "b"}


@pytest.mark.parametrize(
    ("name", "answer", "data", "words"),
    [
        ("rerank", "rerank-not-enabled", RERANK, "Start it with `--reranking`"),
        ("infill", "infill-not-supported", INFILL, "prefix token is missing"),
        ("slots", "slots-disabled", {}, "Start it with `--slots`"),
        ("tools_list", "tools-api-disabled", {}, "(start llama-server with --tools)"),
    ],
)
def test_a_server_started_without_it(name: str, answer: str, data: Any, words: str) -> None:
    found = failure_of(name, recorded(answer), data)
    assert found.startswith("provider/config: /")
    assert words in found


@pytest.mark.parametrize(
    ("name", "data", "route"),
    [
        ("tokenize", {"content": "a"}, "/tokenize"),
        ("rerank", RERANK, "/v1/rerank"),
        ("infill", INFILL, "/infill"),
        ("slots", {}, "/slots"),
        ("tools_list", {}, "/tools"),
    ],
)
def test_a_build_without_the_route(name: str, data: Any, route: str) -> None:
    found = failure_of(name, recorded("unknown-path"), data)
    assert found == (
        f"provider/config: the server has no {route} (a newer build of llama-server has it)"
    )


@pytest.mark.parametrize(("name", "data"), [("rerank", RERANK), ("infill", INFILL)])
def test_no_server(name: str, data: Any) -> None:
    with pytest.raises(BusError) as caught:
        result_of(name, context(f"http://127.0.0.1:{free_port()}"), data)
    assert caught.value.message.startswith("provider/upstream: llama-server at http://127.0.0.1")


def test_a_request_the_server_calls_a_bad_one() -> None:
    answer = answer_json({"error": {"code": 400, "message": "no"}}, 400)
    found = failure_of("tokenize", answer, {"content": "a"})
    assert found == "provider/upstream_status: HTTP 400: no"


@pytest.mark.parametrize(("name", "data"), [("rerank", RERANK), ("infill", INFILL)])
def test_a_server_that_loads(name: str, data: Any) -> None:
    found = failure_of(name, recorded("loading-models"), data)
    assert found == "provider/upstream_status: HTTP 503: Loading model"


# -- rerank -----------------------------------------------------------------------------------


def test_reranks() -> None:
    documents = ["q", "a cat", "zzz dog"]
    data = {"query": "a cat", "documents": documents, "top_n": 5, "model": "rank"}
    result, (request,) = asked("rerank", recorded("rerank"), data)
    assert [row["index"] for row in result["results"]] == [1, 2, 0]
    assert result["results"][0]["relevance_score"] == -0.5479944348335266
    assert (result["model"], result["usage"]) == ("rank", {"input": 28})
    assert request.json() == {**data, "top_n": 3}


def test_reranks_whatever_the_order_of_the_answer() -> None:
    rows = [{"index": 0, "relevance_score": 1}, {"index": 1, "relevance_score": 2.5}]
    answer = answer_json({"results": rows})
    result, _ = asked("rerank", answer, {"query": "q", "documents": ["a", "b"], "top_n": 1})
    assert result == {
        "model": "",
        "results": [{"index": 1, "relevance_score": 2.5}],
        "usage": {},
    }


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [1],
        [{"index": 2, "relevance_score": 1}],
        [{"index": True, "relevance_score": 1}],
        [{"index": 0, "relevance_score": "1"}, {"index": 1, "relevance_score": 1}],
        [{"index": 0, "relevance_score": 1}, {"index": 0, "relevance_score": 1}],
        [{"index": 0, "relevance_score": 1}],
        [{"index": 0, "relevance_score": 1e999}],
    ],
)
def test_scores_that_are_none(rows: Any) -> None:
    body = json.dumps({"results": rows}).replace("Infinity", "1e999")
    answer = {"body": body, "framing": "length"}
    words = failure_of("rerank", answer, {"query": "q", "documents": ["a", "b"]})
    assert words.startswith("provider/bad_response: /v1/rerank: ")


def test_a_document_that_is_too_long() -> None:
    words = refusal_of("rerank", RERANK, recorded("rerank-too-long"))
    assert words.startswith("documents: request (3005 tokens) exceeds the available context size")


def test_a_model_that_is_not_there() -> None:
    answer = {"status": 400, "body": '{"error":{"code":400,"message":"model \'m\' not found"}}'}
    data = {**RERANK, "model": "m"}
    assert refusal_of("rerank", data, answer, router_mode=True) == "model: 'm' not found"


# -- infill -----------------------------------------------------------------------------------


def test_fills_in() -> None:
    data = {
        **INFILL,
        "input_extra": [{"filename": "f.py", "text": "x", "more": 1}],
        "prompt": "p",
        "max_output_tokens": 9,
        "options": {"seed": 1},
        "model": "m",
    }
    result, (request,) = asked("infill", recorded("infill-stream"), data)
    assert result == {
        "model": "infill",
        "content": ",\nand so on, until the end.",
        "stop_reason": "end",
        "native_stop_reason": "eos",
        "usage": {"input": 5, "output": 5},
    }
    assert request.json() == {
        "input_prefix": "a",
        "input_suffix": "b",
        "input_extra": [{"filename": "f.py", "text": "x"}],
        "prompt": "p",
        "n_predict": 9,
        "seed": 1,
        "model": "m",
        "stream": True,
    }


def test_fills_in_into_a_channel() -> None:
    channel = Channel()
    data = {**INFILL, "writer_ref": WRITER}
    result, (request,) = asked("infill", recorded("infill-stream"), data, channel=channel)
    assert channel.text == ",\nand so on, until the end."
    assert result["content"] is None
    assert channel.frames[-1] == {"type": "done", "result": result}
    assert request.json()["n_predict"] == infill_module.DEFAULT_TOKENS


def test_is_cut_by_the_limit() -> None:
    last = {"content": "b", "stop": True, "stop_type": "limit", "tokens_predicted": 2}
    result, _ = asked("infill", answer_sse({"content": "a"}, last), {**INFILL, "model": "m"})
    assert result == {
        "model": "m",
        "content": "ab",
        "stop_reason": "length",
        "native_stop_reason": "limit",
        "usage": {"output": 2},
    }
    result, _ = asked("infill", answer_sse({"stop": True}), INFILL)
    assert (result["stop_reason"], result["native_stop_reason"]) == ("end", None)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (answer_sse({"content": "a"}), "provider/upstream: llama-server ended the stream"),
        (
            answer_sse({"error": {"message": "Context size has been exceeded."}}),
            "provider/upstream: Context size",
        ),
        ({"body": "proxy error: Failed to read connection"}, "provider/upstream: proxy error"),
        ({"body": "data: {\n\n"}, "provider/bad_response: /infill: an event cannot be read"),
        ({"body": "data: 1\n\n"}, "provider/bad_response: /infill: an event is no object"),
        ({"body": "data: " + "x" * 2_000_000}, "provider/bad_response: /infill: an event is too"),
        (answer_sse({"content": "a"}, cut=True), "provider/upstream: llama-server at"),
        (
            answer_json({"error": {"message": "Field 'seed': wrong"}}, 400),
            "provider/upstream_status: HTTP 400: Field 'seed'",
        ),
    ],
)
@pytest.mark.parametrize("writer", [None, WRITER])
def test_an_answer_that_fails(answer: Any, words: str, writer: Any) -> None:
    channel = Channel()
    data = {**INFILL, "writer_ref": writer}
    found = failure_of("infill", answer, data, channel=channel)
    assert found.startswith(words)
    if writer is not None:
        error = {"code": "invocation_failed", "message": found}
        assert channel.frames[-1] == {"type": "error", "error": error}
        assert channel.finished


def test_a_text_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infill_module, "MOST_TEXT", 3)
    answer = answer_sse({"content": "ab"}, {"content": "ab"})
    assert "never ends" in failure_of("infill", answer, INFILL)


def test_a_caller_who_leaves_ends_it() -> None:
    channel = Channel(patience=1)
    steps = [
        {"headers": {"headers": {"content-type": "text/event-stream"}}},
        {"repeat": 1000, "steps": [{"send": 'data: {"content":"a"}\n\n'}, {"sleep_ms": 5}]},
    ]
    call = call_of()
    with ScriptedServer({"script": steps}) as server:
        where = context(server.url, channel=channel)
        with pytest.raises(Interrupted):
            result_of("infill", where, {**INFILL, "writer_ref": WRITER}, call)
        assert server.client_closed.wait(10)
    assert call.reason == "consumer gone"
    assert channel.frames == [{"type": "chunk", "text": "a"}]
    assert channel.finished
    assert where.outlets.snapshot() == []


# -- slots ------------------------------------------------------------------------------------


def test_lists_slots() -> None:
    result, (request,) = asked("slots", recorded("slots-busy"), {})
    assert result == {
        "slots": [
            {
                "id": 0,
                "busy": True,
                "context_window": 8192,
                "task": 0,
                "prompt_tokens": 80,
                "prompt_processed": 21,
                "prompt_cached": 0,
                "decoded": 59,
                "remaining": 441,
            }
        ]
    }
    assert (request.method, request.target) == ("GET", "/slots")
    result, _ = asked("slots", recorded("slots-idle"), {"action": "list"})
    assert result["slots"][1] == {"id": 1, "busy": False, "context_window": 2048}


def test_shows_nothing_of_what_others_ask() -> None:
    result, _ = asked("slots", recorded("slots-after-use"), {})
    assert "remaining" not in result["slots"][0]  # -1 there: no limit
    assert all(type(value) in (int, bool) for slot in result["slots"] for value in slot.values())
    result, _ = asked("slots", answer_json([{"id": 0, "next_token": []}, {"id": 1}]), {})
    assert result["slots"] == [{"busy": False, "id": 0}, {"busy": False, "id": 1}]


@pytest.mark.parametrize("answer", [{}, [1]])
def test_slots_that_are_none(answer: Any) -> None:
    assert "no list of slots" in failure_of("slots", answer_json(answer), {})


ROUTES = {"/props": answer_json({"total_slots": 1})}


@pytest.mark.parametrize(("action", "size"), [("save", 36), ("restore", 36), ("erase", None)])
def test_acts_on_a_slot(action: str, size: int | None) -> None:
    answer = recorded(f"slots-{action}")
    data = {"action": action, "slot": 0, "filename": "a.bin"}
    with ScriptedServer(routes={**ROUTES, "/slots/0": answer}) as server:
        result = result_of("slots", context(server.url), data)
    assert result == {"slot": 0, "tokens": 0, "bytes": size}
    assert server.paths() == ["GET /props", f"POST /slots/0?action={action}"]
    expected = {} if action == "erase" else {"filename": "a.bin"}
    assert server.requests[1].json() == expected


def test_acts_on_a_slot_of_one_of_several_models() -> None:
    data = {"action": "erase", "slot": 0, "model": "a b"}
    routes = {**ROUTES, "/slots/0": recorded("slots-erase"), "/slots": answer_json([])}
    with ScriptedServer(routes=routes) as server:
        result_of("slots", context(server.url, router_mode=True), data)
        result_of("slots", context(server.url, router_mode=True), {"model": "a b"})
    assert server.paths() == [
        "GET /props?model=a+b&autoload=false",
        "POST /slots/0?action=erase",
        "GET /slots?model=a+b&autoload=false",
    ]
    assert server.requests[1].json() == {"model": "a b"}


def test_looking_loads_no_model() -> None:
    with ScriptedServer(NOT_LOADED) as server:
        where = context(server.url, router_mode=True)
        with pytest.raises(InvalidRequest, match="model: is not loaded"):
            result_of("slots", where, {"model": "m"})
    assert server.paths() == ["GET /slots?model=m&autoload=false"]


def test_a_slot_that_is_not_there() -> None:
    # The server would take another one for it.
    data = {"action": "erase", "slot": 1}
    answer = answer_json({"total_slots": 1})
    words = refusal_of("slots", data, answer)
    assert words == "slot: must be below 1, the number of slots of the server"
    assert "no count of slots" in failure_of("slots", answer_json({}), data)


def test_a_cache_that_cannot_be_kept() -> None:
    data = {"action": "save", "slot": 0, "filename": "a.bin"}
    routes = {**ROUTES, "/slots/0": recorded("slots-save-disabled")}
    with ScriptedServer(routes=routes) as server, pytest.raises(BusError) as caught:
        result_of("slots", context(server.url), data)
    assert "--slot-save-path" in caught.value.message
    routes["/slots/0"] = recorded("slots-restore-missing")
    with ScriptedServer(routes=routes) as server, pytest.raises(InvalidRequest) as refused:
        result_of("slots", context(server.url), {**data, "action": "restore"})
    assert refused.value.message.startswith("filename: Unable to restore slot")
    routes["/slots/0"] = answer_json({})
    with ScriptedServer(routes=routes) as server, pytest.raises(BusError, match="no count"):
        result_of("slots", context(server.url), data)


# -- metrics ----------------------------------------------------------------------------------

STATS = {
    "uptime": 1.5,
    "active_streams": 0,
    "max_streams": 64,
    "calls": 1,
    "reconnects": 0,
    "frames": 12,
    "bytes": 345,
    "outcomes": {"end": 1},
    "usage": {"output": 7},
    "errors": ["not a figure"],
}


def test_figures_of_server_and_worker() -> None:
    result, (request,) = asked("metrics", recorded("metrics"), {}, stats=STATS)
    assert result["problem"] is None
    assert result["server"]["llamacpp:prompt_tokens_total"] == {
        "value": 1575,
        "kind": "counter",
        "help": "Number of prompt tokens processed, excluding cached tokens",
    }
    assert result["server"]["llamacpp:n_busy_slots_per_decode"]["value"] == 1.09907
    assert len(result["server"]) == 15
    assert result["worker"] == {key: STATS[key] for key in metrics_module.OURS}
    assert "errors" not in result["worker"]
    assert (request.method, request.target) == ("GET", "/metrics")


def test_figures_of_the_worker_alone() -> None:
    result, _ = asked("metrics", recorded("metrics-disabled"), {}, stats=STATS)
    assert result["server"] is None
    assert "--metrics" in result["problem"]
    assert result["worker"]["frames"] == 12
    result, (request,) = asked("metrics", NOT_LOADED, {"model": "m"}, stats=STATS, router_mode=True)
    assert result["problem"] == "model: is not loaded"
    assert request.target == "/metrics?model=m&autoload=false"


def test_reads_what_prometheus_allows() -> None:
    text = """
# HELP a:b  What it is
# TYPE a:b gauge
a:b 1.5
# a comment
c{x="}\\" ",y="z"} 2e3 1395066363000
d NaN
e +Inf
f word
g{ 1
h 7 x y
"""
    assert metrics_module.parse(text) == {
        "a:b": {"value": 1.5, "kind": "gauge", "help": "What it is"},
        'c{x="}\\" ",y="z"}': {"value": 2000, "kind": "untyped", "help": ""},
        "d": {"value": None, "kind": "untyped", "help": ""},
        "e": {"value": None, "kind": "untyped", "help": ""},
    }
