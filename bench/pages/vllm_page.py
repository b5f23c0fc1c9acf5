"""The tables of docs/vllm.md: the answers of vLLM on a GPU with and without the plugin, from
bench/results/<machine>/vllm.jsonl (tests/gpu/gpu_vllm.py), and the seconds for requests and the times of traced steps,
from vllm_serving.jsonl and vllm_timeline.jsonl (bench/measure/vllm_serving.py).
"""

from __future__ import annotations

from pathlib import Path

from bench.measure.vllm_engine import LAYERS, STOCK_AGAIN
from bench.pages.tables import Rows, grid, lines_of, page

TABLES = "bench/results/vllm.md"
CASE = ("model", "layers", "ranks", "mix", "rate", "tokens_a_step")
FORMS = {
    "auto": "the plugin's choice", "whole": "norm fused with the sum", "rows": "residuals by rows", "woven": "two parts",
}  # fmt: skip

EXPLANATION = """torch.profiler slows these steps. A layer's mean time is divided by what runs: GEMMs or attention, else norms and
other kernels, else only communication, or nothing. "Stock again", an equal engine, shows the noise. "No communication", stock with only
its waits for other ranks, bounds overlap.

**8,192 tokens.** weft computes layers in halves. That hides 1,146 of 1,343 us of communication and 117 us of other kernels, but GEMMs and
attention take 450 us longer. Halves and copies beside them are hardly the reason: in the first step, on a GPU that had been idle, weft's
GEMMs and attention took 4,794 us a layer, as long as stock's in later steps, and 5,242 us later (+9%; stock again 4,598 and 4,815 us,
+5%). A step's first GEMM, a half with nothing beside it, took 215 us in the first step, and 257 us later. The clock, which was not
recorded, seems to fall further without pauses for communication. Under lasting load four H100s reach their power limit: sharded layers of
8,192 tokens gain 1.11x after 80 calls, 1.15x to 1.24x after 4 ([rows](nvidia-h100-x4/sustained.jsonl)).

**2,048, 4,096.** At 4,096, sequence parallelism hides 83% of the communication; GEMMs and attention take 12% longer.

**1,024.** Stock's uncaptured passes wait for the host; weft captures.

**64.** Sums are faster; nothing overlaps. Ranks start a step at different times, so the first sum takes 50, 173 and 338 us in the median
step (stock, weft, stock again), which explains the steps' ratios.

**24.** Right after the prefills a layer takes 208, 198 and 205 us (stock, weft, stock again), 30 steps later 182, 184 and 182 us. Then weft's
kernels take less time, but gaps between them more, which steps of 64 tokens, traced without prefills, lack. Untraced, gaps would
explain why steps of "papers" take 3.07 ms (stock 3.01, stock again 3.04); those of "decode" take 2.62 (2.64, 2.65).

**"Papers".** First tokens come 1.13x as fast, decodes are 2% slower. At 24 tokens a step without communication would be only 1.10x as fast.

**TokenWeave** [stores](https://github.com/microsoft/tokenweave/blob/5658c215527177e0084f29ad46a2cbcb46f1dc0e/artifact/csvs/figure_13.csv)
1.16x to 1.26x throughput for Llama-70B on 8 H100s (1.23x to 1.25x without communication) over vLLM 0.8.5, eager, with multicast sums and a locked
clock; its paper states up to 1.19x. Here stock has CUDA graphs and FlashInfer, on four GPUs without multicast: the figures are not comparable.
"""


def chapter(results: Path) -> str:
    """Return the page of answers, of token times and of steps, TABLES."""
    times = page(results, "vllm_serving.jsonl", latencies)
    traced = f"## Where a step's time goes\n\n{page(results, 'vllm_timeline.jsonl', steps)}\n\n{EXPLANATION}"
    return f"# vLLM's answers and times with the plugin\n\n{answers(results)}\n\n{times}\n\n{traced}"


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


def case_of(row: dict) -> tuple[object, ...]:
    return tuple(row[name] for name in CASE)


def with_second_stock(lines: Rows) -> Rows:
    """Return the rows of all methods but the second stock engine. The null range of a row includes that engine's newest
    ratios in the same case."""
    second = {case_of(row): row["ratio_range"] for row in lines if row["method"] == STOCK_AGAIN}
    rows = []
    for row in lines:
        if row["method"] != STOCK_AGAIN:
            lows, highs = zip(row["null_range"], second.get(case_of(row), row["null_range"]), strict=True)
            rows.append(row | {"null_range": [min(lows), max(highs)]})
    return rows


def newest_of(lines: Rows) -> Rows:
    """Return the newest row of each model, mix and method, as `with_second_stock` does."""
    return list({(row["method"], *case_of(row)): row for row in with_second_stock(lines)}.values())


def beyond_noise(row: dict) -> bool:
    """Return whether the median speedup is outside the range of stock vLLM's ratios to itself, in either order."""
    lowest, highest = row["null_range"]
    noise = max(highest, 1 / lowest)
    return not 1 / noise <= row["ratio"] <= noise


def mix_of(row: dict) -> str:
    """Return the name of a row's mix, its mean tokens, and the rate and the method if they are not the usual ones."""
    mix = f"{row['mix']}: {row['tokens_in'] // row['requests']} + {row['tokens_out'] // row['requests']}"
    mix += f", {row['rate']:g} a second" * bool(row["rate"])
    return mix + f", {row['method']}" * (row["method"] != "weft")


def model_of(row: dict) -> str:
    """Return the name of a row's model, and its number of layers if it is not the usual one."""
    return row["model"] + f", {row['layers']} layers" * (row["layers"] != LAYERS)


def serving(lines: Rows) -> str:
    """Return a line for the newest row of each model, mix and method: the median speedup, bold only if it is outside
    the range of stock vLLM's ratios to itself, and both ranges. If the rows have several dates, the text above the
    table names the mixes of each date."""
    table = []
    mixes: dict[str, list[str]] = {}  # by date
    for row in newest_of(lines):
        mixes.setdefault(row["date"], []).append(row["mix"])
        speedup = f"{row['ratio']:.2f}x"
        ranges = [f"{row[name][0]:.2f}–{row[name][1]:.2f}" for name in ("ratio_range", "null_range")]
        table.append([model_of(row), mix_of(row), f"**{speedup}**" if beyond_noise(row) else speedup, *ranges])
    head = ["model", "mean tokens in + out", "median speedup", "range", "stock / stock"]
    dates = ", ".join(
        f"{date} ({', '.join(dict.fromkeys(mixes[date]))})" if len(mixes) > 1 else date for date in sorted(mixes)
    )
    return f"vLLM {lines[-1]['vllm']}, {dates}:\n\n{grid(head, table)}"


def latencies(lines: Rows) -> str:
    """Return a line for each line of `serving`: the median and the 99th percentile of token times."""
    table = []
    for row in newest_of(lines):
        latency = [row["latency"][method] for method in (row["method"], row["baseline"])]
        times = [
            " / ".join("–" if name not in ms else f"{ms[name][0]:.1f}, {ms[name][1]:.1f}" for ms in latency)
            for name in ("first_token_ms", "between_tokens_ms")
        ]
        table.append([model_of(row), mix_of(row), str(row["requests"]), *times])
    head = ["model", "mean tokens in + out", "requests", "first token, ms", "between tokens, ms"]
    newest, backends = lines[-1], {str(row["fused all-reduce"][row["baseline"]]["backend"]) for row in lines}
    note = f"{LAYERS} layers of random weights, or as many as named; stock all-reduces with FlashInfer ({', '.join(sorted(backends))})"
    return f"{newest['gpu']}, {note}. Times of tokens: [median, 99%], weft / stock:\n\n{grid(head, table)}"


def steps(lines: Rows) -> str:
    """Return a line for each number of tokens of traced steps: the times of a layer, stock and weft, and the speedups of
    the median step by weft, of the second stock engine, and of stock without its communication."""
    newest = {(row["tokens"], row["method"]): row for row in lines if model_of(row) == model_of(lines[-1])}
    table = []
    for tokens in sorted({tokens for tokens, _ in newest}):
        stock, weft, again = (newest[tokens, method]["means"] for method in ("stock", "weft", STOCK_AGAIN))
        names = ("compute_us", "other_us", "communication_us", "idle_us")
        layer = [f"{stock['layer'][name]:.0f} / {weft['layer'][name]:.0f}" for name in names]
        us = stock["step_us"]
        speedups = [us / weft["step_us"], us / again["step_us"], us / (us - stock["step_communication_us"])]
        table.append([f"{tokens:,}", *layer, *(f"{speedup:.2f}x" for speedup in speedups)])
    head = [
        "tokens",
        "GEMMs, attention",
        "only others",
        "only communication",
        "idle",
        "weft",
        "stock again",
        "no communication",
    ]
    gpu = f"{lines[-1]['gpu']}, vLLM {lines[-1]['vllm']}, {model_of(lines[-1])}, {lines[-1]['date']}"
    return f"{gpu}. us of a layer, stock / weft, then the speedup of a step:\n\n{grid(head, table)}"
