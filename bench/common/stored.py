"""Measured calls of ops, from bench/results, and a profile fitted to them: to develop and judge the predictor without GPUs.

`rows` reads what bench/measure/run.py wrote (the benchmark and its tuning runs). `fitted` makes a Profile of such rows: GEMMs and
collectives as the benchmark timed them alone (or as the difference of two that were timed), waves of tiles from a log of one
GPU, and whatever nobody timed alone (copies, barriers, how much they slow a GEMM down) by least squares on the decomposed
plans' times. Such a profile says so in its `source`, and is never shipped.
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

from weft.op import collective, collectives
from weft.planner.curves import least_squares
from weft.planner.predict import Predictor
from weft.planner.profile import Gemm, Hardware, Latency, Profile, Slowdown, TimedCall, Wave
from weft.plans import Decomposed, Plan, Sequential

RESULTS = Path(__file__).parents[1] / "results"
OPS = tuple(collectives())
OLD = ("x8-2",)  # runs of kernels that have changed since


@dataclass(frozen=True)
class Row:
    """One measured call; rows of one `run` and shape were interleaved. gemm, comm: the two alone, where the run timed them."""

    run: str
    name: str
    world: int
    call: TimedCall
    gemm: float | None
    comm: float | None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.call.m, self.call.n, self.call.k


def plan_of(text: str) -> Plan | None:
    """None for plans of kernels that are no more: sums pulled from the GEMM's launch."""
    try:
        return Plan.from_json(text)
    except ValueError:
        return None


def rows(machine: str) -> list[Row]:
    """All rows of one machine's folder, newest tuning format and benchmark alike."""
    out = []
    for path in sorted((RESULTS / machine / "tuning").glob("*.jsonl")):
        for r in map(json.loads, path.read_text().splitlines()):
            if r["op"] not in OPS:
                continue
            times = r["times"]
            for plan, us in times.items():
                ran = plan_of(plan) if plan.startswith("{") else None
                if ran:
                    call = TimedCall(r["op"], ran.to_json(), r["M"], r["N"], r["K"], r["mode"], us)
                    out.append(Row(path.stem, r["name"], r["world"], call, times.get("gemm"), None))
    for path in sorted((RESULTS / machine).glob("*.jsonl")):
        if path.stem not in OPS:
            continue
        for r in map(json.loads, path.read_text().splitlines()):
            known = {
                "sequential": Sequential(),
                "decomposed": Decomposed(),
            }  # which plan "fused" was depends on the commit
            plan = plan_of(r["plan"]) if r.get("plan") else known.get(r["method"])
            if plan:
                call = TimedCall(r["op"], plan.to_json(), r["M"], r["N"], r["K"], r["mode"], r["us"])
                out.append(Row("benchmark", r["name"], r["world"], call, r["gemm_us"], r["comm_us"]))
    return out


def moved(call: TimedCall) -> int:
    """Bytes of the whole tensor that a call's collective moves."""
    return call.m * (call.k if call.op == "all_gather_matmul" else call.n) * 2


def _mean(pairs: Iterable[tuple]) -> dict:
    groups = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return {key: fmean(values) for key, values in groups.items()}


def waves() -> list[Wave]:
    """From the log of one GPU: "M N K cublas .. | 128x256x64 w8 s3 p132 g8 f1 286.3 | .."."""
    out = []
    for line in (RESULTS / "nvidia-h200-x1/experiments/gemm-tiles.log").read_text().splitlines():
        m, n, k = map(int, line.split()[:3])
        for found in re.finditer(r"(\d+)x(\d+)x(\d+) w(\d) s(\d) p(\d+) g8 f1 ([\d.]+)", line):
            bm, bn, bk, warps, stages, programs = map(int, found.groups()[:6])
            if (bm, bn, bk, stages) in ((128, 256, 64, 3), (128, 256, 64, 4), (128, 128, 64, 3)):
                tiles = -(-m // bm) * -(-n // bn)
                per_sm = 2 if programs > 132 else 1
                out.append(Wave(bm, bn, bk, warps, stages, per_sm, programs, tiles, k, float(found[7])))
    return out


def fitted(known: Sequence[Row], world: int) -> Profile:
    """A profile of `world` GPUs from rows of that many."""
    graph = [r for r in known if r.call.mode == "graph" and r.world == world]
    gemms = _mean((r.shape, r.gemm) for r in graph if r.gemm)
    sequential = [r for r in graph if json.loads(r.call.plan)["kind"] == "sequential"]
    comm = _mean(((collective(r.call.op), moved(r.call)), r.comm) for r in graph if r.comm)
    rest = _mean(
        ((collective(r.call.op), moved(r.call)), r.call.us - (r.gemm or gemms[r.shape]))
        for r in sequential
        if r.shape in gemms and r.call.us > (r.gemm or gemms[r.shape])
    )
    latencies = [Latency(what, 0, nbytes, us) for (what, nbytes), us in sorted({**rest, **comm}.items())]
    machine = Hardware("nvidia-h200", world, "nvlink18", 132, "2.11.0", "3.6.0", "2.28.9")
    profile = Profile(
        machine, "from stored rows", "fitted to bench/results, not measured as a profile",
        tuple(Gemm(*shape, us) for shape, us in gemms.items()), tuple(waves()), tuple(latencies),
    )  # fmt: skip
    calls = _mean((replace(r.call, us=1.0), r.call.us) for r in known if r.world == world)
    profile += [replace(call, us=us) for call, us in calls.items()]
    return _with_copies(profile)


def _with_copies(profile: Profile) -> Profile:
    """Copies, barriers and contention that make the decomposed plans' predicted times fit the measured ones."""
    chunks = [r for r in profile.calls if json.loads(r.plan)["kind"] == "decomposed"]
    bare = replace(profile, calls=())
    start = dict(copy=6.0, rate=370.0, barrier=9.0, gemm=1.08, other=1.05, sum=6.0, nccl=1.2)

    def given(x: np.ndarray) -> Profile:
        p = dict(zip(start, np.exp(x).tolist(), strict=True))
        sizes = (1 << 16, 1 << 30)
        copies = [Latency("copy", 0, s, p["copy"] + s / p["rate"] / 1e3) for s in sizes]
        sums = [Latency("sum", 0, s, p["sum"] + s * (profile.machine.world + 1) / 3.5e6) for s in sizes]
        local = [Latency("local", 0, s, 2 + s * 2 / 3.5e6) for s in sizes]
        beside = [
            Slowdown("copy", 0, max(p["gemm"], 1), max(p["other"], 1)),
            Slowdown("all_reduce", 0, max(p["nccl"], 1), max(p["nccl"], 1)),
        ]
        return bare + [*copies, *sums, *local, Latency("barrier", 0, 0, p["barrier"]), *beside]

    def misses(x: np.ndarray) -> np.ndarray:
        predict = Predictor(given(x))
        off = [np.log(predict.model(r.op, Plan.from_json(r.plan), r.m, r.n, r.k) / r.us) for r in chunks]
        return np.concatenate([off, 0.05 * (x - first)])

    first = np.log(list(start.values()))
    made = given(least_squares(misses, first, rounds=8) if chunks else first)
    return made + profile.calls
