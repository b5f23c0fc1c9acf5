"""Model of fused plans. All-gather: a tile starts when its chunk has been pulled, and the call ends with the slowest
chunk and the waves behind it. Reducing ops: tiles are pulled at one rate under the GEMM and at another after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...op import collective
from ...plans import Fused, FusedGather, FusedGatherByCopies, FusedReduce
from ..curves import filled
from ..parts import ITEM, Occupancy, PartTimes
from .decomposed import Chunking, barrier_us, copy_us


@dataclass(frozen=True)
class Pulling:
    """Parameters of one fused variant. rate, drain: GB/s of the programs that pull, under the GEMM and after it. slow:
    time of a tile while they run over its time alone. fixed: further us of a call."""

    fixed: float = 20.0
    rate: float = 150.0
    drain: float = 300.0
    slow: float = 1.05


def us(p: PartTimes, op: str, plan: Fused, m: int, n: int, k: int, pull: Pulling, chunking: Chunking) -> float:
    """Return the us of one call. chunking: the copy engine's parameters, for plans in which it pulls."""
    if isinstance(plan, FusedGather | FusedGatherByCopies):
        return _gathered(p, plan, m, n, k, pull, chunking)
    assert isinstance(plan, FusedReduce)
    return _reduced(p, op, plan, m, n, k, pull)


def _reduced(p: PartTimes, op: str, plan: FusedReduce, m: int, n: int, k: int, pull: Pulling) -> float:
    rows, bm = -(-m // p.world), plan.tile.block_m
    columns = -(-n // plan.tile.block_n)
    chunks, programs = -(-rows // bm), p.sms  # the programs that pull and forward share the GEMM's SMs
    # From the end of the first wave on, all tiles but the last wave's can be pulled under the GEMM.
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
    # A chunk is a row of tiles, or a shard if that is shorter. The programs pull `together` chunks at once. A copy
    # engine pulls whole shards, after every rank has staged its shard. A row of tiles starts when its last chunk has
    # arrived, and then all tiles behind its first one, in tile order, are left. Tile order begins with this rank's
    # rows if they are whole tiles.
    row_tiles, chunk_rows = -(-m // bm), min(bm, rows) if isinstance(plan, FusedGather) else rows
    chunks, own_tiles = -(-rows // chunk_rows), 0 if rows % bm or m % p.world else rows // bm
    tiles = row_tiles * columns
    occupancy = Occupancy(plan.tile, plan.per_sm)
    gemm = p.tiles(occupancy, programs, tiles, m, n, k) * pull.slow
    staged = begun = 0.0
    together = 1
    if isinstance(plan, FusedGather):
        together = max(plan.pull_programs // plan.split, 1)
        took = chunk_rows * k * ITEM / (pull.rate * 1e3)
    else:
        took, local = copy_us(p, chunking, chunk_rows * k * ITEM), p.optional("local", chunk_rows * k * ITEM)
        staged = local if own_tiles else 2 * local  # this rank's rows are also copied into place
        begun = local + barrier_us(p, chunking)
    i = np.arange(row_tiles)
    last = np.minimum((i + 1) * bm, m) - 1
    # Indices in the order of the pulls; they are negative for this rank's shard.
    pulled = last // rows * chunks + last % rows // chunk_rows - chunks
    arrived = np.where(pulled < 0, staged, begun + (pulled // together + 1) * together * took)
    j = np.where(i < own_tiles, i, i - own_tiles)
    group_m = plan.tile.group_m
    before = (i - j + j // group_m * group_m) * columns + j % group_m
    behind = filled(np.append(tiles - before, tiles), programs, plan.per_sm, p.soft(occupancy))
    return pull.fixed + float((arrived + gemm * behind[:-1] / behind[-1]).max())
