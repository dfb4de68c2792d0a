"""Flask under a threaded WSGI server, with llama-server behind it and a worker beside it.

``POST /chat`` streams an answer to the browser; one that leaves ends the generation.
``GET /healthz`` and ``GET /metrics`` tell of the worker, which serves the bus in the same process.

A server that forks (gunicorn, uWSGI) must start the worker after the fork: see ``after_fork.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import requests
from flask import Flask, Response, request
from stage import arguments, stage
from werkzeug.serving import make_server

from provider_llamacpp import (
    Client,
    Failure,
    ProviderWorker,
    Settings,
    TextDelta,
    prometheus_text,
)


def create_app(worker: ProviderWorker, client: Client) -> Flask:
    """The application. ``client`` is one for all threads: it holds no connection."""
    app = Flask(__name__)

    @app.post("/chat")
    def chat() -> Response:
        question: dict[str, Any] = request.get_json()
        stream = client.stream_chat(question["prompt"], max_output_tokens=200)

        def pieces() -> Iterator[str]:
            # The server closes this generator when the browser is gone, and with it the stream.
            with stream:
                for event in stream:
                    if isinstance(event, TextDelta):
                        yield event.delta
                    elif isinstance(event, Failure):
                        yield f"\n[{event.error.error_kind}: {event.error.error_message}]"

        return Response(pieces(), mimetype="text/plain")

    @app.get("/healthz")
    def healthz() -> tuple[dict[str, Any], int]:
        stats = worker.stats()
        well = worker.alive and stats["connected"]
        return {"connected": stats["connected"], "server": stats["server"]["state"]}, (
            200 if well else 503
        )

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(prometheus_text(worker.stats()), mimetype="text/plain; version=0.0.4")

    return app


def main() -> None:
    options = arguments("Flask under a threaded WSGI server.").parse_args()
    with stage(options.api_url) as here:
        settings = Settings(url=here.url, api_url=here.api_url)
        with ProviderWorker(settings) as worker:
            worker.wait_ready(30.0)
            app = create_app(worker, Client(here.api_url))
            server = make_server("127.0.0.1", 0, app, threaded=True)
            serving = threading.Thread(target=server.serve_forever)
            serving.start()
            try:
                visit(f"http://127.0.0.1:{server.server_port}")
            finally:
                server.shutdown()
                serving.join()
                server.server_close()


def visit(url: str) -> None:
    """What a browser and a Prometheus would do."""
    with requests.post(f"{url}/chat", json={"prompt": "Hello"}, stream=True, timeout=60) as answer:
        answer.encoding = "utf-8"
        for text in answer.iter_content(None, decode_unicode=True):
            print(text, end="", flush=True)
    print()
    print(requests.get(f"{url}/healthz", timeout=10).json())
    metrics = requests.get(f"{url}/metrics", timeout=10).text
    print(next(line for line in metrics.splitlines() if line.startswith("provider_llamacpp_up")))


if __name__ == "__main__":
    main()
