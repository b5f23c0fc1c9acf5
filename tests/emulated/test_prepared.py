"""What calls of one kind prepare once: loads ahead of the first launch, and what trials share."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import draw
from weft import World
from weft.kernel_launch import Ahead
from weft.op import REGISTRY


class Recorded:
    """A launch that records which tensors it was loaded for."""

    def __init__(self) -> None:
        self.loaded: list[tuple[bool, ...]] = []

    def load(self, **moving: torch.Tensor) -> None:
        self.loaded.append(tuple(t.data_ptr() % 16 == 0 for t in moving.values()))


def test_kernels_are_loaded_ahead_once_for_each_combination_of_alignments() -> None:
    memory = torch.empty(64, dtype=torch.bfloat16)
    memory = memory[-memory.data_ptr() % 16 // 2 :]
    tensors = {True: memory[:16], False: memory[1:17]}
    ahead, launch = Ahead(), Recorded()
    combinations = [*itertools.product(tensors, repeat=2)]
    for x, out in combinations * 2:
        moving = dict(x=tensors[x], out=tensors[out])
        ahead((*moving.values(), None), lambda moving=moving: [(launch, moving)])
    assert launch.loaded == combinations


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_calls_of_which_a_plan_may_serve_one_alone_share_no_trial(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls share a trial whose rows are rounded to the same number, but where one has as many rows on every rank and the other has
    not; no other field of a call may differ."""
    calls: list[Any] = []
    check = type(REGISTRY[op]).check
    monkeypatch.setattr(type(REGISTRY[op]), "check", lambda *a: calls.append(check(*a)) or calls[-1])

    def main(world: World) -> None:
        x, w = draw(1, 16 if op == "all_gather_matmul" else 32, 32), draw(2, 16, 32)
        getattr(weft, op)(x, w, world=world, plan="sequential")

    weft.spmd(main, 2, backend="emulated")
    key, call = REGISTRY[op].trial_key, calls[0]
    even, uneven = replace(call, shards=(16, 16)), replace(call, shards=(20, 12))
    assert key(even) != key(uneven)
    for changes in (dict(n=24), dict(k=64), dict(dtype=torch.float16)):
        assert {name for name in changes} <= {field.name for field in fields(call)}
        assert key(replace(call, **changes)) != key(call)
