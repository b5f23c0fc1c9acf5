"""plan="auto" by timing: at the first call of a size the plans that an op names (`Op.tries`), of which the planner has
no model, run in turns with what "auto" takes without them, and the fastest runs from then on; on a Hopper GPU that
nobody measured, also those that it would choose among (auto.py). Of plans whose times differ by less than WORTH, that
of "auto", or else the one that the op names first."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..op import Call, Op, Operands
from ..plans import Plan
from ..world import World
from .timing import CYCLES, length, span

TIMES, ROUNDS = 10, 5
LAUNCH = 500.0  # us of the host for a call, at most as a rule
LONG = 40_000.0  # us that a plan's turn takes with fewer calls than TIMES
WORTH = 1.01  # medians of equal plans differ by about as much


class Took(NamedTuple):
    """The us that a call takes: the GPU's, which does not wait for the host, and the host's."""

    gpu: float
    host: float

    def us(self, mode: str) -> float:
        return self.gpu if mode == "graph" else max(self)


@dataclass(frozen=True)
class Trial:
    """What the plans of one call took. sizes: M, N, K. took: for each plan, the slowest rank's times. faster: for each
    mode, the plan that is faster than what "auto" takes without a trial; None where there is none. scaling: of 8-bit
    operands ("row", ..), or ""."""

    op: str
    sizes: tuple[int, int, int]
    took: dict[Plan, Took]
    faster: dict[str, Plan | None]
    scaling: str = ""

    def said(self, mode: str) -> str:
        us = sorted((took.us(mode), str(plan)) for plan, took in self.took.items())
        return "timed at the first call of this size: " + ", ".join(f"{plan} {each:.0f} us" for each, plan in us)


def tried(op: Op, world: World, call: Call, operands: Operands, others: Sequence[Plan] = ()) -> Trial | None:
    """Collective the first time for calls alike; None where there is nothing to try, or a size is first seen inside a
    CUDA graph capture. others: plans to try beside those that the op names."""
    key = op.trial(call)
    if key not in world.decided and call.rows and world.size > 1:
        fit = [plan for plan in others if op.fits(world, call, plan, "auto") is None]
        named = op.candidates(world, call) if op.tries else ()
        plans = [plan for plan in (*named, *fit) if op.choose(world, call, plan, False) == plan]
        if plans and world.capturing():
            world.say_once(f"{op.title}: a size first seen inside a CUDA graph capture cannot be timed")
        elif plans:
            world.decided[key] = _made(op, world, call, operands, plans)
    made: Trial | None = world.decided.get(key)
    return made


def of_sizes(world: World, op: str, m: int, n: int, k: int, scaling: str = "") -> Trial | None:
    """Return the last Trial of a call of exactly these sizes, and of such operands, or None."""
    made = [each for each in world.decided.values() if isinstance(each, Trial)]
    key = op, (m, n, k), scaling
    return next((each for each in reversed(made) if (each.op, each.sizes, each.scaling) == key), None)


def _made(op: Op, world: World, call: Call, operands: Operands, plans: list[Plan]) -> Trial:
    """Time the plans in rounds in which every plan has its turn, so that a GPU that gets hot slows all of them. Each
    round has an order of its own, so that no plan always comes behind one that lets the GPU cool."""
    usual = {"eager": op.choose(world, call, "auto", False), "graph": op.choose(world, call, "auto", True)}
    once: dict[Plan, Took] = {}
    for plan in (*usual.values(), *plans):
        if plan not in once:
            op.check_same_on_all_ranks(world, call, plan)
            op.execute(world, call, plan, operands, None)
            once[plan] = _slowest(world, [_time(op, world, call, plan, operands, 1, LAUNCH)])[0]
    found: dict[Plan, list[Took]] = {plan: [] for plan in once}
    for i in range(ROUNDS):
        for plan in random.Random(i).sample(list(found), len(found)):
            gpu, host = once[plan]
            times = max(1, min(TIMES, int(LONG / gpu)))
            ahead = host + times * max(host - gpu, 0.0)
            found[plan].append(_time(op, world, call, plan, operands, times, ahead))
    medians = [Took(*map(statistics.median, zip(*samples, strict=True))) for samples in found.values()]
    took = dict(zip(found, _slowest(world, medians), strict=True))
    best = {mode: _best(took, usual[mode], plans, mode) for mode in usual}
    faster = {m: p if p != usual[m] else None for m, p in best.items()}
    return Trial(op.name, op.sizes(call), took, faster, op.scaling(call))


def _best(took: dict[Plan, Took], usual: Plan, plans: list[Plan], mode: str) -> Plan:
    best = usual
    for plan in plans:
        best = plan if took[plan].us(mode) * WORTH < took[best].us(mode) else best
    return best


def _slowest(world: World, mine: list[Took]) -> list[Took]:
    """Return, for each Took of this rank, the slowest rank's. Collective."""
    return [Took(*map(max, zip(*ranks, strict=True))) for ranks in zip(*world.exchange(mine), strict=True)]


def _time(op: Op, world: World, call: Call, plan: Plan, operands: Operands, times: int, ahead: float) -> Took:
    """Time this rank's calls, which all ranks make together. ahead: us by which the host has to be ahead of the GPU,
    which sleeps 1.5 times as long; otherwise a short plan would wait for the host, which it does not in a CUDA
    graph."""
    world.wait_for_streams()
    world.exchange("trial")
    torch.cuda._sleep(int(1.5 * CYCLES * ahead))
    began = time.perf_counter()
    events = span(lambda: [op.execute(world, call, plan, operands, None) for _ in range(times)])
    took = (time.perf_counter() - began) * 1e6
    events[1].synchronize()
    return Took(length(events) / times, took / times)
