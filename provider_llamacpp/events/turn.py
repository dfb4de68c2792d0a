"""What a chunk of the server's stream does to the message, as frames (provider protocol 6).

A :class:`Turn` holds the message, knows which block is open, and is the only place that decides
the order of frames::

    start                            directly before the first frame that carries something
    ( thinking | text | call )*      <kind>_start, <kind>_delta*, <kind>_end; one open at a time
    usage                            as soon as known, anywhere
    stop done                        if a finish reason was seen
    error                            otherwise; alone, without start, if nothing was sent before

It gets chunks as values. How they come out of bytes, and how most deltas get by without becoming
values, is :mod:`~provider_llamacpp.events.assembler`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from .. import jsontext
from ..errors import ProviderError, redacted
from .classify import classify, error_in
from .prefill import Echo
from .slices import Slices
from .snapshot import Message, token_count, usage_of
from .toolcalls import ToolCall, arguments_of

MAX_CONTENT = 8 << 20
"""Bytes of one message, all its blocks together, as JSON text. More is an error."""

_STEP = 16 << 10  # content between two compactions

_FINISH = {"length": "length", "tool_calls": "function_call", "function_call": "function_call"}


class Block(NamedTuple):
    """A block that can be open; ``call`` if it is a call."""

    kind: Literal["thinking", "text", "functioncall"]
    slices: Slices
    call: ToolCall | None = None

    def delta(self) -> tuple[bytes, bytes]:
        """What stands before and behind the text in a delta frame."""
        foot = b'"}'
        if self.call is not None and self.call.id:
            foot = b'","id":%b}' % jsontext.dumpb(self.call.id)
        return b'{"type":"%b_delta","delta":"' % self.kind.encode(), foot


class Turn:
    """One answer.

    Methods that take ``frames`` append to it what is to be sent.

    :param fat: put the whole message into each delta
    :param alone: this worker has no other stream on that server
    :param secret: never shown, whatever the server quotes
    """

    def __init__(
        self,
        message: Message,
        echo: Echo,
        *,
        fat: bool,
        alone: Callable[[], bool],
        secret: str | None = None,
    ) -> None:
        self.message = message
        self.started = False
        self.complete = False
        self.ended = False
        self.error: ProviderError | None = None
        self.server_model: str | None = None
        self.server_id: str | None = None
        self.progress: dict[str, Any] | None = None
        self.open: Block | None = None
        self.touched: Block | None = None
        """The block that the last chunk added text to."""
        self.epoch = 0
        """Changes whenever the next delta may mean something else than the last one did."""
        self.size = 0
        """Bytes of content, as JSON text."""
        self.mark = _STEP
        """The size from which on :meth:`grow` has something to do."""
        self._echo = echo
        self._fat = fat
        self._alone = alone
        self._secret = secret
        self._total_tokens = 0

    def chunk(self, chunk: dict[str, Any], frames: list[bytes]) -> None:
        """One chunk: error, usage, thinking, text, calls, finish reason, in this order (6.1)."""
        self.touched = None
        fault = error_in(chunk)
        if fault is not None:
            self.fail_with(None, fault)
            return
        model, progress, usage = (chunk.get(key) for key in ("model", "prompt_progress", "usage"))
        if isinstance(model, str) and model:
            self.server_model = model
        if self.server_id is None and isinstance(name := chunk.get("id"), str) and name:
            self.server_id = name
        if isinstance(progress, dict):
            self.progress = progress
        if isinstance(usage, dict):
            self._count(usage, frames)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("index") in (None, 0):
                self._choice(choice, frames)

    def grow(self, size: int) -> None:
        """``size`` more bytes of content are there."""
        self.size += size
        if self.size > self.mark:
            assert self.open is not None, "only an open block grows"
            self.open.slices.compact()
            self.mark = min(self.size + _STEP, MAX_CONTENT)
            if self.size > MAX_CONTENT:
                limit = MAX_CONTENT >> 20
                self.fail(ProviderError("permanent", f"the answer grew over {limit} MiB"))

    def fail(self, error: ProviderError) -> None:
        """The answer ends here, with ``error``; the first one counts."""
        self.error = self.error or error
        self.ended = True

    def fail_with(self, status: int | None, body: bytes | dict[str, Any]) -> None:
        """:meth:`fail` with what the server said."""
        self.fail(classify(status, _without(body, self._secret), alone=self._alone()))

    def terminal(self, error: ProviderError | None, frames: list[bytes]) -> None:
        """The last frames: ``stop`` and ``done``, or ``error`` with the content so far (6.3)."""
        self._close(frames)
        self.ended = True
        self.error = error
        if error is not None:
            frames.append(self.message.snapshot(error, head=b'{"type":"error","error":'))
            return
        self._begin(frames)
        self._advise()
        stop_reason = str(self.message.stop_reason).encode()
        frames.append(b'{"type":"stop","stop_reason":"%b"}' % stop_reason)
        frames.append(self.message.snapshot(head=b'{"type":"done","message":'))

    # Parts of a chunk

    def _count(self, usage: dict[str, Any], frames: list[bytes]) -> None:
        self._total_tokens = token_count(usage.get("total_tokens")) or self._total_tokens
        known = self.message.usage
        counted = known | usage_of(usage)
        if counted != known:
            self._begin(frames)
            self.message.usage = counted
            frames.append(b'{"type":"usage","usage":%b}' % jsontext.dumpb(counted))

    def _choice(self, choice: dict[str, Any], frames: list[bytes]) -> None:
        delta = choice.get("delta")
        # An answer in one piece has a message, with a list of whole calls.
        in_pieces = isinstance(delta, dict)
        if not in_pieces:
            delta = choice.get("message")
        if isinstance(delta, dict):
            thought = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
            self._say("thinking", thought, frames)
            self._say("text", self._echo.strip(_text(delta.get("content"))), frames)
            for position, fragment in enumerate(_fragments(delta)):
                self._fragment(fragment, None if in_pieces else position, frames)
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason and not (self.complete or self.ended):
            self._say("text", self._echo.release(), frames)
            self.complete = True
            self.message.stop_reason = _FINISH.get(reason, "end")
            self.message.native_stop_reason = reason
            self._close(frames)

    def _say(self, kind: Literal["thinking", "text"], text: str, frames: list[bytes]) -> None:
        if text and not self.ended:
            slices = self.message.thinking if kind == "thinking" else self.message.text
            self._add(Block(kind, slices), text, frames)

    def _fragment(
        self, fragment: dict[str, Any], position: int | None, frames: list[bytes]
    ) -> None:
        if self.ended:
            return
        call = self.message.calls.place(fragment, position)
        if call is None:
            self.epoch += 1
            return
        block = Block("functioncall", call.arguments, call)
        # Opened before the call takes its name: without one the snapshot leaves it out (rule 7).
        self._switch(block, frames)
        if call.absorb(fragment):
            self.epoch += 1
            self.grow(len(call.id) + len(call.name))
        text = arguments_of(fragment)
        if text and not self.ended:
            self._add(block, text, frames)

    # Blocks and frames

    def _add(self, block: Block, text: str, frames: list[bytes]) -> None:
        self._switch(block, frames)
        self.touched = self.open
        piece = block.slices.add(text)
        if block.slices.waiting:
            self.epoch += 1
        self._emit(block, piece, frames)

    def _emit(self, block: Block, piece: bytes, frames: list[bytes]) -> None:
        if piece:
            head, foot = block.delta()
            frame = head + piece + foot
            if self._fat:
                frame = self.message.snapshot(head=frame[:-1] + b',"partial":')
            frames.append(frame)
            self.grow(len(piece))

    def _switch(self, block: Block, frames: list[bytes]) -> None:
        """Have ``block`` open, and no other."""
        if self.open is not None and self.open.slices is block.slices:
            return
        self._close(frames)
        self._begin(frames)
        frames.append(self._boundary(block, b"start"))
        self.open = block
        self.epoch += 1

    def _close(self, frames: list[bytes]) -> None:
        block = self.open
        if block is not None:
            self._emit(block, block.slices.flush(), frames)
            self.open = None
            self.epoch += 1
            frames.append(self._boundary(block, b"end"))

    def _begin(self, frames: list[bytes]) -> None:
        if not self.started:
            self.started = True
            frames.append(self.message.snapshot(head=b'{"type":"start","partial":'))

    def _boundary(self, block: Block, edge: bytes) -> bytes:
        head = b'{"type":"%b_%b","partial":' % (block.kind.encode(), edge)
        return self.message.snapshot(head=head)

    def _advise(self) -> None:
        """Warnings that only the end can give."""
        message, window = self.message, self.message.context_window
        if message.native_stop_reason != "length":
            return
        if message.thinking and not message.text and not message.calls:
            message.warnings.append(
                "thinking used up the whole output budget, so there is no answer: "
                "raise max_output_tokens or lower thinking_level"
            )
        usage = message.usage
        total = self._total_tokens or usage.get("input", 0) + usage.get("output", 0)
        if window is not None and total >= window:
            message.warnings.append(
                f"the answer was cut because the context of {window} tokens is full"
            )


def _without(body: bytes | dict[str, Any], secret: str | None) -> bytes | dict[str, Any]:
    """``body`` without ``secret``; before anything is cut, as half a key is one too many."""
    if not secret:
        return body
    if isinstance(body, bytes):
        return redacted(body.decode("latin-1"), secret).encode("latin-1")
    try:
        found = jsontext.loads(redacted(jsontext.dumps(body), secret))
    except ValueError:
        return {"error": {}}
    return found if isinstance(found, dict) else {"error": {}}


def _text(value: object) -> str:
    """Text of a delta: a string, or a list of text parts as some servers send it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = [part.get("text") for part in value if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return ""


def _fragments(delta: dict[str, Any]) -> list[dict[str, Any]]:
    """The pieces of tool calls in a delta; the older ``function_call`` is a call of index 0."""
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        return [call for call in calls if isinstance(call, dict)]
    single = delta.get("function_call")
    return [{"index": 0, "function": single}] if isinstance(single, dict) else []
