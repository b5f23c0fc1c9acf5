"""An MoE layer's experts for a few tokens: three launches on the current stream (few_kernels.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import torch
import triton.language as tl

from ...backends.base import SymmetricTensor
from ...lang.channel import BlockChannel
from ...operands import places
from ...plans import LowLatency
from ...transport.memory import descriptor, lock
from ...world import World
from . import routing
from .few_kernels import FewPlaces, few_gemm, few_sums
from .fused_kernels import LayerSizes
from .kernels import GELU
from .steps import ACTIVATIONS, ELEMENTS, NAME, Layer, Weights, power, space
from .steps import fits as fits_in_steps

ROUTES = 8192  # routes that every program looks through
LOOK = 8192  # pairs of a route and a row that are compared at a time
SMALL_LOW_LATENCY = LowLatency(block_n=32, block_k=32, warps=4, stages=2, movers=2, per_sm=1)


class Shared(NamedTuple):
    """What a call's three launches are given alike."""

    at: FewPlaces
    ch: BlockChannel
    T: int
    C: int
    s: LayerSizes


@dataclass(eq=False)
class Few:
    """What calls of one layer and plan have in common, besides the memory of all layers."""

    layer: Layer
    plan: LowLatency
    local: int
    programs: int
    movers: int
    ch: BlockChannel
    slots: torch.Tensor
    sizes: LayerSizes
    loaded: set[tuple[bool | None, ...]] = field(default_factory=set)


def default(world: World) -> LowLatency:
    return SMALL_LOW_LATENCY if world.scale.small else LowLatency()


def fits(world: World, layer: Layer, plan: LowLatency) -> str | None:
    """Why the plan cannot serve the call, the same on every rank; None where it can."""
    routes = world.size * layer.capacity * layer.k
    if routes > ROUTES:
        return f"{routes} routes, of {world.size} ranks with up to {layer.capacity} tokens, are more than {ROUTES}"
    block = world.scale.interleave
    if layer.activation != "gelu" and plan.block_n != 2 * block:
        return f"tiles of {plan.block_n} columns do not hold 1 block of {block} gate and up rows"
    return fits_in_steps(world, layer, plan)


def prepared(world: World, layer: Layer, plan: LowLatency) -> Few:
    """Collective the first time."""

    def make() -> Few:
        programs = world.sm_count * plan.per_sm
        movers, local = min(plan.movers, programs), layer.experts // world.size
        ch = world.channel(f"{NAME}, few rows and sums by {movers} programs", 2 * (world.size - 1), None, movers)
        slots = world.empty((world.size * layer.capacity * layer.k,), torch.int32)
        return Few(layer, plan, local, programs, movers, ch, slots, sizes(world, layer, plan))

    return world.cached((NAME, layer, plan), make)


def sizes(world: World, layer: Layer, plan: LowLatency) -> LayerSizes:
    """A block that is sent or summed is one row, or a part of it, so that many programs have some."""
    h, act, p = layer.hidden, ACTIVATIONS[layer.activation], power(layer.hidden)
    numbers = dict(
        H=h,
        P=p,
        K=layer.k,
        KP=power(layer.k),
        LOCAL=layer.experts // world.size,
        BM=plan.block_m,
        BN=plan.block_n,
        BK=plan.block_k,
        GROUP_M=1,
        WHOLE=h % plan.block_k == 0,
        ACT=act,
        GATED=0 if act == GELU.value else world.scale.interleave,
        SEND=1,
        STAGES=2,
        SUM=1,
        COLS=min(p, 32 * plan.warps * ELEMENTS // 4),
    )
    return LayerSizes(**{name: tl.constexpr(number) for name, number in numbers.items()})


def routes(world: World, layer: Layer) -> list[SymmetricTensor]:
    """Ids and weights [W, C, k] of all ranks. Collective the first time."""
    shape = (world.size, layer.capacity, layer.k)
    return world.cached(
        (NAME, "few", *shape),
        lambda: [world.symmetric(shape, dtype, f"{NAME}, few routes") for dtype in (torch.int32, torch.float32)],
    )


def memory(world: World, of: Few) -> FewPlaces:
    """Collective when it has to grow. Inbox and outbox are of all layers; ids and weights of those of one capacity and
    k, so that no rank's part of them is another's in the next call, which some ranks begin while others still sum."""
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
    )


def gemm(
    of: Few, given: Shared, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: Weights, first: bool
) -> dict[str, object]:
    plan, (matrix, bias) = of.plan, (w.w13, w.b13) if first else (w.w2, w.b2)
    local, n, k = matrix.shape
    return dict(
        given._asdict(),
        x=x,
        ids=ids,
        weights=weights,
        w_desc=descriptor(matrix, local * n, k, (plan.block_n, plan.block_k)),
        bias=matrix if bias is None else bias,
        N=n,
        K=k,
        INNER=of.layer.inner,
        FIRST=first,
        WHOLE=k % plan.block_k == 0,
        BIAS=bias is not None,
        ELP=max(32, power(of.local)),
        LOOK=LOOK // plan.block_m,
    )


def forward(
    world: World,
    layer: Layer,
    plan: LowLatency,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w: Weights,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    by: ModuleType = routing,
) -> None:
    """As `steps.forward`, in the same memory; without tables, so `by` does not count. out may hold shared, not x.

    Raises Unsupported where the plan's programs are not resident at once.
    """
    stream = world.current_stream()
    world.order(lock(world, NAME), stream)
    of = prepared(world, layer, plan)
    given = Shared(memory(world, of), of.ch, x.shape[0], layer.capacity, of.sizes)
    registers = min(255, 65536 // (32 * plan.warps * plan.per_sm) // 8 * 8)
    options = dict(num_warps=plan.warps, num_stages=plan.stages, maxnreg=registers, per_sm=plan.per_sm)
    memories = (given.at.inbox, given.at.outbox, given.at.ids, given.at.hidden, given.at.y)
    known = (few_gemm, of, x.shape[0], *places(x, ids, weights, *w, shared, out, *memories))

    def sums() -> dict[str, object]:
        last = out if shared is None else shared
        return dict(given._asdict(), ids=ids, shared=last, out=out, SHARED=shared is not None)

    steps = (
        (few_gemm, lambda: gemm(of, given, x, ids, weights, w, True)),
        (few_gemm, lambda: gemm(of, given, x, ids, weights, w, False)),
        (few_sums, sums),
    )
    variant = tuple(None if t is None else t.data_ptr() % 16 == 0 for t in (x, ids, weights, *w, shared, out))
    if variant not in of.loaded:  # before anything waits
        for kernel, args in steps:
            world.load(kernel, of.programs, args(), options)
        of.loaded.add(variant)
    for i, (kernel, args) in enumerate(steps):
        world.launch(kernel, of.programs, args, options, stream, (i, *known))


def count(world: World, layer: Layer, received: torch.Tensor) -> None:
    """How many rows came to each of this rank's experts in the call that was launched last, to `received`."""
    ids, _ = routes(world, layer)
    local, stream = layer.experts // world.size, world.current_stream()
    first = world.rank * local

    def fill() -> None:
        own = torch.arange(first, first + local, device=ids.local.device, dtype=torch.int32)
        received.copy_((ids.local.view(-1, 1) == own).sum(0))

    world.call(fill, [ids.local], [received], stream)
