"""``chat``: one answer, streamed through the router to the terminal.

What a model writes may steer a terminal, so escape and control characters are shown, not obeyed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import BusError
from ..payloads import THINKING_LEVELS
from ..settings import Settings
from .terminal import hold_logs, printable

if TYPE_CHECKING:
    from .caller import Caller

DESCRIPTION = "Stream one answer through the router to the terminal. Ctrl-C aborts it."
EXAMPLE = """\
examples:
  provider-llamacpp chat "What is a slot?"
  provider-llamacpp chat --local
  provider-llamacpp chat --local --model ./qwen3-0.6b-q4.gguf "Hello"
"""
GREETING = "Hello! Who are you?"
DIM, BOLD, RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the question (default: greet)")
    parser.add_argument(
        "--local",
        action="store_true",
        help="start a loopback engine, a router and a llama-server for this one answer",
    )
    parser.add_argument("--model", metavar="ID_OR_PATH", help="model id; with --local a GGUF file")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--thinking",
        metavar="LEVEL",
        choices=THINKING_LEVELS,
        help="off, minimal, low, medium, high or xhigh",
    )


class Display:
    """Writes frames as they come: thoughts dimmed, calls shown, figures at the end."""

    def __init__(self, out: TextIO, *, colour: bool) -> None:
        self._out = out
        self._colour = colour
        self._open = False
        self._first: float | None = None
        self._usage: dict[str, Any] = {}
        self.failure: str | None = None

    def show(self, frame: dict[str, Any]) -> None:
        """One frame (provider protocol 6)."""
        kind = frame.get("type", "")
        if kind.endswith("_delta") and self._first is None:
            self._first = time.monotonic()
        if kind == "thinking_start":
            self._write(self._style(DIM) + "(thinking) ")
        elif kind in ("text_delta", "thinking_delta"):
            self._write(printable(str(frame.get("delta", ""))))
        elif kind == "thinking_end":
            self._line(self._style(RESET))
        elif kind == "text_end":
            self._line("")
        elif kind == "usage":
            self._usage = frame.get("usage") or {}
        elif kind == "done":
            self._end(frame.get("message") or {})
        elif kind == "error":
            self._fail(frame.get("error") or {})

    def _end(self, message: dict[str, Any]) -> None:
        for block in message.get("content", ()):
            if block.get("type") == "function_call":
                arguments = json.dumps(block.get("arguments"), ensure_ascii=False)
                call = f"{block.get('function_id')}({arguments})"
                self._line(f"{self._style(BOLD)}call{self._style(RESET)} {printable(call)}")
        for warning in message.get("warnings") or ():
            self._line(f"warning: {printable(warning)}")
        self._line(f"{self._style(DIM)}{self._figures(message)}{self._style(RESET)}")

    def aborted(self) -> None:
        """The person who asked has heard enough."""
        self._end_line()
        self.failure = "aborted"

    def _fail(self, message: dict[str, Any]) -> None:
        self._end_line()
        kind = message.get("error_kind") or "error"
        self.failure = f"{kind}: {printable(str(message.get('error_message') or 'no reason'))}"

    def _figures(self, message: dict[str, Any]) -> str:
        usage = message.get("usage") or self._usage
        parts = [str(message.get("model", "")), f"stop: {message.get('stop_reason')}"]
        if usage.get("input") is not None:
            parts.append(f"{usage['input']} tokens in")
        if usage.get("output") is not None:
            parts.append(f"{usage['output']} out")
            seconds = time.monotonic() - self._first if self._first is not None else 0.0
            if seconds > 0 and usage["output"] > 1:
                parts.append(f"{(usage['output'] - 1) / seconds:.1f} tokens/s")
        return "[" + ", ".join(printable(part) for part in parts if part) + "]"

    def _style(self, code: str) -> str:
        return code if self._colour else ""

    def _end_line(self) -> None:
        if self._open:
            self._line(self._style(RESET))

    def _line(self, text: str) -> None:
        self._write(text + "\n")
        self._open = False

    def _write(self, text: str) -> None:
        self._open = True
        self._out.write(text)
        self._out.flush()


def pick_model(caller: Caller, wanted: str | None, provider: str) -> tuple[str, str | None]:
    """``wanted``, or the first model of ``provider`` in the router's catalog; and what is to be
    said of a name that nobody knows.

    :raises BusError: if the router lists none
    """
    if wanted:
        return _named_model(caller, wanted, provider)
    answer = caller.call("router::models::list", {"provider": provider})
    rows = answer.get("models", answer) if isinstance(answer, dict) else answer
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("provider") == provider and row.get("id"):
            return str(row["id"]), None
    raise BusError(
        "router/no_provider_for_model",
        f"the router lists no model of {provider!r}: is llama-server up, and the worker "
        "registered? provider-llamacpp doctor says why; --model names one all the same",
    )


def _named_model(caller: Caller, wanted: str, provider: str) -> tuple[str, str | None]:
    """A server of one model answers to any name: the model's own is taken then, so that what is
    shown is what answered. A server of many refuses a name that it does not know."""
    try:
        answer = caller.call(f"provider::{provider}::models_list", {})
        models = [(str(row["id"]), row["aliases"]) for row in answer["models"]]
        router_mode = answer["router_mode"]
    except (BusError, LookupError, TypeError):
        return wanted, None  # an older worker, or a server that does not answer: the turn will tell
    name = wanted.removeprefix(f"{provider}::")
    if not models or any(name == id or name in aliases for id, aliases in models):
        return wanted, None
    if router_mode or len(models) > 1:
        known = ", ".join(id for id, _ in models[:5]) + (", ..." if len(models) > 5 else "")
        return wanted, f"llama-server knows no model {wanted!r}; it has {known}"
    only = models[0][0]
    return only, f"llama-server knows no model {wanted!r}; its only one, {only}, answers"


def run(settings: Settings, options: argparse.Namespace) -> int:
    """The command."""
    from .caller import Caller

    hold_logs(settings)
    with ExitStack() as stack:
        model = options.model
        if options.local:
            from ..local.stack import LocalStack

            local = stack.enter_context(LocalStack(settings, model=model))
            settings, model = local.settings, None
        caller = stack.enter_context(Caller(settings))
        model, note = pick_model(caller, model, settings.id)
        if note is not None:
            print(f"provider-llamacpp: {printable(note)}", file=sys.stderr)
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        display = Display(sys.stdout, colour=colour)
        converse(caller, display, settings.id, model, options)
        if display.failure is not None:
            print(f"provider-llamacpp: {display.failure}", file=sys.stderr)
            return 1
        return 0


def converse(
    caller: Caller, display: Display, provider: str, model: str, options: argparse.Namespace
) -> None:
    """Ask once and show the answer; Ctrl-C aborts the turn."""
    writer, frames = caller.open_channel()
    request_id = str(uuid.uuid4())
    text = {"type": "text", "text": options.prompt or GREETING}
    request: dict[str, Any] = {
        "request_id": request_id,
        "provider": provider,
        "model": model,
        "messages": [{"role": "user", "content": [text], "timestamp": int(time.time() * 1000)}],
        "writer_ref": writer,
    }
    if options.system:
        request["system_prompt"] = options.system
    if options.thinking:
        request["thinking_level"] = options.thinking
    outcome: list[BaseException] = []

    def ask() -> None:
        try:
            caller.call("router::chat", request, timeout=3600.0)
        except BusError as error:
            outcome.append(error)

    asking = threading.Thread(target=ask, name="chat", daemon=True)
    asking.start()
    try:
        for frame in frames:
            display.show(frame)
            if frame.get("type") in ("done", "error"):
                return
    except KeyboardInterrupt:
        caller.call("router::abort", {"request_id": request_id})
        display.aborted()
        return
    asking.join(5.0)
    display.failure = str(outcome[0]) if outcome else "the answer ended without a last frame"
