"""A transcript of the bus as message rows for llama-server (provider protocol 8.1).

Reading comes first: each result finds the call it answers, wherever it stands. Then the rows are
written in one pass. Nothing here knows of the rest of the request; that is :mod:`.convert`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidRequest, ProviderError
from ..jsontext import dumps, whole
from .arguments import arguments_text
from .names import NameTable

Row = dict[str, Any]

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9.+-]*/[a-z0-9][a-z0-9.+-]*")
_AUDIO_FORMATS = {
    **dict.fromkeys(("mpeg", "mp3", "x-mp3", "x-mpeg"), "mp3"),
    **dict.fromkeys(("wav", "x-wav", "wave", "vnd.wave"), "wav"),
}


@dataclass(frozen=True, slots=True)
class RowRules:
    """What the model behind the rows can take; None is unknown, and the server decides."""

    model: str
    vision: bool | None = None
    audio: bool | None = None
    replay_thinking: bool = False
    """Send the thoughts of earlier turns along as ``reasoning_content``."""


@dataclass(slots=True)
class _Result:
    """A tool row."""

    call_id: str
    content: str
    media: list[Row]
    moved: bool = False

    def replace(self, later: _Result) -> None:
        """Take over the content of a later result for the same call, but not its place."""
        self.content, self.media = later.content, later.media


@dataclass(slots=True)
class _Turn:
    """An assistant row, with the results of its calls in their order of arrival."""

    text: str
    thinking: str
    calls: list[Row] = field(default_factory=list)
    unanswered: dict[str, deque[Row]] = field(default_factory=dict)
    results: list[_Result] = field(default_factory=list)
    newest: dict[str, _Result] = field(default_factory=dict)

    def answer(self, result: _Result) -> None:
        """Take in a result for one of the calls; two calls may share an id, in order."""
        if self.unanswered[result.call_id]:
            self.unanswered[result.call_id].popleft()
            self.results.append(result)
            self.newest[result.call_id] = result
        else:
            self.newest[result.call_id].replace(result)

    def open_calls(self) -> list[Row]:
        """The calls without a result, in their order."""
        still = {id(call) for calls in self.unanswered.values() for call in calls}
        return [call for call in self.calls if id(call) in still] if still else []


def transcript_rows(
    messages: Sequence[dict[str, Any]],
    *,
    system_prompt: str | None,
    names: NameTable,
    rules: RowRules,
) -> tuple[list[Row], str]:
    """Convert checked ``messages`` (:mod:`.payloads`) to rows.

    :return: the rows, and the text of a last assistant row, which the server continues: some
        builds repeat it at the start of the answer. Empty where there is none.
    :raises InvalidRequest: media that is not base64, naming the field
    :raises ProviderError: ``permanent``, media that the model is known not to read
    """
    reader = _Reader(names, rules)
    for index, message in enumerate(messages):
        reader.read(message, f"messages[{index}]")
    rows: list[Row] = []
    if system_prompt:
        rows.append({"role": "system", "content": system_prompt})
    _write(reader.items, rows, rules)
    return rows, _merge_ending(rows)


class _Reader:
    """Turns messages into items (turns, results without a call, finished user rows)."""

    def __init__(self, names: NameTable, rules: RowRules) -> None:
        self.items: list[_Turn | _Result | Row] = []
        self._names = names
        self._rules = rules
        self._owners: dict[str, _Turn] = {}
        self._early: dict[str, _Result] = {}

    def read(self, message: dict[str, Any], path: str) -> None:
        role = message["role"]
        if role == "user":
            self._read_user(message, path)
        elif role == "assistant":
            self._read_assistant(message, path)
        elif role == "function_result":
            self._read_result(message, path)
        # custom: for the application, not for the model

    def _read_user(self, message: dict[str, Any], path: str) -> None:
        found = self._read_result_blocks(message["content"], path)
        text, media = self._content(message["content"], path)
        if media:
            first = [{"type": "text", "text": text}] if text else []
            self.items.append({"role": "user", "content": [*first, *media]})
        elif text or not found:
            self.items.append({"role": "user", "content": text})

    def _read_assistant(self, message: dict[str, Any], path: str) -> None:
        blocks = message["content"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        thoughts = [block["text"] for block in blocks if block["type"] == "thinking"]
        turn = _Turn("\n".join(texts), "\n".join(filter(None, thoughts)))
        for block in blocks:
            if block["type"] == "function_call":
                call = self._call(block)
                turn.calls.append(call)
                turn.unanswered.setdefault(call["id"], deque()).append(call)
        # The words of a failed call are the provider's (protocol 6.3), no model said them.
        failed = message.get("stop_reason") == "error" and turn.text == message.get("error_message")
        if turn.calls or not failed:
            self.items.append(turn)
        for call_id in turn.unanswered:
            self._owners[call_id] = turn
            early = self._early.pop(call_id, None)
            if early is not None:
                turn.answer(_Result(call_id, early.content, early.media))
                early.moved = True
        self._read_result_blocks(blocks, path)

    def _call(self, block: dict[str, Any]) -> Row:
        function = {
            "name": self._names.encode(block["function_id"]),
            "arguments": arguments_text(block.get("arguments")),
        }
        return {"id": block["id"], "type": "function", "function": function}

    def _read_result_blocks(self, blocks: list[dict[str, Any]], path: str) -> bool:
        """Results may also stand as blocks inside a message; whether there were any."""
        found = False
        for index, block in enumerate(blocks):
            if block["type"] == "function_result":
                self._read_result(block, f"{path}.content[{index}]")
                found = True
        return found

    def _read_result(self, holder: dict[str, Any], path: str) -> None:
        text, media = self._content(holder["content"], path)
        details = holder.get("details")
        if isinstance(details, dict) and details.get("status") == "denied":
            text = f"[PERMISSION_DENIED]\n{_one_line(details)}\n\n{text}"
        result = _Result(holder["function_call_id"], text, media)
        owner = self._owners.get(result.call_id)
        if owner is not None:
            owner.answer(result)
        elif result.call_id in self._early:
            self._early[result.call_id].replace(result)
        else:
            self._early[result.call_id] = result
            self.items.append(result)

    def _content(self, blocks: list[dict[str, Any]], path: str) -> tuple[str, list[Row]]:
        """Text and media parts of ``blocks``; everything else is not for the model."""
        texts: list[str] = []
        media: list[Row] = []
        for index, block in enumerate(blocks):
            kind = block["type"]
            if kind == "text":
                texts.append(block["text"])
            elif kind in ("image", "audio"):
                media.append(self._part(block, f"{path}.content[{index}]"))
        return "\n".join(texts), media

    def _part(self, block: dict[str, Any], path: str) -> Row:
        mime = block["mime"].split(";", 1)[0].strip().lower()
        sounds = block["type"] == "audio" or mime.startswith("audio/")
        readable = self._rules.audio if sounds else self._rules.vision
        if readable is False:
            kind = "audio" if sounds else "images"
            raise ProviderError(
                "permanent",
                f"model {self._rules.model} cannot read {kind}: its llama-server has no projector "
                f"for them (--mmproj)",
            )
        data = _base64(block["data"], path)
        if sounds:
            subtype = mime.partition("/")[2]
            form = {"data": data, "format": _AUDIO_FORMATS.get(subtype, subtype or "wav")}
            return {"type": "input_audio", "input_audio": form}
        # The server looks at the bytes, not at the type; but it splits the URL at its comma.
        mime = mime if _MEDIA_TYPE.fullmatch(mime) else "image/png"
        return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{data}"}}


def _base64(data: str, path: str) -> str:
    if not _BASE64.fullmatch(data):
        data = "".join(data.split())  # lines of 76, as mail has them
    # llama-server takes the data of a sound for a URL or a file if it looks like one, and would
    # fetch it. Nothing with a colon gets through here, and "http" starts no sound file.
    if not _BASE64.fullmatch(data) or data.startswith("http"):
        raise InvalidRequest(f"{path}.data: must be base64")
    return data


def _one_line(details: dict[str, Any]) -> str:
    try:
        return dumps(details)
    except ValueError:
        return '{"status":"denied"}'


def _write(items: Sequence[_Turn | _Result | Row], rows: list[Row], rules: RowRules) -> None:
    media: dict[str, list[Row]] = {}
    for item in items:
        if isinstance(item, _Result):
            if not item.moved:
                _write_result(item, rows, media)
            continue
        _flush(media, rows)
        if isinstance(item, _Turn):
            _write_turn(item, rows, media, rules)
        else:
            rows.append(item)
    _flush(media, rows)


def _write_turn(turn: _Turn, rows: list[Row], media: dict[str, list[Row]], rules: RowRules) -> None:
    if not turn.text and not turn.calls:
        return  # the server refuses a row with neither
    row: Row = {"role": "assistant", "content": turn.text}
    if turn.thinking and rules.replay_thinking:
        row["reasoning_content"] = turn.thinking
    if turn.calls:
        row["tool_calls"] = turn.calls
    rows.append(row)
    for call in turn.open_calls():
        name = call["function"]["name"]
        content = f"The call of {name} was interrupted: no output of it exists."
        rows.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    for result in turn.results:
        _write_result(result, rows, media)


def _write_result(result: _Result, rows: list[Row], media: dict[str, list[Row]]) -> None:
    rows.append({"role": "tool", "tool_call_id": result.call_id, "content": result.content})
    if result.media:
        media.setdefault(result.call_id, []).extend(result.media)


def _flush(media: dict[str, list[Row]], rows: list[Row]) -> None:
    """Show what tools returned besides text, which tool rows cannot carry."""
    if not media:
        return
    parts: list[Row] = []
    for call_id, found in media.items():
        kind = "image" if any(part["type"] == "image_url" for part in found) else "audio"
        parts.append({"type": "text", "text": f"[{kind} result of tool call {call_id}]"})
        parts.extend(found)
    rows.append({"role": "user", "content": parts})
    media.clear()


def _merge_ending(rows: list[Row]) -> str:
    """Make one row of the assistant rows at the end, and return its text.

    The server refuses two. They are joined without anything between them: what a continued
    answer brings is emitted, and then recorded, as the plain rest of the text before it. Thoughts
    are left out, because the server would repeat them as thoughts of the new answer.
    """
    texts: list[str] = []
    while rows and rows[-1]["role"] == "assistant":
        texts.append(rows.pop()["content"])
    text = whole("".join(reversed(texts)))
    if text:
        rows.append({"role": "assistant", "content": text})
    return text
