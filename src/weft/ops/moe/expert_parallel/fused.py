"""The plan that runs all of an MoE layer's experts in one launch on the current stream (fused_kernels.py). If the
plan's field `route` is set, the same launch runs the router (route_kernels.py)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....backends.barrier import compare
from ....kernel_launch import Ahead, BoundLaunch, Launch, Matrix
from ....lang.jit import constants
from ....plans import FusedMoe
from ....prepared import Run, made_once
from ....transport.memory import lock
from ....world import World
from ..call import NAME, Layer, MoeCall, MoeOperands, first_columns, layer_rows
from ..routing.route_tables import MAX_LOCAL_EXPERTS, power
from ..routing.router import gate_sizes
from .dispatched import (
    ELEMENTS_PER_THREAD,
    LayerWorkspace,
    layer_sizes,
    make_workspace,
    persistent_options,
    scratch,
    tables_of,
)
from .dispatched import unsupported as dispatched_unsupported
from .fused_kernels import STAMPS, LayerMemory, LayerOperands, LayerSizes, moe_layer
from .route_kernels import RouterSizes, RouterTensors

LOGITS_ROWS, LOGITS_COLS = 64, 64  # limits of a tile of logits, so that few tokens occupy many programs


def unsupported(world: World, layer: Layer, plan: FusedMoe) -> str | None:
    """Return the reason, the same on every rank, why the plan cannot serve the call, or None if it can."""
    programs = world.sm_count * plan.per_sm
    if plan.copy_programs > programs:
        return f"{plan.copy_programs} programs that move rows are more than there are, {programs}"
    if layer.experts // world.size > MAX_LOCAL_EXPERTS:
        return f"{layer.experts} experts over {world.size} ranks are more than {MAX_LOCAL_EXPERTS} on each"
    return dispatched_unsupported(world, layer, plan)


def layer_sizes_of(world: World, call: MoeCall, plan: FusedMoe) -> LayerSizes:
    """Return the kernel's sizes, including the router's sizes if the call includes the router."""
    layer, tile, options = call.layer, plan.tile, call.router
    elements, p = 32 * tile.warps * ELEMENTS_PER_THREAD, power(layer.hidden)
    cols = min(p, elements // 2)
    blocks = dict(SEND_ROWS=max(1, min(plan.copy_rows, elements // p)), STAGES=plan.copy_stages)
    blocks |= dict(SUM_ROWS=min(plan.copy_rows, elements // 2 // cols), COLS=cols)
    sizes = layer_sizes(world, layer, tile, GROUP_M=tile.group_m, **blocks)
    if options is None:
        return sizes
    router = constants(
        RouterSizes,
        ROWS=min(tile.block_m, LOGITS_ROWS),
        COLS=min(tile.block_n, LOGITS_COLS),
        BK=tile.block_k,
        EVEN_K=layer.hidden % tile.block_k == 0,
        SCALE=options.scale,
        gate=gate_sizes(layer.experts, layer.k, options, warps=tile.warps),
    )
    return sizes._replace(router=router)


def layer_memory(
    world: World, layer: Layer, plan: FusedMoe, workspace: LayerWorkspace, timed: bool, number: int | None
) -> LayerMemory:
    """Return the kernel's memory. All further arguments are as in `layer_launch`. The call is collective the first
    time."""
    builder, tables, counters = tables_of(world, layer, plan.tile.block_m)
    routes, programs = builder.routes, world.sm_count * plan.per_sm
    shapes = (2, builder.rows // plan.tile.block_m), (1,), (4 if plan.route else 2,)
    done, epoch, barrier_arrivals = world.cached(
        (NAME, layer, plan), lambda: tuple(world.zeros(shape, torch.int32) for shape in shapes)
    )
    memory = LayerMemory(
        workspace.inbox.local,
        workspace.inbox.addresses,
        workspace.outbox.local,
        workspace.outbox.addresses,
        workspace.y,
        routes.shared_ids.local,
        routes.shared_ids.addresses,
        routes.shared_weights.local,
        routes.shared_weights.addresses,
        tables.route_rows,
        builder.counts,
        tables,
        builder.rows,
        barrier_arrivals,
        counters,
        done,
        done.shape[1],
        plan.copy_programs,
        epoch,
        routes.left_out,
        stamped(world, programs) if timed else None,
    )
    if number is None:
        return memory
    if layer.max_rows is None:  # a router chooses distinct experts, so there is room for all rows
        memory = memory._replace(left_out=None)
    logits = scratch(world, "logits", layer.max_tokens_per_rank, layer.experts, layer.dtype)
    # The kernel loads the number, because Triton would compile a separate kernel for some values.
    word = world.cached((NAME, "number", number), lambda: world.tensor([number], torch.int32))
    return memory._replace(logits=logits, calls=world.calls(NAME), number=word)


def layer_launch(
    world: World, call: MoeCall, plan: FusedMoe, workspace: LayerWorkspace, timed: bool, number: int | None
) -> Launch:
    """Return the launch of the layer. timed: whether `stamped` was called. number: the number of the call if this
    launch includes the router, otherwise None."""
    layer, h, i, n = call.layer, call.layer.hidden, call.layer.inner, first_columns(world, call.layer)
    bm, bn, bk = plan.tile.block_m, plan.tile.block_n, plan.tile.block_k
    sizes, local_experts, copies = layer_sizes_of(world, call, plan), layer.experts // world.size, plan.copy_programs
    builder, *_ = tables_of(world, layer, bm)
    return Launch(
        world,
        moe_layer,
        world.sm_count * plan.per_sm,
        persistent_options(plan),
        memory=layer_memory(world, layer, plan, workspace, timed, number),
        w13_desc=Matrix(local_experts * n, h, (bn, bk)),
        w2_desc=Matrix(local_experts * h, i, (bn, bk)),
        hidden_in=Matrix(builder.rows, i, (bm, sizes.BLOCK.value)).argument(workspace.hidden),
        hidden_out=Matrix(builder.rows, i, (bm, bk)).argument(workspace.hidden),
        y_desc=Matrix(builder.rows, h, (bm, bn // 2)).argument(workspace.y),
        ch=world.channel(f"{NAME}, a layer by {copies} copy programs", 3 * world.size - 2, None, copies),
        T=call.own_tokens,
        max_tokens=layer.max_tokens_per_rank,
        N=n,
        H=h,
        K=i,
        s=sizes,
        table_sizes=builder.sizes,
    )


def stamped(world: World, programs: int) -> torch.Tensor:
    """Return int64 [programs, 6], the times of the programs, which are zero after the first call.

    After this call, launches of `programs` programs measure in ns how long each program spends, without waits, in
    sending tokens, GEMM 1, GEMM 2, sums for other ranks and sums of own tokens, and how long it runs in all, and add
    these times to the tensor. Launches that measure times use a separately compiled kernel.
    """
    key = (NAME, "stamps", programs)
    if key not in world.decided:
        world.decided[key] = world.zeros((programs, STAMPS.value), torch.int64)
    times: torch.Tensor = world.decided[key]
    return times


def prepare_fused(world: World, call: MoeCall, plan: FusedMoe) -> Run:
    """Prepare calls with the same results, bit by bit, as the plan Dispatched. The calls use the same memory except for
    the inbox. `out` may be shared, but not x. Before the layer, a small launch compares the ranks' calls; like a
    barrier, it needs a few us.

    If the call has a router, the layer's launch writes the operands ids and weights, and itself compares the calls. A
    run raises Unsupported if the plan's programs are not all resident at once.
    """
    has_router, holder, ahead = call.router is not None, lock(world, NAME), Ahead()
    if not has_router:  # separate counters, because only launches with a router count all barriers
        plan = replace(plan, route=False)
    layer, block_m = call.layer, plan.tile.block_m
    workspace = make_workspace(world, layer, layer_rows(world, layer, block_m), "inbox of one launch")
    _, tables, _ = tables_of(world, layer, block_m)
    launch_of = made_once(layer_launch, world, call, plan, workspace)
    stamps = (NAME, "stamps", world.sm_count * plan.per_sm)
    # The comparison is a separate launch. Inside the layer's kernel it would need more registers than are free (8 bytes
    # of spills on sm_90a).
    compare_calls = Launch(world, compare, 1, dict(num_warps=1), calls=world.calls(NAME))

    def run(operands: MoeOperands, out: torch.Tensor) -> tuple[torch.Tensor | None]:
        x, ids, weights, w13, w2, b13, b2, shared, _, weight, bias, choice_bias = operands
        router = None if weight is None else RouterTensors(weight, bias, choice_bias)
        received, stream, number = call.received(world, operands), world.current_stream(), world.number
        world.order(holder, stream)
        launch = launch_of(stamps in world.decided, number if has_router else None)
        layer_operands = LayerOperands(x, ids, weights, shared, out, b13, b2, router)
        launches = [BoundLaunch(launch, dict(operands=layer_operands, w13_desc=w13, w2_desc=w2))]
        if not has_router:
            launches.insert(0, BoundLaunch(compare_calls, dict(number=number)))
        ahead((*layer_operands[:-1], *(router or ()), w13, w2), lambda: launches)
        for launch, arguments in launches:
            launch(stream, **arguments)
        if received is not None:
            world.copy(received, tables.received, stream)
        return (received,)

    return run
