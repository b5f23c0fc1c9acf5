"""All-gather + RMSNorm, overlapped: a copy engine pushes shards while a kernel normalises the rows that have arrived.

Run `python FILE --emulated` or `weft check FILE` on emulated ranks, `torchrun --nproc-per-node 8 FILE` on GPUs."""

import torch
import triton.language as tl

import weft
import weft.lang as wl

SHARD, CHUNK, TILE, COLS = 32, 16, 8, 64  # rows of a shard, rows copied at once, rows of a tile, columns


@weft.jit
def rms_norm(x, out, epoch, ch, TILES: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr):
    first_tile = wl.rank_of(ch) * (TILES // ch.world)  # local rows first, then in the order of arrival
    for i in range(tl.program_id(0), TILES, tl.num_programs(0)):
        tile = (first_tile + i) % TILES
        wl.consumer_tile_wait(ch, tile)
        row, _ = wl.tile_rows(ch.mapping, tile)
        offsets = (row + tl.arange(0, TILE))[:, None] * COLS + tl.arange(0, COLS)[None, :]
        rows = tl.load(x + offsets).to(tl.float32)
        scale = tl.rsqrt(tl.sum(rows * rows, axis=1) / COLS + 1e-6)
        tl.store(out + offsets, (rows * scale[:, None]).to(out.dtype.element_ty))
    wl.end_call(ch, epoch, tl.num_programs(0))


def main(world):
    me, size, stream, copies = world.rank, world.size, world.current_stream(), world.side_stream("copy")
    total = size * SHARD
    gathered = world.symmetric((2, total, COLS), torch.bfloat16, "gathered")  # two halves, used alternately
    mapping = wl.StaticMapping.over(total, size, tile_rows=TILE, channel_rows=CHUNK, arrivals=1)
    ch = world.channel("rows arrived", total // CHUNK, mapping, arrivals=1)
    epoch, call = world.zeros((1,), torch.int32), world.zeros((1,), torch.int32)
    results = []
    for n in range(4):
        shards = torch.randn(size, SHARD, COLS, generator=torch.Generator().manual_seed(n)).bfloat16()
        shard, out = shards[me].to(world.device), world.empty((total, COLS), torch.bfloat16)
        world.call(lambda: call.add_(1), [call], [call], stream)  # the number of this call, which its flags take
        world.wait_event(copies, world.record(stream))
        for peer in [(me - i) % size for i in range(size)]:
            on = copies if peer != me else stream  # a copy within a GPU may need SMs: not during the kernel
            for lo in range(0, SHARD, CHUNK):
                row = me * SHARD + lo
                wl.rank_copy_data(world, gathered.peers[peer][n % 2, row : row + CHUNK], shard[lo : lo + CHUNK], on)
                wl.rank_notify(world, ch, row // CHUNK, peer, call, on)
        args = dict(x=gathered.local[n % 2], out=out, epoch=epoch, ch=ch, TILES=total // TILE, TILE=TILE, COLS=COLS)
        world.launch(rms_norm, world.sm_count, args, dict(num_warps=4), stream)
        world.wait_event(stream, world.record(copies))
        results.append((out, torch.nn.functional.rms_norm(shards.view(-1, COLS).float(), (COLS,), eps=1e-6)))
    world.synchronize()
    for out, expected in results:
        torch.testing.assert_close(out.cpu().float(), expected, rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    from launch import launch

    launch(main)
