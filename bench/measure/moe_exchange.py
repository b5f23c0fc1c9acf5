"""Dispatch and combine alone on real models' sizes, beside NCCL's all-to-all.

torchrun --nproc-per-node N -m bench.measure.moe_exchange --out DIR [--models ...] [--tokens ...] [--zipf 1.0]

The program appends rows to DIR/moe_exchange.jsonl, `op` "moe_dispatch" and "moe_combine". `us` is the median of calls that the host
launches ahead of the GPU, by events between them, on the slowest rank; a combine stands between two dispatches, so the ranks meet in each.
"library" is `all_to_all_single` with sizes known in advance, with torch's ordering of the rows by expert and weighted sum. limit_us = bytes
of the rows that leave a rank, each token once for each rank with one of its experts / the link's measured rate.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import weft
from bench.common.program import Program, options
from bench.common.timing import error_of
from bench.measure.moe import BF, MODELS, ROUTINGS, Layer, Library
from weft import moe

CALLS, ROUNDS = 8, 5
AHEAD = 10_000_000  # cycles, about 5 ms: longer than the host takes to launch so many calls
Phases = tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]


def weft_phases(layer: Layer, **options: Any) -> Phases:
    """Return weft's dispatch and combine, for routings that change from call to call. The combine sums the rows that
    arrived."""
    routed = [moe.gate(layer.logits(x), layer.model.k, world=layer.world) for x in layer.xs]

    def dispatch() -> Any:
        index, layer.call_index = layer.call_index % ROUTINGS, layer.call_index + 1
        return moe.dispatch(layer.xs[index], *routed[index], experts=layer.model.experts, world=layer.world, **options)

    return dispatch, lambda dispatched: moe.combine(*dispatched)


def library_phases(layer: Layer) -> Phases:
    x, (p, order, gives, gets, place, back, _) = layer.xs[0], Library(layer).fixed
    t, k = p.shape

    def dispatch() -> torch.Tensor:
        received = x.new_empty(sum(gets), x.shape[1])
        dist.all_to_all_single(received, x[order // k], gets, gives)
        return received[place]

    def combine(rows: torch.Tensor) -> torch.Tensor:
        z = x.new_empty(t * k, x.shape[1])
        dist.all_to_all_single(z, rows[back], gives, gets)
        return (z[order.argsort()].view(t, k, -1) * p.to(BF)[:, :, None]).sum(1)

    return dispatch, combine


def times(phases: Phases) -> tuple[float, float]:
    """Return the us of dispatch and of combine on the slowest rank."""
    dispatch, combine = phases
    us_of_phases: tuple[list[float], list[float]] = ([], [])
    combine(dispatch())
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD)
        dist.all_reduce(torch.empty(1, device="cuda"))
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(CALLS)]
        for start, between, last in marks:
            start.record()
            received = dispatch()
            between.record()
            combine(received)
            last.record()
        torch.cuda.synchronize()
        for start, between, last in marks[1:]:
            us_of_phases[0].append(1e3 * start.elapsed_time(between))
            us_of_phases[1].append(1e3 * between.elapsed_time(last))
    slowest = torch.tensor([statistics.median(samples) for samples in us_of_phases], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest[0].item(), slowest[1].item()


def limit(layer: Layer, link: float) -> float:
    """Return the us of the links of the rank that sends the most rows. link: GB/s."""
    world, model = layer.world, layer.model
    local, sent = model.experts // world.size, 0
    for x in layer.xs:
        rank = layer.logits(x).float().topk(model.k).indices // local
        sent += sum(int((rank == r).any(1).sum()) for r in range(world.size) if r != world.rank)
    return max(world.exchange(sent * model.hidden * 2 / ROUTINGS / link / 1e3))


def measure(world: weft.World, name: str, tokens: int, zipf: float, link: float) -> list[dict[str, Any]]:
    model, layer = MODELS[name], Layer(world, MODELS[name], tokens, zipf)
    ways = {"library": library_phases(layer), "weft": weft_phases(layer)}
    if tokens <= 512:
        ways["weft, masked"] = weft_phases(layer, layout="masked", max_m=tokens)
    dispatch, combine = ways["library"]
    expected = combine(dispatch())
    layer.call_index, bound, out = 0, round(limit(layer, link), 1), []
    dispatch, combine = ways["weft"]
    error = error_of(combine(dispatch()), expected)
    for way, phases in ways.items():
        for op, us in zip(("moe_dispatch", "moe_combine"), times(phases), strict=True):
            out.append(dict(
                op=op, name=f"{name}-{tokens}", M=tokens, N=model.inner, K=model.hidden, E=model.experts, top_k=model.k, method=way, us=round(us, 1),
                limit_us=bound, mode="eager", zipf=zipf, error=round(error, 5),
            ))  # fmt: skip
    return out


def main() -> None:
    a = options(models=list(MODELS), tokens=[128, 2048, 8192], zipf=0.0)
    run = Program(a, "moe_exchange.jsonl")
    cases = {f"exchange {name} {tokens}": (name, tokens) for tokens, name in itertools.product(a.tokens, a.models)}
    link = run.link
    with torch.no_grad():
        for name, tokens in run.cases(cases):
            rows = run.keep(measure(run.world, name, tokens, a.zipf, link))
            text = " | ".join(f"{r['method']} {r['op'][4:]} {r['us']:.0f}" for r in rows)
            run.log(f"{rows[0]['name']} limit {rows[0]['limit_us']} error {rows[0]['error']}: {text}")
    run.end()


if __name__ == "__main__":
    main()
