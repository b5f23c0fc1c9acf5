"""The table of docs/papers.md compares the figures that the authors published with weft's own, which are computed from
bench/results."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

from bench.pages import front, moe_page, report, signaled_page, ways
from bench.pages.tables import grid


def tilelink(results: Path) -> str:
    """Return weft's figures to compare with TileLink's: the speedup of the best plan of kind "fused" over the
    sequential plan, for the shapes of `ways`, and the speedups of two layers of other ops."""
    tuned = ways.tuned(results)
    figures = []
    for world in sorted({world for _, world in tuned}):
        means = []
        for op in ways.TUNED:
            best = (
                max(speedups.get(name, 0) for name in ways.WAYS[1:3])
                for speedups in tuned.get((op, world), {}).values()
            )
            means.append(f"{report.mean(best) or 0:.2f}x")
        figures.append(f"{', '.join(means)} on {world} GPUs")
    layers = {line[0]: line[1].strip("*") for line in front.layers(results / "nvidia-h200-x2")}
    columns, attention = (
        layers[title] for title in ("experts' columns over the ranks, forward", "attention over all ranks' keys")
    )
    return (
        f"all-gather + GEMM, GEMM + reduce-scatter, GEMM + all-reduce, fused over sequential: {'; '.join(figures)}."
        f" On 2 GPUs experts' columns {columns}, attention {attention}"
    )


def flashoverlap() -> str:
    """Return weft's figures to compare with FlashOverlap's, for the best plans by copies and by NCCL: the share of the
    bound, and the largest speedup over cuBLAS + NCCL."""
    _, goals = signaled_page.every_op(signaled_page.machines(), signaled_page.sms())
    figures = []
    for mover in ("NCCL", "copies"):
        lines = [line for line in goals if line[2] == mover]
        shares = sorted(int(line[3].rstrip("%")) for line in lines)
        most = max((line[9], line[1]) for line in lines)
        figures.append(
            f"by {mover} {shares[0]} to {shares[-1]}% of the bound in the mean of an op, up to {most[0]} ({most[1]} GPUs)"
        )
    return "; ".join(figures)


def tokenweave(results: Path) -> str:
    figures = []
    for machine, rows in report.load_all(results).items():
        if machine.startswith("nvidia-h200-") and report.new({machine: rows}):
            world = max(row["world"] for row in rows)
            means = {
                line[0].partition(": ")[2]: line[1].strip("*")
                for line in report.summary(rows, world)
                if ": " in line[0]
            }
            figures.append(f"{', '.join(f'{kind} {mean}' for kind, mean in means.items())} on {world} GPUs")
    return f'Llama-70B\'s layers by `"auto"` over cuBLAS + NCCL: {"; ".join(figures)}'


def flashmoe(results: Path) -> str:
    """Return weft's figures to compare with FlashMoE's, from the runs that time all plans: the speedup of the fused
    plan over the libraries and over "dispatched"."""
    cells = [line.split("|")[2:6] for line in moe_page.of_all_plans(results).splitlines() if line.count("|") == 6]
    us = [[float(cell) if cell.strip() else None for cell in row] for row in cells[2:]]
    over = [[row[index] / row[3] for row in us if row[index] and row[3]] for index in (0, 1)]  # type: ignore[operator]
    means = [f"{geometric_mean(ratios):.2f}x" for ratios in over]
    return f"plan `fused` over NCCL and torch's grouped GEMM {means[0]}, over `dispatched` {means[1]} (2 GPUs, {len(over[0])} sizes)"


def table(results: Path) -> str:
    rows = [
        ["TileLink", "1.17x to 20.76x over no overlap, 8 H800", tilelink(results)],
        ["FlashOverlap", "up to 1.65x; 69 to 98% of the bound", flashoverlap()],
        ["TokenWeave", "up to 1.28x in latency, 1.19x in throughput, 8 H100", tokenweave(results)],
        ["FlashMoE", "up to 6x in latency, 5.7x in throughput, 8 H100", flashmoe(results)],
    ]
    return grid(["paper", "the authors report", "ours, H200, CUDA graphs, means"], rows)
