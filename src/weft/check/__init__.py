"""What `weft check` and `weft trace` do: run the function of a user's file as every rank of an emulated world, compile
what ran for a GPU that is not there (offline.py), and judge the code by the protocol's rules (ptx.py). Many schedules,
and mutations: schedules.py."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..backends.base import Backend
from ..backends.emulated import drive
from ..emulator import Machine, Report
from ..emulator.host import folded
from ..emulator.ran import Ran, Variant
from ..errors import WeftError
from ..launch import runs_nothing
from ..world import World
from .names import variant_names
from .offline import Compiled, compile_kernel, refusal, too_large
from .ptx import broken_by_a_kernel
from .schedules import Exploration, explore

Main = Callable[[World], object]


def load(target: str) -> Main:
    """The function named by `FILE` (its `main`) or `FILE:function`. Raises WeftError where there is none, calling it
    would not run it, or the file fails."""
    name, _, function = target.partition(":")
    path, function = Path(name), function or "main"
    if not path.is_file():
        raise WeftError(f"{path}: no such file")
    loaded = sum(module.startswith(f"weft_target_{path.stem}") for module in sys.modules)
    # Not by the name of one that was loaded before: what it defined, ranks exchange by that name.
    spec = importlib.util.spec_from_file_location(f"weft_target_{path.stem}{f'_{loaded}' if loaded else ''}", path)
    if spec is None or spec.loader is None:
        raise WeftError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.parent.resolve()))
    arguments, sys.argv = sys.argv, [str(path)]  # a file that parses its own meets none of weft's
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(e.__traceback__)]
        if isinstance(e, SyntaxError):  # which stands in no frame of the file
            places.append((e.filename or "", e.lineno))
        lines = [line for file, line in places if Path(file).resolve() == path.resolve()]
        raise WeftError(f"{path}{f':{lines[-1]}' if lines else ''}: {type(e).__name__}: {e}") from e
    finally:
        sys.argv = arguments
    main = getattr(module, function, None)
    if not callable(main):
        raise WeftError(f"{path} defines no function {function}(world)")
    if runs_nothing(main):
        raise WeftError(f"{path}: {function} is async or a generator: calling it runs nothing of it")
    return main


def _rank(main: Main) -> Callable[[Backend], object]:
    def rank(backend: Backend) -> object:
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
        return machine.report, folded(error)
    return machine.report, None


def search(main: Main, world: int, seeds: Iterable[int]) -> Exploration:
    """Every seed until one ends badly. A seed fixes the schedule, so a finding can be seen again."""
    return explore(_rank(main), world, seeds, stop=True)


@dataclass
class Gated:
    """A kernel as it was launched, compiled."""

    name: str  # and what tells it from its kernel's other variants
    compiled: Compiled
    wrong: list[str]  # what does not fit, and the rules that it breaks

    def __str__(self) -> str:
        c = self.compiled
        parts = [
            f"{c.registers} registers",
            f"{c.spills} bytes spilled",
            f"{c.shared} bytes of shared memory",
            *c.warnings,
        ]
        return f"{self.name}: {', '.join(parts)}"


def gate(
    ran: Ran, capability: int, track: Callable[[list[Variant]], Iterable[Variant]] = iter
) -> tuple[list[Gated], list[str]]:
    """Compile every variant that ran, each once; what came out, and why others did not compile. track: passes on what
    it is given, and may show how far it is."""
    made: dict[str, tuple[Variant, Compiled]] = {}
    refused: dict[str, None] = {}
    for variant in track(list(ran.variants.values())):
        try:
            compiled = compile_kernel(variant.kernel, variant.args, variant.options, capability)
        except Exception as error:  # whatever Triton, LLVM or ptxas ends in
            said = refusal(error, variant.kernel, ran.functions.values())
            refused[f"{variant.kernel.__name__} does not compile: {said}"] = None
        else:
            made.setdefault(compiled.hash, (variant, compiled))
    names = variant_names([variant for variant, _ in made.values()])
    found = [Gated(name, compiled, []) for name, (_, compiled) in zip(names, made.values(), strict=True)]
    for one in found:
        if large := too_large(one.compiled, capability):
            one.wrong.append(large)
        one.wrong += broken_by_a_kernel(one.compiled.ptx, one.compiled.ttgir, ran.awaited)
    return found, list(refused)
