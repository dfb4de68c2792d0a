"""HTTP/1.1 heads as bytes: of the request, which is ours, and of the answer. Pure.

The head of an answer is read here only in the form that servers write: a line a header, each header
once, and one of the usual framings. ``http.client`` reads every other one; it takes ten times as
long, because it reads headers as those of an e-mail.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_SIMPLE = re.compile(
    rb"HTTP/1\.1 (101|[2-5]\d\d) ([\x20-\x7e]*)\r\n"
    rb"((?:[A-Za-z0-9_-]+:[\x20-\x7e]*\r\n)*)"
    rb"\r\n"
).fullmatch
_START = b"HTTP/1.1 "
_bare_line_feed = re.compile(rb"(?<!\r)\n").search
_LONGEST = 65536
_NO_BODY = (204, 304)
_URL = re.compile(r"[!-~]+").fullmatch


class Head(NamedTuple):
    """Of an answer; names of headers are in lower case. ``length`` is that of the body, None where
    the framing or the close tells."""

    status: int
    reason: str
    headers: Mapping[str, str]
    chunked: bool
    length: int | None


def request_head(method: str, path: str, host: str, headers: Mapping[str, str]) -> bytes:
    """The bytes before the body.

    :param host: with its port, if that is not the usual one
    :param headers: that can be sent as they are
    :raises ValueError: if ``path`` could not be told from what follows it
    """
    if not _URL(path):
        raise ValueError("the path holds characters that cannot be sent")
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode("ascii")


def host_header(host: str, port: int | None, *, usual: int) -> str:
    """The value of ``Host``.

    :param usual: the port that is not named
    """
    host = host.partition("%")[0]  # a zone is this machine's own business
    host = f"[{host}]" if ":" in host else host
    return host if port in (None, usual) else f"{host}:{port}"


def head_size(data: bytes) -> int | None:
    """How much of ``data``, the beginning of an answer, is its head; None if more has to come.

    What cannot become a head of the simple form is no reason to wait: all of it is counted then.
    """
    end = data.find(b"\r\n\r\n")
    if end >= 0:
        return end + 4
    simple = data[: len(_START)] == _START[: len(data)] and not _bare_line_feed(data)
    return None if simple and len(data) < _LONGEST else len(data)


def read_head(data: bytes) -> Head | None:
    """The answer's head that ``data`` is, with its blank line; None if it is not of the simple
    form."""
    found = _SIMPLE(data)
    if found is None:
        return None
    status = int(found[1])
    headers: dict[str, str] = {}
    for line in found[3].decode("ascii").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name = name.lower()
        if name in headers:
            return None
        headers[name] = value.strip(" ")
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if status in _NO_BODY or (coding is not None and length is not None):
        return None
    if status == 101:
        # Whatever follows is no HTTP.
        framed = coding is not None or length is not None
        return None if framed else Head(101, found[2].decode("ascii"), headers, False, 0)
    if coding is not None and coding.lower() != "chunked":
        return None
    if length is not None and not length.isdigit():
        return None
    return Head(
        status=status,
        reason=found[2].decode("ascii"),
        headers=headers,
        chunked=coding is not None,
        length=None if length is None else int(length),
    )
