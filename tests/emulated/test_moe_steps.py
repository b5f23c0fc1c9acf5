"""The steps of an MoE layer run on emulated ranks, with tables that the host builds. The results are compared with
torch. Their kernels are also compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import changed, distance, draw
from tests.emulated.cases_moe import Model, at_random
from tests.emulated.cases_routing import tables_of as expected_tables
from tests.offline import test_offline as offline
from weft.check import ptx
from weft.check.offline import Compiled, compile_kernel
from weft.ops.moe.call import Layer, MoeCall, MoeOperands, Weights
from weft.ops.moe.expert_parallel import kernels
from weft.ops.moe.expert_parallel.dispatched import (
    COMBINE_REGISTERS,
    DISPATCH_REGISTERS,
    ordered_routes,
    plan_state,
    prepare_dispatched,
    scratch,
    tables_of,
    unsupported,
)
from weft.ops.moe.expert_parallel.op import NARROW_32, NARROW_64
from weft.plans import Dispatched, GemmTile, Plan
from weft.scale import SMALL_DISPATCHED

BF, HALF = torch.bfloat16, torch.float16
S = SMALL_DISPATCHED


def run(world: weft.World, tokens: int, hidden: int, call: int = 0, plan: Dispatched = S) -> Any:
    """Return the outcome of one call by all ranks: the layer, x, ids, weights, experts and the result."""
    layer = Layer(tokens, 4, 2, hidden, 24, BF)
    model = Model(world, layer, False)
    x = draw(10 * call + world.rank, tokens, hidden)
    ids = at_random(call, world.rank, tokens, layer, world.size).int()
    weights = torch.full((tokens, 2), 0.5)
    out = world.empty((tokens, hidden), BF)
    operands = MoeOperands(x, ids, weights, *model.flat)
    prepare_dispatched(world, MoeCall(tokens, None, layer), plan)(operands, out)
    return layer, model, x, ids, weights, out


def test_the_result_does_not_depend_on_the_schedule() -> None:
    def main(world: weft.World) -> torch.Tensor:
        out = run(world, 21, 40)[-1]
        world.synchronize()
        return out.clone()

    first_run, *others = [weft.spmd(main, 2, backend="emulated", seed=seed) for seed in range(3)]
    assert all(torch.equal(a, b) for run in others for a, b in zip(first_run, run, strict=True))


def test_out_may_hold_x() -> None:
    def main(world: weft.World) -> float:
        layer = Layer(9, 4, 2, 32, 24, BF)
        model, x = Model(world, layer, False), draw(world.rank, 9, 32)
        routes = at_random(0, world.rank, 9, layer, 2).int(), torch.ones(9, 2)
        expected = model(x, *routes) + x.float()
        prepare_dispatched(world, MoeCall(9, None, layer), S)(MoeOperands(x, *routes, *model.flat, shared=x), x)
        world.synchronize()
        return distance(x, expected)

    assert max(weft.spmd(main, 2, backend="emulated")) < 5e-3


def test_a_token_has_more_local_routes_than_are_added_together() -> None:
    """Combine adds four routes at a time. Here a token has one to six of its seven routes on a rank."""

    def main(world: weft.World) -> float:
        layer = Layer(9, 16, 7, 32, 24, BF)
        model, x = Model(world, layer, False), draw(world.rank, 9, 32)
        routes = at_random(0, world.rank, 9, layer, 2).int(), draw(5 + world.rank, 9, 7, dtype=torch.float32).abs()
        out = world.empty((9, 32), BF)
        prepare_dispatched(world, MoeCall(9, None, layer), S)(MoeOperands(x, *routes, *model.flat), out)
        world.synchronize()
        return distance(out, model(x, *routes))

    assert max(weft.spmd(main, 2, backend="emulated")) < 5e-3


def test_memory_grows_and_is_shared() -> None:
    def main(world: weft.World) -> None:
        for call, (tokens, hidden) in enumerate([(5, 16), (20, 40), (5, 16), (30, 48), (20, 40)]):
            _, model, x, ids, weights, out = run(world, tokens, hidden, call)
            world.synchronize()
            assert distance(out, model(x, ids, weights)) < 5e-3
        small = scratch(world, "y", 8, 16, BF)
        assert small.data_ptr() == scratch(world, "y", 16, 40, BF).data_ptr(), "all layers must share the memory"

    weft.spmd(main, 2, backend="emulated")


def test_counters_are_those_of_their_tables() -> None:
    """Layers share counters if and only if they share `targets`."""
    layer = Layer(8, 4, 2, 32, 24, BF)

    def main(world: weft.World) -> None:
        _, tables, counters = tables_of(world, layer, 16)
        world.forget_prepared()
        _, same_tables, same_counters = tables_of(world, replace(layer, hidden=64), 16)
        assert same_tables.targets.data_ptr() == tables.targets.data_ptr()
        assert same_counters.data_ptr() == counters.data_ptr()
        for changed_layer, block_m in ((layer, 32), (replace(layer, max_rows=21), 16), (replace(layer, k=1), 16)):
            _, other_tables, other_counters = tables_of(world, changed_layer, block_m)
            assert other_tables.targets.data_ptr() != tables.targets.data_ptr()
            assert other_counters.data_ptr() != counters.data_ptr()

    weft.spmd(main, 2, backend="emulated")


def test_tables_of_local_routes_remain_when_prepared_objects_are_dropped() -> None:
    """A CUDA graph that captured a call refers to their addresses. Layers with equal tables share them."""
    layer = Layer(8, 16, 5, 32, 24, BF)

    def main(world: weft.World) -> None:
        _, rows = ordered_routes(world, layer, 16, 64)
        world.forget_prepared()
        _, later_rows = ordered_routes(world, replace(layer, hidden=64), 16, 64)
        for table, later_table in zip(rows[1:], later_rows[1:], strict=True):
            assert table.data_ptr() == later_table.data_ptr()

    weft.spmd(main, 2, backend="emulated")


def test_calls_that_the_plan_does_not_support() -> None:
    def main(world: weft.World) -> list[Any]:
        layer = Layer(8, 4, 2, 32, 24, BF)
        wrong = [
            replace(layer, hidden=36), replace(layer, inner=20), replace(layer, experts=5),
            replace(layer, hidden=1 << 20, inner=8),
        ]  # fmt: skip
        gelu = replace(layer, activation="gelu")
        plan = changed(S, block_n=16)
        return [
            *(unsupported(world, w, S) for w in wrong),
            unsupported(world, layer, plan),
            unsupported(world, gelu, plan),
            unsupported(world, layer, S),
        ]

    reasons = weft.spmd(main, 2, backend="emulated")[0]
    for reason, words in zip(reasons, ("H 36", "I 20", "5 experts", "H 1048576", "tiles of 16 columns"), strict=False):
        assert words in reason
    assert reasons[-2:] == [None, None]


def test_a_plan_as_text() -> None:
    plan = Dispatched(dispatch_programs=3, tile=GemmTile(stages=4, block_n=128))
    assert (
        Plan.from_json(plan.to_json()) == plan
        and str(plan) == "Dispatched(tile=GemmTile(block_n=128, stages=4), dispatch_programs=3)"
    )
    with pytest.raises(ValueError, match="side_warps=3 must be a power of two"):
        Dispatched(side_warps=3)


def test_tables_by_hand() -> None:
    """Rank 1 of 2 has one expert. The expert's rows are in the order of their source ranks, starting with rank 1's
    own."""
    tables = expected_tables(torch.tensor([[[1], [0], [1]], [[-1], [1], [1]]]), 1, 1, 8, 2)
    assert tables["route_rows"].tolist() == [2, -1, 3, -1, 0, 1]
    assert tables["sources"].tolist() == [4, 5, 0, 2, -1, -1, -1, -1]
    assert tables["tiles"].tolist() == [[0, 0, 0, 0], [2, 0, 1, 1]]
    assert tables["targets"].tolist() == [1, 1] and tables["offsets"].tolist() == [0, 4]


# -- compiled ----------------------------------------------------------------------------------------------------------

SIZES = {  # hidden, inner, experts, k
    "Qwen3-30B": (2048, 768, 128, 8),
    "GPT-OSS": (2880, 2880, 128, 4),
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "odd": (1032, 520, 16, 3),
    "wide": (16384, 1024, 16, 1),
}
P128 = Dispatched(tile=GemmTile(stages=4, block_n=128))
CASES = {
    "Qwen3-30B": ("swiglu", False, BF, Dispatched(), 8),
    "Qwen3-30B, not flattened": ("swiglu", False, BF, Dispatched(flatten=False), 2),
    "Qwen3-30B, 128 columns": ("swiglu", False, HALF, P128, 4),
    "GPT-OSS": ("gpt_oss", True, BF, Dispatched(), 8),
    "GPT-OSS, float16, 128 columns": ("gpt_oss", True, HALF, P128, 2),
    "DeepSeek-V3": ("swiglu", False, BF, Dispatched(), 8),
    "odd": ("swiglu", True, HALF, Dispatched(), 8),
    "Qwen3-30B, gelu": ("gelu", True, BF, Dispatched(), 2),
    "odd, gelu": ("gelu", True, BF, Dispatched(), 2),
    "Qwen3-30B, two programs of 64 rows": ("swiglu", False, BF, NARROW_64, 2),
    "GPT-OSS, two programs of 32 rows": ("gpt_oss", True, BF, NARROW_32, 4),
    "wide": ("gelu", False, BF, Dispatched(), 4),
}


def launching(name: str) -> Callable[[weft.World], None]:
    activation, biases, dtype, plan, ranks = CASES[name]
    h, i, e, k = SIZES[name.split(",")[0]]

    def main(world: weft.World) -> None:
        layer = Layer(64, e, k, h, i, dtype, activation)
        assert unsupported(world, layer, plan) is None
        block, local = world.backend.scale.interleave, e // ranks
        n = i if activation == "gelu" else -(-i // block) * 2 * block
        shapes = [(local, n, h), (local, h, i), (local, n), (local, h)][: 4 if biases else 2]
        t = 30 + world.rank
        x, ids, weights = torch.zeros(t, h, dtype=dtype), torch.zeros(t, k, dtype=torch.int32), torch.zeros(t, k)
        expert_weights = Weights(*[torch.zeros(1, dtype=dtype).expand(shape) for shape in shapes])
        operands = MoeOperands(x, ids, weights, *expert_weights, shared=x if biases else None)
        prepare_dispatched(world, MoeCall(t, None, layer), plan)(operands, torch.empty_like(x))

    return main


def awaited(name: str) -> Callable[[Any], bool]:
    """Return a predicate for steps that load data written by other programs or ranks."""
    text = {
        "grouped_gemm_in": "tl.load(pointers + k",
        "combine_rows": "tl.load(routed.y +",
        "sum_ranks": "tl.load(outbox",
    }.get(name)
    return lambda step: text is not None and text in step.source


@pytest.mark.gate
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_and_keep_the_rules(name: str, record_property: Callable[[str, object], None]) -> None:
    plan, ranks = CASES[name][3:]
    by_rank = offline.launches(launching(name), ranks)
    kernels: dict[str, tuple[Any, Compiled]] = {}
    for launch in by_rank[0]:
        k = compile_kernel(launch.kernel, launch.args, launch.options)
        kernel = launch.kernel.__name__
        kernels[kernel] = launch, k
        record_property("kernel", (f"moe {name}: {kernel}", k.registers, k.shared))
        offline.fits(launch, k)
        assert ("wgmma.mma_async" in k.ptx) == ("gemm" in kernel and plan.tile.block_m >= 64)
        waits = awaited(kernel)
        assert any(waits(step) for step in ptx.steps_of(k.ptx)) == (
            kernel in ("grouped_gemm_in", "combine_rows", "sum_ranks")
        )
        assert ptx.broken_rules(k.ptx, waits) == [] and ptx.signals_not_by_thread_zero(k.ptx) == []
        assert "fence.proxy.async;" not in k.ptx, "a proxy fence must name global memory"
    ordered = SIZES[name.split(",")[0]][-1] > 4
    assert ("local_first" in kernels) == ordered
    assert len(kernels) == 5 + 3 + ordered, "the layer's kernels and the routes' kernels"
    tiles_come_as_planned(kernels, plan)
    for small, large in (("dispatch_rows", "grouped_gemm_in"), ("combine_rows", "grouped_gemm_out")):
        pair = kernels[small], kernels[large]
        on_an_sm = [(a, k) for a, k in pair for _ in range(a.options.get("per_sm", 1))]
        assert sum(k.shared + 1024 for _, k in on_an_sm) <= 228 << 10, "both kernels must fit on one SM"
        assert sum(-(-k.registers // 8) * 8 * 32 * a.options["num_warps"] for a, k in on_an_sm) <= 65536
    for others in by_rank[1:]:  # kernels read the rank from memory, so that no argument specialises them by rank
        for a, b in zip(by_rank[0], others, strict=True):
            assert offline.specialised(a) == offline.specialised(b)


def tiles_come_as_planned(kernels: dict[str, tuple[Any, Compiled]], plan: Dispatched) -> None:
    """Check that both operands have the planned number of stages, loaded by TMA or in 16-byte words, and that rows
    stored beside the GEMM are in such words."""
    steps = {name: ptx.steps_of(k.ptx) for name, (_, k) in kernels.items()}
    bulk = {
        name: sum("cp.async.bulk.tensor.2d.shared" in s.text for s in kernel_steps)
        for name, kernel_steps in steps.items()
    }
    stages = {name: launch.options["num_stages"] for name, (launch, _) in kernels.items() if "gemm" in name}
    loops = 1 + kernels["grouped_gemm_in"][0].args["s"].HALVES.value  # over whole tiles, and over halves
    assert bulk["grouped_gemm_in"] == loops * stages["grouped_gemm_in"]
    assert bulk["grouped_gemm_out"] == 2 * 2 * stages["grouped_gemm_out"]
    gathered = sum(
        "cp.async.cg.shared" in s.text and "tl.load(pointers + k" in s.source for s in steps["grouped_gemm_in"]
    )
    assert gathered == loops * stages["grouped_gemm_in"] * plan.tile.block_m * plan.tile.block_k * 2 // (
        plan.tile.warps * 32 * 16
    )
    assert kernels["grouped_gemm_in"][1].ttgir.count("tt.flatten") == plan.flatten
    for name in ("dispatch_rows", "combine_rows", "sum_ranks"):
        stores = [
            s
            for s in steps[name]
            if "st.global" in s.text and s.source.startswith(("tl.store(dst +", "tl.store(out +"))
        ]
        assert stores and all("v4.b32" in s.text or "v2.b64" in s.text for s in stores), [str(s) for s in stores][:2]


@pytest.mark.gate
def test_a_missing_wait_is_found_in_the_code() -> None:
    """Without the acquire, the kernel may read the gathered rows too early; the rules must find this in the code."""
    launch = next(a for a in offline.launches(launching("odd"), 8)[0] if a.kernel is kernels.grouped_gemm_in)
    text = compile_kernel(launch.kernel, launch.args, launch.options).ptx
    broken = ptx.broken_rules(text.replace("ld.acquire.sys", "ld.relaxed.sys"), awaited("grouped_gemm_in"))
    assert any(violation.startswith("acquire: ") for violation in broken)


def test_stages_leave_room_for_the_side() -> None:
    """In a layer as wide as Qwen3-30B's, the gated epilogue has 64 or 128 columns, and programs that share its SMs hold
    8 KiB of rows or no rows."""

    def main(world: weft.World) -> None:
        state = plan_state(world, Layer(8, 4, 2, 2048, 24, BF), Dispatched())
        stage_counts = [
            state.gemm(DISPATCH_REGISTERS, columns, sending)["num_stages"]
            for columns, sending in ((64, True), (128, True), (128, False))
        ]
        assert stage_counts == [4, 3, 4]
        assert (
            plan_state(world, state.layer, Dispatched(tile=GemmTile(stages=2))).gemm(DISPATCH_REGISTERS, 64, True)[
                "num_stages"
            ]
            == 2
        )

    weft.spmd(main, 2, backend="emulated")


def test_registers_leave_room_for_the_side() -> None:
    def main(world: weft.World) -> None:
        for plan, dispatch_registers, combine_registers in (
            (Dispatched(), 208, 192),
            (Dispatched(tile=GemmTile(stages=4, warps=4)), 255, 255),
            (NARROW_64, 208, 192),
        ):
            state = plan_state(world, Layer(8, 4, 2, 32, 24, BF), plan)
            assert [state.gemm(side, 128, True)["maxnreg"] for side in (DISPATCH_REGISTERS, COMBINE_REGISTERS)] == [
                dispatch_registers,
                combine_registers,
            ]

    weft.spmd(main, 2, backend="emulated")
