"""The layer with its gradients: `weft.moe.moe` where an operand requires one.

dispatched   backward.py: dy goes where the tokens went, the rows' gradients come home
sequential   the library's all-to-all of x and dy, autograd of its grouped GEMMs, all-to-all back (sequential.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .... import torch_library
from ....op import C, Op, Operands, registered
from ....plans import SMALL_DISPATCHED, Dispatched, Plan, Sequential
from ....tensor_checks import dense
from ....torch_library import Backward, CallOptions
from ....world import World
from ..call import NAME, Kept, MoeCall, MoeOperands
from . import backward, sequential
from .dispatched import run_dispatched
from .op import TRAINED, Moe
from .sequential import run_sequential

Tensor = torch.Tensor
KEEPS = ("nothing", "rows", "activation")


class MoeTrained(Moe):
    """Operands: x, ids, weights, w13, w2, b13, b2, shared; options: those of `Moe`, what is kept, and the plan asked
    for, which the backward pass takes too. Results: out; int32 [El] rows received; what `call.Kept` has, or None."""

    name = TRAINED
    public = NAME
    signature = (
        "Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, Tensor? shared,"
        " SymInt[]? rows, str activation, SymInt? max_tokens, SymInt? max_rows, str keep, str asked"
    )
    results = 4
    runs = {Sequential: run_sequential, Dispatched: run_dispatched}

    def check(self, world: World, operands: MoeOperands, options: CallOptions) -> MoeCall:
        *usual, keep, asked = options
        if keep not in KEEPS:
            raise ValueError(f"{self.title}: keep {keep!r} is not one of {list(KEEPS)}")
        call = super().check(world, operands, tuple(usual))
        plan = torch_library.plan_of(asked)
        usual_plan = SMALL_DISPATCHED if world.scale.small else Dispatched()
        block_m = (plan if isinstance(plan, Dispatched) else usual_plan).tile.block_m
        return replace(call, keep=keep, block_m=block_m)

    def outputs(self, world: World, call: MoeCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [*super().outputs(world, call), *call.trained_outputs(world)]

    def meta(
        self, world: World, operands: MoeOperands, options: tuple[Any, ...]
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return self.outputs(world, self.check(world, operands, options))

    def auto(self, world: World, call: MoeCall, mode: str) -> Plan:
        return self.small if world.scale.small else Dispatched()

    def returned(self, world: World, call: MoeCall, result: Tensor, more: Any) -> Any:
        if more is None:  # of no rows
            more = [world.zeros(shape, dtype) for shape, dtype in call.trained_outputs(world)]
        return result, *more

    def saved(self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]) -> Operands:
        return *operands[:7], *results[2:]

    def backward(self, world: World, given: Backward) -> Sequence[Tensor | None]:
        dy = given.gradients[0]
        if dy is None or not any(given.needs):
            return [None] * 8
        saved, dy = [None if t is None else dense(t) for t in given.saved], dense(dy)
        operands: MoeOperands = self.typed(saved[:7])
        call, plan = decided(self, world, operands, given.options)
        experts = any(given.needs[3:7])
        if isinstance(plan, Dispatched):
            kept = Kept(*(t for t in saved[7:] if t is not None and t.numel()))
            made = backward.backward(world, call.layer, plan, dy, operands, kept, experts)
        else:
            dx, dweights, of_experts = sequential.backward(world, call.layer, dy, operands, experts)
            made = backward.Gradients(dx, dweights, *of_experts)
        return [made.x, None, *made[1:], dy]


registered(MoeTrained())


def decided(op: Op[C], world: World, operands: Operands, options: CallOptions) -> tuple[C, Plan]:
    """A call and its plan as the forward pass decided, of an op whose last option is the plan that was asked for."""
    layouts = [None if t is None else (t.shape, t.dtype) for t in operands]
    key = (op.name, "backward", options, world.capturing(), *layouts)
    found: tuple[C, Plan] | None = world.decided.get(key)
    if found is None:
        call = op.check(world, operands, options)
        found = call, op.choose(world, call, torch_library.plan_of(options[-1]), world.capturing())
        world.decided[key] = found
    return found
