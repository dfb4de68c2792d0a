"""Where a llama-server is: the address and the key of it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ..errors import ProviderError


@dataclass(frozen=True, slots=True)
class Target:
    """A llama-server: ``root`` as :func:`normalise_api_url` returns it, and the key for it."""

    root: str
    key: str | None = field(default=None, repr=False)


def normalise_api_url(url: str) -> str:
    """The root that all routes hang from: ``…``, ``…/v1`` and ``…/v1/chat/completions`` are one.

    A path in front of them stays: ``https://gw/llama/v1`` gives ``https://gw/llama``. Provider
    protocol 3.

    :raises ProviderError: ``permanent``, naming ``api_url`` and what is wrong with it. The address
        itself is not repeated: it may hold a secret.
    """
    text = url.strip()
    if not text.isprintable() or " " in text or "\\" in text:
        raise _bad_url("holds a blank, a backslash or a control character")
    try:
        parts = urlsplit(text)
        port = parts.port
        host = (parts.hostname or "").rstrip(".")
        if ":" not in host:
            host = host.encode("idna").decode("ascii")
        path = parts.path.encode("ascii").decode()
    except ValueError as error:
        raise _bad_url(f"cannot be read ({_reason(error)})") from None
    if parts.scheme not in ("http", "https"):
        raise _bad_url("must begin with http:// or https://")
    if "@" in parts.netloc:
        raise _bad_url("must not hold a user or a password: use the API key")
    if parts.query or parts.fragment:
        raise _bad_url("must not hold '?' or '#'")
    if not re.fullmatch(r"[a-z0-9_.-]+|[0-9a-f:.]+(%[a-z0-9_.%-]+)?", host):
        raise _bad_url("names no host" if not host else "names a host that cannot exist")
    if port == 0:
        raise _bad_url("names port 0")
    netloc = (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
    path = path.rstrip("/")
    for suffix in ("/chat/completions", "/v1"):
        path = path.removesuffix(suffix).rstrip("/")
    return f"{parts.scheme}://{netloc}{path}"


def names_this_machine(root: str) -> bool:
    """Whether a :func:`root <normalise_api_url>` says by itself that the server is on this machine;
    of other names only a connection tells."""
    host = urlsplit(root).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _bad_url(problem: str) -> ProviderError:
    return ProviderError("permanent", f"api_url {problem}")


def _reason(error: ValueError) -> str:
    """Words for a URL that does not parse, without the parts of it that the library repeats."""
    if isinstance(error, UnicodeError):
        return "no valid host name, or a path that is not ASCII"
    return "bad port" if "port" in str(error).lower() else "bad IPv6 address"
