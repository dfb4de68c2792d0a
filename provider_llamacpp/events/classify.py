"""What went wrong, as one of the five kinds the router knows. Pure: values in, an error out.

One table (:data:`_RULES`) serves HTTP answers and error objects inside a stream. It is the table of
provider protocol 6.4, with rows for what llama-server really sends (llama-server API 5): numeric
codes, faults of the client reported as 500, its own overflow errors. The first row that fits wins.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from .. import jsontext
from ..errors import ErrorKind, ProviderError

MAX_MESSAGE = 2000
"""Characters of a message: enough for every message of llama-server, too few for a web page."""

_MAX_WORDS = 1700  # leaves room for the hint behind them

_OVERFLOW = re.compile(
    "context length|maximum context|too many tokens|exceeds context|context window"
    "|maximum prompt length|prompt is too long"
)
_POOL = re.compile("context size has been exceeded")
_CLIENT_FAULTS = re.compile(
    # Each is a 500 of llama-server that comes again however often the request is sent.
    "(image|audio|video) input is not supported|failed to load image or audio"
    "|failed to parse (tools|messages|tool call arguments)|'messages' is required"
    "|unknown reasoning format|cannot use both json_schema and grammar"
    "|is too large to process. increase the physical batch size"
)
_NOT_LOADED = re.compile("model name=.* failed to load")
NOT_LOADED = b"failed to load"
"""In the body of an answer a reason to ask what the model's row says."""
_WHERE = "check api_url"
_KEY = (
    "check the API key of this provider: api_key in the router's configuration, or its ..._API_KEY"
)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A row: it fits a report that meets every condition given; a list means any of it."""

    kind: ErrorKind
    status: range | None = None
    no_status: bool | None = None
    codes: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    words: re.Pattern[str] | None = None
    """Found in the server's words, these in lower case."""
    plain: bool = False
    """``error`` was a text instead of an object."""
    page: bool = False
    """A web page came."""
    alone: bool | None = None
    """No other stream of this worker runs on that server."""
    model_failed: bool | None = None
    """The model's row says that its load failed; ``{failure}`` in the hint is how."""
    hint: str = ""
    """What the operator can do, behind the server's words."""

    def fits(self, report: _Report) -> bool:
        status = report.status
        return (
            (self.status is None or (status is not None and status in self.status))
            and (self.no_status is None or self.no_status == (status is None))
            and (not self.codes or report.code in self.codes)
            and (not self.types or report.type in self.types)
            and (self.words is None or self.words.search(report.words.lower()) is not None)
            and (not self.plain or report.plain)
            and (not self.page or report.page)
            and (self.alone is None or self.alone == report.alone)
            and (self.model_failed is None or self.model_failed == report.model_failed)
        )


def _only(status: int) -> range:
    return range(status, status + 1)


_SERVER_FAULT = range(500, 600)
_CLIENT_FAULT = range(400, 500)

_RULES = (
    _Rule("permanent", no_status=True, page=True, hint=_WHERE),
    _Rule("context_overflow", types=("exceed_context_size_error",)),
    _Rule("context_overflow", codes=("context_length_exceeded",)),
    _Rule("context_overflow", words=re.compile("exceeds the available context size")),
    _Rule(
        "context_overflow",
        words=_POOL,
        alone=True,
        hint="this conversation and its answer do not fit into the server's context",
    ),
    _Rule(
        "transient",
        words=_POOL,
        alone=False,
        hint="other streams filled the context that the server's slots share: try again later",
    ),
    _Rule("context_overflow", words=_OVERFLOW, plain=True),
    _Rule("permanent", codes=("insufficient_quota",)),
    _Rule("auth_expired", codes=("invalid_api_key", "account_deactivated"), hint=_KEY),
    _Rule("auth_expired", types=("authentication_error", "permission_error"), hint=_KEY),
    _Rule("rate_limited", types=("rate_limit_error",)),
    _Rule("permanent", words=_CLIENT_FAULTS),
    _Rule(
        "permanent",
        words=_NOT_LOADED,
        model_failed=True,
        hint="{failure}: see llama-server's log",
    ),
    _Rule("transient", words=_NOT_LOADED),
    _Rule("transient", words=re.compile("model name=.* is not running")),
    _Rule("permanent", types=("not_supported_error", "feature_disabled")),
    _Rule("permanent", status=_only(501)),
    _Rule("transient", types=("server_error", "unavailable_error")),
    _Rule("context_overflow", types=("invalid_request_error",), status=_only(413)),
    _Rule("context_overflow", types=("invalid_request_error",), words=_OVERFLOW),
    _Rule("permanent", types=("invalid_request_error",)),
    _Rule("auth_expired", status=_only(401), hint=_KEY),
    _Rule("auth_expired", status=_only(403), hint=_KEY),
    _Rule("rate_limited", status=_only(429)),
    _Rule("context_overflow", status=_only(413)),
    _Rule("transient", status=_SERVER_FAULT),
    _Rule("permanent", status=range(300, 400), hint=f"redirects are not followed: {_WHERE}"),
    _Rule("permanent", status=_only(404), hint=f"the server has no such route or model: {_WHERE}"),
    _Rule("context_overflow", status=_CLIENT_FAULT, words=_OVERFLOW),
    _Rule("permanent", status=_CLIENT_FAULT),
    _Rule("context_overflow", words=_OVERFLOW),
    _Rule("transient"),
)


@dataclass(frozen=True, slots=True)
class _Report:
    """What an answer says of its failure, whatever its shape was."""

    words: str
    status: int | None
    code: str = ""
    type: str = ""
    plain: bool = False
    page: bool = False
    alone: bool = True
    model_failed: bool = False


def classify(
    status: int | None,
    body: str | bytes | dict[str, Any],
    *,
    alone: bool = True,
    load_failure: str | None = None,
    location: str | None = None,
) -> ProviderError:
    """The error that an HTTP answer or an error object in a stream stands for.

    :param status: HTTP status; None, or one of success, for an error inside a stream
    :param body: the answer's body, or the JSON object that holds the error
    :param alone: this worker has no other stream on that server (decides who filled a shared pool)
    :param load_failure: what the model's row says of a load that failed, in words
    :param location: ``Location`` of a redirect; only its host is shown
    :returns: with the server's own words, on one line, never a web page
    """
    report = _read(status, body, alone, load_failure is not None)
    rule = next(rule for rule in _RULES if rule.fits(report))
    words = report.words or _by_status(report, location)
    if rule.hint:
        words = f"{words} ({rule.hint.replace('{failure}', load_failure or '')})"
    return ProviderError(rule.kind, words[:MAX_MESSAGE], status=status)


def error_in(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """The error a chunk of a stream reports, in a form :func:`classify` reads; None if it has none.

    Besides ``{"error": ...}`` some servers send the error's fields bare.
    """
    error = chunk.get("error")
    if error:
        return {"error": error}
    if chunk.get("object") == "error" or (
        "choices" not in chunk
        and isinstance(chunk.get("message"), str)
        and ("code" in chunk or "type" in chunk)
    ):
        return chunk
    return None


def _read(
    status: int | None, body: str | bytes | dict[str, Any], alone: bool, model_failed: bool
) -> _Report:
    if status is not None and status < 300:
        status = None
    if not isinstance(body, dict):
        text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
        value = _object(text)
        if value is None:
            page = text.lstrip("\ufeff \t\r\n").startswith("<")
            words = "" if page else _line(text)
            return _Report(words, status, page=page, alone=alone, model_failed=model_failed)
        body = value
    error = body.get("error") or body
    if not isinstance(error, dict):
        return _Report(_line(error), status, plain=True, alone=alone, model_failed=model_failed)
    code = error.get("code")
    if status is None and isinstance(code, int) and 400 <= code < 600:
        status = code
    return _Report(
        _line(error.get("message") or error.get("detail")),
        status,
        code=code if isinstance(code, str) else "",
        type=kind if isinstance(kind := error.get("type"), str) else "",
        alone=alone,
        model_failed=model_failed,
    )


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = jsontext.loads(text)
    except ValueError:
        return None
    if isinstance(value, str) and value:
        return {"error": value}
    return value if isinstance(value, dict) else None


def _line(value: object) -> str:
    """Any value as one readable line of bounded length."""
    if value is None:
        return ""
    if not isinstance(value, str):
        try:
            value = jsontext.dumps(value)
        except ValueError:
            return ""
    # Cut before the substitution: the body of an answer may be large.
    text = jsontext.whole(value[: 4 * _MAX_WORDS])
    text = re.sub(r"[\x00-\x20\x7f-\x9f\u2028\u2029]+", " ", text).strip()
    return text if len(text) <= _MAX_WORDS else text[: _MAX_WORDS - 3] + "..."


def _by_status(report: _Report, location: str | None) -> str:
    if report.status is None:
        if report.page:
            return "a web page came instead of llama-server's answer"
        return "llama-server reported an error without words"
    try:
        name = f"HTTP {report.status} {HTTPStatus(report.status).phrase}"
    except ValueError:
        name = f"HTTP {report.status}"
    if 300 <= report.status < 400:
        return f"llama-server's address answered {name}, to {_host(location)}"
    if report.page:
        return f"{name}: a web page came instead of llama-server's answer"
    return f"llama-server answered {name} without words"


def _host(location: str | None) -> str:
    # Only the host: the rest of a redirect may carry a session or a key.
    try:
        host = urlsplit(location or "").hostname
    except ValueError:
        host = None
    return f"host {_line(host)}" if host else "another path on the same host"


# -- failures without an answer ---------------------------------------------------------------

_NETWORK: tuple[tuple[ErrorKind, tuple[str, ...], str], ...] = (
    (
        "permanent",
        ("InvalidURL", "MissingSchema", "InvalidSchema", "LocationParseError", "InvalidHeader"),
        f"cannot be called: its address or key is not usable ({_WHERE})",
    ),
    (
        "transient",
        ("SSLCertVerificationError", "CertificateError"),
        f"has a TLS certificate that could not be verified ({_WHERE}, or name its CA in ca_file)",
    ),
    (
        "transient",
        ("SSLError",),
        f"failed in the TLS handshake: does it speak https? ({_WHERE})",
    ),
    (
        "transient",
        ("gaierror", "NameResolutionError"),
        f"is not reachable: its host name cannot be resolved ({_WHERE})",
    ),
    (
        "transient",
        ("ConnectionRefusedError",),
        f"is not reachable: connection refused; is llama-server running there? ({_WHERE})",
    ),
    (
        "transient",
        ("ConnectTimeout", "ConnectTimeoutError"),
        f"is not reachable: it took no connection in time ({_WHERE})",
    ),
    (
        "transient",
        ("ReadTimeout", "ReadTimeoutError", "TimeoutError"),
        "did not answer in time",
    ),
    (
        "transient",
        (
            "ConnectionResetError",
            "ConnectionAbortedError",
            "BrokenPipeError",
            "RemoteDisconnected",
            "IncompleteRead",
            "ProtocolError",
            "ChunkedEncodingError",
            "HTTPException",
        ),
        "broke the connection off",
    ),
)
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)


def network_error(error: BaseException, what: str) -> ProviderError:
    """The error that an exception of requests, urllib3, ssl or a socket stands for.

    :param what: the address as the operator knows it, such as ``http://127.0.0.1:8080``
    :returns: ``transient`` (provider protocol 6.4: no status), ``permanent`` for an unusable
        address; the exception's own text is left out, as it may quote a URL with a password
    """
    chain = list(_chain(error))
    names = {kind.__name__ for each in chain for kind in type(each).__mro__}
    where = f"llama-server at {re.sub(r'//[^/@]*@', '//', what)}"
    for kind, known, words in _NETWORK:
        if not names.isdisjoint(known):
            return ProviderError(kind, f"{where} {words}")
    if any(isinstance(each, OSError) and each.errno in _UNREACHABLE for each in chain):
        return ProviderError(
            "transient", f"{where} is not reachable: no route to the host ({_WHERE})"
        )
    return ProviderError("transient", f"{where}: the connection failed ({type(error).__name__})")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and everything it was raised from; requests and urllib3 also keep it in args."""
    todo: list[object] = [error]
    seen: set[int] = set()
    while todo:
        each = todo.pop(0)
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            todo += [each.__cause__, each.__context__, getattr(each, "reason", None), *each.args]
