"""One chat request and its answer, whoever reads it: a caller's channel, or a program directly.

What the two have in common: the request as it goes out, the frames the answer is put together to,
and what the last of them says.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from . import jsontext
from .calls import Call
from .errors import InvalidRequest, ProviderError
from .events.assembler import Assembler, Outcome
from .events.classify import classify as by_table
from .payloads import ChatRequest
from .transcript.convert import Abilities, Prepared

if TYPE_CHECKING:
    from .server.address import Target
    from .server.catalog import Catalog
    from .server.dialing import Line
    from .server.resumable import ResumableStream
    from .server.resume import Resumer
    from .server.stream import UpstreamStream

    Answer = UpstreamStream | ResumableStream
    """The body of an answer; a context manager."""

COMPLETIONS = "/v1/chat/completions"


def new_call_id() -> str:
    """An id for a tool call that came without one."""
    return f"call_{uuid.uuid4().hex}"


def now_ms() -> int:
    """Milliseconds since 1970, as frames carry them (provider protocol 5.1)."""
    return int(time.time() * 1000)


def assembler_for(
    request: ChatRequest,
    provider: str,
    abilities: Abilities,
    prepared: Prepared | None = None,
    *,
    fat: bool = False,
    alone: Callable[[], bool] = lambda: True,
    secret: str | None = None,
) -> Assembler:
    """What makes frames of the answer.

    :param prepared: what is sent; None before that is known, for an answer that is only a failure
    :param fat, alone, secret: see :class:`~provider_llamacpp.events.assembler.Assembler`
    """
    return Assembler(
        model=request.model,
        provider=provider,
        decode_name=prepared.names.decode if prepared else str,
        fat=fat,
        warnings=prepared.warnings if prepared else (),
        prefill=prepared.prefill if prepared else "",
        alone=alone,
        context_window=abilities.context_window,
        now_ms=now_ms,
        call_id=new_call_id,
        secret=secret,
    )


def open_answer(
    resumer: Resumer,
    target: Target,
    prepared: Prepared,
    call: Call,
    *,
    catalog: Catalog | None,
    headers: Mapping[str, str] | None = None,
    classify: Callable[[int, bytes], ProviderError] = by_table,
    line: Line | None = None,
) -> Answer:
    """Send the request and wait, as long as it takes, for the headers of a success.

    :param catalog: of the server, if known
    :param classify: see :meth:`~provider_llamacpp.server.upstream.Upstream.open_stream`
    :param line: made ahead for this request, if one was
    :raises InvalidRequest: if the request cannot be written as JSON
    :raises ProviderError: if the server refused, or cannot be reached
    :raises Interrupted: if the call is aborted
    """
    body = prepared.body
    # A chunk for every batch of the prompt, some 2000 tokens; servers that do not know the field
    # ignore it.
    body.setdefault("return_progress", True)
    # Lets end_thinking end a thought of this answer; costs nothing where nobody asks for it.
    body.setdefault("reasoning_control", True)
    return resumer.open_stream(
        target,
        COMPLETIONS,
        body,
        call,
        encode=_encode,
        headers=headers or {},
        classify=classify,
        line=line,
        build=catalog.build if catalog else None,
        model=body["model"] if catalog and catalog.router_mode else None,
    )


def last_frames(
    assembler: Assembler, call: Call, error: ProviderError | None, answer: Answer | None
) -> tuple[list[bytes], ProviderError | None]:
    """The reading has ended: the last frames, and what they report. None after an abort.

    :param error: what failed outside the answer
    :param answer: what was read, if it came so far
    """
    reason: str | None = call.settle()
    if reason == "stop":
        error, reason = ProviderError("transient", "the worker was stopped"), None
    if reason is not None:
        error = None
    if answer is not None and answer.notice is not None:
        assembler.warn(answer.notice)
    frames = assembler.finish(Outcome(reason, error))
    return frames, error or assembler.error


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return jsontext.dumpb(body)
    except ValueError as error:
        raise InvalidRequest(f"the request {error}") from error
