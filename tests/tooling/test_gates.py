"""What is left to the gates because another case covers it: that case is there, and `make test` runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gates import PATTERNS, covered_by

ROOT = Path(__file__).parents[2]


def test_the_case_that_covers_another() -> None:
    name = "emulated/test_moe_plans.py::test_routings"
    assert covered_by(f"{name}[low latency-to_few]") == f"{name}[low latency-in_turn]"
    assert covered_by(f"{name}[low latency-in_turn]") is None


@pytest.mark.gate
def test_every_case_that_is_left_is_covered_by_one_that_is_run() -> None:
    """All tests are collected, in a process of its own."""
    collect = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "tests"]
    everything, run = (
        {
            line.removeprefix("tests/")
            for line in subprocess.run(
                [*collect, *options], cwd=ROOT, capture_output=True, text=True
            ).stdout.splitlines()
        }
        for options in ([], ["-m", "not gate"])
    )
    left = {case: covering for case in everything if (covering := covered_by(case))}
    assert not left.keys() & run
    assert {covering for covering in left.values() if covering not in run} == set()
    assert [p.pattern for p, _ in PATTERNS if not any(p.fullmatch(case) for case in left)] == []
