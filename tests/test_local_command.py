"""``local``: the embedded stack kept up, and what is told meanwhile."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from provider_llamacpp import Settings, cli
from provider_llamacpp.commands import local
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.commands.terminal import Terminal
from provider_llamacpp.local.stack import LocalStack

PATIENCE = 60
pytestmark = pytest.mark.timeout(120)


# What a script starts in its background ignores SIGINT, and so do the children of that.
HEARING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from provider_llamacpp.cli import main
sys.exit(main())
"""


@contextmanager
def running(*arguments, env=None):
    """The command in a process of its own, and its output once it is up."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEARING, "local", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    lines = []
    try:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("Ctrl-C"):
                break
        yield process, lines
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def url_in(lines):
    (line,) = [each for each in lines if "III_URL=" in each]
    return line.partition("=")[2]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_ends_with_code_0(llama, number):
    with running("--port", "0", "--api-url", llama.url) as (process, lines):
        settings = Settings(url=url_in(lines))
        with Caller(settings) as caller:
            status = caller.call("provider::llamacpp::status", {})
            assert status["server"]["url"] == llama.url
            models = caller.call("router::models::list", {})["models"]
            assert [each["id"] for each in models] == ["demo"]
        process.send_signal(number)
        _, told = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "Traceback" not in told


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_the_pasted_lines_work(llama):
    with running("--port", "0", "--api-url", llama.url) as (process, lines):
        export, chat, status = [each.strip() for each in lines if each.startswith("  ")][:3]
        assert export.startswith("export III_URL=ws://127.0.0.1:")
        assert chat == 'provider-llamacpp chat "Hello"'
        env = {**os.environ, "III_URL": url_in(lines)}
        for words in (["chat", "Hello"], [*status.split()[1:], "--once"]):
            done = subprocess.run(
                [sys.executable, "-m", "provider_llamacpp", *words],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                env=env,
            )
            assert done.returncode == 0, done.stderr
            assert "demo" in done.stdout
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


def test_a_server_of_its_own_ends_with_it(model_path, llama):
    with running("--port", "0", "--model", str(model_path("demo"))) as (process, lines):
        text = "\n".join(lines)
        assert "started from" in text
        assert "model         demo (" in text
        (port,) = {int(each) for each in re.findall(r"http://127\.0\.0\.1:([0-9]+)", text)}
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE):
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


# --- keeping it up ---------------------------------------------------------------------------


class Worker:
    """Runs until ``steps`` are over; an exception among them is raised."""

    def __init__(self, *steps, streams=0):
        self.steps = list(steps)
        self.streams = streams

    def wait(self, timeout):
        step = self.steps.pop(0)
        if isinstance(step, type):
            raise step
        return step

    def stats(self):
        return {"server": {"models": []}, "active_streams": self.streams}

    def stop(self, drain=None):
        self.stops = [*getattr(self, "stops", []), drain]


def kept(capsys, worker, **llama):
    llama = {
        "url": "http://127.0.0.1:1",
        "source": "running",
        "program": None,
        "returncode": None,
        "log_tail": lambda lines: ["last words"],
        **llama,
    }
    stack = SimpleNamespace(settings=Settings(), worker=worker, llama=SimpleNamespace(**llama))
    terminal = Terminal(sys.stdout)
    notes = Terminal(sys.stderr)
    code = local._keep(stack, Settings(log_level="error"), terminal, notes, None)
    return code, capsys.readouterr()


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """The command sets up the logging of its process, which here is that of the tests."""
    import logging

    root, ours = logging.getLogger(), logging.getLogger("provider_llamacpp")
    before = root.handlers[:], root.level, ours.level
    handler = signal.getsignal(signal.SIGTERM)
    yield
    root.handlers[:], level, own = before
    root.setLevel(level)
    ours.setLevel(own)
    signal.signal(signal.SIGTERM, handler)


def test_it_ends_when_the_worker_does(capsys):
    code, told = kept(capsys, Worker(False, True))
    assert code == 0
    assert "was running already" in told.out


def test_a_server_that_dies_ends_it_with_its_last_words(capsys):
    code, told = kept(capsys, Worker(False), returncode=9)
    assert code == 1
    assert "llama-server has ended" in told.err
    assert "last words" in told.err


@pytest.mark.parametrize("streams", [0, 2])
def test_an_interrupt_waits_for_streams_and_says_so(capsys, streams):
    worker = Worker(KeyboardInterrupt, streams=streams)
    code, told = kept(capsys, worker)
    assert code == 0
    assert worker.stops == [None]
    assert ("Ctrl-C again" in told.err) is bool(streams)


class Draining(Worker):
    """Waits for its streams until it is told to hurry."""

    def __init__(self):
        super().__init__(KeyboardInterrupt, streams=1)
        self.hurry = threading.Event()
        self.ended = threading.Event()

    def stop(self, drain=None):
        super().stop(drain)
        if drain == 0:
            self.hurry.set()
            assert self.ended.wait(PATIENCE)
        else:
            # The second Ctrl-C, which reaches the main thread.
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert self.hurry.wait(PATIENCE)
            self.ended.set()


def test_a_second_interrupt_ends_the_waiting_and_not_the_stop(capsys):
    worker = Draining()
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, _ = kept(capsys, worker)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0
    assert worker.stops == [None, 0]
    assert worker.ended.is_set()


def test_an_interrupt_while_it_starts(monkeypatch, llama):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStack, "__enter__", interrupted)
    assert cli.main(["local", "--port", "0", "--api-url", llama.url]) == 0


def test_once_it_is_up_it_is_kept(monkeypatch, llama, capsys):
    seen = []

    def keep(stack, settings, terminal, notes, taken):
        assert taken is None
        seen.append(local.facts(stack))
        return 5

    monkeypatch.setattr(local, "_keep", keep)
    assert cli.main(["local", "--port", "0", "--api-url", llama.url]) == 5
    assert [(each["url"], each["origin"]) for each in seen] == [(llama.url, "as named")]


def test_outside_of_the_main_thread_signals_are_left_alone(monkeypatch, llama):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStack, "__enter__", interrupted)
    codes = []
    thread = threading.Thread(target=lambda: codes.append(cli.main(["local", "--port", "0"])))
    thread.start()
    thread.join(PATIENCE)
    assert codes == [0]


# --- arguments -------------------------------------------------------------------------------


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_is_taken(taken, capsys):
    assert cli.main(["local", "--port", str(taken)]) == 1
    assert f"--port {taken} cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["99999", "-1", "x"])
def test_a_port_that_cannot_exist(capsys, port):
    with pytest.raises(SystemExit):
        cli.main(["local", "--port", port])
    assert "--port" in capsys.readouterr().err


def test_the_usual_port_gives_way(taken, monkeypatch):
    monkeypatch.setattr(local, "DEFAULT_URL", f"ws://127.0.0.1:{taken}")
    assert local.choose_port(None) == 0
    assert local.choose_port(0) == 0


def test_the_usual_port_if_it_is_free(taken, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(local, "DEFAULT_URL", f"ws://127.0.0.1:{port}")
    assert local.choose_port(None) == port


@pytest.mark.parametrize("model", ["./none.gguf", "/none/model.gguf", "none.gguf", "a/b/c"])
def test_a_model_that_is_not_there_is_not_looked_for_elsewhere(capsys, model):
    assert cli.main(["local", "--model", model]) == 1
    told = capsys.readouterr().err
    assert model in told
    assert "OWNER/NAME" in told


@pytest.mark.parametrize("model", [None, "ggml-org/Qwen3-0.6B-GGUF", "a/b:Q4_K_M"])
def test_names_of_hugging_face(model):
    local._check_model(model)


def test_paths(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"")
    local._check_model(str(tmp_path))
    local._check_model(str(tmp_path / "m.gguf"))


# --- waiting ---------------------------------------------------------------------------------


class Progress:
    def __init__(self):
        self.notes = []

    def update(self, done, *, total=None, note=""):
        self.notes.append(note)


def test_loading_tells_the_size_of_the_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"x" * 2_500_000)
    progress = Progress()
    waiting = local.Waiting(progress, str(path), {})
    waiting.update("starting", 0.1)
    waiting.update("loading", 0.2)
    assert progress.notes == ["starting", "loading the model (2.5 MB)"]


def test_the_demo_and_a_directory_have_no_size(tmp_path):
    for model in (None, str(tmp_path)):
        progress = Progress()
        local.Waiting(progress, model, {}).update("loading", 1.0)
        assert progress.notes == ["loading the model"]


def test_a_download_tells_how_far_it_is(tmp_path):
    blobs = tmp_path / "models--someone--tiny" / "blobs"
    progress = Progress()
    waiting = local.Waiting(progress, "someone/tiny:Q4_0", {"LLAMA_CACHE": str(tmp_path)})
    waiting.update("starting", 0.5)
    blobs.mkdir(parents=True)
    part = blobs / "abc.downloadInProgress"
    part.write_bytes(b"x" * 1_000_000)
    waiting.update("starting", 1.0)
    part.write_bytes(b"x" * 5_000_000)
    waiting.update("starting", 3.0)
    part.rename(blobs / "abc")
    waiting.update("loading", 4.0)
    assert progress.notes == [
        "starting",
        "downloading, 1 MB so far",
        "downloading, 5 MB so far, 2 MB/s",
        "loading the model",
    ]


def test_the_parts_of_a_download_are_added_and_old_ones_are_not(tmp_path):
    for name, length in (("a", 10), ("b", 20), ("old", 40)):
        (tmp_path / f"{name}.downloadInProgress").write_bytes(b"x" * length)
    old = tmp_path / "old.downloadInProgress"
    os.utime(old, (1, 1))
    (tmp_path / "whole").write_bytes(b"x")
    assert local.downloaded([tmp_path]) == 30
    assert local.downloaded([tmp_path], clock=time.time() + local.FRESH + 5) is None
    assert local.downloaded([tmp_path / "none"]) is None


def test_a_part_that_gets_its_name_meanwhile(tmp_path):
    (tmp_path / "a.downloadInProgress").symlink_to(tmp_path / "none")
    assert local.downloaded([tmp_path]) is None


def test_where_downloads_go():
    given = {
        "LLAMA_CACHE": "/l",
        "HF_HUB_CACHE": "/h",
        "HF_HOME": "/home/hf",
        "XDG_CACHE_HOME": "/x",
        "LOCALAPPDATA": "/w",
    }
    found = [str(each) for each in local.cache_folders("a/b:Q4", given)]
    assert found[:4] == [
        "/l/models--a--b/blobs",
        "/h/models--a--b/blobs",
        "/home/hf/hub/models--a--b/blobs",
        "/x/huggingface/hub/models--a--b/blobs",
    ]
    assert {"/l", "/x/llama.cpp", "/w/llama.cpp"} <= set(found)
    assert all(
        "models--a--b" in each or "llama.cpp" in each
        for each in map(str, local.cache_folders("a/b", {}))
    )


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of Hugging Face as llama-server asks for one file; sends half of it, then waits."""

    protocol_version = "HTTP/1.1"
    data = b""
    go = None

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if "/resolve/" not in path:
            return self._json(path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.send_header("ETag", '"e"')
        self.end_headers()
        if self.command == "GET":
            half = len(self.data) // 2
            self.wfile.write(self.data[:half])
            self.wfile.flush()
            assert self.go.wait(PATIENCE)
            self.wfile.write(self.data[half:])

    def _json(self, path):
        commit = "b" * 40
        lfs = {"oid": "a" * 64, "size": len(self.data), "pointerSize": 130}
        file = {"type": "file", "oid": "a" * 40, "size": len(self.data), "path": "m-q4_0.gguf"}
        refs = {"branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": commit}]}
        body = json.dumps([{**file, "lfs": lfs}] if "/tree/" in path else refs).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_real_download_is_seen(llama_program, model_path, tmp_path, monkeypatch):
    go = threading.Event()
    handler = type("OneFile", (Hub,), {"data": model_path("slow").read_bytes(), "go": go})
    hub = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    serving = threading.Thread(target=hub.serve_forever)
    serving.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}/")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))

    class Going(Progress):
        def update(self, done, *, total=None, note=""):
            super().update(done, note=note)
            if note.startswith("downloading"):
                go.set()

    progress = Going()
    waiting = local.Waiting(progress, "someone/tiny", os.environ)
    try:
        with LocalStack(model="someone/tiny", progress=waiting.update) as stack:
            assert stack.llama.source == "program"
            facts = local.facts(stack)
    finally:
        go.set()
        hub.shutdown()
        hub.server_close()
        serving.join()
    assert any(note.startswith("downloading") for note in progress.notes)
    assert llama_program in facts["origin"]
    assert len(facts["models"]) == 1


# --- what to paste ---------------------------------------------------------------------------


def a_server(*models, **more):
    return {
        "url": "http://127.0.0.1:8080",
        "origin": "was running already",
        "models": [{"id": each, "state": "loaded", "context_window": 4096} for each in models],
        "refused": False,
        "needs_key": False,
        **more,
    }


def test_the_lines_to_paste():
    lines = list(local.hints(Settings(url="ws://127.0.0.1:1"), a_server("demo"), windows=False))
    assert "  export III_URL=ws://127.0.0.1:1" in lines
    assert "model         demo (4096 tokens of context)" in lines
    body = lines[-3]
    assert body.startswith("    -d '")
    assert json.loads(body.partition("'")[2].rstrip("'"))["model"] == "demo"
    assert "Authorization" not in "\n".join(lines)


def test_another_id_and_a_key_are_in_the_lines():
    settings = Settings(id="pi5", api_key="very-secret")
    lines = list(local.hints(settings, a_server("demo", needs_key=True), windows=False))
    text = "\n".join(lines)
    assert "status --id pi5" in text
    assert 'chat --id pi5 "Hello"' in text
    assert '"Authorization: Bearer $PI5_API_KEY"' in text
    assert "very-secret" not in text


def test_a_usual_port_that_is_taken_is_told(taken, llama, monkeypatch, capsys):
    monkeypatch.setattr(local, "DEFAULT_URL", f"ws://127.0.0.1:{taken}")

    def interrupted(self, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr("provider_llamacpp.worker.ProviderWorker.wait", interrupted)
    assert cli.main(["local", "--api-url", llama.url, "--log-level", "error"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("engine        ws://127.0.0.1:")
    assert first.endswith(f" (port {taken} is taken)")


def test_the_lines_for_windows():
    server = a_server("demo", needs_key=True)
    text = "\n".join(local.hints(Settings(url="ws://127.0.0.1:1"), server, windows=True))
    assert "  set III_URL=ws://127.0.0.1:1" in text
    assert "%LLAMACPP_API_KEY%" in text
    assert '-d "{\\"model\\"' in text


def test_many_models_and_none():
    server = a_server(*(f"m{number}" for number in range(8)))
    server["models"][1]["state"] = "unloaded"
    text = "\n".join(local.hints(Settings(), server))
    assert "model         m1 (unloaded)" in text
    assert "and 3 more" in text
    assert "m6 (" not in text
    text = "\n".join(local.hints(Settings(), a_server(), windows=False))
    assert '"model":"default"' in text
    assert "model         none yet (provider-llamacpp doctor says why)" in text
    text = "\n".join(local.hints(Settings(id="pi5"), a_server(refused=True), windows=False))
    assert "model         none: llama-server refuses the key (set PI5_API_KEY)" in text
