"""The doctor's look at llama-server: where it is, whether it answers, whether it takes the key.

Nothing asked here wakes a sleeping server or loads a model; that is for :mod:`.checks_model`, if
the doctor was told to.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from ..errors import ProviderError
from ..server.address import Target, names_this_machine
from ..server.discovery import PORTS
from ..settings import Settings
from .checks import Finding, Working, fault, ok, skipped, warning
from .checks_bus import Told
from .checks_model import MODEL_STEPS, check_models
from .direct import Server, View, body

LOADING = "wait until the model is loaded; if that lasts, llama-server's log says why"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the checks of the machine want to know."""

    here: bool
    """llama-server runs on this machine."""
    model_size: int | None
    """Bytes of the model that was looked at."""


def check_server(
    settings: Settings,
    told: Told,
    *,
    wake: bool,
    working: Working,
    proxies: Sequence[str],
) -> Generator[Finding, None, Seen | None]:
    """All steps from the address on; returns None if no server was found.

    :param proxies: names of the variables that name one
    """
    server = Server(settings)
    target = yield from _address(server, settings, told, proxies)
    if target is None:
        for step in ("server", "key", "model", *MODEL_STEPS):
            yield skipped(step, "not looked at without an address")
        return None
    view = yield from _server(server, target, settings, proxies)
    size = None
    if view is not None:
        size = yield from check_models(server, target, view, wake=wake, working=working)
    return Seen(names_this_machine(target.root), size)


def _slice(settings: Settings, name: str) -> str:
    return f"{name} in the router's configuration of {settings.id!r}"


def _direct(proxies: Sequence[str]) -> str:
    """What to add where something cannot be reached."""
    if not proxies:
        return ""
    return f"; no proxy is used, though {', '.join(proxies)} names one"


# -- where it is ------------------------------------------------------------------------------


def _address(
    server: Server, settings: Settings, told: Told, proxies: Sequence[str]
) -> Generator[Finding, None, Target | None]:
    resolved = told.resolved
    api_url = (resolved and resolved.api_url) or settings.api_url or told.worker_url
    key = resolved.key if resolved is not None else settings.api_key
    setting = f"{_slice(settings, 'api_url')}, or --api-url"
    try:
        target = server.locate(api_url, key)
    except ProviderError as error:
        if error.kind == "permanent":
            yield fault("address", error.message, f"correct {setting}")
            return None
        ports = " or ".join(map(str, PORTS))
        text = f"no api_url is set, and no llama-server answers at port {ports} of this machine"
        if "something else" in error.message:
            text += f": {error.message}"
        remedy = f"start llama-server, or name its address: {setting} (the worker's, if it has one)"
        yield fault("address", text, remedy + _direct(proxies))
        return None
    source = "found at a usual port; no api_url is set"
    if resolved is not None and resolved.api_url:
        source = "api_url of the router's configuration"
    elif settings.api_url:
        source = "--api-url"
    elif told.worker_url:
        source = "where the worker finds it"
    if resolved is None:
        source += "; the router was not asked"
    came = f"with a key ({_key_source(settings, told)})" if key else "without a key"
    text = f"{target.root} ({source}), {came}"
    facts = {"api_url": target.root, "key": key is not None, "asked_router": resolved is not None}
    if told.dangling:
        yield fault(
            "address",
            f"{text}: the router cannot resolve {told.dangling}",
            f"give it what api_key refers to, or correct {_slice(settings, 'api_key')}",
            **facts,
        )
    else:
        yield ok("address", text, **facts)
    return target


def _key_source(settings: Settings, told: Told) -> str:
    if told.resolved is None:
        return settings.key_variable
    if told.resolved.source == "env":
        return f"{settings.key_variable} of the router or of this environment"
    return "from the router's configuration"


# -- whether it answers -----------------------------------------------------------------------


def _server(
    server: Server, target: Target, settings: Settings, proxies: Sequence[str]
) -> Generator[Finding, None, View | None]:
    finding, view = _reach(server, target, settings, proxies)
    yield finding
    if finding.level != "ok":
        why = "the model is loading" if finding.level == "warning" else "no answer to look at"
        for step in ("key", "model", *MODEL_STEPS):
            yield skipped(step, why)
        return None
    if view is not None and not view.catalog.refused:
        yield ok("key", "accepted" if target.key else "none is wanted")
        return view
    held = "the one that came is refused" if target.key else "llama-server wants one, and none came"
    yield fault(
        "key",
        f"{held} (401)",
        f"put what llama-server has as --api-key into {_slice(settings, 'api_key')}, or into "
        f"{settings.key_variable} of the router or the worker",
    )
    for step in ("model", *MODEL_STEPS):
        yield skipped(step, "not looked at without a key")
    return None


def _reach(
    server: Server, target: Target, settings: Settings, proxies: Sequence[str]
) -> tuple[Finding, View | None]:
    root = target.root
    where = f"start llama-server there, or correct {_slice(settings, 'api_url')} or --api-url"
    try:
        health = server.get(target, "/health")
        if health.status == 503:
            return warning("server", f"{root} is loading its model (503)", LOADING), None
        view = server.view(target)
        build = view.catalog.build or body(server.get(target, "/props")).get("build_info")
    except ProviderError as error:
        if error.status == 503:
            return warning("server", f"{root} is loading its model (503)", LOADING), None
        return fault("server", error.message, where + _direct(proxies)), None
    if view.catalog.refused:
        return ok("server", f"{root} answers"), view
    words = f"build {build}" if isinstance(build, str) else "it does not tell its build"
    mode = ", router mode" if view.catalog.router_mode else ""
    return ok("server", f"{root} answers, {words}{mode}", build=build), view
