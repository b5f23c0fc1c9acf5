"""What each way of overlapping reached, what a call takes of the host, and the MoE layer in a line each: chapters of
docs/measurements.md from bench/results/*/tuning, */host.jsonl and */moe.jsonl."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from bench.pages.report import OPS, _table, _us, _x, mean, measured

TUNED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
MLPS = tuple(f"MLP-{i}" for i in range(1, 7))
WAYS = ("decomposed", "fused, programs pull", "fused, a copy engine pulls", "signaled")
WAYS_TEXT = """## Ways of overlapping

From tuning runs, in CUDA graphs: the speedup over weft's own sequential plan of the best plan of each way, geometric means over
MLP-1 to MLP-6, and in brackets on how many of the six it was the fastest. [What was tried](design-notes.md) says why.
"""
METHODS = ("library", "sequential", "decomposed", "fused", "signaled", "one_shot", "two_shot")
HOST_TEXT = """## Host time of a call

From call to return, us, of a shape that was called before, without waiting for the GPU (`bench/measure/host.py`): the two calls of cuBLAS
and NCCL that an op replaces, and the op by each kind of plan.
"""
FIRST_TEXT = """The first call of a number of rows that nobody called before, behind `weft.prepare`, N and K 1,024: median, nine in ten, and the
slowest, us. It has memory to allocate and is compared with what the other ranks call; the library's own first calls differ by as much.
"""
MOE_TEXT = """## Mixture of experts

A layer's forward pass of balanced routing, gate included, over NCCL's all-to-all and `torch._grouped_mm`, in CUDA graphs ([every size](../bench/results/moe.md)).
vLLM's fused experts, which run on one GPU, are faster than torch's: [beside them](moe.md#what-it-reaches).
"""


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def way(plan: dict) -> str:
    if plan["kind"] != "fused":
        return str(plan["kind"])
    return WAYS[2] if plan.get("class") == "FusedGatherByCopies" else WAYS[1]


def tuned(results: Path) -> dict[tuple[str, int], dict[str, dict[str, float]]]:
    """Return, by op and number of GPUs, and for every shape of the mean, the speedup of each way in the newest run that has the
    shape."""
    best_by_name: dict[tuple[str, int], dict[str, dict[str, float]]] = defaultdict(dict)
    for row in (r for path in sorted(results.glob("*/tuning/*.jsonl")) for r in lines_of(path)):
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
    return WAYS_TEXT + "\n" + "\n".join(_table(["op", "GPUs", *WAYS], lines)) + "\n"


def host(results: Path) -> str:
    stored = [r for path in sorted(results.glob("*/host.jsonl")) for r in lines_of(path) if r["what"] == "known"]
    methods = list(dict.fromkeys([*METHODS, *(r["method"] for r in stored)]))
    known, new_sizes = [], []
    for path in sorted(results.glob("*/host.jsonl")):
        rows = [
            r | {"op": OPS.get(r["op"], r["op"].replace("_", " ")), "world": str(r["world"])} for r in lines_of(path)
        ]
        for op, world in dict.fromkeys((r["op"], r["world"]) for r in rows):
            of_op = [r for r in rows if (r["op"], r["world"]) == (op, world)]
            source = f"{path.parent.name} {measured(of_op)}".strip()
            us = {r["method"]: r["us"] for r in of_op if r["what"] == "known"}
            known.append([op, world, *(_us(us.get(m)) for m in methods), source])
            new = {r["method"]: r for r in of_op if r["what"] == "new M"}
            cells = [f"{n['us']:.0f}, {n['p90']:.0f}, {n['worst']:.0f}" for n in map(new.get, ("library", "auto")) if n]
            new_sizes += [[op, world, *cells, source]] if cells else []
    chapters = [
        (HOST_TEXT, ["op", "GPUs", *methods, "measured"], known),
        (FIRST_TEXT, ["op", "GPUs", "library", "auto", "measured"], new_sizes),
    ]
    return "\n".join(text + "\n" + "\n".join(_table(head, lines)) + "\n" for text, head, lines in chapters if lines)


def moe(results: Path) -> str:
    lines = [
        line for path in sorted(results.glob("*/moe.jsonl")) for line in _moe_lines(lines_of(path), path.parent.name)
    ]
    head = ["GPUs", "tokens a GPU", "layers", "speedup, mean", "least", "most", "measured"]
    return MOE_TEXT + "\n" + "\n".join(_table(head, lines)) + "\n" if lines else ""


def _moe_lines(rows: list[dict], machine: str) -> Iterator[list[str]]:
    """Return a line for each number of tokens; of every layer the newest rows of balanced routing."""
    us: dict[tuple[int, int], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for r in rows:
        if r["zipf"] == 0:
            us[r["world"], r["M"]][r["name"]][r["method"]] = r["us"]
    for (world, tokens), layers in sorted(us.items()):
        ratios = [t["library"] / t["auto"] for t in layers.values() if {"library", "auto"} <= t.keys()]
        if ratios:
            yield [
                str(world),
                f"{tokens:,}",
                str(len(ratios)),
                _x(mean(ratios)),
                _x(min(ratios)),
                _x(max(ratios)),
                f"{machine} {measured([r for r in rows if (r['world'], r['M'], r['zipf']) == (world, tokens, 0)])}",
            ]
