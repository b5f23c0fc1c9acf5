"""Calls are prepared once: the first call computes everything that depends only on shapes, dtypes and options.

For each plan class, an op has a function of the World, the call and the plan. The function makes the objects that all
calls share (channels, memory, launches) and returns the run of one call, which is a function of the operands and the
tensor for the result.

    def prepare_pushed(world, call, plan):
        launch = weft.Launch(world, push, world.sm_count, dict(num_warps=8), M=call.m)
        return lambda operands, out: launch(world.current_stream(), x=operands[0], out=out)

A run returns None, or the tuple of the results after the first. After memory that calls share has grown, the function
creates a new run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from .plans import Plan
from .residency import Launches
from .symmetric import outlives_call
from .tensor_checks import check_output, overlap
from .world import World

if TYPE_CHECKING:
    from .op import Call, Op

C = TypeVar("C", bound="Call")
T = TypeVar("T")
Operands: TypeAlias = Any  # tensors, with None for an absent one; a NamedTuple if the op names them (`Op.operand_type`)
Returned: TypeAlias = Any  # a tensor or a tuple, which the op's docstring describes
Run: TypeAlias = Callable[[Operands, torch.Tensor], Returned]  # (operands, out): writes out, returns further results


class OwnResult(NamedTuple):
    """A run that can allocate its result itself, as a call of cuBLAS or NCCL does: the caller may pass None as `out`.
    The run returns the tuple of all results."""

    run: Callable[[Operands, torch.Tensor | None], tuple[Returned, ...]]


Prepare: TypeAlias = Callable[..., Run | OwnResult]  # (world, call, plan)


def unprepared(run: Callable[..., Returned]) -> Prepare:
    """Return a preparation function that prepares nothing: each call runs run(world, call, plan, operands, out) in
    full."""

    @functools.wraps(run)
    def prepare(world: World, call: Call, plan: Plan) -> Run:
        return functools.partial(run, world, call, plan)

    return prepare


def made_once(make: Callable[..., T], *args: object) -> Callable[..., T]:
    """Return a cached function of `further` that returns make(*args, *further), for objects that a run needs only with
    some operands."""

    @functools.cache
    def make_once(*further: object) -> T:
        with outlives_call():
            return make(*args, *further)

    return make_once


class Prepared(Generic[C]):
    """The calls of one shape by one plan.

    number: the calls' number for `World.begin`; None if ranks do not compare them. launches: the calls' launches that
    wait for other ranks; None if no launch waits. The launches are noted while the first of these calls runs; until
    then each is assumed to fill the device.
    """

    def __init__(self, op: Op[C], world: World, call: C, plan: Plan) -> None:
        self.op, self.world, self.call, self.plan = op, world, call, plan
        self.number: int | None = None
        self.launches: Launches | None = None
        self.noted = True
        self._run: Callable[..., Returned] | None = None
        self._own_result = False

    def forget(self) -> None:
        """Drop the run, which refers to memory that calls share, so that the next call prepares a new run."""
        self._run = None

    def _prepare(self) -> Callable[..., Returned]:
        (self._shape, self._dtype), *_ = self.op.outputs(self.world, self.call)
        with outlives_call():
            run = self.op.prepare(self.world, self.call, self.plan)
        self._own_result = isinstance(run, OwnResult)
        self._empty, self._finish = self.world.empty, self.world.backend.finish  # looked up once, not in each call
        self.world.prepared_calls.add(self)
        self._run = prepared_run = run.run if isinstance(run, OwnResult) else run  # last, since other threads read it
        return prepared_run

    def __call__(self, operands: Operands, out: torch.Tensor | None) -> Returned:
        """Make a call, after copying operands that are not dense."""
        run = self._run or self._prepare()
        for t in operands:
            if t is not None and not (t.is_contiguous() and t.data_ptr() % 16 == 0 and t.numel()):
                operands = self.op.dense_operands(self.plan, operands)
                break
        if out is not None:
            results = self._to(out, operands, run)
        elif self._own_result:
            results = run(operands, None)
        else:
            result = self._empty(self._shape, self._dtype)
            further = run(operands, result)
            results = (result,) if further is None else (result, *further)
        self._finish()
        return results if len(results) > 1 else results[0]

    def _to(self, out: torch.Tensor, operands: Operands, run: Callable[..., Returned]) -> tuple[Returned, ...]:
        """Write the result to `out`, and return all results. The run first writes to separate memory if `out` is not
        aligned for bulk stores, or overlaps an operand that other programs may still read."""
        op, world = self.op, self.world
        check_output(op.title, world, out, self._shape, self._dtype)
        separate = out.data_ptr() % 16 != 0
        if not separate and overlap(out, *operands):
            operands_apart = op.without_overlap(world, self.plan, operands, out)
            operands, separate = (operands, True) if operands_apart is None else (operands_apart, False)
        result = (world.zeros if op.partial else world.empty)(self._shape, self._dtype) if separate else out
        further = run(operands, result)
        if separate:
            world.copy(out, result, world.current_stream())
        return (out, *(further[1:] if self._own_result else further or ()))

    def note(self, operands: Operands, out: torch.Tensor | None) -> Returned:
        """Make a call, and note those of its launches that wait for other ranks."""
        with self.world.backend.note_launches() as notes:
            results = self(operands, out)
        self.launches, self.noted = notes.launches, True
        return results
