"""An MoE layer in one launch on emulated ranks. The layer's results are compared with torch and, bit for bit, with the
plan of several launches; its kernel is compiled too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases_expert_parallel import steps
from tests.emulated.cases_moe import layer_case
from tests.offline import test_offline as offline
from weft.check import ptx
from weft.check.offline import compile_kernel
from weft.ops.moe.call import Layer, MoeCall, MoeOperands, Weights
from weft.ops.moe.expert_parallel import fused
from weft.ops.moe.expert_parallel.dispatched import make_workspace, memory, ordered_routes, tables_of
from weft.plans import FusedMoe, GemmTile
from weft.scale import SMALL_MOE

BF, HALF = torch.bfloat16, torch.float16
S = SMALL_MOE


def test_a_kernel_with_time_stamps_computes_the_same() -> None:
    """The emulator's clock does not advance, so this test only checks that time stamps do not change the kernel's
    results."""

    def rank(world: weft.World) -> float:
        times = fused.stamped(world, world.sm_count)
        error = layer_case(world, steps, plan=S, calls=2)
        assert times.shape == (world.sm_count, 6) and times is fused.stamped(world, world.sm_count)
        return error

    assert max(weft.spmd(rank, 2, backend="emulated")) < 5e-3


def test_calls_that_the_plan_does_not_support() -> None:
    def rank(world: weft.World) -> None:
        layer = Layer(8, 4, 2, 32, 24, BF)
        assert fused.unsupported(world, layer, S) is None
        assert fused.unsupported(world, layer, replace(S, copy_programs=world.sm_count)) is None
        assert "are more than" in str(fused.unsupported(world, layer, replace(S, copy_programs=world.sm_count + 1)))
        assert "H 36" in str(fused.unsupported(world, replace(layer, hidden=36), S))

    weft.spmd(rank, 2, backend="emulated")


@pytest.mark.parametrize("k", [2, 5])
def test_memory_is_that_of_a_call(k: int) -> None:
    """Tables of local routes are needed only if a token has more routes than are added together."""

    def rank(world: weft.World) -> None:
        layer = Layer(8, 16, k, 32, 24, BF, max_rows=21)
        builder, tables, _ = tables_of(world, layer, S.tile.block_m)
        workspace, routes = make_workspace(world, layer, builder.rows), builder.routes
        expected = memory(world, layer, S.tile.block_m)
        shared = (workspace.inbox, workspace.outbox, routes.shared_ids, routes.shared_weights)
        assert sum(t.local.nbytes for t in shared) == expected.symmetric
        order, ordered = ordered_routes(world, layer, S.tile.block_m, builder.rows)
        built = [tables.route_rows, tables.sources, tables.tiles]
        if k > 4:
            assert order is not None and ordered.counts is not None
            built += ordered.route_rows, ordered.weights, ordered.counts
        assert sum(t.nbytes for t in built) == expected.tables
        assert workspace.hidden.nbytes + workspace.y.nbytes == expected.scratch

    weft.spmd(rank, 2, backend="emulated")


# -- compiled ----------------------------------------------------------------------------------------------------------

ONE_AN_SM = FusedMoe(tile=GemmTile(), per_sm=1, copy_programs=16, copy_stages=3)
CASES = {  # hidden, inner, experts, k; activation, biases and a shared expert, ...
    "Qwen3-30B": ((2048, 768, 128, 8), "swiglu", False, BF, FusedMoe(), 2),
    "Qwen3-30B, 1 an SM": ((2048, 768, 128, 8), "swiglu", False, HALF, ONE_AN_SM, 4),
    "GPT-OSS": ((2880, 2880, 128, 4), "gpt_oss", True, BF, FusedMoe(), 4),
    "DeepSeek-V3": ((7168, 2048, 256, 8), "swiglu", False, BF, FusedMoe(), 8),
    "odd": ((1032, 520, 16, 3), "swiglu", True, HALF, FusedMoe(), 8),
    "gelu": ((2048, 2048, 32, 2), "gelu", False, BF, FusedMoe(), 4),
}


def launching(name: str) -> Callable[[weft.World], None]:
    (h, i, e, k), activation, biases, dtype, plan, ranks = CASES[name]

    def main(world: weft.World) -> None:
        layer = Layer(64, e, k, h, i, dtype, activation)
        assert fused.unsupported(world, layer, plan) is None
        block, local = world.backend.scale.interleave, e // ranks
        n = i if activation == "gelu" else -(-i // block) * 2 * block
        shapes = [(local, n, h), (local, h, i), (local, n), (local, h)][: 4 if biases else 2]
        t = 30 + world.rank
        x, ids, weights = torch.zeros(t, h, dtype=dtype), torch.zeros(t, k, dtype=torch.int32), torch.zeros(t, k)
        expert_weights = Weights(*[torch.zeros(1, dtype=dtype).expand(shape) for shape in shapes])
        shared, out = x if biases else None, torch.empty_like(x)
        operands = MoeOperands(x, ids, weights, *expert_weights, shared=shared)
        fused.prepare_fused(world, MoeCall(t, None, layer), plan)(operands, out)

    return main


def awaited(step: Any) -> bool:
    """Return whether the step loads data that other programs or ranks write."""
    return any(text in step.source for text in ("tl.load(pointers + k", "tl.load(routed.y +", "tl.load(outbox"))


@pytest.mark.gate
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_compiles_and_keeps_the_rules(name: str, record_property: Callable[[str, object], None]) -> None:
    plan, ranks = CASES[name][-2:]
    by_rank = offline.launches(launching(name), ranks)
    launch = by_rank[0][-1]  # the launch before this kernel compares calls
    k = compile_kernel(launch.kernel, launch.args, launch.options)
    record_property("kernel", (f"moe fused {name}", k.registers, k.shared))
    offline.fits(launch, k)
    assert "wgmma.mma_async" in k.ptx and any(awaited(step) for step in ptx.steps_of(k.ptx))
    assert ptx.broken_rules(k.ptx, awaited) == [] and ptx.signals_not_by_thread_zero(k.ptx) == []
    assert "fence.proxy.async;" not in k.ptx, "a proxy fence must name global memory"
    dispatched, tile = ptx.steps_of(k.ptx), plan.tile
    gathered = sum("cp.async.cg.shared" in s.text and "tl.load(pointers + k" in s.source for s in dispatched)
    assert gathered == tile.stages * tile.block_m * tile.block_k * 2 // (tile.warps * 32 * 16)
    assert sum("cp.async.bulk.tensor.2d.shared" in s.text for s in dispatched) == 3 * tile.stages
    for others in by_rank[1:]:
        assert offline.specialised(launch) == offline.specialised(others[-1])


@pytest.mark.gate
def test_a_missing_wait_is_found_in_the_code() -> None:
    launch = offline.launches(launching("odd"), 8)[0][-1]
    text = compile_kernel(launch.kernel, launch.args, launch.options).ptx
    broken = ptx.broken_rules(text.replace("ld.acquire.", "ld.relaxed."), awaited)
    assert any(violation.startswith("acquire: ") for violation in broken)
