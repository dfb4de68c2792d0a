"""``bench``: what is measured, what is concluded from it, and how it is shown."""

from __future__ import annotations

import builtins
import io
import json
import random
import re
import threading
import xml.etree.ElementTree as ElementTree
from contextlib import ExitStack

import pytest
from peers import ScriptedServer, answer_json

from provider_llamacpp import Settings, cli
from provider_llamacpp.commands import bench, measuring, plot, report
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.commands.figures import (
    FEWEST,
    SURE,
    Difference,
    Spread,
    difference,
    outliers,
    spread,
)
from provider_llamacpp.commands.terminal import Terminal
from provider_llamacpp.errors import BusError, ProviderLlamacppError
from provider_llamacpp.local.engine import LoopbackEngine
from provider_llamacpp.local.stack import LocalStack
from provider_llamacpp.server.address import Target
from provider_llamacpp.server.upstream import Upstream

pytestmark = pytest.mark.timeout(120)
PATIENCE = 30.0


# --- figures ---------------------------------------------------------------------------------


def test_a_spread_is_the_median_and_the_farthest():
    assert spread([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)
    assert spread([3.0, 1.0, 10.0]).around == 7.0
    assert spread([9.0, 1.0, 10.0]).around == 8.0
    assert spread([1 / 3]).as_json() == {"median": 0.3333, "low": 0.3333, "high": 0.3333}


def test_how_many_rounds_may_be_left_out():
    found = [outliers(rounds) for rounds in range(1, 21)]
    # The tables of the sign test, two-sided at 5 %.
    assert found == [None] * 5 + [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 5]
    assert found.index(0) + 1 == FEWEST


def test_an_interval_is_as_sure_as_it_claims():
    chance = random.Random(1)
    for rounds in (6, 7, 12, 25):
        claims = 0
        for _ in range(2000):
            same = {n: chance.gauss(0, 1) for n in range(rounds)}
            other = {n: chance.gauss(0, 1) for n in range(rounds)}
            claims += difference(same, other).sure
        assert claims / 2000 < 1 - SURE + 0.015


def ours_and_theirs(differences):
    return {n: 10.0 * n + each for n, each in enumerate(differences)}, {
        n: 10.0 * n for n in range(len(differences))
    }


@pytest.mark.parametrize(
    ("differences", "sure"),
    [
        ([1, 2, 3, 1, 2, 3], True),
        ([-1, -2, -3, -1, -2, -3], True),
        ([1, 2, 3, 1, 2, -3], False),
        ([1, 2, 3, 1, 2, 0], False),
        ([1, 2, 3, 1, 2], False),  # too few
        ([1, 2, 3, 1, 2, 3, 1, 2, -3], True),  # one outlier of nine
        ([1, 2, 3, 1, 2, 3, 1, -2, -3], False),
    ],
)
def test_a_difference_is_claimed_only_where_the_rounds_agree(differences, sure):
    found = difference(*ours_and_theirs(differences))
    assert found.sure is sure
    assert found.spread.low == pytest.approx(min(differences))
    verdict = "real" if sure else "within noise" if len(differences) >= FEWEST else "too few rounds"
    assert found.as_json()["verdict"] == verdict


def test_only_rounds_that_both_have_are_compared():
    assert difference({1: 5.0, 2: 6.0}, {2: 1.0, 3: 9.0}) == Difference(
        Spread(5.0, 5.0, 5.0), 1, False
    )
    assert difference({1: 5.0}, {}) is None


# --- reading what arrived --------------------------------------------------------------------


def event(**chunk):
    return f"data: {json.dumps(chunk)}\n\n".encode()


def delta(finish=None, **delta):
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])


USAGE = event(
    choices=[],
    usage={"prompt_tokens": 30, "completion_tokens": 3},
    timings={"predicted_n": 3, "predicted_ms": 4.0},
)


def test_the_times_in_a_server_stream():
    found = measuring.read_direct(
        100.0,
        [
            (0.1, delta(role="assistant", content=None)),
            (0.2, delta(content="a")[:9]),
            (0.3, delta(content="a")[9:] + delta(content="b")),
            (0.5, delta(content="c") + delta("length")),
            (0.6, USAGE + b"data: [DONE]\n\n"),
        ],
    )
    assert (found.began, found.first, found.last) == (100.0, 0.3, 0.5)
    assert (found.tokens, found.prompt_tokens) == (3, 30)
    assert found.per_token == pytest.approx(0.1)
    assert found.timings["predicted_ms"] == 4.0


def test_thoughts_count_as_text():
    found = measuring.read_direct(
        0.0, [(1.0, delta(reasoning_content="a")), (2.0, delta("stop") + USAGE)]
    )
    assert found.first == 1.0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "without a finish reason"),
        (delta(content="a"), "without a finish reason"),
        (event(error={"message": "out of luck", "code": 500}), "out of luck"),
        (b"proxy error: gone\n\n", "proxy error"),
        (delta("stop") + USAGE, "no text"),
        (delta(content="a") + delta("stop"), "no count"),
    ],
)
def test_a_server_stream_that_is_no_sample(body, words):
    with pytest.raises(measuring.StreamFailed, match=words):
        measuring.read_direct(0.0, [(0.1, body)])


def frames(*given):
    return [(at, json.dumps(frame).encode()) for at, frame in given]


DONE = {"type": "done", "message": {"usage": {"input": 30, "output": 3}}}


def test_the_times_in_a_channel():
    found = measuring.read_frames(
        7.0,
        frames(
            (0.1, {"type": "start"}),
            (0.1, {"type": "text_start"}),
            (0.2, {"type": "text_delta"}),
            (0.3, {"type": "ping"}),
            (0.4, {"type": "text_delta"}),
            (0.6, {"type": "text_end"}),
            (0.7, {"type": "stop"}),
            (0.8, DONE),
        ),
    )
    assert (found.began, found.first, found.last) == (7.0, 0.2, 0.6)
    assert (found.tokens, found.prompt_tokens, found.timings) == (3, 30, {})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "closed before"),
        ([(0.1, {"type": "text_delta"}), (0.2, {"type": "text_end"})], "closed before"),
        ([(0.1, {"type": "error", "error": {"error_message": "no luck"}})], "no luck"),
        ([(0.1, DONE)], "no text"),
    ],
)
def test_a_channel_that_is_no_sample(given, words):
    with pytest.raises(measuring.StreamFailed, match=words):
        measuring.read_frames(0.0, frames(*given))


# --- batches ---------------------------------------------------------------------------------


def sample(began=0.0, first=0.5, gap=0.01, tokens=11, prompt=100, **timings):
    return measuring.Sample(began, first, first + gap * (tokens - 1), tokens, prompt, timings)


def test_the_figures_of_a_batch():
    batch = measuring.Batch([sample(0.0), sample(0.1), sample(0.2, first=0.8, gap=0.02)])
    found = batch.figures()
    assert found["first_ms"] == pytest.approx(500)
    assert found["per_token_ms"] == pytest.approx(10)
    assert found["each"] == pytest.approx(100)
    assert found["all"] == pytest.approx(33 / 1.2)
    assert found["prompt"] == pytest.approx(200)
    assert measuring.Batch([]).figures() == {}
    assert "each" not in measuring.Batch([sample(tokens=1)]).figures()
    at_one_go = measuring.Batch([sample(gap=0.0)]).figures()
    assert at_one_go["per_token_ms"] == 0
    assert "each" not in at_one_go


TASK = measuring.Task("demo", 5, 12)


class Scripted(measuring.Path):
    """A path whose streams do what the test says."""

    name = "worker"

    def __init__(self, do):
        super().__init__()
        self.do = do
        self.prompts = []

    def stream(self, task, prompt, ready):
        self.prompts.append(prompt)
        return self.do(self, ready)


def test_streams_of_a_batch_start_together_with_different_prompts():
    waiting = []

    def do(path, ready):
        waiting.append(1)
        ready()
        return sample(float(len(waiting)))

    path = Scripted(do)
    batch = measuring.run_batch(path, TASK, 5, random.Random(1))
    assert [each.began for each in batch.samples] == [5.0] * 5
    assert len(set(path.prompts)) == 5
    assert {len(prompt.split()) for prompt in path.prompts} == {TASK.words}


def test_a_stream_that_cannot_begin_keeps_no_other_waiting():
    numbers = iter(range(9))

    def do(path, ready):
        if next(numbers) == 2:
            raise BusError("channel", "cannot be made")
        ready()
        raise AssertionError("one is missing")

    batch = measuring.run_batch(Scripted(do), TASK, 4, random.Random(1))
    assert batch.samples == []
    assert batch.failures == ["channel: cannot be made"]


def test_a_failed_stream_is_told_and_the_others_count():
    numbers = iter(range(9))

    def do(path, ready):
        number = next(numbers)
        ready()
        if number == 0:
            raise measuring.StreamFailed("no luck")
        return sample()

    batch = measuring.run_batch(Scripted(do), TASK, 3, random.Random(1))
    assert (len(batch.samples), batch.failures) == (2, ["no luck"])


def test_an_interrupt_stops_what_runs():
    gone = threading.Event()

    class Path(Scripted):
        def stream(self, task, prompt, ready):
            def cut():
                gone.set()

            self._begin(cut)
            try:
                ready()
                if prompt == TASK.prompt(random.Random(1)):  # the first one
                    raise KeyboardInterrupt
                assert gone.wait(PATIENCE)
                raise measuring.StreamFailed("cut")
            finally:
                self._end(cut)

    path = Path(None)
    with pytest.raises(KeyboardInterrupt):
        measuring.run_batch(path, TASK, 2, random.Random(1))
    assert gone.is_set()
    with pytest.raises(measuring.StreamFailed, match="stopped"):
        path._begin(gone.set)


# --- against a real server -------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack(llama):
    with LocalStack(Settings(api_url=llama.url)) as stack:
        yield stack


@pytest.fixture(scope="module")
def paths(stack):
    with Caller(stack.settings) as caller:
        yield (
            measuring.Direct(Upstream(), Target(stack.llama.url)),
            measuring.Through(caller, stack.settings),
        )


def test_both_ways_do_the_same_work_to_the_token(paths):
    found = [path.stream(TASK, "river stone window", lambda: None) for path in paths]
    direct, worker = found
    assert direct.tokens == worker.tokens == TASK.tokens == direct.timings["predicted_n"]
    assert direct.prompt_tokens == worker.prompt_tokens
    # Read whole, without the cache.
    assert direct.timings["prompt_n"] == direct.prompt_tokens
    assert direct.timings["cache_n"] == 0
    for each in found:
        assert 0 < each.first <= each.last


@pytest.mark.parametrize("at_once", [1, 3])
def test_batches_of_both_ways(paths, at_once):
    for path in paths:
        batch = measuring.run_batch(path, TASK, at_once, random.Random(1))
        assert not batch.failures
        assert [each.tokens for each in batch.samples] == [TASK.tokens] * at_once
        # So few tokens may come in one read: then nobody knows their pace.
        assert batch.figures().keys() | {"each"} == set(report.FIGURES)


def test_a_running_stream_can_be_stopped_on_both_ways(llama_factory):
    server = llama_factory("loop", parallel=1, ctx_size=16384)
    endless = measuring.Task("loop", 5, 16000)
    with LocalStack(Settings(api_url=server.url)) as stack, Caller(stack.settings) as caller:
        for path in (
            measuring.Direct(Upstream(), Target(server.url)),
            measuring.Through(caller, stack.settings),
        ):
            begun = threading.Event()
            outcome = []

            def stream(path=path, begun=begun, outcome=outcome):
                try:
                    path.stream(endless, "river", begun.set)
                except measuring.StreamFailed as error:
                    outcome.append(error)

            thread = threading.Thread(target=stream)
            thread.start()
            assert begun.wait(PATIENCE)
            path.stop()
            thread.join(PATIENCE)
            assert not thread.is_alive()
            assert len(outcome) == 1


def test_a_refused_call_fails_the_stream(paths):
    direct, worker = paths
    with pytest.raises(measuring.StreamFailed, match="max_output_tokens"):
        worker.stream(measuring.Task("demo", 5, -5), "river", lambda: None)
    long = " ".join(["river"] * 9000)
    with pytest.raises(measuring.StreamFailed, match="context"):
        direct.stream(TASK, long, lambda: None)
    with pytest.raises(measuring.StreamFailed, match="context"):
        worker.stream(TASK, long, lambda: None)


def test_a_channel_that_cannot_be_read(stack):
    class Fake:
        def call(self, function_id, data):
            ref = {"channel_id": "none", "access_key": "none"}
            return {"reader": ref, "writer": ref}

    with pytest.raises(measuring.StreamFailed, match="cannot be read"):
        measuring.Through(Fake(), stack.settings).stream(TASK, "river", lambda: None)


class Socket:
    """A channel's reading end that gives these blocks, and then breaks."""

    def __init__(self, *blocks):
        self.sock, self.blocks, self.pongs = self, list(blocks), []

    def recv(self, size):
        if not self.blocks:
            raise OSError("reset")
        return self.blocks.pop(0)

    def pong(self, data):
        self.pongs.append(data)

    def abort(self):
        pass


def wire(opcode, payload):
    return bytes((0x80 | opcode, len(payload))) + payload


class Silent:
    def call(self, function_id, data, **more):
        pass


def test_pings_are_answered_and_a_close_ends_the_reading(stack):
    words = [b'{"type":"text_delta"}', b'{"type":"text_end"}', json.dumps(DONE).encode()]
    data = wire(0x9, b"hi") + b"".join(wire(0x1, each) for each in words) + wire(0x8, b"")
    socket = Socket(data[:20], data[20:], b"never read")
    way = measuring.Through(Silent(), stack.settings)
    assert way._read(socket, {}, lambda: None).tokens == 3
    assert socket.pongs == [b"hi"]
    assert socket.blocks == [b"never read"]
    with pytest.raises(measuring.StreamFailed, match="closed before"):
        way._read(Socket(wire(0x1, words[0]), wire(0x2, b"bytes")), {}, lambda: None)


def run_json(stack, capsys, *flags):
    assert cli.main(["bench", "--url", stack.settings.url, "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_whole_run_agrees_with_the_server(stack, capsys, tmp_path):
    png = tmp_path / "bench.png"
    found = run_json(
        stack,
        capsys,
        *("--rounds", "2", "--tokens", "24", "--prompt-tokens", "120"),
        *("--concurrency", "2,1", "--plot", str(png)),
    )
    assert found["model"] == "demo"
    assert found["server"]["url"] == stack.llama.url
    assert found["server"]["slots"] == 4
    assert [level["at_once"] for level in found["levels"]] == [1, 2]
    for level in found["levels"]:
        for path in ("direct", "worker"):
            assert level[path]["rounds"] == 2
            assert level[path]["failures"] == []
            for name in report.FIGURES:
                if (each := level[path].get(name)) is None:
                    assert name == "each"  # all came in one read
                    continue
                assert 0 <= each["low"] <= each["median"] <= each["high"]
        assert set(level["added"]) == {"first_ms", "per_token_ms", "all_percent"}
        assert {each["verdict"] for each in level["added"].values()} == {"too few rounds"}
    # What the server counted and timed itself.
    assert found["check"]["counts_agree"] is True
    assert found["check"]["apart"] >= 0
    assert found["check"]["server_tokens_per_second"] > 0
    assert found["check"]["server_prompt_tokens_per_second"] > 0
    # The prompt was fitted with the server's own count.
    assert found["prompt_tokens"]["median"] == pytest.approx(120, rel=0.2)
    assert found["interrupted"] is False
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_whole_run_as_text(stack, capsys):
    flags = ["--rounds", "1", "--tokens", "8", "--prompt-tokens", "40", "--concurrency", "1"]
    assert cli.main(["bench", "--url", stack.settings.url, *flags]) == 0
    streams = capsys.readouterr()
    assert "what the worker adds" in streams.out
    assert "measuring" in streams.err
    assert "too few rounds" in streams.out


def test_with_an_embedded_stack(llama, capsys):
    flags = ["--rounds", "1", "--tokens", "4", "--prompt-tokens", "30", "--concurrency", "1"]
    assert cli.main(["bench", "--local", "--api-url", llama.url, *flags]) == 0
    assert "share one Python process" in capsys.readouterr().out.replace("\n", " ")


def test_an_interrupt_ends_it_with_what_there_is(stack, capsys, monkeypatch):
    real, calls = measuring.run_batch, []

    def run_batch(path, task, count, chance):
        calls.append(path.name)
        if task.tokens != bench.WARM_TOKENS and len(calls) > 2 + 2:
            raise KeyboardInterrupt
        return real(path, task, count, chance)

    monkeypatch.setattr(measuring, "run_batch", run_batch)
    flags = ("--rounds", "9", "--tokens", "9", "--prompt-tokens", "40", "--concurrency", "1")
    found = run_json(stack, capsys, *flags)
    assert found["interrupted"] is True
    assert found["levels"][0]["worker"]["rounds"] == 1


def test_an_interrupt_before_the_first_figure(stack, capsys, monkeypatch):
    real = measuring.run_batch

    def run_batch(path, task, count, chance):
        if task.tokens != bench.WARM_TOKENS:
            raise KeyboardInterrupt
        return real(path, task, count, chance)

    monkeypatch.setattr(measuring, "run_batch", run_batch)
    assert cli.main(["bench", "--url", stack.settings.url, "--tokens", "9"]) == 130
    assert "before the first figure" in capsys.readouterr().err


# --- setting up ------------------------------------------------------------------------------


def fails(capsys, *flags):
    assert cli.main(["bench", *flags]) == 1
    return capsys.readouterr().err


def test_no_worker(capsys):
    with LoopbackEngine() as engine:
        told = fails(capsys, "--url", engine.url)
    assert "provider::llamacpp::status" in told
    assert "--local" in told


def test_a_worker_that_fails_otherwise(monkeypatch):
    class Fake:
        def call(self, *args, **more):
            raise BusError("TIMEOUT", "nothing came")

    with pytest.raises(BusError, match="nothing came"):
        bench._where(Fake(), Settings(), None)


def test_a_model_that_nobody_serves(capsys, llama_factory):
    with (
        ScriptedServer(routes={"/v1/models": answer_json({"data": []})}) as server,
        LoopbackEngine() as engine,
    ):
        from provider_llamacpp import ProviderWorker

        with ProviderWorker(Settings(url=engine.url, api_url=server.url, drain=0.0)):
            assert engine.wait_for_function("provider::llamacpp::status")
            told = fails(capsys, "--url", engine.url, "--server", server.url)
            assert "serves no model at all" in told


def test_a_server_named_that_is_not_there(stack, capsys):
    told = fails(capsys, "--url", stack.settings.url, "--server", "http://127.0.0.1:9")
    assert "127.0.0.1:9" in told


def test_a_way_that_does_not_work(stack, capsys, monkeypatch):
    failed = measuring.Batch([], ["no luck"])
    monkeypatch.setattr(measuring, "run_batch", lambda *args: failed)
    told = fails(capsys, "--url", stack.settings.url)
    assert "llama-server itself does not work: no luck" in told


def test_streams_that_do_not_fit_a_slot(stack, capsys):
    told = fails(capsys, "--url", stack.settings.url, "--prompt-tokens", "8000", "--tokens", "500")
    assert "8500" in told and "8192" in told and "--ctx-size" in told


@pytest.mark.parametrize(
    ("slots", "levels"),
    [
        (1, [1, 2]),
        (2, [1, 2, 4]),
        (3, [1, 2, 3, 6]),
        (4, [1, 2, 4, 8]),
        (6, [1, 2, 4, 6, 12]),
        (200, [1, 2, 4, 8, 16, 32, 64, 128, 200, 256]),
    ],
)
def test_concurrency_goes_up_to_the_slots_and_beyond(slots, levels):
    assert bench.levels_of(slots) == levels


def test_the_prompt_is_fitted_by_the_servers_count():
    def count(text):
        return 20 + 2 * len(text.split())

    words = bench.fit(count, 256)
    assert count(" ".join(["x"] * words)) == 256
    assert bench.fit(count, 1) == 1

    def cannot(text):
        raise BusError("invocation_failed", "no such route")

    assert bench.fit(cannot, 100) == 75


@pytest.mark.parametrize(
    "flags",
    [
        ["--rounds", "0"],
        ["--tokens", "1"],
        ["--prompt-tokens", "x"],
        ["--concurrency", "0,1"],
        ["--concurrency", "1,1000"],
        ["--concurrency", "a"],
        ["--concurrency", ""],
    ],
)
def test_arguments_that_cannot_be_used(capsys, flags):
    with pytest.raises(SystemExit):
        cli.main(["bench", *flags])
    assert flags[0] in capsys.readouterr().err


# --- showing ---------------------------------------------------------------------------------


def a_report(rounds=7, levels=(1, 2, 4), slots=2, worker=1.0, noise=0.001, **more):
    """A report whose worker takes ``worker`` times as long, or some noise around that."""
    chance = random.Random(3)

    def batch(at_once, factor, path):
        def one(number):
            wave = 0.4 * (number // (slots or 4))
            factors = [factor * (1 + chance.uniform(-noise, noise)) for _ in range(2)]
            timings = {
                "predicted_n": 11,
                "predicted_ms": 100.0 * at_once,
                "predicted_per_second": 110.0,
                "prompt_n": 90,
                "cache_n": 10,
                "prompt_per_second": 2000.0,
            }
            return sample(
                first=0.05 * factors[0] + wave,
                gap=0.01 * at_once * factors[1],
                **(timings if path == "direct" else {}),
            )

        return measuring.Batch([one(number) for number in range(at_once)])

    rig = report.Rig(
        direct=None,
        worker=None,
        task=measuring.Task("qwen3-0.6b", 100, 11),
        levels=levels,
        rounds=rounds,
        slots=slots,
        url="http://127.0.0.1:8080",
        build="b11434-abcdef0",
        **more,
    )
    made = report.Report(rig)
    for at_once in levels:
        batches = {
            path: {number: batch(at_once, factor, path) for number in range(rounds)}
            for path, factor in (("direct", 1.0), ("worker", worker))
        }
        made.levels.append(report.Level(at_once, batches))
    return made


def drawn(made, *, rich=False):
    out = io.StringIO()
    report.show(Terminal(out, width=80, live=True, rich=rich), made)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()


@pytest.mark.parametrize("rich", [True, False])
def test_the_tables_at_80_columns(rich):
    lines = drawn(a_report(worker=1.2, noise=0.15), rich=rich)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for words in (
        "qwen3-0.6b at http://127.0.0.1:8080, 2 slots, b11434-abcdef0",
        "answers of 11 tokens; medians of 7 rounds",
        "at once path first token ms tok/s each tok/s all prompt tok/s",
        "what the worker adds",
        "at once to median lowest highest verdict",
        "1 the first token +14.",
        "each other token +1.",
        " ms slower",
        " ms within noise",
        " % slower",
        "Beyond 2 at once streams wait for a slot",
        "Checked against llama-server's own timings (110 tokens/s each)",
        "the counts of tokens are equal",
    ):
        assert words in text, words


def test_huge_figures_fit_too():
    made = a_report(worker=1000.0, noise=0.99)
    for rich in (True, False):
        lines = drawn(made, rich=rich)
        assert max(map(len, lines)) <= 80
        assert sum(line.rstrip().endswith(("slower", "noise")) for line in lines) == 9


def verdicts(made):
    return [row[-1][0] for level in made.levels for row in report._added(level)]


def test_a_slower_worker_is_said_to_be_slower():
    made = a_report(worker=1.5)
    assert verdicts(made)[:3] == ["slower"] * 3
    assert "Within noise" not in " ".join(report.remarks(made))


def test_a_faster_worker_is_said_to_be_faster():
    assert verdicts(a_report(worker=0.5))[:3] == ["faster"] * 3


def test_noise_is_said_to_be_noise():
    made = a_report(worker=1.0, noise=0.5)
    assert set(verdicts(made)) == {"within noise"}
    assert report.remarks(made)[0].startswith("Within noise: the rounds did not agree")


def test_too_few_rounds_conclude_nothing():
    made = a_report(rounds=FEWEST - 1, worker=3.0)
    assert set(verdicts(made)) == {"too few rounds"}
    assert "cannot tell a difference from chance" in report.remarks(made)[0]


def test_a_figure_that_is_missing_is_a_dash():
    made = a_report(levels=(1,))
    for batches in made.levels[0].batches.values():
        for number in batches:
            batches[number] = measuring.Batch([sample(tokens=1)])
    lines = drawn(made)
    assert any(" - " in line for line in lines)
    assert "each other token" not in "\n".join(lines)


def test_figures_that_the_server_does_not_confirm():
    made = a_report()
    for level in made.levels:
        for batch in level.batches["direct"].values():
            for each in batch.samples:
                each.timings["predicted_ms"] *= 2
                each.timings["predicted_n"] = 12
    (words,) = [each for each in report.remarks(made) if "apart" in each]
    assert words.startswith("The direct figures are 50% apart")
    assert "the counts differ" in words


def test_a_server_without_timings():
    made = a_report(slots=None)
    for level in made.levels:
        for batch in level.batches["direct"].values():
            for each in batch.samples:
                each.timings.clear()
    found = made.check()
    assert (found.apart, found.counts_agree, found.generation) == (None, True, None)
    assert any("tells no timings" in each for each in report.remarks(made))
    assert ", b11434" in drawn(made)[0]


@pytest.mark.parametrize(
    ("given", "tokens", "agree"),
    [
        ({"predicted_n": 11, "prompt_n": 60, "cache_n": 40}, 11, True),
        ({"predicted_n": 11, "prompt_n": 60, "cache_n": 41}, 11, False),
        ({"predicted_n": 10, "prompt_n": 100}, 11, False),
        ({"predicted_n": 11, "prompt_n": 100}, 12, False),
        ({}, 11, True),
    ],
)
def test_counts_are_compared_exactly(given, tokens, agree):
    assert report.check([sample(**given)], [given], tokens).counts_agree is agree


def test_remarks_on_the_machine_and_on_failures():
    made = a_report()
    made.busy = 0.93
    made.interrupted = True
    batch = made.levels[0].batches["worker"][0]
    made.levels[0].batches["worker"][0] = measuring.Batch(batch.samples, ["no luck", "again"])
    text = " ".join(report.remarks(made))
    assert "This program itself took 93% of a core" in text
    assert "2 streams failed (1 at once, worker), the first with: no luck" in text
    assert "Interrupted" in text
    local = a_report(local=True)
    assert "share one Python process" in " ".join(report.remarks(local))


@pytest.mark.parametrize(
    ("done", "words"), [(0, ""), (10, ", 2 min left"), (50, ", 10 s left"), (90, ", 1 s left")]
)
def test_how_much_is_left(done, words):
    assert bench._left(10.0, done, 100) == words


def test_levels_that_were_never_measured_on_both_ways_are_left_out(monkeypatch):
    calls = []

    def run_batch(path, task, count, chance):
        calls.append(count)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measuring.Batch([sample()])

    monkeypatch.setattr(measuring, "run_batch", run_batch)
    rig = a_report(levels=(1, 2), rounds=1).rig
    made = bench.measure(rig, Terminal(io.StringIO()), random.Random(1))
    assert made.interrupted
    assert len(made.levels) == 1


# --- the picture -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slots", [2, *(pytest.param(each, marks=pytest.mark.thorough) for each in (3, 8, None))]
)
def test_a_picture_holds_both_ways_in_three_panels(tmp_path, slots):
    path = tmp_path / "bench.svg"
    plot.draw(a_report(slots=slots, levels=(1, 2, 4)), path)
    root = ElementTree.parse(path).getroot()
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    for words in (
        "throughput",
        "to the first token",
        "from token to token",
        "directly from llama-server",
        "through the worker",
        "streams at once",
    ):
        assert words in texts, words
    assert any(each.startswith("qwen3-0.6b, b11434") for each in texts)
    assert sum("all slots" in each for each in texts) == (3 if slots in (2, 3) else 0)


@pytest.mark.thorough
def test_the_same_figures_give_the_same_picture(tmp_path):
    made = a_report()
    plot.draw(made, tmp_path / "a.svg")
    plot.draw(made, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.thorough
def test_a_picture_of_one_level(tmp_path):
    plot.draw(a_report(levels=(1,)), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_said_before_the_measuring(tmp_path, monkeypatch, capsys):
    told = fails(capsys, "--plot", str(tmp_path / "a.gif"))
    assert ".png or .svg" in told
    with pytest.raises(ProviderLlamacppError, match="cannot be written"):
        plot.check(tmp_path / "none" / "a.png")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(ProviderLlamacppError, match="cannot be written"):
        plot.check(tmp_path / "b.png")
    plot.check(tmp_path / "c.PNG")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ProviderLlamacppError, match=r"pip install .*\[bench\]"):
        plot.check(tmp_path / "a.png")


def test_without_a_plot_nothing_of_matplotlib_is_imported(monkeypatch, stack, capsys):
    real = builtins.__import__

    def no_plots(name, *args, **more):
        assert "matplotlib" not in name
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", no_plots)
    flags = ["--rounds", "1", "--tokens", "4", "--prompt-tokens", "30", "--concurrency", "1"]
    assert cli.main(["bench", "--url", stack.settings.url, *flags]) == 0


def test_prepared_parts_end_with_the_stack(llama):
    options = cli.parser(["bench"]).parse_args(["bench", "--local", "--tokens", "4"])
    before = threading.active_count()
    with ExitStack() as parts:
        rig = bench.prepare(Settings(api_url=llama.url), options, parts)
    assert rig.local
    assert rig.levels == [1, 2, 4, 8]
    assert threading.active_count() == before
