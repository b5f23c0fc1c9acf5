"""weft's overlapped operators of 8-bit operands, compared with torch's:
torchrun --nproc-per-node N -m bench.measure.fp8_ranks --out DIR [--seconds S] [--recipes row block tensor]

The MLP layers of Llama-70B, Qwen2.5-32B and DeepSeek-V3's dense part are split over the ranks: all-gather + GEMM of the
column-parallel linear, GEMM + reduce-scatter and, last, GEMM + all-reduce of the row-parallel one. All methods of a size and mode are
timed in one interleaved run:

    sequential         NCCL and a library's scaled GEMM, with outputs from the caching allocator; the fastest form counts: the GEMM of
                       each library, with rows and scales gathered by one NCCL launch ("coalesced") or by two
    torch symm_mem     torch's fused operators of scaled operands (by row and by tensor; no all-reduce)
    weft auto, weft fused, weft decomposed
    bf16 sequential, bf16 weft auto      the same values in bfloat16
    gemm, comm         the fastest library's scaled GEMM of the whole size alone, and the collective alone

The program compares some rows of each result with float64 products of the dequantized operands, and the whole result with the first
sequential form; it prints and leaves out a method that fails or is wrong. In mode "graph" every method is in a CUDA graph; a
method that cannot be captured is in mode "eager" alone. The program appends a row for each size and mode to DIR/fp8_ranks.jsonl.
`limit_us` is as in bench/measure/run.py.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
import triton

import weft
from bench.common import peers
from bench.common.program import Program, gains, options, worst_error
from bench.common.timing import RIGHT, error_of, time_interleaved
from bench.measure.fp8 import BF, E4M3, MODELS, RECIPES, ROWS, operands, ready, rows_of, versions
from bench.measure.run import OPS, capturable
from weft.backends import library_gemm
from weft.backends.library_gemm import ScaledOperands
from weft.op import trial_title
from weft.scaled_tensor import SCALE_BLOCK, ScaledTensor

TOKENS = (4096, 8192, 1024, 16384, 2048, 512)
GATHER, SCATTER, _ = OPS
SEQUENTIAL, COALESCED = "sequential", ", coalesced"
Product = Callable[[ScaledTensor], torch.Tensor]  # computes the product of x with the layer's weight


class Size(NamedTuple):
    op: str
    recipe: str
    name: str
    m: int
    n: int
    k: int

    def received(self, world: int) -> float:
        """Return the number of bytes that each rank has to receive: 8-bit rows with their scales, or partial sums in
        bfloat16."""
        scales = {"tensor": 0, "row": 1, "block": self.k // 128}[self.recipe]
        row = self.k + 4 * scales if self.op == GATHER else 2 * self.n
        return self.m * row * (world - 1) / world * (1 if self.op in (GATHER, SCATTER) else 2)


def sizes(world: int, recipes: list[str], ops: list[str]) -> Iterator[Size]:
    """Yield the sizes: the most important sizes first, the sizes of the all-reduce last."""
    for group in ([op for op in ops if op != OPS[2]], [op for op in ops if op == OPS[2]]):
        for m in TOKENS:
            for recipe in recipes:
                for model, (hidden, inner, *_) in MODELS.items():
                    for op in group:
                        n, k = (2 * inner // world, hidden) if op == GATHER else (hidden, inner // world)
                        yield Size(op, recipe, f"{model} {'gate_up' if op == GATHER else 'down'} x{world}", m, n, k)


# -- the operands ------------------------------------------------------------------------------------------------------
class Layer:
    """The operands of this rank and the expected result."""

    def __init__(self, size: Size, world: weft.World) -> None:
        self.size, self.world, self.trusted = size, world, None
        m = size.m // world.size if size.op == GATHER else size.m
        self.o = o = operands(m, size.n, size.k, RECIPES[size.recipe])
        if size.recipe == "tensor":
            dist.broadcast(o.x.scales, 0)
        self.x, self.weight = o.x.dequantized().to(BF), o.weight.dequantized(SCALE_BLOCK).to(BF)
        self.whole_x = gathered(o.x, world.size) if size.op == GATHER else o.x
        shard = size.m // world.size
        some = torch.randperm(shard, generator=torch.Generator().manual_seed(shard))[: ROWS // world.size].cuda()
        all_rows = torch.cat([some + shard * rank for rank in range(world.size)])
        self.rows = some if size.op == SCATTER else all_rows  # the rows of the result that are compared
        x = rows_of(self.whole_x, all_rows).dequantized().double()
        self.expected = x @ o.weight.dequantized(SCALE_BLOCK).double().t()
        if size.op != GATHER:
            dist.all_reduce(self.expected)
        if size.op == SCATTER:
            self.expected = self.expected.chunk(world.size)[world.rank]

    def error(self, result: torch.Tensor) -> float:
        """Return the larger of two errors: of some rows against float64, and of all rows against the trusted result."""
        of_rows = error_of(result[self.rows], self.expected)
        return of_rows if self.trusted is None else max(of_rows, error_of(result, self.trusted))

    def right(self, ways: dict[str, peers.Run]) -> dict[str, float]:
        """Return the errors of the methods whose result is correct on all ranks. The result of the first such method is
        trusted from then on. Collective."""
        errors = {}
        for way, run in ways.items():
            error = worst_error(self.world, f"{self.size}, {way}", run, self.error)
            if error < RIGHT:
                errors[way] = float(f"{error:.2e}")
                self.trusted = run() if self.trusted is None else self.trusted
        return errors


def gathered(x: ScaledTensor, world: int, coalesced: bool = False) -> ScaledTensor:
    """Gather the rows and scales of all ranks with NCCL, and return them."""
    parts = [t.view(torch.uint8) for t in ((x.values,) if x.recipe == "tensor" else (x.values, x.scales))]
    whole = [torch.empty(len(t) * world, t.shape[1], device=t.device, dtype=t.dtype) for t in parts]
    with dist.distributed_c10d._coalescing_manager() if coalesced else contextlib.nullcontext():
        for full, part in zip(whole, parts, strict=True):
            dist.all_gather_into_tensor(full, part)
    scales = x.scales if x.recipe == "tensor" else whole[1].view(torch.float32)
    return ScaledTensor(whole[0].view(E4M3), scales, x.recipe)


# -- the methods -------------------------------------------------------------------------------------------------------
def products(o: ScaledOperands) -> dict[str, Product]:
    """Return the libraries' scaled products with the layer's weight by name, with outputs from the caching
    allocator."""
    weight, recipe = o.weight.values.t(), o.weight.recipe
    if recipe != "block":
        scale, fast = o.weight.scales.view(1, -1) if recipe == "row" else o.weight.scales, o.fast_accum
        return {"torch": lambda x: torch._scaled_mm(x.values, weight, x.scales, scale, out_dtype=BF, use_fast_accum=fast)}  # fmt: skip
    return {name: by_block(o, product) for name, product in library_gemm.scaled_products(o.scaling).items()}


def by_block(o: ScaledOperands, product: library_gemm.ScaledProduct) -> Product:
    def run(x: ScaledTensor) -> torch.Tensor:
        out = torch.empty(len(x.values), len(o.weight.values), device=x.values.device, dtype=BF)
        product(o._replace(x=x), out)
        return out

    return run


def sequential(layer: Layer, product: str, multiply: Product) -> dict[str, peers.Run]:
    """Return the forms of NCCL's collective and a library's product, one after the other."""
    o, size, world = layer.o, layer.size, layer.world.size
    if size.op == GATHER:
        forms = {"": False} | ({COALESCED: True} if size.recipe != "tensor" else {})
        return {
            f"{SEQUENTIAL}, {product}{form}": lambda once=once: multiply(gathered(o.x, world, once))
            for form, once in forms.items()
        }
    x = ready(product, o.x)

    return {f"{SEQUENTIAL}, {product}": lambda: peers.sum_over_ranks(size.op, multiply(x), world)}


def torch_fused(layer: Layer) -> dict[str, peers.Run]:
    """Return torch's fused operator by name; empty if torch has none."""
    o, size, group = layer.o, layer.size, dist.group.WORLD.group_name
    if size.recipe == "block" or size.op == OPS[2]:
        return {}
    symm.enable_symm_mem_for_group(group)
    (x, x_scale, _), (weight, scale, _), _, fast = o
    scale = scale.view(1, -1) if size.recipe == "row" else scale
    weight, ops = weight.t(), torch.ops.symm_mem
    if size.op == GATHER:
        return {
            "torch symm_mem": lambda: ops.fused_all_gather_scaled_matmul(
                x, [weight], x_scale, [scale], 0, group, [None], [None], [BF], [fast]
            )[1][0]
        }
    return {
        "torch symm_mem": lambda: ops.fused_scaled_matmul_reduce_scatter(
            x, weight, x_scale, scale, "sum", 0, 0, group, [size.m, size.n], None, None, BF, fast
        )
    }


def overlapped(layer: Layer) -> dict[str, peers.Run]:
    """Return weft's and torch's operators, and weft's operators with 16-bit operands."""
    o, world, fn = layer.o, layer.world, getattr(weft, layer.size.op)
    weft_ways: dict[str, peers.Run] = {
        f"weft {plan}": lambda plan=plan: fn(o.x, o.weight, plan=plan, use_fast_accum=o.fast_accum, world=world)
        for plan in ("auto", "fused", "decomposed")
    }
    return torch_fused(layer) | weft_ways | {
        "bf16 sequential": peers.cublas_nccl(layer.size.op, layer.x, layer.weight, world.size),
        "bf16 weft auto": lambda: fn(layer.x, layer.weight, world=world),
    }  # fmt: skip


def methods(layer: Layer) -> tuple[dict[str, peers.Run], dict[str, float]]:
    """Return the methods with correct results by name, and their errors. Collective; the names are the same on all
    ranks."""
    o, size, gemms = layer.o, layer.size, dict[str, peers.Run]()
    ways, errors = dict[str, peers.Run](), dict[str, float]()
    for product, multiply in products(o).items():
        forms = sequential(layer, product, multiply)
        if right := layer.right(forms):
            ways, errors = ways | forms, errors | right
            whole = ready(product, layer.whole_x)
            gemms[f"gemm, {product}"] = lambda multiply=multiply, whole=whole: multiply(whole)
    if not gemms:
        return {}, {}
    overlaps = overlapped(layer)
    ways, errors = ways | overlaps, errors | layer.right(overlaps)
    cols = (
        size.k // 2 if size.op == GATHER else size.k
    )  # as many bytes in bfloat16, for which torch can draw random numbers
    comm = peers.collective(size.op, size.m, size.n, cols, layer.world.size, BF)
    return {way: ways[way] for way in errors} | gemms | {"comm": comm}, errors


def timed(layer: Layer, runs: dict[str, peers.Run], mode: str, rounds: int) -> dict[str, float]:
    """Return the us of each method, and of the fastest form of "sequential" and of "gemm". Collective."""
    size = layer.size
    if mode == "graph":
        for way in [way for way in runs if way == "torch symm_mem" or way.endswith(COALESCED)]:
            if not all(layer.world.exchange(capturable(runs[way]))):
                print(f"left out: {size}, {way}: it cannot be captured", flush=True)
                runs = {name: run for name, run in runs.items() if name != way}
    calls = 3 if size.m * size.n * size.k > 1 << 38 else 10
    if mode == "eager" and size.m <= 1024:  # these times depend on the host, and vary
        calls, rounds = 30, 3 * rounds
    us = time_interleaved(runs, mode=mode, calls=calls, rounds=rounds)
    for part in (SEQUENTIAL, "gemm"):
        us[part] = min(t for way, t in us.items() if way.startswith(f"{part}, "))
    return {way: round(t, 2) for way, t in us.items()}


def taken(layer: Layer, mode: str) -> str | None:
    """Return the JSON of the plan that "auto" chose, or None if it timed no plans."""
    size = layer.size
    trial = layer.world.choices.last(trial_title(size.op, size.recipe), (size.m, size.n, size.k))
    return None if trial is None else trial.chosen(mode).to_json()


def main() -> None:
    recipes, modes = ["row", "block", "tensor"], ["graph", "eager"]
    choices = dict(recipes=recipes, ops=OPS, modes=modes)
    a = options(choices=choices, recipes=recipes, ops=list(OPS), modes=modes, rounds=5)
    run = Program(a, "fp8_ranks.jsonl", triton=triton.__version__, versions=versions(), rounds=a.rounds)
    torch.manual_seed(run.world.rank)
    link = run.link
    for size in run.cases({f"FP8 {size}": size for size in sizes(run.world.size, a.recipes, a.ops)}):
        for row in measured(size, run.world, link, a.modes, a.rounds):
            run.keep([row])
            run.log(f"{size}, {row['mode']}: limit {row['limit_us']:.0f} | {gains(row['us'], SEQUENTIAL)}")
    run.end()


def measured(size: Size, world: weft.World, link: float, modes: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each mode; none if no library multiplies with this recipe. Collective."""
    layer = Layer(size, world)
    runs, errors = methods(layer)
    for mode in modes if runs else ():
        try:
            us = timed(layer, runs, mode, rounds)
        except Exception:  # all ranks raise it, or the next collective waits for the rank that did
            print(f"left out: {size}, mode {mode}: {traceback.format_exc(limit=-3)[-900:]}", flush=True)
            continue
        limit = max(us["gemm"], size.received(world.size) / link / 1e3)
        yield dict(
            op=size.op, name=size.name, recipe=size.recipe, M=size.m, N=size.n, K=size.k, mode=mode, us=us,
            error=errors, limit_us=round(limit, 2), plan=taken(layer, mode),
        )  # fmt: skip


if __name__ == "__main__":
    main()
