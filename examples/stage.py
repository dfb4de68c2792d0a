"""The stage for the examples: engine, router and llama-server, all on this machine.

In production they are there already, and an application needs nothing of this file but the two
addresses: ``Settings(url="ws://...", api_url="http://...")``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.llama import LlamaOptions, LlamaServer
from provider_llamacpp.local.model import write_demo_model
from provider_llamacpp.local.router import LoopbackRouter


class Stage:
    """What is up: ``url`` of the engine, ``api_url`` of llama-server."""

    def __init__(self, engine: LoopbackEngine, api_url: str) -> None:
        self.url = engine.url
        self.api_url = api_url
        self._engine = engine

    def ask(self, text: str, *, provider: str = "llamacpp", **more: Any) -> str:
        """What somebody else on the bus gets for an answer, through router and worker."""
        content = [{"type": "text", "text": text}]
        message = {"role": "user", "content": content, "timestamp": int(time.time() * 1000)}
        request = {"provider": provider, "model": "demo", "messages": [message], **more}
        answer = self._engine.call("router::complete", request, timeout=60.0)
        return "".join(each.get("text", "") for each in answer["message"]["content"])


@contextmanager
def stage(api_url: str | None) -> Iterator[Stage]:
    """Set up for as long as the block lasts.

    :param api_url: of a llama-server that runs; None starts one with the demo model
    """
    with ExitStack() as stack:
        if api_url is None:
            api_url = stack.enter_context(demo_server())
        engine = stack.enter_context(LoopbackEngine())
        stack.enter_context(LoopbackRouter(engine.url))
        yield Stage(engine, api_url)


@contextmanager
def demo_server() -> Iterator[str]:
    """A llama-server with the demo model; its address."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_demo_model(Path(folder) / "demo.gguf")
        options = LlamaOptions(
            model=model,
            alias="demo",
            ctx_size=8192,
            parallel=2,
            kv_unified=True,
            threads=1,
            embeddings=True,
            pooling="mean",
        )
        with LlamaServer(options) as server:
            server.wait_ready(60.0)
            yield server.url


class StageApart:
    """The same in a process of its own, so that the figures of this one are the worker's alone."""

    def __init__(self, api_url: str | None) -> None:
        command = [sys.executable, __file__, *(["--api-url", api_url] if api_url else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self.url, self.api_url = self._line().split()

    def ask(self, text: str) -> str:
        """As :meth:`Stage.ask`."""
        assert self._process.stdin is not None
        print(text, file=self._process.stdin, flush=True)
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the stage has ended")
        return line.rstrip("\n")

    def __enter__(self) -> StageApart:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._process:  # its end of the pipe closes, and it ends
            pass


def arguments(description: str) -> argparse.ArgumentParser:
    """What every example takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--api-url", metavar="URL", help="a llama-server (default: start one)")
    return parser


def main() -> None:
    options = arguments("Keeps the stage up and asks what it is told, until its input ends.")
    with stage(options.parse_args().api_url) as here:
        print(here.url, here.api_url, flush=True)
        for line in sys.stdin:
            print(here.ask(line.rstrip("\n"), max_output_tokens=4), flush=True)


if __name__ == "__main__":
    main()
