import json

import pytest
from chunks import call, chunk, event, text, thought
from hypothesis import given, settings
from hypothesis import strategies as st

from provider_llamacpp.events import template
from provider_llamacpp.events.template import SPECIAL, is_utf8, leaf_of, learn, plain, read


def payload_of(raw):
    return raw.removeprefix(b"data: ").removesuffix(b"\n\n")


def learned(raw):
    payload = payload_of(raw)
    value = read(payload)
    leaf = leaf_of(value)
    return learn(payload, value, leaf) if leaf is not None else None


@pytest.mark.parametrize(
    "raw",
    [
        text("Hello"),
        thought("Hello"),
        chunk({"reasoning": "Hello"}),
        call(index=3, arguments="Hello"),
        chunk({"role": "assistant", "content": "Hello", "tool_calls": None, "reasoning": ""}),
        chunk({"content": "Hello"}, usage=None, error=None, logprobs={"content": "x"}),
        text("0").replace(b'"0"', b'"Hello"'),
        text("Hello").replace(b'":', b'" : '),
    ],
)
def test_what_stands_around_the_text(raw):
    before, behind = learned(raw)
    assert before + b"Hello" + behind == payload_of(raw)


@pytest.mark.parametrize("value", ["0", "1", 'a"b', "\\", "\n", "\u00e9", "content"])
def test_any_text_can_be_learned_from(value):
    before, behind = learned(text(value))
    payload = payload_of(text(value))
    assert payload.startswith(before)
    assert payload.endswith(behind)
    assert json.loads(before + b"x" + behind)["choices"][0]["delta"] == {"content": "x"}


def test_the_string_that_counts_is_found_among_others():
    odd = text("Hello").replace(b'{"choices"', b'{"x":{"content":"Hello"},"choices"')
    before, _ = learned(odd)
    assert before.endswith(b'"delta":{"content":"')
    twice = text("Hello").replace(b'{"content"', b'{"content":"Hello","content"')
    assert learned(twice)[0].endswith(b'{"content":"Hello","content":"')
    # Not worth a long search.
    decoys = b",".join([b'{"content":"y"}'] * 3)
    assert learned(text("Hello").replace(b'{"choices"', b'{"x":[%b],"choices"' % decoys)) is None


def test_a_key_written_with_an_escape_is_not_found():
    assert learned(text("Hello").replace(b'"content"', b'"c\\u006fntent"')) is None


def test_a_key_inside_a_string_is_not_mistaken():
    inside = text("Hello").replace(b'"/srv/m.gguf"', b'"\\"content\\":\\"x\\""')
    assert learned(inside)[0].endswith(b'"delta":{"content":"')


def test_long_and_folded_payloads_are_not_learned():
    assert learned(text("x" * 20_000)) is None
    assert learned(text("Hello").replace(b',"created"', b',\n"created"')) is None


@pytest.mark.parametrize("error", [ValueError, RecursionError])
def test_what_cannot_be_read_again_is_not_learned(error, monkeypatch):
    payload = payload_of(text("Hello"))
    value = read(payload)
    leaf = leaf_of(value)

    def fail(_):
        raise error("too deep")

    monkeypatch.setattr(template, "read", fail)
    assert learn(payload, value, leaf) is None


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"choices": None},
        {"choices": []},
        {"choices": [5]},
        {"choices": [{"delta": 5}]},
        {"choices": [{"delta": {}}]},
        {"choices": [{"delta": {"content": 5}}]},
        {"choices": [{"delta": {"content": ["x"]}}]},
        {"choices": [{"delta": {"content": "a", "reasoning": "b"}}]},
        {"choices": [{"delta": {"content": "a"}}, {"delta": {"content": "a"}}]},
        {"choices": [{"delta": {"content": "a"}, "index": 1}]},
        {"choices": [{"delta": {"content": "a"}, "index": None}]},
        {"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]},
        {"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": 1}},
        {"choices": [{"delta": {"content": "a"}}], "error": "x"},
        {"choices": [{"delta": {"content": "a"}}], "prompt_progress": {"total": 1}},
        {"choices": [{"message": {"content": "a"}}]},
        {"choices": [{"delta": {"function_call": {"arguments": "a"}}}]},
        {"choices": [{"delta": {"tool_calls": "a"}}]},
        {"choices": [{"delta": {"tool_calls": [5]}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "a"}}]}}]},
    ],
)
def test_chunks_that_carry_more_or_nothing(value):
    assert leaf_of(value) is None


@pytest.mark.parametrize(
    "fragment",
    [
        {"index": 0, "id": "a", "arguments": "x"},
        {"index": 0, "name": "a", "arguments": "x"},
        {"index": 129, "arguments": "x"},
        {"index": -1, "arguments": "x"},
        {"index": True, "arguments": "x"},
        {"index": 0, "arguments": ""},
        {"index": 0, "arguments": {"a": 1}},
        {"index": 0},
    ],
)
def test_fragments_that_do_more_than_go_on(fragment):
    assert leaf_of(read(payload_of(call(**fragment)))) is None


@settings(deadline=None)
@given(st.text() | st.text(alphabet='"\\\n\t/\x00\x7f\u00e9'))
def test_plain_is_the_form_of_our_own_writer(value):
    written = json.dumps(value, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")
    if plain(written):
        assert json.loads(b'"' + written + b'"') == value
    else:
        assert b"\\u" in written


@settings(deadline=None)
@given(st.binary())
def test_plain_bytes_are_read_and_written_alike(body):
    if plain(body) and is_utf8(body):
        value = json.loads(b'"' + body + b'"')
        assert json.dumps(value, ensure_ascii=False)[1:-1].encode() == body


@settings(deadline=None)
@given(st.binary())
def test_bytes_without_special_ones_are_plain(body):
    assert plain(body.translate(None, SPECIAL))


@pytest.mark.parametrize("body", [b'"', b"\\", b"\\u0041", b"\\/", b"\\x", b"\n", b"a\\", b'a"b'])
def test_what_is_not_plain(body):
    assert not plain(body)
    assert not plain(b"x" + body)
    assert not plain(body + b"x")


def test_reading_is_mild_where_nothing_is_lost():
    assert read(b'{"a":NaN,"b":"\t"}') == {"a": None, "b": "\t"}
    assert read(b'"\xff"') == "\ufffd"
    for body in (b"", b"x", b"[" * 100_000, b"{" * 5):
        with pytest.raises(ValueError):
            read(body)


def test_events_of_the_tests_are_what_they_seem():
    assert read(payload_of(event({"a": 1}))) == {"a": 1}


def test_a_text_that_is_the_probe_itself_is_found_in_its_own_place():
    other, own = b'{"x":{"content":"', b'0"},"choices":[{"index":0,"delta":{"content":"'
    payload = other + own + b'0"}}]}'
    chunk = read(payload)
    assert learn(payload, chunk, leaf_of(chunk)) == (other + own, b'"}}]}')
