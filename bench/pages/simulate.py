"""The predictions of `weft.simulate` for machines without measurements, and the errors of predictions for measured
machines: a chapter of docs/planner.md."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import fmean

from bench.common import stored
from bench.pages import ahead, svg
from bench.pages.predict import TABLES, percent
from bench.pages.tables import grid
from weft.planner.auto import profile_for
from weft.planner.parts import NotMeasured
from weft.planner.predict import Predictor
from weft.planner.simulate import (
    ScaledPredictor,
    Simulation,
    Topology,
    cluster,
    links_of,
    simulate_from,
)
from weft.plans import KINDS, Plan, Sequential

COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
PROFILE, PLOT = "nvidia-h200-x4", "simulation-nodes.svg"
INTRODUCTION = """## Machines that were not measured

`weft.simulate(topology, workload, sizes)` predicts ops and layers on another topology: GEMMs, tiles and slow-downs stay as measured,
and transfers are scaled (`src/weft/planner/simulate.py` says how).
"""
USE = """
```python
import weft
from weft.planner.simulate import cluster, nvlink, pcie

result = weft.simulate(cluster(64), "mlp", [(8192, 8192, 28672)], profile="nvidia-h200-x4")
print(result)
result.plot("mlp.png")
```

In a shell: `weft simulate mlp 8192,8192,28672 --gpus 64 --profile nvidia-h200-x4`.
"""


def plot(groups: dict[str, list[Simulation]], path: Path) -> None:
    """Draw the layer's time and speedup as functions of the number of GPUs, with a line for each kind of link."""
    figure = svg.figure(9, 3.4)
    left, right = figure.subplots(1, 2)
    for name, simulations in groups.items():
        gpus = [s.topology.gpus for s in simulations]
        (line,) = left.plot(gpus, [s.rows[0].us for s in simulations], marker="o", ms=3, label=name)
        left.plot(gpus, [s.rows[0].sequential for s in simulations], ls=":", color=line.get_color())
        right.plot(gpus, [s.rows[0].speedup for s in simulations], marker="o", ms=3, color=line.get_color())
    left.set(xscale="log", yscale="log", ylabel="us (dotted: sequential)", xlabel="GPUs")
    right.set(xscale="log", ylabel="times as fast as sequential", xlabel="GPUs")
    for axes in (left, right):
        axes.set_xticks(COUNTS, [str(c) for c in COUNTS], fontsize=7.5)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=7.5, frameon=False)
    svg.save(figure, path)


Errors = dict[tuple[int, str, str], list[float]]  # by number of GPUs, op and kind of plan


@cache
def errors_of_stored_calls() -> tuple[Errors, Errors]:
    """Return the errors of predicted times, and of predicted speedups over sequential, for stored calls on 2, 4 and 8
    GPUs."""
    predictor, on = measured()
    times_by_plan: dict[tuple[str, int, str, tuple[int, ...]], dict[Plan, tuple[float, float]]] = defaultdict(dict)
    for folder in sorted(stored.RESULTS.glob("nvidia-h200-x*")):
        for r in stored.rows(folder.name):
            if r.call.mode != "graph" or r.run in stored.OLD:
                continue
            scaled = ScaledPredictor(predictor, on.resized(r.world), on) if r.world != predictor.world else predictor
            plan = Plan.from_json(r.call.plan)
            try:
                predicted = scaled.time(r.call.op, plan, *r.shape)
            except NotMeasured:
                continue
            times_by_plan[r.run, r.world, r.call.op, r.shape][plan] = predicted, r.call.us
    errors: Errors = defaultdict(list)
    gains: Errors = defaultdict(list)
    for (_, world, op, _), times in times_by_plan.items():
        base = times.get(Sequential())
        for plan, (predicted, us) in times.items():
            errors[world, op, plan.kind].append(predicted / us - 1)
            if base and plan != Sequential():
                gains[world, op, plan.kind].append((base[0] / predicted) / (base[1] / us) - 1)
    return errors, gains


def validation() -> str:
    errors, gains = errors_of_stored_calls()
    order = lambda x: (x[0][0], x[0][1], list(KINDS).index(x[0][2]))  # noqa: E731
    return grid(
        ("GPUs", "op", "kind", "calls", "mean error", "bias", "largest", "mean error of the speedup"),
        [
            [
                str(key[0]),
                *key[1:],
                str(len(e)),
                percent(fmean(map(abs, e))),
                f"{100 * fmean(e):+.1f}%",
                percent(max(map(abs, e))),
                percent(fmean(map(abs, gains[key]))) if gains[key] else "–",
            ]
            for key, e in sorted(errors.items(), key=order)
        ],
        0,
    )


@cache
def layers() -> dict[str, list[Simulation]]:
    """Return the layers that the plot shows, by name."""
    predictor, on = measured()
    size = (32768, 16384, 53248)
    whats = {"MLP, 50 GB/s a GPU": "mlp", "GEMM + all-reduce, 50 GB/s a GPU": "matmul_all_reduce"}
    return {
        name: [simulate_from(predictor, cluster(c, gbs=50.0), op, [size], on) for c in COUNTS]
        for name, op in whats.items()
    }


@cache
def measured() -> tuple[Predictor, Topology]:
    profile = profile_for(PROFILE, None)
    return Predictor(profile), links_of(profile)


def plots(folder: Path) -> list[Path]:
    plot(layers(), folder / PLOT)
    return [folder / PLOT]


MANY_NODES = f"""### Many nodes

One tensor-parallel MLP over all GPUs, hidden 16384, intermediate 53248, 32768 tokens; nodes of 8 GPUs on NVLink, and a network of
50 GB/s a GPU. The plans that overlap are those with NCCL over all ranks, and [two-level plans](nodes.md).

![layers on 8 to 1024 GPUs](img/{PLOT})

"""


def of_profile() -> str:
    profile = measured()[0].profile
    return f"The profile: {profile.machine.name}, {profile.source}, {profile.created[:10]}.\n"


def digest() -> str:
    """Return the part of the chapter that the page shows: the predictions for many nodes, and the errors of the
    predictions of stored calls."""
    errors, gains = errors_of_stored_calls()
    figures = []
    for world in sorted({key[0] for key in errors}):
        of_times, of_gains = (
            [abs(e) for key, es in errors_by_key.items() if key[0] == world for e in es]
            for errors_by_key in (errors, gains)
        )
        figures.append(
            f"{percent(fmean(of_times))} of the time and {percent(fmean(of_gains))} of the speedup on {world} GPUs ({len(of_times)} calls)"
        )
    text = f"{INTRODUCTION}{USE}\n{of_profile()}\n{MANY_NODES}### Against measurements\n\n"
    text += f"The profile predicts stored calls that ran on other machines of the same kind. Mean errors: {'; '.join(figures)}. "
    return text + f"Errors by op: [tables](../{TABLES}).\n"


def chapter() -> str:
    text = f"{INTRODUCTION}\n{of_profile()}"

    text += "\n### Against measurements\n\nStored calls (`bench/results`), predicted from the profile above. Calls on another number of GPUs\n"
    text += "than the profile's are simulated. The calls were measured on other machines and at other times than the profile; the error of\n"
    text += "the predicted speedup over sequential, in the last column, does not depend on that.\n\n"
    return f"{text}{validation()}\n\n{ahead.section()}"
