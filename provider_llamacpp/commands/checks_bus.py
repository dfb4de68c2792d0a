"""The doctor's look at the bus: engine, router, the worker's registration, the state.

Asks only; changes nothing. The registration token is read from the state, because the router tells
nobody else where llama-server is, and is shown to nobody.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..bus.link import origin
from ..errors import BusError
from ..lenient import mapping, objects
from ..router import Resolved
from ..settings import Settings
from .checks import Finding, Working, fault, ok, skipped, warning
from .direct import BUS_SECONDS as SECONDS
from .direct import ask_router, read_token, worker_url

if TYPE_CHECKING:
    from .caller import Caller

SERVED = ("stream", "abort", "embed", "count_tokens", "refresh_models", "on_router_ready")
"""The functions of a provider (provider protocol 1)."""
NEEDS_ENGINE = ("router", "worker", "state", "registration", "catalog")

Rows = list[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Told:
    """What router and worker told of llama-server."""

    resolved: Resolved | None = field(default=None, repr=False)
    """None if the router could not be asked."""
    dangling: str = ""
    """The reference to a key (``env://NAME``) that the router cannot resolve."""
    worker_url: str | None = None
    """Where the worker last asked."""


def check_bus(settings: Settings, working: Working) -> Generator[Finding, None, Told]:
    """All steps on the bus; returns what was told of llama-server."""
    from .caller import Caller, Unreachable

    try:
        with working("looking for the engine"):
            caller = Caller(settings)
    except Unreachable as error:
        remedy = error.remedy
        if "AUTH" in error.problem or "401" in error.problem:
            remedy = "put the engine's bearer into III_TOKEN"
        yield fault("engine", error.problem, remedy, url=origin(settings.url))
        for step in NEEDS_ENGINE:
            yield skipped(step, "not looked at without the engine")
        return Told()
    with caller:
        try:
            functions = _rows(caller, "functions", {"include_internal": True})
            workers = _rows(caller, "workers", {})
        except BusError as error:
            text = f"{origin(settings.url)} is there, but does not list its functions: {error}"
            yield fault("engine", text, "look at the engine's log; is it an iii engine?")
            for step in NEEDS_ENGINE:
                yield skipped(step, "not looked at without the engine's list")
            return Told()
        yield _engine(settings, caller.features, functions)
        return (yield from _Bus(settings, caller, functions, workers).check())


def _rows(caller: Caller, kind: str, query: Mapping[str, Any]) -> Rows:
    answer = caller.call(f"engine::{kind}::list", dict(query), timeout=SECONDS)
    return objects(mapping(answer).get(kind))


def _engine(settings: Settings, features: list[str] | None, functions: Rows) -> Finding:
    if features is not None:
        words = f"0.25 or later (features: {', '.join(features) or 'none'})"
    elif any("namespace" in row for row in functions):
        words = "0.23 or 0.24 (it lists no features, and knows namespaces)"
    else:
        words = "before 0.23 (it lists no features)"
    url = origin(settings.url)
    return ok("engine", f"{url}, {words}", url=url, features=features)


class _Bus:
    """The steps behind a connection."""

    def __init__(self, settings: Settings, caller: Caller, functions: Rows, workers: Rows) -> None:
        self._settings = settings
        self._caller = caller
        self._functions = functions
        self._workers = workers
        self._id = settings.id
        self._space = settings.namespace or "default"

    def check(self) -> Generator[Finding, None, Told]:
        router = self._router()
        yield router
        worker = self._worker()
        yield worker
        state, token = self._state()
        yield state
        if router.level != "ok":
            for step in ("registration", "catalog"):
                yield skipped(step, "not looked at without the router")
            return Told(worker_url=self._found())
        registration, told = self._registration(
            token, state_there=state.level == "ok", served=worker.level != "fault"
        )
        yield registration
        yield self._catalog(registered=registration.level == "ok")
        return replace(told, worker_url=self._found())

    def _owners(self, prefix: str) -> dict[str, str]:
        """Who serves the functions below ``prefix`` in our namespace: the last part of the id, and
        the worker's name."""
        return {
            str(row["function_id"]).removeprefix(prefix): str(row.get("worker_name"))
            for row in self._functions
            if str(row.get("function_id", "")).startswith(prefix) and self._ours(row)
        }

    def _ours(self, row: Mapping[str, Any]) -> bool:
        return (row.get("namespace") or "default") == self._space

    # -- steps ----------------------------------------------------------------------------

    def _router(self) -> Finding:
        owners = self._owners("router::")
        if "provider::resolve" in owners:
            return ok("router", f"served by worker {owners['provider::resolve']}")
        elsewhere = sorted(
            {
                str(row.get("namespace"))
                for row in self._functions
                if row.get("function_id") == "router::provider::resolve"
            }
        )
        if elsewhere:
            return fault(
                "router",
                f"none in namespace {self._space!r}, but in {', '.join(elsewhere)}",
                "set III_NAMESPACE to the router's namespace, for the worker too",
            )
        return fault(
            "router",
            "no llm-router on this engine: it is what asks providers for answers",
            "add the llm-router worker to the engine, or check that --url names the right engine",
        )

    def _worker(self) -> Finding:
        owners = self._owners(f"provider::{self._id}::")
        names = sorted(set(owners.values()))
        ours = self._settings.name
        missing = [name for name in SERVED if name not in owners]
        facts = {"functions": len(owners), "workers": names}
        if not owners:
            return self._no_worker()
        if len(names) > 1:
            return fault(
                "worker",
                f"name conflict: {' and '.join(names)} each serve a part of provider {self._id!r}",
                "stop one of them, or give it another id (--id)",
                **facts,
            )
        known = f"{self._described(names[0])} serves {self._id!r}"
        if missing:
            return fault(
                "worker",
                f"{known}, but not {', '.join(missing)}",
                "restart it; its log says if the name of a function is taken",
                **facts,
            )
        if names[0] != ours:
            return warning(
                "worker",
                f"{known}, which is not {ours!r}",
                f"if another worker was meant, stop {names[0]} or give one of them another --id",
                **facts,
            )
        return ok("worker", known, **facts)

    def _no_worker(self) -> Finding:
        ours = self._settings.name
        others = sorted(
            {
                str(row["function_id"]).split("::")[1]
                for row in self._functions
                if str(row.get("function_id", "")).startswith("provider::") and self._ours(row)
            }
        )
        named = [row for row in self._workers if row.get("name") == ours and self._ours(row)]
        if named:
            return fault(
                "worker",
                f"name conflict: {self._described(ours)} is connected, but serves nothing of "
                f"provider {self._id!r}",
                "if it is this worker, its --id is another one; if not, stop it, or give this "
                "worker another name (III_WORKER_NAME)",
                functions=0,
            )
        also = f" (there are: {', '.join(others)})" if others else ""
        return fault(
            "worker",
            f"nobody serves provider {self._id!r}{also}: the worker does not run, or is on "
            "another engine",
            "start it: provider-llamacpp, with the same --url and --id",
            functions=0,
        )

    def _found(self) -> str | None:
        """Where the worker finds llama-server."""
        if "status" not in self._owners(f"provider::{self._id}::"):
            return None
        return worker_url(self._caller, self._settings)

    def _described(self, name: str) -> str:
        """A worker's name with version, runtime and pid, as far as the engine tells."""
        for row in self._workers:
            if row.get("name") == name:
                version = f" {row['version']}" if row.get("version") else ""
                words = [str(row["runtime"])] if row.get("runtime") else []
                words += [f"pid {row['pid']}"] if row.get("pid") else []
                return f"{name}{version}" + (f" ({', '.join(words)})" if words else "")
        return name

    def _state(self) -> tuple[Finding, str | None]:
        try:
            token = read_token(self._caller, self._id)
        except BusError as error:
            if error.code == "function_not_found":
                text = "no state worker: a restarted worker cannot prove that it is the same"
                return warning("state", text, "add the state worker to the engine"), None
            return warning("state", f"it does not answer: {error}", "look at its log"), None
        return ok("state", f"there; holds {'a' if token else 'no'} registration token"), token

    def _registration(
        self, token: str | None, *, state_there: bool, served: bool
    ) -> tuple[Finding, Told]:
        try:
            resolved, answer = ask_router(self._caller, self._settings, token)
        except BusError as error:
            return self._not_registered(error, token, state_there, served), Told()
        broken = answer.get("credential_error") is not None
        reference = str(answer.get("credential_ref") or "its reference") if broken else ""
        return ok("registration", f"the router knows {self._id!r}"), Told(resolved, reference)

    def _not_registered(
        self, error: BusError, token: str | None, state_there: bool, served: bool
    ) -> Finding:
        if error.code == "router/unknown_provider":
            if not served:
                return skipped("registration", "the router does not know it; no worker declares it")
            return fault(
                "registration",
                f"the router does not know {self._id!r}",
                "wait 10 s, the worker declares itself again and again; if that does not help, "
                "its log says what the router answers",
            )
        if error.code != "router/registration_rejected":
            return fault("registration", f"the router does not answer: {error}", "see its log")
        if not state_there:
            return skipped(
                "registration",
                "the router knows it, but the worker's token cannot be read without the state",
            )
        problem = (
            "the token is lost: the router knows {!r}, and the state holds no token of it"
            if token is None
            else "the router's record of {!r} was made with another token"
        ).format(self._id)
        return fault(
            "registration",
            problem,
            f"remove {self._id!r} from the router's record (state, scope llm-router, key "
            "registry) and restart the router; the worker then declares itself anew",
        )

    def _catalog(self, *, registered: bool) -> Finding:
        try:
            answer = self._caller.call(
                "router::models::list", {"provider": self._id}, timeout=SECONDS
            )
        except BusError as error:
            return warning("catalog", f"the router lists no models: {error}", "see its log")
        ids = [
            str(row.get("id"))
            for row in objects(mapping(answer).get("models"))
            if row.get("provider") == self._id
        ]
        if ids:
            more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
            return ok("catalog", f"the router lists {', '.join(ids[:3])}{more}", models=ids)
        if not registered:
            return skipped("catalog", "empty, as the provider is not registered")
        return warning(
            "catalog",
            f"the router lists no model of {self._id!r}: nobody can choose one",
            "see below what is wrong with llama-server; the worker asks it again every minute",
            models=[],
        )
