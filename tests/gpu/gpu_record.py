"""Add the results of gpu/run.sh to tests/gpu_record.json: python -m tests.gpu.gpu_record RESULTS.json ...

"checks" contains, for each number of ranks and GPUs ("4 ranks on 1 GPU": they share it), the newest row of every check:
outcome, version of weft (the name of the code in src/weft), date, machine, seconds, the parts of weft whose kernels the
check launched, error and bound, and the reason of a failure. A check that both failed and passed in one run has failed.
"fuzz" contains the sums of random calls over all runs, by version, ranks and kind; each run counts once. "runs"
contains the newest runs, with the versions of torch, Triton, CUDA and NCCL, and "tree" the newest run's version of
weft. The minutes of every part are added to tests/trends.csv. tests/gpu_record-2026-11.json is an older record, from
before ranks shared GPUs as processes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.gpu.gpu_queue import RECORD, Row, placed
from tests.tooling.trends import note

KEPT = 12  # the number of runs on record
FIELDS = ("outcome", "date", "seconds", "parts", "error", "bound", "why")


def fuzzed(runs: list[dict[str, Any]], tree: str, gpus: int, old: dict[str, Any]) -> dict[str, Any]:
    """Return the sums of random calls of these runs and all earlier runs. A run that did not end properly counts as one
    wrong call."""
    trees = {name: dict(counts) for name, counts in old.get("trees", {}).items()}
    for run in runs:
        place = placed(run["world"], min(run["world"], gpus))
        name = f"{place}, seed {run['seed']}"
        counts_of_tree = trees.setdefault(tree, dict(calls=0, wrong=0, runs=[], failed=[]))
        if name in counts_of_tree["runs"]:
            continue
        counts_of_tree["calls"] += run["calls"]
        counts_of_tree["wrong"] += run["wrong"] + bool(run["ended"])
        counts_of_tree["runs"] = [*counts_of_tree["runs"], name]
        counts_of_tree["failed"] = [
            *counts_of_tree["failed"],
            *run["failed"],
            *([f"{name}: {run['ended']}"] if run["ended"] else []),
        ]
        kinds = counts_of_tree.get("kinds", {})
        counts_of_tree["kinds"] = kinds | {place: dict(Counter(kinds.get(place, {})) + Counter(run["kinds"]))}
    return {key: sum(counts[key] for counts in trees.values()) for key in ("calls", "wrong")} | dict(trees=trees)


def with_results(results: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the results of one run."""
    checks = {place: dict(rows) for place, rows in old.get("checks", {}).items()}
    new: dict[tuple[str, str], Row] = {}
    for row in results["rows"]:
        place = placed(row["ranks"], row["gpus"], results["versions"]["triton"]) + row.get("like", "")  # gpu_older.py
        if new.get((place, row["check"]), row)["outcome"] == "failed":
            row = new.get((place, row["check"]), row)
        new[place, row["check"]] = row
    for (place, name), row in new.items():
        known = {key: row[key] for key in FIELDS if key in row}
        checks.setdefault(place, {})[name] = dict(known, tree=results["tree"][:12], machine=results["machine"])
    outcomes = Counter(row["outcome"] for row in new.values())
    run = {key: results[key] for key in ("date", "tree", "machine", "versions", "minutes", "trouble")}
    gpus = int(results["machine"].split()[0])
    return dict(
        tree=results["tree"],
        checks=checks,
        fuzz=fuzzed(results["fuzz"], results["tree"], gpus, old.get("fuzz", {})),
        runs=[dict(run, passed=outcomes["passed"], failed=outcomes["failed"]), *old.get("runs", [])][:KEPT],
    )


def is_known(results: dict[str, Any], record: dict[str, Any]) -> bool:
    """Return whether the record already contains these results."""
    run = {key: results[key] for key in ("date", "tree", "machine", "minutes")}
    return any(run == {key: old.get(key) for key in run} for old in record.get("runs", []))


def text(record: dict[str, Any]) -> str:
    """Return JSON with one line per check."""
    blocks = []
    for place, rows in sorted(record["checks"].items()):
        entries = ",\n".join(
            f"   {json.dumps(name)}: {json.dumps(rows[name], sort_keys=True)}" for name in sorted(rows)
        )
        blocks.append(f"  {json.dumps(place)}: {{\n{entries}\n  }}")
    rest = json.dumps({key: record[key] for key in ("fuzz", "runs")}, indent=1)
    return (
        f'{{\n "tree": {json.dumps(record["tree"])},\n "checks": {{\n' + ",\n".join(blocks) + "\n }," + rest[1:] + "\n"
    )


def main() -> None:
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for path in map(Path, sys.argv[1:]):
        results = json.loads(path.read_text())
        if is_known(results, record):
            continue
        record = with_results(results, record)
        for part, minutes in results["minutes"].items():
            note(f"gpu/run.sh {part}", minutes, results["tree"], results["date"][:10])
    RECORD.write_text(text(record))
    newest = record["runs"][0]["tree"][:12]
    for place, rows in sorted(record["checks"].items()):
        outcomes = Counter(row["outcome"] for row in rows.values() if row["tree"] == newest)
        older = sum(row["tree"] != newest for row in rows.values())
        print(
            f"{place}: {outcomes['passed']} passed, {outcomes['failed']} failed, {older} with an earlier version only"
        )


if __name__ == "__main__":
    main()
