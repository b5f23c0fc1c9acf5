"""Probes of transfers: collectives, copies and low-latency collectives, each alone and concurrent with a GEMM."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...backends.base import Stream
from ...cost.model import low_latency_name
from ...op import REGISTRY, collective
from ...plans import LowLatencyShot
from ...transport import low_latency as low_latency
from ...transport.copy_engine import sum_parts
from ...transport.order import peer_at
from ...transport.two_level import node_pairs, send
from ..profile import SEND_TO_NODE, Latency, Measurement, Slowdown, UsedCtas
from . import gemms
from .common import Bench, Probe, size_of

AFTER = ("reduce_scatter", "all_reduce", "all_to_all")  # collectives that a GEMM's signals can start


def collective_call(b: Bench, operation: str, ctas: int, nbytes: int) -> Callable[[Stream], None]:
    """Return a function of a stream that runs the collective on `nbytes`, rounded down to whole shards."""
    world = b.world
    shard = max(nbytes // 2 // world.size // 8 * 8, 8)
    full, part = b.full[: shard * world.size], b.part[:shard]
    communicator = (world.backend.communicator(ctas),) if ctas else ()
    if operation == "all_gather":
        return lambda stream: world.all_gather(full, part, stream, *communicator)
    if operation == "reduce_scatter":
        return lambda stream: world.reduce_scatter(part, full, stream, *communicator)
    if operation == "all_reduce":
        return lambda stream: world.all_reduce(full, stream, *communicator)
    outs, parts = b.part[: shard * world.size].split(shard), full.split(shard)
    return lambda stream: world.backend.all_to_all(outs, parts, stream, *communicator)


def collectives(b: Bench, operations: Sequence[str], ctas: int, sizes: Sequence[int]) -> Iterator[Probe]:
    for operation, nbytes in itertools.product(operations, sizes):
        row = Latency(operation, ctas, nbytes, 1.0)

        def run(row: Latency = row) -> list[Measurement]:
            move = collective_call(b, row.operation, row.ctas, row.nbytes)
            return [replace(row, us=b.timer.graph(lambda: move(b.world.current_stream())))]

        yield Probe(f"{operation} {size_of(nbytes)}{f', {ctas} CTAs' if ctas else ''}", (row,), run)


def low_latency_collective(b: Bench, op: str, plan: LowLatencyShot, nbytes: int) -> Probe:
    """Return a probe of a low-latency collective alone."""
    world, shard = b.world, nbytes // 2 // b.world.size // 8 * 8
    full, part = b.full[: shard * world.size].view(world.size, shard), b.part[:shard].view(1, shard)
    shards = (1,) * world.size

    def fn() -> None:
        stream = world.current_stream()
        if collective(op) == "all_reduce":
            REGISTRY["all_reduce"].call(world, plan, (full,), (), None)
        elif collective(op) == "all_gather":
            low_latency.gather(part, world, plan, shards, stream)
        else:
            low_latency.prepare_scatter(world, plan, shards, shard, full.dtype)(part, full, stream)

    return b.latency(low_latency_name(collective(op), plan), nbytes, fn)


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
    """Yield probes of the link between nodes: all ranks of a node send at once, as in two-level plans."""
    target, source = next(node_pairs(b.world))
    for size in sizes:
        part, into = b.part[: size // 2], b.full[: size // 2]

        def fn(part: torch.Tensor = part, into: torch.Tensor = into) -> None:
            send(b.world, part, target, into, source, b.world.current_stream())

        yield b.latency(SEND_TO_NODE, size, fn)


def sum_of_parts(b: Bench, count: int) -> None:
    """Run the sum at the end of a decomposed reduce-scatter, over rows of 1024 elements, or of `count` elements if
    `count` is smaller."""
    n = min(1024, count)
    out = b.out.view(-1)[: count // n * n].view(count // n, n)
    sum_parts(b.part, b.full, out, None, b.world, b.world.current_stream())


def concurrent_probes(b: Bench, operation: str, ctas: int) -> Iterator[Probe]:
    """Yield a probe of a collective or copy concurrent with a GEMM. With a limited communicator, the probe runs weft's
    own GEMM, which leaves the communicator's SMs free."""
    world, (m, n, k) = b.world, b.sizes.concurrent_gemm
    row = Slowdown(operation, ctas, 1.0, 1.0)

    def run() -> list[Measurement]:
        x, w, out = b.x[: m * k].view(m, k), b.w[: n * k].view(n, k), b.out[: m * n].view(m, n)
        if operation == "copy":
            size = b.sizes.moved_bytes // world.size
            memory = world.buffer("tune", size).view(0, (size,), torch.uint8)
            source, target = memory.peers[peer_at(1, world.rank, world.size)], b.part.view(torch.uint8)[:size]
            move: Callable[[Stream], object] = lambda stream: world.copy(target, source, stream)  # noqa: E731
        else:
            move = collective_call(b, operation, ctas, b.sizes.moved_bytes)
        gemm = lambda: b.library(x, w, out)  # noqa: E731
        if ctas:
            gemm = lambda: gemms.run_tiles(b, b.sizes.tiles[0].tile, world.sm_count - ctas, m, n, k)  # noqa: E731
        gemm_slowdown, transfer_slowdown = b.timer.together(gemm, move)
        return [replace(row, gemm=gemm_slowdown, transfer=transfer_slowdown)]

    yield Probe(f"GEMM concurrent with {operation}{f', {ctas} CTAs' if ctas else ''}", (row,), run)


def ctas_probe(b: Bench) -> Probe:
    """Return a probe that uses torch's profiler to determine the number of CTAs of each collective. This probe runs
    last, because the profiler would slow down other probes."""
    limits = [("all_gather", 0), *((operation, ctas) for ctas in (0, *b.sizes.ctas) for operation in AFTER)]
    rows = tuple(UsedCtas(operation, ctas, b.sizes.moved_bytes, 0) for operation, ctas in limits)

    def run() -> list[Measurement]:
        moves = [collective_call(b, row.operation, row.ctas, row.nbytes) for row in rows]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for move in moves:
                move(b.world.current_stream())
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
        kernels = sorted(
            (e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"].lower()), key=lambda e: e["ts"]
        )
        if len(kernels) != len(rows):
            raise RuntimeError(f"the profiler saw {len(kernels)} kernels of {len(rows)} collectives")
        return [replace(row, used=int(e["args"]["grid"][0])) for row, e in zip(rows, kernels, strict=True)]

    return Probe("CTAs of the collectives", rows, run)
