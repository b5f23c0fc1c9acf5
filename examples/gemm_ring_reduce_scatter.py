"""GEMM + reduce-scatter by a ring, in one kernel (TileLink, Figure 4).

Every rank holds x [M, K] and weight [N, K] for its part of the inner dimension, and is to get its M / W rows of the sum
over ranks of x @ weight.T. A tile's running sum travels once round the ring, from rank to rank - 1, and every rank adds
its own partial tile, which it computes just before:

    rank r, stage 0       rows of rank r + 1: own tile ---------------------------> push to rank r - 1, notify
            stage 1       rows of rank r + 2: own tile + what rank r + 1 pushed --> push to rank r - 1, notify
            ...
            stage W - 1   rows of rank r:     own tile + what rank r + 1 pushed --> out

A rank receives a tile once a call, from one rank, so a tile's channel is its number and gets one arrival. The received
tiles are in two halves, used alternately: before a rank pushes into a half in call n + 2, it has taken, in call n + 1, sums
to which every rank had added, and a rank adds to those of call n + 1 after it is done with the half of call n.

Two things keep it from hanging: programs go through the stages in order on every rank, and the loop is not flattened (a
flattened loop waits for the next tile before it tells of this one, and here the waits go round in a circle).

weft's own GEMM + reduce-scatter is no ring: here a sum makes W - 1 hops, one after the other, each rounded to bf16.
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
    """x_desc [M, K], w_desc [N, K], out [M / W, N]. received: two halves [M, N], of `half` elements; buffers: address
    of every rank's. TILES_M, TILES_N: tiles of one rank's rows."""
    W: tl.constexpr = ch.world
    me = wl.rank_of(ch)
    to = (me + W - 1) % W
    base = (tl.load(epoch) & 1) * half
    for t in range(tl.program_id(0), W * TILES_M * TILES_N, tl.num_programs(0)):
        stage = t // (TILES_M * TILES_N)
        owner = (me + 1 + stage) % W
        tm, tn = t // TILES_N % TILES_M, t % TILES_N
        tile = (owner * TILES_M + tm) * TILES_N + tn
        acc = gemm_tile(x_desc, w_desc, (owner * TILES_M + tm) * BM, tn * BN, K, BM, BN, BK)
        at = (tm * BM + tl.arange(0, BM))[:, None] * N + tn * BN + tl.arange(0, BN)[None, :]
        place = base + owner * TILES_M * BM * N + at
        if stage > 0:
            wl.peer_tile_wait(ch, tile, (me + 1) % W)
            acc += tl.load(received + place).to(tl.float32)
        if stage < W - 1:
            wl.tile_push_data(buffers, to, place, acc.to(tl.bfloat16), None)
            wl.peer_tile_notify(ch, tile, to, False)
        else:
            tl.store(out + at, acc.to(tl.bfloat16))
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
        want = torch.einsum("rmk,rnk->mn", xs.float(), ws.float())
        results.append((out, want[world.rank * ROWS : (world.rank + 1) * ROWS]))
    world.synchronize()
    for out, want in results:
        assert (out.cpu().float() - want).norm() < 1e-2 * want.norm()


if __name__ == "__main__":
    from launch import launch

    launch(main)
