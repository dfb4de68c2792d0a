"""Streams that outlive their connection: the protocol, against a server that keeps a stream."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs, urlsplit

import chunks
import pytest
from peers import PATIENCE, Request, ScriptedServer, answer_json, free_port, wait_for
from proxy import Proxy

from provider_llamacpp import cli, jsontext
from provider_llamacpp.calls import Call
from provider_llamacpp.errors import Interrupted, ProviderError, SettingsError
from provider_llamacpp.events.assembler import Outcome
from provider_llamacpp.events.classify import classify
from provider_llamacpp.server import discards, resumable, resume
from provider_llamacpp.server.address import Target
from provider_llamacpp.server.dialing import Line
from provider_llamacpp.server.resumable import LOOKUP
from provider_llamacpp.server.resume import HEADER, Resumer
from provider_llamacpp.server.upstream import Upstream
from provider_llamacpp.settings import Settings, from_environment

CHAT = "/v1/chat/completions"
STREAM = "/v1/stream"
SSE = {"headers": {"headers": {"content-type": "text/event-stream"}}}
WORDS = [b'data: {"n":"%d \xc3\xa9"}\n\n' % number for number in range(6)]
BODY = b"".join([*WORDS[:2], b":\n\n", *WORDS[2:], b"data: [DONE]\n\n"])
BREAK = {"close": True}


def new_call() -> Call:
    return Call(1, "stream", key="k", model="m")


def sends(data: bytes, *more: object) -> dict[str, Any]:
    """An answer that sends ``data`` as one chunk, and then does ``more``."""
    return {"script": [SSE, {"send": data}, *more]}


class Keeper:
    """Answers as llama-server does that keeps one stream of :data:`BODY`.

    ``posts`` and ``replays`` hold the answers to the next requests; without, a post sends all of
    the body and a replay the rest of it.
    """

    def __init__(self) -> None:
        self.able: dict[str, Any] = answer_json([])
        self.posts: list[Any] = []
        self.replays: list[Any] = []
        self.lookups: list[Any] = []
        self.deletes: list[Any] = []
        self.row: dict[str, Any] | None = {"is_done": True, "total_bytes": len(BODY)}

    def chat(self, request: Request) -> Any:
        return self.posts.pop(0) if self.posts else sends(BODY)

    def lookup(self, request: Request) -> Any:
        ids = request.json()["conversation_ids"]
        if not ids:
            return self.able
        if self.lookups:
            return self.lookups.pop(0)
        return answer_json([{"conversation_id": ids[0], **self.row}] if self.row else [])

    def stream(self, request: Request) -> Any:
        if request.method == "DELETE":
            return self.deletes.pop(0) if self.deletes else {"status": 204, "framing": "length"}
        if self.replays:
            return self.replays.pop(0)
        (offset,) = parse_qs(urlsplit(request.target).query)["from"]
        return sends(BODY[int(offset) :])


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def server(keeper: Keeper) -> Iterator[ScriptedServer]:
    routes = {CHAT: keeper.chat, LOOKUP: keeper.lookup, STREAM: keeper.stream}
    with ScriptedServer(routes=routes) as server:
        yield server
        discarded()


def discarded() -> None:
    """Wait until nothing is tried behind a call's back any more: that needs the server."""
    wait_for(
        lambda: all(each.name != "llamacpp-discards" for each in threading.enumerate()),
        "the end of the discards",
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short pauses, and no thread that outlives its test."""
    monkeypatch.setattr(resumable, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(discards, "_FIRST_PAUSE", 0.01)
    yield
    discarded()


def resumer(mode: Any = "on", budget: float = PATIENCE) -> Resumer:
    return Resumer(Upstream(), mode, budget)


def opened(url: str, by: Resumer | None = None, call: Call | None = None, **more: Any) -> Any:
    options = {
        "encode": jsontext.dumpb,
        "headers": {"x-more": "1"},
        "classify": classify,
        **more,
    }
    body = options.pop("body", {})
    return (by or resumer()).open_stream(Target(url), CHAT, body, call or new_call(), **options)


def read_all(stream: Any) -> bytes:
    with stream:
        return b"".join(iter(stream.read, b""))


def methods(server: ScriptedServer) -> list[str]:
    return [f"{request.method} {request.path}" for request in server.requests]


def offsets(server: ScriptedServer) -> list[int]:
    """Where the replays were to begin."""
    return [
        int(parse_qs(urlsplit(request.target).query)["from"][0])
        for request in server.requests
        if request.method == "GET"
    ]


ASKED, POSTED = f"POST {LOOKUP}", f"POST {CHAT}"
REPLAYED, DELETED = f"GET {STREAM}", f"DELETE {STREAM}"


class TestSettings:
    @pytest.mark.parametrize("mode", ["auto", "on", "off"])
    def test_the_mode(self, mode: str) -> None:
        environ = {"PROVIDER_LLAMACPP_RESUME": mode, "PROVIDER_LLAMACPP_RESUME_BUDGET": "7.5"}
        settings = from_environment(environ)
        assert (settings.resume, settings.resume_budget) == (mode, 7.5)
        options = cli.parser([]).parse_args(["--resume", mode])
        flags = {name: getattr(options, name) for name in cli.SETTING_FLAGS}
        assert from_environment({"PROVIDER_LLAMACPP_RESUME": "off"}, **flags).resume == mode

    def test_what_cannot_be_set(self) -> None:
        with pytest.raises(SettingsError, match=r"resume 'maybe': auto, on or off \(--resume\)"):
            Settings(resume="maybe")  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="resume_budget"):
            Settings(resume_budget=0)

    def test_defaults(self) -> None:
        assert (Settings().resume, Settings().resume_budget) == ("auto", 30.0)


def test_a_warning_reaches_the_final_message() -> None:
    machine = chunks.assembler(warnings=["first"])
    frames = machine.feed(chunks.text("x"))
    machine.warn("second")
    frames += machine.feed(chunks.finish()) + machine.finish(Outcome())
    messages = [frame.get("partial") or frame.get("message") for frame in map(json.loads, frames)]
    assert messages[0]["warnings"] == ["first"]
    assert messages[-1]["warnings"] == ["first", "second"]


class TestWhether:
    """Which streams are made resumable."""

    @pytest.mark.parametrize("mode", ["off", "auto"])
    def test_nothing_changes(self, server: ScriptedServer, mode: str) -> None:
        """``auto`` with a server on this machine is like ``off``: not a question more."""
        stream = opened(server.url, resumer(mode))
        assert (read_all(stream), stream.notice) == (BODY, None)
        (request,) = server.requests
        assert HEADER.lower() not in request.headers
        assert (request.headers["x-more"], request.body) == ("1", b"{}")

    @pytest.mark.parametrize("mode", ["on", "auto"])
    def test_a_server_that_keeps_no_streams(
        self, server: ScriptedServer, keeper: Keeper, mode: str, far: Callable[..., str]
    ) -> None:
        keeper.able = answer_json({"error": {}}, 404)
        by = resumer(mode)
        for _ in range(2):
            assert read_all(opened(far(server), by)) == BODY
        assert methods(server) == [ASKED, POSTED, POSTED]
        assert all(HEADER.lower() not in request.headers for request in server.requests)

    def test_a_broken_stream_of_such_a_server_is_not_taken_up(
        self, server: ScriptedServer, keeper: Keeper
    ) -> None:
        keeper.able = answer_json({"error": {}}, 501)
        keeper.posts = [sends(BODY[:50], BREAK)]
        with pytest.raises(ProviderError, match="broke the connection off"):
            read_all(opened(server.url))
        assert methods(server) == [ASKED, POSTED]

    def test_it_is_asked_once_and_again_when_the_build_changes(
        self, server: ScriptedServer
    ) -> None:
        by = resumer()
        for build in (None, "b1", "b1", "b2", "b2"):
            assert read_all(opened(server.url, by, build=build)) == BODY
        assert methods(server).count(ASKED) == 3
        assert [request.json() for request in server.requests if request.path == LOOKUP] == [
            {"conversation_ids": []}
        ] * 3

    @pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
    def test_no_answer_is_not_remembered(
        self, server: ScriptedServer, keeper: Keeper, status: int
    ) -> None:
        able, keeper.able = keeper.able, answer_json({}, status)
        by = resumer()
        assert read_all(opened(server.url, by)) == BODY
        keeper.able = able
        assert read_all(opened(server.url, by)) == BODY
        assert methods(server) == [ASKED, POSTED, ASKED, POSTED]
        assert [HEADER.lower() in request.headers for request in server.requests] == [
            *(False, False),
            *(False, True),
        ]

    def test_a_server_that_is_silent_when_asked(
        self, server: ScriptedServer, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(resume, "ASK_SECONDS", 0.1)
        keeper.able = {"script": [{"hang_ms": 60_000}]}
        assert read_all(opened(server.url)) == BODY
        assert HEADER.lower() not in server.requests[-1].headers

    def test_ids_are_unguessable_and_used_once(self, server: ScriptedServer) -> None:
        by = resumer()
        for _ in range(20):
            read_all(opened(server.url, by))
        ids = {r.headers[HEADER.lower()] for r in server.requests if r.path == CHAT}
        assert len(ids) == 20
        assert all(len(each) >= 32 for each in ids)
        assert DELETED not in methods(server)

    @pytest.mark.parametrize(
        ("model", "suffix"),
        [("org/tiny:q4", "::org/tiny:q4"), ("模型", ""), (" odd", ""), ("a\r\nb", ""), (None, "")],
    )
    def test_the_model_of_a_server_in_router_mode(
        self, server: ScriptedServer, keeper: Keeper, model: str | None, suffix: str
    ) -> None:
        keeper.posts = [sends(BODY[:50], BREAK)]
        assert read_all(opened(server.url, model=model)) == BODY
        conversation = server.requests[1].headers[HEADER.lower()]
        _, mark, rest = conversation.partition("::")
        assert mark + rest == suffix
        (query,) = [urlsplit(r.target).query for r in server.requests if r.method == "GET"]
        assert parse_qs(query)["conv_id"] == [conversation]
        assert "/" not in query


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The address of a scripted server as one that stands elsewhere: the name says nothing, and
    with ``here=False`` the connection does not either."""
    real = socket.getaddrinfo

    def find(host: str, *args: Any, **kwargs: Any) -> Any:
        numeric = kwargs.get("flags", 0) & socket.AI_NUMERICHOST
        known = host == "llama.example" and not numeric
        return real("127.0.0.1" if known else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", find)

    def address(server: ScriptedServer, *, here: bool = False) -> str:
        if not here:
            monkeypatch.setattr(Line, "made", lambda line, sock: setattr(line, "connected", True))
        return f"http://llama.example:{server.port}"

    return address


class TestWhere:
    """``auto`` is on for servers that are not on this machine."""

    def test_a_server_elsewhere(
        self, server: ScriptedServer, keeper: Keeper, far: Callable[..., str]
    ) -> None:
        keeper.posts = [sends(BODY[:50], BREAK)]
        assert read_all(opened(far(server), resumer("auto"))) == BODY
        assert methods(server) == [ASKED, POSTED, REPLAYED]

    def test_a_name_that_leads_to_this_machine(
        self, server: ScriptedServer, far: Callable[..., str]
    ) -> None:
        by, url = resumer("auto"), far(server, here=True)
        for _ in range(2):
            assert read_all(opened(url, by)) == BODY
        assert methods(server) == [ASKED, POSTED, POSTED]
        assert HEADER.lower() not in server.requests[-1].headers

    @pytest.mark.parametrize(
        "root", ["http://localhost:1", "http://127.0.0.2:1/llama", "https://[::1]:1"]
    )
    def test_addresses_that_say_so(self, root: str) -> None:
        """Nobody is asked: the one request fails at the port where nothing listens."""
        with pytest.raises(ProviderError):
            opened(root, resumer("auto"))

    @pytest.mark.parametrize(
        ("own", "peer", "local"),
        [
            ("127.0.0.1", "127.0.0.1", True),
            ("127.0.0.1", "127.0.0.53", True),
            ("::1", "::1", True),
            ("192.168.1.5", "192.168.1.5", True),
            ("192.168.1.5", "192.168.1.6", False),
            ("fe80::1", "fe80::2", False),
        ],
    )
    def test_what_a_connection_shows(self, own: str, peer: str, local: bool) -> None:
        class Socket:
            getsockname = staticmethod(lambda: (own, 1))
            getpeername = staticmethod(lambda: (peer, 2))

        line = Line(None, connect_timeout=1.0)
        assert not (line.connected or line.local)
        line.made(Socket())  # type: ignore[arg-type]
        assert line.connected
        assert line.local is local

    def test_a_connection_that_was_cut_shows_nothing(self) -> None:
        line = Line(None, connect_timeout=1.0)
        with socket.socket() as sock:
            line.made(sock)
        assert (line.connected, line.local) == (True, False)


class TestBreaks:
    def test_at_every_byte(self, server: ScriptedServer, keeper: Keeper) -> None:
        by = resumer()
        for offset in range(1, len(BODY)):
            keeper.posts = [sends(BODY[:offset], BREAK)]
            stream = opened(server.url, by)
            assert read_all(stream) == BODY
            assert (stream.consumed, stream.resumed) == (len(BODY), 1)
        assert offsets(server) == list(range(1, len(BODY)))
        ids = [r.headers[HEADER.lower()] for r in server.requests if r.path == CHAT]
        assert len(set(ids)) == len(BODY) - 1
        # Where the mark itself came in two parts, the server is told once too often.
        assert set(methods(server)) <= {ASKED, POSTED, REPLAYED, DELETED}

    def test_again_and_again(self, server: ScriptedServer, keeper: Keeper) -> None:
        edges = [10, 11, 60, 61, 62, 100]
        keeper.posts = [sends(BODY[:10], BREAK)]
        keeper.replays = [
            sends(BODY[start:stop], BREAK) for start, stop in itertools.pairwise(edges)
        ]
        stream = opened(server.url)
        assert read_all(stream) == BODY
        assert offsets(server) == edges
        assert stream.resumed == 6
        assert "taken up again" in stream.notice

    def test_a_stream_that_never_broke(self, server: ScriptedServer) -> None:
        stream = opened(server.url)
        assert read_all(stream) == BODY
        assert (stream.notice, stream.consumed, stream.status) == (None, len(BODY), 200)
        assert stream.headers["Content-Type"] == "text/event-stream"
        assert stream.read() == b""
        stream.close()
        assert methods(server) == [ASKED, POSTED]

    def test_before_the_first_byte(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.posts = [{"script": [SSE, BREAK]}]
        with pytest.raises(ProviderError, match="broke the connection off") as caught:
            read_all(opened(server.url))
        assert caught.value.kind == "transient"
        # It may run all the same, now that its id keeps it alive.
        assert methods(server) == [ASKED, POSTED, DELETED]

    def test_chunks_that_are_none(self, server: ScriptedServer, keeper: Keeper) -> None:
        read = threading.Event()
        keeper.posts = [
            sends(
                BODY[:33],
                lambda exchange: exchange.watch(PATIENCE, read),
                lambda exchange: exchange.raw(b"no chunk\r\n"),
            )
        ]
        stream = opened(server.url)
        first = stream.read()
        read.set()
        assert first + read_all(stream) == BODY
        assert offsets(server) == [33]

    def test_a_replay_without_chunks(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.posts = [sends(BODY[:33], BREAK)]
        keeper.replays = [{**sends(BODY[33:]), "framing": "close"}]
        assert read_all(opened(server.url)) == BODY


class TestSilence:
    """The server is to send a comment now and then: a line without any is dead."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resume, "SILENCE_SECONDS", 0.2)

    @pytest.mark.parametrize("options", [{}, {"sse_ping_interval": 0.01, "n": 1}])
    def test_is_a_break(
        self,
        server: ScriptedServer,
        keeper: Keeper,
        options: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        assert resume.PING_SECONDS == 10
        monkeypatch.setattr(resume, "PING_SECONDS", 0.05)
        keeper.posts = [sends(BODY[:50], {"sleep_ms": 60_000})]
        stream = opened(server.url, body=options)
        assert read_all(stream) == BODY
        assert stream.resumed == 1
        wanted = {"sse_ping_interval": 0.05, **options}
        assert server.requests[1].json() == wanted

    def test_of_a_replay_is_too(
        self, server: ScriptedServer, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(resume, "PING_SECONDS", 0.05)
        keeper.posts = [sends(BODY[:50], BREAK)]
        keeper.replays = [{"script": [SSE, {"sleep_ms": 60_000}]}]
        stream = opened(server.url)
        assert read_all(stream) == BODY
        assert stream.resumed == 2

    @pytest.mark.parametrize("ping", [-1, 0, None, "5", True])
    def test_is_none_where_no_comments_were_asked_for(
        self, server: ScriptedServer, keeper: Keeper, ping: object
    ) -> None:
        keeper.posts = [sends(BODY[:50], {"sleep_ms": 500}, {"send": BODY[50:]})]
        stream = opened(server.url, body={"sse_ping_interval": ping})
        assert read_all(stream) == BODY
        assert stream.resumed == 0

    def test_is_allowed_for_three_comments(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.posts = [sends(BODY[:50], {"sleep_ms": 500}, {"send": BODY[50:]})]
        stream = opened(server.url, body={"sse_ping_interval": 10})
        assert read_all(stream) == BODY
        assert stream.resumed == 0


class TestTries:
    """What the server answers to a replay."""

    @pytest.fixture(autouse=True)
    def broken(self, keeper: Keeper) -> None:
        keeper.posts = [sends(BODY[:50], BREAK)]

    @pytest.mark.parametrize(
        ("status", "words"),
        [(400, "no longer holds what was missed"), (404, "has it no more")],
    )
    def test_lost(self, server: ScriptedServer, keeper: Keeper, status: int, words: str) -> None:
        keeper.replays = [answer_json({"error": {"message": "Stream offset lost"}}, status)]
        with pytest.raises(ProviderError, match=words) as caught:
            read_all(opened(server.url))
        assert caught.value.kind == "transient"
        assert server.url in caught.value.message
        assert methods(server) == [ASKED, POSTED, REPLAYED, DELETED]

    def test_a_refusal_for_good(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.replays = [answer_json({"error": {"message": "Invalid API Key"}}, 401)]
        with pytest.raises(ProviderError) as caught:
            read_all(opened(server.url))
        assert caught.value.kind == "auth_expired"

    @pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
    def test_a_refusal_for_now(self, server: ScriptedServer, keeper: Keeper, status: int) -> None:
        keeper.replays = [answer_json({"error": {"message": "later"}}, status)] * 2
        stream = opened(server.url)
        assert read_all(stream) == BODY
        assert stream.resumed == 1
        assert offsets(server) == [50] * 3

    @pytest.mark.parametrize("kind", ["text/html", ""])
    def test_the_page_of_a_portal(self, server: ScriptedServer, keeper: Keeper, kind: str) -> None:
        keeper.replays = [{"headers": {"content-type": kind}, "body": "<html>Log in</html>"}]
        assert read_all(opened(server.url)) == BODY

    def test_a_server_that_says_nothing(
        self, server: ScriptedServer, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(resumable, "TRY_SECONDS", 0.2)
        keeper.replays = [{"script": [{"hang_ms": 60_000}]}]
        assert read_all(opened(server.url)) == BODY

    def test_the_time_for_a_try_is_none_for_the_body(
        self, server: ScriptedServer, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(resumable, "TRY_SECONDS", 0.2)
        keeper.replays = [sends(BODY[50:60], {"sleep_ms": 500}, {"send": BODY[60:]})]
        stream = opened(server.url)
        assert read_all(stream) == BODY
        assert stream.resumed == 1

    def test_a_server_that_is_not_reached_for_a_while(self, server: ScriptedServer) -> None:
        with Proxy(server.url) as proxy:
            stream = opened(proxy.url)
            first = stream.read()
            proxy.refuse()
            with ThreadPoolExecutor(1) as pool:
                rest = pool.submit(read_all, stream)
                wait_for(lambda: stream._tries >= 3, "three tries")
                proxy.accept()
                assert first + rest.result(PATIENCE) == BODY

    def test_the_budget(self, server: ScriptedServer) -> None:
        with Proxy(server.url) as proxy:
            stream = opened(proxy.url, resumer(budget=0.2))
            assert stream.read() == BODY[:50]
            proxy.refuse()
            with pytest.raises(ProviderError, match=r"in 0\.2 s; at last: .*not reachable"):
                read_all(stream)
            proxy.accept()
            discarded()
        # Told behind the call's back, as soon as it was there again.
        assert methods(server) == [ASKED, POSTED, DELETED]

    def test_connections_that_bring_nothing_use_up_one_budget(
        self, server: ScriptedServer, keeper: Keeper
    ) -> None:
        keeper.replays = [{"script": [SSE, BREAK]}] * 10_000
        with pytest.raises(ProviderError, match=r"could not be taken up in 0\.3 s"):
            read_all(opened(server.url, resumer(budget=0.3)))

    def test_bytes_renew_the_budget(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.replays = [
            sends(BODY[offset : offset + 1], {"sleep_ms": 150}, BREAK) for offset in range(50, 56)
        ]
        assert read_all(opened(server.url, resumer(budget=0.6))) == BODY

    def test_a_connection_that_lasted_renews_it_too(
        self, server: ScriptedServer, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(resumable, "LASTING_SECONDS", 0.1)
        keeper.replays = [{"script": [SSE, {"hang_ms": 200}]}] * 4
        stream = opened(server.url, resumer(budget=0.5))
        assert read_all(stream) == BODY
        assert stream.resumed == 5

    def test_an_abort_between_tries(
        self, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(resumable, "_FIRST_PAUSE", 60.0)
        monkeypatch.setattr(resumable, "_LONGEST_PAUSE", 60.0)
        call = new_call()
        with Proxy(server.url) as proxy:
            stream = opened(proxy.url, call=call)
            assert stream.read() == BODY[:50]
            proxy.refuse()
            with ThreadPoolExecutor(1) as pool:
                reading = pool.submit(stream.read)
                wait_for(lambda: bool(call._wakers) and stream._tries == 1, "the pause")
                proxy.accept()
                call.abort("abort")
                with pytest.raises(Interrupted):
                    reading.result(PATIENCE)
            stream.close()
        assert methods(server) == [ASKED, POSTED, DELETED]

    def test_an_abort_during_a_try(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.replays = [{"script": [{"hang_ms": 60_000}]}]
        call = new_call()
        stream = opened(server.url, call=call)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_all, stream)
            server.wait_requests(3)
            call.abort("consumer gone")
            with pytest.raises(Interrupted):
                reading.result(PATIENCE)
        assert methods(server) == [ASKED, POSTED, REPLAYED, DELETED]


class TestCleanEnds:
    """A body that ends as HTTP wants it, without the mark of the end."""

    PART = BODY[: len(WORDS[0]) + 4]

    @pytest.fixture(autouse=True)
    def ended(self, keeper: Keeper) -> None:
        keeper.posts = [sends(self.PART)]

    def read(self, server: ScriptedServer) -> bytes:
        return read_all(opened(server.url))

    def test_of_a_stream_that_runs(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.row = {"is_done": False, "total_bytes": len(self.PART)}
        assert self.read(server) == BODY
        assert methods(server) == [ASKED, POSTED, ASKED, REPLAYED]
        ((conversation,),) = [
            ids
            for r in server.requests
            if r.path == LOOKUP and (ids := r.json()["conversation_ids"])
        ]
        assert conversation == server.requests[1].headers[HEADER.lower()]

    def test_of_a_stream_that_has_more(self, server: ScriptedServer) -> None:
        assert self.read(server) == BODY

    @pytest.mark.parametrize(
        "row",
        [
            pytest.param({"is_done": True, "total_bytes": len(PART)}, id="failed in the server"),
            pytest.param({"is_done": False, "total_bytes": 3}, id="bytes that were not its own"),
            pytest.param({"is_done": False, "total_bytes": None}, id="no number"),
            pytest.param({"conversation_id": "another"}, id="another"),
            pytest.param(None, id="stopped by somebody"),
        ],
    )
    def test_of_a_stream_that_is_over(
        self, server: ScriptedServer, keeper: Keeper, row: dict[str, Any] | None
    ) -> None:
        keeper.row = row
        assert self.read(server) == self.PART
        assert methods(server) == [ASKED, POSTED, ASKED, DELETED]

    def test_with_the_words_of_a_server_whose_child_died(
        self, server: ScriptedServer, keeper: Keeper
    ) -> None:
        """They are in no buffer: behind them no offset is right."""
        keeper.posts = [sends(WORDS[0], {"send": "proxy error: Failed to read connection"})]
        assert self.read(server).endswith(b"Failed to read connection")
        assert methods(server) == [ASKED, POSTED, DELETED]

    def test_in_a_comment(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.posts = [sends(BODY[: BODY.index(b":\n\n") + 1])]
        assert self.read(server) == BODY

    @pytest.mark.parametrize("status", [500, 502, 503])
    def test_when_a_gateway_has_no_server(
        self, server: ScriptedServer, keeper: Keeper, status: int
    ) -> None:
        keeper.lookups = [answer_json({}, status)]
        assert self.read(server) == BODY

    @pytest.mark.parametrize(
        "answer", [answer_json({}, 404), answer_json({}), {"body": "nonsense"}]
    )
    def test_when_nothing_can_be_told(
        self, server: ScriptedServer, keeper: Keeper, answer: dict[str, Any]
    ) -> None:
        keeper.lookups = [answer]
        assert self.read(server) == self.PART

    def test_when_nobody_answers(self, server: ScriptedServer) -> None:
        with Proxy(server.url) as proxy:
            stream = opened(proxy.url)
            first = stream.read()
            proxy.refuse()
            with ThreadPoolExecutor(1) as pool:
                rest = pool.submit(read_all, stream)
                wait_for(lambda: stream._tries >= 2, "two tries")
                proxy.accept()
                assert first + rest.result(PATIENCE) == BODY

    def test_that_brings_nothing_over_and_over(
        self, server: ScriptedServer, keeper: Keeper
    ) -> None:
        keeper.row = {"is_done": False, "total_bytes": len(BODY)}
        keeper.replays = [{"script": [SSE]}] * 10_000
        with pytest.raises(ProviderError, match=r"could not be taken up in 0\.3 s"):
            read_all(opened(server.url, resumer(budget=0.3)))

    def test_of_an_empty_body(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.posts = [{"script": [SSE]}]
        assert self.read(server) == b""
        assert methods(server) == [ASKED, POSTED, DELETED]


class TestDiscards:
    """Closing a connection stops nothing any more: the server has to be told."""

    def test_a_stream_that_is_left(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.posts = [sends(WORDS[0], {"sleep_ms": 60_000})]
        stream = opened(server.url, model="org/tiny")
        assert stream.read() == WORDS[0]
        stream.close()
        stream.close()
        assert methods(server) == [ASKED, POSTED, DELETED]
        query = urlsplit(server.requests[2].target).query
        assert parse_qs(query) == {"conv_id": [server.requests[1].headers[HEADER.lower()]]}

    def test_an_abort_while_it_reads(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.posts = [sends(WORDS[0], {"sleep_ms": 60_000})]
        call = new_call()
        stream = opened(server.url, call=call)
        assert stream.read() == WORDS[0]
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_all, stream)
            call.abort("abort")
            with pytest.raises(Interrupted):
                reading.result(PATIENCE)
        assert methods(server) == [ASKED, POSTED, DELETED]

    def test_an_abort_before_the_headers(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.posts = [{"script": [{"hang_ms": 60_000}]}]
        call = new_call()
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(opened, server.url, None, call)
            server.wait_requests(2)
            call.abort("abort")
            with pytest.raises(Interrupted):
                opening.result(PATIENCE)
        # The request itself might arrive later than the first of them.
        server.wait_requests(7)
        assert methods(server) == [ASKED, POSTED, *[DELETED] * 5]

    @pytest.mark.parametrize(
        ("status", "told"), [(400, False), (500, False), (503, False), (502, True), (504, True)]
    )
    def test_a_refusal(
        self, server: ScriptedServer, keeper: Keeper, status: int, told: bool
    ) -> None:
        """A server that refuses keeps no stream; a gateway may have lost its patience."""
        keeper.posts = [answer_json({"error": {"message": "no"}}, status)]
        with pytest.raises(ProviderError) as caught:
            opened(server.url)
        assert caught.value.status == status
        server.wait_requests(7 if told else 2)
        assert (DELETED in methods(server)) is told

    def test_a_break_before_the_headers(self, server: ScriptedServer, keeper: Keeper) -> None:
        keeper.posts = [{"script": [BREAK]}]
        with pytest.raises(ProviderError):
            opened(server.url)
        server.wait_requests(7)
        assert methods(server) == [ASKED, POSTED, *[DELETED] * 5]

    def test_a_connection_that_was_never_made(self, server: ScriptedServer) -> None:
        by = resumer()
        with Proxy(server.url) as proxy:
            read_all(opened(proxy.url, by))
            proxy.refuse()
            with pytest.raises(ProviderError, match="not reachable"):
                opened(proxy.url, by)
        assert methods(server) == [ASKED, POSTED]

    @pytest.mark.parametrize("answer", [{"status": 503, "body": "{}"}, {"script": [BREAK]}])
    def test_it_is_told_later(
        self, server: ScriptedServer, keeper: Keeper, answer: dict[str, Any]
    ) -> None:
        keeper.posts = [sends(WORDS[0], {"sleep_ms": 60_000})]
        keeper.deletes = [answer] * 3
        opened(server.url).close()
        server.wait_requests(6)
        assert methods(server) == [ASKED, POSTED, *[DELETED] * 4]

    def test_several_are_told_later_by_one_thread(self) -> None:
        port = free_port()
        means = discards.Discards(Upstream())
        target = Target(f"http://127.0.0.1:{port}")
        for name in ("a", "b", "c"):
            means.discard(target, name)
        (_,) = [each for each in threading.enumerate() if each.name == "llamacpp-discards"]
        with ScriptedServer({"status": 204, "framing": "length"}, port=port) as late:
            late.wait_requests(3)
            wait_for(lambda: not means._running, "the end of the thread")
        assert sorted(late.paths()) == [f"DELETE {STREAM}?conv_id={name}" for name in "abc"]

    def test_patience_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(discards, "DISCARD_PATIENCE", 0.1)
        means = discards.Discards(Upstream())
        means.discard(Target(f"http://127.0.0.1:{free_port()}"), "a")
        wait_for(lambda: not means._running, "the end of the thread")

    def test_a_stop_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(discards, "_FIRST_PAUSE", 60.0)
        by = resumer()
        target = Target(f"http://127.0.0.1:{free_port()}")
        by._discards.discard(target, "a")
        assert by._discards._running
        by.close()
        wait_for(lambda: not by._discards._running, "the end of the thread")
        by._discards.discard(target, "b")
        assert not by._discards._running

    def test_a_deaf_server_costs_little(
        self, server: ScriptedServer, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(discards, "DISCARD_SECONDS", 0.1)
        keeper.posts = [sends(WORDS[0], {"sleep_ms": 60_000})]
        keeper.deletes = [{"script": [{"hang_ms": 60_000}]}]
        by = resumer()
        stream = opened(server.url, by)
        stream.read()
        stream.close()
        server.wait_requests(4)
