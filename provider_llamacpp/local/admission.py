"""Who may reach the loopback engine: programs on this machine, and no web page."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import parse_qs, urlsplit

from websockets.datastructures import Headers
from websockets.http11 import Request


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a numeric loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def comes_from_here(headers: Headers, mine: Collection[str]) -> bool:
    """Whether a handshake may go on, by its ``Host`` and ``Origin``.

    A page whose own name resolves to this address shows that name in ``Host``; any other page
    shows itself in ``Origin``. Clients that are no browsers send no origin, or name the engine.

    :param mine: the engine's own ``host:port`` in every spelling that is allowed
    """
    hosts = headers.get_all("Host")
    if len(hosts) != 1 or hosts[0] not in mine:
        return False
    return all(urlsplit(origin).netloc in mine for origin in headers.get_all("Origin"))


def bears(request: Request, token: str | None) -> bool:
    """Whether a handshake shows the token, as a bearer or as ``?token=`` (engine protocol 1.2)."""
    if token is None:
        return True
    header = request.headers.get("Authorization", "")
    given = [
        header.removeprefix("Bearer "),
        *parse_qs(request.path.partition("?")[2]).get("token", []),
    ]
    return any(hmac.compare_digest(each.encode(), token.encode()) for each in given)
