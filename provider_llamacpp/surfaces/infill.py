"""``infill``: text that fits between what stands before and what stands behind it.

The server is asked for a stream whoever the caller is: it notices a dropped connection only while
it streams (llama-server API 6).
"""

from __future__ import annotations

from typing import Any

from .. import fields
from ..calls import Call
from ..events.classify import classify, error_in
from ..server.asking import failed, failure
from .context import MOST_TEXT, Context, events, optional_writer
from .outlet import Result, Say

DEFAULT_TOKENS = 256
"""Where the caller sets no limit: the server's own is none at all."""
_INFILL = "/infill"
_RESERVED = frozenset(
    (
        *("model", "input_prefix", "input_suffix", "input_extra", "prompt", "stream", "id_slot"),
        *("n_predict", "max_tokens", "max_completion_tokens", "n", "n_cmpl"),
    )
)


def infill(context: Context, data: object, call: Call) -> Result:
    """What a fill-in-the-middle model writes.

    :raises BusError: the payload is not sound, or the server failed
    :raises Interrupted: if ``call`` is aborted or the caller has left
    """
    payload = fields.payload(data)
    writer = optional_writer(payload)
    limit = fields.optional_count(payload, "max_output_tokens", 1) or DEFAULT_TOKENS
    body: dict[str, Any] = {
        **_options(payload),
        "input_prefix": fields.text(payload, "input_prefix"),
        "input_suffix": fields.text(payload, "input_suffix"),
        "input_extra": _extra(payload),
        "n_predict": min(limit, 2**31 - 1),
        "stream": True,
        **context.model(payload),
    }
    prompt = fields.optional_text(payload, "prompt")
    if prompt is not None:
        body["prompt"] = prompt
    return context.told(call, writer, lambda say: _generate(context, body, call, say))


def _options(payload: dict[str, Any]) -> dict[str, Any]:
    options = fields.optional_object(payload, "options") or {}
    for name in options:
        if name in _RESERVED:
            fields.fail(("options", name), "cannot be set this way")
    return options


def _extra(payload: dict[str, Any]) -> list[dict[str, str]]:
    if payload.get("input_extra") is None:
        return []
    files = []
    for index, each in enumerate(fields.items(payload, "input_extra")):
        path: fields.Path = ("input_extra", index)
        if not isinstance(each, dict):
            fields.fail(path, "must be an object")
        files.append({name: fields.text(each, name, path) for name in ("filename", "text")})
    return files


def _generate(context: Context, body: dict[str, Any], call: Call, say: Say | None) -> Result:
    pieces: list[str] = []
    size = 0
    last: dict[str, Any] | None = None
    with context.open_stream(call, _INFILL, body) as stream:
        for event in events(stream, _INFILL):
            if (fault := error_in(event)) is not None:
                raise failed(classify(None, fault))
            text = event.get("content")
            if isinstance(text, str) and text:
                size += len(text)
                if size > MOST_TEXT:
                    raise failure("provider/bad_response", f"{_INFILL}: the text never ends")
                if say is None:
                    pieces.append(text)
                else:
                    say(text)
            if event.get("stop") is True:
                last = event
                break
    if last is None:
        raise failure(
            "provider/upstream", "llama-server ended the stream in the middle: no stop came"
        )
    native = last.get("stop_type")
    model = last.get("model")
    counts = {"input": last.get("tokens_evaluated"), "output": last.get("tokens_predicted")}
    return {
        "model": model if isinstance(model, str) else body.get("model", ""),
        "content": "".join(pieces) if say is None else None,
        "stop_reason": "length" if native == "limit" else "end",
        "native_stop_reason": native if isinstance(native, str) else None,
        "usage": {name: count for name, count in counts.items() if type(count) is int},
    }
