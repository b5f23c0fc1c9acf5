"""GEMMs of 8-bit operands on one GPU by each method: torchrun --nproc-per-node 1 -m bench.measure.fp8 --out DIR
[--seconds S]

Each size is one interleaved run of CUDA graphs: weft's own kernel in several tiles (FORMS), and "auto", which chooses
at the first use; torch._scaled_mm by tensor and by row, with and without fast accumulation; torch's product by block,
DeepGEMM's, and quack's by tensor, if they can be imported; and cuBLAS in bfloat16. The most important sizes are first:
the dense layers of Llama-70B, Qwen2.5-32B and DeepSeek-V3 as 1, 2, 4 and 8 ranks split them. The program appends a row
for each size to DIR/fp8.jsonl: `us` by "recipe: method", and `error` of each method against a float64 product of some
dequantized rows. The recipes are tensor and row (fast accumulation), slow (by row, promoted) and block. A method that
fails or is wrong is printed and left out. Rows named "quantizing" have the times of SiLU-mul and add + norm, with and
without 8-bit rows as their result. Several processes compile the kernels first.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
from bench.common.program import Program, options, worst_error
from bench.common.timing import RIGHT, error_of, time_interleaved
from weft.backends import library_gemm
from weft.backends.library_gemm import ScaledOperands
from weft.compute.scaled_gemm import Scales, scaled_matmul
from weft.ops.recipes import block_rows, scaled_tile
from weft.ops.scaled_gemm import PROMOTED, WIDE
from weft.plans import GemmTile, Persistent
from weft.scaled_tensor import SCALE_BLOCK, ScaledTensor, Scaling, scales_shape

BF, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ROWS = 128  # the number of rows that are compared with float64
RECIPES = {
    "tensor": Scaling("tensor", True), "row": Scaling("row", True), "slow": Scaling("row", False), "block": Scaling("block"),
}  # fmt: skip


# The candidates of "auto" and, for promoted sums, a tile whose halves two warp groups split by columns, as in the sums over
# ranks, and a tile of half the columns, for few tiles.
PROMOTES = [
    *PROMOTED,
    Persistent(GemmTile(128, 128, 128, 8, 4), 1, False),
    Persistent(GemmTile(128, 64, 128, 4, 4), 2, False),
]
FORMS = {"tensor": list(WIDE), "row": list(WIDE), "slow": PROMOTES, "block": PROMOTES}
# M, hidden and inner size of a rank
QUANTIZED = [(4096, 8192, 7168), (1024, 8192, 3584), (16384, 7168, 4608), (64, 8192, 7168)]
MODELS = {  # hidden, intermediate, columns of QKV, columns of the output projection's input
    "Llama-70B": (8192, 28672, 10240, 8192), "Qwen2.5-32B": (5120, 27648, 7168, 5120),
    "DeepSeek-V3": (7168, 18432, 24576, 16384),
}  # fmt: skip
QUACK = [(128, 192, 2, True), (128, 160, 2, True), (128, 256, 2, False)]


def plan_label(plan: Persistent) -> str:
    t = plan.tile
    return f"weft {t.block_m}x{t.block_n} w{t.warps} s{t.stages} x{plan.per_sm}{'' if plan.flatten else ' nested'}"


def launched(
    plan: Persistent, o: ScaledOperands, out: torch.Tensor, sms: int, by_columns: bool = False
) -> Callable[[], object]:
    """Return a launch of weft's own kernel without a World, so that the compiling processes can use it too."""
    (x, x_scales, _), (weight, weight_scales, _), bias, _ = o
    (m, k), n, tile = x.shape, len(weight), plan.tile
    bm, bn, bk = tile.block_m, tile.block_n, tile.block_k
    rows = block_rows(tile, o.scaling)
    a, b, c = (
        TensorDescriptor.from_tensor(t, block)
        for t, block in ((x, [rows, bk]), (weight, [bn, bk]), (out, [rows, bn // 2]))
    )
    grid = (min(sms * plan.per_sm, -(-m // bm) * -(-n // bn)),)
    args = dict(
        x_desc=a, w_desc=b, out_desc=c, bias=bias, scales=Scales(x_scales, weight_scales), M=m, N=n, K=k,
        tile=scaled_tile(tile, tile.group_m, o.scaling), BY_COLUMNS=by_columns, FLATTEN=plan.flatten,
    )  # fmt: skip
    return lambda: scaled_matmul[grid](**args, num_warps=tile.warps, num_stages=tile.stages)


def operands(m: int, n: int, k: int, scaling: Scaling) -> ScaledOperands:
    """Return random operands, whose scales are as large as a dynamic quantization's."""

    def scaled(rows: int, block_rows: int) -> ScaledTensor:
        values = (torch.randn(rows, k, device="cuda") * 100).clamp(-448, 448).to(E4M3)
        shape = scales_shape(scaling.recipe, rows, k, block_rows)
        return ScaledTensor(values, (torch.rand(*shape, device="cuda") + 0.5) * 0.01, scaling.recipe)

    return ScaledOperands(scaled(m, 1), scaled(n, SCALE_BLOCK), None, scaling.fast_accum)


def rows_of(t: ScaledTensor, rows: torch.Tensor) -> ScaledTensor:
    """Return some rows of t together with their scales."""
    scales = t.scales if t.recipe == "tensor" else t.scales[rows]
    return ScaledTensor(t.values.view(torch.uint8)[rows].view(E4M3), scales, t.recipe)


def ready(product: str, x: ScaledTensor) -> ScaledTensor:
    """Return x with its scales in the layout that the library reads without a copy; a quantization can write this
    layout."""
    if x.recipe != "block":
        return x
    if product == "torch":
        return x._replace(scales=x.scales.t().contiguous().t())
    from deep_gemm.utils.layout import get_mn_major_tma_aligned_tensor

    return x._replace(scales=get_mn_major_tma_aligned_tensor(x.scales))


def compiled(job: tuple[str, Persistent, bool]) -> str:
    """Compile a form in a separate process. Return the text of the error, or ""."""
    name, plan, by_columns = job
    try:
        o = operands(512, 512, 512, RECIPES[name])
        launched(plan, o, torch.empty(512, 512, device="cuda", dtype=BF), 1, by_columns)()
        torch.cuda.synchronize()
        return ""
    except Exception as e:
        return repr(e)[:200]


def jobs(recipes: list[str]) -> list[tuple[str, Persistent, bool]]:
    return [(name, plan, c) for name in recipes for plan in FORMS[name] for c in ((False, True) if name == "block" else (False,))]  # fmt: skip


def sizes() -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, M, N, K), beginning with the layers of 4 and 8 ranks at usual numbers of tokens."""
    for small in (True, False):
        for m in (4096, 8192, 1024, 16384, 2048, 512) if small else (4096, 1024, 16384, 512, 8192, 2048):
            for ranks in (4, 8, 2, 1):
                for model, (h, i, qkv, o) in MODELS.items():
                    layers = {"gate_up": (2 * i // ranks, h), "down": (h, i // ranks)}
                    if not small:  # DeepSeek-V3's query projection has 1,536 inputs
                        layers = {"qkv": (qkv // ranks, 1536 if model == "DeepSeek-V3" else h), "o": (h, o // ranks)}
                    for layer, (n, k) in layers.items():
                        yield f"{model} {layer} x{ranks}", m, n, k
    for m in (4096, 1024, 16384, 512, 8192, 2048):
        yield "DeepSeek-V3 latents", m, 2112, 7168


def libraries(name: str, o: ScaledOperands, out: torch.Tensor) -> dict[str, Callable[[], object]]:
    ways: dict[str, Callable[[], object]] = {
        product: partial(run, o._replace(x=ready(product, o.x)), out)
        for product, run in library_gemm.scaled_products(o.scaling).items()
    }
    if name == "tensor":
        try:
            from quack.gemm import gemm
        except ImportError:
            return ways
        alpha = o.x.scales * o.weight.scales
        for tile_m, tile_n, cluster, pingpong in QUACK:
            ways[f"quack {tile_m}x{tile_n}"] = lambda a=tile_m, b=tile_n, c=cluster, p=pingpong: gemm(
                o.x.values, o.weight.values, out, None, None, a, b, c, 1, pingpong=p, alpha=alpha
            )
    return ways


def methods(
    name: str, m: int, n: int, k: int, world: weft.World, out: torch.Tensor, bad: set[tuple[str, Persistent, bool]]
) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """Return the methods of a recipe whose results are correct, and their errors."""
    recipe = RECIPES[name]
    o = operands(m, n, k, recipe)
    columns = o._replace(x=ready("torch", o.x))
    ways: dict[str, Callable[[], object]] = {}
    for job in jobs([name]):
        _, plan, by_columns = job
        if job not in bad:
            way = launched(plan, columns if by_columns else o, out, world.sm_count, by_columns)
            ways[plan_label(plan) + (" columns" if by_columns else "")] = way
    ways |= libraries(name, o, out)
    ways["weft auto"] = lambda: weft.matmul(
        columns.x, o.weight, use_fast_accum=recipe.fast_accum, world=world, out=out,
    )  # fmt: skip
    rows = torch.randperm(m, device="cuda")[:ROWS]
    some = rows_of(o.x, rows)
    expected = some.dequantized().double() @ o.weight.dequantized(SCALE_BLOCK).double().t()
    right, errors = {}, {}
    for way, fn in ways.items():

        def checked(fn: Callable[[], object] = fn) -> None:
            out.zero_()
            fn()

        error = worst_error(world, f"{name}: {way}", checked, lambda _: error_of(out[rows], expected))
        if error < RIGHT:
            right[way], errors[way] = fn, error
    return right, errors


def measure(size: tuple[str, int, int, int], recipes: list[str], world: weft.World, bad: Any, rounds: int) -> dict[str, Any]:  # fmt: skip
    name, m, n, k = size
    out = torch.empty(m, n, device="cuda", dtype=BF)
    x, w = torch.randn(m, k, device="cuda", dtype=BF), torch.randn(n, k, device="cuda", dtype=BF) * 0.02
    fns: dict[str, Callable[[], object]] = {"bf16: cuBLAS": lambda: torch.mm(x, w.t(), out=out)}
    errors: dict[str, float] = {}
    for recipe in recipes:
        ways, wrong = methods(recipe, m, n, k, world, out, bad)
        fns |= {f"{recipe}: {way}": fn for way, fn in ways.items()}
        errors |= {f"{recipe}: {way}": error for way, error in wrong.items()}
    times = time_interleaved(fns, mode="graph", calls=3, rounds=rounds)
    return dict(name=name, M=m, N=n, K=k, us={way: round(us, 2) for way, us in times.items()}, error=errors)


def summary(row: dict[str, Any], recipes: list[str]) -> str:
    """Return the TFLOP/s of each recipe: the best of weft's tiles, "auto", and the best library."""
    flops, parts = 2e-6 * row["M"] * row["N"] * row["K"], []
    for recipe in recipes:
        us = {way.partition(": ")[2]: t for way, t in row["us"].items() if way.startswith(f"{recipe}: ")}
        tiles = {way: t for way, t in us.items() if way.startswith("weft ") and way != "weft auto"}
        others = {way: t for way, t in us.items() if not way.startswith("weft ")}
        best = [min(group, key=group.__getitem__) for group in (tiles, others) if group]
        shown = [f"{way} {flops / us[way]:.0f}" for way in [*best, *(["weft auto"] if "weft auto" in us else [])]]
        parts.append(f"{recipe}: {', '.join(shown)}")
    return f"{row['name']} {row['M']}x{row['N']}x{row['K']} bf16 {flops / row['us']['bf16: cuBLAS']:.0f} | {' | '.join(parts)}"  # fmt: skip


def quantizing(m: int, h: int, inner: int, world: weft.World, rounds: int) -> dict[str, Any]:
    """Return the us of SiLU-mul and of add + norm, each with 16-bit rows and with 8-bit rows as the result, and of
    `weft.quantize` alone."""
    x, residual = (torch.randn(m, h, device="cuda", dtype=BF) for _ in range(2))
    hidden = torch.randn(m, inner, device="cuda", dtype=BF)
    gate_up, weight, one = torch.randn(m, 2 * inner, device="cuda", dtype=BF), torch.ones(h, device="cuda", dtype=BF), torch.ones(1, device="cuda")  # fmt: skip
    fns: dict[str, Callable[[], object]] = {
        "silu_mul": lambda: weft.silu_mul(gate_up, world=world),
        "norm": lambda: weft.all_reduce_rms_norm(x, residual, weight, world=world),
    }
    for recipe in ("row", "block", "tensor"):
        scale = one if recipe == "tensor" else None
        fns[f"silu_mul, {recipe}"] = lambda r=recipe, s=scale: weft.silu_mul_quantized(gate_up, r, scale=s, world=world)
        for before, rows in (("silu_mul", hidden), ("norm", x)):
            fns[f"quantize after {before}, {recipe}"] = lambda t=rows, r=recipe, s=scale: weft.quantize(
                t, r, scale=s, world=world
            )
        fns[f"norm, {recipe}"] = lambda r=recipe, s=scale: weft.all_reduce_rms_norm_quantized(
            x, residual, weight, r, scale=s, world=world
        )
    times = time_interleaved(fns, mode="graph", calls=5, rounds=rounds)
    return dict(name="quantizing", M=m, N=h, K=inner, us={way: round(us, 2) for way, us in times.items()}, error={})


def versions() -> dict[str, str]:
    versions = {}
    for package in ("torch", "triton", "sgl-deep-gemm", "quack-kernels"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def main() -> None:
    recipes = ["row", "block", "slow", "tensor"]
    a = options(choices=dict(recipes=RECIPES), recipes=recipes, rounds=5, processes=12)
    todo = jobs(a.recipes)
    with ProcessPoolExecutor(a.processes, multiprocessing.get_context("spawn")) as pool:
        bad = {j for j, why in zip(todo, pool.map(compiled, todo), strict=True) if why and not print(j, why)}
    run = Program(a, "fp8.jsonl", triton=triton.__version__, versions=versions(), rounds=a.rounds)
    for m, h, inner in run.cases({f"FP8 quantizing {mhi}": mhi for mhi in QUANTIZED}):
        (row,) = run.keep([quantizing(m, h, inner, run.world, a.rounds)])
        us = {way: t for way, t in row["us"].items() if not way.startswith("q") and "," in way}
        ratios = [f"{way} {t / row['us'][way.partition(',')[0]]:.2f}x" for way, t in us.items()]
        run.log(f"quantizing {m} x {h}, {inner}: {', '.join(ratios)}")
    for size in run.cases({f"FP8 GEMMs {size}": size for size in sizes()}):
        (row,) = run.keep([measure(size, a.recipes, run.world, bad, a.rounds)])
        run.log(summary(row, a.recipes))
    run.end()


if __name__ == "__main__":
    from bench.measure import fp8  # the compiling processes import the module by this name

    fp8.main()
