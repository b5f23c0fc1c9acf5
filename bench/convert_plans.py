"""Rewrites stored plans of one flat class a kind into the classes of one kernel each: python bench/convert_plans.py FILE..

Of each line only the text of plans changes: a row's "plan", the keys of its "times", and the plan of a profile's measured call; of
a profile also the number of its format. A fused sum over ranks without `forward` is of a kernel that is no more, and stays as it
is. Fields that the plan's kernel did not read are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from weft.plans import CLASSES, KINDS, Plan

NAMES = {
    "FusedGather": dict(pullers="pull_programs"),
    "FusedReduceScatter": dict(pullers="pull_programs", forward="forward_programs"),
    "FusedAllReduce": dict(pullers="pull_programs", forward="forward_programs"),
    "FusedMoe": dict(pullers="copy_programs", pull_rows="copy_rows", pull_stages="copy_stages"),
    "Dispatched": dict(senders="dispatch_programs", summers="combine_programs"),
    "LowLatency": dict(movers="copy_programs"),
    "Segmented": dict(pushers="push_programs"),
}
FUSED = {"matmul_reduce_scatter": "FusedReduceScatter", "matmul_all_reduce": "FusedAllReduce", "moe": "FusedMoe"}


def class_of(op: str, old: dict[str, Any]) -> str | None:
    """The name of the class whose kernel ran an old plan; None where that is no more."""
    if old["kind"] != "fused":
        return KINDS[old["kind"]].__name__ if old["kind"] in KINDS else None
    if op == "all_gather_matmul":
        return "FusedGather" if old["pullers"] else "FusedGatherByCopies"
    return FUSED.get(op) if "forward" in old else None


def converted(op: str, old: dict[str, Any]) -> dict[str, Any] | None:
    """The new form of an old plan; None for what has none, or is of the new form already."""
    name = class_of(op, old) if "block_m" in old or "pushers" in old else None
    if name is None:
        return None
    made = json.loads(CLASSES[name]().to_json())
    new = {key: value for key, value in made.items() if key in ("kind", "class")}
    renamed = {NAMES.get(name, {}).get(key, key): value for key, value in (old).items()}
    for key, usual in made.items():
        if key == "tile":
            new[key] = {part: renamed[part] for part in usual}
        elif key not in new:
            new[key] = renamed[key]
    again = json.loads(Plan.from_json(json.dumps(new)).to_json())
    assert again == new, (old, new)
    return dict(sorted(new.items()))


def text(op: str, plan: str) -> str:
    """The JSON of a plan, in the new form where it has one."""
    try:
        old = json.loads(plan)
    except ValueError:
        return plan
    new = converted(op, old) if isinstance(old, dict) and "kind" in old else None
    return plan if new is None else json.dumps(new)


def row(old: Any) -> Any:
    """A row with its plans in the new form."""
    if isinstance(old, list):  # of a profile
        return [old[0], text(old[0], old[1]), *old[2:]] if len(old) == 7 and isinstance(old[1], str) else old
    if not isinstance(old, dict) or not isinstance(old.get("op"), str):
        return old
    new, plan = dict(old), old.get("plan")
    if isinstance(plan, dict):
        new["plan"] = converted(old["op"], plan) or plan
    elif isinstance(plan, str):
        new["plan"] = text(old["op"], plan)
    if isinstance(old.get("times"), dict):
        new["times"] = {text(old["op"], key): us for key, us in old["times"].items()}
        assert len(new["times"]) == len(old["times"]), f"two plans of one new form: {old['op']} {old.get('name')}"
    return new


def line(old: str) -> str:
    """A line of a file; one that is no row, or has nothing to change, as it is."""
    if old.startswith('"format": 1,'):  # of a profile
        return old.replace("1", "2")
    body = old.rstrip("\n").rstrip(",")
    try:
        given = json.loads(body)
    except ValueError:
        return old
    made = row(given)
    if made == given:
        return old
    assert json.dumps(given) == body, "a row in another format"
    return json.dumps(made) + old[len(body) :]


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        lines = path.read_text().splitlines(keepends=True)
        made = [line(each) for each in lines]
        changed = sum(a != b for a, b in zip(lines, made, strict=True))
        if changed:
            path.write_text("".join(made))
        print(f"{path}: {changed} of {len(lines)} lines")


if __name__ == "__main__":
    main()
