"""An MoE layer by the library alone: rows sorted by expert, all-to-all, grouped GEMMs, all-to-all back, weighted sums.

Every route is a row of its own, so a token travels once for each of its experts. The host reads the numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....backends import library_gemm
from ....errors import WeftError
from ....plans import Plan
from ....world import World
from ..call import NAME, Layer, MoeCall, MoeOperands, Weights


def run_sequential(world: World, call: MoeCall, plan: Plan, operands: MoeOperands, out: Tensor) -> tuple[Tensor | None]:
    """Run a call as plan Dispatched does. Nothing is saved, whatever the call says: the backward pass sends x again."""
    check_capture(world)
    x, ids, weights, *_, shared, _ = operands
    layer, w, stream, (tokens, h) = call.layer, operands.experts, world.current_stream(), x.shape
    me, size, k = world.rank, world.size, layer.k
    received = call.received(world, operands)
    order, table = sorted_routes(world, layer, ids)
    local_experts = layer.experts // size
    send_counts = table[me].view(size, local_experts).sum(1).tolist()
    recv_table = table.view(size, size, local_experts)[:, me]
    rows, count = world.empty((sum(send_counts), h), x.dtype), sum(send_counts)
    sent_routes = order[:count]
    world.call(lambda: torch.index_select(x, 0, sent_routes // k, out=rows), [x, order], [rows], stream)
    received_rows = exchanged(world, rows, send_counts, recv_table.sum(1).tolist())

    # Received rows are sorted by source, then expert; the GEMMs need them sorted by expert.
    expert_of_row = torch.arange(local_experts).repeat(size).repeat_interleave(recv_table.reshape(-1))
    expert_order = world.tensor(torch.argsort(expert_of_row, stable=True).tolist(), torch.int64)
    y = world.empty(received_rows.shape, x.dtype)

    def experts() -> None:
        outputs = grouped(
            received_rows[expert_order], recv_table.sum(0).tolist(), w, layer.activation, world.backend.scale.interleave
        )
        y.index_copy_(0, expert_order, outputs.to(y.dtype))

    world.call(experts, [received_rows, expert_order, *(t for t in w if t is not None)], [y], stream)
    returned_rows = exchanged(world, y, recv_table.sum(1).tolist(), send_counts)

    def add() -> None:
        routes = torch.zeros(tokens * k, h, dtype=torch.float32, device=x.device)
        routes.index_copy_(0, sent_routes, returned_rows.float())
        valid = (ids >= 0) & (ids < layer.experts)  # the weights of routes to no expert are undefined
        total = (routes.view(tokens, k, h) * torch.where(valid, weights, 0.0)[:, :, None]).sum(1)
        out.copy_(total if shared is None else total + shared.float())

    world.call(add, [returned_rows, order, ids, weights, *([] if shared is None else [shared])], [out], stream)
    if received is not None:
        world.copy(received, world.tensor(recv_table.sum(0).tolist(), torch.int32), stream)
    return (received,)


def backward(
    world: World, layer: Layer, dy: Tensor, operands: MoeOperands, experts: bool
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the gradients of x, of weights, and (if `experts`) of the experts, for `run_sequential` of these
    operands."""
    check_capture(world)
    x, ids, weights, *_ = operands
    w, stream, me, size = operands.experts, world.current_stream(), world.rank, world.size
    (tokens, h), k = x.shape, layer.k
    order, table = sorted_routes(world, layer, ids)
    local_experts = layer.experts // size
    send_counts = table[me].view(size, local_experts).sum(1).tolist()
    recv_table = table.view(size, size, local_experts)[:, me]
    recv_counts, sent_routes = recv_table.sum(1).tolist(), order[: sum(send_counts)]
    sent_operands = [world.empty((sum(send_counts), n), t.dtype) for t, n in ((x, h), (dy, h), (weights, 1))]

    def pick() -> None:
        for t, part in zip((x, dy), sent_operands, strict=False):
            torch.index_select(t, 0, sent_routes // k, out=part)
        torch.index_select(weights.view(-1, 1), 0, sent_routes, out=sent_operands[2])

    world.call(pick, [x, dy, weights, order], sent_operands, stream)
    received_rows = [exchanged(world, t, send_counts, recv_counts) for t in sent_operands]
    expert_of_row = torch.arange(local_experts).repeat(size).repeat_interleave(recv_table.reshape(-1))
    expert_order = world.tensor(torch.argsort(expert_of_row, stable=True).tolist(), torch.int64)
    weights_given = [t for t in w if t is not None]
    results = [world.empty(received_rows[0].shape, x.dtype), world.empty(received_rows[2].shape, torch.float32)]
    results += [world.empty(t.shape, t.dtype) for t in weights_given if experts]

    def gradients() -> None:
        rows, dout, weight = (t[expert_order] for t in received_rows)
        dots, dx, expert_gradients = grouped_gradients(
            rows, dout, weight, recv_table.sum(0).tolist(), w, layer.activation, world.backend.scale.interleave
        )
        results[0].index_copy_(0, expert_order, dx)
        results[1].index_copy_(0, expert_order, dots)
        for t, gradient in zip(results[2:], (g for g in expert_gradients if g is not None), strict=False):
            t.copy_(gradient)

    world.call(gradients, [*received_rows, expert_order, *weights_given], results, stream)
    returned_rows = [exchanged(world, t, recv_counts, send_counts) for t in results[:2]]
    dx, dweights = world.empty(x.shape, x.dtype), world.empty(weights.shape, torch.float32)

    def add() -> None:
        routes = torch.zeros(tokens * k, h, dtype=torch.float32, device=x.device)
        routes.index_copy_(0, sent_routes, returned_rows[0].float())
        dx.copy_(routes.view(tokens, k, h).sum(1))
        dweights.zero_().view(-1, 1).index_copy_(0, sent_routes, returned_rows[1])

    world.call(add, [*returned_rows, order], [dx, dweights], stream)
    expert_gradients = iter(results[2:])
    return dx, dweights, [None if t is None or not experts else next(expert_gradients) for t in w]


def check_capture(world: World) -> None:
    """Raise WeftError inside a CUDA graph capture."""
    if world.backend.capturing():
        raise WeftError(f"{NAME}: a sequential call reads counts on the host, which a CUDA graph cannot hold")


def sorted_routes(world: World, layer: Layer, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return int64 [T k], the routes sorted by expert, those without one last; and int64 [W, E] on the host, the rows
    of every rank for every expert. The call waits for the stream."""
    stream, experts = world.current_stream(), layer.experts
    order, counts = world.empty((ids.numel(),), torch.int64), world.empty((experts,), torch.int64)

    def sort() -> None:
        flat = ids.flatten().long()
        expert = torch.where((flat < 0) | (flat >= experts), experts, flat)
        order.copy_(torch.argsort(expert, stable=True))
        counts.copy_(torch.bincount(expert, minlength=experts + 1)[:experts])

    world.call(sort, [ids], [order, counts], stream)
    all_counts = counts
    if world.size > 1:
        all_counts = world.empty((world.size * experts,), torch.int64)
        world.all_gather(all_counts, counts, stream)
    world.wait_for_streams()
    return order, all_counts.view(world.size, experts).cpu()


def exchanged(world: World, rows: Tensor, send_counts: list[int], recv_counts: list[int]) -> Tensor:
    """Return the rows received in an all-to-all that sends and receives so many rows to and from each rank."""
    if world.size == 1:
        return rows
    received_rows = world.empty((sum(recv_counts), rows.shape[1]), rows.dtype)
    world.backend.all_to_all(received_rows.split(recv_counts), rows.split(send_counts), world.current_stream())
    return received_rows


def grouped_linear(x: Tensor, counts: list[int], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [rows, N]: rows in the order of their experts @ weight [El, N, K] transposed, by a grouped GEMM where the
    library has one."""
    if x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0:
        starts = torch.tensor([0, *counts]).cumsum(0).to(device=x.device, dtype=torch.int32)
        y = library_gemm.multiply_groups(x, weight, starts)
    else:
        y = torch.cat([part @ m.t() for part, m in zip(x.split(counts), weight, strict=True)])
    if bias is None:
        return y
    return y + bias.repeat_interleave(torch.tensor(counts, device=x.device), 0)


def grouped(rows: Tensor, counts: list[int], w: Weights, activation: str, block: int) -> Tensor:
    """Return [rows, H], the experts' results for rows in the order of the experts."""
    preactivation = grouped_linear(rows, counts, w.w13, w.b13)
    return grouped_linear(ACTIVATED[activation](preactivation, w.w2.shape[2], block), counts, w.w2, w.b2)


def grouped_gradients(
    rows: Tensor, dy: Tensor, weight: Tensor, counts: list[int], w: Weights, activation: str, block: int
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the gradients of weight, of rows, and of w13, w2, b13 and b2, for the product of weight [rows, 1] and
    `grouped`."""
    preactivation = grouped_linear(rows, counts, w.w13, w.b13)
    hidden = ACTIVATED[activation](preactivation, w.w2.shape[2], block)
    dots = (grouped_linear(hidden, counts, w.w2, w.b2).float() * dy.float()).sum(1, keepdim=True)
    dy = (dy.float() * weight).to(dy.dtype)
    dhidden = grouped_linear(dy, counts, w.w2.transpose(1, 2), None)
    dpreactivation = activation_gradient(preactivation, dhidden, activation, block)
    dx = grouped_linear(dpreactivation, counts, w.w13.transpose(1, 2), None)

    def products(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([x.t() @ y for x, y in zip(a.split(counts), b.split(counts), strict=True)])

    def sums(a: Tensor, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else torch.stack([part.float().sum(0) for part in a.split(counts)])

    return dots, dx, [products(dpreactivation, rows), products(dy, hidden), sums(dpreactivation, w.b13), sums(dy, w.b2)]


def activation_gradient(preactivation: Tensor, dy: Tensor, activation: str, block: int) -> Tensor:
    """Return the gradient of preactivation, in its layout."""
    if activation == "gelu":
        x = preactivation.float()
        below = 0.5 * (1 + torch.erf(x * 0.5**0.5))
        return (dy.float() * (below + x * torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5)).to(preactivation.dtype)
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
    parts = preactivation.new_zeros(preactivation.shape[0], 2, preactivation.shape[1] // 2)
    parts[:, 0, :inner], parts[:, 1, :inner] = dy.float() * dgate, dy.float() * dup
    return (
        parts.view(preactivation.shape[0], 2, preactivation.shape[1] // (2 * block), block)
        .transpose(1, 2)
        .reshape(preactivation.shape)
    )


def halves(preactivation: Tensor, inner: int, block: int) -> tuple[Tensor, Tensor]:
    """Return float32 gate and up [rows, I] of columns that `pack` interleaved."""
    parts = preactivation.float().view(preactivation.shape[0], preactivation.shape[1] // (2 * block), 2, block)
    return parts[:, :, 0].flatten(1)[:, :inner], parts[:, :, 1].flatten(1)[:, :inner]


def swiglu(preactivation: Tensor, inner: int, block: int) -> Tensor:
    gate, up = halves(preactivation, inner, block)
    return (torch.nn.functional.silu(gate) * up).to(preactivation.dtype)


def gelu(preactivation: Tensor, inner: int, block: int) -> Tensor:
    return torch.nn.functional.gelu(preactivation.float()).to(preactivation.dtype)


def clamped(preactivation: Tensor, inner: int, block: int) -> Tensor:
    gate, up = halves(preactivation, inner, block)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(preactivation.dtype)


ACTIVATED: dict[str, Callable[[Tensor, int, int], Tensor]] = {"swiglu": swiglu, "gelu": gelu, "gpt_oss": clamped}
