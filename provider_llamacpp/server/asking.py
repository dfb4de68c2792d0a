"""One short question to llama-server on behalf of a bus call, and the failure its caller gets.

Failures leave as ``invocation_failed`` with the prefixes of provider protocol 9, which callers look
at: ``invalid_input``, ``provider/upstream`` (no answer), ``provider/upstream_status`` (the server's
own words), ``provider/bad_response`` and ``provider/config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..calls import Call
from ..errors import BusError, ProviderError
from ..events.classify import classify
from .upstream import Reply, Target, Upstream

Prefix = Literal[
    "invalid_input",
    "provider/upstream",
    "provider/upstream_status",
    "provider/bad_response",
    "provider/config",
]


def failure(prefix: Prefix, message: str) -> BusError:
    """What the caller gets. The router passes on a provider whose error text holds the name of a
    certain code, so the server's words must not smuggle it in."""
    message = message.replace("function_not_found", "function not found")
    return BusError("invocation_failed", f"{prefix}: {message}")


def failed(error: ProviderError) -> BusError:
    """What the caller gets if no answer came, or one that leads elsewhere."""
    if error.status is not None and error.status >= 400:
        return failure("provider/upstream_status", f"HTTP {error.status}: {error.message}")
    at_fault: Prefix = "provider/config" if error.kind == "permanent" else "provider/upstream"
    return failure(at_fault, error.message)


def refused(reply: Reply) -> BusError:
    """What the caller gets for an answer that is no success."""
    verdict = classify(reply.status, reply.body)
    error = failure("provider/upstream_status", f"HTTP {reply.status}: {verdict.message}")
    error.__cause__ = verdict  # for who is not asked over the bus, and wants to know the kind
    return error


def unsound(path: str, problem: str) -> BusError:
    """What the caller gets for an answer that is not what ``path`` gives."""
    return failure("provider/bad_response", f"{path}: {problem}")


def ask(
    upstream: Upstream,
    target: Target,
    method: str,
    path: str,
    payload: Mapping[str, Any] | None = None,
    *,
    timeout: float,
    call: Call | None,
    **options: Any,
) -> Reply:
    """The answer, whatever its status.

    :param timeout: seconds for all of it
    :param options: more for :meth:`~.upstream.Upstream.request`
    :raises BusError: ``invocation_failed``, if none came
    :raises Interrupted: if ``call`` is aborted
    """
    try:
        return upstream.request(
            target, method, path, payload, timeout=timeout, call=call, **options
        )
    except ProviderError as error:
        raise failed(error) from error


def read_json(reply: Reply, path: str) -> Any:
    """The JSON value of an answer.

    :raises BusError: ``invocation_failed``, if it is none
    """
    try:
        return reply.json()
    except ValueError as error:
        raise unsound(path, "the answer is no JSON") from error


def read_object(reply: Reply, path: str) -> Mapping[str, Any]:
    """The JSON object of an answer.

    :raises BusError: ``invocation_failed``, if it is none
    """
    value = read_json(reply, path)
    if not isinstance(value, dict):
        raise unsound(path, "the answer is no JSON object")
    return value
