"""Pieces of a persistent TMA GEMM: out[M, N] = a[M, K] @ b[N, K]^T, 128 x 256 x 64 tiles, 8 warps, at cuBLAS parity.

A kernel composes them: its own tile order, and its own waits around `gemm_tile`. The loop over tiles is flattened
(`tl.range(..., flatten=True)`) so that a tile's epilogue overlaps the next tile's loads, which for short K is worth 14%
(8192 x 2752 x 4096: 576 -> 658 TFLOP/s).

A kernel that tells of its tiles is one loop over the K steps of all of them, written out: it tells of a tile SETTLED
steps into the next one. Right behind the stores it would wait for them, 1.2 us each time, with its tensor cores idle.
(A value carried over the tiles of a flattened loop would do, but Triton 3.6 gave the inner loop the next tile's.)
"""

from typing import NamedTuple

import triton.language as tl

from ..lang.channel import calls_of, end_call
from ..lang.descriptors import tiles_of
from ..lang.intrinsics import flush_stores, load_pairs, store_pairs, wait_until
from ..lang.jit import jit

FLUSHED = tl.constexpr(2)  # K steps by when a tile's stores have usually ended; `flush_stores` waits in any case


class Tile(NamedTuple):
    """Rows and columns of a tile, elements of K a step, and rows of tiles that are walked together (`grouped_tile`).
    TRANS_B: as `second_operand` takes it. SCALED, PROMOTE: of 8-bit operands (scaled_gemm.py), else 0 and False."""

    BM: tl.constexpr
    BN: tl.constexpr
    BK: tl.constexpr
    GROUP_M: tl.constexpr
    TRANS_B: tl.constexpr
    SCALED: tl.constexpr = tl.constexpr(0)
    PROMOTE: tl.constexpr = tl.constexpr(False)


@jit
def grouped_tile(t, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile t of an order that walks GROUP_M tile rows together, column by column, so that both operands stay in L2."""
    per_group = GROUP_M * tiles_n
    first = t // per_group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    r = t % per_group
    return first + r % height, r // height


@jit
def second_operand(b_desc, col, k, TRANS_B: tl.constexpr):
    """[BK, BN] of b^T at (k, col): b_desc has blocks [BN, BK] of b [N, K], or, TRANS_B, [BK, BN] of b^T [K, N]."""
    if TRANS_B:
        block = b_desc.load([k, col])
    else:
        block = b_desc.load([col, k]).T
    return block


@jit
def gemm_tile(
    a_desc, b_desc, row, col, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TRANS_B: tl.constexpr = False
):
    """fp32 [BM, BN] tile at (row, col): rows of `a`, rows of `b` (columns of the product)."""
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a_desc.load([row, k]), second_operand(b_desc, col, k, TRANS_B), acc)
    return acc


@jit
def column_halves(acc, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN] -> its left and right [BM, BN / 2]: half the shared memory in the epilogue."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@jit
def silu(x):
    """x * sigmoid(x), in x's dtype."""
    return x / (1.0 + tl.exp(-x))


@jit
def silu_gate(gate_up, BM: tl.constexpr, BN: tl.constexpr):
    """silu(left half) * right half."""
    gate, up = column_halves(gate_up, BM, BN)
    return silu(gate) * up


@jit
def store_tile(out_desc, acc, bias, row, col, N, BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """Epilogue: acc + bias (or None), or silu(gate) * up, cast and stored by TMA.

    GATED 0: out_desc has [BM, BN / 2] blocks. Else GATED rows of `b` belong to the gate, the next GATED to the up
    projection and so on, BN is 2 or 4 times GATED, and out_desc has [BM, GATED] blocks; `col` and `N` still count rows
    of `b`.
    """
    if bias is not None:
        c = col + tl.arange(0, BN)
        acc += tl.load(bias + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    left, right = column_halves(acc, BM, BN)
    store_halves(out_desc, left, right, row, col, BM, BN, GATED)


@jit
def store_halves(out_desc, left, right, row, col, BM: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """A tile's left and right half, as in `store_tile`."""
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
def part_of_tile(a_desc, b_desc, row, col, first, count, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """`count` K steps of `gemm_tile`, from step `first` on."""
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, count):
        k = (first + i) * BK
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([col, k]).T, acc)
    return acc


@jit
def place_in_slot(BM: tl.constexpr, BN: tl.constexpr, COLS: tl.constexpr):
    """Where the elements of a tile's first COLS columns lie in a slot: 16 rows x 8 columns one after another, the order
    in which a warp's tensor cores leave them, so that its threads write and read whole lines."""
    r = tl.arange(0, BM)[:, None]
    c = tl.arange(0, COLS)[None, :]
    return r // 16 * (16 * BN) + c // 8 * 128 + r % 16 * 8 + c % 8


@jit(do_not_specialize=("M", "shared", "each", "parts", "first"))
def matmul(
    a_desc,
    b_desc,
    out_desc,
    sums,
    turn,
    ch,
    M,
    N,
    K,
    shared,
    each,
    parts,
    first,
    tile,
    GATED: tl.constexpr,
    SHARE: tl.constexpr,
):
    """a [M, K] @ b [N, K]^T, nothing else: on as many SMs as there are programs, for what runs beside it to have the
    rest. out_desc and GATED as in `store_tile`.

    SHARE: the last `shared` tiles, too few for all programs, are cut by K into `parts` parts. The first, of `first` K
    steps, is of the program that ends the tile, each further one of a helper, who has that part of `each` tiles, so
    that all take about as long. All helpers with one part go through the same K at the same time, which keeps the
    operands in L2. sums: fp32 [slots, BM, BN], a slot and a channel for every part of a helper. A helper's stores come
    before its add to the counter (release), which comes before the loads of who waited for it (acquire); it writes the
    slot again only in a later launch on the stream.
    """
    a_desc, b_desc, out_desc = tiles_of(a_desc), tiles_of(b_desc), tiles_of(out_desc)
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    BK: tl.constexpr = tile.BK
    GROUP_M: tl.constexpr = tile.GROUP_M
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    whole = tiles_m * tiles_n - shared
    for t in tl.range(pid, whole, tl.num_programs(0), flatten=True):
        tm, tn = grouped_tile(t, tiles_m, tiles_n, GROUP_M)
        acc = gemm_tile(a_desc, b_desc, tm * BM, tn * BN, K, BM, BN, BK)
        store_tile(out_desc, acc, None, tm * BM, tn * BN, N, BM, BN, GATED)
    if SHARE:
        steps = tl.cdiv(K, BK)
        groups = tl.cdiv(shared, each)
        # Helpers come before those that wait for them: a GPU with too few free SMs starts them first, and every wait
        # ends.
        helpers = groups * (parts - 1)
        if pid < helpers:
            part = pid // groups
            begin = first + part * (steps - first) // (parts - 1)
            count = first + (part + 1) * (steps - first) // (parts - 1) - begin
            for last in range(pid % groups * each, min(pid % groups * each + each, shared)):
                tm, tn = grouped_tile(whole + last, tiles_m, tiles_n, GROUP_M)
                if count > 0:  # it is: said so that ptxas knows that the loop runs; else it serialises the wgmmas
                    acc = part_of_tile(a_desc, b_desc, tm * BM, tn * BN, begin, count, BM, BN, BK)
                    slot = part * shared + last
                    store_pairs(sums + slot.to(tl.int64) * (BM * BN) + place_in_slot(BM, BN, BN), acc)
                    flush_stores(True)
                    tl.atomic_add(ch.counters + slot, 1, sem="release", scope="gpu")
        last = pid - helpers
        if (last >= 0) & (last < shared) & (first > 0):
            tm, tn = grouped_tile(whole + last, tiles_m, tiles_n, GROUP_M)
            acc = part_of_tile(a_desc, b_desc, tm * BM, tn * BN, 0, first, BM, BN, BK)
            left, right = column_halves(acc, BM, BN)
            for slot in range(last, last + shared * (parts - 1), shared):
                seen = wait_until(ch.counters + slot, calls_of(ch), ch.guard, slot, -1, "gpu")
                here = sums + slot.to(tl.int64) * (BM * BN) + place_in_slot(BM, BN, BN // 2)
                left += load_pairs(here, seen)
                right += load_pairs(here + BN // 2 * 16, seen)
            store_halves(out_desc, left, right, tm * BM, tn * BN, BM, BN, GATED)
        end_call(ch, turn, tl.num_programs(0))
