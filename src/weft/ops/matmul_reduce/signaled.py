"""The signaled plans: one GEMM, and an NCCL collective for each group of finished tiles (FlashOverlap).

    stream        | signaled_gemm: group 0 | group 1        | group 2        |                 | put rows in order
    comm stream   | wait 0                 | collective of 0| wait 1 | collective of 1 | ...    |

Copy engines can move the groups of a reduce-scatter instead (`Signaled.copies`). In this case the GEMM uses all SMs
except a few, which the waits need, and the rows stay in ordinary order (`_scatter_by_copies`).

The host knows the order in which tiles are computed, and a group is a range of that order (`Schedule`). So, unlike
FlashOverlap, weft does not have to determine the order by a measurement.

In an all-reduce NCCL sums a group's tiles in place. Groups are whole rows of tiles, which are in ordinary order in the
output, unless the caller requests tiles. In a reduce-scatter consecutive tiles belong to the row ranges of consecutive
ranks. A group contains equally many tiles for each rank, ordered by owner in memory, and NCCL sends each rank the sums
of its own tiles. So each rank receives whole tiles of the rows that it owns, and no further exchange is needed. (If
every tile were split into one strip for each rank, a rank would receive rows of every tile.) On each rank the result is
still in the order of the tiles, which a `Remap` describes. `weft.rms_norm` and `weft.residual_add` can read the tiles
by means of the Remap; for other callers a kernel restores the ordinary order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch

from ...architectures import features
from ...backends.base import Stream, StreamWork
from ...compute.signaled_gemm import Order, signaled_gemm
from ...kernel_launch import Launch, Matrix, prepared
from ...lang.jit import constants
from ...plans import Signaled
from ...prepared import OwnResult, Run
from ...transport.copy_engine import COPIES, sum_parts
from ...transport.memory import lock, workspace
from ...transport.signals import Signals, exchange_groups, prepare, schedule
from ...world import World
from ..common import Factors, MatmulCall, tile_of, weight_matrix
from ..norm import Remap, rows_launch
from ..recipes import ScaledFactors
from .call import ReduceCall


class Tiling(NamedTuple):
    """The sizes of the signaled GEMM's tiling, as arguments of its kernel.

    The GEMM's output is [rows, cols]. `tiles` is the number of tiles, `tiles_m` the number of tile rows of one owner,
    and `owners` the number of ranks with tiles that alternate in memory (1 if every rank receives all rows). With
    `in_order`, the output consists of rows in ordinary order, otherwise of tiles in the order of their computation. If
    copy engines scatter the rows, the GEMM begins with the next rank's rows, and `shard` is the number of tile rows of
    one rank. Otherwise `shard` is 0.
    """

    rows: int
    cols: int
    tiles: int
    tiles_m: int
    owners: int
    group_m: int
    in_order: bool
    shard: int = 0


def gemm_launch(
    world: World,
    call: MatmulCall,
    plan: Signaled,
    signals: Signals,
    tiling: Tiling,
    m: int,
    fixed: Mapping[str, object],
    **options: int,
) -> Launch:
    """Return the launch of the signaled GEMM that multiplies x_desc [m, K] by w_desc, adds the bias and writes `out`.
    `fixed` are further arguments that are the same in each launch."""
    bm, bk = plan.tile.block_m, plan.tile.block_k
    return Launch(
        world,
        signaled_gemm,
        world.sm_count - plan.ctas,
        dict(num_warps=plan.tile.warps, num_stages=plan.tile.stages, **options),
        x_desc=Matrix(m, call.k, (bm, bk)),
        w_desc=weight_matrix(call, plan.tile),
        ch=signals.ch,
        groups=signals.program_groups,
        offsets=signals.offsets,
        M=m,
        N=call.n,
        K=call.k,
        tiles=tiling.tiles,
        tiles_m=tiling.tiles_m,
        shard=tiling.shard,
        tile=tile_of(plan.tile, tiling.group_m),
        order=constants(
            Order,
            OWNERS=tiling.owners,
            IN_ORDER=tiling.in_order,
            ROTATE=tiling.shard > 0,
            FLAT=features(world.backend.capability).tma,
        ),
        **fixed,
    )


@prepared
def gemm_of(world: World, call: MatmulCall, plan: Signaled, signals: Signals, tiling: Tiling) -> Launch:
    """Return the launch of the signaled GEMM whose output has the shape of the tiling."""
    out = Matrix(tiling.rows, tiling.cols, (plan.tile.block_m, plan.tile.block_n // 2))
    return gemm_launch(world, call, plan, signals, tiling, call.rows, dict(out=out, row_map=None))


def launch_on(launch: Launch, operands: Factors | ScaledFactors, out: torch.Tensor) -> Callable[[Stream], None]:
    """Return a function that launches the signaled GEMM on a stream and writes `out`."""
    x, weight, bias, *_ = operands
    return lambda stream: launch(stream, x_desc=x, w_desc=weight, bias=bias, out=out)


# -- the library's collectives -----------------------------------------------------------------------------------------


def prepare_signaled(world: World, call: ReduceCall, plan: Signaled) -> Run | OwnResult:
    """Prepare the sum. Its rows are in ordinary order if copy engines move the groups or if the caller does not accept
    tiles. Otherwise the sum consists of tiles, [2 x tiles x block_m, block_n / 2], and a second result describes their
    layout."""
    if plan.copies:
        return _scatter_by_copies(world, call, plan)
    in_order = call.everywhere and call.reorder and call.n % 8 == 0
    run, remap = _by_collectives(world, call, plan, in_order)
    if not call.reorder:
        return OwnResult(lambda operands, out: (run(operands, None), remap))

    launch = None if in_order or not remap.rows else rows_launch(world, (remap.rows, remap.columns), remap, False)

    def ordered(operands: ScaledFactors, out: torch.Tensor) -> None:
        tiles = run(operands, out)
        if launch is not None:
            launch(world.current_stream(), x=tiles, residual=tiles, out=out)  # the kernel does not read a residual

    return ordered


def tiling_of(world: World, call: ReduceCall, plan: Signaled, in_order: bool) -> Tiling:
    """Return the tiling for a result in tiles, or in ordinary rows with in_order."""
    bm, bn, owners = plan.tile.block_m, plan.tile.block_n, 1 if call.everywhere or plan.copies else world.size
    longest = call.m if owners == 1 else max(call.shards)
    tiles_m, tiles_n = -(-longest // bm), -(-call.n // bn)
    group_m, tiles = -(-plan.tile.group_m // owners), owners * tiles_m * tiles_n
    if in_order:  # the rows of tiles that fit in a wave
        group_m = max(1, min(group_m, (world.sm_count - plan.ctas) // tiles_n))
        shard = 0 if call.everywhere else call.shards[0] // bm
        return Tiling(call.m, call.n, tiles, tiles_m, owners, group_m, True, shard)
    return Tiling(2 * bm * tiles, bn // 2, tiles, tiles_m, owners, group_m, False)


def signals_of(world: World, call: ReduceCall, plan: Signaled, tiling: Tiling, op: str) -> Signals:
    """Return the signals that calls of one op share. The first call is collective."""
    shards, n = call.shards, call.n

    def make() -> Signals:
        # The number of tiles in a group is a multiple of this number. If the output is in order, a group consists of
        # whole rows of tiles.
        unit = tiling.group_m * -(-n // plan.tile.block_n) if tiling.in_order else 1
        groups = schedule(tiling.tiles, world.sm_count - plan.ctas, plan.groups, tiling.owners, unit)
        first_rows = [sum(shards[:r]) for r in range(tiling.owners)]
        return prepare(world, f"{op} {list(shards)}x{n} {plan}", groups, plan, first_rows)

    return world.cached((op, shards, n, plan, tiling.in_order), make)


def _by_collectives(
    world: World, call: ReduceCall, plan: Signaled, in_order: bool
) -> tuple[Callable[[ScaledFactors, torch.Tensor | None], torch.Tensor], Remap]:
    """Return two results: a function that returns the sum in tiles, and the layout of the tiles. With in_order, the
    function stores the sum in `out`, in ordinary order."""
    bm, bn, tiles_n = plan.tile.block_m, plan.tile.block_n, -(-call.n // plan.tile.block_n)
    tiling = tiling_of(world, call, plan, in_order)
    signals, owners = signals_of(world, call, plan, tiling, call.op), tiling.owners
    launch, bounds = gemm_of(world, call, plan, signals, tiling), signals.schedule.bounds
    if in_order:  # each group's range of rows in the GEMM's output
        spans = [(lo // tiles_n * bm, -(-hi // tiles_n) * bm) for lo, hi in pairwise(bounds)]
    else:
        spans = [(lo * 2 * bm, hi * 2 * bm) for lo, hi in pairwise(bounds)]

    def run(operands: ScaledFactors, out: torch.Tensor | None) -> torch.Tensor:
        world.order(signals, world.current_stream())
        partials = out if in_order and out is not None else world.empty((tiling.rows, tiling.cols), call.dtype)
        result = partials if call.everywhere else world.empty((tiling.rows // owners, tiling.cols), call.dtype)

        def collective(g: int, stream: Stream) -> None:
            (lo, hi), whole = spans[g], len(spans) == 1
            group = partials if whole else partials[lo:hi]
            if call.everywhere:
                world.all_reduce(group, stream, signals.communicator)
            else:
                sums = result if whole else result[lo // owners : hi // owners]
                world.reduce_scatter(sums, group, stream, signals.communicator)

        exchange_groups(world, signals, launch_on(launch, operands, partials), collective)
        return result

    rows = call.m if call.everywhere else call.shards[world.rank]
    return run, Remap(rows, call.n, tiling.tiles_m, bm, bn, tiling.group_m)


# -- copy engines ------------------------------------------------------------------------------------------------------


def _scatter_by_copies(world: World, call: ReduceCall, plan: Signaled) -> Run:
    """Prepare GEMM + reduce-scatter with copy engines. Every rank computes the rows of the next rank first and its own
    rows last, so that the last copies end while it computes its own rows. A copy engine pushes a group's rows to the
    staging memory of their owners. After all copies and the GEMM have ended, the owner sums its rows in float32 in rank
    order. After the first barrier, other ranks may write the staging memory again."""
    m, n, rows, me, size = call.m, call.n, call.shards[world.rank], world.rank, world.size
    staging, holder = workspace(world, "staging", (size, rows, n), call.dtype), lock(world, COPIES)
    partial = workspace(world, "partial", (m, n), call.dtype).local
    tiling = tiling_of(world, call, plan, True)
    signals, tiles_n = signals_of(world, call, plan, tiling, call.op), -(-n // plan.tile.block_n)
    launch = gemm_of(world, call, plan, signals, tiling)
    # Each group ends before one of these rows, in the order in which rows are computed. A group consists of whole rows
    # of tiles.
    ends = [min(m, -(-t // tiles_n) * plan.tile.block_m) for t in signals.schedule.bounds]
    pushes: list[list[tuple[slice, torch.Tensor]]] = []  # the rows of `partial` to copy, and targets, for each group
    for start, end in pairwise(ends):
        pushes.append([])
        for j, p in enumerate(world.other_ranks):
            lo, hi = max(start - j * rows, 0), min(end - j * rows, rows)
            if lo < hi:
                pushes[-1].append((slice(p * rows + lo, p * rows + hi), staging.peers[p][me, lo:hi]))

    own_rows, comm = partial[me * rows : (me + 1) * rows], world.side_stream("comm")

    def push_all(work: StreamWork) -> None:
        world.barrier(comm)
        for g, wait in enumerate(signals.waits):
            wait(comm)
            for lines, destination in pushes[g]:
                world.copy(destination, partial[lines], comm)
            if ends[g] < m - rows <= ends[g + 1]:
                world.barrier(comm)

    sequence = world.sequence(comm, push_all)

    def run(operands: ScaledFactors, out: torch.Tensor) -> None:
        stream = world.current_stream()
        world.order(holder, stream)
        world.wait_event(comm, world.record(stream))
        launch_on(launch, operands, partial)(stream)
        (end,) = sequence()()
        world.wait_event(stream, end)
        sum_parts(own_rows, staging.local, out, None, world, stream)

    return run
