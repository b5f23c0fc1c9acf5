"""x @ weight.T summed over ranks: scattered by rows (the row-parallel half of a tensor-parallel layer) or on every rank.

Decomposed: cuBLAS on the farthest owners' rows first; a copy engine pushes each group's partial rows into the owner's
staging slots while the next group computes; the owner sums its slots in fp32 in rank order (TileLink's hybrid mapping).
One shot and two shots: cuBLAS, then one launch that sums a few rows (kernels/posted.py, kernels/posted_norm.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import Unsupported
from ..kernels.gemm_reduce import gemm_reduce as kernel
from ..plan import Decomposed, Fused, OneShot, Plan, Sequential, Signaled, TwoShot
from ..world import World
from . import posted, signaled
from .all_gather_matmul import COPIES, chunks, group_steps
from .common import (
    DTYPES,
    call_key,
    contiguous,
    dense,
    descriptor,
    flat,
    lock,
    other_mode,
    output,
    overlap,
    places,
    resolve,
    served,
    split_rows,
    sum_parts,
    supports_fused,
    validate,
)
from .reduce_plans import posts, sum_everywhere, sum_few
from .signaled import SCATTER

ALL = "matmul_all_reduce"


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    plan: str | Plan,
    out: torch.Tensor | None,
    everywhere: bool,
    rows: Sequence[int] | None = None,
    reorder: bool = True,
) -> Any:
    """everywhere: all-reduce; else reduce-scatter, by `rows` of every rank (None: as evenly as possible). reorder False: also
    returns a Remap, or None where the rows are in order."""
    op = ALL if everywhere else SCATTER
    key = call_key(op, world, plan, x, weight, bias, None if rows is None else tuple(rows), reorder)
    known = world.decided.get(key)
    if known is None:
        validate(op, world, x, weight, bias)
        shards = split_rows(world, x.shape[0]) if rows is None else tuple(int(r) for r in rows)
        if len(shards) != world.size or min(shards) < 0 or sum(shards) != x.shape[0]:
            raise ValueError(
                f"{op}: rows {list(shards)} must name {world.size} ranks and sum to the rows of x {list(x.shape)}"
            )
    else:
        chosen, shards, direct = known
        if direct and out is None:
            result = direct(x, weight, bias)
            return result if reorder else (result, None)
    m, (n, k) = x.shape[0], weight.shape
    as_given = contiguous(x, weight, bias)
    x, weight = dense(x), dense(weight)
    bias = None if bias is None else bias.contiguous()
    world.check()
    if known is None:
        reason = supports_fused(world, k, n)
        chosen = resolve(op, world, plan, m, n, k, reason, world.capturing())
        if isinstance(chosen, Signaled) and chosen.copies and (why := signaled.no_copies(op, chosen, shards, n)):
            world.say_once(f"{op}: sequential instead of signaled by copies: {why}")
            chosen = Sequential()
        chosen = served(op, world, plan, chosen, shards)
        world.agree(op, rows=shards, N=n, K=k, dtype=str(x.dtype), bias=bias is not None, reorder=reorder, plan=chosen)
        other = other_mode(op, world, plan, m, n, k, reason, chosen)
        if other is not None:
            warm = (op, "graph", other, shards, n, k, x.dtype, bias is not None, reorder)
            world.cached(warm, lambda: forward(x, weight, bias, world, other, None, everywhere, rows, reorder) is None)
        usual = m > 0 and world.size > 1 and (everywhere or min(shards) == max(shards)) and as_given
        direct = _direct(world, shards[0], n, everywhere) if usual and chosen == Sequential() else None
        world.decided[key] = chosen, shards, direct
    stream = world.current_stream()
    if m and not reorder and isinstance(chosen, Signaled):
        tiles = signaled.reduce(op, x, weight, bias, world, chosen, shards, everywhere)
        world.finish(stream)
        return tiles
    result = output(op, world, out, m if everywhere else shards[world.rank], n, x.dtype)
    if overlap(out, x, weight, bias):  # a tile may be done before another has read what it needs
        given, result = result, world.empty(result.shape, x.dtype)
    else:
        given = result
    if m == 0:
        pass
    elif isinstance(chosen, Fused):
        _fused(x, weight, bias, world, chosen, result, shards, everywhere)
    elif isinstance(chosen, Signaled):
        signaled.reduce(op, x, weight, bias, world, chosen, shards, everywhere, result)
    elif isinstance(chosen, OneShot | TwoShot):
        partial = world.linear(x, weight, None, stream)
        if everywhere and posts(chosen):
            sum_few(partial, world, chosen, stream, result)
        elif everywhere:
            sum_everywhere(partial, world, chosen, result)
        else:
            posted.scatter(partial, world, chosen, shards, stream, result)
        add_bias(world, result, bias, stream)
    elif isinstance(chosen, Decomposed):
        (_decomposed_all if everywhere else _decomposed)(x, weight, bias, world, chosen, result)
    else:
        _sequential(x, weight, bias, world, result, shards, everywhere)
    if given is not result:
        world.copy(given, result, stream)
    world.finish(stream)
    return given if reorder else (given, None)


def add_bias(world: World, out: torch.Tensor, bias: torch.Tensor | None, stream: Any) -> None:
    if bias is not None:
        world.call(lambda: out.add_(bias), [out, bias], [out], stream)


def _direct(world: World, rows: int, n: int, everywhere: bool) -> Callable[..., torch.Tensor]:
    """What a sequential call of equal shards and contiguous operands comes to, in as little host time as Python takes."""
    check, current, empty, finish = world.check, world.current_stream, world.empty, world.finish
    linear, all_reduce, reduce_scatter = world.linear, world.all_reduce, world.reduce_scatter

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        check()
        stream = current()
        out = linear(x, weight, None, stream)
        if everywhere:
            all_reduce(out, stream)
        else:
            partial, out = out, empty((rows, n), x.dtype)
            reduce_scatter(out, partial, stream)
        if bias is not None:
            add_bias(world, out, bias, stream)
        finish(stream)
        return out

    return run


def _sequential(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    out: torch.Tensor,
    shards: Sequence[int],
    everywhere: bool,
) -> None:
    stream = world.current_stream()
    if world.size == 1:
        world.linear(x, weight, bias, stream, out)
        return
    if everywhere:
        world.linear(x, weight, None, stream, out)
        world.all_reduce(out, stream)
    else:
        scattered_sum(world.linear(x, weight, None, stream), world, shards, stream, out)
    add_bias(world, out, bias, stream)


def scattered_sum(
    x: torch.Tensor, world: World, shards: Sequence[int], stream: Any, out: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of x [M, N], by the library's collective; shards of unequal length travel
    padded to the longest."""
    n, most, rows = x.shape[1], max(shards), shards[world.rank]
    if min(shards) < most:
        padded, at = world.zeros((world.size * most, n), x.dtype), 0
        for r, count in enumerate(shards):
            if count:
                world.copy(padded[r * most : r * most + count], x[at : at + count], stream)
            at += count
        x = padded
    mine = world.empty((most, n), x.dtype) if out is None or most > rows else out
    world.reduce_scatter(mine, x, stream)
    if mine is out or out is None:
        return mine[:rows] if most > rows else mine
    if rows:
        world.copy(out, mine[:rows], stream)
    return out


def _decomposed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world: World, plan: Decomposed, out: torch.Tensor
) -> None:
    """The first barrier says that every staging slot may be written again, the others that every push of a piece has landed.
    GEMMs run on two streams in turn, so that one fills the SMs that the last tiles of the one before leave idle."""
    (rows, n), me, size = out.shape, world.rank, world.size
    groups = chunks(plan, me, size)[::-1]
    pieces = plan.pieces if rows % plan.pieces == 0 and all(len(ranks) == 1 for _, ranks in groups) else 1
    part = rows // pieces
    stream, copies, sums = world.current_stream(), world.side_stream("copy"), world.side_stream("sum")
    second = world.side_stream("gemm", urgent=False)
    lanes = itertools.cycle((stream, second))
    memory = world.buffer("staging", size * rows * n * x.element_size())
    world.order(lock(world, COPIES), stream)
    staging = memory.view(0, (pieces, size, part, n), x.dtype)
    partial = world.empty((size * rows, n), x.dtype)
    xs, parts = x.split(part), partial.split(part)  # `pieces` of each rank
    start = world.record(stream)
    world.wait_event(second, start)
    world.wait_event(copies, start)
    world.meet(copies)
    for piece in range(pieces):
        for first, ranks in groups:
            lane, one = next(lanes), len(ranks) == 1
            at, run = first * pieces + piece, slice(first * rows, (first + len(ranks)) * rows)
            world.linear(xs[at] if one else x[run], weight, None, lane, parts[at] if one else partial[run])
            world.wait_event(copies, world.record(lane))
            for p in ranks:
                if p != me:
                    world.copy(staging.peers[p][piece, me], parts[p * pieces + piece], copies)
        world.meet(copies)
        world.wait_event(sums, world.record(copies))  # the own rows' GEMM too: the last that `copies` waited for
        sum_parts(
            parts[me * pieces + piece],
            staging.local[piece],
            out[piece * part :][:part],
            bias,
            world,
            sums,
        )
    for other in (second, sums):
        world.wait_event(stream, world.record(other))


def _decomposed_all(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world: World, plan: Decomposed, out: torch.Tensor
) -> None:
    """Chunks of rows: the library's all-reduce of one under the GEMM of the next. Fewer CTAs for NCCL: NCCL_MAX_CTAS."""
    stream, comm = world.current_stream(), world.side_stream("comm")
    rows = x.shape[0] // world.size
    for group in group_steps(plan, world.size):
        lo, hi = group.start * rows, group.stop * rows
        world.linear(x[lo:hi], weight, None, stream, out[lo:hi])
        world.wait_event(comm, world.record(stream))
        world.all_reduce(out[lo:hi], comm)
    world.wait_event(stream, world.record(comm))
    add_bias(world, out, bias, stream)


def _fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    plan: Fused,
    out: torch.Tensor,
    shards: tuple[int, ...],
    everywhere: bool,
) -> None:
    m, (n, k) = x.shape[0], weight.shape
    stream, size = world.current_stream(), world.size
    bm, bn, bk, block = plan.block_m, plan.block_n, plan.block_k, min(plan.pull_rows, plan.block_m)
    tiles_m, tiles_n = -(-max(shards) // bm), -(-n // bn)
    arena = world.arena(size * tiles_m * bm * tiles_n * bn * x.element_size())
    world.order(arena, stream)
    op = ALL if everywhere else SCATTER
    forward = min(plan.forward, -(-world.sm_count // 4))
    pullers = min(plan.pullers, world.sm_count - forward)  # one of them fits beside a GEMM program on an SM

    def prepare() -> dict[str, Any]:
        return dict(
            ch=world.channel(f"{op} {list(shards)}x{n}x{k} {plan}", 3 * tiles_m * tiles_n, None),
            offsets=world.tensor([sum(shards[:r]) for r in range(size + 1)], torch.int32),
        )

    def args() -> dict[str, Any]:
        prepared = world.cached((op, shards, n, k, plan), prepare)
        view, granules = flat(world, arena.memory)
        if view is None:
            raise Unsupported("the ranks' symmetric memory lies too far apart for one descriptor")
        return dict(
            x_desc=descriptor(x, m, k, (bm, bk)), w_desc=descriptor(weight, n, k, (bn, bk)), arenas=arena.memory.addresses,
            arena_desc=view.descriptor(x.dtype, bm, bn // 2), flat_desc=view.descriptor(x.dtype, block, bn // 2),
            granules=granules, out=out, bias=bias if bias is not None else out, turn=arena.turn,
            half=arena.half // x.element_size(), tiles_m=tiles_m, M=m, N=n, K=k, **prepared, DTYPE=DTYPES[x.dtype],
            PULLERS=pullers, FORWARD=forward, BATCH=plan.batch, R=block, STAGES=plan.pull_stages,
            LAG=plan.lag, BM=bm, BN=bn, BK=bk, GROUP_M=-(-plan.group_m // size) * size, BIAS=bias is not None,
            ALL=everywhere,
        )  # fmt: skip

    aligned = tuple(t is not None and t.data_ptr() % 16 == 0 for t in (out, bias))  # Triton compiles for it
    name = (op, shards, n, k, x.dtype, plan, bias is not None, aligned)
    _launch(world, plan, forward + pullers, args, stream, name, places(x, weight, bias, out, arena.memory.local))


def _launch(
    world: World,
    plan: Fused,
    others: int,
    args: Callable[[], dict[str, Any]],
    stream: Any,
    name: tuple,
    addresses: tuple[int, ...],
) -> None:
    """Two launches on two streams that join again, of `others` programs that communicate and of the GEMM's. `name`: what fixes the kernel and its sizes; `addresses`: of the tensors
    in `args`."""
    key = (*name, *addresses)
    side, workers = world.side_stream("pull"), world.sm_count
    pull = lambda: dict(args(), COMPUTE=False, WORKERS=workers)  # noqa: E731
    gemm = lambda: dict(args(), COMPUTE=True, WORKERS=workers)  # noqa: E731
    options = dict(num_warps=plan.warps, num_stages=plan.stages)
    small = dict(num_warps=4, num_stages=plan.stages, beside=True)

    def load() -> bool:  # both, before either runs: a puller without its GEMM would wait in vain
        world.load(kernel, others, pull(), small)
        world.load(kernel, workers, gemm(), options)
        return True

    world.cached(("fits", *name), load)
    world.wait_event(side, world.record(stream))
    world.launch(kernel, others, pull, small, side, (*key, "pull"))
    world.launch(kernel, workers, gemm, options, stream, (*key, "gemm"))
    world.wait_event(stream, world.record(side))
