"""An answer that a program reads itself, and the messages it asks with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

from .errors import Interrupted, InvalidRequest, ProviderError
from .typed import AssistantMessage, Done, Event, Failure

Messages: TypeAlias = str | Sequence[Mapping[str, Any] | AssistantMessage]
"""A text, which is one message of a user; or messages as provider protocol 5.1 has them: ``role``
and ``content``, which may be a text in place of blocks."""


class ChatStream:
    """One answer as typed events (provider protocol 6): an iterator and a context manager.

    ::

        with client.stream_chat("Hello") as stream:
            for event in stream:
                if isinstance(event, TextDelta):
                    print(event.delta, end="")

    A failure is no exception but the last event, a :class:`~provider_llamacpp.typed.Failure`;
    :meth:`result` raises it. There is no limit of time: who has waited enough calls :meth:`close`,
    from any thread.

    :func:`~provider_llamacpp.stream_chat` makes one; so may a program's own tests.

    :param events: what is iterated, and closed with the stream
    :param abort: called by :meth:`close`, to end a wait for the next event at once; must not block
    """

    def __init__(self, events: Generator[Event, None, None], abort: Callable[[], object]) -> None:
        self._events = events
        self._abort = abort
        self._closed = False
        self._turn = threading.Lock()
        """Held by the thread that waits for the next event."""
        self._last: Event | None = None

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> Event:
        """Wait for the next event.

        :raises InvalidRequest: the first time, naming what of the request cannot be used
        """
        with self._turn:
            self._last = event = next(self._events)
        return event

    def close(self) -> None:
        """Drop the answer; llama-server stops generating. From any thread, in every phase: one that
        waits for an event, or for the connection, ends at once, without a last event. Twice does no
        harm.
        """
        self._closed = True
        self._abort()
        # Somebody in there is awake now and leaves by itself.
        if self._turn.acquire(blocking=False):
            try:
                self._events.close()
            finally:
                self._turn.release()

    @property
    def closed(self) -> bool:
        """Whether it was dropped before its last event."""
        return self._closed and not isinstance(self._last, Done | Failure)

    def result(self) -> AssistantMessage:
        """Wait for the rest; the whole message.

        :raises ProviderError: if the answer failed; what came of it is in the :class:`Failure`
        :raises Interrupted: if it was closed before
        """
        for _ in self:
            pass
        if isinstance(self._last, Done):
            return self._last.message
        if isinstance(self._last, Failure):
            error = self._last.error
            raise ProviderError(error.error_kind or "permanent", error.error_message or "")
        raise Interrupted("the stream was closed")

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def loose_messages(messages: Messages) -> tuple[str | None, list[dict[str, Any]]]:
    """Messages as people write them, and as other programs keep them: the system prompt among
    them, if it comes first, and the rows with their content in blocks.

    :raises InvalidRequest: if a message is none
    """
    given: Sequence[Any] = (
        [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    )
    system = None
    rows: list[dict[str, Any]] = []
    for at, each in enumerate(given):
        if isinstance(each, AssistantMessage):
            each = each.to_dict()
        if not isinstance(each, Mapping):
            raise InvalidRequest(f"messages[{at}]: must be an object")
        content = each.get("content")
        if at == 0 and each.get("role") == "system" and isinstance(content, str):
            system = content
            continue
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        rows.append({"timestamp": 0, **each, "content": blocks})
    return system, rows
