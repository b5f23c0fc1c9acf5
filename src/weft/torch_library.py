"""This module creates operators of `torch.library`, with gradients, from the definitions of ops (`op.Op`).

Eager calls that need a gradient pass through an autograd.Function directly to the op, because the dispatcher would add
host time to every call. Compiled calls pass through `torch.ops.weft.<name>`, whose arguments contain the World by name,
the plan as text, and an empty tensor for an absent operand. An eager call's autograd graph keeps the call and plan that
the forward pass ran; for a compiled call the World stores both (`World.forward_passes`) under arguments that
`<name>_backward` also receives.

The loss of the whole model is the sum of the losses that the ranks compute from their own outputs. An all-reduced
output, which every rank has, counts once. A backward pass communicates if the requested gradients need it, so all ranks
must request the gradients of the same operands.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .plans import CLASSES, Plan, TileShape
from .residency import UNKNOWN
from .tensor_checks import dims
from .world import World

if TYPE_CHECKING:
    from .op import Op
    from .prepared import Prepared

Maybe = Tensor | None
Maybes = Sequence[Maybe]
SymInts = Sequence[int]  # symbols while torch.compile traces
Needs = Sequence[bool]
Results = Maybe | tuple[Maybe, ...]
CallOptions = tuple[Any, ...]  # a call's arguments after its operands, with the types in its op's signature
Context: TypeAlias = Any  # torch's context, which accepts any attribute

LIBRARY = torch.library.Library("weft", "DEF")
# cudagraph_unsafe excludes the ops from the graphs that Inductor captures: the first call allocates tensors that
# outlive it, in memory that Inductor would reuse. A manual capture works after two calls outside a capture.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
BY_NAME = {str(t): t for t in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class Backward:
    """The arguments of a backward pass.

    saved: the tensors that `Op.saved_tensors` returned. gradients: the results' gradients, None for unused results.
    shapes: the operands' shapes. needs: for each operand, whether its gradient is asked for. options: the call's
    options. call, plan: the call and plan that the forward pass ran.
    """

    saved: Sequence[Maybe]
    gradients: Sequence[Maybe]
    shapes: Sequence[tuple[int, ...]]
    needs: Sequence[bool]
    options: CallOptions
    call: Any  # an instance of the op's subclass of `Call`
    plan: Plan


# -- arguments as torch.library takes them -----------------------------------------------------------------------------
def world_of(name: str) -> World:
    try:
        return World._all[name]
    except KeyError:
        raise RuntimeError(f"no World named {name!r}: it is gone, or belongs to another process") from None


def text_of(plan: str | Plan) -> str:
    """Return a plan as text. torch.compile can trace this function."""
    if isinstance(plan, str):
        return plan
    return ";".join([type(plan).__name__, *_texts_of(plan, "")])


def _texts_of(instance: Plan | TileShape, prefix: str) -> list[str]:
    """Return `name=value` for every field; the names of a tile's fields begin with the tile's name."""
    texts: list[str] = []
    names: tuple[str, ...] = instance.__match_args__
    for name in names:
        value = getattr(instance, name)
        if isinstance(value, TileShape):
            texts += _texts_of(value, f"{name}.")
        else:
            texts.append(f"{prefix}{name}={_constant(value)}")
    return texts


def _constant(value: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """Return a field's value as a constant. In a graph with dynamic shapes, an int of a plan is a symbol, which has no
    text until `index` converts it."""
    if isinstance(value, tuple):
        return tuple([index(number) for number in value])
    return value if isinstance(value, bool) else index(value)


@functools.lru_cache
def plan_of(plan: str) -> str | Plan:
    """Return the Plan that a text describes, or the unchanged name of a kind."""
    name, *texts = plan.split(";")
    if name not in CLASSES:
        return plan
    plan_class, tile_fields = CLASSES[name], dict[str, dict[str, int]]()
    fields: dict[str, object] = {}
    for field, _, text in (text.partition("=") for text in texts):
        tile, _, name = field.rpartition(".")
        (tile_fields.setdefault(tile, {}) if tile else fields)[name] = ast.literal_eval(text)
    return plan_class(
        **fields,
        **{tile: replace(getattr(plan_class, tile), **values) for tile, values in tile_fields.items()},
    )


def plain(option: object) -> object:
    """Return an option in hashable form: a list becomes a tuple of ints."""
    return tuple(int(number) for number in option) if isinstance(option, list | tuple) else option


def into(op: str, out: Maybe, y: Tensor) -> Tensor:
    """Return `y` for compiled calls; if there is an `out`, `y` is copied to it. Raises an error for an `out` that eager
    calls refuse, because copy_ itself would accept it."""
    if out is None:
        return y
    if out.shape != y.shape or out.dtype != y.dtype or out.device != y.device or not out.is_contiguous():
        raise ValueError(f"{op}: out {dims(out)} must be contiguous, {dims(y)}")
    return out.copy_(y)


def tensors(op: Op, results: Results, like: Tensor) -> tuple[Tensor, ...]:
    """Return as many tensors as the operator returns, with empty tensors for results that the call does not have."""
    present = as_tuple(results)
    absent = (None,) * (op.outcomes - len(present))
    return tuple([like.new_empty(0) if t is None else t for t in present + absent])


def as_tuple(results: Results) -> tuple[Maybe, ...]:
    return results if isinstance(results, tuple) else (results,)


def one_or_tuple(results: tuple[Maybe, ...]) -> Results:
    return results[0] if len(results) == 1 else results


# -- the operators -----------------------------------------------------------------------------------------------------
def register(op: Op, ops: Mapping[str, Op]) -> None:
    """Define torch.ops.weft.<name> and, for an op with a gradient, <name>_backward, once for each name. Calls find the
    op in `ops`."""
    name, signature, count = op.name, op.signature, op.operands
    outputs = ", ".join(["Tensor"] * op.outcomes)

    def run(*inputs: Any) -> Results:
        world, plan, operands = world_of(inputs[-2]), inputs[-1], inputs[:count]
        definition, options = ops[name], tuple(map(plain, inputs[count:-2]))
        results = as_tuple(definition.call(world, plan_of(plan), operands, options, None))
        ran: Prepared[Any] = world.ran
        if definition.num_saved and options[-1]:
            missing = definition.saved_shapes(world, ran.call, plan_of(plan))[len(results) - definition.results :]
            # The graph expects these tensors even if the plan saves nothing.
            results += tuple(operands[0].new_empty(shape, dtype=dtype) for shape, dtype in missing)
        if definition.num_borrowed_outputs:
            lent = results[1 : 1 + definition.num_borrowed_outputs]
            results = results[0], *(None if t is None else t.clone() for t in lent), *results[1 + len(lent) :]
        if definition.differentiable:
            key = ForwardKey(name, plan, options, *layouts_of(operands))
            world.forward_passes[key, world.backend.capturing()] = ran
        return one_or_tuple(tensors(definition, results, operands[0]))

    def fake(*inputs: Any) -> Results:
        *arguments, world_name, plan = inputs
        definition, world, options = ops[name], world_of(world_name), tuple(arguments[count:])
        operands = definition.typed(tuple(arguments[:count]))
        results = definition.fake(world, operands, options)
        if definition.num_saved and options[-1]:
            kept = definition.saved_shapes(world, definition.check(world, operands, options), plan_of(plan))
            results += [operands[0].new_empty(shape, dtype=dtype) for shape, dtype in kept]
        return one_or_tuple(tensors(definition, tuple(results), operands[0]))

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
        "(Tensor?[] saved, Tensor?[] gradients, SymInt[] sizes, int[] depths, str dtypes, bool[] needs, str world,"
        f" str plan{', ' if options else ''}{options}) -> Tensor[]"
    )

    def shaped(sizes: SymInts, depths: SymInts) -> list[tuple[int, ...]]:
        remaining = iter(sizes)
        return [tuple(itertools.islice(remaining, n)) for n in depths]

    def run(
        saved: Maybes, gradients: Maybes, sizes: SymInts, depths: SymInts, dtypes: str, *of_call: Any
    ) -> list[Tensor]:
        needs, world_name, plan, *rest = of_call
        world, shapes, options = world_of(world_name), shaped(sizes, depths), tuple(map(plain, rest))
        ran = _forward_pass(world, ForwardKey(name, plan, options, tuple(shapes), dtypes))
        context = Backward(saved, gradients, shapes, needs, options, ran.call, ran.plan)
        like = next(g for g in gradients if g is not None)
        operand_gradients = gradients_of(ops[name], world, context)
        # An operator must not return its operands.
        return [
            like.new_empty(0) if t is None else t.clone() if any(t is g for g in gradients) else t
            for t in operand_gradients
        ]

    def fake(
        saved: Maybes, gradients: Maybes, sizes: SymInts, depths: SymInts, dtypes: str, *of_call: Any
    ) -> list[Tensor]:
        like = next(g for g in gradients if g is not None)
        wanted = zip(shaped(sizes, depths), dtypes.split(), of_call[0], strict=True)
        return [like.new_empty(shape if need else (0,), dtype=BY_NAME.get(dtype)) for shape, dtype, need in wanted]

    _define(f"{name}_backward", schema, run, fake)

    def setup(ctx: Context, inputs: CallOptions, output: Results) -> None:
        *arguments, ctx.world, ctx.plan = inputs
        needs = list(ctx.needs_input_grad[:count])
        _keep(ctx, op, needs, tuple(arguments[:count]), tuple(arguments[count:]), output)

    def backward(ctx: Context, *gradients: Maybe) -> tuple[Maybe, ...]:
        needs, shapes, others = ctx.needs, ctx.shapes, (None,) * (len(ctx.options) + 2)
        if not any(needs) or all(g is None for g in gradients):
            return (None,) * count + others
        sizes, depths = list(itertools.chain(*shapes)), list(map(len, shapes))
        operator = getattr(torch.ops.weft, f"{name}_backward")
        of_call = ctx.world, ctx.plan, *ctx.options
        operand_gradients = operator(
            ctx.saved_tensors, gradients[: op.results], sizes, depths, ctx.dtypes, needs, *of_call
        )
        return tuple(t if need else None for t, need in zip(operand_gradients, needs, strict=True)) + others

    torch.library.register_autograd(f"weft::{name}", backward, setup_context=setup, lib=LIBRARY)


def _keep(
    ctx: Context, op: Op, needs: list[bool], operands: tuple[Maybe, ...], options: CallOptions, results: Results
) -> None:
    """Store in `ctx` the values that the backward pass needs."""
    ctx.set_materialize_grads(False)
    ctx.needs, ctx.options = needs, options
    ctx.shapes, ctx.dtypes = layouts_of(operands)
    ctx.save_for_backward(*op.saved_tensors(operands, as_tuple(results), options, needs))


def layouts_of(operands: tuple[Maybe, ...]) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Return the operands' shapes, () for an absent operand, and their dtypes as one string."""
    shapes = tuple(() if t is None else tuple(t.shape) for t in operands)
    return shapes, " ".join("none" if t is None else str(t.dtype) for t in operands)


class ForwardKey(NamedTuple):
    """The properties of a call that are known in both its compiled forward pass and its compiled backward pass. plan:
    the caller's plan."""

    name: str
    plan: str
    options: CallOptions
    shapes: tuple[tuple[int, ...], ...]
    dtypes: str


def _forward_pass(world: World, key: ForwardKey) -> Prepared[Any]:
    """Return the call and plan that the last such call ran. A call in the same mode (captured or not) is preferred,
    because a CUDA graph may contain a different plan. Raise RuntimeError if there was no such call."""
    capturing = world.backend.capturing()
    for mode in (capturing, not capturing):
        ran: Prepared[Any] | None = world.forward_passes.get((key, mode))
        if ran is not None:
            return ran
    raise RuntimeError(f"{key.name}_backward: no call with these arguments has run on {world}")


def gradients_of(op: Op, world: World, context: Backward) -> Sequence[Maybe]:
    try:
        if op.waits(world, context.plan):
            world.order_residents(UNKNOWN, world.backend.capturing())
        gradients = op.backward(world, context)
    except BaseException:  # as in `Op.call`
        world.join_side_streams()
        raise
    world.finish(world.current_stream())
    return gradients


# -- eager calls -------------------------------------------------------------------------------------------------------
class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, op: Op, world: World, plan: str | Plan, options: CallOptions, *operands: Maybe) -> Any:
        results = op.call(world, plan, operands, options, None)
        ctx.op, ctx.world, ctx.ran = op, world, world.ran
        _keep(ctx, op, list(ctx.needs_input_grad[4:]), operands, options, results)
        return one_or_tuple(results[: op.results]) if op.num_saved else results

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *gradients: Maybe) -> tuple[Maybe, ...]:
        if not any(ctx.needs) or all(g is None for g in gradients):
            return (None,) * (4 + len(ctx.needs))
        ran: Prepared[Any] = ctx.ran
        context = Backward(ctx.saved_tensors, gradients, ctx.shapes, ctx.needs, ctx.options, ran.call, ran.plan)
        operand_gradients = gradients_of(ctx.op, ctx.world, context)
        return (None,) * 4 + tuple(t if need else None for t, need in zip(operand_gradients, ctx.needs, strict=True))


def differentiated(op: Op, world: World, plan: str | Plan, operands: tuple[Maybe, ...], options: CallOptions) -> Any:
    """Run the call with its gradient."""
    return _Differentiated.apply(op, world, plan, options, *operands)


# -- parts of backward passes ------------------------------------------------------------------------------------------
def product(world: World, a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, computed by torch.mm."""
    out = world.empty((a.shape[0], b.shape[1]), a.dtype)
    world.call(lambda: torch.mm(a, b, out=out), [a, b], [out], world.current_stream())
    return out


def column_sums(world: World, dy: Tensor) -> Tensor:
    out = world.empty((dy.shape[1],), dy.dtype)
    world.call(lambda: torch.sum(dy, 0, out=out), [dy], [out], world.current_stream())
    return out
