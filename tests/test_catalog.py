"""Catalog rows and capabilities, from what real servers said and from what others might say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import recorded_json

from provider_llamacpp.server.catalog import (
    FALLBACK_CONTEXT,
    Catalog,
    ModelInfo,
    Probes,
    billions,
    launch_options,
    model_info,
)
from provider_llamacpp.transcript.convert import Abilities

EFFORT = recorded_json("props-template-with-effort")
TOOLS = recorded_json("props-template-with-tools")
PLAIN = recorded_json("props-template-plain")
UNKNOWN = Probes()
KEYS = [
    "id",
    "meta",
    "status",
    "args",
    "preset",
    "value",
    "n_ctx",
    "architecture",
    "chat_template_caps",
    "modalities",
    "aliases",
    "default_generation_settings",
    "input_modalities",
    "output_modalities",
    "supports_tools",
    "failed",
]


def info(row: dict[str, Any], props: Any = None, probes: Probes = UNKNOWN) -> ModelInfo:
    found = model_info(row, props or {}, probes)
    assert found is not None
    return found


def record(row: dict[str, Any], props: Any = None, probes: Probes = UNKNOWN) -> dict[str, Any]:
    return info({"id": "m", **row}, props, probes).record("llamacpp").to_dict()


def router_row(*args: str, value: str = "unloaded", **more: Any) -> dict[str, Any]:
    return {"id": "m", "status": {"value": value, "args": ["llama-server", *args]}, **more}


def catalog(*rows: dict[str, Any], router_mode: bool = False) -> Catalog:
    return Catalog("llamacpp", tuple(map(info, rows)), router_mode=router_mode)


# -- context ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "props", "context"),
    [
        ({"meta": {"n_ctx": 2048, "n_ctx_train": 8192}}, {}, 2048),
        ({"meta": {"n_ctx": 2048}, "context_length": 1, "max_model_len": 1}, {}, 2048),
        ({"context_length": 128000, "max_model_len": 5}, {}, 128000),
        ({"context_length": "128000"}, {}, 128000),
        ({"context_length": 128000.0}, {}, 128000),
        ({"max_model_len": 5000}, {"default_generation_settings": {"n_ctx": 7}}, 5000),
        (router_row("--ctx-size", "65536"), {"n_ctx": 7}, 65536),
        (router_row("-c", "8192"), {}, 8192),
        (router_row("--ctx-size=8192"), {}, 8192),
        (router_row("-c", "8192", "-np", "4"), {}, 2048),
        (router_row("-c", "8192", "--parallel", "2"), {}, 4096),
        (router_row("-c", "8192", "-np", "-1"), {}, 8192),
        (router_row("-c", "8192", "--kv-unified", "-np", "4"), {}, 8192),
        (router_row("-c", "8192", "-kvu", "-np", "4"), {}, 8192),
        (router_row("-c", "0"), {}, None),
        (router_row("-c", "2", "-np", "4"), {}, None),
        (router_row("-c"), {}, None),
        (router_row("--no-mmap", "-c", "512", "-x"), {}, 512),
        ({"status": {"preset": "[m]\nctx-size = 4096\nparallel = 2\n"}}, {}, 2048),
        ({"status": {"preset": "LLAMA_ARG_CTX_SIZE=4096\nLLAMA_ARG_N_PARALLEL=4"}}, {}, 1024),
        ({"status": {"preset": "; c = 1\n# c = 2\nno equals\n"}}, {}, None),
        ({"status": {"preset": "c = 1", "args": ["-c", "512"]}}, {}, 512),
        ({}, {"default_generation_settings": {"n_ctx": 1024}, "n_ctx": 7}, 1024),
        ({}, {"default_generation_settings": {"n_ctx": 0}, "n_ctx": 7}, 7),
        ({"meta": {"n_ctx_train": 262144}}, {}, None),
        ({"meta": {"n_ctx": True}}, {}, None),
        ({"meta": {"n_ctx": -5}, "context_length": 10**12}, {}, None),
        ({"meta": "text", "context_length": [1], "status": "loaded"}, {"n_ctx": "x"}, None),
        ({"status": {"args": "text", "preset": ["x"]}}, {"default_generation_settings": 1}, None),
        ({"status": {"args": [None, 3, "-c", "512"]}}, {}, 512),
    ],
)
def test_the_first_source_that_tells_a_context_wins(
    row: dict[str, Any], props: dict[str, Any], context: int | None
) -> None:
    found = info({"id": "m", **row}, props)
    assert found.abilities.context_window == context
    assert found.context_window == (context or FALLBACK_CONTEXT)


@pytest.mark.parametrize(
    ("context", "most"), [(65536, 8192), (16384, 8192), (16383, 8191), (512, 256), (1, 0)]
)
def test_an_answer_leaves_room_for_the_prompt(context: int, most: int) -> None:
    assert record({"context_length": context})["max_output_tokens"] == most < context


def test_options_that_are_switched_off_do_not_count() -> None:
    row = {"status": {"preset": "embeddings = off\nrerank = 0\nparallel = 3"}}
    assert launch_options(row) == {"parallel": "3"}


# -- capabilities -----------------------------------------------------------------------------


def test_a_server_that_says_nothing_can_do_what_most_can() -> None:
    assert record({}) == {
        "id": "m",
        "provider": "llamacpp",
        "context_window": 4096,
        "max_output_tokens": 2048,
        "supports_tools": True,
        "supports_structured_output": True,
    }
    assert info({"id": "m"}).abilities == Abilities()


def test_the_template_decides_on_tools() -> None:
    assert record({}, PLAIN)["supports_tools"] is False
    assert record({}, TOOLS)["supports_tools"] is True
    abilities = info({"id": "m"}, TOOLS).abilities
    assert abilities == Abilities(
        tools=True,
        parallel_tool_calls=True,
        reasoning_effort=False,
        preserve_reasoning=True,
        system_role=True,
        vision=False,
        audio=False,
        context_window=TOOLS["default_generation_settings"]["n_ctx"],
    )


@pytest.mark.parametrize(
    ("props", "switch", "thinking", "off", "efforts"),
    [
        ({}, None, None, None, None),
        ({}, True, True, True, None),
        ({}, False, None, None, None),
        (PLAIN, None, None, None, None),
        (PLAIN, False, False, None, None),
        (PLAIN, True, True, True, None),
        (TOOLS, False, None, None, None),
        (EFFORT, None, True, None, ["low", "medium", "high"]),
        (EFFORT, False, True, False, ["low", "medium", "high"]),
        (EFFORT, True, True, True, ["low", "medium", "high"]),
    ],
)
def test_thinking_is_told_as_far_as_it_is_known(
    props: dict[str, Any],
    switch: bool | None,
    thinking: bool | None,
    off: bool | None,
    efforts: list[str] | None,
) -> None:
    told = record({}, props, Probes(thinking_switch=switch))
    assert told.get("supports_thinking") is thinking
    assert told.get("supports_thinking_off") is off
    assert told.get("reasoning_efforts") == (
        [{"effort": each} for each in efforts] if efforts else None
    )
    assert "supports_xhigh" not in told


def test_rare_efforts_are_told_where_the_template_names_them() -> None:
    template = "{% if reasoning_effort in ['minimal', \"xhigh\"] %}"
    told = record({}, {**EFFORT, "chat_template": template})
    levels = [each["effort"] for each in told["reasoning_efforts"]]
    assert levels == ["minimal", "low", "medium", "high", "xhigh"]
    assert told["supports_xhigh"] is True
    assert "reasoning_efforts" in record({}, {**EFFORT, "chat_template": None})


@pytest.mark.parametrize(
    ("row", "props", "vision", "audio"),
    [
        ({}, {}, None, None),
        ({}, {"modalities": {"vision": True, "audio": False}}, True, False),
        ({"architecture": {"input_modalities": ["text", "image"]}}, {}, True, False),
        ({"architecture": {"input_modalities": ["audio"]}}, {}, False, True),
        (
            {"architecture": {"input_modalities": ["text", "image"]}},
            {"modalities": {"vision": False}},
            False,
            False,
        ),
        ({"architecture": {"input_modalities": "text"}}, {"modalities": [1]}, None, None),
    ],
)
def test_what_a_model_reads(
    row: dict[str, Any], props: dict[str, Any], vision: bool | None, audio: bool | None
) -> None:
    found = info({"id": "m", **row}, props)
    assert (found.abilities.vision, found.abilities.audio) == (vision, audio)
    assert found.record("p").supports_vision is vision


@pytest.mark.parametrize(
    ("row", "props", "probes", "offered"),
    [
        ({}, {}, Probes(), True),
        ({"architecture": {"output_modalities": ["text"]}}, {}, Probes(), True),
        ({"architecture": {"output_modalities": ["decisions"]}}, {}, Probes(), False),
        (router_row("--embeddings"), {}, Probes(), False),
        (router_row("--embedding"), {}, Probes(), False),
        (router_row("--reranking"), {}, Probes(), False),
        (router_row("--pooling", "rank"), {}, Probes(), False),
        (router_row("--pooling", "mean"), {}, Probes(), True),
        ({"tags": ["Embedding"]}, {}, Probes(), False),
        ({"tags": ["embedding"]}, {}, Probes(embeddings=False), True),
        ({"tags": ["reranker", 7]}, {}, Probes(), False),
        ({"tags": "rerank"}, {}, Probes(), True),
        ({"status": {"preset": "rerank = 1"}}, {}, Probes(), False),
        ({"status": {"preset": "embeddings = 0"}}, {}, Probes(), True),
        ({}, PLAIN, Probes(embeddings=True), False),
        ({}, PLAIN, Probes(embeddings=False), True),
        ({}, TOOLS, Probes(embeddings=True), True),
        ({}, PLAIN, Probes(embeddings=True, thinking_switch=True), True),
        ({}, EFFORT, Probes(embeddings=True), True),
    ],
)
def test_only_models_that_chat_are_offered(
    row: dict[str, Any], props: dict[str, Any], probes: Probes, offered: bool
) -> None:
    found = info({"id": "m", **row}, props, probes)
    assert found.for_chat is offered
    listed = Catalog("p", (found,))
    assert [each["id"] for each in listed.records()] == ["m"] * offered
    assert listed.ranked_ids() == ["m"] * offered
    assert listed.knows("m")


def test_launch_options_tell_of_embeddings_where_nobody_asked() -> None:
    assert info(router_row("--embeddings")).embeddings is True
    assert info(router_row("--embeddings"), {}, Probes(embeddings=False)).embeddings is False
    assert info({"id": "m"}).embeddings is None


@pytest.mark.parametrize(
    ("tags", "props", "tools", "vision", "thinking"),
    [
        (["tools", " Vision ", "thinking"], {}, True, True, True),
        (["local", "test"], {}, None, None, None),
        # A tag speaks only where the server is silent.
        (["vision"], {"modalities": {"vision": False}}, None, False, None),
        (["tools"], {"chat_template_caps": {"supports_tools": False}}, False, None, None),
    ],
)
def test_tags_tell_what_the_server_does_not(
    tags: list[str],
    props: dict[str, Any],
    tools: bool | None,
    vision: bool | None,
    thinking: bool | None,
) -> None:
    found = info({"id": "m", "tags": tags}, props).abilities
    assert (found.tools, found.vision, found.thinking_switch) == (tools, vision, thinking)


# -- states -----------------------------------------------------------------------------------


def states(name: str) -> dict[str, tuple[str, int | None]]:
    found = map(info, recorded_json(name)["data"])
    return {each.id: (each.state, each.exit_code) for each in found}


def test_states_of_a_server_in_router_mode() -> None:
    assert set(states("router-models-initial").values()) == {("unloaded", None)}
    assert states("router-models-loaded")["tiny-chat"] == ("loaded", None)
    assert ("loading", None) in states("router-models-loading").values()
    assert states("router-models-sleeping")["tiny-chat"] == ("sleeping", None)
    assert states("router-models-failed")["broken"] == ("failed", 1)


def test_states_that_are_new_or_missing() -> None:
    assert info(router_row(value="downloaded")).state == "unloaded"
    assert info(router_row(value="downloading")).state == "downloading"
    assert info(router_row(value="something-new")).state == "unloaded"
    assert info({"id": "m", "status": {"value": ["x"]}}).state == "unloaded"
    assert info({"id": "m"}).state == "loaded"
    assert info({"id": "m"}, recorded_json("sleep-props")).state == "sleeping"


def test_a_recorded_catalog_of_one_model() -> None:
    (row,) = recorded_json("models-single")["data"]
    found = info(row, TOOLS)
    assert found.id == "/srv/models/tiny-chat.gguf"
    assert found.aliases == ("/srv/models/tiny-chat.gguf",)
    assert found.context_window == row["meta"]["n_ctx"]
    assert found.slots == TOOLS["total_slots"]
    assert info(row, recorded_json("props-auto-slots")).slots == 4


def test_a_recorded_catalog_of_many_models() -> None:
    rows = recorded_json("router-presets-models")["data"]
    listed = catalog(*rows, router_mode=True)
    assert [each["context_window"] for each in listed.records()][:3] == [2048, 1024, 4096]
    found = listed.find("chat-small")
    assert found is not None
    assert found.id == "tiny-chat"


@pytest.mark.parametrize("row", [{}, {"id": ""}, {"id": 7}, {"id": None}])
def test_a_row_without_a_name_is_no_model(row: dict[str, Any]) -> None:
    assert model_info(row, {}) is None


# -- looking up and ranking -------------------------------------------------------------------


def test_a_server_of_one_model_answers_to_any_name() -> None:
    one = catalog({"id": "m", "aliases": ["a", 7], "context_length": 512})
    assert one.abilities("whatever").context_window == 512
    assert one.knows("m")
    assert one.knows("a")
    assert not one.knows("whatever")
    assert Catalog("p").abilities("m") == Abilities()


def test_a_server_of_many_models_answers_to_their_names_only() -> None:
    one = catalog({"id": "m"}, router_mode=True)
    assert one.find("m") is not None
    assert one.find("whatever") is None
    assert catalog({"id": "a"}, {"id": "b"}).find("c") is None


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("qwen3-8b", 8),
        ("org/chat-9B-GGUF:Q4_K_M", 9),
        ("llama-3.2-1.5B", 1.5),
        ("30B-A3B", 30),
        ("8x7B", -1),
        ("7Bit", -1),
        ("b7", -1),
        ("gpt-oss-20b_high", 20),
        ("٣b", -1),
        ("", -1),
    ],
)
def test_sizes_that_names_tell(name: str, size: float) -> None:
    assert billions(name) == size


def test_loaded_models_come_first_then_the_largest_and_failed_ones_last() -> None:
    listed = catalog(
        {**router_row(), "id": "small-1b"},
        {**router_row(), "id": "nameless"},
        {**router_row(value="loaded"), "id": "running-2b"},
        {**router_row(), "id": "large-70b"},
        {**router_row(value="loaded"), "id": "running-8b"},
        {"id": "gone-400b", "status": {"value": "unloaded", "failed": True, "exit_code": 1}},
        {**router_row(), "id": "other-1b"},
        router_mode=True,
    )
    assert listed.ranked_ids() == [
        "running-8b",
        "running-2b",
        "large-70b",
        "small-1b",
        "other-1b",
        "nameless",
        "gone-400b",
    ]


# -- robustness -------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=3), JSON), JSON, JSON, JSON)
def test_any_row_gives_a_record_or_none(
    row: dict[str, Any], meta: Any, status: Any, p: Any
) -> None:
    found = model_info(
        {"id": "m", "meta": meta, "status": status, **row}, p if isinstance(p, dict) else {}
    )
    if found is not None:
        told = found.record("llamacpp").to_dict()
        json.dumps(told, allow_nan=False)
        assert 0 <= told["max_output_tokens"] < told["context_window"]


def test_reading_a_catalog_imports_no_record_library() -> None:
    code = (
        "import sys, provider_llamacpp.server.catalog; sys.exit('dataclasses_json' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_an_option_without_a_value_does_not_take_the_next_for_one() -> None:
    row = {"id": "a", "status": {"args": ["--jinja", "--parallel", "3", "-c", "-1", "-fa", "--x"]}}
    found = launch_options(row)
    assert (found["jinja"], found["parallel"], found["x"]) == ("", "3", "")
    assert "-1" in found.values()


def test_where_none_is_named_the_best_of_those_that_run_answers() -> None:
    big, small = info({"id": "big-70b"}), info({"id": "small-1b"})
    for state, answers in (("sleeping", "small-1b"), ("loaded", "small-1b"), ("failed", "big-70b")):
        models = replace(big, state="unloaded"), replace(small, state=state)
        best = Catalog("p", models, router_mode=True).default()
        assert best is not None and best.id == answers
    assert Catalog("p").default() is None
