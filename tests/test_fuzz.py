"""Short runs of the fuzzers, and what they found, by name; ``make fuzz`` runs them for minutes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fuzz.bus_machine import BusMachine
from fuzz.stream_machine import StreamMachine
from fuzz.targets import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from laws import check_frames
from transcripts import COUNT_PAYLOADS, stream_payloads

from provider_llamacpp import jsontext
from provider_llamacpp.calls import Call
from provider_llamacpp.errors import InvalidRequest, ProviderError
from provider_llamacpp.events.assembler import Assembler, Outcome
from provider_llamacpp.local.llama import LlamaServer
from provider_llamacpp.payloads import decode_count, decode_stream
from provider_llamacpp.server.address import Target
from provider_llamacpp.server.discovery import _query
from provider_llamacpp.server.upstream import Upstream
from provider_llamacpp.transcript.convert import Abilities, chat_body, count_body

SHORT = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is dropped is told with a traceback; here that is every other message."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_any_server_is_heard_by_the_laws() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        StreamMachine, settings=settings(SHORT, stateful_step_count=25)
    )


def test_any_engine_gets_one_result_for_each_call() -> None:
    examples = max(8, settings.default.max_examples // 4)  # type: ignore[union-attr]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        BusMachine, settings=settings(SHORT, stateful_step_count=20, max_examples=examples)
    )


@pytest.mark.parametrize("name", TARGETS)
@SHORT
@given(data=st.binary(max_size=300))
def test_any_bytes(name: str, data: bytes) -> None:
    TARGETS[name](data)


FOUND = [
    # Two calls of one answer with the same id: their deltas were mixed up.
    ("stream", "CgnUAXEKCgMBCi8/AgEB+Pj4+Pj4AgMJBQ=="),
    # Half a surrogate pair in the id of a channel.
    ("url", "Cl0AO/r//9R8Og=="),
    # A password in an address that cannot be read was shown.
    ("url", "ACA="),
    ("url", "ACE="),
    ("url", "BgE="),
    # The data of an event behind three line ends depended on where a read ended.
    ("sse", "Lezs7Ozs7OzsSZIEAW0EkpKSkpKSkpKSjUmQ"),
]


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_found(name: str, data: str) -> None:
    import base64

    TARGETS[name](base64.b64decode(data))


def test_half_a_surrogate_pair_in_the_name_of_a_model_is_no_fault() -> None:
    assert _query("a\ud800") == "?model=a%3F&autoload=false"


# What fits the schema, at the real server


class Asked:
    """What the real server makes of what fits the schema."""

    def __init__(self, server: LlamaServer) -> None:
        self.target = Target(server.url)
        self.upstream = Upstream()

    def stream(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The terminal frame."""
        machine = Assembler(
            model="demo",
            provider="llamacpp",
            decode_name=str,
            now_ms=lambda: 1,
            call_id=lambda: "made",
        )
        frames: list[bytes] = []
        error = None
        try:
            prepared = chat_body(decode_stream(payload), max_tokens=2, abilities=Abilities())
            prepared.body.update(max_tokens=2, model="demo")
            body = jsontext.dumpb(prepared.body)
            call = Call(1, "stream", key=None, model=None)
            with self.upstream.open_stream(
                self.target, "/v1/chat/completions", body, call
            ) as stream:
                while not machine.ended and (block := stream.read()):
                    frames += machine.feed(block)
        except InvalidRequest as refusal:
            return {"type": "refused", "error": {"error_message": refusal.message}}
        except ProviderError as failure:
            error = failure
        frames += machine.finish(Outcome(error=error))
        check_frames(frames)
        last: dict[str, Any] = jsontext.loads(frames[-1])
        return last

    def count(self, payload: dict[str, Any]) -> int | str:
        """Tokens, or why there are none."""
        try:
            body = count_body(decode_count(payload), abilities=Abilities())
        except (InvalidRequest, ProviderError) as refusal:
            return str(refusal)
        reply = self.upstream.request(
            self.target, "POST", "/v1/chat/completions/input_tokens", body, timeout=20.0
        )
        value: int | str = reply.json()["input_tokens"] if reply.ok else reply.body.decode()
        return value


@given(payload=stream_payloads())
@SHORT
def test_whatever_fits_the_schema_is_accepted_or_refused_with_a_reason(
    llama: LlamaServer, payload: dict[str, Any]
) -> None:
    """By the real server. What breaks off in the middle has no reason."""
    last = Asked(llama).stream(payload)
    if last["type"] != "done":
        words = last["error"]["error_message"]
        assert words
        for broken in ("broke the connection off", "cannot be reached", "in the middle", "without"):
            assert broken not in words


@given(payload=COUNT_PAYLOADS)
@SHORT
def test_whatever_fits_the_schema_is_counted_or_refused_with_a_reason(
    llama: LlamaServer, payload: dict[str, Any]
) -> None:
    assert Asked(llama).count(payload)
