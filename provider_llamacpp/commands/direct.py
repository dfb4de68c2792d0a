"""llama-server as the commands ask it directly, and how they learn where it is.

Nothing here wakes it or makes it load: what does is asked by the commands that were told to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..errors import BusError, ProviderError
from ..router import Resolved, read_resolved
from ..server.address import Target, normalise_api_url
from ..server.catalog import Catalog
from ..server.discovery import Discovery
from ..server.upstream import Reply, Upstream
from ..settings import Settings

if TYPE_CHECKING:
    from .caller import Caller

SECONDS = 10.0
"""For one question to the server."""
BUS_SECONDS = 5.0
"""For one question on the bus."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """What a server serves, by its own words."""

    catalog: Catalog
    rows: Mapping[str, Row] = field(default_factory=dict)
    """The rows of ``/v1/models`` by id."""

    def fact(self, model: str, name: str) -> int | None:
        """A number of ``meta``: ``size`` in bytes, ``n_ctx_train`` in tokens, ``n_params``."""
        meta = self.rows.get(model, {}).get("meta")
        value = meta.get(name) if isinstance(meta, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None


class Server:
    """The server that ``settings`` lead to.

    :param root: as :func:`~provider_llamacpp.server.address.normalise_api_url` gives it
    """

    def __init__(self, settings: Settings) -> None:
        self.upstream = Upstream(
            connect_timeout=settings.connect_timeout,
            ca_file=settings.ca_file,
            client_cert=settings.client_cert,
        )
        self._discovery = Discovery(self.upstream, provider=settings.id)

    def locate(self, api_url: str | None, key: str | None, *, why: str = "") -> Target:
        """The server at ``api_url``, else the one that answers at a usual port.

        :param why: it is asked directly; stands before what is said if there is none
        :raises ProviderError: ``permanent`` naming ``api_url``, ``transient`` if none answers
        """
        try:
            root = normalise_api_url(api_url) if api_url else self._discovery.locate(key)
        except ProviderError as error:
            raise ProviderError(error.kind, f"{why}{error.message}") from error
        return Target(root, key)

    def view(self, target: Target) -> View:
        """What it serves.

        :raises ProviderError: if it cannot be asked
        """
        catalog = self._discovery.discover(target)
        rows: dict[str, Row] = {}
        reply = self.get(target, "/v1/models")
        for row in listed(reply):
            if isinstance(row.get("id"), str):
                rows.setdefault(row["id"], row)
        return View(catalog, rows)

    def get(self, target: Target, path: str) -> Reply:
        """One question that wakes nobody.

        :raises ProviderError: if no answer came
        """
        return self.upstream.request(target, "GET", path, timeout=SECONDS)

    def props(self, target: Target, model: str, *, router_mode: bool) -> Row:
        """``/props``: of the server, or of the ``model`` that one in router mode runs."""
        query = f"?model={quote(model, safe='')}&autoload=false" if router_mode else ""
        try:
            return body(self.get(target, "/props" + query))
        except ProviderError:
            return {}


def body(reply: Reply) -> Row:
    """The JSON object of an answer; empty for a failure and for anything else."""
    try:
        value = reply.json() if reply.ok else None
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def listed(reply: Reply) -> list[Row]:
    """The rows of ``/v1/models``."""
    rows = body(reply).get("data")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


# -- how to learn where it is -----------------------------------------------------------------


def read_token(caller: Caller, provider: str) -> str | None:
    """The registration token that the worker keeps in the state; None if it holds none.

    :raises BusError: if the state cannot be asked
    """
    query = {"scope": f"provider-{provider}", "key": "registration_token"}
    value = caller.call("state::get", query, timeout=BUS_SECONDS)
    return value if isinstance(value, str) and value else None


def ask_router(
    caller: Caller, settings: Settings, token: str | None
) -> tuple[Resolved, Mapping[str, Any]]:
    """What the operator configured, read and as the router says it.

    :raises BusError: as the router refused
    """
    query = {"id": settings.id} if token is None else {"id": settings.id, "token": token}
    answer = caller.call("router::provider::resolve", query, timeout=BUS_SECONDS)
    return read_resolved(answer, settings.api_key), answer


def worker_url(caller: Caller, settings: Settings) -> str | None:
    """Where the worker finds llama-server, from its status; None where it does not tell."""
    try:
        status = caller.call(f"provider::{settings.id}::status", {}, timeout=BUS_SECONDS)
    except BusError:
        return None
    server = status.get("server") if isinstance(status, dict) else None
    url = server.get("url") if isinstance(server, dict) else None
    return url if isinstance(url, str) else None


def through_bus(caller: Caller, settings: Settings) -> tuple[str | None, str | None]:
    """Address and key as the worker has them, as far as the bus tells."""
    resolved = Resolved(key=settings.api_key)
    try:
        resolved, _ = ask_router(caller, settings, read_token(caller, settings.id))
    except BusError:
        pass
    return resolved.api_url or settings.api_url or worker_url(caller, settings), resolved.key
