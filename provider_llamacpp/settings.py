"""Every setting of the worker, with its default and why, in one immutable object.

A :class:`Settings` is made once and passed down. Only :func:`from_environment` reads the
environment, and only the command line calls it: an application that embeds the worker decides for
itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_type_hints
from urllib.parse import urlsplit

from .errors import SettingsError
from .summaries import Observer

DEFAULT_URL = "ws://127.0.0.1:49134"
"""Numeric on purpose: ``localhost`` may resolve to ``::1`` first (engine protocol 1.1)."""

DEFAULT_ID = "llamacpp"

LogLevel = Literal["debug", "info", "warning", "error"]
ResumeMode = Literal["auto", "on", "off"]
ENV_PREFIX = "PROVIDER_LLAMACPP_"
_NO_VARIABLE = frozenset({"also", "on_call"})
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class ProviderSettings:
    """One more provider of a worker: another server under another id.

    :raises SettingsError: naming the field whose value cannot be used
    """

    id: str
    """As :attr:`Settings.id`."""
    api_url: str | None = None
    """llama-server's address where the router resolves none; without either there is none: only
    the first provider looks around on its machine."""
    api_key: str | None = field(default=None, repr=False)
    """Key for it where the router resolves none; None reads ``<ID>_API_KEY``."""

    def __post_init__(self) -> None:
        _check_provider(self)


@dataclass(frozen=True, slots=True)
class Settings:
    """What one worker needs to know. All times are seconds.

    :raises SettingsError: naming the field whose value cannot be used
    """

    url: str = DEFAULT_URL
    """WebSocket address of the iii engine."""
    token: str | None = field(default=None, repr=False)
    """Bearer for the engine's sockets (``III_TOKEN``, engine protocol 1.2)."""
    namespace: str | None = None
    """Namespace of our registrations; None is the engine's ``default``."""
    worker_name: str | None = None
    """Name on the bus; None makes it ``provider-<id>``."""
    id: str = DEFAULT_ID
    """Provider id: functions are ``provider::<id>::…``, the key variable is ``<ID>_API_KEY``."""
    api_url: str | None = None
    """llama-server's address where the router resolves none; None probes 8080, then 9931."""
    api_key: str | None = field(default=None, repr=False)
    """Key for llama-server where the router resolves none; None reads ``<ID>_API_KEY``."""
    also: tuple[ProviderSettings, ...] = ()
    """More providers in the same worker, each with a server of its own. All else they have in
    common with the first one."""
    ca_file: str | None = None
    """CA certificates (PEM) for ``https`` and ``wss``; None uses the ones that come along."""
    client_cert: str | None = None
    """Client certificate and key in one PEM file."""
    max_streams: int = 64
    """Streams at once; the router runs 64 (provider protocol 11). More get ``rate_limited``."""
    max_requests: int = 16
    """Embeddings, counts and other short calls at once, apart from the streams."""
    ping_interval: float = 25.0
    """Silence before a ``ping`` frame: below the 30 s the contract allows (6.5)."""
    fat_deltas: bool = False
    """Put the whole message into each delta: only routers of before 1.4 need it (6)."""
    drain: float = 10.0
    """How long a stop waits for running streams."""
    connect_timeout: float = 10.0
    """For TCP and WebSocket connects (engine protocol 1.4, provider protocol 6.5)."""
    send_timeout: float = 60.0
    """A caller that reads nothing for so long has left (engine protocol 7.5)."""
    resume: ResumeMode = "auto"
    """Take broken streams up again; ``auto``: of servers that are not on this machine."""
    resume_budget: float = 30.0
    """A stream that was not taken up for so long after it broke is lost."""
    allow_server_tools: tuple[str, ...] = ()
    """Which of llama-server's own tools callers may run: ``read`` is every tool that does not
    write, others by name. Empty: none, and there is no function for it."""
    allow_model_management: bool = False
    """Whether callers may unload, download and delete the models of a server in router mode."""
    catalog_interval: float = 45.0
    """How often the catalog is compared with the server: never stale for a minute."""
    log_level: LogLevel = "info"
    log_json: bool = False
    tracing: bool = False
    """Make an OpenTelemetry span of each call, under the caller's ``traceparent``; needs
    ``opentelemetry-api``, and does nothing until the application, or ``opentelemetry-instrument``,
    says where spans go."""
    on_call: Observer | None = field(default=None, repr=False, compare=False)
    """Told of each call once it is over, on a thread that does nothing else; what it raises is
    logged. For programs: there is no variable for it."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def name(self) -> str:
        """Our name on the bus."""
        return self.worker_name or f"provider-{self.id}"

    @property
    def key_variable(self) -> str:
        """The environment variable that holds llama-server's key."""
        return _key_variable(self.id)

    def providers(self) -> tuple[Settings, ...]:
        """The settings of each provider by itself, the first one first."""
        first = replace(self, also=(), worker_name=self.name)
        more = (
            replace(first, id=each.id, api_url=each.api_url, api_key=each.api_key)
            for each in self.also
        )
        return first, *more


def _key_variable(id: str) -> str:
    return id.upper().replace("-", "_") + "_API_KEY"


def _check_provider(settings: Settings | ProviderSettings) -> None:
    if not re.fullmatch(r"[a-z0-9_-]{1,64}", settings.id):
        raise SettingsError(f"id {settings.id!r}: 1 to 64 of a-z, 0-9, _ and - (--id)")
    if settings.api_url:
        parts = _split("api_url", settings.api_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(
                "api_url: must be http://host:port or https://host:port (--api-url, --id)"
            )


def _check(settings: Settings) -> None:
    _check_provider(settings)
    ids = [settings.id, *(each.id for each in settings.also)]
    for each in ids:
        if ids.count(each) > 1:
            raise SettingsError(f"id {each!r} is there twice: each provider needs its own (--id)")
    parts = _split("url", settings.url)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise SettingsError("url: must be ws://host:port or wss://host:port (--url)")
    if settings.namespace is not None and not settings.namespace.strip():
        raise SettingsError("namespace is blank: name one or leave it unset (III_NAMESPACE)")
    if settings.max_streams < 1 or settings.max_requests < 1:
        raise SettingsError("max_streams and max_requests must be at least 1 (--max-streams)")
    for name in (
        *("ping_interval", "connect_timeout", "send_timeout"),
        *("resume_budget", "catalog_interval"),
    ):
        if not getattr(settings, name) > 0:
            raise SettingsError(f"{name} must be more than 0 seconds")
    if not settings.drain >= 0:
        raise SettingsError("drain must not be negative (--drain)")
    if settings.resume not in ("auto", "on", "off"):
        raise SettingsError(f"resume {settings.resume!r}: auto, on or off (--resume)")
    for name in settings.allow_server_tools:
        if name == "all" or not re.fullmatch(r"[^\s,]+", name):
            raise SettingsError(
                f"allow_server_tools {name!r}: read for the tools that do not write, others by name"
                " (--allow-server-tools)"
            )
    if settings.log_level not in ("debug", "info", "warning", "error"):
        raise SettingsError(
            f"log_level {settings.log_level!r}: debug, info, warning or error (--log-level)"
        )


def _split(name: str, url: str) -> Any:
    # No error repeats an address, or the library's words, which do: it may hold a secret anywhere.
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise SettingsError(f"{name}: host or port cannot be read") from None
    return parts


def check_files(settings: Settings) -> None:
    """Read the files with certificates, so that one that is missing is told of at the start and
    not by the first connection that needs it.

    :raises SettingsError: naming the setting whose file cannot be used
    """
    if not settings.ca_file and not settings.client_cert:
        return
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    readers = (
        ("ca_file", settings.ca_file, "CA certificates", context.load_verify_locations),
        ("client_cert", settings.client_cert, "certificate and key", context.load_cert_chain),
    )
    for name, path, what, read in readers:
        try:
            if path:
                read(path)
        except OSError as error:  # ssl.SSLError is one
            why = error.strerror or error
            flag = "--" + name.replace("_", "-")
            raise SettingsError(f"{name} {path}: no {what} there ({why}) ({flag})") from error


def tool_names(text: str) -> tuple[str, ...]:
    """``allow_server_tools`` as it is written: names with commas; true stands for ``read``."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return ("read",)
    if lowered in _FALSE:
        return ()
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _parse(name: str, kind: Any, text: str) -> Any:
    if name == "allow_server_tools":
        return tool_names(text)
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in _TRUE:
            return True
        if lowered in _FALSE:
            return False
        raise SettingsError(f"{ENV_PREFIX}{name.upper()}={text!r}: must be true or false")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise SettingsError(f"{ENV_PREFIX}{name.upper()}={text!r}: not a number") from None
    return text


def read_ids(texts: Iterable[str]) -> list[tuple[str, str | None]]:
    """Providers as they are written: ``llamacpp``, ``pi5=http://pi5:8080``, several with commas or
    blanks between them. Each with its address, if it has one."""
    found = []
    for text in texts:
        # What is blank names none, and must not pass for the default.
        for each in text.replace(",", " ").split() or [""]:
            name, _, address = each.partition("=")
            found.append((name, address or None))
    return found


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables with our prefix that name no setting: misspelt, most likely."""
    known = {
        ENV_PREFIX + each.name.upper() for each in fields(Settings) if each.name not in _NO_VARIABLE
    }
    return sorted(each for each in environ if each.startswith(ENV_PREFIX) and each not in known)


def from_environment(environ: Mapping[str, str], **overrides: Any) -> Settings:
    """Defaults, then the environment, then ``overrides`` (None means not given).

    ``id`` may name several providers, as one text or as a list of them: see :func:`read_ids`.
    ``III_URL`` comes before ``III_WS_URL`` (engine protocol 1.3); a blank variable counts as unset.

    :raises SettingsError: naming the variable or field
    """
    given: dict[str, Any] = {}
    foreign = {
        "III_WS_URL": "url",
        "III_URL": "url",
        "III_TOKEN": "token",
        "III_NAMESPACE": "namespace",
        "III_WORKER_NAME": "worker_name",
    }
    for variable, name in foreign.items():
        if environ.get(variable, "").strip():
            given[name] = environ[variable].strip()
    kinds = get_type_hints(Settings)
    for each in fields(Settings):
        text = environ.get(ENV_PREFIX + each.name.upper(), "")
        if text.strip() and each.name not in _NO_VARIABLE:
            given[each.name] = _parse(each.name, kinds[each.name], text.strip())
    given.update({name: value for name, value in overrides.items() if value is not None})
    ids = given.pop("id", ())
    first, *more = read_ids([ids] if isinstance(ids, str) else ids) or [(DEFAULT_ID, None)]
    given["id"] = first[0]
    if first[1] is not None:
        given["api_url"] = first[1]
    given.setdefault("api_key", _own_key(environ, first[0]))
    given["also"] = tuple(
        ProviderSettings(id, address, _own_key(environ, id)) for id, address in more
    )
    return Settings(**given)


def _own_key(environ: Mapping[str, str], id: str) -> str | None:
    return environ.get(_key_variable(id), "").strip() or None
