"""Select the cases that `make test` runs, and those that it leaves to `make gates`.

`some` leaves all but a parameter's first cases to the gates. `covered` leaves single cases of a test to the gates, and
names, for each of them, the case of `make test` that runs the same code on the same kind of operands.

python -m tests.gates writes a line of JSON for every case: its name, whether it is left to the gates, and the case that
covers it according to each expression.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], quick_cases: int = 1) -> list[Any]:
    """Return all cases for `parametrize`, with those after the first few marked for `make gates`. A tuple lists the
    values of several parameters."""

    def left(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.gate)

    return [case if i < quick_cases else left(case) for i, case in enumerate(cases)]


def covered(cases: str, covering: str) -> pytest.MarkDecorator:
    """Leave to `make gates` the cases of a test whose names in brackets match an expression. `covering` is the case that covers them: its
    brackets, its name in the same file, or its file below tests/ and its name; \\1 is the expression's first group."""
    return pytest.mark.covered(cases, covering)


def covered_by(test: str, marks: Iterable[pytest.Mark]) -> str | None:
    """Return the case that covers a case, or None. Cases are given by their file below tests/, their test and their
    brackets."""
    head, _, brackets = test.partition("[")
    for mark in marks:
        cases, covering = mark.args
        if match := re.fullmatch(cases, brackets[:-1]):
            name = match.expand(covering)
            if name.startswith("["):
                return head + name
            return name if "::" in name else f"{head.partition('::')[0]}::{name}"
    return None


class Written:
    """A plugin that writes the collected cases."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            name, marks = item.nodeid.removeprefix("tests/"), list(item.iter_markers("covered"))
            covering = {mark.args[0]: covered_by(name, [mark]) for mark in marks}
            print(json.dumps(dict(case=name, left=item.get_closest_marker("gate") is not None, covering=covering)))


if __name__ == "__main__":
    sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests"], plugins=[Written()]))
