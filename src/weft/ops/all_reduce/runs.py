"""How each plan prepares an all-reduce, with or without a residual add and norm after the sum (TokenWeave, section 4).

sequential          NCCL's all-reduce, then one kernel
one_shot, two_shot  one launch (low_latency_kernels.py for few rows, otherwise kernels.py)
decomposed          two shots with a copy engine that moves the rows, so that only the owner's sums between the shots
                    use SMs
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch

from ...architectures import features
from ...backends.base import Stream, StreamWork, SymmetricTensor
from ...kernel_launch import Launch, Words, prepared
from ...lang.jit import constants
from ...plans import (
    Decomposed,
    LowLatencyShot,
    OneShot,
    Plan,
    TwoShotCounted,
    TwoShotLowLatency,
    TwoShotPush,
)
from ...prepared import OwnResult, Prepare, Run, made_once
from ...transport.copy_engine import COPIES, pull_parts, pull_rows
from ...transport.interfaces import CollectiveFunction
from ...transport.low_latency import prepare_posting, thirds_of
from ...transport.memory import lock, rank_word, workspace
from ...world import World
from ..common import split_rows
from .call import PLAIN_SUM, NormOperands, SumCall, SumOperands, Symmetric, Tensors, sum_call
from .kernels import ABSENT, OWN, WHOLE, RankAddresses, Shots, add_norm, sum_norm, two_shot
from .low_latency_kernels import one_shot, two_shot_low_latency

SHARED = "two-shot all-reduce"  # the name of the symmetric memory of these plans
REST_KIB = 11  # KiB of a program's shared memory that rows in flight cannot use


SumRun: TypeAlias = Callable[[Tensors, Stream], None]


def summing(make: Callable[[World, SumCall, Any], SumRun]) -> Prepare:
    """Return the function that prepares a plan, made from a run with the arguments `Tensors` and a stream. The results
    after the first are the sum with the residual and the scales, or None if the call does not return them; a plain sum
    returns neither."""

    @functools.wraps(make)
    def prepare(world: World, call: SumCall, plan: Plan) -> Run:
        sum_rows = make(world, call, plan)
        kept_rows = call.m if call.keep == WHOLE.value else split_rows(world, call.m)[world.rank]
        empty, current = world.empty, world.current_stream

        def run(operands: SumOperands | NormOperands, out: torch.Tensor) -> tuple[torch.Tensor | None, ...] | None:
            if isinstance(operands, SumOperands):
                sum_rows(Tensors(operands.x, out), current())
                return None
            x, residual, weight, bias, scale, kept = operands
            if kept is None and call.keep:
                kept = empty((kept_rows, call.h), call.dtype)
            scales = empty(call.scales, torch.float32) if call.group else None
            sum_rows(Tensors(x, out, residual, weight, bias, scale, kept, scales), current())
            return kept, scales

        return run

    return prepare


def prepare_sequential(world: World, call: SumCall, plan: Plan) -> Run | OwnResult:
    if call.op != PLAIN_SUM:
        return _normalised(world, call, plan)
    current, results, all_reduce, copy = world.current_stream, world.backend.results, world.all_reduce, world.copy
    wanted = [(call.shape, call.dtype)]

    def run(operands: SumOperands, out: torch.Tensor | None) -> tuple[torch.Tensor]:
        x, stream = operands.x, current()
        if out is None:
            (out,) = results(lambda: (x.clone(),), wanted, [x], stream)
        else:
            copy(out, x, stream)
        if world.size > 1:
            all_reduce(out, stream)
        return (out,)

    return OwnResult(run)


@summing
def _normalised(world: World, call: SumCall, plan: Plan) -> SumRun:
    """Prepare NCCL's all-reduce and the norm. Each owner adds its rows of the residual before the sum, so that the sum
    contains them on all ranks."""
    own_residual, lo = call.residual == OWN.value and world.size > 1, sum(split_rows(world, call.m)[: world.rank])
    after = call if call.residual == WHOLE.value else replace(call, residual=ABSENT.value)
    normalise = norm_rows(world, after)

    def sum_rows(t: Tensors, stream: Stream) -> None:
        total = t.x
        if world.size > 1:
            total = world.empty((call.m, call.h), call.dtype)
            world.copy(total, t.x, stream)
            residual = t.residual
            if own_residual and residual is not None and residual.shape[0]:
                own_rows = total[lo : lo + residual.shape[0]]
                world.call(lambda: own_rows.add_(residual), [own_rows, residual], [own_rows], stream)
            world.all_reduce(total, stream)
        normalise(stream, **t.arguments(), x=total, out=t.out)

    return sum_rows


@prepared
def norm_rows(world: World, call: SumCall) -> Launch:
    """Return the launch that adds a residual to summed rows and normalises them."""
    per_sm = 2 if call.h <= 8192 else 1
    programs, sizes = min(call.m, world.sm_count * per_sm), dict(M=call.m, norm=call.computed)
    return Launch(world, add_norm, programs, call.options(8, per_sm), **sizes, me=rank_word(world), W=world.size)


# -- rows with low-latency flags ---------------------------------------------------------------------------------------
def _post(world: World, call: SumCall, plan: LowLatencyShot) -> SumRun:
    """Prepare one launch that posts rows."""
    if isinstance(plan, OneShot):
        kernel, rows = one_shot, (world.size + 1) * call.m
    else:
        kernel = two_shot_low_latency
        rows = world.size * -(-call.m // world.size) + call.m * (1 + (call.keep == WHOLE.value))
    nbytes, options = rows * call.h * call.dtype.itemsize, call.options(plan.warps)
    constants: dict[str, Any] = dict(x=Words(), M=call.m, norm=call.computed)
    if plain := call.op == PLAIN_SUM:  # the kernel reads none of the optional tensors
        constants |= dict.fromkeys(Tensors.OPTIONAL, thirds_of(world, nbytes).words)
    else:
        constants |= dict(residual=Words())
    post = prepare_posting(world, kernel, f"{call.op} {call}", plan, nbytes, options, **constants)

    def sum_rows(t: Tensors, stream: Stream) -> None:
        # Two shots store the rows of other owners in whole words, so `out` must be aligned.
        out = t.out if t.out.data_ptr() % 16 == 0 else world.empty(t.out.shape, t.out.dtype)
        optional = {} if plain else t.arguments()
        post(stream, **optional, x=t.x, out=out)
        if out is not t.out:
            world.copy(t.out, out, stream)

    return sum_rows


prepare_one_shot = summing(_post)


@summing
def prepare_two_shot_low_latency(world: World, call: SumCall, plan: TwoShotLowLatency) -> SumRun:
    """Post the rows, or count them if the dtypes of the output and of x differ, because the memory for posted rows has
    room for rows of x's dtype."""
    if call.out_dtype == call.dtype:
        return _post(world, call, plan)
    return _count(world, call, TwoShotPush(plan.programs, plan.warps))


def all_reduce_low_latency(
    world: World, shape: tuple[int, ...], dtype: torch.dtype, plan: LowLatencyShot
) -> CollectiveFunction:
    """Return a function that computes out, the sum of x over ranks, on a stream with a plan that posts rows. The caller
    must have checked that all ranks make the same call; x and out must have this shape and consist of whole 16-byte
    words."""
    sum_rows = _post(world, sum_call(world, shape, dtype), plan)
    return lambda out, x, stream: sum_rows(Tensors(x, out), stream)


# -- rows with counters ------------------------------------------------------------------------------------------------
def _room(world: World) -> int:
    """Return the bytes of a program's shared memory for the rows in flight."""
    return (features(world.backend.capability).shared_kib - REST_KIB) << 10


def _shots(world: World, call: SumCall, plan: TwoShotCounted) -> Shots:
    """Return the plan as an argument of the kernel. n stages keep the rows of n - 1 stages in shared memory. A stage of
    a sum contains the row of all sources if there is room for two such stages, because with fewer stages the link is
    idle while a row is summed. Rows of 16 KiB on 8 ranks, or of 64 KiB on two ranks, leave room for only one."""
    row, room = call.padded * call.dtype.itemsize, _room(world)
    sources = world.size + (call.residual != ABSENT.value)
    stages, ahead = (max(1, min(plan.stages, room // nbytes + 1)) for nbytes in (row, row * sources))
    return constants(
        Shots,
        D=1 if isinstance(plan, TwoShotPush) and plan.spread else world.size - 1,
        STAGES=stages,
        PULL=plan.pull,
        AHEAD=ahead > 2,
        SUM_STAGES=ahead if ahead > 2 else stages,
    )


class SharedRows(NamedTuple):
    """The symmetric memory of a call. It contains x, if other ranks read x, all rows of the output, and the sums and
    scales, if the call returns them."""

    x: Symmetric
    out: SymmetricTensor
    sums: Symmetric
    scales: Symmetric


def prepare_sharing(world: World, call: SumCall, read: bool = True) -> Callable[[Tensors, Stream], SharedRows]:
    """Return a function that returns a call's memory, and copies x into it if other ranks `read` x. The caller orders
    uses of the memory with the lock SHARED."""
    shape = (call.m, call.h)

    def memory(x: Symmetric, out: Symmetric) -> SharedRows:
        """Return the memory. `x` and `out` are the caller's tensors, if these are in symmetric memory."""
        return SharedRows(
            workspace(world, f"{SHARED}, x", shape, call.dtype) if read and x is None else x,
            out or workspace(world, f"{SHARED}, out", shape, call.out_dtype),
            workspace(world, f"{SHARED}, sums", shape, call.dtype) if call.keep == WHOLE.value else None,
            workspace(world, f"{SHARED}, scales", call.scales, torch.float32) if call.group else None,
        )

    memory_of = made_once(memory)

    def share(t: Tensors, stream: Stream) -> SharedRows:
        shared = memory_of(t.x_shared, t.out_shared)
        if shared.x is not None and t.x_shared is None:
            world.copy(shared.x.local, t.x, stream)
        return shared

    return share


def take_rows(world: World, t: Tensors, shared: SharedRows, stream: Stream) -> None:
    """Copy the results from symmetric memory to the call's own tensors."""
    for result, landed in zip((t.out, t.kept, t.scales), shared[1:], strict=True):
        if result is not None and landed is not None and landed is not t.out_shared:
            world.copy(result, landed.local, stream)


def _count(world: World, call: SumCall, plan: TwoShotCounted) -> SumRun:
    """Prepare one launch that counts rows. The launch passes x for tensors that the kernel does not read."""
    holder, staging = lock(world, SHARED), None
    if not plan.pull:
        rows = world.size * -(-call.m // world.size)
        staging = workspace(world, f"{SHARED}, staging", (rows, call.h), call.dtype)

    share = prepare_sharing(world, call, plan.pull)
    launch_with = made_once(_two_shot_launch, world, call, plan, staging)

    def sum_rows(t: Tensors, stream: Stream) -> None:
        world.order(holder, stream)
        t = t.as_matrices(world, call, plan.pull)
        shared = share(t, stream)
        arguments = t.arguments() | (dict(staging=t.x) if plan.pull else {})
        launch_with(shared)(stream, **arguments, x=t.x)
        take_rows(world, t, shared, stream)

    return sum_rows


prepare_two_shot = summing(_count)


def _two_shot_launch(
    world: World,
    call: SumCall,
    plan: TwoShotCounted,
    staging: Symmetric,
    shared: SharedRows,
) -> Launch:
    """Return the launch. Without staging memory the argument `staging` is not bound, and the caller passes x for it,
    which the kernel then does not read."""
    source, out, sums, scales = shared
    programs = min(plan.programs or world.sm_count, world.sm_count)
    counters = (1 if plan.pull else programs) + world.size
    fixed = dict(staging=staging.local.view(call.dtype)) if staging else {}
    return Launch(
        world,
        two_shot,
        programs,
        call.options(plan.warps),
        **fixed,
        addresses=RankAddresses(
            parts=(source or out).addresses,
            stagings=(staging or out).addresses,
            landings=out.addresses,
            sums=(sums or out).addresses,
            scales=(scales or out).addresses,
        ),
        epoch=world.cached("two-shot all-reduce, epoch", lambda: world.zeros((1,), torch.int32)),
        ch=world.cached((call, plan), lambda: world.channel(f"{call.op} {call} {plan}", counters, None)),
        M=call.m,
        norm=call.computed,
        shots=_shots(world, call, plan),
    )


@summing
def prepare_decomposed(world: World, call: SumCall, plan: Decomposed) -> SumRun:
    """Prepare an all-reduce with copy engines. Copy engines pull the peers' parts of this rank's rows, one kernel sums
    and normalises them, and then copy engines pull the other owners' rows. After the first barrier the parts of all
    ranks are complete. After the second barrier all owners' rows are complete, and no rank still reads a part. After
    the third barrier no rank still reads a row, so that the caller may write to `out`."""
    me, copies = world.rank, world.side_stream("copy")
    ends = list(itertools.accumulate(split_rows(world, call.m), initial=0))
    own_rows, holders = slice(ends[me], ends[me + 1]), (lock(world, COPIES), lock(world, SHARED))
    sum_own_rows = _sum_norm(world, replace(call, keep=OWN.value if call.keep else ABSENT.value))
    share = prepare_sharing(world, call)
    parts = workspace(world, "parts", (world.size, ends[1], call.h), call.dtype).local

    def sequences_of(shared: SharedRows) -> list[Callable[[], StreamWork]]:
        source = shared.x
        assert source is not None

        def pull_own_rows(work: StreamWork) -> None:
            world.barrier(copies)
            pull_parts(world, source, own_rows, parts, copies)

        def pull_sums(work: StreamWork) -> None:
            world.barrier(copies)
            pull_rows(world, [memory for memory in shared[1:] if memory], ends, copies)
            world.barrier(copies)

        return [world.sequence(copies, work) for work in (pull_own_rows, pull_sums)]

    sequences = made_once(sequences_of)

    def sum_rows(t: Tensors, stream: Stream) -> None:
        for holder in holders:
            world.order(holder, stream)
        world.wait_event(copies, world.record(stream))
        t = t.as_matrices(world, call, True)
        shared = share(t, copies)
        source, out, sums, scales = shared
        assert source is not None
        kept = t.kept if sums is None else sums.local[own_rows]

        pull_own_rows, pull_sums = sequences(shared)
        pull_own_rows()()
        local = replace(t, x=source.local, out=out.local, kept=kept, scales=scales.local if scales else None)
        sum_own_rows(copies, **local.arguments(), x=local.x, out=local.out, staging=parts)
        (end,) = pull_sums()()
        world.wait_event(stream, end)
        take_rows(world, t, shared, stream)

    return sum_rows


def _sum_norm(world: World, call: SumCall) -> Launch:
    most = -(-call.m // world.size)
    return Launch(
        world,
        sum_norm,
        min(most, world.sm_count),
        call.options(16),
        me=rank_word(world),
        M=call.m,
        norm=call.computed,
        W=world.size,
        R=1,
        STAGES=max(1, min(world.size + 1, _room(world) // (call.padded * call.dtype.itemsize) + 1)),
    )
