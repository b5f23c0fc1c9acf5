"""Layers whose experts are split by columns over ranks, called by `cases_moe.py` in two halves, and cases of each half
alone. Each function runs on one rank.
"""

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
    """Call both ops. `second` is the plan of the second half, if it differs."""
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
    """Return this rank's x, ids and weights."""
    return routed(call, world.rank, tokens, layer, world.size, ids_of)[:3]


def first_halves(world: weft.World, plan: str | Plan, then: str | Plan, calls: int = 4) -> float:
    """Return the largest error of calls whose first halves all run first; their second halves follow in reverse order.
    Nothing synchronises the first halves, whose operands are rewritten in the same memory. In one of the calls, no GEMM
    delays the stream."""
    layer = Layer(18, 2, 1, 40, 16 * world.size, torch.bfloat16)
    model, stream = Model(world, layer, False, tp_size=world.size), world.current_stream()
    held = [world.empty(t.shape, t.dtype) for t in operands_of(layer, world, 18, 0, in_turn)]
    w, first_results = model.local_weights, []
    for call in range(calls):
        operands = operands_of(layer, world, 18, call, in_turn)
        for t, new in zip(held, operands, strict=True):
            world.call(lambda t=t, new=new: t.copy_(new), [], [t], stream)
        first_results.append(
            (*weft.all_gather_grouped_matmul(*held, w.w13, inner=model.inner, world=world, plan=plan), operands)
        )
    world.synchronize()
    errors = []
    for hidden, routes, operands in reversed(first_results):
        y = weft.grouped_matmul_reduce_scatter(
            hidden, routes, operands[1].to(world.device), w.w2, world=world, plan=then
        )
        world.synchronize()
        errors.append(distance(y, model(*operands)))
    return max(errors)


def around_layer(world: weft.World, calls: int = 3) -> float:
    """Return the largest error of layers whose halves are separated by a layer of whole experts. The second half first
    uses the memory of that layer's y. The same second half is called twice. Nothing synchronises these calls."""
    tokens, kept = 5, []
    layer = Layer(tokens, 2, 1, 16, 8 * world.size, torch.bfloat16)
    split, whole = Model(world, layer, False, tp_size=world.size), Model(world, layer, False, 10)
    w, memory, common = split.local_weights, Memory(world), dict(world=world, plan="dispatched")
    for call in range(calls):
        x, ids, weights = operands_of(layer, world, tokens, call, at_random)
        hidden, routes = weft.all_gather_grouped_matmul(x, ids, weights, w.w13, inner=split.inner, **common)
        between = routed(call, world.rank, tokens, layer, world.size, at_random)
        kept.append(memory.call(steps, whole, between, rows=[tokens] * world.size, plan=SMALL_DISPATCHED))
        for _ in range(2):
            y = weft.grouped_matmul_reduce_scatter(hidden, routes, ids, w.w2, **common)
            kept.append((y, split(x, ids, weights)))
    world.synchronize()
    return max(distance(actual, expected) for actual, expected in kept)


def other_second_halves(world: weft.World) -> None:
    """Call as many layers of different sizes as there are ranks; finally, every rank calls the second half of a
    different layer."""
    second_operands = []
    for tokens in range(4, 4 + world.size):
        layer = Layer(tokens, 2, 1, 16, 8 * world.size, torch.bfloat16)
        split = Model(world, layer, False, tp_size=world.size)
        operands, w = operands_of(layer, world, tokens, 0, at_random), split.local_weights
        hidden_and_routes = weft.all_gather_grouped_matmul(
            *operands, w.w13, inner=split.inner, world=world, plan="dispatched"
        )
        second_operands.append((*hidden_and_routes, operands[1], w.w2))
    for second in (*second_operands, second_operands[world.rank]):
        weft.grouped_matmul_reduce_scatter(*second, world=world, plan="dispatched")
    world.synchronize()


def routes_case(world: weft.World, plan: str, tokens: Sequence[int], tp_size: int, ids_of: Ids = at_random) -> None:
    """The routes of a call must equal those computed in plain Python."""
    layer = Layer(max(tokens), 4, 2, 32, 16 * world.size, torch.bfloat16)
    model, me = Model(world, layer, False, tp_size=tp_size), world.rank
    every = [ids_of(0, r, t, layer, world.size).tolist() for r, t in enumerate(tokens)]
    w, operands = model.local_weights, operands_of(layer, world, tokens[me], 0, ids_of)
    hidden, routes = weft.all_gather_grouped_matmul(
        *operands, w.w13, inner=model.inner, rows=tokens, tp_size=tp_size, world=world, plan=plan
    )
    world.synchronize()
    split = Split(layer.max_tokens_per_rank, 4, 2, 32, model.inner, layer.dtype, tp_size=tp_size, tile=16)
    tables = route_parts(world, split, routes).tables
    local = split.local(world)
    group = [[[e - me // tp_size * local for e in t] for t in ids] for ids in every]
    expected = rotated(group, Routes(world.size, local, 2, layer.max_tokens_per_rank, 16), me)
    assert hidden.shape[0] == split.rows(world)
    assert tables.route_rows.tolist()[: len(expected["route_rows"])] == expected["route_rows"]
    assert tables.offsets.tolist()[: local + 1] == expected["offsets"]
    assert (
        tables.tile_count[0] == expected["tile_count"][0]
        and tables.targets.tolist()[: world.size] == expected["touched"]
    )
    assert tables.tiles.view(-1, 4)[: expected["tile_count"][0]].tolist() == expected["tiles"]


def rotated(ids: list[Any], layer: Routes, me: int) -> dict[str, Any]:
    """Return the tables of rank `me`; expert numbers start at the rank's first expert."""
    rotated_ids = [ids[(s + me) % layer.ranks] for s in range(layer.ranks)]
    tables = reference(layer, 0, rotated_ids)
    routes_per_rank = layer.max_tokens_per_rank * layer.k
    rows_by_source = [tables["route_rows"][s * routes_per_rank : (s + 1) * routes_per_rank] for s in range(layer.ranks)]
    slots = [slot for s in range(layer.ranks) for slot in rows_by_source[(s - me) % layer.ranks]]
    return dict(tables, route_rows=slots)
