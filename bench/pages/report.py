"""From bench/results/<machine>/<op>.jsonl to the first chapters of docs/measurements.md, their plots and the README's generated block.

Every figure in those three comes from a line of the results, or is a ratio or a geometric mean of such lines; none is
written here. Of the lines of one (op, name, world, mode, method) the newest counts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from rich.table import Table

from weft.errors import WeftError

LIBRARIES = (
    "torch",
    "quack",
)  # a peer's method begins with its library's name; the others are weft's, by plan or by what they leave out
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
FEW = 512  # tokens: calls of at most so many have a mean of their own
SHOWN = (
    *(OPS[op] + size for op in list(OPS)[:3] for size in ("", f", ≤{FEW} tokens")),
    "experts over the ranks, forward",
    "attention over all ranks' keys",
    "Transformers model, `weft.hf.weave`",
    "Transformers' mixtures of experts, `weft.hf.weave`",
)  # of the README's table, titles here and in front.py
SINCE = (
    "2026-11-21"  # what only older versions were measured with stands in docs/measurements.md, and not in the README
)
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
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
        """How many times as fast as sequential."""
        us, base = self.us(method), self.us("sequential")
        return base / us if us and base else None

    def field(self, key: str) -> Any:
        """A field that is the same for every method, from the first row that has it; auto's before the others'."""
        rows = [self.rows[m] for m in ("auto", "sequential") if m in self.rows] + list(self.rows.values())
        return next((row[key] for row in rows if row.get(key) is not None), None)

    @property
    def of_limit(self) -> float | None:
        us, limit = self.us("auto"), self.field("limit_us")
        return limit / us if us and limit else None

    def best(self, methods: Iterable[str]) -> str | None:
        """The fastest of `methods` that was measured here."""
        return min((m for m in methods if m in self.rows), key=lambda m: self.rows[m]["us"], default=None)

    @property
    def peers(self) -> list[str]:
        return [m for m in self.rows if m.split()[0] in LIBRARIES]


def load(folder: Path) -> list[Row]:
    """The rows of one machine's results: of every (op, name, world, mode) those of the newest run alone, whose methods were
    interleaved."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
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
            run = found.setdefault(tuple(row[k] for k in ("op", "name", "world", "mode")), {})
            newest = max((r["date"] for r in run.values()), default=row["date"])
            if row["date"] > newest:
                run.clear()
            if row["date"] >= newest:
                run[row["method"]] = row
    return [row for run in found.values() for row in run.values()]


def cases(rows: Sequence[Row], op: str, world: int, mode: str) -> list[Case]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if (row["op"], row["world"], row["mode"]) == (op, world, mode):
            found.setdefault(row["name"], {})[row["method"]] = row
    return [Case(name, found[name]) for name in sorted(found, key=_natural)]


def _natural(text: str) -> list[tuple[int, str]]:
    """MLP shapes first, then the others; numbers by value."""
    parts = [(int(p), "") if p.isdigit() else (-1, p) for p in re.findall(r"\d+|\D+", text)]
    return [(0 if text.startswith("MLP") else 1, ""), *parts]


def _distinct(rows: Sequence[Row], key: str, order: Sequence[Any] = ()) -> list[Any]:
    present = {row[key] for row in rows}
    return [v for v in order if v in present] + sorted(present - set(order))


def mean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of what is there; None of nothing."""
    known = [v for v in values if v]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def plan_kind(plan: str | None) -> str:
    """`plan` as in the results: the text of a JSON object."""
    return str(json.loads(plan)["kind"]) if plan else "–"


def layer_label(plan: str | None) -> str:
    """Of a decoder's layers: the kind, where a woven batch is split, and what its norms run on."""
    if not plan:
        return "–"
    fields = json.loads(plan)
    said = [f"{name} {fields[name]}" for name in ("split", "sms", "norm") if fields.get(name) not in (0, "auto", None)]
    return " ".join([fields["kind"], *said])


def _x(value: float | None) -> str:
    return f"{value:.2f}x" if value else "–"


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return f"{100 * value:.0f}%" if value else "–"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]], text_columns: int = 1) -> list[str]:
    align = [":---" if i < text_columns else "---:" for i in range(len(head))]
    return ["| " + " | ".join(cells) + " |" for cells in (head, align, *lines)]


def _by_size(found: Iterable[Case]) -> dict[str, list[Case]]:
    """Cases of many tokens, and of few apart, by what a title says of them. A mean over both would hide the latter."""
    sizes: dict[str, list[Case]] = {"": [], f", ≤{FEW} tokens": []}
    for case in found:
        sizes["" if (case.field("M") or FEW + 1) > FEW else f", ≤{FEW} tokens"].append(case)
    return {title: cases for title, cases in sizes.items() if cases}


def _families(op: str, found: list[Case]) -> list[tuple[str, list[Case]]]:
    """What one line sums up, by its title: an op's calls of many tokens and of few; of a decoder, prefill, decode and mixes of
    requests apart."""
    title = OPS.get(op, op)
    if op != "decoder":
        return [(title + size, cases) for size, cases in _by_size(found).items()]
    families: dict[str, list[Case]] = {}
    for case in found:
        kind = next((k for k in ("prefill", "decode") if f"-{k}-" in case.name), "mixes of requests")
        families.setdefault(f"{title}: {kind}", []).append(case)
    return list(families.items())


def _case_table(found: dict[str, Case], other: dict[str, Case]) -> list[str]:
    """Shapes in CUDA graphs (or in the only mode there is), and behind each the same launched one by one."""
    shapes = {name: found.get(name, Case(name, {})) for name in sorted(found.keys() | other.keys(), key=_natural)}
    known = {name: case if case.rows else other[name] for name, case in shapes.items()}
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
    head += ["eager: NCCL", "weft", "speedup", *peers] if other else []
    lines = []
    for name, case in shapes.items():
        size = "×".join(str(known[name].field(k)) for k in ("M", "N", "K"))
        plan = case.rows.get("auto", {}).get("plan")
        line = [name, *([size] if sized else []), *(_us(case.field(k)) for k in ("gemm_us", "comm_us", "limit_us"))]
        line += [*_gain(case), _percent(case.of_limit), *(_x(case.ratio(p)) for p in peers)]
        line.append(layer_label(plan) if layers else plan_kind(plan))
        if other:
            eager = other.get(name, Case(name, {}))
            line += [*_gain(eager), *(_x(eager.ratio(p)) for p in peers)]
        lines.append(line)
    return _table(head, lines, text_columns=2 if sized else 1)


def _gain(case: Case) -> list[str]:
    ratio = case.ratio("auto")
    return [_us(case.us("sequential")), _us(case.us("auto")), f"**{_x(ratio)}**" if ratio else "–"]


def summary(rows: Sequence[Row], world: int) -> list[list[str]]:
    """Lines of the README's table: of an op, the means in a CUDA graph and eager, the best peer's (in the first of these that it was
    measured in), and the lowest of all shapes and both modes."""
    lines = []
    for op in _distinct(rows, "op", tuple(OPS)):
        by_mode = {mode: dict(_families(op, cases(rows, op, world, mode))) for mode in MODES}
        for title in dict.fromkeys(title for found in by_mode.values() for title in found):
            means, peers, lows = [], [], []
            for mode, families in by_mode.items():
                found = families.get(title, [])
                means.append(mean(c.ratio("auto") for c in found))
                ratios = {p: mean(c.ratio(p) for c in found) for c in found for p in c.peers}
                peers += sorted(((r, p) for p, r in ratios.items() if r), reverse=True)[:1]
                lows += [(ratio, f"{c.name}, {MODES[mode]}") for c in found if (ratio := c.ratio("auto"))]
            if lows:
                low, peer = min(lows), peers[0] if peers else None
                best = f"{_x(peer[0])} {peer[1]}" if peer else "–"
                lines.append([title, *(f"**{_x(m)}**" if m else "–" for m in means), best, f"{_x(low[0])} ({low[1]})"])
    return lines


def _plot(rows: Sequence[Row], op: str, world: int, path: Path) -> None:
    """Bars of the ratio to sequential: auto and the best peer, with the limit as a dash; a panel for each mode."""
    modes = [m for m in _distinct(rows, "mode", tuple(MODES)) if cases(rows, op, world, m)]
    figure = Figure(figsize=(11, 2.9 * len(modes)), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, mode in zip(figure.subplots(len(modes), 1, squeeze=False)[:, 0], modes, strict=True):
        found = cases(rows, op, world, mode)
        x = range(len(found))
        peer = [c.ratio(c.best(c.peers) or "") or 0 for c in found]
        auto = [c.ratio("auto") or 0 for c in found]
        limit = [(c.us("sequential") or 0) / (c.field("limit_us") or math.inf) for c in found]
        if any(peer):
            axes.bar([i - 0.2 for i in x], peer, 0.38, color="#b9c0ca", label="best peer")
        bars = axes.bar([i + 0.2 * any(peer) for i in x], auto, 0.38, color="#3b6fb6", label="weft, auto")
        axes.bar_label(bars, [f"{v:.2f}" if v else "" for v in auto], fontsize=7.5, padding=-12, color="white")
        axes.hlines(
            limit, [i - 0.42 for i in x], [i + 0.42 for i in x], color="#c8385a", lw=1.4, label="max(GEMM, link)"
        )
        axes.axhline(1, color="#444444", lw=0.8, ls=":", label="cuBLAS + NCCL")
        axes.set_xticks(list(x), [c.name for c in found], fontsize=8)
        axes.set_ylim(0, 1.25 * max([*peer, *auto, *limit, 1]))
        axes.set_ylabel("times as fast", fontsize=9)
        axes.set_title(f"{OPS.get(op, op)}, {world} GPUs, {MODES.get(mode, mode)}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(ncols=4, fontsize=8, frameon=False, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "weft", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


INTRODUCTION = """With this page you can see how fast each op is at each size, and beside what. Times are microseconds: the median over iterations
of the slowest rank, on random inputs, all methods of a shape interleaved in one run. *NCCL* is cuBLAS + NCCL, one after the other;
*weft* is `plan="auto"`, and *plan* the kind that it took. *GEMM* and *comm.* are the two alone; *limit* is the longer of the GEMM
alone and the bytes over the measured link rate. A library's column is its speedup over cuBLAS + NCCL. First CUDA graphs, then the
same calls launched one by one (*eager*). N and K are the sizes on one rank, M is the gathered one. Means are geometric.
"""


def load_all(results: Path) -> dict[str, list[Row]]:
    """Rows by machine, that with the most GPUs first."""
    machines = {p.name: load(p) for p in sorted(results.glob("*")) if p.is_dir()}
    machines = {name: rows for name, rows in machines.items() if rows}
    if not machines:
        raise WeftError(f"no results in {results}: run the benchmark first (make gpu, on a machine with GPUs)")
    return dict(sorted(machines.items(), key=lambda m: -max(row["world"] for row in m[1])))


def when(rows: Sequence[Row]) -> str:
    dates = sorted({str(row["date"])[:10] for row in rows})
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _old(rows: Sequence[Row]) -> bool:
    return when(rows)[-10:] < SINCE


def digest(machine: str, rows: Sequence[Row], layers: Sequence[list[str]] = ()) -> str:
    """What one machine reached: means and, of a version that is not an earlier one, plots. layers: further lines of the means."""
    commits = ", ".join(f"`{c[:10]}`" for c in _distinct(rows, "commit"))
    where = "rows are in `bench/results/" + machine + "`"
    if not _old(rows):
        where = f"[every size](../{table_name(machine)})"
    said = f"Measured {when(rows)} at {commits}; {'an earlier version, whose ' * _old(rows)}{where}."
    head = ["times as fast as", "CUDA graph", "eager", "best other library", "lowest of all sizes"]
    text = [f"## {machine}", said, "\n".join(_table(head, means(rows, layers)))]
    for op in () if _old(rows) else (op for op in _distinct(rows, "op", tuple(OPS)) if op in PLOTTED):
        text.append(f"![{OPS.get(op, op)} against cuBLAS + NCCL](img/{_plot_name(machine, op)})")
    return "\n\n".join(text) + "\n"


def new(machines: dict[str, list[Row]]) -> list[str]:
    """The machines that were measured with a version that is not an earlier one."""
    return [machine for machine, rows in machines.items() if not _old(rows)]


def table_name(machine: str) -> str:
    """Where the tables of a machine's sizes are, from the repository's root."""
    return f"bench/results/{machine}/tables.md"


def chapter(machine: str, rows: Sequence[Row]) -> str:
    """Tables of one machine, op by op; of an earlier version none."""
    text = [
        f"# Every size on {machine}\n\nMeasured {when(rows)}; [what the columns are](../../../docs/measurements.md).\n"
    ]
    for op in () if _old(rows) else _distinct(rows, "op", tuple(OPS)):
        for world in sorted({row["world"] for row in rows if row["op"] == op}, reverse=True):
            text.append(f"## {OPS.get(op, op)}, {world} GPUs\n")
            modes = [m for m in _distinct(rows, "mode", tuple(MODES)) if cases(rows, op, world, m)]
            first, *others = ({c.name: c for c in cases(rows, op, world, mode)} for mode in modes)
            text += [*_case_table(first, others[0] if others else {}), ""]
    return "\n".join(text)


def _plot_name(machine: str, op: str) -> str:
    return f"bench-{machine}-{op}.svg"


def plots(machines: dict[str, list[Row]], folder: Path) -> list[Path]:
    paths = []
    for machine, rows in machines.items():
        for op in (op for op in PLOTTED if not _old(rows) and any(row["op"] == op for row in rows)):
            paths.append(folder / _plot_name(machine, op))
            _plot(rows, op, max(row["world"] for row in rows if row["op"] == op), paths[-1])
    return paths


def ending(folder: Path) -> tuple[Table, list[Path]]:
    """What a benchmark ends with: a table of the rows in a folder, and the paths of the plots that are drawn there."""
    rows = load(folder)
    table = Table("op", "size", "mode", "sequential, us", '"auto", us', "times as fast")
    for op, world, mode in dict.fromkeys((row["op"], row["world"], row["mode"]) for row in rows):
        for case in cases(rows, op, world, mode):
            if ratio := case.ratio("auto"):
                us = (f"{case.us(method):.0f}" for method in ("sequential", "auto"))
                table.add_row(op, case.name, mode, *us, f"{ratio:.2f}x")
    return table, plots({folder.name: rows}, folder)


def means(rows: Sequence[Row], layers: Sequence[list[str]] = ()) -> list[list[str]]:
    """Lines of one machine's table of means, a line with the baseline in italics before those that it is the baseline of.
    layers: further lines."""
    return [["*cuBLAS, then NCCL*", "", "", "", ""], *summary(rows, max(row["world"] for row in rows)), *layers]


def block(machines: dict[str, list[Row]], layers: Callable[[str], list[list[str]]] = lambda machine: []) -> list[str]:
    """What the README has between its marks: of `SHOWN` the means on every machine that was measured since `SINCE`, the last one
    first. layers: further lines of a machine's table."""
    since = {name: rows for name, rows in machines.items() if not _old(rows)}
    names = sorted(since, key=lambda name: when(since[name])[-10:], reverse=True)
    by_title = {name: {line[0]: line[1:] for line in means(since[name], layers(name))} for name in names}
    lines, baseline, last = [], "", ""
    for title in dict.fromkeys(title for found in by_title.values() for title in found):
        cells = [found.get(title, ["–"] * 4) for found in by_title.values()]
        if title.startswith("*"):
            baseline = title.strip("*")
        elif title in SHOWN:
            lowest = min(low for *_, low in cells if low != "–")
            said = "same" if lines and baseline == last else baseline
            last = baseline
            lines.append([title, said, *(ratio for graph, eager, *_ in cells for ratio in (graph, eager)), lowest])
    gpus = [max(row["world"] for row in since[name]) for name in names]
    head = ["weft", "times as fast as", *(f"{n} GPUs: {mode}" for n in gpus for mode in MODES), "lowest of all sizes"]
    measured = ", ".join(f"{name} {when(since[name])}" for name in names)
    return [f"Measured on {measured}:", "", *_table(head, lines, text_columns=2), ""]


def between_marks(text: str, lines: Sequence[str]) -> str:
    """The README with this block."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise WeftError(f"README.md must hold {BEGIN} and {END} once each")
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + "\n".join(lines) + END + rest.split(END)[1]
