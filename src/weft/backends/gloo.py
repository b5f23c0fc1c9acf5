"""Ranks are processes with CPU tensors over a gloo process group. This backend is the reference for integrations
without a GPU.

Every op runs its sequential plan (`Backend.reference`). Collectives move bytes over gloo and sum in float32 in rank
order, so their results have the same bits in every run. A kernel that does not wait for other ranks runs in the
emulator, as one rank. There is one stream, and every operation is done when the call that enqueues it returns.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from triton import JITFunction

from ..errors import Unsupported
from ..kernel_launch import Launch, Moved
from ..lang.intrinsics import GUARD_WORDS
from ..lang.jit import Options
from ..scale import SMALL, Scale
from ..symmetric import Reads, check_memory
from .base import (
    Arguments,
    Backend,
    Communicator,
    Event,
    R,
    Stream,
    SymmetricTensor,
    sum_in_order,
)
from .cuda import timeout_seconds
from .messages import Messages
from .nodes import host_name, numbered, spread, why_no_levels

log = logging.getLogger("weft")
RESIDENT = 4  # resident programs of a rank in the emulator; each is a greenlet, and all share one core
# Blocks are large, because the emulator's time depends on the number of operations, not on the number of elements;
# stored formats are as on a GPU.
EMULATED_BLOCK = 1 << 16
SCALE = replace(
    SMALL,
    block=EMULATED_BLOCK,
    norm_block=EMULATED_BLOCK,
    gate_block=EMULATED_BLOCK,
    run_columns=Scale.run_columns,
    interleave=Scale.interleave,
    replicated_bytes=Scale.replicated_bytes,
)
_emulating = threading.Lock()  # the emulator replaces functions of Triton's language while it runs


def serves(group: dist.ProcessGroup | None) -> bool:
    """Return whether the ranks of the group (default: all ranks) are processes with CPU tensors: the group's only
    backend is gloo, or the group uses gloo for CPU tensors and this machine has no GPU."""
    if group is None and not dist.is_initialized():
        return False
    backends = dist.get_backend_config(group).split(",")  # such as cpu:gloo,cuda:nccl
    if not torch.cuda.is_available():
        return "cpu:gloo" in backends
    return all(backend.endswith(":gloo") for backend in backends)


def start() -> None:
    """Initialise torch.distributed over gloo from the environment; the ranks, all on this machine, share its cores."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_seconds() * 4))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))


@functools.cache
def _announce() -> None:
    """Log, once per process, that ranks over gloo are only a reference."""
    log.warning("gloo: ranks are CPU processes, the reference: every op runs by its sequential plan")


class GlooBackend(Backend):
    """One rank of a gloo process group."""

    name = "gloo"
    sm_count = RESIDENT
    scale = SCALE
    reference = compares = True
    peers_unsupported = symmetric_unsupported = "ranks are CPU processes, which have no symmetric memory"
    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else _get_default_group()
        self.device = torch.device("cpu")
        self._messages = Messages(self.group, timeout_seconds())
        self.rank, self.size = self._messages.rank, self._messages.size
        self._guard = torch.zeros(GUARD_WORDS, dtype=torch.int64, device="cpu")
        self.nodes = numbered(self.exchange(host_name()))
        several = f"{spread(self.nodes)}, and {self.symmetric_unsupported}"
        self.two_level_unsupported = why_no_levels(self.nodes) or several
        if self.rank == 0:
            _announce()

    # -- host --------------------------------------------------------------------------------------------------------
    def exchange(self, obj: R) -> list[R]:
        return [obj] if self.size == 1 else self._messages.objects(obj)

    def split(self, groups: Sequence[Sequence[int]]) -> GlooBackend:
        """Make the groups. Every rank of torch.distributed must take part."""
        if self.size != dist.get_world_size():
            raise Unsupported(
                f"a World of {self.size} of torch.distributed's ranks cannot be split: the World of all can"
            )
        ranks = dist.get_process_group_ranks(self.group)
        process_groups = [dist.new_group([ranks[r] for r in group], backend="gloo") for group in groups]
        return GlooBackend(next(g for g, group in zip(process_groups, groups, strict=True) if self.rank in group))

    def alone(self) -> GlooBackend:
        ranks = [dist.get_process_group_ranks(self.group)[self.rank]]
        return GlooBackend(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))

    def synchronize(self) -> None:
        self.check()

    def check(self) -> None:
        """Do nothing: there are no device-side waits."""

    def left_out(self) -> int:
        return int(self._guard[3])

    def left_out_by_rank(self) -> list[int]:
        return self._guard[4:].tolist()

    # -- memory ------------------------------------------------------------------------------------------------------
    def symmetric(self, nbytes: int, name: str) -> SymmetricTensor:
        raise Unsupported(f'{name}: {self.symmetric_unsupported}; weft.spmd(fn, n, backend="emulated") has it')

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(check_memory(shape, dtype), dtype=dtype, device="cpu")

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(check_memory(shape, dtype), dtype=dtype, device="cpu")

    def tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device="cpu")

    def guard(self) -> torch.Tensor:
        return self._guard

    # -- streams -----------------------------------------------------------------------------------------------------
    def current_stream(self) -> Stream:
        return None

    def side_stream(self, name: str, urgent: bool = True) -> Stream:
        return None

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, stream: Stream) -> Event:
        return None

    def wait_event(self, stream: Stream, event: Event) -> None:
        pass

    def capturing(self) -> bool:
        return False

    def finish(self, stream: Stream = None) -> None:
        pass

    # -- stream operations -------------------------------------------------------------------------------------------
    def launch(self, kernel: JITFunction, grid: int, args: Arguments, options: Options, stream: Stream) -> None:
        from . import emulated

        def host(rank: emulated.EmulatedBackend) -> None:
            rank.launch(kernel, grid, args, options, rank.current_stream())
            rank.synchronize()

        with _emulating:
            emulated.spmd(host, 1, sm_count=RESIDENT, races=False, preempt=0.0)

    def run_launch(self, launch: Launch, stream: Stream, moving: Mapping[str, Moved]) -> None:
        self.launch(launch.kernel, launch.grid, launch.arguments(moving), launch.options, stream)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        dst.copy_(src)

    def signal(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        raise Unsupported(f"a signal to a peer: {self.symmetric_unsupported}")

    def wait(self, word: torch.Tensor, value: torch.Tensor, stream: Stream) -> None:
        raise Unsupported(f"a wait for a peer: {self.symmetric_unsupported}")

    def call(self, fn: Callable[[], object], reads: Reads, writes: Sequence[torch.Tensor], stream: Stream) -> None:
        fn()

    # -- collectives -------------------------------------------------------------------------------------------------
    def all_gather(self, out: torch.Tensor, x: torch.Tensor, stream: Stream) -> None:
        shards = self._messages.gathered(x)
        for rows, shard in zip(out.tensor_split(self.size), shards, strict=True):
            rows.copy_(shard)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, stream: Stream, on: Communicator = None) -> None:
        partials = [torch.empty_like(out) for _ in range(self.size)]
        self._messages.exchanged(x.contiguous().tensor_split(self.size), partials)
        out.copy_(sum_in_order(partials))

    def all_reduce(self, x: torch.Tensor, stream: Stream, on: Communicator = None) -> None:
        x.copy_(sum_in_order(self._messages.gathered(x)))

    def all_to_all(
        self, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], stream: Stream, on: Communicator = None
    ) -> None:
        self._messages.exchanged(inputs, outs)
