"""Where the time of a layer in several launches goes, kernel by kernel, beside what the grouped GEMMs take alone.

torchrun --nproc-per-node N -m bench.measure.moe_timeline --out DIR [--models ...] [--tokens ...]

Appends rows to DIR/moe_timeline.jsonl: medians in us over calls in a CUDA graph, of rank 0, as the profiler sees them. Kernels of the
side stream (dispatch_rows, combine_rows) run beside the others; what the others take adds up to the layer. count_routes waits for the
other ranks' routes, and so has the time by which ranks are apart. alone: the kernel by itself, the slowest rank's, where it was timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import weft
from bench.common.resume import keep
from bench.common.timing import capture, time_interleaved
from bench.measure import moe, moe_alone
from bench.measure.run import commit
from weft.plans import Dispatched

KERNELS = (
    "share", "count_routes", "place_routes", "dispatch_rows", "grouped_gemm_in", "combine_rows", "grouped_gemm_out", "sum_ranks",
)  # fmt: skip
ALONE = {"grouped_gemm_in": "first", "grouped_gemm_out": "second"}
CALLS, REPLAYS = 4, 5


def traced(layer: moe.Layer) -> dict[str, list[float]]:
    """Return the us of each call's kernels by name; "gate": all others, those of the gate."""
    graph = capture(lambda: layer.run(Dispatched()), CALLS)
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        p.export_chrome_trace(f.name)
        events = json.loads(Path(f.name).read_text())["traceEvents"]
    durations: dict[str, list[float]] = defaultdict(list)
    others = 0.0
    for e in events:
        if e.get("cat") == "kernel" and e["name"] in KERNELS:
            durations[e["name"]].append(e["dur"])
        elif e.get("cat") == "kernel":
            others += e["dur"]
    durations["gate"] = [others / len(durations["share"])]
    return durations


def measure(world: weft.World, name: str, tokens: int) -> list[dict]:
    layer = moe.Layer(world, moe.KNOWN[name], tokens, 0.0)
    fns = {"whole": lambda: layer.run(Dispatched()), **moe_alone.gemms_of(layer, moe.Library(layer))}
    times = time_interleaved(fns, mode="graph", calls=CALLS, rounds=5)
    durations = traced(layer)
    fixed = dict(
        op="moe timeline", name=f"{name}-{tokens}", world=world.size, commit=commit(), whole_us=round(times["whole"], 1)
    )
    rows = []
    for kernel in ("gate", *KERNELS):
        row = dict(fixed, kernel=kernel, us=round(statistics.median(durations[kernel]), 1))
        if kernel in ALONE:
            row |= {f"alone_{whose}_us": round(times[f"{ALONE[kernel]} {whose}"], 1) for whose in ("weft", "torch")}
        rows.append(row)
    return rows


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--models", nargs="*", default=["Qwen3-30B", "FlashMoE"])
    p.add_argument("--tokens", nargs="*", type=int, default=[8192])
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    world = weft.init()
    with torch.no_grad():
        for tokens in a.tokens:
            for name in a.models:
                rows = measure(world, name, tokens)
                keep(world, a.out / "moe_timeline.jsonl", rows)
                if world.rank == 0:
                    print(rows[0]["name"], " ".join(f"{r['kernel']} {r['us']}" for r in rows), flush=True)
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
