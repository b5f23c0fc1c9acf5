"""x @ weight.T, whose rows each go to a rank of their own: a GEMM + all-to-all, as after the experts of an MoE layer.

    Routing    every rank's destinations, known to all: so each rank computes where any rank puts its rows, and how many
               each collective brings, without asking
    signaled   signaled_gemm puts the rows of a group (whole rows of tiles) destination by destination; each group
               is one all-to-all of the library with the group's own counts, or is pulled by copy engines. A rank gets
               rows in the order in which they were computed, so nothing is to be put in order sequential GEMM, rows
               sorted by destination, one all-to-all

A rank whose GEMM has fewer waves than the longest takes part in the last collectives with nothing to send.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from ...backends.base import Stream
from ...errors import Mismatch
from ...kernel_launch import Launch
from ...op import check_call, registered
from ...plans import Plan, Sequential, Signaled, TwoLevel
from ...tensor_checks import check_device
from ...torch_library import CallOptions
from ...transport.copy_engine import COPIES, pull_from_all
from ...transport.memory import lock, workspace
from ...transport.signals import Signals, exchange_groups, prepare, schedule, schedule_of
from ...world import Memo, World, disagreement
from ..common import Factors, MatmulCall, MatmulOp, whole_words
from ..matmul_reduce.signaled import Tiling, gemm_launch
from ..recipes import validate
from ..two_level import run_exchange

_OP = "matmul_all_to_all"
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Routing:
    """Where every rank's rows go. Made by `weft.route` for one World; holds what ops prepared for it on the device, so
    keep it while the same routing is used again, in a CUDA graph at least as long as the graph.

    `counts[s][d]`: rows that rank s sends to rank d. A rank gets rows in the order of their ranks, and of the rows of
    each.
    """

    counts: tuple[tuple[int, ...], ...]
    destinations: tuple[np.ndarray, ...] = field(repr=False)  # int64 [rows], by rank
    key: str
    world: weakref.ref[World] = field(repr=False)
    prepared: Memo = field(default_factory=dict, repr=False)

    def keep(self, world: World, key: Hashable, make: Callable[[], R]) -> R:
        """What was prepared for this routing, made at the first use."""
        if key not in self.prepared:
            world._no_capture(_OP)
            with world.persistent_allocation():
                self.prepared[key] = make()
        return self.prepared[key]

    def by_destination(self, world: World) -> torch.Tensor:
        """Return this rank's rows in the order of the ranks that they go to."""
        rows = self.destinations[world.rank]
        return self.keep(world, "order", lambda: world.tensor(np.argsort(rows, kind="stable").tolist(), torch.int64))


def route(destinations: Sequence[int] | torch.Tensor, *, world: World) -> Routing:
    """Collective: the Routing of rows whose ranks `destinations` names on every rank, one for each row.

    destinations: integers from 0 to world.size - 1, any number of them; a tensor on a GPU is copied to the host, which
    waits for it. Raises ValueError or TypeError on all ranks if one rank's are wrong.
    """
    check_call("route", world)
    said, mine = "", np.zeros(0, np.int64)
    try:
        t = torch.as_tensor(destinations)
        if t.numel() == 0:
            t = t.to(torch.int64)
        if t.dim() != 1 or t.dtype.is_floating_point or t.dtype == torch.bool:
            said = f"must be a list of integers, got {list(t.shape)} {t.dtype}"
        else:
            mine = t.cpu().numpy().astype(np.int64)
            if len(mine) and not 0 <= mine.min() <= mine.max() < world.size:
                said = f"go from {mine.min()} to {mine.max()}, in a world of {world.size} ranks"
    except (TypeError, ValueError, RuntimeError) as e:
        said = f"must be a list of integers: {e}"
    theirs = world.exchange(("route", said, mine.astype(np.int32).tobytes()))
    here = [isinstance(their, tuple) and len(their) == 3 and their[0] == "route" for their in theirs]
    if not all(here):
        calls = [("route", ()) if is_here else their for is_here, their in zip(here, theirs, strict=True)]
        raise disagreement(dict(enumerate(calls)))
    for rank, (_, wrong, _) in enumerate(theirs):
        if wrong:
            raise ValueError(f"route: destinations of rank {rank} {wrong}")
    rows = tuple(np.frombuffer(raw, np.int32).astype(np.int64) for _, _, raw in theirs)
    counts = tuple(tuple(int(c) for c in np.bincount(d, minlength=world.size)) for d in rows)
    key = hashlib.sha256(repr([raw for _, _, raw in theirs]).encode()).hexdigest()[:16]
    return Routing(counts, rows, key, weakref.ref(world))


def matmul_all_to_all(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    destinations: Routing | Sequence[int] | torch.Tensor,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows that come to this rank when every rank sends row i of its x @ weight.T + bias to rank destinations[i]
    (FlashOverlap, section 4.2: GEMM + all-to-all of an expert-parallel layer).

    Args:
        x: [m_s, K], this rank's rows; as many as there are destinations, 0 and a different number on every rank
            included.
        weight: [N, K], this rank's own, laid out as in `nn.Linear`. N and K are the same on all ranks.
        bias: [N], this rank's own.
        destinations: a rank for each row, in any order and of any balance; or a Routing of `weft.route`, to use it
            again. What is not a Routing is exchanged among the hosts in every call, and cannot be captured in a CUDA
            graph.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", "sequential", "signaled", over nodes "two_level", or such a Plan; the same on all ranks.
        out: [r, N], contiguous: where to write the result; it may hold an operand.

    Returns: [r, N]: first the rows from rank 0 in their order there, then those from rank 1, and so on. How many come
        from each is `[counts[world.rank] for counts in routing.counts]`.

    Dtypes, devices and errors are those of `matmul_reduce_scatter`. No gradient. Signaled plans need an N that is a
    multiple of 8; else the op runs sequentially, and says so once. Memory during the call: [m_s, N] (signaled), or 2
    [m_s, N] (sequential). No symmetric memory, but where copy engines move the groups: N times the most rows that a
    rank has, instead of [m_s, N].
    """
    check_call(_OP, world, plan)
    kept = isinstance(destinations, Routing)
    if not kept:
        world._no_capture(_OP)
    routing = destinations if isinstance(destinations, Routing) else route(destinations, world=world)
    return MATMUL_ALL_TO_ALL(world, plan, Factors(x, weight, bias), (routing, kept), out)


@dataclass(frozen=True)
class RoutedCall(MatmulCall):
    """A bias is each rank's own, so the call says nothing of it. sent: this rank's rows. kept: the caller's own
    Routing, with which it may come again."""

    routing: Routing = field(kw_only=True)
    kept: bool = field(kw_only=True)
    sent: int = field(kw_only=True)

    @property
    def rows(self) -> int:
        """The rows of the rank that has most."""
        return max(self.shards)

    def agreed(self) -> dict[str, Hashable]:
        return dict(N=self.n, K=self.k, dtype=str(self.dtype))


def run_sequential(world: World, call: RoutedCall, plan: Plan, operands: Factors, out: torch.Tensor) -> None:
    stream, me, routing, (m, n) = world.current_stream(), world.rank, call.routing, (call.sent, call.n)
    y = world.empty((m, n), call.dtype)
    world.linear(*operands, stream, y)  # without rows too: ranks that share a GPU come to it together
    order = routing.by_destination(world)
    pool = world.empty((m, n), call.dtype)
    if m:
        world.call(lambda: torch.index_select(y, 0, order, out=pool), [y, order], [pool], stream)
    world.all_to_all(out.split([counts[me] for counts in routing.counts]), pool.split(routing.counts[me]), stream)


@dataclass
class GroupTables:
    """What one routing, width and plan keep. By group and rank: given and sends, rows that go there from `pool`, and
    the first of them; got and comes, rows that come from there, and where in `out`; held, where in that rank's pool
    they are. rows: as signaled_gemm takes it, on the device."""

    prepared: Signals
    rows: torch.Tensor
    given: list[list[int]]
    sends: list[list[int]]
    got: list[list[int]]
    comes: list[list[int]]
    held: list[list[int]]
    group_m: int


def tables(world: World, routing: Routing, n: int, plan: Signaled) -> GroupTables:
    me, size, bm = world.rank, world.size, plan.tile.block_m
    tiles_n, programs = -(-n // plan.tile.block_n), world.sm_count - plan.ctas
    group_m = max(1, min(plan.tile.group_m, programs // tiles_n))  # rows of tiles that a wave has whole
    longest = max(len(d) for d in routing.destinations)
    bounds = schedule(-(-longest // bm) * tiles_n, programs, plan.groups, 1, group_m * tiles_n).bounds
    ends = np.array([-(-b // tiles_n) * bm for b in bounds[1:]])

    def cells(destinations: np.ndarray) -> np.ndarray:
        """Return, by row, its group and the rank that it goes to, as one number."""
        return np.searchsorted(ends, np.arange(len(destinations)), side="right") * size + destinations

    def starts(counts: np.ndarray) -> np.ndarray:
        return counts.cumsum() - counts

    # By sender, group and receiver: rows, where they begin in the sender's pool, and where in the receiver's out.
    shape = size, len(ends), size
    counts = np.stack([np.bincount(cells(d), minlength=len(ends) * size) for d in routing.destinations])
    sent, held = counts.reshape(shape), np.stack([starts(c) for c in counts]).reshape(shape)
    lands = np.stack([starts(sent[:, :, p].reshape(-1)) for p in range(size)], 1).reshape(shape)
    rows = np.empty(len(routing.destinations[me]), np.int64)
    rows[np.argsort(cells(routing.destinations[me]), kind="stable")] = np.arange(len(rows))

    made = schedule_of([min(-(-len(rows) // bm) * tiles_n, b) for b in bounds], programs)
    return GroupTables(
        prepare(world, f"{_OP} {routing.key} x{n} {plan}", made, plan, [0]),
        world.tensor(rows.tolist(), torch.int32),
        sent[me].tolist(),
        held[me].tolist(),
        sent[:, :, me].T.tolist(),
        lands[:, :, me].T.tolist(),
        held[:, :, me].T.tolist(),
        group_m,
    )


def _gemm(world: World, call: RoutedCall, plan: Signaled, groups: GroupTables) -> Launch:
    """The signaled GEMM, whose rows go where `groups` says."""
    tiles, tiles_m = groups.prepared.schedule.bounds[-1], -(-call.sent // plan.tile.block_m)
    tiling = Tiling(call.sent, call.n, tiles, tiles_m, 1, groups.group_m, False)
    fixed = dict(rows=groups.rows)
    return gemm_launch(world, call, plan, groups.prepared, tiling, call.sent, fixed, local=True, few_registers=True)


def run_signaled(world: World, call: RoutedCall, plan: Signaled, operands: Factors, out: torch.Tensor) -> None:
    routing, (m, n) = call.routing, (call.sent, call.n)
    groups: GroupTables = routing.keep(world, ("groups", n, plan), lambda: tables(world, routing, n, plan))
    gemm: Launch = routing.keep(world, ("gemm", n, call.k, call.dtype, plan), lambda: _gemm(world, call, plan, groups))
    stream = world.current_stream()
    world.order(groups.prepared, stream)
    pools = None
    if plan.copies:  # the barrier says that nobody pulls from the pools any more
        longest = max(len(d) for d in routing.destinations)
        pools = workspace(world, "pool", (longest, n), call.dtype)
        world.order(lock(world, COPIES), stream)
        world.barrier(stream)
    pool = world.empty((m, n), call.dtype) if pools is None else pools.local

    def multiply(stream: Stream) -> None:
        if m:
            gemm(stream, x_desc=operands.x, w_desc=operands.weight, bias=operands.bias, out=pool)

    def collective(g: int, stream: Stream) -> None:
        parts = [pool[lo : lo + count] for lo, count in zip(groups.sends[g], groups.given[g], strict=True)]
        outs = [out[lo : lo + count] for lo, count in zip(groups.comes[g], groups.got[g], strict=True)]
        world.all_to_all(outs, parts, stream, groups.prepared.communicator)

    def pull(g: int, stream: Stream) -> None:
        assert pools is not None
        cells = zip(pools.peers, groups.comes[g], groups.held[g], groups.got[g], strict=True)
        parts = [(out[lo : lo + count], theirs[held : held + count]) for theirs, lo, held, count in cells]
        pull_from_all(world, parts, stream, last=g == len(groups.got) - 1)

    exchange_groups(world, groups.prepared, multiply, pull if plan.copies else collective)


class MatmulAllToAll(MatmulOp[RoutedCall]):
    """Options: a Routing, and whether it is the caller's own. What was decided is kept there."""

    name = _OP
    collective = "all_to_all"
    runs = {Sequential: run_sequential, Signaled: run_signaled, TwoLevel: run_exchange}
    refuses = {TwoLevel: ("pieces",)}
    over_nodes = (TwoLevel(),)
    small = Signaled
    keeps_decisions = True

    def check(self, world: World, operands: Factors, options: CallOptions) -> RoutedCall:
        (x, weight, bias), (routing, kept) = operands, options
        for name, t in (("x", x), ("weight", weight)):
            check_device(self.name, world, name, t)
        validate(self.name, world, x, weight, bias)
        if routing.world() is not world:  # what it keeps on the device counts the calls of that one
            raise ValueError(f"{self.name}: destinations were routed in another World; route them in this one")
        named = len(routing.destinations[world.rank])
        if named != x.shape[0]:
            raise ValueError(f"{self.name}: x {list(x.shape)} does not have a row for each of {named} destinations")
        rows = tuple(len(d) for d in routing.destinations)
        n, k = weight.shape
        return RoutedCall(rows, n, k, x.dtype, False, routing=routing, kept=kept, sent=named)

    def outputs(self, world: World, call: RoutedCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((sum(counts[world.rank] for counts in call.routing.counts), call.n), call.dtype)]

    def fits(self, world: World, call: RoutedCall, plan: Plan, asked: str | Plan) -> str | None:
        reason = super().fits(world, call, plan, asked)
        return reason if isinstance(plan, TwoLevel) else reason or whole_words(N=call.n)

    def decisions(self, world: World, options: CallOptions) -> Memo:
        return options[0].prepared

    def check_same_on_all_ranks(self, world: World, call: RoutedCall, plan: Plan, **more: Hashable) -> int | None:
        number = super().check_same_on_all_ranks(world, call, plan, **more)
        routing = call.routing
        if call.kept and "agreed" not in routing.prepared:
            world._no_capture(self.name)
            keys = world.exchange(routing.key)
            if len(set(keys)) > 1:
                raise Mismatch(f"{self.name}: ranks disagree on the routing: {keys}")
            routing.prepared["agreed"] = True
        return number

    def _ready_for_capture(
        self,
        world: World,
        call: RoutedCall,
        plan: Plan,
        operands: Factors,
        out: torch.Tensor | None,
        decisions: Memo,
    ) -> bool:
        return not call.kept or super()._ready_for_capture(world, call, plan, operands, out, decisions)

    def rehearse(self, world: World, call: RoutedCall, plan: Plan, operands: Factors, out: torch.Tensor | None) -> None:
        """Make the call with a bias and without: a rank may have one later, or be the only one that has."""
        x, weight, _ = operands
        for bias in (None, world.zeros((call.n,), call.dtype)):
            self.execute(world, call, plan, Factors(x, weight, bias), None)


MATMUL_ALL_TO_ALL = registered(MatmulAllToAll())
