"""Real llama-servers for the tests, started when the first test asks for one.

``llama`` is one server with the demo model, shared by all tests: 4 slots of 8192 tokens, the model
id ``demo``, embeddings, metrics and slots on, no API key. ``llama_factory`` starts more, for one
test. Both take the ``llama-server`` program when there is one (``LLAMA_SERVER_BIN`` or PATH), else
``xllamacpp``. Tests that need the program itself ask for ``llama_program``.

What takes its minutes is marked ``thorough`` and runs with ``--thorough`` only, which also tries
ten times as many examples of a property: ``make thorough``, ``make check`` and CI do.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

import hypothesis
import pytest

from provider_llamacpp.local.llama import PROGRAM_VARIABLE, LlamaOptions, LlamaServer, find_program
from provider_llamacpp.local.model import Variant, write_model

READY_SECONDS = 60.0

# A busy machine is slow, and that is no fault of the code.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=30)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=300)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also what takes its minutes")


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported: a property takes its settings when it is made."""
    hypothesis.settings.load_profile("thorough" if config.getoption("--thorough") else "quick")


class LlamaFactory(Protocol):
    """Start a server that ends with the test: ``llama_factory("slow", parallel=1)``.

    Without ``model`` or ``models_dir`` among the options it serves the variant, under the
    variant's name, on one thread. ``wait=False`` returns before the model is loaded.
    """

    def __call__(
        self,
        variant: Variant = "demo",
        *,
        source: Literal["program", "xllamacpp"] | None = None,
        wait: bool = True,
        **options: Any,
    ) -> LlamaServer: ...


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark by fixture, so that no test can forget it; leave out what was not asked for."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "llama" in fixtures or "llama_factory" in fixtures:
            item.add_marker(pytest.mark.llama)
        if "llama_program" in fixtures:
            item.add_marker(pytest.mark.llama_bin)
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _need_a_server() -> None:
    if find_program(os.environ) is None and importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("no llama-server on PATH, and xllamacpp is not installed")


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], Path]:
    """Path of a model variant, written when first asked for."""
    directory = tmp_path_factory.mktemp("models")
    return lambda variant: write_model(directory / f"{variant}.gguf", variant)


@pytest.fixture(scope="session")
def llama(model_path: Callable[[Variant], Path]) -> Iterator[LlamaServer]:
    """The shared server; tests must leave it as they found it, idle and awake."""
    _need_a_server()
    options = LlamaOptions(
        model=model_path("demo"),
        alias="demo",
        ctx_size=4 * 8192,
        parallel=4,
        threads=1,
        embeddings=True,
        pooling="mean",
        metrics=True,
    )
    with LlamaServer(options) as server:
        server.wait_ready(READY_SECONDS)
        yield server


@pytest.fixture
def llama_factory(model_path: Callable[[Variant], Path]) -> Iterator[LlamaFactory]:
    """Starts servers for one test; see :class:`LlamaFactory`."""
    _need_a_server()
    with ExitStack() as stack:

        def start(
            variant: Variant = "demo",
            *,
            source: Literal["program", "xllamacpp"] | None = None,
            wait: bool = True,
            **options: Any,
        ) -> LlamaServer:
            if "model" not in options and "models_dir" not in options:
                options = {"model": model_path(variant), "alias": variant, **options}
            server = LlamaServer(LlamaOptions(**{"threads": 1, **options}), source=source)
            stack.enter_context(server)
            if wait:
                server.wait_ready(READY_SECONDS)
            return server

        yield start


@pytest.fixture(scope="session")
def llama_program() -> str:
    """Path of the llama-server program; skips where there is none."""
    program = find_program(os.environ)
    if program is None:
        pytest.skip(f"no llama-server on PATH, and {PROGRAM_VARIABLE} is not set")
    return program
