"""The doctor's look at the model behind llama-server: its state, context, template and answer.

A sleeping or unloaded model stays as it is, unless the doctor was told to wake it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from typing import Any

from ..errors import BusError, ProviderError
from ..events.classify import classify
from ..server import queries
from ..server.address import Target
from ..server.catalog import ModelInfo
from ..server.upstream import Reply
from .checks import Finding, Working, fault, ok, skipped, warning
from .direct import Row, Server, View, body

MODEL_STEPS = ("generation", "context", "template", "embeddings", "vision")

TOKEN_SECONDS = 60.0
"""For one token of a model that is loaded."""
WAKE_SECONDS = 600.0
"""For one token of a model that has to be loaded first."""
LITTLE_CONTEXT = 4096
"""Tokens of a slot: the prompts of an agent with tools and a few turns are longer."""
NO_CONTEXT = 1024
"""Tokens of a slot: the descriptions of a few tools alone are longer."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "doctor_tool",
        "description": "A tool to look for in the prompt",
        "parameters": {"type": "object", "properties": {}},
    },
}
_HI = [{"role": "user", "content": "Hi"}]


def check_models(
    server: Server, target: Target, view: View, *, wake: bool, working: Working
) -> Generator[Finding, None, int | None]:
    """State of all models, and a closer look at the one that answers by default.

    Returns the bytes of that one, if they are known.
    """
    yield _states(view)
    model = view.catalog.default()
    if model is None:
        for step in MODEL_STEPS:
            yield skipped(step, "there is no model")
        return None
    check = _Model(server, target, view, model)
    if model.for_chat:
        yield check.generation(wake, working)
        if model.state != "loaded" and wake:
            # Awake it tells more of itself.
            try:
                view = server.view(target)
            except ProviderError:
                pass
            check = _Model(server, target, view, view.catalog.find(model.id) or model)
    else:
        yield skipped("generation", _no_chat(model))
    yield check.context()
    yield check.template()
    yield check.embeddings()
    yield check.vision()
    return view.fact(model.id, "size")


def _states(view: View) -> Finding:
    models = view.catalog.models
    facts = {"models": {each.id: each.state for each in models}}
    if not models:
        return fault(
            "model", "the server serves no model", "start it with -m FILE or --models-dir FOLDER"
        )
    failed = [each for each in models if each.state == "failed"]
    if failed:
        named = ", ".join(
            each.id + (f" (exit code {each.exit_code})" if each.exit_code is not None else "")
            for each in failed
        )
        return warning(
            "model",
            f"could not be loaded: {named}",
            "llama-server's log says why: a damaged file, or too little memory (--ctx-size)",
            **facts,
        )
    asleep = (
        "the next request wakes it up, which takes as long as a load; raise "
        "--sleep-idle-seconds to have it sleep later, or look with doctor --wake"
    )
    if len(models) == 1:
        only = models[0]
        return ok(
            "model", f"{only.id}: {only.state}", _if(only.state == "sleeping", asleep), **facts
        )
    counts: dict[str, int] = {}
    for each in models:
        counts[each.state] = counts.get(each.state, 0) + 1
    words = ", ".join(f"{count} {state}" for state, count in counts.items())
    chosen = view.catalog.default()
    assert chosen is not None
    text = f"{len(models)} models ({words}); a closer look at {chosen.id}: {chosen.state}"
    return ok("model", text, _if(chosen.state == "sleeping", asleep), **facts)


def _no_chat(model: ModelInfo) -> str:
    return f"{model.id} embeds, and its template knows no tools: it is not offered for chat"


def _if(condition: bool, text: str) -> str:
    return text if condition else ""


class _Model:
    """The steps for one model."""

    def __init__(self, server: Server, target: Target, view: View, model: ModelInfo) -> None:
        self._server = server
        self._target = target
        self._view = view
        self._model = model
        self._router_mode = view.catalog.router_mode
        self._awake = model.state == "loaded"
        self._props: Row = {}
        if model.state in ("loaded", "sleeping"):
            self._props = server.props(target, model.id, router_mode=self._router_mode)
        self._why = f"{model.id} is {model.state}; doctor --wake looks closer"

    def _post(self, path: str, payload: Mapping[str, Any], seconds: float, query: str) -> Reply:
        return self._server.upstream.request(
            self._target, "POST", path + query, payload, timeout=seconds
        )

    def _ask(self, path: str, payload: Mapping[str, Any]) -> Reply:
        """A question to a model that is awake, and is not to be loaded if it no longer is."""
        query = "?autoload=false" if self._router_mode else ""
        return self._post(path, {"model": self._model.id, **payload}, TOKEN_SECONDS, query)

    # -- generation -----------------------------------------------------------------------

    def generation(self, wake: bool, working: Working) -> Finding:
        if not self._awake and not wake:
            return skipped(
                "generation",
                f"{self._model.id} is {self._model.state}, and stays so",
                "doctor --wake has it answer",
            )
        payload = {"model": self._model.id, "messages": _HI, "max_tokens": 1, "cache_prompt": False}
        seconds = TOKEN_SECONDS if self._awake else WAKE_SECONDS
        began = time.monotonic()
        label = "asking for one token" if self._awake else f"waking {self._model.id}"
        try:
            with working(label):
                reply = self._post("/v1/chat/completions", payload, seconds, "")
        except ProviderError as error:
            return fault(
                "generation",
                f"no token within {time.monotonic() - began:.0f} s: {error.message}",
                "if all slots are busy, wait or raise --parallel; if not, see llama-server's log",
            )
        spent = time.monotonic() - began
        if not reply.ok:
            failure = classify(reply.status, reply.body)
            return fault(
                "generation", f"HTTP {reply.status}: {failure.message}", "see llama-server's log"
            )
        timings = body(reply).get("timings")
        timings = timings if isinstance(timings, dict) else {}
        text = f"one token after {_spell(spent)}"
        if not self._awake:
            text += f", for which {self._model.id} had to wake up"
        count, spell = timings.get("prompt_n"), timings.get("prompt_ms")
        if isinstance(count, int) and isinstance(spell, int | float) and spell > 0:
            rate = count * 1000 / spell
            text += f" (prompt: {count} tokens, {rate:.0f} tokens/s)"
        return ok("generation", text, seconds=round(spent, 4), timings=timings)

    # -- context --------------------------------------------------------------------------

    def context(self) -> Finding:
        tokens = self._model.abilities.context_window
        trained = self._view.fact(self._model.id, "n_ctx_train")
        slots = self._model.slots
        if tokens is None:
            return skipped("context", self._why if not self._awake else "the server does not tell")
        text = f"{tokens} tokens for each slot"
        if slots is not None:
            text = f"{slots} {'slot' if slots == 1 else 'slots'} of {tokens} tokens"
        if trained is not None:
            text += f"; the model was trained on {trained}"
        facts = {"slots": slots, "tokens": tokens, "trained": trained}
        if tokens >= LITTLE_CONTEXT:
            more = (
                "the slots share one pool, unless --parallel was given: together they get no more"
            )
            return ok("context", text, _if(slots == 4 and tokens == trained, more), **facts)
        remedy = "restart llama-server with a larger --ctx-size"
        if slots is not None and slots > 1:
            remedy += f", or a smaller --parallel: {slots} slots share it"
        if trained is not None and trained <= tokens:
            remedy = "take a model that was trained on a longer context"
        if tokens < NO_CONTEXT:
            text += ". Too small: the prompt of an agent does not fit"
            return fault("context", text, remedy, **facts)
        text += ". Small: an agent with tools and a few turns needs more"
        return warning("context", text, remedy, **facts)

    # -- template -------------------------------------------------------------------------

    def template(self) -> Finding:
        known = self._model.abilities
        if not self._model.for_chat:
            return skipped("template", _no_chat(self._model))
        jinja, tools = None, known.tools
        if self._awake:
            jinja, seen = self._with_tool()
            tools = seen if tools is None else tools
        abilities = {
            "tools": tools,
            "parallel tools": known.parallel_tool_calls,
            "thinking switch": known.thinking_switch,
            "reasoning effort": known.reasoning_effort,
            "system role": known.system_role,
        }
        words = [
            f"{verb} {', '.join(names)}"
            for verb, value in (("knows", True), ("lacks", False), ("does not tell of", None))
            if (names := [name for name, can in abilities.items() if can is value])
        ]
        text = "; ".join(words)
        if jinja is False:
            text = "--jinja is off: every request with tools is refused"
            remedy = "start llama-server with --jinja (or without --no-jinja)"
            return fault("template", text, remedy, jinja=False, **abilities)
        if tools is False:
            return warning(
                "template",
                f"{text}: tools are left out of the prompt without a word",
                "take a model whose chat template knows tools, or give it one with "
                "--chat-template-file",
                jinja=jinja,
                **abilities,
            )
        return ok("template", text, jinja=jinja, **abilities)

    def _with_tool(self) -> tuple[bool | None, bool | None]:
        """Whether --jinja is on, and whether a tool gets into the prompt; None is not known."""
        try:
            reply = self._ask("/apply-template", {"messages": _HI, "tools": [_TOOL]})
        except ProviderError:
            return None, None
        if reply.ok:
            return True, "doctor_tool" in str(body(reply).get("prompt"))
        off = b"--jinja" in reply.body
        return (False, False) if off else (None, None)

    # -- embeddings and vision --------------------------------------------------------------

    def embeddings(self) -> Finding:
        able = self._model.embeddings
        if able is None:
            return skipped("embeddings", self._why if not self._awake else "it does not tell")
        if not able:
            return warning(
                "embeddings",
                "off: provider embed calls are refused",
                "if you want them, start llama-server with --embeddings and --pooling mean (or "
                "what the model wants)",
                on=False,
            )
        if not self._awake:
            return ok("embeddings", "on", on=True)
        try:
            answer = queries.embed(self._server.upstream, self._target, self._model.id, ["Hi"])
        except BusError as error:
            remedy = "see llama-server's log"
            if "pooling" in error.message.lower():
                remedy = "start llama-server with --pooling mean (or what the model wants)"
            return warning("embeddings", error.message, remedy, on=True)
        size = len(answer["embeddings"][0])
        return ok("embeddings", f"on, vectors of {size} numbers", on=True, dimensions=size)

    def vision(self) -> Finding:
        known = self._model.abilities
        if known.vision is None:
            return skipped("vision", "the server does not tell")
        reads = [name for name, can in (("images", known.vision), ("audio", known.audio)) if can]
        facts = {"vision": known.vision, "audio": known.audio}
        if reads:
            return ok("vision", f"text, {', '.join(reads)}", **facts)
        text = "text only (images: a model with a projector, --mmproj)"
        return ok("vision", text, **facts)


def _spell(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
