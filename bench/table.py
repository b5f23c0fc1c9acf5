"""Make `src/weft/plan/tables/<gpu>.json` from tuning runs: python bench/table.py GPU

Reads bench/results/<gpu>-x*/tuning/*.jsonl (written by bench/run.py --tune) in order of name: per op, shape, world and mode the
fastest plan of the newest file. A row whose plan was slower than cuBLAS + NCCL in the benchmark beside it
(bench/results/<gpu>-x*/<op>.jsonl) becomes sequential.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
SEQUENTIAL = '{"kind": "sequential"}'
KEY = ("op", "world", "M", "N", "K", "mode")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tuned(folders: list[Path]) -> dict[tuple, dict]:
    best: dict[tuple, dict] = {}
    for path in [p for folder in folders for p in sorted((folder / "tuning").glob("*.jsonl"))]:
        for r in lines(path):
            times = {p: t for p, t in r["times"].items() if p.startswith("{")}
            plan = min(times, key=lambda p: times[p])
            row = {k: r[k] for k in ("op", "name", "world", "M", "N", "K", "mode")}
            row |= {
                "plan": json.loads(plan),
                "us": round(times[plan], 1),
                "speedup": round(times[SEQUENTIAL] / times[plan], 4),
            }
            best[tuple(r[k] for k in KEY)] = row
    return best


def vetoed(folders: list[Path]) -> set[tuple]:
    """Keys of shapes where "auto", with a plan of its own, lost to cuBLAS + NCCL in the benchmark."""
    times: dict[tuple, dict[str, float]] = {}
    for path in [p for folder in folders for p in sorted(folder.glob("*.jsonl"))]:
        for r in lines(path):
            times.setdefault(tuple(r[k] for k in KEY), {})[r["method"]] = r["us"]
    return {key for key, t in times.items() if t.get("auto", 0.0) > t.get("sequential", float("inf"))}


def main() -> None:
    (gpu,) = sys.argv[1:]
    folders = sorted((HERE / "results").glob(f"{gpu}-x*"))
    best = tuned(folders)
    for key in vetoed(folders) & best.keys():
        best[key] |= {"plan": json.loads(SEQUENTIAL), "speedup": 1.0}
    out = HERE.parent / "src/weft/plan/tables" / f"{gpu}.json"
    out.write_text("[\n" + ",\n".join(json.dumps(best[key]) for key in sorted(best)) + "\n]\n")
    print(f"{len(best)} rows -> {out}")


if __name__ == "__main__":
    main()
