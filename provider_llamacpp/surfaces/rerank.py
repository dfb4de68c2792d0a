"""``rerank``: how well each document answers a query, by a reranking model."""

from __future__ import annotations

import math
from typing import Any

from .. import fields
from ..calls import Call
from ..payloads import MAX_INPUTS
from ..server.asking import read_object, unsound
from .context import Context

SECONDS = 120.0
"""Every document is a prompt of its own."""
_RERANK = "/v1/rerank"


def rerank(context: Context, data: object, call: Call) -> dict[str, Any]:
    """The documents' scores, the best first.

    :raises BusError: the payload or the answer is not sound, or the server failed
    """
    payload = fields.payload(data)
    documents = fields.texts(payload, "documents", MAX_INPUTS)
    most = fields.optional_count(payload, "top_n", 1)
    body: dict[str, Any] = {
        "query": fields.text(payload, "query"),
        "documents": documents,
        "top_n": len(documents) if most is None else min(most, len(documents)),
        **context.model(payload),
    }
    reply = context.ask(
        call, "POST", _RERANK, body, flag="--reranking", blame="documents", timeout=SECONDS
    )
    answer = read_object(reply, _RERANK)
    named = answer.get("model")
    usage = answer.get("usage")
    read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return {
        "model": named if isinstance(named, str) else body.get("model", ""),
        "results": _results(answer.get("results"), len(documents), body["top_n"]),
        "usage": {"input": read} if type(read) is int else {},
    }


def _results(rows: object, count: int, most: int) -> list[dict[str, Any]]:
    if not isinstance(rows, list):
        raise unsound(_RERANK, "the answer holds no results")
    found: dict[int, float] = {}
    for row in rows:
        index = row.get("index") if isinstance(row, dict) else None
        if type(index) is not int or not 0 <= index < count or index in found:
            raise unsound(_RERANK, "a result belongs to no document, or to one that has another")
        score = row.get("relevance_score")
        if type(score) not in (int, float) or not math.isfinite(score):
            raise unsound(_RERANK, f"document {index} has no score")
        found[index] = float(score)
    if len(found) < most:
        raise unsound(_RERANK, f"{len(found)} results came for {most} documents")
    ranked = sorted(found.items(), key=lambda each: -each[1])
    return [{"index": index, "relevance_score": score} for index, score in ranked[:most]]
