"""How keys and values come, and what is computed when.

    main stream  barrier | own attention          | attention over others .. | merge
    copy stream           | push | push | push

Every rank pushes its keys and values to where their readers read them, with a flag behind each piece; readers wait for
flags between two calls of the library. The barrier says that nobody reads what the last call brought any more. Nothing
is staged, and no kernel has to find an SM beside the library's, which takes all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...backends.base import Event, Stream, SymmetricTensor
from ...kernel_launch import Launch, prepared
from ...lang.host import rank_notify, rank_wait
from ...plans import Plan, Segmented
from ...tensor_checks import DTYPES
from ...transport.collectives import gather
from ...transport.memory import lock
from ...world import World
from . import libraries
from .kernels import merge, push_rows
from .key_ranges import Group, Sight, divided, landing
from .libraries import AttentionLibrary, Bounds, Packed

Tensor = torch.Tensor
Views = Sequence[Sequence[Group]]  # by rank, what it sees of others if it has as many queries as keys

KEYS = "attention keys"  # what readers read, and its barrier


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
        """Return the attention library for a call of at least so many queries and keys."""
        given = use, world.device, self.dtype, self.heads, self.kv_heads, self.dim
        found = world.cached(("attention libraries", *given), lambda: libraries.right(*given))
        return next((library for library in found if library.least <= rows), found[-1])


class Keys(NamedTuple):
    """k and v [n, kv heads, D]. wait: has the current stream go on once they are there; None: they are."""

    k: Tensor
    v: Tensor
    wait: Callable[[], None] | None = None

    def rows(self, lo: int, hi: int) -> Keys:
        return self._replace(k=self.k[lo:hi], v=self.v[lo:hi])


class Fetched(NamedTuple):
    """others: by library call, pieces of other ranks in the order in which they lie, and their keys. end: what the call
    waits for at its end."""

    others: list[tuple[Group, Keys]]
    end: Event | None = None


class Partial(NamedTuple):
    """out [m - first, heads, D] and lse [heads, m - first] of queries from `first` on, over some of the keys."""

    first: int
    out: Tensor
    lse: Tensor


# -- how keys come -----------------------------------------------------------------------------------------------------
def fetched(world: World, of: Heads, plan: Plan, own: Keys, groups: Sequence[Group], views: Views) -> Fetched:
    """Fetch what this rank's queries see of others (`groups`)."""
    if world.size == 1:
        return Fetched([])
    if isinstance(plan, Segmented):
        return pushed(world, of, plan, own, divided(tuple(groups), plan.calls), views)
    return Fetched(gathered(world, of, own, groups))


def gathered(world: World, of: Heads, own: Keys, groups: Sequence[Group]) -> list[tuple[Group, Keys]]:
    """All-gather K and V with NCCL, and copy a group's pieces together where they are not contiguous. Returns each
    group with its keys."""
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
        out.append((group, Keys(k.view(shape), v.view(shape))))
    return out


def joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans with those that touch joined to one."""
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


def pushed(world: World, of: Heads, plan: Segmented, own: Keys, groups: Sequence[Group], views: Views) -> Fetched:
    """Push K and V, by copy engine or by a few programs, to where their readers read them. Returns what this rank
    reads."""
    stream, copies, me, total = world.current_stream(), world.side_stream("copy"), world.rank, sum(of.shards)
    nbytes = 2 * total * of.kv_heads * of.dim * of.dtype.itemsize
    memory = world.buffer(KEYS, nbytes).view(0, (2, total, of.kv_heads, of.dim), of.dtype)
    world.order(lock(world, KEYS), stream)
    ch = world.channel(f"{KEYS} there", world.size, None)
    turn = world.barrier(stream, KEYS)
    world.wait_event(copies, world.record(stream))
    if plan.push_programs:
        push = programs_push(world, plan, copies)
    else:
        push = functools.partial(engine_push, world, copies)
    with world.on(copies):  # once, not for every copy
        for step in range(1, world.size):
            reader = (me + step) % world.size
            for piece, at in landing(views[reader]):
                if piece.source == me:
                    push(memory, reader, at, own.rows(piece.lo, piece.hi))
                    rank_notify(world, ch, me, reader, turn, copies)
        for piece, at in landing(views[me]):
            if piece.source == me:  # packed sequences have them in one run with the others
                engine_push(world, copies, memory, me, at, own.rows(piece.lo, piece.hi))
        end = world.record(copies)

    def there(lo: int, hi: int, sources: Sequence[int]) -> Keys:
        def wait() -> None:
            for source in sources:
                if source == me:
                    world.wait_event(stream, end)
                else:
                    rank_wait(world, ch, source, turn, stream)

        return Keys(memory.local[0, lo:hi], memory.local[1, lo:hi], wait)

    placed = {piece.source: (piece, at) for piece, at in landing(views[me])}
    others = []
    for group in groups:
        piece, at = placed[group.pieces[0].source]
        lo = at + group.pieces[0].lo - piece.lo
        others.append((group, there(lo, lo + group.rows, [p.source for p in group.pieces])))
    return Fetched(others, end)


def engine_push(world: World, stream: Stream, memory: SymmetricTensor, reader: int, at: int, keys: Keys) -> None:
    for plane, t in zip(memory.peers[reader], (keys.k, keys.v), strict=True):
        world.copy(plane[at : at + len(t)], t, stream)


def programs_push(world: World, plan: Segmented, stream: Stream) -> Callable[[SymmetricTensor, int, int, Keys], None]:
    def push(memory: SymmetricTensor, reader: int, at: int, keys: Keys) -> None:
        width, total = keys.k[0].numel(), memory.local.shape[1]
        launch = _push(world, plan.push_programs, reader, at * width, total * width, keys.k.numel(), keys.k.dtype)
        launch(stream, memory=memory.addresses, k=keys.k, v=keys.v)

    return push


@prepared
def _push(world: World, programs: int, reader: int, start: int, plane: int, count: int, dtype: torch.dtype) -> Launch:
    sizes = dict(reader=reader, start=start, plane=plane, count=count)
    block = 4 * world.scale.block  # four 16-byte words a thread under way
    return Launch(world, push_rows, programs, dict(num_warps=16, local=True), **sizes, DTYPE=DTYPES[dtype], BLOCK=block)


# -- what is computed --------------------------------------------------------------------------------------------------
def forward(
    world: World,
    of: Heads,
    plan: Plan,
    seen: Sight,
    views: Views,
    q: Tensor,
    own: Keys,
    sinks: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out [m, heads, D], which is `out` where that is given, and lse float32 [heads, m]."""
    stream, m = world.current_stream(), len(q)
    if seen.packed and isinstance(plan, Segmented):
        plan = replace(plan, calls=1)
    keys = fetched(world, of, plan, own, seen.others if m else (), views)
    calls = [(0, own.rows(s.lo, s.hi), s.causal) for s in seen.own if m]
    calls += [(group.first, there, False) for group, there in keys.others]
    partials = [attend(world, of, first, q[first:], there, seen.packed or causal) for first, there, causal in calls]
    if keys.end is not None:
        world.wait_event(stream, keys.end)
    if out is None and len(partials) == 1 and sinks is None:
        return partials[0].out, partials[0].lse
    result, lse = world.empty(q.shape, q.dtype) if out is None else out, world.empty((of.heads, m), torch.float32)
    merged(world, partials, sinks, result, lse)
    return result, lse


def attend(world: World, of: Heads, first: int, q: Tensor, keys: Keys, mask: bool | Packed) -> Partial:
    library = of.library(world, "packed" if isinstance(mask, Packed) else "forward", min(len(q), len(keys.k)))
    wanted = ((q.shape, q.dtype), ((of.heads, len(q)), torch.float32))
    bounds = bounds_of(world, mask) if isinstance(mask, Packed) else None
    if keys.wait is not None:
        keys.wait()

    def attention() -> tuple[Tensor, Tensor]:
        if isinstance(mask, bool):
            return library.forward(q, keys.k, keys.v, mask, of.scale)
        assert library.packed is not None and bounds is not None
        return library.packed(q, keys.k, keys.v, mask, bounds, of.scale)

    out, lse = world.results(attention, wanted, [q, keys.k, keys.v, *(bounds or ())], world.current_stream())
    return Partial(first, out, lse)


def bounds_of(world: World, packed: Packed) -> Bounds:
    """Return the bounds as tensors, which are kept: a CUDA graph reads them again."""
    queries, keys = packed.queries, packed.keys
    make = world.tensor
    return world.cached(("bounds", queries, keys), lambda: (make(queries, torch.int32), make(keys, torch.int32)))


def merged(world: World, partials: Sequence[Partial], sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Merge partial results into `out` and `lse`. The merge takes those of all queries first."""
    m, heads, d = out.shape
    if not m:
        return
    partials = sorted(partials, key=lambda partial: partial.first)
    whole, first = len([p for p in partials if p.first == 0]), partials[-1].first
    launch = _merge(world, m, heads, d, first, whole, sinks is not None)
    launch(
        world.current_stream(),
        outs=tuple([p.out for p in partials]),
        lses=tuple([p.lse for p in partials]),
        sinks=lse if sinks is None else sinks,
        out=out,
        lse=lse,
    )


@prepared
def _merge(world: World, m: int, heads: int, d: int, first: int, whole: int, sinks: bool) -> Launch:
    """whole: partial results of all queries; the others begin with query `first`."""
    cols = 1 << (d - 1).bit_length()
    rows = max(world.scale.block // cols, 1)
    sizes = dict(M=m, first=first, HEADS=heads, D=d, WHOLE=whole, SINKS=sinks, ROWS=rows, COLS=cols)
    programs = min(world.sm_count * 4, heads * -(-m // rows))
    return Launch(world, merge, programs, dict(num_warps=4, local=True), **sizes)
