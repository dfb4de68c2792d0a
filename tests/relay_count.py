"""Relays a fixed stream and nothing else: what ``test_instructions.py`` counts the instructions of.

``python relay_count.py TOKENS BATCH`` feeds so many tokens, ``BATCH`` in each read (1, or a
multiple of 8), through de-chunking, assembler and framing, as a stream does between two system
calls. Ends the process without tearing the interpreter down, so that two counts differ by the
tokens alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from provider_llamacpp.bus.frames import KeyPool, text_frames
from provider_llamacpp.events.assembler import Assembler, Outcome
from provider_llamacpp.server.body import Dechunker

_WORDS = (" the", " answer", ",", " Straße", " is", ' \\"so\\"', " far", ".\\n")
_CHUNK = (
    'data: {"choices":[{"finish_reason":null,"index":0,"delta":{%s}}],"created":1726000000,'
    '"id":"chatcmpl-RkY0mDkqgJ8mRV0y2rVhMwmVtWyTq1Xs","model":"demo.gguf",'
    '"system_fingerprint":"b9840-abcdef12","object":"chat.completion.chunk"}\n\n'
)


def _chunked(delta: str) -> bytes:
    event = (_CHUNK % delta).encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def reads(tokens: int, batch: int) -> Iterator[bytes]:
    """What the socket gives: the role, then words, in HTTP chunks of one event each."""
    words = [_chunked(f'"content":"{word}"') for word in _WORDS]
    burst = b"".join(words) * (batch // len(words))
    yield _chunked('"role":"assistant","content":null')
    for number in range(tokens // batch):
        yield burst or words[number % len(words)]


def relay(tokens: int, batch: int) -> int:
    """Bytes of the WebSocket frames."""
    body, keys, sent = Dechunker(), KeyPool(lambda size: b"\x5a" * size), 0
    assembler = Assembler(
        model="demo", provider="llamacpp", decode_name=str, now_ms=lambda: 0, call_id=str
    )
    for raw in reads(tokens, batch):
        if frames := assembler.feed(body.feed(raw)):
            sent += len(text_frames(frames, keys.take))
    return sent + len(text_frames(assembler.finish(Outcome()), keys.take))


if __name__ == "__main__":
    relay(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)
