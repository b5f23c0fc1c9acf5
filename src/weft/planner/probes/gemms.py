"""Probes of GEMMs: the library's GEMMs, and waves of Triton tiles."""

from __future__ import annotations

from dataclasses import replace

from ...compute.gemm import matmul as gemm_kernel
from ...cost.model import Occupancy
from ...kernel_launch import Launch, Matrix, prepared
from ...ops.common import tile_of
from ...ops.matmul import ALONE
from ...plans import GemmTile
from ...world import World
from ..profile import Gemm, Wave
from .common import Bench, Probe


def gemm(b: Bench, m: int, n: int, k: int) -> Probe:
    row = Gemm(m, n, k, 1.0)
    x, w, out = b.x[: m * k].view(m, k), b.w[: n * k].view(n, k), b.out[: m * n].view(m, n)
    fn = lambda: b.library(x, w, out)  # noqa: E731
    return Probe(f"GEMM {m} x {n} x {k}", (row,), lambda: [replace(row, us=b.timer.graph(fn))])


def wave(b: Bench, occupancy: Occupancy, row_tiles: int, col_tiles: int, k: int) -> Probe:
    """Return a probe of waves of tiles. As in the ops, the programs run on all SMs, or on all but 4 or 8 SMs, so that
    the number of programs divides the number of tiles if possible."""
    tile, per_sm = occupancy.tile, occupancy.per_sm
    if per_sm == 2:
        col_tiles *= 2
    tiles = row_tiles * col_tiles
    sms = b.world.sm_count
    programs = next((p for p in (sms, sms - 4, sms - 8) if tiles % p == 0), sms) * per_sm
    row = Wave(tile.block_m, tile.block_n, tile.block_k, tile.warps, tile.stages, per_sm, programs, tiles, k, 1.0)
    m, n = row_tiles * tile.block_m, col_tiles * tile.block_n
    fn = lambda: run_tiles(b, tile, programs, m, n, k)  # noqa: E731
    name = f"waves of {tile.block_m} x {tile.block_n}, {tiles} over {programs}, K {k}"
    return Probe(name, (row,), lambda: [replace(row, us=b.timer.graph(fn))])


def run_tiles(b: Bench, tile: GemmTile, programs: int, m: int, n: int, k: int) -> None:
    launch = _tiles(b.world, tile, programs, m, n, k)
    launch(b.world.current_stream(), a_desc=b.x, b_desc=b.w, out_desc=b.out)


@prepared
def _tiles(world: World, tile: GemmTile, programs: int, m: int, n: int, k: int) -> Launch:
    bm, bn, bk = tile.block_m, tile.block_n, tile.block_k
    return Launch(
        world,
        gemm_kernel,
        programs,
        dict(num_warps=tile.warps, num_stages=tile.stages),
        a_desc=Matrix(m, k, (bm, bk)),
        b_desc=Matrix(n, k, (bn, bk)),
        out_desc=Matrix(m, n, (bm, bn // 2)),
        M=m,
        N=n,
        K=k,
        tile=tile_of(tile, tile.group_m),
        GATED=0,
        **ALONE,
    )
