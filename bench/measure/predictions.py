"""The measured and the predicted times of calls: torchrun --nproc-per-node N -m bench.measure.predictions --out DIR
[--profile FILE] [--seconds S]

For each op and shape the program runs every division of a decomposed plan, every fused variant, and the partitions of signaled plans (all
of them if they are few), and appends the predicted and the measured times to DIR/predictions-xN.jsonl.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import weft
from bench.common.program import Program, options
from weft.cost.decomposed import divisions
from weft.cost.signaled import groupings
from weft.errors import WeftError
from weft.planner.auto import profile_for
from weft.planner.predict import Predictor
from weft.planner.profile import Profile
from weft.planner.search import Planner, brief, candidates
from weft.planner.tuner import CudaTimer
from weft.plans import KINDS, Decomposed, Plan, Signaled, partition

SUMMED = (
    (512, 6144, 3072), (6144, 4096, 5120), (384, 8192, 2560), (1280, 5120, 4608), (3072, 8192, 3072), (12288, 5120, 1536),
    (2048, 6144, 3584), (7168, 7168, 2048),
)  # fmt: skip
SHAPES = {  # (M, N, K) of the GEMM on one rank; weft tune measures none of these
    "all_gather_matmul": (
        (512, 4096, 6144), (6144, 5120, 4096), (384, 6144, 6144), (1280, 7168, 5120), (3072, 6144, 6144), (12288, 3072, 4096),
        (2048, 4608, 5120), (7168, 3584, 5120),
    ),
    "matmul_reduce_scatter": SUMMED,
    "matmul_all_reduce": SUMMED,
    "matmul_all_to_all": (
        (512, 6144, 3072), (6144, 4096, 4096), (384, 8192, 2048), (1280, 5120, 3072), (3072, 6144, 2560), (12288, 4096, 1536),
        (2048, 7168, 2560), (7168, 3072, 3072),
    ),
}  # fmt: skip
COPIES = Signaled(copies=True).family
LABELS = [*KINDS, COPIES]
FEW = 40  # the most partitions of one signaled GEMM that are tried; if there are more, FEW are drawn at random


def partitions(waves: int, draw: random.Random) -> list[tuple[int, ...]]:
    """Return all ways to divide `waves` into groups, or FEW of them, drawn at random."""

    def sizes(cuts: Iterable[int]) -> tuple[int, ...]:
        bounds = [0, *(c + 1 for c in cuts), waves]
        return tuple(b - a for a, b in itertools.pairwise(bounds))

    positions = range(waves - 1)
    if 1 << len(positions) <= FEW:
        return [sizes(c) for size in range(waves) for c in itertools.combinations(positions, size)]
    drawn = {sizes(sorted(draw.sample(positions, draw.randint(1, min(len(positions), 12))))) for _ in range(FEW)}
    return sorted(drawn)


def plans_to_run(profile: Profile, planner: Planner, op: str, m: int, n: int, k: int) -> list[Plan]:
    """Return the plans, the chosen plan of each kind before the others."""
    p, draw = planner.predictor, random.Random(f"{op} {m} {n} {k}")
    chosen: dict[str, Plan] = {}
    for option in planner.decide(op, m, n, k).options:  # the fastest plan first
        plan = option.plan
        chosen.setdefault(plan.family if isinstance(plan, Signaled) else plan.kind, plan)
    todo = [chosen[label] for label in LABELS if label in chosen]
    signaled = [plan for plan in todo if isinstance(plan, Signaled) and not plan.copies]
    for plan in candidates(p, op, m, n, k):
        if not isinstance(plan, Decomposed) or len(divisions(p.world)) < FEW:
            todo.append(plan)
    for best in signaled:
        parts = p.signaled_parts(op, best, m, n, k)
        fewer = Predictor(replace(profile, machine=replace(p.machine, sms=p.sms * 3 // 4)))
        mistaken = groupings(fewer.signaled_parts(op, best, m, n, k))[1:2]  # groups chosen for a wrong number of SMs
        groups = [*((g,) * parts.waves for g in (1, 2, 4)), *mistaken]
        todo += [replace(best, groups=partition(g, parts.waves)) for g in groups]
        todo += [replace(best, groups=g) for g in partitions(parts.waves, draw)]
    return list(dict.fromkeys(todo))


def measure(run: Program, profile: Profile) -> None:
    world = run.world
    timer, planner = CudaTimer(world), Planner(Predictor(profile))
    most = max(max(m * k, n * k) for shapes in SHAPES.values() for m, n, k in shapes)
    x, w = (torch.randn(most, device=world.device, dtype=torch.bfloat16) * 0.1 for _ in range(2))
    for op, m, n, k in run.cases(
        {f"predicted {op} {SHAPES[op][i]}": (op, *SHAPES[op][i]) for i in range(8) for op in SHAPES}
    ):
        rows = m // world.size if op == "all_gather_matmul" else m
        operands, options = (x[: rows * k].view(rows, k), w[: n * k].view(n, k)), dict[str, Any](world=world)
        if op == "matmul_all_to_all":
            options["destinations"] = weft.route([i % world.size for i in range(m)], world=world)
        for plan in plans_to_run(profile, planner, op, m, n, k):
            failure, us, predicted = "", 0.0, 0.0
            try:
                call = partial(getattr(weft, op), *operands, plan=plan, **options)
                call()
                us, predicted = timer.graph(call), planner.predictor.time(op, plan, m, n, k)
            except (WeftError, RuntimeError, ValueError) as e:
                failure = f"{type(e).__name__}: {e}"
            if any(world.exchange(failure)):
                run.log(f"left out: {op} {m} x {n} x {k} {brief(plan)}: {failure}")
                continue
            row = dict(op=op, M=m, N=n, K=k, plan=json.loads(plan.to_json()), us=round(us, 2))
            run.keep([row | dict(predicted=round(predicted, 2))])
        run.log(f"{op} {m} x {n} x {k}")


def main() -> None:
    a = options(profile="", seconds=200)
    size = int(os.environ["WORLD_SIZE"])
    profile = profile_for(a.profile or None, size)
    run = Program(a, f"predictions-x{size}.jsonl", profile=profile.digest)
    measure(run, profile)
    run.end()


if __name__ == "__main__":
    main()
