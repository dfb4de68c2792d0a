"""The public names stay what they are, unless the changelog says otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest
from public_api import ROOT, described, pinned, without_entry

import provider_llamacpp


def test_no_public_name_changed_unnoticed() -> None:
    now = described()
    changed = [
        name
        for name in sorted({*now, *pinned()})
        if now.get(name) != pinned().get(name, {}).get("is")
    ]
    assert not changed, (
        f"{', '.join(changed)}: not what it was. Say so in CHANGES.rst, under the rules of "
        "docs/embedding.rst, and run python tests/public_api.py"
    )


def test_every_change_has_its_entry() -> None:
    assert without_entry({name: each["since"] for name, each in pinned().items()}) == []


def test_a_name_without_an_entry_is_found() -> None:
    assert without_entry({"never_heard_of": provider_llamacpp.__version__}) == ["never_heard_of"]
    assert without_entry({"Settings": "0.0.0"}) == ["Settings"]


def test_every_public_name_has_words() -> None:
    for name in provider_llamacpp.__all__:
        value = getattr(provider_llamacpp, name)
        if callable(value):
            assert value.__doc__ and not value.__doc__.startswith(f"{name}("), name


def test_a_star_import_gives_all_of_them() -> None:
    code = "from provider_llamacpp import *; print(stream_chat, Settings, TextDelta)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", [each.name for each in (ROOT / "examples").glob("*.py")])
def test_examples_use_public_names_only(name: str) -> None:
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    inner = [
        line
        for line in text.splitlines()
        if line.startswith("from provider_llamacpp.") and name != "stage.py"
    ]
    assert inner == []
