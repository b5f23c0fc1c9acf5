"""Plan kind `signaled`: one GEMM, and an NCCL collective for each group of its finished tiles (FlashOverlap).

    stream        | signaled_gemm: group 0 | group 1        | group 2        |                 | put rows in order
    comm stream   | wait 0                 | collective of 0| wait 1 | collective of 1 | ...    |

Copy engines can move the groups instead (`Signaled.copies`). Then the GEMM has all SMs but a few for waits, and rows
stay in ordinary order (`_scatter_by_copies`, `_reduce_by_copies`).

The host knows the order in which tiles are computed, and a group is a range of that order (`Schedule`), so that no
table has to be measured.

All-reduce with the library: the collective sums a group's tiles in place. Groups are whole rows of tiles, which are in
ordinary order in the output, unless the caller asks for tiles. Reduce-scatter with the library: consecutive tiles
belong to the row ranges of consecutive ranks. A group has the same number of tiles of each rank, ordered by owner in
memory, and the collective gives each rank its own. So each rank gets whole tiles of the rows that it owns, and nothing
is exchanged afterwards. (If every tile were split into a strip for each rank, a rank would get rows of every tile.)
Only the order of the tiles on each rank remains, which a `Remap` describes: `weft.rms_norm` and `weft.residual_add`
read through it, or a kernel undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ...architectures import features
from ...backends.base import Stream
from ...compute.signaled_gemm import Order, signaled_gemm
from ...kernel_launch import Launch, Matrix, prepared
from ...lang.jit import constants
from ...lang.mapping import balanced_rows
from ...plans import Signaled
from ...prepared import OwnResult, Run
from ...tensor_checks import DTYPES
from ...transport.copy_engine import COPIES, sum_parts
from ...transport.memory import lock, rank_word, workspace
from ...transport.signals import Signals, exchange_groups, prepare, schedule
from ...transport.sums import sum_partials
from ...world import World
from ..common import Factors, MatmulCall, tile_of, weight_matrix
from ..norm import Remap, put_rows
from ..recipes import ScaledFactors
from .call import ReduceCall


class Tiling(NamedTuple):
    """The tiles of the signaled GEMM, as its kernel takes them.

    The GEMM's output is [rows, cols]. `tiles` is the number of tiles, `tiles_m` the number of tile rows of one owner,
    and `owners` the number of ranks with tiles that alternate in memory (1 if every rank gets all rows). `in_order`:
    the output has ordinary rows, else tiles in the order of their computation. `shard`: if copy engines scatter, the
    number of tile rows of a rank, since the GEMM then begins with the next rank's rows; else 0.
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
    """Return the launch of the signaled GEMM of x_desc [m, K] and w_desc, + bias, to `out`. fixed: further arguments
    that are the same in each launch."""
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
    """Return the launch of the signaled GEMM to a tensor of the tiling's shape."""
    out = Matrix(tiling.rows, tiling.cols, (plan.tile.block_m, plan.tile.block_n // 2))
    return gemm_launch(world, call, plan, signals, tiling, call.rows, dict(out=out, row_map=None))


def launch_on(launch: Launch, operands: Factors | ScaledFactors, out: torch.Tensor) -> Callable[[Stream], None]:
    """Return a function that launches the signaled GEMM to `out` on a stream."""
    x, weight, bias, *_ = operands
    return lambda stream: launch(stream, x_desc=x, w_desc=weight, bias=bias, out=out)


# -- the library's collectives -----------------------------------------------------------------------------------------


def prepare_signaled(world: World, call: ReduceCall, plan: Signaled) -> Run | OwnResult:
    """Prepare the sum in ordinary order, or, if the caller accepts tiles, in tiles [2 x tiles x block_m, block_n / 2],
    with their layout as a further result. If copies move the groups, the order is ordinary."""
    if plan.copies:
        return (_reduce_by_copies if call.everywhere else _scatter_by_copies)(world, call, plan)
    in_order = call.everywhere and call.reorder and call.n % 8 == 0
    run, remap = _by_collectives(world, call, plan, in_order)
    if not call.reorder:
        return OwnResult(lambda operands, out: (run(operands, None), remap))

    def ordered(operands: ScaledFactors, out: torch.Tensor) -> None:
        tiles = run(operands, out)
        if not in_order:
            put_rows(world, tiles, remap, None, out)

    return ordered


def tiling_of(world: World, call: ReduceCall, plan: Signaled, in_order: bool) -> Tiling:
    """Return the tiling for a result in tiles, or with in_order in rows."""
    bm, bn, owners = plan.tile.block_m, plan.tile.block_n, 1 if call.everywhere else world.size
    longest = call.m if call.everywhere else max(call.shards)
    tiles_m, tiles_n = -(-longest // bm), -(-call.n // bn)
    group_m, tiles = -(-plan.tile.group_m // owners), owners * tiles_m * tiles_n
    if in_order:  # the tile rows of a group fit in a wave
        group_m = max(1, min(group_m, (world.sm_count - plan.ctas) // tiles_n))
        return Tiling(call.m, call.n, tiles, tiles_m, owners, group_m, True)
    return Tiling(2 * bm * tiles, bn // 2, tiles, tiles_m, owners, group_m, False)


def signals_of(world: World, call: ReduceCall, plan: Signaled, tiling: Tiling, op: str) -> Signals:
    """Return the signals of the calls of one op. The first call is collective."""
    shards, n, size = call.shards, call.n, world.size

    def make() -> Signals:
        # A group is a multiple of this many tiles: whole rows of tiles if the output is in order.
        unit = tiling.group_m * -(-n // plan.tile.block_n) if tiling.in_order else 1
        groups = schedule(tiling.tiles, world.sm_count - plan.ctas, plan.groups, tiling.owners, unit)
        first_rows = [0] if call.everywhere else [sum(shards[:r]) for r in range(size)]
        return prepare(world, f"{op} {list(shards)}x{n} {plan}", groups, plan, first_rows)

    return world.cached((op, shards, n, plan, tiling.in_order), make)


def _by_collectives(
    world: World, call: ReduceCall, plan: Signaled, in_order: bool
) -> tuple[Callable[[ScaledFactors, torch.Tensor | None], torch.Tensor], Remap]:
    """Return a function that returns the sum in tiles, and their layout. in_order: the sum is in `out`, in ordinary
    order."""
    bm, bn, tiles_n = plan.tile.block_m, plan.tile.block_n, -(-call.n // plan.tile.block_n)
    tiling = tiling_of(world, call, plan, in_order)
    signals, owners = signals_of(world, call, plan, tiling, call.op), tiling.owners
    launch, bounds = gemm_of(world, call, plan, signals, tiling), signals.schedule.bounds
    if in_order:  # the rows of each group in the GEMM's output
        spans = [(lo // tiles_n * bm, -(-hi // tiles_n) * bm) for lo, hi in pairwise(bounds)]
    else:
        spans = [(lo * 2 * bm, hi * 2 * bm) for lo, hi in pairwise(bounds)]

    def run(operands: ScaledFactors, out: torch.Tensor | None) -> torch.Tensor:
        world.order(signals, world.current_stream())
        partials = out if in_order and out is not None else world.empty((tiling.rows, tiling.cols), call.dtype)
        result = partials if call.everywhere else world.empty((tiling.rows // owners, tiling.cols), call.dtype)

        def collective(g: int, stream: Stream) -> None:
            lo, hi = spans[g]
            if call.everywhere:
                world.all_reduce(partials[lo:hi], stream, signals.communicator)
            else:
                world.reduce_scatter(result[lo // owners : hi // owners], partials[lo:hi], stream, signals.communicator)

        exchange_groups(world, signals, launch_on(launch, operands, partials), collective)
        return result

    rows = call.m if call.everywhere else call.shards[world.rank]
    return run, Remap(rows, call.n, tiling.tiles_m, bm, bn, tiling.group_m)


# -- copy engines ------------------------------------------------------------------------------------------------------


def _gemm_in_rows(world: World, call: ReduceCall, plan: Signaled, shard: int) -> tuple[Signals, Launch, list[int]]:
    """Return the launch of a GEMM to a tensor [M, N] in groups of whole rows of tiles, its signals, and the row at
    which each group ends, in the order in which rows are computed. shard: as in signaled_gemm."""
    m, n, programs = call.m, call.n, world.sm_count - plan.ctas
    tiles_m, tiles_n = -(-m // plan.tile.block_m), -(-n // plan.tile.block_n)
    group_m = max(1, min(plan.tile.group_m, programs // tiles_n))

    def make() -> Signals:
        groups = schedule(tiles_m * tiles_n, programs, plan.groups, 1, group_m * tiles_n)
        return prepare(world, f"{call.op} {m}x{n} {plan}", groups, plan, [0])

    signals = world.cached((call.op, m, n, plan), make)
    tiling = Tiling(m, n, tiles_m * tiles_n, tiles_m, 1, group_m, True, shard)
    launch = gemm_of(world, call, plan, signals, tiling)
    return signals, launch, [min(m, -(-t // tiles_n) * plan.tile.block_m) for t in signals.schedule.bounds]


def _scatter_by_copies(world: World, call: ReduceCall, plan: Signaled) -> Run:
    """Prepare GEMM + reduce-scatter with copy engines. Every rank computes the rows of the next rank first, and its own
    last, during which the last copies end. A copy engine pushes a group's rows to the staging memory of their owners.
    When all copies to all ranks have ended, and the GEMM too, the owner sums its rows in float32 in the order of the
    ranks. After the first barrier the staging memory may be written again."""
    m, n, rows, me, size = call.m, call.n, call.shards[world.rank], world.rank, world.size
    staging, copies = workspace(world, "staging", (size, rows, n), call.dtype), lock(world, COPIES)
    signals, launch, ends = _gemm_in_rows(world, call, plan, rows // plan.tile.block_m)
    pushes: list[list[tuple[slice, torch.Tensor]]] = []  # for each group, the rows of `partial` to copy, and where to
    for start, end in pairwise(ends):
        pushes.append([])
        for j, p in enumerate(world.other_ranks):
            lo, hi = max(start - j * rows, 0), min(end - j * rows, rows)
            if lo < hi:
                pushes[-1].append((slice(p * rows + lo, p * rows + hi), staging.peers[p][me, lo:hi]))

    def run(operands: ScaledFactors, out: torch.Tensor) -> None:
        world.order(copies, world.current_stream())
        partial = world.empty((m, n), call.dtype)

        def push(g: int, stream: Stream) -> None:
            for lines, destination in pushes[g]:
                world.copy(destination, partial[lines], stream)
            if ends[g] < m - rows <= ends[g + 1]:
                world.barrier(stream)

        exchange_groups(world, signals, launch_on(launch, operands, partial), push, barrier=True)
        own_rows = partial[me * rows : (me + 1) * rows]
        sum_parts(own_rows, staging.local, out, None, world, world.current_stream())

    return run


@prepared
def _partial_sum(world: World, n: int, dtype: torch.dtype, start: int, rows: int, own_rows: int) -> Launch:
    """Return the launch that sums this rank's own_rows rows, of the rows start .. start + rows, over ranks."""
    block = world.backend.scale.block
    return Launch(
        world,
        sum_partials,
        min(world.sm_count * 4, -(-own_rows * n // block)),
        dict(num_warps=8, local=True),
        begin=start,
        rows=rows,
        N=n,
        me=rank_word(world),
        DTYPE=DTYPES[dtype],
        W=world.size,
        BLOCK=block,
    )


def _reduce_by_copies(world: World, call: ReduceCall, plan: Signaled) -> Run:
    """Prepare GEMM + all-reduce with copy engines, group by group. When every rank has computed a group, each rank
    reads its part of the group's rows from all ranks and sums it in float32 in the order of the ranks. When all ranks
    have done so, a copy engine pulls the other parts. The sums and the pulls each have a stream, so that they run
    concurrently for successive groups: 8% less time than pushing the partial sums (2 H200, 2026-11).

    After the second barrier of a call's last group no rank reads this rank's partial sums any more. After the first
    barrier of the next call no rank pulls its sums any more."""
    m, n, me, size = call.m, call.n, world.rank, world.size
    adds, pulls, copies = world.side_stream("sum"), world.side_stream("pull"), lock(world, COPIES)
    partials = workspace(world, "partials", (m, n), call.dtype)
    signals, launch, ends = _gemm_in_rows(world, call, plan, 0)
    parts = [list(accumulate(balanced_rows(b - a, size), initial=a)) for a, b in pairwise(ends)]
    # The offset of each group in `sums`, the same on every rank: rank 0's offset, since it has the most rows.
    starts = list(accumulate((p[1] - p[0] for p in parts), initial=0))
    sums = workspace(world, "sums", (starts[-1], n), call.dtype)
    # For each group, the launch that sums this rank's part, if it has one, and the parts to pull, with their sources.
    sums_of_groups, pulls_of_groups = [], []
    for start, part, (begin, end) in zip(starts, parts, pairwise(ends), strict=False):
        own_rows = slice(*part[me : me + 2])
        count = own_rows.stop - own_rows.start
        sums_of_groups.append(
            (own_rows, _partial_sum(world, n, call.dtype, begin, end - begin, count) if count else None)
        )
        others = [(p, slice(*part[p : p + 2])) for p in world.other_ranks if part[p + 1] > part[p]]
        pulls_of_groups.append([(rows, sums.peers[p][start : start + rows.stop - rows.start]) for p, rows in others])

    def run(operands: ScaledFactors, out: torch.Tensor) -> None:
        stream = world.current_stream()
        world.order(copies, stream)

        def reduce_group(g: int, comm: Stream) -> None:
            world.barrier(comm)
            world.wait_event(adds, world.record(comm))
            own_rows, launch_sum = sums_of_groups[g]
            if launch_sum is not None:
                launch_sum(adds, partials=partials.addresses, out=out[own_rows], sums=sums.local[starts[g] :])
            world.barrier(adds, "barrier of sums")
            world.wait_event(pulls, world.record(adds))
            for rows, source in pulls_of_groups[g]:
                world.copy(out[rows], source, pulls)

        exchange_groups(world, signals, launch_on(launch, operands, partials.local), reduce_group)
        world.wait_event(stream, world.record(pulls))

    return run
