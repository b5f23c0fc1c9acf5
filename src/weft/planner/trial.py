"""plan="auto" of an op that has no model: its plans are timed at the first call of a size, and the fastest runs from
then on. Of plans whose times differ by less than WORTH, sequential or else the one that the op names first."""

from __future__ import annotations

import statistics

from ..op import Call, Op, Operands
from ..plans import Plan, Sequential
from ..world import World
from .timing import length, span

TIMES, ROUNDS = 10, 5
LONG = 40_000.0  # us that a plan's turn takes with fewer calls than TIMES
WORTH = 1.01  # medians of equal plans differ by about as much


def tried(op: Op, world: World, call: Call, operands: Operands) -> Plan:
    """Collective the first time for what the ranks agree on; sequential for a size first seen inside a CUDA graph
    capture."""
    key = ("tried", op.name, tuple(call.agreed().items()))
    if key not in world.decided:
        if world.capturing():
            world.say_once(f"{op.name}: sequential: sizes first seen inside a CUDA graph capture cannot be timed")
            return Sequential()
        world.decided[key] = _fastest(op, world, call, operands)
    return world.decided[key]


def _fastest(op: Op, world: World, call: Call, operands: Operands) -> Plan:
    """Rounds in which every plan has its turn, so that a GPU that gets hot slows all of them."""
    plans = [plan for plan in op.candidates(world, call) if op.choose(world, call, plan, False) == plan]
    if not call.rows or world.size == 1 or not plans:
        return Sequential()
    times: dict[Plan, int] = {}
    for plan in (Sequential(), *plans):
        op.agree(world, call, plan)
        op.execute(world, call, plan, operands, None)
        once = max(world.exchange(_time(op, world, call, plan, operands, 1)))
        times[plan] = max(1, min(TIMES, int(LONG / once)))
    found: dict[Plan, list[float]] = {plan: [] for plan in times}
    for _ in range(ROUNDS):
        for plan, samples in found.items():
            samples.append(_time(op, world, call, plan, operands, times[plan]))
    medians = [statistics.median(samples) for samples in found.values()]
    us = dict(zip(found, map(max, zip(*world.exchange(medians), strict=True)), strict=True))
    best: Plan = Sequential()
    for plan in plans:
        best = plan if us[plan] * WORTH < us[best] else best
    return best


def _time(op: Op, world: World, call: Call, plan: Plan, operands: Operands, times: int) -> float:
    """us a call on this rank, all ranks making it together."""
    world.synchronize()
    world.exchange("trial")
    events = span(lambda: [op.execute(world, call, plan, operands, None) for _ in range(times)])
    events[1].synchronize()
    return length(events) / times
