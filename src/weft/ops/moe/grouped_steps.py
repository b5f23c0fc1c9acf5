"""The launches of both halves of a layer whose experts' columns are split over ranks (grouped_kernels.py), and the
table that goes from the one to the other.

The routes of a call are one int32 tensor: weights, slots, offsets, tiles, their number and the tiles of each wave, as
`routing.Tables` has them, each from a multiple of four words on. So the first half returns memory of its own, and the
second may run on it whenever the caller likes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...launches import GivenLaunch, Launch, prepared
from ...operands import DTYPES
from ...plans import Dispatched
from ...transport.memory import lock
from ...world import Arena, World
from . import routing, steps
from .grouped_kernels import keep_shards, push_shard
from .kernels import Routed
from .steps import ELEMENTS, NAME, NONE_KEPT, SEND, Kept, LastSums, Layer, Prepared, Space, Weights, power


@dataclass(frozen=True)
class Split(Layer):
    """A layer of which a rank has `inner` columns of its experts; those of one expert lie on `sharing` neighbouring
    ranks. tile: rows of a tile, from a multiple of which each expert's rows begin."""

    sharing: int = 1
    tile: int = 128

    def local(self, world: World) -> int:
        """Experts that a rank has columns of."""
        return self.experts * self.sharing // world.size

    def rows(self, world: World) -> int:
        """Of expert order, at most, in whole tiles."""
        return routing.rows_of(world, self.capacity, self.k, self.local(world), self.tile)


class Parts(NamedTuple):
    """A call's routes by their parts, int32."""

    weights: torch.Tensor  # float32 [W * C * k]
    slots: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    tile_count: torch.Tensor
    targets: torch.Tensor
    sources: torch.Tensor
    received: torch.Tensor


def sections(world: World, layer: Split) -> list[int]:
    """Words of each part of the routes."""
    routes, rows, local = world.size * layer.capacity * layer.k, layer.rows(world), layer.local(world)
    words = routes, routes, local + 1, 4 * (rows // layer.tile), 1, world.size, rows, local
    return [-(-n // 4) * 4 for n in words]


def parts(world: World, layer: Split, routes: torch.Tensor) -> Parts:
    weights, *others = routes.view(torch.int32).split(world.cached(("sections", layer), lambda: sections(world, layer)))
    return Parts(weights.view(torch.float32), *others)


@dataclass(eq=False)
class First:
    """What calls of the first half of one layer and plan have in common."""

    of: Prepared
    filling: routing.Filling
    listed: torch.Tensor

    def tables(self, routes: Parts) -> routing.Tables:
        return tables_of(routes)._replace(listed=self.listed)


@dataclass(eq=False)
class Second:
    of: Prepared
    counters: torch.Tensor  # tiles of each wave, in a call


def tables_of(routes: Parts) -> routing.Tables:
    """But for `listed`, which is blank."""
    _, slots, offsets, tiles, count, targets, sources, received = routes
    return routing.Tables(slots, sources, offsets, tiles, count, slots, received, targets)


def fits(world: World, layer: Split, plan: Dispatched) -> str | None:
    """Why the plan cannot serve the call, the same on every rank; None where it can."""
    if plan.tile.block_m != layer.tile:
        return f"rows lie in tiles of {layer.tile}, not of {plan.tile.block_m}"
    if layer.local(world) > routing.EXPERTS:
        return f"a rank has columns of {layer.local(world)} experts, more than {routing.EXPERTS}"
    return steps.fits(world, replace(layer, experts=world.size), plan)


def plan_state(world: World, layer: Split, plan: Dispatched) -> Prepared:
    """Collective. Channels of a name are those of all layers with as many programs."""
    senders, summers = min(plan.dispatch_programs, world.sm_count), min(plan.combine_programs, world.sm_count)
    came = world.channel(f"{NAME}, shards by {senders} programs", world.size, None, senders)
    summed = world.channel(f"{NAME}, parts by {summers} programs", world.size, None, summers)
    words, floats = world.zeros((16,), torch.int32), world.zeros((16,), torch.float32)
    local, rows, calls = layer.local(world), layer.rows(world), world.calls(steps.NAME)
    return Prepared(layer, plan, local, rows, senders, summers, came, summed, calls, words, floats)


def first(world: World, layer: Split, plan: Dispatched) -> First:
    """Collective the first time."""

    def make() -> First:
        of = plan_state(world, layer, plan)
        routes = routing.routes_of(world, layer.capacity, layer.k, turns=True)
        sizes = routing.TableSizes(of.local, layer.capacity, layer.tile)
        filling = routing.prepare(world, routes, sizes, sharing=layer.sharing, running=False)
        return First(of, filling, world.empty((world.size,), torch.int32))

    return world.cached(("first half", layer, plan), make)


def second(world: World, layer: Split, plan: Dispatched) -> Second:
    """Collective the first time."""

    def counters() -> torch.Tensor:
        return world.channel(f"{NAME}, tiles of parts by wave", world.size, None).counters

    return world.cached(("second half", layer, plan), lambda: Second(plan_state(world, layer, plan), counters()))


def halves(world: World, layer: Split) -> Arena:
    """Collective when it has to grow. Serialises its uses across streams, and those of the routes and of scratch."""
    arena = world.arena(world.size * layer.capacity * layer.hidden * layer.dtype.itemsize)
    stream = world.current_stream()
    world.order(arena, stream)
    world.order(lock(world, NAME), stream)
    return arena


def space(arena: Arena, dtype: torch.dtype, hidden: torch.Tensor, y: torch.Tensor) -> Space:
    half = arena.half // dtype.itemsize
    memory = arena.memory.view(0, (2 * half,), dtype)
    return Space(memory, memory, hidden, y, arena.turn, half)


# -- the launches ------------------------------------------------------------------------------------------------------


def pushes(world: World, of: Prepared, x: torch.Tensor, at: Space) -> GivenLaunch:
    return GivenLaunch(
        _push_shard(world, of, at.half), dict(T=x.shape[0], x=x, inboxes=at.inbox.addresses, turn=at.turn)
    )


@prepared
def _push_shard(world: World, of: Prepared, half: int) -> Launch:
    layer, plan = of.layer, of.plan
    return Launch(
        world,
        push_shard,
        of.senders,
        of.beside(SEND),
        ch=of.came,
        half=half,
        C=layer.capacity,
        DTYPE=DTYPES[layer.dtype],
        H=layer.hidden,
        BLOCK=32 * plan.side_warps * ELEMENTS,
        STAGES=plan.send_stages,
        PROGRAMS=of.senders,
        OTHERS=world.sm_count,
    )


def keeps(world: World, of: Prepared, slots: torch.Tensor, at: Space, kept: torch.Tensor) -> GivenLaunch:
    """kept [W, C, H] = the inbox of the call that ended last."""
    return GivenLaunch(
        _keep_shards(world, of, at.half), dict(inbox=at.inbox.local, kept=kept, slots=slots, turn=at.turn)
    )


@prepared
def _keep_shards(world: World, of: Prepared, half: int) -> Launch:
    layer, block = of.layer, min(32 * 4 * ELEMENTS, world.scale.norm_block)
    cols = min(power(layer.hidden), block)
    sizes = dict(half=half, tokens=world.size * layer.capacity, H=layer.hidden, COLS=cols, K=layer.k)
    return Launch(world, keep_shards, 4 * world.sm_count, dict(num_warps=4), **sizes, ROWS=block // cols)


def sums(world: World, made: Second, of_rows: Routed, targets: torch.Tensor, at: Space) -> GivenLaunch:
    return steps.sums(world, made.of, of_rows, targets, made.counters, at)


def last(
    world: World,
    made: Second,
    of_rows: Routed,
    ids: torch.Tensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    at: Space,
) -> GivenLaunch:
    layer = made.of.layer
    assert isinstance(layer, Split)
    return steps.last(world, made.of, of_rows, ids, shared, out, at, made.counters, LastSums(layer.sharing))


def load(world: World, of: Prepared, variant: Hashable, launches: tuple[GivenLaunch, ...]) -> None:
    """All of them before the first is launched, in pairs of what shares an SM. Raises Unsupported where a pair does
    not."""
    if variant in of.loaded:
        return
    for launch, moving in launches:
        launch.load(**moving)
    of.loaded.add(variant)


def lie(*tensors: torch.Tensor | None) -> Hashable:
    return tuple(None if t is None else t.data_ptr() % 16 == 0 for t in tensors)


# -- the calls ---------------------------------------------------------------------------------------------------------


def gather(
    world: World,
    layer: Split,
    plan: Dispatched,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w: Weights,
    hidden: torch.Tensor,
    routes: torch.Tensor,
    kept: Kept = NONE_KEPT,
) -> None:
    """hidden [rows, I] = the activation of all ranks' x times w.w13, in expert order, and the routes; on the current
    stream. w.w2 and w.b2 are not read. kept: where to keep what a backward pass takes."""
    arena, stream, side = halves(world, layer), world.current_stream(), world.side_stream(NAME)
    made = first(world, layer, plan)
    at, given = space(arena, layer.dtype, hidden, hidden), parts(world, layer, routes)
    tables = made.tables(given)
    send, gemm = pushes(world, made.of, x, at), steps.gemm_in(world, made.of, w, tables, at, kept.both)
    after = () if kept.rows is None else (keeps(world, made.of, given.slots, at, kept.rows),)
    load(world, made.of, lie(x, hidden, *w, *kept), (send, gemm, *after))
    start = world.record(stream)
    routing.share(world, ids, weights, layer.capacity, turns=True)
    world.wait_event(side, start)
    send.on(side)
    routing.fill(world, made.filling, tables, given.weights)
    gemm.on(stream)
    world.wait_event(stream, world.record(side))  # the caller may write x again
    for step in after:
        step.on(stream)


def scatter(
    world: World,
    layer: Split,
    plan: Dispatched,
    hidden: torch.Tensor,
    routes: torch.Tensor,
    ids: torch.Tensor,
    w: Weights,
    shared: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out [T, H] = the sum over a token's routes of weight * (hidden row @ w.w2), over the ranks that share the
    experts, + shared; on the current stream. w.w13 and w.b13 are not read."""
    arena, stream, side = halves(world, layer), world.current_stream(), world.side_stream(NAME)
    made = second(world, layer, plan)
    of = made.of
    at = space(arena, layer.dtype, hidden, steps.scratch(world, "y", of.rows, layer.hidden, layer.dtype))
    given = parts(world, layer, routes)
    tables = tables_of(given)
    rows = Routed(at.y, given.slots, given.weights)
    gemm = steps.gemm_out(world, of, tables, hidden, w.w2, w.b2, at.y, made.counters)
    add, end = sums(world, made, rows, given.targets, at), last(world, made, rows, ids, shared, out, at)
    load(world, of, lie(hidden, ids, *w, shared, out), (add, gemm, end))
    start = world.record(stream)
    gemm.on(stream)
    world.wait_event(side, start)
    add.on(side)
    # As `steps.total`; and `end` clears the counters that `add` reads still: a rank's own wave of sums arrives at once.
    world.wait_event(stream, world.record(side))
    end.on(stream)
