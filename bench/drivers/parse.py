"""Limit: requests, sseclient-py and json.loads, a thread per stream, and nothing sent.

Only the first token goes to the sink at once, to time the stream; the rest follows when all is
over, so that the sink can see that nothing is missing.
"""

from __future__ import annotations

import json

import requests
import sseclient

from .plain import REQUEST, bytes_to, run


def relay(stub: int, sink: int, number: int) -> None:
    """Read one answer."""
    texts: list[str] = []
    usage = None
    out = bytes_to(sink, number)
    with requests.Session() as session:
        url = f"http://127.0.0.1:{stub}/v1/chat/completions"
        response = session.post(url, json=REQUEST, stream=True)
        for event in sseclient.SSEClient(response.iter_content(None)).events():
            if event.data == "[DONE]":
                break
            chunk = json.loads(event.data)
            usage = chunk.get("usage", usage)
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    texts.append(text)
                    if len(texts) == 1:
                        out.sendall(b'"content":"' + text.encode())
        response.close()
    with out:
        out.sendall(b'"content":"'.join(text.encode() for text in ["", *texts[1:]]))
        out.sendall(json.dumps(usage).encode() + b"data: [DONE]")


if __name__ == "__main__":
    run(relay)
