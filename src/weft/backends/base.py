"""What a World asks of the machine it runs on.

A backend knows memory, streams and transports; it never knows an op. All of them (`cuda`, `gloo`, `emulated`)
implement this one class, so an op is written once and never asks where it runs.

Ordering contract. Everything given to one stream runs in the order given. `record` / `wait_event` order two streams.
`launch`, `copy`, `call`, `signal`, `wait` and the collectives are stream operations: they return before the
work is done. `exchange` is the only host-side collective. `finish(stream)` is called by an op before it hands a tensor
back to its caller: on a GPU it does nothing (the caller's next operation is stream-ordered), in the emulator it blocks
the calling host task until the stream is drained, because the caller reads CPU memory directly.
"""

from __future__ import annotations

import math
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch.distributed import ProcessGroup
from triton import JITFunction

from ..architectures import HOPPER
from ..errors import Mismatch, Unsupported
from .library_gemm import multiply

if TYPE_CHECKING:
    from ..kernel_launch import Launch

R = TypeVar("R")

# Types of a backend's own, which nobody else looks into.
Stream: TypeAlias = Any  # torch.cuda.Stream, or the emulator's
Event: TypeAlias = Any  # what `record` gives, for `wait_event`
Communicator: TypeAlias = Any  # what `communicator` gives; None: the World's own

Arguments = Mapping[str, object]  # the arguments of a launch, by the kernel's names
Options = Mapping[str, int]  # the options of a launch, lang.jit.OPTIONS

VIEWS = 4096  # views of one symmetric tensor that are kept


def timeout_seconds() -> float:
    """The bound of every wait, in seconds (environment variable WEFT_TIMEOUT, default 30). Raises ValueError where that
    is no number of seconds above 0 and at most a million."""
    said = os.environ.get("WEFT_TIMEOUT", "30")
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 1e6:  # nanoseconds of it fit in a word, and of four times it in a timedelta
        raise ValueError(f"WEFT_TIMEOUT={said!r} must be a number of seconds, above 0 and at most a million")
    return seconds


def check_memory(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the sizes as a tuple; raise TypeError or ValueError for what is no shape or no dtype."""
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise TypeError(f"a shape is a sequence of integers, such as (16, 64), not {shape!r}") from None
    if min(sizes, default=0) < 0:
        raise ValueError(f"a shape has no negative sizes: {sizes}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a dtype is one of torch's, such as torch.float32, not {dtype!r}")
    return sizes


def check_tensors(what: str, *tensors: object) -> None:
    """Raise TypeError for what is no tensor."""
    for t in tensors:
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{what}: tensors are needed, not {type(t).__name__}")


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the ranks' tensors, in the order of ranks; floating-point ones are summed in float32, rounded once."""
    if not parts[0].is_floating_point():
        return torch.stack(list(parts)).sum(0).to(parts[0].dtype)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@dataclass(frozen=True)
class Scale:
    """How large pieces of work are: a GPU's, or so small that a few programs with a few elements show all of a
    protocol.

    block, norm_block, gate_block: elements that a program of the element-wise kernels, of the norms, of SiLU-mul takes
    at a time.
    run: columns of a run of such a block. interleave: rows of one block of an interleaved gate/up weight. staged: bytes
    of a third of the memory for low-latency rows, at least. part: K steps of a part of a shared tile, at least; handed,
    added: K steps' time that handing one over takes, and waiting for it and adding it (twice that where a helper has
    parts of several tiles). whole: bytes of activations up to which a decoder leaves them whole."""

    small: bool = False
    block: int = 4096
    norm_block: int = 4096
    gate_block: int = 2048
    run: int = 128
    interleave: int = 64
    staged: int = 1 << 20
    part: int = 4
    handed: int = 6
    added: int = 11
    whole: int = 256 << 10

    @staticmethod
    def of(programs: int) -> Scale:
        """The scale for ranks that hold so many resident programs."""
        return _SMALL if programs < 32 else Scale()


_SMALL = Scale(True, 256, 64, 256, 16, 16, 256, 1, 0, 0, 1 << 10)


@dataclass(frozen=True, eq=False)
class SymmetricTensor:
    """Memory of one shape on every rank, addressable by all of them.

    `local` is this rank's copy; `peers[r]` is rank r's copy as a tensor this rank can read and write (`peers[rank]` is
    `local`); `addresses` is an int64 device tensor [world] with the address of every rank's copy, for kernels;
    `multicast` is the address that stands for all copies at once (NVLink multicast), 0 where there is none. Zero-filled
    at creation. Holding any of the tensors keeps the memory alive.
    """

    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    multicast: int = 0
    _views: dict[tuple[tuple[int, ...], torch.dtype], SymmetricTensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """The same bytes, `offset` bytes in, as another shape and dtype on every rank. A view without an offset is made
        once and kept, since eager calls ask for it each time."""
        key = (tuple(shape), dtype)
        if offset == 0 and key in self._views:
            return self._views[key]
        nbytes = math.prod(shape) * dtype.itemsize

        def cut(t: torch.Tensor) -> torch.Tensor:
            return t.view(torch.uint8).view(-1)[offset : offset + nbytes].view(dtype).view(*shape)

        multicast = self.multicast + offset if self.multicast else 0
        with torch.inference_mode(False):  # it outlives the call that asked for it
            peers = tuple(cut(p) for p in self.peers)
            addresses = self.table(peers, offset)
            made = replace(
                self, local=cut(self.local), peers=peers, addresses=addresses, multicast=multicast, _views={}
            )
        if offset == 0:
            if len(self._views) >= VIEWS:
                self._views.clear()
            self._views[key] = made
        return made

    def table(self, peers: tuple[torch.Tensor, ...], offset: int) -> torch.Tensor:
        """The `addresses` of a view whose `peers` begin `offset` bytes further on."""
        return self.addresses + offset if offset else self.addresses  # an addition is a launch


class Backend(ABC):
    """One rank's access to its machine."""

    name: str
    rank: int
    size: int
    device: torch.device
    sm_count: int  # programs that can be resident at once with one program an SM
    scale: Scale = Scale()
    group: ProcessGroup | None = None  # of torch.distributed, where there is one
    capability: int = HOPPER  # that kernels are compiled for, ten times NVIDIA's number
    peer_reason: str | None = None  # why peers' memory cannot be stored to; None when it can
    symmetric_reason: str | None = None  # that, or why nothing can be counted there; None when symmetric memory is all
    reference: bool = False  # every op runs by its sequential plan, whatever it is asked for
    shares_gpu: bool = False  # ranks run on one GPU, in turn, so that no time says anything
    limits_ctas: bool = True  # "auto" may count on the limit that `communicator` is asked for
    compares: bool = False  # every call of every rank, on the host (`compared`)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The number of each rank's node, by rank; nodes are counted in the order of their first ranks. A backend whose
        ranks are on several hosts sets it."""
        return (0,) * self.size

    # -- host --------------------------------------------------------------------------------------------------------
    @abstractmethod
    def exchange(self, obj: R) -> list[R]:
        """All-gather a picklable object on the host; blocks until every rank called it; bounded: raises Timeout."""

    def tell(self, obj: R) -> Callable[[float | None], list[R] | None] | None:
        """Post `obj` to all ranks, all of which post something now or later, and return a function that collects what
        they posted. That function returns None where not all have posted within so many seconds; given None, it blocks,
        bounded as `exchange` is. What was posted before has to be collected first, and before the next exchange.
        Where `tell` returns None, `obj` is not posted and has to be exchanged."""
        return None

    def compared(self, call: object) -> Mapping[int, object] | None:
        """The calls known so far, by rank, where some rank makes another call than `call` here; else None."""
        raise NotImplementedError

    def split(self, groups: Sequence[Sequence[int]]) -> Backend:
        """Collective. Return the backend of the group that holds this rank. `groups` is the same on all ranks; the
        ranks of a group are in ascending order."""
        raise Unsupported(f"{self.name}: ranks of this kind cannot be split")

    def alone(self) -> Backend:
        """Return the backend of this rank alone; not collective."""
        return self.split([[rank] for rank in range(self.size)])

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything enqueued by this rank is done; raise Timeout if a device-side wait expired."""

    @abstractmethod
    def check(self) -> None:
        """Raise Timeout if a device-side wait has expired, Mismatch where ranks were found to make different calls.
        This is cheap enough for every call: it reads a pinned word."""

    @abstractmethod
    def left_out(self) -> int:
        """The number of rows that found no room in all calls so far; as cheap to read as `check`."""

    def close(self) -> None:
        """Release what the backend holds."""

    def begins(self, op: str, sizes: tuple[int, int, int], multiply_adds: int) -> None:
        """Note a first call of an op's kernels, for sizes M, N, K and so many multiply-adds a rank; the emulator logs a
        warning where it takes long."""

    # -- memory ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def symmetric(self, nbytes: int, name: str) -> SymmetricTensor:
        """Collective. Allocate `nbytes` of zeroed uint8 symmetric memory on every rank, 256-byte aligned."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor for an op's output or scratch, ordered on the current stream."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros on the rank's device, ordered on the current stream."""

    @abstractmethod
    def tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A small device tensor holding `values`."""

    @abstractmethod
    def guard(self) -> torch.Tensor:
        """int64 [16] device block read by every bounded wait; its layout is in `lang/intrinsics.py`."""

    # -- names and counts, for what is reported ------------------------------------------------------------------------
    def name_counters(self, describe: Callable[[int], str]) -> None:
        """Register the World's `describe`, which gives the name of the counter at an address."""

    def name_calls(self, disagreement: Callable[[Mapping[int, int]], Mismatch]) -> None:
        """Register the World's `disagreement`, which makes the Mismatch for differing words of `same_call`, by rank."""

    def name_elements(self, tensor: torch.Tensor, name: str) -> None:
        """Set the name that reports use for a tensor's elements where an operation was given their address alone."""

    def register_channel(
        self, name: str, counters: torch.Tensor, state: torch.Tensor, arrivals: list[int] | None
    ) -> None:
        """Register a BlockChannel's counters, its `state`, and the notifies that each counter gets in every call, by
        counter, where that is known."""

    # -- streams -----------------------------------------------------------------------------------------------------
    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that the rank's work goes to at present."""

    @abstractmethod
    def side_stream(self, name: str, urgent: bool = True) -> Stream:
        """The rank's own stream of that name ("copy", "comm"), made on first use. urgent: SMs that become free go to
        its kernels first; not for a second stream of GEMMs, which would overtake the one that comes before it."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """A context manager within which `stream` is the current stream."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """Return an event that stands for everything given to `stream` so far."""

    @abstractmethod
    def wait_event(self, stream: Stream, event: Event) -> None:
        """Order what `stream` gets from now on after everything that `event` stands for."""

    def persistent_allocation(self) -> AbstractContextManager[object]:
        """A context manager for allocations that stay for calls to come, for which no CUDA graph's own memory may be
        given. Work inside is ordered as if it were on the current stream. It is not for captures."""
        return nullcontext()

    @abstractmethod
    def capturing(self) -> bool:
        """Whether the current stream is being captured in a CUDA graph."""

    def captures(self, stream: Stream) -> bool:
        """Whether `stream` is being captured in a CUDA graph."""
        return False

    def on_side_stream(self) -> bool:
        """Whether the current stream is another than the device's default, as it is for captures and in what warms up
        for one."""
        return False

    @abstractmethod
    def finish(self, stream: Stream) -> None: ...

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
        them, TensorDescriptors. `options`: num_warps, num_stages; co_resident, for
        programs small enough to share the SMs with the next launch's; per_sm, how many programs are meant to share an
        SM, for the emulator, which holds one; local, for programs that wait for nobody and that ranks
        need not launch alike; few_registers, for a kernel that Triton's newer assembler would spill."""

    @abstractmethod
    def run_launch(self, launch: Launch, stream: Stream, moving: Mapping[str, Any]) -> None:
        """Run a prepared launch with the arguments that move, by name (`launches.Launch`)."""

    def load(self, kernel: JITFunction, grid: int, args: Arguments, options: Options) -> None:
        """Compile, check and load what `launch` would run, without running it. Nothing to do in the emulator."""

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
        """Put a library's work (a cuBLAS GEMM) on a stream: `fn` enqueues it, touching only `reads` and `writes`."""

    def results(
        self,
        fn: Callable[[], Sequence[torch.Tensor]],
        wanted: Sequence[tuple[Sequence[int], torch.dtype]],
        reads: Sequence[torch.Tensor],
        stream: Stream,
    ) -> Sequence[torch.Tensor]:
        """Enqueue, as `call` does, a library's function that allocates its results itself; return these results, of
        shapes and dtypes `wanted`."""
        outs = [self.empty(shape, dtype) for shape, dtype in wanted]

        def fill() -> None:
            for out, made in zip(outs, fn(), strict=True):
                out.copy_(made)

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
        """x @ weight.T + bias by a library's GEMM (`gemms.multiply`; cuBLAS with a bias), in `out` or a new tensor."""
        made = self.empty((x.shape[0], weight.shape[0]), x.dtype) if out is None else out
        if bias is None:
            self.call(lambda: multiply(x, weight, made), [x, weight], [made], stream)
        else:
            self.call(lambda: torch.addmm(bias, x, weight.t(), out=made), [x, weight, bias], [made], stream)
        return made

    # -- collectives (NCCL where there is one) -----------------------------------------------------------------------
    def communicator(self, ctas: int) -> Communicator:
        """Collective. Return what a collective is given as `on`, so that it takes at most `ctas` CTAs, which a
        concurrent GEMM can leave free. None stands for the World's own, where no limit is known."""
        return None

    @abstractmethod
    def all_gather(self, out: torch.Tensor, x: torch.Tensor, stream: Stream) -> None:
        """out [world * n, ...] from x [n, ...]; same n on every rank."""

    @abstractmethod
    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, stream: Stream, on: Communicator = None) -> None:
        """out [n, ...] = sum over ranks of x [world * n, ...], this rank's part."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, stream: Stream, on: Communicator = None) -> None:
        """x = sum over ranks of x, in place."""

    @abstractmethod
    def all_to_all(
        self, outs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], stream: Stream, on: Communicator = None
    ) -> None:
        """Send parts[r] to rank r and receive outs[r] from rank r. Tensors are contiguous, and may be empty."""
