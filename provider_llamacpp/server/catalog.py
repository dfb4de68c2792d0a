"""What a server serves and what its models can do: rows of ``/v1/models`` and ``/props`` in,
:class:`Catalog` out.

Pure: asking is the business of :mod:`.discovery`. A field that is missing is *unknown*, never *no*:
older servers say less. Provider protocol 4.2 and 4.3, llama-server API 3 and 10.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..lenient import boolean, integer, mapping, sequence, text, texts
from ..transcript.convert import Abilities

if TYPE_CHECKING:
    from .records import ModelRecord

FALLBACK_CONTEXT = 4096
"""Tokens, where the server tells no context size at all."""
MOST_OUTPUT = 8192
"""Tokens of one answer at most."""
_LARGEST = 2**31 - 1
"""No context is larger; a number that claims it is nonsense."""

State = Literal["loaded", "sleeping", "loading", "downloading", "unloaded", "failed"]
_STATES: dict[object, State] = {
    "sleeping": "sleeping",
    "loading": "loading",
    "downloading": "downloading",
    "downloaded": "unloaded",
    "unloaded": "unloaded",
}

_EMBEDS = frozenset({"embedding", "embeddings"})
_RANKS = frozenset({"rerank", "reranker", "reranking"})
"""Tags of models that are not for chat."""

EFFORTS = ("minimal", "low", "medium", "high", "xhigh")
"""The router's thinking levels, in their order."""
_USUAL_EFFORTS = ("low", "medium", "high")


@dataclass(frozen=True, slots=True)
class Probes:
    """What no field shows and had to be found out by asking; None is not known."""

    thinking_switch: bool | None = None
    """The chat template reads ``enable_thinking``."""
    embeddings: bool | None = None
    """The server makes embeddings."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model of a server."""

    id: str
    aliases: tuple[str, ...]
    state: State
    exit_code: int | None
    """Of the process, where the state is ``failed``."""
    slots: int | None
    """Requests that the server runs at once."""
    context_window: int
    """Tokens of one slot; :data:`FALLBACK_CONTEXT` where ``abilities`` know none."""
    abilities: Abilities
    efforts: tuple[str, ...]
    """Levels the template takes for ``reasoning_effort``."""
    embeddings: bool | None
    for_chat: bool
    """False for models that only embed, rank or decide: they are not offered to the router."""

    def record(self, provider: str) -> ModelRecord:
        """What the router is told."""
        from .records import ModelRecord, ReasoningEffort

        known = self.abilities
        switch, effort = known.thinking_switch, known.reasoning_effort
        thinking = True if switch or effort else None
        if switch is False and effort is False and not known.preserve_reasoning:
            thinking = False
        return ModelRecord(
            id=self.id,
            provider=provider,
            context_window=self.context_window,
            max_output_tokens=min(self.context_window // 2, MOST_OUTPUT),
            # An older server says nothing, and most templates can.
            supports_tools=known.tools is not False,
            supports_structured_output=True,
            supports_vision=known.vision,
            supports_thinking=thinking,
            supports_thinking_off=switch if thinking else None,
            supports_xhigh=True if "xhigh" in self.efforts else None,
            reasoning_efforts=[ReasoningEffort(each) for each in self.efforts] or None,
        )


@dataclass(frozen=True, slots=True)
class Catalog:
    """All models of one server, in its own order."""

    provider: str
    models: tuple[ModelInfo, ...] = ()
    router_mode: bool = False
    """The server picks the model by its name, and loads it when asked."""
    build: str | None = None
    refused: bool = False
    """The server took no key or a wrong one: nothing is known."""

    def find(self, model: str) -> ModelInfo | None:
        """The model that a request for ``model`` reaches.

        A server of one model ignores the name: any name reaches it.
        """
        for each in self.models:
            if model == each.id or model in each.aliases:
                return each
        if len(self.models) == 1 and not self.router_mode:
            return self.models[0]
        return None

    def knows(self, model: str) -> bool:
        """Whether ``model`` is an id or an alias in this catalog."""
        return any(model == each.id or model in each.aliases for each in self.models)

    def abilities(self, model: str) -> Abilities:
        """What is known of the model that a request for ``model`` reaches."""
        found = self.find(model)
        return found.abilities if found else Abilities()

    def records(self) -> list[dict[str, Any]]:
        """The payload of ``router::models::reconcile``: what is offered for chat."""
        return [each.record(self.provider).to_dict() for each in self.models if each.for_chat]

    def ranked_ids(self) -> list[str]:
        """The ids offered for chat, the best default first (provider protocol 4.3)."""
        offered = [each for each in self.models if each.for_chat]
        return [each.id for each in sorted(offered, key=_rank)]

    def default(self) -> ModelInfo | None:
        """The model that answers where none is named: the best of those that run, else the best."""
        ranked = [found for each in self.ranked_ids() if (found := self.find(each)) is not None]
        models = ranked or list(self.models)
        running = [each for each in models if each.state in ("loaded", "sleeping")]
        return next(iter(running or models), None)


def _rank(model: ModelInfo) -> tuple[int, float]:
    # A failed model would be a default that cannot answer: it comes last.
    state = {"loaded": 0, "failed": 2}.get(model.state, 1)
    return state, -billions(model.id)


def billions(model: str) -> float:
    """Billions of parameters that an id names, as ``8B`` or ``1.5b``; -1 for none."""
    found = re.search(r"(?<![0-9A-Za-z])([0-9]+(?:\.[0-9]+)?)[bB](?![0-9A-Za-z])", model)
    return float(found[1]) if found else -1.0


def model_info(
    row: Mapping[str, Any], props: Mapping[str, Any], probes: Probes = Probes()
) -> ModelInfo | None:
    """Read one row of ``/v1/models``; None if it names no model.

    :param props: ``/props`` of this very model; empty where it was not or could not be asked
    """
    name = row.get("id")
    if not isinstance(name, str) or not name:
        return None
    launch = launch_options(row)
    context = context_window(row, launch, props)
    caps = mapping(props.get("chat_template_caps"))
    template = text(props.get("chat_template")) or ""
    effort = boolean(caps.get("supports_reasoning_effort"))
    tags = tags_of(row)
    abilities = Abilities(
        tools=_said(caps.get("supports_tools"), tags, "tools"),
        parallel_tool_calls=boolean(caps.get("supports_parallel_tool_calls")),
        reasoning_effort=effort,
        thinking_switch=_said(probes.thinking_switch, tags, "thinking"),
        preserve_reasoning=boolean(caps.get("supports_preserve_reasoning")),
        system_role=boolean(caps.get("supports_system_role")),
        vision=_reads("vision", "image", row, props, tags),
        audio=_reads("audio", "audio", row, props, tags),
        context_window=context,
    )
    embeddings = probes.embeddings
    if embeddings is None and ("embeddings" in launch or not tags.isdisjoint(_EMBEDS)):
        embeddings = True
    return ModelInfo(
        id=name,
        aliases=tuple(texts(row.get("aliases"))),
        state=state_of(row, props),
        exit_code=integer(row_status(row).get("exit_code")),
        slots=_positive(props.get("total_slots")),
        context_window=context or FALLBACK_CONTEXT,
        abilities=abilities,
        efforts=_efforts(template) if effort else (),
        embeddings=embeddings,
        for_chat=_for_chat(row, launch, tags, abilities, embeddings),
    )


def row_status(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """``status`` of a row: only a server in router mode has it."""
    return mapping(row.get("status"))


def state_of(row: Mapping[str, Any], props: Mapping[str, Any]) -> State:
    """The state of a model; a row without one is that of a server with its model loaded."""
    status = row_status(row)
    if status.get("failed") is True:
        return "failed"
    value = status.get("value")
    if value in (None, "loaded"):
        return "sleeping" if props.get("is_sleeping") is True else "loaded"
    return _STATES.get(value if isinstance(value, str) else "", "unloaded")


def context_window(
    row: Mapping[str, Any], launch: Mapping[str, str], props: Mapping[str, Any]
) -> int | None:
    """Tokens of one slot, from the most to the least trustworthy source; None if none tells.

    ``n_ctx_train`` is none of them: it is what the model could do, not what the server was told.
    """
    settings = mapping(props.get("default_generation_settings"))
    return (
        _positive(mapping(row.get("meta")).get("n_ctx"))
        or _positive(row.get("context_length"))
        or _positive(row.get("max_model_len"))
        or _launch_context(launch)
        or _positive(settings.get("n_ctx"))
        or _positive(props.get("n_ctx"))
    )


def _launch_context(launch: Mapping[str, str]) -> int | None:
    context = _positive(launch.get("ctx-size"))
    if context is None or "kv-unified" in launch:
        return context
    # Without --parallel the slots share one pool, and each may use all of it.
    return context // (_positive(launch.get("parallel")) or 1) or None


_OPTION_NAMES = {
    "c": "ctx-size",
    "np": "parallel",
    "n-parallel": "parallel",
    "kvu": "kv-unified",
    "embedding": "embeddings",
    "rerank": "reranking",
}
_OFF = frozenset({"0", "false", "off", "no", "disabled"})


def launch_options(row: Mapping[str, Any]) -> dict[str, str]:
    """The options a router-mode server starts the model with, under one name each.

    From ``status.preset`` (INI text), then ``status.args`` (a command line), which win. Options
    that are switched off are left out; those without a value have an empty one.
    """
    status = row_status(row)
    found: dict[str, str] = {}
    preset = status.get("preset")
    for line in preset.splitlines() if isinstance(preset, str) else ():
        name, equals, value = line.partition("=")
        if equals and not line.lstrip().startswith(("#", ";", "[")):
            found[_option_name(name)] = value.strip()
    args = texts(status.get("args"))
    for at, each in enumerate(args):
        if not each.startswith("-"):
            continue
        name, equals, value = each.partition("=")
        if not equals and at + 1 < len(args) and not re.match("-+[A-Za-z]", args[at + 1]):
            value = args[at + 1]
        found[_option_name(name)] = value
    return {name: value for name, value in found.items() if value.lower() not in _OFF}


def _option_name(written: str) -> str:
    name = written.strip().lstrip("-").lower().replace("_", "-").removeprefix("llama-arg-")
    return _OPTION_NAMES.get(name, name)


def _for_chat(
    row: Mapping[str, Any],
    launch: Mapping[str, str],
    tags: frozenset[str],
    abilities: Abilities,
    embeddings: bool | None,
) -> bool:
    if "decisions" in sequence(mapping(row.get("architecture")).get("output_modalities")):
        return False
    ranks = "reranking" in launch or launch.get("pooling") == "rank"
    if not embeddings and not ranks and tags.isdisjoint(_RANKS):
        return True
    # An embedding model has no chat template of its own; one that knows tools or thinking shows
    # a chat model whose server makes embeddings as well.
    return bool(abilities.tools or abilities.thinking_switch or abilities.reasoning_effort)


def _reads(
    modality: str,
    input_name: str,
    row: Mapping[str, Any],
    props: Mapping[str, Any],
    tags: frozenset[str],
) -> bool | None:
    said = boolean(mapping(props.get("modalities")).get(modality))
    if said is not None:
        return said
    inputs = mapping(row.get("architecture")).get("input_modalities")
    return input_name in inputs if isinstance(inputs, list) else _said(None, tags, modality)


def tags_of(row: Mapping[str, Any]) -> frozenset[str]:
    """What the operator wrote beside a model (``--tags``, or ``tags`` in a preset), in lower case.

    A tag fills in what the server does not tell; it never speaks against the server.
    """
    return frozenset(each.strip().lower() for each in texts(row.get("tags")))


def _said(value: object, tags: frozenset[str], tag: str) -> bool | None:
    """What the server says; where it is silent, true if there is such a tag."""
    said = boolean(value)
    return True if said is None and tag in tags else said


def _efforts(template: str) -> tuple[str, ...]:
    """The usual levels, and those of the rarer ones that the template speaks of."""
    named = {each for each in EFFORTS if re.search(f"['\"]{each}['\"]", template)}
    return tuple(each for each in EFFORTS if each in named or each in _USUAL_EFFORTS)


def _positive(value: object) -> int | None:
    """A number of tokens or slots, however it is written; None for anything else."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,10}", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= _LARGEST else None
