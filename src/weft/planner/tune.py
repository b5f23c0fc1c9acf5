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
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..backends.base import Arguments, Stream
from ..compute.gemm import matmul as gemm_kernel
from ..errors import Timeout
from ..op import REGISTRY, around, collective, collectives
from ..ops.all_gather_matmul.op import TWO_AN_SM
from ..ops.all_reduce.op import ALL_REDUCE
from ..ops.common import tile_of
from ..ops.matmul import ALONE
from ..plans import Decomposed, Fused, OneShot, Plan, Sequential, Signaled, TwoShot
from ..transport import low_latency as posted
from ..transport.copies import peer_at
from ..transport.memory import rank_word
from ..transport.sums import sum_staged
from ..world import World
from .auto import time_check, time_launch
from .predict import SHOTS, by_posted_rows
from .profile import (
    Beside,
    Gemm,
    Hardware,
    Latency,
    Measurement,
    Profile,
    ProfileError,
    Takes,
    TimedCall,
    Wave,
    cache_path,
    exists,
    identity,
    read,
    this_machine,
    write,
)
from .search import PIECES, SINGLE
from .timing import CudaTimer, Timer, exchanged

BF = torch.bfloat16
SAVE_EVERY = 3.0  # seconds
FEW = 32 << 20  # bytes, at most, of what is posted

AFTER = ("reduce_scatter", "all_reduce", "all_to_all")  # what a GEMM's signals can start
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Sizes:
    """What is measured; where there are two parts, the second when all else is done. gemms: (M, N, K). waves: (row
    tiles, column tiles, K). nbytes: of collectives and copies. gather, reduce: whole ops, (M, N, K) of the GEMM on one
    rank. ctas: limits of communicators. moved, beside: bytes and (M, N, K) of what runs side by side. few, few_rows:
    bytes of collectives by low-latency rows, and whole ops with them."""

    gemms: tuple[tuple[Shape, ...], tuple[Shape, ...]]
    waves: tuple[Shape, ...]
    nbytes: tuple[tuple[int, ...], tuple[int, ...]]
    gather: tuple[tuple[Shape, ...], tuple[Shape, ...]]
    reduce: tuple[tuple[Shape, ...], tuple[Shape, ...]]
    ctas: tuple[int, ...]
    moved: int
    beside: Shape
    few: tuple[int, ...]
    few_rows: tuple[Shape, ...]


def variants() -> dict[str, Sequence[Plan]]:
    """By op: its plans of one kind, those that won on most shapes first."""
    return {name: op.variants for name, op in REGISTRY.items() if op.variants}


def posts_up_to(op: str, plan: OneShot | TwoShot, world: int) -> int:
    """Bytes for which low-latency rows are tried: fewer where every rank gets all that is sent; 0: it is not the
    op's."""
    if plan.kind not in REGISTRY[op].kinds:
        return 0
    return FEW // world if (collective(op), plan) == ("all_reduce", OneShot()) else FEW


def _grid(ms: Sequence[int], ns: Sequence[int], ks: Sequence[int]) -> tuple[Shape, ...]:
    return tuple(itertools.product(ms, ns, ks))


COARSE = _grid((128, 1024, 4096, 8192), (2048, 4096, 8192), (1024, 4096, 8192))
FINE = (
    *_grid((512, 2048, 16384), (2048, 4096, 8192), (1024, 4096, 8192)),
    *_grid((1024, 2048, 8192), (1536, 2752, 3584, 4608, 7168, 9216), (2048, 4096, 8192)),
    *_grid((64, 256), (2048, 8192), (1024, 4096, 8192)),
    *_grid((4096, 8192), (4096, 8192), (1536, 2048, 3584)),
    *_grid((16, 768, 1536, 3072, 6144), (4096, 8192), (2048, 8192)),
    *_grid((16384,), (4608, 7168), (4096, 8192)),
    *_grid((32768,), (4096, 8192), (4096,)),
)
SIZES = Sizes(
    gemms=(COARSE, FINE),
    # 132 and 264 programs: 1, 2, 4 and 8 waves of 11 columns of tiles; 4.5 and 2.25; and what 124 or 128 programs
    # finish
    waves=_grid((12, 24, 48, 96, 54, 27), (11,), (1024, 2048, 4096, 8192)) + _grid((32, 64), (31,), (2048, 8192)),
    nbytes=(
        tuple(1 << i for i in range(20, 29, 2)),
        tuple(sorted({1 << i for i in range(16, 31)} | {3 << i for i in range(15, 29)})),
    ),
    gather=(
        ((8192, 2560, 4096), (8192, 7168, 6144), (2048, 6144, 8192)),
        ((4096, 4096, 4096), (1024, 4096, 8192), (16384, 3072, 4096), (8192, 9216, 4096)),
    ),
    reduce=(
        ((8192, 4096, 1536), (8192, 8192, 4096), (2048, 8192, 4096)),
        ((4096, 4096, 4096), (1024, 8192, 2048), (16384, 4096, 2048), (8192, 4608, 5120), (512, 8192, 4096)),
    ),
    ctas=(16, 24, 8, 4),
    moved=64 << 20,
    beside=(8192, 4096, 4096),
    few=tuple(sorted([1 << i for i in range(15, 26)] + [3 << i for i in range(15, 24)])),
    few_rows=((64, 8192, 4096), (128, 4096, 8192), (512, 8192, 2048)),
)


@dataclass(frozen=True)
class Probe:
    """gives: the measurements that `run` returns, of whatever result."""

    what: str
    gives: tuple[Measurement, ...]
    run: Callable[[], Sequence[Measurement]]


class Probes:
    """All probes of a World, the most important first. Allocates what they work on."""

    def __init__(self, world: World, timer: Timer, sizes: Sizes = SIZES) -> None:
        self.world, self.timer, self.sizes = world, timer, sizes
        most = max(s for part in sizes.nbytes for s in part)
        need = max(max(m * k, n * k, m * n) for part in sizes.gemms for m, n, k in part)
        need = max(need, *(_wave_need(w, r, c, k) for w in WAVES for r, c, k in sizes.waves))
        shapes = [*(s for part in (*sizes.gather, *sizes.reduce) for s in part), sizes.beside, *sizes.few_rows]
        need = max(need, *(max(m * k, n * k, m * n) for m, n, k in shapes))
        self.x, self.w = (self._random(need) for _ in range(2))
        self.out = world.empty((need,), BF)
        self.full, self.part = (world.zeros((max(most // 2, 1),), BF) for _ in range(2))
        self.copies = world.symmetric_reason is None

    def _random(self, count: int) -> torch.Tensor:
        made = self.world.empty((count,), BF)
        made.copy_(torch.randn(count, dtype=BF, device=made.device) * 0.1)
        return made

    def __iter__(self) -> Iterator[Probe]:
        coarse, rest = self.sizes.nbytes
        yield Probe("self-check", (Latency("check", 0, 0, 1.0),), self._check)
        if self.world.device.type == "cuda":
            yield Probe("the host's launches", (Latency("launch", 0, 0, 1.0),), self._launch)
        if self.copies:
            yield self._latency("barrier", 0, lambda: self.world.barrier())
        for what in ("all_gather", "reduce_scatter", "all_reduce"):
            yield from (self._collective(what, 0, size) for size in coarse)
        yield from self._copies(coarse)
        yield from (self._gemm(*size) for size in self.sizes.gemms[0])
        for wave in WAVES:
            yield from (self._wave(wave, *size) for size in self.sizes.waves)
        yield from self._beside("copy", 0) if self.copies else ()
        yield from self._calls(0)
        yield from self._few_rows() if self.copies else ()
        for ctas in self.sizes.ctas[:2]:
            for what in AFTER:
                yield from (self._collective(what, ctas, size) for size in coarse)
                yield from self._beside(what, ctas)
        yield from self._signaled_calls(0)
        yield from self._eager_calls()
        for what in ("all_reduce", "all_gather", "reduce_scatter"):
            yield from self._beside(what, 0)
        yield from (self._gemm(*size) for size in self.sizes.gemms[1])
        for what in ("all_gather", "reduce_scatter", "all_reduce"):
            yield from (self._collective(what, 0, size) for size in rest)
        yield from self._copies(rest)
        yield from (self._collective("all_to_all", 0, size) for size in (*coarse, *rest))
        for ctas in self.sizes.ctas:
            for what in AFTER:
                yield from (self._collective(what, ctas, size) for size in (*coarse, *rest))
                yield from self._beside(what, ctas)
        yield from self._calls(1)
        yield from self._signaled_calls(1)
        if self.world.device.type == "cuda":
            yield self._takes()

    # -- one number each
    def _launch(self) -> list[Measurement]:
        return [Latency("launch", 0, 0, max(us for us in self.world.exchange(time_launch(self.world.device)) if us))]

    def _check(self) -> list[Measurement]:
        if self.world.device.type != "cuda":
            return [Latency("check", 0, 0, self.timer.graph(lambda: None))]
        return [Latency("check", 0, 0, max(self.world.exchange(time_check(self.world.device))))]

    def _latency(self, what: str, nbytes: int, fn: Callable[[], object], ctas: int = 0, per: int = 1) -> Probe:
        row = Latency(what, ctas, nbytes, 1.0)
        said = f"{what} {_size(nbytes)}" if nbytes else what
        return Probe(said, (row,), lambda: [replace(row, us=self.timer.graph(fn) / per)])

    def _gemm(self, m: int, n: int, k: int) -> Probe:
        row = Gemm(m, n, k, 1.0)
        x, w, out = self.x[: m * k].view(m, k), self.w[: n * k].view(n, k), self.out[: m * n].view(m, n)
        fn = lambda: self._library(x, w, out)  # noqa: E731
        return Probe(f"GEMM {m} x {n} x {k}", (row,), lambda: [replace(row, us=self.timer.graph(fn))])

    def _library(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        self.world.linear(x, w, None, self.world.current_stream(), out)

    def _wave(self, tile: Fused, row_tiles: int, col_tiles: int, k: int) -> Probe:
        """As many programs as divide the tiles, of those that the ops use: all, or a few less."""
        if tile.per_sm == 2:
            col_tiles *= 2
        tiles = row_tiles * col_tiles
        sms = self.world.sm_count
        programs = next((p for p in (sms, sms - 4, sms - 8) if tiles % p == 0), sms) * tile.per_sm
        row = Wave(
            tile.block_m, tile.block_n, tile.block_k, tile.warps, tile.stages, tile.per_sm, programs, tiles, k, 1.0
        )
        m, n = row_tiles * tile.block_m, col_tiles * tile.block_n
        fn = lambda: self._tiles(tile, programs, m, n, k)  # noqa: E731
        said = f"waves of {tile.block_m} x {tile.block_n}, {tiles} over {programs}, K {k}"
        return Probe(said, (row,), lambda: [replace(row, us=self.timer.graph(fn))])

    def _tiles(self, tile: Fused, programs: int, m: int, n: int, k: int) -> None:
        bm, bn, bk = tile.block_m, tile.block_n, tile.block_k

        def args() -> Arguments:
            return dict(
                a_desc=TensorDescriptor(self.x, [m, k], [k, 1], [bm, bk]),
                b_desc=TensorDescriptor(self.w, [n, k], [k, 1], [bn, bk]),
                out_desc=TensorDescriptor(self.out, [m, n], [n, 1], [bm, bn // 2]),
                M=m,
                N=n,
                K=k,
                tile=tile_of(tile, tile.group_m),
                GATED=0,
                **ALONE,
            )

        options = dict(num_warps=tile.warps, num_stages=tile.stages)
        key = ("tune", tile, programs, m, n, k)
        self.world.launch(gemm_kernel, programs, args, options, self.world.current_stream(), key)

    # -- moving bytes
    def _move(self, what: str, ctas: int, nbytes: int) -> Callable[[Stream], None]:
        """what(stream) of `nbytes` rounded down to whole shards."""
        world = self.world
        each = max(nbytes // 2 // world.size // 8 * 8, 8)
        full, part = self.full[: each * world.size], self.part[:each]
        on = (world.communicator(ctas),) if ctas else ()
        if what == "all_gather":
            return lambda stream: world.all_gather(full, part, stream, *on)
        if what == "reduce_scatter":
            return lambda stream: world.reduce_scatter(part, full, stream, *on)
        if what == "all_reduce":
            return lambda stream: world.all_reduce(full, stream, *on)
        outs, parts = self.part[: each * world.size].split(each), full.split(each)
        return lambda stream: world.all_to_all(outs, parts, stream, *on)

    def _collective(self, what: str, ctas: int, nbytes: int) -> Probe:
        row = Latency(what, ctas, nbytes, 1.0)

        def run() -> list[Measurement]:
            move = self._move(what, ctas, nbytes)
            return [replace(row, us=self.timer.graph(lambda: move(self.world.current_stream())))]

        return Probe(f"{what} {_size(nbytes)}{f', {ctas} CTAs' if ctas else ''}", (row,), run)

    def _posted(self, op: str, plan: OneShot | TwoShot, nbytes: int) -> Probe:
        """Alone."""
        world, each = self.world, nbytes // 2 // self.world.size // 8 * 8
        full, part = self.full[: each * world.size].view(world.size, each), self.part[:each].view(1, each)
        shards = (1,) * world.size

        def fn() -> None:
            stream = world.current_stream()
            if collective(op) == "all_reduce":
                ALL_REDUCE.call(world, plan, (full,), (), None)
            elif collective(op) == "all_gather":
                posted.gather(part, world, plan, shards, stream)
            else:
                posted.scatter(full, world, plan, shards, stream, part)

        return self._latency(by_posted_rows(collective(op), plan), nbytes, fn)

    def _few_rows(self) -> Iterator[Probe]:
        """The collectives by low-latency rows, alone and in whole ops, beside the library's."""
        for op in variants():
            most = {plan: posts_up_to(op, plan, self.world.size) for plan in SHOTS}
            plans = [plan for plan in SHOTS if most[plan]]
            for plan in plans:
                yield from (self._posted(op, plan, size) for size in self.sizes.few if size <= most[plan])
            beside = Sequential(), Decomposed((1,) * self.world.size), *plans, *variants()[op]
            yield from (self._call(op, plan, *shape) for plan in beside for shape in self.sizes.few_rows)

    def _copies(self, sizes: Sequence[int]) -> Iterator[Probe]:
        world, largest = self.world, min(256 << 20, max(s for part in self.sizes.nbytes for s in part))
        if not self.copies:
            return
        for size in sizes:
            if size > largest:
                continue
            bytes_, out = self.full.view(torch.uint8)[:size], self.part.view(torch.uint8)[:size]

            def chain(size: int = size, out: torch.Tensor = out) -> None:
                memory = world.buffer("tune", largest).view(0, (size,), torch.uint8)
                for step in range(1, world.size):
                    world.copy(out, memory.peers[peer_at(step, world.rank, world.size)], world.current_stream())

            def local(src: torch.Tensor = bytes_, out: torch.Tensor = out) -> None:
                world.copy(out, src, world.current_stream())

            yield self._latency("copy", size, chain, per=world.size - 1)
            yield self._latency("local", size, local)
            if size * (world.size + 2) <= self.full.numel() * 2:
                yield self._latency("sum", size, lambda size=size: self._sum(size // 2))  # type: ignore[misc]

    def _sum(self, count: int) -> None:
        """What a decomposed reduce-scatter ends with, over columns of 1024 elements or all."""
        world, n = self.world, min(1024, count)
        rows, block = count // n, self.world.scale.block
        args = dict(
            own=self.part,
            staging=self.full,
            out=self.out,
            bias=self.out,
            rows=rows,
            N=n,
            me=rank_word(world),
            W=world.size,
            BIAS=False,
            BLOCK=block,
            ALIGNED=n % 8 == 0,
        )
        programs = min(world.sm_count * 4, -(-rows * n // block))
        world.launch(sum_staged, programs, args, dict(num_warps=8), world.current_stream(), ("tune sum", rows, n))

    def _beside(self, what: str, ctas: int) -> Iterator[Probe]:
        """The library's GEMM, or beside a limited communicator one that leaves its SMs free."""
        world, (m, n, k) = self.world, self.sizes.beside
        row = Beside(what, ctas, 1.0, 1.0)

        def run() -> list[Measurement]:
            x, w, out = self.x[: m * k].view(m, k), self.w[: n * k].view(n, k), self.out[: m * n].view(m, n)
            if what == "copy":
                size = self.sizes.moved // world.size
                memory = world.buffer("tune", size).view(0, (size,), torch.uint8)
                peer, to = memory.peers[peer_at(1, world.rank, world.size)], self.part.view(torch.uint8)[:size]
                move: Callable[[Stream], object] = lambda stream: world.copy(to, peer, stream)  # noqa: E731
            else:
                move = self._move(what, ctas, self.sizes.moved)
            gemm = lambda: self._library(x, w, out)  # noqa: E731
            if ctas:
                gemm = lambda: self._tiles(WAVES[0], world.sm_count - ctas, m, n, k)  # noqa: E731
            slow, other = self.timer.together(gemm, move)
            return [replace(row, gemm=slow, other=other)]

        yield Probe(f"GEMM beside {what}{f', {ctas} CTAs' if ctas else ''}", (row,), run)

    def _takes(self) -> Probe:
        """By the profiler, which no other probe should run under."""
        limits = [("all_gather", 0), *((what, ctas) for ctas in (0, *self.sizes.ctas) for what in AFTER)]
        rows = tuple(Takes(what, ctas, self.sizes.moved, 0) for what, ctas in limits)

        def run() -> list[Measurement]:
            moves = [self._move(row.what, row.ctas, row.nbytes) for row in rows]
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                for move in moves:
                    move(self.world.current_stream())
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

    # -- whole ops
    def _call(self, op: str, plan: Plan, m: int, n: int, k: int, mode: str = "graph") -> Probe:
        row = TimedCall(op, plan.to_json(), m, n, k, mode, 1.0)
        rows = m // self.world.size if collective(op) == "all_gather" else m
        x, w = self.x[: rows * k].view(rows, k), self.w[: n * k].view(n, k)

        def run() -> list[Measurement]:
            import weft  # whose functions are timed, with all that they do on the host

            more: dict[str, object] = {}
            if collective(op) == "all_to_all":  # as many rows to every rank
                more["destinations"] = weft.route([i % self.world.size for i in range(m)], world=self.world)
            fn = lambda: getattr(weft, op)(x, w, world=self.world, plan=plan, **more)  # noqa: E731
            fn()  # raises Unsupported on every rank before anything is timed
            return [replace(row, us=(self.timer.graph if mode == "graph" else self.timer.eager)(fn))]

        return Probe(f"{op} {plan.kind} {m} x {n} x {k}{' eager' if mode == 'eager' else ''}", (row,), run)

    def _of(self, op: str, part: int) -> tuple[Shape, ...]:
        return (self.sizes.gather if collective(op) == "all_gather" else self.sizes.reduce)[part]

    def _calls(self, part: int) -> Iterator[Probe]:
        """Sequential, decomposed and fused."""
        world = self.world.size
        doubling: list[int] = [1]
        while sum(doubling) < world and world & (world - 1) == 0:
            doubling.append(sum(doubling))
        chunks = [Decomposed((1,) * world), Decomposed(tuple(doubling))] if sum(doubling) == world else [Decomposed()]
        for op, fused in variants().items():
            pieces = [Decomposed((1,) * world, PIECES)] if collective(op) == "reduce_scatter" else []
            plans: list[Plan] = [Sequential(), *((*chunks, *pieces, *fused) if self.copies else ())]
            yield from (self._call(op, plan, *shape) for plan in plans for shape in self._of(op, part))
        yield from (
            self._call(around("all_to_all"), Sequential(), *shape) for shape in self._of(around("all_to_all"), part)
        )

    def _signaled_calls(self, part: int) -> Iterator[Probe]:
        """Few groups and many, a short first one and a short last one."""
        for op in (op for op, what in collectives().items() if what in AFTER):
            for ctas in self.sizes.ctas[:2]:
                for groups in ((), (1, 2, 4, 8, 16), (2,) * 16):
                    plan = replace(self._signaled(), groups=groups, ctas=ctas)
                    yield from (self._call(op, plan, *shape) for shape in self._of(op, part))
            for groups in ((), SINGLE) if self.copies else ():
                plan = replace(self._signaled(), groups=groups, ctas=min(self.sizes.ctas), copies=True)
                yield from (self._call(op, plan, *shape) for shape in self._of(op, part))

    def _signaled(self) -> Signaled:
        return Signaled()

    def _eager_calls(self) -> Iterator[Probe]:
        """One call that takes no time, so that the host's is seen, and one that hides it, of every op and kind."""
        for op, fused in variants().items():
            plans: list[Plan] = [Sequential(), *((Decomposed(), fused[0]) if self.copies else ())]
            if collective(op) != "all_gather":
                plans.append(self._signaled())
                if self.copies:
                    plans.append(replace(self._signaled(), ctas=min(self.sizes.ctas), copies=True))
            large = self._of(op, 0)[0]
            small = (min(self.world.size * 128, large[0]), min(256, large[1]), min(256, large[2]))
            for plan in plans:
                yield self._call(op, plan, *large)
                yield from (self._call(op, plan, m, n, k, "eager") for m, n, k in (small, large))
            some = (min(1024, large[0]), *large[1:])
            for few in SHOTS if self.copies else ():
                if few.kind in REGISTRY[op].kinds:
                    yield from (self._call(op, few, *s, mode) for s in (small, some) for mode in ("graph", "eager"))


WAVES = (Fused(), TWO_AN_SM, Fused(stages=4))  # all tile configurations that the ops' plans use


def _wave_need(tile: Fused, row_tiles: int, col_tiles: int, k: int) -> int:
    m, n = row_tiles * tile.block_m, col_tiles * tile.block_n * tile.per_sm
    return max(m * k, n * k, m * n)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


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
    that it cannot go on with."""
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
    probes = list(Probes(world, CudaTimer(world)))
    profile = measure(world, profile, seconds, probes, lambda p: write(p, path), say)
    wanted = {identity(row) for p in probes for row in p.gives}
    return str(path), len(wanted & {identity(row) for row in profile.rows()}), len(wanted)


def main() -> None:
    from ..world import init

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
