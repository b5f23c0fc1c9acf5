"""Both halves with their gradients (grouped.py), where an operand requires one.

dispatched   grouped_backward.py: dy goes where the tokens went, and the rows' dx are summed as results are
sequential   the library's collectives and grouped GEMMs (grouped_sequential.py); keeps nothing

The gradient of the routes' weights is made by the second half, of the columns that a rank has, and summed over the
ranks by the first, whose operand they are. It goes from the one to the other as the gradient of the routes, which are
therefore float32 here, of the same bits; only its words of the weights mean something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...library import Backward, CallOptions
from ...op import Operands, registered
from ...operands import dense
from ...plans import Dispatched, Plan
from ...world import World
from . import grouped_backward, grouped_sequential, grouped_steps
from .grouped import (
    GATHER_TRAINED,
    GATHERING,
    SCATTER_TRAINED,
    SCATTERING,
    AllGatherGroupedMatmul,
    GroupedCall,
    GroupedMatmulReduceScatter,
)
from .grouped_steps import Split, parts, sections
from .steps import Kept, Weights
from .training import KEEPS, decided, wide

Tensor = torch.Tensor


@dataclass(frozen=True)
class GatheredCall(GroupedCall):
    """keep: as the option."""

    keep: str

    def agreed(self) -> dict[str, Any]:
        return dict(super().agreed(), keep=self.keep)


class GatherTrained(AllGatherGroupedMatmul):
    """Options: those of the first half, what is kept, and the plan asked for, which the backward pass takes too.
    Results: hidden, routes, what `steps.Kept` has, or None."""

    name = GATHER_TRAINED
    public = GATHERING
    signature = f"{AllGatherGroupedMatmul.signature}, str keep, str asked"
    results = 4

    def check(self, world: World, operands: Operands, options: CallOptions) -> GatheredCall:
        *usual, keep, _ = options
        if keep not in KEEPS:
            raise ValueError(f"{self.title}: keep {keep!r} is not one of {list(KEEPS)}")
        call = super().check(world, operands, tuple(usual))
        return GatheredCall(call.tokens, call.layer, keep)

    def outputs(self, world: World, call: GroupedCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        assert isinstance(call, GatheredCall)
        layer, (hidden, (words, _)) = call.layer, super().outputs(world, call)
        made = [hidden, (words, torch.float32)]
        if call.keep != "nothing":
            made.append(((world.size, layer.capacity, layer.hidden), layer.dtype))
        if call.keep == "activation":
            made.append(((layer.rows(world), wide(world, layer)), layer.dtype))
        return made

    def returned(self, world: World, call: GroupedCall, result: Tensor, more: Any) -> Any:
        return result, *(self.more(world, call) if more is None else more)

    def more(self, world: World, call: GroupedCall) -> list[Tensor]:
        return [world.empty(shape, dtype) for shape, dtype in self.outputs(world, call)[1:]]

    def saved(self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]) -> Operands:
        return *operands, *results[1:]

    def backward(self, world: World, given: Backward) -> Sequence[Tensor | None]:
        x, ids, weights, w13, b13, routes, *kept = (None if t is None else dense(t) for t in given.saved)
        assert x is not None and ids is not None and weights is not None and w13 is not None and routes is not None
        dhidden, droutes = (None if t is None else dense(t) for t in given.gradients[:2])
        call, plan = decided(self, world, (x, ids, weights, w13, b13), given.options)
        wants_x, _, wants_weights, *experts = given.needs
        layer, dx, dw13, db13 = call.layer, None, None, None
        if not call.rows:
            operands = zip(given.saved[:5], given.needs, strict=True)
            return [torch.zeros_like(t) if need and t is not None else None for t, need in operands]
        if wants_x or any(experts):
            if dhidden is None:
                dhidden = world.zeros((layer.rows(world), layer.inner), layer.dtype)
            w, wants = Weights(w13, w13, b13), (wants_x, any(experts))
            if isinstance(plan, Dispatched):
                there = Kept(*(t for t in kept if t is not None and t.numel()))
                dx, dw13, db13 = grouped_backward.first_half(
                    world, layer, plan, dhidden, x, ids, routes, w, there, *wants
                )
            else:
                dx, dw13, db13 = grouped_sequential.gather_gradients(world, layer, dhidden, x, routes, w, *wants)
        dweights = at_home(world, layer, droutes, weights) if wants_weights else None
        return [dx, None, dweights, dw13, db13]

    # -- the kinds of plans
    def _dispatched(self, world: World, call: GroupedCall, plan: Dispatched, operands: Operands, out: Tensor) -> Any:
        x, ids, weights, w13, b13 = operands
        assert x is not None and ids is not None and weights is not None and w13 is not None
        routes, *kept = self.more(world, call)
        own = Weights(w13, w13, b13)
        grouped_steps.gather(world, call.layer, plan, x, ids, weights, own, out, routes, Kept(*kept))
        return routes, *kept

    def _sequential(self, world: World, call: GroupedCall, plan: Plan, operands: Operands, out: Tensor) -> Any:
        x, ids, weights, w13, b13 = operands
        assert x is not None and ids is not None and weights is not None and w13 is not None
        routes, *kept = self.more(world, call)
        grouped_sequential.gather(world, call.layer, x, ids, weights, Weights(w13, w13, b13), out, routes)
        return routes, *kept


class ScatterTrained(GroupedMatmulReduceScatter):
    """Options: those of the second half, and the plan asked for."""

    name = SCATTER_TRAINED
    public = SCATTERING
    signature = f"{GroupedMatmulReduceScatter.signature}, str asked"

    def check(self, world: World, operands: Operands, options: CallOptions) -> GroupedCall:
        return super().check(world, operands, options[:-1])

    def saved(self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]) -> Operands:
        return operands[:5]

    def backward(self, world: World, given: Backward) -> Sequence[Tensor | None]:
        hidden, routes, ids, w2, b2 = (None if t is None else dense(t) for t in given.saved)
        assert hidden is not None and routes is not None and ids is not None and w2 is not None
        dy = given.gradients[0]
        if dy is None:
            return [None] * 6
        call, plan = decided(self, world, (hidden, routes, ids, w2, b2, None), given.options)
        if not call.rows:
            return [None if t is None else torch.zeros_like(t) for t in given.saved] + [dy]
        own, experts = (dense(dy), hidden, routes, Weights(w2, w2, None, b2)), any(given.needs[3:5])
        if not any(given.needs[:5]):
            return [None] * 5 + [dy]
        if isinstance(plan, Dispatched):
            made = grouped_backward.second_half(world, call.layer, plan, *own, experts)
        else:
            made = grouped_sequential.scatter_gradients(world, call.layer, *own, experts)
        return [*made[:2], None, *made[2:], dy]


def at_home(world: World, layer: Split, droutes: Tensor | None, weights: Tensor) -> Tensor:
    """float32 [T, k]: the gradients of this rank's routes' weights, summed over the ranks in their order."""
    stream, size, made = world.current_stream(), world.size, world.empty(weights.shape, torch.float32)
    if droutes is None:
        droutes = world.zeros((sum(sections(world, layer)),), torch.float32)
    n = layer.capacity * layer.k
    sent = parts(world, layer, droutes).weights[: size * n].view(size, n)
    came = sent
    if size > 1:
        came = world.empty((size, n), torch.float32)
        world.all_to_all(list(came), list(sent), stream)
    world.call(lambda: torch.sum(came[:, : made.numel()], 0, out=made.view(-1)), [came], [made], stream)
    return made


registered(GatherTrained())
registered(ScatterTrained())
