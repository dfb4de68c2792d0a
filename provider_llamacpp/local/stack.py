"""The whole path on one machine: engine, router, llama-server and worker, for trying it.

Not for production: the engine and the router are the loopback ones of this package.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ..errors import ProviderLlamacppError
from ..settings import Settings
from ..worker import ProviderWorker
from .engine import LoopbackEngine
from .llama import LlamaOptions, LlamaServer
from .model import write_demo_model
from .router import LoopbackRouter

Progress = Callable[[str, float], None]


class LocalStack:
    """Engine, router, llama-server and worker, for as long as the ``with`` block lasts.

    :param settings: those of the worker; ``url`` is replaced, and ``api_url``, where given, is
        taken for a server that runs already
    :param model: a GGUF file, a directory of them (router mode), or a Hugging Face name for
        ``-hf``; None takes a server that listens on a usual port, else the demo model
    :param ready_timeout: seconds for the model to load
    :param progress: told what is awaited, and for how many seconds already
    :param engine_port: of the engine; 0 takes a free one
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        model: str | None = None,
        ready_timeout: float = 300.0,
        progress: Progress | None = None,
        engine_port: int = 0,
    ) -> None:
        self.settings = settings or Settings()
        self._model = model
        self._ready_timeout = ready_timeout
        self._progress = progress
        self._engine_port = engine_port
        self._stack = ExitStack()
        self.engine: LoopbackEngine
        self.router: LoopbackRouter
        self.llama: LlamaServer
        self.worker: ProviderWorker

    def __enter__(self) -> LocalStack:
        with self._stack as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        wanted = self.settings
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="provider-llamacpp-")))
        self.llama = stack.enter_context(
            LlamaServer(
                self._options(folder),
                api_url=wanted.api_url,
                use_running=self._model is None,
            )
        )
        self.llama.wait_ready(self._ready_timeout, self._progress)
        self.engine = stack.enter_context(LoopbackEngine(port=self._engine_port))
        self.router = stack.enter_context(LoopbackRouter(self.engine.url))
        self.settings = replace(wanted, url=self.engine.url, api_url=self.llama.url, token=None)
        self.worker = stack.enter_context(ProviderWorker(self.settings))
        if not self.worker.wait_ready(30.0):
            why = self.worker.stats()["last_error"] or "no reason given"
            raise ProviderLlamacppError(f"the worker did not get ready: {why}")

    def _options(self, folder: Path) -> LlamaOptions:
        if self._model is None:
            path = write_demo_model(folder / "demo.gguf")
            # Half a core of a small board is enough for a model of this size.
            return LlamaOptions(
                model=path, alias="demo", parallel=2, ctx_size=8192, jinja=True, threads=1
            )
        path = Path(self._model).expanduser()
        if path.is_dir():
            return LlamaOptions(models_dir=path, jinja=True)
        if path.is_file() or path.suffix == ".gguf":
            return LlamaOptions(model=path, alias=path.stem, jinja=True)
        return LlamaOptions(hugging_face=self._model, jinja=True)
