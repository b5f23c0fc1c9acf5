"""Calls on two streams of a rank whose launches wait for other ranks. Calls that may not fit on the SMs together run
one after another, in the same order on all ranks; all other calls run concurrently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import weft
from weft import moe
from weft.backends import cuda
from weft.backends.launcher import NotingLauncher
from weft.nn import weave
from weft.plans import TwoShotPull
from weft.residency import UNKNOWN, Ledger, Noting, ResidentPrograms, SMs
from weft.transport.memory import Lock

Call = Callable[[weft.World], object]
FEW, ALL = TwoShotPull(warps=4, stages=2, programs=2), TwoShotPull(warps=4, stages=2)


def x() -> torch.Tensor:
    return torch.ones(32, 32).bfloat16()


def gather(world: weft.World) -> None:
    weft.all_gather_matmul(x(), torch.ones(64, 32).bfloat16(), world=world, plan="fused")


def two_shot(world: weft.World, plan: weft.Plan = ALL) -> None:
    weft.all_reduce(x(), world=world, plan=plan)


def layer(world: weft.World) -> None:
    w13 = moe.pack(torch.ones(2, 32, 32).bfloat16(), world=world)
    ids = torch.arange(32)[:, None].int() % (2 * world.size)
    moe.moe(x(), ids, torch.ones(32, 1), w13, torch.ones(2, 32, 16).bfloat16(), world=world, plan="fused")


def on_two_streams(call_a: tuple[weft.World, Call], call_b: tuple[weft.World, Call], times: int = 3) -> None:
    """Make both calls repeatedly, each on a separate stream, with a host that runs ahead as on a GPU."""
    world = call_a[0]
    for ranks, call in (call_a, call_b):
        call(ranks)
        ranks.synchronize()
        ranks.backend.finish = lambda stream=None: None
    for _ in range(times):
        for name, (ranks, call) in (("user a", call_a), ("user b", call_b)):
            with world.on(world.side_stream(name)):
                call(ranks)
    world.synchronize()


@contextmanager
def counted_waits(world: weft.World) -> Iterator[list[str]]:
    """Yield a list of the names of streams for which another stream waited until SMs were free."""
    waits: list[str] = []
    backend, start_after = world.backend, world.backend.start_after

    def counted(stream: Any, earlier: Any) -> None:
        waits.append(earlier.name)
        start_after(stream, earlier)

    backend.start_after = counted
    try:
        yield waits
    finally:
        del backend.start_after


# -- calls that hang without it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call_a", "call_b", "seed"), [(gather, layer, 1), (two_shot, layer, 2)])
def test_launches_that_need_all_sms_are_serialised(call_a: Call, call_b: Call, seed: int) -> None:
    weft.spmd(lambda world: on_two_streams((world, call_a), (world, call_b)), 2, backend="emulated", seed=seed)


def worlds_of_the_same_ranks(world: weft.World) -> None:
    on_two_streams((world, gather), (world.split(0), layer))


def test_worlds_of_the_same_ranks_share_the_sms() -> None:
    weft.spmd(worlds_of_the_same_ranks, 2, backend="emulated", seed=1)


def alone_beside_all(world: weft.World) -> list[str]:
    with counted_waits(world.alone) as waits:
        on_two_streams((world, two_shot), (world.alone, layer), 2)
    return waits


def test_programs_of_one_rank_that_wait_for_each_other_need_room() -> None:
    """FusedMoe has a grid barrier, even with one rank."""
    assert all("user a" in waits for waits in weft.spmd(alone_beside_all, 2, backend="emulated"))


def experts_on_few_sms(world: weft.World, plan: str, sms: int) -> None:
    """Call a layer of one rank with launches that begin when fewer SMs than programs are free."""
    w13 = moe.pack(torch.ones(4, 32, 32).bfloat16(), world=world)
    ids, w2 = torch.arange(8)[:, None].int() % 4, torch.ones(4, 32, 16).bfloat16()
    for _ in range(2):
        moe.moe(x()[:8], ids, torch.ones(8, 1), w13, w2, world=world, plan=plan)
        world.synchronize()
        del world.backend.machine.streams.free[0][sms:]


@pytest.mark.parametrize("plan", ["sequential", "dispatched", "low_latency"])
def test_with_one_rank_other_plans_need_no_room_for_all_programs(plan: str) -> None:
    weft.spmd(experts_on_few_sms, 1, backend="emulated", args=(plan, 1))


def test_a_grid_barrier_needs_room_for_all_programs() -> None:
    with pytest.raises(weft.Deadlock, match="grid_barrier"):
        weft.spmd(experts_on_few_sms, 1, backend="emulated", args=("fused", 5))


def test_launches_are_noted_as_they_were_compiled(monkeypatch: Any) -> None:
    """On a GPU, weft records the threads, registers and shared memory (with the system's part) of a launch; it records
    nothing for a launch that does not wait for another."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    compiled = SimpleNamespace(n_regs=165, metadata=SimpleNamespace(num_warps=8, shared=4096))
    plain: Any = SimpleNamespace(
        backend=SimpleNamespace(device=None), launch=lambda *_: None, load=None, compiled=lambda *_: compiled
    )
    noting = Noting()
    launcher = NotingLauncher(plain, noting)
    with noting.noting() as notes:
        for options in (dict(num_warps=8), dict(num_warps=8, local=True)):
            launcher.launch(None, 132, {}, options, "stream")  # type: ignore[arg-type]
    launcher.launch(None, 1, {}, {}, "stream")  # type: ignore[arg-type]
    assert notes.launches == (frozenset({ResidentPrograms(132, (168 * 256, 5120, 256))}),)


def test_a_ledger_counts_the_collectives_of_each_group_once(monkeypatch: Any) -> None:
    """A ledger may outlive a World, and Python reuses the World's `id`."""
    monkeypatch.setattr(cuda, "room_of", lambda device: (1,))
    noting = Noting()
    with noting.noting() as notes:
        for group in "aabb":
            backend = cuda.CudaBackend.__new__(cuda.CudaBackend)
            vars(backend).update(device=None, group=SimpleNamespace(group_name=group))
            vars(backend).update(_noting=noting, _collective=lambda *_: None)
            backend._noted_collective(None, lambda: None)  # type: ignore[arg-type]
            del backend
    assert {programs.communicator for programs in notes.by_stream["collectives"]} == {"a", "b"}


# -- calls that run as without it --------------------------------------------------------------------------------------


def waits_of(world: weft.World, plan: weft.Plan) -> int:
    calls = (world, lambda ranks: two_shot(ranks, plan)), (world.split(0), lambda ranks: two_shot(ranks, plan))
    on_two_streams(*calls, times=2)
    with counted_waits(world) as call_a, counted_waits(calls[1][0]) as call_b:
        for _ in range(3):
            for name, (ranks, call) in zip(("user a", "user b"), calls, strict=True):
                with world.on(world.side_stream(name)):
                    call(ranks)
    world.synchronize()
    return len(call_a) + len(call_b)


def test_calls_that_fit_together_take_no_event() -> None:
    assert weft.spmd(waits_of, 2, backend="emulated", args=(FEW,)) == [0, 0]
    assert weft.spmd(waits_of, 2, backend="emulated", args=(ALL,)) == [6, 6]


def known_calls_on_one_stream(world: weft.World) -> int:
    """Return how often calls on one stream check whether launches on other streams leave enough free SMs."""
    calls: tuple[Call, ...] = gather, two_shot, lambda world: weft.matmul_reduce_scatter(x(), x(), world=world)
    for _ in range(2):
        for call in calls:
            call(world)
    looked, ledger = [], world.backend.ledgers.eager  # type: ignore[union-attr]
    ledger.enter = lambda *arguments: looked.append(arguments) or []  # type: ignore[method-assign]
    for call in calls:
        call(world)
    world.synchronize()
    return len(looked)


def test_calls_on_one_stream_take_no_event_and_no_time() -> None:
    assert weft.spmd(known_calls_on_one_stream, 2, backend="emulated") == [0, 0]


def woven(world: weft.World) -> list[str]:
    w, norm = torch.ones(32, 32).bfloat16(), torch.ones(32).bfloat16()

    def compute(i: int, y: torch.Tensor) -> torch.Tensor:
        return world.backend.linear(y, w, None, world.current_stream())

    def reduce(k: int, i: int, partial: torch.Tensor) -> torch.Tensor:
        return weft.all_reduce_rms_norm(partial, None, norm, 1e-6, world=world, plan=ALL)[0]

    with counted_waits(world) as waits:
        weave.run(world, [x(), x()], [compute, compute], reduce)
    world.synchronize()
    return waits


def test_sums_of_a_weave_wait_for_no_gemm() -> None:
    assert weft.spmd(woven, 2, backend="emulated") == [[], []]


def waits_in_a_capture(world: weft.World) -> list[str]:
    """Check that calls in a capture wait only for calls on the other streams of that capture."""
    a, b, c = (world.side_stream(name) for name in "abc")
    world.backend.captures = lambda stream: stream in (a, b)
    with counted_waits(world) as waits:
        for stream, capturing in ((c, True), (a, True), (b, True), (c, False)):
            with world.on(stream):
                world.order_residents(UNKNOWN, capturing)
    return waits


def test_captures_are_apart() -> None:
    assert weft.spmd(waits_in_a_capture, 1, backend="emulated") == [["a"]]


def test_a_shared_workspace_keeps_captured_streams_and_others_apart() -> None:
    """If an eager call waited for an event of a captured stream, CUDA would add the call's stream to the capture."""

    def waits(world: weft.World) -> list[str]:
        a, b, c = (world.side_stream(name) for name in "abc")
        backend, earlier, captured = world.backend, [], [a, b]
        backend.captures, backend.capturing = captured.__contains__, lambda: world.current_stream() in captured
        backend.record = lambda stream: earlier.append(stream.name)
        backend.wait_event = lambda stream, event: None
        holder = Lock()
        holder.last_stream = a  # before its capture
        for stream in (c, a, b, c):
            with world.on(stream):
                world.order(holder, stream)
        captured.clear()
        world.order(holder, a)
        del backend.record, backend.wait_event
        return earlier

    assert weft.spmd(waits, 1, backend="emulated") == [["a", "c"]]


# -- which launches fit ------------------------------------------------------------------------------------------------


def stuck(sms: SMs, launches: list[ResidentPrograms]) -> bool:
    """Return whether, for some order of starts on some SMs, a program finds no free SM."""
    start = tuple([(0,) * len(sms.room)] * sms.number), tuple(launch.number for launch in launches)
    seen, states = set(), [start]
    while states:
        state = states.pop()
        if state in seen:
            continue
        seen.add(state)
        taken, left = state
        for i, launch in enumerate(launches):
            if not left[i]:
                continue
            starts = False
            for sm, used in enumerate(taken):
                then = tuple(map(sum, zip(used, launch.taken, strict=True)))
                if all(u <= room for u, room in zip(then, sms.room, strict=True)):
                    starts = True
                    rest = (*left[:i], left[i] - 1, *left[i + 1 :])
                    states.append((tuple(sorted((*taken[:sm], then, *taken[sm + 1 :]))), rest))
            if not starts:
                return True
    return False


programs = st.builds(ResidentPrograms, st.integers(1, 3), st.tuples(st.integers(1, 6), st.integers(1, 6)), st.none())


@given(st.integers(1, 3), st.lists(programs, min_size=1, max_size=3))
@example(1, [ResidentPrograms(number, (1, 1)) for number in (1, 3, 3)])  # 1/6 + 3/6 + 3/6 - 1/6 < 1 by rounding
@settings(deadline=None, max_examples=150)
def test_launches_that_fit_are_never_stuck(number: int, launches: list[ResidentPrograms]) -> None:
    sms = SMs(number, (6, 6))
    assert not (sms.fit(launches) and stuck(sms, launches))


def test_launches_that_fit_together() -> None:
    sms = SMs(132, (65536, 228 << 10, 2048))
    gemm, rows = ((256 * 168, 200 << 10, 256), (128 * 40, 8 << 10, 128))
    assert sms.fit([ResidentPrograms(100, gemm), ResidentPrograms(32, gemm)]), "each program has an SM"
    assert not sms.fit([ResidentPrograms(100, gemm), ResidentPrograms(33, gemm)])
    assert sms.fit([ResidentPrograms(132, rows), ResidentPrograms(132, rows)]), "two programs share each SM"
    assert sms.fit([ResidentPrograms(116, gemm), ResidentPrograms(16, rows)])
    assert not sms.fit([ResidentPrograms(132, gemm), ResidentPrograms(132, rows)]), (
        "four programs of rows on an SM leave no room for the GEMM"
    )


class StreamOfTorch:
    """A stream that compares as torch's do: with None, both == and != are False; any other object is read as a stream,
    whatever its memory contains."""

    def __eq__(self, stream: object) -> bool:
        assert stream is None or isinstance(stream, StreamOfTorch), f"{stream!r} would be read as a stream"
        return self is stream

    def __ne__(self, stream: object) -> bool:
        return stream is not None and not self == stream

    def __hash__(self) -> int:
        return id(self)


def test_a_call_waits_for_a_call_on_a_stream_of_torch() -> None:
    torch_streams = [torch.Stream(stream_id=i, device_index=0, device_type=1) for i in (5, 6)]
    whole = (frozenset({ResidentPrograms(4, (1,))}),)
    for a, b in (torch_streams, [StreamOfTorch(), StreamOfTorch()]):
        assert (a != b) and not (a != None or a == None)  # noqa: E711
        ledger = Ledger(SMs(4, (1,)))
        assert ledger.enter(a, whole) == []
        assert ledger.last_stream == a and ledger.recent == {whole}
        assert ledger.enter(b, whole) == [a]
        assert ledger.last_stream == b


def test_a_call_waits_for_all_that_may_still_run() -> None:
    """A call also waits for a call on a third stream, even if that call fits beside the second stream's last call."""
    half, whole = ((frozenset({ResidentPrograms(n, (1,))}),) for n in (2, 4))
    ledger = Ledger(SMs(4, (1,)))
    assert ledger.enter("a", whole) == []
    assert ledger.enter("b", half) == ["a"]
    assert ledger.enter("b", half) == [], "the stream waits for them already"
    assert ledger.enter("c", half) == ["a", "b"], "the second stream has waited for the first, but the third has not"
    assert ledger.enter("b", half) == [], "both calls must fit"
    assert ledger.enter("a", half) == ["b", "c"], "three calls must not fit"
    assert sorted(ledger.enter("b", UNKNOWN)) == ["a", "c"], "an unknown launch fits beside none"
