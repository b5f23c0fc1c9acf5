"""Gradients of an MoE layer against those of the whole layer in float64 in one process; each function runs on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_moe import Ids, Model, at_random, expert, interleaved, some_nowhere
from weft import moe
from weft.ops.moe.call import Layer

NAMES = ("x", "weights", "w13", "w2", "b13", "b2", "shared")


def routed(call: int, rank: int, t: int, layer: Layer, world: int, ids_of: Ids) -> tuple[torch.Tensor, ...]:
    """x, ids, weights, shared and the gradient of the result, of one rank."""
    seed = 1000 * call + 10 * rank
    return (
        draw(seed, t, layer.hidden, dtype=layer.dtype),
        ids_of(call, rank, t, layer, world).int(),
        draw(seed + 1, t, layer.k, dtype=torch.float32).abs(),
        draw(seed + 2, t, layer.hidden, dtype=layer.dtype),
        draw(seed + 3, t, layer.hidden, dtype=layer.dtype),
    )


def whole_gradients(model: Model, given: Sequence[tuple[torch.Tensor, ...]], me: int) -> list[torch.Tensor]:
    """float64 gradients of rank me's x and weights, and of all experts. The input of the activation is rounded as it is kept: on which
    side of a clamp's end it lies decides whether it has a gradient."""
    experts = [t.double().requires_grad_() for t in (model.w13, model.w2, model.b13, model.b2)]
    xs = [g[0].double().requires_grad_() for g in given]
    weights = [g[2].double().requires_grad_() for g in given]
    total = torch.zeros((), dtype=torch.float64)
    for x, weight, (_, ids, _, _, dy) in zip(xs, weights, given, strict=True):
        for e in range(model.layer.experts):
            t, slot = (ids == e).nonzero(as_tuple=True)
            y = expert(x[t], *(w[e] for w in experts), model.layer.activation, model.layer.dtype)
            total = total + (weight[t, slot, None] * y * dy.double()[t]).sum()
    wanted = [xs[me], weights[me], *experts]
    made = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, made, strict=True)]


def reference(
    model: Model, given: Sequence[tuple[torch.Tensor, ...]], me: int, world: weft.World
) -> dict[str, torch.Tensor]:
    """float64 gradients: of this rank's x and weights, and of its experts, as they lie."""
    dx, dweights, *of_experts = whole_gradients(model, given, me)
    local = model.layer.experts // world.size
    w13, w2, b13, b2 = (t[me * local : (me + 1) * local] for t in of_experts)
    if model.layer.activation != "gelu":
        w13, b13 = (interleaved(t, world.scale.interleave) for t in (w13, b13))
    return dict(zip(NAMES, (dx, dweights, w13, w2, b13, b2, given[me][4]), strict=True))


def gradients(
    world: weft.World, model: Model, given: tuple[torch.Tensor, ...], wants: Sequence[str] = NAMES, **options: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """The result, and the gradients of what is wanted."""
    x, ids, weights, shared, dy = (t.to(world.device) for t in given)
    values = dict(zip(NAMES, (x, weights, *model.own, shared), strict=True))
    there = {
        name: None if t is None else t.detach().clone().requires_grad_(name in wants) for name, t in values.items()
    }
    y = moe.moe(
        there["x"], ids, there["weights"], there["w13"], there["w2"], b13=there["b13"], b2=there["b2"],
        shared=there["shared"], activation=model.layer.activation, world=world, **options,
    )  # fmt: skip
    y.backward(dy)
    return y.detach(), {name: None if t is None else t.grad for name, t in there.items()}


def training_case(
    world: weft.World, experts: int = 4, k: int = 2, hidden: int = 32, inner: int = 24, tokens: Sequence[int] = (7, 5, 0, 9),
    activation: str = "swiglu", biases: bool = False, calls: int = 3, ids_of: Ids = at_random,
    plan: Any = "dispatched", keep: Sequence[str] = moe.KEEPS, dtype: torch.dtype = torch.bfloat16, wants: Sequence[str] = NAMES,
) -> dict[str, float]:  # fmt: skip
    """Largest error by operand, over calls with new tokens and routings that keep other things; nothing synchronises
    between them."""
    layer = Layer(max(tokens), experts, k, hidden, inner, dtype, activation)
    model, kept = Model(world, layer, biases), []
    for call in range(calls):
        counts = [tokens[(r + call) % len(tokens)] for r in range(world.size)]
        given = [routed(call, r, t, layer, world.size, ids_of) for r, t in enumerate(counts)]
        _, got = gradients(world, model, given[world.rank], wants, rows=counts, plan=plan, keep=keep[call % len(keep)])
        kept.append((got, reference(model, given, world.rank, world)))
    world.synchronize()
    found = dict.fromkeys(wants, 0.0)
    for got, want in kept:
        for name in NAMES:
            gradient = got[name]
            assert (gradient is not None) == (name in wants and (biases or name not in ("b13", "b2")))
            if gradient is not None and gradient.numel():
                found[name] = max(found[name], distance(gradient, want[name]))
    return found


def no_room_case(world: weft.World) -> None:
    """Room for 32 rows of an expert: calls that fit, and calls in between that bring 40 to one. Routes that are left out
    are in no sum, so neither they nor their tokens have a gradient, though those of the call before had one."""
    layer = Layer(20, 2, 1, 32, 24, torch.bfloat16)
    model = Model(world, layer, False)
    for call, fits in enumerate((True, False, True, False)):
        x, ids, *more = routed(call, world.rank, 20, layer, world.size, at_random)
        ids = torch.arange(20, dtype=torch.int32)[:, None] % 2 * fits
        _, made = gradients(world, model, (x, ids, *more), plan="dispatched", max_rows=16)
        full = world.rank == 0 and not fits
        with pytest.raises(weft.Overflow) if full else contextlib.nullcontext():
            world.synchronize()
        lost = 8 if world.rank == 1 and not fits else 0
        dx, dweights = made["x"], made["weights"]
        assert dx is not None and dweights is not None
        assert int((dweights == 0).sum()) == lost == int((dx == 0).all(1).sum()), call


def exchanged(world: weft.World, wants: tuple[str, ...], **options: Any) -> float:
    """Error of the gradients of dispatch, an expert's scale between, and combine; two microbatches."""
    counts, experts, k, h = [[9, 5, 7, 0][r % 4] for r in range(world.size)], 2 * world.size, 2, 32
    layer, kept = Layer(max(counts), experts, k, h, 8, torch.bfloat16), []
    for call in range(2):
        given = routed(call, world.rank, counts[world.rank], layer, world.size, some_nowhere)
        x, ids, weights, shared, dy = (t.to(world.device) for t in given)
        leaves = dict(x=x, weights=weights, shared=shared)
        leaves = {name: t.clone().requires_grad_(name in wants) for name, t in leaves.items()}
        rows, handle = moe.dispatch(
            leaves["x"], ids, leaves["weights"], experts=experts, world=world, rows=counts, **options
        )
        scale = torch.full((), 3.0, dtype=torch.bfloat16, device=world.device, requires_grad=True)
        y = moe.combine(rows * scale, handle, shared=leaves["shared"])
        y.backward(dy)
        wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
        weight = torch.where(ids >= 0, wide["weights"], 0.0).sum(1, keepdim=True)
        (3 * weight * wide["x"] + wide["shared"]).backward(dy.double())
        kept += [(leaves[name].grad, wide[name].grad) for name in wants]
    world.synchronize()
    return max((distance(got, want) for got, want in kept if got.numel()), default=0.0)  # type: ignore[arg-type, union-attr]
