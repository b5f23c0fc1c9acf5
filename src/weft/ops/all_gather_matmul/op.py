"""all_gather(x) @ weight.T: the column-parallel half of a tensor-parallel layer (TileLink, section 5.1)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, overload

import torch

from ... import gemms
from ...backends.base import Arguments, Stream, SymmetricTensor
from ...errors import Unsupported
from ...lang.jit import constants
from ...lang.mapping import StaticMapping, TableMapping, shard_tables
from ...library import Backward, CallOptions, column_sums, product
from ...op import REGISTRY, Direct, Operands, Returned, registered
from ...operands import places
from ...plans import SMALL, TWO_AN_SM, Awaiting, Decomposed, Fused, OneShot, Plan, Sequential
from ...transport import low_latency as posted
from ...transport.collectives import gather, regathered, summed
from ...transport.copies import COPIES, chunks
from ...transport.memory import Halves, descriptor, flat, half_elements, lock
from ...world import World
from .. import by_collectives
from ..activation import gate
from ..common import (
    Factors,
    MatmulCall,
    MatmulOp,
    add_bias,
    gemm_arguments,
    given_rows,
    plain_rows,
    tile_of,
    turned,
    validate,
    whole_words,
)
from .kernels import Product, Pull, Shards, copied_gemm
from .kernels import all_gather_gemm as kernel

_NAME = "all_gather_matmul"


@dataclass(frozen=True)
class GatherCall(MatmulCall):
    """gated: 0, or the columns I of an output silu(gate) * up [M, I], for a weight whose rows alternate
    `Scale.interleave` gate and as many up rows, the last blocks padded with zeros. gathered: the gathered activation is
    returned too; each rank's own choice."""

    gated: int
    gathered: bool

    def agreed(self) -> dict[str, Hashable]:
        return super().agreed() | dict(gated=self.gated)


class AllGatherMatmul(MatmulOp[GatherCall]):
    """all_gather(x) @ weight.T + bias. Options: rows of every rank or None, gated, gathered. Returns (result, gathered
    or None)."""

    name = _NAME
    signature = "Tensor x, Tensor weight, Tensor? bias, SymInt[]? rows, int gated, bool gathered"
    results = 2
    collective = "all_gather"
    turns = Sequential, Decomposed, Fused, OneShot
    runs = {
        Sequential: "_sequential",
        Decomposed: "_decomposed",
        Fused: "_fused",
        Awaiting: "_awaiting",
        OneShot: "_one_shot",
    }
    small = SMALL
    variants = (Fused(), Fused(pullers=0), Fused(pullers=12, split=4), TWO_AN_SM, replace(TWO_AN_SM, pullers=0))
    tries: ClassVar[Sequence[Awaiting]] = tuple(Awaiting(*form) for form in gemms.FORMS if form.pingpong)

    def check(self, world: World, operands: Operands, options: CallOptions) -> GatherCall:
        (x, weight, bias), (rows, gated, gathered) = operands, options
        assert x is not None and weight is not None
        validate(self.name, world, x, weight, bias)
        shards = (x.shape[0],) * world.size if rows is None else given_rows(self.name, world, rows, x, whole=False)
        return GatherCall(shards, weight.shape[0], weight.shape[1], x.dtype, bias is not None, gated, gathered)

    def outputs(self, world: World, call: GatherCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        gathered = [((call.rows, call.k), call.dtype)] if call.gathered else []
        return [((call.rows, call.gated or call.n), call.dtype), *gathered]

    def returned(self, world: World, call: GatherCall, result: torch.Tensor, more: object) -> Returned:
        if not call.gathered:
            return result, None
        return result, more if call.rows else world.empty((0, call.k), call.dtype)

    def saved(
        self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        """The gathered activation instead of this rank's rows, where it was asked for."""
        (x, weight, _), (_, gated, gathered) = operands, options
        if gated:
            raise RuntimeError("all-gather + gated GEMM has no gradient: use all_gather_matmul, then silu_mul")
        return ((results[1] if gathered else x) if needs[1] else None, weight if needs[0] else None)

    def backward(self, world: World, given: Backward) -> Sequence[torch.Tensor | None]:
        """dx is a GEMM + reduce-scatter of dy, dweight takes the activation gathered again, or kept."""
        (x, weight), (dy, dfull), (rows, _, gathered) = given.saved, given.gradients, given.options
        like = dy if dy is not None else dfull
        assert like is not None
        shards = (like.shape[0] // world.size,) * world.size if rows is None else rows
        dx = dw = db = None
        if dy is not None:
            dy = dy.contiguous()
            if given.needs[1]:
                assert x is not None
                dw = product(world, dy.t(), x if gathered else regathered(world, x, shards))
            if given.needs[2]:
                db = column_sums(world, dy)
            if given.needs[0]:
                assert weight is not None
                dx = REGISTRY["matmul_reduce_scatter"](world, "auto", (dy, weight.t(), None), (shards, True))
        if dfull is not None and gathered and given.needs[0]:
            part = summed(world, dfull, shards)
            total = dx if dx is not None else world.zeros(tuple(part.shape), part.dtype)
            world.call(lambda: total.add_(part), [total, part], [total], world.current_stream())
            dx = total
        return dx, dw, db

    def fits(self, world: World, call: GatherCall, plan: Plan, asked: str | Plan) -> str | None:
        if isinstance(plan, Awaiting):
            return self._not_awaiting(world, call, plan, asked)
        reason = super().fits(world, call, plan, asked)
        if reason is None and not isinstance(plan, Decomposed):
            reason = whole_words(N=call.gated)
        if reason is None and isinstance(plan, Fused):
            programs, split = world.sm_count * plan.per_sm, plan.split
            if plan.pullers >= programs:
                raise Unsupported(f"{self.name}: {plan.pullers} pullers leave none of {programs} programs for the GEMM")
            if plan.pullers % split:
                raise Unsupported(f"{self.name}: {plan.pullers} pullers cannot share chunks {split} by {split}")
        return reason

    def _not_awaiting(self, world: World, call: GatherCall, plan: Awaiting, asked: str | Plan) -> str | None:
        missing = gemms.lacks() if world.backend.name == "cuda" else None
        reason = world.symmetric_reason or whole_words(K=call.k, N=call.n) or missing and f"quack: {missing}"
        reason = reason or self.lopsided(world, call, plan, asked)
        if reason is None and not self.movable(plan, call.rows, world.size):
            reason = f"shards of {call.shards[0]} rows are not whole clusters of {plan.cluster_m} x {plan.tile_m}"
        return reason

    def candidates(self, world: World, call: GatherCall) -> Sequence[Plan]:
        """Those whose clusters the shards are whole ones of, in which the library's GEMM is right on every rank. None
        for ranks that share a GPU, where a trial would time the others."""
        could = call.even and world.symmetric_reason is None and not world.backend.shares_gpu
        fit = [plan for plan in self.tries if could and self.movable(plan, call.rows, world.size)]
        key = (self.name, "usable", call.dtype)
        if not fit or (key not in world.decided and world.capturing()):
            return ()
        if key not in world.decided:
            world.agree(f'{self.name}: the first call with plan="auto" in {call.dtype}')
            world.decided[key] = _usable(world, self.tries, call.dtype)
        return [plan for plan in fit if plan in world.decided[key] and self.fits(world, call, plan, "auto") is None]

    def alike(self, call: GatherCall) -> Hashable:
        """As the library's GEMM counts M, of shards of one length; others have nothing to try."""
        return tuple((call.agreed() | dict(rows=gemms.stepped(call.rows), even=call.even)).items())

    def movable(self, plan: Plan, m: int, world: int) -> bool:
        return not isinstance(plan, Awaiting) or m % (world * plan.tile_m * plan.cluster_m) == 0

    def copies_shards(self, plan: Plan) -> bool:
        return isinstance(plan, Decomposed | Awaiting) or (isinstance(plan, Fused) and not plan.pullers)

    def direct(self, world: World, call: GatherCall, plan: Plan) -> Direct | None:
        usual = isinstance(plan, Sequential) and call.even
        return _direct(world, call.rows, call.k, call.gated, call.gathered) if usual else None

    # -- the kinds of plans
    def _sequential(
        self, world: World, call: GatherCall, plan: Plan, operands: Factors, out: torch.Tensor
    ) -> torch.Tensor:
        gathered = gather(operands[0], world, call.shards, world.current_stream())
        self._then_linear(world, call, gathered, operands, out)
        return gathered.clone() if call.gathered and world.size == 1 else gathered  # one rank: it is x itself

    def _one_shot(
        self, world: World, call: GatherCall, plan: OneShot, operands: Factors, out: torch.Tensor
    ) -> torch.Tensor:
        gathered = posted.gather(operands[0], world, plan, call.shards, world.current_stream())
        return self._then_linear(world, call, gathered, operands, out)

    def _then_linear(
        self, world: World, call: GatherCall, gathered: torch.Tensor, operands: Factors, out: torch.Tensor
    ) -> torch.Tensor:
        _, weight, bias = operands
        with ungated(world, call, out) as full:
            world.linear(gathered, weight, bias, world.current_stream(), full)
        return gathered

    def _decomposed(
        self, world: World, call: GatherCall, plan: Decomposed, operands: Factors, out: torch.Tensor
    ) -> torch.Tensor:
        with ungated(world, call, out) as full:
            if world.symmetric_reason:
                return by_collectives.gather(*operands, world, plan, full)
            return _decomposed(*operands, world, plan, full, call.gathered)

    def _fused(
        self, world: World, call: GatherCall, plan: Fused, operands: Factors, out: torch.Tensor
    ) -> torch.Tensor | None:
        block = world.scale.interleave
        run = _fused if plan.pullers else _copied
        if plan.block_n in (2 * block, 4 * block):  # the epilogue has a gate's columns beside their up's
            return run(*operands, world, plan, out, call.gathered, call.shards, call.gated)
        with ungated(world, call, out) as full:
            return run(*operands, world, plan, full, call.gathered, call.shards, 0)

    def _awaiting(
        self, world: World, call: GatherCall, plan: Awaiting, operands: Factors, out: torch.Tensor
    ) -> torch.Tensor:
        with ungated(world, call, out) as full:
            return _awaiting(*operands, world, plan, full, call.gathered)


ALL_GATHER_MATMUL = registered(AllGatherMatmul())


@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    return_gathered: Literal[False] = False,
    rows: Sequence[int] | None = None,
) -> torch.Tensor: ...
@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    return_gathered: Literal[True],
    rows: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    return_gathered: bool,
    rows: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def all_gather_matmul(
    x_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    rows: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """all_gather(x_shard) @ weight.T + bias: the column-parallel half of a layer (TileLink, section 5).

    Every rank holds some rows of the activation and some columns of the layer, and gets all rows of its columns.

    Args:
        x_shard: [m_r, K], this rank's rows. m_r may be 0, and need not be a multiple of anything.
        weight: [N, K], this rank's part, laid out as in `nn.Linear`.
        bias: [N], this rank's part.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", a kind ("sequential", "decomposed", "fused", "awaiting", "one_shot") or a Plan; on all ranks alike
        out: [M, N], contiguous: where to write the result; it may hold an operand. Not differentiable.
        return_gathered: also return the gathered activation, a tensor of its own. It is differentiable, and kept: the
            backward pass then does not gather again.
        rows: rows of every rank's shard, in the order of the ranks, where they are not all equal. None: all ranks have
            as many as this one.

    All tensors are bfloat16 or all float16, on `world.device`, contiguous or not. What is not is copied, but
    for a weight that is a contiguous one transposed. Sums are accumulated in float32.

    Returns:
        [M, N] with M = sum(rows), the shards in the order of the ranks; with `return_gathered` also [M, K].

    Backward: dx_shard is a GEMM + reduce-scatter of dy with the same rows, through the weight transposed;
    dweight gathers the activation again; dbias sums dy over its rows.

    Memory beside the output, symmetric and shared by all ops of the World: none (sequential), M K / W elements
    (decomposed, and fused with `pullers=0`), M K (awaiting), 2 M K (fused) or 3 M K elements (one shot, for few rows).
    All but fused with pullers and awaiting also take [M, K] of ordinary memory during the call.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, quoted.
        Mismatch: ranks disagree on shapes, dtype or plan, or make different calls.
        Timeout: a peer did not arrive; see the guide.
        WeftError: the first call of a shape inside a CUDA graph capture.
    """
    options = plain_rows(_NAME, rows), 0, return_gathered
    y, full = ALL_GATHER_MATMUL(world, plan, (x_shard, weight, bias), options, out)
    return (y, full) if return_gathered else y


def all_gather_swiglu(
    x_shard: torch.Tensor,
    weight: torch.Tensor,
    columns: int,
    world: World,
    plan: str | Plan,
    rows: Sequence[int] | None,
) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T) [M, columns] for x = all_gather(x_shard), in one launch where the plan is fused.

    weight [S, K] alternates blocks of `world.scale.interleave` rows of gate and of up, the last two padded with zeros.
    No gradient: use all_gather_matmul and silu_mul.
    """
    options = plain_rows(_NAME, rows), columns, False
    return ALL_GATHER_MATMUL(world, plan, (x_shard, weight, None), options)[0]


@contextmanager
def ungated(world: World, call: GatherCall, out: torch.Tensor) -> Iterator[torch.Tensor]:
    """[M, N] to write what a gate is applied to at the end, on its way to `out`; without a gate `out` itself."""
    full = world.empty((call.rows, call.n), call.dtype) if call.gated else out
    yield full
    if call.gated:
        gate(full, out, world, world.scale.interleave)


def _direct(world: World, m: int, k: int, gated: int, return_gathered: bool) -> Direct:
    """What a sequential call of equal, contiguous shards comes to, in as little host time as Python takes."""
    check, current, empty, finish = world.check, world.current_stream, world.empty, world.finish
    all_gather, linear, block = world.all_gather, world.linear, world.scale.interleave

    def run(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        check()
        stream = current()
        full = empty((m, k), x.dtype)
        all_gather(full, x, stream)
        y = linear(full, weight, bias, stream)
        if gated:
            both, y = y, empty((m, gated), x.dtype)
            gate(both, y, world, block)
        finish(stream)
        return y, full if return_gathered else None

    return run


def _decomposed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    plan: Decomposed,
    out: torch.Tensor,
    return_gathered: bool,
) -> torch.Tensor:
    """x -> symmetric shard, barrier; a copy engine pulls group after group, each group's GEMM starts when it is there,
    on two streams in turn, so that one fills the SMs that the last tiles of the one before leave idle. The barrier
    behind the copies keeps a fast rank from overwriting its shard in the next call while a peer still reads."""
    rows, me = x.shape[0], world.rank
    stream, copies, second = world.current_stream(), world.side_stream("copy"), world.side_stream("gemm", urgent=False)
    groups = chunks(plan, me, world.size)
    alone = len(groups[0][1]) == 1  # the own rows, which are in x
    gathered, shard = _staged(x, world, stream, copies, return_gathered or not alone)
    parts, outs, landed = gathered.split(rows), out.split(rows), []
    with world.on(copies):  # once, not for every copy
        for group in groups:
            for p in group[1]:
                if p != me:
                    world.copy(parts[p], shard.peers[p], copies)
            landed.append(world.record(copies))
        world.barrier(copies)
    for i, (first, ranks) in enumerate(groups):
        lane, own, one = second if i % 2 else stream, alone and i == 0, len(ranks) == 1
        if not own:
            world.wait_event(lane, landed[i])
        run = slice(first * rows, (first + len(ranks)) * rows)
        part = x if own else parts[first] if one else gathered[run]
        world.linear(part, weight, bias, lane, outs[first] if one else out[run])
    world.wait_event(stream, world.record(second))
    world.wait_event(stream, world.record(copies))
    return gathered


def _staged(
    x: torch.Tensor, world: World, stream: Stream, copies: Stream, whole: bool
) -> tuple[torch.Tensor, SymmetricTensor]:
    """A fresh gathered [world x rows, K], with x in this rank's rows (`whole`), and the symmetric shard with x in it;
    `copies` goes on once every rank has staged its shard. On the caller's stream, before the GEMM: a copy within a GPU
    takes SMs."""
    rows, k = x.shape
    shard = world.buffer("shard", rows * k * x.element_size()).view(0, (rows, k), x.dtype)
    world.order(lock(world, COPIES), stream)
    gathered = world.empty((world.size * rows, k), x.dtype)
    world.copy(shard.local, x, stream)
    world.wait_event(copies, world.record(stream))
    world.barrier(copies)
    if whole:
        world.copy(gathered[world.rank * rows : (world.rank + 1) * rows], x, stream)
    return gathered, shard


def _gated_gemm(
    world: World,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Fused,
    out: torch.Tensor,
    gated: int,
    workers: int,
    flatten: bool,
) -> dict[str, object]:
    """What both kernels take of the GEMM."""
    m, block, tile = out.shape[0], world.scale.interleave, tile_of(plan, plan.group_m, turned(weight))
    return dict(
        gemm_arguments(weight, bias, plan),
        out_desc=descriptor(out, m, out.shape[1], (plan.block_m, block if gated else plan.block_n // 2)),
        M=m,
        product=constants(Product, tile=tile, WORKERS=workers, GATED=block if gated else 0, FLATTEN=flatten),
    )


def _copied(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    plan: Fused,
    out: torch.Tensor,
    return_gathered: bool,
    shards: tuple[int, ...],
    gated: int,
) -> torch.Tensor:
    """A copy engine pulls shard after shard, nearest peer first, and sets each one's channel behind it; one GEMM kernel
    takes the tiles as they come. It leaves a place on one SM for the barriers beside it. In a CUDA graph another stream
    sets the channels, so that the next copy does not wait for that; launched one by one, the host's time for two more
    calls a peer costs more."""
    (rows, k), (n, _), size, me = x.shape, weight.shape, world.size, world.rank
    m, bm, bk = rows * size, plan.block_m, plan.block_k
    name = (_NAME, shards, n, k, x.dtype, plan, gated, bias is not None, turned(weight))

    def prepare() -> dict[str, Any]:
        whole = StaticMapping.over(m, size, tile_rows=bm, channel_rows=rows, arrivals=1)
        mapping = whole if rows % bm == 0 else _tables(world, shards, bm, rows, 1)
        offsets = world.tensor([r * rows for r in range(size)], torch.int32)
        ch = world.channel(f"{_NAME} {list(shards)}x{n}x{k} {plan}", size, mapping, 1)
        return dict(ch=ch, turn=world.tensor([1], torch.int32), offsets=offsets)

    prepared = world.cached(("copied", _NAME, shards, n, k, plan), prepare)  # the call's number goes with the channel
    counters, call = prepared["ch"].counters, prepared["turn"]
    workers = world.sm_count * plan.per_sm - 1
    stream, copies, apart = world.current_stream(), world.side_stream("copy"), world.capturing()
    signals = world.side_stream("signal") if apart else copies
    own = rows // bm if rows % bm == 0 else 0
    gathered, shard = _staged(x, world, stream, copies, return_gathered or not own)

    def args() -> Arguments:
        return dict(
            x_desc=descriptor(x, rows, k, (bm, bk)),
            gathered_desc=descriptor(gathered, m, k, (bm, bk)),
            own=own,
            **prepared,
            **_gated_gemm(world, weight, bias, plan, out, gated, workers, plan.flatten),
        )

    options = dict(num_warps=plan.warps, num_stages=plan.stages, per_sm=plan.per_sm)
    world.cached(("loaded", *name), lambda: world.load(copied_gemm, workers, args(), options) or True)
    world.launch(copied_gemm, workers, args, options, stream, (*name, *places(x, weight, bias, out, gathered)))
    parts, flags = gathered.split(rows), counters.split(1)
    with world.on(copies):  # once, not for every copy
        for j in range(1, size):
            p = (me + j) % size
            world.copy(parts[p], shard.peers[p], copies)
            if apart:
                world.wait_event(signals, world.record(copies))
            world.signal(flags[p], call, signals)
        world.barrier(copies)
    for other in (copies, signals) if apart else (copies,):
        world.wait_event(stream, world.record(other))
    return gathered


def _awaiting(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    plan: Awaiting,
    out: torch.Tensor,
    return_gathered: bool,
) -> torch.Tensor:
    """A copy engine pulls shard after shard, nearest peer first, to symmetric memory, which the library's GEMM reads,
    and behind each one sets the flag for which that GEMM waits.

    The GEMM takes every SM, registers and all, and looks at its flags without a limit. So they must come to be set
    without an SM, and without a peer. All ranks have met in a barrier before it starts, which is bounded, and nothing
    but that barrier stands before the copies that set them. Each is copied from its peer's memory, as a copy within a
    GPU may need an SM: the word is what this rank's own notify of the barrier left there, the number of the call. So
    the copies end, and with them the GEMM, even where the barrier expired. The GEMM is loaded, and run once, before
    anything waits in it."""
    (rows, k), (n, _), size, me = x.shape, weight.shape, world.size, world.rank
    stream, copies, on_gpu = world.current_stream(), world.side_stream("copy"), world.backend.name == "cuda"
    shards = world.buffer("gathered", size * rows * k * x.element_size()).view(0, (size, rows, k), x.dtype)
    gathered, parts = shards.local.view(size * rows, k), shards.local.unbind(0)
    form = _form(plan)
    flags, words, told = world.cached((_NAME, "flags"), lambda: _flags(world))

    def multiply(call: torch.Tensor) -> bool:
        if on_gpu:
            gemms.awaiting(gathered, weight, out, flags, call, me, form)
        return on_gpu

    world.cached(("awaiting", _NAME, rows * size, n, k, x.dtype, plan), lambda: multiply(words[me]))
    world.order(lock(world, COPIES), stream)
    world.copy(parts[me], x, stream)
    world.wait_event(copies, world.record(stream))
    call = world.barrier(copies, _STAGED)
    world.wait_event(stream, world.record(copies))
    world.signal(words[me], call, stream)
    with world.on(copies):
        for p in ((me + j) % size for j in range(1, size)):
            world.copy(parts[p], shards.peers[p][p], copies)
            world.signal(words[p], told[p], copies)
        world.barrier(copies)
    if on_gpu:
        world.call(lambda: multiply(call), [gathered, weight, flags, call], [out], stream)
    else:  # what the kernel does, shard by shard
        for p in ((me + j) % size for j in range(size)):
            world.wait(words[p], call, stream)
            world.linear(parts[p], weight, None, stream, out[p * rows : (p + 1) * rows])
    add_bias(world, out, bias, stream)
    world.wait_event(stream, world.record(copies))
    if not return_gathered:
        return gathered
    kept = world.empty((size * rows, k), x.dtype)
    world.copy(kept, gathered, stream)
    return kept


def _usable(world: World, plans: Sequence[Awaiting], dtype: torch.dtype) -> list[Awaiting]:
    """Collective, plan by plan: a rank may have to compile what another has kept."""
    there = all(world.exchange(gemms.lacks() is None))
    return [p for p in plans if there and all(world.exchange(gemms.waits(_form(p), world.device, dtype)))]


def _form(plan: Awaiting) -> gemms.Form:
    return gemms.Form(plan.tile_m, plan.tile_n, plan.cluster_m, plan.pingpong)


_STAGED = f"{_NAME}, staged"  # the barrier whose number is that of a call


def _flags(world: World) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """A flag for each rank's shard, together and one by one; and by rank, the word of its memory that this rank alone
    counts up, in that barrier."""
    flags, ch = world.zeros((world.size,), torch.int32), world.channel(_STAGED, world.size, None, 1)
    return flags, flags.split(1), [world.counter(ch, world.rank, p) for p in range(world.size)]


@dataclass(frozen=True)
class Pulls:
    """How the shards travel: `split` programs share a chunk, in blocks of rows x cols elements. An own chunk is copied
    in `parts` parts, a multiple of `split`."""

    split: int
    parts: int
    rows: int
    cols: int
    bulk: bool  # chunks are whole blocks, at whole blocks

    @classmethod
    def of(cls, plan: Fused, k: int, even: bool) -> Pulls:
        chunk, rows = plan.block_m * k, plan.pull_rows
        cols, split = plan.block_n // 2, plan.split
        return cls(split, -(-16 // split) * split, rows, cols, even and chunk % (split * rows * cols) == 0)


def _even(shards: tuple[int, ...], plan: Fused) -> bool:
    return len(set(shards)) == 1 and shards[0] % plan.block_m == 0


def _tables(world: World, shards: Sequence[int], tile: int, channel: int, arrivals: int) -> TableMapping:
    """For shards that are not whole tiles of one number: as integers of a mapping their lengths would each compile
    another kernel."""
    t = shard_tables(shards, tile_rows=tile, channel_rows=channel)
    names = ("row_lo", "row_hi", "rank", "channel_lo", "channel_hi")
    return TableMapping(*world.words(*(t[name] for name in names), [arrivals] * t["channel_base"][-1]))


def _prepare(world: World, shards: tuple[int, ...], n: int, k: int, plan: Fused, parts: int) -> Arguments:
    """Channel and tables of one shape. Channels: one a chunk of block_m rows, then `ready`."""
    m = sum(shards)
    t = shard_tables(list(shards), tile_rows=plan.block_m, channel_rows=plan.block_m)
    chunks = t["channel_base"][-1]
    mapping: StaticMapping | TableMapping
    if _even(shards, plan):
        mapping = StaticMapping.over(m, world.size, tile_rows=plan.block_m, channel_rows=plan.block_m, arrivals=parts)
    else:
        mapping = _tables(world, shards, plan.block_m, plan.block_m, parts)
    own = -(-shards[world.rank] // plan.block_m) * parts + 1
    ch = world.channel(f"{_NAME} {list(shards)}x{n}x{k} {plan}", chunks + 1, mapping, [parts] * chunks + [own])
    return dict(
        ch=ch,
        shards=Shards(*world.words(t["offset"], t["channel_base"])),
    )


def _fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    world: World,
    plan: Fused,
    out: torch.Tensor,
    return_gathered: bool,
    shards: tuple[int, ...],
    gated: int,
) -> torch.Tensor | None:
    m, (n, k) = sum(shards), weight.shape
    stream = world.current_stream()
    arena = world.arena(m * k * x.element_size(), row=k * x.element_size())
    world.order(arena, stream)
    half = half_elements(arena.half, k, x.dtype)
    memory = arena.memory.local.view(x.dtype)
    turn = arena.turn.clone() if return_gathered else None
    even = _even(shards, plan)
    pull, programs = Pulls.of(plan, k, even), world.sm_count * plan.per_sm

    def args() -> Arguments:
        prepared = world.cached((_NAME, shards, n, k, plan), lambda: _prepare(world, shards, n, k, plan, pull.parts))
        bm, bk = plan.block_m, plan.block_k
        view, granules = flat(world, arena.memory)
        bulk = pull.bulk and view is not None and half % pull.cols == 0
        arena_desc = descriptor(memory, half // k + m, k, (bm, bk))
        return dict(
            x=x,
            x_desc=descriptor(x, x.shape[0], k, (bm, bk)) if even else arena_desc,
            arena=Halves.of(arena, granules, half),
            arena_desc=arena_desc,
            own=shards[0] // bm if even else 0,
            flat_desc=view.descriptor(x.dtype, pull.rows, pull.cols) if bulk and view else arena_desc,
            **prepared,
            **_gated_gemm(world, weight, bias, plan, out, gated, programs - plan.pullers, plan.flatten and even),
            pull=constants(
                Pull,
                PULLERS=plan.pullers,
                PARTS=pull.parts,
                SPLIT=pull.split,
                BULK=bulk,
                ROWS=pull.rows,
                COLS=pull.cols,
                STAGES=plan.pull_stages,
            ),
        )

    name = (_NAME, shards, n, k, x.dtype, plan, gated, turned(weight))
    options = dict(num_warps=plan.warps, num_stages=plan.stages, per_sm=plan.per_sm)
    world.launch(kernel, programs, args, options, stream, (*name, *places(x, weight, bias, out, memory)))
    return None if turn is None else _half_at(world, memory, turn, half, m, k)


def _half_at(world: World, memory: torch.Tensor, turn: torch.Tensor, half: int, m: int, k: int) -> torch.Tensor:
    """A copy of the arena's half that call number `turn` filled, row by row: torch copies a few long rows slowly."""
    gathered, stream, first = world.empty((m, k), memory.dtype), world.current_stream(), half // k
    rows = torch.as_strided(memory, (first + m, k), (k, 1))
    numbers = world.cached(("numbers", m), lambda: world.tensor(list(range(m)), torch.int64))
    world.call(
        lambda: torch.index_select(rows, 0, numbers + turn % 2 * first, out=gathered), [rows], [gathered], stream
    )
    return gathered
