"""Transports in which copy engines move the rows (interfaces.py), and the functions that these transports share.

    gather_rows      stream  stage the shard | GEMM of own rows | GEMM of a peer's rows | ..     | join
                     copies                  | barrier | pull | pull | ..              | barrier

    gather_to_flags  stream  stage the shard | one kernel, whose tiles wait for flags            | join
                     copies                  | barrier | pull, flag | pull, flag | ..  | barrier

    reduce_rows      stream  GEMM for the farthest owner | GEMM for .. | GEMM of own rows        | sum
                     copies  barrier                     | push        | push          | barrier

After the first barrier of a gather every rank has staged its shard, and after the last barrier no rank still reads it.
After the first barrier of a reduce every rank may write to the staging memory again, and after the later barriers all
pushes have arrived. All copies of a call are on one stream, ordered by peer, so that at every step each rank copies
from, or to, a different rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from ..backends.base import Event, Stream, StreamWork, SymmetricTensor
from ..kernel_launch import Launch, prepared
from ..plans import Decomposed
from ..world import World
from .interfaces import ArrivedRows, GatheredTensors, GatherRows, PartialRows, TensorList, TensorSpecs
from .memory import lock, rank_word, workspace
from .order import chunks
from .sums import sum_staged

COPIES = "copy buffers"  # the lock that orders uses of these transports' buffers


# -- gather ------------------------------------------------------------------------------------------------------------
class ShardPulls:
    """Symmetric copies of tensors [m_r, ..] of these shapes and dtypes on all ranks. A copy engine pulls the shards
    from their owners.

    The shards are staged on the caller's stream before the computation, since a copy within a GPU uses SMs. With
    `keep`, this rank's rows are also copied to the full tensors."""

    def __init__(self, world: World, specs: TensorSpecs, keep: bool) -> None:
        self.world, self.copies, self._keep = world, world.side_stream("copy"), keep
        self._holder, self._rows = lock(world, COPIES), specs[0][0][0]
        self._full = [((world.size * m, *row), dtype) for (m, *row), dtype in specs]
        self._staged = [workspace(world, f"shard {i}" if i else "shard", *spec) for i, spec in enumerate(specs)]

    def new(self) -> list[torch.Tensor]:
        """Return new tensors for the rows of all ranks."""
        return [self.world.empty(shape, dtype) for shape, dtype in self._full]

    def shared(self) -> list[torch.Tensor]:
        """Return tensors for the rows of all ranks in memory that later calls reuse. No peer reads this memory, but it
        grows like symmetric memory: then all ranks drop the sequences that contain its old address."""
        return [workspace(self.world, f"rows {i}", *spec).local for i, spec in enumerate(self._full)]

    def stage(self, tensors: TensorList, full: TensorList, stream: Stream) -> None:
        """Store this rank's shards where peers read them, and with `keep` in the full tensors. The stream `copies`
        waits for the stores that peers read."""
        world, own_rows = self.world, slice(self.world.rank * self._rows, (self.world.rank + 1) * self._rows)
        world.order(self._holder, stream)
        for shard, t in zip(self._staged, tensors, strict=True):
            world.copy(shard.local, t, stream)
        world.wait_event(self.copies, world.record(stream))
        if self._keep:
            for destination, t in zip(full, tensors, strict=True):
                world.copy(destination[own_rows], t, stream)

    def pull(self, full: TensorList, p: int) -> None:
        """Enqueue the copies of the shards of rank p on the stream `copies`. A barrier on that stream must precede the
        copies, since each rank stages its shards itself."""
        rows = slice(p * self._rows, (p + 1) * self._rows)
        for destination, shard in zip(full[::-1], self._staged[::-1], strict=True):
            self.world.copy(destination[rows], shard.peers[p], self.copies)


def gather_rows(
    world: World, plan: Decomposed, shards: Sequence[int], specs: TensorSpecs, keep: bool = True
) -> GatherRows:
    """Prepare an arrival for each of the plan's groups of ranks. All shards have the same length. If the first group is
    this rank alone, the first arrival consists of the caller's tensors."""
    groups, rows = chunks(plan, world.rank, world.size), shards[0]
    second_stream, own_rows_first = world.side_stream("gemm", urgent=False), len(groups[0][1]) == 1
    pulls = ShardPulls(world, specs, keep or not own_rows_first)
    copies, shared = pulls.copies, None if keep else pulls.shared()
    spans = [slice(start * rows, (start + len(ranks)) * rows) for start, ranks in groups]
    others = [[p for p in ranks if p != world.rank] for _, ranks in groups]

    def pull_groups(full: TensorList, work: StreamWork) -> None:
        world.barrier(copies)
        for ranks in others[int(own_rows_first) :]:
            for p in ranks:
                pulls.pull(full, p)
            work.mark()
        world.barrier(copies)

    def parts_of(full: TensorList) -> list[list[torch.Tensor]]:
        return [[t[span] for t in full] for span in spans]

    sequence = world.sequence(copies, functools.partial(pull_groups, shared)) if shared else None
    shared_parts = parts_of(shared) if shared else None

    @contextmanager
    def gather(tensors: TensorList) -> Iterator[GatheredTensors]:
        stream, full = world.current_stream(), shared or pulls.new()
        pulls.stage(tensors, full, stream)
        pull = sequence() if sequence else StreamWork(world.backend, copies, functools.partial(pull_groups, full))
        *arrival_events, end = pull()

        def arrivals() -> Iterator[ArrivedRows]:
            for i, (span, parts) in enumerate(zip(spans, shared_parts or parts_of(full), strict=True)):
                lane = second_stream if i % 2 else stream
                if own_rows_first and i == 0:
                    yield ArrivedRows(span, tensors, lane)
                else:
                    world.wait_event(lane, arrival_events[i - int(own_rows_first)])
                    yield ArrivedRows(span, parts, lane)

        yield GatheredTensors(full, arrivals())
        world.wait_event(stream, world.record(second_stream))
        world.wait_event(stream, end)

    return gather


def gather_to_flags(
    world: World, specs: TensorSpecs, keep: bool, returned: bool, flags: TensorList, number: torch.Tensor
) -> Callable[[TensorList], AbstractContextManager[TensorList]]:
    """Prepare a context that provides full tensors for the rows of all ranks. Inside the context the caller launches a
    kernel, which waits, with a time limit, until flags[p] has reached *number; then the shard of rank p has arrived.
    In a CUDA graph a separate stream sets the flags, so that the next copy does not wait for the flag.

    If the caller returns the full tensors (`returned`), they are new tensors, and the copies and flags are enqueued
    after the launch. Otherwise the full tensors are in memory that later calls use again. Then the copies and flags are
    a sequence (`World.sequence`), which takes so little host time that it is enqueued before the launch."""
    pulls, signals = ShardPulls(world, specs, keep), world.side_stream("signal")
    copies, shared = pulls.copies, None if returned else pulls.shared()

    def pull_all(full: TensorList) -> None:
        captured = world.backend.capturing()
        for p in world.other_ranks:
            pulls.pull(full, p)
            if captured:
                world.wait_event(signals, world.record(copies))
            world.signal(flags[p], number, signals if captured else copies)
        if captured:
            world.wait_event(copies, world.record(signals))
        world.barrier(copies)

    def pull_to_shared(work: StreamWork) -> None:
        assert shared is not None
        world.barrier(copies)
        pull_all(shared)

    sequence = None if returned else world.sequence(copies, pull_to_shared)

    @contextmanager
    def gather(tensors: TensorList) -> Iterator[TensorList]:
        stream, full = world.current_stream(), shared or pulls.new()
        pulls.stage(tensors, full, stream)
        if sequence:
            (end,) = sequence()()
            yield full
        else:
            world.barrier(copies)
            yield full
            with world.on(copies):
                pull_all(full)
            end = world.record(copies)
        world.wait_event(stream, end)

    return gather


class FlaggedShards:
    """Symmetric memory for the x [rows, K] of every rank, with a flag for each rank. A GEMM that occupies every SM
    polls the flags without a time limit. The constructor acquires the lock on this memory, so that all later work on
    the caller's stream is ordered after the calls of other streams.

    `gathered` is [W rows, K], `flags` is int32 [W], and `one` is int32 [1]; the shard of rank p has arrived once
    flags[p] equals *one."""

    def __init__(self, world: World, x: torch.Tensor) -> None:
        self.world, rows = world, world.size * len(x)
        world.order(lock(world, COPIES), world.current_stream())
        self._shards = workspace(world, "gathered", (world.size, *x.shape), x.dtype)
        self.gathered = self._shards.local.view(rows, x.shape[1])
        self.flags, self._initial, self._ones = world.cached("flags of shards", lambda: _flags(world))
        self.one = self._ones.local

    @contextmanager
    def gathering(self, x: torch.Tensor) -> Iterator[None]:
        """Enqueue everything that sets the flags. Afterwards the caller may enqueue the GEMM on its stream.

        Setting a flag must need neither an SM nor an action of a peer. Before the GEMM starts, all ranks pass a barrier
        with a time limit, and only that barrier precedes the copies that set the flags. Each flag is copied from a one
        in its peer's memory, since a copy within a GPU may need an SM. So the copies end, and therefore the GEMM, even
        if the barrier timed out. Flags are cleared after the previous call's GEMM and before the barrier, since the
        GEMM's comparison does not allow numbers to wrap around; then this rank's own flag is set."""
        world, shards, words = self.world, self._shards, self.flags.split(1)
        stream, copies = world.current_stream(), world.side_stream("copy")
        world.copy(shards.local[world.rank], x, stream)
        world.copy(self.flags, self._initial, stream)
        world.wait_event(copies, world.record(stream))
        world.barrier(copies)
        all_staged = world.record(copies)
        world.wait_event(stream, all_staged)
        with world.on(copies):
            for p in world.other_ranks:
                world.copy(shards.local[p], shards.peers[p][p], copies)
                world.signal(words[p], self._ones.peers[p], copies)
            world.barrier(copies)
        yield
        world.wait_event(stream, world.record(copies))


def _flags(world: World) -> tuple[torch.Tensor, torch.Tensor, SymmetricTensor]:
    """Return the flags of the shards, int32 [W]; the flags' values if only this rank's flag is set; and a one on every
    rank."""
    ones = world.symmetric((1,), torch.int32, "flags of shards, a one")
    ones.local.fill_(1)
    world.wait_for_streams()
    world.exchange(None, "flags of shards")  # no rank copies a one before the owner has stored it
    initial = world.tensor([int(rank == world.rank) for rank in range(world.size)], torch.int32)
    return world.zeros((world.size,), torch.int32), initial, ones


def pull_rows(world: World, tensors: Sequence[SymmetricTensor], ends: Sequence[int], stream: Stream) -> None:
    """Copy rows ends[r] to ends[r + 1] of each tensor [ends[-1], ..] from every other rank r to the same rows of this
    rank's tensor."""
    for p in world.other_ranks:
        rows = slice(*ends[p : p + 2])
        if rows.stop > rows.start:
            for memory in tensors:
                world.copy(memory.local[rows], memory.peers[p][rows], stream)


# -- reduce ------------------------------------------------------------------------------------------------------------
def reduce_rows(
    world: World, plan: Decomposed, shards: Sequence[int], n: int, dtype: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor | None], AbstractContextManager[Iterable[PartialRows]]]:
    """Prepare the parts to compute and their sums. The first parts are the farthest owners' rows, and the last part is
    this rank's rows. All shards have the same length. The other ranks copy their partial rows to the staging memory of
    the owner, which sums them (`sum_parts`) once all have arrived."""
    rows, rank, size = shards[0], world.rank, world.size
    groups = chunks(plan, rank, size)[::-1]
    splits = plan.pieces if rows % plan.pieces == 0 and all(len(ranks) == 1 for _, ranks in groups) else 1
    count, copies, sums = rows // splits, world.side_stream("copy"), world.side_stream("sum")
    second_stream, holder = world.side_stream("gemm", urgent=False), lock(world, COPIES)
    staging = workspace(world, "staging", (splits, size, count, n), dtype)
    partial = workspace(world, "partial", (size * rows, n), dtype).local

    def rows_of(p: int, split: int, ranks: int = 1) -> slice:
        """Return the rows of `ranks` ranks, beginning with rank p, in a split."""
        return slice(p * rows + split * count, p * rows + split * count + ranks * count)

    def push_parts(split: int, work: StreamWork) -> None:
        if split == 0:
            work.wait("begin")
            world.barrier(copies)
        for i, (_, ranks) in enumerate(groups):
            work.wait(i)
            for p in ranks:
                if p != rank:
                    world.copy(staging.peers[p][split, rank], partial[rows_of(p, split)], copies)
        world.barrier(copies)

    sequences = [world.sequence(copies, functools.partial(push_parts, split)) for split in range(splits)]
    spans = [[rows_of(start, split, len(ranks)) for start, ranks in groups] for split in range(splits)]
    parts_of = [[(span, partial[span]) for span in spans_of_split] for spans_of_split in spans]
    own_parts, staged = [partial[rows_of(rank, split)] for split in range(splits)], list(staging.local)

    @contextmanager
    def reduce(out: torch.Tensor, bias: torch.Tensor | None) -> Iterator[Iterable[PartialRows]]:
        stream = world.current_stream()
        world.order(holder, stream)
        lanes, pushes = itertools.cycle((stream, second_stream)), [sequence() for sequence in sequences]
        results = out.split(count) if splits > 1 else [out]
        begin_event = pushes[0].record("begin", stream)
        if splits * len(groups) > 1:  # with one part nothing joins the second stream again
            world.wait_event(second_stream, begin_event)

        def send(push: StreamWork, i: int, lane: Stream, _: torch.Tensor) -> None:
            push.record(i, lane)  # the sequence copies the rows from `partial`

        def parts() -> Iterator[PartialRows]:
            for split, push in enumerate(pushes):
                for i, (span, part) in enumerate(parts_of[split]):
                    lane = next(lanes)
                    yield PartialRows(span, part, lane, functools.partial(send, push, i, lane))
                (end,) = push()
                # No later GEMM could run beside the last sum, which therefore needs no stream of its own.
                lane = sums if split < splits - 1 else stream
                world.wait_event(lane, end)  # `end` follows the GEMM of this rank's own rows, the last GEMM
                sum_parts(own_parts[split], staged[split], results[split], bias, world, lane)

        yield parts()  # in the end `stream` has waited for `copies`, which has waited for each GEMM of `second_stream`
        if splits > 1:
            world.wait_event(stream, world.record(sums))

    return reduce


def pull_parts(world: World, source: SymmetricTensor, rows: slice, staging: torch.Tensor, stream: Stream) -> None:
    """Pull `rows` of `source` [M, N] from every other rank r to the first rows of staging[r]; `staging` is [W, at least
    as many rows, N]."""
    count = rows.stop - rows.start
    for p in world.other_ranks if count else ():
        world.copy(staging[p][:count], source.peers[p][rows], stream)


@prepared
def _sum(world: World, rows: int, n: int, bias: bool) -> Launch:
    block = world.backend.scale.block
    return Launch(
        world,
        sum_staged,
        min(world.sm_count * 4, -(-rows * n // block)),
        dict(num_warps=8),
        rows=rows,
        N=n,
        me=rank_word(world),
        W=world.size,
        BIAS=bias,
        BLOCK=block,
        ALIGNED=n % 8 == 0,
    )


def sum_parts(
    x: torch.Tensor, staging: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, world: World, stream: Stream
) -> None:
    """Compute out [rows, N] = x + the other ranks' rows in staging [world, rows, N] + bias, in fp32 in rank order."""
    launch = _sum(world, out.shape[0], out.shape[1], bias is not None)
    launch(stream, x=x, staging=staging, out=out, bias=out if bias is None else bias)


# -- exchange ----------------------------------------------------------------------------------------------------------
class Send(NamedTuple):
    """Some rows of this rank's tensors [n, ..], sent to the reader's memory [tensors, rows, ..], where they begin with
    row `row`."""

    reader: int
    row: int
    rows: slice


# A function that prepares a send: (world, memory, send) returns a function of the tensors and a stream.


class Exchanged(NamedTuple):
    """An exchange in progress. wait(ranks) makes the caller's stream wait for the rows from these ranks. The event
    `end` is recorded after all of this rank's sends."""

    wait: Callable[[Iterable[int]], None]
    end: Event


def push(world: World, memory: SymmetricTensor, send: Send) -> Callable[[TensorList, Stream], None]:
    """Prepare copies of the send's rows into its reader's memory."""
    count = send.rows.stop - send.rows.start
    destinations = [plane[send.row : send.row + count] for plane in memory.peers[send.reader]]

    def copy(tensors: TensorList, stream: Stream) -> None:
        for destination, t in zip(destinations, tensors, strict=True):
            world.copy(destination, t if t.shape[0] == count else t[send.rows], stream)

    return copy


def prepare_exchange(
    world: World, name: str, memory: SymmetricTensor, sends: Iterable[Send]
) -> Callable[[TensorList], Exchanged]:
    """Return a function that pushes rows of tensors into the `memory` of the ranks that read them. Each reader gets one
    send and then a notification; this rank's send to itself comes last.

    After the barrier all ranks have finished reading the rows that the previous call pushed, so that the memory may be
    written again. No rows are staged. A reader waits on the caller's stream between two kernels, so that the wait
    occupies no SM that a kernel needs. The memory, its barrier and its channel have the name `name`.
    """
    me, copies, holder = world.rank, world.side_stream("copy"), lock(world, name)
    ch = world.channel(f"{name} arrived", world.size, None)
    arrived = [world.counter(ch, rank, me) for rank in range(world.size)]
    pushes = [
        (push(world, memory, send), None if send.reader == me else world.counter(ch, me, send.reader)) for send in sends
    ]

    def exchange(tensors: TensorList) -> Exchanged:
        stream = world.current_stream()
        world.order(holder, stream)
        epoch = world.barrier(stream, name)
        world.wait_event(copies, world.record(stream))
        with world.on(copies):
            for push_rows, word in pushes:
                push_rows(tensors, copies)
                if word is not None:
                    world.signal(word, epoch, copies)
            end = world.record(copies)

        def wait(ranks: Iterable[int]) -> None:
            for rank in ranks:
                if rank == me:
                    world.wait_event(stream, end)
                else:
                    world.wait(arrived[rank], epoch, stream)

        return Exchanged(wait, end)

    return exchange


def pull_from_all(world: World, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: Stream, last: bool) -> None:
    """Copy parts, which are (destination, source) by rank, after a barrier that ensures that all sources are complete.
    Parts may be empty. Each source rank has a stream of its own, because parallel copies keep the links busy for any
    counts. If `last` is true, `stream` waits for these copies, and for earlier copies on the same streams."""
    world.barrier(stream)
    stored = world.record(stream)
    for j, p in enumerate((world.rank, *world.other_ranks)):
        (destination, source), lane = parts[p], world.side_stream(f"from {j}")
        world.wait_event(lane, stored)
        if len(destination):
            world.copy(destination, source, lane)
        if last:
            world.wait_event(stream, world.record(lane))
