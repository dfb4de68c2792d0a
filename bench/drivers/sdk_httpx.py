"""Peer: a worker on the official iii-sdk, with httpx to llama-server.

One coroutine per stream on the SDK's event loop, one client for all, lines as httpx gives them.
Telemetry is off.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import httpx
from iii import InitOptions, register_worker

from .frames import Message
from .plain import REQUEST


def main() -> None:
    """Run the worker until it is ended."""
    stub, sink = int(sys.argv[1]), int(sys.argv[2])
    url = f"http://127.0.0.1:{stub}/v1/chat/completions"
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def stream(data: dict[str, Any]) -> dict[str, Any]:
        writer, message = data["writer_ref"], Message()
        async with client.stream("POST", url, json=REQUEST) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    break
                for frame in message.take(json.loads(line[6:])):
                    await writer.send_message_async(json.dumps(frame))
        for frame in message.end():
            await writer.send_message_async(json.dumps(frame))
        await writer.close_async()
        return {"ok": True}

    options = InitOptions(worker_name="bench-sdk", otel={"enabled": False})
    worker = register_worker(f"ws://127.0.0.1:{sink}", options)
    worker.register_function("provider::bench::stream", stream)
    threading.Event().wait()


if __name__ == "__main__":
    main()
