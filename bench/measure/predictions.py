"""Calls beside what was predicted of them: torchrun --nproc-per-node N -m bench.measure.predictions --out DIR [--profile FILE] [--seconds S]

Runs, for each op and shape, every division of a decomposed plan, every fused variant, and the partitions of signaled plans (all, where
they are few), and appends to DIR/predictions-xN.jsonl what was predicted and what was measured.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common.resume import keep, unfinished
from weft.cost.decomposed import divisions
from weft.cost.signaled import groupings
from weft.errors import WeftError
from weft.planner.auto import profile_for
from weft.planner.predict import Predictor
from weft.planner.profile import Profile
from weft.planner.search import Planner, brief, candidates
from weft.plans import KINDS, Decomposed, Plan, Signaled, partition

SHAPES = {  # (M, N, K) of the GEMM on one rank; none of those that weft tune measures
    "all_gather_matmul": (
        (512, 4096, 6144), (6144, 5120, 4096), (384, 6144, 6144), (1280, 7168, 5120), (3072, 6144, 6144), (12288, 3072, 4096),
        (2048, 4608, 5120), (7168, 3584, 5120),
    ),
    "matmul_reduce_scatter": (
        (512, 6144, 3072), (6144, 4096, 5120), (384, 8192, 2560), (1280, 5120, 4608), (3072, 8192, 3072), (12288, 5120, 1536),
        (2048, 6144, 3584), (7168, 7168, 2048),
    ),
    "matmul_all_reduce": (
        (512, 6144, 3072), (6144, 4096, 5120), (384, 8192, 2560), (1280, 5120, 4608), (3072, 8192, 3072), (12288, 5120, 1536),
        (2048, 6144, 3584), (7168, 7168, 2048),
    ),
    "matmul_all_to_all": (
        (512, 6144, 3072), (6144, 4096, 4096), (384, 8192, 2048), (1280, 5120, 3072), (3072, 6144, 2560), (12288, 4096, 1536),
        (2048, 7168, 2560), (7168, 3072, 3072),
    ),
}  # fmt: skip
COPIES = Signaled(copies=True).family
LABELS = [*KINDS, COPIES]
FEW = 40  # partitions of one signaled GEMM that are all tried; of more, as many drawn
CHOSEN, MISTAKEN = "chosen", "wave size mistaken"  # tags; others are "groups of g", for ablations


def partitions(waves: int, draw: random.Random) -> list[tuple[int, ...]]:
    """Return all ways to divide `waves` into groups, or FEW drawn ones."""

    def sizes(cuts: Iterable[int]) -> tuple[int, ...]:
        bounds = [0, *(c + 1 for c in cuts), waves]
        return tuple(b - a for a, b in itertools.pairwise(bounds))

    positions = range(waves - 1)
    if 1 << len(positions) <= FEW:
        return [sizes(c) for size in range(waves) for c in itertools.combinations(positions, size)]
    drawn = {sizes(sorted(draw.sample(positions, draw.randint(1, min(len(positions), 12))))) for _ in range(FEW)}
    return sorted(drawn)


def plans_to_run(profile: Profile, planner: Planner, op: str, m: int, n: int, k: int) -> dict[Plan, list[str]]:
    """Return plans with their tags, the chosen plan before the others."""
    p, draw = planner.predictor, random.Random(f"{op} {m} {n} {k}")
    todo: dict[Plan, list[str]] = defaultdict(list)
    options = planner.decide(op, m, n, k).options
    for label in LABELS:
        best = next(
            (o.plan for o in options if label == (o.plan.family if isinstance(o.plan, Signaled) else o.plan.kind)),
            None,
        )
        if best:
            todo[best].append(CHOSEN)
    for plan in candidates(p, op, m, n, k):
        if not isinstance(plan, Decomposed) or len(divisions(p.world)) < FEW:
            todo[plan] += []
    for best in [q for q in list(todo) if isinstance(q, Signaled) and not q.copies and CHOSEN in todo[q]]:
        parts = p.signaled_parts(op, best, m, n, k)
        for g in (1, 2, 4):
            todo[replace(best, groups=partition((g,) * parts.waves, parts.waves))].append(f"groups of {g}")
        fewer = Predictor(replace(profile, machine=replace(p.machine, sms=p.sms * 3 // 4)))
        for groups in groupings(fewer.signaled_parts(op, best, m, n, k))[1:2]:
            todo[replace(best, groups=partition(groups, parts.waves))].append(MISTAKEN)
        for groups in partitions(parts.waves, draw):
            todo[replace(best, groups=groups)] += []
    return todo


def measure(out: Path, profile: Profile, seconds: float) -> None:
    import torch

    import weft
    from weft.planner.tuner import CudaTimer

    world = weft.init()
    timer, planner, start = CudaTimer(world), Planner(Predictor(profile)), time.monotonic()
    most = max(max(m * k, n * k) for shapes in SHAPES.values() for m, n, k in shapes)
    x, w = (torch.randn(most, device=world.device, dtype=torch.bfloat16) * 0.1 for _ in range(2))
    fixed = {"world": world.size, "profile": profile.digest, "date": datetime.date.today().isoformat()}
    out.mkdir(parents=True, exist_ok=True)
    cases = {f"predicted {op} {SHAPES[op][i]}": (op, *SHAPES[op][i]) for i in range(8) for op in SHAPES}
    for op, m, n, k in unfinished(world, out, cases, seconds):
        rows = m // world.size if op == "all_gather_matmul" else m
        a, b = x[: rows * k].view(rows, k), w[: n * k].view(n, k)
        options: dict[str, Any] = {}
        if op == "matmul_all_to_all":
            options["destinations"] = weft.route([i % world.size for i in range(m)], world=world)
        for plan, tags in plans_to_run(profile, planner, op, m, n, k).items():
            failure, us = "", 0.0
            try:
                run = lambda plan=plan: getattr(weft, op)(a, b, world=world, plan=plan, **options)  # noqa: E731, B023
                run()
                us = timer.graph(run)
                predicted = planner.predictor.time(op, plan, m, n, k)
            except (WeftError, RuntimeError, ValueError) as e:
                failure = f"{type(e).__name__}: {e}"
            if any(world.exchange(failure)):
                print(
                    f"left out: {op} {m} x {n} x {k} {brief(plan)}: {failure}", flush=True
                ) if world.rank == 0 else None
                continue
            row = dict(op=op, M=m, N=n, K=k, plan=json.loads(plan.to_json()), us=round(us, 2))
            row |= dict(predicted=round(predicted, 2), tags=tags)
            keep(world, out / f"predictions-x{world.size}.jsonl", [row | fixed])
        if world.rank == 0:
            print(f"{time.monotonic() - start:4.0f}s {op} {m} x {n} x {k}", flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--profile")
    p.add_argument("--seconds", type=float, default=200)
    a = p.parse_args()
    measure(a.out, profile_for(a.profile, int(os.environ["WORLD_SIZE"])), a.seconds)


if __name__ == "__main__":
    main()
