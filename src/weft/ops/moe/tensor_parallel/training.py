"""Both halves with their gradients (op.py), where an operand requires one.

dispatched   backward.py: dy goes where the tokens went, and the rows' dx are summed as results are
sequential   the library's collectives and grouped GEMMs (sequential.py); keeps nothing

The gradient of the routes' weights is made by the second half, of the columns that a rank has, and summed over the
ranks by the first, whose operand they are. It goes from the one to the other as the gradient of the routes, which are
therefore float32 here, of the same bits; only its words of the weights mean something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ....op import Operands, registered
from ....plans import DispatchedColumns
from ....tensor_checks import dense
from ....torch_library import Backward, CallOptions
from ....world import World
from ..call import Kept
from ..expert_parallel.training import KEEPS, decided
from . import backward as grouped_backward
from . import sequential
from .call import FirstHalfCall, GatherOperands, GroupedCall, ScatterOperands, Split, parts, sections
from .op import (
    GATHER_TRAINED,
    GATHERING,
    SCATTER_TRAINED,
    SCATTERING,
    AllGatherGroupedMatmul,
    GroupedMatmulReduceScatter,
)

Tensor = torch.Tensor


class GatherTrained(AllGatherGroupedMatmul):
    """Options: those of the first half, what is kept, and the plan asked for, which the backward pass takes too.
    Results: hidden, routes, what `call.Kept` has, or None."""

    name = GATHER_TRAINED
    public = GATHERING
    signature = f"{AllGatherGroupedMatmul.signature}, str keep, str asked"
    results = 4

    def check(self, world: World, operands: GatherOperands, options: CallOptions) -> FirstHalfCall:
        *usual, keep, _ = options
        if keep not in KEEPS:
            raise ValueError(f"{self.title}: keep {keep!r} is not one of {list(KEEPS)}")
        return replace(super().check(world, operands, tuple(usual)), keep=keep)

    def saved(self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]) -> Operands:
        return *operands, *results[1:]

    def backward(self, world: World, given: Backward) -> Sequence[Tensor | None]:
        saved = [None if t is None else dense(t) for t in given.saved]
        operands: GatherOperands = self.typed(saved[:5])
        routes = saved[5]
        assert routes is not None
        dhidden, droutes = (None if t is None else dense(t) for t in given.gradients[:2])
        call, plan = decided(self, world, operands, given.options)
        wants_x, _, wants_weights, *experts = given.needs
        layer, dx, dw13, db13 = call.layer, None, None, None
        if not call.rows:
            nothing = zip(given.saved[:5], given.needs, strict=True)
            return [torch.zeros_like(t) if need and t is not None else None for t, need in nothing]
        if wants_x or any(experts):
            if dhidden is None:
                dhidden = world.zeros((layer.rows(world), layer.inner), layer.dtype)
            wants = wants_x, any(experts)
            if isinstance(plan, DispatchedColumns):
                kept = Kept(*(t for t in saved[6:] if t is not None and t.numel()))
                dx, dw13, db13 = grouped_backward.first_half(
                    world, layer, plan, dhidden, operands, routes, kept, *wants
                )
            else:
                dx, dw13, db13 = sequential.gather_gradients(world, layer, dhidden, operands, routes, *wants)
        dweights = at_home(world, layer, droutes, operands.weights) if wants_weights else None
        return [dx, None, dweights, dw13, db13]


class ScatterTrained(GroupedMatmulReduceScatter):
    """Options: those of the second half, and the plan asked for."""

    name = SCATTER_TRAINED
    public = SCATTERING
    signature = f"{GroupedMatmulReduceScatter.signature}, str asked"

    def check(self, world: World, operands: ScatterOperands, options: CallOptions) -> GroupedCall:
        return super().check(world, operands, options[:-1])

    def saved(self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]) -> Operands:
        return operands[:5]

    def backward(self, world: World, given: Backward) -> Sequence[Tensor | None]:
        operands: ScatterOperands = self.typed([None if t is None else dense(t) for t in given.saved])
        dy = given.gradients[0]
        if dy is None:
            return [None] * 6
        call, plan = decided(self, world, operands, given.options)
        if not call.rows:
            return [None if t is None else torch.zeros_like(t) for t in given.saved] + [dy]
        if not any(given.needs[:5]):
            return [None] * 5 + [dy]
        experts = any(given.needs[3:5])
        if isinstance(plan, DispatchedColumns):
            made = grouped_backward.second_half(world, call.layer, plan, dense(dy), operands, experts)
        else:
            made = sequential.scatter_gradients(world, call.layer, dense(dy), operands, experts)
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
