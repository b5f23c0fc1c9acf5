"""How many kernels the GPU runs for one MoE layer, router included, beside the libraries.

torchrun --nproc-per-node N -m bench.measure.moe_launches --out DIR [--models ...] [--tokens ...]

Appends rows to DIR/moe_launches.jsonl. kernels: of one eager call on rank 0, after calls that warm up, by torch.profiler; copies: copies
and fills of that call; names: the kernels, each with its number. Methods: "weft, one launch", whose launch includes the router; "weft
fused", "weft dispatched", "weft low latency" and "weft auto" behind the router's GEMM and choice; "library", NCCL all-to-all and torch's
grouped GEMM as users write it (bench/measure/moe.py). On one GPU also "torch", "vllm" and "quack" (bench/measure/moe_one_gpu.py). A method
that is not installed or fails has no row.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from bench.common.quack_moe import usable
from bench.common.resume import keep
from bench.common.timing import events_on_gpu
from bench.measure.moe import Layer, Library
from bench.measure.moe_one_gpu import KNOWN, by_one_launch, by_quack, by_torch, by_vllm, by_weft
from bench.measure.run import commit
from weft.plans import Dispatched, FusedMoe, LowLatency, Plan

PLANS: dict[str, str | Plan] = {
    "weft fused": FusedMoe(),
    "weft dispatched": Dispatched(),
    "weft low latency": LowLatency(),
    "weft auto": "auto",
}
COPIES = ("Memcpy", "Memset")  # how the profiler names copies and fills


def split(names: Counter[str]) -> tuple[int, int]:
    """Return the number of kernels, and that of copies and fills."""
    copies = sum(count for name, count in names.items() if name.startswith(COPIES))
    return names.total() - copies, copies


def methods_of(layer: Layer, seconds: float) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return what makes each method, by name; making may fail."""
    x = layer.xs[0]
    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "weft, one launch": lambda: partial(by_one_launch(layer), x),
        "library": lambda: Library(layer).eager,
    }
    makers |= {name: lambda plan=plan: partial(by_weft(layer, plan), x) for name, plan in PLANS.items()}
    if layer.world.size == 1:
        makers["torch"] = lambda: partial(by_torch(layer), x)
        makers["vllm"] = lambda: partial(by_vllm(layer), x)
        makers["quack"] = lambda: partial(by_quack(layer, usable(seconds)), x)
    return makers


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--models", nargs="*", default=["Qwen3-30B", "FlashMoE"])
    p.add_argument("--tokens", nargs="*", type=int, default=[8192, 64])
    p.add_argument("--quack-seconds", type=float, default=60, help="to compile quack's forms")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    world = weft.init()
    for model, tokens in ((model, tokens) for model in a.models for tokens in a.tokens):
        size = KNOWN[model]
        layer = Layer(world, size, tokens, 0.0)
        shape = dict(op="kernels of an MoE layer", name=f"{model}-{tokens}", M=tokens, N=size.inner, K=size.hidden)
        shape |= dict(E=size.experts, top_k=size.k, world=world.size, commit=commit())
        for method, make in methods_of(layer, a.quack_seconds).items():
            try:
                with torch.no_grad():
                    names = Counter(event.name for event in events_on_gpu(make()))
            except Exception as error:  # a library may raise anything
                print(f"{model}-{tokens} {method}: {type(error).__name__}: {error}"[:300], flush=True)
                continue
            kernels, copies = split(names)
            row = dict(shape, method=method, kernels=kernels, copies=copies, names=names)
            keep(world, a.out / "moe_launches.jsonl", [row])
            if world.rank == 0:
                print(f"{model}-{tokens} {method}: {kernels} kernels, {copies} copies and fills", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
