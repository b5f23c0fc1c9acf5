"""An MoE layer by the library alone: rows sorted by expert, all-to-all, a grouped GEMM each way, all-to-all back,
weighted sums.

Every route is a row of its own on the way, so a token travels once for each of its experts. The host reads how many.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....backends import library_gemm
from ....errors import WeftError
from ....plans import Plan
from ....world import World
from ..call import NAME, Layer, MoeCall, MoeOperands, Weights

Tensor = torch.Tensor


def run_sequential(
    world: World, call: MoeCall, plan: Plan, operands: MoeOperands, out: Tensor
) -> tuple[Tensor | None, ...]:
    """Run a call as `steps.run_dispatched` does. Nothing is kept, whatever the call says: its backward pass sends x
    again."""
    check_capture(world)
    x, ids, weights, *_, shared, _ = operands
    layer, w, stream, (tokens, h) = call.layer, operands.experts, world.current_stream(), x.shape
    me, size, k = world.rank, world.size, layer.k
    received, kept = call.buffers(world, operands)
    order, table = sorted_routes(world, layer, ids)
    local = layer.experts // size
    sends = table[me].view(size, local).sum(1).tolist()
    comes = table.view(size, size, local)[:, me]
    rows, count = world.empty((sum(sends), h), x.dtype), sum(sends)
    sent = order[:count]
    world.call(lambda: torch.index_select(x, 0, sent // k, out=rows), [x, order], [rows], stream)
    came = exchanged(world, rows, sends, comes.sum(1).tolist())

    # What came is by source, then expert; the GEMMs want it by expert.
    by = torch.arange(local).repeat(size).repeat_interleave(comes.reshape(-1))
    place = world.tensor(torch.argsort(by, stable=True).tolist(), torch.int64)
    y = world.empty(came.shape, x.dtype)

    def experts() -> None:
        made = grouped(came[place], comes.sum(0).tolist(), w, layer.activation, world.scale.interleave)
        y.index_copy_(0, place, made.to(y.dtype))

    world.call(experts, [came, place, *(t for t in w if t is not None)], [y], stream)
    back = exchanged(world, y, comes.sum(1).tolist(), sends)

    def add() -> None:
        routes = torch.zeros(tokens * k, h, dtype=torch.float32, device=x.device)
        routes.index_copy_(0, sent, back.float())
        there = (ids >= 0) & (ids < layer.experts)  # the weight of a route to nowhere may be anything
        total = (routes.view(tokens, k, h) * torch.where(there, weights, 0.0)[:, :, None]).sum(1)
        out.copy_(total if shared is None else total + shared.float())

    world.call(add, [back, order, ids, weights, *([] if shared is None else [shared])], [out], stream)
    if received is not None:
        world.copy(received, world.tensor(comes.sum(0).tolist(), torch.int32), stream)
    return received, *kept


def backward(
    world: World, layer: Layer, dy: Tensor, operands: MoeOperands, experts: bool
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The gradients of x, weights, and (experts) those of the experts, of `run_sequential` of these."""
    check_capture(world)
    x, ids, weights, *_ = operands
    w, stream, me, size = operands.experts, world.current_stream(), world.rank, world.size
    (tokens, h), k = x.shape, layer.k
    order, table = sorted_routes(world, layer, ids)
    local = layer.experts // size
    sends, comes = table[me].view(size, local).sum(1).tolist(), table.view(size, size, local)[:, me]
    gets, sent = comes.sum(1).tolist(), order[: sum(sends)]
    away = [world.empty((sum(sends), n), t.dtype) for t, n in ((x, h), (dy, h), (weights, 1))]

    def pick() -> None:
        for t, part in zip((x, dy), away, strict=False):
            torch.index_select(t, 0, sent // k, out=part)
        torch.index_select(weights.view(-1, 1), 0, sent, out=away[2])

    world.call(pick, [x, dy, weights, order], away, stream)
    came = [exchanged(world, t, sends, gets) for t in away]
    by = torch.arange(local).repeat(size).repeat_interleave(comes.reshape(-1))
    place = world.tensor(torch.argsort(by, stable=True).tolist(), torch.int64)
    given = [t for t in w if t is not None]
    made = [world.empty(came[0].shape, x.dtype), world.empty(came[2].shape, torch.float32)]
    made += [world.empty(t.shape, t.dtype) for t in given if experts]

    def gradients() -> None:
        rows, dout, weight = (t[place] for t in came)
        dots, dx, of_experts = grouped_gradients(
            rows, dout, weight, comes.sum(0).tolist(), w, layer.activation, world.scale.interleave
        )
        made[0].index_copy_(0, place, dx)
        made[1].index_copy_(0, place, dots)
        for t, gradient in zip(made[2:], (g for g in of_experts if g is not None), strict=False):
            t.copy_(gradient)

    world.call(gradients, [*came, place, *given], made, stream)
    back = [exchanged(world, t, gets, sends) for t in made[:2]]
    dx, dweights = world.empty(x.shape, x.dtype), world.empty(weights.shape, torch.float32)

    def add() -> None:
        routes = torch.zeros(tokens * k, h, dtype=torch.float32, device=x.device)
        routes.index_copy_(0, sent, back[0].float())
        dx.copy_(routes.view(tokens, k, h).sum(1))
        dweights.zero_().view(-1, 1).index_copy_(0, sent, back[1])

    world.call(add, [*back, order], [dx, dweights], stream)
    of_experts = iter(made[2:])
    return dx, dweights, [None if t is None or not experts else next(of_experts) for t in w]


def check_capture(world: World) -> None:
    if world.capturing():
        raise WeftError(f"{NAME}: a sequential call reads counts on the host, which a CUDA graph cannot hold")


def sorted_routes(world: World, layer: Layer, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the routes in the order of their experts, int64 [T k], those of none last; and int64 [W, E] on the host,
    rows of every rank for every expert. Waits for the stream."""
    stream, experts = world.current_stream(), layer.experts
    order, counts = world.empty((ids.numel(),), torch.int64), world.empty((experts,), torch.int64)

    def sort() -> None:
        flat = ids.flatten().long()
        expert = torch.where((flat < 0) | (flat >= experts), experts, flat)
        order.copy_(torch.argsort(expert, stable=True))
        counts.copy_(torch.bincount(expert, minlength=experts + 1)[:experts])

    world.call(sort, [ids], [order, counts], stream)
    every = counts
    if world.size > 1:
        every = world.empty((world.size * experts,), torch.int64)
        world.all_gather(every, counts, stream)
    world.wait_for_streams()
    return order, every.view(world.size, experts).cpu()


def exchanged(world: World, rows: Tensor, sends: list[int], gets: list[int]) -> Tensor:
    """Exchange rows all-to-all, so many to each rank and from each."""
    if world.size == 1:
        return rows
    came = world.empty((sum(gets), rows.shape[1]), rows.dtype)
    world.all_to_all(came.split(gets), rows.split(sends), world.current_stream())
    return came


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
    """Return [rows, H], what the experts make of rows in the order of the experts."""
    both = grouped_linear(rows, counts, w.w13, w.b13)
    return grouped_linear(ACTIVATED[activation](both, w.w2.shape[2], block), counts, w.w2, w.b2)


def grouped_gradients(
    rows: Tensor, dy: Tensor, weight: Tensor, counts: list[int], w: Weights, activation: str, block: int
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the gradients of weight, of rows, and of w13, w2, b13, b2, for weight [rows, 1] times `grouped`."""
    both = grouped_linear(rows, counts, w.w13, w.b13)
    hidden = ACTIVATED[activation](both, w.w2.shape[2], block)
    dots = (grouped_linear(hidden, counts, w.w2, w.b2).float() * dy.float()).sum(1, keepdim=True)
    dy = (dy.float() * weight).to(dy.dtype)
    dhidden = grouped_linear(dy, counts, w.w2.transpose(1, 2), None)
    dboth = activation_gradient(both, dhidden, activation, block)
    dx = grouped_linear(dboth, counts, w.w13.transpose(1, 2), None)

    def products(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([x.t() @ y for x, y in zip(a.split(counts), b.split(counts), strict=True)])

    def sums(a: Tensor, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else torch.stack([part.float().sum(0) for part in a.split(counts)])

    return dots, dx, [products(dboth, rows), products(dy, hidden), sums(dboth, w.b13), sums(dy, w.b2)]


def activation_gradient(both: Tensor, dy: Tensor, activation: str, block: int) -> Tensor:
    """The gradient of `both`, laid out as that is."""
    if activation == "gelu":
        x = both.float()
        below = 0.5 * (1 + torch.erf(x * 0.5**0.5))
        return (dy.float() * (below + x * torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5)).to(both.dtype)
    inner = dy.shape[1]
    gate, up = halves(both, inner, block)
    if activation == "gpt_oss":
        inside, within = gate <= 7, up.abs() <= 7
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        s = torch.sigmoid(1.702 * gate)
        by_gate, by_up = up * s * (1 + 1.702 * gate * (1 - s)) * inside, gate * s * within
    else:
        s = torch.sigmoid(gate)
        by_gate, by_up = up * s * (1 + gate * (1 - s)), gate * s
    parts = both.new_zeros(both.shape[0], 2, both.shape[1] // 2)
    parts[:, 0, :inner], parts[:, 1, :inner] = dy.float() * by_gate, dy.float() * by_up
    return parts.view(both.shape[0], 2, both.shape[1] // (2 * block), block).transpose(1, 2).reshape(both.shape)


def halves(both: Tensor, inner: int, block: int) -> tuple[Tensor, Tensor]:
    """float32 gate and up [rows, I] of what `pack` interleaved."""
    parts = both.float().view(both.shape[0], both.shape[1] // (2 * block), 2, block)
    return parts[:, :, 0].flatten(1)[:, :inner], parts[:, :, 1].flatten(1)[:, :inner]


def swiglu(both: Tensor, inner: int, block: int) -> Tensor:
    gate, up = halves(both, inner, block)
    return (torch.nn.functional.silu(gate) * up).to(both.dtype)


def gelu(both: Tensor, inner: int, block: int) -> Tensor:
    return torch.nn.functional.gelu(both.float()).to(both.dtype)


def clamped(both: Tensor, inner: int, block: int) -> Tensor:
    gate, up = halves(both, inner, block)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(both.dtype)


ACTIVATED: dict[str, Callable[[Tensor, int, int], Tensor]] = {"swiglu": swiglu, "gelu": gelu, "gpt_oss": clamped}
