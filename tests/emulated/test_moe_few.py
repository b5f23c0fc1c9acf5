"""An MoE layer for few tokens, without tables, on emulated ranks. The layer's results are compared with torch and, bit
for bit, with the plan of several launches; its kernels are compiled too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import changed, draw
from tests.emulated.cases_moe import Model, some_nowhere
from tests.offline import test_offline as offline
from weft import moe
from weft.check import ptx
from weft.check.offline import compile_kernel
from weft.ops.moe.call import Layer, MoeCall, MoeOperands, Weights
from weft.ops.moe.expert_parallel import low_latency
from weft.plans import LowLatency
from weft.scale import SMALL_DISPATCHED, SMALL_LOW_LATENCY, SMALL_MOE

BF, HALF = torch.bfloat16, torch.float16
S = SMALL_LOW_LATENCY


def test_the_bits_of_the_other_plans() -> None:
    """The plans for few tokens, with several launches and with one launch, alternate. The two plans share memory and
    counters, and give the same bits."""

    def rank(world: weft.World) -> None:
        layer = Layer(20, 6, 3, 40, 24, BF)
        w, kept = Model(world, layer, True).local_weights, []
        for call in range(3):
            x, weights = draw(10 * call + world.rank, 20, 40), draw(call + 7, 20, 3, dtype=torch.float32).abs()
            ids = some_nowhere(call, world.rank, 20, layer, world.size).int()
            args, shared = (x, ids, weights, w.w13, w.w2), draw(5 + world.rank, 20, 40)
            for plan in (S, SMALL_DISPATCHED, S, SMALL_MOE):
                kept.append(moe.moe(*args, b13=w.b13, b2=w.b2, shared=shared, world=world, plan=plan).clone())
                world.synchronize()
        assert all(
            torch.equal(a, b) for i in range(0, 12, 4) for a, b in zip(kept[i:], kept[i + 1 : i + 4], strict=False)
        )

    weft.spmd(rank, 3, backend="emulated")


def test_calls_that_the_plan_does_not_support() -> None:
    def rank(world: weft.World) -> None:
        layer = Layer(8, 4, 2, 32, 24, BF)
        assert low_latency.unsupported(world, layer, S) is None
        assert "more than 8192" in str(low_latency.unsupported(world, replace(layer, max_tokens_per_rank=4096), S))
        assert "tiles of 64 columns" in str(low_latency.unsupported(world, layer, changed(S, block_n=64)))
        assert "I 20" in str(low_latency.unsupported(world, replace(layer, inner=20), S))

    weft.spmd(rank, 2, backend="emulated")


# -- compiled ----------------------------------------------------------------------------------------------------------

CASES = {  # hidden, inner, experts, k; activation, biases and a shared expert, ...
    "Qwen3-30B": ((2048, 768, 128, 8), "swiglu", False, BF, LowLatency(), 2),
    "GPT-OSS": ((2880, 2880, 128, 4), "gpt_oss", True, BF, LowLatency(), 4),
    "DeepSeek-V3": ((7168, 2048, 256, 8), "swiglu", False, HALF, changed(LowLatency(), block_m=32), 8),
    "odd": ((1032, 520, 16, 3), "gelu", True, HALF, changed(LowLatency(), stages=3), 8),
}


def launching(name: str) -> Callable[[weft.World], None]:
    (h, i, e, k), activation, biases, dtype, plan, ranks = CASES[name]

    def main(world: weft.World) -> None:
        layer = Layer(32, e, k, h, i, dtype, activation)
        assert low_latency.unsupported(world, layer, plan) is None
        block, local = world.backend.scale.interleave, e // ranks
        n = i if activation == "gelu" else -(-i // block) * 2 * block
        shapes = [(local, n, h), (local, h, i), (local, n), (local, h)][: 4 if biases else 2]
        t = 10 + world.rank
        x, ids, weights = torch.zeros(t, h, dtype=dtype), torch.zeros(t, k, dtype=torch.int32), torch.zeros(t, k)
        expert_weights = Weights(*[torch.zeros(1, dtype=dtype).expand(shape) for shape in shapes])
        shared, out = x if biases else None, torch.empty_like(x)
        received = torch.zeros(local, dtype=torch.int32) if biases else None
        operands = MoeOperands(x, ids, weights, *expert_weights, shared=shared, received=received)
        low_latency.prepare_low_latency(world, MoeCall(t, None, layer), plan)(operands, out)

    return main


def awaited(step: Any) -> bool:
    """Return whether the step loads data that other ranks write. The first GEMM's rows are excluded, since the same
    launch waits for them."""
    return any(text in step.source for text in ("tl.load(pointers + k", "tl.load(outbox", "tl.load(id_addresses"))


@pytest.mark.gate
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_and_keep_the_rules(name: str, record_property: Callable[[str, object], None]) -> None:
    plan, ranks = CASES[name][-2:]
    by_rank = offline.launches(launching(name), ranks)
    for i, launch in enumerate(by_rank[0]):
        k = compile_kernel(launch.kernel, launch.args, launch.options)
        record_property("kernel", (f"moe few {name} {i}", k.registers, k.shared))
        offline.fits(launch, k)
        assert ("wgmma.mma_async" in k.ptx) == (plan.tile.block_m >= 64 and i < 2)
        assert ("mma.sync" in k.ptx) == (plan.tile.block_m < 64 and i < 2)
        if i != 1:  # the second GEMM reads rows and ids from the previous launch
            assert any(awaited(step) for step in ptx.steps_of(k.ptx))
            assert ptx.broken_rules(k.ptx, awaited) == []
        assert ptx.signals_not_by_thread_zero(k.ptx) == [] and "fence.proxy.async;" not in k.ptx
        for others in by_rank[1:]:
            assert offline.specialised(launch) == offline.specialised(others[i])
    assert len(by_rank[0]) == 3


@pytest.mark.gate
def test_a_missing_wait_is_found_in_the_code() -> None:
    launch = offline.launches(launching("Qwen3-30B"), 2)[0][0]
    text = compile_kernel(launch.kernel, launch.args, launch.options).ptx
    broken = ptx.broken_rules(text.replace("ld.acquire.sys", "ld.relaxed.sys"), awaited)
    assert any(violation.startswith("acquire: ") for violation in broken)
