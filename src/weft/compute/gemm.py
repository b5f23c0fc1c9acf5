"""Device functions of a persistent TMA GEMM, out[M, N] = a[M, K] @ b[N, K]^T, with 8 warps for each 128 x 256 x 64
tile. The GEMM is as fast as cuBLAS.

Each kernel combines these functions with its own tile order and its own waits around `gemm_tile`. The loop over tiles
is flattened (`tl.range(..., flatten=True)`) so that a tile's epilogue overlaps the next tile's loads. For short K the
overlap increases the speed by 14% (8192 x 2752 x 4096 on H200: 576 -> 658 TFLOP/s).

A kernel that notifies readers of its tiles has one loop over the K steps of all tiles, and notifies the readers of a
tile FLUSHED steps into the next tile. A notification directly after the stores would wait 1.2 us for each tile until
the stores have completed, while the tensor cores are idle. (A flattened loop that carries a value from tile to tile
could notify equally late, but Triton 3.6 passed the value of the next tile to the inner loop.)
"""

from typing import NamedTuple

import triton.language as tl

from ..lang.channel import calls_of, end_call
from ..lang.descriptors import tiles_of
from ..lang.intrinsics import flush_stores, load_pairs, store_pairs, wait_until
from ..lang.jit import jit

FLUSHED = tl.constexpr(2)  # a tile's stores have usually completed after two K steps; `flush_stores` waits for them


class Tile(NamedTuple):
    """The tile of a GEMM. A tile has BM rows and BN columns, and a K step covers BK elements of K. GROUP_M rows of
    tiles are computed together (`grouped_tile`). TRANS_B is as in `second_operand`. SCALED and PROMOTE describe 8-bit
    operands (scaled_gemm.py); for 16-bit operands they are 0 and False."""

    BM: tl.constexpr
    BN: tl.constexpr
    BK: tl.constexpr
    GROUP_M: tl.constexpr
    TRANS_B: tl.constexpr
    SCALED: tl.constexpr = tl.constexpr(0)
    PROMOTE: tl.constexpr = tl.constexpr(False)


@jit
def grouped_tile(t, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and the column of tile t, in an order that traverses GROUP_M rows of tiles column by column, so
    that both operands stay in L2."""
    per_group = GROUP_M * tiles_n
    first_row = t // per_group * GROUP_M
    height = min(tiles_m - first_row, GROUP_M)
    r = t % per_group
    return first_row + r % height, r // height


@jit
def whole_tiles(tiles, P):
    """Return how many of the tiles P programs compute as a whole: all of them, or, if the tiles of the last round are
    at most half as many as the programs, all but these. Two programs each compute one half of the columns of each
    remaining tile.

    Elements have the same bits as in whole tiles. Fused ops with 2 to 6 rounds took 3% to 10% less time (2 H200,
    2026-11). With 64 to 512 rows per expert, experts' layers with tiles of 128 x 256 took 0% to 13% less time (1 H200,
    2026-11).
    """
    last_round = tiles % P
    return tl.where(2 * last_round <= P, tiles - last_round, tiles)


@jit
def second_operand(b_desc, col, k, TRANS_B: tl.constexpr):
    """Load [BK, BN] of b^T at (k, col). b_desc has blocks [BN, BK] of b [N, K], or, with TRANS_B, blocks [BK, BN] of
    b^T [K, N]."""
    if TRANS_B:
        block = b_desc.load([k, col])
    else:
        block = b_desc.load([col, k]).T
    return block


@jit
def gemm_tile(
    a_desc, b_desc, row, col, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TRANS_B: tl.constexpr = False
):
    """Return the float32 tile [BM, BN] of a @ b^T at (row, col). `row` is a row of `a`, and `col` is a row of `b`,
    which is a column of the result."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([row, k]), second_operand(b_desc, col, k, TRANS_B), acc)
    return acc


@jit
def column_halves(acc, BM: tl.constexpr, BN: tl.constexpr):
    """Split [BM, BN] into a left and a right half, [BM, BN / 2] each. An epilogue for one half at a time needs half the
    shared memory of an epilogue for the whole tile."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@jit
def silu(x):
    """Return x * sigmoid(x), in x's dtype."""
    return x / (1.0 + tl.exp(-x))


@jit
def silu_gate(gate_up, BM: tl.constexpr, BN: tl.constexpr):
    """Return silu(left half) * right half of gate_up [BM, BN]."""
    gate, up = column_halves(gate_up, BM, BN)
    return silu(gate) * up


@jit
def store_tile(out_desc, acc, bias, row, col, N, BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """Store acc + bias (or acc, if bias is None), or silu(gate) * up of this sum, by TMA in the dtype of out_desc.

    If GATED is 0, out_desc has [BM, BN / 2] blocks. Otherwise blocks of GATED rows of `b` belong alternately to the
    gate and to the up projection, BN is 2 or 4 times GATED, and out_desc has [BM, GATED] blocks; `col` and `N` still
    count rows of `b`.
    """
    if bias is not None:
        c = col + tl.arange(0, BN)
        acc += tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    left, right = column_halves(acc, BM, BN)
    store_halves(out_desc, left, right, row, col, BM, BN, GATED)


@jit
def store_halves(out_desc, left, right, row, col, BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """Store the left and the right half of a tile in the same way as `store_tile`."""
    HALF: tl.constexpr = BN // 2
    if GATED == HALF:
        out_desc.store([row, col // 2], (silu(left) * right).to(out_desc.dtype))
    elif GATED:
        out_desc.store([row, col // 2], silu_gate(left, BM, HALF).to(out_desc.dtype))
        out_desc.store([row, col // 2 + GATED], silu_gate(right, BM, HALF).to(out_desc.dtype))
    else:
        out_desc.store([row, col], left.to(out_desc.dtype))
        out_desc.store([row, col + HALF], right.to(out_desc.dtype))


@jit
def store_half_tile(out_desc, acc, bias, row, col, N, BM: tl.constexpr, HALF: tl.constexpr, GATED: tl.constexpr):
    """Store half of a tile's columns, acc [BM, HALF] at (row, col), in the same way as `store_tile`. If GATED is not 0,
    the half contains one block of gate columns and one of up columns."""
    if bias is not None:
        c = col + tl.arange(0, HALF)
        acc += tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        out_desc.store([row, col // 2], silu_gate(acc, BM, HALF).to(out_desc.dtype))
    else:
        out_desc.store([row, col], acc.to(out_desc.dtype))


@jit(do_not_specialize=("M",))
def whole_matmul(a_desc, b_desc, out_desc, bias, M, N, K, tile):
    """Compute out_desc [M, N] = a [M, K] @ b [N, K]^T + bias [N] (or None). One program adds all K steps of a tile in
    ascending order, so that the bits of an element depend on neither M nor the tile."""
    a_desc, b_desc, out_desc = tiles_of(a_desc), tiles_of(b_desc), tiles_of(out_desc)
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tm, tn = grouped_tile(t, tiles_m, tiles_n, tile.GROUP_M)
        acc = gemm_tile(a_desc, b_desc, tm * BM, tn * BN, K, BM, BN, tile.BK, tile.TRANS_B)
        store_tile(out_desc, acc, bias, tm * BM, tn * BN, N, BM, BN, 0)


@jit
def tile_of_steps(a_desc, b_desc, row, col, first_step, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Return the part of `gemm_tile` that sums over `steps` K steps, beginning with first_step."""
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, steps):
        k = (first_step + i) * BK
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([col, k]).T, acc)
    return acc


@jit
def fragment_offsets(BM: tl.constexpr, BN: tl.constexpr, COLS: tl.constexpr):
    """Return the offsets in memory of the first COLS columns of a partial tile. The tile is stored as consecutive
    fragments of 16 rows x 8 columns, the layout of a warp's tensor cores, so that the warp's threads write and read
    whole lines."""
    r = tl.arange(0, BM)[:, None]
    c = tl.arange(0, COLS)[None, :]
    return r // 16 * (16 * BN) + c // 8 * 128 + r % 16 * 8 + c % 8


@jit(do_not_specialize=("M", "shared_tiles", "tiles_per_helper", "parts", "first_steps"))
def matmul(
    a_desc,
    b_desc,
    out_desc,
    partials,
    epoch,
    ch,
    M,
    N,
    K,
    shared_tiles,
    tiles_per_helper,
    parts,
    first_steps,
    tile,
    GATED: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Compute a [M, K] @ b [N, K]^T without communication. Each program uses one SM, and concurrent kernels use the
    remaining SMs. out_desc and GATED are as in `store_tile`.

    With SHARE the last shared_tiles tiles, which are too few for all programs, are split along K into `parts` parts.
    The program that stores a tile computes the tile's first part, of first_steps K steps. A helper computes one further
    part of each of tiles_per_helper tiles, so that all programs finish at about the same time. The helpers that compute
    the same part read the same K range at the same time, which keeps the operands in L2. Helpers store their parts in
    partials, float32 [parts of helpers, BM, BN], with a counter for each part. A helper increments the counter after
    its stores (release), and the program that waits for the counter (acquire) loads the part after the wait. The helper
    writes the same memory again only in a later launch on the stream.
    """
    a_desc, b_desc, out_desc = tiles_of(a_desc), tiles_of(b_desc), tiles_of(out_desc)
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    BK: tl.constexpr = tile.BK
    GROUP_M: tl.constexpr = tile.GROUP_M
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    whole_tiles = tiles_m * tiles_n - shared_tiles
    for t in tl.range(pid, whole_tiles, tl.num_programs(0), flatten=True):
        tm, tn = grouped_tile(t, tiles_m, tiles_n, GROUP_M)
        acc = gemm_tile(a_desc, b_desc, tm * BM, tn * BN, K, BM, BN, BK)
        store_tile(out_desc, acc, None, tm * BM, tn * BN, N, BM, BN, GATED)
    if SHARE:
        steps = tl.cdiv(K, BK)
        groups = tl.cdiv(shared_tiles, tiles_per_helper)
        # Helpers have lower program numbers than the programs that wait for them. So a GPU with too few free SMs starts
        # the helpers first, and every wait ends.
        helpers = groups * (parts - 1)
        if pid < helpers:
            part = pid // groups
            begin = first_steps + part * (steps - first_steps) // (parts - 1)
            count = first_steps + (part + 1) * (steps - first_steps) // (parts - 1) - begin
            group = pid % groups * tiles_per_helper
            for shared_tile in range(group, min(group + tiles_per_helper, shared_tiles)):
                tm, tn = grouped_tile(whole_tiles + shared_tile, tiles_m, tiles_n, GROUP_M)
                if count > 0:  # always true; without this test ptxas cannot infer it, and serialises wgmmas
                    acc = tile_of_steps(a_desc, b_desc, tm * BM, tn * BN, begin, count, BM, BN, BK)
                    partial = part * shared_tiles + shared_tile
                    store_pairs(partials + partial.to(tl.int64) * (BM * BN) + fragment_offsets(BM, BN, BN), acc)
                    flush_stores(True)
                    tl.atomic_add(ch.counters + partial, 1, sem="release", scope="gpu")
        shared_tile = pid - helpers
        if (shared_tile >= 0) & (shared_tile < shared_tiles) & (first_steps > 0):
            tm, tn = grouped_tile(whole_tiles + shared_tile, tiles_m, tiles_n, GROUP_M)
            acc = tile_of_steps(a_desc, b_desc, tm * BM, tn * BN, 0, first_steps, BM, BN, BK)
            left, right = column_halves(acc, BM, BN)
            for partial in range(shared_tile, shared_tile + shared_tiles * (parts - 1), shared_tiles):
                seen = wait_until(ch.counters + partial, calls_of(ch), ch.guard, partial, -1, "gpu")
                left_half = partials + partial.to(tl.int64) * (BM * BN) + fragment_offsets(BM, BN, BN // 2)
                left += load_pairs(left_half, seen)
                right += load_pairs(left_half + BN // 2 * 16, seen)
            store_halves(out_desc, left, right, tm * BM, tn * BN, BM, BN, GATED)
        end_call(ch, epoch, tl.num_programs(0))
