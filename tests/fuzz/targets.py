"""What is fuzzed by coverage: functions of bytes that fail when a law is broken.

Each takes the bytes any fuzzer makes; :class:`~fuzz.feed.Feed` makes choices of them. Found inputs
are kept as named tests in ``tests/test_fuzz.py``.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

from chunks import assembler
from laws import check_frames, strict

from provider_llamacpp import jsontext
from provider_llamacpp.bus import frames as ws
from provider_llamacpp.bus.channel import channel_url
from provider_llamacpp.bus.conversation import Conversation
from provider_llamacpp.bus.delays import Delays
from provider_llamacpp.bus.invocations import Invocation, PendingCalls
from provider_llamacpp.bus.link import origin
from provider_llamacpp.bus.registrations import Function, Registrations
from provider_llamacpp.bus.session import Session
from provider_llamacpp.errors import InvalidRequest, ProviderError, SettingsError
from provider_llamacpp.events.assembler import Outcome
from provider_llamacpp.events.sse import EventCutter
from provider_llamacpp.payloads import WriterRef, decode_count, decode_stream
from provider_llamacpp.server.address import normalise_api_url
from provider_llamacpp.settings import Settings
from provider_llamacpp.transcript.convert import (
    Abilities,
    anthropic_count_body,
    chat_body,
    count_body,
)

from .feed import Feed

SNIPPETS = [
    b"data: ",
    b"\n\n",
    b"\n",
    b"\r\n\r\n",
    b"\r",
    b": c\n",
    b"data: [DONE]\n\n",
    b"error: x\n\n",
    b"event: e\n",
    b"id: 1\n",
    b'data: {"choices":[{"index":0,"delta":{"content":"',
    b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"',
    b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"',
    b'"}}]}\n\n',
    b'"}}]}}]}\n\n',
    b"\xef\xbb\xbf",
    b"\\ud83d",
    b"\\ude00",
    b"{",
    b"}",
]
SECRET = "s3cr3t"


def _body(feed: Feed) -> bytes:
    """What a server may send: chunks of some sense, snippets, any bytes."""
    made = b""
    while feed.left:
        kind = feed.below(6)
        if kind == 0:
            made += feed.raw(16)
        elif kind == 1:
            made += feed.one_of(SNIPPETS)
        elif kind == 2:
            made += _event({"choices": [{"index": 0, "delta": _delta(feed)}], "created": 1})
        elif kind == 3:
            made += _event({"choices": [], "usage": {"prompt_tokens": feed.number()}})
        elif kind == 4:
            reason = feed.one_of(["stop", "length", "tool_calls", None, 5])
            made += _event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        else:
            made += _event(feed.value())
    return made


def _delta(feed: Feed) -> Any:
    kind = feed.below(5)
    if kind < 3:
        return {("content", "reasoning_content", "reasoning")[kind]: feed.text(8)}
    if kind == 4:
        return feed.value()
    function = {"name": feed.one_of(["x", "y__z", ""]), "arguments": feed.one_of(["{", "}", "1"])}
    call = {"index": feed.below(3), "id": feed.one_of(["a", "b", "", None]), "function": function}
    return {"tool_calls": [call]}


def _event(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False)
    return b"data: " + text.encode("utf-8", "surrogatepass") + b"\n\n"


def sse(data: bytes) -> None:
    """Bytes of a body: the events do not depend on how they are cut, and hold no line ends."""
    feed = Feed(data)
    limit = feed.one_of([1 << 20, 64, 8])
    raw = feed.below(2)
    cut_by = Feed(feed.raw(8))
    body = feed.rest() if raw else _body(feed)

    def items(blocks: list[bytes]) -> list[Any]:
        cutter = EventCutter(limit=limit)
        found = [item for block in blocks for item in cutter.feed(block)]
        return found + cutter.close()

    whole = items([body])
    assert items(cut_by.cut(body)) == whole
    assert items([body[at : at + 1] for at in range(len(body))]) == whole
    assert all(item for item in whole if isinstance(item, bytes))
    assert all(len(item) <= limit for item in whole if isinstance(item, bytes))


def stream(data: bytes) -> None:
    """Bytes of a body: the frames are lawful and the same however they are cut and read."""
    feed = Feed(data)
    options: dict[str, Any] = {
        "fat": not feed.below(4),
        "prefill": feed.one_of(["", "", "I say", "\n a "]),
        "secret": feed.one_of([None, "a"]),
        "context_window": feed.one_of([None, 1, 4096]),
        "now_ms": lambda: 1,
    }
    outcome = feed.one_of(
        [
            Outcome(),
            Outcome(error=ProviderError("transient", "cut")),
            Outcome(reason="abort"),
            Outcome(reason="stop"),
        ]
    )
    raw = not feed.below(4)
    cut_by = Feed(feed.raw(8))
    body = feed.rest() if raw else _body(feed)

    def made(blocks: list[bytes], learning: bool) -> list[bytes]:
        machine = assembler(learning=learning, **options)
        found = [frame for block in blocks for frame in machine.feed(block)]
        return found + machine.finish(outcome)

    frames = made([body], False)
    if outcome.reason != "abort":
        check_frames(frames)
    assert made(cut_by.cut(body), True) == frames
    assert made([body[at : at + 1] for at in range(len(body))], True) == frames


def frames(data: bytes) -> None:
    """Bytes of a WebSocket: the messages are the same however they are cut, or none is."""
    feed = Feed(data)
    limit = feed.one_of([64, 1 << 20])
    cut_by = Feed(feed.raw(8))
    body = b""
    while feed.left:
        kind = feed.below(4)
        if kind == 0:
            body += feed.raw(16)
        else:
            payload = feed.raw(90) * feed.one_of([1, 1, 1, 200])
            opcode = feed.one_of([0, 1, 2, 8, 9, 10])
            first = opcode | (0x80 if feed.below(3) else 0)
            size = len(payload)
            head = bytes([first, size]) if size < 126 else bytes([first, 126, *divmod(size, 256)])
            body += head[:4] + payload

    def read(blocks: list[bytes]) -> tuple[list[tuple[int, bytes]], int]:
        reader, found = ws.FrameReader(limit), []
        try:
            for block in blocks:
                for each in reader.feed(block):
                    found.append(each)
        except ws.FrameError as error:
            return found, error.code
        return found, 0

    whole = read([body])
    assert read(cut_by.cut(body)) == whole
    assert read([body[at : at + 1] for at in range(len(body))]) == whole
    assert all(len(payload) <= limit or opcode >= 8 for opcode, payload in whole[0])
    for opcode, payload in whole[0]:
        if opcode == ws.TEXT:
            assert read([_as_server(ws.text_frames([payload], lambda count: b"\0" * count))])[0]


def _as_server(data: bytes) -> bytes:
    """A frame of ours with a key of zeros as a server would send it: unmasked."""
    size = data[1] & 0x7F
    head = 2 if size < 126 else 4 if size == 126 else 10
    return bytes([data[0], size]) + data[2:head] + data[head + 4 :]


class _Line:
    """Takes what a conversation says in place of a session."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.over: str | None = None

    def post(self, parts: list[bytes], *, wait: float, given_up: Any = bool) -> None:
        reader = ws.FrameReader(1 << 26)
        for part in parts:
            # Unmasked by the key in it, as an engine would.
            size = part[1] & 0x7F
            head = 2 if size < 126 else 4 if size == 126 else 10
            key, payload = part[head : head + 4], part[head + 4 :]
            plain = bytes([part[0], size]) + part[2:head] + ws.mask(payload, key)
            self.said += [text for opcode, text in reader.feed(plain) if opcode == ws.TEXT]

    def end(self, reason: str) -> None:
        self.over = self.over or reason


def bus(data: bytes) -> None:
    """Messages of an engine: each invocation gets exactly one result, whatever else is said."""
    feed = Feed(data)
    line, later, asked = _Line(), cast("list[Invocation]", []), Counter[str]()
    registrations = Registrations(lambda: Delays(1.0, 2.0), lambda: 0.0)
    handlers: dict[str, Callable[[Invocation], None]] = {
        "f::now": lambda call: call.reply(call.data),
        "f::twice": lambda call: (call.reply(1), call.fail("a", "b"))[0],
        "f::later": later.append,
        "f::raises": lambda call: _raise(),
    }
    for name, handler in handlers.items():
        registrations.add(Function(name, handler), b"{}")
    talk = Conversation(
        cast(Session, line),
        registrations,
        PendingCalls(),
        worker_name="w",
        now=0.0,
        on_taken_in=lambda: None,
    )
    while feed.left:
        message: Any = feed.value()
        if feed.below(3) and isinstance(message, dict):
            message["type"] = feed.one_of(TYPES)
            message["function_id"] = feed.one_of([*handlers, "no::such", feed.value(1)])
            message["invocation_id"] = feed.one_of(["a", "b", None, feed.value(1)])
        text = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
        if not feed.below(6):
            text = feed.raw(32)
        name = _invoked(text)
        if name is not None:
            asked[name] += 1
        talk.on_message(text)
        if later and not feed.below(3):
            later.pop().reply(feed.value())
    for call in later:
        call.fail("c", "d")
    answered = Counter[str]()
    for each in line.said:
        said = strict(each)
        if said["type"] == "invocationresult":
            assert ("result" in said) != ("error" in said)
            answered[said["invocation_id"]] += 1
    assert answered == asked


def _raise() -> None:
    raise RuntimeError("a handler broke")


TYPES = (
    *("invokefunction", "invokefunction", "invokefunction", "invocationresult", "ping"),
    *("workerregistered", "triggerregistrationresult", "registrationrejected", "error", "other"),
)


def _invoked(text: bytes) -> str | None:
    """The id that a result is owed to, as it will be written."""
    try:
        message = jsontext.loads(text)
    except ValueError:
        return None
    if not isinstance(message, dict) or message.get("type") != "invokefunction":
        return None
    name = message.get("invocation_id")
    return jsontext.whole(name) if isinstance(name, str) else None


def writer(data: bytes) -> None:
    """JSON: what is written reads back as it was, strictly; what is read can be written."""
    feed = Feed(data)
    value = feed.value(6)
    try:
        text = jsontext.dumpb(value)
    except ValueError:
        return
    again = strict(text)
    assert jsontext.loads(text) == again
    assert jsontext.dumpb(again) == text
    rest = feed.rest()
    try:
        read = jsontext.loads(rest)
        text = jsontext.dumpb(read)
    except ValueError:
        return
    assert strict(text) == jsontext.loads(text)


def url(data: bytes) -> None:
    """Addresses: of any text a root that stays itself and adds nothing, or a refusal that tells
    no secret."""
    feed = Feed(data)
    scheme = feed.one_of(["http://", "https://", "HTTP://", "ws://", "wss://", "//", ""])
    secret = feed.one_of(["", f"u:{SECRET}@", f"u:{SECRET}", f"{SECRET}/@", f"u:a?{SECRET}@"])
    text = scheme + secret + feed.text(40) + feed.one_of(["", f"?key={SECRET}", "/v1", "/v1/"])
    try:
        root = normalise_api_url(text)
    except ProviderError as error:
        assert SECRET not in error.message
    else:
        parts = urlsplit(root)
        assert root.isascii() and root.isprintable() and " " not in root
        assert parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        assert not (parts.username or parts.password or parts.query or parts.fragment)
        assert normalise_api_url(root) == root
        for suffix in ("/v1", "/v1/chat/completions", "/"):
            assert normalise_api_url(root + suffix) == root
    try:
        Settings(url=text, api_url=feed.one_of([None, text]))
    except SettingsError as error:
        assert SECRET not in str(error)
    else:
        assert secret != f"u:{SECRET}@" or SECRET not in origin(text)
        ref = WriterRef(feed.text(), feed.text())
        _channel(text, ref)


def _channel(engine: str, ref: WriterRef) -> None:
    """Ids and keys stay in their place, whatever the engine's address is."""
    base, made = urlsplit(engine), channel_url(engine, ref, "write")
    assert (made.scheme, made.netloc) == (base.scheme, base.netloc)
    # Two more are the route's own, one is the id's.
    assert made.path.count("/") == base.path.rstrip("/").count("/") + 3
    assert made.query.startswith(f"{base.query}&key=" if base.query else "key=")
    assert made.query.endswith("&dir=write") and not made.fragment
    added = made.query.removeprefix(base.query)
    assert added.count("&") == (2 if base.query else 1)
    assert not re.search(r"[\x00-\x20\x7f]", made.path.rpartition("/")[2] + added)


def convert(data: bytes) -> None:
    """Payloads: a body that is strict JSON and fits the server's rules, or a refusal with a
    reason; the payload stays as it was."""
    feed = Feed(data)
    payload: dict[str, Any] = {
        "model": feed.text(6),
        "messages": [_message(feed) for _ in range(feed.below(6))],
        "writer_ref": {"channel_id": "c", "access_key": "k"},
    }
    for name in ("tools", "provider_options", "response_format", "system_prompt", "thinking_level"):
        if not feed.below(3):
            payload[name] = _extra(name, feed)
    before = repr(payload)
    abilities = Abilities(
        reasoning_effort=bool(feed.below(2)),
        preserve_reasoning=bool(feed.below(2)),
        vision=feed.one_of([None, True, False]),
        tools=feed.one_of([None, True, False]),
    )
    try:
        request = decode_stream(payload)
        prepared = chat_body(request, max_tokens=9, abilities=abilities)
        body = jsontext.dumpb(prepared.body)
    except (InvalidRequest, ProviderError, ValueError) as error:
        assert str(error)
        # NaN is no JSON, and the bus would not have let it in.
        assert not isinstance(error, ValueError) or "nan" in before or "inf" in before
    else:
        _check_rows(strict(body)["messages"], prepared.prefill)
        assert all(isinstance(each, str) for each in prepared.warnings)
    assert repr(payload) == before
    try:
        counted = count_body(decode_count(payload), abilities=abilities)
        strict(jsontext.dumpb(counted))
        strict(jsontext.dumpb(anthropic_count_body(counted)))
    except (InvalidRequest, ProviderError, ValueError):
        pass


def _extra(name: str, feed: Feed) -> Any:
    if name == "tools":
        names = ["a::b", "a__b", "x y", feed.text(8)]
        return [
            {"name": feed.one_of(names), "description": feed.text(4), "parameters": feed.value(3)}
            for _ in range(feed.below(4))
        ]
    if name == "system_prompt":
        return feed.text()
    if name == "thinking_level":
        return feed.one_of(["off", "minimal", "low", "medium", "high", "xhigh", "other"])
    if name == "response_format":
        kind = feed.one_of(["json", "text", "json_schema", "x"])
        return {"type": kind, "schema": feed.value(3)}
    names = ["max_tokens", "n", "chat_template_kwargs", "tool_choice", "url", feed.text(6)]
    return {feed.one_of(names): feed.value(3) for _ in range(feed.below(4))}


def _message(feed: Feed) -> Any:
    role = feed.one_of(["user", "assistant", "assistant", "function_result", "custom", "x"])
    return {
        "role": role,
        "content": [_block(feed, 2) for _ in range(feed.below(4))],
        "timestamp": 1,
        "function_call_id": feed.one_of(["c1", "c2", ""]),
        "function_id": "a::b",
        "details": feed.value(2),
        "is_error": feed.value(0),
        "stop_reason": feed.one_of(["end", "error", "aborted"]),
        "error_message": feed.text(4),
    }


def _block(feed: Feed, depth: int) -> Any:
    kind = feed.below(7)
    if kind == 0 and depth:
        inner = [_block(feed, depth - 1) for _ in range(feed.below(3))]
        name = feed.one_of(["c1", "c2", ""])
        return {"type": "function_result", "function_call_id": name, "content": inner}
    if kind == 1:
        call = {"id": feed.one_of(["c1", "c2", ""]), "function_id": feed.text(6)}
        return {"type": "function_call", **call, "arguments": feed.value(3)}
    if kind == 2:
        mime = feed.one_of(["image/png", "audio/wav", "x", feed.text(8)])
        return {"type": "image", "mime": mime, "data": feed.one_of(["aGk=", "http", feed.text(8)])}
    if kind == 3:
        return {"type": feed.one_of(["thinking", "redacted_thinking", "file"]), "text": feed.text()}
    return feed.value(2) if kind == 4 else {"type": "text", "text": feed.text()}


def _check_rows(rows: list[dict[str, Any]], prefill: str) -> None:
    """What llama-server asks of a conversation."""
    waiting: Counter[str] = Counter()
    for at, row in enumerate(rows):
        if row["role"] == "tool":
            waiting[row["tool_call_id"]] -= 1
            continue
        assert not +waiting, "every call is answered right behind its row"
        waiting.clear()
        assert row["role"] in ("user", "assistant") or (row["role"] == "system" and not at)
        if row["role"] == "assistant":
            assert row["content"] or row.get("tool_calls")
            for call in row.get("tool_calls", ()):
                waiting[call["id"]] += 1
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                assert re.fullmatch(r"[a-zA-Z0-9_-]{1,128}", call["function"]["name"])
    assert [row["role"] for row in rows[-2:]] != ["assistant", "assistant"]
    last = rows[-1] if rows else {"role": ""}
    assert prefill == (last["content"] if last["role"] == "assistant" else "")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "sse": sse,
    "stream": stream,
    "frames": frames,
    "bus": bus,
    "writer": writer,
    "url": url,
    "convert": convert,
}


def call_thread(work: Callable[[], None]) -> None:
    """Run ``work`` on a thread with the stack of a call's thread."""
    before = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
