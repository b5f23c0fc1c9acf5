"""Probes of what moves bytes: collectives, copies, low-latency rows, each alone and beside a GEMM."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...backends.base import Stream
from ...op import REGISTRY
from ...op import collective as collective_of
from ...plans import LowLatencyShot
from ...transport import low_latency as posted_rows
from ...transport.copy_engine import sum_parts
from ...transport.order import peer_at
from ...transport.two_level import hops, send
from ..parts import by_posted_rows
from ..profile import SEND_TO_NODE, Beside, Latency, Measurement, Takes
from . import gemms
from .common import Bench, Probe, size_of

AFTER = ("reduce_scatter", "all_reduce", "all_to_all")  # what a GEMM's signals can start


def mover(b: Bench, what: str, ctas: int, nbytes: int) -> Callable[[Stream], None]:
    """Return a function of a stream that runs the collective `what` on `nbytes`, rounded down to whole shards."""
    world = b.world
    each = max(nbytes // 2 // world.size // 8 * 8, 8)
    full, part = b.full[: each * world.size], b.part[:each]
    on = (world.communicator(ctas),) if ctas else ()
    if what == "all_gather":
        return lambda stream: world.all_gather(full, part, stream, *on)
    if what == "reduce_scatter":
        return lambda stream: world.reduce_scatter(part, full, stream, *on)
    if what == "all_reduce":
        return lambda stream: world.all_reduce(full, stream, *on)
    outs, parts = b.part[: each * world.size].split(each), full.split(each)
    return lambda stream: world.all_to_all(outs, parts, stream, *on)


def collective(b: Bench, what: str, ctas: int, nbytes: int) -> Probe:
    row = Latency(what, ctas, nbytes, 1.0)

    def run() -> list[Measurement]:
        move = mover(b, what, ctas, nbytes)
        return [replace(row, us=b.timer.graph(lambda: move(b.world.current_stream())))]

    return Probe(f"{what} {size_of(nbytes)}{f', {ctas} CTAs' if ctas else ''}", (row,), run)


def posted(b: Bench, op: str, plan: LowLatencyShot, nbytes: int) -> Probe:
    """Probe a collective by low-latency rows alone."""
    world, each = b.world, nbytes // 2 // b.world.size // 8 * 8
    full, part = b.full[: each * world.size].view(world.size, each), b.part[:each].view(1, each)
    shards = (1,) * world.size

    def fn() -> None:
        stream = world.current_stream()
        if collective_of(op) == "all_reduce":
            REGISTRY["all_reduce"].call(world, plan, (full,), (), None)
        elif collective_of(op) == "all_gather":
            posted_rows.gather(part, world, plan, shards, stream)
        else:
            posted_rows.scatter(full, world, plan, shards, stream, part)

    return b.latency(by_posted_rows(collective_of(op), plan), nbytes, fn)


def copies(b: Bench, sizes: Sequence[int]) -> Iterator[Probe]:
    world, largest = b.world, min(256 << 20, max(s for part in b.sizes.nbytes for s in part))
    if not b.copies:
        return
    for size in sizes:
        if size > largest:
            continue
        bytes_, out = b.full.view(torch.uint8)[:size], b.part.view(torch.uint8)[:size]

        def chain(size: int = size, out: torch.Tensor = out) -> None:
            memory = world.buffer("tune", largest).view(0, (size,), torch.uint8)
            for step in range(1, world.size):
                world.copy(out, memory.peers[peer_at(step, world.rank, world.size)], world.current_stream())

        def local(src: torch.Tensor = bytes_, out: torch.Tensor = out) -> None:
            world.copy(out, src, world.current_stream())

        yield b.latency("copy", size, chain, per=world.size - 1)
        yield b.latency("local", size, local)
        if size * (world.size + 2) <= b.full.numel() * 2:
            yield b.latency("sum", size, lambda size=size: sum_of_parts(b, size // 2))  # type: ignore[misc]


def sends(b: Bench, sizes: Sequence[int]) -> Iterator[Probe]:
    """Probe the link between nodes: all ranks of a node send at once, as two-level plans have them."""
    target, source = next(hops(b.world))
    for size in sizes:
        part, into = b.part[: size // 2], b.full[: size // 2]

        def fn(part: torch.Tensor = part, into: torch.Tensor = into) -> None:
            send(b.world, part, target, into, source, b.world.current_stream())

        yield b.latency(SEND_TO_NODE, size, fn)


def sum_of_parts(b: Bench, count: int) -> None:
    """What a decomposed reduce-scatter ends with, over columns of 1024 elements or all."""
    n = min(1024, count)
    out = b.out.view(-1)[: count // n * n].view(count // n, n)
    sum_parts(b.part, b.full, out, None, b.world, b.world.current_stream())


def beside(b: Bench, what: str, ctas: int) -> Iterator[Probe]:
    """Probe `what` beside a GEMM: the library's, or, beside a limited communicator, one that leaves its SMs free."""
    world, (m, n, k) = b.world, b.sizes.beside
    row = Beside(what, ctas, 1.0, 1.0)

    def run() -> list[Measurement]:
        x, w, out = b.x[: m * k].view(m, k), b.w[: n * k].view(n, k), b.out[: m * n].view(m, n)
        if what == "copy":
            size = b.sizes.moved // world.size
            memory = world.buffer("tune", size).view(0, (size,), torch.uint8)
            peer, to = memory.peers[peer_at(1, world.rank, world.size)], b.part.view(torch.uint8)[:size]
            move: Callable[[Stream], object] = lambda stream: world.copy(to, peer, stream)  # noqa: E731
        else:
            move = mover(b, what, ctas, b.sizes.moved)
        gemm = lambda: b.library(x, w, out)  # noqa: E731
        if ctas:
            gemm = lambda: gemms.run_tiles(b, b.sizes.tiles[0].tile, world.sm_count - ctas, m, n, k)  # noqa: E731
        slow, other = b.timer.together(gemm, move)
        return [replace(row, gemm=slow, other=other)]

    yield Probe(f"GEMM beside {what}{f', {ctas} CTAs' if ctas else ''}", (row,), run)


def takes(b: Bench) -> Probe:
    """Read from torch's profiler, under which no other probe should run, how many CTAs each collective takes."""
    limits = [("all_gather", 0), *((what, ctas) for ctas in (0, *b.sizes.ctas) for what in AFTER)]
    rows = tuple(Takes(what, ctas, b.sizes.moved, 0) for what, ctas in limits)

    def run() -> list[Measurement]:
        moves = [mover(b, row.what, row.ctas, row.nbytes) for row in rows]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for move in moves:
                move(b.world.current_stream())
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            seen.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
        kernels = sorted(
            (e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"].lower()), key=lambda e: e["ts"]
        )
        if len(kernels) != len(rows):
            raise RuntimeError(f"the profiler saw {len(kernels)} kernels of {len(rows)} collectives")
        return [replace(row, seen=int(e["args"]["grid"][0])) for row, e in zip(rows, kernels, strict=True)]

    return Probe("CTAs of the collectives", rows, run)
