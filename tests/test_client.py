"""llama-server asked by a program itself: events, failures, and ends in every phase."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from peers import PATIENCE, Request, ScriptedServer, answer_json, answer_sse

from provider_llamacpp import (
    AssistantMessage,
    ChatStream,
    Client,
    Done,
    Event,
    Failure,
    FunctionCall,
    Interrupted,
    InvalidRequest,
    ProviderError,
    SettingsError,
    TextBlock,
    TextDelta,
    count_tokens,
    embed,
    list_models,
    stream_chat,
)
from provider_llamacpp.local.llama import LlamaServer
from provider_llamacpp.local.model import SENTENCE

CHAT = "/v1/chat/completions"
MODELS = answer_json({"data": [{"id": "demo", "object": "model", "aliases": ["small"]}]})


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


WHOLE = answer_sse(chunk(content="Hel"), chunk(content="lo"), chunk("stop"), "[DONE]")


def at(answer: Any, **routes: Any) -> ScriptedServer:
    """A server of one model that gives ``answer`` to a chat."""
    return ScriptedServer(routes={"/v1/models": MODELS, CHAT: answer, **routes})


def body_of(server: ScriptedServer, path: str = CHAT) -> Any:
    (request,) = [each for each in server.requests if each.path == path]
    return request.json()


# -- with a real server -----------------------------------------------------------------------


def test_an_answer_of_a_real_server(llama: LlamaServer) -> None:
    with stream_chat("hi", api_url=llama.url, max_output_tokens=200) as stream:
        events = list(stream)
    assert [each.type for each in events[:2]] == ["start", "text_start"]
    assert [each.type for each in events[-3:]] == ["usage", "stop", "done"]
    assert "".join(each.delta for each in events if isinstance(each, TextDelta)) == SENTENCE
    last = events[-1]
    assert isinstance(last, Done)
    assert (last.message.text, last.message.stop_reason) == (SENTENCE, "end")
    assert last.message.usage is not None and last.message.usage.output == 27


def test_the_other_questions_of_a_real_server(llama: LlamaServer) -> None:
    (model,) = list_models(api_url=llama.url)
    assert (model.id, model.state, model.context_window, model.chat) == (
        *("demo", "loaded", 8192, True),
    )
    counted = count_tokens("hi", api_url=llama.url)
    usage = stream_chat("hi", api_url=llama.url).result().usage
    assert usage is not None and usage.input == counted
    found = embed(["one", "another text"], api_url=llama.url)
    assert found.model == "demo" and len(found.vectors) == 2
    assert len(found.vectors[0]) == len(found.vectors[1]) > 0


def test_texts_are_right_where_the_server_mixes_them_up(llama: LlamaServer) -> None:
    # The shared server is started so that it does: --parallel 4, --pooling mean, decoder model.
    client = Client(llama.url)
    texts = ["a", "a much longer text than the one before"]
    alone = [client.embed([each]).vectors[0] for each in texts]
    together = client.embed(texts).vectors
    for one, other in zip(alone, together, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_a_conversation_goes_on_with_its_own_answer(llama: LlamaServer) -> None:
    client = Client(llama.url)
    first = client.stream_chat("hi").result()
    rows = [{"role": "user", "content": "hi"}, first, {"role": "user", "content": "and?"}]
    assert client.stream_chat(rows).result().text == SENTENCE
    assert client.count_tokens(rows) > client.count_tokens("hi")


# -- what goes out ----------------------------------------------------------------------------


def test_the_request() -> None:
    tool = {"name": "a::b", "description": "d", "parameters": {"type": "object"}}
    with at(WHOLE) as server:
        client = Client(f"{server.url}/v1", api_key="sk-1")
        message = client.stream_chat(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
            tools=[tool],
            max_output_tokens=5,
            provider_options={"temperature": 0.5},
        ).result()
        body = body_of(server)
        assert all(each.headers["authorization"] == "Bearer sk-1" for each in server.requests)
    assert message.text == "Hello"
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("demo", 5, 0.5)
    assert body["tools"][0]["function"]["description"] == "d"


def test_calls_come_back_under_their_own_names() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "a__b", "arguments": '{"x":1}'}}
    seen = []

    def answer(request: Request) -> Any:
        seen.append(request.json()["tools"][0]["function"]["name"])
        call["function"]["name"] = seen[0]  # type: ignore[index]
        return answer_sse(chunk(tool_calls=[call]), chunk("tool_calls"), "[DONE]")

    with at(answer) as server:
        message = Client(server.url).stream_chat("hi", tools=[{"name": "a::b"}]).result()
    assert message.calls == (FunctionCall("c1", "a::b", {"x": 1}),)
    assert message.stop_reason == "function_call"


def test_a_client_asks_once_what_is_served() -> None:
    with at(WHOLE) as server:
        client = Client(server.url)
        for _ in range(3):
            assert client.stream_chat("hi").result().text == "Hello"
        assert server.paths().count("GET /v1/models") == 1


def test_a_server_that_lists_nothing_is_asked_all_the_same() -> None:
    with ScriptedServer(routes={CHAT: WHOLE}) as server:
        assert Client(server.url).stream_chat("hi", model="m").result().text == "Hello"
        assert body_of(server)["model"] == "m"
        last = list(Client(server.url).stream_chat("hi"))[-1]
    assert isinstance(last, Failure)


# -- failures ---------------------------------------------------------------------------------


def failing(events: Iterator[Event]) -> AssistantMessage:
    last = list(events)[-1]
    assert isinstance(last, Failure)
    return last.error


def test_a_refusal_is_the_last_event_and_hides_the_key() -> None:
    words = {"error": {"message": "no such key: sk-secret", "type": "authentication_error"}}
    with at(answer_json(words, status=401)) as server:
        client = Client(server.url, api_key="sk-secret")
        error = failing(client.stream_chat("hi"))
        assert error.error_kind == "auth_expired" and error.stop_reason == "error"
        assert "sk-secret" not in repr(error)
        with pytest.raises(ProviderError) as caught:
            client.stream_chat("hi").result()
    assert caught.value.kind == "auth_expired" and "sk-secret" not in str(caught.value)


def test_what_came_before_a_break_is_kept() -> None:
    with at(answer_sse(chunk(content="Hel"), cut=True)) as server:
        error = failing(Client(server.url).stream_chat("hi"))
    assert (error.text, error.error_kind) == ("Hel", "transient")


def test_nobody_there() -> None:
    error = failing(stream_chat("hi", api_url="http://127.0.0.1:9"))
    assert error.error_kind == "transient"
    for ask in (lambda c: c.embed(["a"]), lambda c: c.count_tokens("a"), Client.list_models):
        with pytest.raises(ProviderError) as caught:
            ask(Client("http://127.0.0.1:9"))
        assert caught.value.kind == "transient"


def test_failures_of_short_questions_have_kind_and_status() -> None:
    refusal = answer_json({"error": {"message": "no: sk-secret", "type": "x"}}, status=501)
    routes = {"/v1/embeddings": refusal, "/v1/models": answer_json({}, status=401)}
    with ScriptedServer(routes=routes) as server:
        client = Client(server.url, api_key="sk-secret")
        with pytest.raises(ProviderError) as caught:
            client.embed(["a"])
        assert (caught.value.kind, caught.value.status) == ("permanent", 501)
        assert "sk-secret" not in str(caught.value)
        with pytest.raises(ProviderError) as caught:
            client.list_models()
        assert caught.value.kind == "auth_expired"
        with pytest.raises(ProviderError, match="cannot count") as caught:
            client.count_tokens("a", model="m")
        assert caught.value.kind == "permanent"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: stream_chat(["no message"]),  # type: ignore[list-item]
        lambda: stream_chat([{"role": "wizard", "content": "hi"}]),
        lambda: stream_chat("hi", thinking_level="much"),
        lambda: stream_chat("hi", max_output_tokens=-1),
        lambda: count_tokens([]),
        lambda: embed([]),
        lambda: embed("a text and no list of them"),
        lambda: embed([1]),  # type: ignore[list-item]
    ],
)
def test_what_does_not_fit_is_refused_at_once(ask: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest):
        ask()


def test_what_only_the_whole_request_shows_is_refused_by_the_first_event() -> None:
    with at(WHOLE) as server:
        stream = Client(server.url).stream_chat("hi", provider_options={"n": 2})
        with pytest.raises(InvalidRequest, match="one answer"):
            next(stream)


def test_an_argument_that_cannot_be_used_is_named() -> None:
    with pytest.raises(SettingsError, match="api_url"):
        stream_chat("hi", api_url="ftp://x")
    with pytest.raises(SettingsError, match="connect_timeout"):
        Client(connect_timeout=0)


# -- ends -------------------------------------------------------------------------------------


def reading(stream: ChatStream) -> tuple[threading.Thread, list[Event]]:
    events: list[Event] = []
    thread = threading.Thread(target=lambda: events.extend(stream))
    thread.start()
    return thread, events


HEADERS = {"headers": {"headers": {"content-type": "text/event-stream"}}}
FIRST = {"send": 'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'}


@pytest.mark.parametrize(
    "steps",
    [[{"hang_ms": 60_000}], [HEADERS, {"hang_ms": 60_000}], [HEADERS, FIRST, {"hang_ms": 60_000}]],
    ids=["before the headers", "before the first event", "in the middle"],
)
def test_another_thread_ends_it(steps: list[Any]) -> None:
    with at({"script": steps}) as server:
        stream = Client(server.url).stream_chat("hi")
        thread, events = reading(stream)
        seen: list[Request] = []
        while CHAT not in [each.path for each in seen]:
            seen = server.wait_requests(len(seen) + 1)
        stream.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert server.client_closed.wait(PATIENCE)
        assert stream.closed and not any(isinstance(each, Done | Failure) for each in events)
        with pytest.raises(Interrupted):
            stream.result()
        stream.close()


def test_it_is_ended_while_the_server_is_asked_what_it_serves() -> None:
    with ScriptedServer({"script": [{"hang_ms": 60_000}]}) as server:
        stream = Client(server.url).stream_chat("hi")
        thread, events = reading(stream)
        server.wait_requests(1)
        stream.close()
        thread.join(PATIENCE)
        assert not thread.is_alive() and events == []
        assert server.client_closed.wait(PATIENCE)


def test_leaving_the_block_ends_it() -> None:
    with at({"script": [HEADERS, FIRST, {"hang_ms": 60_000}]}) as server:
        with Client(server.url).stream_chat("hi") as stream:
            for event in stream:
                if isinstance(event, TextDelta):
                    break
        assert server.client_closed.wait(PATIENCE)
        assert list(stream) == []


def test_one_made_by_hand() -> None:
    def events() -> Generator[Event, None, None]:
        yield TextDelta("Hel")
        yield Done(message)

    message = AssistantMessage((TextBlock("Hel"),), "end", "m", "p", 0)
    aborts: list[str] = []
    whole = ChatStream(events(), lambda: aborts.append("whole"))
    assert whole.result() is message
    whole.close()
    cut = ChatStream(events(), lambda: aborts.append("cut"))
    next(cut)
    assert not cut.closed
    cut.close()
    assert (whole.closed, cut.closed, list(cut)) == (False, True, [])
    assert aborts == ["whole", "cut"]


def test_a_stream_that_nobody_holds_is_ended() -> None:
    with at({"script": [HEADERS, FIRST, {"hang_ms": 60_000}]}) as server:
        stream = Client(server.url).stream_chat("hi")
        next(stream)
        del stream
        gc.collect()
        assert server.client_closed.wait(PATIENCE)


def test_one_that_was_never_begun_asks_nobody() -> None:
    with at(WHOLE) as server:
        stream = Client(server.url).stream_chat("hi")
        stream.close()
        assert list(stream) == [] and server.requests == []
