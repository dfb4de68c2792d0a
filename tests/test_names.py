"""Ids survive the way to the server and back (provider protocol 8.1, names)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transcripts import RELAXED

from provider_llamacpp.transcript.names import LONGEST, NameTable

PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,128}")
# Few letters and the signs that matter, so that clashes are common.
IDS = st.text("ab_:é-. \ud83d", max_size=6) | st.text(max_size=300)


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("fs::read", "fs__read"),
        ("a::b::c", "a__b__c"),
        ("plain-Name_1", "plain-Name_1"),
        ("worker_v2__util::action", "worker_v2__util__action"),
        ("dots.and spaces", "dots_and_spaces"),
        ("größe::messen", "gr__e__messen"),
        ("", "_"),
    ],
)
def test_an_id_alone_gets_the_plain_name(id: str, name: str) -> None:
    table = NameTable([id])
    assert table.encode(id) == name
    assert table.decode(name) == id


def test_an_unknown_name_is_decoded_by_replacement() -> None:
    assert NameTable().decode("fs__read") == "fs::read"
    assert NameTable().decode("fs::read") == "fs::read"
    assert NameTable(["fs__read"]).decode("fs__write") == "fs::write"


@pytest.mark.parametrize("ids", [["a::b", "a__b"], ["a__b", "a::b"]])
def test_the_reversible_id_gets_the_name_that_two_want(ids: list[str]) -> None:
    table = NameTable(ids)
    assert table.encode("a::b") == "a__b"
    other = table.encode("a__b")
    assert re.fullmatch(r"a__b_[0-9a-f]{8}", other)
    assert table.decode(other) == "a__b"


def test_the_first_of_two_irreversible_ids_gets_the_name() -> None:
    table = NameTable(["a.b", "a b"])
    assert table.encode("a.b") == "a_b"
    assert table.decode(table.encode("a b")) == "a b"


def test_ids_of_the_history_join_later_and_move_nobody() -> None:
    table = NameTable(["a__b"])
    assert table.encode("a__b") == "a__b"
    late = table.encode("a::b")
    assert late != "a__b"
    assert table.decode(late) == "a::b"
    assert table.decode("a__b") == "a__b"


def test_long_ids_are_cut_and_stay_apart() -> None:
    first, second = "x" * 128 + "::one", "x" * 128 + "::two"
    table = NameTable([first, second, "x" * 128])
    names = {table.encode(id) for id in (first, second, "x" * 128)}
    assert len(names) == 3
    assert all(PATTERN.fullmatch(name) for name in names)
    assert table.encode("x" * 128) == "x" * 128


def test_a_name_that_is_taken_with_its_checksum_is_marked_again() -> None:
    marked = NameTable(["a__b", "a::b"]).encode("a__b")
    table = NameTable([marked, "a::b", "a__b"])
    assert table.encode(marked) == marked
    assert table.decode(table.encode("a__b")) == "a__b"
    assert table.encode("a__b") not in (marked, "a__b")


def test_an_id_keeps_its_name_from_request_to_request() -> None:
    ids = ["a::b", "a__b", "c d", "x" * 200]
    first, second = NameTable(ids), NameTable(reversed(ids))
    assert [first.encode(id) for id in ids] == [second.encode(id) for id in ids]


@RELAXED
@given(st.lists(IDS, max_size=12), st.lists(IDS, max_size=6))
def test_every_id_has_its_own_fitting_name_that_leads_back(
    tools: list[str], history: list[str]
) -> None:
    table = NameTable(tools)
    names = {id: table.encode(id) for id in [*tools, *history]}
    assert all(PATTERN.fullmatch(name) for name in names.values())
    assert len(set(names.values())) == len(names)
    assert all(table.decode(name) == id for id, name in names.items())
    assert all(table.encode(id) == name for id, name in names.items())


def test_a_name_that_is_too_long_keeps_what_fits_of_its_beginning() -> None:
    name = NameTable().encode("a b" * 60)
    assert len(name) == LONGEST
    assert name[: LONGEST - 9] == ("a_b" * 60)[: LONGEST - 9]
    assert name[LONGEST - 9] == "_"


def test_a_long_name_of_half_surrogates() -> None:
    first, second = "\ud800" * 200, "\ud801" * 200
    table = NameTable([first, second])
    assert table.encode(first) != table.encode(second)
    assert len(table.encode(first)) == LONGEST
