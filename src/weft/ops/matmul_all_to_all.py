"""x @ weight.T, whose rows each go to a rank of their own: a GEMM + all-to-all, as after the experts of an MoE layer.

    Routing    every rank's destinations, known to all: so each rank computes where any rank's tiles put its rows, and how many
               rows each collective brings, without asking
    signaled   signaled_gemm_rows puts the pieces of a group (rows of tiles) destination by destination; each group is one
               all-to-all of the library with the group's own counts, or copies to where each receiver would have it; a last
               kernel puts rows together again from their pieces
    sequential GEMM, rows sorted by destination, one all-to-all

A rank whose GEMM has fewer waves than the longest takes part in the last collectives with nothing to send.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import Mismatch
from ..kernels.norm import take_pieces
from ..kernels.signaled_gemm import signaled_gemm_rows
from ..plan import Plan, Sequential, Signaled
from ..plan.table import learned
from ..world import World
from .common import DTYPES, dense, descriptor, other_mode, output, places, resolve, validate
from .signaled import Prepared, exchange_groups, partition, prepare, scheduled

OP = "matmul_all_to_all"


@dataclass(frozen=True, eq=False)
class Routing:
    """Where every rank's rows go. Made by `weft.route`; holds what ops prepared for it on the device, so keep it while the same
    routing is used again, in a CUDA graph at least as long as the graph.

    counts[s][d]: rows that rank s sends to rank d. A rank gets rows in the order of their ranks, and of the rows of each.
    """

    counts: tuple[tuple[int, ...], ...]
    destinations: tuple[np.ndarray, ...] = field(repr=False)  # int64 [rows], by rank
    key: str
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)


def route(destinations: Sequence[int] | torch.Tensor, *, world: World) -> Routing:
    """Collective: the Routing of rows whose ranks `destinations` names on every rank, one for each row.

    destinations: integers from 0 to world.size - 1, any number of them; a tensor on a GPU is copied to the host, which waits for
    it. Raises ValueError or TypeError on all ranks if one rank's are wrong.
    """
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
    theirs = world.exchange((said, mine.astype(np.int32).tobytes()))
    for rank, (wrong, _) in enumerate(theirs):
        if wrong:
            raise ValueError(f"route: destinations of rank {rank} {wrong}")
    rows = tuple(np.frombuffer(raw, np.int32).astype(np.int64) for _, raw in theirs)
    counts = tuple(tuple(int(c) for c in np.bincount(d, minlength=world.size)) for d in rows)
    return Routing(counts, rows, hashlib.sha256(repr([raw for _, raw in theirs]).encode()).hexdigest()[:16])


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
        x: [m_s, K], this rank's rows; as many as there are destinations, 0 and a different number on every rank included.
        weight: [N, K], this rank's own, laid out as in `nn.Linear`. N and K are the same on all ranks.
        bias: [N], this rank's own.
        destinations: a rank for each row, in any order and of any balance; or a Routing of `weft.route`, to use it again. What is
            not a Routing is exchanged among the hosts in every call, and cannot be captured in a CUDA graph.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", "sequential", "signaled" or such a Plan; the same on all ranks.
        out: [r, N], contiguous: where to write the result.

    Returns:
        [r, N]: first the rows from rank 0 in their order there, then those from rank 1, and so on. How many come from each is
        `[counts[world.rank] for counts in routing.counts]`.

    Dtypes, devices and errors are those of `matmul_reduce_scatter`. No gradient. Memory during the call: [m_s, N] and [r, N]
    (signaled: N rounded up to whole tiles), or 2 [m_s, N] (sequential). No symmetric memory, but where copy engines move
    the groups: the most rows that a rank gets.
    """
    validate(OP, world, x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        raise ValueError(f"{OP}: an operand requires a gradient, which this op does not have; use torch.no_grad()")
    routing = destinations
    if not isinstance(routing, Routing):
        world._no_capture(OP)
        routing = route(routing, world=world)
    me, size = world.rank, world.size
    m, (n, k) = x.shape[0], weight.shape
    mine = len(routing.counts) == size and len(routing.destinations[me])
    if mine != m or len(routing.counts) != size:
        raise ValueError(
            f"{OP}: x {list(x.shape)} does not have a row for each of {mine} destinations over {size} ranks"
        )
    longest = max(len(d) for d in routing.destinations)
    chosen = resolve(OP, world, plan, longest, n, k, None, world.capturing())
    world.check()
    world.agree(OP, (n, k, str(x.dtype), chosen))
    if routing is destinations and "agreed" not in routing.prepared:
        world._no_capture(OP)
        keys = world.exchange(routing.key)
        if len(set(keys)) > 1:
            raise Mismatch(f"{OP}: ranks disagree on the routing: {keys}")
        routing.prepared["agreed"] = True
    warm = ("graph", learned(), n, k, x.dtype)
    if plan == "auto" and routing is destinations and warm not in routing.prepared and not world.capturing():
        routing.prepared[warm] = True  # what a later capture will take, once, so that it finds its tables and memory
        other = other_mode(OP, world, plan, longest, n, k, None, chosen)
        if other is not None:
            for b in (None, world.zeros((n,), x.dtype)):  # a rank may have a bias later, or alone
                matmul_all_to_all(x, weight, b, destinations=routing, world=world, plan=other)
    received = sum(counts[me] for counts in routing.counts)
    result = output(OP, world, out, received, n, x.dtype)
    if longest == 0:
        return result
    x, weight = dense(x), dense(weight)
    bias = None if bias is None else bias.contiguous()
    stream = world.current_stream()
    if isinstance(chosen, Signaled):
        _signaled(x, weight, bias, world, chosen, result, routing)
    else:
        assert isinstance(chosen, Sequential)
        _sequential(x, weight, bias, world, result, routing)
    world.finish(stream)
    return result


def _sequential(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world: World, out: torch.Tensor, routing: Routing
) -> None:
    stream, me, m, n = world.current_stream(), world.rank, x.shape[0], weight.shape[0]
    y = world.empty((m, n), x.dtype)
    if m:
        world.linear(x, weight, bias, stream, y)
    if "order" not in routing.prepared:
        world._no_capture(OP)
        order = np.argsort(routing.destinations[me], kind="stable")
        routing.prepared["order"] = world.tensor(order.tolist(), torch.int64)
    order = routing.prepared["order"]
    pool = world.empty((m, n), x.dtype)
    if m:
        world.call(lambda: torch.index_select(y, 0, order, out=pool), [y, order], [pool], stream)
    world.all_to_all(out, pool, [counts[me] for counts in routing.counts], routing.counts[me], stream)


@dataclass
class Pieces:
    """Of one rank's GEMM: where its tiles put their pieces, by destination.

    tile_rows: by tile, its tile row. counts [tile rows, world]. places [tile rows, tiles_n]: the tile there. positions: by row.
    sent [groups, world]: pieces. before [tiles, world]: pieces of a group's earlier tiles.
    """

    bounds: list[int]
    places: np.ndarray
    positions: np.ndarray
    sent: np.ndarray
    before: np.ndarray


def pieces(destinations: np.ndarray, size: int, tiles_n: int, plan: Signaled, ends: Sequence[int]) -> Pieces:
    """ends: tiles after which the groups end, where the GEMM has as many."""
    bm = plan.block_m
    tiles_m = -(-len(destinations) // bm)
    padded = np.full(tiles_m * bm, size)  # rows that go nowhere
    padded[: len(destinations)] = destinations
    one = padded.reshape(tiles_m, bm, 1) == np.arange(size)
    counts = one.sum(1)
    earlier = one.cumsum(1) - one
    positions = (earlier * one).sum(2).reshape(-1)[: len(destinations)]
    tiles = tiles_m * tiles_n
    t = np.arange(tiles)
    first = t // (plan.group_m * tiles_n) * plan.group_m
    height = np.minimum(tiles_m - first, plan.group_m)
    rest = t % (plan.group_m * tiles_n)
    tm, tn = first + rest % np.maximum(height, 1), rest // np.maximum(height, 1)
    places = np.zeros((tiles_m, tiles_n), np.int64)
    places[tm, tn] = t
    bounds = [min(tiles, end) for end in ends]
    each = counts[tm] if tiles else np.zeros((0, size), np.int64)
    upto = np.concatenate([np.zeros((1, size), np.int64), each.cumsum(0)])
    sent = upto[bounds[1:]] - upto[bounds[:-1]]
    group = np.searchsorted(np.array(bounds[1:]), t, side="right")
    return Pieces(bounds, places, positions, sent, upto[:-1] - upto[np.array(bounds)[group]])


@dataclass
class Tables:
    """What one routing, width and plan keep, tensors on the device. given, got: by group and rank, pieces that this rank sends
    there, and gets from there."""

    prepared: Prepared
    given: list[list[int]]
    got: list[list[int]]
    destinations: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    rows: dict[str, torch.Tensor]  # take_pieces' firsts, positions, starts
    landing: list[list[int]]  # by group and rank: where what this rank sends begins there
    most: int  # pieces that a rank gets, at most


def tables(world: World, routing: Routing, n: int, plan: Signaled) -> Tables:
    me, size = world.rank, world.size
    tiles_n, programs = -(-n // plan.block_n), world.sm_count - plan.ctas
    most = max(-(-len(d) // plan.block_m) for d in routing.destinations) * tiles_n
    waves = partition(plan.groups, -(-most // programs))
    ends = [0, *(programs * sum(waves[: g + 1]) for g in range(len(waves)))]
    ranks = [pieces(d, size, tiles_n, plan, ends) for d in routing.destinations]
    own = ranks[me]

    # Sent: group after group, in a group rank after rank. Received: the same, where ranks are the senders.
    pool = np.concatenate([[0], own.sent.reshape(-1).cumsum()])[:-1].reshape(own.sent.shape)
    gets = [np.stack([r.sent[:, p] for r in ranks], 1) for p in range(size)]
    comes = [np.concatenate([[0], g.reshape(-1).cumsum()])[:-1].reshape(g.shape) for g in gets]
    got, came = gets[me], comes[me]

    def group_of(r: Pieces) -> np.ndarray:
        return np.searchsorted(np.array(r.bounds[1:]), np.arange(r.places.size), side="right")

    starts, firsts, positions, tile_rows = [], [], [], 0
    for s, (r, d) in enumerate(zip(ranks, routing.destinations, strict=True)):
        at = came[group_of(r), s] + r.before[:, me]
        starts += at[r.places].reshape(-1).tolist()
        rows = np.flatnonzero(d == me)
        firsts += (tile_rows + rows // plan.block_m).tolist()
        positions += r.positions[rows].tolist()
        tile_rows += r.places.shape[0]
    made = scheduled(own.bounds, programs)
    int32 = torch.int32
    return Tables(
        prepare(world, f"{OP} {routing.key} x{n} {plan.to_json()}", made, plan, [0]), own.sent.tolist(), got.tolist(),
        world.tensor(routing.destinations[me].tolist(), int32), world.tensor(own.positions.tolist(), int32),
        world.tensor((pool[group_of(own)] + own.before).reshape(-1).tolist(), int32),
        dict(firsts=world.tensor(firsts, int32), positions=world.tensor(positions, int32), starts=world.tensor(starts, int32)),
        np.stack([c[:, me] for c in comes], 1).tolist(), max(int(g.sum()) for g in gets),
    )  # fmt: skip


def _signaled(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    plan: Signaled,
    out: torch.Tensor,
    routing: Routing,
) -> None:
    m, (n, k) = x.shape[0], weight.shape
    bm, bn, bk = plan.block_m, plan.block_n, plan.block_k
    programs = world.sm_count - plan.ctas
    if (n, plan) not in routing.prepared:
        world._no_capture(OP)
        routing.prepared[n, plan] = tables(world, routing, n, plan)
    made: Tables = routing.prepared[n, plan]
    stream = world.current_stream()
    world.order(made.prepared, stream)
    pool = world.empty((sum(map(sum, made.given)), bn), x.dtype)
    arrived = sum(map(sum, made.got))
    landed = world.buffer("pieces", made.most * bn * x.element_size()) if plan.copies else None
    if landed is not None:
        landed = landed.view(0, (made.most, bn), x.dtype)
    came = world.empty((arrived, bn), x.dtype) if landed is None else landed.local[:arrived]
    name = (OP, n, k, x.dtype, plan)

    def args() -> dict[str, Any]:
        return dict(
            x_desc=descriptor(x, m, k, (bm, bk)), w_desc=descriptor(weight, n, k, (bn, bk)), pool=pool,
            bias=bias if bias is not None else pool, ch=ch, destinations=made.destinations,
            positions=made.positions, starts=made.starts, signals=made.prepared.signals, tiles=made.prepared.schedule.bounds[-1],
            tiles_m=-(-m // bm), M=m, N=n, K=k, DTYPE=DTYPES[x.dtype], BM=bm, BN=bn, BK=bk, GROUP_M=plan.group_m,
            BIAS=bias is not None, FLATTEN=plan.flatten,
        )  # fmt: skip

    ch = made.prepared.ch
    at = places(
        made.destinations,
        made.positions,
        made.starts,
        made.prepared.signals,
        ch.counters,
        ch.state,
        x,
        weight,
        bias,
        pool,
    )

    def gemm(stream: Any) -> None:
        if m:
            options = dict(num_warps=plan.warps, num_stages=plan.stages, local=True)
            key = ("gemm", *name, m, *at)
            world.launch(signaled_gemm_rows, programs, args, options, stream, key)

    sends = [sum(map(sum, made.given[:g])) for g in range(len(made.given) + 1)]
    gets = [sum(map(sum, made.got[:g])) for g in range(len(made.got) + 1)]

    def collective(g: int, stream: Any) -> None:
        world.all_to_all(
            came[gets[g] : gets[g + 1]], pool[sends[g] : sends[g + 1]], made.got[g], made.given[g], stream,
            made.prepared.communicator,
        )  # fmt: skip

    lanes = [world.side_stream(f"to {j}") for j in range(world.size)] if plan.copies else []

    def push(g: int, stream: Any) -> None:
        """A stream for each receiver: as many copies at once keep the links busy whatever the counts."""
        assert landed is not None
        signaled, last = world.record(stream), g == len(made.given) - 1
        for j, lane in enumerate(lanes):
            p = (world.rank + j) % world.size
            world.wait_event(lane, signaled)
            if count := made.given[g][p]:
                lo, to = sends[g] + sum(made.given[g][:p]), made.landing[g][p]
                world.copy(landed.peers[p][to : to + count], pool[lo : lo + count], lane)
            if last:
                world.wait_event(stream, world.record(lane))
        if last:
            world.meet(stream)

    exchange_groups(world, made.prepared, gemm, push if plan.copies else collective, plan.copies)
    if not out.shape[0]:
        return
    r = max(1, (4096 if world.sm_count > 32 else 256) // bn)
    blocks = -(-out.shape[0] // r) * -(-n // bn)
    taken = dict(pool=came, out=out, rows=out.shape[0], N=n, ALIGNED=n % 8 == 0, R=r, BN=bn, **made.rows)
    key = ("take", out.shape[0], n, x.dtype, bn, *places(came, out, *made.rows.values()))
    options = dict(num_warps=8, local=True)
    world.launch(take_pieces, min(blocks, world.sm_count * 4), taken, options, stream, key)
