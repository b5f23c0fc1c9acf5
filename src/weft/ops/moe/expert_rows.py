"""Functions that put rows in expert order with torch operations alone. The sequential plans of all MoE layers share
them.

Sorting and searching produce the same routes as `place_routes`, so the two halves of a layer may use different plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...backends import library_gemm
from ...world import World
from .tensor_parallel.call import Split, route_parts


def gathered(world: World, layer: Split, t: Tensor, fill_value: int) -> Tensor:
    """All-gather t and return it as [W max_tokens, ..]. Rows beyond the tokens of a rank are set to `fill_value`."""
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


def all_to_all(world: World, sent: Tensor) -> Tensor:
    """Return [W, ..]: for each source rank, the part of its `sent` [W, ..] that is meant for this rank."""
    if world.size == 1:
        return sent
    received = world.empty(sent.shape, sent.dtype)
    world.backend.all_to_all(list(received), list(sent), world.current_stream())
    return received


def sum_over_ranks(world: World, sent: Tensor, weights: Tensor) -> Tensor:
    """Return float32 [T, k], the shape of weights: for each route of this rank, the sum in rank order of the values
    that all ranks hold for the route in `sent` [W, max_tokens k]."""
    received, total = all_to_all(world, sent), world.empty(weights.shape, torch.float32)
    own_routes = received[:, : weights.numel()]
    add = lambda: torch.sum(own_routes, 0, out=total.view(-1))  # noqa: E731
    world.call(add, [received], [total], world.current_stream())
    return total


def tables(world: World, layer: Split, ids: Tensor) -> dict[str, Tensor]:
    """Return the routes without the weights, as the int64 tensors of `route_tables.Tables`. ids [W, max_tokens, k]."""
    (size, max_tokens_per_rank, k), tile, device = ids.shape, layer.tile, ids.device
    me, rows, local_experts = world.rank, layer.rows(world), layer.local(world)
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
    row = torch.where(sorted_expert < local_experts, offsets[sorted_expert] + position - starts[sorted_expert], rows)

    def values_by_row(values: Tensor) -> Tensor:
        """Return `values` in row order, with -1 in rows without a route. An extra last row receives the values of
        routes without a row."""
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
    """Multiply the rows of x [rows, K] by their experts' matrices, and return the results [rows, N]. The rows of x are
    in expert order: the rows of expert e begin at offsets[e] ([El + 1]). The fastest library whose grouped GEMM
    supports these tensors computes the products. Values after the last expert's rows are undefined."""
    if takes_groups(x, *weight.shape[1:]):
        y = library_gemm.multiply_groups(x, weight, offsets.int())
    else:
        y = x.new_zeros(x.shape[0], weight.shape[1])
        for (start, end), matrix in zip(pairwise(offsets.tolist()), weight, strict=True):
            y[start:end] = x[start:end] @ matrix.t()
    return y if bias is None else y + bias[expert_of_rows(len(x), offsets)]


def takes_groups(x: Tensor, *sizes: int) -> bool:
    """Return whether torch's grouped GEMM supports x [rows, ..] and matrices of these sizes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0 and not any(n % 8 for n in sizes)


def expert_of_rows(rows: int, offsets: Tensor) -> Tensor:
    """Return the expert of each row, [rows]. Rows after the last expert's rows also count as rows of the last
    expert."""
    row = torch.arange(rows, device=offsets.device)
    return torch.searchsorted(offsets[1:].long(), row, right=True).clamp(max=len(offsets) - 2)


def sums(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return float32 [El, N], the sums of each expert's rows. Rows without a token must be zero. An infinite value
    affects only the sum of its own expert, whereas a product with a matrix of zeros and ones would spread it to all
    sums."""
    return torch.segment_reduce(rows.float(), "sum", offsets=offsets.long(), axis=0)


def products(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Return [El, M, N]: a^T b over the rows of each expert. Rows without a token must be zero."""
    if takes_groups(a, a.shape[1], b.shape[1]):
        by_expert = torch._grouped_mm(a.t(), b, offs=offsets[1:].int())
        return torch.where(offsets.diff()[:, None, None] > 0, by_expert, 0)
    return torch.stack([a[i:j].t() @ b[i:j] for i, j in pairwise(offsets.tolist())])


def sum_over_topk(rows: Tensor, route_rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return float32 [W max_tokens, H]: for each token, the sum of its routes' rows in the order of the routes. If
    weights is not None, each row is multiplied by its route's weight. route_rows, weights: [W max_tokens, k]."""
    total = torch.zeros(len(route_rows), rows.shape[1], device=rows.device)
    for i, row in enumerate(route_rows.unbind(1)):
        part = rows[row.clamp(min=0).long()].float()
        total += torch.where((row >= 0)[:, None], part if weights is None else part * weights[:, i : i + 1], 0)
    return total


@dataclass(frozen=True)
class RowOrder:
    """The positions of rows in expert order, from a call's routes."""

    route_rows: Tensor  # [W max_tokens, k]
    weights: Tensor
    sources: Tensor  # [rows]
    offsets: Tensor

    @classmethod
    def from_routes(cls, world: World, layer: Split, routes: Tensor) -> RowOrder:
        """Return the ExpertOrder that these routes contain."""
        all_weights, tables = route_parts(world, layer, routes)
        n = world.size * layer.max_tokens_per_rank * layer.k
        route_rows, weights = (t[:n].view(-1, layer.k) for t in (tables.route_rows, all_weights))
        return cls(route_rows, weights, tables.sources[: layer.rows(world)], tables.offsets[: layer.local(world) + 1])

    @property
    def read(self) -> list[Tensor]:
        return [self.route_rows, self.weights, self.sources, self.offsets]

    @property
    def is_token(self) -> Tensor:
        """Return bool [rows, 1]: whether each row holds a token."""
        return (self.sources >= 0)[:, None]

    def in_expert_order(self, tokens: Tensor) -> Tensor:
        """Return tokens [W max_tokens, H] in expert order, [rows, H], with zeros in rows without a token."""
        return torch.where(self.is_token, tokens[self.sources.clamp(min=0).long()], 0)

    def row_weights(self) -> Tensor:
        """Return float32 [rows, 1]: the weight of each row, which is 0 for rows without a token."""
        rows = len(self.sources)
        row = torch.where(self.route_rows >= 0, self.route_rows, rows).flatten().long()
        by_row = torch.zeros(rows + 1, device=self.route_rows.device)
        return by_row.index_copy(0, row, self.weights.flatten())[:rows, None] * self.is_token

    def store_gradients(self, gradients: list[Tensor], a: Tensor, b: Tensor) -> None:
        """Fill the requested gradients. The gradient of an expert's matrix is a^T b over the expert's rows; the
        gradient of its bias is the sum of the rows of a. Rows of a without a token must be zero."""
        if gradients:
            gradients[0].copy_(products(a, torch.where(self.is_token, b, 0), self.offsets))
        if len(gradients) > 1:
            gradients[1].copy_(sums(a, self.offsets))

    def by_route(self, values: Tensor) -> Tensor:
        """Return values [rows] in route order, [W max_tokens k], with 0 for routes without a row."""
        return torch.where(self.route_rows >= 0, values[self.route_rows.clamp(min=0).long()], 0).flatten()


def activated(preactivation: Tensor, activation: str, inner: int, block: int) -> Tensor:
    """Return the activation [rows, inner] of preactivation, in its dtype."""
    if activation == "gelu":
        return torch.nn.functional.gelu(preactivation.float()).to(preactivation.dtype)
    gate, up = halves(preactivation, inner, block)
    if activation == "gpt_oss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(preactivation.dtype)
    return (torch.nn.functional.silu(gate) * up).to(preactivation.dtype)


def activation_gradient(preactivation: Tensor, dy: Tensor, activation: str, block: int) -> Tensor:
    """Return the gradient of preactivation, in its layout."""
    if activation == "gelu":
        gradient: Tensor = torch.ops.aten.gelu_backward(dy.float(), preactivation.float())
        return gradient.to(preactivation.dtype)
    inner = dy.shape[1]
    gate, up = halves(preactivation, inner, block)
    if activation == "gpt_oss":
        gate_in_range, up_in_range = gate <= 7, up.abs() <= 7
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        s = torch.sigmoid(1.702 * gate)
        dgate, dup = up * s * (1 + 1.702 * gate * (1 - s)) * gate_in_range, gate * s * up_in_range
    else:
        s = torch.sigmoid(gate)
        dgate, dup = up * s * (1 + gate * (1 - s)), gate * s
    rows, columns = preactivation.shape
    parts = preactivation.new_zeros(rows, 2, columns // 2)
    parts[:, 0, :inner], parts[:, 1, :inner] = dy.float() * dgate, dy.float() * dup
    return parts.view(rows, 2, columns // (2 * block), block).transpose(1, 2).reshape(rows, columns)


def halves(preactivation: Tensor, inner: int, block: int) -> tuple[Tensor, Tensor]:
    """Separate the gate and up columns that `pack` interleaved, and return both as float32 [rows, I]."""
    parts = preactivation.float().view(preactivation.shape[0], preactivation.shape[1] // (2 * block), 2, block)
    return parts[:, :, 0].flatten(1)[:, :inner], parts[:, :, 1].flatten(1)[:, :inner]
