"""Which tiles a plan gets: the rule against what was measured of both main loops (bench/gemm.py), and which plans it touches."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

import weft
from weft.op import REGISTRY
from weft.ops import tiles
from weft.ops.tiles import suited
from weft.plans import Decomposed, Fused, OneShot, Plan, Sequential, Signaled

MEASURED = Path(__file__).parents[1] / "bench/results/nvidia-h200-x1/experiments/tile-forms.jsonl"
USUAL, HALF = "128x256 w8 s3 x1", "64x256 w4 s5 x1"
SMS = 132


def losses(loop: str, choose: object) -> list[float]:
    """By shape, how many times as long as the better form the chosen one takes."""
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    found = []
    for r in rows:
        us = {rows: r["us"].get(f"{loop} {form}") for rows, form in ((128, USUAL), (64, HALF))}
        if us[64]:
            found.append(us[choose(r["M"], r["N"])] / min(us.values()))  # type: ignore[operator]
    assert len(found) > 20
    return found


def by_rule(m: int, n: int) -> int:
    plan = suited(Fused(pullers=0), True, [m], n, SMS)
    assert isinstance(plan, Fused)
    return plan.block_m


@pytest.mark.parametrize("loop", ["flat", "told"])
def test_the_rule_costs_little_where_it_was_measured(loop: str) -> None:
    chosen, always, half = (losses(loop, rule) for rule in (by_rule, lambda m, n: 128, lambda m, n: 64))
    mean = lambda values: math.exp(fmean(map(math.log, values)))  # noqa: E731
    assert mean(chosen) < 1.005 and max(chosen) < 1.04, "two runs of one shape differ by as much, hot"
    assert mean(always) > 1.02 and max(always) > 1.2, "without it much is lost"
    assert mean(half) > 1.02


def test_waves() -> None:
    assert [tiles.waves(t, 10) for t in (0, 10, 20)] == [0, 1, 2]
    assert tiles.waves(3, 10) == 1, "a first wave takes its time"
    assert 1.9 < tiles.waves(11, 10) < tiles.waves(19, 10) < 2


def test_rows_of_a_shard_are_cut_by_themselves() -> None:
    assert tiles.time(128, [1] * 8, 256, 4) == tiles.time(128, [128] * 8, 256, 4) == 2


def test_tiles_span_shards_where_the_kernel_lets_them() -> None:
    """8 x 64 rows are 4 tiles of 128 in an all-gather, which fill one wave, and 8, half of each empty, in sums."""
    shards, n = [64] * 8, 256 * 32
    assert suited(Fused(), True, shards, n, SMS) == Fused()
    assert suited(Signaled(ctas=4, copies=True), False, shards, n, SMS) == Signaled(ctas=4, copies=True)
    assert suited(Fused(), False, shards, n, SMS) != Fused()


FEW = [1024, 1024], 2752  # 176 tiles on 132 SMs


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_every_fused_variant_gets_them(op: str) -> None:
    gathers = op == "all_gather_matmul"
    for plan in REGISTRY[op].variants:
        assert isinstance(plan, Fused)
        got = suited(plan, gathers, *FEW, SMS)
        assert isinstance(got, Fused) and (got.block_m, got.block_n, got.per_sm) == (64, 256, 1)
        assert got.pullers == plan.pullers // plan.per_sm and got.forward == plan.forward
        if not gathers:
            assert got.stages == 4, "room for what sums beside it"
        assert suited(plan, gathers, [4096, 4096], 4096, SMS) == plan, "many waves"
        assert suited(got, gathers, *FEW, SMS) == got


OTHERS: list[Plan] = [
    Sequential(), Decomposed(), OneShot(), Fused(block_m=64), Fused(block_n=128), Signaled(groups=(1, 1)),
    Signaled(block_n=128, warps=4),
]  # fmt: skip


@pytest.mark.parametrize("plan", OTHERS, ids=str)
def test_other_plans_are_left_as_they_are(plan: Plan) -> None:
    assert suited(plan, True, *FEW, SMS) == suited(plan, False, *FEW, SMS) == plan


def test_signaled_plans_keep_what_their_groups_mean() -> None:
    assert suited(Signaled(ctas=4, copies=True), False, *FEW, SMS) == replace(
        Signaled(ctas=4, copies=True), block_m=64, warps=4, stages=5
    )


def test_kinds_by_name_get_them_and_plans_do_not() -> None:
    def main(world: weft.World) -> list[Plan]:
        import torch

        op = REGISTRY["all_gather_matmul"]
        x, w = torch.zeros(1024, 64, dtype=torch.bfloat16), torch.zeros(2752, 64, dtype=torch.bfloat16)
        call = op.check(world, (x, w, None), (None, 0, False))
        return [op.choose(world, call, asked, False) for asked in ("fused", Fused())]

    for named, given in weft.spmd(main, 2, backend="emulated", sm_count=SMS):
        assert isinstance(named, Fused) and named.block_m == 64
        assert given == Fused()
