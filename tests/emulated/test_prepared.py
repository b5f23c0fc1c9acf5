"""Each kind of call is prepared once: tests of loading before the first launch, and of shared trials."""

from __future__ import annotations

import gc
import itertools
import weakref
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
    """A launch that records the tensors with which it was loaded."""

    def __init__(self) -> None:
        self.loaded: list[tuple[bool, ...]] = []
        self.options: dict[str, bool] = {}

    def load(self, co_resident: None, /, **moving: torch.Tensor) -> None:
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
def test_calls_that_need_different_plans_share_no_trial(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial keys round the number of rows, but calls do not share a trial if some ranks have more rows than others, or
    if any other field differs."""
    calls: list[Any] = []
    check = type(REGISTRY[op]).check
    monkeypatch.setattr(type(REGISTRY[op]), "check", lambda *a: calls.append(check(*a)) or calls[-1])

    def main(world: World) -> None:
        x, w = draw(1, 16 if op == "all_gather_matmul" else 32, 32), draw(2, 16, 32)
        getattr(weft, op)(x, w, world=world, plan="sequential")

    weft.spmd(main, 2, backend="emulated")
    key, call = REGISTRY[op].trial_key, calls[0]
    assert key(replace(call, shards=(16, 16))) != key(replace(call, shards=(20, 12)))
    # The operator sets `everywhere`, and ranks may request different values of `gathered`.
    assert shared_by(key, call) - {"everywhere", "gathered"} == {"shards"}


def another(value: Any) -> Any:
    """Return a different value of a field."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"other than {value}"
    return torch.float16 if isinstance(value, torch.dtype) else "another"


def shared_by(key: Any, call: Any) -> set[str]:
    """Return the fields in which calls that share a trial may differ, when `shards` keeps its sum."""
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


def preparations(monkeypatch: pytest.MonkeyPatch, op: str) -> list[Any]:
    """Record each call that the op prepares from now on."""
    calls: list[Any] = []
    prepare = type(REGISTRY[op]).prepare

    def recorded(self: Any, world: World, call: Any, plan: Any) -> Any:
        calls.append((world.rank, call))
        return prepare(self, world, call, plan)

    monkeypatch.setattr(type(REGISTRY[op]), "prepare", recorded)
    return calls


def test_a_shape_is_prepared_once_and_again_after_its_memory_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = preparations(monkeypatch, "all_gather_matmul")

    def main(world: World) -> list[int]:
        small, large, w, counts = draw(world.rank, 16, 64), draw(world.rank, 256, 64), draw(7, 16, 64), []
        for x in (small, small, large, small, small):
            y = weft.all_gather_matmul(x, w, world=world, plan="fused")
            world.synchronize()
            expected = torch.cat([draw(rank, *x.shape) for rank in range(world.size)]).float() @ w.float().t()
            assert (y.float() - expected).norm() < 1e-2 * expected.norm()
            counts.append(sum(rank == world.rank for rank, _ in calls))
        return counts

    assert weft.spmd(main, 2, backend="emulated") == [[1, 1, 2, 3, 3]] * 2


@pytest.mark.parametrize("plan", ["sequential", "fused"])
def test_a_known_call_refuses_the_same_arguments_as_the_first(plan: str) -> None:
    def main(world: World) -> None:
        x, w, refused = draw(world.rank, 16, 64), draw(7, 16, 64), []
        for _ in range(2):
            with pytest.raises(ValueError, match=r"out \[32, 15\] bfloat16 on cpu must be contiguous, \[32, 16\]") as e:
                weft.all_gather_matmul(x, w, world=world, plan=plan, out=torch.empty(32, 15, dtype=x.dtype))
            refused.append(str(e.value))
            weft.all_gather_matmul(x, w, world=world, plan=plan)
        assert refused[0] == refused[1]
        world.synchronize()

    weft.spmd(main, 2, backend="emulated")


def test_a_known_call_copies_unaligned_operands() -> None:
    def main(world: World) -> None:
        w, memory = draw(7, 16, 64), torch.zeros(16 * 64 + 8, dtype=torch.bfloat16)
        shifted = memory[-memory.data_ptr() % 16 // 2 + 1 :][: 16 * 64].view(16, 64)
        shifted.copy_(draw(world.rank, 16, 64))
        aligned = draw(world.rank, 16, 64)
        results = [weft.all_gather_matmul(x, w, world=world, plan="fused") for x in (aligned, shifted, aligned)]
        world.synchronize()
        assert shifted.data_ptr() % 16 and all(torch.equal(results[0], y) for y in results)

    weft.spmd(main, 2, backend="emulated")


@pytest.mark.parametrize("plan", ["sequential", "one_shot", "two_shot"])
def test_sums_of_two_shapes_of_one_matrix_keep_their_shapes(plan: str) -> None:
    def main(world: World) -> None:
        x = torch.ones(8, 32, dtype=torch.bfloat16)
        for shape in ((8, 32), (2, 4, 32), (8, 32), (2, 4, 32)):
            y = weft.all_reduce(x.view(shape), world=world, plan=plan)
            world.synchronize()
            assert y.shape == shape and bool((y == world.size).all())

    weft.spmd(main, 2, backend="emulated")


def test_unreferenced_routes_are_freed() -> None:
    """Memory that calls with a Routing prepare is freed with the Routing; the World keeps only the memory that its
    latest call needs."""

    def main(world: World) -> int:
        x, w, routes = draw(1, 32, 64), draw(2, 64, 64), []
        for i in range(4):
            routing = weft.route([j // (i + 1) % 2 for j in range(32)], world=world)
            for _ in range(2):
                weft.matmul_all_to_all(x, w, destinations=routing, world=world)
            routes.append(weakref.ref(routing))
            del routing
        weft.matmul_reduce_scatter(x, w, world=world, plan="sequential")
        world.synchronize()
        gc.collect()
        return sum(route() is not None for route in routes)

    assert weft.spmd(main, 2, backend="emulated") == [0, 0]
