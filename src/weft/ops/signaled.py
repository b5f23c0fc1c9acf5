"""Plan kind `signaled`: one GEMM, whose groups of finished tiles each start a collective of the library (FlashOverlap).

    stream        | signaled_gemm: group 0 | group 1        | group 2        |                 | put rows in order
    comm stream   | wait 0                 | collective of 0| wait 1 | collective of 1 | ...    |

Tiles are computed in an order that the host knows, and groups are runs of that order (`Schedule`), so no table is measured.

All-reduce: the collective sums a group's tiles in place; groups are cut at whole rows of tiles, so that they lie in the output in
ordinary order, unless the tiles were asked for. Reduce-scatter: the ranks' row ranges take turns tile by tile, a group
holds as many tiles of each, owner after owner, and the collective gives every rank its own tiles. So a rank ends with the rows
that are its own in ordinary order, and nothing is to be exchanged afterwards. (Splitting every tile into a strip a rank would
leave a rank rows of every tile.) What is left on every rank is the order of whole tiles, a `Remap`: `weft.rms_norm` and
`weft.residual_add` read through it, or a kernel undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.signaled_gemm import signaled_gemm
from ..kernels.sync import wait_group
from ..lang.channel import BlockChannel
from ..plan import Signaled
from ..plan.plan import partition
from ..world import World
from .common import DTYPES, descriptor, places
from .norm import Remap, put_rows


@dataclass(frozen=True)
class Schedule:
    """bounds: group g is tiles bounds[g] to bounds[g + 1]. arrivals: by group, programs that count it up. slots: by tile, where
    it is stored. signals: by tile, the group that its program has then finished, or -1."""

    bounds: tuple[int, ...]
    arrivals: tuple[int, ...]
    slots: tuple[int, ...]
    signals: tuple[int, ...]


def schedule(tiles: int, programs: int, groups: Sequence[int], owners: int = 1, unit: int = 1) -> Schedule:
    """Tile t belongs to owner t % owners. A group is whole waves, but for the last tiles of one that do not divide by `unit` and
    by `owners`: they are left to the next."""
    ends, at, unit = [0], 0, math.lcm(owners, unit)
    for waves in partition(groups, max(1, -(-tiles // programs))):
        at += waves
        end = min(tiles, at * programs)
        end = end if end == tiles else end // unit * unit
        if end > ends[-1]:
            ends.append(end)
    return scheduled(ends, programs, owners)


def scheduled(ends: Sequence[int], programs: int, owners: int = 1) -> Schedule:
    """The schedule of groups that end at these tiles. Program p computes tiles p, p + programs, ..; the slots of a group are
    owner after owner. A group may be empty."""
    slots, signals = [], []
    for g, (lo, hi) in enumerate(zip(ends, ends[1:], strict=False)):
        each = (hi - lo) // owners
        slots += [lo + (t - lo) % owners * each + (t - lo) // owners for t in range(lo, hi)]
        signals += [g if t + programs >= hi else -1 for t in range(lo, hi)]
    arrivals = [min(programs, hi - lo) for lo, hi in zip(ends, ends[1:], strict=False)]
    return Schedule(tuple(ends), tuple(arrivals), tuple(slots), tuple(signals))


@dataclass
class Prepared:
    """What one shape and plan keep on the device. One call at a time: `World.order`."""

    schedule: Schedule
    ch: BlockChannel
    slots: torch.Tensor
    signals: torch.Tensor
    offsets: torch.Tensor
    communicator: Any
    last_stream: Any = None


def prepare(world: World, name: str, made: Schedule, plan: Signaled, offsets: Sequence[int]) -> Prepared:
    return Prepared(
        made, world.local_channel(name, made.arrivals), world.tensor(made.slots, torch.int32),
        world.tensor(made.signals, torch.int32), world.tensor(offsets, torch.int32), world.communicator(plan.ctas),
    )  # fmt: skip


def exchange_groups(
    world: World, prepared: Prepared, gemm: Callable[[Any], None], collective: Callable[[int, Any], None]
) -> None:
    """`gemm(stream)` and, on the communicator's stream, `collective(g, stream)` for each group once the GEMM has signaled it."""
    stream, comm = world.current_stream(), world.side_stream("comm")
    world.wait_event(comm, world.record(stream))
    gemm(stream)
    last, at = len(prepared.schedule.arrivals) - 1, places(prepared.ch.counters, prepared.ch.state)
    for g, arrivals in enumerate(prepared.schedule.arrivals):
        args = dict(ch=prepared.ch, group=g, arrivals=arrivals, last=int(g == last))
        world.launch(wait_group, 1, args, dict(num_warps=1), comm, ("wait", g, last, arrivals, *at))
        collective(g, comm)
    world.wait_event(stream, world.record(comm))


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
) -> tuple[torch.Tensor, Remap]:
    """The sum over ranks of x @ weight.T, + bias, of all rows (`everywhere`) or of this rank's. Without `out` in tiles [2 x tiles x
    block_m, block_n / 2], with how they lie; else in ordinary order there."""
    m, (n, k) = x.shape[0], weight.shape
    size, bm, bn, bk = world.size, plan.block_m, plan.block_n, plan.block_k
    owners = 1 if everywhere else size
    longest = m if everywhere else max(shards)
    group_m = -(-plan.group_m // owners)
    tiles_m, tiles_n = -(-longest // bm), -(-n // bn)
    tiles, programs = owners * tiles_m * tiles_n, world.sm_count - plan.ctas
    in_order = everywhere and out is not None and n % 8 == 0 and out.data_ptr() % 16 == 0
    if in_order:  # tile rows that a wave has whole
        group_m = max(1, min(group_m, programs // tiles_n))
    name = (op, tuple(shards), n, plan, in_order)

    def make() -> Prepared:
        made = schedule(tiles, programs, plan.groups, owners, group_m * tiles_n if in_order else 1)
        firsts = [0] if everywhere else [sum(shards[:r]) for r in range(size)]
        return prepare(world, f"{op} {list(shards)}x{n} {plan.to_json()}", made, plan, firsts)

    prepared = world.cached(name, make)
    world.order(prepared, world.current_stream())
    strips = 2 * bm  # rows of `parts` that a tile takes
    parts = out if in_order and out is not None else world.empty((tiles * strips, bn // 2), x.dtype)
    mine = parts if everywhere else world.empty((tiles // owners * strips, bn // 2), x.dtype)

    def args() -> dict[str, Any]:
        return dict(
            x_desc=descriptor(x, m, k, (bm, bk)), w_desc=descriptor(weight, n, k, (bn, bk)),
            tiles_desc=descriptor(parts, parts.shape[0], parts.shape[1], (bm, bn // 2)), bias=bias if bias is not None else parts,
            ch=prepared.ch, slots=prepared.slots, signals=prepared.signals, offsets=prepared.offsets, tiles=tiles,
            tiles_m=tiles_m, N=n, K=k, DTYPE=DTYPES[x.dtype], OWNERS=owners, BM=bm, BN=bn, BK=bk, GROUP_M=group_m,
            BIAS=bias is not None, IN_ORDER=in_order, FLATTEN=plan.flatten,
        )  # fmt: skip

    def gemm(stream: Any) -> None:
        key = ("gemm", *name, k, x.dtype, *places(x, weight, bias, parts))
        world.launch(signaled_gemm, programs, args, dict(num_warps=plan.warps, num_stages=plan.stages), stream, key)

    def collective(g: int, stream: Any) -> None:
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
