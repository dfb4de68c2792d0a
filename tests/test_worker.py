"""The worker as an application embeds it."""

import logging
import signal
import threading

import pytest

from provider_llamacpp import FatalError, ProviderSettings, ProviderWorker, Settings
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.router import LoopbackRouter

PATIENCE = 30


@pytest.fixture
def engine():
    with LoopbackEngine() as engine:
        yield engine


def named(engine):
    return [peer.name for peer in engine.connections]


def test_two_workers_live_in_one_process(engine, llama):
    with (
        LoopbackRouter(engine.url) as router,
        ProviderWorker(Settings(url=engine.url, api_url=llama.url)) as one,
        ProviderWorker(Settings(url=engine.url, api_url=llama.url, id="pi5")) as two,
    ):
        assert one.wait_ready(PATIENCE)
        assert two.wait_ready(PATIENCE)
        assert router.wait_for_models("llamacpp")
        assert router.wait_for_models("pi5")
        assert one.stats()["id"] == "llamacpp"
        assert two.stats()["id"] == "pi5"


def test_it_leaves_nothing_behind(engine):
    before = set(threading.enumerate())
    handlers = signal.getsignal(signal.SIGINT), logging.getLogger().handlers[:]
    with ProviderWorker(Settings(url=engine.url)) as worker:
        assert worker.wait_connected(PATIENCE)
        assert worker.alive
        assert "llamacpp-engine" in {thread.name for thread in threading.enumerate()}
        assert set(threading.enumerate()) > before
    assert not worker.alive
    names = [thread.name for thread in set(threading.enumerate()) - before]
    # The engine's own threads for the connection may outlive it by a moment.
    assert not [name for name in names if name.startswith("llamacpp-")]
    assert (signal.getsignal(signal.SIGINT), logging.getLogger().handlers[:]) == handlers


def test_it_starts_once(engine):
    worker = ProviderWorker(Settings(url=engine.url))
    worker.start()
    with pytest.raises(RuntimeError, match="make a new one"):
        worker.start()
    worker.stop()
    with pytest.raises(RuntimeError):
        worker.start()


def test_stopping_twice_or_before_the_start_does_no_harm(engine):
    worker = ProviderWorker(Settings(url=engine.url))
    worker.stop()
    assert not worker.wait(0)
    worker.start()
    worker.stop()
    worker.stop()
    assert worker.wait(PATIENCE)


def test_wait_gives_up_in_time(engine):
    with ProviderWorker(Settings(url=engine.url)) as worker:
        assert not worker.wait(0.01)


def test_a_taken_name_is_fatal(engine):
    with ProviderWorker(Settings(url=engine.url)) as first:
        assert engine.wait_until(
            lambda: [p.name for p in engine.connections] == [first.settings.name]
        )
        second = ProviderWorker(Settings(url=engine.url))
        second.start()
        with pytest.raises(FatalError, match="provider-llamacpp"):
            second.wait_ready(PATIENCE)
        with pytest.raises(FatalError, match="provider-llamacpp"):
            second.wait(PATIENCE)
        assert second.wait(PATIENCE)  # it has stopped itself


def test_nothing_is_blocked_by_an_engine_that_is_away():
    with ProviderWorker(Settings(url="ws://127.0.0.1:9")) as worker:
        assert not worker.wait_connected(0)
        assert not worker.wait_ready(0)
        assert worker.stats()["connected"] is False


def test_stats_hold_figures_and_no_secrets(engine, llama):
    settings = Settings(url=engine.url, api_url=llama.url, api_key="key-1", token="tok-1")
    with LoopbackRouter(engine.url), ProviderWorker(settings) as worker:
        assert worker.wait_ready(PATIENCE)
        stats = worker.stats()
    assert stats["active_streams"] == stats["frames"] == stats["bytes"] == stats["reconnects"] == 0
    assert "key-1" not in repr(stats)
    assert "tok-1" not in repr(stats)


def test_after_a_fork_it_says_that_it_is_not_there(engine, monkeypatch):
    with ProviderWorker(Settings(url=engine.url)) as worker:
        assert worker.wait_connected(PATIENCE)
        with monkeypatch.context() as child:
            child.setattr("provider_llamacpp.worker.os.getpid", lambda: 1)
            for use in (
                *(worker.start, worker.wait, worker.stats),
                *(lambda: worker.wait_ready(0), lambda: worker.wait_connected(0)),
            ):
                with pytest.raises(RuntimeError, match="make a new worker here"):
                    use()
            assert worker.alive is False
            worker.stop()
        assert worker.alive and worker.stats()["connected"]


def test_figures_of_each_provider(engine):
    settings = Settings(url=engine.url, also=(ProviderSettings("pi5", "http://127.0.0.1:9"),))
    with ProviderWorker(settings) as worker:
        assert worker.stats()["id"] == worker.stats("llamacpp")["id"] == "llamacpp"
        assert worker.stats("pi5")["id"] == "pi5"
        with pytest.raises(KeyError):
            worker.stats("pi6")
