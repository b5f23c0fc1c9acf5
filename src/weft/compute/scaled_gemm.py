"""Tiles of a GEMM of 8-bit operands (e4m3) and the scales that give their values: value = element x scale.

    BY_TENSOR   one scale for x, one for w
    BY_ROW      one for each row of x (a token), one for each row of w (an output channel)
    BY_BLOCK    one for each row of x and 128 of K, one for each 128 x 128 of w (DeepSeek-V3, section 3.3.2)

The first two do not depend on K, so the epilogue multiplies by them; the third multiplies each 128 of K before it is
added. Hopper's tensor cores add 8-bit products in about 14 bits (DeepSeek-V3, section 3.3.2). PROMOTE: every step of K
is added in float32 by the ordinary cores, as `use_fast_accum=False` asks of torch._scaled_mm; BY_BLOCK always is. That
takes a second set of accumulators, for which 128 x 256 tiles of 8 warps have no registers (compiled for sm_90a: 255 of
them and 256 bytes of spills), but 128 x 128 of 8 warps (162) and 64 x 128 of 4 warps (156 to 161) have.

Measured with the compiler alone and dropped: two products of BY_BLOCK in turn, of which one is scaled under the other.
ptxas makes the tensor cores wait for each other in such a loop ("wgmma.mma_async instructions are serialized").
"""

from typing import NamedTuple

import torch
import triton.language as tl

from ..lang.descriptors import tiles_of
from ..lang.jit import jit
from .gemm import Tile, column_halves, gemm_tile, grouped_tile, silu, silu_gate, store_tile

BY_TENSOR, BY_ROW, BY_BLOCK = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # Tile.SCALED
BLOCK = tl.constexpr(128)  # elements of K, and rows of w, that share a scale BY_BLOCK


class Scales(NamedTuple):
    """The scales of a whole product, float32. x: [1], [M] or [M, K / 128]; w: [1], [N] or [N / 128 rounded up,
    K / 128]."""

    x: torch.Tensor
    w: torch.Tensor


class TileScales(NamedTuple):
    """The scales of a tile. x: where those of its first row begin; rows: how many of its rows are there; stride and
    block_stride: elements from a row to the next one, and from 128 of K to the next (BY_TENSOR: no matter); w: those of
    all of w."""

    x: tl.tensor
    w: tl.tensor
    rows: tl.tensor
    stride: tl.tensor
    block_stride: tl.tensor


@jit
def scales_of_rows(x_scale, row, K, SCALED: tl.constexpr):
    """Where the scales of row `row` begin in x_scale, contiguous."""
    if SCALED == BY_BLOCK:
        x_scale += row.to(tl.int64) * (K // BLOCK)
    elif SCALED == BY_ROW:
        x_scale += row
    return x_scale


@jit
def tile_scales(scales, x_scale, row, M, K, SCALED: tl.constexpr):
    """The TileScales of a tile whose first row is `row` of M, with the contiguous x_scale in place of scales.x."""
    stride = 1
    if SCALED == BY_BLOCK:
        stride = K // BLOCK
    return TileScales(scales_of_rows(x_scale, row, K, SCALED), scales.w, M - row, stride, 1)


@jit
def add_product(a, b, acc, scales, col, k, K, tile):
    """acc + a [BM, BK] @ b [BK, BN], the 8-bit blocks at column `col` of the product and at k."""
    tl.static_assert(tile.SCALED != BY_BLOCK or (tile.BK == BLOCK and tile.BN <= BLOCK), "a block has one scale of w")
    if tile.SCALED == BY_BLOCK:
        r = tl.arange(0, tile.BM)
        of_x = scales.x + r * scales.stride + k // BLOCK * scales.block_stride
        scale = tl.load(of_x, mask=r < scales.rows, other=0.0)
        scale *= tl.load(scales.w + col // BLOCK * (K // BLOCK) + k // BLOCK)
        acc += tl.dot(a, b) * scale[:, None]
    elif tile.PROMOTE:
        acc += tl.dot(a, b)
    else:
        acc = tl.dot(a, b, acc)
    return acc


@jit
def scale_half(half, bias, scales, col, N, tile):
    """Half of a tile, [BM, BN / 2] from column `col` on, times the scales that do not depend on K, + bias (or None)."""
    r = tl.arange(0, tile.BM)
    c = col + tl.arange(0, tile.BN // 2)
    if tile.SCALED == BY_ROW:
        half *= tl.load(scales.x + r * scales.stride, mask=r < scales.rows, other=0.0)[:, None]
        half *= tl.load(scales.w + c, mask=c < N, other=0.0)[None, :]
    elif tile.SCALED == BY_TENSOR:
        half *= tl.load(scales.x) * tl.load(scales.w)
    if bias is not None:
        half += tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    return half


@jit
def store_scaled_tile(out_desc, acc, bias, scales, row, col, N, tile, GATED: tl.constexpr):
    """Epilogue of `add_product`'s tile; out_desc, bias and GATED as in `store_tile`. A half is stored before the other
    one's scales are loaded: those of a whole tile's columns take as many registers as its accumulators (compiled for
    sm_90a: 254 registers against 196)."""
    BM: tl.constexpr = tile.BM
    HALF: tl.constexpr = tile.BN // 2
    left, right = column_halves(acc, BM, tile.BN)
    left = scale_half(left, bias, scales, col, N, tile)
    if GATED == HALF:
        right = scale_half(right, bias, scales, col + HALF, N, tile)
        out_desc.store([row, col // 2], (silu(left) * right).to(out_desc.dtype))
    elif GATED:
        out_desc.store([row, col // 2], silu_gate(left, BM, HALF).to(out_desc.dtype))
        right = scale_half(right, bias, scales, col + HALF, N, tile)
        out_desc.store([row, col // 2 + GATED], silu_gate(right, BM, HALF).to(out_desc.dtype))
    else:
        out_desc.store([row, col], left.to(out_desc.dtype))
        right = scale_half(right, bias, scales, col + HALF, N, tile)
        out_desc.store([row, col + HALF], right.to(out_desc.dtype))


@jit
def scaled_gemm_tile(a_desc, b_desc, row, col, scales, K, tile):
    """float32 [BM, BN] at (row, col), for `store_scaled_tile`: rows of a, rows of b (columns of the product)."""
    acc = tl.zeros((tile.BM, tile.BN), tl.float32)
    for k in range(0, K, tile.BK):
        acc = add_product(a_desc.load([row, k]), b_desc.load([col, k]).T, acc, scales, col, k, K, tile)
    return acc


@jit
def product_tile(a_desc, b_desc, out_desc, bias, scales, a_row, row, col, N, K, tile, GATED: tl.constexpr):
    """Compute and store one tile at (row, col) of the product, whose rows of `a` begin at a_row. scales: TileScales of
    8-bit operands, or None. out_desc, bias and GATED as in `store_tile`."""
    if tile.SCALED:
        acc = scaled_gemm_tile(a_desc, b_desc, a_row, col, scales, K, tile)
        store_scaled_tile(out_desc, acc, bias, scales, row, col, N, tile, GATED)
    else:
        acc = gemm_tile(a_desc, b_desc, a_row, col, K, tile.BM, tile.BN, tile.BK, tile.TRANS_B)
        store_tile(out_desc, acc, bias, row, col, N, tile.BM, tile.BN, GATED)


@jit(do_not_specialize=("M",))
def scaled_matmul(
    x_desc, w_desc, out_desc, bias, scales, M, N, K, tile: Tile, BY_COLUMNS: tl.constexpr, FLATTEN: tl.constexpr
):
    """out_desc [M, N] = x_desc [M, K] @ w_desc [N, K]^T by `scales`, + bias [N] or None. BY_COLUMNS: scales.x
    [M, K / 128] is laid out column after column. FLATTEN: a tile's epilogue runs under the next one's loads."""
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
