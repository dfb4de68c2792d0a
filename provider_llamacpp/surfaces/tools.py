"""``tools_list`` and ``tools_call``: the tools that llama-server runs itself (llama-server API 12).

They have the rights of the server's process, so these functions exist only where the setting
``allow_server_tools`` names what may be called: ``read`` stands for every tool that says it does
not write, all others have to be named. What a tool says of itself is asked again for each call.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .. import fields, jsontext
from ..calls import Call
from ..server.asking import failure, read_json, read_object, unsound
from .context import Context, Lacking, events, optional_writer
from .outlet import Result, Say

READ = "read"
"""In the setting: every tool that does not write."""
SECONDS = 600.0
"""For a tool whose output comes at its end."""
_TOOLS, _FLAG = "/tools", "--tools"


def tools_list(context: Context, data: object, call: Call) -> dict[str, Any]:
    """The server's tools, and which of them may be called.

    :raises BusError: the payload or the answer is not sound, or the server failed
    """
    fields.payload(data)
    allowed = context.provider.settings.allow_server_tools
    return {"tools": [_shown(tool, allowed) for tool in _tools(context, call)]}


def tools_call(context: Context, data: object, call: Call) -> Result:
    """Run one tool. A tool that fails is a result with ``ok`` false, not an error.

    :raises BusError: the payload or the answer is not sound, or the server failed
    :raises Interrupted: if ``call`` is aborted or the caller has left
    """
    payload = fields.payload(data)
    name = fields.text(payload, "tool")
    body = {"tool": name, "params": fields.optional_object(payload, "params") or {}}
    headers = _headers(payload)
    writer = optional_writer(payload)
    found = [tool for tool in _tools(context, call) if tool["tool"] == name]
    if not found:
        fields.fail(("tool",), "the server has no such tool")
    if not _may(found[0], context.provider.settings.allow_server_tools):
        fields.fail(
            ("tool",),
            f"{name} is not allowed: the worker was started without it in --allow-server-tools",
        )

    def work(say: Say | None) -> Result:
        result = None if say is None else _stream(context, body, headers, call, say)
        if result is None:
            result = _run(context, body, headers, call, say)
        return {"tool": name, **result}

    return context.told(call, writer, work)


def _tools(context: Context, call: Call) -> list[dict[str, Any]]:
    rows = read_json(context.ask(call, "GET", _TOOLS, flag=_FLAG), _TOOLS)
    if not isinstance(rows, list):
        raise unsound(_TOOLS, "the answer is no list of tools")
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("tool"), str)]


def _writes(tool: dict[str, Any]) -> bool:
    """Whether a tool may change something: yes, unless it says it does not."""
    permissions = tool.get("permissions")
    return not (isinstance(permissions, dict) and permissions.get("write") is False)


def _may(tool: dict[str, Any], allowed: Collection[str]) -> bool:
    return tool["tool"] in allowed or (READ in allowed and not _writes(tool))


def _shown(tool: dict[str, Any], allowed: Collection[str]) -> dict[str, Any]:
    title, kind, definition = (tool.get(key) for key in ("display_name", "type", "definition"))
    return {
        "tool": tool["tool"],
        "title": title if isinstance(title, str) else tool["tool"],
        "type": kind if isinstance(kind, str) else "server",
        "writes": _writes(tool),
        "allowed": _may(tool, allowed),
        "uses_cwd": tool.get("uses_cwd") is True,
        "definition": definition if isinstance(definition, dict) else None,
    }


def _headers(payload: dict[str, Any]) -> dict[str, str]:
    folder = fields.optional_text(payload, "cwd")
    if folder is None:
        return {}
    if not (folder.isascii() and folder.isprintable() and folder == folder.strip() and folder):
        fields.fail(("cwd",), "must be a path of visible ASCII characters")
    return {"x-tool-cwd": folder}


def _stream(
    context: Context, body: dict[str, Any], headers: dict[str, str], call: Call, say: Say
) -> Result | None:
    """The result of a tool that shows its output while it runs; None for any other tool."""
    streamed = {**body, "stream": True}
    try:
        with context.open_stream(call, _TOOLS, streamed, flag=_FLAG, headers=headers) as stream:
            for event in events(stream, _TOOLS):
                text = event.get("chunk")
                if isinstance(text, str) and text:
                    say(text)
                if event.get("done") is True:
                    return _result(event.get("error"))
    except Lacking as error:
        if error.status == 404:
            return None  # before it ran: only some tools can
        raise
    raise failure("provider/upstream", "llama-server ended the tool's output in the middle")


def _run(
    context: Context, body: dict[str, Any], headers: dict[str, str], call: Call, say: Say | None
) -> Result:
    reply = context.ask(
        call,
        "POST",
        _TOOLS,
        body,
        flag=_FLAG,
        blame="params",
        timeout=SECONDS,
        headers=headers,
    )
    answer = read_object(reply, _TOOLS)
    text = answer.get("plain_text_response")
    if not isinstance(text, str):
        if isinstance(answer.get("error"), str) and len(answer) == 1:
            return _result(answer["error"])
        return _result(result=dict(answer))
    if say is None:
        return _result(text=text)
    say(text)
    return _result()


def _result(
    error: object = None, *, text: str | None = None, result: dict[str, Any] | None = None
) -> Result:
    words = error if error is None or isinstance(error, str) else jsontext.dumps(error)
    return {"ok": error is None, "text": text, "result": result, "error": words}
