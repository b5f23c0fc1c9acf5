"""The launches of the backward passes of both halves of a layer whose experts' columns are split over ranks
(backward_kernels.py says what flows and what orders it).

Rows have the order of the forward pass: its routes are saved and say where each row is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernel_launch import BoundLaunch, Launch, Moved, prepared
from ....plans import DispatchedColumns
from ....transport.memory import lock
from ....world import World
from ..activations import GELU
from ..call import ACTIVATIONS, NAME, Kept
from ..expert_parallel import backward
from ..expert_parallel.backward import GradientForm, activation_launch, between_gemms, gradient_sizes
from ..expert_parallel.backward_kernels import IDENTITY
from ..expert_parallel.dispatched import DispatchedState, grouped_gemm, scratch
from ..expert_parallel.kernels import RoutedRows
from ..expert_parallel.place_rows import place_rows_launch
from ..expert_parallel.place_rows_kernels import ExpertOrder
from ..routing.route_tables import Tables
from .backward_kernels import activation_backward
from .call import GatherOperands, ScatterOperands, Split, route_parts, section_words
from .dispatched import (
    SecondHalfState,
    acquire_arena,
    alignment_key,
    arena_workspace,
    combine_launch,
    final_sum_launch,
    load,
    push_shard_launch,
    second_half_state,
    tables_of,
)

# -- the launches ------------------------------------------------------------------------------------------------------


def weight_gradient_launch(
    world: World, state: DispatchedState, tables: Tables, weights: Tensor, hidden: Tensor, g: Tensor, dy: Tensor,
    b2: Tensor | None, row_weights: Tensor, dhidden: Tensor, dweights: Tensor,
) -> BoundLaunch:  # fmt: skip
    """Return the launch that makes three results from g = dy @ w2 [rows, I]: dhidden, g times the routing weights;
    dweights float32 [W, max_tokens, k], the gradients of the weights; and, in place of g, hidden times the weights.
    With a b2 it also writes row_weights float32 [rows], the weights by row."""
    form = GradientForm(IDENTITY.value, 0, hidden.shape[1], 0, b2 is not None)
    moving: dict[str, Moved] = dict(
        preactivation=hidden,
        hidden=g,
        out=dhidden,
        dy=dy,
        bias=g if b2 is None else b2,
        row_weights=row_weights,
        tables=tables,
        weights=weights,
        dweights_inbox=dweights,
    )
    return BoundLaunch(activation_launch(world, state, form), moving)


def activation_gradient_launch(
    world: World, state: DispatchedState, tables: Tables, preactivation: Tensor, dhidden: Tensor, dpreactivation: Tensor
) -> BoundLaunch:
    """Return the launch of `activation_backward`."""
    launch = _activation_backward(world, state, preactivation.shape[1], dhidden.shape[1])
    moving: dict[str, Moved] = dict(
        preactivation=preactivation,
        dy=dhidden,
        out=dpreactivation,
        sources=tables.sources,
        tiles=tables.tiles,
        tile_count=tables.tile_count,
    )
    return BoundLaunch(launch, moving)


@prepared
def _activation_backward(world: World, state: DispatchedState, n: int, inner: int) -> Launch:
    act = ACTIVATIONS[state.layer.activation]
    form = GradientForm(act, 0 if act == GELU.value else world.backend.scale.interleave, n, 0, False)
    programs, options = between_gemms(world)
    sizes = gradient_sizes(world, state, form)
    return Launch(world, activation_backward, programs, options, N=n, inner=inner, s=sizes)


# -- the passes --------------------------------------------------------------------------------------------------------


def unused_counters(world: World) -> Tensor:
    """Return counters for which nobody waits."""
    return world.cached((NAME, "unused counters"), lambda: world.zeros((32,), torch.int32))


def expert_order(tables: Tables) -> ExpertOrder:
    """Return the tables by which rows are placed. Nobody reads `ids` here."""
    return ExpertOrder(tables.route_rows, tables.route_rows, tables.sources, tables.offsets, tables.received)


def gather_rows(world: World, state: DispatchedState, x: Tensor, tables: Tables, rows: Tensor) -> None:
    """rows [rows, H] = all ranks' x [T, H] in expert order, on the current stream."""
    assert isinstance(state.layer, Split)
    arena, stream, side = acquire_arena(world, state.layer), world.current_stream(), world.side_stream(NAME)
    workspace = arena_workspace(arena, state.layer.dtype, rows, rows)
    place_step = place_rows_launch(
        world,
        state,
        workspace.inbox.local,
        rows,
        expert_order(tables),
        state.dispatch_programs,
        epoch=workspace.epoch,
        half_size=workspace.half_size,
    )
    send = push_shard_launch(world, state, x, workspace, place_step.launch.grid)
    load(world, state, ("gather", alignment_key(x)), (place_step, send, place_step))
    world.wait_event(side, world.record(stream))
    send.on(side)
    place_step.on(stream)
    world.wait_event(stream, world.record(side))  # the caller may overwrite x


def second_half(
    world: World, layer: Split, plan: DispatchedColumns, dy: Tensor, operands: ScatterOperands, experts: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of hidden, of routes (of their weights alone), and (if `experts`) of w2 and b2, for
    `dispatched.run_scatter` of these operands, on the current stream.

    Rounded to layer.dtype are the rows of dy @ w2, and the activation times the route's weight, for w2's gradient; all
    sums are in float32 and in a fixed order.
    """
    hidden, routes, _, w2, b2, _ = operands
    state, parts = second_half_state(world, layer, plan).dispatched, route_parts(world, layer, routes)
    stream, tables = world.current_stream(), tables_of(parts)
    dy_rows = scratch(world, "rows of dy", state.rows, layer.hidden, layer.dtype)
    g = scratch(world, "hidden", state.rows, layer.inner, layer.dtype)
    row_weights = scratch(world, "weights of rows", state.rows, 1, torch.float32)
    dhidden, droutes = world.empty(hidden.shape, hidden.dtype), world.zeros(routes.shape, torch.float32)
    dw2, db2 = (None if t is None or not experts else world.empty(t.shape, t.dtype) for t in (w2, b2))
    gather_rows(world, state, dy, tables, dy_rows)  # the first use of scratch memory, behind its lock
    gemm = grouped_gemm(
        world, state, tables, dy_rows, w2, None, g, unused_counters(world), kn_weight=True, with_dispatch=True
    )
    weights = route_parts(world, layer, droutes).weights
    weigh = weight_gradient_launch(
        world, state, tables, parts.weights, hidden, g, dy_rows, b2, row_weights, dhidden, weights
    )
    bias_gradients, wgrad = expert_gradient_launches(world, state, tables, (dy_rows, g, dw2), (row_weights, db2))
    load(
        world,
        state,
        ("second half", experts, alignment_key(hidden, w2, b2, dhidden, dw2, db2)),
        (*bias_gradients, weigh, gemm, *wgrad),
    )
    for step in (gemm, weigh, *bias_gradients, *wgrad):
        step.on(stream)
    return dhidden, droutes, dw2, db2


def expert_gradient_launches(
    world: World,
    state: DispatchedState,
    tables: Tables,
    matrix: tuple[Tensor, Tensor, Tensor | None],
    bias: tuple[Tensor | None, Tensor | None],
) -> tuple[list[BoundLaunch], list[BoundLaunch]]:
    """Return the launches of a bias's gradient, the sums of a's rows times their weights if there are any, and of a
    matrix's gradient, a^T b. matrix: a, b and the gradient; bias: the rows' weights and the gradient. A gradient that
    is not wanted is None."""
    (a, b, dw), (row_weights, db) = matrix, bias
    bias_gradients = [] if db is None else [backward.bias_gradient_launch(world, state, tables, a, row_weights, db)]
    return bias_gradients, [] if dw is None else [backward.wgrad(world, state, tables, a, b, dw)]


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
    """Return the gradients of x (if `wants_x`) and (if `experts`) of w13 and b13, for `dispatched.run_gather` of these
    operands, on the current stream. kept: what that call saved. wants_x, experts and the saved tensors are the same on
    all ranks.

    Rounded to layer.dtype are the gradient before the activation, a row's dx, and another rank's sum of these; all sums
    are in float32 and in a fixed order.
    """
    x, ids, _, w13, b13 = operands
    half_state, parts = second_half_state(world, layer, plan), route_parts(world, layer, routes)
    state, stream, tables = half_state.dispatched, world.current_stream(), tables_of(parts)
    world.order(lock(world, NAME), stream)
    n = w13.shape[1]
    x_rows = scratch(world, "rows of x", state.rows, layer.hidden, layer.dtype)
    preactivation = kept.preactivation
    if preactivation is None:
        preactivation = scratch(world, "preactivation", state.rows, n, layer.dtype)
    dpreactivation = scratch(world, "dpreactivation", state.rows, n, layer.dtype)
    dw13, db13 = (None if t is None or not experts else world.empty(t.shape, t.dtype) for t in (w13, b13))
    if kept.rows is None:
        gather_rows(world, state, x, tables, x_rows)
    place_step = (
        [] if kept.rows is None else [place_rows_launch(world, state, kept.rows, x_rows, expert_order(tables), 0)]
    )
    recompute = grouped_gemm(
        world, state, tables, x_rows, w13, b13, preactivation, unused_counters(world), with_dispatch=True
    )
    gemm = [] if kept.preactivation is not None else [recompute]
    activate = activation_gradient_launch(world, state, tables, preactivation, dhidden, dpreactivation)
    bias_gradients, wgrad = expert_gradient_launches(world, state, tables, (dpreactivation, x_rows, dw13), (None, db13))
    variant = "first half", experts, alignment_key(dhidden, w13, b13, *kept, dw13, db13)
    load(world, state, variant, (*place_step, *bias_gradients, activate, *gemm, *wgrad))
    for step in (*place_step, *gemm, activate, *bias_gradients):
        step.on(stream)
    if wants_x:
        return reduce_dx(world, half_state, tables, ids, dpreactivation, w13, x, wgrad), dw13, db13
    for step in wgrad:
        step.on(stream)
    return None, dw13, db13


def reduce_dx(
    world: World,
    half_state: SecondHalfState,
    tables: Tables,
    ids: Tensor,
    dpreactivation: Tensor,
    w13: Tensor,
    x: Tensor,
    concurrent: list[BoundLaunch],
) -> Tensor:
    """Return dx [T, H] for dpreactivation @ w13, summed as in `dispatched.run_scatter`. The launches `concurrent` run
    at the same time as the transfer."""
    state, layer = half_state.dispatched, half_state.dispatched.layer
    assert isinstance(layer, Split)
    dx, y = world.empty(x.shape, x.dtype), scratch(world, "y", state.rows, layer.hidden, layer.dtype)
    arena, stream, side = acquire_arena(world, layer), world.current_stream(), world.side_stream(NAME)
    workspace = arena_workspace(arena, layer.dtype, dpreactivation, y)
    size = world.size * layer.max_tokens_per_rank * layer.k
    ones = world.cached((NAME, "ones of routes", size), lambda: world.tensor([1] * size, torch.float32))
    rows = RoutedRows(y, tables.route_rows, ones)
    gemm = grouped_gemm(
        world, state, tables, dpreactivation, w13, None, y, half_state.counters, kn_weight=True, with_dispatch=True
    )
    combine = combine_launch(world, half_state, rows, tables.targets, workspace)
    final_sum = final_sum_launch(world, half_state, rows, ids, None, dx, workspace)
    pairs = [part for step in (gemm, *concurrent) for part in (combine, step)]
    load(world, state, ("dx", len(concurrent), alignment_key(w13, ids, dx)), (*pairs, final_sum))
    start = world.record(stream)
    gemm.on(stream)
    world.wait_event(side, start)
    combine.on(side)
    for step in concurrent:
        step.on(stream)
    world.wait_event(stream, world.record(side))  # as in `expert_parallel.dispatched.prepare_dispatched`
    final_sum.on(stream)
    return dx


def reduce_dweights(world: World, layer: Split, droutes: Tensor | None, weights: Tensor) -> Tensor:
    """Return float32 [T, k], the gradients of the weights of this rank's routes, summed over the ranks in their
    order."""
    stream, size, dweights = world.current_stream(), world.size, world.empty(weights.shape, torch.float32)
    if droutes is None:
        droutes = world.zeros((sum(section_words(world, layer)),), torch.float32)
    n = layer.max_tokens_per_rank * layer.k
    sent = route_parts(world, layer, droutes).weights[: size * n].view(size, n)
    received = sent
    if size > 1:
        received = world.empty((size, n), torch.float32)
        world.backend.all_to_all(list(received), list(sent), stream)
    world.call(
        lambda: torch.sum(received[:, : dweights.numel()], 0, out=dweights.view(-1)), [received], [dweights], stream
    )
    return dweights
