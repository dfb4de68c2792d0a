"""``count-tokens``: what a prompt takes of the context, by the model's own template."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BusError, InvalidRequest, ProviderLlamacppError
from ..settings import Settings

if TYPE_CHECKING:
    from ..server.address import Target
    from .caller import Caller
    from .direct import Server

DESCRIPTION = """\
Count the tokens of a prompt as llama-server does, template included. Asks the
worker through the engine if there is one, else llama-server itself. The number
alone is on standard output.
"""
EXAMPLE = """\
examples:
  provider-llamacpp count-tokens "What is a slot?"
  provider-llamacpp count-tokens --file prompt.txt --system "Be brief."
  provider-llamacpp count-tokens --messages transcript.json --json

A file of messages is a list of {"role", "content"}, content being text or
blocks as the router takes them, or an object of "messages" with
"system_prompt" and "tools".
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    from .routes import add_direct

    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text of one user message")
    source.add_argument("--file", metavar="PATH", help="the same from a file (-: standard input)")
    source.add_argument("--messages", metavar="PATH", help="a transcript as JSON (-: the input)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--model", metavar="ID", help="model id (default: the first listed)")
    parser.add_argument("--json", action="store_true", help="the answer as a JSON object")
    add_direct(parser)


def run(settings: Settings, options: argparse.Namespace) -> int:
    """The command."""
    from .. import jsontext

    payload = _payload(options)
    answer, route = fetch(settings, payload, direct=options.direct)
    if options.json:
        print(jsontext.dumps({**answer, "route": route}))
    else:
        print(answer["tokens"])
    return 0


def _payload(options: argparse.Namespace) -> dict[str, Any]:
    from ..chatstream import loose_messages

    if options.messages is None:
        text = options.prompt if options.file is None else _read(options.file)
        payload: dict[str, Any] = {"messages": loose_messages(text)[1]}
    else:
        payload = _transcript(_read(options.messages), options.messages)
    if options.system is not None:
        payload["system_prompt"] = options.system
    payload["model"] = options.model
    return payload


def _read(path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.read()
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ProviderLlamacppError(f"{path} cannot be read: {why}") from error


def _transcript(text: str, path: str) -> dict[str, Any]:
    """What a file of messages holds, as the payload of ``count_tokens``."""
    from .. import jsontext
    from ..chatstream import loose_messages

    try:
        value = jsontext.loads(text)
    except ValueError as error:
        raise ProviderLlamacppError(f"{path} is not JSON: {error}") from error
    if isinstance(value, list):
        value = {"messages": value}
    rows = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(rows, list):
        raise ProviderLlamacppError(f"{path} holds no list of messages")
    payload = {key: value[key] for key in ("system_prompt", "tools") if key in value}
    try:
        system, payload["messages"] = loose_messages(rows)
    except InvalidRequest as error:
        raise ProviderLlamacppError(error.message) from error
    if system is not None:
        payload.setdefault("system_prompt", system)
    return payload


def fetch(
    settings: Settings, payload: Mapping[str, Any], *, direct: bool
) -> tuple[dict[str, Any], str]:
    """``{"model", "tokens", "estimator"}``, and the way it came.

    :param payload: that of ``count_tokens``; a model of None takes the first that is listed
    :raises BusError: as the worker or the server failed
    :raises InvalidRequest: naming the field of the payload that does not fit
    """
    from ..payloads import decode_count
    from ..server.queries import TokenCounter
    from ..transcript.convert import Abilities, anthropic_count_body, count_body
    from .chat import pick_model
    from .routes import by_either

    def by_bus(ask: Callable[[Mapping[str, Any]], Any], caller: Caller) -> dict[str, Any]:
        model, _ = pick_model(caller, payload["model"], settings.id)
        answer = ask({**payload, "model": model})
        if not isinstance(answer, dict) or not isinstance(answer.get("tokens"), int):
            raise BusError("provider/bad_response", "the answer holds no count")
        return answer

    def directly(server: Server, target: Target) -> dict[str, Any]:
        model = payload["model"] or _first(server, target)
        body = count_body(decode_count({**payload, "model": model}), abilities=Abilities())
        tokens = TokenCounter(server.upstream).count(target, body, anthropic_count_body(body))
        return {"model": model, "tokens": tokens, "estimator": "metered"}

    try:
        decode_count({**payload, "model": payload["model"] or "any"})
    except InvalidRequest as error:
        raise ProviderLlamacppError(error.message) from error
    return by_either(settings, "count_tokens", by_bus, directly, direct=direct)


def _first(server: Server, target: Target) -> str:
    model = server.view(target).catalog.default()
    if model is None:
        raise ProviderLlamacppError(
            f"llama-server at {target.root} lists no model: name one with --model, or see doctor"
        )
    return model.id
