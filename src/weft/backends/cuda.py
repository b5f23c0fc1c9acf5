"""Each rank is a process with its own GPU, or ranks share a GPU (`shared_gpu`). torch.distributed._symmetric_memory
provides the memory, and NCCL the collectives.

weft makes no NVLink multicast object. If torch's symmetric memory has created one, plan "multicast" can use its
address; TORCH_SYMM_MEM_DISABLE_MULTICAST=1 stops torch from creating one.

A wait that expires in a kernel is recorded in pinned memory (`Record`), and `GpuBackend.check` raises the Timeout.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import os
import pickle
import re
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from triton import JITFunction

from .. import architectures
from ..errors import Mismatch, Timeout, Unsupported, WeftError
from ..kernel_launch import Launch, Moved
from ..lang.intrinsics import CALL, DIFFERS, GUARD_WORDS, NUMBER_BITS, RECORD_WORDS
from ..lang.jit import Options
from ..residency import Ledgers, Notes, Noting, ResidentPrograms, SMs
from ..scale import Scale
from ..symmetric import Reads, outlives_call
from ..timing import cuda_clock
from . import nodes, shared_gpu
from .barrier import wait_word
from .base import BETWEEN_CTAS, Arguments, Backend, Communicator, R, StreamWork, SymmetricTensor, timeout_seconds
from .launcher import Launcher, NotingLauncher, room_of
from .library_gemm import linear
from .messages import Messages
from .nccl import Collectives, collectives
from .shared_gpu import RankDevice
from .shm_exchange import BYTES, SharedMemoryExchange
from .uploads import Uploads, any_call_allowed, driver

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
NCCL_CTAS = 64  # the largest number of channels of a communicator, which runs one CTA per channel


@functools.cache
def _ledgers(device: torch.device) -> Ledgers:
    """Return the device's ledgers, which all Worlds of the process share."""
    return Ledgers(SMs(torch.cuda.get_device_properties(device).multi_processor_count, room_of(device)))


@functools.cache
def _unused_streams(device: torch.device, name: str, priority: int) -> list[torch.cuda.Stream]:
    """Return the list of dropped Worlds' streams of one name. torch's allocator may record events on a stream at any
    later time, so a stream is never destroyed, and later Worlds use it. It keeps its name, because the stream of
    persistent allocations must never have been captured."""
    return []


def _new_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    """Return a new stream. torch has only 32 streams of each priority, and returns them in turn to all callers. But a
    kernel may wait for later work on a side stream, so a side stream must never be the stream of a call."""
    stream = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.is_current_stream_capturing()  # a call of CUDA's runtime gives a new thread the device's context
        status = driver().cuStreamCreateWithPriority(ctypes.byref(stream), NON_BLOCKING, priority)
    if status:
        raise WeftError(f"cuStreamCreateWithPriority failed with {status}: no side stream on {device}")
    return torch.cuda.ExternalStream(stream.value, device)


class Record:
    """Pinned memory in which an expired device-side wait records its op, tile and peer, so that the host can read the
    record without a stream."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.zeros(RECORD_WORDS, dtype=torch.int64, device="cpu", pin_memory=True)
        self.words = self.host.numpy().data  # reading items from this buffer is faster than from the array
        self.guard = torch.zeros(GUARD_WORDS, dtype=torch.int64, device="cpu")
        self.guard[0] = int(timeout_seconds() * 1e9)
        self.guard[2] = self.host.data_ptr()
        self.guard = self.guard.to(device)


GRACE = 2.0  # the seconds for which a rank, after its wait has expired, waits for the records of other ranks


def _cause_of_waits(waits: Sequence[str], peer: int) -> str:
    """Return the end of a line about a wait for `peer`. If this peer waits too, its wait may be for a rank without a
    reported wait, as in a gather that pulls the peers' rows in turn. The line then names the ranks without a reported
    wait."""
    others = ", ".join(f"rank {rank}" for rank, wait in enumerate(waits) if not wait)
    return f", but waits too; no wait is reported by {others}" if peer >= 0 and waits[peer] and others else ""


def _disagreement_of_waits(waits: Sequence[str]) -> str:
    """Return a line that names each rank's op, if ranks wait in different ops; otherwise return ""."""
    if len(set(filter(None, waits))) < 2:
        return ""
    descriptions = "; ".join(f"rank {rank} in {wait}" for rank, wait in enumerate(waits) if wait)
    return f"ranks disagree on this call, and wait: {descriptions} (WEFT_CHECK=1 compares every call)\n"


class GpuBackend(Backend):
    """One GPU's streams, copies and launches, and the record of expired waits."""

    def __init__(self, rank: int, size: int, device: torch.device, sm_count: int) -> None:
        self.rank, self.size, self.device, self.sm_count = rank, size, device, sm_count
        self.scale = Scale.for_programs(sm_count)
        self.capability = architectures.device_capability(device)
        self.record_words = Record(device)
        self._plain_launcher = Launcher(self)
        self.launcher: Launcher | NotingLauncher = self._plain_launcher
        self._noting = Noting(self._note)
        self.collective = self._collective
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._by_handle: dict[int, torch.cuda.Stream] = {}
        self._like: dict[torch.dtype, torch.Tensor] = {}
        self._events: list[torch.cuda.Event] = []  # the events for which no stream will wait any more
        self.uploads = Uploads(device)
        self._waits: list[str] | None = None  # the ops in which ranks wait; known once a wait has expired

    @cached_property
    def ledgers(self) -> Ledgers:
        return _ledgers(self.device)

    # -- host
    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
        self.check()

    def check(self) -> None:
        if self.uploads.pending:
            self.uploads.precede(self.current_stream())
        words = self.record_words.words
        if words[0]:
            address, target, seen, tile, peer = (int(w) for w in words[1:6])
            if words[0] == DIFFERS:
                raise self.disagreement({self.rank: target, peer: seen})
            if tile == CALL:  # the words count the calls of `same_call`
                tile, target, seen = -1, (target >> NUMBER_BITS) % 4096, (seen >> NUMBER_BITS) % 4096
            where = self.describe(address)
            who = "any peer" if peer < 0 else f"rank {peer}"
            after = f"expired after {timeout_seconds():g} s"
            if self._waits is None:
                self._waits = self.waits_of_all_ranks(re.sub(r"^channel \d+ of |, rank \d+'s copy$", "", where))
            prefix = _disagreement_of_waits(self._waits) + f"rank {self.rank}: a wait "
            if not target:
                where = self._waits[self.rank]
                raise Timeout(f"{prefix}for part {tile} in {where}, {after}: {who} did not post it")
            raise Timeout(
                f"{prefix}on {where}, tile {tile}, {after}: counter stands at {seen}, needs {target}; {who} did not "
                f"arrive{_cause_of_waits(self._waits, peer)}"
            )

    def left_out(self) -> int:
        return int(self.record_words.words[6])

    def left_out_by_rank(self) -> list[int]:
        return list(self.record_words.words[7:])

    def waits_of_all_ranks(self, own_wait: str) -> list[str]:
        """Return the op of each rank's expired wait, by rank; "" if the op is unknown. own_wait: the op of this rank's
        wait."""
        return [own_wait if rank == self.rank else "" for rank in range(self.size)]

    def name_counters(self, describe: Callable[[int], str]) -> None:
        self.describe = describe

    def name_calls(self, disagreement: Callable[[Mapping[int, int]], Mismatch]) -> None:
        self.disagreement = disagreement

    # -- memory
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        like = self._like.get(dtype)
        if like is None:
            like = self._like[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return like.new_empty(shape)  # needs less host time than torch.empty

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.uploads.tensor(values, dtype)

    def guard(self) -> torch.Tensor:
        return self.record_words.guard

    @property
    def kernels(self) -> int:
        return len(self._plain_launcher.loaded)

    # -- streams
    def current_stream(self) -> torch.cuda.Stream:
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        stream = self._by_handle.get(raw)
        if stream is None:
            stream = self._by_handle[raw] = torch.cuda.current_stream(self.device)
        return stream

    def side_stream(self, name: str, urgent: bool = True) -> torch.cuda.Stream:
        if name not in self._streams:
            priority = -1 if urgent else 0
            unused = _unused_streams(self.device, name, priority)
            stream = self._streams[name] = unused.pop() if unused else _new_stream(self.device, priority)
            weakref.finalize(self, unused.append, stream).atexit = False
        return self._streams[name]

    def side_streams(self) -> Sequence[torch.cuda.Stream]:
        return list(self._streams.values())

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return _On(self, stream)

    def as_current(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Return a context for torch's functions, which take the GPU from their tensors: `on`, or, if the stream is the
        current one of its GPU, a context that does nothing."""
        current = stream.cuda_stream == torch._C._cuda_getCurrentRawStream(self.device.index)
        return nullcontext() if current else _On(self, stream)

    def record(self, stream: torch.cuda.Stream) -> _Recorded:
        try:
            event = self._events.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(stream)
        return _Recorded(event, self._events)

    def wait_event(self, stream: torch.cuda.Stream, event: _Recorded) -> None:
        event.event.wait(stream)  # what stream.wait_event does, at the cost of one call less

    def sequence(self, stream: torch.cuda.Stream, work: Callable[[StreamWork], object]) -> Callable[[], StreamWork]:
        """The first call, which loads the kernels, calls in captures, which then contain the operations themselves, and
        calls whose launches are noted enqueue the operations one by one. All other calls launch them as one graph."""
        one_by_one, graph = StreamWork(self, stream, work), _GraphWork(self, stream, work)

        def work_of_call() -> StreamWork:
            if not one_by_one.marks or self.noting or self.capturing():
                return one_by_one
            if not graph.graphs:
                graph.capture(one_by_one.recorded)
            return graph

        return work_of_call

    @property
    def noting(self) -> bool:
        return self.launcher is not self._plain_launcher

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def captures(self, stream: torch.cuda.Stream) -> bool:
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    def on_side_stream(self) -> bool:
        return self.current_stream() != torch.cuda.default_stream(self.device)

    def finish(self, stream: torch.cuda.Stream | None = None) -> None:
        pass

    # -- stream operations
    def launch(
        self,
        kernel: JITFunction,
        grid: int,
        args: Arguments,
        options: Options,
        stream: torch.cuda.Stream,
    ) -> None:
        if self.uploads.pending:
            self.uploads.precede(stream)
        self.launcher.launch(kernel, grid, args, options, stream)

    def run_launch(self, launch: Launch, stream: torch.cuda.Stream, moving: Mapping[str, Moved]) -> None:
        if self.uploads.pending:
            self.uploads.precede(stream)
        self.launcher.run(launch, stream, moving)

    def note_launches(self) -> AbstractContextManager[Notes]:
        return self._noting.noting()

    def _note(self, noting: bool) -> None:
        """Replace the launcher only while calls are noted, so that other calls lose no host time."""
        self.launcher = NotingLauncher(self._plain_launcher, self._noting) if noting else self._plain_launcher
        self.collective = self._noted_collective if noting else self._collective

    def _collective(self, stream: torch.cuda.Stream, enqueue: Callable[..., None], *arguments: object) -> None:
        """Enqueue a collective of NCCL on a stream."""
        if self.uploads.pending:
            self.uploads.precede(stream)
        enqueue(stream, *arguments)

    def _noted_collective(self, stream: torch.cuda.Stream, enqueue: Callable[..., None], *arguments: object) -> None:
        assert self.group is not None
        # The ledger may outlive this World, so the group's name identifies NCCL's communicator: Python reuses an `id`.
        programs = ResidentPrograms(NCCL_CTAS, room_of(self.device), self.group.group_name)
        self._noting.add("collectives", programs)
        self._collective(stream, enqueue, *arguments)

    def load(
        self,
        kernel: JITFunction,
        grid: int,
        args: Arguments,
        options: Options,
        co_resident: CompiledKernel | None = None,
    ) -> CompiledKernel:
        with torch.cuda.device(self.device):  # otherwise Triton would load the kernel for the thread's current device
            return self.launcher.load(kernel, grid, args, options, co_resident)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Copy by CUDA's driver, which needs less host time than torch, and does not need the stream to be current. If
        the driver refuses, as in a thread that has not used this GPU, torch copies or raises an error."""
        contiguous, handle = dst.is_contiguous() and src.is_contiguous(), stream.cuda_stream
        if self.uploads.pending:
            self.uploads.precede(stream)
        # The handle of every GPU's default stream is 0; the driver takes it as the current GPU's default stream.
        by_torch = not contiguous or (handle == 0 and torch._C._cuda_getDevice() != self.device.index)
        if by_torch or _driver_copy()(dst.data_ptr(), src.data_ptr(), dst.nbytes, handle):
            self.call(lambda: dst.copy_(src, non_blocking=True), [src], [dst], stream)

    def signal(self, word: torch.Tensor, value: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self.copy(word, value, stream)

    @cached_property
    def _wait_word(self) -> Launch:
        return Launch(self, wait_word, 1, dict(num_warps=1), guard=self.guard())

    def wait(self, word: torch.Tensor, value: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._wait_word(stream, word=word, value=value)

    def call(
        self,
        fn: Callable[[], object],
        reads: Reads,
        writes: Sequence[torch.Tensor],
        stream: torch.cuda.Stream,
    ) -> None:
        if self.uploads.pending:
            self.uploads.precede(stream)
        with self.as_current(stream):
            fn()

    def results(
        self,
        fn: Callable[[], Sequence[torch.Tensor]],
        wanted: Sequence[tuple[Sequence[int], torch.dtype]],
        reads: Sequence[torch.Tensor],
        stream: torch.cuda.Stream,
    ) -> Sequence[torch.Tensor]:
        with self.as_current(stream):
            return fn()

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stream: torch.cuda.Stream,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        current = stream.cuda_stream == torch._C._cuda_getCurrentRawStream(self.device.index)
        if out is None:
            if current and not torch.is_autocast_enabled("cuda"):  # which would change the dtype of F.linear's result
                return torch.nn.functional.linear(x, weight, bias)
            out = self.empty((x.shape[0], weight.shape[0]), x.dtype)
        with nullcontext() if current else _On(self, stream):
            linear(x, weight, bias, out)
        return out


@functools.cache
def _driver_copy() -> Callable[[int, int, int, int], int]:
    """Return the driver's copy from one GPU address to another: a function of the destination, the source, the number
    of bytes and the stream, which returns 0 unless it fails."""
    copy = driver().cuMemcpyDtoDAsync_v2
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return copy


# The first byte of a post means: data of `exchange`, data of `post`, or no data, because the object is too long.
_EXCHANGE, _POST, _TOO_LONG = b"H", b"T", b"L"


def _symmetric_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate memory that ranks can share. torch's caching allocator does not free cached memory for this allocation.
    If the allocation fails because the cache contains unused memory, empty the cache and try again.
    """
    import torch.distributed._symmetric_memory as symm

    try:
        return symm.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as e:
        if "out of memory" not in str(e):
            raise
        # Memory that another stream uses returns to the cache only when that use has ended.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return symm.empty(nbytes, dtype=torch.uint8, device=device)


def _unpickled(post: bytes) -> Any:
    return "something longer" if post == _TOO_LONG else pickle.loads(post[1:])


class _On:
    """`torch.cuda.stream` for streams of one device, with less host overhead than torch's."""

    __slots__ = ("backend", "before", "device", "stream")

    def __init__(self, backend: GpuBackend, stream: torch.cuda.Stream) -> None:
        self.backend, self.stream = backend, stream

    def __enter__(self) -> None:
        self.before, self.device = self.backend.current_stream(), torch._C._cuda_getDevice()
        torch.cuda.set_stream(self.stream)  # also makes the stream's device the thread's current one

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.before)
        if self.device != self.backend.device.index:
            torch.cuda.set_device(self.device)


class _Recorded:
    """A recorded event, which returns to `unused` when its holder drops it. Recording an event again does not change
    waits that a stream has already enqueued. The host needs 2.7 to 6.3 us to record a new event, and 1.1 to 2.1 us to
    record an old one (two hosts with an H100, 2026-11)."""

    __slots__ = ("event", "unused")

    def __init__(self, event: torch.cuda.Event, unused: list[torch.cuda.Event]) -> None:
        self.event, self.unused = event, unused

    def __del__(self) -> None:
        self.unused.append(self.event)


class _GraphWork(StreamWork):
    """Work that eager calls launch as one CUDA graph, so that a call costs the host one launch for all copies, barriers
    and events of the work.

    All replays run on one stream, so they never overlap. External events link the graph with other streams: a replay
    waits for what they recorded before it, and streams wait for what it records."""

    backend: GpuBackend

    def __init__(self, backend: GpuBackend, stream: torch.cuda.Stream, work: Callable[[StreamWork], object]) -> None:
        super().__init__(backend, stream, work)
        self.graphs: list[torch.cuda.CUDAGraph] = []  # the graph, once it is captured
        weakref.finalize(self, _destroy, self.graphs).atexit = False

    def capture(self, keys: Iterable[Hashable]) -> None:
        """Capture the work, which waits for events with these keys. Its kernels must be loaded. The caller may be
        capturing a different stream."""
        if self.backend.uploads.pending:
            self.backend.uploads.precede(self.stream)  # a captured stream could not wait for uploads
        self.recorded = {key: self._external() for key in keys}  # torch waits only for events that were recorded before
        graph = torch.cuda.CUDAGraph()
        with any_call_allowed(), self.backend.on(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may allocate memory
            try:
                super().__call__()
            except BaseException:
                with suppress(RuntimeError):  # the streams of `work` may not be joined
                    graph.capture_end()
                raise
            graph.capture_end()
        self.graphs.append(graph)

    def _external(self) -> _Recorded:
        event = torch.cuda.Event(external=True)
        event.record(self.stream)
        return _Recorded(event, [])

    def record(self, key: Hashable, stream: torch.cuda.Stream) -> _Recorded:
        recorded: _Recorded = self.recorded[key]
        recorded.event.record(stream)
        return recorded

    def mark(self) -> None:
        self.marks.append(self._external())

    def __call__(self) -> list[_Recorded]:
        with _On(self.backend, self.stream):
            self.graphs[0].replay()
        return self.marks


def _destroy(graphs: list[torch.cuda.CUDAGraph]) -> None:
    """Destroy graphs that were dropped by garbage collection or by a World with too many of them (`World.sequence`).
    Any thread may be capturing a stream meanwhile. Outside `any_call_allowed`, CUDA would then invalidate the
    capture."""
    if graphs:
        with any_call_allowed():
            graphs.clear()


_dropped_in_captures: list[Any] = []  # memory of Worlds that ended during a capture


def _held_by(owner: object) -> list[Any]:
    """Return an empty list. Symmetric memory in it is kept until `owner` ends; if the current stream is being captured
    at that time, it is kept until the capture has ended."""
    held: list[Any] = []
    weakref.finalize(owner, _release, held).atexit = False
    return held


def _release(held: list[Any]) -> None:
    """Drop symmetric memory. Garbage collection may end a World, such as an unused model's, while a stream is being
    captured. torch would then abort the process, because the memory's destructor synchronises the device, which a
    capture forbids. So the memory is kept until the next allocation of symmetric memory, which never happens in a
    capture."""
    if held and torch.cuda.is_current_stream_capturing():
        _dropped_in_captures.extend(held)
    held.clear()


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the GPU that this process, or the code that created its group, has chosen. If no GPU was chosen, return
    the local rank's GPU."""
    started = dist.is_initialized()
    bound = getattr(group or dist.group.WORLD, "bound_device_id", None) if started else None
    if bound is not None and bound.type == "cuda":
        return torch.device("cuda", bound.index)
    local = os.environ.get("LOCAL_RANK", os.environ.get("RANK"))
    chosen = torch.cuda.is_initialized() and (started or "LOCAL_RANK" not in os.environ)
    if local is None or chosen:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", int(local) % torch.cuda.device_count())


def _why_unreachable(devices: Sequence[RankDevice]) -> str | None:
    """Return the reason why these ranks of one node cannot address each other's memory; None if they can."""
    taken: dict[tuple[str, str], int] = {}
    for rank, device in enumerate(devices):
        if device.reason:
            return f"{device.reason} (rank {rank})"
        first_rank = taken.setdefault(device.gpu, rank)
        if first_rank != rank and not (device.may_share and devices[first_rank].may_share):
            return f"ranks {first_rank} and {rank} share a GPU ({shared_gpu.VARIABLE}=1 lets them, to try things)"
    for rank, device in enumerate(devices):
        if device.gpus != devices[0].gpus:
            return f"ranks 0 and {rank} do not see the same GPUs (CUDA_VISIBLE_DEVICES)"
    for rank, device in enumerate(devices):
        blocked = [d.index for d in devices if d.index != device.index and not _peer_access(device.index, d.index)]
        if blocked:
            return f"GPU {device.index} has no peer access to GPUs {blocked} (rank {rank})"
    return None


def _why_no_atomics(devices: Sequence[RankDevice]) -> str | None:
    """Return the reason why these ranks, which can address each other's memory, cannot add to counters in that memory;
    None if they can."""
    for rank, device in enumerate(devices):
        others = [d.index for d in devices if d.index != device.index and not _peer_atomics(device.index, d.index)]
        if others:
            return f"GPU {device.index} has no atomics in the memory of GPUs {others}, as over PCIe (rank {rank})"
    return None


def _peer_atomics(index: int, peer_index: int) -> bool:
    """Return whether the link supports atomic operations, as NVLink does. PCIe splits an atomic operation into a read
    and a write, and another GPU's update between them is lost. If the driver does not answer, the link is assumed to
    support them."""
    value = ctypes.c_int(1)
    try:
        ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(value), NATIVE_ATOMICS, index, peer_index)
    except (OSError, AttributeError):
        return True
    return bool(value.value)


def _peer_access(index: int, peer_index: int) -> bool:
    try:
        return torch.cuda.can_device_access_peer(index, peer_index)
    except (AssertionError, RuntimeError):
        return False


def _group_timeout() -> datetime.timedelta:
    """Return the time limit of a process group's waits, which is longer than that of a kernel's waits."""
    return datetime.timedelta(seconds=timeout_seconds() * 4)


def _limited(ctas: int) -> object:
    """Return NCCL's options for a communicator of at most `ctas` CTAs."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = ctas
    options.config.cga_cluster_size = 0  # a cluster needs SMs of one GPC, but a GEMM leaves SMs of any GPC free
    return options


class CudaBackend(GpuBackend):
    """One rank of a torch.distributed group, with symmetric memory and NCCL."""

    name = "cuda"
    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup | None = None, check: bool = False) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError('the cuda backend needs a GPU; use weft.spmd(fn, n, backend="emulated") without one')
        shared_gpu.prepare()
        device = _device_of(group)
        torch.cuda.set_device(device)
        if not dist.is_initialized():
            # One process without a launcher forms a World of one rank.
            one: dict[str, Any] = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
            dist.init_process_group("nccl", device_id=device, timeout=_group_timeout(), **one)
        self.group = group if group is not None else _get_default_group()
        self._shm: SharedMemoryExchange | None = None
        self.compares = check
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        super().__init__(rank, size, device, torch.cuda.get_device_properties(device).multi_processor_count)
        if size > 1:
            self._connect()
        self.limits_ctas = size == dist.get_world_size()
        self._compare_devices()
        self._held = _held_by(self)  # symmetric memory
        self._communicators: dict[int, Communicator] = {}
        self.clock = None if self.shares_gpu else cuda_clock

    def split(self, groups: Sequence[Sequence[int]]) -> CudaBackend:
        """Make the groups. Every rank of torch.distributed must take part."""
        return CudaBackend(self._split(groups), self.compares)

    def _split(self, groups: Sequence[Sequence[int]], ctas: int = 0) -> dist.ProcessGroup:
        """Create a process group for each of `groups`, and return this rank's group. ctas: if not 0, the groups use
        only NCCL, with at most `ctas` CTAs. Collective."""
        if not self.limits_ctas:
            raise Unsupported(
                f"a World of {self.size} of torch.distributed's ranks cannot be split: the World of all can"
            )
        ranks = dist.get_process_group_ranks(self.group)
        process_groups = []
        for group in groups:
            limited: dict[str, Any] = dict(backend="nccl", pg_options=_limited(ctas)) if ctas else {}
            process_groups.append(dist.new_group([ranks[r] for r in group], timeout=_group_timeout(), **limited))
        return next(g for g, group in zip(process_groups, groups, strict=True) if self.rank in group)

    def _across(self, groups: Sequence[Sequence[int]]) -> CudaBackend:
        group = self._split(groups, BETWEEN_CTAS)
        self._warm_up(group, len(groups[0]))
        return CudaBackend(group, self.compares)

    def _warm_up(self, group: dist.ProcessGroup, size: int) -> None:
        """Connect the ranks of a group and load NCCL's kernels, before a collective runs concurrently with a GEMM."""
        one = torch.zeros(size, device=self.device, dtype=torch.bfloat16)
        dist.all_reduce(one, group=group)
        dist.reduce_scatter_tensor(one[:1].clone(), one, group=group)
        dist.all_to_all(list(one.clone().split(1)), list(one.split(1)), group=group)
        torch.cuda.synchronize(self.device)

    def alone(self) -> CudaBackend:
        """Make the group over gloo. A group over NCCL would transfer nothing, and all ranks of torch.distributed would
        have to take part in splitting NCCL's communicator."""
        ranks = [dist.get_process_group_ranks(self.group)[self.rank]]
        return CudaBackend(dist.new_group(ranks, backend="gloo", use_local_synchronization=True), self.compares)

    def waits_of_all_ranks(self, own_wait: str) -> list[str]:
        if self._shm is None:
            return super().waits_of_all_ranks(own_wait)
        ended = self._shm.end(own_wait.encode()[:BYTES], min(GRACE, timeout_seconds()))
        return ["" if data is None else data.decode(errors="replace") for data in ended]

    def _connect(self) -> None:
        """Connect this World's ranks over gloo, and also through shared memory if all of them can open one file."""
        seconds = timeout_seconds()
        self._messages = Messages(self.group, seconds)
        self._shm = SharedMemoryExchange.shared(self.rank, self.size, seconds, self._messages.objects)

    def _compare_devices(self) -> None:
        """Set `nodes`, `peers_unsupported`, `symmetric_unsupported` and `shares_gpu` from the devices of
        all ranks, so that every rank has the same values. Collective."""
        reason = architectures.lacks(architectures.device_capability(self.device), "bf16", "weft's kernels")
        self.peers_unsupported = self.symmetric_unsupported = reason
        if self.size == 1:
            return
        gpus = tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
        own_device = RankDevice(nodes.host_name(), gpus, self.device.index, reason, shared_gpu.may_share())
        devices = self.exchange(own_device)
        self.nodes = nodes.numbered([device.host for device in devices])
        self.peers_unsupported, number = (
            nodes.spread(self.nodes) or _why_unreachable(devices),
            shared_gpu.shared_gpus(devices),
        )
        self.two_level_unsupported = self._why_no_levels(devices)
        self.symmetric_unsupported = self.peers_unsupported or _why_no_atomics(devices)
        self.shares_gpu = number > 0
        if number and self.rank == 0:
            shared_gpu.log_shared_gpus(self.size, number)

    def _why_no_levels(self, devices: Sequence[RankDevice]) -> str | None:
        """Return the reason why the World has no levels. The call is collective if ranks are on several nodes of equal
        size, because each rank knows only the links of its own node."""
        reason, several = nodes.why_no_levels(self.nodes), nodes.spread(self.nodes)
        if reason is not None:
            return reason
        if not self.limits_ctas:
            return f"{several}, and a World of some of torch.distributed's ranks cannot be split"
        node = [device for device, node in zip(devices, self.nodes, strict=True) if node == self.nodes[self.rank]]
        reasons = self.exchange(_why_unreachable(node) or _why_no_atomics(node))
        failing_rank = next((rank for rank, reason in enumerate(reasons) if reason), None)
        return (
            None if failing_rank is None else f"{several}, and on that of rank {failing_rank} {reasons[failing_rank]}"
        )

    def exchange(self, obj: R) -> list[R]:
        if self.size == 1:
            return [obj]
        if self._shm is None:
            return self._messages.objects(obj)
        data = pickle.dumps(obj)
        fits = len(data) < BYTES
        self._shm.post(_EXCHANGE + data if fits else _TOO_LONG)
        posts = self._shm.collect(None)
        assert posts is not None
        # Every rank reads the same posts, so all ranks agree to exchange by messages.
        if _TOO_LONG in posts and all(post[:1] != _POST for post in posts):
            return self._messages.objects(obj)
        return [_unpickled(post) for post in posts]

    def post(self, obj: R) -> Callable[[float | None], list[R] | None] | None:
        data = pickle.dumps(obj)
        shm = self._shm
        if shm is None or len(data) >= BYTES:
            return None
        shm.post(_POST + data)

        def collect(patience: float | None) -> list[R] | None:
            posts = shm.collect(patience)
            if posts is None:
                return None
            return [obj if post[1:] == data else _unpickled(post) for post in posts]

        return collect

    def persistent_allocation(self) -> AbstractContextManager[None]:
        """Allocate on a side stream that is never captured. After a capture, the graph's memory pool may reuse the
        memory of the graph's intermediate results on each stream. In a warm-up of the next graph in the same pool
        (torch.cuda.use_mem_pool), a persistent allocation would receive that memory, and the first graph's next replay
        would overwrite it."""
        stream, allocation_stream = self.current_stream(), self.side_stream("persistent", urgent=False)
        if not self.on_side_stream() or stream == allocation_stream:
            return outlives_call()
        return self._on_allocation_stream(stream, allocation_stream)

    @contextmanager
    def _on_allocation_stream(self, stream: torch.cuda.Stream, allocation_stream: torch.cuda.Stream) -> Iterator[None]:
        self.wait_event(allocation_stream, self.record(stream))
        with self.on(allocation_stream), outlives_call():
            yield
        self.wait_event(stream, self.record(allocation_stream))

    def symmetric(self, nbytes: int, name: str) -> SymmetricTensor:
        import torch.distributed._symmetric_memory as symm

        _dropped_in_captures.clear()
        nbytes = (nbytes + 255) // 256 * 256
        if self.size == 1:
            local = self.zeros((nbytes,), torch.uint8)
            return SymmetricTensor(local, (local,), self.tensor([local.data_ptr()], torch.int64))
        if reason := nodes.spread(self.nodes):  # torch's rendezvous would fail on some ranks and hang on other ranks
            raise Unsupported(f"{name}: no symmetric memory: {reason}")
        local = _symmetric_memory(nbytes, self.device)
        memory_handle = symm.rendezvous(local, self.group)
        local.zero_()
        torch.cuda.synchronize(self.device)
        self.exchange(name)
        peers = tuple(
            local if r == self.rank else memory_handle.get_buffer(r, (nbytes,), torch.uint8) for r in range(self.size)
        )
        self._held.append(memory_handle)
        addresses = self.tensor([p.data_ptr() for p in peers], torch.int64)
        return SymmetricTensor(local, peers, addresses, int(getattr(memory_handle, "multicast_ptr", 0) or 0))

    # A collective of one rank is a copy, because its group may not support CUDA tensors (`alone`).

    @cached_property
    def _nccl(self) -> Collectives:
        return self._collectives(self.group)

    def _collectives(self, group: dist.ProcessGroup) -> Collectives:
        by_network = self.shares_gpu or nodes.spread(self.nodes) is not None
        return collectives(group, self.device, self.as_current, by_network)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, stream: torch.cuda.Stream) -> None:
        if self.size == 1:
            return self.copy(out, x, stream)
        self.collective(stream, self._nccl.all_gather, out, x)

    def all_gather_together(
        self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], stream: torch.cuda.Stream
    ) -> None:
        if self.size == 1:
            return super().all_gather_together(outs, inputs, stream)
        self.collective(stream, self._nccl.all_gather_together, outs, inputs)

    def communicator(self, ctas: int) -> Communicator:
        """Make a separate process group. In a World that contains only some of torch.distributed's ranks this returns
        None, because every rank would have to take part. On such a World "auto" chooses no plan that needs a limited
        communicator."""
        if self.size == 1 or not self.limits_ctas:
            return None
        if ctas not in self._communicators:
            group = self._split([range(self.size)], ctas)
            self._warm_up(group, self.size)
            self._communicators[ctas] = self._collectives(group)
        return self._communicators[ctas]

    def reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, stream: torch.cuda.Stream, on: Communicator = None
    ) -> None:
        if self.size == 1:
            return self.copy(out, x, stream)
        self.collective(stream, (on or self._nccl).reduce_scatter, out, x)

    def all_reduce(self, x: torch.Tensor, stream: torch.cuda.Stream, on: Communicator = None) -> None:
        if self.size == 1:
            return
        self.collective(stream, (on or self._nccl).all_reduce, x)

    def all_to_all(
        self,
        outs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        stream: torch.cuda.Stream,
        on: Communicator = None,
    ) -> None:
        if self.size == 1:
            return self.copy(outs[0], inputs[0], stream)
        self.collective(stream, (on or self._nccl).all_to_all, outs, inputs)
