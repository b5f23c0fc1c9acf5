"""Attention of this rank's queries over the keys and values of all ranks (TileLink, section 5: AG-KV attention).

    segmented      own keys first while the others' arrive, then those in few calls, and one merge (segmented.py)
    head_parallel  queries, keys and values exchanged for whole sequences of some heads (head_parallel.py)
    sequential     the library's all-gather of keys and values, then its attention

Attention itself is a library's in all (libraries.py), so that no tile waits inside it: what overlaps is whole calls.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, overload

import torch

from ...errors import Unsupported
from ...op import Call, Direct, Op, Returned, registered
from ...plans import HeadParallel, Plan, Segmented, Sequential
from ...tensor_checks import DTYPES, check_device, dense, dims
from ...torch_library import Backward, CallOptions
from ...world import World
from ..common import given_rows, plain_rows
from . import head_parallel, segmented
from .backward import Attended, backward, sinks_gradient
from .key_ranges import Group, Piece, Sight, packed_sight, sight, zigzag_rows
from .libraries import MOST_D
from .segmented import Heads, Keys, Views

_NAME = "gathered_attention"
LAYOUTS = ("contiguous", "zigzag")
MOST_PUSHED = 16 << 20  # bytes of a rank's keys from which on copy engines are as fast, and take no SM


@dataclass(frozen=True)
class AttentionCall(Call):
    """queries: this rank's own, and so is whether there are sinks: no collective hangs on them. Nor does one on the
    bounds of packed sequences, which change from call to call: ranks do not compare them."""

    of: Heads
    queries: int
    causal: bool
    zigzag: bool
    window: int
    bounds: tuple[int, ...]  # of packed sequences; empty: one sequence

    @property
    def rows(self) -> int:
        return sum(self.of.shards)

    def agreed(self) -> dict[str, Hashable]:
        of = self.of
        return dict(
            rows=of.shards,
            heads=of.heads,
            kv_heads=of.kv_heads,
            D=of.dim,
            dtype=str(of.dtype),
            scale=of.scale,
            causal=self.causal,
            layout=LAYOUTS[self.zigzag],
            window=self.window,
            packed=bool(self.bounds),
        )


class AttentionOperands(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None


def forward(
    world: World, call: AttentionCall, plan: Plan, operands: AttentionOperands, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, sinks = operands
    seen = seen_by(world, call, plan)
    return segmented.forward(world, call.of, plan, seen, views_of(call), q, Keys(k, v), sinks, out)


def seen_by(world: World, call: AttentionCall, plan: Plan) -> Sight:
    """Return what this rank's queries see: without a mask a sequential call takes all ranks' keys at once, as the
    all-gather leaves them one behind another."""
    whole = not (call.causal or call.bounds) and world.size > 1
    if isinstance(plan, Sequential) and whole:
        return Sight((), (Group(0, tuple(Piece(r, 0, n) for r, n in enumerate(call.of.shards) if n)),))
    return seen_of(call, world.rank, call.queries)


@functools.lru_cache(maxsize=1024)
def views_of(call: AttentionCall) -> Views:
    return tuple(seen_of(call, r, n).others for r, n in enumerate(call.of.shards))


def seen_of(call: AttentionCall, rank: int, queries: int) -> Sight:
    """Return what a rank sees that has so many queries."""
    shards = call.of.shards
    if call.bounds or call.window:
        return packed_sight(rank, shards, queries, call.bounds or (0, call.rows), call.causal, call.window)
    return sight(rank, shards, queries, call.causal, call.zigzag)


def run_segmented(
    world: World, call: AttentionCall, plan: Plan, operands: AttentionOperands, out: torch.Tensor
) -> torch.Tensor:
    return forward(world, call, plan, operands, out)[1]


def run_head_parallel(
    world: World, call: AttentionCall, plan: HeadParallel, operands: AttentionOperands, out: torch.Tensor
) -> torch.Tensor:
    q, k, v, sinks = operands
    whole = replace(call, of=replace(call.of, shards=(call.rows,)), queries=call.rows, zigzag=False)
    seen = seen_of(whole, 0, call.rows)
    return head_parallel.forward(world, call.of, plan, seen, call.zigzag, q, Keys(k, v), sinks, out)


class GatheredAttention(Op[AttentionCall]):
    """Operands: q, k, v, sinks. Options: causal, scale or None, window or 0, bounds of packed sequences or None, rows
    of every rank or None, layout. Returns (out, lse)."""

    name = _NAME
    signature = (
        "Tensor q, Tensor k, Tensor v, Tensor? sinks, bool causal, float? scale, int window, SymInt[]? cu_seqlens,"
        " SymInt[]? rows, str layout"
    )
    results = 2
    takes = AttentionOperands
    runs = {Sequential: run_segmented, Segmented: run_segmented, HeadParallel: run_head_parallel}
    tries = (
        Segmented(),
        Segmented(calls=1),
        Segmented(push_programs=16),
        HeadParallel(),
    )
    small = Segmented()

    def check(self, world: World, operands: AttentionOperands, options: CallOptions) -> AttentionCall:
        (q, k, v, sinks), (causal, scale, window, bounds, rows, layout) = operands, options
        check_operands(world, q, k, v, sinks)
        if layout not in LAYOUTS:
            raise ValueError(f"{_NAME}: layout {layout!r} is not one of {list(LAYOUTS)}")
        shards = (k.shape[0],) * world.size if rows is None else given_rows(_NAME, world, rows, k, whole=False)
        zigzag = causal and layout == "zigzag"
        check_packed(bounds or (), window, causal, zigzag, sum(shards))
        if (causal or bounds) and (q.shape[0] > k.shape[0] or (zigzag and q.shape[0] < k.shape[0])):
            wanted = "as many" if zigzag else "at most as many"
            raise ValueError(
                f"{_NAME}: with a causal mask or packed sequences queries have their places among the keys, so {wanted}"
                f" are needed: q is {dims(q)}, k {dims(k)}"
            )
        if zigzag and shards != zigzag_rows(sum(shards), world.size):
            raise ValueError(
                f"{_NAME}: rows {list(shards)} are no zigzag split of {sum(shards)}, which leaves the ranks"
                f" {list(zigzag_rows(sum(shards), world.size))} (weft.zigzag_rows)"
            )
        if q.shape[0] and not sum(shards):
            raise ValueError(f"{_NAME}: no rank has keys for q {dims(q)}")
        scale = q.shape[2] ** -0.5 if scale is None else float(scale)
        of = Heads(shards, q.shape[1], k.shape[1], q.shape[2], q.dtype, scale)
        return AttentionCall(of, q.shape[0], causal, zigzag, window, tuple(bounds or ()))

    def meta(
        self, world: World, operands: AttentionOperands, options: CallOptions
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        q = operands.q
        return [(tuple(q.shape), q.dtype), ((q.shape[1], q.shape[0]), torch.float32)]

    def outputs(self, world: World, call: AttentionCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        of = call.of
        return [((call.queries, of.heads, of.dim), of.dtype), ((of.heads, call.queries), torch.float32)]

    def returned(self, world: World, call: AttentionCall, result: torch.Tensor, more: object) -> Returned:
        return result, world.empty((call.of.heads, 0), torch.float32) if more is None else more

    def saved(
        self,
        operands: AttentionOperands,
        results: Sequence[torch.Tensor | None],
        options: CallOptions,
        needs: Sequence[bool],
    ) -> Sequence[torch.Tensor | None]:
        (q, k, *_), (_, _, window, bounds, *_) = operands, options
        if (window or bounds is not None) and q.shape[0] != k.shape[0]:
            raise RuntimeError(
                f"{_NAME}: with a window or packed sequences there is a gradient only of as many queries as keys, on"
                f" every rank: q is {dims(q)}, k {dims(k)}"
            )
        return *operands, *results

    def backward(self, world: World, given: Backward) -> Sequence[torch.Tensor | None]:
        q, k, v, sinks, out, lse = given.saved
        assert q is not None and k is not None and v is not None and out is not None and lse is not None
        dout, dlse = given.gradients
        if dlse is not None:
            raise RuntimeError(f"{_NAME}: the lse that return_lse gives has no gradient; detach it")
        call = self.check(world, AttentionOperands(q, k, v, sinks), given.options)
        plan = Sequential() if world.size == 1 or world.symmetric_reason else Segmented()
        seen = seen_of(call, world.rank, call.queries)
        if dout is None or not call.rows:
            nothing = zip((q, k, v, sinks), given.needs, strict=True)
            return [torch.zeros_like(t) if t is not None and need else None for t, need in nothing]
        k, v = dense(k), dense(v)
        made = backward(
            world, call.of, plan, seen, views_of(call), Attended(q, out, lse, dout), Keys(k, v), given.needs
        )
        return *made, sinks_gradient(world, sinks, out, lse, dout) if given.needs[3] else None

    def sizes(self, call: AttentionCall) -> tuple[int, int, int]:
        return call.rows, call.of.heads, call.of.dim

    def fits(self, world: World, call: AttentionCall, plan: Plan, asked: str | Plan) -> str | None:
        if isinstance(plan, HeadParallel):
            of = call.of
            if of.heads % world.size or of.kv_heads % world.size:
                return f"{of.heads} heads, and {of.kv_heads} of keys, do not divide by {world.size} ranks"
            if call.queries > of.shards[world.rank]:
                n = of.shards[world.rank]
                raise ValueError(f"{_NAME}: {plan} needs at most as many queries as keys, got {call.queries} and {n}")
        return world.symmetric_reason

    def candidates(self, world: World, call: AttentionCall) -> Sequence[Plan]:
        """Return the plans worth a trial. With two ranks there is a single remote piece of keys and values, so
        Segmented(calls=1) equals Segmented(). Programs push up to MOST_PUSHED bytes, where copy engines are slow.
        Head-parallel is tried only for a causal mask in the contiguous layout, where ranks are unbalanced."""
        of, uneven = call.of, call.causal and not call.zigzag
        few = max(of.shards) * of.kv_heads * of.dim * of.dtype.itemsize <= MOST_PUSHED

        def differs(plan: Plan) -> bool:
            if isinstance(plan, Segmented):
                return few if plan.push_programs else world.size > 2 or plan.calls != 1
            return uneven

        return [plan for plan in self.tries if differs(plan)]

    def direct(self, world: World, call: AttentionCall, plan: Plan) -> Direct | None:
        """A single call of the library may return the library's own tensor."""

        def run(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            world.check()
            made = forward(world, call, plan, AttentionOperands(q, k, v, sinks), None)
            world.finish(world.current_stream())
            return made

        return run if isinstance(plan, Sequential) and (call.bounds or not call.causal) else None


GATHERED_ATTENTION = registered(GatheredAttention())


def check_operands(world: World, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> None:
    for name, t in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if t is not None or name != "sinks":
            check_device(_NAME, world, name, t)
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{_NAME}: q must be [m, heads, D] and k, v [n, kv heads, D], or all behind a batch; got {dims(q)},"
            f" {dims(k)}, {dims(v)}"
        )
    heads, d = q.shape[1:]
    if not k.shape[1] or not heads or heads % k.shape[1]:
        raise ValueError(f"{_NAME}: heads {heads} of q {dims(q)} must be a multiple of those of k {dims(k)}")
    if d % 8 or not 0 < d <= MOST_D:
        raise ValueError(f"{_NAME}: D {d} of q {dims(q)} must be a multiple of 8, at most {MOST_D}")
    if q.dtype not in DTYPES:
        raise TypeError(f"{_NAME}: q is {dims(q)}; bfloat16 and float16 are supported")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{_NAME}: {name} is {dims(t)}, q is {dims(q)}: one dtype is needed")
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype not in (q.dtype, torch.float32)):
        raise ValueError(f"{_NAME}: sinks {dims(sinks)} must be [{heads}], float32 or of the dtype of q {dims(q)}")


def check_packed(bounds: Sequence[int], window: int, causal: bool, zigzag: bool, length: int) -> None:
    if zigzag and (bounds or window):
        raise Unsupported(f"{_NAME}: packed sequences and windows need the contiguous layout, whose keys are one run")
    if window < 0 or (window and not causal):
        raise ValueError(f"{_NAME}: a window counts the keys that a causal query sees, got {window}, causal {causal}")
    if bounds and (bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in pairwise(bounds))):
        raise ValueError(f"{_NAME}: cu_seqlens {list(bounds)} must go from 0 up to {length}, the keys of all ranks")


def of_one_batch(t: torch.Tensor) -> torch.Tensor:
    """Return [batch, rows, heads, D] as [rows, batch * heads, D]: heads of another entry are other heads. A batch of
    one is not copied."""
    return t.transpose(0, 1).flatten(1, 2)


@overload
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
    return_lse: Literal[False] = False,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor: ...
@overload
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
    return_lse: bool,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
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
    """softmax(scale q K^T) V over the keys K and values V of all ranks: attention of a sequence that is split over the
    ranks (TileLink, section 5).

    Every rank holds some rows of the sequence, and gets the output of its own queries.

    Args:
        q: [m_r, heads, D], this rank's queries. There may be fewer than keys, and none. D is a multiple of 8, at most
            256. Or [batch, m_r, heads, D], with k and v likewise: every entry by itself.
        k, v: [n_r, kv heads, D]; query head h takes key head h * kv heads // heads.
        causal: a query sees the keys up to its own place in the sequence. Queries are the last m_r of this rank's n_r
            places; with the layout "zigzag" m_r = n_r.
        scale: of the scores; None: D ** -0.5.
        window: a causal query sees the last so many keys alone, its own among them. None: all.
        cu_seqlens: where packed sequences begin, from 0, and the last ends: integers that the host has, over the rows
            of all ranks, the same on every rank (which is not compared). A query sees keys of its own sequence, and
            queries are the last m_r of this rank's n_r places. What is prepared for a list is kept, for CUDA graphs.
        sinks: [heads], logits that take part in every sum of the softmax and have no value (GPT-OSS), or None; float32
            or the dtype of q.
        rows: keys of every rank, in the order of the ranks, where they are not all equal. None: all ranks have as many
            as this one.
        layout: how a causal mask sees the ranks' rows. "contiguous": one after another, so that the last rank has most
            to do. "zigzag": as `weft.zigzag_split` gives them, the same work for all; rows are then
            `weft.zigzag_rows`.
        return_lse: also return the logarithm of the softmax's sums, which has no gradient.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", "sequential", "segmented", "head_parallel" or such a Plan; the same on all ranks.
        out: [m_r, heads, D], contiguous: where to write the result; it may hold an operand. Not differentiable. Of a
            batch, only of one.

    All tensors but sinks are bfloat16 or all float16, on `world.device`. Where a result is merged of n partial ones,
    each was rounded to the dtype once: to its own rounding that adds an error of at most the same size.

    Returns:
        [m_r, heads, D]; with `return_lse` also float32 [heads, m_r], natural logarithms. Of a batch it is before both,
        and where there are several entries the result has its rows apart (`.contiguous()` puts them together).

    Backward: keys and values are fetched again; their gradients go home by the library's all-to-all and are summed in
    float32 in the order of the ranks. The gradient of sinks is that of this rank's queries. With a window or packed
    sequences every rank must have as many queries as keys.

    Memory: a partial result a library call; the keys and values of all ranks, in segmented plans symmetric and kept;
    head_parallel symmetric memory for queries, keys, values and results of this rank.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, quoted.
        Unsupported: no library of this machine computes such attention (says what each answered); a window or packed
            sequences in the zigzag layout; `out` with a batch of several.
        Mismatch, Timeout: as `all_gather_matmul`.
        WeftError: the first call of a shape inside a CUDA graph capture.
    """
    if window is not None and window < 1:
        raise ValueError(f"{_NAME}: window {window} must be at least 1, or None")
    batch = len(q) if all(isinstance(t, torch.Tensor) and t.dim() == 4 for t in (q, k, v)) else None
    if batch is not None:
        if len({t.shape[0] for t in (q, k, v)}) > 1:
            raise ValueError(f"{_NAME}: one batch is needed, got q {dims(q)}, k {dims(k)}, v {dims(v)}")
        if out is not None and batch > 1:
            raise Unsupported(f"{_NAME}: out= is there of a batch of one, got {batch}")
        q, k, v = (of_one_batch(t) for t in (q, k, v))
        sinks = sinks.repeat(batch) if isinstance(sinks, torch.Tensor) else sinks
        given, out = out, None if out is None else of_one_batch(out)
    bounds = None if cu_seqlens is None else plain_rows(_NAME, cu_seqlens)
    options = bool(causal), scale, window or 0, bounds, None if rows is None else plain_rows(_NAME, rows), layout
    result, lse = GATHERED_ATTENTION(world, plan, AttentionOperands(q, k, v, sinks), options, out)
    if batch is not None:
        result = result.unflatten(1, (batch, -1)).transpose(0, 1) if given is None else given
        lse = lse.unflatten(0, (batch, -1))
    return (result, lse) if return_lse else result
