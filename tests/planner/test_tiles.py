"""The rule for a plan's tiles is compared with stored times of GEMMs alone (H200, 2026-11) and of whole ops on two
GPUs; the plans that follow the rule are tested too."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import changed
from tests.emulated.cases_ops import FUSED
from weft.op import REGISTRY
from weft.ops.all_gather_matmul.runs import halves_while_gathering
from weft.ops.tiles import (
    SAVED_BY_HALVES,
    half_tile_is_faster,
    splits_last_round,
    with_shape_tiles,
    with_split_round,
)
from weft.plans import (
    Decomposed,
    Fused,
    FusedGather,
    FusedGatherByCopies,
    FusedReduce,
    FusedReduceScatter,
    GemmTile,
    OneShot,
    Plan,
    Sequential,
    Signaled,
)
from weft.scale import Scale

RESULTS = Path(__file__).parents[2] / "bench/results"
SMS = 132


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


@pytest.mark.parametrize("loop", ["flat", "told"])
def test_the_rules_half_tiles_are_faster_for_gemms_alone(loop: str) -> None:
    """For other shapes, half tiles alone would gain at most 6%, but they are slower in a whole op."""
    usual, half = f"{loop} 128x256 w8 s3 x1", f"{loop} 64x256 w4 s5 x1"
    gained = {True: [], False: []}  # type: ignore[var-annotated]
    for r in rows("nvidia-h200-x1/experiments/tile-forms.jsonl"):
        if half in r["us"]:
            gained[half_tile_is_faster([r["M"]], r["N"], SMS)].append(r["us"][usual] / r["us"][half])
    assert len(gained[True]) >= 4 and min(gained[True]) > 1.1
    assert len(gained[False]) >= 15 and max(gained[False]) < 1.06


def test_whole_ops_lose_little_by_the_rule() -> None:
    lost, usual, half = [], [], []
    for r in rows("nvidia-h200-x2/experiments/tile-plans.jsonl"):
        plans = dict(pulled=FUSED[r["op"]], copied=FusedGatherByCopies(), signaled=Signaled(ctas=4, copies=True))
        for name in r["chosen"]:
            us = {form: r["us"][f"{name} {form}"] for form in ("usual", "half")}
            shards = [r["M"] // 2] * 2
            taken = "usual" if with_shape_tiles(plans[name], shards, r["N"], SMS) == plans[name] else "half"
            lost.append(us[taken] / min(us.values()))
            usual.append(us["usual"] / min(us.values()))
            half.append(us["half"] / min(us.values()))
    assert len(lost) == 42
    assert max(lost) < 1.04, "two runs of one call differ by as much"
    assert max(usual) > 1.1 and max(half) > 1.3, "either tile alone would lose this much"


def test_split_last_rounds_take_less_time() -> None:
    """Whole ops on two GPUs were timed with whole tiles and with halves of tiles in the last round. Where the rule splits
    the round, ops take as much less time as the comment and the notes say. The rule keeps whole tiles where they are
    faster."""
    world: Any = SimpleNamespace(backend=SimpleNamespace(scale=Scale()))
    plans: dict[str, Any] = dict(FusedGather=FusedGather(), FusedGatherByCopies=FusedGatherByCopies())
    less: dict[str, list[int]] = {"many": [], "less than one": [], "whole": []}
    saved: list[float] = []
    for r in rows("nvidia-h200-x2/experiments/last-round.jsonl"):
        call: Any = SimpleNamespace(scaling=None, n=r["N"], rows=r["M"], shards=(r["M"] // 2,) * 2)
        splits = splits_last_round(r["tiles"], r["programs"])
        if r["plan"] in plans:
            splits = halves_while_gathering(world, call, plans[r["plan"]], 0, r["programs"])
        rounds = "less than one" if r["tiles"] < r["programs"] else "many"
        whole, halves = (statistics.mean(us) for us in r["us"].values())
        less[rounds if splits else "whole"].append(round(100 * (1 - halves / whole)))
        if splits and rounds == "many":
            saved.append((1 - halves / whole) * -(-r["tiles"] // r["programs"]))
            assert with_split_round(whole, r["tiles"], r["programs"]) == pytest.approx(halves, rel=0.06)
    assert (round(min(saved), 2), round(statistics.mean(saved), 1), round(max(saved), 2)) == (
        0.08,
        SAVED_BY_HALVES,
        0.32,
    )
    assert len(less["many"]) == 23 and len(less["less than one"]) == 4
    ranges = [f"{min(less[rounds])}% to {max(less[rounds])}%" for rounds in ("many", "less than one")]
    comment, notes = (
        " ".join((RESULTS.parents[1] / file).read_text().split())
        for file in ("src/weft/compute/gemm.py", "docs/design-notes.md")
    )
    assert f"Fused ops with 2 to 6 rounds took {ranges[0]} less time (2 H200" in comment
    assert f"take {ranges[0]} less time, and sums with less than half a wave {ranges[1]} less" in notes
    assert (
        f"took {-less['whole'][0]}% more time (2 H200" in str(halves_while_gathering.__doc__)
        and len(less["whole"]) == 1
    )


def test_waves() -> None:
    one_row = [1]
    assert not half_tile_is_faster(one_row, 256 * 132, 132), "whole tiles fill one wave"
    assert half_tile_is_faster([128], 256 * 133, 132) and half_tile_is_faster([128], 256 * 198, 132)
    assert not half_tile_is_faster([128], 256 * 199, 132), "whole tiles fill more than half of the second wave"
    assert not half_tile_is_faster([128 * 4], 256 * 133, 132), "many waves keep whole tiles"


def test_tiles_span_shards_where_the_kernel_lets_them() -> None:
    """In fused plans and in those with copies, 8 x 64 rows are 4 rows of tiles, which fill one wave; where NCCL sums,
    they are 8 rows of tiles, each half empty."""
    shards, n = [64] * 8, 256 * 24
    assert with_shape_tiles(FusedGather(), shards, n, SMS) == FusedGather()
    assert with_shape_tiles(Signaled(ctas=4, copies=True), shards, n, SMS) == Signaled(ctas=4, copies=True)
    assert with_shape_tiles(FusedReduceScatter(), shards, n, SMS) == FusedReduceScatter()
    assert with_shape_tiles(Signaled(), shards, n, SMS) != Signaled()


FEW = [1024, 1024], 2752  # 176 tiles on 132 SMs


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_every_fused_variant_uses_half_tiles(op: str) -> None:
    for plan in REGISTRY[op].variants:
        assert isinstance(plan, Fused)
        if getattr(plan, "per_sm", 1) == 2:
            assert with_shape_tiles(plan, *FEW, SMS) == plan, "these plans were not compared in a whole op"
            continue
        suited_plan = with_shape_tiles(plan, *FEW, SMS)
        assert isinstance(suited_plan, Fused) and (
            suited_plan.tile.block_m,
            suited_plan.tile.block_n,
            suited_plan.tile.warps,
        ) == (64, 256, 4)
        if isinstance(plan, FusedGather):
            assert suited_plan == replace(plan, tile=suited_plan.tile, pull_rows=64, pull_stages=10), (
                "equally many bytes must be in flight"
            )
        else:
            assert suited_plan == replace(plan, tile=suited_plan.tile)
        assert suited_plan.tile.stages == (4 if isinstance(plan, FusedReduce) else 5), (
            "leave room for the small kernel that sums"
        )
        assert with_shape_tiles(plan, [4096, 4096], 4096, SMS) == plan, "many waves keep whole tiles"
        assert with_shape_tiles(suited_plan, *FEW, SMS) == suited_plan


OTHERS: list[Plan] = [
    Sequential(), Decomposed(), OneShot(), Signaled(groups=(1, 1)),
    *(plan_class(tile=tile) for tile in (GemmTile(block_m=64), GemmTile(block_n=128, warps=4))
      for plan_class in (FusedGather, FusedGatherByCopies, FusedReduceScatter, Signaled)),
]  # fmt: skip


@pytest.mark.parametrize("plan", OTHERS, ids=str)
def test_other_plans_are_left_as_they_are(plan: Plan) -> None:
    assert with_shape_tiles(plan, *FEW, SMS) == plan


def test_signaled_plans_without_groups_get_them() -> None:
    plan = Signaled(ctas=4, copies=True)
    assert with_shape_tiles(plan, *FEW, SMS) == changed(plan, block_m=64, warps=4, stages=5)


def test_kinds_by_name_get_them_and_plans_do_not() -> None:
    def main(world: weft.World) -> list[Plan]:
        op = REGISTRY["all_gather_matmul"]
        x, w = torch.zeros(1024, 64, dtype=torch.bfloat16), torch.zeros(2752, 64, dtype=torch.bfloat16)
        call = op.check(world, op.typed((x, w, None)), (None, 0, False, None, None, False))
        return [op.choose(world, call, asked, False) for asked in ("fused", FusedGather())]

    for named, unchanged in weft.spmd(main, 2, backend="emulated", sm_count=SMS):
        assert isinstance(named, FusedGather) and named.tile.block_m == 64
        assert unchanged == FusedGather()
