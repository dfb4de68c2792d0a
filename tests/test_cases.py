"""Every case of ``cases/cases.jsonl``, replayed through the running worker."""

import pytest
from case_bus import run_bus_case
from case_runner import load_cases, run_case

CASES = load_cases()


def test_the_file_holds_every_case_once():
    assert len(CASES) == 42
    assert len({case["id"] for case in CASES}) == len(CASES)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case, tmp_path):
    bus = "bus" in (case["call"] or {})
    found = run_bus_case(case, tmp_path) if bus else run_case(case, tmp_path)
    assert not found, "\n".join([case["why"], *found])
