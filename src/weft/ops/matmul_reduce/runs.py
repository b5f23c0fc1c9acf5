"""How each plan prepares GEMM + reduce-scatter and GEMM + all-reduce, except for signaled plans (signaled.py).

sequential          a library GEMM (cuBLAS's or quack's), then NCCL's collective
one_shot, two_shot  a library GEMM, then one launch that sums a few rows (transport/low_latency_kernels.py,
                    ops/all_reduce/low_latency_kernels.py)
decomposed          reduce-scatter: library GEMMs, the farthest owners' rows first. A copy engine pushes each group's
                    partial rows to the owners' staging memory while the next group is computed; the owner sums them in
                    float32 in the order of the ranks (TileLink's hybrid mapping). All-reduce: NCCL sums one chunk of
                    rows during the GEMM of the next
fused               one GEMM; programs of a second launch on the same SMs sum its finished tiles (kernels.gemm_reduce)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import torch

from ...backends.base import Stream
from ...errors import Unsupported
from ...kernel_launch import Ahead, BoundLaunch, Launch, Matrix, Moved
from ...lang.channel import BlockChannel
from ...lang.jit import constants
from ...plans import (
    Decomposed,
    FusedAllReduce,
    FusedReduce,
    LowLatencyShot,
    Plan,
    Sequential,
)
from ...prepared import OwnResult, Run, made_once
from ...transport import collectives, copy_engine, low_latency
from ...transport.collectives import add_bias
from ...transport.interfaces import CollectiveFunction, ReduceTransport
from ...transport.memory import Halves, flat
from ...world import Arena, World
from .. import by_collectives
from ..all_reduce.runs import all_reduce_low_latency
from ..common import tile_of, weight_matrix
from ..product import linear
from ..recipes import ScaledFactors, block_rows, scales_of, scales_of_part
from ..tiles import splits_last_round
from .call import ReduceCall
from .kernels import Runs, Sums, gemm_reduce

SUM_REGISTERS = 112  # registers per thread of a program that sums tiles and shares its SM with a GEMM of 8-bit operands


# -- library GEMMs -----------------------------------------------------------------------------------------------------
# The transport of parts. The second key is whether every rank receives all rows of the sum.
REDUCES: Mapping[tuple[type[Plan], bool], ReduceTransport] = {
    (Decomposed, False): copy_engine.reduce_rows,
    (Decomposed, True): collectives.reduce_all_rows,
}


def multiply(
    world: World,
    call: ReduceCall,
    operands: ScaledFactors,
    stream: Stream,
    out: torch.Tensor | None = None,
    rows: slice | None = None,
) -> torch.Tensor:
    """Return x @ weight.T, or some of its rows, which the fastest library computes on the stream."""
    x, weight, _, x_scale, weight_scale = operands
    if rows is not None:
        x, x_scale = x[rows], scales_of_part(call.scaling, x_scale, rows)
    part = ScaledFactors(x, weight, None, x_scale, weight_scale)
    return linear(world, call.scaling, call.dtype, part, stream, out)


def prepare_reduced(world: World, call: ReduceCall, plan: Plan) -> Run:
    """Prepare the GEMM of each part. The plan's transport sends each part to the rank that sums it."""

    def alone(operands: ScaledFactors, out: torch.Tensor) -> None:
        linear(world, call.scaling, call.dtype, operands, world.current_stream(), out)

    if world.size == 1:
        return alone
    if isinstance(plan, Decomposed) and world.backend.symmetric_unsupported and not call.everywhere:
        return functools.partial(by_collectives.scatter, world, plan)
    reduce = REDUCES[type(plan), call.everywhere](world, plan, call.shards, call.n, call.dtype)

    def run(operands: ScaledFactors, out: torch.Tensor) -> None:
        with reduce(out, operands.bias) as parts:
            for part in parts:
                part.send(multiply(world, call, operands, part.lane, part.partial, part.rows))

    return run


def _sum_of(world: World, call: ReduceCall, plan: Sequential | LowLatencyShot) -> CollectiveFunction | None:
    """Return the collective that sums whole partial results: NCCL's reduce-scatter or a launch of low-latency rows.
    Return None for NCCL's all-reduce, which sums in place."""
    if isinstance(plan, Sequential):
        if call.everywhere:
            return None
        if call.even:
            return world.reduce_scatter
        return lambda out, x, stream: collectives.reduce_scatter(x, world, call.shards, stream, out)
    if call.everywhere:
        return all_reduce_low_latency(world, (call.m, call.n), call.dtype, plan)
    return low_latency.prepare_scatter(world, plan, call.shards, call.n, call.dtype)


def prepare_at_once(world: World, call: ReduceCall, plan: Sequential | LowLatencyShot) -> Run | OwnResult:
    """Prepare a library GEMM and one collective of its result."""
    if world.size == 1:
        return prepare_reduced(world, call, plan)
    reduce = _sum_of(world, call, plan)
    current, empty, all_reduce, library = world.current_stream, world.empty, world.all_reduce, world.backend.linear
    plain = call.scaling is None and not world.batch_invariant
    shape, dtype = (call.m if call.everywhere else call.shards[world.rank], call.n), call.dtype

    def product(operands: ScaledFactors, stream: Stream, out: torch.Tensor | None = None) -> torch.Tensor:
        if plain:
            return library(operands.x, operands.weight, None, stream, out)
        return multiply(world, call, operands, stream, out)

    def run(operands: ScaledFactors, out: torch.Tensor | None) -> tuple[torch.Tensor]:
        stream = current()
        if reduce is None:
            out = product(operands, stream, out)
            all_reduce(out, stream)
        else:
            partial = product(operands, stream)
            out = empty(shape, dtype) if out is None else out
            reduce(out, partial, stream)
        if operands.bias is not None:
            add_bias(world, out, operands.bias, stream)
        return (out,)

    return OwnResult(run)


# -- fused -------------------------------------------------------------------------------------------------------------
def prepare_fused(world: World, call: ReduceCall, plan: FusedReduce) -> Run:
    """Prepare two launches on two streams: the GEMM programs, and the forward and pull programs. Both share the SMs.
    Both kernels are loaded before either runs: a GEMM cannot be loaded while pull programs run, so the pull programs
    would wait for it forever."""
    tile = plan.tile
    tiles = -(-call.m // tile.block_m) * -(-call.n // tile.block_n)
    arena = world.arena(tiles * tile.block_m * tile.block_n * call.dtype.itemsize)
    side = world.side_stream("pull")
    halves = call.scaling is None and splits_last_round(tiles, world.sm_count)
    launches = made_once(_fused_launches, world, call, plan, arena, halves)

    def run(operands: ScaledFactors, out: torch.Tensor) -> None:
        (x, weight, bias, *_), stream = operands, world.current_stream()
        world.order(arena, stream)
        pull, gemm, ahead = launches(not weight.is_contiguous())
        moving: dict[str, Moved] = dict(x_desc=x, w_desc=weight, out=out, bias=bias)
        moving["scales"] = scales_of(operands) if call.scaling else None
        if halves:
            moving["w_half_desc"] = weight
        ahead((out, bias), lambda: (BoundLaunch(pull, moving), BoundLaunch(gemm, moving)))
        world.wait_event(side, world.record(stream))
        pull(side, **moving)
        gemm(stream, **moving)
        world.wait_event(stream, world.record(side))

    return run


def _fused_channel(world: World, call: ReduceCall, plan: FusedReduce) -> tuple[BlockChannel, Runs]:
    """Return the channel and the owners' runs of tile rows of one shape. The first call is collective."""
    size, shards, bm = world.size, call.shards, plan.tile.block_m

    def make() -> tuple[BlockChannel, Runs]:
        offsets = [0, *itertools.accumulate(shards)]
        begins, tiles_m = [-(-row // bm) for row in offsets], -(-call.m // bm)
        runs = [range(r, tiles_m, size) if call.everywhere else range(begins[r], begins[r + 1]) for r in range(size)]
        steps = max(map(len, runs))
        owners = (*world.other_ranks, world.rank)
        order = [runs[r][step] for step in range(steps) for r in owners if step < len(runs[r])]
        positions = [step for tm in range(tiles_m) for run in runs if tm in run for step in [run.index(tm)]]
        reaching = [positions.count(step) for step in range(steps)]
        tables = Runs(*world.words(offsets, order, positions, [steps, *reaching]))
        counters = 3 * steps * -(-call.n // plan.tile.block_n)
        ch = world.channel(f"{call.op} {list(shards)}x{call.n}x{call.k} {call.dtype} {plan}", counters, None)
        return ch, tables

    return world.cached((call.op, shards, call.n, call.k, call.dtype, plan), make)


def _fused_launches(
    world: World, call: ReduceCall, plan: FusedReduce, arena: Arena, halves: bool, trans_b: bool
) -> tuple[Launch, Launch, Ahead]:
    """Return the launch that forwards and pulls, the GEMM's launch, and an object that loads both. halves: whether two
    programs share each tile of the GEMM's last round."""
    size, tile = world.size, plan.tile
    bm, bn, bk = tile.block_m, tile.block_n, tile.block_k
    block = min(plan.pull_rows, bm)
    forward_programs = min(plan.forward_programs, -(-world.sm_count // 4))
    # An SM with a GEMM program has room for one forward or pull program.
    pull_programs = min(plan.pull_programs, world.sm_count - forward_programs)
    ch, runs = _fused_channel(world, call, plan)
    view, granules = flat(world, arena.memory)
    if view is None:
        raise Unsupported("the symmetric memory of the ranks is too far apart for one descriptor")
    fixed: dict[str, object] = dict(
        x_desc=Matrix(call.m, call.k, (block_rows(tile, call.scaling), bk)),
        w_desc=weight_matrix(call, tile, trans_b),
        w_half_desc=weight_matrix(call, tile, trans_b, parts=2) if halves else None,
        arena=Halves.from_arena(arena, granules, arena.half // call.dtype.itemsize),
        arena_desc=view.descriptor(call.dtype, block_rows(tile, call.scaling), bn // 2),
        flat_desc=view.descriptor(call.dtype, block, bn // 2),
        ch=ch,
        runs=runs,
        N=call.n,
        K=call.k,
        tile=tile_of(tile, -(-tile.group_m // size) * size, trans_b, call.scaling),
        how=constants(
            Sums,
            GEMM_PROGRAMS=world.sm_count,
            FORWARD_PROGRAMS=forward_programs,
            PULL_PROGRAMS=pull_programs,
            R=block,
            STAGES=plan.pull_stages,
            LAG=plan.lag if isinstance(plan, FusedAllReduce) else FusedAllReduce.lag,
            ALL=call.everywhere,
        ),
    )
    small: dict[str, int] = dict(num_warps=4, num_stages=tile.stages, co_resident=True)
    options: dict[str, int] = dict(num_warps=tile.warps, num_stages=tile.stages)
    if call.scaling is not None:
        # Without limits, an epilogue with scales would use registers that the pull program on its SM needs.
        small["maxnreg"] = SUM_REGISTERS
        options["maxnreg"] = min(255, (65536 // 32 - 4 * SUM_REGISTERS) // tile.warps // 8 * 8)
    pull = Launch(world, gemm_reduce, forward_programs + pull_programs, small, **fixed, COMPUTE=False)
    return pull, Launch(world, gemm_reduce, world.sm_count, options, **fixed, COMPUTE=True), Ahead()
