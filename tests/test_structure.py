"""Who may know of whom: what the planner needs of an op, it asks the registry."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import weft
from weft.op import REGISTRY, Op, collectives, registered

SOURCE = Path(weft.__file__).parent
PLANNER = [*sorted((SOURCE / "plan").glob("*.py")), SOURCE / "planner/tune.py"]


@pytest.mark.parametrize("path", PLANNER, ids=lambda path: path.stem)
def test_the_planner_names_no_op(path: Path) -> None:
    """But for the collectives, of which one has the name of an op."""
    names = set(REGISTRY) - set(collectives().values())
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    assert not [f"{path.name}:{node.lineno}" for node in found if node.value in names]


def test_every_op_is_defined_whole() -> None:
    assert set(collectives()) <= set(REGISTRY)
    for op in REGISTRY.values():
        assert op.kinds[0] == "sequential" and type(op.small) in op.runs
        assert all(callable(getattr(op, run)) for run in op.runs.values()), op.name
        assert all(type(plan) in op.runs for plan in op.variants), op.name


def test_two_ops_of_one_name_are_refused() -> None:
    class AllReduce(Op):  # type: ignore[type-arg, unused-ignore]
        name, runs = "all_reduce", REGISTRY["all_reduce"].runs
        check = sizes = outputs = lambda *_: None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="an op named 'all_reduce' exists"):
        registered(AllReduce())
