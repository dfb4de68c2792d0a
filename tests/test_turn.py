"""The rules of provider protocol 6, one by one, through the bytes of a stream."""

import json

import pytest
from chunks import (
    DONE,
    assembler,
    call,
    chunk,
    event,
    finish,
    frames_of,
    kinds,
    run,
    terminal,
    text,
    thought,
    usage,
)
from laws import check_frames

from provider_llamacpp.errors import ProviderError
from provider_llamacpp.events.assembler import Outcome
from provider_llamacpp.events.turn import MAX_CONTENT


def content(*blocks, **options):
    return terminal(b"".join(blocks), **options)["content"]


def test_the_example_of_the_protocol():
    body = b"".join(
        [
            chunk({"role": "assistant", "content": None}),
            thought("Need both "),
            thought("files."),
            text("Reading them."),
            call(index=0, id="c1", type="function", name="fs__read", arguments=""),
            call(index=0, arguments='{"path":'),
            call(index=0, arguments='"a.txt"}'),
            call(index=1, id="c2", type="function", name="fs__read", arguments='{"path":"b.txt"}'),
            chunk({}, "tool_calls"),
            usage(
                prompt_tokens=812,
                completion_tokens=41,
                total_tokens=853,
                prompt_tokens_details={"cached_tokens": 640},
            ),
            DONE,
        ]
    )
    origin = '"model":"m","provider":"llamacpp","timestamp":'
    think = '{"type":"thinking","text":"Need both files."}'
    words = '{"type":"text","text":"Reading them."}'
    one = '{"type":"function_call","id":"c1","function_id":"fs::read","arguments":{"path":"a.txt"}}'
    two = '{"type":"function_call","id":"c2","function_id":"fs::read","arguments":{"path":"b.txt"}}'

    def snap(time, *blocks, stop='"end"', more=""):
        shown = f'[{",".join(blocks)}],"stop_reason":{stop}{more},{origin}{time}'
        return f'{{"role":"assistant","content":{shown}}}'

    called = {"stop": '"function_call"', "more": ',"native_stop_reason":"tool_calls"'}
    counted = '{"input":812,"output":41,"cache_read":640}'
    final = {**called, "more": called["more"] + f',"usage":{counted}'}
    assert [frame.decode() for frame in frames_of(body)] == [
        f'{{"type":"start","partial":{snap(1000)}}}',
        f'{{"type":"thinking_start","partial":{snap(1001)}}}',
        '{"type":"thinking_delta","delta":"Need both "}',
        '{"type":"thinking_delta","delta":"files."}',
        f'{{"type":"thinking_end","partial":{snap(1002, think)}}}',
        f'{{"type":"text_start","partial":{snap(1003, think)}}}',
        '{"type":"text_delta","delta":"Reading them."}',
        f'{{"type":"text_end","partial":{snap(1004, think, words)}}}',
        f'{{"type":"functioncall_start","partial":{snap(1005, think, words)}}}',
        '{"type":"functioncall_delta","delta":"{\\"path\\":","id":"c1"}',
        '{"type":"functioncall_delta","delta":"\\"a.txt\\"}","id":"c1"}',
        f'{{"type":"functioncall_end","partial":{snap(1006, think, words, one)}}}',
        f'{{"type":"functioncall_start","partial":{snap(1007, think, words, one)}}}',
        '{"type":"functioncall_delta","delta":"{\\"path\\":\\"b.txt\\"}","id":"c2"}',
        f'{{"type":"functioncall_end","partial":{snap(1008, think, words, one, two, **called)}}}',
        f'{{"type":"usage","usage":{counted}}}',
        '{"type":"stop","stop_reason":"function_call"}',
        f'{{"type":"done","message":{snap(1009, think, words, one, two, **final)}}}',
    ]


# start, blocks, order


def test_start_waits_for_something_to_carry():
    progress = event({"choices": [], "prompt_progress": {"total": 9, "processed": 3}})
    role = chunk({"role": "assistant", "content": None})
    quiet = b":\n\n" + progress + role + text("") + event({"choices": None})
    assert frames_of(quiet, Outcome(reason="abort")) == []
    assert kinds(run(quiet + finish())) == ["start", "stop", "done"]
    assert kinds(run(quiet + usage(prompt_tokens=3) + finish())) == [
        "start",
        "usage",
        "stop",
        "done",
    ]
    assert kinds(run(quiet + text("a") + finish()))[:2] == ["start", "text_start"]


def test_a_failure_before_anything_was_sent_is_an_error_alone():
    frames = run(event({"error": {"message": "no", "type": "server_error"}}))
    assert kinds(frames) == ["error"]
    assert frames[0]["error"]["content"] == [{"type": "text", "text": "no"}]
    assert frames[0]["error"]["error_message"] == "no"
    assert frames[0]["error"]["error_kind"] == "transient"


def test_an_answer_may_be_empty_if_it_is_finished():
    assert content(chunk({"role": "assistant", "content": ""}), finish()) == []


def test_content_is_ordered_whatever_came_first():
    found = content(
        call(index=1, id="b", name="x", arguments="{}"),
        text("1"),
        call(index=0, id="a", name="x", arguments="{}"),
        thought("2"),
        text("3"),
        thought("4"),
        finish("tool_calls"),
    )
    assert [block["type"] for block in found] == ["thinking", "text", *["function_call"] * 2]
    assert found[0]["text"] == "24"
    assert found[1]["text"] == "13"
    assert [block["id"] for block in found[2:]] == ["a", "b"]


def test_the_order_inside_one_chunk():
    body = event(
        {
            "choices": [
                {
                    "finish_reason": "tool_calls",
                    "index": 0,
                    "delta": {
                        "tool_calls": [
                            {"index": 0, "id": "c", "function": {"name": "x", "arguments": "{}"}}
                        ],
                        "content": "say",
                        "reasoning_content": "think",
                    },
                }
            ],
            "usage": {"prompt_tokens": 1},
        }
    )
    order = ["usage", "thinking_delta", "text_delta", "functioncall_delta", "functioncall_end"]
    assert [kind for kind in kinds(run(body + DONE)) if kind in order] == order


def test_text_that_comes_with_or_after_the_finish_reason():
    frames = run(text("a") + chunk({"content": "b"}, "length") + text("c") + DONE)
    assert frames[-1]["message"]["content"] == [{"type": "text", "text": "abc"}]
    assert frames[-1]["message"]["stop_reason"] == "length"
    assert kinds(frames).count("text_end") == 2


def test_nothing_counts_after_the_end_marker():
    late = text("late") + usage(prompt_tokens=9) + event({"error": {"message": "late"}}) + DONE
    message = terminal(text("a") + finish() + late)
    assert message["content"] == [{"type": "text", "text": "a"}]
    assert "usage" not in message


def test_the_first_finish_reason_counts():
    assert terminal(text("a") + chunk({}, "length") + finish("stop"))["stop_reason"] == "length"


@pytest.mark.parametrize(
    ("native", "reason"),
    [
        ("stop", "end"),
        ("length", "length"),
        ("tool_calls", "function_call"),
        ("function_call", "function_call"),
        ("content_filter", "end"),
        ('odd "one"', "end"),
    ],
)
def test_finish_reasons(native, reason):
    message = terminal(text("a") + finish(native))
    assert message["stop_reason"] == reason
    assert message["native_stop_reason"] == native


@pytest.mark.parametrize("value", [None, "", 5, ["stop"]])
def test_odd_finish_reasons_are_none(value):
    assert terminal(text("a") + finish(value))["error_kind"] == "transient"


def test_other_choices_are_ignored():
    both = event(
        {
            "choices": [
                {"index": 1, "delta": {"content": "x"}, "finish_reason": "length"},
                {"index": 0, "delta": {"content": "a"}, "finish_reason": None},
                "odd",
                {"delta": {"content": "b"}},
                {"index": None, "delta": {"content": "c"}},
            ]
        }
    )
    message = terminal(both + finish())
    assert message["content"] == [{"type": "text", "text": "abc"}]
    assert message["stop_reason"] == "end"


@pytest.mark.parametrize(
    "odd",
    [
        b"data: null\n\n",
        b"data: 5\n\n",
        b"data: []\n\n",
        b"data:  \n\n",
        event({}),
        event({"choices": 5}),
        event({"choices": [{"index": 0, "delta": "x", "message": 5}]}),
        event({"choices": [], "usage": None, "error": None, "model": 5, "prompt_progress": 5}),
        chunk({"content": 5, "reasoning_content": {}, "reasoning": True, "tool_calls": "x"}),
        chunk({"tool_calls": [5, None]}),
        chunk({"content": [{"type": "image"}, {"text": 5}, "x"]}),
    ],
)
def test_odd_chunks_change_nothing(odd):
    plain = text("a") + text("b") + finish()
    assert frames_of(text("a") + odd + text("b") + finish()) == frames_of(plain)


# Thinking and text


def test_thinking_under_either_name_counts_once():
    found = content(
        chunk({"reasoning": "a", "content": ""}),
        chunk({"reasoning": "b", "reasoning_content": "b"}),
        chunk({"reasoning": "c", "reasoning_content": ""}),
        text("42"),
        finish(),
    )
    assert found == [{"type": "thinking", "text": "abc"}, {"type": "text", "text": "42"}]


def test_text_as_a_list_of_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert content(chunk({"content": parts}), finish()) == [{"type": "text", "text": "ab"}]


def test_half_surrogates_are_joined_or_replaced():
    def raw(inner):
        return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % inner

    joined = raw(b"ok \\ud83d") + raw(b"\\ude00!")
    assert content(joined, finish()) == [{"type": "text", "text": "ok \U0001f600!"}]
    split = raw(b"\\ud83d") + raw(b"a") + raw(b"\\ude00") + raw(b"b\\ud83d\\ude00")
    assert content(split, finish()) == [{"type": "text", "text": "\ufffda\ufffdb\U0001f600"}]
    last = raw(b"a\\ud83d")
    assert content(last, finish()) == [{"type": "text", "text": "a\ufffd"}]
    moved = raw(b"a\\ud83d") + thought("t") + raw(b"\\ude00b")
    assert content(moved, finish())[1] == {"type": "text", "text": "a\ufffd\ufffdb"}


def test_bytes_that_are_no_utf8_become_replacement_characters():
    raw = b'data: {"choices":[{"index":0,"delta":{"content":"a\xffb\xe2\x82"}}]}\n\n'
    assert content(raw, raw, finish()) == [{"type": "text", "text": "a\ufffdb\ufffd" * 2}]


def test_what_is_no_json_elsewhere_reads_mildly():
    raw = b'data: {"choices":[{"index":0,"delta":{"content":"a\tb"},"logprobs":NaN}]}\n\n'
    assert content(raw, finish()) == [{"type": "text", "text": "a\tb"}]


# Tool calls


def calls(*fragments, reason="tool_calls", **options):
    found = content(*fragments, finish(reason), **options)
    return [(block["id"], block["function_id"], block["arguments"]) for block in found]


def test_fragments_interleave_by_index():
    assert calls(
        call(index=0, id="a", name="x", arguments='{"p"'),
        call(index=1, id="b", name="y", arguments='{"q"'),
        call(index=0, arguments=":1}"),
        call(index=1, arguments=":2}"),
    ) == [("a", "x", {"p": 1}), ("b", "y", {"q": 2})]


def test_one_index_for_every_call():
    assert calls(
        call(index=0, id="a", name="x", arguments='{"p":1}'),
        call(index=0, id="b", name="x", arguments='{"p"'),
        call(index=0, arguments=":2}"),
        call(index=0, id="b", arguments=""),
        call(index=1, id="c", name="x", arguments="{}"),
    ) == [("a", "x", {"p": 1}), ("b", "x", {"p": 2}), ("c", "x", {})]


def test_no_index_at_all():
    assert calls(
        call(id="a", name="x", arguments='{"p"'),
        call(arguments=":1}"),
        call(id="b", name="y", arguments='{"q"'),
        call(id="b", arguments=":2}"),
        call(index=True, id="c", name="z"),
    ) == [("a", "x", {"p": 1}), ("b", "y", {"q": 2}), ("c", "z", {})]


def test_calls_without_an_index_come_behind_those_before_them():
    assert [
        one for one, _, _ in calls(call(index=3, id="a", name="x"), call(id="b", name="x"))
    ] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("place", [{"index": 0}, {}])
def test_whole_calls_without_ids_are_told_apart_by_name(place):
    assert calls(
        call(**place, name="x", arguments='{"p":1}'),
        call(**place, name="y", arguments='{"p":2}'),
    ) == [("made-1", "x", {"p": 1}), ("made-2", "y", {"p": 2})]


def test_a_repeated_name_is_the_same_name():
    assert calls(
        call(index=0, id="a", name="fs__read", arguments='{"p"'),
        call(index=0, id="a", name="fs__read", arguments=":1}"),
    ) == [("a", "fs::read", {"p": 1})]


def test_an_id_inside_function():
    inside = {"index": 0, "function": {"id": "z", "name": "x", "arguments": "{}"}}
    assert calls(chunk({"tool_calls": [inside]})) == [("z", "x", {})]


def test_an_id_is_made_once_and_kept():
    frames = run(
        call(index=0, name="x", arguments="{")
        + text("between")
        + call(index=0, arguments="}")
        + call(index=0, id="late", arguments="")
        + finish("tool_calls")
    )
    ids = {
        block["id"]
        for frame in frames
        for block in frame.get("partial", frame.get("message", {})).get("content", [])
        if block["type"] == "function_call"
    }
    assert ids == {"made-1"}
    deltas = [frame for frame in frames if frame["type"] == "functioncall_delta"]
    assert deltas == [
        {"type": "functioncall_delta", "delta": "{"},
        {"type": "functioncall_delta", "delta": "}", "id": "made-1"},
    ]


def test_an_id_that_comes_late():
    frames = run(
        call(index=0, name="x", arguments="{")
        + call(index=0, id="c", arguments="}")
        + finish("tool_calls")
    )
    deltas = [frame.get("id") for frame in frames if frame["type"] == "functioncall_delta"]
    assert deltas == [None, "c"]
    assert frames[-1]["message"]["content"][0]["id"] == "c"


def test_the_start_of_a_call_does_not_show_it():
    frames = run(call(index=0, id="a", name="x", arguments="{}") + finish("tool_calls"))
    starts = [frame for frame in frames if frame["type"] == "functioncall_start"]
    assert starts[0]["partial"]["content"] == []


def test_calls_without_a_name_are_not_shown():
    assert calls(call(index=0, id="a", arguments="{}"), call(index=1, id="b", name="x")) == [
        ("b", "x", {})
    ]


@pytest.mark.parametrize("index", [129, 9_999_999, -1, 10**40])
def test_absurd_indexes_are_ignored(index):
    assert calls(
        call(index=index, id="z", name="x", arguments='{"z":1}'),
        call(index=1, id="a", name="x", arguments='{"p"'),
        call(index=index, arguments="zzz"),
        call(index=1, arguments=":1}"),
        call(index=index, id="z", name="x", arguments="{}"),
        call(arguments="goes on with an ignored one"),
    ) == [("a", "x", {"p": 1})]


def test_the_highest_index_is_read():
    assert calls(call(index=128, id="a", name="x")) == [("a", "x", {})]


@pytest.mark.parametrize("place", [{"index": 0}, {}])
def test_no_more_than_129_calls(place):
    many = b"".join(call(**place, id=f"c{n}", name="x", arguments="{}") for n in range(300))
    found = calls(many + call(**place, arguments="belongs to an ignored one"))
    assert [one for one, _, _ in found] == [f"c{n}" for n in range(129)]
    assert found[-1][2] == {}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (None, {}),
        ("", {}),
        ({"p": {"q": "\u00e9"}}, {"p": {"q": "\u00e9"}}),
        ({"p": 1e999}, {"_raw": '{"p":Infinity}'}),
        ([1], {"_raw": "[1]"}),
        (5, {"_raw": "5"}),
        ('{"a":1,"b":', {"a": 1, "_partial": True}),
        ("nonsense", {"_raw": "nonsense"}),
    ],
)
def test_arguments_are_always_an_object(arguments, shown):
    raw = json.dumps({"index": 0, "id": "a", "function": {"name": "x", "arguments": arguments}})
    body = (
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[%b]}}]}\n\n'
        % raw.replace("Infinity", "1e999").encode()
    )
    assert calls(body) == [("a", "x", shown)]


def test_the_older_form_of_one_call():
    assert calls(
        chunk({"function_call": {"name": "x", "arguments": '{"p"'}}),
        chunk({"function_call": {"arguments": ":1}"}}),
        reason="function_call",
    ) == [("made-1", "x", {"p": 1})]


@pytest.mark.parametrize("ending", [finish("length"), b""])
def test_a_half_call_never_looks_whole(ending):
    for arguments in (None, "", '{"p', '{"p":1,"q'):
        body = call(index=0, id="a", name="x", arguments=arguments) + ending
        shown = terminal(body)["content"][0]["arguments"]
        assert {"_partial", "_raw"} & shown.keys(), shown


# Usage


def test_usage_is_mapped_and_adds_up():
    frames = run(
        usage(prompt_tokens=5)
        + usage(prompt_tokens=5)
        + usage(
            prompt_tokens=5,
            completion_tokens=2,
            total_tokens=7,
            prompt_tokens_details={"cached_tokens": 4},
            completion_tokens_details={"reasoning_tokens": 1},
        )
        + usage(output_tokens=3)
        + finish()
    )
    counts = [frame["usage"] for frame in frames if frame["type"] == "usage"]
    last = {"input": 5, "output": 3, "cache_read": 4, "reasoning": 1}
    assert counts == [{"input": 5}, {**last, "output": 2}, last]
    assert frames[-1]["message"]["usage"] == last


def test_the_names_of_another_api():
    given = usage(input_tokens=5, output_tokens=2, input_tokens_details={"cached_tokens": 1})
    assert terminal(given + finish())["usage"] == {"input": 5, "output": 2, "cache_read": 1}


@pytest.mark.parametrize("odd", [None, "5", -1, True, [], {}, 1e999, 2**70])
def test_odd_counts_are_left_out(odd):
    body = json.dumps({"choices": [], "usage": {"prompt_tokens": odd, "completion_tokens": 2.0}})
    message = terminal(b"data: " + body.encode() + b"\n\n" + finish())
    assert message["usage"] == {"output": 2}


# Errors


def test_an_error_object_keeps_the_content_so_far():
    fault = event({"error": {"code": 500, "message": "expected peg-native format"}})
    frames = run(thought("t") + text("a") + fault + text("late") + finish())
    assert kinds(frames)[-2:] == ["text_end", "error"]
    message = frames[-1]["error"]
    assert message["content"] == [
        {"type": "thinking", "text": "t"},
        {"type": "text", "text": "a"},
    ]
    assert message["error_message"] == "expected peg-native format"
    assert message["error_kind"] == "transient"
    assert "native_stop_reason" not in message


def test_an_error_after_usage_alone_shows_its_words():
    message = terminal(usage(prompt_tokens=1) + event({"error": "x"}))
    assert message["content"] == [{"type": "text", "text": "x"}]
    assert message["usage"] == {"input": 1}


@pytest.mark.parametrize(("alone", "kind"), [(True, "context_overflow"), (False, "transient")])
def test_who_filled_the_pool(alone, kind):
    fault = event({"error": {"code": 500, "message": "Context size has been exceeded."}})
    assert terminal(text("a") + fault, alone=lambda: alone)["error_kind"] == kind


def test_no_finish_reason_is_a_failure():
    for body in (text("a"), text("a") + DONE, call(index=0, id="c", name="x", arguments="{")):
        message = terminal(body)
        assert message["error_kind"] == "transient"
        assert "no finish reason" in message["error_message"]
        assert message["content"][0]["type"] in ("text", "function_call")


@pytest.mark.parametrize("body", [b"", b":\n\n", DONE, b"\n\n"])
def test_an_empty_body_is_a_failure(body):
    message = terminal(body)
    assert message["error_kind"] == "transient"
    assert "without an answer" in message["error_message"]


def test_an_answer_over_the_limit_ends_with_what_there_is():
    piece = text("x" * 500_000)
    frames = frames_of([piece] * 20)
    check_frames(frames)
    message = json.loads(frames[-1])["error"]
    assert message["error_kind"] == "permanent"
    assert "8 MiB" in message["error_message"]
    assert MAX_CONTENT < len(message["content"][0]["text"]) <= MAX_CONTENT + 500_000


@pytest.mark.parametrize("field", ["id", "name", "arguments"])
def test_everything_of_a_call_counts_for_the_limit(field):
    def one(number):
        parts = {"id": f"c{number}", "name": "x", "arguments": "{}"}
        return call(index=number, **{**parts, field: str(number) + "y" * 900_000})

    frames = frames_of(one(number) for number in range(20))
    message = json.loads(frames[-1])["error"]
    assert "8 MiB" in message["error_message"]
    assert len(frames[-1]) < 2 * MAX_CONTENT


def test_nothing_of_a_chunk_counts_after_the_limit():
    fragments = [
        {"index": n, "id": f"c{n}", "function": {"name": "x", "arguments": "y" * 400_000}}
        for n in range(2)
    ]
    text_and_calls = chunk({"content": "x" * 200_000, "tool_calls": fragments}, "stop")
    frames = frames_of([text("x" * 800_000)] * 10 + [text_and_calls])
    check_frames(frames)
    message = json.loads(frames[-1])["error"]
    assert [block["type"] for block in message["content"]] == ["text", "function_call"]


# Outcomes


CUT = ProviderError("transient", "the connection broke")


@pytest.mark.parametrize("reason", ["abort", "consumer gone"])
@pytest.mark.parametrize("body", [b"", text("a"), text("a") + finish(), b"data: half", b"stray"])
def test_after_an_abort_no_frame_comes(body, reason):
    machine = assembler()
    machine.feed(body)
    assert machine.finish(Outcome(reason=reason, error=CUT)) == []
    assert machine.finish(Outcome()) == []
    assert machine.feed(text("late")) == []


def test_a_fault_outside_the_stream_is_reported():
    assert terminal(b"", outcome=Outcome(error=CUT))["error_message"] == "the connection broke"
    message = terminal(text("a"), outcome=Outcome(error=CUT))
    assert message["content"] == [{"type": "text", "text": "a"}]


def test_a_complete_answer_is_not_spoiled_by_what_comes_after():
    for outcome in (Outcome(error=CUT), Outcome(reason="stop")):
        assert terminal(text("a") + chunk({}, "stop"), outcome=outcome)["stop_reason"] == "end"


def test_the_server_s_own_error_comes_before_a_cut():
    fault = event({"error": {"message": "mine"}})
    assert terminal(fault, outcome=Outcome(error=CUT))["error_message"] == "mine"


def test_a_stop_cuts_with_a_transient_error():
    message = terminal(text("a"), outcome=Outcome(reason="stop"))
    assert message["error_kind"] == "transient"
    assert "stopped" in message["error_message"]


# Warnings


def warnings(body, **options):
    return terminal(body, **options).get("warnings", [])


def test_given_warnings_ride_in_every_snapshot():
    frames = run(text("a") + finish(), warnings=["careful"])
    shown = [frame.get("partial", frame.get("message")) for frame in frames]
    assert [each["warnings"] for each in shown if each] == [["careful"]] * 4
    failed = terminal(event({"error": "x"}), warnings=["careful"])
    assert failed["warnings"] == ["careful"]


def test_thinking_that_ate_the_budget():
    assert "thinking" in warnings(thought("t") + finish("length"))[0]
    assert warnings(thought("t") + finish("stop")) == []
    assert warnings(thought("t") + text("a") + finish("length")) == []
    assert warnings(text("a") + finish("length")) == []
    assert warnings(thought("t") + call(index=0, id="a", name="x") + finish("length")) == []


@pytest.mark.parametrize(
    ("counts", "window", "full"),
    [
        ({"total_tokens": 512}, 512, True),
        ({"total_tokens": 511}, 512, False),
        ({"prompt_tokens": 500, "completion_tokens": 12}, 512, True),
        ({"total_tokens": 512}, None, False),
        ({}, 512, False),
    ],
)
def test_a_full_context(counts, window, full):
    body = text("a") + chunk({}, "length") + usage(**counts) + DONE
    found = warnings(body, context_window=window)
    assert [("512" in each) for each in found] == [True] * full
    ended = text("a") + chunk({}, "stop") + usage(**counts) + DONE
    assert warnings(ended, context_window=window) == []


# Prefill


@pytest.mark.parametrize(
    ("deltas", "new"),
    [
        (["I say:\n\nHello"], "Hello"),
        (["I say:\n\n", "Hello"], "Hello"),
        (["I s", "ay:\n", "\nHe", "llo"], "Hello"),
        (["I say:\n\n"], ""),
        (["I say: something else"], " something else"),
        (["I say nothing"], "I say nothing"),
        (["I", " do"], "I do"),
        (["I s"], "I s"),
        (["Hello"], "Hello"),
        ([], ""),
    ],
)
def test_a_prefill_is_not_sent_again(deltas, new):
    found = content(*map(text, deltas), finish(), prefill="I say:\n\n")
    assert found == ([{"type": "text", "text": new}] if new else [])


def test_half_a_repeated_prefill_is_no_answer_when_the_stream_breaks():
    message = terminal(text("I s"), prefill="I say:\n\n")
    assert message["error_kind"] == "transient"
    assert message["content"] == [{"type": "text", "text": message["error_message"]}]


def test_thinking_is_no_repetition():
    found = content(thought("I say:"), text("I say:"), text("x"), finish(), prefill="I say:")
    assert found == [{"type": "thinking", "text": "I say:"}, {"type": "text", "text": "x"}]


# Fat deltas


def test_fat_deltas_carry_the_message():
    body = thought("t") + text("a") + call(index=0, id="c", name="x", arguments='{"p":1}')
    frames = run(body + text('"b%') + finish(), fat=True)
    deltas = {frame["delta"]: frame for frame in frames if frame["type"].endswith("_delta")}
    assert all("partial" in frame for frame in deltas.values())
    assert deltas["a"]["partial"]["content"][1] == {"type": "text", "text": "a"}
    assert deltas['{"p":1}']["id"] == "c"
    assert deltas['{"p":1}']["partial"]["content"][2]["arguments"] == {"p": 1}
    assert deltas['"b%']["partial"]["content"][1]["text"] == 'a"b%'
    slim = run(body + text('"b%') + finish())
    assert kinds(slim) == kinds(frames)
    assert slim[-1]["message"]["content"] == frames[-1]["message"]["content"]


def test_names_are_quoted_where_they_are_shown():
    odd = 'm"%s\\ \u00e9'
    message = terminal(text("a") + finish(), model=odd, provider="p%b")
    assert message["model"] == odd
    assert message["provider"] == "p%b"
    found = calls(
        call(index=0, id='i"%b', name="n", arguments="{").replace(b'"n"', b'"n\\ud800"'),
        call(index=0, arguments="}"),
        call(index=0, arguments=" "),
        decode_name=lambda name: f'{name}"%d',
    )
    assert found == [('i"%b', 'n\ufffd"%d', {})]


def test_a_key_that_an_event_quotes_is_taken_out_of_the_error():
    event_of = {"error": {"message": "bad key s3cret", "code": 500}}
    message = terminal(event(event_of), secret="s3cret")
    assert "bad key" in message["error_message"]
    assert "s3cret" not in json.dumps(message)
