"""What a call held is free again when it has ended, without the help of the garbage collector.

An answer may have megabytes, and the collector looks at the number of objects, not at their size.
"""

# ruff: noqa: F811 (fixtures are imported and then named as arguments)

from __future__ import annotations

import contextlib
import gc
import platform
import threading

import pytest
from iii import InvocationError
from peers import ScriptedServer, answer_json, answer_sse, wait_for
from world import FINISH, WORD, new_world, world  # noqa: F401

from provider_llamacpp import memory
from provider_llamacpp.events.assembler import Assembler
from provider_llamacpp.streaming import StreamRun

pytestmark = pytest.mark.timeout(60)

EVENT_STREAM = {"headers": {"headers": {"content-type": "text/event-stream"}}}


def answer(request):
    if b"refused" in request.body:
        return answer_json({"error": {"code": 500, "message": "no", "type": "server_error"}}, 500)
    if b"broken" in request.body:
        return {"script": [EVENT_STREAM, {"send": WORD}, {"close": True}]}
    if b"large" in request.body:
        return answer_sse(body=WORD * (memory.LARGE // len(WORD) + 1) + FINISH)
    if b"waits" in request.body:
        return {"script": [EVENT_STREAM, {"send": WORD}, {"hang_ms": 60_000}]}
    return answer_sse(body=WORD + FINISH)


@contextlib.contextmanager
def serving(world):
    """A worker that has told its model, on a server that answers as above."""
    listing = answer_json({"object": "list", "data": [{"id": "demo", "object": "model"}]})
    routes = {"/v1/models": listing, "/v1/chat/completions": answer}
    with ScriptedServer(routes=routes) as server:
        world.store.config["api_url"] = server.url
        router = world.router()
        worker = world.worker()
        assert router.wait_for_calls("models::reconcile")
        yield worker


def held():
    """The streams in memory, running or not."""
    return [each for each in gc.get_objects() if type(each) in (StreamRun, Assembler)]


@pytest.mark.parametrize("new_world", ["0.25"], indirect=True)
def test_streams_are_freed_however_they_end(new_world):
    world = new_world()
    with serving(world) as worker:
        world.declared()
        gc.collect()
        gc.disable()
        try:
            for how in ("whole", "refused", "broken"):
                stream = world.stream(how)
                assert stream.finish() == {"ok": True}
                assert stream.kinds[-1] == ("done" if how == "whole" else "error")
                wait_for(lambda: held() == [], f"the end of a stream that was {how}")
            aborted = world.stream("waits", resolution_key="r1")
            assert aborted.wait_for("text_delta")
            assert aborted.abort() == {"aborted": True}
            aborted.finish()
            wait_for(lambda: held() == [], "the end of an aborted stream")
            with pytest.raises(InvocationError):
                world.stream("x", provider_options={"n": 2}).finish()
            wait_for(lambda: held() == [], "the end of an invalid stream")
        finally:
            gc.enable()
        worker.stop(0.0)


@pytest.mark.parametrize("new_world", ["0.25"], indirect=True)
def test_memory_of_a_large_answer_is_given_back(new_world, monkeypatch):
    given_back = threading.Semaphore(0)
    monkeypatch.setattr(memory, "give_back", given_back.release)
    world = new_world()
    with serving(world) as worker:
        for how in ("whole", "refused", "large", "whole"):
            assert world.stream(how).finish() == {"ok": True}
        worker.stop(0.0)  # which waits for its threads
    assert given_back.acquire(timeout=10)
    assert not given_back.acquire(blocking=False)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can")
def test_glibc_gives_memory_back():
    assert memory.give_back()
