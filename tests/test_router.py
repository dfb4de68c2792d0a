import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from provider_llamacpp.calls import Call
from provider_llamacpp.errors import BusError, Interrupted, ProviderError
from provider_llamacpp.router import (
    REJECTED,
    STATE_GRACE,
    UNKNOWN,
    Resolved,
    RouterClient,
    read_resolved,
)


class Bus:
    """Answers calls from a table; a list of answers is used up one by one."""

    def __init__(self, **answers):
        self.answers = {name.replace("__", "::"): value for name, value in answers.items()}
        self.calls = []

    def __call__(self, function_id, data, *, timeout, call=None, namespace=None):
        self.calls.append((function_id, data, namespace))
        answer = self.answers.get(function_id)
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def sent(self, function_id):
        return [data for name, data, _ in self.calls if name == function_id]


REGISTER, RESOLVE = "router::provider::register", "router::provider::resolve"
STORED = {"router__provider__register": {"ok": True, "registration_token": "minted-7d0c"}}


def client(bus, **more):
    options = {
        "provider_id": "llamacpp",
        "worker_name": "provider-llamacpp",
        "key_variable": "LLAMACPP_API_KEY",
        "own_key": None,
        "namespace": None,
        "stop": threading.Event(),
    }
    return RouterClient(bus, **{**options, **more})


def test_the_first_registration_stores_the_minted_token():
    bus = Bus(**STORED)
    router = client(bus)
    router.register([])
    declared = bus.sent(REGISTER)[0]
    assert "token" not in declared
    assert "default_models" not in declared
    assert declared["id"] == "llamacpp"
    assert declared["credential_env_var"] == "LLAMACPP_API_KEY"
    assert declared["credential_optional"] is True
    assert declared["defaults"] == {"max_tokens": 8192}
    assert bus.sent("state::set") == [
        {"scope": "provider-llamacpp", "key": "registration_token", "value": "minted-7d0c"}
    ]
    router.register(["m"])
    again = bus.sent(REGISTER)[1]
    assert again["token"] == "minted-7d0c"
    assert again["default_models"] == ["m"]
    assert len(bus.sent("state::set")) == 1  # unchanged: not stored again


def test_a_stored_token_is_presented_everywhere():
    bus = Bus(state__get="minted-7d0c", router__provider__resolve={"configured": False}, **STORED)
    router = client(bus)
    router.register([])
    router.reconcile([{"id": "m"}])
    router.resolve()
    assert bus.sent(REGISTER)[0]["token"] == "minted-7d0c"
    assert bus.sent("router::models::reconcile")[0] == {
        "provider": "llamacpp",
        "models": [{"id": "m"}],
        "token": "minted-7d0c",
    }
    assert bus.sent(RESOLVE)[0] == {"id": "llamacpp", "token": "minted-7d0c"}
    assert bus.sent("state::set") == []
    assert len(bus.sent("state::get")) == 1


def test_router_calls_name_the_namespace_and_state_calls_do_not():
    bus = Bus(**STORED)
    client(bus, namespace="lab").register([])
    spaces = {name: space for name, _, space in bus.calls}
    assert spaces == {"state::get": None, REGISTER: "lab", "state::set": None}


def test_a_state_that_cannot_be_read_is_not_an_empty_one():
    bus = Bus(state__get=BusError("GET_ERROR", "disk"), **STORED)
    for _ in range(STATE_GRACE + 2):
        with pytest.raises(BusError, match="GET_ERROR"):
            client(bus).register([])
    assert bus.sent(REGISTER) == []


def test_a_state_worker_that_stays_away_counts_as_empty(caplog):
    bus = Bus(state__get=BusError("function_not_found", "state::get"), **STORED)
    router = client(bus)
    for _ in range(STATE_GRACE - 1):
        with pytest.raises(BusError):
            router.register([])
    router.register([])
    assert "memory only" in caplog.text
    assert len(bus.sent(REGISTER)) == 1


def test_a_token_that_cannot_be_stored_is_told_loudly(caplog):
    bus = Bus(state__set=BusError("SET_ERROR", "disk"), **STORED)
    stop = threading.Event()
    stop.set()  # no pauses
    router = client(bus, stop=stop)
    router.register([])
    assert "could not be stored" in caplog.text
    assert "minted-7d0c" not in caplog.text
    router.register([])
    assert bus.sent(REGISTER)[1]["token"] == "minted-7d0c"


def test_storing_is_tried_again():
    class Never(threading.Event):
        def wait(self, timeout=None):
            return False

    bus = Bus(state__set=[BusError("SET_ERROR", "x"), BusError("SET_ERROR", "x"), None], **STORED)
    client(bus, stop=Never()).register([])
    assert len(bus.sent("state::set")) == 3


def test_resolve_is_kept_until_it_is_forgotten():
    bus = Bus(router__provider__resolve={"api_url": " http://h:1 ", "max_tokens": 100})
    router = client(bus)
    assert router.resolve() == Resolved(api_url="http://h:1", max_tokens=100)
    router.resolve()
    assert len(bus.sent(RESOLVE)) == 1
    router.forget(token=False)
    router.resolve()
    assert len(bus.sent(RESOLVE)) == 2
    assert len(bus.sent("state::get")) == 1
    router.forget()
    router.resolve()
    assert len(bus.sent("state::get")) == 2


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("router/registration_rejected", "permanent"),
        ("function_not_found", "transient"),
        ("TIMEOUT", "transient"),
    ],
)
def test_a_failed_resolve_is_an_error_of_the_call(code, kind):
    bus = Bus(router__provider__resolve=BusError(code, "no"))
    with pytest.raises(ProviderError) as caught:
        client(bus).resolve()
    assert caught.value.kind == kind
    assert code in caught.value.message


class Registering(Bus):
    """A router that has bound us to a token which has not reached us yet."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.asked = threading.Event()
        self.refused = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, function_id, data, **more):
        known = super().__call__(function_id, data, **more)
        if function_id == REGISTER:
            self.asked.set()
            assert self.go_on.wait(10)
            if isinstance(self.answer, Exception):
                raise self.answer
            return {"ok": True, "registration_token": self.answer}
        if function_id == RESOLVE:
            if data.get("token") != "minted-7d0c":
                self.refused.set()
                raise BusError(REJECTED, "token mismatch")
            return {"api_url": "http://h:1"}
        return known


@pytest.fixture
def during_registration():
    """Resolves for a call while a registration is under way: that bus, the call, the outcome."""
    with ThreadPoolExecutor() as pool:

        def begin(answer):
            bus = Registering(answer)
            router = client(bus)
            router.on_refused = lambda: None
            registration = pool.submit(router.register, [])
            assert bus.asked.wait(10)
            call = Call(1, "stream", key="k", model=None)
            resolving = pool.submit(router.resolve, call)
            assert bus.refused.wait(10)
            return bus, call, resolving, registration

        yield begin


def test_what_is_refused_during_a_registration_is_asked_again_after_it(during_registration):
    bus, _, resolving, registration = during_registration("minted-7d0c")
    bus.go_on.set()
    registration.result(10)
    assert resolving.result(10).api_url == "http://h:1"
    assert [each.get("token") for each in bus.sent(RESOLVE)] == [None, "minted-7d0c"]


@pytest.mark.parametrize("answer", [BusError(REJECTED, "bound to another"), None, "minted-other"])
def test_a_registration_that_does_not_help_is_not_waited_for_twice(during_registration, answer):
    bus, _, resolving, registration = during_registration(answer)
    bus.go_on.set()
    registration.exception(10)
    with pytest.raises(ProviderError) as caught:
        resolving.result(10)
    assert caught.value.kind == "permanent"
    assert len(bus.sent(RESOLVE)) == (2 if answer == "minted-other" else 1)


def test_an_abort_does_not_wait_for_a_registration(during_registration):
    bus, call, resolving, _ = during_registration("minted-7d0c")
    assert call.abort("abort")
    with pytest.raises(Interrupted):
        resolving.result(10)
    bus.go_on.set()


def test_a_registration_that_is_expected_is_waited_for():
    bus = Registering("minted-7d0c")
    bus.go_on.set()
    router = client(bus)
    router.register([])
    bus.answers["state::get"] = "stale"
    router.expect_registration()
    with ThreadPoolExecutor() as pool:
        resolving = pool.submit(router.resolve, Call(1, "stream", key="k", model=None))
        assert bus.refused.wait(10)
        router.register([])
        assert resolving.result(10).api_url == "http://h:1"
    assert [each.get("token") for each in bus.sent(RESOLVE)] == ["stale", "minted-7d0c"]


@pytest.mark.parametrize(
    ("code", "told"), [(REJECTED, 1), (UNKNOWN, 1), ("TIMEOUT", 0), ("router/invalid_request", 0)]
)
def test_a_router_that_does_not_know_us_is_told_again(code, told):
    refusal = BusError(code, "no")
    router = client(Bus(router__provider__resolve=refusal, router__models__reconcile=refusal))
    heard = []
    router.on_refused = lambda: heard.append(None)
    with pytest.raises(ProviderError):
        router.resolve()
    assert len(heard) == told
    with pytest.raises(BusError):
        router.reconcile([])
    assert len(heard) == 2 * told


def test_an_abort_during_resolve_passes():
    bus = Bus(router__provider__resolve=Interrupted("abort"))
    with pytest.raises(Interrupted):
        client(bus).resolve()


KEY = {"type": "api_key", "key": " the-key "}


@pytest.mark.parametrize(
    ("answer", "own", "key", "source"),
    [
        ({"credential": KEY, "source": "config"}, "own", "the-key", "config"),
        ({"credential": {"type": "oauth", "access_token": "oauth-1"}}, None, "oauth-1", "none"),
        ({"credential": None}, "own-key", "own-key", "env"),
        ({}, "own-key", "own-key", "env"),
        ({}, None, None, "none"),
        ({"credential": {"type": "api_key", "key": "  "}}, None, None, "none"),
        ({"credential": None, "credential_error": "no such secret"}, "own", None, "none"),
        ({"credential": None, "credential_ref": "env://X"}, "own", None, "none"),
    ],
)
def test_which_key_counts(answer, own, key, source):
    resolved = read_resolved(answer, own)
    assert (resolved.key, resolved.source) == (key, source)
    assert key is None or key not in repr(resolved)


@pytest.mark.parametrize("answer", [None, [], {"credential": "x"}, {"api_url": 5}])
def test_an_answer_that_cannot_be_read_is_named(answer):
    with pytest.raises(BusError, match="provider/bad_resolve_response"):
        read_resolved(answer, None)


@pytest.mark.parametrize("value", [0, -1, True, "8", None, 1.5])
def test_an_odd_max_tokens_counts_as_none(value):
    assert read_resolved({"max_tokens": value}, None).max_tokens is None
