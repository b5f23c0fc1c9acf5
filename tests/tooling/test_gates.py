"""If a case is left to the gates because another case covers it, the covering case exists and `make test` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gates import covered, covered_by

ROOT = Path(__file__).parents[2]


def test_the_case_that_covers_another() -> None:
    in_turn = covered("(dispatched|low latency)-to_few", covering=r"[\1-in_turn]").mark
    activations = covered("gelu-.*", covering="test_activations[gelu]").mark
    name = "emulated/test_moe_plans.py::test_routings"
    assert covered_by(f"{name}[low latency-to_few]", [activations, in_turn]) == f"{name}[low latency-in_turn]"
    assert (
        covered_by(f"{name}[gelu-fused]", [activations, in_turn])
        == "emulated/test_moe_plans.py::test_activations[gelu]"
    )
    assert covered_by(f"{name}[low latency-in_turn]", [activations, in_turn]) is None
    assert covered_by(name, []) is None


@pytest.mark.gate
def test_every_covered_case_has_a_quick_coverer() -> None:
    """A separate process collects all tests."""
    process = subprocess.run([sys.executable, "-m", "tests.gates"], cwd=ROOT, capture_output=True, text=True)
    rows = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    run = {row["case"] for row in rows if not row["left"]}
    expressions = {(row["case"].partition("[")[0], cases): False for row in rows for cases in row["covering"]}
    for row in rows:
        for cases, covering in row["covering"].items():
            if covering is not None:
                expressions[row["case"].partition("[")[0], cases] = True
                assert row["left"] and covering in run, (row["case"], covering)
    assert len(expressions) > 30 and [e for e, matches in expressions.items() if not matches] == []
