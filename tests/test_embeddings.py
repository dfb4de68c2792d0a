"""Vectors of several texts: right also from a server that mixes up the texts of a batch."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from peers import Answer, Request, ScriptedServer, answer_json

from provider_llamacpp.calls import Call
from provider_llamacpp.errors import BusError, Interrupted
from provider_llamacpp.local.llama import LlamaServer
from provider_llamacpp.server import embeddings, queries
from provider_llamacpp.server.embeddings import Embedder, alike
from provider_llamacpp.server.upstream import Target, Upstream

TEXTS = ["one", "a longer text", "zwei"]


def vector(text: str) -> list[float]:
    return [float(len(text)), float(ord(text[0])) / 10]


class Mixer:
    """Answers single texts rightly and, while ``mixes``, those of a batch by their last letters."""

    def __init__(self, *, mixes: bool = True) -> None:
        self.mixes = mixes
        self.asked: list[list[str]] = []

    def __call__(self, request: Request) -> Answer:
        texts = request.json()["input"]
        self.asked.append(texts)
        shortest = min(map(len, texts))
        made = [vector(text[shortest:] or text) if self.mixes else vector(text) for text in texts]
        data = [{"index": at, "embedding": each} for at, each in enumerate(made)]
        return answer_json({"model": "served", "data": data})


def embedded(answer: Callable[[Request], Answer], *requests: list[str]) -> list[Any]:
    with ScriptedServer(answer) as server:
        embedder = Embedder(Upstream())
        return [embedder.embed(Target(server.url), "e", texts)["embeddings"] for texts in requests]


RIGHT = [vector(text) for text in TEXTS]


def test_mixed_up_texts_are_asked_one_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    server = Mixer()
    with caplog.at_level(logging.WARNING, logger="provider_llamacpp"):
        assert embedded(server, TEXTS, TEXTS) == [RIGHT, RIGHT]
    singles = [[text] for text in TEXTS]
    assert server.asked == [TEXTS, ["a longer text"], *singles, *singles]
    (warning,) = caplog.messages
    assert "--kv-unified" in warning and "a longer text" not in warning


def test_a_sound_server_is_asked_once_more_and_then_trusted() -> None:
    server = Mixer(mixes=False)
    assert embedded(server, TEXTS, TEXTS) == [RIGHT, RIGHT]
    assert server.asked == [TEXTS, ["a longer text"], TEXTS]


def test_a_finding_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "TRUST_SECONDS", 0.0)
    server = Mixer(mixes=False)
    embedded(server, TEXTS, TEXTS)
    assert server.asked == [TEXTS, ["a longer text"]] * 2


@pytest.mark.parametrize("texts", [["alone"], ["same", "size"]])
def test_texts_of_one_length_prove_nothing_and_cost_nothing(texts: list[str]) -> None:
    server = Mixer()
    embedded(server, texts)
    assert server.asked == [texts]


def test_a_failed_look_costs_no_answer() -> None:
    sound = Mixer(mixes=False)

    def busy(request: Request) -> Answer:
        answer = sound(request)
        return answer if len(sound.asked) != 2 else answer_json({"error": {"code": 503}}, 503)

    assert embedded(busy, TEXTS, TEXTS) == [RIGHT, RIGHT]
    assert [len(texts) for texts in sound.asked] == [3, 1, 3, 1]


def test_findings_are_bounded() -> None:
    with ScriptedServer(Mixer(mixes=False)) as server:
        embedder = Embedder(Upstream())
        for name in range(70):
            embedder.embed(Target(server.url), f"name-{name}", ["a", "bb"])
    assert len(embedder._findings) == 70 - 64


class TestTurns:
    """One text at a time is one for all calls."""

    def test_the_time_is_that_of_one_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(embeddings.queries, "SECONDS", 0.0)
        server = Mixer()
        with pytest.raises(BusError, match=r"upstream: 0 of 3 texts .* --kv-unified"):
            mixed_embedder_embed(server)

    @pytest.mark.parametrize("aborted", [True, False])
    def test_a_waiting_call_hears_its_abort_and_its_deadline(self, aborted: bool) -> None:
        server = Mixer()
        call = Call(1, "embed", key="k", model=None)
        held, release = threading.Event(), threading.Event()

        def slow(request: Request) -> Answer:
            if request.json()["input"] == ["hold"]:
                held.set()
                assert release.wait(20)
            return server(request)

        with ScriptedServer(slow) as scripted:
            target, embedder = Target(scripted.url), Embedder(Upstream())
            embedder.embed(target, "e", TEXTS)
            first = threading.Thread(target=embedder.embed, args=(target, "e", ["hold"]))
            first.start()
            assert held.wait(20)
            try:
                if aborted:
                    call.abort("abort")
                    with pytest.raises(Interrupted):
                        embedder.embed(target, "e", ["b"], call)
                else:
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(queries, "SECONDS", 0.2)
                        with pytest.raises(BusError, match="0 of 1 texts were done"):
                            embedder.embed(target, "e", ["b"])
            finally:
                release.set()
                first.join(20)


def mixed_embedder_embed(server: Mixer) -> None:
    with ScriptedServer(server) as scripted:
        embedder = Embedder(Upstream())
        target = Target(scripted.url)
        embedder._findings[(target.root, "e")] = (float("inf"), False)
        embedder.embed(target, "e", TEXTS)


@pytest.mark.parametrize(
    ("texts", "place"),
    [
        (["ab", "cd"], None),
        (["a"], None),
        (["abcdefgh" * 9, "ab", "abcde"], 2),
        (["abc", "ab"], 0),
        (["é", "a"], 0),
        (["\ud800" * 2, "a"], 0),
    ],
)
def test_the_text_that_tells(texts: list[str], place: int | None) -> None:
    assert embeddings.telling(texts) == place


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, 0.0], [1.0, 0.001], True),
        ([1.0, 0.0], [2.0, 0.0], True),
        ([1.0, 0.0], [1.0, 0.5], False),
        ([1.0, 0.0], [-1.0, 0.0], False),
        ([1.0, 0.0], [1.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([0.0, 0.0], [1.0, 0.0], False),
    ],
)
def test_alike(one: list[float], other: list[float], same: bool) -> None:
    assert alike(one, other) is same


def test_a_real_server_with_slots_of_their_own(llama: LlamaServer) -> None:
    texts = ["a small llama", "zmall a llam", "0123456789x", "hello my dear friend" * 3]
    embedder, target = Embedder(Upstream()), Target(llama.url)
    together = embedder.embed(target, "demo", texts)["embeddings"]
    for text, found in zip(texts, together, strict=True):
        (single,) = queries.embed(Upstream(), target, "demo", [text])["embeddings"]
        assert found == pytest.approx(single, abs=1e-4), json.dumps(text)
