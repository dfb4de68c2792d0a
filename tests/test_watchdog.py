from types import SimpleNamespace

import pytest

from provider_llamacpp.watchdog import Watchdog


class Channel:
    def __init__(self):
        self.sent = 0
        self.takes = True
        self.pings = 0

    def try_ping(self):
        if self.takes:
            self.pings += 1
            self.sent += 1
        return self.takes


@pytest.fixture
def run():
    return SimpleNamespace(call=SimpleNamespace(number=1, started=100.0), channel=Channel())


@pytest.fixture
def watchdog(run):
    return Watchdog(lambda: [run], 25.0)


def test_silence_counts_from_the_acceptance_of_the_call(watchdog, run):
    watchdog.tick(124.9)
    assert run.channel.pings == 0
    watchdog.tick(125.0)
    assert run.channel.pings == 1


def test_a_ping_ends_the_silence_and_a_frame_does_too(watchdog, run):
    watchdog.tick(125.0)
    watchdog.tick(149.0)
    assert run.channel.pings == 1
    run.channel.sent += 3
    watchdog.tick(150.0)
    watchdog.tick(174.0)
    assert run.channel.pings == 1
    watchdog.tick(175.0)
    assert run.channel.pings == 2


def test_a_ping_that_cannot_be_sent_is_tried_again(watchdog, run):
    run.channel.takes = False
    watchdog.tick(125.0)
    run.channel.takes = True
    watchdog.tick(126.0)
    assert run.channel.pings == 1


def test_a_stream_without_a_channel_yet_is_left_alone(watchdog, run):
    channel, run.channel = run.channel, None
    watchdog.tick(130.0)
    run.channel = channel
    watchdog.tick(131.0)
    assert channel.pings == 1


def test_ended_streams_are_forgotten(run):
    runs = [run]
    watchdog = Watchdog(lambda: runs, 25.0)
    watchdog.tick(101.0)
    assert watchdog._seen
    runs.clear()
    watchdog.tick(102.0)
    assert not watchdog._seen


def test_a_failing_tick_does_not_end_the_thread(caplog):
    import threading

    ticks = threading.Semaphore(0)

    def streams():
        ticks.release()
        raise RuntimeError("odd")

    watchdog = Watchdog(streams, 0.04)
    watchdog.start("test-watchdog")
    try:
        assert ticks.acquire(timeout=10)
        assert ticks.acquire(timeout=10)
    finally:
        watchdog.stop(10)
    assert "a watchdog tick failed" in caplog.text


def test_it_knows_how_long_a_stream_has_been_silent(watchdog, run):
    assert watchdog.silence(1, 101.0) is None
    watchdog.tick(101.0)
    assert watchdog.silence(1, 101.5) == 1.5
    run.channel.sent += 1
    watchdog.tick(102.0)
    assert watchdog.silence(1, 105.0) == 3.0
    assert watchdog.silence(1, 101.0) == 0.0
    assert watchdog.silence(2, 105.0) is None
