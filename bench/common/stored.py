"""Measured calls of ops from bench/results, and a profile fitted to them, with which the predictor can be developed and judged without GPUs.

`rows` reads the rows of bench/measure/run.py (the benchmark and its tuning runs). `fitted` makes a Profile of such rows. GEMMs and
collectives are as the benchmark timed them alone (a collective also as the sequential call minus its GEMM), and waves of tiles come from
a log of one GPU. Copies, barriers and slow-downs of a GEMM were not timed alone: least squares fits them to the decomposed plans' times.
The profile's `source` records that it was fitted; it is never shipped.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from weft.op import REGISTRY, collective, collectives
from weft.planner.curves import least_squares
from weft.planner.predict import Predictor
from weft.planner.profile import Gemm, Hardware, Latency, Profile, Slowdown, TimedCall, Wave
from weft.plans import Decomposed, Plan, Sequential

RESULTS = Path(__file__).parents[1] / "results"
OPS = tuple(collectives())
OLD = ("x8-2",)  # runs of kernels that have changed since then; no figure uses these runs


@dataclass(frozen=True)
class Row:
    """One measured call. Rows of one `run` and shape were interleaved. gemm, comm: the us of the GEMM and of the
    collective alone, if the run timed them. date: in ISO form, "" in old rows of tuning runs."""

    run: str
    world: int
    call: TimedCall
    gemm: float | None
    comm: float | None
    date: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.call.m, self.call.n, self.call.k


def plan_of(op: str, text: str) -> Plan | None:
    """Return the plan of a stored text, or None if the class no longer exists or the op no longer uses it."""
    try:
        plan = Plan.from_json(text)
    except ValueError:
        return None
    return plan if REGISTRY[op].has(plan) else None


def rows(machine: str, results: Path = RESULTS) -> list[Row]:
    """Return all rows of one machine's folder, from tuning runs and from the benchmark."""
    out = []
    for path in sorted((results / machine / "tuning").glob("*.jsonl")):
        for r in map(json.loads, path.read_text().splitlines()):
            if r["op"] not in OPS:
                continue
            times = r["times"]
            for plan, us in times.items():
                ran = plan_of(r["op"], plan) if plan.startswith("{") else None
                if ran:
                    call = TimedCall(r["op"], ran.to_json(), r["M"], r["N"], r["K"], r["mode"], us)
                    out.append(Row(path.stem, r["world"], call, times.get("gemm"), None, r.get("date", "")))
    for path in sorted((results / machine).glob("*.jsonl")):
        if path.stem not in OPS:
            continue
        for r in map(json.loads, path.read_text().splitlines()):
            # A row without a plan has the default one, except "fused", whose plan depended on the commit.
            default_plans = {"sequential": Sequential().to_json(), "decomposed": Decomposed().to_json()}
            text = r["plan"] or default_plans.get(r["method"])
            if text and (plan := plan_of(r["op"], text)):
                call = TimedCall(r["op"], plan.to_json(), r["M"], r["N"], r["K"], r["mode"], r["us"])
                date = r.get("date", "")
                out.append(Row(f"benchmark {date}", r["world"], call, r["gemm_us"], r["comm_us"], date))
    return out


def moved(call: TimedCall) -> int:
    """Return the bytes of the whole tensor that a call's collective moves."""
    return call.m * (call.k if call.op == "all_gather_matmul" else call.n) * 2


def _mean(pairs: Iterable[tuple]) -> dict:
    groups = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return {key: fmean(values) for key, values in groups.items()}


def waves() -> list[Wave]:
    """Return the timed waves of tiles from the log of one GPU: "M N K cublas .. | 128x256x64 w8 s3 p132 g8 f1 286.3 | .."."""
    out = []
    for line in (RESULTS / "nvidia-h200-x1/experiments/gemm-tiles.log").read_text().splitlines():
        m, n, k = map(int, line.split()[:3])
        for match in re.finditer(r"(\d+)x(\d+)x(\d+) w(\d) s(\d) p(\d+) g8 f1 ([\d.]+)", line):
            bm, bn, bk, warps, stages, programs = map(int, match.groups()[:6])
            if (bm, bn, bk, stages) in ((128, 256, 64, 3), (128, 256, 64, 4), (128, 128, 64, 3)):
                tiles = -(-m // bm) * -(-n // bn)
                per_sm = 2 if programs > 132 else 1
                out.append(Wave(bm, bn, bk, warps, stages, per_sm, programs, tiles, k, float(match[7])))
    return out


def fitted(measured: Sequence[Row], world: int) -> Profile:
    """Return a profile of `world` GPUs, fitted to the rows that were measured on that many."""
    graph = [r for r in measured if r.call.mode == "graph" and r.world == world]
    gemms = _mean((r.shape, r.gemm) for r in graph if r.gemm)
    sequential = [r for r in graph if json.loads(r.call.plan)["kind"] == "sequential"]
    comm = _mean(((collective(r.call.op), moved(r.call)), r.comm) for r in graph if r.comm)
    rest = _mean(
        ((collective(r.call.op), moved(r.call)), r.call.us - (r.gemm or gemms[r.shape]))
        for r in sequential
        if r.shape in gemms and r.call.us > (r.gemm or gemms[r.shape])
    )
    latencies = [Latency(operation, 0, nbytes, us) for (operation, nbytes), us in sorted({**rest, **comm}.items())]
    machine = Hardware("nvidia-h200", world, "nvlink18", 132, "2.11.0", "3.6.0", "2.28.9")
    profile = Profile(
        machine, "from stored rows", "fitted to bench/results, not measured as a profile",
        tuple(Gemm(*shape, us) for shape, us in gemms.items()), tuple(waves()), tuple(latencies),
    )  # fmt: skip
    calls = _mean((replace(r.call, us=1.0), r.call.us) for r in measured if r.world == world)
    profile += [replace(call, us=us) for call, us in calls.items()]
    return _with_copies(profile)


def _with_copies(profile: Profile) -> Profile:
    """Return the profile with copies, barriers and slow-downs such that the predicted times of decomposed plans are
    closest to the measured ones."""
    calls = [r for r in profile.calls if json.loads(r.plan)["kind"] == "decomposed"]
    bare = replace(profile, calls=())
    start = dict(copy=6.0, rate=370.0, barrier=9.0, gemm=1.08, other=1.05, sum=6.0, nccl=1.2)

    def profile_of(x: np.ndarray) -> Profile:
        p = dict(zip(start, np.exp(x).tolist(), strict=True))
        sizes = (1 << 16, 1 << 30)
        copies = [Latency("copy", 0, s, p["copy"] + s / p["rate"] / 1e3) for s in sizes]
        sums = [Latency("sum", 0, s, p["sum"] + s * (profile.machine.world + 1) / 3.5e6) for s in sizes]
        local = [Latency("local", 0, s, 2 + s * 2 / 3.5e6) for s in sizes]
        slowdowns = [
            Slowdown("copy", 0, max(p["gemm"], 1), max(p["other"], 1)),
            Slowdown("all_reduce", 0, max(p["nccl"], 1), max(p["nccl"], 1)),
        ]
        return bare + [*copies, *sums, *local, Latency("barrier", 0, 0, p["barrier"]), *slowdowns]

    def residuals(x: np.ndarray) -> np.ndarray:
        predict = Predictor(profile_of(x))
        log_errors = [np.log(predict.model(r.op, Plan.from_json(r.plan), r.m, r.n, r.k) / r.us) for r in calls]
        return np.concatenate([log_errors, 0.05 * (x - initial)])

    initial = np.log(list(start.values()))
    fitted_profile = profile_of(least_squares(residuals, initial, rounds=8) if calls else initial)
    return fitted_profile + profile.calls
