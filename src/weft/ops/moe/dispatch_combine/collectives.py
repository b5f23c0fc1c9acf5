"""Dispatch and combine with NCCL's collectives, for ranks without symmetric memory.

    dispatch   all-gathers tokens, ids and weights; each rank then selects the rows of its experts from all tokens
    combine    sums the weighted rows of every rank's tokens over this rank's experts; an all-to-all sends these sums to
               the tokens' ranks, which add them in rank order

The rows are in the same order as the rows that the kernels write (op.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernel_launch import Launch, prepared
from ....world import World
from ..expert_parallel.place_rows_kernels import ExpertOrder, count_received
from ..expert_rows import all_to_all, gathered, sum_over_topk, tables
from ..routing.kernels import LEFT_OUT
from ..tensor_parallel.call import Split


def gather_tokens(
    world: World, layer: Split, order: ExpertOrder, weights: Tensor, x: Tensor, ids: Tensor, own_weights: Tensor
) -> Tensor:
    """Return the tokens of all ranks [W, max_tokens, H], flattened. Also fill `order` and weights [W, max_tokens, k].
    All work is on the current stream. The first row of each expert is a multiple of layer.tile."""
    tokens, all_ids, all_weights = (
        gathered(world, layer, t, fill_value) for t, fill_value in ((x, 0), (ids, -1), (own_weights, 0))
    )

    def fill() -> None:
        order.ids.copy_(all_ids.view(order.ids.shape))
        weights.copy_(all_weights.view(weights.shape))
        values = tables(world, layer, order.ids)
        for name in ("route_rows", "sources", "offsets", "received"):
            getattr(order, name).copy_(values[name].flatten())

    world.call(fill, [all_ids, all_weights], [*order, weights], world.current_stream())
    return tokens


def pick_rows(world: World, tokens: Tensor, sources: Tensor, rows: Tensor) -> None:
    """Fill rows [.., H], in expert order, with the tokens that `sources` lists. Rows without a token are set to
    zero."""
    flat, source = rows.view(-1, rows.shape[-1]), sources.flatten()

    def copy() -> None:
        valid = (source >= 0)[:, None]
        flat.copy_(torch.where(valid, tokens[source.clamp(min=0).long()], 0))

    world.call(copy, [tokens, sources], [rows], world.current_stream())


def combine(
    world: World, layer: Split, route_rows: Tensor, weights: Tensor, y: Tensor, shared: Tensor | None, out: Tensor
) -> None:
    """Compute out [T, H] = the sum over a token's routes of weight * its row of y, + shared. route_rows [W max_tokens
    k]."""
    stream, (size, max_tokens_per_rank, k) = world.current_stream(), weights.shape
    rank_sums = world.empty((size, max_tokens_per_rank, layer.hidden), layer.dtype)

    def add() -> None:
        total = sum_over_topk(y.view(-1, layer.hidden), route_rows.view(-1, k), weights.view(-1, k))
        rank_sums.copy_(total.view(rank_sums.shape))

    # The list of reads omits y, because the rows of y without a token are undefined and the host does not know how many
    # there are.
    world.call(add, [route_rows, weights], [rank_sums], stream)
    received = all_to_all(world, rank_sums)

    def total() -> None:
        result = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for part in received[:, : len(out)]:
            result += part.float()
        out.copy_(result if shared is None else result + shared.float())

    world.call(total, [received, *([] if shared is None else [shared])], [out], stream)


def tell_sources(world: World, route_rows: Tensor) -> None:
    """Report to every rank how many rows of that rank's tokens this rank left out. Then count the rows of this rank's
    tokens that other ranks left out. route_rows int32 [W max_tokens k]."""
    stream = world.current_stream()
    if world.size == 1:
        return
    lost = world.empty((world.size, 1), torch.int32)

    def count() -> None:
        lost.copy_((route_rows.view(world.size, -1) == LEFT_OUT.value).sum(1, keepdim=True))
        lost[world.rank].zero_()  # this rank has already counted all rows that it left out

    world.call(count, [route_rows], [lost], stream)
    _count_received(world)(stream, words=all_to_all(world, lost))


@prepared
def _count_received(world: World) -> Launch:
    options = dict(num_warps=1, local=True)
    return Launch(world, count_received, 1, options, guard=world.backend.guard(), W=world.size)
