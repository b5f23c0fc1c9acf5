"""Cases of the row-wise ops on a GEMM's rows when its result is stored as tiles, for every backend: each function runs
on one rank.
"""

from __future__ import annotations

from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw
from weft.plans import Plan


def tiles_case(world: weft.World, op: str, m: int, n: int, k: int, plan: str | Plan) -> float:
    """Compare an op that returns tiles with the op that returns ordinary rows, through the Remap and through the
    residual add. Compare RMSNorm of rows and of tiles with torch's, and return its error."""
    device, fn = world.device, getattr(weft, op)
    x, w, b = (t.to(device) for t in (draw(world.rank, m, k), draw(50 + world.rank, n, k), draw(9, n)))
    ordered = fn(x, w, b, world=world, plan=plan)
    tiles, remap = getattr(weft, f"{op}_tiles")(x, w, b, world=world, plan=plan)
    assert tuple(tiles.shape) == remap.shape
    weight, residual = draw(11, n).to(device), draw(12 + world.rank, *ordered.shape).to(device)
    from_tiles = tiles.flatten()[remap.index().to(device)]  # the same rows, read from the tiles
    same: list[tuple[torch.Tensor, torch.Tensor]] = []
    norms: list[Any] = []
    for rows, order, plain in ((ordered, None, ordered), (tiles, remap, from_tiles)):
        with_residual = plain + residual
        out, total = weft.rms_norm(rows, weight, 1e-5, world=world, remap=order, residual=residual)
        same += [(total, with_residual), (weft.residual_add(rows, residual, world=world, remap=order), with_residual)]
        norms += [(out, with_residual), (weft.rms_norm(rows, weight, 1e-5, world=world, remap=order), plain)]
    world.synchronize()
    assert all(torch.equal(actual, expected) for actual, expected in same)
    # NCCL's order of summation may depend on an element's place in the buffer, which differs between rows and tiles.
    apart = distance(from_tiles, ordered)
    assert apart == 0 or (world.backend.name == "cuda" and op == "matmul_all_reduce")
    return max(
        apart,
        *(distance(out, torch.nn.functional.rms_norm(h.double(), (n,), weight.double(), 1e-5)) for out, h in norms),
    )
