"""The launches of an MoE layer's backward pass. backward_kernels.py describes their order.

    side stream  | dispatch x, dy                         |                  | combine                       |
    main stream  | share, tables | x rows @ w13 | dy rows | @ w2, activation | @ w13 | sums over rows: dw13, .. | sum

The rows are in the same order as in the forward pass, because the tables are built again from the same ids. Tensors
that the forward pass saved (`call.Kept`) are neither sent nor computed again. If it saved the activation's input, the
rows of x are placed on the side stream, during @ w2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....backends.base import SymmetricTensor
from ....kernel_launch import BoundLaunch, Launch, Matrices, Matrix, Moved, prepared
from ....lang.jit import constants
from ....plans import Dispatched
from ....transport.memory import lock
from ....world import World
from ..activations import GELU
from ..call import ACTIVATIONS, NAME, Kept, Layer, MoeOperands, Weights
from ..routing import route_tables
from ..routing.route_tables import Tables
from . import dispatched
from .backward_kernels import IDENTITY, GradientSizes, activation_gradient, grouped_wgrad, row_sums, take_gradients
from .dispatched import COMBINE_REGISTERS, DispatchedState, GroupedProduct, LayerWorkspace, scratch
from .kernels import RoutedRows
from .place_rows import order_of, place_rows_launch


class Gradients(NamedTuple):
    """The gradients of a layer's operands. x is [T, H], and weights is float32 [T, k]. The experts' gradients have the
    shapes of the experts' tensors. A gradient that the caller does not need is None."""

    x: Tensor
    weights: Tensor
    w13: Tensor | None = None
    w2: Tensor | None = None
    b13: Tensor | None = None
    b2: Tensor | None = None


@dataclass(eq=False)
class BackwardMemory:
    """The memory that a backward pass uses.

    x, dy: rows [rows, H]. preactivation, dpreactivation: the input of the activation and its gradient [rows, N].
    row_weights: float32 [rows], the weight of each row. workspace: as in the forward pass, with hidden [rows, I] and y
    [rows, H]. x_inbox: a second inbox, to which x is sent again. dweights_inbox: float32 [max_tokens, k], the gradients
    of this rank's routing weights, which other ranks write.
    """

    x: Tensor
    dy: Tensor
    preactivation: Tensor
    dpreactivation: Tensor
    row_weights: Tensor
    workspace: LayerWorkspace
    x_inbox: SymmetricTensor
    dweights_inbox: SymmetricTensor


def backward_memory(world: World, state: DispatchedState, n: int) -> BackwardMemory:
    """Return the memory of a backward pass. All layers share this memory, except for the parts that depend on
    max_tokens_per_rank and k. The call is collective when the memory has to grow."""
    layer, rows = state.layer, state.rows
    shape, name = (layer.max_tokens_per_rank, layer.k), f"{NAME} gradients of weights"

    def rows_scratch(name: str, cols: int, dtype: torch.dtype = layer.dtype) -> Tensor:
        return scratch(world, name, rows, cols, dtype)

    return BackwardMemory(
        x=rows_scratch("rows of x", layer.hidden),
        dy=rows_scratch("rows of dy", layer.hidden),
        preactivation=rows_scratch("preactivation", n),
        dpreactivation=rows_scratch("dpreactivation", n),
        row_weights=rows_scratch("weights of rows", 1, torch.float32),
        workspace=dispatched.make_workspace(world, layer, rows),
        x_inbox=dispatched.token_memory(world, layer, f"{NAME} inbox of x"),
        dweights_inbox=world.cached((name, *shape), lambda: world.symmetric(shape, torch.float32, name)),
    )


def unit_weights(world: World, layer: Layer) -> Tensor:
    """Return routing weights of 1, float32 [W max_tokens k]."""
    size = world.size * layer.max_tokens_per_rank * layer.k
    return world.cached((NAME, "unit weights", size), lambda: world.tensor([1] * size, torch.float32))


def unused_counters(world: World) -> Tensor:
    """Return counters for which no program waits."""
    return world.cached((NAME, "unused counters"), lambda: world.zeros((32,), torch.int32))


# -- the launches ------------------------------------------------------------------------------------------------------


def activation_gradient_launch(
    world: World, state: DispatchedState, tables: Tables, weights: Tensor, w: Weights, memory: BackwardMemory
) -> BoundLaunch:
    """Return the launch of `activation_gradient`. weights: float32 [W, max_tokens, k]."""
    activation, columns = ACTIVATIONS[state.layer.activation], w.w13.shape[1]
    moving: dict[str, Moved] = dict(
        preactivation=memory.preactivation,
        hidden=memory.workspace.hidden,
        out=memory.dpreactivation,
        dy=memory.dy,
        bias=w.w2 if w.b2 is None else w.b2,
        row_weights=memory.row_weights,
        tables=tables,
        weights=weights,
        dweights_inbox=memory.dweights_inbox.addresses,
    )
    return BoundLaunch(activation_launch(world, state, activation, columns, world.size, w.b2 is not None), moving)


def gradient_sizes(world: World, state: DispatchedState, activation: int, ranks: int) -> GradientSizes:
    """Return the sizes of the gradient kernels. ranks: the number of ranks that receive gradients of routing weights; 0
    if only this rank needs them."""
    rows, cols = world.backend.scale.gradient_block
    return constants(
        GradientSizes,
        W=ranks,
        K=state.layer.k,
        BM=state.plan.tile.block_m,
        ROWS=rows,
        COLS=cols,
        ACT=activation,
        GATE_BLOCK=0 if activation in (GELU.value, IDENTITY.value) else world.backend.scale.interleave,
    )


def between_gemms(world: World) -> tuple[int, dict[str, int]]:
    """Return the number of programs and the options of a launch that runs between two GEMMs. The launch has as many
    programs as fit on the GPU."""
    return world.sm_count * world.backend.scale.programs_between_gemms, dict(num_warps=4, maxnreg=96, co_resident=True)


@prepared
def activation_launch(
    world: World, state: DispatchedState, activation: int, columns: int, ranks: int, bias: bool
) -> Launch:
    """Return the launch of `activation_gradient`. columns: N, the columns of the activation's input. ranks: as in
    `gradient_sizes`. bias: whether the second matrix has a bias."""
    programs, options = between_gemms(world)
    return Launch(
        world,
        activation_gradient,
        programs,
        options,
        max_tokens=state.layer.max_tokens_per_rank,
        N=columns,
        H=state.layer.hidden,
        inner=state.layer.inner,
        s=gradient_sizes(world, state, activation, ranks),
        BIAS=bias,
    )


@prepared
def _wgrad(world: World, state: DispatchedState, m: int, n: int) -> Launch:
    plan = state.plan
    bm, bn, bk = plan.tile.block_m, plan.tile.block_n, min(plan.tile.block_k, plan.tile.block_m)
    return Launch(
        world,
        grouped_wgrad,
        state.gemm_programs(world),
        state.gemm(COMBINE_REGISTERS, bn // 2, with_dispatch=True),
        a_desc=Matrix(state.rows, m, (bk, bm)),
        b_desc=Matrix(state.rows, n, (bk, bn)),
        out_desc=Matrices(state.local_experts, m, n, (bm, bn // 2)),
        M=m,
        N=n,
        EL=state.local_experts,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP_M=plan.tile.group_m,
        FLATTEN=plan.flatten,
    )


@prepared
def _row_sums(world: World, state: DispatchedState, n: int, weighted: bool) -> Launch:
    block, cols = world.backend.scale.sum_block
    sizes = dict(N=n, EL=state.local_experts, ROWS=block, COLS=cols, WEIGHTED=weighted)
    return Launch(world, row_sums, world.sm_count, dict(num_warps=4, co_resident=True), **sizes)


@prepared
def _take_gradients(world: World, experts: int, count: int) -> Launch:
    block = world.backend.scale.routes
    programs = min(world.sm_count, max(1, -(-count // block)))
    return Launch(world, take_gradients, programs, dict(num_warps=4), num_routes=count, experts=experts, BLOCK=block)


def expert_gradient_launches(
    world: World,
    state: DispatchedState,
    tables: Tables,
    matrix: tuple[Tensor, Tensor, Tensor | None],
    bias: tuple[Tensor | None, Tensor | None],
) -> tuple[list[BoundLaunch], list[BoundLaunch]]:
    """Return two launches. The first computes a bias's gradient [El, M], the sums of each expert's rows of a, times the
    rows' weights if there are any. The second computes a matrix's gradient [El, M, N], a^T b over each expert's rows.
    matrix: a [rows, M], b [rows, N] and the gradient; bias: the rows' weights and the gradient. A gradient that is not
    wanted is None."""
    (a, b, dw), (row_weights, db), offsets = matrix, bias, tables.offsets
    bias_gradients, matrix_gradients = [], []
    if db is not None:
        launch = _row_sums(world, state, a.shape[1], row_weights is not None)
        row_weights = a if row_weights is None else row_weights
        bias_gradients.append(BoundLaunch(launch, dict(rows=a, row_weights=row_weights, offsets=offsets, out=db)))
    if dw is not None:
        launch = _wgrad(world, state, a.shape[1], b.shape[1])
        matrix_gradients.append(BoundLaunch(launch, dict(a_desc=a, b_desc=b, out_desc=dw, offsets=offsets)))
    return bias_gradients, matrix_gradients


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
    """Return the gradients of the operands of `dispatched.prepare_dispatched`, on the current stream.

    Args:
        world: the ranks.
        layer, plan: as in the forward call.
        dy: [T, H], the gradient of out.
        operands: as in the forward call.
        kept: the tensors that the forward call saved; the same fields on all ranks.
        experts: whether the experts' gradients are wanted; the same on all ranks.

    The following values are rounded to layer.dtype: the rows of dy @ w2, the gradient before the activation, the
    activation (times the route's weight, for w2's gradient), the dx of each row, and each rank's sum of dx. All sums
    are in float32 and in a fixed order. In addition to the memory of the forward pass, all layers share a second inbox
    and 2 (H + N) elements for each row. The function raises the errors of the forward pass.
    """
    (x, ids, weights, *_), w = operands, operands.experts
    stream, side = world.current_stream(), dispatched.side_stream(world)
    world.order(lock(world, NAME), stream)
    state = dispatched.plan_state(world, layer, plan)
    builder, tables, _ = dispatched.tables_of(world, layer, plan.tile.block_m)
    memory = backward_memory(world, state, w.w13.shape[1])
    gradients = Gradients(world.empty(x.shape, x.dtype), world.empty(weights.shape, torch.float32))
    if experts:
        gradients = Gradients(*gradients[:2], *(None if t is None else world.empty(t.shape, t.dtype) for t in w))
    launches = pass_launches(world, state, (dy, x, ids, w), memory, gradients, kept)
    state.ahead((dy, x, ids, *w, *gradients, *kept), lambda: launches.in_loading_order, "backward")
    start = world.record(stream)
    route_tables.share_routes(world, builder.routes, ids, weights)
    world.wait_event(side, start)
    if kept.rows is None:
        launches.send_x.on(side)
    launches.send_dy.on(side)
    route_tables.run_builder(world, builder, tables, builder.routes.shared_weights.local, is_backward=True)
    if kept.preactivation is None:
        launches.place_x.on(stream)
        launches.recompute.on(stream)
    launches.place_dy.on(stream)
    if kept.preactivation is not None:
        # Only the gradient of w13 needs these rows. Alone `place_rows` took 112 us. Beside the next GEMM it lengthens
        # that by 75 us (Qwen3-30B, 2 H200s, 2026-11).
        world.wait_event(side, world.record(stream))
        launches.place_x.on(side)
    placed = world.record(side)
    for step in (launches.gemm_hidden, launches.activation):
        step.on(stream)
    before_last_gemm = world.record(stream)
    launches.gemm_x.on(stream)
    world.wait_event(side, before_last_gemm)
    launches.combine.on(side)
    world.wait_event(stream, placed)
    for step in (*launches.matrix_gradients, *launches.bias_gradients):
        step.on(stream)
    world.wait_event(stream, world.record(side))  # as in `dispatched.prepare_dispatched`
    launches.final_sum.on(stream)
    launches.take_gradients.on(stream)
    return gradients


class PassLaunches(NamedTuple):
    """The launches of a pass, in the order of the diagram above. recompute: the first GEMM of the forward pass."""

    send_x: BoundLaunch
    send_dy: BoundLaunch
    place_x: BoundLaunch
    recompute: BoundLaunch
    place_dy: BoundLaunch
    gemm_hidden: BoundLaunch
    activation: BoundLaunch
    gemm_x: BoundLaunch
    combine: BoundLaunch
    bias_gradients: list[BoundLaunch]
    matrix_gradients: list[BoundLaunch]
    final_sum: BoundLaunch
    take_gradients: BoundLaunch

    @property
    def in_loading_order(self) -> Iterator[BoundLaunch]:
        """Yield the launches in such an order that each kernel that shares SMs with a GEMM immediately precedes this
        GEMM."""
        yield from (self.place_x, self.place_dy, self.activation, *self.bias_gradients, self.send_dy, self.recompute)
        for step in (self.gemm_x, self.gemm_hidden, *self.matrix_gradients):
            yield from (self.combine, step)
        yield from (self.final_sum, self.take_gradients)


def pass_launches(
    world: World,
    state: DispatchedState,
    operands: tuple[Tensor, Tensor, Tensor, Weights],
    memory: BackwardMemory,
    gradients: Gradients,
    kept: Kept,
) -> PassLaunches:
    """Return the launches of a pass. operands: dy, x, ids and the experts."""
    (dy, x, ids, w), space, layer = operands, memory.workspace, state.layer
    builder, tables, counters = dispatched.tables_of(world, layer, state.plan.tile.block_m)
    if kept.preactivation is not None:
        memory = replace(memory, preactivation=kept.preactivation)

    def gemm(a: Tensor, weight: Tensor, out: Tensor, counters: Tensor) -> BoundLaunch:
        return dispatched.grouped_gemm(world, state, tables, GroupedProduct(a, weight), out, counters, True, True)

    def place(inbox: Tensor, rows: Tensor, arrivals: int) -> BoundLaunch:
        return place_rows_launch(world, state, inbox, rows, order_of(tables, builder.routes.ids), arrivals)

    arrivals, unused = state.dispatch_programs, unused_counters(world)
    recomputed = GroupedProduct(memory.x, w.w13, w.b13)
    sent_x = dispatched.dispatch_launch(world, state, x, ids, replace(space, inbox=memory.x_inbox))
    rows = RoutedRows(space.y, tables.route_rows, unit_weights(world, layer))
    arrived: dict[str, Moved] = dict(dweights_inbox=memory.dweights_inbox.local, ids=ids, out=gradients.weights)
    b13, w13 = expert_gradient_launches(
        world, state, tables, (memory.dpreactivation, memory.x, gradients.w13), (None, gradients.b13)
    )
    b2, w2 = expert_gradient_launches(
        world, state, tables, (memory.dy, space.hidden, gradients.w2), (memory.row_weights, gradients.b2)
    )
    return PassLaunches(
        sent_x,
        dispatched.dispatch_launch(world, state, dy, ids, space),
        place(memory.x_inbox.local, memory.x, arrivals) if kept.rows is None else place(kept.rows, memory.x, 0),
        dispatched.grouped_gemm(world, state, tables, recomputed, memory.preactivation, unused, False, True),
        place(space.inbox.local, memory.dy, arrivals),
        gemm(memory.dy, w.w2, space.hidden, unused),
        activation_gradient_launch(world, state, tables, builder.routes.shared_weights.local, w, memory),
        gemm(memory.dpreactivation, w.w13, space.y, counters),
        dispatched.combine_launch(world, state, rows, tables.targets, counters, space),
        [*b13, *b2],
        [*w13, *w2],
        dispatched.final_sum_launch(world, state, rows, ids, None, gradients.x, space),
        BoundLaunch(_take_gradients(world, layer.experts, ids.numel()), arrived),
    )
