"""Layers whose experts' columns are split over ranks: both halves by every plan, on emulated ranks, against torch; their errors, their
operators, their kernels compiled, and the module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases_moe import in_turn, nowhere, some_nowhere, to_few
from cases_moe_tensor import routes_case, tensor_case
from gates import some

import weft
from weft.plans import SMALL_DISPATCHED as S

BOUND = 1.2e-2  # roundings to bf16 on the way: of a route's result, and of each rank's sum


def errors(ranks: int, seed: int = 0, preempt: float = 0.05, **case: Any) -> list[float]:
    return weft.spmd(lambda world: tensor_case(world, **case), ranks, backend="emulated", seed=seed, preempt=preempt)


@pytest.mark.parametrize("plan", ["sequential", "dispatched"])
@pytest.mark.parametrize(("ranks", "sharing"), [(1, 1), (2, 2), (3, 3), (4, 2), (2, 1)])
def test_any_world_against_torch(ranks: int, sharing: int, plan: str) -> None:
    """Also mixed, of experts that only some of the ranks share; and each with experts of its own."""
    assert max(errors(ranks, plan=plan, sharing=sharing)) < BOUND


@pytest.mark.parametrize("plan", ["sequential", "dispatched"])
@pytest.mark.parametrize("ids_of", [to_few, nowhere, some_nowhere], ids=lambda f: f.__name__)
def test_routings(ids_of: Any, plan: str) -> None:
    assert max(errors(2, plan=plan, ids_of=ids_of, shared=True, tokens=(18, 3))) < BOUND


@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize("plan", ["sequential", "dispatched"])
def test_the_routes(plan: str, sharing: int) -> None:
    weft.spmd(lambda world: routes_case(world, plan, (20, 7), sharing), 2, backend="emulated")
    weft.spmd(lambda world: routes_case(world, plan, (20, 0), sharing, some_nowhere), 2, backend="emulated")


@pytest.mark.parametrize("then", ["sequential", S])
def test_halves_of_different_plans(then: Any) -> None:
    first = S if then == "sequential" else "sequential"
    assert max(errors(2, plan=first, then=then, tokens=(21, 9))) < BOUND


@pytest.mark.parametrize("plan", ["sequential", "dispatched"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gpt_oss"])
def test_activations_and_biases(activation: str, plan: str) -> None:
    """Of widths that are no whole blocks or tiles, in either direction, in float16 too."""
    for dtype, sizes in ((torch.bfloat16, dict(hidden=72, inner=48)), (torch.float16, dict(hidden=24, inner=80))):
        assert max(errors(2, plan=plan, activation=activation, biases=True, dtype=dtype, calls=1, **sizes)) < BOUND


PLANS = [
    replace(S, flatten=False, block_k=16, senders=1, summers=5),
    replace(S, block_n=64, group_m=3, senders=6, send_stages=1, summers=1, sum_rows=1),
    replace(S, block_k=64, group_m=8, stages=3, senders=3, send_stages=3, summers=99),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_plan_parameters(plan: Any) -> None:
    assert max(errors(2, plan=plan, hidden=72, tokens=(40, 31), calls=2)) < BOUND


@pytest.mark.parametrize("seed", some(range(8), 2))
def test_schedules(seed: int) -> None:
    assert max(errors(3, seed, 0.2, plan=S, hidden=40, tokens=(13, 0, 20), calls=5, ids_of=in_turn)) < BOUND


def test_layers_share_memory_and_counters() -> None:
    assert max(errors(2, plan=S, layers=3, calls=2, ids_of=some_nowhere)) < BOUND


@pytest.mark.parametrize("seed", some(range(4)))
def test_calls_on_two_streams(seed: int) -> None:
    assert max(errors(2, seed, 0.2, plan=S, calls=4, streams=("first", "second"))) < BOUND
