"""The tables of docs/vllm.md: the answers of vLLM on a GPU with and without the plugin, from
bench/results/<machine>/vllm.jsonl (tests/gpu/gpu_vllm.py), and the seconds for requests and the times of traced steps,
from vllm_serving.jsonl and vllm_timeline.jsonl (bench/measure/vllm_serving.py).
"""

from __future__ import annotations

from pathlib import Path

from bench.measure.vllm_engine import STOCK_AGAIN
from bench.pages.tables import Rows, grid, lines_of, page

TABLES = "bench/results/vllm.md"
CASE = ("model", "ranks", "mix", "rate", "tokens_a_step")
FORMS = {
    "auto": "the plugin's choice", "whole": "norm fused with the sum", "rows": "residuals by rows", "woven": "two parts",
}  # fmt: skip

# Of the figures that the rows lack, those of single kernels, ranks and steps are from the run's traces, which are too
# large to store.
EXPLANATION = """torch.profiler slows these steps. A layer's mean time is divided by what runs: GEMMs or attention, else norms and
other kernels, else only communication, or nothing. "Stock again", an equal engine, shows the noise. "No communication", stock with only
its waits for other ranks, bounds overlap.

**8,192 tokens.** weft computes layers in halves. That hides 1,146 of 1,343 us of communication and 117 us of other kernels, but GEMMs and
attention take 450 us longer, hardly because of halves or copies: a step's first GEMM, a half without communication beside it, took
214 us after an idle GPU (half of stock's: 212) and 255 us in later steps (231); beside copies 254 us. Rather, without
pauses for communication the clock seems to fall further at the power limit: GEMMs and attention slowed down by 9% after the first step, those of stock again by 5%.
Ranks differ by 4%, also stock's.

**2,048, 4,096.** At 2,048, kernels with GEMM and sum take 601 us, stock's GEMMs and sums 392 + 385. At 4,096, sequence parallelism hides 83%
of the communication; GEMMs and attention take 12% longer.

**1,024.** Stock's uncaptured passes wait for the host; weft captures.

**64.** Sums are faster; nothing overlaps. Ranks start a step at different times, so the first sum (14 us) takes up to 50, 173 and 338 us (stock, weft,
stock again), which explains the steps' ratios.

**24.** Launching a graph takes 0.2 to 0.4 ms in all engines. A layer takes 207, 198 and 205 us after the prefills, 182, 184 and 182 us 30 steps later.
Then weft's kernels take 2 us less, but gaps between them, in this trace's graphs, 4 us more. Traces without prefills of 8,192 tokens
lack these gaps. Untraced they would explain why steps of "papers" take 3.07 ms (stock 3.01, stock again 3.04), those of "decode" 2.62 (2.64, 2.65).

**Mixes.** A model of the scheduler counts 862 steps of "papers", 341 of one token, which vLLM itself serves, and 12 with prefills, a
third of the time. Interpolation bounds "papers" at about 1.15x and "chat" at 1.17x. By the passes timed at the start they would
reach 1.05x and 1.06x; measured were 1.03x and 1.02x. First tokens of "papers" come 1.13x as fast; decodes lose 2%.

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
        table.append([row["model"], mix_of(row), f"**{speedup}**" if beyond_noise(row) else speedup, *ranges])
    head = ["model", "mean tokens in + out", "median speedup", "range", "stock / stock"]
    dates = ", ".join(f"{date} ({', '.join(mixes[date])})" if len(mixes) > 1 else date for date in sorted(mixes))
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
        table.append([row["model"], mix_of(row), str(row["requests"]), *times])
    head = ["model", "mean tokens in + out", "requests", "first token, ms", "between tokens, ms"]
    newest, backends = lines[-1], {str(row["fused all-reduce"][row["baseline"]]["backend"]) for row in lines}
    note = f"{newest['layers']} layers of random weights; stock all-reduces with FlashInfer ({', '.join(sorted(backends))})"
    return f"{newest['gpu']}, {note}. Times of tokens: [median, 99%], weft / stock:\n\n{grid(head, table)}"


def steps(lines: Rows) -> str:
    """Return a line for each number of tokens of traced steps: the times of a layer, stock and weft, and the speedups of
    the median step by weft, of the second stock engine, and of stock without its communication."""
    newest = {(row["tokens"], row["method"]): row for row in lines if row["model"] == lines[-1]["model"]}
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
    gpu = f"{lines[-1]['gpu']}, vLLM {lines[-1]['vllm']}, {lines[-1]['model']}, {lines[-1]['date']}"
    return f"{gpu}. us of a layer, stock / weft, then the speedup of a step:\n\n{grid(head, table)}"
