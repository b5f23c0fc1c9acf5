"""The timeline of one layer of a step of vLLM: kernels, copies and the host's launch calls, from torch.profiler's traces.

All times are in us. A layer lasts from the start of its first attention kernel to that of the next layer, so it contains
each kernel of a layer once, in the order in which the GPU runs them; a method that computes a layer in parts has an
attention kernel for each part.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Interval = tuple[float, float]

# A kernel belongs to the first class whose pattern its name contains; a kernel that sums and normalizes communicates. A
# kernel that waits for other ranks runs while it waits. A fused GEMM communicates itself, and is in no overlap.
CLASSES = {
    "attention": r"flash::|flash_fwd|FlashAttentionForward|fmha|unified_attention|BatchPrefill|BatchDecode|merge_attn",
    "fused GEMM": r"^(all_gather_gemm|copied_gemm|gemm_reduce|gemm_to_ranks|low_latency_gemm)",
    "communication": r"(?i)nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device|multimem|^memcpy (ptop|dtod)"
    r"|^(one|two|multicast)_shot|low_latency|^(sum|pull|push|send|post)_|barrier",
    "GEMM": r"(?i)nvjet|gemm|cutlass|xmma|cublas|splitk|matmul|fused_moe",
    "norm": r"(?i)norm|triton_(red|per)_",
    "rest": "",
}
ATTENTION = r"FlashAttnFwdSm|FlashAttentionForward|flash_fwd_(splitkv_)?kernel|fmha|unified_attention|BatchPrefill|BatchDecode"  # one a layer
HOST_BOUND = 0.05  # the share of a step in which the GPU is idle for the host, from which the step is called host-bound


class NoTimeline(RuntimeError):
    """Raised if a trace lacks the step or the kernels."""


@dataclass(frozen=True)
class Step:
    """The host's time in a worker's `execute_model`, and the tokens that it computed."""

    begin: float
    end: float
    tokens: int


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or fill on the GPU, and the host's call that launched it (for a kernel of a CUDA graph, the graph's
    launch)."""

    name: str
    start: float
    end: float
    stream: int
    call_begin: float
    call_end: float

    @property
    def kind(self) -> str:
        return next(kind for kind, pattern in CLASSES.items() if re.search(pattern, self.name))

    @property
    def label(self) -> str:
        """The name without the words that all kernels of a library share, at most 56 characters."""
        return re.sub(r"^void |cutlass::device_kernel<|flash::enable_sm90_or_later<", "", self.name)[:56]


@dataclass(frozen=True)
class Trace:
    """A rank's trace. `calls` contains (begin, end, thread) of the host's calls of the CUDA runtime and driver."""

    steps: Sequence[Step]
    kernels: Sequence[Kernel]
    calls: Sequence[tuple[float, float, int]]


def trace_of(chrome: Mapping[str, Any], steps: Iterable[tuple[int, int, int]], epoch: int) -> dict[str, list[Any]]:
    """Return the fields of a `Trace` as lists, which vLLM can send between processes, from the trace that torch.profiler
    exports and the steps in (begin ns, end ns, tokens). Times count from `epoch` in ns."""
    base = (chrome.get("baseTimeNanoseconds", 0) - epoch) / 1e3
    events = [event for event in chrome["traceEvents"] if event.get("ph") == "X"]
    calls = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            begin = event["ts"] + base
            calls[event.get("args", {}).get("correlation")] = (begin, begin + event["dur"], event["tid"])
    kernels = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start, args = event["ts"] + base, event.get("args", {})
            begin, end, _ = calls.get(args.get("correlation"), (start, start, 0))
            kernels.append([event["name"], start, start + event["dur"], args.get("stream", -1), begin, end])
    relative = [[(begin - epoch) / 1e3, (end - epoch) / 1e3, tokens] for begin, end, tokens in steps]
    return {"steps": relative, "kernels": kernels, "calls": [list(call) for call in calls.values()]}


def parsed(fields: Mapping[str, list[Any]]) -> Trace:
    """Return the trace with its kernels in the order of their starts."""
    kernels = sorted((Kernel(*kernel) for kernel in fields["kernels"]), key=lambda kernel: kernel.start)
    return Trace([Step(*step) for step in fields["steps"]], kernels, [tuple(call) for call in fields["calls"]])


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def covered(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in merged(intervals))


def kernels_of(trace: Trace, step: int) -> list[Kernel]:
    """Return the kernels that the host launched from the begin of this step to that of the next."""
    end = trace.steps[step + 1].begin if step + 1 < len(trace.steps) else float("inf")
    return [kernel for kernel in trace.kernels if trace.steps[step].begin <= kernel.call_begin < end]


def usual_step(trace: Trace, tokens: int) -> int:
    """Return the step with this number of tokens whose time on the GPU is the median."""
    spans = []
    for index, step in enumerate(trace.steps):
        if step.tokens == tokens and (kernels := kernels_of(trace, index)):
            spans.append((max(kernel.end for kernel in kernels) - kernels[0].start, index))
    if not spans:
        counts = dict(Counter(step.tokens for step in trace.steps))
        raise NoTimeline(
            f"no step of {tokens} tokens launched kernels; the steps by tokens are {counts}, of"
            f" {[(round(step.begin), round(step.end)) for step in trace.steps[:4]]} .. us, the trace has {len(trace.kernels)} kernels"
            f" launched from {[round(kernel.call_begin) for kernel in trace.kernels[:4]]} .. us on"
        )
    return sorted(spans)[len(spans) // 2][1]


def layer_starts(kernels: Sequence[Kernel], layers: int) -> list[float]:
    """Return the starts of the layers' first attention kernels."""
    attention = [kernel.start for kernel in kernels if re.search(ATTENTION, kernel.name)]
    if not attention or len(attention) % layers:
        names = Counter(kernel.label for kernel in kernels).most_common(12)
        raise NoTimeline(f"{len(attention)} attention kernels in a step of {layers} layers; its kernels are {names}")
    return attention[:: len(attention) // layers]


def idle_for_host(kernels: Sequence[Kernel]) -> float:
    """Return the time in which no kernel ran and the next kernel's launch call had not ended."""
    idle, busy_until = 0.0, kernels[0].end
    for kernel in kernels[1:]:
        if kernel.start > busy_until:
            idle += min(max(0.0, kernel.call_end - busy_until), kernel.start - busy_until)
        busy_until = max(busy_until, kernel.end)
    return idle


def sums(kernels: Sequence[Kernel], begin: float, end: float) -> dict[str, Any]:
    """Return the times of the kernels between begin and end: by class, in which a GEMM and communication overlap, and
    without a kernel. Kernels of one class that overlap count twice in its sum."""
    inside = [(kernel.kind, (max(begin, kernel.start), min(end, kernel.end))) for kernel in kernels]
    inside = [(kind, span) for kind, span in inside if span[0] < span[1]]
    gemms, communication = ([span for kind, span in inside if kind == one] for one in ("GEMM", "communication"))
    busy = covered(span for _, span in inside)
    return {
        "us": round(end - begin, 1),
        "classes": {
            kind: [round(sum(b - a for k, (a, b) in inside if k == kind), 1), sum(k == kind for k, _ in inside)]
            for kind in CLASSES
        },
        "overlap_us": round(covered(gemms) + covered(communication) - covered(gemms + communication), 1),
        "idle_us": round(end - begin - busy, 1),
        "busy": round(busy / (end - begin), 4),
    }


def table(kernels: Sequence[Kernel], begin: float, end: float) -> list[list[Any]]:
    """Return [start, us, gap before, stream, class, us from the launch call to the start, name] of the kernels that run
    between begin and end. A negative gap is the time in which the kernel overlaps earlier kernels."""
    rows, busy_until = [], kernels[0].start
    for kernel in kernels:
        if kernel.end > begin and kernel.start < end:
            times = (
                kernel.start - begin,
                kernel.end - kernel.start,
                kernel.start - busy_until,
                kernel.start - kernel.call_begin,
            )
            start, us, gap, lead = (round(time, 1) for time in times)
            rows.append([start, us, gap, kernel.stream, kernel.kind, lead, kernel.label])
        busy_until = max(busy_until, kernel.end)
    return rows


def host_times(trace: Trace, step: int, kernels: Sequence[Kernel], us: float) -> dict[str, Any]:
    """Return the host's time of a step, its calls of CUDA on the thread that made most of them, and whether the GPU was
    idle for the host."""
    begin, end = trace.steps[step].begin, trace.steps[step].end
    inside = [call for call in trace.calls if begin <= call[0] < end]
    threads = Counter(thread for _, _, thread in inside).most_common(1)
    calls = [b - a for a, b, thread in inside if threads and thread == threads[0][0]]
    idle = idle_for_host(kernels)
    return {
        "host_us": round(end - begin, 1),
        "calls": len(calls),
        "calls_us": round(sum(calls), 1),
        "idle_for_host_us": round(idle, 1),
        "host_bound": idle > HOST_BOUND * us,
    }


def parts(kernels: Sequence[Kernel], begin: float, end: float) -> list[float]:
    """Return the times between begin and end in which GEMMs or attention run, in which only other kernels run, in which
    only communication runs, and in which no kernel runs."""
    spans: dict[str, list[Interval]] = {kind: [] for kind in CLASSES}
    for kernel in kernels:
        if kernel.start < end and kernel.end > begin:
            spans[kernel.kind].append((max(begin, kernel.start), min(end, kernel.end)))
    union, times = list[Interval](), [0.0]
    for kinds in (("GEMM", "fused GEMM", "attention"), ("norm", "rest"), ("communication",)):
        union += [span for kind in kinds for span in spans[kind]]
        times.append(covered(union))
    return [after - before for before, after in zip(times, [*times[1:], end - begin], strict=True)]


def steps_of(trace: Trace, tokens: int) -> list[int]:
    """Return the steps of this number of tokens that launched kernels."""
    return [i for i, step in enumerate(trace.steps) if step.tokens == tokens and kernels_of(trace, i)]


def means(traces: Sequence[Trace], tokens: int, layers: int) -> dict[str, Any]:
    """Return `parts` of a layer, the mean over the layers and ranks of the steps of this number of tokens, without the
    first step, which may follow an idle GPU with a higher clock. Also return medians over these steps on rank 0: of the
    time from the end of the step before, or from the step's own begin if that is later; and of the communication
    without the time in which a rank waits for another, which is the sum of each kernel's least time over ranks, or None
    if the ranks run different numbers of kernels."""
    steps = steps_of(traces[0], tokens)
    by_layer, us, communication = [], [], []
    for step in steps[1:] or steps:
        by_rank = [kernels_of(trace, step) for trace in traces]
        for kernels in by_rank:
            starts = layer_starts(kernels, layers)
            by_layer += [[after - before, *parts(kernels, before, after)] for before, after in pairwise(starts)]
        end = max(kernel.end for kernel in by_rank[0])
        earlier = [kernel.end for kernel in kernels_of(traces[0], step - 1)] if step else []
        us.append(end - max([by_rank[0][0].start, *earlier]))
        times = [[k.end - k.start for k in kernels if k.kind == "communication"] for kernels in by_rank]
        communication.append(sum(map(min, zip(*times, strict=True))) if len(set(map(len, times))) == 1 else None)
    names = ("us", "compute_us", "other_us", "communication_us", "idle_us")
    known = [time for time in communication if time is not None]
    return {
        "steps": len(us),
        "step_us": round(statistics.median(us), 1),
        "step_communication_us": round(statistics.median(known), 1) if known else None,
        "layer": {
            name: round(statistics.mean(times), 1)
            for name, times in zip(names, zip(*by_layer, strict=True), strict=True)
        },
    }


def by_step(traces: Sequence[Trace], tokens: int, layers: int) -> dict[str, list[float]]:
    """Return, for each step of this number of tokens: the mean over layers of a layer's time on rank 0, and over layers
    and ranks of the time in which GEMMs or attention run; the time of the first GEMM on rank 0; and the longest time
    over ranks of the first sum, in which ranks wait for the rank that starts last."""
    table: dict[str, list[float]] = {"layer_us": [], "compute_us": [], "first_gemm_us": [], "first_sum_us": []}
    for step in steps_of(traces[0], tokens):
        by_rank = [kernels_of(trace, step) for trace in traces]
        spans = [[*pairwise(layer_starts(kernels, layers))] for kernels in by_rank]
        compute = [parts(ks, *span)[0] for ks, layer_spans in zip(by_rank, spans, strict=True) for span in layer_spans]
        sums = [first_time(ks, "communication") for ks in by_rank]
        table["layer_us"].append(statistics.mean(after - before for before, after in spans[0]))
        table["compute_us"].append(statistics.mean(compute))
        table["first_gemm_us"].append(first_time(by_rank[0], "GEMM"))
        table["first_sum_us"].append(max(sums))
    return {name: [round(time, 1) for time in times] for name, times in table.items()}


def first_time(kernels: Sequence[Kernel], kind: str) -> float:
    """Return the time of the first kernel of a class, which is no copy; 0 if there is none."""
    return next((k.end - k.start for k in kernels if k.kind == kind and not k.name.startswith("Memcpy")), 0.0)


def timeline(traces: Sequence[Trace], tokens: int, layers: int) -> dict[str, Any]:
    """Return the fields of a row: the step of this number of tokens and its middle layer on rank 0, and for each rank the
    start of that layer after rank 0's start, its time, and the times without kernels and in communication. Raises
    NoTimeline."""
    trace, middle = traces[0], layers // 2
    step = usual_step(trace, tokens)
    by_rank = []
    for rank_trace in traces:
        rank_kernels = kernels_of(rank_trace, step)
        starts = layer_starts(rank_kernels, layers)
        by_rank.append((starts[middle], sums(rank_kernels, starts[middle], starts[middle + 1])))
    kernels = kernels_of(trace, step)
    starts, end = layer_starts(kernels, layers), max(kernel.end for kernel in kernels)
    inside = [kernel for kernel in kernels if starts[middle] <= kernel.start < starts[middle + 1]]
    whole = sums(kernels, kernels[0].start, end)
    later = [kernel.start for kernel in kernels_of(trace, step + 1)] if step + 1 < len(trace.steps) else []
    return {
        "step": whole | host_times(trace, step, kernels, whole["us"]) | {"to_next_us": round(later[0] - end, 1) if later else None},
        "layer": by_rank[0][1] | {"idle_for_host_us": round(idle_for_host(inside), 1)},
        "layers_us": [round(after - before) for before, after in zip(starts, starts[1:], strict=False)],
        "means": means(traces, tokens, layers),
        "by_step": by_step(traces, tokens, layers),
        "by_rank": [
            [round(start - by_rank[0][0], 1), rank["us"], rank["idle_us"], rank["classes"]["communication"][0]]
            for start, rank in by_rank
        ],
        "kernels": table(kernels, starts[middle], starts[middle + 1]),
    }  # fmt: skip


def ratios(stock: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, float]:
    """Return stock's time over the method's, for a layer or a step and for each class that both have."""
    pairs = {kind: (stock["classes"][kind][0], method["classes"][kind][0]) for kind in CLASSES}
    pairs["all"] = (stock["us"], method["us"])
    return {kind: round(a / b, 3) for kind, (a, b) in pairs.items() if a and b}


def summary(row: Mapping[str, Any]) -> str:
    """Return three lines: the step, its middle layer, and the ranks."""

    def classes(part: Mapping[str, Any]) -> str:
        return ", ".join(f"{kind} {us:.0f} ({count})" for kind, (us, count) in part["classes"].items() if count)

    step, layer = row["step"], row["layer"]
    return (
        f"step {step['us']:.0f} us, {'host-bound' if step['host_bound'] else 'not host-bound'}: busy {step['busy']:.1%}, idle"
        f" {step['idle_us']:.0f}, for the host {step['idle_for_host_us']:.0f}; host {step['host_us']:.0f} with {step['calls']} calls of"
        f" {step['calls_us']:.0f}; to the next step {step['to_next_us']}\n"
        f"layer {layer['us']:.0f} us (median of all {statistics.median(row['layers_us']):.0f}): {classes(layer)}; GEMM + communication"
        f" overlap {layer['overlap_us']:.0f}, idle {layer['idle_us']:.0f}, for the host {layer['idle_for_host_us']:.0f}\n"
        f"ranks [start, us, idle, communication]: {row['by_rank']}"
    )


def text(row: Mapping[str, Any]) -> str:
    """Return the summary and a line for each kernel of the layer."""
    lines = [summary(row), f"{'start':>9} {'us':>8} {'gap':>8} {'stream':>6} {'launched':>9}  class"]
    for start, us, gap, stream, kind, lead, label in row["kernels"]:
        lines.append(f"{start:9.1f} {us:8.1f} {gap:8.1f} {stream:6} {-lead:9.1f}  {kind:13} {label}")
    return "\n".join(lines)
