"""Requests of the bus as bodies for llama-server (provider protocol 8).

Pure: what is known of the model comes in as :class:`Abilities`, and warnings for the caller go out
beside the body. The messages themselves are converted in :mod:`.rows`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequest
from ..lenient import integer, mapping, sequence
from ..payloads import ChatRequest, CountRequest
from .names import NameTable
from .rows import Row, RowRules, transcript_rows

_MOST_TOKENS = 2**31 - 1  # the server reads 32 bits and refuses more
_BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens")  # two names of one field
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

# Of two names for one limit the server would follow its own, whatever the router allowed.
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
# What a request consists of, and what a gateway might take for directions: not to be replaced.
_RESERVED = frozenset(
    (
        *("model", "messages", "prompt", "tools", "stream", "stream_options"),
        *("api_url", "base_url", "url", "host", "port", "path", "endpoint", "proxy"),
        *("headers", "extra_headers", "extra_query", "extra_body"),
        *("api_key", "authorization", "token"),
    )
)
# The template sees its keyword arguments in place of the real ones.
_RESERVED_KWARGS = frozenset(("messages", "tools"))


@dataclass(frozen=True, slots=True)
class Abilities:
    """What is known of a model; None is unknown."""

    tools: bool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: bool | None = None
    """The chat template reads ``reasoning_effort``."""
    thinking_switch: bool | None = None
    """The chat template reads ``enable_thinking``."""
    preserve_reasoning: bool | None = None
    """The chat template shows the thoughts of earlier turns."""
    system_role: bool | None = None
    vision: bool | None = None
    audio: bool | None = None
    context_window: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to be sent, and what reading its answer takes."""

    body: dict[str, Any]
    names: NameTable
    """Leads from the tool names of the answer back to function ids."""
    warnings: list[str]
    """For the ``warnings`` of the answer's message."""
    prefill: str
    """What the server continues, and may repeat at the start of the answer; empty: nothing."""


def chat_body(request: ChatRequest, *, max_tokens: int, abilities: Abilities) -> Prepared:
    """The body of ``POST /v1/chat/completions`` for a stream.

    ``provider_options`` join the body and win over what is derived from ``thinking_level``; they
    cannot replace what the request consists of. A token limit among them counts only where the
    request has no ``max_output_tokens``.

    :param max_tokens: the limit to use: of the request, else of the router's settings
    :raises InvalidRequest: naming the field that cannot be used
    :raises ProviderError: ``permanent``, for media the model is known not to read
    """
    names = NameTable(tool["name"] for tool in request.tools)
    rules = _rules(request.model, abilities)
    rows, prefill = transcript_rows(
        request.messages, system_prompt=request.system_prompt, names=names, rules=rules
    )
    options, warnings = _options(request.provider_options)
    body: dict[str, Any] = {
        "model": request.model,
        "messages": rows,
        "max_tokens": _token_limit(request, options, max_tokens),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.tools:
        body["tools"] = _tools(request.tools, names)
        if abilities.tools is False:
            warnings.append(
                f"the chat template of {request.model} has no place for tools: the model was not "
                f"shown the {len(request.tools)} that came with the request"
            )
    else:
        options.pop("tool_choice", None)
        options.pop("parallel_tool_calls", None)
    if request.response_format is not None:
        if options.pop("response_format", None) is not None:
            warnings.append(_ignored(["response_format"]))
        body.update(_response_format(request.response_format))
    body.update(_thinking(request, abilities, options, warnings, continues=bool(prefill)))
    body.update(options)
    return Prepared(body, names, warnings, prefill)


def count_body(request: CountRequest, *, abilities: Abilities) -> dict[str, Any]:
    """The body of ``POST /v1/chat/completions/input_tokens``: as a stream without a level has it.

    :raises InvalidRequest: naming the field that cannot be used
    :raises ProviderError: ``permanent``, for media the model is known not to read
    """
    names = NameTable(tool["name"] for tool in request.tools)
    rows, _ = transcript_rows(
        request.messages,
        system_prompt=request.system_prompt,
        names=names,
        rules=_rules(request.model, abilities),
    )
    body: dict[str, Any] = {"model": request.model, "messages": rows}
    if request.tools:
        body["tools"] = _tools(request.tools, names)
    body["chat_template_kwargs"] = {"enable_thinking": False}
    return body


def anthropic_count_body(body: dict[str, Any]) -> dict[str, Any]:
    """A body of :func:`count_body` in the shape of ``POST /v1/messages/count_tokens``.

    The route takes rows with plain text as they are, calls and tool rows included, and counts the
    same for them; tools, the system text and lists of parts need its own shape, or are lost.
    """
    rows: list[Row] = body["messages"]
    converted: dict[str, Any] = {"model": body["model"]}
    if rows and rows[0]["role"] == "system":
        converted["system"] = rows[0]["content"]
        rows = rows[1:]
    converted["messages"] = [
        {**row, "content": [_anthropic_part(part) for part in row["content"]]}
        if isinstance(row["content"], list)
        else row
        for row in rows
    ]
    if "tools" in body:
        converted["tools"] = [
            {
                "name": tool["function"]["name"],
                "description": tool["function"]["description"],
                "input_schema": tool["function"]["parameters"],
            }
            for tool in body["tools"]
        ]
    converted["chat_template_kwargs"] = body["chat_template_kwargs"]
    return converted


def _rules(model: str, abilities: Abilities) -> RowRules:
    return RowRules(
        model=model,
        vision=abilities.vision,
        audio=abilities.audio,
        replay_thinking=abilities.preserve_reasoning is True,
    )


def _anthropic_part(part: Row) -> Row:
    if part["type"] != "image_url":
        return part
    head, _, data = part["image_url"]["url"].partition(";base64,")
    mime = head.removeprefix("data:")
    return {"type": "image", "source": {"type": "base64", "media_type": mime, "data": data}}


def _tools(tools: list[dict[str, Any]], names: NameTable) -> list[Row]:
    return [
        {
            "type": "function",
            "function": {
                "name": names.encode(tool["name"]),
                "description": tool.get("description") or "",
                "parameters": _parameters(tool.get("parameters")),
            },
        }
        for tool in tools
    ]


def _parameters(schema: object) -> dict[str, Any]:
    # "Anything goes" in its other spellings: the server refuses `true`, templates trip over `{}`.
    return schema if isinstance(schema, dict) and schema else {"type": "object", "properties": {}}


def _options(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options that may go out, and a warning about the others."""
    options = {name: value for name, value in given.items() if value is not None}
    for name in ("n", "n_cmpl"):
        count = options.pop(name, 1)
        if isinstance(count, bool) or count != 1:
            raise InvalidRequest(f"provider_options.{name}: must be 1, a stream has one answer")
    kwargs = options.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise InvalidRequest("provider_options.chat_template_kwargs: must be an object")
    options["chat_template_kwargs"] = {
        name: value
        for name, value in kwargs.items()
        if value is not None and name not in _RESERVED_KWARGS
    }
    refused = [name for name in options if name in _RESERVED]
    for name in refused:
        del options[name]
    refused += [f"chat_template_kwargs.{name}" for name in kwargs if name in _RESERVED_KWARGS]
    return options, [_ignored(refused)] if refused else []


def _ignored(names: Iterable[str]) -> str:
    return "provider_options that cannot be set this way were ignored: " + ", ".join(names)


def _token_limit(request: ChatRequest, options: dict[str, Any], max_tokens: int) -> int:
    given = [(name, options.pop(name)) for name in _TOKEN_LIMITS if name in options]
    if request.max_output_tokens is None and given:
        name, value = given[0]
        limit = integer(value)
        if limit is None or limit < -1:
            raise InvalidRequest(f"provider_options.{name}: must be an integer of at least -1")
        max_tokens = limit
    return min(max_tokens, _MOST_TOKENS)


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    kind, schema = given["type"], given.get("schema")
    if kind == "text":
        return {}
    if kind not in ("json", "json_object", "json_schema"):
        raise InvalidRequest('response_format.type: must be "json"')
    nested = given.get("json_schema")
    if schema is None and isinstance(nested, dict):
        schema = nested.get("schema")
    if schema is None or schema is True or schema == {}:
        return {"response_format": {"type": "json_object"}}
    if not isinstance(schema, dict):
        raise InvalidRequest("response_format.schema: must be a JSON Schema object")
    # llama-server enforces the nested schema and ignores the flat one, which its manual shows:
    # servers that follow the manual read that.
    wrapped = {"name": "response", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wrapped, "schema": schema}}


def _thinking(
    request: ChatRequest,
    abilities: Abilities,
    options: dict[str, Any],
    warnings: list[str],
    *,
    continues: bool,
) -> dict[str, Any]:
    """The part of the body that switches thinking; takes ``chat_template_kwargs`` out of options.

    The switch is off while an answer is continued: its thoughts are over, and servers of 2025
    refuse the combination.
    """
    level = None if request.thinking_level in ("off", "none") else request.thinking_level
    own_kwargs: dict[str, Any] = options.pop("chat_template_kwargs")
    own_effort = options.get("reasoning_effort", own_kwargs.get("reasoning_effort"))
    wanted = level is not None if own_effort is None else own_effort != "none"
    kwargs: dict[str, Any] = {"enable_thinking": wanted and not continues, **own_kwargs}
    body: dict[str, Any] = {"chat_template_kwargs": kwargs}
    if level is None:
        if request.thinking_level is not None and abilities.reasoning_effort and not own_effort:
            body["reasoning_effort"] = "none"
        return body
    if abilities.reasoning_effort and own_effort is None:
        # Servers since August 2026 read the field, those before only the keyword argument.
        effort = _effort(level, request.model_meta)
        body["reasoning_effort"] = kwargs["reasoning_effort"] = effort
    if continues:
        warnings.append("thinking is off while an answer is continued")
        return body
    if abilities.thinking_switch is False and not abilities.reasoning_effort:
        warnings.append(
            f"thinking_level {level} is best effort: the chat template of {request.model} has no "
            f"switch for thinking"
        )
    budget = _budget(level, request.model_meta)
    if budget is not None and not options.keys() & set(_BUDGETS):
        body.update(dict.fromkeys(_BUDGETS, budget))
    return body


def _budget(level: str, meta: dict[str, Any] | None) -> int | None:
    """The catalog's thinking budget for ``level``, in tokens."""
    budget = integer(mapping((meta or {}).get("thinking_budgets")).get(level))
    return budget if budget is not None and 0 <= budget <= _MOST_TOKENS else None


def _effort(level: str, meta: dict[str, Any] | None) -> str:
    """``level``, or of the efforts that the catalog lists for the model the nearest one."""
    efforts: list[str] = [
        entry["effort"]
        for entry in sequence((meta or {}).get("reasoning_efforts"))
        if mapping(entry).get("effort") in _EFFORTS[1:]
    ]
    if not efforts or level in efforts:
        return level
    wanted = _EFFORTS.index(level)
    return min(efforts, key=lambda effort: abs(_EFFORTS.index(effort) - wanted))
