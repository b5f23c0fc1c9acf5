"""Both halves with operations of torch and NCCL alone: all-gathers, indexing, a grouped GEMM, and a reduce-scatter of
weighted sums. The host reads no results from the GPU, except in calls with float16 tensors, for which torch has no
grouped GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....errors import WeftError
from ....plans import Plan
from ....world import World
from ..expert_rows import (
    RowOrder,
    activated,
    activation_gradient,
    expert_of_rows,
    gathered,
    linear,
    sum_over_topk,
    tables,
)
from .call import FirstHalfCall, GatherOperands, GroupedCall, ScatterOperands, Split, route_parts


def run_gather(world: World, call: FirstHalfCall, plan: Plan, operands: GatherOperands, out: Tensor) -> tuple[Tensor]:
    """Run a call with the same result as `dispatched.run_gather`. Whatever `keep` is, the run saves nothing, and the
    backward pass sends x again."""
    (x, ids, weights, w13, b13), layer = operands, call.layer
    check_capture(world, layer)
    routes = call.routes(world)
    rows, all_ids, all_weights = (
        gathered(world, layer, t, fill_value) for t, fill_value in ((x, 0), (ids, -1), (weights, 0))
    )
    parts, block = route_parts(world, layer, routes), world.backend.scale.interleave

    def run() -> None:
        table = tables(world, layer, all_ids.view(world.size, -1, layer.k))
        for name, values in table.items():
            getattr(parts.tables, name)[: values.numel()] = values.flatten()
        parts.weights[: all_weights.numel()] = all_weights.flatten()
        preactivation = linear(rows[table["sources"].clamp(min=0)], w13, b13, table["offsets"])
        out.copy_(activated(preactivation, layer.activation, layer.inner, block))

    read = [rows, all_ids, all_weights, w13, *([] if b13 is None else [b13])]
    world.call(run, read, [out, routes], world.current_stream())
    return (routes,)


def run_scatter(world: World, call: GroupedCall, plan: Plan, operands: ScatterOperands, out: Tensor) -> None:
    """Run a call as `dispatched.run_scatter` does, except that NCCL adds the ranks' sums."""
    (hidden, routes, _, w2, b2, shared), layer = operands, call.layer
    check_capture(world, layer)
    order, stream = RowOrder.from_routes(world, layer, routes), world.current_stream()
    rank_sums = world.empty((world.size * layer.max_tokens_per_rank, layer.hidden), layer.dtype)

    def weighted_sum() -> None:
        rank_sums.copy_(sum_over_topk(linear(hidden, w2, b2, order.offsets), order.route_rows, order.weights))

    # The list of reads omits hidden, because no kernel writes the rows of hidden after the last expert's rows, and the
    # host does not know how many rows these are.
    world.call(weighted_sum, [*order.read, w2, *([] if b2 is None else [b2])], [rank_sums], stream)
    own_rows = scattered(world, rank_sums)

    def store_output() -> None:
        rows = own_rows[: out.shape[0]]
        out.copy_(rows if shared is None else rows.float() + shared.float())

    world.call(store_output, [own_rows, *([] if shared is None else [shared])], [out], stream)


def gather_gradients(
    world: World, layer: Split, dhidden: Tensor, operands: GatherOperands, routes: Tensor, wants_x: bool, experts: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the same gradients as `backward.first_half`. x is sent again."""
    check_capture(world, layer)
    x, _, _, w13, b13 = operands
    rows, stream = gathered(world, layer, x, 0), world.current_stream()
    order = RowOrder.from_routes(world, layer, routes)
    rank_sums = world.empty((world.size * layer.max_tokens_per_rank, layer.hidden), layer.dtype)
    parameters = [t for t in (w13, b13) if t is not None]
    results = [world.empty(t.shape, t.dtype) for t in parameters if experts]

    def run() -> None:
        x_rows = order.in_expert_order(rows)
        preactivation = linear(x_rows, w13, b13, order.offsets)
        dpreactivation = activation_gradient(preactivation, dhidden, layer.activation, world.backend.scale.interleave)
        dpreactivation = torch.where(order.is_token, dpreactivation, 0)
        if wants_x:
            dx_rows = linear(dpreactivation, w13.transpose(1, 2), None, order.offsets)
            rank_sums.copy_(sum_over_topk(dx_rows, order.route_rows))
        order.store_gradients(results, dpreactivation, x_rows)

    world.call(run, [rows, *order.read, *parameters], [rank_sums, *results], stream)
    dx = None
    if wants_x:
        own_rows, dx = scattered(world, rank_sums), world.empty(x.shape, x.dtype)
        world.call(lambda: dx.copy_(own_rows[: len(dx)]), [own_rows], [dx], stream)
    return dx, results[0] if experts else None, results[1] if len(results) > 1 else None


def scatter_gradients(
    world: World, layer: Split, dy: Tensor, operands: ScatterOperands, experts: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the same gradients as `backward.second_half`."""
    check_capture(world, layer)
    hidden, routes, _, w2, b2, _ = operands
    rows, stream = gathered(world, layer, dy, 0), world.current_stream()
    order = RowOrder.from_routes(world, layer, routes)
    dhidden, droutes = world.empty(hidden.shape, hidden.dtype), world.empty(routes.shape, torch.float32)
    parameters = [t for t in (w2, b2) if t is not None]
    results = [world.empty(t.shape, t.dtype) for t in parameters if experts]

    def run() -> None:
        dy_rows, weight = order.in_expert_order(rows), order.row_weights()
        g = linear(dy_rows, w2.transpose(1, 2), None, order.offsets).float()
        dhidden.copy_(torch.where(order.is_token, g * weight, 0))
        dots = (g * hidden.float()).sum(1)
        if b2 is not None:
            dots += (dy_rows.float() * b2.float()[expert_of_rows(len(dots), order.offsets)]).sum(1)
        droutes.zero_()[: order.route_rows.numel()] = order.by_route(dots)
        order.store_gradients(results, (dy_rows * weight).to(hidden.dtype), hidden)

    # As in `run_scatter`, the list of reads omits hidden.
    world.call(run, [rows, *order.read, *parameters], [dhidden, droutes, *results], stream)
    return dhidden, droutes, results[0] if experts else None, results[1] if len(results) > 1 else None


def check_capture(world: World, layer: Split) -> None:
    """Raise WeftError for a float16 call inside a CUDA graph capture."""
    if world.backend.capturing() and layer.dtype != torch.bfloat16:
        raise WeftError("a sequential call in float16 reads counts on the host, which a CUDA graph cannot hold")


def scattered(world: World, rank_sums: Tensor) -> Tensor:
    """Return the sum over ranks of this rank's part of [W max_tokens, H]."""
    if world.size == 1:
        return rank_sums
    own_rows = world.empty((len(rank_sums) // world.size, rank_sums.shape[1]), rank_sums.dtype)
    world.reduce_scatter(own_rows, rank_sums, world.current_stream())
    return own_rows
