"""The README's picture: one MLP layer on one time axis, drawn from stored rows, with cuBLAS and NCCL one after the
other above and weft below.

The end of a run is measured. The bar of each GEMM and collective is as long as its time alone; the remaining time is
SiLU and gaps. The time at which a collective overlaps weft's GEMMs was not recorded, so it is drawn at the end of the
layer to which it belongs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.pages import report, svg
from weft.trace.picture import GROUND, INK, SAVED, WORK

NAME = "layer.svg"
MACHINE, WORLD, SIZE = "nvidia-h200-x4", 4, "MLP-2"
TITLE = "One size: an MLP layer of Llama-3-8B, 8,192 tokens on 4 H200s, in a CUDA graph. Mean of all sizes: {:.2f}x"
COMPUTING, MOVING, REST = WORK["compute"], WORK["gather"], "#c9ced6"


@dataclass(frozen=True)
class Times:
    """The times in microseconds of the whole layer with cuBLAS + NCCL and with weft, and of each part alone."""

    sequential: float
    weft: float
    gather: float
    gate_up: float
    down: float
    scatter: float

    def rest(self, whole: float) -> float:
        """Return the us of a layer that belong neither to a GEMM nor to an exposed collective."""
        moved = self.gather + self.scatter if whole == self.sequential else 0.0
        return whole - self.gate_up - self.down - moved


def times(rows: list[report.Row]) -> Times:
    layer, into, out = (
        next(c for c in report.cases(rows, op, WORLD, "graph") if c.name == SIZE)
        for op in ("parallel_mlp", "all_gather_matmul", "matmul_reduce_scatter")
    )
    whole = [layer.us(method) for method in ("sequential", "auto")]
    parts = [
        case.field(key) for case, key in ((into, "comm_us"), (into, "gemm_us"), (out, "gemm_us"), (out, "comm_us"))
    ]
    return Times(*map(float, (*whole, *parts)))  # type: ignore[arg-type]


def all_sizes(rows: list[report.Row]) -> float:
    """Return the geometric mean, over all sizes of the layer, of weft's speedup over cuBLAS + NCCL in a CUDA graph."""
    ratio = report.mean(
        c.ratio("auto") for c in report.cases(rows, "parallel_mlp", max(r["world"] for r in rows), "graph")
    )
    assert ratio
    return ratio


def bars(axes: Axes, lane: float, parts: list[tuple[str, float, float, str]]) -> None:
    """Draw the bars of one lane: start, length, colour and name of each."""
    for name, start, us, colour in parts:
        axes.barh(lane, us, left=start, height=0.8, color=colour, edgecolor="white", linewidth=1.2)
        axes.text(
            start + us / 2, lane, name, ha="center", va="center", fontsize=8, color=INK if colour == REST else "white"
        )


def picture(t: Times, mean: float) -> Figure:
    figure = svg.figure(9, 2.6)
    axes = figure.subplots()
    parts: list[tuple[str, float, float, str]] = []
    for name, us, colour in (
        ("all-gather", t.gather, MOVING), ("gate and up GEMM", t.gate_up, COMPUTING), ("", t.rest(t.sequential), REST),
        ("down GEMM", t.down, COMPUTING), ("reduce-scatter", t.scatter, MOVING),
    ):  # fmt: skip
        parts.append((name, sum(p[2] for p in parts), us, colour))
    bars(axes, 3.2, parts)
    rest = t.rest(t.weft)
    gemms = ("gate and up GEMM", 0, t.gate_up, COMPUTING), ("down GEMM", t.gate_up + rest, t.down, COMPUTING)
    bars(axes, 1.4, [*gemms, ("", t.gate_up, rest, REST)])
    bars(axes, 0.5, [("all-gather", 0, t.gather, MOVING), ("reduce-scatter", t.weft - t.scatter, t.scatter, MOVING)])
    axes.set_yticks([3.2, 0.95], ["cuBLAS, then NCCL", "weft"], fontsize=9.5, fontweight="bold")
    for end, lane in ((t.sequential, 3.2), (t.weft, 1.4)):
        axes.text(end + 8, lane, f"{end:.0f} us", va="center", fontsize=9, color=INK)
    axes.annotate("", (t.weft + 2, 0.5), (t.sequential - 2, 0.5), arrowprops=dict(arrowstyle="->", color=SAVED, lw=1.6))
    axes.text(
        (t.weft + t.sequential) / 2, 0.72, f"{t.sequential - t.weft:.0f} us saved, {t.sequential / t.weft:.2f}x",
        ha="center", fontsize=9, fontweight="bold", color=SAVED,
    )  # fmt: skip
    axes.axvline(t.sequential, color=SAVED, lw=0.8, ls=":")
    axes.set_xlim(0, t.sequential * 1.07)
    axes.set_ylim(0, 4.0)
    axes.set_facecolor(GROUND)
    axes.set_xlabel("us", fontsize=8.5)
    axes.set_title(TITLE.format(mean), loc="left", fontsize=10, color=INK)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    meaning = {COMPUTING: "computing", MOVING: "moving between GPUs", REST: "SiLU and gaps"}
    handles = [Patch(color=colour, label=text) for colour, text in meaning.items()]
    axes.legend(handles=handles, ncols=3, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, 1.03))
    return figure


def plots(results: Path, folder: Path) -> list[Path]:
    path, rows = folder / NAME, report.load(results / MACHINE)
    svg.save(picture(times(rows), all_sizes(rows)), path)
    return [path]
