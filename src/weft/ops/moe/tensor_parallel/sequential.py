"""Both halves by the library alone: all-gathers, an index, a grouped GEMM, and weighted sums that are reduce-scattered.
The host reads nothing, except for float16, for which the library has no grouped GEMM.

Sorts and searches make the same routes as `place_routes`, so that the two halves may run by different plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ....backends import library_gemm
from ....errors import WeftError
from ....plans import Plan
from ....world import World
from ..expert_parallel.sequential import ACTIVATED, activation_gradient
from .call import FirstHalfCall, GatherOperands, GroupedCall, ScatterOperands, Split, route_parts


def run_gather(world: World, call: FirstHalfCall, plan: Plan, operands: GatherOperands, out: Tensor) -> tuple[Tensor]:
    """Run a call as `dispatched.run_gather` does. Nothing is saved, whatever the call says: the backward pass sends x
    again."""
    (x, ids, weights, w13, b13), layer = operands, call.layer
    check_capture(world, layer)
    routes = call.routes(world)
    rows, all_ids, all_weights = (
        gathered(world, layer, t, fill_value) for t, fill_value in ((x, 0), (ids, -1), (weights, 0))
    )
    parts, block = route_parts(world, layer, routes), world.backend.scale.interleave

    def run() -> None:
        table = tables(all_ids.view(world.size, -1, layer.k), world.rank, layer, layer.local(world))
        for name, values in table.items():
            getattr(parts, name)[: values.numel()] = values.flatten()
        parts.weights[: all_weights.numel()] = all_weights.flatten()
        preactivation = linear(rows[table["sources"].clamp(min=0)], w13, b13, table["offsets"])
        out.copy_(ACTIVATED[layer.activation](preactivation, layer.inner, block))

    read = [rows, all_ids, all_weights, w13, *([] if b13 is None else [b13])]
    world.call(run, read, [out, routes], world.current_stream())
    return (routes,)


def run_scatter(world: World, call: GroupedCall, plan: Plan, operands: ScatterOperands, out: Tensor) -> None:
    """Run a call as `dispatched.run_scatter` does, except that the library adds the ranks' sums."""
    (hidden, routes, _, w2, b2, shared), layer = operands, call.layer
    check_capture(world, layer)
    parts, stream, k = route_parts(world, layer, routes), world.current_stream(), layer.k
    tokens, h = world.size * layer.max_tokens_per_rank, layer.hidden
    rank_sums = world.empty((tokens, h), layer.dtype)
    own_rows = world.empty((layer.max_tokens_per_rank, h), layer.dtype)
    route_rows, weights = (t[: tokens * k].view(tokens, k) for t in (parts.route_rows, parts.weights))
    offsets = parts.offsets[: layer.local(world) + 1]

    def weighted_sum() -> None:
        y = linear(hidden, w2, b2, offsets)
        total = torch.zeros(tokens, h, dtype=torch.float32, device=y.device)
        for i in range(k):
            valid = route_rows[:, i : i + 1] >= 0
            total += torch.where(valid, y[route_rows[:, i].clamp(min=0)].float() * weights[:, i : i + 1], 0.0)
        rank_sums.copy_(total)

    # The list of reads leaves out hidden: nobody writes its rows behind the last expert's, and the host does not know
    # how many these are.
    world.call(weighted_sum, [route_rows, weights, offsets, w2, *([] if b2 is None else [b2])], [rank_sums], stream)
    if world.size > 1:
        world.reduce_scatter(own_rows, rank_sums, stream)
    else:
        own_rows = rank_sums

    def store_output() -> None:
        rows = own_rows[: out.shape[0]]
        out.copy_(rows if shared is None else rows.float() + shared.float())

    world.call(store_output, [own_rows, *([] if shared is None else [shared])], [out], stream)


def gather_gradients(
    world: World, layer: Split, dhidden: Tensor, operands: GatherOperands, routes: Tensor, wants_x: bool, experts: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients that `backward.first_half` returns; x is sent again."""
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
            rank_sums.copy_(order.sum_over_topk(linear(dpreactivation, w13.transpose(1, 2), None, order.offsets)))
        for t, compute in zip(
            results, (lambda: order.products(dpreactivation, x_rows), lambda: order.sums(dpreactivation)), strict=False
        ):
            t.copy_(compute())

    world.call(run, [rows, *order.read, *parameters], [rank_sums, *results], stream)
    dx = None
    if wants_x:
        own_rows, dx = rank_sums, world.empty(x.shape, x.dtype)
        if world.size > 1:
            own_rows = world.empty((layer.max_tokens_per_rank, layer.hidden), layer.dtype)
            world.reduce_scatter(own_rows, rank_sums, stream)
        world.call(lambda: dx.copy_(own_rows[: len(dx)]), [own_rows], [dx], stream)
    return dx, results[0] if experts else None, results[1] if len(results) > 1 else None


def scatter_gradients(
    world: World, layer: Split, dy: Tensor, operands: ScatterOperands, experts: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients that `backward.second_half` returns."""
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
            dots += (dy_rows.float() * b2.float()[order.expert()]).sum(1)
        droutes.zero_()[: order.route_rows.numel()] = order.by_route(dots)
        weighted = (dy_rows * weight).to(hidden.dtype)
        for t, compute in zip(
            results, (lambda: order.products(weighted, hidden), lambda: order.sums(weighted)), strict=False
        ):
            t.copy_(compute())

    # As in `run_scatter`, the list of reads leaves out hidden.
    world.call(run, [rows, *order.read, *parameters], [dhidden, droutes, *results], stream)
    return dhidden, droutes, results[0] if experts else None, results[1] if len(results) > 1 else None


@dataclass(frozen=True)
class RowOrder:
    """The positions of rows in expert order, from a call's routes."""

    route_rows: Tensor  # [W max_tokens, k]
    weights: Tensor
    sources: Tensor  # [rows]
    offsets: Tensor

    @classmethod
    def from_routes(cls, world: World, layer: Split, routes: Tensor) -> RowOrder:
        """Return the order in these routes."""
        parts, n, k = route_parts(world, layer, routes), world.size * layer.max_tokens_per_rank * layer.k, layer.k
        route_rows, weights = (t[:n].view(-1, k) for t in (parts.route_rows, parts.weights))
        return cls(route_rows, weights, parts.sources[: layer.rows(world)], parts.offsets[: layer.local(world) + 1])

    @property
    def read(self) -> list[Tensor]:
        return [self.route_rows, self.weights, self.sources, self.offsets]

    @property
    def is_token(self) -> Tensor:
        """Return whether each row is a token's, bool [rows, 1]."""
        return (self.sources >= 0)[:, None]

    def in_expert_order(self, tokens: Tensor) -> Tensor:
        """Return tokens [W max_tokens, H] in expert order, [rows, H], with zeros in rows without a token."""
        return torch.where(self.is_token, tokens[self.sources.clamp(min=0).long()], 0)

    def row_weights(self) -> Tensor:
        """Return the weights by row, float32 [rows, 1], with 0 for rows without a token."""
        rows = len(self.sources)
        row = torch.where(self.route_rows >= 0, self.route_rows, rows).flatten().long()
        compute = torch.zeros(rows + 1, device=self.route_rows.device)
        return compute.index_copy(0, row, self.weights.flatten())[:rows, None] * self.is_token

    def by_route(self, values: Tensor) -> Tensor:
        """Return values [rows] by route, [W max_tokens k], with 0 for routes without a row."""
        return torch.where(self.route_rows >= 0, values[self.route_rows.clamp(min=0).long()], 0).flatten()

    def sum_over_topk(self, rows: Tensor) -> Tensor:
        """Return float32 [W max_tokens, H], the sum of rows over a token's routes in their order."""
        total = torch.zeros(len(self.route_rows), rows.shape[1], device=rows.device)
        for row in self.route_rows.unbind(1):
            total += torch.where((row >= 0)[:, None], rows[row.clamp(min=0).long()].float(), 0)
        return total

    def expert(self) -> Tensor:
        """Return the expert of each row, [rows]; the last expert for rows behind all."""
        row = torch.arange(len(self.sources), device=self.route_rows.device)
        return torch.searchsorted(self.offsets[1:].long(), row, right=True).clamp(max=len(self.offsets) - 2)

    def sums(self, rows: Tensor) -> Tensor:
        """Return float32 [El, N], the sums of each expert's rows; `rows` is zero where there is no token."""
        experts = torch.arange(len(self.offsets) - 1, device=rows.device)
        return (self.expert() == experts[:, None]).float() @ rows.float()

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """Return [El, M, N], a^T b of each expert's rows; a is zero where there is no token."""
        ends = self.offsets[1:].int()
        b = torch.where(self.is_token, b, 0)
        if a.is_cuda and a.dtype == torch.bfloat16 and not any(t.shape[1] % 8 for t in (a, b)):
            products = torch._grouped_mm(a.t(), b, offs=ends)
            return torch.where(self.offsets.diff()[:, None, None] > 0, products, 0)
        starts = (0, *ends.tolist())
        return torch.stack([a[i:j].t() @ b[i:j] for i, j in pairwise(starts)])


def check_capture(world: World, layer: Split) -> None:
    """Raise WeftError for a float16 call inside a CUDA graph capture."""
    if world.backend.capturing() and layer.dtype != torch.bfloat16:
        raise WeftError("a sequential call in float16 reads counts on the host, which a CUDA graph cannot hold")


def gathered(world: World, layer: Split, t: Tensor, fill_value: int) -> Tensor:
    """Return t of all ranks, [W max_tokens, ..]; rows beyond a rank's tokens are `fill_value`."""
    stream, max_tokens_per_rank = world.current_stream(), layer.max_tokens_per_rank
    if t.shape[0] < max_tokens_per_rank:
        routes_per_source = world.empty((max_tokens_per_rank, *t.shape[1:]), t.dtype)

        def fill() -> None:
            routes_per_source[: t.shape[0]] = t
            routes_per_source[t.shape[0] :] = fill_value

        world.call(fill, [t], [routes_per_source], stream)
        t = routes_per_source
    if world.size == 1:
        return t
    full = world.empty((world.size * max_tokens_per_rank, *t.shape[1:]), t.dtype)
    world.all_gather(full, t, stream)
    return full


def tables(ids: Tensor, me: int, layer: Split, local_experts: int) -> dict[str, Tensor]:
    """Return the parts of the routes without the weights (`route_tables.Tables`), int64. ids [W, max_tokens, k]."""
    (size, max_tokens_per_rank, k), tile, device = ids.shape, layer.tile, ids.device
    source_step = torch.arange(size, device=device)
    source = (me - source_step) % size
    local_id = ids[source].flatten().long() - me // layer.tp_size * local_experts
    expert = torch.where(
        (local_id >= 0) & (local_id < local_experts) & (ids[source].flatten() >= 0), local_id, local_experts
    )
    order = torch.argsort(expert, stable=True)
    sorted_expert = expert[order]
    starts = torch.searchsorted(sorted_expert, torch.arange(local_experts + 1, device=device))
    counts = starts.diff()
    offsets = torch.nn.functional.pad((-(-counts // tile) * tile).cumsum(0), (1, 0))
    position = torch.arange(order.numel(), device=device)
    rows = -(-size * max_tokens_per_rank * min(k, local_experts) // tile) * tile + local_experts * tile
    row = torch.where(sorted_expert < local_experts, offsets[sorted_expert] + position - starts[sorted_expert], rows)

    def values_by_row(values: Tensor) -> Tensor:
        """Return `values` by row, with -1 in rows without a route; the extra last row takes routes without a row."""
        return torch.full((rows + 1,), -1, device=device).index_copy(0, row, values)

    routes = max_tokens_per_rank * k
    route_rows = torch.empty_like(row).index_copy(0, order, torch.where(sorted_expert < local_experts, row, -1))
    sources = values_by_row(source[order // routes] * max_tokens_per_rank + order % routes // k)[:rows]
    step_of_row = values_by_row(order // routes)
    first_row = torch.arange(0, rows, tile, device=device)
    in_use = first_row < offsets[-1]
    expert_of_tile = torch.searchsorted(offsets[1:], first_row, right=True).clamp(max=local_experts - 1)
    last_row = torch.minimum(first_row + tile, offsets[expert_of_tile] + counts[expert_of_tile]) - 1
    first_step, last_step = step_of_row[first_row], step_of_row[torch.where(in_use, last_row, first_row)]
    tile_order = torch.argsort(torch.where(in_use, last_step, size), stable=True)
    touched = in_use & (first_step <= source_step[:, None]) & (last_step >= source_step[:, None])
    return dict(
        sources=sources,
        received=counts,
        route_rows=route_rows.view(size, routes)[source],  # the permutation of sources is its own inverse
        offsets=offsets,
        tiles=torch.stack([first_row, expert_of_tile, first_step, last_step], 1)[tile_order],
        tile_count=in_use.sum()[None],
        targets=touched.sum(1),
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Return [rows, N] for x [rows, K] in expert order, where each expert's rows begin at offsets [El + 1], by the
    library's grouped GEMM where it takes these tensors. Values behind the last expert's rows are undefined."""
    ends = offsets[1:].int()
    if x.is_cuda and x.dtype == torch.bfloat16 and not any(n % 8 for n in weight.shape[1:]):
        y = library_gemm.multiply_groups(x, weight, offsets.int())
    else:
        y = product(x, weight, ends.tolist())
    if bias is None:
        return y
    expert = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=torch.int32), right=True)
    return y + bias[expert.clamp(max=len(weight) - 1)]


def product(x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
    """Return [rows, N] by one GEMM for each expert, for rows that end at `ends`."""
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for start, store_output, matrix in zip((0, *ends), ends, weight, strict=False):
        y[start:store_output] = x[start:store_output] @ matrix.t()
    return y
