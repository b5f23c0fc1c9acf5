"""The chapters of docs/measurements.md on the ways of overlapping, the host's time for a call and the MoE layer, from
bench/results/*/tuning, */host.jsonl and */moe.jsonl; and the table of docs/batch-invariance.md, from */batch_invariance.jsonl."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from bench.pages.report import OPS, _us, _x, mean, measured
from bench.pages.tables import Rows, by_machine, grid, lines_of

TUNED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
MLPS = tuple(f"MLP-{i}" for i in range(1, 7))
WAYS = ("decomposed", "fused, programs pull", "fused, a copy engine pulls", "signaled")
WAYS_TEXT = """## Ways of overlapping

The table shows mean speedups of each way's best plan over weft's sequential plan, for MLP-1 to MLP-6 in CUDA graphs on H200s (tuning runs). Brackets
contain the number of sizes at which the way was fastest ([why](design-notes.md)).
"""
METHODS = ("library", "sequential", "decomposed", "fused", "signaled", "one_shot", "two_shot")
INVARIANT = ("norm", "rows", "shards")  # ways to run a layer, under the names of bench/measure/batch_invariance.py
HOST_TEXT = """## Host time of a call

Times are microseconds of a known call, without a wait for the GPU (`bench/measure/host.py`). *library* calls cuBLAS
and NCCL.
"""
MOE_TEXT = """## Mixture of experts

These are speedups of forward passes with balanced routing, including the router, over NCCL's all-to-all and `torch._grouped_mm`, in CUDA graphs ([every size](../bench/results/moe.md)).
On one GPU vLLM's fused experts [are faster](moe.md#what-it-reaches) than torch's.
"""


def way(plan: dict) -> str:
    if plan["kind"] != "fused":
        return str(plan["kind"])
    return WAYS[2] if plan.get("class") == "FusedGatherByCopies" else WAYS[1]


def tuned(results: Path) -> dict[tuple[str, int], dict[str, dict[str, float]]]:
    """Return, by op and number of H200s, the speedup of each way for every shape in the mean, from the newest run with
    that shape."""
    best_by_name: dict[tuple[str, int], dict[str, dict[str, float]]] = defaultdict(dict)
    for row in (r for path in sorted(results.glob("nvidia-h200-x*/tuning/*.jsonl")) for r in lines_of(path)):
        if row["mode"] == "graph" and row["op"] in TUNED and row["name"] in MLPS:
            plans = {text: json.loads(text) for text in row["times"] if text.startswith("{")}
            base = next(row["times"][text] for text, plan in plans.items() if plan["kind"] == "sequential")
            best: dict[str, float] = {}
            for text, plan in plans.items():
                best[way(plan)] = max(base / row["times"][text], best.get(way(plan), 0))
            best_by_name[row["op"], row["world"]][row["name"]] = best
    return best_by_name


def ways(results: Path) -> str:
    lines = []
    for (op, world), shapes in sorted(tuned(results).items(), key=lambda f: (TUNED.index(f[0][0]), -f[0][1])):
        cells = []
        for name in WAYS:
            wins = sum(name == max((w for w in WAYS if w in best), key=lambda w: best[w]) for best in shapes.values())
            reached = mean(best.get(name) for best in shapes.values())
            cells.append(f"{_x(reached)} ({wins})" if reached else "–")
        lines.append([OPS[op], str(world), *cells])
    return f"{WAYS_TEXT}\n{grid(['op', 'GPUs', *WAYS], lines, 1)}\n"


def sources(stored: dict[str, Rows]) -> str:
    """Return the sentence that names the machines, dates and commits of the rows."""
    return f"Measured: {'; '.join(f'{machine} {measured(rows)}'.strip() for machine, rows in stored.items())}."


def host(results: Path) -> str:
    known, stored = [], by_machine(results, "host.jsonl")
    methods = list(dict.fromkeys([*METHODS, *(r["method"] for rows in stored.values() for r in rows)]))
    for machine, rows in stored.items():
        known.append([f"*{machine}*", *[""] * len(methods)])
        for op in dict.fromkeys(r["op"] for r in rows):
            us = {r["method"]: r["us"] for r in rows if r["op"] == op}
            known.append([OPS.get(op, op.replace("_", " ")), *(_us(us.get(m)) for m in methods)])
    return f"{HOST_TEXT}\n{grid(['op', *methods], known, 1)}\n\n{sources(stored)}\n"


def batch_invariance(results: Path) -> str:
    """Return the table of batch-invariant layers: the us of the rebuilt mode, the ratio of that time to each of weft's
    ways, and the extra time of the fastest of these over the fastest way without batch invariance."""
    lines, stored = [], by_machine(results, "batch_invariance.jsonl")
    for machine, rows in stored.items():
        for model, tokens in dict.fromkeys((r["model"], r["M"]) for r in rows):
            us = {r["method"]: r["us"] for r in rows if (r["model"], r["M"]) == (model, tokens)}
            fastest = [min(us[f"{mode} {way}"] for way in INVARIANT) for mode in ("weft", "auto")]
            ratios = [f"**{us['rebuilt'] / us[f'weft {way}']:.2f}x**" for way in INVARIANT]
            lines.append(
                [
                    f"{model}, {tokens:,}",
                    machine.rpartition("x")[2],
                    _us(us["rebuilt"]),
                    *ratios,
                    f"{fastest[0] / fastest[1] - 1:+.0%}",
                ]
            )
    head = ["layer, tokens", "GPUs", "vLLM's mode, us", *INVARIANT, "cost"]
    return f"{grid(head, lines, 1)}\n\n{sources(stored)}"


def moe(results: Path) -> str:
    stored = by_machine(results, "moe.jsonl")
    lines = [line for rows in stored.values() for line in _moe_lines(rows)]
    head = ["GPUs", "tokens a GPU", "layers", "speedup, mean", "least", "most"]
    return f"{MOE_TEXT}\n{grid(head, lines, 1)}\n\n{sources(stored)}\n" if lines else ""


def _moe_lines(rows: Rows) -> Iterator[list[str]]:
    """Return a line for each number of tokens, from the newest rows of every layer with balanced routing."""
    us: dict[tuple[int, int], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for r in rows:
        if r["zipf"] == 0:
            us[r["world"], r["M"]][r["name"]][r["method"]] = r["us"]
    for (world, tokens), layers in sorted(us.items()):
        ratios = [t["library"] / t["auto"] for t in layers.values() if {"library", "auto"} <= t.keys()]
        if ratios:
            figures = map(_x, (mean(ratios), min(ratios), max(ratios)))
            yield [str(world), f"{tokens:,}", str(len(ratios)), *figures]
