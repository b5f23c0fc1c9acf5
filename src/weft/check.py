"""Runs a user's `main(world)` on emulated ranks under many schedules and stops at the first thing that goes wrong.

A schedule is a world size and a seed: the seed decides who runs next at every point where it matters, so a finding can
be run again with exactly the same interleaving.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .backends.emulated import Report, spmd
from .errors import WeftError
from .world import World

Main = Callable[[World], Any]


@dataclass(frozen=True)
class Schedule:
    """One run: its report, or what it ended with."""

    world: int
    seed: int
    report: Report | None
    error: Exception | None


def load(target: str) -> Main:
    """The function named by `FILE` (its `main`) or `FILE:function`. Raises WeftError where there is none."""
    name, _, function = target.partition(":")
    path, function = Path(name), function or "main"
    if not path.is_file():
        raise WeftError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(f"weft_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise WeftError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    main = getattr(module, function, None)
    if not callable(main):
        raise WeftError(f"{path} defines no function {function}(world)")
    return main


def run(main: Main, world: int, seed: int) -> Report:
    """One schedule of `main` on `world` emulated ranks; raises what it ends with."""
    return spmd(lambda backend: main(World(backend)), world, seed=seed)[1]


def explore(main: Main, worlds: Sequence[int], seeds: Iterable[int]) -> Iterator[Schedule]:
    """Every seed at every world size; the last one yielded is the one that failed, if any did."""
    for seed in seeds:
        for world in worlds:
            try:
                report = run(main, world, seed)
            except Exception as error:
                yield Schedule(world, seed, None, error)
                return
            yield Schedule(world, seed, report, None)
