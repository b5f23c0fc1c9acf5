"""The launches of an MoE layer's backward pass (backward_kernels.py, which says what orders them).

    side stream  | dispatch x, dy                         |                  | combine                       |
    main stream  | share, tables | x rows @ w13 | dy rows | @ w2, activation | @ w13 | sums over rows: dw13, .. | sum

Rows are where the forward pass had them: the tables are made again, of the same ids. What it kept (`call.Kept`) is not
sent or computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ....backends.base import SymmetricTensor
from ....kernel_launch import GivenLaunch, Launch, Matrices, Matrix, Moved, prepared
from ....lang.jit import constants
from ....plans import Dispatched
from ....transport.memory import lock
from ....world import World
from ..call import ACTIVATIONS, NAME, Kept, Layer, MoeOperands, Weights
from ..routing import route_tables
from ..routing.route_tables import Tables
from . import dispatched
from .backward_kernels import GradientSizes, activation_gradient, grouped_wgrad, row_sums, take_gradients
from .dispatched import SUM, Prepared, Space, scratch
from .kernels import GELU, Routed
from .place_rows import places_rows
from .place_rows_kernels import ExpertOrder

Tensor = torch.Tensor


class Gradients(NamedTuple):
    """The gradients: x, dx [T, H]; weights, float32 [T, k]; those of the experts as these are, None where they are not
    wanted."""

    x: Tensor
    weights: Tensor
    w13: Tensor | None = None
    w2: Tensor | None = None
    b13: Tensor | None = None
    b2: Tensor | None = None


@dataclass(eq=False)
class PassRows:
    """What a pass has of its rows: `x`, `dy` [rows, H]; `both`, of which the activation is, and its gradient `dboth`
    [rows, N]; `hidden` [rows, I], `y` [rows, H], as kernels.py has them; by_row float32 [rows], weights. inbox: the
    second, of x that is sent again. home: gradients of the routes' weights [C, k]."""

    x: Tensor
    dy: Tensor
    both: Tensor
    dboth: Tensor
    by_row: Tensor
    at: Space
    inbox: SymmetricTensor
    home: SymmetricTensor
    ones: Tensor  # float32 [W, C, k]
    uncounted: Tensor  # counters that nobody waits for


def memory(world: World, of: Prepared, n: int) -> PassRows:
    """Return the memory of a pass, which is that of all layers together but for what depends on C and k. Collective
    when it has to grow."""
    layer, rows = of.layer, of.rows
    at = dispatched.space(world, layer, rows)
    again = dispatched.space(world, layer, rows, "inbox of x").inbox
    c, k = layer.capacity, layer.k
    home = world.cached((NAME, "home", c, k), lambda: world.symmetric((c, k), torch.float32, f"{NAME} home"))

    def ones() -> Tensor:
        return world.tensor([1] * (world.size * c * k), torch.float32)

    def room(name: str, cols: int, dtype: torch.dtype = layer.dtype) -> Tensor:
        return scratch(world, name, rows, cols, dtype)

    return PassRows(
        x=room("rows of x", layer.hidden),
        dy=room("rows of dy", layer.hidden),
        both=room("both", n),
        dboth=room("dboth", n),
        by_row=room("weights of rows", 1, torch.float32),
        at=at,
        inbox=again,
        home=home,
        ones=world.cached((NAME, "ones", c, k), ones),
        uncounted=world.cached((NAME, "uncounted"), lambda: world.zeros((32,), torch.int32)),
    )


# -- the launches ------------------------------------------------------------------------------------------------------


def placing(
    world: World, of: Prepared, tables: Tables, ids: Tensor, inbox: Tensor, rows: Tensor, came: bool
) -> GivenLaunch:
    """The launch that places inbox [W, C, H] in rows [rows, H], as it comes, or (came) all of it. ids: int32 [W, C,
    k]."""
    order = ExpertOrder(ids, tables.slots, tables.sources, tables.offsets, tables.received)
    return places_rows(world, of, inbox, rows, order, 0 if came else of.senders)


def activating(world: World, of: Prepared, tables: Tables, weights: Tensor, w: Weights, m: PassRows) -> GivenLaunch:
    gate = 0 if ACTIVATIONS[of.layer.activation] == GELU.value else world.scale.interleave
    form = GradientForm(ACTIVATIONS[of.layer.activation], gate, w.w13.shape[1], world.size, w.b2 is not None)
    moving: dict[str, Moved] = dict(
        both=m.both,
        hidden=m.at.hidden,
        out=m.dboth,
        dy=m.dy,
        bias=w.w2 if w.b2 is None else w.b2,
        by_row=m.by_row,
        tables=tables,
        weights=weights,
        home=m.home.addresses,
    )
    return GivenLaunch(activation_launch(world, of, form), moving)


class GradientForm(NamedTuple):
    """The form of an activation's gradient. columns: N, of its operand. homes: ranks whose routes' weights have
    gradients at home, 0 for here. bias: whether the second matrix has one."""

    activation: int
    gated: int
    columns: int
    homes: int
    bias: bool


def gradient_sizes(world: World, of: Prepared, form: GradientForm) -> GradientSizes:
    rows, cols = world.scale.gradient_block
    return constants(
        GradientSizes,
        W=form.homes,
        K=of.layer.k,
        BM=of.plan.tile.block_m,
        ROWS=rows,
        COLS=cols,
        ACT=form.activation,
        GATED=form.gated,
    )


def between_gemms(world: World) -> tuple[int, dict[str, int]]:
    """Return the programs of a launch between two GEMMs, as many as fit on the GPU, and their options."""
    return world.sm_count * world.scale.programs_between_gemms, dict(num_warps=4, maxnreg=96, co_resident=True)


@prepared
def activation_launch(world: World, of: Prepared, form: GradientForm) -> Launch:
    programs, options = between_gemms(world)
    return Launch(
        world,
        activation_gradient,
        programs,
        options,
        C=of.layer.capacity,
        N=form.columns,
        H=of.layer.hidden,
        inner=of.layer.inner,
        s=gradient_sizes(world, of, form),
        BIAS=form.bias,
    )


def wgrad(world: World, of: Prepared, tables: Tables, a: Tensor, b: Tensor, out: Tensor) -> GivenLaunch:
    """out [El, M, N] = a^T b of each expert's rows; a [rows, M], b [rows, N]."""
    launch = _wgrad(world, of, a.shape[1], b.shape[1])
    return GivenLaunch(launch, dict(a_desc=a, b_desc=b, out_desc=out, offsets=tables.offsets))


@prepared
def _wgrad(world: World, of: Prepared, m: int, n: int) -> Launch:
    plan = of.plan
    bm, bn, bk = plan.tile.block_m, plan.tile.block_n, min(plan.tile.block_k, plan.tile.block_m)
    return Launch(
        world,
        grouped_wgrad,
        world.sm_count,
        of.gemm(SUM, bn // 2, sending=True),
        a_desc=Matrix(of.rows, m, (bk, bm)),
        b_desc=Matrix(of.rows, n, (bk, bn)),
        out_desc=Matrices(of.local, m, n, (bm, bn // 2)),
        M=m,
        N=n,
        EL=of.local,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP_M=plan.tile.group_m,
        FLATTEN=plan.flatten,
    )


def summing(
    world: World, of: Prepared, tables: Tables, rows: Tensor, by_row: Tensor | None, out: Tensor
) -> GivenLaunch:
    """out [El, N]: sums of each expert's rows, times by_row if there is one."""
    launch = _row_sums(world, of, rows.shape[1], by_row is not None)
    return GivenLaunch(
        launch, dict(rows=rows, by_row=rows if by_row is None else by_row, offsets=tables.offsets, out=out)
    )


@prepared
def _row_sums(world: World, of: Prepared, n: int, weighted: bool) -> Launch:
    block, cols = world.scale.sum_block
    sizes = dict(N=n, EL=of.local, ROWS=block, COLS=cols, WEIGHTED=weighted)
    return Launch(world, row_sums, world.sm_count, dict(num_warps=4, co_resident=True), **sizes)


def taking(world: World, of: Prepared, ids: Tensor, out: Tensor, m: PassRows) -> GivenLaunch:
    return GivenLaunch(_take_gradients(world, of.layer.experts, ids.numel()), dict(home=m.home.local, ids=ids, out=out))


@prepared
def _take_gradients(world: World, experts: int, count: int) -> Launch:
    block = world.scale.routes
    programs = min(world.sm_count, max(1, -(-count // block)))
    return Launch(world, take_gradients, programs, dict(num_warps=4), given=count, experts=experts, BLOCK=block)


def of_experts(world: World, of: Prepared, tables: Tables, m: PassRows, made: Gradients) -> Iterator[GivenLaunch]:
    if made.w13 is not None:
        yield wgrad(world, of, tables, m.dboth, m.x, made.w13)
    if made.w2 is not None:
        yield wgrad(world, of, tables, m.dy, m.at.hidden, made.w2)
    if made.b13 is not None:
        yield summing(world, of, tables, m.dboth, None, made.b13)
    if made.b2 is not None:
        yield summing(world, of, tables, m.dy, m.by_row, made.b2)


def load(
    world: World, of: Prepared, dy: Tensor, x: Tensor, ids: Tensor, w: Weights, m: PassRows, made: Gradients, kept: Kept
) -> None:
    """Load everything that a pass launches, as `dispatched.load` does for a call: what shares an SM with a GEMM comes
    right before it."""

    def each() -> Iterator[GivenLaunch]:
        blank, every = Tables(*[of.words] * 8), m.ones.view(torch.int32)
        rows = Routed(m.at.y, of.words, m.ones)
        combining = dispatched.sums(world, of, rows, of.words, of.words, m.at)
        alone = [step for step in of_experts(world, of, blank, m, made) if step.launch.kernel is row_sums]
        yield from (placing(world, of, blank, every, m.at.inbox.local, m.x, came) for came in (False, True))
        yield from (activating(world, of, blank, m.ones, w, m), *alone)
        yield dispatched.sends(world, of, dy, ids, m.at)
        yield dispatched.gemm_out(world, of, blank, m.x, w.w13, w.b13, m.both, of.words, sending=True)
        yield combining
        yield dispatched.gemm_out(world, of, blank, m.dboth, w.w13, None, m.at.y, of.words, back=True, sending=True)
        yield combining
        yield dispatched.gemm_out(world, of, blank, m.dy, w.w2, None, m.at.hidden, of.words, back=True, sending=True)
        for step in of_experts(world, of, blank, m, made):
            if step.launch.kernel is grouped_wgrad:
                yield from (combining, step)
        yield dispatched.last(world, of, rows, ids, None, made.x, m.at)
        yield taking(world, of, ids, made.weights, m)

    of.ahead((dy, x, ids, *w, *made, *kept), each)


# -- a pass ------------------------------------------------------------------------------------------------------------


def backward(
    world: World,
    layer: Layer,
    plan: Dispatched,
    dy: Tensor,
    operands: MoeOperands,
    kept: Kept,
    experts: bool,
) -> Gradients:
    """The gradients of `dispatched.run_dispatched` of these operands, on the current stream.

    Args:
        dy: [T, H], the gradient of out.
        kept: what that call kept; the same of it on all ranks.
        experts: whether the experts' gradients are wanted; the same on all ranks.

    Rounded to layer.dtype are: the rows of dy @ w2, the gradient before the activation, the activation (times the
    route's weight, for w2's gradient), a row's dx, and a rank's sum of these; all sums are in float32 and in a fixed
    order. Memory beside that of the forward pass: of all layers, a second inbox, and 2 (H + N) elements a row.
    Raises as the forward pass.
    """
    (x, ids, weights, *_), w = operands, operands.experts
    stream, side = world.current_stream(), dispatched.side_stream(world)
    world.order(lock(world, NAME), stream)
    of = dispatched.plan_state(world, layer, plan)
    m = memory(world, of, w.w13.shape[1])
    made = Gradients(world.empty(x.shape, x.dtype), world.empty(weights.shape, torch.float32))
    if experts:
        made = Gradients(*made[:2], *(None if t is None else world.empty(t.shape, t.dtype) for t in w))
    load(world, of, dy, x, ids, w, m, made, kept)
    start = world.record(stream)
    ids_all, weights_all = route_tables.share(world, ids, weights, layer.capacity)
    world.wait_event(side, start)
    if kept.rows is None:
        dispatched.sends(world, of, x, ids, replace(m.at, inbox=m.inbox)).on(side)
    dispatched.sends(world, of, dy, ids, m.at).on(side)
    tables = route_tables.tables(world, ids_all, of.local, layer.capacity, plan.tile.block_m, layer.max_rows)
    m = activated(world, of, tables, ids_all, w, m, kept)
    placing(world, of, tables, ids_all, m.at.inbox.local, m.dy, False).on(stream)
    gemm = dispatched.gemm_out(world, of, tables, m.dy, w.w2, None, m.at.hidden, m.uncounted, back=True, sending=True)
    gemm.on(stream)
    activating(world, of, tables, weights_all, w, m).on(stream)
    between = world.record(stream)
    counters = dispatched.waves(world, tables.targets)
    dispatched.gemm_out(world, of, tables, m.dboth, w.w13, None, m.at.y, counters, back=True, sending=True).on(stream)
    rows = Routed(m.at.y, tables.slots, m.ones)
    dispatched.combine(world, of, rows, tables.targets, counters, m.at, between)
    for step in of_experts(world, of, tables, m, made):
        step.on(stream)
    dispatched.total(world, of, rows, ids, None, made.x, m.at)
    taking(world, of, ids, made.weights, m).on(stream)
    return made


def activated(world: World, of: Prepared, tables: Tables, ids: Tensor, w: Weights, m: PassRows, kept: Kept) -> PassRows:
    """`m` with the rows of x, and what the activation is of, there: as it was kept, or made again."""
    stream = world.current_stream()
    inbox = m.inbox.local if kept.rows is None else kept.rows
    placing(world, of, tables, ids, inbox, m.x, kept.rows is not None).on(stream)
    if kept.both is not None:
        return replace(m, both=kept.both)
    dispatched.gemm_out(world, of, tables, m.x, w.w13, w.b13, m.both, m.uncounted, sending=True).on(stream)
    return m
