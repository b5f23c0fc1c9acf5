"""Spans are drawn as a picture with a lane for every track of every rank, which shows which rank waited for which.

Work is filled in the colour of its kind. A wait is a pale bar in the colour of the rank whose notify ended it, with a
line from that notify's lane; the matrix on the right sums the waits. Several runs are drawn below each other on one
axis, each from its own start; each run after the first is labelled with the time by which it ended before the first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.patches import Patch
from matplotlib.text import Text

from ..span import Span
from .tracks import lanes

Lane = tuple[int, str]

# Okabe and Ito's colours, and Paul Tol's for ranks. Colour-blind readers can distinguish all of them, and the colours
# of four ranks even when pale.
WORK = {
    "compute": "#0072b2",
    "local": "#56b4e9",
    "copy": "#e69f00",
    "gather": "#e69f00",
    "reduce": "#009e73",
    "call": "#8a8f98",
}
# The legend's text for a kind, if it is not the kind's name.
MEANING = {"local": "element-wise", "gather": "all-gather", "call": "library call"}
RANKS = ("#cc6677", "#88ccee", "#332288", "#ddcc77", "#117733", "#aa4499", "#999933", "#882255")
INK, PALE, GROUND = "#222222", "#6b7078", "#f4f5f7"
SAVED, LOST = "#00694c", "#a04000"
WIDTH, DPI = 10, 180  # inches, dots per inch: at a page's 900 pixels the smallest letters are 8 pixels high
LITTLE, NORMAL, LARGE = 7, 8, 9.5  # points
NAMELESS, ROOM = 0.003, 0.05  # bars shorter than this part of the axis have no name; inches around a name
FAINT = 0.5  # opacity of a wait
_ARROWS = 60  # the number of longest waits that have a line; more lines would hide the bars
_BETWEEN = 0.9  # lanes left free between two ranks, for the names of short bars


def _colour(rank: int) -> str:
    return RANKS[rank % len(RANKS)]


def from_start(spans: Sequence[Span]) -> list[Span]:
    """Return the same spans, shifted so that the first starts at 0."""
    start = min(s.start for s in spans)
    return [replace(s, start=s.start - start, end=s.end - start) for s in spans]


def stacked(spans: Sequence[Span]) -> list[Span]:
    """Return the same spans with kernels that follow one another on a rank in the same lanes: `program:3` for every
    program 3.

    A kernel that runs at the same time as another kernel keeps its own lanes.
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

    def moved(lane_of_releaser: tuple[int, str]) -> tuple[int, str]:
        return lane_of_releaser[0], place.get(lane_of_releaser, lane_of_releaser[1])

    return [replace(s, track=place[s.rank, s.track], releaser=moved(s.releaser) if s.releaser else None) for s in spans]


def draw(panels: Mapping[str, Sequence[Span]], path: Path, *, unit: str, heading: str = "") -> None:
    """Save one timeline per panel, under its title, all to the same scale; `unit` names the unit of the spans'
    times."""
    render(panels, unit=unit, heading=heading).savefig(path)


def render(panels: Mapping[str, Sequence[Span]], *, unit: str, heading: str = "") -> Figure:
    """Return the figure that `draw` saves."""
    runs = {title: from_start(stacked(spans)) for title, spans in panels.items() if spans}
    shown = [s for spans in runs.values() for s in spans]
    rows, ends = [_rows(spans) for spans in runs.values()], [max(s.end for s in spans) for spans in runs.values()]
    figure, grid = _page(rows, matrix=any(s.releaser for s in shown))
    reach, margin = max(ends, default=0) or 1.0, _margin(figure, rows)
    timelines: list[Axes] = []
    for number, (title, spans) in enumerate(runs.items()):
        axes = figure.add_subplot(grid[number, 0])
        axes.set_title(title, loc="left", fontsize=LARGE, fontweight="bold", color=INK)
        axes.set_xlim(0, reach * 1.005)
        axes.tick_params(axis="x", labelbottom=number == len(runs) - 1)
        _timeline(axes, spans, rows[number], margin)
        if number:
            _compare(axes, ends[number], ends[0], unit)
        if any(s.releaser for s in spans):
            _matrix(figure.add_subplot(grid[number, 1], anchor="N"), spans)
        timelines.append(axes)
    for axes in timelines[-1:]:
        axes.set_xlabel(unit, fontsize=NORMAL, color=INK)
    if heading:
        figure.suptitle(heading, x=0.008, ha="left", fontsize=NORMAL, color=INK)
    _legend(figure, shown)
    figure.draw_without_rendering()  # computes the layout, which determines how wide a name may be
    for axes, spans, row, limit in zip(timelines, runs.values(), rows, [reach, *ends[1:]], strict=False):
        _name_bars(axes, spans, row, limit)
    return figure


def _page(rows: Sequence[dict[Lane, float]], matrix: bool) -> tuple[Figure, GridSpec]:
    """Return an empty page for these panels: the more lanes a rank has, the smaller is their height."""
    most = max((n for row in rows for n in Counter(rank for rank, _ in row).values()), default=1)
    lane = min(0.24, max(0.145, 1.4 / most))  # inches
    heights = [(max(row.values()) + 2.5) * lane + 0.4 for row in rows] or [1.0]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.8), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    columns = (5.5, 1)[: 1 + matrix]
    return figure, figure.add_gridspec(len(heights), len(columns), height_ratios=heights, width_ratios=columns)


def _rows(spans: Sequence[Span]) -> dict[Lane, float]:
    """Return the vertical position of each lane, counted in lanes from the top."""
    place, y, before = {}, 0.0, None
    for lane in lanes(spans):
        if before is not None and lane[0] != before:
            y += _BETWEEN
        place[lane], before = y, lane[0]
        y += 1
    return place


def _family(track: str) -> tuple[str, str]:
    """Return the name that a lane shares with the other lanes of its family, and its number among them: "gemm (pull):3"
    is ("pull", "3")."""
    family, _, rest = track.rpartition(":")
    if family == "stream":
        return f"{rest} stream", ""
    if family.endswith(")"):  # a kernel on a side stream
        family = family[family.index("(") + 1 : -1]
    return (family, rest) if family else (re.sub(r" \d+$", "", track), "")


def _labels(row: dict[Lane, float]) -> list[tuple[float, str]]:
    """Return one label for all lanes of a family on a rank, at their middle."""
    labels = []
    for (_, family), group in groupby(row, key=lambda lane: (lane[0], _family(lane[1])[0])):
        members = list(group)
        numbers = [_family(track)[1] for _, track in members]
        which = numbers[0] if len(set(numbers)) == 1 else f"{numbers[0]}\N{EN DASH}{numbers[-1]}"
        labels.append(((row[members[0]] + row[members[-1]]) / 2, f"{family} {which}".strip()))
    return labels


def _margin(figure: Figure, rows: Sequence[dict[Lane, float]]) -> float:
    """Return the width in points, left of the lanes, that their labels need."""
    labels = {text for row in rows for _, text in _labels(row)}
    texts = (Text(0, 0, label, fontsize=LITTLE, figure=figure) for label in labels)
    return max((text.get_window_extent().width * 72 / DPI for text in texts), default=0.0) + 12


def _timeline(axes: Axes, spans: Sequence[Span], row: dict[Lane, float], margin: float) -> None:
    waited_for = {s.releaser[0] for s in spans if s.releaser}
    for rank in sorted({rank for rank, _ in row}):
        ys = [y for (r, _), y in row.items() if r == rank]
        axes.axhspan(min(ys) - 0.5, max(ys) + 0.5, color=GROUND, zorder=0)
        box = dict(facecolor=to_rgba(_colour(rank), FAINT), edgecolor=_colour(rank), pad=2, lw=0.5)
        axes.annotate(
            f"rank {rank}",
            (0, (min(ys) + max(ys)) / 2),
            (-margin, 0),
            axes.get_yaxis_transform(),
            "offset points",
            ha="right",
            va="center",
            fontsize=NORMAL,
            color=INK,
            bbox=box if rank in waited_for else None,
        )
    _bars(axes, spans, row)
    _arrows(axes, spans, row)
    labels = _labels(row)
    axes.set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=LITTLE, color=INK)
    axes.set_ylim(max(row.values()) + 0.6, -1.3)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=LITTLE, color=PALE, labelcolor=INK)
    axes.grid(axis="x", color="#dcdfe4", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALE)


def _bars(axes: Axes, spans: Sequence[Span], row: dict[Lane, float]) -> None:
    bars: dict[tuple[Lane, str, int], list[tuple[float, float]]] = {}
    for s in spans:
        ender = s.releaser[0] if s.releaser else -1
        bars.setdefault(((s.rank, s.track), s.kind, ender), []).append((s.start, s.end - s.start))
    for (lane, kind, ender), extents in bars.items():
        y = row[lane]
        if kind == "wait":
            colour = _colour(ender) if ender >= 0 else PALE
            axes.broken_barh(extents, (y - 0.25, 0.5), facecolor=to_rgba(colour, FAINT), edgecolor=colour, lw=0.4)
        else:
            axes.broken_barh(extents, (y - 0.4, 0.8), facecolor=WORK.get(kind, PALE), edgecolor="white", lw=0.4)


def _arrows(axes: Axes, spans: Sequence[Span], row: dict[Lane, float]) -> None:
    """Draw a line from the lane whose notify ended a wait to the wait's end, for the longest waits."""
    ended = [(s, row[s.releaser], _colour(s.releaser[0])) for s in spans if s.releaser and s.end > s.start]
    longest = sorted(ended, key=lambda item: item[0].start - item[0].end)[:_ARROWS]
    tips = [(s.end, row[s.rank, s.track]) for s, _, _ in longest]
    lines = [((x, y), (x, origin)) for (x, y), (_, origin, _) in zip(tips, longest, strict=True)]
    colours = [to_rgba(colour, 0.8) for _, _, colour in longest]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=0.8, zorder=3))
    axes.scatter([x for x, _ in tips], [y for _, y in tips], s=7, c=colours, linewidths=0, zorder=4)


def _compare(axes: Axes, end: float, first_end: float, unit: str) -> None:
    """Mark the time between the ends of this run and of the first: how much sooner, or later, this run ended."""
    sooner = end <= first_end
    colour = SAVED if sooner else LOST
    axes.axvspan(end, first_end, color=to_rgba(colour, 0.15), lw=0, zorder=1)
    ends = dict(arrowstyle="<->", color=colour, shrinkA=0, shrinkB=0)
    axes.annotate("", (end, -0.95), (first_end, -0.95), arrowprops=ends)
    label = f"{abs(first_end - end):.0f} {unit} {'saved' if sooner else 'lost'} ({abs(1 - end / first_end):.0%})"
    axes.annotate(
        label,
        (max(first_end, end), 1),
        (0, 4),
        axes.get_xaxis_transform(),
        "offset points",
        ha="right",
        fontsize=LARGE,
        fontweight="bold",
        color=colour,
    )


def _name_bars(axes: Axes, spans: Sequence[Span], row: dict[Lane, float], limit: float) -> None:
    """Write the names of runs of bars where there is room up to `limit`, next to the bars or above a rank's uppermost
    lane. Only one program of a kernel is named."""
    (zero, _), (one, _) = axes.transData.transform([(0, 0), (1, 0)])
    uppermost = {rank: min(y for (r, _), y in row.items() if r == rank) for rank, _ in row}
    named: set[tuple[int, str, str]] = set()
    by_lane = sorted(spans, key=lambda s: (s.rank, s.track, s.start))
    for (rank, track), group in groupby(by_lane, lambda s: (s.rank, s.track)):
        family, program = _family(track)
        runs, y, before, over = _runs(group), row[rank, track], 0.0, 0.0
        for run, after in zip(runs, [*(run[0].start for run in runs[1:]), limit], strict=True):
            end = max(s.end for s in run)
            bar = max(run, key=lambda s: (s.kind != "wait", s.end - s.start))
            if bar.kind != "wait" and bar.end - bar.start > NAMELESS * limit and (rank, family, bar.name) not in named:
                text = axes.text(
                    0, y, bar.name, fontsize=LITTLE, va="center_baseline", ha="center", color=INK, zorder=5
                )
                wide = (text.get_window_extent().width + ROOM * DPI) / (one - zero)
                middle = (run[0].start + end) / 2
                if wide <= bar.end - bar.start:
                    middle = (bar.start + bar.end) / 2
                    text.set_color(_on(WORK.get(bar.kind, PALE)))
                    named |= {(rank, family, bar.name)} if program else set()
                elif (
                    not program
                    and (outside := _middle_outside_bars(wide, run[0].start, end, before, after)) is not None
                ):
                    middle = outside
                    end = max(end, middle + wide / 2)
                elif y == uppermost[rank] and over <= middle - wide / 2 and middle + wide / 2 <= limit:
                    text.set_y(y - 0.75)
                    over = middle + wide / 2
                else:
                    text.set_visible(False)
                text.set_x(middle)
            before = end


def _middle_outside_bars(wide: float, start: float, end: float, before: float, after: float) -> float | None:
    """Return the middle of a name next to bars from `start` to `end`: after them if the lane is free until `after`,
    else before them if it is free from `before` on; None if there is no room."""
    if wide <= after - end:
        return end + wide / 2
    return start - wide / 2 if wide <= start - before else None


def _runs(bars: Iterable[Span]) -> list[list[Span]]:
    """Return a lane's bars in groups of consecutive equal names, with the waits before the first bar and after each
    bar."""
    runs: list[list[Span]] = []
    for s in bars:
        names = {bar.name for bar in runs[-1] if bar.kind != "wait"} if runs else {""}
        if runs and (s.kind == "wait" or names <= {s.name}):
            runs[-1].append(s)
        else:
            runs.append([s])
    return runs


def _on(colour: str) -> str:
    """Return a text colour that is legible on this colour."""
    red, green, blue = to_rgb(colour)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.4 else INK


def _legend(figure: Figure, spans: Sequence[Span]) -> None:
    kinds = {s.kind for s in spans}
    ranks = sorted({s.releaser[0] for s in spans if s.releaser})
    handles = [Patch(color=colour, label=MEANING.get(kind, kind)) for kind, colour in WORK.items() if kind in kinds]
    waits = [(f"waits for rank {rank}", _colour(rank)) for rank in ranks]
    if any(s.kind == "wait" and not s.releaser for s in spans):
        waits.append(("waits", PALE))
    handles += [Patch(facecolor=to_rgba(c, FAINT), edgecolor=c, label=label) for label, c in waits]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=NORMAL,
        labelcolor=INK,
        handlelength=1.4,
        columnspacing=1.4,
    )


def waited(spans: Sequence[Span]) -> dict[tuple[int, int], float]:
    """Return the time that rank a's tracks spent in waits that rank b's notify ended, by (a, b)."""
    total: dict[tuple[int, int], float] = {}
    for s in spans:
        if s.releaser:
            key = s.rank, s.releaser[0]
            total[key] = total.get(key, 0.0) + s.end - s.start
    return total


def _matrix(axes: Axes, spans: Sequence[Span]) -> None:
    ranks = sorted({s.rank for s in spans})
    total = waited(spans)
    values = [[total.get((a, b), 0.0) for b in ranks] for a in ranks]
    axes.imshow(values, cmap="Greys", vmin=0, vmax=2 * max(max(line) for line in values) or 1)
    for i, line in enumerate(values):
        for j, value in enumerate(line):
            axes.text(j, i, f"{value:.0f}" if value else "·", ha="center", va="center", fontsize=LITTLE, color=INK)
    axes.set_xticks(range(len(ranks)), [str(r) for r in ranks], fontsize=LITTLE)
    axes.set_yticks(range(len(ranks)), [str(r) for r in ranks], fontsize=LITTLE)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("who waited for whom", fontsize=NORMAL, color=INK)
    axes.set_xlabel("released by rank\n(sum over lanes)", fontsize=LITTLE, color=INK)
    axes.set_ylabel("waiting rank", fontsize=LITTLE, color=INK)
