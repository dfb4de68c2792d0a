import errno
import json
import socket
import ssl

import pytest
import requests
import urllib3
from chunks import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from provider_llamacpp.events.classify import MAX_MESSAGE, classify, error_in, network_error

RECORDED = [
    json.loads(line) for line in (DATA / "errors.jsonl").read_text(encoding="utf-8").splitlines()
]

KINDS = {
    "auth-missing": "auth_expired",
    "kv-shared-exceeded-nonstream": "context_overflow",
    "loading-chat": "transient",
    "output-not-parsable-nonstream": "transient",
    "overflow-prompt-anthropic": "context_overflow",
    "overflow-prompt-equal": "context_overflow",
    "router-child-overflow-stream": "context_overflow",
    "router-chat-broken-stream": "transient",
    "router-child-killed-nonstream": "transient",
    "router-delete-model": "transient",
    "router-load-limit-busy": "transient",
    "router-stream-get-while-loading": "transient",
    "router-unloaded-while-loading": "transient",
    "slots-fail-on-no-slot": "transient",
}
"""What llama-server says and a retry, another key or a shorter prompt may mend; the rest is not."""


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row["name"])
def test_recorded_errors(row):
    error = classify(row["status"], row["body"].encode())
    assert error.kind == KINDS.get(row["name"], "permanent")
    assert error.status == row["status"]
    try:
        said = json.loads(row["body"])
        said = said.get("error", said)["message"]
    except ValueError:
        said = row["body"]
    assert error.message.startswith(" ".join(said.split())[:100])
    assert classify(row["status"], row["body"]).message == error.message


def test_a_prompt_that_is_too_long_says_how_long():
    body = (
        '{"error":{"code":400,"message":"request (19185 tokens) exceeds the available context size '
        '(16384 tokens), try increasing it","type":"exceed_context_size_error"}}'
    )
    assert "19185" in classify(400, body).message
    assert "16384" in classify(400, body).message


def test_a_full_pool_is_the_fault_of_the_others_if_there_are_any():
    body = {"error": {"code": 500, "message": "Context size has been exceeded."}}
    alone, crowded = classify(500, body, alone=True), classify(None, body, alone=False)
    assert (alone.kind, crowded.kind) == ("context_overflow", "transient")
    assert "Context size has been exceeded." in alone.message
    assert "Context size has been exceeded." in crowded.message
    assert "this conversation" in alone.message
    assert "other streams" in crowded.message


def test_a_model_that_cannot_be_loaded():
    body = {
        "error": {
            "code": 500,
            "message": "model name=x failed to load",
            "type": "server_error",
        }
    }
    assert classify(500, body).kind == "transient"
    error = classify(500, body, load_failure="its process exited with code 1")
    assert error.kind == "permanent"
    assert error.message == (
        "model name=x failed to load (its process exited with code 1: see llama-server's log)"
    )


def said(message, **more):
    return {"error": {"message": message, **more}}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        # The table of provider protocol 6.4, row by row.
        (400, {"error": "the prompt is too long"}, "context_overflow"),
        (500, {"error": "maximum context reached"}, "context_overflow"),
        (400, {"error": "something else"}, "permanent"),
        (400, said("x", code="context_length_exceeded"), "context_overflow"),
        (429, said("x", code="insufficient_quota"), "permanent"),
        (400, said("x", code="invalid_api_key"), "auth_expired"),
        (400, said("x", code="account_deactivated"), "auth_expired"),
        (400, said("x", type="authentication_error"), "auth_expired"),
        (400, said("x", type="permission_error"), "auth_expired"),
        (400, said("x", type="rate_limit_error"), "rate_limited"),
        (400, said("x", type="server_error"), "transient"),
        (413, said("x", type="invalid_request_error"), "context_overflow"),
        (400, said("too many tokens", type="invalid_request_error"), "context_overflow"),
        (500, said("x", type="invalid_request_error"), "permanent"),
        (401, "", "auth_expired"),
        (403, "", "auth_expired"),
        (429, "", "rate_limited"),
        (413, "", "context_overflow"),
        (500, "", "transient"),
        (502, "", "transient"),
        (503, "", "transient"),
        (404, "", "permanent"),
        (422, "Maximum Context is 5", "context_overflow"),
        (422, "", "permanent"),
        (None, "", "transient"),
        # What llama-server adds.
        (501, "", "permanent"),
        (501, said("x", type="server_error"), "permanent"),
        (403, said("this feature is disabled", type="feature_disabled"), "permanent"),
        (400, said("model name=x is not running", type="invalid_request_error"), "transient"),
        (500, said("the request exceeds the available context size"), "context_overflow"),
        (500, said("Failed to parse messages: x", type="server_error"), "permanent"),
        (500, said("Failed to parse input at pos 5", type="server_error"), "transient"),
        (500, said("Failed to load image or audio file", type="server_error"), "permanent"),
        # Error objects inside a stream: the code in the body stands for the status.
        (None, said("x", code=400), "permanent"),
        (None, said("x", code=401), "auth_expired"),
        (200, said("x", code=429), "rate_limited"),
        (None, said("x", code=7), "transient"),
        (None, said("x", code=True), "transient"),
        (None, said("context window full"), "context_overflow"),
        # Other shapes.
        (400, {"code": 400, "message": "x", "type": "invalid_request_error"}, "permanent"),
        (422, {"detail": [{"msg": "bad"}]}, "permanent"),
        (503, {"error": {"message": None, "type": 5, "code": None}}, "transient"),
        (503, {"error": None}, "transient"),
        (503, "[1]", "transient"),
        (500, '"maximum context reached"', "context_overflow"),
        (500, "[" * 100_000, "transient"),
        (400, said(float("inf")), "permanent"),
    ],
)
def test_the_table(status, body, kind):
    error = classify(status, body)
    assert error.kind == kind
    assert 0 < len(error.message) <= MAX_MESSAGE
    assert error.status == status


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, said("Invalid API Key"), "Invalid API Key (check the API key"),
        (404, said("File Not Found", type="not_found_error"), "check api_url"),
        (404, "<html>", "HTTP 404 Not Found: a web page came"),
        (502, "\ufeff <!DOCTYPE html><title>sk-secret</title>", "HTTP 502 Bad Gateway"),
        (200, "<html>login</html>", "check api_url"),
        (599, "", "HTTP 599"),
        (503, "", "HTTP 503 Service Unavailable"),
        (None, "", "without words"),
        (422, {"detail": [{"msg": "bad"}]}, '[{"msg":"bad"}]'),
        (400, {"error": "plain"}, "plain"),
        (400, {"error": ["a"]}, '["a"]'),
    ],
)
def test_words(status, body, words):
    message = classify(status, body).message
    assert words in message
    assert "<" not in message
    assert "secret" not in message


def test_a_web_page_instead_of_a_stream_is_a_wrong_address():
    assert classify(200, "<html>login</html>").kind == "permanent"
    assert classify(502, "<html>").kind == "transient"


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("https://user:pw@other.example/v1?key=sk-secret", "to host other.example"),
        ("/v2/chat", "to another path on the same host"),
        (None, "to another path on the same host"),
        ("http://[bad", "to another path on the same host"),
    ],
)
def test_redirects_name_the_host_alone(location, words):
    error = classify(307, "<html>moved</html>", location=location)
    assert error.kind == "permanent"
    assert words in error.message
    assert "307 Temporary Redirect" in error.message
    assert "api_url" in error.message
    assert "secret" not in error.message
    assert "pw" not in error.message


def test_messages_are_one_short_line():
    error = classify(400, said("a\x00\r\n\tb\x1b[31m\x7f\x85\u2028c\ud800" + "x" * 9000))
    assert error.message.startswith("a b [31m c\ufffdx")
    assert error.message.endswith("...")
    assert len(error.message) <= MAX_MESSAGE


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
FIELDS = st.dictionaries(st.sampled_from(["message", "type", "code", "detail"]), ANY_JSON)


@settings(deadline=None)
@given(
    st.none() | st.integers(100, 599),
    st.binary() | st.text() | st.dictionaries(st.just("error"), FIELDS | ANY_JSON) | FIELDS,
)
def test_anything_becomes_an_error(status, body):
    error = classify(status, body)
    assert 0 < len(error.message) <= MAX_MESSAGE
    assert error.message.isprintable() or "\n" not in error.message
    error.message.encode()


@pytest.mark.parametrize(
    ("chunk", "reports"),
    [
        ({"error": {"message": "x"}}, True),
        ({"error": "x"}, True),
        ({"object": "error", "message": "x"}, True),
        ({"message": "x", "code": 500}, True),
        ({"message": "x", "type": "server_error"}, True),
        ({"error": None, "choices": []}, False),
        ({"error": {}}, False),
        ({"message": "x"}, False),
        ({"message": {"role": "assistant"}, "type": "x"}, False),
        ({"choices": [], "message": "x", "code": 5}, False),
        ({}, False),
    ],
)
def test_which_chunks_are_errors(chunk, reports):
    assert (error_in(chunk) is not None) is reports


def raised(error, cause=None):
    """``error`` as it looks after it was raised."""
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def refused():
    pool = urllib3.HTTPConnectionPool("127.0.0.1", 1)
    inner = raised(
        urllib3.exceptions.NewConnectionError(pool, "x"), ConnectionRefusedError(111, "refused")
    )
    outer = urllib3.exceptions.MaxRetryError(pool, "/", inner)
    return requests.ConnectionError(outer)


CERTIFICATE = ssl.SSLCertVerificationError(1, "certificate verify failed")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refused(), "connection refused"),
        (ConnectionRefusedError(111, "x"), "connection refused"),
        (socket.gaierror(-2, "x"), "host name cannot be resolved"),
        (requests.ConnectTimeout(), "took no connection in time"),
        (requests.ReadTimeout(), "did not answer in time"),
        (TimeoutError(), "did not answer in time"),
        (requests.exceptions.SSLError(CERTIFICATE), "could not be verified"),
        (requests.exceptions.SSLError(ssl.SSLError(1, "x")), "TLS handshake"),
        (ConnectionResetError(104, "x"), "broke the connection off"),
        (BrokenPipeError(), "broke the connection off"),
        (requests.exceptions.ChunkedEncodingError(), "broke the connection off"),
        (
            urllib3.exceptions.ProtocolError("x", urllib3.exceptions.IncompleteRead(1, 2)),
            "broke the connection off",
        ),
        (OSError(errno.EHOSTUNREACH, "x"), "no route"),
        (OSError(errno.EMFILE, "x"), "the connection failed (OSError)"),
        (requests.RequestException(), "the connection failed (RequestException)"),
    ],
)
def test_network_errors_in_words(error, words):
    found = network_error(error, "http://joe:secret@127.0.0.1:8080")
    assert found.kind == "transient"
    assert words in found.message
    assert "llama-server at http://127.0.0.1:8080" in found.message
    assert "secret" not in found.message
    assert found.status is None


@pytest.mark.parametrize("words", ["refused", "resolved", "verified"])
def test_wrong_addresses_name_the_setting(words):
    errors = [refused(), socket.gaierror(-2, "x"), requests.exceptions.SSLError(CERTIFICATE)]
    messages = [network_error(error, "http://h:1").message for error in errors]
    assert all("api_url" in message for message in messages)
    assert any(words in message for message in messages)


def test_an_address_that_cannot_be_used_is_permanent():
    error = network_error(requests.exceptions.InvalidURL("x"), "http://h:1")
    assert error.kind == "permanent"
    assert "api_url" in error.message


def test_causes_in_a_circle_end():
    one, two = OSError(5, "x"), ValueError("y")
    one.__cause__, two.__cause__ = two, one
    assert "the connection failed" in network_error(one, "http://h:1").message
