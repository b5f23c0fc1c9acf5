"""Every operator runs first in inference mode, as in an evaluation before training, and then in training. The training
calls must be able to use the memory that a World allocated in inference mode.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

import weft
from weft import World, moe
from weft.backends.base import Backend
from weft.op import REGISTRY
from weft.ops.rotary import rotary

BF16 = torch.bfloat16
Call = Callable[[World, bool], Any]  # its arguments are the World, and whether gradients are needed


def operand(world: World, *shape: int, gradient: bool = False, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(world.device, BF16).requires_grad_(gradient)


def width(world: World) -> int:
    """Return the number of columns of all operands, which is larger on GPUs."""
    return 16 if world.device.type == "cpu" else 256


def routes(world: World, gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of six tokens, two of the 2 W experts for each token, and their weights."""
    ids = torch.arange(12, device=world.device).view(6, 2).int() % (2 * world.size)
    return ids, torch.full((6, 2), 0.5, device=world.device).requires_grad_(gradient)


def gemm(op: str, plan: str) -> Call:
    def call(world: World, gradient: bool) -> Any:
        rows, k = 8 if op == "all_gather_matmul" else 8 * world.size, width(world)
        x, weight = operand(world, rows, k, gradient=gradient), operand(world, k, k, gradient=gradient, seed=1)
        return getattr(weft, op)(x, weight, world=world, plan=plan)

    return call


def exchange(plan: str, layout: str = "masked") -> Call:
    def call(world: World, gradient: bool) -> Any:
        ids, weights = routes(world, gradient)
        x, experts = operand(world, 6, width(world), gradient=gradient), 2 * world.size
        rows, handle = moe.dispatch(x, ids, weights, experts=experts, world=world, plan=plan, layout=layout)
        return moe.combine(rows * 1, handle)

    return call


def layer(plan: str) -> Call:
    def call(world: World, gradient: bool) -> Any:
        h, gradient = width(world), gradient and plan in ("sequential", "dispatched")
        w13 = moe.pack(operand(world, 2, 2 * h, h), world=world).requires_grad_(gradient)
        x, w2 = operand(world, 6, h, gradient=gradient), operand(world, 2, h, h, gradient=gradient)
        return moe.moe(x, *routes(world, gradient), w13, w2, world=world, plan=plan)

    return call


def halves(plan: str) -> Call:
    def call(world: World, gradient: bool) -> Any:
        (ids, weights), h, experts = routes(world, gradient), width(world), 2 * world.size
        w13 = moe.pack(operand(world, experts, 2 * h, h), world=world).requires_grad_(gradient)
        x, w2 = operand(world, 6, h, gradient=gradient), operand(world, experts, h, h, gradient=gradient)
        hidden, route = weft.all_gather_grouped_matmul(x, ids, weights, w13, inner=h, world=world, plan=plan)
        return weft.grouped_matmul_reduce_scatter(hidden, route, ids, w2, world=world, plan=plan)

    return call


def sum_of(plan: str) -> Call:
    return lambda world, gradient: weft.all_reduce(operand(world, 8, width(world)), world=world, plan=plan)


def normed_sum(plan: str) -> Call:
    def call(world: World, gradient: bool) -> Any:
        x, weight = operand(world, 8, width(world)), operand(world, width(world))
        return weft.all_reduce_rms_norm(x, None, weight, 1e-6, world=world, plan=plan)

    return call


def attention(plan: str) -> Call:
    def call(world: World, gradient: bool) -> Any:
        d = 16 if world.device.type == "cpu" else 64
        q, k, v = (operand(world, 8, 2 * world.size, d, gradient=gradient, seed=seed) for seed in range(3))
        return weft.gathered_attention(q, k, v, causal=True, world=world, plan=plan)

    return call


def sent(plan: str) -> Call:
    def call(world: World, gradient: bool) -> Any:
        x, weight = operand(world, 8, width(world)), operand(world, width(world), width(world))
        destinations = [i % world.size for i in range(8)]
        return weft.matmul_all_to_all(x, weight, destinations=destinations, world=world, plan=plan)

    return call


def routed(plan: str) -> Call:
    def call(world: World, gradient: bool) -> Any:
        k = width(world)
        x, weight = operand(world, 8, k, gradient=gradient), operand(world, k, k, gradient=gradient)
        destinations = torch.arange(8, device=world.device).int() % world.size
        return weft.matmul_all_to_all_routed(x, weight, destinations=destinations, world=world, plan=plan)[0]

    return call


def rotated(world: World, gradient: bool) -> Any:
    qkv, cos, sin = operand(world, 4, 48), operand(world, 4, 8), operand(world, 4, 8)
    return rotary(qkv, cos, sin, heads=2, kv_heads=2, world=world)


def placed(world: World, gradient: bool) -> Any:
    table = torch.arange(4, device=world.device).int()
    return moe.expert_placement(routes(world)[0], table, world=world)


# For each op of the registry, one call for every kind of plan.
BY_PLAN: dict[str, tuple[Callable[[str], Call], tuple[str, ...]]] = {
    "all_gather_matmul": (lambda plan: gemm("all_gather_matmul", plan), ("decomposed", "fused", "one_shot")),
    "matmul_reduce_scatter": (
        lambda plan: gemm("matmul_reduce_scatter", plan),
        ("decomposed", "fused", "one_shot", "signaled"),
    ),
    "matmul_all_reduce": (
        lambda plan: gemm("matmul_all_reduce", plan),
        ("decomposed", "fused", "one_shot", "two_shot", "signaled"),
    ),
    "all_reduce": (sum_of, ("decomposed", "one_shot", "two_shot")),
    "all_reduce_rms_norm": (normed_sum, ("decomposed", "one_shot", "two_shot")),
    "gathered_attention": (attention, ("segmented", "head_parallel")),
    "matmul_all_to_all": (sent, ("signaled",)),
    "matmul_all_to_all_routed": (routed, ("fused",)),
    "moe_dispatch": (exchange, ("dispatched",)),
    "moe_combine": (lambda plan: exchange(plan, "contiguous"), ()),  # its call runs `dispatch` first
    "moe": (layer, ("dispatched", "fused", "low_latency")),
    "all_gather_grouped_matmul": (halves, ("dispatched",)),
    "grouped_matmul_reduce_scatter": (halves, ()),  # the same call runs the first half too
}
LOCAL: dict[str, Call] = {
    "quantize": lambda world, gradient: weft.quantize(operand(world, 8, 128), "block", world=world),
    "silu_mul": lambda world, gradient: weft.silu_mul(operand(world, 6, 32, gradient=gradient), world=world),
    "matmul": lambda world, gradient: weft.matmul(operand(world, 8, 16), operand(world, 16, 16), world=world),
    "rotary": rotated,
    "moe_gate": lambda world, gradient: moe.gate(operand(world, 6, 8, gradient=gradient), 2, world=world)[1],
    "moe_capacity": lambda world, gradient: moe.apply_capacity(*routes(world), 4, 1.0, world=world),
    "moe_placement": placed,
    "moe_balance_loss": lambda world, gradient: moe.load_balancing_loss(
        operand(world, 6, 4, gradient=gradient), routes(world)[0], world=world
    ),
    "moe_z_loss": lambda world, gradient: moe.z_loss(operand(world, 6, 4, gradient=gradient), world=world),
}
SEQUENTIAL = {op: make("sequential") for op, (make, _) in BY_PLAN.items()} | LOCAL
PLANS = {f"{op} {plan}": make(plan) for op, (make, plans) in BY_PLAN.items() for plan in plans}
OPS = {name for name, op in REGISTRY.items() if type(op).__module__.startswith("weft.ops.")}
assert SEQUENTIAL.keys() == OPS, "every operator has a case"


def is_of_machine(thing: object) -> bool:
    """Return whether the object belongs to the code or the machine, and not to a World."""
    of_code = isinstance(thing, (type, types.ModuleType, types.FrameType, Backend))
    return of_code or type(thing).__module__.startswith(("weft.emulator", "greenlet"))


def kept_in_inference_mode(world: World) -> list[tuple[int, ...]]:
    """Return the shapes of the inference tensors that the World keeps alive."""
    shapes, seen, queue = [], set[int](), [world]
    while queue:
        thing: Any = queue.pop()
        if id(thing) in seen or is_of_machine(thing):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            shapes += [tuple(thing.shape)] if thing.is_inference() else []
        elif isinstance(thing, types.FunctionType):
            queue += thing.__closure__ or ()
        else:
            queue += gc.get_referents(thing)
    return shapes


def inference_then_training(world: World, call: Call) -> float:
    """Return infinity if the World kept an inference tensor alive, and otherwise 0. A later call raises an error if it
    cannot use the memory of the first call."""
    with torch.inference_mode():
        call(world, False)
        world.synchronize()
    kept = kept_in_inference_mode(world)
    results = call(world, True)
    result = results[0] if isinstance(results, tuple) else results
    if result.requires_grad:
        result.float().sum().backward()
    world.synchronize()
    return float("inf") if kept else 0.0


def inference_cases(world: World, calls: dict[str, Call]) -> Iterator[tuple[str, float, Callable[[], float]]]:
    for name, call in calls.items():
        yield f"{name}, first in inference mode", 0.0, lambda call=call: inference_then_training(world, call)  # type: ignore[misc]
