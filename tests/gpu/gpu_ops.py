"""Check every op with a GEMM and the norm on small shapes, with all kinds of plans, late ranks and two streams.
gpu_main.py runs these checks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import weft
from tests.emulated.cases import changed, draw, on_stream
from tests.emulated.cases_all_reduce import bound, norm_case
from tests.emulated.cases_matmul_all_to_all import all_to_all_case, drawn
from tests.emulated.cases_ops import FUSED, OPS, case
from weft.lang.mapping import balanced_rows
from weft.plans import (
    Decomposed,
    FusedGatherByCopies,
    GemmTile,
    OneShot,
    Plan,
    Signaled,
    TwoShotLowLatency,
    TwoShotPush,
)

REDUCING = ("matmul_reduce_scatter", "matmul_all_reduce")


def few_programs(op: str) -> Plan:
    """Return the default plan of an all-gather, or a plan with few, small programs for a sum."""
    if op == "all_gather_matmul":
        return FUSED[op]
    return changed(FUSED[op], pull_programs=6, forward_programs=2, pull_rows=16, pull_stages=2)


def again(world: weft.World, calls: list[tuple[Callable[[], Any], Any]], count: int, seed: int) -> float:
    """Repeat these calls, which are the same on every rank, with some ranks late. Return infinity unless each call
    gives the same bits as the first time."""
    same, late, wrong = (
        random.Random(seed),
        random.Random(world.rank),
        torch.zeros((), device=world.device, dtype=torch.int64),
    )
    for _ in range(count):
        if late.random() < 0.3:
            torch.cuda._sleep(late.randrange(1000, 300_000))
        run, first_results = same.choice(calls)
        results, expected = run(), first_results
        for result, was in zip(*(t if isinstance(t, tuple) else (t,) for t in (results, expected)), strict=True):
            wrong += (result != was).any()
        if same.random() < 0.1:
            world.barrier()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def cloned(run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    result = run()
    return run, tuple(t.clone() for t in result) if isinstance(result, tuple) else result.clone()


def low_latency(world: weft.World) -> float:
    """Draw shapes, uneven ranks and late ranks, with all-reduces between the calls: repeated calls must give the same
    bits."""
    plans: dict[str, list[Plan]] = {op: [OneShot(programs=8), OneShot(programs=5, warps=4)] for op in OPS}
    plans["matmul_all_reduce"] = [OneShot(programs=8), TwoShotLowLatency(programs=8)]
    rng, worst, calls, size = random.Random(5), 0.0, [], world.size
    for i in range(30):
        op, n, k = rng.choice(OPS), rng.choice([64, 1032, 2048]), rng.choice([72, 264])
        rows = [rng.randrange(1, 40) for _ in range(size)] if i % 2 else [rng.randrange(1, 40)] * size
        worst = max(worst, case(world, op, rows, n, k, rng.choice(plans[op]), calls=2, seed=i, bias=i % 3 == 0))
    for op in OPS:
        for plan in plans[op]:
            x = draw(world.rank, 8 if op == OPS[0] else 8 * size, 136).to(world.device)
            weight = draw(50 + world.rank, 264, 136).to(world.device)
            calls.append(cloned(partial(getattr(weft, op), x, weight=weight, world=world, plan=plan)))
    ones = torch.ones(3, 1024, device=world.device)
    calls.append(cloned(partial(weft.all_reduce, ones, world=world, plan=OneShot(programs=3))))
    return max(worst, again(world, calls, 150, 5))


def every_kind(world: weft.World, op: str) -> float:
    """Run whole and partial tiles, uneven ranks, a bias, and float16; return the largest error divided by 1.5 times the
    error of the sequential plan."""
    worst: dict[str, float] = {}
    size, gather = world.size, op == OPS[0]
    second = FusedGatherByCopies() if gather else changed(few_programs(op), pull_programs=2)
    kinds = dict(
        sequential="sequential", decomposed="decomposed", fused=few_programs(op), second=second, one_shot=OneShot()
    )
    for name, kind in kinds.items():
        for rows, n, k, options in (
            ([128] * size, 512, 256, {}),
            (balanced_rows(333, size), 264, 136, dict(bias=True, calls=3)),
            (balanced_rows(1, size), 264, 136, {}),
            ([100] * size, 264, 136, dict(dtype=torch.float16, views=True, into=True)),
        ):
            worst[name] = max(worst.get(name, 0.0), case(world, op, rows, n, k, kind, **options))
    sequential = worst.pop("sequential")
    return max(worst.values()) / (1.5 * sequential) if sequential < 5e-3 else float("inf")


def many_calls(world: weft.World) -> float:
    calls = []
    for op in OPS:
        for m in (256, 250):
            rows = balanced_rows(m, world.size)
            x = draw(world.rank, rows[world.rank] if op == OPS[0] else m, 136).to(world.device)
            weight = draw(50 + world.rank, 264, 136).to(world.device)
            options = {"rows": rows} if op == OPS[0] else {}
            calls.append(
                cloned(partial(getattr(weft, op), x, weight=weight, world=world, plan=few_programs(op), **options))
            )
    return again(world, calls, 200, 7)


def halves_of_tiles(world: weft.World, op: str, plan: Plan) -> float:
    """Compute 144 tiles, of which 132 SMs compute the last ones in halves, also with a late rank: repeated calls must
    give the same bits."""
    rows, n, k = [2048 // world.size] * world.size, 2304, 264
    x = draw(world.rank, rows[0] if op == OPS[0] else 2048, k).to(world.device)
    weight = draw(50 + world.rank, n, k).to(world.device)
    call = cloned(partial(getattr(weft, op), x, weight=weight, world=world, plan=plan))
    return max(case(world, op, rows, n, k, plan, calls=2, bias=True), again(world, [call], 50, 5))


def norms(world: weft.World) -> float:
    """Draw shapes and plans, with late ranks: the results must agree with torch's, and repeated calls must give the
    same bits."""
    plans = [OneShot(programs=8), TwoShotLowLatency(programs=8), TwoShotPush(programs=8), Decomposed()]
    rng, worst, calls = random.Random(3), 0.0, []
    for i in range(40):
        plan, m, h = rng.choice(plans), rng.randrange(1, 70), rng.choice([520, 2048])
        worst = max(worst, norm_case(world, m, h, plan, full=rng.random() < 0.3, seed=i, calls=2))
    for plan in plans:
        for m in (3, 64):
            own_rows = balanced_rows(m, world.size)[world.rank]
            tensors = [
                t.to(world.device)
                for t in (draw(world.rank, m, 1024), draw(50 + world.rank, own_rows, 1024), draw(9, 1024))
            ]
            calls.append(cloned(partial(weft.all_reduce_rms_norm, *tensors, 1e-5, world=world, plan=plan)))
    return max(worst, again(world, calls, 150, 3))


def two_streams(world: weft.World) -> float:
    worst = 0.0
    for i in range(6):
        with on_stream(world, ("first", "second")[i % 2]):
            for op in OPS:
                worst = max(worst, case(world, op, [128] * world.size, 264, 136, few_programs(op), seed=i))
    return worst


def signaled(world: weft.World, plan: Signaled) -> float:
    size, worst = world.size, 0.0
    for op in REDUCING:
        for rows, n, k in (([256] * size, 1024, 256), (balanced_rows(1001, size), 520, 136)):
            worst = max(worst, case(world, op, rows, n, k, plan, calls=3, bias=True))
    rows = [(900, 0, 333, 50)[rank % 4] for rank in range(size)]
    return max(worst, all_to_all_case(world, drawn(5, size, rows), 520, 136, plan, bias=True))


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    yield "few rows of every op, delays", 5e-3, partial(low_latency, world)
    for op in OPS:
        yield f"{op}, every kind of plan (of 1.5 x sequential's error)", 1.0, partial(every_kind, world, op)
    yield "few programs, 200 calls, delays", 0.0, partial(many_calls, world)
    for op in OPS:
        yield f"{op}, halves of tiles, delays", 5e-3, partial(halves_of_tiles, world, op, FUSED[op])
    yield f"{OPS[0]}, halves of tiles, by copies", 5e-3, partial(halves_of_tiles, world, OPS[0], FusedGatherByCopies())
    yield "all-reduce + norm, few rows, delays", bound(torch.bfloat16), partial(norms, world)
    yield "few programs, two streams", 5e-3, partial(two_streams, world)
    for title, plan in (
        ("", Signaled(ctas=4)),
        (", narrow tiles", Signaled(ctas=2, groups=(1, 1), tile=GemmTile(block_n=128, warps=4, stages=4))),
    ):
        yield f"signaled, few CTAs{title}", 5e-3, partial(signaled, world, plan)
