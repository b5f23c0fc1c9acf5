"""Hosts run ahead of their streams, as on a GPU (`ahead=True`): torch operations are ordered after earlier kernels on
their stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import weft
import weft.lang as wl
from tests.emulated.cases_nn import all_gather_grads
from weft import World
from weft.plans import TwoLevel

SEEDS = range(4)  # one seed for each scheduling policy


@weft.jit
def double(x, y, ch, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) * 2)
    wl.end_call(ch, None, 1)


def doubled(world: World, x: torch.Tensor) -> torch.Tensor:
    """Return 2 x; the current stream may not have computed x yet."""
    channel, y = world.channel("calls", 1, None), world.zeros((16,), torch.float32)
    arguments = dict(x=x, y=y, ch=channel, N=16)
    world.launch(double, 1, arguments, dict(num_warps=1), world.current_stream())
    return y


def ran(main: Callable[[World], Any], seed: int, size: int = 2, **options: Any) -> list[Any]:
    return weft.spmd(main, size, backend="emulated", seed=seed, ahead=True, **options)


@pytest.mark.parametrize("ahead", [False, True])
def test_operators_drain_their_stream_unless_ahead(ahead: bool) -> None:
    def main(world: World) -> bool:
        x, w = torch.ones(16, 32).bfloat16(), torch.ones(8, 32).bfloat16()
        weft.all_gather_matmul(x, w, world=world, plan="fused")
        return world.current_stream().idle

    # Rank 0 runs first and rank 1's shard has not arrived, so the kernel cannot have ended.
    assert weft.spmd(main, 2, backend="emulated", ahead=ahead)[0] is not ahead


@pytest.mark.parametrize("failing", [False, True])
def test_no_torch_mode_outlives_a_rank(failing: bool) -> None:
    """torch frees a mode that a thread leaves behind after the thread was joined, and a thread that then waits for the
    interpreter's lock while the interpreter exits ends the process (`std::terminate`)."""
    left: list[int] = []
    of_thread = threading.local()

    class AtThreadEnd:
        def __del__(self) -> None:
            left.append(len(_get_current_dispatch_mode_stack()) + len(_get_current_function_mode_stack()))

    def main(world: World) -> None:
        of_thread.value = AtThreadEnd()
        assert _get_current_dispatch_mode_stack()
        if failing:
            raise KeyError("one rank")

    with pytest.raises(KeyError) if failing else nullcontext():
        ran(main, seed=0, size=1)
    assert left == [0]


READS: dict[str, Callable[[torch.Tensor], list[float]]] = {
    "item": lambda y: [t.item() for t in y],
    "tolist": torch.Tensor.tolist,
    "repr": lambda y: eval(repr(y), {"tensor": list}),
    "format": lambda y: eval(f"{y}", {"tensor": list}),
    "numpy": lambda y: y.numpy().tolist(),
    "a view": lambda y: [y[i : i + 1].item() for i in range(16)],
    "a sum": lambda y: [y.sum().item() / 16] * 16,
    "a new tensor": lambda y: (y + 1 - 1).tolist(),
    "out": lambda y: torch.add(y, 0, out=torch.empty(16)).tolist(),
    "a list of tensors": lambda y: torch._foreach_add([y, y], 0.0)[1].tolist(),
}


@pytest.mark.parametrize("read", READS)
def test_torch_operations_follow_earlier_kernels(read: str) -> None:
    def main(world: World) -> list[float]:
        return READS[read](doubled(world, torch.ones(16)))

    for seed in SEEDS:
        assert ran(main, seed) == [[2.0] * 16] * 2


def test_torch_writes_after_earlier_kernels() -> None:
    def main(world: World) -> torch.Tensor:
        x = torch.ones(16)
        y = doubled(world, x)
        x.fill_(5.0)
        return y

    for seed in SEEDS:
        assert all(torch.equal(y, torch.full((16,), 2.0)) for y in ran(main, seed))


def test_backward_passes_see_the_kernels_before_them() -> None:
    """Autograd calls torch's operations from C++."""

    def main(world: World) -> torch.Tensor:
        w = torch.ones(16, requires_grad=True)
        (w * w).backward(doubled(world, torch.ones(16)))
        assert w.grad is not None
        return w.grad

    for seed in SEEDS:
        assert all(torch.equal(grad, torch.full((16,), 4.0)) for grad in ran(main, seed))


@pytest.mark.parametrize("event", [False, True])
def test_torch_on_another_stream_needs_an_event(event: bool) -> None:
    def main(world: World) -> torch.Tensor:
        y, side = doubled(world, torch.ones(16)), world.side_stream("side")
        if event:
            world.wait_event(side, world.record(world.current_stream()))
        with world.on(side):
            return y + 1

    for seed in SEEDS:
        if event:
            assert all(torch.equal(y, torch.full((16,), 3.0)) for y in ran(main, seed))
        else:
            with pytest.raises(weft.Race, match=r"stream side, add.Tensor at .*test_ahead"):
                ran(main, seed)


@pytest.mark.parametrize("event", [False, True])
def test_a_kernel_on_another_stream_needs_an_event_after_torch(event: bool) -> None:
    """The event must follow torch's operation, which is ordered after the kernel whose result it reads."""

    def main(world: World) -> torch.Tensor:
        y, side = doubled(world, torch.ones(16)) + 1, world.side_stream("side")
        if event:
            world.wait_event(side, world.record(world.current_stream()))
        with world.on(side):
            return doubled(world, y)

    for seed in SEEDS:
        if event:
            assert all(torch.equal(y, torch.full((16,), 6.0)) for y in ran(main, seed))
        else:
            with pytest.raises(weft.Race, match="add.Tensor"):
                ran(main, seed)


def test_a_read_on_the_host_orders_later_launches() -> None:
    def main(world: World) -> torch.Tensor:
        y = doubled(world, torch.ones(16))
        assert y[3].item() == 2
        with world.on(world.side_stream("side")):
            return y + 1

    for seed in SEEDS:
        assert all(torch.equal(y, torch.full((16,), 3.0)) for y in ran(main, seed))


def test_autograd_counts_a_write_when_it_is_enqueued() -> None:
    """A result that is a view, such as gathered rows, keeps its values after the call returns."""

    def main(world: World) -> float:
        return all_gather_grads(world, (8,) * 4, 16, 16, TwoLevel(), through=True)

    assert max(ran(main, 0, 4, nodes=2)) < 1.2e-2


def test_torch_may_read_unwritten_elements() -> None:
    """Grouped GEMMs, for example, skip rows of padding. The writes of a kernel on a different stream are ordered
    nevertheless."""

    def main(world: World, event: bool) -> torch.Tensor:
        x, side = world.empty((16,), torch.float32), world.side_stream("side")
        first_half = x[:8]
        world.call(lambda: first_half.fill_(1.0), [], [first_half], world.current_stream())
        if event:
            world.wait_event(side, world.record(world.current_stream()))
        with world.on(side):
            return x.clone()[:8]

    for seed in SEEDS:
        assert all(torch.equal(y, torch.ones(8)) for y in ran(main, seed, args=(True,)))
    with pytest.raises(weft.Race):
        for seed in SEEDS:
            ran(main, seed, args=(False,))
