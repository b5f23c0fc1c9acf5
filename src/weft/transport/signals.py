"""Groups of a GEMM's tiles. A group is sent once all its tiles are computed (FlashOverlap, section 3). This module
defines the tiles of a group, the programs that notify the group, and the function that sends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from ..backends.barrier import wait_group
from ..backends.base import Communicator, Stream
from ..kernel_launch import Launch
from ..lang.channel import BlockChannel
from ..plans import Signaled, partition
from ..world import World


class ProgramGroup(NamedTuple):
    """A program's share of a group. The program notifies the group after its own last tile in the group. Tiles are
    numbered in the order of their computation."""

    last_tile: int  # the program's last tile of the group
    group: int
    first_tile: int  # the first tile of the group
    tiles_per_owner: int  # the number of tiles of each owner in the group


NO_GROUP = ProgramGroup(-1, 0, 0, 0)


@dataclass(frozen=True)
class Schedule:
    """The order of groups and tiles. Group g contains the tiles from bounds[g] to bounds[g + 1]. `arrivals` contains
    the number of programs that notify each group. `program_groups` contains the groups of each program, in order.

    The tiles of a group are stored in the order of their owners: tile t is at place first_tile + (t - first_tile) %
    owners * tiles_per_owner + (t - first_tile) // owners."""

    bounds: tuple[int, ...]
    arrivals: tuple[int, ...]
    program_groups: tuple[tuple[ProgramGroup, ...], ...]


def schedule(tiles: int, programs: int, groups: Sequence[int], owners: int = 1, unit: int = 1) -> Schedule:
    """Return the schedule of a GEMM of `tiles` tiles. `groups` contains the number of waves of each group, as in
    `Signaled.groups`. Tile t belongs to owner t % owners. A group consists of whole waves, except that its last tiles
    beyond a multiple of `unit` and `owners` join the next group."""
    ends, wave, unit = [0], 0, math.lcm(owners, unit)
    for waves in partition(groups, max(1, -(-tiles // programs))):
        wave += waves
        end = min(tiles, wave * programs)
        end = end if end == tiles else end // unit * unit
        if end > ends[-1]:
            ends.append(end)
    return schedule_of(ends, programs, owners)


def schedule_of(ends: Sequence[int], programs: int, owners: int = 1) -> Schedule:
    """Return the schedule of groups that end at these tiles. Program p computes tiles p, p + programs, .. A group may
    be empty."""
    groups = list(enumerate(pairwise(ends)))
    by_program = []
    for p in range(programs):
        entries = [ProgramGroup(hi - 1 - (hi - 1 - p) % programs, g, lo, (hi - lo) // owners) for g, (lo, hi) in groups]
        by_program.append(tuple(entry for entry in entries if entry.last_tile >= entry.first_tile))
    return Schedule(tuple(ends), tuple(min(programs, hi - lo) for _, (lo, hi) in groups), tuple(by_program))


@dataclass(eq=False)
class Signals:
    """A schedule and the device memory that all calls of one shape and plan share; `World.order` runs these calls one
    at a time."""

    schedule: Schedule  # the schedule without program_groups
    ch: BlockChannel
    program_groups: torch.Tensor  # for signaled_gemm; an entry without a tile follows each program's last entry
    offsets: torch.Tensor
    communicator: Communicator
    waits: tuple[Launch, ...]  # the kernel that waits for each group
    last_stream: Stream = None
    last_captured: Stream = None


def prepare(world: World, name: str, groups: Schedule, plan: Signaled, offsets: Sequence[int]) -> Signals:
    """Return the Signals of a schedule. `name` is the name of their channel."""
    count = max(map(len, groups.program_groups)) + 1
    padded = [(*entries, *[NO_GROUP] * (count - len(entries))) for entries in groups.program_groups]
    words = [word for row in zip(*padded, strict=True) for entry in row for word in entry]
    ch, last = world.local_channel(name, groups.arrivals), len(groups.arrivals) - 1

    # The stream's next kernel ends 7.4 us after the signal; with cuStreamWaitValue32 it would end 14.1 us after (4
    # H200, 2026-11).
    def wait(group: int, arrivals: int) -> Launch:
        numbers = dict(group=group, arrivals=arrivals, last=int(group == last))
        return Launch(world, wait_group, 1, dict(num_warps=1), ch=ch, **numbers)

    return Signals(
        replace(groups, program_groups=()),
        ch,
        world.tensor(words, torch.int32),
        world.tensor(offsets, torch.int32),
        None if plan.copies else world.backend.communicator(plan.ctas),
        tuple(wait(group, arrivals) for group, arrivals in enumerate(groups.arrivals)),
    )


def exchange_groups(
    world: World,
    signals: Signals,
    gemm: Callable[[Stream], None],
    move: Callable[[int, Stream], None],
) -> None:
    """Enqueue `gemm(stream)`. On the communicator's stream, enqueue a wait for each group g, then `move(g, stream)`."""
    stream, comm = world.current_stream(), world.side_stream("comm")
    world.wait_event(comm, world.record(stream))
    gemm(stream)
    for group, wait in enumerate(signals.waits):
        wait(comm)
        move(group, comm)
    world.wait_event(stream, world.record(comm))
