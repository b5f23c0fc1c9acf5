"""Layers whose experts' columns are split over ranks, against torch: what both halves must give, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw, on_stream
from tests.emulated.cases_moe import Ids, Model, at_random, in_turn, interleaved, one_call
from tests.emulated.cases_moe_routing import Layer as Routed
from tests.emulated.cases_moe_routing import reference
from weft.ops.moe.call import Layer, Weights
from weft.ops.moe.tensor_parallel.call import Split, parts
from weft.plans import Plan
from weft.scale import SMALL_DISPATCHED


class Parts(Model):
    """All ranks' weights of one layer, and on its device this rank's columns of its experts."""

    def __init__(self, world: weft.World, layer: Layer, sharing: int, biases: bool, seed: int = 0) -> None:
        super().__init__(world, replace(layer, experts=layer.experts), biases, seed)
        self.sharing, self.inner = sharing, layer.inner // sharing
        local = layer.experts * sharing // world.size
        group, part = divmod(world.rank, sharing)
        own, cols = slice(group * local, (group + 1) * local), slice(part * self.inner, (part + 1) * self.inner)

        def columns(t: torch.Tensor) -> torch.Tensor:
            if layer.activation == "gelu":
                return t[own, cols]
            return interleaved(torch.cat([half[:, cols] for half in t[own].chunk(2, 1)], 1), world.scale.interleave)

        there = [t.contiguous().to(world.device) for t in (columns(self.w13), self.w2[own][:, :, cols])]
        more = [t.contiguous().to(world.device) for t in (columns(self.b13), self.b2[own])] if biases else [None, None]
        self.own = Weights(*there, more[0], more[1] if part == 0 else None)

    def run(
        self,
        world: weft.World,
        given: Sequence[torch.Tensor],
        plan: str | Plan,
        rows: Sequence[int] | None = None,
        shared: torch.Tensor | None = None,
        then: str | Plan | None = None,
    ) -> torch.Tensor:
        """Both halves. then: the plan of the second, where it is another."""
        w, common = self.own, dict(rows=rows, sharing=self.sharing, world=world)
        hidden, routes = weft.all_gather_grouped_matmul(
            *given, w.w13, b13=w.b13, activation=self.layer.activation, inner=self.inner, plan=plan, **common
        )
        second = plan if then is None else then
        return weft.grouped_matmul_reduce_scatter(
            hidden, routes, given[1], w.w2, b2=w.b2, shared=shared, plan=second, **common
        )


def drawn(layer: Layer, world: weft.World, tokens: int, call: int, ids_of: Ids) -> list[torch.Tensor]:
    x = draw(10 * call + world.rank, tokens, layer.hidden, dtype=layer.dtype)
    ids = ids_of(call, world.rank, tokens, layer, world.size).int()
    weights = draw(10 * call + 5 + world.rank, tokens, layer.k, dtype=torch.float32).abs()
    return [x, ids.contiguous(), weights]


def tensor_case(
    world: weft.World, plan: str | Plan = "dispatched", tokens: Sequence[int] = (7, 5, 0, 9), sharing: int | None = None,
    ids_of: Ids = at_random, biases: bool = False, shared: bool = False, calls: int = 3, streams: Sequence[str] = ("main",),
    layers: int = 1, then: str | Plan | None = None, **changes: Any,
) -> float:  # fmt: skip
    """Largest error over calls with new tokens and routings, each through all layers, on the streams in turn. Nothing synchronises
    between them: inputs are written again, and results taken, by work on the stream."""
    sizes = dict(capacity=max(tokens), experts=4, k=2, hidden=32, inner=16 * world.size, dtype=torch.bfloat16)
    layer = Layer(**sizes | changes)  # type: ignore[arg-type]
    models = [
        Parts(world, replace(layer, hidden=layer.hidden + 8 * j), sharing or world.size, biases, 10 * j)
        for j in range(layers)
    ]
    held: dict[Any, torch.Tensor] = {}
    kept = []
    for call in range(calls):
        name = streams[call % len(streams)]
        counts = [tokens[(r + call) % len(tokens)] for r in range(world.size)]
        with on_stream(world, name):
            for j, model in enumerate(models):
                given = drawn(model.layer, world, counts[world.rank], call + 20 * j, ids_of)
                more = draw(99 + world.rank, *given[0].shape, dtype=layer.dtype) if shared else None

                def there(what: str, values: torch.Tensor, name: str = name) -> torch.Tensor:
                    t = held.setdefault((name, what, values.shape), world.empty(values.shape, values.dtype))
                    world.call(lambda: t.copy_(values), [], [t], world.current_stream())
                    return t

                at = [there(what, t) for what, t in zip(("x", "ids", "weights"), given, strict=True)]
                y = model.run(world, at, plan, counts, None if more is None else there("shared", more), then)
                got = world.empty(y.shape, y.dtype)
                world.call(lambda got=got, y=y: got.copy_(y), [y], [got], world.current_stream())
                want = model(*given)
                kept.append((got, want if more is None else want + more.float()))
    world.synchronize()
    return max((distance(got, want) for got, want in kept if got.numel()), default=0.0)


def first_halves(world: weft.World, plan: str | Plan, then: str | Plan, calls: int = 4) -> float:
    """Largest error of second halves, which come after all first ones, in the other order. Nothing stands between the first halves, whose
    operands are written again in the same memory. In one call no GEMM keeps the stream from going on."""
    layer = Layer(18, 2, 1, 40, 16 * world.size, torch.bfloat16)
    model, stream = Parts(world, layer, world.size, False), world.current_stream()
    held = [world.empty(t.shape, t.dtype) for t in drawn(layer, world, 18, 0, in_turn)]
    w, made = model.own, []
    for call in range(calls):
        given = drawn(layer, world, 18, call, in_turn)
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
    split, whole = Parts(world, layer, world.size, False), Model(world, layer, False, 10)
    w, held, common = split.own, ({}, "main"), dict(world=world, plan="dispatched")
    for call in range(calls):
        x, ids, weights = drawn(layer, world, tokens, call, at_random)
        hidden, routes = weft.all_gather_grouped_matmul(x, ids, weights, w.w13, inner=split.inner, **common)
        counts, plan = [tokens] * world.size, SMALL_DISPATCHED
        kept.append(one_call(world, whole, counts, 100 * call, call, at_random, plan, False, held))
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
        split = Parts(world, layer, world.size, False)
        given, w = drawn(layer, world, tokens, 0, at_random), split.own
        first = weft.all_gather_grouped_matmul(*given, w.w13, inner=split.inner, world=world, plan="dispatched")
        made.append((*first, given[1], w.w2))
    for second in (*made, made[world.rank]):
        weft.grouped_matmul_reduce_scatter(*second, world=world, plan="dispatched")
    world.synchronize()


def routes_case(world: weft.World, plan: str, tokens: Sequence[int], sharing: int, ids_of: Ids = at_random) -> None:
    """The routes of a call are those of plain Python."""
    layer = Layer(max(tokens), 4, 2, 32, 16 * world.size, torch.bfloat16)
    model, me = Parts(world, layer, sharing, False), world.rank
    every = [ids_of(0, r, t, layer, world.size).tolist() for r, t in enumerate(tokens)]
    w, given = model.own, drawn(layer, world, tokens[me], 0, ids_of)
    hidden, routes = weft.all_gather_grouped_matmul(
        *given, w.w13, inner=model.inner, rows=tokens, sharing=sharing, world=world, plan=plan
    )
    world.synchronize()
    split = Split(layer.capacity, 4, 2, 32, model.inner, layer.dtype, sharing=sharing, tile=16)
    made = parts(world, split, routes)
    local = split.local(world)
    group = [[[e - me // sharing * local for e in t] for t in ids] for ids in every]
    want = reference(Routed(world.size, local, 2, layer.capacity, 16), 0, group)
    del want["sources"], want["received"]
    want = rotated(want, group, Routed(world.size, local, 2, layer.capacity, 16), me)
    assert hidden.shape[0] == split.rows(world)
    assert made.slots.tolist()[: len(want["slots"])] == want["slots"]
    assert made.offsets.tolist()[: local + 1] == want["offsets"]
    assert made.tile_count[0] == want["count"][0] and made.targets.tolist()[: world.size] == want["touched"]
    assert made.tiles.view(-1, 4)[: want["count"][0]].tolist() == want["tiles"]


def rotated(want: dict[str, Any], ids: list[Any], layer: Routed, me: int) -> dict[str, Any]:
    """The tables as rank `me` has them of experts that are numbered from its own first on."""
    turned = [ids[(s + me) % layer.ranks] for s in range(layer.ranks)]
    made = reference(layer, 0, turned)
    each = layer.capacity * layer.k
    by = [made["slots"][s * each : (s + 1) * each] for s in range(layer.ranks)]
    slots = [slot for s in range(layer.ranks) for slot in by[(s - me) % layer.ranks]]
    return dict(made, slots=slots)
