"""GEMM + reduce-scatter by a ring, in one kernel (TileLink, Figure 4).

Every rank has x [M, K] and weight [N, K] of its part of the inner dimension, and computes M / W rows of the sum over
ranks of x @ weight.T. A tile's running sum goes round the ring once, from rank to rank - 1, and every rank adds its own
partial tile, which it has just computed:

    rank r, stage 0       rows of rank r + 1: own tile ---------------------------> push to rank r - 1, notify
            stage 1       rows of rank r + 2: own tile + what rank r + 1 pushed --> push to rank r - 1, notify
            ...
            stage W - 1   rows of rank r:     own tile + what rank r + 1 pushed --> out

A rank receives a tile once per call, from one rank, so a tile's channel is its number, with one arrival. Received tiles
are stored in two halves, used alternately. Before a rank pushes into a half in call n + 2, it has received, in call
n + 1, sums to which every rank had added; and a rank adds to the sums of call n + 1 only after it has read the
half of call n.

Two properties prevent a deadlock: programs go through the stages in the same order on every rank, and the loop is not
flattened. A flattened loop waits for the next tile before it notifies this one, and here the waits form a cycle.

weft's own GEMM + reduce-scatter is not a ring: here a sum makes W - 1 hops, one after the other, each rounded to bf16.
This example has run in the emulator only.

On emulated ranks:  python examples/gemm_ring_reduce_scatter.py --emulated, or weft check examples/gemm_ring_reduce_scatter.py
On GPUs:            torchrun --nproc-per-node 8 examples/gemm_ring_reduce_scatter.py
"""

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
import weft.lang as wl
from weft.compute.gemm import gemm_tile

ROWS, N, K = 32, 32, 32  # rows a rank gets, columns, inner dimension of one rank
BM, BN, BK = 16, 16, 16


@weft.jit
def gemm_ring(
    x_desc, w_desc, received, buffers, out, epoch, ch, half, N, K,
    TILES_M: tl.constexpr, TILES_N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [M / W, N] = this rank's rows of the sum of x_desc [M, K] @ w_desc [N, K].T. `received` is two halves [M, N] of `half`
    elements, `buffers` the addresses of all ranks' `received`. TILES_M x TILES_N are the tiles of one rank's rows."""
    W: tl.constexpr = ch.world
    me = wl.rank_of(ch)
    next_rank = (me + W - 1) % W
    base = (tl.load(epoch) & 1) * half
    for t in range(tl.program_id(0), W * TILES_M * TILES_N, tl.num_programs(0)):
        stage = t // (TILES_M * TILES_N)
        owner = (me + 1 + stage) % W
        tm, tn = t // TILES_N % TILES_M, t % TILES_N
        tile = (owner * TILES_M + tm) * TILES_N + tn
        acc = gemm_tile(x_desc, w_desc, (owner * TILES_M + tm) * BM, tn * BN, K, BM, BN, BK)
        out_offsets = (tm * BM + tl.arange(0, BM))[:, None] * N + tn * BN + tl.arange(0, BN)[None, :]
        offsets = base + owner * TILES_M * BM * N + out_offsets
        if stage > 0:
            wl.peer_tile_wait(ch, tile, (me + 1) % W)
            acc += tl.load(received + offsets).to(tl.float32)
        if stage < W - 1:
            wl.tile_push_data(buffers, next_rank, offsets, acc.to(tl.bfloat16), None)
            wl.peer_tile_notify(ch, tile, next_rank, False)
        else:
            tl.store(out + out_offsets, acc.to(tl.bfloat16))
    wl.end_call(ch, epoch, tl.num_programs(0))


def main(world):
    m = world.size * ROWS
    received = world.symmetric((2, m, N), torch.bfloat16, "received")
    ch = world.channel("tile received", m // BM * (N // BN), None)
    epoch, stream = world.zeros((1,), torch.int32), world.current_stream()
    results = []
    for n in range(3):
        draw = torch.Generator().manual_seed(n)
        xs = torch.randn(world.size, m, K, generator=draw).bfloat16()
        ws = torch.randn(world.size, N, K, generator=draw).bfloat16()
        x, w = xs[world.rank].to(world.device), ws[world.rank].to(world.device)
        out = world.empty((ROWS, N), torch.bfloat16)
        args = dict(
            x_desc=TensorDescriptor.from_tensor(x, [BM, BK]), w_desc=TensorDescriptor.from_tensor(w, [BN, BK]),
            received=received.local, buffers=received.addresses, out=out, epoch=epoch, ch=ch, half=m * N, N=N, K=K,
            TILES_M=ROWS // BM, TILES_N=N // BN, BM=BM, BN=BN, BK=BK,
        )  # fmt: skip
        world.launch(gemm_ring, world.sm_count, args, dict(num_warps=4), stream)
        expected = torch.einsum("rmk,rnk->mn", xs.float(), ws.float())
        results.append((out, expected[world.rank * ROWS : (world.rank + 1) * ROWS]))
    world.synchronize()
    for out, expected in results:
        assert (out.cpu().float() - expected).norm() < 1e-2 * expected.norm()


if __name__ == "__main__":
    from launch import launch

    launch(main)
