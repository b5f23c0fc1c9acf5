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

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ...backends.base import Arguments, Stream
from ...compute.signaled_gemm import Order, signaled_gemm
from ...lang.jit import constants
from ...lang.mapping import balanced_rows
from ...operands import DTYPES, places
from ...plans import Signaled
from ...transport.copies import COPIES, sum_parts
from ...transport.memory import descriptor, lock, rank_word
from ...transport.signals import Signals, exchange_groups, prepare, schedule
from ...transport.sums import sum_partials
from ...world import World
from ..common import Factors, gemm_arguments, tile_of
from ..norm import Remap, put_rows

SCATTER = "matmul_reduce_scatter"


def reduce(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    plan: Signaled,
    shards: Sequence[int],
    everywhere: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Remap | None]:
    """The sum over ranks of x @ weight.T, + bias, of all rows (`everywhere`) or of this rank's. Without `out` in tiles
    [2 x tiles x block_m, block_n / 2], with how they lie, or, moved by copies, in ordinary order and None; else in
    ordinary order there."""
    m, (n, k) = x.shape[0], weight.shape
    size, bm, bn = world.size, plan.block_m, plan.block_n
    if plan.copies:
        out = world.empty((m if everywhere else shards[world.rank], n), x.dtype) if out is None else out
        (reduce_by_copies if everywhere else scatter_by_copies)(op, x, weight, bias, world, plan, out)
        return out, None
    owners = 1 if everywhere else size
    longest = m if everywhere else max(shards)
    group_m = -(-plan.group_m // owners)
    tiles_m, tiles_n = -(-longest // bm), -(-n // bn)
    tiles, programs = owners * tiles_m * tiles_n, world.sm_count - plan.ctas
    in_order = everywhere and out is not None and n % 8 == 0
    if in_order:  # tile rows that a wave has whole
        group_m = max(1, min(group_m, programs // tiles_n))
    name = (op, tuple(shards), n, plan, in_order)

    def make() -> Signals:
        made = schedule(tiles, programs, plan.groups, owners, group_m * tiles_n if in_order else 1)
        firsts = [0] if everywhere else [sum(shards[:r]) for r in range(size)]
        return prepare(world, f"{op} {list(shards)}x{n} {plan}", made, plan, firsts)

    prepared = world.cached(name, make)
    world.order(prepared, world.current_stream())
    strips = 2 * bm  # rows of `parts` that a tile takes
    parts = out if in_order and out is not None else world.empty((tiles * strips, bn // 2), x.dtype)
    mine = parts if everywhere else world.empty((tiles // owners * strips, bn // 2), x.dtype)

    how = Tiling(tiles, tiles_m, owners, group_m, in_order)
    gemm = gemm_of(world, prepared, plan, (*name, k), (x, weight, bias), parts, how)

    def collective(g: int, stream: Stream) -> None:
        lo, hi = prepared.schedule.bounds[g : g + 2]
        if in_order:
            lo, hi = lo // tiles_n * bm, -(-hi // tiles_n) * bm
        else:
            lo, hi = lo * strips, hi * strips
        if everywhere:
            world.all_reduce(parts[lo:hi], stream, prepared.communicator)
        else:
            world.reduce_scatter(mine[lo // owners : hi // owners], parts[lo:hi], stream, prepared.communicator)

    exchange_groups(world, prepared, gemm, collective)
    remap = Remap(m if everywhere else shards[world.rank], n, tiles_m, bm, bn, group_m)
    if out is not None and not in_order:
        put_rows(world, mine, remap, None, out)
    return mine, remap


class Tiling(NamedTuple):
    """How the signaled GEMM goes over its tiles, as its kernel takes it."""

    tiles: int
    tiles_m: int
    owners: int
    group_m: int
    in_order: bool
    shard: int = 0


def gemm_of(
    world: World,
    prepared: Signals,
    plan: Signaled,
    name: tuple[Hashable, ...],
    factors: Factors,
    parts: torch.Tensor,
    how: Tiling,
) -> Callable[[Stream], None]:
    """What launches the signaled GEMM, to `parts`, on a stream. name: what fixes its sizes."""
    x, weight, bias = factors
    bm, bn, bk = plan.block_m, plan.block_n, plan.block_k

    def args() -> Arguments:
        return dict(
            x_desc=descriptor(x, x.shape[0], x.shape[1], (bm, bk)),
            out=descriptor(parts, parts.shape[0], parts.shape[1], (bm, bn // 2)),
            ch=prepared.ch,
            turns=prepared.turns,
            offsets=prepared.offsets,
            rows=None,
            M=x.shape[0],
            tiles=how.tiles,
            tiles_m=how.tiles_m,
            shard=how.shard,
            **gemm_arguments(weight, bias, plan),
            tile=tile_of(plan, how.group_m),
            order=constants(Order, OWNERS=how.owners, IN_ORDER=how.in_order, ROTATE=how.shard > 0),
        )

    def gemm(stream: Stream) -> None:
        key = ("gemm", *name, x.dtype, *places(x, weight, bias, parts))
        options = dict(num_warps=plan.warps, num_stages=plan.stages)
        world.launch(signaled_gemm, world.sm_count - plan.ctas, args, options, stream, key)

    return gemm


# -- copy engines ------------------------------------------------------------------------------------------------------


def in_rows(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    plan: Signaled,
    out: torch.Tensor,
    shard: int,
) -> tuple[Signals, Callable[[Stream], None], list[int]]:
    """A GEMM to `out` [M, N] in groups of whole rows of tiles: what is on the device, what launches it, and the rows
    where groups end, in the order in which they are computed. shard: as signaled_gemm takes it."""
    (m, n), k = out.shape, x.shape[1]
    tiles_m, tiles_n = -(-m // plan.block_m), -(-n // plan.block_n)
    group_m = max(1, min(plan.group_m, (world.sm_count - plan.ctas) // tiles_n))

    def make() -> Signals:
        made = schedule(tiles_m * tiles_n, world.sm_count - plan.ctas, plan.groups, 1, group_m * tiles_n)
        return prepare(world, f"{op} {m}x{n} {plan}", made, plan, [0])

    prepared = world.cached((op, m, n, plan), make)
    how = Tiling(tiles_m * tiles_n, tiles_m, 1, group_m, True, shard)
    gemm = gemm_of(world, prepared, plan, (op, m, n, k, plan), (x, weight, bias), out, how)
    return prepared, gemm, [min(m, -(-t // tiles_n) * plan.block_m) for t in prepared.schedule.bounds]


def scatter_by_copies(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    plan: Signaled,
    out: torch.Tensor,
) -> None:
    """Every rank computes the rows of the next rank first, and its own last, under which the last copies end. A copy
    engine pushes a group's rows to their owners' staging slots; when all have landed everywhere, and the GEMM is done,
    the owner sums its slots in fp32 in rank order. The first barrier says that the slots may be written again."""
    (rows, n), m, me, size = out.shape, x.shape[0], world.rank, world.size
    world.order(lock(world, COPIES), world.current_stream())
    staging = world.buffer("staging", m * n * x.element_size()).view(0, (size, rows, n), x.dtype)
    partial = world.empty((m, n), x.dtype)
    prepared, gemm, ends = in_rows(op, x, weight, bias, world, plan, partial, rows // plan.block_m)

    def push(g: int, stream: Stream) -> None:
        a, b = ends[g : g + 2]
        for j in range(a // rows, min(size - 1, -(-b // rows))):
            p = (me + 1 + j) % size
            lo, hi = max(a - j * rows, 0), min(b - j * rows, rows)
            world.copy(staging.peers[p][me, lo:hi], partial[p * rows + lo : p * rows + hi], stream)
        if a < m - rows <= b:
            world.barrier(stream)

    exchange_groups(world, prepared, gemm, push, barrier=True)
    own = partial[me * rows : (me + 1) * rows]
    sum_parts(own, staging.local, out, None, world, world.current_stream())


def reduce_by_copies(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    plan: Signaled,
    out: torch.Tensor,
) -> None:
    """Group by group: once every rank has computed it, each sums its own part of the group's rows, which it reads from
    all ranks, in fp32 in rank order; once all have, a copy engine pulls the other parts. Each of the two has a stream
    of its own, so that they go on side by side for successive groups (docs/design-notes.md).

    Who is past the second barrier of a call's last group knows that nobody reads its partial sums any more, and who is
    past the first one of the next call, that nobody pulls its sums any more."""
    (m, n), me, size, nbytes = out.shape, world.rank, world.size, x.element_size()
    stream, adds, pulls = world.current_stream(), world.side_stream("sum"), world.side_stream("pull")
    world.order(lock(world, COPIES), stream)
    partials = world.buffer("partials", m * n * nbytes).view(0, (m, n), x.dtype)
    prepared, gemm, ends = in_rows(op, x, weight, bias, world, plan, partials.local, 0)
    parts = [list(accumulate(balanced_rows(b - a, size), initial=a)) for a, b in pairwise(ends)]
    # By group: rows of `sums` before it, as many on every rank (the first rank's, which has the most).
    at = list(accumulate((p[1] - p[0] for p in parts), initial=0))
    sums = world.buffer("sums", at[-1] * n * nbytes).view(0, (at[-1], n), x.dtype)
    block = world.scale.block

    def reduce_group(g: int, comm: Stream) -> None:
        world.barrier(comm)
        world.wait_event(adds, world.record(comm))
        (first, end), (lo, hi) = ends[g : g + 2], parts[g][me : me + 2]
        if hi > lo:

            def args() -> Arguments:
                return dict(
                    partials=partials.addresses,
                    out=out[lo:hi],
                    sums=sums.local[at[g] :],
                    first=first,
                    rows=end - first,
                    N=n,
                    me=rank_word(world),
                    DTYPE=DTYPES[x.dtype],
                    W=size,
                    BLOCK=block,
                )

            key = (sum_partials, x.dtype, n, first, end, at[g], *places(out, partials.local, sums.local))
            programs = min(world.sm_count * 4, -(-(hi - lo) * n // block))
            world.launch(sum_partials, programs, args, dict(num_warps=8, local=True), adds, key)
        world.barrier(adds, "meet sums")
        world.wait_event(pulls, world.record(adds))
        for p in ((me + j) % size for j in range(1, size)):
            rows = slice(*parts[g][p : p + 2])
            if count := rows.stop - rows.start:
                world.copy(out[rows], sums.peers[p][at[g] : at[g] + count], pulls)

    exchange_groups(world, prepared, gemm, reduce_group)
    world.wait_event(stream, world.record(pulls))
