"""MoE layers in which one rank begins late, compared with a layer by NCCL's all-to-all and with a collective alone.

torchrun --nproc-per-node N -m bench.measure.moe_stragglers --out DIR [--models ...] [--tokens ...] [--delays 0 0.5 1 2] [--seconds S]

The program appends rows to DIR/moe_stragglers.jsonl. All ranks but one begin a call together; the late rank, a different one in each call,
first sleeps for `delay` times the libraries' time for a layer. `us` and `p95_us` are the median and 95th percentile over calls of the time
from the common beginning to the end on the last rank. The methods are "auto"; "library", NCCL's all-to-all and torch's grouped GEMM
(bench/measure/moe.py); and "all-reduce", of a rank's rows. Calls are CUDA graphs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

import weft
from bench.common.program import Program, options
from bench.common.timing import capture, time_interleaved
from bench.measure.moe import KNOWN, Layer, Library

CALLS = 40  # the number of calls for each method and delay
CLOCK = 1_000_000  # cycles of the sleep that measures the GPU's clock


def figures(us: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the figures of a row, computed from the times of all ranks for each call."""
    last = sorted(max(call) for call in us)
    p95 = last[min(len(last) - 1, int(0.95 * len(last)))]
    return dict(us=round(statistics.median(last), 1), p95_us=round(p95, 1))


def timed(call: Callable[[], object], cycles: int) -> float:
    """Return the us from a common beginning of all ranks to the end of a call. This GPU sleeps for `cycles` before the
    call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.all_reduce(torch.empty(1, device="cuda"))
    begin.record()
    if cycles:
        torch.cuda._sleep(cycles)
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def measure(world: weft.World, name: str, tokens: int, delays: Sequence[float]) -> list[dict]:
    layer = Layer(world, KNOWN[name], tokens, 0.0)
    library, rows_of_rank = Library(layer), layer.xs[0].clone()
    calls: dict[str, Callable[[], object]] = {"auto": partial(layer.run, "auto"), "library": library.known}
    calls["all-reduce"] = partial(dist.all_reduce, rows_of_rank)
    layer_us = time_interleaved({"": library.known}, mode="graph", calls=3, rounds=3)[""]
    cycles_a_us = CLOCK / timed(partial(torch.cuda._sleep, CLOCK), 0)
    graphs = {method: capture(call, 1) for method, call in calls.items()}
    fixed = dict(op="moe stragglers", name=f"{name}-{tokens}", M=tokens)
    rows = []
    for delay in delays:
        cycles = int(delay * layer_us * cycles_a_us)
        for method, graph in graphs.items():
            rank_us = [timed(graph.replay, cycles * (i % world.size == world.rank)) for i in range(CALLS)]
            us = list(zip(*world.exchange(rank_us), strict=True))
            rows.append(dict(fixed, method=method, delay=delay, delay_us=round(delay * layer_us, 1), **figures(us)))
    return rows


def main() -> None:
    models, delays = ["Qwen3-30B", "FlashMoE"], [0.0, 0.5, 1.0, 2.0]
    a = options(choices=dict(models=KNOWN), models=models, tokens=[8192, 512], delays=delays)
    run = Program(a, "moe_stragglers.jsonl")
    cases = {f"stragglers {name} {tokens}": (name, tokens) for tokens in a.tokens for name in a.models}
    with torch.no_grad():
        for name, tokens in run.cases(cases):
            for r in run.keep(measure(run.world, name, tokens, a.delays)):
                run.log(f"{r['name']}, {r['delay']} layers late: {r['method']} {r['us']} ({r['p95_us']})")
    run.end()


if __name__ == "__main__":
    main()
