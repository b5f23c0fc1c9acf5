"""x @ weight.T summed over ranks: scattered by rows (the row-parallel half of a tensor-parallel layer) or on every
rank.

Decomposed: cuBLAS on the farthest owners' rows first; a copy engine pushes each group's partial rows into the owner's
staging slots while the next group computes; the owner sums its slots in fp32 in rank order (TileLink's hybrid mapping).
One shot and two shots: cuBLAS, then one launch that sums a few rows (transport/low_latency_kernels.py,
ops/all_reduce/low_latency_kernels.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, overload

import torch

from ...backends.base import Arguments, Stream
from ...errors import Unsupported
from ...lang.jit import constants
from ...library import Backward, CallOptions, column_sums, product
from ...op import REGISTRY, Direct, Operands, Returned, registered
from ...operands import dense, places, requires_grad
from ...plans import SMALL, Decomposed, Fused, OneShot, Plan, Sequential, Signaled, TwoShot, posts
from ...transport import low_latency as posted
from ...transport.collectives import regathered, scattered_sum
from ...transport.copies import COPIES, chunks, group_steps, sum_parts
from ...transport.memory import Halves, descriptor, flat, lock
from ...world import World
from .. import by_collectives
from ..all_reduce.op import ALL_REDUCE, sum_few
from ..common import (
    Factors,
    MatmulCall,
    MatmulOp,
    add_bias,
    gemm_arguments,
    given_rows,
    plain_rows,
    split_rows,
    tile_of,
    turned,
    validate,
    whole_words,
)
from ..norm import Remap
from . import signaled
from .kernels import Sums
from .kernels import gemm_reduce as kernel
from .signaled import SCATTER

ALL = "matmul_all_reduce"


@dataclass(frozen=True)
class ReduceCall(MatmulCall):
    """reorder False: the result may come as the tiles that a signaled plan leaves; then also a Remap is returned, None
    where rows are in order."""

    reorder: bool
    m: int

    @property
    def rows(self) -> int:
        return self.m

    def agreed(self) -> dict[str, Hashable]:
        return super().agreed() | dict(reorder=self.reorder)


class MatmulReduce(MatmulOp[ReduceCall]):
    """What the two sums over ranks share."""

    everywhere: ClassVar[bool]  # all-reduce; else reduce-scatter
    turns = Sequential, Decomposed, Fused, OneShot, TwoShot

    def saved(
        self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        x, weight, _ = operands
        return x if needs[1] else None, weight if needs[0] else None

    def outputs(self, world: World, call: ReduceCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        rows = call.rows if self.everywhere else call.shards[world.rank]
        return [((rows, call.n), call.dtype)]

    def returned(self, world: World, call: ReduceCall, result: torch.Tensor, more: object) -> Returned:
        return result if call.reorder else (result, None)

    def fits(self, world: World, call: ReduceCall, plan: Plan, asked: str | Plan) -> str | None:
        reason = super().fits(world, call, plan, asked)
        if reason is None and isinstance(plan, Signaled) and plan.copies:
            reason = whole_words(N=call.n)
            if reason is None and not (self.everywhere or (call.even and self.movable(plan, call.rows, world.size))):
                reason = f"shards {list(call.shards)} must be equal, and whole tiles of {plan.block_m} rows"
        if reason is None and isinstance(plan, Fused) and plan.forward < 1:
            raise Unsupported(f"{self.name}: {plan} has no program that tells of finished tiles")
        return reason

    def execute(
        self, world: World, call: ReduceCall, plan: Plan, operands: Operands, out: torch.Tensor | None
    ) -> Returned:
        if call.reorder or not isinstance(plan, Signaled) or not call.rows:
            return super().execute(world, call, plan, operands, out)
        world.check()
        x, weight, bias = operands
        assert x is not None and weight is not None
        x, weight, bias = dense(x), dense(weight), None if bias is None else dense(bias)
        tiles = signaled.reduce(self.name, x, weight, bias, world, plan, call.shards, self.everywhere)
        world.finish(world.current_stream())
        return tiles

    def direct(self, world: World, call: ReduceCall, plan: Plan) -> Direct | None:
        usual = isinstance(plan, Sequential) and call.reorder and (self.everywhere or call.even)
        return _direct(world, call.shards[0], call.n, self.everywhere) if usual else None

    # -- the kinds of plans
    def _fused(self, world: World, call: ReduceCall, plan: Fused, operands: Factors, out: torch.Tensor) -> None:
        _fused(*operands, world, plan, out, call.shards, self.everywhere)

    def _signaled(self, world: World, call: ReduceCall, plan: Signaled, operands: Factors, out: torch.Tensor) -> None:
        signaled.reduce(self.name, *operands, world, plan, call.shards, self.everywhere, out)


class MatmulReduceScatter(MatmulReduce):
    """Options: rows that every rank gets, or None for as even a split as there is; reorder."""

    name, collective = SCATTER, "reduce_scatter"
    signature = "Tensor x, Tensor weight, Tensor? bias, SymInt[]? rows, bool reorder"
    everywhere = False
    fused = Fused(pullers=48, pull_rows=64, pull_stages=4, forward=16)
    variants = (
        fused,
        replace(fused, pullers=64),
        replace(fused, pullers=64, forward=4),
        replace(fused, pullers=64, forward=2),
    )
    runs = {
        Sequential: "_sequential",
        Decomposed: "_decomposed",
        Fused: "_fused",
        OneShot: "_one_shot",
        Signaled: "_signaled",
    }
    small = SMALL

    def backward(self, world: World, given: Backward) -> Sequence[torch.Tensor | None]:
        """dx is an all-gather + GEMM of dy, dweight takes the dy that this gathered."""
        (x, weight), (dy,), (rows, _), needs = given.saved, given.gradients, given.options, given.needs
        assert dy is not None
        shards = split_rows(world, given.shapes[0][0]) if rows is None else rows
        dx = full = None
        if needs[0]:
            assert weight is not None
            options = shards, 0, needs[1] or needs[2]
            dx, full = REGISTRY["all_gather_matmul"](world, "auto", (dy, weight.t(), None), options)
        elif needs[1] or needs[2]:
            full = regathered(world, dy, shards)
        dw = product(world, full.t(), x) if needs[1] and x is not None and full is not None else None
        return dx, dw, column_sums(world, full) if needs[2] and full is not None else None

    def movable(self, plan: Plan, m: int, world: int) -> bool:
        """Groups are rows of equal shards of whole tiles."""
        return not isinstance(plan, Signaled) or not plan.copies or m % (world * plan.block_m) == 0

    def check(self, world: World, operands: Operands, options: CallOptions) -> ReduceCall:
        (x, weight, bias), (rows, reorder) = operands, options
        assert x is not None and weight is not None
        validate(self.name, world, x, weight, bias)
        shards = split_rows(world, x.shape[0]) if rows is None else given_rows(self.name, world, rows, x, whole=True)
        return ReduceCall(shards, weight.shape[0], weight.shape[1], x.dtype, bias is not None, reorder, x.shape[0])

    def _sequential(self, world: World, call: ReduceCall, plan: Plan, operands: Factors, out: torch.Tensor) -> None:
        x, weight, bias = operands
        stream = world.current_stream()
        if world.size == 1:
            world.linear(x, weight, bias, stream, out)
            return
        scattered_sum(world.linear(x, weight, None, stream), world, call.shards, stream, out)
        add_bias(world, out, bias, stream)

    def _decomposed(
        self, world: World, call: ReduceCall, plan: Decomposed, operands: Factors, out: torch.Tensor
    ) -> None:
        if world.symmetric_reason:
            by_collectives.scatter(*operands, world, plan, out)
        else:
            _decomposed(*operands, world, plan, out)

    def _one_shot(self, world: World, call: ReduceCall, plan: OneShot, operands: Factors, out: torch.Tensor) -> None:
        x, weight, bias = operands
        stream = world.current_stream()
        posted.scatter(world.linear(x, weight, None, stream), world, plan, call.shards, stream, out)
        add_bias(world, out, bias, stream)


class MatmulAllReduce(MatmulReduce):
    """Options: reorder."""

    name, collective = ALL, "all_reduce"
    signature = "Tensor x, Tensor weight, Tensor? bias, bool reorder"
    everywhere = True
    fused = Fused(pullers=96, pull_rows=32, pull_stages=7, forward=16)
    variants = (fused, replace(fused, forward=4), replace(fused, pullers=64, forward=4))
    scatters_rows = False
    runs = {
        Sequential: "_sequential",
        Decomposed: "_decomposed",
        Fused: "_fused",
        OneShot: "_shots",
        TwoShot: "_shots",
        Signaled: "_signaled",
    }
    small = SMALL

    def backward(self, world: World, given: Backward) -> Sequence[torch.Tensor | None]:
        """Nothing is communicated: every rank has all of dy."""
        (x, weight), (dy,), needs = given.saved, given.gradients, given.needs
        assert dy is not None
        dy = dy.contiguous()
        dx = product(world, dy, weight) if needs[0] and weight is not None else None
        dw = product(world, dy.t(), x) if needs[1] and x is not None else None
        return dx, dw, column_sums(world, dy) if needs[2] else None

    def check(self, world: World, operands: Operands, options: CallOptions) -> ReduceCall:
        (x, weight, bias), (reorder,) = operands, options
        assert x is not None and weight is not None
        validate(self.name, world, x, weight, bias)
        shards = split_rows(world, x.shape[0])
        return ReduceCall(shards, weight.shape[0], weight.shape[1], x.dtype, bias is not None, reorder, x.shape[0])

    def _sequential(self, world: World, call: ReduceCall, plan: Plan, operands: Factors, out: torch.Tensor) -> None:
        x, weight, bias = operands
        stream = world.current_stream()
        if world.size == 1:
            world.linear(x, weight, bias, stream, out)
            return
        world.linear(x, weight, None, stream, out)
        world.all_reduce(out, stream)
        add_bias(world, out, bias, stream)

    def _decomposed(
        self, world: World, call: ReduceCall, plan: Decomposed, operands: Factors, out: torch.Tensor
    ) -> None:
        _decomposed_all(*operands, world, plan, out)

    def _shots(
        self, world: World, call: ReduceCall, plan: OneShot | TwoShot, operands: Factors, out: torch.Tensor
    ) -> None:
        x, weight, bias = operands
        stream = world.current_stream()
        partial = world.linear(x, weight, None, stream)
        if posts(plan):
            sum_few(partial, world, plan, stream, out)
        else:
            ALL_REDUCE.call(world, plan, (partial,), (), out)
        add_bias(world, out, bias, stream)


MATMUL_REDUCE_SCATTER = registered(MatmulReduceScatter())
MATMUL_ALL_REDUCE = registered(MatmulAllReduce())


@overload
def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    reorder: Literal[True] = True,
) -> torch.Tensor: ...
@overload
def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: None = None,
    rows: Sequence[int] | None = None,
    reorder: Literal[False],
) -> tuple[torch.Tensor, Remap | None]: ...
@overload
def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: None = None,
    rows: Sequence[int] | None = None,
    reorder: bool,
) -> torch.Tensor | tuple[torch.Tensor, Remap | None]: ...
def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    reorder: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, Remap | None]:
    """This rank's rows of the sum over ranks of x @ weight.T, + bias: the row-parallel half of a layer (TileLink,
    section 5).

    Every rank holds all rows of some columns of the activation, and gets some rows of the whole output.

    Args:
        x: [M, K], this rank's columns of the activation. M may be 0, and need not be a multiple of anything.
        weight: [N, K], this rank's part, laid out as in `nn.Linear`.
        bias: [N], the same on all ranks. It is added once, to the sum.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", a kind ("sequential", "decomposed", "fused", "signaled", "one_shot") or a Plan; the same on all
            ranks.
        out: [m_r, N], contiguous: where to write the result; it may hold an operand. Not differentiable.
        rows: rows that every rank gets, in the order of the ranks. None: M is split as evenly as possible, longer
            shards first (`weft.lang.balanced_rows`).
        reorder: False: leave the result as the plan's communication leaves it and return it with a `weft.Remap`, for
            `weft.rms_norm` or `weft.residual_add`; the Remap is None for rows in ordinary order (all plans but
            "signaled"). Without gradient, `out` and torch.compile.

    Dtypes, devices, layouts and errors are those of `all_gather_matmul`. Sums over ranks are accumulated in float32, in
    the order of the ranks ("sequential", and "signaled" without `copies`: as NCCL does it).

    Returns:
        [m_r, N], with m_r = rows[world.rank].

    Backward: dx is an all-gather + GEMM of dy, through the weight transposed; dweight uses the dy that this
    gathered. dbias is the sum of dy over all rows of all ranks, so every rank gets the same, and the copies of the bias
    stay equal.

    Memory beside the output, symmetric and shared by all ops of the World: none (sequential), M N elements (decomposed)
    or 2 M N elements, rows rounded up to whole tiles (fused), or 3 M N, of the longest shard W times (one shot, for few
    rows). All of these but fused also take [M, N] of ordinary memory during the call; signaled takes M N (1 + 1 / W),
    rows rounded up to whole tiles a shard, and no symmetric memory, or, moved by copies, as decomposed.
    """
    if not reorder:
        check_plain(SCATTER, out, x, weight, bias)
    return MATMUL_REDUCE_SCATTER(world, plan, (x, weight, bias), (plain_rows(SCATTER, rows), reorder), out)


@overload
def matmul_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    reorder: Literal[True] = True,
) -> torch.Tensor: ...
@overload
def matmul_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: None = None,
    reorder: Literal[False],
) -> tuple[torch.Tensor, Remap | None]: ...
@overload
def matmul_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: None = None,
    reorder: bool,
) -> torch.Tensor | tuple[torch.Tensor, Remap | None]: ...
def matmul_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    reorder: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, Remap | None]:
    """The sum over ranks of x @ weight.T, + bias, on every rank: a row-parallel layer without sequence parallelism
    (TileLink, section 5).

    Args, dtypes and errors are those of `matmul_reduce_scatter`: x [M, K], weight [N, K], bias [N] the same on all
    ranks, out [M, N]. plan may also be "two_shot" (of few rows better TwoShot(post=True)).

    Returns:
        [M, N], the same bits on every rank.

    Backward communicates nothing: dx = dy @ weight, dweight = dy.T @ x, dbias sums dy. So every rank must compute the
    same loss from the output, which counts once; a dy that differs by rank must be summed over ranks before.

    Memory beside the output, symmetric and shared by all ops of the World: none (sequential, decomposed) or 2 M N
    elements, rows rounded up to whole tiles (fused); none with signaled, where N is a multiple of 8 (else M N elements
    of ordinary memory during the call, rounded up to whole tiles); moved by copies M N (1 + 1 / W), M rounded up a
    little. One shot and two shots: M N of ordinary memory, and what `weft.all_reduce` takes.
    """
    if not reorder:
        check_plain(ALL, out, x, weight, bias)
    return MATMUL_ALL_REDUCE(world, plan, (x, weight, bias), (reorder,), out)


def check_plain(
    op: str, out: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise ValueError unless `reorder=False` may go with these."""
    if out is not None or torch.compiler.is_compiling() or (torch.is_grad_enabled() and requires_grad(x, weight, bias)):
        raise ValueError(
            f"{op}: reorder=False takes no out=, has no gradient (use torch.no_grad()) and is not compiled"
        )


def _direct(world: World, rows: int, n: int, everywhere: bool) -> Direct:
    """What a sequential call of equal shards and contiguous operands comes to, in as little host time as Python
    takes."""
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


def _decomposed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world: World, plan: Decomposed, out: torch.Tensor
) -> None:
    """The first barrier says that every staging slot may be written again, the others that every push of a piece has
    landed. GEMMs run on two streams in turn, so that one fills the SMs that the last tiles of the one before leave
    idle."""
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
    world.barrier(copies)
    for piece in range(pieces):
        for first, ranks in groups:
            lane, one = next(lanes), len(ranks) == 1
            at, run = first * pieces + piece, slice(first * rows, (first + len(ranks)) * rows)
            world.linear(xs[at] if one else x[run], weight, None, lane, parts[at] if one else partial[run])
            world.wait_event(copies, world.record(lane))
            for p in ranks:
                if p != me:
                    world.copy(staging.peers[p][piece, me], parts[p * pieces + piece], copies)
        world.barrier(copies)
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
    """Chunks of rows: the library's all-reduce of one under the GEMM of the next. Fewer CTAs for NCCL:
    NCCL_MAX_CTAS."""
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

    def prepare() -> Arguments:
        return dict(
            ch=world.channel(f"{op} {list(shards)}x{n}x{k} {plan}", 3 * tiles_m * tiles_n, None),
            offsets=world.tensor([sum(shards[:r]) for r in range(size + 1)], torch.int32),
        )

    def args() -> Arguments:
        prepared = world.cached((op, shards, n, k, plan), prepare)
        view, granules = flat(world, arena.memory)
        if view is None:
            raise Unsupported("the ranks' symmetric memory lies too far apart for one descriptor")
        return dict(
            x_desc=descriptor(x, m, k, (bm, bk)),
            arena=Halves.of(arena, granules, arena.half // x.element_size()),
            arena_desc=view.descriptor(x.dtype, bm, bn // 2),
            flat_desc=view.descriptor(x.dtype, block, bn // 2),
            out=out,
            tiles_m=tiles_m,
            **prepared,
            **gemm_arguments(weight, bias, plan),
            tile=tile_of(plan, -(-plan.group_m // size) * size, turned(weight)),
            how=constants(
                Sums,
                WORKERS=world.sm_count,
                FORWARD=forward,
                PULLERS=pullers,
                BATCH=plan.batch,
                R=block,
                STAGES=plan.pull_stages,
                LAG=plan.lag,
                ALL=everywhere,
            ),
        )

    aligned = tuple(t is not None and t.data_ptr() % 16 == 0 for t in (out, bias))  # Triton compiles for it
    name = (op, shards, n, k, x.dtype, plan, bias is not None, aligned, turned(weight))
    _launch(world, plan, forward + pullers, args, stream, name, places(x, weight, bias, out, arena.memory.local))


def _launch(
    world: World,
    plan: Fused,
    others: int,
    args: Callable[[], Arguments],
    stream: Stream,
    name: tuple,
    addresses: tuple[int, ...],
) -> None:
    """Two launches on two streams that join again, of `others` programs that communicate and of the GEMM's. `name`:
    what fixes the kernel and its sizes; `addresses`: of the tensors in `args`."""
    key = (*name, *addresses)
    side, workers = world.side_stream("pull"), world.sm_count
    pull = lambda: dict(args(), COMPUTE=False)  # noqa: E731
    gemm = lambda: dict(args(), COMPUTE=True)  # noqa: E731
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
