"""The child that serves a model with ``xllamacpp``, with a stand-in for that package."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from provider_llamacpp.local import xserver

POOLINGS = SimpleNamespace(LLAMA_POOLING_TYPE_MEAN=1, LLAMA_POOLING_TYPE_LAST=3)


def parameters() -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
    )


def test_applies_what_is_given() -> None:
    params = parameters()
    options = {
        "model": "/m.gguf",
        "port": 1,
        "ctx_size": 2,
        "parallel": 3,
        "threads": 4,
        "batch": 5,
        "kv_unified": False,
        "embeddings": True,
        "jinja": True,
        "metrics": True,
        "slots": False,
        "sleep_idle_seconds": 6,
        "alias": "name",
        "api_key": "key",
        "pooling": "mean",
    }
    xserver.apply(params, options, POOLINGS)
    assert vars(params.model) == {"path": "/m.gguf"}
    assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 4
    assert {k: v for k, v in vars(params).items() if not isinstance(v, SimpleNamespace)} == {
        "hostnames": ["127.0.0.1"],
        "port": 1,
        "n_ctx": 2,
        "n_parallel": 3,
        "n_ubatch": 5,
        "kv_unified": False,
        "embedding": True,
        "use_jinja": True,
        "endpoint_metrics": True,
        "endpoint_slots": False,
        "sleep_idle_seconds": 6,
        "model_alias": {"name"},
        "api_keys": ["key"],
        "pooling_type": 1,
    }


def test_leaves_defaults_alone() -> None:
    params = parameters()
    xserver.apply(params, {"model": "/m.gguf", "threads": None, "api_key": None}, POOLINGS)
    assert vars(params.cpuparams) == {}
    assert vars(params).keys() == {"model", "cpuparams", "cpuparams_batch", "hostnames"}


def test_knows_the_poolings() -> None:
    with pytest.raises(AttributeError):
        xserver.apply(parameters(), {"model": "/m.gguf", "pooling": "sum"}, POOLINGS)


def package(server: Any) -> Any:
    return SimpleNamespace(CommonParams=parameters, Server=server, llama_pooling_type=POOLINGS)


def test_serves_until_its_input_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    served = threading.Event()
    monkeypatch.setitem(sys.modules, "xllamacpp", package(lambda params: served.set()))
    reader, writer = os.pipe()
    codes: list[int] = []
    with open(reader, "rb") as stdin, open(writer, "wb", buffering=0) as stdout:
        thread = threading.Thread(target=lambda: codes.append(xserver.serve(stdin)))
        thread.start()
        stdout.write(json.dumps({"model": "/m.gguf"}).encode() + b"\n")
        assert served.wait(30)
        assert thread.is_alive()
        stdout.close()
        thread.join(30)
    assert codes == [0]


def test_says_why_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(params: Any) -> None:
        raise RuntimeError("Failed to init server")

    monkeypatch.setitem(sys.modules, "xllamacpp", package(fail))
    assert xserver.serve(io.BytesIO(b'{"model": "/m.gguf"}\n')) == 1
    assert capsys.readouterr().err == "xllamacpp: Failed to init server\n"
