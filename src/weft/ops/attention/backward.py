"""Gradients of gathered attention.

    main stream  stage | barrier | own gradients     | of others' keys .. | all-to-all of dk, dv | sums
    copy stream               | pull | pull | meet

The library's backward pass computes the probabilities again as exp(score - lse). With the lse and the output of all
keys it is exact for some of them, so that dq is a sum over calls, and dk and dv of a call are those of its keys. Those
of other ranks' keys go home, where they are summed in float32 in the order of the ranks; each was rounded once before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ...plans import Plan, Segmented
from ...tensor_checks import dense
from ...world import World
from .key_ranges import Sight
from .libraries import Packed, Passed
from .segmented import Heads, Keys, Views, bounds_of, fetched

Tensor = torch.Tensor


class Attended(NamedTuple):
    """The queries and results of a call, and the gradient of `out`, for all queries of this rank. q, out, dout [m,
    heads, D]; lse [heads, m]."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor

    def since(self, first: int) -> Attended:
        return Attended(self.q[first:], self.out[first:], self.lse[:, first:], self.dout[first:])


def backward(
    world: World,
    of: Heads,
    plan: Plan,
    seen: Sight,
    views: Views,
    result: Attended,
    own: Keys,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Return dq, dk, dv, with None for one that is not needed."""
    stream, m, n = world.current_stream(), len(result.q), len(own.k)
    result = Attended(*map(dense, result))  # cuDNN reads whole 16-byte words, and a gradient may begin anywhere
    row = (2, of.kv_heads, of.dim)
    if seen.packed and isinstance(plan, Segmented):
        plan = replace(plan, calls=1)
    others, end = fetched(world, of, plan, own, seen.others, views)
    mine = world.zeros((n, *row), torch.float32)
    dqs: list[tuple[int, Tensor]] = []
    parts: dict[int, Tensor] = {}
    for square in seen.own if m else ():
        dq, *pair = gradients(world, of, result, own.rows(square.lo, square.hi), seen.packed or square.causal)
        dqs.append((0, dq))
        add(world, mine[square.lo : square.hi].unbind(1), pair)
    for group, there in others:
        if m > group.first:
            dq, *pair = gradients(world, of, result.since(group.first), there, seen.packed or False)
            dqs.append((group.first, dq))
            pairs = co_resident(world, pair)
        else:
            pairs = world.zeros((group.rows, *row), of.dtype)
        at = 0
        for piece in group.pieces:
            count = piece.hi - piece.lo
            part, at = pairs[at : at + count], at + count
            if piece.source == world.rank:  # packed sequences have them in one run with the others
                add(world, [mine[piece.lo : piece.hi]], [part])
            else:
                parts[piece.source] = part
    if end is not None:
        world.wait_event(stream, end)
    if needs[1] or needs[2]:
        mine = summed_at_home(world, of, views, parts, mine)
    both = [rounded(world, t, of.dtype) if need else None for t, need in zip(mine.unbind(1), needs[1:3], strict=True)]
    return [summed(world, dqs, result.q) if needs[0] else None, *both]


def gradients(world: World, of: Heads, result: Attended, keys: Keys, mask: bool | Packed) -> Sequence[Tensor]:
    """Return dq, dk, dv of these keys."""
    (q, out, lse, dout), (k, v, wait) = result, keys
    passed = Passed(q, k, v, out, lse, dout)
    library = of.library(world, "packed_backward" if isinstance(mask, Packed) else "backward", min(len(q), len(k)))
    wanted = [(t.shape, of.dtype) for t in (q, k, v)]
    bounds = bounds_of(world, mask) if isinstance(mask, Packed) else None
    if wait is not None:
        wait()

    def attention() -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(mask, bool):
            return library.backward(passed, mask, of.scale)
        assert library.packed_backward is not None and bounds is not None
        return library.packed_backward(passed, mask, bounds, of.scale)

    return world.results(attention, wanted, [*passed, *(bounds or ())], world.current_stream())


def add(world: World, totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    def sums() -> None:
        for total, part in zip(totals, parts, strict=True):
            total.add_(part)

    world.call(sums, [*totals, *parts], totals, world.current_stream())


def co_resident(world: World, both: list[Tensor]) -> Tensor:
    """Return dk and dv as one tensor [n, 2, kv heads, D]."""
    n, *row = both[0].shape
    pairs = world.empty((n, 2, *row), both[0].dtype)
    world.call(lambda: torch.stack(both, 1, out=pairs), both, [pairs], world.current_stream())
    return pairs


def summed(world: World, dqs: Sequence[tuple[int, Tensor]], q: Tensor) -> Tensor:
    """Return dq in the dtype of q, summed in float32 and rounded once. dqs: parts, each for the rows from its `first`
    on; the parts that come first have all rows."""
    if len(dqs) == 2 and dqs[0][0] == 0:
        (_, total), (first, part) = dqs
        add(world, [total[first:]], [part])  # torch adds two numbers of 16 bits in float32
        return total
    total = world.zeros(q.shape, torch.float32)
    for first, part in dqs:
        add(world, [total[first:]], [part])
    return rounded(world, total, q.dtype)


def rounded(world: World, t: Tensor, dtype: torch.dtype) -> Tensor:
    out = world.empty(t.shape, dtype)
    world.call(lambda: out.copy_(t), [t], [out], world.current_stream())
    return out


def summed_at_home(world: World, of: Heads, views: Views, parts: dict[int, Tensor], mine: Tensor) -> Tensor:
    """Return float32 [n, 2, kv heads, D]: the gradients of this rank's keys, summed over all ranks in the order of the
    ranks. parts: by rank, this rank's gradients of that rank's keys."""
    if world.size == 1:
        return mine
    stream, row = world.current_stream(), (2, of.kv_heads, of.dim)
    others = [groups if r != world.rank else () for r, groups in enumerate(views)]
    comes = [next((p for group in groups for p in group.pieces if p.source == world.rank), None) for groups in others]
    sent = [parts[r] if r in parts else world.empty((0, *row), of.dtype) for r in range(world.size)]
    came = [world.empty((0 if p is None else p.hi - p.lo, *row), of.dtype) for p in comes]
    world.all_to_all(came, sent, stream)
    total = world.zeros(mine.shape, torch.float32)

    def sums() -> None:
        for rank, (piece, part) in enumerate(zip(comes, came, strict=True)):
            if rank == world.rank:
                total.add_(mine)
            elif piece is not None:
                total[piece.lo : piece.hi].add_(part)

    world.call(sums, [mine, *came], [total], stream)
    return total


def sinks_gradient(world: World, sinks: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """A sink's weight is exp(sink - lse), and its value is 0."""
    assert sinks is not None
    made, logits = world.empty(sinks.shape, sinks.dtype), sinks

    def sums() -> None:
        delta = (dout.float() * out.float()).sum(-1)
        made.copy_(-((logits.float() - lse.t()).exp() * delta).sum(0))

    world.call(sums, [sinks, out, lse, dout], [made], world.current_stream())
    return made
