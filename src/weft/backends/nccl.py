"""NCCL's collectives on the communicators of torch.distributed's process groups.

The host needs 16 to 29 us to enqueue a collective by torch.distributed's backend, and 9 to 16 us by NCCL (two hosts
with two H200s, 2026-11), because torch also records a traceback and makes a Work. `DirectCollectives` calls NCCL
itself, on torch's communicator: known calls of sequential plans then take 0.76x to 1.02x of the host's time for the
library's calls, and 1.14x to 1.29x by torch (bench/results/nvidia-h200-x2/experiments). `Watch` does
for these collectives what torch's watchdog does for its own, and ends processes that the watchdog does not: of 4 ranks
on one GPU, whose last was killed, two had not ended 75 s after their start, though the watchdog had reported the time
limit of 20 s (2026-11).
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from ..errors import WeftError
from .base import Communicator
from .uploads import any_call_allowed

OnStream: TypeAlias = Callable[[torch.cuda.Stream], AbstractContextManager[object]]
OnThisStream = TypeVar("OnThisStream", AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions)
UINT8, SUM = 1, 0  # ncclUint8, ncclSum
IN_PROGRESS = 7  # ncclInProgress: the call of a communicator that does not block is not yet made
TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # ncclDataType_t
TICK = 1.0  # the seconds between two looks of a `Watch`
STDERR = 2  # the file descriptor, because sys.stderr may have none
SET = "1", "y", "yes", "t", "true"  # what torch takes for a variable that is set
# The values of variables that ask torch for another treatment of errors than to end the process.
TREATED_BY_TORCH = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "2"),
    "NCCL_ASYNC_ERROR_HANDLING": ("0", "2"),
    "TORCH_NCCL_BLOCKING_WAIT": SET,
    "NCCL_BLOCKING_WAIT": SET,
    "TORCH_NCCL_USE_COMM_NONBLOCKING": SET,
}


def _on_this_stream(options: OnThisStream) -> OnThisStream:
    options.asyncOp = False
    return options


_GATHER = _on_this_stream(AllgatherOptions())
_SCATTER = _on_this_stream(ReduceScatterOptions())
_REDUCE = _on_this_stream(AllreduceOptions())
_EXCHANGED = _on_this_stream(AllToAllOptions())


class Collectives:
    """The collectives of a process group by torch.distributed. Each method makes the stream wait for its collective.
    `on` returns a context in which a stream is the current one. If the stream is not the current one, either both are
    in the same capture, or neither is in one.

    The methods call the group's NCCL backend: torch.distributed's functions add checks, and the group's own methods add
    torch's dispatcher, which cost host time. watched: whether weft ends the process if a collective does not end.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, on: OnStream, watched: bool) -> None:
        self._group, self._on = group, on
        self._backend: Communicator = group._get_backend(device)  # torch's stubs lack the methods of NCCL's backend
        self._watch = Watch(self, f"rank {group.rank()} on {device}") if watched else None

    @property
    def limit(self) -> float:
        """The process group's time limit in seconds, which the caller may change."""
        seconds: float = self._backend.options._timeout.total_seconds()
        return seconds

    @property
    def patience(self) -> float:
        """The seconds after which weft ends the process. torch's watchdog, which prints more, comes first."""
        return 2 * self.limit

    def _by_torch(
        self, stream: torch.cuda.Stream, enqueue: Callable[..., dist.Work | None], *arguments: object
    ) -> None:
        with self._on(stream):
            work = enqueue(*arguments)
            if work is not None:
                work.wait()
        self._record(stream)

    def _record(self, stream: torch.cuda.Stream) -> None:
        if self._watch is not None and not torch._C._cuda_isCurrentStreamCapturing():
            self._watch.record(stream)

    def all_gather(self, stream: torch.cuda.Stream, out: torch.Tensor, x: torch.Tensor) -> None:
        self._by_torch(stream, self._backend._allgather_base, out, x, _GATHER)

    def all_gather_together(
        self, stream: torch.cuda.Stream, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        self._by_torch(stream, self._group.allgather_into_tensor_coalesced, [*outs], [*inputs], _GATHER)

    def reduce_scatter(self, stream: torch.cuda.Stream, out: torch.Tensor, x: torch.Tensor) -> None:
        self._by_torch(stream, self._backend._reduce_scatter_base, out, x, _SCATTER)

    def all_reduce(self, stream: torch.cuda.Stream, x: torch.Tensor) -> None:
        self._by_torch(stream, self._backend.allreduce, [x], _REDUCE)

    def all_to_all(
        self, stream: torch.cuda.Stream, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        self._by_torch(stream, self._backend.alltoall, [*outs], [*inputs], _EXCHANGED)


class DirectCollectives(Collectives):
    """The collectives of a process group by calls of NCCL. torch.distributed still enqueues a collective if the group
    has no communicator yet, if another GPU is the thread's current one, or if torch has to refuse the arguments."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, on: OnStream, library: ctypes.CDLL) -> None:
        super().__init__(group, device, on, watched=True)
        self._library, self._device, self._size = library, device.index, group.size()

    @property
    def patience(self) -> float:
        return self.limit  # torch's watchdog does not know these collectives

    def all_gather(self, stream: torch.cuda.Stream, out: torch.Tensor, x: torch.Tensor) -> None:
        fits = out.nbytes == self._size * x.nbytes and out.dtype == x.dtype
        if not fits or not (communicator := self._communicator(out, x)):
            return super().all_gather(stream, out, x)
        arguments = x.data_ptr(), out.data_ptr(), x.nbytes, UINT8, communicator, stream.cuda_stream
        self._enqueued(self._library.ncclAllGather(*arguments), communicator, stream)

    def all_gather_together(
        self, stream: torch.cuda.Stream, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        pairs = list(zip(outs, inputs, strict=True))
        fits = all(out.nbytes == self._size * x.nbytes and out.dtype == x.dtype for out, x in pairs)
        if not fits or not (communicator := self._communicator(*outs, *inputs)):
            return super().all_gather_together(stream, outs, inputs)
        gather, handle = self._library.ncclAllGather, stream.cuda_stream
        calls = (gather(x.data_ptr(), out.data_ptr(), x.nbytes, UINT8, communicator, handle) for out, x in pairs)
        self._group_of(calls, communicator, stream)

    def reduce_scatter(self, stream: torch.cuda.Stream, out: torch.Tensor, x: torch.Tensor) -> None:
        fits = x.nbytes == self._size * out.nbytes and out.dtype == x.dtype in TYPES
        if not fits or not (communicator := self._communicator(out, x)):
            return super().reduce_scatter(stream, out, x)
        arguments = x.data_ptr(), out.data_ptr(), out.numel(), TYPES[x.dtype], SUM, communicator, stream.cuda_stream
        self._enqueued(self._library.ncclReduceScatter(*arguments), communicator, stream)

    def all_reduce(self, stream: torch.cuda.Stream, x: torch.Tensor) -> None:
        if x.dtype not in TYPES or not (communicator := self._communicator(x)):
            return super().all_reduce(stream, x)
        arguments = x.data_ptr(), x.data_ptr(), x.numel(), TYPES[x.dtype], SUM, communicator, stream.cuda_stream
        self._enqueued(self._library.ncclAllReduce(*arguments), communicator, stream)

    def all_to_all(
        self, stream: torch.cuda.Stream, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        fits = len(outs) == len(inputs) == self._size
        if not fits or not (communicator := self._communicator(*outs, *inputs)):
            return super().all_to_all(stream, outs, inputs)
        handle = stream.cuda_stream
        calls = (
            transfer(t.data_ptr(), t.nbytes, UINT8, peer, communicator, handle)
            for transfer, tensors in ((self._library.ncclSend, inputs), (self._library.ncclRecv, outs))
            for peer, t in enumerate(tensors)
            if t.nbytes
        )
        self._group_of(calls, communicator, stream)

    def _group_of(self, calls: Iterator[int], communicator: int, stream: torch.cuda.Stream) -> None:
        """Make these calls in a group of NCCL, which is closed even if one of them raises an exception."""
        statuses = [self._library.ncclGroupStart()]
        try:
            statuses.extend(calls)
        finally:
            statuses.append(self._library.ncclGroupEnd())
        self._enqueued(max(statuses), communicator, stream)

    def _communicator(self, *tensors: torch.Tensor) -> int:
        """Return torch's communicator for these tensors, or 0 if torch has to enqueue the collective. Raise torch's
        error if the communicator was aborted. A process group may be destroyed, so the address is not kept."""
        if torch._C._cuda_getDevice() != self._device:
            return 0
        for t in tensors:
            if not t.is_contiguous() or t.get_device() != self._device:
                return 0
        communicator: int = self._backend._comm_ptr()
        return communicator

    def _enqueued(self, status: int, communicator: int, stream: torch.cuda.Stream) -> None:
        if status == IN_PROGRESS:
            status = self._status_of_call(communicator)
        if status:
            raise WeftError(f"NCCL failed with {status}: {self._library.ncclGetErrorString(status).decode()}")
        self._record(stream)

    def _status_of_call(self, communicator: int) -> int:
        """Wait until a communicator that does not block has made a call, and return the call's status."""
        status, end = ctypes.c_int(IN_PROGRESS), time.monotonic() + self.limit
        while status.value == IN_PROGRESS and time.monotonic() < end:
            self._library.ncclCommGetAsyncError(communicator, ctypes.byref(status))
        return status.value


class Watch:
    """Finds a collective that does not end within its owner's patience: a peer that makes no such call leaves the GPU
    waiting, and the host may be waiting for the GPU.

    `latest` is recorded after each collective. A look replaces it, and later looks query the replaced event until it is
    complete; it stays incomplete only if a collective that was enqueued before the first look has not ended. A look
    begins to count the time when it replaces the event, so that a collective is found within twice that time. A watch
    refers to no process group, because the thread refers to watches until the process exits.
    """

    def __init__(self, owner: Collectives, where: str) -> None:
        self.where, self.seconds = where, owner.patience
        self.latest, self._spare = torch.cuda.Event(), torch.cuda.Event()
        self._watched: torch.cuda.Event | None = None
        self._owner, self._recorded, self._since = weakref.ref(owner), False, 0.0
        _watches().append(self)

    def record(self, stream: torch.cuda.Stream) -> None:
        self.latest.record(stream)
        self._recorded = True

    def look(self, moment: float) -> bool:
        """Return whether a collective has not ended in time."""
        if self._watched is not None:
            if not self._watched.query():
                return moment - self._since > self.seconds
            self._spare, self._watched = self._watched, None
        elif self._recorded:
            self._recorded = False
            self._watched, self.latest, self._since = self.latest, self._spare, moment
            if (owner := self._owner()) is not None:
                self.seconds = owner.patience
        return False

    @property
    def over(self) -> bool:
        """Whether no collective can follow and none is pending."""
        return self._owner() is None and self._watched is None and not self._recorded


@functools.cache
def _watches() -> list[Watch]:
    """Return the watches that a thread looks at. The first call starts the thread."""
    watches: list[Watch] = []
    threading.Thread(target=_look_at, args=(watches,), name="weft's watch of NCCL", daemon=True).start()
    return watches


def _look_at(watches: list[Watch]) -> None:
    while True:
        time.sleep(TICK)
        for watch in list(watches):  # other threads may append
            late = False
            # If the GPU has failed, each call that uses it raises the error, and so does the query of an event.
            with suppress(RuntimeError), any_call_allowed():
                late = watch.look(time.monotonic())
            if late:
                _end(watch)
            if watch.over:
                watches.remove(watch)


def _end(watch: Watch) -> None:
    """End the process as torch's watchdog does, after printing what each thread does."""
    try:
        message = (
            f"weft: {watch.where}: a collective of NCCL has not ended within {watch.seconds:g} s; another rank may not "
            "have made the call. Later results would be undefined, so the process ends.\n"
        )
        os.write(STDERR, message.encode())
        faulthandler.dump_traceback(STDERR)
    finally:
        os.abort()


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the NCCL library that is loaded. Return None if none is, or if it has another version than torch's NCCL: a
    communicator is an address in the library that made it."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    major, minor, patch = torch.cuda.nccl.version()[:3]
    if version.value != 10000 * major + 100 * minor + patch:
        return None
    address, number, kind = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclAllGather.argtypes = address, address, number, kind, address, address
    library.ncclReduceScatter.argtypes = address, address, number, kind, kind, address, address
    library.ncclAllReduce.argtypes = address, address, number, kind, kind, address, address
    library.ncclSend.argtypes = library.ncclRecv.argtypes = address, number, kind, kind, address, address
    library.ncclCommGetAsyncError.argtypes = address, address
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def why_unwatched(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return the reason why weft must not end the process if a collective of the group does not end, or None."""
    for name, values in TREATED_BY_TORCH.items():
        if (value := os.environ.get(name, "")).lower() in values:
            return f"{name}={value} asks torch for another treatment of errors"
    if not hasattr(group._get_backend(device), "_comm_ptr"):
        return "the process group does not give its communicator"
    return None


def collectives(group: dist.ProcessGroup, device: torch.device, on: OnStream, by_network: bool) -> Collectives:
    """Return the group's collectives. by_network: whether NCCL moves data by the network, whose errors torch's watchdog
    reads. torch enqueues these collectives, those that are not watched, and all if NCCL's library is not known."""
    watched = why_unwatched(group, device) is None
    if watched and not by_network and (library := _library()) is not None:
        return DirectCollectives(group, device, on, library)
    return Collectives(group, device, on, watched)
