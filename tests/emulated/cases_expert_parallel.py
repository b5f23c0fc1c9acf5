"""Layers of whole experts for `cases_moe.py`, called through `weft.moe.moe` or through the run of one plan; and layers
that drop rows because an expert is full. Each function runs on one rank.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import weft
from tests.emulated.cases import draw, on_stream
from tests.emulated.cases_dispatch_combine import noticed, overflows
from tests.emulated.cases_moe import Model, Tensors, at_random, gradients, routed
from weft import moe
from weft.ops.moe.call import Layer, MoeCall, MoeOperands
from weft.ops.moe.expert_parallel import dispatched, fused, low_latency
from weft.ops.moe.expert_parallel.op import MOE
from weft.plans import Dispatched, FusedMoe, LowLatency, Plan

MODULES: dict[type[Plan], Any] = {
    Dispatched: dispatched,
    FusedMoe: fused,
    LowLatency: low_latency,
}  # the function that runs each class of plans


def whole_experts(world: weft.World, model: Model, ids: torch.Tensor, t: Tensors, **options: Any) -> torch.Tensor:
    """Call `weft.moe.moe`."""
    y: torch.Tensor = moe.moe(
        t["x"], ids, t["weights"], t["w13"], t["w2"], b13=t["b13"], b2=t["b2"], shared=t["shared"],
        activation=model.layer.activation, world=world, **options,
    )  # fmt: skip
    return y


def steps(
    world: weft.World, model: Model, ids: torch.Tensor, t: Tensors, *, rows: list[int], plan: Plan
) -> torch.Tensor:
    """Call the run of a plan directly, without the code of the op around it. Each call writes its result to the same
    memory."""
    x, out = t["x"], t["out"]
    assert x is not None and out is not None and MODULES[type(plan)].unsupported(world, model.layer, plan) is None
    operands = MoeOperands(x, ids, t["weights"], *model.flat, shared=t["shared"])
    MOE.prepare(world, MoeCall(rows[world.rank], None, model.layer), plan)(operands, out)
    return out


def overfull_layers(world: weft.World, plan: str, calls: int = 6) -> None:
    """Call two layers on alternating streams without waiting for the hosts. In most calls one rank overflows; the rank
    changes from call to call. Every rank whose rows were dropped is notified of their number and of the full rank."""
    layer, size, counts = Layer(40, 2 * world.size, 1, 32, 24, torch.bfloat16), world.size, (40, 33, 25)[: world.size]
    expert_weights, reported, lost = Model(world, layer, False).local_weights[:2], Counter[int](), Counter[int]()
    x, weights = draw(world.rank, counts[world.rank], layer.hidden), torch.ones(counts[world.rank], 1)
    for call, expert in enumerate((0, 2, 1, -1, 3, 0)[:calls]):
        ids, max_rows = torch.full((len(x), 1), expert, dtype=torch.int32), (16, 48)[call % 2]
        with on_stream(world, ("first", "second")[call % 2]), overflows(world, reported):
            moe.moe(x, ids, weights, *expert_weights, rows=counts, max_rows=max_rows, world=world, plan=plan)
        full, room = expert // 2, max_rows + 2 * 16
        for source in ((full - step) % size for step in range(size) if expert >= 0):
            lost[full] += max(0, counts[source] - room) * (world.rank in (full, source))
            room = max(0, room - counts[source])
    with overflows(world, reported):
        world.synchronize()
    assert reported == lost and lost.total(), (reported, lost)


def no_room_case(world: weft.World) -> None:
    """Each expert can receive 32 rows. Calls that fit alternate with calls that route 40 rows to one expert. Dropped
    routes contribute to no sum. Neither the routes nor their tokens have a gradient, although they had a gradient in
    the previous call."""
    layer = Layer(20, 2, 1, 32, 24, torch.bfloat16)
    model = Model(world, layer, False)
    for call, fits in enumerate((True, False, True, False)):
        ids = torch.arange(20, dtype=torch.int32)[:, None] % 2 * fits
        operands = routed(call, world.rank, 20, layer, world.size, at_random)._replace(ids=ids)
        _, grads = gradients(world, whole_experts, model, operands, plan="dispatched", max_rows=16)
        reported = noticed(world)
        assert reported == ({} if fits else {0: 8}), reported  # only the forward pass reports drops
        lost = 8 if world.rank == 1 and not fits else 0
        dx, dweights = grads["x"], grads["weights"]
        assert dx is not None and dweights is not None
        assert int((dweights == 0).sum()) == lost == int((dx == 0).all(1).sum()), call
