"""The cost and gain of signaled plans: tables next to the results, and a chapter of docs/measurements.md, from the rows
of bench/measure/signaled.py.

Every figure is computed from bench/results/<machine>/signaled/*.jsonl, except the goals and the paper's figures. The
page shows the ops of each machine, and the GEMM alone from the machine that ran it last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from bench.pages import svg
from bench.pages.report import OPS, _percent, _us, _x, mean
from bench.pages.tables import grid, lines_of
from weft.planner.profile import shipped
from weft.plans import Plan, Signaled
from weft.transport.signals import schedule

RESULTS = Path(__file__).parents[1] / "results"
AR, RS, A2A = "matmul_all_reduce", "matmul_reduce_scatter", "matmul_all_to_all"
GEMM_GOAL, BOUND_GOAL = 0.01, 0.85
FIXED = ("one group", "a wave a group", "first wave", "last wave", "halves")
EQUAL = 8  # the number of CTAs of the plans that differ only in their groups
TILES = ", tiles"
SHADES = ("#b9c0ca", "#8fa9cc", "#3b6fb6", "#1d3a63")

EARLIER = {  # for each machine, the changes since its rows of ops were measured
    "nvidia-h200-x4": "On 4 GPUs the all-to-all by copies has [changed since](../../docs/design-notes.md#signals)."
}

Row = dict[str, Any]
Size = tuple[int, int, int]
Cases = dict[Size, dict[str, Row]]
CasesByOp = dict[tuple[str, int], Cases]  # by op and number of GPUs

INTRODUCTION = (
    "These are costs and gains of plan kind [`signaled`](guide.md#signaled-plans) in bfloat16 CUDA graphs (`bench/measure/signaled.py`). "
    "*The paper* is FlashOverlap, on other GPUs. Mean speedups are geometric; mean fractions are arithmetic.",
)


# -- rows
def load(folder: Path) -> list[Row]:
    return [row | {"run": path.stem} for path in sorted(folder.glob("*.jsonl")) for row in lines_of(path)]


def cases(rows: Sequence[Row], part: str, op: str | None = None) -> Cases:
    """Return, for each shape, the rows by method of the last run with this shape, in CUDA graphs."""
    rows_by_size: Cases = {}
    for row in rows:
        if (row["part"], row.get("op"), row.get("mode")) == (part, op, "graph"):
            size = row["M"], row["N"], row.get("K", 0)
            if any(earlier["run"] != row["run"] for earlier in rows_by_size.get(size, {}).values()):
                del rows_by_size[size]
            rows_by_size.setdefault(size, {})[row["method"]] = row
    return rows_by_size


def shape_text(size: Size) -> str:
    return "×".join(str(s) for s in size if s)


def overhead(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}%"


def mean_and_most(ratios: list[float]) -> list[str]:
    return [overhead(fmean(ratios)), overhead(max(ratios))]


def listed(names: Iterable[str]) -> str:
    *leading, last = names
    return f"{', '.join(leading)} and {last}" if leading else last


TABLES = "bench/results/signaled.md"


def blocks(*parts: str) -> str:
    """Return the text with wrapped paragraphs; images and tables stay unchanged."""
    return "\n\n".join(map(block, filter(None, parts))) + "\n"


def block(part: str) -> str:
    return part if part.startswith(("![", "|")) else fill(part, 120, break_long_words=False, break_on_hyphens=False)


def section(title: str, *parts: str, level: int = 3) -> str:
    return f"\n{'#' * level} {title}\n\n" + blocks(*parts)


# -- the parts
def gemm(rows: Sequence[Row], sms: int) -> str:
    rows_by_size = cases(rows, "gemm")
    us = {
        size: {name: row["us"] for name, row in rows_by_method.items()} for size, rows_by_method in rows_by_size.items()
    }
    signaled = list(dict.fromkeys(n for times in us.values() for n in times if n.startswith("matmul")))

    def ctas(name: str) -> int:
        return int(name.split(", ")[-1].split()[0]) if name.endswith("CTAs left") else EQUAL

    def title(name: str) -> str:
        op, *rest = name.split(", ")
        layout = [r for r in rest if not r.endswith("CTAs left")] or ["to tiles"]
        return f"{OPS[op]}, {layout[0]}"

    def ratios_to(name: str, base: str = "") -> list[float]:
        base = base or f"plain, {ctas(name)} CTAs left"
        return [times[name] / times[base] for times in us.values() if name in times and base in times]

    lines = []
    for name in sorted(signaled, key=ctas):
        overheads, library = ratios_to(name), ratios_to(name, "cublas")
        under = sum(r - 1 < GEMM_GOAL for r in overheads)
        cells = [title(name), str(ctas(name)), *mean_and_most(overheads), f"{under} of {len(overheads)}"]
        lines.append([*cells, *mean_and_most(library)])
    for name in (f"plain, {c} CTAs left" for c in sorted({0} | {ctas(n) for n in signaled})):
        library = ratios_to(name, "cublas")
        if library:
            left = name.split(", ")[1].split()[0]
            lines.append(["none, without signals", left, "", "", "", *mean_and_most(library)])
    usual_tile = Signaled.tile
    whole = {
        c: sum(-(-m // usual_tile.block_m) * -(-n // usual_tile.block_n) % (sms - c) == 0 for m, n, _ in us)
        for c in sorted({ctas(n) for n in signaled})
    }
    divides = [f"{count} with {c} SMs left" for c, count in whole.items()]
    shown = [n for n in signaled if ctas(n) == EQUAL and "a wave a group" not in n]
    usual = [r for n in signaled if "a wave a group" not in n for r in ratios_to(n)]
    under = sum(r - 1 < GEMM_GOAL for r in usual)
    mean, most = (x - 1 < GEMM_GOAL for x in (fmean(usual), max(usual)))
    reached = "Reached" if mean and most else "Reached on average, not by every shape" if mean else "Missed"
    return section(
        "The GEMM with reordering and signals",
        "*Overhead* compares the GEMM with a GEMM of the same main loop and epilogue on as many SMs, which stores ordinary rows and sends "
        "no signals. *Beside cuBLAS* compares the GEMM with cuBLAS on all SMs. Nothing else ran on the GPU.",
        grid(["GEMM of", "SMs left", "overhead", "most", f"under {GEMM_GOAL:.0%}", "beside cuBLAS", "most"], lines, 1),
        f"The goal is an overhead under {GEMM_GOAL:.0%}; the paper reports 0.07 to 0.7%. **{reached}**: with the default groups the mean "
        f"overhead is {overhead(fmean(usual))} and the largest {overhead(max(usual))}; {under} of {len(usual)} GEMMs stay under "
        f"{GEMM_GOAL:.0%}. The smallest is {overhead(min(usual))}, so differences of that size are not all overhead.",
        f"Of {len(us)} shapes, the following numbers consist of whole waves of tiles: {listed(divides)}.",
        by_k(us, shown, f"plain, {EQUAL} CTAs left"),
    )


def by_k(us: dict[Size, dict[str, float]], names: Sequence[str], base: str) -> str:
    """Return the sentence on the mean overhead for each K that more than two shapes have."""
    ks = sorted({size[2] for size in us})
    same = {k: [times[n] / times[base] for size, times in us.items() if size[2] == k for n in names] for k in ks}
    means = [f"{overhead(fmean(r))} at K = {k}" for k, r in same.items() if len(r) > 2 * len(names)]
    return f"With the default groups the mean overhead is {listed(means)}." if means else ""


# -- ops
def bounds(op: str, m: int, n: int, world: int, plan: Signaled, sms: int) -> tuple[int, ...]:
    """Return the tiles at which groups end, as `ops/matmul_reduce/signaled.py` divides them; for an all-to-all, the
    tiles of M rows on each rank."""
    owners = world if op == RS and not plan.copies else 1
    tiles_n, programs = -(-n // plan.tile.block_n), sms - plan.ctas
    tiles = owners * -(-(m // owners) // plan.tile.block_m) * tiles_n
    in_order = n % 8 == 0 and (op == AR or (op == RS and plan.copies))
    unit = max(1, min(plan.tile.group_m, programs // tiles_n)) * tiles_n if in_order else 1
    return schedule(tiles, programs, plan.groups, owners, unit).bounds


def bound(gemm_us: float, comm_us: float, ends: Sequence[int], own_last: bool = False) -> float:
    """Return the larger of two sums: the time of the GEMM and the last group's collective; the time of the first
    group's GEMM and all collectives. own_last: the last group stays on its rank, so that the op may end with the
    GEMM."""
    first_share, last_share = ends[1] / ends[-1], 0 if own_last else (ends[-1] - ends[-2]) / ends[-1]
    return max(gemm_us + last_share * comm_us, first_share * gemm_us + comm_us)


def judged(op: str, size: Size, row: Row, sms: int) -> tuple[float, float]:
    """Return the fraction that a row reaches of the bound for its plan's groups, and of the bound for groups of one
    wave."""
    plan = Plan.from_json(json.dumps(row["plan"]))
    assert isinstance(plan, Signaled)
    ends = bounds(op, *size[:2], row["world"], plan, sms)
    tiles, programs = ends[-1], sms - plan.ctas
    waves = (0, min(tiles, programs), (tiles - 1) // programs * programs, tiles)
    own_last = op == RS and plan.copies
    of_groups, of_waves = (bound(row["gemm_us"], row["comm_us"], a, own_last) / row["us"] for a in (ends, waves))
    return of_groups, of_waves


def in_rows(by_method: dict[str, Row]) -> list[Row]:
    """Return the signaled plans whose result is in ordinary order."""
    return [r for r in by_method.values() if r["method"] != "sequential" and not r["method"].endswith(TILES)]


def fastest(by_method: dict[str, Row], copies: bool) -> Row | None:
    """Return the fastest plan with groups that copy engines move, or that NCCL moves."""
    return min(
        (r for r in in_rows(by_method) if bool(r["plan"].get("copies")) == copies), key=lambda r: r["us"], default=None
    )


@dataclass
class Family:
    """The best plans by NCCL, or by copies, for each shape: the speedups, and the fractions of the bound for their
    groups and for groups of one wave."""

    title: str
    copies: bool
    speedups: list[float] = field(default_factory=list)
    fractions: list[float] = field(default_factory=list)
    waves: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def add(self, op: str, size: Size, by_method: dict[str, Row], sms: int) -> list[str]:
        """Add the cells of a shape."""
        best, base = fastest(by_method, self.copies) if by_method else None, by_method.get("sequential")
        if best is None or base is None:
            return ["–"] * 2
        fraction, wave = judged(op, size, best, sms)
        self.speedups.append(base["us"] / best["us"])
        self.fractions.append(fraction)
        self.waves.append(wave)
        self.lost += [shape_text(size)] if best["us"] >= base["us"] else []
        x = _x(self.speedups[-1])
        return [f"**{x}**" if best["us"] < base["us"] else x, _percent(fraction)]

    def means(self) -> list[str]:
        return [f"**{_x(mean(self.speedups))}**", _percent(fmean(self.fractions))] if self.speedups else ["", ""]

    def judgement(self, op: str, world: int) -> list[str]:
        """Return the row that compares the plans with the goal."""
        reach = "reached" if fmean(self.fractions) >= BOUND_GOAL else "missed"
        return [
            OPS[op], str(world), self.title, _percent(fmean(self.fractions)), _percent(min(self.fractions)),
            _percent(max(self.fractions)), _percent(fmean(self.waves)), reach, _x(mean(self.speedups)), _x(max(self.speedups)),
            f"{len(self.lost)}/{len(self.speedups)}",
        ]  # fmt: skip


def op_table(op: str, machines: dict[str, Cases], worlds: dict[str, int], sms: int) -> tuple[str, list[list[str]]]:
    """Return the section of one op, with a column group for each machine, and the rows that compare the op's plans with
    the goal."""
    families = {
        machine: [f for f in (Family("NCCL", False), Family("copies", True)) if any(fastest(r, f.copies) for r in by_size.values())]
        for machine, by_size in machines.items()
    }  # fmt: skip
    lines = []
    for size in dict.fromkeys(size for machine_cases in machines.values() for size in machine_cases):
        cells = [shape_text(size)]
        for machine, machine_cases in machines.items():
            by_method = machine_cases.get(size, {})
            cells.append(_us(by_method["sequential"]["us"] if by_method else None))
            cells += [c for f in families[machine] for c in f.add(op, size, by_method, sms)]
        lines.append(cells)
    lines.append(
        ["mean", *(c for of_machine in families.values() for c in ["", *(m for f in of_machine for m in f.means())])]
    )
    head = ["M×N×K"]
    for machine in machines:
        head.append(f"{worlds[machine]} GPUs: cuBLAS + NCCL")
        head += [t for f in families[machine] for t in (f"by {f.title}", "of its bound")]
    goals = [f.judgement(op, worlds[m]) for m, of_machine in families.items() for f in of_machine if f.speedups]
    return section(OPS[op], grid(head, lines, 1), level=4), goals


def ablations(cases_by_op: CasesByOp) -> str:
    """Return the table of ratios of the mean time with fixed groups to the mean time with the default groups, and of
    the best fixed groups of each shape."""
    lines, usual = [], f"default, {EQUAL} CTAs"
    for (op, world), c in cases_by_op.items():
        tried = [by_method for by_method in c.values() if usual in by_method and any(n in by_method for n in FIXED)]
        cells = [
            _x(mean(by_method[n]["us"] / by_method[usual]["us"] for by_method in tried if n in by_method))
            for n in FIXED
        ]
        best = mean(
            min(by_method[n]["us"] for n in FIXED if n in by_method) / by_method[usual]["us"] for by_method in tried
        )
        lines.append([OPS[op], str(world), *cells, _x(best)])
    return grid(["op", "GPUs", *FIXED, "best of these"], lines, 1)


def plot(cases_by_op: dict[str, Cases], world: int, path: Path) -> None:
    """Draw the speedup of the best signaled plan as a function of K, with a line for each M N and a panel for each
    op."""
    figure = svg.figure(11, 3.1)
    panels = figure.subplots(1, len(cases_by_op), squeeze=False, sharey=True)[0]
    for axes, (op, c) in zip(panels, cases_by_op.items(), strict=True):
        lines: dict[int, list[tuple[int, float]]] = {}
        for (m, n, k), by_method in c.items():
            speedup = by_method["sequential"]["us"] / min(r["us"] for r in in_rows(by_method))
            lines.setdefault(m * n, []).append((k, speedup))
        for i, (mn, points) in enumerate(sorted(lines.items())):
            ks, speedups = zip(*sorted(points), strict=True)
            axes.plot(ks, speedups, marker="o", ms=3, color=SHADES[i % len(SHADES)], label=f"{mn >> 20} Mi")
        ticks = sorted({k for _, _, k in c})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(k) for k in ticks], fontsize=8)
        axes.minorticks_off()
        axes.axhline(1, color="#444444", lw=0.8, ls=":", label="cuBLAS + NCCL")
        axes.set_xlabel("K", fontsize=9)
        axes.set_title(f"{OPS[op]}, {world} GPUs", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("times as fast", fontsize=9)
    panels[0].legend(title="M N", title_fontsize=8, fontsize=8, frameon=False, loc="lower right")
    svg.save(figure, path)


def explained() -> str:
    return section(
        "Ops",
        "The tables compare the fastest of the measured signaled plans with cuBLAS + NCCL. For all-to-all they compare it with weft's "
        "sequential plan: cuBLAS's GEMM, a reordering of the rows, and NCCL's all-to-all. M, N and K are the sizes of one rank's "
        f"GEMM. All results are in ordinary order. Fixed groups were measured with {EQUAL} CTAs only.",
        "*Of its bound* is the bound divided by the time. The bound is the larger of two sums: the time of the GEMM plus the time of the "
        "last group's collective, and the time of the first group's GEMM plus the time of all collectives. (In a reduce-scatter by copies "
        "a rank computes its own rows last and does not send them, so the first sum is the GEMM's time alone.) A group's share of a time "
        "is its share of the tiles. A plan with few groups has a bound that is easy to reach. Therefore *of one wave's* uses the first "
        "and the last wave of tiles in place of the first and the last group. The times in the bound are of cuBLAS on all SMs and of NCCL "
        "without a limit on CTAs, each measured alone, so copies that are faster than NCCL can exceed the bound.",
    )


def every_op(machines: dict[str, list[Row]], sms: int) -> tuple[str, list[list[str]]]:
    """Return the sections of all ops, and the rows that compare their plans with the goal."""
    worlds = {machine: rows[0]["world"] for machine, rows in machines.items()}
    by_machine = {machine: op_cases(rows) for machine, rows in machines.items()}
    text, goals = "", list[list[str]]()
    for op in (AR, RS, A2A):
        cases_by_machine = {machine: of_op[op] for machine, of_op in by_machine.items() if op in of_op}
        if cases_by_machine:
            table, judgements = op_table(op, cases_by_machine, worlds, sms)
            text, goals = text + table, goals + judgements
    return text, goals


def ops(machines: dict[str, list[Row]], sms: int) -> str:
    """Return the machines and dates of the measurements, the tables of the ops, and the sections that follow the
    tables."""
    tables, goals = every_op(machines, sms)
    text = blocks(
        *(measured([r for r in rows if r["part"] == "ops"]) for rows in machines.values()),
        *(EARLIER[machine] for machine in machines if machine in EARLIER),
    )
    cases_by_op = {(op, rows[0]["world"]): c for rows in machines.values() for op, c in op_cases(rows).items()}
    text += tables + section("Against the goal", *against_the_goal(goals), level=4)
    return text + section(
        "Fixed groups",
        "The table shows the mean time with fixed groups divided by the mean time with the default groups (up to four, the last of one "
        f"wave), all with {EQUAL} CTAs. Above 1 the default groups are faster (as in the paper's Figure 14). *A wave a group* has at most "
        "16 groups, the last of which contains all remaining waves. *First wave* and *last wave* have two groups, one of which is that "
        "wave. The last column uses the fastest of the five for each shape.",
        ablations(cases_by_op),
        level=4,
    )


def against_the_goal(goals: list[list[str]]) -> list[str]:
    head = ["op", "GPUs", "moved by", "of the bound, mean", "least", "most", "of one wave's, mean", f"{BOUND_GOAL:.0%}"]
    return [
        f"The goal is {BOUND_GOAL:.0%} of the bound in the mean, and speedups up to 1.6x; the paper reports 69 to 98%, and 1.30x on NVLink. "
        "The best plans reach:",
        grid([*head, "speedup, mean", "most", "lost on"], goals, 3),
    ]


def measured(rows: Sequence[Row]) -> str:
    commits, dates = sorted({r["commit"][:10] for r in rows}), sorted({r["date"][:10] for r in rows})
    return f"{rows[0]['world']} x {rows[0]['gpu']}, measured {listed(dates)} at {listed(f'`{c}`' for c in commits)}."


def of_last_run(rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["run"] == rows[-1]["run"]]


def digest(machines: dict[str, list[Row]], sms: int) -> str:
    """Return the part of the chapter that the page of measurements shows."""
    _, goals = every_op(machines, sms)
    plots = (f"![signaled plans](img/signaled-{machine}.svg)" for machine in machines)
    every = f"[Every size](../{TABLES})."
    sentence, _ = against_the_goal(goals)
    head = ["op", "GPUs", "moved by", "of the bound, mean", "speedup, mean", "most", "lost on"]
    means = grid(head, [[*goal[:4], *goal[-3:]] for goal in goals], 3)
    return "## Signaled plans\n\n" + blocks(*INTRODUCTION, *plots, sentence, means, every)


def chapter(machines: dict[str, list[Row]], sms: int) -> str:
    text = "# Signaled plans\n\n" + blocks(*(part.replace("(guide", "(../../docs/guide") for part in INTRODUCTION))
    last = max(
        (of_last_run([r for r in rows if r["part"] == "gemm"]) for rows in machines.values()),
        key=lambda rows_of_run: max((r["date"] for r in rows_of_run), default=""),
    )
    if last:
        text += gemm(last, sms) + "\n" + blocks(measured(last))
    return text + explained() + "\n" + ops(machines, sms)


def op_cases(rows: Sequence[Row]) -> dict[str, Cases]:
    cases_by_op = {op: cases(rows, "ops", op) for op in (AR, RS, A2A)}
    return {op: c for op, c in cases_by_op.items() if c}


def machines() -> dict[str, list[Row]]:
    """Return rows by machine, for all machines that have some."""
    return {path.parent.name: load(path) for path in sorted(RESULTS.glob("*/signaled"))}


def sms() -> int:
    """Return the number of SMs of the GPU that ran these rows."""
    profile = shipped(next(iter(machines())))
    assert profile is not None
    return profile.machine.sms


def plots(folder: Path) -> list[Path]:
    paths = []
    for machine, rows in machines().items():
        paths.append(folder / f"signaled-{machine}.svg")
        plot(op_cases(rows), rows[0]["world"], paths[-1])
    return paths
