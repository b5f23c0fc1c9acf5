"""Attention of this rank's queries over the keys and values of all ranks (TileLink, section 5: AG-KV attention).

    segmented      computes attention over local keys while remote keys arrive, then over remote keys in a few calls,
                   and merges the partial results (segmented.py)
    head_parallel  exchanges queries, keys and values for whole sequences of some heads (head_parallel.py)
    sequential     all-gathers keys and values with NCCL, then computes attention

All plans compute attention with a library (libraries.py). No tile waits inside a library call: only whole calls overlap
with transfers.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, Required, TypedDict, Unpack, overload

import torch

from ...errors import Unsupported
from ...op import Call, Op, Operands, Shapes, registered
from ...plans import HeadParallel, Plan, Segmented, Sequential
from ...prepared import OwnResult, Run
from ...tensor_checks import DTYPES, check_devices, dims
from ...torch_library import Backward, CallOptions
from ...world import World
from ..common import check_rows, plain_rows
from . import head_parallel, segmented
from .backward import backward, sinks_gradient
from .key_ranges import KeyGroup, KeyRange, KeyRanges, causal_key_ranges, packed_key_ranges, zigzag_rows
from .libraries import MAX_HEAD_DIM, BackwardOperands
from .segmented import AttentionConfig, GroupsByRank, KeyValues

_NAME = "gathered_attention"
LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class AttentionCall(Call):
    """A checked call. `queries` is this rank's number of queries. The ranks compare neither this number, nor whether
    there are sinks, nor the offsets of packed sequences, which change from call to call, because no collective depends
    on them."""

    config: AttentionConfig
    queries: int
    causal: bool
    zigzag: bool
    window: int
    cu_seqlens: tuple[int, ...]  # offsets of packed sequences; empty for a single sequence

    @property
    def rows(self) -> int:
        return sum(self.config.shards)

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        config = self.config
        return dict(
            rows=config.shards,
            heads=config.heads,
            kv_heads=config.kv_heads,
            D=config.dim,
            dtype=str(config.dtype),
            scale=config.scale,
            causal=self.causal,
            layout=LAYOUTS[self.zigzag],
            window=self.window,
            packed=bool(self.cu_seqlens),
        )


class AttentionOperands(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None


def key_ranges_for_plan(world: World, call: AttentionCall, plan: Plan) -> KeyRanges:
    """Return the keys that this rank's queries see. Without a mask, a sequential plan processes the keys of all ranks
    in one library call, because they are contiguous after the all-gather."""
    unmasked = not (call.causal or call.cu_seqlens) and world.size > 1
    if isinstance(plan, Sequential) and unmasked:
        ranges = tuple(KeyRange(source, 0, n) for source, n in enumerate(call.config.shards) if n)
        return KeyRanges((), (KeyGroup(0, ranges),))
    return key_ranges_of(call, world.rank, call.queries)


@functools.lru_cache(maxsize=1024)
def groups_of_ranks(call: AttentionCall) -> GroupsByRank:
    return tuple(key_ranges_of(call, rank, n).remote for rank, n in enumerate(call.config.shards))


def key_ranges_of(call: AttentionCall, rank: int, queries: int) -> KeyRanges:
    """Return the keys that the queries of `rank` see, if it has this number of queries."""
    shards = call.config.shards
    if call.cu_seqlens or call.window:
        cu_seqlens = call.cu_seqlens or (0, call.rows)
        return packed_key_ranges(rank, shards, queries, cu_seqlens, call.causal, call.window)
    return causal_key_ranges(rank, shards, queries, call.causal, call.zigzag)


def prepare_segmented(world: World, call: AttentionCall, plan: Plan) -> Run | OwnResult:
    key_ranges, groups_by_rank = key_ranges_for_plan(world, call, plan), groups_of_ranks(call)
    forward = segmented.prepare_forward(world, call.config, plan, call.queries, key_ranges, groups_by_rank)

    def run(operands: AttentionOperands, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, sinks = operands
        return forward(q, KeyValues(k, v), sinks, out)

    if isinstance(plan, Sequential) and (call.cu_seqlens or not call.causal):  # one library call computes the result
        return OwnResult(run)
    return lambda operands, out: run(operands, out)[1:]


def prepare_head_parallel(world: World, call: AttentionCall, plan: HeadParallel) -> Run:
    sequence = replace(call, config=replace(call.config, shards=(call.rows,)), queries=call.rows, zigzag=False)
    key_ranges = key_ranges_of(sequence, 0, call.rows)
    forward = head_parallel.prepare_forward(world, call.config, plan, key_ranges, call.zigzag, call.queries)

    def run(operands: AttentionOperands, out: torch.Tensor) -> tuple[torch.Tensor]:
        q, k, v, sinks = operands
        return (forward(q, KeyValues(k, v), sinks, out),)

    return run


class GatheredAttention(Op[AttentionCall]):
    """The op gathered_attention. The operands are q, k, v and sinks. The options are causal, scale or None, window or
    0, cu_seqlens or None, rows of every rank or None, and layout. The results are out and lse."""

    name = _NAME
    signature = (
        "Tensor q, Tensor k, Tensor v, Tensor? sinks, bool causal, float? scale, int window, SymInt[]? cu_seqlens,"
        " SymInt[]? rows, str layout"
    )
    results = 2
    operand_type = AttentionOperands
    runs = {Sequential: prepare_segmented, Segmented: prepare_segmented, HeadParallel: prepare_head_parallel}
    autotune_plans = Segmented(), Segmented(calls=1), HeadParallel()
    emulator_plan = Segmented()

    def check(self, world: World, operands: AttentionOperands, options: CallOptions) -> AttentionCall:
        (q, k, *_), (causal, scale, window, cu_seqlens, rows, layout) = operands, options
        cu_seqlens = tuple(cu_seqlens or ())
        check_operands(world, operands)
        if layout not in LAYOUTS:
            raise ValueError(f"{_NAME}: layout {layout!r} is not one of {list(LAYOUTS)}")
        shards = (k.shape[0],) * world.size if rows is None else check_rows(_NAME, world, rows, k, whole=False)
        zigzag = causal and layout == "zigzag"
        check_packed(cu_seqlens, window, causal, zigzag, sum(shards))
        if (causal or cu_seqlens) and (q.shape[0] > k.shape[0] or (zigzag and q.shape[0] < k.shape[0])):
            count = "as many queries as keys" if zigzag else "at most as many queries as keys"
            raise ValueError(
                f"{_NAME}: a causal mask and packed sequences need {count}, because queries have the positions of keys:"
                f" q is {dims(q)}, k is {dims(k)}"
            )
        if zigzag and shards != zigzag_rows(sum(shards), world.size):
            raise ValueError(
                f"{_NAME}: rows {list(shards)} are no zigzag split of {sum(shards)}, which leaves the ranks"
                f" {list(zigzag_rows(sum(shards), world.size))} (weft.zigzag_rows)"
            )
        if q.shape[0] and not sum(shards):
            raise ValueError(f"{_NAME}: no rank has keys for q {dims(q)}")
        scale = q.shape[2] ** -0.5 if scale is None else float(scale)
        config = AttentionConfig(shards, q.shape[1], k.shape[1], q.shape[2], q.dtype, scale)
        return AttentionCall(config, q.shape[0], causal, zigzag, window, cu_seqlens)

    def meta(self, world: World, operands: AttentionOperands, options: CallOptions) -> Shapes:
        q = operands.q
        return [(tuple(q.shape), q.dtype), ((q.shape[1], q.shape[0]), torch.float32)]

    def outputs(self, world: World, call: AttentionCall) -> Shapes:
        config = call.config
        return [((call.queries, config.heads, config.dim), config.dtype), ((config.heads, call.queries), torch.float32)]

    def saved_tensors(
        self, operands: AttentionOperands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        (q, k, *_), (_, _, window, cu_seqlens, *_) = operands, options
        if (window or cu_seqlens is not None) and q.shape[0] != k.shape[0]:
            raise RuntimeError(
                f"{_NAME}: the gradient with a window or packed sequences needs as many queries as keys on every rank:"
                f" q is {dims(q)}, k is {dims(k)}"
            )
        return *operands, *results

    def backward(self, world: World, ctx: Backward) -> Sequence[torch.Tensor | None]:
        q, k, v, sinks, out, lse = ctx.saved
        assert q is not None and k is not None and v is not None and out is not None and lse is not None
        dout, dlse = ctx.gradients
        if dlse is not None:
            raise RuntimeError(f"{_NAME}: the lse of return_lse has no gradient; detach it")
        call: AttentionCall = ctx.call
        plan = Sequential() if world.size == 1 or world.backend.symmetric_unsupported else Segmented()
        if dout is None or not call.rows:
            needed = zip((q, k, v, sinks), ctx.needs, strict=True)
            return [torch.zeros_like(t) if t is not None and need else None for t, need in needed]
        operands = BackwardOperands(q, k, v, out, lse, dout)
        key_ranges, groups_by_rank = key_ranges_of(call, world.rank, call.queries), groups_of_ranks(call)
        dqkv = backward(world, call.config, plan, key_ranges, groups_by_rank, operands, ctx.needs)
        return *dqkv, sinks_gradient(world, sinks, out, lse, dout) if ctx.needs[3] else None

    def sizes(self, call: AttentionCall) -> tuple[int, int, int]:
        return call.rows, call.config.heads, call.config.dim

    def unsupported(self, world: World, call: AttentionCall, plan: Plan, asked: str | Plan) -> str | None:
        if isinstance(plan, HeadParallel):
            config = call.config
            if config.heads % world.size or config.kv_heads % world.size:
                return f"{config.heads} heads and {config.kv_heads} kv heads do not divide by {world.size} ranks"
            if call.queries > config.shards[world.rank]:
                n = config.shards[world.rank]
                raise ValueError(f"{_NAME}: {plan} needs at most as many queries as keys, got {call.queries} and {n}")
        return world.backend.symmetric_unsupported

    def candidates(self, world: World, call: AttentionCall) -> Sequence[Plan]:
        """Return the plans that autotuning times. With two ranks there is only one remote key range, so
        Segmented(calls=1) equals Segmented(). Head-parallel plans are timed only for a causal mask in the contiguous
        layout, in which the ranks have unequal work."""
        unbalanced = call.causal and not call.zigzag

        def differs(plan: Plan) -> bool:
            if isinstance(plan, Segmented):
                return world.size > 2 or plan.calls != 1
            return unbalanced

        return [plan for plan in self.autotune_plans if differs(plan)]


GATHERED_ATTENTION = registered(GatheredAttention())


def check_operands(world: World, operands: AttentionOperands) -> None:
    q, k, v, sinks = operands
    check_devices(_NAME, world, operands._asdict())
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{_NAME}: q must be [m, heads, D] and k, v [n, kv heads, D], or all with a batch dimension before; got"
            f" {dims(q)}, {dims(k)}, {dims(v)}"
        )
    heads, d = q.shape[1:]
    if not k.shape[1] or not heads or heads % k.shape[1]:
        raise ValueError(f"{_NAME}: heads {heads} of q {dims(q)} must be a multiple of those of k {dims(k)}")
    if d % 8 or not 0 < d <= MAX_HEAD_DIM:
        raise ValueError(f"{_NAME}: D {d} of q {dims(q)} must be a multiple of 8, at most {MAX_HEAD_DIM}")
    if q.dtype not in DTYPES:
        raise TypeError(f"{_NAME}: q is {dims(q)}; bfloat16 and float16 are supported")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{_NAME}: {name} is {dims(t)}, q is {dims(q)}: one dtype is needed")
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype not in (q.dtype, torch.float32)):
        raise ValueError(f"{_NAME}: sinks {dims(sinks)} must be [{heads}], float32 or of the dtype of q {dims(q)}")


def check_packed(cu_seqlens: Sequence[int], window: int, causal: bool, zigzag: bool, length: int) -> None:
    if zigzag and (cu_seqlens or window):
        raise Unsupported(f"{_NAME}: packed sequences and windows need the contiguous layout, whose keys are one run")
    if window < 0 or (window and not causal):
        raise ValueError(f"{_NAME}: a window counts the keys that a causal query sees, got {window}, causal {causal}")
    if cu_seqlens and (cu_seqlens[0] != 0 or cu_seqlens[-1] != length or any(a > b for a, b in pairwise(cu_seqlens))):
        raise ValueError(f"{_NAME}: cu_seqlens {list(cu_seqlens)} must go from 0 up to {length}, the keys of all ranks")


def batch_to_heads(t: torch.Tensor) -> torch.Tensor:
    """Return [batch, rows, heads, D] as [rows, batch * heads, D]. If the batch size is 1, the result is a view."""
    return t.transpose(0, 1).flatten(1, 2)


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `gathered_attention` except return_lse."""

    world: Required[World]
    plan: str | Plan
    out: torch.Tensor | None
    rows: Sequence[int] | None
    causal: bool
    scale: float | None
    window: int | None
    cu_seqlens: Sequence[int] | None
    sinks: torch.Tensor | None
    layout: str


@overload
def gathered_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...
@overload
def gathered_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def gathered_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    sinks: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    layout: str = "contiguous",
    return_lse: bool = False,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(scale q K^T) V over the keys K and values V of all ranks. The function computes attention over a
    sequence that is split across the ranks (TileLink, section 5).

    Every rank holds some rows of the sequence and returns the output for its own queries.

    Args:
        q: [m_r, heads, D], this rank's queries. There may be fewer queries than keys, or none. D is a multiple of 8, at
            most 256. q, k and v may also have a leading batch dimension: [batch, m_r, heads, D].
        k, v: [n_r, kv heads, D]. Query head h uses key head h * kv heads // heads.
        causal: a query sees the keys up to its own position in the sequence. The queries belong to the last m_r of this
            rank's n_r rows; the layout "zigzag" needs m_r = n_r.
        scale: the factor of the scores. None: D ** -0.5.
        window: a causal query sees only the last `window` keys, including its own. None: all keys.
        cu_seqlens: the offsets at which packed sequences begin, from 0, followed by the end, over the rows of all
            ranks: integers on the host, the same on every rank (which is not checked). A query sees only keys of its
            own sequence, and the queries belong to the last m_r of this rank's n_r rows. weft keeps the tensors that it
            prepares for each list of offsets, because a CUDA graph may read them.
        sinks: [heads], logits that are terms of every softmax sum and have no value (GPT-OSS), or None; float32 or the
            dtype of q.
        rows: the number of keys of each rank. None: all ranks have as many keys as this one.
        layout: which rows each rank holds under a causal mask. "contiguous": the ranks' rows follow one another, so
            that the last rank has the most work. "zigzag": each rank has the rows that `weft.zigzag_split` returns, so
            that all ranks have equal work; `rows` are then `weft.zigzag_rows`.
        return_lse: whether the logarithm of the softmax's sums is returned too, which has no gradient.
        world: the ranks. All ranks must make the same call in the same order.
        plan: "auto", "sequential", "segmented", "head_parallel" or a Plan of one of these classes; the same on all
            ranks.
        out: [m_r, heads, D], contiguous: the tensor for the result, which may share memory with an operand. A call with
            `out` is not differentiable. With a batch dimension the batch size must be 1.

    All tensors except sinks are bfloat16, or all are float16, and they are on `world.device`. Partial results are
    rounded to the dtype before they are merged. The rounding adds at most the error of rounding the result itself.

    Returns:
        [m_r, heads, D]; with `return_lse` also float32 [heads, m_r], natural logarithms. With a batch dimension, both
        results have this dimension too, and for a batch size above 1 the rows of the result are not contiguous.

    Backward: each rank fetches the remote keys and values again. An all-to-all returns their gradients to their ranks,
    which sum them in float32 in rank order. The gradient of sinks covers this rank's queries only. With a window or
    packed sequences, every rank must have as many queries as keys.

    Memory: a call needs one partial result per library call, and the keys and values of all ranks, which segmented
    plans keep in symmetric memory. head_parallel plans keep the queries, keys, values and results of one rank in
    symmetric memory.

    Raises:
        ValueError, TypeError: a shape, dtype or device is invalid; the message quotes it.
        Unsupported: no library on this machine supports such attention (the message quotes the errors of all
            libraries); a window or packed sequences in the zigzag layout; `out` with a batch size above 1.
        Mismatch, Timeout: as for `all_gather_matmul`.
        WeftError: the first call of a shape is inside a CUDA graph capture.

    Examples:
        >>> q = k = v = torch.ones(4, 2, 16).bfloat16()
        >>> weft.spmd(lambda world: tuple(weft.gathered_attention(q, k, v, world=world).shape), 2, backend="emulated")
        [(4, 2, 16), (4, 2, 16)]
    """
    if window is not None and window < 1:
        raise ValueError(f"{_NAME}: window {window} must be at least 1, or None")
    batch = len(q) if all(isinstance(t, torch.Tensor) and t.dim() == 4 for t in (q, k, v)) else None
    if batch is not None:
        if len({t.shape[0] for t in (q, k, v)}) > 1:
            raise ValueError(f"{_NAME}: q, k and v must have the same batch, got q {dims(q)}, k {dims(k)}, v {dims(v)}")
        if out is not None and batch > 1:
            raise Unsupported(f"{_NAME}: out= needs a batch of 1, got {batch}")
        q, k, v = (batch_to_heads(t) for t in (q, k, v))
        sinks = sinks.repeat(batch) if isinstance(sinks, torch.Tensor) else sinks
        batched_out, out = out, None if out is None else batch_to_heads(out)
    offsets = None if cu_seqlens is None else plain_rows(_NAME, cu_seqlens)
    options = bool(causal), scale, window or 0, offsets, None if rows is None else plain_rows(_NAME, rows), layout
    result, lse = GATHERED_ATTENTION(world, plan, AttentionOperands(q, k, v, sinks), options, out)
    if batch is not None:
        result = result.unflatten(1, (batch, -1)).transpose(0, 1) if batched_out is None else batched_out
        lse = lse.unflatten(0, (batch, -1))
    return (result, lse) if return_lse else result
