"""What is remembered of the server's state."""

import pytest

from provider_llamacpp.errors import ProviderError
from provider_llamacpp.server.catalog import Catalog, model_info
from provider_llamacpp.server.health import MOST_MODELS, Health


def catalog(*states, **more):
    models = []
    for number, state in enumerate(states):
        props = {"is_sleeping": state == "sleeping", "total_slots": 2}
        row = {"id": f"m{number}", "meta": {"n_ctx": 4096}}
        if state not in ("loaded", "sleeping"):
            row["status"] = {"value": state}
        models.append(model_info(row, props))
    return Catalog("llamacpp", tuple(models), build="b1", **more)


def test_nothing_is_known_before_it_was_asked():
    facts = Health().facts(5.0)
    assert (facts["state"], facts["seconds"], facts["asked"]) == ("unknown", None, None)
    assert facts["models"] == []
    assert facts["build"] is facts["slots"] is facts["url"] is None


def test_a_server_with_its_model():
    facts = Health().answered("http://h:1", catalog("loaded"), 10.0).facts(12.5)
    assert facts == {
        "state": "ready",
        "seconds": 2.5,
        "asked": 2.5,
        "url": "http://h:1",
        "problem": None,
        "build": "b1",
        "router_mode": False,
        "slots": 2,
        "models": [{"id": "m0", "state": "loaded", "context_window": 4096, "slots": 2}],
        "more_models": 0,
    }


@pytest.mark.parametrize(
    ("served", "state"),
    [
        (catalog("sleeping"), "sleeping"),
        (catalog("loading"), "loading"),
        (catalog("downloading"), "loading"),
        (catalog(), "no model"),
        (catalog(refused=True), "refused"),
        (catalog("unloaded", router_mode=True), "ready"),
        (catalog("loading", "unloaded"), "ready"),
    ],
)
def test_states_of_a_server_that_answers(served, state):
    assert Health().answered("http://h:1", served, 1.0).state == state


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (ProviderError("transient", "not reachable"), "away"),
        (ProviderError("transient", "Loading model", status=503), "loading"),
        (ProviderError("transient", "no backend", status=503), "failing"),
        (ProviderError("permanent", "a web page", status=404), "failing"),
    ],
)
def test_states_of_a_server_that_cannot_be_asked(error, state):
    health = Health().failed(error, 1.0)
    assert (health.state, health.problem) == (state, error.message)


def test_since_when_it_is_in_its_state():
    away = ProviderError("transient", "not reachable")
    health = Health().answered("http://h:1", catalog("loaded"), 10.0)
    health = health.answered("http://h:1", catalog("loaded"), 20.0)
    assert (health.since, health.asked) == (10.0, 20.0)
    health = health.failed(away, 30.0).failed(away, 40.0)
    assert (health.since, health.asked) == (30.0, 40.0)
    # What it served is still told, and where it was.
    facts = health.facts(41.0)
    assert (facts["url"], facts["build"], facts["seconds"]) == ("http://h:1", "b1", 11.0)
    assert health.answered("http://h:1", catalog("loaded"), 50.0).since == 50.0


def test_a_long_list_of_models_is_cut():
    health = Health().answered("h", catalog(*["unloaded"] * (MOST_MODELS + 3)), 1.0)
    facts = health.facts(1.0)
    assert (len(facts["models"]), facts["more_models"], facts["slots"]) == (MOST_MODELS, 3, None)
