"""``end_thinking``: ends a running thought, so that the answer begins (llama-server API 7).

Streams are started with ``reasoning_control``, which lets the server do that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import fields
from ..calls import Call
from ..server.asking import ask, read_object, refused
from .context import SECONDS, Context

if TYPE_CHECKING:
    from ..streaming import StreamRun

_CONTROL = "/v1/chat/completions/control"


def end_thinking(context: Context, data: object, call: Call) -> dict[str, Any]:
    """Whether a thought was ended, and if not, why.

    :raises BusError: the payload is not sound, or the server failed
    """
    key = fields.text(fields.payload(data), "request_id")
    runs = [
        run
        for run in context.runs.snapshot()
        if run.call.key == key and run.provider is context.provider
    ]
    if not runs:
        return {"ended": False, "reason": "no stream of this request is running"}
    # The router may have begun another attempt while the first one still ends.
    reasons = [_end(context, run, call) for run in runs]
    return {"ended": None in reasons, "reason": None if None in reasons else reasons[-1]}


def _end(context: Context, run: StreamRun, call: Call) -> str | None:
    """Why there was no thought to end; None if it was ended."""
    name, target = run.assembler.server_id, run.target
    if name is None or target is None or not run.assembler.started:
        # While it reads the prompt the server would agree, and then think all the same.
        return "the model has not begun to think"
    if run.assembler.past_thinking:
        return "the model is past its thinking"
    body = {"id": name, "action": "reasoning_end", "model": run.request.model}
    upstream = context.provider.upstream
    reply = ask(upstream, target, "POST", _CONTROL, body, timeout=SECONDS, call=call)
    if reply.status == 404:
        return "this build of llama-server cannot end a thought"
    if not reply.ok:
        raise refused(reply)
    answer = read_object(reply, _CONTROL)
    if answer.get("success") is True:
        return None
    words = answer.get("message")
    return words if isinstance(words, str) else "the server did not end the thought"
