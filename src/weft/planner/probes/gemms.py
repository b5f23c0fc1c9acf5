"""Probes of GEMMs: the library's, and waves of Triton tiles."""

from __future__ import annotations

from dataclasses import replace

from triton.tools.tensor_descriptor import TensorDescriptor

from ...backends.base import Arguments
from ...compute.gemm import matmul as gemm_kernel
from ...ops.common import tile_of
from ...ops.matmul import ALONE
from ...plans import Fused
from ..profile import Gemm, Wave
from .common import Bench, Probe


def gemm(b: Bench, m: int, n: int, k: int) -> Probe:
    row = Gemm(m, n, k, 1.0)
    x, w, out = b.x[: m * k].view(m, k), b.w[: n * k].view(n, k), b.out[: m * n].view(m, n)
    fn = lambda: b.library(x, w, out)  # noqa: E731
    return Probe(f"GEMM {m} x {n} x {k}", (row,), lambda: [replace(row, us=b.timer.graph(fn))])


def wave(b: Bench, tile: Fused, row_tiles: int, col_tiles: int, k: int) -> Probe:
    """As many programs as divide the tiles, of those that the ops use: all, or a few less."""
    if tile.per_sm == 2:
        col_tiles *= 2
    tiles = row_tiles * col_tiles
    sms = b.world.sm_count
    programs = next((p for p in (sms, sms - 4, sms - 8) if tiles % p == 0), sms) * tile.per_sm
    row = Wave(tile.block_m, tile.block_n, tile.block_k, tile.warps, tile.stages, tile.per_sm, programs, tiles, k, 1.0)
    m, n = row_tiles * tile.block_m, col_tiles * tile.block_n
    fn = lambda: run_tiles(b, tile, programs, m, n, k)  # noqa: E731
    said = f"waves of {tile.block_m} x {tile.block_n}, {tiles} over {programs}, K {k}"
    return Probe(said, (row,), lambda: [replace(row, us=b.timer.graph(fn))])


def run_tiles(b: Bench, tile: Fused, programs: int, m: int, n: int, k: int) -> None:
    bm, bn, bk = tile.block_m, tile.block_n, tile.block_k

    def args() -> Arguments:
        return dict(
            a_desc=TensorDescriptor(b.x, [m, k], [k, 1], [bm, bk]),
            b_desc=TensorDescriptor(b.w, [n, k], [k, 1], [bn, bk]),
            out_desc=TensorDescriptor(b.out, [m, n], [n, 1], [bm, bn // 2]),
            M=m,
            N=n,
            K=k,
            tile=tile_of(tile, tile.group_m),
            GATED=0,
            **ALONE,
        )

    options = dict(num_warps=tile.warps, num_stages=tile.stages)
    key = ("tune", tile, programs, m, n, k)
    b.world.launch(gemm_kernel, programs, args, options, b.world.current_stream(), key)
