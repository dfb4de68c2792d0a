"""Asks llama-server what it serves, without waking or loading a model.

The order of questions: ``/v1/models``, ``/props`` (of the server; in router mode also of each model
that runs), and once for each model what no field shows (:class:`~.catalog.Probes`). The last wakes
a sleeping model, so it is asked only while ``/props`` says awake and, in router mode, the row says
loaded; every question about one model of several carries ``autoload=false``. Provider protocol 4.1,
llama-server API 3, 10 and 13.

In router mode each process of a model is asked once: the server counts every question that it hands
on as a use of the model, and makes room by unloading the one that was used last the longest ago.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ..calls import Call
from ..errors import ProviderError
from ..events.classify import classify
from ..lenient import mapping, text
from .catalog import Catalog, Probes, model_info, row_status
from .upstream import Reply, Target, Upstream

PORTS = (8080, 9931)
"""Where llama-server is looked for when nobody says where it is (provider protocol 3)."""
REQUEST_SECONDS = 10.0
"""For one question."""
PROBE_SECONDS = 3.0
"""For one port to answer, when it is not known which does."""
DISCOVERY_SECONDS = 18.0
"""For all questions together; with two ports to try still within the 30 s of a caller."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is remembered of a model for as long as its server lists it."""

    fingerprint: object
    """Changes with the process (its ``media_marker``), or behind a router-mode server with the
    launch options: then all of it is asked again."""
    preset: object
    props: Mapping[str, Any]
    probes: Probes | None
    """None until they could be asked."""
    process: object = None
    """In router mode: the command line, with the port, of the process that gave ``props``."""


class _Questions:
    """All questions of one look at a server: they share their time, and a call that may end them.

    :param call: an abort of it ends the question that is asked
    """

    def __init__(self, upstream: Upstream, target: Target, call: Call | None) -> None:
        self.target = target
        self._upstream = upstream
        self._call = call
        self._until = time.monotonic() + DISCOVERY_SECONDS

    def ask(self, method: str, path: str, payload: object = None) -> Reply:
        """The answer to one, whatever its status.

        :raises ProviderError: if none came, or no time is left
        :raises Interrupted: if the call is aborted
        """
        left = min(REQUEST_SECONDS, self._until - time.monotonic())
        if left <= 0:
            raise ProviderError("transient", f"{self.target.root} answers too slowly")
        return self._upstream.request(
            self.target, method, path, payload, timeout=left, call=self._call
        )

    def props(self, query: str = "") -> Mapping[str, Any]:
        """``/props``, or nothing: who does not have it may have a web page there."""
        try:
            reply = self.ask("GET", "/props" + query)
        except ProviderError:
            return {}
        return mapping(_json(reply)) if reply.ok else {}

    def prompt(self, model: str, query: str, thinking: bool) -> str | None:
        """What the template of ``model`` makes of a message; None if that is not told."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "hi"}],
            "chat_template_kwargs": {"enable_thinking": thinking},
        }
        reply = self.ask("POST", "/apply-template" + query, body)
        return text(mapping(_json(reply)).get("prompt")) if reply.ok else None


class Discovery:
    """Finds the server, and what it serves. One for a provider.

    :param provider: id under which the models are told to the router
    :param ports: loopback ports to look at where no address is configured
    """

    def __init__(
        self, upstream: Upstream, *, provider: str = "llamacpp", ports: tuple[int, ...] = PORTS
    ) -> None:
        self._upstream = upstream
        self._provider = provider
        self._ports = ports
        self._root: str | None = None
        self._seen: dict[tuple[str, str], _Seen] = {}

    # -- where it is ----------------------------------------------------------------------

    def locate(self, key: str | None, call: Call | None = None) -> str:
        """The root of the local server: the one that answered, as long as it does.

        :raises ProviderError: ``transient``, if none answers
        :raises Interrupted: if ``call`` is aborted
        """
        root = self._root
        if root is not None:
            return root
        if not self._ports:
            raise ProviderError(
                "permanent",
                f"nobody says where the llama-server of {self._provider} is: set api_url in the "
                f"router, or start the worker with --id {self._provider}=http://host:port",
            )
        problems = []
        for port in self._ports:
            root = f"http://127.0.0.1:{port}"
            problem = self._problem_of(Target(root, key), call)
            if problem is None:
                self._root = root
                return root
            problems.append(problem)
        raise ProviderError(
            "transient",
            f"no llama-server was found ({'; '.join(problems)}): start one, or set api_url "
            "(--api-url)",
        )

    def _problem_of(self, target: Target, call: Call | None) -> str | None:
        """Why there is no llama-server at ``target``; None if there is one."""
        try:
            reply = self._list(target, PROBE_SECONDS, call)
        except ProviderError as error:
            # Its question, whether one runs there, is what the caller answers for all ports.
            return error.message.removeprefix("llama-server at ").partition("; is llama-server")[0]
        # Loading or wanting another key, it is the right server all the same.
        if reply.status in (401, 403, 503) or (reply.ok and _rows(reply) is not None):
            return None
        return f"{target.root} is something else: it answers HTTP {reply.status} to /v1/models"

    # -- what it serves -------------------------------------------------------------------

    def discover(self, target: Target, call: Call | None = None) -> Catalog:
        """Ask ``target`` for its models; an empty catalog if it refuses the key.

        :raises ProviderError: if the server cannot be asked: then nothing is known, and what was
            known before still holds
        :raises Interrupted: if ``call`` is aborted
        """
        questions = _Questions(self._upstream, target, call)
        try:
            reply = self._list(target, REQUEST_SECONDS, call)
        except ProviderError:
            if target.root == self._root:
                # It may come back at the other port.
                self._root = None
            raise
        if reply.status in (401, 403):
            return Catalog(self._provider, refused=True)
        if not reply.ok:
            raise classify(reply.status, reply.body)
        rows = _rows(reply)
        if rows is None:
            raise ProviderError(
                "transient", f"{target.root}/v1/models answers with something else than models"
            )
        props = questions.props()
        router_mode = props.get("role") == "router" or any(map(row_status, rows))
        models = []
        seen: dict[tuple[str, str], _Seen] = {}
        for row in rows:
            place = target.root, str(row.get("id"))
            if place in seen or model_info(row, {}) is None:
                continue
            own = props if len(rows) == 1 and not router_mode else {}
            if router_mode and row_status(row).get("value") in ("loaded", "sleeping"):
                own = self._props_of(questions, row)
            found = self._remember(questions, row, own, router_mode)
            seen[place] = found
            models.append(model_info(row, found.props, found.probes or Probes()))
        self._seen = seen
        return Catalog(
            self._provider,
            tuple(model for model in models if model is not None),
            router_mode=router_mode,
            build=text(props.get("build_info")),
        )

    def _remember(
        self,
        questions: _Questions,
        row: Mapping[str, Any],
        props: Mapping[str, Any],
        router_mode: bool,
    ) -> _Seen:
        """Put together what is known of a model, asking what was never asked."""
        model = str(row["id"])
        preset = row_status(row).get("preset")
        before = self._seen.get((questions.target.root, model))
        if not props:
            # It does not run. What it could do when it ran still holds, if it is started alike.
            if before is not None and before.preset == preset:
                return before
            return _Seen(None, preset, {}, None)
        fingerprint = (
            preset if router_mode else props.get("media_marker"),
            props.get("build_info"),
            props.get("chat_template"),
            mapping(row.get("meta")).get("n_params"),
        )
        probes = None
        if before is not None and before.fingerprint == fingerprint:
            probes = before.probes
        awake = props.get("is_sleeping") is False
        if router_mode:
            awake = awake and row_status(row).get("value") == "loaded"
        if probes is None and awake:
            probes = _probe(questions, model, router_mode)
        return _Seen(fingerprint, preset, props, probes, row_status(row).get("args"))

    def _props_of(self, questions: _Questions, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """``/props`` of one model of several: what its process said once, if nothing is missing."""
        before = self._seen.get((questions.target.root, str(row["id"])))
        args = row_status(row).get("args")
        if before is None or not before.props or not args or before.process != args:
            return questions.props(_query(str(row["id"])))
        if before.probes is None and row_status(row).get("value") == "loaded":
            # To be probed now, if it has not fallen asleep meanwhile.
            return questions.props(_query(str(row["id"])))
        # Whether it sleeps, the row says.
        return {name: value for name, value in before.props.items() if name != "is_sleeping"}

    def _list(self, target: Target, seconds: float, call: Call | None) -> Reply:
        return self._upstream.request(target, "GET", "/v1/models", timeout=seconds, call=call)


def _probe(questions: _Questions, model: str, router_mode: bool) -> Probes:
    """What no field shows: ask the model itself, without running it. What fails is not asked again
    either: a question on a timer would keep the server from sleeping."""
    query = "?autoload=false" if router_mode else ""
    switch = embeddings = None
    try:
        prompts = [questions.prompt(model, query, each) for each in (True, False)]
        switch = None if None in prompts else prompts[0] != prompts[1]
        reply = questions.ask("POST", "/v1/embeddings" + query, {"model": model})
        # An empty request is refused where embeddings are made, and not looked at elsewhere.
        embeddings = {400: True, 501: False}.get(reply.status)
    except ProviderError:
        pass
    return Probes(switch, embeddings)


def _query(model: str) -> str:
    return f"?model={quote(model, safe='', errors='replace')}&autoload=false"


def _rows(reply: Reply) -> list[Mapping[str, Any]] | None:
    """The rows of a model list; None if it is none."""
    rows = mapping(_json(reply)).get("data")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else None


def _json(reply: Reply) -> object:
    try:
        return reply.json()
    except ValueError:
        return None
