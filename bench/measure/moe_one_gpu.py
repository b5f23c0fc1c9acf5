"""The MoE layer on one GPU beside what a user would pick there: vLLM's fused experts, torch's grouped GEMM, compiled or not.

torchrun --nproc-per-node 1 -m bench.measure.moe_one_gpu --out DIR [--models ...] [--tokens ...] [--zipf 1.0] [--compile] [--sweep] [--seconds S]

Appends rows to DIR/moe_one_gpu.jsonl. `us` is a layer with its gate (router GEMM, softmax, top-k, weights that sum to one), in a CUDA graph
in which the tokens change from call to call, the median of interleaved rounds. Methods: "weft", plan="auto"; "vllm", `fused_topk` and
`fused_experts` with vLLM's own table of tiles for the GPU where it has one (its version stands in the row); "torch", sort, gather,
`torch._grouped_mm` and sums, with all sizes on the device; "torch compiled", the same by torch.compile. A method that is not installed has
no row. With --sweep also each of PLANS. error: of weft's result against torch's, relative, of the norm.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import weft
from bench.common.timing import error_of, time_interleaved
from bench.measure.moe import MODELS, ROUTINGS, Layer, Model
from bench.measure.run import commit
from weft.plans import Dispatched, GemmTile, LowLatency, Plan, TileShape

KNOWN = MODELS | {"DeepSeek-V3": Model(7168, 2048, 256, 8)}
TOKENS = [64, 256, 512, 2048, 8192, 16384]
# Plans for few rows an expert.
PLANS: list[Plan] = [
    LowLatency(),
    LowLatency(TileShape(16, 128, 64, 4, 6)),
    LowLatency(TileShape(16, 128, 64, 4, 4), 3),
    LowLatency(TileShape(16, 128, 128, 4, 3)),
    LowLatency(TileShape(32, 128, 64, 4, 4)),
    LowLatency(TileShape(64, 128, 64, 4, 4)),
    Dispatched(GemmTile(64, 256, 64, 8, 4, 16)),
    Dispatched(GemmTile(64, 128, 64, 4, 5, 16)),
    Dispatched(GemmTile(64, 128, 128, 4, 4, 16)),
]


def by_torch(layer: Layer) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the layer as one writes it with torch's grouped GEMM: nothing waits for the host."""
    model, router, skew = layer.of, layer.router, None if layer.even else layer.skew
    first, second = layer.w13.transpose(1, 2), layer.w2.transpose(1, 2)

    def run(x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, router)
        logits = logits if skew is None else (logits + skew).to(x.dtype)
        weights, ids = torch.topk(logits.float().softmax(-1), model.k)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        ends = torch.histc(flat.float(), bins=model.experts, min=0, max=model.experts - 1).cumsum(0).int()
        gate, up = torch._grouped_mm(x[order // model.k], first, offs=ends).chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, second, offs=ends)
        in_order = rows[order.argsort()].view(*ids.shape, -1)
        return (in_order * weights.to(x.dtype)[:, :, None]).sum(1)

    return run


def by_vllm(layer: Layer) -> tuple[Callable[[torch.Tensor], torch.Tensor], str] | None:
    """Return vLLM's router and experts, and its version; None where it is not installed."""
    try:
        import vllm
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import fused_experts, fused_topk
    except ImportError:
        return None

    def run(x: torch.Tensor) -> torch.Tensor:
        with set_current_vllm_config(VllmConfig()):
            weights, ids, _ = fused_topk(x, layer.logits(x), layer.of.k, renormalize=True)
            return fused_experts(x, layer.w13, layer.w2, weights, ids)

    return run, vllm.__version__


def measure(world: weft.World, name: str, tokens: int, a: argparse.Namespace) -> list[dict]:
    layer = Layer(world, KNOWN[name], tokens, a.zipf)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"torch": by_torch(layer)}
    if a.compile:
        torch._dynamo.reset()
        ways["torch compiled"] = torch.compile(by_torch(layer), dynamic=False)
    versions = dict(torch=torch.__version__)
    if known := by_vllm(layer):
        ways["vllm"], versions["vllm"] = known
    expected = ways["torch"](layer.xs[0])
    errors = {way: error_of(fn(layer.xs[0]), expected) for way, fn in ways.items()}
    layer.turn = 0
    errors["weft"] = error_of(layer.run("auto"), expected)
    steps = {way: 0 for way in ways}

    def next_of(way: str) -> Callable[[], object]:
        def run() -> object:
            steps[way] += 1
            return ways[way](layer.xs[steps[way] % ROUTINGS])

        return run

    fns: dict[str, Callable[[], object]] = {way: next_of(way) for way in ways}
    for plan in PLANS if a.sweep else ():
        layer.turn, way = 0, f"weft {plan}"
        try:
            errors[way] = error_of(layer.run(plan), expected)
            fns[way] = partial(layer.run, plan)
        except weft.WeftError as error:
            print(f"{name}-{tokens} {plan}: {error}")
    times = time_interleaved(fns | {"weft": lambda: layer.run("auto")}, mode="graph", calls=2 * ROUTINGS, rounds=7)
    model = layer.of
    shape = dict(op="moe on one GPU", name=f"{name}-{tokens}", M=tokens, N=model.inner, K=model.hidden, E=model.experts)
    fixed = dict(
        top_k=model.k, zipf=a.zipf, mode="graph", gpu=torch.cuda.get_device_name(), versions=versions, commit=commit()
    )
    return [dict(shape, method=way, us=round(us, 1), error=round(errors[way], 5), **fixed) for way, us in times.items()]


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--models", nargs="*", default=list(KNOWN))
    p.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    p.add_argument("--zipf", type=float, default=0.0)
    p.add_argument("--compile", action="store_true", help="also by torch.compile, some 20 s a size")
    p.add_argument("--sweep", action="store_true", help="also plans for few rows of an expert")
    p.add_argument("--seconds", type=float, default=1e9, help="start no further size after this many")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    start, world = time.time(), weft.init()
    with torch.no_grad():
        for name in a.models:
            for tokens in a.tokens:
                if time.time() - start > a.seconds:
                    break
                rows = measure(world, name, tokens, a)
                torch.cuda.empty_cache()
                with open(a.out / "moe_one_gpu.jsonl", "a") as f:
                    f.writelines(json.dumps(row) + "\n" for row in rows)
                times = " | ".join(f"{r['method']} {r['us']:.0f} ({r['error']:.4f})" for r in rows)
                print(f"{time.time() - start:.0f}s {rows[0]['name']}: {times}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
