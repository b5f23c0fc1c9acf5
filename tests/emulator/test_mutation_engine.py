"""The mutation engine finds every call of a small protocol and breaks exactly that call, and the emulator reports each
broken call."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import triton.language as tl

from tests.emulator.mutate import Mutation, kill_rate, sites
from weft.backends.emulated import EmulatedBackend, spmd
from weft.check.schedules import explore
from weft.lang.intrinsics import flush_stores, wait_until
from weft.lang.jit import jit

N = 64


@jit
def notify(flag, BULK: tl.constexpr):
    flush_stores(BULK)
    tl.atomic_add(flag, 1, sem="release", scope="sys")


@jit
def send(x, peers, flags, rank, world, N: tl.constexpr, TWICE: tl.constexpr):
    """Program p writes x to slot `rank` of rank p."""
    to = tl.program_id(0)
    offsets = tl.arange(0, N)
    data = tl.load(peers + to).to(tl.pointer_type(tl.float32)) + rank * N
    flag = tl.load(flags + to).to(tl.pointer_type(tl.int32))
    tl.store(data + offsets, tl.load(x + offsets))
    notify(flag, False)
    if TWICE:
        notify(flag, False)


@jit
def receive(box, flag, out, guard, world, N: tl.constexpr):
    wait_until(flag, world, guard, -1, -1, "sys")
    acc = tl.zeros((N,), tl.float32)
    for r in range(world):
        acc += tl.load(box + r * N + tl.arange(0, N))
    tl.store(out + tl.arange(0, N), acc)


def exchange(b: EmulatedBackend) -> None:
    box = b.symmetric(b.size * N * 4, "box").view(0, (b.size, N), torch.float32)
    flag = b.symmetric(4, "flag").view(0, (1,), torch.int32)
    x, out, copy = b.empty((N,), torch.float32), b.empty((N,), torch.float32), b.empty((N,), torch.float32)
    main, side = b.current_stream(), b.side_stream("comm")
    b.register_channel("flag", flag.local, 1, b.size)
    b.call(lambda: x.fill_(b.rank + 1.0), [], [x], main)
    b.wait_event(side, b.record(main))
    sizes = dict(world=b.size, N=N)
    args = dict(x=x, peers=box.addresses, flags=flag.addresses, rank=b.rank, TWICE=False, **sizes)
    b.launch(send, b.size, args, {}, side)
    b.launch(receive, 1, dict(box=box.local, flag=flag.local, out=out, guard=b.guard(), **sizes), {}, main)
    b.stream_barrier(main)
    b.copy(copy, box.peers[(b.rank + 1) % b.size][0], main)
    b.stream_barrier(main)
    b.call(lambda: box.local.fill_(0), [], [box.local], main)
    b.finish(main)
    assert out[0].item() == sum(range(1, b.size + 1)) and copy[0].item() == 1


def line(fn: Any, text: str, nth: int = 0) -> int:
    source, start = inspect.getsourcelines(getattr(fn, "fn", fn))
    return [start + i for i, s in enumerate(source) if text in s][nth]


@pytest.fixture(scope="module")
def mutations() -> list[Mutation]:
    return sites(None, spmd(exchange, 2, record=True)[1])


def test_sites(mutations: list[Mutation]) -> None:
    line_descriptions = {(m.line, m.description) for m in mutations}
    add, wait = line(notify, "atomic_add"), line(receive, "wait_until")
    assert line_descriptions == {
        (line(notify, "flush_stores"), "remove flush_stores(...)"),
        (add, "remove tl.atomic_add(...)"),
        (add, "double tl.atomic_add(...)"),
        (add, "make tl.atomic_add(...) relaxed instead of release"),
        (add, 'narrow tl.atomic_add(...) to scope "gpu"'),
        (line(send, "notify(flag"), "remove notify(...)"),
        (line(send, "notify(flag"), "double notify(...)"),
        (wait, "remove wait_until(...)"),
        (wait, 'narrow wait_until(...) to scope "gpu"'),
        (wait, "let wait_until(...) pass one arrival early"),
        (line(exchange, "wait_event"), "drop wait_event"),
        (line(exchange, "b.stream_barrier"), "drop stream_barrier"),
        (line(exchange, "b.stream_barrier", 1), "drop stream_barrier"),
    }, "unreached lines (TWICE) must not be sites"
    assert any(str(m).endswith(f"test_mutation_engine.py:{wait} remove wait_until(...)") for m in mutations)
    assert {m.function for m in sites([receive], spmd(exchange, 2, record=True)[1])} == {"receive", ""}


def test_every_mutation_is_caught_on_every_seed(mutations: list[Mutation]) -> None:
    for seed in range(4):
        spmd(exchange, 2, seed=seed)
        for mutation, caught in kill_rate(exchange, 2, mutations, [seed]):
            assert caught is not None, f"{mutation} survived seed {seed}"
    catcher = {m.description: c.partition(":")[0] for m, c in kill_rate(exchange, 2, mutations, [0]) if c}
    assert catcher["remove tl.atomic_add(...)"] == "Deadlock"
    assert catcher["remove flush_stores(...)"] == catcher["drop stream_barrier"] == catcher["drop wait_event"] == "Race"


def test_harmless_mutations_survive(mutations: list[Mutation]) -> None:
    def trivial(b: EmulatedBackend) -> None:
        b.finish(b.current_stream())

    assert [c for _, c in kill_rate(trivial, 2, mutations, [0])] == [None] * len(mutations)


def test_a_mutation_ends_with_its_run(mutations: list[Mutation]) -> None:
    with pytest.raises(Exception, match=r"race|wait"):
        spmd(exchange, 2, mutation=mutations[0])
    spmd(exchange, 2)


def test_explore() -> None:
    good = explore(exchange, 2, range(12), preempt=0.3)
    assert good.runs == 12 and not good.findings and good.schedules > 6 and set(good.modes.values()) == {3}

    def bad(b: EmulatedBackend) -> None:
        b.copy(b.empty((4,), torch.float32), torch.ones(4), b.side_stream("a"))
        flag, one = b.symmetric(4, "flag").view(0, (1,), torch.int32), b.tensor([1], torch.int32)
        b.wait(flag.local, one, b.current_stream())

    stuck = explore(bad, 2, range(4))
    assert stuck.deadlocks == [0, 1, 2, 3] and not stuck.races
    assert explore(bad, 2, range(4), stop=True).runs == 1
