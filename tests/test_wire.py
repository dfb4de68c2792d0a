"""The messages of the bus as they are written, field by field."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from provider_llamacpp.bus import wire
from provider_llamacpp.errors import BusError

TRACES: list[dict[str, str]] = [
    {},
    {"traceparent": "00-t"},
    {"baggage": "k=v"},
    {"traceparent": "00-t", "baggage": "k=v"},
    {"traceparent": "", "baggage": ""},
]
HEAD = {"type": "invocationresult", "invocation_id": "i-1", "function_id": "t::f"}


def test_taking_over_from_an_earlier_connection() -> None:
    assert wire.reattach("w-1", "hush") == {
        "type": "reattach",
        "previous_worker_id": "w-1",
        "reattach_token": "hush",
    }


@pytest.mark.parametrize("namespace", [None, "lab", ""])
def test_a_trigger(namespace: str | None) -> None:
    message = wire.register_trigger("router::ready", "t::f", {"a": 1}, namespace)
    other = wire.register_trigger("router::ready", "t::f", {"a": 1}, namespace)
    made = message.pop("id")
    assert str(uuid.UUID(made)) == made != other["id"]
    assert message == {
        "type": "registertrigger",
        "trigger_type": "router::ready",
        "function_id": "t::f",
        "config": {"a": 1},
        **({} if namespace is None else {"namespace": namespace}),
    }


@pytest.mark.parametrize("trace", TRACES)
def test_a_call_that_is_answered(trace: dict[str, str]) -> None:
    message = wire.invoke("t::f", [1], invocation_id="i-1", namespace="lab", **trace)
    assert message == {
        "type": "invokefunction",
        "invocation_id": "i-1",
        "function_id": "t::f",
        "data": [1],
        "namespace": "lab",
        **trace,
    }


def test_a_call_that_nobody_answers() -> None:
    assert wire.invoke("t::f", None, invocation_id=None, baggage="k=v") == {
        "type": "invokefunction",
        "function_id": "t::f",
        "data": None,
        "action": {"type": "void"},
        "baggage": "k=v",
    }


@pytest.mark.parametrize(
    ("function_id", "namespace"),
    [
        ("engine::channels::create", None),
        ("state::get", None),
        ("configuration::get", None),
        ("statements::get", "lab"),
        ("my::engine::x", "lab"),
        ("engine", "lab"),
    ],
)
def test_what_the_engine_itself_offers_has_no_namespace(
    function_id: str, namespace: str | None
) -> None:
    message = wire.invoke(function_id, {}, invocation_id="i-1", namespace="lab")
    assert message.get("namespace") == namespace
    assert ("namespace" in message) == (namespace is not None)


@pytest.mark.parametrize("namespace", [None, "lab"])
@pytest.mark.parametrize("isolation", [None, "box"])
def test_who_we_are(namespace: str | None, isolation: str | None) -> None:
    message = wire.register_worker(
        name="n",
        version="1.2",
        description="d",
        os_name="linux",
        pid=7,
        isolation=isolation,
        namespace=namespace,
    )
    data: dict[str, Any] = {
        "runtime": "python",
        "version": "1.2",
        "name": "n",
        "description": "d",
        "os": "linux",
        "pid": 7,
        "isolation": isolation,
        "telemetry": {
            "language": None,
            "project_name": None,
            "framework": "provider-llamacpp",
        },
    }
    if namespace is not None:
        data["namespace"] = namespace
    assert message == {
        "type": "invokefunction",
        "function_id": "engine::workers::register",
        "data": data,
        "action": {"type": "void"},
    }


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("body", [{"result": {"a": "ü"}}, {"result": None}, wire.failure("c", "m")])
def test_a_result(body: dict[str, Any], trace: dict[str, str]) -> None:
    written = wire.result("i-1", "t::f", body, limit=1000, **trace)
    assert json.loads(written) == {**HEAD, **body, **trace}


@pytest.mark.parametrize("trace", TRACES)
def test_a_result_of_the_length_that_fits_and_one_byte_more(trace: dict[str, str]) -> None:
    body = {"result": "ü" * 50}
    whole = wire.result("i-1", "t::f", body, limit=1000, **trace)
    size = len(whole)
    assert wire.result("i-1", "t::f", body, limit=size, **trace) == whole
    cut = wire.result("i-1", "t::f", body, limit=size - 1, **trace)
    assert json.loads(cut) == {
        **HEAD,
        "error": {
            "code": "payload_too_large",
            "message": f"a result of {size} bytes; {size - 1} fit",
        },
        **trace,
    }


@pytest.mark.parametrize("trace", TRACES)
def test_a_result_that_cannot_be_written(trace: dict[str, str]) -> None:
    written = wire.result("i-1", "t::f", {"result": {1, 2}}, limit=1000, **trace)
    message = json.loads(written)
    error = message.pop("error")
    assert message == {**HEAD, **trace}
    assert error.keys() == {"code", "message"}
    assert error["code"] == "serialization_error"
    assert error["message"].startswith("the result ")
    assert "None" not in error["message"]


def test_failures() -> None:
    assert wire.failure("c", "m") == {"error": {"code": "c", "message": "m"}}
    error = wire.remote_error({"code": "router/no", "message": "not today", "stacktrace": "s"})
    assert isinstance(error, BusError)
    assert (error.code, error.message) == ("router/no", "not today")
    for odd in ({"code": "c"}, {"message": "m"}, {"code": 5, "message": "m"}, "text", None, []):
        error = wire.remote_error(odd)
        assert error.code == "UNKNOWN"
        assert error.message == "the call failed and the error has no code and message"
    assert wire.remote_error({"code": "c", "message": 5}).code == "UNKNOWN"


def test_a_text_or_none() -> None:
    message = {"a": "x", "b": 5, "c": None, "d": ""}
    assert [wire.text_of(message, name) for name in "abcde"] == ["x", None, None, "", None]


def test_ids_are_uuids_and_new() -> None:
    made = {wire.new_id() for _ in range(100)}
    assert len(made) == 100
    assert all(str(uuid.UUID(each)) == each for each in made)
