"""``slots``: what the server's slots do now, and their prompt caches on disk and off it.

Asking for slots wakes a sleeping model (llama-server API 13). It is done only because a caller
wants it; what the worker looks at by itself is elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

from .. import fields
from ..calls import Call
from ..server.asking import read_json, read_object, unsound
from .context import Context

SECONDS = 120.0
"""A cache of a long prompt has gigabytes."""
ACTIONS = ("list", "save", "restore", "erase")
_COUNTS = {"save": "n_saved", "restore": "n_restored", "erase": "n_erased"}
_BYTES = {"save": "n_written", "restore": "n_read"}


def slots(context: Context, data: object, call: Call) -> dict[str, Any]:
    """The slots, or what became of the cache of one of them.

    :raises BusError: the payload or the answer is not sound, or the server failed
    """
    payload = fields.payload(data)
    action = fields.optional_text(payload, "action") or "list"
    if action not in ACTIONS:
        fields.fail(("action",), "must be one of " + ", ".join(ACTIONS))
    if action == "list":
        return _list(context, payload, call)
    return _act(context, payload, action, call)


def _list(context: Context, payload: dict[str, Any], call: Call) -> dict[str, Any]:
    reply = context.ask(call, "GET", "/slots" + context.query(payload), flag="--slots")
    rows = read_json(reply, "/slots")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise unsound("/slots", "the answer is no list of slots")
    return {"slots": [_slot(row) for row in rows]}


def _slot(row: dict[str, Any]) -> dict[str, Any]:
    """Counts only: prompts and samplers of other people's requests stay where they are."""
    after = row.get("next_token")
    if isinstance(after, list):
        after = after[0] if after else None
    after = after if isinstance(after, dict) else {}
    busy = row.get("is_processing") is True
    found = {
        "id": row.get("id"),
        "context_window": row.get("n_ctx"),
        "task": row.get("id_task"),
        "prompt_tokens": row.get("n_prompt_tokens"),
        "prompt_processed": row.get("n_prompt_tokens_processed"),
        "prompt_cached": row.get("n_prompt_tokens_cache"),
        "decoded": after.get("n_decoded"),
        "remaining": after.get("n_remain"),
    }
    return {
        "busy": busy,
        **{name: value for name, value in found.items() if type(value) is int and value >= 0},
    }


def _act(context: Context, payload: dict[str, Any], action: str, call: Call) -> dict[str, Any]:
    slot = fields.whole(payload.get("slot"), ("slot",))
    body: dict[str, Any] = context.model(payload)
    if action != "erase":
        body["filename"] = _filename(payload)
    _check(context, payload, slot, call)
    path = f"/slots/{slot}?action={action}"
    blame = "slot" if action == "erase" else "filename"
    reply = context.ask(
        call, "POST", path, body, flag="--slot-save-path", blame=blame, timeout=SECONDS
    )
    answer = read_object(reply, f"/slots/{slot}")
    count = answer.get(_COUNTS[action])
    if type(count) is not int:
        raise unsound(f"/slots/{slot}", "the answer holds no count of tokens")
    size = answer.get(_BYTES.get(action, ""))
    return {"slot": slot, "tokens": count, "bytes": size if type(size) is int else None}


def _filename(payload: dict[str, Any]) -> str:
    name = fields.text(payload, "filename")
    if not re.fullmatch(r"[\w-][\w.-]{0,254}", name, re.ASCII):
        fields.fail(("filename",), "must be a plain name: letters, digits, . _ and -")
    return name


def _check(context: Context, payload: dict[str, Any], slot: int, call: Call) -> None:
    """The server takes another slot for one it has not, and would save or erase that one's."""
    reply = context.ask(call, "GET", "/props" + context.query(payload))
    count = read_object(reply, "/props").get("total_slots")
    if type(count) is not int:
        raise unsound("/props", "the answer holds no count of slots")
    if slot >= count:
        fields.fail(("slot",), f"must be below {count}, the number of slots of the server")
