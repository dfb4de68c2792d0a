"""The checks of the cases can fail: each is shown what holds and what does not."""

import json

import pytest
from case_checks import PROSE, problems
from case_runner import SHORT, load_cases, stream_payload, time_factor
from case_seen import Request, Seen

MESSAGE = {
    "role": "assistant",
    "content": [
        {"type": "text", "text": "ab"},
        {"type": "function_call", "id": "c1", "function_id": "fs::read", "arguments": {"p": 1}},
    ],
    "stop_reason": "function_call",
    "native_stop_reason": "tool_calls",
    "usage": {"input": 12, "output": 3},
    "model": "m",
    "provider": "llamacpp",
    "timestamp": 1,
}
ERROR = {
    "content": [],
    "stop_reason": "error",
    "error_kind": "transient",
    "error_message": "no 512",
}
DONE = {"type": "done", "message": MESSAGE}
CALL = MESSAGE["content"][1]


def seen(*frames, **more):
    return Seen(frames=list(frames), texts=[json.dumps(frame) for frame in frames], **more)


def request(path="/v1/chat/completions", body=b'{"a":{"b":[1,{"c":2}]}}', connection=0, **headers):
    return Request("POST", path, headers, body, connection)


GOOD = seen(
    {"type": "ping"},
    {"type": "start"},
    {"type": "text_start"},
    {"type": "text_delta"},
    {"type": "text_end"},
    {"type": "usage"},
    DONE,
    result={"embeddings": [[1.0]]},
    requests=[request(authorization="Bearer k")],
    all_requests=[request("/props?model=x&autoload=false", authorization="Bearer k")],
    aborted_at=1.0,
    upstream_closed_at=1.4,
    abort_results=[True],
    abort_seconds=[0.2],
    frames_at_abort=7,
    reconciled=[{"id": "x", "context_window": 8, "max_output_tokens": 4}],
    later=[seen(DONE)],
)
BAD = seen({"type": "error", "error": ERROR})

HOLDS_FOR_GOOD_ONLY = [
    ("terminal", "done"),
    ("stop_reason", "function_call"),
    ("native_stop_reason", "tool_calls"),
    ("content", MESSAGE["content"]),
    ("content", [MESSAGE["content"][0], CALL | {"id": "*"}]),
    ("content_prefix", MESSAGE["content"][:1]),
    ("content_contains", [CALL | {"id": "*"}]),
    ("content_any_of", [[{"type": "text"}], MESSAGE["content"]]),
    ("joined", {"text": "ab"}),
    ("usage", {"output": 3}),
    ("usage_input_any_of", [8, 12]),
    ("event_counts", {"text_start": 1, "done": 1}),
    ("event_order", ["text_end", "usage", "done"]),
    ("any_of", [{"terminal": None, "stop_reason": "end"}, {"terminal": "done"}]),
    ("pings_min", 1),
    ("not", ["error"]),
    ("request_json", {"/a/b/1/c": 2}),
    ("request_json_absent", ["/a/c", "/a/b/7", "/a/b/0/x"]),
    ("upstream_requests", 1),
    ("connections", 1),
    ("upstream_request_header", {"Authorization": "Bearer k"}),
    ("every_request_header", {"authorization": "Bearer k"}),
    ("upstream_closed_within_ms", 500),
    ("embeddings", [[1.0]]),
    ("reconciled", True),
    ("models", [{"id": "x", "context_window": 8}]),
    ("abort_result", {"aborted": True}),
    ("abort_results", [True]),
    ("abort_returns_within_ms", 500),
    ("second_call", {"terminal": "done"}),
    ("next_call", {"stop_reason": "function_call"}),
    ("worker_survives", True),
]
HOLDS_FOR_BAD_ONLY = [
    ("terminal", "error"),
    ("error_kind", "transient"),
    ("error_message_contains", ["512"]),
    ("error_message_max_len", 10),
    ("call_count_max", 0),
    ("calls_degraded", True),
    ("not", ["done"]),
    ("upstream_requests", 0),
]


@pytest.mark.parametrize(("key", "wanted"), HOLDS_FOR_GOOD_ONLY)
def test_what_holds_for_the_good_call_only(key, wanted):
    assert problems(GOOD, {key: wanted}) == []
    assert problems(BAD, {key: wanted}) != []


@pytest.mark.parametrize(("key", "wanted"), HOLDS_FOR_BAD_ONLY)
def test_what_holds_for_the_bad_call_only(key, wanted):
    assert problems(BAD, {key: wanted}) == []
    assert problems(GOOD, {key: wanted}) != []


@pytest.mark.parametrize(
    ("key", "wanted", "wrong"),
    [
        ("not_empty_success", True, seen({"type": "done", "message": ERROR})),
        ("unique_call_ids", True, seen({"type": "done", "message": {"content": [CALL, CALL]}})),
        ("no_empty_calls", True,
         seen({"type": "done", "message": {"content": [CALL | {"id": ""}]}})),
        ("proxy_requests", 0, seen(proxy_requests=1)),
        ("no_request_matching", [r"^/props\?model"],
         seen(all_requests=[request("/props?model=a")])),
        ("call_fails", False, seen(failure=("code", "words"))),
        ("each_model", {"max_output_tokens_lt": "context_window"},
         seen(reconciled=[{"id": "x", "context_window": 4, "max_output_tokens": 4}])),
        ("each_model", {"provider": "p"}, seen(reconciled=[{"id": "x", "provider": "q"}])),
        ("no_events_after_abort", ["done"], seen({"type": "start"}, DONE, frames_at_abort=1)),
        ("registry_empty_after", True, seen(active_after=1)),
    ],
)  # fmt: skip
def test_what_an_empty_call_fulfils(key, wanted, wrong):
    assert problems(Seen(), {key: wanted}) == []
    assert problems(wrong, {key: wanted}) != []


def test_the_order_of_models_counts_unless_the_case_says_otherwise():
    got = seen(reconciled=[{"id": "b"}, {"id": "a"}])
    wanted = {"models": [{"id": "a"}, {"id": "b"}]}
    assert problems(got, wanted) != []
    assert problems(got, wanted | {"models_order_any": True}) == []


@pytest.mark.parametrize(
    ("name", "frames"),
    [
        ("start_first", [{"type": "usage"}, {"type": "start"}]),
        ("start_first", [{"type": "start"}, {"type": "start"}]),
        ("one_terminal", [DONE, DONE]),
        ("one_terminal", []),
        ("terminal_last", [DONE, {"type": "ping"}]),
        ("balanced_blocks", [{"type": "text_start"}, {"type": "thinking_start"}]),
        ("balanced_blocks", [{"type": "text_delta"}]),
        ("balanced_blocks", [{"type": "text_start"}, DONE]),
    ],
)
def test_invariants(name, frames):
    assert any(
        each.startswith(f"invariants: {name}")
        for each in problems(seen(*frames), {"invariants": [name]})
    )


@pytest.mark.parametrize(
    "text", ['{"type":"x","n":NaN}', '{"type":"x","s":"\\ud83d"}', "[1]", '{"type":"x"'], ids=repr
)
def test_frames_must_be_strict_json(text):
    found = problems(Seen(texts=[text]), {"invariants": ["frames_strict_json"]})
    assert any("frames_strict_json" in each for each in found)


def test_a_key_nobody_checks_fails_the_run():
    with pytest.raises(KeyError, match="no check"):
        problems(GOOD, {"surprise": 1}, "some-case")
    with pytest.raises(KeyError):
        problems(GOOD, {"request_check": "words of another case"}, "some-case")


def test_prose_keys_are_those_of_the_cases():
    cases = {case["id"]: case for case in load_cases()}
    for case_id, key in PROSE:
        assert key in cases[case_id]["expect"]


@pytest.mark.parametrize(
    "case", [c for c in load_cases() if c["upstream"] is not None], ids=lambda case: case["id"]
)
def test_every_case_fails_for_a_worker_that_does_nothing(case):
    try:
        found = problems(Seen(), case["expect"], case["id"])
    except (IndexError, AssertionError):
        return  # not even a request to look at
    # Only a case that wants nothing else than restraint could pass.
    assert found or set(case["expect"]) <= {"reconciled"}


def test_long_waits_are_squeezed_and_short_ones_are_not():
    assert time_factor({"script": [{"sleep_ms": 45_000}]}) == pytest.approx(SHORT / 45)
    assert time_factor({"script": [{"sleep_ms": 1600}, {"hang_ms": 8000}]}) == 1.0
    assert time_factor({"body": ""}) == 1.0


def test_the_default_call_brings_the_tools_that_the_answer_names():
    case = {"id": "x", "call": None, "expect": {"content": [CALL, CALL]}}
    assert [tool["name"] for tool in stream_payload(case)["tools"]] == ["fs::read"]
    assert "tools" not in stream_payload({"id": "x", "call": None, "expect": {}})
