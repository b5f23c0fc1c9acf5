"""What `weft check` and `weft trace` run: the function of a user's file, as every rank of an emulated world."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .backends.emulated import spmd
from .emulator import Exploration, Report, explore
from .errors import WeftError
from .world import World

Main = Callable[[World], Any]


def load(target: str) -> Main:
    """The function named by `FILE` (its `main`) or `FILE:function`. Raises WeftError where there is none, or the file fails."""
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
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        at = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)]
        raise WeftError(f"{path}{f':{at[-1]}' if at else ''}: {type(e).__name__}: {e}") from e
    main = getattr(module, function, None)
    if not callable(main):
        raise WeftError(f"{path} defines no function {function}(world)")
    return main


def run(main: Main, world: int, seed: int) -> Report:
    """One schedule of `main` on `world` emulated ranks; raises what it ends with."""
    return spmd(lambda backend: main(World(backend)), world, seed=seed)[1]


def search(main: Main, world: int, seeds: Iterable[int]) -> Exploration:
    """Every seed until one ends badly. A seed fixes the schedule, so a finding can be seen again."""
    return explore(lambda backend: main(World(backend)), world, seeds, stop=True)
