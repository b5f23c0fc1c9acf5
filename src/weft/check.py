"""What `weft check` and `weft trace` run: the function of a user's file, as every rank of an emulated world."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .backends.base import Backend
from .backends.emulated import drive
from .emulator import Exploration, Machine, Report, explore
from .errors import WeftError
from .world import World

Main = Callable[[World], Any]


def load(target: str) -> Main:
    """The function named by `FILE` (its `main`) or `FILE:function`. Raises WeftError where there is none, calling it would not run
    it, or the file fails."""
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
    arguments, sys.argv = sys.argv, [str(path)]  # a file that parses its own meets none of weft's
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        at = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)]
        raise WeftError(f"{path}{f':{at[-1]}' if at else ''}: {type(e).__name__}: {e}") from e
    finally:
        sys.argv = arguments
    main = getattr(module, function, None)
    if not callable(main):
        raise WeftError(f"{path} defines no function {function}(world)")
    if any(
        kind(main) for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    ):
        raise WeftError(f"{path}: {function} is async or a generator: calling it runs nothing of it")
    return main


def _rank(main: Main) -> Callable[[Backend], Any]:
    def rank(backend: Backend) -> Any:
        try:
            return main(World(backend))
        except SystemExit as e:  # it would end the command, as if all were well
            raise WeftError(f"rank {backend.rank} ended by sys.exit({e.code!r})") from e

    return rank


def run(main: Main, world: int, seed: int) -> tuple[Report, Exception | None]:
    """One schedule of `main` on `world` emulated ranks: what it did, to its end or to what it ended with."""
    machine = Machine(world, seed=seed)
    try:
        drive(_rank(main), machine)
    except Exception as error:
        return machine.report, error
    return machine.report, None


def search(main: Main, world: int, seeds: Iterable[int]) -> Exploration:
    """Every seed until one ends badly. A seed fixes the schedule, so a finding can be seen again."""
    return explore(_rank(main), world, seeds, stop=True)
