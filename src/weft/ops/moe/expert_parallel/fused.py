"""The plan that runs all of an MoE layer's experts in one launch (fused_kernels.py), on the current stream; with the
router in the same launch if the plan says `route` (route_kernels.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ....backends.barrier import compare
from ....kernel_launch import Ahead, BoundLaunch, Launch, Matrix, prepared
from ....lang.channel import BlockChannel
from ....lang.jit import constants
from ....plans import FusedMoe
from ....transport.memory import lock
from ....world import World
from ..call import NAME, Layer, MoeCall, MoeOperands, RouterOptions, first_columns
from ..routing import route_tables
from ..routing.route_tables import MAX_LOCAL_EXPERTS, TableBuilder, Tables, TableSizes, power
from ..routing.router import gate_sizes
from .dispatched import (
    ELEMENTS_PER_THREAD,
    LayerWorkspace,
    layer_sizes,
    make_workspace,
    persistent_options,
    scratch,
    step_counters,
)
from .dispatched import unsupported as dispatched_unsupported
from .fused_kernels import STAMPS, LayerMemory, LayerOperands, LayerSizes, moe_layer
from .route_kernels import RouterSizes, RouterTensors

LOGITS_ROWS, LOGITS_COLS = 64, 64  # of a tile of logits at most, small so that few tokens occupy many programs


@dataclass(eq=False)
class FusedState:
    """The state that calls of one layer and plan share, besides the memory and counters of all layers. done,
    epoch, barrier_arrivals: counters of finished tiles, calls and grid barriers (fused_kernels.py)."""

    layer: Layer
    plan: FusedMoe
    local_experts: int
    rows: int
    programs: int
    ch: BlockChannel
    calls: BlockChannel
    done: torch.Tensor
    epoch: torch.Tensor
    barrier_arrivals: torch.Tensor
    sizes: LayerSizes
    tables: Tables
    builder: TableBuilder
    ahead: Ahead = field(default_factory=Ahead)


def unsupported(world: World, layer: Layer, plan: FusedMoe) -> str | None:
    """Return the reason, the same on every rank, why the plan cannot serve the call, or None if it can."""
    programs = world.sm_count * plan.per_sm
    if plan.copy_programs > programs:
        return f"{plan.copy_programs} programs that move rows are more than there are, {programs}"
    if layer.experts // world.size > MAX_LOCAL_EXPERTS:
        return f"{layer.experts} experts over {world.size} ranks are more than {MAX_LOCAL_EXPERTS} on each"
    return dispatched_unsupported(world, layer, plan)


def plan_state(world: World, layer: Layer, plan: FusedMoe) -> FusedState:
    """Return the state of this layer and plan. The call is collective the first time."""

    def make() -> FusedState:
        copy_programs = plan.copy_programs
        ch = world.channel(f"{NAME}, a layer by {copy_programs} copy programs", 3 * world.size - 2, None, copy_programs)
        programs, local_experts = world.sm_count * plan.per_sm, layer.experts // world.size
        table_sizes = TableSizes(local_experts, layer.max_tokens_per_rank, plan.tile.block_m, layer.max_rows)
        builder, tables = route_tables.builder_of(world, layer.k, table_sizes)
        shapes = ((2, builder.rows // plan.tile.block_m), (1,), (4 if plan.route else 2,))
        done, epoch, barrier_arrivals = (world.zeros(shape, torch.int32) for shape in shapes)
        return FusedState(
            layer,
            plan,
            local_experts,
            builder.rows,
            programs,
            ch,
            world.calls(NAME),
            done,
            epoch,
            barrier_arrivals,
            sizes(world, layer, plan),
            tables,
            builder,
        )

    return world.cached((NAME, layer, plan), make)


def sizes(world: World, layer: Layer, plan: FusedMoe) -> LayerSizes:
    elements, p = 32 * plan.tile.warps * ELEMENTS_PER_THREAD, power(layer.hidden)
    cols = min(p, elements // 2)
    blocks = dict(SEND_ROWS=max(1, min(plan.copy_rows, elements // p)), STAGES=plan.copy_stages)
    blocks |= dict(SUM_ROWS=min(plan.copy_rows, elements // 2 // cols), COLS=cols)
    return layer_sizes(world, layer, plan.tile, GROUP_M=plan.tile.group_m, **blocks)


def router_sizes(layer: Layer, plan: FusedMoe, options: RouterOptions) -> RouterSizes:
    """Return the sizes of the router for that layer and plan."""
    tile = plan.tile
    return constants(
        RouterSizes,
        ROWS=min(tile.block_m, LOGITS_ROWS),
        COLS=min(tile.block_n, LOGITS_COLS),
        BK=tile.block_k,
        EVEN_K=layer.hidden % tile.block_k == 0,
        SCALE=options.scale,
        gate=gate_sizes(layer.experts, layer.k, options, warps=tile.warps),
    )


class RouterMemory(NamedTuple):
    """The last fields of `LayerMemory`."""

    logits: torch.Tensor
    calls: BlockChannel
    number: torch.Tensor


def router_memory(world: World, state: FusedState, number: int) -> RouterMemory:
    """Return the router's memory for the call of that number. A kernel loads the number, because Triton would compile a
    separate kernel for some values."""
    layer = state.layer
    logits = scratch(world, "logits", layer.max_tokens_per_rank, layer.experts, layer.dtype)
    word = world.cached((NAME, "number", number), lambda: world.tensor([number], torch.int32))
    return RouterMemory(logits, state.calls, word)


def layer_memory(
    state: FusedState,
    counters: torch.Tensor,
    stamps: torch.Tensor | None,
    workspace: LayerWorkspace,
    router: RouterMemory | None,
) -> LayerMemory:
    """Return the kernel's memory."""
    routes = state.builder.routes
    # A router's experts are distinct, so that there is room for all rows unless max_rows says otherwise.
    left_out = None if router is not None and state.layer.max_rows is None else routes.left_out
    return LayerMemory(
        workspace.inbox.local,
        workspace.inbox.addresses,
        workspace.outbox.local,
        workspace.outbox.addresses,
        workspace.y,
        routes.shared_ids.local,
        routes.shared_ids.addresses,
        routes.shared_weights.local,
        routes.shared_weights.addresses,
        state.tables.route_rows,
        state.builder.counts,
        state.tables,
        state.rows,
        state.barrier_arrivals,
        counters,
        state.done,
        state.done.shape[1],
        state.plan.copy_programs,
        state.epoch,
        left_out,
        stamps,
        *(router or ()),
    )


@prepared
def _layer(
    world: World,
    state: FusedState,
    workspace: LayerWorkspace,
    tokens: int,
    n: int,
    timed: bool,
    router: RouterOptions | None,
    number: int | None,
) -> Launch:
    """Return the launch of the layer. timed: whether `stamped` was called. router, number: the router in this launch,
    and the call's number, or None."""
    layer, plan, h, i = state.layer, state.plan, state.layer.hidden, state.layer.inner
    bm, bn, bk = plan.tile.block_m, plan.tile.block_n, plan.tile.block_k
    times = world.decided[NAME, "stamps", state.programs] if timed else None
    routing = None if number is None else router_memory(world, state, number)
    return Launch(
        world,
        moe_layer,
        state.programs,
        persistent_options(plan),
        memory=layer_memory(state, step_counters(world, state.tables.targets), times, workspace, routing),
        w13_desc=Matrix(state.local_experts * n, h, (bn, bk)),
        w2_desc=Matrix(state.local_experts * h, i, (bn, bk)),
        hidden_in=Matrix(state.rows, i, (bm, state.sizes.GATE_BLOCK.value or bn // 2)).argument(workspace.hidden),
        hidden_out=Matrix(state.rows, i, (bm, bk)).argument(workspace.hidden),
        y_desc=Matrix(state.rows, h, (bm, bn // 2)).argument(workspace.y),
        ch=state.ch,
        T=tokens,
        max_tokens=layer.max_tokens_per_rank,
        N=n,
        H=h,
        K=i,
        s=state.sizes if router is None else state.sizes._replace(router=router_sizes(layer, plan, router)),
        table_sizes=state.builder.sizes,
    )


@prepared
def _compare(world: World, state: FusedState) -> Launch:
    """Return the launch that compares the ranks' calls. It is separate because inside the layer's kernel it would need
    registers that are not free (8 bytes of spills on sm_90a)."""
    return Launch(world, compare, 1, dict(num_warps=1), calls=state.calls)


def stamped(world: World, programs: int) -> torch.Tensor:
    """Return int64 [programs, 6], which is zero the first time.

    From then on, launches of `programs` programs add to it the ns that each program spent, without waits, in sending
    tokens, GEMM 1, GEMM 2, sums for others and sums of own tokens, and its whole run time. Such launches compile to a
    separate kernel.
    """
    key = (NAME, "stamps", programs)
    if key not in world.decided:
        world.decided[key] = world.zeros((programs, STAMPS.value), torch.int64)
    times: torch.Tensor = world.decided[key]
    return times


def prepare_fused(world: World, call: MoeCall, plan: FusedMoe) -> Callable[..., tuple[torch.Tensor | None]]:
    """Prepare calls that compute what plan Dispatched does, with the same bits and in the same memory except for the
    inbox. `out` may be shared, not x. First a small launch compares the ranks' calls; it takes some us, as a barrier
    does.

    A run takes operands, out, and the router's tensors if the call has a router. Then the launch writes the operands
    ids and weights, and compares the calls itself. A run raises Unsupported if the plan's programs are not all resident
    at once.
    """
    layer, has_router, holder = call.layer, call.router is not None, lock(world, NAME)
    if not has_router:  # a state of its own, since only launches with a router count all barriers
        plan = replace(plan, route=False)
    state = plan_state(world, layer, plan)
    workspace = make_workspace(world, layer, state.rows, "inbox of one launch")
    n, compare_calls = first_columns(world, layer), _compare(world, state)

    def run(
        operands: MoeOperands, out: torch.Tensor, router: RouterTensors | None = None
    ) -> tuple[torch.Tensor | None]:
        x, ids, weights, w13, w2, b13, b2, shared, _ = operands
        received, stream, number = call.received(world, operands), world.current_stream(), world.number
        world.order(holder, stream)
        stamps = (NAME, "stamps", state.programs) in world.decided
        layer_operands = LayerOperands(x, ids, weights, shared, out, b13, b2, router)
        launch = _layer(world, state, workspace, x.shape[0], n, stamps, call.router, number if has_router else None)
        launches = [BoundLaunch(launch, dict(operands=layer_operands, w13_desc=w13, w2_desc=w2))]
        if not has_router:
            launches.insert(0, BoundLaunch(compare_calls, dict(number=number)))
        state.ahead((*layer_operands[:-1], *(router or ()), w13, w2), lambda: launches)
        for launch, arguments in launches:
            launch(stream, **arguments)
        if received is not None:
            world.copy(received, state.tables.received, stream)
        return (received,)

    return run
