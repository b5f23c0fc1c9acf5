"""The plan that runs an MoE layer's experts for few tokens, in three launches on the current stream
(low_latency_kernels.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton.language as tl

from ....backends.base import SymmetricTensor
from ....kernel_launch import Ahead, BoundLaunch, Launch, Matrix, Moved, prepared
from ....lang.channel import BlockChannel
from ....plans import LowLatency
from ....prepared import Run
from ....tensor_checks import overlap
from ....transport.memory import lock
from ....world import World
from ..call import NAME, Layer, MoeCall, MoeOperands, first_columns
from ..routing.route_tables import power
from .dispatched import ELEMENTS_PER_THREAD, layer_sizes, make_workspace, persistent_options
from .dispatched import unsupported as dispatched_unsupported
from .fused_kernels import LayerSizes
from .low_latency_kernels import LowLatencyMemory, low_latency_gemm, low_latency_sums

MAX_ROUTES = 8192  # the most routes that every program scans
SCAN_ELEMENTS = 8192  # pairs of a route and a row that are compared at once


@dataclass(eq=False)
class LowLatencyState:
    """The state that calls of one layer and plan share, besides the memory of all layers."""

    layer: Layer
    plan: LowLatency
    local_experts: int
    programs: int
    copy_programs: int
    ch: BlockChannel
    calls: BlockChannel
    route_rows: torch.Tensor
    sizes: LayerSizes
    ahead: Ahead = field(default_factory=Ahead)


def unsupported(world: World, layer: Layer, plan: LowLatency) -> str | None:
    """Return the reason, the same on every rank, why the plan cannot serve the call, or None if it can."""
    routes = world.size * layer.max_tokens_per_rank * layer.k
    if routes > MAX_ROUTES:
        tokens = f"{world.size} ranks with up to {layer.max_tokens_per_rank} tokens"
        return f"{routes} routes, of {tokens}, are more than {MAX_ROUTES}"
    block = world.backend.scale.interleave
    if layer.activation != "gelu" and plan.tile.block_n != 2 * block:
        return f"tiles of {plan.tile.block_n} columns do not hold 1 block of {block} gate and up rows"
    return dispatched_unsupported(world, layer, plan)


def plan_state(world: World, layer: Layer, plan: LowLatency) -> LowLatencyState:
    """Return the state of this layer and plan. The call is collective the first time."""

    def make() -> LowLatencyState:
        programs = world.sm_count * plan.per_sm
        copy_programs, local_experts = min(plan.copy_programs, programs), layer.experts // world.size
        other_ranks = world.size - 1  # a single rank signals no rank
        name = f"{NAME}, low-latency rows and sums by {copy_programs} programs"
        ch = world.channel(name, 2 * other_ranks or 1, None, copy_programs if other_ranks else None)
        route_rows = world.empty((world.size * layer.max_tokens_per_rank * layer.k,), torch.int32)
        return LowLatencyState(
            layer,
            plan,
            local_experts,
            programs,
            copy_programs,
            ch,
            world.calls(NAME),
            route_rows,
            sizes(world, layer, plan),
        )

    return world.cached((NAME, layer, plan), make)


def sizes(world: World, layer: Layer, plan: LowLatency) -> LayerSizes:
    """Return the kernels' sizes. A block that is sent or summed is one row or a part of it, so that many programs have
    work."""
    cols = min(power(layer.hidden), 32 * plan.tile.warps * ELEMENTS_PER_THREAD // 4)
    return layer_sizes(world, layer, plan.tile, GROUP_M=1, SEND_ROWS=1, STAGES=2, SUM_ROWS=1, COLS=cols)


def route_memory(world: World, layer: Layer) -> list[SymmetricTensor]:
    """Return the ids and weights [W, max_tokens, k] of all ranks. The call is collective the first time."""
    shape = (world.size, layer.max_tokens_per_rank, layer.k)
    name, dtypes = f"{NAME}, low-latency routes", (torch.int32, torch.float32)
    return world.cached((name, *shape), lambda: [world.symmetric(shape, dtype, name) for dtype in dtypes])


@prepared
def memory(world: World, state: LowLatencyState) -> LowLatencyMemory:
    """Return the memory of the kernels. The call is collective when it has to grow.

    All layers share the inbox and outbox. Only layers with one max_tokens_per_rank and k share ids and weights, so that
    the part of one rank does not overlap another rank's part in the next call, which some ranks begin while others
    still sum.
    """
    workspace = make_workspace(world, state.layer, state.route_rows.numel())
    ids, weights = route_memory(world, state.layer)
    return LowLatencyMemory(
        workspace.inbox.local,
        workspace.inbox.addresses,
        workspace.outbox.local,
        workspace.outbox.addresses,
        ids.local,
        ids.addresses,
        weights.local,
        weights.addresses,
        state.route_rows,
        workspace.hidden,
        workspace.y,
        state.copy_programs,
        None,
        state.calls,
        tl.constexpr(SCAN_ELEMENTS // state.plan.tile.block_m),
    )


@prepared
def _gemm(world: World, state: LowLatencyState, n: int, k: int, is_first_gemm: bool, received: bool) -> Launch:
    """Return the launch of one GEMM. received: each call says in `memory` where to write the numbers of received
    rows."""
    plan = state.plan
    fixed_arguments: dict[str, object] = {} if received else dict(memory=memory(world, state))
    return Launch(
        world,
        low_latency_gemm,
        state.programs,
        persistent_options(plan),
        **fixed_arguments,
        ch=state.ch,
        max_tokens=state.layer.max_tokens_per_rank,
        s=state.sizes,
        w_desc=Matrix(state.local_experts * n, k, (plan.tile.block_n, plan.tile.block_k)),
        N=n,
        K=k,
        FIRST_GEMM=is_first_gemm,
        EVEN_K=k % plan.tile.block_k == 0,
        ELP=max(32, power(state.local_experts)),
    )


@prepared
def _sums(world: World, state: LowLatencyState) -> Launch:
    sizes = dict(max_tokens=state.layer.max_tokens_per_rank, s=state.sizes)
    return Launch(
        world,
        low_latency_sums,
        state.programs,
        persistent_options(state.plan),
        ch=state.ch,
        memory=memory(world, state),
        **sizes,
    )


def prepare_low_latency(world: World, call: MoeCall, plan: LowLatency) -> Run:
    """Prepare calls that compute what plan Dispatched does, in the same memory, but without tables. `out` may be
    shared, not x.

    A run raises Unsupported if the plan's programs are not all resident at once.
    """
    layer, holder, state = call.layer, lock(world, NAME), plan_state(world, call.layer, plan)
    fixed_memory, sums = memory(world, state), _sums(world, state)
    sizes = (first_columns(world, layer), layer.hidden, True), (layer.hidden, layer.inner, False)
    gemms = {received: [_gemm(world, state, *size, received) for size in sizes] for received in (False, True)}

    def run(operands: MoeOperands, out: torch.Tensor) -> tuple[torch.Tensor | None]:
        (x, ids, weights, w13, w2, b13, b2, shared, _), stream = operands, world.current_stream()
        received = call.received(world, operands)
        # Some programs write the numbers of received rows while others still read operands.
        write_apart = received is not None and overlap(received, *operands[:-1])
        counts = world.empty((state.local_experts,), torch.int32) if write_apart else received
        world.order(holder, stream)
        moving: dict[str, Moved] = dict(x=x, ids=ids, weights=weights, T=x.shape[0], number=world.number)
        if counts is not None:
            moving["memory"] = fixed_memory._replace(received=counts)
        gemm_in, gemm_out = gemms[counts is not None]
        launches = (
            BoundLaunch(gemm_in, dict(moving, w_desc=w13, bias=b13)),
            BoundLaunch(gemm_out, dict(moving, w_desc=w2, bias=b2)),
            BoundLaunch(sums, dict(ids=ids, shared=shared, out=out, T=x.shape[0])),
        )
        state.ahead((*operands[:-1], out, counts), lambda: launches)
        for launch, arguments in launches:
            launch(stream, **arguments)
        if received is not None and counts is not None and write_apart:
            world.copy(received, counts, stream)
        return (received,)

    return run
