"""Plan kind `signaled` on emulated ranks: its schedule, its ops compared with torch, broken schedules, and the row-wise
ops that read its tiles."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from tests.emulated.cases import changed, distance, draw, on_stream
from tests.emulated.cases_matmul_all_to_all import all_to_all_case, drawn
from tests.emulated.cases_norm import tiles_case
from tests.emulated.cases_ops import case
from tests.gates import some
from weft.architectures import AMPERE
from weft.lang.mapping import balanced_rows
from weft.ops.matmul_all_to_all import op as to_all
from weft.ops.matmul_all_to_all.op import GroupTables, group_tables
from weft.ops.matmul_reduce import signaled
from weft.ops.matmul_reduce.call import ReduceCall
from weft.ops.matmul_reduce.op import MatmulAllReduce
from weft.planner.table import Measured, learn
from weft.plans import GemmTile, Plan, Sequential, Signaled, partition
from weft.scale import SMALL_SIGNALED, Scale
from weft.torch_library import plan_of, text_of
from weft.transport.signals import Schedule, schedule, schedule_of

REDUCING = ("matmul_all_reduce", "matmul_reduce_scatter")
S = SMALL_SIGNALED


def emulate(
    fn: Callable[[weft.World], Any], ranks: int, seed: int = 0, ahead: bool = True, **options: Any
) -> list[Any]:
    return weft.spmd(fn, ranks, backend="emulated", seed=seed, ahead=ahead, **options)


# -- the schedule ------------------------------------------------------------------------------------------------------


@given(groups=st.lists(st.integers(1, 5), max_size=5), waves=st.integers(1, 40))
def test_a_partition_covers_the_waves(groups: list[int], waves: int) -> None:
    group_sizes = partition(groups, waves)
    assert sum(group_sizes) == waves and min(group_sizes) >= 1
    if sum(groups) == waves:
        assert group_sizes == tuple(groups)


def test_partitions() -> None:
    assert partition((), 1) == (1,) and partition((), 3) == (1, 1, 1) and partition((), 10) == (3, 3, 3, 1)
    assert partition((1, 2), 9) == (1, 8), "the last group includes the remaining waves"
    assert partition((2, 2, 2), 3) == (2, 1), "groups beyond the last wave are cut off"


@settings(deadline=None)
@given(
    owners=st.integers(1, 8), tiles_per_owner=st.integers(1, 60), programs=st.integers(1, 30),
    groups=st.lists(st.integers(1, 4), max_size=4), unit=st.integers(1, 12),
)  # fmt: skip
def test_a_schedule(owners: int, tiles_per_owner: int, programs: int, groups: list[int], unit: int) -> None:
    """Tile positions are a permutation within each group, ordered by owner; every program signals each of its groups
    once, with its last tile in that group."""
    tiles = owners * tiles_per_owner
    tile_schedule = schedule(tiles, programs, groups, owners, unit)
    assert tile_schedule.bounds[0] == 0 and tile_schedule.bounds[-1] == tiles
    assert (
        len(tile_schedule.arrivals) == len(tile_schedule.bounds) - 1 and len(tile_schedule.program_groups) == programs
    )
    slots = slots_of(tile_schedule, owners)
    assert sorted(slots) == list(range(tiles))
    for g, (lo, hi) in enumerate(pairwise(tile_schedule.bounds)):
        assert hi > lo and lo % owners == 0 and lo % unit == 0
        share = (hi - lo) // owners
        for t in range(lo, hi):
            assert lo <= slots[t] < hi and (slots[t] - lo) // share == t % owners
        owner_slots = [slots[t] - lo for t in range(lo, hi) if t % owners == 0]
        assert owner_slots == list(range(share)), "an owner's tiles keep their order"
        workers = {t % programs: t for t in range(lo, hi)}  # each program's last tile of the group
        assert {
            p: entry.last_tile for p in range(programs) for entry in tile_schedule.program_groups[p] if entry.group == g
        } == workers
        assert tile_schedule.arrivals[g] == len(workers)
    assert all(a.last_tile < b.last_tile for entries in tile_schedule.program_groups for a, b in pairwise(entries))


def slots_of(tile_schedule: Schedule, owners: int) -> list[int]:
    """Return the place at which signaled_gemm stores each tile of a program's entries."""
    slots = [-1] * tile_schedule.bounds[-1]
    for p, entries in enumerate(tile_schedule.program_groups):
        left = list(entries)
        for t in range(p, len(slots), len(tile_schedule.program_groups)):
            last_tile, _, first_slot, slots_per_owner = left[0]
            slots[t] = first_slot + (t - first_slot) % owners * slots_per_owner + (t - first_slot) // owners
            if t == last_tile:
                left.pop(0)
        assert not left
    return slots


# -- the ops -----------------------------------------------------------------------------------------------------------


@functools.cache
def sequential_errors(op: str, rows: tuple[int, ...], n: int, k: int, run: int, **options: Any) -> list[float]:
    return emulate(lambda world: case(world, op, rows, n, k, "sequential", **options), len(rows), run)


def compare(op: str, rows: Sequence[int], n: int, k: int, plan: str | Plan, run: int = 0, **options: Any) -> None:
    """Return the errors of the plan and of `sequential` on every rank."""
    plan_errors = emulate(lambda world: case(world, op, rows, n, k, plan, **options), len(rows), run)
    base = sequential_errors(op, tuple(rows), n, k, run, **options)
    assert max(base) < 5e-3
    for plan_error, base_error in zip(plan_errors, base, strict=True):
        assert plan_error <= 1.5 * base_error + 1e-9, (
            f"{op} {plan} {list(rows)} x {n} x {k}: {plan_errors}, sequential {base}"
        )


PLANS: list[str | Plan] = [
    "signaled",
    replace(S, groups=(1, 2)),
    changed(S, groups=(3,), group_m=1),
    changed(S, groups=(1,) * 40, ctas=3, block_n=16, block_k=16, group_m=5),
    changed(S, groups=(1, 1, 2, 1), ctas=5, block_m=32, block_n=64, stages=3),
    replace(S, copies=True),
    changed(S, copies=True, groups=(1,) * 40, ctas=3, block_n=16, group_m=5),
    changed(S, copies=True, groups=(1, 2), block_n=64, stages=3),
]


def plans_of(op: str) -> list[str | Plan]:
    """Return the op's plans; copy engines move groups only for a reduce-scatter."""
    return [plan for plan in PLANS if op == "matmul_reduce_scatter" or not getattr(plan, "copies", False)]


@pytest.mark.parametrize("ranks", some([2, 4]))
@pytest.mark.parametrize(("op", "plan"), [(op, plan) for op in REDUCING for plan in plans_of(op)])
def test_against_torch(op: str, plan: str | Plan, ranks: int) -> None:
    for i, rows in enumerate(([16] * ranks, [40] * ranks, [64] * ranks, balanced_rows(13 * ranks + 1, ranks))):
        compare(op, rows, 72, 64, plan, run=i, calls=2)
    compare(op, [13] * ranks, 39, 24, plan, bias=True)


@pytest.mark.parametrize("seed", some(range(6)))
@pytest.mark.parametrize("op", REDUCING)
def test_in_a_loop_over_tiles_as_before_hopper(op: str, seed: int) -> None:
    """Several calls run under frequent preemption, with a K that is not a multiple of the step."""

    def main(world: weft.World, rows: Sequence[int], plan: Plan, bias: bool) -> float:
        world.backend.capability = AMPERE
        return case(world, op, rows, 72, 40, plan, calls=3, bias=bias)

    for plan in plans_of(op)[1:]:
        assert isinstance(plan, Plan)
        for rows, bias in ([40, 40], False), ([33, 32], True):
            assert max(emulate(lambda w, p=plan, r=rows, b=bias: main(w, r, p, b), 2, seed, preempt=0.2)) < 5e-3


@pytest.mark.parametrize("op", REDUCING)
@pytest.mark.parametrize("m", [0, 1, 2, 3])
def test_fewer_rows_than_ranks(op: str, m: int) -> None:
    for ranks in (2, 4):
        for plan in ("signaled", replace(S, copies=op == "matmul_reduce_scatter")):
            compare(op, balanced_rows(m, ranks), 16, 40, plan, calls=3)


@pytest.mark.parametrize("rows", [(0, 20, 3), (5, 0, 0), (33, 1, 16), (0, 0, 1)])
def test_rows_of_the_callers_choice(rows: tuple[int, ...]) -> None:
    compare("matmul_reduce_scatter", rows, 24, 40, "signaled", calls=3, bias=True)


@pytest.mark.parametrize("op", REDUCING)
def test_float16_views_and_out(op: str) -> None:
    for plan in ("signaled", replace(S, copies=op == "matmul_reduce_scatter")):
        for rows in (17, 48):
            compare(op, [rows] * 2, 40, 40, plan, dtype=torch.float16, bias=True, calls=2)
            compare(op, [rows] * 2, 40, 40, plan, views=True, into=True, calls=2)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    op=st.sampled_from(REDUCING), rows=st.lists(st.integers(0, 36), min_size=2, max_size=4), n=st.integers(8, 70),
    k=st.integers(1, 9), groups=st.lists(st.integers(1, 3), max_size=3), ctas=st.integers(1, 5), copies=st.booleans(),
    bias=st.booleans(), run=st.integers(0, 99),
)  # fmt: skip
def test_random_shapes(
    op: str, rows: list[int], n: int, k: int, groups: list[int], ctas: int, copies: bool, bias: bool, run: int
) -> None:
    copies = copies and op == "matmul_reduce_scatter"
    plan = replace(S, groups=tuple(groups), ctas=ctas, copies=copies)
    if copies:  # copy engines require whole words and tiles
        n, rows = n // 8 * 8, [rows[0] // 16 * 16] * len(rows)
    compare(op, rows, n, 8 * k, plan, run, bias=bias, seed=run, calls=2)


def test_unsupported_copies_are_sequential(caplog: Any) -> None:
    """Reduce-scatter requires equal shards of whole tiles, and rows that are a multiple of 16 bytes. The reason is
    logged once, and is the same on every rank."""
    plan = replace(S, copies=True)

    def main(world: weft.World, rows: list[int], n: int) -> tuple[float, bool]:
        return case(world, "matmul_reduce_scatter", rows, n, 24, plan, calls=2), "staging" in world._buffers

    for rows, n, moved in (([32, 32], 40, True), ([33, 32], 40, False), ([24, 24], 40, False), ([32, 32], 39, False)):
        caplog.clear()
        for error, by_copies in emulate(lambda w, a=(rows, n): main(w, *a), 2):
            assert error < 5e-3 and by_copies == moved
        assert ("sequential instead of signaled" in caplog.text) != moved


def test_an_all_reduce_by_copies_is_refused() -> None:
    def main(world: weft.World) -> None:
        x, w = draw(world.rank, 32, 24), draw(50 + world.rank, 40, 24)
        with pytest.raises(ValueError, match="copies means nothing to this op"):
            weft.matmul_all_reduce(x, w, world=world, plan=replace(S, copies=True))

    emulate(main, 2)


def test_the_gemm_of_an_all_reduce_begins_with_the_first_row() -> None:
    """The measurement of the GEMM alone (tests/gpu/gpu_older.py) uses a plan with copies, which needs no communicator.
    The GEMM's tile order must not be rotated as it is for a scatter."""

    def main(world: weft.World) -> list[int]:
        calls = [ReduceCall((32, 32), 40, 24, torch.bfloat16, False, 64, every, True) for every in (True, False)]
        return [signaled.tiling_of(world, call, replace(S, copies=True), True).shard for call in calls]

    assert emulate(main, 2) == [[0, 2]] * 2


def test_where_one_ranks_output_begins_does_not_divide_the_ranks() -> None:
    def main(world: weft.World) -> float:
        x, w = draw(world.rank, 48, 24), draw(50 + world.rank, 40, 24)
        out = world.empty((48 * 40 + 4,), torch.bfloat16)[4 * world.rank :][: 48 * 40].view(48, 40)
        actual = weft.matmul_all_reduce(x, w, world=world, plan=S, out=out)
        return distance(actual, weft.matmul_all_reduce(x, w, world=world, plan="sequential"))

    assert max(emulate(main, 2)) < 5e-3


@pytest.mark.parametrize("seed", some(range(10)))
@pytest.mark.parametrize("op", REDUCING)
def test_schedules(op: str, seed: int) -> None:
    """Several calls run under frequent preemption without a report, and the result is right."""
    for copies, rows in ((False, [30, 29, 29]), (op == "matmul_reduce_scatter", [32] * 3)):
        plan = replace(S, groups=((), (1, 1), (2,))[seed % 3], copies=copies)
        rank_errors = emulate(lambda w, p=plan, r=rows: case(w, op, r, 72, 24, p, calls=4), 3, seed, preempt=0.2)
        assert max(rank_errors) < 5e-3


@pytest.mark.parametrize("seed", some(range(4)))
def test_shapes_kinds_and_streams_in_turn(seed: int) -> None:
    def main(world: weft.World) -> float:
        worst = 0.0
        for i in range(4):
            for name in ("main", "second"):
                with on_stream(world, name):
                    for op in REDUCING:
                        by_copies = replace(S, copies=op == "matmul_reduce_scatter")
                        for plan in ("signaled", by_copies, "sequential", "decomposed", "fused"):
                            worst = max(worst, case(world, op, [32] * world.size, 40, 32, plan, seed=i))
        return worst

    assert max(emulate(main, 2, seed)) < 5e-3  # ops overlap, as on a GPU


@pytest.mark.parametrize("op", REDUCING)
def test_same_inputs_same_bits(op: str) -> None:
    def main(world: weft.World) -> list[torch.Tensor]:
        x, w, b = draw(world.rank, 48, 24), draw(50 + world.rank, 72, 24), draw(99, 72)
        fn: Any = getattr(weft, op)
        out = [
            fn(x, w, b, world=world, plan=plan).clone() for plan in ("signaled", replace(S, groups=(1,)), "signaled")
        ]
        world.synchronize()
        return out

    runs = [emulate(main, 3, seed) for seed in range(4)]
    for rank in range(3):
        assert all(torch.equal(runs[0][rank][0], again) for run in runs for again in run[rank])
    if op == "matmul_all_reduce":
        assert all(torch.equal(runs[0][0][0], runs[0][rank][0]) for rank in range(3))


# -- wrong schedules ---------------------------------------------------------------------------------------------------


def changed_entry(tile_schedule: Schedule, p: int, i: int, **new: int) -> Schedule:
    """Return the schedule with entry i of program p changed."""
    entries = [list(entries) for entries in tile_schedule.program_groups]
    entries[p][i] = entries[p][i]._replace(**new)
    return replace(tile_schedule, program_groups=tuple(map(tuple, entries)))


def early(tile_schedule: Schedule) -> Schedule:
    """A program signals a group before it has computed its last tile of the group."""
    p, i = next(
        (p, i)
        for p, entries in enumerate(tile_schedule.program_groups)
        for i, entry in enumerate(entries)
        if entry.last_tile - 5 >= entry.first_tile
    )
    return changed_entry(tile_schedule, p, i, last_tile=tile_schedule.program_groups[p][i].last_tile - 5)


def twice(tile_schedule: Schedule) -> Schedule:
    """Two tiles of a group are stored in one position, and another position stays empty."""
    return changed_entry(tile_schedule, 1, 0, tiles_per_owner=tile_schedule.program_groups[1][0].tiles_per_owner - 1)


def swapped(tile_schedule: Schedule) -> Schedule:
    """A program swaps the tiles of two groups."""
    first_tiles = [entry.first_tile for entry in tile_schedule.program_groups[0]]
    return changed_entry(changed_entry(tile_schedule, 0, 0, first_tile=first_tiles[1]), 0, 1, first_tile=first_tiles[0])


def short(tile_schedule: Schedule) -> Schedule:
    """A collective waits for one program fewer than it should."""
    return replace(tile_schedule, arrivals=(tile_schedule.arrivals[0] - 1, *tile_schedule.arrivals[1:]))


def long(tile_schedule: Schedule) -> Schedule:
    return replace(tile_schedule, arrivals=(tile_schedule.arrivals[0] + 1, *tile_schedule.arrivals[1:]))


def wrong_group(tile_schedule: Schedule) -> Schedule:
    """One program increments another group's counter."""
    return changed_entry(tile_schedule, 0, 0, group=1)


def cut(tile_schedule: Schedule) -> Schedule:
    """The first group's collective includes one extra tile."""
    step = tile_schedule.bounds[-1] // 2 if len(tile_schedule.bounds) == 2 else 6
    return replace(tile_schedule, bounds=(0, tile_schedule.bounds[1] + step, *tile_schedule.bounds[2:]))


BROKEN = [early, short, long, wrong_group, cut]
SCATTER = "matmul_reduce_scatter"


@pytest.mark.parametrize(
    ("op", "broken"),
    [
        *itertools.product(REDUCING, BROKEN),
        (SCATTER, twice),
        (SCATTER, swapped),
    ],  # with one owner, positions equal tile numbers
    ids=lambda f: getattr(f, "__name__", f),
)
def test_a_broken_schedule_is_caught(broken: Callable[[Schedule], Schedule], op: str, monkeypatch: Any) -> None:
    """Five programs compute 30 tiles of two owners (15 tiles each), in groups of two and four waves."""
    plan = replace(S, groups=(2, 3), ctas=1)

    def main(world: weft.World) -> float:
        return case(world, op, [80, 80], 96, 32, plan, calls=2)

    for seed in range(3):
        assert max(emulate(main, 2, seed)) < 5e-3
    monkeypatch.setattr(signaled, "schedule", lambda *a: broken(schedule(*a)))

    def caught(seed: int) -> bool:
        try:
            return max(emulate(main, 2, seed)) > 5e-3
        except (weft.Race, weft.Deadlock, weft.SignalError, weft.MemoryFault):
            return True

    assert any(map(caught, range(8))), f"{broken.__name__}: {broken.__doc__}"


# -- rows in tiles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", REDUCING)
@pytest.mark.parametrize("shape", [(40, 72, 24), (33, 16, 40), (7, 100, 8), (96, 64, 16)])
def test_a_later_op_restores_the_order_of_tiles(op: str, shape: tuple[int, int, int]) -> None:
    """The Remap maps each element to its position; RMSNorm and the residual add read through it."""
    m, n, k = shape

    def main(world: weft.World) -> None:
        assert tiles_case(world, op, m, n, k, "signaled") < 3e-3
        x, w = draw(world.rank, m, k), draw(50 + world.rank, n, k)
        rows_in_order, none = getattr(weft, f"{op}_tiles")(x, w, world=world, plan="sequential")
        assert none is None and distance(rows_in_order, getattr(weft, op)(x, w, world=world, plan="signaled")) < 5e-3

    emulate(main, 3)


@pytest.mark.parametrize("n", [16, 13])
def test_out_that_bulk_stores_cannot_reach(n: int) -> None:
    """On one rank alone, bulk stores cannot reach `out`; this must not change the ranks' communication."""

    def main(world: weft.World) -> float:
        x, w = draw(world.rank, 8, 16), draw(5, n, 16) * 0.1
        out = torch.zeros(1 + 8 * n, dtype=x.dtype)[1 if world.rank else 0 :][: 8 * n].view(8, n)
        assert weft.matmul_all_reduce(x, w, world=world, plan="signaled", out=out) is out
        world.synchronize()
        return distance(out, sum(draw(r, 8, 16).double() for r in range(world.size)) @ w.double().t())

    assert max(emulate(main, 2)) < 5e-3


def test_an_eager_call_prepares_captures_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """If "auto" chooses a signaled plan only in graphs, a result in tiles has a different layout in a graph."""
    chosen = dict(graph=S, eager=Sequential())
    monkeypatch.setattr(MatmulAllReduce, "auto", lambda op, world, call, mode: chosen[mode])

    def main(world: weft.World) -> None:
        x, w = draw(world.rank, 32, 32), draw(5, 64, 32) * 0.1
        for op in (weft.matmul_all_reduce, weft.matmul_all_reduce_tiles):
            for _ in range(2):
                op(x, w, world=world)
        backend: Any = world.backend
        backend.capturing = lambda: True
        _, remap = weft.matmul_all_reduce_tiles(x, w, world=world)
        assert remap is not None

    emulate(main, 2)


def test_rms_norm_of_nothing_and_of_float16() -> None:
    def main(world: weft.World) -> None:
        weight = draw(1, 40, dtype=torch.float16)
        assert weft.rms_norm(torch.empty(0, 40, dtype=torch.float16), weight, 1e-6, world=world).shape == (0, 40)
        x = draw(2, 9, 40, dtype=torch.float16)
        ref = torch.nn.functional.rms_norm(x.double(), (40,), weight.double(), 1e-6)
        assert distance(weft.rms_norm(x.t().contiguous().t(), weight, 1e-6, world=world), ref) < 1e-3

    emulate(main, 1)


# -- unsupported calls -------------------------------------------------------------------------------------------------


def test_errors_quote_the_arguments() -> None:
    def main(world: weft.World) -> None:
        x, w = draw(0, 20, 24), draw(1, 40, 24)
        tiles, remap = weft.matmul_all_reduce_tiles(x, w, world=world, plan="signaled")
        norm: Any = weft.rms_norm
        for error, says, call in (
            (ValueError, r"\[19, 40\]", lambda: weft.residual_add(tiles, draw(3, 19, 40), world=world, remap=remap)),
            (ValueError, r"x \[20, 40\].*Remap", lambda: norm(draw(3, 20, 40), draw(3, 40), 1e-6, world=world, remap=remap)),
            (ValueError, r"weight \[39\]", lambda: norm(tiles, draw(3, 39), 1e-6, world=world, remap=remap)),
            (TypeError, "one dtype", lambda: norm(tiles, draw(3, 40).half(), 1e-6, world=world, remap=remap)),
            (TypeError, "float32", lambda: norm(draw(3, 4, 4).float(), draw(3, 4).float(), 1e-6, world=world)),
            (ValueError, "2-D", lambda: norm(draw(3, 4), draw(3, 4), 1e-6, world=world)),
            (ValueError, "gradient", lambda: norm(draw(3, 4, 4).requires_grad_(), draw(3, 4), 1e-6, world=world)),
            (TypeError, "World", lambda: norm(x, x[0], 1e-6, world=None)),
            (ValueError, "tiles: such a call has no gradient", lambda: weft.matmul_all_reduce_tiles(x.clone().requires_grad_(), w, world=world)),
            (ValueError, "decomposed.*fused", lambda: weft.all_gather_matmul(x, w, world=world, plan="signaled")),
            (ValueError, "not one of", lambda: weft.all_gather_matmul(x, w, world=world, plan=S)),
            (weft.Unsupported, "6 CTAs", lambda: weft.matmul_all_reduce(x, w, world=world, plan=replace(S, ctas=6))),
        ):  # fmt: skip
            with pytest.raises(error, match=says):
                call()
        assert distance(weft.matmul_all_reduce(x, w, world=world, plan="signaled"), tiles.flatten()[remap.index()]) == 0

    emulate(main, 2)


def test_unsupported_signaled_calls_are_sequential_with_one_warning(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        assert max(emulate(lambda w: case(w, "matmul_all_reduce", [8, 8], 16, 20, "signaled", calls=3), 2)) < 5e-3
    lines = [r.getMessage() for r in caplog.records if "sequential instead of signaled" in r.getMessage()]
    assert len(lines) == 1 and all(line.startswith("matmul_all_reduce") and "K 20" in line for line in lines)


def test_one_rank() -> None:
    assert max(emulate(lambda w: case(w, "matmul_all_reduce", [20], 16, 24, "signaled"), 1)) < 5e-3


def test_a_plan_is_text_and_back() -> None:
    plan = Signaled(groups=(1, 2, 3), ctas=4, tile=GemmTile(block_n=128))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan_of(text_of(plan)) == plan and plan_of(text_of(Signaled())) == Signaled()
    with pytest.raises(ValueError, match="groups"):
        Plan.from_json('{"kind": "signaled", "groups": 3}')


# -- all-to-all --------------------------------------------------------------------------------------------------------


TO_ALL: list[str | Plan] = [
    "sequential",
    "signaled",
    changed(S, groups=(1, 1, 2), block_n=16),
    replace(S, groups=(9,), ctas=4),
    replace(S, copies=True, groups=(1, 1, 2), ctas=2),
]


@pytest.mark.parametrize("plan", TO_ALL, ids=range(len(TO_ALL)))
@pytest.mark.parametrize("ranks", some([1, 2, 4], 2))
def test_all_to_all(ranks: int, plan: str | Plan) -> None:
    for i, rows in enumerate(([40] * ranks, [33, 0, 70, 5][:ranks], [100, 1, 0, 2][:ranks], [0] * ranks)):
        for weights in (None, [1, 0, 9, 0][:ranks]):
            to = drawn(i, ranks, rows, weights)
            rank_errors = emulate(lambda w, to=to, i=i: all_to_all_case(w, to, 72, 24, plan, seed=i), ranks, i)
            assert max(rank_errors) < 5e-3
    to = drawn(9, ranks, [37] * ranks)
    for n in (40, 39):  # a result with 39 columns needs the sequential plan
        rank_errors = emulate(
            lambda w, n=n: all_to_all_case(w, to, n, 40, plan, bias=True, dtype=torch.float16, into=True), ranks, 1
        )
        assert max(rank_errors) < 1e-3


@pytest.mark.parametrize("seed", some(range(10)))
def test_all_to_all_under_many_schedules(seed: int) -> None:
    """Ranks have different numbers of waves, and several routings alternate, some of them repeatedly; ops overlap, as
    on a GPU."""

    def main(world: weft.World) -> float:
        worst = 0.0
        for i in range(3):
            to = drawn(seed * 10 + i, 3, [(90, 10, 0), (20, 50, 70), (16, 16, 16)][i], None if i % 2 else [1, 5, 1])
            plan = replace(S, groups=((), (1, 1), (1, 3))[(i + seed) % 3], copies=seed % 2 > 0)
            worst = max(worst, all_to_all_case(world, to, 48, 16, plan, seed=i, calls=2, again=i != 1))
        return worst

    assert max(emulate(main, 3, seed, preempt=0.2)) < 5e-3


@pytest.mark.parametrize("seed", some(range(4)))
def test_all_to_all_in_a_loop_over_tiles_as_before_hopper(seed: int) -> None:
    def main(world: weft.World, plan: Plan) -> float:
        world.backend.capability = AMPERE
        to = drawn(seed, 3, (40, 0, 70))
        return all_to_all_case(world, to, 72, 24, plan, seed=seed, calls=2, bias=True)

    for plan in TO_ALL[2:]:
        assert isinstance(plan, Plan)
        assert max(emulate(lambda w, p=plan: main(w, p), 3, seed, preempt=0.2)) < 5e-3


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.integers(0, 60), min_size=2, max_size=4), n=st.integers(1, 9), k=st.integers(1, 6),
    groups=st.lists(st.integers(1, 3), max_size=3), group_m=st.integers(1, 4), run=st.integers(0, 99),
)  # fmt: skip
def test_all_to_all_of_any_shape(rows: list[int], n: int, k: int, groups: list[int], group_m: int, run: int) -> None:
    to = drawn(run, len(rows), rows)
    plan = changed(S, groups=tuple(groups), group_m=group_m, copies=run % 2 > 0)
    assert max(emulate(lambda w: all_to_all_case(w, to, 8 * n, 8 * k, plan, seed=run), len(rows), run)) < 8e-3


def test_an_eager_call_prepares_the_plan_of_a_capture() -> None:
    """The capture runs a different plan that needs tables and symmetric memory, without an exchange between hosts."""

    def main(world: weft.World) -> bool:
        backend: Any = world.backend
        backend.sm_count, backend.scale = 32, Scale()
        x, w, bias = draw(world.rank, 40, 24), draw(50 + world.rank, 72, 24), draw(9, 72)
        routing = weft.route([i % 2 for i in range(40)], world=world)
        expected = weft.matmul_all_to_all(x, w, destinations=routing, world=world).clone()
        alone = bias if world.rank else None  # one rank may have a bias while the others have none
        weft.matmul_all_to_all(x, w, alone, destinations=routing, world=world)
        added = weft.matmul_all_to_all(x, w, alone, destinations=routing, world=world).clone()
        world.exchange(None)
        backend.capturing, exchange, backend.exchange = lambda: True, backend.exchange, None
        actual = weft.matmul_all_to_all(x, w, destinations=routing, world=world)
        worst = max(
            distance(actual, expected),
            distance(weft.matmul_all_to_all(x, w, alone, destinations=routing, world=world), added),
        )
        backend.exchange = exchange
        return worst < 5e-3 and "pool" in world._buffers

    for mode, plan in (("eager", Sequential()), ("graph", replace(S, ctas=4, copies=True))):
        learn([Measured("matmul_all_to_all", 2, 40, 72, 24, mode, plan, 1.5)])
    assert all(emulate(main, 2))


def test_a_sequential_all_to_all_multiplies_by_the_fastest_library() -> None:
    """On a GPU, cuBLAS computes a GEMM into new memory (`CudaBackend.linear`); quack may compute a GEMM into `out`."""

    def main(world: weft.World) -> list[bool]:
        linear, has_out = world.backend.linear, []

        def recorded(*operands: Any) -> torch.Tensor:
            has_out.append(len(operands) == 5)
            return linear(*operands)

        world.backend.linear = recorded  # type: ignore[method-assign]
        x, w = draw(world.rank, 6, 24), draw(50, 40, 24)
        weft.matmul_all_to_all(x, w, destinations=[0, 1] * 3, world=world, plan="sequential")
        return has_out

    assert emulate(main, 2) == [[True]] * 2


def test_all_to_all_errors() -> None:
    def main(world: weft.World) -> None:
        me, fn = world.rank, weft.matmul_all_to_all
        x, w = draw(0, 6, 24), draw(1, 40, 24)
        good = [0, 1, 1, 0, 0, 1]
        for error, says, call in (
            (ValueError, "rank 1 go from 0 to 2", lambda: weft.route([0, 1 + me], world=world)),
            (ValueError, "rank 0 must be a list of integers", lambda: weft.route([0.5] if me == 0 else [0], world=world)),
            (ValueError, "rank 1 must be a list", lambda: weft.route([[0]] if me else [0], world=world)),
            (ValueError, r"x \[6, 24\] .* 5 destinations", lambda: fn(x, w, destinations=good[:5], world=world)),
            (ValueError, "not .*auto.*sequential.*signaled", lambda: fn(x, w, destinations=good, world=world, plan="fused")),
            (ValueError, "nonsense", lambda: fn(x, w, destinations=good, world=world, plan="nonsense")),
            (ValueError, "gradient", lambda: fn(x, w.clone().requires_grad_(), destinations=good, world=world)),
            (weft.Mismatch, "disagree", lambda: fn(x, draw(1, 40 + 8 * me, 24), destinations=good, world=world)),
        ):  # fmt: skip
            with pytest.raises(error, match=says):
                call()
        routing, reversed_routing = weft.route(good, world=world), weft.route(good[::-1], world=world)
        with pytest.raises(weft.Mismatch, match="routing"):
            fn(x, w, destinations=reversed_routing if me else routing, world=world)
        other_world = weft.World(world.backend, f"another on rank {me}")
        with pytest.raises(ValueError, match="another World"):
            fn(x, w, destinations=routing, world=other_world)
        assert routing.counts == ((3, 3), (3, 3)) and "destinations" not in repr(routing)
        assert fn(x, w, destinations=torch.tensor(good), world=world, plan="auto").shape == (6, 40)

    emulate(main, 2)


def shifted(tables: GroupTables) -> GroupTables:
    """A row is stored at the next row's position."""
    tables.row_map[1] += 1
    return tables


def exchanged(tables: GroupTables) -> GroupTables:
    """Two rows are exchanged."""
    tables.row_map[:2] = tables.row_map[:2].flip(0)
    return tables


def mistaken(tables: GroupTables) -> GroupTables:
    """A group's rows begin one row too early and overwrite the last row of another group."""
    sender = 1 - tables.signals.ch.state[0].item()
    rows = tables.received[1][sender]
    tables.received[1][sender] = slice(rows.start - 1, rows.stop - 1)
    return tables


def pulled_early(tables: GroupTables) -> GroupTables:
    """Rows of another group are pulled from a peer's buffer."""
    sender = 1 - tables.signals.ch.state[0].item()
    rows = tables.pulled[0][sender]
    tables.pulled[0][sender] = slice(rows.stop, 2 * rows.stop - rows.start)
    return tables


BROKEN = [early, short, long, wrong_group, shifted, exchanged, mistaken, pulled_early]


@pytest.mark.parametrize(
    ("broken", "copies"),
    [(f, copies) for f in BROKEN for copies in (False, True) if copies or f is not pulled_early],
)
def test_a_broken_all_to_all_is_caught(broken: Callable[[Any], Any], copies: bool, monkeypatch: Any) -> None:
    to = drawn(3, 2, [80, 80])

    def main(world: weft.World) -> float:
        return all_to_all_case(world, to, 96, 32, replace(S, groups=(1, 2, 3), copies=copies))

    if broken in (shifted, exchanged, mistaken, pulled_early):
        monkeypatch.setattr(to_all, "group_tables", lambda *a: broken(group_tables(*a)))
    else:
        monkeypatch.setattr(to_all, "schedule_of", lambda *a: broken(schedule_of(*a)))

    def caught(seed: int) -> bool:
        try:
            emulate(main, 2, seed)
        except (weft.Race, weft.Deadlock, weft.SignalError, weft.MemoryFault, AssertionError):
            return True
        return False

    assert any(map(caught, range(8))), f"{broken.__name__}: {broken.__doc__}"
