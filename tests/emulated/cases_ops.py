"""Cases of every op that contains a GEMM, for every backend: each function runs on one rank and returns its error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw, product
from tests.emulated.cases_all_gather_matmul import all_gather_case
from tests.emulated.cases_matmul_reduce import reduce_case
from weft.lang.mapping import balanced_rows
from weft.plans import Fused, FusedAllReduce, FusedGather, FusedReduceScatter
from weft.scale import SMALL_ALL_REDUCE, SMALL_GATHER, SMALL_REDUCE_SCATTER

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
KINDS = ("sequential", "decomposed", "fused", "one_shot")
FUSED: dict[str, Fused] = dict(zip(OPS, (FusedGather(), FusedReduceScatter(), FusedAllReduce()), strict=True))
SMALL_FUSED: dict[str, Fused] = dict(zip(OPS, (SMALL_GATHER, SMALL_REDUCE_SCATTER, SMALL_ALL_REDUCE), strict=True))


def shared_case(world: weft.World, op: str, rows: int, n: int, plan: object) -> float:
    """`out` shares memory with x: x is this rank's rows in the `out` of an all-gather, or the whole `out` of an
    all-reduce."""
    xs, w = [draw(r, rows, n) for r in range(world.size)], draw(9, n, n) * 0.1
    if op == "all_gather_matmul":
        out = world.zeros((rows * world.size, n), w.dtype)
        x, expected = out[rows * world.rank :][:rows], product(torch.cat(xs), w, world)
    else:
        out = x = world.zeros((rows, n), w.dtype)
        expected = sum(product(x, w, world) for x in xs)
    x.copy_(xs[world.rank])
    assert getattr(weft, op)(x, w.to(world.device), world=world, plan=plan, out=out) is out
    world.synchronize()
    return distance(out, expected)


def case(
    world: weft.World, op: str, rows: Sequence[int], n: int, k: int, plan: object = "fused", **options: Any
) -> float:
    """Return the error of one op with `rows` on its ranks; M is their sum. An all-reduce, or an all-gather without
    `rows`, needs only M."""
    if op == "all_gather_matmul":
        return all_gather_case(world, rows, n, k, plan, **options)
    if op == "matmul_all_reduce":
        return reduce_case(world, sum(rows), n, k, plan, everywhere=True, **options)
    balanced = list(rows) == balanced_rows(sum(rows), world.size)
    return reduce_case(world, sum(rows), n, k, plan, rows=None if balanced else rows, **options)
