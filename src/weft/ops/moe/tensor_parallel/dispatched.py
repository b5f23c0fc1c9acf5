"""The launches that run both halves of a layer whose experts are split by columns over the ranks (kernels.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ....kernel_launch import BoundLaunch, Launch, prepared
from ....plans import DispatchedColumns
from ....transport.memory import lock
from ....world import Arena, World
from ..call import NAME, Kept, Weights
from ..expert_parallel import dispatched
from ..expert_parallel.dispatched import (
    ELEMENTS_PER_THREAD,
    DispatchedState,
    GroupedProduct,
    LayerWorkspace,
    make_state,
)
from ..expert_parallel.kernels import RoutedRows
from ..routing import route_tables
from ..routing.route_tables import power
from .call import FirstHalfCall, GatherOperands, GroupedCall, ScatterOperands, Split, route_parts
from .kernels import keep_shards, push_shard


def unsupported(world: World, layer: Split, plan: DispatchedColumns) -> str | None:
    """Return the reason, the same on every rank, why the plan cannot serve the call, or None if it can."""
    if plan.tile.block_m != layer.tile:
        return f"rows are in tiles of {layer.tile}, not of {plan.tile.block_m}"
    if layer.local(world) > route_tables.MAX_LOCAL_EXPERTS:
        return f"a rank has columns of {layer.local(world)} experts, more than {route_tables.MAX_LOCAL_EXPERTS}"
    return dispatched.unsupported(world, replace(layer, experts=world.size), plan)


def plan_state(world: World, layer: Split, plan: DispatchedColumns) -> DispatchedState:
    """Return the state that the launches of both halves share. The first call is collective. Layers with equal numbers
    of programs share channels."""

    def make() -> DispatchedState:
        names = f"{NAME}, shards", f"{NAME}, parts"
        return make_state(world, layer, plan, layer.local(world), layer.rows(world), *names)

    return world.cached((NAME, layer, plan), make)


def table_builder(world: World, layer: Split) -> route_tables.TableBuilder:
    """Return the builder of the tables, which the first half runs. The first call is collective."""

    def make() -> route_tables.TableBuilder:
        routes = route_tables.routes_of(world, layer.max_tokens_per_rank, layer.k, alternating=True)
        sizes = route_tables.TableSizes(layer.local(world), layer.max_tokens_per_rank, layer.tile)
        return route_tables.make_builder(world, routes, sizes, tp_size=layer.tp_size, cumulative_targets=False)

    return world.cached(("first half", layer), make)


def acquire_arena(world: World, layer: Split) -> Arena:
    """Return the arena. Its two halves are used in turn as the inbox or outbox of successive calls. Calls on different
    streams use the arena, the routes and the scratch memory one after another. The call is collective when the arena
    has to grow."""
    arena = world.arena(world.size * layer.max_tokens_per_rank * layer.hidden * layer.dtype.itemsize)
    stream = world.current_stream()
    world.order(arena, stream)
    world.order(lock(world, NAME), stream)
    return arena


def arena_workspace(arena: Arena, dtype: torch.dtype, hidden: torch.Tensor, y: torch.Tensor) -> LayerWorkspace:
    """Return a workspace whose inbox and outbox are the arena."""
    half_size = arena.half // dtype.itemsize
    memory = arena.memory.view(0, (2 * half_size,), dtype)
    return LayerWorkspace(memory, memory, hidden, y, arena.epoch, half_size)


# -- the launches ------------------------------------------------------------------------------------------------------


def push_shard_launch(
    world: World, state: DispatchedState, x: torch.Tensor, workspace: LayerWorkspace, other_programs: int
) -> BoundLaunch:
    """Return the launch of `push_shard`. other_programs: the number of programs in the launch that reads the rows."""
    return BoundLaunch(
        _push_shard(world, state, workspace.half_size, other_programs),
        dict(T=x.shape[0], x=x, inboxes=workspace.inbox.addresses, epoch=workspace.epoch),
    )


@prepared
def _push_shard(world: World, state: DispatchedState, half_size: int, other_programs: int) -> Launch:
    plan = state.plan
    sizes = dict(BLOCK=state.push_block, STAGES=plan.send_stages, OTHER_PROGRAMS=other_programs)
    return state.side_launch(world, push_shard, True, half_size=half_size, **sizes)


@prepared
def _keep_shards(world: World, state: DispatchedState, half_size: int) -> Launch:
    """Return the launch that copies the inbox of the call that ended last to kept rows [W, max_tokens, H]."""
    layer, block = state.layer, min(32 * 4 * ELEMENTS_PER_THREAD, world.backend.scale.norm_block)
    cols = min(power(layer.hidden), block)
    sizes = dict(
        half_size=half_size, tokens=world.size * layer.max_tokens_per_rank, H=layer.hidden, COLS=cols, K=layer.k
    )
    return Launch(world, keep_shards, 4 * world.sm_count, dict(num_warps=4), **sizes, ROWS=block // cols)


# -- the calls ---------------------------------------------------------------------------------------------------------


def run_gather(
    world: World, call: FirstHalfCall, plan: DispatchedColumns, operands: GatherOperands, out: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Compute out [rows, I] = the activation of all ranks' x times w13, in expert order, on the current stream. Return
    the routes and the saved tensors."""
    (x, ids, weights, w13, b13), layer = operands, call.layer
    routes = call.routes(world)
    kept = Kept(*(world.empty(*t) for t in call.saved_shapes(world)))
    arena, stream, side = acquire_arena(world, layer), world.current_stream(), world.side_stream(NAME)
    state, builder = plan_state(world, layer, plan), table_builder(world, layer)
    workspace, (all_weights, tables) = arena_workspace(arena, layer.dtype, out, out), route_parts(world, layer, routes)
    push = push_shard_launch(world, state, x, workspace, state.gemm_programs(world))
    gemm = dispatched.first_gemm(world, state, Weights(w13, w13, b13), tables, workspace, kept.preactivation)
    keep_steps = []
    if kept.rows is not None:
        launch = _keep_shards(world, state, workspace.half_size)
        sources = dict(inbox=workspace.inbox.local, route_rows=tables.route_rows, epoch=workspace.epoch)
        keep_steps.append(BoundLaunch(launch, dict(sources, kept_rows=kept.rows)))
    state.ahead((x, out, w13, b13, *kept), lambda: (push, gemm, *keep_steps), "gather and GEMM")
    start = world.record(stream)
    route_tables.share_routes(world, builder.routes, ids, weights)
    world.wait_event(side, start)
    push.on(side)
    route_tables.run_builder(world, builder, tables, all_weights)
    gemm.on(stream)
    world.wait_event(stream, world.record(side))  # the caller may write x again
    for step in keep_steps:
        step.on(stream)
    return routes, *(t for t in kept if t is not None)


def run_scatter(
    world: World, call: GroupedCall, plan: DispatchedColumns, operands: ScatterOperands, out: torch.Tensor
) -> None:
    """Compute out [T, H] = the sum of weight * (hidden row @ w2) over a token's routes and over the ranks that share
    the experts, + shared, on the current stream."""
    hidden, routes, ids, w2, b2, shared = operands
    state, (weights, tables) = plan_state(world, call.layer, plan), route_parts(world, call.layer, routes)
    reduce_rows(world, state, tables, weights, GroupedProduct(hidden, w2, b2), ids, shared, out)


def reduce_rows(
    world: World,
    state: DispatchedState,
    tables: route_tables.Tables,
    weights: torch.Tensor,
    product: GroupedProduct,
    ids: torch.Tensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    concurrent: Sequence[BoundLaunch] | None = None,
) -> None:
    """Compute out [T, H] = the weighted sum of a token's rows over the ranks, + shared, on the current stream. The
    grouped GEMM computes these rows. concurrent: None in a forward pass. In a backward pass, which multiplies by the
    transposed w, these are the launches that run at the same time as the transfer."""
    layer, is_backward = state.layer, concurrent is not None
    assert isinstance(layer, Split)
    arena, stream, side = acquire_arena(world, layer), world.current_stream(), world.side_stream(NAME)
    y = dispatched.scratch(world, "y", state.rows, layer.hidden, layer.dtype)
    workspace, rows = arena_workspace(arena, layer.dtype, product.a, y), RoutedRows(y, tables.route_rows, weights)
    counters = world.channel(f"{NAME}, tiles of column shards by source step", world.size, None).counters
    gemm = dispatched.grouped_gemm(world, state, tables, product, y, counters, is_backward, is_backward)
    combine = dispatched.combine_launch(world, state, rows, tables.targets, counters, workspace)
    final_sum = dispatched.final_sum_launch(world, state, rows, ids, shared, out, workspace, counters)
    further = concurrent or ()
    pairs = [part for step in (gemm, *further) for part in (combine, step)]
    variant = "sums", is_backward, len(further)
    state.ahead((*product, ids, shared, out), lambda: (*pairs, final_sum), variant)
    start = world.record(stream)
    gemm.on(stream)
    world.wait_event(side, start)
    combine.on(side)
    for step in further:
        step.on(stream)
    # The reasons for this wait are the ones in `expert_parallel.dispatched.prepare_dispatched`. There is one more:
    # `final_sum` clears the counters, which `combine` may still read, because a rank notifies itself at the start of
    # `combine`.
    world.wait_event(stream, world.record(side))
    final_sum.on(stream)
