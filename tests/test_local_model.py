"""The demo model on a real server says what it is written to say."""

import requests

from provider_llamacpp.local import model
from provider_llamacpp.local.llama import LlamaServer


def test_the_sentence(llama: LlamaServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    reply = requests.post(f"{llama.url}/v1/chat/completions", json=body, timeout=30)
    assert reply.json()["choices"][0]["message"]["content"] == model.SENTENCE
