"""Cases of all-gather + GEMM for every backend: each function runs on one rank and returns its error."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import weft
from tests.emulated.cases import distance, draw, product, strided


def all_gather_case(
    world: weft.World, shards: Sequence[int], n: int, k: int, plan: object = "fused", bias: bool = False,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, calls: int = 1, views: bool = False, into: bool = False,
) -> float:  # fmt: skip
    """Return the largest error of the results and gathered activations over `calls` calls with fresh inputs. With
    `views`, the inputs are not contiguous; with `into`, the op writes to `out`."""
    worst, device = 0.0, world.device
    m = sum(shards)
    for call in range(calls):
        s = seed * 1000 + call * 10
        parts = [draw(s + 100000 * (r + 1), rows, k, dtype=dtype) for r, rows in enumerate(shards)]
        w = draw(s + 1 + 7 * world.rank, n, k, dtype=dtype) * 0.1
        b = draw(s + 2, n, dtype=dtype) if bias else None
        x_there, w_there, b_there = (None if t is None else t.to(device) for t in (parts[world.rank], w, b))
        if views:
            x_there, w_there = strided(x_there), strided(w_there)
        out = world.zeros((m, n), dtype) if into else None
        actual, gathered = weft.all_gather_matmul_with_gathered(
            x_there, w_there, b_there, world=world, plan=plan, out=out,
            rows=None if len(set(shards)) == 1 else shards,
        )  # fmt: skip
        world.synchronize()
        if into:
            assert actual is out
        full = torch.cat(parts)
        expected = product(full, w, world)
        if b is not None:
            expected = expected + b.to(expected)
        worst = max(worst, distance(actual, expected), distance(gathered, full.to(expected)))
    return worst
