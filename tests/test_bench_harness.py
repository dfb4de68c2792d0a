"""The pure parts of ``bench/``: statistics, order of rounds, tables, and what a sink reads."""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import report, sink, wire
from bench.bars import BARS, Bar, judge
from bench.cases import CASES
from bench.processes import DRIVERS
from bench.stats import Spread, percentile, ratios, shuffled, spread
from bench.stub import Chunks

MASK = b"\x01\x02\x03\x04"


def client_frame(payload, opcode=1):
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0xFE)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0xFF)) + size.to_bytes(8, "big")
    masked = bytes(byte ^ MASK[place % 4] for place, byte in enumerate(payload))
    return head + MASK + masked


def event(**fields):
    return client_frame(json.dumps(fields).encode())


# -- statistics -----------------------------------------------------------------------------------


def test_ratios_are_taken_round_by_round():
    # The machine was four times slower in round 1: ratios do not show it, medians would.
    assert ratios({0: 1.0, 1: 4.0, 2: 1.2}, {0: 2.0, 1: 8.0, 2: 2.0}) == [0.5, 0.5, 0.6]


def test_rounds_that_one_side_lacks_are_left_out():
    assert ratios({0: 1.0, 2: 3.0}, {1: 5.0, 2: 6.0}) == [0.5]
    assert ratios({0: 1.0}, {0: 0.0}) == []


def test_spread():
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([]) is None


@pytest.mark.parametrize(("percent", "expected"), [(0, 0), (50, 50), (99, 99), (100, 99)], ids=str)
def test_percentile(percent, expected):
    assert percentile(range(100), percent) == expected


def test_percentile_of_nothing():
    assert percentile([], 99) == 0.0


def test_each_round_has_an_order_of_its_own_and_nobody_is_left_out():
    chance = random.Random(7)
    names = list(DRIVERS)
    rounds = [shuffled(names, chance) for _ in range(20)]
    assert all(sorted(order) == sorted(names) for order in rounds)
    assert len({tuple(order) for order in rounds}) > 10
    assert names == list(DRIVERS)


# -- bars and tables ------------------------------------------------------------------------------


def results(**ours):
    made = report.Results()
    for number in range(3):
        made.add(number, "lock64", "ours", {"cpu_per_10k": 1.0 + number, "complete": 1.0, **ours})
        made.add(number, "lock64", "raw", {"cpu_per_10k": (1.0 + number) / 2, "complete": 1.0})
    return made


BAR = Bar("cost", "lock64", "cpu_per_10k", "<=", 2.0, "raw")


def test_a_bar_on_a_ratio():
    (verdict,) = judge(results().table(), (BAR,))
    assert verdict.value == Spread(2.0, 2.0, 2.0)
    assert verdict.met is True


def test_a_bar_on_the_figure_itself():
    bars = (
        Bar("cost", "lock64", "cpu_per_10k", "<=", 1.9),
        Bar("cost", "lock64", "cpu_per_10k", ">=", 1.9),
        Bar("cost", "flat", "cpu_per_10k", ">=", 1.9),
    )
    assert [verdict.met for verdict in judge(results().table(), bars)] == [False, True, None]


def test_a_backlog_of_the_other_is_told():
    made = results()
    made.add(3, "lock64", "raw", {"kept_up": 0.9})
    (verdict,) = judge(made.table(), (BAR,))
    assert verdict.backlog
    assert "met, but the other had a backlog" in report.bars_text([verdict])


def test_every_bar_names_what_is_measured():
    for bar in BARS:
        assert bar.figure in report.LABELS
        assert "ours" in CASES[bar.case].drivers
        assert CASES[bar.case].short
        assert not bar.against or bar.against in CASES[bar.case].drivers


def test_the_table_has_drivers_and_ratios():
    made = results()
    made.add(2, "lock64", "raw", {"cpu_per_10k": 1.5, "complete": 0.0})
    shown = report.case_text("lock64", made.table()).splitlines()
    assert shown[0] == CASES["lock64"].title
    assert shown[2].split() == ["cpu", "s/10k"]
    assert shown[4] == "this worker                   2.00 (1.00..3.00)"
    assert shown[5] == "raw socket copy (incomplete)  1.00 (0.500..1.50)"
    assert shown[6] == "ours / raw                    2.00"


def test_the_text_tells_failures_and_bars():
    made = results()
    made.failures.append("round 1, flat, litellm: did not start")
    shown = report.text(made)
    assert "did not start" in shown
    assert shown.count("not measured") > 5


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.0123, "0.012"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (1e5, "100,000"),
    ],
    ids=str,
)
def test_numbers(value, shown):
    assert report.number(value) == shown


def test_json_holds_everything(tmp_path):
    made = results()
    report.write_json(made, tmp_path / "bench.json")
    read = json.loads((tmp_path / "bench.json").read_text())
    assert len(read["measurements"]) == 6
    assert len(read["bars"]) == len(BARS)


# -- tokens and frames ----------------------------------------------------------------------------


def test_a_token_tells_its_age():
    text = wire.token(5_000_000_000, 3)
    found = wire.TOKEN.search(text)
    assert int(found[2]) == 3
    assert wire.age_us(5_000_250_000, int(found[1])) == 250


def test_ages_survive_the_wrap_of_the_stamp():
    sent = wire.WRAP * 1000 - 100_000
    found = wire.TOKEN.search(wire.token(sent, 0))
    assert wire.age_us(sent + 300_000, int(found[1])) == 300


@pytest.mark.parametrize("size", [0, 5, 125, 126, 300, 70_000], ids=str)
def test_frames_are_read(size):
    payload = bytes(place % 251 for place in range(size))
    data = client_frame(payload) + client_frame(b"x", opcode=9) + client_frame(b"next")
    assert [got for _, got in wire.payloads(data)] == [payload, b"next"]
    assert list(wire.payloads(data[:-1]))[1:] == []


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000], ids=str)
def test_the_close_is_seen_at_every_split(step):
    data = client_frame(b"a" * 10) + client_frame(b"\x88" * 200) + client_frame(b"\x88" * 66_000)
    whole = data + client_frame(b"\x03\xe8", opcode=8)
    walker = wire.Walker()
    seen = [at for at in range(0, len(whole), step) if walker.feed(whole[at : at + step])]
    assert seen and seen[0] + step > len(data)


def test_the_answer_of_a_handshake():
    # The example of RFC 6455, 1.3.
    assert wire.accept_key("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


def channel(texts, *, output=None, said=None):
    """A channel's blocks: one frame each, a microsecond apart."""
    blocks = wire.Blocks()
    message = {
        "content": [{"type": "text", "text": "".join(texts) if said is None else said}],
        "usage": {"output": len(texts) if output is None else output},
    }
    frames = [event(type="start", partial={})]
    frames += [event(type="text_delta", delta=text) for text in texts]
    frames += [event(type="ping"), event(type="done", message=message)]
    for number, frame in enumerate(frames):
        blocks.add(number * 1000, frame)
    return blocks


TOKENS = [wire.token(0, place).decode() for place in range(4)]


def test_a_whole_answer():
    answer = wire.read_frames(channel(TOKENS))
    assert answer.complete()
    assert answer.received_ns == [1000, 2000, 3000, 4000]
    assert answer.snapshots == 2
    assert wire.arrivals([answer], 2000, 4000) == [2, 3]


@pytest.mark.parametrize(
    "blocks",
    [
        channel(TOKENS[:2] + TOKENS[3:], output=3),
        channel([TOKENS[0], TOKENS[2], TOKENS[1]]),
        channel(TOKENS, output=5),
        channel(TOKENS, said="something else"),
    ],
    ids=["a hole", "wrong order", "lost at the end", "another message"],
)
def test_an_answer_that_is_not_whole(blocks):
    assert not wire.read_frames(blocks).complete()


def stub_stream(tokens):
    chunks = Chunks()
    opening = chunks.opening() + b"".join(chunks.token(0, place) for place in range(tokens))
    return opening + chunks.closing(tokens)


def test_the_stub_speaks_as_llama_server_does():
    head, _, body = stub_stream(3).partition(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    events = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        block, body = rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        if block:
            assert block.startswith(b"data: ") and block.endswith(b"\n\n")
            events.append(block[6:-2])
    assert events.pop() == b"[DONE]"
    chunks = [json.loads(each) for each in events]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:4]] == TOKENS[:3]
    assert chunks[4]["choices"][0]["finish_reason"] == "stop"
    assert chunks[5]["choices"] == []
    assert chunks[5]["usage"]["completion_tokens"] == 3


def test_a_copied_stream_is_read():
    data, blocks = stub_stream(3), wire.Blocks()
    for number in range(0, len(data), 100):
        blocks.add(number * 10, data[number : number + 100])
    answer = wire.read_chunks(blocks)
    assert answer.complete()
    assert answer.frames == 3
    assert answer.received_ns == sorted(answer.received_ns)
    cut = wire.Blocks()
    cut.add(0, data[:-60])
    assert not wire.read_chunks(cut).complete()


@pytest.mark.skipif(sink.STAMPED is None, reason="the kernel's time is asked for on Linux only")
def test_a_read_tells_when_its_bytes_came():
    """Not when they were read: the reader's own turn may come much later."""
    with sink.listen() as listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        with far:
            far.setsockopt(socket.SOL_SOCKET, sink.STAMPED, 1)
            # The kernel begins to take the time some moments after it is asked to.
            for _ in range(1000):
                before = time.monotonic_ns()
                near.sendall(b"x")
                after = time.monotonic_ns()
                block, at = sink.receive(far)
                assert block == b"x"
                if at <= after:
                    break
            assert before - 10**9 < at <= after
