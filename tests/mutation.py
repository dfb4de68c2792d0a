"""The mutation score of the pure modules, by their unit tests: ``python -m tests.mutation``.

Needs ``mutmut`` (3.8 or newer). Each module is changed in a copy of the tree, so nothing here is
touched; of its mutants a sample is drawn from the seed, the same each time while the module stays
as it is. Prints the table of ``docs/reliability.rst`` and writes what survived to
``build/mutation.txt``. A mutant that makes the tests hang counts as killed. Fails if the tests of a
module do not even pass on what was not changed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = {
    "jsontext": "jsontext arguments payloads",
    "fields": "fields payloads",
    "payloads": "payloads",
    "transcript/arguments": "arguments",
    "transcript/names": "names",
    "transcript/rows": "rows",
    "transcript/convert": "convert",
    "events/sse": "sse",
    "events/classify": "classify",
    "events/slices": "slices",
    "events/template": "template",
    "events/toolcalls": "toolcalls turn",
    "events/prefill": "prefill",
    "events/snapshot": "snapshot turn",
    "events/turn": "turn",
    "events/assembler": "assembler",
    "bus/frames": "frames",
    "bus/wire": "wire",
    "server/address": "address",
    "server/body": "body",
    "server/catalog": "catalog",
    "server/health": "health",
}
"""Modules, and the names of the tests that are theirs."""
COPIED = ("provider_llamacpp", "tests", "docs", "setup.cfg", "pyproject.toml")
KILLED = (1, 3, 24, 36, 255, -24, -9, 152)
"""Exit codes of tests that failed, could not be collected, or did not end."""


class Module:
    """One module, in a copy of the tree."""

    def __init__(self, name: str, place: Path) -> None:
        self.name = name
        self.place = place
        for each in COPIED:
            source = ROOT / each
            if source.is_dir():
                skip = shutil.ignore_patterns("__pycache__", "chaos", "build")
                shutil.copytree(source, place / each, ignore=skip)
            else:
                shutil.copy(source, place / each)
        tests = "".join(f"\n    tests/test_{each}.py" for each in MODULES[name].split())
        with (place / "setup.cfg").open("a") as config:
            config.write(
                f"\n[mutmut]\nsource_paths=provider_llamacpp/{name}.py\n"
                f"also_copy=\n    docs\n    provider_llamacpp\n"
                f"pytest_add_cli_args_test_selection={tests}\n"
                "pytest_add_cli_args=\n    -x\n    -p\n    no:cacheprovider\n"
            )

    def mutmut(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "mutmut", *arguments],
            cwd=self.place,
            capture_output=True,
            text=True,
        )
        return done.stdout + done.stderr

    def results(self) -> dict[str, int | None]:
        """Exit codes by mutant; None: not run."""
        meta = self.place / "mutants" / "provider_llamacpp" / f"{self.name}.py.meta"
        found: dict[str, int | None] = json.loads(meta.read_text())["exit_code_by_key"]
        return found

    def survivors(self, found: dict[str, int | None]) -> Iterator[str]:
        for name, code in found.items():
            if code is not None and code not in KILLED:
                yield self.mutmut("show", name)


def brief(said: str) -> str:
    """The end of what a tool said, without the long lines: mutmut lists every test in one."""
    lines = [line if len(line) <= 200 else f"{line[:200]} ..." for line in said.splitlines()]
    return "\n".join(lines[-40:])


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    top.add_argument("modules", nargs="*", help="such as events/sse (default: all)")
    top.add_argument("--sample", type=int, default=25, help="mutants of each (default 25)")
    top.add_argument("--seed", type=int, default=6)
    top.add_argument("--children", type=int, default=1, help="processes at once")
    top.add_argument("--report", type=Path, default=ROOT / "build" / "mutation.txt")
    options = top.parse_args()
    report: Path = options.report
    report.parent.mkdir(exist_ok=True)
    failed = False
    print("module                  mutants  tried  killed  survived", flush=True)
    with report.open("w") as out:
        for name in options.modules or MODULES:
            with tempfile.TemporaryDirectory() as place:
                module = Module(name, Path(place))
                # Names that match nothing: the mutants are made, and none is run.
                said = module.mutmut("run", "none")
                try:
                    names = sorted(module.results())
                except OSError:
                    failed = True
                    print(f"{name}: {brief(said)}", flush=True)
                    continue
                rng = random.Random(f"{options.seed} {name}")
                chosen = rng.sample(names, min(options.sample, len(names)))
                said = module.mutmut("run", "--max-children", str(options.children), *chosen)
                found = {key: code for key, code in module.results().items() if key in chosen}
                tried = {key: code for key, code in found.items() if code is not None}
                if not tried:
                    failed = True
                    print(f"{name}: {brief(said)}", flush=True)
                    continue
                killed = sum(code in KILLED for code in tried.values())
                counts = f"{len(names):7}  {len(tried):5}  {killed:6}  {len(tried) - killed:8}"
                print(f"{name:22}  {counts}", flush=True)
                for words in module.survivors(tried):
                    out.write(f"{name}\n{words}\n\n")
                out.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
