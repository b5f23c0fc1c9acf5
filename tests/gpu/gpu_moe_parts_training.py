"""The GPU checks of the gradients of layers whose experts are split by columns over ranks; gpu_main.py runs them.
`checks` yields a name, a bound and a function for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_moe import (
    Model,
    gradients,
    in_turn,
    routed,
    some_nowhere,
    training_case,
)
from tests.emulated.cases_tensor_parallel import both_halves
from tests.gpu.gpu_moe import BF, BOUND
from tests.gpu.gpu_moe_training import replayed
from weft import moe
from weft.ops.moe.call import Layer


def against(world: weft.World, plan: str, layer: Layer, tokens: list[int], biases: bool = False) -> float:
    """Make calls that save different tensors, without synchronising between them; the reference runs on the host."""
    sizes = dict(
        experts=layer.experts,
        k=layer.k,
        hidden=layer.hidden,
        inner=layer.inner // world.size,
        activation=layer.activation,
    )
    errors = training_case(
        world,
        both_halves,
        tokens=tokens,
        biases=biases,
        ids_of=some_nowhere,
        plan=plan,
        dtype=layer.dtype,
        tp_size=world.size,
        **sizes,
    )
    return max(errors.values())


def graph_replays(world: weft.World, plan: str, keep: str) -> float:
    """Capture the forward and backward passes in a CUDA graph, and replay it with new tokens and routings. The bits
    must equal those of eager calls; results of a plan that uses cuBLAS may differ by rounding."""
    layer = Layer(256, 16, 4, 512, 128 * world.size, BF)
    model = Model(world, layer, False, tp_size=world.size)
    w13, w2 = (t.requires_grad_() for t in model.local_weights[:2])
    common = dict(world=world, plan=plan)

    def drawn(call: int) -> list[torch.Tensor]:
        x, ids, weights, _, dy = routed(call, world.rank, 256, layer, world.size, in_turn)
        return [t.to(world.device) for t in (x, ids, weights, dy)]

    def step(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        hidden, routes = weft.all_gather_grouped_matmul(x, ids, weights, w13, inner=model.inner, keep=keep, **common)
        y = weft.grouped_matmul_reduce_scatter(hidden, routes, ids, w2, **common)
        return y.detach(), *torch.autograd.grad(y, (x, weights, w13, w2), dy)

    pairs = [pair for replay in replayed(step, drawn) for pair in replay]
    if plan == "dispatched":
        return float(sum(not torch.equal(a, b) for a, b in pairs))
    return max(distance(a, b) if b.any() else float(a.any()) for a, b in pairs)


def same_bits(world: weft.World) -> float:
    """Repeat one call for every choice of saved tensors while random ranks start late."""
    layer = Layer(300, 16, 4, 512, 128 * world.size, BF)
    model = Model(world, layer, True, tp_size=world.size)
    inputs = routed(0, world.rank, 300, layer, world.size, some_nowhere)
    first_call: list[torch.Tensor] = []
    wrong = 0
    for call in range(12):
        if (call + world.rank) % 3 == 0:
            torch.cuda._sleep(300000)
        y, grads = gradients(world, both_halves, model, inputs, keep=moe.KEEPS[call % 3])
        this_call = [y, *(t for t in grads.values() if t is not None)]
        first_call = first_call or this_call
        wrong += sum(not torch.equal(a, b) for a, b in zip(first_call, this_call, strict=True))
    world.synchronize()
    return float(wrong)


def module_compiled(world: weft.World) -> float:
    """Compare a step of the module, compiled as a whole, with an eager step, and compare the router's gradient with
    that of whole experts."""
    h, i, e = 256, 64 * world.size, 4 * world.size
    state = {"gate.weight": draw(1, e, h) * 0.2, "experts.gate_up_proj": draw(2, e, 2 * i, h) * 0.1}
    state["experts.down_proj"] = draw(3, e, h, i) * 0.1
    x = draw(4 + world.rank, 333, h).to(world.device)

    def step(layer: moe.MoE, fn: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        layer.zero_grad()
        fn(x).float().square().mean().backward()
        return [p.grad.clone() for p in (layer.router, layer.w13, layer.w2) if p.grad is not None]

    layers = [moe.MoE(h, i, e, 2, world=world, parallel=parallel) for parallel in ("tensor", "expert")]
    for layer in layers:
        layer.load_experts(state)
        layer.requires_grad_()
    parts, whole = layers
    expected, actual = step(parts, parts), step(parts, torch.compile(parts, fullgraph=True))
    errors = [distance(a, b) for a, b in zip(actual, expected, strict=True)]
    return max(*errors, distance(expected[0], step(whole, whole)[0]))


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    common = dict(max_tokens_per_rank=300, experts=8, k=3, hidden=256, inner=64 * world.size, dtype=BF)
    plain = Layer(**common)  # type: ignore[arg-type]
    odd = Layer(**(common | dict(hidden=264, inner=72 * world.size, activation="gelu")))  # type: ignore[arg-type]
    clamped = Layer(**(common | dict(activation="gpt_oss", dtype=torch.float16)))  # type: ignore[arg-type]
    yield "moe parts gradients, dispatched", BOUND, partial(against, world, "dispatched", plain, [300, 0, 1, 37])
    yield "moe parts gradients in a graph, rows", 0.0, partial(graph_replays, world, "dispatched", "rows")
    yield "moe parts gradients, the same bits", 0.0, partial(same_bits, world)
    yield "moe parts gradients, compiled", 1e-2, partial(module_compiled, world)
    yield "moe parts gradients, dispatched, gpt_oss", BOUND, partial(against, world, "dispatched", clamped, [100], True)
    yield (
        "moe parts gradients, dispatched, gelu, odd sizes",
        BOUND,
        partial(against, world, "dispatched", odd, [100], True),
    )
    yield "moe parts gradients, sequential", BOUND, partial(against, world, "sequential", plain, [300, 0, 1, 37])
    yield (
        "moe parts gradients, sequential, gelu, odd sizes",
        BOUND,
        partial(against, world, "sequential", odd, [100], True),
    )
    # cuBLAS rounds before a bias is added, as in gpu_moe_training.py.
    yield "moe parts gradients, sequential, gpt_oss", BOUND, partial(against, world, "sequential", clamped, [100])
    yield "moe parts gradients in a graph, sequential", 1e-2, partial(graph_replays, world, "sequential", "rows")
    for keep in ("activation", "nothing"):
        yield f"moe parts gradients in a graph, {keep}", 0.0, partial(graph_replays, world, "dispatched", keep)
