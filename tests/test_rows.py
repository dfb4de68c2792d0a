"""A transcript becomes rows that llama-server takes (provider protocol 8.1)."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from transcripts import RELAXED
from transcripts import messages as transcripts

from provider_llamacpp import jsontext
from provider_llamacpp.errors import InvalidRequest, ProviderError
from provider_llamacpp.payloads import decode_count
from provider_llamacpp.transcript.names import NameTable
from provider_llamacpp.transcript.rows import RowRules, transcript_rows


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(data: str = "iVBO", mime: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "mime": mime, "data": data}


def call(id: str, function_id: str = "fs::read", arguments: object = None) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": id,
        "function_id": function_id,
        "arguments": {} if arguments is None else arguments,
    }


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [text(c) if isinstance(c, str) else c for c in content]}


def assistant(*content: Any, **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": [text(c) if isinstance(c, str) else c for c in content],
        **more,
    }


def result(id: str, *content: Any, **more: Any) -> dict[str, Any]:
    return {
        "role": "function_result",
        "function_call_id": id,
        "content": [text(c) if isinstance(c, str) else c for c in content],
        **more,
    }


def result_block(id: str, *content: Any) -> dict[str, Any]:
    return {**result(id, *content), "type": "function_result"}


def convert(
    *messages: dict[str, Any], system_prompt: str | None = None, **rules: Any
) -> tuple[list[dict[str, Any]], str]:
    return transcript_rows(
        messages,
        system_prompt=system_prompt,
        names=NameTable(),
        rules=RowRules("m", **rules),
    )


def rows(*messages: dict[str, Any], **rules: Any) -> list[dict[str, Any]]:
    return convert(*messages, **rules)[0]


def brief(*messages: dict[str, Any], **rules: Any) -> list[str]:
    """Rows as ``role:content``, calls as ``+id``."""
    shown = []
    for row in rows(*messages, **rules):
        calls = "".join("+" + one["id"] for one in row.get("tool_calls", []))
        of = row.get("tool_call_id", "")
        shown.append(f"{row['role']}{of and '(' + of + ')'}:{row['content']}{calls}")
    return shown


INTERRUPTED = "The call of fs__read was interrupted: no output of it exists."
PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}


# -- user and system rows ---------------------------------------------------------------------


def test_system_and_user_rows() -> None:
    assert rows(user("a", "b"), system_prompt="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
    ]
    assert brief(user("hi"), system_prompt="") == ["user:hi"]
    assert convert() == ([], "")


def test_images_follow_one_text_part() -> None:
    assert rows(user("see", image(), "this", image("AAAA", "image/jpeg"))) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see\nthis"},
                PNG,
                {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}},
            ],
        }
    ]
    assert rows(user(image())) == [{"role": "user", "content": [PNG]}]


def test_a_user_row_is_kept_even_if_nothing_in_it_is_for_the_model() -> None:
    assert rows(user({"type": "file"}, {"type": "thinking", "text": "x"})) == [
        {"role": "user", "content": ""}
    ]


def test_custom_messages_are_skipped() -> None:
    custom = {"role": "custom", "content": "not even looked at"}
    assert brief(user("a"), custom, user("b")) == ["user:a", "user:b"]


# -- assistant rows ---------------------------------------------------------------------------


def test_an_assistant_row() -> None:
    message = assistant(
        {"type": "thinking", "text": "hm"},
        "a",
        {"type": "redacted_thinking", "data": "x"},
        "b",
        call("c1", "fs::read", {"path": "x"}),
        image(),
    )
    assert rows(message, result("c1", "no"))[0] == {
        "role": "assistant",
        "content": "a\nb",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "fs__read", "arguments": '{"path":"x"}'},
            }
        ],
    }


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ({"_raw": '{"pa'}, '{"_raw":"{\\"pa"}'),
        ({"path": "r", "_partial": True}, '{"path":"r","_partial":true}'),
        ('{"path": "x"}', '{"path":"x"}'),
        ('{"pa', '{"_raw":"{\\"pa"}'),
        ([1], '{"_raw":"[1]"}'),
    ],
)
def test_arguments_of_the_history_go_out_as_text_of_an_object(arguments: Any, sent: str) -> None:
    row = rows(assistant(call("c1", arguments=arguments)))[0]
    assert row["tool_calls"][0]["function"]["arguments"] == sent


def test_a_call_without_arguments() -> None:
    block = {"type": "function_call", "id": "c1", "function_id": "f"}
    assert rows(assistant(block))[0]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_row_with_neither_text_nor_calls_is_never_sent() -> None:
    thought = {"type": "thinking", "text": "hm"}
    for empty in (assistant(), assistant(""), assistant(thought)):
        assert brief(user("a"), empty, user("b")) == ["user:a", "user:b"]
        assert brief(user("a"), empty, replay_thinking=True) == ["user:a"]
        assert convert(empty) == ([], "")


def test_thoughts_go_along_only_where_asked_for() -> None:
    first, second = ({"type": "thinking", "text": value} for value in ("hm", "so"))
    message = assistant(first, {"type": "thinking", "text": ""}, second, "a")
    assert "reasoning_content" not in rows(message, user("b"))[0]
    replayed = rows(message, user("b"), replay_thinking=True)
    assert replayed[0] == {"role": "assistant", "content": "a", "reasoning_content": "hm\nso"}
    plain = rows(assistant("a"), user("b"), replay_thinking=True)
    assert "reasoning_content" not in plain[0]


def test_the_words_of_a_failed_attempt_are_not_the_models() -> None:
    failed = assistant("down", stop_reason="error", error_message="down")
    assert brief(user("a"), failed, user("b")) == ["user:a", "user:b"]
    assert convert(user("a"), failed)[1] == ""
    partial = assistant("half", stop_reason="error", error_message="cut off")
    assert brief(user("a"), partial, user("b"))[1] == "assistant:half"
    called = assistant("down", call("c1"), stop_reason="error", error_message="down")
    assert brief(user("a"), called)[1] == "assistant:down+c1"


# -- the end of the transcript ----------------------------------------------------------------


def test_a_last_assistant_row_is_continued() -> None:
    assert convert(user("a"), assistant("I say:\n\n")) == (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I say:\n\n"}],
        "I say:\n\n",
    )


def test_assistant_rows_at_the_end_become_one() -> None:
    custom = {"role": "custom", "content": []}
    ending = (assistant("br"), assistant(), custom, assistant("ow"), assistant("n"))
    assert convert(user("a"), *ending) == (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "brown"}],
        "brown",
    )
    assert convert(user("a"), *ending, user("b"))[1] == ""


def test_thoughts_of_a_continued_row_stay_out() -> None:
    message = assistant({"type": "thinking", "text": "hm"}, "a")
    found, prefill = convert(user("q"), message, replay_thinking=True)
    assert (found[-1], prefill) == ({"role": "assistant", "content": "a"}, "a")


def test_a_call_without_result_at_the_end_is_not_continued() -> None:
    assert convert(user("a"), assistant("b", call("c1")))[1] == ""
    assert brief(user("a"), assistant("b", call("c1"))) == [
        "user:a",
        "assistant:b+c1",
        f"tool(c1):{INTERRUPTED}",
    ]
    assert convert(user("a"), assistant(call("c1")), assistant("so"))[1] == "so"


def test_a_half_surrogate_in_the_prefill_reads_as_the_server_repeats_it() -> None:
    assert convert(assistant("a\ud83d"))[1] == "a�"
    assert convert(assistant("a\ud83d"), assistant("\ude00"))[1] == "a😀"


# -- results ----------------------------------------------------------------------------------


def test_results_stand_behind_their_calls() -> None:
    assert rows(assistant(call("c1")), result("c1", "a", "b"))[1] == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": "a\nb",
    }


def test_displaced_results_move_behind_their_calls_in_their_order() -> None:
    assert brief(
        user("q"),
        assistant("x", call("c1"), call("c2")),
        user("wait"),
        result("c2", "two"),
        assistant("hm"),
        result("c1", "one"),
        user("go"),
    ) == [
        "user:q",
        "assistant:x+c1+c2",
        "tool(c2):two",
        "tool(c1):one",
        "user:wait",
        "assistant:hm",
        "user:go",
    ]


def test_a_result_that_came_before_its_call_moves_too() -> None:
    assert brief(user("q"), result("c1", "early"), assistant(call("c1")), user("go")) == [
        "user:q",
        "assistant:+c1",
        "tool(c1):early",
        "user:go",
    ]
    later = (result("c1", "early"), assistant(call("c1")), result("c1", "late"))
    assert brief(*later) == ["assistant:+c1", "tool(c1):late"]


def test_results_without_a_call_stay_in_place() -> None:
    assert brief(user("a"), result("c9", "lost"), user("b")) == [
        "user:a",
        "tool(c9):lost",
        "user:b",
    ]
    twice = (result("c9", "old"), user("a"), result("c9", "new"))
    assert brief(*twice) == ["tool(c9):new", "user:a"]


def test_orphan_calls_are_answered_for() -> None:
    found = brief(assistant(call("c1"), call("c2"), call("c3")), result("c2", "two"), user("a"))
    assert found == [
        "assistant:+c1+c2+c3",
        f"tool(c1):{INTERRUPTED}",
        f"tool(c3):{INTERRUPTED}",
        "tool(c2):two",
        "user:a",
    ]


def test_of_several_results_the_latest_wins_at_the_place_of_the_first() -> None:
    found = brief(
        assistant(call("c1"), call("c2")),
        result("c1", "old"),
        result("c2", "two"),
        user("a"),
        result("c1", "new"),
    )
    assert found == ["assistant:+c1+c2", "tool(c1):new", "tool(c2):two", "user:a"]


def test_an_id_used_again_means_the_newest_call() -> None:
    found = brief(
        assistant(call("c1")), result("c1", "a"), assistant(call("c1")), result("c1", "b")
    )
    assert found == ["assistant:+c1", "tool(c1):a", "assistant:+c1", "tool(c1):b"]
    unanswered = brief(assistant(call("c1")), assistant(call("c1")), result("c1", "b"))
    assert unanswered == [
        "assistant:+c1",
        f"tool(c1):{INTERRUPTED}",
        "assistant:+c1",
        "tool(c1):b",
    ]


def test_two_calls_of_one_turn_under_one_id_get_a_result_each() -> None:
    message = assistant(call(""), call(""))
    assert brief(message, result("", "a"), result("", "b")) == [
        "assistant:++",
        "tool:a",
        "tool:b",
    ]
    three = brief(message, result("", "a"), result("", "b"), result("", "c"))
    assert three == ["assistant:++", "tool:a", "tool:c"]
    assert brief(message, result("", "a")) == ["assistant:++", f"tool:{INTERRUPTED}", "tool:a"]


def test_denied_results_say_so() -> None:
    details = {"status": "denied", "by": "the\nuser"}
    assert brief(assistant(call("c1")), result("c1", "sorry", details=details, is_error=True)) == [
        "assistant:+c1",
        'tool(c1):[PERMISSION_DENIED]\n{"status":"denied","by":"the\\nuser"}\n\nsorry',
    ]
    for other in (None, "denied", ["denied"], {"status": "ok"}, {"status": ["denied"]}):
        found = brief(assistant(call("c1")), result("c1", "sorry", details=other, is_error=True))
        assert found[1] == "tool(c1):sorry"
    unwritable = {"status": "denied", "cost": float("nan")}
    assert '{"status":"denied"}\n\n' in brief(result("c1", details=unwritable))[0]


def test_results_as_blocks_count_like_results() -> None:
    message = user(result_block("c1", "one"), "next", result_block("c2", "two"))
    assert brief(assistant(call("c1"), call("c2")), message) == [
        "assistant:+c1+c2",
        "tool(c1):one",
        "tool(c2):two",
        "user:next",
    ]
    alone = brief(assistant(call("c1")), user(result_block("c1", "one")))
    assert alone == ["assistant:+c1", "tool(c1):one"]
    inside = brief(assistant(call("c1"), result_block("c1", "one"), "so"))
    assert inside == ["assistant:so+c1", "tool(c1):one"]


def test_images_of_results_follow_the_run_of_tool_rows() -> None:
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    found = rows(
        assistant(call("c1"), call("c2"), call("c3")),
        result("c1", "one", image()),
        result("c2", "two"),
        result("c3", image("AAAA"), image()),
        result("c9", "stray", image()),
        user("go"),
    )
    assert [row["role"] for row in found] == ["assistant", *["tool"] * 4, "user", "user"]
    assert found[1]["content"] == "one"
    assert found[3]["content"] == ""
    assert found[5]["content"] == [
        {"type": "text", "text": "[image result of tool call c1]"},
        PNG,
        {"type": "text", "text": "[image result of tool call c3]"},
        other,
        PNG,
        {"type": "text", "text": "[image result of tool call c9]"},
        PNG,
    ]
    assert found[6] == {"role": "user", "content": "go"}


def test_images_of_the_latest_result_win() -> None:
    found = rows(assistant(call("c1")), result("c1", image("AAAA")), result("c1", "new", image()))
    assert [part["type"] for part in found[2]["content"]] == ["text", "image_url"]
    assert found[2]["content"][1] == PNG
    assert len(rows(assistant(call("c1")), result("c1", image()), result("c1", "new"))) == 2


def test_each_run_of_tool_rows_shows_its_own_images() -> None:
    found = rows(
        assistant(call("c1")), result("c1", image()), assistant(call("c2")), result("c2", image())
    )
    assert [row["role"] for row in found] == ["assistant", "tool", "user"] * 2


# -- media ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mime", "form"),
    [
        ("audio/wav", "wav"),
        ("audio/x-wav", "wav"),
        ("AUDIO/MPEG", "mp3"),
        ("audio/mp3;rate=8000", "mp3"),
        ("audio/flac", "flac"),
    ],
)
@pytest.mark.parametrize("kind", ["image", "audio"])
def test_audio_goes_out_as_input_audio(mime: str, form: str, kind: str) -> None:
    block = {"type": kind, "mime": mime, "data": "UklG"}
    part = {"type": "input_audio", "input_audio": {"data": "UklG", "format": form}}
    for audio in (True, None):
        assert rows(user(block), audio=audio, vision=False)[0]["content"] == [part]


def test_an_audio_block_without_a_type_is_taken_for_wav() -> None:
    block = {"type": "audio", "mime": "", "data": "UklG"}
    assert rows(user(block))[0]["content"][0]["input_audio"]["format"] == "wav"


def test_audio_of_results_is_announced_as_such() -> None:
    sound = {"type": "audio", "mime": "audio/wav", "data": "UklG"}
    found = rows(assistant(call("c1")), result("c1", sound))
    assert found[2]["content"][0]["text"] == "[audio result of tool call c1]"


@pytest.mark.parametrize(
    ("block", "rules", "word"),
    [
        (image(), {"vision": False, "audio": True}, "images"),
        (image(mime="audio/wav"), {"vision": True, "audio": False}, "audio"),
        ({"type": "audio", "mime": "x", "data": "UklG"}, {"audio": False}, "audio"),
    ],
)
def test_what_the_model_cannot_read_is_named(block: Any, rules: Any, word: str) -> None:
    for messages in ([user(block)], [assistant(call("c1")), result("c1", block)]):
        with pytest.raises(ProviderError) as caught:
            convert(*messages, **rules)
        assert caught.value.kind == "permanent"
        assert f"model m cannot read {word}" in caught.value.message
    # Where nothing would be uploaded, nothing is refused.
    assert convert(assistant("a", block), {"role": "custom", "content": [block]}, **rules)


@pytest.mark.parametrize("mime", ["", "png", "image/png,x", "text/html\nX: y", "image/ü", "a/b/c"])
def test_a_type_that_would_break_the_url_is_replaced(mime: str) -> None:
    assert rows(user(image(mime=mime)))[0]["content"] == [PNG]


def test_base64_in_lines_is_joined() -> None:
    assert rows(user(image("iV\r\nBO\n")))[0]["content"] == [PNG]


@pytest.mark.parametrize(
    "data",
    [
        *("", "=", "file:///etc/passwd", "http://10.0.0.1/x", "data:image/png;base64,iVBO"),
        *("iV-_", "é", "iV=BO", "iVBO,http"),
    ],
)
@pytest.mark.parametrize("mime", ["image/png", "audio/wav"])
def test_what_is_not_base64_is_refused(data: str, mime: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert(user("a"), user("b", image(data, mime)))
    assert caught.value.message == "messages[1].content[1].data: must be base64"


def test_a_sound_cannot_be_an_address() -> None:
    with pytest.raises(InvalidRequest):
        convert(user(image("httpAAAA", "audio/wav")))


def test_bad_data_in_a_result_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert(user(result_block("c1", "a", image("!"))))
    assert caught.value.message == "messages[0].content[0].content[1].data: must be base64"


# -- laws -------------------------------------------------------------------------------------


@RELAXED
@given(transcripts())
def test_laws(messages: list[dict[str, Any]]) -> None:
    decode_count({"model": "m", "messages": messages or [user("a")]})
    before = copy.deepcopy(messages)
    names = NameTable()
    found, prefill = transcript_rows(
        messages, system_prompt="s", names=names, rules=RowRules("m", replay_thinking=True)
    )
    assert messages == before
    jsontext.dumpb(found)

    open_calls: list[str] = []
    for row in found:
        if row["role"] != "tool":
            assert not open_calls, "every call is answered right behind its row"
        elif row["tool_call_id"] in open_calls:
            open_calls.remove(row["tool_call_id"])
        if row["role"] == "assistant":
            assert row["content"] or row.get("tool_calls")
            for one in row.get("tool_calls", []):
                open_calls.append(one["id"])
                assert isinstance(json.loads(one["function"]["arguments"]), dict)
                assert (
                    names.encode(names.decode(one["function"]["name"])) == (one["function"]["name"])
                )
    assert not open_calls

    ending = [row["role"] for row in found[-2:]]
    assert ending != ["assistant", "assistant"]
    assert prefill == (found[-1]["content"] if ending[-1] == "assistant" else "")

    calls = sum(len(row.get("tool_calls", [])) for row in found)
    written = [
        block
        for message in messages
        if message["role"] == "assistant"
        for block in message["content"]
        if block["type"] == "function_call"
    ]
    assert calls == len(written)
    said = [
        "\n".join(block["text"] for block in message["content"] if block["type"] == "text")
        for message in messages
        if message["role"] == "user"
    ]
    heard = [
        row["content"]
        if isinstance(row["content"], str)
        else "\n".join(part["text"] for part in row["content"][:1] if part["type"] == "text")
        for row in found
        if row["role"] == "user"
    ]
    waiting = iter(heard)
    assert all(one in waiting for one in said if one), "what the user said, in that order"


def test_long_transcripts_take_linear_time() -> None:
    messages: list[dict[str, Any]] = []
    for number in range(10_000):
        messages += [assistant("x", call(f"c{number}")), user("y")]
    messages += [result(f"c{number}", "late") for number in range(10_000)]
    assert len(rows(*messages)) == 30_000
    same = [assistant(*[call("c")] * 10_000), *[result("c", "r")] * 20_000]
    assert len(rows(*same)) == 10_001
