"""One question to a llama-server, for programs that ask seldom: each makes a
:class:`~provider_llamacpp.client.Client` of its own.

Who asks often keeps one: it remembers where the server is, what it serves and what it can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .chatstream import ChatStream, Messages
from .client import Client, Embeddings, ServedModel


def stream_chat(
    messages: Messages,
    *,
    api_url: str | None = None,
    api_key: str | None = None,
    ca_file: str | None = None,
    client_cert: str | None = None,
    model: str | None = None,
    system_prompt: str | None = None,
    max_output_tokens: int | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    response_format: Mapping[str, Any] | None = None,
    thinking_level: str | None = None,
    provider_options: Mapping[str, Any] | None = None,
) -> ChatStream:
    """:meth:`Client.stream_chat <provider_llamacpp.client.Client.stream_chat>` of the server that
    :class:`~provider_llamacpp.client.Client` finds with these arguments.

    :raises InvalidRequest: naming the argument that does not fit
    :raises SettingsError: naming the argument that cannot be used
    """
    client = Client(api_url, api_key=api_key, ca_file=ca_file, client_cert=client_cert)
    return client.stream_chat(
        messages,
        model=model,
        system_prompt=system_prompt,
        max_output_tokens=max_output_tokens,
        tools=tools,
        response_format=response_format,
        thinking_level=thinking_level,
        provider_options=provider_options,
    )


def embed(
    texts: Sequence[str],
    *,
    api_url: str | None = None,
    api_key: str | None = None,
    ca_file: str | None = None,
    client_cert: str | None = None,
    model: str | None = None,
) -> Embeddings:
    """:meth:`Client.embed <provider_llamacpp.client.Client.embed>`, likewise.

    :raises InvalidRequest: if there is no text, or one is none
    :raises ProviderError: as the server failed
    :raises SettingsError: naming the argument that cannot be used
    """
    client = Client(api_url, api_key=api_key, ca_file=ca_file, client_cert=client_cert)
    return client.embed(texts, model=model)


def count_tokens(
    messages: Messages,
    *,
    api_url: str | None = None,
    api_key: str | None = None,
    ca_file: str | None = None,
    client_cert: str | None = None,
    model: str | None = None,
    system_prompt: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> int:
    """:meth:`Client.count_tokens <provider_llamacpp.client.Client.count_tokens>`, likewise.

    :raises InvalidRequest: naming the argument that does not fit
    :raises ProviderError: as the server failed
    :raises SettingsError: naming the argument that cannot be used
    """
    client = Client(api_url, api_key=api_key, ca_file=ca_file, client_cert=client_cert)
    return client.count_tokens(messages, model=model, system_prompt=system_prompt, tools=tools)


def list_models(
    *,
    api_url: str | None = None,
    api_key: str | None = None,
    ca_file: str | None = None,
    client_cert: str | None = None,
) -> list[ServedModel]:
    """:meth:`Client.list_models <provider_llamacpp.client.Client.list_models>`, likewise.

    :raises ProviderError: as the server failed
    :raises SettingsError: naming the argument that cannot be used
    """
    client = Client(api_url, api_key=api_key, ca_file=ca_file, client_cert=client_cert)
    return client.list_models()
