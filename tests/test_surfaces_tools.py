"""The server's own tools, and the end of a thought: who may, what comes back, how it is told."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from peers import Request, ScriptedServer, answer_json, answer_sse
from recorded import recorded, recorded_json
from surfacing import (
    WRITER,
    Channel,
    asked,
    call_of,
    context,
    failure_of,
    refusal_of,
    result_of,
)

from provider_llamacpp.calls import Call
from provider_llamacpp.errors import BusError, ConsumerGone, Interrupted, InvalidRequest
from provider_llamacpp.runs import Runs
from provider_llamacpp.server.upstream import Target
from provider_llamacpp.settings import Settings
from provider_llamacpp.streaming import StreamRun
from provider_llamacpp.surfaces import outlet
from provider_llamacpp.surfaces.table import allowed

READERS = {"read_file", "file_glob_search", "grep_search", "get_info"}
WRITERS = {"exec_shell_command", "write_file", "edit_file"}


def tools_server(answer: Any, listing: Any = None) -> ScriptedServer:
    """Lists tools, and answers every call with ``answer``."""

    def answers(request: Request) -> Any:
        if request.method == "GET":
            return listing or recorded("tools-api-list")
        if "stream" not in request.json() and isinstance(answer, list):
            return answer[1]
        return answer[0] if isinstance(answer, list) else answer

    return ScriptedServer(answers)


def run(answer: Any, data: dict[str, Any], grants: tuple[str, ...], **options: Any) -> Any:
    """The result, and the request that ran the tool."""
    with tools_server(answer) as server:
        result = result_of("tools_call", context(server.url, tools=grants, **options), data)
    return result, server.requests[-1]


# -- which there are --------------------------------------------------------------------------


def test_without_the_setting_there_are_no_such_functions() -> None:
    tools = {"tools_list", "tools_call"}
    assert not tools & {surface.name for surface in allowed(Settings())}
    granted = Settings(allow_server_tools=("read",))
    assert {surface.name for surface in allowed(granted)} >= tools


@pytest.mark.parametrize(
    ("grants", "expected"),
    [
        (("read",), READERS),
        (("read", "write_file"), READERS | {"write_file"}),
        (("get_info",), {"get_info"}),
        (("exec_shell_command", "edit_file"), {"exec_shell_command", "edit_file"}),
        (("nothing",), set()),
    ],
)
def test_lists_tools_and_says_which_are_allowed(
    grants: tuple[str, ...], expected: set[str]
) -> None:
    result, (request,) = asked("tools_list", recorded("tools-api-list"), {}, tools=grants)
    tools = result["tools"]
    assert {tool["tool"] for tool in tools if tool["allowed"]} == expected
    assert {tool["tool"] for tool in tools if tool["writes"]} == WRITERS
    assert [tool["definition"] for tool in tools] == [
        row["definition"] for row in recorded_json("tools-api-list")
    ]
    assert (request.method, request.target) == ("GET", "/tools")


def test_a_tool_that_says_nothing_of_itself_writes() -> None:
    rows = [{"tool": "a"}, {"tool": "b", "permissions": {"write": 0}}, {"name": "c"}, 1]
    result, _ = asked("tools_list", answer_json(rows), {}, tools=("read",))
    assert result["tools"] == [
        {
            "tool": name,
            "title": name,
            "type": "server",
            "writes": True,
            "allowed": False,
            "uses_cwd": False,
            "definition": None,
        }
        for name in "ab"
    ]
    assert "no list of tools" in failure_of("tools_list", answer_json({}), {})


# -- running them -----------------------------------------------------------------------------


@pytest.mark.parametrize("tool", sorted(WRITERS))
def test_a_tool_that_writes_has_to_be_named(tool: str) -> None:
    with tools_server(recorded("tools-api-shell")) as server, pytest.raises(InvalidRequest) as no:
        where = context(server.url, tools=("read", "get_info"))
        result_of("tools_call", where, {"tool": tool, "params": {}})
    assert no.value.message.startswith(f"tool: {tool} is not allowed")
    assert server.paths() == ["GET /tools"]
    result, _ = run(recorded("tools-api-shell"), {"tool": tool}, (tool,))
    assert result["ok"]


def test_a_tool_that_is_not_there() -> None:
    data = {"tool": "nothing"}
    listing = recorded("tools-api-list")
    words = refusal_of("tools_call", data, listing, tools=("nothing",))
    assert words == "tool: the server has no such tool"


def test_runs_a_tool() -> None:
    data = {"tool": "read_file", "params": {"path": "a"}, "cwd": "/srv/one"}
    result, request = run(recorded("tools-api-read-file"), data, ("read",))
    assert result == {
        "tool": "read_file",
        "ok": True,
        "text": "hello tool file\n",
        "result": None,
        "error": None,
    }
    assert (request.method, request.target) == ("POST", "/tools")
    assert request.json() == {"tool": "read_file", "params": {"path": "a"}}
    assert request.headers["x-tool-cwd"] == "/srv/one"


def test_a_result_that_is_json() -> None:
    result, request = run(recorded("tools-api-write-file"), {"tool": "write_file"}, ("write_file",))
    assert result["result"] == recorded_json("tools-api-write-file")
    assert (result["ok"], result["text"]) == (True, None)
    assert "x-tool-cwd" not in request.headers


def test_a_tool_that_fails() -> None:
    result, _ = run(recorded("tools-api-tool-error"), {"tool": "read_file"}, ("read",))
    assert result["ok"] is False
    assert result["error"] == "cannot stat file: /srv/one/none.txt"


def test_arguments_that_do_not_fit() -> None:
    answer = recorded("tools-api-missing-param")
    with tools_server(answer) as server, pytest.raises(InvalidRequest) as caught:
        result_of("tools_call", context(server.url, tools=("read",)), {"tool": "read_file"})
    assert caught.value.message.startswith("params: ")
    assert "'path' not found" in caught.value.message


def test_output_goes_to_a_channel_as_it_comes() -> None:
    channel = Channel()
    data = {"tool": "exec_shell_command", "params": {"command": "x"}, "writer_ref": WRITER}
    grants = ("exec_shell_command",)
    result, request = run(recorded("tools-api-shell-stream"), data, grants, channel=channel)
    assert [frame["text"] for frame in channel.frames[:-1]] == [
        "one\n",
        "two\n",
        "\n[exit code: 3]",
    ]
    assert channel.frames[-1] == {"type": "done", "result": result}
    assert (result["ok"], result["text"]) == (True, None)
    assert request.json()["stream"] is True


def test_a_tool_that_cannot_stream_says_all_at_its_end() -> None:
    channel = Channel()
    answer = [recorded("tools-api-stream-unsupported"), recorded("tools-api-read-file")]
    data = {"tool": "read_file", "writer_ref": WRITER}
    result, request = run(answer, data, ("read",), channel=channel)
    assert channel.text == "hello tool file\n"
    assert channel.frames[-1] == {"type": "done", "result": result}
    assert result["text"] is None
    assert "stream" not in request.json()


def test_a_tool_that_fails_while_it_streams() -> None:
    channel = Channel()
    data = {"tool": "exec_shell_command", "writer_ref": WRITER}
    grants = ("exec_shell_command",)
    for error, words in (("no", "no"), ({"a": 1}, '{"a":1}')):
        answer = answer_sse({"chunk": "a"}, {"done": True, "error": error})
        channel = Channel()
        result, _ = run(answer, data, grants, channel=channel)
        assert (result["ok"], result["error"]) == (False, words)
        assert channel.frames[-1] == {"type": "done", "result": result}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (answer_sse({"chunk": "a"}), "provider/upstream: llama-server ended the tool's output"),
        (recorded("tools-api-disabled"), "provider/config: /tools: this feature is disabled"),
    ],
)
def test_output_that_breaks_off(answer: Any, words: str) -> None:
    channel = Channel()
    data = {"tool": "exec_shell_command", "writer_ref": WRITER}
    with pytest.raises(BusError) as caught:
        run(answer, data, ("exec_shell_command",), channel=channel)
    assert caught.value.message.startswith(words)
    error = {"code": "invocation_failed", "message": caught.value.message}
    assert channel.frames[-1] == {"type": "error", "error": error}


# -- the channel of a caller ------------------------------------------------------------------


def told(channel: Channel, work: Any, call: Call | None = None) -> Any:
    where = context("http://127.0.0.1:9", channel=channel)
    return where.told(call or call_of(), cast(Any, SimpleNamespace()), work)


def test_a_channel_that_cannot_be_opened() -> None:
    def gone(writer: Any, call: Call) -> Any:
        raise ConsumerGone("the engine knows no such channel")

    outlets = outlet.Outlets()
    with pytest.raises(InvalidRequest, match="writer_ref: the engine knows no such channel"):
        outlets.run(gone, cast(Any, None), call_of(), lambda say: {})
    assert outlets.snapshot() == []


@pytest.mark.parametrize(("reason", "last"), [("abort", []), ("stop", ["error"])])
def test_a_call_that_is_ended_from_outside(reason: Any, last: list[str]) -> None:
    channel, call = Channel(), call_of()

    def work(say: Any) -> Any:
        say("a")
        call.abort(reason)
        call.check()

    with pytest.raises(Interrupted):
        told(channel, work, call)
    assert [frame["type"] for frame in channel.frames] == ["chunk", *last]
    assert channel.finished


def test_a_fault_of_ours_closes_the_channel() -> None:
    channel = Channel()
    with pytest.raises(ZeroDivisionError):
        told(channel, lambda say: 1 / 0)
    assert (channel.frames, channel.finished) == ([], True)


# -- the end of a thought ---------------------------------------------------------------------


class Thinking:
    """A stream that thinks, as far as ``end_thinking`` looks at it."""

    def __init__(self, provider: Any, target: Target | None, key: str = "turn-1") -> None:
        self.provider = provider
        self.target = target
        self.call = Call(7, "stream", key=key, model="m")
        self.request = SimpleNamespace(model="m")
        self.assembler = SimpleNamespace(server_id="chatcmpl-1", started=True, past_thinking=False)


def end(answer: Any, **facts: Any) -> Any:
    runs = Runs()
    with ScriptedServer(answer) as server:
        where = context(server.url, runs=runs)
        run = Thinking(where.provider, Target(server.url, "sk-2"))
        vars(run.assembler).update(facts)
        runs.add(cast(StreamRun, run))
        return result_of("end_thinking", where, {"request_id": "turn-1"}), server.requests


def test_ends_a_thought() -> None:
    result, (request,) = end(recorded("control-reasoning-end"))
    assert result == {"ended": True, "reason": None}
    assert (request.method, request.target) == ("POST", "/v1/chat/completions/control")
    # The key of the stream, and the model: a server of several asks for it.
    assert request.headers["authorization"] == "Bearer sk-2"
    assert request.json() == {"id": "chatcmpl-1", "action": "reasoning_end", "model": "m"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (recorded("control-unknown-id"), "no active completion for this id"),
        (recorded("control-not-armed"), "reasoning control not enabled for this completion"),
        (answer_json({}), "the server did not end the thought"),
        (recorded("unknown-path"), "this build of llama-server cannot end a thought"),
    ],
)
def test_says_why_no_thought_was_ended(answer: Any, reason: str) -> None:
    assert end(answer)[0] == {"ended": False, "reason": reason}


def test_leaves_the_server_alone_where_no_thought_can_be() -> None:
    answer = recorded("control-reasoning-end")
    reason = "the model has not begun to think"
    assert end(answer, server_id=None) == ({"ended": False, "reason": reason}, [])
    assert end(answer, started=False) == ({"ended": False, "reason": reason}, [])
    reason = "the model is past its thinking"
    assert end(answer, past_thinking=True) == ({"ended": False, "reason": reason}, [])
    reason = "no stream of this request is running"
    result, requests = asked("end_thinking", answer, {"request_id": "turn-1"})
    assert (result, requests) == ({"ended": False, "reason": reason}, [])


def test_ends_what_the_router_tries_again_too() -> None:
    runs = Runs()
    with ScriptedServer(recorded("control-reasoning-end")) as server:
        where = context(server.url, runs=runs)
        other = context(server.url).provider
        first = Thinking(where.provider, Target(server.url, None))
        second = Thinking(where.provider, None)
        third = Thinking(other, Target(server.url, None))
        for number, run in enumerate((first, second, third)):
            run.call.number = number
            runs.add(cast(StreamRun, run))
        result = result_of("end_thinking", where, {"request_id": "turn-1"})
    assert result == {"ended": True, "reason": None}
    assert len(server.requests) == 1


def test_a_control_route_that_fails() -> None:
    with pytest.raises(BusError, match="HTTP 400: missing completion id"):
        end(recorded("control-no-id"))


def test_the_channels_are_known_while_they_are_open() -> None:
    entered, go = threading.Event(), threading.Event()
    where = context("http://127.0.0.1:9", channel=Channel())

    def work(say: Any) -> Any:
        entered.set()
        assert go.wait(10)
        return {}

    thread = threading.Thread(target=where.told, args=(call_of(), cast(Any, object()), work))
    thread.start()
    assert entered.wait(10)
    (open_one,) = where.outlets.snapshot()
    assert isinstance(open_one.channel, Channel)
    go.set()
    thread.join(10)
    assert where.outlets.snapshot() == []
