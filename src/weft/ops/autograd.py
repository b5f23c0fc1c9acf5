"""Gradients of the ops, and the ops as `torch.library` operators for torch.compile.

    op                      gradient of x                                  gradient of weight
    all-gather + GEMM       dy @ weight, summed and scattered by rows      dy^T @ x, gathered again or kept
    GEMM + reduce-scatter   all-gathered dy @ weight                       dy^T @ x, with dy gathered by the same call
    GEMM + all-reduce       dy @ weight                                    dy^T @ x
    SiLU-mul                of gate and of up, local                       none

The loss of the whole model is the sum of what each rank computes from its own outputs; an all-reduced output, which
every rank has, counts once. A backward pass communicates where the gradients asked for need it, so all ranks must ask
for those of the same operands. The GEMMs that communicate run with plan "auto".

Two ways in share every function here. Eager calls go through an autograd.Function straight to the implementation: the
dispatcher would add host time to every call. Compiled ones go through `torch.ops.weft`, where the World travels by name, the
plan as text, and a tensor that nobody asked for is empty.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..lang.mapping import balanced_rows
from ..operands import dims
from ..plans import KINDS, Plan
from ..transport.library import gather as library_gather
from ..transport.library import scattered_sum as library_scattered_sum
from ..world import World
from . import activation
from .all_gather_matmul.op import ALL_GATHER_MATMUL
from .matmul_reduce.op import MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER

Tensor = torch.Tensor
Tensors = tuple[Tensor, Tensor, Tensor]
Rows = Sequence[int] | None

LIBRARY = torch.library.Library("weft", "DEF")
# cudagraph_unsafe keeps the ops out of the graphs that Inductor captures: a first call allocates what outlives it, from
# memory that Inductor would use again. A capture by hand, after one call outside, is fine.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as torch.ops.weft.<its name>; `fake` makes outputs of the right shapes."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        name = fn.__name__.removesuffix("_operator")
        LIBRARY.define(name + schema, tags=TAGS)
        LIBRARY.impl(name, fn, "CompositeExplicitAutograd")
        torch.library.register_fake(f"weft::{name}", fake, lib=LIBRARY)
        return fn

    return register


def differentiable(
    forward: Callable[..., Any], backward: Callable[..., Any], setup: Callable[..., None], grads: Callable[..., Any]
) -> Callable[..., Any]:
    """Give the operator `forward` its gradient. Returns the eager way in, which takes the same arguments."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = forward(*inputs)
            setup(ctx, inputs, output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *dy: Tensor | None) -> Any:
            return grads(backward, ctx, *dy)

    Direct.__name__ = forward.__name__
    compiled = functools.partial(grads, getattr(torch.ops.weft, backward.__name__).default)
    torch.library.register_autograd(f"weft::{forward.__name__}", compiled, setup_context=setup, lib=LIBRARY)
    return Direct.apply


# -- pieces ------------------------------------------------------------------------------------------------------------
def world_of(world: World | str) -> World:
    if not isinstance(world, str):
        return world
    try:
        return World._all[world]
    except KeyError:
        raise RuntimeError(f"no World named {world!r}: it is gone, or belongs to another process") from None


def text_of(plan: str | Plan) -> str:
    """A plan as the registered operators take it, in Python that torch.compile can trace."""
    if isinstance(plan, str):
        return plan
    fields: tuple[str, ...] = plan.__match_args__
    return ";".join([plan.kind, *[f"{name}={getattr(plan, name)}" for name in fields]])


@functools.lru_cache
def plan_of(plan: str | Plan) -> str | Plan:
    """A Plan from its text; anything else as it is."""
    if isinstance(plan, Plan) or ";" not in plan:
        return plan
    kind, *fields = plan.split(";")
    return KINDS[kind](**{name: ast.literal_eval(value) for name, _, value in (f.partition("=") for f in fields)})


def into(op: str, out: Tensor | None, y: Tensor) -> Tensor:
    """`y`, in `out` where there is one, for compiled calls: it must be what an eager call takes, and copy_ would take more."""
    if out is None:
        return y
    if out.shape != y.shape or out.dtype != y.dtype or out.device != y.device or not out.is_contiguous():
        raise ValueError(f"{op}: out {dims(out)} must be contiguous, {dims(y)}")
    return out.copy_(y)


def nothing(like: Tensor) -> Tensor:
    return like.new_empty(0)


def filled(like: Tensor, *tensors: Tensor | None) -> Tensors:
    return tuple(nothing(like) if t is None else t for t in tensors)  # type: ignore[return-value]


def shaped(like: Tensor, needs: Sequence[bool], *shapes: tuple[Any, ...]) -> Tensors:
    return tuple(like.new_empty(s if need else (0,)) for need, s in zip(needs, shapes, strict=True))  # type: ignore[return-value]


def asked(needs: Sequence[bool], tensors: Tensors, arguments: int) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight and bias, and None for the other arguments of an operator."""
    wanted = tuple(t if need else None for need, t in zip(needs, tensors, strict=True))
    return wanted + (None,) * (arguments - 3)


def gathered_rows(world: World | str, m: Any, rows: Rows) -> Any:
    return m * world_of(world).size if rows is None else sum(rows)


def known_rows(rows: Rows) -> tuple[int, ...] | None:
    """As decisions are kept by them."""
    return None if rows is None else tuple(int(r) for r in rows)


def own_rows(world: World | str, m: Any, rows: Rows) -> Any:
    """This rank's rows of M; the formula of `balanced_rows` without a comparison, for symbolic M."""
    w = world_of(world)
    return (m + w.size - 1 - w.rank) // w.size if rows is None else rows[w.rank]


def product(world: World, a: Tensor, b: Tensor) -> Tensor:
    """a @ b by the library's GEMM."""
    out = world.empty((a.shape[0], b.shape[1]), a.dtype)
    world.call(lambda: torch.mm(a, b, out=out), [a, b], [out], world.current_stream())
    return out


def column_sums(world: World, dy: Tensor) -> Tensor:
    out = world.empty((dy.shape[1],), dy.dtype)
    world.call(lambda: torch.sum(dy, 0, out=out), [dy], [out], world.current_stream())
    return out


def gather(world: World, x: Tensor, shards: Sequence[int]) -> Tensor:
    return library_gather(x.contiguous(), world, shards, world.current_stream()) if any(shards) else x


def scattered_sum(world: World, x: Tensor, shards: Sequence[int]) -> Tensor:
    if world.size == 1 or not any(shards):
        return x
    return library_scattered_sum(x.contiguous(), world, shards, world.current_stream())


# -- all-gather + GEMM -------------------------------------------------------------------------------------------------
def _all_gather_matmul_fake(x, weight, bias, world, plan, gathered, rows, gated):
    m = gathered_rows(world, x.shape[0], rows)
    return x.new_empty((m, gated or weight.shape[0])), x.new_empty((m, x.shape[1]) if gathered else (0,))


@operator(
    "(Tensor x, Tensor weight, Tensor? bias, str world, str plan, bool gathered, SymInt[]? rows, int gated)"
    " -> (Tensor, Tensor)",
    _all_gather_matmul_fake,
)
def all_gather_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, world: World | str, plan: str | Plan, gathered: bool, rows: Rows,
    gated: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    world = world_of(world)
    y, full = ALL_GATHER_MATMUL(world, plan_of(plan), (x, weight, bias), (known_rows(rows), gated, gathered))
    if full is None:
        full = nothing(x)
    elif world.size == 1:
        full = full.clone()  # it is x itself
    return y, full


def _all_gather_matmul_backward_fake(dy, dfull, x, weight, world, whole, rows, needs):
    like = dy if dy is not None else dfull
    w = world_of(world)
    mine = like.shape[0] // w.size if rows is None else rows[w.rank]
    n = 0 if dy is None else dy.shape[1]
    k = next(t.shape[1] for t in (weight, x, dfull) if t is not None) if needs[0] or needs[1] else 0
    return shaped(like, needs, (mine, k), (n, k), (n,))


@operator(
    "(Tensor? dy, Tensor? dfull, Tensor? x, Tensor? weight, str world, bool whole, SymInt[]? rows, bool[] needs)"
    " -> (Tensor, Tensor, Tensor)",
    _all_gather_matmul_backward_fake,
)
def all_gather_matmul_backward(
    dy: Tensor | None, dfull: Tensor | None, x: Tensor | None, weight: Tensor | None, world: World | str, whole: bool,
    rows: Rows, needs: Sequence[bool],
) -> Tensors:  # fmt: skip
    """x: this rank's shard, or the gathered activation (`whole`). dfull: the gradient of the gathered activation."""
    world = world_of(world)
    like = dy if dy is not None else dfull
    assert like is not None
    shards = (like.shape[0] // world.size,) * world.size if rows is None else tuple(rows)
    dx = dw = db = None
    if dy is not None:
        dy = dy.contiguous()
        if needs[1]:
            assert x is not None
            dw = product(world, dy.t(), x if whole else gather(world, x, shards))
        if needs[2]:
            db = column_sums(world, dy)
        if needs[0]:
            assert weight is not None
            dx = MATMUL_REDUCE_SCATTER(world, "auto", (dy, weight.t().contiguous(), None), (shards, True))
    if dfull is not None and needs[0]:
        part = scattered_sum(world, dfull, shards)
        total = dx if dx is not None else world.zeros(tuple(part.shape), part.dtype)
        world.call(lambda: total.add_(part), [total, part], [total], world.current_stream())
        dx = total
    world.finish(world.current_stream())
    return filled(like, dx, dw, db)


def _all_gather_matmul_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, ctx.world, _, ctx.whole, ctx.rows, gated = inputs
    if gated:
        raise RuntimeError("all-gather + gated GEMM has no gradient: use all_gather_matmul, then silu_mul")
    need_x, need_weight = ctx.needs_input_grad[:2]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward((output[1] if ctx.whole else x) if need_weight else None, weight if need_x else None)


def _all_gather_matmul_grads(
    backward: Callable[..., Tensors], ctx: Any, dy: Tensor | None, dfull: Tensor | None
) -> Any:
    needs = list(ctx.needs_input_grad[:3])
    if dy is None:  # only the gathered activation was used
        needs[1] = needs[2] = False
    if not any(needs):
        return (None,) * 8
    x, weight = ctx.saved_tensors
    dfull = dfull if ctx.whole else None
    return asked(needs, backward(dy, dfull, x if needs[1] else None, weight, ctx.world, ctx.whole, ctx.rows, needs), 8)


all_gather_matmul_with_grad = differentiable(
    all_gather_matmul, all_gather_matmul_backward, _all_gather_matmul_setup, _all_gather_matmul_grads
)


# -- GEMM + reduce-scatter ---------------------------------------------------------------------------------------------
def _reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, ctx.world, _, *rest = inputs
    ctx.m, ctx.rows = x.shape[0], rest[0] if rest else None
    need_x, need_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if need_weight else None, weight if need_x else None)


@operator(
    "(Tensor x, Tensor weight, Tensor? bias, str world, str plan, SymInt[]? rows) -> Tensor",
    lambda x, weight, bias, world, plan, rows: x.new_empty((own_rows(world, x.shape[0], rows), weight.shape[0])),
)
def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, world: World | str, plan: str | Plan, rows: Rows
) -> Tensor:
    return MATMUL_REDUCE_SCATTER(world_of(world), plan_of(plan), (x, weight, bias), (known_rows(rows), True))


def _matmul_reduce_scatter_backward_fake(dy, x, weight, m, world, rows, needs):
    n = dy.shape[1]
    return shaped(dy, needs, (m, weight.shape[1] if needs[0] else 0), (n, x.shape[1] if needs[1] else 0), (n,))


@operator(
    "(Tensor dy, Tensor? x, Tensor? weight, SymInt m, str world, SymInt[]? rows, bool[] needs)"
    " -> (Tensor, Tensor, Tensor)",
    _matmul_reduce_scatter_backward_fake,
)
def matmul_reduce_scatter_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, m: int, world: World | str, rows: Rows, needs: Sequence[bool]
) -> Tensors:
    world = world_of(world)
    shards = tuple(balanced_rows(m, world.size) if rows is None else rows)
    full_needed = needs[1] or needs[2]
    dx = dw = db = full = None
    if needs[0]:
        assert weight is not None
        given = dy, weight.t().contiguous(), None
        dx, full = ALL_GATHER_MATMUL(world, "auto", given, (shards, 0, full_needed))
    elif full_needed:
        full = gather(world, dy, shards)
    if needs[1]:
        assert x is not None and full is not None
        dw = product(world, full.t(), x)
    if needs[2]:
        assert full is not None
        db = column_sums(world, full)
    world.finish(world.current_stream())
    return filled(dy, dx, dw, db)


def _matmul_reduce_scatter_grads(backward: Callable[..., Tensors], ctx: Any, dy: Tensor) -> Any:
    needs = list(ctx.needs_input_grad[:3])
    x, weight = ctx.saved_tensors
    return asked(needs, backward(dy, x, weight, ctx.m, ctx.world, ctx.rows, needs), 6)


matmul_reduce_scatter_with_grad = differentiable(
    matmul_reduce_scatter, matmul_reduce_scatter_backward, _reduce_setup, _matmul_reduce_scatter_grads
)


# -- GEMM + all-reduce -------------------------------------------------------------------------------------------------
@operator(
    "(Tensor x, Tensor weight, Tensor? bias, str world, str plan) -> Tensor",
    lambda x, weight, bias, world, plan: x.new_empty((x.shape[0], weight.shape[0])),
)
def matmul_all_reduce(x: Tensor, weight: Tensor, bias: Tensor | None, world: World | str, plan: str | Plan) -> Tensor:
    return MATMUL_ALL_REDUCE(world_of(world), plan_of(plan), (x, weight, bias), (True,))


def _matmul_all_reduce_backward_fake(dy, x, weight, world, needs):
    m, n = dy.shape
    return shaped(dy, needs, (m, weight.shape[1] if needs[0] else 0), (n, x.shape[1] if needs[1] else 0), (n,))


@operator(
    "(Tensor dy, Tensor? x, Tensor? weight, str world, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _matmul_all_reduce_backward_fake,
)
def matmul_all_reduce_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, world: World | str, needs: Sequence[bool]
) -> Tensors:
    world, dy = world_of(world), dy.contiguous()
    dx = dw = db = None
    if needs[0]:
        assert weight is not None
        dx = product(world, dy, weight)
    if needs[1]:
        assert x is not None
        dw = product(world, dy.t(), x)
    if needs[2]:
        db = column_sums(world, dy)
    world.finish(world.current_stream())
    return filled(dy, dx, dw, db)


def _matmul_all_reduce_grads(backward: Callable[..., Tensors], ctx: Any, dy: Tensor) -> Any:
    needs = list(ctx.needs_input_grad[:3])
    x, weight = ctx.saved_tensors
    return asked(needs, backward(dy, x, weight, ctx.world, needs), 5)


matmul_all_reduce_with_grad = differentiable(
    matmul_all_reduce, matmul_all_reduce_backward, _reduce_setup, _matmul_all_reduce_grads
)


# -- SiLU-mul ----------------------------------------------------------------------------------------------------------
@operator(
    "(Tensor x, str world, SymInt columns, SymInt interleave) -> Tensor",
    lambda x, world, columns, interleave: x.new_empty((x.shape[0], columns)),
)
def silu_mul(x: Tensor, world: World | str, columns: int, interleave: int) -> Tensor:
    return activation.forward(x, world_of(world), columns, interleave)


@operator(
    "(Tensor dy, Tensor x, str world, SymInt interleave) -> Tensor",
    lambda dy, x, world, interleave: x.new_empty(x.shape),
)
def silu_mul_backward(dy: Tensor, x: Tensor, world: World | str, interleave: int) -> Tensor:
    return activation.backward(dy, x, world_of(world), interleave)


def _silu_mul_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.world, _, ctx.interleave = inputs
    ctx.save_for_backward(x)


def _silu_mul_grads(backward: Callable[..., Tensor], ctx: Any, dy: Tensor) -> Any:
    return backward(dy, *ctx.saved_tensors, ctx.world, ctx.interleave), None, None, None


silu_mul_with_grad = differentiable(silu_mul, silu_mul_backward, _silu_mul_setup, _silu_mul_grads)
