"""The common part of all measuring programs: a command line, a World, cases that the next run continues, and rows with
the date and commit."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import math
import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import weft
from bench.common import peers
from bench.common.resume import BEGAN, keep, unfinished
from bench.common.timing import RIGHT, error_of

T = TypeVar("T")
Row = dict[str, Any]


def commit() -> str:
    """Return the commit that is measured: the value of WEFT_COMMIT, for a copy without history, or git's HEAD."""
    if "WEFT_COMMIT" in os.environ:
        return os.environ["WEFT_COMMIT"]
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def options(
    words: Sequence[str] | None = None,
    choices: Mapping[str, Collection[str]] | None = None,
    seconds: float = 1e9,
    **defaults: Any,
) -> argparse.Namespace:
    """Return the values of the options: --out DIR, a folder that is made; --seconds, the time after which no case
    begins; and one option for each default. An option has the type of its default: a list accepts several words, and
    False becomes a switch."""
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=float, default=seconds)
    for name, default in defaults.items():
        flag, allowed = f"--{name.replace('_', '-')}", (choices or {}).get(name)
        if default is False:
            p.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            p.add_argument(flag, nargs="*", type=type(default[0]) if default else str, default=default, choices=allowed)
        else:
            p.add_argument(flag, type=type(default), default=default, choices=allowed)
    a = p.parse_args(words)
    a.out.mkdir(parents=True, exist_ok=True)
    return a


class Program:
    """A measurement in which all ranks take part. `fixed` contains the fields that all of its rows have."""

    def __init__(self, a: argparse.Namespace, file: str, world: weft.World | None = None, **fixed: Any) -> None:
        self.a, self.file, self.world = a, file, world or weft.init()
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.fixed = dict(world=self.world.size, gpu=gpu, commit=commit(), date=date, **fixed)

    @functools.cached_property
    def link(self) -> float:
        """The rate, in GB/s, at which a copy engine reads a peer's memory, measured once. Collective."""
        rate = peers.link_rate(self.world)
        self.fixed["link_gbs"] = round(rate, 1)
        return rate

    def log(self, *text: object) -> None:
        """Print on rank 0."""
        if self.world.rank == 0:
            print(f"{time.time() - BEGAN:4.0f}s", *text, flush=True)

    def keep(self, rows: Iterable[Row], file: str = "") -> list[Row]:
        """Append the rows to the program's file, or to a different file in the same folder, and return the rows."""
        stamped = [row | self.fixed for row in rows]
        keep(self.world, self.a.out / (file or self.file), stamped)
        return stamped

    def cases(self, cases: Mapping[str, T]) -> Iterator[T]:
        """Yield the cases that no earlier run has finished, and free the GPU's memory between them. Collective."""
        for case in unfinished(self.world, self.a.out, cases, self.a.seconds):
            yield case
            gc.collect()
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def tolerating(self, name: str) -> Iterator[None]:
        """Print an exception on the rank that raised it, so that the program continues with the other cases."""
        try:
            yield
        except Exception as error:
            print(f"rank {self.world.rank}, {name}: {type(error).__name__}: {error}"[:600], flush=True)

    def end(self) -> None:
        torch.cuda.synchronize()
        dist.destroy_process_group()


def gains(times: Mapping[str, float], base: str) -> str:
    """Return the time of each method in us, and how many times as fast as the base the method was."""
    return " | ".join(f"{name} {us:.0f} ({times[base] / us:.2f}x)" for name, us in times.items())


def worst_error(
    world: weft.World, name: str, call: Callable[[], Any], error: Callable[[Any], float] = lambda result: 0.0
) -> float:
    """Return the largest error of two calls on any rank, infinity if a rank raises an exception. The function prints a
    method whose error is not below RIGHT, and the caller leaves that method out. Collective."""
    largest, reason = 0.0, ""
    try:
        for _ in range(2):
            largest = max(largest, error(call()))
        world.synchronize()
    except Exception as e:
        largest, reason = math.inf, repr(e)[:300]
    largest, reason = max(world.exchange((largest, reason)))
    if not largest < RIGHT and world.rank == 0:
        print(f"left out: {name}: {largest} {reason}", flush=True)
    return largest


def is_right(world: weft.World, name: str, call: Callable[[], Any], expected: torch.Tensor) -> bool:
    """Return whether two calls return the expected tensor, up to rounding, on every rank. Collective."""
    return worst_error(world, name, call, lambda result: error_of(result, expected)) < RIGHT
