"""Gradients of layers whose experts are split by columns over ranks. The tests cover the saved tensors, operations
between the halves, the benchmark's calls, and the compiled kernels. test_moe_training.py compares the gradients with
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import distance
from tests.emulated.cases_moe import Model, at_random, gradients, routed
from tests.emulated.cases_tensor_parallel import both_halves
from tests.offline import test_offline as offline
from weft import moe
from weft.check import ptx
from weft.check.offline import Compiled, compile_kernel
from weft.ops.moe.call import Kept, Layer
from weft.ops.moe.tensor_parallel import backward, dispatched
from weft.ops.moe.tensor_parallel.call import FirstHalfCall, GatherOperands, ScatterOperands, Split
from weft.plans import DispatchedColumns, Plan
from weft.scale import SMALL_DISPATCHED_COLUMNS

BF, HALF = torch.bfloat16, torch.float16
BOUND = 1.2e-2


def bits(world: weft.World) -> list[torch.Tensor]:
    """Return the results and the gradients of one call, for every choice of saved tensors."""
    layer = Layer(5, 4, 2, 32, 16 * world.size, BF)
    model = Model(world, layer, True, tp_size=world.size)
    operands = routed(0, world.rank, 5, layer, world.size, at_random)
    kept = []
    for keep in (*moe.KEEPS, "rows"):
        y, grads = gradients(world, both_halves, model, operands, keep=keep)
        world.synchronize()
        kept.append([y.clone(), *(t.clone() for t in grads.values() if t is not None)])
    for others in kept[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept[0], others, strict=True))
    return kept[0]


def test_the_bits_do_not_depend_on_the_saved_tensors_or_the_order() -> None:
    first_run, *others = [weft.spmd(bits, 2, backend="emulated", seed=seed, preempt=0.1) for seed in range(2)]
    for run in others:
        for a, b in zip(first_run, run, strict=True):
            assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def between_and_twice(world: weft.World, plan: str | Plan) -> float:
    """Scale the first half's result, which is not differentiable on its own, and pass it to two second halves with the
    same rows."""
    layer = Layer(9, 4, 2, 32, 16 * world.size, BF)
    model = Model(world, layer, False, tp_size=world.size)
    x, ids, weights, _, dy = routed(0, world.rank, 9, layer, world.size, at_random)
    w, common = model.local_weights, dict(world=world, plan=plan)
    errors = []
    leaves = [t.clone().requires_grad_() for t in (x, weights, w.w13, w.w2)]
    grads_by_halves = []
    for halves in (1, 2):
        hidden, routes = weft.all_gather_grouped_matmul(
            leaves[0], ids, leaves[1], leaves[2], inner=model.inner, **common
        )
        ys = [
            weft.grouped_matmul_reduce_scatter(hidden * (2.0 / halves), routes, ids, leaves[3], **common)
            for _ in range(halves)
        ]
        grads_by_halves.append([t.clone() for t in torch.autograd.grad(ys, leaves, [dy] * halves)])
        world.synchronize()
    for a, b in zip(*grads_by_halves, strict=True):
        errors.append(distance(a, b))
    return max(errors)


@pytest.mark.parametrize("plan", ["sequential", "dispatched"])
def test_an_operation_between_the_halves(plan: str) -> None:
    errors = weft.spmd(lambda world: between_and_twice(world, plan), 2, backend="emulated")
    assert max(errors) < BOUND


@pytest.mark.parametrize("seed", [1, 2])
def test_two_gemm_programs_an_sm(seed: int) -> None:
    """In a backward pass, a launch of one program per SM receives the rows. The end of this launch is counted together
    with the ends of the GEMM's programs."""
    plan = replace(SMALL_DISPATCHED_COLUMNS, per_sm=2)
    errors = weft.spmd(lambda world: between_and_twice(world, plan), 2, backend="emulated", seed=seed)
    assert max(errors) < BOUND


def test_the_calls_that_the_benchmark_times(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.measure import moe_training as bench

    def rank(world: weft.World) -> None:
        it = bench.InParts(world, bench.Model(32, 16 * world.size, 4, 2), 20)
        y, leaves = it.weft("rows")
        grads, grads_again = (torch.autograd.grad(y, leaves, it.dy, retain_graph=True) for _ in range(2))
        world.synchronize()
        assert all(torch.equal(a, b) and a.norm() > 0 for a, b in zip(grads, grads_again, strict=True))
        expected, (x, weights, *_) = it.libraries()
        of_x, of_weights, *_ = torch.autograd.grad(expected, (x, weights), it.dy)
        assert max(distance(y, expected), distance(grads[0], of_x), distance(grads[1], of_weights)) < BOUND

    weft.spmd(rank, 2, backend="emulated")


# -- compiled ----------------------------------------------------------------------------------------------------------

CASES = {  # hidden, inner of a rank, experts, k, ranks, activation, biases, dtype, kept
    "Qwen3-30B": (2048, 384, 4, 8, 2, "swiglu", False, BF, "rows"),
    "Mixtral": (4096, 7168, 2, 2, 2, "swiglu", False, BF, "activation"),
    "GPT-OSS": (2880, 360, 4, 4, 8, "gpt_oss", True, BF, "nothing"),
    "odd": (1032, 520, 4, 3, 2, "gelu", True, HALF, "rows"),
    "odd, activations kept": (1032, 520, 4, 3, 4, "gelu", True, HALF, "activation"),
    "GPT-OSS, activations kept": (2880, 360, 4, 4, 4, "gpt_oss", True, BF, "activation"),
}
NEW = {"activation_gradient", "activation_backward", "grouped_wgrad", "row_sums", "place_rows", "keep_shards"}


def launching(name: str) -> Callable[[weft.World], None]:
    h, i, e, k, _, activation, biases, dtype, keep = CASES[name]

    def main(world: weft.World) -> None:
        block = world.backend.scale.interleave
        n, t = i if activation == "gelu" else -(-i // block) * 2 * block, 30 + world.rank
        layer = Split(64, e, k, h, i, dtype, activation, tp_size=world.size)

        def held(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

        rows = layer.rows(world)
        x, ids, hidden = held(t, h), held(t, k, dtype=torch.int32), held(rows, i)
        w13, w2 = held(e, n, h), held(e, h, i)
        b13, b2 = (held(e, n), held(e, h)) if biases else (None, None)
        call = FirstHalfCall(tuple(30 + r for r in range(world.size)), layer, keep)
        operands, plan = GatherOperands(x, ids, held(t, k, dtype=torch.float32), w13, b13), DispatchedColumns()
        routes, *kept = dispatched.run_gather(world, call, plan, operands, hidden)
        backward.second_half(world, layer, plan, x, ScatterOperands(hidden, routes, ids, w2, b2), True)
        backward.first_half(world, layer, hidden, operands, routes, plan, Kept(*kept), True, True)

    return main


AWAITED = {"place_rows": "tl.load(inbox", "combine_rows": "tl.load(routed.y +", "sum_ranks": "tl.load(outbox", "grouped_gemm_in": "tl.load(pointers + k"}  # fmt: skip


@pytest.mark.gate
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_and_keep_the_rules(name: str, record_property: Callable[[str, object], None]) -> None:
    by_rank = offline.launches(launching(name), CASES[name][4])
    kernels: dict[str, tuple[Any, Compiled]] = {}
    for launch in by_rank[0]:
        kernel = launch.kernel.__name__
        if kernel in ("share", "count_routes", "place_routes"):
            continue  # test_offline.py checks these
        k = compile_kernel(launch.kernel, launch.args, launch.options)
        kernels[kernel] = launch, k
        record_property("kernel", (f"moe parts backward {name}: {kernel}", k.registers, k.shared))
        offline.fits(launch, k)
        assert ("wgmma.mma_async" in k.ptx) == (kernel in ("grouped_gemm_in", "grouped_gemm_out", "grouped_wgrad"))

        text = AWAITED.get(kernel) if launch.args.get("ARRIVALS") != 0 else None  # 0 stands for saved rows

        def waits(step: Any, text: str | None = text) -> bool:
            return text is not None and text in step.source

        assert ptx.broken_rules(k.ptx, waits) == [] and ptx.signals_not_by_thread_zero(k.ptx) == []
    biases, keep = CASES[name][6], CASES[name][8]
    missing = (set() if biases else {"row_sums"}) | ({"keep_shards"} if keep == "nothing" else set())
    assert NEW - missing <= set(kernels)
    pairs = [("combine_rows", "grouped_gemm_out"), ("combine_rows", "grouped_wgrad"), ("push_shard", "place_rows")]
    pairs += [("activation_backward", "grouped_wgrad"), ("activation_gradient", "grouped_gemm_out")]
    for pair in [(kernels[small], kernels[large]) for small, large in pairs]:
        assert sum(k.shared + 1024 for _, k in pair) <= 228 << 10, "both kernels must fit on one SM"
        assert sum(-(-k.registers // 8) * 8 * 32 * a.options["num_warps"] for a, k in pair) <= 65536
    for others in by_rank[1:]:
        for a, b in zip(by_rank[0], others, strict=True):
            if a.kernel.__name__ != "share":
                assert offline.specialised(a) == offline.specialised(b)
