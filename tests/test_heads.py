"""Heads of requests and answers: as ``http.client`` writes and reads them."""

from __future__ import annotations

import http.client
import io
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from provider_llamacpp.heads import Head, head_size, host_header, read_head, request_head

ANSWER = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
    b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class _Socket:
    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def makefile(self, mode: str) -> io.BytesIO:
        return self._file


def by_the_library(data: bytes) -> Head | None:
    """What ``http.client`` reads; None if that leaves bytes over, or is no HTTP."""
    reply = http.client.HTTPResponse(_Socket(data), method="GET")  # type: ignore[arg-type]
    try:
        reply.begin()
    except http.client.HTTPException:
        return None
    if reply.fp is not None and reply.fp.read():
        return None
    headers = {name.lower(): reply.getheader(name, "") for name in reply.headers}
    return Head(reply.status, reply.reason, headers, bool(reply.chunked), reply.length)


def test_what_llama_server_answers() -> None:
    assert read_head(ANSWER) == Head(
        status=200,
        reason="OK",
        headers={
            "server": "llama.cpp",
            "access-control-allow-origin": "",
            "content-type": "text/event-stream",
            "transfer-encoding": "chunked",
        },
        chunked=True,
        length=None,
    )
    assert by_the_library(ANSWER) == read_head(ANSWER)


@pytest.mark.parametrize(
    "data",
    [
        ANSWER[:-2],
        ANSWER + b"x",
        ANSWER.replace(b"/1.1", b"/1.0"),
        ANSWER.replace(b"200 OK", b"100 Continue"),
        ANSWER.replace(b"200 OK", b"204 No Content"),
        ANSWER.replace(b"200 OK", b"101 Switching Protocols"),
        ANSWER.replace(b"200 OK", b"304 Not Modified"),
        ANSWER.replace(b"chunked", b"gzip, chunked"),
        ANSWER.replace(b"Server: llama.cpp", b"Content-Length: 4"),
        ANSWER.replace(b"Server: llama.cpp", b"transfer-encoding: chunked"),
        ANSWER.replace(b"Server: llama.cpp", b"Server: llama\r\n .cpp"),
        ANSWER.replace(b"Server: llama.cpp", b"Server: l\xc3\xa4ma"),
        ANSWER.replace(b"Server: llama.cpp", b"no header"),
        ANSWER.replace(b"\r\n", b"\n"),
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"",
    ],
)
def test_other_forms_are_left_to_the_library(data: bytes) -> None:
    assert read_head(data) is None


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (b"", None),
        (b"HTT", None),
        (ANSWER[:-1], None),
        (ANSWER, len(ANSWER)),
        (ANSWER + b"x", len(ANSWER)),
        (b"SSH-2.0-x\r\n", 11),
        (b"HTTP/1.1 200 OK\n", 16),
        (b"HTTP/1.0", 8),
        (b"HTTP/1.1 200 " + b"x" * 70_000, 70_013),
    ],
)
def test_how_much_is_waited_for(data: bytes, size: int | None) -> None:
    assert head_size(data) == size


_names = st.sampled_from(
    ["Server", "X-Y", "content-length", "Content-Type", "Transfer-Encoding", "Connection", "é"]
)
_values = st.one_of(
    st.sampled_from(["chunked", "Chunked", "identity", "close", "keep-alive", "0", "12", "+3", ""]),
    st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=12),
)
_heads = st.builds(
    lambda version, status, reason, headers, end: (
        f"HTTP/{version} {status}{reason}\r\n"
        + "".join(f"{name}:{value}\r\n" for name, value in headers)
        + end
    ).encode("latin-1"),
    st.sampled_from(["1.1", "1.1", "1.1", "1.0", "2"]),
    st.one_of(st.sampled_from([200, 204, 404, 503, 100, 101]), st.integers(0, 1200)),
    st.sampled_from([" OK", " ", "", " Not Found", " \xff"]),
    st.lists(st.tuples(_names, _values), max_size=6),
    st.sampled_from(["\r\n", "\r\n", "\r\n", "", "\n", "\r\nx"]),
)


@given(_heads)
@example(b"HTTP/1.1 200 OK\r\nX: \t 1 \t\r\n\r\n")
def test_what_is_read_here_is_what_the_library_reads(data: bytes) -> None:
    ours = read_head(data)
    if ours is not None:
        assert ours == by_the_library(data)


class _Written(http.client.HTTPConnection):
    """Keeps what it would send."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.data = b""

    def send(self, data: Any) -> None:
        self.data += data


def test_the_request_is_what_the_library_writes() -> None:
    headers = {"Accept": "*/*", "Authorization": "Bearer k", "Content-Length": "2"}
    made = _Written("127.0.0.1", 8080)
    made.putrequest("POST", "/v1/x?y=1", skip_accept_encoding=True)
    for name, value in headers.items():
        made.putheader(name, value)
    made.endheaders()
    assert request_head("POST", "/v1/x?y=1", "127.0.0.1:8080", headers) == made.data


@pytest.mark.parametrize(
    ("host", "port", "value"),
    [
        ("h", None, "h"),
        ("h", 80, "h"),
        ("h", 8080, "h:8080"),
        ("::1", 8080, "[::1]:8080"),
        ("fe80::1%eth0", 80, "[fe80::1]"),
    ],
)
def test_the_host(host: str, port: int | None, value: str) -> None:
    assert host_header(host, port, usual=80) == value


@pytest.mark.parametrize("path", ["", "/a b", "/a\r\nX: y", "/é", "/a\0"])
def test_a_path_that_cannot_be_sent(path: str) -> None:
    with pytest.raises(ValueError, match="path holds"):
        request_head("GET", path, "h", {})
