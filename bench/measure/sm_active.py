"""How busy one MoE layer keeps the GPU's SMs, by NVIDIA's profiler, and how many kernels it launches.

    python -m bench.measure.sm_active --out DIR [--models Qwen3-30B ...] [--tokens 2048 8192 16384] [--methods weft ...]

For each size and method a process of its own runs under `ncu`, which times each kernel of one layer alone and counts the cycles in
which an SM has a warp; clocks stay as they are. Appends rows to DIR/sm_active.jsonl: `kernels`, the launches of the layer, gate
included; `active`, the share of SMs' cycles in which they were active, over the time of all kernels; `kernels_us`, that time. The
profiler leaves out the gaps between kernels, so the share of the layer's whole time is active x kernels_us over the layer's own time
(bench/measure/moe_one_gpu.py). FlashMoE (section 4.3) reports 93% for its kernel. Methods: "weft", plan="auto"; "fused", all
experts in one kernel; "one launch", the router in it too; "torch"; "vllm".
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import weft
from bench.common.resume import keep
from bench.measure.moe import Layer
from bench.measure.moe_one_gpu import KNOWN, Method, by_one_launch, by_torch, by_vllm, by_weft
from bench.measure.run import commit

ACTIVE, DURATION = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed", "gpu__time_duration.sum"  # %, ns
NCU = ["ncu", "--csv", "--print-units", "base", "--metrics", f"{ACTIVE},{DURATION}"]
NCU += ["--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none"]
METHODS: dict[str, Callable[[Layer], Method]] = {
    "weft": lambda layer: by_weft(layer, "auto"),
    "fused": lambda layer: by_weft(layer, "fused"),
    "one launch": by_one_launch,
    "torch": by_torch,
    "vllm": by_vllm,
}
WARM_UP = 3


def kernels_of(report: Iterable[str]) -> list[tuple[str, float, float]]:
    """Return (name, ns, % active) of each kernel of a report of ncu, in the order of their launches. Raises ValueError for a kernel
    without both metrics."""
    lines = [line for line in report if line.startswith('"')]
    metrics: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    for row in csv.DictReader(lines):
        names[row["ID"]] = row["Kernel Name"]
        metrics.setdefault(row["ID"], {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    for number, values in metrics.items():
        if set(values) != {ACTIVE, DURATION}:
            raise ValueError(f"{names[number]}: ncu reports {sorted(values)}")
    return [(names[number], values[DURATION], values[ACTIVE]) for number, values in metrics.items()]


def share(kernels: list[tuple[str, float, float]]) -> tuple[float, float]:
    """Return the us of all kernels, and the share of it in which the SMs are active."""
    ns = sum(duration for _, duration, _ in kernels)
    return ns / 1e3, sum(duration * active for _, duration, active in kernels) / ns / 100


def run_layer(model: str, tokens: int, method: str) -> None:
    """Run a layer WARM_UP times, then once for the profiler."""
    world = weft.init()
    with torch.no_grad():
        layer = Layer(world, KNOWN[model], tokens, 0.0)
        run = METHODS[method](layer)
        for x in layer.xs[:1] * WARM_UP:
            run(x)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        run(layer.xs[0])
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    torch.distributed.destroy_process_group()


def measure(model: str, tokens: int, method: str, seconds: float) -> dict[str, object]:
    """Return the row of one layer. Raises CalledProcessError or TimeoutExpired, with what the process printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    layer = ["-m", "bench.measure.sm_active", "--one", model, str(tokens), method]
    ran = subprocess.run(
        [*NCU, "--target-processes", "all", *launcher, *layer], capture_output=True, text=True, timeout=seconds
    )
    if ran.returncode:
        raise subprocess.CalledProcessError(ran.returncode, ran.args, ran.stdout[-2000:], ran.stderr[-2000:])
    kernels = kernels_of(ran.stdout.splitlines())
    us, active = share(kernels)
    size = KNOWN[model]
    return dict(
        op="moe, SMs active", name=f"{model}-{tokens}", M=tokens, N=size.inner, K=size.hidden, E=size.experts,
        top_k=size.k, method=method, kernels=len(kernels), kernels_us=round(us, 1), active=round(active, 4),
        longest=max(kernels, key=lambda kernel: kernel[1])[0][:80], gpu=torch.cuda.get_device_name(), commit=commit(),
    )  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path)
    p.add_argument("--models", nargs="*", default=["Qwen3-30B", "Mixtral-8x7B"])
    p.add_argument("--tokens", nargs="*", type=int, default=[2048, 8192, 16384])
    p.add_argument("--methods", nargs="*", default=["weft", "fused", "one launch", "torch"])
    p.add_argument("--seconds", type=float, default=120, help="for one layer under the profiler")
    p.add_argument("--one", nargs=3, help="model, tokens and method: run this layer, under the profiler")
    a = p.parse_args()
    if a.one:
        run_layer(a.one[0], int(a.one[1]), a.one[2])
        return
    if a.out is None:
        p.error("--out names the folder for the rows")
    a.out.mkdir(parents=True, exist_ok=True)
    for model in a.models:
        for tokens in a.tokens:
            for method in a.methods:
                try:
                    row = measure(model, tokens, method, a.seconds)
                except (subprocess.SubprocessError, ValueError) as error:
                    print(model, tokens, method, error, getattr(error, "output", ""), getattr(error, "stderr", ""))
                    continue
                keep(None, a.out / "sm_active.jsonl", [row])
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
