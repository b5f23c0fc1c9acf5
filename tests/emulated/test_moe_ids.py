"""Routings that a caller may pass by mistake contain a repeated expert, ids out of range, NaN logits, or wrong numbers
of experts. Each such routing has a defined result, the same with all plans.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_moe import Model, interleaved
from weft import moe
from weft.op import REGISTRY
from weft.ops.moe.call import Layer

T, BOUND = 6, 1.2e-2
LAYER = Layer(T, 4, 3, 32, 24, torch.bfloat16)
IDS = torch.tensor(
    [[0, 0, 3], [1, 1, 1], [4, 2, -1], [2**31 - 1, -(2**31), 0], [-2, 7, 3], [3, 2, 3]], dtype=torch.int32
)


def local_operands(world: weft.World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw(world.rank, T, 32), IDS.roll(world.rank, 0), draw(5 + world.rank, T, 3, dtype=torch.float32).abs()


@pytest.mark.parametrize("plan", REGISTRY["moe"].kinds)
def test_an_expert_twice_and_ids_out_of_range(plan: str) -> None:
    """Both weights of a repeated expert count, and a route without an expert is dropped."""

    def main(world: weft.World) -> float:
        model, (x, ids, weights) = Model(world, LAYER, False), local_operands(world)
        y = moe.moe(x, ids, weights, *model.local_weights[:2], max_rows=2 * T * 3, world=world, plan=plan)
        world.synchronize()
        return distance(y, model(x, ids, weights))

    assert max(weft.spmd(main, 2, backend="emulated")) < BOUND


@pytest.mark.parametrize("plan", ("sequential", "dispatched"))
def test_their_gradients(plan: str) -> None:
    def main(world: weft.World) -> float:
        model, (x, ids, weights) = Model(world, LAYER, False), local_operands(world)
        x, weights = x.requires_grad_(), weights.requires_grad_()
        y = moe.moe(x, ids, weights, *model.local_weights[:2], max_rows=2 * T * 3, world=world, plan=plan)
        y.float().sum().backward()
        wide_x, weights_leaf = x.detach().float().requires_grad_(), weights.detach().clone().requires_grad_()
        model_sum(model, wide_x, ids, weights_leaf).backward()
        world.synchronize()
        return max(distance(x.grad, wide_x.grad), distance(weights.grad, weights_leaf.grad))  # type: ignore[arg-type]

    assert max(weft.spmd(main, 2, backend="emulated")) < BOUND


def model_sum(model: Model, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for e in range(LAYER.experts):
        t, slot = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[t] @ model.w13[e].float().t()).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ model.w2[e].float().t()
        total = total + (weights[t, slot, None] * y).sum()
    return total


@pytest.mark.parametrize("plan", REGISTRY["all_gather_grouped_matmul"].kinds)
def test_where_columns_are_split(plan: str) -> None:
    def main(world: weft.World) -> float:
        model, (x, ids, weights) = Model(world, LAYER, False), local_operands(world)
        half = slice(12 * world.rank, 12 * (world.rank + 1))
        w13 = torch.cat([part[:, half] for part in model.w13.chunk(2, 1)], 1)
        how: dict[str, Any] = dict(world=world, plan=plan)
        w13 = interleaved(w13, world.backend.scale.interleave)
        hidden, routes = weft.all_gather_grouped_matmul(x, ids, weights, w13, inner=12, **how)
        y = weft.grouped_matmul_reduce_scatter(hidden, routes, ids, model.w2[:, :, half].contiguous(), **how)
        world.synchronize()
        return distance(y, model(x, ids, weights))

    assert max(weft.spmd(main, 2, backend="emulated")) < BOUND


def test_logits_that_are_nan() -> None:
    """The ids of a token with NaN logits are valid or -1, and its result may be NaN; no other token is affected."""

    def main(world: weft.World) -> None:
        model, logits = Model(world, LAYER, False), draw(3 + world.rank, T, 4, dtype=torch.float32)
        logits[1, 2], logits[2] = float("nan"), float("nan")
        x = draw(world.rank, T, 32)
        ids, weights = moe.gate(logits, 3, world=world)
        assert ((ids >= -1) & (ids < 4)).all()
        others = [t for t in range(T) if t not in (1, 2)]
        expected = model(x[others], ids[others], weights[others])
        for plan in REGISTRY["moe"].kinds:
            y = moe.moe(x, ids, weights, *model.local_weights[:2], max_rows=2 * T * 3, world=world, plan=plan)
            world.synchronize()
            assert distance(y[others], expected) < BOUND, plan

    weft.spmd(main, 2, backend="emulated")


@pytest.mark.parametrize("plan", REGISTRY["moe"].kinds)
def test_other_numbers_of_experts_on_ranks_are_a_mismatch(plan: str) -> None:
    def main(world: weft.World) -> None:
        layer = Layer(T, 4 + 2 * world.rank, 3, 32, 24, torch.bfloat16)
        expert_weights, (x, ids, weights) = Model(world, layer, False).local_weights, local_operands(world)
        with pytest.raises(weft.Mismatch, match="rank 0: moe .*experts=4.*rank 1: moe .*experts=6"):
            moe.moe(x, ids, weights, *expert_weights[:2], world=world, plan=plan)
            world.synchronize()

    weft.spmd(main, 2, backend="emulated")


def test_experts_that_the_ranks_do_not_divide_are_an_error() -> None:
    def main(world: weft.World) -> None:
        with pytest.raises(ValueError, match="num_experts 5 is not divisible by the world size 2"):
            moe.MoE(32, 24, 5, 2, world=world)
        x, ids, weights = local_operands(world)
        with pytest.raises(ValueError, match="5 experts over 2 ranks"):
            moe.dispatch(x, ids, weights, experts=5, world=world)

    weft.spmd(main, 2, backend="emulated")
