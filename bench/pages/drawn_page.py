"""The tables of bench/results/drawn.md: sizes that nobody tuned for, from bench/results/<machine>/drawn.jsonl.

The rows are those of `bench.measure.run --drawn SEED`, with the seed. The newest run of a size, op and mode counts.
"""

from __future__ import annotations

from bench.pages.report import HASH, OPS, mean
from bench.pages.tables import Rows, grid

TABLE = "bench/results/drawn.md"
TITLE = """# Sizes drawn at random

Tokens are multiples of 64, log-uniform from 128 to 16,384, hidden sizes multiples of 256 from 2,048 to 12,288, and intermediate sizes 2 to
4.5 times as large. Ratios are of the times of cuBLAS and NCCL, one after the other, or of the best library (torch's symmetric memory, if it
is faster), to those of `plan="auto"` in the same run. Seed 271127 was chosen after the planner of `91898b0e` was committed; then 57 of
its 60 graphs reached 0.98x, and the others 0.91x, 0.93x and 0.97x. The planner of `05d2da9e` was changed for these three, which were measured
again with one size of the other seed. Seed 20261128 was measured once, after the planner's last change (`9f8153e7`): 60 of its 60 graphs
and 53 of its 60 eager calls reached 0.98x. Its timed eager calls, unlike those of the other seeds, follow a call that is not timed, in which
the ranks wait for one another.

On 2 GPUs seed 281126 was measured once, in eager mode: 56 of its 60 eager calls reached 0.98x. Of the eager calls of models' GEMMs
(eager.jsonl of each machine), 125 of 127 reached 0.98x of cuBLAS and NCCL on 2 GPUs (`15d7f5a7`). On 4 GPUs 86 of 86 did, all of them with
an all-gather or a reduce-scatter (`ebf52f65`).

"""
BASELINE, OURS = "sequential", "auto"
WORTH = 0.98


def drawn(lines: Rows) -> str:
    """Return a table with a line for each seed, mode and op, and, by seed, the sizes below WORTH of the best library."""
    runs: dict[tuple[int, str, str, tuple[int, int, int]], dict[str, dict]] = {}
    for row in lines:
        key = row["seed"], row["mode"], row["op"], (row["M"], row["N"], row["K"])
        if row["date"] > max((known["date"] for known in runs.get(key, {}).values()), default=""):
            runs[key] = {}
        runs[key][row["method"]] = row
    groups: dict[tuple[int, str, str], dict[tuple[int, int, int], dict[str, dict]]] = {}
    for (seed, mode, op, size), methods in runs.items():
        groups.setdefault((seed, mode, op), {})[size] = methods
    table, slower = [], dict[int, list[str]]()
    for (seed, mode, op), sizes in sorted(groups.items(), key=lambda group: (group[0][:2], [*OPS].index(group[0][2]))):
        ours = {size: methods[OURS]["us"] for size, methods in sizes.items()}
        to_nccl = [methods[BASELINE]["us"] / ours[size] for size, methods in sizes.items()]
        to_best = {size: best(methods) / ours[size] for size, methods in sizes.items()}
        low = {size: ratio for size, ratio in to_best.items() if ratio < WORTH}
        commits = sorted({methods[OURS]["commit"][:HASH] for methods in sizes.values()})
        counts = f"{len(sizes) - len(low)} of {len(sizes)}"
        ratios = f"**{mean(to_nccl):.2f}x**", f"{mean(to_best.values()):.2f}x", f"{min(to_best.values()):.2f}x"
        table.append([str(seed), OPS[op], mode, *ratios, counts, ", ".join(f"`{commit}`" for commit in commits)])
        for size, ratio in sorted(low.items()):
            text = f"{OPS[op]} {'x'.join(map(str, size))} ({mode}) {ratio:.2f}x, {ours[size]:.0f} us"
            slower.setdefault(seed, []).append(text)
    head = ["seed", "", "mode", "cuBLAS + NCCL", "best library", "lowest", f"at least {WORTH}x", "commit"]
    lists = [f"Seed {seed}, below {WORTH}x of the best library: {'; '.join(sizes)}." for seed, sizes in slower.items()]
    return "\n\n".join([f"geometric means:\n\n{grid(head, table)}", *lists])


def best(methods: dict[str, dict]) -> float:
    return min(row["us"] for method, row in methods.items() if method != OURS)
