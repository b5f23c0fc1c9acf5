"""The launches of both halves of a layer whose experts' columns are split over ranks (kernels.py)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from ....kernel_launch import GivenLaunch, Launch, prepared
from ....plans import DispatchedColumns
from ....transport.memory import lock
from ....world import Arena, World
from ..call import NAME, NONE_KEPT, Kept, Weights
from ..expert_parallel import dispatched
from ..expert_parallel.dispatched import ELEMENTS, SEND, LastSums, Prepared, Space
from ..expert_parallel.kernels import Routed
from ..routing import route_tables
from ..routing.route_tables import power
from .call import FirstHalfCall, GatherOperands, GroupedCall, Parts, ScatterOperands, Split, parts
from .kernels import keep_shards, push_shard


@dataclass(eq=False)
class First:
    """What calls of the first half of one layer and plan have in common."""

    of: Prepared
    filling: route_tables.Filling
    listed: torch.Tensor

    def tables(self, routes: Parts) -> route_tables.Tables:
        return tables_of(routes)._replace(listed=self.listed)


@dataclass(eq=False)
class Second:
    of: Prepared
    counters: torch.Tensor  # tiles of each wave, in a call


def tables_of(routes: Parts) -> route_tables.Tables:
    """But for `listed`, which is blank."""
    _, slots, offsets, tiles, count, targets, sources, received = routes
    return route_tables.Tables(slots, sources, offsets, tiles, count, slots, received, targets)


def fits(world: World, layer: Split, plan: DispatchedColumns) -> str | None:
    """Why the plan cannot serve the call, the same on every rank; None where it can."""
    if plan.tile.block_m != layer.tile:
        return f"rows lie in tiles of {layer.tile}, not of {plan.tile.block_m}"
    if layer.local(world) > route_tables.EXPERTS:
        return f"a rank has columns of {layer.local(world)} experts, more than {route_tables.EXPERTS}"
    return dispatched.fits(world, replace(layer, experts=world.size), plan)


def plan_state(world: World, layer: Split, plan: DispatchedColumns) -> Prepared:
    """Collective. Channels of a name are those of all layers with as many programs."""
    senders, summers = min(plan.dispatch_programs, world.sm_count), min(plan.combine_programs, world.sm_count)
    came = world.channel(f"{NAME}, shards by {senders} programs", world.size, None, senders)
    summed = world.channel(f"{NAME}, parts by {summers} programs", world.size, None, summers)
    words, floats = world.zeros((16,), torch.int32), world.zeros((16,), torch.float32)
    local, rows, calls = layer.local(world), layer.rows(world), world.calls(NAME)
    return Prepared(layer, plan, local, rows, senders, summers, came, summed, calls, words, floats)


def first(world: World, layer: Split, plan: DispatchedColumns) -> First:
    """Collective the first time."""

    def make() -> First:
        of = plan_state(world, layer, plan)
        routes = route_tables.routes_of(world, layer.capacity, layer.k, turns=True)
        sizes = route_tables.TableSizes(of.local, layer.capacity, layer.tile)
        filling = route_tables.prepare(world, routes, sizes, sharing=layer.sharing, running=False)
        return First(of, filling, world.empty((world.size,), torch.int32))

    return world.cached(("first half", layer, plan), make)


def second(world: World, layer: Split, plan: DispatchedColumns) -> Second:
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
    return Space(memory, memory, hidden, y, arena.epoch, half)


# -- the launches ------------------------------------------------------------------------------------------------------


def pushes(world: World, of: Prepared, x: torch.Tensor, at: Space) -> GivenLaunch:
    return GivenLaunch(
        _push_shard(world, of, at.half), dict(T=x.shape[0], x=x, inboxes=at.inbox.addresses, turn=at.turn)
    )


@prepared
def _push_shard(world: World, of: Prepared, half: int) -> Launch:
    plan = of.plan
    sizes = dict(BLOCK=of.push_block, STAGES=plan.send_stages, OTHERS=world.sm_count)
    return of.side_launch(world, push_shard, of.senders, SEND, of.came, half=half, **sizes)


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
    return dispatched.sums(world, made.of, of_rows, targets, made.counters, at)


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
    return dispatched.last(world, made.of, of_rows, ids, shared, out, at, made.counters, LastSums(layer.sharing))


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


def run_gather(
    world: World, call: FirstHalfCall, plan: DispatchedColumns, operands: GatherOperands, out: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """out [rows, I] = the activation of all ranks' x times w13, in expert order; on the current stream. Returns the
    routes and what is kept."""
    (x, ids, weights, w13, b13), layer = operands, call.layer
    routes = call.routes(world)
    kept = NONE_KEPT if call.keep is None else Kept(*(world.empty(*t) for t in call.kept(world)))
    arena, stream, side = halves(world, layer), world.current_stream(), world.side_stream(NAME)
    made = first(world, layer, plan)
    at, given = space(arena, layer.dtype, out, out), parts(world, layer, routes)
    tables, w = made.tables(given), Weights(w13, w13, b13)
    send, gemm = pushes(world, made.of, x, at), dispatched.gemm_in(world, made.of, w, tables, at, kept.both)
    after = () if kept.rows is None else (keeps(world, made.of, given.slots, at, kept.rows),)
    load(world, made.of, lie(x, out, w13, b13, *kept), (send, gemm, *after))
    start = world.record(stream)
    route_tables.share(world, ids, weights, layer.capacity, turns=True)
    world.wait_event(side, start)
    send.on(side)
    route_tables.fill(world, made.filling, tables, given.weights)
    gemm.on(stream)
    world.wait_event(stream, world.record(side))  # the caller may write x again
    for step in after:
        step.on(stream)
    return routes, *(t for t in kept if t is not None)


def run_scatter(
    world: World, call: GroupedCall, plan: DispatchedColumns, operands: ScatterOperands, out: torch.Tensor
) -> None:
    """out [T, H] = the sum over a token's routes of weight * (hidden row @ w2), over the ranks that share the experts,
    + shared; on the current stream."""
    (hidden, routes, ids, w2, b2, shared), layer = operands, call.layer
    arena, stream, side = halves(world, layer), world.current_stream(), world.side_stream(NAME)
    made = second(world, layer, plan)
    of = made.of
    at = space(arena, layer.dtype, hidden, dispatched.scratch(world, "y", of.rows, layer.hidden, layer.dtype))
    given = parts(world, layer, routes)
    tables = tables_of(given)
    rows = Routed(at.y, given.slots, given.weights)
    gemm = dispatched.gemm_out(world, of, tables, hidden, w2, b2, at.y, made.counters)
    add, end = sums(world, made, rows, given.targets, at), last(world, made, rows, ids, shared, out, at)
    load(world, of, lie(hidden, ids, w2, b2, shared, out), (add, gemm, end))
    start = world.record(stream)
    gemm.on(stream)
    world.wait_event(side, start)
    add.on(side)
    # As `expert_parallel.dispatched.total`; and `end` clears the counters that `add` reads still: a rank's own wave of
    # sums arrives at once.
    world.wait_event(stream, world.record(side))
    end.on(stream)
