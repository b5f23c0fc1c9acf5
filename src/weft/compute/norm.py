"""Row-wise kernels that follow a collective: RMSNorm, residual add and copy. If the result of a signaled plan is in
tile order, the kernels also restore ordinary order (FlashOverlap, section 4.3).

A block has rows x runs x COLS columns. With TILED, `x` is not [rows, N] but consists of tiles of BM x 2 COLS in the
order of `grouped_tile`. The left half of each tile is stored before its right half, so that a run of COLS columns of a
row is contiguous in `x` too, and the kernel computes one offset for each run. The results are in ordinary order.
"""

from typing import NamedTuple

import triton.language as tl

from ..lang.jit import jit


class TileRuns(NamedTuple):
    """The layout of `x` (see above)."""

    TILED: tl.constexpr
    BM: tl.constexpr
    COLS: tl.constexpr
    GROUP_M: tl.constexpr


@jit
def sum_in_pairs(x, R: tl.constexpr, P: tl.constexpr):
    """Return [R], the sums of the rows of x [R, P], where P is a power of two. The function adds neighbouring elements,
    then neighbouring sums, and so on. Because each sum has two addends, neither the layout of x over threads nor zeros
    after x change the order of the additions."""
    for _ in tl.static_range(24):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (R, x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (R,))


@jit
def run_offset(row, run, tiles_m, N, layout):
    """Return where a row's columns from run * COLS on begin, as an offset in the tiles. This function inverts
    `grouped_tile`."""
    BM: tl.constexpr = layout.BM
    COLS: tl.constexpr = layout.COLS
    GROUP_M: tl.constexpr = layout.GROUP_M
    tm = row // BM
    first_row = tm // GROUP_M * GROUP_M
    height = tl.minimum(tiles_m - first_row, GROUP_M)
    tile = first_row * tl.cdiv(N, 2 * COLS) + run // 2 * height + tm - first_row
    return ((tile * 2 + run % 2) * BM + row % BM).to(tl.int64) * COLS


@jit(do_not_specialize=("rows", "tiles_m"))
def rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    rows,
    N,
    eps,
    tiles_m,
    layout,
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    R: tl.constexpr,
    RUNS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Compute out [rows, N] = h / rms(h) * weight [N] for h = x. With RESIDUAL, the kernel rounds the sum h = x +
    residual, stores it in `total`, and normalises the rounded sum. A block has R rows, and RUNS runs cover N columns.
    ALIGNED means that N is a multiple of 8. With PAIRS, `sum_in_pairs` adds the squares."""
    COLS: tl.constexpr = layout.COLS
    if ALIGNED:
        N = N // 8 * 8
    run = tl.arange(0, RUNS)[None, :, None]
    c = tl.arange(0, COLS)[None, None, :]
    col = run * COLS + c
    w = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = block * R + tl.arange(0, R)[:, None, None]
        ok = (row < rows) & (col < N)
        offset = row.to(tl.int64) * N + col
        x_offset = offset
        if layout.TILED:
            x_offset = run_offset(row, run, tiles_m, N, layout) + c
        h = tl.load(x + x_offset, mask=ok, other=0.0).to(tl.float32)
        if RESIDUAL:
            h += tl.load(residual + offset, mask=ok, other=0.0).to(tl.float32)
            stored = h.to(total.dtype.element_ty)
            tl.store(total + offset, stored, mask=ok)
            h = stored.to(tl.float32)
        if PAIRS:
            squares = sum_in_pairs(tl.reshape(h * h, (R, RUNS * COLS)), R, RUNS * COLS)
        else:
            squares = tl.sum(tl.sum(h * h, 2), 1)
        scale = tl.rsqrt(squares / N + eps)[:, None, None]
        tl.store(out + offset, (h * scale * w).to(out.dtype.element_ty), mask=ok)


@jit(do_not_specialize=("rows", "tiles_m"))
def add_rows(
    x,
    residual,
    out,
    rows,
    N,
    tiles_m,
    layout,
    RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    R: tl.constexpr,
):
    """Compute out [rows, N] = x, or x + residual with RESIDUAL. A block has R rows. ALIGNED means that N is a multiple
    of 8."""
    COLS: tl.constexpr = layout.COLS
    if ALIGNED:
        N = N // 8 * 8
    runs = tl.cdiv(N, COLS)
    for block in range(tl.program_id(0), tl.cdiv(rows, R) * runs, tl.num_programs(0)):
        row = block // runs * R + tl.arange(0, R)[:, None]
        run = block % runs
        c = tl.arange(0, COLS)[None, :]
        ok = (row < rows) & (run * COLS + c < N)
        offset = row.to(tl.int64) * N + run * COLS + c
        x_offset = offset
        if layout.TILED:
            x_offset = run_offset(row, run, tiles_m, N, layout) + c
        h = tl.load(x + x_offset, mask=ok, other=0.0)
        if RESIDUAL:
            h = (h.to(tl.float32) + tl.load(residual + offset, mask=ok, other=0.0).to(tl.float32)).to(
                out.dtype.element_ty
            )
        tl.store(out + offset, h, mask=ok)
