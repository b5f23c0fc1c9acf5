"""The README's two tables, and lines of docs/measurements.md for whole layers and models, from the rows in bench/results.

The newest row of each (name, mode, method), which is the last in the file, counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from bench.pages import layer_picture, one_gpu_page, vllm_page
from bench.pages.report import FEW, LIBRARIES, MODES, OPS, cases, load, mean, means, measured
from bench.pages.tables import gpus_of, grid, lines_of

Row = dict
MACHINES = ("nvidia-h200-x2", "nvidia-h200-x4")  # the columns of the README's tables, except vLLM's
VLLM = ("nvidia-h100-x2", "nvidia-h100-x4")
LOWEST = (*MACHINES, "nvidia-h100-x4")  # the machines of the lowest ratio
NCCL = "cuBLAS, then NCCL"
CAVEAT = (
    "These are all sizes' geometric means in CUDA graphs on H200s, against Transformers' parallelism or cuBLAS, then NCCL."
    " vLLM's are requests/s over stock's on H100s, slowest mix to fastest, lowest repeat {lowest:.2f}x (stock's own {null:.2f}x), {noise}."
    " NVLink multicast (NVLS) was off."
    " {share}."
)
SHOWN = (  # the lines that the README's table of operators and layers shows
    *(f"{OPS[op]}{size}" for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_reduce_rms_norm", "parallel_mlp") for size in ("", f", ≤{FEW} tokens")),
    *(f"{OPS['decoder']}: {part}" for part in ("prefill", "decode")),
    "all-gather + GEMM, with quack",
    "experts over the ranks, forward",
    "attention over all ranks' keys",
)  # fmt: skip


@dataclass(frozen=True)
class Layers:
    """One line of the table of means: the file of its rows, its title, the baseline's name, the rows' methods for the baseline and
    for weft, and a condition that selects rows. The name of a method begins with the name of its library."""

    file: str
    title: str
    baseline: str
    methods: tuple[str, str]
    counts: Callable[[Row], bool] = lambda row: True


def woven_title(model: str) -> str:
    return f"Transformers' {model}, `weft.hf.weave`"


def _experts_of(model: str) -> Layers:
    """Return the line of one Transformers model with experts. Each model has its own line, since no two models ran with
    the same sizes."""
    return Layers(
        "hf_moe.jsonl",
        woven_title(model),
        "its own expert parallelism",
        ("transformers", "weft"),
        lambda row: row["name"].startswith(f"{model}-"),
    )


LAYERS = [
    Layers(
        "quack/all_gather_matmul.jsonl",
        "all-gather + GEMM, with quack",
        NCCL,
        ("sequential", "auto"),
        lambda row: row["op"] == "all_gather_matmul",
    ),
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
    Layers("hf.jsonl", woven_title("Llama-70B"), "its own tensor parallelism", ("transformers", "weft")),
]


def rows_of(path: Path) -> list[Row]:
    return lines_of(path) if path.exists() else []


def newest(folder: Path, layers: Layers) -> dict[tuple[str, str], dict[str, Row]]:
    """Return the newest row of each method by (mode, name), where both the baseline and weft were measured."""
    by_size: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows_of(folder / layers.file):
        if "us" in row and layers.counts(row):
            by_size.setdefault((row.get("mode", "graph"), row["name"]), {})[row["method"]] = row
    return {key: by_method for key, by_method in by_size.items() if by_method.keys() >= set(layers.methods)}


def ratios(folder: Path, layers: Layers) -> dict[str, dict[tuple[str, str], float]]:
    """Return how many times as fast as the baseline weft and each library were, by library ("" for weft) and (mode, name).

    A CUDA graph is compared with the faster of the baseline's modes, because Transformers' graph of a long prompt is
    slower than its eager pass. Only the fastest method of a library counts."""
    sizes = newest(folder, layers)
    baseline, weft = layers.methods
    by_library: dict[str, dict[tuple[str, str], float]] = {}
    for (mode, name), by_method in sizes.items():
        modes = [mode, "eager"] if mode == "graph" else [mode]
        base = min(float(sizes[key][baseline]["us"]) for m in modes if (key := (m, name)) in sizes)
        for method, row in by_method.items():
            library = "" if method == weft else method.split()[0].rstrip(",")
            if not library or (library in LIBRARIES and "backward" not in method):
                of_library = by_library.setdefault(library, {})
                of_library[mode, name] = max(base / row["us"], of_library.get((mode, name), 0.0))
    return by_library


def layers(folder: Path) -> list[list[str]]:
    """Return those lines of a machine's table of means that do not come from the benchmark's own ops. A line above them
    names their baseline; the last cell contains the dates and commits of the rows."""
    lines: list[list[str]] = []
    for baseline, group in groupby(LAYERS, lambda layers: layers.baseline):
        of_baseline = []
        for line in group:
            by_library = ratios(folder, line)
            if not by_library:
                continue
            of_weft = by_library[""]
            by_mode = [mean(ratio for (mode, _), ratio in of_weft.items() if mode == column) for column in MODES]
            lowest, mode, name = min((ratio, mode, name) for (mode, name), ratio in of_weft.items())
            best = max(((mean(r.values()) or 0, library) for library, r in by_library.items() if library), default=None)
            cells = [f"**{ratio:.2f}x**" if ratio else "–" for ratio in by_mode]
            cells += [f"{best[0]:.2f}x {best[1]}" if best else "–", f"{lowest:.2f}x ({name}, {mode})"]
            rows = [row for by_method in newest(folder, line).values() for row in by_method.values()]
            of_baseline.append([line.title, *cells, measured(rows)])
        if of_baseline:
            lines += [[f"*{baseline}*", "", "", "", "", ""]] * (baseline != NCCL) + of_baseline
    return lines


def figures(results: Path) -> str:
    """Return the README's table of operators and layers: geometric means in CUDA graphs, the mean of the best other
    library, and the lowest ratio over all sizes, machines and modes."""
    by_machine = [{line[0]: line for line in means(load(results / name), layers(results / name))} for name in LOWEST]
    baselines = {line.title: line.baseline for line in LAYERS}
    table = []
    for title in SHOWN:
        lines = [of_machine.get(title, ["–"] * 5) for of_machine in by_machine]
        shown = lines[: len(MACHINES)]
        cells = [cell for line in shown for cell in (line[1], " ".join(line[3].split()[:2]))]  # 1.08x torch
        lowest = min((line[4].split()[0] for line in lines if line[4] != "–"), key=lambda ratio: float(ratio[:-1]))
        over = baselines.get(title, NCCL)
        table.append([title + f" (over {over})" * (over != NCCL), *cells, lowest])
    head = [f"over {NCCL}", *(cell for name in MACHINES for cell in (gpus_of(name), "best other library")), "lowest"]
    return grid(head, table, 1)


def requests(rows: list[Row]) -> tuple[str, str]:
    """Return the lowest and the highest ratio over vLLM's mixes of requests, from the median repeats of alternating
    engines, and the model."""
    ratios = [row["ratio"] for row in rows]
    (model,) = {row["model"] for row in rows}
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x", model


def doors(results: Path) -> str:
    """Return the README's table of the code to write for each kind of program and of its gains, and the caveats."""
    served = [vllm_page.with_second_stock(rows_of(results / name / "vllm_serving.jsonl")) for name in VLLM]
    gains = [f"{model} **{gain}**" for gain, model in map(requests, served)]
    lowest, null = (min(row[field][0] for rows in served for row in rows) for field in ("ratio_range", "null_range"))
    mixes = [row for rows in served for row in vllm_page.newest_of(rows)]
    noise = f"{sum(not vllm_page.beyond_noise(row) for row in mixes)} of {len(mixes)} within noise"
    gained = [{line[0]: line[1] for line in means(load(results / name), layers(results / name))} for name in MACHINES]
    woven = [
        ", ".join(f"{model} {lines[woven_title(model)]}" for model in ("Llama-70B", "Qwen3-30B")) for lines in gained
    ]
    mlp = [f"**{layer_picture.all_sizes(load(results / name)):.2f}x**" for name in MACHINES]
    rows = [
        ["[vLLM](docs/vllm.md)", "`vllm serve MODEL -tp 4`, unchanged", *gains],
        ["[Transformers](docs/transformers.md)", "`model = weft.hf.weave(model)`", *woven],
        ["[torch](docs/guide.md)", "`weft.nn.ParallelMLP(4096, 14336, world=world)`", *mlp],
        ["[your own kernels](docs/writing-kernels.md)", "`@weft.jit`", "–", "–"],
        ["[check](docs/check.md) for races and deadlocks", "`weft check FILE`", "–", "–"],
    ]
    table = grid(["you have", "you write", *map(gpus_of, MACHINES)], rows, 2)
    return f"{table}\n\n{CAVEAT.format(lowest=lowest, null=null, noise=noise, share=share(results))}"


def one_gpu(results: Path) -> str:
    """Return the sentence that compares experts on one GPU with the fastest library of each size."""
    by_tokens = one_gpu_page.beside_fastest(lines_of(results / "nvidia-h100-x1/moe_one_gpu.jsonl"))
    values = [ratio for by_model in by_tokens.values() for ratio in by_model.values()]
    return (
        f"Expert kernels on one H100: **{min(values):.2f}x to {max(values):.2f}x** over the faster of vLLM's `fused_experts` and quack"
        f" ([why](docs/moe.md#what-it-reaches))."
    )


def share(results: Path) -> str:
    """Return the sentence on the speedup of the Transformers model at its largest number of tokens, and on the share of
    overlap in it.

    On both sides the faster of eager mode and CUDA graph counts: Transformers' graph of a long prompt is slower than
    its eager pass. The share of overlap comes from weft's own decoder of this size, which uses the same other kernels
    with and without overlap."""
    folder = results / MACHINES[-1]
    rows = [row for row in rows_of(folder / "hf.jsonl") if "prefill" in row["name"]]
    tokens = max(row["M"] for row in rows)
    us = {(row["mode"], row["method"]): row["us"] for row in rows if row["M"] == tokens}
    transformers = min(t for (_, method), t in us.items() if method == "transformers")
    woven = min(t for (_, method), t in us.items() if method != "transformers")
    (decoder,) = (
        c for c in cases(load(folder), "decoder", rows[0]["world"], "graph") if c.name == f"70B-prefill-{tokens}"
    )
    return (
        f"Of Llama-70B's **{transformers / woven:.2f}x** at {tokens:,} tokens on 4 GPUs, **{decoder.ratio('auto'):.2f}x** is overlap, the rest"
        " fusion"
    )
