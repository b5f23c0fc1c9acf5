"""Models of GEMM + reduce-scatter and GEMM + all-reduce: decomposed plans, which work in chunks, fused plans, signaled
plans, and plans with two levels on several nodes."""

from __future__ import annotations

import itertools
from typing import TypeVar

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
    WholeShotCost,
)
from ...cost.queues import Step, Work, side_by_side
from ...cost.signaled import Moving, SignaledCost, Signaling
from ...cost.two_level import OverNodes, TwoLevelCost
from ...plans import (
    Decomposed,
    FusedAllReduce,
    FusedReduce,
    FusedReduceScatter,
    OneShot,
    Plan,
    Sequential,
    Signaled,
    TwoLevel,
    TwoShotLowLatency,
)
from ..tiles import with_split_round

PIECES = 2
ReducePlan = TypeVar("ReducePlan", bound=FusedReduce)


class ScatterChunks(DecomposedCost):
    """The model of plans in which a copy engine pushes each group of shards after a GEMM has computed it, and one
    kernel sums all groups at the end."""

    def candidates(self, p: Parts, call: GemmCall, conditions: Conditions) -> list[Decomposed]:
        plans = super().candidates(p, call, conditions)
        in_pieces = conditions.even and call.m // p.world % PIECES == 0
        return [*plans, *([Decomposed((1,) * p.world, PIECES)] if in_pieces else [])]

    def steps(self, p: Parts, call: GemmCall, plan: Decomposed, fit: Chunking) -> list[Step]:
        groups, rows = plan.groups or (1,) * p.world, call.m // p.world
        barrier = barrier_us(p, fit)
        piece_count = plan.pieces if rows % plan.pieces == 0 and set(groups) == {1} else 1
        rows //= piece_count
        size = call.moved(rows)
        copy, sum_us = copy_us(p, fit, size), p.optional("sum", size)
        works, lanes = [Work("comm", "enter", barrier)], itertools.cycle(("gemm", "gemm 2"))
        for _ in range(piece_count):
            for i, g in enumerate(reversed(groups)):
                chunk = Work(next(lanes), f"gemm {i}", p.gemm(g * rows, call.n, call.k))
                is_own = i == len(groups) - 1
                works += [chunk, Work("comm", "copy", copy * (g - is_own), chunk)]
            barrier_after_pushes = Work("comm", "barrier", barrier)
            works += [barrier_after_pushes, Work("sum", "sum", sum_us, barrier_after_pushes)]
        return side_by_side(works, p.slowdown("copy", 0))

    def operations(self, plan: Decomposed, world: int) -> int:
        # For each piece the host submits one graph with the pushes and the barriers, the GEMMs, and a sum.
        return plan.pieces * (group_count(plan, world) + 2)


class ReduceChunks(DecomposedCost):
    """The model of plans in which NCCL reduces each group of shards after a GEMM has computed it."""

    def steps(self, p: Parts, call: GemmCall, plan: Decomposed, fit: Chunking) -> list[Step]:
        rows = call.m // p.world
        works: list[Work] = []
        for i, g in enumerate(plan.groups or (1,) * p.world):
            chunk = Work("gemm", f"gemm {i}", p.gemm(g * rows, call.n, call.k))
            moved = fit.gap + p.latency(call.collective, call.moved(g * rows))
            works += [chunk, Work("comm", call.collective, moved, chunk)]
        return side_by_side(works, p.slowdown(call.collective, 0))

    def operations(self, plan: Decomposed, world: int) -> int:
        return 2 * group_count(plan, world)


class ReducedTiles(FusedCost[ReducePlan]):
    """The model of plans that pull tiles, at one rate during the GEMM and at another rate after it. A row crosses the
    links `passes` times."""

    def __init__(self, plan: type[ReducePlan], passes: int) -> None:
        super().__init__(plan)
        self.passes = passes

    def us(self, p: Parts, call: GemmCall, plan: ReducePlan, fit: Pulling) -> float:
        m, n, k = call.m, call.n, call.k
        rows, bm = -(-m // p.world), plan.tile.block_m
        columns = -(-n // plan.tile.block_n)
        chunks, programs = -(-rows // bm), p.sms  # pull and forward programs share the SMs with the GEMM's programs
        # After the first wave, all tiles except the tiles of the last wave can be pulled during the GEMM.
        tiles = -(-m // bm) * columns  # tiles span shards
        gemm = with_split_round(p.tiles(Occupancy(plan.tile), programs, tiles, m, n, k), tiles, programs) * fit.slow
        waves = max(1, -(-tiles // programs))
        total = (p.world - 1) * call.moved(chunks * bm) * self.passes
        early = (waves - 1) * programs / tiles
        under = min(total * early, fit.rate * 1e3 * gemm * (1 - 1 / waves))
        return fit.fixed + gemm + (total - under) / (fit.drain * 1e3)


class SignaledScatter(SignaledCost):
    """The model of signaled plans with copy engines. A group contains tiles of every owner. A copy engine pushes a
    group after the waves that compute the group; this rank's own rows come last. One kernel sums all groups at the
    end."""

    def owners(self, world: int) -> int:
        return world

    def in_place(self, n: int) -> bool:
        return False

    def start(self, plan: Signaled) -> Signaling | None:
        return None if plan.copies else Signaling()

    def operations(self, plan: Signaled, world: int) -> int:
        # With copies the host submits the GEMM, one graph with the barriers, waits and pushes of all groups, and a sum.
        return 3 if plan.copies else super().operations(plan, world)

    def by_copies(self, p: Parts, call: GemmCall, plan: Signaled, fit: Moving | None) -> list[Step]:
        barrier, nbytes, share = barrier_us(p, p.chunking), self.nbytes(call), (p.world - 1) / p.world
        works = [Work("comm", "enter", barrier)]
        for gemm, before, done in self.groups_by_copies(p, call, plan):
            works.append(gemm)
            part = min(done, share) - min(before, share)
            if part > 0:
                works.append(Work("comm", "copy", copy_us(p, p.chunking, part * nbytes), gemm))
        barrier_after_pushes = Work("comm", "barrier", barrier)
        sum_us = p.optional("sum", nbytes / p.world)
        works += [barrier_after_pushes, Work("gemm", "sum", sum_us, barrier_after_pushes)]
        return side_by_side(works, p.slowdown("copy", 0))


class SignaledReduce(SignaledCost):
    """The model of signaled plans in which NCCL's all-reduce sums a group after every rank has computed it."""

    def in_place(self, n: int) -> bool:
        return n % 8 == 0


class ScatterTwoLevel(TwoLevelCost):
    """The model of plans in which the op on a node runs first, and its rows are then transferred between nodes."""

    def node_steps(self, p: OverNodes, call: GemmCall, plan: TwoLevel) -> list[Step]:
        rows, piece_count = call.m // p.nodes, plan.pieces
        shard = rows // p.node.world * call.n * ITEM
        send_us = p.send(shard // piece_count)
        gather_us = p.node.optional("local", rows // piece_count * call.k * ITEM) if piece_count > 1 else 0.0
        computed = sent = 0.0
        steps = []
        for i in range((p.nodes - 1) * piece_count):
            start, computed = computed, computed + gather_us + p.op(call, rows // piece_count)
            steps.append(Step("gemm", f"piece {i}", start, computed))
            start, sent = max(computed, sent), max(computed, sent) + send_us
            steps.append(Step("comm", "send", start, sent))
        done = computed + p.op(call, rows)
        sum_end = max(done, sent) + p.node.optional("local", (p.nodes + 1) * shard / 2)
        return [*steps, Step("gemm", "own node", computed, done), Step("gemm", "sum", max(done, sent), sum_end)]


class ReduceTwoLevel(TwoLevelCost):
    """The model of plans that process each piece by a GEMM + reduce-scatter in the node, an all-reduce between nodes,
    and an all-gather in the node."""

    def node_steps(self, p: OverNodes, call: GemmCall, plan: TwoLevel) -> list[Step]:
        rows, scatter, steps = call.m // plan.pieces, call._replace(collective="reduce_scatter"), []
        part = rows // p.node.world * call.n * ITEM
        all_reduce_us = p.all_reduce(part)
        gather_us = p.node.world * p.node.latency("copy", part) + p.node.latency("barrier")
        computed, reduced, ends = 0.0, 0.0, []
        for i in range(plan.pieces):
            start, computed = computed, computed + p.op(scatter, rows)
            steps.append(Step("gemm", f"piece {i}", start, computed))
            start, reduced = max(computed, reduced), max(computed, reduced) + all_reduce_us
            steps.append(Step("comm", call.collective, start, reduced))
            ends.append(reduced)
        for reduced in ends:
            start, computed = max(computed, reduced), max(computed, reduced) + gather_us
            steps.append(Step("gemm", "gather", start, computed))
        return steps


SCATTER_COSTS: dict[type[Plan], AnyCost] = {
    Sequential: SequentialCost(),
    Decomposed: ScatterChunks(),
    TwoLevel: ScatterTwoLevel(),
    OneShot: ShotCost(OneShot()),
    FusedReduceScatter: ReducedTiles(FusedReduceScatter, 1),
    Signaled: SignaledScatter(),
}
ALL_REDUCE_COSTS: dict[type[Plan], AnyCost] = {
    Sequential: SequentialCost(),
    Decomposed: ReduceChunks(),
    TwoLevel: ReduceTwoLevel(),
    OneShot: WholeShotCost(OneShot()),
    TwoShotLowLatency: WholeShotCost(TwoShotLowLatency()),
    FusedAllReduce: ReducedTiles(FusedAllReduce, 2),
    Signaled: SignaledReduce(),
}
