"""Models of all-gather + GEMM: decomposed plans, which work in chunks, fused plans, and plans with two levels on
several nodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import numpy as np

from ...cost.decomposed import Chunking, DecomposedCost, barrier_us, copy_us, group_count
from ...cost.fused import FusedCost, Pulling
from ...cost.model import (
    ITEM,
    AnyCost,
    Conditions,
    GemmCall,
    Occupancy,
    Parts,
    SequentialCost,
    ShotCost,
    filled,
)
from ...cost.queues import Step, Work, side_by_side
from ...cost.two_level import OverNodes, TwoLevelCost
from ...plans import Decomposed, FusedGather, FusedGatherByCopies, OneShot, Plan, Sequential, TwoLevel
from ..tiles import with_split_round


class PullTimes(NamedTuple):
    """The arrival of the peers' shards. Chunks of `rows` rows arrive, `together` chunks at a time, and each chunk needs
    `us`. This rank's shard is staged at time `staged`, and pulling begins at time `begin`."""

    rows: int
    together: int
    us: float
    staged: float = 0.0
    begin: float = 0.0


class GatherChunks(DecomposedCost):
    """The model of plans in which a GEMM computes each group of shards after a copy engine has pulled the group."""

    def steps(self, p: Parts, call: GemmCall, plan: Decomposed, fit: Chunking) -> list[Step]:
        rows, size = call.m // p.world, call.moved(call.m // p.world)
        local, barrier = p.optional("local", size), barrier_us(p, fit)
        copy = copy_us(p, fit, size)
        groups = plan.groups or (1,) * p.world
        staging = Work("gemm", "enter", local)
        works, arrived = [staging, Work("comm", "barrier", barrier, staging)], staging
        if groups[0] > 1:  # this rank's rows are copied to their position during the barrier
            works.append(Work("gemm", "own rows", local))
        for i, g in enumerate(groups):
            if g > (i == 0):
                arrived = Work("comm", "copy", copy * (g - (i == 0)))
                works.append(arrived)
            us = p.gemm(g * rows, call.n, call.k)
            works.append(Work("gemm 2" if i % 2 else "gemm", f"gemm {i}", us, arrived))
        return side_by_side([*works, Work("comm", "leave", barrier)], p.slowdown("copy", 0))

    def operations(self, plan: Decomposed, world: int) -> int:
        # If one GEMM computes this rank's rows and other ranks' rows, this rank's rows are copied next to the other
        # rows.
        copies_own_rows = plan.groups[:1] not in ((), (1,))
        # The host submits a staging copy, one graph with the barriers and the copies from peers, and the GEMMs.
        return 2 + copies_own_rows + group_count(plan, world)


GatherPlan = TypeVar("GatherPlan", FusedGather, FusedGatherByCopies)


class GatherTiles(FusedCost[GatherPlan]):
    """The model of plans in which a tile starts when its chunk has been pulled. The call ends with the slowest chunk
    and the waves after it. Times are those of rank 0, whose rows begin with a whole tile."""

    @abstractmethod
    def programs(self, p: Parts, plan: GatherPlan) -> int:
        """Return the number of programs that compute tiles."""

    @abstractmethod
    def pulls(self, p: Parts, call: GemmCall, plan: GatherPlan, fit: Pulling) -> PullTimes:
        """Return the arrival of the shards."""

    def us(self, p: Parts, call: GemmCall, plan: GatherPlan, fit: Pulling) -> float:
        m, n, k = call.m, call.n, call.k
        rows, bm = -(-m // p.world), plan.tile.block_m
        programs = self.programs(p, plan)
        if programs < 1:
            raise ValueError(f"{plan} leaves no program for the GEMM")
        # A row of tiles starts when its last chunk has arrived. At that time all tiles that follow the row's first tile
        # in tile order still have to be computed. Tile order begins with the tiles that contain only this rank's rows.
        row_tiles, columns = -(-m // bm), -(-n // plan.tile.block_n)
        own_tiles = rows // bm
        pulls = self.pulls(p, call, plan, fit)
        tiles = row_tiles * columns
        occupancy = Occupancy(plan.tile, plan.per_sm)
        gemm = with_split_round(p.tiles(occupancy, programs, tiles, m, n, k), tiles, programs) * fit.slow
        i = np.arange(row_tiles)
        last = np.minimum((i + 1) * bm, m) - 1
        # The indices are in the order of the pulls, and negative for this rank's shard.
        pulled = (last - rows) // pulls.rows
        rounds = (pulled // pulls.together + 1) * pulls.together
        arrived = np.where(pulled < 0, pulls.staged, pulls.begin + rounds * pulls.us)
        j = np.where(i < own_tiles, i, i - own_tiles)
        group_m = plan.tile.group_m
        before = (i - j + j // group_m * group_m) * columns + j % group_m
        behind = filled(np.append(tiles - before, tiles), programs, plan.per_sm, p.soft(occupancy))
        return fit.fixed + float((arrived + gemm * behind[:-1] / behind[-1]).max())


class PulledTiles(GatherTiles[FusedGather]):
    """The model of plans in which programs pull several chunks at once. A chunk is a row of tiles, or a whole shard if
    the shard is shorter."""

    def fitted_names(self, plan: FusedGather) -> tuple[str, ...]:
        return "fixed", "rate", "slow"

    def operations(self, plan: FusedGather, world: int) -> int:
        return 1

    def programs(self, p: Parts, plan: FusedGather) -> int:
        return p.sms * plan.per_sm - plan.pull_programs

    def pulls(self, p: Parts, call: GemmCall, plan: FusedGather, fit: Pulling) -> PullTimes:
        rows = min(plan.tile.block_m, -(-call.m // p.world))
        return PullTimes(rows, max(plan.pull_programs // plan.split, 1), call.moved(rows) / (fit.rate * 1e3))


class CopiedTiles(GatherTiles[FusedGatherByCopies]):
    """The model of plans in which a copy engine pulls whole shards, after every rank has staged its shard."""

    def candidates(self, p: Parts, call: GemmCall, conditions: Conditions) -> Iterable[FusedGatherByCopies]:
        return super().candidates(p, call, conditions) if conditions.even else ()

    def fitted_names(self, plan: FusedGatherByCopies) -> tuple[str, ...]:
        return "fixed", "slow"  # decomposed plans measure the rate of a copy engine

    def operations(self, plan: FusedGatherByCopies, world: int) -> int:
        return 3  # a staging copy, one graph with the barriers, copies and signals, and the GEMM

    def programs(self, p: Parts, plan: FusedGatherByCopies) -> int:
        return p.sms * plan.per_sm - 1

    def pulls(self, p: Parts, call: GemmCall, plan: FusedGatherByCopies, fit: Pulling) -> PullTimes:
        rows = -(-call.m // p.world)
        size = call.moved(rows)
        local = p.optional("local", size)
        # If tiles span shards, one more copy moves this rank's rows to their position.
        staged = 2 * local if rows % plan.tile.block_m else local
        return PullTimes(rows, 1, copy_us(p, p.chunking, size), staged, local + barrier_us(p, p.chunking))


class GatherTwoLevel(TwoLevelCost):
    """The model of plans in which rows are first transferred between nodes, and the op on a node then processes
    them."""

    def node_steps(self, p: OverNodes, call: GemmCall, plan: TwoLevel) -> list[Step]:
        rows, piece_count = call.m // p.nodes, plan.pieces
        send_us = p.send(rows // p.node.world // piece_count * call.k * ITEM)
        place_us = p.node.optional("local", rows // piece_count * call.n * ITEM) if piece_count > 1 else 0.0
        computed = p.op(call, rows)
        steps = [Step("gemm", "own node", 0.0, computed)]
        for i in range((p.nodes - 1) * piece_count):
            arrived = (i + 1) * send_us
            steps.append(Step("comm", "send", arrived - send_us, arrived))
            start = max(computed, arrived)
            computed = start + p.op(call, rows // piece_count) + place_us
            steps.append(Step("gemm", f"piece {i}", start, computed))
        return steps


GATHER_COSTS: dict[type[Plan], AnyCost] = {
    Sequential: SequentialCost(),
    Decomposed: GatherChunks(),
    TwoLevel: GatherTwoLevel(),
    OneShot: ShotCost(OneShot()),
    FusedGather: PulledTiles(FusedGather),
    FusedGatherByCopies: CopiedTiles(FusedGatherByCopies),
}
