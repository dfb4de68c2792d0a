"""``tokenize`` and ``detokenize``: text to the model's tokens and back (llama-server API 2)."""

from __future__ import annotations

from typing import Any

from .. import fields
from ..calls import Call
from ..errors import BusError
from ..server.asking import read_object, unsound
from .context import Context

_LARGEST = 2**31 - 1
_TOKENIZE, _DETOKENIZE = "/tokenize", "/detokenize"


def tokenize(context: Context, data: object, call: Call) -> dict[str, Any]:
    """Token ids of a text, and with ``with_pieces`` what each of them stands for.

    :raises BusError: the payload or the answer is not sound, or the server failed
    """
    payload = fields.payload(data)
    pieces = fields.flag(payload, "with_pieces", False)
    body = {
        "content": fields.text(payload, "content"),
        "add_special": fields.flag(payload, "add_special", False),
        "parse_special": fields.flag(payload, "parse_special", True),
        "with_pieces": pieces,
        **context.model(payload),
    }
    answer = read_object(context.ask(call, "POST", _TOKENIZE, body), _TOKENIZE)
    rows = answer.get("tokens")
    if not isinstance(rows, list):
        raise unsound(_TOKENIZE, "the answer holds no tokens")
    if not pieces:
        return {"tokens": [_token(row) for row in rows]}
    return {
        "tokens": [_token(_part(row, "id")) for row in rows],
        "pieces": [_piece(_part(row, "piece")) for row in rows],
    }


def _part(row: object, name: str) -> object:
    return row.get(name) if isinstance(row, dict) else None


def _token(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise unsound(_TOKENIZE, "one of the tokens is no number")
    return value


def _piece(value: object) -> str | list[int]:
    """A text; bytes where they are none by themselves."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(each) is int for each in value):
        return value
    raise unsound(_TOKENIZE, "one of the pieces is no text")


def detokenize(context: Context, data: object, call: Call) -> dict[str, Any]:
    """The text that token ids stand for.

    :raises BusError: the payload or the answer is not sound, or the server failed
    """
    payload = fields.payload(data)
    tokens = [
        fields.whole(each, ("tokens", index))
        for index, each in enumerate(fields.items(payload, "tokens"))
    ]
    for index, token in enumerate(tokens):
        if token > _LARGEST:
            fields.fail(("tokens", index), "is no token of any model")
    body = {"tokens": tokens, **context.model(payload)}
    try:
        reply = context.ask(call, "POST", _DETOKENIZE, body)
    except BusError as error:
        # The server's own words are those of its C++ library.
        if "range_check" in error.message:
            fields.fail(("tokens",), "holds a number that is no token of this model")
        raise
    content = read_object(reply, _DETOKENIZE).get("content")
    if not isinstance(content, str):
        raise unsound(_DETOKENIZE, "the answer holds no text")
    return {"content": content}
