"""Probes of whole ops under each plan."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...architectures import HOPPER
from ...cost.model import SHOTS
from ...cost.signaled import SINGLE
from ...errors import Unsupported
from ...op import REGISTRY, collective, collectives, op_around
from ...ops.tiles import with_architecture_tiles
from ...plans import Decomposed, LowLatencyShot, OneShot, Plan, Sequential, Signaled
from ...timing import interleaved
from ..profile import Measurement, TimedCall
from . import moves
from .common import Bench, GemmShape, Probe

EAGER_ROUNDS = 5  # rounds of eager calls, in each of which the timer times every plan of an op
MOST_LOW_LATENCY_BYTES = 32 << 20  # the largest low-latency collective that is timed, in bytes


def variants(capability: int = HOPPER) -> dict[str, Sequence[Plan]]:
    """Return each op's plans, starting with the one that is fastest on most shapes, with tiles that fit a GPU of that
    compute capability."""
    named = {name: op.variants for name, op in REGISTRY.items() if op.variants}
    return {
        name: tuple(dict.fromkeys(with_architecture_tiles(plan, capability) for plan in plans))
        for name, plans in named.items()
    }


def most_low_latency_bytes(op: str, plan: LowLatencyShot, world: int) -> int:
    """Return the largest number of bytes to time with a low-latency plan; 0 if the op does not have this plan. The
    number is smaller if every rank receives all data."""
    if plan.kind not in REGISTRY[op].kinds:
        return 0
    return (
        MOST_LOW_LATENCY_BYTES // world
        if (collective(op), plan) == ("all_reduce", OneShot())
        else MOST_LOW_LATENCY_BYTES
    )


def call(b: Bench, op: str, plan: Plan, m: int, n: int, k: int) -> Probe:
    row = TimedCall(op, plan.to_json(), m, n, k, "graph", 1.0)

    def run() -> list[Measurement]:
        fn = _public(b, op, m, n, k)(plan)
        fn()  # raises Unsupported on every rank before anything is timed
        return [replace(row, us=b.timer.graph(fn))]

    return Probe(f"{op} {plan.kind} {m} x {n} x {k}", (row,), run)


def eager_calls_of(b: Bench, op: str, plans: Sequence[Plan], m: int, n: int, k: int) -> Probe:
    """Return a probe of eager calls. Rounds interleave the plans, because the host's speed changes by a factor of two
    within minutes, and the choice depends on the ratios of the plans' times."""
    rows = {plan: TimedCall(op, plan.to_json(), m, n, k, "eager", 1.0) for plan in plans}

    def run() -> list[Measurement]:
        fns = {plan: _public(b, op, m, n, k)(plan) for plan in plans}
        for plan, fn in list(fns.items()):
            try:
                fn()
            except Unsupported:  # every rank raises it
                del fns[plan]
        samples = interleaved(list(fns), lambda plan: b.timer.eager(fns[plan]), EAGER_ROUNDS)
        return [replace(rows[plan], us=statistics.median(us)) for plan, us in samples.items()]

    return Probe(f"{op} {m} x {n} x {k} eager", tuple(rows.values()), run)


def _public(b: Bench, op: str, m: int, n: int, k: int) -> Callable[[Plan], Callable[[], object]]:
    """Return a function that returns, for a plan, the call of the op's public function, which includes its work on the
    host."""
    public = vars(sys.modules[type(REGISTRY[op]).__module__])  # the module that defines the op
    rows = m // b.world.size if REGISTRY[op].gathers else m
    x, w = b.x[: rows * k].view(rows, k), b.w[: n * k].view(n, k)
    options: dict[str, object] = {}
    if collective(op) == "all_to_all":  # every rank gets the same number of rows
        options["destinations"] = public["route"]([i % b.world.size for i in range(m)], world=b.world)
    return lambda plan: functools.partial(public[op], x, w, world=b.world, plan=plan, **options)


def shapes_of(b: Bench, op: str, part: int) -> tuple[GemmShape, ...]:
    return (b.sizes.gather if REGISTRY[op].gathers else b.sizes.reduce)[part]


def calls(b: Bench, part: int) -> Iterator[Probe]:
    """Yield calls with sequential, decomposed and fused plans."""
    world = b.world.size
    doubling: list[int] = [1]
    while sum(doubling) < world and world & (world - 1) == 0:
        doubling.append(sum(doubling))
    chunks = [Decomposed((1,) * world), Decomposed(tuple(doubling))] if sum(doubling) == world else [Decomposed()]
    chunks.append(Decomposed((1,) * world, 2))
    for op, fused in variants(b.world.backend.capability).items():
        plans: list[Plan] = [Sequential(), *(p for p in (*chunks, *fused) if b.copies and REGISTRY[op].has(p))]
        yield from (call(b, op, plan, *shape) for plan in plans for shape in shapes_of(b, op, part))
    yield from (
        call(b, op_around("all_to_all"), Sequential(), *shape) for shape in shapes_of(b, op_around("all_to_all"), part)
    )


def signaled_calls(b: Bench, part: int) -> Iterator[Probe]:
    """Yield calls with signaled plans with few and with many groups, with a short first and a short last group."""
    for op in (op for op in collectives() if Signaled in REGISTRY[op].costs):
        for ctas in b.sizes.ctas[:2]:
            for groups in ((), (1, 2, 4, 8, 16), (2,) * 16):
                plan = replace(b.sizes.signaled, groups=groups, ctas=ctas)
                yield from (call(b, op, plan, *shape) for shape in shapes_of(b, op, part))
        by_copies = replace(b.sizes.signaled, ctas=min(b.sizes.ctas), copies=True)
        for groups in ((), SINGLE) if b.copies and REGISTRY[op].has(by_copies) else ():
            plan = replace(by_copies, groups=groups)
            yield from (call(b, op, plan, *shape) for shape in shapes_of(b, op, part))


def eager_calls(b: Bench) -> Iterator[Probe]:
    """Yield, for every op, eager calls with negligible GPU time, whose times are the host's: one for every family of
    plans that "auto" may choose. A call this small has one signaled group."""
    by_op = variants(b.world.backend.capability)
    for op in collectives():
        signaled = replace(b.sizes.signaled, groups=(1,))
        with_copies = (
            Decomposed(),
            *{type(plan): plan for plan in reversed(by_op.get(op, ()))}.values(),
            *SHOTS,
            replace(signaled, ctas=min(b.sizes.ctas), copies=True),
        )
        plans = [Sequential(), signaled, *(with_copies if b.copies else ())]
        large = shapes_of(b, op, 0)[0]
        small = (min(b.world.size * 128, large[0]), min(256, large[1]), min(256, large[2]))
        yield eager_calls_of(b, op, [plan for plan in plans if REGISTRY[op].has(plan)], *small)
        medium = (min(1024, large[0]), *large[1:])
        for low_latency in SHOTS if b.copies else ():
            if REGISTRY[op].has(low_latency):
                yield from (call(b, op, low_latency, *shape) for shape in (small, medium))


def low_latency_calls(b: Bench) -> Iterator[Probe]:
    """Yield the low-latency collectives alone, and whole ops with these collectives and with other plans."""
    by_op = variants(b.world.backend.capability)
    for op in by_op:
        largest = {plan: most_low_latency_bytes(op, plan, b.world.size) for plan in SHOTS}
        plans = [plan for plan in SHOTS if largest[plan]]
        for plan in plans:
            yield from (
                moves.low_latency_collective(b, op, plan, size)
                for size in b.sizes.low_latency_bytes
                if size <= largest[plan]
            )
        concurrent = Sequential(), Decomposed((1,) * b.world.size), *plans, *by_op[op]
        yield from (call(b, op, plan, *shape) for plan in concurrent for shape in b.sizes.low_latency_shapes)
