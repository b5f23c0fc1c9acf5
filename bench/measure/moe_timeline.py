"""Where a layer's time goes: the kernels of the MoE layers of `moe.py` by torch.profiler, beside the grouped GEMMs alone.

torchrun --nproc-per-node N -m bench.measure.moe_timeline --out DIR [--models ...] [--tokens ...] [--seconds S]

The program appends rows to DIR/moe_timeline.jsonl. A call by "auto" is a CUDA graph, and the ranks' GPUs meet before it. `kernels` has
[begin, end] in us from this meeting for the kernels of the first rank, and `us` is the end of the last one. "first" and "second" are the
us of the two grouped GEMMs alone, by torch and by weft (bench/measure/moe_alone.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist

import weft
from bench.common.program import Program, options
from bench.common.timing import capture, events_on_gpu, time_interleaved
from bench.measure import moe_alone
from bench.measure.moe import KNOWN, Layer, Library

Span = tuple[str, float, float]  # a kernel's name, and its begin and end in us


def after_meeting(events: Iterable[Span]) -> list[Span]:
    """Return the kernels after the last one of NCCL, with times from that kernel's end."""
    spans = sorted(events, key=lambda span: span[1])
    last = max(i for i, (name, _, _) in enumerate(spans) if name.startswith("nccl"))
    start = spans[last][2]
    return [(name, round(begin - start, 1), round(end - start, 1)) for name, begin, end in spans[last + 1 :]]


def measure(world: weft.World, name: str, tokens: int) -> dict:
    layer = Layer(world, KNOWN[name], tokens, 0.0)
    gemms = time_interleaved(moe_alone.gemms_of(layer, Library(layer)), mode="graph", calls=4, rounds=5)
    graph = capture(partial(layer.run, "auto"), 1)

    def call() -> None:
        dist.all_reduce(torch.empty(1, device="cuda"))
        graph.replay()

    spans = ((e.name, e.time_range.start, e.time_range.end) for e in events_on_gpu(call))
    kernels = world.exchange(after_meeting(spans))[0]
    alone = {
        half: {whose: round(gemms[f"{half} {whose}"], 1) for whose in ("torch", "weft")} for half in ("first", "second")
    }
    us = max(end for _, _, end in kernels)
    return dict(op="moe timeline", name=f"{name}-{tokens}", M=tokens, method="auto", us=us, kernels=kernels, **alone)


def main() -> None:
    models = ["Qwen3-30B", "FlashMoE", "GPT-OSS-120B", "Qwen3-235B"]
    a = options(choices=dict(models=KNOWN), models=models, tokens=[8192])
    run = Program(a, "moe_timeline.jsonl")
    cases = {f"timeline {name} {tokens}": (name, tokens) for tokens in a.tokens for name in a.models}
    with torch.no_grad():
        for name, tokens in run.cases(cases):
            for r in run.keep([measure(run.world, name, tokens)]):
                run.log(f"{r['name']}: {r['us']:.0f} us")
    run.end()


if __name__ == "__main__":
    main()
