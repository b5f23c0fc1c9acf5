"""quack's GEMM is compared with others, in tables next to the results and in a sentence of docs/guide.md: GEMMs alone,
from bench/results/<machine>/quack/gemms.jsonl (a script of the commit that its rows name), and all-gather + GEMM, from
all_gather_matmul.jsonl there (bench/measure/run.py --ops all_gather_matmul --methods auto flag_gated quack).

The newest line of a shape, or of an op, name, mode and method, which is the last in the file, counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bench.pages.report import mean
from bench.pages.tables import Rows, grid, page

OWN = (
    "flat",
    "told",
    "shared",
)  # the names of weft's loops in the rows: flattened, notifying, and with shared last tiles


def least(times: Iterable[tuple[str, float]]) -> tuple[str, float]:
    return min(times, key=lambda named: named[1])


TABLES = "bench/results/quack.md"
FILES = {"gemms": "quack/gemms.jsonl", "gathered": "quack/all_gather_matmul.jsonl"}
CHAPTER = """# quack's GEMM

Form by form, of each shape the fastest; `quack's own` is its `AllGatherRunner`, in which the owner of a shard pushes it. All methods of a
shape were interleaved in one run.

"""


def chapter(results: Path) -> str:
    return CHAPTER + "\n\n".join(page(results, FILES[make.__name__], make) for make in (gemms, gathered)) + "\n"


def digest(results: Path) -> str:
    """Return the sentence of geometric means, from the last line of each table."""
    alone, together = (page(results, FILES[make.__name__], make).splitlines() for make in (gemms, gathered))
    cells = [[cell.strip() for cell in lines[-1].split("|")[1:-1]] for lines in (alone, together)]
    shapes = [sum(line.startswith("| ") for line in lines) - 3 for lines in (alone, together)]
    return (
        f"Geometric means: quack's GEMM is **{cells[0][4]}** as fast as cuBLAS on {shapes[0]} shapes on one GPU, weft's own GEMM **{cells[0][5]}**. On two"
        f' GPUs all-gather + GEMM by `"auto"` is **{cells[1][6]}** as fast with quack as without on {shapes[1]} shapes, and **{cells[1][7]}** as'
        f" fast as quack's own `AllGatherRunner` ([tables](../{TABLES}))."
    )


def gemms(lines: Rows) -> str:
    """Return the table of GEMMs: cuBLAS, the best of quack's forms, the best of weft's own loops."""
    newest = {(r["M"], r["N"], r["K"]): r["us"] for r in lines}
    rows, ratios = [], []
    for (m, n, k), us in newest.items():
        form, quack = least((name.removeprefix("quack "), t) for name, t in us.items() if name.startswith("quack"))
        _, weft = least((name, t) for name, t in us.items() if name.split()[0] in OWN)
        ratios.append((us["cuBLAS"] / quack, us["cuBLAS"] / weft, min(us["cuBLAS"], quack) / weft))
        rows.append([f"{m} x {n} x {k}", f"{us['cuBLAS']:.0f}", f"{quack:.0f} ({form})", f"{weft:.0f}"])
        rows[-1] += [f"{ratio:.2f}x" for ratio in ratios[-1]]
    rows.append(["geometric mean", "", "", "", *(f"{mean(column) or 0:.2f}x" for column in zip(*ratios, strict=True))])
    head = ["M x N x K", "cuBLAS", "quack, best form", "weft's own, best tile", "quack over cuBLAS", "own over cuBLAS"]
    return "us:\n\n" + grid([*head, "own over the better of both"], rows)


def gathered(lines: Rows) -> str:
    """Return the table of all-gather + GEMM. All methods of a shape were interleaved; if quack has several forms, the
    fastest counts."""
    newest = {(r["name"], r["mode"], r["method"]): r["us"] for r in lines if r["op"] == "all_gather_matmul"}
    rows, ratios = [], []
    for name, mode in dict.fromkeys((name, mode) for name, mode, _ in newest):
        us = {method: t for (n, m, method), t in newest.items() if (n, m) == (name, mode)}
        forms = {way: least((f, t) for f, t in us.items() if f.startswith(way))[1] for way in ("flag_gated", "quack")}
        ratios.append((us["auto without quack"] / us["auto"], forms["quack"] / us["auto"]))
        times = [us["sequential"], us["auto without quack"], us["auto"], forms["flag_gated"], forms["quack"]]
        rows.append([name, *(f"{t:.0f}" for t in times), *(f"{ratio:.2f}x" for ratio in ratios[-1])])
    means = (f"{mean(column) or 0:.2f}x" for column in zip(*ratios, strict=True))
    rows.append(["geometric mean", *[""] * 5, *means])
    head = [
        "shape",
        "cuBLAS + NCCL",
        '"auto" without quack',
        '"auto"',
        '"flag_gated"',
        "quack's own",
        '"auto": with over without',
    ]
    return "us, CUDA graph:\n\n" + grid([*head, '"auto" over quack\'s own'], rows)
