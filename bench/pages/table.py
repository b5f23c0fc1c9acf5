"""Make `src/weft/planner/tables/<gpu>.json` from tuning runs: python -m bench.pages.table GPU

The program reads bench/results/<gpu>-x*/tuning/*.jsonl (of bench/measure/run.py --tune) in order of name, and keeps for each op, shape,
world and mode the fastest plan of the newest file. A tuning run keeps the fastest of many plans, and the runs on 8 GPUs up to x8-3 compared it with weft's own
sequential plan, which in eager mode costs more host time than torch's own calls. The speedups of those runs are
therefore overstated. A row whose plan the benchmark (bench/results/<gpu>-x*/<op>.jsonl) also compared with torch's own
calls has the benchmark's speedup, and every other row is divided by the largest overstatement of these rows in its
mode. Rows of decoders stay unchanged. Eager rows of shapes whose call waits for the host are left out: their times are
the host's, which the code that launches a call determines as much as the plan, and predictions follow the host's time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.common.stored import plan_of
from bench.pages.tables import lines_of
from weft.planner.table import DECODER, KEY, stored

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "src/weft/planner/tables"
SEQUENTIAL = '{"kind": "sequential"}'
HOST_BOUND = 1.2  # an eager call that takes this many times as long as the fastest call in a graph waits for the host


def tuned(folders: list[Path]) -> dict[tuple, dict]:
    best: dict[tuple, dict] = {}
    for path in [p for folder in folders for p in sorted((folder / "tuning").glob("*.jsonl"))]:
        for r in lines_of(path):
            times = {p: t for p, t in r["times"].items() if p.startswith("{")}
            plan = min(times, key=lambda p: times[p])
            # The nearest shape measured since is a better guide than that run's second best plan.
            if plan_of(r["op"], plan) is None:
                continue
            row = {k: r[k] for k in ("op", "name", "world", "M", "N", "K", "mode")}
            row |= {
                "plan": json.loads(plan),
                "us": round(times[plan], 1),
                "speedup": round(times[SEQUENTIAL] / times[plan], 4),
            }
            best[tuple(r[k] for k in KEY)] = row
    return best


def confirmed(folders: list[Path]) -> dict[tuple, tuple[str, float]]:
    """Return, by shape and mode, the plan that "auto" chose in the benchmark, and its speed relative to torch's cuBLAS
    + NCCL."""
    methods: dict[tuple, dict[str, dict]] = {}
    for path in [p for folder in folders for p in sorted(folder.glob("*.jsonl"))]:
        # Rows with different fields come from other benchmarks.
        ours = (r for r in lines_of(path) if r.get("op") == path.stem and set(KEY) <= r.keys())
        for r in ours:
            methods.setdefault(tuple(r[k] for k in KEY), {})[r["method"]] = r
    return {
        key: (m["auto"]["plan"], m["sequential"]["us"] / m["auto"]["us"])
        for key, m in methods.items()
        if {"auto", "sequential"} <= m.keys() and m["auto"]["plan"]
    }


def table_of(gpu: str) -> tuple[str, str]:
    """Return the text of the table, and a sentence on the table."""
    folders = sorted((ROOT / "bench/results").glob(f"{gpu}-x*"))
    best, known = tuned(folders), confirmed(folders)
    sure = {
        key: speedup
        for key, (text, speedup) in known.items()
        # Texts of equal plans can differ, because an earlier text can have fields that no longer exist.
        if key in best and plan_of(key[0], text) == plan_of(key[0], json.dumps(best[key]["plan"]))
    }
    overstated = {"graph": 1.0, "eager": 1.0}
    for key, speedup in sure.items():
        if best[key]["plan"]["kind"] == "sequential":
            continue
        overstated[key[-1]] = max(overstated[key[-1]], best[key]["speedup"] / speedup)
    best = {key: row for key, row in best.items() if row["us"] < HOST_BOUND * best[(*key[:-1], "graph")]["us"]}
    for key, row in best.items():
        row["speedup"] = round(sure.get(key, row["speedup"] / overstated[key[-1]]), 4)
        row["confirmed"] = key in sure
    rows = [*(row for row in stored(gpu) if row["op"] == DECODER), *(best[key] for key in sorted(best))]
    text = "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"
    return text, f"{len(best)} rows, {len(sure)} confirmed; tuning overstated by up to {overstated}"


def main() -> None:
    (gpu,) = sys.argv[1:]
    text, summary = table_of(gpu)
    (TABLES / f"{gpu}.json").write_text(text)
    print(f"{summary} -> {TABLES / gpu}.json")


if __name__ == "__main__":
    main()
