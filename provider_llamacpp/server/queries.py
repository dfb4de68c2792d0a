"""Embeddings and token counts: short questions to llama-server, checked answers.

Failures leave as :mod:`.asking` says.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ..calls import Call
from ..errors import BusError
from ..lenient import integer
from .asking import ask, failure, read_object, refused, unsound
from .upstream import Target, Upstream

SECONDS = 20.0
"""For one request (provider protocol 9); the router waits 30."""
MOST_INPUTS = 512
"""Texts of one embedding request (provider protocol 9)."""
EMBED_LIMIT = 256 * 1024 * 1024
"""Bytes of an answer: 512 vectors of 8192 numbers are some 85 million."""

# -- counting ---------------------------------------------------------------------------------

_CHAT = "/v1/chat/completions/input_tokens"
_ANTHROPIC = "/v1/messages/count_tokens"
_TEMPLATE = "/apply-template"
_LACKS = frozenset({404, 405})
"""The build has no such route. 401 and 501 mean that it exists (llama-server API 15)."""


class TokenCounter:
    """Counts with the server's own template and tokenizer, over the best route it has.

    Remembers which routes a server lacks. One for a worker; safe to share between threads.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._lacking: frozenset[tuple[str, str]] = frozenset()
        """Root and route. Replaced, never changed, so that reading it takes no lock."""

    def count(
        self,
        target: Target,
        body: Mapping[str, Any],
        anthropic_body: Mapping[str, Any],
        call: Call | None = None,
    ) -> int:
        """The prompt tokens that a chat request would have.

        :param body: chat shape, as :func:`provider_llamacpp.transcript.convert.count_body` makes it
        :param anthropic_body: the same for ``/v1/messages/count_tokens``
        :raises BusError: ``invocation_failed``; with ``provider/config`` if the server cannot count
        :raises Interrupted: if ``call`` is aborted
        """
        routes = ((_CHAT, body), (_ANTHROPIC, anthropic_body), (_TEMPLATE, body))
        for route, payload in routes:
            if (target.root, route) in self._lacking:
                continue
            reply = ask(self._upstream, target, "POST", route, payload, timeout=SECONDS, call=call)
            if reply.status in _LACKS:
                self._lacking |= {(target.root, route)}
                continue
            if not reply.ok:
                raise refused(reply)
            if route == _TEMPLATE:
                return self._tokenize(target, body, read_object(reply, route), call)
            return _count_in(read_object(reply, route).get("input_tokens"), route)
        # It may be replaced by a newer build: look again next time.
        self._lacking -= {(target.root, route) for route, _ in routes}
        raise failure(
            "provider/config",
            f"the server cannot count tokens: it has neither {_CHAT} nor {_ANTHROPIC} nor "
            f"{_TEMPLATE} (a newer build of llama-server has all of them)",
        )

    def _tokenize(
        self,
        target: Target,
        body: Mapping[str, Any],
        rendered: Mapping[str, Any],
        call: Call | None,
    ) -> int:
        prompt = rendered.get("prompt")
        if not isinstance(prompt, str):
            raise unsound(_TEMPLATE, "the answer holds no prompt")
        # As the chat route reads its own rendering: special tokens are parsed, and the tokens the
        # model begins with are added.
        payload = {"content": prompt, "add_special": True, "parse_special": True}
        if "model" in body:
            payload["model"] = body["model"]
        reply = ask(
            self._upstream, target, "POST", "/tokenize", payload, timeout=SECONDS, call=call
        )
        if not reply.ok:
            raise refused(reply)
        tokens = read_object(reply, "/tokenize").get("tokens")
        if not isinstance(tokens, list):
            raise unsound("/tokenize", "the answer holds no tokens")
        return len(tokens)


def _count_in(value: object, route: str) -> int:
    count = integer(value)
    if count is None or count < 0:
        raise unsound(route, "the answer holds no count")
    return count


# -- embeddings -------------------------------------------------------------------------------

_EMBEDDINGS = "/v1/embeddings"


def embed(
    upstream: Upstream,
    target: Target,
    model: str | None,
    inputs: Sequence[str],
    call: Call | None = None,
) -> dict[str, Any]:
    """One vector for each text, in the order of the texts: ``{"model", "embeddings"}``.

    :raises BusError: ``invocation_failed``, also if a single vector is missing or not sound
    :raises Interrupted: if ``call`` is aborted
    """
    if not 1 <= len(inputs) <= MOST_INPUTS:
        raise failure("invalid_input", f"{len(inputs)} texts: 1 to {MOST_INPUTS} are allowed")
    payload: dict[str, Any] = {"input": list(inputs)}
    if model is not None:
        payload["model"] = model
    reply = ask(
        upstream,
        target,
        "POST",
        _EMBEDDINGS,
        payload,
        timeout=SECONDS,
        call=call,
        limit=EMBED_LIMIT,
    )
    if not reply.ok:
        raise refused(reply)
    answer = read_object(reply, _EMBEDDINGS)
    vectors = _vectors(answer.get("data"), len(inputs))
    named = answer.get("model")
    return {"model": model or (named if isinstance(named, str) else ""), "embeddings": vectors}


def _unsound(problem: str) -> BusError:
    return unsound(_EMBEDDINGS, problem)


def _vectors(rows: object, count: int) -> list[list[float]]:
    if not isinstance(rows, list):
        raise _unsound("the answer holds no list of vectors")
    if len(rows) != count:
        raise _unsound(f"{len(rows)} vectors came for {count} texts")
    found: dict[int, list[float]] = {}
    for place, row in enumerate(rows):
        if not isinstance(row, dict):
            raise _unsound(f"row {place} is no object")
        index = integer(row.get("index", place))
        if index is None or not 0 <= index < count:
            raise _unsound(f"row {place} has an index that belongs to no text")
        if index in found:
            raise _unsound(f"two rows have the index {index}")
        found[index] = _vector(row.get("embedding"), place)
    vectors = [found[index] for index in range(count)]
    sizes = {len(vector) for vector in vectors}
    if len(sizes) > 1:
        raise _unsound(f"the vectors have different dimensions: {sorted(sizes)}")
    return vectors


def _vector(value: object, place: int) -> list[float]:
    if isinstance(value, str):
        value = _decoded(value, place)
    if not isinstance(value, list) or not value:
        raise _unsound(f"row {place} holds no vector")
    if isinstance(value[0], list):
        raise _unsound(
            f"row {place} holds one vector for each token: llama-server was started without "
            "pooling (start it with --pooling mean, or what the model wants)"
        )
    try:
        if set(map(type, value)) <= {float, int} and all(map(math.isfinite, value)):
            return list(map(float, value))
    except OverflowError:
        pass  # An integer that no float can hold.
    raise _unsound(f"row {place} holds something else than finite numbers")


def _decoded(text: str, place: int) -> list[float]:
    """``encoding_format: base64``: float32, little-endian (llama-server API 9)."""
    try:
        raw = base64.b64decode(text, validate=True)
        return list(struct.unpack(f"<{len(raw) // 4}f", raw))
    except (binascii.Error, ValueError, struct.error) as error:
        raise _unsound(f"row {place} cannot be decoded: {error}") from error
