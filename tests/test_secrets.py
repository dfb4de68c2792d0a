"""Keys and tokens are in no log, error, repr or statistic, even where the server quotes them.

Everything is logged at the level of debugging, by us and by the libraries.
"""

# ruff: noqa: F811 (fixtures are imported and then named as arguments)

from __future__ import annotations

import json
import logging

import pytest
from chunks import assembler
from iii import InvocationError
from laws import check_frames
from peers import ScriptedServer, answer_json, answer_sse
from test_router import client
from world import FINISH, WORD, new_world, world  # noqa: F401

from provider_llamacpp.errors import HIDDEN, BusError, redacted
from provider_llamacpp.events.assembler import Outcome
from provider_llamacpp.payloads import decode_stream
from provider_llamacpp.server.upstream import Target

pytestmark = pytest.mark.timeout(60)

KEY = 'sk-pl/ain"4711\\quoted'
TOKEN = "engine-t0ken-4712"
REFUSAL = f"Incorrect API key provided: {KEY}. Find yours at /keys"


def answer(request):
    body = request.body
    if b"in the stream" in body:
        return answer_sse({"error": {"code": 401, "message": REFUSAL, "type": "x"}})
    if b"as text" in body:
        return {"body": f"proxy error: {REFUSAL}", "headers": {"content-type": "text/plain"}}
    if b"as a field" in body:
        return {"body": f"error: {json.dumps({'message': REFUSAL})}\n\n"}
    if b"far behind" in body:
        # Where a message is cut, half a key would be one too many.
        return answer_json({"error": {"message": "x" * 1690 + KEY, "type": "server_error"}}, 500)
    if b"refused" in body:
        return answer_json({"error": {"message": REFUSAL, "type": "authentication_error"}}, 401)
    return answer_sse(body=WORD + FINISH)


def refusal(request):
    return answer_json({"error": {"message": REFUSAL, "type": "authentication_error"}}, 401)


@pytest.mark.parametrize("new_world", ["0.25"], indirect=True)
def test_a_key_that_the_server_quotes_is_shown_to_nobody(new_world, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("III_TOKEN", TOKEN)
    world = new_world(token=TOKEN)
    listing = answer_json({"object": "list", "data": [{"id": "demo", "object": "model"}]})
    routes = {
        "/v1/models": listing,
        "/v1/chat/completions": answer,
        "/v1/embeddings": refusal,
        "/v1/chat/completions/input_tokens": refusal,
        "/v1/messages/count_tokens": refusal,
        "/apply-template": refusal,
        "/tokenize": refusal,
    }
    with ScriptedServer(routes=routes) as server:
        world.store.config = {
            "api_url": server.url,
            "credential": {"type": "api_key", "key": KEY},
        }
        router = world.router()
        worker = world.worker(token=TOKEN)
        assert router.wait_for_calls("models::reconcile")
        world.declared()
        shown = []
        for how in ("refused", "in the stream", "as text", "as a field", "far behind", "whole"):
            stream = world.stream(how)
            assert stream.finish() == {"ok": True}
            check_frames([text.encode() for text in stream.texts])
            assert stream.kinds[-1] == ("done" if how == "whole" else "error"), how
            shown += stream.texts
            if how not in ("whole", "far behind"):
                assert HIDDEN in stream.terminal["error_message"], how
        for function, payload in (
            ("embed", {"input": ["a"]}),
            ("count_tokens", {"model": "demo", "messages": []}),
        ):
            with pytest.raises(InvocationError) as caught:
                world.call(function, payload)
            shown.append(str(caught.value))
        assert any(f"Bearer {KEY}" == r.headers.get("authorization") for r in server.requests)
        shown += [json.dumps(worker.stats()), json.dumps(world.call("status"))]
        shown += [repr(vars(worker)), repr(worker.settings), worker._engine.last_error or ""]
        registration = world.token()
        worker.stop(0.0)
    ours = [r for r in caplog.records if not r.name.startswith(("iii", "websockets", "asyncio"))]
    assert any(record.name.startswith("provider_llamacpp") for record in ours)
    shown += [record.getMessage() + repr(record.args) for record in ours]
    for secret in (KEY, json.dumps(KEY)[1:-1], KEY[:12], TOKEN, registration):
        assert [text for text in shown if secret in text] == []


def test_no_repr_shows_what_is_secret():
    request = decode_stream(
        {
            "writer_ref": {"channel_id": "c", "access_key": "channel-4713", "direction": "write"},
            "model": "demo",
            "messages": [],
        }
    )
    shown = repr(request) + str(request.writer) + repr(Target("http://h", KEY))
    assert "channel-4713" not in shown and KEY not in shown


@pytest.mark.parametrize(
    ("text", "secrets", "wanted"),
    [
        ("key abcdef!", ("abcdef",), f"key {HIDDEN}!"),
        ("abcdef abcdef", (None, "", "abcdef"), f"{HIDDEN} {HIDDEN}"),
        (r"say a\"b/c", ('a"b/c',), f"say {HIDDEN}"),
        (r"say a\"b\/c", ('a"b/c',), f"say {HIDDEN}"),
        # Too short to be one: it would be in every word.
        ("key abc", ("abc",), "key abc"),
    ],
)
def test_redaction(text, secrets, wanted):
    assert redacted(text, *secrets) == wanted


@pytest.mark.parametrize(
    "body",
    [b"words with hunter22 in them", b'{"error":{"message":"hunter22"}}', b"error: hunter22"],
)
def test_an_assembler_that_is_told_a_secret_keeps_it(body):
    told = assembler(secret="hunter22")
    frames = told.feed(b"data: " + body + b"\n\n")
    frames += told.feed(body + b"\n\n")
    frames += told.finish(Outcome())
    assert b"hunter22" not in b"".join(frames)
    assert HIDDEN.encode() in b"".join(frames)


def test_a_router_that_quotes_the_token():
    def invoke(function_id, payload, **options):
        if function_id == "state::get":
            return "minted-7d0c"
        raise BusError("router/registration_rejected", f"who is {payload['token']}?")

    with pytest.raises(BusError) as caught:
        client(invoke).register([])
    assert caught.value.message == f"who is {HIDDEN}?"
    assert caught.value.__cause__ is None
