"""The ops on emulated ranks are compared with torch: every plan kind, any shape, any layout, many schedules.

A plan's error may be up to 1.5 times the error of `sequential` for the same inputs. The emulator itself raises an error
for a race, a deadlock or a read of unwritten memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from tests.emulated.cases import distance, draw, on_stream
from tests.emulated.cases_fp8 import all_gather_case
from tests.emulated.cases_ops import FUSED, KINDS, OPS, SMALL_FUSED, case, shared_case
from tests.gates import some
from weft.lang.mapping import balanced_rows
from weft.op import REGISTRY
from weft.ops.all_gather_matmul import runs as gather_runs
from weft.ops.all_gather_matmul.kernels import copied_gemm
from weft.ops.all_gather_matmul.op import all_gather_swiglu
from weft.ops.matmul_reduce import runs as reduce_runs
from weft.ops.matmul_reduce.kernels import gemm_reduce
from weft.plans import (
    Decomposed,
    FlagGated,
    Fused,
    FusedGather,
    FusedGatherByCopies,
    GemmTile,
    OneShot,
    Plan,
    Signaled,
    TwoShotLowLatency,
)
from weft.scale import SMALL_ALL_REDUCE, SMALL_GATHER, SMALL_REDUCE_SCATTER, SMALL_TILE
from weft.transport.memory import Flat, Lock
from weft.transport.sums import sum_staged

FAST = ("decomposed", "fused", "one_shot")


def emulate(
    fn: Callable[[weft.World], Any], ranks: int, seed: int = 0, ahead: bool = True, **options: Any
) -> list[Any]:
    return weft.spmd(fn, ranks, backend="emulated", seed=seed, ahead=ahead, **options)


def errors(op: str, rows: Sequence[int], n: int, k: int, plan: str | Plan, run: int = 0, **options: Any) -> list[float]:
    return emulate(lambda world: case(world, op, rows, n, k, plan, **options), len(rows), run)


@functools.cache
def sequential_errors(op: str, rows: tuple[int, ...], n: int, k: int, run: int, **options: Any) -> list[float]:
    return errors(op, rows, n, k, "sequential", run, **options)


def compare(op: str, rows: Sequence[int], n: int, k: int, plan: str | Plan, run: int = 0, **options: Any) -> None:
    """Return the errors of the plan and of `sequential` on every rank."""
    plan_errors = errors(op, rows, n, k, plan, run, **options)
    base = sequential_errors(op, tuple(rows), n, k, run, **options)
    assert max(base) < 5e-3
    for plan_error, base_error in zip(plan_errors, base, strict=True):
        assert plan_error <= 1.5 * base_error + 1e-9, (
            f"{op} {plan} {list(rows)} x {n} x {k}: {plan_errors}, sequential {base}"
        )


SPLITS = {
    "whole tiles": lambda ranks: [16] * ranks,
    "part tiles": lambda ranks: [13] * ranks,
    "several tiles": lambda ranks: [40] * ranks,
    "uneven": lambda ranks: balanced_rows(17 * ranks + 1, ranks),
}


@pytest.mark.parametrize("ranks", some([2, 3, 4]))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_every_plan_against_torch(op: str, kind: str, ranks: int) -> None:
    for i, split in enumerate(SPLITS.values()):
        compare(op, split(ranks), 48, 64, kind, run=i, calls=2)
        compare(op, split(ranks), 40, 24, kind, run=i, bias=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("m", some([3, 0, 1, 2], 2))
def test_fewer_rows_than_ranks(op: str, kind: str, m: int) -> None:
    for ranks in (2, 4):
        compare(op, balanced_rows(m, ranks), 16, 40, kind, calls=3)


def test_rows_that_arrive_last_are_computed_last() -> None:
    """Rank 0 makes no second call, and its rows would be the last to arrive on rank 1. So rank 1 computes all tiles
    without rows of rank 0, although its own first tile contains such rows too."""
    out, expected = torch.zeros(60, 48).bfloat16(), torch.zeros(60, 48).bfloat16()
    plan = replace(SMALL_GATHER, tile=replace(SMALL_TILE, group_m=1))

    def main(world: weft.World) -> None:
        x, w = draw(world.rank, 20, 64), draw(9, 48, 64)
        y = weft.all_gather_matmul(x, w, world=world, plan=plan)
        world.synchronize()
        if world.rank == 1:
            expected.copy_(y)
        if world.rank > 0:
            weft.all_gather_matmul(x, w, world=world, plan=plan, out=out if world.rank == 1 else None)
            world.synchronize()

    with pytest.raises(weft.Deadlock):
        emulate(main, 3)
    assert plan.tile.block_m == 16 and torch.equal(out[32:], expected[32:]) and not out[:32].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [(0, 20, 3), (5, 0, 0), (33, 1, 16), (0, 0, 1)])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_rows_of_the_callers_choice(op: str, rows: tuple[int, ...], kind: str) -> None:
    compare(op, rows, 24, 40, kind, calls=3, bias=True)


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("op", OPS)
def test_float16_views_and_out(op: str, kind: str) -> None:
    compare(op, [17, 17], 40, 40, kind, dtype=torch.float16, bias=True, calls=2)
    compare(op, [17, 17], 40, 40, kind, views=True, into=True, calls=2)
    compare(op, [9, 8], 40, 40, kind, views=True, into=True, dtype=torch.float16)


SMALL_COPIED = FusedGatherByCopies(tile=SMALL_TILE)
PLANS: list[Plan] = [
    Decomposed((1, 1, 2)),
    Decomposed((2, 2)),
    Decomposed((4,)),
    OneShot(programs=2, warps=1),
]
TILES = [  # block_m, block_n, block_k, warps, stages, group_m
    GemmTile(16, 16, 16, 4, 2, 1), GemmTile(32, 64, 32, 4, 3, 8), GemmTile(16, 32, 32, 4, 2, 2),
    GemmTile(16, 32, 64, 4, 3, 3), GemmTile(16, 64, 32, 4, 5, 4),
]  # fmt: skip
PULLS: list[dict[str, int]] = [  # parameters added to those of TILES
    dict(pull_programs=1, pull_rows=16, pull_stages=1), dict(pull_programs=4, pull_rows=8, pull_stages=4),
    dict(pull_programs=5, pull_rows=8, pull_stages=2), dict(pull_programs=3, pull_rows=16, pull_stages=5),
    dict(pull_programs=2, pull_rows=16, pull_stages=10),
]  # fmt: skip
MORE: dict[str, list[dict[str, Any]]] = {  # parameters added to those of TILES
    OPS[0]: [{}, dict(split=2), {}, dict(flatten=False), {}],
    OPS[1]: [dict(forward_programs=f) for f in (2, 1, 2, 2, 2)],
    OPS[2]: [dict(forward_programs=f, lag=lag) for f, lag in ((2, 0), (1, 3), (2, 6), (2, 9), (2, 6))],
}
PLANS_OF: dict[str, list[Plan]] = {
    op: [
        type(FUSED[op])(tile=tile, **pull, **fields) for tile, pull, fields in zip(TILES, PULLS, MORE[op], strict=True)
    ]
    for op in OPS
}
PLANS_OF[OPS[0]] += [FusedGatherByCopies(tile=GemmTile(16, 32, 32, 4, 2, 3))]
PLANS_OF[OPS[1]] += [Decomposed(pieces=2)]


@pytest.mark.parametrize("rows", some([[9] * 4, [7, 8, 8, 8], [32] * 4]), ids=str)
@pytest.mark.parametrize(("op", "plan"), [(op, plan) for op in OPS for plan in PLANS + PLANS_OF[op]], ids=str)
def test_plan_parameters(op: str, plan: Plan, rows: list[int]) -> None:
    compare(op, rows, 72, 64, plan, calls=3)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    op=st.sampled_from(OPS), kind=st.sampled_from(FAST), rows=st.lists(st.integers(0, 36), min_size=2, max_size=4),
    n=st.integers(1, 9), k=st.integers(1, 9), bias=st.booleans(), run=st.integers(0, 99),
)  # fmt: skip
def test_random_shapes(op: str, kind: str, rows: list[int], n: int, k: int, bias: bool, run: int) -> None:
    compare(op, rows, 8 * n, 8 * k, kind, run, bias=bias, seed=run, calls=2)


@pytest.mark.parametrize("seed", some(range(6)))
@pytest.mark.parametrize("op", OPS)
def test_schedules(op: str, seed: int) -> None:
    """Several calls run under frequent preemption without a report, and the result is right."""
    for kind, rows in (("fused", [17, 16, 16]), ("fused", [20, 20, 20]), ("decomposed", [9, 9, 9]))[seed % 2 :]:
        rank_errors = emulate(lambda w, r=rows, k=kind: case(w, op, r, 40, 24, k, calls=3), 3, seed, preempt=0.2)
        assert max(rank_errors) < 5e-3


# -- many calls on one World -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", some(range(4)))
def test_shapes_in_turn_share_one_workspace(seed: int) -> None:
    """Shapes grow and shrink over successive ops and kinds; no call may read data left by an earlier call."""

    def main(world: weft.World) -> float:
        worst = 0.0
        for i, (op, kind, rows, n, k) in enumerate(
            [
                ("all_gather_matmul", "fused", 8, 16, 16),
                ("matmul_reduce_scatter", "fused", 24, 40, 16),
                ("all_gather_matmul", "decomposed", 8, 16, 16),
                ("matmul_reduce_scatter", "one_shot", 24, 40, 16),
                ("matmul_all_reduce", "fused", 24, 16, 24),
                ("matmul_all_reduce", TwoShotLowLatency(warps=4), 8, 40, 16),
                ("all_gather_matmul", OneShot(programs=3, warps=4), 40, 16, 72),
                ("all_gather_matmul", "fused", 40, 16, 72),
                ("all_gather_matmul", "fused", 8, 16, 16),
                ("matmul_reduce_scatter", "decomposed", 24, 40, 16),
                ("matmul_reduce_scatter", "fused", 24, 40, 16),
                ("all_gather_matmul", "decomposed", 40, 16, 72),
                ("matmul_all_reduce", "decomposed", 24, 16, 24),
                ("matmul_all_reduce", "fused", 1, 16, 24),
                ("matmul_all_reduce", "one_shot", 8, 40, 16),
                ("all_gather_matmul", "sequential", 8, 16, 16),
                ("matmul_reduce_scatter", "fused", 24, 40, 16),
            ]
        ):
            worst = max(worst, case(world, op, [rows] * world.size, n, k, kind, seed=i, calls=2))
        return worst

    assert max(emulate(main, 3, seed)) < 5e-3


@pytest.mark.parametrize("kind", FAST)
def test_results_are_tensors_of_their_own(kind: str) -> None:
    """Later calls change neither earlier results nor earlier gathered activations."""

    def main(world: weft.World) -> None:
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i in range(5):
            x, w = draw(i * 10 + world.rank, 8, 16), draw(i * 10 + 5, 16, 16)
            y, full = weft.all_gather_matmul_with_gathered(x, w, world=world, plan=kind)
            s = weft.matmul_reduce_scatter(full, w, world=world, plan=kind)
            a = weft.matmul_all_reduce(full, w, world=world, plan=kind)
            world.synchronize()
            kept += [(t, t.clone()) for t in (y, full, s, a)]
        world.exchange(None)
        assert all(torch.equal(t, then) for t, then in kept)
        assert len({t.data_ptr() for t, _ in kept}) == len(kept)

    emulate(main, 2)


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("seed", some(range(4)))
def test_two_streams(kind: str, seed: int) -> None:
    def main(world: weft.World) -> float:
        worst = 0.0
        for i in range(4):
            for name in ("main", "second"):
                with on_stream(world, name):
                    for op in OPS if i % 2 else OPS[::-1]:
                        worst = max(worst, case(world, op, [16] * world.size, 16, 32, kind, seed=i))
        return worst

    assert max(emulate(main, 2, seed)) < 5e-3


# -- a weight in the layout of a gradient ------------------------------------------------------------------------------

TRANSPOSES = {
    "all_gather_matmul": ["sequential", "decomposed", "fused", SMALL_COPIED, "one_shot", "flag_gated"],
    "matmul_reduce_scatter": ["sequential", "decomposed", "fused", "one_shot", "signaled"],
    "matmul_all_reduce": ["sequential", "decomposed", "fused", TwoShotLowLatency(warps=4), "signaled"],
}


@pytest.mark.parametrize(("op", "plan"), [(op, plan) for op, plans in TRANSPOSES.items() for plan in plans], ids=str)
def test_a_transposed_weight_gives_the_same_bits(op: str, plan: str | Plan) -> None:
    """Calls alternate with calls that use a dense weight of equal size, so that neither uses the other's prepared
    launches. A plan that supports transposed weights makes no copy."""

    def main(world: weft.World) -> None:
        for rows, n, k in ((16, 32, 48), (7, 40, 24), (1, 8, 16)):
            x, w = draw(world.rank, rows if op == "all_gather_matmul" else rows * world.size, k), draw(9, n, k)
            lying = w.t().contiguous().t()
            op_entry = REGISTRY[op]
            kind = next((kind for kind in op_entry.runs if kind.kind == plan), None)
            taken = op_entry.default(world, kind) if kind else plan
            assert (op_entry.dense_operands(taken, (x, lying, None))[1] is lying) == (
                type(taken) not in (FlagGated, Signaled)
            )
            results = [getattr(weft, op)(x, t, world=world, plan=plan) for t in (w, lying, w, lying)]
            world.synchronize()
            assert all(torch.equal(y, results[0]) for y in results) and results[0].norm() > 0

    emulate(main, 2)


# -- determinism -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAST)
@pytest.mark.parametrize("op", OPS)
def test_same_inputs_same_bits(op: str, kind: str) -> None:
    """A repeated call gives the same bits, in the same World and under any schedule. An all-reduce gives the same bits
    on every rank."""

    def main(world: weft.World) -> list[torch.Tensor]:
        x, w, b = draw(world.rank, 24, 24), draw(50 + world.rank, 40, 24), draw(99, 40)
        fn: Any = getattr(weft, op)
        out = [fn(x, w, b, world=world, plan=kind).clone() for _ in range(3)]
        world.synchronize()
        return out

    runs = [emulate(main, 3, seed) for seed in range(4)]
    for rank in range(3):
        first_result = runs[0][rank][0]
        assert all(torch.equal(first_result, again) for run in runs for again in run[rank])
    if op == "matmul_all_reduce":
        assert all(torch.equal(runs[0][0][0], runs[0][rank][0]) for rank in range(3))


# -- fallbacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("n", "k", "says"), [(16, 20, "K 20"), (12, 16, "N 12"), (1, 16, "N 1"), (7, 1, "K 1")])
def test_rows_that_are_not_16_bytes_fall_back_once(op: str, n: int, k: int, says: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        assert max(errors(op, [8, 8], n, k, "fused", calls=3)) < 5e-3
    lines = [r.getMessage() for r in caplog.records if "sequential instead of fused" in r.getMessage()]
    assert len(lines) == 1 and all(line.startswith(op) and says in line for line in lines), (
        "weft must log exactly one line"
    )


@pytest.mark.parametrize(("op", "plan"), [(op, "decomposed") for op in OPS] + [(OPS[0], SMALL_COPIED)])
def test_copies_of_shards_of_different_lengths_fall_back_once(op: str, plan: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        assert max(errors(op, [8, 8, 3], 16, 16, plan, calls=3)) < 5e-3
    lines = [r.getMessage() for r in caplog.records if "copies need shards of one length" in r.getMessage()]
    assert len(lines) == 1 and all(line.startswith(f"{op}: sequential instead") for line in lines), (
        "weft must log exactly one line"
    )


@pytest.mark.parametrize("seed", some(range(6)))
def test_a_librarys_gemm_after_copied_shards(seed: int) -> None:
    """The copy engine sets a flag after each shard, and sets the call's number after the GEMM. Here the GEMM waits for
    each shard separately."""
    plan = FlagGated(tile_m=8, cluster_m=2)
    for ranks, bias in ((2, True), (4, False)):
        rank_errors = emulate(
            lambda w, r=ranks, b=bias: case(w, OPS[0], [16] * r, 40, 24, plan, bias=b, calls=3),
            ranks,
            seed,
            preempt=0.2,
        )
        assert max(rank_errors) < 5e-3


@pytest.mark.parametrize(
    ("rows", "says"), [((24, 24), "not whole clusters of 2 x 8"), ((16, 32), "copies need shards of one length")]
)
def test_the_librarys_gemm_falls_back_once(rows: tuple[int, ...], says: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        assert max(errors(OPS[0], list(rows), 16, 16, FlagGated(tile_m=8, cluster_m=2), calls=2)) < 5e-3
    lines = [r.getMessage() for r in caplog.records if says in r.getMessage()]
    assert len(lines) == 1 and all("sequential instead of flag_gated" in line for line in lines), (
        "weft must log exactly one line"
    )


@pytest.mark.parametrize("op", OPS[1:])
def test_pulled_blocks_are_no_longer_than_a_tile(op: str) -> None:
    small: Any = SMALL_FUSED[op]
    assert small.pull_rows < 64
    compare(op, [16, 16], 32, 32, replace(small, pull_rows=64), calls=2)


def test_two_programs_that_share_an_sm_are_both_resident() -> None:
    """There are more pulling programs than SMs, and programs wait for parts of shards that later programs copy."""
    compare(OPS[0], [48, 48], 64, 32, replace(SMALL_GATHER, pull_programs=7, per_sm=2), calls=2)


@pytest.mark.parametrize("op", OPS)
def test_posted_blocks_of_several_rows_and_part_of_one(op: str) -> None:
    """A rank has more than one block, and the last block may end in the middle of a row."""
    for rows in ([5, 5], [9, 2, 4]):
        compare(op, rows, 328, 264, OneShot(programs=3, warps=4), calls=2)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_posted_rows_of_every_rank_or_none(op: str, caplog: Any) -> None:
    """A rank with an empty shard would not wait for the other ranks."""
    with caplog.at_level(logging.WARNING, "weft"):
        assert max(errors(op, [8, 0, 3], 16, 16, "one_shot", calls=3)) < 5e-3
    assert f"{op}: sequential instead of one_shot: a rank without rows" in caplog.text


@pytest.mark.parametrize("op", OPS)
def test_decomposed_needs_no_alignment(op: str) -> None:
    compare(op, [6, 6], 7, 5, "decomposed", calls=2, bias=True)


def test_tensors_at_odd_addresses() -> None:
    """On only one rank, the view does not start at a 16-byte boundary. The ranks still choose one plan, and the result
    is right."""

    def main(world: weft.World) -> bool:
        flat = draw(world.rank, 1 + 8 * 16).flatten()
        x = flat[world.rank : world.rank + 8 * 16].view(8, 16)
        w = draw(7, 16, 16)
        actual = weft.all_gather_matmul(x, w, world=world, plan="fused")
        expected = torch.cat([draw(r, 1 + 8 * 16).flatten()[r : r + 8 * 16].view(8, 16) for r in range(world.size)])
        world.synchronize()
        return torch.allclose(actual.float(), expected.float() @ w.float().t(), rtol=2e-2, atol=2e-2)

    assert all(emulate(main, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_of_any_stride(kind: str) -> None:
    """On only one rank, a single row has an arbitrary stride; such a row counts as contiguous."""

    def main(world: weft.World) -> bool:
        row = draw(world.rank, 64, 1).t() if world.rank else draw(world.rank, 4, 67)[:1, :64]
        w = torch.eye(64, dtype=torch.bfloat16)
        y = weft.all_gather_matmul(row, w, world=world, plan=kind)
        z = weft.matmul_all_reduce(row, w, world=world, plan=kind)
        s = weft.all_reduce(row, world=world, plan="one_shot")
        world.synchronize()
        return torch.equal(y[world.rank], row[0]) and distance(z, y.double().sum(0)[None]) < 5e-3 and torch.equal(s, z)

    assert all(emulate(main, 2))


def test_out_at_an_odd_address() -> None:
    def main(world: weft.World) -> bool:
        out = torch.zeros(1 + 16 * 16, dtype=torch.bfloat16)[1:].view(16, 16)
        for plan in (OneShot(warps=4), TwoShotLowLatency(warps=4)):
            x, w = draw(world.rank, 16, 16), draw(7, 16, 16)
            expected = weft.matmul_all_reduce(x, w, world=world, plan="sequential")
            weft.matmul_all_reduce(x, w, world=world, plan=plan, out=out)
            world.synchronize()
            assert torch.allclose(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
        x, w = draw(world.rank, 8, 16), draw(7, 16, 16)
        weft.all_gather_matmul(x, w, world=world, plan="fused", out=out)
        expected = weft.all_gather_matmul(x, w, world=world, plan="sequential")
        world.synchronize()
        return torch.allclose(out.float(), expected.float(), rtol=2e-2, atol=2e-2)

    assert all(emulate(main, 2))


# -- pieces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("plan", ["auto", "sequential"])
def test_repeated_calls_with_views(op: str, plan: str) -> None:
    """The decision for a sequential call is kept for the next one, which passes the view unchanged."""
    assert max(errors(op, (8, 8), 24, 16, plan, views=True, calls=3)) < 5e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_all_reduce"])
def test_out_may_share_memory_with_an_operand(op: str, kind: str) -> None:
    """Fused programs finish tiles while other programs still read data that these tiles need."""
    assert max(emulate(lambda world: shared_case(world, op, 32, 64, kind), 2)) < 5e-3


def test_rows_longer_than_an_arena_has_to_spare() -> None:
    """The second half of the arena begins at a whole row."""

    def rank(world: weft.World) -> list[float]:
        return [case(world, OPS[0], rows, 16, k, "fused", calls=2) for rows, k in (((2, 2), 4096), ((2, 1), 5120))]

    assert max(max(e) for e in emulate(rank, 2)) < 5e-3


@pytest.mark.parametrize("scaling", ["", "row"])
def test_the_gathered_rows_are_copied_from_one_half_of_the_arena(scaling: str) -> None:
    """While a rank copies its gathered rows, a rank in the next op's call already writes to the other half."""
    tokens = 20

    def rank(world: weft.World) -> list[float]:
        x, w = draw(world.rank, tokens, 64), draw(9, 32, 64)
        w13 = weft.moe.pack(draw(10 + world.rank, 4, 64, 64), world=world)
        ids = torch.arange(2 * tokens, dtype=torch.int32).view(tokens, 2) % 4
        errors = []
        for call in range(3):
            if scaling:
                errors.append(all_gather_case(world, (tokens, tokens), 32, 128, scaling, seed=call))
            else:
                _, gathered = weft.all_gather_matmul_with_gathered(x + call, w, world=world, plan="fused")
                wanted = torch.cat([draw(source, tokens, 64) + call for source in range(world.size)])
                errors.append(float((gathered - wanted).abs().max()))
            weights = torch.ones(tokens, 2)
            weft.all_gather_grouped_matmul(x, ids, weights, w13, world=world, plan="dispatched")
        return errors

    assert max(max(errors) for seed in range(3) for errors in emulate(rank, 2, seed)) < 5e-3


def test_a_sum_of_2_31_elements_is_not_empty() -> None:
    """Only the first elements are allocated: the emulator raises an error for a read past their end."""

    def rank(world: weft.World) -> None:
        t, me = torch.ones(64, dtype=torch.bfloat16), world.tensor([0], torch.int32)
        sizes = dict(rows=65536, N=32768, me=me, W=1, BIAS=False, BLOCK=64, ALIGNED=True)
        world.launch(sum_staged, 6, dict(x=t, staging=t, out=t, bias=t, **sizes), {}, world.current_stream())
        world.synchronize()

    with pytest.raises(weft.MemoryFault):
        emulate(rank, 1)


def test_a_capture_does_not_hide_the_stream_before_it() -> None:
    """After a capture, an eager call's work may still run when the next call arrives on another stream."""

    def rank(world: weft.World) -> None:
        backend: Any = world.backend
        waited: list[tuple[str, str]] = []
        backend.record, backend.wait_event = lambda stream: stream, lambda stream, event: waited.append((stream, event))
        holder = Lock()
        for stream, captured in (("A", False), ("B", True), ("C", True), ("D", False)):
            backend.capturing, backend.captures = lambda c=captured: c, lambda stream: stream in "BC"
            world.order(holder, stream)
        del backend.record, backend.wait_event, backend.capturing, backend.captures
        assert waited == [("C", "B"), ("D", "A")]

    emulate(rank, 1)


def test_one_descriptor_over_all_ranks() -> None:
    """Every copy's address is a whole number of granules above the lowest address."""

    def main(world: weft.World) -> None:
        memory = world.symmetric((4096,), torch.uint8, "m")
        flat = Flat.from_memory(memory)
        assert flat is not None
        base = flat.base.data_ptr()
        assert [base + g * flat.granule for g in flat.index] == [p.data_ptr() for p in memory.peers]
        assert min(flat.index) == 0 and flat.granule & (flat.granule - 1) == 0 and flat.granule <= 1 << 21
        desc = flat.descriptor(torch.bfloat16, 8, 16)
        assert desc.block_shape == [1, 8, 16] and desc.strides == [flat.granule // 2, 16, 1]

    emulate(main, 3)


def test_a_small_world_runs_the_small_plan() -> None:
    def main(world: weft.World) -> None:
        assert world.sm_count < 32
        result = weft.all_gather_matmul(draw(0, 8, 16), draw(1, 16, 16), world=world, plan="fused")
        again = weft.all_gather_matmul(draw(0, 8, 16), draw(1, 16, 16), world=world, plan=SMALL_GATHER)
        world.synchronize()
        assert torch.equal(result, again)

    emulate(main, 2)


@pytest.mark.parametrize("plan", ["fused", SMALL_COPIED], ids=["pulled", "copied"])
def test_gated_and_plain_calls_of_one_shape(plan: str | Plan) -> None:
    """Both kinds use the same channels, so their calls are counted together."""

    def main(world: weft.World) -> float:
        worst = 0.0
        for i in range(4):
            parts = [draw(10 * i + r, 16, 32) for r in range(world.size)]
            w = draw(10 * i + 9, 32, 32) * 0.1
            if i % 2:
                actual = weft.all_gather_matmul(parts[world.rank], w, world=world, plan=plan)
                expected = torch.cat(parts).double() @ w.double().t()
            else:
                actual = all_gather_swiglu(parts[world.rank], w, 16, world=world, plan=plan, rows=None)
                gate_up = (torch.cat(parts).double() @ w.double().t()).view(-1, 1, 2, 16)
                expected = (torch.nn.functional.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]).flatten(1)
            world.synchronize()
            worst = max(worst, distance(actual, expected))
        return worst

    assert max(emulate(main, 2)) < 5e-3


def swiglu_tiles(x: torch.Tensor, w: torch.Tensor, bias: object, *, world: weft.World, plan: Fused) -> torch.Tensor:
    """Return the gated activation of the gathered product, with two pairs of gate and up blocks in a tile."""
    return all_gather_swiglu(x, w, 32, world=world, plan=replace(plan, tile=replace(plan.tile, block_n=64)), rows=None)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("fn", "plan", "n"),
    [
        (weft.all_gather_matmul, SMALL_GATHER, 32),
        (weft.all_gather_matmul, SMALL_COPIED, 32),
        (swiglu_tiles, SMALL_GATHER, 64),
        (swiglu_tiles, SMALL_COPIED, 64),
        (weft.matmul_reduce_scatter, SMALL_REDUCE_SCATTER, 96),
        (weft.matmul_all_reduce, SMALL_ALL_REDUCE, 96),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "kind", None),
)
def test_halves_of_tiles_give_the_bits_of_whole_tiles(
    fn: Any, plan: Fused, n: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last round has few tiles, of which two programs each compute one half."""

    def main(world: weft.World) -> tuple[list[torch.Tensor], int]:
        backend: Any = world.backend
        launch, halves = backend.launch, []

        def count(kernel: Any, grid: int, args: Any, *options_and_stream: Any) -> None:
            args = args() if callable(args) else args
            halves.append(args.get("w_half_desc") is not None)
            launch(kernel, grid, args, *options_and_stream)

        backend.launch = count
        gathers = isinstance(plan, FusedGather | FusedGatherByCopies)
        x, w, bias = draw(world.rank, 48 if gathers else 40, 64), draw(9, n, 64), draw(10, n)
        w = w.t().contiguous().t() if transposed else w
        results = [fn(x, w, b, world=world, plan=plan).clone() for b in (None, bias, None)]
        world.synchronize()
        return results, sum(halves)

    split = emulate(main, 2)
    for module in (gather_runs, reduce_runs):
        monkeypatch.setattr(module, "splits_last_round", lambda tiles, programs: False)
    for (results, count), (expected, none) in zip(split, emulate(main, 2), strict=True):
        assert count >= 3 and none == 0
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        assert all(bool(result.isfinite().all()) and result.norm() > 0 for result in results)


@pytest.mark.parametrize("op", OPS)
def test_kernels_are_loaded_before_anything_spins(op: str) -> None:
    """Loading a kernel can wait for a spinning kernel. A call therefore loads all variants that run concurrently before
    it launches any of them, even if a bias or a dtype needs another variant of a known shape."""

    def main(world: weft.World) -> int:
        backend: Any = world.backend
        launch, loaded, checked = backend.launch, set(), 0

        def variant(kernel: Any, args: dict[str, Any]) -> Any:
            aligned = tuple(n for n, v in args.items() if isinstance(v, torch.Tensor) and v.data_ptr() % 16 == 0)
            return kernel.fn.__name__, aligned, tuple((n, str(v)) for n, v in args.items() if n.isupper())

        def check(kernel: Any, grid: int, args: Any, *options_and_stream: Any) -> None:
            nonlocal checked
            values = args() if callable(args) else args
            if kernel in (gemm_reduce, copied_gemm):
                checked += 1
                assert variant(kernel, values) in loaded
            launch(kernel, grid, values, *options_and_stream)

        backend.launch = check
        backend.load = lambda kernel, grid, args, options, co_resident: loaded.add(variant(kernel, args))
        plan = SMALL_COPIED if op == OPS[0] else SMALL_FUSED[op]
        for dtype in (torch.bfloat16, torch.float16):
            for bias in (True, False, True):
                case(world, op, [16] * 2, 32, 32, plan, bias=bias, dtype=dtype, calls=1)
        x, w = draw(0, 32, 32), draw(1, 32, 32)
        if op != OPS[0]:
            for bias in (draw(2, 32), torch.cat([draw(3, 1), draw(2, 32)])[1:]):
                getattr(weft, op)(x, w, bias, world=world, plan=plan)
        return checked

    assert min(emulate(main, 2)) >= 6
