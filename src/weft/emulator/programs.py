"""The operations of a running program: loads, stores, bulk accesses, atomics, barriers and calls of device
functions."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from triton import JITFunction

from ..errors import Unsupported
from . import interpret
from .bounds import ADDRESS, BITS
from .memory import (
    ATOMIC_READ,
    ATOMIC_WRITE,
    BULK_READ,
    BULK_WRITE,
    BY_MANY_THREADS,
    CTA_SCOPE,
    GPU_SCOPE,
    POISON,
    READ,
    WRITE,
    Finding,
    Region,
    span_of,
)
from .ran import Function
from .tasks import Task, merged
from .threads import AccessedBlock, moved

if TYPE_CHECKING:
    from .machine import Machine

WARP = 32  # the threads of a warp; only the first warp executes a release fence
SCOPES = {"SYSTEM": 0, "GPU": GPU_SCOPE, "CTA": CTA_SCOPE}  # flags of an atomic kind
SPIN = 512  # after this number of reads of one address without any change, the program counts as spinning on it

R = TypeVar("R")

Mask = np.ndarray | None
WholeBlock = tuple[np.ndarray, Mask]  # addresses and mask of a block
Box = tuple[slice, ...]  # the slices of a block that are inside a tensor

_rewritten: dict[tuple[Function, bool], Function] = {}


class Programs:
    """The hooks that `interpret` calls while a program runs. The program is `machine.current`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.before: set[int] = set()  # sites of loads before a wait
        self.bodies: dict[Function, Function] = {}  # keyed by Python functions: a JITFunction hashes its source

    @property
    def current(self) -> Task:
        return self.machine.current

    def _maybe_pause(self) -> None:
        machine = self.machine
        if machine.preempt and machine.rng.random() < machine.preempt:
            machine.pause()

    def interpreted(self, fn: JITFunction) -> Function:
        """Return the interpreted form of a kernel or device function, mutated if it contains the mutation under
        test."""
        body = self.bodies.get(fn.fn)
        if body is None:
            self.machine.report.ran.functions[fn.fn] = fn
            mutation = self.machine.mutation
            if mutation is not None and mutation.changes(fn):
                body = interpret.rewrite(fn, mutation.apply)
            else:
                key = (fn.fn, self.machine.record)
                body = _rewritten.get(key)
                if body is None:
                    traced = self.machine.record and not fn.__module__.startswith("triton.")
                    body = _rewritten[key] = interpret.rewrite(fn, reach=traced)
            self.bodies[fn.fn] = body
        return body

    def _not_yet_waited(self) -> None:
        """Note a load that comes before the program's first wait."""
        machine = self.machine
        if not machine.current.acquired and (site := machine.site()) not in self.before:
            self.before.add(site)
            machine.report.ran.before.add(tuple(frame[:2] for frame in machine.sites[site]))

    def load(
        self,
        ptrs: np.ndarray,
        mask: Mask,
        fill: np.ndarray | None,
        dtype: np.dtype,
        volatile: bool,
        polls: bool = True,
        whole: WholeBlock | None = None,
        scope: str = "SYSTEM",
    ) -> np.ndarray:
        """Return the elements at `ptrs`. polls: a volatile load counts as a poll of a word for which the program waits,
        unless the program calls `look_again` itself. whole: the complete block and mask; this call loads the part where
        the mask is True. scope: the scope of a volatile load, as in `atomic`."""
        whole = whole or (ptrs, mask)
        task = self.machine.current
        if volatile:
            self.machine.pause()
        else:
            self._maybe_pause()
            self._not_yet_waited()
        out = None
        kind = ATOMIC_READ | (BY_MANY_THREADS if ptrs.size > 1 else 0) | SCOPES[scope] if volatile else READ
        if mask is not None:
            rows = sub_block(ptrs, mask)
            if rows is None:
                out = _fill(ptrs.shape, dtype, fill)
                self._gather(ptrs[mask], dtype, kind, out, np.asarray(mask), whole)
                return out
            if rows is not True:
                out = _fill(ptrs.shape, dtype, fill)
                if ptrs[rows].size:
                    out[rows] = self.load(ptrs[rows], None, None, dtype, volatile, polls, whole)
                return out
        size = dtype.itemsize
        task.time += ptrs.size * size * self.machine.costs.byte
        block = self._block(ptrs, size, kind)
        if block is None:
            out = np.empty(ptrs.shape, dtype)
            self._gather(ptrs.ravel(), dtype, kind, out, None, whole)
            return out
        region, lo, hi, offset, strides = block
        if self.machine.races:
            self.machine.touch(region, region.shadow(offset, ptrs.shape, strides, size), kind)
            self._note_or_check_store(region, whole, size, lo, hi, kind)
        value = np.array(np.ndarray(ptrs.shape, dtype, region.bytes, offset, strides))
        if not volatile:
            self._read_again(lo, lo if ptrs.size == 1 else None)
        elif polls:
            self._polled((lo, value.tobytes().__hash__()), lo)
        return value

    def store(
        self, ptrs: np.ndarray, value: np.ndarray, mask: Mask, low_latency: bool = False, scope: str = "SYSTEM"
    ) -> None:
        """Store elements. low_latency: the elements are words that other programs may be polling, stored at this scope
        (`atomic`)."""
        if low_latency:
            self.machine.pause()
        else:
            self._maybe_pause()
        kind = ATOMIC_WRITE | BY_MANY_THREADS | SCOPES[scope] if low_latency else WRITE
        whole = ptrs, mask
        if mask is not None:
            rows = sub_block(ptrs, mask)
            if rows is None:
                self._scatter(ptrs[mask], np.broadcast_to(value, ptrs.shape)[mask], kind, whole)
                return
            if rows is not True:
                ptrs, value = ptrs[rows], np.broadcast_to(value, ptrs.shape)[rows]
                if ptrs.size == 0:
                    return
        size = value.dtype.itemsize
        self.machine.current.time += ptrs.size * size * self.machine.costs.byte
        block = self._block(ptrs, size, kind)
        if block is None:
            self._scatter(ptrs.ravel(), np.broadcast_to(value, ptrs.shape).ravel(), kind, whole)
            return
        region, lo, hi, offset, strides = block
        if self.machine.races:
            self.machine.touch(region, region.shadow(offset, ptrs.shape, strides, size), kind)
            self._note_or_check_store(region, whole, size, lo, hi, kind)
        np.ndarray(ptrs.shape, value.dtype, region.bytes, offset, strides)[...] = value
        self.machine.range_changed(lo, hi, region)

    def _within(self, lo: int, hi: int, size: int, kind: int, ptrs: Callable[[], np.ndarray]) -> tuple[Region, int]:
        """Return the region of an access from pointer `lo` to `hi`, and the number to subtract from a pointer in it to
        get an address. Raises an error if an access leaves the tensor from which `lo` is derived. ptrs: returns the
        pointer of each access."""
        bounds = self.machine.bounds.extent_of(lo)
        number = 0
        if bounds is not None:
            number = lo & ~ADDRESS
            lo, hi = lo - number, hi - number
            if bounds.gaps or lo < bounds.lo or hi > bounds.end:
                addresses = (ptrs() - np.uint64(number)).astype(np.int64).ravel()
                outside = bounds.outside(addresses, size)
                if outside.any():
                    self.machine.outside(bounds, int(addresses[outside.argmax()]), kind)
        return self.machine.region(lo, hi, kind), number

    def _block(self, ptrs: np.ndarray, size: int, kind: int) -> tuple[Region, int, int, int, tuple[int, ...]] | None:
        """Return a strided block in one tensor as (region, lowest address, end, offset of its first element in the
        region, byte strides); return None for other blocks."""
        strides = strided(ptrs)
        if strides is None:
            return None
        start = int(ptrs.item(0))
        lo, hi = span_of(start, ptrs.shape, strides, size)
        if lo >> BITS != (hi - 1) >> BITS:
            return None
        region, number = self._within(lo, hi, size, kind, lambda: ptrs)
        return region, lo - number, hi - number, start - number - region.base, strides

    def _element(self, pointer: int, kind: int, size: int) -> tuple[Region, int]:
        return self._within(pointer, pointer + size, size, kind, lambda: np.array([pointer], np.uint64))

    def _address(self, pointer: int, kind: int, size: int = 4) -> int:
        return pointer - self._element(pointer, kind, size)[1]

    def _first_region(self, ptrs: np.ndarray, size: int, kind: int) -> tuple[Region, np.ndarray, np.ndarray]:
        """Return the elements in the same tensor as the lowest element: (region, which elements, byte offsets)."""
        low = int(ptrs.min())
        region, number = self._element(low, kind, size)
        inside = ptrs + np.uint64(size) <= np.uint64(number + region.end)
        pointers = ptrs[inside]
        self._within(low, int(pointers.max()) + size, size, kind, lambda: pointers)
        return region, inside, (pointers - np.uint64(number + region.base)).astype(np.int64)

    def _by_region(self, ptrs: np.ndarray, size: int, kind: int) -> list[tuple[Region, np.ndarray, np.ndarray]]:
        """Return single elements grouped by tensor: (region, which elements, byte offsets)."""
        out = []
        left = np.arange(ptrs.size)
        while left.size:
            region, inside, offsets = self._first_region(ptrs[left], size, kind)
            out.append((region, left[inside], offsets))
            left = left[~inside]
        return out

    def _note_or_check_store(self, region: Region, whole: WholeBlock, size: int, lo: int, hi: int, kind: int) -> None:
        """Note a store, or check a load against the stores since the last barrier of the program's threads."""
        task = self.machine.current
        if kind == WRITE:
            block = AccessedBlock(*whole, size, lo, hi, self.machine.site())
            task.stored.setdefault(region, {})[block.key] = block
        elif kind == READ and task.stored and (stores := task.stored.get(region)):
            loaded = AccessedBlock(*whole, size, lo, hi)
            for block in stores.values():
                if (address := moved(block, loaded)) is not None:
                    self.machine.unsynchronized(address, block.site)

    def _touch_scattered(self, region: Region, offsets: np.ndarray, size: int, kind: int, whole: WholeBlock) -> None:
        if self.machine.races:
            self.machine.report.accesses += 1
            try:
                self.machine.memory.touch_scattered(self.machine.current, region, region.scattered(offsets, size), kind)
            except Finding as finding:
                self.machine.explain(finding)
            lo, hi = region.base + int(offsets.min()), region.base + int(offsets.max()) + size
            self._note_or_check_store(region, whole, size, lo, hi, kind)

    def _gather(
        self, ptrs: np.ndarray, dtype: np.dtype, kind: int, out: np.ndarray, mask: Mask, whole: WholeBlock
    ) -> None:
        values = np.empty(ptrs.size, dtype)
        for region, which, offsets in self._by_region(ptrs, dtype.itemsize, kind):
            self._touch_scattered(region, offsets, dtype.itemsize, kind, whole)
            data = region.bytes[offsets[:, None] + np.arange(dtype.itemsize)]
            values[which] = data.view(dtype).ravel()
        if mask is None:
            out[...] = values.reshape(out.shape)
        else:
            out[mask] = values

    def _scatter(self, ptrs: np.ndarray, values: np.ndarray, kind: int, whole: WholeBlock) -> None:
        size = values.dtype.itemsize
        for region, which, offsets in self._by_region(ptrs, size, kind):
            self._touch_scattered(region, offsets, size, kind, whole)
            data = np.ascontiguousarray(values[which]).view(np.uint8).reshape(-1, size)
            region.bytes[offsets[:, None] + np.arange(size)] = data
            lo, hi = int(offsets.min()), int(offsets.max())
            self.machine.range_changed(region.base + lo, region.base + hi + size, region)

    def _box(
        self, desc: interpret.Desc, offsets: list[int], kind: int
    ) -> tuple[Box, int, int, Region, np.ndarray] | None:
        """Return the part of a descriptor's block inside its tensor: (slices of the block, first byte, end, region,
        elements); None if it is empty."""
        base, dims, strides, size, dtype = desc.plain
        inner, shape, start = [], [], base
        for offset, block, dim, stride in zip(offsets, desc.block_shape, dims, strides, strict=True):
            low, high = max(0, -offset), min(block, dim - offset)
            if high <= low:
                return None
            inner.append(slice(low, high))
            shape.append(high - low)
            start += (offset + low) * stride
        lo, hi = span_of(start, shape, strides, size)
        region, number = self._within(lo, hi, size, kind, lambda: _addresses(start, shape, strides))
        lo, hi, start = lo - number, hi - number, start - number - region.base
        if self.machine.races:
            self.machine.touch(region, region.shadow(start, tuple(shape), tuple(strides), size), kind)
        self.machine.current.time += math.prod(shape) * size * self.machine.costs.byte
        return tuple(inner), lo, hi, region, np.ndarray(shape, dtype, region.bytes, start, strides)

    def bulk_load(self, desc: interpret.Desc, offsets: list[int]) -> np.ndarray:
        """Return the block of a descriptor at `offsets`, by a bulk (TMA) load."""
        self._maybe_pause()
        self._not_yet_waited()
        box = self._box(desc, offsets, BULK_READ)
        if box is not None and list(box[4].shape) == list(desc.block_shape):
            return np.array(box[4])
        out = np.full(desc.block_shape, desc.fill, desc.plain[4])
        if box is not None:
            out[box[0]] = box[4]
        return out

    def bulk_store(self, desc: interpret.Desc, offsets: list[int], value: np.ndarray) -> None:
        """Store the block of a descriptor at `offsets` by a bulk (TMA) store."""
        self._maybe_pause()
        box = self._box(desc, offsets, BULK_WRITE)
        if box is not None:
            box[4][...] = np.broadcast_to(value, desc.block_shape)[box[0]]
            self.machine.range_changed(box[1], box[2], box[3])

    def atomic(
        self,
        ptrs: np.ndarray,
        mask: Mask,
        dtype: np.dtype,
        do: Callable[[], R],
        order: str,
        scope: str,
    ) -> R:
        """Execute an atomic operation `do` on each element, and record its access, its acquire and its release. order:
        "RELAXED", "ACQUIRE", "RELEASE" or "ACQUIRE_RELEASE". scope: "SYSTEM", "GPU" or "CTA"; with "CTA" it neither
        acquires from other programs nor releases to them."""
        self.machine.pause()
        task = self.machine.current
        scope_sys = scope == "SYSTEM"
        acquire, release = (part in order and scope != "CTA" for part in ("ACQUIRE", "RELEASE"))
        if self.machine.record and scope_sys:
            self.machine.report.sys_lines.add(interpret.where()[0][:2])
        size = dtype.itemsize
        flat = ptrs.ravel() if mask is None else ptrs[np.broadcast_to(mask, ptrs.shape)]
        addresses = [self._address(int(a), ATOMIC_WRITE, size) for a in flat.ravel()]
        task.time += len(addresses) * size * self.machine.costs.byte
        how = (BY_MANY_THREADS if ptrs.size > 1 else 0) | SCOPES[scope]
        before = [ctypes.string_at(a, size) for a in addresses]
        result = do()
        after = [ctypes.string_at(a, size) for a in addresses]
        for address, old, new in zip(addresses, before, after, strict=True):
            self.machine.word(address, (ATOMIC_READ if old == new else ATOMIC_WRITE) | how, size)
            if scope != "CTA" and (log := self.machine.words.get(address)):
                if acquire:
                    self.machine.acquire(task, log[-1], scope_sys)
                else:
                    self.machine.observe(task, log[-1], scope_sys)
            if old != new:
                fenced = ptrs.size <= WARP and scope != "CTA"
                self.machine.release(task, address, scope_sys, False, release, fenced)
                self.machine.word_changed(address)
        if acquire and ptrs.size == 1:
            task.stored.clear()  # one thread executes the atomic, and a barrier orders the other threads after it
        if before != after or not addresses:
            task.polls = 0
        else:
            self._polled((addresses[0], hash(after[0])), addresses[0] if len(addresses) == 1 else None)
        return result

    def _polled(self, seen: tuple[int, ...], address: int | None) -> None:
        """Note a poll that changed nothing. After the second such poll in a row, the task sleeps until something
        changes."""
        task = self.machine.current
        same = task.polled == seen
        task.polled = seen
        task.polls += 1
        if task.polls >= 2:
            if same and (log := self.machine.words.get(address or 0)):
                task.time = max(task.time, log[-1].time)
            self.machine.signals("waits")
            self.machine.sleep(address if same else None)

    def _read_again(self, lo: int, address: int | None) -> None:
        """Note a plain load. A program that keeps loading one unchanged value sleeps until something changes, because
        otherwise the run could not end."""
        task, machine = self.machine.current, self.machine
        if task.reads_at != machine.progress:
            task.reads_at = machine.progress
            task.reads.clear()
        again = task.reads[lo] = task.reads.get(lo, 0) + 1
        if again == SPIN:
            machine.sleep(address, plain=True)
            task.reads.clear()

    def halves(self, count: int) -> tuple[slice, slice]:
        """Return two slices of `count` elements, split at a random place."""
        cut = self.machine.rng.randrange(count + 1)
        return slice(cut), slice(cut, None)

    @property
    def threads(self) -> int:
        """Return the number of threads of the running program."""
        run = self.machine.current.run
        return 0 if run is None else 32 * run.warps

    def thread_access(
        self,
        pointer: int,
        size: int,
        order: str,
        scope: str,
        new: Callable[[int], int] | None = None,
        *,
        store: bool = False,
        everywhere: bool = False,
    ) -> int:
        """Execute one thread's access to a word of `size` bytes, and return the old value. order: "" for an ordinary
        access, "relaxed", "acquire", "release" or "acq_rel"; scope: as in `atomic`. new: computes the new value from
        the old value; None for a load. store: the new value does not depend on the old value. everywhere: all threads
        of the program make the same access, so all of them acquire; otherwise a barrier must order the other threads
        after an acquire."""
        if not order:
            ptrs, dtype = np.array([pointer], np.uint64), np.dtype(f"u{size}")
            if new is None:
                return int(self.load(ptrs, None, None, dtype, False)[0])
            self.store(ptrs, np.array([new(0)], dtype), None)
            return 0
        machine, task, near = self.machine, self.machine.current, scope == "CTA"
        machine.pause()
        address = self._address(pointer, ATOMIC_READ if new is None else ATOMIC_WRITE, size)
        task.time += size * self.machine.costs.byte
        before = int.from_bytes(ctypes.string_at(address, size), "little")
        after = before if new is None else new(before)
        changes = store or after != before
        machine.word(address, (ATOMIC_WRITE if changes else ATOMIC_READ) | SCOPES[scope], size)
        if not near and not store and (log := machine.words.get(address)):
            if order in ("acquire", "acq_rel"):
                machine.acquire(task, log[-1], scope == "SYSTEM", later=not everywhere)
                if everywhere:
                    task.stored.clear()
            else:
                machine.observe(task, log[-1], scope == "SYSTEM")
        if changes:
            ctypes.memmove(address, after.to_bytes(size, "little"), size)
            machine.release(
                task, address, scope == "SYSTEM", store, order in ("release", "acq_rel") and not near, not near
            )
            machine.word_changed(address)
        return before

    def look_again(self, address: int | None = None) -> None:
        """Note that the task polled words that have not arrived yet. The task sleeps if nothing has changed since its
        last poll or, with an address, until that word changes."""
        task, machine = self.machine.current, self.machine
        machine.signals("waits")
        if task.polled != (machine.progress,):
            task.polled = (machine.progress,)
            return
        machine.sleep(address)
        task.polled = ()

    def flush_stores(self, bulk: bool) -> None:
        """Order the program's stores so far before its next release, by a barrier of its threads; bulk: whether to
        order its bulk stores too."""
        self.machine.pause()
        task = self.machine.current
        if task.threads is not None and not task.threads.all():
            raise Unsupported(
                f"a barrier in a branch that {task.threads.sum()} of {task.threads.size} threads take: the program "
                f"hangs unless the others meet it, which the emulator does not follow\n{self.machine.me()}"
            )
        task.flushed = task.tick
        task.stored.clear()
        if task.later is not None:
            task.join(task.later)
            task.later = None
            self.machine.show_copies(task)
        if bulk:
            if self.machine.record:
                self.machine.report.bulk_lines.add(interpret.where()[0][:2])
            task.clock[task.bulk_agent] = task.bulk_clock
            task.bulk_clock += 1
            self.machine.clocks[task.bulk_agent] = task.bulk_clock
            task.fence()
        else:
            task.advance()

    def release_fence(self, scope_sys: bool) -> None:
        """Record the clock that later relaxed atomics of this program release."""
        self.machine.pause()
        task = self.machine.current
        if self.machine.record and scope_sys:
            self.machine.report.sys_lines.add(interpret.where()[0][:2])
        task.fenced = (self.machine.covered(task), scope_sys)

    def acquire_fence(self, scope_sys: bool, everywhere: bool) -> None:
        """Order the program after the releases that its relaxed atomics have read. everywhere: all its threads execute
        the fence; otherwise a barrier must order the other threads after it."""
        task = self.machine.current
        for clock in task.observed[: 1 + scope_sys]:
            if clock is not None and everywhere:
                task.join(clock)
                self.machine.show_copies(task)
            elif clock is not None:
                task.later = merged(task.later, clock)

    def worked(self, flops: float) -> None:
        """Add the time of `flops` FLOPs to the program's virtual time."""
        self.machine.current.time += flops * self.machine.costs.flop

    def wait_until(self, address: int, target: int, tile: int, peer: int, scope_sys: bool) -> int:
        """Block until the word at a pointer has reached `target`, then acquire; return the word's value."""
        value = self.machine.await_word(self._address(address, ATOMIC_READ), target, tile, peer, scope_sys)
        self.machine.current.stored.clear()
        self.machine.current.fence()
        return value

    def disagree(self, guard: int, words: dict[int, int]) -> None:
        """Raise the Mismatch of a World. guard: the address of its guard; words: the words of `same_call`, by rank."""
        raise self.machine.disagreements[self._address(guard, READ)](words)

    def bulk_fence(self) -> None:
        """Order the program's earlier accesses before its later bulk accesses."""
        self.machine.pause()
        self.machine.current.fence()


def _fill(shape: tuple[int, ...], dtype: np.dtype, value: np.ndarray | None) -> np.ndarray:
    """Return the value of a load where the mask is False: the value is `other`, or the poison if there is no `other`,
    because a GPU may return any value there."""
    out = np.empty(shape, dtype)
    out[...] = np.resize(POISON, dtype.itemsize).view(dtype) if value is None else value
    return out


def strided(ptrs: np.ndarray) -> tuple[int, ...] | None:
    """Return the byte strides of a block of addresses, or None if the block is not strided."""
    if ptrs.size == 1:
        return (0,) * ptrs.ndim
    signed = ptrs.view(np.int64)
    start = signed.item(0)
    strides = []
    total = None
    for axis, n in enumerate(ptrs.shape):
        if n == 1:
            strides.append(0)
            continue
        line = signed[tuple(slice(None) if i == axis else 0 for i in range(ptrs.ndim))]
        step = line.item(1) - start
        strides.append(step)
        part = _steps(n, step).reshape(tuple(n if i == axis else 1 for i in range(ptrs.ndim)))
        total = part if total is None else total + part
    if total is None or np.count_nonzero(signed - start != total):
        return None
    return tuple(strides)


def _addresses(start: int, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """Return the address of each element of a strided block that begins at `start`."""
    out = np.array(start, np.uint64)
    for n, step in zip(shape, strides, strict=True):
        out = out[..., None] + _steps(n, step).astype(np.uint64)
    return out


_step_cache: dict[tuple[int, int], np.ndarray] = {}


def _steps(n: int, step: int) -> np.ndarray:
    offsets = _step_cache.get((n, step))
    if offsets is None:
        if len(_step_cache) > 4096:
            _step_cache.clear()
        offsets = _step_cache[n, step] = np.arange(n, dtype=np.int64) * step
    return offsets


def sub_block(ptrs: np.ndarray, mask: np.ndarray) -> Literal[True] | Box | None:
    """Return True if the whole mask is True, slices if the mask's True elements form a leading box, and None
    otherwise."""
    if np.count_nonzero(mask) == mask.size:
        return True
    if mask.shape != ptrs.shape:
        mask = np.broadcast_to(mask, ptrs.shape)
    lengths = []
    for axis in range(mask.ndim):
        other_axes = tuple([i for i in range(mask.ndim) if i != axis])
        lengths.append(np.count_nonzero(mask.any(axis=other_axes) if other_axes else mask))
    box = tuple([slice(0, n) for n in lengths])
    on = math.prod(lengths)
    return box if on == np.count_nonzero(mask) == np.count_nonzero(mask[box]) else None
