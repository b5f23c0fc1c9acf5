"""`weft tune` makes the measurements of a profile and stores them (`planner/profile.py`).

The probes form a list that starts with the most important ones; each probe returns one or a few measurements. Before
each probe, the ranks check together that time is left. After the probe, rank 0 adds the measurements to the file. A run
skips probes whose measurements are in the file, so it continues a run that was stopped. A run reports and skips a probe
that fails.

Calls are captured in a CUDA graph and replayed back to back. Ops are meant to run in graphs, and a GPU that idles
between probes would run at clocks that it cannot sustain. A result is the slowest rank's median over replays.

    weft tune                                                     on all GPUs of this machine
    torchrun --nnodes 2 ... -m weft.planner.tune                  the link between nodes, once each node has a profile
    torchrun --nproc-per-node 8 -m weft.planner.tune --out FILE   in a source tree, with torch and triton alone
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
from .tuner import CudaTimer, exchanged

SAVE_EVERY = 3.0  # seconds between two writes of the file


def probes_of(b: Bench) -> Iterator[Probe]:
    """Yield all probes, starting with the most important ones. For ranks on several nodes, yield only the probes of the
    link between nodes."""
    coarse, rest = b.sizes.nbytes
    if b.world.multi_node_unsupported is not None:
        yield from moves.sends(b, (*coarse, *rest))
        return
    yield Probe("self-check", (Latency("check", 0, 0, 1.0),), lambda: check(b))
    if b.copies:
        yield b.latency("barrier", 0, lambda: b.world.barrier())
    yield from moves.collectives(b, ("all_gather", "reduce_scatter", "all_reduce"), 0, coarse)
    yield from moves.copies(b, coarse)
    yield from (gemms.gemm(b, *size) for size in b.sizes.gemms[0])
    for wave in b.sizes.tiles:
        yield from (gemms.wave(b, wave, *size) for size in b.sizes.waves)
    yield from moves.concurrent_probes(b, "copy", 0) if b.copies else ()
    yield from calls.calls(b, 0)
    yield from calls.low_latency_calls(b) if b.copies else ()
    for ctas in b.sizes.ctas[:2]:
        for operation in AFTER:
            yield from moves.collectives(b, [operation], ctas, coarse)
            yield from moves.concurrent_probes(b, operation, ctas)
    yield from calls.signaled_calls(b, 0)
    if b.world.device.type == "cuda":  # next to the eager calls, because the host's speed changes
        yield Probe("the host's launches", (Latency("launch", 0, 0, 1.0),), lambda: launch(b))
    yield from calls.eager_calls(b)
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        yield from moves.concurrent_probes(b, operation, 0)
    yield from (gemms.gemm(b, *size) for size in b.sizes.gemms[1])
    yield from moves.collectives(b, ("all_gather", "reduce_scatter", "all_reduce"), 0, rest)
    yield from moves.copies(b, rest)
    yield from moves.collectives(b, ["all_to_all"], 0, (*coarse, *rest))
    for ctas in b.sizes.ctas:
        for operation in AFTER:
            yield from moves.collectives(b, [operation], ctas, (*coarse, *rest))
            yield from moves.concurrent_probes(b, operation, ctas)
    yield from calls.calls(b, 1)
    yield from calls.signaled_calls(b, 1)
    if b.world.device.type == "cuda":
        yield moves.ctas_probe(b)


# -- one number each
def launch(b: Bench) -> list[Measurement]:
    return [Latency("launch", 0, 0, max(us for us in b.world.exchange(time_launch(b.world.device)) if us))]


def check(b: Bench) -> list[Measurement]:
    if b.world.device.type != "cuda":
        return [Latency("check", 0, 0, b.timer.graph(lambda: None))]
    return [Latency("check", 0, 0, max(b.world.exchange(time_check(b.world.device))))]


# -- running them ----------------------------------------------------------------------------------------------------
Progress = Callable[[int, int, str], None]  # (number of finished probes, number of all probes, name of the next probe)


def measure(
    world: World,
    profile: Profile,
    seconds: float,
    probes: Sequence[Probe],
    save: Callable[[Profile], None],
    report: Progress,
) -> Profile:
    """Return `profile` with the measurements that the probes made in about `seconds`. Rank 0 saves the profile every
    few seconds. Collective. Raises Timeout if a rank has ended."""
    start = saved_at = time.monotonic()
    measured = {identity(row) for row in profile.rows()}
    remaining = []
    for probe in probes:  # some probes appear twice in the list, for two sets of sizes
        wanted = {identity(row) for row in probe.rows}
        if not wanted <= measured:
            remaining.append(probe)
        measured |= wanted
    for i, probe in enumerate(remaining):
        if max(world.exchange(time.monotonic() - start)) > seconds:
            if world.rank == 0:
                report(i, len(remaining), f"left out: {len(remaining) - i} probes, since {seconds:g} s are over")
            break
        if world.rank == 0:
            report(i, len(remaining), probe.name)
        rows: Sequence[Measurement] = ()
        problem = ""
        try:
            rows = probe.run()
        except Timeout:  # a rank has ended, or its GPU hangs, so nothing else can be measured
            raise
        except Exception as e:
            problem = f"{probe.name}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        failed: list[str] | None = None
        while failed is None:  # ranks in a different exchange raise RuntimeError there, and then join this exchange
            try:
                failed = [s for s in exchanged(world, "probe", problem) if s]
            except Timeout:
                raise
            except RuntimeError as e:
                problem = problem or f"{probe.name}: {e}"
        if failed:
            if world.rank == 0:
                report(i, len(remaining), f"left out: {failed[0]}")
            continue
        profile += rows
        if world.rank == 0 and time.monotonic() - saved_at > SAVE_EVERY:
            save(profile)
            saved_at = time.monotonic()
    if world.rank == 0:
        save(profile)
    return profile


def start_of(machine: Hardware, path: Path, again: bool = False) -> Profile:
    """Return the profile in the file, with its date; or an empty profile with today's date if there is no file, or with
    `again`. Raises ProfileError if the file is not a profile of this machine."""
    empty = Profile(machine, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "weft tune")
    if again or not exists(path):
        return empty
    profile = read(path)
    differences = machine.differences(profile.machine)
    if differences:
        raise ProfileError(
            f"{path} is of another machine ({', '.join(differences)}): move it away, name another file, or "
            "`weft tune --again`"
        )
    return profile


def run(world: World, seconds: float, out: Path | None, report: Progress, again: bool = False) -> tuple[str, int, int]:
    """Measure this machine and store the profile in `out`, by default the file in which weft looks for its profile.
    again: measure everything, and replace the file. On several equal nodes, only the link between nodes is measured and
    added to the profile of one node. Collective.

    Return the file, the number of measurements in it, and the number of all measurements. Raises ProfileError for a
    file that cannot be continued, for nodes that differ, and for ranks that share a GPU.
    """
    if world.multi_node_unsupported and world.backend.two_level_unsupported:
        raise ProfileError(
            "a profile is of one node's GPUs, or of equal nodes, and of this World "
            f"{world.backend.two_level_unsupported}"
        )
    if world.backend.shares_gpu:
        raise ProfileError("ranks share a GPU, so times mean nothing")
    machine = this_machine(world.device, world.nodes.count(world.node))
    path = out or cache_path(machine)
    if path is None:
        raise ProfileError("platformdirs is not installed, so name a file with --out")
    shared: Profile | str = ""
    if world.rank == 0:
        try:
            shared = start_of(machine, path, again)
        except ProfileError as e:
            shared = str(e)
    profile = world.exchange(shared)[0]
    if isinstance(profile, str):
        raise ProfileError(profile)
    probes = list(probes_of(Bench(world, CudaTimer(world))))
    profile = measure(world, profile, seconds, probes, lambda p: write(p, path), report)
    wanted = {identity(row) for p in probes for row in p.rows}
    return str(path), len(wanted & {identity(row) for row in profile.rows()}), len(wanted)


def main() -> None:
    from ..launch import init

    p = argparse.ArgumentParser(description="Under torchrun: measure what the planner computes with.")
    p.add_argument("--seconds", type=float, default=100.0)
    p.add_argument("--out", type=Path)
    p.add_argument("--again", action="store_true")
    a = p.parse_args()
    world, last = init(), [0.0]

    def report(done: int, total: int, operation: str) -> None:
        if operation.startswith("left out") or time.monotonic() - last[0] > 5:
            last[0] = time.monotonic()
            print(f"{done}/{total} {operation}", flush=True)

    path, measured, wanted = run(world, a.seconds, a.out, report, a.again)
    if world.rank == 0:
        print(f"{path}: {measured} of {wanted} measurements", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
