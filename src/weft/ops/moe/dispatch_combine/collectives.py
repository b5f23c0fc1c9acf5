"""Dispatch and combine where ranks have no symmetric memory: by the library's collectives.

    dispatch   all-gathers of tokens, ids and weights; rows of this rank's experts picked from all tokens
    combine    weighted sums of every rank's tokens over the experts here, all-to-all, and their sum in rank order

Rows have the order that the kernels give them (op.py).
"""

from __future__ import annotations

import torch

from ....world import World
from ..expert_parallel.place_rows_kernels import ExpertOrder
from ..tensor_parallel.call import Split
from ..tensor_parallel.sequential import gathered, tables

Tensor = torch.Tensor


def place(
    world: World, layer: Split, order: ExpertOrder, weights: Tensor, x: Tensor, ids: Tensor, own_weights: Tensor
) -> Tensor:
    """Tokens of all ranks [W C, H], on the current stream; writes `order` and weights [W, C, k]. layer.tile: what
    every expert's rows begin at a multiple of."""
    tokens, all_ids, all_weights = (
        gathered(world, layer, t, none) for t, none in ((x, 0), (ids, -1), (own_weights, 0))
    )

    def fill() -> None:
        order.ids.copy_(all_ids.view(order.ids.shape))
        weights.copy_(all_weights.view(weights.shape))
        made = tables(order.ids, world.rank, layer, layer.local(world))
        for name in ("slots", "sources", "offsets", "received"):
            getattr(order, name).copy_(made[name].flatten())

    world.call(fill, [all_ids, all_weights], [*order, weights], world.current_stream())
    return tokens


def pick(world: World, tokens: Tensor, sources: Tensor, rows: Tensor) -> None:
    """rows [.., H], in order: those of `sources`; zero where there is none."""
    flat, place = rows.view(-1, rows.shape[-1]), sources.flatten()

    def copy() -> None:
        there = (place >= 0)[:, None]
        flat.copy_(torch.where(there, tokens[place.clamp(min=0).long()], 0))

    world.call(copy, [tokens, sources], [rows], world.current_stream())


def sums(
    world: World, layer: Split, slots: Tensor, weights: Tensor, y: Tensor, shared: Tensor | None, out: Tensor
) -> None:
    """out [T, H] = the sum over a token's routes of weight * its row of y, + shared. slots [W C k]."""
    stream, (size, capacity, k) = world.current_stream(), weights.shape
    parts, received = (world.empty((size, capacity, layer.hidden), layer.dtype) for _ in range(2))
    by_token, flat = slots.view(size * capacity, k), y.view(-1, layer.hidden)

    def add() -> None:
        total = torch.zeros(size * capacity, layer.hidden, dtype=torch.float32, device=y.device)
        for slot, weight in zip(by_token.unbind(1), weights.view(-1, k).unbind(1), strict=True):
            rows = flat[slot.clamp(min=0).long()].float() * weight[:, None]
            total += torch.where((slot >= 0)[:, None], rows, 0)
        parts.copy_(total.view(parts.shape))

    # Rows of no token are anything, and how many these are the host does not know: so that y is read is not told.
    world.call(add, [slots, weights], [parts], stream)
    if world.size > 1:
        world.all_to_all(list(received), list(parts), stream)
    else:
        received = parts

    def total() -> None:
        result = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for part in received[:, : len(out)]:
            result += part.float()
        out.copy_(result if shared is None else result + shared.float())

    world.call(total, [received, *([] if shared is None else [shared])], [out], stream)
