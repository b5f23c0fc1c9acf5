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
