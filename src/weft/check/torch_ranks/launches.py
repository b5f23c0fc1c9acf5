"""Launches of plain Triton kernels by kernel[grid](..), including autotuned and heuristic kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

from ...architectures import HOPPER
from ...errors import Unsupported
from .ranks import current_rank, rank_number

# The options of a launch that have no effect in the emulator, by name. Each has its only accepted value, or None if any
# value is accepted.
_OPTIONS: Mapping[str, object] = dict(
    num_warps=None,
    num_stages=None,
    num_ctas=1,
    maxnreg=None,
    launch_cooperative_grid=None,
    launch_pdl=False,
    debug=None,
    sanitize_overflow=None,
    enable_fp_fusion=None,
    enable_reflect_ftz=None,
    warmup=False,
)
LaunchGrid = Callable[[dict[str, object]], object] | tuple[int, ...] | list[int] | int


def launch(kernel: JITFunction, grid: LaunchGrid, *args: object, **kwargs: object) -> None:
    """Enqueue a launch of the kernel on the rank's current stream."""
    names = [p.name for p in kernel.params]
    bound = dict(zip(names, args, strict=False))
    options = {name: value for name, value in kwargs.items() if name not in names}
    bound |= {name: value for name, value in kwargs.items() if name in names}
    if len(args) > len(names):
        raise TypeError(f"{kernel.__name__} takes {len(names)} arguments, not {len(args)}")
    for name, value in options.items():
        if name not in _OPTIONS:
            raise TypeError(f"{kernel.__name__} has no parameter {name}, and a launch no such option")
        if _OPTIONS[name] is not None and value not in (None, _OPTIONS[name]):
            raise Unsupported(f"{kernel.__name__}: the emulator does not model launches with {name}={value!r}")
    if callable(grid):
        grid = cast(LaunchGrid, grid({p.name: p.default for p in kernel.params if p.has_default} | bound))
    sizes = [int(n) for n in cast(Sequence[int], grid if isinstance(grid, (tuple, list)) else (grid,))]
    x, y, z = (*sizes, 1, 1)[:3]
    rank = current_rank()
    stream, warps = rank.stream(), cast(int, options.get("num_warps") or 4)
    rank.enqueue_or_capture(lambda: rank.streams.launch(kernel, (x, y, z), bound, stream, warps=warps))


def _run(kernel: JITFunction, *args: object, grid: LaunchGrid, warmup: bool = False, **kwargs: object) -> None:
    launch(kernel, grid, *args, warmup=warmup, **kwargs)


def _run_autotuned(tuner: Autotuner, *args: object, **kwargs: object) -> object:
    """Launch with one of the configurations. The schedule's seed selects the same configuration on all ranks."""
    config = tuner.configs[current_rank().backend.machine.seed % len(tuner.configs)]
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    whole = {**tuner.nargs, **kwargs, **config.all_kwargs()}
    if config.pre_hook is not None:
        config.pre_hook(whole)
    return tuner.fn.run(*args, **kwargs, **config.all_kwargs())


def _driver() -> SimpleNamespace:
    """Return the part of Triton's driver that programs read."""
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", HOPPER, 32),
        get_active_torch_device=lambda: torch.device("cuda", rank_number()),
        get_current_device=rank_number,
        utils=SimpleNamespace(get_device_properties=_properties),
    )


def _properties(device: object) -> dict[str, int]:
    return dict(
        multiprocessor_count=current_rank().backend.sm_count, max_shared_mem=227 << 10, warpSize=32, max_num_regs=65536
    )


def replacements() -> Iterator[tuple[object, str, object]]:
    yield driver, "_active", _driver()
    yield JITFunction, "run", _run
    yield Autotuner, "run", _run_autotuned
