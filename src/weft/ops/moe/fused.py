"""The whole of an MoE layer's experts in one launch (fused_kernels.py), behind the three that share ids and weights and
make the tables (routing.py). All on the current stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch
import triton.language as tl

from ...lang.channel import BlockChannel
from ...operands import places
from ...plans import SMALL, Fused
from ...transport.memory import descriptor, lock
from ...world import World
from . import routing
from .fused_kernels import STAMPS, LayerPlaces, LayerSizes, moe_layer
from .kernels import GELU
from .routing import Tables
from .steps import ACTIVATIONS, ELEMENTS, NAME, Layer, Space, Weights, power, rows_of, space, waves
from .steps import fits as fits_in_steps

USUAL = Fused(pullers=64, block_n=128, warps=4, per_sm=2, pull_rows=8, pull_stages=4)


@dataclass(eq=False)
class Whole:
    """What calls of one layer and plan have in common, besides the memory and counters of all layers. done, turn: tiles
    of the first GEMM (fused_kernels.py)."""

    layer: Layer
    plan: Fused
    local: int
    rows: int
    programs: int
    ch: BlockChannel
    done: torch.Tensor
    turn: torch.Tensor
    sizes: LayerSizes
    words: torch.Tensor  # int32, stands for tables
    floats: torch.Tensor
    loaded: set[tuple[bool | None, ...]] = field(default_factory=set)


def default(world: World) -> Fused:
    return SMALL if world.scale.small else USUAL


def fits(world: World, layer: Layer, plan: Fused) -> str | None:
    """Why the plan cannot serve the call, the same on every rank; None where it can."""
    programs = world.sm_count * plan.per_sm
    if not 1 <= plan.pullers <= programs:
        return f"{plan.pullers} of {programs} programs move rows: at least one has to"
    return fits_in_steps(world, layer, plan)


def prepared(world: World, layer: Layer, plan: Fused) -> Whole:
    """Collective the first time."""

    def make() -> Whole:
        movers = plan.pullers
        ch = world.channel(f"{NAME}, rows and sums by {movers} programs", 2 * (world.size - 1), None, movers)
        rows = rows_of(world, layer, plan.block_m)
        done, turn = (world.zeros(shape, torch.int32) for shape in ((2, rows // plan.block_m), (1,)))
        words, floats = world.zeros((16,), torch.int32), world.zeros((16,), torch.float32)
        programs, local = world.sm_count * plan.per_sm, layer.experts // world.size
        return Whole(layer, plan, local, rows, programs, ch, done, turn, sizes(world, layer, plan), words, floats)

    return world.cached((NAME, layer, plan), make)


def sizes(world: World, layer: Layer, plan: Fused) -> LayerSizes:
    h, act = layer.hidden, ACTIVATIONS[layer.activation]
    elements, p = 32 * plan.warps * ELEMENTS, power(layer.hidden)
    cols = min(p, elements // 2)
    numbers = dict(
        H=h,
        P=p,
        K=layer.k,
        KP=power(layer.k),
        LOCAL=layer.experts // world.size,
        BM=plan.block_m,
        BN=plan.block_n,
        BK=plan.block_k,
        GROUP_M=plan.group_m,
        WHOLE=h % plan.block_k == 0,
        ACT=act,
        GATED=0 if act == GELU.value else world.scale.interleave,
        SEND=max(1, min(plan.pull_rows, elements // p)),
        STAGES=plan.pull_stages,
        SUM=min(plan.pull_rows, elements // 2 // cols),
        COLS=cols,
    )
    return LayerSizes(**{name: tl.constexpr(number) for name, number in numbers.items()})


def arguments(
    of: Whole,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights_all: torch.Tensor,
    w: Weights,
    shared: torch.Tensor | None,
    tables: Tables,
    counters: torch.Tensor,
    stamps: torch.Tensor | None,
    out: torch.Tensor,
    at: Space,
) -> dict[str, object]:
    layer, plan, (_, n, h), i = of.layer, of.plan, w.w13.shape, of.layer.inner
    bm, bn, bk = plan.block_m, plan.block_n, plan.block_k
    where = LayerPlaces(
        at.inbox.local,
        at.inbox.addresses,
        at.outbox.local,
        at.outbox.addresses,
        at.y,
        tables.slots,
        tables.sources,
        weights_all,
        tables.tiles,
        tables.listed,
        tables.targets,
        counters,
        of.done,
        of.done.shape[1],
        plan.pullers,
        of.turn,
        stamps,
    )
    return dict(
        x=x,
        ids=ids,
        shared=out if shared is None else shared,
        out=out,
        at=where,
        w13_desc=descriptor(w.w13, of.local * n, h, (bn, bk)),
        w2_desc=descriptor(w.w2, of.local * h, i, (bn, bk)),
        hidden_in=descriptor(at.hidden, of.rows, i, (bm, of.sizes.GATED.value or bn // 2)),
        hidden_out=descriptor(at.hidden, of.rows, i, (bm, bk)),
        y_desc=descriptor(at.y, of.rows, h, (bm, bn // 2)),
        bias13=w.w13 if w.b13 is None else w.b13,
        bias2=w.w2 if w.b2 is None else w.b2,
        ch=of.ch,
        T=x.shape[0],
        C=layer.capacity,
        N=n,
        H=h,
        K=i,
        s=of.sizes,
        BIAS13=w.b13 is not None,
        BIAS2=w.b2 is not None,
        SHARED=shared is not None,
    )


def stamped(world: World, programs: int) -> torch.Tensor:
    """int64 [programs, 6], zeros the first time. From then on calls of launches of so many programs add up in it how
    long each was at what, in ns, without its waits: sending tokens, GEMM 1, GEMM 2, sums for others, own sums; and how
    long it ran. Such a launch is another kernel, a little slower."""
    key = (NAME, "stamps", programs)
    if key not in world.decided:
        world.decided[key] = world.zeros((programs, STAMPS.value), torch.int64)
    made: torch.Tensor = world.decided[key]
    return made


def forward(
    world: World,
    layer: Layer,
    plan: Fused,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w: Weights,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    by: ModuleType = routing,
) -> Tables:
    """As `steps.forward`, to the same bits, and in the same memory but for the inbox. out may hold shared, not x.

    Raises Unsupported where the plan's programs are not resident at once.
    """
    stream = world.current_stream()
    world.order(lock(world, NAME), stream)
    of = prepared(world, layer, plan)
    at = space(world, layer, of.rows, "inbox of one launch")
    registers = min(255, 65536 // (32 * plan.warps * plan.per_sm) // 8 * 8)
    options = dict(num_warps=plan.warps, num_stages=plan.stages, maxnreg=registers, per_sm=plan.per_sm)
    stamps = world.decided.get((NAME, "stamps", of.programs))
    variant = tuple(None if t is None else t.data_ptr() % 16 == 0 for t in (stamps, x, ids, *w, shared, out))
    if variant not in of.loaded:  # before anything waits
        blank = Tables(*[of.words] * 8)
        args = arguments(of, x, ids, of.floats, w, shared, blank, of.words, stamps, out, at)
        world.load(moe_layer, of.programs, args, options)
        of.loaded.add(variant)
    ids_all, weights_all = by.share(world, ids, weights, layer.capacity)
    tables = by.tables(world, ids_all, of.local, layer.capacity, plan.block_m, layer.max_rows)
    counters = waves(world, tables.targets)
    memories = (weights_all, tables.tiles, counters, at.inbox.local, at.outbox.local, at.hidden, at.y)
    known = places(stamps, x, ids, *w, shared, out, *memories)
    world.launch(
        moe_layer,
        of.programs,
        lambda: arguments(of, x, ids, weights_all, w, shared, tables, counters, stamps, out, at),
        options,
        stream,
        (moe_layer, of, x.shape[0], *known),
    )
    return tables
