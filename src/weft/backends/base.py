"""The interface between a World and the machine that it runs on.

A backend provides memory, streams and transports, and contains no code of any op. All backends (`cuda`, `gloo`,
`emulated`) implement this one class, so an op is written once and never tests which backend runs it.

Ordering contract: operations enqueued on one stream run in that order. `record` / `wait_event` order two streams.
`launch`, `copy`, `call`, `signal`, `wait` and the collectives are stream operations: they return before the work is
done. `exchange` is the only host-side collective. An op calls `finish(stream)` before it returns a tensor to its
caller. On a GPU `finish` does nothing, since the caller's next operation is stream-ordered. In the emulator it blocks
the calling host task until the stream is drained, because the caller reads CPU memory directly, unless hosts run ahead
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
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch.distributed import ProcessGroup
from triton import JITFunction

from ..architectures import HOPPER
from ..errors import Mismatch, Unsupported
from ..kernel_launch import Launch, Moved
from ..lang.jit import Options
from ..residency import Ledgers, Notes
from ..scale import Scale
from ..symmetric import Reads, outlives_call
from ..symmetric import Stream as Stream
from ..symmetric import SymmetricTensor as SymmetricTensor
from ..timing import Clock
from .library_gemm import linear
from .nodes import why_no_levels

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

R = TypeVar("R")

# Types whose values only the backend itself interprets.
Event: TypeAlias = Any  # returned by `record`, for `wait_event`
Communicator: TypeAlias = Any  # the type that `communicator` returns; None: the World's own communicator

Arguments = Mapping[str, object]  # the arguments of a launch, by the kernel's parameter names
CallRecord = tuple[str, tuple[tuple[str, Hashable], ...]]  # the title and the fields of a call

BETWEEN_CTAS = 8  # the largest number of a collective's CTAs between nodes; kernels in a node leave as many SMs free


def timeout_seconds() -> float:
    """Return the time limit of every wait, in seconds (environment variable WEFT_TIMEOUT, default 30). Raises
    ValueError unless the variable is a number of seconds above 0 and at most a million."""
    setting = os.environ.get("WEFT_TIMEOUT", "30")
    try:
        seconds = float(setting)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 1e6:  # so that the nanoseconds fit in a word, and four times the limit fits in a timedelta
        raise ValueError(f"WEFT_TIMEOUT={setting!r} must be a number of seconds, above 0 and at most a million")
    return seconds


def sum_in_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the ranks' tensors, added in the order of ranks. Floating-point tensors are summed in float32
    and rounded once."""
    if not tensors[0].is_floating_point():
        return torch.stack(list(tensors)).sum(0).to(tensors[0].dtype)
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)


class StreamWork:
    """Work that each call enqueues on one stream. `work` runs with this object as its argument and with `stream` as the
    current stream. Its operations run on `stream`, or on streams that start after `stream` and for which `stream` waits
    at the end."""

    def __init__(self, backend: Backend, stream: Stream, work: Callable[[StreamWork], object]) -> None:
        self.backend, self.stream, self.work = backend, stream, work
        self.recorded: dict[Hashable, Event] = {}  # by key
        self.marks: list[Event] = []  # of the last call

    def record(self, key: Hashable, stream: Stream) -> Event:
        """Record an event on another stream, and return it. `work` waits for it in the next call (`wait`)."""
        event = self.recorded[key] = self.backend.record(stream)
        return event

    def wait(self, key: Hashable) -> None:
        """Make `stream` wait for an event that `record` has recorded for this call. Only `work` may call this."""
        self.backend.wait_event(self.stream, self.recorded[key])

    def mark(self) -> None:
        """Record an event on `stream`, which the call returns. Only `work` may call this."""
        self.marks.append(self.backend.record(self.stream))

    def __call__(self) -> list[Event]:
        """Enqueue the work, and return the events of its marks and of its end."""
        self.marks = []
        with self.backend.on(self.stream):  # to enter the stream for every operation would cost more host time
            self.work(self)
        self.mark()
        return self.marks


class Backend(ABC):
    """One rank's access to the machine on which it runs."""

    name: str
    rank: int
    size: int
    device: torch.device
    sm_count: int  # the number of programs that can be resident at once with one program per SM
    scale: Scale = Scale()
    group: ProcessGroup | None = None  # the group of torch.distributed, if one exists
    capability: int = HOPPER  # the compute capability for which kernels are compiled, times ten
    peers_unsupported: str | None = None  # the reason why kernels cannot store to peers' memory; None if they can
    symmetric_unsupported: str | None = None  # why peers' memory or atomics on it do not work; None if both work
    reference: bool = False  # whether every op runs its sequential plan, even if the caller names another plan
    shares_gpu: bool = False  # whether ranks share one GPU, so that measured times are meaningless
    clock: Clock | None = None  # the clock that times calls; None if measured times are meaningless
    limits_ctas: bool = True  # whether `communicator` enforces its limit of CTAs
    world_numbers: Iterator[int] = itertools.count()  # a number that is part of each World's name
    compares: bool = False  # whether the hosts compare every call of every rank (`compared`)
    compares_at_once: bool = False  # whether `compared` returns without waiting for other ranks

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Return the number of each rank's node, by rank. Nodes are numbered in the order of their first ranks. A
        backend with ranks on several hosts overrides this method."""
        return (0,) * self.size

    @cached_property
    def ledgers(self) -> Ledgers | None:
        """Return the device's ledgers, which all Worlds of its ranks share; None if no kernel waits."""
        return None

    @cached_property
    def two_level_unsupported(self) -> str | None:
        """Return the reason why there are no `levels`, or None if there are; all ranks return the same value."""
        return why_no_levels(self.nodes)

    # -- host --------------------------------------------------------------------------------------------------------
    @abstractmethod
    def exchange(self, obj: R) -> list[R]:
        """All-gather a picklable object on the host. The call blocks until every rank has made it. The call raises
        Timeout if a rank is too late."""

    def post(self, obj: R) -> Callable[[float | None], list[R] | None] | None:
        """Post `obj` to all ranks, each of which posts an object now or later, and return a function that collects
        these objects. The argument of that function is the number of seconds to wait; the function returns None if a
        rank has not posted by then. With None, the function blocks as `exchange` does. The caller must collect posts in
        order, and before the next exchange. If `post` itself returns None, `obj` was not posted, and the caller must
        exchange `obj`."""
        return None

    def compared(self, call: CallRecord) -> Mapping[int, CallRecord] | None:
        """Return the calls known so far, by rank, if some rank's call with the same number differs from `call`;
        otherwise return None. In this class the hosts of all ranks wait for each other."""
        calls = self.exchange(call)
        return dict(enumerate(calls)) if any(peer_call != call for peer_call in calls) else None

    def split(self, groups: Sequence[Sequence[int]]) -> Backend:
        """Return the backend of the group that contains this rank. `groups` is the same on all ranks; the ranks of a
        group are in ascending order. Collective."""
        raise Unsupported(f"{self.name}: ranks of this kind cannot be split")

    def alone(self) -> Backend:
        """Return the backend of this rank alone. Not collective."""
        return self.split([[rank] for rank in range(self.size)])

    def levels(self) -> tuple[Backend, Backend]:
        """Return the backend of this rank's node, and the backend of the ranks with the same local rank on all nodes.
        Collective.

        A kernel of the node that waits for peers may run at the same time as a collective between the nodes. Each of
        the two makes progress only if its counterparts on the peers run. The node's kernels therefore leave
        BETWEEN_CTAS SMs free, and a collective has at most BETWEEN_CTAS CTAs: both fit on the GPU, whichever starts
        first.
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
        """Return the backend of the group that contains this rank, for collectives between nodes. Collective."""
        return self.split(groups)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all operations that this rank has enqueued are done. Raise Timeout if a device-side wait has
        expired."""

    @abstractmethod
    def check(self) -> None:
        """Raise Timeout if a device-side wait has expired, and Mismatch if ranks were found to make different calls.
        The check reads one pinned word, so it is cheap enough to run in every call."""

    @abstractmethod
    def left_out(self) -> int:
        """Return the number of rows that were dropped for lack of room in all calls so far; reading this number is as
        cheap as `check`."""

    @abstractmethod
    def left_out_by_rank(self) -> list[int]:
        """Return the numbers of dropped rows by the rank that dropped them. For this rank, the number covers all rows
        that it dropped; for every other rank, it covers the dropped rows of this rank's tokens."""

    def begins(self, op: str, sizes: tuple[int, int, int], multiply_adds: int) -> None:
        """Note the first call of an op's kernels for sizes M, N, K and the given number of multiply-adds per rank. The
        emulator logs a warning if the call will be slow."""

    # -- memory ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def symmetric(self, nbytes: int, name: str) -> SymmetricTensor:
        """Allocate `nbytes` of zeroed uint8 symmetric memory on every rank, at an address that is a multiple of 256
        bytes. Collective."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor for an op's output or scratch, ordered on the current stream."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros on the rank's device, ordered on the current stream."""

    @abstractmethod
    def tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a small device tensor that contains `values`."""

    @abstractmethod
    def guard(self) -> torch.Tensor:
        """Return the device block, int64 [16], that every bounded wait reads. Its layout is in `lang/intrinsics.py`."""

    # -- names and counts, for reports ---------------------------------------------------------------------------------
    @property
    def kernels(self) -> int:
        """Return the number of kernels compiled and loaded so far; 0 for a backend that compiles no kernels."""
        return 0

    def name_counters(self, describe: Callable[[int], str]) -> None:
        """Register the World's `describe`, which returns the name of the counter at an address."""

    def name_calls(self, disagreement: Callable[[Mapping[int, int]], Mismatch]) -> None:
        """Register the World's `disagreement`, which returns the Mismatch for differing words of `same_call`, by
        rank."""

    def name_elements(self, tensor: torch.Tensor, name: str) -> None:
        """Set the name that reports use for a tensor's elements if only an element's address is known."""

    def register_channel(
        self, name: str, counters: torch.Tensor, state: torch.Tensor, arrivals: list[int] | None
    ) -> None:
        """Register a BlockChannel's counters, its `state`, and, if known, the number of notifies of each counter in
        every call."""

    # -- streams -----------------------------------------------------------------------------------------------------
    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream on which the rank enqueues its work."""

    @abstractmethod
    def side_stream(self, name: str, urgent: bool = True) -> Stream:
        """Return this rank's stream with that name ("copy", "comm"), created on first use. urgent: the stream has a
        higher priority than the main stream, so that free SMs run its kernels first. Do not use it for a second stream
        of GEMMs, which would overtake earlier GEMMs."""

    def side_streams(self) -> Sequence[Stream]:
        """Return the streams that `side_stream` has created."""
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

    def sequence(self, stream: Stream, work: Callable[[StreamWork], object]) -> Callable[[], StreamWork]:
        """Return a function that returns the StreamWork of a call. The operations of `work` must be the same in every
        call and use the same memory, so that a backend can enqueue them with less host time."""
        return lambda: StreamWork(self, stream, work)

    def start_after(self, stream: Stream, earlier: Stream) -> None:
        """Make later operations of `stream` start after all operations enqueued on `earlier` so far. The only purpose
        is to leave SMs free. The caller must order the accesses to memory by other means."""
        self.wait_event(stream, self.record(earlier))

    def persistent_allocation(self) -> AbstractContextManager[None]:
        """Return a context manager for allocations that outlive the call (`outlives_call`), which must not come from
        the memory pool of a CUDA graph. Work inside the context is ordered as if it were on the current stream.
        Captures must not use it."""
        return outlives_call()

    @abstractmethod
    def capturing(self) -> bool:
        """Return whether the current stream is being captured in a CUDA graph."""

    def captures(self, stream: Stream) -> bool:
        """Return whether `stream` is being captured in a CUDA graph."""
        return False

    def on_side_stream(self) -> bool:
        """Return whether the current stream is not the device's default stream, as in captures and their warm-ups."""
        return False

    @abstractmethod
    def finish(self, stream: Stream = None) -> None:
        """Make results on `stream` (None: the current one) readable by the caller (the module's docstring states the
        contract)."""

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
        """Run `grid` programs of a `weft.jit` kernel. `args` are by name: tensors, ints, constexpr values, NamedTuples
        of these, and TensorDescriptors. `options`: num_warps, num_stages; co_resident, for programs small enough to
        share the SMs with the next launch's programs; per_sm, the number of programs that should share an SM, together
        with one program of a co_resident launch before it; local, for programs that wait neither for other
        ranks nor for each other, so that ranks may launch different programs, and more than can be resident at once;
        few_registers, for a kernel whose registers Triton's newer assembler would spill; enable_fp_fusion False, for a
        kernel that must round products before it adds them, however it is compiled."""

    @abstractmethod
    def run_launch(self, launch: Launch, stream: Stream, moving: Mapping[str, Moved]) -> None:
        """Run a prepared launch with the arguments that change between calls, by name (`kernel_launch.Launch`)."""

    def note_launches(self) -> AbstractContextManager[Notes]:
        """Return a context manager that notes the launches inside it whose programs wait (`residency`)."""
        return nullcontext(Notes())

    def load(
        self,
        kernel: JITFunction,
        grid: int,
        args: Arguments,
        options: Options,
        co_resident: CompiledKernel | None = None,
    ) -> CompiledKernel | None:
        """Compile, check and load the kernel of a `launch` without running it, and return the loaded kernel.
        co_resident: the loaded kernel of a `co_resident` launch with which the programs of this one share the SMs.
        Raises Unsupported if they do not fit. The emulator does nothing, and returns None."""

    @abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        """Copy `src` to `dst` by a copy engine. Both tensors have the same shape and dtype, and either one may be in a
        peer's memory."""

    @abstractmethod
    def signal(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        """Release-store the int32 [1] device tensor `value` to int32 [1] `word` of any rank, by a copy engine."""

    @abstractmethod
    def wait(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        """Block the stream until int32 [1] `word` >= int32 [1] device tensor `value` (acquire)."""

    @abstractmethod
    def call(self, fn: Callable[[], object], reads: Reads, writes: Sequence[torch.Tensor], stream: Stream) -> None:
        """Enqueue work of a library such as cuBLAS on a stream. `fn` enqueues work that accesses only `reads` and
        `writes`. A function among the reads returns a tensor that depends on the device's values. Only the emulator
        calls this function, when the work runs."""

    def results(
        self,
        fn: Callable[[], Sequence[torch.Tensor]],
        wanted: Sequence[tuple[Sequence[int], torch.dtype]],
        reads: Sequence[torch.Tensor],
        stream: Stream,
    ) -> Sequence[torch.Tensor]:
        """Enqueue, as `call` does, a library function that allocates its own results, with the shapes and dtypes
        `wanted`, and return the results."""
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
        """Return x @ weight.T + bias, in `out` or a new tensor, computed by `library_gemm.linear`."""
        y = self.empty((x.shape[0], weight.shape[0]), x.dtype) if out is None else out
        self.call(lambda: linear(x, weight, bias, y), [x, weight] if bias is None else [x, weight, bias], [y], stream)
        return y

    # -- collectives (NCCL on GPUs) ----------------------------------------------------------------------------------
    def communicator(self, ctas: int) -> Communicator:
        """Return a communicator with at most `ctas` CTAs, for a collective's argument `on`. A concurrent GEMM can leave
        SMs free for these CTAs. None means the World's own communicator, which has no known limit. Collective."""
        return None

    @abstractmethod
    def all_gather(self, out: torch.Tensor, x: torch.Tensor, stream: Stream) -> None:
        """Fill out [world * n, ...] with the x [n, ...] of all ranks, in rank order. n is the same on every rank."""

    def all_gather_together(self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], stream: Stream) -> None:
        """All-gather each of the inputs, which have one dtype; use a single launch if the backend supports that."""
        for out, x in zip(outs, inputs, strict=True):
            self.all_gather(out, x, stream)

    @abstractmethod
    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, stream: Stream, on: Communicator = None) -> None:
        """Fill out [n, ...] with this rank's shard of the sum over ranks of x [world * n, ...]."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, stream: Stream, on: Communicator = None) -> None:
        """Replace x by its sum over ranks."""

    @abstractmethod
    def all_to_all(
        self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], stream: Stream, on: Communicator = None
    ) -> None:
        """Send inputs[r] to rank r and receive outs[r] from rank r. Tensors must be contiguous, and may be empty."""
