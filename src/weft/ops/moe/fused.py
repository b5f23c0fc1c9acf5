"""The whole of an MoE layer's experts in one launch (fused_kernels.py), behind the three that share ids and weights and
make the tables (routing.py). All on the current stream."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from types import ModuleType

import torch

from ...lang.channel import BlockChannel
from ...operands import places
from ...plans import SMALL, Fused
from ...transport.memory import descriptor, lock
from ...world import World
from . import routing
from .fused_kernels import STAMPS, ExpertsAt, LayerPlaces, LayerSizes, moe_layer
from .routing import Tables
from .steps import (
    ELEMENTS,
    NAME,
    Launch,
    Layer,
    Space,
    Weights,
    filling,
    launch,
    layer_sizes,
    load_once,
    power,
    rows_of,
    space,
    waves,
)
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
    loaded: set[Hashable] = field(default_factory=set)


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
    elements, p = 32 * plan.warps * ELEMENTS, power(layer.hidden)
    cols = min(p, elements // 2)
    blocks = dict(SEND=max(1, min(plan.pull_rows, elements // p)), STAGES=plan.pull_stages)
    blocks |= dict(SUM=min(plan.pull_rows, elements // 2 // cols), COLS=cols)
    return layer_sizes(world, layer, plan, GROUP_M=plan.group_m, **blocks)


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
    by = ExpertsAt(
        descriptor(w.w13, of.local * n, h, (bn, bk)),
        descriptor(w.w2, of.local * h, i, (bn, bk)),
        descriptor(at.hidden, of.rows, i, (bm, of.sizes.GATED.value or bn // 2)),
        descriptor(at.hidden, of.rows, i, (bm, bk)),
        descriptor(at.y, of.rows, h, (bm, bn // 2)),
        w.b13,
        w.b2,
    )
    return dict(
        x=x,
        ids=ids,
        shared=shared,
        out=out,
        at=where,
        by=by,
        ch=of.ch,
        T=x.shape[0],
        C=layer.capacity,
        N=n,
        H=h,
        K=i,
        s=of.sizes,
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
    stamps = world.decided.get((NAME, "stamps", of.programs))
    known = (stamps, x, ids, *w, shared, out)

    def step(weights_all: torch.Tensor, tables: Tables, counters: torch.Tensor) -> Launch:
        memories = (weights_all, tables.tiles, counters, at.inbox.local, at.outbox.local, at.hidden, at.y)

        def args() -> dict[str, object]:
            return arguments(of, x, ids, weights_all, w, shared, tables, counters, stamps, out, at)

        key = (moe_layer, of, x.shape[0], *places(*known, *memories))
        return Launch(moe_layer, of.programs, args, filling(plan), key)

    load_once(world, of.loaded, known, lambda: [step(of.floats, Tables(*[of.words] * 8), of.words)])
    ids_all, weights_all = by.share(world, ids, weights, layer.capacity)
    tables = by.tables(world, ids_all, of.local, layer.capacity, plan.block_m, layer.max_rows)
    launch(world, step(weights_all, tables, waves(world, tables.targets)), stream)
    return tables
