"""Finding, starting and ending a llama-server: real ones, and a stand-in for the odd cases."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from conftest import LlamaFactory

from provider_llamacpp.errors import ProviderError
from provider_llamacpp.local import llama as llama_module
from provider_llamacpp.local.llama import (
    LlamaOptions,
    LlamaServer,
    LlamaServerError,
    find_program,
    find_running,
)
from provider_llamacpp.local.model import SENTENCE, Variant

DEADLINE = 30.0
POSIX = pytest.mark.skipif(os.name != "posix", reason="the stand-in is a script")

# What a llama-server program looks like from outside; the environment says how it behaves.
STAND_IN = """\
#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

args = sys.argv[1:]
with open(os.environ["FAKE_RECORD"], "a") as record:
    json.dump([args, os.environ.get("LLAMA_API_KEY")], record)
    record.write("\\n")
with open(os.environ["FAKE_RECORD"]) as record:
    starts = len(record.readlines())
if starts <= int(os.environ.get("FAKE_TAKEN", 0)):
    print("0.0 E srv start: couldn't bind HTTP server socket", flush=True)
    sys.exit(1)
if "FAKE_DIES" in os.environ:
    print("first words\\nlast words, with", os.environ.get("LLAMA_API_KEY"), flush=True)
    sys.exit(int(os.environ["FAKE_DIES"]))
answers = os.environ.get("FAKE_HEALTH", "200").split()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(answers.pop(0) if len(answers) > 1 else answers[0]))
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{{}}")

HTTPServer(("127.0.0.1", int(args[args.index("--port") + 1])), Handler).serve_forever()
"""


class StandIn:
    """The stand-in program, the environment to find it, and what it was started with."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "llama-server"
        self.path.write_text(STAND_IN.format(python=sys.executable))
        self.path.chmod(stat.S_IRWXU)
        self._record = directory / "record"
        self.environ = {
            **os.environ,
            "LLAMA_SERVER_BIN": str(self.path),
            "FAKE_RECORD": str(self._record),
        }
        self.model = directory / "model.gguf"
        self.model.touch()

    def starts(self) -> list[Any]:
        return [json.loads(line) for line in self._record.read_text().splitlines()]

    def server(self, environ: dict[str, str] | None = None, **options: Any) -> LlamaServer:
        options = options or {"model": self.model}
        return LlamaServer(LlamaOptions(**options), environ={**self.environ, **(environ or {})})


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


class Peer:
    """An HTTP server in a thread that gives one answer to everything."""

    def __init__(self, status: int, body: bytes) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Peer:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._thread.join(DEADLINE)
        self._server.server_close()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses: bound, so that nobody takes it, but not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


class TestReal:
    def test_answers_under_its_alias(self, llama: LlamaServer) -> None:
        assert llama.url.startswith("http://127.0.0.1:")
        assert llama.pid and llama.returncode is None
        rows = requests.get(f"{llama.url}/v1/models", timeout=10).json()["data"]
        assert rows[0]["id"] == "demo"
        assert rows[0]["meta"]["n_ctx"] == 8192
        props = requests.get(f"{llama.url}/props", timeout=10).json()
        assert props["total_slots"] == 4
        assert requests.get(f"{llama.url}/metrics", timeout=10).status_code == 200

    def test_the_defaults(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory()
        assert any("listening on" in line for line in server.log_tail(400))
        reply = requests.post(f"{server.url}/v1/embeddings", json={}, timeout=10)
        assert reply.status_code == 501
        assert requests.get(f"{server.url}/metrics", timeout=10).status_code == 501
        assert requests.get(f"{server.url}/slots", timeout=10).status_code == 200

    def test_switches(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory(slots=False, kv_unified=True, parallel=2, ctx_size=1024, jinja=True)
        assert requests.get(f"{server.url}/slots", timeout=10).status_code == 501
        props = requests.get(f"{server.url}/props", timeout=10).json()
        # One pool: each slot may fill it alone.
        assert props["default_generation_settings"]["n_ctx"] == 1024
        assert props["total_slots"] == 2

    def test_the_batch_limits_an_embedding(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory("embed", embeddings=True, batch=64)
        body = {"input": "x" * 100}
        reply = requests.post(f"{server.url}/v1/embeddings", json=body, timeout=10)
        assert reply.status_code == 500
        assert "batch size: 64" in reply.json()["error"]["message"]

    def test_wants_its_key(self, llama_factory: LlamaFactory) -> None:
        key = "a-test-key"
        server = llama_factory(api_key=key)
        body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "none"}
        url = f"{server.url}/v1/chat/completions"
        assert requests.post(url, json=body, timeout=10).status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        reply = requests.post(url, json=body, headers=headers, timeout=30)
        assert reply.json()["choices"][0]["message"]["content"] == SENTENCE
        assert key not in repr(server.options)

    def test_sleeps(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory(sleep_idle_seconds=1)
        pause = threading.Event()
        for _ in range(300):
            if requests.get(f"{server.url}/props", timeout=10).json()["is_sleeping"]:
                break
            pause.wait(0.1)
        else:
            pytest.fail("it did not fall asleep")
        body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "none"}
        reply = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
        assert reply.json()["choices"][0]["message"]["content"] == SENTENCE

    def test_loads_before_it_answers(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory("heavy", wait=False, ctx_size=512, parallel=1)
        phases: list[str] = []
        statuses: set[int] = set()

        def progress(phase: str, seconds: float) -> None:
            phases.append(phase)
            if phase == "loading":
                reply = requests.get(f"{server.url}/v1/models", timeout=10)
                statuses.add(reply.status_code)

        server.wait_ready(DEADLINE * 2, progress)
        assert phases == sorted(phases, reverse=True)  # starting, then loading
        assert 503 in statuses
        assert requests.get(f"{server.url}/health", timeout=10).status_code == 200

    def test_a_damaged_model(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory("broken", wait=False)
        with pytest.raises(LlamaServerError, match="ended before it was ready") as caught:
            server.wait_ready(DEADLINE)
        assert "corrupted or incomplete" in str(caught.value)
        assert server.returncode not in (None, 0)

    def test_a_given_port_that_is_taken(
        self, llama: LlamaServer, llama_factory: LlamaFactory
    ) -> None:
        port = int(llama.url.rpartition(":")[2])
        with pytest.raises(LlamaServerError, match=f"port {port} is taken"):
            llama_factory(port=port)

    def test_a_given_port_that_is_free(self, llama_factory: LlamaFactory, closed_port: int) -> None:
        server = llama_factory(wait=False, port=closed_port)
        assert server.url == f"http://127.0.0.1:{closed_port}"

    @POSIX
    def test_kill(self, llama_factory: LlamaFactory) -> None:
        server = llama_factory()
        server.kill()
        assert server.returncode == -9
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{server.url}/health", timeout=10)

    def test_an_orphan_ends(self, model_path: Callable[[Variant], Path], llama: Any) -> None:
        code = (
            "import sys; from pathlib import Path\n"
            "from provider_llamacpp.local.llama import LlamaOptions, LlamaServer\n"
            "server = LlamaServer(LlamaOptions(model=Path(sys.argv[1]), threads=1))\n"
            "server.start(); server.wait_ready(30)\n"
            "print(server.url, flush=True); sys.stdin.read()\n"
        )
        command = [sys.executable, "-c", code, str(model_path("demo"))]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as parent:
            assert parent.stdout is not None
            url = parent.stdout.readline().strip()
            requests.get(f"{url}/health", timeout=10)
            parent.kill()
        pause = threading.Event()
        for _ in range(300):
            try:
                requests.get(f"{url}/health", timeout=10)
            except requests.ConnectionError:
                return
            pause.wait(0.1)
        pytest.fail("it lives on")


class TestProgram:
    """With the llama-server program itself."""

    def test_router_mode(
        self, llama_program: str, llama_factory: LlamaFactory, tmp_path: Path, model_path: Any
    ) -> None:
        for variant in ("demo", "loop"):
            (tmp_path / f"{variant}.gguf").write_bytes(model_path(variant).read_bytes())
        server = llama_factory(models_dir=tmp_path, source="program")
        rows = requests.get(f"{server.url}/v1/models", timeout=10).json()["data"]
        assert {row["id"] for row in rows} == {"demo", "loop"}
        assert {row["status"]["value"] for row in rows} == {"unloaded"}
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Hi"}],
            "reasoning_effort": "none",
        }
        reply = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.json()["choices"][0]["message"]["content"] == SENTENCE

    def test_more_arguments(self, llama_program: str, llama_factory: LlamaFactory) -> None:
        server = llama_factory(source="program", extra=("--no-webui", "--seed", "7"))
        props = requests.get(f"{server.url}/props", timeout=10).json()
        assert props["default_generation_settings"]["params"]["seed"] == 7


@POSIX
class TestStandIn:
    def test_the_arguments(self, stand_in: StandIn) -> None:
        options: dict[str, Any] = {
            "model": stand_in.model,
            "ctx_size": 512,
            "parallel": 2,
            "batch": 64,
            "threads": 1,
            "embeddings": True,
            "pooling": "mean",
            "alias": "x",
            "api_key": "secret",
            "jinja": True,
            "metrics": True,
            "slots": False,
            "sleep_idle_seconds": 9,
            "kv_unified": False,
            "extra": ("--seed", "7"),
        }
        with stand_in.server(**options) as server:
            server.wait_ready(DEADLINE)
            assert server.source == "program"
            assert server.program == str(stand_in.path)
        [[args, key]] = stand_in.starts()
        port = server.url.rpartition(":")[2]
        words = f"--host 127.0.0.1 --port {port} -c 512 -np 2 -ub 64 -t 1 --pooling mean --alias x"
        words += " --sleep-idle-seconds 9 --embeddings --metrics --no-kv-unified --jinja --no-slots"
        assert args == ["-m", str(stand_in.model), *words.split(), "--seed", "7"]
        assert key == "secret"

    def test_unset_options_are_not_passed(self, stand_in: StandIn, tmp_path: Path) -> None:
        with stand_in.server(models_dir=tmp_path, embeddings=False) as server:
            server.wait_ready(DEADLINE)
        with stand_in.server(hugging_face="user/name") as server:
            server.wait_ready(DEADLINE)
        first, second = (args for args, _ in stand_in.starts())
        assert first[:-1] == ["--models-dir", str(tmp_path), "--host", "127.0.0.1", "--port"]
        assert second[:2] == ["-hf", "user/name"]

    def test_waits_while_it_loads(self, stand_in: StandIn) -> None:
        phases = []
        with stand_in.server({"FAKE_HEALTH": "503 503 500 200"}) as server:
            server.wait_ready(DEADLINE, lambda phase, seconds: phases.append((phase, seconds)))
        assert [phase for phase, _ in phases if phase == "loading"] == ["loading"] * 3
        assert [seconds for _, seconds in phases] == sorted(seconds for _, seconds in phases)

    def test_waits_no_longer_than_told(self, stand_in: StandIn) -> None:
        with stand_in.server({"FAKE_HEALTH": "503"}) as server:
            with pytest.raises(LlamaServerError, match=r"did not .* within 0 s"):
                server.wait_ready(0)
            loading = threading.Event()

            def progress(phase: str, seconds: float) -> None:
                if phase == "loading":
                    loading.set()
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                server.wait_ready(DEADLINE, progress)
            with pytest.raises(LlamaServerError, match=r"get ready \(status 503\) within 0 s"):
                server.wait_ready(0)

    def test_looks_less_often_later(
        self, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = iter(range(100))
        fake = SimpleNamespace(monotonic=lambda: float(next(clock)))
        monkeypatch.setattr("provider_llamacpp.local.llama.time", fake)
        with stand_in.server({"FAKE_HEALTH": "503 503 200"}) as server:
            server.wait_ready(99)

    def test_takes_another_port_when_one_is_snatched(self, stand_in: StandIn) -> None:
        with stand_in.server({"FAKE_TAKEN": "2"}) as server:
            server.wait_ready(DEADLINE)
            starts = stand_in.starts()
            assert len(starts) == 3
            assert starts[-1][0][starts[-1][0].index("--port") + 1] in server.url

    def test_gives_up_in_the_end(self, stand_in: StandIn, closed_port: int) -> None:
        with (
            stand_in.server({"FAKE_TAKEN": "9"}) as server,
            pytest.raises(LlamaServerError, match="couldn't bind"),
        ):
            server.wait_ready(DEADLINE)
        assert len(stand_in.starts()) == 3
        with (
            stand_in.server({"FAKE_TAKEN": "9"}, model=stand_in.model, port=closed_port) as server,
            pytest.raises(LlamaServerError, match=r"exit code 1\)"),
        ):
            server.wait_ready(DEADLINE)
        assert len(stand_in.starts()) == 4

    def test_last_words_without_the_key(self, stand_in: StandIn) -> None:
        server = stand_in.server({"FAKE_DIES": "7"}, model=stand_in.model, api_key="secret")
        with server, pytest.raises(LlamaServerError) as caught:
            server.wait_ready(DEADLINE)
        assert str(caught.value) == (
            "llama-server ended before it was ready (exit code 7)"
            "\n  first words\n  last words, with ***"
        )
        assert server.log_tail(1) == ["last words, with ***"]

    def test_terminate(self, stand_in: StandIn) -> None:
        with stand_in.server() as server:
            server.wait_ready(DEADLINE)
            server.terminate()
            with pytest.raises(LlamaServerError, match="SIGTERM"):
                while True:
                    server.wait_ready(DEADLINE)

    def test_a_program_that_cannot_run(self, stand_in: StandIn) -> None:
        stand_in.path.write_text("#!/nowhere/to/be/found\n")
        with pytest.raises(LlamaServerError, match=r"cannot run .*: No such file"):
            stand_in.server().start()


class TestSources:
    def test_a_given_address(self, llama: LlamaServer) -> None:
        with LlamaServer(api_url=f"{llama.url}/v1/") as server:
            server.wait_ready(DEADLINE)
            assert (server.source, server.url) == ("api_url", llama.url)
            assert server.pid is server.returncode is None
            assert server.log_tail() == []
            server.terminate()
            server.kill()
        assert requests.get(f"{llama.url}/health", timeout=10).status_code == 200

    def test_a_given_address_that_is_none(self) -> None:
        with pytest.raises(ProviderError, match="api_url"):
            LlamaServer(api_url="nonsense")

    def test_a_given_address_that_is_silent(self, closed_port: int) -> None:
        url = f"http://127.0.0.1:{closed_port}"
        seen: list[str] = []
        with (
            LlamaServer(api_url=url) as server,
            pytest.raises(LlamaServerError, match=r"did not answer within 0\.05 s"),
        ):
            server.wait_ready(0.05, lambda phase, seconds: seen.append(phase))
        assert set(seen) == {"starting"}

    def test_one_that_is_running(
        self, monkeypatch: pytest.MonkeyPatch, closed_port: int, tmp_path: Path
    ) -> None:
        with Peer(503, b'{"error": {}}') as peer:
            assert find_running((closed_port, peer.port)) == peer.url
            monkeypatch.setattr(llama_module, "find_running", lambda: peer.url)
            server = LlamaServer(use_running=True)
            assert (server.source, server.url) == ("running", peer.url)
        monkeypatch.setattr(llama_module, "find_running", lambda: None)
        with pytest.raises(LlamaServerError, match="no model file"):
            LlamaServer(LlamaOptions(model=tmp_path / "none.gguf"), use_running=True)

    @pytest.mark.parametrize(
        ("status", "body"), [(200, b"<html>"), (404, b"{}"), (302, b"{}"), (200, b"[]")]
    )
    def test_something_else_that_is_running(self, status: int, body: bytes) -> None:
        with Peer(status, body) as peer:
            assert find_running((peer.port,)) is None

    def test_proxies_of_the_environment_are_not_used(
        self, monkeypatch: pytest.MonkeyPatch, closed_port: int
    ) -> None:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with Peer(200, b"{}") as peer:
            assert find_running((peer.port,)) == peer.url

    @POSIX
    def test_the_program(
        self, stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("provider_llamacpp.local.llama.PACKAGE", "no_such_package")
        assert find_program(stand_in.environ) == str(stand_in.path)
        assert find_program({"PATH": str(tmp_path)}) == str(stand_in.path)
        assert find_program({"PATH": "", "LLAMA_SERVER_BIN": ""}) is None
        named = {"PATH": str(tmp_path), "LLAMA_SERVER_BIN": "llama-server"}
        assert find_program(named) == str(stand_in.path)
        with pytest.raises(LlamaServerError, match="LLAMA_SERVER_BIN is nothing, which is no"):
            find_program({"PATH": str(tmp_path), "LLAMA_SERVER_BIN": "nothing"})

    def test_the_program_of_a_package(
        self, stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "stand_in_bin.py"
        package.write_text(f"def get_binary_path():\n    return {str(stand_in.path)!r}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr("provider_llamacpp.local.llama.PACKAGE", "stand_in_bin")
        try:
            assert find_program({"PATH": ""}) == str(stand_in.path)
            assert find_program({"PATH": "", "LLAMA_SERVER_BIN": sys.executable}) == sys.executable
            del sys.modules["stand_in_bin"].get_binary_path  # type: ignore[attr-defined]
            assert find_program({"PATH": ""}) is None
        finally:
            sys.modules.pop("stand_in_bin", None)

    def test_the_package_without_the_program(
        self, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("xllamacpp")
        monkeypatch.setattr("provider_llamacpp.local.llama.PACKAGE", "no_such_package")
        server = LlamaServer(LlamaOptions(model=stand_in.model), environ={"PATH": ""})
        assert (server.source, server.program) == ("xllamacpp", None)

    def test_neither(self, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        none = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
        monkeypatch.setattr("provider_llamacpp.local.llama.importlib", none)
        with pytest.raises(LlamaServerError, match=r"no llama-server found.*LLAMA_SERVER_BIN"):
            LlamaServer(LlamaOptions(model=stand_in.model), environ={"PATH": ""})

    def test_the_program_is_wanted_and_missing(
        self, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("provider_llamacpp.local.llama.PACKAGE", "no_such_package")
        with pytest.raises(LlamaServerError, match="no llama-server program on PATH"):
            LlamaServer(LlamaOptions(model=stand_in.model), source="program", environ={"PATH": ""})

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"model": Path("/none.gguf")}, "no model file"),
            ({"models_dir": Path("/none")}, "no directory of models"),
            ({}, "no model to serve"),
            ({"hugging_face": "user/name"}, "xllamacpp serves one model file only"),
            ({"models_dir": Path()}, "xllamacpp serves one model file only"),
            ({"model": Path(__file__), "extra": ("-v",)}, "xllamacpp serves one model file only"),
        ],
    )
    def test_nothing_to_serve(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(LlamaServerError, match=words):
            LlamaServer(LlamaOptions(**options), source="xllamacpp")

    def test_a_start_that_was_not_made_is_stopped(self) -> None:
        server = LlamaServer(LlamaOptions(model=Path(__file__)), source="xllamacpp")
        server.stop()
        assert server.pid is None
