"""Offline gate for the other GPUs: a selection of the cases in tests/offline/architectures.py, for every kind of GPU,
and the protocol's rules for acquires in code without bulk copies.
"""

from __future__ import annotations

import json

import pytest
import torch

import weft
from tests.emulated.cases_ops import OPS, SMALL_FUSED
from tests.offline import architectures
from weft import check
from weft.op import REGISTRY
from weft.plans import OneShot
from weft.scale import SMALL_GATHER, SMALL_SIGNALED

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
CHOSEN = (
    f"{RS} signaled",
    f"{AR} signaled, odd sizes",
    "to ranks signaled 1032",
    f"{AR} low latency",
)
NVLINK = (f"{AG} fused", f"{AR} fused, odd sizes", "all-reduce + norm two shots")
CASES = [(target, name) for target in ("sm_80", "sm_89", "sm_100", "sm_120") for name in CHOSEN]
CASES += [(target, name) for target in ("sm_80", "sm_100") for name in NVLINK]


@pytest.mark.gate
@pytest.mark.parametrize(("target", "name"), CASES)
def test_kernels_compile_for_other_gpus_and_keep_the_rules(target: str, name: str) -> None:
    row = architectures.judged(target, name)
    assert row["kernels"] and row["wrong"] == []


@pytest.mark.gate
@pytest.mark.parametrize("target", [80, 89])
def test_waits_stand_before_their_loads_without_bulk_copies(target: int) -> None:
    """The emulator's run determines the loads that need a wait."""

    def main(world: weft.World) -> None:
        x, w = torch.ones(32, 32).bfloat16(), torch.ones(64, 32).bfloat16()
        weft.all_gather_matmul(x, w, world=world, plan=SMALL_GATHER)
        for op in OPS[1:]:
            for plan in (SMALL_FUSED[op], SMALL_SIGNALED):
                getattr(weft, op)(x, w, world=world, plan=plan)
        weft.all_reduce(x, world=world, plan=OneShot(warps=4))
        world.synchronize()

    ran = check.search(main, 2, [0]).ran
    checked, refused = check.compile_and_check(ran, target)
    assert refused == [] and {one.name.split()[0] for one in checked} >= {
        "all_gather_gemm",
        "gemm_reduce",
        "signaled_gemm",
        "one_shot",
    }
    assert {one.name: one.problems for one in checked if one.problems} == {}
    assert ran.awaited, "some loads must need a wait"


def test_a_rule_that_is_broken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's tiles do not fit on Ada, and code for Hopper does not run on Ampere."""
    case = dict(architectures.cases(89))[f"{AR} signaled"]
    ((launch, k),) = [pair for pair in architectures.compiled(89, case) if pair[0].kernel.__name__ == "signaled_gemm"]
    assert architectures.outcome(launch, k, 89) == []
    large = type(k)(**{**vars(k), "shared": 131072, "spills": 8, "ptx": k.ptx.replace("cp.async.cg", "cp.async.bulk")})
    problems = " ".join(architectures.outcome(launch, large, 89))
    assert all(
        part in problems for part in ("131072 bytes", "spills 8", "cp.async.bulk is Hopper's", "not asynchronous")
    )


def test_the_record_has_existing_targets() -> None:
    """`make architectures` writes the record, which includes the cases that broke a rule; the page contains the
    record's table."""
    record = json.loads(architectures.RECORD.read_text())
    for triton, targets in record.items():
        assert triton.startswith("Triton 3.") and set(targets) <= set(architectures.TARGETS)
        for totals in targets.values():
            assert totals["launches"] > 20 and totals["date"] and isinstance(totals["wrong"], dict)
    assert {"sm_80", "sm_89"} <= set(record["Triton 3.6.0"])


def test_every_op_with_a_gemm_is_compiled() -> None:
    names = {name.split()[0] for name, _ in architectures.cases(80)}
    assert {op for op, op_type in REGISTRY.items() if op_type.collective and op != "matmul_all_to_all"} <= names
