"""Fuzz one target by coverage: ``python -m tests.fuzz.atheris_driver TARGET -max_total_time=60``.

Needs ``atheris`` (the extra ``fuzz``). All further arguments are libFuzzer's. A failing input is
written beside ``-artifact_prefix`` and belongs into ``tests/test_fuzz.py``, under a name.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' own helpers are no package

import atheris

with atheris.instrument_imports(include=["provider_llamacpp"]):
    from fuzz.targets import TARGETS


def main() -> None:
    name = sys.argv.pop(1)
    logging.disable(logging.CRITICAL)
    target = TARGETS[name]
    atheris.Setup(sys.argv, lambda data: target(data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
