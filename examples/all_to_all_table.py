"""All-to-all of any number of rows, then SiLU, in one kernel with TableMapping: the steps between the experts of an MoE layer.

In each call every rank has a different number of rows, perhaps none, for every rank. It stores them into the receivers'
memory, one source after another, and a receiver computes on the rows of a source once all of them have arrived:

    rank s   rows for s + 1 | notify | rows for s + 2 | notify | ...  then, as a receiver: wait for s - 1 | SiLU | ...
    rank d   channel s gets SENT notifies a call, one for each tile that rank s may send, with rows or without

Tables hold what differs from call to call: a tile's rows, the rank that they go to or come from, and the channel. The
number of notifies must not differ (docs/protocol.md, Counters). So every pair of ranks has SENT tiles in every call, and
empty ones are notified too. For the same reason two halves of the memory can be used alternately: in each call every
rank waits for every other.

On emulated ranks:  python examples/all_to_all_table.py --emulated, or weft check examples/all_to_all_table.py
On GPUs:            torchrun --nproc-per-node 8 examples/all_to_all_table.py
"""

import torch
import triton.language as tl

import weft
import weft.lang as wl

MAX_ROWS, COLS = 12, 32  # the most rows from one rank to another, columns
PUSHED, TAKEN = 4, 8  # rows of a tile that is sent, and of one that is computed
SENT = -(-MAX_ROWS // PUSHED)  # tiles that a rank sends to each rank in every call


@weft.jit
def exchange_silu(
    x, lands, buffers, received, out, epoch, to, ch, half, SENDS: tl.constexpr, GETS: tl.constexpr,
    PUSHED: tl.constexpr, TAKEN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Send tiles of x and compute SiLU of received ones. `to` and `ch` are one channel with two mappings: of the tiles sent (rows
    of x, with their first row at the receiver in `lands`) and of those received (rows of `received` and `out`)."""
    base = (tl.load(epoch) & 1) * half
    column = tl.arange(0, COLS)[None, :]
    for tile in range(tl.program_id(0), SENDS, tl.num_programs(0)):  # these wait for nothing, so that all waits end
        lo, hi = wl.tile_rows(to.mapping, tile)
        row = lo + tl.arange(0, PUSHED)[:, None]
        rows = tl.load(x + row * COLS + column, mask=row < hi, other=0.0)
        offsets = base + (tl.load(lands + tile) + row - lo) * COLS + column
        wl.tile_push_data(buffers, wl.tile_rank(to.mapping, tile), offsets, rows, row < hi)
        wl.producer_tile_notify(to, tile, "p2p", False)
    for tile in range(tl.program_id(0), GETS, tl.num_programs(0)):
        wl.consumer_tile_wait(ch, tile)
        lo, hi = wl.tile_rows(ch.mapping, tile)
        row = lo + tl.arange(0, TAKEN)[:, None]
        rows = tl.load(received + base + row * COLS + column, mask=row < hi, other=0.0).to(tl.float32)
        tl.store(out + row * COLS + column, (rows * tl.sigmoid(rows)).to(out.dtype.element_ty), mask=row < hi)
    wl.end_call(ch, epoch, tl.num_programs(0))


def cut(count, rows):
    """Return (first row, row after the last) of as many tiles of `rows` rows as MAX_ROWS rows need; the last may be empty."""
    return [(min(lo, count), min(lo + rows, count)) for lo in range(0, MAX_ROWS, rows)]


def tables(counts, me):
    """Return the tiles (first row, row after the last, rank, channel) that rank `me` sends, their first rows at the receiver, and
    the tiles that it receives. counts[s][d] is the number of rows from rank s to rank d."""
    size, sent, received = len(counts), counts[me], [row[me] for row in counts]
    src_rows = [sum(sent[:d]) for d in range(size)]  # the first row of x for rank d
    dst_rows = [sum(row[d] for row in counts[:me]) for d in range(size)]  # its row at rank d, after lower ranks' rows
    ring = [(me + 1 + i) % size for i in range(size)]  # no two ranks send to the same one at a time
    sends = [(src_rows[d] + lo, src_rows[d] + hi, d, me) for d in ring for lo, hi in cut(sent[d], PUSHED)]
    lands = [dst_rows[d] + lo for d in ring for lo, _ in cut(sent[d], PUSHED)]
    starts = [sum(received[:s]) for s in range(size)]
    gets = [(starts[s] + lo, starts[s] + hi, s, s) for s in ring[::-1] for lo, hi in cut(received[s], TAKEN)]
    return sends, lands, gets


def channel(world, tiles):
    """Return the channel of all calls with these tiles, each in one counter. Arrivals are the same in every call."""
    row_lo, row_hi, rank, counter = zip(*tiles, strict=True)
    columns = (row_lo, row_hi, rank, counter, [c + 1 for c in counter], [SENT] * world.size)
    mapping = wl.TableMapping(*(world.tensor(table, torch.int32) for table in columns))
    return world.channel("rows of a source", world.size, mapping, SENT)


def exchanged(world, x, counts, memory, epoch):
    """Return SiLU of the rows that this rank receives, [rows, COLS], source by source."""
    sends, lands, gets = tables(counts, world.rank)
    out = world.empty((sum(row[world.rank] for row in counts), COLS), x.dtype)
    args = dict(
        x=x, lands=world.tensor(lands, torch.int32), buffers=memory.addresses, received=memory.local, out=out, epoch=epoch,
        to=channel(world, sends), ch=channel(world, gets), half=memory.local[0].numel(), SENDS=len(sends), GETS=len(gets),
        PUSHED=PUSHED, TAKEN=TAKEN, COLS=COLS,
    )  # fmt: skip
    world.launch(exchange_silu, world.sm_count, args, dict(num_warps=4), world.current_stream())
    return out


def main(world):
    size = world.size
    memory = world.symmetric((2, size * MAX_ROWS, COLS), torch.bfloat16, "received")  # two halves, used alternately
    epoch = world.zeros((1,), torch.int32)
    results = []
    for n in range(4):
        draw = torch.Generator().manual_seed(n)
        routed = torch.randint(0, MAX_ROWS + 1, (size, size), generator=draw).tolist()
        xs = [torch.randn(sum(routed[s]), COLS, generator=draw).bfloat16() for s in range(size)]
        counts = world.exchange(routed[world.rank])  # every rank knows only its own
        out = exchanged(world, xs[world.rank].to(world.device), counts, memory, epoch)
        received = [x.split(row)[world.rank] for x, row in zip(xs, counts, strict=True)]
        results.append((out, torch.nn.functional.silu(torch.cat(received).float())))
    world.synchronize()
    for out, expected in results:
        torch.testing.assert_close(out.cpu().float(), expected, rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    from launch import launch

    launch(main)
