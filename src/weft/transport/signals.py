"""Groups of finished tiles: which tiles a group has, who counts it up, and what is called behind it (FlashOverlap,
section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from ..backends.base import Communicator, Stream
from ..kernel_launch import Launch
from ..lang.channel import BlockChannel
from ..plans import Signaled, partition
from ..world import World
from .barrier import wait_group


class Turn(NamedTuple):
    """What a program knows of a group: its last tile of it, the group, the group's first tile, and how many of them an
    owner has."""

    last: int
    group: int
    first: int
    each: int


@dataclass(frozen=True)
class Schedule:
    """bounds: group g is tiles bounds[g] to bounds[g + 1]. arrivals: by group, programs that count it up. turns: by
    program, the groups of which it has tiles, in order. Tile t of a group is stored at slot first + (t - first) %
    owners * each + (t - first) // owners: owner after owner."""

    bounds: tuple[int, ...]
    arrivals: tuple[int, ...]
    turns: tuple[tuple[Turn, ...], ...]


def schedule(tiles: int, programs: int, groups: Sequence[int], owners: int = 1, unit: int = 1) -> Schedule:
    """Tile t belongs to owner t % owners. A group is whole waves, but for the last tiles of one that do not divide by
    `unit` and by `owners`: they are left to the next."""
    ends, at, unit = [0], 0, math.lcm(owners, unit)
    for waves in partition(groups, max(1, -(-tiles // programs))):
        at += waves
        end = min(tiles, at * programs)
        end = end if end == tiles else end // unit * unit
        if end > ends[-1]:
            ends.append(end)
    return scheduled(ends, programs, owners)


def scheduled(ends: Sequence[int], programs: int, owners: int = 1) -> Schedule:
    """The schedule of groups that end at these tiles. Program p computes tiles p, p + programs, .. A group may be
    empty."""
    groups = list(enumerate(pairwise(ends)))
    turns = []
    for p in range(programs):
        lasts = [(hi - 1 - (hi - 1 - p) % programs, g, lo, (hi - lo) // owners) for g, (lo, hi) in groups]
        turns.append(tuple(Turn(*turn) for turn in lasts if turn[0] >= turn[2]))
    return Schedule(tuple(ends), tuple(min(programs, hi - lo) for _, (lo, hi) in groups), tuple(turns))


@dataclass(eq=False)
class Signals:
    """What one shape and plan keep on the device. One call at a time: `World.order`."""

    schedule: Schedule
    ch: BlockChannel
    turns: torch.Tensor  # as signaled_gemm takes them, and one of no tile behind a program's last
    offsets: torch.Tensor
    communicator: Communicator
    waits: tuple[Launch, ...]  # one a group
    last_stream: Stream = None
    last_captured: Stream = None


def prepare(world: World, name: str, made: Schedule, plan: Signaled, offsets: Sequence[int]) -> Signals:
    most = max(map(len, made.turns)) + 1
    turns = [(*turns, *[Turn(-1, 0, 0, 0)] * (most - len(turns))) for turns in made.turns]
    words = [word for row in zip(*turns, strict=True) for turn in row for word in turn]
    ch, last = world.local_channel(name, made.arrivals), len(made.arrivals) - 1

    def wait(group: int, arrivals: int) -> Launch:
        numbers = dict(group=group, arrivals=arrivals, last=int(group == last))
        return Launch(world, wait_group, 1, dict(num_warps=1), ch=ch, **numbers)

    return Signals(
        replace(made, turns=()),
        ch,
        world.tensor(words, torch.int32),
        world.tensor(offsets, torch.int32),
        None if plan.copies else world.communicator(plan.ctas),
        tuple(wait(group, arrivals) for group, arrivals in enumerate(made.arrivals)),
    )


def exchange_groups(
    world: World,
    signals: Signals,
    gemm: Callable[[Stream], None],
    move: Callable[[int, Stream], None],
    barrier: bool = False,
) -> None:
    """`gemm(stream)` and, on the communicator's stream, `move(g, stream)` for each group once the GEMM has signaled it.
    barrier: one before the first, under the GEMM."""
    stream, comm = world.current_stream(), world.side_stream("comm")
    world.wait_event(comm, world.record(stream))
    if barrier:
        world.barrier(comm)
    gemm(stream)
    for group, wait in enumerate(signals.waits):
        wait(comm)
        move(group, comm)
    world.wait_event(stream, world.record(comm))
