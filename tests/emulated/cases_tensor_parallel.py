"""Layers whose experts' columns are split over ranks, called by both halves, for `cases_moe.py`; and what the halves must do apart. Each
function runs on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import weft
from tests.emulated.cases import distance
from tests.emulated.cases_expert_parallel import steps
from tests.emulated.cases_moe import Ids, Memory, Model, Tensors, at_random, in_turn, routed
from tests.emulated.cases_routing import Layer as Routes
from tests.emulated.cases_routing import reference
from weft.ops.moe.call import Layer
from weft.ops.moe.tensor_parallel.call import Split, route_parts
from weft.plans import Plan
from weft.scale import SMALL_DISPATCHED


def both_halves(
    world: weft.World, model: Model, ids: torch.Tensor, t: Tensors, *, rows: Sequence[int] | None = None,
    plan: str | Plan = "dispatched", second: str | Plan | None = None, keep: str = "rows",
) -> torch.Tensor:  # fmt: skip
    """Both ops. second: the plan of the second, where it is another."""
    common: dict[str, Any] = dict(rows=rows, tp_size=model.tp_size, world=world)
    hidden, routes = weft.all_gather_grouped_matmul(
        t["x"], ids, t["weights"], t["w13"], b13=t["b13"], activation=model.layer.activation, inner=model.inner, keep=keep,
        plan=plan, **common,
    )  # fmt: skip
    y: torch.Tensor = weft.grouped_matmul_reduce_scatter(
        hidden, routes, ids, t["w2"], b2=t["b2"], shared=t["shared"], plan=plan if second is None else second, **common
    )
    return y


def operands_of(layer: Layer, world: weft.World, tokens: int, call: int, ids_of: Ids) -> tuple[torch.Tensor, ...]:
    """This rank's x, ids and weights."""
    return routed(call, world.rank, tokens, layer, world.size, ids_of)[:3]


def first_halves(world: weft.World, plan: str | Plan, then: str | Plan, calls: int = 4) -> float:
    """Largest error of second halves, which come after all first ones, in the other order. Nothing stands between the first halves, whose
    operands are written again in the same memory. In one call no GEMM keeps the stream from going on."""
    layer = Layer(18, 2, 1, 40, 16 * world.size, torch.bfloat16)
    model, stream = Model(world, layer, False, tp_size=world.size), world.current_stream()
    held = [world.empty(t.shape, t.dtype) for t in operands_of(layer, world, 18, 0, in_turn)]
    w, made = model.own, []
    for call in range(calls):
        given = operands_of(layer, world, 18, call, in_turn)
        for t, new in zip(held, given, strict=True):
            world.call(lambda t=t, new=new: t.copy_(new), [], [t], stream)
        made.append((*weft.all_gather_grouped_matmul(*held, w.w13, inner=model.inner, world=world, plan=plan), given))
    world.synchronize()
    errors = []
    for hidden, routes, given in reversed(made):
        y = weft.grouped_matmul_reduce_scatter(hidden, routes, given[1].to(world.device), w.w2, world=world, plan=then)
        world.synchronize()
        errors.append(distance(y, model(*given)))
    return max(errors)


def around_layer(world: weft.World, calls: int = 3) -> float:
    """Largest error of layers whose halves have a layer of whole experts between them: the second half begins with y where that layer's
    y lay. A second half of the same rows follows it. Nothing synchronises between them."""
    tokens, kept = 5, []
    layer = Layer(tokens, 2, 1, 16, 8 * world.size, torch.bfloat16)
    split, whole = Model(world, layer, False, tp_size=world.size), Model(world, layer, False, 10)
    w, memory, common = split.own, Memory(world), dict(world=world, plan="dispatched")
    for call in range(calls):
        x, ids, weights = operands_of(layer, world, tokens, call, at_random)
        hidden, routes = weft.all_gather_grouped_matmul(x, ids, weights, w.w13, inner=split.inner, **common)
        between = routed(call, world.rank, tokens, layer, world.size, at_random)
        kept.append(memory.call(steps, whole, between, rows=[tokens] * world.size, plan=SMALL_DISPATCHED))
        for _ in range(2):
            y = weft.grouped_matmul_reduce_scatter(hidden, routes, ids, w.w2, **common)
            kept.append((y, split(x, ids, weights)))
    world.synchronize()
    return max(distance(got, want) for got, want in kept)


def other_second_halves(world: weft.World) -> None:
    """Layers of as many sizes as there are ranks, and in the end on every rank the second half of another one."""
    made = []
    for tokens in range(4, 4 + world.size):
        layer = Layer(tokens, 2, 1, 16, 8 * world.size, torch.bfloat16)
        split = Model(world, layer, False, tp_size=world.size)
        given, w = operands_of(layer, world, tokens, 0, at_random), split.own
        first = weft.all_gather_grouped_matmul(*given, w.w13, inner=split.inner, world=world, plan="dispatched")
        made.append((*first, given[1], w.w2))
    for second in (*made, made[world.rank]):
        weft.grouped_matmul_reduce_scatter(*second, world=world, plan="dispatched")
    world.synchronize()


def routes_case(world: weft.World, plan: str, tokens: Sequence[int], tp_size: int, ids_of: Ids = at_random) -> None:
    """The routes of a call are those of plain Python."""
    layer = Layer(max(tokens), 4, 2, 32, 16 * world.size, torch.bfloat16)
    model, me = Model(world, layer, False, tp_size=tp_size), world.rank
    every = [ids_of(0, r, t, layer, world.size).tolist() for r, t in enumerate(tokens)]
    w, given = model.own, operands_of(layer, world, tokens[me], 0, ids_of)
    hidden, routes = weft.all_gather_grouped_matmul(
        *given, w.w13, inner=model.inner, rows=tokens, tp_size=tp_size, world=world, plan=plan
    )
    world.synchronize()
    split = Split(layer.max_tokens_per_rank, 4, 2, 32, model.inner, layer.dtype, tp_size=tp_size, tile=16)
    made = route_parts(world, split, routes)
    local = split.local(world)
    group = [[[e - me // tp_size * local for e in t] for t in ids] for ids in every]
    want = reference(Routes(world.size, local, 2, layer.max_tokens_per_rank, 16), 0, group)
    del want["sources"], want["received"]
    want = rotated(want, group, Routes(world.size, local, 2, layer.max_tokens_per_rank, 16), me)
    assert hidden.shape[0] == split.rows(world)
    assert made.route_rows.tolist()[: len(want["route_rows"])] == want["route_rows"]
    assert made.offsets.tolist()[: local + 1] == want["offsets"]
    assert made.tile_count[0] == want["tile_count"][0] and made.targets.tolist()[: world.size] == want["touched"]
    assert made.tiles.view(-1, 4)[: want["tile_count"][0]].tolist() == want["tiles"]


def rotated(want: dict[str, Any], ids: list[Any], layer: Routes, me: int) -> dict[str, Any]:
    """The tables as rank `me` has them of experts that are numbered from its own first on."""
    turned = [ids[(s + me) % layer.ranks] for s in range(layer.ranks)]
    made = reference(layer, 0, turned)
    each = layer.max_tokens_per_rank * layer.k
    by = [made["route_rows"][s * each : (s + 1) * each] for s in range(layer.ranks)]
    slots = [slot for s in range(layer.ranks) for slot in by[(s - me) % layer.ranks]]
    return dict(made, route_rows=slots)
