"""The table of docs/vllm.md: answers of vLLM on a GPU with the plugin beside those without it, from
bench/results/<machine>/vllm.jsonl (tests/gpu/gpu_vllm.py).
"""

from __future__ import annotations

from bench.pages.tables import Rows, grid

FORMS = {
    "auto": "the plugin's choice", "whole": "norm fused with the sum", "rows": "residuals by rows", "woven": "two parts",
}  # fmt: skip


def answers(lines: Rows) -> str:
    """Return the table with a line for each model, number of ranks and form; of the lines of one the newest counts."""
    newest = {(r["model"], r["ranks"], r["form"], r["mode"]): r for r in lines}
    table = []
    for model, ranks, form in dict.fromkeys(key[:3] for key in newest):
        modes = [newest.get((model, ranks, form, mode)) for mode in ("eager", "graphs")]
        counts = ["–" if r is None else f"{r['same']}/{r['tokens']}" for r in modes]
        furthest = max(r["furthest"] for r in modes if r is not None)
        table.append([model, str(ranks), FORMS[form], *counts, f"{furthest:.4f}"])
    head = ["tiny model of random weights", "ranks", "form", "eager", "in CUDA graphs", "furthest log-probability"]
    versions = ", ".join(dict.fromkeys(row["vllm"] for row in newest.values()))
    return (
        f"vLLM {versions}. Tokens as without the plugin, up to the first other one of an answer:\n\n{grid(head, table)}"
    )
