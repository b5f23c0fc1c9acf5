"""GPU checks of the signaled plan, the all-to-all and the row-wise ops; tests/gpu/gpu_main.py runs them among its own
checks.

To run them alone: torchrun --nproc-per-node N -m tests.gpu.gpu_main --out DIR --only signaled
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

import weft
from tests.emulated.cases import draw
from tests.emulated.cases_matmul_all_to_all import all_to_all_case, drawn
from tests.emulated.cases_matmul_reduce import reduce_case
from tests.emulated.cases_norm import tiles_case
from weft.plans import GemmTile, Signaled

BF16 = 5e-3
SCATTER, ALL = "matmul_reduce_scatter", "matmul_all_reduce"
PLANS = {
    "": Signaled(),
    ", one wave a group": Signaled(groups=(1,) * 12, ctas=4),
    ", 16 CTAs, one group": Signaled(groups=(99,), ctas=16),
    ", 128 x 128": Signaled(groups=(1, 2), ctas=12, tile=GemmTile(block_n=128, warps=4, stages=4)),
    ", by copies": Signaled(ctas=4, copies=True),
    ", by copies, one wave a group": Signaled(groups=(1,) * 12, ctas=8, copies=True),
}


SMALL = Signaled(groups=(1, 1, 1), tile=GemmTile(block_m=64, block_n=64, warps=4))  # small shapes have several waves
COPIES = replace(SMALL, ctas=4, copies=True)


def random_shapes(world: weft.World, count: int) -> float:
    rng, worst = random.Random(world.size), 0.0
    for i in range(count):
        m, n, k = rng.randrange(1, 3000), rng.randrange(1, 1500), 8 * rng.randrange(1, 60)
        dtype = rng.choice([torch.bfloat16, torch.float16])
        plan = Signaled(groups=tuple(rng.randrange(1, 4) for _ in range(rng.randrange(4))), ctas=rng.choice([4, 8]))
        op, bias = rng.choice([SCATTER, ALL]), rng.random() < 0.5
        plan = replace(plan, copies=op == SCATTER and rng.random() < 0.5)
        if plan.copies:
            n = -(-n // 8) * 8
            m = -(-m // (128 * world.size)) * 128 * world.size
        worst = max(worst, reduce_case(world, m, n, k, plan, bias, op == ALL, dtype, seed=i))
    return worst


def replay_to_ranks(world: weft.World, plan: Signaled, replays: int) -> float:
    """Replay a graph of two calls with two routings and new inputs, alternating with eager calls: the bits must be
    equal."""
    rng, n, k, m = random.Random(3), 512, 256, 1000 + 100 * world.rank
    routings = [weft.route([rng.randrange(world.size) for _ in range(m)], world=world) for _ in range(2)]
    x, w = draw(world.rank, m, k).to(world.device), draw(50 + world.rank, n, k).to(world.device)
    fn = partial(weft.matmul_all_to_all, x, w, world=world, plan=plan)
    expected = [fn(destinations=r).clone() for r in routings]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [fn(destinations=r) for r in routings]
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for i in range(replays):
        x.add_(0.01 * (i % 3))
        graph.replay()
        if i % 5 == 0:
            expected = [fn(destinations=r) for r in routings]
            wrong += sum((a != b).any() for a, b in zip(captured, expected, strict=True))
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def streams(world: weft.World, plan: Signaled) -> float:
    """Make calls of one shape, which share counters, on three streams."""
    x, w = draw(world.rank, 2048, 256).to(world.device), draw(50 + world.rank, 1024, 256).to(world.device)
    fn = partial(weft.matmul_all_reduce, x, w, world=world, plan=plan)
    expected, others, results = fn().clone(), [torch.cuda.Stream() for _ in range(3)], []
    world.synchronize()
    for i in range(30):
        with torch.cuda.stream(others[i % 3]):
            results.append(fn())
    world.synchronize()
    return 0.0 if all(torch.equal(y, expected) for y in results) else float("inf")


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    from tests.gpu.gpu_main import delays, replay

    size = world.size
    for op in (ALL, SCATTER):
        for name, plan in ((name, plan) for name, plan in PLANS.items() if op == SCATTER or not plan.copies):
            yield (
                f"{op} signaled{name}",
                BF16,
                partial(reduce_case, world, 512 * size, 2048, 512, plan, everywhere=op == ALL, calls=3),
            )
        yield (
            f"{op} signaled, uneven",
            BF16,
            partial(reduce_case, world, 1003, 519, 264, Signaled(), True, op == ALL, calls=2),
        )
        yield f"{op} signaled, tiles", BF16, partial(tiles_case, world, op, 1000, 1032, 264, Signaled(groups=(1, 1)))
        for name, plan in (("", SMALL), *([(" by copies", COPIES)] if op == SCATTER else [])):
            yield f"{op} signaled{name} delays", 0.0, partial(delays, world, op, plan)
            yield f"{op} signaled{name} replay x100", 0.0, partial(replay, world, op, plan, 100)
    to_even, to_odd = (
        drawn(1, size, [2000] * size),
        drawn(2, size, [3000, 0, *[77] * size][:size], [9, *[1] * (size - 1)]),
    )
    for plan in (Signaled(), SMALL, COPIES, "sequential"):
        name = plan if isinstance(plan, str) else f"signaled {plan.groups}{' by copies' * plan.copies}"
        yield f"all-to-all, {name}", BF16, partial(all_to_all_case, world, to_even, 1024, 128, plan, bias=True)
        yield f"all-to-all, {name}, unbalanced", BF16, partial(all_to_all_case, world, to_odd, 520, 264, plan)
    for name, plan in (("", SMALL), (" by copies", COPIES)):
        yield f"all-to-all signaled{name} replay x100", 0.0, partial(replay_to_ranks, world, plan, 100)
    yield "signaled streams", 0.0, partial(streams, world, Signaled(groups=(1,)))
    yield "signaled, random shapes", BF16, partial(random_shapes, world, 8)
    chosen = [1000, 0, *[1] * (size - 2)][:size]
    yield (
        "signaled, rows of the caller's choice",
        BF16,
        partial(reduce_case, world, sum(chosen), 520, 264, Signaled(), rows=chosen),
    )
    yield (
        "large GEMM + all-reduce, signaled",
        BF16,
        partial(reduce_case, world, 8192, 8192, 1024, Signaled(), everywhere=True, calls=2),
    )
    yield (
        "uneven GEMM + reduce-scatter, signaled",
        BF16,
        partial(reduce_case, world, 8191, 4096, 1376, Signaled(), calls=2),
    )
