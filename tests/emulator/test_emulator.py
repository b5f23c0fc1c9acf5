"""The emulator finds every planted bug on every seed, and finds no bug in the correct version.

Most of the bugs are planted in one small all-gather + row sum: rank r copies its shard to every peer and increments
their flags, and every rank sums the rows that have arrived. BUG names the planted bug.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
import weft.lang as wl
from weft import Deadlock, MemoryFault, Mismatch, Race, Unsupported
from weft.backends.emulated import EmulatedBackend, spmd
from weft.check.offline import compile_kernel
from weft.emulator import host, interpret
from weft.errors import SignalError
from weft.lang.host import beyond
from weft.lang.intrinsics import bulk_fence, flush_stores, post, release_fence, wait_until
from weft.lang.jit import jit

SEEDS = range(6)
ROWS, COLS = 16, 32


class Flags(NamedTuple):
    local: Any
    peers: Any
    guard: Any


class Job(NamedTuple):
    flags: Flags
    rank: Any
    world: Any


@jit
def notify(flags, rank, index, SEM: tl.constexpr, SCOPE: tl.constexpr, SETTLE: tl.constexpr, BULK: tl.constexpr):
    if SETTLE:
        flush_stores(BULK)
    words = tl.load(flags.peers + rank).to(tl.pointer_type(tl.int32))
    tl.atomic_add(words + index, 1, sem=SEM, scope=SCOPE)


@jit
def push(job, x, gathered, ROWS: tl.constexpr, COLS: tl.constexpr, BUG: tl.constexpr):
    """Program p copies this rank's shard to rank p."""
    to = tl.program_id(0)
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    dst = tl.load(gathered + to).to(tl.pointer_type(tl.bfloat16)) + job.rank * ROWS * COLS
    if BUG == "early":
        notify(job.flags, to, job.rank, "release", "sys", True, False)
    tl.store(dst + offsets, tl.load(x + offsets))
    if BUG == "relaxed":
        notify(job.flags, to, job.rank, "relaxed", "sys", True, False)
    elif BUG == "gpu scope":
        notify(job.flags, to, job.rank, "release", "gpu", True, False)
    elif BUG == "no flush_stores":
        notify(job.flags, to, job.rank, "release", "sys", False, False)
    elif BUG == "lost":
        if to != 1 or job.rank != 0:
            notify(job.flags, to, job.rank, "release", "sys", True, False)
    elif BUG != "early":
        notify(job.flags, to, job.rank, "release", "sys", True, False)
    if BUG == "doubled":
        notify(job.flags, to, job.rank, "release", "sys", True, False)


@jit
def take(job, full, out, ROWS: tl.constexpr, COLS: tl.constexpr, BUG: tl.constexpr, SCOPE: tl.constexpr):
    """Program r sums the rows that rank r pushed."""
    source = tl.program_id(0)
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    if BUG == "spin":
        while tl.atomic_add(job.flags.local + source, 0, sem="acquire", scope="sys") < 1:
            pass
    elif BUG != "no wait":
        wait_until(job.flags.local + source, 1, job.flags.guard, source, source, SCOPE)
    part = tl.load(full + source * ROWS * COLS + offsets).to(tl.float32)
    tl.store(out + source * ROWS + tl.arange(0, ROWS), tl.sum(part, axis=1))


def gather(bug: str = "", consumer: str = "", scope: str = "sys") -> Any:
    def fn(b: EmulatedBackend) -> float:
        shards = [torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(b.size)]
        full = b.symmetric(b.size * ROWS * COLS * 2, "gathered").view(0, (b.size * ROWS, COLS), torch.bfloat16)
        flags = b.symmetric(b.size * 4, "flags").view(0, (b.size,), torch.int32)
        out = b.empty((b.size * ROWS,), torch.float32)
        job = Job(Flags(flags.local, flags.addresses, b.guard()), b.rank, tl.constexpr(b.size))
        main, side = b.current_stream(), b.side_stream("comm")
        sizes = dict(ROWS=ROWS, COLS=COLS)
        b.register_channel("flags", flags.local, 1, 1)
        b.launch(push, b.size, dict(job=job, x=shards[b.rank], gathered=full.addresses, BUG=bug, **sizes), {}, side)
        args = dict(job=job, full=full.local, out=out, BUG=consumer, SCOPE=scope, **sizes)
        b.launch(take, b.size, args, {}, main)
        b.finish(main)
        return (out - torch.cat(shards).float().sum(1)).abs().max().item()

    return fn


# -- the protocol's bugs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", ["", "spin"])
@pytest.mark.parametrize("seed", range(12))
def test_good_kernel_passes(seed: int, consumer: str) -> None:
    errors, report = spmd(gather(consumer=consumer), 3, seed=seed, preempt=0.3)
    assert max(errors) < 1e-4
    assert report.programs == 3 * 6 and report.counters["flags of rank 1"] == [1, 1, 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bug", ["early", "relaxed", "no flush_stores", "gpu scope"])
def test_bad_notify_is_a_race(bug: str, seed: int) -> None:
    with pytest.raises(Race, match=r"race on .*" + ("flags" if bug == "gpu scope" else "(gathered|full)")) as caught:
        spmd(gather(bug), 2, seed=seed)
    text = str(caught.value)
    assert re.search(r"by rank \d push\[\d\] at .*test_emulator\.py:\d+ \(push\)", text), text
    assert re.search(r"by rank \d take\[\d\] at .*test_emulator\.py:\d+ \(take\)", text), text
    if bug == "no flush_stores":
        assert "no flush_stores" in text or "write after read" in text


@pytest.mark.parametrize("seed", SEEDS)
def test_gpu_scope_within_one_rank_is_enough(seed: int) -> None:
    assert max(spmd(gather("gpu scope", scope="gpu"), 1, seed=seed)[0]) < 1e-4


@pytest.mark.parametrize("seed", SEEDS)
def test_gpu_scope_wait_for_another_rank_is_a_race(seed: int) -> None:
    with pytest.raises(Race):
        spmd(gather(scope="gpu"), 2, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_missing_wait_is_a_race(seed: int) -> None:
    with pytest.raises(Race) as caught:
        spmd(gather(consumer="no wait"), 2, seed=seed)
    text = str(caught.value)
    assert re.search(r"(full|gathered)\S*\[\d+, \d+\] of rank \d", text), text
    assert re.search(r"(write by|read by) rank \d push\[\d\] at .*test_emulator\.py:\d+ \(push\)", text), text
    assert re.search(r"(write by|read by) rank \d take\[\d\] at .*test_emulator\.py:\d+ \(take\)", text), text


@pytest.mark.parametrize("seed", SEEDS)
def test_lost_signal_deadlocks(seed: int) -> None:
    with pytest.raises(Deadlock) as caught:
        spmd(gather("lost"), 2, seed=seed)
    text = str(caught.value)
    assert "rank 1 take[0] waits for" in text and ">= 1, now 0, tile 0, peer 0" in text
    assert "test_emulator.py:" in text and "(take)" in text
    assert "rank 1 host waits for the end of stream main of rank 1" in text
    assert "raised so far by nobody" in text


@pytest.mark.parametrize("seed", SEEDS)
def test_doubled_signal_is_reported(seed: int) -> None:
    with pytest.raises(SignalError, match=r"doubled signal: flags\[\d\] of rank \d is 2 at the end, not 1"):
        spmd(gather("doubled"), 2, seed=seed)


@jit
def plain_spin(flag, x):
    while tl.load(flag) < 1:
        pass
    tl.store(x, 1.0)


@jit
def raise_word(flag):
    tl.store(flag, 1)


def test_a_spin_by_ordinary_loads_ends_in_a_report() -> None:
    def fn(b: EmulatedBackend, raised: bool) -> None:
        flag, x = b.zeros((1,), torch.int32), b.zeros((1,), torch.float32)
        b.launch(plain_spin, 1, dict(flag=flag, x=x), {}, b.current_stream())
        if raised:
            b.launch(raise_word, 1, dict(flag=flag), {}, b.side_stream("late"))
        b.finish(b.current_stream())

    with pytest.raises(Deadlock, match=r"rank 0 plain_spin\[0\] re-reads flag\[0\] of rank 0 for ever"):
        spmd(lambda b: fn(b, False), 1)
    with pytest.raises(Race, match=r"race on flag\[0\]"):
        spmd(lambda b: fn(b, True), 1)
    spmd(lambda b: fn(b, True), 1, races=False)  # only the store wakes the waiting program


@jit
def read_often(x, out, N: tl.constexpr):
    total = 0.0
    for _ in range(N):
        total += tl.load(x)
    tl.store(out, total)


def test_a_program_that_reads_one_word_often_continues() -> None:
    def fn(b: EmulatedBackend) -> float:
        out = b.zeros((1,), torch.float32)
        b.launch(read_often, 1, dict(x=torch.ones(1), out=out, N=3000), {}, b.current_stream())
        b.finish(b.current_stream())
        return out.item()

    assert spmd(fn, 1)[0] == [3000.0]


@jit
def wait_for_nobody(flag, guard):
    wait_until(flag, 1, guard, tl.program_id(0), -1, "gpu")


def test_a_deadlock_lists_equal_waits_once() -> None:
    def fn(b: EmulatedBackend) -> None:
        args = dict(flag=b.zeros((1,), torch.int32), guard=b.guard())
        b.launch(wait_for_nobody, 3, args, {}, b.current_stream())
        b.finish(b.current_stream())

    with pytest.raises(Deadlock) as caught:
        spmd(fn, 1)
    text = str(caught.value)
    names = ", ".join(f"wait_for_nobody[{i}]" for i in range(3))
    assert f"rank 0 {names} wait for flag[0] of rank 0 >= 1, now 0, tiles 0, 1, 2 at" in text
    assert text.count("nobody that still runs has raised it or a neighbour so far") == 1


@jit
def compute_for_ever(x, END: tl.constexpr, STORE: tl.constexpr):
    i = 0
    while i < END:
        if STORE:
            tl.store(x, i)
        i = i * 2
    for _ in range(3):
        n = 0
        while n < 90:
            n += 1
    tl.store(x, n)


@pytest.mark.parametrize("store", [False, True])
def test_a_loop_without_an_end_is_a_deadlock(monkeypatch: pytest.MonkeyPatch, store: bool) -> None:
    """The loop may change memory or not; a nested loop is counted separately."""
    monkeypatch.setattr(interpret, "TURNS", 100)

    def fn(b: EmulatedBackend, end: int) -> int:
        x = b.empty((1,), torch.int32)
        b.launch(compute_for_ever, 1, dict(x=x, END=end, STORE=store), {}, b.current_stream())
        b.synchronize()
        return x.item()

    assert spmd(lambda b: fn(b, 0), 1)[0] == [90]
    line = compute_for_ever.fn.__code__.co_firstlineno + 3
    with pytest.raises(Deadlock, match=rf"made 100 turns and has not ended\n.*test_emulator.py:{line} "):
        spmd(lambda b: fn(b, 1), 1)


def test_host_code_that_makes_no_call_for_long_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "SILENT", 0.05)

    def fn(b: EmulatedBackend) -> None:
        while not caplog.messages and b.rank == 1:
            pass

    spmd(fn, 2)
    (message,) = caplog.messages
    assert re.fullmatch(r"rank 1's function has made no call of weft for 0.05 seconds: at .*\.py:\d+", message)


@jit
def double(x, y, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(y + lanes, tl.load(x + lanes) * 2)


def seen_by(read: Any) -> Any:
    """Return a rank's function that applies `read` to a kernel's result, without a wait in between."""

    def fn(b: EmulatedBackend) -> list[float]:
        x, y = torch.ones(16), b.zeros((16,), torch.float32)
        with torch.device("cpu"):  # a torch mode that begins before the kernel is enqueued and ends after it
            b.launch(double, 1, dict(x=x, y=y, N=16), {}, b.current_stream())
        seen = read(y)
        x.fill_(5.0)  # the kernel has already loaded x
        b.synchronize()
        assert y.tolist() == [2.0] * 16
        assert not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack()
        return [seen] * 16 if isinstance(seen, float) else [float(number) for number in seen]

    return fn


@pytest.mark.parametrize("seed", SEEDS[:4])
@pytest.mark.parametrize(
    "read",
    [
        lambda y: y[3].item(),
        lambda y: y.tolist(),
        lambda y: y.numpy(),
        lambda y: y + 0,
        lambda y: torch.stack([y]).reshape(-1),
        lambda y: torch.empty(16).copy_(y),
        lambda y: y if bool((y == 2).all()) else y - 1,
    ],
)
def test_torch_operations_see_the_kernels_before_them(read: Any, seed: int) -> None:
    assert spmd(seen_by(read), 1, seed=seed)[0] == [[2.0] * 16]


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_a_torch_operation_beside_a_kernel_of_another_stream_is_a_race(seed: int) -> None:
    def fn(b: EmulatedBackend, waits: bool) -> None:
        x, y, side = torch.ones(16), b.zeros((16,), torch.float32), b.side_stream("side")
        b.launch(double, 1, dict(x=x, y=y, N=16), {}, side)
        if waits:
            b.wait_event(b.current_stream(), b.record(side))
        y.add_(1)
        b.synchronize()
        assert y.tolist() == [3.0] * 16

    spmd(lambda b: fn(b, True), 1, seed=seed)
    with pytest.raises(Race, match=r"race on y\[0\] of rank 0: (.|\n)*add_.*test_emulator.py"):
        spmd(lambda b: fn(b, False), 1, seed=seed)


@jit
def overwrite(x, value):
    tl.store(x, value)


def test_a_race_names_the_launch() -> None:
    def fn(b: EmulatedBackend) -> None:
        x = b.zeros((1,), torch.float32)
        for stream in (b.current_stream(), b.current_stream(), b.side_stream("other")):
            b.launch(overwrite, 1, dict(x=x, value=1.0), {}, stream)
        b.finish(b.current_stream())

    with pytest.raises(Race) as caught:
        spmd(fn, 1)
    assert "overwrite[0], launch 2 at" in str(caught.value) or "overwrite[0], launch 3 at" in str(caught.value)


@jit
def many_threads(box, flag, out, guard, N: tl.constexpr, POST: tl.constexpr, SETTLE: tl.constexpr):
    """Program 0 adds or stores a block and counts it, and program 1 reads the block."""
    offsets = tl.arange(0, N)
    if tl.program_id(0) == 0:
        if POST:
            post(box + 4 * offsets, offsets, offsets, offsets, offsets, offsets < N)
        else:
            tl.atomic_add(box + 4 * offsets, offsets, sem="relaxed", scope="gpu")
        if SETTLE:
            flush_stores(False)
        tl.atomic_add(flag, 1, sem="release", scope="gpu")
    else:
        wait_until(flag, 1, guard, -1, -1, "gpu")
        tl.store(out + offsets, tl.load(box + 4 * offsets))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("by_post", [False, True])
def test_a_release_by_one_thread_covers_no_other_threads_atomics(by_post: bool, seed: int) -> None:
    def fn(b: EmulatedBackend, flushed: bool) -> list[int]:
        box, flag, out = b.zeros((256,), torch.int32), b.zeros((1,), torch.int32), b.empty((64,), torch.int32)
        args = dict(box=box, flag=flag, out=out, guard=b.guard(), N=64, POST=by_post, SETTLE=flushed)
        b.launch(many_threads, 2, args, {}, b.current_stream())
        b.finish(b.current_stream())
        return out.tolist()

    assert spmd(lambda b: fn(b, True), 1, seed=seed)[0] == [list(range(64))]
    with pytest.raises(Race, match=r"race on box\[\d+\]"):
        spmd(lambda b: fn(b, False), 1, seed=seed)


@jit
def add_to(word, SCOPE: tl.constexpr):
    tl.atomic_add(word, 1, sem="relaxed", scope=SCOPE)


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_add_to_one_word_at_scope_sys(seed: int) -> None:
    def fn(b: EmulatedBackend, scopes: tuple[str, str], to: int) -> None:
        word = b.symmetric(4, "word").view(0, (1,), torch.int32)
        for _ in range(2):
            args = dict(word=word.peers[to if to >= 0 else b.rank], SCOPE=scopes[b.rank])
            b.launch(add_to, 2, args, {}, b.current_stream())
        b.synchronize()

    spmd(lambda b: fn(b, ("sys", "sys"), 0), 2, seed=seed)
    spmd(lambda b: fn(b, ("gpu", "gpu"), -1), 2, seed=seed)
    for scopes in (("gpu", "gpu"), ("sys", "gpu")):
        with pytest.raises(Race, match=r'race on word\[0\](.|\n)*atomics of two ranks need scope "sys"'):
            spmd(lambda b, scopes=scopes: fn(b, scopes, 0), 2, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("programs", [1, 2])
def test_scope_cta_orders_nothing_between_programs(programs: int, seed: int) -> None:
    def fn(b: EmulatedBackend) -> None:
        b.launch(add_to, programs, dict(word=b.zeros((1,), torch.int32), SCOPE="cta"), {}, b.current_stream())

    if programs == 1:
        spmd(fn, 1, seed=seed)
        return
    with pytest.raises(Race, match=r'at scope "cta"(.|\n)*scope "cta" orders nothing between programs'):
        spmd(fn, 1, seed=seed)


@jit
def wait_at(flags, guard, SCOPE: tl.constexpr, FENCE: tl.constexpr):
    if FENCE:
        release_fence(SCOPE)
    else:
        wait_until(flags, 0, guard, -1, -1, SCOPE)


@pytest.mark.parametrize("fence", [False, True])
def test_waits_and_fences_of_scope_cta_are_refused(fence: bool) -> None:
    def fn(b: EmulatedBackend) -> None:
        args = dict(flags=b.zeros((1,), torch.int32), guard=b.guard(), SCOPE="cta", FENCE=fence)
        b.launch(wait_at, 1, args, {}, b.current_stream())

    with pytest.raises(ValueError, match=r'SCOPE is "gpu" or "sys", not \'cta\''):
        spmd(fn, 1)


@jit
def fenced_counts(x, flags, out, guard, N: tl.constexpr, MANY: tl.constexpr):
    """Program 0 stores, and increments N flags after one fence; program 1 waits for the first MANY."""
    if tl.program_id(0) == 0:
        tl.store(x, 7)
        flush_stores(False)
        release_fence("gpu")
        tl.atomic_add(flags + tl.arange(0, N), 1, sem="relaxed", scope="gpu")
    else:
        wait_until(flags, 1, guard, -1, -1, "gpu", MANY)
        tl.store(out, tl.load(x))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fence_and_a_wait_are_for_a_warp_of_counters(seed: int) -> None:
    def fn(b: EmulatedBackend, n: int, many: int) -> int:
        x, flags, out = b.empty((1,), torch.int32), b.zeros((n,), torch.int32), b.empty((1,), torch.int32)
        args = dict(x=x, flags=flags, out=out, guard=b.guard(), N=n, MANY=many)
        b.launch(fenced_counts, 2, args, {}, b.current_stream())
        b.finish(b.current_stream())
        return out.item()

    assert spmd(lambda b: fn(b, 32, 32), 1, seed=seed)[0] == [7]
    with pytest.raises((Race, MemoryFault)):
        spmd(lambda b: fn(b, 64, 32), 1, seed=seed)
    with pytest.raises(ValueError, match="at most 32 words, not 33"):
        spmd(lambda b: fn(b, 64, 33), 1, seed=seed)


# -- bulk accesses -----------------------------------------------------------------------------------------------------


@jit
def bulk(desc, out, plain, flag, guard, BLOCK: tl.constexpr, BUG: tl.constexpr):
    """Program 0 stores a block through a descriptor (with PLAIN, by an ordinary store), and program 1 loads it through
    a descriptor."""
    if tl.program_id(0) == 0:
        value = tl.full((BLOCK, BLOCK), 3.0, tl.float32)
        if BUG == "plain" or BUG == "no fence":
            offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            tl.store(plain + offsets, value)
            tl.debug_barrier()
        else:
            desc.store([0, 0], value)
            flush_stores(BUG != "no bulk")
        tl.atomic_add(flag, 1, sem="release", scope="gpu")
    else:
        if BUG == "no fence":
            while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < 1:
                pass
        else:
            wait_until(flag, 1, guard, -1, -1, "gpu")
        tl.store(out, tl.sum(desc.load([0, 0])))


def bulk_case(bug: str) -> Any:
    def fn(b: EmulatedBackend) -> float:
        middle, out, flag = b.empty((16, 16), torch.float32), b.zeros((1,), torch.float32), b.zeros((1,), torch.int32)
        desc = TensorDescriptor.from_tensor(middle, [16, 16])
        args = dict(desc=desc, out=out, plain=middle, flag=flag, guard=b.guard(), BLOCK=16, BUG=bug)
        b.launch(bulk, 2, args, {}, b.current_stream())
        b.finish(b.current_stream())
        return out.item()

    return fn


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bug", ["", "plain"])
def test_bulk_accesses_pass(bug: str, seed: int) -> None:
    assert spmd(bulk_case(bug), 1, seed=seed)[0] == [3.0 * 256]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bug, says", [("no bulk", "flush_stores"), ("no fence", "proxy fence")])
def test_bulk_access_without_its_fence_is_a_race(bug: str, says: str, seed: int) -> None:
    with pytest.raises(Race, match="bulk") as caught:
        spmd(bulk_case(bug), 1, seed=seed)
    assert says in str(caught.value)


@jit
def own_bulk(desc, plain, BLOCK: tl.constexpr, FENCE: tl.constexpr):
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(plain + offsets, tl.full((BLOCK, BLOCK), 1.0, tl.float32))
    if FENCE:
        bulk_fence()
    desc.store([0, 0], desc.load([0, 0]) + 1.0)
    flush_stores()
    tl.store(plain + offsets, tl.load(plain + offsets) + 1.0)


@pytest.mark.parametrize("fence", [True, False])
def test_a_program_own_accesses_through_both_proxies(fence: bool) -> None:
    def fn(b: EmulatedBackend) -> float:
        t = b.empty((16, 16), torch.float32)
        args = dict(desc=TensorDescriptor.from_tensor(t, [16, 16]), plain=t, BLOCK=16, FENCE=fence)
        b.launch(own_bulk, 1, args, {}, b.current_stream())
        b.finish(b.current_stream())
        return t.sum().item()

    if fence:
        assert spmd(fn, 1)[0] == [3.0 * 256]
    else:
        with pytest.raises(Race, match="own bulk and ordinary accesses"):
            spmd(fn, 1)


# -- streams, copies, calls --------------------------------------------------------------------------------------------


def two_streams(event: bool) -> Any:
    def fn(b: EmulatedBackend) -> float:
        x, y, z = torch.ones(64), b.empty((64,), torch.float32), b.empty((64,), torch.float32)
        main, side = b.current_stream(), b.side_stream("copy")
        b.copy(y, x, side)
        if event:
            b.wait_event(main, b.record(side))
        b.call(lambda: torch.add(y, 1, out=z), [y], [z], main)
        b.finish(main)
        return z.sum().item()

    return fn


@pytest.mark.parametrize("seed", SEEDS)
def test_event_orders_streams(seed: int) -> None:
    assert spmd(two_streams(True), 1, seed=seed)[0] == [128.0]
    with pytest.raises((Race, MemoryFault)):
        spmd(two_streams(False), 1, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_finish_orders_nothing(seed: int) -> None:
    """On a GPU `finish` does nothing, so the emulator must not treat it as an edge between streams."""

    def fn(b: EmulatedBackend) -> None:
        x, y = torch.ones(64), b.empty((64,), torch.float32)
        b.copy(y, x, b.side_stream("copy"))
        b.finish(b.side_stream("copy"))
        b.call(lambda: y.add_(1), [y], [y], b.current_stream())

    with pytest.raises(Race, match=r"stream main"):
        spmd(fn, 1, seed=seed)


def copy_signal(bug: str) -> Any:
    """Every rank copies to its neighbour, and a copy engine sets the neighbour's flag."""

    def fn(b: EmulatedBackend) -> float:
        box = b.symmetric(4 * 64, "box").view(0, (64,), torch.float32)
        flag = b.symmetric(4, "flag").view(0, (1,), torch.int32)
        one, to = b.tensor([1], torch.int32), (b.rank + 1) % b.size
        out, main, side = b.empty((64,), torch.float32), b.current_stream(), b.side_stream("copy")
        if bug == "signal first":
            b.signal(flag.peers[to], one, side)
        b.copy(box.peers[to], torch.full((64,), float(b.rank)), side)
        if bug != "signal first":
            b.signal(flag.peers[to], one, b.side_stream("other") if bug == "other stream" else side)
        b.wait(flag.local, one, main)
        b.call(lambda: out.copy_(box.local), [box.local], [out], main)
        b.finish(main)
        return out.sum().item()

    return fn


@pytest.mark.parametrize("seed", SEEDS)
def test_signal_after_copy(seed: int) -> None:
    assert spmd(copy_signal(""), 3, seed=seed)[0] == [128.0, 0.0, 64.0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bug", ["signal first", "other stream"])
def test_signal_that_does_not_wait_for_the_copy_is_a_race(bug: str, seed: int) -> None:
    with pytest.raises(Race, match="box"):
        spmd(copy_signal(bug), 3, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_collectives(seed: int) -> None:
    def fn(b: EmulatedBackend) -> tuple[torch.Tensor, ...]:
        main = b.current_stream()
        x = torch.full((2, 3), float(b.rank + 1)).bfloat16()
        full, part, total = b.empty((2 * b.size, 3), x.dtype), b.empty((2, 3), x.dtype), x.clone()
        b.all_gather(full, x, main)
        b.reduce_scatter(part, full, main)
        b.stream_barrier(main)
        b.all_reduce(total, main)
        b.finish(main)
        return full, part, total

    for rank, (full, part, total) in enumerate(spmd(fn, 3, seed=seed)[0]):
        assert full[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
        assert part[:, 0].tolist() == [3.0 * (rank + 1)] * 2
        assert total[:, 0].tolist() == [6.0, 6.0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_collective_may_not_have_ended_on_the_others(seed: int) -> None:
    def fn(b: EmulatedBackend, own_part: bool, with_barrier: bool) -> None:
        """After an all-gather, every rank clears the shard that it gathered itself (`own_part`) or that its neighbour
        gathered."""
        full = b.symmetric(4 * 8 * b.size, "full").view(0, (8 * b.size,), torch.float32)
        main = b.current_stream()
        b.all_gather(full.local, torch.ones(8), main)
        if with_barrier:
            b.stream_barrier(main)
        b.copy(full.peers[b.rank if own_part else (b.rank + 1) % b.size], torch.zeros(8 * b.size), main)
        b.finish(main)

    spmd(lambda b: fn(b, True, False), 3, seed=seed)
    spmd(lambda b: fn(b, False, True), 3, seed=seed)
    with pytest.raises(Race, match=r"race on full\[0\].*\n.*all_gather"):
        spmd(lambda b: fn(b, False, False), 3, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all"])
def test_a_collective_orders_its_receivers(kind: str, seed: int) -> None:
    def fn(b: EmulatedBackend, rows: int) -> None:
        """Every rank writes to its neighbour's box, and the neighbour reads it after the collective."""
        box = b.symmetric(4 * 8, "box").view(0, (8,), torch.float32)
        main, out, left = b.current_stream(), b.empty((8,), torch.float32), (b.rank - 1) % b.size
        b.copy(box.peers[(b.rank + 1) % b.size], torch.ones(8), main)
        if kind == "all_reduce":
            b.all_reduce(torch.ones(rows), main)
        else:  # each rank receives rows from its left neighbour only
            outs = [torch.zeros(rows if r == left else 0, 4) for r in range(b.size)]
            parts = [torch.ones(rows if b.rank == (r - 1) % b.size else 0, 4) for r in range(b.size)]
            b.all_to_all(outs, parts, main)
        b.copy(out, box.local, main)
        b.finish(main)

    spmd(lambda b: fn(b, 2), 3, seed=seed)
    with pytest.raises(Race, match="box"):
        spmd(lambda b: fn(b, 0), 3, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_collectives_in_different_order_mismatch(seed: int) -> None:
    def fn(b: EmulatedBackend) -> None:
        x, main = torch.ones(4), b.current_stream()
        b.all_reduce(x, main) if b.rank else b.all_gather(b.empty((8,), x.dtype), x, main)
        b.finish(main)

    with pytest.raises(Mismatch, match=r"all_reduce.*all_gather|all_gather.*all_reduce"):
        spmd(fn, 2, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_meet_orders_ranks(seed: int) -> None:
    def fn(b: EmulatedBackend, with_barrier: bool) -> float:
        box = b.symmetric(4 * 8, "box").view(0, (8,), torch.float32)
        main, out = b.current_stream(), b.empty((8,), torch.float32)
        b.call(lambda: box.local.fill_(b.rank), [], [box.local], main)
        if with_barrier:
            b.stream_barrier(main)
        b.copy(out, box.peers[1 - b.rank], main)
        b.finish(main)
        return out[0].item()

    assert spmd(lambda b: fn(b, True), 2, seed=seed)[0] == [1.0, 0.0]
    with pytest.raises(Race, match="box"):
        spmd(lambda b: fn(b, False), 2, seed=seed)


def test_missing_rank_in_a_collective_or_exchange_deadlocks() -> None:
    def collective(b: EmulatedBackend) -> None:
        if b.rank:
            b.stream_barrier(b.current_stream())
            b.finish(b.current_stream())

    def host(b: EmulatedBackend) -> None:
        if b.rank:
            b.exchange(1)

    with pytest.raises(Deadlock, match=r"stream main waits for barrier \(collective 0\) of ranks \[0\]"):
        spmd(collective, 2)
    with pytest.raises(Deadlock, match=r"rank 1 host waits for exchange 0, which ranks \[0\] have not") as caught:
        spmd(host, 2)
    assert "rank 0 host has returned" in str(caught.value)
    assert str(caught.value).startswith("1 task waits and cannot go on")


def test_exchange_and_failing_rank() -> None:
    assert spmd(lambda b: b.exchange((b.rank, "x")), 3)[0] == [[(0, "x"), (1, "x"), (2, "x")]] * 3

    def fn(b: EmulatedBackend) -> None:
        b.exchange(0)
        if b.rank == 1:
            raise KeyError("mine")
        b.exchange(0)

    with pytest.raises(KeyError, match="mine") as caught:
        spmd(fn, 2)
    assert "raised by rank 1 of 2" in caught.value.__notes__[0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, b: EmulatedBackend) -> torch.Tensor:
        ctx.b = b
        return x * len(b.exchange(0))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g * sum(ctx.b.exchange(g[0].item())), None


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_keep_their_own_gradient_mode_and_backward(seed: int) -> None:
    def fn(b: EmulatedBackend) -> float:
        with torch.no_grad():
            b.exchange(0)
            assert not torch.is_grad_enabled()
            b.exchange(0)
        assert torch.is_grad_enabled()
        x = torch.ones(4, requires_grad=True)
        (Doubled.apply(x, b) * (b.rank + 1)).sum().backward()
        return x.grad[0].item()

    assert spmd(fn, 3, seed=seed)[0] == [6.0, 12.0, 18.0]


# -- residency ---------------------------------------------------------------------------------------------------------


@jit
def grid_barrier(counter, guard, PROGRAMS: tl.constexpr):
    flush_stores(False)
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    wait_until(counter, PROGRAMS, guard, -1, -1, "gpu")


@pytest.mark.parametrize("seed", SEEDS)
def test_grid_that_waits_on_itself_must_be_resident(seed: int) -> None:
    def fn(b: EmulatedBackend, programs: int) -> None:
        args = dict(counter=b.zeros((1,), torch.int32), guard=b.guard(), PROGRAMS=programs)
        b.launch(grid_barrier, programs, args, {}, b.current_stream())
        b.finish(b.current_stream())

    spmd(lambda b: fn(b, 4), 1, seed=seed, sm_count=4)
    with pytest.raises(Deadlock, match=r"grid_barrier\[4..4\] are not resident: all 4 SMs of the rank are held by"):
        spmd(lambda b: fn(b, 5), 1, seed=seed, sm_count=4)


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels_of_two_streams_share_the_slots(seed: int) -> None:
    """A spinning kernel that occupies the whole rank prevents the kernel that would release it from starting."""

    def fn(b: EmulatedBackend, programs: int) -> None:
        counter, guard = b.zeros((1,), torch.int32), b.guard()
        b.launch(spin, programs, dict(counter=counter, guard=guard), {}, b.current_stream())
        b.launch(grid_barrier, 1, dict(counter=counter, guard=guard, PROGRAMS=1), {}, b.side_stream("late"))
        b.finish(b.current_stream())

    spmd(lambda b: fn(b, 3), 1, seed=seed, sm_count=4)
    if seed % 4 == 0:  # with virtual time, the spinning kernel starts first
        with pytest.raises(Deadlock, match="not resident"):
            spmd(lambda b: fn(b, 4), 1, seed=seed, sm_count=4)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["call", "all_reduce"])
def test_library_work_needs_an_sm(kind: str, seed: int) -> None:
    """A kernel waits for a flag that is set after work by cuBLAS or NCCL, and must leave an SM free for that work."""

    def fn(b: EmulatedBackend, programs: int) -> None:
        counter, x, one = b.zeros((1,), torch.int32), b.zeros((4,), torch.float32), b.tensor([1], torch.int32)
        main, side = b.current_stream(), b.side_stream("late")
        b.launch(spin, programs, dict(counter=counter, guard=b.guard()), {}, main)
        if kind == "call":
            b.call(lambda: x.fill_(1.0), [], [x], side)
        else:
            b.all_reduce(x, side)
        b.signal(counter, one, side)
        b.finish(main)

    spmd(lambda b: fn(b, 3), 2, seed=seed, sm_count=4)
    if seed % 4 == 0:  # the spinning kernel starts first
        with pytest.raises(Deadlock, match="waits for an SM for .*: all 4 SMs of the rank are held by rank . spin"):
            spmd(lambda b: fn(b, 4), 2, seed=seed, sm_count=4)


@pytest.mark.parametrize("seed", SEEDS)
def test_collectives_of_one_communicator_go_one_after_another(seed: int) -> None:
    def fn(b: EmulatedBackend, on: Any, early: bool) -> None:
        """The first kernel waits for a flag that is set after (or before) the second kernel."""
        flag, one = b.zeros((1,), torch.int32), b.tensor([1], torch.int32)
        first_stream, second_stream = b.side_stream("first"), b.side_stream("second")
        b.wait(flag, one, first_stream)
        b.all_reduce(b.zeros((4,), torch.float32), first_stream)
        if early:
            b.signal(flag, one, second_stream)
        b.all_reduce(b.zeros((4,), torch.float32), second_stream, on)
        b.signal(flag, one, second_stream)
        b.finish(first_stream)

    spmd(lambda b: fn(b, b.communicator(2), False), 2, seed=seed)
    spmd(lambda b: fn(b, None, True), 2, seed=seed)
    with pytest.raises(Deadlock, match=r"stream second waits for all_reduce \(collective 0\) of ranks \[0, 1\]"):
        spmd(lambda b: fn(b, None, False), 2, seed=seed)


@jit
def spin(counter, guard):
    wait_until(counter, 1, guard, -1, -1, "gpu")


# -- memory ------------------------------------------------------------------------------------------------------------


@jit
def shift(x, y, distance, N: tl.constexpr):
    tl.store(y + tl.arange(0, N), tl.load(x + distance + tl.arange(0, N)))


def shifted(make: Any, distance: int) -> Any:
    def fn(b: EmulatedBackend) -> list[float]:
        x, y = make(b), b.empty((64,), torch.float32)
        b.launch(shift, 1, dict(x=x, y=y, distance=distance, N=64), {}, b.current_stream())
        b.finish(b.current_stream())
        return y.tolist()

    return fn


def test_unwritten_memory() -> None:
    with pytest.raises(MemoryFault, match=r"read of x\[0\] of rank 0, which nothing has written") as caught:
        spmd(shifted(lambda b: b.empty((64,), torch.float32), 0), 1)
    assert "(shift)" in str(caught.value)
    filled = spmd(shifted(lambda b: b.empty((64,), torch.float32).fill_(2.0), 0), 1)
    assert filled[0][0] == [2.0] * 64

    def half(b: EmulatedBackend) -> torch.Tensor:
        x = b.empty((64,), torch.float32)
        x[:40] = 1.0
        return x

    with pytest.raises(MemoryFault, match=r"x\[40\]"):
        spmd(shifted(half, 0), 1)


@jit
def take_in(x, N: tl.constexpr):
    tl.load(x + tl.arange(0, N))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int16, torch.bfloat16])
def test_no_number_that_host_code_writes_looks_unwritten(dtype: torch.dtype) -> None:
    """The emulator mistakes neither one value in every element nor all values in turn for unwritten memory; the
    adjacent elements remain unwritten."""
    same_size = torch.uint8 if dtype.itemsize == 1 else torch.int16
    every = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32).to(same_size)

    def fn(b: EmulatedBackend, filled: int) -> None:
        unlike_others = every if dtype.itemsize == 1 else every[0x7F80:0x8000]  # the values that are NaN in bf16
        contents = [number.expand(64) for number in unlike_others] + [every, every.flip(0)]
        for content in contents:
            x = b.empty((content.numel(),), dtype)
            x.view(same_size)[:filled].copy_(content[:filled])
            b.launch(take_in, 1, dict(x=x, N=content.numel()), {}, b.current_stream())
            b.finish(b.current_stream())

    spmd(lambda b: fn(b, 2**16), 1)
    with pytest.raises(MemoryFault, match=r"read of x\[8\] of rank 0, which nothing has written"):
        spmd(lambda b: fn(b, 8), 1)


@pytest.mark.parametrize("distance, first_index", [(1, 64), (-1, -1), (60, 64), (100_000_000, 100_000_000)])
def test_out_of_bounds(distance: int, first_index: int) -> None:
    for make in (lambda b: b.zeros((64,), torch.float32), lambda b: torch.zeros(64)):
        with pytest.raises(MemoryFault, match=rf"read of x\[{first_index}\] of rank 0, which has the shape \[64\]"):
            spmd(shifted(make, distance), 1)
        with pytest.raises(MemoryFault, match="outside every tensor"):
            spmd(shifted(lambda b, make=make: beyond(make(b)), distance), 1)


@pytest.mark.parametrize("distance", [64, 128, 192, 1000, 100_000])
def test_past_the_end_of_a_symmetric_tensor_is_no_other_ranks(distance: int) -> None:
    def fn(b: EmulatedBackend) -> None:
        box = b.symmetric(4 * 64, "box").view(0, (64,), torch.float32)
        if b.rank == 0:
            args = dict(x=box.local, y=b.empty((64,), torch.float32), distance=distance, N=64)
            b.launch(shift, 1, args, {}, b.current_stream())
        b.synchronize()

    with pytest.raises(MemoryFault, match=rf"read of \w+\[{distance}\] of rank 0, which has the shape \[64\]"):
        spmd(fn, 2)


@jit
def halves(x, out, N: tl.constexpr, PAST: tl.constexpr, STORE: tl.constexpr):
    offsets = tl.arange(0, N)
    if STORE:
        tl.store(x + PAST + offsets, offsets.to(tl.float32))
    else:
        tl.store(out + offsets, tl.load(x + PAST + offsets))


def rows(b: EmulatedBackend) -> torch.Tensor:
    return torch.zeros(3, 16)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize(
    "make, view, past, first_element",
    [
        (rows, lambda t: t[1], 16, "[16]"),
        (rows, lambda t: t[1], -16, "[-16]"),
        (lambda b: b.zeros((3, 16), torch.float32), lambda t: t[1], 16, "[16]"),
        (lambda b: b.symmetric(192, "box").view(0, (3, 16), torch.float32).local, lambda t: t[:2], 24, "[2, 0]"),
        (rows, lambda t: t[:, :8], 0, "[0, 8]"),  # beyond the first columns
        (rows, lambda t: t[:, ::2], 0, "[0, 0] + 4 bytes"),
    ],
)
def test_a_view_ends_before_its_memory_does(make: Any, view: Any, past: int, first_element: str, store: bool) -> None:
    def fn(b: EmulatedBackend, as_passed: Any, past: int) -> None:
        x = as_passed(make(b))
        args = dict(x=x, out=b.empty((16,), torch.float32), N=16, PAST=past, STORE=store)
        b.launch(halves, 1, args, {}, b.current_stream())
        b.finish(b.current_stream())

    message = rf"{'write' if store else 'read'} of \w+{re.escape(first_element)} of rank \d, which has the shape"
    with pytest.raises(MemoryFault, match=message):
        spmd(lambda b: fn(b, view, past), 1)
    spmd(lambda b: fn(b, lambda t: t, 0), 1)
    spmd(lambda b: fn(b, lambda t: beyond(view(t)), 0), 1)


def test_a_tensor_without_elements() -> None:
    with pytest.raises(MemoryFault, match=r"read of x\[0\] of rank 0, which has the shape \[0\]"):
        spmd(shifted(lambda b: torch.zeros(64)[:0], 0), 1)


@jit
def through_descriptors(desc, x, out, rows, COLS: tl.constexpr, HOST: tl.constexpr):
    r, c = tl.arange(0, 8)[:, None], tl.arange(0, COLS)[None, :]
    if HOST:
        tl.store(out + r * COLS + c, desc.load([0, 0]))
    else:
        device_desc = tl.make_tensor_descriptor(x, [rows, COLS], [COLS, 1], [8, COLS])
        tl.store(out + r * COLS + c, device_desc.load([0, 0]))


@pytest.mark.parametrize("host", [False, True])
def test_a_descriptor_reaches_no_further_than_its_tensor(host: bool) -> None:
    def fn(b: EmulatedBackend, rows: int) -> None:
        x = torch.zeros(16, 16)[:4]
        desc = TensorDescriptor(x, [rows, 16], [16, 1], [8, 16])
        args = dict(desc=desc, x=x, out=b.empty((8, 16), torch.float32), rows=rows, COLS=16, HOST=host)
        b.launch(through_descriptors, 1, args, {}, b.current_stream())
        b.finish(b.current_stream())

    spmd(lambda b: fn(b, 4), 1)
    with pytest.raises(MemoryFault, match=r"bulk read of (x|desc)\[4, 0\] of rank 0, which has the shape \[4, 16\]"):
        spmd(lambda b: fn(b, 8), 1)


class Pair(NamedTuple):
    low: Any
    high: Any


@jit
def from_either(pair, table, out, bad, N: tl.constexpr, HOW: tl.constexpr):
    """Return the even elements of `low` and the odd elements of `high`; with `bad`, return one element too many from
    `low`."""
    offsets = tl.arange(0, N)
    even = offsets % 2 == 0
    if HOW == "where":
        place = tl.where(even, pair.low, pair.high) + offsets
    elif HOW == "table":
        place = tl.load(table + offsets % 2).to(tl.pointer_type(tl.float32)) + offsets
    elif HOW == "integer":
        place = tl.where(even, pair.low.to(tl.int64), pair.high.to(tl.int64)) + 4 * offsets
        place = place.to(tl.pointer_type(tl.float32))
    else:
        low, high = pair.low, pair.high
        for _ in range(3):
            low, high = high, low
        place = tl.where(even, tl.reshape(tl.broadcast_to(high, (N,)), (N,)), low) + offsets
    tl.store(out + offsets, tl.load(place + tl.where(even, bad, 0)))


@pytest.mark.parametrize("how", ["where", "table", "integer", "loop"])
def test_an_address_is_held_to_the_tensor_that_it_came_from(how: str) -> None:
    def fn(b: EmulatedBackend, bad: int) -> list[float]:
        memory = torch.arange(32.0).view(2, 16)
        pair, out = Pair(memory[0, :15], memory[1]), b.empty((16,), torch.float32)
        args = dict(pair=pair, table=b.table(pair, "low"), out=out, bad=bad, N=16, HOW=how)
        b.launch(from_either, 1, args, {}, b.current_stream())
        b.finish(b.current_stream())
        return out.tolist()

    assert spmd(lambda b: fn(b, 0), 1)[0] == [[float(i + 16 * (i % 2)) for i in range(16)]]
    with pytest.raises(MemoryFault, match=r"read of (pair\.)?low\[16\] of rank 0, which has the shape \[15\]"):
        spmd(lambda b: fn(b, 2), 1)


@jit
def peer_rows(addresses, out, start, W: tl.constexpr, N: tl.constexpr, STORE: tl.constexpr):
    """Read the rows of all ranks' copies at once."""
    r, c = tl.arange(0, W), tl.arange(0, N)[None, :]
    rows = tl.load(addresses + r).to(tl.pointer_type(tl.float32))[:, None] + start + c
    if STORE:
        tl.store(rows, tl.zeros((W, N), tl.float32))
    else:
        tl.store(out + r[:, None] * N + c, tl.load(rows))


@pytest.mark.parametrize("store", [False, True])
def test_a_peers_copy_ends_where_the_view_of_it_does(store: bool) -> None:
    def fn(b: EmulatedBackend, start: int) -> None:
        box = b.symmetric(256, "box").view(64, (24,), torch.float32)
        if b.rank == 0:
            args = dict(
                addresses=box.addresses, out=b.empty((2, 16), torch.float32), start=start, W=2, N=16, STORE=store
            )
            b.launch(peer_rows, 1, args, {}, b.current_stream())
        b.synchronize()

    spmd(lambda b: fn(b, 8), 2)
    for start, first_index in ((9, 24), (-16, -16)):
        with pytest.raises(MemoryFault, match=rf"of box\[{first_index}\] of rank 0, which has the shape \[24\]"):
            spmd(lambda b, start=start: fn(b, start), 2)


@jit
def count_at(words, guard, index, WAIT: tl.constexpr):
    if WAIT:
        wait_until(words + index, 0, guard, -1, -1, "gpu")
    else:
        tl.atomic_add(words + index, 1, sem="relaxed", scope="gpu")


@pytest.mark.parametrize("wait", [False, True])
def test_a_counter_outside_the_tensor(wait: bool) -> None:
    def fn(b: EmulatedBackend, index: int) -> None:
        args = dict(words=b.zeros((8,), torch.int32)[:4], guard=b.guard(), index=index, WAIT=wait)
        b.launch(count_at, 1, args, {}, b.current_stream())
        b.finish(b.current_stream())

    spmd(lambda b: fn(b, 3), 1)
    with pytest.raises(MemoryFault, match=r"of words\[4\] of rank 0, which has the shape \[4\]"):
        spmd(lambda b: fn(b, 4), 1)


@jit
def masked(x, y, n, ROWS: tl.constexpr, COLS: tl.constexpr, ODD: tl.constexpr):
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    ok = (r < n) & (c < n)
    if ODD:
        ok = ok & ((r + c) % 2 == 1)
    tl.store(y + r * n + c, tl.load(x + r * n + c, mask=ok, other=-1.0) * 2, mask=ok)
    tl.debug_barrier()
    i = tl.arange(0, ROWS) * 7 % ROWS
    tl.store(y + i, tl.load(y + i, mask=i < 3, other=0.0), mask=i < 3)


@pytest.mark.parametrize("odd", [False, True])
def test_masked_and_scattered_accesses_stay_inside(odd: bool) -> None:
    n = 11
    x = torch.arange(float(n * n)).view(n, n)

    def fn(b: EmulatedBackend) -> torch.Tensor:
        y = b.zeros((n, n), torch.float32)
        b.launch(masked, 1, dict(x=x.clone(), y=y, n=n, ROWS=16, COLS=16, ODD=odd), {}, b.current_stream())
        b.finish(b.current_stream())
        return y

    expected = 2 * x
    if odd:
        expected = expected * ((torch.arange(n)[:, None] + torch.arange(n)) % 2 == 1)
    assert torch.equal(spmd(fn, 1)[0][0], expected)


@jit
def sum_of_some(x, out, n, N: tl.constexpr, ODD: tl.constexpr, OTHER: tl.constexpr):
    offsets = tl.arange(0, N)
    ok = offsets % 2 < n if ODD else offsets < n
    tl.store(out, tl.sum(tl.load(x + offsets, mask=ok, other=OTHER)))


@pytest.mark.parametrize("odd", [False, True])
def test_a_masked_load_without_other_is_undefined_there(odd: bool) -> None:
    def fn(b: EmulatedBackend, filler: float | None) -> float:
        out = b.empty((1,), torch.float32)
        b.launch(
            sum_of_some, 1, dict(x=torch.ones(16), out=out, n=1, N=16, ODD=odd, OTHER=filler), {}, b.current_stream()
        )
        b.finish(b.current_stream())
        return out.item()

    assert spmd(lambda b: fn(b, 0.0), 1)[0] == [8.0 if odd else 1.0]
    assert np.isnan(spmd(lambda b: fn(b, None), 1)[0][0])


@pytest.mark.parametrize(("filler", "loaded"), [(0.0, 0.0), (2.0, 2.0), (None, np.nan)])
def test_one_element_that_is_masked_is_other(filler: float | None, loaded: float) -> None:
    """The kernel loads a scalar and a block of one element, for which Triton's own interpreter ignores `other`."""

    @jit
    def one(x, out, n, OTHER: tl.constexpr):
        offsets = tl.arange(0, 1)
        tl.store(out + offsets, tl.load(x + offsets, mask=offsets < n, other=OTHER))
        tl.store(out + 1, tl.load(x, mask=n > 0, other=OTHER))

    def fn(b: EmulatedBackend) -> list[float]:
        out = b.empty((2,), torch.float32)
        b.launch(one, 1, dict(x=torch.ones(1), out=out, n=0, OTHER=filler), {}, b.current_stream())
        b.finish(b.current_stream())
        return out.tolist()

    assert np.array_equal(spmd(fn, 1)[0][0], [loaded] * 2, equal_nan=True)


def test_edge_of_a_descriptor() -> None:
    @jit
    def clip(src, dst, BLOCK: tl.constexpr):
        dst.store([8, 8], src.load([8, 8]) + 1.0)

    def fn(b: EmulatedBackend) -> torch.Tensor:
        x, y = torch.ones(12, 12), b.zeros((12, 12), torch.float32)
        args = dict(src=TensorDescriptor.from_tensor(x, [8, 8]), dst=TensorDescriptor.from_tensor(y, [8, 8]), BLOCK=8)
        b.launch(clip, 1, args, {}, b.current_stream())
        b.finish(b.current_stream())
        return y

    y = spmd(fn, 1)[0][0]
    assert (y[8:, 8:] == 2).all() and y.sum() == 2 * 16


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_used_again_has_no_past(seed: int) -> None:
    """A tensor at the address of a freed tensor must not be blamed for the freed tensor's accesses."""
    buffers = [np.zeros(1024, np.float32) for _ in range(2)]

    def fn(b: EmulatedBackend, again: bool) -> None:
        y = torch.from_numpy(buffers[1])
        for i in range(6):
            x = torch.from_numpy(buffers[0]).fill_(i)
            y = torch.from_numpy(buffers[1]) if again else y
            stream = b.side_stream(f"s{i % 3}")  # the streams are not ordered
            b.copy(y, x, stream)
            b.finish(stream)
            assert y[5].item() == i

    spmd(lambda b: fn(b, True), 1, seed=seed)
    with pytest.raises(Race):
        spmd(lambda b: fn(b, False), 1, seed=seed)


# -- numbers -----------------------------------------------------------------------------------------------------------


@jit
def arithmetic(x, y, out, N: tl.constexpr, OP: tl.constexpr):
    offsets = tl.arange(0, N)
    a, b = tl.load(x + offsets), tl.load(y + offsets)
    if OP == "add":
        r = a + b
    elif OP == "sub":
        r = a - b
    elif OP == "mul":
        r = a * b
    elif OP == "scale":
        r = a * 1.7
    elif OP == "neg":
        r = -a
    elif OP == "where":
        r = tl.where(a > b, a, b)
    elif OP == "minimum":
        r = tl.minimum(a, b)
    elif OP == "maximum":
        r = tl.maximum(a, b)
    elif OP == "abs":
        r = tl.abs(a)
    elif OP == "less":
        r = (a < b).to(a.dtype)
    elif OP == "equal":
        r = (a == a).to(tl.int32).to(a.dtype)
    elif OP == "int":
        r = (a * 100).to(tl.int32).to(a.dtype)
    elif OP == "exp":
        r = tl.exp(a.to(tl.float32)).to(a.dtype)
    elif OP == "clamp":
        r = tl.clamp(a, b * 0 - 0.5, b * 0 + 0.5)
    elif OP == "sum":
        r = tl.sum(a.to(tl.float32)).to(a.dtype) + b * 0
    elif OP == "max":
        r = tl.max(a, axis=0) + b * 0
    elif OP == "min":
        r = tl.min(a) + b * 0
    elif OP == "full":
        r = tl.full((N,), 1.3, a.dtype) + tl.zeros_like(b)
    tl.store(out + offsets, r)


_TORCH = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "scale": lambda a, b: a * torch.tensor(1.7).to(a.dtype),
    "neg": lambda a, b: -a,
    "where": lambda a, b: torch.where(a > b, a, b),
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "abs": lambda a, b: a.abs(),
    "less": lambda a, b: (a < b).to(a.dtype),
    "equal": lambda a, b: torch.ones_like(a),
    "int": lambda a, b: (a * torch.tensor(100.0).to(a.dtype)).int().to(a.dtype),
    "exp": lambda a, b: a.float().exp().to(a.dtype),
    "clamp": lambda a, b: a.clamp(-0.5, 0.5),
    "sum": lambda a, b: a.float().sum().to(a.dtype).expand(a.shape),
    "max": lambda a, b: a.max().expand(a.shape),
    "min": lambda a, b: a.min().expand(a.shape),
    "full": lambda a, b: torch.full_like(a, 1.3),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("op", sorted(_TORCH))
def test_arithmetic(op: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    x, y = (torch.randn(64, generator=g).to(dtype) for _ in range(2))

    def fn(b: EmulatedBackend) -> torch.Tensor:
        out = b.empty((64,), dtype)
        b.launch(arithmetic, 1, dict(x=x, y=y, out=out, N=64, OP=op), {}, b.current_stream())
        b.finish(b.current_stream())
        return out

    actual, expected = spmd(fn, 1)[0][0], _TORCH[op](x, y)
    exact = op not in ("exp", "sum") and not (dtype == torch.float32 and op == "scale")
    assert torch.equal(actual, expected) if exact else torch.allclose(actual.float(), expected.float(), rtol=2**-7)


@jit
def dots(x, y, out, N: tl.constexpr):
    offsets = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(x + offsets), tl.load(y + offsets)
    acc = tl.dot(a, b.T, tl.full((N, N), 1.0, tl.float32))
    acc = tl.dot(a, tl.trans(b), acc)
    lo, hi = tl.split(tl.permute(tl.reshape(acc, (N, 2, N // 2)), (0, 2, 1)))
    c = tl.arange(0, N)[:, None] * N + tl.arange(0, N // 2)[None, :]
    tl.store(out + c, lo)
    tl.store(out + c + N // 2, hi)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_accumulates_in_fp32(dtype: torch.dtype) -> None:
    x, y = torch.randn(32, 32).to(dtype) * 30, torch.randn(32, 32).to(dtype) * 30

    def fn(b: EmulatedBackend) -> torch.Tensor:
        out = b.empty((32, 32), torch.float32)
        b.launch(dots, 1, dict(x=x, y=y, out=out, N=32), {}, b.current_stream())
        b.finish(b.current_stream())
        return out

    expected = 2 * (x.double() @ y.double().T) + 1
    assert ((spmd(fn, 1)[0][0] - expected).norm() / expected.norm()).item() < 1e-6


def test_bf16_rounds_to_nearest_even_as_torch_does() -> None:
    from weft.emulator.interpret import to_bf16

    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    expected = torch.from_numpy(x.copy()).bfloat16()
    actual = torch.from_numpy(to_bf16(x).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(torch.nan_to_num(actual, 7.0), torch.nan_to_num(expected, 7.0))


@jit
def integers(out, a, b, big, f, flag, nothing, LIST: tl.constexpr):
    tl.store(out + 0, a // b)
    tl.store(out + 1, a % b)
    tl.store(out + 2, (a - 2 * a) // b)
    tl.store(out + 3, (a - 2 * a) % b)
    n = 0
    for i in tl.range(1, 10, 3, flatten=True, num_stages=2, warp_specialize=False):
        n += (i - 5).to(tl.int64) % 3
    tl.store(out + 4, n)
    tl.store(out + 5, big // 1000)
    tl.store(out + 6, (f * 10).to(tl.int64))
    if flag and nothing is None:
        tl.store(out + 7, tl.cdiv(a, b) + tl.maximum(a, b) + min(a, b) + max(a, b))
    for k in tl.static_range(2):
        tl.store(out + 8 + k, LIST[k])


def test_integers_follow_c_and_arguments_keep_their_kind() -> None:
    def fn(b: EmulatedBackend) -> list[int]:
        out = b.zeros((10,), torch.int64)
        args = dict(out=out, a=7, b=3, big=1 << 40, f=1.55, flag=True, nothing=None, LIST=(4, 5))
        b.launch(integers, 1, args, {}, b.current_stream())
        b.finish(b.current_stream())
        return out.tolist()

    assert spmd(fn, 1)[0][0] == [2, 1, -2, -1, -1 - 1 + 2, (1 << 40) // 1000, 15, 3 + 7 + 3 + 7, 4, 5]


@jit
def says(y, i, LEAST: tl.constexpr):
    value = tl.load(y + tl.arange(0, 4))
    tl.device_print("y", value)
    tl.device_print("i", i, hex=True)
    tl.device_assert(value >= LEAST, "too small")
    tl.device_assert(value > LEAST, "not asked", mask=value > LEAST)


def test_device_print_and_assert(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(b: EmulatedBackend, least: int) -> None:
        args = dict(y=torch.tensor([2.0, 0.5, 1.0, 3.0]).bfloat16(), i=31, LEAST=least)
        b.launch(says, 1, args, {}, b.current_stream())
        b.finish(b.current_stream())

    spmd(lambda b: fn(b, 0), 1)
    assert capsys.readouterr().out == "rank 0 says[0] y: [2.  0.5 1.  3. ]\nrank 0 says[0] i: [0x1f]\n"
    with pytest.raises(AssertionError, match=r"tl.device_assert: too small\n +rank 0 says\[0\] at .*\(says\)"):
        spmd(lambda b: fn(b, 1), 1)


# -- threads of one program --------------------------------------------------------------------------------------------


@jit
def hand_over(x, out, guard, HOW: tl.constexpr, BETWEEN: tl.constexpr):
    """Store to x [16, 16] and load it again."""
    r, c, offsets = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, 256)
    if HOW == "scalar" or HOW == "scalar to all":
        tl.store(x, 1)
    elif HOW == "pairs":
        tl.store(x.to(tl.pointer_type(tl.int64)) + tl.arange(0, 128), tl.full((128,), (1 << 32) + 1, tl.int64))
    elif HOW == "scattered":
        tl.store(x + offsets * 7 % 256, offsets)
    elif HOW == "some":
        tl.store(x + offsets, offsets, mask=offsets % 2 == 0)
    else:
        tl.store(x + r * 16 + c, r + c)
    if BETWEEN == "barrier":
        tl.debug_barrier()
    elif BETWEEN == "flush_stores":
        flush_stores(False)
    elif BETWEEN == "wait":
        wait_until(x, 0, guard, -1, -1, "gpu")
    elif BETWEEN == "acquire":
        tl.atomic_add(guard.to(tl.pointer_type(tl.int32)), 0, sem="acquire", scope="gpu")
    if HOW == "scalar":
        tl.store(out, tl.load(x))
    elif HOW == "transposed":
        tl.store(out + r * 16 + c, tl.load(x + c * 16 + r))
    elif HOW == "row":
        tl.store(out + tl.arange(0, 16), tl.load(x + 32 + tl.arange(0, 16)))
    elif HOW == "same":
        tl.store(out + r * 16 + c, tl.load(x + r * 16 + c, mask=c < 9, other=0))
    elif HOW == "scattered":
        tl.store(out + offsets, tl.load(x + offsets * 9 % 256))
    elif HOW == "some":
        tl.store(out + offsets, tl.load(x + (offsets + 1) % 256, mask=offsets % 4 == 1, other=0))
    else:
        tl.store(out + offsets, tl.load(x + offsets))


MOVES = ["scalar", "scalar to all", "transposed", "flat", "row", "pairs", "scattered", "some"]


def handed(how: str, between: str) -> Any:
    def fn(b: EmulatedBackend) -> None:
        x, out = b.zeros((16, 16), torch.int32), b.empty((256,), torch.int32)
        b.launch(hand_over, 1, dict(x=x, out=out, guard=b.guard(), HOW=how, BETWEEN=between), {}, b.current_stream())
        b.finish(b.current_stream())

    return fn


@pytest.mark.parametrize("how", MOVES)
def test_a_load_of_another_threads_store_is_a_race(how: str) -> None:
    with pytest.raises(Race, match=r"race on x\[\d+, \d+\] of rank 0: read after write by another thread") as caught:
        spmd(handed(how, ""), 1)
    assert len(set(re.findall(r"hand_over\[0\] at .*test_emulator\.py:(\d+) \(hand_over\)", str(caught.value)))) == 2


@pytest.mark.parametrize("how, between", [(m, b) for m in MOVES for b in ("barrier", "flush_stores")] + [
    ("transposed", "wait"), ("transposed", "acquire"), ("same", ""),
])  # fmt: skip
def test_a_load_by_the_storing_thread_or_after_a_barrier_is_no_race(how: str, between: str) -> None:
    spmd(handed(how, between), 1)


@jit
def in_place(x, T: tl.constexpr, N: tl.constexpr):
    """Keep every block's elements in their threads."""
    offsets = tl.arange(0, N)
    for _ in range(2):
        for i in range(T):
            tl.store(x + i * N + offsets, tl.load(x + i * N + offsets) + 1.0)


def test_a_program_that_works_in_place_is_no_race() -> None:
    def fn(b: EmulatedBackend) -> float:
        x = b.zeros((4, 16), torch.float32)
        b.launch(in_place, 1, dict(x=x, T=4, N=16), {}, b.current_stream())
        b.finish(b.current_stream())
        return x.sum().item()

    assert spmd(fn, 1)[0] == [128.0]


# -- the run itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_is_a_schedule(seed: int) -> None:
    first_run, second_run = (spmd(gather(), 2, seed=seed, preempt=0.5)[1] for _ in range(2))
    assert (first_run.schedule, first_run.switches, first_run.accesses) == (
        second_run.schedule,
        second_run.switches,
        second_run.accesses,
    )
    assert [(s.track, s.start, s.end) for s in first_run.timeline] == [
        (s.track, s.start, s.end) for s in second_run.timeline
    ]


def test_seeds_differ() -> None:
    assert len({spmd(gather(), 2, seed=seed, preempt=0.5)[1].schedule for seed in range(12)}) > 8


def test_without_race_checks() -> None:
    assert max(spmd(gather(), 2, races=False)[0]) < 1e-4


def test_timeline() -> None:
    _, report = spmd(gather(), 2, seed=0)
    spans = report.timeline
    waits = [s for s in spans if s.kind == "wait" and s.track.startswith("take")]
    assert waits and all(s.releaser is not None and s.releaser[1].startswith("push") for s in waits)
    assert all(">= 1" in s.detail and s.end > s.start for s in waits)
    programs = {(rank, f"take:{index}") for rank in (0, 1) for index in (0, 1)}
    assert programs <= {(s.rank, s.track) for s in spans if s.kind == "compute"}
    for s in waits:  # a wait cannot end before the releasing program's work began
        begun = min(t.start for t in spans if (t.rank, t.track) == s.releaser)
        assert s.end >= begun
    tracks: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for s in spans:
        tracks.setdefault((s.rank, s.track), []).append((s.start, s.end))
    for intervals in tracks.values():
        intervals.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(intervals, intervals[1:], strict=False))


def test_the_same_process_compiles_afterwards() -> None:
    spaces = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.block_type, tl.core.tensor_descriptor_base, type(push))
    before = [dict(vars(space)) for space in spaces]
    names = set(push.fn.__globals__)
    spmd(gather(), 2)
    assert set(push.fn.__globals__) == names
    for space, old in zip(spaces, before, strict=True):
        assert dict(vars(space)).keys() == old.keys() and all(vars(space)[k] is v for k, v in old.items()), space
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        tl.cdiv(4, 2)
    i32, i64 = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    job = Job(Flags(i32, i64, i64), 1, tl.constexpr(2))
    x = torch.zeros(ROWS, COLS, dtype=torch.bfloat16)
    args = dict(job=job, full=x, out=torch.zeros(64), ROWS=ROWS, COLS=COLS, BUG="", SCOPE="sys")
    compiled = compile_kernel(take, args, dict(num_warps=4))
    assert "ld.acquire.sys" in compiled.ptx
    assert max(spmd(gather(), 2)[0]) < 1e-4


# -- the contents of a report ------------------------------------------------------------------------------------------


def line_of(text: str) -> int:
    """Return the number of the line in this file whose comment contains the text."""
    lines = Path(__file__).read_text().splitlines()
    (line_number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {text}")]
    return line_number


@jit
def several_stores(log, own_box, addresses, out, epoch, ch, N: tl.constexpr, LATE: tl.constexpr):
    """Rank 0 writes to rank 1 after its notify (LATE), or rank 1 reads before its wait."""
    offsets, me = tl.arange(0, N), wl.rank_of(ch)
    if me == 0:
        if LATE:
            wl.channel_notify(ch, 0, 1, False)
        tl.store(log + offsets, offsets)
        wl.tile_push_data(addresses, 1, offsets, offsets, offsets < N)  # the write
        if not LATE:
            wl.channel_notify(ch, 0, 1, False)
    else:
        if LATE:
            wl.channel_wait(ch, 0, 1, 0, 0)
        tl.store(out + offsets, tl.load(log + offsets))
        tl.store(out + offsets, tl.load(own_box + offsets))  # the read
    wl.end_call(ch, epoch, tl.num_programs(0))


@pytest.mark.parametrize("late", [True, False])
def test_a_race_names_the_statements_that_made_it(late: bool) -> None:
    """Just before the race, different statements of the two programs access different memory in the same way."""

    def main(world: weft.World) -> None:
        ch, epoch = world.channel("c", 1, None), world.zeros((1,), torch.int32)
        box, log, out = (world.symmetric((16,), torch.int32, name) for name in ("box", "log", "out"))
        args = dict(log=log.local, own_box=box.local, addresses=box.addresses, out=out.local, epoch=epoch, ch=ch)
        world.launch(several_stores, 1, dict(N=16, LATE=late, **args), {}, world.current_stream())
        world.synchronize()

    write, read = line_of("the write"), line_of("the read")
    orders = set()
    for seed in range(12):
        with pytest.raises(Race, match=r"race on (own_box|box)") as caught:
            weft.spmd(main, 2, backend="emulated", seed=seed)
        lines = re.findall(r"test_emulator\.py:(\d+) \(several_stores\)", str(caught.value))
        orders.add(tuple(map(int, lines)))
    assert orders == {(write, read), (read, write)}


@jit
def exchanged(x, boxes, own_boxes, out, epoch, ch, half, N: tl.constexpr, HALVES: tl.constexpr, COUNTED: tl.constexpr):
    """Program p sends x [N] to rank p and reads the data that rank p sent."""
    me, p, offsets = wl.rank_of(ch), tl.program_id(0), tl.arange(0, N)
    base = tl.load(epoch) % HALVES * half
    wl.tile_push_data(boxes, p, base + me * N + offsets, tl.load(x + offsets), offsets < N)
    wl.peer_tile_notify(ch, me, p, False)
    wl.peer_tile_wait(ch, p, p)
    tl.store(out + p * N + offsets, tl.load(own_boxes + base + p * N + offsets))
    if COUNTED:
        wl.end_call(ch, epoch, tl.num_programs(0) + (COUNTED == "too few"))


def three_calls(bug: str) -> Any:
    def main(world: weft.World) -> None:
        w, n = world.size, 16
        memory, ch = world.symmetric((2, w, n), torch.float32, "box"), world.channel("c", w, None)
        epoch = world.zeros((1,), torch.int32)
        for _ in range(3):
            x, out = torch.ones(n), world.empty((w, n), torch.float32)
            if bug == "epoch":
                epoch = world.zeros((1,), torch.int32)
            args = dict(
                x=x, boxes=memory.addresses, own_boxes=memory.local, out=out, epoch=epoch, ch=ch, half=w * n, N=n
            )
            args.update(
                HALVES=1 if bug == "halves" else 2, COUNTED={"no end_call": "", "too few": "too few"}.get(bug, "all")
            )
            world.launch(exchanged, w, args, {}, world.current_stream())
        world.synchronize()

    return main


EARLY = r"a write after a read of an earlier call: rank (\d) reads in launch (\d) \(call (\d)\), rank (\d) writes in launch (\d) \(call (\d)\) of exchanged"


@pytest.mark.parametrize("bug", ["halves", "epoch"])
@pytest.mark.parametrize("seed", SEEDS)
def test_reuse_of_memory_that_a_peer_reads_is_reported_as_reuse(bug: str, seed: int) -> None:
    """The cause is either a single buffer where two are needed, or an epoch word that starts again; either access may
    come first."""
    weft.spmd(three_calls(""), 2, backend="emulated", seed=seed)
    with pytest.raises(Race, match=EARLY) as caught:
        weft.spmd(three_calls(bug), 2, backend="emulated", seed=seed)
    reader, read, read_call, writer, write, write_call = map(int, re.search(EARLY, str(caught.value)).groups())
    assert reader != writer and read == read_call < write == write_call
    assert "flush_stores" not in str(caught.value)


@pytest.mark.parametrize(
    "bug, why", [("no end_call", "no end_call"), ("too few", r"end_call counts \d programs so far")]
)
def test_an_uncounted_call_is_reported(bug: str, why: str) -> None:
    for seed in SEEDS:
        with pytest.raises(Race) as caught:
            weft.spmd(three_calls(bug), 2, backend="emulated", seed=seed)
        assert re.search(rf"rank \d exchanged, launch [23], but the call number is still 1: {why}", str(caught.value))
        assert "flush_stores" not in str(caught.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_into_memory_that_a_peers_kernel_still_reads(seed: int) -> None:
    """On each rank the copies of the second call follow the first launch; earlier operations belong to the first
    call."""

    def main(world: weft.World, calls: int, wait: bool) -> None:
        box, out = world.symmetric((16,), torch.float32, "box"), world.empty((16,), torch.float32)
        ch, epoch, main = world.channel("c", 1, None, 1), world.zeros((1,), torch.int32), world.current_stream()
        for n in range(1, calls + 1):
            wl.rank_copy_data(world, box.peers[1 - world.rank], torch.ones(16), main)
            wl.rank_notify(world, ch, 0, 1 - world.rank, world.tensor([n], torch.int32), main)
            args = dict(x=box.local, out=out, epoch=epoch, ch=ch, N=16, WAIT=wait)
            world.launch(taken, 1, args, {}, main)
        world.synchronize()

    weft.spmd(lambda world: main(world, 1, True), 2, backend="emulated", seed=seed)
    text = r"rank (\d) reads in launch 1 \(call 1\), rank (\d) writes between launches 1 and 2 of taken"
    with pytest.raises(Race, match=text):
        weft.spmd(lambda world: main(world, 2, True), 2, backend="emulated", seed=seed)
    with pytest.raises(Race) as caught:
        weft.spmd(lambda world: main(world, 1, False), 2, backend="emulated", seed=seed)
    assert "earlier call" not in str(caught.value)


@jit
def taken(x, out, epoch, ch, N: tl.constexpr, WAIT: tl.constexpr):
    if WAIT:
        wl.channel_wait(ch, 0, 1, -1, -1)
    tl.store(out + tl.arange(0, N), tl.load(x + tl.arange(0, N)))
    wl.end_call(ch, epoch, 1)


def test_a_world_is_of_no_use_after_its_run() -> None:
    x = torch.ones(8, 8, dtype=torch.bfloat16)

    def keep(world: weft.World, fails: bool) -> None:
        worlds.append(world)
        weft.all_gather_matmul(x, x, world=world)
        assert not fails

    for fails in (False, True):
        worlds: list[weft.World] = []
        with contextlib.suppress(AssertionError):
            weft.spmd(lambda world, fails=fails: keep(world, fails), 2, backend="emulated")
        for use in (
            lambda world: world.synchronize(),
            lambda world: world.exchange(1),
            lambda world: world.current_stream(),
            lambda world: world.empty((2,), torch.float32),
            lambda world: weft.all_gather_matmul(x, x, world=world),
        ):
            with pytest.raises(weft.WeftError, match=r"rank 0's World belongs to an emulated run that has ended"):
                use(worlds[0])


@jit
def own_row(x, out, epoch, ch, N: tl.constexpr, DOES: tl.constexpr):
    """DOES selects whether the first program notifies, and whether all programs wait for it. Each program computes one
    row."""
    p, offsets = tl.program_id(0), tl.arange(0, N)
    tl.store(out + p * N + offsets, tl.load(x + offsets))
    if DOES != "nothing" and p == 0:
        wl.channel_notify(ch, 0, wl.rank_of(ch), False)
    if DOES == "waits":
        wl.channel_wait(ch, 0, 1, -1, -1)
    wl.end_call(ch, epoch, tl.num_programs(0))


@pytest.mark.parametrize("does", ["nothing", "notifies", "waits"])
def test_a_grid_that_is_not_resident_is_reported_where_it_signals(does: str) -> None:
    """The first program notifies, so the test ends under every schedule; on a GPU the end depends on which program
    starts first."""

    def main(world: weft.World, programs: int) -> None:
        out, epoch = world.empty((programs, 16), torch.float32), world.zeros((1,), torch.int32)
        args = dict(x=torch.ones(16), out=out, epoch=epoch, ch=world.channel("c", 1, None), N=16, DOES=does)
        world.launch(own_row, programs, args, {}, world.current_stream())
        world.synchronize()

    run = lambda programs: weft.spmd(lambda world: main(world, programs), 2, backend="emulated")  # noqa: E731
    run(6)
    if does == "nothing":
        run(9)
    else:
        text = (
            rf"own_row: 9 programs are not resident at once on the 6 SMs of rank \d, 1 an SM, and one of them {does}: "
        )
        with pytest.raises(Unsupported, match=text + r"(.|\n)*own_row\[\d\] at .*test_emulator\.py"):
            run(9)


# -- threads of a rank -------------------------------------------------------------------------------------------------
def _gathered(world: weft.World, x: torch.Tensor) -> torch.Tensor:
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(9)).bfloat16()
    return weft.all_gather_matmul(x, weight, world=world, plan="fused")


def _drawn(world: weft.World) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(world.rank)).bfloat16()


@pytest.mark.parametrize("seed", range(4))
def test_operators_from_a_thread_of_a_rank(seed: int) -> None:
    """A thread that serves requests, as in continuous batching, runs beside the rank's function."""

    def main(world: weft.World) -> bool:
        asked: queue.Queue[torch.Tensor | None] = queue.Queue()
        answers: queue.Queue[torch.Tensor] = queue.Queue()

        def serve() -> None:
            while (x := asked.get()) is not None:
                answers.put(_gathered(world, x))

        thread = threading.Thread(target=serve)
        thread.start()
        x = _drawn(world)
        asked.put(x)
        asked.put(2 * x)
        served = [answers.get(), answers.get()]
        asked.put(None)
        thread.join()
        return all(torch.equal(y, _gathered(world, k * x)) for k, y in zip((1, 2), served, strict=True))

    assert weft.spmd(main, 3, backend="emulated", seed=seed) == [True] * 3


def test_a_thread_that_outlives_its_ranks_function_raises() -> None:
    returned, messages = threading.Event(), []

    def late(world: weft.World) -> None:
        returned.wait()
        try:
            _gathered(world, _drawn(world))
        except weft.WeftError as error:
            messages.append(str(error))

    threads = []

    def main(world: weft.World) -> None:
        if world.rank == 0:
            threads.append(threading.Thread(target=late, args=(world,), name="server"))
            threads[0].start()
            return
        while world.backend.machine.hosts[0].host._ended is False:
            time.sleep(0.01)
        returned.set()
        threads[0].join()

    weft.spmd(main, 2, backend="emulated", seed=0)
    assert len(messages) == 1 and "rank 0's function has returned, and thread 'server' of it goes on" in messages[0]


def test_a_thread_raises_when_another_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread receives the error of the failed rank, and a rank that waits for the thread blocks no other rank."""
    monkeypatch.setattr("weft.emulator.host.LEFT_BEHIND", 0.2)
    messages: list[str] = []

    def main(world: weft.World) -> None:
        if world.rank == 1:
            raise ValueError("rank 1 gives up")
        done: queue.Queue[None] = queue.Queue()

        def fail() -> None:
            try:
                _gathered(world, _drawn(world))
            except weft.WeftError as error:
                messages.append(str(error))

        threading.Thread(target=fail).start()
        done.get()  # wait for the thread, which has failed

    with pytest.raises(ValueError, match="rank 1 gives up"):
        weft.spmd(main, 2, backend="emulated")
    assert messages == ["the emulated run of rank 0 has ended with an error of another task"]


def test_a_traceback_hides_the_frames_of_the_emulator() -> None:
    @jit
    def reads(x, out):
        tl.store(out, tl.load(x + 5))

    def main(world: weft.World) -> None:
        x, out = world.zeros((2,), torch.float32), world.zeros((1,), torch.float32)
        world.launch(reads, 1, dict(x=x, out=out), {}, world.current_stream())
        world.synchronize()

    def wrong(world: weft.World) -> None:
        _gathered(world, torch.zeros(8, 31).bfloat16())

    with pytest.raises(ValueError, match="disagree on K") as caught:
        weft.spmd(wrong, 2, backend="emulated")
    files = [Path(frame.filename) for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not any(
        file.parent.name == "emulator" and file != Path(__file__) or file.name == "emulated.py" for file in files
    )
    assert [file.name for file in files[:3]] == [Path(__file__).name, "launch.py", Path(__file__).name]
    with pytest.raises(MemoryFault) as fault:
        weft.spmd(main, 2, backend="emulated")
    assert traceback.extract_tb(fault.value.__traceback__)[-1].line == "tl.store(out, tl.load(x + 5))"


def test_host_code_ends_by_calls_of_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 raises an error while the other ranks wait for it. The calls that these ranks then make in `finally` do
    not wait for an answer."""
    monkeypatch.setattr("weft.emulator.host.LEFT_BEHIND", 0.2)
    ended = []

    def main(world: weft.World) -> None:
        try:
            world.exchange(world.rank)
            if world.rank == 0:
                raise ValueError("rank 0 has had enough")
            world.exchange(world.rank)
        finally:
            try:
                world.exchange(world.rank)
            finally:
                ended.append(world.rank)

    with pytest.raises(ValueError, match="enough"):
        weft.spmd(main, 3, backend="emulated")
    assert sorted(ended) == [0, 1, 2]
