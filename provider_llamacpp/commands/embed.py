"""``embed``: vectors for texts, or a table of how alike they are."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import BusError, ProviderLlamacppError
from ..settings import Settings
from .terminal import Column, Terminal

if TYPE_CHECKING:
    from ..server.address import Target
    from .caller import Caller
    from .direct import Server

DESCRIPTION = """\
Vectors for texts, as JSON, or a table of similarities (cosine: 1 is alike).
Asks the worker through the engine if there is one, else llama-server itself.
"""
EXAMPLE = """\
examples:
  provider-llamacpp embed "a cat" "a kitten" "a bridge" --table
  provider-llamacpp embed < lines.txt > vectors.json
  provider-llamacpp embed --direct --api-url http://127.0.0.1:8080 "a cat"
"""
LABEL = 24
"""Columns of a text in the table."""

Vectors = list[list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    from .routes import add_direct

    parser.add_argument(
        "texts", nargs="*", metavar="TEXT", help="a text (default: each line of standard input)"
    )
    parser.add_argument("--model", metavar="ID", help="model id (default: the only one served)")
    parser.add_argument("--table", action="store_true", help="a table of similarities, not JSON")
    add_direct(parser)


def run(settings: Settings, options: argparse.Namespace) -> int:
    """The command."""
    from .. import jsontext

    texts = options.texts or _lines()
    if not texts:
        raise ProviderLlamacppError("no texts: give them as arguments, or as lines on the input")
    try:
        answer, route = fetch(settings, options.model, texts, direct=options.direct)
    except BusError as error:
        if options.model is None and "model name is missing" in error.message:
            # The words of a server in router mode.
            raise ProviderLlamacppError(
                f"{error.message}: name one of provider-llamacpp models with --model"
            ) from error
        raise
    if options.table:
        similarity_table(Terminal.of(sys.stdout), texts, answer["embeddings"])
    else:
        print(jsontext.dumps({**answer, "route": route}))
    return 0


def _lines() -> list[str]:
    if sys.stdin.isatty():
        print("one text a line; Ctrl-D ends", file=sys.stderr)
    return [line for each in sys.stdin if (line := each.strip())]


def fetch(
    settings: Settings, model: str | None, texts: Sequence[str], *, direct: bool
) -> tuple[dict[str, Any], str]:
    """``{"model", "embeddings"}`` for all texts, and the way it came.

    :raises BusError: as the worker or the server failed
    """
    from ..server.embeddings import Embedder
    from .routes import by_either

    def by_bus(ask: Callable[[Mapping[str, Any]], Any], caller: Caller) -> dict[str, Any]:
        return _joined(texts, lambda part: ask({"model": model, "input": part}))

    def directly(server: Server, target: Target) -> dict[str, Any]:
        embedder = Embedder(server.upstream)
        return _joined(texts, lambda part: embedder.embed(target, model, part))

    return by_either(settings, "embed", by_bus, directly, direct=direct)


def _joined(texts: Sequence[str], ask: Callable[[list[str]], Any]) -> dict[str, Any]:
    """As many requests as it takes: one holds 512 texts."""
    from ..server.queries import MOST_INPUTS

    model, vectors = "", []
    for start in range(0, len(texts), MOST_INPUTS):
        part = list(texts[start : start + MOST_INPUTS])
        answer = ask(part)
        found = answer.get("embeddings") if isinstance(answer, dict) else None
        if not isinstance(found, list) or len(found) != len(part):
            raise BusError("provider/bad_response", "the answer holds another number of vectors")
        vectors += found
        model = str(answer.get("model") or "")
    return {"model": model, "embeddings": vectors}


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """How alike two vectors are: 1 for the same direction, 0 for none. 0 too for a null vector."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0


def similarity_table(terminal: Terminal, texts: Sequence[str], vectors: Vectors) -> None:
    """Each text against each; in blocks of columns where the terminal is too narrow for all."""
    count = len(texts)
    labels = [f"{at}  {_short(text)}" for at, text in enumerate(texts, 1)]
    # A number takes four columns, and what stands between two of them three.
    block = max(1, (terminal.width - LABEL - 4) // 7) if terminal.live else count
    for start in range(0, count, block):
        chosen = range(start, min(start + block, count))
        columns = [Column("text"), *(Column(str(at + 1), right=True) for at in chosen)]
        rows = [
            [label, *(f"{cosine(vector, vectors[at]):.2f}" for at in chosen)]
            for label, vector in zip(labels, vectors, strict=True)
        ]
        terminal.table(columns, rows)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LABEL - 5 else line[: LABEL - 8] + "..."
