"""Device functions for tiles of a GEMM with 8-bit operands (e4m3) and scales. The value of an element is element x
scale.

    BY_TENSOR   one scale for x, one for w
    BY_ROW      one for each row of x (a token), one for each row of w (an output channel)
    BY_BLOCK    one for each row of x and 128 of K, one for each 128 x 128 of w (DeepSeek-V3, section 3.3.2)

Scales by tensor and by row do not depend on K, so the epilogue multiplies by them. A scale by block multiplies the sum
over its 128 elements of K before this sum is added to the total. Hopper's tensor cores accumulate products of 8-bit
operands with about 14 bits (DeepSeek-V3, section 3.3.2). With PROMOTE the CUDA cores add every K step in float32.
BY_BLOCK always uses PROMOTE; BY_ROW and BY_TENSOR use it with torch._scaled_mm's `use_fast_accum=False`. The kernel
computes the upper and the lower rows of such a tile in turn, because a K step needs accumulators for half a tile in
addition to the sums. With two programs per SM, the tensor cores compute a K step of one program while the other program
adds.

    upper sums   | a0 b | wait, add |                   | ..
    lower sums   |                  | a1 b | wait, add  | ..

For scales by block, this computation by halves reaches 0.63x to 0.75x of DeepGEMM's speed; whole tiles with eight warps
reach 0.54x to 0.64x (6 sizes, 1 H200, 2026-11; docs/design-notes.md).
"""

from typing import NamedTuple

import torch
import triton.language as tl

from ..lang.descriptors import tiles_of
from ..lang.intrinsics import keep_before
from ..lang.jit import jit
from ..scaled_tensor import SCALE_BLOCK
from .gemm import Tile, column_halves, gemm_tile, grouped_tile, silu, silu_gate, store_tile

BY_TENSOR, BY_ROW, BY_BLOCK = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # Tile.SCALED
BLOCK = tl.constexpr(SCALE_BLOCK)  # with BY_BLOCK, 128 elements of K and 128 rows of w share a scale


class Scales(NamedTuple):
    """The float32 scales of a GEMM's operands. x is [1], [M] or [M, K / 128]; w is [1], [N] or [N / 128 rounded up, K /
    128]."""

    x: torch.Tensor
    w: torch.Tensor


class TileScales(NamedTuple):
    """The scales of a tile. `x` points to the scales of the tile's first row, and `rows` is the number of rows that
    exist. `stride` is the distance in elements from one row to the next (0 for BY_TENSOR), and `block_stride` the
    distance from one block of 128 elements of K to the next block. `w` contains the scales of the whole second
    operand."""

    x: tl.tensor
    w: tl.tensor
    rows: tl.tensor
    stride: tl.tensor
    block_stride: tl.tensor


@jit
def scales_of_rows(x_scale, row, K, SCALED: tl.constexpr):
    """Return the address of row `row`'s scales in the contiguous x_scale."""
    if SCALED == BY_BLOCK:
        x_scale += row.to(tl.int64) * (K // BLOCK)
    elif SCALED == BY_ROW:
        x_scale += row
    return x_scale


@jit
def tile_scales(scales, x_scale, row, M, K, SCALED: tl.constexpr):
    """Return the TileScales of a tile with first row `row` of M rows. The contiguous x_scale replaces scales.x."""
    stride = 0
    if SCALED == BY_ROW:
        stride = 1
    elif SCALED == BY_BLOCK:
        stride = K // BLOCK
    return TileScales(scales_of_rows(x_scale, row, K, SCALED), scales.w, M - row, stride, 1)


@jit
def rows_below(scales, ROWS: tl.constexpr):
    """Return the TileScales of a tile's rows after the first ROWS rows."""
    begin = scales.x + ROWS * scales.stride
    return TileScales(begin, scales.w, scales.rows - ROWS, scales.stride, scales.block_stride)


@jit
def row_scales(scales, row, k, ROWS: tl.constexpr, SCALED: tl.constexpr):
    """Return the factors at k, float32 [ROWS], for the ROWS rows of a tile that begin with the tile's row `row`. Scales
    that do not depend on K have the factor 1. Offsets have 32 bits, so that they need half as many registers as
    addresses."""
    if SCALED == BY_BLOCK:
        r = row + tl.arange(0, ROWS)
        offset = r * scales.stride + k // BLOCK * scales.block_stride
        scale = tl.load(scales.x + offset, mask=r < scales.rows, other=0.0)
    else:
        scale = tl.full((ROWS,), 1.0, tl.float32)
    return scale


@jit
def weight_scale(scales, col, k, K, SCALED: tl.constexpr):
    """Return the factors at k for the columns of a tile from column `col` on. `row_scales` does the same for rows."""
    scale = 1.0
    if SCALED == BY_BLOCK:
        scale = tl.load(scales.w + col // BLOCK * (K // BLOCK) + k // BLOCK)
    return scale


@jit
def add_product(acc, a, b, scale, SCALED: tl.constexpr):
    """Return acc + (a @ b) * scale [rows of a]. The CUDA cores compute the sum."""
    if SCALED == BY_BLOCK:
        acc += tl.dot(a, b) * scale[:, None]
    else:
        acc += tl.dot(a, b)
    return acc


@jit
def add_step(upper, lower, a_desc, b_desc, row, col, k, upper_scale, lower_scale, tile):
    """Compute one K step of both halves of a promoted tile. The first product is added before the second starts,
    because the second product needs the registers of the first. The rows of the second half are loaded only after that,
    so the kernel waits for them at this point. With a single wait for all three blocks, kernels spill registers; with
    two waits, they need 230 to 255 registers (compiled for sm_90a)."""
    HALF: tl.constexpr = tile.BM // 2
    tl.static_assert(tile.SCALED != BY_BLOCK or (tile.BK == BLOCK and tile.BN <= BLOCK), "a block has one scale of w")
    b = b_desc.load([col, k]).T
    upper = keep_before(add_product(upper, a_desc.load([row, k]), b, upper_scale, tile.SCALED))
    lower = add_product(lower, a_desc.load([row + HALF, k]), b, lower_scale, tile.SCALED)
    return upper, lower


@jit
def scale_half(half, bias, scales, col, N, SCALED: tl.constexpr):
    """Multiply the half of a tile's columns that begins at `col` by the scales that do not depend on K, add the bias
    (or None), and return the result."""
    r = tl.arange(0, half.shape[0])
    c = col + tl.arange(0, half.shape[1])
    if SCALED == BY_ROW:
        half *= tl.load(scales.x + r * scales.stride, mask=r < scales.rows, other=0.0)[:, None]
        half *= tl.load(scales.w + c, mask=c < N, other=0.0)[None, :]
    elif SCALED == BY_TENSOR:
        half *= tl.load(scales.x) * tl.load(scales.w)
    if bias is not None:
        half += tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    return half


@jit
def store_scaled_tile(out_desc, acc, bias, scales, row, col, N, SCALED: tl.constexpr, GATED: tl.constexpr):
    """Scale and store a tile, acc [rows, columns]; out_desc, bias and GATED are as in `store_tile`. The left half is
    stored before the scales of the right half are loaded, because the scales of all columns need as many registers as
    the tile's accumulators: 254 registers instead of 196, compiled for sm_90a."""
    BM: tl.constexpr = acc.shape[0]
    HALF: tl.constexpr = acc.shape[1] // 2
    left, right = column_halves(acc, BM, acc.shape[1])
    left = scale_half(left, bias, scales, col, N, SCALED)
    if GATED == HALF:
        right = scale_half(right, bias, scales, col + HALF, N, SCALED)
        out_desc.store([row, col // 2], (silu(left) * right).to(out_desc.dtype))
    elif GATED:
        out_desc.store([row, col // 2], silu_gate(left, BM, HALF).to(out_desc.dtype))
        right = scale_half(right, bias, scales, col + HALF, N, SCALED)
        out_desc.store([row, col // 2 + GATED], silu_gate(right, BM, HALF).to(out_desc.dtype))
    else:
        out_desc.store([row, col], left.to(out_desc.dtype))
        right = scale_half(right, bias, scales, col + HALF, N, SCALED)
        out_desc.store([row, col + HALF], right.to(out_desc.dtype))


@jit
def scaled_gemm_tile(a_desc, b_desc, row, col, K, tile):
    """Return the float32 tile [BM, BN] at (row, col) for `store_scaled_tile`. `row` is a row of a, and `col` is a row
    of b, which is a column of the result."""
    acc = tl.zeros((tile.BM, tile.BN), tl.float32)
    for k in range(0, K, tile.BK):
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([col, k]).T, acc)
    return acc


@jit
def promoted_halves(a_desc, b_desc, row, col, scales, K, tile):
    """Return the upper and the lower half of a tile, float32 [BM / 2, BN] each, for `store_halves_of_rows`. a_desc has
    blocks of BM / 2 rows. The scales of the next K step are loaded while the tensor cores compute the current step."""
    HALF: tl.constexpr = tile.BM // 2
    upper = tl.zeros((HALF, tile.BN), tl.float32)
    lower = tl.zeros((HALF, tile.BN), tl.float32)
    w = weight_scale(scales, col, 0, K, tile.SCALED)
    upper_scale = row_scales(scales, 0, 0, HALF, tile.SCALED) * w
    lower_scale = row_scales(scales, HALF, 0, HALF, tile.SCALED) * w
    for k in range(0, K, tile.BK):
        next_k = min(k + tile.BK, K - tile.BK)
        next_upper = row_scales(scales, 0, next_k, HALF, tile.SCALED)
        next_lower = row_scales(scales, HALF, next_k, HALF, tile.SCALED)
        w = weight_scale(scales, col, next_k, K, tile.SCALED)
        upper, lower = add_step(upper, lower, a_desc, b_desc, row, col, k, upper_scale, lower_scale, tile)
        upper_scale = next_upper * w
        lower_scale = next_lower * w
    return upper, lower


@jit
def store_halves_of_rows(out_desc, upper, lower, bias, scales, row, col, N, tile, GATED: tl.constexpr):
    """Store the result of `promoted_halves`: each half is stored by `store_scaled_tile`. out_desc has blocks of BM / 2
    rows."""
    HALF: tl.constexpr = tile.BM // 2
    store_scaled_tile(out_desc, upper, bias, scales, row, col, N, tile.SCALED, GATED)
    scales = rows_below(scales, HALF)
    store_scaled_tile(out_desc, lower, bias, scales, row + HALF, col, N, tile.SCALED, GATED)


@jit
def product_tile(a_desc, b_desc, out_desc, bias, scales, a_row, row, col, N, K, tile, GATED: tl.constexpr):
    """Compute one tile of the GEMM from the rows of `a` that begin with a_row, and store it at (row, col). `scales` are
    the TileScales of 8-bit operands, or None. out_desc, bias and GATED are as in `store_tile`. With PROMOTE, a_desc and
    out_desc have blocks of half a tile's rows."""
    if tile.PROMOTE:
        upper, lower = promoted_halves(a_desc, b_desc, a_row, col, scales, K, tile)
        store_halves_of_rows(out_desc, upper, lower, bias, scales, row, col, N, tile, GATED)
    elif tile.SCALED:
        acc = scaled_gemm_tile(a_desc, b_desc, a_row, col, K, tile)
        store_scaled_tile(out_desc, acc, bias, scales, row, col, N, tile.SCALED, GATED)
    else:
        acc = gemm_tile(a_desc, b_desc, a_row, col, K, tile.BM, tile.BN, tile.BK, tile.TRANS_B)
        store_tile(out_desc, acc, bias, row, col, N, tile.BM, tile.BN, GATED)


@jit(do_not_specialize=("M",))
def scaled_matmul(
    x_desc, w_desc, out_desc, bias, scales, M, N, K, tile: Tile, BY_COLUMNS: tl.constexpr, FLATTEN: tl.constexpr
):
    """Compute out_desc [M, N] = x_desc [M, K] @ w_desc [N, K]^T with `scales`, + bias [N] or None. With BY_COLUMNS,
    scales.x [M, K / 128] is stored column after column. With FLATTEN, a tile's epilogue overlaps the next tile's
    loads."""
    x_desc, w_desc, out_desc = tiles_of(x_desc), tiles_of(w_desc), tiles_of(out_desc)
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tm, tn = grouped_tile(t, tiles_m, tiles_n, tile.GROUP_M)
        if BY_COLUMNS:
            of_tile = TileScales(scales.x + tm * BM, scales.w, M - tm * BM, 1, M)
        else:
            of_tile = tile_scales(scales, scales.x, tm * BM, M, K, tile.SCALED)
        product_tile(x_desc, w_desc, out_desc, bias, of_tile, tm * BM, tm * BM, tn * BN, N, K, tile, 0)
