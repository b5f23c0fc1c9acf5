"""The launches of the backward passes of both halves of a layer whose experts' columns are split over ranks
(backward_kernels.py, which says what flows and what orders it).

Rows are where the forward pass had them: its routes say where, and are kept.
"""

from __future__ import annotations

import torch

from ....kernel_launch import GivenLaunch, Launch, Moved, prepared
from ....plans import DispatchedColumns
from ....transport.memory import lock
from ....world import World
from ..call import ACTIVATIONS, NAME, Kept
from ..expert_parallel import backward
from ..expert_parallel.backward import GradientForm, activation_launch, between_gemms, gradient_sizes
from ..expert_parallel.backward_kernels import IDENTITY
from ..expert_parallel.dispatched import Prepared, gemm_out, scratch
from ..expert_parallel.kernels import GELU, Routed
from ..expert_parallel.place_rows import places_rows
from ..expert_parallel.place_rows_kernels import ExpertOrder
from ..routing.route_tables import Tables
from .backward_kernels import activation_backward
from .call import GatherOperands, ScatterOperands, Split, parts
from .dispatched import Second, halves, last, lie, load, pushes, second, space, sums, tables_of

Tensor = torch.Tensor


# -- the launches ------------------------------------------------------------------------------------------------------


def weighing(
    world: World, of: Prepared, tables: Tables, weights: Tensor, hidden: Tensor, g: Tensor, dy: Tensor,
    b2: Tensor | None, by_row: Tensor, dhidden: Tensor, dweights: Tensor,
) -> GivenLaunch:  # fmt: skip
    """The launch that makes three things of g = dy @ w2 [rows, I]: dhidden, g times the routes' weights; dweights
    float32 [W, C, k], the gradients of the weights; and, in place of g, hidden times the weights. For a b2 it also
    writes by_row float32 [rows], the rows' weights."""
    form = GradientForm(IDENTITY.value, 0, hidden.shape[1], 0, b2 is not None)
    moving: dict[str, Moved] = dict(
        both=hidden,
        hidden=g,
        out=dhidden,
        dy=dy,
        bias=g if b2 is None else b2,
        by_row=by_row,
        tables=tables,
        weights=weights,
        home=dweights,
    )
    return GivenLaunch(activation_launch(world, of, form), moving)


def activating(world: World, of: Prepared, tables: Tables, both: Tensor, dhidden: Tensor, dboth: Tensor) -> GivenLaunch:
    launch = _activation_backward(world, of, both.shape[1], dhidden.shape[1])
    moving: dict[str, Moved] = dict(
        both=both, dy=dhidden, out=dboth, sources=tables.sources, tiles=tables.tiles, count=tables.count
    )
    return GivenLaunch(launch, moving)


@prepared
def _activation_backward(world: World, of: Prepared, n: int, inner: int) -> Launch:
    act = ACTIVATIONS[of.layer.activation]
    form = GradientForm(act, 0 if act == GELU.value else world.scale.interleave, n, 0, False)
    programs, options = between_gemms(world)
    sizes = gradient_sizes(world, of, form)
    return Launch(world, activation_backward, programs, options, N=n, inner=inner, s=sizes)


# -- the passes --------------------------------------------------------------------------------------------------------


def uncounted(world: World) -> Tensor:
    """Counters that nobody waits for."""
    return world.cached((NAME, "uncounted"), lambda: world.zeros((32,), torch.int32))


def order_of(tables: Tables) -> ExpertOrder:
    """ids are read by nobody here."""
    return ExpertOrder(tables.slots, tables.slots, tables.sources, tables.offsets, tables.received)


def gather(world: World, of: Prepared, x: Tensor, tables: Tables, rows: Tensor) -> None:
    """rows [rows, H] = all ranks' x [T, H] in expert order, on the current stream."""
    assert isinstance(of.layer, Split)
    arena, stream, side = halves(world, of.layer), world.current_stream(), world.side_stream(NAME)
    at = space(arena, of.layer.dtype, rows, rows)
    send = pushes(world, of, x, at)
    place = places_rows(world, of, at.inbox.local, rows, order_of(tables), of.senders, turn=at.turn, half=at.half)
    load(world, of, ("gather", lie(x)), (place, send, place))
    world.wait_event(side, world.record(stream))
    send.on(side)
    place.on(stream)
    world.wait_event(stream, world.record(side))  # x may be written again


def second_half(
    world: World, layer: Split, plan: DispatchedColumns, dy: Tensor, operands: ScatterOperands, experts: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of hidden, routes (of their weights alone), and (experts) w2 and b2, of `grouped_steps.run_scatter`
    of these, on the current stream.

    Rounded to layer.dtype are the rows of dy @ w2, and the activation times the route's weight, for w2's gradient; all
    sums are in float32 and in a fixed order.
    """
    hidden, routes, _, w2, b2, _ = operands
    of, given = second(world, layer, plan).of, parts(world, layer, routes)
    stream, tables = world.current_stream(), tables_of(given)
    world.order(lock(world, NAME), stream)
    dy_rows = scratch(world, "rows of dy", of.rows, layer.hidden, layer.dtype)
    g = scratch(world, "hidden", of.rows, layer.inner, layer.dtype)
    by_row = scratch(world, "weights of rows", of.rows, 1, torch.float32)
    dhidden, droutes = world.empty(hidden.shape, hidden.dtype), world.zeros(routes.shape, torch.float32)
    dw2, db2 = (None if t is None or not experts else world.empty(t.shape, t.dtype) for t in (w2, b2))
    gather(world, of, dy, tables, dy_rows)
    gemm = gemm_out(world, of, tables, dy_rows, w2, None, g, uncounted(world), back=True, sending=True)
    weights = parts(world, layer, droutes).weights
    weigh = weighing(world, of, tables, given.weights, hidden, g, dy_rows, b2, by_row, dhidden, weights)
    sums_, wgrad = of_experts(world, of, tables, (dy_rows, g, dw2), (by_row, db2))
    load(world, of, ("second half", experts, lie(hidden, w2, b2, dhidden, dw2, db2)), (*sums_, weigh, gemm, *wgrad))
    for step in (gemm, weigh, *sums_, *wgrad):
        step.on(stream)
    return dhidden, droutes, dw2, db2


def of_experts(
    world: World,
    of: Prepared,
    tables: Tables,
    matrix: tuple[Tensor, Tensor, Tensor | None],
    bias: tuple[Tensor | None, Tensor | None],
) -> tuple[list[GivenLaunch], list[GivenLaunch]]:
    """What makes a bias's gradient, of a's rows, and their weights or none; and a matrix's, a^T b. matrix: a, b and the
    gradient; bias: the rows' weights and the gradient; None for one that is not wanted."""
    (a, b, dw), (by_row, db) = matrix, bias
    sums_ = [] if db is None else [backward.summing(world, of, tables, a, by_row, db)]
    return sums_, [] if dw is None else [backward.wgrad(world, of, tables, a, b, dw)]


def first_half(
    world: World,
    layer: Split,
    plan: DispatchedColumns,
    dhidden: Tensor,
    operands: GatherOperands,
    routes: Tensor,
    kept: Kept,
    wants_x: bool,
    experts: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x (wants_x), and (experts) of w13 and b13, of `grouped_steps.run_gather` of these, on the
    current stream; kept: what that call kept. wants_x, experts and what was kept are the same on all ranks.

    Rounded to layer.dtype are the gradient before the activation, a row's dx, and another rank's sum of these; all sums
    are in float32 and in a fixed order.
    """
    x, ids, _, w13, b13 = operands
    made, given = second(world, layer, plan), parts(world, layer, routes)
    of, stream, tables = made.of, world.current_stream(), tables_of(given)
    world.order(lock(world, NAME), stream)
    n = w13.shape[1]
    x_rows = scratch(world, "rows of x", of.rows, layer.hidden, layer.dtype)
    both = scratch(world, "both", of.rows, n, layer.dtype) if kept.both is None else kept.both
    dboth = scratch(world, "dboth", of.rows, n, layer.dtype)
    dw13, db13 = (None if t is None or not experts else world.empty(t.shape, t.dtype) for t in (w13, b13))
    if kept.rows is None:
        gather(world, of, x, tables, x_rows)
    place = [] if kept.rows is None else [places_rows(world, of, kept.rows, x_rows, order_of(tables), 0)]
    again = gemm_out(world, of, tables, x_rows, w13, b13, both, uncounted(world), sending=True)
    gemm = [] if kept.both is not None else [again]
    activate = activating(world, of, tables, both, dhidden, dboth)
    sums_, wgrad = of_experts(world, of, tables, (dboth, x_rows, dw13), (None, db13))
    variant = "first half", experts, lie(dhidden, w13, b13, *kept, dw13, db13)
    load(world, of, variant, (*place, *sums_, activate, *gemm, *wgrad))
    for step in (*place, *gemm, activate, *sums_):
        step.on(stream)
    if wants_x:
        return home(world, made, tables, ids, dboth, w13, x, wgrad), dw13, db13
    for step in wgrad:
        step.on(stream)
    return None, dw13, db13


def home(
    world: World,
    made: Second,
    tables: Tables,
    ids: Tensor,
    dboth: Tensor,
    w13: Tensor,
    x: Tensor,
    under: list[GivenLaunch],
) -> Tensor:
    """Return dx [T, H] of dboth @ w13, summed as in `grouped_steps.run_scatter`; the launches `under` run beside the
    transfer too."""
    of, layer = made.of, made.of.layer
    assert isinstance(layer, Split)
    dx, y = world.empty(x.shape, x.dtype), scratch(world, "y", of.rows, layer.hidden, layer.dtype)
    arena, stream, side = halves(world, layer), world.current_stream(), world.side_stream(NAME)
    at = space(arena, layer.dtype, dboth, y)
    size = world.size * layer.capacity * layer.k
    ones = world.cached((NAME, "ones of routes", size), lambda: world.tensor([1] * size, torch.float32))
    rows = Routed(y, tables.slots, ones)
    gemm = gemm_out(world, of, tables, dboth, w13, None, y, made.counters, back=True, sending=True)
    add, end = sums(world, made, rows, tables.targets, at), last(world, made, rows, ids, None, dx, at)
    pairs = [part for step in (gemm, *under) for part in (add, step)]
    load(world, of, ("home", len(under), lie(w13, ids, dx)), (*pairs, end))
    start = world.record(stream)
    gemm.on(stream)
    world.wait_event(side, start)
    add.on(side)
    for step in under:
        step.on(stream)
    world.wait_event(stream, world.record(side))  # as `steps.total`
    end.on(stream)
    return dx
