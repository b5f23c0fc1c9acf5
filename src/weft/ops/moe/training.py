"""The layer with its gradients: `weft.moe.moe` where an operand requires one.

dispatched   backward.py: dy goes where the tokens went, the rows' gradients come home
sequential   the library's all-to-all of x and dy, autograd of its grouped GEMMs, all-to-all back (sequential.py)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import library
from ...errors import WeftError
from ...library import Backward, CallOptions
from ...op import C, Op, Operands, registered
from ...operands import dense
from ...plans import SMALL_DISPATCHED, Dispatched, Plan, Sequential
from ...world import World
from . import backward, sequential, steps
from .op import TRAINED, Moe, MoeCall
from .steps import NAME, Kept, Layer, Weights

Tensor = torch.Tensor
KEEPS = ("nothing", "rows", "activation")


@dataclass(frozen=True)
class TrainedCall(MoeCall):
    """keep: as the option. block_m: rows of a tile of the plan, by which those that are kept lie."""

    keep: str
    block_m: int

    def agreed(self) -> dict[str, Hashable]:
        return dict(super().agreed(), keep=self.keep)


class MoeTrained(Moe):
    """Operands: x, ids, weights, w13, w2, b13, b2, shared; options: those of `Moe`, what is kept, and the plan asked
    for, which the backward pass takes too. Results: out; int32 [El] rows received; what `steps.Kept` has, or None."""

    name = TRAINED
    public = NAME
    signature = (
        "Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, Tensor? shared,"
        " SymInt[]? rows, str activation, SymInt? max_tokens, SymInt? max_rows, str keep, str asked"
    )
    results = 4
    runs = {Sequential: "_sequential", Dispatched: "_dispatched"}

    def check(self, world: World, operands: Operands, options: CallOptions) -> TrainedCall:
        *usual, keep, asked = options
        if keep not in KEEPS:
            raise ValueError(f"{self.title}: keep {keep!r} is not one of {list(KEEPS)}")
        call = super().check(world, (*operands, None), tuple(usual))
        plan = library.plan_of(asked)
        usual_plan = SMALL_DISPATCHED if world.scale.small else Dispatched()
        block_m = (plan if isinstance(plan, Dispatched) else usual_plan).tile.block_m
        return TrainedCall(call.own, call.tokens, call.layer, keep, block_m)

    def outputs(self, world: World, call: MoeCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        assert isinstance(call, TrainedCall)
        layer, dtype = call.layer, call.layer.dtype
        made: list[tuple[tuple[int, ...], torch.dtype]] = [((call.own, layer.hidden), dtype)]
        made.append(((layer.experts // world.size,), torch.int32))
        if call.keep != "nothing":
            made.append(((world.size, layer.capacity, layer.hidden), dtype))
        if call.keep == "activation":
            made.append(((steps.rows_of(world, layer, call.block_m), wide(world, layer)), dtype))
        return made

    def meta(
        self, world: World, operands: Operands, options: tuple[Any, ...]
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return self.outputs(world, self.check(world, operands, options))

    def auto(self, world: World, call: MoeCall, mode: str) -> Plan:
        return self.small if world.scale.small else Dispatched()

    def returned(self, world: World, call: MoeCall, result: Tensor, more: Any) -> Any:
        if more is not None:
            return result, *more
        assert isinstance(call, TrainedCall)
        return result, *(world.zeros(shape, dtype) for shape, dtype in self.outputs(world, call)[1:])

    def saved(self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]) -> Operands:
        return *operands[:7], *results[2:]

    def backward(self, world: World, given: Backward) -> Sequence[Tensor | None]:
        x, ids, weights, w13, w2, b13, b2, *kept = (None if t is None else dense(t) for t in given.saved)
        dy = given.gradients[0]
        assert x is not None and ids is not None and weights is not None and w13 is not None and w2 is not None
        if dy is None or not any(given.needs):
            return [None] * 8
        w, dy = Weights(w13, w2, b13, b2), dense(dy)
        call, plan = decided(self, world, (x, ids, weights, *w, None), given.options)
        experts = any(given.needs[3:7])
        if isinstance(plan, Dispatched):
            there = Kept(*(t for t in kept if t is not None and t.numel()))
            made = backward.backward(world, call.layer, plan, dy, x, ids, weights, w, there, experts)
        else:
            not_captured(world)
            dx, dweights, of_experts = sequential.backward(world, call.layer, dy, x, ids, weights, w, experts)
            made = backward.Gradients(dx, dweights, *of_experts)
        return [made.x, None, *made[1:], dy]

    # -- the kinds of plans
    def _dispatched(self, world: World, call: MoeCall, plan: Dispatched, operands: Operands, out: Tensor) -> Any:
        x, ids, weights, w13, w2, b13, b2, shared = operands
        assert x is not None and ids is not None and weights is not None and w13 is not None and w2 is not None
        assert isinstance(call, TrainedCall)
        received, *kept = (world.empty(shape, dtype) for shape, dtype in self.outputs(world, call)[1:])
        own = Weights(w13, w2, b13, b2)
        tables = steps.forward(world, call.layer, plan, x, ids, weights, own, shared, out, kept=Kept(*kept))
        world.copy(received, tables.received, world.current_stream())
        return received, *kept

    def _sequential(self, world: World, call: MoeCall, plan: Plan, operands: Operands, out: Tensor) -> Any:
        """Keeps nothing: x is sent again, whatever `keep` says."""
        x, ids, weights, w13, w2, b13, b2, shared = operands
        assert x is not None and ids is not None and weights is not None and w13 is not None and w2 is not None
        assert isinstance(call, TrainedCall)
        not_captured(world)
        received, *kept = (world.empty(shape, dtype) for shape, dtype in self.outputs(world, call)[1:])
        own = Weights(w13, w2, b13, b2)
        counts = sequential.forward(world, call.layer, x, ids, weights, own, shared, out)
        world.copy(received, world.tensor(counts, torch.int32), world.current_stream())
        return received, *kept


registered(MoeTrained())


def decided(op: Op[C], world: World, operands: Operands, options: CallOptions) -> tuple[C, Plan]:
    """A call and its plan as the forward pass decided, of an op whose last option is the plan that was asked for."""
    layouts = [None if t is None else (t.shape, t.dtype) for t in operands]
    key = (op.name, "backward", options, world.capturing(), *layouts)
    found: tuple[C, Plan] | None = world.decided.get(key)
    if found is None:
        call = op.check(world, operands, options)
        found = call, op.choose(world, call, library.plan_of(options[-1]), world.capturing())
        world.decided[key] = found
    return found


def wide(world: World, layer: Layer) -> int:
    """N, rows of an expert in w13."""
    block = world.scale.interleave
    return layer.inner if layer.activation == "gelu" else 2 * -(-layer.inner // block) * block


def not_captured(world: World) -> None:
    if world.capturing():
        raise WeftError(f"{NAME}: a sequential call reads counts on the host, which a CUDA graph cannot hold")
