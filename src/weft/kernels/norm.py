"""Row-wise kernels behind a collective: RMSNorm, residual add and plain copy, which also undo the order of tiles that a signaled
plan leaves (FlashOverlap, section 4.3).

TILED: `x` is not [rows, N] but BM x BN tiles in the order of `grouped_tile`, each as its left, then its right half. An element
is found by arithmetic alone, in runs of BN / 2 columns; the results are in ordinary order.
"""

import triton.language as tl

from ..lang.jit import jit


@jit
def tile_place(row, col, tiles_m, tiles_n, BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr):
    """Where element (row, col) lies among the tiles: the inverse of `grouped_tile`."""
    COLS: tl.constexpr = BN // 2
    tm = row // BM
    tn = col // BN
    first = tm // GROUP_M * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    half_tile = (first * tiles_n + tn * height + tm - first) * 2 + col % BN // COLS
    return (half_tile * BM + row % BM).to(tl.int64) * COLS + col % COLS


@jit
def load_rows(x, row, col, ok, at, tiles_m, N, BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr, TILED: tl.constexpr):
    """Block of `x` at rows `row` [R, 1] and columns `col` [1, C], whatever its order; `at` are its places in ordinary order."""
    place = at
    if TILED:
        place = tile_place(row, col, tiles_m, tl.cdiv(N, BN), BM, BN, GROUP_M)
    return tl.load(x + place, mask=ok, other=0.0)


@jit
def rms_norm(
    x, residual, weight, out, total, rows, N, eps, tiles_m, BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr,
    TILED: tl.constexpr, RESIDUAL: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """out [rows, N] = h / rms(h) * weight [N] for h = x, or with RESIDUAL h = x + residual, which is stored to `total`, and
    normalised as stored. C: columns, to the next power of two."""
    col = tl.arange(0, C)[None, :]
    w = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = block * R + tl.arange(0, R)[:, None]
        ok = (row < rows) & (col < N)
        at = row.to(tl.int64) * N + col
        h = load_rows(x, row, col, ok, at, tiles_m, N, BM, BN, GROUP_M, TILED).to(tl.float32)
        if RESIDUAL:
            h += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
            stored = h.to(total.dtype.element_ty)
            tl.store(total + at, stored, mask=ok)
            h = stored.to(tl.float32)
        scale = tl.rsqrt(tl.sum(h * h, 1) / N + eps)[:, None]
        tl.store(out + at, (h * scale * w).to(out.dtype.element_ty), mask=ok)


@jit
def add_rows(
    x, residual, out, rows, N, tiles_m, BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr, TILED: tl.constexpr,
    RESIDUAL: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """out [rows, N] = x, or x + residual with RESIDUAL."""
    blocks_n = tl.cdiv(N, C)
    for block in range(tl.program_id(0), tl.cdiv(rows, R) * blocks_n, tl.num_programs(0)):
        row = block // blocks_n * R + tl.arange(0, R)[:, None]
        col = block % blocks_n * C + tl.arange(0, C)[None, :]
        ok = (row < rows) & (col < N)
        at = row.to(tl.int64) * N + col
        h = load_rows(x, row, col, ok, at, tiles_m, N, BM, BN, GROUP_M, TILED)
        if RESIDUAL:
            h = (h.to(tl.float32) + tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
        tl.store(out + at, h, mask=ok)
