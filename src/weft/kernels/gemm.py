"""Pieces of a persistent TMA GEMM: out[M, N] = a[M, K] @ b[N, K]^T, 128 x 256 x 64 tiles, 8 warps, at cuBLAS parity.

A kernel composes them: its own tile order and waits around `gemm_tile`, its own notify after `store_tile`. The loop over
tiles is flattened (`tl.range(..., flatten=True)`) so that a tile's epilogue overlaps the next tile's loads, which for
short K is worth 14% (8192 x 2752 x 4096: 576 -> 658 TFLOP/s).
"""

import triton.language as tl

from ..lang.jit import jit


@jit
def grouped_tile(t, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile t of an order that walks GROUP_M tile rows together, column by column, so that both operands stay in L2."""
    per_group = GROUP_M * tiles_n
    first = t // per_group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    r = t % per_group
    return first + r % height, r // height


@jit
def gemm_tile(a_desc, b_desc, row, col, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """fp32 [BM, BN] tile at (row, col): rows of `a`, rows of `b` (columns of the product)."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([col, k]).T, acc)
    return acc


@jit
def column_halves(acc, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN] -> its left and right [BM, BN / 2]: half the shared memory in the epilogue."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@jit
def store_tile(out_desc, acc, bias, row, col, N, BM: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr):
    """Epilogue: acc + bias, or silu(left) * right (GATED), cast and stored by TMA. out_desc has [BM, BN / 2] blocks.

    GATED expects the gate's and the up projection's rows of `b` interleaved in blocks of BN / 2, so that a tile holds
    matching halves; `col` and `N` count rows of `b`, the output has half as many columns.
    """
    HALF: tl.constexpr = BN // 2
    left, right = column_halves(acc, BM, BN)
    if BIAS:
        c = col + tl.arange(0, HALF)
        left += tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
        right += tl.load(bias + c + HALF, mask=c + HALF < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gated = left / (1.0 + tl.exp(-left)) * right
        out_desc.store([row, col // 2], gated.to(out_desc.dtype))
    else:
        out_desc.store([row, col], left.to(out_desc.dtype))
        out_desc.store([row, col + HALF], right.to(out_desc.dtype))
