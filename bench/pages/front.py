"""The README's figures: lines of its tables for whole layers and models, from what stands in bench/results
beside the benchmark's own rows.

Of the lines of one (name, mode, method) the newest counts, which is the last in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from bench.pages import one_gpu_page
from bench.pages.report import FEW, MODES, cases, load, mean, measured

Row = dict


@dataclass(frozen=True)
class Layers:
    """One line of the table of means: the file of its rows, its title, the baseline's name, the rows' methods for the baseline and
    for weft, and a condition on the rows that count."""

    file: str
    title: str
    baseline: str
    methods: tuple[str, str]
    counts: Callable[[Row], bool] = lambda row: True


def _experts_of(model: str) -> Layers:
    """Return the line of one Transformers model with experts. Each has a line, since no two of them ran at the same sizes."""
    return Layers(
        "hf_moe.jsonl",
        f"Transformers' {model}, `weft.hf.weave`",
        "its own expert parallelism",
        ("transformers", "weft"),
        lambda row: row["name"].startswith(f"{model}-"),
    )


LAYERS = [
    Layers(
        "moe.jsonl",
        "experts over the ranks, forward",
        "NCCL all-to-all, torch's grouped GEMM",
        ("library", "auto"),
        lambda row: row["zipf"] == 0,
    ),
    Layers(
        "moe_tensor.jsonl",
        "experts' columns over the ranks, forward",
        "NCCL, torch's grouped GEMM",
        ("library", "auto"),
        lambda row: row["op"] == "moe_tp",
    ),
    Layers(
        "attention.jsonl",
        "attention over all ranks' keys",
        "NCCL all-gather, cuDNN",
        ("nccl+cudnn", "weft"),
        lambda row: row["op"] == "gathered_attention",
    ),
    *map(_experts_of, ("Qwen3-30B", "Mixtral-8x7B", "GPT-OSS-120B")),
    Layers(
        "moe_training.jsonl",
        "experts over the ranks, forward and backward",
        "NCCL all-to-all, torch's grouped GEMM, autograd",
        ("library", "weft, keep activation"),
        lambda row: row["op"] == "moe_step" and "-tensor-" not in row["name"],
    ),
    Layers(
        "models.jsonl",
        "layers of whole models, `weft.models`",
        "cuBLAS, torch's grouped GEMM, NCCL",
        ("libraries", "auto"),
    ),
    Layers(
        "hf.jsonl", "Transformers' Llama-70B, `weft.hf.weave`", "its own tensor parallelism", ("transformers", "weft")
    ),
]


def newest(folder: Path, layers: Layers) -> dict[tuple[str, str], tuple[Row, Row]]:
    """Return the newest rows of the baseline and of weft, by (mode, name)."""
    path = folder / layers.file
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    by_method: dict[tuple[str, str, str], Row] = {
        (row.get("mode", "graph"), row["name"], row["method"]): row
        for row in rows
        if "us" in row and layers.counts(row)
    }
    baseline, weft = layers.methods
    keys = [(mode, name) for mode, name, method in by_method if method == baseline]
    return {key: (by_method[*key, baseline], by_method[*key, weft]) for key in keys if (*key, weft) in by_method}


def baseline_us(pairs: dict[tuple[str, str], tuple[Row, Row]], mode: str, name: str) -> float:
    """Return the us of the baseline. Beside weft in a CUDA graph that is the faster of its modes: Transformers' graph of a long prompt is
    slower than its eager pass."""
    modes = [mode, "eager"] if mode == "graph" else [mode]
    return min(float(pairs[key][0]["us"]) for m in modes if (key := (m, name)) in pairs)


def layers(folder: Path) -> list[list[str]]:
    """Return the lines of a machine's table of means that are not the benchmark's own ops, each baseline in a line above; the last
    cell has the dates and commits of a line's rows."""
    lines: list[list[str]] = []
    for baseline, group in groupby(LAYERS, lambda layers: layers.baseline):
        means = []
        for line in group:
            pairs = newest(folder, line)
            if not pairs:
                continue
            ratios = {key: baseline_us(pairs, *key) / weft_row["us"] for key, (_, weft_row) in pairs.items()}
            by_mode = [mean(ratio for (mode, _), ratio in ratios.items() if mode == column) for column in MODES]
            lowest, mode, name = min((ratio, mode, name) for (mode, name), ratio in ratios.items())
            cells = [f"**{ratio:.2f}x**" if ratio else "–" for ratio in by_mode]
            of_line = measured([row for pair in pairs.values() for row in pair])
            means.append([line.title, *cells, "–", f"{lowest:.2f}x ({name}, {MODES[mode]})", of_line])
        if means:
            lines += [[f"*{baseline}*", "", "", "", "", ""], *means]
    return lines


def one_gpu(results: Path) -> str:
    """Return the sentence on experts on one GPU beside the fastest library of each size, for calls above and up to `FEW` tokens."""
    ratios = one_gpu_page.beside_fastest(one_gpu_page.lines_of(results / "nvidia-h100-x1/moe_one_gpu.jsonl"))
    large, small = [n for n in ratios if n > FEW], [n for n in ratios if n <= FEW]

    def spread(sizes: list[int]) -> str:
        values = [ratio for tokens in sizes for ratio in ratios[tokens].values()]
        return f"**{min(values):.2f}x to {max(values):.2f}x**"

    return (
        f"On one H100 experts beside the faster of vLLM's `fused_experts` and quack: {spread(large)} from {min(large):,} tokens on,"
        f" {spread(small)} at {' and '.join(map(str, sorted(small)))} ([why](docs/moe.md#what-it-reaches))."
    )


def vllm(results: Path) -> str:
    """Return the sentence on vLLM's requests, by the median repeats of engines that took turns, on most GPUs."""
    path = max(results.glob("*/vllm_serving.jsonl"), key=lambda path: int(path.parent.name.rpartition("x")[2]))
    rows = {(row["model"], row["mix"]): row for row in map(json.loads, path.read_text().splitlines())}
    (model,) = {model for model, _ in rows}
    mixes = ", ".join(f"{mix} **{row['ratio']:.2f}x**" for (_, mix), row in rows.items())
    slowest = min(row["ratio_range"][0] for row in rows.values())
    return f"vLLM, {model}'s layers on {path.parent.name}: {mixes}, slowest repeat {slowest:.2f}x ([why](docs/vllm.md#what-ran))."


def line(results: Path) -> str:
    """Return the sentence on the Transformers model at its largest number of tokens, on the machine with most GPUs that ran it.

    The faster of eager and CUDA graph counts on both sides: Transformers' graph of a long prompt is slower than its eager pass. The
    share of overlap is that of weft's own decoder of this size, whose other kernels are the same with overlap and without."""
    path = max(results.glob("*/hf.jsonl"), key=lambda path: int(path.parent.name.rpartition("x")[2]))
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if "prefill" in row["name"]]
    tokens = max(row["M"] for row in rows)
    us = {(row["mode"], row["method"]): row["us"] for row in rows if row["M"] == tokens}
    transformers = min(t for (_, method), t in us.items() if method == "transformers")
    woven = min(t for (_, method), t in us.items() if method != "transformers")
    (decoder,) = (
        c for c in cases(load(path.parent), "decoder", rows[0]["world"], "graph") if c.name == f"70B-prefill-{tokens}"
    )
    return (
        f"On {path.parent.name} {tokens:,} tokens go through layers of Llama-70B's size **{transformers / woven:.2f}x** as fast as with the"
        f" model's own tensor parallelism, each in its faster mode. Of this **{decoder.ratio('auto'):.2f}x** is overlap, as in weft's"
        " own decoder; the rest is fusion: fewer and better kernels."
    )
