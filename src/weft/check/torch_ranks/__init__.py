"""Programs for torch and plain Triton run on emulated ranks, as if torchrun had started them.

`main(rank, world_size)` runs once per rank, unchanged: its kernels are `@triton.jit` functions launched as
`kernel[grid](..)`, its memory comes from torch.distributed._symmetric_memory or torch's factories, its streams, events
and graphs from torch.cuda, its collectives from torch.distributed. While `patched` lasts, modules here replace these
names:

    ranks.py         the rank of the calling thread, and its streams
    operations.py    every operation of torch, in the order of the rank's current stream
    symmetric.py     symmetric memory and signal pads
    cuda.py          devices, streams, events, graphs
    driver.py        words that streams store and wait for
    collectives.py   torch.distributed
    launches.py      kernel[grid](..)

All tensors are CPU tensors of the emulator, whichever device the program names. As on a GPU, the host runs ahead of its
streams. The host waits only when it reads a value or synchronises.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from ...backends.emulated import EmulatedBackend
from ...emulator import interpret
from ...errors import WeftError
from . import collectives, cuda, driver, launches, symmetric
from .operations import Devices, Operations
from .ranks import Rank, acting

MainOfRank = Callable[[int, int], object]
_MISSING = object()


@contextmanager
def patched() -> Iterator[None]:
    """Until the block ends, replace the names of torch and Triton that ranks use by the emulator's."""
    undo: list[tuple[object, str, object]] = []
    missing: list[str] = []
    try:
        for name, stand_in in driver.modules():
            sys.modules[name] = stand_in
            missing.append(name)
        for module in (collectives, cuda, driver, symmetric, launches):
            for place, name, value in module.replacements():
                undo.append((place, name, vars(place).get(name, getattr(place, name, _MISSING))))
                setattr(place, name, value)
        interpret.user_launch = launches.launch
        yield
    finally:
        interpret.user_launch = None
        for name in missing:
            del sys.modules[name]
        for place, name, value in reversed(undo):
            if value is _MISSING:
                delattr(place, name)
            else:
                setattr(place, name, value)


def as_rank(main: MainOfRank) -> Callable[[EmulatedBackend], object]:
    """Return a function that runs main(rank, world_size) on one emulated rank and then waits for the rank's streams.
    The caller calls it inside `patched`."""

    @functools.wraps(main)
    def run(backend: EmulatedBackend) -> object:
        rank = Rank(backend)
        with ExitStack() as stack:
            modes: list[AbstractContextManager[object]] = [
                acting(rank),
                torch.inference_mode(),
                Devices(),
                Operations(rank),
            ]
            for mode in modes:
                stack.enter_context(mode)
            try:
                result = main(rank.rank, rank.size)
            except SystemExit as e:  # if this exception propagated, the command would end with status 0
                raise WeftError(f"rank {rank.rank} ended by sys.exit({e.code!r})") from e
            rank.synchronize()
            return result

    return run
