"""Embeddings that are right also where llama-server batches texts wrongly.

Seen on real servers (b11434 and b11549): with several slots that keep caches of their own
(``--parallel 4`` without ``--kv-unified``), a decoder model and pooling ``mean`` or ``cls``, texts
of unequal length that meet in one batch get the vectors of their last tokens alone, at HTTP 200. No
field of the server shows it. So one text of a request is asked again by itself now and then; where
the vectors differ, texts go one at a time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ..calls import Call
from ..errors import BusError
from . import queries
from .asking import failure
from .upstream import Target, Upstream

TRUST_SECONDS: Final = 600.0
"""For so long a finding holds; a server may be started anew with other options."""
LIKE: Final = 0.999
"""Cosine of two vectors of one text from here on: batches round otherwise than single texts do."""
_MOST_FINDINGS: Final = 64
"""A server with one model answers to any name, so that callers could add findings without end."""
_LOOK: Final = 0.1
"""Seconds between looks at an abort while other texts are on the way."""

log = logging.getLogger(__name__)


class Embedder:
    """Asks for vectors and makes sure of them. One for a worker; safe to share between threads."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._findings: dict[tuple[str, str | None], tuple[float, bool]] = {}
        """By server and model: when it was found (monotonic), and whether batches are right."""
        self._single = threading.Lock()
        """Held by the one text that is on the way to a server that mixes texts up."""

    def embed(
        self, target: Target, model: str | None, inputs: Sequence[str], call: Call | None = None
    ) -> dict[str, Any]:
        """As :func:`.queries.embed`, which see for the shape and what is raised."""
        key = (target.root, model)
        until = time.monotonic() + queries.SECONDS
        found_at, sound = self._findings.get(key, (-math.inf, True))
        known = time.monotonic() - found_at < TRUST_SECONDS
        if known and not sound:
            return self._one_by_one(target, model, inputs, call, until)
        answer = queries.embed(self._upstream, target, model, inputs, call)
        place = None if known else telling(inputs)
        if place is None:
            return answer
        try:
            alone = queries.embed(self._upstream, target, model, [inputs[place]], call)
        except BusError:
            return answer  # Nothing was found out; the answer itself was a good one.
        sound = alike(answer["embeddings"][place], alone["embeddings"][0])
        if len(self._findings) >= _MOST_FINDINGS:
            self._findings.clear()
        self._findings[key] = (time.monotonic(), sound)
        if sound:
            return answer
        log.warning(
            "%s gives wrong vectors for several texts at once (model %s): asking for one at a "
            "time; start llama-server with --kv-unified or --parallel 1 to mend it",
            target.root,
            model or "unnamed",
        )
        return self._one_by_one(target, model, inputs, call, until)

    def _one_by_one(
        self,
        target: Target,
        model: str | None,
        inputs: Sequence[str],
        call: Call | None,
        until: float,
    ) -> dict[str, Any]:
        named = model or ""
        vectors: list[list[float]] = []
        for place, text in enumerate(inputs):
            with self._turn(call, until, f"{place} of {len(inputs)} texts"):
                answer = queries.embed(self._upstream, target, model, [text], call)
            named = answer["model"]
            vectors += answer["embeddings"]
        return {"model": named, "embeddings": vectors}

    @contextmanager
    def _turn(self, call: Call | None, until: float, done: str) -> Iterator[None]:
        while not self._single.acquire(timeout=_LOOK):
            if call is not None:
                call.check()
            if time.monotonic() > until:
                break
        else:
            try:
                if time.monotonic() <= until:
                    yield
                    return
            finally:
                self._single.release()
        raise failure(
            "provider/upstream",
            f"{done} were done in {queries.SECONDS:g} s: this server needs them one at a time; "
            "start it with --kv-unified, or send fewer",
        )


def telling(texts: Sequence[str]) -> int | None:
    """The place of the text whose vector would be furthest off, None if all are of one length.

    Off is what stands beyond the length of the shortest text, and the vector is made of that alone:
    a text of twice that length has lost enough, a much longer one may look nearly right.
    """
    lengths = [len(text.encode("utf-8", "replace")) for text in texts]
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return None
    return lengths.index(min((each for each in lengths if each >= 2 * shortest), default=longest))


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two vectors are those of one text."""
    if len(one) != len(other):
        return False
    lengths = math.hypot(*one) * math.hypot(*other)
    if not lengths:
        return not any(one) and not any(other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths > LIKE
