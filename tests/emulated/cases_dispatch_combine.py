"""Cases of `weft.moe.dispatch` and `combine`, whose results must equal the reference bit for bit; each function runs on
one rank."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl

import weft
from tests.emulated.cases import distance, draw, on_stream
from tests.emulated.cases_moe import Ids, Memory, at_random, routed, some_nowhere
from tests.emulated.cases_routing import tables_of
from weft import moe
from weft.ops.moe.call import Layer
from weft.ops.moe.dispatch_combine import op
from weft.ops.moe.expert_parallel import dispatched

BF = torch.bfloat16


def scaled(x: torch.Tensor, expert: torch.Tensor | int) -> torch.Tensor:
    """Scale rows as the experts of these cases do; the scaling is exact in bfloat16."""
    return x * 2.0 ** (torch.as_tensor(expert) % 5)


@weft.jit(do_not_specialize=("first_expert",))
def scale_rows(
    rows, y, offsets, counts, padding, first_expert, EL: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Write the scaled rows of the experts from `first_expert` on to y. `padding` [EL] counts the nonzero words after
    the rows of each expert."""
    cols = tl.arange(0, P)
    for e in range(tl.program_id(0), EL, tl.num_programs(0)):
        begin = tl.load(offsets + e)
        end = begin + tl.load(counts + e)
        for row in range(begin, end):
            row_offsets = row.to(tl.int64) * H + cols
            x = tl.load(rows + row_offsets, mask=cols < H, other=0.0).to(tl.float32)
            tl.store(
                y + row_offsets,
                (x * (1 << ((first_expert + e) % 5)).to(tl.float32)).to(y.dtype.element_ty),
                mask=cols < H,
            )
        if PADDED:
            wrong = 0
            for lo in range(end, tl.load(offsets + e + 1), 16):
                row = lo + tl.arange(0, 16)[:, None]
                ok = (row < tl.load(offsets + e + 1)) & (cols < H)[None, :]
                x = tl.load(rows + row.to(tl.int64) * H + cols[None, :], mask=ok, other=0.0)
                wrong += tl.sum((x != 0.0).to(tl.int32))
            tl.store(padding + e, wrong)


def expected_combine(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor, experts: int, ranks: int
) -> Any:
    """Sum each rank's results in the order of the top-k slots, round the sums, and add them in the order of the
    ranks."""
    total, local = torch.zeros(x.shape), experts // ranks
    for rank in range(ranks):
        part = torch.zeros(x.shape)
        for slot in range(ids.shape[1]):
            expert = ids[:, slot]
            on_rank = (expert >= 0) & (expert // local == rank)
            part += torch.where(on_rank, weights[:, slot], 0.0)[:, None] * scaled(
                x.float(), expert.clamp(min=0)[:, None]
            )
        total += part.to(x.dtype).float()
    return (total + shared.float()).to(x.dtype)


@dataclass
class Routed:
    """The routes of all ranks in a call, and their results on one rank."""

    ids: list[torch.Tensor]  # one tensor per rank
    experts: int
    alignment: int
    most: int  # the largest number of rows of an expert; 0: no limit

    def tables(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the tables for contiguous rows; sources, counts and drops are included only if each expert has a row
        limit."""
        ranks, capacity = len(self.ids), max(1, *map(len, self.ids))
        ids_all = torch.full((ranks, capacity, self.ids[0].shape[1]), -1)
        for r, ids in enumerate(self.ids):
            ids_all[r, : len(ids)] = ids
        local = self.experts // ranks
        rows = ids_all.numel() + (local + 1) * self.alignment
        tables = tables_of(ids_all, rank, local, rows, self.alignment)
        if self.most:
            starts, received = tables["offsets"][:-1], tables["received"]
            tables["counts"] = received.clamp(max=self.most)
            place = torch.arange(self.most)
            row_indices = (starts[:, None] + place).clamp(max=rows - 1)
            tables["sources"] = torch.where(place < received[:, None], tables["sources"][row_indices], -1)
            tables["offsets"] = torch.arange(local + 1) * self.most
            slots = tables["route_rows"].view(ids_all.shape)
            expert = (ids_all - rank * local).clamp(0, local - 1)
            tables["kept"] = (slots < 0) | (slots - starts[expert] < self.most)
        else:
            tables["counts"], tables["kept"] = tables["received"], torch.ones(ids_all.shape, dtype=torch.bool)
        return tables

    def kept(self, rank: int) -> torch.Tensor:
        """Return a rank's ids, with -1 for each route that another rank dropped for lack of room."""
        kept = torch.stack([self.tables(r)["kept"][rank] for r in range(len(self.ids))]).all(0)
        return torch.where(kept[: len(self.ids[rank])], self.ids[rank], -1)


@torch.no_grad()  # without gradients, the handle contains the buffer's own tables
def launch_dispatch(
    world: weft.World, operands: op.DispatchOperands, options: tuple[Any, ...]
) -> tuple[torch.Tensor, weft.moe.Handle]:
    """Call `weft.moe.dispatch` with contiguous tensors, without waiting for it."""
    call = op.DISPATCH_OP.check(world, operands, options)
    plan = op.DISPATCH_OP.choose(world, call, "auto", False)
    rows = world.empty(call.exchange.shape(world), operands.x.dtype)
    handle_tensors = op.run_dispatch(world, call, plan, operands, rows)
    rows_and_handle: tuple[torch.Tensor, weft.moe.Handle] = op.DISPATCH_OP.postprocess(
        world, plan, operands, options, (rows, *handle_tensors)
    )
    return rows_and_handle


def launch_combine(
    world: weft.World, y: torch.Tensor, handle: weft.moe.Handle, shared: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Call `weft.moe.combine` with contiguous tensors, without waiting for it."""
    operands = op.CombineOperands(y, handle.weights, handle.ids, handle.handle_id, shared)
    call = op.COMBINE_OP.check(world, operands, handle.options)
    op.run_combine(world, call, op.COMBINE_OP.choose(world, call, handle.plan, False), operands, out)


@dataclass
class Caller:
    """The calls of one rank. The class writes the operands to `memory` and copies the results from there."""

    world: weft.World
    memory: Memory
    layer: Layer
    tokens: Sequence[int]
    ids_of: Ids
    layout: str
    alignment: int
    max_m: int
    dropped: Counter[int] = field(default_factory=Counter)  # rows by the rank that dropped them
    seen: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # results, and their expected values

    def see(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        self.seen.append((self.memory.copy(actual), expected))

    def dispatch(self, call: int, place: int) -> tuple[Any, ...]:
        """Dispatch inputs that are stored in `memory` under `place`."""
        world, layer, me = self.world, self.layer, self.world.rank
        counts = tuple(self.tokens[(r + call) % len(self.tokens)] for r in range(world.size))
        every, masked = world.size * max(1, *counts), self.layout == "masked"
        ids = [self.ids_of(call, r, t, layer, world.size).int() for r, t in enumerate(counts)]
        routes = Routed(ids, layer.experts, 1 if masked else self.alignment, masked * min(self.max_m or every, every))
        x = draw(10 * call + me, counts[me], layer.hidden, dtype=layer.dtype)
        weights = draw(10 * call + 5 + me, counts[me], layer.k, dtype=torch.float32)
        values = dict(x=x, ids=routes.ids[me], weights=weights)
        operands = [self.memory.write((place, name), t) for name, t in values.items()]
        options = (counts, layer.experts, self.layout, self.alignment, self.max_m or None, None)
        rows, handle = launch_dispatch(world, op.DispatchOperands(*operands), options)
        self.memory.write((place, "ids"), torch.full_like(values["ids"], 99))  # the caller may overwrite its ids
        tables = routes.tables(me)
        for rank in range(world.size):
            everything = routes.tables(rank)
            lost = (~everything["kept"]).sum((1, 2))
            self.dropped[rank] += int(lost.sum() if rank == me else lost[me])
        for name in ("counts", "offsets", "sources"):
            actual = getattr(handle, name)
            self.see(actual, tables[name].flatten()[: actual.numel()].view(actual.shape))
        expected = expected_combine(x, routes.kept(me), weights, draw(call, *x.shape), layer.experts, world.size)
        return rows, handle, self.memory.write((place, "shared"), draw(call, *x.shape)), expected

    def experts(self, rows: torch.Tensor, handle: weft.moe.Handle) -> torch.Tensor:
        """Write the experts' results for the rows that they received. Fill the other rows with poison, and padding with
        zeros."""
        world, local = self.world, self.layer.experts // self.world.size
        y, padding = world.empty(rows.shape, rows.dtype), world.zeros((local,), torch.int32)
        args = dict(
            rows=rows, y=y, offsets=handle.offsets, counts=handle.counts, padding=padding, first_expert=world.rank * local,
            EL=local, H=self.layer.hidden, P=dispatched.power(self.layer.hidden), PADDED=self.layout == "contiguous",
        )  # fmt: skip
        world.launch(scale_rows, min(local, world.sm_count), args, dict(num_warps=4), world.current_stream())
        self.see(padding, torch.zeros(local))
        return y

    def combine(
        self, y: torch.Tensor, handle: weft.moe.Handle, shared: torch.Tensor, expected: torch.Tensor, place: int
    ) -> None:
        out = self.memory.write((place, "out"), torch.zeros_like(expected))
        launch_combine(self.world, y, handle, shared, out)
        self.see(out, expected)


@contextlib.contextmanager
def overflows(world: weft.World, reported: Counter[int]) -> Iterator[None]:
    """Add to `reported` the number of rows that an Overflow counts for each rank: all rows that this rank's experts
    dropped, and this rank's tokens that other ranks dropped."""
    try:
        yield
    except weft.Overflow as e:
        for rank, rows in re.findall(r"(?:rank (\d+)'s|its) experts received (\d+)", str(e)):
            reported[int(rank or world.rank)] += int(rows)


def noticed(world: weft.World) -> Counter[int]:
    """Wait for all work, and return the counts of the Overflow if one was raised."""
    reported = Counter[int]()
    with overflows(world, reported):
        world.synchronize()
    world.synchronize()
    return reported


def overfull(call: int, rank: int, t: int, layer: Layer, world: int) -> torch.Tensor:
    """In every other call the first experts receive more rows than fit. The surplus rows belong to tokens that fitted
    in the previous call, and the outboxes still contain those tokens' sums."""
    if call % 2 == 0:
        return at_random(call, rank, t, layer, world)
    return torch.arange(layer.k).expand(t, -1)


def exchange_case(
    world: weft.World, experts: int = 4, k: int = 2, hidden: int = 40, tokens: Sequence[int] = (7, 5, 0, 9), calls: int = 2,
    flight: int = 2, streams: Sequence[str] = ("main",), layout: str = "contiguous", alignment: int = 1, max_m: int = 0,
    ids_of: Ids = at_random,
) -> int:  # fmt: skip
    """Return the number of wrong results. `flight` calls are pending at once, on alternating streams."""
    layer = Layer(max(tokens), experts, k, hidden, 8, BF)
    caller = Caller(world, Memory(world), layer, tokens, ids_of, layout, alignment, max_m)
    for call in range(calls):
        in_flight = []
        for j in range(flight):
            with on_stream(world, streams[(flight * call + j) % len(streams)]):
                in_flight.append(caller.dispatch(flight * call + j, j))
        for j, (rows, handle, shared, expected) in enumerate(in_flight):
            with on_stream(world, streams[(flight * call + j) % len(streams)]):
                caller.combine(caller.experts(rows, handle), handle, shared, expected, j)
    assert noticed(world) == caller.dropped
    return sum(not torch.equal(actual, expected.to(actual.dtype)) for actual, expected in caller.seen)


# -- with gradients, and with torch's grouped GEMM as the experts ------------------------------------------------------
Routes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x, ids, weights


def by_grouped_gemm(rows: torch.Tensor, handle: weft.moe.Handle, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Apply the experts by a grouped GEMM, which saves the handle's offsets for its backward pass."""
    ends = handle.offsets[1:]
    return torch._grouped_mm(torch._grouped_mm(rows, w1, offs=ends).relu(), w2, offs=ends)


def microbatches(world: weft.World, routes: Routes, w1: torch.Tensor) -> tuple[Routes, Routes]:
    """Return two microbatches: these tokens, and different tokens with different routes."""
    x, ids, weights = routes
    return routes, (x.flip(0), (ids + 1) % (w1.shape[0] * world.size), weights)


def two_under_way(
    world: weft.World, routes: Routes, w1: torch.Tensor, w2: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of two microbatches' results, one of which is used twice, and the counts in their handles."""
    experts = w1.shape[0] * world.size
    (a, handle_a), (b, handle_b) = (
        weft.moe.dispatch(*microbatch, experts=experts, world=world, **options)
        for microbatch in microbatches(world, routes, w1)
    )
    counts = handle_a.counts + handle_b.counts
    y = weft.moe.combine(by_grouped_gemm(a, handle_a, w1, w2), handle_a, shared=routes[0])
    return y + 2 * weft.moe.combine(by_grouped_gemm(b, handle_b, w1, w2), handle_b, shared=routes[0]), counts


def one_by_one(
    world: weft.World, routes: Routes, w1: torch.Tensor, w2: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same results as `two_under_way`, but with calls that follow one another."""
    results, counts = [], []
    for microbatch in microbatches(world, routes, w1):
        rows, handle = weft.moe.dispatch(*microbatch, experts=w1.shape[0] * world.size, world=world, **options)
        counts.append(handle.counts.clone())
        results.append(weft.moe.combine(by_grouped_gemm(rows, handle, w1, w2), handle, shared=routes[0]))
    return results[0] + 2 * results[1], counts[0] + counts[1]


def trained(
    world: weft.World,
    step: Any,
    routes: Routes,
    w1: torch.Tensor,
    w2: torch.Tensor,
    wants: Sequence[str] = ("x", "weights", "w1", "w2"),
    **options: Any,
) -> list[torch.Tensor]:
    """Return the result and the counts of the training step `step`, and the requested gradients."""
    x, ids, weights = routes
    leaves = dict(x=x, weights=weights, w1=w1, w2=w2)
    leaves = {name: t.detach().clone().requires_grad_(name in wants) for name, t in leaves.items()}
    y, counts = step(world, (leaves["x"], ids, leaves["weights"]), leaves["w1"], leaves["w2"], **options)
    gradients = torch.autograd.grad(y, [leaves[name] for name in wants], y.detach().flip(0))
    return [y.detach(), counts, *gradients]


def exchanged(world: weft.World, wants: tuple[str, ...], **options: Any) -> float:
    """Return the error of the gradients of dispatch, an expert's scale, and combine, over two microbatches."""
    counts, experts, k, h = [[9, 5, 7, 0][r % 4] for r in range(world.size)], 2 * world.size, 2, 32
    layer, kept = Layer(max(counts), experts, k, h, 8, torch.bfloat16), []
    for call in range(2):
        operands = routed(call, world.rank, counts[world.rank], layer, world.size, some_nowhere)
        x, ids, weights, shared, dy = (t.to(world.device) for t in operands)
        leaves = dict(x=x, weights=weights, shared=shared)
        leaves = {name: t.clone().requires_grad_(name in wants) for name, t in leaves.items()}
        rows, handle = moe.dispatch(
            leaves["x"], ids, leaves["weights"], experts=experts, world=world, rows=counts, **options
        )
        scale = torch.full((), 3.0, dtype=torch.bfloat16, device=world.device, requires_grad=True)
        y = moe.combine(rows * scale, handle, shared=leaves["shared"])
        y.backward(dy)
        wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
        weight = torch.where(ids >= 0, wide["weights"], 0.0).sum(1, keepdim=True)
        (3 * weight * wide["x"] + wide["shared"]).backward(dy.double())
        kept += [(leaves[name].grad, wide[name].grad) for name in wants]
    world.synchronize()
    return max((distance(actual, expected) for actual, expected in kept if actual.numel()), default=0.0)  # type: ignore[arg-type, union-attr]
