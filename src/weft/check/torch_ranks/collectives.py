"""torch.distributed on emulated ranks: the group of all ranks, and NCCL's collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...backends.base import sum_in_order
from ...backends.emulated import check_dense
from ...emulator.tasks import Arrival, EmulatedStream
from ...errors import Unsupported
from .ranks import current_rank, refused, untracked

_REDUCE: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "SUM": sum_in_order,
    "AVG": lambda parts: sum_in_order(parts) / len(parts),
    "MAX": lambda parts: torch.stack(parts).amax(0),
    "MIN": lambda parts: torch.stack(parts).amin(0),
    "PRODUCT": lambda parts: torch.stack(parts).prod(0),
}
NCCL = "nccl"  # the side stream for asynchronous collectives


class Group:
    """The group of all ranks, for the calling thread's rank."""

    group_name, group_desc = "0", "default_pg"

    def rank(self) -> int:
        return current_rank().rank

    def size(self) -> int:
        return current_rank().size

    def name(self) -> str:
        return NCCL


class PendingCollective:
    """A collective that was enqueued on NCCL's stream."""

    def __init__(self, stream: EmulatedStream) -> None:
        self.stream, self.event = stream, current_rank().streams.record_event(stream)

    def wait(self, timeout: object = None) -> bool:
        rank = current_rank()
        rank.streams.wait_event(rank.stream(), self.event)
        return True

    def is_completed(self) -> bool:
        return self.event.done


def _collective(
    kind: str,
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    work: Callable[[list[Arrival]], None],
    group: object,
    async_op: bool,
    signature: tuple[object, ...] | None = None,
    sources: Sequence[int] | None = None,
) -> PendingCollective | None:
    """Enqueue a collective of all ranks on the current stream or, if it is asynchronous, on NCCL's stream. sources: the
    ranks whose data this rank receives, by default all ranks. The rank waits only for these ranks."""
    if group not in (None, WORLD, dist.group.WORLD):
        raise Unsupported(f"{kind} of {group}: the emulator has one group, of all ranks")
    check_dense(kind, *reads, *writes)
    rank = current_rank()
    stream = rank.backend.side_stream(NCCL) if async_op else rank.stream()
    if async_op:
        rank.streams.wait_event(stream, rank.streams.record_event(rank.stream()))
    shapes = signature or tuple((tuple(t.shape), str(t.dtype)) for t in reads)
    with untracked():
        rank.enqueue_or_capture(
            lambda: rank.streams.collective(
                kind, stream, shapes, list(reads), list(writes), work, sources, None, rank.backend.ranks
            )
        )
    return PendingCollective(stream) if async_op else None


def _reduction(op: object) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    name = str(op).rpartition(".")[2]
    if name not in _REDUCE:
        raise Unsupported(f"a reduction by {name}: the emulator has {', '.join(_REDUCE)}")
    return _REDUCE[name]


def all_reduce(
    tensor: torch.Tensor, op: object = dist.ReduceOp.SUM, group: object = None, async_op: bool = False
) -> PendingCollective | None:
    reduce = _reduction(op)

    def work(arrivals: list[Arrival]) -> None:
        total = reduce([a.reads[0] for a in arrivals])
        for a in arrivals:
            a.writes[0].copy_(total)

    return _collective("all_reduce", [tensor], [tensor], work, group, async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object = None, async_op: bool = False
) -> PendingCollective | None:
    def work(arrivals: list[Arrival]) -> None:
        full = torch.cat([a.reads[0].reshape(-1) for a in arrivals])
        for a in arrivals:
            a.writes[0].view(-1).copy_(full)

    _check_sizes("all_gather_into_tensor", output_tensor.numel(), input_tensor.numel() * current_rank().size)
    return _collective("all_gather_into_tensor", [input_tensor], [output_tensor], work, group, async_op)


def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: object = None, async_op: bool = False
) -> PendingCollective | None:
    def work(arrivals: list[Arrival]) -> None:
        for a in arrivals:
            for out, source in zip(a.writes, arrivals, strict=True):
                out.copy_(source.reads[0])

    return _collective("all_gather", [tensor], tensor_list, work, group, async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: object = dist.ReduceOp.SUM,
    group: object = None,
    async_op: bool = False,
) -> PendingCollective | None:
    reduce = _reduction(op)

    def work(arrivals: list[Arrival]) -> None:
        parts = reduce([a.reads[0].reshape(-1) for a in arrivals]).tensor_split(len(arrivals))
        for a, part in zip(arrivals, parts, strict=True):
            a.writes[0].view(-1).copy_(part)

    _check_sizes("reduce_scatter_tensor", input.numel(), output.numel() * current_rank().size)
    return _collective("reduce_scatter_tensor", [input], [output], work, group, async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: object = None,
    async_op: bool = False,
) -> PendingCollective | None:
    size = current_rank().size
    sends = list(input.split(list(input_split_sizes) if input_split_sizes else len(input) // size))
    receives = list(output.split(list(output_split_sizes) if output_split_sizes else len(output) // size))

    def work(arrivals: list[Arrival]) -> None:
        for me, a in enumerate(arrivals):
            for out, source in zip(a.writes, arrivals, strict=True):
                out.copy_(source.reads[me])

    sources = [source for source, received in enumerate(receives) if received.numel()]
    return _collective("all_to_all_single", sends, receives, work, group, async_op, (str(input.dtype),), sources)


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: object = None, async_op: bool = False
) -> PendingCollective | None:
    def work(arrivals: list[Arrival]) -> None:
        for a in arrivals:
            a.writes[0].copy_(arrivals[src].reads[0])

    sent = [tensor] if current_rank().rank == src else [tensor[:0] if tensor.dim() else tensor]
    signature = (src, tuple(tensor.shape), str(tensor.dtype))
    return _collective("broadcast", sent, [tensor], work, group, async_op, signature, [src])


def barrier(group: object = None, async_op: bool = False, device_ids: object = None) -> None:
    """Make the host wait until the current streams of all ranks have reached this barrier."""
    rank = current_rank()
    stream = rank.stream()
    rank.enqueue_or_capture(lambda: rank.streams.collective("barrier", stream, among=rank.backend.ranks))
    rank.wait_for(stream)


def all_gather_object(object_list: list[object], obj: object, group: object = None) -> None:
    object_list[:] = current_rank().backend.exchange(obj)


def broadcast_object_list(object_list: list[object], src: int = 0, group: object = None, device: object = None) -> None:
    object_list[:] = current_rank().backend.exchange(list(object_list))[src]


def _check_sizes(kind: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise ValueError(f"{kind}: {actual} elements where {expected} are expected")


def _new_group(ranks: Sequence[int] | None = None, **_: object) -> Group:
    if ranks is not None and list(ranks) != list(range(current_rank().size)):
        raise Unsupported(f"a group of ranks {list(ranks)}: the emulator has one group, of all ranks")
    return WORLD


WORLD = Group()
_LEFT_OUT = (
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "reduce",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "monitored_barrier",
    "init_device_mesh",
    "all_gather_coalesced",
    "all_reduce_coalesced",
)


def replacements() -> Iterator[tuple[object, str, object]]:
    """Yield (place, name, value) of each object that replaces torch's."""
    functions: dict[str, object] = dict(
        init_process_group=lambda *_, **__: None,
        destroy_process_group=lambda group=None: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        is_nccl_available=lambda: True,
        get_rank=lambda group=None: current_rank().rank,
        get_world_size=lambda group=None: current_rank().size,
        get_backend=lambda group=None: NCCL,
        get_process_group_ranks=lambda group=None: list(range(current_rank().size)),
        new_group=_new_group,
        barrier=barrier,
        all_reduce=all_reduce,
        all_gather=all_gather,
        all_gather_into_tensor=all_gather_into_tensor,
        _all_gather_base=all_gather_into_tensor,
        reduce_scatter_tensor=reduce_scatter_tensor,
        _reduce_scatter_base=reduce_scatter_tensor,
        all_to_all_single=all_to_all_single,
        broadcast=broadcast,
        all_gather_object=all_gather_object,
        broadcast_object_list=broadcast_object_list,
        **{name: refused(f"torch.distributed.{name}") for name in _LEFT_OUT},
    )
    for name, value in functions.items():
        for place in (dist, distributed_c10d):
            yield place, name, value
    yield distributed_c10d.GroupMember, "WORLD", WORLD
    yield distributed_c10d, "_get_default_group", lambda: WORLD
    yield distributed_c10d, "_resolve_process_group", lambda group_name: WORLD
