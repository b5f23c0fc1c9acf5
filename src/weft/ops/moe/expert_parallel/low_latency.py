"""An MoE layer's experts for a few tokens: three launches on the current stream (low_latency_kernels.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton.language as tl

from ....backends.base import SymmetricTensor
from ....kernel_launch import Ahead, GivenLaunch, Launch, Matrix, Moved, prepared
from ....lang.channel import BlockChannel
from ....plans import LowLatency, TileShape
from ....tensor_checks import overlap
from ....transport.memory import lock
from ....world import World
from ..call import NAME, Layer, MoeCall, MoeOperands
from ..routing.route_tables import power
from .dispatched import ELEMENTS, filling, layer_sizes, space
from .dispatched import fits as fits_in_steps
from .fused_kernels import LayerSizes
from .low_latency_kernels import FewPlaces, few_gemm, few_sums

ROUTES = 8192  # routes that every program looks through
LOOK = 8192  # pairs of a route and a row that are compared at a time
SMALL_LOW_LATENCY = LowLatency(
    tile=TileShape(block_m=16, block_n=32, block_k=32, warps=4, stages=2), copy_programs=2, per_sm=1
)


@dataclass(eq=False)
class Few:
    """What calls of one layer and plan have in common, besides the memory of all layers."""

    layer: Layer
    plan: LowLatency
    local: int
    programs: int
    movers: int
    ch: BlockChannel
    calls: BlockChannel
    slots: torch.Tensor
    sizes: LayerSizes
    ahead: Ahead = field(default_factory=Ahead)


def default(world: World) -> LowLatency:
    return SMALL_LOW_LATENCY if world.scale.small else LowLatency()


def fits(world: World, layer: Layer, plan: LowLatency) -> str | None:
    """Why the plan cannot serve the call, the same on every rank; None where it can."""
    routes = world.size * layer.capacity * layer.k
    if routes > ROUTES:
        return f"{routes} routes, of {world.size} ranks with up to {layer.capacity} tokens, are more than {ROUTES}"
    block = world.scale.interleave
    if layer.activation != "gelu" and plan.tile.block_n != 2 * block:
        return f"tiles of {plan.tile.block_n} columns do not hold 1 block of {block} gate and up rows"
    return fits_in_steps(world, layer, plan)


def plan_state(world: World, layer: Layer, plan: LowLatency) -> Few:
    """Return what calls of this layer and plan have in common. Collective the first time."""

    def make() -> Few:
        programs = world.sm_count * plan.per_sm
        movers, local = min(plan.copy_programs, programs), layer.experts // world.size
        others = world.size - 1  # a rank alone signals nothing
        name = f"{NAME}, few rows and sums by {movers} programs"
        ch = world.channel(name, 2 * others or 1, None, movers if others else None)
        slots = world.empty((world.size * layer.capacity * layer.k,), torch.int32)
        return Few(layer, plan, local, programs, movers, ch, world.calls(NAME), slots, sizes(world, layer, plan))

    return world.cached((NAME, layer, plan), make)


def sizes(world: World, layer: Layer, plan: LowLatency) -> LayerSizes:
    """A block that is sent or summed is one row, or a part of it, so that many programs have some."""
    cols = min(power(layer.hidden), 32 * plan.tile.warps * ELEMENTS // 4)
    return layer_sizes(world, layer, plan.tile, GROUP_M=1, SEND=1, STAGES=2, SUM=1, COLS=cols)


def routes(world: World, layer: Layer) -> list[SymmetricTensor]:
    """Return the ids and weights [W, C, k] of all ranks. Collective the first time."""
    shape = (world.size, layer.capacity, layer.k)
    return world.cached(
        (NAME, "few", *shape),
        lambda: [world.symmetric(shape, dtype, f"{NAME}, few routes") for dtype in (torch.int32, torch.float32)],
    )


@prepared
def memory(world: World, of: Few) -> FewPlaces:
    """Return the memory that the kernels use. Collective when it has to grow. Inbox and outbox are shared by all
    layers; ids and weights by those of one capacity and k, so that no rank's part of them is another's in the next
    call, which some ranks begin while others still sum."""
    box, (ids, weights) = space(world, of.layer, of.slots.numel()), routes(world, of.layer)
    return FewPlaces(
        box.inbox.local,
        box.inbox.addresses,
        box.outbox.local,
        box.outbox.addresses,
        ids.local,
        ids.addresses,
        weights.local,
        weights.addresses,
        of.slots,
        box.hidden,
        box.y,
        of.movers,
        None,
        of.calls,
        tl.constexpr(LOOK // of.plan.tile.block_m),
    )


@prepared
def _gemm(world: World, of: Few, n: int, k: int, first: bool, received: bool) -> Launch:
    """received: each call says where to write how many rows came, in `at`."""
    plan = of.plan
    fixed: dict[str, object] = {} if received else dict(at=memory(world, of))
    return Launch(
        world,
        few_gemm,
        of.programs,
        filling(plan),
        **fixed,
        ch=of.ch,
        C=of.layer.capacity,
        s=of.sizes,
        w_desc=Matrix(of.local * n, k, (plan.tile.block_n, plan.tile.block_k)),
        N=n,
        K=k,
        FIRST=first,
        WHOLE=k % plan.tile.block_k == 0,
        ELP=max(32, power(of.local)),
    )


@prepared
def _sums(world: World, of: Few) -> Launch:
    sizes = dict(C=of.layer.capacity, s=of.sizes)
    return Launch(world, few_sums, of.programs, filling(of.plan), ch=of.ch, at=memory(world, of), **sizes)


def run_low_latency(world: World, call: MoeCall, plan: LowLatency, operands: MoeOperands, out: torch.Tensor) -> None:
    """Run a call as `steps.run_dispatched` does, in the same memory, but without tables. `out` may hold shared, not x.

    Raises Unsupported where the plan's programs are not resident at once.
    """
    (x, ids, weights, w13, w2, b13, b2, shared, received), stream = operands, world.current_stream()
    # Some programs write the numbers of rows received while others still read operands.
    apart = received is not None and overlap(received, *operands[:-1])
    counts = world.empty((w13.shape[0],), torch.int32) if apart else received
    world.order(lock(world, NAME), stream)
    of, tokens = plan_state(world, call.layer, plan), x.shape[0]
    routed: dict[str, Moved] = dict(x=x, ids=ids, weights=weights, T=tokens, number=world.number)
    if counts is not None:
        routed["at"] = memory(world, of)._replace(received=counts)

    def gemm(matrix: torch.Tensor, bias: torch.Tensor | None, first: bool) -> GivenLaunch:
        _, n, k = matrix.shape
        launch = _gemm(world, of, n, k, first, counts is not None)
        return GivenLaunch(launch, dict(routed, w_desc=matrix, bias=bias))

    sums = GivenLaunch(_sums(world, of), dict(ids=ids, shared=shared, out=out, T=tokens))
    steps = gemm(w13, b13, True), gemm(w2, b2, False), sums
    of.ahead((*operands[:-1], out, counts), lambda: steps)
    for step in steps:
        step.on(stream)
    if received is not None and counts is not None and apart:
        world.copy(received, counts, stream)
