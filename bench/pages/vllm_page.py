"""The tables of docs/vllm.md: the answers of vLLM on a GPU with and without the plugin, from
bench/results/<machine>/vllm.jsonl (tests/gpu/gpu_vllm.py), and the seconds for requests, from vllm_serving.jsonl
(bench/measure/vllm_serving.py).
"""

from __future__ import annotations

from pathlib import Path

from bench.pages.tables import Rows, grid, lines_of

TABLES = "bench/results/vllm.md"
FORMS = {
    "auto": "the plugin's choice", "whole": "norm fused with the sum", "rows": "residuals by rows", "woven": "two parts",
}  # fmt: skip


def chapter(results: Path) -> str:
    """Return the page of answers, TABLES."""
    return f"# vLLM's answers with the plugin\n\n{answers(results)}\n"


def answers(results: Path) -> str:
    """Return the table with a line for each model, number of ranks and form, for all machines whose ranks share one
    GPU. If there are several such lines, the newest counts."""
    paths = sorted(results.glob("*-x1/vllm.jsonl"), reverse=True)  # the H200 before the H100
    lines = [row for path in paths for row in lines_of(path)]
    newest = {(r["model"], r["ranks"], r["form"], r["mode"]): r for r in lines}
    table = []
    for model, ranks, form in dict.fromkeys(key[:3] for key in newest):
        modes = [newest.get((model, ranks, form, mode)) for mode in ("eager", "graphs")]
        counts = ["–" if r is None else f"{r['same']}/{r['tokens']}" for r in modes]
        furthest = max(r["furthest"] for r in modes if r is not None)
        table.append([model, str(ranks), FORMS[form], *counts, f"{furthest:.4f}"])
    head = [
        "tiny model of random weights",
        "ranks",
        "form",
        "eager",
        "in CUDA graphs",
        "largest difference of a log-probability",
    ]
    versions = ", ".join(dict.fromkeys(row["vllm"] for row in newest.values()))
    note = (
        "with ranks that share a GPU. The columns count the tokens that equal vLLM's tokens without the plugin, up to the first"
        " different token of an answer"
    )
    return f"vLLM {versions} {note}:\n\n{grid(head, table)}"


def serving(lines: Rows) -> str:
    """Return a line for the newest row of each model, mix and method: the median speedup, the ratio of stock vLLM's two
    turns, and the median and the 99th percentile of token times. If the rows have several dates, the text above the
    table names the mixes of each date."""
    key = ("model", "ranks", "mix", "method", "rate", "tokens_a_step")
    table = []
    mixes: dict[str, list[str]] = {}  # by date
    for row in {tuple(row[name] for name in key): row for row in lines}.values():
        mixes.setdefault(row["date"], []).append(row["mix"])
        size = f"{row['mix']}: {row['requests']} of {row['tokens_in'] // row['requests']} + {row['tokens_out'] // row['requests']}"
        size += f", {row['rate']:g} a second" * bool(row["rate"])
        size += f", {row['method']}" * (row["method"] != "weft")
        latencies = [row["latency"][method] for method in (row["method"], row["baseline"])]
        tokens = [
            " / ".join("–" if name not in ms else f"{ms[name][0]:.1f}, {ms[name][1]:.1f}" for ms in latencies)
            for name in ("first_token_ms", "between_tokens_ms")
        ]
        ranges = [f"{row[name][0]:.2f}–{row[name][1]:.2f}" for name in ("ratio_range", "null_range")]
        table.append([row["model"], size, f"**{row['ratio']:.2f}x**", *ranges, *tokens])
    newest = lines[-1]
    head = ["model", "requests of mean tokens in + out", "median speedup", "range", "stock / stock"]
    head += ["first token, ms", "between tokens, ms"]
    backends = {str(row["fused all-reduce"][row["baseline"]]["backend"]) for row in lines}
    note = f"{newest['layers']} layers of random weights; stock all-reduces with FlashInfer ({', '.join(sorted(backends))})"
    dates = ", ".join(f"{date} ({', '.join(mixes[date])})" if len(mixes) > 1 else date for date in sorted(mixes))
    return f"vLLM {newest['vllm']}, {newest['gpu']}, {dates}, {note}. Times: [median, 99%], weft / stock:\n\n{grid(head, table)}"
