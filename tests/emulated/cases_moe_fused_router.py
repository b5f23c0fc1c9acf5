"""Layers whose router is part of the layer's launch, for the emulator's tests, the mutation gate and GPUs.

The logits are exact, so a router in a separate launch gives the same bits: tokens and the router's weights are small
integers times a power of two, and float32 represents the sums of their products exactly. Each function runs on one
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

import weft
from tests.emulated.cases import distance, draw, on_stream
from tests.emulated.cases_moe import Model, counts_of
from weft import moe
from weft.ops.moe.call import Layer
from weft.ops.moe.expert_parallel.op import MOE_WITH_ROUTER, operands_with_router, packed
from weft.plans import FusedMoe
from weft.scale import SMALL_MOE

WITH_ROUTER = replace(SMALL_MOE, route=True)


@dataclass(frozen=True)
class RoutedLayer:
    """A layer, its router, and the ranks' numbers of tokens, which rotate between calls."""

    experts: int = 4
    k: int = 2
    hidden: int = 32
    inner: int = 24
    tokens: Sequence[int] = (7, 5, 0, 9)
    activation: str = "swiglu"
    dtype: torch.dtype = torch.bfloat16
    biases: bool = False
    shared: bool = False
    router_bias: bool = False
    choice_bias: bool = False
    scoring: str = "softmax"
    renormalise: bool = True
    groups: int = 0
    top_groups: int = 0
    scale: float = 1.0
    spread: int = 4  # the approximate range of the logits

    @property
    def layer(self) -> Layer:
        return Layer(
            max(max(self.tokens), 1), self.experts, self.k, self.hidden, self.inner, self.dtype, self.activation
        )

    def integers(self, seed: int, *shape: int, most: int = 3) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-most, most + 1, shape, generator=generator).to(self.dtype)

    def router(self, device: torch.device, seed: int = 0) -> moe.TopKRouter:
        weight = self.integers(seed + 1, self.experts, self.hidden) * 2.0**-5
        bias = self.integers(seed + 2, self.experts) * 0.25 if self.router_bias else None
        choice_bias = self.integers(seed + 3, self.experts).float() / 16 if self.choice_bias else None
        weight, bias, choice_bias = (None if t is None else t.to(device) for t in (weight, bias, choice_bias))
        assert weight is not None
        return moe.TopKRouter(
            weight, self.k, bias, self.scoring, self.renormalise, choice_bias, self.groups, self.top_groups, self.scale
        )

    def tokens_of(self, call: int, rank: int, count: int) -> torch.Tensor:
        return self.integers(1000 * call + 10 * rank + 7, count, self.hidden) * 0.25


class Routed(NamedTuple):
    """The outputs of a call with a router."""

    out: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def run_layer(
    world: weft.World,
    model: Model,
    router: moe.TopKRouter,
    x: torch.Tensor,
    shared: torch.Tensor | None,
    rows: list[int],
    plan: FusedMoe,
) -> Routed:
    """Call the op as `weft.moe.moe` does, and return the routes too."""
    weights, activation = model.local_weights, model.layer.activation
    w13, b13 = packed("moe", "w13", weights.w13, 5, activation), packed("moe", "b13", weights.b13, 4, activation)
    operands = operands_with_router(world, router, x, w13, weights.w2, b13, weights.b2, shared, None)
    options = tuple(rows), activation, None, None, "rows", False, False, router.options
    out = MOE_WITH_ROUTER(world, plan, operands, options)
    return Routed(out, operands.ids, operands.weights)


class RouterCase:
    """One layer's calls on one rank of a stream-ordered program. Operations on the stream rewrite the operands for
    every call and copy the results."""

    def __init__(self, world: weft.World, sizes: RoutedLayer, plan: FusedMoe = WITH_ROUTER, seed: int = 0) -> None:
        self.world, self.sizes, self.plan = world, sizes, plan
        self.model = Model(world, sizes.layer, sizes.biases, seed)
        self.router = sizes.router(world.device, seed)
        self.buffers: dict[object, torch.Tensor] = {}
        self.results: list[tuple[torch.Tensor, Routed]] = []

    def write(self, name: object, values: torch.Tensor) -> torch.Tensor:
        stream = self.world.current_stream()
        key = stream, name, values.shape
        buffer = self.buffers.setdefault(key, self.world.empty(values.shape, values.dtype))
        self.world.call(lambda: buffer.copy_(values), [], [buffer], stream)
        return buffer

    def copy(self, t: torch.Tensor) -> torch.Tensor:
        copied = self.world.empty(t.shape, t.dtype)
        self.world.call(lambda: copied.copy_(t), [t], [copied], self.world.current_stream())
        return copied

    def call(self, call: int) -> None:
        sizes, rank = self.sizes, self.world.rank
        rows = counts_of(sizes.tokens, call, self.world.size)
        values = sizes.tokens_of(call, rank, rows[rank])
        x = self.write("x", values)
        shared = self.write("shared", draw(call, *values.shape, dtype=sizes.dtype)) if sizes.shared else None
        results = run_layer(self.world, self.model, self.router, x, shared, rows, self.plan)
        self.results.append((values, Routed(*map(self.copy, results))))

    def check(self) -> float:
        """Compare the routes of all calls bit for bit with the routes of the router's own kernel, and return the
        largest error of the results relative to torch's."""
        self.world.synchronize()
        worst = 0.0
        for call, (x, results) in enumerate(self.results):
            ids, weights = self.routes(x)
            assert torch.equal(results.ids, ids), call
            assert torch.equal(results.weights, weights), call
            expected = self.model(x, ids.cpu(), weights.cpu())
            if self.sizes.shared:
                expected = expected + draw(call, *x.shape, dtype=self.sizes.dtype).float()
            if x.numel():
                worst = max(worst, distance(results.out.cpu(), expected))
        return worst

    def routes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the routes that the router's own kernel computes from the logits, which are rounded once."""
        router, sizes, world = self.router, self.sizes, self.world
        logits = x.double() @ router.weight.cpu().double().t()
        if router.bias is not None:
            logits = logits + router.bias.cpu().double()
        ids, weights = moe.gate(
            logits.to(x.dtype).to(world.device), sizes.k, world=world, scoring=sizes.scoring,
            renormalise=sizes.renormalise, bias=router.choice_bias, groups=sizes.groups, top_groups=sizes.top_groups,
            scale=sizes.scale,
        )  # fmt: skip
        world.synchronize()
        return ids, weights


def router_calls(
    sizes: RoutedLayer,
    calls: int = 4,
    streams: Sequence[str] = ("main",),
    plan: FusedMoe = WITH_ROUTER,
    bound: float = 5e-3,
) -> Callable[[weft.World], float]:
    """Return a function that calls the layer with new tokens on alternating streams and returns the largest error.
    Nothing synchronises between them."""

    def main(world: weft.World) -> float:
        case = RouterCase(world, sizes, plan)
        for call in range(calls):
            with on_stream(world, streams[call % len(streams)]):
                case.call(call)
        error = case.check()
        assert error < bound
        return error

    return main


# For the mutation gate: several tiles of logits (none on a rank without tokens), and several tiles per expert.
MUTATED = RoutedLayer(hidden=40, inner=40, tokens=(20, 13), router_bias=True)
