"""Every error this package raises on purpose.

::

    ProviderLlamacppError
    ├── ProviderError     a call failed; ``kind`` tells the router whether a retry can help
    ├── BusError          a bus call failed, or is to be answered with a failure
    │   └── InvalidRequest    the payload does not fit; answered as ``provider/invalid_request``
    ├── Interrupted       the call was aborted while it waited (never shown to a caller)
    ├── ConsumerGone      the reader of a channel left (never shown to a caller)
    ├── SettingsError     a setting is wrong; the message names it
    └── FatalError        the worker cannot go on (its name is taken on the bus)
"""

from __future__ import annotations

from typing import Literal

ErrorKind = Literal["auth_expired", "rate_limited", "context_overflow", "transient", "permanent"]
"""The router retries ``rate_limited`` and ``transient`` only (provider protocol 6)."""

HIDDEN = "[secret]"
"""Stands in the place of a secret."""
_SHORTEST = 4
"""Characters of the shortest secret that is looked for: a shorter one is in any text."""


def redacted(text: str, *secrets: str | None) -> str:
    """``text`` without the ``secrets``: servers like to quote the key that they refuse."""
    import json  # errors are imported before all else, and this is seldom needed

    for secret in secrets:
        if secret and len(secret) >= _SHORTEST:
            # As such, and as JSON writes it, of which there are two ways for a slash.
            quoted = json.dumps(secret)[1:-1]
            for form in (secret, quoted, quoted.replace("/", "\\/")):
                text = text.replace(form, HIDDEN)
    return text


class ProviderLlamacppError(Exception):
    """Base of all errors below."""


class ProviderError(ProviderLlamacppError):
    """A call to llama-server failed.

    :param kind: what the router may do about it (provider protocol 6.4)
    :param message: words the caller can act on; holds no secrets
    :param status: HTTP status, where there was one
    """

    def __init__(self, kind: ErrorKind, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.message = message
        self.status = status


class BusError(ProviderLlamacppError):
    """A failure as the bus carries it (engine protocol 4.1).

    :param code: a literal that programs look at, such as ``function_not_found``
    :param message: words for people; holds no secrets
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class InvalidRequest(BusError):
    """The payload of a call cannot be decoded; the message names the field."""

    def __init__(self, message: str) -> None:
        super().__init__("provider/invalid_request", message)


class Interrupted(ProviderLlamacppError):
    """A wait ended because its call was aborted; ``reason`` is the call's abort reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConsumerGone(ProviderLlamacppError):
    """The channel's reader has left: stop the upstream work (engine protocol 7.5)."""


class SettingsError(ProviderLlamacppError, ValueError):
    """A setting has a value that cannot be used; the message names the setting."""


class FatalError(ProviderLlamacppError):
    """The worker cannot go on, for example because its name is taken (engine protocol 2.4)."""
