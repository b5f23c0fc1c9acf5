"""The table of docs/fp8.md: GEMMs of 8-bit operands on one GPU, from bench/results/<machine>/fp8.jsonl (bench/measure/fp8.py).

Of the lines of one size the newest counts, which is the last in the file.
"""

from __future__ import annotations

from bench.measure.fp8 import plan_label
from bench.pages.report import mean
from bench.pages.tables import Rows, grid
from weft.ops.scaled_gemm import PROMOTED, WIDE

RECIPES = {
    "tensor": ("by tensor", WIDE),
    "row": ("by row", WIDE),
    "slow": ("by row, promoted", PROMOTED),
    "block": ("by block", PROMOTED),
}
AUTO = "weft auto"


def gemms(lines: Rows) -> str:
    """Return the table with, for each recipe, weft's own kernel in the best of its tiles and "auto" beside the best of the
    libraries."""
    newest = {(r["name"], r["M"], r["N"], r["K"]): r for r in lines if r["name"] != "quantizing"}
    rows = [recipe_row(recipe, list(newest.values())) for recipe in RECIPES]
    head = ["recipe", "sizes", "own over best library, mean", "lowest (M x N x K)", "auto over best library, mean"]
    return "times as fast:\n\n" + grid([*head, "lowest (M x N x K)", "own, mean TFLOP/s"], rows)


def recipe_row(recipe: str, lines: Rows) -> list[str]:
    """Return a recipe's row of the table. Stored rows that have none of today's tiles are of an earlier kernel, and the table
    says so."""
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
        best, size = min(todays or weft.values()), f"{r['M']} x {r['N']} x {r['K']}"
        best_ratios.append((library / best, size))
        auto.append((library / us[AUTO], size))
        rates.append(2e-6 * r["M"] * r["N"] * r["K"] / best)
    cells = [f"{name}{', an earlier kernel' * earlier}", str(len(best_ratios))]
    for ratios in (best_ratios, auto):
        least, size = min(ratios)
        cells += [f"{mean(ratio for ratio, _ in ratios) or 0:.2f}x", f"{least:.2f}x ({size})"]
    return [*cells, f"{mean(rates) or 0:.0f}"]
