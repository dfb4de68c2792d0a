"""Peer: the openai client reads llama-server, websocket-client writes the channel."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
import websocket

from .frames import Message
from .plain import REQUEST, run


def main() -> None:
    """One client for all streams, a thread and a channel for each."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{int(sys.argv[1])}/v1", api_key="none")

    def relay(stub: int, sink: int, number: int) -> None:
        channel = websocket.create_connection(
            f"ws://127.0.0.1:{sink}/ws/channels/{number}?key=k&dir=write"
        )
        message = Message()
        request: Any = REQUEST
        for chunk in client.chat.completions.create(**request):
            for frame in message.take(chunk.model_dump(exclude_none=True)):
                channel.send(json.dumps(frame))
        for frame in message.end():
            channel.send(json.dumps(frame))
        channel.close(timeout=1)

    run(relay)


if __name__ == "__main__":
    main()
