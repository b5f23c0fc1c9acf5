"""Ranks are processes, one GPU each; memory comes from torch.distributed._symmetric_memory, collectives from NCCL.

NVLink multicast: weft makes no multicast object. Where torch's symmetric memory has made one, plan "multicast" can use its
address; TORCH_SYMM_MEM_DISABLE_MULTICAST=1 keeps torch from making any.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from ..errors import Timeout
from .base import Backend, SymmetricTensor
from .launcher import Launcher


def timeout_seconds() -> float:
    """Bound of every wait, in seconds (environment variable WEFT_TIMEOUT, default 30)."""
    return float(os.environ.get("WEFT_TIMEOUT", "30"))


class Record:
    """Where an expired device-side wait says who waited for what; pinned, so the host reads it without a stream."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.zeros(8, dtype=torch.int64, pin_memory=True)
        self.words = self.host.numpy()
        self.guard = torch.zeros(16, dtype=torch.int64)
        self.guard[0] = int(timeout_seconds() * 1e9)
        self.guard[2] = self.host.data_ptr()
        self.guard = self.guard.to(device)


class GpuBackend(Backend):
    """What `cuda` and `loopback` share: streams, copies, launches and the record of expired waits on one GPU."""

    def __init__(self, rank: int, size: int, device: torch.device, sm_count: int) -> None:
        self.rank, self.size, self.device, self.sm_count = rank, size, device, sm_count
        self.record_words = Record(device)
        self.launcher = Launcher(self)
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._by_handle: dict[int, torch.cuda.Stream] = {}
        self._like: dict[torch.dtype, torch.Tensor] = {}
        self.describe: Callable[[int], str] | None = None  # names the counter at an address; set by the World

    # -- host
    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
        self.check()

    def check(self) -> None:
        words = self.record_words.words
        if words[0]:
            address, target, seen, tile, peer = (int(w) for w in words[1:6])
            where = self.describe(address) if self.describe else f"address {address:#x}"
            who = "any peer" if peer < 0 else f"rank {peer}"
            after = f"expired after {timeout_seconds():g} s"
            if not target:
                where = where.removeprefix("channel ").lstrip("0123456789").removeprefix(" of ")
                raise Timeout(f"rank {self.rank}: a wait for part {tile} in {where}, {after}: {who} did not post it")
            raise Timeout(
                f"rank {self.rank}: a wait on {where}, tile {tile}, {after}: "
                f"counter stands at {seen}, needs {target}; {who} did not arrive"
            )

    # -- memory
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        like = self._like.get(dtype)
        if like is None:
            like = self._like[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return like.new_empty(shape)  # less host time than torch.empty

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def guard(self) -> torch.Tensor:
        return self.record_words.guard

    # -- streams
    def current_stream(self) -> torch.cuda.Stream:
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        stream = self._by_handle.get(raw)
        if stream is None:
            stream = self._by_handle[raw] = torch.cuda.current_stream(self.device)
        return stream

    def side_stream(self, name: str, urgent: bool = True) -> torch.cuda.Stream:
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device, priority=-1 if urgent else 0)
        return self._streams[name]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return _On(self, stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def captures(self, stream: torch.cuda.Stream) -> bool:
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    def finish(self, stream: torch.cuda.Stream) -> None:
        pass

    # -- stream operations
    def launch(
        self, kernel: Any, grid: int, args: Any, options: dict[str, Any], stream: Any, key: Hashable = None
    ) -> None:
        self.launcher.launch(kernel, grid, args, options, stream, key)

    def load(self, kernel: Any, grid: int, args: dict[str, Any], options: dict[str, Any]) -> None:
        self.launcher.load(kernel, grid, args, options)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self.call(lambda: dst.copy_(src, non_blocking=True), [src], [dst], stream)

    def signal(self, word: torch.Tensor, value: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self.copy(word, value, stream)

    def wait(self, word: torch.Tensor, value: torch.Tensor, stream: torch.cuda.Stream) -> None:
        from ..kernels.sync import wait_word

        self.launch(wait_word, 1, dict(word=word, value=value, guard=self.guard()), dict(num_warps=1), stream)

    def call(
        self, fn: Callable[[], Any], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], stream: Any
    ) -> None:
        if stream.cuda_stream == torch._C._cuda_getCurrentRawStream(self.device.index):
            fn()
            return
        with _On(self, stream):
            fn()

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stream: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if (
            out is None
            and stream.cuda_stream == torch._C._cuda_getCurrentRawStream(self.device.index)
            and not torch.is_autocast_enabled("cuda")  # which would have F.linear give another dtype
        ):
            return torch.nn.functional.linear(x, weight, bias)
        return super().linear(x, weight, bias, stream, out)


def _on_this_stream(options: Any) -> Any:
    options.asyncOp = False
    return options


_GATHER = _on_this_stream(AllgatherOptions())
_SCATTER = _on_this_stream(ReduceScatterOptions())
_REDUCE = _on_this_stream(AllreduceOptions())


def _enqueued(work: Any) -> None:
    """The current stream goes on after a collective."""
    if work is not None:
        work.wait()


class _On:
    """`torch.cuda.stream` for streams of one device, in less host time."""

    __slots__ = ("backend", "before", "stream")

    def __init__(self, backend: GpuBackend, stream: torch.cuda.Stream) -> None:
        self.backend, self.stream = backend, stream

    def __enter__(self) -> None:
        self.before = self.backend.current_stream()
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.before)


class CudaBackend(GpuBackend):
    name = "cuda"

    def __init__(self, group: Any = None) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError('the cuda backend needs a GPU; use weft.spmd(fn, n, backend="emulated") without one')
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if not dist.is_initialized():
            if "RANK" not in os.environ:  # one process, no launcher: a world of one
                dist.init_process_group(
                    "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device,
                    timeout=datetime.timedelta(seconds=timeout_seconds() * 4),
                )  # fmt: skip
            else:
                dist.init_process_group(
                    "nccl", device_id=device, timeout=datetime.timedelta(seconds=timeout_seconds() * 4)
                )
        self.group = group if group is not None else dist.group.WORLD
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        super().__init__(rank, size, device, torch.cuda.get_device_properties(device).multi_processor_count)
        ranks = dist.get_process_group_ranks(self.group)
        self._host_group = dist.new_group(  # made by its own ranks alone: others may be making theirs
            ranks, backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds()), use_local_synchronization=True
        )
        self.symmetric_reason = self._why_not_symmetric()
        self._held: list[Any] = []
        self._communicators: dict[int, Any] = {}

    def _why_not_symmetric(self) -> str | None:
        """Agreed by all ranks: the first rank's reason wins."""
        reason = None
        if self.size == 1:
            reason = "one rank"
        elif torch.cuda.get_device_capability(self.device)[0] < 9:
            reason = (
                f"{torch.cuda.get_device_name(self.device)} has no bulk tensor copies (needs compute capability 9.0)"
            )
        else:
            others = self.exchange(self.device.index)
            blocked = [
                d
                for d in others
                if d != self.device.index and not torch.cuda.can_device_access_peer(self.device.index, d)
            ]
            if blocked:
                reason = f"GPU {self.device.index} has no peer access to GPUs {blocked}"
        reasons = self.exchange(reason)
        return next((f"{r} (rank {i})" for i, r in enumerate(reasons) if r), None)

    def exchange(self, obj: Any) -> list[Any]:
        if self.size == 1:
            return [obj]
        out: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(out, obj, group=self._host_group)
        except RuntimeError as e:
            raise Timeout(f"rank {self.rank}: not every rank joined within {timeout_seconds():g} s: {e}") from e
        return out

    def close(self) -> None:
        self._held.clear()

    def symmetric(self, nbytes: int, name: str) -> SymmetricTensor:
        import torch.distributed._symmetric_memory as symm

        nbytes = (nbytes + 255) // 256 * 256
        with torch.inference_mode(False):  # it outlives the call that asked for it
            local = symm.empty(nbytes, dtype=torch.uint8, device=self.device)
            handle = symm.rendezvous(local, self.group)
            local.zero_()
        torch.cuda.synchronize(self.device)
        self.exchange(name)
        peers = tuple(
            local if r == self.rank else handle.get_buffer(r, (nbytes,), torch.uint8) for r in range(self.size)
        )
        self._held.append(handle)
        addresses = self.tensor([p.data_ptr() for p in peers], torch.int64)
        return SymmetricTensor(local, peers, addresses, int(getattr(handle, "multicast_ptr", 0) or 0))

    # Collectives by the group's own methods, which torch.distributed's functions wrap in checks that cost host time.

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, stream: Any) -> None:
        self.call(lambda: _enqueued(self.group._allgather_base(out, x, _GATHER)), [x], [out], stream)

    def communicator(self, ctas: int) -> Any:
        """A process group of its own. A World of some of torch.distributed's ranks has none: every rank of all would have to
        take part in making it."""
        if self.size == 1 or self.size < dist.get_world_size():
            return None
        if ctas not in self._communicators:
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = ctas
            options.config.cga_cluster_size = 0  # a cluster needs SMs of one GPC; a GEMM leaves free ones anywhere
            ranks = dist.get_process_group_ranks(self.group)
            limit = datetime.timedelta(seconds=timeout_seconds() * 4)
            made = dist.new_group(ranks, backend="nccl", timeout=limit, pg_options=options)
            one = torch.zeros(self.size, device=self.device, dtype=torch.bfloat16)
            dist.all_reduce(one, group=made)  # connects, and loads kernels before one runs beside a GEMM
            dist.reduce_scatter_tensor(one[:1].clone(), one, group=made)
            dist.all_to_all(list(one.clone().split(1)), list(one.split(1)), group=made)
            torch.cuda.synchronize(self.device)
            self._communicators[ctas] = made
        return self._communicators[ctas]

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, stream: Any, on: Any = None) -> None:
        group = on or self.group
        self.call(lambda: _enqueued(group._reduce_scatter_base(out, x, _SCATTER)), [x], [out], stream)

    def all_reduce(self, x: torch.Tensor, stream: Any, on: Any = None) -> None:
        group = on or self.group
        self.call(lambda: _enqueued(group.allreduce([x], _REDUCE)), [x], [x], stream)

    def all_to_all(
        self, outs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], stream: Any, on: Any = None
    ) -> None:
        outs, parts = list(outs), list(parts)
        self.call(lambda: dist.all_to_all(outs, parts, group=on or self.group), parts, outs, stream)
