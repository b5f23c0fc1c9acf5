"""The interface between a World and the machine that it runs on.

A backend has memory, streams and transports; it has no notion of ops. All of them (`cuda`, `gloo`, `emulated`)
implement this one class, so an op is written once and never asks where it runs.

Ordering contract: operations enqueued on one stream run in that order. `record` / `wait_event` order two streams.
`launch`, `copy`, `call`, `signal`, `wait` and the collectives are stream operations: they return before the work is
done. `exchange` is the only host-side collective. An op calls `finish(stream)` before it returns a tensor to its
caller: on a GPU it does nothing (the caller's next operation is stream-ordered), in the emulator it blocks the calling
host task until the stream is drained, because the caller reads CPU memory directly, unless hosts run ahead there
(`spmd(..., ahead=True)`).
"""

from __future__ import annotations

import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch.distributed import ProcessGroup
from triton import JITFunction

from ..architectures import HOPPER
from ..errors import Mismatch, Unsupported
from ..kernel_launch import Launch, Moved
from ..lang.jit import Options
from ..residency import Ledgers, Notes
from ..scale import Scale
from ..symmetric import Stream as Stream
from ..symmetric import SymmetricTensor as SymmetricTensor
from ..timing import Clock
from .library_gemm import multiply
from .nodes import why_no_levels

R = TypeVar("R")

# Types that only the backend itself interprets.
Event: TypeAlias = Any  # returned by `record`, for `wait_event`
Communicator: TypeAlias = Any  # returned by `communicator`; None: the World's own

Arguments = Mapping[str, object]  # the arguments of a launch, by the kernel's names
CallRecord = tuple[str, tuple[tuple[str, Hashable], ...]]  # the title and the fields of a call

BETWEEN_CTAS = 8  # CTAs that a collective between nodes may take; kernels of a node's level leave it as many SMs


def timeout_seconds() -> float:
    """Return the bound of every wait, in seconds (environment variable WEFT_TIMEOUT, default 30). Raises ValueError
    where that is no number of seconds above 0 and at most a million."""
    setting = os.environ.get("WEFT_TIMEOUT", "30")
    try:
        seconds = float(setting)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 1e6:  # the nanoseconds fit in a word, and four times the limit in a timedelta
        raise ValueError(f"WEFT_TIMEOUT={setting!r} must be a number of seconds, above 0 and at most a million")
    return seconds


def sum_in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the ranks' tensors, in the order of ranks; floating-point ones are summed in float32, rounded
    once."""
    if not tensors[0].is_floating_point():
        return torch.stack(list(tensors)).sum(0).to(tensors[0].dtype)
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)


class Backend(ABC):
    """One rank's access to its machine."""

    name: str
    rank: int
    size: int
    device: torch.device
    sm_count: int  # programs that can be resident at once with one program an SM
    scale: Scale = Scale()
    group: ProcessGroup | None = None  # torch.distributed's, where there is one
    capability: int = HOPPER  # the compute capability that kernels are compiled for, times ten
    peers_unsupported: str | None = None  # why peers' memory cannot be stored to; None where it can
    symmetric_unsupported: str | None = None  # why peers' memory or its atomics do not work; None: both do
    reference: bool = False  # whether every op runs by its sequential plan, whatever plan is asked for
    shares_gpu: bool = False  # whether ranks take turns on one GPU, so that times mean nothing
    clock: Clock | None = None  # times calls; None where times mean nothing
    limits_ctas: bool = True  # whether `communicator` keeps to its limit of CTAs
    world_numbers: Iterator[int] = itertools.count()  # a number for each World, in its name
    compares: bool = False  # whether the hosts compare every call of every rank (`compared`)
    compares_at_once: bool = False  # whether `compared` waits for no rank

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Return the number of each rank's node, by rank; nodes are numbered in the order of their first ranks. A
        backend whose ranks are on several hosts sets it."""
        return (0,) * self.size

    @cached_property
    def ledgers(self) -> Ledgers | None:
        """Return the ledgers of the device, the same for all Worlds of its ranks; None where no kernel waits."""
        return None

    @property
    def two_level_unsupported(self) -> str | None:
        """Return why there are no `levels`; None where there are. The same on all ranks."""
        return why_no_levels(self.nodes)

    # -- host --------------------------------------------------------------------------------------------------------
    @abstractmethod
    def exchange(self, obj: R) -> list[R]:
        """All-gather a picklable object on the host. It blocks until every rank has called it, and raises Timeout when
        that takes too long."""

    def post(self, obj: R) -> Callable[[float | None], list[R] | None] | None:
        """Post `obj` to all ranks, each of which posts an object now or later, and return a function that collects
        these. It returns None where not all ranks have posted within the seconds that it is called with; called with
        None, it blocks as `exchange` does. Each post has to be collected before the next one is, and before the next
        exchange. Where `post` returns None, `obj` is not posted and has to be exchanged."""
        return None

    def compared(self, call: CallRecord) -> Mapping[int, CallRecord] | None:
        """Return the calls known so far, by rank, where some rank's call of the same number is another one than `call`;
        else None."""
        raise NotImplementedError

    def split(self, groups: Sequence[Sequence[int]]) -> Backend:
        """Collective. Return the backend of the group that contains this rank. `groups` is the same on all ranks; the
        ranks of a group are in ascending order."""
        raise Unsupported(f"{self.name}: ranks of this kind cannot be split")

    def alone(self) -> Backend:
        """Return the backend of this rank alone; not collective."""
        return self.split([[rank] for rank in range(self.size)])

    def levels(self) -> tuple[Backend, Backend]:
        """Collective. Return the backend of this rank's node, and that of the ranks with the same local rank on all
        nodes.

        A kernel of the node that waits for peers may run at the same time as a collective between the nodes, and each
        needs others of its kind to make progress. So the node's kernels use BETWEEN_CTAS SMs fewer than there are, and
        a collective has at most as many CTAs: whichever starts first, there is room for the other.
        """
        ranks_per_node = self.nodes.count(0)
        node = self.split(
            [range(first_rank, first_rank + ranks_per_node) for first_rank in range(0, self.size, ranks_per_node)]
        )
        node.sm_count -= min(BETWEEN_CTAS, node.sm_count // 4)
        return node, self._across(
            [range(local_rank, self.size, ranks_per_node) for local_rank in range(ranks_per_node)]
        )

    def _across(self, groups: Sequence[Sequence[int]]) -> Backend:
        """Collective. Return the backend of the group that contains this rank, for collectives between nodes."""
        return self.split(groups)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all operations that this rank has enqueued are done; raise Timeout if a device-side wait has
        expired."""

    @abstractmethod
    def check(self) -> None:
        """Raise Timeout if a device-side wait has expired, Mismatch where ranks were found to make different calls.
        This is cheap enough for every call: it reads a pinned word."""

    @abstractmethod
    def left_out(self) -> int:
        """Return the number of rows dropped for lack of room in all calls so far; as cheap to read as `check`."""

    @abstractmethod
    def left_out_by_rank(self) -> list[int]:
        """Return these by the rank that dropped them: all of its own where it is this rank, those of this rank's tokens
        where it is another."""

    def close(self) -> None:
        """Release what the backend holds."""

    def begins(self, op: str, sizes: tuple[int, int, int], multiply_adds: int) -> None:
        """Note the first call of an op's kernels for sizes M, N, K and that number of multiply-adds per rank; the
        emulator logs a warning where it will take long."""

    # -- memory ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def symmetric(self, nbytes: int, name: str) -> SymmetricTensor:
        """Collective. Allocate `nbytes` of zeroed uint8 symmetric memory on every rank, 256-byte aligned."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor for an op's output or scratch, ordered on the current stream."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros on the rank's device, ordered on the current stream."""

    @abstractmethod
    def tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a small device tensor holding `values`."""

    @abstractmethod
    def guard(self) -> torch.Tensor:
        """Return the device block, int64 [16], that every bounded wait reads. Its layout is in `lang/intrinsics.py`."""

    # -- names and counts, for what is reported ------------------------------------------------------------------------
    @property
    def kernels(self) -> int:
        """Return the number of kernels that were compiled and loaded so far; 0 where none are."""
        return 0

    def name_counters(self, describe: Callable[[int], str]) -> None:
        """Register the World's `describe`, which gives the name of the counter at an address."""

    def name_calls(self, disagreement: Callable[[Mapping[int, int]], Mismatch]) -> None:
        """Register the World's `disagreement`, which makes the Mismatch for words of `same_call` that differ, by
        rank."""

    def name_elements(self, tensor: torch.Tensor, name: str) -> None:
        """Set the name that reports use for a tensor's elements where an operation has only their address."""

    def register_channel(
        self, name: str, counters: torch.Tensor, state: torch.Tensor, arrivals: list[int] | None
    ) -> None:
        """Register a BlockChannel's counters, its `state`, and, where it is known, the number of notifies of each
        counter in every call."""

    # -- streams -----------------------------------------------------------------------------------------------------
    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream on which the rank enqueues its work."""

    @abstractmethod
    def side_stream(self, name: str, urgent: bool = True) -> Stream:
        """Return the rank's own stream of that name ("copy", "comm"), made on first use. urgent: it has a higher
        priority, so that free SMs go to its kernels first; not for a second stream of GEMMs, which would overtake the
        one before it."""

    def side_streams(self) -> Sequence[Stream]:
        """Return the streams that `side_stream` has made."""
        return ()

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context manager within which `stream` is the current stream."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """Return an event for all operations enqueued on `stream` so far."""

    @abstractmethod
    def wait_event(self, stream: Stream, event: Event) -> None:
        """Make later operations of `stream` wait for the event."""

    def start_after(self, stream: Stream, earlier: Stream) -> None:
        """Make later operations of `stream` start after those of `earlier` so far, for the sake of room on the SMs
        alone: what orders their accesses to memory is something else."""
        self.wait_event(stream, self.record(earlier))

    def persistent_allocation(self) -> AbstractContextManager[object]:
        """Return a context manager for allocations that outlive the call, which must not come from the memory pool of a
        CUDA graph. Work inside is ordered as if it were on the current stream. It is not for captures."""
        return nullcontext()

    @abstractmethod
    def capturing(self) -> bool:
        """Return whether the current stream is being captured in a CUDA graph."""

    def captures(self, stream: Stream) -> bool:
        """Return whether `stream` is being captured in a CUDA graph."""
        return False

    def on_side_stream(self) -> bool:
        """Return whether the current stream is not the device's default, as in captures and in the warm-up before
        one."""
        return False

    @abstractmethod
    def finish(self, stream: Stream) -> None:
        """Make results on `stream` readable by the caller (the module's docstring has the contract)."""

    # -- stream operations -------------------------------------------------------------------------------------------
    @abstractmethod
    def launch(
        self,
        kernel: JITFunction,
        grid: int,
        args: Arguments,
        options: Options,
        stream: Stream,
    ) -> None:
        """Run `grid` programs of a `weft.jit` kernel. `args` by name: tensors, ints, constexpr values, NamedTuples of
        them, TensorDescriptors. `options`: num_warps, num_stages; co_resident, for programs small enough to share the
        SMs with those of the next launch; per_sm, the number of programs that are meant to share an SM, with one of the
        launch before if that is co_resident; local, for programs that wait for no other rank nor for each other, so
        that ranks may launch different ones, and more than are resident at once;
        few_registers, for a kernel that Triton's newer assembler would spill; enable_fp_fusion False, for a kernel that
        rounds products before it adds them, however it is compiled."""

    @abstractmethod
    def run_launch(self, launch: Launch, stream: Stream, moving: Mapping[str, Moved]) -> None:
        """Run a prepared launch with the arguments that change from call to call, by name (`kernel_launch.Launch`)."""

    def note_launches(self) -> AbstractContextManager[Notes]:
        """Return a context manager that notes the launches inside it whose programs wait (`residency`)."""
        return nullcontext(Notes())

    def load(self, kernel: JITFunction, grid: int, args: Arguments, options: Options) -> None:
        """Compile, check and load the kernel of a `launch` without running it. The emulator has nothing to do."""

    @abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Copy `src` to `dst` by a copy engine; they have one shape and dtype, and either may be a peer's."""

    @abstractmethod
    def signal(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        """Release-store the int32 [1] device tensor `value` to int32 [1] `word` (own or a peer's), by a copy engine."""

    @abstractmethod
    def wait(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        """Block the stream until int32 [1] `word` >= int32 [1] device tensor `value` (acquire)."""

    @abstractmethod
    def call(
        self, fn: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        """Enqueue a library's work (a cuBLAS GEMM) on a stream: `fn` enqueues it, and it touches only `reads` and
        `writes`."""

    def results(
        self,
        fn: Callable[[], Sequence[torch.Tensor]],
        wanted: Sequence[tuple[Sequence[int], torch.dtype]],
        reads: Sequence[torch.Tensor],
        stream: Stream,
    ) -> Sequence[torch.Tensor]:
        """Enqueue, as `call` does, a library function that allocates its own results; return these, whose shapes and
        dtypes are `wanted`."""
        outs = [self.empty(shape, dtype) for shape, dtype in wanted]

        def fill() -> None:
            for out, result in zip(outs, fn(), strict=True):
                out.copy_(result)

        self.call(fill, reads, outs, stream)
        return outs

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stream: Stream,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x @ weight.T + bias by a library's GEMM (`multiply`; cuBLAS with a bias), in `out` or a new tensor."""
        y = self.empty((x.shape[0], weight.shape[0]), x.dtype) if out is None else out
        if bias is None:
            self.call(lambda: multiply(x, weight, y), [x, weight], [y], stream)
        else:
            self.call(lambda: torch.addmm(bias, x, weight.t(), out=y), [x, weight, bias], [y], stream)
        return y

    # -- collectives (NCCL where there is one) -----------------------------------------------------------------------
    def communicator(self, ctas: int) -> Communicator:
        """Collective. Return the communicator for the argument `on` of a collective that takes at most `ctas` CTAs,
        which a concurrent GEMM can leave free. None stands for the World's own, which has no known limit."""
        return None

    @abstractmethod
    def all_gather(self, out: torch.Tensor, x: torch.Tensor, stream: Stream) -> None:
        """Fill out [world * n, ...] with the x [n, ...] of all ranks, in rank order. n is the same on every rank."""

    def all_gather_together(self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], stream: Stream) -> None:
        """Do `all_gather` of each of the inputs of one dtype, in one launch where the library can."""
        for out, x in zip(outs, inputs, strict=True):
            self.all_gather(out, x, stream)

    @abstractmethod
    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, stream: Stream, on: Communicator = None) -> None:
        """Fill out [n, ...] with this rank's part of the sum over ranks of x [world * n, ...]."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, stream: Stream, on: Communicator = None) -> None:
        """Replace x by its sum over ranks."""

    @abstractmethod
    def all_to_all(
        self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], stream: Stream, on: Communicator = None
    ) -> None:
        """Send inputs[r] to rank r and receive outs[r] from rank r. Tensors are contiguous, and may be empty."""
