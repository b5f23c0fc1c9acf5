"""One call on this rank's GPU as spans. Each kind of work has a lane, and times count from the moment at which all
ranks begin.

    host   | exchange | launches: sleep, barrier, call
    GPU                | sleep . . . . . . | barrier | call
                         until every host has        0
                         launched its call

The barrier, an all-reduce of one word, ends on all ranks within a few microseconds. Its end is time 0 on every rank, so
that differences between clocks do not matter. Events before it are not drawn.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ..span import Span
from ..world import World
from .perfetto import TraceEvent

ACTIVITIES = (ProfilerActivity.CUDA,)
HEAD_START = 10_000_000  # cycles, about 5 ms, which is longer than the time between the hosts' launches
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
TOUCH = 5.0  # the most microseconds by which a kernel may overlap the next kernel in its lane


class Role(NamedTuple):
    lane: str
    name: str
    kind: str


REDUCE = Role("reduce", "reduce-scatter", "reduce")
# Roles by a pattern for the beginning of a kernel's or copy's name; the first match counts. A profiler does not report
# whether the copy engine or SMs made a copy within one GPU.
ROLES = {
    r"nccl\w*AllGather|gather_low_latency$": Role("all-gather", "all-gather", "gather"),
    r"nccl|scatter_low_latency$": REDUCE,
    r"sum_(staged|partials)$": Role("reduce", "sum", "reduce"),
    r"Memcpy|Memset": Role("copy engine", "copy", "copy"),
    r"barrier$": Role("copy engine", "barrier", "wait"),
    r"wait_(word|group)$": Role("reduce", "wait", "wait"),
    r"all_gather_gemm$": Role("compute", "all-gather + GEMM", "compute"),
    r"silu_mul": Role("compute", "SiLU-mul", "local"),
    r"nvjet|.*(gemm|xmma|cutlass|cublas)|matmul$": Role("compute", "GEMM", "compute"),
}


def profiled(world: World, fn: Callable[[], object]) -> list[Span]:
    """Call `fn` twice on all ranks, and return the second call's spans on this rank's GPU (see `spans_of`)."""
    return spans_of(world.rank, recorded(world, fn))


def recorded(world: World, fn: Callable[[], object]) -> list[TraceEvent]:
    """Return the trace events of a barrier and of a call of `fn` after it. An unrecorded call comes first, because the
    start of the profiler takes up to 0.1 s longer on one rank than on another."""
    word = world.zeros((1,), torch.float32)

    def together() -> None:
        world.exchange(None, "end of a profile")
        torch.cuda._sleep(HEAD_START)
        world.all_reduce(word, world.current_stream())
        fn()
        world.synchronize()

    with profile(activities=ACTIVITIES, schedule=schedule(wait=0, warmup=1, active=1)) as recorder:
        together()
        recorder.step()
        together()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def spans_of(rank: int, events: Iterable[TraceEvent]) -> list[Span]:
    """Return the spans after the barrier, which is the first NCCL kernel among one rank's events; without a barrier
    return none. Times are in microseconds from its end; a span's `detail` is the kernel's name, without arguments."""
    work = sorted((e for e in events if e.get("cat") in CATEGORIES), key=lambda e: e["ts"])
    ends = [e["ts"] + e["dur"] for e in work if _kernel(e).startswith("nccl")]
    call = [e for e in work if ends and e["ts"] >= ends[0]]
    spans = []
    for e in call:
        kernel = _kernel(e)
        lane, name, kind = REDUCE if _helps(e, call) else _role(kernel)
        start = e["ts"] - ends[0]
        spans.append(Span(rank, lane, name, kind, start, start + e["dur"], kernel))
    return apart(spans)


def _kernel(event: TraceEvent) -> str:
    name = event["name"].removeprefix("void ").replace("(anonymous namespace)::", "")
    return name if event["cat"] != "kernel" else re.split("[(<]", name)[0].strip()


def _role(kernel: str) -> Role:
    return next((role for name, role in ROLES.items() if re.match(name, kernel)), Role("compute", kernel, "compute"))


def _threads(event: TraceEvent) -> int:
    return math.prod((*event["args"].get("grid", (0,)), *event["args"].get("block", (0,))))


def _helps(event: TraceEvent, call: Sequence[TraceEvent]) -> bool:
    """Return whether the event is the launch of `gemm_reduce` that sums tiles: of two overlapping launches, the launch
    with fewer threads sums tiles, and the other launch computes tiles."""
    lo, hi = event["ts"], event["ts"] + event["dur"]
    return _kernel(event) == "gemm_reduce" and any(
        _kernel(e) == "gemm_reduce" and e["ts"] < hi and lo < e["ts"] + e["dur"] and _threads(event) < _threads(e)
        for e in call
    )


def apart(spans: Iterable[Span]) -> list[Span]:
    """Return the same spans with lanes "compute", "compute 2", .. where spans of one lane overlap on several
    streams."""
    ends: dict[str, list[float]] = {}
    out = []
    for s in sorted(spans, key=lambda s: s.start):
        busy = ends.setdefault(s.track, [])
        row = next((i for i, end in enumerate(busy) if end <= s.start + TOUCH), len(busy))
        busy[row:] = [s.end, *busy[row + 1 :]]
        out.append(replace(s, track=s.track if row == 0 else f"{s.track} {row + 1}"))
    return out
