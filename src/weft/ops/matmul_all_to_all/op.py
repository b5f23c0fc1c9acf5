"""x @ weight.T, followed by sending each row to a rank: a GEMM + all-to-all, as after the experts of an MoE layer.

    Routing      holds the destinations of all ranks' rows on every rank. So each rank can compute without communication
                 where any rank stores its rows and how many rows each collective delivers
    sequential   runs cuBLAS's GEMM, sorts the rows by destination, and sends them by one all-to-all
    signaled     signaled_gemm stores the rows of a group (whole rows of tiles) sorted by destination. Each group is
                 sent by one all-to-all of NCCL with the group's counts, or copy engines pull it. A rank receives rows
                 in the order in which they were computed, so the rows need no reordering.

If a rank's GEMM has fewer groups than another rank's GEMM, the rank takes part in the last collectives without sending
rows.
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
from ...op import Shapes, check_call, registered
from ...plans import Plan, Sequential, Signaled, TwoLevel
from ...prepared import Prepared, unprepared
from ...torch_library import CallOptions
from ...transport.copy_engine import COPIES, pull_from_all
from ...transport.memory import lock, workspace
from ...transport.signals import Signals, exchange_groups, prepare, schedule, schedule_of
from ...world import Memo, World
from ..common import Factors, MatmulCall, MatmulOp, check_16_byte_rows
from ..matmul_reduce.signaled import Tiling, gemm_launch
from ..recipes import validate
from .cost import EXCHANGE_COSTS
from .two_level import run_exchange

_OP = "matmul_all_to_all"
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Routing:
    """The destinations of every rank's rows. `weft.route` creates a Routing for one World. The Routing holds the tables
    that ops prepare for it on the device. The caller must keep it as long as calls reuse the routing, and at least as
    long as a CUDA graph that uses it.

    `counts[s][d]` is the number of rows that rank s sends to rank d. A rank receives the rows sorted by source rank.
    The rows of one source rank keep the order that they have there. `key` identifies the destinations of all ranks and
    is therefore the same on every rank. `prepared` holds the tables.
    """

    counts: tuple[tuple[int, ...], ...]
    destinations: tuple[np.ndarray, ...] = field(repr=False)  # one int64 array [rows] for each rank
    key: str
    world: weakref.ref[World] = field(repr=False)
    prepared: Memo = field(default_factory=dict, repr=False)

    def keep(self, world: World, key: Hashable, make: Callable[[], R]) -> R:
        """Return the result of `make` for this routing. The first call with a key calls `make`; later calls return the
        same result."""
        if key not in self.prepared:
            world._no_capture(_OP)
            with world.persistent_allocation():
                self.prepared[key] = make()
        return self.prepared[key]

    def by_destination(self, world: World) -> torch.Tensor:
        """Return the indices of this rank's rows, sorted by destination: int64 on the device."""
        rows = self.destinations[world.rank]
        return self.keep(world, "order", lambda: world.tensor(np.argsort(rows, kind="stable").tolist(), torch.int64))


def route(destinations: Sequence[int] | torch.Tensor, *, world: World) -> Routing:
    """Return the Routing for `destinations`, one rank for each row of this rank. The call is collective.

    destinations: integers from 0 to world.size - 1, one for each row. A tensor on a GPU is copied to the host, which
    waits for the copy. Raises ValueError or TypeError on all ranks if one rank's destinations are wrong.

    Examples:
        >>> weft.spmd(lambda world: weft.route([0, 1, 1], world=world).counts, 2, backend="emulated")
        [((1, 2), (1, 2)), ((1, 2), (1, 2))]
    """
    check_call("route", world)
    problem, own_destinations = "", np.zeros(0, np.int64)
    try:
        t = torch.as_tensor(destinations)
        if t.numel() == 0:
            t = t.to(torch.int64)
        if t.dim() != 1 or t.dtype.is_floating_point or t.dtype == torch.bool:
            problem = f"must be a list of integers, got {list(t.shape)} {t.dtype}"
        else:
            own_destinations = t.cpu().numpy().astype(np.int64)
            if len(own_destinations) and not 0 <= own_destinations.min() <= own_destinations.max() < world.size:
                problem = (
                    f"go from {own_destinations.min()} to {own_destinations.max()}, in a world of {world.size} ranks"
                )
    except (TypeError, ValueError, RuntimeError) as e:
        problem = f"must be a list of integers: {e}"
    exchanged = world.exchange((problem, own_destinations.astype(np.int32).tobytes()), "route")
    for rank, (problem, _) in enumerate(exchanged):
        if problem:
            raise ValueError(f"route: destinations of rank {rank} {problem}")
    rows = tuple(np.frombuffer(raw, np.int32).astype(np.int64) for _, raw in exchanged)
    counts = tuple(tuple(int(c) for c in np.bincount(d, minlength=world.size)) for d in rows)
    key = hashlib.sha256(repr([raw for _, raw in exchanged]).encode()).hexdigest()[:16]
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
    """Return the rows that come to this rank when every rank sends row i of its x @ weight.T + bias to rank
    destinations[i] (FlashOverlap, section 4.2: GEMM + all-to-all of an expert-parallel layer).

    Args:
        x: [m_s, K], this rank's rows, one for each destination. m_s may be 0 and may differ from rank to rank.
        weight: [N, K], this rank's weight, laid out as in `nn.Linear`. N and K are the same on all ranks.
        bias: [N], this rank's bias.
        destinations: the destination rank of each row, in any order and any distribution; or a Routing from
            `weft.route`, which many calls can use. Without a Routing the hosts exchange the destinations in every call,
            and a CUDA graph cannot capture the call.
        world: the ranks. All ranks must make the same call in the same order.
        plan: "auto", "sequential", "signaled", "two_level" (on several nodes), or a Plan of one of these classes; the
            same on all ranks.
        out: [r, N], contiguous: the tensor for the result, which may share memory with an operand.

    Returns: [r, N]: first the rows from rank 0 in that rank's order, then the rows from rank 1, and so on. The numbers
        of rows from each rank are `[counts[world.rank] for counts in routing.counts]`.

    Dtypes, devices and errors are as for `all_gather_matmul`. A wrong destination on one rank raises ValueError or
    TypeError on all ranks. There is no gradient. Signaled plans need an N that is a multiple of 8. For other N the op
    uses the sequential plan, and logs this once. During the call, a signaled plan needs memory for [m_s, N] elements,
    and the sequential plan for twice as many. If copy engines move the groups, the op uses [m, N] of symmetric memory
    instead of [m_s, N], where m is the largest m_s of all ranks.

    Examples:
        >>> x, w = torch.ones(3, 16).bfloat16(), torch.ones(8, 16).bfloat16()
        >>> def rank(world):
        ...     return tuple(weft.matmul_all_to_all(x, w, destinations=[0, 1, 1], world=world).shape)
        >>> weft.spmd(rank, 2, backend="emulated")
        [(2, 8), (4, 8)]
    """
    check_call(_OP, world, plan)
    kept = isinstance(destinations, Routing)
    if not kept:
        world._no_capture(_OP)
    routing = destinations if isinstance(destinations, Routing) else route(destinations, world=world)
    return MATMUL_ALL_TO_ALL(world, plan, Factors(x, weight, bias), (routing, kept), out)


@dataclass(frozen=True)
class RoutedCall(MatmulCall):
    """A checked call. Each rank decides for itself whether it has a bias, so `bias` is always False here. sent: the
    number of this rank's rows. kept: whether the caller passed a Routing, which it may therefore pass again."""

    routing: Routing = field(kw_only=True)
    kept: bool = field(kw_only=True)
    sent: int = field(kw_only=True)

    @property
    def rows(self) -> int:
        """Return the largest number of rows on any rank."""
        return max(self.shards)

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        return dict(N=self.n, K=self.k, dtype=str(self.dtype))


def run_sequential(world: World, call: RoutedCall, plan: Plan, operands: Factors, out: torch.Tensor) -> None:
    """Run the plan: one GEMM, then one all-to-all."""
    stream, me, routing = world.current_stream(), world.rank, call.routing
    y, pool = (world.empty((call.sent, call.n), call.dtype) for _ in range(2))
    # The GEMM is launched even without rows, because ranks that share a GPU enter it together.
    world.backend.linear(*operands, stream, y)
    order = routing.by_destination(world)
    if call.sent:
        world.call(lambda: torch.index_select(y, 0, order, out=pool), [y, order], [pool], stream)
    world.backend.all_to_all(
        out.split([counts[me] for counts in routing.counts]), pool.split(routing.counts[me]), stream
    )


@dataclass
class GroupTables:
    """The tables for one routing, N and plan. The first three have an entry for each group and rank. sent: the rows of
    this rank's `pool` that are sent to the rank. received: the rows of `out` that come from the rank. pulled: the
    position of the received rows in that rank's pool. row_map: the row_map of signaled_gemm."""

    signals: Signals
    row_map: torch.Tensor
    sent: list[list[slice]]
    received: list[list[slice]]
    pulled: list[list[slice]]
    group_m: int


def group_tables(world: World, routing: Routing, n: int, plan: Signaled) -> GroupTables:
    me, size, bm = world.rank, world.size, plan.tile.block_m
    tiles_n, programs = -(-n // plan.tile.block_n), world.sm_count - plan.ctas
    group_m = max(1, min(plan.tile.group_m, programs // tiles_n))  # as many rows of tiles as fit in a wave
    longest = max(len(d) for d in routing.destinations)
    bounds = schedule(-(-longest // bm) * tiles_n, programs, plan.groups, 1, group_m * tiles_n).bounds
    ends = np.array([-(-b // tiles_n) * bm for b in bounds[1:]])

    def cells(destinations: np.ndarray) -> np.ndarray:
        """Return group * size + destination for each row."""
        return np.searchsorted(ends, np.arange(len(destinations)), side="right") * size + destinations

    def starts(counts: np.ndarray) -> np.ndarray:
        """Return the exclusive cumulative sums."""
        return counts.cumsum() - counts

    def slices(starts: np.ndarray, counts: np.ndarray) -> list[list[slice]]:
        """Return a slice of rows for each group and rank."""
        stops = (starts + counts).tolist()
        return [list(map(slice, *ends)) for ends in zip(starts.tolist(), stops, strict=True)]

    # These tables have an entry for each sender, group and receiver: the number of rows, their offset in the sender's
    # pool, and their offset in the receiver's out.
    shape = size, len(ends), size
    counts = np.stack([np.bincount(cells(d), minlength=len(ends) * size) for d in routing.destinations])
    send_counts, send_offsets = counts.reshape(shape), np.stack([starts(c) for c in counts]).reshape(shape)
    receive_offsets = np.stack([starts(send_counts[:, :, p].reshape(-1)) for p in range(size)], 1).reshape(shape)
    row_map = np.empty(len(routing.destinations[me]), np.int64)
    row_map[np.argsort(cells(routing.destinations[me]), kind="stable")] = np.arange(len(row_map))

    own_schedule = schedule_of([min(-(-len(row_map) // bm) * tiles_n, b) for b in bounds], programs)
    return GroupTables(
        prepare(world, f"{_OP} {routing.key} x{n} {plan}", own_schedule, plan, [0]),
        world.tensor(row_map.tolist(), torch.int32),
        slices(send_offsets[me], send_counts[me]),
        slices(receive_offsets[:, :, me].T, send_counts[:, :, me].T),
        slices(send_offsets[:, :, me].T, send_counts[:, :, me].T),
        group_m,
    )


def _gemm(world: World, call: RoutedCall, plan: Signaled, groups: GroupTables) -> Launch:
    """Return the launch of the signaled GEMM, which stores each row at its offset in the tables."""
    tiles, tiles_m = groups.signals.schedule.bounds[-1], -(-call.sent // plan.tile.block_m)
    tiling = Tiling(call.sent, call.n, tiles, tiles_m, 1, groups.group_m, False)
    fixed = dict(row_map=groups.row_map)
    return gemm_launch(world, call, plan, groups.signals, tiling, call.sent, fixed, local=True, few_registers=True)


def run_signaled(world: World, call: RoutedCall, plan: Signaled, operands: Factors, out: torch.Tensor) -> None:
    routing, (m, n) = call.routing, (call.sent, call.n)
    groups: GroupTables = routing.keep(world, ("groups", n, plan), lambda: group_tables(world, routing, n, plan))
    gemm: Launch = routing.keep(world, ("gemm", n, call.k, call.dtype, plan), lambda: _gemm(world, call, plan, groups))
    stream = world.current_stream()
    world.order(groups.signals, stream)
    pools = None
    if plan.copies:  # after the barrier no rank still pulls from this rank's pool
        longest = max(len(d) for d in routing.destinations)
        pools = workspace(world, "pool", (longest, n), call.dtype)
        world.order(lock(world, COPIES), stream)
        world.barrier(stream)
    pool = world.empty((m, n), call.dtype) if pools is None else pools.local

    def multiply(stream: Stream) -> None:
        if m:
            gemm(stream, x_desc=operands.x, w_desc=operands.weight, bias=operands.bias, out=pool)

    def collective(g: int, stream: Stream) -> None:
        parts, outs = [pool[rows] for rows in groups.sent[g]], [out[rows] for rows in groups.received[g]]
        world.backend.all_to_all(outs, parts, stream, groups.signals.communicator)

    def pull(g: int, stream: Stream) -> None:
        assert pools is not None
        by_rank = zip(groups.received[g], pools.peers, groups.pulled[g], strict=True)
        parts = [(out[rows], peer_pool[pulled]) for rows, peer_pool, pulled in by_rank]
        pull_from_all(world, parts, stream, last=g == len(groups.received) - 1)

    exchange_groups(world, groups.signals, multiply, pull if plan.copies else collective)


class MatmulAllToAll(MatmulOp[RoutedCall]):
    """The op matmul_all_to_all. The options are a Routing, and whether the caller passed it. The Routing stores the
    plan decisions."""

    name = _OP
    collective = "all_to_all"
    costs = EXCHANGE_COSTS
    runs = {
        Sequential: unprepared(run_sequential),
        Signaled: unprepared(run_signaled),
        TwoLevel: unprepared(run_exchange),
    }
    unsupported_fields = {TwoLevel: ("pieces",)}
    over_nodes = (TwoLevel(),)
    emulator_plan = Signaled
    keeps_decisions = True

    def check(self, world: World, operands: Factors, options: CallOptions) -> RoutedCall:
        (x, weight, bias), (routing, kept) = operands, options
        validate(self.name, world, x, weight, bias)
        if routing.world() is not world:  # the channels of a Routing count the calls of one World
            raise ValueError(f"{self.name}: destinations were routed in another World; route them in this one")
        named = len(routing.destinations[world.rank])
        if named != x.shape[0]:
            raise ValueError(f"{self.name}: x {list(x.shape)} does not have a row for each of {named} destinations")
        rows = tuple(len(d) for d in routing.destinations)
        n, k = weight.shape
        return RoutedCall(rows, n, k, x.dtype, False, routing=routing, kept=kept, sent=named)

    def outputs(self, world: World, call: RoutedCall) -> Shapes:
        return [((sum(counts[world.rank] for counts in call.routing.counts), call.n), call.dtype)]

    def unsupported(self, world: World, call: RoutedCall, plan: Plan, asked: str | Plan) -> str | None:
        reason = super().unsupported(world, call, plan, asked)
        return reason if isinstance(plan, TwoLevel) else reason or check_16_byte_rows(N=call.n)

    def decisions(self, world: World, options: CallOptions) -> Memo:
        return options[0].prepared

    def check_same_on_all_ranks(self, world: World, call: RoutedCall, plan: Plan, **further: Hashable) -> int | None:
        number = super().check_same_on_all_ranks(world, call, plan, **further)
        routing = call.routing
        if call.kept and "same on all ranks" not in routing.prepared:
            world._no_capture(self.name)
            keys = world.exchange(routing.key, "routing")
            if len(set(keys)) > 1:
                raise Mismatch(f"{self.name}: ranks disagree on the routing: {keys}")
            routing.prepared["same on all ranks"] = True
        return number

    def may_capture(self, world: World, call: RoutedCall) -> bool:
        return call.kept and super().may_capture(world, call)

    def warm_up_capture(self, prepared: Prepared[RoutedCall], operands: Factors, out: torch.Tensor | None) -> None:
        """Warm up calls with and without a bias, because this rank may pass a bias later."""
        x, weight, _ = operands
        for bias in (None, prepared.world.zeros((prepared.call.n,), prepared.call.dtype)):
            prepared(Factors(x, weight, bias), None)

    def kept(self, world: World, call: RoutedCall) -> Memo:
        return call.routing.prepared


MATMUL_ALL_TO_ALL = registered(MatmulAllToAll())
