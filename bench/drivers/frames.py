"""The frames a peer writes (provider protocol 6), built the way one builds them: as dicts."""

from __future__ import annotations

import time
from typing import Any

Json = dict[str, Any]


class Message:
    """The answer so far, and the frames about it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.usage: Json = {}

    def snapshot(self, **more: Any) -> Json:
        """The whole message."""
        content = [{"type": "text", "text": "".join(self.texts)}] if self.texts else []
        return {
            "role": "assistant",
            "content": content,
            "stop_reason": "end",
            "model": "stub",
            "provider": "bench",
            "timestamp": int(time.time() * 1000),
            **more,
        }

    def take(self, chunk: Json) -> list[Json]:
        """The frames that a chunk of llama-server gives."""
        frames: list[Json] = []
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                if not self.texts:
                    frames.append({"type": "start", "partial": self.snapshot()})
                    frames.append({"type": "text_start", "partial": self.snapshot()})
                self.texts.append(text)
                frames.append({"type": "text_delta", "delta": text})
            if choice.get("finish_reason"):
                frames.append({"type": "text_end", "partial": self.snapshot()})
        if usage := chunk.get("usage"):
            self.usage = {"input": usage["prompt_tokens"], "output": usage["completion_tokens"]}
            frames.append({"type": "usage", "usage": self.usage})
        return frames

    def end(self) -> list[Json]:
        """The last frames."""
        return [
            {"type": "stop", "stop_reason": "end"},
            {"type": "done", "message": self.snapshot(usage=self.usage)},
        ]
