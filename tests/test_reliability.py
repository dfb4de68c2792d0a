"""What ``docs/reliability.rst`` says is held by a test is held by one that exists."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


PAGE = (ROOT / "docs" / "reliability.rst").read_text(encoding="utf-8")
TEST = re.compile(r"``(tests/[\w/]+\.py)::(\w+)``")


@pytest.mark.parametrize("title", ["Bounds", "Threat model"])
def test_every_line_of_the_table_has_its_test(title):
    table = PAGE.split(f"\n{title}\n")[1].split("\n---")[0]
    rows = re.split(r"\n   \* - ", table)[2:]
    assert len(rows) > 8
    for row in rows:
        assert TEST.search(row), f"no test holds: {row}"


def test_every_test_and_file_that_is_named_is_there():
    named = TEST.findall(PAGE)
    assert len(named) > 50
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"
    for page in (PAGE, (ROOT / "SECURITY.rst").read_text(encoding="utf-8")):
        for path in re.findall(r"``((?:tests|docs|requirements|packaging)/[\w./-]*)", page):
            assert (ROOT / path).exists(), path


def test_every_target_that_is_named_is_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"``make ([a-z]+)", PAGE):
        assert f"\n{target}:" in makefile, target


def test_every_dependency_is_pinned_with_its_digests():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = [
        line
        for line in setup["options"]["install_requires"].splitlines()
        if line.strip() and not line.startswith("#")
    ]
    given = (ROOT / "requirements" / "runtime.in").read_text().splitlines()
    assert [line for line in given if not line.startswith("#")] == wanted
    pins = re.split(r"\n(?=\w)", (ROOT / "requirements" / "runtime.txt").read_text())[1:]
    for pin in pins:
        assert re.match(r"[a-z0-9-]+==[\w.]+ \\\n", pin), pin
        assert "--hash=sha256:" in pin, pin
    names = {pin.split("==")[0] for pin in pins}
    assert {line.split(" ")[0] for line in wanted} <= names
