"""An MoE layer by the library alone: rows sorted by expert, all-to-all, a grouped GEMM each way, all-to-all back,
weighted sums.

Every route is a row of its own on the way, so a token travels once for each of its experts. The host reads how many.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...world import World
from .steps import Layer, Weights

Tensor = torch.Tensor


def forward(
    world: World, layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, w: Weights, shared: Tensor | None, out: Tensor
) -> list[int]:
    """As `steps.forward`; returns how many rows came to each of this rank's experts."""
    stream, me, size, (tokens, h), k = world.current_stream(), world.rank, world.size, x.shape, layer.k
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
        total = (routes.view(tokens, k, h) * weights[:, :, None]).sum(1)
        out.copy_(total if shared is None else total + shared.float())

    world.call(add, [back, order, weights, *([] if shared is None else [shared])], [out], stream)
    return comes.sum(0).tolist()


def sorted_routes(world: World, layer: Layer, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Routes in the order of their experts, int64 [T k], those of none last; and int64 [W, E] on the host, rows of
    every rank for every expert. Waits for the stream."""
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
    world.synchronize()
    return order, every.view(world.size, experts).cpu()


def exchanged(world: World, rows: Tensor, sends: list[int], gets: list[int]) -> Tensor:
    """All-to-all of rows, so many to each rank and from each."""
    if world.size == 1:
        return rows
    came = world.empty((sum(gets), rows.shape[1]), rows.dtype)
    world.all_to_all(came.split(gets), rows.split(sends), world.current_stream())
    return came


def grouped(rows: Tensor, counts: list[int], w: Weights, activation: str, block: int) -> Tensor:
    """[rows, H] of rows in the order of their experts, by a grouped GEMM where the library has one."""
    whole = rows.is_cuda and rows.dtype == torch.bfloat16 and rows.shape[0] > 0
    ends = torch.tensor(counts).cumsum(0).to(device=rows.device, dtype=torch.int32)
    expert = torch.arange(len(counts), device=rows.device).repeat_interleave(torch.tensor(counts, device=rows.device))

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if whole:
            y = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
        else:
            y = torch.cat([part @ m.t() for part, m in zip(x.split(counts), weight, strict=True)])
        return y if bias is None else y + bias[expert]

    hidden = ACTIVATED[activation](linear(rows, w.w13, w.b13), w.w2.shape[2], block)
    return linear(hidden, w.w2, w.b2)


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
