"""All-to-all of any number of rows, then SiLU, in one kernel, by TableMapping: what an MoE layer does between its experts.

In call n every rank has some rows for every rank, none among them, another number each time. They are stored into the
receiver's memory, one source after another, and it computes on the rows of a source when all of those have come:

    rank s   rows for s + 1 | tell | rows for s + 2 | tell | ...  then, as a receiver: wait for s - 1 | SiLU | ...
    rank d   channel s: SENT tells a call, one for each tile that rank s may send here, with rows or without

What differs from call to call is in tables: a tile's rows, the rank that they go to or come from, the channel. What a
counter is compared with must not differ (docs/protocol.md, Counters), so every pair of ranks has SENT tiles in every call,
and an empty one is notified too. This also lets calls alternate between the two halves of the memory: each rank hears from
each in each call.

On emulated ranks:  python examples/all_to_all_table.py --emulated, or weft check examples/all_to_all_table.py
On GPUs:            torchrun --nproc-per-node 8 examples/all_to_all_table.py
"""

import torch
import triton.language as tl

import weft
import weft.lang as wl

MOST, COLS = 12, 32  # rows from one rank to another at most, columns
PUSHED, TAKEN = 4, 8  # rows of a tile that is sent, and of one that is computed
SENT = -(-MOST // PUSHED)  # tiles that a rank sends to each in every call


@weft.jit
def exchange_silu(
    x, lands, buffers, received, out, epoch, to, ch, half, SENDS: tl.constexpr, GETS: tl.constexpr,
    PUSHED: tl.constexpr, TAKEN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """to, ch: one channel with two mappings, of the tiles sent (rows of x; lands: their first row there) and of those that come
    (rows of `received` and of `out`)."""
    base = (tl.load(epoch) & 1) * half
    column = tl.arange(0, COLS)[None, :]
    for tile in range(tl.program_id(0), SENDS, tl.num_programs(0)):  # these wait for nobody, so the others' waits end
        lo, hi = wl.tile_rows(to.mapping, tile)
        row = lo + tl.arange(0, PUSHED)[:, None]
        rows = tl.load(x + row * COLS + column, mask=row < hi, other=0.0)
        place = base + (tl.load(lands + tile) + row - lo) * COLS + column
        wl.tile_push_data(buffers, wl.tile_rank(to.mapping, tile), place, rows, row < hi)
        wl.producer_tile_notify(to, tile, "p2p", False)
    for tile in range(tl.program_id(0), GETS, tl.num_programs(0)):
        wl.consumer_tile_wait(ch, tile)
        lo, hi = wl.tile_rows(ch.mapping, tile)
        row = lo + tl.arange(0, TAKEN)[:, None]
        rows = tl.load(received + base + row * COLS + column, mask=row < hi, other=0.0).to(tl.float32)
        tl.store(out + row * COLS + column, (rows * tl.sigmoid(rows)).to(out.dtype.element_ty), mask=row < hi)
    wl.end_call(ch, epoch, tl.num_programs(0))


def cut(count, rows):
    """(first row, row after the last) of as many tiles of `rows` rows as MOST rows need, the last of them short or empty."""
    return [(min(lo, count), min(lo + rows, count)) for lo in range(0, MOST, rows)]


def tables(counts, me):
    """Tiles (first row, row after the last, rank, channel) that rank `me` sends, the rows where they land, and tiles that it gets;
    counts[s][d]: rows from rank s to rank d."""
    size, mine, here = len(counts), counts[me], [to[me] for to in counts]
    first = [sum(mine[:d]) for d in range(size)]  # row of x where those for rank d begin
    place = [
        sum(to[d] for to in counts[:me]) for d in range(size)
    ]  # and where they lie there, behind those of lower ranks
    onwards = [
        (me + 1 + i) % size for i in range(size)
    ]  # not all to one rank at a time; taken in the order in which they come
    sends = [(first[d] + lo, first[d] + hi, d, me) for d in onwards for lo, hi in cut(mine[d], PUSHED)]
    lands = [place[d] + lo for d in onwards for lo, _ in cut(mine[d], PUSHED)]
    gets = [(sum(here[:s]) + lo, sum(here[:s]) + hi, s, s) for s in onwards[::-1] for lo, hi in cut(here[s], TAKEN)]
    return sends, lands, gets


def channel(world, tiles):
    """The channel of all calls, and these tiles, each in one counter; arrivals are the same in every call."""
    row_lo, row_hi, rank, counter = zip(*tiles, strict=True)
    by_tile = (row_lo, row_hi, rank, counter, [c + 1 for c in counter], [SENT] * world.size)
    mapping = wl.TableMapping(*(world.tensor(table, torch.int32) for table in by_tile))
    return world.channel("rows of a source", world.size, mapping, SENT)


def exchanged(world, x, counts, memory, epoch):
    """out [rows that come here, COLS]: SiLU of them, source by source."""
    sends, lands, gets = tables(counts, world.rank)
    out = world.empty((sum(to[world.rank] for to in counts), COLS), x.dtype)
    args = dict(
        x=x, lands=world.tensor(lands, torch.int32), buffers=memory.addresses, received=memory.local, out=out, epoch=epoch,
        to=channel(world, sends), ch=channel(world, gets), half=memory.local[0].numel(), SENDS=len(sends), GETS=len(gets),
        PUSHED=PUSHED, TAKEN=TAKEN, COLS=COLS,
    )  # fmt: skip
    world.launch(exchange_silu, world.sm_count, args, dict(num_warps=4), world.current_stream())
    return out


def main(world):
    size = world.size
    memory = world.symmetric((2, size * MOST, COLS), torch.bfloat16, "received")  # two halves, used alternately
    epoch = world.zeros((1,), torch.int32)
    results = []
    for n in range(4):
        draw = torch.Generator().manual_seed(n)
        routed = torch.randint(0, MOST + 1, (size, size), generator=draw).tolist()
        xs = [torch.randn(sum(routed[s]), COLS, generator=draw).bfloat16() for s in range(size)]
        counts = world.exchange(routed[world.rank])  # each rank knows its own; now all know all
        out = exchanged(world, xs[world.rank].to(world.device), counts, memory, epoch)
        come = [x.split(to)[world.rank] for x, to in zip(xs, counts, strict=True)]
        results.append((out, torch.nn.functional.silu(torch.cat(come).float())))
    world.synchronize()
    for out, want in results:
        torch.testing.assert_close(out.cpu().float(), want, rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    from launch import launch

    launch(main)
