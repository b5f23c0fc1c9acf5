"""Fused plans. All-gather: a tile starts when its chunk has been pulled, and the slowest chunk decides by the waves
that are left behind it. The reducing ops: tiles are pulled at one rate under the GEMM and at another when it is
done."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...op import collective
from ...plans import Fused, FusedGather, FusedGatherByCopies, FusedReduce
from ..curves import filled
from ..parts import ITEM, Occupancy, PartTimes
from .decomposed import Chunking, copied, met


@dataclass(frozen=True)
class Pulling:
    """What the pulling programs of one fused variant reach: GB/s under the GEMM and after it, how many times as long a
    tile takes beside them, and what a call costs beside all this."""

    fixed: float = 20.0
    rate: float = 150.0
    drain: float = 300.0
    slow: float = 1.05


def us(p: PartTimes, op: str, plan: Fused, m: int, n: int, k: int, pull: Pulling, chunking: Chunking) -> float:
    """us of one call. chunking: what a copy engine reaches, where one pulls."""
    if isinstance(plan, FusedGather | FusedGatherByCopies):
        return _gathered(p, plan, m, n, k, pull, chunking)
    assert isinstance(plan, FusedReduce)
    return _reduced(p, op, plan, m, n, k, pull)


def _reduced(p: PartTimes, op: str, plan: FusedReduce, m: int, n: int, k: int, pull: Pulling) -> float:
    rows, bm = -(-m // p.world), plan.tile.block_m
    columns = -(-n // plan.tile.block_n)
    chunks, programs = -(-rows // bm), p.sms  # what pulls and forwards shares their SMs
    # All tiles but the last wave's can be pulled under the GEMM, from the end of the first wave on.
    tiles = p.world * chunks * columns
    gemm = p.tiles(Occupancy(plan.tile), programs, tiles, m, n, k) * pull.slow
    waves = max(1, -(-tiles // programs))
    total = (p.world - 1) * chunks * bm * n * ITEM * (2 if collective(op) == "all_reduce" else 1)
    early = (waves - 1) * programs / tiles
    under = min(total * early, pull.rate * 1e3 * gemm * (1 - 1 / waves))
    return pull.fixed + gemm + (total - under) / (pull.drain * 1e3)


def _gathered(
    p: PartTimes,
    plan: FusedGather | FusedGatherByCopies,
    m: int,
    n: int,
    k: int,
    pull: Pulling,
    chunking: Chunking,
) -> float:
    rows, bm = -(-m // p.world), plan.tile.block_m
    columns = -(-n // plan.tile.block_n)
    programs = p.sms * plan.per_sm - (plan.pull_programs if isinstance(plan, FusedGather) else 1)
    if programs < 1:
        raise ValueError(f"{plan} leaves no program for the GEMM")
    # A chunk is a row of tiles, or a shorter shard; as many are under way as programs can pull at once. A copy engine
    # pulls whole shards, once every rank has staged its own. A row needs the last of its chunks, and after its
    # first tile as many waves are left as the tiles take that stand behind it in the order of tiles: the own rows',
    # if they are whole tiles, then the others'.
    row_tiles, each = -(-m // bm), min(bm, rows) if isinstance(plan, FusedGather) else rows
    chunks, own = -(-rows // each), 0 if rows % bm or m % p.world else rows // bm
    tiles = row_tiles * columns
    occupancy = Occupancy(plan.tile, plan.per_sm)
    gemm = p.tiles(occupancy, programs, tiles, m, n, k) * pull.slow
    staged = begun = 0.0
    together = 1
    if isinstance(plan, FusedGather):
        together = max(plan.pull_programs // plan.split, 1)
        took = each * k * ITEM / (pull.rate * 1e3)
    else:
        took, local = copied(p, chunking, each * k * ITEM), p.optional("local", each * k * ITEM)
        staged = local if own else 2 * local  # the own rows are put in place too
        begun = local + met(p, chunking)
    i = np.arange(row_tiles)
    last = np.minimum((i + 1) * bm, m) - 1
    pulled = last // rows * chunks + last % rows // each - chunks  # in the order of pulling; negative: the own shard
    arrived = np.where(pulled < 0, staged, begun + (pulled // together + 1) * together * took)
    j = np.where(i < own, i, i - own)
    group_m = plan.tile.group_m
    before = (i - j + j // group_m * group_m) * columns + j % group_m
    behind = filled(np.append(tiles - before, tiles), programs, plan.per_sm, p.soft(occupancy))
    return pull.fixed + float((arrived + gemm * behind[:-1] / behind[-1]).max())
