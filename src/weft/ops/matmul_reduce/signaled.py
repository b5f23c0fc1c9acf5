"""Plan kind `signaled`: one GEMM, whose groups of finished tiles each start a collective of the library (FlashOverlap).

    stream        | signaled_gemm: group 0 | group 1        | group 2        |                 | put rows in order
    comm stream   | wait 0                 | collective of 0| wait 1 | collective of 1 | ...    |

Copy engines can move a group as well (`Signaled.copies`); then the GEMM has all SMs but a few for waits, and rows stay
in ordinary order (`scatter_by_copies`, `reduce_by_copies`). With the library's collectives:

Tiles are computed in an order that the host knows, and groups are runs of that order (`Schedule`), so no table is
measured.

All-reduce: the collective sums a group's tiles in place; groups are cut at whole rows of tiles, so that they lie in the
output in ordinary order, unless the tiles were asked for. Reduce-scatter: the ranks' row ranges take turns tile by
tile, a group holds as many tiles of each, owner after owner, and the collective gives every rank its own tiles. So a
rank ends with the rows that are its own in ordinary order, and nothing is to be exchanged afterwards. (Splitting every
tile into a strip a rank would leave a rank rows of every tile.) What is left on every rank is the order of whole tiles,
a `Remap`: `weft.rms_norm` and `weft.residual_add` read through it, or a kernel undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ...architectures import HOPPER
from ...backends.base import Stream
from ...compute.signaled_gemm import Order, signaled_gemm
from ...kernel_launch import Launch, Matrix, prepared
from ...lang.jit import constants
from ...lang.mapping import balanced_rows
from ...plans import Signaled
from ...tensor_checks import DTYPES
from ...transport.copy_engine import COPIES, staging_slots, sum_parts
from ...transport.memory import lock, rank_word, workspace
from ...transport.signals import Signals, exchange_groups, prepare, schedule
from ...transport.sums import sum_partials
from ...world import World
from ..common import Factors, MatmulCall, tile_of, weight_matrix
from ..norm import Remap, put_rows
from ..recipes import ScaledFactors
from .call import ReduceCall


class Tiling(NamedTuple):
    """How the signaled GEMM goes over its tiles, as its kernel takes it; its output is [rows, cols]."""

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
    """The signaled GEMM of x_desc [m, K] and w_desc, + bias, to `out`. `fixed` holds more of its fixed arguments."""
    bm, bk = plan.tile.block_m, plan.tile.block_k
    return Launch(
        world,
        signaled_gemm,
        world.sm_count - plan.ctas,
        dict(num_warps=plan.tile.warps, num_stages=plan.tile.stages, **options),
        x_desc=Matrix(m, call.k, (bm, bk)),
        w_desc=weight_matrix(call, plan.tile),
        ch=signals.ch,
        groups=signals.turns,
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
            FLAT=world.capability >= HOPPER,
        ),
        **fixed,
    )


@prepared
def gemm_of(world: World, call: MatmulCall, plan: Signaled, signals: Signals, tiling: Tiling) -> Launch:
    out = Matrix(tiling.rows, tiling.cols, (plan.tile.block_m, plan.tile.block_n // 2))
    return gemm_launch(world, call, plan, signals, tiling, call.rows, dict(out=out, row_map=None))


def launch_on(launch: Launch, operands: Factors | ScaledFactors, out: torch.Tensor) -> Callable[[Stream], None]:
    """What launches the signaled GEMM, to `out`, on a stream."""
    x, weight, bias, *_ = operands
    return lambda stream: launch(stream, x_desc=x, w_desc=weight, bias=bias, out=out)


# -- the library's collectives -----------------------------------------------------------------------------------------


def run_signaled(world: World, call: ReduceCall, plan: Signaled, operands: ScaledFactors, out: torch.Tensor) -> None:
    if plan.copies:
        _by_copies(world, call, plan, operands, out)
        return
    tiles, remap, in_order = _by_collectives(world, call, plan, operands, out)
    if not in_order:
        put_rows(world, tiles, remap, None, out)


def reduce_in_tiles(
    world: World, call: ReduceCall, plan: Signaled, operands: ScaledFactors
) -> tuple[torch.Tensor, Remap | None]:
    """The sum in tiles [2 x tiles x block_m, block_n / 2], with how they are laid out; moved by copies, in ordinary
    order, and None."""
    if plan.copies:
        rows = call.m if call.everywhere else call.shards[world.rank]
        out = world.empty((rows, call.n), call.dtype)
        _by_copies(world, call, plan, operands, out)
        return out, None
    tiles, remap, _ = _by_collectives(world, call, plan, operands, None)
    return tiles, remap


def tiling_of(world: World, call: ReduceCall, plan: Signaled, in_order: bool) -> Tiling:
    bm, bn, owners = plan.tile.block_m, plan.tile.block_n, 1 if call.everywhere else world.size
    longest = call.m if call.everywhere else max(call.shards)
    tiles_m, tiles_n = -(-longest // bm), -(-call.n // bn)
    group_m, tiles = -(-plan.tile.group_m // owners), owners * tiles_m * tiles_n
    if in_order:  # tile rows that a wave has whole
        group_m = max(1, min(group_m, (world.sm_count - plan.ctas) // tiles_n))
        return Tiling(call.m, call.n, tiles, tiles_m, owners, group_m, True)
    return Tiling(2 * bm * tiles, bn // 2, tiles, tiles_m, owners, group_m, False)


def signals_of(world: World, call: ReduceCall, plan: Signaled, tiling: Tiling, op: str) -> Signals:
    """Those of calls of one op. Collective the first time."""
    shards, n, size = call.shards, call.n, world.size

    def make() -> Signals:
        unit = tiling.group_m * -(-n // plan.tile.block_n) if tiling.in_order else 1
        groups = schedule(tiling.tiles, world.sm_count - plan.ctas, plan.groups, tiling.owners, unit)
        firsts = [0] if call.everywhere else [sum(shards[:r]) for r in range(size)]
        return prepare(world, f"{op} {list(shards)}x{n} {plan}", groups, plan, firsts)

    return world.cached((op, shards, n, plan, tiling.in_order), make)


def _by_collectives(
    world: World, call: ReduceCall, plan: Signaled, operands: ScaledFactors, out: torch.Tensor | None
) -> tuple[torch.Tensor, Remap, bool]:
    """The sum in tiles, how they are laid out, and whether they are instead in `out`, in ordinary order."""
    bm, bn, tiles_n = plan.tile.block_m, plan.tile.block_n, -(-call.n // plan.tile.block_n)
    in_order = call.everywhere and out is not None and call.n % 8 == 0
    tiling = tiling_of(world, call, plan, in_order)
    signals, owners = signals_of(world, call, plan, tiling, call.op), tiling.owners
    world.order(signals, world.current_stream())
    parts = out if in_order and out is not None else world.empty((tiling.rows, tiling.cols), call.dtype)
    mine = parts if call.everywhere else world.empty((tiling.rows // owners, tiling.cols), call.dtype)

    def collective(g: int, stream: Stream) -> None:
        lo, hi = signals.schedule.bounds[g : g + 2]
        if in_order:
            lo, hi = lo // tiles_n * bm, -(-hi // tiles_n) * bm
        else:
            lo, hi = lo * 2 * bm, hi * 2 * bm
        if call.everywhere:
            world.all_reduce(parts[lo:hi], stream, signals.communicator)
        else:
            world.reduce_scatter(mine[lo // owners : hi // owners], parts[lo:hi], stream, signals.communicator)

    gemm = launch_on(gemm_of(world, call, plan, signals, tiling), operands, parts)
    exchange_groups(world, signals, gemm, collective)
    rows = call.m if call.everywhere else call.shards[world.rank]
    return mine, Remap(rows, call.n, tiling.tiles_m, bm, bn, tiling.group_m), in_order


# -- copy engines ------------------------------------------------------------------------------------------------------


def _by_copies(world: World, call: ReduceCall, plan: Signaled, operands: ScaledFactors, out: torch.Tensor) -> None:
    (_reduce_by_copies if call.everywhere else _scatter_by_copies)(world, call, plan, operands, out)


def _in_rows(
    world: World, call: ReduceCall, plan: Signaled, operands: ScaledFactors, out: torch.Tensor, shard: int
) -> tuple[Signals, Callable[[Stream], None], list[int]]:
    """A GEMM to `out` [M, N] in groups of whole rows of tiles: what is on the device, what launches it, and the rows
    where groups end, in the order in which they are computed. shard: as signaled_gemm takes it."""
    m, n, programs = call.m, call.n, world.sm_count - plan.ctas
    tiles_m, tiles_n = -(-m // plan.tile.block_m), -(-n // plan.tile.block_n)
    group_m = max(1, min(plan.tile.group_m, programs // tiles_n))

    def make() -> Signals:
        groups = schedule(tiles_m * tiles_n, programs, plan.groups, 1, group_m * tiles_n)
        return prepare(world, f"{call.op} {m}x{n} {plan}", groups, plan, [0])

    signals = world.cached((call.op, m, n, plan), make)
    tiling = Tiling(m, n, tiles_m * tiles_n, tiles_m, 1, group_m, True, shard)
    gemm = launch_on(gemm_of(world, call, plan, signals, tiling), operands, out)
    return signals, gemm, [min(m, -(-t // tiles_n) * plan.tile.block_m) for t in signals.schedule.bounds]


def _scatter_by_copies(
    world: World, call: ReduceCall, plan: Signaled, operands: ScaledFactors, out: torch.Tensor
) -> None:
    """Every rank computes the rows of the next rank first, and its own last, under which the last copies end. A copy
    engine pushes a group's rows to their owners' staging slots; when all have landed everywhere, and the GEMM is done,
    the owner sums its slots in fp32 in rank order. The first barrier says that the slots may be written again."""
    (rows, n), m, me, size = out.shape, call.m, world.rank, world.size
    staging = staging_slots(world, (size, rows, n), call.dtype)
    partial = world.empty((m, n), call.dtype)
    signals, gemm, ends = _in_rows(world, call, plan, operands, partial, rows // plan.tile.block_m)

    def push(g: int, stream: Stream) -> None:
        a, b = ends[g : g + 2]
        for j, p in enumerate(world.other_ranks):
            lo, hi = max(a - j * rows, 0), min(b - j * rows, rows)
            if lo < hi:
                world.copy(staging.peers[p][me, lo:hi], partial[p * rows + lo : p * rows + hi], stream)
        if a < m - rows <= b:
            world.barrier(stream)

    exchange_groups(world, signals, gemm, push, barrier=True)
    own = partial[me * rows : (me + 1) * rows]
    sum_parts(own, staging.local, out, None, world, world.current_stream())


@prepared
def _partial_sum(world: World, n: int, dtype: torch.dtype, first: int, rows: int, own: int) -> Launch:
    """The sum over ranks of `own` of the rows `first` to `first + rows`."""
    block = world.scale.block
    return Launch(
        world,
        sum_partials,
        min(world.sm_count * 4, -(-own * n // block)),
        dict(num_warps=8, local=True),
        first=first,
        rows=rows,
        N=n,
        me=rank_word(world),
        DTYPE=DTYPES[dtype],
        W=world.size,
        BLOCK=block,
    )


def _reduce_by_copies(
    world: World, call: ReduceCall, plan: Signaled, operands: ScaledFactors, out: torch.Tensor
) -> None:
    """Group by group: once every rank has computed it, each sums its own part of the group's rows, which it reads from
    all ranks, in fp32 in rank order; once all have, a copy engine pulls the other parts. Each of the two has a stream
    of its own, so that they go on side by side for successive groups (docs/design-notes.md).

    Who is past the second barrier of a call's last group knows that nobody reads its partial sums any more, and who is
    past the first one of the next call, that nobody pulls its sums any more."""
    (m, n), me, size = out.shape, world.rank, world.size
    stream, adds, pulls = world.current_stream(), world.side_stream("sum"), world.side_stream("pull")
    world.order(lock(world, COPIES), stream)
    partials = workspace(world, "partials", (m, n), call.dtype)
    signals, gemm, ends = _in_rows(world, call, plan, operands, partials.local, 0)
    parts = [list(accumulate(balanced_rows(b - a, size), initial=a)) for a, b in pairwise(ends)]
    # By group: rows of `sums` before it, as many on every rank (the first rank's, which has the most).
    starts = list(accumulate((p[1] - p[0] for p in parts), initial=0))
    sums = workspace(world, "sums", (starts[-1], n), call.dtype)

    def reduce_group(g: int, comm: Stream) -> None:
        world.barrier(comm)
        world.wait_event(adds, world.record(comm))
        (first, end), (lo, hi) = ends[g : g + 2], parts[g][me : me + 2]
        if hi > lo:
            launch = _partial_sum(world, n, call.dtype, first, end - first, hi - lo)
            launch(adds, partials=partials.addresses, out=out[lo:hi], sums=sums.local[starts[g] :])
        world.barrier(adds, "meet sums")
        world.wait_event(pulls, world.record(adds))
        for p in world.other_ranks:
            rows = slice(*parts[g][p : p + 2])
            if count := rows.stop - rows.start:
                world.copy(out[rows], sums.peers[p][starts[g] : starts[g] + count], pulls)

    exchange_groups(world, signals, gemm, reduce_group)
    world.wait_event(stream, world.record(pulls))
