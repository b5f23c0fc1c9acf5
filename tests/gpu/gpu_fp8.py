"""The GPU checks of 8-bit operands; gpu_main.py runs them. `checks` yields a name, a bound and a function for each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import weft
from tests.emulated.cases import distance
from tests.emulated.cases_all_reduce import FP8, PLANS, bound, norm_case
from tests.emulated.cases_fp8 import SCALINGS, case, factors, matmul_case, quantize_case, wanted
from tests.emulated.cases_ops import FUSED, OPS
from weft.backends import library_gemm
from weft.backends.library_gemm import ScaledOperands
from weft.lang.mapping import balanced_rows
from weft.ops.scaled_gemm import PROMOTED, WIDE
from weft.plans import Decomposed, FusedGatherByCopies, OneShot, Plan, Sequential, TwoShotLowLatency
from weft.scaled_tensor import ScaledTensor, Scaling

GATHER = OPS[0]
BF16, ROUNDED = 5e-3, 5e-3
POSTED: dict[str, Plan] = dict(zip(OPS, (OneShot(), OneShot(), TwoShotLowLatency()), strict=True))


def plans(op: str) -> dict[str, Plan]:
    plans_by_name: dict[str, Plan] = {
        "sequential": Sequential(),
        "decomposed": Decomposed(),
        "fused": FUSED[op],
        "posted": POSTED[op],
    }
    return plans_by_name | ({"copied": FusedGatherByCopies()} if op == GATHER else {})


def beside_torch(world: weft.World, scaling: str, fast: bool) -> float:
    """Return the error of weft's kernel against float64, divided by the error of torch's own kernel for the same
    operands; the bound is 1.1."""
    worst = 0.0
    for i, (m, n, k) in enumerate(((512, 1024, 4096), (2048, 2048, 1024), (77, 512, 8192))):
        x, w, xs, ws = factors(i * 10, m, n, k, scaling, world.device)
        expected = wanted(x, w, xs, ws, scaling).double()
        operands = ScaledTensor(x, xs, scaling), ScaledTensor(w, ws, scaling)
        for plan in WIDE if fast else PROMOTED:
            own_error = distance(weft.matmul(*operands, plan=plan, use_fast_accum=fast, world=world).double(), expected)
            out = torch.empty(m, n, device=world.device, dtype=torch.bfloat16)
            torch_scaling = "row" if m < 128 else scaling  # otherwise cuBLAS splits K of few rows, and rounds less
            if torch_scaling != scaling:
                xs, ws = xs.expand(m).contiguous(), ws.expand(n).contiguous()
            scaled = ScaledTensor(x, xs, torch_scaling), ScaledTensor(w, ws, torch_scaling)
            library_gemm.torch_scaled(ScaledOperands(*scaled, None, fast), out)
            torch_error = distance(out.double(), expected)
            if world.rank == 0:
                print(
                    f"{m} x {n} x {k} by {scaling}, fast {fast}, {plan}: error {own_error:.3e}, torch's {torch_error:.3e}",
                    flush=True,
                )
            worst = max(worst, own_error / torch_error)
    return worst


def libraries(world: weft.World, scaling: str) -> float:
    """The GEMM of every installed library must give the same result as weft's own kernel. If a library fails, it must
    raise an error and is not chosen."""
    x, w, xs, ws = factors(1, 512, 1024, 2048, scaling, world.device)
    expected, errors = wanted(x, w, xs, ws, scaling), [0.0]
    for name, run in library_gemm.scaled_products(Scaling(scaling)).items():
        out = torch.zeros(512, 1024, device=world.device, dtype=torch.bfloat16)
        try:
            run(ScaledOperands(ScaledTensor(x, xs, scaling), ScaledTensor(w, ws, scaling), None, False), out)
            torch.cuda.synchronize()
        except Exception as e:
            print(f"{name}, {scaling}: {e!r}"[:300], flush=True)
            continue
        errors.append(distance(out.double(), expected.double()))
    return max(errors)


def call_of(world: weft.World, op: str, plan: Plan, scaling: str) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Return x, and a call that uses it."""
    m = 256 * world.size
    x, w, xs, ws = factors(3, m, 512, 512, scaling, world.device)
    if op == GATHER:
        x = x.chunk(world.size)[world.rank].clone()
        xs = xs if scaling == "tensor" else xs.chunk(world.size)[world.rank].clone()
    fn: Any = getattr(weft, op)
    operands = ScaledTensor(x, xs, scaling), ScaledTensor(w, ws, scaling)
    return x, lambda: fn(*operands, use_fast_accum=True, world=world, plan=plan)


def delays(world: weft.World, op: str, plan: Plan, scaling: str) -> float:
    """Random ranks start late in every call: the bits must be the same every time."""
    rng = random.Random(100 + world.rank)
    _, run = call_of(world, op, plan, scaling)
    expected = run().clone()
    for _ in range(20):
        if rng.random() < 0.4:
            torch.cuda._sleep(rng.randrange(1000, 600000))
        if not torch.equal(run(), expected):
            return float("inf")
    return 0.0


def replay(world: weft.World, op: str, plan: Plan, scaling: str, replays: int = 30) -> float:
    """If x changes, a graph of a call must give the same bits as an eager call."""
    x, run = call_of(world, op, plan, scaling)
    others = [x.clone(), (-x.float()).to(x.dtype), x.flip(0).contiguous()]
    for _ in range(2):
        run()
    world.synchronize()
    graph, wrong = torch.cuda.CUDAGraph(), torch.zeros((), device=world.device, dtype=torch.int64)
    with torch.cuda.graph(graph):
        y = run()
    for i in range(replays):
        x.copy_(others[i % 3])
        graph.replay()
        kept = y.clone()
        wrong += (kept != run()).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def captured(world: weft.World) -> float:
    """Capture weft.matmul and weft.quantize in one graph; an earlier trial has chosen the GEMM."""
    x, w, _, ws = factors(5, 300, 512, 1024, "row", world.device)
    x = x.bfloat16()

    def run() -> torch.Tensor:
        rows = weft.quantize(x, "row", world=world)
        return weft.matmul(rows, ScaledTensor(w, ws, "row"), use_fast_accum=True, world=world)

    expected = run().clone()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    graph.replay()
    torch.cuda.synchronize()
    return 0.0 if torch.equal(y, expected) else float("inf")


def random_calls(world: weft.World, count: int) -> float:
    """Draw ops, plans, recipes and shapes, the same on every rank."""
    rng, worst = random.Random(world.size), 0.0
    for i in range(count):
        op, scaling = rng.choice(OPS), rng.choice(SCALINGS)
        m, n, k = rng.randrange(world.size, 1200), 8 * rng.randrange(1, 80), 128 * rng.randrange(1, 9)
        plan = rng.choice(list(plans(op).values()))
        options = dict(bias=rng.random() < 0.5, fast=rng.random() < 0.5, seed=i, calls=2)
        options["dtype"] = rng.choice([torch.bfloat16, torch.float16])
        worst = max(worst, case(world, op, balanced_rows(m, world.size), n, k, scaling, plan, **options))
    return worst


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    size = world.size
    for scaling in SCALINGS:
        for i, plan in enumerate((*WIDE, *PROMOTED)):
            fast = plan in WIDE and scaling != "block"
            if plan in PROMOTED or fast:
                product = partial(matmul_case, world, 1000, 1032, 2048, scaling, plan, True, fast=fast)
                yield f"8-bit product by {scaling}, tiles {i}", BF16, product
        yield (
            f"8-bit product by {scaling}, auto",
            BF16,
            partial(matmul_case, world, 1000, 1024, 2048, scaling, "auto", True),
        )
        yield f"8-bit products of libraries by {scaling}", BF16, partial(libraries, world, scaling)
        yield f"quantize by {scaling}", ROUNDED, partial(quantize_case, world, 1000, 7168, scaling)
        yield f"silu_mul quantized by {scaling}", ROUNDED, partial(quantize_case, world, 1000, 7168, scaling, gated=True, with_scale=scaling == "tensor")  # fmt: skip
        if scaling != "block":
            for fast in (True, False):
                yield f"8-bit product by {scaling} beside torch's, fast {fast}", 1.1, partial(beside_torch, world, scaling, fast)  # fmt: skip
    columns = partial(matmul_case, world, 1000, 1032, 2048, "block", PROMOTED[0], by_columns=True)
    yield "8-bit product by block, scales by columns", BF16, columns
    yield "quantize a weight by block", ROUNDED, partial(quantize_case, world, 1000, 2048, "block", weight=True)
    yield "quantize, scales by columns", ROUNDED, partial(quantize_case, world, 1000, 2048, "block", by_columns=True)
    yield "quantize long rows", ROUNDED, partial(quantize_case, world, 100, 28672, "row", gated=True)
    yield "8-bit product and quantize in a graph", 0.0, partial(captured, world)
    for op in OPS:
        for name, plan in plans(op).items():
            for scaling in SCALINGS if name == "fused" else ("row", "block"):
                even = partial(case, world, op, [256] * size, 1024, 512, scaling, plan, calls=3, bias=True)
                yield f"{op} of 8 bits by {scaling}, {name}", BF16, even
                if name in ("fused", "posted", "copied"):
                    yield f"{op} of 8 bits by {scaling}, {name} delays", 0.0, partial(delays, world, op, plan, scaling)
                    yield f"{op} of 8 bits by {scaling}, {name} replay", 0.0, partial(replay, world, op, plan, scaling)
        uneven = balanced_rows(1003, size)
        for scaling in ("row", "block"):
            yield f"{op} of 8 bits by {scaling}, fused, uneven", BF16, partial(case, world, op, uneven, 520, 384, scaling, FUSED[op], calls=2, fast=True)  # fmt: skip
    for name, plan in PLANS.items():
        if name != "multicast":
            most = 64 if isinstance(plan, OneShot) else 333
            for recipe in ("row", "block"):
                yield f"all-reduce + norm, {name}, quantized by {recipe}", bound(FP8), partial(norm_case, world, most, 7168, plan, quantize=recipe)  # fmt: skip
    yield "8-bit operands, random calls", BF16, partial(random_calls, world, 12)
