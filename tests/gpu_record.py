"""Write tests/gpu_record.json from the results of gpu/run.sh: python tests/gpu_record.py [--some] DIR [TREE]

Processes that share the checks of one world between them (gpu_main.py --only, --without) write to folders of their own in DIR.
Random calls are added up over all records under "fuzz", and by tree; a run of them counts once. So are repeated checks of ranks that
share a GPU, under "shared". A DIR of these alone adds its own and leaves the rest of the record as it is. So does one whose checks ran
with another Triton than the one that weft is developed with: their counts stand under "triton", by version. And so does one of
some of the checks alone (gpu_record.py --some DIR [TREE]), which stands under "some", the newest first.

The records before it stay in it under "before", without the checks' names, the newest first: some, and of every number of GPUs
the newest.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
KEPT = 6
TRITON = "3.6.0"  # that weft is developed with


def junit(path: Path) -> list[dict]:
    """What pytest reported."""
    rows = []
    for case in ElementTree.parse(path).iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        outcome = "failed" if bad is not None else "skipped" if case.find("skipped") is not None else "passed"
        why = {} if bad is None else {"why": str(bad.get("message"))[:600]}
        rows.append(dict(check=f"{path.stem}: {case.get('name')}", outcome=outcome, **why))
    return rows


def fuzzed(runs: list[dict], tree: str, old: dict) -> dict:
    """The random calls of these runs and all before. One that did not end as it should has made a wrong call."""
    trees = {name: dict(counts) for name, counts in old.get("trees", {}).items()}
    for run in runs:
        name = f"{run['world']} GPUs, seed {run['seed']}"
        here = trees.setdefault(tree, dict(calls=0, wrong=0, runs=[], failed=[]))
        if name not in here["runs"]:
            here["calls"] += run["calls"]
            here["wrong"] += run["wrong"] + bool(run["ended"])
            here["runs"] = [*here["runs"], name]
            here["failed"] = [*here["failed"], *run["failed"], *([f"{name}: {run['ended']}"] if run["ended"] else [])]
    return {key: sum(counts[key] for counts in trees.values()) for key in ("calls", "wrong")} | dict(trees=trees)


def repeated(runs: list[dict], tree: str, old: dict) -> dict:
    """Passes and failures of the checks of ranks that share a GPU, of these runs (tests/gpu_shared.py) and all before, by tree."""
    trees = {name: dict(counts) for name, counts in old.items()}
    for run in runs:
        here = trees.setdefault(tree, dict(runs=[], passed={}, failed={}))
        if run["run"] in here["runs"]:
            continue
        for outcome in ("passed", "failed"):
            new = {name: entry[outcome] for name, entry in run["checks"].items() if entry[outcome]}
            names = sorted({*here[outcome], *new})
            here[outcome] = {name: here[outcome].get(name, 0) + new.get(name, 0) for name in names}
        here["runs"] = [*here["runs"], run["run"]]
    return trees


def with_another(results: Path, machine: dict, tree: str, old: dict) -> dict:
    """The record with the checks that ran with another Triton: how many passed, and what did not."""
    rows = [row for path in sorted(results.glob("world*.json")) for row in json.loads(path.read_text())]
    ran = dict(
        tree=tree, passed=sum(r["outcome"] == "passed" for r in rows), date=datetime.date.today().isoformat(), **machine,
        not_passed=[r for r in rows if r["outcome"] != "passed"],
    )  # fmt: skip
    return dict(old, triton=old.get("triton", {}) | {machine["versions"]["triton"]: ran})


def with_some(results: Path, tree: str, old: dict) -> dict:
    """The record with what a part of the checks said. A check that several runs of DIR made counts as passed only if all passed."""
    machine = json.loads((results / "machine.json").read_text())
    rows: dict[str, dict] = {}
    for path in sorted([*results.rglob("world*.json"), *results.rglob("stalled*.json")]):
        for row in json.loads(path.read_text()):
            name = f"{path.stem}: {row['check']}"
            if row["outcome"] != "skipped" and rows.get(name, {}).get("outcome") != "failed":
                rows[name] = dict(row, check=name)
    bad = [row for row in rows.values() if row["outcome"] != "passed"]
    checks = [name for name, row in rows.items() if row["outcome"] == "passed"]
    ran = dict(
        tree=tree, passed=len(checks), date=datetime.date.today().isoformat(), **machine, not_passed=bad, checks=checks
    )
    return dict(old, some=[ran, *old.get("some", [])][:KEPT])


def record_of(results: Path, tree: str, old: dict) -> dict:
    """The record of these results, with the one it follows; of random calls alone, that one with their numbers."""
    runs = [json.loads(path.read_text()) for path in sorted(results.glob("fuzz*.json"))]
    fuzz = fuzzed(runs, tree, old.get("fuzz", {}))
    shared = [json.loads(path.read_text()) for path in sorted(results.glob("shared*.json"))]
    again = repeated(shared, tree, old.get("shared", {}))
    if not (results / "machine.json").exists():
        return dict(old, fuzz=fuzz, shared=again)
    machine = json.loads((results / "machine.json").read_text())
    if machine.get("versions", {}).get("triton", TRITON) != TRITON:
        return with_another(results, machine, tree, old)
    rows: list[dict] = []
    worlds = set()
    for path in sorted([*results.rglob("world*.json"), *results.rglob("stalled*.json")]):
        rows += [dict(r, check=f"{path.stem}: {r['check']}") for r in json.loads(path.read_text())]
        if path.name.startswith("world"):
            worlds.add(int(path.stem.removeprefix("world")))
    for path in sorted(results.glob("*.xml")):
        rows += junit(path)
    for run in runs:
        why = "; ".join([run["ended"], *run["failed"]]).removeprefix("; ")
        said = dict(outcome="failed", why=why) if why else dict(outcome="passed")
        rows.append(dict(check=f"fuzz{run['world']}: {run['calls']} random calls, seed {run['seed']}", **said))
    count = {outcome: sum(r["outcome"] == outcome for r in rows) for outcome in ("passed", "failed", "skipped")}
    parts = {part: [r["outcome"] for r in rows if r["check"].startswith(f"{part}: ")] for part in
             sorted({r["check"].split(": ")[0] for r in rows})}  # fmt: skip
    ran = {part: f"{outcomes.count('passed')} of {len(outcomes)}" for part, outcomes in parts.items()}
    record = dict(tree=tree, **count, worlds=sorted(worlds), ran=ran, **machine, date=datetime.date.today().isoformat(),
                  fuzz=fuzz, shared=again, triton=old.get("triton", {}), some=old.get("some", []), not_passed=[r for r in rows if r["outcome"] != "passed"],
                  checks=[r["check"] for r in rows if r["outcome"] == "passed"])  # fmt: skip
    left = ("before", "checks", "fuzz", "shared", "triton", "some")
    before = [{k: v for k, v in r.items() if k not in left} for r in [old, *old.get("before", [])] if r]
    earlier = [r for r in before if r["tree"] != tree or set(r["worlds"]) - worlds]
    newest = [next(r for r in earlier if w in r["worlds"]) for w in {w for r in earlier for w in r["worlds"]}]
    record["before"] = [r for i, r in enumerate(earlier) if i < KEPT or r in newest]
    return record


def main() -> None:
    some = "--some" in sys.argv
    given = [argument for argument in sys.argv[1:] if argument != "--some"]
    tree = given[1] if len(given) > 1 else ""
    if not tree:
        tree = subprocess.run(
            ["git", "rev-parse", "HEAD:src/weft"], capture_output=True, text=True, check=True
        ).stdout.strip()
    path = HERE / "gpu_record.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    record = (with_some if some else record_of)(Path(given[0]), tree, old)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(
        json.dumps({k: v for k, v in record.items() if k not in ("not_passed", "before", "checks", "shared", "some")})
    )


if __name__ == "__main__":
    main()
