"""An MoE layer in one launch that includes the router, on emulated ranks: the routes to the bit those of the router's own
launch, the results those of the layer behind it; and its kernel compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases_moe_fused_router import WITH_ROUTER, RoutedLayer, RouterCase, router_calls
from weft import moe

SIZES = {
    "plain": RoutedLayer(),
    "biases": RoutedLayer(router_bias=True, biases=True, shared=True, activation="gpt_oss", scoring="softmax_after"),
    "sigmoid, groups": RoutedLayer(
        experts=12, k=3, scoring="sigmoid", choice_bias=True, groups=4, top_groups=2, scale=2.5, tokens=(20, 3)
    ),
    "not renormalised": RoutedLayer(renormalise=False, choice_bias=True, router_bias=True, k=1, hidden=40),
    "many experts": RoutedLayer(experts=72, k=8, hidden=72, tokens=(33, 18), scoring="llama4"),
    "float16, gelu": RoutedLayer(dtype=torch.float16, activation="gelu", inner=40, hidden=24),
    "no tokens": RoutedLayer(tokens=(0,)),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", SIZES)
def test_routes_and_results(name: str, ranks: int) -> None:
    for seed in range(2):
        weft.spmd(router_calls(SIZES[name]), ranks, backend="emulated", seed=seed)
