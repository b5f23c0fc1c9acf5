"""How keys and values come, and what is computed when.

    main stream  barrier | own attention          | attention over others .. | merge
    copy stream           | push | push | push

Every rank pushes its keys and values to where their readers read them, with a flag behind each piece
(`copy_engine.exchange_rows`); readers wait for flags between two calls of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from ...backends.base import Event, Stream
from ...backends.library_gemm import stepped
from ...chooser import Choice, Chooser
from ...kernel_launch import Launch, prepared
from ...plans import Plan, Segmented
from ...transport.collectives import gather
from ...transport.copy_engine import Send, exchange_rows, push
from ...transport.memory import workspace
from ...transport.sm_push import pushing
from ...world import World
from . import libraries
from .kernels import merge
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

    def library(
        self, world: World, use: str, sizes: tuple[int, int, bool], run: Callable[[AttentionLibrary], object]
    ) -> AttentionLibrary:
        """Return the fastest attention library for `run`, which computes with one. sizes: queries, keys, and whether
        the mask is causal; libraries are timed at the first call of such sizes."""
        key = use, sizes, self.dtype, self.heads, self.kv_heads, self.dim
        return world.decided.get(key) or self._choose(world, key, use, sizes, run)

    def able(self, world: World, use: str, rows: int) -> Sequence[AttentionLibrary]:
        """Return the libraries that are right for a call of at least so many queries and keys, the one that is expected
        to be the fastest first."""
        given = use, world.device, self.dtype, self.heads, self.kv_heads, self.dim
        found = world.cached(("attention libraries", *given), lambda: libraries.right(*given))
        return [library for library in found if library.least <= rows] or found[-1:]

    def _choose(
        self,
        world: World,
        key: Hashable,
        use: str,
        sizes: tuple[int, int, bool],
        run: Callable[[AttentionLibrary], object],
    ) -> AttentionLibrary:
        queries, keys, causal = sizes
        able = self.able(world, use, min(queries, keys))
        library, known = able[0], True
        if len(able) > 1 and world.backend.clock is not None:
            of = world.device, self.dtype, self.heads, self.kv_heads, self.dim
            alike = use, stepped(queries), stepped(keys), causal, *of
            library = Chooser.alone.choose(Choice(alike, lambda mode: able[0], lambda: able, run))
            known = alike in Chooser.alone.trials  # else it is first seen in a capture
        if known:
            world.decided[key] = library
        return library


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
    rows = [hi - lo for lo, hi in spans]
    out = world.empty((sum(rows), t.shape[1]), t.dtype)
    for part, (lo, hi) in zip(out.split(rows), spans, strict=True):
        world.copy(part, t[lo:hi], stream)
    return out


def pushed(world: World, of: Heads, plan: Segmented, own: Keys, groups: Sequence[Group], views: Views) -> Fetched:
    """Push K and V, by copy engine or by a few programs, to where their readers read them. Returns what this rank
    reads."""
    me, total = world.rank, sum(of.shards)
    memory = workspace(world, KEYS, (2, total, of.kv_heads, of.dim), of.dtype)
    # Packed sequences have this rank's own in one run with the others.
    sends = [
        Send(reader, at, own.rows(piece.lo, piece.hi)[:2])
        for reader in (*world.other_ranks, me)
        for piece, at in landing(views[reader])
        if piece.source == me
    ]
    arrived = exchange_rows(world, KEYS, memory, sends, pushing(plan.push_programs) if plan.push_programs else push)
    placed = {piece.source: (piece, at) for piece, at in landing(views[me])}
    others = []
    for group in groups:
        piece, at = placed[group.pieces[0].source]
        lo = at + group.pieces[0].lo - piece.lo
        k, v = memory.local[:, lo : lo + group.rows]
        others.append((group, Keys(k, v, partial(arrived.wait, [p.source for p in group.pieces]))))
    return Fetched(others, arrived.end)


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
    use, sizes = "packed" if isinstance(mask, Packed) else "forward", (len(q), len(keys.k), mask is True)
    wanted = ((q.shape, q.dtype), ((of.heads, len(q)), torch.float32))
    bounds = bounds_of(world, mask) if isinstance(mask, Packed) else None
    if keys.wait is not None:
        keys.wait()

    def attention(library: AttentionLibrary) -> tuple[Tensor, Tensor]:
        if isinstance(mask, bool):
            return library.forward(q, keys.k, keys.v, mask, of.scale)
        assert library.packed is not None and bounds is not None
        return library.packed(q, keys.k, keys.v, mask, bounds, of.scale)

    library, given = of.library(world, use, sizes, attention), [q, keys.k, keys.v, *(bounds or ())]
    out, lse = world.results(lambda: attention(library), wanted, given, world.current_stream())
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
