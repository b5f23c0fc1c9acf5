"""The table of docs/vllm.md: answers of vLLM on a GPU with the plugin beside those without it, from
bench/results/<machine>/vllm.jsonl (tests/gpu_vllm.py).
"""

from __future__ import annotations

from tables import Rows, grid

FORMS = {
    "auto": "the plugin's choice", "whole": "norm fused with the sum", "rows": "residuals by rows", "woven": "two parts",
}  # fmt: skip


def answers(lines: Rows) -> str:
    """A line for each model and number of ranks; of the lines of one the newest counts."""
    newest = {(r["model"], r["ranks"], r["mode"], r["form"]): r for r in lines}
    rows = []
    for model, ranks in dict.fromkeys(key[:2] for key in newest):
        found = [row for key, row in newest.items() if key[:2] == (model, ranks)]
        cells = {}
        for mode in ("eager", "graphs"):
            same = [f"{FORMS[r['form']]} {r['same']}" for r in found if r["mode"] == mode]
            cells[mode] = ", ".join(same)
        furthest = max(row["furthest"] for row in found)
        rows.append([model, str(ranks), cells["eager"], cells["graphs"], str(found[0]["tokens"]), f"{furthest:.4f}"])
    head = [
        "tiny model of random weights",
        "ranks",
        "eager: tokens as without the plugin",
        "in CUDA graphs",
        "of",
        "furthest log-probability",
    ]
    versions = ", ".join(dict.fromkeys(row["vllm"] for row in newest.values()))
    return f"vLLM {versions}, ranks that share one GPU; counted up to the first other token of an answer:\n\n{grid(head, rows)}"
