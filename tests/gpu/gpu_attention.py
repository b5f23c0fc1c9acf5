"""GPU checks of gathered attention; gpu_main.py runs them. `checks` yields a name, a bound and a function for each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

import weft
from tests.emulated.cases import distance
from tests.emulated.cases_attention import Inputs, Shape, attention_case, gradients_case
from weft.plans import HeadParallel, Plan, Segmented

BOUND = 8e-3  # 16-bit results: one pass has an error of about 3e-3, and a merge adds no more than that
GRADIENTS = 1.5e-2
PLANS: dict[str, str | Plan] = {
    "sequential": "sequential",
    "copies": Segmented(),
    "once": Segmented(calls=1),
    "heads": HeadParallel(),
}
MASKS = {"none": {}, "causal": dict(causal=True), "zigzag": dict(causal=True, layout="zigzag")}


def graph_replays(world: weft.World, shape: Shape, plan: str | Plan) -> float:
    """Replay a CUDA graph of two calls with different operands each time; the bits must equal those of eager calls."""
    held = Inputs(world, shape, 0).local_qkv()
    options = Inputs(world, shape, 0).options() | dict(plan=plan)

    def twice() -> torch.Tensor:
        return weft.gathered_attention(weft.gathered_attention(*held, **options), *held[1:], **options)

    twice()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = twice()
    wrong = 0
    for call in range(1, 6):
        for t, new in zip(held, Inputs(world, shape, 100 * call).local_qkv(), strict=True):
            t.copy_(new)
        expected = twice().clone()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        wrong += int(not torch.equal(out, expected))
    return float(wrong)


def many_calls(world: weft.World, shape: Shape, plan: str | Plan, count: int) -> float:
    """Alternate between three sets of operands, with random late ranks: the bits must be the same every time."""
    options = Inputs(world, shape, 0).options() | dict(plan=plan)
    operands = [Inputs(world, shape, 100 * i).local_qkv() for i in range(3)]
    expected = [weft.gathered_attention(*g, **options).clone() for g in operands]
    rng = random.Random(world.rank)
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for i in range(count):
        if rng.random() < 0.2:
            torch.cuda._sleep(rng.randrange(1000, 2000000))
        wrong += (weft.gathered_attention(*operands[i % 3], **options) != expected[i % 3]).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def long(world: weft.World, shape: Shape) -> float:
    """Compare the plans, including "auto", with each other at lengths for which a reference with all scores would need
    too much memory."""
    case = Inputs(world, shape, 0)
    operands, options = case.local_qkv(), case.options()
    expected = weft.gathered_attention(*operands, **options, plan="sequential").float()
    results = [weft.gathered_attention(*operands, **options, plan=plan) for plan in ("auto", *PLANS.values())]
    world.synchronize()
    return max(distance(actual.float(), expected) for actual in results)


def batched(world: weft.World, shape: Shape) -> float:
    """Compare a batch of three entries with three calls of one entry each."""
    cases = [Inputs(world, shape, 100 * i) for i in range(3)]
    options = cases[0].options()
    actual = weft.gathered_attention(
        *(torch.stack(ts) for ts in zip(*(g.local_qkv() for g in cases), strict=True)), **options
    )
    return max(distance(out.float(), g.expected()[0]) for out, g in zip(actual, cases, strict=True))


def with_other_ops(world: weft.World, shape: Shape) -> float:
    """Alternate, without synchronising, with calls of an op that stages rows in the same memory as attention."""
    x = torch.ones(512, 1024, device=world.device, dtype=torch.bfloat16)
    w = torch.full((256, 1024), 1 / 1024, device=world.device, dtype=torch.bfloat16)
    case = Inputs(world, shape, 0)
    operands, options = case.local_qkv(), case.options() | dict(plan=Segmented())
    expected = weft.gathered_attention(*operands, **options).clone()
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for _ in range(20):
        wrong += (weft.all_gather_matmul(x, w, world=world, plan="decomposed") != 1).any()
        wrong += (weft.gathered_attention(*operands, **options) != expected).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def compiled(world: weft.World, shape: Shape) -> float:
    """Compare calls under torch.compile(fullgraph=True), with gradients, with eager calls."""
    case, results = Inputs(world, shape, 0), []

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return weft.gathered_attention(2 * q, k, v, causal=True, layout="zigzag", world=world, plan="segmented")

    for fn in (layer, torch.compile(layer, fullgraph=True)):
        leaves = [t.requires_grad_() for t in case.local_qkv()]
        out = fn(*leaves)
        out.float().square().sum().backward()
        results.append([out.detach(), *(t.grad for t in leaves)])
    world.synchronize()
    return max(distance(a, b) for a, b in zip(*results, strict=True))


def trained_in_a_graph(world: weft.World, shape: Shape) -> float:
    """Capture the forward and backward passes, replay them with different operands, and compare them with eager calls.
    cuDNN and FlashAttention do not sum in a fixed order."""
    held, options = [t.requires_grad_() for t in Inputs(world, shape, 0).local_qkv()], Inputs(world, shape, 0).options()

    def trained() -> list[torch.Tensor]:
        out = weft.gathered_attention(*held, **options, plan="segmented")
        return [out.detach(), *torch.autograd.grad(out, held, torch.ones_like(out))]

    trained()
    graph, worst = torch.cuda.CUDAGraph(), 0.0
    with torch.cuda.graph(graph):
        captured_results = trained()
    for call in (1, 2):
        with torch.no_grad():
            for t, new in zip(held, Inputs(world, shape, 100 * call).local_qkv(), strict=True):
                t.copy_(new)
        expected = [t.clone() for t in trained()]
        graph.replay()
        world.synchronize()
        worst = max(worst, *map(distance, captured_results, expected))
    return worst


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    size = world.size
    mha, gqa = Shape((512,) * size, 8, 8, 64), Shape((320,) * size, 64, 8, 128)
    uneven = tuple([333, 70, 512, 0, 1, 128, 256, 65][:size])
    for name, plan in PLANS.items():
        for mask, options in MASKS.items():
            shape = replace(mha if mask == "causal" else gqa, **options)
            yield f"attention {name}, {mask}", BOUND, partial(attention_case, world, shape, plan, 3)
            rows = weft.zigzag_rows(sum(uneven), size) if mask == "zigzag" else uneven
            shape = replace(shape, rows=rows, heads=16, kv_heads=2, dtype=torch.float16)
            if mask != "causal":
                yield (
                    f"attention {name}, {mask}, uneven",
                    BOUND,
                    partial(attention_case, world, shape, plan, 2, into=True),
                )
    for name, shape in {
        "no queries on a rank": replace(gqa, queries=(100, 0, 320, 3)[:size]),
        "a prefix": replace(gqa, causal=True, queries=(0, 320, 3, 200)[:size]),
        "sinks": replace(gqa, causal=True, layout="zigzag", sinks=True),
        "a window": replace(gqa, causal=True, window=400),
        "packed": replace(gqa, causal=True, bounds=(0, 100, 101, 500, 320 * size)),
        "packed, no mask": replace(mha, bounds=(0, 512, 700, 512 * size)),
        "96 columns": replace(mha, dim=96),
        "few rows": Shape((1,) * size, 8, 8, 64, causal=True),
    }.items():
        for plan in ("sequential", "segmented", "head_parallel"):
            yield f"attention {plan}, {name}", BOUND, partial(attention_case, world, shape, plan, 2)
    zigzag = replace(gqa, causal=True, layout="zigzag")
    for name in ("copies", "heads"):
        yield f"attention {name}, in a graph", 0.0, partial(graph_replays, world, zigzag, PLANS[name])
        yield f"attention {name}, 100 calls, delays", 0.0, partial(many_calls, world, zigzag, PLANS[name], 100)
        yield f"attention {name}, no mask, 100 calls, delays", 0.0, partial(many_calls, world, mha, PLANS[name], 100)
    yield "attention sequential, in a graph", 0.0, partial(graph_replays, world, gqa, "sequential")
    yield "attention, long", BOUND, partial(long, world, Shape((4096,) * size, 16, 16, 128))
    yield "attention, long, zigzag", BOUND, partial(long, world, replace(zigzag, rows=(4096,) * size))
    yield "attention, a batch", BOUND, partial(batched, world, replace(zigzag, rows=(512,) * size))
    yield "attention compiled", GRADIENTS, partial(compiled, world, replace(zigzag, heads=8, kv_heads=2))
    yield "attention between other ops", 0.0, partial(with_other_ops, world, gqa)
    for mask, options in MASKS.items():
        for heads in (mha, gqa):
            shape = replace(heads, **options)
            yield f"attention gradients, {mask}, {shape.heads} heads", GRADIENTS, partial(gradients_case, world, shape)
    yield "attention gradients, in a graph", GRADIENTS, partial(trained_in_a_graph, world, zigzag)
    for name, options in dict(window=dict(window=400), packed=dict(bounds=(0, 100, 101, 500, 320 * size))).items():
        shape = replace(gqa, causal=True, **options)
        yield f"attention gradients, {name}", GRADIENTS, partial(gradients_case, world, shape)
    shape = replace(gqa, rows=weft.zigzag_rows(sum(uneven), size), causal=True, layout="zigzag", sinks=True)
    yield "attention gradients, uneven, sinks", GRADIENTS, partial(gradients_case, world, shape)
