"""The GPU checks of dispatch and combine without the layer, which gpu_main.py runs: each check is a name, a bound and a
function.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_dispatch_combine import expected_combine, noticed, one_by_one, trained
from tests.emulated.cases_dispatch_combine import two_under_way as two_with_gradients
from tests.emulated.cases_moe import Model, at_random, in_turn, some_nowhere, to_few
from tests.gpu.gpu_moe import BF, routed
from tests.gpu.gpu_moe_training import replayed
from weft import moe
from weft.ops.moe.call import Layer

LAYOUTS: tuple[dict[str, Any], ...] = (
    dict(layout="contiguous"), dict(layout="contiguous", expert_alignment=128), dict(layout="masked")
)  # fmt: skip


def scaled(world: weft.World, layer: Layer, rows: torch.Tensor, handle: moe.Handle) -> torch.Tensor:
    """Return rows times 2^(expert mod 5), as the cases' experts compute them, without using the host."""
    flat, local = rows.view(-1, rows.shape[-1]), layer.experts // world.size
    row = torch.arange(flat.shape[0], device=rows.device, dtype=torch.int32)
    expert = torch.searchsorted(handle.offsets[1:], row, right=True).clamp(max=local - 1)
    scale = torch.exp2(((expert + world.rank * local) % 5).float()).to(rows.dtype)
    return (flat * scale[:, None]).view(rows.shape)


def through(world: weft.World, layer: Layer, inputs: tuple, **options: Any) -> torch.Tensor:
    rows, handle = moe.dispatch(*inputs, experts=layer.experts, world=world, **options)
    return moe.combine(scaled(world, layer, rows, handle), handle, shared=inputs[0])


def once(world: weft.World) -> torch.Tensor:
    layer = Layer(64, 8 * world.size, 4, 512, 8, BF)
    return through(world, layer, routed(world, layer, 64, 0))


def against(world: weft.World, tokens: list[int], ids_of: Callable, options: dict[str, Any]) -> float:
    """Make calls without a synchronisation between them; the reference runs on the host."""
    layer, kept = Layer(0, 8 * world.size, 4, 512, 8, BF), []
    for call in range(4):
        counts = [tokens[(r + call) % len(tokens)] for r in range(world.size)]
        inputs = routed(world, layer, counts[world.rank], call, ids_of)
        x, ids, weights = (t.cpu() for t in inputs)
        kept.append(
            (
                through(world, layer, inputs, rows=counts, **options),
                expected_combine(x, ids, weights, x, layer.experts, world.size),
            )
        )
    world.synchronize()
    return max((distance(actual.cpu(), expected.float()) for actual, expected in kept if actual.numel()), default=0.0)


def as_the_layer(world: weft.World, options: dict[str, Any]) -> float:
    """Compare with a layer whose experts scale their rows by the same factors: the experts' matrices are multiples of
    the identity, and for large x the GELU of x is x."""
    layer = Layer(200, 4 * world.size, 4, 256, 256, BF, "gelu")
    x, ids, weights = routed(world, layer, 200, 3)
    x = (x.abs() + 16).to(BF)
    one = torch.eye(256, dtype=BF, device=world.device)
    first_expert = 4 * world.rank
    w2 = torch.stack([one * 2.0 ** (e % 5) for e in range(first_expert, first_expert + 4)])
    expected = moe.moe(
        x, ids, weights, one.repeat(4, 1, 1), w2, shared=x, activation="gelu", world=world, plan="dispatched"
    )
    return float((through(world, layer, (x, ids, weights), **options) != expected).sum())


def two_under_way(world: weft.World, options: dict[str, Any], count: int = 20) -> float:
    """Run two microbatches on two streams, with random late ranks and streams: the bits must equal those of successive
    calls."""
    layer = Layer(300, 8 * world.size, 4, 512, 8, BF)
    inputs = [routed(world, layer, 300, call, ids_of) for call, ids_of in enumerate((at_random, to_few, some_nowhere))]
    expected = [through(world, layer, g, **options).clone() for g in inputs]
    streams, rng = [torch.cuda.Stream() for _ in range(2)], random.Random(world.rank)
    wrong = torch.zeros(2, device=world.device, dtype=torch.int64)
    world.synchronize()

    def late() -> None:
        if rng.random() < 0.3:
            torch.cuda._sleep(rng.randrange(1000, 1000000))

    for i in range(count):
        on_way = []
        for j, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                late()
                on_way.append(moe.dispatch(*inputs[(i + j) % 3], experts=layer.experts, world=world, **options))
        for j, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                late()
                rows, handle = on_way[j]
                y = moe.combine(scaled(world, layer, rows, handle), handle, shared=inputs[(i + j) % 3][0])
                wrong[j] += (y != expected[(i + j) % 3]).any()
    world.synchronize()
    return float(wrong.sum())


def graph_replays(world: weft.World, options: dict[str, Any]) -> float:
    """Replay a CUDA graph of two microbatches, with new tokens and routings each time; the bits must equal those of
    eager calls."""
    layer = Layer(256, 16 * world.size, 4, 512, 8, BF)
    held = [routed(world, layer, 256, call) for call in range(2)]

    def both_microbatches() -> list[torch.Tensor]:
        on_way = [moe.dispatch(*g, experts=layer.experts, world=world, **options) for g in held]
        return [
            moe.combine(scaled(world, layer, *dispatched), dispatched[1], shared=g[0])
            for dispatched, g in zip(on_way, held, strict=True)
        ]

    both_microbatches()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = both_microbatches()
    wrong = 0
    for call in range(1, 6):
        fresh = [routed(world, layer, 256, 2 * call + j, in_turn) for j in range(2)]
        expected = [through(world, layer, g, **options).clone() for g in fresh]
        for old, new in zip(held, fresh, strict=True):
            for a, b in zip(old, new, strict=True):
                a.copy_(b)
        graph.replay()
        torch.cuda.synchronize()
        wrong += sum(not torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    return float(wrong)


def many_calls(world: weft.World, count: int) -> float:
    """Alternate between layouts and routings, with random late ranks: the bits must be the same every time."""
    layer = Layer(300, 8 * world.size, 4, 512, 8, BF)
    inputs = [routed(world, layer, 300, call, ids_of) for call, ids_of in enumerate((at_random, to_few, some_nowhere))]
    expected = [[through(world, layer, g, **options).clone() for options in LAYOUTS] for g in inputs]
    rng = random.Random(world.rank)
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for i in range(count):
        if rng.random() < 0.1:
            torch.cuda._sleep(rng.randrange(1000, 400000))
        wrong += (through(world, layer, inputs[i % 3], **LAYOUTS[i // 3 % 3]) != expected[i % 3][i // 3 % 3]).any()
    world.synchronize()
    return float(wrong)


def grouped_gemm(world: weft.World, alignment: int) -> float:
    layer = Layer(300, 8 * world.size, 4, 512, 256, BF, "gelu")
    model, inputs = Model(world, layer, False), routed(world, layer, 300, 1)
    rows, handle = moe.dispatch(*inputs, experts=layer.experts, world=world, expert_alignment=alignment)
    ends, w = handle.offsets[1:], model.local_weights
    hidden = torch.nn.functional.gelu(torch._grouped_mm(rows, w.w13.transpose(1, 2), offs=ends))
    y = moe.combine(torch._grouped_mm(hidden, w.w2.transpose(1, 2), offs=ends), handle)
    return distance(y.cpu(), model(*(t.cpu() for t in inputs)))


def dropped(world: weft.World) -> float:
    """Send all routes to one expert on rank 0, which drops the routes after the first max_m. The dropped routes are
    reported once, on rank 0 and on the ranks of the dropped tokens, after the sums of these ranks."""
    layer = Layer(64, world.size, 1, 256, 8, BF)
    x, ids, weights = routed(world, layer, 64, 0)
    rows, handle = moe.dispatch(x, ids.zero_(), weights, experts=layer.experts, world=world, layout="masked", max_m=40)
    reported = [noticed(world)]
    y = moe.combine(rows, handle)
    reported.append(noticed(world))
    kept = 40 if world.rank == 0 else 0
    return (
        float(reported != ([{}, {0: 64}] if world.rank else [{0: 64 * world.size - 40}, {}]))
        + distance(y[:kept], x[:kept].float() * weights[:kept])
        + float(y[kept:].abs().sum())
    )


def experts(world: weft.World) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(
        draw(i + world.rank, 4, *shape).to(world.device) * 0.1 for i, shape in ((1, (512, 256)), (50, (256, 512)))
    )  # type: ignore[return-value]


def compiled(world: weft.World, options: dict[str, Any]) -> float:
    """Compare two pending microbatches with successive calls, with gradients, in eager mode and in one graph compiled
    by Inductor."""
    layer, (w1, w2) = Layer(256, 4 * world.size, 4, 512, 8, BF), experts(world)
    inputs, errors = routed(world, layer, 256, 0), []
    expected = trained(world, one_by_one, inputs, w1, w2, **options)
    for step in (two_with_gradients, torch.compile(two_with_gradients, fullgraph=True)):
        for _ in range(2):
            actual = trained(world, step, inputs, w1, w2, **options)
            errors += [distance(a.float(), b.float()) for a, b in zip(actual, expected, strict=True)]
    world.synchronize()
    return max(errors)


def training_in_a_graph(world: weft.World) -> float:
    """Capture the forward and backward passes of two microbatches in a CUDA graph, and replay it with new routes: the
    bits must equal those of eager calls."""
    layer, (w1, w2) = Layer(256, 4 * world.size, 4, 512, 8, BF), experts(world)

    def step(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return trained(world, two_with_gradients, inputs, w1, w2)  # type: ignore[arg-type]

    pairs = replayed(step, lambda call: routed(world, layer, 256, call))
    return float(sum(not torch.equal(a, b) for pairs_of_call in pairs for a, b in pairs_of_call))


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    for options in LAYOUTS:
        name = f"moe exchange, {', '.join(map(str, options.values()))}"
        yield f"{name}, uneven and none", 5e-3, partial(against, world, [300, 0, 1, 37], at_random, options)
        yield f"{name}, to few", 5e-3, partial(against, world, [200], to_few, options)
        yield f"{name}, some nowhere", 5e-3, partial(against, world, [150], some_nowhere, options)
        yield f"{name}, bits of the layer", 0.0, partial(as_the_layer, world, options)
        yield f"{name}, two under way", 0.0, partial(two_under_way, world, options)
        yield f"{name}, in a graph", 0.0, partial(graph_replays, world, options)
    for alignment in (1, 128):
        yield f"moe exchange, torch's grouped GEMM, {alignment}", 1.2e-2, partial(grouped_gemm, world, alignment)
    for options in (*LAYOUTS[:2], dict(plan="sequential")):
        yield f"moe exchange, compiled with gradients, {options}", 1e-2, partial(compiled, world, options)
    yield "moe exchange, training in a graph", 0.0, partial(training_in_a_graph, world)
    yield "moe exchange, dropped routes", 5e-3, partial(dropped, world)
    yield "moe exchange, 300 calls, delays", 0.0, partial(many_calls, world, 300)
