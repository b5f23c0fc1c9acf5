"""An MoE layer with operations of torch and NCCL alone: it sorts rows by expert, sends them by an all-to-all, runs
grouped GEMMs, sends the results back by an all-to-all, and computes weighted sums.

Every route has a separate row, so a token is sent once for each of its experts. The host reads the numbers of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ....errors import WeftError
from ....plans import Plan
from ....world import World
from ..call import NAME, Layer, MoeCall, MoeOperands
from ..expert_rows import activated, activation_gradient, linear, products, sums
from .backward import Gradients


def run_sequential(world: World, call: MoeCall, plan: Plan, operands: MoeOperands, out: Tensor) -> tuple[Tensor | None]:
    """Run a call with the same result as the plan Dispatched. Whatever `keep` is, the run saves nothing, and the
    backward pass sends x again."""
    x, ids, weights, shared, layer = operands.x, operands.ids, operands.weights, operands.shared, call.layer
    w, stream, (tokens, h) = operands.experts, world.current_stream(), x.shape
    received, routes = call.received(world, operands), SortedRoutes.of_ids(world, layer, ids)
    rows = routes.sent(x, layer.k)
    y = world.empty(rows.shape, x.dtype)

    def experts() -> None:
        preactivation = linear(rows[routes.expert_order], w.w13, w.b13, routes.offsets)
        hidden = activated(preactivation, layer.activation, layer.inner, world.backend.scale.interleave)
        y.index_copy_(0, routes.expert_order, linear(hidden, w.w2, w.b2, routes.offsets).to(y.dtype))

    world.call(experts, [rows, *routes.by_expert, *(t for t in w if t is not None)], [y], stream)
    returned_rows = routes.returned(y)

    def add() -> None:
        by_route = torch.zeros(tokens * layer.k, h, dtype=torch.float32, device=x.device)
        by_route.index_copy_(0, routes.sent_routes, returned_rows.float())
        valid = (ids >= 0) & (ids < layer.experts)  # a route without an expert may have an undefined weight
        total = (by_route.view(tokens, layer.k, h) * torch.where(valid, weights, 0.0)[:, :, None]).sum(1)
        out.copy_(total if shared is None else total + shared.float())

    read = [returned_rows, routes.order, ids, weights, *([] if shared is None else [shared])]
    world.call(add, read, [out], stream)
    if received is not None:
        world.copy(received, world.tensor(routes.counts, torch.int32), stream)
    return (received,)


def backward(world: World, layer: Layer, dy: Tensor, operands: MoeOperands, experts: bool) -> Gradients:
    """Return the gradients of the operands of `run_sequential`. The gradients of the experts are computed only if
    `experts` is set."""
    x, ids, weights, *_ = operands
    w, stream, (tokens, h), k = operands.experts, world.current_stream(), x.shape, layer.k
    routes = SortedRoutes.of_ids(world, layer, ids)
    x_rows, dy_rows, row_weights = (routes.sent(t, n) for t, n in ((x, k), (dy, k), (weights.view(-1, 1), 1)))
    dx_by_row, dots_by_row = world.empty(x_rows.shape, x.dtype), world.empty(row_weights.shape, torch.float32)
    expert_gradients = [None if t is None or not experts else world.empty(t.shape, t.dtype) for t in w]

    def gradients() -> None:
        rows, dout, weight = (t[routes.expert_order] for t in (x_rows, dy_rows, row_weights))
        offsets, block, (dw13, dw2, db13, db2) = routes.offsets, world.backend.scale.interleave, expert_gradients
        preactivation = linear(rows, w.w13, w.b13, offsets)
        hidden = activated(preactivation, layer.activation, layer.inner, block)
        dots = (linear(hidden, w.w2, w.b2, offsets).float() * dout.float()).sum(1, keepdim=True)
        dots_by_row.index_copy_(0, routes.expert_order, dots)
        dout = (dout.float() * weight).to(dout.dtype)
        dhidden = linear(dout, w.w2.transpose(1, 2), None, offsets)
        dpreactivation = activation_gradient(preactivation, dhidden, layer.activation, block)
        dx_by_row.index_copy_(0, routes.expert_order, linear(dpreactivation, w.w13.transpose(1, 2), None, offsets))
        for matrix_gradient, a, b in ((dw13, dpreactivation, rows), (dw2, dout, hidden)):
            if matrix_gradient is not None:
                matrix_gradient.copy_(products(a, b, offsets))
        for bias_gradient, a in ((db13, dpreactivation), (db2, dout)):
            if bias_gradient is not None:
                bias_gradient.copy_(sums(a, offsets))

    read = [x_rows, dy_rows, row_weights, *routes.by_expert, *(t for t in w if t is not None)]
    written = [dx_by_row, dots_by_row, *(t for t in expert_gradients if t is not None)]
    world.call(gradients, read, written, stream)
    dx_rows, dots = (routes.returned(t) for t in (dx_by_row, dots_by_row))
    dx, dweights = world.empty(x.shape, x.dtype), world.empty(weights.shape, torch.float32)

    def add() -> None:
        by_route = torch.zeros(tokens * k, h, dtype=torch.float32, device=x.device)
        by_route.index_copy_(0, routes.sent_routes, dx_rows.float())
        dx.copy_(by_route.view(tokens, k, h).sum(1))
        dweights.zero_().view(-1, 1).index_copy_(0, routes.sent_routes, dots)

    world.call(add, [dx_rows, dots, routes.order], [dx, dweights], stream)
    return Gradients(dx, dweights, *expert_gradients)


@dataclass(frozen=True)
class SortedRoutes:
    """The routes of a call, sorted by expert. Routes without an expert come last.

    order: int64 [T k]. send_counts, recv_counts: the numbers of rows sent to and received from every rank. counts: the
    number of rows of every expert on this rank. expert_order: int64, for each row in expert order, its position among
    the received rows, which are in source order. offsets: int32 [El + 1], the first row of every expert, and the end of
    the last expert's rows.
    """

    world: World
    order: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    counts: list[int]
    expert_order: Tensor
    offsets: Tensor

    @classmethod
    def of_ids(cls, world: World, layer: Layer, ids: Tensor) -> SortedRoutes:
        """Return the routes of these ids. The host waits for the stream. Raises WeftError inside a CUDA graph
        capture."""
        if world.backend.capturing():
            raise WeftError(f"{NAME}: a sequential call reads counts on the host, which a CUDA graph cannot hold")
        stream, experts, size = world.current_stream(), layer.experts, world.size
        order, counts = world.empty((ids.numel(),), torch.int64), world.empty((experts,), torch.int64)

        def sort() -> None:
            flat = ids.flatten().long()
            expert = torch.where((flat < 0) | (flat >= experts), experts, flat)
            order.copy_(torch.argsort(expert, stable=True))
            counts.copy_(torch.bincount(expert, minlength=experts + 1)[:experts])

        world.call(sort, [ids], [order, counts], stream)
        all_counts = counts
        if size > 1:
            all_counts = world.empty((size * experts,), torch.int64)
            world.all_gather(all_counts, counts, stream)
        world.wait_for_streams()
        table = all_counts.cpu().view(size, size, -1)  # the shape is [source, rank of the expert, El]
        received, local = table[:, world.rank], torch.arange(experts // size, device="cpu")
        expert_of_row = local.repeat(size).repeat_interleave(received.reshape(-1))
        own_counts = received.sum(0).tolist()
        expert_order = world.tensor(torch.argsort(expert_of_row, stable=True).tolist(), torch.int64)
        offsets = world.tensor([0, *accumulate(own_counts)], torch.int32)
        counts_by_rank = table[world.rank].sum(1).tolist(), received.sum(1).tolist()
        return cls(world, order, *counts_by_rank, own_counts, expert_order, offsets)

    @property
    def sent_routes(self) -> Tensor:
        """Return the routes that have an expert."""
        return self.order[: sum(self.send_counts)]

    @property
    def by_expert(self) -> list[Tensor]:
        """Return the tensors that a function which processes rows in expert order reads."""
        return [self.expert_order, self.offsets]

    def sent(self, t: Tensor, k: int) -> Tensor:
        """Return the rows that this rank's experts receive, in expert order. For route r, every rank sends row r // k
        of its tensor t."""
        rows, world = self.world.empty((sum(self.send_counts), t.shape[1]), t.dtype), self.world
        pick = lambda: torch.index_select(t, 0, self.sent_routes // k, out=rows)  # noqa: E731
        world.call(pick, [t, self.order], [rows], world.current_stream())
        return exchanged(self.world, rows, self.send_counts, self.recv_counts)

    def returned(self, rows: Tensor) -> Tensor:
        """Send `rows` back to their sources. Return the rows that this rank receives for its own routes."""
        return exchanged(self.world, rows, self.recv_counts, self.send_counts)


def exchanged(world: World, rows: Tensor, send_counts: list[int], recv_counts: list[int]) -> Tensor:
    """Return the rows that an all-to-all with these numbers of sent and received rows per rank delivers."""
    if world.size == 1:
        return rows
    received_rows = world.empty((sum(recv_counts), rows.shape[1]), rows.dtype)
    world.backend.all_to_all(received_rows.split(recv_counts), rows.split(send_counts), world.current_stream())
    return received_rows
