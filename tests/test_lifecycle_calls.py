"""What the worker's functions do, called by the official ``iii-sdk``.

Against the loopback engine as engines of 0.21, 0.23 and 0.25 behave, and a real llama-server.
"""

# ruff: noqa: F811 (fixtures are imported and then named as arguments)

from __future__ import annotations

import json
import threading

import pytest
from iii import InvocationError
from laws import check_frames
from peers import ScriptedServer, answer_json
from sdk import Stream
from world import WEATHER, ask, new_world, running, says, scripted, settled, wait_idle, world  # noqa: F401

from provider_llamacpp.local.model import CITY, LOOP, SENTENCE, THOUGHT, TOOL_NAME

pytestmark = pytest.mark.timeout(120)


def test_streams_text(running):
    stream = running.stream()
    message = settled(stream)
    assert message["content"] == [{"type": "text", "text": SENTENCE}]
    assert message["stop_reason"] == "end"
    assert message["model"] == "demo"
    assert message["provider"] == "llamacpp"
    assert message["usage"]["output"] > 0
    deltas = [frame["delta"] for frame in stream.frames if frame["type"] == "text_delta"]
    assert "".join(deltas) == SENTENCE
    assert len(deltas) > 5
    kinds = [kind for kind in stream.kinds if kind not in ("text_delta", "usage", "ping")]
    assert kinds == ["start", "text_start", "text_end", "stop", "done"]


def test_streams_a_thought(running):
    message = settled(running.stream(thinking_level="medium"))
    assert message["content"] == [
        {"type": "thinking", "text": THOUGHT},
        {"type": "text", "text": SENTENCE},
    ]


def test_streams_a_call(running):
    stream = running.stream("How is the weather?", tools=[WEATHER | {"name": TOOL_NAME}])
    message = settled(stream)
    (call,) = message["content"]
    assert call.pop("id")
    assert call == {"type": "function_call", "function_id": TOOL_NAME, "arguments": {"city": CITY}}
    assert message["stop_reason"] == "function_call"
    assert message["native_stop_reason"] == "tool_calls"


def test_abort_in_mid_stream(running, llama):
    stream = running.stream("forever", resolution_key="turn-1", max_output_tokens=8000)
    assert stream.wait_for("text_delta", 3)
    assert stream.abort() == {"aborted": True}
    wait_idle(llama, 5)
    assert stream.finish() == {"ok": True}
    assert not {"done", "error"} & set(stream.kinds)
    said = "".join(frame.get("delta", "") for frame in stream.frames)
    assert (LOOP * 4000).strip().startswith(said.strip())
    assert 0 < len(said.split()) < 8000  # a token is a word: it was cut short
    assert stream.abort() == {"aborted": False}
    # The worker goes on.
    assert settled(running.stream())["stop_reason"] == "end"


def test_abort_of_nobody(running):
    assert running.call("abort", {"request_id": "unknown"}) == {"aborted": False}


def test_a_caller_that_leaves_frees_the_server(world):
    chunk = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
    endless = {
        "script": [
            {"headers": {"headers": {"content-type": "text/event-stream"}}},
            {
                "repeat": 10_000,
                "steps": [{"send": f"data: {json.dumps(chunk)}\n\n"}, {"sleep_ms": 10}],
            },
        ]
    }
    listing = answer_json({"object": "list", "data": [{"id": "demo", "object": "model"}]})
    routes = {"/v1/models": listing, "/v1/chat/completions": endless}
    with ScriptedServer(routes=routes) as server:
        world.store.config["api_url"] = server.url
        router = world.router()
        world.worker()
        assert router.wait_for_calls("models::reconcile")
        stream = world.stream()
        assert stream.wait_for("text_delta", 3)
        stream.leave()
        assert server.client_closed.wait(10), "the server streams on for nobody"
        assert stream.result.result(15) == {"ok": True}


def test_embeds(running):
    answer = running.call("embed", {"model": None, "input": ["a", "bb", "a"]})
    first, second, third = answer["embeddings"]
    assert len(first) == len(second) > 1
    assert first == pytest.approx(third)
    assert first != pytest.approx(second)
    assert answer["model"]


def test_counts_what_a_stream_is_charged(running):
    question = ask("How is the weather?", system_prompt="Be brief.", tools=[WEATHER])
    message = settled(Stream(running.caller, question))
    counted = running.call(
        "count_tokens", {k: question[k] for k in ("model", "messages", "system_prompt", "tools")}
    )
    assert counted == {
        "model": "demo",
        "tokens": message["usage"]["input"],
        "estimator": "metered",
    }


def test_refresh_models(running):
    told = len(running.live_router.calls["models::reconcile"])
    assert running.call("refresh_models") == {"ok": True, "count": 1}
    assert len(running.live_router.calls["models::reconcile"]) > told


def test_on_router_ready_answers_at_once_and_declares_again(running):
    router = running.live_router
    declared = len(router.calls["provider::register"])
    assert running.call("on_router_ready") == {"ok": True}
    assert router.wait_for_calls("provider::register", declared + 1)
    last = router.calls["provider::register"][-1]
    assert last["token"] == running.token()
    # A declaration without the list would erase it.
    assert last["default_models"] == ["demo"]


def test_a_payload_that_cannot_be_read(running):
    with pytest.raises(InvocationError) as caught:
        running.call("stream", {"model": "demo"})
    assert caught.value.code == "provider/invalid_request"
    assert "writer_ref" in caught.value.message
    with pytest.raises(InvocationError) as caught:
        running.call("embed", {"input": []})
    assert caught.value.code == "provider/invalid_request"
    assert "input" in caught.value.message


def test_a_server_that_fails(world):
    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    with ScriptedServer(answer_json(loading, 503)) as server:
        world.store.config["api_url"] = server.url
        router = world.router()
        world.worker()
        world.declared()
        assert router.wait_for_calls("provider::register")
        stream = world.stream()
        message = settled(stream)
        assert stream.kinds == ["error"]
        assert message["error_kind"] == "transient"
        assert "Loading model" in message["error_message"]
        with pytest.raises(InvocationError) as caught:
            world.call("refresh_models")
        assert caught.value.code == "provider/upstream_unavailable"
        assert "models::reconcile" not in router.calls


def test_abort_before_the_first_byte(scripted):
    scripted.worker()
    assert scripted.live_router.wait_for_calls("models::reconcile")
    stream = scripted.stream("silent", resolution_key="turn-1")
    while not any(exchange.request.method == "POST" for exchange in scripted.server.exchanges):
        scripted.server.wait_requests(len(scripted.server.requests) + 1)
    assert stream.abort() == {"aborted": True}
    assert scripted.server.client_closed.wait(5)
    assert stream.finish() == {"ok": True}
    assert stream.kinds == []


def test_an_abort_reaches_every_attempt(scripted):
    scripted.worker()
    assert scripted.live_router.wait_for_calls("models::reconcile")
    streams = [scripted.stream(resolution_key="turn-1") for _ in range(3)]
    other = scripted.stream(resolution_key="turn-2")
    for stream in [*streams, other]:
        assert stream.wait_for("text_delta")
    assert streams[0].abort() == {"aborted": True}
    for stream in streams:
        assert stream.finish() == {"ok": True}
        assert not {"done", "error"} & set(stream.kinds)
    scripted.server.go.set()
    assert settled(other)["content"] == [{"type": "text", "text": "x"}]


def test_more_streams_than_the_worker_takes(scripted):
    scripted.worker(max_streams=2)
    assert scripted.live_router.wait_for_calls("models::reconcile")
    running = [scripted.stream() for _ in range(2)]
    for stream in running:
        assert stream.wait_for("text_delta")
    third = scripted.stream()
    assert settled(third)["error_kind"] == "rate_limited"
    assert third.kinds == ["error"]
    # Streams take nothing away from the short calls.
    assert scripted.call("refresh_models") == {"ok": True, "count": 1}
    scripted.server.go.set()
    for stream in running:
        assert settled(stream)["stop_reason"] == "end"


def test_a_stop_cuts_what_still_runs(scripted):
    worker = scripted.worker()
    assert scripted.live_router.wait_for_calls("models::reconcile")
    stream = scripted.stream()
    assert stream.wait_for("text_delta")
    worker.stop(0.0)
    assert stream.wait(lambda: stream.ended)
    check_frames([text.encode() for text in stream.texts])
    assert stream.terminal["error_kind"] == "transient"
    assert stream.terminal["content"] == [{"type": "text", "text": "x"}]
    assert scripted.server.client_closed.wait(5)
    # The answer leaves before the connection ends.
    assert stream.finish() == {"ok": True}


def test_a_stop_lets_streams_end(scripted):
    worker = scripted.worker()
    assert scripted.live_router.wait_for_calls("models::reconcile")
    stream = scripted.stream()
    assert stream.wait_for("text_delta")
    stopping = threading.Thread(target=worker.stop, args=(60.0,))
    stopping.start()
    for _ in range(100):
        late = scripted.stream()
        assert late.wait(lambda: late.frames)  # noqa: B023
        if late.kinds == ["error"]:
            break  # else it was taken before the stop began
    assert late.terminal["error_kind"] == "transient"
    assert stopping.is_alive()
    scripted.server.go.set()
    stopping.join(15)
    assert not stopping.is_alive()
    assert settled(stream)["stop_reason"] == "end"


def test_a_large_request(scripted):
    scripted.worker()
    assert scripted.live_router.wait_for_calls("models::reconcile")
    scripted.server.go.set()
    picture = "QUJD" * 2**20
    message = says("look")
    message["content"].append({"type": "image", "mime": "image/png", "data": picture})
    stream = Stream(scripted.caller, ask() | {"messages": [message]})
    assert settled(stream)["stop_reason"] == "end"
    (request,) = [r for r in scripted.server.requests if r.method == "POST"]
    part = request.json()["messages"][0]["content"][1]
    assert part == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}


def test_the_server_hears_nothing_of_a_caller_who_is_gone(scripted):
    scripted.worker()
    assert scripted.live_router.wait_for_calls("models::reconcile")
    gone = {"channel_id": "unknown", "access_key": "k", "direction": "write"}
    result = scripted.call("stream", {**ask("silent"), "writer_ref": gone})
    assert result == {"ok": True}
    posts = [each for each in scripted.server.requests if each.method == "POST"]
    assert posts == []
