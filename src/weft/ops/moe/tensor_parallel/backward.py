"""The launches that run the backward passes of both halves of a layer whose experts are split by columns over the
ranks. backward_kernels.py describes the data flow and its order.

The rows are in the same order as in the forward pass, because the saved routes contain the position of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernel_launch import BoundLaunch, Launch, Moved, prepared
from ....plans import DispatchedColumns
from ....transport.memory import lock
from ....world import World
from ..call import ACTIVATIONS, NAME, Kept
from ..expert_parallel.backward import (
    activation_launch,
    between_gemms,
    expert_gradient_launches,
    gradient_sizes,
    unit_weights,
    unused_counters,
)
from ..expert_parallel.backward_kernels import IDENTITY
from ..expert_parallel.dispatched import DispatchedState, GroupedProduct, grouped_gemm, scratch
from ..expert_parallel.place_rows import order_of, place_rows_launch
from ..expert_rows import sum_over_ranks
from ..routing.route_tables import Tables
from .backward_kernels import activation_backward
from .call import GatherOperands, ScatterOperands, Split, route_parts, section_words
from .dispatched import acquire_arena, arena_workspace, plan_state, push_shard_launch, reduce_rows

# -- the launches ------------------------------------------------------------------------------------------------------


@prepared
def _activation_backward(world: World, state: DispatchedState, n: int) -> Launch:
    programs, options = between_gemms(world)
    sizes = gradient_sizes(world, state, ACTIVATIONS[state.layer.activation], 0)
    return Launch(world, activation_backward, programs, options, N=n, inner=state.layer.inner, s=sizes)


# -- the passes --------------------------------------------------------------------------------------------------------


def gather_rows(world: World, state: DispatchedState, x: Tensor, tables: Tables, rows: Tensor) -> None:
    """Compute rows [rows, H] = all ranks' x [T, H] in expert order, on the current stream."""
    assert isinstance(state.layer, Split)
    arena, stream, side = acquire_arena(world, state.layer), world.current_stream(), world.side_stream(NAME)
    workspace = arena_workspace(arena, state.layer.dtype, rows, rows)
    place_step = place_rows_launch(
        world,
        state,
        workspace.inbox.local,
        rows,
        order_of(tables, tables.route_rows),  # no kernel reads the ids
        state.dispatch_programs,
        epoch=workspace.epoch,
        half_size=workspace.half_size,
    )
    send = push_shard_launch(world, state, x, workspace, place_step.launch.grid)
    state.ahead((x,), lambda: (place_step, send, place_step), "gather")
    world.wait_event(side, world.record(stream))
    send.on(side)
    place_step.on(stream)
    world.wait_event(stream, world.record(side))  # from here on the caller may overwrite x


def second_half(
    world: World, layer: Split, plan: DispatchedColumns, dy: Tensor, operands: ScatterOperands, experts: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the operands of `dispatched.run_scatter` on the current stream: of hidden, of routes
    (only of their weights), and, if `experts` is set, of w2 and b2.

    The rows of dy @ w2, and for w2's gradient the activation times the route's weight, are rounded to layer.dtype. All
    sums are in float32 and in a fixed order.
    """
    hidden, routes, _, w2, b2, _ = operands
    state, (weights, tables) = plan_state(world, layer, plan), route_parts(world, layer, routes)
    stream = world.current_stream()
    dy_rows = scratch(world, "rows of dy", state.rows, layer.hidden, layer.dtype)
    g = scratch(world, "hidden", state.rows, layer.inner, layer.dtype)
    row_weights = scratch(world, "weights of rows", state.rows, 1, torch.float32)
    dhidden, droutes = world.empty(hidden.shape, hidden.dtype), world.zeros(routes.shape, torch.float32)
    dw2, db2 = (None if t is None or not experts else world.empty(t.shape, t.dtype) for t in (w2, b2))
    gather_rows(world, state, dy, tables, dy_rows)  # the first access to scratch memory after acquiring its lock
    gemm = grouped_gemm(world, state, tables, GroupedProduct(dy_rows, w2), g, unused_counters(world), True, True)
    # From g = dy @ w2 this launch computes g times the routing weights, the gradients of these weights, and, in place
    # of g, hidden times the weights. If there is a b2, the launch also stores the weight of each row.
    moving: dict[str, Moved] = dict(
        preactivation=hidden,
        hidden=g,
        out=dhidden,
        dy=dy_rows,
        bias=g if b2 is None else b2,
        row_weights=row_weights,
        tables=tables,
        weights=weights,
        dweights_inbox=route_parts(world, layer, droutes).weights,
    )
    weigh = BoundLaunch(activation_launch(world, state, IDENTITY.value, layer.inner, 0, b2 is not None), moving)
    bias_gradients, wgrad = expert_gradient_launches(world, state, tables, (dy_rows, g, dw2), (row_weights, db2))
    loaded = (*bias_gradients, weigh, gemm, *wgrad)
    state.ahead((hidden, w2, b2, dhidden, dw2, db2), lambda: loaded, "second half")
    for step in (gemm, weigh, *bias_gradients, *wgrad):
        step.on(stream)
    return dhidden, droutes, dw2, db2


def first_half(
    world: World,
    layer: Split,
    dhidden: Tensor,
    operands: GatherOperands,
    routes: Tensor,
    plan: DispatchedColumns,
    kept: Kept,
    wants_x: bool,
    experts: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the operands of `dispatched.run_gather` on the current stream: of x if `wants_x` is set,
    and of w13 and b13 if `experts` is set. kept: the tensors that the forward call saved. All ranks must pass equal
    wants_x and experts, and must have saved the same tensors.

    The gradient before the activation, the dx of each row, and the sums of dx that ranks send are rounded to
    layer.dtype. All sums are in float32 and in a fixed order.
    """
    x, ids, _, w13, b13 = operands
    state, (_, tables) = plan_state(world, layer, plan), route_parts(world, layer, routes)
    stream, n = world.current_stream(), w13.shape[1]
    world.order(lock(world, NAME), stream)
    x_rows = scratch(world, "rows of x", state.rows, layer.hidden, layer.dtype)
    preactivation = kept.preactivation
    if preactivation is None:
        preactivation = scratch(world, "preactivation", state.rows, n, layer.dtype)
    dpreactivation = scratch(world, "dpreactivation", state.rows, n, layer.dtype)
    dw13, db13 = (None if t is None or not experts else world.empty(t.shape, t.dtype) for t in (w13, b13))
    place, gemm = [], []
    if kept.rows is None:
        gather_rows(world, state, x, tables, x_rows)
    else:
        order = order_of(tables, tables.route_rows)
        place = [place_rows_launch(world, state, kept.rows, x_rows, order, 0)]
    if kept.preactivation is None:
        counters = unused_counters(world)
        product = GroupedProduct(x_rows, w13, b13)
        gemm = [grouped_gemm(world, state, tables, product, preactivation, counters, False, True)]
    moving: dict[str, Moved] = dict(preactivation=preactivation, dy=dhidden, out=dpreactivation)
    listed = dict(sources=tables.sources, tiles=tables.tiles, tile_count=tables.tile_count)
    activation = BoundLaunch(_activation_backward(world, state, n), moving | listed)
    bias_gradients, wgrad = expert_gradient_launches(world, state, tables, (dpreactivation, x_rows, dw13), (None, db13))
    # A kernel that shares SMs is checked against the kernel that is loaded next. Because of this order, the GEMM is
    # checked against the weight-gradient kernel.
    loaded = (*place, *bias_gradients, activation, *gemm, *wgrad)
    state.ahead((dhidden, w13, b13, *kept, dw13, db13), lambda: loaded, "first half")
    for step in (*place, *gemm, activation, *bias_gradients):
        step.on(stream)
    if not wants_x:
        for step in wgrad:
            step.on(stream)
        return None, dw13, db13
    dx, ones = world.empty(x.shape, x.dtype), unit_weights(world, layer)
    reduce_rows(world, state, tables, ones, GroupedProduct(dpreactivation, w13), ids, None, dx, wgrad)
    return dx, dw13, db13


def reduce_dweights(world: World, layer: Split, droutes: Tensor | None, weights: Tensor) -> Tensor:
    """Sum the gradients of this rank's routing weights over the ranks, in rank order. Return the sums, float32 [T,
    k]."""
    if droutes is None:
        droutes = world.zeros((sum(section_words(world, layer)),), torch.float32)
    n = layer.max_tokens_per_rank * layer.k
    sent = route_parts(world, layer, droutes).weights[: world.size * n].view(world.size, n)
    return sum_over_ranks(world, sent, weights)
