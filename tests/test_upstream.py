"""Requests to llama-server: bytes as they arrive, every way to end, and aborts in every phase."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import pathlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import responses
import urllib3
from conftest import LlamaFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import (
    PATIENCE,
    Exchange,
    ProxyCounter,
    ScriptedServer,
    answer_json,
    answer_sse,
    deaf_port,
    free_port,
    wait_for,
)
from urllib3.connection import HTTPConnection

from provider_llamacpp.calls import Call
from provider_llamacpp.errors import Interrupted, ProviderError, SettingsError
from provider_llamacpp.local.llama import LlamaServer
from provider_llamacpp.server import dialing
from provider_llamacpp.server import stream as streams
from provider_llamacpp.server.stream import UpstreamStream
from provider_llamacpp.server.upstream import Target, Upstream

PATH = "/v1/chat/completions"
TLS = pathlib.Path(__file__).parent / "data" / "tls"
SSE = {"status": 200, "headers": {"content-type": "text/event-stream"}}


def new_call() -> Call:
    return Call(1, "stream", key="k", model="m")


def open_at(
    server: ScriptedServer, call: Call | None = None, body: bytes = b"{}", **options: Any
) -> UpstreamStream:
    return Upstream(**options).open_stream(Target(server.url), PATH, body, call or new_call())


def read_to_end(stream: UpstreamStream) -> list[bytes]:
    with stream:
        return list(iter(stream.read, b""))


def script(*steps: object, **more: Any) -> dict[str, Any]:
    return {"script": [{"headers": SSE}, *steps], **more}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Background:
    """Runs something on a thread of its own and keeps what came of it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.result: object = None
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    def end(self) -> Background:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it hangs"
        return self


# -- what arrives -----------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
def test_a_body_arrives_whole_in_every_framing(framing: str) -> None:
    body = "data: {}\n\n" * 50 + "data: [DONE]\n\n"
    answer = {**SSE, "body": body, "split": [1, 7, 100], "framing": framing}
    with ScriptedServer(answer) as server:
        stream = open_at(server)
        assert stream.status == 200
        assert stream.headers["Content-Type"] == "text/event-stream"
        assert b"".join(read_to_end(stream)) == body.encode()
        assert stream.consumed == len(body)
        assert stream.read() == b""


@settings(deadline=None, max_examples=20)
@given(st.binary(max_size=300), st.lists(st.integers(1, 300), max_size=5), st.booleans())
def test_any_bytes_survive_any_split(body: bytes, cuts: list[int], counted: bool) -> None:
    answer = {
        "body_b64": base64.b64encode(body).decode(),
        "split": sorted({cut for cut in cuts if cut < len(body)}),
        "framing": "length" if counted else "chunked",
    }
    with ScriptedServer(answer) as server:
        assert b"".join(read_to_end(open_at(server))) == body


@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_each_piece_is_there_before_the_next_is_sent(framing: str) -> None:
    seen = [threading.Event() for _ in range(3)]

    def after(event: threading.Event) -> Callable[[Exchange], None]:
        return lambda exchange: exchange.watch(PATIENCE, until=event)

    steps = [
        step
        for number, event in enumerate(seen)
        for step in ({"send": f"data: t{number}\n\n"}, after(event))
    ]
    with (
        ScriptedServer(script(*steps, {"close": framing == "close"}, framing=framing)) as server,
        open_at(server) as stream,
    ):
        for number, event in enumerate(seen):
            assert stream.read() == f"data: t{number}\n\n".encode()
            event.set()


def test_all_that_has_arrived_comes_in_one_read() -> None:
    event = b"data: {}\n\n"
    sent = threading.Event()

    def burst(exchange: Exchange) -> None:
        exchange.raw(b"".join(b"%x\r\n%s\r\n" % (len(event), event) for _ in range(1000)))
        sent.set()

    with ScriptedServer(script(burst)) as server, open_at(server) as stream:
        assert sent.wait(PATIENCE)
        assert len(stream.read()) > 100 * len(event)


def test_a_read_has_room_for_what_comes_and_not_for_more() -> None:
    token, burst = b"data: {}\n\n", b"x" * 300_000
    taken = [threading.Event(), threading.Event()]

    def wait(event: threading.Event) -> Callable[[Exchange], None]:
        return lambda exchange: exchange.watch(PATIENCE, until=event)

    steps = [
        {"send": token.decode()},
        wait(taken[0]),
        {"send": burst.decode()},
        wait(taken[1]),
        {"send": token.decode()},
        {"close": True},
    ]
    rooms: list[int] = []
    with ScriptedServer(script(*steps, framing="close")) as server, open_at(server) as stream:
        take = stream._take

        def counted(room: int) -> bytes:
            rooms.append(room)
            return take(room)

        stream._take = counted
        assert stream.read() == token
        taken[0].set()
        size = 0
        while size < len(burst):
            size += len(stream.read())
        assert rooms[:2] == [streams.SMALL] * 2
        assert streams.BLOCK in rooms
        taken[1].set()
        assert stream.read() == token
        assert stream.read() == b""
        assert rooms[-1] == streams.SMALL


def test_of_an_answer_under_way_only_the_connection_is_kept() -> None:
    heavy = (requests.Response, requests.PreparedRequest, urllib3.HTTPResponse, HTTPConnection)

    def alive() -> set[int]:
        return {id(each) for each in gc.get_objects() if isinstance(each, heavy)}

    gc.collect()
    before = alive()
    steps = [{"send": "data: 1\n\n"}, {"send": "data: 2\n\n"}, {"hang_ms": 60_000}]
    with ScriptedServer(script(*steps)) as server, open_at(server) as stream:
        assert alive() <= before
        found = b""
        while b"2" not in found:
            found += stream.read()
        assert stream.headers["content-type"] == "text/event-stream"


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 90), st.integers(1, 90))
def test_a_head_may_arrive_in_any_pieces(first: int, second: int) -> None:
    text = "HTTP/1.1 200 OK\r\nX-Long: " + "v" * 3000 + "\r\nContent-Length: 4\r\n\r\nbody"
    pieces = text[:first], text[first : first + second], text[first + second :]
    steps = [{"send": piece} for piece in pieces]
    with ScriptedServer({"script": steps}) as server:
        stream = open_at(server)
        assert stream.headers["X-Long"] == "v" * 3000
        assert b"".join(read_to_end(stream)) == b"body"


def test_the_request_says_what_it_should() -> None:
    with ScriptedServer(answer_sse("[DONE]")) as server:
        target = Target(server.url + "/llama", "sk-local")
        stream = Upstream().open_stream(
            target, PATH, b'{"a":1}', new_call(), headers={"X-Conversation-Id": "c-1"}
        )
        read_to_end(stream)
        (request,) = server.wait_requests(1)
    assert request.line == f"POST /llama{PATH} HTTP/1.1"
    assert request.body == b'{"a":1}'
    assert request.headers["host"] == f"127.0.0.1:{server.port}"
    assert request.headers["authorization"] == "Bearer sk-local"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["x-conversation-id"] == "c-1"
    assert request.headers["user-agent"].startswith("provider-llamacpp/")
    assert "cookie" not in request.headers
    names = [line.split(":")[0].lower() for line in request.raw_headers]
    assert len(names) == len(set(names))


def test_without_a_key_there_is_no_authorization() -> None:
    with ScriptedServer(answer_sse("[DONE]")) as server:
        read_to_end(open_at(server))
        assert "authorization" not in server.wait_requests(1)[0].headers


def test_the_environment_has_no_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login joe password pw")
    netrc.chmod(0o600)
    with ProxyCounter() as proxy, ScriptedServer(answer_sse("[DONE]")) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("NO_PROXY", "localhost")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("NETRC", str(netrc))
        target = Target(server.url, "sk-local")
        read_to_end(Upstream().open_stream(target, PATH, b"{}", new_call()))
        assert Upstream().request(Target(server.url), "GET", "/props", timeout=PATIENCE).ok
        first, second = server.wait_requests(2)
        assert proxy.requests == 0
    assert first.headers["authorization"] == "Bearer sk-local"
    assert "authorization" not in second.headers


def test_the_proxy_of_the_test_above_would_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with ProxyCounter() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        assert requests.get(f"http://127.0.0.1:{free_port()}/", timeout=PATIENCE).status_code == 502
        assert proxy.requests == 1


def test_no_cookie_is_kept() -> None:
    answer = answer_json({}, headers={"set-cookie": "session=1; Path=/"})
    with ScriptedServer(answer) as server:
        upstream = Upstream()
        for _ in range(2):
            assert upstream.request(Target(server.url), "GET", "/props", timeout=PATIENCE).ok
        assert all("cookie" not in request.headers for request in server.wait_requests(2))


def test_each_request_has_its_own_connection_and_leaves_none_behind() -> None:
    upstream = Upstream()
    with ScriptedServer(answer_sse("[DONE]")) as server:
        read_to_end(open_at(server))
        wait_for(lambda: not server.open(), "the first connection's end")
        before = descriptors()
        for _ in range(20):
            target = Target(server.url)
            read_to_end(upstream.open_stream(target, PATH, b"{}", new_call()))
            assert upstream.request(target, "GET", "/props", timeout=PATIENCE).ok
        assert server.connections == 41
        wait_for(lambda: not server.open(), "the last connection's end")
        assert descriptors() == before


def test_many_threads_share_one_upstream() -> None:
    upstream = Upstream()
    with ScriptedServer(lambda request: answer_sse(request.json()["n"])) as server:
        target = Target(server.url)

        def ask(number: int) -> list[bytes]:
            body = json.dumps({"n": number}).encode()
            return read_to_end(upstream.open_stream(target, PATH, body, new_call()))

        runs = [Background(lambda number=number: ask(number)) for number in range(24)]
        for number, run in enumerate(runs):
            assert run.end().error is None
            assert run.result == [f"data: {number}\n\n".encode()]


def test_a_connection_made_ahead_is_the_one_that_is_used() -> None:
    with ScriptedServer(answer_sse("[DONE]")) as server:
        target, call, up = Target(server.url), new_call(), Upstream()
        line = up.dial_ahead(target, call)
        assert read_to_end(up.open_stream(target, PATH, b"{}", call, line=line))
        assert server.connections == 1


def test_what_dialling_ahead_met_is_told_when_the_request_goes_out() -> None:
    with ScriptedServer(answer_sse("[DONE]")) as server:
        target = Target(server.url)
    call, up = new_call(), Upstream()
    line = up.dial_ahead(target, call)
    with pytest.raises(ProviderError, match="connection refused"):
        up.open_stream(target, PATH, b"{}", call, line=line)


def test_an_abort_cuts_a_connection_made_ahead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}")
        call, up = new_call(), Upstream()
        line = up.dial_ahead(target, call)
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(PATIENCE)
            call.abort("abort")
            assert peer.recv(10) == b""
            with pytest.raises(Interrupted):
                up.open_stream(target, PATH, b"{}", call, line=line)
            assert peer.recv(10) == b""
        with pytest.raises(Interrupted):
            up.dial_ahead(target, call)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "broke the connection off"),
        (b"HTTP/1.1 200 OK\nContent-Type: text/event-stream\n\n", None),
    ],
)
def test_what_answers_in_another_form_is_not_waited_for(words: bytes, refusal: str | None) -> None:
    """It says no more and keeps the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}")
        opening = Background(lambda: Upstream().open_stream(target, PATH, b"{}", new_call()))
        peer, _ = listener.accept()
        with peer:
            peer.recv(65536)
            peer.sendall(words)
            opening.end()
            if refusal is not None:
                assert refusal in str(opening.error)
                return
            peer.sendall(b"data: 1\n\n")
            assert isinstance(opening.result, UpstreamStream)
            assert opening.result.read() == b"data: 1\n\n"
            opening.result.close()


def test_a_peer_that_waits_for_room_is_told_of_an_abort_at_once() -> None:
    """Whoever reads what has arrived just when the line is cut opens no window any more, and leaves
    nothing unread: a mere close would let the peer wait for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        call = new_call()
        target = Target(f"http://127.0.0.1:{listener.getsockname()[1]}")
        opening = Background(lambda: Upstream().open_stream(target, PATH, b"{}", call))
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(PATIENCE)
            peer.recv(65536)
            peer.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            stream = opening.end().result
            assert isinstance(stream, UpstreamStream)
            peer.setblocking(False)
            full = 0.0
            while full < 1.0:
                try:
                    peer.send(b"x" * 65536)
                    full = 0.0
                except BlockingIOError:
                    full += 0.0 if select.select([], [peer], [], 1.0)[1] else 1.0
            peer.settimeout(PATIENCE)
            waiting = Background(lambda: peer.sendall(b"x" * 100_000_000))
            call.abort("abort")
            sock = stream._source._sock  # type: ignore[union-attr]
            while sock.recv(1 << 20):
                pass
            stream.close()
            error = waiting.end().error
            assert isinstance(error, ConnectionError), error


def test_an_ipv6_address_is_dialled() -> None:
    try:
        server = ScriptedServer(answer_sse("[DONE]"), host="::1")
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with server:
        assert read_to_end(open_at(server))
        assert server.wait_requests(1)[0].headers["host"] == f"[::1]:{server.port}"


def test_localhost_is_found_wherever_it_listens() -> None:
    with ScriptedServer(answer_sse("[DONE]")) as server:
        target = Target(f"http://localhost:{server.port}")
        assert read_to_end(Upstream().open_stream(target, PATH, b"{}", new_call()))


def test_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def look_up(host: str, *args: Any, **kwargs: Any) -> Any:
        if host == "board.test" and "flags" not in kwargs:
            return known("127.0.0.1", *args)
        return known(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with ScriptedServer(answer_sse("[DONE]")) as server:
        target = Target(f"http://board.test:{server.port}")
        assert read_to_end(Upstream().open_stream(target, PATH, b"{}", new_call()))
        assert server.wait_requests(1)[0].headers["host"] == f"board.test:{server.port}"


# -- how it fails -----------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["chunked", "length"])
def test_a_body_that_is_cut_is_a_transient_error_after_its_bytes(framing: str) -> None:
    with ScriptedServer({**SSE, "body": "data: x\n\n", "cut": True, "framing": framing}) as server:
        stream = open_at(server)
        assert stream.read() == b"data: x\n\n"
        with pytest.raises(ProviderError, match="broke the connection off") as caught:
            stream.read()
        assert caught.value.kind == "transient"
        assert stream.consumed == 9
        assert stream.read() == b""
        stream.close()


def test_a_reset_is_a_transient_error() -> None:
    def reset(exchange: Exchange) -> None:
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        exchange.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        exchange.sock.close()

    with ScriptedServer(script({"send": "data: x\n\n"}, reset)) as server:
        stream = open_at(server)
        with stream, pytest.raises(ProviderError, match="broke the connection off") as caught:
            while stream.read():
                pass
    assert caught.value.kind == "transient"
    assert caught.value.status is None


def test_broken_chunks_are_a_transient_error() -> None:
    def garbage(exchange: Exchange) -> None:
        exchange.raw(b"data: not a chunk\r\n")

    with (
        ScriptedServer(script(garbage)) as server,
        open_at(server) as stream,
        pytest.raises(ProviderError, match="not a chunk size") as caught,
    ):
        stream.read()
    assert caught.value.kind == "transient"


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
def test_an_empty_body_is_a_clean_end(framing: str) -> None:
    with ScriptedServer({**SSE, "body": "", "framing": framing}) as server:
        stream = open_at(server)
        assert read_to_end(stream) == []
        assert stream.consumed == 0


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (b"", "broke the connection off"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "broke the connection off"),
        (b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 200 + b"\r\n", "broke the connection off"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"b" * 70000 + b"\r\n\r\n", "broke the connection off"),
    ],
)
def test_what_is_no_http_answer_is_a_transient_error(first: bytes, words: str) -> None:
    def speak(exchange: Exchange) -> None:
        exchange.raw(first)

    with (
        ScriptedServer({"script": [speak, {"close": True}]}) as server,
        pytest.raises(ProviderError, match=words) as caught,
    ):
        open_at(server)
    assert caught.value.kind == "transient"


def test_nobody_listens() -> None:
    root = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ProviderError, match="connection refused") as caught:
        Upstream().open_stream(Target(root), PATH, b"{}", new_call())
    assert caught.value.kind == "transient"
    assert root in caught.value.message


def test_an_address_that_no_route_leads_to() -> None:
    with pytest.raises(ProviderError) as caught:
        Upstream().open_stream(Target("http://255.255.255.255:1"), PATH, b"{}", new_call())
    assert caught.value.kind == "transient"


def test_a_host_that_takes_no_connection_is_given_up() -> None:
    with deaf_port() as port, pytest.raises(ProviderError, match="no connection in time"):
        Upstream(connect_timeout=0.3).open_stream(
            Target(f"http://127.0.0.1:{port}"), PATH, b"{}", new_call()
        )


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(ProviderError, match="cannot be resolved"):
        Upstream().open_stream(Target("http://board.test"), PATH, b"{}", new_call())


def test_a_name_that_the_resolver_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, flags: int = 0) -> Any:
        if flags:
            raise socket.gaierror
        raise UnicodeError("label too long")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(ProviderError) as caught:
        Upstream().open_stream(Target("http://board.test"), PATH, b"{}", new_call())
    assert caught.value.kind == "transient"


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    with pytest.raises(ProviderError):
        Upstream().open_stream(Target("http://board.test"), PATH, b"{}", new_call())


@contextlib.contextmanager
def slow_resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A resolver that takes until the end of the block; the event says that it was asked."""
    asked, release = threading.Event(), threading.Event()

    def look_up(*_: object, flags: int = 0) -> Any:
        if not flags:
            asked.set()
            release.wait(PATIENCE)
        raise socket.gaierror(socket.EAI_NONAME, "no")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        yield asked
    finally:
        release.set()
        for thread in threading.enumerate():
            if thread.name == "llamacpp-resolve":
                thread.join(PATIENCE)


def test_a_resolver_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_resolver(monkeypatch), pytest.raises(ProviderError) as caught:
        Upstream(connect_timeout=0.2).request(
            Target("http://board.test"), "GET", "/props", timeout=PATIENCE
        )
    assert caught.value.kind == "transient"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed_nor_its_body_read(status: int) -> None:
    def endless(exchange: Exchange) -> None:
        while True:
            exchange.send(b"x" * 65536)

    head = {"status": status, "headers": {"location": "http://evil.test/v1?key=pw-4711"}}
    with ScriptedServer({"script": [{"headers": head}, endless]}) as server:
        for attempt in (
            lambda: open_at(server),
            lambda: Upstream().request(Target(server.url), "GET", "/props", timeout=PATIENCE),
        ):
            with pytest.raises(ProviderError, match="not followed") as caught:
                attempt()
            assert caught.value.kind == "permanent"
            assert caught.value.status == status
            assert "evil.test" in caught.value.message
            assert "pw-4711" not in caught.value.message
        assert len(server.requests) == 2


def test_a_compressed_answer_is_refused() -> None:
    answer = {"status": 200, "headers": {"content-encoding": "gzip"}, "body": "x"}
    with ScriptedServer(answer) as server:
        with pytest.raises(ProviderError, match="compresses"):
            open_at(server)
        wait_for(lambda: not server.open(), "the end of the connection")


def test_a_failure_is_classified_with_its_body() -> None:
    answer = answer_json({"error": {"code": 503, "message": "Loading model"}}, status=503)
    with ScriptedServer(answer) as server:
        with pytest.raises(ProviderError, match="Loading model") as caught:
            open_at(server)
        assert (caught.value.kind, caught.value.status) == ("transient", 503)
        wait_for(lambda: not server.open(), "the end of the connection")


def test_the_caller_may_classify() -> None:
    def mine(status: int, body: bytes) -> ProviderError:
        return ProviderError("permanent", f"{status} {body.decode()}")

    with (
        ScriptedServer({"status": 500, "body": "oops", "framing": "length"}) as server,
        pytest.raises(ProviderError, match="500 oops"),
    ):
        Upstream().open_stream(Target(server.url), PATH, b"{}", new_call(), classify=mine)


def test_an_endless_error_body_is_cut_off() -> None:
    def endless(exchange: Exchange) -> None:
        while True:
            exchange.send(b"x" * 65536)

    seen: list[int] = []

    def mine(status: int, body: bytes) -> ProviderError:
        seen.append(len(body))
        return ProviderError("transient", "x")

    answer = {"script": [{"headers": {"status": 500}}, endless]}
    with ScriptedServer(answer) as server, pytest.raises(ProviderError):
        Upstream().open_stream(Target(server.url), PATH, b"{}", new_call(), classify=mine)
    assert seen == [streams.ERROR_LIMIT]


def test_an_error_body_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "ERROR_SECONDS", 0.2)
    answer = {
        "script": [{"headers": {"status": 503}}, {"send": "Loading"}, {"hang_ms": 60000}],
    }
    with ScriptedServer(answer) as server, pytest.raises(ProviderError) as caught:
        open_at(server)
    assert caught.value.status == 503
    assert "Loading" in caught.value.message


@pytest.mark.parametrize(
    "value", ["a\r\nX-Evil: 1", "a\nb", "a\x00b", "schlüssel", " padded", "\x7f"]
)
def test_nothing_can_be_smuggled_into_a_header(value: str) -> None:
    with ScriptedServer(answer_sse("[DONE]")) as server:
        attempts = [
            lambda: Upstream().open_stream(Target(server.url, value), PATH, b"{}", new_call()),
            lambda: Upstream().open_stream(
                Target(server.url), PATH, b"{}", new_call(), headers={"X-Id": value}
            ),
        ]
        for attempt, name in zip(attempts, ("API key", "X-Id"), strict=True):
            with pytest.raises(ProviderError, match=name) as caught:
                attempt()
            assert caught.value.kind == "permanent"
            assert value not in caught.value.message
        assert server.connections == 0


# -- aborts -----------------------------------------------------------------------------------


def test_an_abort_before_the_connect_makes_no_connection() -> None:
    call = new_call()
    call.abort("abort")
    with ScriptedServer(answer_sse("[DONE]")) as server:
        with pytest.raises(Interrupted, match="abort"):
            open_at(server, call)
        assert server.connections == 0


def test_an_abort_while_connecting() -> None:
    call = new_call()
    with deaf_port() as port:
        connecting = threading.Event()
        target = Target(f"http://127.0.0.1:{port}")
        held = dialing.Line.hold

        def hold(line: dialing.Line, sock: socket.socket) -> None:
            held(line, sock)
            connecting.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dialing.Line, "hold", hold)
            run = Background(lambda: Upstream().open_stream(target, PATH, b"{}", call))
            assert connecting.wait(PATIENCE)
            assert call.abort("stop")
            assert isinstance(run.end().error, Interrupted)


def test_an_abort_between_connect_and_handover(monkeypatch: pytest.MonkeyPatch) -> None:
    call = new_call()
    held = dialing.Line.hold

    def hold(line: dialing.Line, sock: socket.socket) -> None:
        call.abort("abort")
        held(line, sock)

    monkeypatch.setattr(dialing.Line, "hold", hold)
    with ScriptedServer(answer_sse("[DONE]")) as server, pytest.raises(Interrupted):
        open_at(server, call)


def test_an_abort_while_the_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    call = new_call()
    with slow_resolver(monkeypatch) as asked:
        target = Target("http://board.test")
        run = Background(lambda: Upstream().open_stream(target, PATH, b"{}", call))
        assert asked.wait(PATIENCE)
        call.abort("abort")
        assert isinstance(run.end().error, Interrupted)


def test_an_abort_while_the_body_is_sent() -> None:
    call, unread = new_call(), threading.Event()
    with ScriptedServer(before_body=lambda _: unread.wait(PATIENCE) and None) as server:
        run = Background(lambda: open_at(server, call, b"x" * 50_000_000))
        server.wait_requests(1)
        call.abort("abort")
        assert isinstance(run.end().error, Interrupted)
        unread.set()


def test_an_abort_before_the_headers() -> None:
    call = new_call()
    with ScriptedServer({"script": [{"hang_ms": 60000}]}) as server:
        run = Background(lambda: open_at(server, call))
        server.wait_requests(1)
        assert call.abort("abort")
        assert not call.abort("stop")
        assert isinstance(run.end().error, Interrupted)
        assert server.client_closed.wait(PATIENCE)


def test_an_abort_in_mid_stream() -> None:
    call = new_call()
    with ScriptedServer(script({"send": "data: x\n\n"}, {"hang_ms": 60000})) as server:
        stream = open_at(server, call)
        assert stream.read() == b"data: x\n\n"
        run = Background(stream.read)
        call.abort("consumer gone")
        error = run.end().error
        assert isinstance(error, Interrupted)
        assert error.reason == "consumer gone"
        assert server.client_closed.wait(PATIENCE)
        stream.close()


def test_an_abort_in_mid_stream_until_close_is_no_clean_end() -> None:
    call = new_call()
    answer = script({"send": "data: x\n\n"}, {"hang_ms": 60000}, framing="close")
    with ScriptedServer(answer) as server, open_at(server, call) as stream:
        assert stream.read()
        call.abort("abort")
        with pytest.raises(Interrupted):
            stream.read()


def test_what_had_arrived_before_the_abort_is_not_handed_out() -> None:
    call, sent = new_call(), threading.Event()
    steps = [{"send": "data: x\n\n"}, lambda _: sent.set(), {"hang_ms": 60000}]
    with ScriptedServer(script(*steps)) as server, open_at(server, call) as stream:
        assert sent.wait(PATIENCE)
        call.abort("abort")
        with pytest.raises(Interrupted):
            stream.read()


def test_an_abort_while_an_error_body_is_read() -> None:
    call, sent = new_call(), threading.Event()
    steps = [{"headers": {"status": 500}}, lambda _: sent.set(), {"hang_ms": 60000}]
    with ScriptedServer({"script": steps}) as server:
        run = Background(lambda: open_at(server, call))
        assert sent.wait(PATIENCE)
        call.abort("abort")
        assert isinstance(run.end().error, Interrupted)


def test_an_abort_after_the_end_hits_nobody() -> None:
    call = new_call()
    with ScriptedServer(answer_sse("[DONE]")) as server:
        stream = open_at(server, call)
        assert read_to_end(stream)
        call.abort("abort")
        stream.close()
        assert read_to_end(open_at(server))


def test_closing_early_frees_the_server() -> None:
    with ScriptedServer(script({"send": "data: x\n\n"}, {"hang_ms": 60000})) as server:
        with open_at(server) as stream:
            assert stream.read()
        assert server.client_closed.wait(PATIENCE)


# -- time -------------------------------------------------------------------------------------


def test_the_connect_timeout_is_not_a_time_limit_for_the_upload() -> None:
    slow = threading.Event()
    body = b"x" * 30_000_000
    with ScriptedServer(
        answer_sse("[DONE]"), before_body=lambda _: slow.wait(0.6) and None
    ) as server:
        assert read_to_end(open_at(server, body=body, connect_timeout=0.2))
        assert server.wait_requests(1)[0].body == body


def test_the_connect_timeout_is_not_a_time_limit_for_the_answer() -> None:
    steps = [{"sleep_ms": 400}, {"headers": SSE}, {"sleep_ms": 400}, {"send": "data: x\n\n"}]
    with ScriptedServer({"script": steps}) as server:
        assert read_to_end(open_at(server, connect_timeout=0.1)) == [b"data: x\n\n"]


def drip(exchange: Exchange) -> None:
    """Byte by byte, each well within any limit for one read."""
    while True:
        exchange.raw(b"x")
        exchange.watch(0.02)


@pytest.mark.parametrize(
    "steps",
    [
        [{"hang_ms": 60000}],
        [lambda exchange: exchange.raw(b"HTTP/1.1 200 OK\r\nX: "), drip],
        [{"headers": {"status": 200}}, {"hang_ms": 60000}],
        [lambda exchange: exchange.head(200, {}, "length", 1000), drip],
    ],
    ids=["silence", "dripping headers", "no body", "dripping body"],
)
def test_a_short_request_has_one_time_limit_for_all_of_it(steps: list[Any]) -> None:
    with ScriptedServer({"script": steps}) as server:
        with pytest.raises(ProviderError, match="in time") as caught:
            Upstream().request(Target(server.url), "GET", "/props", timeout=0.4)
        assert caught.value.kind == "transient"
        assert server.client_closed.wait(PATIENCE)


def test_the_time_limit_of_a_short_request_covers_the_connect() -> None:
    with deaf_port() as port, pytest.raises(ProviderError, match="in time"):
        Upstream().request(Target(f"http://127.0.0.1:{port}"), "GET", "/props", timeout=0.2)


# -- short requests ---------------------------------------------------------------------------


def test_a_short_request_and_its_reply() -> None:
    with ScriptedServer(routes={"/tokenize": answer_json({"tokens": [1]})}) as server:
        reply = Upstream().request(
            Target(server.url), "POST", "/tokenize?a=b", {"content": "ü"}, timeout=PATIENCE
        )
        (request,) = server.wait_requests(1)
        assert request.target == "/tokenize?a=b"
        assert request.body == '{"content":"ü"}'.encode()
        assert reply.ok
        assert reply.json() == {"tokens": [1]}
        reply = Upstream().request(Target(server.url), "GET", "/none", timeout=PATIENCE)
        assert server.wait_requests(2)[1].body == b""
        assert (reply.ok, reply.status) == (False, 404)
        assert reply.json()["error"]["code"] == 404


def test_an_answer_that_is_too_long_is_an_error() -> None:
    def endless(exchange: Exchange) -> None:
        while True:
            exchange.send(b"x" * 65536)

    with ScriptedServer(script(endless)) as server:
        with pytest.raises(ProviderError, match="more than 100000 bytes") as caught:
            Upstream().request(Target(server.url), "GET", "/", timeout=PATIENCE, limit=100_000)
        assert caught.value.kind == "permanent"
        assert server.client_closed.wait(PATIENCE)


def test_a_payload_without_a_json_form() -> None:
    with pytest.raises(ProviderError, match="JSON") as caught:
        Upstream().request(Target("http://h"), "POST", "/", {"a": float("nan")}, timeout=1)
    assert caught.value.kind == "permanent"


def test_a_short_request_is_aborted_like_a_stream() -> None:
    call = new_call()
    with ScriptedServer({"script": [{"hang_ms": 60000}]}) as server:
        run = Background(
            lambda: Upstream().request(
                Target(server.url), "POST", "/v1/embeddings", {}, timeout=PATIENCE, call=call
            )
        )
        server.wait_requests(1)
        call.abort("abort")
        assert isinstance(run.end().error, Interrupted)
        assert server.client_closed.wait(PATIENCE)


@responses.activate
@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "permanent"), (401, "auth_expired"), (429, "rate_limited"), (500, "transient")],
)
def test_statuses_and_bodies_over_another_transport(status: int, kind: str) -> None:
    responses.post("http://mocked:1" + PATH, status=status, body="words")
    with pytest.raises(ProviderError, match="words") as caught:
        Upstream().open_stream(Target("http://mocked:1"), PATH, b"{}", new_call())
    assert (caught.value.kind, caught.value.status) == (kind, status)


@responses.activate
def test_a_success_over_another_transport() -> None:
    responses.post("http://mocked:1" + PATH, body="data: [DONE]\n\n")
    stream = Upstream().open_stream(Target("http://mocked:1"), PATH, b"{}", new_call())
    assert b"".join(read_to_end(stream)) == b"data: [DONE]\n\n"


# -- TLS --------------------------------------------------------------------------------------


def server_context(*, wants_client: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem")
    if wants_client:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(TLS / "ca.pem")
    return context


def test_tls_with_a_ca_of_our_own() -> None:
    with ScriptedServer(answer_sse("[DONE]"), tls=server_context()) as server:
        assert server.url.startswith("https://")
        stream = open_at(server, ca_file=str(TLS / "ca.pem"))
        assert read_to_end(stream) == [b"data: [DONE]\n\n"]


def test_tls_that_nobody_vouches_for_is_refused() -> None:
    with ScriptedServer(answer_sse("[DONE]"), tls=server_context()) as server:
        with pytest.raises(ProviderError, match="certificate"):
            open_at(server)
        assert not server.requests


def test_tls_for_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *args, **__: known("127.0.0.1", *args))
    with ScriptedServer(answer_sse("[DONE]"), tls=server_context()) as server:
        target = Target(f"https://other.test:{server.port}")
        upstream = Upstream(ca_file=str(TLS / "ca.pem"))
        with pytest.raises(ProviderError, match="certificate"):
            upstream.open_stream(target, PATH, b"{}", new_call())


def test_a_client_certificate_is_shown() -> None:
    with ScriptedServer(answer_sse("[DONE]"), tls=server_context(wants_client=True)) as server:
        files = {"ca_file": str(TLS / "ca.pem")}
        with pytest.raises(ProviderError):
            read_to_end(open_at(server, **files))
        stream = open_at(server, **files, client_cert=str(TLS / "client.pem"))
        assert read_to_end(stream) == [b"data: [DONE]\n\n"]


def test_files_that_cannot_be_used_are_named_at_once(tmp_path: pathlib.Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    for path in (str(tmp_path / "missing"), str(empty)):
        with pytest.raises(SettingsError, match="ca_file"):
            Upstream(ca_file=path)
        with pytest.raises(SettingsError, match="client_cert"):
            Upstream(client_cert=path)


def test_a_peer_that_does_not_speak_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target(f"https://127.0.0.1:{listener.getsockname()[1]}")
        run = Background(lambda: Upstream().open_stream(target, PATH, b"{}", new_call()))
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            error = run.end().error
    assert isinstance(error, ProviderError)
    assert error.kind == "transient"
    assert "TLS" in error.message


def test_a_peer_that_never_ends_its_handshake_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target(f"https://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ProviderError, match="in time"):
            Upstream(connect_timeout=0.3).open_stream(target, PATH, b"{}", new_call())


def test_nobody_listens_for_tls() -> None:
    with pytest.raises(ProviderError, match="refused"):
        Upstream().open_stream(Target(f"https://127.0.0.1:{free_port()}"), PATH, b"{}", new_call())


def test_an_abort_in_the_tls_handshake() -> None:
    call = new_call()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Target(f"https://127.0.0.1:{listener.getsockname()[1]}")
        run = Background(lambda: Upstream().open_stream(target, PATH, b"{}", call))
        peer, _ = listener.accept()
        with peer:
            assert peer.recv(1)  # The handshake has begun.
            call.abort("abort")
            assert isinstance(run.end().error, Interrupted)


@pytest.mark.parametrize("steps", [[], [{"headers": SSE}, {"send": "data: x\n\n"}]])
def test_an_abort_over_tls_before_and_after_the_headers(steps: list[Any]) -> None:
    call = new_call()
    answer = {"script": [*steps, {"hang_ms": 60000}]}
    with ScriptedServer(answer, tls=server_context()) as server:
        seen = threading.Event()

        def read() -> None:
            with open_at(server, call, ca_file=str(TLS / "ca.pem")) as stream:
                while stream.read():
                    seen.set()

        run = Background(read)
        server.wait_requests(1)
        assert not steps or seen.wait(PATIENCE)
        call.abort("abort")
        assert isinstance(run.end().error, Interrupted)
        assert server.client_closed.wait(PATIENCE)


def test_a_tls_stream_leaves_no_descriptor() -> None:
    with ScriptedServer(answer_sse("[DONE]"), tls=server_context()) as server:
        upstream = Upstream(ca_file=str(TLS / "ca.pem"))
        target = Target(server.url)
        read_to_end(upstream.open_stream(target, PATH, b"{}", new_call()))
        wait_for(lambda: not server.open(), "the first connection's end")
        before = descriptors()
        for _ in range(5):
            read_to_end(upstream.open_stream(target, PATH, b"{}", new_call()))
        wait_for(lambda: not server.open(), "the last connection's end")
        assert descriptors() == before


# -- the real server --------------------------------------------------------------------------

LONG = json.dumps(
    {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 8000,
    }
).encode()


def busy_slots(server: LlamaServer) -> int:
    slots = Upstream().request(Target(server.url), "GET", "/slots", timeout=PATIENCE).json()
    return sum(slot["is_processing"] for slot in slots)


def test_a_real_server_stops_when_a_stream_is_aborted(llama_factory: LlamaFactory) -> None:
    server = llama_factory("slow", parallel=1, ctx_size=8192)
    call = new_call()
    with Upstream().open_stream(Target(server.url), PATH, LONG, call) as stream:
        assert b"data: " in stream.read()
        assert busy_slots(server) == 1
        run = Background(lambda: list(iter(stream.read, b"")))
        call.abort("abort")
        assert isinstance(run.end().error, Interrupted)
    wait_for(lambda: busy_slots(server) == 0, "the end of the generation")


def test_a_real_server_forgets_what_waits_for_a_slot(llama_factory: LlamaFactory) -> None:
    server = llama_factory("slow", parallel=1, ctx_size=8192, metrics=True)
    target, upstream = Target(server.url), Upstream()

    def waiting() -> bool:
        metrics = upstream.request(target, "GET", "/metrics", timeout=PATIENCE).body
        return b"\nllamacpp:requests_deferred 1" in metrics

    with upstream.open_stream(target, PATH, LONG, new_call()) as first:
        assert first.read()
        call = new_call()
        run = Background(lambda: upstream.open_stream(target, PATH, LONG, call))
        wait_for(waiting, "the second request's turn to wait")
        call.abort("abort")
        assert isinstance(run.end().error, Interrupted)
        assert first.read()
    wait_for(lambda: busy_slots(server) == 0, "the end of the generation")


def test_a_real_servers_errors_are_classified(llama_factory: LlamaFactory) -> None:
    server = llama_factory("demo", parallel=1, ctx_size=512, api_key="sk-right")
    upstream = Upstream()
    body = json.dumps({"messages": [{"role": "user", "content": "x " * 5000}]}).encode()
    for key, kind in (("sk-right", "context_overflow"), ("sk-wrong", "auth_expired")):
        with pytest.raises(ProviderError) as caught:
            upstream.open_stream(Target(server.url, key), PATH, body, new_call())
        assert caught.value.kind == kind
        assert key not in caught.value.message


def test_a_real_servers_stream_ends_cleanly(llama: LlamaServer) -> None:
    body = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'
    blocks = read_to_end(Upstream().open_stream(Target(llama.url), PATH, body, new_call()))
    assert b"".join(blocks).endswith(b"data: [DONE]\n\n")
