"""Spans as a picture: a lane for every track of every rank, and who waited for whom.

Work is filled in the colour of its kind. A wait is a pale bar in the colour of the rank whose notify ended it, with a
line from that notify's lane; the matrix on the right adds the waits up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .span import Span
from .tracks import lanes

WORK = {"compute": "#3b6fb6", "copy": "#e08a1e", "call": "#4f9d69"}
MEANING = {"compute": "kernel", "copy": "copy", "call": "library call"}
RANKS = ("#c8385a", "#7a52b3", "#138d90", "#b8860b", "#5b7f95", "#d2691e", "#3f7d20", "#a0527f")
_ARROWS = 60  # as many of the longest waits get a line; more would hide the bars
_LANE, _BETWEEN = 0.17, 0.45  # inches for a lane; lanes left free between two ranks


def _colour(rank: int) -> str:
    return RANKS[rank % len(RANKS)]


def stacked(spans: Sequence[Span]) -> list[Span]:
    """The same spans with kernels that follow one another on a rank in the same lanes: `program:3` for every program 3.

    A kernel that runs beside another one keeps lanes of its own.
    """
    extent: dict[tuple[int, str], tuple[float, float]] = {}
    for s in spans:
        lo, hi = extent.get((s.rank, s.track), (s.start, s.end))
        extent[s.rank, s.track] = min(lo, s.start), max(hi, s.end)
    busy: dict[tuple[int, str], list[tuple[float, float]]] = {}
    place = {}
    for (rank, track), (lo, hi) in sorted(extent.items(), key=lambda item: item[1]):
        kernel, _, number = track.rpartition(":")
        lane = f"program:{number}"
        if kernel in ("", "stream") or any(lo < end and start < hi for start, end in busy.get((rank, lane), ())):
            lane = track
        busy.setdefault((rank, lane), []).append((lo, hi))
        place[rank, track] = lane

    def moved(at: tuple[int, str]) -> tuple[int, str]:
        return at[0], place.get(at, at[1])

    return [replace(s, track=place[s.rank, s.track], releaser=moved(s.releaser) if s.releaser else None) for s in spans]


def _label(track: str) -> str:
    family, _, rest = track.rpartition(":")
    if family.endswith(")"):  # a kernel on a side stream
        family = family[family.index("(") + 1 : -1]
    return f"{rest} stream" if family == "stream" else f"{family} {rest}".strip()


def draw(panels: dict[str, Sequence[Span]], path: Path, *, unit: str) -> None:
    """One timeline a panel, under its title, all to the same scale; `unit` names the unit of the spans' times."""
    panels = {title: stacked(spans) for title, spans in panels.items() if spans}
    rows = {title: _rows(spans) for title, spans in panels.items()}
    heights = [max(rows[title].values(), default=0) * _LANE + 1.0 for title in panels]
    figure = Figure(figsize=(14, sum(heights) + 0.6), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(panels), 2, height_ratios=heights, width_ratios=(5.2, 1))
    reach = max((max(s.end for s in spans) - min(s.start for s in spans) for spans in panels.values()), default=1.0)
    for number, (title, spans) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[number, 0])
        _timeline(axes, spans, rows[title], reach)
        axes.set_xlim(0, reach * 1.005)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel(unit, fontsize=9)
        if any(s.kind == "wait" for s in spans):
            _matrix(figure.add_subplot(grid[number, 1], anchor="N"), spans)
    kinds = {s.kind for spans in panels.values() for s in spans}
    ranks = sorted({s.releaser[0] for spans in panels.values() for s in spans if s.releaser})
    handles = [Patch(color=colour, label=MEANING[kind]) for kind, colour in WORK.items() if kind in kinds]
    handles += [
        Patch(facecolor=to_rgba(_colour(r), 0.3), edgecolor=_colour(r), label=f"waits for rank {r}") for r in ranks
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=10, frameon=False, fontsize=9)
    figure.savefig(path)


def _rows(spans: Sequence[Span]) -> dict[tuple[int, str], float]:
    """Where each lane lies, counted in lanes from the top."""
    place, y, before = {}, 0.0, None
    for lane in lanes(spans):
        if before is not None and lane[0] != before:
            y += _BETWEEN
        place[lane], before = y, lane[0]
        y += 1
    return place


def _named(spans: Sequence[Span], reach: float) -> list[Span]:
    """For every kernel, copy and call of a rank the first bar that is wide enough for its name."""
    first: dict[tuple[int, str], Span] = {}
    for s in sorted(spans, key=lambda s: (s.start, s.track)):
        if s.kind in WORK and s.end - s.start > 0.0047 * reach * len(s.name):
            first.setdefault((s.rank, s.name), s)
    return list(first.values())


def _timeline(axes, spans: Sequence[Span], row: dict[tuple[int, str], float], reach: float) -> None:
    start = min(s.start for s in spans)
    for rank in {rank for rank, _ in row}:
        ys = [y for (r, _), y in row.items() if r == rank]
        axes.axhspan(min(ys) - 0.5, max(ys) + 0.5, color="#f4f5f7", zorder=0)
        axes.text(
            -0.13, (min(ys) + max(ys)) / 2, f"rank {rank}", transform=axes.get_yaxis_transform(),
            ha="left", va="center", fontsize=10, fontweight="bold", color=_colour(rank),
        )  # fmt: skip
    bars: dict[tuple[tuple[int, str], str, int], list[tuple[float, float]]] = {}
    for s in spans:
        ender = s.releaser[0] if s.releaser else -1
        bars.setdefault(((s.rank, s.track), s.kind, ender), []).append((s.start - start, s.end - s.start))
    for (lane, kind, ender), extents in bars.items():
        y = row[lane]
        if kind == "wait":
            colour = _colour(ender) if ender >= 0 else "#8a8f98"
            axes.broken_barh(
                extents, (y - 0.22, 0.44), facecolor=to_rgba(colour, 0.3), edgecolor=to_rgba(colour, 0.6), lw=0.4
            )
        else:
            axes.broken_barh(extents, (y - 0.4, 0.8), facecolor=WORK.get(kind, "#777777"), edgecolor="white", lw=0.3)
    for s in _named(spans, reach):
        axes.text(
            s.start - start + 0.003 * reach,
            row[s.rank, s.track],
            s.name,
            fontsize=6,
            color="white",
            va="center",
            zorder=5,
        )
    ended = [(s, row[s.releaser], _colour(s.releaser[0])) for s in spans if s.releaser and s.end > s.start]
    longest = sorted(ended, key=lambda item: item[0].start - item[0].end)[:_ARROWS]
    tips = [(s.end - start, row[s.rank, s.track]) for s, _, _ in longest]
    lines = [((x, y), (x, origin)) for (x, y), (_, origin, _) in zip(tips, longest, strict=True)]
    colours = [to_rgba(colour, 0.6) for _, _, colour in longest]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=0.7, zorder=3))
    axes.scatter([x for x, _ in tips], [y for _, y in tips], s=8, c=colours, linewidths=0, zorder=4)
    axes.set_yticks(list(row.values()), [_label(track) for _, track in row], fontsize=6.5)
    axes.set_ylim(max(row.values()) + 0.6, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def waited(spans: Sequence[Span]) -> dict[tuple[int, int], float]:
    """Time that rank a's tracks spent in waits that rank b's notify ended, by (a, b)."""
    total: dict[tuple[int, int], float] = {}
    for s in spans:
        if s.releaser:
            key = s.rank, s.releaser[0]
            total[key] = total.get(key, 0.0) + s.end - s.start
    return total


def _matrix(axes, spans: Sequence[Span]) -> None:
    ranks = sorted({s.rank for s in spans})
    total = waited(spans)
    values = [[total.get((a, b), 0.0) for b in ranks] for a in ranks]
    axes.imshow(values, cmap="Purples", vmin=0, vmax=1.6 * max(max(line) for line in values) or 1)
    for i, line in enumerate(values):
        for j, value in enumerate(line):
            axes.text(j, i, f"{value:.3g}" if value else "·", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(ranks)), [str(r) for r in ranks], fontsize=8)
    axes.set_yticks(range(len(ranks)), [str(r) for r in ranks], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("who waited for whom", fontsize=9)
    axes.set_xlabel("released by rank\n(sum over lanes)", fontsize=8)
    axes.set_ylabel("waiting rank", fontsize=8)
