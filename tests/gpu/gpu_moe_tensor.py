"""The GPU checks of layers whose experts are split by columns over ranks; gpu_main.py runs them. `checks` yields a
name, a bound and a function for each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_moe import Ids, Model, at_random, in_turn, nowhere, some_nowhere, to_few
from tests.emulated.cases_tensor_parallel import both_halves, operands_of
from weft import moe
from weft.ops.moe.call import Layer
from weft.plans import DispatchedColumns, GemmTile, Plan

BOUND = 1.2e-2
BF = torch.bfloat16


def device_operands(
    world: weft.World, layer: Layer, tokens: int, call: int, ids_of: Ids = at_random
) -> list[torch.Tensor]:
    return [t.to(world.device) for t in operands_of(layer, world, tokens, call, ids_of)]


def run(
    world: weft.World, model: Model, operands: Sequence[torch.Tensor], plan: str | Plan,
    shared: torch.Tensor | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Call both halves."""
    x, ids, weights = operands
    tensors = dict(x=x, weights=weights, shared=shared, **model.local_weights._asdict())
    return both_halves(world, model, ids, tensors, plan=plan, **options)


def against(
    world: weft.World,
    plan: str | Plan,
    layer: Layer,
    tokens: list[int],
    ids_of: Ids = at_random,
    biases: bool = False,
    tp_size: int | None = None,
    second: str | None = None,
) -> float:
    """Make calls without a synchronisation between them; the reference runs on the host."""
    model, kept = Model(world, layer, biases, tp_size=tp_size or world.size), []
    for call in range(4):
        counts = [tokens[(r + call) % len(tokens)] for r in range(world.size)]
        inputs = device_operands(world, layer, counts[world.rank], call, ids_of)
        shared = draw(77, *inputs[0].shape).to(world.device, layer.dtype) if call % 2 else None
        actual = run(world, model, inputs, plan, rows=counts, shared=shared, second=second)
        expected = model(*(t.cpu() for t in inputs))
        kept.append((actual, expected if shared is None else expected + shared.float().cpu()))
    world.synchronize()
    return max((distance(actual.cpu(), expected) for actual, expected in kept if actual.numel()), default=0.0)


def graph_replays(world: weft.World, plan: str | Plan) -> float:
    """Replay a CUDA graph with new tokens and routings each time, and compare it with eager calls: the dispatched plan
    must give the same bits."""
    layer = Layer(256, 16, 4, 512, 128 * world.size, BF)
    model = Model(world, layer, False, tp_size=world.size)
    held = device_operands(world, layer, 256, 0)
    run(world, model, held, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(world, model, held, plan)
    worst = 0.0
    for call in range(1, 7):
        fresh = device_operands(world, layer, 256, call, in_turn)
        expected = run(world, model, fresh, plan).clone()
        for t, new in zip(held, fresh, strict=True):
            t.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        worst = max(worst, float(not torch.equal(out, expected)) if plan != "sequential" else distance(out, expected))
    return worst


def many_calls(world: weft.World, count: int) -> float:
    """Alternate between routings, with random late ranks, and sometimes run only a first half: the bits must be the
    same every time."""
    layer = Layer(300, 16, 4, 512, 128 * world.size, BF)
    model = Model(world, layer, False, tp_size=world.size)
    kinds = (at_random, to_few, some_nowhere, nowhere)
    inputs = [device_operands(world, layer, 300, call, ids_of) for call, ids_of in enumerate(kinds)]
    expected = [run(world, model, g, "dispatched").clone() for g in inputs]
    rng, same = random.Random(world.rank), random.Random(99)
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for i in range(count):
        if rng.random() < 0.1:
            torch.cuda._sleep(rng.randrange(1000, 400000))
        if same.random() < 0.2:
            weft.all_gather_grouped_matmul(
                *inputs[(i + 1) % 4], model.local_weights.w13, inner=model.inner, world=world
            )
        wrong += (run(world, model, inputs[i % 4], "dispatched") != expected[i % 4]).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def module_case(world: weft.World) -> float:
    """Check that `MoE` gives the same layer with split columns and with split experts."""
    e, h, i, k = 4 * world.size, 256, 128 * world.size, 2
    state = {"gate.weight": draw(1, e, h), "experts.gate_up_proj": draw(2, e, 2 * i, h) * 0.1}
    state["experts.down_proj"] = draw(3, e, h, i) * 0.1
    x, results = draw(5 + world.rank, 200, h).to(world.device), []
    for parallel in ("tensor", "expert"):
        layer = moe.MoE(h, i, e, k, world=world, parallel=parallel)
        layer.load_experts(state)
        with torch.no_grad():
            results.append(layer(x).float())
    world.synchronize()
    return distance(*results)


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    size = world.size
    common = dict(max_tokens_per_rank=0, experts=16, k=4, hidden=512, inner=128 * size, dtype=BF)

    def layer(**changes: object) -> Layer:
        return Layer(**(common | changes))  # type: ignore[arg-type]

    for plan in ("sequential", "dispatched"):
        case = partial(against, world, plan)
        name = f"moe in parts {plan}"
        yield f"{name}, even", BOUND, partial(case, layer(max_tokens_per_rank=384), [384])
        yield f"{name}, uneven and none", BOUND, partial(case, layer(max_tokens_per_rank=300), [300, 0, 1, 37])
        yield f"{name}, to few", BOUND, partial(case, layer(max_tokens_per_rank=200), [200], to_few)
        yield f"{name}, some nowhere", BOUND, partial(case, layer(max_tokens_per_rank=150), [150], some_nowhere)
        yield f"{name}, float16", BOUND, partial(case, layer(max_tokens_per_rank=90, dtype=torch.float16), [90, 33])
        for act in ("gelu", "gpt_oss"):
            biased = layer(max_tokens_per_rank=100, activation=act, hidden=720, inner=72 * size)
            yield f"{name}, {act}, biases", BOUND, partial(case, biased, [100], at_random, True)
        yield (
            f"moe in parts in a graph, {plan}",
            0.0 if plan == "dispatched" else 1e-2,
            partial(graph_replays, world, plan),
        )
    narrow = partial(against, world, DispatchedColumns(flatten=False, tile=GemmTile(stages=4, block_n=128)))
    yield "moe in parts dispatched, 128 columns a tile", BOUND, partial(narrow, layer(max_tokens_per_rank=260), [260])
    both_halves_case = partial(against, world, "dispatched", layer(max_tokens_per_rank=130), [130, 20])
    yield "moe in parts, one half of each plan", BOUND, partial(both_halves_case, second="sequential")
    if size > 2:
        yield "moe in parts, mixed", BOUND, partial(both_halves_case, tp_size=size // 2)
    yield "moe in parts, a module", BOUND, partial(module_case, world)
    yield "moe in parts 300 calls, delays", 0.0, partial(many_calls, world, 300)
