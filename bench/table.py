"""Make `src/weft/plan/tables/<gpu>.json` from the results of bench/run.py --tune: python bench/table.py GPU SWEEP.jsonl..."""

from __future__ import annotations

import json
import sys
from pathlib import Path

SEQUENTIAL = '{"kind": "sequential"}'


def rows(paths: list[str]) -> list[dict]:
    """One row a (op, world, shape, mode): the fastest plan; later files replace earlier ones."""
    best: dict[tuple, dict] = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            r = json.loads(line)
            times = {p: t for p, t in r["times"].items() if p.startswith("{")}
            plan = min(times, key=lambda p: times[p])
            row = {k: r[k] for k in ("op", "name", "world", "M", "N", "K", "mode")}
            row |= {"plan": json.loads(plan), "us": round(times[plan], 1), "speedup": round(times[SEQUENTIAL] / times[plan], 4)}
            best[r["op"], r["world"], r["M"], r["N"], r["K"], r["mode"]] = row
    return [best[key] for key in sorted(best)]


def main() -> None:
    gpu, *paths = sys.argv[1:]
    out = Path(__file__).parent.parent / "src/weft/plan/tables" / f"{gpu}.json"
    found = rows(paths)
    out.write_text("[\n" + ",\n".join(json.dumps(r) for r in found) + "\n]\n")
    print(f"{len(found)} rows -> {out}")


if __name__ == "__main__":
    main()
