"""x @ weight.T summed over ranks: scattered by rows (the row-parallel half of a tensor-parallel layer) or on every rank.

Decomposed: cuBLAS on the farthest owners' rows first; a copy engine pushes each group's partial rows into the owner's
staging slots while the next group computes; the owner sums its slots in fp32 in rank order (TileLink's hybrid mapping).
One shot and two shots: cuBLAS, then one launch that sums a few rows (transport/low_latency_kernels.py, ops/all_reduce/low_latency_kernels.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ...errors import Unsupported
from ...op import Direct, Operands, registered
from ...operands import DTYPES, dense, places
from ...plans import SMALL, Decomposed, Fused, OneShot, Plan, Sequential, Signaled, TwoShot
from ...transport import low_latency as posted
from ...transport.copies import COPIES, chunks, group_steps, sum_parts
from ...transport.library import scattered_sum
from ...transport.memory import descriptor, flat, lock
from ...world import World
from ..all_reduce.op import posts, sum_everywhere, sum_few
from ..common import Factors, MatmulCall, MatmulOp, add_bias, given_rows, split_rows, validate, whole_words
from . import signaled
from .kernels import gemm_reduce as kernel
from .signaled import SCATTER

ALL = "matmul_all_reduce"


@dataclass(frozen=True)
class ReduceCall(MatmulCall):
    """reorder False: the result may come as the tiles that a signaled plan leaves; then also a Remap is returned, None where rows are
    in order."""

    reorder: bool

    def agreed(self) -> dict[str, Hashable]:
        return super().agreed() | dict(reorder=self.reorder)


class MatmulReduce(MatmulOp):
    """What the two sums over ranks share."""

    everywhere: ClassVar[bool]  # all-reduce; else reduce-scatter

    def outputs(self, world: World, call: ReduceCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        rows = call.rows if self.everywhere else call.shards[world.rank]
        return [((rows, call.n), call.dtype)]

    def returned(self, world: World, call: Any, result: torch.Tensor, more: Any) -> Any:
        return result if call.reorder else (result, None)

    def fits(self, world: World, call: Any, plan: Plan, asked: str | Plan) -> str | None:
        reason = super().fits(world, call, plan, asked)
        if reason is None and isinstance(plan, Signaled) and plan.copies:
            reason = whole_words(N=call.n)
            if reason is None and not (self.everywhere or (call.even and self.movable(plan, call.rows, world.size))):
                reason = f"shards {list(call.shards)} must be equal, and whole tiles of {plan.block_m} rows"
        if reason is None and isinstance(plan, Fused) and plan.forward < 1:
            raise Unsupported(f"{self.name}: {plan} has no program that tells of finished tiles")
        return reason

    def execute(self, world: World, call: ReduceCall, plan: Plan, operands: Operands, out: torch.Tensor | None) -> Any:
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
    everywhere = False
    fused = Fused(pullers=48, pull_rows=64, pull_stages=4, forward=16)
    variants = (
        fused, replace(fused, pullers=64), replace(fused, pullers=64, forward=4), replace(fused, pullers=64, forward=2),
    )  # fmt: skip
    runs = {
        Sequential: "_sequential",
        Decomposed: "_decomposed",
        Fused: "_fused",
        OneShot: "_one_shot",
        Signaled: "_signaled",
    }
    small = SMALL

    def movable(self, plan: Plan, m: int, world: int) -> bool:
        """Groups are rows of equal shards of whole tiles."""
        return not isinstance(plan, Signaled) or not plan.copies or m % (world * plan.block_m) == 0

    def check(self, world: World, operands: Operands, options: tuple[Any, ...]) -> ReduceCall:
        (x, weight, bias), (rows, reorder) = operands, options
        assert x is not None and weight is not None
        validate(self.name, world, x, weight, bias)
        shards = split_rows(world, x.shape[0]) if rows is None else given_rows(self.name, world, rows, x, whole=True)
        return ReduceCall(shards, weight.shape[0], weight.shape[1], x.dtype, bias is not None, reorder)

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
        _decomposed(*operands, world, plan, out)

    def _one_shot(self, world: World, call: ReduceCall, plan: OneShot, operands: Factors, out: torch.Tensor) -> None:
        x, weight, bias = operands
        stream = world.current_stream()
        posted.scatter(world.linear(x, weight, None, stream), world, plan, call.shards, stream, out)
        add_bias(world, out, bias, stream)


class MatmulAllReduce(MatmulReduce):
    """Options: reorder."""

    name, collective = ALL, "all_reduce"
    everywhere = True
    fused = Fused(pullers=96, pull_rows=32, pull_stages=7, forward=16)
    variants = (fused, replace(fused, forward=4), replace(fused, pullers=64, forward=4))
    scatters_rows = False
    runs = {
        Sequential: "_sequential", Decomposed: "_decomposed", Fused: "_fused", OneShot: "_shots", TwoShot: "_shots",
        Signaled: "_signaled",
    }  # fmt: skip
    small = SMALL

    def check(self, world: World, operands: Operands, options: tuple[Any, ...]) -> ReduceCall:
        (x, weight, bias), (reorder,) = operands, options
        assert x is not None and weight is not None
        validate(self.name, world, x, weight, bias)
        shards = split_rows(world, x.shape[0])
        return ReduceCall(shards, weight.shape[0], weight.shape[1], x.dtype, bias is not None, reorder)

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
            sum_everywhere(partial, world, plan, out)
        add_bias(world, out, bias, stream)


MATMUL_REDUCE_SCATTER = registered(MatmulReduceScatter())
MATMUL_ALL_REDUCE = registered(MatmulAllReduce())


def _direct(world: World, rows: int, n: int, everywhere: bool) -> Direct:
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
