"""Cases of GEMM + reduce-scatter and GEMM + all-reduce for every backend: each function runs on one rank and returns
its error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw, product, strided
from weft.lang.mapping import balanced_rows


def reduce_case(
    world: weft.World, m: int, n: int, k: int, plan: object = "fused", bias: bool = False, everywhere: bool = False,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, calls: int = 1, views: bool = False, into: bool = False,
    rows: Sequence[int] | None = None,
) -> float:  # fmt: skip
    """Return the largest error over `calls` calls of GEMM + reduce-scatter (by `rows`, or split as evenly as
    possible), or of GEMM + all-reduce."""
    worst, me, device = 0.0, world.rank, world.device
    op: Any = weft.matmul_all_reduce if everywhere else weft.matmul_reduce_scatter
    shards = list(rows or balanced_rows(m, world.size))
    for call in range(calls):
        s = seed * 1000 + call * 10
        xs = [draw(s + 100000 * (r + 1), m, k, dtype=dtype) for r in range(world.size)]
        ws = [draw(s + 200000 * (r + 1), n, k, dtype=dtype) * 0.1 for r in range(world.size)]
        b = draw(s + 2, n, dtype=dtype) if bias else None
        x_there, w_there, b_there = (None if t is None else t.to(device) for t in (xs[me], ws[me], b))
        if views:
            x_there, w_there = strided(x_there), strided(w_there)
        out = world.zeros((m if everywhere else shards[me], n), dtype) if into else None
        rows_arg = {} if rows is None else {"rows": rows}
        actual = op(x_there, w_there, b_there, world=world, plan=plan, out=out, **rows_arg)
        world.synchronize()
        if into:
            assert actual is out
        expected = sum(product(x, w, world) for x, w in zip(xs, ws, strict=True))
        if b is not None:
            expected = expected + b.to(expected)
        if not everywhere:
            expected = expected[sum(shards[:me]) : sum(shards[: me + 1])]
        worst = max(worst, distance(actual, expected))
    return worst
