"""Both halves by the library alone: all-gathers, an index, a grouped GEMM, and weighted sums that are reduce-scattered.
Nothing is read by the host, but for float16, of which the library has no grouped GEMM.

The routes are those that `place_routes` makes, from sorts and searches, so that either half may follow the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import WeftError
from ...world import World
from .grouped_steps import Split, parts
from .sequential import ACTIVATED
from .steps import Weights

Tensor = torch.Tensor


def gather(
    world: World,
    layer: Split,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: Weights,
    hidden: Tensor,
    routes: Tensor,
) -> None:
    """As `grouped_steps.gather`."""
    check_capture(world, layer)
    rows, every, weighed = (gathered(world, layer, t, none) for t, none in ((x, 0), (ids, -1), (weights, 0)))
    to, block = parts(world, layer, routes), world.scale.interleave

    def run() -> None:
        sources, made = tables(every.view(world.size, -1, layer.k), world.rank, layer, layer.local(world))
        for name, values in made.items():
            getattr(to, "tile_count" if name == "count" else name)[: values.numel()] = values.flatten()
        to.weights[: weighed.numel()] = weighed.flatten()
        both = linear(rows[sources.clamp(min=0)], w.w13, w.b13, made["offsets"])
        hidden.copy_(ACTIVATED[layer.activation](both, layer.inner, block))

    read = [rows, every, weighed, w.w13, *([] if w.b13 is None else [w.b13])]
    world.call(run, read, [hidden, routes], world.current_stream())


def scatter(
    world: World,
    layer: Split,
    hidden: Tensor,
    routes: Tensor,
    w: Weights,
    shared: Tensor | None,
    out: Tensor,
) -> None:
    """As `grouped_steps.scatter`, but that parts are summed as the library does."""
    check_capture(world, layer)
    given, stream, k = parts(world, layer, routes), world.current_stream(), layer.k
    tokens, h = world.size * layer.capacity, layer.hidden
    part, mine = world.empty((tokens, h), layer.dtype), world.empty((layer.capacity, h), layer.dtype)
    slots, weights = (t[: tokens * k].view(tokens, k) for t in (given.slots, given.weights))
    offsets = given.offsets[: layer.local(world) + 1]

    def add() -> None:
        y = linear(hidden, w.w2, w.b2, offsets)
        total = torch.zeros(tokens, h, dtype=torch.float32, device=y.device)
        for i in range(k):
            here = slots[:, i : i + 1] >= 0
            total += torch.where(here, y[slots[:, i].clamp(min=0)].float() * weights[:, i : i + 1], 0.0)
        part.copy_(total)

    # Nobody writes the rows of hidden behind the last expert's, and how many they are the host does not know: so that
    # hidden is read is not told.
    world.call(add, [slots, weights, offsets, w.w2, *([] if w.b2 is None else [w.b2])], [part], stream)
    if world.size > 1:
        world.reduce_scatter(mine, part, stream)
    else:
        mine = part

    def end() -> None:
        own = mine[: out.shape[0]]
        out.copy_(own if shared is None else own.float() + shared.float())

    world.call(end, [mine, *([] if shared is None else [shared])], [out], stream)


def check_capture(world: World, layer: Split) -> None:
    if world.capturing() and layer.dtype != torch.bfloat16:
        raise WeftError("a sequential call in float16 reads counts on the host, which a CUDA graph cannot hold")


def gathered(world: World, layer: Split, t: Tensor, none: int) -> Tensor:
    """[W, C, ..] as [W C, ..]: rows that a rank does not have are `none`."""
    stream, capacity = world.current_stream(), layer.capacity
    if t.shape[0] < capacity:
        padded = world.empty((capacity, *t.shape[1:]), t.dtype)

        def fill() -> None:
            padded[: t.shape[0]] = t
            padded[t.shape[0] :] = none

        world.call(fill, [t], [padded], stream)
        t = padded
    if world.size == 1:
        return t
    full = world.empty((world.size * capacity, *t.shape[1:]), t.dtype)
    world.all_gather(full, t, stream)
    return full


def tables(ids: Tensor, me: int, layer: Split, local: int) -> tuple[Tensor, dict[str, Tensor]]:
    """int64 sources [rows], and the parts of the routes but for the weights (`routing.Tables`). ids [W, C, k]."""
    (size, capacity, k), tile, device = ids.shape, layer.tile, ids.device
    wave = torch.arange(size, device=device)
    source = (me - wave) % size
    e = ids[source].flatten().long() - me // layer.sharing * local
    expert = torch.where((e >= 0) & (e < local) & (ids[source].flatten() >= 0), e, local)
    order = torch.argsort(expert, stable=True)
    of = expert[order]
    starts = torch.searchsorted(of, torch.arange(local + 1, device=device))
    counts = starts.diff()
    offsets = torch.nn.functional.pad((-(-counts // tile) * tile).cumsum(0), (1, 0))
    n = torch.arange(order.numel(), device=device)
    rows = -(-size * capacity * min(k, local) // tile) * tile + local * tile
    row = torch.where(of < local, offsets[of] + n - starts[of], rows)

    def by_row(values: Tensor) -> Tensor:
        """-1 in rows without a route; behind the last row, what has no place."""
        return torch.full((rows + 1,), -1, device=device).index_copy(0, row, values)

    routes = capacity * k
    slots = torch.empty_like(row).index_copy(0, order, torch.where(of < local, row, -1))
    sources = by_row(source[order // routes] * capacity + order % routes // k)[:rows]
    waves = by_row(order // routes)
    lo = torch.arange(0, rows, tile, device=device)
    there = lo < offsets[-1]
    owner = torch.searchsorted(offsets[1:], lo, right=True).clamp(max=local - 1)
    end = torch.minimum(lo + tile, offsets[owner] + counts[owner]) - 1
    first, last = waves[lo], waves[torch.where(there, end, lo)]
    listed = torch.argsort(torch.where(there, last, size), stable=True)
    touched = there & (first <= wave[:, None]) & (last >= wave[:, None])
    return sources, dict(
        slots=slots.view(size, routes)[source],  # the order of waves is its own inverse
        offsets=offsets,
        tiles=torch.stack([lo, owner, first, last], 1)[listed],
        count=there.sum()[None],
        targets=touched.sum(1),
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """[rows, N] of x [rows, K] in expert order, each expert's rows from offsets [El + 1] on; by the library's grouped
    GEMM where it takes them. Behind the last expert's rows there is anything."""
    ends = offsets[1:].int()
    if x.is_cuda and x.dtype == torch.bfloat16 and not any(n % 8 for n in weight.shape[1:]):
        y = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    else:
        y = product(x, weight, ends.tolist())
    if bias is None:
        return y
    expert = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device, dtype=torch.int32), right=True)
    return y + bias[expert.clamp(max=len(weight) - 1)]


def product(x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for first, end, matrix in zip((0, *ends), ends, weight, strict=False):
        y[first:end] = x[first:end] @ matrix.t()
    return y
