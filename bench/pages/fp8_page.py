"""The tables of docs/fp8.md, from bench/results/<machine>: GEMMs of 8-bit operands on one GPU, and the cost of quantizing inside SiLU-mul
and norm (fp8.jsonl, of bench/measure/fp8.py); operators over several ranks (fp8_ranks.jsonl, of bench/measure/fp8_ranks.py).

The newest row of a size, which is the last in the file, counts. A recipe that was not measured has no row, and a table
without rows is "".
"""

from __future__ import annotations

from statistics import median

from bench.measure.fp8 import plan_label
from bench.pages.report import OPS, mean
from bench.pages.tables import Rows, grid
from weft.ops.scaled_gemm import PROMOTED, WIDE

RECIPES = {
    "tensor": ("by tensor", WIDE),
    "row": ("by row", WIDE),
    "slow": ("by row, promoted", PROMOTED),
    "block": ("by block", PROMOTED),
}
AUTO, TORCH = "weft auto", "torch symm_mem"
KERNELS = {"silu_mul": "`silu_mul`", "norm": "add + norm"}
SCALINGS = ("row", "block", "tensor")
OF_RANKS = '`plan="auto"`, times as fast:\n\n'
Ratios = list[tuple[float, str]]  # each ratio with its size


def gemms(lines: Rows) -> str:
    """Return the table that compares, for each recipe, weft's own kernel with its best tile, and "auto", with the best
    library."""
    newest = {(r["name"], r["M"], r["N"], r["K"]): r for r in lines if r["name"] != "quantizing"}
    rows = [row for row in (recipe_row(recipe, list(newest.values())) for recipe in RECIPES) if row]
    head = ["recipe", "sizes", "own over best library, mean", "lowest (MxNxK)", "auto over best library, mean"]
    return "times as fast:\n\n" + grid([*head, "lowest (MxNxK)", "own, mean TFLOP/s"], rows) if rows else ""


def recipe_row(recipe: str, lines: Rows) -> list[str]:
    """Return the row of a recipe in the table; empty if nothing was measured. The row mentions an earlier kernel if no
    stored row has one of the current tiles."""
    name, plans = RECIPES[recipe]
    tiles = {plan_label(plan) for plan in plans}
    best_ratios, auto, rates, earlier = [], [], [], False
    for r in lines:
        us = {way.removeprefix(f"{recipe}: "): t for way, t in r["us"].items() if way.startswith(f"{recipe}: ")}
        weft = {way: t for way, t in us.items() if way.startswith("weft ") and way != AUTO}
        library = min((t for way, t in us.items() if not way.startswith("weft ")), default=None)
        todays = [t for way, t in weft.items() if way.removesuffix(" columns") in tiles]
        if library is None or not weft:
            continue
        earlier = earlier or not todays
        best, size = min(todays or weft.values()), size_of(r)
        best_ratios.append((library / best, size))
        auto.append((library / us[AUTO], size))
        rates.append(2e-6 * r["M"] * r["N"] * r["K"] / best)
    if not rates:
        return []
    cells = [f"{name}{', an earlier kernel' * earlier}", str(len(best_ratios))]
    return [*cells, *mean_and_lowest(best_ratios), *mean_and_lowest(auto), f"{mean(rates) or 0:.0f}"]


def size_of(row: dict) -> str:
    return f"{row['M']}x{row['N']}x{row['K']}"


def mean_and_lowest(ratios: Ratios) -> list[str]:
    """Return two cells, which are empty if there are no ratios."""
    if not ratios:
        return ["", ""]
    least, size = min(ratios)
    return [f"{mean(ratio for ratio, _ in ratios) or 0:.2f}x", f"{least:.2f}x ({size})"]


# -- quantizing inside another kernel ----------------------------------------------------------------------------------
def quantizing(lines: Rows) -> str:
    """Return the sentence that compares SiLU-mul and norm with 8-bit results to the same kernels with 16-bit results,
    and to these kernels followed by `weft.quantize`; "" if they were not measured."""
    newest = {size_of(r): r["us"] for r in lines if r["name"] == "quantizing"}
    if not newest:
        return ""
    kernels = [f"{title}: {', '.join(cost_of(kernel, list(newest.values())))}" for kernel, title in KERNELS.items()]
    sizes = f"{len(newest)} size{'s' * (len(newest) > 1)}"
    head = "time of a kernel that also quantizes, divided by the time of the kernel alone, or of the kernel "
    head += f"followed by `weft.quantize`; means of {sizes}. "
    return head + "; ".join(kernels) + "."


def cost_of(kernel: str, times: list[dict[str, float]]) -> list[str]:
    """Return the two ratios of a kernel for each recipe."""
    parts = []
    for recipe in SCALINGS:
        known = [us for us in times if f"quantize after {kernel}, {recipe}" in us]
        over = mean(us[f"{kernel}, {recipe}"] / us[kernel] for us in known)
        apart = mean(us[f"{kernel}, {recipe}"] / (us[kernel] + us[f"quantize after {kernel}, {recipe}"]) for us in known)  # fmt: skip
        parts += [f"by {recipe} {over:.2f}x and {apart:.2f}x"] if over and apart else []
    return parts


# -- several ranks -----------------------------------------------------------------------------------------------------
def ranks(lines: Rows) -> str:
    """Return the table with a row for each op and recipe in CUDA graphs, and in eager mode if torch's operator was
    measured only in that mode."""
    newest = {(r["op"], r["recipe"], r["mode"], r["name"], size_of(r)): r for r in lines}
    rows = []
    for op in OPS:
        for recipe in SCALINGS:
            of_recipe = [r for r in newest.values() if (r["op"], r["recipe"]) == (op, recipe)]
            rows += [ranks_row(op, recipe, mode, of_recipe) for mode in modes_of(of_recipe)]
    head = ["", "scales by", "sizes", "over sequential, mean", "lowest (MxNxK)", "over torch's, mean", "lowest (MxNxK)"]
    head += ["to the limit, median", "over bfloat16's, mean"]
    return f"{OF_RANKS}{grid(head, rows)}\n\n{eager(list(newest.values()))}".rstrip() if rows else ""


def eager(rows: Rows) -> str:
    """Return the sentence on eager calls, which the host slows down: the range of speedups over sequential for each
    recipe; "" if none were measured."""
    parts, every = [], []
    for recipe in SCALINGS:
        of_recipe = [r for r in rows if r["recipe"] == recipe and r["mode"] == "eager" and AUTO in r["us"]]
        ratios = [ratio for ratio, _ in over_auto("sequential", of_recipe)]
        every += ratios
        parts += [f"by {recipe} {min(ratios):.2f}x to {max(ratios):.2f}x"] if ratios else []
    slower = sum(ratio < 1 for ratio in every)
    return f"In eager calls, over sequential: {', '.join(parts)}; {slower} of {len(every)} are slower." if parts else ""


def modes_of(rows: Rows) -> list[str]:
    """Return the modes to show: graphs, if any were measured, and eager calls if torch's operator was measured only
    there."""
    with_torch = {mode: any(TORCH in r["us"] for r in rows if r["mode"] == mode and AUTO in r["us"]) for mode in ("graph", "eager")}  # fmt: skip
    measured = {r["mode"] for r in rows if AUTO in r["us"]}
    graph = ["graph"] if "graph" in measured else []
    return (
        [*graph, "eager"] if "eager" in measured and (not graph or with_torch["eager"] > with_torch["graph"]) else graph
    )


def ranks_row(op: str, recipe: str, mode: str, rows: Rows) -> list[str]:
    """Return a row of the table of several ranks."""
    ours = [r for r in rows if r["mode"] == mode and AUTO in r["us"]]
    over = {way: over_auto(way, ours) for way in ("sequential", TORCH, "bf16 weft auto")}
    shares = [share for share in map(share_of, ours) if share is not None]
    cells = [OPS[op] + ", eager" * (mode == "eager"), recipe, str(len(ours))]
    cells += [*mean_and_lowest(over["sequential"]), *mean_and_lowest(over[TORCH])]
    return [*cells, f"{100 * median(shares):.0f}%" if shares else "", mean_and_lowest(over["bf16 weft auto"])[0]]


def over_auto(way: str, rows: Rows) -> Ratios:
    """Return the ratio of the time of a method to the time of "auto", for each size with both."""
    return [(r["us"][way] / r["us"][AUTO], size_of(r)) for r in rows if way in r["us"]]


def share_of(row: dict) -> float | None:
    """Return the share that "auto" saved of the time that overlap could save; None if there is nothing to save."""
    base, limit = row["us"]["sequential"], row["limit_us"]
    return (base - row["us"][AUTO]) / (base - limit) if limit < base else None


TABLES = (("fp8.jsonl", gemms), ("fp8.jsonl", quantizing), ("fp8_ranks.jsonl", ranks))
