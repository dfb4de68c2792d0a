"""The laws must be able to find fault: each lawful stream below is broken in one way."""

import copy
import json

import pytest
from chunks import call, finish, frames_of, text, thought, usage
from laws import check_frames, strict, violations

GOOD = [
    json.loads(frame)
    for frame in frames_of(
        thought("t")
        + text("a")
        + text("b")
        + call(index=0, id="c", name="x", arguments='{"p":1}')
        + usage(prompt_tokens=1)
        + usage(completion_tokens=2)
        + finish("tool_calls")
    )
]
BAD = [json.loads(frame) for frame in frames_of(text("a"))]
LONE = [json.loads(frame) for frame in frames_of(b"proxy error: x")]
PING = {"type": "ping"}


def test_lawful_streams():
    assert check_frames(GOOD) == check_frames(BAD) == check_frames(LONE) == []
    assert violations([PING, *GOOD[:5], PING, *GOOD[5:]]) == []
    assert violations(GOOD[:6], terminal=False) == ["text stays open"]
    assert violations([], terminal=False) == []


def broken(frames, at, change):
    frames = copy.deepcopy(frames)
    return change(frames, frames[at]) or frames


def put(*path, value):
    def change(_, frame):
        for key in path[:-1]:
            frame = frame[key]
        frame[path[-1]] = value

    return change


def drop(frames, frame):
    frames.remove(frame)


def twice(frames, frame):
    frames.insert(frames.index(frame), frame)


def index(kind):
    return next(number for number, frame in enumerate(GOOD) if frame["type"] == kind)


CONTENT = ("message", "content")


@pytest.mark.parametrize(
    ("at", "change"),
    [
        (0, drop),
        (0, twice),
        (0, lambda frames, frame: [frame]),
        (-1, drop),
        (-1, twice),
        (-2, drop),
        (-2, twice),
        (-2, put("stop_reason", value="end")),
        (0, lambda frames, frame: [*frames, PING, frame]),
        (index("text_start"), drop),
        (index("text_end"), drop),
        (index("text_delta"), drop),
        (index("text_delta"), twice),
        (index("text_delta"), put("delta", value="")),
        (index("text_delta"), put("id", value="x")),
        (index("thinking_end"), twice),
        (index("text_start"), twice),
        (index("functioncall_delta"), put("delta", value="{}")),
        (index("functioncall_delta"), put("id", value="")),
        (index("functioncall_start"), put("partial", "timestamp", value="5")),
        (index("functioncall_start"), lambda _, frame: frame["partial"].pop("model") and None),
        (index("usage"), put("usage", value={"input": 1, "extra": 1})),
        (index("usage"), put("usage", "input", value=1.5)),
        (index("usage"), twice),
        (-3, put("usage", value={"output": 2})),
        (-1, put("message", "usage", value={"input": 9})),
        (-1, put("message", "stop_reason", value="odd")),
        (-1, put("message", "stop_reason", value="error")),
        (-1, put("message", "role", value="user")),
        (-1, put("message", "extra", value=1)),
        (-1, put("message", "usage", value=None)),
        (-1, put("message", "error_kind", value="transient")),
        (-1, put(*CONTENT, 1, "text", value="abc")),
        (-1, put(*CONTENT, 1, "text", value="")),
        (-1, put(*CONTENT, 1, "extra", value="")),
        (-1, put(*CONTENT, 2, "arguments", value={"p": 2})),
        (-1, put(*CONTENT, 2, "arguments", value="{}")),
        (-1, put(*CONTENT, 2, "id", value="other")),
        (-1, lambda _, frame: frame["message"]["content"].reverse()),
        (-1, lambda _, frame: frame["message"]["content"].insert(0, {"type": "text", "text": ""})),
        (0, put("type", value="begin")),
        (0, put("type", value=5)),
    ],
)
def test_broken_streams(at, change):
    frames = broken(GOOD, at, change)
    assert violations(frames)
    with pytest.raises(AssertionError):
        check_frames(frames)


@pytest.mark.parametrize(
    "change",
    [
        put("error", "error_kind", value="odd"),
        put("error", "error_message", value=""),
        put("error", "content", value=[]),
        put("error", "stop_reason", value="end"),
        put("error", "content", 0, "text", value="other"),
        lambda frames, frame: [*frames, frame],
        lambda frames, frame: [{"type": "stop", "stop_reason": "error"}, *frames],
    ],
)
@pytest.mark.parametrize("stream", [BAD, LONE])
def test_broken_errors(stream, change):
    assert violations(broken(stream, -1, change))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"type":"ping","a":NaN}',
        b'{"type":"ping","type":"ping"}',
        b'{"type":"\\ud800"}',
        b'{"type":"\xff"}',
        b'{"type":"ping"',
        b"5",
    ],
)
def test_strict_json(raw):
    assert violations([raw], terminal=False)


def test_strict_reads_what_is_fine():
    assert strict('{"a":"\\ud83d\\ude00"}') == {"a": "\U0001f600"}
