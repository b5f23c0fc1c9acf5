"""Copies by the copy engine: ways to gather, to reduce and to exchange rows (interfaces.py), and what they are made of.

    gather, events   stream  stage own shard | own rows .. | rows of a peer ..                  | join
    (`gather_rows`)  copies                  | barrier | pull | pull | .. | barrier

    gather, flags    stream  stage own shard | a kernel, whose tiles wait for flags             | join
    (`..to_flags`)   copies                  | barrier | pull, flag | pull, flag | .. | barrier

    reduce           stream  part for the farthest owner | .. | own part                        | join
    (`reduce_rows`)  copies  barrier                     | push | push ..      | barrier
                     sum                                                                | sum

The first barrier of a gather says that every rank has staged its shard, the last that no rank reads it any more. The
first one of a reduce says that every staging slot may be written again, those behind the pushes that all have landed.
All copies of a call are on one stream, one peer's behind the other's, so that at every step each rank copies from, or
to, another one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..backends.base import Event, Stream, SymmetricTensor
from ..kernel_launch import Launch, prepared
from ..lang.host import rank_notify, rank_wait
from ..plans import Decomposed
from ..world import World
from .interfaces import ArrivedRows, GatheredTensors, PartialRows, Tensors
from .memory import lock, rank_word, workspace
from .order import chunks
from .sums import sum_staged

COPIES = "copy buffers"  # the lock on the buffers of these ways


# -- gather ------------------------------------------------------------------------------------------------------------
class PulledShards:
    """Tensors [m_r, ..] of every rank in symmetric memory, of one shape on all ranks, from which a copy engine pulls
    them. `full`: fresh tensors for the rows of all ranks, with this rank's in place where `keep` says so. They are
    staged on the caller's stream, before what is computed: a copy within a GPU takes SMs. `copies` goes on once every
    rank has staged its own."""

    def __init__(self, world: World, tensors: Tensors, keep: bool) -> None:
        self.world, stream, self.copies = world, world.current_stream(), world.side_stream("copy")
        held = [workspace(world, f"shard {i}" if i else "shard", t.shape, t.dtype) for i, t in enumerate(tensors)]
        self.full = [world.empty((world.size * len(t), *t.shape[1:]), t.dtype) for t in tensors]
        landings = [full.split(len(t)) for full, t in zip(self.full, tensors, strict=True)]
        world.order(lock(world, COPIES), stream)
        for shard, t in zip(held, tensors, strict=True):
            world.copy(shard.local, t, stream)
        world.wait_event(self.copies, world.record(stream))
        world.barrier(self.copies)
        if keep:
            for landing, t in zip(landings, tensors, strict=True):
                world.copy(landing[world.rank], t, stream)
        # The first tensor last, so that its flag, or event, stands behind the others.
        self._pulls = [(landing, shard.peers) for landing, shard in zip(landings, held, strict=True)][::-1]

    def pull(self, rank: int) -> None:
        for landings, shards in self._pulls:
            self.world.copy(landings[rank], shards[rank], self.copies)


@contextmanager
def gather_rows(
    world: World, plan: Decomposed, shards: Sequence[int], tensors: Tensors, keep: bool = True
) -> Iterator[GatheredTensors]:
    """An arrival for each of the plan's groups of ranks, whose shards are all of one length; that of the own rows
    alone, where the plan has it so, are `tensors` themselves."""
    groups, rows, me = chunks(plan, world.rank, world.size), shards[0], world.rank
    stream, second = world.current_stream(), world.side_stream("gemm", urgent=False)
    alone = len(groups[0][1]) == 1
    pulled, landed = PulledShards(world, tensors, keep or not alone), []
    copies = pulled.copies
    with world.on(copies):  # once, not for every copy
        for _, ranks in groups:
            for p in ranks:
                if p != me:
                    pulled.pull(p)
            landed.append(world.record(copies))
        world.barrier(copies)

    def arrivals() -> Iterator[ArrivedRows]:
        for i, (first, ranks) in enumerate(groups):
            lane, run = second if i % 2 else stream, slice(first * rows, (first + len(ranks)) * rows)
            if alone and i == 0:
                yield ArrivedRows(run, tensors, lane)
            else:
                world.wait_event(lane, landed[i])
                yield ArrivedRows(run, [full[run] for full in pulled.full], lane)

    yield GatheredTensors(pulled.full, arrivals())
    world.wait_event(stream, world.record(second))
    world.wait_event(stream, world.record(copies))


@contextmanager
def gather_to_flags(
    world: World, tensors: Tensors, keep: bool, flags: Tensors, number: torch.Tensor
) -> Iterator[Tensors]:
    """Yield the tensors with the rows of all ranks, for a kernel launched meanwhile that waits, with a limit, until
    flags[p] stands at *number: then rank p's shard is there. Copies and flags are given behind that launch. In a CUDA
    graph another stream sets the flags, so that the next copy does not wait for that; launched one by one, the host's
    time for two more calls a peer costs more."""
    stream, captured = world.current_stream(), world.capturing()
    pulled = PulledShards(world, tensors, keep)
    copies = pulled.copies
    signals = world.side_stream("signal") if captured else copies
    yield pulled.full
    with world.on(copies):  # once, not for every copy
        for p in world.other_ranks:
            pulled.pull(p)
            if captured:
                world.wait_event(signals, world.record(copies))
            world.signal(flags[p], number, signals)
        world.barrier(copies)
    for other in (copies, signals) if captured else (copies,):
        world.wait_event(stream, world.record(other))


class FlaggedShards:
    """Memory for x [rows, K] of every rank, symmetric, with a flag for each: of a GEMM that looks at its flags without
    a limit, and takes every SM.

    gathered: [W rows, K]. flags: int32 [W]; rank p's shard is there once flags[p] stands at *one, int32 [1]."""

    def __init__(self, world: World, x: torch.Tensor) -> None:
        self.world, rows = world, world.size * len(x)
        self._shards = workspace(world, "gathered", (world.size, *x.shape), x.dtype)
        self.gathered = self._shards.local.view(rows, x.shape[1])
        self.flags, self._own, self._ones = world.cached("flags of shards", lambda: _flags(world))
        self.one = self._ones.local

    @contextmanager
    def gathering(self, x: torch.Tensor) -> Iterator[None]:
        """Entered, all that sets the flags is on its way; then the GEMM may be given to the caller's stream.

        Flags must come to be set without an SM, and without a peer. All ranks have met in a barrier before the GEMM
        starts, which is bounded, and nothing but that barrier stands before the copies that set them. Each is copied
        from its peer's memory, as a copy within a GPU may need an SM: a one that stands there. So the copies end, and
        with them the GEMM, even where the barrier expired. Flags are cleared before the barrier, behind the last call's
        GEMM, as it compares numbers without a wrap; the own one is then set."""
        world, shards, words = self.world, self._shards, self.flags.split(1)
        stream, copies = world.current_stream(), world.side_stream("copy")
        world.order(lock(world, COPIES), stream)
        world.copy(shards.local[world.rank], x, stream)
        world.copy(self.flags, self._own, stream)
        world.wait_event(copies, world.record(stream))
        world.barrier(copies)
        all_staged = world.record(copies)
        world.wait_event(stream, all_staged)
        with world.on(copies):  # once, not for every copy
            for p in world.other_ranks:
                world.copy(shards.local[p], shards.peers[p][p], copies)
                world.signal(words[p], self._ones.peers[p], copies)
            world.barrier(copies)
        yield
        world.wait_event(stream, world.record(copies))


def _flags(world: World) -> tuple[torch.Tensor, torch.Tensor, SymmetricTensor]:
    """A flag for each rank's shard, int32; what they are where this rank's alone is set; and a one on every rank."""
    with torch.inference_mode(False):  # copies write the flags in calls that come outside it too
        ones = world.symmetric((1,), torch.int32, "flags of shards, a one")
        ones.local.fill_(1)
        world.wait_for_streams()
        world.exchange("flags of shards")  # nobody copies another's before it is there
        own = world.tensor([int(rank == world.rank) for rank in range(world.size)], torch.int32)
        return world.zeros((world.size,), torch.int32), own, ones


def pull_rows(world: World, held: Sequence[SymmetricTensor], ends: Sequence[int], stream: Stream) -> None:
    """Copy the other ranks' rows ends[r] to ends[r + 1] of each tensor [ends[-1], ..] to the same rows here."""
    for p in world.other_ranks:
        rows = slice(*ends[p : p + 2])
        if rows.stop > rows.start:
            for each in held:
                world.copy(each.local[rows], each.peers[p][rows], stream)


# -- reduce ------------------------------------------------------------------------------------------------------------
def staging_slots(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
    """Symmetric memory [.., W, rows, N] for every rank's part of the rows that this rank owns: others copy theirs to
    their slots, and it sums them (`sum_parts`) once all have landed."""
    slots = workspace(world, "staging", shape, dtype)
    world.order(lock(world, COPIES), world.current_stream())
    return slots


@contextmanager
def reduce_rows(
    world: World, plan: Decomposed, shards: Sequence[int], out: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[Iterable[PartialRows]]:
    """Parts for the farthest owners first, whose shards are all of one length; this rank's come last."""
    (rows, n), me, size = out.shape, world.rank, world.size
    groups = chunks(plan, me, size)[::-1]
    pieces = plan.pieces if rows % plan.pieces == 0 and all(len(ranks) == 1 for _, ranks in groups) else 1
    count = rows // pieces
    stream, copies, sums = world.current_stream(), world.side_stream("copy"), world.side_stream("sum")
    second = world.side_stream("gemm", urgent=False)
    lanes = itertools.cycle((stream, second))
    staging = staging_slots(world, (pieces, size, count, n), out.dtype)
    partial = world.empty((size * rows, n), out.dtype)
    by_rank = partial.split(count)  # `pieces` of each rank
    start = world.record(stream)
    world.wait_event(second, start)
    world.wait_event(copies, start)
    world.barrier(copies)

    def send(piece: int, ranks: Sequence[int], lane: Stream, computed: torch.Tensor) -> None:
        world.wait_event(copies, world.record(lane))
        for p in ranks:
            if p != me:
                world.copy(staging.peers[p][piece, me], by_rank[p * pieces + piece], copies)

    def parts() -> Iterator[PartialRows]:
        for piece in range(pieces):
            for first, ranks in groups:
                lane, begin = next(lanes), first * rows + piece * count
                run = slice(begin, begin + count * len(ranks))
                yield PartialRows(run, partial[run], lane, functools.partial(send, piece, ranks, lane))
            world.barrier(copies)
            world.wait_event(sums, world.record(copies))  # the own rows too: the last that `copies` waited for
            own, result = by_rank[me * pieces + piece], out[piece * count :][:count]
            sum_parts(own, staging.local[piece], result, bias, world, sums)

    yield parts()
    for other in (second, sums):
        world.wait_event(stream, world.record(other))


def pull_parts(world: World, source: SymmetricTensor, rows: slice, most: int, stream: Stream) -> torch.Tensor:
    """Return [W, most, N] with the other ranks' `rows` of `source` [M, N], at most `most` of them, at its first
    rows."""
    count, columns, dtype = rows.stop - rows.start, source.local.shape[1], source.local.dtype
    staging = world.empty((world.size, most, columns), dtype)
    for p in world.other_ranks if count else ():
        world.copy(staging[p][:count], source.peers[p][rows], stream)
    return staging


@prepared
def _sum(world: World, rows: int, n: int, bias: bool) -> Launch:
    block = world.scale.block
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
    own: torch.Tensor, staging: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, world: World, stream: Stream
) -> None:
    """out [rows, N] = own + the other ranks' staging [world, rows, N] + bias, in fp32 in rank order."""
    launch = _sum(world, out.shape[0], out.shape[1], bias is not None)
    launch(stream, own=own, staging=staging, out=out, bias=out if bias is None else bias)


# -- exchange ----------------------------------------------------------------------------------------------------------
class Send(NamedTuple):
    """Tensors [n, ..] for rows `row` to row + n of a reader's memory [tensors, rows, ..]."""

    reader: int
    row: int
    tensors: Tensors


Push = Callable[[World, SymmetricTensor, Send, Stream], None]


class Exchanged(NamedTuple):
    """wait(ranks): the caller's stream goes on once what these ranks sent is there. end: behind which all that this
    rank sent was read."""

    wait: Callable[[Iterable[int]], None]
    end: Event


def push(world: World, memory: SymmetricTensor, send: Send, stream: Stream) -> None:
    for plane, t in zip(memory.peers[send.reader], send.tensors, strict=True):
        world.copy(plane[send.row : send.row + len(t)], t, stream)


def exchange_rows(
    world: World, name: str, memory: SymmetricTensor, sends: Iterable[Send], push_to_peer: Push = push
) -> Exchanged:
    """Push rows to where their readers read them in `memory`, a flag behind the one send to each of them, and behind
    all of these what this rank sends itself. The barrier says that no rank reads there any more. Nothing is staged, and
    a reader, which looks for flags on the caller's stream, has no kernel that must find an SM beside what it computes.
    name: of the memory, its barrier and its flags. push_to_peer: who moves what goes to others."""
    stream, copies, me = world.current_stream(), world.side_stream("copy"), world.rank
    world.order(lock(world, name), stream)
    ch = world.channel(f"{name} arrived", world.size, None)
    number = world.barrier(stream, name)
    world.wait_event(copies, world.record(stream))
    with world.on(copies):  # once, not for every copy
        for send in sends:
            if send.reader == me:
                push(world, memory, send, copies)
            else:
                push_to_peer(world, memory, send, copies)
                rank_notify(world, ch, me, send.reader, number, copies)
        end = world.record(copies)

    def wait(ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank == me:
                world.wait_event(stream, end)
            else:
                rank_wait(world, ch, rank, number, stream)

    return Exchanged(wait, end)


def pull_from_all(world: World, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: Stream, last: bool) -> None:
    """Copy parts, (to, from) by rank, of which some may be empty, behind a barrier that says that all are there. A
    stream for each sender: as many copies at once keep the links busy whatever the counts. last: `stream` goes on
    behind these copies, and those before on the same streams."""
    world.barrier(stream)
    stored = world.record(stream)
    for j, p in enumerate((world.rank, *world.other_ranks)):
        (to, source), lane = parts[p], world.side_stream(f"from {j}")
        world.wait_event(lane, stored)
        if len(to):
            world.copy(to, source, lane)
        if last:
            world.wait_event(stream, world.record(lane))
