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
from weft.ops.all_reduce.call import SumCall
from weft.ops.moe.call import Layer, MoeCall
from weft.ops.moe.expert_parallel.op import MOE


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
    """Rows are rounded, but plans differ where some ranks have more rows than others, and by every other field."""
    calls: list[Any] = []
    check = type(REGISTRY[op]).check
    monkeypatch.setattr(type(REGISTRY[op]), "check", lambda *a: calls.append(check(*a)) or calls[-1])

    def main(world: World) -> None:
        x, w = draw(1, 16 if op == "all_gather_matmul" else 32, 32), draw(2, 16, 32)
        getattr(weft, op)(x, w, world=world, plan="sequential")

    weft.spmd(main, 2, backend="emulated")
    key, call = REGISTRY[op].trial_key, calls[0]
    assert key(replace(call, shards=(16, 16))) != key(replace(call, shards=(20, 12)))
    # `everywhere` is the operator's; ranks need not ask alike for what was gathered.
    assert shared_by(key, call) - {"everywhere", "gathered"} == {"shards"}


def another(value: Any) -> Any:
    """Another value of a field, in which plans may differ."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"other than {value}"
    return torch.float16 if isinstance(value, torch.dtype) else "another"


def shared_by(key: Any, call: Any) -> set[str]:
    """The fields in which calls may differ that share a trial, where `shards` keeps its sum."""
    names = {field.name for field in fields(call)}
    values = {name: (16,) * 2 if name == "shards" else another(getattr(call, name)) for name in names}
    return {name for name in names if key(replace(call, **{name: values[name]})) == key(call)}


def test_sums_share_trials_for_any_epsilon_and_rows_of_one_step() -> None:
    op: Any = REGISTRY["all_reduce_rms_norm"]
    call = SumCall(op.name, 300, 32, torch.bfloat16, torch.bfloat16, 1, 1e-6, 0, 0, False, False)
    assert shared_by(op.trial_key, call) == {"eps", "m", "shape"}
    assert op.trial_key(call) != op.trial_key(replace(call, m=4096))


def test_layers_share_trials_for_tokens_up_to_one_power_of_two() -> None:
    layer = Layer(48, 8, 2, 64, 32, torch.bfloat16)

    def key(layer: Layer) -> Any:
        return MOE.trial_key(MoeCall(48, None, layer))

    assert shared_by(key, layer) == {"max_tokens_per_rank"}
    assert key(layer) != key(replace(layer, max_tokens_per_rank=65))
