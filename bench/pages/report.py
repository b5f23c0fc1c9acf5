"""From bench/results/<machine>/<op>.jsonl to the first chapters of docs/measurements.md, their plots and the README's generated block.

Every figure there comes from a line of the results, or is a ratio or a geometric mean of such lines; this program
contains no figures. The newest line of each (op, name, world, mode, method) counts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.table import Table

from bench.pages import svg
from bench.pages.tables import grid
from weft.errors import WeftError

# The name of a peer's method begins with the peer's library. The other methods are weft's; their names are plans, or
# the parts that they leave out.
LIBRARIES = ("torch", "quack")
MODES = {"graph": "CUDA graph", "eager": "eager"}
OPS = {
    "all_gather_matmul": "all-gather + GEMM",
    "matmul_reduce_scatter": "GEMM + reduce-scatter",
    "matmul_all_reduce": "GEMM + all-reduce",
    "matmul_all_to_all": "GEMM + all-to-all",
    "all_reduce": "all-reduce",
    "all_reduce_rms_norm": "all-reduce + residual + norm",
    "parallel_mlp": "whole MLP, forward",
    "decoder": "decoder, forward",
}
PLOTTED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "parallel_mlp", "decoder")
FEW = 512  # calls of at most this number of tokens have a separate mean
SINCE = "2026-11-21"  # a machine without later measurements has no chapter and no plots
HASH = 8  # the number of letters of a commit's hash on a page
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"  # the marks of the generated block in the README
NEEDED = ("op", "name", "world", "mode", "method", "us", "commit", "date")

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One shape of one op at one world and mode: its rows by method."""

    name: str
    rows: dict[str, Row]

    def us(self, method: str) -> float | None:
        return self.rows[method]["us"] if method in self.rows else None

    def ratio(self, method: str) -> float | None:
        """Return how many times as fast as sequential the method is."""
        us, base = self.us(method), self.us("sequential")
        return base / us if us and base else None

    def field(self, key: str) -> Any:
        """Return a field that is the same for every method, from the first row that has it; the row of "auto" is the
        first."""
        rows = [self.rows[m] for m in ("auto", "sequential") if m in self.rows] + list(self.rows.values())
        return next((row[key] for row in rows if row.get(key) is not None), None)

    @property
    def of_limit(self) -> float | None:
        us, limit = self.us("auto"), self.field("limit_us")
        return limit / us if us and limit else None

    @property
    def peers(self) -> list[str]:
        return [m for m in self.rows if m.split()[0] in LIBRARIES]


def load(folder: Path) -> list[Row]:
    """Return the rows of one machine's results: for every (op, name, world, mode) only the rows of the newest run,
    whose methods were interleaved."""
    runs: dict[tuple[Any, ...], dict[str, Row]] = {}
    for path in sorted(p for p in folder.glob("*.jsonl") if p.stem in OPS):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise WeftError(f"{path}:{number}: not JSON: {error}") from None
            missing = [key for key in NEEDED if key not in row]
            if missing:
                raise WeftError(f"{path}:{number}: lacks {', '.join(missing)}")
            run = runs.setdefault(tuple(row[k] for k in ("op", "name", "world", "mode")), {})
            newest = max((r["date"] for r in run.values()), default=row["date"])
            if row["date"] > newest:
                run.clear()
            if row["date"] >= newest:
                run[row["method"]] = row
    return [row for run in runs.values() for row in run.values()]


def cases(rows: Sequence[Row], op: str, world: int, mode: str) -> list[Case]:
    by_name: dict[str, dict[str, Row]] = {}
    for row in rows:
        if (row["op"], row["world"], row["mode"]) == (op, world, mode):
            by_name.setdefault(row["name"], {})[row["method"]] = row
    return [Case(name, by_name[name]) for name in sorted(by_name, key=_natural)]


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key that puts MLP shapes first and sorts numbers by value."""
    parts = [(int(p), "") if p.isdigit() else (-1, p) for p in re.findall(r"\d+|\D+", text)]
    return [(0 if text.startswith("MLP") else 1, ""), *parts]


def _distinct(rows: Sequence[Row], key: str, order: Sequence[Any] = ()) -> list[Any]:
    present = {row[key] for row in rows}
    return [v for v in order if v in present] + sorted(present - set(order))


def mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are not None; None if there is no such value."""
    known = [v for v in values if v]
    return geometric_mean(known) if known else None


def plan_kind(plan: str | None) -> str:
    """Return the kind of a plan. `plan` is the JSON text of the results."""
    return str(json.loads(plan)["kind"]) if plan else "–"


def layer_label(plan: str | None) -> str:
    """Return the label of a decoder layer's plan: its kind, the split of a woven batch, and the plan of the norms."""
    if not plan:
        return "–"
    fields = json.loads(plan)
    settings = [
        f"{name} {fields[name]}" for name in ("split", "sms", "norm") if fields.get(name) not in (0, "auto", None)
    ]
    return " ".join([fields["kind"], *settings])


def _x(value: float | None) -> str:
    return f"{value:.2f}x" if value else "–"


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return f"{100 * value:.0f}%" if value else "–"


def _by_size(shapes: Iterable[Case]) -> dict[str, list[Case]]:
    """Return the cases of many tokens and the cases of few tokens, keyed by the end of the line's title. A mean over
    both would hide the cases of few tokens."""
    sizes: dict[str, list[Case]] = {"": [], f", ≤{FEW} tokens": []}
    for case in shapes:
        sizes["" if (case.field("M") or FEW + 1) > FEW else f", ≤{FEW} tokens"].append(case)
    return {title: group for title, group in sizes.items() if group}


def _families(op: str, shapes: list[Case]) -> list[tuple[str, list[Case]]]:
    """Return, by title, the cases that each line of the table of means summarizes: an op's calls of many tokens and of
    few tokens; for a decoder prefill, decode and mixes of requests separately."""
    title = OPS.get(op, op)
    if op != "decoder":
        return [(title + size, group) for size, group in _by_size(shapes).items()]
    families: dict[str, list[Case]] = {}
    for case in shapes:
        kind = next((k for k in ("prefill", "decode") if f"-{k}-" in case.name), "mixes of requests")
        families.setdefault(f"{title}: {kind}", []).append(case)
    return list(families.items())


def _case_table(graphs: dict[str, Case], eager: dict[str, Case]) -> str:
    """Return the table of shapes in CUDA graphs (or in the only mode that was measured), and, in further columns, of
    the same calls in eager mode."""
    shapes = {name: graphs.get(name, Case(name, {})) for name in sorted(graphs.keys() | eager.keys(), key=_natural)}
    known = {name: case if case.rows else eager[name] for name, case in shapes.items()}
    peers = sorted({peer for case in known.values() for peer in case.peers})
    layers = any(case.field("op") == "decoder" for case in known.values())
    sized = not layers and any((case.field("K") or 0) > 1 for case in known.values())
    head = [
        "shape",
        *(["M×N×K"] if sized else []),
        "GEMM",
        "comm.",
        "limit",
        "NCCL",
        "weft",
        "speedup",
        "of limit",
        *peers,
        "plan",
    ]
    head += ["eager: NCCL", "weft", "speedup", *peers] if eager else []
    lines = []
    for name, case in shapes.items():
        size = "×".join(str(known[name].field(k)) for k in ("M", "N", "K"))
        plan = case.rows.get("auto", {}).get("plan")
        line = [name, *([size] if sized else []), *(_us(case.field(k)) for k in ("gemm_us", "comm_us", "limit_us"))]
        line += [*_gain(case), _percent(case.of_limit), *(_x(case.ratio(p)) for p in peers)]
        line.append(layer_label(plan) if layers else plan_kind(plan))
        if eager:
            launched = eager.get(name, Case(name, {}))
            line += [*_gain(launched), *(_x(launched.ratio(p)) for p in peers)]
        lines.append(line)
    return grid(head, lines, 2 if sized else 1)


def _gain(case: Case) -> list[str]:
    ratio = case.ratio("auto")
    return [_us(case.us("sequential")), _us(case.us("auto")), f"**{_x(ratio)}**" if ratio else "–"]


def summary(rows: Sequence[Row], world: int) -> list[list[str]]:
    """Return the lines of the README's table: for each op the means in a CUDA graph and in eager mode, the mean of the
    best peer (in the first of these modes in which it was measured), the lowest ratio over all shapes and both modes,
    and the dates and commits of the rows."""
    lines = []
    for op in _distinct(rows, "op", tuple(OPS)):
        by_mode = {mode: dict(_families(op, cases(rows, op, world, mode))) for mode in MODES}
        for title in dict.fromkeys(title for families in by_mode.values() for title in families):
            means, peers, lows = [], [], []
            for mode, families in by_mode.items():
                shapes = families.get(title, [])
                means.append(mean(c.ratio("auto") for c in shapes))
                ratios = {p: mean(c.ratio(p) for c in shapes) for c in shapes for p in c.peers}
                peers += sorted(((r, p) for p, r in ratios.items() if r), reverse=True)[:1]
                lows += [(ratio, f"{c.name}, {mode}") for c in shapes if (ratio := c.ratio("auto"))]
            if lows:
                low, peer = min(lows), peers[0] if peers else None
                best = f"{_x(peer[0])} {peer[1]}" if peer else "–"
                names = {c.name for families in by_mode.values() for c in families.get(title, [])}
                source = measured([row for row in rows if row["op"] == op and row["name"] in names])
                ratios_of_modes = [f"**{_x(m)}**" if m else "–" for m in means]
                lines.append([title, *ratios_of_modes, best, f"{_x(low[0])} ({low[1]})", source])
    return lines


def _plot(rows: Sequence[Row], op: str, world: int, path: Path) -> None:
    """Draw bars of the speedups of "auto" and of the best peer over sequential, with the limit as a dash, in one panel
    for each mode."""
    modes = [m for m in _distinct(rows, "mode", tuple(MODES)) if cases(rows, op, world, m)]
    figure = svg.figure(11, 2.9 * len(modes))
    for axes, mode in zip(figure.subplots(len(modes), 1, squeeze=False)[:, 0], modes, strict=True):
        shapes = cases(rows, op, world, mode)
        x = range(len(shapes))
        peer = [max((c.ratio(p) or 0 for p in c.peers), default=0) for c in shapes]
        auto = [c.ratio("auto") or 0 for c in shapes]
        limit = [(c.us("sequential") or 0) / (c.field("limit_us") or math.inf) for c in shapes]
        if any(peer):
            axes.bar([i - 0.2 for i in x], peer, 0.38, color="#b9c0ca", label="best peer")
        bars = axes.bar([i + 0.2 * any(peer) for i in x], auto, 0.38, color="#3b6fb6", label="weft, auto")
        axes.bar_label(bars, [f"{v:.2f}" if v else "" for v in auto], fontsize=7.5, padding=-12, color="white")
        axes.hlines(
            limit, [i - 0.42 for i in x], [i + 0.42 for i in x], color="#c8385a", lw=1.4, label="max(GEMM, link)"
        )
        axes.axhline(1, color="#444444", lw=0.8, ls=":", label="cuBLAS + NCCL")
        axes.set_xticks(list(x), [c.name for c in shapes], fontsize=8)
        axes.set_ylim(0, 1.25 * max([*peer, *auto, *limit, 1]))
        axes.set_ylabel("times as fast", fontsize=9)
        axes.set_title(f"{OPS.get(op, op)}, {world} GPUs, {MODES.get(mode, mode)}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(ncols=4, fontsize=8, frameon=False, loc="upper right")
    svg.save(figure, path)


INTRODUCTION = """Each time is the slowest rank's median in microseconds, on random inputs. One run interleaves a shape's methods.
*NCCL* is cuBLAS, then NCCL; *weft* is `plan="auto"`, and *plan* the kind that ran. *GEMM* and *comm.* ran alone; *limit* is the larger of the
GEMM's time and the bytes divided by the measured link rate. A library's column is its speedup over cuBLAS + NCCL. *Eager* calls are
launched one by one. N and K belong to one rank, M to all ranks. Means are geometric. An empty *measured* repeats the cell above.
"""


def load_all(results: Path) -> dict[str, list[Row]]:
    """Return the rows by machine, the machine with the most GPUs first."""
    machines = {p.name: load(p) for p in sorted(results.glob("*")) if p.is_dir()}
    machines = {name: rows for name, rows in machines.items() if rows}
    if not machines:
        raise WeftError(f"no results in {results}: run the benchmark first (make gpu, on a machine with GPUs)")
    return dict(sorted(machines.items(), key=lambda m: -max(row["world"] for row in m[1])))


def when(rows: Sequence[Row]) -> str:
    dates = sorted({str(row["date"])[:10] for row in rows})
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def commits(rows: Sequence[Row]) -> str:
    """Return the short hashes of the rows' commits; rows without a commit are left out."""
    return ", ".join(
        f"`{commit}`" for commit in dict.fromkeys(row["commit"][:HASH] for row in rows if row.get("commit"))
    )


def measured(rows: Sequence[Row]) -> str:
    """Return those dates and commits that the rows contain."""
    dated = [row for row in rows if row.get("date")]
    return " ".join(part for part in (when(dated) if dated else "", commits(rows)) if part)


def digest(machine: str, rows: Sequence[Row], layers: Sequence[list[str]] = ()) -> str:
    """Return a machine's chapter: its means and plots. layers: further lines of the means."""
    text = [f"## {machine}", f"[Every size](../{table_name(machine)})", table_of_means(rows, layers)]
    for op in (op for op in _distinct(rows, "op", tuple(OPS)) if op in PLOTTED):
        text.append(f"![{OPS.get(op, op)}](img/{_plot_name(machine, op)})")
    return "\n\n".join(text) + "\n"


def new(machines: dict[str, list[Row]]) -> list[str]:
    """Return the machines that were measured with the current version."""
    return [machine for machine, rows in machines.items() if when(rows)[-10:] >= SINCE]


def table_name(machine: str) -> str:
    """Return the path, relative to the repository's root, of the tables of a machine's sizes."""
    return f"bench/results/{machine}/tables.md"


def chapter(machine: str, rows: Sequence[Row]) -> str:
    """Return the tables of one machine, op by op."""
    text = [
        f"# Every size on {machine}\n\nMeasured {when(rows)}; [what the columns are](../../../docs/measurements.md).\n"
    ]
    for op in _distinct(rows, "op", tuple(OPS)):
        for world in sorted({row["world"] for row in rows if row["op"] == op}, reverse=True):
            text.append(f"## {OPS.get(op, op)}, {world} GPUs\n")
            modes = [m for m in _distinct(rows, "mode", tuple(MODES)) if cases(rows, op, world, m)]
            graphs, *eager = ({c.name: c for c in cases(rows, op, world, mode)} for mode in modes)
            text += [_case_table(graphs, eager[0] if eager else {}), ""]
    return "\n".join(text)


def _plot_name(machine: str, op: str) -> str:
    return f"bench-{machine}-{op}.svg"


def plots(machines: dict[str, list[Row]], folder: Path) -> list[Path]:
    paths = []
    for machine in new(machines):
        rows = machines[machine]
        for op in (op for op in PLOTTED if any(row["op"] == op for row in rows)):
            paths.append(folder / _plot_name(machine, op))
            _plot(rows, op, max(row["world"] for row in rows if row["op"] == op), paths[-1])
    return paths


def ending(folder: Path) -> tuple[Table, list[Path]]:
    """Return the text that a benchmark prints at its end: a table of the rows in a folder, and the paths of the plots
    that this function draws there."""
    rows = load(folder)
    table = Table("op", "size", "mode", "sequential, us", '"auto", us', "times as fast")
    for op, world, mode in dict.fromkeys((row["op"], row["world"], row["mode"]) for row in rows):
        for case in cases(rows, op, world, mode):
            if ratio := case.ratio("auto"):
                us = (f"{case.us(method):.0f}" for method in ("sequential", "auto"))
                table.add_row(op, case.name, mode, *us, f"{ratio:.2f}x")
    return table, plots({folder.name: rows}, folder)


def means(rows: Sequence[Row], layers: Sequence[list[str]] = ()) -> list[list[str]]:
    """Return the lines of one machine's table of means, with a line in italics that names the baseline before the lines
    compared with it. layers: further lines."""
    return [["*cuBLAS, then NCCL*", "", "", "", "", ""], *summary(rows, max(row["world"] for row in rows)), *layers]


def table_of_means(rows: Sequence[Row], layers: Sequence[list[str]] = ()) -> str:
    """Return one machine's table of means, which states the date and commit of consecutive lines only once. layers:
    further lines."""
    head = ["times as fast as", "CUDA graph", "eager", "best other library", "lowest of all sizes", "measured"]
    lines, above = [], ""
    for *cells, source in means(rows, layers):
        lines.append([*cells, "" if source == above else source])
        above = source or above
    return grid(head, lines, 1)
