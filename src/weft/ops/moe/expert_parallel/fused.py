"""The whole of an MoE layer's experts in one launch (fused_kernels.py), on the current stream."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ....kernel_launch import Ahead, GivenLaunch, Launch, Matrix, prepared
from ....lang.channel import BlockChannel
from ....plans import FusedMoe
from ....transport.barrier import compare
from ....transport.memory import lock
from ....world import World
from ..call import NAME, Layer, MoeCall, MoeOperands
from ..routing import route_tables
from ..routing.route_tables import EXPERTS, Filling, Tables, TableSizes, power
from .dispatched import ELEMENTS, Space, filling, layer_sizes, space, waves
from .dispatched import fits as fits_in_steps
from .fused_kernels import STAMPS, Given, LayerPlaces, LayerSizes, moe_layer


@dataclass(eq=False)
class Whole:
    """What calls of one layer and plan have in common, besides the memory and counters of all layers. done, turn, met:
    tiles of the first GEMM, and programs that met (fused_kernels.py)."""

    layer: Layer
    plan: FusedMoe
    local: int
    rows: int
    programs: int
    ch: BlockChannel
    calls: BlockChannel
    done: torch.Tensor
    turn: torch.Tensor
    met: torch.Tensor
    sizes: LayerSizes
    tables: Tables
    filling: Filling
    ahead: Ahead = field(default_factory=Ahead)


def fits(world: World, layer: Layer, plan: FusedMoe) -> str | None:
    """Why the plan cannot serve the call, the same on every rank; None where it can."""
    programs = world.sm_count * plan.per_sm
    if plan.copy_programs > programs:
        return f"{plan.copy_programs} programs that move rows are more than there are, {programs}"
    if layer.experts // world.size > EXPERTS:
        return f"{layer.experts} experts over {world.size} ranks are more than {EXPERTS} on each"
    return fits_in_steps(world, layer, plan)


def plan_state(world: World, layer: Layer, plan: FusedMoe) -> Whole:
    """Return what calls of this layer and plan have in common. Collective the first time."""

    def make() -> Whole:
        movers = plan.copy_programs
        ch = world.channel(f"{NAME}, a layer by {movers} movers", 3 * world.size - 2, None, movers)
        programs, local = world.sm_count * plan.per_sm, layer.experts // world.size
        of = TableSizes(local, layer.capacity, plan.tile.block_m, layer.max_rows)
        filling, tables = route_tables.filling_of(world, layer.k, of)
        shapes = ((2, filling.rows // plan.tile.block_m), (1,), (2,))
        done, turn, met = (world.zeros(shape, torch.int32) for shape in shapes)
        return Whole(
            layer,
            plan,
            local,
            filling.rows,
            programs,
            ch,
            world.calls(NAME),
            done,
            turn,
            met,
            sizes(world, layer, plan),
            tables,
            filling,
        )

    return world.cached((NAME, layer, plan), make)


def sizes(world: World, layer: Layer, plan: FusedMoe) -> LayerSizes:
    elements, p = 32 * plan.tile.warps * ELEMENTS, power(layer.hidden)
    cols = min(p, elements // 2)
    blocks = dict(SEND=max(1, min(plan.copy_rows, elements // p)), STAGES=plan.copy_stages)
    blocks |= dict(SUM=min(plan.copy_rows, elements // 2 // cols), COLS=cols)
    return layer_sizes(world, layer, plan.tile, GROUP_M=plan.tile.group_m, **blocks)


def addresses(of: Whole, counters: torch.Tensor, stamps: torch.Tensor | None, at: Space) -> LayerPlaces:
    routes = of.filling.routes
    return LayerPlaces(
        at.inbox.local,
        at.inbox.addresses,
        at.outbox.local,
        at.outbox.addresses,
        at.y,
        routes.shared_ids.local,
        routes.shared_ids.addresses,
        routes.shared_weights.local,
        routes.shared_weights.addresses,
        of.tables.slots,
        of.filling.counts,
        of.tables,
        of.rows,
        of.met,
        counters,
        of.done,
        of.done.shape[1],
        of.plan.copy_programs,
        of.turn,
        stamps,
    )


@prepared
def _layer(world: World, of: Whole, at: Space, tokens: int, n: int, stamps: bool) -> Launch:
    """stamps: whether `stamped` was called."""
    layer, plan, h, i = of.layer, of.plan, of.layer.hidden, of.layer.inner
    bm, bn, bk = plan.tile.block_m, plan.tile.block_n, plan.tile.block_k
    stamped_at = world.decided[NAME, "stamps", of.programs] if stamps else None
    return Launch(
        world,
        moe_layer,
        of.programs,
        filling(plan),
        at=addresses(of, waves(world, of.tables.targets), stamped_at, at),
        w13_desc=Matrix(of.local * n, h, (bn, bk)),
        w2_desc=Matrix(of.local * h, i, (bn, bk)),
        hidden_in=Matrix(of.rows, i, (bm, of.sizes.GATED.value or bn // 2)).argument(at.hidden),
        hidden_out=Matrix(of.rows, i, (bm, bk)).argument(at.hidden),
        y_desc=Matrix(of.rows, h, (bm, bn // 2)).argument(at.y),
        ch=of.ch,
        T=tokens,
        C=layer.capacity,
        N=n,
        H=h,
        K=i,
        s=of.sizes,
        p=of.filling.how,
    )


@prepared
def _compare(world: World, of: Whole) -> Launch:
    """Return the launch that compares the ranks' calls. It is separate because in the layer's kernel the comparison
    costs registers that are not there (8 bytes of spills on sm_90a)."""
    return Launch(world, compare, 1, dict(num_warps=1), calls=of.calls)


def stamped(world: World, programs: int) -> torch.Tensor:
    """Return int64 [programs, 6], zeros the first time. From then on calls of launches of so many programs add up in it
    how long each was at what, in ns, without its waits: sending tokens, GEMM 1, GEMM 2, sums for others, own sums; and
    how long it ran. Such a launch is another kernel, a little slower."""
    key = (NAME, "stamps", programs)
    if key not in world.decided:
        world.decided[key] = world.zeros((programs, STAMPS.value), torch.int64)
    made: torch.Tensor = world.decided[key]
    return made


def run_fused(
    world: World, call: MoeCall, plan: FusedMoe, operands: MoeOperands, out: torch.Tensor
) -> tuple[torch.Tensor | None]:
    """Run a call as `dispatched.run_dispatched` does, to the same bits, and in the same memory but for the inbox. `out`
    may hold shared, not x. The ranks compare their calls in a small launch before it, which takes some us, as a
    barrier.

    Raises Unsupported where the plan's programs are not resident at once.
    """
    (x, ids, weights, w13, w2, b13, b2, shared, _), layer = operands, call.layer
    received = call.received(world, operands)
    stream = world.current_stream()
    world.order(lock(world, NAME), stream)
    of = plan_state(world, layer, plan)
    at = space(world, layer, of.rows, "inbox of one launch")
    stamps = (NAME, "stamps", of.programs) in world.decided
    given = Given(x, ids, weights, shared, out, b13, b2)
    step = GivenLaunch(
        _layer(world, of, at, x.shape[0], w13.shape[1], stamps), dict(given=given, w13_desc=w13, w2_desc=w2)
    )
    same = GivenLaunch(_compare(world, of), dict(number=world.number))
    of.ahead((*given, w13, w2), lambda: (same, step))
    same.on(stream)
    step.on(stream)
    if received is not None:
        world.copy(received, of.tables.received, stream)
    return (received,)
