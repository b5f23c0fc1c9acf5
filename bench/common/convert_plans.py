"""Rewrites stored two-shot and dispatched plans into the classes of one kernel each: python -m bench.common.convert_plans FILE..

Of each line only the text of plans changes: a row's "plan", the plan in its "method", the keys of its "times", and the plan of a
profile's measured call; of a profile also the number of its format. Fields that the plan's kernel did not read are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from weft.plans import CLASSES, Plan

LEFT_OUT = {
    "TwoShotPush": {"post", "pull"},
    "TwoShotPull": {"post", "pull", "spread"},
    "TwoShotLowLatency": {"post", "pull", "rows", "spread", "bulk", "stages"},
    "Dispatched": set[str](),
    "DispatchedColumns": {"send_rows"},
}
PRIVATE = "private "  # a method, before its plan
COLUMNS = ("all_gather_grouped_matmul", "grouped_matmul_reduce_scatter")


def class_of(op: str, old: dict[str, Any]) -> str | None:
    """Return the name of the class whose kernel ran an old plan; None for a plan whose class is as it was."""
    if old["kind"] == "two_shot" and "class" not in old:
        return "TwoShotLowLatency" if old.get("post") else "TwoShotPull" if old["pull"] else "TwoShotPush"
    if old["kind"] == "dispatched" and "class" not in old and "tile" in old:
        return "DispatchedColumns" if op in COLUMNS else "Dispatched"
    return None


def converted(op: str, old: dict[str, Any]) -> dict[str, Any] | None:
    """Return the new form of an old plan; None for what has none, or is of the new form already."""
    name = class_of(op, old)
    if name is None:
        return None
    new = {key: value for key, value in old.items() if key not in LEFT_OUT[name]} | {"class": name}
    plan = Plan.from_json(json.dumps(new))
    assert type(plan) is CLASSES[name] and json.loads(plan.to_json()) == new, (old, new)
    return dict(sorted(new.items()))


def text(op: str, plan: str) -> str:
    """Return the JSON of a plan, in the new form where it has one."""
    try:
        old = json.loads(plan)
    except ValueError:
        return plan
    new = converted(op, old) if isinstance(old, dict) and "kind" in old else None
    return plan if new is None else json.dumps(new)


def row(old: Any) -> Any:
    """Return a row with its plans in the new form."""
    if isinstance(old, list):  # of a profile
        return [old[0], text(old[0], old[1]), *old[2:]] if len(old) == 7 and isinstance(old[1], str) else old
    if not isinstance(old, dict) or not isinstance(old.get("op"), str):
        return old
    new, plan = dict(old), old.get("plan")
    if isinstance(plan, dict):
        new["plan"] = converted(old["op"], plan) or plan
    elif isinstance(plan, str):
        new["plan"] = text(old["op"], plan)
    if str(old.get("method")).startswith(PRIVATE):  # of bench/measure/norm.py
        new["method"] = PRIVATE + text(old["op"], old["method"].removeprefix(PRIVATE))
    if isinstance(old.get("times"), dict):
        new["times"] = {text(old["op"], key): us for key, us in old["times"].items()}
        assert len(new["times"]) == len(old["times"]), f"two plans of one new form: {old['op']} {old.get('name')}"
    return new


def line(old: str) -> str:
    """Return a line of a file in the new form; a line that is no row, or has no plan to convert, is returned as it is."""
    if old.startswith('"format": 2,'):  # of a profile
        return old.replace("2", "3")
    body = old.rstrip("\n").rstrip(",")
    try:
        stored = json.loads(body)
    except ValueError:
        return old
    new = row(stored)
    if new == stored:
        return old
    assert json.dumps(stored) == body, "a row in another format"
    return json.dumps(new) + old[len(body) :]


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        lines = path.read_text().splitlines(keepends=True)
        new = [line(old) for old in lines]
        changed = sum(a != b for a, b in zip(lines, new, strict=True))
        if changed:
            path.write_text("".join(new))
        print(f"{path}: {changed} of {len(lines)} lines")


if __name__ == "__main__":
    main()
