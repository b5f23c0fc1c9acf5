"""Plans, and what decides which one runs: a measured table, or a prediction from the machine's profile.

The package is also a function: `weft.plan(op, m, n, k)` is `weft.plan.decide`, which says what "auto" runs and why. (Being called
is what a user wants of a plan most often, and `weft.plan.Fused(...)` what comes next; with a function of another name beside
the package, one of the two would be spelled in a way that nobody guesses.)
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .plan import (
    KINDS,
    SMALL,
    SMALL_REDUCE,
    SMALL_SIGNALED,
    Decomposed,
    Fused,
    Multicast,
    OneShot,
    Plan,
    Sequential,
    Signaled,
    TwoShot,
)

__all__ = [
    "KINDS",
    "SMALL",
    "SMALL_REDUCE",
    "SMALL_SIGNALED",
    "Decomposed",
    "Fused",
    "Multicast",
    "OneShot",
    "Plan",
    "Sequential",
    "Signaled",
    "TwoShot",
    "decide",
]


def __getattr__(name: str) -> Any:
    if name == "decide":  # it needs World, which this package's other names do not
        from .auto import decide

        return decide
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.decide(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
