"""The write end of a channel against real sockets: what leaves, and how its loss is noticed."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from bus_peers import (
    TIMEOUT,
    Peer,
    Run,
    Server,
    certificate,
    descriptors,
    eventually,
    server_context,
)
from websockets.sync.server import Server as WebSocketsServer
from websockets.sync.server import ServerConnection, serve

from provider_llamacpp.bus import channel as channel_module
from provider_llamacpp.bus.channel import Channel, ChannelWatch, channel_url, connect
from provider_llamacpp.bus.engine import Engine
from provider_llamacpp.bus.frames import MAX_FRAME
from provider_llamacpp.calls import Call
from provider_llamacpp.errors import ConsumerGone, Interrupted, ProviderError
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.payloads import WriterRef

REF = WriterRef("chan/1", "se cret&")


class Gone:
    """Counts calls of ``on_gone``."""

    def __init__(self) -> None:
        self.count = 0
        self.event = threading.Event()

    def __call__(self) -> None:
        self.count += 1
        self.event.set()


@pytest.fixture
def watch() -> Iterator[ChannelWatch]:
    watch = ChannelWatch("test-watch")
    watch.start()
    yield watch
    watch.stop()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@dataclass
class Pair:
    channel: Channel
    peer: Peer
    gone: Gone = field(default_factory=Gone)

    def close(self) -> None:
        """End both sides; the peer first, for then there is nothing to wait for."""
        self.peer.close()
        self.channel.finish()


def open_pair(server: Server, watch: ChannelWatch, *, after: bytes = b"", **options: Any) -> Pair:
    gone = options.pop("on_gone", None) or Gone()
    opening = Run(
        lambda: Channel.open(server.url, REF, watch=watch, on_gone=gone, **options)  # type: ignore
    )
    peer = server.accept(after=after)
    channel = opening.result()
    if server.narrow:
        channel._link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return Pair(channel, peer, gone)


def fill(channel: Channel, peer: Peer) -> Run:
    """A thread that sends until it has to wait for the peer, which reads nothing."""

    def send() -> None:
        while True:
            channel.send([b"x" * 65536])

    run = Run(send)
    link = channel._link
    assert eventually(lambda: link._waiting)
    return run


# -- the address --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("ws://h:1", "ws://h:1/ws/channels/chan%2F1?key=se%20cret%26&dir=write"),
        ("wss://h", "wss://h/ws/channels/chan%2F1?key=se%20cret%26&dir=write"),
        ("ws://h:1/", "ws://h:1/ws/channels/chan%2F1?key=se%20cret%26&dir=write"),
        ("ws://h/a/?token=t", "ws://h/a/ws/channels/chan%2F1?token=t&key=se%20cret%26&dir=write"),
    ],
)
def test_the_address_keeps_the_engines_query(base: str, expected: str) -> None:
    assert channel_url(base, REF, "write").geturl() == expected


def test_ids_and_keys_cannot_leave_their_place() -> None:
    url = channel_url("ws://h", WriterRef("../x?y#z\r\nA: b", "k&dir=read\r\n"), "write").geturl()
    assert (
        url == "ws://h/ws/channels/..%2Fx%3Fy%23z%0D%0AA%3A%20b?key=k%26dir%3Dread%0D%0A&dir=write"
    )


def test_the_request(server: Server, watch: ChannelWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    pair = open_pair(server, watch, token="bearer-token")
    assert pair.peer.path == "/ws/channels/chan%2F1?key=se%20cret%26&dir=write"
    assert pair.peer.header("Authorization") == "Bearer bearer-token"
    assert pair.peer.header("Origin") is None
    assert pair.peer.header("Host") == f"127.0.0.1:{server.port}"
    pair.close()


# -- sending ------------------------------------------------------------------------------


def test_events_arrive_in_order_and_are_counted(server: Server, watch: ChannelWatch) -> None:
    pair = open_pair(server, watch)
    sizes = (1, 125, 126, 200, 65535, 65536, 70000)
    events = [(b"%d:" % size).ljust(size, b".") for size in sizes]
    sending = Run(lambda: pair.channel.send(events))
    assert [pair.peer.text().encode() for _ in events] == events
    sending.result()
    pair.channel.send([])
    pair.channel.send([b"last"])
    assert pair.peer.text() == "last"
    assert pair.channel.sent == len(events) + 1
    assert pair.peer.header("Authorization") is None
    pair.close()


def test_finish_sends_the_last_events_then_closes(server: Server, watch: ChannelWatch) -> None:
    before = descriptors()
    pair = open_pair(server, watch)
    finishing = Run(lambda: pair.channel.finish([b"stop", b"done"]))
    assert [pair.peer.text(), pair.peer.text()] == ["stop", "done"]
    assert pair.peer.frame() == (True, 8, b"\x03\xe8")
    pair.peer.send(8, b"\x03\xe8")
    assert pair.peer.ended() is False
    finishing.result()
    pair.channel.finish([b"again"])
    assert pair.channel.sent == 2
    with pytest.raises(ConsumerGone):
        pair.channel.send([b"late"])
    assert pair.channel.try_ping() is False
    assert pair.gone.count == 0
    pair.peer.close()
    assert descriptors() == before


def test_finish_does_not_wait_long_for_an_engine_that_does_not_answer(
    server: Server, watch: ChannelWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "CLOSE_WAIT", 0.05)
    pair = open_pair(server, watch)
    Run(lambda: pair.channel.finish([b"done"])).result()
    assert pair.peer.text() == "done"
    assert pair.peer.ended() is True


def test_finish_without_a_watch(server: Server) -> None:
    watch = ChannelWatch()
    pair = open_pair(server, watch)
    pair.channel.send([b"a"])
    Run(lambda: pair.channel.finish([b"b"])).result()
    assert [pair.peer.text(), pair.peer.text()] == ["a", "b"]
    assert pair.peer.ended() is True


def test_an_event_that_fits_no_frame(
    server: Server, watch: ChannelWatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = open_pair(server, watch)
    huge = b"x" * (MAX_FRAME + 1)
    with pytest.raises(ProviderError, match="16777217 bytes") as caught:
        pair.channel.send([b"before", huge, b"after"])
    assert caught.value.kind == "permanent"
    with pytest.raises(ProviderError):
        pair.channel.send([huge])
    finishing = Run(lambda: pair.channel.finish([huge, b"error"]))
    assert [pair.peer.text(), pair.peer.text()] == ["before", "error"]
    pair.peer.close()
    finishing.result()
    assert pair.channel.sent == 2
    assert "was dropped" in caplog.text


def test_a_finish_with_nothing_to_say(server: Server, watch: ChannelWatch) -> None:
    pair = open_pair(server, watch)
    finishing = Run(lambda: pair.channel.finish([b"x" * (MAX_FRAME + 1)]))
    assert pair.peer.ended() is True
    finishing.result()
    assert pair.channel.sent == 0


def test_the_largest_event(server: Server, watch: ChannelWatch) -> None:
    pair = open_pair(server, watch)
    sending = Run(lambda: pair.channel.send([b"x" * MAX_FRAME]))
    final, opcode, payload = pair.peer.frame()
    assert final and opcode == 1 and len(payload) == MAX_FRAME
    sending.result()
    pair.close()


# -- how the loss of the reader is noticed --------------------------------------------------


def test_a_close_is_noticed_while_nothing_is_sent(server: Server, watch: ChannelWatch) -> None:
    pair = open_pair(server, watch)
    pair.peer.send(8)
    assert pair.gone.event.wait(TIMEOUT)
    with pytest.raises(ConsumerGone):
        pair.channel.send([b"x"])
    pair.channel.finish([b"done"])
    assert pair.channel.sent == 0
    assert pair.gone.count == 1
    assert pair.peer.ended() is False


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_lost_socket_is_noticed(server: Server, watch: ChannelWatch, how: str) -> None:
    pair = open_pair(server, watch)
    getattr(pair.peer, how)()
    assert pair.gone.event.wait(TIMEOUT)
    pair.channel.finish()
    assert pair.gone.count == 1


def test_a_close_right_behind_the_handshake(server: Server, watch: ChannelWatch) -> None:
    """What an engine does when the end was taken before (engine protocol 7.2)."""
    pair = open_pair(server, watch, after=b"\x88\x00")
    assert pair.gone.event.wait(TIMEOUT)
    pair.close()


def test_broken_framing_is_a_loss(server: Server, watch: ChannelWatch) -> None:
    pair = open_pair(server, watch)
    pair.peer.sock.sendall(b"\xff\xff")
    assert pair.gone.event.wait(TIMEOUT)
    pair.close()


def test_other_frames_are_forgotten(server: Server, watch: ChannelWatch) -> None:
    pair = open_pair(server, watch)
    pair.peer.send(10, b"pong")
    pair.peer.send(1, b"text")
    pair.peer.send(9, b"still there?")
    assert pair.peer.frame() == (True, 10, b"still there?")
    assert pair.gone.count == 0
    pair.close()


def test_a_failed_send_is_a_loss(server: Server) -> None:
    pair = open_pair(server, ChannelWatch())
    pair.peer.reset()

    def send() -> None:
        while True:
            pair.channel.send([b"x" * 1000])

    with pytest.raises(ConsumerGone):
        Run(send).result()
    with pytest.raises(ConsumerGone, match="closed"):
        pair.channel.send([b"x"])
    pair.channel.finish([b"done"])


def test_a_failed_ping_is_a_loss(server: Server) -> None:
    pair = open_pair(server, ChannelWatch())
    pair.peer.reset()
    assert eventually(lambda: not pair.channel.try_ping() and pair.gone.count == 1)
    assert pair.channel.try_ping() is False
    pair.channel.finish()
    assert pair.gone.count == 1


def test_no_loss_is_reported_after_the_finish(server: Server, watch: ChannelWatch) -> None:
    pair = open_pair(server, watch)
    finishing = Run(pair.channel.finish)
    pair.peer.frame()
    pair.peer.reset()
    finishing.result()
    pair.channel._lost()
    assert pair.gone.count == 0


def test_a_callback_that_fails_blinds_no_other_channel(
    server: Server, watch: ChannelWatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no good")

    bad = open_pair(server, watch, on_gone=fail)
    good = open_pair(server, watch)
    bad.peer.close()
    good.peer.close()
    assert good.gone.event.wait(TIMEOUT)
    assert eventually(lambda: "no good" in caplog.text)
    bad.channel.finish()
    good.channel.finish()


# -- a reader that does not read ------------------------------------------------------------


def test_cut_wakes_a_blocked_send(watch: ChannelWatch) -> None:
    with Server(narrow=True) as server:
        pair = open_pair(server, watch)
        sending = fill(pair.channel, pair.peer)
        assert sending.running
        pair.channel.cut()
        with pytest.raises(ConsumerGone):
            sending.result()
        Run(lambda: pair.channel.finish([b"done"])).result()


def test_a_send_that_finds_no_reader_ends(watch: ChannelWatch) -> None:
    with Server(narrow=True) as server:
        pair = open_pair(server, watch, send_timeout=0.05)

        def send() -> None:
            while True:
                pair.channel.send([b"x" * 65536])

        with pytest.raises(ConsumerGone):
            Run(send).result()
        pair.channel.finish([b"done"])
        assert pair.peer.ended() is False  # in the middle of a frame


def test_last_events_that_find_no_reader(watch: ChannelWatch) -> None:
    with Server(narrow=True) as server:
        pair = open_pair(server, watch, send_timeout=0.05)
        Run(lambda: pair.channel.finish([b"x" * 500_000])).result()
        assert pair.channel.sent == 0 and pair.gone.count == 0
        assert pair.peer.ended() is False


def test_a_slow_reader_gets_everything(watch: ChannelWatch) -> None:
    with Server(narrow=True) as server:
        pair = open_pair(server, watch)
        events = [b"%07d" % number * 9000 for number in range(20)]
        sending = Run(lambda: [pair.channel.send([event]) for event in events])
        assert eventually(lambda: pair.channel._link._waiting)
        assert [pair.peer.text().encode() for _ in events] == events
        sending.result()
        pair.close()


def test_an_abort_wakes_a_blocked_send(watch: ChannelWatch) -> None:
    call = Call(1, "stream", key="k", model="m")
    with Server(narrow=True) as server:
        pair = open_pair(server, watch, call=call)
        sending = fill(pair.channel, pair.peer)
        assert call.abort("abort")
        with pytest.raises(ConsumerGone):
            sending.result()
        pair.channel.finish()
        assert call._wakers == []


def test_an_abort_before_the_wait_is_seen_by_it(watch: ChannelWatch) -> None:
    call = Call(1, "stream", key="k", model="m")
    with Server(narrow=True) as server:
        pair = open_pair(server, watch, call=call)
        call.abort("consumer gone")
        pair.channel.send([b"passes"])  # a send that needs no wait

        def send() -> None:
            while True:
                pair.channel.send([b"x" * 65536])

        with pytest.raises(ConsumerGone):
            Run(send).result()
        assert pair.peer.text() == "passes"
        pair.close()


def test_a_stopping_worker_still_gets_its_last_frame_out(watch: ChannelWatch) -> None:
    call = Call(1, "stream", key="k", model="m")
    with Server(narrow=True) as server:
        pair = open_pair(server, watch, call=call)
        call.abort("stop")
        finishing = Run(lambda: pair.channel.finish([b"x" * 500_000, b"error"]))
        assert len(pair.peer.text()) == 500_000
        assert pair.peer.text() == "error"
        assert pair.peer.ended() is True
        finishing.result()


# -- pings --------------------------------------------------------------------------------


def test_a_ping_is_an_event(server: Server, watch: ChannelWatch) -> None:
    pair = open_pair(server, watch)
    assert pair.channel.try_ping() is True
    assert pair.peer.text() == '{"type":"ping"}'
    assert pair.channel.sent == 1
    pair.close()


def test_a_ping_waits_for_nobody(watch: ChannelWatch) -> None:
    with Server(narrow=True) as server:
        pair = open_pair(server, watch)
        with pair.channel._lock:
            assert Run(pair.channel.try_ping).result() is False
        sending = fill(pair.channel, pair.peer)
        assert pair.channel.try_ping() is False
        pair.channel.cut()
        with pytest.raises(ConsumerGone):
            sending.result()
        pair.close()


def test_a_ping_cut_short_is_completed_before_anything_else(watch: ChannelWatch) -> None:
    with Server(narrow=True) as server:
        pair = open_pair(server, watch)
        link = pair.channel._link
        real, whole = link._send_now, [b""]

        def short(data: bytes | memoryview) -> int:
            whole[0] = bytes(data)
            return real(data[:5])

        link._send_now = short
        assert pair.channel.try_ping() is True
        link._send_now = lambda data: 0  # no room at all
        assert pair.channel.try_ping() is False
        link._send_now = lambda data: (_ for _ in ()).throw(BlockingIOError())
        assert pair.channel.try_ping() is False
        link._send_now = real
        assert pair.channel.try_ping() is True
        link._send_now = short
        assert pair.channel.try_ping() is True
        link._send_now = real
        pair.channel.send([b"event"])
        texts = [pair.peer.text() for _ in range(4)]
        assert texts == ['{"type":"ping"}'] * 3 + ["event"]
        assert pair.channel.sent == 4
        pair.close()


def test_a_ping_that_finds_no_room_is_not_sent(watch: ChannelWatch, server: Server) -> None:
    pair = open_pair(server, watch)
    link = pair.channel._link
    real = link._send_now

    def full(data: bytes | memoryview) -> int:
        raise BlockingIOError

    link._send_now = full
    assert pair.channel.try_ping() is False
    link._send_now = real
    pair.channel.send([b"event"])
    assert pair.peer.text() == "event"
    pair.close()


def test_a_websocket_ping_during_a_send_is_answered_after_it(watch: ChannelWatch) -> None:
    with Server(narrow=True) as server:
        pair = open_pair(server, watch)
        sending = Run(lambda: pair.channel.send([b"x" * 500_000]))
        assert eventually(lambda: pair.channel._link._waiting)
        pair.peer.send(9, b"you?")
        assert eventually(lambda: len(pair.channel._pongs) == 1)
        assert len(pair.peer.text()) == 500_000
        assert pair.peer.frame() == (True, 10, b"you?")
        sending.result()
        pair.close()


# -- opening ------------------------------------------------------------------------------


def refused(server: Server, watch: ChannelWatch, status: int, extra: str = "") -> BaseException:
    opening = Run(
        lambda: Channel.open(
            server.url, REF, token="tok-en", watch=watch, on_gone=Gone(), call=None
        )
    )
    server.accept(status, extra=extra)
    with pytest.raises((ConsumerGone, ProviderError)) as caught:
        opening.result()
    assert "se cret" not in str(caught.value) and "tok-en" not in str(caught.value)
    return caught.value


def test_an_unknown_channel_is_a_gone_consumer(server: Server, watch: ChannelWatch) -> None:
    before = descriptors()
    assert isinstance(refused(server, watch, 404), ConsumerGone)
    server.drop()
    assert descriptors() == before


def test_other_refusals(server: Server, watch: ChannelWatch) -> None:
    error = refused(server, watch, 400)
    assert isinstance(error, ProviderError) and (error.kind, error.status) == ("permanent", 400)
    error = refused(server, watch, 503)
    assert isinstance(error, ProviderError) and (error.kind, error.status) == ("transient", 503)


def test_a_redirect_is_not_followed(server: Server, watch: ChannelWatch) -> None:
    with Server() as other:
        error = refused(server, watch, 302, f"Location: {other.url}/\r\n")
        assert isinstance(error, ProviderError)
        other._listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.accept_raw()


def test_nobody_listens(watch: ChannelWatch) -> None:
    with Server() as server:
        url = server.url
    with pytest.raises(ProviderError, match="refused") as caught:
        Channel.open(url, REF, watch=watch, on_gone=Gone())
    assert caught.value.kind == "transient"
    assert url in str(caught.value) and "%2F" not in str(caught.value)


def test_an_engine_that_does_not_answer(server: Server, watch: ChannelWatch) -> None:
    with pytest.raises(ProviderError, match="no answer in time"):
        Channel.open(server.url, REF, watch=watch, on_gone=Gone(), connect_timeout=0.05)


def test_an_abort_ends_the_attempt(server: Server, watch: ChannelWatch) -> None:
    before = descriptors()
    call = Call(1, "stream", key="k", model="m")
    opening = Run(lambda: Channel.open(server.url, REF, watch=watch, on_gone=Gone(), call=call))
    server.accept_raw()
    call.abort("abort")
    with pytest.raises(Interrupted):
        opening.result()
    with pytest.raises(Interrupted):
        Channel.open(server.url, REF, watch=watch, on_gone=Gone(), call=call)
    assert call._wakers == []
    server.drop()
    assert descriptors() == before


def test_an_abort_between_the_connection_and_its_use(
    server: Server, watch: ChannelWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(1, "stream", key="k", model="m")
    monkeypatch.setattr(call, "remove_waker", lambda waker: call.abort("abort"))
    opening = Run(lambda: Channel.open(server.url, REF, watch=watch, on_gone=Gone(), call=call))
    peer = server.accept()
    with pytest.raises(Interrupted):
        opening.result()
    assert peer.ended() is False


def test_reading_end(server: Server) -> None:
    connecting = Run(lambda: connect(server.url, REF, direction="read", token="t"))
    peer = server.accept()
    assert peer.path.endswith("&dir=read")
    socket = connecting.result()
    peer.send(1, b"event")
    assert socket.recv() == "event"
    socket.shutdown()
    connecting = Run(lambda: connect(server.url, REF, direction="read"))
    server.accept(404)
    with pytest.raises(ConsumerGone):
        connecting.result()


# -- TLS ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("pems"))


def test_over_tls(watch: ChannelWatch, pems: tuple[Path, Path]) -> None:
    cert, both = pems
    context = server_context(both, client_ca=cert)
    with Server(context=context, narrow=True) as server:
        pair = open_pair(server, watch, ca_file=str(cert), client_cert=str(both))
        pair.channel.send([b"one", b"two"])
        assert [pair.peer.text(), pair.peer.text()] == ["one", "two"]
        pair.peer.send(9, b"ping")
        assert pair.peer.frame() == (True, 10, b"ping")
        # More than the buffers hold, so that records are cut short.
        events = [bytes([65 + number]) * 100_000 for number in range(20)]
        sending = Run(lambda: pair.channel.send(events))
        assert eventually(lambda: pair.channel._link._waiting)
        pair.peer.send(9, b"meanwhile")
        assert [pair.peer.text().encode() for _ in events] == events
        sending.result()
        assert pair.peer.frame() == (True, 10, b"meanwhile")
        finishing = Run(lambda: pair.channel.finish([b"done"]))
        assert pair.peer.text() == "done"
        assert pair.peer.ended() is True
        finishing.result()


def test_a_ping_into_a_full_tls_socket_is_kept(
    watch: ChannelWatch, pems: tuple[Path, Path]
) -> None:
    cert, both = pems
    with Server(context=server_context(both), narrow=True) as server:
        pair = open_pair(server, watch, ca_file=str(cert))
        sent = 0
        while pair.channel.try_ping():
            sent += 1
            assert sent < 1_000_000
        reading = Run(lambda: [pair.peer.text() for _ in range(sent + 1)])
        pair.channel.send([b"event"])
        texts = reading.result()
        assert texts == ['{"type":"ping"}'] * sent + ["event"]
        assert pair.channel.sent == sent + 1
        pair.close()


def test_cut_over_tls_ends_both_directions(watch: ChannelWatch, pems: tuple[Path, Path]) -> None:
    cert, both = pems
    with Server(context=server_context(both), narrow=True) as server:
        pair = open_pair(server, watch, ca_file=str(cert))
        sending = fill(pair.channel, pair.peer)
        pair.channel.cut()
        with pytest.raises(ConsumerGone):
            sending.result()
        assert pair.gone.event.wait(TIMEOUT)
        pair.close()


def test_certificates_are_verified(watch: ChannelWatch, pems: tuple[Path, Path]) -> None:
    _, both = pems
    with Server(context=server_context(both)) as server:
        opening = Run(lambda: Channel.open(server.url, REF, watch=watch, on_gone=Gone()))
        with pytest.raises(OSError):
            server.accept_raw()
        with pytest.raises(ProviderError, match="CERTIFICATE_VERIFY_FAILED"):
            opening.result()


def test_a_missing_ca_file(watch: ChannelWatch, server: Server, tmp_path: Path) -> None:
    url = server.url.replace("ws:", "wss:")
    with pytest.raises(ProviderError, match="No such file"):
        Channel.open(url, REF, watch=watch, on_gone=Gone(), ca_file=str(tmp_path / "no.pem"))


def test_the_tls_context_is_kept(watch: ChannelWatch, pems: tuple[Path, Path]) -> None:
    cert = str(pems[0])
    assert watch.tls_context(cert, None) is watch.tls_context(cert, None)
    assert watch.tls_context(cert, None) is not watch.tls_context(None, None)


# -- the watch ----------------------------------------------------------------------------


def test_a_link_that_was_closed_before_it_was_watched(server: Server, watch: ChannelWatch) -> None:
    pair = open_pair(server, ChannelWatch())
    pair.channel.finish()
    watch.add(pair.channel._link, lambda: True)
    watch.remove(pair.channel._link)
    still = open_pair(server, watch)
    still.close()
    assert watch.running


def test_the_watch_can_start_again(server: Server) -> None:
    before, threads = descriptors(), threading.active_count()
    watch = ChannelWatch("again")
    watch.stop()
    for _ in range(2):
        watch.start()
        with pytest.raises(RuntimeError):
            watch.start()
        pair = open_pair(server, watch)
        pair.peer.close()
        assert pair.gone.event.wait(TIMEOUT)
        pair.channel.finish()
        watch.stop()
        watch.stop()
        assert not watch.running
    assert threading.active_count() == threads
    server.drop()
    assert descriptors() == before


def test_a_channel_outlives_the_watch(server: Server) -> None:
    watch = ChannelWatch()
    watch.start()
    pair = open_pair(server, watch)
    watch.stop()
    pair.channel.send([b"x"])
    assert pair.peer.text() == "x"
    Run(pair.channel.finish).result()
    assert pair.peer.ended() is True


def test_finishing_on_the_watchs_own_thread(server: Server, watch: ChannelWatch) -> None:
    done = threading.Event()
    pair: Pair

    def gone() -> None:
        pair.channel.finish()
        done.set()

    pair = open_pair(server, watch, on_gone=gone)
    other = open_pair(server, watch)
    pair.peer.close()
    assert done.wait(TIMEOUT)
    other.peer.close()
    assert other.gone.event.wait(TIMEOUT)
    other.channel.finish()


def test_64_channels_leave_nothing_behind(server: Server) -> None:
    before, threads = descriptors(), threading.active_count()
    watch = ChannelWatch()
    watch.start()
    pairs = [open_pair(server, watch) for _ in range(64)]
    assert threading.active_count() == threads + 1
    for number, pair in enumerate(pairs):
        pair.channel.send([b"%d" % number])
    for number, pair in enumerate(pairs):
        assert pair.peer.text() == str(number)
        if number % 2:
            pair.peer.close()
    assert all(pair.gone.event.wait(TIMEOUT) for pair in pairs[1::2])
    finishing = [Run(pair.channel.finish) for pair in pairs]
    for pair in pairs[::2]:
        assert pair.peer.frame()[1] == 8
        pair.peer.close()
    for each in finishing:
        each.result()
    assert not any(pair.gone.count for pair in pairs[::2])
    watch.stop()
    server.drop()
    del pairs, pair
    assert eventually(lambda: threading.active_count() == threads)
    assert descriptors() == before


# -- the loopback engine --------------------------------------------------------------------


@pytest.fixture
def loopback() -> Iterator[tuple[LoopbackEngine, Engine]]:
    with LoopbackEngine() as engine:
        client = Engine(engine.url, name="maker", version="1", description="makes channels")
        client.start()
        assert client.wait_connected(TIMEOUT)
        yield engine, client
        client.stop()


def make_channel(client: Engine, size: int = 64) -> WriterRef:
    refs = client.invoke("engine::channels::create", {"buffer_size": size})
    return WriterRef(refs["writer"]["channel_id"], refs["writer"]["access_key"])


def test_through_the_loopback_engine(
    loopback: tuple[LoopbackEngine, Engine], watch: ChannelWatch
) -> None:
    engine, client = loopback
    ref = make_channel(client)
    gone = Gone()
    channel = Channel.open(engine.url, ref, watch=watch, on_gone=gone)
    reader = connect(engine.url, ref, direction="read")
    reader.settimeout(TIMEOUT)
    channel.send([b"1", b"2"])
    assert channel.try_ping()
    Run(lambda: channel.finish([b"3"])).result()
    assert [reader.recv() for _ in range(5)] == ["1", "2", '{"type":"ping"}', "3", ""]
    reader.shutdown()
    assert gone.count == 0
    # Each end is taken once: the next one gets a handshake and a Close.
    again = Channel.open(engine.url, ref, watch=watch, on_gone=gone)
    assert gone.event.wait(TIMEOUT)
    again.finish()
    with pytest.raises(ConsumerGone):
        Channel.open(engine.url, WriterRef(ref.channel_id, "x"), watch=watch, on_gone=gone)


def test_a_reader_that_leaves_the_loopback_engine(
    loopback: tuple[LoopbackEngine, Engine], watch: ChannelWatch
) -> None:
    engine, client = loopback
    ref = make_channel(client)
    gone = Gone()
    channel = Channel.open(engine.url, ref, watch=watch, on_gone=gone)
    reader = connect(engine.url, ref, direction="read")
    reader.shutdown()
    # Only what is written shows the engine that nobody reads: pings are the probe.
    assert eventually(lambda: not channel.try_ping() and gone.count == 1)
    channel.finish()


def test_a_reader_of_the_loopback_engine_that_does_not_read(
    loopback: tuple[LoopbackEngine, Engine], watch: ChannelWatch
) -> None:
    engine, client = loopback
    ref = make_channel(client, 1)
    call = Call(1, "stream", key="k", model="m")
    channel = Channel.open(engine.url, ref, watch=watch, on_gone=Gone(), call=call)

    def send() -> None:
        while True:
            channel.send([b"x" * 65536])

    sending = Run(send)
    assert eventually(lambda: channel._link._waiting)
    call.abort("abort")
    with pytest.raises(ConsumerGone):
        sending.result()
    channel.finish()


# -- an independent server ------------------------------------------------------------------


def test_with_another_implementation(watch: ChannelWatch) -> None:
    received: list[str | bytes] = []
    ended = threading.Event()

    def handle(connection: ServerConnection) -> None:
        for message in connection:
            received.append(message)
        received.append(str(connection.close_code))
        ended.set()

    server: WebSocketsServer
    with serve(handle, "127.0.0.1", 0, ping_interval=0.02, ping_timeout=5) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.socket.getsockname()[1]
        gone = Gone()
        channel = Channel.open(f"ws://127.0.0.1:{port}", REF, watch=watch, on_gone=gone)
        expected = []
        for size in (1, 125, 126, 65535, 65536, 500_000):
            event = ("ü" + os.urandom(size // 2).hex())[:size]
            channel.send([event.encode(), b"{}"])
            expected += [event, "{}"]
        channel.finish([b"done"])
        assert ended.wait(TIMEOUT)
        assert received == [*expected, "done", "1000"]
        assert gone.count == 0
        server.shutdown()
        thread.join(TIMEOUT)


def test_nothing_secret_is_logged(
    server: Server, watch: ChannelWatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    pair = open_pair(server, watch, token="tok-en")
    pair.peer.reset()
    assert pair.gone.event.wait(TIMEOUT)
    pair.channel.finish([b"done"])
    refused(server, watch, 404)
    for secret in ("se cret", "se%20cret", "tok-en"):
        assert secret not in caplog.text
    assert "se cret" not in repr(REF)
