"""The manual's table of functions is that of the registered schemas."""

from functions_table import PAGE, page_with, table

from provider_llamacpp.surfaces.table import SURFACES


def test_the_table_is_that_of_the_schemas() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with(table(), page) == page, "run: python tests/functions_table.py"


def test_every_function_has_a_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for surface in SURFACES:
        assert f"* - ``{surface.name}``: " in page, "run: python tests/functions_table.py"


def test_it_reads_well() -> None:
    text = table()
    assert "| ``query`` string" in text
    assert "| ``top_n?`` integer\n" in text
    assert "list of (``index`` integer, ``relevance_score`` number)" in text
    assert "| ``writer_ref?`` channel\n" in text
    assert "| ``action?`` ``list`` or ``save`` or ``restore`` or ``erase``" in text
