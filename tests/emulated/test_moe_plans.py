"""Every plan of a layer of experts on emulated ranks is compared with torch over one grid: worlds, routings, kinds of
layers, parameters of plans, schedules, streams, and layers that share memory. Each test_moe_<plan>.py tests the
features that only its plan has."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import weft
from tests.emulated.cases import changed
from tests.emulated.cases_expert_parallel import steps, whole_experts
from tests.emulated.cases_moe import KINDS, Run, in_turn, layer_case, nowhere, some_nowhere, to_few
from tests.emulated.cases_tensor_parallel import both_halves
from tests.gates import covered, some
from weft.plans import Plan
from weft.scale import SMALL_DISPATCHED, SMALL_DISPATCHED_COLUMNS, SMALL_LOW_LATENCY, SMALL_MOE

BF, HALF = torch.bfloat16, torch.float16


class Way(NamedTuple):
    """`bound` limits the error: both halves round a route's result, and each rank's sum is rounded too. `inner` is the
    number of columns on a rank."""

    run: Run
    plan: str | Plan
    bound: float = 5e-3
    inner: int = 24


WAYS = {
    "dispatched": Way(steps, SMALL_DISPATCHED),
    "fused": Way(steps, SMALL_MOE),
    "low latency": Way(steps, SMALL_LOW_LATENCY),
    "columns": Way(both_halves, SMALL_DISPATCHED_COLUMNS, 1.2e-2, 16),
}
OF_STEPS = [name for name, way in WAYS.items() if way.run is steps]
SEQUENTIAL = Way(both_halves, "sequential", 1.2e-2, 16)


def right(way: Way, ranks: int, seed: int = 0, preempt: float = 0.05, **case: Any) -> bool:
    """Return whether every error is within the bound."""
    tp_size = {"tp_size": ranks} if way.run is both_halves else {}
    case = dict(inner=way.inner, plan=way.plan) | tp_size | case
    errors = weft.spmd(
        lambda world: layer_case(world, way.run, **case), ranks, backend="emulated", seed=seed, preempt=preempt
    )
    return max(errors) < way.bound


WORLDS = {  # ranks, experts, k
    "dispatched": [(1, 3, 2), (2, 4, 3), (3, 6, 2), (4, 8, 4), (4, 4, 1)],
    "fused": [(2, 4, 3), (3, 6, 2), (4, 8, 4), (4, 4, 1)],
    "low latency": [(2, 4, 3), (3, 6, 2), (4, 8, 4)],
}


@covered(r"fused-(\(4, 8, 4\)|\(4, 4, 1\))", covering=r"[dispatched-\1]")
@covered(r"low latency-\(4, 8, 4\)", covering="[dispatched-(4, 8, 4)]")
@pytest.mark.parametrize(
    ("name", "world"), [(name, world) for name, worlds in WORLDS.items() for world in worlds], ids=str
)
def test_any_world(name: str, world: tuple[int, int, int]) -> None:
    ranks, experts, k = world
    assert right(WAYS[name], ranks, experts=experts, k=k)


@pytest.mark.parametrize("way", [WAYS["columns"], SEQUENTIAL], ids=["columns", "sequential"])
@pytest.mark.parametrize(("ranks", "tp_size"), [(1, 1), (2, 2), (3, 3), (4, 2), (2, 1)])
def test_columns_in_any_world(ranks: int, tp_size: int, way: Way) -> None:
    """The grid varies how experts are split: all ranks share the columns of each expert, some ranks share them, or each
    rank has whole experts."""
    assert right(way, ranks, tp_size=tp_size, inner=16 * ranks // tp_size)


# The case in_turn routes successive calls at random, to few experts, to no expert, and partly to no expert.
@covered("(dispatched|fused|low latency)-(?:to_few|nowhere|some_nowhere)", covering=r"[\1-in_turn]")
@pytest.mark.parametrize("ids_of", [to_few, nowhere, some_nowhere, in_turn], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", OF_STEPS)
def test_routings(name: str, ids_of: Any) -> None:
    """All tokens are routed to one rank's experts, which receive more rows than a tile; some experts, ranks and calls
    have no rows; some routes have no expert."""
    assert right(WAYS[name], 2, ids_of=ids_of, calls=4, shared=True)
    assert right(WAYS[name], 3, experts=3, k=1, ids_of=ids_of, calls=4, tokens=(18, 3, 0))


@pytest.mark.parametrize("way", [WAYS["columns"], SEQUENTIAL], ids=["columns", "sequential"])
@pytest.mark.parametrize("ids_of", [to_few, nowhere, some_nowhere], ids=lambda f: f.__name__)
def test_routings_of_columns(ids_of: Any, way: Way) -> None:
    assert right(way, 2, ids_of=ids_of, shared=True, tokens=(18, 3))


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gpt_oss"])
@pytest.mark.parametrize("way", [*WAYS.values(), SEQUENTIAL], ids=[*WAYS, "columns, sequential"])
def test_activations(way: Way, activation: str) -> None:
    """Neither width is a multiple of blocks or tiles. Layers have biases or not, and some are in float16."""
    columns = way.run is both_halves
    kinds = (BF, True, 72, 24 if columns else 40), (HALF, columns, 24, 40 if columns else 72)
    for dtype, biases, hidden, inner in kinds:
        sizes = dict(hidden=hidden, inner=inner)
        assert right(way, 2, activation=activation, biases=biases, dtype=dtype, calls=1, **sizes)


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gpt_oss"])
def test_halves_of_tiles(activation: str) -> None:
    """There are more programs than tiles, so two programs share each tile."""
    plan = changed(SMALL_DISPATCHED, block_n=64, per_sm=3)
    for dtype, biases, hidden, inner in ((BF, True, 72, 40), (HALF, False, 24, 72)):
        sizes = dict(hidden=hidden, inner=inner, tokens=(20, 3), plan=plan)
        assert right(WAYS["dispatched"], 2, activation=activation, biases=biases, dtype=dtype, calls=2, **sizes)


@covered("(?:swiglu|gelu)", covering="[gpt_oss]")
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gpt_oss"])
def test_biases_the_other_way(activation: str) -> None:
    for dtype, biases, hidden, inner in ((BF, False, 72, 40), (HALF, True, 24, 72)):
        sizes = dict(hidden=hidden, inner=inner)
        assert right(WAYS["dispatched"], 2, activation=activation, biases=biases, dtype=dtype, calls=1, **sizes)


D, F, L, C = SMALL_DISPATCHED, SMALL_MOE, SMALL_LOW_LATENCY, SMALL_DISPATCHED_COLUMNS
PARAMETERS: list[tuple[str, Plan]] = [
    ("dispatched", changed(D, flatten=False, block_k=16, dispatch_programs=1, combine_programs=5)),
    (
        "dispatched",
        changed(
            D, block_n=64, group_m=3, dispatch_programs=6, send_rows=4, send_stages=1, combine_programs=1, sum_rows=1
        ),
    ),
    (
        "dispatched",
        changed(
            D,
            block_m=32,
            block_k=64,
            group_m=8,
            stages=3,
            per_sm=2,
            flatten=False,
            dispatch_programs=3,
            send_rows=1,
            send_stages=3,
            combine_programs=99,
        ),
    ),
    ("fused", changed(F, block_k=16, copy_programs=1, copy_rows=1)),
    ("fused", changed(F, block_n=64, group_m=3, copy_programs=4, copy_rows=4, copy_stages=1)),
    ("fused", changed(F, block_m=32, block_k=64, group_m=8, stages=3, copy_programs=3, per_sm=2, copy_stages=3)),
    ("low latency", changed(L, copy_programs=99, block_k=16)),
    ("low latency", changed(L, copy_programs=1, block_m=32, stages=3)),
    ("columns", changed(C, flatten=False, block_k=16, dispatch_programs=1, combine_programs=5)),
    (
        "columns",
        changed(C, block_n=64, group_m=3, dispatch_programs=6, send_stages=1, combine_programs=1, sum_rows=1),
    ),
    (
        "columns",
        changed(C, block_k=64, group_m=8, stages=3, per_sm=2, dispatch_programs=3, send_stages=3, combine_programs=99),
    ),
]


@pytest.mark.parametrize(("name", "plan"), PARAMETERS, ids=str)
def test_plan_parameters(name: str, plan: Plan) -> None:
    """An expert has several tiles with rows from several ranks, and a row's columns are in several parts."""
    sizes = {} if name == "columns" else dict(inner=40)
    assert right(WAYS[name], 2, hidden=72, tokens=(40, 31), calls=2, plan=plan, **sizes)


@pytest.mark.parametrize("seed", some(range(6)))
@pytest.mark.parametrize("name", WAYS)
def test_schedules(name: str, seed: int) -> None:
    tokens = (3, 0, 2) if name == "low latency" else (13, 0, 20)
    sizes = dict(calls=5) if name == "columns" else dict(experts=6, k=3, calls=4)
    assert right(WAYS[name], 3, seed, 0.2, hidden=40, tokens=tokens, ids_of=in_turn, **sizes)


@pytest.mark.parametrize("name", ["dispatched", "fused", "columns"])
def test_layers_share_memory_and_counters(name: str) -> None:
    """The layers have different sizes: the rows of the second layer have more tiles of columns, and its tables may use
    the memory of the first layer's tables."""
    assert right(WAYS[name], 2, layers=3, calls=2 if name == "columns" else 3, ids_of=some_nowhere)


@pytest.mark.parametrize("seed", some(range(4)))
@pytest.mark.parametrize("name", WAYS)
def test_calls_on_two_streams(name: str, seed: int) -> None:
    assert right(WAYS[name], 2, seed, 0.2, calls=4, layers=1 + (name == "low latency"), streams=("first", "second"))


@pytest.mark.parametrize("seed", some(range(6)))
def test_layers_of_other_sizes_by_all_plans_in_turn(seed: int) -> None:
    plans = (F, D, L, F, L, D, F)
    case = dict(experts=6, k=2, layers=3, calls=5, tokens=(9, 2, 6), ids_of=some_nowhere, plan=plans)
    assert right(WAYS["dispatched"], 3, seed, 0.2, **case)


@pytest.mark.parametrize("tokens", [(3, 2, 4, 1), (40, 40, 40, 40)], ids=["in one tile", "in many tiles"])
def test_waves_of_four_ranks(tokens: tuple[int, ...]) -> None:
    """In one launch, a tile either contains rows from all source ranks and is summed only after the last of them has
    arrived, or contains rows from one source rank."""
    assert right(WAYS["fused"], 4, 1, 0.2, experts=4, k=2, tokens=tokens, calls=2)


@pytest.mark.parametrize("seed", some(range(4)))
@pytest.mark.parametrize("preceding_plan", [D, L], ids=lambda plan: plan.kind)
def test_a_smaller_layer_follows_by_another_plan(preceding_plan: Plan, seed: int) -> None:
    """A rank may send the smaller layer's rows while other ranks still read the larger layer's rows; a shared inbox
    would mix them."""
    case = dict(experts=3, k=1, hidden=16, inner=16, layers=2, calls=2, tokens=(36,) * 3, plan=(preceding_plan, F))
    assert right(WAYS["fused"], 3, seed, 0.2, **case)


@pytest.mark.parametrize("second", ["sequential", C])
def test_halves_of_different_plans(second: Any) -> None:
    first_plan = C if second == "sequential" else "sequential"
    assert right(WAYS["columns"], 2, plan=first_plan, second=second, tokens=(21, 9))


@pytest.mark.parametrize("way", [WAYS["columns"], Way(whole_experts, "dispatched")], ids=["columns", "whole"])
def test_no_tokens_at_all(way: Way) -> None:
    assert right(way._replace(bound=1e-30), 2, tokens=(0,), calls=1)


# -- `weft.moe.moe` ----------------------------------------------------------------------------------------------------
# test_any_world runs the steps of every plan in these worlds; the op around them is the same for all plans.
@covered("[13]-(dispatched|fused|low_latency)", covering=r"[2-\1]")
@pytest.mark.parametrize("plan", ["sequential", "dispatched", "fused", "low_latency", "auto"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_op_in_any_world(ranks: int, plan: str) -> None:
    assert right(Way(whole_experts, plan, 1.2e-2), ranks, experts=12, tokens=(5, 0, 7))


@covered("gelu-(dispatched|fused)", covering=r"test_activations[\1-gelu]")
@covered("gelu-low_latency", covering="test_activations[low latency-gelu]")
@covered("float16-(dispatched|fused)", covering=r"test_activations[\1-swiglu]")
@covered("float16-low_latency", covering="test_activations[low latency-swiglu]")
@covered("(?:some nowhere|to few)-(dispatched|fused)", covering=r"test_routings[\1-in_turn]")
@covered("(?:some nowhere|to few)-low_latency", covering="test_routings[low latency-in_turn]")
@pytest.mark.parametrize("plan", ["sequential", "dispatched", "fused", "low_latency"])
@pytest.mark.parametrize("kind", ["gelu", "gpt_oss", "some nowhere", "to few", "float16"])
def test_kinds_of_layers(kind: str, plan: str) -> None:
    case = dict(dtype=HALF) if kind == "float16" else KINDS[kind]
    assert right(Way(whole_experts, plan, 1.2e-2), 2, experts=12, tokens=(4, 6), shared=kind != "gelu", **case)
