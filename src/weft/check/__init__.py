"""`weft check` and `weft trace` run the function of a user's file as every rank of an emulated world. Both commands
compile the kernels that ran for a GPU that need not be present (offline.py), and check the PTX against the protocol's
rules (ptx.py). schedules.py runs many schedules."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ..backends.base import Backend
from ..backends.emulated import EmulatedBackend, drive
from ..emulator import Machine, Report
from ..emulator.host import folded
from ..emulator.ran import Ran, Variant
from ..errors import WeftError
from ..launch import runs_nothing
from ..world import World
from . import torch_ranks
from .names import variant_names
from .offline import Compiled, compile_kernel, refusal, too_large
from .ptx import broken_kernel_rules
from .schedules import Exploration, explore

TARGET = "weft_target_"  # the prefix of the names of modules that are loaded from files
Main = Callable[..., object]  # a function with the argument World, or with a rank and the number of ranks


class RunOptions(TypedDict):
    """Options of a run (`Machine`). Kernels that were not written for weft often start more programs than a small GPU
    has SMs, and rely on GPU behaviour that PTX does not promise."""

    sm_count: int
    ends_release: bool


def load(target: str) -> Main:
    """Return the function named by `FILE` (its `main`) or `FILE:function`. Raises WeftError if there is no such
    function, if a call would not run its body, or if the file raises an error. The file may use torch and Triton as on
    a GPU (`torch_ranks`)."""
    with torch_ranks.patched():
        return _load(target)


def _load(target: str) -> Main:
    name, _, function = target.partition(":")
    path, function = Path(name), function or "main"
    if not path.is_file():
        raise WeftError(f"{path}: {'a folder, not a Python file' if path.is_dir() else 'no such file'}")
    loaded = sum(module.startswith(f"{TARGET}{path.stem}") for module in sys.modules)
    # Each load has a new module name, because ranks pickle the objects that a module defines by its name.
    spec = importlib.util.spec_from_file_location(f"{TARGET}{path.stem}{f'_{loaded}' if loaded else ''}", path)
    if spec is None or spec.loader is None:
        raise WeftError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    arguments, sys.argv = sys.argv, [str(path)]  # a file that parses command-line arguments must find none
    try:
        with _importing_beside(module.__name__):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(e.__traceback__)]
        if isinstance(e, SyntaxError):  # the file has no frame yet
            frames.append((e.filename or "", e.lineno))
        lines = [line for file, line in frames if Path(file).resolve() == path.resolve()]
        raise WeftError(f"{path}{f':{lines[-1]}' if lines else ''}: {type(e).__name__}: {e}") from e
    finally:
        sys.argv = arguments
    main = getattr(module, function, None)
    if not callable(main):
        form = f"{function}(world) or {function}(rank, world_size)"
        raise WeftError(f"{path} defines no function {form}; FILE:FUNCTION names a different function")
    if runs_nothing(main):
        raise WeftError(f"{path}: {function} is async or a generator: calling it runs nothing of it")
    return main


@contextmanager
def _importing_beside(module: str) -> Iterator[None]:
    """Let imports find the files beside a loaded module's file, as in a script. Restore the path at the end. Otherwise,
    other modules of this process, and processes that it starts, would import the folder's files instead of different
    modules with the same names."""
    before = sys.path[:]
    if module.startswith(TARGET):
        sys.path.insert(0, str(Path(str(sys.modules[module].__file__)).parent.resolve()))
    try:
        yield
    finally:
        sys.path[:] = before


def takes_rank(main: Main) -> bool:
    """Return whether the function has the form main(rank, world_size), as for torchrun, instead of main(world)."""
    parameters = inspect.signature(main).parameters.values()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) == 2


@contextmanager
def ranks_of(main: Main) -> Iterator[tuple[Callable[[EmulatedBackend], object], RunOptions]]:
    """Yield the function of one emulated rank's backend, and the options with which the run simulates GPUs."""
    with _importing_beside(main.__module__):
        if takes_rank(main):
            with torch_ranks.patched():
                yield torch_ranks.as_rank(main), RunOptions(sm_count=32, ends_release=True)
        else:
            yield _rank(main), RunOptions(sm_count=6, ends_release=False)


def _rank(main: Main) -> Callable[[Backend], object]:
    def rank(backend: Backend) -> object:
        try:
            return main(World(backend))
        except SystemExit as e:  # if this exception propagated, the command would end with status 0
            raise WeftError(f"rank {backend.rank} ended by sys.exit({e.code!r})") from e

    return rank


def run(main: Main, world: int, seed: int) -> tuple[Report, Exception | None]:
    """Run one schedule of `main` on `world` emulated ranks. Return its report, and the error that ended it, if any."""
    with ranks_of(main) as (rank, options):
        machine = Machine(world, seed=seed, **options)
        try:
            drive(rank, machine)
        except Exception as error:
            return machine.report, folded(error)
    return machine.report, None


def search(main: Main, world: int, seeds: Iterable[int]) -> Exploration:
    """Run the seeds in order until one fails. A seed fixes the schedule, so a finding can be reproduced."""
    with ranks_of(main) as (rank, options):
        return explore(rank, world, seeds, stop=True, **options)


@dataclass
class CheckedKernel:
    """One compiled variant of a kernel."""

    name: str  # the kernel's name and the arguments that distinguish the variant from the kernel's other variants
    compiled: Compiled
    problems: list[str]  # the lack of memory and the broken rules, as sentences

    def __str__(self) -> str:
        c = self.compiled
        facts = [
            f"{c.registers} registers",
            f"{c.spills} bytes spilled",
            f"{c.shared} bytes of shared memory",
            *c.warnings,
        ]
        return f"{self.name}: {', '.join(facts)}"


def compile_and_check(
    ran: Ran, capability: int, track: Callable[[list[Variant]], Iterable[Variant]] = iter
) -> tuple[list[CheckedKernel], list[str]]:
    """Compile every variant that ran, once each. Return the compiled kernels, and the reasons why the other variants
    did not compile. track: returns an iterator over the variants, which may show progress."""
    compiled_by_hash: dict[str, tuple[Variant, Compiled]] = {}
    refused: dict[str, None] = {}
    for variant in track(list(ran.variants.values())):
        try:
            compiled = compile_kernel(variant.kernel, variant.args, variant.options, capability)
        except Exception as error:  # Triton, LLVM and ptxas raise errors of many types
            reason = refusal(error, variant.kernel, ran.functions.values())
            refused[f"{variant.kernel.__name__} does not compile: {reason}"] = None
        else:
            compiled_by_hash.setdefault(compiled.hash, (variant, compiled))
    names = variant_names([variant for variant, _ in compiled_by_hash.values()])
    checked = [
        CheckedKernel(name, compiled, []) for name, (_, compiled) in zip(names, compiled_by_hash.values(), strict=True)
    ]
    for kernel in checked:
        if large := too_large(kernel.compiled, capability):
            kernel.problems.append(large)
        kernel.problems += broken_kernel_rules(kernel.compiled.ptx, kernel.compiled.ttgir, ran.awaited)
    return checked, list(refused)
