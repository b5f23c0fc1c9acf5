"""The tile-centric primitives (TileLink, Table 3), for use inside a `weft.jit` kernel.

A notify is a release: it covers every earlier store of the program. A wait is an acquire. The tile-level primitives are
built on `channel_notify` and `channel_wait`, which a kernel may call directly if its tiles do not map onto rows. SCOPE
is "gpu" if producer and consumer run on one GPU, else "sys".
"""

import triton
import triton.language as tl

from .channel import calls_of, counters_of
from .intrinsics import flush_stores, release_fence, wait_until
from .jit import jit
from .mapping import channel_arrivals, tile_channels, tile_rank
from .stock import AFTER_FENCE


@jit
def channel_notify(ch, channel, rank, BULK: tl.constexpr = True, SCOPE: tl.constexpr = tl.constexpr("sys")):
    """Release: add one arrival to `channel` of `rank`. BULK: whether the release must also cover bulk (TMA) stores of
    the program."""
    flush_stores(BULK)
    tl.atomic_add(counters_of(ch, rank) + channel, 1, sem="release", scope=SCOPE)


@jit
def channel_broadcast(ch, channel, BULK: tl.constexpr = True):
    """Release: add one arrival to `channel` of every rank at once. BULK: as in `channel_notify`."""
    flush_stores(BULK)
    release_fence("sys")
    r = tl.arange(0, triton.next_power_of_2(ch.world))
    counters = tl.load(ch.peers + r, mask=r < ch.world, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_add(counters + channel, 1, mask=r < ch.world, sem=AFTER_FENCE, scope="sys")


@jit
def channel_wait(ch, channel, arrivals, tile, peer, SCOPE: tl.constexpr = tl.constexpr("sys")):
    """Acquire: block until this rank's `channel` has received `arrivals` notifications in this call. If the wait
    expires, Timeout names `tile` and `peer`."""
    wait_until(ch.counters + channel, calls_of(ch) * arrivals, ch.guard, tile, peer, SCOPE)


@jit
def producer_tile_notify(ch, tile, MODE: tl.constexpr = tl.constexpr("p2p"), BULK: tl.constexpr = True):
    """Notify ranks that this producer tile is done. MODE "p2p" notifies the rank that the tile belongs to (f_R),
    "broadcast" notifies all ranks.

    The tile must be in exactly one channel (`mapping.single`, or a table whose ranges have length one).
    """
    tl.static_assert(MODE == "p2p" or MODE == "broadcast", "MODE must be p2p or broadcast")
    channel, end = tile_channels(ch.mapping, tile)
    tl.device_assert(end == channel + 1, "producer_tile_notify of a tile that lies in several channels")
    if MODE == "broadcast":
        channel_broadcast(ch, channel, BULK)
    else:
        channel_notify(ch, channel, tile_rank(ch.mapping, tile), BULK)


@jit
def consumer_tile_wait(ch, tile, SCOPE: tl.constexpr = tl.constexpr("sys")):
    """Block until every producer tile that this consumer tile needs is done."""
    lo, hi = tile_channels(ch.mapping, tile)
    if ch.mapping.single:
        channel_wait(ch, lo, channel_arrivals(ch.mapping, lo), tile, tile_rank(ch.mapping, tile), SCOPE)
    else:
        for channel in range(lo, hi):
            channel_wait(ch, channel, channel_arrivals(ch.mapping, channel), tile, tile_rank(ch.mapping, tile), SCOPE)


@jit
def peer_tile_notify(ch, tile, rank, BULK: tl.constexpr = True):
    """Notify `rank` that this rank's `tile` is done. Use this primitive between tiles of one operator on different
    ranks (rings). BULK: as in `channel_notify`."""
    channel_notify(ch, tile, rank, BULK)


@jit
def peer_tile_wait(ch, tile, rank):
    """Block until `rank` has notified this rank that its `tile` is done (one arrival per call)."""
    channel_wait(ch, tile, 1, tile, rank)


@jit
def tile_pull_data(addresses, rank, offsets, mask, DTYPE: tl.constexpr):
    """Load elements at `offsets` of `rank`'s copy of a symmetric tensor of DTYPE (`addresses`:
    SymmetricTensor.addresses). The result is 0 where `mask` is False. The load does not order other accesses, so the
    program must wait before it."""
    return tl.load(tl.load(addresses + rank).to(tl.pointer_type(DTYPE)) + offsets, mask=mask, other=0.0)


@jit
def tile_push_data(addresses, rank, offsets, data, mask):
    """Store `data` at `offsets` of `rank`'s copy of a symmetric tensor (`addresses`: SymmetricTensor.addresses), where
    `mask` is True or None. The store does not order other accesses, so the program must notify after it."""
    tl.store(tl.load(addresses + rank).to(tl.pointer_type(data.dtype)) + offsets, data, mask=mask)
