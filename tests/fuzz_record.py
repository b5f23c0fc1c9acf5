"""What is on record of random calls (gpu_fuzz.py): how many of every kind, by the number of ranks and by tree."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def added(runs: list[dict], tree: str, old: dict) -> dict:
    """The random calls of these runs and all before. A run counts once; one that did not end as it should has made a wrong call. kinds: by
    tree, by ranks, how many calls of each kind."""
    trees = {name: dict(counts) for name, counts in old.get("trees", {}).items()}
    for run in runs:
        name = f"{ranks_of(run)}, seed {run['seed']}"
        here = trees.setdefault(tree, dict(calls=0, wrong=0, runs=[], failed=[]))
        if name in here["runs"]:
            continue
        here["calls"] += run["calls"]
        here["wrong"] += run["wrong"] + bool(run["ended"])
        here["runs"] = [*here["runs"], name]
        here["failed"] = [*here["failed"], *run["failed"], *([f"{name}: {run['ended']}"] if run["ended"] else [])]
        kinds, size = {**here.get("kinds", {})}, str(run["world"])
        kinds[size] = dict(sorted((Counter(kinds.get(size, {})) + Counter(run.get("kinds", {}))).items()))
        here["kinds"] = kinds
    return {key: sum(counts[key] for counts in trees.values()) for key in ("calls", "wrong")} | dict(trees=trees)


def ranks_of(run: dict) -> str:
    """ "2 GPUs", or "4 ranks on 1 GPU"."""
    gpus = run.get("gpus", run["world"])
    return f"{gpus} GPUs" if gpus == run["world"] else f"{run['world']} ranks on {gpus} GPU{'s' * (gpus > 1)}"


def counts_in(path: Path, ranks: int) -> dict[str, int]:
    """Calls of every kind by so many ranks, of all trees of a record (gpu_record.json); or what a run has drawn by, of its results
    (fuzz<N>.json), so that it is drawn again."""
    if not path.exists():
        return {}
    known: dict[str, Any] = json.loads(path.read_text())
    if "drawn_by" in known:
        return known["drawn_by"]  # type: ignore[no-any-return]
    total: Counter[str] = Counter()
    for tree in known.get("fuzz", {}).get("trees", {}).values():
        total.update(tree.get("kinds", {}).get(str(ranks), {}))
    return dict(total)
