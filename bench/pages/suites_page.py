"""The table of bench/results/torch_suites.md: torch's own tests of its fused operators, from bench/results/<machine>/torch_suites.jsonl
(tests/gpu/gpu_torch_suites.py).

The newest line of a suite, test, way and number of ranks, which is the last in the file, counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from bench.pages.tables import Rows, grid

TITLES = {"torch": "torch alone", "weft": "weft in place", "bfloat16": "weft in place, bfloat16"}
Key = tuple[str, str, int]  # suite, way, ranks (1 for a fake process group)


TABLE = "bench/results/torch_suites.md"
TITLE = "# torch's own tests of its fused operators\n\n"


def suites(lines: Rows) -> str:
    """Return the table with a line for each suite and way, the tests that failed, and the reasons for calls that torch
    itself ran."""
    newest = {(r["suite"], r["test"], r["way"], r["world"]): r for r in lines}
    by_key: dict[Key, Rows] = {}
    for (suite, _, way, world), row in newest.items():
        by_key.setdefault((suite, way, world), []).append(row)
    rows = []
    for (suite, way, world), results in sorted(
        by_key.items(), key=lambda item: (item[0][0], [*TITLES].index(item[0][1]))
    ):
        outcomes = Counter(row["outcome"] for row in results)
        calls = [sum(sum(row.get(kind, {}).values()) for row in results) for kind in ("served", "fell_through")]
        counted = [""] * 2 if way == "torch" else map(str, calls)
        group = "fake" if world == 1 else f"{world} GPUs"
        rows.append([f"`{suite}`", group, TITLES[way], *(str(outcomes[o]) for o in ("passed", "failed", "skipped"))])
        rows[-1] += counted
    head = ["suite", "process group", "", "passed", "failed", "skipped", "calls served", "calls by torch"]
    versions = ", ".join(dict.fromkeys(row["torch"] for row in newest.values()))
    parts = [grid(head, rows), *failures(newest.values()), reasons(newest.values())]
    return f"torch {versions}:\n\n" + "\n\n".join(filter(None, parts))


def failures(rows: Iterable[dict]) -> list[str]:
    """Return the sentences on the tests that fail with torch alone, and on the tests that fail only with weft."""
    failed: dict[str, set[str]] = {way: set() for way in TITLES}
    for row in rows:
        if row["outcome"] == "failed":
            failed[row["way"]].add(row["test"])
    ours = (failed["weft"] | failed["bfloat16"]) - failed["torch"]
    groups = (("torch alone fails in", failed["torch"]), ("Only with weft fail", ours))
    return [f"{title}: {', '.join(f'`{name}`' for name in sorted(names))}." for title, names in groups if names]


def reasons(rows: Iterable[dict]) -> str:
    """Return the sentence with the reasons why torch itself ran calls although weft was enabled."""
    counts: Counter[str] = Counter()
    for row in rows:
        for call, n in row.get("fell_through", {}).items():
            counts[call.split(": ", 1)[1]] += n
    return f"Calls by torch: {', '.join(f'{n} ({why})' for why, n in counts.most_common())}." if counts else ""
