"""For every shape with stored times of its plans (bench/results), the chooser's plan may be at most 1% slower than its
former plan, except for four shapes. The test replays timings: each candidate has its stored time, and a plan without a
stored time is not a candidate.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from weft.chooser import MIN_SPEEDUP, Choice, Chooser
from weft.op import REGISTRY
from weft.ops.moe.call import Layer, MoeCall
from weft.ops.moe.expert_parallel.op import MOE
from weft.planner import auto, table
from weft.planner.profile import shipped
from weft.plans import Decomposed, Dispatched, LowLatency, OneShot, Plan, Sequential
from weft.scale import Scale
from weft.timing import CallTime

RESULTS = Path(__file__).parents[2] / "bench" / "results"
GPU = "nvidia-h200"
FAR = 3.0  # the distance from which a shape counts as far, in doublings


class Sweep(NamedTuple):
    """The stored times, in us, of one shape's plans."""

    op: str
    world: int
    m: int
    n: int
    k: int
    mode: str
    times: dict[Plan, float]

    @property
    def shape(self) -> tuple[str, int, int, int, int, str]:
        return self[:6]


def sweeps() -> Iterator[Sweep]:
    """Return each shape's newest sweep."""
    newest: dict[Any, Sweep] = {}
    for path in sorted(RESULTS.glob(f"{GPU}-x*/tuning/*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            times = {}
            for text, us in row["times"].items():
                try:
                    plan = Plan.from_json(text)
                    times[Decomposed() if plan == Decomposed((1,) * row["world"]) else plan] = us
                except ValueError:  # the row names a plan of an earlier version
                    continue
            sweep = Sweep(row["op"], row["world"], row["M"], row["N"], row["K"], row["mode"], times)
            newest[sweep.shape] = sweep
    yield from newest.values()


@functools.cache
def planner_of(size: int) -> Any:
    known = shipped(f"{GPU}-x{size}")
    return auto.planner_of(known) if known else None


def stub(size: int) -> Any:
    """Return the part of a World of H200s that the expected plan needs."""
    planner = planner_of(size)
    backend = SimpleNamespace(name="cuda", limits_ctas=True, shares_gpu=False)
    messages: list[str] = []
    return SimpleNamespace(
        size=size, rank=0, device=None, backend=backend, cached=lambda key, make: planner, log_once=messages.append
    )


class Replayed(Chooser):
    """A chooser that uses stored times for its candidates."""

    def __init__(self, times: dict[Plan, float]) -> None:
        super().__init__(lambda *_: pytest.fail("really timed"), lambda: False)
        self.times = times

    def time(self, choice: Choice[Any], candidate: Any, times: int, ahead: float) -> CallTime:
        return CallTime(self.times[candidate], 0.0)


@pytest.fixture(autouse=True)
def on_stored_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "gpu_model", lambda device: GPU)


def expected(sweep: Sweep) -> Plan:
    return auto.auto(sweep.op, stub(sweep.world), sweep.m, sweep.n, sweep.k, sweep.mode)


def chosen(sweep: Sweep, unknown: bool) -> Plan:
    """Return the plan that the chooser selects by timing the op's candidates, and the plan that it selects for a shape
    without any row."""
    op = REGISTRY[sweep.op]
    kinds = [kind() for kind in (Decomposed, OneShot) if kind in op.runs] if op.collective else []
    named = [*op.autotune_plans, *(op.variants if unknown else ()), *(kinds if unknown else ())]
    candidates = [plan for plan in named if plan in sweep.times]
    usual = expected(sweep)
    choice: Choice[Plan] = Choice(sweep.shape, lambda mode: usual, lambda: candidates)
    times = sweep.times | ({} if usual in sweep.times else {usual: math.inf})
    return Replayed(times).choose(choice, sweep.mode)


def nearest(sweep: Sweep, rows: list[table.Measured]) -> Plan:
    """Return the former plan of a shape without a row: the plan of the nearest measured shape."""

    def distance(r: table.Measured) -> float:
        sizes = zip(sweep[1:5], (r.world, r.m, r.n, r.k), strict=True)
        return sum(abs(math.log2(a / b)) for a, b in sizes)

    best = min((r for r in rows if r.mode == sweep.mode), key=distance, default=None)
    if best is None or distance(best) > FAR or best.speedup < table.GAIN:
        return Sequential()
    if isinstance(best.plan, Decomposed) and sum(best.plan.groups) != sweep.world:
        return Decomposed()
    return best.plan if REGISTRY[sweep.op].movable(best.plan, sweep.m, sweep.world) else Sequential()


def test_the_choice_for_every_stored_shape_is_as_fast_as_before() -> None:
    """The plan is either the plan in the shape's own row, as before, or a plan with a shorter measured time."""
    compared = 0
    for sweep in sweeps():
        before = table.exact(GPU, *sweep.shape)
        if before is None and sweep.mode == "eager":  # the call waited for the host
            continue
        assert before is not None and expected(sweep) == before, sweep.shape
        if before in sweep.times:
            compared += 1
            assert sweep.times[chosen(sweep, unknown=False)] <= 1.01 * sweep.times[before], sweep.shape
    assert compared > 150


def test_a_shape_without_a_row_is_as_fast_as_by_the_nearest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stored shape is treated as unmeasured in the cases that the nearest row used to decide: on machines without
    a profile, and for the op without a cost model."""
    slower, compared, gained = [], 0, []
    for sweep in sweeps():
        if sweep.world != 8 and sweep.op != "all_reduce_rms_norm":
            continue
        rows = [r for r in table.load(GPU) if r.op == sweep.op]
        others = [r for r in rows if (r.op, r.world, r.m, r.n, r.k, r.mode) != sweep.shape]
        before = nearest(sweep, others)
        before = Decomposed() if before == Decomposed((1,) * sweep.world) else before
        if before not in sweep.times:
            continue
        monkeypatch.setattr(auto, "exact", lambda *shape: None)
        chosen_us = sweep.times[chosen(sweep, unknown=True)]
        compared += 1
        gained.append(sweep.times[before] / chosen_us)
        if chosen_us > 1.01 * sweep.times[before]:
            slower.append((sweep.shape, chosen_us / sweep.times[before]))
    # Four shapes lose up to 2.15%: 2 and 4 forward programs are not candidates, because they gained less than 3% for
    # every shape.
    assert len(slower) <= 4 and all(factor < 1.022 for _, factor in slower), slower
    assert compared > 20 and math.prod(gained) > 1


def test_an_expected_moe_plan_is_the_fastest_that_was_timed() -> None:
    """The plan for few tokens is compared with the plan of four launches where one run timed both."""
    runs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in map(json.loads, (RESULTS / f"{GPU}-x2" / "moe.jsonl").read_text().splitlines()):
        runs.setdefault((row["name"], row["commit"]), {})[row["method"]] = row
    runs_of_both = [run for run in runs.values() if {"weft low latency", "weft dispatched"} <= run.keys()]
    world: Any = SimpleNamespace(size=2, sm_count=132, backend=SimpleNamespace(capability=90, scale=Scale()))
    assert len(runs_of_both) >= 4
    for run in runs_of_both:
        row, low_latency_us = run["weft dispatched"], run["weft low latency"]["us"]
        layer = Layer(row["M"], row["E"], row["top_k"], row["K"], row["N"], torch.bfloat16, "swiglu", None)
        plan = MOE.expected(world, MoeCall(row["M"], None, layer), "graph")
        assert isinstance(plan, LowLatency if low_latency_us * MIN_SPEEDUP < row["us"] else Dispatched), row["name"]
