"""Layers whose experts are split by columns over ranks. Both halves run with every plan on emulated ranks and are
compared with torch; the errors, operators, compiled kernels and the module are tested too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import changed
from tests.emulated.cases_moe import Model, at_random, layer_case, some_nowhere
from tests.emulated.cases_tensor_parallel import both_halves, first_halves, operands_of, routes_case
from tests.gates import some
from tests.offline import test_offline as offline
from weft.check import ptx
from weft.check.offline import Compiled, compile_kernel
from weft.ops.moe.call import Layer
from weft.plans import DispatchedColumns, GemmTile
from weft.scale import SMALL_DISPATCHED_COLUMNS as S

BOUND = 1.2e-2  # a route's result and each rank's sum are rounded to bfloat16


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("plan", ["sequential", "dispatched"])
def test_the_routes(plan: str, tp_size: int) -> None:
    weft.spmd(lambda world: routes_case(world, plan, (20, 7), tp_size), 2, backend="emulated")
    weft.spmd(lambda world: routes_case(world, plan, (20, 0), tp_size, some_nowhere), 2, backend="emulated")


def one(world: weft.World, seed: int = 0, **changes: Any) -> tuple[Model, tuple[torch.Tensor, ...]]:
    """Return a layer for 6 tokens per rank, and its routes."""
    sizes = dict(max_tokens_per_rank=6, experts=4, k=2, hidden=32, inner=16 * world.size, dtype=torch.bfloat16)
    layer = Layer(**sizes | changes)  # type: ignore[arg-type]
    return Model(world, layer, False, tp_size=world.size), operands_of(layer, world, 6, seed, at_random)


def halves(world: weft.World, model: Model, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Call both halves with plan "auto"."""
    x, ids, weights = operands
    w = model.local_weights
    return both_halves(world, model, ids, dict(x=x, weights=weights, shared=None, **w._asdict()), plan="auto")


@pytest.mark.parametrize("seed", some(range(4)))
def test_repeated_first_halves(seed: int) -> None:
    """First halves alone do not make a rank wait for the other ranks. The second halves that follow need only the first
    halves' results."""
    assert max(weft.spmd(lambda w: first_halves(w, S, S), 2, backend="emulated", seed=seed, preempt=0.2)) < BOUND


def test_the_same_bits_by_any_schedule() -> None:
    def main(world: weft.World) -> torch.Tensor:
        model, operands = one(world)
        y = halves(world, model, operands)
        world.synchronize()
        return y.clone()

    expected = weft.spmd(main, 2, backend="emulated")
    for seed in range(1, 3):
        for a, b in zip(expected, weft.spmd(main, 2, backend="emulated", seed=seed), strict=True):
            assert torch.equal(a, b)


def test_compiled_whole() -> None:
    def main(world: weft.World) -> None:
        model, (x, ids, weights) = one(world)
        fn = torch.compile(lambda x: halves(world, model, (x, ids, weights)) * 2, backend="aot_eager", fullgraph=True)
        actual, expected = fn(x), halves(world, model, (x, ids, weights)) * 2
        world.synchronize()
        assert torch.equal(actual, expected)

    torch._dynamo.reset()
    weft.spmd(main, 2, backend="emulated")


def test_the_code_on_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "moe.md").read_text()
    (code,) = re.findall(r"<!-- tensor-parallel experts -->\n```python\n(.*?)```", page, re.S)

    def main(world: weft.World) -> None:
        model, (x, ids, weights) = one(world, inner=2 * world.backend.scale.interleave * world.size)
        names = dict(
            weft=weft,
            world=world,
            x=x,
            ids=ids,
            weights=weights,
            w13=model.local_weights.w13,
            w2=model.local_weights.w2,
        )
        exec(code, names)
        world.synchronize()
        expected = model(x, ids, weights)
        assert (names["y"].float() - expected).norm() < BOUND * expected.norm()  # type: ignore[attr-defined]

    weft.spmd(main, 2, backend="emulated")


def test_the_calls_that_the_benchmark_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark times weft's ops and, as their limit, the GEMMs alone."""
    from bench.measure import moe_tensor as bench

    monkeypatch.setattr(bench, "DispatchedColumns", lambda: S)

    def main(world: weft.World) -> None:
        layer = bench.Layer(world, bench.Model(32, 32 * world.size, 4, 2), 32)
        first_half = layer.first_half(0)
        y = layer.second_half(first_half).clone()
        world.synchronize()
        full = torch.cat(world.exchange(layer.x))
        gemms = bench.own_gemms(layer, SimpleNamespace(gathered=lambda t: full), first_half)
        for part in (gemms["first"], gemms["second"], bench.tables_alone(layer, first_half), layer.first_half):
            part()
        world.synchronize()
        assert torch.equal(layer.second_half(first_half), y)
        world.synchronize()

    weft.spmd(main, 2, backend="emulated")


def test_errors_quote_the_arguments() -> None:
    def main(world: weft.World) -> None:
        model, (x, ids, weights) = one(world)
        w, inner = model.local_weights, model.inner

        def first_refuses(error: type[Exception], match: str, **changes: Any) -> None:
            arguments = dict(x=x, ids=ids, weights=weights, w13=w.w13, inner=inner) | changes
            with pytest.raises(error, match=match):
                weft.all_gather_grouped_matmul(**arguments, world=world)

        first_refuses(TypeError, "ids .*int64.* must be torch.int32", ids=ids.long())
        first_refuses(ValueError, r"ids .* must be \[6, 2\]", ids=ids[:3])
        first_refuses(TypeError, "weights .* must be torch.float32", weights=weights.bfloat16())
        first_refuses(ValueError, "activation 'relu' is not one of", activation="relu")
        first_refuses(ValueError, r"w13 .* must be \[any, any, 32\]", w13=w.w13[..., :-8])
        first_refuses(ValueError, "w13 .* is not what weft.moe.pack makes", w13=w.w13.flatten(1, 3))
        first_refuses(ValueError, "not what weft.moe.pack makes of 40 columns", inner=40)
        first_refuses(ValueError, "k 9 of ids", ids=torch.zeros(6, 9, dtype=torch.int32), weights=torch.zeros(6, 9))
        first_refuses(ValueError, "tp_size 3 does not divide 2 ranks", tp_size=3)
        first_refuses(ValueError, "rows .* must name 2 ranks", rows=[6])
        first_refuses(ValueError, "keep 'all' is not one of", x=x.clone().requires_grad_(), keep="all")
        first_refuses(ValueError, "out= has no gradient", x=x.clone().requires_grad_(), out=x)

        hidden, routes = weft.all_gather_grouped_matmul(x, ids, weights, w.w13, inner=inner, world=world)

        def second_refuses(error: type[Exception], match: str, **changes: Any) -> None:
            arguments = dict(hidden=hidden, routes=routes, ids=ids, w2=w.w2) | changes
            with pytest.raises(error, match=match):
                weft.grouped_matmul_reduce_scatter(**arguments, world=world)

        second_refuses(ValueError, r"hidden .* must be \[", hidden=hidden[:-1])
        second_refuses(ValueError, r"routes .* must be \[", routes=routes[:-4])
        second_refuses(TypeError, "w2 .* must be torch.bfloat16", w2=w.w2.half())
        second_refuses(ValueError, r"shared .* must be \[6, 32\]", shared=x[:2])
        second_refuses(ValueError, "fused", plan="fused")
        world.synchronize()

    weft.spmd(main, 2, backend="emulated")


def test_ranks_that_disagree() -> None:
    def main(world: weft.World) -> None:
        model, (x, ids, weights) = one(world)
        k = 1 + world.rank
        with pytest.raises(weft.Mismatch, match="k="):
            weft.all_gather_grouped_matmul(
                x, ids[:, :k], weights[:, :k], model.local_weights.w13, inner=model.inner, world=world
            )

    weft.spmd(main, 2, backend="emulated")


def test_calls_that_a_plan_does_not_support_are_sequential(caplog: pytest.LogCaptureFixture) -> None:
    """The reason is logged once."""

    def error(**case: Any) -> float:
        case = dict(inner=16, tp_size=2, calls=1) | case
        return max(weft.spmd(lambda world: layer_case(world, both_halves, **case), 2, backend="emulated"))

    assert error(plan=S, hidden=36) < BOUND
    assert "sequential instead of dispatched: rows must be whole 16-byte words, and H 36" in caplog.text
    assert error(plan=changed(S, block_m=32)) < BOUND
    assert "rows are in tiles of 16, not of 32" in caplog.text


# -- compiled ----------------------------------------------------------------------------------------------------------

CASES = {  # hidden, inner of a rank, experts, k, ranks, activation, biases, dtype, plan
    "TileLink's MoE-1": (2048, 384, 8, 2, 4, "swiglu", False, torch.bfloat16, DispatchedColumns()),
    "TileLink's MoE-6": (4096, 1024, 32, 5, 2, "swiglu", False, torch.bfloat16, DispatchedColumns()),
    "GPT-OSS": (2880, 360, 128, 4, 8, "gpt_oss", True, torch.bfloat16, DispatchedColumns()),
    "odd": (
        1032,
        520,
        16,
        3,
        2,
        "gelu",
        True,
        torch.float16,
        DispatchedColumns(flatten=False, tile=GemmTile(stages=4, block_n=128)),
    ),
}


def launching(name: str) -> Callable[[weft.World], None]:
    h, i, e, k, _, activation, biases, dtype, plan = CASES[name]

    def main(world: weft.World) -> None:
        block = world.backend.scale.interleave
        columns = (i,) if activation == "gelu" else (-(-i // block), 2, block)  # the layout of weft.moe.pack
        t = 30 + world.rank

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(1, dtype=dtype).expand(shape)

        rows = [30 + r for r in range(world.size)]
        routed = [torch.zeros(t, k, dtype=d) for d in (torch.int32, torch.float32)]
        common = dict(rows=rows, world=world, plan=plan)
        hidden, routes = weft.all_gather_grouped_matmul(
            torch.zeros(t, h, dtype=dtype), *routed, held(zeros(e, *columns, h)), activation=activation, inner=i,
            b13=held(zeros(e, *columns)) if biases else None, **common,
        )  # fmt: skip
        weft.grouped_matmul_reduce_scatter(
            hidden, routes, routed[0], held(zeros(e, h, i)), b2=held(zeros(e, h)) if biases else None,
            shared=torch.zeros(t, h, dtype=dtype) if biases else None, **common,
        )  # fmt: skip

    return main


def held(t: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in newly allocated memory."""
    return torch.empty(t.shape, dtype=t.dtype)


AWAITED = {
    "grouped_gemm_in": "tl.load(pointers + k",
    "combine_rows": "tl.load(routed.y +",
    "sum_ranks": "tl.load(outbox",
}


@pytest.mark.gate
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_and_keep_the_rules(name: str, record_property: Callable[[str, object], None]) -> None:
    plan, kernels = CASES[name][-1], {}
    by_rank = offline.launches(launching(name), CASES[name][4])
    for launch in by_rank[0]:
        k = compile_kernel(launch.kernel, launch.args, launch.options)
        kernel = launch.kernel.__name__
        kernels[kernel] = launch, k
        record_property("kernel", (f"moe in parts, {name}: {kernel}", k.registers, k.shared))
        offline.fits(launch, k)
        assert ("wgmma.mma_async" in k.ptx) == ("gemm" in kernel)
        if kernel in ("share", "count_routes", "place_routes"):
            continue  # test_offline.py checks these

        def waits(step: Any, text: str | None = AWAITED.get(kernel)) -> bool:
            return text is not None and text in step.source

        assert any(waits(step) for step in ptx.steps_of(k.ptx)) == (kernel in AWAITED)
        assert ptx.broken_rules(k.ptx, waits) == [] and ptx.signals_not_by_thread_zero(k.ptx) == []
    assert len(kernels) == 8
    pipelined(kernels, plan)
    for small, large in (("push_shard", "grouped_gemm_in"), ("combine_rows", "grouped_gemm_out")):
        pair = kernels[small], kernels[large]
        assert sum(k.shared + 1024 for _, k in pair) <= 228 << 10, "both kernels must fit on one SM"
        assert sum(-(-k.registers // 8) * 8 * 32 * a.options["num_warps"] for a, k in pair) <= 65536
    for others in by_rank[1:]:
        for a, b in zip(by_rank[0], others, strict=True):
            if a.kernel.__name__ != "share":
                assert offline.specialised(a) == offline.specialised(b)


def pipelined(kernels: dict[str, tuple[Any, Compiled]], plan: DispatchedColumns) -> None:
    """Check that both operands have the planned number of stages, loaded by TMA or gathered in 16-byte words, and that
    shards are in such words."""
    steps = {name: ptx.steps_of(k.ptx) for name, (_, k) in kernels.items()}
    gathered = sum(
        "cp.async.cg.shared" in s.text and "tl.load(pointers + k" in s.source for s in steps["grouped_gemm_in"]
    )
    launch = kernels["grouped_gemm_in"][0]
    stages = launch.options["num_stages"] * (1 + launch.args["s"].HALVES.value)
    assert gathered == stages * plan.tile.block_m * plan.tile.block_k * 2 // (plan.tile.warps * 32 * 16)
    stores = [s for s in steps["push_shard"] if "st.global" in s.text and "tl.store(dst +" in s.source]
    assert stores and all("v4.b32" in s.text or "v2.b64" in s.text for s in stores), [str(s) for s in stores][:2]
