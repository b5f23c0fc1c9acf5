"""The accuracy of the planner: a chapter of docs/planner.md with plots, and the tables next to the results. Both come
from calls that bench/measure/predictions.py timed after a tuned profile had predicted their times."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.common import stored
from bench.measure.predictions import COPIES, LABELS, SHAPES
from bench.pages import svg
from bench.pages.tables import grid, lines_of
from weft.planner.probes.common import SIZES
from weft.planner.search import brief
from weft.planner.table import GAIN
from weft.plans import KINDS, Plan


@dataclass(frozen=True)
class Point:
    """One measured call and its prediction. source: the run that predicted it."""

    source: str
    op: str
    shape: tuple[int, int, int]
    world: int
    plan: str
    us: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.us - 1

    @property
    def kind(self) -> str:
        plan = json.loads(self.plan)
        return COPIES if plan.get("copies") else plan["kind"]


# -- what is stored --------------------------------------------------------------------------------------------------
def tuned(machine: str) -> dict[str, list[Point]]:
    """Return, by run, the calls of shapes that `weft tune` does not measure, with the times that were predicted before
    the calls ran."""
    seen = {
        op: {s for part in (SIZES.gather if op == "all_gather_matmul" else SIZES.reduce) for s in part} for op in SHAPES
    }
    points: dict[str, list[Point]] = {}
    for path in sorted((stored.RESULTS / machine / "predictions").glob("*.jsonl"), key=lambda path: path.stem):
        points[path.stem] = [
            Point(path.stem, r["op"], (r["M"], r["N"], r["K"]), r["world"], json.dumps(r["plan"], sort_keys=True), r["us"], r["predicted"])
            for r in lines_of(path)
            if (r["M"], r["N"], r["K"]) not in seen[r["op"]]
        ]  # fmt: skip
    return points


# -- the page --------------------------------------------------------------------------------------------------------
INTRODUCTION = """The times were predicted from a profile of `weft tune` before the calls ran, on shapes outside the profile. An *error* is
predicted / measured - 1; the columns of kinds contain mean absolute errors. *Of the best* is the measured time of the fastest plan that
ran, divided by the measured time of the plan that was predicted fastest.
"""
TABLES = "bench/results/predictions.md"
RUNS = {  # for each run, its profile and shapes in words
    "predictions-x2-4": "a profile made just before the calls",
    "predictions-x4-5": "the same shapes on 4 GPUs; the profile's calls of ops were timed just before",
    "predictions-x4-6": "other shapes, the same profile, another machine of the same kind",
}


def percent(x: float) -> str:
    return f"{100 * x:.1f}%"


def errors(runs: dict[str, list[Point]]) -> str:
    """Return the table of errors with a line for each kind and op and a column group for each run."""
    groups: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, points in runs.items():
        for p in points:
            for op in (p.op, "all"):
                groups[p.kind, op][name].append(p.error)
    lines = []
    for (kind, op), by_run in sorted(groups.items(), key=lambda g: (LABELS.index(g[0][0]), g[0][1] == "all", g[0])):
        cells = []
        for e in (by_run.get(name, []) for name in runs):
            size = sorted(map(abs, e))
            judged = (
                (percent(fmean(size)), percent(size[int(0.9 * len(e))]), f"{100 * fmean(e):+.1f}%") if e else ("–",) * 3
            )
            cells += [str(len(e)), *judged]
        lines.append([kind, op, *cells])
    head = [t for name in runs for t in (f"{short(name)}: calls", "mean error", "90% below", "bias")]
    return grid(["kind", "op", *head], lines, 2)


def short(run: str) -> str:
    return run.removeprefix("predictions-")


@dataclass(frozen=True)
class Choice:
    """The times in us, on one shape, of the fastest plan, of the plan predicted fastest, of the plan that "auto" would
    choose, and of the sequential plan."""

    case: tuple[str, str, int, tuple[int, int, int]]
    plans: tuple[str, str]  # the fastest plan and the plan predicted fastest
    count: int
    best: float
    chosen: float
    auto: float
    sequential: float


def judged(points: Sequence[Point]) -> list[Choice]:
    """Return the calls by (source, op, world, shape), for shapes with several plans."""
    groups: dict[tuple, list[Point]] = defaultdict(list)
    for p in points:
        groups[p.source, p.op, p.world, p.shape].append(p)
    choices = []
    for case, ps in sorted(groups.items()):
        sequential = [p for p in ps if p.kind == "sequential"]
        if len({p.plan for p in ps}) < 3 or not sequential:
            continue
        best, chosen = min(ps, key=lambda p: p.us), min(ps, key=lambda p: p.predicted)
        auto = chosen if sequential[0].predicted > GAIN * chosen.predicted else sequential[0]
        choices.append(Choice(case, (best.plan, chosen.plan), len(ps), best.us, chosen.us, auto.us, sequential[0].us))
    return choices


def choices(points: Sequence[Point]) -> str:
    """Return the table of choices: the plan predicted fastest, compared with the fastest plan and the sequential
    plan."""
    judgements = judged(points)
    if not judgements:
        return "No shape ran with several plans.\n"
    of_best = [c.best / c.chosen for c in judgements]
    slower = sum(c.sequential / c.chosen < 0.98 for c in judgements)
    text = f"Over {len(of_best)} shapes and runs the choice is {percent(fmean(of_best))} of the best on average and "
    text += f"{percent(min(of_best))} in the worst case; on {slower} of them the choice is slower than sequential by more than 2%. "
    slower = sum(c.sequential / c.auto < 0.98 for c in judgements)
    text += f'With the rule of "auto" that a gain below {percent(GAIN - 1)} does not count, the choice is {percent(fmean(c.best / c.auto for c in judgements))} of the '
    text += f"best on average, and slower than sequential by more than 2% on {slower}. "
    lines = []
    for c in judgements:
        if c.best / c.chosen < 0.99:
            _, op, _, shape = c.case
            cells = [f"{x:.0f}" for x in (c.sequential, c.best, c.chosen)]
            plans = [brief(Plan.from_json(plan)) for plan in c.plans]
            size = "×".join(map(str, shape))
            lines.append([op, size, str(c.count), *cells, percent(c.best / c.chosen), *plans])
    text += f"The shapes where the choice is below 99% ({len(lines)}):\n\n"
    head = ["op", "M×N×K", "plans", "sequential us", "best us", "chosen us", "of the best"]
    return text + grid([*head, "best plan", "chosen plan"], lines, 1) + "\n"


def plot(points: Sequence[Point], path: Path) -> None:
    """Draw the distribution of the errors, in one panel for each kind of plan."""
    kinds = [k for k in LABELS if any(p.kind == k for p in points)]
    figure = svg.figure(3.1 * len(kinds), 2.7)
    edges = [i / 100 for i in range(-21, 22, 2)]
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        e = [min(max(p.error, edges[0]), edges[-1]) for p in points if p.kind == kind]
        axes.hist(e, edges, color="#3b6fb6")
        axes.axvline(0, color="#444444", lw=0.8, ls=":")
        axes.set_title(f"{kind}: {len(e)} calls", fontsize=9, loc="left")
        axes.set_xticks([-0.2, -0.1, 0, 0.1, 0.2], ["-20%", "-10%", "0", "10%", "20%"], fontsize=7.5)
        axes.tick_params(axis="y", labelsize=7.5)
        axes.set_xlabel("predicted / measured - 1", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    svg.save(figure, path)


def summary(runs: dict[str, list[Point]]) -> str:
    """Return the mean errors and the quality of the choices of every run."""
    kinds = [kind for kind in KINDS if any(p.kind == kind for points in runs.values() for p in points)]
    lines = []
    for name, points in runs.items():
        cells = []
        for kind in kinds:
            errors = [abs(p.error) for p in points if p.kind == kind or (kind == "signaled" and p.kind == COPIES)]
            cells.append(percent(fmean(errors)) if errors else "–")
        best = [c.best / c.chosen for c in judged(points)]
        lines.append([name, str(points[0].world), str(len(points)), *cells, percent(fmean(best)), percent(min(best))])
    head = ["run", "GPUs", "calls", *kinds, "choice of the best", "lowest"]
    notes = "".join(f"- **{name}**: {RUNS[name]}.\n" for name in runs if name in RUNS)
    return f"{grid(head, lines, 1)}\n\n{notes}"


def runs_of(machines: Iterable[str]) -> dict[str, list[Point]]:
    return {name: points for machine in machines for name, points in tuned(machine).items()}


def digest(runs: dict[str, list[Point]]) -> str:
    """Return the part of the chapter that the page shows."""
    text = f"## How well it predicts\n\n{INTRODUCTION}\n{summary(runs)}\n"
    text += "".join(f"![errors of predicted times](img/{plot_name(name)})\n\n" for name in runs)
    return text + f"By op, with every shape whose choice is below 99%: [tables](../{TABLES}).\n"


def chapter(runs: dict[str, list[Point]]) -> str:
    text = f"## How well it predicts\n\n{INTRODUCTION}\n{summary(runs)}\n### Errors\n\n"
    text += f"{errors(runs)}\n\n### Choices\n\n"
    text += "".join(f"**{name}**. {choices(points)}\n" for name, points in runs.items())
    return text


def plot_name(run: str) -> str:
    return f"{run}.svg"


def plots(runs: dict[str, list[Point]], folder: Path) -> list[Path]:
    for name, points in runs.items():
        plot(points, folder / plot_name(name))
    return [folder / plot_name(name) for name in runs]
