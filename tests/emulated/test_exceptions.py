"""After an exception inside a call, the caller's stream waits for all work that the call has enqueued on side streams.
The exception frees the call's tensors, whose memory the allocator assigns to the stream's next operation. In each kind
of run, every step raises an exception once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import weft
from weft.nn import weave
from weft.plans import Decomposed, FlagGated, Plan, Segmented, TwoLevel

STEPS = (
    "launch",
    "copy",
    "signal",
    "wait",
    "call",
    "record",
    "wait_event",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
)
ROWS, N, K = 8, 16, 32


class Interrupt(BaseException):
    """An exception that replaces a step, as a KeyboardInterrupt may."""


class Steps:
    """A backend that counts the operations a rank enqueues, and raises an exception instead of operation number
    `fails`. `allocated` lists all memory allocated during the call."""

    def __init__(self, world: weft.World) -> None:
        self.backend, self.count, self.fails = world.backend, 0, -1
        self.allocated: list[torch.Tensor] = []
        self._deep = False

    def _step(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            if self._deep:  # an operation calls the backend again as part of itself
                return plain(*args, **options)
            self.count += 1
            if self.count - 1 == self.fails:
                raise Interrupt
            self._deep = True
            try:
                return plain(*args, **options)
            finally:
                self._deep = False

        return step

    def _allocating(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*args: Any) -> torch.Tensor:
            self.allocated.append(plain(*args))
            return self.allocated[-1]

        return allocate

    @contextmanager
    def counting(self, fails: int = -1) -> Iterator[None]:
        self.count, self.fails, self.allocated = 0, fails, []
        backend = vars(self.backend)
        backend.update({name: self._step(getattr(self.backend, name)) for name in STEPS})
        backend.update({name: self._allocating(getattr(self.backend, name)) for name in ("empty", "zeros")})
        try:
            yield
        except Interrupt:
            pass
        finally:
            for name in (*STEPS, "empty", "zeros"):
                del backend[name]


def raise_in_each_step(world: weft.World, call: Callable[[weft.World], object]) -> int:
    """Make the call once for each of its steps, and raise an exception in that step. Then write to all memory that the
    call had allocated. This write raises a Race if a side stream has yet to read or write that memory. Return the
    number of steps."""
    call(world)
    world.synchronize()
    world.backend.finish = lambda stream=None: None  # the host runs ahead, as on a GPU
    steps = Steps(world)
    with steps.counting():
        call(world)
    world.synchronize()
    count = steps.count
    for fails in range(count):
        with steps.counting(fails):
            call(world)
        for t in steps.allocated:
            world.call(lambda t=t: t.fill_(7), [], [t], world.current_stream())
        world.synchronize()
        world.exchange("the next call")  # peers are still reading the rows that this rank has staged
    return count


def x(world: weft.World, rows: int = ROWS, columns: int = K) -> torch.Tensor:
    return torch.full((rows, columns), world.rank + 1.0).bfloat16()


def gather(plan: Plan) -> Callable[[weft.World], object]:
    return lambda world: weft.all_gather_matmul(x(world), torch.ones(N, K).bfloat16(), world=world, plan=plan)


def scatter(plan: str | Plan) -> Callable[[weft.World], object]:
    return lambda world: weft.matmul_reduce_scatter(
        x(world, world.size * ROWS), torch.ones(N, K).bfloat16(), world=world, plan=plan
    )


def reduce(plan: Plan) -> Callable[[weft.World], object]:
    return lambda world: weft.matmul_all_reduce(x(world), torch.ones(N, K).bfloat16(), world=world, plan=plan)


def total(plan: Plan) -> Callable[[weft.World], object]:
    return lambda world: weft.all_reduce(x(world, 16, 256), world=world, plan=plan)


def exchange(plan: str | Plan) -> Callable[[weft.World], object]:
    return lambda world: weft.matmul_all_to_all(
        x(world),
        torch.ones(N, K).bfloat16(),
        destinations=[row % world.size for row in range(ROWS)],
        world=world,
        plan=plan,
    )


def attention(world: weft.World) -> None:
    q, k, v = (torch.ones(ROWS, 2, 16).bfloat16() for _ in range(3))
    weft.gathered_attention(q, k, v, causal=False, world=world, plan=Segmented(calls=2))


def gradients(world: weft.World) -> None:
    q, k, v = (torch.ones(ROWS, 2, 16).bfloat16().requires_grad_() for _ in range(3))
    y = weft.gathered_attention(q, k, v, causal=False, world=world, plan=Segmented(calls=2))
    y.backward(torch.ones_like(y))


def woven(world: weft.World) -> None:
    def compute(i: int, y: torch.Tensor) -> torch.Tensor:
        partial = world.empty(y.shape, y.dtype)
        world.copy(partial, y, world.current_stream())
        return partial

    def total_of(k: int, i: int, partial: torch.Tensor) -> torch.Tensor:
        return weft.all_reduce(partial, world=world, plan="sequential")

    weave.run(world, [x(world), x(world)], [compute, compute], total_of)


CASES: dict[str, tuple[int, Callable[[weft.World], object]]] = {
    "gather, decomposed": (1, gather(Decomposed())),
    "gather, flag_gated": (1, gather(FlagGated(tile_m=4, cluster_m=1))),
    "gather, two levels": (2, gather(TwoLevel(1))),
    "reduce-scatter, decomposed": (1, scatter(Decomposed())),
    "reduce-scatter, two levels": (2, scatter(TwoLevel(1))),
    "GEMM + all-reduce, decomposed": (1, reduce(Decomposed())),
    "GEMM + all-reduce, two levels": (2, reduce(TwoLevel(1))),
    "all-reduce, decomposed": (1, total(Decomposed())),
    "all-reduce, two levels": (2, total(TwoLevel(1))),
    "all-to-all, two levels": (2, exchange(TwoLevel(1))),
    "attention": (1, attention),
    "attention's gradients": (1, gradients),
    "weave": (1, woven),
}


@pytest.mark.parametrize("case", CASES)
def test_the_callers_stream_waits_for_a_call_that_raised(case: str) -> None:
    nodes, call = CASES[case]
    steps = weft.spmd(raise_in_each_step, 2 * nodes, backend="emulated", nodes=nodes, args=(call,))
    assert min(steps) > 3


def fused(world: weft.World, fails: int) -> None:
    """Launch programs that wait for a launch on another stream, and raise an exception in step `fails` between the two
    launches."""
    call = scatter("fused")
    call(world)
    world.synchronize()
    steps = Steps(world)
    with steps.counting(fails):
        call(world)
    for t in steps.allocated:
        world.call(lambda t=t: t.fill_(7), [], [t], world.current_stream())
    world.synchronize()


@pytest.mark.parametrize("fails", range(4))
def test_the_callers_stream_waits_for_programs_whose_waits_expire(fails: int) -> None:
    """On a GPU these waits expire; until then, the programs use the call's memory."""
    try:
        weft.spmd(fused, 2, backend="emulated", args=(fails,))
    except weft.Deadlock as e:
        assert "stream main waits for an event of stream pull" in str(e)
