"""llama-server without a bus: what the worker does for its callers, for the program itself.

The way is the worker's own (:mod:`.answers`, :mod:`.server`): the same requests, frames, failures
and aborts; only nobody else reads along.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .answers import assembler_for, last_frames, open_answer
from .calls import Call
from .chatstream import ChatStream, Messages, loose_messages
from .errors import BusError, Interrupted, InvalidRequest, ProviderError, redacted
from .payloads import ChatRequest, decode_chat, decode_count
from .router import DEFAULT_MAX_TOKENS
from .server.address import Target, normalise_api_url
from .server.catalog import Catalog, ModelInfo
from .server.discovery import Discovery
from .server.embeddings import Embedder
from .server.queries import MOST_INPUTS, TokenCounter
from .server.resume import Resumer
from .server.upstream import Upstream
from .settings import ResumeMode, Settings
from .transcript.convert import Abilities, anthropic_count_body, chat_body, count_body
from .typed import Event, decode_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from .answers import Answer

CATALOG_SECONDS = 60.0
"""What a server serves is looked at again after so long."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors for texts."""

    model: str
    """As the server names it, or as it was asked for."""
    vectors: list[list[float]]
    """One for each text, in their order, all of one length."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a server serves. None is not known: older servers say less."""

    id: str
    aliases: tuple[str, ...]
    state: Literal["loaded", "sleeping", "loading", "downloading", "unloaded", "failed"]
    context_window: int
    """Tokens of one slot; 4096 where the server tells none (provider protocol 4.2)."""
    slots: int | None
    """Requests it runs at once."""
    chat: bool
    """False for a model that only embeds or ranks."""
    embeddings: bool | None
    tools: bool | None
    thinking: bool | None
    """Its chat template has a switch, or levels, for thoughts."""
    vision: bool | None
    audio: bool | None


class Client:
    """Asks one llama-server. Holds no connection and no thread, so there is nothing to close.

    Safe to share between threads.

    :param api_url: any form of its address (provider protocol 3); None takes the server that
        answers on port 8080 or 9931 of this machine
    :param api_key: bearer for it. The environment is not read
    :param ca_file: CA certificates (PEM) for ``https``; None uses the ones that come along
    :param client_cert: client certificate and key in one PEM file
    :param connect_timeout: seconds for names, TCP and TLS together
    :param resume: take streams up again whose connection breaks, as
        :attr:`Settings.resume <provider_llamacpp.settings.Settings.resume>`
    :param resume_budget: seconds after which such a stream is lost
    :raises SettingsError: naming the argument that cannot be used
    """

    def __init__(
        self,
        api_url: str | None = None,
        *,
        api_key: str | None = None,
        ca_file: str | None = None,
        client_cert: str | None = None,
        connect_timeout: float = 10.0,
        resume: ResumeMode = "auto",
        resume_budget: float = 30.0,
    ) -> None:
        self.settings = settings = Settings(
            api_url=api_url,
            api_key=api_key,
            ca_file=ca_file,
            client_cert=client_cert,
            connect_timeout=connect_timeout,
            resume=resume,
            resume_budget=resume_budget,
        )
        self._upstream = upstream = Upstream(
            connect_timeout=connect_timeout, ca_file=ca_file, client_cert=client_cert
        )
        self._discovery = Discovery(upstream, provider=settings.id)
        self._resumer = Resumer(upstream, resume, resume_budget)
        self._counter = TokenCounter(upstream)
        self._embedder = Embedder(upstream)
        self._numbers = itertools.count(1)
        self._catalog: Catalog | None = None
        """Replaced whole, so that reading it takes no lock."""
        self._known_until = 0.0
        self._streams = 0
        self._lock = threading.Lock()

    # -- what can be asked ----------------------------------------------------------------

    def stream_chat(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        system_prompt: str | None = None,
        max_output_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        response_format: Mapping[str, Any] | None = None,
        thinking_level: str | None = None,
        provider_options: Mapping[str, Any] | None = None,
    ) -> ChatStream:
        """One answer, event by event. Returns at once: the request goes out with the first event.

        Before its first stream a client asks the server once what it serves, as the worker does,
        which wakes and loads nothing.

        :param model: id or alias; None takes the best one that runs
        :param max_output_tokens: of the answer, thoughts included; None is 8192
        :param tools: ``name``, ``description`` and ``parameters``, a JSON Schema
        :param response_format: ``{"type": "json", "schema": ...}``
        :param thinking_level: ``off``, ``minimal``, ``low``, ``medium``, ``high`` or ``xhigh``
        :param provider_options: more fields for llama-server, ``{"temperature": 0.2}``
            (provider protocol 5 and 8)
        :raises InvalidRequest: naming the argument that does not fit; what only the whole request
            shows is raised by the first event
        """
        system, rows = loose_messages(messages)
        request = decode_chat(
            {
                "model": model or "",
                "messages": rows,
                "system_prompt": system_prompt if system_prompt is not None else system,
                "max_output_tokens": max_output_tokens,
                "tools": [dict(each) for each in tools],
                "response_format": _plain(response_format),
                "thinking_level": thinking_level,
                "provider_options": _plain(provider_options),
            }
        )
        call = Call(next(self._numbers), "stream", key=None, model=model)
        return ChatStream(self._events(request, call), partial(call.abort, "abort"))

    def embed(self, texts: Sequence[str], *, model: str | None = None) -> Embeddings:
        """A vector for each text; as many requests as it takes, of 512 texts at most.

        Vectors that llama-server gets wrong in some of its modes are found out and asked for
        again, as for the worker's callers.

        :param model: id or alias; needed for a server in router mode only
        :raises InvalidRequest: if there is no text, or one is none
        :raises ProviderError: if the server failed, is not started for embeddings, or gave a vector
            that is none (provider protocol 9)
        """
        if isinstance(texts, str) or not all(isinstance(each, str) for each in texts):
            raise InvalidRequest("texts: must be a sequence of strings")
        if not texts:
            raise InvalidRequest("texts: must hold at least one")
        target = self._target(None)
        named, vectors = "", []
        for start in range(0, len(texts), MOST_INPUTS):
            part = list(texts[start : start + MOST_INPUTS])
            answer = self._asked(partial(self._embedder.embed, target, model, part))
            named = answer["model"]
            vectors += answer["embeddings"]
        return Embeddings(named, vectors)

    def count_tokens(
        self,
        messages: Messages,
        *,
        model: str | None = None,
        system_prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        """The tokens of a prompt, counted by the server's own template and tokenizer.

        :param model: as for :meth:`stream_chat`
        :raises InvalidRequest: naming the argument that does not fit
        :raises ProviderError: if the server failed, or cannot count (provider protocol 9)
        """
        system, rows = loose_messages(messages)
        request = decode_count(
            {
                "model": model or "",
                "messages": rows,
                "system_prompt": system_prompt if system_prompt is not None else system,
                "tools": [dict(each) for each in tools],
            }
        )
        target = self._target(None)
        if not request.model:
            request = replace(request, model=self._default(target, None))
        abilities = self._known(target, None).abilities(request.model)
        body = count_body(request, abilities=abilities)
        return self._asked(partial(self._counter.count, target, body, anthropic_count_body(body)))

    def list_models(self) -> list[ServedModel]:
        """What the server serves, in its own order. Wakes and loads nothing.

        :raises ProviderError: if it cannot be asked, ``auth_expired`` if it takes no such key
        """
        catalog = self._discovered(self._target(None), None)
        if catalog.refused:
            raise ProviderError("auth_expired", "llama-server takes no such API key")
        return [_served(each) for each in catalog.models]

    # -- what its parts are asked for -----------------------------------------------------

    def _target(self, call: Call | None) -> Target:
        """:raises ProviderError: naming ``api_url``, or if no server was found"""
        url, key = self.settings.api_url, self.settings.api_key
        root = normalise_api_url(url) if url else self._discovery.locate(key, call)
        return Target(root, key)

    def _discovered(self, target: Target, call: Call | None) -> Catalog:
        self._catalog = catalog = self._discovery.discover(target, call)
        self._known_until = time.monotonic() + CATALOG_SECONDS
        return catalog

    def _known(self, target: Target, call: Call | None) -> Catalog:
        """What it serves, as far as that can be told: why it cannot, the request itself shows."""
        if self._catalog is None or time.monotonic() > self._known_until:
            try:
                return self._discovered(target, call)
            except ProviderError:
                pass
        return self._catalog or Catalog(self.settings.id)

    def _default(self, target: Target, call: Call | None) -> str:
        """:raises ProviderError: if no model is known"""
        # Asked anew where nothing is known: that is the place to say why.
        model = self._known(target, call).default() or self._discovered(target, call).default()
        if model is None:
            raise ProviderError("permanent", f"{target.root} lists no model: name one with model")
        return model.id

    def _events(self, request: ChatRequest, call: Call) -> Generator[Event, None, None]:
        provider, secret = self.settings.id, self.settings.api_key
        assembler = assembler_for(request, provider, Abilities())
        error: ProviderError | None = None
        answer: Answer | None = None
        with self._lock:
            self._streams += 1
        try:
            target = self._target(call)
            catalog = self._known(target, call)
            if not request.model:
                request = replace(request, model=self._default(target, call))
            abilities = catalog.abilities(request.model)
            limit = request.max_output_tokens or DEFAULT_MAX_TOKENS
            prepared = chat_body(request, max_tokens=limit, abilities=abilities)
            assembler = assembler_for(
                request, provider, abilities, prepared, alone=self._alone, secret=secret
            )
            with open_answer(self._resumer, target, prepared, call, catalog=catalog) as answer:
                while not assembler.ended and (block := answer.read()):
                    yield from map(decode_event, assembler.feed(block))
        except Interrupted:
            pass
        except ProviderError as failure:
            words = redacted(failure.message, secret)
            error = ProviderError(failure.kind, words, status=failure.status)
        finally:
            with self._lock:
                self._streams -= 1
        yield from map(decode_event, last_frames(assembler, call, error, answer)[0])

    def _alone(self) -> bool:
        """Whether this client has one stream only: a full context is the prompt's fault then."""
        return self._streams == 1

    def _asked(self, ask: Callable[[], T]) -> T:
        """:raises ProviderError: for what callers of the bus get as ``invocation_failed``"""
        try:
            return ask()
        except InvalidRequest:
            raise
        except BusError as error:
            cause = error.__cause__
            if not isinstance(cause, ProviderError):
                raise ProviderError("permanent", error.message) from error
            words = redacted(cause.message, self.settings.api_key)
            raise ProviderError(cause.kind, words, status=cause.status) from error


def _plain(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if value is None else dict(value)


def _served(model: ModelInfo) -> ServedModel:
    known = model.abilities
    thinks = [each for each in (known.thinking_switch, known.reasoning_effort) if each is not None]
    return ServedModel(
        id=model.id,
        aliases=model.aliases,
        state=model.state,
        context_window=model.context_window,
        slots=model.slots,
        chat=model.for_chat,
        embeddings=model.embeddings,
        tools=known.tools,
        thinking=any(thinks) if thinks else None,
        vision=known.vision,
        audio=known.audio,
    )
