"""The body of a llama-server stream -> the frames of a caller's channel. Pure: no socket, no clock.

:meth:`Assembler.feed` takes what one read of the socket gave. Deltas, nearly all of a stream, take
a short way that slices the text out of the chunk and builds the frame around it; everything else
is read as JSON and handed to :class:`~provider_llamacpp.events.turn.Turn`, which knows the order
of frames. Both ways give the same bytes; :mod:`~provider_llamacpp.events.template` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ProviderError
from .prefill import Echo
from .snapshot import Message
from .sse import MAX_EVENT, EventCutter, Item, Stray
from .template import SPECIAL, is_utf8, leaf_of, learn, plain, read
from .toolcalls import ToolCalls
from .turn import MAX_CONTENT, Block, Turn

_MAX_WAIT = 64  # chunks between two tries to learn, where learning does not pay
_ALIKE = 32  # bytes: in them a finish reason differs from none
_BORDER = b"\n\n"
_DATA = b"data: "
_SILENT = ("abort", "consumer gone")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the reading ended.

    :param reason: why the call was aborted, if it was; ``stop`` still gets its terminal frame
    :param error: what failed outside the stream: resolving, connecting, an HTTP status, a cut
    """

    reason: str | None = None
    error: ProviderError | None = None


class _Template(NamedTuple):
    """What surrounds the text of the next delta: in the body, and in the frame made of it.

    :attr event: the whole event, for ``%``; comparing what it makes with what came is cheaper than
        to look at either end
    :attr between: what stands between the texts of two events in a row
    :attr frame: the whole frame, for ``%``
    :attr pieces: of the block the text belongs to
    """

    event: bytes
    start: int
    stop: int
    between: bytes
    frame: bytes
    pieces: list[bytes]

    def body(self, block: bytes) -> bytes | None:
        """The text in ``block`` if that is one event of this form."""
        body = block[self.start : self.stop]
        return body if self.event % body == block else None


class Assembler:
    """One stream.

    :param model: the model the caller asked for
    :param provider: our provider id
    :param decode_name: the server's name of a tool -> its function id
    :param fat: put the whole message into each delta (provider protocol 6)
    :param warnings: shown in every snapshot
    :param prefill: the text the server will repeat at the start of its answer
    :param alone: this worker has no other stream on that server
    :param context_window: of the model, in tokens, if known
    :param now_ms: milliseconds since 1970
    :param call_id: makes an id for a tool call that came without one
    :param secret: never shown in an error, whatever the server quotes
    :param learning: False has every delta take the long way
    """

    def __init__(
        self,
        *,
        model: str,
        provider: str,
        decode_name: Callable[[str], str],
        fat: bool = False,
        warnings: Sequence[str] = (),
        prefill: str = "",
        alone: Callable[[], bool] = lambda: True,
        context_window: int | None = None,
        now_ms: Callable[[], int],
        call_id: Callable[[], str],
        secret: str | None = None,
        learning: bool = True,
    ) -> None:
        message = Message(
            model=model,
            provider=provider,
            warnings=warnings,
            calls=ToolCalls(decode_name, call_id),
            context_window=context_window,
            now_ms=now_ms,
        )
        self.ended = False
        """``[DONE]`` or an error was seen: nothing more is read."""
        self._turn = Turn(message, Echo(prefill), fat=fat, alone=alone, secret=secret)
        self._cutter = EventCutter()
        self._strays = bytearray()
        self._finished = False
        # The short way. What was learned holds for one epoch of the turn; while nothing is held
        # back by the cutter, the next block can take it unseen.
        self._learning = learning and not fat
        self._lesson: tuple[bytes, dict[str, Any], Block] | None = None
        """The newest event that came the long way, learned from when another comes: not while
        somebody waits for its frame, which may be the first."""
        self._template: _Template | None = None
        self._direct: tuple[bytes, int, int, bytes, bytes, list[bytes]] | None = None
        """A plain tuple, which is taken apart in a quarter of the time."""
        self._epoch = -1
        self._unused = 0
        self._wait = self._skip = 0

    @property
    def started(self) -> bool:
        """The ``start`` frame was given out: the router will not retry any more."""
        return self._turn.started

    @property
    def complete(self) -> bool:
        """A finish reason was seen: the answer is whole, whatever comes now."""
        return self._turn.complete

    @property
    def error(self) -> ProviderError | None:
        """What went wrong; after :meth:`finish`, what the terminal frame says."""
        return self._turn.error

    @property
    def server_model(self) -> str | None:
        """The model the server says it runs."""
        return self._turn.server_model

    @property
    def server_id(self) -> str | None:
        """The server's own id of this answer; None until a chunk came."""
        return self._turn.server_id

    @property
    def past_thinking(self) -> bool:
        """The answer itself has begun: there is no thought left to end."""
        block = self._turn.open
        return self._turn.complete or (block is not None and block.kind != "thinking")

    @property
    def progress(self) -> dict[str, Any] | None:
        """The newest ``prompt_progress``, as the server gave it."""
        return self._turn.progress

    @property
    def usage(self) -> dict[str, int]:
        """Token counts so far, under the router's names."""
        return self._turn.message.usage

    @property
    def stop_reason(self) -> str | None:
        """In the router's words; None until a finish reason was seen."""
        return self._turn.message.stop_reason

    @property
    def tokens(self) -> int:
        """How many deltas the answer has had: about as many as tokens."""
        message = self._turn.message
        return message.thinking.count + message.text.count + message.calls.pieces

    def feed(self, block: bytes) -> list[bytes]:
        """The frames that the bytes ``block`` of the body complete, in order."""
        direct = self._direct
        if direct is not None:
            event, start, stop, _, frame, pieces = direct
            body = block[start:stop]
            if event % body == block:
                turn = self._turn
                size = turn.size + len(body)
                if (
                    body
                    and size <= turn.mark
                    and (body.translate(None, SPECIAL) == body or plain(body))
                    and (body.isascii() or is_utf8(body))
                ):
                    turn.size = size
                    pieces.append(body)
                    return [frame % body]
        return self._feed(block)

    def warn(self, words: str) -> None:
        """Say ``words`` in the snapshots from now on; the terminal frame has one."""
        self._turn.message.warnings.append(words)

    def finish(self, outcome: Outcome) -> list[bytes]:
        """The reading has ended: the rest, and the one terminal frame.

        Nothing if the call was aborted or its caller left, and nothing the second time.
        """
        if self._finished:
            return []
        self._finished = True
        self._direct = None
        if outcome.reason in _SILENT:
            self.ended = True
            return []
        frames: list[bytes] = []
        for item in self._cutter.close():
            self._item(item, frames, last=True)
        self._judge_strays(frames)
        self._turn.terminal(self._verdict(outcome), frames)
        self.ended = True
        return frames

    def _feed(self, block: bytes) -> list[bytes]:
        if self.ended:
            return []
        whole = self._cutter.take(block)
        if not whole and not self._cutter.failed:
            self._direct = None
            return []
        if self._lesson is not None:
            self._learn_before(whole[len(_DATA) :])
        frames = self._run(whole)
        for item in self._cutter.split(b"" if frames else whole):
            self._item(item, frames)
        self.ended = self._turn.ended
        template = self._template
        if template is None or self.ended or not self._cutter.clean:
            self._direct = None
        else:
            self._direct = (*template,)
        return frames

    def _run(self, whole: bytes) -> list[bytes]:
        """The frames of ``whole`` if it is nothing but deltas of the known form; else none."""
        template, turn = self._template, self._turn
        if template is None or len(whole) > min(MAX_EVENT, MAX_CONTENT - turn.size):
            return []  # near a limit every event is looked at
        event, start, stop, between, frame, pieces = template
        place = slice(start, stop + len(_BORDER))
        bodies = [line[place] for line in whole.split(b"\n")[:-1:2]]
        if event % between.join(bodies) != whole:
            return []
        # Looked at in one go: a blank ends no escape, no string and no character.
        joined = b" ".join(bodies)
        if not (all(bodies) and plain(joined) and is_utf8(joined)):
            return []
        pieces += bodies
        turn.grow(len(joined) - len(bodies) + 1)
        return [frame % body for body in bodies]

    def _item(self, item: Item, frames: list[bytes], *, last: bool = False) -> None:
        """One event, or what stood beside events; ``last``: it may be truncated."""
        if self._turn.ended:
            return
        if isinstance(item, Stray):
            self._stray(item)
            return
        if self._lesson is not None:
            self._learn_before(item)
        template = self._template
        if template is not None:
            body = template.body(_DATA + item + _BORDER)
            if body and plain(body) and is_utf8(body):
                template.pieces.append(body)
                frames.append(template.frame % body)
                self._turn.grow(len(body))
                return
        self._event(item.strip(), frames, last)

    def _event(self, payload: bytes, frames: list[bytes], last: bool) -> None:
        turn = self._turn
        if not payload:
            return
        if payload == b"[DONE]":
            turn.ended = True
            return
        try:
            chunk = read(payload)
        except ValueError:
            # At the end of the body it is an event that was cut off.
            if not last:
                turn.fail_with(None, b"llama-server sent an event that cannot be read: " + payload)
            return
        if not isinstance(chunk, dict):
            return
        turn.chunk(chunk, frames)
        if turn.epoch != self._epoch:
            self._epoch = turn.epoch
            self._template = self._lesson = None
        block = turn.touched
        if self._learning and block is not None and block is turn.open:
            self._lesson = payload, chunk, block

    def _learn_before(self, item: bytes) -> None:
        """Learn from the event before ``item``, unless that begins otherwise: no use then."""
        assert self._lesson is not None
        payload, chunk, block = self._lesson
        if item.lstrip()[:_ALIKE] == payload[:_ALIKE]:
            self._lesson = None
            self._learn(payload, chunk, block)

    def _learn(self, payload: bytes, chunk: dict[str, Any], block: Block) -> None:
        """Try to have the next delta like this one take the short way."""
        # The pieces there would be if none had taken the short way since the last time.
        self._unused += 1
        if self._skip:
            self._skip -= 1
            return
        leaf = leaf_of(chunk)
        if leaf is None or block.slices.waiting:
            return
        template = self._template
        if template is not None and template.body(_DATA + payload + _BORDER) is not None:
            return  # it is right: only the form of the text needed the long way
        # Where a server adds timings every chunk is different: trying must not cost much then.
        count = block.slices.count
        used = template is None or count > self._unused
        self._unused = count
        found = learn(payload, chunk, leaf)
        self._wait = 0 if used and found else min(2 * self._wait + 1, _MAX_WAIT)
        self._skip = self._wait
        self._template = None
        if found is not None:
            before, behind = _DATA + found[0], found[1] + _BORDER
            self._template = _Template(
                event=_format(before, behind),
                start=len(before),
                stop=-len(behind),
                between=behind + before,
                frame=_format(*block.delta()),
                pieces=block.slices.pieces,
            )

    def _stray(self, stray: Stray) -> None:
        turn = self._turn
        if stray.kind == "error":
            try:
                value = read(stray.text)
            except ValueError:
                value = stray.text.decode()
            turn.fail_with(None, {"error": value})
            return
        self._strays += stray.text + b"\n"
        if stray.kind == "oversized" or len(self._strays) > MAX_EVENT:
            limit = MAX_EVENT >> 20
            turn.fail(
                ProviderError("transient", f"llama-server sent a line of more than {limit} MiB")
            )

    def _judge_strays(self, frames: list[bytes]) -> None:
        """The body is over and held lines that are no events: an answer in one piece, or words."""
        turn = self._turn
        text = bytes(self._strays)
        if not text or turn.complete or turn.ended:
            return
        try:
            body = read(text)
        except ValueError:
            body = None
        if isinstance(body, dict) and body.get("choices") and not turn.started:
            turn.chunk(body, frames)
        else:
            turn.fail_with(200, text)

    def _verdict(self, outcome: Outcome) -> ProviderError | None:
        """What the terminal frame reports; None for a complete answer."""
        turn = self._turn
        if turn.error is not None or turn.complete:
            return turn.error
        if outcome.error is not None:
            return outcome.error
        if outcome.reason is not None:
            return ProviderError("transient", "the worker was stopped")
        if not turn.started and turn.server_model is None:
            return ProviderError("transient", "llama-server ended the stream without an answer")
        return ProviderError(
            "transient", "llama-server ended the stream in the middle: no finish reason came"
        )


def _format(before: bytes, behind: bytes) -> bytes:
    """For ``%``: a text between ``before`` and ``behind``."""
    return b"%b%%b%b" % (before.replace(b"%", b"%%"), behind.replace(b"%", b"%%"))
