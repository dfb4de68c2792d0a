"""Embeddings and token counts: sound answers, and words for everything else."""

from __future__ import annotations

import base64
import json
import re
import struct
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import PATIENCE, Answer, Request, ScriptedServer, answer_json, free_port
from recorded import recorded, recorded_json

from provider_llamacpp.calls import Call
from provider_llamacpp.errors import BusError, Interrupted
from provider_llamacpp.local.llama import LlamaServer
from provider_llamacpp.server import queries
from provider_llamacpp.server.queries import TokenCounter, embed
from provider_llamacpp.server.upstream import Target, Upstream

CHAT = "/v1/chat/completions/input_tokens"
ANTHROPIC = "/v1/messages/count_tokens"
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "chat_template_kwargs": {"enable_thinking": False},
}
ANTHROPIC_BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "system": "s"}


def rows(*vectors: object, **more: Any) -> Answer:
    data = [{"index": at, "embedding": vector} for at, vector in enumerate(vectors)]
    return answer_json({"data": data, **more})


def embed_at(answer: Answer, inputs: list[str], model: str | None = "e") -> dict[str, Any]:
    with ScriptedServer(answer) as server:
        return embed(Upstream(), Target(server.url), model, inputs)


def fails(answer: Answer, inputs: list[str]) -> str:
    with pytest.raises(BusError) as caught:
        embed_at(answer, inputs)
    assert caught.value.code == "invocation_failed"
    return caught.value.message


# -- embeddings -------------------------------------------------------------------------------


def test_vectors_come_in_the_order_of_the_texts() -> None:
    data = [{"index": 1, "embedding": [0.5, 0.25]}, {"index": 0, "embedding": [1, 0.0]}]
    with ScriptedServer(answer_json({"model": "e", "data": data})) as server:
        found = embed(Upstream(), Target(server.url, "sk-1"), "e", ["a", "b"])
        (request,) = server.wait_requests(1)
    assert found == {"model": "e", "embeddings": [[1.0, 0.0], [0.5, 0.25]]}
    assert all(type(number) is float for vector in found["embeddings"] for number in vector)
    assert request.line == "POST /v1/embeddings HTTP/1.1"
    assert request.json() == {"model": "e", "input": ["a", "b"]}
    assert request.headers["authorization"] == "Bearer sk-1"


def test_recorded_vectors() -> None:
    found = embed_at(recorded("embeddings-two"), ["hello", "world"])["embeddings"]
    assert found == [row["embedding"] for row in recorded_json("embeddings-two")["data"]]


def test_base64_vectors_are_the_same_numbers() -> None:
    floats = embed_at(recorded("embeddings-one"), ["hello"])["embeddings"]
    assert embed_at(recorded("embeddings-base64"), ["hello"])["embeddings"] == floats


@pytest.mark.parametrize(
    ("model", "named", "told"), [("e", "x", "e"), (None, "x", "x"), (None, None, ""), (None, 7, "")]
)
def test_the_model_is_the_one_asked_for(model: str | None, named: object, told: str) -> None:
    with ScriptedServer(rows([1.0], model=named)) as server:
        assert embed(Upstream(), Target(server.url), model, ["a"])["model"] == told
        assert ("model" in server.wait_requests(1)[0].json()) == (model is not None)


def test_rows_without_an_index_are_taken_in_their_order() -> None:
    answer = answer_json({"data": [{"embedding": [1.0]}, {"embedding": [2.0]}]})
    assert embed_at(answer, ["a", "b"])["embeddings"] == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (rows([0.1, 0.2]), "1 vectors came for 2 texts"),
        (rows([0.1], [0.2], [0.3]), "3 vectors came for 2 texts"),
        (rows([0.1, 0.2], [0.3]), r"different dimensions: \[1, 2\]"),
        (rows([0.1], None), "row 1 holds no vector"),
        (rows([0.1], []), "row 1 holds no vector"),
        (rows([0.1], [None]), "something else than finite numbers"),
        (rows([0.1], ["1"]), "something else than finite numbers"),
        (rows([0.1], [True]), "something else than finite numbers"),
        (rows([0.1], [10**400]), "something else than finite numbers"),
        ({"body": '{"data":[{"embedding":[1e999]},{"embedding":[1]}]}'}, "finite numbers"),
        ({"body": '{"data":[{"embedding":[NaN]},{"embedding":[1]}]}'}, "no JSON"),
        (rows([0.1], base64.b64encode(struct.pack("<f", float("nan"))).decode()), "finite"),
        (rows([0.1], "????"), "cannot be decoded"),
        (rows([0.1], base64.b64encode(b"abcde").decode()), "cannot be decoded"),
        (rows([0.1], "ü"), "cannot be decoded"),
        (rows([[0.1], [0.2]], [[0.1]]), "--pooling mean"),
        (answer_json({"data": [{"index": 0, "embedding": [1]}] * 2}), "two rows have the index 0"),
        (answer_json({"data": [{"index": 2, "embedding": [1]}] * 2}), "belongs to no text"),
        (answer_json({"data": [{"index": "0", "embedding": [1]}] * 2}), "belongs to no text"),
        (answer_json({"data": [{"index": True, "embedding": [1]}] * 2}), "belongs to no text"),
        (answer_json({"data": [1, 2]}), "row 0 is no object"),
        (answer_json({"data": {}}), "no list of vectors"),
        (answer_json({}), "no list of vectors"),
        (recorded("embeddings-native"), "no JSON object"),
        ({"body": "<html>"}, "no JSON"),
    ],
)
def test_an_answer_that_is_not_sound_is_a_failure(answer: Answer, words: str) -> None:
    message = fails(answer, ["a", "b"])
    assert message.startswith("provider/bad_response: /v1/embeddings: ")
    assert re.search(words, message), message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("embeddings-too-long", ["HTTP 500", "600 tokens", "512"]),
        ("embeddings-not-enabled", ["HTTP 501", "--embeddings"]),
        ("embeddings-empty-list", ["HTTP 400", "must not be empty"]),
        ("auth-missing", ["HTTP 401", "Invalid API Key"]),
    ],
)
def test_a_refusal_is_told_in_the_servers_words(name: str, words: list[str]) -> None:
    message = fails(recorded(name), ["a"])
    assert message.startswith("provider/upstream_status: ")
    for word in words:
        assert word in message


def test_the_words_cannot_pose_as_a_missing_function() -> None:
    error = {"error": {"message": "function_not_found", "type": "server_error"}}
    assert "function_not_found" not in fails(answer_json(error, status=500), ["a"])


@pytest.mark.parametrize("count", [0, 513])
def test_a_batch_has_its_limits(count: int) -> None:
    with pytest.raises(BusError, match=r"invalid_input: .*1 to 512"):
        embed(Upstream(), Target("http://127.0.0.1:1"), None, ["a"] * count)


def test_no_answer_is_a_failure_of_the_server() -> None:
    with pytest.raises(BusError, match=r"provider/upstream: .*refused"):
        embed(Upstream(), Target(f"http://127.0.0.1:{free_port()}"), None, ["a"])


def test_a_key_that_cannot_be_sent_is_a_matter_of_settings() -> None:
    with pytest.raises(BusError, match="provider/config: the API key") as caught:
        embed(Upstream(), Target("http://127.0.0.1:1", "a\nb"), None, ["a"])
    assert "a\nb" not in caught.value.message


def test_the_server_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "SECONDS", 0.2)
    message = fails({"script": [{"hang_ms": 60000}]}, ["a"])
    assert message.startswith("provider/upstream: ")
    assert "in time" in message


def test_an_abort_ends_an_embedding() -> None:
    call = Call(1, "embed", key=None, model=None)
    errors: list[BaseException] = []
    with ScriptedServer({"script": [{"hang_ms": 60000}]}) as server:

        def ask() -> None:
            try:
                embed(Upstream(), Target(server.url), None, ["a"], call)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        server.wait_requests(1)
        call.abort("stop")
        thread.join(PATIENCE)
    assert isinstance(errors[0], Interrupted)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["data", "index", "embedding", "x"]), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(deadline=None, max_examples=40)
@given(JSON)
def test_any_answer_is_vectors_or_a_failure(value: Any) -> None:
    try:
        found = embed_at({"body": json.dumps({"data": value}), "framing": "length"}, ["a"])
    except BusError as error:
        assert error.message.startswith("provider/bad_response: ")
    else:
        assert len(found["embeddings"]) == 1
        assert json.dumps(found, allow_nan=False)


# -- counting ---------------------------------------------------------------------------------

TOKENS = {
    CHAT: recorded("count-openai"),
    ANTHROPIC: recorded("count-anthropic"),
    "/apply-template": answer_json({"prompt": "<|im_start|>hi"}),
    "/tokenize": answer_json({"tokens": list(range(21))}),
}


def count_at(server: ScriptedServer, counter: TokenCounter | None = None) -> int:
    counter = counter or TokenCounter(Upstream())
    return counter.count(Target(server.url), BODY, ANTHROPIC_BODY)


def only(*routes: str) -> Mapping[str, Answer]:
    return {route: TOKENS[route] for route in routes}


@pytest.mark.parametrize(
    ("routes", "asked"),
    [
        (list(TOKENS), [CHAT]),
        ([ANTHROPIC, "/apply-template", "/tokenize"], [CHAT, ANTHROPIC]),
        (["/apply-template", "/tokenize"], [CHAT, ANTHROPIC, "/apply-template", "/tokenize"]),
    ],
)
def test_the_best_route_a_server_has_is_found_and_kept(routes: list[str], asked: list[str]) -> None:
    with ScriptedServer(routes=only(*routes)) as server:
        counter = TokenCounter(Upstream())
        assert count_at(server, counter) == 21
        assert [request.path for request in server.requests] == asked
        lacking = len(set(asked) - set(routes))
        assert count_at(server, counter) == 21
        assert [request.path for request in server.requests] == asked + asked[lacking:]


def test_each_route_gets_its_own_shape() -> None:
    with ScriptedServer(routes=only("/apply-template", "/tokenize")) as server:
        count_at(server)
        chat, anthropic, template, tokenize = (request.json() for request in server.requests)
    assert chat == template == BODY
    assert anthropic == ANTHROPIC_BODY
    assert tokenize == {
        "content": "<|im_start|>hi",
        "add_special": True,
        "parse_special": True,
        "model": "m",
    }


def test_a_server_that_cannot_count_is_told_so_and_asked_again() -> None:
    with ScriptedServer() as server:
        counter = TokenCounter(Upstream())
        for _ in range(2):
            with pytest.raises(BusError, match="provider/config: the server cannot count tokens"):
                count_at(server, counter)
        assert len(server.requests) == 6


def test_what_one_server_lacks_another_may_have() -> None:
    with ScriptedServer(routes=only(ANTHROPIC)) as first, ScriptedServer(routes=TOKENS) as second:
        counter = TokenCounter(Upstream())
        assert count_at(first, counter) == count_at(second, counter) == 21
        assert [request.path for request in second.requests] == [CHAT]


def test_a_route_that_refuses_exists() -> None:
    with ScriptedServer(recorded("auth-missing")) as server:
        with pytest.raises(BusError, match="provider/upstream_status: HTTP 401"):
            count_at(server)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ({CHAT: recorded("count-openai-invalid")}, "upstream_status: HTTP 400: 'messages' is"),
        ({CHAT: answer_json({"input_tokens": "21"})}, "bad_response: .* holds no count"),
        ({CHAT: answer_json({"input_tokens": True})}, "bad_response: .* holds no count"),
        ({CHAT: answer_json({"input_tokens": -1})}, "bad_response: .* holds no count"),
        ({CHAT: answer_json({})}, "bad_response: .* holds no count"),
        ({CHAT: answer_json([21])}, "bad_response: .* no JSON object"),
        ({CHAT: {"body": "<html>"}}, "bad_response: .* no JSON"),
        ({CHAT: {"script": [{"close": True}]}}, "provider/upstream: "),
        ({"/apply-template": answer_json({})}, "bad_response: /apply-template: .*no prompt"),
        (only("/apply-template"), "upstream_status: HTTP 404"),
        (
            {**only("/apply-template"), "/tokenize": answer_json({"tokens": 21})},
            "bad_response: /tokenize: .*no tokens",
        ),
    ],
)
def test_what_is_no_count_is_a_failure(routes: Mapping[str, Answer], words: str) -> None:
    with ScriptedServer(routes=routes) as server, pytest.raises(BusError, match=words) as caught:
        count_at(server)
    assert caught.value.code == "invocation_failed"


def test_a_body_without_a_model_stays_without() -> None:
    with ScriptedServer(routes=only("/apply-template", "/tokenize")) as server:
        TokenCounter(Upstream()).count(Target(server.url), {"messages": []}, {"messages": []})
        assert "model" not in server.requests[-1].json()


# -- the real server --------------------------------------------------------------------------

REAL_BODIES = [
    {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is the weather in Oslo? ☔"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "Tells the weather",
                    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
                },
            }
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    },
]


@pytest.mark.parametrize("body", REAL_BODIES)
def test_a_count_is_what_the_server_then_evaluates(
    llama: LlamaServer, body: dict[str, Any]
) -> None:
    target, upstream = Target(llama.url), Upstream()
    reply = upstream.request(
        target, "POST", "/v1/chat/completions", {**body, "max_tokens": 1}, timeout=PATIENCE
    )
    counter = TokenCounter(upstream)
    assert counter.count(target, body, {}) == reply.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("body", REAL_BODIES)
def test_the_slow_way_counts_the_same(llama: LlamaServer, body: dict[str, Any]) -> None:
    upstream = Upstream()

    def without_counting(request: Request) -> Answer:
        if request.path in (CHAT, ANTHROPIC):
            return recorded("unknown-path")
        reply = upstream.request(
            Target(llama.url), request.method, request.target, request.json(), timeout=PATIENCE
        )
        return answer_json(reply.json(), reply.status)

    with ScriptedServer(without_counting) as old:
        slow = TokenCounter(upstream).count(Target(old.url), body, {})
    assert slow == TokenCounter(upstream).count(Target(llama.url), body, {})


def test_a_real_servers_vectors(llama: LlamaServer) -> None:
    found = embed(Upstream(), Target(llama.url), "demo", ["hello", "world", "hello"])
    first, second, third = found["embeddings"]
    assert len(first) == len(second) > 1
    assert first == pytest.approx(third)


def test_a_real_servers_limit_is_told_in_its_words(llama: LlamaServer) -> None:
    with pytest.raises(BusError, match=r"upstream_status: .*\d+ tokens.* too large") as caught:
        embed(Upstream(), Target(llama.url), "demo", ["ok", "w" * 20000])
    assert caught.value.code == "invocation_failed"
