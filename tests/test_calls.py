import threading

import pytest

from provider_llamacpp.calls import CallRegistry
from provider_llamacpp.errors import Interrupted, ProviderError


@pytest.fixture
def registry():
    return CallRegistry({"stream": 3, "request": 1})


def test_an_abort_wakes_the_call_once(registry):
    call, woken = registry.open("stream", key="k"), []
    with call.interruptible(lambda: woken.append(1)):
        assert registry.abort("k") is True
        assert registry.abort("k") is False
    assert woken == [1]
    assert call.reason == "abort"
    with pytest.raises(Interrupted):
        call.check()


def test_the_first_reason_wins(registry):
    call = registry.open("stream")
    assert call.abort("consumer gone")
    assert not call.abort("stop")
    assert call.reason == "consumer gone"


@pytest.mark.parametrize(("reason", "wakes"), [("abort", 1), ("consumer gone", 1), ("stop", 0)])
def test_an_abort_finds_no_call_whose_end_is_decided(registry, reason, wakes):
    """Its terminal frame goes out; who waits to send it is woken, unless the worker stops."""
    call, woken = registry.open("stream", key="k"), []
    call.add_waker(lambda: woken.append(1))
    assert call.settle() is None
    assert call.abort(reason) is False
    assert call.reason is None and len(woken) == wakes
    call.check()


def test_the_reason_that_came_before_decides(registry):
    call = registry.open("stream", key="k")
    assert registry.abort("k")
    assert call.settle() == "abort"
    assert call.abort("consumer gone") is False
    assert call.reason == "abort"


def test_an_abort_before_the_wait_ends_it_at_once(registry):
    call, woken = registry.open("stream", key="k"), []
    registry.abort("k")
    with pytest.raises(Interrupted), call.interruptible(lambda: woken.append(1)):
        raise AssertionError("must not be reached")
    assert woken == [1]  # what was handed over is closed all the same


def test_a_waker_that_was_taken_back_is_not_called(registry):
    call, woken = registry.open("stream"), []
    wake = woken.append
    with call.interruptible(lambda: wake(1)):
        pass
    call.remove_waker(print)
    call.abort("stop")
    assert woken == []


def test_an_abort_reaches_every_attempt_under_its_key(registry):
    first, second = registry.open("stream", key="k"), registry.open("stream", key="k")
    other = registry.open("stream", key="other")
    assert registry.abort("k")
    assert (first.reason, second.reason, other.reason) == ("abort", "abort", None)


def test_unknown_and_ended_calls_are_not_remembered(registry):
    assert registry.abort("k") is False
    call = registry.open("stream", key="k")
    registry.close(call)
    registry.close(call)
    assert registry.abort("k") is False
    assert registry.open("stream", key="k").reason is None


def test_a_call_without_a_key_is_not_found_by_none(registry):
    registry.open("stream", key=None)
    assert registry.abort("") is False


def test_each_kind_has_its_own_limit(registry):
    for _ in range(3):
        registry.open("stream")
    with pytest.raises(ProviderError) as caught:
        registry.open("stream")
    assert caught.value.kind == "rate_limited"
    assert "max_streams" in caught.value.message
    registry.open("request")
    with pytest.raises(ProviderError, match="max_requests"):
        registry.open("request")


def test_a_stopping_worker_admits_nobody(registry):
    registry.refuse()
    with pytest.raises(ProviderError) as caught:
        registry.open("stream")
    assert caught.value.kind == "transient"


def test_idle_is_reached_when_the_last_call_closes(registry):
    assert registry.wait_idle(0)
    call = registry.open("stream")
    assert not registry.wait_idle(0)
    waiter = threading.Thread(target=registry.close, args=(call,))
    waiter.start()
    assert registry.wait_idle(10)
    waiter.join()


def test_abort_all(registry):
    calls = [registry.open("stream"), registry.open("request")]
    registry.abort_all("stop")
    assert [call.reason for call in calls] == ["stop", "stop"]
    assert registry.snapshot() == calls
