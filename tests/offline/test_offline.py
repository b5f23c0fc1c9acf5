"""Offline gate: every kernel, as the ops launch it, compiles for sm_90a without a GPU and obeys the protocol's rules.

The arguments are those that an op passes to `World.launch` on an emulated World of 2, 4 or 8 ranks with as many SMs as
an H200; no kernel runs. The gate checks in the PTX (weft.check.ptx has the rules that follow paths) that kernels have
no spills and fit on an SM, that GEMMs use tensor cores, the depth of the pulling pipelines, and the order of stores and
releases and of acquires and loads. All ranks must launch the same kernel.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
import weft.planner
from tests.emulated.cases import changed
from tests.emulated.cases_fp8 import factors
from tests.emulated.cases_ops import FUSED, OPS
from tests.gpu.gpu_main import SECOND
from weft import World
from weft.architectures import HOPPER
from weft.check import ptx
from weft.check.offline import Compiled, OfflineDriver, compile_kernel, standing_in
from weft.check.ptx import (
    Instruction,
    Which,
    signals_not_by_thread_zero,
    signals_outside_first_warp,
    steps_of,
)
from weft.compute.gemm import gemm_tile, matmul, whole_matmul
from weft.compute.scaled_gemm import add_step, scaled_gemm_tile, scaled_matmul
from weft.compute.signaled_gemm import signaled_gemm
from weft.lang.channel import end_call
from weft.lang.mapping import balanced_rows
from weft.op import REGISTRY
from weft.ops import activation
from weft.ops.all_gather_matmul.kernels import all_gather_gemm, copied_gemm, pull_chunks, pull_scales
from weft.ops.all_gather_matmul.op import all_gather_swiglu
from weft.ops.all_reduce.kernels import (
    ABSENT,
    load_row,
    multicast_shot,
    push_rows,
    store_scales,
    store_scales_everywhere,
    two_shot,
)
from weft.ops.all_reduce.low_latency_kernels import one_shot, two_shot_low_latency
from weft.ops.matmul import INVARIANT_TILES, multiply_with_tile
from weft.ops.matmul_reduce.kernels import gather_tile, gemm_reduce, sum_half_tiles
from weft.ops.moe.routing.route_tables import TableSizes, builder_of, run_builder, share_routes
from weft.ops.moe.routing.router import gate
from weft.ops.rotary import rotary
from weft.ops.scaled_gemm import PROMOTED, WIDE
from weft.ops.tiles import with_shape_tiles
from weft.planner import table
from weft.plans import (
    TWO_AN_SM,
    Decomposed,
    Fused,
    FusedGather,
    FusedGatherByCopies,
    GemmTile,
    Multicast,
    OneShot,
    Plan,
    Sequential,
    Signaled,
    TwoShotCounted,
    TwoShotLowLatency,
    TwoShotPull,
    TwoShotPush,
)
from weft.torch_library import Backward
from weft.transport.low_latency_kernels import gather_low_latency, scatter_low_latency

pytestmark = pytest.mark.gate

SMS = 132
BF, HALF = torch.bfloat16, torch.float16


# -- the launches of the ops -------------------------------------------------------------------------------------------


@dataclass
class Launch:
    kernel: Any
    grid: int
    args: dict[str, Any]
    options: dict[str, Any]


def launches(fn: Callable[[World], Any], ranks: int, capability: int = HOPPER) -> list[list[Launch]]:
    """Return the launches that every rank makes in `fn`, on emulated ranks that report this capability; no kernel
    runs."""
    out: list[list[Launch]] = [[] for _ in range(ranks)]

    def main(world: World) -> None:
        backend: Any = world.backend
        backend.capability = capability

        def launch(kernel: Any, grid: int, args: Any, options: dict[str, Any], stream: Any, *key: Any) -> None:
            out[world.rank].append(Launch(kernel, grid, args() if callable(args) else args, options))

        backend.launch = launch
        for name in "copy call signal wait_event all_gather reduce_scatter all_reduce all_to_all".split():
            setattr(backend, name, lambda *a, **k: None)
        fn(world)

    weft.spmd(main, ranks, backend="emulated", sm_count=SMS)
    return out


def call(
    op: str, plan: Plan, m: int = 128, n: int = 1024, k: int = 512, *, bias: bool = False, dtype: torch.dtype = BF,
    uneven: bool = False, gated: int = 0, transposed: bool = False, scaling: str = "", fast: bool = False,
) -> Callable[[World], Any]:  # fmt: skip
    """`m` is the number of rows on a rank. With `transposed`, the weight is stored as [K, N]. `scaling` is the scaling
    of 8-bit operands."""

    def fn(world: World) -> None:
        rows = [m + 40 * (r == 0) for r in range(world.size)] if uneven else [m] * world.size
        gather = op == "all_gather_matmul"
        x = torch.zeros(rows[world.rank] if gather else sum(rows), k, dtype=dtype)
        w, b = torch.zeros(n, k, dtype=dtype), torch.zeros(n, dtype=dtype) if bias else None
        w = w.t().contiguous().t() if transposed else w
        options: dict[str, Any] = {}
        if scaling:
            x, w, xs, ws = factors(1, len(x), n, k, scaling, world.device)
            x, w = weft.ScaledTensor(x, xs, scaling), weft.ScaledTensor(w, ws, scaling)
            options = dict(out_dtype=dtype, use_fast_accum=fast)
        if gated:
            all_gather_swiglu(x, w, gated, world=world, plan=plan, rows=None)
        elif gather and uneven:
            weft.all_gather_matmul_with_gathered(x, w, b, world=world, plan=plan, rows=rows, **options)
        else:
            getattr(weft, op)(x, w, b, world=world, plan=plan, **options)

    return fn


def shipped() -> list[tuple[str, int, Plan]]:
    """Return every (op, world, plan) of the measured tables."""
    plans = {(r.op, r.world, r.plan) for gpu in table.models() for r in table.load(gpu)}
    return sorted((f for f in plans if f[2] != Sequential()), key=str)


F = FusedGather()
AG, RS, AR = OPS
PLANS: dict[str, set[Fused]] = {op: {FUSED[op], SECOND[op]} for op in OPS}
PLANS[AG].add(TWO_AN_SM)
CASES: dict[str, tuple[Callable[[World], Any], int]] = {}
for op in OPS:
    for i, plan in enumerate(sorted(PLANS[op], key=str)):
        for ranks in (2, 4, 8) if plan == FUSED[op] else (8,):
            CASES[f"{op} x{ranks} plan {i}"] = call(op, plan), ranks
            if isinstance(plan, FusedGather):  # copy engines move only even shards
                CASES[f"{op} x{ranks} plan {i} uneven"] = call(op, plan, uneven=True), ranks
        CASES[f"{op} x8 plan {i} bias float16"] = call(op, plan, bias=True, dtype=HALF), 8
        CASES[f"{op} x8 plan {i} odd sizes"] = call(op, plan, 33, 1032, 520, bias=True), 8
        CASES[f"{op} x8 plan {i} one row"] = call(op, plan, 1), 8
for op in (AG, RS):
    CASES[f"{op} x4 part tiles"] = call(op, FUSED[op], 160), 4
for i, plan in enumerate((F, FusedGatherByCopies())):  # few tiles in the last round, so that programs compute halves
    CASES[f"{AG} x2 halves of tiles {i}"] = call(AG, plan, 1024, 2304), 2
    CASES[f"{AG} x2 halves of tiles {i}, turned"] = call(AG, plan, 1024, 2304, transposed=True), 2
    CASES[f"{AG} x2 halves of tiles {i}, bias float16"] = call(AG, plan, 1024, 2304, bias=True, dtype=HALF), 2
    CASES[f"{AG} x8 halves of tiles {i}, odd sizes"] = call(AG, plan, 250, 2312, 520, bias=True), 8
    CASES[f"{AG} x2 halves of tiles {i}, gated"] = call(AG, plan, 1024, gated=1152), 2
CASES[f"{AG} x8 uneven bias"] = call(AG, F, uneven=True, bias=True, k=520), 8
CASES[f"{AG} x8 short rows"] = call(AG, F, k=264, n=264), 8
CASES[f"{AG} x8 gated"] = call(AG, F, gated=512), 8
CASES[f"{AG} x8 gated, uneven"] = call(AG, F, 100, gated=512), 8
CASES[f"{AG} x8 gated by half tiles"] = call(AG, changed(F, block_n=128), gated=512), 8
for op in (AG, RS):  # for the gradients
    for i, plan in enumerate(sorted(PLANS[op], key=str)):
        CASES[f"{op} x2 plan {i} turned"] = call(op, plan, transposed=True), 2
        CASES[f"{op} x8 plan {i} turned, odd sizes"] = call(op, plan, 33, 1032, 520, dtype=HALF, transposed=True), 8
HALVED = [96], 256 * 80  # the number of rows on a rank and the number of columns, for which tiles of 64 rows are faster
for op in OPS:
    signaled = {AG: [], RS: [Signaled(), Signaled(ctas=4, copies=True)], AR: [Signaled()]}[op]
    for i, plan in enumerate((*REGISTRY[op].variants[: 3 if op == AG else 1], *signaled)):
        half = with_shape_tiles(plan, HALVED[0] * 2, HALVED[1], SMS)
        m = 64 if plan == Signaled(ctas=4, copies=True) else 33  # this plan moves whole tiles
        CASES[f"{op} x2 half tiles {i}"] = call(op, half), 2
        CASES[f"{op} x2 half tiles {i}, turned"] = call(op, half, 64, transposed=True), 2
        CASES[f"{op} x2 half tiles {i}, odd sizes"] = call(op, half, m, 1032, 520, bias=True, dtype=HALF), 2
half = with_shape_tiles(F, HALVED[0] * 2, HALVED[1], SMS)
CASES[f"{AG} x2 half tiles, gated"] = call(AG, half, gated=512), 2
CASES[f"{AG} x2 half tiles, uneven"] = call(AG, half, uneven=True), 2
for split in (2, 4):
    CASES[f"{AG} x8 split {split}"] = call(AG, replace(F, split=split)), 8
for op in (AG, RS):
    for ranks in (2, 4, 8):
        CASES[f"{op} x{ranks} one shot"] = call(op, OneShot()), ranks
    CASES[f"{op} x8 one shot, bias float16"] = call(op, OneShot(), 33, 1032, 520, bias=True, dtype=HALF), 8
    CASES[f"{op} x8 one shot, one row"] = call(op, OneShot(), 1, 8, 8), 8
    CASES[f"{op} x8 one shot, large"] = call(op, OneShot(warps=16), 64, 8192, 8192), 8
CASES[f"{AG} x8 one shot, uneven"] = call(AG, OneShot(), uneven=True), 8
CASES[f"{AR} x8 one shot"] = call(AR, OneShot(), bias=True), 8
CASES[f"{AR} x8 two shots"] = call(AR, TwoShotLowLatency()), 8
CASES["decomposed x8"] = call(RS, Decomposed(), bias=True), 8
CASES["decomposed x8 odd sizes"] = call(RS, Decomposed(), 1, 1, 8), 8
CASES["decomposed x2 float16"] = call(RS, Decomposed(), 3, 40, 8, dtype=HALF), 2
CASES["decomposed, gated"] = call(AG, Decomposed(), gated=512), 4
for scaling, fast in (("tensor", True), ("row", True), ("row", False), ("block", False)):
    for op in OPS:
        for i, plan in enumerate((FUSED[op], *((TWO_AN_SM, FusedGatherByCopies()) if op == AG else ()))):
            name = f"{op} 8 bits by {scaling}{'' if fast else ', promoted'}, plan {i}"
            CASES[f"{name}, x8"] = call(op, plan, scaling=scaling, fast=fast), 8
            CASES[f"{name}, x2 odd sizes"] = (
                call(op, plan, 33, 1032, 1152, bias=True, dtype=HALF, scaling=scaling, fast=fast), 2,
            )  # fmt: skip
            if op == AG and i == 0:
                CASES[f"{name}, x4 uneven"] = call(op, plan, uneven=True, scaling=scaling, fast=fast), 4
    CASES[f"{AG} 8 bits by {scaling}, one shot, {fast}"] = call(AG, OneShot(), 33, scaling=scaling, fast=fast), 4
CASES["World.barrier"] = lambda world: world.barrier(), 8


def norm(
    plan: Plan, m: int = 40, h: int = 8192, *, dtype: torch.dtype = BF, recipe: str = "", sum_only: bool = False,
    full: bool = False, **options: Any,
) -> Callable[[World], Any]:  # fmt: skip
    def fn(world: World) -> None:
        x, w = torch.zeros(m, h, dtype=dtype), torch.zeros(h, dtype=dtype)
        if sum_only:
            weft.all_reduce(x, world=world, plan=plan)
            return
        rows = m if full else balanced_rows(m, world.size)[world.rank]
        residual = torch.zeros(rows, h, dtype=dtype)
        if recipe:
            scale = torch.ones(1) if recipe == "tensor" else None
            options.update(scale=scale)
            weft.all_reduce_rms_norm_quantized(
                x, residual, w, recipe, full_residual=full, world=world, plan=plan, **options
            )
        else:
            weft.all_reduce_rms_norm(x, residual, w, full_residual=full, world=world, plan=plan, **options)

    return fn


for name, plan in {
    "one shot": OneShot(),
    "two shots": TwoShotPush(),
    "two shots, posted": TwoShotLowLatency(),
    "two shots, spread": TwoShotPush(warps=8, spread=True),
    "two shots, pulled": TwoShotPull(),
    "two shots, pulled by few": TwoShotPull(programs=16),
    "sequential": Sequential(),
    "decomposed": Decomposed(),
    "multicast": Multicast(),
}.items():
    for ranks in (2, 4, 8) if name in ("one shot", "two shots", "two shots, posted", "two shots, pulled") else (8,):
        CASES[f"all-reduce + norm x{ranks}, {name}"] = norm(plan), ranks
    if plan != Sequential():
        CASES[f"all-reduce x8, {name}"] = norm(plan, sum_only=True), 8
    CASES[f"all-reduce + norm x8, {name}, full"] = norm(plan, 5, full=True, norm="layer"), 8
    CASES[f"all-reduce + norm x8, {name}, 5120 float16 fp8"] = norm(plan, 40, 5120, dtype=HALF, recipe="tensor"), 8
    if name != "multicast":
        CASES[f"all-reduce + norm x8, {name}, by row"] = norm(plan, 40, 8192, recipe="row"), 8
        CASES[f"all-reduce + norm x8, {name}, by block"] = norm(plan, 40, 7168, recipe="block"), 8
    CASES[f"all-reduce + norm x8, {name}, 16384 float32"] = norm(plan, 40, 16384, dtype=torch.float32), 8
    CASES[f"all-reduce + norm x8, {name}, 1024"] = norm(plan, 1, 1024), 8
    if isinstance(plan, TwoShotCounted):
        CASES[f"all-reduce + norm x2, {name}, full, by row"] = norm(plan, 40, 8192, full=True, recipe="row"), 2
        CASES[f"all-reduce + norm x2, {name}, 5120 fp8"] = (
            norm(plan, 40, 5120, dtype=HALF, recipe="tensor", norm="layer"),
            2,
        )
for i, (op, ranks, plan) in enumerate(shipped()):
    fn = norm(plan, sum_only=op == "all_reduce") if op.startswith("all_reduce") else call(op, plan)
    CASES[f"table {i}: {op} x{ranks}"] = fn, ranks


def to_ranks(plan: Plan, n: int = 1024, k: int = 512, bias: bool = False, dtype: torch.dtype = BF) -> Any:
    def fn(world: World) -> None:
        m = 300 + 16 * world.rank
        x, w, b = torch.zeros(m, k, dtype=dtype), torch.zeros(n, k, dtype=dtype), torch.zeros(n, dtype=dtype)
        to = [(i * i) % world.size for i in range(m)]
        weft.matmul_all_to_all(x, w, b if bias else None, destinations=to, world=world, plan=plan)

    return fn


for i, plan in enumerate(
    (Signaled(), Signaled(tile=GemmTile(block_n=128, warps=4, stages=4)), Signaled(ctas=4, copies=True))
):
    CASES[f"to ranks x8 signaled {i}"] = to_ranks(plan), 8
    CASES[f"to ranks x2 signaled {i} bias float16"] = to_ranks(plan, 1032, 520, True, HALF), 2
for op in (RS, AR):
    by_copies = [Signaled(ctas=4, copies=True)] if op == RS else []
    for i, plan in enumerate((Signaled(), Signaled(tile=GemmTile(block_n=128, warps=4, stages=4)), *by_copies)):
        for ranks in (2, 8) if i == 0 else (8,):
            CASES[f"{op} x{ranks} signaled {i}"] = call(op, plan), ranks
        CASES[f"{op} x8 signaled {i} bias float16"] = call(op, plan, bias=True, dtype=HALF), 8
        if not plan.copies:  # copy engines cannot move these sizes
            CASES[f"{op} x8 signaled {i} odd sizes"] = call(op, plan, 33, 1031, 520, bias=True), 8
    CASES[f"{op} x8 signaled, one row"] = call(op, Signaled(), 1), 8


def silu(world: World) -> None:
    for rows, n in ((128, 512), (1, 1), (17, 40)):
        x = torch.zeros(rows, 2 * n, dtype=BF)
        activation.silu_mul_blocks(x, n, n, world)
        op, options = activation.SILU_MUL, (n, n)
        call = op.check(world, op.typed((x,)), options)
        dy = torch.zeros(rows, n, dtype=BF)
        op.backward(world, Backward((x,), (dy,), [tuple(x.shape)], [True], options, call, Sequential()))


def rotated(world: World) -> None:
    for m, d, dtype in ((128, 128, BF), (1, 64, HALF), (17, 40, BF)):
        qkv, norm = torch.zeros(m, 6 * d, dtype=dtype), torch.ones(d, dtype=dtype)
        for norms, angles in ((None, torch.zeros(1, m, d)), ((norm, norm), torch.zeros(1, d, dtype=dtype))):
            rotary(qkv, angles, angles, 4, 1, norms, world=world)


def wait_word(world: World) -> None:
    from weft.backends.cuda import GpuBackend

    word = world.zeros((1,), torch.int32)
    GpuBackend._wait_word.func(world.backend)(None, word=word, value=word)  # type: ignore[attr-defined]


def rows(world: World) -> None:
    """Launch RMSNorm and residual add, on ordinary rows and on tiles."""
    for m, n in ((128, 8192), (64, 16384), (17, 520), (1, 1)):
        weight, residual = torch.zeros(n, dtype=BF), torch.zeros(m, n, dtype=BF)
        for remap in (None, weft.Remap(m, n, -(-m // 128), 128, 256, 8)):
            x = residual if remap is None else torch.zeros(remap.shape, dtype=BF)
            weft.rms_norm(x, weight, 1e-6, world=world, remap=remap)
            weft.rms_norm(x, weight, 1e-6, world=world, remap=remap, residual=residual)
            weft.residual_add(x, residual, world=world, remap=remap)


def invariant(fn: Callable[[World], Any]) -> Callable[[World], None]:
    """Return the launches of `fn` on a batch-invariant World."""

    def on_such_a_world(world: World) -> None:
        world.batch_invariant = True
        fn(world)

    return on_such_a_world


def products(tile: GemmTile) -> Callable[[World], None]:
    """Launch GEMMs whose bits do not depend on the tile, also for a weight stored as [K, N]."""

    def fn(world: World) -> None:
        for n, k in ((1024, 512), (520, 264)):
            x, w, bias = torch.zeros(40, k, dtype=BF), torch.zeros(n, k, dtype=BF), torch.zeros(n, dtype=BF)
            for weight in (w, w.t().contiguous().t()):
                multiply_with_tile(world, tile, x, weight, bias, torch.zeros(40, n, dtype=BF))

    return fn


for tile in INVARIANT_TILES:
    CASES[f"batch-invariant product, {tile}"] = products(tile), 1
for name, plan in {
    "one shot": OneShot(),
    "two shots": TwoShotPush(),
    "two shots, posted": TwoShotLowLatency(),
    "two shots, pulled": TwoShotPull(),
    "decomposed": Decomposed(),
}.items():
    CASES[f"batch-invariant norm x4, {name}"] = invariant(norm(plan)), 4
CASES["batch-invariant norm x8, layer norm"] = invariant(norm(TwoShotPush(), 5, full=True, norm="layer")), 8
CASES["batch-invariant rows"] = invariant(rows), 1


def decoder(
    sms: int, head_dim: int = 128, dtype: torch.dtype = BF, hidden: int = 8192, qwen: bool = False
) -> Callable[[World], None]:
    """Launch a layer of Llama-3.3-70B, or a layer of different sizes, on one of eight ranks: norm, rotary embedding,
    and weft's own GEMMs. With `qwen` the layer has biases and norms of the heads."""
    from weft.models import Batch, Cache, Config, Llama
    from weft.nn.weave import LayerPlan

    config = Config(
        vocab_size=8, hidden_size=hidden, intermediate_size=3584 if hidden == 8192 else 40, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=1, head_dim=head_dim, qkv_bias=qwen, qk_norm=qwen,
    )  # fmt: skip

    def fn(world: World) -> None:
        cache = Cache(config, world=world, slots=1, max_len=2000, dtype=dtype)
        batch, plan = Batch.prefill([2000]), LayerPlan("woven", 1024, sms)
        Llama(config, world=world, dtype=dtype)(torch.zeros(2000, dtype=torch.int64), batch, cache, plan)

    return fn


def around_the_gate(world: World, logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Launch capacity, placement and losses, with their gradients."""
    for drop in ("position", "probability"):
        weft.moe.apply_capacity(ids, weights, logits.shape[1], 1.0, drop=drop, world=world)
    table = torch.zeros(logits.shape[1], 3, dtype=torch.int32)
    weft.moe.expert_placement(ids, table, world=world)
    weft.moe.expert_placement(ids, table[:, 0].contiguous(), world=world)
    for x in (logits, logits.bfloat16()):
        leaf = x.requires_grad_()
        (weft.moe.load_balancing_loss(leaf, ids, world=world) + weft.moe.z_loss(leaf, world=world)).backward()


def routes(tokens: int, k: int, experts: int, block_m: int = 128) -> Callable[[World], None]:
    """Launch the kernels around the rows of an MoE layer: the router, routes to all ranks, and the tables for a number
    of experts per rank."""

    def fn(world: World) -> None:
        logits = torch.zeros(tokens, min(512, experts * world.size))
        ids, weights = gate(logits, k, world=world, bias=logits[0], groups=2, top_groups=2, scoring="sigmoid")
        gate(logits.bfloat16(), k, world=world)
        around_the_gate(world, logits, ids, weights)
        builder, tables = builder_of(world, k, TableSizes(experts, tokens, block_m))
        share_routes(world, builder.routes, ids, weights)
        run_builder(world, builder, tables, builder.routes.shared_weights.local)

    return fn


CASES["MoE routes x1"] = routes(32768, 8, 512), 1
CASES["MoE routes x1, few"] = routes(64, 8, 128, 16), 1
CASES["MoE routes x2"] = routes(8192, 8, 64), 2
CASES["MoE routes x2, 256 experts"] = routes(64, 4, 256, 64), 2
CASES["MoE routes x4, 6 experts a token"] = routes(1024, 6, 40), 4
for per_rank in (4, 16, 64, 128):
    CASES[f"MoE routes x8, {per_rank} experts"] = routes(4096, 4 if per_rank < 16 else 8, per_rank), 8
CASES["MoE routes x8, few"] = routes(1, 8, 1, 16), 8
CASES["decoder"] = decoder(116), 1
CASES["decoder, small and odd"] = decoder(132, 40, HALF, 72), 1
CASES["decoder, the library's GEMMs"] = decoder(0, 64, BF, 16384), 1
CASES["decoder, biases and norms of heads"] = decoder(0, 128, BF, 2048, True), 1
CASES["decoder, biases and norms of odd heads"] = decoder(0, 40, HALF, 72, True), 1
CASES["silu_mul"] = silu, 1
CASES["rotary"] = rotated, 1
CASES["rms_norm and residual_add"] = rows, 1
CASES["wait_word"] = wait_word, 1


def product_of_8_bits(scaling: str, plan: Plan, m: int, n: int, k: int, **options: Any) -> Callable[[World], None]:
    def fn(world: World) -> None:
        x, w, xs, ws = factors(1, m, n, k, scaling, world.device)
        by_columns = options.pop("by_columns", False)
        operand = weft.ScaledTensor(x, xs.t().contiguous().t() if by_columns else xs, scaling)
        weft.matmul(operand, weft.ScaledTensor(w, ws, scaling), world=world, plan=plan, **options)

    return fn


for scaling, plans in (("tensor", WIDE), ("tensor", PROMOTED), ("row", WIDE), ("row", PROMOTED), ("block", PROMOTED)):
    for i, plan in enumerate(plans):
        for m, n, k in ((300, 520, 1024), (1, 8, 128)):
            name = f"8-bit by {scaling}, {'promoted' if plans is PROMOTED else 'wide'} {i}, {m} x {n} x {k}"
            CASES[name] = product_of_8_bits(scaling, plan, m, n, k, use_fast_accum=plans is WIDE), 1


def quantized(world: World) -> None:
    for m, k in ((300, 7168), (40, 28672), (1, 256)):
        for recipe in ("row", "block", "tensor"):
            x, scale = torch.zeros(m, k, dtype=BF if m > 40 else HALF), torch.ones(1) if recipe == "tensor" else None
            weft.quantize(x, recipe, scale=scale, world=world)
            weft.silu_mul_quantized(x, recipe, scale=scale, world=world)
        weft.quantize(x, "block", weight=True, world=world)
        weft.quantize(x, "block", by_columns=True, world=world)


CASES["quantize"] = quantized, 1
CASES["8-bit by block, columns, bias"] = (
    product_of_8_bits("block", PROMOTED[0], 300, 520, 1024, by_columns=True, bias=torch.zeros(520, dtype=BF)),
    1,
)


@functools.lru_cache(maxsize=2)  # the launches keep symmetric memory alive, too much for all cases together
def launched(name: str) -> list[list[Launch]]:
    return launches(*CASES[name])


@functools.lru_cache(maxsize=2)
def compiled(name: str) -> list[tuple[Launch, Compiled]]:
    """Return each launch of rank 0 with its compiled kernel."""
    return [(launch, compile_kernel(launch.kernel, launch.args, launch.options)) for launch in launched(name)[0]]


# -- the compiled kernels ----------------------------------------------------------------------------------------------

PEERS = {
    "all_gather_gemm": (pull_chunks, gemm_tile, scaled_gemm_tile, add_step),
    "copied_gemm": (gemm_tile, scaled_gemm_tile, add_step),
    "gemm_reduce": (sum_half_tiles, gather_tile),
    "two_shot": (load_row,),
}  # fmt: skip
GATHERS = (all_gather_gemm.__name__, copied_gemm.__name__)
GEMMS = (*GATHERS, gemm_reduce.__name__, signaled_gemm.__name__)
POSTED = (gather_low_latency, scatter_low_latency, one_shot, two_shot_low_latency)
ALONE = (matmul.__name__, whole_matmul.__name__, scaled_matmul.__name__)  # these kernels wait for no other rank


def within(step: Instruction, functions: Sequence[triton.JITFunction]) -> bool:
    """Return whether the step comes from one of these `weft.jit` functions."""
    for fn in functions:
        code = fn.fn.__code__
        last = max(line for _, _, line in code.co_lines() if line is not None)
        if step.file == code.co_filename and code.co_firstlineno <= step.line <= last:
            return True
    return False


def descriptors(ptx: str) -> list[list[str]]:
    """Return the registers that hold the address of each tensor descriptor argument, in the order of the arguments."""
    head = ptx[ptx.index(".entry") : ptx.index("\n{", ptx.index(".entry"))]
    out = []
    for param in re.findall(r"\.b8 (\w+)\[128\]", head):
        moved = re.findall(rf"mov\.b(?:32|64)\s+(%rd?\d+), {param};", ptx)
        moved += [r for m in moved for r in re.findall(rf"cvt\.u64\.u32\s+(%rd\d+), {m};", ptx)]  # since Triton 3.9
        out.append([r for m in moved for r in re.findall(rf"cvta\.param\.u64\s+(%rd\d+), {m};", ptx)])
    return out


def private(launch: Launch, k: Compiled) -> list[str]:
    """Return the registers that hold descriptors of the caller's own tensors, which no other rank writes."""
    names = [n for n in launch.kernel.arg_names if isinstance(launch.args[n], TensorDescriptor)]
    registers_of = dict(zip(names, descriptors(k.ptx), strict=True))
    return [register for name in ("x_desc", "w_desc", "w_half_desc") for register in registers_of.get(name, ())]


def awaited(launch: Launch, k: Compiled) -> Which:
    """Return a predicate for asynchronous loads of data that other programs or ranks write."""
    functions, own_registers = PEERS.get(launch.kernel.__name__, ()), private(launch, k)

    def waits(step: Instruction) -> bool:
        reads_own = any(f"[{register}, {{" in step.text for register in own_registers)
        return "cp.async" in step.text and not reads_own and within(step, functions) and "offsets" not in step.source

    return waits


def broken_rules(launch: Launch, k: Compiled, text: str | None = None) -> list[str]:
    """Return the rules that the compiled kernel breaks, or that its text breaks after a change."""
    return ptx.broken_rules(text or k.ptx, awaited(launch, k))


def computes(launch: Launch) -> bool:
    return launch.args.get("COMPUTE", True)


def communicates(launch: Launch) -> bool:
    return launch.kernel is all_gather_gemm or not computes(launch)


@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_and_keeps_the_rules(name: str, record_property: Callable[[str, object], None]) -> None:
    kernels = compiled(name)
    assert kernels
    for launch, k in kernels:
        record_property("kernel", (f"{name}: {launch.kernel.__name__}", k.registers, k.shared))
        fits(launch, k)
        gemm = launch.kernel.__name__ in GEMMS
        tensor_cores = gemm and computes(launch) or launch.kernel.__name__ in ALONE
        assert ("wgmma.mma_async" in k.ptx) == tensor_cores
        assert "ttg.warp_specialize" not in k.ttgir and not re.search(r"atom\S*\.cas", k.ptx), (
            "kernels must use no lock and no warp specialisation"
        )
        assert broken_rules(launch, k) == []
        assert signals_not_by_thread_zero(k.ptx) == []
        assert signals_outside_first_warp(k.ptx) == []
        assert "fence.proxy.async;" not in k.ptx, "a proxy fence must name global memory"
        if launch.kernel in POSTED:
            assert (
                "st.relaxed.sys.global.v4.b32" in k.ptx and "ld.volatile.global" in k.ptx and "sys.relaxed" not in k.ptx
            )
        if gemm:
            polls_have_the_scope_of_who_counts(launch, k)
            pipelines_are_as_deep_as_planned(launch, k)
        if launch.kernel is two_shot:
            rows_are_under_way(launch, k)
    if CASES[name][1] > 1 and not name.startswith(LOCAL):
        every_rank_launches_the_same_kernel(name)
    pulling = [(a, k) for a, k in kernels if a.options.get("co_resident")]
    for small, large in zip(pulling, [pair for pair in kernels if pair not in pulling], strict=bool(pulling)):
        assert small[1].shared + large[1].shared + 2048 <= 228 << 10, "both kernels must fit on one SM"
        assert sum(k.registers * 32 * a.options["num_warps"] for a, k in (small, large)) <= 65536


def test_shards_of_part_tiles_keep_the_fast_loops() -> None:
    """Shards of 1.25 tiles are pulled by TMA, and a tile waits for one counter in a flattened loop over tiles."""
    (launch,) = launched(f"{AG} x4 part tiles")[0]  # those of the first rank
    how, mapping = launch.args["how"], launch.args["ch"].mapping
    assert how.pull.BULK.value and how.product.FLATTEN.value and mapping.single.value and mapping.table.value


def test_a_sum_computes_no_tile_of_each_shard_alone() -> None:
    """Four shards of 1.25 tiles are 5 rows of tiles, and each rank computes them in an order of its own. The first and
    the second tile row begin in the first shard."""
    runs = [launches[0].args["runs"] for launches in launched(f"{RS} x4 part tiles")]
    assert [r.order.tolist() for r in runs] == [[2, 3, 4, 0, 1], [3, 4, 0, 2, 1], [4, 0, 2, 3, 1], [0, 2, 3, 4, 1]]
    assert all(r.positions.tolist() == [0, 1, 0, 0, 0] and r.owners.tolist() == [2, 4, 1] for r in runs)


@pytest.mark.parametrize("name", [n for n in CASES if "multicast" in n])
def test_the_switch_receives_whole_vectors(name: str) -> None:
    """Sums are in fp32. A fence orders stores through a multicast address with ordinary addresses before their
    release."""
    for launch, k in compiled(name):
        if launch.kernel is not multicast_shot:
            assert "float32" in name or "fp8" in name, "only rows of other than 16 bits run as sequential"
            continue
        kind = "f16x2" if launch.args["norm"].DTYPE.value == triton.language.float16 else "bf16x2"
        lines = k.ptx.splitlines()
        multimem = [m[0] for line in lines if (m := re.search(r"multimem\.\S+", line))]
        assert set(multimem) == {
            f"multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.{kind}",
            "multimem.st.relaxed.sys.global.v4.f32",
        }
        after = lines[max(i for i, line in enumerate(lines) if "multimem.st" in line) :]
        order = [
            next(i for i, line in enumerate(after) if text in line)
            for text in ("fence.proxy.alias", "bar.sync", "fence.acq_rel.sys", "relaxed.add")
        ]
        assert order == sorted(order)
        before = lines[: next(i for i, line in enumerate(lines) if "multimem.ld_reduce" in line)]
        assert (
            [line for line in before if "ld.acquire.sys" in line or "proxy.alias" in line][-1]
            .strip()
            .startswith("fence.proxy.alias")
        )


def test_tiles_are_read_in_whole_vectors() -> None:
    """The rows consist of 16-byte words."""
    tile_kernels = [(a, k) for a, k in compiled("rms_norm and residual_add") if a.args["N"] % 8 == 0]
    assert sum(a.args["layout"].TILED.value for a, _ in tile_kernels) == 9
    for launch, k in tile_kernels:
        narrow = re.findall(r"(?:ld|st)\.global\.b\d+", k.ptx)
        assert not narrow, (launch.args["N"], narrow)


def fits(launch: Launch, k: Compiled) -> None:
    assert k.spills == 0, f"the kernel spills {k.spills} bytes"
    assert k.warnings == ()
    assert k.registers <= 255 and k.shared <= 227 << 10, f"{k.registers} registers, {k.shared} bytes shared"
    programs = -(-launch.grid // SMS)  # all programs must be resident at once
    if k.shared:
        assert programs * (k.shared + 1024) <= 228 << 10, f"{programs} programs an SM, {k.shared} bytes each"
    threads = 32 * launch.options["num_warps"]
    registers = -(-k.registers // 8) * 8
    assert programs * threads <= 2048 and programs * threads * registers <= 65536, (
        f"{registers} registers, {programs} programs"
    )


def polls_have_the_scope_of_who_counts(launch: Launch, k: Compiled) -> None:
    """Computing programs wait for this GPU's counts of chunks (in a sum they do not wait). Pull programs wait for
    peers' counts, and forwarding programs for this GPU's tiles."""
    scopes = [set(re.findall(r"ld\.acquire\.(\w+)", s.text)) for s in steps_of(k.ptx) if "ld.acquire" in s.text]
    assert all(scope in ({"sys"}, {"gpu"}) for scope in scopes)
    assert ({"sys"} in scopes) == communicates(launch)
    assert ({"gpu"} in scopes) == (launch.kernel.__name__ in GATHERS or not computes(launch))


def pipelines_are_as_deep_as_planned(launch: Launch, k: Compiled) -> None:
    args, steps = launch.args, steps_of(k.ptx)
    tiles = sum("cp.async.bulk.tensor.2d.shared" in s.text for s in steps)
    blocks = sum("cp.async.bulk.tensor.3d.shared" in s.text for s in steps)
    loops = 2 if launch.kernel.__name__ in GATHERS else 1  # own tiles, then the other ranks' tiles
    loops += args.get("w_half_desc") is not None  # then halves of tiles
    gather = args["how"].product if launch.kernel is all_gather_gemm else args.get("product")
    promotes = (args["tile"] if gather is None else gather.tile).PROMOTE.value
    planned = loops * (3 if promotes else 2) * launch.options["num_stages"]  # separate loads for x's halves
    assert tiles == (planned if computes(launch) else 0), "loads of the GEMM's tiles"
    if not communicates(launch):
        assert blocks == 0
        return
    if launch.kernel is gemm_reduce:
        stages, pipelines = args["how"].STAGES.value, 2 if args["how"].ALL.value else 1
        assert blocks == stages * pipelines, "one pipeline sums, and one gathers sums"
        return
    pull = args["how"].pull
    stages = pull.STAGES.value
    if pull.BULK.value:
        assert blocks == stages
    else:
        rows = [s for s in steps if within(s, [pull_chunks]) and not within(s, [pull_scales])]
        copies = sum("cp.async.cg.shared" in s.text for s in rows)
        size = args["x"].dtype.itemsize
        per_thread = pull.ROWS.value * pull.COLS.value * size // (launch.options["num_warps"] * 32 * 16)
        assert blocks == 0 and copies == per_thread * stages, f"{copies} copies, {per_thread} a block"


def rows_are_under_way(launch: Launch, k: Compiled) -> None:
    """Check that each pipeline has the planned number of stages, that with AHEAD a stage of a sum contains all sources'
    rows, in 16-byte words, and that results are stored in such words too."""
    norm, shots, threads = launch.args["norm"], launch.args["shots"], launch.options["num_warps"] * 32
    size = norm.DTYPE.value.primitive_bitwidth // 8
    copies = [s for s in steps_of(k.ptx) if "cp.async.cg.shared" in s.text]
    per_thread = norm.P.value * size // (threads * 16)
    sources = launch.args["ch"].world.value + (norm.RESIDUAL.value != ABSENT.value) if shots.AHEAD.value else 1
    pushed_rows, summed_rows = 0 if shots.PULL.value else shots.STAGES.value, sources * shots.SUM_STAGES.value
    for fn, rows in ((push_rows, pushed_rows), (load_row, summed_rows)):
        assert sum(within(s, [fn]) for s in copies) == rows * per_thread, fn.fn.__name__
    narrow = [s for s in steps_of(k.ptx) if "st.global" in s.text and not re.search(r"v[24]\.b(32|64)", s.text)]
    assert all(within(s, [end_call, store_scales, store_scales_everywhere]) for s in narrow), [str(s) for s in narrow][
        :2
    ]


# -- one kernel on every rank ------------------------------------------------------------------------------------------


def specialised(launch: Launch) -> tuple[Any, ...]:
    """Return the parts of the key under which Triton caches a compiled kernel."""
    driver = OfflineDriver()
    with standing_in(driver):
        binder = launch.kernel.device_caches[driver.get_current_device()][-1]
        _, specialization, options = binder(**launch.args, debug=False)
    return launch.kernel.__name__, launch.grid, tuple(sorted(launch.options.items())), str(specialization), str(options)


def integers(value: Any, path: str) -> list[tuple[str, int]]:
    """Return every integer argument; those inside a tuple are always specialised, and a descriptor's sizes never."""
    if isinstance(value, tuple):
        return [i for key, part in zip(getattr(value, "_fields", range(len(value))), value, strict=True) for i in integers(part, f"{path}.{key}")]  # fmt: skip
    value = getattr(value, "value", value)
    return [(path, int(value))] if isinstance(value, (int, bool)) else []


LOCAL = "to ranks"  # sizes differ between ranks, and no program waits for a rank


def every_rank_launches_the_same_kernel(name: str) -> None:
    """Kernels read the rank from memory. No integer argument differs between ranks, so Triton cannot specialise an
    argument on one rank alone (rule 8)."""
    first_rank = launched(name)[0]
    for rank, others in enumerate(launched(name)):
        assert len(others) == len(first_rank)
        for a, b in zip(first_rank, others, strict=True):
            for key in a.args:
                assert integers(a.args[key], key) == integers(b.args[key], key), (
                    f"rank {rank} launches different kernels"
                )
            if a.kernel.__name__ in (*GEMMS, "barrier", "two_shot", *(kernel.__name__ for kernel in POSTED)):
                assert specialised(a) == specialised(b), f"rank {rank}: {a.kernel.__name__}"


# -- the rules themselves ----------------------------------------------------------------------------------------------

BREAKS = [  # newer Tritons themselves wait for bulk stores, and insert a barrier before an atomic
    (r"cp\.async\.bulk\.wait_group\s+0;", "", "release: a bulk store"),
    (r"(wait_group 0;) fence\.proxy\.async\.global;", r"\1", "release: a bulk store"),
    (r"(fence\.proxy\.async\.global;) bar\.sync 0;([^@]*?)(bar\.sync\s+0;|(?=@))", r"\1\2", "release: "),
    (r"fence\.acq_rel\.sys;", "", "release: "),
    (r"ld\.acquire", "ld.relaxed", "acquire: "),
    (r"\.release\.", ".relaxed.", "release: "),
    (r"@%p\d+ (atom\.global)", r"\1", "once: "),
]


@pytest.mark.parametrize(("old", "new", "says"), BREAKS)
def test_broken_rules_are_found(old: str, new: str, says: str) -> None:
    """The rules detect each edit of the PTX of the all-reduce kernels."""
    broken = []
    for launch, k in compiled(f"{AR} x8 plan 0 one row"):
        changed = re.sub(old, new, k.ptx)
        broken += broken_rules(launch, k, changed) if changed != k.ptx else []
    assert any(line.startswith(says) for line in broken), broken


def test_a_wait_after_the_first_load_is_found() -> None:
    """The first stages' loads are issued before any wait."""
    ((launch, k),) = compiled(f"{AG} x8 gated")
    lines = k.ptx.splitlines()
    load = next(i for i, line in enumerate(lines) if "cp.async.bulk.tensor.3d.shared" in line)
    waits = [i for i, line in enumerate(lines) if "ld.acquire" in line and i < load]
    asm_start = max(i for i in range(waits[-1]) if "begin inline asm" in lines[i])
    asm_end = next(i for i in range(waits[-1], len(lines)) if "end inline asm" in lines[i])
    moved = lines[:asm_start] + lines[asm_end + 1 : load + 2] + lines[asm_start : asm_end + 1] + lines[load + 2 :]
    assert broken_rules(launch, k) == []
    assert any(line.startswith("acquire: ") for line in broken_rules(launch, k, "\n".join(moved)))


def test_a_count_by_another_warp_than_the_fences_is_found() -> None:
    ((_, k),) = [(launch, k) for launch, k in compiled("all-reduce + norm x8, two shots") if launch.kernel is two_shot]
    predicate = re.search(r"@(%p\d+) (?:atom|red)\.global\.sys\.relaxed", k.ptx)[1]  # type: ignore[index]
    wide = re.sub(rf"(?m)^\s*[a-z][\w.]*\s+{predicate}, .*;", f"setp.lt.u32 {predicate}, %tid.x, 512;", k.ptx)
    assert wide != k.ptx and signals_outside_first_warp(k.ptx) == []
    assert any("not by the first warp" in problem for problem in signals_outside_first_warp(wide))
