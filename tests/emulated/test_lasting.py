"""Memory that later calls rely on is allocated where no replay of a CUDA graph writes
(`Backend.persistent_allocation`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import draw
from weft.backends.cuda import CudaBackend
from weft.ops.all_reduce.op import AllReduce
from weft.ops.moe.expert_parallel.dispatched import scratch
from weft.plans import OneShot, Sequential


def watched(world: weft.World) -> list[str]:
    """Return a list of the backend's later allocations that are not persistent. Address tables of views, which only the
    emulator creates again, are excluded."""
    backend: Any = world.backend
    backend.guard()
    outside: list[str] = []
    depth = 0

    @contextmanager
    def persistent_allocation() -> Iterator[None]:
        nonlocal depth
        depth += 1
        yield
        depth -= 1

    def watch(name: str, make: Any) -> Any:
        def make_outside(*args: Any) -> Any:
            if not depth:
                outside.append(name)
            return make(*args)

        return make_outside

    def views(*args: Any, make: Any = backend.table) -> Any:
        with persistent_allocation():
            return make(*args)

    backend.persistent_allocation, backend.table = persistent_allocation, views
    for name in ("zeros", "tensor", "symmetric", "empty"):
        setattr(backend, name, watch(name, getattr(backend, name)))
    return outside


def test_a_world_keeps_only_persistent_memory() -> None:
    def main(world: weft.World) -> None:
        outside = watched(world)
        world.channel("counters", 3, None)
        world.local_channel("own counters", [1, 2])
        world.arena(1 << 17)
        world.symmetric((4,), torch.int32)
        world.buffer("room", 64)
        world.cached("zeros", lambda: world.zeros((4,), torch.int32))
        scratch(world, "hidden", 4, 8, torch.bfloat16)
        assert outside == []
        world.zeros((1,), torch.int32)
        assert outside == ["zeros"]

    weft.spmd(main, 2, backend="emulated")


@pytest.mark.parametrize("plan", ["one_shot", "two_shot", "sequential"])
def test_a_call_makes_nothing_else_but_its_results(plan: str) -> None:
    """A graph may be captured after the first call of a size, because only that call allocates memory."""

    def main(world: weft.World) -> None:
        outside, x = watched(world), draw(world.rank, 4, 32)
        with torch.no_grad():
            weft.all_reduce_rms_norm(x, x, draw(9, 32), world=world, plan=plan, full_residual=True)
        assert set(outside) <= {"empty"}

    weft.spmd(main, 2, backend="emulated")


def test_a_warm_up_on_one_rank_alone_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank makes its first call on a side stream. Although all ranks have already called that plan, this rank waits
    on the host, because the other ranks would not join a collective."""
    plans = {"eager": OneShot(), "graph": Sequential()}
    monkeypatch.setattr(AllReduce, "auto", lambda self, world, call, mode: plans[mode])

    def main(world: weft.World) -> None:
        x = torch.ones(4, 32, dtype=torch.bfloat16)
        weft.all_reduce(x, world=world, plan="sequential")
        world.backend.on_side_stream = lambda: world.rank == 0  # type: ignore[method-assign]
        with pytest.raises(weft.Mismatch, match="warm_up=True"):
            weft.all_reduce(2 * x, world=world)
            weft.all_reduce(x[:2], world=world, plan="sequential")
            world.synchronize()

    weft.spmd(main, 2, backend="emulated")


def test_persistent_memory_is_allocated_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Persistent memory is ordered with the caller's stream. On the default stream, which cannot be captured,
    persistent memory needs no second stream."""
    backend, log = CudaBackend.__new__(CudaBackend), []  # type: ignore[var-annotated]
    current = ["caller"]

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        before, current[0] = current[0], stream
        yield
        current[0] = before

    for name, as_if in dict(
        current_stream=lambda: current[0],
        side_stream=lambda name, urgent: name,
        on_side_stream=lambda: current[0] != "default",
        record=lambda stream: f"all of {stream}",
        wait_event=lambda stream, event: log.append(f"{stream} waits for {event}"),
        on=on,
    ).items():
        monkeypatch.setattr(backend, name, as_if, raising=False)
    with backend.persistent_allocation():
        log.append(f"on {current[0]}")
        with backend.persistent_allocation():
            log.append(f"on {current[0]}")
    waits = ["persistent waits for all of caller", "caller waits for all of persistent"]
    assert log == [waits[0], "on persistent", "on persistent", waits[1]]
    log.clear()
    current[0] = "default"
    with backend.persistent_allocation():
        log.append(f"on {current[0]}")
    assert log == ["on default"]
