"""A scripted llama-server that says of itself what a test wants, and notes what would wake it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from peers import NOT_FOUND, PATIENCE, Request, ScriptedServer, answer_json

CAPS = {
    "supports_tools": True,
    "supports_tool_calls": True,
    "supports_parallel_tool_calls": False,
    "supports_system_role": True,
    "supports_reasoning_effort": False,
}


def failure(status: int, words: str, kind: str = "server_error") -> dict[str, Any]:
    return answer_json({"error": {"code": status, "message": words, "type": kind}}, status)


PROPS = {
    "total_slots": 2,
    "default_generation_settings": {"n_ctx": 8192},
    "modalities": {"vision": False, "audio": False},
    "chat_template": "{{ messages }}",
    "chat_template_caps": CAPS,
    "build_info": "b11434-0123abc",
    "is_sleeping": False,
}
"""What a server of one model says of itself."""


def answers_after(go: threading.Event) -> Callable[[Request], dict[str, Any]]:
    """A stream of one word, held back until ``go`` is set."""
    choices = ({"delta": {"content": "x"}}, {"delta": {}, "finish_reason": "stop"})
    events = [{"choices": [{"index": 0, **choice}]} for choice in choices]
    script: list[Any] = [
        lambda exchange: exchange.watch(PATIENCE, go),
        {"headers": {"headers": {"content-type": "text/event-stream"}}},
        *({"send": f"data: {json.dumps(event)}\n\n"} for event in events),
    ]
    return lambda request: {"script": script}


class ScriptedLlama(ScriptedServer):
    """One model behind llama-server's routes; the attributes may be changed at any time."""

    def __init__(self, **said: Any) -> None:
        super().__init__(self._answer_to)
        self.models: list[dict[str, Any]] = [row("demo", n_ctx=8192)]
        self.props: dict[str, Any] = {**PROPS, "media_marker": "<__media__>"}
        self.model_props: dict[str, dict[str, Any]] = {}
        """In router mode: those of the models that run."""
        self.health = answer_json({"status": "ok"})
        self.key: str | None = None
        self.tools_in_prompt = True
        self.template_answer: dict[str, Any] | None = None
        self.embeddings: Any = [0.6, 0.8]
        """A vector, an answer, or None where they are off."""
        self.chat: dict[str, Any] | None = None
        """Instead of a token."""
        self.more_routes: dict[str, Any] = {}
        """Answers, or functions of the request, by path; they come before the others."""
        self.wakes_up = True
        """A chat ends its sleep."""
        for name, value in said.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def sleeps(self) -> ScriptedLlama:
        self.props["is_sleeping"] = True
        return self

    def woken(self) -> list[str]:
        """The requests so far that wake a model."""
        return [line for line in self.paths() if line.startswith("POST") or "/slots" in line]

    def _answer_to(self, request: Any) -> dict[str, Any]:
        if request.path in self.more_routes:
            answer = self.more_routes[request.path]
            return answer(request) if callable(answer) else answer
        if request.path == "/health":
            return self.health
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return failure(401, "Invalid API Key", "authentication_error")
        if self.health["status"] == 503:
            return self.health
        answers = {
            "/v1/models": lambda: answer_json({"object": "list", "data": self.models}),
            "/props": lambda: self._props(request.target),
            "/apply-template": lambda: self._template(request.json()),
            "/v1/embeddings": lambda: self._embed(request.json()),
            "/v1/chat/completions": lambda: self._chat(request.json()),
            "/v1/chat/completions/input_tokens": lambda: answer_json({"input_tokens": 7}),
        }
        return answers.get(request.path, lambda: dict(NOT_FOUND))()

    def _props(self, target: str) -> dict[str, Any]:
        _, _, query = target.partition("?")
        if not query:
            return answer_json(self.props)
        assert "autoload=false" in query
        name = query.removeprefix("model=").split("&")[0]
        if name not in self.model_props:
            return failure(400, "model is not loaded", "invalid_request_error")
        return answer_json(self.model_props[name])

    def _template(self, payload: dict[str, Any]) -> dict[str, Any]:
        if self.template_answer is not None:
            return self.template_answer
        tools = str(payload.get("tools", "")) if self.tools_in_prompt else ""
        return answer_json({"prompt": f"{payload.get('chat_template_kwargs')} {tools}"})

    def _embed(self, payload: dict[str, Any]) -> dict[str, Any]:
        if self.embeddings is None:
            words = "This server does not support embeddings. Start it with `--embeddings`"
            return failure(501, words, "not_supported_error")
        if "input" not in payload:
            return failure(400, "input is required", "invalid_request_error")
        if isinstance(self.embeddings, dict):
            return self.embeddings
        rows = [
            {"index": at, "embedding": [value * (at + 1) for value in self.embeddings]}
            for at in range(len(payload["input"]))
        ]
        return answer_json({"data": rows, "model": payload.get("model")})

    def _chat(self, payload: dict[str, Any]) -> dict[str, Any]:
        if self.chat is not None:
            return self.chat
        assert payload["max_tokens"] == 1
        if self.wakes_up:
            self.props["is_sleeping"] = False
            for each in self.models:
                if each["id"] == payload["model"] and "status" in each:
                    each["status"]["value"] = "loaded"
        timings = {"prompt_n": 20, "prompt_ms": 40.0, "predicted_n": 1, "predicted_ms": 2.0}
        return answer_json({"choices": [], "model": payload["model"], "timings": timings})


def row(model: str, *, state: str | None = None, **meta: Any) -> dict[str, Any]:
    """A row of ``/v1/models``; ``state`` is what a server in router mode says."""
    found: dict[str, Any] = {
        "id": model,
        "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    }
    if state is not None:
        found["status"] = {"value": state, "args": [], "preset": f"[{model}]\n"}
    if meta:
        found["meta"] = {"n_ctx_train": 32768, "size": 2_000_000_000, **meta}
    return found
