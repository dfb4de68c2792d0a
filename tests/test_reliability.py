"""What ``docs/reliability.rst`` says is held by a test is held by one that exists."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_line_of_the_threat_model_has_its_test():
    table = (ROOT / "docs" / "reliability.rst").read_text().split("Threat model\n")[1]
    rows = re.split(r"\n   \* - ", table)[2:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"``(tests/\w+\.py)::(\w+)``", row)
        assert named, f"no test holds: {row}"
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name} is not there"


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
