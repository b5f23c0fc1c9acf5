"""NCCL's collectives on the communicators of torch.distributed's process groups.

The host needs 27 to 29 us to enqueue a collective by torch.distributed's backend, and 15 us by NCCL (two H200s,
2026-11), because torch also records a traceback and makes a Work. `DirectCollectives` calls NCCL itself, on torch's
communicator: known calls of sequential plans then take 0.76x to 1.02x of the host's time for the library's two calls,
and 1.14x to 1.29x by torch (bench/results/nvidia-h200-x2/experiments/host-nccl.jsonl). `Watch` does for these
collectives what torch's watchdog does for its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TypeVar

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

OnThisStream = TypeVar("OnThisStream", AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions)
UINT8, SUM = 1, 0  # ncclUint8, ncclSum
TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # ncclDataType_t
TICK = 1.0  # the seconds between two looks of a `Watch`


def _on_this_stream(options: OnThisStream) -> OnThisStream:
    options.asyncOp = False
    return options


_GATHER = _on_this_stream(AllgatherOptions())
_SCATTER = _on_this_stream(ReduceScatterOptions())
_REDUCE = _on_this_stream(AllreduceOptions())
_EXCHANGED = _on_this_stream(AllToAllOptions())


class Collectives:
    """The collectives of a process group by torch.distributed, on a stream that is the current one. Each method returns
    a Work for which the stream must wait, or None.

    The methods call the group's NCCL backend: torch.distributed's functions add checks, and the group's own methods add
    torch's dispatcher, which cost host time.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._backend: Communicator = group._get_backend(device)  # torch's stubs lack the methods of NCCL's backend

    def all_gather(self, stream: torch.cuda.Stream, out: torch.Tensor, x: torch.Tensor) -> dist.Work | None:
        return self._backend._allgather_base(out, x, _GATHER)

    def all_gather_together(
        self, stream: torch.cuda.Stream, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> dist.Work | None:
        return self._group.allgather_into_tensor_coalesced([*outs], [*inputs], _GATHER)

    def reduce_scatter(self, stream: torch.cuda.Stream, out: torch.Tensor, x: torch.Tensor) -> dist.Work | None:
        return self._backend._reduce_scatter_base(out, x, _SCATTER)

    def all_reduce(self, stream: torch.cuda.Stream, x: torch.Tensor) -> dist.Work | None:
        return self._backend.allreduce([x], _REDUCE)

    def all_to_all(
        self, stream: torch.cuda.Stream, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> dist.Work | None:
        return self._backend.alltoall([*outs], [*inputs], _EXCHANGED)


class DirectCollectives(Collectives):
    """The collectives of a process group by calls of NCCL. torch.distributed still enqueues the first collective, which
    makes the communicator, and those whose arguments it has to check or to refuse."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, library: ctypes.CDLL) -> None:
        super().__init__(group, device)
        self._library, self._device, self._size = library, device.index, group.size()
        self._watch = Watch(self._backend.options._timeout.total_seconds(), f"rank {group.rank()} on {device}")

    def all_gather(self, stream: torch.cuda.Stream, out: torch.Tensor, x: torch.Tensor) -> dist.Work | None:
        fits = out.nbytes == self._size * x.nbytes and out.dtype == x.dtype
        if not fits or not (communicator := self._communicator(out, x)):
            return super().all_gather(stream, out, x)
        arguments = x.data_ptr(), out.data_ptr(), x.nbytes, UINT8, communicator, stream.cuda_stream
        self._enqueued(self._library.ncclAllGather(*arguments), stream)
        return None

    def all_gather_together(
        self, stream: torch.cuda.Stream, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> dist.Work | None:
        fits = all(out.nbytes == self._size * x.nbytes for out, x in zip(outs, inputs, strict=True))
        if not fits or not (communicator := self._communicator(*outs, *inputs)):
            return super().all_gather_together(stream, outs, inputs)
        nccl, handle = self._library, stream.cuda_stream
        statuses = [nccl.ncclGroupStart()]
        for out, x in zip(outs, inputs, strict=True):
            arguments = x.data_ptr(), out.data_ptr(), x.nbytes, UINT8, communicator, handle
            statuses.append(nccl.ncclAllGather(*arguments))
        self._enqueued(max(*statuses, nccl.ncclGroupEnd()), stream)
        return None

    def reduce_scatter(self, stream: torch.cuda.Stream, out: torch.Tensor, x: torch.Tensor) -> dist.Work | None:
        fits = x.nbytes == self._size * out.nbytes and out.dtype == x.dtype in TYPES
        if not fits or not (communicator := self._communicator(out, x)):
            return super().reduce_scatter(stream, out, x)
        arguments = x.data_ptr(), out.data_ptr(), out.numel(), TYPES[x.dtype], SUM, communicator, stream.cuda_stream
        self._enqueued(self._library.ncclReduceScatter(*arguments), stream)
        return None

    def all_reduce(self, stream: torch.cuda.Stream, x: torch.Tensor) -> dist.Work | None:
        if x.dtype not in TYPES or not (communicator := self._communicator(x)):
            return super().all_reduce(stream, x)
        arguments = x.data_ptr(), x.data_ptr(), x.numel(), TYPES[x.dtype], SUM, communicator, stream.cuda_stream
        self._enqueued(self._library.ncclAllReduce(*arguments), stream)
        return None

    def all_to_all(
        self, stream: torch.cuda.Stream, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> dist.Work | None:
        if len(outs) != self._size or not (communicator := self._communicator(*outs, *inputs)):
            return super().all_to_all(stream, outs, inputs)
        nccl, handle = self._library, stream.cuda_stream
        statuses = [nccl.ncclGroupStart()]
        for peer, (out, x) in enumerate(zip(outs, inputs, strict=True)):
            if x.nbytes:
                statuses.append(nccl.ncclSend(x.data_ptr(), x.nbytes, UINT8, peer, communicator, handle))
            if out.nbytes:
                statuses.append(nccl.ncclRecv(out.data_ptr(), out.nbytes, UINT8, peer, communicator, handle))
        self._enqueued(max(*statuses, nccl.ncclGroupEnd()), stream)
        return None

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

    def _enqueued(self, status: int, stream: torch.cuda.Stream) -> None:
        if status:
            raise WeftError(f"NCCL failed with {status}: {self._library.ncclGetErrorString(status).decode()}")
        if not torch._C._cuda_isCurrentStreamCapturing():
            self._watch.record(stream)


class Watch:
    """Ends the process if a collective does not end within `seconds`, as torch's watchdog does: a peer that makes no
    such call leaves the GPU waiting, and the host may be waiting for the GPU.

    `latest` is recorded after each collective. A look replaces it, and later looks query the replaced event, which is
    not recorded any more, except by a call that is under way in that moment. Therefore it stays incomplete only if a
    collective before the first look does.
    """

    def __init__(self, seconds: float, where: str) -> None:
        self.seconds, self.where = seconds, where
        self.latest, self._spare = torch.cuda.Event(), torch.cuda.Event()
        self._watched: torch.cuda.Event | None = None
        self._recorded, self._since = False, 0.0
        _watches().append(weakref.ref(self))

    def record(self, stream: torch.cuda.Stream) -> None:
        self.latest.record(stream)
        self._recorded = True

    def look(self, moment: float) -> bool:
        """Return whether a collective has not ended within the time."""
        if self._watched is not None:
            if not self._watched.query():
                return moment - self._since > self.seconds
            self._spare, self._watched = self._watched, None
        elif self._recorded:
            self._recorded = False
            self._watched, self.latest, self._since = self.latest, self._spare, moment
        return False


@functools.cache
def _watches() -> list[weakref.ref[Watch]]:
    """Return the watches that a thread looks at. The first call starts the thread."""
    watches: list[weakref.ref[Watch]] = []
    threading.Thread(target=_look_at, args=(watches,), name="weft's watch of NCCL", daemon=True).start()
    return watches


def _look_at(watches: list[weakref.ref[Watch]]) -> None:
    while True:
        time.sleep(TICK)
        for reference in list(watches):  # other threads may append
            watch = reference()
            if watch is None:
                watches.remove(reference)
                continue
            try:
                with any_call_allowed():
                    late = watch.look(time.monotonic())
            except RuntimeError:  # the GPU has failed, and each call that uses it raises the error
                return
            if late:
                _end(watch)


def _end(watch: Watch) -> None:
    """End the process as torch's watchdog does, after printing what each thread does."""
    print(
        f"weft: {watch.where}: a collective of NCCL has not ended within {watch.seconds:g} s; another rank may not "
        "have made the call. Later results would be undefined, so the process ends.",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback()
    os.abort()


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the NCCL that torch has loaded, or None if torch contains its own copy."""
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
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def why_by_torch(group: dist.ProcessGroup, device: torch.device, several_nodes: bool) -> str | None:
    """Return the reason why torch.distributed enqueues the group's collectives, or None if NCCL is called directly."""
    for name, values in (
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "1"),
    ):
        if os.environ.get(name) == values:
            return f"{name}={values} asks torch for another treatment of errors"
    if several_nodes:
        return "torch's watchdog reads NCCL's errors of the network"
    if not hasattr(group._get_backend(device), "_comm_ptr"):
        return "the process group does not give its communicator"
    return "torch contains its own copy of NCCL" if _library() is None else None


def collectives(group: dist.ProcessGroup, device: torch.device, several_nodes: bool) -> Collectives:
    library = _library()
    if library is None or why_by_torch(group, device, several_nodes) is not None:
        return Collectives(group, device)
    return DirectCollectives(group, device, library)
