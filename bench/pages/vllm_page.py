"""The tables of docs/vllm.md: answers of vLLM on a GPU with the plugin and without it, from bench/results/<machine>/vllm.jsonl
(tests/gpu/gpu_vllm.py), and seconds for requests, from vllm_serving.jsonl (bench/measure/vllm_serving.py).
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from bench.pages.tables import Rows, grid

TABLES = "bench/results/vllm.md"
FORMS = {
    "auto": "the plugin's choice", "whole": "norm fused with the sum", "rows": "residuals by rows", "woven": "two parts",
}  # fmt: skip


def chapter(results: Path) -> str:
    """Return the page of answers, TABLES."""
    return f"# vLLM's answers with the plugin\n\n{answers(results)}\n"


def answers(results: Path) -> str:
    """Return the table with a line for each model, number of ranks and form, of all machines whose ranks share one GPU; of
    the lines of one the newest counts."""
    paths = sorted(results.glob("*-x1/vllm.jsonl"), reverse=True)  # H200, which was first, and H100
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    newest = {(r["model"], r["ranks"], r["form"], r["mode"]): r for r in lines}
    table = []
    for model, ranks, form in dict.fromkeys(key[:3] for key in newest):
        modes = [newest.get((model, ranks, form, mode)) for mode in ("eager", "graphs")]
        counts = ["–" if r is None else f"{r['same']}/{r['tokens']}" for r in modes]
        furthest = max(r["furthest"] for r in modes if r is not None)
        table.append([model, str(ranks), FORMS[form], *counts, f"{furthest:.4f}"])
    head = ["tiny model of random weights", "ranks", "form", "eager", "in CUDA graphs", "furthest log-probability"]
    versions = ", ".join(dict.fromkeys(row["vllm"] for row in newest.values()))
    note = "ranks share a GPU; tokens as without the plugin, up to the first other one of an answer"
    return f"vLLM {versions}, {note}:\n\n{grid(head, table)}"


def serving(lines: Rows) -> str:
    """Return a line for each model and mix of requests: every repeat's seconds with the plugin, and the medians' ratio."""
    seconds: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in lines:
        by_method = seconds.setdefault((row["model"], row["mix"]), {})
        by_method.setdefault(row["method"], []).extend(row["seconds"])
    newest = {(row["model"], row["mix"]): row for row in lines}
    table = []
    for (model, mix), methods in seconds.items():
        if {"stock", "weft"} <= methods.keys():
            row, stock = newest[model, mix], statistics.median(methods["stock"])
            size = f"{mix}: {row['requests']} of {row['tokens_in'] // row['requests']} + {row['tokens_out'] // row['requests']}"
            repeats = ", ".join(f"{t:.2f}" for t in methods["weft"])
            table.append([size, f"{stock:.2f}", repeats, f"{stock / statistics.median(methods['weft']):.2f}x"])
    row = lines[-1]
    head = ["requests of tokens in + out, mean", "stock, s", "weft, s", "stock / weft"]
    model = f"{row['model']}'s layers ({row['layers']} of them, random weights)"
    return f"vLLM {row['vllm']}, {row['ranks']} ranks, {model}:\n\n{grid(head, table)}"
