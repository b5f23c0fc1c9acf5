"""The GPU checks of the MoE layer's plans for a single launch and for few tokens; gpu_main.py runs them. `checks`
yields a name, a bound and a function for each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch

import weft
from tests.emulated.cases import changed
from tests.emulated.cases_moe import Model, at_random, some_nowhere, to_few
from tests.gpu.gpu_moe import BF, BOUND, against, graph_replays, moe_by_plan, routed
from tests.gpu.gpu_moe_fused_router import checks as router_checks
from weft.ops.moe.call import Layer
from weft.plans import FusedMoe, GemmTile, LowLatency, Plan

ONE_AN_SM = FusedMoe(tile=GemmTile(), per_sm=1, copy_programs=16, copy_stages=3)
PLANS: dict[str, Plan] = {
    "fused": FusedMoe(),
    "fused, 1 program an SM": ONE_AN_SM,
    "fused, 8 movers": FusedMoe(copy_programs=8),
    "fused, all move": FusedMoe(copy_programs=128, copy_rows=1, copy_stages=2),
}


def bits_of_dispatched(world: weft.World, plan: Plan, count: int) -> float:
    """Alternate calls of three routings with random late ranks, and sometimes a call of the plan with several
    launches."""
    layer = Layer(300, 16, 4, 512, 256, BF)
    model = Model(world, layer, False)
    inputs = [routed(world, layer, 300, call, ids_of) for call, ids_of in enumerate((at_random, to_few, some_nowhere))]
    expected = [moe_by_plan(model, world, g, "dispatched").clone() for g in inputs]
    late, same = random.Random(world.rank), random.Random(7)
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for i in range(count):
        if late.random() < 0.1:
            torch.cuda._sleep(late.randrange(1000, 400000))
        by_dispatched = same.random() < 0.1
        wrong += (
            moe_by_plan(model, world, inputs[i % 3], "dispatched" if by_dispatched else plan) != expected[i % 3]
        ).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def few_among_others(world: weft.World, count: int) -> float:
    """Alternate between calls with few tokens, with random late ranks, and calls of larger layers by the other plans:
    the bits must be the same every time."""
    plans: list[str | Plan] = ["low_latency", "fused", "dispatched"]
    layers = [Layer(tokens, 16, 4, hidden, 256, BF) for tokens, hidden in ((17, 512), (300, 512), (90, 1024))]
    models = [Model(world, layer, False, 10 * i) for i, layer in enumerate(layers)]
    inputs = [routed(world, layer, layer.max_tokens_per_rank, i, some_nowhere) for i, layer in enumerate(layers)]
    expected = [moe_by_plan(models[i], world, inputs[i], plans[i]).clone() for i in range(3)]
    late, same = random.Random(world.rank), random.Random(9)
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for _ in range(count):
        if late.random() < 0.1:
            torch.cuda._sleep(late.randrange(1000, 400000))
        i = same.choice((0, 0, 0, 1, 2))
        wrong += (moe_by_plan(models[i], world, inputs[i], plans[i]) != expected[i]).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    size = world.size
    common = dict(max_tokens_per_rank=0, experts=8 * size, k=4, hidden=512, inner=256, dtype=BF)

    def layer(**changes: object) -> Layer:
        return Layer(**(common | changes))  # type: ignore[arg-type]

    for name, plan in PLANS.items():
        yield f"moe {name}, even", BOUND, partial(against, world, plan, layer(max_tokens_per_rank=384), [384])
        yield (
            f"moe {name}, uneven and none",
            BOUND,
            partial(against, world, plan, layer(max_tokens_per_rank=300), [300, 0, 1, 37]),
        )
        yield f"moe {name}, 300 calls, delays", 0.0, partial(bits_of_dispatched, world, plan, 300)
    to_few_layer, some_nowhere_layer = layer(max_tokens_per_rank=200), layer(max_tokens_per_rank=150)
    yield "moe fused, to few", BOUND, partial(against, world, FusedMoe(), to_few_layer, [200], to_few)
    yield "moe fused, some nowhere", BOUND, partial(against, world, FusedMoe(), some_nowhere_layer, [150], some_nowhere)
    for act in ("gelu", "gpt_oss"):
        biased = layer(max_tokens_per_rank=100, activation=act, hidden=720, inner=360)
        yield f"moe fused, {act}, biases", BOUND, partial(against, world, FusedMoe(), biased, [100], at_random, True)
    yield "moe fused in a graph", 0.0, partial(graph_replays, world, "fused")
    yield "moe few, even", BOUND, partial(against, world, "low_latency", layer(max_tokens_per_rank=24), [24])
    yield (
        "moe few, uneven and none",
        BOUND,
        partial(against, world, "low_latency", layer(max_tokens_per_rank=7), [5, 0, 1, 7]),
    )
    yield "moe few, to few", BOUND, partial(against, world, "low_latency", layer(max_tokens_per_rank=50), [50], to_few)
    for act in ("gelu", "gpt_oss"):
        biased = layer(max_tokens_per_rank=30, activation=act, hidden=720, inner=360)
        yield f"moe few, {act}, biases", BOUND, partial(against, world, "low_latency", biased, [30], some_nowhere, True)
    wide = changed(LowLatency(), block_m=32, block_k=128, stages=3, copy_programs=8)
    yield "moe few, 32 rows a tile", BOUND, partial(against, world, wide, layer(max_tokens_per_rank=60), [60])
    yield "moe few in a graph", 0.0, partial(graph_replays, world, "low_latency")
    yield "moe few among others, 300 calls, delays", 0.0, partial(few_among_others, world, 300)
    yield from router_checks(world)
