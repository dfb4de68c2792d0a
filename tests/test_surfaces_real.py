"""The functions beside chat on real servers: the ``llama-server`` program and ``xllamacpp``.

A reranker is played by random weights with rank pooling: the scores mean nothing, all else is what
the server does for a real one. Filling in is done by a tiny model that has the tokens for it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import requests
from conftest import LlamaFactory
from peers import wait_for
from surfacing import SCHEMAS

from provider_llamacpp import BusError, Settings
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.local import model as demo
from provider_llamacpp.local.llama import find_program
from provider_llamacpp.local.model import Variant
from provider_llamacpp.local.stack import LocalStack

pytestmark = pytest.mark.timeout(120)

INFILL = {"input_prefix": "def f(", "input_suffix": "return 1"}


class Place:
    """A worker on a server, and a caller of its functions."""

    def __init__(self, stack: LocalStack, caller: Caller) -> None:
        self.stack = stack
        self.caller = caller

    def call(self, name: str, **data: Any) -> Any:
        """The result, which fits the schema."""
        result = self.caller.call(f"provider::llamacpp::{name}", data, timeout=60.0)
        jsonschema.validate(result, SCHEMAS[name]["response_format"])
        return result

    def fails(self, name: str, **data: Any) -> str:
        with pytest.raises(BusError) as caught:
            self.caller.call(f"provider::llamacpp::{name}", data, timeout=60.0)
        return str(caught.value)

    def told(self, name: str, **data: Any) -> tuple[Any, list[dict[str, Any]]]:
        """The result, and the frames that came before it."""
        writer, arriving = self.caller.open_channel()
        frames: list[dict[str, Any]] = []
        reader = threading.Thread(target=lambda: frames.extend(arriving))
        reader.start()
        result = self.call(name, writer_ref=writer, **data)
        reader.join(30)
        assert frames[-1] == {"type": "done", "result": result}
        return result, [frame for frame in frames[:-1] if frame["type"] != "ping"]

    def begin(self, text: str, **more: Any) -> tuple[threading.Thread, Iterator[dict[str, Any]]]:
        """Start a stream of the request ``k``."""
        writer, frames = self.caller.open_channel()
        message = {"role": "user", "content": [{"type": "text", "text": text}], "timestamp": 1}
        payload = {"writer_ref": writer, "resolution_key": "k", "messages": [message], **more}
        payload.setdefault("model", "slow")
        thread = threading.Thread(
            target=self.caller.call,
            args=("provider::llamacpp::stream", payload),
            kwargs={"timeout": 60.0},
        )
        thread.start()
        return thread, frames

    def usage(self, text: str) -> dict[str, int]:
        """What a whole answer of the demo model takes."""
        thread, frames = self.begin(text, model="demo")
        last = list(frames)[-1]
        thread.join(30)
        found: dict[str, int] = last["message"]["usage"]
        return found


Serve = Callable[..., Place]


@pytest.fixture(params=["program", "xllamacpp"])
def serve(request: pytest.FixtureRequest, llama_factory: LlamaFactory) -> Iterator[Serve]:
    """Starts a server of one kind, with a worker on it."""
    if request.param == "program" and find_program(os.environ) is None:
        pytest.skip("no llama-server on PATH, and LLAMA_SERVER_BIN is not set")
    if request.param == "xllamacpp" and importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    with ExitStack() as stack:

        def start(
            variant: Variant = "demo", *, grants: tuple[str, ...] = (), **options: Any
        ) -> Place:
            options = {"ctx_size": 2048, "parallel": 1, **options}
            server = llama_factory(variant, source=request.param, **options)
            settings = Settings(api_url=server.url, allow_server_tools=grants)
            local = stack.enter_context(LocalStack(settings))
            return Place(local, stack.enter_context(Caller(local.settings)))

        yield start


@pytest.fixture
def serve_program(serve: Serve, request: pytest.FixtureRequest) -> Serve:
    """The same for what only the program is told by its command line."""
    if request.node.callspec.params["serve"] != "program":
        pytest.skip("xllamacpp takes no such arguments")
    return serve


def test_tokens_there_and_back(serve: Serve) -> None:
    place = serve()
    text = "Grüße 🦙<|im_end|>"
    found = place.call("tokenize", content=text, with_pieces=True)
    assert place.call("detokenize", tokens=found["tokens"]) == {"content": text}
    joined = b"".join(
        piece.encode() if isinstance(piece, str) else bytes(piece) for piece in found["pieces"]
    )
    assert joined.decode() == text
    assert found["pieces"][-1] == "<|im_end|>"
    plain = place.call("tokenize", content=text, parse_special=False)["tokens"]
    assert len(plain) > len(found["tokens"])
    assert place.call("tokenize", content="") == {"tokens": []}
    assert "no token of this model" in place.fails("detokenize", tokens=[10**6])


def test_reranks(serve: Serve) -> None:
    place = serve("embed", embeddings=True, pooling="rank")
    documents = ["zzz dog", "a cat", "q", "a cat"]
    found = place.call("rerank", query="a cat", documents=documents)
    scores = [row["relevance_score"] for row in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(row["index"] for row in found["results"]) == [0, 1, 2, 3]
    by_index = {row["index"]: row["relevance_score"] for row in found["results"]}
    assert by_index[1] == pytest.approx(by_index[3])
    best = place.call("rerank", query="a cat", documents=documents, top_n=1)
    assert best["results"] == found["results"][:1]
    assert found["usage"]["input"] > 0
    words = place.fails("rerank", query="a", documents=["a" * 3000])
    assert words.startswith("provider/invalid_request: documents: ")


def test_fills_in(serve: Serve) -> None:
    place = serve("infill")
    found = place.call("infill", **INFILL)
    assert found["content"] == demo.CONTINUATION
    assert (found["stop_reason"], found["native_stop_reason"]) == ("end", "eos")
    assert found["usage"]["output"] > 3
    more = place.call("infill", input_extra=[{"filename": "a.py", "text": "x = 1"}], **INFILL)
    assert more["usage"]["input"] > found["usage"]["input"]
    cut = place.call("infill", max_output_tokens=2, **INFILL)
    assert (cut["stop_reason"], cut["usage"]["output"]) == ("length", 2)
    result, frames = place.told("infill", **INFILL)
    assert "".join(frame["text"] for frame in frames) == demo.CONTINUATION
    assert len(frames) > 2
    assert result["content"] is None
    words = place.fails("infill", options={"temperature": "hot"}, **INFILL)
    assert "temperature" in words


def test_says_what_the_server_was_not_started_for(serve: Serve) -> None:
    place = serve(grants=("read",))
    assert "--reranking" in place.fails("rerank", query="a", documents=["b"])
    assert "Infill is not supported by this model" in place.fails("infill", **INFILL)
    assert "--slot-save-path" in place.fails("slots", action="save", slot=0, filename="a")
    assert "--tools" in place.fails("tools_list")
    figures = place.call("metrics")
    assert figures["server"] is None
    assert "--metrics" in figures["problem"]


def test_shows_slots(serve: Serve) -> None:
    place = serve("slow", parallel=2, ctx_size=8192)
    assert [slot["id"] for slot in place.call("slots")["slots"]] == [0, 1]
    stream, frames = place.begin("forever")
    assert any(frame["type"] == "text_delta" for frame in frames)
    (busy,) = [slot for slot in place.call("slots")["slots"] if slot["busy"]]
    assert busy["context_window"] == 4096
    assert busy["prompt_tokens"] > 0
    assert busy["decoded"] > 0
    place.caller.call("provider::llamacpp::abort", {"request_id": "k"})
    list(frames)
    stream.join(30)
    wait_for(lambda: not any(slot["busy"] for slot in place.call("slots")["slots"]))


def test_figures_count(serve: Serve) -> None:
    place = serve(metrics=True)
    before = place.call("metrics")
    assert before["problem"] is None
    usage = place.usage("hi")
    after = place.call("metrics")
    name = "llamacpp:tokens_predicted_total"
    made = after["server"][name]["value"] - before["server"][name]["value"]
    # The stop token is generated, and counted by one of the two alone.
    assert abs(made - usage["output"]) <= 1
    assert after["server"][name]["kind"] == "counter"
    assert after["worker"]["usage"] == usage
    assert after["worker"]["outcomes"] == {"end": 1}


def test_keeps_a_prompt_cache(serve_program: Serve, tmp_path: Path) -> None:
    place = serve_program(extra=("--slot-save-path", str(tmp_path)))
    usage = place.usage("hi")
    saved = place.call("slots", action="save", slot=0, filename="one.bin")
    assert saved["tokens"] >= usage["input"]
    assert saved["bytes"] == (tmp_path / "one.bin").stat().st_size
    erased = place.call("slots", action="erase", slot=0)
    assert erased == {"slot": 0, "tokens": saved["tokens"], "bytes": None}
    restored = place.call("slots", action="restore", slot=0, filename="one.bin")
    assert restored == saved
    # The server itself would take this for its only slot, and empty that.
    assert "below 1" in place.fails("slots", action="erase", slot=5)
    assert place.call("slots", action="save", slot=0, filename="two.bin") == saved
    # A restore that fails leaves the slot empty.
    assert "filename: Unable" in place.fails("slots", action="restore", slot=0, filename="no")
    assert place.call("slots", action="erase", slot=0)["tokens"] == 0


def test_runs_tools(serve_program: Serve, tmp_path: Path) -> None:
    place = serve_program(grants=("read", "exec_shell_command"), extra=("--tools", "all"))
    tools = {tool["tool"]: tool for tool in place.call("tools_list")["tools"]}
    assert {name for name, tool in tools.items() if not tool["allowed"]} == {
        name for name, tool in tools.items() if tool["writes"]
    } - {"exec_shell_command"}
    (tmp_path / "note").write_text("kept\n")
    found = place.call("tools_call", tool="read_file", params={"path": "note"}, cwd=str(tmp_path))
    assert found["text"] == "kept\n"
    assert place.call("tools_call", tool="get_info")["result"]["os"]
    failed = place.call("tools_call", tool="read_file", params={"path": str(tmp_path / "no")})
    assert (failed["ok"], failed["text"]) == (False, None)
    assert failed["error"]
    assert "invalid_request: params: " in place.fails("tools_call", tool="read_file")
    aim = tmp_path / "forbidden"
    params = {"path": str(aim), "content": "x"}
    for more in ({}, {"writer_ref": place.caller.open_channel()[0]}):
        words = place.fails("tools_call", tool="write_file", params=params, **more)
        assert "write_file is not allowed" in words
    assert not aim.exists()


def test_runs_tools_with_a_channel(serve_program: Serve, tmp_path: Path) -> None:
    grants = ("read", "exec_shell_command", "write_file")
    place = serve_program(grants=grants, extra=("--tools", "all"))
    result, frames = place.told(
        "tools_call",
        tool="exec_shell_command",
        params={"command": "echo one; sleep 0.2; echo two; exit 3"},
    )
    said = [frame["text"] for frame in frames]
    assert "".join(said) == "one\ntwo\n\n[exit code: 3]"
    assert len(said) > 2
    assert (result["ok"], result["text"]) == (True, None)
    aim = tmp_path / "new"
    # A tool that cannot stream runs once, and not before the server was asked without a stream.
    params = {"path": str(aim), "content": "x"}
    result, frames = place.told("tools_call", tool="write_file", params=params)
    assert (result["ok"], frames) == (True, [])
    assert aim.read_text() == "x"
    result, frames = place.told("tools_call", tool="exec_shell_command", params={})
    assert (result["ok"], frames) == (False, [])
    assert "command" in result["error"]


def test_several_models(serve_program: Serve, model_path: Any, tmp_path: Path) -> None:
    for variant in ("slow", "infill"):
        shutil.copy(model_path(variant), tmp_path / f"{variant}.gguf")
    place = serve_program(model=None, models_dir=tmp_path, ctx_size=8192, parallel=1, metrics=True)

    def loaded() -> list[str]:
        rows = requests.get(f"{place.stack.llama.url}/v1/models", timeout=20).json()["data"]
        return [row["id"] for row in rows if row["status"]["value"] != "unloaded"]

    assert "model: must name a model" in place.fails("tokenize", content="a")
    assert "model: is not loaded" in place.fails("slots", model="slow")
    assert "model: is not loaded" in place.fails("slots", model="slow", action="erase", slot=0)
    assert place.call("metrics", model="slow")["problem"] == "model: is not loaded"
    assert "model: 'none' not found" in place.fails("slots", model="none")
    assert loaded() == []
    assert place.call("infill", model="infill", **INFILL)["content"] == demo.CONTINUATION
    assert place.call("metrics", model="infill")["server"]["llamacpp:tokens_predicted_total"]
    assert loaded() == ["infill"]
    thread, frames = place.begin("ponder", thinking_level="low", max_output_tokens=6000)
    assert any(frame["type"] == "thinking_delta" for frame in frames)
    assert place.call("slots", model="slow")["slots"][0]["busy"] is True
    assert place.call("end_thinking", request_id="k")["ended"] is True
    last = list(frames)[-1]
    thread.join(30)
    assert last["message"]["content"][-1] == {"type": "text", "text": demo.SENTENCE}


def test_what_wakes_a_sleeping_model(serve: Serve) -> None:
    place = serve(sleep_idle_seconds=1, metrics=True, embeddings=True, pooling="mean")

    def asleep() -> bool:
        props = requests.get(f"{place.stack.llama.url}/props", timeout=20).json()
        return props["is_sleeping"] is True

    wait_for(asleep)
    assert place.call("metrics")["problem"] is None
    assert asleep()
    assert len(place.call("slots")["slots"]) == 1
    assert not asleep()
