"""The history of every element: the last writer, the readers since the last write, and whether the element was ever
written.

A `Region` is one storage, or one allocation of the backend with untracked bytes around it. The `states` of a Region
contain one integer per granule, an index into `Memory.states`, which stores equal histories once. For example, a tile
that one program wrote and another program read has one state, so the check of a block compares one number (FastTrack's
epochs, interned).

An access by an agent with vector clock V is ordered after an earlier access by agent q at tick c if V[q] >= c.
"""

from __future__ import annotations

import bisect
import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .bounds import Extent

if TYPE_CHECKING:
    from .machine import Machine
    from .tasks import Task

# The repeated bytes of unwritten memory: The bytes are NaN in bf16, fp16, fp32 and fp64. No four of these bytes are
# equal 8-bit or 16-bit numbers, which host code may write.
POISON = np.array([0x7FFB, 0x7FF3, 0x7FFD, 0x7FF5, 0x7FF9, 0x7FFE, 0x7FF7, 0x7FFA], "<u2").view(np.uint8)
MARGIN = 256  # an access at most MARGIN bytes outside a tensor is reported as a small error in its index
UNWRITTEN, INITIAL = 0, 1
READ, WRITE, BULK_READ, BULK_WRITE, ATOMIC_READ, ATOMIC_WRITE = range(6)
BY_MANY_THREADS = 8  # flag of an atomic kind: many threads execute it, each for some elements of a block
GPU_SCOPE = 16  # flag of an atomic kind: the atomic has scope "gpu", and so is not atomic for other ranks
CTA_SCOPE = 64  # flag of an atomic kind: the atomic has scope "cta", and so is not atomic for other programs
MAYBE_UNWRITTEN = 32  # flag of a read by torch, which may include elements without meaning, such as rows of padding
VERB = ("read", "write", "bulk read", "bulk write", "atomic read", "atomic update")
WRITES = (WRITE, BULK_WRITE, ATOMIC_WRITE)


def verb(kind: int) -> str:
    """Return the kind of an access as text, for a report."""
    scope = "gpu" if kind & GPU_SCOPE else "cta" if kind & CTA_SCOPE else ""
    return VERB[kind & 7] + (f' at scope "{scope}"' if scope else "")


Stamp = tuple[int, int, int, int]  # agent, tick, kind of access, site


class AccessState(NamedTuple):
    """The history of an element. `write` is the last ordinary write, `reads` are the unordered reads since then, and
    `atoms` the unordered atomics since then."""

    write: Stamp | None = None
    reads: tuple[Stamp, ...] = ()
    atoms: tuple[Stamp, ...] = ()


@dataclass(eq=False)
class Region:
    """A range of tracked addresses and the states of its granules."""

    base: int  # the first address
    end: int  # the address after the last
    granule: int  # bytes that share one state
    name: str
    rank: int
    storage: StorageWeakRef
    states: np.ndarray
    bytes: np.ndarray
    fresh: bool  # whether the region may contain unwritten elements
    words: bool = False  # whether the region contains counters or flags that have released accesses
    node_local: bool = False  # whether only the rank's node can address the region, which is memory of the backend
    # The tensors through which operations access the region. Reports name the elements as parts of these tensors.
    views: dict[tuple[str, int, tuple[int, ...]], Extent] = field(default_factory=dict)

    def refine(self, granule: int) -> None:
        """Store states for smaller granules."""
        self.states = np.repeat(self.states, self.granule // granule)
        self.granule = granule

    def shadow(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> np.ndarray:
        """Return the states of a strided block of elements of `size` bytes that begins `offset` bytes into the
        region."""
        g = self.granule
        need = math.gcd(g, size, offset, *strides)
        if need != g:
            self.refine(need)
            g = need
        k = size // g
        if k == 1:
            return np.ndarray(shape, np.int32, self.states, offset // g * 4, [s // g * 4 for s in strides])
        steps = [s // g * 4 for s in strides]
        return np.ndarray((*shape, k), np.int32, self.states, offset // g * 4, [*steps, 4])

    def scattered(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """Return the indices of the states of single elements at byte `offsets`."""
        need = math.gcd(self.granule, size, int(np.gcd.reduce(offsets.astype(np.int64))))
        if need != self.granule:
            self.refine(need)
        indices = offsets.astype(np.int64) // self.granule
        k = size // self.granule
        return indices if k == 1 else (indices[:, None] + np.arange(k)).ravel()

    def label(self, address: int) -> str:
        """Return `name[index]` for the element at an address, named by the smallest view that contains it."""
        owner = f" of rank {self.rank}" if self.rank >= 0 else ""
        for view in sorted(self.views.values(), key=lambda v: (v.end - v.lo, v.name == self.name)):
            if not view.outside(np.array([address]), 1).any():
                return view.index(address) + owner
        return f"{self.name}{owner}, byte {address - self.base}"


class Memory:
    """All tracked memory of a run. `machine` names the tasks in reports and raises the errors."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.states = [AccessState(), AccessState()]  # UNWRITTEN, INITIAL
        self.numbers: dict[AccessState, int] = {}  # the index of each state in `states`
        self.regions: list[Region] = []
        self.bases: list[int] = []
        self.last_region: Region | None = None

    # -- regions -----------------------------------------------------------------------------------------------------
    def forget(self) -> None:
        """Drop the states after a run. The states occupy as much memory as the run's tensors, and would remain until
        Python's cyclic collector frees the run."""
        self.regions, self.bases, self.last_region = [], [], None

    def add(
        self, base: int, nbytes: int, storage: torch.UntypedStorage, name: str, rank: int, size: int, initial: bool
    ) -> Region:
        """Track `nbytes` bytes from address `base` on; `initial`: whether the bytes count as written."""
        end = base + nbytes
        i = bisect.bisect_left(self.bases, base)
        if i and self.regions[i - 1].end > base:
            i -= 1
        while i < len(self.regions) and self.regions[i].base < end:  # a freed region, whose addresses are reused
            del self.regions[i], self.bases[i]
        self.last_region = None
        view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(base))
        states = np.full(-(-nbytes // size), INITIAL if initial else UNWRITTEN, np.int32)
        region = Region(base, end, size, name, rank, StorageWeakRef(storage), states, view, not initial)
        self.regions.insert(i, region)
        self.bases.insert(i, base)
        return region

    def find(self, lo: int, hi: int) -> Region | None:
        """Return the region that contains bytes `lo` to `hi`, or None."""
        region = self.last_region
        if region is not None and region.base <= lo and hi <= region.end:
            return region
        i = bisect.bisect_right(self.bases, lo) - 1
        if i < 0 or hi > self.regions[i].end:
            return None
        self.last_region = self.regions[i]
        return self.last_region

    def neighbour_hint(self, address: int) -> str:
        """Return a description of regions that begin or end within `MARGIN` of an address outside all regions."""
        i = bisect.bisect_right(self.bases, address)
        if i and address - self.regions[i - 1].end < MARGIN:
            last = self.regions[i - 1]
            return f"; just past the end, {last.label(last.end - 1)} is the last there"
        if i < len(self.regions) and self.bases[i] - address <= MARGIN:
            return f"; just before {self.regions[i].label(self.bases[i])}"
        return ""

    def register(self, tensor: torch.Tensor, name: str, rank: int) -> Region | None:
        """Track a tensor that an operation uses; memory that the backend did not allocate counts as written."""
        if tensor.numel() == 0:
            return None
        view = Extent.of_tensor(tensor, name)
        region = self.find(view.lo, view.end)
        if region is None or region.storage.expired():
            storage = tensor.untyped_storage()
            region = self.add(storage.data_ptr(), storage.nbytes(), storage, name or "a tensor", rank, view.size, True)
        elif region.fresh:
            self.refresh(region)
        view.name = name or region.name
        if len(region.views) < 256:
            region.views.setdefault((view.name, view.lo, view.shape), view)
        return region

    def refresh(self, region: Region) -> None:
        """Count elements as written if host code has filled them since the backend allocated `region`. Written elements
        are the elements that are not poison, and all elements in the same 4 bytes, because an 8-bit or 16-bit number
        may itself equal poison."""
        unwritten = region.states == UNWRITTEN
        if not unwritten.any():
            region.fresh = False
            return
        step, whole = max(4, region.granule), region.bytes.size // 4 * 4
        differs = np.zeros(-(-region.bytes.size // step) * step // 4, np.bool_)  # one flag for each 4 bytes
        differs[: whole // 4] = region.bytes[:whole].view(np.uint32) != np.resize(POISON.view(np.uint32), whole // 4)
        if rest := region.bytes[whole:].size:
            differs[whole // 4] = (region.bytes[whole:] != np.resize(POISON, whole % 16 + rest)[-rest:]).any()
        written = differs.reshape(-1, step // 4).any(1).repeat(step // region.granule)[: unwritten.size]
        region.states[unwritten & written] = INITIAL

    # -- accesses ----------------------------------------------------------------------------------------------------
    def touch(self, task: Task, region: Region, block: np.ndarray, kind: int) -> None:
        """Record an access by `task` to the states in `block`, a view of `region.states`. Raises Finding if the access
        is a race or reads unwritten elements. All elements in one state receive the same next state, which is
        cached."""
        if not self.machine.races:
            return
        first_state = block.item(0)
        if block.size == 1 or np.count_nonzero(block == first_state) == block.size:
            states = (first_state,)
        else:
            states = np.unique(block).tolist()
        cache, site = task.cache, self.machine.site()
        states_after = []
        for state in states:
            key = (site, state, kind)
            after = cache.get(key)
            if after is None:
                after = self._step(task, region, block, state, kind, site)
                cache[key] = after
            states_after.append(after)
        if len(states) == 1:
            if states_after[0] != first_state:
                block[...] = states_after[0]
        elif kind in (WRITE, BULK_WRITE):
            block[...] = states_after[0]
        elif any(a != b for a, b in zip(states, states_after, strict=True)):
            block[...] = np.array(states_after, np.int32)[np.searchsorted(np.array(states, np.int32), block)]

    def touch_scattered(self, task: Task, region: Region, index: np.ndarray, kind: int) -> None:
        """Record an access to the states at these indices, as `touch` does."""
        if not self.machine.races:
            return
        block = region.states[index]
        try:
            self.touch(task, region, block, kind)
        except Finding as finding:
            finding.granule = int(index[finding.granule])
            raise
        region.states[index] = block

    def _intern(self, state: AccessState) -> int:
        """Return the number that represents a state in `Region.states`."""
        i = self.numbers.get(state)
        if i is None:
            i = self.numbers[state] = len(self.states)
            self.states.append(state)
        return i

    def _step(self, task: Task, region: Region, block: np.ndarray, number: int, kind: int, site: int) -> int:
        """Return the state after the access; raise Finding if the access is a race or reads an unwritten element."""
        if number == UNWRITTEN and kind & MAYBE_UNWRITTEN:
            return UNWRITTEN
        state = self.states[number]
        many, kind, stamp = kind & BY_MANY_THREADS, kind & 7, kind & ~BY_MANY_THREADS
        clock = task.bulk_view if kind in (BULK_READ, BULK_WRITE) else task.clock
        writes = kind in WRITES
        if number == UNWRITTEN and kind not in (WRITE, BULK_WRITE):
            self._report(task, region, block, number, kind, None)
        w = state.write
        if w is not None and clock[w[0]] < w[1]:
            self._report(task, region, block, number, kind, w)
        if writes:
            for r in state.reads:
                if r[0] != task.agent and clock[r[0]] < r[1]:
                    self._report(task, region, block, number, kind, r)
        if kind < ATOMIC_READ:
            for i, a in enumerate(state.atoms):
                if (writes or a[2] & 7 == ATOMIC_WRITE) and a[0] != task.atomic_agent and clock[a[0]] < a[1]:
                    if not self._observed(task, state.atoms[i:], clock):
                        self._report(task, region, block, number, kind, a)
        if kind in (READ, BULK_READ) and w is not None:
            self.machine.loaded(w[0], w[1], site)
        if kind == WRITE:
            return self._intern(AccessState((task.agent, task.tick, kind, site)))
        if kind == BULK_WRITE:
            return self._intern(AccessState((task.bulk_agent, task.bulk_clock, kind, site)))
        if kind < ATOMIC_READ:
            agent = task.agent
            reads = tuple(r for r in state.reads if r[0] != agent and clock[r[0]] < r[1])
            return self._intern(AccessState(w, (*reads, (agent, task.tick, kind, site)), state.atoms))
        agent, tick = (task.agent, task.tick) if many else (task.atomic_agent, task.atomic_clock)
        keep, ranks = [], self.machine.ranks
        for a in state.atoms:
            covered = a[0] == agent or clock[a[0]] >= a[1]
            # An earlier atomic of this tick covers this atomic, unless this atomic reads another agent's atomic in
            # between.
            if a[0] == agent and a[1] == tick and a[2] | stamp == a[2] and state.atoms[-1][0] == agent:
                return number
            scopes = a[2] | stamp
            narrow = scopes & CTA_SCOPE and self.machine.program_of_agent.get(a[0]) != task.agent
            if not covered and (narrow or (scopes & GPU_SCOPE and ranks[a[0]] != task.rank)):
                if ATOMIC_WRITE in (kind, a[2] & 7):
                    self._report(task, region, block, number, stamp, a)
            if not covered or (a[2] & 7 == ATOMIC_WRITE and kind == ATOMIC_READ):
                keep.append(a)
        return self._intern(AccessState(w, state.reads, (*keep, (agent, tick, stamp, site))))

    def _observed(self, task: Task, atoms: Sequence[Stamp], clock: np.ndarray) -> bool:
        """Return whether one of these later atomics, made by the task itself or ordered before `clock`, has read the
        update of the first one. In that case, the update is ordered before accesses after that read, but its agent's
        other writes are not (PTX's causality order: observation, then base causality)."""
        update, ranks = atoms[0], self.machine.ranks
        if update[2] & 7 != ATOMIC_WRITE:
            return False
        for a in atoms[1:]:
            if a[2] & 7 == ATOMIC_WRITE:
                return False
            scopes = a[2] | update[2]
            strong = not scopes & CTA_SCOPE and (not scopes & GPU_SCOPE or ranks[a[0]] == ranks[update[0]])
            if strong and (a[0] in (task.agent, task.atomic_agent) or clock[a[0]] >= a[1]):
                return True
        return False

    def _report(
        self, task: Task, region: Region, block: np.ndarray, number: int, kind: int, stamp: Stamp | None
    ) -> None:
        start = block.__array_interface__["data"][0] - region.states.__array_interface__["data"][0]
        where = np.argwhere(block == number)[0]
        if 0 <= start < region.states.nbytes:
            granule = (start + int(sum(i * s for i, s in zip(where, block.strides, strict=True)))) // 4
        else:
            granule = int(where[0])
        raise Finding(region, granule, kind, stamp)


class Finding(Exception):
    """A race or a read of an unwritten element, before it has a message. `stamp` is the earlier access, or None for a
    read of an unwritten element."""

    def __init__(self, region: Region, granule: int, kind: int, stamp: Stamp | None) -> None:
        self.region, self.granule, self.kind, self.stamp = region, granule, kind, stamp


def span_of(start: int, shape: Sequence[int], strides: Sequence[int], size: int) -> tuple[int, int]:
    """Return the address of a strided block's lowest byte, and the address after its last byte."""
    lo = hi = start
    for n, s in zip(shape, strides, strict=True):
        if s >= 0:
            hi += (n - 1) * s
        else:
            lo += (n - 1) * s
    return lo, hi + size
