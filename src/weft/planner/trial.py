"""plan="auto" of an op that has no model: its plans are timed at the first call of a size, and the fastest runs from
then on."""

from __future__ import annotations

import statistics

from ..op import Call, Op, Operands
from ..plans import Plan, Sequential
from ..world import World
from .table import GAIN
from .timing import length, span

TIMES, ROUNDS = 10, 5
LONG = 20_000.0  # us that a round of fewer calls may take


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
    plans = [plan for plan in op.candidates(world, call) if op.choose(world, call, plan, False) == plan]
    if not call.rows or world.size == 1 or not plans:
        return Sequential()
    us = {plan: max(world.exchange(_time(op, world, call, plan, operands))) for plan in (Sequential(), *plans)}
    best = min(us, key=lambda plan: us[plan])
    return best if us[best] * GAIN < us[Sequential()] else Sequential()


def _time(op: Op, world: World, call: Call, plan: Plan, operands: Operands) -> float:
    """us a call on this rank, all ranks making it together."""
    op.agree(world, call, plan)
    op.execute(world, call, plan, operands, None)

    def together(times: int) -> float:
        world.synchronize()
        world.exchange("trial")
        events = span(lambda: [op.execute(world, call, plan, operands, None) for _ in range(times)])
        events[1].synchronize()
        return length(events) / times

    once = max(world.exchange(together(1)))
    times = max(1, min(TIMES, int(LONG / once)))
    return statistics.median([together(times) for _ in range(ROUNDS)])
