"""The five steps of CONTRIBUTING.rst, taken as they are written there, in a copy of the project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.rst"
COPIED = ("provider_llamacpp", "tests", "docs", "pyproject.toml", "iii-permissions.yaml")
COPIED += ("CHANGES.rst", "CONTRIBUTING.rst")

ON_THE_BUS = """
from peers import ScriptedServer, answer_json
from provider_llamacpp import Settings
from provider_llamacpp.commands.caller import Caller
from provider_llamacpp.local.stack import LocalStack

routes = {
    "/health": answer_json({"status": "ok"}),
    "/v1/models": answer_json({"data": [{"id": "demo", "object": "model"}]}),
    "/apply-template": answer_json({"prompt": "<user>Hello"}),
}
with ScriptedServer(routes=routes) as server:
    with LocalStack(Settings(api_url=server.url)) as stack, Caller(stack.settings) as caller:
        print(caller.call("provider::llamacpp::preview", {"content": "Hello"}, timeout=60.0))
"""

pytestmark = pytest.mark.timeout(240)


def steps() -> list[str]:
    """The text of each step."""
    heading, behind = r"\nAdd a bus function\n-+\n", r"\n\S[^\n]*\n-{4,}\n"
    section = re.split(behind, re.split(heading, PAGE.read_text(encoding="utf-8"))[1])[0]
    parts = re.split(r"^(\d)\. ", section, flags=re.MULTILINE)
    assert parts[1::2] == ["1", "2", "3", "4", "5"]
    return parts[2::2]


def blocks(step: str) -> list[tuple[str, str]]:
    """Each block of a step, with the name of a file that came last before it."""
    found = []
    parts = re.split(r"::\n\n((?: {4}[^\n]*\n|\n)+)", step)
    for words, block in zip(parts[::2], parts[1::2], strict=False):
        files = re.findall(r"``([\w/-]+\.(?:py|json|yaml))``", words)
        found.append((files[-1] if files else "", textwrap.dedent(block).strip("\n") + "\n"))
    return found


def run(where: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=where,
        env={**os.environ, "PYTHONPATH": f"{where}{os.pathsep}{where / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def put_in(path: Path, before: str, line: str) -> None:
    """Add a line in front of the first one that starts with ``before``."""
    text = path.read_text(encoding="utf-8")
    head, found, tail = text.partition(before)
    assert found, f"{path.name} has no {before!r}"
    path.write_text(head + line + found + tail, encoding="utf-8")


def check_style(where: Path, name: str) -> None:
    """What a page shows must be what the tools take."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent))
    if ruff is not None:
        for arguments in (["check", "--quiet"], ["format", "--check", "--quiet"]):
            done = subprocess.run(
                [ruff, *arguments, name], cwd=where, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "terminal", ".*")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=ignore)
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


@pytest.mark.thorough
def test_the_five_steps_make_a_bus_function(copy: Path) -> None:
    write, describe, register, test, write_down = steps()

    ((name, code),) = blocks(write)
    assert not (copy / name).exists()
    (copy / name).write_text(code, encoding="utf-8")
    check_style(copy, name)

    ((name, entry),) = blocks(describe)
    schemas = json.loads((copy / name).read_text(encoding="utf-8"))
    schemas |= json.loads(f"{{{entry}}}")
    (copy / name).write_text(json.dumps(schemas, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    (table, line), (rules, rule) = blocks(register)
    put_in(copy / table, ")\n\n\ndef allowed(", f"    {line}")
    check_style(copy, table)
    with (copy / rules).open("a", encoding="utf-8") as file:
        file.write(f"  {rule}")

    ((name, tests),) = blocks(test)
    (copy / name).write_text(tests, encoding="utf-8")
    check_style(copy, name)

    (_, command), *_ = blocks(write_down)
    put_in(copy / "docs/architecture.rst", "``.thinking``  ", "``.preview``             a prompt\n")
    run(copy, *command.split()[1:])

    asked = re.search(r"Then ``pytest ([^`]+)``", write_down)
    assert asked is not None
    files = asked[1].split()
    assert [file for file in files if not (copy / file).exists()] == []
    chosen = "preview or page or table or row or map or agents or schemas"
    pytest_options = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", chosen)
    assert " passed" in run(copy, *pytest_options, *files)
    assert run(copy, "-W", "error", "-c", ON_THE_BUS) == "{'prompt': '<user>Hello'}\n"


def test_the_page_is_one_page() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 170
    assert max(map(len, lines)) <= 100
