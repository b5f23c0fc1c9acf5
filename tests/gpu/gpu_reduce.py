"""GPU checks of the all-reduce ops; gpu_main.py runs them. `checks` yields a name, a bound and a function for each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_all_reduce import FP8, bound, norm_case, random_case, sum_case
from weft.lang.mapping import balanced_rows
from weft.plans import Decomposed, OneShot, Plan, TwoShotLowLatency, TwoShotPull, TwoShotPush

PLANS: dict[str, Plan] = {
    "decomposed": Decomposed(),
    "one shot": OneShot(),
    "two shots": TwoShotPush(),
    "two shots, posted": TwoShotLowLatency(),
    "two shots, spread": TwoShotPush(warps=8, spread=True),
    "two shots, pulled": TwoShotPull(),
    "two shots, pulled, 16 programs": TwoShotPull(programs=16),
    "two shots, 2 programs": TwoShotPush(programs=2),
    "two shots, a source at a time": TwoShotPush(stages=2),
    "two shots, pulled a source at a time": TwoShotPull(programs=16, stages=2),
}
Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def calls(world: weft.World, m: int, h: int, plan: Plan, seed: int = 0) -> tuple[torch.Tensor, Run]:
    """Return x, and a call that normalises x into the call's own symmetric memory."""
    x = draw(seed + world.rank, m, h).to(world.device)
    rows = balanced_rows(m, world.size)
    residual = draw(seed + 50 + world.rank, rows[world.rank], h).to(world.device)
    weight = draw(seed + 99, h).to(world.device)
    out = world.symmetric((m, h), torch.bfloat16, "out").local
    return x, lambda: weft.all_reduce_rms_norm(x, residual, weight, world=world, plan=plan, out=out)


def delays(world: weft.World, plan: Plan, m: int) -> float:
    """Random ranks start late in every call, by up to several hundred microseconds: the bits must be the same every
    time."""
    rng = random.Random(100 + world.rank)
    _, run = calls(world, m, 1024, plan)
    expected = [t.clone() for t in run()]
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for _ in range(60):
        if rng.random() < 0.4:
            torch.cuda._sleep(rng.randrange(1000, 600000))
        for actual, first_result in zip(run(), expected, strict=True):
            wrong += (actual != first_result).any()
            if rng.random() < 0.2:  # a slow reader of memory to which a peer's next call will write
                torch.cuda._sleep(rng.randrange(1000, 200000))
                wrong += (actual != first_result).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def many_calls(world: weft.World, count: int) -> float:
    """Make calls of all plans and two shapes back to back, and compare every result with the first one."""
    todo = []
    for plan in PLANS.values():
        for m in (3, 250):
            _, run = calls(world, m, 1024, plan, seed=m)
            todo.append((run, [t.clone() for t in run()]))
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    rng = random.Random(7)
    for _ in range(count):
        run, expected = rng.choice(todo)
        for actual, first_result in zip(run(), expected, strict=True):
            wrong += (actual != first_result).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def replay(world: weft.World, plan: Plan, replays: int) -> float:
    """Replay a graph of three calls with new inputs between eager calls: the bits must equal those of eager calls."""
    x, run = calls(world, 200, 1024, plan)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
        run()
        run()
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    y, _ = run()
    for i in range(replays):
        x.add_(0.01 * (i % 3))
        graph.replay()
        kept = y.clone()
        run()
        wrong += (y != kept).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def same_bits(world: weft.World) -> float:
    """Every plan must give the same bits on every rank. All plans add in rank order and therefore give the same sums.
    In the norm, the compiler rounds the products in the sum of squares differently in different kernels, so plans are
    compared up to rounding."""
    checksums, sums, norms = [], [], []
    for plan in PLANS.values():
        _, run = calls(world, 100, 2048, plan)
        y, kept = (t.clone() for t in run())
        world.synchronize()
        checksums.append(y.view(torch.int16).long().sum().item())
        sums.append(kept)
        norms.append(y)
    checksums_by_rank = world.exchange(checksums)
    ok = all(t == checksums for t in checksums_by_rank) and all(torch.equal(kept, sums[0]) for kept in sums)
    ok &= all(distance(y, norms[0]) < 1e-3 for y in norms)
    return 0.0 if ok else float("inf")


def random_calls(world: weft.World, count: int) -> float:
    rng = random.Random(world.size)
    plans = list(PLANS.values())
    return max(random_case(world, rng.choice(plans), rng, 600, 4096) for _ in range(count))


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    BF16 = bound(torch.bfloat16)
    for name, plan in PLANS.items():
        title = f"all-reduce + norm, {name}"
        most = 64 if isinstance(plan, OneShot) else 333
        yield title, BF16, partial(norm_case, world, most, 8192, plan)
        yield (
            f"{title}, symmetric",
            BF16,
            partial(norm_case, world, most, 8192, plan, into="symmetric", symmetric=True),
        )
        yield f"{title}, one row", BF16, partial(norm_case, world, 1, 2048, plan, calls=3)
        yield f"{title}, delays", 0.0, partial(delays, world, plan, most)
        yield f"{title}, replay", 0.0, partial(replay, world, plan, 30)
    one_shot, two_shot, two_shot_ll = PLANS["one shot"], PLANS["two shots"], PLANS["two shots, posted"]
    for name, plan, rows in (("", two_shot, 333), (", posted", two_shot_ll, 133), (", one shot", one_shot, 33)):
        layer = dict(norm="layer", bias=True, full=True)
        yield f"all-reduce + norm, full layer bias{name}", BF16, partial(norm_case, world, rows, 5120, plan, **layer)
        yield (
            f"all-reduce + norm, fp8{name}",
            bound(FP8),
            partial(norm_case, world, rows, 4096, plan, quantize="tensor"),
        )
        wide = partial(norm_case, world, min(rows, 100), 16384, plan, dtype=torch.float32)
        yield f"all-reduce + norm, float32{name}", 1e-5, wide
    yield "all-reduce, two shots", BF16, partial(sum_case, world, (1000, 1000), two_shot)
    yield "all-reduce, one shot", BF16, partial(sum_case, world, (4, 8192), one_shot)
    yield "all-reduce + norm, same bits", 0.0, partial(same_bits, world)
    yield "all-reduce + norm, 1,000 calls", 0.0, partial(many_calls, world, 1000)
    yield "all-reduce + norm, random shapes (of the bound)", 1.0, partial(random_calls, world, 10)
