"""How keys and values come, and what is computed when.

    main stream  stage | barrier | own attention          | attention over others .. | merge
    copy stream               | pull | pull | pull | barrier (nobody reads my rows any more)

Keys and values travel together: rows [2, kv heads, D] of both, so that a piece is one copy, and the library reads
them where they landed, with a stride. Staged ahead, rows and the first barrier hold up the main stream; on the copy
stream, behind the library's kernel, which takes every SM, they find no place until a first tile is done. The second
barrier keeps a rank from staging its next call's rows over those that a peer still reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...backends.base import Event, Stream, SymmetricTensor
from ...operands import DTYPES, places
from ...plans import Plan, Segmented
from ...transport.collectives import gather
from ...transport.copies import COPIES
from ...transport.memory import lock
from ...world import World
from . import libraries
from .kernels import merge, pull_rows
from .libraries import AttentionLibrary, Bounds, Packed
from .sight import Group, Piece, Sight, divided

Tensor = torch.Tensor


@dataclass(frozen=True)
class Heads:
    """What the parts of a call have in common. shards: keys of every rank."""

    shards: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    scale: float

    def library(self, world: World, use: str, rows: int) -> AttentionLibrary:
        """For a call of at least so many queries and keys."""
        given = use, world.device, self.dtype, self.heads, self.kv_heads, self.dim
        found = world.cached(("attention libraries", *given), lambda: libraries.right(*given))
        return next((library for library in found if library.least <= rows), found[-1])


class Keys(NamedTuple):
    """k and v [n, kv heads, D], where they lie, and what to wait for before they are read."""

    k: Tensor
    v: Tensor
    memory: Sequence[Tensor]
    landed: Event | None

    def rows(self, lo: int, hi: int) -> Keys:
        """Of this rank's own."""
        k, v = self.k[lo:hi], self.v[lo:hi]
        return Keys(k, v, (k, v), self.landed)


class Partial(NamedTuple):
    """out [m - first, heads, D] and lse [heads, m - first] of the queries from `first` on, over some of the keys."""

    first: int
    out: Tensor
    lse: Tensor


# -- how keys come -----------------------------------------------------------------------------------------------------
def fetched(
    world: World, of: Heads, plan: Plan, own: Keys, groups: Sequence[Group]
) -> tuple[list[tuple[Group, Keys]], Event | None]:
    """By library call, pieces of other ranks in the order in which they lie, and their keys; and what to wait for at
    the end."""
    if world.size == 1:
        return [], None
    if isinstance(plan, Segmented):
        return pulled(world, of, plan, own, divided(tuple(groups), plan.calls))
    return gathered(world, of, own, groups), None


def gathered(world: World, of: Heads, own: Keys, groups: Sequence[Group]) -> list[tuple[Group, Keys]]:
    """By the library's all-gather; pieces that do not lie one behind another there are put so."""
    stream, columns = world.current_stream(), of.kv_heads * of.dim
    every = [gather(t.reshape(-1, columns), world, of.shards, stream) for t in (own.k, own.v)]
    starts = [sum(of.shards[:r]) for r in range(world.size)]
    out = []
    for first, unsorted in groups:
        group = Group(first, tuple(sorted(unsorted)))
        spans = joined([(starts[p.source] + p.lo, starts[p.source] + p.hi) for p in group.pieces])
        if len(spans) == 1:
            k, v = (t[slice(*spans[0])] for t in every)
        else:
            k, v = (packed(world, t, spans, stream) for t in every)
        shape = (-1, of.kv_heads, of.dim)
        out.append((group, Keys(k.view(shape), v.view(shape), (k, v), None)))
    return out


def joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that touch as one."""
    out: list[tuple[int, int]] = []
    for lo, hi in spans:
        if out and out[-1][1] == lo:
            out[-1] = out[-1][0], hi
        else:
            out.append((lo, hi))
    return out


def packed(world: World, t: Tensor, spans: Sequence[tuple[int, int]], stream: Stream) -> Tensor:
    out, at = world.empty((sum(hi - lo for lo, hi in spans), t.shape[1]), t.dtype), 0
    for lo, hi in spans:
        world.copy(out[at : at + hi - lo], t[lo:hi], stream)
        at += hi - lo
    return out


def pulled(
    world: World, of: Heads, plan: Segmented, own: Keys, groups: Sequence[Group]
) -> tuple[list[tuple[Group, Keys]], Event]:
    """By copy engine, or by a few programs, from where every rank has staged its own."""
    stream, copies = world.current_stream(), world.side_stream("copy")
    row = (2, of.kv_heads, of.dim)
    most, nbytes = max(of.shards), 2 * of.kv_heads * of.dim * of.dtype.itemsize
    shard = world.buffer("shard", most * nbytes).view(0, (most, *row), of.dtype)
    rest = world.empty((sum(group.rows for group in groups), *row), of.dtype)
    world.order(lock(world, COPIES), stream)
    lane = stream if plan.ahead else copies
    if not plan.ahead:
        world.wait_event(copies, world.record(stream))
    if len(own.k):
        staged = shard.local[: len(own.k)]

        def stage() -> None:
            staged[:, 0].copy_(own.k)
            staged[:, 1].copy_(own.v)

        world.call(stage, own.memory, [staged], lane)
    world.barrier(lane)
    if plan.ahead:
        world.wait_event(copies, world.record(stream))
    out, at = [], 0
    with world.on(copies):  # once, not for every copy
        for group in groups:
            lo = at
            for piece in group.pieces:
                pull(world, plan, shard, piece, rest[at : at + piece.hi - piece.lo], copies)
                at += piece.hi - piece.lo
            both = rest[lo:at]
            out.append((group, Keys(both[:, 0], both[:, 1], (both,), world.record(copies))))
        world.barrier(copies)
    return out, world.record(copies)


def pull(world: World, plan: Segmented, shard: SymmetricTensor, piece: Piece, to: Tensor, stream: Stream) -> None:
    if not plan.pullers:
        world.copy(to, shard.peers[piece.source][piece.lo : piece.hi], stream)
        return
    width, block = to[0].numel(), 4 * world.scale.block  # four 16-byte words a thread under way
    args = dict(
        shards=shard.addresses,
        to=to,
        source=piece.source,
        start=piece.lo * width,
        count=to.numel(),
        DTYPE=DTYPES[to.dtype],
        BLOCK=block,
    )
    key = (pull_rows, piece, width, to.dtype, plan.pullers, *places(shard.addresses, to))
    world.launch(pull_rows, plan.pullers, args, dict(num_warps=16, local=True), stream, key)


# -- what is computed --------------------------------------------------------------------------------------------------
def forward(
    world: World, of: Heads, plan: Plan, seen: Sight, q: Tensor, own: Keys, sinks: Tensor | None, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out [m, heads, D] and lse float32 [heads, m]; in `out` where it is given."""
    stream = world.current_stream()
    if seen.packed and isinstance(plan, Segmented):
        plan = replace(plan, calls=1)
    others, end = fetched(world, of, plan, own, seen.others if len(q) else ())
    calls = [(0, own.rows(s.lo, s.hi), s.causal) for s in seen.own] + [
        (group.first, keys, False) for group, keys in others
    ]
    partials = []
    for first, keys, causal in calls if len(q) else ():
        if keys.landed is not None:
            world.wait_event(stream, keys.landed)
        partials.append(attend(world, of, first, q[first:], keys, seen.packed or causal))
    if end is not None:
        world.wait_event(stream, end)
    if out is None and len(partials) == 1 and sinks is None:
        return partials[0].out, partials[0].lse
    result = world.empty(q.shape, q.dtype) if out is None else out
    return result, merged(world, of, partials, sinks, result)


def attend(world: World, of: Heads, first: int, q: Tensor, keys: Keys, mask: bool | Packed) -> Partial:
    library = of.library(world, "packed" if isinstance(mask, Packed) else "forward", min(len(q), len(keys.k)))
    wanted = ((q.shape, q.dtype), ((of.heads, len(q)), torch.float32))
    bounds = bounds_of(world, mask) if isinstance(mask, Packed) else None

    def attention() -> tuple[Tensor, Tensor]:
        if isinstance(mask, bool):
            return library.forward(q, keys.k, keys.v, mask, of.scale)
        assert library.packed is not None and bounds is not None
        return library.packed(q, keys.k, keys.v, mask, bounds, of.scale)

    out, lse = world.results(attention, wanted, [q, *keys.memory, *(bounds or ())], world.current_stream())
    return Partial(first, out, lse)


def bounds_of(world: World, packed: Packed) -> Bounds:
    """Kept: a CUDA graph reads them again."""
    queries, keys = packed.queries, packed.keys
    make = world.tensor
    return world.cached(("bounds", queries, keys), lambda: (make(queries, torch.int32), make(keys, torch.int32)))


def merged(world: World, of: Heads, partials: Sequence[Partial], sinks: Tensor | None, out: Tensor) -> Tensor:
    """lse; and out is written. Those of all queries come first."""
    m, heads, d = out.shape
    lse = world.empty((heads, m), torch.float32)
    if not m:
        return lse
    partials = sorted(partials, key=lambda partial: partial.first)
    cols = 1 << (d - 1).bit_length()
    rows = max(world.scale.block // cols, 1)
    outs, lses = tuple(p.out for p in partials), tuple(p.lse for p in partials)
    args = dict(
        outs=outs,
        lses=lses,
        sinks=lse if sinks is None else sinks,
        out=out,
        lse=lse,
        M=m,
        first=partials[-1].first,
        HEADS=heads,
        D=d,
        WHOLE=sum(p.first == 0 for p in partials),
        SINKS=sinks is not None,
        ROWS=rows,
        COLS=cols,
    )
    key = (
        merge,
        m,
        partials[-1].first,
        args["WHOLE"],
        heads,
        d,
        out.dtype,
        sinks.dtype if sinks is not None else None,
        *places(*outs, *lses, sinks, out, lse),
    )
    programs = min(world.sm_count * 4, heads * -(-m // rows))
    world.launch(merge, programs, args, dict(num_warps=4, local=True), world.current_stream(), key)
    return lse
