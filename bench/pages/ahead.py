"""Predictions of calls on more GPUs than a profile has, written before the calls are measured, and the errors of the
predictions.

python -m bench.pages.ahead [--gpus 8] [--profiles nvidia-h200-x2 nvidia-h200-x4]

The program writes bench/results/predictions-<gpus>.jsonl anew: for every op and shape of bench/measure/run.py it
predicts the plans that --tune times in a CUDA graph, and marks the plan that the planner chooses as `chosen`. `errors`
compares the predictions with rows that were measured later.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common import shapes, stored
from bench.common.candidates import candidates
from bench.measure.run import OPS
from bench.pages.predict import percent
from bench.pages.tables import grid, lines_of
from weft.planner.auto import profile_for
from weft.planner.parts import NotMeasured
from weft.planner.predict import Predictor
from weft.planner.search import Planner
from weft.planner.simulate import ScaledPredictor, links_of
from weft.plans import Plan, Sequential

PROFILES = ("nvidia-h200-x2", "nvidia-h200-x4")
GPUS = 8
Prediction = dict[str, Any]


def path_of(gpus: int, results: Path = stored.RESULTS) -> Path:
    return results / f"predictions-{gpus}.jsonl"


def predicted(name: str, gpus: int, date: str, sizes: Sequence[shapes.MLP] = shapes.ALL) -> Iterator[Prediction]:
    """Yield the predictions of one profile for `gpus` GPUs with the same links."""
    profile = profile_for(name, None)
    links = links_of(profile)
    planner = Planner(ScaledPredictor(Predictor(profile), links.resized(gpus), links))
    fixed = dict(world=gpus, card=profile.machine.gpu, profile=name, made=profile.created, date=date)
    for shape in sizes:
        for op in OPS:
            m, n, k = shape.column(gpus) if op == "all_gather_matmul" else shape.row(gpus)
            chosen = planner.decide(op, m, n, k, "graph", m % gpus == 0).plan
            nbytes = 2 * m * (k if op == "all_gather_matmul" else n)
            for plan in dict.fromkeys([Sequential(), *candidates(op, gpus, nbytes), chosen]):
                with contextlib.suppress(NotMeasured):
                    us = planner.predictor.time(op, plan, m, n, k)
                    row = dict(op=op, name=shape.name, M=m, N=n, K=k, plan=json.loads(plan.to_json()))
                    yield row | dict(predicted=round(us, 2), chosen=plan == chosen) | fixed


def errors(gpus: int, results: Path = stored.RESULTS) -> dict[tuple[str, str], list[float]]:
    """Return, by profile and kind of plan, predicted / measured - 1 of all calls that were measured after their
    prediction was written."""
    of_kinds: dict[tuple[str, str], list[float]] = defaultdict(list)
    predictions = lines_of(path_of(gpus, results))
    for card in {p["card"] for p in predictions}:
        measured: dict[tuple[str, tuple[int, int, int], Plan], list[tuple[str, float]]] = defaultdict(list)
        for r in stored.rows(f"{card}-x{gpus}", results):
            if r.date and r.call.mode == "graph":
                measured[r.call.op, r.shape, Plan.from_json(r.call.plan)].append((r.date, r.call.us))
        for p in predictions:
            plan = Plan.from_json(json.dumps(p["plan"]))
            calls = measured[p["op"], (p["M"], p["N"], p["K"]), plan] if p["card"] == card else []
            if times := [us for date, us in calls if date > p["date"]]:
                of_kinds[p["profile"], plan.kind].append(p["predicted"] / fmean(times) - 1)
    return of_kinds


def section(gpus: int = GPUS, results: Path = stored.RESULTS) -> str:
    """Return the part of a page that compares the predictions with later measurements."""
    predictions = lines_of(path_of(gpus, results))
    written = f"### Ahead of the measurements\n\n{len(predictions)} times of calls on {gpus} GPUs were predicted on "
    written += f"{predictions[0]['date'][:10]}, from profiles of fewer GPUs (`bench/results/{path_of(gpus).name}`)"
    if not (of_kinds := errors(gpus, results)):
        return f"{written}. None of these calls has been measured since.\n"
    lines = [
        [profile, kind, str(len(e)), percent(fmean(map(abs, e))), f"{100 * fmean(e):+.1f}%"]
        for (profile, kind), e in sorted(of_kinds.items())
    ]
    head = ("profile", "kind", "calls", "mean error", "bias")
    return f"{written}, and measured afterwards:\n\n{grid(head, lines, 2)}\n"


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--gpus", type=int, default=GPUS)
    p.add_argument("--profiles", nargs="*", default=PROFILES)
    a = p.parse_args()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    rows = [json.dumps(row) for name in a.profiles for row in predicted(name, a.gpus, date)]
    path_of(a.gpus).write_text("\n".join(rows) + "\n")
    print(f"{len(rows)} predictions -> {path_of(a.gpus)}")


if __name__ == "__main__":
    main()
