"""What probes have in common: the sizes that are measured, the memory that probes work on, and a probe."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ...ops.tiles import fitting
from ...plans import NARROW, FusedGather, GemmTile, Signaled
from ...world import World
from ..parts import Occupancy
from ..profile import Latency, Measurement
from ..timing import Timer

BF = torch.bfloat16
Shape = tuple[int, int, int]
WAVES = (Occupancy(GemmTile()), Occupancy(NARROW, 2), Occupancy(GemmTile(stages=4)))  # all that the ops' plans use


@dataclass(frozen=True)
class Sizes:
    """What is measured; where there are two parts, the second when all else is done. gemms: (M, N, K). waves: (row
    tiles, column tiles, K). nbytes: of collectives and copies. gather, reduce: whole ops, (M, N, K) of the GEMM on one
    rank. ctas: limits of communicators. moved, beside: bytes and (M, N, K) of what runs side by side. few, few_rows:
    bytes of collectives by low-latency rows, and whole ops with them. tiles: whose waves are measured. signaled: what
    the signaled plans differ from in groups and CTAs."""

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
    tiles: tuple[Occupancy, ...] = WAVES
    signaled: Signaled = Signaled()


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


def fitted(sizes: Sizes, capability: int) -> Sizes:
    """Return `sizes` with the tiles that fused and signaled plans have on a GPU of that compute capability, where those
    differ from Hopper's."""
    fused, signaled = fitting(FusedGather(), capability), fitting(sizes.signaled, capability)
    if signaled == sizes.signaled and fused == FusedGather():
        return sizes
    tiles = Occupancy(fused.tile), Occupancy(GemmTile(block_k=signaled.tile.block_k))
    return replace(sizes, tiles=tiles, signaled=signaled)


@dataclass(frozen=True)
class Probe:
    """One thing to measure. gives: the measurements that `run` returns, with placeholders for the results."""

    what: str
    gives: tuple[Measurement, ...]
    run: Callable[[], Sequence[Measurement]]


class Bench:
    """What probes work on: a World, a timer, sizes, and memory for the largest of them."""

    def __init__(self, world: World, timer: Timer, sizes: Sizes = SIZES) -> None:
        self.world, self.timer, self.sizes = world, timer, fitted(sizes, world.capability)
        sizes = self.sizes
        most = max(s for part in sizes.nbytes for s in part)
        need = max(max(m * k, n * k, m * n) for part in sizes.gemms for m, n, k in part)
        need = max(need, *(_wave_need(w, r, c, k) for w in sizes.tiles for r, c, k in sizes.waves))
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

    def latency(self, what: str, nbytes: int, fn: Callable[[], object], ctas: int = 0, per: int = 1) -> Probe:
        row = Latency(what, ctas, nbytes, 1.0)
        said = f"{what} {size_of(nbytes)}" if nbytes else what
        return Probe(said, (row,), lambda: [replace(row, us=self.timer.graph(fn) / per)])

    def library(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        """The library's GEMM."""
        self.world.linear(x, w, None, self.world.current_stream(), out)


def _wave_need(on: Occupancy, row_tiles: int, col_tiles: int, k: int) -> int:
    m, n = row_tiles * on.tile.block_m, col_tiles * on.tile.block_n * on.per_sm
    return max(m * k, n * k, m * n)


def size_of(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
