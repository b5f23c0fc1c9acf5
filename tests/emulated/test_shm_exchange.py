"""Hosts of one machine exchange messages over shared memory (backends/shm_exchange.py). A World uses this exchange and
compares late ranks' calls at the next check.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from weft import Mismatch, Timeout
from weft.backends import cuda
from weft.backends import shm_exchange as boards
from weft.backends.cuda import CudaBackend
from weft.backends.emulated import EmulatedBackend
from weft.backends.messages import Messages
from weft.backends.shm_exchange import BYTES, LEAD, SharedMemoryExchange
from weft.lang.intrinsics import CALL, DIFFERS, EXPIRED, NUMBER_BITS
from weft.op import REGISTRY, collectives
from weft.world import LATE, PATIENCE


def ranks(fn: Callable[[SharedMemoryExchange], Any], size: int = 2, seconds: float = 20.0) -> list[Any]:
    """Run `fn` on threads, each with a separate SharedMemoryExchange over the same file."""
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=20)
    results: list[Any] = [None] * size

    def main(rank: int) -> None:
        def exchange(obj: object) -> list[object]:
            slots[rank] = obj
            barrier.wait()
            seen = list(slots)
            barrier.wait()
            return seen

        try:
            shm = SharedMemoryExchange.shared(rank, size, seconds, exchange)
            assert shm is not None
            results[rank] = fn(shm)
        except BaseException as e:
            results[rank] = e

    threads = [threading.Thread(target=main, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for r in results:
        if isinstance(r, BaseException):
            raise r
    return results


def test_exchange_order() -> None:
    """Ranks post more messages than there are slots, of all lengths and with random delays."""
    before = set(boards.FOLDER.glob("weft-*"))

    def message_of(rank: int, i: int) -> bytes:
        return bytes([rank, i % 251]) * ((i * 37) % (BYTES // 2 + 1))

    def main(shm: SharedMemoryExchange) -> bool:
        draw = random.Random(shm.rank)
        for i in range(10 * LEAD):
            shm.post(message_of(shm.rank, i))
            if draw.random() < 0.05:
                time.sleep(0.002)
            assert shm.collect(None) == [message_of(r, i) for r in range(3)], i
        return True

    assert ranks(main, 3) == [True] * 3
    assert set(boards.FOLDER.glob("weft-*")) <= before


def test_a_rank_that_is_late_is_not_waited_for() -> None:
    late = threading.Event()

    def main(shm: SharedMemoryExchange) -> Any:
        if shm.rank:
            late.wait(20)
            shm.post(b"1")
            return shm.collect(None)
        shm.post(b"0")
        begin = time.monotonic()
        assert shm.collect(0.01) is None and shm.collect(0.0) is None and time.monotonic() - begin < 1
        late.set()
        return shm.collect(None)

    assert ranks(main) == [[b"0", b"1"]] * 2


def test_as_far_ahead_as_a_rank_may_be_nothing_is_lost() -> None:
    """One rank repeatedly posts LEAD messages before it reads the first; the other rank reads each message at once."""

    def main(shm: SharedMemoryExchange) -> bool:
        step = 1 if shm.rank else LEAD
        for batch_start in range(0, 4 * LEAD, step):
            for i in range(batch_start, batch_start + step):
                shm.post(b"%d" % i)
            for i in range(batch_start, batch_start + step):
                assert shm.collect(None) == [b"%d" % i] * 2
        for _ in range(LEAD):
            shm.post(b"")
        with pytest.raises(AssertionError, match="collect first"):
            shm.post(b"")
        return True

    assert ranks(main) == [True, True]


def test_final_data_uses_no_slot_of_posts() -> None:
    """Final data occupies no slot of posts on any rank, at any position of the ring of posts."""

    def main(shm: SharedMemoryExchange) -> bool:
        ends: list[bytes | None] = [b"end of %d" % rank for rank in range(3)]
        for batch_start in range(0, 4 * LEAD, LEAD):
            for i in range(batch_start, batch_start + LEAD):
                shm.post(b"%d of %d" % (i, shm.rank))
            assert shm.end(b"end of %d" % shm.rank, 20.0) == ends
            for i in range(batch_start, batch_start + LEAD):
                assert shm.collect(None) == [b"%d of %d" % (i, rank) for rank in range(3)]
        return True

    assert ranks(main, 3) == [True] * 3


def test_half_a_slot_is_not_taken() -> None:
    def main(shm: SharedMemoryExchange) -> Any:
        shm.post(b"whole")
        while shm.collect(1.0) is None:
            pass
        shm.post(b"again")
        shm.memory[shm._offset(shm.rank, 1) + boards._HEAD.size] ^= 1  # as if the head became visible before its data
        return shm._next(shm.rank)

    assert ranks(main) == [None, None]


def test_waits_are_bounded() -> None:
    done = threading.Event()

    def main(shm: SharedMemoryExchange) -> str:
        if shm.rank:
            done.wait(20)
            return ""
        shm.post(b"x")
        try:
            with pytest.raises(Timeout) as caught:
                shm.collect(None)
        finally:
            done.set()
        return str(caught.value)

    assert "not every rank joined within 0.05 s" in ranks(main, seconds=0.05)[0]


def _second_rank(path: str, ready: Any) -> None:
    shm = SharedMemoryExchange(os.open(path, os.O_RDWR), 1, 2, 20.0)
    shm.post(b"here")
    ready.set()
    time.sleep(0.2)


def test_a_rank_that_ends_is_noticed(tmp_path: Path) -> None:
    """The error is raised long before the time limit."""
    path = tmp_path / "board"
    path.write_bytes(bytes(2 * (boards._PART + boards._SLOT)))
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_second_rank, args=(str(path), ready))
    process.start()
    shm = SharedMemoryExchange(os.open(path, os.O_RDWR), 0, 2, 60.0)
    assert ready.wait(60)
    shm.post(b"hello")
    assert shm.collect(None) == [b"hello", b"here"]
    shm.post(b"again")
    begin = time.monotonic()
    with pytest.raises(Timeout, match="rank 0: the connection to a rank is lost: rank 1 has ended"):
        shm.collect(None)
    assert time.monotonic() - begin < 30
    process.join()


def _killed(path: str, ready: Any, child: Any) -> None:
    """Kill a rank while a worker process that it forked, such as a DataLoader's, is alive."""
    shm = SharedMemoryExchange(os.open(path, os.O_RDWR), 1, 2, 20.0)
    shm.post(b"here")
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    child.value = pid
    ready.set()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_is_noticed_though_its_children_live(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(2 * (boards._PART + boards._SLOT)))
    context = multiprocessing.get_context("spawn")
    ready, child = context.Event(), context.Value("i", 0)
    process = context.Process(target=_killed, args=(str(path), ready, child))
    process.start()
    shm = SharedMemoryExchange(os.open(path, os.O_RDWR), 0, 2, 15.0)
    assert ready.wait(60)
    for _ in range(2):
        shm.post(b"hello")
    shm.collect(None)
    with pytest.raises(Timeout, match="rank 1 has ended"):
        shm.collect(None)
    process.join()
    os.kill(child.value, signal.SIGKILL)  # an error is raised unless the process is alive


def in_child(fn: Callable[[], bool]) -> bool:
    """Return whether `fn` returned True in a forked process."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    try:
        os._exit(not fn())
    finally:
        os._exit(1)


def test_a_child_of_a_child_closes_no_other_file(tmp_path: Path) -> None:
    """A worker forks; in the worker, the descriptor that the first fork closed refers to a different file."""
    exchanges = [SharedMemoryExchange.shared(0, 1, 1.0, lambda obj: [obj]) for _ in range(2)]

    def child() -> bool:
        files = [os.open(tmp_path, os.O_RDONLY) for _ in range(8)]
        assert {shm.file for shm in exchanges if shm} <= set(files)
        return in_child(lambda: all(os.fstat(file).st_ino == tmp_path.stat().st_ino for file in files))

    assert in_child(child)


def test_an_exchange_leaves_no_descriptor_and_no_lock() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(5):
        assert SharedMemoryExchange.shared(0, 1, 1.0, lambda obj: [obj]) is not None
    assert count() == before


@pytest.mark.parametrize("step", range(3))
def test_a_start_that_fails_leaves_no_file_and_no_descriptor(step: int) -> None:
    steps, before = iter(range(3)), (set(boards.FOLDER.glob("weft-*")), len(os.listdir("/proc/self/fd")))

    def exchange(obj: object) -> list[object]:
        if next(steps) == step:
            raise Timeout("rank 1 did not join")
        return [obj, obj]

    with pytest.raises(Timeout):
        SharedMemoryExchange.shared(0, 2, 1.0, exchange)
    assert (set(boards.FOLDER.glob("weft-*")) - before[0], len(os.listdir("/proc/self/fd"))) == (set(), before[1])


def test_a_file_without_room_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    assert SharedMemoryExchange.shared(0, 1, 1.0, lambda obj: [obj]) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_file_of_a_killed_start_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No other file is removed: neither a file that a rank has locked or is about to lock, nor another program's file
    with the same prefix."""
    monkeypatch.setattr(boards, "FOLDER", tmp_path)
    killed, locked, young = (f"weft-{digit * 32}" for digit in "abc")
    names = killed, locked, young, "weft-parts", "another"
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.write_bytes(bytes(boards._PART + boards._SLOT))
        if path.name != young:
            os.utime(path, (1, 1))
    holder = SharedMemoryExchange(os.open(paths[1], os.O_RDWR), 0, 1, 1.0)
    assert SharedMemoryExchange.shared(0, 1, 1.0, lambda obj: [obj]) is not None
    assert [path.name for path in paths if path.exists()] == [locked, young, "weft-parts", "another"]
    assert holder.close.alive


def test_without_a_folder_that_all_see_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(boards, "FOLDER", tmp_path / "absent")
    assert SharedMemoryExchange.shared(0, 1, 1.0, lambda obj: [obj]) is None


def test_short_exchanges_use_shared_memory_and_long_ones_messages() -> None:
    """A rank that posted while other ranks were exchanging does not make them wait for messages."""
    sent: list[object] = []

    def main(shm: SharedMemoryExchange) -> Any:
        backend = CudaBackend.__new__(CudaBackend)
        backend.rank, backend.size, backend._shm = shm.rank, 2, shm

        def messages(obj: object) -> list[Any]:
            sent.append(obj)
            return ["by messages"] * 2

        backend._messages = SimpleNamespace(objects=messages)  # type: ignore[assignment]
        short = backend.exchange(("short", shm.rank))
        long = backend.exchange(b"x" * (2 * BYTES if shm.rank else 1))  # rank 1's data is long
        post: Any = backend.post
        assert post(b"x" * BYTES) is None
        collected = post(("a", 1))(None)
        late = post("late") if shm.rank else None
        late and (late(0.0) or late(None))  # the first returns None if the other rank has not posted
        mixed = post("here")(None) if shm.rank == 0 else None
        again = backend.exchange(b"x" * 2 * BYTES) if shm.rank == 0 else post("told")(None)
        return short, long, collected, mixed, again

    rank_0, rank_1 = ranks(main)
    assert rank_0[:3] == rank_1[:3] == ([("short", 0), ("short", 1)], ["by messages"] * 2, [("a", 1)] * 2)
    assert len(sent) == 2 and rank_0[3] == ["here", "late"]
    assert rank_0[4] == rank_1[4] == ["something longer", "told"]


def test_a_long_message_is_not_mistaken_for_an_earlier_one() -> None:
    """One rank is late for a short call; the data of the next call is too long for a slot."""
    barrier, slots = threading.Barrier(2, timeout=20), [None] * 2

    def main(shm: SharedMemoryExchange) -> bool:
        backend = CudaBackend.__new__(CudaBackend)
        backend.rank, backend.size, backend._shm, backend.device = shm.rank, 2, shm, torch.device("cpu")
        backend.sm_count, backend.uploads = 1, cuda.Uploads(backend.device)

        def messages(obj: Any) -> list[Any]:
            slots[shm.rank] = obj
            barrier.wait()
            return slots

        backend._messages = SimpleNamespace(objects=messages)  # type: ignore[assignment]
        backend.name_counters = lambda describe: None  # type: ignore[method-assign]
        backend.capturing = lambda: False  # type: ignore[method-assign]
        world = weft.World(backend)
        if shm.rank:
            time.sleep(20 * PATIENCE)
        for fields in (dict(rows=8), dict(rows=tuple(range(BYTES)))):
            world.post_call("call", **fields)
        world.post_call("another")
        world._collect(None)
        return slots[0] is not None and shm.post_count == shm.collect_count

    assert ranks(main) == [True] * 2


# -- a World whose ranks are late --------------------------------------------------------------------------------------
@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no rank arrive within the time limit of the call, so that the call is compared at the next check."""

    def late_post(self: EmulatedBackend, obj: Any) -> Callable[[float | None], list[Any] | None]:
        def collect(patience: float | None) -> list[Any] | None:
            return None if patience == PATIENCE else self.exchange(obj)

        return collect

    monkeypatch.setattr(EmulatedBackend, "post", late_post)
    monkeypatch.setattr(EmulatedBackend, "compares", False)  # otherwise the call itself would make the comparison


def refused(fn: Callable[[weft.World], object], size: int = 2) -> list[str]:
    """Return the message of each rank's Mismatch."""
    messages = [""] * size

    def rank(world: weft.World) -> None:
        try:
            fn(world)
        except Mismatch as e:
            messages[world.rank] = str(e)
            world.backend.exchange("both")  # both ranks have raised their Mismatch
            raise

    with pytest.raises(Mismatch):
        weft.spmd(rank, size, backend="emulated")
    return messages


KINDS = [(op, kind) for op in collectives() for kind in REGISTRY[op].kinds if op != "matmul_all_to_all"]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("differ", ["rows", "bias"])
@pytest.mark.parametrize(("op", "kind"), KINDS, ids=lambda v: str(v))
def test_late_ranks_that_disagree_raise_at_the_next_check(
    monkeypatch: pytest.MonkeyPatch, op: str, kind: str, differ: str
) -> None:
    """Ranks disagree after a call on which they agree. Plans with bounded waits raise an error at the next check, other
    plans at once."""

    def main(world: weft.World) -> None:
        x, w = torch.randn(16, 32).bfloat16(), torch.randn(32, 32).bfloat16()
        call = getattr(weft, op)
        call(x, w, world=world, plan=kind)
        x = torch.randn(48 if differ == "rows" and world.rank else 32, 32).bfloat16()
        bias = torch.zeros(32, dtype=x.dtype) if differ == "bias" and world.rank else None
        call(x, w, bias, world=world, plan=kind)

    begun: list[int] = []
    begin = weft.World.begin

    def counted(world: weft.World, number: int | None, *others: Any) -> None:
        if number is not None and world._calls[number][0] == op:  # excludes calls that the op's plan makes
            begun.append(world.rank)
        begin(world, number, *others)

    monkeypatch.setattr(weft.World, "begin", counted)
    messages = refused(main)
    plan = next(kind_ for kind_ in REGISTRY[op].runs if kind_.kind == kind)
    assert len(begun) == (4 if plan.bounded else 2), "a plan whose waits are unbounded must not run"
    assert (
        messages[0] == messages[1]
        and f"rank 0: {op} {differ}=" in messages[0]
        and f"rank 1: {op} {differ}=" in messages[0]
    ), messages


@pytest.mark.usefixtures("late")
def test_late_ranks_that_agree_go_on_and_ask_once() -> None:
    def main(world: weft.World) -> int:
        asked = []
        exchange = world.backend.exchange
        world.backend.exchange = lambda obj: (asked.append(obj), exchange(obj))[1]  # type: ignore[method-assign]
        x, w = torch.randn(16, 32).bfloat16(), torch.randn(32, 32).bfloat16()
        for _ in range(3):
            weft.matmul_reduce_scatter(x, w, world=world, plan="sequential")
        world.synchronize()
        assert not world._uncompared
        return len(asked)

    assert weft.spmd(main, 2, backend="emulated") == [1, 1]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("then", ["synchronize", "exchange", "check", "another"])
def test_posted_calls_are_compared_before_every_wait(then: str) -> None:
    def main(world: weft.World) -> None:
        world.post_call("a call", size=world.rank)
        assert world._uncompared
        if then == "another":
            world.check_same_on_all_ranks("another")
        else:
            getattr(world, then)(*[None] * (then == "exchange"))

    assert refused(main) == ["ranks disagree on this call: rank 0: a call size=0; rank 1: a call size=1"] * 2


@pytest.mark.usefixtures("late")
def test_a_rank_runs_ahead_at_most_by_the_slots() -> None:
    def main(world: weft.World) -> int:
        most = 0
        for i in range(3 * LATE):
            world.post_call("call", i=i)
            most = max(most, len(world._uncompared))
        return most

    assert weft.spmd(main, 2, backend="emulated") == [LATE] * 2 and LATE < LEAD


@pytest.mark.usefixtures("late")
def test_a_call_that_ranks_disagreed_on_is_decided_anew() -> None:
    def main(world: weft.World) -> None:
        for size in (world.rank, 3):
            world.decided["a call"] = "plan"
            try:
                world.check_same_on_all_ranks("a call", size=size)
            except Mismatch:
                assert size != 3 and not world.decided

    weft.spmd(main, 2, backend="emulated")


# -- afterwards --------------------------------------------------------------------------------------------------------
USES: dict[str, Callable[[weft.World], object]] = {
    "exchange": lambda world: world.exchange(None),
    "check": lambda world: world.check(),
    "synchronize": lambda world: world.synchronize(),
    "a new call": lambda world: world.check_same_on_all_ranks("new"),
    "a new call, posted": lambda world: world.post_call("newer"),
    "memory": lambda world: world.symmetric((4,), torch.int32),
    "split": lambda world: world.split(0),
    "a known launch": lambda world: world.begin(1),
    "an operator": lambda world: weft.all_reduce(torch.ones(4, 8).bfloat16(), world=world, plan="sequential"),
}


def every_use_raises(world: weft.World, error: type[Exception], says: str) -> bool:
    for name, use in USES.items():
        with pytest.raises(error, match=f"World is unusable.*{says}"):
            pytest.fail(f"{name}: {use(world)}")
    return True


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("rank_1_makes", ["another call", "memory", "an exchange", "fewer calls"])
def test_every_use_raises_after_a_mismatch_with_a_rank_ahead(rank_1_makes: str) -> None:
    """The fast rank may have launched its call and posted later calls; the other rank cannot know how many."""

    def main(world: weft.World) -> bool:
        weft.all_reduce(torch.ones(4, 8).bfloat16(), world=world, plan="sequential")
        with pytest.raises(Mismatch, match="rank 0: call 0 rank=0; rank 1: "):
            if world.rank == 0 or rank_1_makes == "fewer calls":
                for i in range(1 if world.rank else 3):
                    world.post_call(f"call {i}", rank=world.rank)
                world.check()
            elif rank_1_makes == "memory":
                world.symmetric((4,), torch.int32, "mine")
            elif rank_1_makes == "another call":
                world.check_same_on_all_ranks("another")
            else:
                pytest.fail(f"another call's object: {world.exchange('mine')}")
        return every_use_raises(world, Mismatch, "ranks disagree on this call: rank 0: call 0 rank=0; rank 1: ")

    assert weft.spmd(main, 2, backend="emulated") == [True, True]


def test_after_a_mismatch_before_any_launch_ranks_number_calls_alike() -> None:
    def main(world: weft.World) -> int:
        makes: tuple[Callable[[], object], ...] = (
            lambda: world.check_same_on_all_ranks("a call"),
            lambda: world.symmetric((4,), torch.int32, "mine"),
            lambda: world.exchange("mine"),
            lambda: world.exchange("mine", "theirs"),
            lambda: world.channel("mine", 1, None),
        )
        for i in range(len(makes)):
            with pytest.raises(Mismatch):
                makes[(i + world.rank) % len(makes)]()
        assert world.exchange(world.rank) == [0, 1]
        x = torch.ones(4, 32).bfloat16()
        assert (weft.all_reduce(x, world=world, plan="one_shot") == 2).all()
        return world.check_same_on_all_ranks("the same call")

    rank_0_number, rank_1_number = weft.spmd(main, 2, backend="emulated")
    assert rank_0_number == rank_1_number


def test_every_use_raises_after_a_timeout() -> None:
    late = threading.Event()

    def main(shm: SharedMemoryExchange) -> Any:
        backend = CudaBackend.__new__(CudaBackend)
        backend._streams = {}
        backend.rank, backend.size, backend._shm, backend.device = shm.rank, 2, shm, torch.device("cpu")
        backend.sm_count, backend.uploads = 1, cuda.Uploads(backend.device)
        backend.name_counters = lambda describe: None  # type: ignore[method-assign]
        backend.capturing = lambda: False  # type: ignore[method-assign]
        record: Any = SimpleNamespace(words=[0] * 8)
        backend.record_words = record
        world = weft.World(backend)
        if shm.rank:
            late.wait(20)
            return [world.exchange("first")]
        with pytest.raises(Timeout, match="not every rank joined within 0.05 s"):
            world.exchange("first")
        late.set()
        for _ in range(2):
            with pytest.raises(Timeout, match="not every rank joined within 0.05 s"):
                backend.exchange("second")
        return every_use_raises(world, Timeout, "not every rank joined within 0.05 s")

    assert ranks(main, seconds=0.05) == [True, [["first", "first"]]]


def test_after_a_timeout_over_gloo_every_message_raises() -> None:
    messages = Messages.__new__(Messages)
    messages.rank, messages.size, messages.seconds, messages._lost = 0, 2, 1.0, ""
    works = [SimpleNamespace(wait=lambda: None)]  # a later message that gloo reports as received

    def expires(*_: object) -> Any:
        if len(works) == 1:
            works.append(works[0])
            raise RuntimeError("Timed out waiting for recv")
        return works[0]

    messages._held = [SimpleNamespace(allgather=expires)]
    for _ in range(2):
        with pytest.raises(Timeout, match="not every rank joined within 1 s: Timed out waiting"):
            messages.gathered(torch.ones(2))


def test_messages_are_on_the_host_for_any_default_device() -> None:
    def alltoall_base(received: torch.Tensor, sent: torch.Tensor, *_: object) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: received.copy_(sent))

    messages = Messages.__new__(Messages)
    messages.size, messages._lost = 1, ""
    messages._held = [SimpleNamespace(alltoall_base=alltoall_base)]
    messages._headers = lambda kind, sends, expects: [[*sends, *expects]]  # type: ignore[method-assign, misc, list-item]
    x, out = torch.arange(3.0), torch.zeros(3)
    with torch.device("meta"):
        messages.exchanged([x], [out])
    assert torch.equal(out, x)


# -- ranks whose waits expire, or that are in other calls --------------------------------------------------------------
def stuck(shm: SharedMemoryExchange, flag: int, words: tuple[int, int], tile: int = 3) -> CudaBackend:
    """Return a rank's backend with a record from its GPU. The record contains the expired wait and the values that it
    read from the other rank."""
    backend = CudaBackend.__new__(CudaBackend)
    backend.rank, backend.size, backend._shm, backend._waits = shm.rank, 2, shm, None
    backend.uploads = cuda.Uploads(torch.device("cpu"))
    record: Any = SimpleNamespace(words=[flag, 4096, *words, tile, 1 - shm.rank, 0])
    backend.record_words = record
    backend.describe = lambda address: f"channel 7 of all_gather_matmul [{4 + shm.rank}] x 8"
    backend.disagreement = lambda words: Mismatch(f"ranks disagree: {sorted(words.items())}")
    return backend


@pytest.mark.parametrize("rank_1_state", ["waits", "does not"])
def test_an_expired_wait_first_names_the_calls_of_other_ranks(
    monkeypatch: pytest.MonkeyPatch, rank_1_state: str
) -> None:
    monkeypatch.setattr(cuda, "GRACE", 20.0 if rank_1_state == "waits" else 0.1)

    def main(shm: SharedMemoryExchange) -> str:
        if shm.rank and rank_1_state != "waits":
            return ""
        backend = stuck(shm, EXPIRED, (9, 8))
        for _ in range(2):  # every later check raises the same error
            with pytest.raises(Timeout) as raised:
                backend.check()
        return str(raised.value)

    messages = ranks(main)
    lines = messages[0].splitlines()
    first_line, last_line = lines[0], lines[-1]
    assert re.search(
        "^rank 0: a wait on channel 7 of all_gather_matmul .*stands at 8, needs 9; rank 1 did not", last_line
    )
    if rank_1_state == "waits":
        assert "ranks disagree" in first_line
        assert "rank 0 in all_gather_matmul [4] x 8; rank 1 in all_gather_matmul [5] x 8" in first_line
        assert messages[1].splitlines()[0] == first_line
    else:
        assert first_line == last_line


def test_an_expired_wait_names_the_rank_for_which_its_peer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 pulls the rows of rank 2, which is absent, before rank 0's rows, and rank 0 waits for rank 2 too."""
    monkeypatch.setattr(cuda, "GRACE", 0.5)

    def main(shm: SharedMemoryExchange) -> str:
        if shm.rank == 2:
            return ""
        backend = stuck(shm, EXPIRED, (9, 8))
        backend.record_words.words[5] = peer = 0 if shm.rank else 2
        backend.describe = lambda address: "channel 7 of all_gather_matmul" + f", rank {peer}'s copy" * (peer == 2)
        with pytest.raises(Timeout) as raised:
            backend.check()
        return str(raised.value)

    messages = ranks(main, 3)
    assert messages[0].endswith("needs 9; rank 2 did not arrive")
    assert messages[1].endswith("needs 9; rank 0 did not arrive, but waits too; no wait is reported by rank 2")
    assert "disagree" not in messages[0] + messages[1], "a peer's copy of a channel belongs to the same op"


def test_a_different_call_is_a_mismatch_and_a_missing_one_is_counted() -> None:
    def main(shm: SharedMemoryExchange) -> list[str]:
        call = 3 << NUMBER_BITS
        with pytest.raises(Mismatch) as differs:
            stuck(shm, DIFFERS, (call + 5 + shm.rank, call + 6 - shm.rank), CALL).check()
        with pytest.raises(Timeout) as late:
            stuck(shm, EXPIRED, (call + 5, call - (1 << NUMBER_BITS) + 5), CALL).check()
        return [str(differs.value), str(late.value).splitlines()[-1]]

    differs, late = ranks(main)[0]
    assert differs == f"ranks disagree: {[(0, (3 << NUMBER_BITS) + 5), (1, (3 << NUMBER_BITS) + 6)]}"
    assert "counter stands at 2, needs 3; rank 1 did not arrive" in late


def test_hosts_compare_every_call_where_they_are_asked_to() -> None:
    def main(shm: SharedMemoryExchange) -> Any:
        backend = CudaBackend.__new__(CudaBackend)
        backend.rank, backend.size, backend._shm = shm.rank, 2, shm
        same, different = backend.compared(("op", 4)), backend.compared(("op", 4 + shm.rank))
        return same, different

    assert ranks(main) == [(None, {0: ("op", 4), 1: ("op", 5)})] * 2
