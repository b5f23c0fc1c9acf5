"""Ops as operators of `torch.library`, with their gradients, from their definitions (`op.Op`).

Two ways in share a definition. Eager calls that need a gradient go through an autograd.Function straight to the op: the
dispatcher would add host time to every call. Compiled ones go through `torch.ops.weft.<name>`, where the World travels
by name, the plan as text, and an absent tensor as an empty one.

The loss of the whole model is the sum of what each rank computes from its own outputs; an all-reduced output, which
every rank has, counts once. A backward pass communicates where the gradients asked for need it, so all ranks must ask
for those of the same operands.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from .plans import CLASSES, Plan, TileShape
from .tensor_checks import dims
from .world import World

if TYPE_CHECKING:
    from .op import Op

Tensor = torch.Tensor
Maybe = Tensor | None
Maybes = Sequence[Maybe]
Sizes = Sequence[int]  # symbols, while torch.compile traces
Needs = Sequence[bool]
Results = Maybe | tuple[Maybe, ...]
CallOptions = tuple[Any, ...]  # a call's arguments beside its operands, of the types in its op's signature
Context: TypeAlias = Any  # torch's, which takes any attribute

LIBRARY = torch.library.Library("weft", "DEF")
# cudagraph_unsafe keeps the ops out of the graphs that Inductor captures: a first call allocates what outlives it, from
# memory that Inductor would use again. A capture by hand, after two calls outside, is fine.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
BY_NAME = {str(t): t for t in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class Backward:
    """What a backward pass is given.

    saved: what `Op.saved` kept. gradients: those of the results, None for one that nobody used. shapes: those of the
    operands. needs: for each operand, whether its gradient is asked for. options: those of the call.
    """

    saved: Sequence[Maybe]
    gradients: Sequence[Maybe]
    shapes: Sequence[tuple[int, ...]]
    needs: Sequence[bool]
    options: CallOptions


# -- how arguments travel ----------------------------------------------------------------------------------------------
def world_of(name: str) -> World:
    try:
        return World._all[name]
    except KeyError:
        raise RuntimeError(f"no World named {name!r}: it is gone, or belongs to another process") from None


def text_of(plan: str | Plan) -> str:
    """A plan as the operators take it, in Python that torch.compile can trace."""
    if isinstance(plan, str):
        return plan
    return ";".join([type(plan).__name__, *_texts_of(plan, "")])


def _texts_of(of: Plan | TileShape, prefix: str) -> list[str]:
    """Return `name=value` for every field; the name of a tile's field begins with the tile's name."""
    texts: list[str] = []
    names: tuple[str, ...] = of.__match_args__
    for name in names:
        value = getattr(of, name)
        texts += _texts_of(value, f"{name}.") if isinstance(value, TileShape) else [f"{prefix}{name}={value}"]
    return texts


@functools.lru_cache
def plan_of(plan: str) -> str | Plan:
    """Return the Plan of a text, or a kind's name as it is."""
    name, *texts = plan.split(";")
    if name not in CLASSES:
        return plan
    made, tiles = CLASSES[name], dict[str, dict[str, int]]()
    fields: dict[str, object] = {}
    for field, _, text in (each.partition("=") for each in texts):
        of, _, name = field.rpartition(".")
        (tiles.setdefault(of, {}) if of else fields)[name] = ast.literal_eval(text)
    return made(**fields, **{of: replace(getattr(made, of), **given) for of, given in tiles.items()})


def plain(option: object) -> object:
    """Return an option as the key of a decision holds it: a list as a tuple of ints."""
    return tuple(int(number) for number in option) if isinstance(option, list | tuple) else option


def into(op: str, out: Maybe, y: Tensor) -> Tensor:
    """Return `y`, copied to `out` where there is one, for compiled calls. `out` must be what an eager call takes; copy_
    would take more."""
    if out is None:
        return y
    if out.shape != y.shape or out.dtype != y.dtype or out.device != y.device or not out.is_contiguous():
        raise ValueError(f"{op}: out {dims(out)} must be contiguous, {dims(y)}")
    return out.copy_(y)


def tensors(op: Op, results: Results, like: Tensor) -> tuple[Tensor, ...]:
    """Return as many tensors as the operator returns, with an empty one where the call has none."""
    given = results if isinstance(results, tuple) else (results,)
    return tuple(like.new_empty(0) if t is None else t for t in (*given, *(None,) * (op.results - len(given))))


def returned(made: tuple[Tensor, ...]) -> Results:
    return made[0] if len(made) == 1 else made


# -- the operators -----------------------------------------------------------------------------------------------------
def register(op: Op, ops: Mapping[str, Op]) -> None:
    """Define torch.ops.weft.<name> and, for an op with a gradient, <name>_backward, once for each name. Calls look the
    op up in `ops`."""
    name, signature, count = op.name, op.signature, op.operands
    outputs = ", ".join(["Tensor"] * op.results)

    def parts(given: Sequence[Any]) -> tuple[Op, World, tuple[Tensor, ...], CallOptions, str]:
        *arguments, world, plan = given
        return ops[name], world_of(world), tuple(arguments[:count]), tuple(map(plain, arguments[count:])), plan

    def run(*given: Any) -> Results:
        of, world, operands, options, plan = parts(given)
        results = of.call(world, plan_of(plan), operands, options, None)
        return returned(tensors(of, results, operands[0]))

    def fake(*given: Any) -> Results:
        *arguments, world, _ = given
        of, options = ops[name], tuple(arguments[count:])
        operands, like = of.typed(tuple(arguments[:count])), arguments[0]
        made = [like.new_empty(shape, dtype=dtype) for shape, dtype in of.meta(world_of(world), operands, options)]
        return returned(tensors(of, tuple(made), like))

    _define(name, f"({signature}, str world, str plan) -> ({outputs})", run, fake)
    if op.differentiable:
        _define_backward(op, ops)


def _define(name: str, schema: str, run: Callable[..., object], fake: Callable[..., object]) -> None:
    LIBRARY.define(name + schema, tags=TAGS)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake, lib=LIBRARY)


def _define_backward(op: Op, ops: Mapping[str, Op]) -> None:
    name, count = op.name, op.operands
    options = ", ".join(op.signature.split(", ")[count:])
    schema = (
        "(Tensor?[] saved, Tensor?[] gradients, SymInt[] sizes, int[] depths, str dtypes, bool[] needs, str world"
        f"{', ' if options else ''}{options}) -> Tensor[]"
    )

    def shaped(sizes: Sizes, depths: Sizes) -> list[tuple[int, ...]]:
        left = iter(sizes)
        return [tuple(itertools.islice(left, n)) for n in depths]

    def run(
        saved: Maybes,
        gradients: Maybes,
        sizes: Sizes,
        depths: Sizes,
        dtypes: str,
        needs: Needs,
        world: str,
        *rest: object,
    ) -> list[Tensor]:
        given = Backward(saved, gradients, shaped(sizes, depths), needs, tuple(map(plain, rest)))
        like = next(g for g in gradients if g is not None)
        made = gradients_of(ops[name], world_of(world), given)
        return [like.new_empty(0) if t is None else t for t in made]

    def fake(
        saved: Maybes,
        gradients: Maybes,
        sizes: Sizes,
        depths: Sizes,
        dtypes: str,
        needs: Needs,
        world: str,
        *rest: object,
    ) -> list[Tensor]:
        like = next(g for g in gradients if g is not None)
        wanted = zip(shaped(sizes, depths), dtypes.split(), needs, strict=True)
        return [like.new_empty(shape if need else (0,), dtype=BY_NAME.get(dtype)) for shape, dtype, need in wanted]

    _define(f"{name}_backward", schema, run, fake)

    def setup(ctx: Context, inputs: CallOptions, output: Results) -> None:
        *arguments, ctx.world, _ = inputs
        needs = list(ctx.needs_input_grad[:count])
        _keep(ctx, op, needs, tuple(arguments[:count]), tuple(arguments[count:]), output)

    def backward(ctx: Context, *gradients: Maybe) -> tuple[Maybe, ...]:
        needs, shapes, others = ctx.needs, ctx.shapes, (None,) * (len(ctx.options) + 2)
        if not any(needs) or all(g is None for g in gradients):
            return (None,) * count + others
        sizes, depths = list(itertools.chain(*shapes)), list(map(len, shapes))
        operator = getattr(torch.ops.weft, f"{name}_backward")
        made = operator(ctx.saved_tensors, gradients, sizes, depths, ctx.dtypes, needs, ctx.world, *ctx.options)
        return tuple(t if need else None for t, need in zip(made, needs, strict=True)) + others

    torch.library.register_autograd(f"weft::{name}", backward, setup_context=setup, lib=LIBRARY)


def _keep(
    ctx: Context, op: Op, needs: list[bool], operands: tuple[Maybe, ...], options: CallOptions, results: Results
) -> None:
    """Keep in `ctx` what the backward pass will take."""
    ctx.set_materialize_grads(False)
    ctx.needs, ctx.options = needs, options
    ctx.shapes = [() if t is None else tuple(t.shape) for t in operands]
    ctx.dtypes = " ".join("none" if t is None else str(t.dtype) for t in operands)
    made = results if isinstance(results, tuple) else (results,)
    ctx.save_for_backward(*op.saved(operands, made, options, needs))


def gradients_of(op: Op, world: World, given: Backward) -> Sequence[Maybe]:
    made = op.backward(world, given)
    world.finish(world.current_stream())
    return made


# -- eager calls -------------------------------------------------------------------------------------------------------
class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, op: Op, world: World, plan: str | Plan, options: CallOptions, *operands: Maybe) -> Any:
        results = op.call(world, plan, operands, options, None)
        ctx.op, ctx.world = op, world
        _keep(ctx, op, list(ctx.needs_input_grad[4:]), operands, options, results)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *gradients: Maybe) -> tuple[Maybe, ...]:
        if not any(ctx.needs) or all(g is None for g in gradients):
            return (None,) * (4 + len(ctx.needs))
        made = gradients_of(
            ctx.op, ctx.world, Backward(ctx.saved_tensors, gradients, ctx.shapes, ctx.needs, ctx.options)
        )
        return (None,) * 4 + tuple(t if need else None for t, need in zip(made, ctx.needs, strict=True))


def differentiated(op: Op, world: World, plan: str | Plan, operands: tuple[Maybe, ...], options: CallOptions) -> Any:
    """The call with its gradient."""
    return _Differentiated.apply(op, world, plan, options, *operands)


# -- what backward passes are made of ----------------------------------------------------------------------------------
def product(world: World, a: Tensor, b: Tensor) -> Tensor:
    """a @ b by the library's GEMM."""
    out = world.empty((a.shape[0], b.shape[1]), a.dtype)
    world.call(lambda: torch.mm(a, b, out=out), [a, b], [out], world.current_stream())
    return out


def column_sums(world: World, dy: Tensor) -> Tensor:
    out = world.empty((dy.shape[1],), dy.dtype)
    world.call(lambda: torch.sum(dy, 0, out=out), [dy], [out], world.current_stream())
    return out
