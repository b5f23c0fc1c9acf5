"""The emulator's model of a GPU is tested rule by rule: which operations order two accesses, which effects other
programs may observe half done, when each task runs, and the results of Triton's language.

Each small program has a correct twin. A rule that is too weak finds no fault in the wrong program, and a rule that is
too strong finds a fault in the correct twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from weft import Deadlock, MemoryFault, Mismatch, Race
from weft.backends.emulated import EmulatedBackend, spmd
from weft.lang.intrinsics import (
    flush_stores,
    globaltimer,
    look_again,
    peek,
    post,
    release_fence,
    wait_until,
    window_sum,
)
from weft.lang.jit import jit

SEEDS = range(8)  # two for each scheduling policy
CLOCK, RANDOM, STARVE, BURST = range(4)  # the seed modulo four selects the policy
N = 16


def words(b: EmulatedBackend, name: str, count: int = 1) -> Any:
    """Return int32 counters on every rank."""
    return b.symmetric(4 * count, name).view(0, (count,), torch.int32)


def passes(fn: Callable[[EmulatedBackend], Any], ranks: int = 1, **options: Any) -> None:
    for seed in SEEDS:
        spmd(fn, ranks, seed=seed, **options)


def races(fn: Callable[[EmulatedBackend], Any], memory: str, ranks: int = 1, **options: Any) -> None:
    """Require a race in every schedule."""
    for seed in SEEDS:
        with pytest.raises(Race, match=f"race on {memory}"):
            spmd(fn, ranks, seed=seed, **options)


# -- what a wait acquires ----------------------------------------------------------------------------------------------


@jit
def two_parts(data, flag, gate, guard, out, TARGET: tl.constexpr, N: tl.constexpr):
    """Program 0 releases one part after the other. Program 1 starts to wait after both releases, and reads both
    parts."""
    offsets = tl.arange(0, N)
    if tl.program_id(0) == 0:
        for part in tl.static_range(2):
            tl.store(data + part * N + offsets, tl.full((N,), 1.0, tl.float32))
            flush_stores(False)
            tl.atomic_add(flag, 1, sem="release", scope="gpu")
        tl.atomic_add(gate, 1, sem="relaxed", scope="gpu")
    else:
        wait_until(gate, 1, guard, -1, -1, "gpu")
        wait_until(flag, TARGET, guard, -1, -1, "gpu")
        tl.store(out + offsets, tl.load(data + offsets) + tl.load(data + N + offsets))


def test_a_wait_acquires_the_release_that_first_reached_its_target() -> None:
    """A target that is too low by one causes a race even if all arrivals precede the wait."""

    def fn(b: EmulatedBackend, target: int) -> None:
        data, out = b.empty((2, N), torch.float32), b.empty((N,), torch.float32)
        flag, gate = b.zeros((1,), torch.int32), b.zeros((1,), torch.int32)
        args = dict(data=data, flag=flag, gate=gate, guard=b.guard(), out=out, TARGET=target, N=N)
        b.launch(two_parts, 2, args, {}, b.current_stream())
        b.finish(b.current_stream())
        assert out.tolist() == [2.0] * N

    passes(lambda b: fn(b, 2))
    races(lambda b: fn(b, 1), r"data\[1, 0\]")


# -- ordinary accesses beside atomic ones ------------------------------------------------------------------------------


@jit
def unordered_accesses(word, out, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Two programs make one access each, and no operation orders the two."""
    for program in tl.static_range(2):
        if tl.program_id(0) == program:
            if (FIRST, SECOND)[program] == "update":
                tl.atomic_add(word, 1, sem="relaxed", scope="gpu")
            elif (FIRST, SECOND)[program] == "look":
                tl.atomic_add(word, 0, sem="relaxed", scope="gpu")
            elif (FIRST, SECOND)[program] == "load":
                tl.store(out + program, tl.load(word))
            else:
                tl.store(word, 1)


@pytest.mark.parametrize(
    "first_access, second_access", [("load", "update"), ("store", "update"), ("store", "look"), ("load", "store")]
)
def test_an_ordinary_access_and_an_unordered_atomic_one_are_a_race(first_access: str, second_access: str) -> None:
    """The order of the two accesses does not matter. Two accesses do not race if neither changes the word, or if both
    are atomic."""

    def fn(b: EmulatedBackend, first_access: str, second_access: str) -> None:
        args = dict(
            word=b.zeros((1,), torch.int32), out=b.zeros((2,), torch.int32), FIRST=first_access, SECOND=second_access
        )
        b.launch(unordered_accesses, 2, args, {}, b.current_stream())
        b.finish(b.current_stream())

    races(lambda b: fn(b, first_access, second_access), "word")
    races(lambda b: fn(b, second_access, first_access), "word")
    for own_access, peer_access in (("load", "look"), ("update", "update"), ("load", "load")):
        passes(lambda b, own_access=own_access, peer_access=peer_access: fn(b, own_access, peer_access))


# -- the order between ranks -------------------------------------------------------------------------------------------


def test_an_exchange_orders_the_accesses_before_and_after_it() -> None:
    """Every rank reads every other rank's box, both the data of the last rank to arrive and the data of the ranks that
    waited."""

    def fn(b: EmulatedBackend, exchange: bool) -> None:
        box, main = b.symmetric(4 * N, "box").view(0, (N,), torch.float32), b.current_stream()
        b.call(lambda: box.local.fill_(b.rank + 1.0), [], [box.local], main)
        b.synchronize()
        if exchange:
            b.exchange("filled")
        out = b.empty((b.size, N), torch.float32)
        for rank, peer_box in enumerate(box.peers):
            b.copy(out[rank], peer_box, main)
        b.synchronize()
        assert out[:, 0].tolist() == [1.0, 2.0, 3.0]

    passes(lambda b: fn(b, True), 3)
    races(lambda b: fn(b, False), "box", 3)


# -- accesses that a counter releases ----------------------------------------------------------------------------------


@jit
def release(data, flag, gate, N: tl.constexpr):
    tl.store(data + tl.arange(0, N), tl.full((N,), 1.0, tl.float32))
    flush_stores(False)
    tl.atomic_add(flag, 1, sem="release", scope="sys")
    tl.atomic_add(gate, 1, sem="relaxed", scope="sys")


def test_a_copy_engines_store_ends_a_release_sequence() -> None:
    """A kernel increments the flag, and then a copy engine that has not acquired this flag stores a higher number. A
    wait for that number does not acquire from the kernel."""

    def fn(b: EmulatedBackend, target: int) -> None:
        data, out, flag, gate = (
            b.empty((N,), torch.float32),
            b.empty((N,), torch.float32),
            words(b, "flag"),
            words(b, "gate"),
        )
        kernel, engine, reader = b.current_stream(), b.side_stream("engine"), b.side_stream("reader")
        one, two, number = (b.tensor([value], torch.int32) for value in (1, 2, target))
        b.launch(release, 1, dict(data=data, flag=flag.local, gate=gate.local, N=N), {}, kernel)
        b.wait(gate.local, one, engine)  # after the kernel, but not ordered with it
        b.signal(flag.local, two, engine)
        b.wait(flag.local, number, reader)
        b.copy(out, data, reader)
        b.finish(reader)

    passes(lambda b: fn(b, 1))
    races(lambda b: fn(b, 2), "data")


@jit
def handed_over(data, flag, guard, out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(data + offsets, tl.full((N,), 1.0, tl.float32))
        flush_stores(False)
        tl.atomic_add(flag, 1, sem="release", scope="gpu")
    else:
        wait_until(flag, 1, guard, -1, -1, "gpu")
        tl.store(out + offsets, tl.load(data + offsets))


@jit
def reset(flag):
    tl.store(flag, 0)


def test_a_counter_that_an_ordinary_store_resets_begins_anew() -> None:
    """A wait of the second call acquires the second call's release, not the release that reached the number in the
    first call."""

    def fn(b: EmulatedBackend) -> None:
        data, out, flag = b.empty((N,), torch.float32), b.empty((N,), torch.float32), b.zeros((1,), torch.int32)
        for _ in range(2):
            args = dict(data=data, flag=flag, guard=b.guard(), out=out, N=N)
            b.launch(handed_over, 2, args, {}, b.current_stream())
            b.launch(reset, 1, dict(flag=flag), {}, b.current_stream())
        b.finish(b.current_stream())

    passes(fn)


# -- fences ------------------------------------------------------------------------------------------------------------


@jit
def fenced(data, flag, N: tl.constexpr, FENCE: tl.constexpr, SCOPE: tl.constexpr, FLUSHED: tl.constexpr):
    tl.store(data + tl.arange(0, N), tl.full((N,), 1.0, tl.float32))
    if FLUSHED == "before":
        flush_stores(False)
    release_fence(FENCE)
    if FLUSHED == "after":
        flush_stores(False)
    tl.atomic_add(flag, 1, sem="relaxed", scope=SCOPE)


@pytest.mark.parametrize(
    "fence, scope, flushed_at",
    [("gpu", "sys", "before"), ("sys", "gpu", "before"), ("sys", "sys", ""), ("sys", "sys", "after")],
)
def test_a_fence_releases_earlier_stores_in_its_own_scope(fence: str, scope: str, flushed_at: str) -> None:
    """The notify after the fence is relaxed; a rank reads the data that its neighbour wrote."""

    def fn(b: EmulatedBackend, fence: str, scope: str, flushed_at: str) -> None:
        box, flag, to = b.symmetric(4 * N, "box").view(0, (N,), torch.float32), words(b, "flag"), (b.rank + 1) % b.size
        out, main = b.empty((N,), torch.float32), b.current_stream()
        args = dict(data=box.peers[to], flag=flag.peers[to], N=N, FENCE=fence, SCOPE=scope, FLUSHED=flushed_at)
        b.launch(fenced, 1, args, {}, b.side_stream("comm"))
        b.wait(flag.local, b.tensor([1], torch.int32), main)
        b.copy(out, box.local, main)
        b.finish(main)

    passes(lambda b: fn(b, "sys", "sys", "before"), 2)
    passes(lambda b: fn(b, "gpu", "gpu", "before"))  # on a single rank
    races(lambda b: fn(b, fence, scope, flushed_at), "flag" if scope == "gpu" else "(box|data)", 2)


# -- the end of a kernel -----------------------------------------------------------------------------------------------


@jit
def bulk_and_atomic(desc, word):
    desc.store([0, 0], tl.full((N_BULK, N_BULK), 1.0, tl.float32))
    tl.atomic_add(word, 1, sem="relaxed", scope="gpu")


N_BULK = tl.constexpr(16)


def test_a_kernels_end_settles_everything() -> None:
    """The end of a kernel completes bulk stores for which no program waited, and relaxed atomics: the next work on the
    stream may read their results."""

    def fn(b: EmulatedBackend) -> None:
        data, word, main = b.empty((N, N), torch.float32), b.zeros((1,), torch.int32), b.current_stream()
        b.launch(bulk_and_atomic, 1, dict(desc=TensorDescriptor.from_tensor(data, [N, N]), word=word), {}, main)
        copied, count = b.empty((N, N), torch.float32), b.empty((1,), torch.int32)
        b.copy(copied, data, main)
        b.copy(count, word, main)
        b.finish(main)
        assert copied.sum() == N * N and count.item() == 1

    passes(fn)


@jit
def pair(gate, flag, guard):
    """Two programs share an SM: the first program ends, and the second waits for another kernel."""
    if tl.program_id(0) == 0:
        tl.atomic_add(gate, 1, sem="relaxed", scope="gpu")
    else:
        wait_until(flag, 1, guard, -1, -1, "gpu")


@jit
def raise_flag(flag):
    tl.atomic_add(flag, 1, sem="release", scope="gpu")


def test_an_sm_is_free_when_all_its_programs_have_ended() -> None:
    """An SM is not free when only the first of its programs has ended. Otherwise a program that waits for a free SM
    would run in the emulator, but not on a GPU."""

    def fn(b: EmulatedBackend) -> None:
        gate, flag, side = b.zeros((1,), torch.int32), b.zeros((1,), torch.int32), b.side_stream("late")
        b.launch(pair, 2, dict(gate=gate, flag=flag, guard=b.guard()), dict(per_sm=2), b.current_stream())
        b.wait(gate, b.tensor([1], torch.int32), side)
        b.launch(raise_flag, 1, dict(flag=flag), {}, side)
        b.finish(b.current_stream())

    passes(fn, sm_count=2)
    for seed in SEEDS:
        with pytest.raises(Deadlock, match=r"raise_flag\[0\.\.0\] are not resident"):
            spmd(fn, 1, seed=seed, sm_count=1)


# -- programs that poll ------------------------------------------------------------------------------------------------


@jit
def poll(word, words, tries, guard, HOW: tl.constexpr, TRIES: tl.constexpr):
    seen, tried, began = 0, 0, globaltimer()
    while (seen == 0) & (tried < TRIES):
        if HOW == "atomic":
            seen = tl.atomic_add(word, 0, sem="acquire", scope="gpu")
        elif HOW == "volatile":
            seen = tl.load(word, volatile=True)
        else:
            seen = tl.sum(peek(words + tl.arange(0, 4), tl.arange(0, 4) < 4))
            look_again(tried, began, guard, words, -1, -1)
        tried += 1
    tl.store(tries, tried)


@pytest.mark.parametrize("how", ["atomic", "volatile", "posted"])
def test_a_program_that_polls_an_unchanging_word_sleeps(how: str) -> None:
    """A lost signal is thus a deadlock, not an infinite run."""

    def fn(b: EmulatedBackend) -> None:
        word, polled_words, tries = b.zeros((1,), torch.int32), b.zeros((4,), torch.int32), b.zeros((1,), torch.int32)
        args = dict(word=word, words=polled_words, tries=tries, guard=b.guard(), HOW=how, TRIES=2000)
        b.launch(poll, 1, args, {}, b.current_stream())
        b.finish(b.current_stream())
        raise AssertionError(f"it looked {tries.item()} times")

    for seed in range(4):
        with pytest.raises(Deadlock, match=r"poll\[0\]"):
            spmd(fn, 1, seed=seed)


# -- effects that others may see half done -----------------------------------------------------------------------------


def test_a_copy_may_be_seen_half_done() -> None:
    """A reader that has not waited for the copy may observe only part of it."""

    def fn(b: EmulatedBackend) -> float:
        x, y, seen = torch.ones(64), b.zeros((64,), torch.float32), b.empty((64,), torch.float32)
        b.copy(y, x, b.side_stream("copy"))
        b.call(lambda: seen.copy_(y), [y], [seen], b.current_stream())
        b.synchronize()
        return seen.sum().item()

    sums = {spmd(fn, 1, seed=seed, races=False)[0][0] for seed in range(24)}
    assert {0.0, 64.0} < sums, sums


@jit
def post_rows(words, counts, ROWS: tl.constexpr, LOOKS: tl.constexpr):
    """Program 0 stores 16 bytes to each row at once, and program 1 counts the new words that it reads."""
    if tl.program_id(0) == 0:
        one = tl.full((ROWS,), 1, tl.int32)
        post(words + 4 * tl.arange(0, ROWS), one, one, one, one, one > 0)
    else:
        for i in range(LOOKS):
            tl.store(counts + i, tl.sum(peek(words + tl.arange(0, 4 * ROWS), tl.arange(0, 4 * ROWS) >= 0)))


def test_posted_words_may_be_seen_before_others_of_the_same_post() -> None:
    """A reader therefore has to check every word."""

    def fn(b: EmulatedBackend) -> list[int]:
        posted_words, counts = b.zeros((8, 4), torch.int32), b.zeros((6,), torch.int32)
        b.launch(post_rows, 2, dict(words=posted_words, counts=counts, ROWS=8, LOOKS=6), {}, b.current_stream())
        b.finish(b.current_stream())
        return counts.tolist()

    seen_counts = {count for seed in range(24) for count in spmd(fn, 1, seed=seed)[0][0]}
    assert {0, 32} < seen_counts, seen_counts


# -- schedules ---------------------------------------------------------------------------------------------------------


@jit
def draw_tickets(ticket, owners, DRAWS: tl.constexpr):
    """Record the order in which programs run: at every draw, a different program may be chosen."""
    for _ in range(DRAWS):
        tl.store(owners + tl.atomic_add(ticket, 1, sem="relaxed", scope="gpu"), tl.program_id(0))


def draw_order(seed: int, programs: int = 4, draws: int = 150, **options: Any) -> list[int]:
    def fn(b: EmulatedBackend) -> list[int]:
        ticket, owners = b.zeros((1,), torch.int32), b.zeros((programs * draws,), torch.int32)
        b.launch(draw_tickets, programs, dict(ticket=ticket, owners=owners, DRAWS=draws), {}, b.current_stream())
        b.finish(b.current_stream())
        return owners.tolist()

    return spmd(fn, 1, seed=seed, preempt=0.0, **options)[0][0]


def stays(order: list[int]) -> float:
    """Return how often the scheduler lets the running program continue."""
    return sum(a == b for a, b in zip(order, order[1:], strict=False)) / len(order)


def longest_rest(order: list[int], programs: int = 4) -> int:
    """Return the largest number of turns that other programs have before a program continues."""
    draws_by_program = [[i for i, who in enumerate(order) if who == p] for p in range(programs)]
    return max(b - a for draws in draws_by_program for a, b in zip([0, *draws], draws, strict=False))


def test_ways_to_schedule() -> None:
    """Schedules follow virtual time, are random, pause one program for a long time, or run one program for a long
    time."""
    clock, mixed, starve, burst = (
        [draw_order(way + 4 * i) for i in range(4)] for way in (CLOCK, RANDOM, STARVE, BURST)
    )
    assert all(stays(order) < 0.1 for order in clock)
    assert all(0.1 < stays(order) < 0.4 and longest_rest(order[:300]) < 50 for order in mixed)
    assert max(longest_rest(order) for order in starve) > 60 and all(stays(order) < 0.7 for order in starve)
    assert all(stays(order) > 0.8 for order in burst)


@jit
def add_up(x, TIMES: tl.constexpr):
    """Add without atomics: a different program's addition between this program's load and store is lost."""
    for _ in range(TIMES):
        tl.store(x, tl.load(x) + 1)


def test_programs_are_preempted_between_ordinary_accesses() -> None:
    """The emulator switches programs not only at atomics and waits."""

    def fn(b: EmulatedBackend) -> int:
        x = b.zeros((1,), torch.int32)
        b.launch(add_up, 2, dict(x=x, TIMES=100), {}, b.current_stream())
        b.finish(b.current_stream())
        return int(x)

    assert [spmd(fn, 1, seed=seed, races=False, preempt=0.0)[0] for seed in range(4)] == [[200]] * 4
    assert any(spmd(fn, 1, seed=seed, races=False)[0][0] < 200 for seed in range(4)), "preemption must be on by default"


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter", "copy"])
@pytest.mark.parametrize("wrong", ["rows", "columns", "dtype"])
def test_sizes_of_collectives_and_copies_must_fit(call: str, wrong: str) -> None:
    """The emulator refuses a call with too little memory, in which NCCL would write past the end."""

    def fn(b: EmulatedBackend) -> None:
        small, large = (2, 3), (2, 3) if call == "copy" else (2 * b.size, 3)
        fits = torch.zeros(small), torch.zeros(large)
        odd = torch.zeros(small, dtype=torch.float16) if wrong == "dtype" else torch.zeros(2 + (wrong == "rows"), 3 + (wrong == "columns"))  # fmt: skip
        main = b.current_stream()
        send: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = dict(
            all_gather=lambda small, large: b.all_gather(large, small, main),
            reduce_scatter=lambda small, large: b.reduce_scatter(small, large, main),
            copy=lambda small, large: b.copy(small, large, main),
        )
        send[call](*fits)
        with pytest.raises(ValueError, match=f"{call} of "):
            send[call](odd, fits[1])
        b.finish(main)

    spmd(fn, 2)


def test_collectives_need_dense_tensors_of_one_size() -> None:
    """NCCL would read strided memory as dense memory, and would wait forever for ranks with different sizes."""

    def ragged(b: EmulatedBackend) -> None:
        b.all_reduce(torch.zeros(4 + b.rank), b.current_stream())
        b.finish(b.current_stream())

    def strided(b: EmulatedBackend) -> None:
        x, main = torch.zeros(4, 4), b.current_stream()
        for call in (
            lambda: b.all_reduce(x.t(), main),
            lambda: b.all_gather(torch.zeros(4 * b.size, 4), x.t(), main),
            lambda: b.reduce_scatter(torch.zeros(2, 4), x.t(), main),
            lambda: b.all_to_all(x.split(2), x.t().split(2), main),
        ):
            with pytest.raises(ValueError, match="must be contiguous"):
                call()

    with pytest.raises(Mismatch, match="all_reduce"):
        spmd(ragged, 2)
    spmd(strided, 2)


def test_parts_of_an_all_to_all_must_fit_where_they_go() -> None:
    """A rank expects too few or too many rows."""

    def fn(b: EmulatedBackend, expected: int) -> None:
        parts = [torch.full((1 + to, 2), float(b.rank)) for to in range(b.size)]  # rank `to` receives to + 1 rows
        outs = [torch.zeros(b.rank + (expected if b.rank == 1 else 1), 2) for _ in range(b.size)]
        b.all_to_all(outs, parts, b.current_stream())
        b.finish(b.current_stream())
        assert [out[0, 0].item() for out in outs] == [0.0, 1.0]

    spmd(lambda b: fn(b, 1), 2)
    for expected in (0, 2):
        with pytest.raises(Mismatch, match=r"all_to_all: rank 1 expects \[\d, 2\] where \[2, 2\] is sent"):
            spmd(lambda b, expected=expected: fn(b, expected), 2)


# -- the language ------------------------------------------------------------------------------------------------------


@jit
def load_past_the_edge(desc, out, N: tl.constexpr):
    offsets = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + offsets, desc.load([8, 8]).to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_descriptor_pads_with_its_own_value(dtype: torch.dtype) -> None:
    """A load outside the tensor returns NaN if the kernel requests that."""

    def fn(b: EmulatedBackend, padding: str) -> torch.Tensor:
        x, out = torch.ones(12, N, dtype=dtype)[:, :12], b.empty((N, N), torch.float32)
        desc = TensorDescriptor.from_tensor(x, [N, N], padding)
        b.launch(load_past_the_edge, 1, dict(desc=desc, out=out, N=N), {}, b.current_stream())
        b.finish(b.current_stream())
        return out

    for padding, test in (("zero", lambda t: t == 0), ("nan", torch.isnan)):
        (out,) = spmd(lambda b, padding=padding: fn(b, padding), 1)[0]
        inside = out[:4, :4].clone()
        out[:4, :4] = 0 if padding == "zero" else float("nan")
        assert (inside == 1).all() and test(out).all()


@jit
def numbers(x, y, low, high, i, u, shifted, N: tl.constexpr):
    offsets = tl.arange(0, N)
    a, b = tl.load(x + offsets), tl.load(y + offsets)
    tl.store(low + offsets, tl.minimum(a, b))
    tl.store(high + offsets, tl.maximum(a, b))
    tl.store(shifted + offsets, (tl.load(i + offsets) >> 2).to(tl.int64))
    tl.store(shifted + N + offsets, (tl.load(u + offsets) >> 2).to(tl.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_extremes_ignore_nan_and_signed_shifts_keep_the_sign(dtype: torch.dtype) -> None:
    """Maximum, minimum and shifts give the GPU's results, not numpy's."""
    nan = float("nan")
    x, y = torch.tensor([1, nan, nan, -2] * 4).to(dtype), torch.tensor([nan, 3, nan, 5] * 4).to(dtype)
    i = torch.tensor([-9, 9, -(2**31), 2**31 - 1] * 4, dtype=torch.int32)

    def fn(b: EmulatedBackend) -> tuple[torch.Tensor, ...]:
        low, high, shifted = b.empty((N,), dtype), b.empty((N,), dtype), b.empty((2, N), torch.int64)
        args = dict(x=x, y=y, low=low, high=high, i=i, u=i.view(torch.uint32), shifted=shifted, N=N)
        b.launch(numbers, 1, args, {}, b.current_stream())
        b.finish(b.current_stream())
        return low, high, shifted

    low, high, shifted = spmd(fn, 1)[0][0]
    assert str(low[:4].tolist()) == "[1.0, 3.0, nan, -2.0]" and str(high[:4].tolist()) == "[1.0, 3.0, nan, 5.0]"
    assert shifted[0, :4].tolist() == [-3, 2, -(2**29), 2**29 - 1]
    assert shifted[1, :4].tolist() == [(2**32 - 9) >> 2, 2, 2**29, 2**29 - 1]


@jit
def sum_of_all(row, out, H: tl.constexpr):
    tl.store(out + tl.arange(0, H), window_sum(row, H, H, tl.bfloat16))


def test_a_multicast_window_ends_where_its_memory_does() -> None:
    """The next memory belongs to a different rank's copy: an address past the end would reach that copy."""

    def fn(b: EmulatedBackend, past: bool) -> None:
        box = b.symmetric(2 * N, "box").view(0, (N,), torch.bfloat16)
        box.local.fill_(b.rank + 1)
        b.exchange("filled")
        out, step = b.empty((N,), torch.float32), box.peers[1].data_ptr() - box.peers[0].data_ptr()
        args = dict(row=box.multicast + past * abs(step), out=out, H=N)
        b.launch(sum_of_all, 1, args, {}, b.current_stream())
        b.finish(b.current_stream())
        assert out.tolist() == [3.0] * N

    spmd(lambda b: fn(b, False), 2)
    with pytest.raises((ValueError, MemoryFault), match="multicast address"):
        spmd(lambda b: fn(b, True), 2)
