"""The plan that runs an MoE layer's experts for few tokens, in three launches on the current stream
(low_latency_kernels.py)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton.language as tl

from ....kernel_launch import Ahead, BoundLaunch, Launch, Matrix, Moved, prepared
from ....plans import LowLatency
from ....prepared import Run
from ....tensor_checks import overlap
from ....transport.memory import lock
from ....world import World
from ..call import NAME, Layer, MoeCall, MoeOperands, first_columns
from ..routing.route_tables import power
from .dispatched import ELEMENTS_PER_THREAD, layer_sizes, make_workspace, persistent_options, scratch
from .dispatched import unsupported as dispatched_unsupported
from .low_latency_kernels import LowLatencyMemory, low_latency_gemm, low_latency_sums

MAX_ROUTES = 8192  # the largest number of routes that every program scans
SCAN_ELEMENTS = 8192  # the number of pairs of a route and a row that are compared at once


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


class LayerLaunches(NamedTuple):
    """The launches of one layer and plan. gemms: both GEMMs, with (True) and without (False) a tensor for the numbers
    of received rows in `memory`."""

    memory: LowLatencyMemory
    gemms: dict[bool, list[Launch]]
    sums: Launch


@prepared
def layer_launches(world: World, layer: Layer, plan: LowLatency) -> LayerLaunches:
    """Return the launches of this layer and plan. The call is collective when memory has to grow."""
    tile, h, programs = plan.tile, layer.hidden, world.sm_count * plan.per_sm
    copy_programs, local_experts = min(plan.copy_programs, programs), layer.experts // world.size
    other_ranks = world.size - 1  # a single rank has no other rank to notify
    name = f"{NAME}, low-latency rows and sums by {copy_programs} programs"
    ch = world.channel(name, 2 * other_ranks or 1, None, copy_programs if other_ranks else None)
    # A block that is sent or summed is one row or a part of it, so that many programs have work.
    cols = min(power(h), 32 * tile.warps * ELEMENTS_PER_THREAD // 4)
    sizes = layer_sizes(world, layer, tile, GROUP_M=1, SEND_ROWS=1, STAGES=2, SUM_ROWS=1, COLS=cols)
    memory, options = layer_memory(world, layer, plan, copy_programs), persistent_options(plan)
    common = dict(ch=ch, max_tokens=layer.max_tokens_per_rank, s=sizes)

    def gemm(n: int, k: int, is_first_gemm: bool, received: bool) -> Launch:
        return Launch(
            world,
            low_latency_gemm,
            programs,
            options,
            **common,
            **({} if received else dict(memory=memory)),
            w_desc=Matrix(local_experts * n, k, (tile.block_n, tile.block_k)),
            N=n,
            K=k,
            FIRST_GEMM=is_first_gemm,
            EVEN_K=k % tile.block_k == 0,
            ELP=max(32, power(local_experts)),
        )

    products = (first_columns(world, layer), h, True), (h, layer.inner, False)
    gemms = {received: [gemm(*product, received) for product in products] for received in (False, True)}
    return LayerLaunches(memory, gemms, Launch(world, low_latency_sums, programs, options, **common, memory=memory))


def layer_memory(world: World, layer: Layer, plan: LowLatency, copy_programs: int) -> LowLatencyMemory:
    """Return the memory of the kernels. The call is collective when it has to grow.

    All layers share the inbox and outbox. Only layers with the same max_tokens_per_rank and k share ids and weights.
    Some ranks begin the next call while others still compute sums; with equal sizes, the part of one rank never
    overlaps another rank's part.
    """
    shape = (world.size, layer.max_tokens_per_rank, layer.k)
    name, dtypes, routes = f"{NAME}, low-latency routes", (torch.int32, torch.float32), math.prod(shape)
    ids, weights = world.cached((name, *shape), lambda: [world.symmetric(shape, dtype, name) for dtype in dtypes])
    workspace = make_workspace(world, layer, routes)
    return LowLatencyMemory(
        workspace.inbox.local,
        workspace.inbox.addresses,
        workspace.outbox.local,
        workspace.outbox.addresses,
        ids.local,
        ids.addresses,
        weights.local,
        weights.addresses,
        scratch(world, "route rows", routes, 1, torch.int32),
        workspace.hidden,
        workspace.y,
        copy_programs,
        None,
        world.calls(NAME),
        tl.constexpr(SCAN_ELEMENTS // plan.tile.block_m),
    )


def prepare_low_latency(world: World, call: MoeCall, plan: LowLatency) -> Run:
    """Prepare calls that compute the same result as the plan Dispatched in the same memory, but without tables. `out`
    may be shared, but not x.

    A run raises Unsupported if the plan's programs are not all resident at once.
    """
    layer, holder, ahead = call.layer, lock(world, NAME), Ahead()
    fixed_memory, gemms, sums = layer_launches(world, layer, plan)

    def run(operands: MoeOperands, out: torch.Tensor) -> tuple[torch.Tensor | None]:
        (x, ids, weights, w13, w2, b13, b2, shared, *_), stream = operands, world.current_stream()
        received = call.received(world, operands)
        counts = received
        if received is not None and overlap(received, *operands[:8]):
            # Some programs write the numbers of received rows while others still read operands.
            counts = world.empty(received.shape, torch.int32)
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
        ahead((*operands[:8], out, counts), lambda: launches)
        for launch, arguments in launches:
            launch(stream, **arguments)
        if received is not None and counts is not None and counts is not received:
            world.copy(received, counts, stream)
        return (received,)

    return run
