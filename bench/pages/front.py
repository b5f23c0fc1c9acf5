"""The README's figures: lines of its tables for whole layers and models, from what stands in bench/results
beside the benchmark's own rows.

Of the lines of one (name, mode, method) the newest counts, which is the last in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.pages import moe_page
from bench.pages.report import FEW, MODES, cases, load, mean

Row = dict


@dataclass(frozen=True)
class Layers:
    """A line's title; the baseline, named in a line above it; its method and weft's; and which rows count."""

    file: str
    title: str
    baseline: str
    methods: tuple[str, str]
    counts: Callable[[Row], bool] = lambda row: True


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
    Layers(
        "hf_moe.jsonl",
        "Transformers' mixtures of experts, `weft.hf.weave`",
        "its own expert parallelism",
        ("transformers", "weft"),
    ),
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
    Layers("hf.jsonl", "Transformers model, `weft.hf.weave`", "its own tensor parallelism", ("transformers", "weft")),
]


def ratios(folder: Path, of: Layers) -> dict[str, dict[str, float]]:
    """By mode and name, how many times as fast weft is."""
    path = folder / of.file
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    us = {
        (r.get("mode", "graph"), r["name"], r["M"], r["method"]): r["us"] for r in lines if "us" in r and of.counts(r)
    }
    found: dict[str, dict[str, float]] = {mode: {} for mode in MODES}
    for (mode, name, m, method), own in us.items():
        weft = us.get((mode, name, m, of.methods[1]))
        if method == of.methods[0] and weft:
            found[mode][name] = own / weft
    return found


def layers(folder: Path) -> list[list[str]]:
    lines = []
    for of in LAYERS:
        by_mode = ratios(folder, of)
        lows = [(ratio, f"{name}, {MODES[mode]}") for mode, found in by_mode.items() for name, ratio in found.items()]
        if lows:
            means = [mean(found.values()) for found in by_mode.values()]
            cells = [f"**{m:.2f}x**" if m else "–" for m in means]
            lines += [[f"*{of.baseline}*", *[""] * 4], [of.title, *cells, "–", f"{min(lows)[0]:.2f}x ({min(lows)[1]})"]]
    return lines


def one_gpu(results: Path) -> str:
    """Experts on one GPU beside the best fused layer of others, from many tokens on and of few."""
    path = results / "nvidia-h200-x1/moe_one_gpu.jsonl"
    found = moe_page.one_gpu(moe_page.lines_of(path), "vllm")
    many, few = (
        [r for tokens, by in found.items() if (tokens > FEW) == more for r in by.values()] for more in (True, False)
    )
    sizes = {more: sorted(tokens for tokens in found if (tokens > FEW) == more) for more in (True, False)}
    return (
        f"On one H200 experts beside vLLM's `fused_experts`: **{min(many):.2f}x to {max(many):.2f}x** from {sizes[True][0]:,} tokens on,"
        f" **{min(few):.2f}x to {max(few):.2f}x** at {' and '.join(map(str, sizes[False]))} ([by size](docs/moe.md#what-it-reaches))."
    )


def line(results: Path) -> str:
    """What the one line does: the Transformers model with most tokens, on the machine with most GPUs that ran it. Of both sides the
    faster of eager and CUDA graph counts: Transformers' graph of a long prompt is slower than its eager pass. And what of it is
    overlap: weft's own decoder of this size, whose other kernels are the same with it and without."""
    path = max(results.glob("*/hf.jsonl"), key=lambda path: int(path.parent.name.rpartition("x")[2]))
    rows = [r for r in map(json.loads, path.read_text().splitlines()) if "prefill" in r["name"]]
    tokens = max(r["M"] for r in rows)
    newest = {(r["mode"], r["method"]): r["us"] for r in rows if r["M"] == tokens}
    own, woven = (min(us for (_, m), us in newest.items() if (m == "transformers") == own) for own in (True, False))
    (decoder,) = (c for c in cases(load(path.parent), "decoder", 2, "graph") if c.name == f"70B-prefill-{tokens}")
    return (
        f"On {path.parent.name} {tokens:,} tokens go through layers of Llama-70B's size **{own / woven:.2f}x** as fast as with the model's own"
        f" tensor parallelism, each in its faster mode. Of this **{decoder.ratio('auto'):.2f}x** is overlap, as in weft's"
        " own decoder; the rest is fusion: fewer and better kernels."
    )
