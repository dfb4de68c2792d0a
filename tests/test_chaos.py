"""A short run of the chaos, with a seed that never changes; ``make chaos`` runs longer ones."""

from __future__ import annotations

import sys

import pytest
from chaos.run import Run


@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_line_that_is_cut_costs_a_resumable_stream_nothing(tmp_path):
    pytest.importorskip("xllamacpp")
    with Run(5, 300, width=8, resume=True, log=tmp_path / "worker.log") as run:
        run.go(10.0)
    print(run.report())
    assert run.violations == []
    assert run.counts["chat cut"] > 5


@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_laws_hold_whatever_breaks(tmp_path):
    with Run(20, 300, every=25, log=tmp_path / "worker.log") as run:
        run.go(15.0)
    print(run.report())
    assert run.violations == []
    assert run.done > 30
