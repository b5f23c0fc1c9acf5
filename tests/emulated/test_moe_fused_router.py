"""An MoE layer in one launch that includes the router, on emulated ranks. Routes must equal those of a separate router
launch bit for bit, and the layer's results must be the same. The compiled kernel is tested too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.emulated import test_moe_fused
from tests.emulated.cases import distance, draw, on_stream
from tests.emulated.cases_expert_parallel import steps
from tests.emulated.cases_moe import Memory, Model, counts_of, routed
from tests.emulated.cases_moe_fused_router import WITH_ROUTER, RoutedLayer, RouterCase, router_calls
from tests.emulated.test_moe_router import launches
from tests.emulated.test_mutation import instead
from tests.gates import covered, some
from tests.offline import test_offline as offline
from weft import moe
from weft.backends.emulated import EmulatedBackend
from weft.check import ptx
from weft.check.offline import compile_kernel
from weft.ops.moe.call import Layer, MoeCall
from weft.ops.moe.expert_parallel.fused import prepare_fused
from weft.ops.moe.expert_parallel.op import operands_with_router
from weft.ops.moe.expert_parallel.route_kernels import compare_calls_once
from weft.plans import FusedMoe, Sequential
from weft.scale import SMALL_DISPATCHED, SMALL_LOW_LATENCY, SMALL_MOE

SIZES = {
    "plain": RoutedLayer(),
    "biases": RoutedLayer(router_bias=True, biases=True, shared=True, activation="gpt_oss", scoring="softmax_after"),
    "sigmoid, groups": RoutedLayer(
        experts=12, k=3, scoring="sigmoid", choice_bias=True, groups=4, top_groups=2, scale=2.5, tokens=(20, 3)
    ),
    "not renormalised": RoutedLayer(renormalise=False, choice_bias=True, router_bias=True, k=1, hidden=40),
    "many experts": RoutedLayer(experts=72, k=8, hidden=72, tokens=(33, 18), scoring="llama4"),
    "float16, gelu": RoutedLayer(dtype=torch.float16, activation="gelu", inner=40, hidden=24),
    "no tokens": RoutedLayer(tokens=(0,)),
}


# Runs on four ranks would repeat the runs on two: the cases differ within a rank, and 72 experts are many for any rank.
@covered("(plain|biases|not renormalised|float16, gelu)-4", covering=r"[\1-2]")
@pytest.mark.parametrize(
    ("name", "ranks"), [(name, ranks) for name in SIZES for ranks in ((2,) if name == "many experts" else (1, 2, 4))]
)
def test_routes_and_results(name: str, ranks: int) -> None:
    for seed in range(2):
        weft.spmd(router_calls(SIZES[name]), ranks, backend="emulated", seed=seed)


@pytest.mark.parametrize("seed", some(range(6)))
def test_among_other_plans(seed: int) -> None:
    """Layers of different sizes and plans share memory on alternating streams, without any synchronisation."""

    def main(world: weft.World) -> None:
        routed_layers = [
            RouterCase(world, RoutedLayer(6, 2, 32, 24, (9, 7, 8)), seed=1),
            RouterCase(world, RoutedLayer(6, 2, 48, 16, (5, 0, 14), router_bias=True, scoring="sigmoid"), seed=2),
        ]
        layer = Layer(9, 6, 2, 32, 24, torch.bfloat16)
        model, memory, pairs = Model(world, layer, False), Memory(world), []
        for call in range(8):
            with on_stream(world, ("first", "second")[call % 2]):
                routed_layers[call // 2 % 2].call(call)
                plan = (SMALL_MOE, SMALL_DISPATCHED, SMALL_LOW_LATENCY)[call % 3]
                counts = counts_of((9, 0, 6), call, world.size)
                operands = routed(call, world.rank, counts[world.rank], layer, world.size)
                pairs.append(memory.call(steps, model, operands, rows=counts, plan=plan))
        assert max(case.check() for case in routed_layers) < 5e-3
        assert max(distance(y, expected) for y, expected in pairs if y.numel()) < 5e-3

    weft.spmd(main, 3, backend="emulated", seed=seed)


def random_layer(world: weft.World, tokens: int = 9, hidden: int = 40, **options: Any) -> dict[str, Any]:
    """Return this rank's arguments of `weft.moe.moe`, with exact logits."""
    sizes = RoutedLayer(hidden=hidden, **options)
    case = RouterCase(world, sizes)
    weights, x = case.model.local_weights, sizes.tokens_of(5, world.rank, tokens)
    return dict(
        x=x,
        router=case.router,
        w13=weights.w13,
        w2=weights.w2,
        b13=weights.b13,
        b2=weights.b2,
        activation=sizes.activation,
        world=world,
    )


def same_as_router_before(arguments: dict[str, Any], **options: Any) -> torch.Tensor:
    """Call `weft.moe.moe` with the router in the layer's launch, and with ids and weights from a separate launch of the
    router; the bits must be equal."""
    world, router = arguments["world"], arguments["router"]
    y = moe.moe(ids=None, weights=None, plan=WITH_ROUTER, **arguments, **options)
    ids, weights, _ = router(arguments["x"], world=world)
    before = moe.moe(ids=ids, weights=weights, plan=SMALL_MOE, **{**arguments, "router": None}, **options)
    world.synchronize()
    assert torch.equal(y, before)
    assert type(world.ran.plan) is FusedMoe
    return y


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_bits_of_a_layer_after_its_router(ranks: int) -> None:
    def main(world: weft.World) -> None:
        tokens = (9, 0, 21, 4)[world.rank]
        for sizes in (dict(), dict(router_bias=True, biases=True, activation="gpt_oss", scoring="sigmoid", scale=0.5)):
            arguments = random_layer(world, tokens, **sizes)
            out, received = torch.empty_like(arguments["x"]), torch.zeros(4 // ranks, dtype=torch.int32)
            y = same_as_router_before(arguments, max_tokens=21, shared=arguments["x"], received=received)
            rows = world.exchange(int(received.sum()))
            assert sum(rows) == 2 * sum(world.exchange(tokens))
            into = moe.moe(
                ids=None, weights=None, plan=WITH_ROUTER, max_tokens=21, shared=arguments["x"], out=out, **arguments
            )
            world.synchronize()
            assert into is out and torch.equal(out, y)

    for seed in range(2):
        weft.spmd(main, ranks, backend="emulated", seed=seed)


def test_a_layer_is_one_launch() -> None:
    """Each call after the first is one launch. With a separate router, the same layer needs three launches besides the
    router's GEMM."""

    def main(world: weft.World) -> None:
        arguments = random_layer(world)
        for route, kernels in ((True, ["moe_layer"]), (False, ["choose", "compare", "moe_layer"])):
            for _ in range(2):
                with launches() as names:
                    moe.moe(ids=None, weights=None, plan=replace(SMALL_MOE, route=route), **arguments)
                    world.synchronize()
            assert names == kernels

    weft.spmd(main, 1, backend="emulated")


def test_other_plans_run_the_router_before_the_layer() -> None:
    def main(world: weft.World) -> None:
        arguments = random_layer(world)
        ids, weights, _ = arguments["router"](arguments["x"], world=world)
        for plan in ("sequential", "dispatched", "fused", "auto"):
            y = moe.moe(ids=None, weights=None, plan=plan, **arguments)
            expected = moe.moe(ids=ids, weights=weights, plan=plan, **{**arguments, "router": None})
            world.synchronize()
            assert torch.equal(y, expected), plan

    weft.spmd(main, 2, backend="emulated")


def test_a_plan_that_does_not_fit_falls_back() -> None:
    """The call falls back to a separate launch of the router, followed by the sequential plan."""

    def main(world: weft.World) -> None:
        for options in (dict(), dict(router_bias=True)):
            arguments = random_layer(world, **options)
            too_many = replace(WITH_ROUTER, copy_programs=world.sm_count + 1)
            y = moe.moe(ids=None, weights=None, plan=too_many, **arguments)
            assert type(world.ran.plan) is Sequential
            expected = moe.moe(ids=None, weights=None, plan="sequential", **arguments)
            world.synchronize()
            assert torch.equal(y, expected)

    weft.spmd(main, 2, backend="emulated")


@pytest.mark.parametrize("options", [dict(), dict(bias=True, scoring="softmax_after", activation="gpt_oss")])
def test_the_module(options: dict[str, Any]) -> None:
    def main(world: weft.World) -> None:
        torch.manual_seed(3)
        layer = moe.MoE(40, 24, 8, 2, world=world, plan=WITH_ROUTER, **options)
        x = draw(world.rank, 11, 40)
        layer.router.copy_((layer.router * 8).round() / 8)  # exact logits
        if layer.router_bias is not None:
            layer.router_bias.copy_((layer.router_bias * 64).round() / 64)
        x = (x * 4).round() / 4
        y = layer(x)
        assert world.ran.call.router is not None
        routes = layer.route(x)[:2]
        for call in (lambda: layer(x, routes=routes), capped(layer, x)):
            expected = call()
            assert world.ran.call.router is None
            world.synchronize()
            assert torch.equal(y, expected)
        with pytest.raises(ValueError, match="includes the router"):
            layer(x.clone().requires_grad_())

    weft.spmd(main, 2, backend="emulated")


def capped(layer: moe.MoE, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call of the same experts with a capacity at which nothing is dropped."""

    def call() -> torch.Tensor:
        layer.capacity_factor, layer.dropped = 100.0, torch.zeros(8, dtype=torch.int32)
        try:
            return layer(x)
        finally:
            layer.capacity_factor = layer.dropped = None

    return call


def test_compiled_calls_run_the_router_before_the_layer() -> None:
    def main(world: weft.World) -> None:
        arguments = random_layer(world)

        def step(x: torch.Tensor) -> torch.Tensor:
            return moe.moe(ids=None, weights=None, plan=WITH_ROUTER, **{**arguments, "x": x})

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(arguments["x"]), step(arguments["x"]))

    torch._dynamo.reset()
    weft.spmd(main, 1, backend="emulated")


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(ids=torch.zeros(9, 2, dtype=torch.int32)), ValueError, "must be None"),
    (dict(router=moe.TopKRouter(torch.zeros(8, 40, dtype=torch.bfloat16), 2)), ValueError, r"router \[8, 40\].* \[4, 40\]"),
    (dict(router=moe.TopKRouter(torch.zeros(4, 40), 2)), TypeError, "router .*must be torch.bfloat16"),
    (dict(router=moe.TopKRouter(torch.zeros(4, 40, dtype=torch.bfloat16), 5)), ValueError, "k 5 of ids"),
    (dict(scoring="tanh"), ValueError, "tanh"),
    (dict(bias=torch.zeros(5, dtype=torch.bfloat16)), ValueError, r"router bias \[5\]"),
    (dict(choice_bias=torch.zeros(5)), ValueError, r"bias \[5\]"),
    (dict(groups=3, top_groups=1), ValueError, "3 equal groups"),
    (dict(router=None), TypeError, "ids must be a tensor, got None"),
    (dict(x=torch.zeros(9, 40, dtype=torch.bfloat16, requires_grad=True)), ValueError, "includes the router"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "says"), REFUSED)
def test_wrong_arguments_are_refused(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    def main(world: weft.World) -> None:
        arguments = random_layer(world)
        options = {name: value for name, value in changes.items() if name not in (*arguments, "ids")}
        if options:
            arguments["router"] = replace(arguments["router"], **options)
        arguments |= {name: value for name, value in changes.items() if name in (*arguments, "ids")}
        plan = SMALL_MOE if arguments["router"] is None else WITH_ROUTER
        with pytest.raises(error, match=says):
            moe.moe(**{"ids": None, "weights": None, **arguments}, plan=plan)

    weft.spmd(main, 1, backend="emulated")


def test_unsupported_router_options_are_refused() -> None:
    with pytest.raises(ValueError, match="k must be from 1 to 16, got 17"):
        moe.TopKRouter(torch.zeros(32, 8), 17)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_of_different_calls_raise(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The launch itself compares prepared calls, because hosts do not compare them, as on a GPU. Without this
    comparison the disagreement would go unnoticed."""
    monkeypatch.setattr(EmulatedBackend, "compares", False)

    def main(world: weft.World) -> None:
        arguments = random_layer(world, 4)
        for tokens in (5, 6, 5 + world.rank):
            moe.moe(ids=None, weights=None, plan=WITH_ROUTER, max_tokens=tokens, **arguments)
        world.synchronize()

    with pytest.raises(weft.Mismatch, match="ranks disagree on this call: rank 0: moe .*rank 1: moe "):
        weft.spmd(main, 2, backend="emulated", seed=seed)
    without = instead(compare_calls_once, "do not compare", ("same_call(calls, tl.load(number))", "None"))
    weft.spmd(main, 2, backend="emulated", seed=seed, mutation=without)


# -- compiled ----------------------------------------------------------------------------------------------------------

ROUTED = FusedMoe(route=True)
ONE_AN_SM = replace(test_moe_fused.ONE_AN_SM, route=True)
# Sizes of a layer, its plan and the number of ranks.
CASES = {
    "Qwen3-30B": (RoutedLayer(128, 8, 2048, 768), ROUTED, 2),
    "Qwen3-30B, 1 an SM": (RoutedLayer(128, 8, 2048, 768), ONE_AN_SM, 2),
    "GPT-OSS": (
        RoutedLayer(128, 4, 2880, 2880, activation="gpt_oss", biases=True, router_bias=True, scoring="softmax_after"),
        ROUTED,
        4,
    ),
    "DeepSeek-V3": (
        RoutedLayer(
            256, 8, 7168, 2048, scoring="sigmoid", choice_bias=True, groups=8, top_groups=4, scale=2.5, shared=True
        ),
        ROUTED,
        8,
    ),
    "odd": (
        RoutedLayer(
            16, 3, 1032, 520, biases=True, router_bias=True, choice_bias=True, shared=True, dtype=torch.float16
        ),
        ROUTED,
        8,
    ),
    "GPT-OSS-20B": (
        RoutedLayer(32, 4, 2880, 2880, activation="gpt_oss", biases=True, router_bias=True, scoring="softmax_after"),
        ROUTED,
        2,
    ),
    "gelu": (RoutedLayer(32, 2, 2048, 2048, activation="gelu"), ROUTED, 4),
    "gelu, 1 an SM": (RoutedLayer(32, 2, 2048, 2048, activation="gelu"), ONE_AN_SM, 4),
    "one GPU": (RoutedLayer(128, 8, 2048, 768), ROUTED, 1),
    "Mixtral": (RoutedLayer(8, 2, 4096, 14336), ROUTED, 2),
    "Llama 4": (RoutedLayer(128, 1, 5120, 8192, scoring="llama4", shared=True), ONE_AN_SM, 8),
    "512 experts": (RoutedLayer(512, 10, 2048, 512, shared=True), ROUTED, 8),
}


def launching(name: str) -> Callable[[weft.World], None]:
    sizes, plan, ranks = CASES[name]

    def main(world: weft.World) -> None:
        layer, block = replace(sizes.layer, max_tokens_per_rank=64), world.backend.scale.interleave
        h, inner, local = sizes.hidden, sizes.inner, sizes.experts // ranks
        n = inner if sizes.activation == "gelu" else -(-inner // block) * 2 * block

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(1, dtype=sizes.dtype).expand(shape)

        tokens = 30 + world.rank
        x = torch.zeros(tokens, h, dtype=sizes.dtype)
        biases = (zeros(local, n), zeros(local, h)) if sizes.biases else (None, None)
        shared = x if sizes.shared else None
        router = sizes.router(world.device)
        experts = zeros(local, n, h), zeros(local, h, inner), *biases, shared, None
        operands = operands_with_router(world, router, x, *experts)
        call = MoeCall(tokens, None, layer, router=router.options)
        prepare_fused(world, call, plan)(operands, torch.empty_like(x))

    return main


@pytest.mark.gate
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_compiles_and_keeps_the_rules(name: str, record_property: Callable[[str, object], None]) -> None:
    _, plan, ranks = CASES[name]
    by_rank = offline.launches(launching(name), ranks)
    (launch,) = by_rank[0]
    k = compile_kernel(launch.kernel, launch.args, launch.options)
    record_property("kernel", (f"moe fused with router {name}", k.registers, k.shared))
    offline.fits(launch, k)
    assert "wgmma.mma_async" in k.ptx
    assert ptx.broken_rules(k.ptx, test_moe_fused.awaited) == [] and ptx.signals_not_by_thread_zero(k.ptx) == []
    assert "fence.proxy.async;" not in k.ptx, "a proxy fence must name global memory"
    for others in by_rank[1:]:
        assert offline.specialised(launch) == offline.specialised(others[0])
