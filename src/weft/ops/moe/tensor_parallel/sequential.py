"""Both halves by the library alone: all-gathers, an index, a grouped GEMM, and weighted sums that are reduce-scattered.
Nothing is read by the host, but for float16, of which the library has no grouped GEMM.

The routes are those that `place_routes` makes, from sorts and searches, so that either half may follow the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ....backends import library_gemm
from ....errors import WeftError
from ....plans import Plan
from ....world import World
from ..expert_parallel.sequential import ACTIVATED, activation_gradient
from .call import FirstHalfCall, GatherOperands, GroupedCall, ScatterOperands, Split, parts

Tensor = torch.Tensor


def run_gather(
    world: World, call: FirstHalfCall, plan: Plan, operands: GatherOperands, out: Tensor
) -> tuple[Tensor | None, ...]:
    """Run a call as `grouped_steps.run_gather` does. Nothing is kept, whatever the call says: its backward pass sends x
    again."""
    (x, ids, weights, w13, b13), layer = operands, call.layer
    check_capture(world, layer)
    routes, kept = call.buffers(world)
    rows, every, weighed = (gathered(world, layer, t, none) for t, none in ((x, 0), (ids, -1), (weights, 0)))
    to, block = parts(world, layer, routes), world.scale.interleave

    def run() -> None:
        made = tables(every.view(world.size, -1, layer.k), world.rank, layer, layer.local(world))
        for name, values in made.items():
            getattr(to, "tile_count" if name == "count" else name)[: values.numel()] = values.flatten()
        to.weights[: weighed.numel()] = weighed.flatten()
        both = linear(rows[made["sources"].clamp(min=0)], w13, b13, made["offsets"])
        out.copy_(ACTIVATED[layer.activation](both, layer.inner, block))

    read = [rows, every, weighed, w13, *([] if b13 is None else [b13])]
    world.call(run, read, [out, routes], world.current_stream())
    return routes, *kept


def run_scatter(world: World, call: GroupedCall, plan: Plan, operands: ScatterOperands, out: Tensor) -> None:
    """Run a call as `grouped_steps.run_scatter` does, except that parts are summed as the library does."""
    (hidden, routes, _, w2, b2, shared), layer = operands, call.layer
    check_capture(world, layer)
    given, stream, k = parts(world, layer, routes), world.current_stream(), layer.k
    tokens, h = world.size * layer.capacity, layer.hidden
    part, mine = world.empty((tokens, h), layer.dtype), world.empty((layer.capacity, h), layer.dtype)
    slots, weights = (t[: tokens * k].view(tokens, k) for t in (given.slots, given.weights))
    offsets = given.offsets[: layer.local(world) + 1]

    def add() -> None:
        y = linear(hidden, w2, b2, offsets)
        total = torch.zeros(tokens, h, dtype=torch.float32, device=y.device)
        for i in range(k):
            here = slots[:, i : i + 1] >= 0
            total += torch.where(here, y[slots[:, i].clamp(min=0)].float() * weights[:, i : i + 1], 0.0)
        part.copy_(total)

    # Nobody writes the rows of hidden behind the last expert's, and how many they are the host does not know: so that
    # hidden is read is not told.
    world.call(add, [slots, weights, offsets, w2, *([] if b2 is None else [b2])], [part], stream)
    if world.size > 1:
        world.reduce_scatter(mine, part, stream)
    else:
        mine = part

    def end() -> None:
        own = mine[: out.shape[0]]
        out.copy_(own if shared is None else own.float() + shared.float())

    world.call(end, [mine, *([] if shared is None else [shared])], [out], stream)


def gather_gradients(
    world: World, layer: Split, dhidden: Tensor, operands: GatherOperands, routes: Tensor, wants_x: bool, experts: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients that `grouped_backward.first_half` returns; x is sent again."""
    check_capture(world, layer)
    x, _, _, w13, b13 = operands
    rows, stream = gathered(world, layer, x, 0), world.current_stream()
    order = RowOrder.of(world, layer, routes)
    part = world.empty((world.size * layer.capacity, layer.hidden), layer.dtype)
    given = [t for t in (w13, b13) if t is not None]
    made = [world.empty(t.shape, t.dtype) for t in given if experts]

    def run() -> None:
        x_rows = order.placed(rows)
        both = linear(x_rows, w13, b13, order.offsets)
        dboth = activation_gradient(both, dhidden, layer.activation, world.scale.interleave)
        dboth = torch.where(order.there, dboth, 0)
        if wants_x:
            part.copy_(order.summed(linear(dboth, w13.transpose(1, 2), None, order.offsets)))
        for t, of in zip(made, (lambda: order.products(dboth, x_rows), lambda: order.sums(dboth)), strict=False):
            t.copy_(of())

    world.call(run, [rows, *order.read, *given], [part, *made], stream)
    dx = None
    if wants_x:
        mine, dx = part, world.empty(x.shape, x.dtype)
        if world.size > 1:
            mine = world.empty((layer.capacity, layer.hidden), layer.dtype)
            world.reduce_scatter(mine, part, stream)
        world.call(lambda: dx.copy_(mine[: len(dx)]), [mine], [dx], stream)
    return dx, made[0] if experts else None, made[1] if len(made) > 1 else None


def scatter_gradients(
    world: World, layer: Split, dy: Tensor, operands: ScatterOperands, experts: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients that `grouped_backward.second_half` returns."""
    check_capture(world, layer)
    hidden, routes, _, w2, b2, _ = operands
    rows, stream = gathered(world, layer, dy, 0), world.current_stream()
    order = RowOrder.of(world, layer, routes)
    dhidden, droutes = world.empty(hidden.shape, hidden.dtype), world.empty(routes.shape, torch.float32)
    given = [t for t in (w2, b2) if t is not None]
    made = [world.empty(t.shape, t.dtype) for t in given if experts]

    def run() -> None:
        dy_rows, weight = order.placed(rows), order.by_row()
        g = linear(dy_rows, w2.transpose(1, 2), None, order.offsets).float()
        dhidden.copy_(torch.where(order.there, g * weight, 0))
        dots = (g * hidden.float()).sum(1)
        if b2 is not None:
            dots += (dy_rows.float() * b2.float()[order.expert()]).sum(1)
        droutes.zero_()[: order.slots.numel()] = order.of_routes(dots)
        weighted = (dy_rows * weight).to(hidden.dtype)
        for t, of in zip(made, (lambda: order.products(weighted, hidden), lambda: order.sums(weighted)), strict=False):
            t.copy_(of())

    # As in `run_scatter`, that hidden is read is not told.
    world.call(run, [rows, *order.read, *given], [dhidden, droutes, *made], stream)
    return dhidden, droutes, made[0] if experts else None, made[1] if len(made) > 1 else None


@dataclass(frozen=True)
class RowOrder:
    """Rows in expert order, as a call's routes have them."""

    slots: Tensor  # [W C, k]
    weights: Tensor
    sources: Tensor  # [rows]
    offsets: Tensor

    @classmethod
    def of(cls, world: World, layer: Split, routes: Tensor) -> RowOrder:
        given, n, k = parts(world, layer, routes), world.size * layer.capacity * layer.k, layer.k
        slots, weights = (t[:n].view(-1, k) for t in (given.slots, given.weights))
        return cls(slots, weights, given.sources[: layer.rows(world)], given.offsets[: layer.local(world) + 1])

    @property
    def read(self) -> list[Tensor]:
        return [self.slots, self.weights, self.sources, self.offsets]

    @property
    def there(self) -> Tensor:
        """Whether each row is a token's, bool [rows, 1]."""
        return (self.sources >= 0)[:, None]

    def placed(self, tokens: Tensor) -> Tensor:
        """Return tokens [W C, H] in expert order, [rows, H], with zeros in rows of no token."""
        return torch.where(self.there, tokens[self.sources.clamp(min=0).long()], 0)

    def by_row(self) -> Tensor:
        """Return the weights by row, float32 [rows, 1], with 0 for rows of no token."""
        rows = len(self.sources)
        place = torch.where(self.slots >= 0, self.slots, rows).flatten().long()
        of = torch.zeros(rows + 1, device=self.slots.device)
        return of.index_copy(0, place, self.weights.flatten())[:rows, None] * self.there

    def of_routes(self, values: Tensor) -> Tensor:
        """Return values [rows] by route, [W C k], with 0 for routes without a row."""
        return torch.where(self.slots >= 0, values[self.slots.clamp(min=0).long()], 0).flatten()

    def summed(self, rows: Tensor) -> Tensor:
        """Return float32 [W C, H], the sum of rows over a token's routes in their order."""
        total = torch.zeros(len(self.slots), rows.shape[1], device=rows.device)
        for slot in self.slots.unbind(1):
            total += torch.where((slot >= 0)[:, None], rows[slot.clamp(min=0).long()].float(), 0)
        return total

    def expert(self) -> Tensor:
        """Return the expert of each row, [rows]; the last expert for rows behind all."""
        row = torch.arange(len(self.sources), device=self.slots.device)
        return torch.searchsorted(self.offsets[1:].long(), row, right=True).clamp(max=len(self.offsets) - 2)

    def sums(self, rows: Tensor) -> Tensor:
        """Return float32 [El, N], the sums of each expert's rows, which are zero where there is no token."""
        each = torch.arange(len(self.offsets) - 1, device=rows.device)
        return (self.expert() == each[:, None]).float() @ rows.float()

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """Return [El, M, N], a^T b of each expert's rows; a is zero where there is no token."""
        ends = self.offsets[1:].int()
        b = torch.where(self.there, b, 0)
        if a.is_cuda and a.dtype == torch.bfloat16 and not any(t.shape[1] % 8 for t in (a, b)):
            found = torch._grouped_mm(a.t(), b, offs=ends)
            return torch.where(self.offsets.diff()[:, None, None] > 0, found, 0)
        starts = (0, *ends.tolist())
        return torch.stack([a[i:j].t() @ b[i:j] for i, j in pairwise(starts)])


def check_capture(world: World, layer: Split) -> None:
    if world.capturing() and layer.dtype != torch.bfloat16:
        raise WeftError("a sequential call in float16 reads counts on the host, which a CUDA graph cannot hold")


def gathered(world: World, layer: Split, t: Tensor, none: int) -> Tensor:
    """Return t of all ranks, [W C, ..]: rows that a rank does not have are `none`."""
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


def tables(ids: Tensor, me: int, layer: Split, local: int) -> dict[str, Tensor]:
    """The parts of the routes but for the weights (`routing.Tables`), int64. ids [W, C, k]."""
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
        """Return `values` by row, with -1 in rows without a route; behind the last row stands what has no place."""
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
    return dict(
        sources=sources,
        received=counts,
        slots=slots.view(size, routes)[source],  # the order of waves is its own inverse
        offsets=offsets,
        tiles=torch.stack([lo, owner, first, last], 1)[listed],
        count=there.sum()[None],
        targets=touched.sum(1),
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Return [rows, N] for x [rows, K] in expert order, each expert's rows from offsets [El + 1] on; by the library's
    grouped GEMM where it takes them. Behind the last expert's rows there is anything."""
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
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for first, end, matrix in zip((0, *ends), ends, weight, strict=False):
        y[first:end] = x[first:end] @ matrix.t()
    return y
