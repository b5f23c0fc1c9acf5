"""Which cases of a test `make test` runs, and which are left to `make gates`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], first: int = 1) -> list[Any]:
    """For `parametrize`: all cases, of which those behind the first few are left to `make gates`. A tuple is of several names."""

    def left(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.gate)

    return [case if i < first else left(case) for i, case in enumerate(cases)]
