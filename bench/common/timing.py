"""Interleaved timing of several functions on all ranks: medians, the slowest rank's time, graph-captured or eager."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from weft.timing import behind_host, captured, interleaved, length, repeated, span

RIGHT = 1.5e-2  # the largest relative error of a right result: bf16 rounding of an 8-rank NCCL sum is about 5e-3


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the error over the norm of the expected result. A NaN becomes infinity, since `max` would pass over a
    NaN."""
    error = ((actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def _slowest(values: list[float]) -> list[float]:
    t = torch.tensor(values, device="cuda")
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.tolist()


def _rendezvous() -> None:
    torch.cuda.synchronize()
    dist.barrier()


def capture(fn: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """Return a graph of `calls` calls of `fn`, warmed up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        repeated(fn, 2)()
    _rendezvous()
    graph = captured(fn, calls, stream)
    _rendezvous()
    return graph


def events_on_gpu(call: Callable[[], object]) -> list[torch.autograd.profiler_util.FunctionEvent]:
    """Return torch.profiler's events of the kernels, copies and fills that the GPU runs in a call that has been made before."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def _us(work: Callable[[], object], ahead: bool, lead: Callable[[], object] | None) -> float:
    """Return the us that `work` takes on the GPU. ahead: without the host's time (`behind_host`). lead: a call before the
    events, in which ranks that leave the rendezvous early wait for the others."""
    _rendezvous()
    if lead is not None:
        lead()
    events = behind_host(work, lambda: dist.all_reduce(torch.empty(1, device="cuda"))) if ahead else span(work)
    torch.cuda.synchronize()
    return length(events)


def time_interleaved(
    fns: dict[str, Callable[[], object]], *, mode: str, calls: int = 10, rounds: int = 7
) -> dict[str, float]:
    """Return the us that a call of each function takes, `calls` at once in each round (`interleaved`): the median over rounds,
    then the slowest rank. Several eager calls at once follow one that is not timed, so the host may be ahead by one call."""
    if mode == "graph":
        graphs = {name: capture(fn, calls) for name, fn in fns.items()}
        work: dict[str, Callable[[], None]] = {name: g.replay for name, g in graphs.items()}
    else:
        work = {name: repeated(fn, calls) for name, fn in fns.items()}
        for run in work.values():
            run()
    leads = fns if mode == "eager" and calls > 1 else {}
    samples = interleaved(list(work), lambda name: _us(work[name], mode == "graph", leads.get(name)) / calls, rounds)
    _rendezvous()
    medians = _slowest([statistics.median(samples[name]) for name in fns])
    return dict(zip(fns, medians, strict=True))
