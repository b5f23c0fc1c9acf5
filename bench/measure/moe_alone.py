"""The parts of a layer of `moe.py` alone: its grouped GEMMs, and the router and tables that precede them.

The functions here are timed for one routing. The GEMMs do not wait for other ranks, and nothing runs concurrently with
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

import weft
from weft.ops.moe.call import MoeOperands, Weights
from weft.ops.moe.expert_parallel import dispatched
from weft.ops.moe.expert_parallel.op import MOE, packed
from weft.ops.moe.routing import route_tables
from weft.plans import Dispatched

if TYPE_CHECKING:
    from bench.measure.moe import Layer, Library


def library_gemms(library: Library) -> dict[str, Callable[[], object]]:
    """Return torch's grouped GEMMs, over rows in the order of the experts."""
    layer, (_, _, _, gets, _, _, ends) = library.layer, library.fixed
    rows = layer.xs[0].new_empty(sum(gets), layer.model.hidden).normal_()
    hidden = rows.new_empty(sum(gets), layer.model.inner).normal_()
    return {
        "first": lambda: torch._grouped_mm(rows, library.w13_t, offs=ends),
        "second": lambda: torch._grouped_mm(hidden, library.w2_t, offs=ends),
    }


def own_gemms(layer: Layer) -> dict[str, Callable[[], object]]:
    """Return weft's grouped GEMMs with the activation, as plan "dispatched" launches them."""
    world, (x, ids, weights) = layer.world, layer.routed()
    operands = MoeOperands(x, ids, weights, packed("moe", "w13", layer.packed, 5, layer.model.activation), layer.w2)
    w, call = (
        operands.experts,
        MOE.check(world, operands, (None, layer.model.activation, None, None, "rows", False, False)),
    )
    kind, plan = call.layer, MOE.auto(world, call, "graph")
    plan = plan if isinstance(plan, Dispatched) else Dispatched()
    dispatched.prepare_dispatched(world, call, plan)(operands, torch.empty_like(x))
    world.synchronize()
    _, built, _ = dispatched.tables_of(world, kind, plan.tile.block_m)
    tables = route_tables.Tables(*(t.clone() for t in built))  # the next call overwrites them for another routing
    inbox = torch.randn(world.size * kind.max_tokens_per_rank, kind.hidden, dtype=x.dtype, device=x.device)
    state = dispatched.plan_state(world, kind, plan)
    hidden, y = (inbox.new_empty(state.rows, cols) for cols in (kind.inner, kind.hidden))
    workspace = dispatched.LayerWorkspace(SimpleNamespace(local=inbox), None, hidden, y)
    return waiting_for_nobody(world, state, w, tables, workspace, hidden)


def waiting_for_nobody(
    world: weft.World,
    state: dispatched.DispatchedState,
    w: Weights,
    tables: route_tables.Tables,
    workspace: dispatched.LayerWorkspace,
    hidden: torch.Tensor,
) -> dict[str, Callable[[], object]]:
    """Return the launches of both grouped GEMMs. All rows of the first GEMM have already been dispatched; the second
    GEMM reads `hidden`."""
    dispatch_flags = world.channel("nobody to wait for", world.size, None)
    dispatch_flags.counters.fill_(1 << 30)
    state = replace(state, dispatch_flags=dispatch_flags)
    counters = torch.zeros(32, dtype=torch.int32, device=hidden.device)
    product = dispatched.GroupedProduct(hidden, w.w2, w.b2)
    launches = dict(
        first=dispatched.first_gemm(world, state, w, tables, workspace),
        second=dispatched.grouped_gemm(world, state, tables, product, workspace.y, counters),
    )
    return {half: lambda step=step: step.on(world.current_stream()) for half, step in launches.items()}


def gemms_of(layer: Layer, library: Library) -> dict[str, Callable[[], object]]:
    """Return torch's and weft's GEMM of each half, by "first torch", .., "second weft"."""
    every = {"torch": library_gemms(library), "weft": own_gemms(layer)}
    return {f"{half} {whose}": fn for whose, fns in every.items() for half, fn in fns.items()}


def tables(layer: Layer) -> Callable[[], object]:
    """Return a function that runs the router, shares the routes with all ranks and builds the tables. Calls alternate
    between two buffers, because no rows are returned that would show that a peer has read a buffer."""
    world, model, capacity = layer.world, layer.model, layer.tokens
    sizes = route_tables.TableSizes(model.experts // world.size, capacity, Dispatched.tile.block_m)
    shared = route_tables.routes_of(world, capacity, model.k, alternating=True)
    builder = route_tables.make_builder(world, shared, sizes, cumulative_targets=False)
    outputs = route_tables._tables(world, builder, sizes, list_tiles=True)
    weights_of_rows = world.empty((world.size * capacity * model.k,), torch.float32)

    def run() -> None:
        _, ids, weights = layer.routed()
        route_tables.share_routes(world, shared, ids, weights)
        route_tables.run_builder(world, builder, outputs, weights_of_rows)

    return run
