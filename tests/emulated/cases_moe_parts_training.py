"""Gradients of a layer whose experts' columns are split over ranks against those of the whole layer in float64 in one process; each
function runs on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import weft
from tests.emulated.cases import distance
from tests.emulated.cases_moe import Ids, at_random, interleaved
from tests.emulated.cases_moe_tensor import Parts
from tests.emulated.cases_moe_training import NAMES, routed, whole_gradients
from weft import moe
from weft.ops.moe.call import Layer


def reference(
    model: Parts, given: Sequence[tuple[torch.Tensor, ...]], me: int, world: weft.World
) -> dict[str, torch.Tensor]:
    """float64 gradients: of this rank's x and weights, and of its columns of its experts, as they lie."""
    dx, dweights, w13, w2, b13, b2 = whole_gradients(model, given, me)
    local = model.layer.experts * model.sharing // world.size
    group, part = divmod(me, model.sharing)
    own, cols = slice(group * local, (group + 1) * local), slice(part * model.inner, (part + 1) * model.inner)

    def columns(t: torch.Tensor) -> torch.Tensor:
        if model.layer.activation == "gelu":
            return t[own, cols]
        return interleaved(torch.cat([half[:, cols] for half in t[own].chunk(2, 1)], 1), world.scale.interleave)

    made = dx, dweights, columns(w13), w2[own][:, :, cols], columns(b13), b2[own], given[me][4]
    return dict(zip(NAMES, made, strict=True))


def gradients(
    world: weft.World, model: Parts, given: tuple[torch.Tensor, ...], wants: Sequence[str] = NAMES, keep: str = "rows",
    rows: Sequence[int] | None = None, plan: Any = "dispatched",
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:  # fmt: skip
    """The result of both halves, and the gradients of what is wanted."""
    x, ids, weights, shared, dy = (t.to(world.device) for t in given)
    values = dict(zip(NAMES, (x, weights, *model.own, shared), strict=True))
    there = {
        name: None if t is None else t.detach().clone().requires_grad_(name in wants) for name, t in values.items()
    }
    common: dict[str, Any] = dict(rows=rows, sharing=model.sharing, world=world, plan=plan)
    hidden, routes = weft.all_gather_grouped_matmul(
        there["x"], ids, there["weights"], there["w13"], b13=there["b13"], activation=model.layer.activation,
        inner=model.inner, keep=keep, **common,
    )  # fmt: skip
    y = weft.grouped_matmul_reduce_scatter(
        hidden, routes, ids, there["w2"], b2=there["b2"], shared=there["shared"], **common
    )
    y.backward(dy)
    return y.detach(), {name: None if t is None else t.grad for name, t in there.items()}


def parts_training_case(
    world: weft.World, experts: int = 4, k: int = 2, hidden: int = 32, inner: int = 16, tokens: Sequence[int] = (7, 5, 0, 9),
    sharing: int | None = None, activation: str = "swiglu", biases: bool = False, calls: int = 3, ids_of: Ids = at_random,
    plan: Any = "dispatched", keep: Sequence[str] = moe.KEEPS, dtype: torch.dtype = torch.bfloat16, wants: Sequence[str] = NAMES,
) -> dict[str, float]:  # fmt: skip
    """Largest error by operand, over calls with new tokens and routings that keep other things; nothing synchronises
    between them. inner: columns of a rank."""
    sharing = sharing or world.size
    layer = Layer(max(tokens), experts, k, hidden, inner * sharing, dtype, activation)
    model, kept = Parts(world, layer, sharing, biases), []
    for call in range(calls):
        counts = [tokens[(r + call) % len(tokens)] for r in range(world.size)]
        given = [routed(call, r, t, layer, world.size, ids_of) for r, t in enumerate(counts)]
        _, got = gradients(world, model, given[world.rank], wants, keep[call % len(keep)], counts, plan)
        kept.append((got, reference(model, given, world.rank, world)))
    world.synchronize()
    found = dict.fromkeys(wants, 0.0)
    for got, want in kept:
        for name in NAMES:
            gradient, there = got[name], name not in ("b13", "b2") or getattr(model.own, name) is not None
            assert (gradient is not None) == (name in wants and there)
            if gradient is not None and gradient.numel():
                found[name] = max(found[name], distance(gradient, want[name]))
    return found
