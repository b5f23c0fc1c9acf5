"""`weft tune`: measures what the planner computes with, and keeps it (`planner/profile.py`).

A list of probes, the most important first, each of which gives one or a few measurements. Before each probe the ranks
agree that there is time left; after it the first rank adds what was measured to the file. A probe whose measurements
the file has already is left out, so a run that was stopped is continued by the next. A probe that fails is said and
left out.

What is timed is captured in a CUDA graph and replayed back to back, because that is how the ops are meant to run and
because a GPU that idles between probes would be measured at clocks that it does not keep; the median over replays
counts, then the slowest rank.

    weft tune                                                     on all GPUs of this machine
    torchrun --nproc-per-node 8 -m weft.planner.tune --out FILE   the same in a source tree, with torch and triton alone
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from ..errors import Timeout
from ..world import World
from .auto import time_check, time_launch
from .probes import calls, gemms, moves
from .probes.common import Bench, Probe
from .probes.moves import AFTER
from .profile import (
    Hardware,
    Latency,
    Measurement,
    Profile,
    ProfileError,
    cache_path,
    exists,
    identity,
    read,
    this_machine,
    write,
)
from .timing import CudaTimer, exchanged

SAVE_EVERY = 3.0  # seconds


def probes_of(b: Bench) -> Iterator[Probe]:
    """All of them, the most important first."""
    coarse, rest = b.sizes.nbytes
    yield Probe("self-check", (Latency("check", 0, 0, 1.0),), lambda: check(b))
    if b.world.device.type == "cuda":
        yield Probe("the host's launches", (Latency("launch", 0, 0, 1.0),), lambda: launch(b))
    if b.copies:
        yield b.latency("barrier", 0, lambda: b.world.barrier())
    for what in ("all_gather", "reduce_scatter", "all_reduce"):
        yield from (moves.collective(b, what, 0, size) for size in coarse)
    yield from moves.copies(b, coarse)
    yield from (gemms.gemm(b, *size) for size in b.sizes.gemms[0])
    for wave in b.sizes.tiles:
        yield from (gemms.wave(b, wave, *size) for size in b.sizes.waves)
    yield from moves.beside(b, "copy", 0) if b.copies else ()
    yield from calls.calls(b, 0)
    yield from calls.few_rows(b) if b.copies else ()
    for ctas in b.sizes.ctas[:2]:
        for what in AFTER:
            yield from (moves.collective(b, what, ctas, size) for size in coarse)
            yield from moves.beside(b, what, ctas)
    yield from calls.signaled_calls(b, 0)
    yield from calls.eager_calls(b)
    for what in ("all_reduce", "all_gather", "reduce_scatter"):
        yield from moves.beside(b, what, 0)
    yield from (gemms.gemm(b, *size) for size in b.sizes.gemms[1])
    for what in ("all_gather", "reduce_scatter", "all_reduce"):
        yield from (moves.collective(b, what, 0, size) for size in rest)
    yield from moves.copies(b, rest)
    yield from (moves.collective(b, "all_to_all", 0, size) for size in (*coarse, *rest))
    for ctas in b.sizes.ctas:
        for what in AFTER:
            yield from (moves.collective(b, what, ctas, size) for size in (*coarse, *rest))
            yield from moves.beside(b, what, ctas)
    yield from calls.calls(b, 1)
    yield from calls.signaled_calls(b, 1)
    if b.world.device.type == "cuda":
        yield moves.takes(b)


# -- one number each
def launch(b: Bench) -> list[Measurement]:
    return [Latency("launch", 0, 0, max(us for us in b.world.exchange(time_launch(b.world.device)) if us))]


def check(b: Bench) -> list[Measurement]:
    if b.world.device.type != "cuda":
        return [Latency("check", 0, 0, b.timer.graph(lambda: None))]
    return [Latency("check", 0, 0, max(b.world.exchange(time_check(b.world.device))))]


# -- running them ----------------------------------------------------------------------------------------------------
Say = Callable[[int, int, str], None]  # probes done, of how many, and what is next


def measure(
    world: World, profile: Profile, seconds: float, probes: Sequence[Probe], save: Callable[[Profile], None], say: Say
) -> Profile:
    """Collective. `profile` with what the probes measured in about `seconds`; saved on the first rank every few
    seconds. Raises Timeout where a rank is gone."""
    start = saved = time.monotonic()
    have = {identity(row) for row in profile.rows()}
    todo = []
    for probe in probes:  # the list names some twice, at two ranks of importance
        wanted = {identity(row) for row in probe.gives}
        if not wanted <= have:
            todo.append(probe)
        have |= wanted
    for i, probe in enumerate(todo):
        if max(world.exchange(time.monotonic() - start)) > seconds:
            break
        if world.rank == 0:
            say(i, len(todo), probe.what)
        rows: Sequence[Measurement] = ()
        said = ""
        try:
            rows = probe.run()
        except Timeout:  # a rank is gone, or its GPU hangs: nothing more can be measured
            raise
        except Exception as e:
            said = f"{probe.what}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        failed: list[str] | None = None
        while failed is None:  # until all are here: ranks that met this one elsewhere fail too, and come
            try:
                failed = [s for s in exchanged(world, "probe", said) if s]
            except Timeout:
                raise
            except RuntimeError as e:
                said = said or f"{probe.what}: {e}"
        if failed:
            if world.rank == 0:
                say(i, len(todo), f"left out: {failed[0]}")
            continue
        profile += rows
        if world.rank == 0 and time.monotonic() - saved > SAVE_EVERY:
            save(profile)
            saved = time.monotonic()
    if world.rank == 0:
        save(profile)
    return profile


def start_of(machine: Hardware, path: Path, again: bool = False) -> Profile:
    """What the file holds of this machine, of the day it was begun; without one, or again, an empty profile of today.
    Raises ProfileError for a file of something else."""
    empty = Profile(machine, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "weft tune")
    if again or not exists(path):
        return empty
    found = read(path)
    other = machine.differences(found.machine)
    if other:
        raise ProfileError(
            f"{path} is of another machine ({', '.join(other)}): move it away, name another file, or "
            "`weft tune --again`"
        )
    return found


def run(world: World, seconds: float, out: Path | None, say: Say, again: bool = False) -> tuple[str, int, int]:
    """Collective. Measure this machine into `out`, or where weft looks for it; again: all of it, in place of what the
    file has. Returns the file, and how many of the measurements it has, of how many. Raises ProfileError for a file
    that it cannot go on with, and for ranks that share a GPU."""
    if world.nodes_reason:
        raise ProfileError(f"a profile is of one node's GPUs, and of this World {world.nodes_reason}")
    if world.backend.shares_gpu:
        raise ProfileError("ranks share a GPU, where no time says anything")
    machine = this_machine(world.device, world.size)
    path = out or cache_path(machine)
    if path is None:
        raise ProfileError("platformdirs is not installed, so name a file with --out")
    found: Profile | str = ""
    if world.rank == 0:
        try:
            found = start_of(machine, path, again)
        except ProfileError as e:
            found = str(e)
    profile = world.exchange(found)[0]
    if isinstance(profile, str):
        raise ProfileError(profile)
    probes = list(probes_of(Bench(world, CudaTimer(world))))
    profile = measure(world, profile, seconds, probes, lambda p: write(p, path), say)
    wanted = {identity(row) for p in probes for row in p.gives}
    return str(path), len(wanted & {identity(row) for row in profile.rows()}), len(wanted)


def main() -> None:
    from ..launch import init

    p = argparse.ArgumentParser(description="Under torchrun: measure what the planner computes with.")
    p.add_argument("--seconds", type=float, default=100.0)
    p.add_argument("--out", type=Path)
    p.add_argument("--again", action="store_true")
    a = p.parse_args()
    world, last = init(), [0.0]

    def say(done: int, total: int, what: str) -> None:
        if what.startswith("left out") or time.monotonic() - last[0] > 5:
            last[0] = time.monotonic()
            print(f"{done}/{total} {what}", flush=True)

    path, have, wanted = run(world, a.seconds, a.out, say, a.again)
    if world.rank == 0:
        print(f"{path}: {have} of {wanted} measurements", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
