"""A llama.cpp server out of the ``xllamacpp`` package, in a process of its own.

Run as ``python -m provider_llamacpp.local.xserver``: the first line on standard input is a JSON
object of options (see :func:`apply`), what follows is only waited for. When standard input ends,
because the parent closed it or died, the process ends too, but not while a model loads: the
package holds the interpreter all that time. It is no part of the worker, which never loads the
package, so a crash of the native code costs this process only.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

_FIELDS: Final[Mapping[str, str]] = {
    "port": "port",
    "ctx_size": "n_ctx",
    "batch": "n_ubatch",
    "parallel": "n_parallel",
    "kv_unified": "kv_unified",
    "embeddings": "embedding",
    "jinja": "use_jinja",
    "metrics": "endpoint_metrics",
    "slots": "endpoint_slots",
    "sleep_idle_seconds": "sleep_idle_seconds",
}


def apply(params: Any, options: Mapping[str, Any], poolings: Any) -> None:
    """Set ``options`` on the package's parameter object; None leaves a default as it is.

    :param options: ``model`` (path), ``threads``, ``alias``, ``api_key``, ``pooling`` ("mean", ...)
        and the names in the table above
    :param poolings: the package's enumeration of pooling types
    :raises AttributeError: this version of the package lacks a parameter, or knows no such pooling
    """
    given = {name: value for name, value in options.items() if value is not None}
    params.model.path = given["model"]
    params.hostnames = ["127.0.0.1"]
    for name, field in _FIELDS.items():
        if name in given:
            setattr(params, field, given[name])
    if "threads" in given:
        params.cpuparams.n_threads = given["threads"]
        params.cpuparams_batch.n_threads = given["threads"]
    if "alias" in given:
        params.model_alias = {given["alias"]}
    if "api_key" in given:
        params.api_keys = [given["api_key"]]
    if "pooling" in given:
        params.pooling_type = getattr(poolings, f"LLAMA_POOLING_TYPE_{given['pooling'].upper()}")


def serve(stdin: BinaryIO) -> int:
    """Serve until ``stdin`` ends; returns the exit code."""
    options = json.loads(stdin.readline())
    ended = threading.Event()

    def watch() -> None:
        stdin.read()
        ended.set()

    threading.Thread(target=watch, name="xserver-parent", daemon=True).start()
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    apply(params, options, xllamacpp.llama_pooling_type)
    try:
        server = xllamacpp.Server(params)
    except (RuntimeError, ValueError) as error:
        print(f"xllamacpp: {error}", file=sys.stderr, flush=True)
        return 1
    ended.wait()
    del server
    return 0


if __name__ == "__main__":  # pragma: no cover  (runs in a child process)
    # An interrupt at the terminal is for the parent, which ends this process in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = serve(sys.stdin.buffer)
    # No orderly shutdown: native threads and the blocked reader would only delay it.
    os._exit(code)
