"""Cases of GEMM + all-to-all for every backend: each function runs on one rank."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

import weft
from tests.emulated.cases import distance, draw
from weft.plans import Plan


def drawn(seed: int, ranks: int, rows: Sequence[int], weights: Sequence[float] | None = None) -> list[list[int]]:
    """Return the destinations of every rank's rows."""
    rng = random.Random(seed)
    return [rng.choices(range(ranks), weights, k=m) for m in rows]


def all_to_all_case(
    world: weft.World, to: Sequence[Sequence[int]], n: int, k: int, plan: str | Plan, *, bias: bool = False,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, calls: int = 2, again: bool = True, into: bool = False,
) -> float:  # fmt: skip
    """Return the error of the received rows. Each row must arrive whole and in its place: column 0 contains the row's
    sender."""
    me, size, worst = world.rank, world.size, 0.0
    routing = weft.route(to[me], world=world) if again else None
    for call in range(calls):
        s = seed * 1000 + call * 10
        xs = [draw(s + 100000 * (r + 1), len(to[r]), k, dtype=dtype) for r in range(size)]
        ws = [draw(s + 200000 * (r + 1), n, k, dtype=dtype) * 0.1 for r in range(size)]
        bs = [draw(s + 300000 * (r + 1), n, dtype=dtype) if bias else None for r in range(size)]
        out = world.zeros((sum(list(d).count(me) for d in to), n), dtype) if into else None
        b = bs[me]
        actual = weft.matmul_all_to_all(
            xs[me].to(world.device), ws[me].to(world.device), None if b is None else b.to(world.device),
            destinations=routing or to[me], world=world, plan=plan, out=out,
        )  # fmt: skip
        world.synchronize()
        assert out is None or actual is out
        parts = []
        for r in range(size):
            y = xs[r].double() @ ws[r].double().t() + (0 if bs[r] is None else bs[r].double())  # type: ignore[union-attr]
            parts.append(y[[i for i, d in enumerate(to[r]) if d == me]])
        expected = torch.cat(parts)
        worst = max(worst, distance(actual, expected))
        bound = 2.0**-7 * expected.abs() + 2.0**-7 * expected.abs().max() if expected.numel() else expected
        assert ((actual.double().cpu() - expected).abs() <= bound).all(), "an element differs"
    return worst
