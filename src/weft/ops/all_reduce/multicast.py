"""All-reduce, with or without a norm, by NVLink multicast (TokenWeave, section 4): two shots in one launch, whose sums
and stores are the switch's (`kernels.multicast_shot`). It is compiled and emulated, and has never run on hardware."""

from __future__ import annotations

import torch

from ...backends.base import Stream
from ...kernel_launch import Launch, prepared
from ...plans import Multicast
from ...transport.memory import lock
from ...world import World
from .call import SumCall, Tensors
from .kernels import WHOLE, multicast_shot


def why_no_multicast(world: World, call: SumCall) -> str | None:
    """Return why the switch cannot serve this call, or None where it can. Collective on first use."""
    if call.dtype.itemsize != 2 or call.out_dtype != call.dtype:
        return "the switch's sums and stores are of bfloat16 or float16 here"
    if not world.buffer("multicast probe", 256).multicast:
        return "symmetric memory has no multicast address"
    return None


def run_multicast(world: World, call: SumCall, plan: Multicast, t: Tensors, stream: Stream) -> None:
    source, out = t.x_shared, t.out_shared
    m, h, size = call.m, call.h, call.dtype.itemsize
    world.order(lock(world, "two-shot all-reduce"), stream)
    if source is None:
        source = world.buffer("two-shot all-reduce, x", m * h * size).view(0, (m, h), call.dtype)
        world.copy(source.local, t.x, stream)
    landing = out is None
    if out is None:
        out = world.buffer("two-shot all-reduce, out", m * h * size).view(0, (m, h), call.dtype)
    sums = None
    if call.keep == WHOLE.value:
        sums = world.buffer("two-shot all-reduce, sums", m * h * size).view(0, (m, h), call.dtype)
    launch = _multicast_launch(world, call, plan, tuple(s.multicast if s else 0 for s in (source, out, sums)))
    launch(stream, **{name: value for name, value in t.arguments().items() if name != "scale"})
    if landing:
        world.copy(t.out, out.local, stream)
    if sums is not None and t.kept is not None:
        world.copy(t.kept, sums.local, stream)


@prepared
def _multicast_launch(world: World, call: SumCall, plan: Multicast, windows: tuple[int, ...]) -> Launch:
    programs = min(plan.programs or world.sm_count, world.sm_count)
    return Launch(
        world,
        multicast_shot,
        programs,
        call.options(plan.warps),
        windows=world.cached(("windows", windows), lambda: world.tensor(windows, torch.int64)),
        turn=world.cached("two-shot all-reduce, turn", lambda: world.zeros((1,), torch.int32)),
        ch=world.cached((call, plan), lambda: world.channel(f"{call.op} {call} {plan}", 1 + world.size, None)),
        M=call.m,
        norm=call.computed,
        PROGRAMS=programs,
    )
