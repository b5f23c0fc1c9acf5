"""The GPU checks of an MoE layer whose single launch includes the router; gpu_moe_fused.py yields them with its own
checks. Logits are exact (tests/emulated/cases_moe_fused_router.py), so routes must be equal bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

import weft
from tests.emulated.cases_moe_fused_router import RoutedLayer, RouterCase, router_calls
from tests.gpu.gpu_moe import BOUND
from tests.gpu.gpu_router import kernels_of
from weft import moe
from weft.plans import FusedMoe, GemmTile

ROUTED = FusedMoe(route=True)
PLANS = {
    "router in it": ROUTED,
    "router in it, 1 program an SM": FusedMoe(tile=GemmTile(), per_sm=1, copy_programs=16, copy_stages=3, route=True),
    "router in it, all programs copy": replace(ROUTED, copy_programs=128, copy_rows=1, copy_stages=2),
}
SCORINGS = ("softmax", "softmax_after", "sigmoid", "llama4")


def sizes_of(size: int, **changes: object) -> RoutedLayer:
    """Return the sizes of a layer with 8 experts per rank."""
    common = dict(experts=8 * size, k=4, hidden=512, inner=256, tokens=(300,))
    return RoutedLayer(**(common | changes))  # type: ignore[arg-type]


def routes_and_results(world: weft.World, sizes: RoutedLayer, plan: FusedMoe) -> float:
    """Make calls without synchronisation. Compare the routes bit for bit, and compare the results with the layer on the
    host."""
    return router_calls(sizes, 4, plan=plan, bound=float("inf"))(world)


def random_shapes(world: weft.World, count: int) -> float:
    """Draw layers, routers and plans, the same on every rank."""
    rng, plans, worst = random.Random(17 + world.size), list(PLANS.values()), 0.0
    for _ in range(count):
        experts, scoring = world.size * rng.randrange(2, 33), rng.choice(SCORINGS)
        groups = world.size if rng.random() < 0.4 else 0
        top_groups = rng.randrange(1, world.size + 1) if groups else 0
        k = rng.randrange(1, min(10, experts // (groups or 1) * (top_groups or 1)) + 1)
        activation = rng.choice(["swiglu", "gelu", "gpt_oss"])
        sizes = RoutedLayer(
            experts,
            k,
            8 * rng.randrange(3, 100),
            8 * rng.randrange(3, 40),
            [rng.choice([0, 1, rng.randrange(400)]) for _ in range(world.size)],
            activation,
            rng.choice([torch.bfloat16, torch.float16]),
            biases=rng.random() < 0.5,
            shared=rng.random() < 0.5,
            router_bias=rng.random() < 0.5,
            choice_bias=rng.random() < 0.5,
            scoring=scoring,
            renormalise=rng.random() < 0.5,
            groups=groups,
            top_groups=top_groups,
            scale=rng.choice([1.0, 2.5]),
        )
        worst = max(worst, routes_and_results(world, sizes, rng.choice(plans)))
    return worst


class Layers:
    """One layer on this rank, and the tokens of several calls."""

    def __init__(self, world: weft.World, tokens: int = 300) -> None:
        sizes = sizes_of(world.size, router_bias=True)
        case = RouterCase(world, sizes, ROUTED)
        self.world, self.weights, self.router = world, case.model.local_weights, case.router
        self.xs = [sizes.tokens_of(call, world.rank, tokens).to(world.device) for call in range(4)]

    def run(self, x: torch.Tensor, plan: FusedMoe, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the layer in one launch, which includes the router if the plan supports it."""
        w13, w2 = self.weights.w13, self.weights.w2
        return moe.moe(x, None, None, w13, w2, router=self.router, world=self.world, plan=plan, out=out)


def bits_of_router_before(world: weft.World, plan: FusedMoe, count: int) -> float:
    """Alternate between calls of four batches of tokens, with random late ranks, and sometimes make a call after a
    separate launch of the router: the bits must be the same every time."""
    layers = Layers(world)
    behind = replace(plan, route=False)
    expected = [layers.run(x, behind).clone() for x in layers.xs]
    late, same = random.Random(world.rank), random.Random(7)
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for call in range(count):
        if late.random() < 0.1:
            torch.cuda._sleep(late.randrange(1000, 400000))
        y = layers.run(layers.xs[call % 4], behind if same.random() < 0.1 else plan)
        wrong += (y != expected[call % 4]).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def graph_replays(world: weft.World, plan: FusedMoe) -> float:
    """Replay a CUDA graph with new tokens each time; the bits must equal those of eager calls."""
    layers = Layers(world)
    x = layers.xs[0].clone()
    layers.run(x, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers.run(x, plan)
    wrong = 0
    for call in range(1, 9):
        tokens = layers.xs[call % 4]
        expected = layers.run(tokens, plan).clone()
        x.copy_(tokens)
        graph.replay()
        torch.cuda.synchronize()
        wrong += int(not torch.equal(out, expected))
    return float(wrong)


def kernels_beyond_one(world: weft.World) -> float:
    """Return the number of kernels, copies and fills that the GPU runs in a call, minus one."""
    layers = Layers(world)
    out = torch.empty_like(layers.xs[0])
    return float(abs(kernels_of(lambda: layers.run(layers.xs[0], ROUTED, out)) - 1))


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    size = world.size
    for name, plan in PLANS.items():
        yield f"moe {name}, even", BOUND, partial(routes_and_results, world, sizes_of(size), plan)
        uneven = sizes_of(size, tokens=(300, 0, 1, 37), router_bias=True, choice_bias=True, scoring="sigmoid")
        yield f"moe {name}, uneven and none", BOUND, partial(routes_and_results, world, uneven, plan)
        yield f"moe {name}, 300 calls, delays", 0.0, partial(bits_of_router_before, world, plan, 300)
    groups = sizes_of(size, experts=32 * size, k=8, groups=8, top_groups=4, scoring="sigmoid", scale=2.5)
    yield "moe router in it, groups", BOUND, partial(routes_and_results, world, groups, ROUTED)
    clamped = sizes_of(
        size, hidden=720, inner=360, biases=True, router_bias=True, activation="gpt_oss", scoring="softmax_after"
    )
    yield "moe router in it, gpt_oss, biases", BOUND, partial(routes_and_results, world, clamped, ROUTED)
    yield "moe router in it, random shapes", BOUND, partial(random_shapes, world, 12)
    yield "moe router in it, in a graph", 0.0, partial(graph_replays, world, ROUTED)
    yield "moe router in it, one kernel", 0.0, partial(kernels_beyond_one, world)
