"""The tests that ``docs/llama-server.rst`` names are there, and each feature names one or says why
there is none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "llama-server.rst").read_text(encoding="utf-8")
TABLES = PAGE[PAGE.index("Every feature of llama-server") :]
NAMED = sorted(set(re.findall(r"``(test_\w+)::(test_\w+)``", PAGE)))
ROWS = [
    [re.sub(r"\s+", " ", cell).strip() for cell in re.split(r"\n     - ", row)]
    for table in re.findall(r"\.\. list-table::.*?\n\n(.*?)(?=\n\n)", TABLES + "\n\n", re.S)
    for row in ("\n" + table).split("\n   * - ")[2:]
]


@cache
def functions(module: str) -> set[str]:
    """The names of the test functions of a module, those in classes included."""
    tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
    return {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize(("module", "name"), NAMED)
def test_a_test_that_is_named_is_there(module: str, name: str) -> None:
    assert name in functions(module)


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:40] for row in ROWS])
def test_a_feature_has_its_test_or_its_reason(row: list[str]) -> None:
    feature, way, since, tests = row
    assert feature and way and since
    if way.startswith("not put to use: "):
        assert (since, tests) == ("–", "–")
    else:
        assert "::" in tests or tests.startswith("not tried for want of ")


def test_the_tables_were_read() -> None:
    assert len(NAMED) > 80
    assert len(ROWS) > 45
    assert not re.search(r"test_\w+::(?!test_\w)", PAGE)
