"""Ranks are threads of one process that share one GPU, each with 1/N of its SMs: real GPU memory order on a
workstation.

Symmetric memory is plain memory. What it cannot show is a peer's memory across a link, or real overlap.

Whatever makes one rank's work wait for all kernels of the GPU ends in an expired wait if a kernel of that rank spins
meanwhile, and its peer's comes behind that work: loading a kernel, freeing memory (`torch.cuda.empty_cache`), making
room for local memory. `spmd` has what it can have of that done before the ranks start; tests/gpu_shared.py shows what
holds a rank back.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import cast

import torch
from triton import JITFunction

from ..errors import Timeout
from ..transport.barrier import barrier
from .base import NONE_MOVING, Arguments, Communicator, Moving, Options, R, SymmetricTensor, timeout_seconds
from .cuda import GpuBackend

log = logging.getLogger("weft")
# Before CUDA starts: streams that share a queue wait for each other's spinning kernels, and so does a kernel that is
# loaded when it is first launched.
SETTINGS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
STACK = 2048  # bytes of local memory a thread, 0.5 GB on 132 SMs


class _Meeting:
    """What the threads share: one barrier and one slot a rank."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_seconds())
        self.slots: list[object] = [None] * size
        self.launch_lock = threading.Lock()


class LoopbackBackend(GpuBackend):
    name = "loopback"

    def __init__(self, rank: int, size: int, device: torch.device, meeting: _Meeting) -> None:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        super().__init__(rank, size, device, sms // size)
        self._meeting = meeting

    def exchange(self, obj: R) -> list[R]:
        try:
            self._meeting.slots[self.rank] = obj
            self._meeting.barrier.wait()
            out = cast(list[R], list(self._meeting.slots))
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError as e:
            raise Timeout(f"rank {self.rank}: not every rank joined within {timeout_seconds():g} s") from e
        return out

    def launch(
        self,
        kernel: JITFunction,
        grid: int,
        args: Arguments | Callable[[], Arguments],
        options: Options,
        stream: torch.cuda.Stream,
        key: Hashable = None,
        moving: Moving = NONE_MOVING,
    ) -> None:
        values = args() if callable(args) else args
        if kernel is barrier:
            # By the hosts: what it stands before is often the library's, which loads kernels of its own when it likes,
            # and loading for one rank waits for another's spinning kernel on the same GPU.
            self._collective(None, lambda _: None, stream)
            return
        if key is not None:
            self.load(kernel, grid, values, options)
        with self._meeting.launch_lock:  # Triton's compiler and caches are not made for threads
            super().launch(kernel, grid, values, options, stream)

    def load(self, kernel: JITFunction, grid: int, args: Arguments, options: Options) -> None:
        """Everything that allocates, compiles or loads comes before any rank's programs spin on this GPU. The ranks
        agree on what is new: a variant goes by sizes, not by addresses."""
        with self._meeting.launch_lock:
            new = self.launcher.load(kernel, grid, args, options)
        if new and not options.get("local"):
            self.exchange("loaded")

    def symmetric(self, nbytes: int, name: str) -> SymmetricTensor:
        local = torch.zeros((nbytes + 255) // 256 * 256, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        peers = tuple(self.exchange(local))
        return SymmetricTensor(local, peers, self.tensor([p.data_ptr() for p in peers], torch.int64))

    def _collective(self, mine: R, fn: Callable[[list[R]], None], stream: torch.cuda.Stream) -> None:
        """Host-synchronous: correct, and all that a loopback collective has to be."""
        stream.synchronize()
        peers = self.exchange(mine)
        with torch.cuda.stream(stream):
            fn(peers)
        stream.synchronize()
        self.exchange(None)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stream: torch.cuda.Stream,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """By all hosts together, as `barrier`: the library loads a kernel where another rank's must not be spinning."""
        made: list[torch.Tensor] = []
        self._collective(
            None, lambda _: made.append(super(LoopbackBackend, self).linear(x, weight, bias, stream, out)), stream
        )
        return made[0]

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._collective(x, lambda xs: _into(out, torch.cat(xs)), stream)

    def reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, stream: torch.cuda.Stream, on: Communicator = None
    ) -> None:
        n = out.shape[0]

        lo, hi = self.rank * n, (self.rank + 1) * n
        self._collective(x, lambda xs: _into(out, _sum([t[lo:hi] for t in xs])), stream)

    def all_reduce(self, x: torch.Tensor, stream: torch.cuda.Stream, on: Communicator = None) -> None:
        total = torch.empty_like(x)
        self._collective(x, lambda xs: _into(total, _sum(xs)), stream)
        self.copy(x, total, stream)

    def all_to_all(
        self,
        outs: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        stream: torch.cuda.Stream,
        on: Communicator = None,
    ) -> None:
        def take(theirs: list[list[torch.Tensor]]) -> None:
            for out, sent in zip(outs, theirs, strict=True):
                out.copy_(sent[self.rank])

        self._collective(list(parts), take, stream)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """fp32, in rank order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


def _into(out: torch.Tensor, value: torch.Tensor) -> None:
    out.copy_(value)


def _make_room(device: torch.device) -> None:
    """The GPU's local memory, before any rank's kernel spins: at the first launch of a kernel that needs more (torch's
    reductions do), the driver lets everything that runs end before anything else begins."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # the thread has a context
    ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(0, ctypes.c_size_t(STACK))  # CU_LIMIT_STACK_SIZE
    torch.ones(4096, device=device).any()
    torch.cuda.synchronize(device)


def spmd(fn: Callable[[LoopbackBackend], R], size: int) -> list[R]:
    """Run `fn(backend)` on `size` threads, each on its own stream. Raises RuntimeError without a GPU."""
    late = torch.cuda.is_initialized() and [f"{k}={v}" for k, v in SETTINGS.items() if os.environ.get(k) != v]
    if late:
        log.warning(
            f"loopback: CUDA started without {' '.join(late)}: waits may expire; set it before the program starts"
        )
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        raise RuntimeError('the loopback backend needs a GPU; use weft.spmd(fn, n, backend="emulated") without one')
    device = torch.device("cuda", torch.cuda.current_device())
    _make_room(device)
    meeting = _Meeting(size)
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream(device)):
                backend = LoopbackBackend(rank, size, device, meeting)
                results[rank] = fn(backend)
                backend.synchronize()
        except BaseException as e:
            errors.append(e)
            meeting.barrier.abort()

    threads = [threading.Thread(target=main, args=(r,), name=f"rank {r}") for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, Timeout)), errors[0])
    return [results[rank] for rank in range(size)]
