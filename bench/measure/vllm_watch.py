"""What happens in a worker of vLLM while it serves a load, to find why one turn of many was slow.

A watch reads the clock twice for each step. It records, of one process,
    steps         the slowest steps beside others with as many tokens, from one start to the next, with the host's part and the
                  collections of garbage in them
    memory        calls of cudaMalloc and cudaFree by torch's allocator, and its retries after a failed cudaMalloc, which wait for the
                  GPU; calls of cudaHostAlloc; and the growth of the memory in use outside torch's: kernels that CUDA loads at their
                  first launch, NCCL's connections, other processes
    kernels       kernels that Triton loads
    host          switches to other processes, and page faults that read a disk
"""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ALLOCATOR = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_sync_all_streams")
SLOWEST = 3  # steps that are shown


class Step(NamedTuple):
    """Seconds at which the host began and ended a step, and its tokens."""

    began: float
    ended: float
    tokens: int


@dataclass
class Collections:
    """The collections of garbage in this process: when each began, and its seconds."""

    times: list[tuple[float, float]] = field(default_factory=list)
    began: float = 0.0

    def callback(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self.began = time.perf_counter()
        else:
            self.times.append((self.began, time.perf_counter() - self.began))

    def ms_within(self, begin: float, end: float) -> float:
        return round(1e3 * sum(seconds for began, seconds in self.times if begin <= began < end), 2)


def watched_collections() -> Collections:
    """Return a record of the collections of garbage from now on."""
    collections = Collections()
    gc.callbacks.append(collections.callback)
    return collections


class Watch:
    """A watch over a worker's steps. `form_of` returns the name of what runs a step with so many tokens."""

    def __init__(self, worker: Any, form_of: Callable[[int], str]) -> None:
        self.form_of, self.collections = form_of, watched_collections()
        self.steps: list[Step] = []
        self.loads = 0
        self.before: dict[str, int] = {}
        execute_model = worker.execute_model

        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return execute_model(scheduler_output, *args, **kwargs)
            finally:
                self.steps.append(Step(began, time.perf_counter(), scheduler_output.total_num_scheduled_tokens))

        worker.execute_model = timed
        self.count_loads()

    def count_loads(self) -> None:
        from triton import knobs

        def loaded(*_: object, **__: object) -> None:
            self.loads += 1

        knobs.runtime.kernel_load_end_hook.add(loaded)

    def begin(self) -> None:
        """Begin a turn."""
        self.steps.clear()
        self.collections.times.clear()
        self.before = self.counts()

    def end(self) -> dict[str, Any]:
        """Return what happened in the turn."""
        changes = {name: count - self.before[name] for name, count in self.counts().items()}
        collected = [seconds for _, seconds in self.collections.times]
        return {
            **{name: change for name, change in changes.items() if change},
            "gc ms": round(1e3 * sum(collected), 2),
            "longest gc ms": round(1e3 * max(collected, default=0.0), 2),
            "steps": len(self.steps),
            "slowest": self.slowest(),
        }

    def counts(self) -> dict[str, int]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        counts = {"Triton kernels loaded": self.loads, "switches": usage.ru_nivcsw, "disk faults": usage.ru_majflt}
        return {**counts, **memory_counts()}

    def slowest(self) -> list[dict[str, Any]]:
        """Return the steps that were slowest beside the median of steps with about as many tokens."""
        intervals = defaultdict(list)
        for step, following in zip(self.steps, self.steps[1:], strict=False):
            intervals[step.tokens.bit_length()].append((following.began - step.began, step))
        late = []
        for group in intervals.values():
            median = statistics.median(seconds for seconds, _ in group)
            late += [(seconds - median, seconds, step) for seconds, step in group]
        late.sort(key=lambda entry: -entry[0])
        return [self.described(*entry) for entry in late[:SLOWEST]]

    def described(self, excess: float, seconds: float, step: Step) -> dict[str, Any]:
        return {
            "tokens": step.tokens,
            "form": self.form_of(step.tokens),
            "ms": round(1e3 * seconds, 2),
            "over the median": round(1e3 * excess, 2),
            "host": round(1e3 * (step.ended - step.began), 2),
            "gc": self.collections.ms_within(step.began, step.began + seconds),
            "step": self.steps.index(step),
        }


def memory_counts() -> dict[str, int]:
    """Return the counts of torch's allocator, and the MiB in use outside torch's memory; nothing without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    stats, (free, total) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
    beside_torch = (total - free - torch.cuda.memory_reserved()) >> 20
    pinned = torch.cuda.memory.host_memory_stats().get("num_host_alloc", 0)
    return {
        **{name: stats.get(name, 0) for name in ALLOCATOR},
        "cudaHostAlloc": pinned,
        "MiB beside torch": beside_torch,
    }


def form_of(tokens: int) -> str:
    """Return the name of what runs passes of so many tokens in this process: vLLM, or a form of weft's twin. A stock
    engine imports nothing of weft."""
    served = sys.modules.get("weft.integrations.vllm.served")
    passes = served.models[-1].passes if served is not None and served.models else None
    if passes is None or tokens > passes.max_tokens or not passes.sizes[tokens]:
        return "vLLM"
    forms = sys.modules["weft.integrations.vllm.row_norm_column"].forms
    return str(forms(passes.world)[passes.sizes[tokens]])


def of_all(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one turn's record over all ranks: the greatest value of each number, and the slowest steps of the rank
    with the slowest one."""
    numbers: dict[str, Any] = {}
    for rank in ranks:
        for name, value in rank.items():
            if name != "slowest":
                numbers[name] = max(value, numbers.get(name, value))
    slowest = max(
        (rank["slowest"] for rank in ranks), key=lambda steps: max((s["over the median"] for s in steps), default=0.0)
    )
    return {**numbers, "slowest": slowest}
