"""The measured sizes, the memory that all probes use, and the class of a probe."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ...cost.model import Occupancy
from ...ops.tiles import with_architecture_tiles
from ...plans import NARROW, FusedGather, GemmTile, Signaled
from ...world import World
from ..profile import Latency, Measurement
from ..tuner import Timer

BF = torch.bfloat16
GemmShape = tuple[int, int, int]
# The tiles, with their programs per SM, of all GEMMs in the ops' plans.
WAVES = (Occupancy(GemmTile()), Occupancy(NARROW, 2), Occupancy(GemmTile(stages=4)))


@dataclass(frozen=True)
class Sizes:
    """The measured sizes. If a field has two parts, the second part is measured after everything else.

    gemms: (M, N, K). waves: (row tiles, column tiles, K). nbytes: bytes of collectives and copies. gather, reduce: of
    whole ops, (M, N, K) of the GEMM on one rank. ctas: limits of communicators. moved_bytes, concurrent_gemm: bytes of
    a transfer and (M, N, K) of a GEMM that run concurrently. low_latency_bytes, low_latency_shapes: the bytes of
    low-latency collectives, and (M, N, K) of whole ops that use them. tiles: tile configurations with measured waves.
    signaled: measured signaled plans differ from this plan only in groups and CTAs.
    """

    gemms: tuple[tuple[GemmShape, ...], tuple[GemmShape, ...]]
    waves: tuple[GemmShape, ...]
    nbytes: tuple[tuple[int, ...], tuple[int, ...]]
    gather: tuple[tuple[GemmShape, ...], tuple[GemmShape, ...]]
    reduce: tuple[tuple[GemmShape, ...], tuple[GemmShape, ...]]
    ctas: tuple[int, ...]
    moved_bytes: int
    concurrent_gemm: GemmShape
    low_latency_bytes: tuple[int, ...]
    low_latency_shapes: tuple[GemmShape, ...]
    tiles: tuple[Occupancy, ...] = WAVES
    signaled: Signaled = Signaled()


def _grid(ms: Sequence[int], ns: Sequence[int], ks: Sequence[int]) -> tuple[GemmShape, ...]:
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
    # With 132 and 264 programs, 11 columns of tiles give 1, 2, 4 and 8 waves, then 4.5 and 2.25. With 31 columns: whole
    # waves of 124 or 128 programs.
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
    moved_bytes=64 << 20,
    concurrent_gemm=(8192, 4096, 4096),
    low_latency_bytes=tuple(sorted([1 << i for i in range(15, 26)] + [3 << i for i in range(15, 24)])),
    low_latency_shapes=((64, 8192, 4096), (128, 4096, 8192), (512, 8192, 2048)),
)


def fitted(sizes: Sizes, capability: int) -> Sizes:
    """Return `sizes` with the tiles of fused and signaled plans on a GPU of that compute capability."""
    fused, signaled = (
        with_architecture_tiles(FusedGather(), capability),
        with_architecture_tiles(sizes.signaled, capability),
    )
    if signaled == sizes.signaled and fused == FusedGather():
        return sizes
    tiles = Occupancy(fused.tile), Occupancy(GemmTile(block_k=signaled.tile.block_k))
    return replace(sizes, tiles=tiles, signaled=signaled)


@dataclass(frozen=True)
class Probe:
    """A probe: one or a few measurements. rows: the rows that `run` returns, with placeholders for the results."""

    name: str
    rows: tuple[Measurement, ...]
    run: Callable[[], Sequence[Measurement]]


class Bench:
    """The objects that probes use: a World, a timer, sizes, and memory for the largest sizes."""

    def __init__(self, world: World, timer: Timer, sizes: Sizes = SIZES) -> None:
        self.world, self.timer, self.sizes = world, timer, fitted(sizes, world.backend.capability)
        sizes = self.sizes
        most_bytes = max(s for part in sizes.nbytes for s in part)
        shapes = [
            *(shape for part in (*sizes.gemms, *sizes.gather, *sizes.reduce) for shape in part),
            *(_wave_shape(occupancy, *wave) for occupancy in sizes.tiles for wave in sizes.waves),
            sizes.concurrent_gemm,
            *sizes.low_latency_shapes,
        ]
        elements = max(max(m * k, n * k, m * n) for m, n, k in shapes)
        self.x, self.w = (self._random(elements) for _ in range(2))
        self.out = world.empty((elements,), BF)
        self.full, self.part = (world.zeros((max(most_bytes // 2, 1),), BF) for _ in range(2))
        self.copies = world.backend.symmetric_unsupported is None

    def _random(self, count: int) -> torch.Tensor:
        values = self.world.empty((count,), BF)
        values.copy_(torch.randn(count, dtype=BF, device=values.device) * 0.1)
        return values

    def latency(self, operation: str, nbytes: int, fn: Callable[[], object], per: int = 1) -> Probe:
        row = Latency(operation, 0, nbytes, 1.0)
        name = f"{operation} {size_of(nbytes)}" if nbytes else operation
        return Probe(name, (row,), lambda: [replace(row, us=self.timer.graph(fn) / per)])

    def library(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        """Compute out = x @ w.T with the library's GEMM."""
        self.world.backend.linear(x, w, None, self.world.current_stream(), out)


def _wave_shape(occupancy: Occupancy, row_tiles: int, col_tiles: int, k: int) -> GemmShape:
    return row_tiles * occupancy.tile.block_m, col_tiles * occupancy.tile.block_n * occupancy.per_sm, k


def size_of(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
