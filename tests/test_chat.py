"""``chat``: what a person sees, and the whole path in one process."""

import io
import logging
import re

import pytest
from screen import Screen, Style

from provider_llamacpp import BusError, Settings, cli
from provider_llamacpp.commands import chat
from provider_llamacpp.local import model as demo
from provider_llamacpp.local.stack import LocalStack

USAGE = {"input": 12, "output": 3}


def shown(frames, *, colour=False):
    out = io.StringIO()
    display = chat.Display(out, colour=colour)
    for frame in frames:
        display.show(frame)
    return out.getvalue(), display.failure


def done(content, **more):
    message = {"content": content, "model": "m", "stop_reason": "end", "usage": USAGE, **more}
    return {"type": "done", "message": message}


def test_thoughts_stand_apart_and_figures_come_last():
    text, failure = shown(
        [
            {"type": "start"},
            {"type": "thinking_start"},
            {"type": "thinking_delta", "delta": "hm"},
            {"type": "thinking_end"},
            {"type": "text_start"},
            {"type": "text_delta", "delta": "Hi "},
            {"type": "text_delta", "delta": "you"},
            {"type": "text_end"},
            {"type": "ping"},
            done([]),
        ]
    )
    lines = text.splitlines()
    assert lines[:2] == ["(thinking) hm", "Hi you"]
    assert lines[2].startswith("[m, stop: end, 12 tokens in, 3 out")
    assert failure is None


def test_calls_and_warnings_are_shown():
    call = {"type": "function_call", "id": "1", "function_id": "fs::ls", "arguments": {"p": "/"}}
    text, _ = shown([done([call], warnings=["thinking is best effort"])])
    assert 'call fs::ls({"p": "/"})' in text
    assert "warning: thinking is best effort" in text


def test_usage_from_its_own_frame_counts_where_the_message_has_none():
    text, _ = shown([{"type": "usage", "usage": USAGE}, done([], usage=None)])
    assert "12 tokens in" in text


def test_colours_only_where_wanted():
    frames = [{"type": "thinking_start"}, {"type": "thinking_end"}, done([])]
    assert "\x1b[2m" in shown(frames, colour=True)[0]
    assert "\x1b" not in shown(frames)[0]


def test_a_model_cannot_steer_the_terminal():
    text, _ = shown(
        [
            {"type": "text_delta", "delta": "a\x1b]0;title\x07b\tc\r\nd\x9b2J"},
            done([], model="\x1b[31mred"),
        ]
    )
    assert "\x1b" not in text
    assert "\x9b" not in text
    assert "a\\x1b]0;title\\x07b\tc\nd" in text


THOUGHT = "The caller wants the weather, so both towns have to be asked for at the same time. "
ANSWER = "It rains in both of them, 雨が降っています, and it will go on to do so until the evening."
TOWNS = {"cities": ["Köln", "Bad Neuenahr-Ahrweiler"], "unit": "celsius", "days": [1, 2, 3]}
TURN = [
    {"type": "start"},
    {"type": "thinking_start"},
    *({"type": "thinking_delta", "delta": each} for each in re.findall(r"\S+\s*", THOUGHT)),
    {"type": "thinking_end"},
    {"type": "text_start"},
    *({"type": "text_delta", "delta": each} for each in re.findall(r"\S+\s*", ANSWER)),
    {"type": "text_end"},
    done(
        [{"type": "function_call", "function_id": "weather::get", "arguments": TOWNS}],
        model="qwen3-0.6b-q4_k_m",
        stop_reason="function_call",
        warnings=["thinking is best effort"],
    ),
]
DIMMED, BOLD = Style(marks=frozenset({"dim"})), Style(marks=frozenset({"bold"}))


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("columns", [80, 40])
def test_a_turn_on_a_terminal_of_fixed_width(columns, colour):
    screen = Screen(columns, 40).write(shown(TURN, colour=colour)[0])
    lines = screen.text()
    assert max(map(len, lines)) <= columns
    heads = ("(thinking) ", "It rains", "call weather::get(", "warning: ", "[qwen3-0.6b-q4_k_m, ")
    # Each begins a line, in this order.
    starts = [next(at for at, line in enumerate(lines) if line.startswith(head)) for head in heads]
    assert starts == sorted(starts)
    # And nothing of it is lost where a line is full.
    text = re.sub(r"\s", "", "".join(lines))
    for part in (THOUGHT, ANSWER, '"Köln", "Bad Neuenahr-Ahrweiler"', "12 tokens in, 3 out"):
        assert re.sub(r"\s", "", part) in text
    plain = {Style()}
    assert (
        screen.styles("(thinking)")
        == screen.styles("The caller")
        == ({DIMMED} if colour else plain)
    )
    assert screen.styles("same time") == ({DIMMED} if colour else plain)
    assert screen.styles("It rains in both") == plain
    assert screen.styles("call w") == ({BOLD, Style()} if colour else plain)
    assert screen.styles("weather::get") == plain
    assert screen.styles("[qwen3") == ({DIMMED} if colour else plain)
    # What the shell writes next is not dimmed.
    assert screen.write("$ ").styles("$") == plain


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("end", ["abort", "error"])
def test_a_turn_that_ends_early_leaves_the_terminal_as_it_was(columns, end):
    out = io.StringIO()
    display = chat.Display(out, colour=True)
    for frame in TURN[:8]:
        display.show(frame)
    if end == "abort":
        display.aborted()
    else:
        display.show({"type": "error", "error": {"error_kind": "transient"}})
    screen = Screen(columns).write(out.getvalue()).write("$ ")
    assert screen.text()[-1] == "$"
    assert screen.styles("$") == {Style()}


def test_an_error_after_text_starts_on_a_line_of_its_own():
    message = {"error_kind": "transient", "error_message": "cut\x1b"}
    text, failure = shown(
        [{"type": "text_delta", "delta": "half"}, {"type": "error", "error": message}]
    )
    assert text == "half\n"
    assert failure == "transient: cut\\x1b"


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def call(self, function_id, data):
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        {"models": [{"id": "x", "provider": "other"}, {"id": "m", "provider": "llamacpp"}]},
        [{"id": "m", "provider": "llamacpp"}],
    ],
)
def test_the_first_model_of_the_provider_is_taken(answer):
    assert chat.pick_model(Answers(answer), None, "llamacpp") == ("m", None)


@pytest.mark.parametrize("answer", [{"models": []}, None, {"models": ["x", {}]}])
def test_no_model_is_said_with_the_remedy(answer):
    with pytest.raises(BusError, match="--model"):
        chat.pick_model(Answers(answer), None, "llamacpp")


def listed(*ids, router_mode=False):
    models = [{"id": each, "aliases": [each, f"{each}-too"]} for each in ids]
    return {"router_mode": router_mode, "models": models}


@pytest.mark.parametrize(
    ("wanted", "answer", "taken", "words"),
    [
        ("demo", listed("demo"), "demo", None),
        ("demo-too", listed("demo"), "demo-too", None),
        ("llamacpp::demo", listed("demo"), "llamacpp::demo", None),
        ("typo", listed("demo"), "demo", "knows no model 'typo'; its only one, demo, answers"),
        ("b", listed("a", "b", router_mode=True), "b", None),
        ("typo", listed("a", "b", router_mode=True), "typo", "no model 'typo'; it has a, b"),
        ("typo", listed("a", router_mode=True), "typo", "no model 'typo'; it has a"),
        ("typo", listed(*"abcdefg"), "typo", "it has a, b, c, d, e, ..."),
        ("typo", listed(), "typo", None),
        *(("typo", answer, "typo", None) for answer in (None, {}, {"models": [{}]}, [])),
    ],
)
def test_a_name_that_nobody_knows_is_told(wanted, answer, taken, words):
    model, note = chat.pick_model(Answers(answer), wanted, "llamacpp")
    assert model == taken
    assert (note is None) if words is None else note.endswith(words)


def test_a_worker_that_cannot_list_models_is_asked_all_the_same():
    class Old:
        def call(self, function_id, data):
            assert function_id == "provider::pi5::models_list"
            raise BusError("function_not_found", "no")

    assert chat.pick_model(Old(), "m", "pi5") == ("m", None)


def test_a_server_of_one_model_is_shown_by_its_own_name(llama, capsys):
    with LocalStack(Settings(api_url=llama.url)) as stack:
        assert cli.main(["chat", "--url", stack.settings.url, "--model", "typo", "hi"]) == 0
    told = capsys.readouterr()
    assert "knows no model 'typo'; its only one, demo, answers" in told.err
    assert told.out.splitlines()[-1].startswith("[demo, stop: end, ")


def test_the_whole_path(llama, capsys):
    code = cli.main(["chat", "--local", "--api-url", llama.url, "--thinking", "low", "hello"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[:2] == [f"(thinking) {demo.THOUGHT}", demo.SENTENCE]
    assert lines[2].startswith("[demo, stop: end, ")


def test_a_call_is_one_line_of_the_log(llama, caplog):
    caplog.set_level(logging.INFO, "provider_llamacpp")
    assert cli.main(["chat", "--local", "--api-url", llama.url, "hello"]) == 0
    (line,) = [each.getMessage() for each in caplog.records if "outcome=" in each.getMessage()]
    assert re.fullmatch(
        r"stream 1 request=\S+ model=demo phase=done seconds=\d+\.\d{3} tokens=\d+ "
        r"tokens_per_second=\d+\.\d input=\d+ output=\d+ cached=\d+ outcome=end",
        line,
    ), line


def test_a_system_prompt_reaches_the_server(llama, capsys):
    def tokens(*more):
        assert cli.main(["chat", "--local", "--api-url", llama.url, *more, "hello"]) == 0
        return int(capsys.readouterr().out.split(" tokens in")[0].split()[-1])

    assert tokens("--system", "Be brief, be kind.") > tokens()


def test_a_failed_answer_has_exit_code_1(llama, capsys):
    code = cli.main(["chat", "--local", "--api-url", llama.url, "word " * 9000])
    assert code == 1
    assert "context_overflow" in capsys.readouterr().err


def test_no_engine_is_said_with_the_flag(capsys):
    assert cli.main(["chat", "--url", "ws://127.0.0.1:9", "hi"]) == 1
    told = capsys.readouterr().err
    assert "--url" in told
    assert "next try" not in told


def test_a_level_nobody_knows_is_named(capsys):
    with pytest.raises(SystemExit):
        cli.main(["chat", "--thinking", "loud", "hello"])
    assert "invalid choice: 'loud'" in capsys.readouterr().err


def test_an_abort_in_the_middle_of_a_line_ends_the_line():
    out = io.StringIO()
    display = chat.Display(out, colour=False)
    display.show({"type": "text_delta", "delta": "half"})
    display.aborted()
    assert out.getvalue() == "half\n"
    assert display.failure == "aborted"
