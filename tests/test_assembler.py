"""Bytes in, frames out: reads, the short way against the long one, bodies that are no streams."""

import json
import tracemalloc

import pytest
from chunks import (
    DONE,
    assembler,
    bodies,
    call,
    chunk,
    event,
    finish,
    frames_of,
    kinds,
    pieces,
    recording,
    run,
    stream_cases,
    terminal,
    text,
    thought,
    usage,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import check_frames

from provider_llamacpp.errors import ProviderError
from provider_llamacpp.events import assembler as module
from provider_llamacpp.events.assembler import Outcome
from provider_llamacpp.events.turn import MAX_CONTENT

BODIES = bodies()
CASES = {row["id"]: row for row in stream_cases() if row["upstream"]["status"] == 200}


# Recorded streams and cases


@pytest.mark.parametrize(
    ("name", "content", "stop", "counts"),
    [
        (
            "chat-stream-usage",
            [("thinking", "Let me think about this. Done"), ("text", "Hello, world")],
            "end",
            True,
        ),
        ("chat-stream-timings-per-token", [("text", " alpha beta gamma")], "length", False),
        ("chat-stream-progress", [("thinking", "Let me")], "length", False),
        ("context-full-stream", [("text", "alpha beta gamma")], "length", True),
        ("chat-length-inside-reasoning", [("thinking", "Let me think")], "length", True),
    ],
)
def test_recorded_answers(name, content, stop, counts):
    message = terminal(recording(name))
    shown = [(block["type"], block["text"]) for block in message["content"]]
    assert [kind for kind, _ in shown] == [kind for kind, _ in content]
    for (_, found), (_, start) in zip(shown, content, strict=True):
        assert found.startswith(start)
    assert message["stop_reason"] == stop
    assert ("usage" in message) is counts


def test_recorded_text_with_many_scripts():
    assert terminal(recording("chat-stream-multibyte"))["content"] == [
        {"type": "text", "text": "Hello, world h\u00e9llo \U0001f30d and bye!"}
    ]


@pytest.mark.parametrize("name", ["chat-prefill-assistant-stream", "chat-prefill-assistant"])
def test_recorded_continuations(name):
    message = terminal(recording(name), prefill="I say:\n\n")
    assert message["content"] == [
        {"type": "text", "text": "Hello, world h\u00e9llo \U0001f30d and bye!"}
    ]


@pytest.mark.parametrize("name", ["tool-parallel-stream", "tool-parallel-nonstream"])
def test_recorded_calls(name):
    message = terminal(recording(name))
    found = [(each["function_id"], each["arguments"]) for each in message["content"]]
    assert found == [("get_weather", {"city": "Paris"}), ("get_time", {"zone": "UTC"})]
    assert message["stop_reason"] == "function_call"


def test_a_recorded_half_call():
    message = terminal(recording("tool-truncated-stream"))
    assert message["stop_reason"] == "length"
    assert {"_partial", "_raw"} & message["content"][0]["arguments"].keys()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kv-shared-exceeded-stream-1", "Context size has been exceeded."),
        ("output-not-parsable-stream", "peg-native"),
        ("router-child-killed-mid-stream", "proxy error: Failed to read connection"),
        ("killed-mid-stream", "no finish reason"),
    ],
)
def test_recorded_failures(name, words):
    message = terminal(recording(name), alone=lambda: False)
    assert message["error_kind"] == "transient"
    assert words in message["error_message"]
    assert message["content"][0]["text"]


def test_a_second_choice_is_no_part_of_the_answer():
    only = b"\n\n".join(
        each for each in recording("chat-n-two-stream").split(b"\n\n") if b'"index":1,' not in each
    )
    assert only != recording("chat-n-two-stream")
    assert frames_of(recording("chat-n-two-stream")) == frames_of(only)


def test_facts_about_a_recorded_stream():
    machine = assembler(context_window=512)
    machine.feed(recording("context-full-stream"))
    assert machine.started
    assert machine.complete
    assert machine.ended
    assert machine.error is None
    assert machine.server_model == "/srv/models/tiny-loop.gguf"
    assert machine.usage == {"input": 489, "output": 23, "cache_read": 488}
    assert machine.tokens == 23
    assert machine.stop_reason == "length"
    assert machine.progress is None
    message = json.loads(machine.finish(Outcome())[-1])["message"]
    assert "512" in message["warnings"][0]


def test_progress_is_kept():
    machine = assembler()
    machine.feed(recording("chat-stream-progress"))
    assert machine.progress == {"total": 1519, "cache": 0, "processed": 1519, "time_ms": 51}


@pytest.mark.parametrize("name", sorted(CASES))
def test_cases(name):
    expect = CASES[name]["expect"]
    message = terminal(CASES[name]["body"])
    assert ("error_kind" in message) == (expect.get("terminal") == "error")
    for key in ("stop_reason", "native_stop_reason", "error_kind", "content"):
        if key in expect and "*" not in json.dumps(expect[key]):
            assert message[key] == expect[key]
    for words in expect.get("error_message_contains", ()):
        assert words in message["error_message"]
    for each in message["content"] if expect.get("calls_degraded") else ():
        if each["type"] == "function_call":
            assert {"_partial", "_raw"} & each["arguments"].keys()


# Reads, and the two ways


# The ids hold no backslash: pytest doubles it each time it collects in one process, and mutmut then
# asks for tests that it does not find.
OPTIONS = {
    "plain": {},
    "fat": {"fat": True},
    "prefill": {"prefill": "I say:\n\n"},
    "warnings": {"warnings": ["w"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("name", sorted(BODIES))
def test_frames_depend_neither_on_reads_nor_on_the_way(name, options):
    body = BODIES[name]
    whole = frames_of(body, learning=False, **options)
    check_frames(whole)
    for size in (len(body), 1, 2, 997, 4096):
        reads = [body[i : i + size] for i in range(0, len(body), size)]
        assert frames_of(reads, **options) == whole
    events = [each + b"\n\n" for each in body.split(b"\n\n")]
    events[-1] = events[-1][:-2]
    assert frames_of(events, **options) == whole


@settings(deadline=None)
@given(st.sampled_from(sorted(BODIES)), st.lists(st.integers(0, 1 << 20), max_size=12))
def test_frames_do_not_depend_on_random_reads(name, cuts):
    body = BODIES[name]
    assert frames_of(pieces(body, cuts)) == frames_of(body, learning=False)


@pytest.mark.parametrize("name", sorted(BODIES))
def test_a_body_cut_anywhere_is_lawful(name):
    body = BODIES[name]
    for stop in range(0, len(body), max(1, len(body) // 200)):
        check_frames(frames_of(body[:stop]))


ODD = st.sampled_from(
    [
        *('"', "\\", "\n", "\t", "\x00", "\x7f", "/", "%b", "\ud83d", "\ude00", "\U0001f600"),
        *("\u2028", "", " ", "a", "I say", ":\n\n"),
    ]
)
TEXT = st.lists(ODD | st.text(max_size=3), max_size=4).map("".join)
NONE_OR_TEXT = st.none() | TEXT
FRAGMENT = st.fixed_dictionaries(
    {},
    optional={
        "index": st.sampled_from([0, 0, 1, 2, 128, 129, None, -1, "0"]),
        "id": st.sampled_from(["a", "b", "", None]),
        "function": st.fixed_dictionaries(
            {},
            optional={
                "name": st.sampled_from(["x", "fs__y", "", None]),
                "id": st.sampled_from(["c", ""]),
                "arguments": st.sampled_from(["{", "}", '"p":', "1", "{}", "", None])
                | st.dictionaries(TEXT, st.floats() | TEXT, max_size=2)
                | TEXT,
            },
        ),
    },
)
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant"),
        "content": NONE_OR_TEXT,
        "reasoning_content": NONE_OR_TEXT,
        "reasoning": NONE_OR_TEXT,
        "tool_calls": st.none() | st.lists(FRAGMENT, max_size=2),
    },
)
CHOICE = st.fixed_dictionaries(
    {"index": st.sampled_from([0, 0, 0, None, 1]), "delta": DELTA},
    optional={
        "finish_reason": st.sampled_from([None, None, None, "stop", "length", "tool_calls"]),
        "message": DELTA,
    },
)
COUNT = st.integers(-1, 9) | st.none() | st.floats()
CHUNK = st.fixed_dictionaries(
    {"choices": st.lists(CHOICE, max_size=2)},
    optional={
        "model": st.sampled_from(["m", ""]),
        "created": st.integers(1, 2),
        "usage": st.dictionaries(
            st.sampled_from(["prompt_tokens", "completion_tokens", "total_tokens"]), COUNT
        ),
        "timings": st.integers(),
        "error": st.sampled_from([None, None, None, {"message": "e", "code": 500}]),
    },
)
PLAIN = st.tuples(st.sampled_from(["content", "reasoning_content"]), TEXT, st.integers(1, 2)).map(
    lambda of: {"choices": [{"index": 0, "delta": {of[0]: of[1]}}], "created": of[2]}
)
ARGUMENT = TEXT.map(
    lambda value: {
        "choices": [
            {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": value}}]}}
        ]
    }
)


def written(value, compact, ascii_only):
    separators = (",", ":") if compact else None
    body = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
    return b"data: " + body.encode("utf-8", "surrogatepass") + b"\n\n"


EVENT = st.builds(written, CHUNK | PLAIN | PLAIN | ARGUMENT, st.booleans(), st.booleans())
RAW = st.sampled_from(
    [
        *(b":\n\n", DONE, b"error: x\n\n", b"stray\n\n", b"data: {\n\n", b"data: \xff\n\n"),
        *(b"\r\n\r\n", b"data: [[\n\n"),
        b'data: {"choices":[{"index":0,"delta":{"content":"a\xff"}}]}\n\n',
    ]
)
STREAM = st.lists(EVENT | EVENT | EVENT | RAW, max_size=25)


@given(
    STREAM,
    st.lists(st.integers(0, 4000), max_size=6),
    st.sampled_from([{}, {}, {"fat": True}, {"prefill": "I say:\n\n"}]),
    st.sampled_from([None, ProviderError("transient", "cut")]),
)
def test_any_stream_is_lawful_and_depends_on_nothing_else(events, cuts, options, error):
    body = b"".join(events)
    outcome = Outcome(error=error)
    frames = frames_of(body, outcome, learning=False, **options)
    check_frames(frames)
    assert frames_of(events, outcome, **options) == frames
    assert frames_of(pieces(body, cuts), outcome, **options) == frames


# The short way is taken


def slow(monkeypatch):
    """How many chunks are read as JSON from now on."""
    counted = []

    def read(payload):
        counted.append(payload)
        return original(payload)

    original = module.read
    monkeypatch.setattr(module, "read", read)
    return counted


@pytest.mark.parametrize("make", [text, thought, lambda value: call(index=0, arguments=value)])
@pytest.mark.parametrize("together", [True, False])
def test_deltas_are_not_read_as_json(make, together, monkeypatch):
    counted = slow(monkeypatch)
    events = [call(index=0, id="a", name="x", arguments="")] + [
        make(value) for value in ("a", "b", "caf\u00e9", 'q"', "\\", "\n", "%", "z")
    ]
    frames = frames_of([b"".join(events)] if together else events)
    assert len(counted) == 2
    assert sum(b"_delta" in frame for frame in frames) == 8


def test_what_is_not_plain_is_read_as_json(monkeypatch):
    counted = slow(monkeypatch)
    raw = text("a").replace(b'"a"', b'"%b"')
    odd = [b"\\u0041", b"\\/", b"", b"\xff", b"\\ud83d"]
    frames_of([text("a"), *(raw % each for each in odd), text("b"), text("c")])
    assert len(counted) == 7  # the one behind a half surrogate too


def test_percent_signs_around_a_text_stand_for_themselves(monkeypatch):
    choices = [[{"index": 0, "delta": {"content": value}}] for value in ("a", "b", "%c")]
    events = [event({"model": "50% %b", "choices": each, "id": "100%"}) for each in choices]
    expected = frames_of(events, learning=False)
    counted = slow(monkeypatch)
    assert frames_of(events) == frames_of(b"".join(events)) == expected
    assert len(counted) == 2
    assert [json.loads(frame)["delta"] for frame in expected[2:5]] == ["a", "b", "%c"]


def test_a_new_second_is_learned_anew(monkeypatch):
    counted = slow(monkeypatch)
    events = [chunk({"content": "a"}, created=1000 + number // 50) for number in range(500)]
    assert len(frames_of(events)) == 500 + 4
    assert len(counted) == 10


def test_where_every_chunk_differs_learning_does_not_cost(monkeypatch):
    tries = []
    learn = module.learn
    monkeypatch.setattr(module, "learn", lambda *given: tries.append(1) or learn(*given))
    events = [chunk({"content": "a"}, timings={"n": number}) for number in range(3000)]
    frames_of([call(index=0, id="c", name="x", arguments="{"), *events])
    assert len(tries) < 60
    # Chunks that are alike are found again all the same.
    counted = slow(monkeypatch)
    frames_of([*events, *(text("b") for _ in range(1000))])
    assert len(counted) <= 3000 + module._MAX_WAIT + 2


def test_several_lines_of_data_are_not_learned(monkeypatch):
    counted = slow(monkeypatch)
    event = b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"a"}}]}\n\n'
    assert terminal([event] * 5 + [finish()])["content"] == [{"type": "text", "text": "aaaaa"}]
    assert len(counted) == 6


def test_an_ignored_call_is_not_mistaken_for_the_open_one():
    many = b"".join(call(index=0, id=f"c{n}", name="x", arguments="{}") for n in range(129))
    piece = call(index=0, arguments="9")
    body = many + piece * 3 + call(index=0, id="over", name="x") + piece * 3
    frames = frames_of(body)
    check_frames(frames)
    assert sum(b'"delta":"9"' in frame for frame in frames) == 3


# Bodies that are no streams


WHOLE = {
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "reasoning_content": "t",
                "content": "a",
                "tool_calls": [
                    {"id": "", "function": {"name": "x", "arguments": '{"p":1}'}},
                    {"id": "", "function": {"name": "x", "arguments": '{"p":2}'}},
                ],
            },
        }
    ],
    "usage": {"prompt_tokens": 3},
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("framed", [True, False])
def test_an_answer_in_one_piece(indent, framed):
    body = json.dumps(WHOLE, indent=indent).encode()
    if framed:
        body = b"".join(b"data: " + line + b"\n" for line in body.split(b"\n")) + b"\n"
    message = terminal(body)
    assert [block["type"] for block in message["content"]] == ["thinking", "text"] + [
        "function_call"
    ] * 2
    assert [block["arguments"] for block in message["content"][2:]] == [{"p": 1}, {"p": 2}]
    assert message["usage"] == {"input": 3}
    assert message["stop_reason"] == "function_call"


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b'{"error":{"message":"no","type":"authentication_error"}}', "auth_expired", "no"),
        (b'{"error":"the prompt is too long"}', "context_overflow", "too long"),
        (b'error: {"code":400,"message":"x","type":"invalid_request_error"}\n\n', "permanent", "x"),
        (b"error: banana\n\n" + DONE, "transient", "banana"),
        (b"proxy error: Failed to read connection", "transient", "proxy error: Failed"),
        (b"<html>login</html>", "permanent", "api_url"),
        (b'{"status":"ok"}', "transient", "without words"),
        (b'{"choices":[]}', "transient", "without words"),
        (b'{"choices":[{"message":{"content":"a"}}]}', "transient", "no finish reason"),
        (b"[" * 5000, "transient", "[[["),
        (b"x", "transient", "x"),
        (b"data: oops\n\n", "transient", "cannot be read: oops"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "transient", "cannot be read: [[["),
        (event({"error": "x", "choices": []}), "transient", "x"),
        (event({"object": "error", "message": "m", "code": 400}), "permanent", "m"),
    ],
)
def test_failures_at_status_200(body, kind, words):
    message = terminal(body)
    assert message["error_kind"] == kind
    assert words in message["error_message"]


def test_a_stray_line_does_not_spoil_a_complete_answer():
    message = terminal(b"hello\n\n" + text("a") + finish())
    assert message["content"] == [{"type": "text", "text": "a"}]


def test_a_whole_answer_behind_a_stream_is_no_answer():
    message = terminal(text("a") + json.dumps(WHOLE).encode())
    assert message["error_kind"] == "transient"
    assert message["content"] == [{"type": "text", "text": "a"}]


def test_the_words_of_a_stray_line_are_better_than_those_of_a_cut():
    outcome = Outcome(error=ProviderError("transient", "the connection broke"))
    assert "proxy" in terminal(text("a") + b"proxy error: x", outcome=outcome)["error_message"]


@pytest.mark.parametrize("rest", [b'data: {"choices":[{"ind', b"data: [DO", b"data", b"data: \xe2"])
def test_a_truncated_event_is_no_event(rest):
    message = terminal(text("a") + rest)
    assert "no finish reason" in message["error_message"]
    assert message["content"] == [{"type": "text", "text": "a"}]


def test_the_last_event_may_lack_its_blank_line():
    whole = text("a") + finish()
    assert frames_of(whole[:-2]) == frames_of(whole)
    assert frames_of(text("a") + chunk({}, "stop")[:-2]) == frames_of(text("a") + finish())


def test_cr_lf_and_a_byte_order_mark():
    body = text("a") + text("b") + text("c") + usage(prompt_tokens=1) + finish()
    assert frames_of(b"\xef\xbb\xbf" + body.replace(b"\n", b"\r\n")) == frames_of(body)


def test_nothing_is_fed_after_the_end():
    machine = assembler()
    frames = machine.feed(text("a") + finish())
    assert machine.ended
    assert kinds(map(json.loads, frames)) == ["start", "text_start", "text_delta", "text_end"]
    assert machine.feed(text("late")) == []
    assert len(machine.finish(Outcome())) == 2
    assert machine.finish(Outcome()) == []


def test_a_warning_in_the_middle_is_in_what_follows():
    given = ["careful"]
    machine = assembler(warnings=given, fat=True)
    before = machine.feed(text("a"))
    machine.warn("slow")
    after = machine.feed(text("b"))
    machine.feed(finish())
    last = json.loads(machine.finish(Outcome())[-1])["message"]
    assert [json.loads(frame)["partial"]["warnings"] for frame in before] == [given] * 3
    assert [json.loads(frame)["partial"]["warnings"] for frame in after] == [["careful", "slow"]]
    assert last["warnings"] == ["careful", "slow"]
    assert given == ["careful"]


# Limits


@pytest.mark.parametrize("size", [1000, 65536, 3 << 20])
@pytest.mark.parametrize("start", [b"data: ", b"", b"data: \n"])
def test_an_oversized_line_fails_and_keeps_what_there_is(start, size):
    body = text("a") + text("b") + start + b"x" * (3 << 20) + b"\n\n" + text("late") + finish()
    reads = [body[i : i + size] for i in range(0, len(body), size)]
    frames = frames_of(reads)
    check_frames(frames)
    message = json.loads(frames[-1])["error"]
    assert message["error_kind"] == "transient"
    assert "1 MiB" in message["error_message"]
    assert message["content"] == [{"type": "text", "text": "ab"}]


def test_a_gigabyte_without_a_line_end():
    machine = assembler()
    machine.feed(text("a"))
    block = b"x" * 65536
    tracemalloc.start()
    try:
        for _ in range(16_384):
            machine.feed(block)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert machine.ended
    assert peak < 8 << 20
    assert "1 MiB" in json.loads(machine.finish(Outcome())[-1])["error"]["error_message"]


def test_endless_short_lines_that_are_no_events():
    machine = assembler()
    block = (b"x" * 60 + b"\n\n") * 1000
    for _ in range(20):
        machine.feed(block)
    assert machine.ended
    assert machine.error is not None
    assert "1 MiB" in machine.error.message


def test_a_delta_of_a_megabyte_takes_either_way():
    events = [text("a"), text("b"), text("c" * 1_000_000), text("d"), finish()]
    expected = frames_of(events, learning=False)
    assert frames_of(events) == expected
    assert frames_of([b"".join(events)]) == expected


@pytest.mark.parametrize("together", [True, False])
def test_the_limit_of_an_answer_falls_on_the_same_frame(together):
    events = [text("x" * 50_000) for _ in range(200)]
    reads = [b"".join(events)] if together else events
    frames = frames_of(reads)
    assert frames == frames_of(events, learning=False)
    assert sum(b'"text_delta"' in frame for frame in frames) == MAX_CONTENT // 50_000 + 1


def test_a_long_answer_takes_memory_for_its_text_alone():
    machine = assembler()
    event = text(" token")
    tracemalloc.start()
    try:
        for _ in range(100_000):
            machine.feed(event)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert machine.tokens == 100_000
    assert held < 2 << 20
    assert len(run([event, finish()])) > 0


def test_knows_the_servers_id_and_when_the_thought_is_over():
    seen = assembler()
    facts = [(seen.server_id, seen.past_thinking)]
    for delta in ({"reasoning_content": "a"}, {"reasoning_content": "b"}, {"content": "c"}):
        seen.feed(chunk(delta, id="chatcmpl-1"))
        facts.append((seen.server_id, seen.past_thinking))
    seen.feed(finish())
    facts.append((seen.server_id, seen.past_thinking))
    name = "chatcmpl-1"
    assert facts == [(None, False), (name, False), (name, False), (name, True), (name, True)]
