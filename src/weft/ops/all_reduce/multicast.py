"""All-reduce, with or without a norm, by NVLink multicast (TokenWeave, section 4). One launch runs two shots, in which
the switch sums and stores (`kernels.multicast_shot`). The kernel was compiled and emulated, but has never run on
hardware."""

from __future__ import annotations

import torch

from ...backends.base import Stream
from ...kernel_launch import Launch, prepared
from ...plans import Multicast
from ...transport.memory import lock
from ...world import World
from .call import SumCall, Tensors
from .kernels import multicast_shot
from .runs import SHARED, SumRun, prepare_sharing, summing, take_rows


def why_no_multicast(world: World, call: SumCall) -> str | None:
    """Return the reason why the switch cannot compute this call, or None if it can. The first call is collective."""
    if call.dtype.itemsize != 2 or call.out_dtype != call.dtype:
        return "multicast needs x and the output in bfloat16, or both in float16"
    if not world.buffer("multicast probe", 256).multicast:
        return "symmetric memory has no multicast address"
    return None


@summing
def prepare_multicast(world: World, call: SumCall, plan: Multicast) -> SumRun:
    holder, share = lock(world, SHARED), prepare_sharing(world, call)

    def sum_rows(t: Tensors, stream: Stream) -> None:
        world.order(holder, stream)
        t = t.as_matrices(world, call, True)
        shared = share(t, stream)
        launch = _multicast_launch(world, call, plan, tuple(memory.multicast if memory else 0 for memory in shared[:3]))
        launch(stream, **{name: value for name, value in t.arguments().items() if name != "scale"})
        take_rows(world, t, shared, stream)

    return sum_rows


@prepared
def _multicast_launch(world: World, call: SumCall, plan: Multicast, windows: tuple[int, ...]) -> Launch:
    programs = min(plan.programs or world.sm_count, world.sm_count)
    return Launch(
        world,
        multicast_shot,
        programs,
        call.options(plan.warps),
        windows=world.cached(("windows", windows), lambda: world.tensor(windows, torch.int64)),
        epoch=world.cached("two-shot all-reduce, epoch", lambda: world.zeros((1,), torch.int32)),
        ch=world.cached((call, plan), lambda: world.channel(f"{call.op} {call} {plan}", 1 + world.size, None)),
        M=call.m,
        norm=call.computed,
        PROGRAMS=programs,
    )
