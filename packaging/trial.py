"""Tries a worker as its users would: a program that runs elsewhere, all around it on this machine.

The engine and the router are the loopback ones of the package; llama-server is a stub that streams
words, or stays silent, as the question says. Needs ``.[local]``.
"""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.router import LoopbackRouter
from provider_llamacpp.settings import Settings

PROVIDER = "llamacpp"
WORDS = 40
SHORT, ENDLESS, SILENT = "a few words", "without end", "say nothing"
"""The questions: what the stub's answer is like."""
PAUSE = 0.01
"""Seconds between the words of the stub."""

ROW = {"id": "stub", "object": "model", "owned_by": "llamacpp", "meta": {"n_ctx_train": 4096}}
PROPS = {
    "total_slots": 4,
    "default_generation_settings": {"n_ctx": 4096},
    "modalities": {"vision": False, "audio": False},
    "chat_template": "{{ messages }}",
    "build_info": "b1-stub",
    "is_sleeping": False,
}
ANSWERS: dict[str, dict[str, Any]] = {
    "/health": {"status": "ok"},
    "/v1/models": {"object": "list", "data": [ROW]},
    "/props": PROPS,
}


class TrialError(Exception):
    """The worker did not do what it should."""


class Stub(ThreadingHTTPServer):
    """Streams, and knows whose answer was not waited for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.left: queue.Queue[str] = queue.Queue()
        """The questions whose asker left before the end."""
        self.asked: queue.Queue[str] = queue.Queue()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever leaves without a word was aborted."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        answer = ANSWERS.get(self.path.partition("?")[0])
        self._json(200 if answer else 404, answer or {"error": {"code": 404, "message": "no"}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v1/chat/completions":
            self._json(404, {"error": {"code": 404, "message": "no"}})
            return
        content = json.loads(body)["messages"][-1]["content"]
        question = content if isinstance(content, str) else content[0]["text"]
        self.server.asked.put(question)
        try:
            if question == SILENT:
                # The asker says no more: what comes next is its leaving.
                self.connection.recv(1)
                raise ConnectionResetError
            self._stream(WORDS if question == SHORT else None)
        except OSError:
            self.server.left.put(question)
            self.close_connection = True

    def _stream(self, words: int | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._event({"role": "assistant", "content": None})
        said = 0
        while said != words:
            self._event({"content": f" w{said}"})
            said += 1
            time.sleep(PAUSE)
        self._event({}, "stop")
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, delta: dict[str, Any], reason: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        chunk = {"choices": [choice], "id": "x", "model": "stub", "object": "chat.completion.chunk"}
        self._chunk(b"data: %s\n\n" % json.dumps(chunk).encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@dataclass(frozen=True)
class Seen:
    """What a trial showed."""

    start: float
    """Seconds from the call of the program until the router had its models."""
    streams: int
    """Answers that came whole."""
    tokens: int
    """Text deltas in them."""
    aborts: int
    """Calls aborted, of which the stub saw each end: one before its first byte, one in its text."""
    memory: Any
    """What ``look`` returned while it still ran."""


class Trial:
    """Engine, router and stub, for as long as the ``with`` block lasts.

    :param patience: seconds that anything may take
    """

    def __init__(self, patience: float = 60.0) -> None:
        self.patience = patience

    def run(
        self,
        command: Sequence[str],
        *,
        streams: int = 4,
        look: Callable[[int], Any] = lambda pid: None,
    ) -> Seen:
        """Start a worker, have it serve ``streams`` at once, abort two more, and end it.

        :param command: runs the worker; its flags are appended
        :param look: called with the process's id when all was served
        :raises TrialError: at the first thing that is not as it should be
        """
        with _place(self.patience) as (engine, router, stub):
            flags = ["--url", engine.url, "--api-url", stub.url]
            with tempfile.TemporaryFile("w+") as log:
                begun = time.monotonic()
                process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
                try:
                    models = router.wait_for_models(PROVIDER, self.patience)
                    start = time.monotonic() - begun
                    if [each["id"] for each in models] != ["stub"]:
                        raise TrialError(f"the router was told of these models: {models}")
                    with Caller(Settings(url=engine.url), timeout=self.patience) as caller:
                        tokens = self._serve(caller, streams)
                        aborts = self._abort(caller, stub, SILENT) + self._abort(
                            caller, stub, ENDLESS
                        )
                    memory = look(process.pid)
                    process.terminate()
                    if (code := process.wait(self.patience)) != 0:
                        raise TrialError(f"it ended with {code} after SIGTERM")
                except (TrialError, TimeoutError, queue.Empty, subprocess.TimeoutExpired) as error:
                    log.seek(0)
                    raise TrialError(f"{error!r}\n{log.read()[-4000:]}") from error
                finally:
                    process.kill()
                    process.wait()
            return Seen(start, streams, tokens, aborts, memory)

    def _serve(self, caller: Caller, streams: int) -> int:
        """Several at once, each checked word by word."""
        asked = [_Chat(caller, SHORT, self.patience) for _ in range(streams)]
        expected = "".join(f" w{place}" for place in range(WORDS))
        deltas = 0
        for chat in asked:
            frames = list(chat.frames)
            words = [each["delta"] for each in frames if each["type"] == "text_delta"]
            if "".join(words) != expected or frames[-1]["type"] != "done":
                raise TrialError(f"a stream came out as {words}, {frames[-1:]}")
            deltas += len(words)
            chat.end()
        return deltas

    def _abort(self, caller: Caller, stub: Stub, question: str) -> int:
        chat = _Chat(caller, question, self.patience)
        while stub.asked.get(timeout=self.patience) != question:
            pass
        if question == ENDLESS:
            next(each for each in chat.frames if each["type"] == "text_delta")
        caller.call("router::abort", {"request_id": chat.id}, timeout=self.patience)
        if stub.left.get(timeout=self.patience) != question:
            raise TrialError("another stream than the aborted one was left")
        chat.end()
        return 1


class _Chat:
    """One question to the router, asked on a thread of its own."""

    def __init__(self, caller: Caller, question: str, patience: float) -> None:
        writer, self.frames = caller.open_channel()
        self.id = str(uuid.uuid4())
        self._patience = patience
        content = [{"type": "text", "text": question}]
        request = {
            "request_id": self.id,
            "provider": PROVIDER,
            "model": "stub",
            "messages": [{"role": "user", "content": content, "timestamp": 1}],
            "writer_ref": writer,
        }
        self._asking = threading.Thread(
            target=lambda: caller.call("router::chat", request, timeout=patience)
        )
        self._asking.start()

    def end(self) -> None:
        """Wait for the call's result and the end of its channel."""
        for _ in self.frames:
            pass
        self._asking.join(self._patience)
        if self._asking.is_alive():
            raise TrialError("a call did not return")


@contextmanager
def _place(patience: float) -> Iterator[tuple[LoopbackEngine, LoopbackRouter, Stub]]:
    with LoopbackEngine() as engine, LoopbackRouter(engine.url) as router, Stub() as stub:
        serving = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        try:
            yield engine, router, stub
        finally:
            stub.shutdown()
            serving.join(patience)
