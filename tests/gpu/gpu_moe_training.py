"""The GPU checks of the MoE layer's gradients; gpu_main.py runs them. `checks` yields a name, a bound and a function
for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_dispatch_combine import exchanged
from tests.emulated.cases_expert_parallel import whole_experts
from tests.emulated.cases_moe import (
    Model,
    at_random,
    gradients,
    in_turn,
    routed,
    some_nowhere,
    training_case,
)
from tests.gpu.gpu_moe import BF, BOUND
from weft import moe
from weft.ops.moe.call import Layer


def against(world: weft.World, plan: str, layer: Layer, tokens: list[int], biases: bool = False) -> float:
    """Make calls that save different tensors, without synchronising between them; the reference runs on the host."""
    sizes = dict(experts=layer.experts, k=layer.k, hidden=layer.hidden, inner=layer.inner, activation=layer.activation)
    errors = training_case(
        world, whole_experts, tokens=tokens, biases=biases, ids_of=some_nowhere, plan=plan, dtype=layer.dtype, **sizes
    )
    return max(errors.values())


def replayed(
    step: Callable[..., Sequence[torch.Tensor]], drawn: Callable[[int], Sequence[torch.Tensor]]
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Compare a captured step with an eager step. The captured step is replayed several times, each time with the
    operands that `drawn` returns for that call."""
    held, stream = drawn(0), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step(*held)
    for call in range(1, 5):
        fresh = drawn(call)
        expected = [t.clone() for t in step(*fresh)]
        for t, new in zip(held, fresh, strict=True):
            t.copy_(new)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        yield [(a.clone(), b) for a, b in zip(out, expected, strict=True)]


def graph_replays(world: weft.World, keep: str) -> float:
    """Capture the forward and backward passes in a CUDA graph, and replay it with new tokens and routings: the bits
    must equal those of eager calls."""
    layer = Layer(256, 16, 4, 512, 256, BF)
    model = Model(world, layer, False)
    w13, w2 = (t.requires_grad_() for t in model.local_weights[:2])

    def drawn(call: int) -> list[torch.Tensor]:
        x, ids, weights, _, dy = routed(call, world.rank, 256, layer, world.size, in_turn)
        return [t.to(world.device) for t in (x, ids, weights, dy)]

    def step(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        y = moe.moe(x, ids, weights, w13, w2, world=world, keep=keep, plan="dispatched")
        return y.detach(), *torch.autograd.grad(y, (x, weights, w13, w2), dy)

    return float(sum(not torch.equal(a, b) for pairs in replayed(step, drawn) for a, b in pairs))


def same_bits(world: weft.World) -> float:
    """Repeat one call for every choice of saved tensors while random ranks start late."""
    layer = Layer(300, 16, 4, 512, 256, BF)
    model = Model(world, layer, True)
    inputs = routed(0, world.rank, 300, layer, world.size, at_random)
    first_call: list[torch.Tensor] = []
    wrong = 0
    for call in range(12):
        if (call + world.rank) % 3 == 0:
            torch.cuda._sleep(300000)
        y, grads = gradients(world, whole_experts, model, inputs, plan="dispatched", keep=moe.KEEPS[call % 3])
        this_call = [y, *(t for t in grads.values() if t is not None)]
        first_call = first_call or this_call
        wrong += sum(not torch.equal(a, b) for a, b in zip(first_call, this_call, strict=True))
    world.synchronize()
    return float(wrong)


def gate_gradient(world: weft.World) -> float:
    wrong = 0.0
    for scoring in ("softmax", "softmax_after", "sigmoid"):
        logits = draw(3, 1000, 128, dtype=torch.float32).to(world.device).requires_grad_()
        ids, weights = moe.gate(logits, 8, world=world, scoring=scoring)
        dy = draw(4, 1000, 8, dtype=torch.float32).to(world.device)
        weights.backward(dy)
        wide = logits.detach().double().requires_grad_()
        scores = {"softmax": torch.softmax(wide, 1), "sigmoid": torch.sigmoid(wide)}.get(scoring, wide)
        expected = scores.gather(1, ids.long())
        expected = expected.softmax(1) if scoring == "softmax_after" else expected / expected.sum(1, keepdim=True)
        expected.backward(dy.double())
        wrong = max(wrong, distance(weights.detach(), expected.detach()), distance(logits.grad, wide.grad))  # type: ignore[arg-type]
    return wrong


def module_compiled(world: weft.World) -> float:
    """Compare a step of the module, compiled as a whole, with an eager step."""
    layer = moe.MoE(256, 128, 4 * world.size, 2, world=world)
    for i, p in enumerate((layer.router, layer.w13, layer.w2)):
        p.data.copy_(draw(i + 10 * world.rank * (i > 0), *p.shape) * 0.2)
    layer.requires_grad_()
    x = draw(world.rank, 333, 256).to(world.device)

    def step(fn: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        layer.zero_grad()
        fn(x).float().square().mean().backward()
        return [p.grad.clone() for p in layer.parameters()]  # type: ignore[union-attr]

    expected, actual = step(layer), step(torch.compile(layer, fullgraph=True))
    return max(distance(a, b) for a, b in zip(actual, expected, strict=True))


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    common = dict(max_tokens_per_rank=300, experts=4 * world.size, k=3, hidden=256, inner=128, dtype=BF)
    plain = Layer(**common)  # type: ignore[arg-type]
    odd = Layer(**(common | dict(hidden=264, inner=136, activation="gelu")))  # type: ignore[arg-type]
    clamped = Layer(**(common | dict(activation="gpt_oss", dtype=torch.float16)))  # type: ignore[arg-type]
    for plan in ("sequential", "dispatched"):
        yield f"moe gradients, {plan}", BOUND, partial(against, world, plan, plain, [300, 0, 1, 37])
        yield f"moe gradients, {plan}, gelu, odd sizes", BOUND, partial(against, world, plan, odd, [100], True)
        # cuBLAS rounds before a bias is added, so a clamp limits different elements from those in the reference.
        biases = plan == "dispatched"
        yield f"moe gradients, {plan}, gpt_oss", BOUND, partial(against, world, plan, clamped, [100], biases)
    for keep in moe.KEEPS:
        yield f"moe gradients in a graph, {keep}", 0.0, partial(graph_replays, world, keep)
    yield "moe gradients, the same bits", 0.0, partial(same_bits, world)
    yield "moe gradients, dispatch and combine", BOUND, partial(exchanged, world, ("x", "weights", "shared"))
    yield "moe gradients, the gate's", 1e-4, partial(gate_gradient, world)
    yield "moe gradients, compiled", 1e-2, partial(module_compiled, world)
